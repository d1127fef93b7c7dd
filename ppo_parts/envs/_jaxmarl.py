"""JaxMARL environments (0.2), by name: many agents, as arrays with an axis of agents."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._errors import UserValueError
from .._extras import require_package
from .._trees import without_weak_types
from ..functional._common import unsqueezed
from ._env import AgentsObs, Array, Env, Transition, is_discrete, size, unknown_env

SMAX_SETTINGS = {"see_enemy_actions": True, "walls_cause_death": True, "attack_mode": "closest"}
"""What JaxMARL's own baselines play SMAX with; anything of it can be given anew."""


class AgentsState(NamedTuple):
    """State of N JaxMARL environments with A agents each."""

    inner: Any
    alive: Array
    episode_return: Array
    episode_length: Array


def make_agents(env_id: str, **settings: Any) -> Env:
    """A JaxMARL environment by its name: "MPE_simple_spread_v3", "overcooked", "switch_riddle", "SMAX/3m", ...

    "SMAX/<map>" is the one against the built-in opponent, with the settings of JaxMARL's baselines.

    Args:
        env_id: a name that `jaxmarl.make` knows, or "SMAX/" with the name of a map.
        **settings: handed to `jaxmarl.make`, e.g. `num_agents=3`.

    Raises:
        MissingPackage: JaxMARL is not installed. ValueError: unknown name (the nearest are listed), or an environment
            that does not fit into arrays with an axis of agents.
    """
    with jax.ensure_compile_time_eval():  # JaxMARL computes with JAX as it is imported, and as an environment is made
        made = _made(env_id, settings)
        try:
            env = from_jaxmarl(made)
        except ValueError as error:
            raise UserValueError(f"{env_id} cannot be played. {error}") from error
    try:
        jax.eval_shape(lambda: _one_step(env))
    except Exception as error:  # whatever it raises that has another interface than this adapter's
        raise UserValueError(
            f"{env_id} cannot be stepped like JaxMARL's other environments ({type(error).__name__}: {error}). "
            "Wrap it so that reset and step_env give dicts by the agent's name, and hand that to envs.from_jaxmarl"
        ) from error
    return env


def _one_step(env: Env) -> Transition:
    space = env.action_space
    state, _ = env.reset(jax.random.key(0), 1)
    action = jnp.zeros((1, env.num_agents or 1, *space.shape), jnp.int32 if is_discrete(space) else jnp.float32)
    return env.step(jax.random.key(0), state, action)[1]


def _made(env_id: str, settings: dict[str, Any]) -> Any:
    jaxmarl = require_package("jaxmarl", "marl")
    registered_envs = require_package("jaxmarl.registration", "marl").registered_envs
    name, _, scenario = env_id.partition("/")
    if name == "SMAX" and scenario:
        name, settings = "HeuristicEnemySMAX", {**SMAX_SETTINGS, **settings}
        try:
            smax = require_package("jaxmarl.environments.smax", "marl")
            settings["scenario"] = smax.map_name_to_scenario(scenario)
        except KeyError:
            raise UserValueError(
                f"SMAX has no map {scenario!r}; there are 3m, 2s3z, 25m, 3s5z, ... (see JaxMARL)"
            ) from None
    elif env_id not in registered_envs:
        raise unknown_env(env_id, "JaxMARL", registered_envs)
    try:
        return jaxmarl.make(name, **settings)
    except TypeError as error:
        raise UserValueError(f"JaxMARL makes no {env_id} of the settings {settings}: {error}") from error


