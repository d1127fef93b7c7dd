"""Environments of JAX packages by name, with one agent, or with an opponent as part of the environment."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from numbers import Number, Real
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._base.checked import Count, checked
from .._base.extras import require_package
from .._base.hyperparameters import check_takes
from .._base.trees import select
from .._core.policy import apply_policy, initial_carry_of, policy_keys
from ..errors import UserTypeError, UserValueError
from ._env import Array, Env, Observation, Transition, as_observation, check_interface, check_known
from ._episodes import EpisodeState, Step, auto_reset
from ._rendering import make_gymnax_renderer, make_mujoco_renderer
from ._spaces import Box, Discrete, MultiDiscrete, make_space


def make_gymnax(name: str, **params: Any) -> Env:
    """Make one of `gymnax.registered_envs`; `params` set fields of `EnvParams`, as in `max_steps_in_episode=200`."""
    gymnax = require_package("gymnax", "envs")
    check_known(name, "gymnax", gymnax.registered_envs)
    inner, env_params = gymnax.make(name)
    return from_gymnax(inner, change_params(name, env_params, params))


def change_params(name: str, env_params: Any, params: dict[str, Any]) -> Any:
    """Return the parameters of an environment (a flax dataclass) with changes."""
    for param, value in params.items():
        if not hasattr(env_params, param):
            raise UserValueError(f"{name} has no parameter {param!r}; it has {', '.join(vars(env_params))}")
        default = getattr(env_params, param)
        if isinstance(default, (int, float)) and not isinstance(value, (Number, np.ndarray, jax.Array)):
            raise UserTypeError(f"{name}: {param} must be a number, such as {default}, got {value!r}")
        if param == "max_steps_in_episode" and isinstance(value, Real) and (value % 1 != 0 or value < 1):
            raise UserValueError(f"{name}: {param} must be an integer of at least 1, got {value!r}")
    return env_params.replace(**params)


def from_gymnax(env: Any, env_params: Any = None) -> Env:
    """Wrap an environment with gymnax's interface; `env_params` are its parameters, by default its `default_params`."""
    names = ("default_params", "reset", "step", "observation_space", "action_space")
    check_interface("from_gymnax", env, names, "make a gymnax environment with envs.make(...)")
    env_params = env.default_params if env_params is None else env_params

    def reset(key: Array, num_envs: int) -> tuple[EpisodeState, Any]:
        obs, inner = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key, num_envs), env_params)
        return EpisodeState.begin(inner, num_envs), obs

    def step(key: Array, state: EpisodeState, action: Any) -> tuple[EpisodeState, Transition]:
        keys = jax.random.split(key, state.episode_length.shape[0])
        stepped = jax.vmap(env.step, in_axes=(0, 0, 0, None))(keys, state.inner, action, env_params)
        if len(stepped) != 6 or "final_observation" not in stepped[-1]:
            expected = '(obs, state, reward, terminated, truncated, info), with info["final_observation"]'
            says = f"from_gymnax: step must return {expected}, but it returned {len(stepped)} items"
            raise UserTypeError(f"{says}: update the environment to gymnax 1.0")
        obs, inner, reward, terminated, truncated, info = stepped
        ends = {"terminated": terminated, "truncated": truncated, "final_obs": info["final_observation"]}
        return state.advance(inner, terminated | truncated, reward.astype(jnp.float32), obs=obs, **ends)

    space = copy.copy(env.observation_space(env_params))
    if jnp.issubdtype(getattr(space, "dtype", float), jnp.integer):  # Catch declares integers but returns floats
        space.dtype = jax.eval_shape(env.reset, jax.random.key(0), env_params)[0].dtype
    render = make_gymnax_renderer(env, env_params)
    wrapped = Env(reset, step, space, env.action_space(env_params), lambda state: wrapped, render=render)
    return wrapped


CRAFTAX = ("Craftax-Symbolic-v1", "Craftax-Pixels-v1", "Craftax-Classic-Symbolic-v1", "Craftax-Classic-Pixels-v1")


