"""Wrappers for actions, rewards and agents, and helpers for all wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.checked import checked
from ..errors import UserValueError
from ..functional._common import check_arrays
from ._env import Array, Env, Observation, Transition, as_observation, check_env
from ._spaces import Box, array_bounds, is_discrete, make_space, map_space


def clip_action(env: Env) -> Env:
    """Clip the environment's actions to the bounds of its box; the batch keeps the unclipped actions.

    In a `Dict` or `Tuple`, `clip_action`, `rescale_action` and `flatten_action` change only the boxes.
    """
    return _with_actions(env, clip_action, lambda space, low, high: space, jnp.clip)


def rescale_action(env: Env) -> Env:
    r"""Map actions from [-1, 1] linearly to the environment's box: :math:`a \mapsto (l + h) / 2 + a\,(h - l) / 2`.

    :math:`l` and :math:`h` are the bounds of the box, to which the result is clipped. The batch keeps the original
    action. A policy's initial noise then has the same size relative to the box in every environment.

    Raises:
        ValueError: if actions are discrete or integers, or if the bounds are not finite and ordered.
    """

    def make_box(space: Any, low: np.ndarray, high: np.ndarray) -> Box:
        with np.errstate(over="ignore"):
            finite = np.isfinite(np.array([low, high], np.float32)).all()
        if not (finite and (low <= high).all()):
            bounds = f"low={space.low}, high={space.high}"
            raise UserValueError(f"rescale_action: bounds must be finite, with low <= high, got {bounds}")
        return Box(space.shape, -1.0, 1.0)

    def change(action: Array, low: Array, high: Array) -> Array:
        return jnp.clip(low / 2 + high / 2 + (high / 2 - low / 2) * action, low, high)

    return _with_actions(env, rescale_action, make_box, change)


def flatten_action(env: Env) -> Env:
    """Flatten the actions of a box of any shape to vectors, which distributions such as `Normal` need.

    Raises:
        ValueError: if actions are discrete or integers.
    """

    def make_box(space: Any, low: np.ndarray, high: np.ndarray) -> Box:
        return Box((low.size,), low.ravel(), high.ravel())

    def change(action: Array, low: np.ndarray, high: np.ndarray) -> Array:
        return action.reshape(*action.shape[:-1], *low.shape[1:])

    return _with_actions(env, flatten_action, make_box, change)


def clip_reward(env: Env) -> Env:
    """Replace rewards by their sign, as most Atari agents do; episode returns and `evaluation` keep the rewards.

    A reward that is not finite is passed on unchanged, so that the learner counts it.

    Reference: Mnih et al. 2015, doi:10.1038/nature14236, Methods.
    """
    check_env("clip_reward", env)

    def step(key: Array, state: Any, action: Any) -> tuple[Any, Transition]:
        state, out = env.step(key, state, action)
        return state, out._replace(reward=jnp.where(jnp.isfinite(out.reward), jnp.sign(out.reward), out.reward))

    return env._replace(step=step)


@checked
def fold_agents(env: Env, *, agent_id: bool = False) -> Env:
    """Turn N environments of A agents into N * A environments of one agent, so that agents share a policy.

    Single-agent recipes can then be used. Each agent is a separate segment with its own episode return.

    Args:
        env: multi-agent environment.
        agent_id: whether to append the agent's number to its observation, one-hot; an exported policy expects it.

    Raises:
        ValueError: if the environment has no agents, if `agent_id` is used with observations that are not vectors, or,
            from `reset`, if A does not divide its `num_envs`, which counts agents.
    """
    check_env("fold_agents", env)
    if env.num_agents is None:
        raise UserValueError("fold_agents: this environment has one agent already")
    agents, shape = env.num_agents, getattr(env.observation_space, "shape", None)
    if agent_id and (shape is None or len(shape) != 1):
        says = f"agent_id=True appends to vectors, but those of an agent have shape {shape}: flatten them first"
        raise UserValueError(f"fold_agents: {says}")

    def fold(x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), x)

    def unfold(x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, agents, *leaf.shape[1:]), x)

    def each_agent(obs: Any) -> Any:
        obs = as_observation(obs)
        if agent_id:
            obs = obs._replace(obs=with_agent_id(obs.obs))
        return fold(obs.obs if obs.available is None and obs.privileged is None else obs)

    inner = with_observations(env, each_agent)

    def reset(key: Array, num_envs: int) -> tuple[Any, Any]:
        if num_envs % agents:
            counts = "num_envs counts agents (as do the episodes of evaluate)"
            remedy = f"must be a multiple of {agents}, got {num_envs}: give {agents * -(-num_envs // agents)}"
            raise UserValueError(f"fold_agents: {counts}, and {remedy}")
        return inner.reset(key, num_envs // agents)

    def step(key: Array, state: Any, action: Any) -> tuple[Any, Transition]:
        state, out = inner.step(key, state, unfold(action))
        per_agent = ("reward", "terminated", "truncated", "episode_return", "mask")  # others are per environment
        each = {name: fold(getattr(out, name)) for name in per_agent}
        whole = {name: getattr(out, name) for name in ("episode_length", "ended", "info")}
        return state, out._replace(**each, **jax.tree.map(lambda x: jnp.repeat(x, agents, axis=0), whole))

    def observe(state: Any, obs: Any) -> Any:
        of_all = isinstance(obs, Observation) if shape is None else as_observation(obs).obs.ndim == 2 + len(shape)
        if not of_all:
            says = "observe takes the observations of all agents, [N, A, ...], and trees of them in envs.Observation"
            raise UserValueError(f"fold_agents: {says}; to export, put normalize_observation around fold_agents")
        assert inner.observe is not None
        return inner.observe(state, obs)

    return inner._replace(
        reset=reset,
        step=step,
        observation_space=Box((env.observation_space.shape[0] + agents,)) if agent_id else env.observation_space,
        evaluation=lambda state: fold_agents(env.evaluation(state), agent_id=agent_id),
        num_agents=None,
        observe=None if env.observe is None else observe,
        folded=agents,
    )


def with_agent_id(obs: Array) -> Array:
    """Append the agent's number to observations `[..., A, D]` as a one-hot encoding, `[..., A, D + A]`."""
    check_arrays("with_agent_id", obs=obs)
    agents = obs.shape[-2]
    ids = jnp.broadcast_to(jnp.eye(agents, dtype=obs.dtype), (*obs.shape[:-1], agents))
    return jnp.concatenate([obs, ids], axis=-1)


