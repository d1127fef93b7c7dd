"""Wrappers of environments, and their shared helpers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.checked import checked
from .._base.errors import ShapeError, UserValueError
from .._base.hyperparameters import check_number
from .._base.moments import Moments as Moments
from ..functional._arguments import POSITIVE
from ..functional._common import check_arrays, unsqueeze
from ._env import Array, Env, Observation, Transition, as_observation, check_env, get_axes
from ._moments import NormalizedState
from ._spaces import Box, array_bounds, array_shape, is_discrete, is_image, is_tree, list_spaces, make_space, map_space


def clip_action(env: Env) -> Env:
    """Clip the actions that enter the environment to the bounds of its box; the batch keeps the unclipped actions.

    In a `Dict` or `Tuple`, `clip_action`, `rescale_action` and `flatten_action` change only the boxes.
    """

    return _with_actions(env, clip_action, lambda space, low, high: space, jnp.clip)


def rescale_action(env: Env) -> Env:
    r"""Map actions of [-1, 1] linearly onto the environment's box: :math:`a \mapsto (l + h) / 2 + a\,(h - l) / 2`.

    :math:`l` and :math:`h` are the bounds of the box, to which the result is clipped. The batch keeps the original
    action. A policy's initial noise then has the same size in every environment, relative to the box.

    Raises:
        ValueError: actions are discrete or integers, or the bounds are not finite and in order.
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
    """Make the actions of a box of any shape vectors, as distributions such as `Normal` have them.

    Raises:
        ValueError: actions are discrete or integers.
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
def prepare(
    env: Env,
    *,
    normalize: bool = False,
    gamma: Any = None,
    rescale: bool = False,
    per_agent: bool = False,
    obs_clip: float | None = None,
) -> Env:
    """Apply PPO's usual wrappers: clip actions to their box and, with `normalize`, normalize observations and rewards.

    Actions of a box that is not a vector are flattened.

    Args:
        env: the environment.
        normalize: apply `normalize_observation`, unless observations have nothing to standardize, and
            `normalize_reward`.
        gamma: the learner's discount, for `normalize_reward`.
        rescale: apply `rescale_action` instead of `clip_action`.
        per_agent: each agent has its own statistics; see `normalize_observation`.
        obs_clip: bound of normalized observations, in standard deviations; None: that of `normalize_observation`.

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
    """Return whether the numbers of a space, which is that of observations or a part of it, are standardized."""
    integers = np.issubdtype(getattr(space, "dtype", None) or np.float32, np.integer)
    return not is_discrete(space) and not (is_tree(tree) and (integers or is_image(space)))


def standardized_leaves(env: Env) -> list[bool]:
    """Return whether each leaf of an observation, the privileged ones included, is standardized."""
    trees = [tree for tree in (env.observation_space, env.privileged_space) if tree is not None]
    return [is_standardized(space, tree) for tree in trees for space in list_spaces(tree)]