def make_craftax(name: str, *, reset_ratio: int = 16, **params: Any) -> Env:
    """Make an environment of Craftax; `params` set fields of its `EnvParams`, as in `max_timesteps=1000`.

    An episode that ends only because of `max_timesteps` is truncated. `achievements` is the number of achievements that
    an episode unlocked. Generating a world takes much longer than a step, so by default N environments generate only N
    / 16 worlds per step (`reset_ratio` of `auto_reset`), as in the baselines of Craftax.
    """
    from craftax.craftax_env import make_craftax_env_from_name

    check_known(name, "Craftax", CRAFTAX)
    env = make_craftax_env_from_name(name, auto_reset=False)
    env_params = change_params(name, env.default_params, params)

    def reset(key: Array) -> tuple[Any, Array]:
        obs, state = env.reset(key, env_params)
        return state, obs

    def step(key: Array, state: Any, action: Array) -> Step:
        obs, state, reward, done, _ = env.step(key, state, action, env_params)
        terminated = env.is_terminal(state.replace(timestep=jnp.zeros_like(state.timestep)), env_params)
        info = {"achievements": jnp.sum(state.achievements)}
        return Step(state, obs, reward, terminated, done, info)

    spaces = env.observation_space(env_params), env.action_space(env_params)
    return auto_reset(reset, step, *spaces, reset_ratio=reset_ratio)


def make_xminigrid(name: str, *, reset_ratio: int = 1, **params: Any) -> Env:
    """Make one of `xminigrid.registered_environments()`; `params` set fields of its `EnvParams`, as in `view_size=5`.

    Observations are the grid in view, `[V, V, 2]`, with the numbers of each tile and its color. An episode that ends
    with a discount of 0 is terminated; otherwise it is truncated.
    """
    import xminigrid

    check_known(name, "XLand-MiniGrid", xminigrid.registered_environments())
    env, env_params = xminigrid.make(name)
    env_params = change_params(name, env_params, params)
    shape = env.observation_shape(env_params)
    if not isinstance(shape, tuple):
        raise UserValueError(f"{name} has observations {shape}, but this adapter is for arrays: write one for it")

    def reset(key: Array) -> tuple[Any, Array]:
        timestep = env.reset(env_params, key)
        return timestep, timestep.observation

    def step(key: Array, timestep: Any, action: Array) -> Step:
        timestep = env.step(env_params, timestep, action)
        over = timestep.last()
        return Step(timestep, timestep.observation, timestep.reward, over & (timestep.discount == 0), over)

    return auto_reset(reset, step, Box(shape), Discrete(env.num_actions(env_params)), reset_ratio=reset_ratio)


def make_jumanji(name: str, *, reset_ratio: int = 1, **settings: Any) -> Env:
    """Make one of `jumanji.registered_environments()`; its constructor receives `settings`, such as `time_limit=500`.

    Observations are a `Dict` of all entries except the action mask, as float32. Several simultaneous choices become one
    action per combination or, if each has its own mask, a `MultiDiscrete`. An episode that ends with a discount of 0 is
    terminated; otherwise it is truncated.
    """
    import jumanji

    check_known(name, "Jumanji", jumanji.registered_environments())
    env: Any = jumanji.make(name, **settings)
    choices = tuple(jnp.ravel(getattr(env.action_spec, "num_values", jnp.zeros(0))).tolist())
    _, first = jax.eval_shape(env.reset, jax.random.key(0))
    mask = getattr(first.observation, "action_mask", None)
    shape = choices if mask is None else mask.shape
    if first.reward.shape or not choices or shape not in (choices, (len(choices), *set(choices))):
        raise UserValueError(f"{name} has several agents, or actions {env.action_spec}: write an adapter for it")
    combined = shape == choices  # one mask for all combinations, else one per choice

    def get_entries(x: Any) -> Any:
        names = getattr(x, "_fields", getattr(x, "__dataclass_fields__", None))
        if names is None:
            return jnp.asarray(x, jnp.float32)
        return {name: get_entries(getattr(x, name)) for name in names if name != "action_mask"}

    def observe(observation: Any) -> Observation:
        if mask is None:
            return Observation(get_entries(observation))
        available = observation.action_mask.reshape((1, -1) if combined else shape)
        available |= ~jnp.any(available, axis=1, keepdims=True)  # a trapped snake must act and dies
        return Observation(get_entries(observation), jnp.ravel(available))

    def reset(key: Array) -> tuple[Any, Any]:
        state, timestep = env.reset(key)
        return state, observe(timestep.observation)

    def step(key: Array, state: Any, action: Array) -> Step:
        indices = jnp.unravel_index(action, choices) if combined else action
        state, out = env.step(state, indices[0] if len(choices) == 1 else jnp.stack(indices))
        return Step(state, observe(out.observation), out.reward, out.last() & (out.discount == 0), out.last())

    obs = jax.eval_shape(lambda: reset(jax.random.key(0))[1].obs)
    space = make_space(jax.tree.map(lambda x: Box(x.shape), obs))
    actions = Discrete(math.prod(choices)) if combined else MultiDiscrete(choices)
    return auto_reset(reset, step, space, actions, reset_ratio=reset_ratio)


