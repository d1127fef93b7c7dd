"""JaxMARL environments (0.2) by name, with arrays that have an agent axis."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from .._base.hyperparameters import check_takes
from ..errors import UserValueError
from ._env import Array, Env, Observation, check_interface, check_known
from ._episodes import Step, auto_reset
from ._spaces import Box, Discrete, array_shape, count_numbers, make_action_struct

SMAX_SETTINGS = {"see_enemy_actions": True, "walls_cause_death": True, "attack_mode": "closest"}
"""The SMAX settings of JaxMARL's own baselines; `make` can override each of them."""


def make_jaxmarl(name: str, **settings: Any) -> Env:
    """Make one of `jaxmarl.registered_envs`, such as "MPE_simple_spread_v3"; `jaxmarl.make` receives `settings`.

    "SMAX/3m", where "3m" is a map, is played against the built-in opponent with the settings of JaxMARL's baselines.
    """
    import jaxmarl
    from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO

    registered, _, scenario = name.partition("/")
    if registered == "SMAX" and scenario:
        check_known(scenario, "SMAX", MAP_NAME_TO_SCENARIO)
        registered = "HeuristicEnemySMAX"
        settings = {**SMAX_SETTINGS, **settings, "scenario": MAP_NAME_TO_SCENARIO[scenario]}
    else:
        check_known(name, "JaxMARL", jaxmarl.registered_envs)
    try:
        with jax.ensure_compile_time_eval():  # JaxMARL calls JAX to make an environment
            game = jaxmarl.make(registered, **settings)
            if getattr(game, "auto_reset", False) and "auto_reset" not in settings:
                game = jaxmarl.make(registered, **settings, auto_reset=False)
            env = from_jaxmarl(game)
        state, _ = jax.eval_shape(lambda key: env.reset(key, 1), key := jax.random.key(0))
        jax.eval_shape(env.step, key, state, make_action_struct(env.action_space, (1, env.num_agents or 1)))
    except Exception as error:  # an environment with another interface may raise anything
        says = f"{name} cannot be played with the settings {settings} ({type(error).__name__}: {error})"
        remedy = "A wrapper whose reset and step_env return dicts keyed by agent can be passed to envs.from_jaxmarl"
        raise UserValueError(f"{says}. {remedy}") from error
    return env


def from_jaxmarl(env: Any, *, timed_out: Callable[[Any], Array] | None = None) -> Env:
    """Wrap an environment with JaxMARL's interface; dicts keyed by agent become arrays `[N, A, ...]`.

    If agents differ in the size of their observations, these are padded with zeros; if they differ in the number of
    actions, the padding actions are not available. An agent that is `done` before the end of the episode is absent from
    then on, so its `Transition.mask` and its rewards are 0. In SMAX, dead units receive the rewards of their team, so
    they end with the episode, as in JaxMARL's baselines.

    JaxMARL does not distinguish time limits from other ends. In MPE and overcooked, this wrapper treats every end as a
    time limit; in SMAX, only if both sides are alive; in MABrax, only if Brax truncates; elsewhere, never. In
    `switch_riddle`, an agent outside the room has a single available action.

    Args:
        env: the environment.
        timed_out: function of the state in which an episode ended; returns whether a time limit ended it. None means
            the rules above.
    """
    if timed_out is not None:
        check_takes("from_jaxmarl", "timed_out", timed_out, ("state",))
    names = ("name", "agents", "reset", "step_env", "action_space", "observation_space")
    check_interface("from_jaxmarl", env, names, "make an environment with envs.make('jaxmarl:...')")
    if getattr(env, "auto_reset", False):
        lost = "it resets itself, so the final observations of episodes are lost"
        raise UserValueError(f"{env.name}: {lost}: make it with auto_reset=False")
    agents = tuple(env.agents)
    spaces, obs_size = _read_spaces(env)
    discrete = hasattr(spaces[0], "n")
    kinds = {base.__name__ for base in type(env).__mro__}
    options = {agent: space.n for agent, space in zip(agents, spaces, strict=True)} if discrete else {}
    family = next((family for family in FAMILIES if family.base_classes & kinds), _Family())
    most = max(options.values(), default=0)
    limited = discrete and (family.available is not None or len(set(options.values())) > 1)
    over_time = timed_out or functools.partial(family.timed_out, env)

    def observe(obs: dict[str, Array], inner: Any) -> Observation:
        rows = [ravel_pytree(obs[agent])[0].astype(jnp.float32) for agent in agents]
        stacked = jnp.stack([jnp.pad(row, (0, obs_size - row.size)) for row in rows])
        if not limited:
            return Observation(stacked)
        all_of_them = {agent: jnp.ones(n, bool) for agent, n in options.items()}
        given = all_of_them if family.available is None else family.available(env, inner)
        masks = [jnp.asarray(given[agent], bool) for agent in agents]
        return Observation(stacked, jnp.stack([jnp.pad(mask, (0, most - mask.size)) for mask in masks]))

    def reset(key: Array) -> tuple[Any, Observation]:
        """Reset one environment; its state is the game's state and the flags of present agents."""
        obs, inner = env.reset(key)
        return (inner, jnp.ones(len(agents), bool)), observe(obs, inner)

    def step(key: Array, state: Any, action: Array) -> Step:
        inner, alive = state
        by_agent = {agent: action[i] for i, agent in enumerate(agents)}
        obs, inner, reward, done, _ = env.step_env(key, inner, by_agent)
        ended = jnp.asarray(done["__all__"], bool).reshape(())
        gone = jnp.stack([jnp.asarray(done[agent], bool).reshape(()) for agent in agents])
        if family.end_together:
            gone = jnp.broadcast_to(ended, gone.shape)
        died = gone & ~jnp.all(gone)  # at the end of an episode all agents are done
        truncated = ended & jnp.asarray(over_time(inner)) & alive & ~died
        rewards = jnp.stack([jnp.asarray(reward[agent], jnp.float32).reshape(()) for agent in agents])
        return Step(
            (inner, alive & ~gone),
            observe(obs, inner),
            reward=jnp.where(alive, rewards, 0),  # absent agents may still get some
            terminated=(gone | ended | ~alive) & ~truncated,
            truncated=truncated,
            info={} if family.won is None else {"won": family.won(env, inner)},
            mask=None if family.end_together else alive,
        )

    action_space = Discrete(most) if discrete else spaces[0]
    return auto_reset(reset, step, Box((obs_size,)), action_space, num_agents=len(agents))