@checked
def normalize_observation(env: Env, *, clip: float = 10.0, eps: float = 1e-8, per_agent: bool = False) -> Env:
    r"""Standardize observations by running statistics: :math:`\mathrm{clip}((o-\mu)/\sqrt{\sigma^2+\epsilon}, \pm c)`.

    The statistics are part of the environment's state, and `evaluation` freezes them. They include every observation
    that the policy acts on, before it acts. With several shards (see `rollout`), those of each are merged at the end of
    a rollout.

    A non-finite observation is passed on unchanged, for the learner to count, and the step does not enter the
    statistics of its shard. In an `Observation`, `obs` and `privileged` are standardized, except for discrete entries;
    in a `Dict` or `Tuple`, only boxes that hold neither images nor integers. With several agents, each counts as an
    environment, unless it is absent.

    Args:
        env: environment whose observations are arrays, or trees of them.
        clip: bound after standardization, in standard deviations, > 0.
        eps: added to the variance, >= 0.
        per_agent: each agent has its own statistics, for agents whose observations differ in meaning or size.

    Raises:
        ValueError: `clip` or `eps` is out of range; `per_agent` without agents; several agents with a privileged part.

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, details 28 and 29.
    """
    check_env("normalize_observation", env)
    clip = check_number("normalize_observation", "clip", clip, POSITIVE, schedule=False)
    eps = check_number("normalize_observation", "eps", eps, schedule=False)
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
        scaled = jnp.where(jnp.isfinite(x), scaled, x)  # the learner counts what is not finite
        return put(scaled.reshape(numbers.shape))

    def begin(inner: Any, obs: Any, before: NormalizedState | None) -> NormalizedState:
        x = rows(take_numbers(obs, picked, axes)[0])
        moments = Moments.of(x[0], per_agent) if before is None else before.moments
        return NormalizedState(inner, moments.updated(x))

    def proceed(state: NormalizedState, inner: Any, out: Transition) -> tuple[NormalizedState, Transition]:
        present = out.mask
        if present is not None:  # in the next step: an agent that stays, or begins an episode
            begins = unsqueeze(out.episode_ends()[0], present.ndim)
            present = (present & ~(out.terminated | out.truncated)) | begins
        x, _ = take_numbers(out.obs, picked, axes)
        return NormalizedState(inner, state.moments.updated(*jax.tree.map(rows, (x, present)))), out

    def freeze(inner: Env, state: NormalizedState) -> Env:
        frozen = with_observations(inner, lambda obs: show(state, obs))
        return frozen._replace(**spaces, evaluation=lambda later: freeze(inner.evaluation(later), state))

    spaces = {name: standardized_space(getattr(env, name)) for name in ("observation_space", "privileged_space")}
    return _with_state(env, begin, proceed, show)._replace(
        **spaces, evaluation=lambda state: freeze(env.evaluation(state.inner), state)
    )


@checked
def normalize_reward(
    env: Env, *, gamma: float | Array, clip: float = 10.0, eps: float = 1e-8, per_agent: bool = False
) -> Env:
    r"""Divide rewards by the running standard deviation of the discounted return; clip to :math:`\pm c`.

    .. math:: G \leftarrow \gamma G + r, \qquad \hat r = \mathrm{clip}(r / \sqrt{\mathrm{Var}(G) + \epsilon}, \pm c)

    Rewards are not centered, and G starts from 0 in each episode. `evaluation` leaves rewards unscaled. Shards, absent
    agents and non-finite rewards are treated as in `normalize_observation`. With several agents, each has its own G,
    and the variance is that of all of them.

    Args:
        env: any environment.
        gamma: the learner's discount, in [0, 1].
        clip: bound of the scaled reward, > 0.
        eps: added to the variance, >= 0.
        per_agent: the rewards of each agent are divided by the deviation of its own G.

    Raises:
        ValueError: a number is out of range; `per_agent` without an axis of agents. TypeError: `gamma` is a schedule.

    Reference: Huang et al. 2022, details 30 and 31; Engstrom et al. 2020, arXiv:2005.12729, section 3.
    """
    check_env("normalize_reward", env)
    rows = _rows("normalize_reward", env, per_agent)
    gamma = check_number("normalize_reward", "gamma", gamma, schedule=False)
    clip = check_number("normalize_reward", "clip", clip, POSITIVE, schedule=False)
    eps = check_number("normalize_reward", "eps", eps, schedule=False)

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
        reward = jnp.where(jnp.isfinite(out.reward), reward, out.reward)  # unchanged, for the learner to count
        over = out.terminated | out.truncated | ~jnp.isfinite(running)
        running = jnp.where(over if out.mask is None else over | ~out.mask, 0, running)
        return NormalizedState(inner, moments, running), out._replace(reward=reward)

    return _with_state(env, begin, proceed)


