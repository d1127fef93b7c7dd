"""Rollouts of Gymnasium vector environments, which are stepped on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import UserTimeoutError, UserTypeError, UserValueError
from ._hyperparameters import count, number
from ._metrics import Metrics
from ._policy import apply_policy, evaluate_policy, initial_carry_of
from ._rollout import episode_metrics, sample_action
from ._shards import check_shards
from ._types import Array, Batch, Evaluate, Params
from .envs import size
from .functional import ShapeError, next_values


class HostRollout:
    """Collects rollouts from a `gymnasium.vector` environment, as the `Batch` that any learner takes.

    The environment is a stateful Python object, so `collect` is not a pure function: call it in a loop, and call
    `Learner.update` under jit. Both automatic reset modes are supported:

    * next step (Gymnasium's default): the step after the end of an episode only resets, and ignores its action. It
      stays in the batch with `mask` 0. Its observation is the final one of the episode, so the shifted value is
      correct.
    * same step: the final observation is in `info["final_obs"]`, and is evaluated where the episode was truncated.

    If an environment raises an error during a rollout, the steps of this rollout are lost, and the next `collect`
    starts new episodes in all environments.

    Args:
        env: the vector environment, with array observations.
        evaluate: as in `ppo_parts.learner`.
        num_steps: T, steps of each environment per rollout.
        seed: seed of the environment's first reset.
        timeout: seconds that a reset or a step of the environment may take; None: no limit. With a timeout, the
            environment is called from other threads.
        shards: as in `ppo_parts.rollout`; `jax.device_put(batch, batch.sharding(mesh))` divides the batch over devices.

    Raises:
        UserTypeError: the environment is not a vector environment. UserValueError: it does not reset automatically, or
            does not declare how.
        `collect` raises UserTypeError or ShapeError, which name the invalid value that the environment returned, and
            UserTimeoutError.

    Example:
        >>> import gymnasium, jax, jax.numpy as jnp, ppo_parts as pp
        >>> from ppo_parts import distributions
        >>> def evaluate(params, batch):
        ...     return distributions.Categorical(batch.obs @ params["policy"]), batch.obs @ params["value"]
        >>> rollout = pp.HostRollout(gymnasium.make_vec("CartPole-v1", num_envs=2), evaluate, num_steps=8)
        >>> params = {"policy": jnp.zeros((4, 2)), "value": jnp.zeros(4)}
        >>> batch, metrics = rollout.collect(jax.random.key(0), params)
        >>> batch.obs.shape, batch.mask.shape
        ((8, 2, 4), (8, 2))
    """

    def __init__(
        self,
        env: Any,
        evaluate: Evaluate,
        *,
        num_steps: int,
        seed: int = 0,
        timeout: float | None = None,
        shards: int = 1,
    ) -> None:
        count("HostRollout", "num_steps", num_steps)
        if timeout is not None:
            number("HostRollout", "timeout", timeout, 0, open_low=True)
        if initial_carry_of(evaluate) is not None:
            raise UserTypeError(
                "HostRollout: policies with memory are not supported here; use one without initial_carry"
            )
        if not hasattr(env, "num_envs"):
            raise UserTypeError(
                f"HostRollout: {env} is not a vector environment: make it with gymnasium.make_vec(..., num_envs=...), "
                "or put it into gymnasium.vector.SyncVectorEnv"
            )
        mode = getattr((env.metadata or {}).get("autoreset_mode"), "name", None)
        if mode not in ("NEXT_STEP", "SAME_STEP"):
            raise UserValueError(
                f"HostRollout: the environment's autoreset mode is {mode}, it must be NEXT_STEP or SAME_STEP: make it "
                "with gymnasium.make_vec(..., vector_kwargs={'autoreset_mode': AutoresetMode.SAME_STEP})"
            )
        check_shards("HostRollout", shards, "num_envs", env.num_envs)
        self._shards = shards
        self._env, self._num_steps, self._same_step = env, num_steps, mode == "SAME_STEP"
        size(env.single_observation_space)  # raises if observations are not arrays
        space = env.single_action_space
        self._first_action = getattr(space, "start", 0)  # the actions of a Discrete space need not start at 0
        self._bounds = None if hasattr(space, "n") or not hasattr(space, "low") else (space.low, space.high)

        def act(key: Array, params: Params, obs: Any) -> tuple[Any, Array]:
            return sample_action(apply_policy(evaluate, params, obs).distribution, key)

        def value_of(params: Params, obs: Any) -> Any:
            return evaluate_policy(evaluate, params, Batch(obs=obs)).value

        self._act, self._value = jax.jit(act), jax.jit(value_of)
        self._timeout = timeout
        self._late: threading.Thread | None = None  # the thread of the latest call
        self._begin(seed)

    def _begin(self, seed: int | None = None) -> None:
        """Start new episodes in all environments."""
        number = self._env.num_envs
        returned = self._called("reset", lambda: self._env.reset(seed=seed))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise UserTypeError(f"HostRollout: reset must return (obs, info), got {_kind(returned)}")
        self._obs = np.array(returned[0])
        self._check_obs("the obs of reset", self._obs, (number, *self._env.single_observation_space.shape))
        self._over = np.zeros(number, bool)  # where the last step ended an episode
        self._return, self._length = np.zeros(number, np.float32), np.zeros(number, np.int32)
        self._interrupted = False

    def collect(self, key: Array, params: Params) -> tuple[Batch, Metrics]:
        """Play T steps; return the batch, and the episode metrics as in `ppo_parts.rollout`."""
        if self._interrupted:
            self._begin()
        self._interrupted = True  # until all steps are done: an error leaves the environment in an unknown state
        steps = [self._step(step_key, params) for step_key in jax.random.split(key, self._num_steps)]
        self._interrupted = False
        batch, final_value, episodes = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(y) for y in x]), *steps)
        value, last_value = self._value(params, batch.obs), self._value(params, self._obs)
        shifted = next_values(value, last_value, batch.truncated, final_value) if self._same_step else None
        next_value = next_values(value, last_value) if shifted is None else shifted
        return batch.replace(value=value, next_value=next_value, shards=self._shards), episode_metrics(*episodes)

    def _step(self, key: Array, params: Params) -> tuple[Batch, Any, Any]:
        resets = self._over if not self._same_step else np.zeros_like(self._over)
        action, log_prob = self._act(key, params, self._obs)
        sent = np.asarray(action) + self._first_action if self._bounds is None else np.clip(action, *self._bounds)
        obs, reward, terminated, truncated, info = self._stepped(sent)
        over = terminated | truncated
        final_value = np.zeros(len(over), np.float32)
        if self._same_step and truncated.any():
            final_value = self._value(params, self._final_obs(obs, truncated, info))
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

    def _stepped(self, sent: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Any]:
        """Step the environment once, and check every field that it returns."""
        returned = self._called("step", lambda: self._env.step(sent))
        if not isinstance(returned, tuple) or len(returned) != 5:
            raise UserTypeError(
                "HostRollout: step must return (obs, reward, terminated, truncated, info), as in Gymnasium 1.0, got "
                + _kind(returned)
            )
        # Copy the arrays, because an environment may write its next step into the same ones.
        obs, *each = (np.array(x) for x in returned[:4])
        self._check_obs("the obs of step", obs, self._obs.shape)
        for name, x in zip(("reward", "terminated", "truncated"), each, strict=True):
            if x.shape != self._over.shape:
                raise ShapeError(f"HostRollout: {name} of step must have shape {self._over.shape}, got {x.shape}")
            if name != "reward" and x.dtype != bool:
                raise UserTypeError(f"HostRollout: {name} of step must be boolean, got {x.dtype}: return {name} > 0")
            if not (np.issubdtype(x.dtype, np.number) or x.dtype == bool):
                raise UserTypeError(f"HostRollout: {name} of step must be numbers, got {x.dtype}")
        return obs, *each, returned[4]

    def _check_obs(self, what: str, obs: np.ndarray, shape: tuple[int, ...]) -> None:
        if obs.shape != shape:
            raise ShapeError(f"HostRollout: {what} must have shape {shape}, got {obs.shape}")
        if not (np.issubdtype(obs.dtype, np.number) or obs.dtype == bool):
            raise UserTypeError(f"HostRollout: {what} must be numbers, got {obs.dtype}")

    def _final_obs(self, obs: np.ndarray, truncated: np.ndarray, info: Any) -> np.ndarray:
        """Return the observations, replaced by the final ones where an episode was truncated."""
        final, given = obs.copy(), info.get("final_obs") if isinstance(info, dict) else None
        for i in np.flatnonzero(truncated):
            one: Any = None if given is None else given[i]
            if one is None or np.shape(one) != obs.shape[1:]:
                got = "None" if one is None else f"shape {np.shape(one)}"
                raise UserTypeError(
                    f'HostRollout: info["final_obs"][{i}] must be the final observation of environment {i}, of shape '
                    f"{obs.shape[1:]}, as its episode was truncated; got {got}. The autoreset mode SAME_STEP promises "
                    "it; without it, say NEXT_STEP"
                )
            final[i] = one
        return final

    def _called(self, what: str, call: Callable[[], Any]) -> Any:
        """Return or raise what `call` does, unless it takes longer than the timeout."""
        if self._timeout is None:
            return call()
        if self._late is not None:
            self._late.join(self._timeout)
            if self._late.is_alive():
                raise UserTimeoutError(
                    "HostRollout: the environment still hangs in an earlier call: make a new one, and a new HostRollout"
                )
        done: list[Any] = []

        def run() -> None:
            try:
                done.append((call(), None))
            except BaseException as error:  # raised again below, in the calling thread
                done.append((None, error))

        self._late = threading.Thread(target=run, daemon=True)  # a hanging call must not block exit
        self._late.start()
        self._late.join(self._timeout)
        if not done:
            raise UserTimeoutError(
                f"HostRollout: the environment has not returned from {what} within timeout={self._timeout:g} seconds: "
                "it hangs, or needs a longer one"
            )
        returned, error = done[0]
        if error is not None:
            raise error
        return returned


def _kind(x: Any) -> str:
    return f"{len(x)} items" if isinstance(x, tuple) else type(x).__name__