def make_brax(name: str, *, time_limit: int = 1000, reset_ratio: int = 1, **settings: Any) -> Env:
    """Make an environment of `brax.envs`; its constructor receives `settings`, such as `backend="spring"`."""
    from brax import envs

    check_known(name, "Brax", envs._envs)
    return from_brax(envs.get_environment(name, **settings), time_limit=time_limit, reset_ratio=reset_ratio)


@checked
def from_brax(
    env: Any,
    *,
    time_limit: int | None,
    reset_ratio: int = 1,
    obs_key: str = "state",
    critic_obs_key: str | None = None,
    action_repeat: Count = 1,
) -> Env:
    """Wrap an environment whose `reset(key)` and `step(state, action)` return a state with obs, reward and done.

    Args:
        env: a `brax.envs.Env`, or one of MuJoCo Playground, without wrappers.
        time_limit, reset_ratio: as in `auto_reset`; `time_limit` counts actions.
        obs_key: name of the entry that the policy sees, if observations are a dict.
        critic_obs_key: name of the entry that the critic sees, such as "privileged_state"; None means the policy's.
        action_repeat: number of steps of `env` for which each action is repeated; their rewards are summed.
    """
    names = ("reset", "step", "action_size")
    check_interface("from_brax", env, names, "make an environment with envs.make('brax:...')")

    def observe(state: Any) -> Any:
        named = isinstance(state.obs, Mapping)
        entries = state.obs if named else {"state": state.obs}
        for argument, key in (("obs_key", obs_key), ("critic_obs_key", critic_obs_key)):
            if key is not None and key not in entries:
                has = f"have the entries {', '.join(entries)}" if named else "are a single array: leave it out"
                raise UserValueError(f"{argument}={key!r}: the observations {has}")
        if critic_obs_key is None:
            return entries[obs_key]
        return Observation(entries[obs_key], privileged=entries[critic_obs_key])

    def reset(key: Array) -> tuple[Any, Any]:
        state = env.reset(key)
        return state, observe(state)

    def step(key: Array, state: Any, action: Array) -> Step:
        def repeat(carry: Any, _: None) -> Any:
            state, reward = carry
            after, over = env.step(state, action), state.done > 0
            return (select(over, state, after), reward + jnp.where(over, 0, after.reward)), None

        if action_repeat == 1:
            state = env.step(state, action)
            return Step(state, observe(state), state.reward, state.done > 0)
        (state, reward), _ = jax.lax.scan(repeat, (state, jnp.zeros_like(state.reward)), length=action_repeat)
        return Step(state, observe(state), reward, state.done > 0)

    model = getattr(env, "mj_model", getattr(getattr(env, "sys", None), "mj_model", None))  # Playground's, or Brax's
    obs, _, privileged = as_observation(jax.eval_shape(lambda: reset(jax.random.key(0))[1]))
    optional: dict[str, Any] = {
        "render": None if model is None else make_mujoco_renderer(model),
        "privileged_space": None if privileged is None else Box(privileged.shape),
    }
    spaces = Box(obs.shape), Box((env.action_size,), -1.0, 1.0)
    return auto_reset(reset, step, *spaces, time_limit=time_limit, reset_ratio=reset_ratio, **optional)