def from_jaxmarl(env: Any, *, timed_out: Callable[[Any], Array] | None = None) -> Env:
    """Wrap an environment with JaxMARL's interface: dicts by agent become arrays `[N, A, ...]`.

    Observations of agents that differ in size are padded with zeros, their actions with ones that are not available.
    An agent whose own `done` comes before the episode's is absent from then on: `Transition.mask` is 0. Not so in SMAX,
    where the dead are paid what their team is: they end with the episode, as in JaxMARL's baselines.

    JaxMARL does not tell time limits from other ends. Here all ends are time limits in the MPE and overcooked
    environments, those with both sides alive in SMAX, and none elsewhere. In `switch_riddle` an agent outside the room
    has one available action, as nothing it does counts.

    Args:
        env: the environment.
        timed_out: says that of the state in which an episode ended, instead.
    """
    agents = list(env.agents)
    spaces, observed = _spaces(env)
    discrete = is_discrete(spaces[0])
    if any(is_discrete(space) != discrete for space in spaces):
        raise UserValueError(
            f"{env.name}: some agents have discrete actions and some have not; wrap it so that all agree"
        )
    if not discrete and len({(space.shape, str(space.low), str(space.high)) for space in spaces}) > 1:
        listed = ", ".join(f"{agent} {space.shape}" for agent, space in zip(agents, spaces, strict=True))
        raise UserValueError(f"{env.name}: agents' boxes of actions differ ({listed}); wrap it so that all agree")
    kinds = {base.__name__ for base in type(env).__mro__}
    smax = bool(kinds & {"SMAX", "EnemySMAX"})
    endless = bool(kinds & {"SimpleMPE", "Overcooked", "OvercookedV2"})  # but for the time limit
    riddle = "SwitchRiddle" in kinds
    together = endless or smax or riddle  # all agents end at once; in SMAX the dead, too, are paid what their team is
    options = max(space.n for space in spaces) if discrete else 0
    limited = discrete and (smax or riddle or any(space.n != options for space in spaces))
    if timed_out is None:
        timed_out = _both_sides_alive(env) if smax else _always if endless else _never

    def observation(obs: dict[str, Array], inner: Any) -> AgentsObs:
        rows = [jnp.ravel(obs[agent]).astype(jnp.float32) for agent in agents]
        stacked = jnp.stack([jnp.pad(row, (0, observed - row.size)) for row in rows])
        return AgentsObs(stacked, available(inner) if limited else None)

    def available(inner: Any) -> Array:
        if smax:
            given = env.get_avail_actions(inner)
            rows = [jnp.asarray(given[agent]).astype(bool) for agent in agents]
        elif riddle:  # outside the room nothing can be done
            rows = [(jnp.arange(options) == 0) | (inner.agent_in_room == i) for i in range(len(agents))]
        else:
            rows = [jnp.ones(space.n, bool) for space in spaces]
        return jnp.stack([jnp.pad(row, (0, options - row.size)) for row in rows])

    def reset_one(key: Array) -> tuple[AgentsObs, Any]:
        obs, inner = env.reset(key)
        return observation(obs, inner), without_weak_types(inner)

    def step_one(key: Array, inner: Any, action: Array) -> Any:
        by_agent = {agent: action[i] for i, agent in enumerate(agents)}
        obs, inner, reward, done, _ = env.step_env(key, inner, by_agent)
        rewards = jnp.stack([jnp.asarray(reward[agent], jnp.float32).reshape(()) for agent in agents])
        gone = jnp.stack([jnp.asarray(done[agent], bool).reshape(()) for agent in agents])
        ended = jnp.asarray(done["__all__"], bool).reshape(())
        return observation(obs, inner), without_weak_types(inner), rewards, gone, ended

    def reset(key: Array, num_envs: int) -> tuple[AgentsState, AgentsObs]:
        obs, inner = jax.vmap(reset_one)(jax.random.split(key, num_envs))
        each = (num_envs, len(agents))
        return AgentsState(inner, jnp.ones(each, bool), jnp.zeros(each), jnp.zeros(num_envs, jnp.int32)), obs

    def step(key: Array, state: AgentsState, action: Any) -> tuple[AgentsState, Transition]:
        num_envs = state.episode_length.shape[0]
        step_keys, reset_keys = jax.random.split(key, (2, num_envs))
        final_obs, inner, reward, gone, ended = jax.vmap(step_one)(step_keys, state.inner, action)
        cut = ended & jax.vmap(timed_out)(inner)
        info = {"won": jax.vmap(_won(env))(inner)} if smax else {}
        first_obs, fresh = jax.vmap(reset_one)(reset_keys)

        def now(new: Array, old: Array) -> Array:
            return jnp.where(unsqueezed(ended, old.ndim), new, old)

        obs, inner = jax.tree.map(now, (first_obs, fresh), (final_obs, inner))
        collected, length = state.episode_return + reward, state.episode_length + 1
        if together:
            gone = jnp.broadcast_to(ended[:, None], gone.shape)
        died = gone & ~jnp.all(gone, axis=1, keepdims=True)  # at the end all are done
        truncated = cut[:, None] & state.alive & ~died
        transition = Transition(
            obs=obs,
            reward=reward,
            terminated=(gone | ended[:, None] | ~state.alive) & ~truncated,
            truncated=truncated,
            final_obs=final_obs,
            episode_return=collected,
            episode_length=length,
            mask=None if together else state.alive,
            ended=ended,
            info=info,
        )
        alive = now(jnp.ones_like(gone), state.alive & ~gone)
        return AgentsState(inner, alive, now(jnp.zeros_like(reward), collected), now(0 * length, length)), transition

    observation_space = SimpleNamespace(shape=(observed,))
    action_space = SimpleNamespace(n=options, shape=()) if discrete else spaces[0]
    wrapped = Env(reset, step, observation_space, action_space, lambda state: wrapped, num_agents=len(agents))
    return wrapped


def _spaces(env: Any) -> tuple[list[Any], int]:
    """Of actions, by agent, and the size of the largest observation."""
    try:
        spaces = [env.action_space(agent) for agent in env.agents]
        for space in spaces:
            is_discrete(space) or size(space)
        return spaces, max(size(env.observation_space(agent)) for agent in env.agents)
    except Exception as error:  # whatever JaxMARL's spaces raise that are not asked for as this does
        raise UserValueError(
            f"{env.name}: actions have to be discrete or arrays, and observations arrays, asked for by the agent's "
            f"name, and they are not ({type(error).__name__}: {error}). Wrap it so that they are, and hand that to "
            "envs.from_jaxmarl"
        ) from error


def _always(inner: Any) -> Array:
    return jnp.ones((), bool)


def _never(inner: Any) -> Array:
    return jnp.zeros((), bool)


def _sides(env: Any) -> Callable[[Any], tuple[Array, Array]]:
    """Whether any ally, and any enemy, is alive in a state of SMAX."""

    def alive(inner: Any) -> tuple[Array, Array]:
        units = (inner if hasattr(inner, "unit_alive") else inner.state).unit_alive
        return jnp.any(units[: env.num_allies]), jnp.any(units[env.num_allies :])

    return alive


def _both_sides_alive(env: Any) -> Callable[[Any], Array]:
    return lambda inner: jnp.logical_and(*_sides(env)(inner))


def _won(env: Any) -> Callable[[Any], Array]:
    def won(inner: Any) -> Array:
        allies, enemies = _sides(env)(inner)
        return allies & ~enemies

    return won
