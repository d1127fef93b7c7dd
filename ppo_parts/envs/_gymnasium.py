"""Any Gymnasium vector environment, stepped from the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._hyperparameters import count
from .._metrics import Metrics
from .._policy import apply_policy, evaluate_policy
from .._rollout import episode_metrics, sample_action
from .._types import Array, Batch, Evaluate, Params
from ..functional import next_values
from ._env import size


class HostRollout:
    """Collect rollouts from a `gymnasium.vector` environment; what comes back is the `Batch` any learner takes.

    The environment is a Python object with a state of its own, so this is no pure function: call `collect` in a loop,
    and `Learner.update` under jit. Both automatic reset modes are handled:

    * next step (Gymnasium's default): the step after the end of an episode only resets; its action is ignored. It
      stays in the batch with `mask` 0. The observation before it is the final one, so the shifted value is right.
    * same step: the final observation comes in `info["final_obs"]` and is evaluated where the episode was truncated.

    Args:
        env: the vector environment, with array observations.
        evaluate: as in `ppo_parts.learner`.
        num_steps: T, steps of each environment per rollout.
        seed: for the environment's first reset.

    Raises:
        TypeError: a single environment. ValueError: the environment does not reset itself, or does not say how.

    Example:
        >>> import gymnasium, jax, jax.numpy as jnp, ppo_parts as pp
        >>> from ppo_parts import distributions, envs
        >>> def evaluate(params, batch):
        ...     return distributions.Categorical(batch.obs @ params["policy"]), batch.obs @ params["value"]
        >>> rollout = envs.HostRollout(gymnasium.make_vec("CartPole-v1", num_envs=2), evaluate, num_steps=8)
        >>> params = {"policy": jnp.zeros((4, 2)), "value": jnp.zeros(4)}
        >>> batch, metrics = rollout.collect(jax.random.key(0), params)
        >>> batch.obs.shape, batch.mask.shape
        ((8, 2, 4), (8, 2))
    """

    def __init__(self, env: Any, evaluate: Evaluate, *, num_steps: int, seed: int = 0) -> None:
        count("HostRollout", "num_steps", num_steps)
        if not hasattr(env, "num_envs"):
            raise TypeError(
                f"HostRollout: {env} is no vector environment: make it with gymnasium.make_vec(..., num_envs=...), or "
                "put it into gymnasium.vector.SyncVectorEnv"
            )
        mode = getattr(env.metadata.get("autoreset_mode"), "name", None)
        if mode not in ("NEXT_STEP", "SAME_STEP"):
            raise ValueError(
                f"HostRollout: the environment's autoreset mode is {mode}, it must be NEXT_STEP or SAME_STEP: make it "
                "with gymnasium.make_vec(..., vector_kwargs={'autoreset_mode': AutoresetMode.SAME_STEP})"
            )
        self._env, self._num_steps, self._same_step = env, num_steps, mode == "SAME_STEP"
        size(env.single_observation_space)  # raises where observations are no arrays
        space = env.single_action_space
        self._first_action = getattr(space, "start", 0)  # of a Discrete, whose actions need not begin at 0
        self._bounds = None if hasattr(space, "n") or not hasattr(space, "low") else (space.low, space.high)

        def act(key: Array, params: Params, obs: Any) -> tuple[Any, Array]:
            return sample_action(apply_policy(evaluate, params, obs).distribution, key)

        def value_of(params: Params, obs: Any) -> Any:
            return evaluate_policy(evaluate, params, Batch(obs=obs)).value

        self._act, self._value = jax.jit(act), jax.jit(value_of)
        self._obs = np.array(env.reset(seed=seed)[0])
        self._over = np.zeros(env.num_envs, bool)  # the last step ended an episode
        self._return, self._length = np.zeros(env.num_envs, np.float32), np.zeros(env.num_envs, np.int32)

    def collect(self, key: Array, params: Params) -> tuple[Batch, Metrics]:
        """Play T steps; returns the batch and the episode metrics of `ppo_parts.rollout`."""
        steps = [self._step(step_key, params) for step_key in jax.random.split(key, self._num_steps)]
        batch, final_value, episodes = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(y) for y in x]), *steps)
        value, last_value = self._value(params, batch.obs), self._value(params, self._obs)
        shifted = next_values(value, last_value, batch.truncated, final_value) if self._same_step else None
        next_value = next_values(value, last_value) if shifted is None else shifted
        return batch.replace(value=value, next_value=next_value), episode_metrics(*episodes)

    def _step(self, key: Array, params: Params) -> tuple[Batch, Any, Any]:
        resets = self._over if not self._same_step else np.zeros_like(self._over)
        action, log_prob = self._act(key, params, self._obs)
        sent = np.asarray(action) + self._first_action if self._bounds is None else np.clip(action, *self._bounds)
        # Copies: an environment may write its next step into the arrays it returned.
        obs, reward, terminated, truncated, info = self._env.step(sent)
        obs, reward, terminated, truncated = (np.array(x) for x in (obs, reward, terminated, truncated))
        over = terminated | truncated
        final_value = np.zeros(len(over), np.float32)
        if self._same_step and truncated.any():
            final = np.array(obs)
            for i in np.flatnonzero(over):
                final[i] = info["final_obs"][i]
            final_value = self._value(params, final)
        collected = np.where(resets, 0, self._return + reward).astype(np.float32)
        length = np.where(resets, 0, self._length + 1).astype(np.int32)
        step = Batch(
            obs=self._obs,
            action=action,
            log_prob=log_prob,
            reward=jnp.asarray(reward, jnp.float32),
            terminated=jnp.asarray(terminated),
            truncated=jnp.asarray(truncated),
            mask=jnp.asarray(~resets),
        )
        self._obs, self._over = obs, over
        self._return, self._length = np.where(over, 0, collected), np.where(over, 0, length)
        return step, final_value, (over, {"return": collected, "length": length})
