"""The environment protocol, and wrappers that follow it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._errors import UserTypeError, UserValueError
from .._hyperparameters import count, number
from ..functional import ShapeError

Array = jax.Array


class Transition(NamedTuple):
    """The result of a step of N environments; every leaf begins with `[N]`.

    With many agents `obs`, `reward`, `terminated`, `truncated`, `final_obs` and `episode_return` begin with `[N, A]`.

    Attributes:
        obs: the next observation of the policy; where an episode just ended, the first of a new episode.
        reward: reward of this step.
        terminated: True where the step ended the episode.
        truncated: True where a time limit cut the episode.
        final_obs: the observation that actually followed; equals `obs` unless the episode ended.
        episode_return: sum of the unscaled rewards of the episode so far, including this step.
        episode_length: number of steps of the episode so far, including this step.
        mask: `[N, A]`, True where the agent took part in this step; None: everywhere.
        ended: `[N]`, True where the episode ended for all its agents; None: `terminated | truncated`.
        info: numbers `[N]` about the episode, by name ("won", for example), which are read where it ended.
    """

    obs: Any
    reward: Array
    terminated: Array
    truncated: Array
    final_obs: Any
    episode_return: Array
    episode_length: Array
    mask: Any = None
    ended: Any = None
    info: Any = {}  # noqa: RUF012 - never written to

    def episode_ends(self) -> tuple[Array, Array]:
        """Return where an episode ended, and where a time limit was the reason, both `[N]`."""
        if self.ended is None:
            return self.terminated | self.truncated, self.truncated & ~self.terminated
        return self.ended, self.ended & jnp.any(self.truncated.reshape(self.ended.shape[0], -1), axis=1)

    def check(self, obs: Any, each: tuple[int, ...]) -> None:
        """Raise unless every field is valid; this costs nothing at run time, because it checks only shapes and dtypes.

        Args:
            obs: the observation of the previous step.
            each: `(N,)`, or `(N, A)` with many agents.

        Raises:
            UserTypeError, ShapeError: names the first invalid field, and what it must be.
        """
        where = "Transition"
        for name, tree in {"obs": self.obs, "final_obs": self.final_obs}.items():
            if _described(tree) != _described(obs):
                raise UserTypeError(
                    f"{where}: {name} must be like the observation before, {_described(obs)}, got {_described(tree)}"
                    + FINAL_OBS * (name == "final_obs")
                )
        for leaf in jax.tree.leaves(obs):
            if leaf.shape[: len(each)] != each:
                raise ShapeError(f"{where}: obs must begin with the axes {each}, got shape {leaf.shape}")
        whole, flags = (each[0],), ("terminated", "truncated", "mask", "ended")
        fields = {"reward": each, "episode_return": each, "episode_length": whole, "terminated": each}
        fields |= {"truncated": each, "mask": each, "ended": whole}
        for name, shape in fields.items():
            x = getattr(self, name)
            if x is None and name in ("mask", "ended"):
                continue
            if not hasattr(x, "dtype"):
                raise UserTypeError(f"{where}: {name} must be an array of shape {shape}, got {x!r}")
            if x.shape != shape:
                raise ShapeError(f"{where}: {name} must have shape {shape}, got {x.shape}")
            if name in flags and x.dtype != bool:
                raise UserTypeError(
                    f"{where}: {name} must be boolean, got {x.dtype}: return a comparison, such as {name} > 0"
                )
            if name in ("reward", "episode_return") and not jnp.issubdtype(x.dtype, jnp.floating):
                raise UserTypeError(f"{where}: {name} must be floating, got {x.dtype}: {name}.astype(jnp.float32)")
        for name, x in self.info.items():
            if jnp.shape(x) != whole:
                raise ShapeError(f"{where}: info[{name!r}] must have shape {whole}, got {jnp.shape(x)}")


FINAL_OBS = ". It is the observation that followed, before any reset; where no episode ended it equals obs"


def _described(tree: Any) -> str:
    """Describe a pytree by the shapes and dtypes of its leaves."""
    words = jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}" if _is_array(x) else repr(x), tree)
    return words if isinstance(words, str) else repr(words)


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") or isinstance(x, (bool, int, float))


class AgentsObs(NamedTuple):
    """Observations of A agents: `obs` `[..., A, D]`, and `available` `[..., A, n]`, True where an action may be taken.

    `available` is None if all actions always may be taken. Otherwise apply it with
    `ppo_parts.distributions.mask_logits`.
    """

    obs: Array
    available: Any = None


class Env(NamedTuple):
    """N environments that pure functions step together, with automatic resets.

    Attributes:
        reset: `reset(key, num_envs) -> (state, obs)`.
        step: `step(key, state, action) -> (state, Transition)`.
        observation_space, action_space: spaces of one environment; `Discrete` has `n`, `Box` has `low`, `high` and
            `shape`.
        evaluation: `evaluation(state) -> Env`, the environment to evaluate in: running statistics are frozen as in
            `state`, and rewards are unscaled.
        num_agents: A, if observations, rewards and ends have an axis of agents; None: one agent, without that axis.
        restart: `restart(key, state) -> (state, obs)` begins new episodes and keeps running statistics, where a state
            from a checkpoint cannot be continued, as on the host; None: every state can be.
        observe: `observe(state, obs) -> obs`, what wrappers make of an observation `[N, ...]` of the innermost
            environment, with the running statistics in `state`; None: they do not change it.
        render: `render(state) -> [H, W, 3]`, a picture (uint8) of the first of the N environments, made on the host;
            None: there are no pictures.
    """

    reset: Callable[[Array, int], tuple[Any, Any]]
    step: Callable[[Array, Any, Any], tuple[Any, Transition]]
    observation_space: Any
    action_space: Any
    evaluation: Callable[[Any], Any]
    num_agents: int | None = None
    restart: Callable[[Array, Any], tuple[Any, Any]] | None = None
    observe: Callable[[Any, Any], Any] | None = None
    render: Callable[[Any], Any] | None = None


def check(env: Env, num_envs: int = 2, action: Any = None) -> None:
    """Raise if an environment of your own does not follow the protocol; the error names the field and the remedy.

    The environment is traced but not run: this checks every shape and dtype of `reset`, `step` and `evaluation`.

    Args:
        env: the environment.
        num_envs: N to check with.
        action: actions of all N environments, leaves `[N, ...]`; None: zeros of the action space.

    Raises:
        UserTypeError, ShapeError: names the first violation.

    Example:
        >>> from ppo_parts import envs
        >>> envs.check(envs.make("CartPole-v1"))
        >>> envs.check("CartPole-v1")
        Traceback (most recent call last):
        ...
        ppo_parts.UserTypeError: check: 'CartPole-v1' is not an environment: make one with envs.make(...) or
        envs.Env(...)
    """
    if not isinstance(env, Env):
        raise UserTypeError(f"check: {env!r} is not an environment: make one with envs.make(...) or envs.Env(...)")
    each = (count("check", "num_envs", num_envs),) + (() if env.num_agents is None else (env.num_agents,))
    key = jax.random.key(0)
    state, obs = _pair("reset", jax.eval_shape(lambda key: env.reset(key, num_envs), key))
    if action is None:
        space = env.action_space
        dtype = jnp.int32 if is_discrete(space) else jnp.float32
        action = jax.ShapeDtypeStruct((*each, *(() if is_discrete(space) else space.shape)), dtype)
    after, out = _pair("step", jax.eval_shape(env.step, key, state, action))
    if not isinstance(out, Transition):
        raise UserTypeError(f"check: step must return (state, Transition), got (state, {type(out).__name__})")
    out.check(obs, each)
    if _described(after) != _described(state):
        raise ShapeError(
            "check: step must keep the structure, shapes and dtypes of the state, or no loop can carry it; reset "
            f"returns {_described(state)}, step {_described(after)}"
        )
    shape = getattr(env.observation_space, "shape", None)
    leaves = jax.tree.leaves(obs)
    if shape is not None and len(leaves) == 1 and leaves[0].shape[len(each) :] != tuple(shape):
        raise ShapeError(
            f"check: observation_space has shape {tuple(shape)}, and observations have {leaves[0].shape[len(each) :]}"
        )
    evaluated: list[Any] = []
    jax.eval_shape(lambda key: evaluated.append(env.evaluation(env.reset(key, num_envs)[0])), key)
    if not isinstance(evaluated[0], Env):
        raise UserTypeError(
            f"check: evaluation(state) must return the Env to evaluate in, usually the environment itself; got "
            f"{type(evaluated[0]).__name__}"
        )


def _pair(name: str, returned: Any) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        second = {"reset": "obs", "step": "Transition"}[name]
        got = f"{len(returned)} items" if isinstance(returned, tuple) else type(returned).__name__
        raise UserTypeError(f"check: {name} must return (state, {second}), got {got}")
    return returned


def unknown_env(env_id: Any, library: str, known: Iterable[str]) -> UserValueError:
    """Make the error for an unknown environment; it names similar ones, and whether Gymnasium has the environment."""
    text = f"{env_id!r} is not a {library} environment"
    lowered = {name.lower(): name for name in known}
    near = [lowered[name] for name in difflib.get_close_matches(str(env_id).lower(), lowered, 3, 0.6)]
    if _in_gymnasium(env_id):
        text += (
            ", but one of Gymnasium, which steps on the host: play it with pp.HostRollout in a loop of your own, see "
            "docs/environments.md"
        )
        return UserValueError(text + f"; {library} has {', '.join(near)}" * bool(near))
    return UserValueError(text + (f"; did you mean {', '.join(near)}?" if near else f"; there are {', '.join(known)}"))


def _in_gymnasium(env_id: Any) -> bool:
    try:
        import gymnasium
    except ImportError:
        return False
    return env_id in gymnasium.registry


def is_discrete(space: Any) -> bool:
    """Return whether a space consists of n actions (it has `n`) rather than a box of real numbers."""
    return hasattr(space, "n")


def size(space: Any) -> int:
    """Return how many numbers an element of a space has (1 for `Discrete`).

    Raises:
        ValueError: the space has no shape; for example, a dict or a tuple of spaces.
    """
    if getattr(space, "shape", None) is None:
        raise UserValueError(
            f"{space!r} is not a space of arrays, and this network needs one: flatten it in a wrapper around the "
            "environment, or write a network that takes its parts"
        )
    return math.prod(space.shape)


def clip_action(env: Env) -> Env:
    """Clip the actions that enter the environment to the bounds of its box; the batch keeps the unclipped actions."""
    space = env.action_space
    if is_discrete(space):
        raise UserValueError("clip_action: this environment's actions are discrete, there is nothing to clip")
    size(space)  # raises if actions are not arrays
    low, high = (jnp.broadcast_to(bound, space.shape)[None] for bound in (space.low, space.high))

    def step(key: Array, state: Any, action: Array) -> tuple[Any, Transition]:
        return env.step(key, state, jnp.clip(action, low, high))

    return env._replace(step=step, evaluation=lambda state: clip_action(env.evaluation(state)))


def prepare(env: Env, *, normalize: bool = False, gamma: Any = None) -> Env:
    """Apply PPO's usual wrappers: clip actions to their box and, with `normalize`, normalise observations and rewards.

    Args:
        env: the environment.
        normalize: apply `normalize_observation` and `normalize_reward`.
        gamma: the learner's discount, for `normalize_reward`.

    Example:
        >>> from ppo_parts import envs
        >>> env = envs.prepare(envs.make("Pendulum-v1"), normalize=True, gamma=.99)
    """
    if not is_discrete(env.action_space):
        env = clip_action(env)
    return normalize_reward(normalize_observation(env), gamma=gamma) if normalize else env


class Moments(NamedTuple):
    """Running mean and (population) variance of a stream, and the number of elements so far."""

    mean: Array
    var: Array
    seen: Array

    @staticmethod
    def of(example: Array) -> Moments:
        """Moments of an empty stream: mean 0, variance 1."""
        shape = jnp.shape(example)
        return Moments(jnp.zeros(shape), jnp.ones(shape), jnp.zeros(()))

    def updated(self, x: Array) -> Moments:
        """Return the moments after appending the rows of `x`, `[N, ...]`, to the stream (Chan et al. 1979).

        Numbers that are not finite would never leave the moments, so an `x` that contains any is ignored.
        """
        x = x.astype(jnp.float32)
        mean, var = jnp.mean(x, axis=0), jnp.var(x, axis=0)
        total = self.seen + x.shape[0]
        share = x.shape[0] / total
        delta, old = mean - self.mean, jnp.where(self.seen > 0, self.var, 0)
        # Written as a step from the old variance: float32 cannot count beyond 2**24 elements, and sums would diverge.
        var = old + (var - old + jnp.square(delta) * (1 - share)) * share
        after = Moments(self.mean + delta * share, var, total)
        finite = jnp.all(jnp.isfinite(mean) & jnp.isfinite(var))  # one of them is not finite if an element of x is not
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, self)


class NormalizedState(NamedTuple):
    """State of a normalising wrapper: the state of the inner environment, and running moments."""

    inner: Any
    moments: Moments
    running_return: Any = None


def normalize_observation(env: Env, *, clip: float = 10.0, eps: float = 1e-8) -> Env:
    r"""Standardise observations by running statistics: :math:`\mathrm{clip}((o-\mu)/\sqrt{\sigma^2+\epsilon}, \pm c)`.

    The statistics are part of the environment's state. They include every observation that the policy acts on, before
    it acts, including those of resets. Observations are stored as the policy saw them, so the first ratio of an update
    is 1. `evaluation` freezes the statistics.

    An observation that is not finite is passed on unchanged, for the learner to count, and does not enter the
    statistics.

    Args:
        env: environment with array observations.
        clip: bound after standardisation, in standard deviations, > 0.
        eps: added to the variance, >= 0.

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, details 28 and 29.
    """

    size(env.observation_space)
    _one_agent("normalize_observation", env)
    clip, eps = _constants("normalize_observation", clip, eps)

    def shown(moments: Moments, obs: Array) -> Array:
        scaled = jnp.clip((obs - moments.mean[None]) / jnp.sqrt(moments.var[None] + eps), -clip, clip)
        return jnp.where(jnp.isfinite(obs), scaled, obs)  # the learner counts what is not finite

    def reset(key: Array, num_envs: int) -> tuple[NormalizedState, Array]:
        inner, obs = env.reset(key, num_envs)
        moments = Moments.of(obs[0]).updated(obs)
        return NormalizedState(inner, moments), shown(moments, obs)

    def step(key: Array, state: NormalizedState, action: Any) -> tuple[NormalizedState, Transition]:
        inner, out = env.step(key, state.inner, action)
        _all_present("normalize_observation", out)
        moments = state.moments.updated(out.obs)
        out = out._replace(obs=shown(moments, out.obs), final_obs=shown(moments, out.final_obs))
        return NormalizedState(inner, moments), out

    def evaluation(state: NormalizedState) -> Env:
        frozen, moments = env.evaluation(state.inner), state.moments

        def frozen_reset(key: Array, num_envs: int) -> tuple[Any, Array]:
            inner, obs = frozen.reset(key, num_envs)
            return inner, shown(moments, obs)

        def frozen_step(key: Array, inner: Any, action: Any) -> tuple[Any, Transition]:
            inner, out = frozen.step(key, inner, action)
            return inner, out._replace(obs=shown(moments, out.obs), final_obs=shown(moments, out.final_obs))

        def frozen_observe(inner: Any, obs: Any) -> Any:
            return shown(moments, obs if frozen.observe is None else frozen.observe(inner, obs))

        return frozen._replace(reset=frozen_reset, step=frozen_step, restart=None, observe=frozen_observe)

    def restart(key: Array, state: NormalizedState) -> tuple[NormalizedState, Array]:
        inner, obs = _restarted(env, key, state.inner)
        moments = state.moments.updated(obs)
        return NormalizedState(inner, moments), shown(moments, obs)

    def observe(state: NormalizedState, obs: Any) -> Any:
        return shown(state.moments, obs if env.observe is None else env.observe(state.inner, obs))

    return env._replace(
        reset=reset,
        step=step,
        evaluation=evaluation,
        restart=None if env.restart is None else restart,
        observe=observe,
        render=_of_inner(env.render),
    )


def normalize_reward(env: Env, *, gamma: float | Array, clip: float = 10.0, eps: float = 1e-8) -> Env:
    r"""Divide rewards by the running standard deviation of the discounted return; clip to :math:`\pm c`.

    .. math:: G \leftarrow \gamma G + r, \qquad \hat r = \mathrm{clip}(r / \sqrt{\mathrm{Var}(G) + \epsilon}, \pm c)

    Rewards are not centred, and G starts from 0 in each episode. `evaluation` leaves rewards unscaled. A reward that is
    not finite is passed on unchanged, for the learner to count, and does not enter the statistics.

    Args:
        env: any environment.
        gamma: the learner's discount, in [0, 1].
        clip: bound of the scaled reward, > 0.
        eps: added to the variance, >= 0.

    Reference: Huang et al. 2022, details 30 and 31; Engstrom et al. 2020, arXiv:2005.12729, section 3.
    """

    _one_agent("normalize_reward", env)
    if callable(gamma):
        raise UserTypeError("normalize_reward: gamma must be a number: an environment has no updates to schedule it by")
    gamma, (clip, eps) = number("normalize_reward", "gamma", gamma, 0, 1), _constants("normalize_reward", clip, eps)

    def reset(key: Array, num_envs: int) -> tuple[NormalizedState, Any]:
        inner, obs = env.reset(key, num_envs)
        return NormalizedState(inner, Moments.of(jnp.zeros(())), jnp.zeros(num_envs)), obs

    def step(key: Array, state: NormalizedState, action: Any) -> tuple[NormalizedState, Transition]:
        inner, out = env.step(key, state.inner, action)
        _all_present("normalize_reward", out)
        running = state.running_return * gamma + out.reward
        moments = state.moments.updated(running)
        reward = jnp.clip(out.reward / jnp.sqrt(moments.var + eps), -clip, clip)
        reward = jnp.where(jnp.isfinite(out.reward), reward, out.reward)  # unchanged, for the learner to count
        running = jnp.where(out.terminated | out.truncated | ~jnp.isfinite(running), 0, running)
        return NormalizedState(inner, moments, running), out._replace(reward=reward)

    def restart(key: Array, state: NormalizedState) -> tuple[NormalizedState, Any]:
        inner, obs = _restarted(env, key, state.inner)
        return NormalizedState(inner, state.moments, jnp.zeros_like(state.running_return)), obs

    return env._replace(
        reset=reset,
        step=step,
        evaluation=lambda state: env.evaluation(state.inner),
        restart=None if env.restart is None else restart,
        observe=_of_inner(env.observe),
        render=_of_inner(env.render),
    )


def _of_inner(function: Callable[..., Any] | None) -> Any:
    """Make a function of a wrapper's state from one of the state inside it; None of None."""
    return None if function is None else lambda state, *arguments: function(state.inner, *arguments)