def _read_spaces(env: Any) -> tuple[list[Any], int]:
    """Return the action spaces of the agents, all of one kind, and the size of the largest observation."""
    try:
        spaces = [env.action_space(agent) for agent in env.agents]
        actions = ["discrete" if hasattr(x, "n") else Box(array_shape("actions", x), x.low, x.high) for x in spaces]
        size = max(count_numbers(env.observation_space(agent)) for agent in env.agents)
    except Exception as error:  # JaxMARL's spaces may raise anything if they need other arguments
        says = "action_space(agent) and observation_space(agent) must return spaces of arrays (or discrete actions)"
        given = f"but they do not ({type(error).__name__}: {error}). Wrap it so that they do"
        raise UserValueError(f"{env.name}: {says}, {given}, and pass it to envs.from_jaxmarl") from error
    if len(set(actions)) > 1:
        listed = ", ".join(f"{agent}: {x}" for agent, x in zip(env.agents, actions, strict=True))
        raise UserValueError(f"{env.name}: actions of agents differ ({listed}); wrap it so that all agree")
    return spaces, size


def _units_alive(env: Any, inner: Any) -> tuple[Array, Array]:
    """Return whether any ally and whether any enemy is alive in a state of SMAX."""
    units = (inner if hasattr(inner, "unit_alive") else inner.state).unit_alive
    return jnp.any(units[: env.num_allies]), jnp.any(units[env.num_allies :])


def _available_in_the_room(env: Any, inner: Any) -> dict[str, Array]:
    """Return the available actions in the riddle, only one for agents outside the room."""
    first = jnp.arange(env.action_space(env.agents[0]).n) == 0
    return {agent: first | (inner.agent_in_room == i) for i, agent in enumerate(env.agents)}


class _Family(NamedTuple):
    """Properties of a family of JaxMARL environments that the environments do not expose.

    The functions take the environment and a state.
    """

    base_classes: frozenset[str] = frozenset()  # their names
    timed_out: Callable[[Any, Any], Any] = lambda env, inner: False  # whether an episode that ended was cut
    end_together: bool = False  # whether the episode ends for all agents at once
    available: Callable[[Any, Any], dict[str, Array]] | None = None  # the available actions by agent, or all
    won: Callable[[Any, Any], Array] | None = None  # whether the episode was won, if it can be won


FAMILIES = (
    _Family(
        frozenset({"SMAX", "EnemySMAX"}),
        timed_out=lambda env, inner: jnp.logical_and(*_units_alive(env, inner)),
        end_together=True,
        available=lambda env, inner: env.get_avail_actions(inner),
        won=lambda env, inner: jnp.greater(*_units_alive(env, inner)),
    ),
    _Family(
        frozenset({"SimpleMPE", "Overcooked", "OvercookedV2"}), timed_out=lambda env, inner: True, end_together=True
    ),
    _Family(frozenset({"MABraxEnv"}), timed_out=lambda env, inner: inner.info["truncation"] > 0, end_together=True),
    _Family(frozenset({"SwitchRiddle"}), end_together=True, available=_available_in_the_room),
)