def share_observations(obs: Array) -> Array:
    """Give each agent all agents' observations, `[..., A, A * D]` from `[..., A, D]`, for a central critic."""
    check_arrays("share_observations", obs=obs)
    everybody = obs.reshape(*obs.shape[:-2], 1, -1)
    return jnp.broadcast_to(everybody, (*obs.shape[:-1], everybody.shape[-1]))


def _with_actions(env: Env, wrap: Callable[[Env], Env], make_box: Callable[..., Any], change: Any) -> Env:
    """Change the actions of boxes before they enter the environment.

    `make_box(space, low, high)` returns the space of the policy's actions, and `change(action, low, high)` the
    environment's action; bounds are `[1, ...]`. `wrap` does the same for the evaluation environment.
    """
    where = wrap.__name__
    check_env(where, env)
    if is_discrete(env.action_space):
        raise UserValueError(f"{where} needs a box, but this environment's actions are discrete: leave the wrapper out")

    def bounds(space: Any) -> Iterator[np.ndarray]:
        if np.issubdtype(getattr(space, "dtype", None) or np.float32, np.integer):
            raise UserValueError(f"{where}: {space} has integers, a policy floats: declare a MultiDiscrete")
        return (x[None] for x in array_bounds("actions", space))

    def of_leaf(space: Any, action: Any) -> Any:
        if is_discrete(space):
            return action
        precision = jnp.promote_types(action.dtype, jnp.float32)  # at least float32
        return change(action, *(x.astype(precision) for x in bounds(space)))

    def of_all(action: Any) -> Any:
        return map_space(of_leaf, env.action_space, action)

    act = env.act or (lambda action: action)
    made = map_space(lambda space: space if is_discrete(space) else make_box(space, *bounds(space)), env.action_space)
    return env._replace(
        action_space=make_space(made),
        step=lambda key, state, action: env.step(key, state, of_all(action)),
        act=lambda action: act(of_all(action)),
        evaluation=lambda state: wrap(env.evaluation(state)),
    )


def with_observations(env: Env, change: Callable[[Any], Any]) -> Env:
    """Change the observations that leave the environment."""
    show = lambda state, obs: change(obs)  # noqa: E731
    return with_state(env, lambda inner, *_: inner, lambda _, inner, out: (inner, out), show, lambda state: state)


def with_state(
    env: Env,
    begin: Callable[[Any, Any, Any], Any],
    proceed: Callable[[Any, Any, Transition], tuple[Any, Transition]],
    show: Callable[[Any, Any], Any] | None = None,
    inner: Callable[[Any], Any] = lambda state: state.inner,
) -> Env:
    """Add a wrapper's state around the environment's state; its `evaluation` has no such state.

    `begin(inner, obs, before)` returns the state after a reset (`before` is None) or a restart,
    `proceed(state, inner, out)` state and transition after a step, and `show(state, obs)` changed observations.
    """

    def of_inner(function: Callable[..., Any] | None) -> Any:
        return None if function is None else lambda state, *arguments: function(inner(state), *arguments)

    def shown(state: Any, obs: Any) -> Any:
        return obs if show is None else show(state, obs)

    def begun(before: Any, inner_state: Any, obs: Any) -> tuple[Any, Any]:
        state = begin(inner_state, obs, before)
        return state, shown(state, obs)

    def step(key: Array, state: Any, action: Any) -> tuple[Any, Transition]:
        state, out = proceed(state, *env.step(key, inner(state), action))
        return state, out._replace(obs=shown(state, out.obs), final_obs=shown(state, out.final_obs))

    def observe(state: Any, obs: Any) -> Any:
        return shown(state, obs if env.observe is None else env.observe(inner(state), obs))

    restart = env.restart
    return env._replace(
        reset=lambda key, num_envs: begun(None, *env.reset(key, num_envs)),
        step=step,
        evaluation=of_inner(env.evaluation),
        restart=restart and (lambda key, state: begun(state, *restart(key, inner(state)))),
        observe=of_inner(env.observe) if show is None else observe,
        render=of_inner(env.render),
    )