def _restarted(env: Env, key: Array, state: Any) -> tuple[Any, Any]:
    assert env.restart is not None
    return env.restart(key, state)


def fold_agents(env: Env, *, agent_id: bool = False) -> Env:
    """Turn N environments of A agents into N * A environments of one agent, to share a policy in single-agent recipes.

    Each agent is a separate segment, and one policy plays all of them. Each agent has its own episode return.

    Args:
        env: environment with many agents.
        agent_id: append the agent's number to its observation, as a one-hot encoding.

    Raises:
        ValueError: the environment has no axis of agents; at `reset`, A does not divide the number of environments.
    """
    if env.num_agents is None:
        raise UserValueError("fold_agents: this environment has one agent already")
    agents = env.num_agents

    def folded(x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), x)

    def seen(obs: AgentsObs) -> Any:
        if agent_id:
            obs = obs._replace(obs=with_agent_id(obs.obs))
        return folded(obs.obs if obs.available is None else obs)

    def repeated(x: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, agents, axis=0), x)

    def reset(key: Array, num_envs: int) -> tuple[Any, Any]:
        if num_envs % agents:
            raise UserValueError(f"fold_agents: {agents} agents each do not make num_envs={num_envs}: give a multiple")
        state, obs = env.reset(key, num_envs // agents)
        return state, seen(obs)

    def step(key: Array, state: Any, action: Any) -> tuple[Any, Transition]:
        state, out = env.step(key, state, jax.tree.map(lambda a: a.reshape(-1, agents, *a.shape[1:]), action))
        each = {name: folded(getattr(out, name)) for name in ("reward", "terminated", "truncated", "episode_return")}
        whole = {name: repeated(getattr(out, name)) for name in ("episode_length", "ended", "info")}
        mask = None if out.mask is None else folded(out.mask)
        return state, Transition(obs=seen(out.obs), final_obs=seen(out.final_obs), mask=mask, **each, **whole)

    space = env.observation_space
    if agent_id:
        space = SimpleNamespace(shape=(space.shape[0] + agents,))
    return env._replace(
        reset=reset,
        step=step,
        observation_space=space,
        evaluation=lambda state: fold_agents(env.evaluation(state), agent_id=agent_id),
        num_agents=None,
    )


def with_agent_id(obs: Array) -> Array:
    """Append the agent's number to observations `[..., A, D]` as a one-hot encoding, `[..., A, D + A]`."""
    agents = obs.shape[-2]
    ids = jnp.broadcast_to(jnp.eye(agents, dtype=obs.dtype), (*obs.shape[:-1], agents))
    return jnp.concatenate([obs, ids], axis=-1)


def share_observations(obs: Array) -> Array:
    """Give each agent all agents' observations, `[..., A, D]` to `[..., A, A * D]`, the input of a central critic."""
    everybody = obs.reshape(*obs.shape[:-2], 1, -1)
    return jnp.broadcast_to(everybody, (*obs.shape[:-1], everybody.shape[-1]))


def _all_present(where: str, out: Transition) -> None:
    if out.mask is not None:
        raise UserValueError(
            f"{where}: agents can be absent here, and what they leave behind would enter the statistics"
        )


def _constants(where: str, clip: Any, eps: Any) -> tuple[Any, Any]:
    return number(where, "clip", clip, 0, open_low=True), number(where, "eps", eps, 0)


def _one_agent(where: str, env: Env) -> None:
    if env.num_agents is not None:
        raise UserValueError(
            f"{where}: this environment has {env.num_agents} agents, and the statistics are of one: put "
            "fold_agents() around it first"
        )