@checked
def fold_agents(env: Env, *, agent_id: bool = False) -> Env:
    """Turn N environments of A agents into N * A environments of one agent, to share a policy in single-agent recipes.

    Each agent is a separate segment, with its own episode return.

    Args:
        env: multi-agent environment.
        agent_id: append the agent's number to its observation, as a one-hot encoding; an exported policy expects it.

    Raises:
        ValueError: the environment has no agents; `agent_id` for observations that are not vectors; at `reset`, A does
            not divide N.
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
            counts = "num_envs counts agents (as do the episodes of evaluate, and the environment of watch)"
            remedy = f"must be a multiple of {agents}, got {num_envs}: give {agents * -(-num_envs // agents)}"
            raise UserValueError(f"fold_agents: {counts}, and {remedy}")
        return inner.reset(key, num_envs // agents)

    def step(key: Array, state: Any, action: Any) -> tuple[Any, Transition]:
        state, out = inner.step(key, state, unfold(action))
        per_agent = ("reward", "terminated", "truncated", "episode_return", "mask")  # and not for the whole environment
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
    )


def with_agent_id(obs: Array) -> Array:
    """Append the agent's number to observations `[..., A, D]` as a one-hot encoding, `[..., A, D + A]`."""
    check_arrays("with_agent_id", obs=obs)
    agents = obs.shape[-2]
    ids = jnp.broadcast_to(jnp.eye(agents, dtype=obs.dtype), (*obs.shape[:-1], agents))
    return jnp.concatenate([obs, ids], axis=-1)


def share_observations(obs: Array) -> Array:
    """Give each agent all agents' observations, `[..., A, D]` to `[..., A, A * D]`, the input of a central critic."""
    check_arrays("share_observations", obs=obs)
    everybody = obs.reshape(*obs.shape[:-2], 1, -1)
    return jnp.broadcast_to(everybody, (*obs.shape[:-1], everybody.shape[-1]))


def _with_actions(env: Env, wrap: Callable[[Env], Env], make_box: Callable[..., Any], change: Any) -> Env:
    """Change the actions of boxes before they enter the environment.

    `make_box(space, low, high)` returns the space of the policy's actions, and `change(action, low, high)` what enters
    the environment; bounds are `[1, ...]`. `wrap` does the same in the environment of evaluations.
    """
    where = wrap.__name__
    check_env(where, env)
    if is_discrete(env.action_space):
        raise UserValueError(f"{where} needs a box, but this environment's actions are discrete: leave the wrapper out")

    def bounds(space: Any) -> Iterator[np.ndarray]:
        if np.issubdtype(getattr(space, "dtype", None) or np.float32, np.integer):
            raise UserValueError(f"{where}: the actions are integers ({space}), but those of a policy are not")
        return (x[None] for x in array_bounds("actions", space))

    def of_leaf(space: Any, action: Any) -> Any:
        if is_discrete(space):
            return action
        precision = jnp.promote_types(action.dtype, jnp.float32)  # that of actions, and at least that of float32
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
    return _with_state(env, lambda inner, *_: inner, lambda _, inner, out: (inner, out), show, lambda state: state)


def _with_state(
    env: Env,
    begin: Callable[[Any, Any, Any], Any],
    proceed: Callable[[Any, Any, Transition], tuple[Any, Transition]],
    show: Callable[[Any, Any], Any] | None = None,
    inner: Callable[[Any], Any] = lambda state: state.inner,
) -> Env:
    """Put the state of the environment into that of a wrapper, which its `evaluation` does not have.

    `begin(inner, obs, before)` returns the state after a reset (before: None) or a restart, and `proceed(state, inner,
    out)` the state and the transition after a step; `show(state, obs)` changes observations.
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


def take_numbers(obs: Any, picked: list[bool], axes: int) -> tuple[Array, Callable[[Array], Any]]:
    """Return the numbers of the leaves that are picked, `[N, D]` or `[N, A, D]`, and a function that replaces them."""
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
    """Make the function that merges the axes of environments and agents, `[N, A, ...]`, where they share statistics."""
    if per_agent and env.num_agents is None:
        raise UserValueError(
            f"{where}: per_agent={per_agent!r} needs an axis of agents, and there is none: leave it out"
        )
    if env.num_agents is None or per_agent:
        return lambda x: x
    return lambda x: x.reshape(-1, *x.shape[2:])
