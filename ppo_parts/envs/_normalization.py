"""Wrappers that normalize with running statistics, which are part of the environment's state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.checked import checked
from .._base.hyperparameters import check_number
from .._base.moments import Moments, merge_shards
from .._core.shards import split
from ..errors import ShapeError, UserValueError
from ..functional._arguments import POSITIVE
from ..functional._common import unsqueeze
from ._env import Array, Env, Observation, Transition, as_observation, check_env, get_axes
from ._spaces import Box, array_shape, is_discrete, is_image, is_tree, list_spaces, make_space, map_space
from ._wrappers import clip_action, flatten_action, rescale_action, with_observations, with_state


@checked
def prepare(
    env: Env,
    *,
    normalize: bool = False,
    gamma: Any = None,
    rescale: bool = False,
    per_agent: bool = False,
    obs_clip: float | None = None,
) -> Env:
    """Apply PPO's usual wrappers, which clip actions and, with `normalize`, normalize observations and rewards.

    If the actions of a box are not vectors, they are flattened.

    Args:
        env: the environment.
        normalize: whether to apply `normalize_reward` and, if it standardizes anything, `normalize_observation`.
        gamma: the learner's discount, for `normalize_reward`.
        rescale: whether to apply `rescale_action` instead of `clip_action`.
        per_agent: whether each agent has its own statistics; see `normalize_observation`.
        obs_clip: bound of normalized observations, in standard deviations; None is `normalize_observation`'s default.

    Example:
        >>> from ppo_parts import envs
        >>> env = envs.prepare(envs.make("Pendulum-v1"), normalize=True, gamma=.99)
    """
    check_env("prepare", env)
    if not is_discrete(env.action_space):
        env = rescale_action(env) if rescale else clip_action(env)
        if not all(is_discrete(space) or len(space.shape) == 1 for space in list_spaces(env.action_space)):
            env = flatten_action(env)
    if not normalize:
        for name, given in (("per_agent", per_agent or None), ("obs_clip", obs_clip)):
            if given is not None:
                raise UserValueError(f"prepare: {name}={given!r} changes the normalization: set normalize=True")
        return env
    if gamma is None:
        raise UserValueError("prepare: normalize=True needs gamma, the discount of the learner, got None")
    if obs_clip is not None or any(standardized_leaves(env)):
        env = normalize_observation(env, per_agent=per_agent, **({} if obs_clip is None else {"clip": obs_clip}))
    return normalize_reward(env, gamma=gamma, per_agent=per_agent)


def is_standardized(space: Any, tree: Any) -> bool:
    """Return whether the numbers of a space (the observation space or an entry of it) are standardized."""
    integers = np.issubdtype(getattr(space, "dtype", None) or np.float32, np.integer)
    return not is_discrete(space) and not (is_tree(tree) and (integers or is_image(space)))


def standardized_leaves(env: Env) -> list[bool]:
    """Return whether each leaf of an observation is standardized, including privileged leaves."""
    trees = [tree for tree in (env.observation_space, env.privileged_space) if tree is not None]
    return [is_standardized(space, tree) for tree in trees for space in list_spaces(tree)]


@checked
def normalize_observation(env: Env, *, clip: float = 10.0, eps: float = 1e-8, per_agent: bool = False) -> Env:
    r"""Normalize observations with running statistics: :math:`\mathrm{clip}((o-\mu)/\sqrt{\sigma^2+\epsilon}, \pm c)`.

    The statistics are part of the environment's state, and `evaluation` freezes them. Every observation enters them
    before the policy acts on it. The statistics of several shards are merged at the end of a `rollout`.

    A non-finite observation is passed on unchanged, so that the learner counts it, and the step does not enter the
    statistics of its shard. In an `Observation`, `obs` and `privileged` are standardized, except for discrete entries;
    in a `Dict` or `Tuple`, only boxes that are not images and whose dtype (an attribute in Gymnasium) is not an
    integer. With several agents, each agent that is present counts like an environment.

    Args:
        env: environment whose observations are arrays or trees of arrays.
        clip: bound after standardization, in standard deviations, > 0.
        eps: number added to the variance, > 0.
        per_agent: whether each agent has its own statistics, if the agents' observations differ in meaning or size.

    Raises:
        ValueError: if `clip` or `eps` is out of range, if `per_agent` is used without agents, or if several agents have
            a privileged part.

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, details 28 and 29.
    """
    check_env("normalize_observation", env)
    clip = check_number("normalize_observation", "clip", clip, POSITIVE, schedule=False)
    eps = check_number("normalize_observation", "eps", eps, POSITIVE, schedule=False)
    picked = standardized_leaves(env)
    if not any(picked):
        raise UserValueError(f"normalize_observation: {env.observation_space} has nothing to standardize: leave it out")
    axes = 1 if env.num_agents is None else 2
    rows = _rows("normalize_observation", env, per_agent)
    if env.num_agents is not None and env.privileged_space is not None:
        says = f"observations of {env.num_agents} agents have a privileged part ({env.privileged_space})"
        remedy = "set privileged and privileged_space to None, and let a central critic see all agents' observations"
        raise UserValueError(f"normalize_observation: {says}, which has no statistics: {remedy}")

    def standardized_space(tree: Any) -> Any:
        def of_leaf(space: Any) -> Any:
            return Box(array_shape("observations", space), -clip, clip) if is_standardized(space, tree) else space

        return None if tree is None else make_space(map_space(of_leaf, tree))

    def show(state: NormalizedState, obs: Any) -> Any:
        numbers, put = take_numbers(obs, picked, axes)
        x = rows(numbers)
        mean, var, _ = state.moments.of_rows(x.shape[0])
        scaled = jnp.clip((x - mean) / jnp.sqrt(var + eps), -clip, clip)
        scaled = jnp.where(jnp.isfinite(x), scaled, x)  # the learner counts numbers that are not finite
        return put(scaled.reshape(numbers.shape))

    def begin(inner: Any, obs: Any, before: NormalizedState | None) -> NormalizedState:
        x = rows(take_numbers(obs, picked, axes)[0])
        moments = Moments.of(x[0], per_agent) if before is None else before.moments
        return NormalizedState(inner, moments.updated(x))

    def proceed(state: NormalizedState, inner: Any, out: Transition) -> tuple[NormalizedState, Transition]:
        present = out.mask
        if present is not None:  # in the next step, if an agent stays or begins an episode
            begins = unsqueeze(out.episode_ends()[0], present.ndim)
            present = (present & ~(out.terminated | out.truncated)) | begins
        x, _ = take_numbers(out.obs, picked, axes)
        return NormalizedState(inner, state.moments.updated(*jax.tree.map(rows, (x, present)))), out

    def freeze(inner: Env, state: NormalizedState) -> Env:
        frozen = with_observations(inner, lambda obs: show(state, obs))
        return frozen._replace(**spaces, evaluation=lambda later: freeze(inner.evaluation(later), state))

    spaces = {name: standardized_space(getattr(env, name)) for name in ("observation_space", "privileged_space")}
    return with_state(env, begin, proceed, show)._replace(
        **spaces, evaluation=lambda state: freeze(env.evaluation(state.inner), state)
    )


@checked
def normalize_reward(
    env: Env, *, gamma: float | Array, clip: float = 10.0, eps: float = 1e-8, per_agent: bool = False
) -> Env:
    r"""Divide rewards by the running standard deviation of the discounted return, and clip to :math:`\pm c`.

    .. math:: G \leftarrow \gamma G + r, \qquad \hat r = \mathrm{clip}(r / \sqrt{\mathrm{Var}(G) + \epsilon}, \pm c)

    Rewards are not centered, and G starts from 0 in each episode. `evaluation` leaves rewards unscaled. Shards, absent
    agents and non-finite rewards are treated as in `normalize_observation`. With several agents, each agent has its own
    G, and the variance is taken over all of them.

    Args:
        env: any environment.
        gamma: the learner's discount, in [0, 1].
        clip: bound of the scaled reward, > 0.
        eps: number added to the variance, > 0.
        per_agent: whether to divide each agent's rewards by the standard deviation of its own G.

    Raises:
        ValueError: if a number is out of range, or `per_agent` has no agent axis. TypeError: if `gamma` is a schedule.

    Reference: Huang et al. 2022, details 30 and 31; Engstrom et al. 2020, arXiv:2005.12729, section 3.
    """
    check_env("normalize_reward", env)
    rows = _rows("normalize_reward", env, per_agent)
    gamma = check_number("normalize_reward", "gamma", gamma, schedule=False)
    clip = check_number("normalize_reward", "clip", clip, POSITIVE, schedule=False)
    eps = check_number("normalize_reward", "eps", eps, POSITIVE, schedule=False)

    def begin(inner: Any, obs: Any, before: NormalizedState | None) -> NormalizedState:
        running = jnp.zeros(get_axes(env, len(jax.tree.leaves(obs)[0])))
        moments = Moments.of(rows(running)[0], per_agent) if before is None else before.moments
        return NormalizedState(inner, moments, running)

    def proceed(state: NormalizedState, inner: Any, out: Transition) -> tuple[NormalizedState, Transition]:
        running = state.running_return * gamma + out.reward
        moments = state.moments.updated(*jax.tree.map(rows, (running, out.mask)))
        rewards = rows(out.reward)
        variance = moments.of_rows(rewards.shape[0]).var
        reward = jnp.clip(rewards / jnp.sqrt(variance + eps), -clip, clip).reshape(out.reward.shape)
        reward = jnp.where(jnp.isfinite(out.reward), reward, out.reward)  # for the learner to count
        over = out.terminated | out.truncated | ~jnp.isfinite(running)
        running = jnp.where(over if out.mask is None else over | ~out.mask, 0, running)
        return NormalizedState(inner, moments, running), out._replace(reward=reward)

    return with_state(env, begin, proceed)


class ShardMoments(NamedTuple):
    """Moments during a rollout; each shard sees only its own rows, so that devices do not wait for each other.

    Attributes:
        before: the moments of all rows before this rollout.
        since: `[shards, ...]`, the moments of the rows that each shard has seen since.
    """

    before: Moments
    since: Moments

    @staticmethod
    def of(moments: Moments, shards: int) -> ShardMoments:
        """Make the moments at the beginning of a rollout."""
        empty = Moments.of(moments.mean)._replace(seen=jnp.zeros_like(moments.seen))
        return ShardMoments(moments, Moments(*(jnp.broadcast_to(x, (shards, *x.shape)) for x in empty)))

    def updated(self, x: Array, present: Array | None = None) -> ShardMoments:
        """Return the moments after adding the rows of `x`, `[N, ...]`, to those of their shards."""
        rows = jax.tree.map(lambda leaf: split(leaf, len(self.since.seen), 0), (x, present))
        return self._replace(since=jax.vmap(Moments.updated)(self.since, *rows))

    def of_rows(self, number: int) -> Moments:
        """Return, for each of `number` rows, the moments that its shard has seen, `[number, ...]`."""
        each = jax.vmap(Moments.appended, (None, 0))(self.before, self.since)
        return jax.tree.map(lambda x: jnp.repeat(x, number // len(x), axis=0), each)

    def whole(self) -> Moments:
        """Return the moments of all rows at the end of a rollout, with the shards merged."""
        return self.before.appended(merge_shards(self.since))


class NormalizedState(NamedTuple):
    """State of a normalizing wrapper: the state of the inner environment, and running moments."""

    inner: Any
    moments: Any
    running_return: Any = None


def map_moments(f: Callable[[Any], Any], env_state: Any) -> Any:
    """Apply a function to the moments of every normalizing wrapper in the state of an environment."""

    def of_wrapper(x: Any) -> Any:
        return x._replace(inner=map_moments(f, x.inner), moments=f(x.moments)) if isinstance(x, NormalizedState) else x

    return jax.tree.map(of_wrapper, env_state, is_leaf=lambda x: isinstance(x, NormalizedState))


def take_numbers(obs: Any, picked: list[bool], axes: int) -> tuple[Array, Callable[[Array], Any]]:
    """Return the numbers of the picked leaves, `[N, D]` or `[N, A, D]`, and a function that replaces them."""
    whole = as_observation(obs)
    leaves, structure = jax.tree.flatten(whole._replace(available=None))
    if len(leaves) != len(picked):
        says = f"observations have {len(leaves)} arrays, but their spaces {len(picked)}: make them alike (envs.check)"
        raise ShapeError(f"normalize_observation: {says}")
    where = list(itertools.compress(range(len(leaves)), picked))

    def put(x: Array) -> Any:
        ends = itertools.accumulate(math.prod(leaves[i].shape[axes:]) for i in where)
        parts = dict(zip(where, jnp.split(x, list(ends)[:-1], axis=-1), strict=True))
        changed = [parts[i].reshape(leaf.shape) if i in parts else leaf for i, leaf in enumerate(leaves)]
        after = jax.tree.unflatten(structure, changed)._replace(available=whole.available)
        return after if isinstance(obs, Observation) else after.obs

    return jnp.concatenate([leaves[i].reshape(*leaves[i].shape[:axes], -1) for i in where], axis=-1), put


def _rows(where: str, env: Env, per_agent: bool) -> Callable[[Array], Array]:
    """Make a function that merges the environment and agent axes, `[N, A, ...]`, if agents share statistics."""
    if per_agent and env.num_agents is None:
        raise UserValueError(f"{where}: per_agent=True needs an axis of agents, and there is none: leave it out")
    if env.num_agents is None or per_agent:
        return lambda x: x
    return lambda x: x.reshape(-1, *x.shape[2:])