def make_playground(
    name: str,
    *,
    time_limit: int | None = None,
    reset_ratio: int = 1,
    obs_key: str = "state",
    critic_obs_key: str | None = None,
    impl: str = "jax",
    **overrides: Any,
) -> Env:
    """Make one of `mujoco_playground.registry.ALL_ENVS`; `overrides` change its configuration, as in `ctrl_dt=0.02`.

    The default `time_limit` is the configuration's `episode_length`, divided by its `action_repeat`. `impl="jax"` runs
    on every device; "warp" is faster but runs only on NVIDIA GPUs. See `from_brax` for the other arguments.
    """
    from mujoco_playground import registry

    check_known(name, "MuJoCo Playground", registry.ALL_ENVS)
    config = registry.get_default_config(name)
    if unknown := [override for override in overrides if override not in config]:
        raise UserValueError(f"{name} has no setting {unknown[0]!r}; it has time_limit, {', '.join(config)}")
    config.update({**({"impl": impl} if "impl" in config else {}), **overrides})
    repeat = config.get("action_repeat", 1)  # Playground's training wrapper applies it
    limit = -(-config.episode_length // repeat) if time_limit is None else time_limit
    settings: Any = {"reset_ratio": reset_ratio, "obs_key": obs_key, "critic_obs_key": critic_obs_key}
    return from_brax(registry.load(name, config=config), time_limit=limit, action_repeat=repeat, **settings)


Opponent = Callable[[Array, Observation], Array]
"""`opponent(key, obs) -> action`, for one observation."""


def make_pgx(
    name: str,
    *,
    opponent: Opponent | Literal["self"] | None = None,
    time_limit: int | None = None,
    reset_ratio: int = 1,
) -> Env:
    """Make one of `pgx.available_envs()` with one or two players; the policy plays one or both of them.

    The player who begins is drawn at random in each episode. Without an `opponent`, the opponent draws legal actions
    uniformly. With "self", the policy plays both sides (`Env.zero_sum`), and is evaluated against uniform actions.
    `won` tells whether the policy won or, with "self", the first player.
    """
    import pgx

    check_known(name, "Pgx", pgx.available_envs())
    env = pgx.make(name)
    if env.num_players > 2:
        raise UserValueError(f"{name} has {env.num_players} players, but this adapter is for one or two")
    if opponent is not None and env.num_players == 1:
        raise UserValueError(f"{name} has one player, so there is no opponent: leave out opponent={opponent!r}")
    both = opponent == "self"
    if callable(opponent):
        check_takes(name, "opponent", opponent, ("key", "obs"))
    elif not (opponent is None or both):
        must = 'opponent must be "self", None or a function (key, obs) -> action'
        raise UserValueError(f"{name}: {must}, got {opponent!r}")
    choose_action: Opponent = opponent if callable(opponent) else random_opponent

    def observe(state: Any) -> Observation:
        return Observation(state.observation.astype(jnp.float32), state.legal_action_mask)

    def let_opponent_move(key: Array, state: Any) -> tuple[Any, Array]:
        """Let the opponent move until it is the turn of player 0; return the reward of player 0 since its move."""
        if env.num_players == 1 or both:
            return state, state.rewards[0]

        def waits(carry: Any) -> Array:
            _, state, _ = carry
            return (state.current_player != 0) & ~state.terminated & ~state.truncated

        def wait(carry: Any) -> Any:
            key, state, reward = carry
            key, action_key, step_key = jax.random.split(key, 3)
            state = env.step(state, choose_action(action_key, observe(state)), step_key)
            return key, state, reward + state.rewards[0]

        return jax.lax.while_loop(waits, wait, (key, state, state.rewards[0]))[1:]

    def sign(state: Any) -> Array:
        return 1.0 - 2.0 * state.current_player

    def reset(key: Array) -> tuple[Any, Observation]:
        key, others_key = jax.random.split(key)
        state, _ = let_opponent_move(others_key, env.init(key))
        return state, observe(state)

    def step(key: Array, state: Any, action: Array) -> Step:
        key, others_key = jax.random.split(key)
        moved = sign(state)
        state, reward = let_opponent_move(others_key, env.step(state, action, key))
        info = {"won": reward > 0} if env.num_players > 1 else {}
        info |= {"seat": moved, "next_seat": sign(state)} if both else {}
        return Step(state, observe(state), reward, state.terminated, state.truncated, info)

    spaces = Box(tuple(env.observation_shape)), Discrete(env.num_actions)
    game = auto_reset(reset, step, *spaces, zero_sum=both, time_limit=time_limit, reset_ratio=reset_ratio)
    if not both:
        return game
    against_random = make_pgx(name, time_limit=time_limit, reset_ratio=reset_ratio)
    return game._replace(evaluation=lambda state: against_random)


def random_opponent(key: Array, obs: Observation) -> Array:
    """Draw a legal action uniformly."""
    return jax.random.categorical(key, jnp.where(obs.available, 0.0, -jnp.inf)).astype(jnp.int32)


def frozen_opponent(policy: Any, params: Any) -> Opponent:
    """Make an opponent for `envs.make("pgx:...", opponent=...)` from a policy without memory."""
    if initial_carry_of(policy) is not None:
        raise UserValueError("frozen_opponent: a policy with memory needs its state; give one without memory")

    def act(key: Array, obs: Observation) -> Array:
        one, own = jax.tree.map(lambda x: x[None], obs), policy_keys(policy, key, 1)
        return apply_policy(policy, params, one, keys=own).distribution.sample(seed=key)[0]

    return act
