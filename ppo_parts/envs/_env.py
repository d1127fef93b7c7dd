"""The environment protocol, and wrappers that keep to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Transition(NamedTuple):
    """What a step of N environments returns; every leaf begins with `[N]`.

    Attributes:
        obs: what the policy sees next; the first of a new episode where one just ended.
        reward: of this step.
        terminated: True where the step ended the episode.
        truncated: True where a time limit cut it.
        final_obs: the observation that really followed; equals `obs` unless the episode ended.
        episode_return: sum of the unscaled rewards of the episode so far, this step included.
        episode_length: steps of the episode so far, this one included.
    """

    obs: Any
    reward: Array
    terminated: Array
    truncated: Array
    final_obs: Any
    episode_return: Array
    episode_length: Array


class Env(NamedTuple):
    """N environments stepped together by pure functions, with automatic resets.

    Attributes:
        reset: `reset(key, num_envs) -> (state, obs)`.
        step: `step(key, state, action) -> (state, Transition)`.
        observation_space, action_space: of one environment; `Discrete` has `n`, `Box` has `low`, `high` and `shape`.
        evaluation: `evaluation(state) -> Env`, the environment to evaluate in: running statistics stay as `state` has
            them, rewards are unscaled.
    """

    reset: Callable[[Array, int], tuple[Any, Any]]
    step: Callable[[Array, Any, Any], tuple[Any, Transition]]
    observation_space: Any
    action_space: Any
    evaluation: Callable[[Any], Any]


def is_discrete(space: Any) -> bool:
    """Whether a space is one of n actions (it has `n`) rather than a box of reals."""
    return hasattr(space, "n")


def size(space: Any) -> int:
    """How many numbers an element of a space has (1 in a `Discrete`).

    Raises:
        ValueError: a space without a shape, a dict or a tuple of spaces.
    """
    if getattr(space, "shape", None) is None:
        raise ValueError(
            f"{space!r} is no array, and this network needs one: flatten it in a wrapper around the environment, or "
            "write a network that takes its parts"
        )
    return math.prod(space.shape)


def clip_action(env: Env) -> Env:
    """Clip actions to the bounds of the environment's box on their way in; what is stored stays unclipped."""
    space = env.action_space
    if is_discrete(space):
        raise ValueError("clip_action: this environment's actions are discrete, there is nothing to clip")
    size(space)  # raises where actions are no arrays
    low, high = (jnp.broadcast_to(bound, space.shape)[None] for bound in (space.low, space.high))

    def step(key: Array, state: Any, action: Array) -> tuple[Any, Transition]:
        return env.step(key, state, jnp.clip(action, low, high))

    return env._replace(step=step, evaluation=lambda state: clip_action(env.evaluation(state)))


class Moments(NamedTuple):
    """Running mean and (population) variance of a stream, and how many elements it has had."""

    mean: Array
    var: Array
    seen: Array

    @staticmethod
    def of(example: Array) -> Moments:
        """Moments of nothing yet: mean 0, variance 1."""
        shape = jnp.shape(example)
        return Moments(jnp.zeros(shape), jnp.ones(shape), jnp.zeros(()))

    def updated(self, x: Array) -> Moments:
        """Moments of the stream with the rows of `x`, `[N, ...]`, appended (Chan et al. 1979).

        Rows that are not finite would stay in the moments for ever; with one in it, `x` is left out.
        """
        x = x.astype(jnp.float32)
        mean, var = jnp.mean(x, axis=0), jnp.var(x, axis=0)
        total = self.seen + x.shape[0]
        share = x.shape[0] / total
        delta, old = mean - self.mean, jnp.where(self.seen > 0, self.var, 0)
        # As a step from the old variance: past 2**24 elements float32 counts no further, and sums would run away.
        var = old + (var - old + jnp.square(delta) * (1 - share)) * share
        after = Moments(self.mean + delta * share, var, total)
        finite = jnp.all(jnp.isfinite(x))
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, self)


class NormalizedState(NamedTuple):
    """State of a normalising wrapper: the inner environment's, and running moments."""

    inner: Any
    moments: Moments
    running_return: Any = None


def normalize_observation(env: Env, *, clip: float = 10.0, eps: float = 1e-8) -> Env:
    r"""Standardise observations by running statistics: :math:`\mathrm{clip}((o-\mu)/\sqrt{\sigma^2+\epsilon}, \pm c)`.

    The statistics live in the environment's state and take in every observation the policy acts on, before it does,
    those of resets too. What it acted on is stored as it saw it, so the first ratio of an update is 1. `evaluation`
    freezes the statistics.

    Args:
        env: environment with array observations.
        clip: bound after standardisation, in standard deviations.
        eps: added to the variance.

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, details 28 and 29.
    """

    size(env.observation_space)

    def shown(moments: Moments, obs: Array) -> Array:
        return jnp.clip((obs - moments.mean[None]) / jnp.sqrt(moments.var[None] + eps), -clip, clip)

    def reset(key: Array, num_envs: int) -> tuple[NormalizedState, Array]:
        inner, obs = env.reset(key, num_envs)
        moments = Moments.of(obs[0]).updated(obs)
        return NormalizedState(inner, moments), shown(moments, obs)

    def step(key: Array, state: NormalizedState, action: Any) -> tuple[NormalizedState, Transition]:
        inner, out = env.step(key, state.inner, action)
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

        return frozen._replace(reset=frozen_reset, step=frozen_step)

    return env._replace(reset=reset, step=step, evaluation=evaluation)


def normalize_reward(env: Env, *, gamma: float | Array, clip: float = 10.0, eps: float = 1e-8) -> Env:
    r"""Divide rewards by the running deviation of the discounted return, without centring; clip to :math:`\pm c`.

    .. math:: G \leftarrow \gamma G + r, \qquad \hat r = \mathrm{clip}(r / \sqrt{\mathrm{Var}(G) + \epsilon}, \pm c)

    and G starts from 0 in each episode. `evaluation` has the rewards as they are.

    Args:
        env: any environment.
        gamma: the learner's discount.
        clip: bound of the scaled reward.
        eps: added to the variance.

    Reference: Huang et al. 2022, details 30 and 31; Engstrom et al. 2020, arXiv:2005.12729, section 3.
    """

    def reset(key: Array, num_envs: int) -> tuple[NormalizedState, Any]:
        inner, obs = env.reset(key, num_envs)
        return NormalizedState(inner, Moments.of(jnp.zeros(())), jnp.zeros(num_envs)), obs

    def step(key: Array, state: NormalizedState, action: Any) -> tuple[NormalizedState, Transition]:
        inner, out = env.step(key, state.inner, action)
        running = state.running_return * gamma + out.reward
        moments = state.moments.updated(running)
        reward = jnp.clip(out.reward / jnp.sqrt(moments.var + eps), -clip, clip)
        running = jnp.where(out.terminated | out.truncated | ~jnp.isfinite(running), 0, running)
        return NormalizedState(inner, moments, running), out._replace(reward=reward)

    return env._replace(reset=reset, step=step, evaluation=lambda state: env.evaluation(state.inner))
