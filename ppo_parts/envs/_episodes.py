"""Functions, shared by all adapters, that count episodes and reset environments where an episode ended."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.batching import cond_any
from .._base.checked import Count, checked
from .._base.hyperparameters import check_takes
from .._base.trees import are_alike, select, without_weak_types
from ..errors import UserTypeError, UserValueError
from ..functional._common import unsqueeze
from ._env import Array, Env, Transition, as_observation, check_field, check_items, check_like
from ._rendering import as_frame
from ._spaces import check_space, list_spaces


class EpisodeState(NamedTuple):
    """State of N environments, with the return `[N]` (or `[N, A]`) and length `[N]` of the current episodes.

    `shared` is the data that all environments share; see `auto_reset`.
    """

    inner: Any
    episode_return: Array
    episode_length: Array
    shared: Any = None

    @classmethod
    def begin(cls, inner: Any, num_envs: int, *agents: int) -> EpisodeState:
        """Make the state after a reset."""
        return cls(without_weak_types(inner), jnp.zeros((num_envs, *agents)), jnp.zeros(num_envs, jnp.int32))

    def advance(self, inner: Any, over: Array, reward: Array, **fields: Any) -> tuple[EpisodeState, Transition]:
        """Count a step; return the next state, whose counts are 0 where an episode is over, and the transition."""
        mask = fields.get("mask")
        total = self.episode_return + (reward if mask is None else jnp.where(mask, reward, 0))
        length = self.episode_length + 1
        out = Transition(reward=reward, episode_return=total, episode_length=length, **fields)
        total, length = select(over, jax.tree.map(jnp.zeros_like, (total, length)), (total, length))
        return EpisodeState(without_weak_types(inner), total, length, self.shared), out


class Step(NamedTuple):
    """The result of a step of one environment, before any reset.

    Attributes:
        state: the next state.
        obs: the observation that followed.
        reward: reward of the step; with agents `[A]`, like `terminated` and `truncated`.
        terminated: whether the step ended the episode.
        truncated: whether a time limit cut the episode; None means that it did not.
        info: numbers by name ("won", for example); see `Transition`.
        mask: `[A]`, True where the agent took part in the step; None means everywhere.
    """

    state: Any
    obs: Any
    reward: Any
    terminated: Any
    truncated: Any = None
    info: Any = {}  # noqa: RUF012 - never written to
    mask: Any = None


@checked
def auto_reset(
    reset: Callable[..., tuple[Any, Any]],
    step: Callable[[Array, Any, Any], Step],
    observation_space: Any,
    action_space: Any,
    *,
    time_limit: Count | None = None,
    reset_ratio: Count = 1,
    render: Callable[[Any], Any] | None = None,
    privileged_space: Any = None,
    zero_sum: bool = False,
    num_agents: Count | None = None,
    shared: Any = None,
) -> Env:
    """Make an `Env` from the functions of one environment, with automatic resets and episode counts.

    New episodes are computed only in steps in which some episode ended (even under `vmap`).

    Args:
        reset: `reset(key) -> (state, obs)`, or `reset(key, shared)`.
        step: `step(key, state, action) -> Step`.
        observation_space, action_space: spaces, as in `Env`.
        time_limit: number of steps after which an episode is truncated; None means that `step` alone decides.
        reset_ratio: r, so that each step computes only `ceil(N / r)` new episodes ("optimistic resets"). If more
            episodes end in the same step, some new ones begin in the same state.
        render: `render(state) -> [H, W, 3]`, an image (uint8) of one environment, made on the host from its state.
        privileged_space, zero_sum: see `Env`.
        num_agents: see `Env`. With agents, an episode ends in a step in which it is terminated or truncated for all of
            them, so `step` must keep returning True for an agent that has left.
        shared: a pytree that all environments share, such as levels with their scores, or a pool of opponents; with
            None, `reset` takes only the key. The state contains it once. Read it with
            `optax.tree.get(state, "shared")`, and replace it with `optax.tree.set(state, shared=...)`; none of your
            fields may have this name. Episodes that begin later see the new one, as does `evaluation(state)`.

    Raises:
        ValueError: if a number is less than 1, or `zero_sum` is True with `num_agents`. TypeError: if `reset` or `step`
            does not accept these arguments, or if a space has no `shape`, `n` or `spaces`. When traced, also if `reset`
            does not return two items, if `step` returns no `Step`, or a state or an observation unlike that of `reset`,
            or if `shared` was replaced by another structure, shape or dtype. ShapeError: when traced, if a reward, flag
            or mask is not one number per agent.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from ppo_parts import envs
        >>> def reset(key):
        ...     return jnp.zeros(()), jnp.zeros(1)
        >>> def step(key, x, action):
        ...     x = x + 2 * action - 1.0
        ...     return envs.Step(x, x[None], reward=x, terminated=x == 3)
        >>> env = envs.auto_reset(reset, step, envs.Box((1,)), envs.Discrete(2), time_limit=10)
        >>> envs.check(env)

    Reference for `reset_ratio`: Matthews et al. 2024, Craftax, arXiv:2402.16801, section 3.
    """
    check_takes("auto_reset", "reset", reset, ("key",) if shared is None else ("key", "shared"))
    check_takes("auto_reset", "step", step, ("key", "state", "action"))
    if render is not None:
        check_takes("auto_reset", "render", render, ("state",))
    check_space("auto_reset", "observation_space", observation_space)
    check_space("auto_reset", "action_space", action_space)
    if privileged_space is not None:
        check_space("auto_reset", "privileged_space", privileged_space)
    if zero_sum and num_agents is not None:
        says = f"must be False with num_agents={num_agents}, because the policy plays both sides of a zero-sum game"
        raise UserValueError(f"{says} in turn", where="auto_reset", argument="zero_sum")
    initial_shared, agents = jax.tree.map(jnp.asarray, shared), () if num_agents is None else (num_agents,)

    def is_observation(x: Any) -> bool:
        """Return whether arrays `[N, ...]` or `[N, A, ...]` have the shapes of the observation space."""
        shapes = [jnp.shape(leaf)[1 + len(agents) :] for leaf in jax.tree.leaves(as_observation(x).obs)]
        return shapes == [tuple(space.shape) for space in list_spaces(observation_space)]

    def new_episodes(key: Array, number: int, shared: Any) -> tuple[Any, ...]:
        def new_episode(key: Array) -> tuple[Any, ...]:
            made = reset(key) if shared is None else reset(key, shared)
            return without_weak_types(check_items("auto_reset", "reset", made, ("state", "obs")))

        return jax.vmap(new_episode)(jax.random.split(key, number))

    def reset_all(key: Array, num_envs: int, shared: Any = initial_shared) -> tuple[EpisodeState, Any]:
        inner, obs = new_episodes(key, num_envs, shared)
        if is_observation(inner) and not is_observation(obs):
            raise UserTypeError("auto_reset: reset must return (state, obs), in this order")
        return EpisodeState.begin(inner, num_envs, *agents)._replace(shared=shared), obs

    def begin(key: Array, ended: Array, old: Any, shared: Any) -> Any:
        number = -(-ended.shape[0] // reset_ratio)
        fresh = new_episodes(key, number, shared)
        if reset_ratio > 1:  # ended episodes get the new ones in turn, starting over
            rows = (jnp.cumsum(ended) - 1) % number
            fresh = jax.tree.map(lambda x: x[rows], fresh)
        swapped = are_alike(fresh[::-1], old)
        remedy = ": reset returns (state, obs), in this order" if swapped else ""
        for name, of_reset, of_step in zip(("a state", "an observation"), fresh, old, strict=True):
            of_one = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
            says = f"auto_reset: step must return {name} like that of reset"
            check_like(says, of_one(of_step), of_one(of_reset), remedy)
        return select(ended, fresh, old)

    def step_one(key: Array, state: Any, action: Any) -> Step:
        out = step(key, state, action)
        if not isinstance(out, Step):
            raise UserTypeError(f"auto_reset: step must return envs.Step(...), got {type(out).__name__}")
        for path, x in jax.tree.leaves_with_path(out):
            if not hasattr(x, "dtype") and not isinstance(x, bool | int | float):
                field = jax.tree_util.keystr(path).removeprefix(".")
                raise UserTypeError(f"auto_reset: step returned {x!r} as {field}, not a number")
        out = without_weak_types(out)
        if out.truncated is None:
            out = out._replace(truncated=jnp.zeros(agents, bool))
        check_field("auto_reset: step", "reward", out.reward, "numbers", agents)
        for name in ("terminated", "truncated", "mask"):
            if name != "mask" or out.mask is not None:
                check_field("auto_reset: step", name, getattr(out, name), "booleans", agents)
        return out

    def step_all(key: Array, state: EpisodeState, action: Any) -> tuple[EpisodeState, Transition]:
        check_like("auto_reset: shared must stay like the one that auto_reset was given", state.shared, initial_shared)
        step_key, reset_key = jax.random.split(key)
        out = jax.vmap(step_one)(jax.random.split(step_key, state.episode_length.shape[0]), state.inner, action)
        reward, terminated, truncated = out.reward.astype(jnp.float32), out.terminated, out.truncated
        if time_limit is not None:
            truncated |= unsqueeze(state.episode_length + 1 >= time_limit, truncated.ndim)
        truncated &= ~terminated
        ended = jnp.all(terminated | truncated, axis=tuple(range(1, truncated.ndim)))
        operands = reset_key, ended, (out.state, out.obs), state.shared
        inner, obs = cond_any(ended, begin, lambda key, ended, old, shared: old, *operands)
        fields = {"obs": obs, "final_obs": out.obs, "terminated": terminated, "truncated": truncated}
        fields |= {"info": out.info, "mask": out.mask, "ended": ended if agents else None}
        return state.advance(inner, ended, reward, **fields)

    def render_first(state: EpisodeState) -> np.ndarray:
        assert render is not None
        return as_frame("auto_reset", render(jax.tree.map(lambda x: x[0], state.inner)))

    def evaluation(state: EpisodeState) -> Env:
        return env if shared is None else env._replace(reset=functools.partial(reset_all, shared=state.shared))

    optional: Any = {"render": render and render_first, "privileged_space": privileged_space, "zero_sum": zero_sum}
    env = Env(reset_all, step_all, observation_space, action_space, evaluation, num_agents, **optional)
    return env
