"""N environments of a `gymnasium.vector` environment, with a check of everything that they return."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from .._base.errors import UserTimeoutError, UserTypeError, UserValueError
from ..functional import ShapeError
from ._env import Discrete, MultiDiscrete, can_cast, count_options, exactly, is_below, size
from ._rendering import as_frame, opengl_errors

FLOAT = np.dtype(np.float32)


class GymnasiumVector:
    """N environments of a `gymnasium.vector` environment; checks everything that they return.

    Args:
        env: the vector environment.
        timeout: seconds that a reset or a step may take; None: no limit.
        info: names of numbers in the environment's `info` to pass on.
        action_mask: name of the action mask in `info`; None: all actions are always available.
    """

    def __init__(
        self, env: Any, timeout: float | None = None, info: tuple[str, ...] = (), action_mask: str | None = None
    ) -> None:
        if not hasattr(env, "num_envs"):
            raise UserTypeError(
                f"from_gymnasium: {env} is not a vector environment: make it with gymnasium.make_vec(..., num_envs=...)"
            )
        self.mode = getattr((env.metadata or {}).get("autoreset_mode"), "name", None)
        if self.mode not in ("SAME_STEP", "DISABLED"):
            raise UserValueError(
                f"from_gymnasium: the environment's autoreset mode is {self.mode}, but must be SAME_STEP or DISABLED: "
                "make it with gymnasium.make_vec(..., vector_kwargs={'autoreset_mode': AutoresetMode.SAME_STEP})"
            )
        self.env, self.num_envs = env, env.num_envs
        self.observation_space, self.action_space = env.single_observation_space, policy_space(env.single_action_space)
        size(self.observation_space)  # raises if observations are not arrays
        # The integers of the space need not start at 0, and its dtype need not be that of the policy's actions.
        starts = np.asarray(getattr(env.single_action_space, "start", 0))
        self.starts = starts if starts.any() else None
        self.action_dtype = np.dtype(env.single_action_space.dtype)
        self.shape = tuple(self.observation_space.shape)
        self.dtype = obs_dtype(self.observation_space)
        self.edges = unrounded_bounds(env.single_action_space)
        self.takes = f"the environment takes {self.action_dtype} ({env.single_action_space})"
        self.remedy = (
            f"the observation space is {self.observation_space}; give it the dtype of what the environment returns, or "
            "convert that in a wrapper; integers keep 64 bits with jax_enable_x64"
        )
        self.call, self.info, self.action_mask = Deadline(timeout), info, action_mask
        self.options = count_options(self.action_space)
        if action_mask is not None and not self.options:
            raise UserValueError(
                f"from_gymnasium: action_mask={action_mask!r} masks discrete actions, but this environment takes "
                f"{env.single_action_space}: leave it out"
            )

    def reset(self, seed: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Start new episodes in all environments; return their observations and action masks."""
        returned = self.call("reset", functools.partial(self.env.reset, seed=seed))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise UserTypeError(f"from_gymnasium: reset must return (obs, info), got {_kind(returned)}")
        return self._checked_obs("reset", returned[0]), self._available("reset", returned[1], range(self.num_envs))

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
        """Step all environments once.

        Returns:
            The observations to act on next, those that followed the step, the masks of the next actions (or None), and
            `[4 + K, N]` of float32: reward, terminated, truncated, ended and K numbers of `info`.
        """
        returned = self.call("step", functools.partial(self.env.step, self._checked_action(action)))
        if not isinstance(returned, tuple) or len(returned) != 5:
            raise UserTypeError(
                "from_gymnasium: step must return (obs, reward, terminated, truncated, info), as in Gymnasium 1.0, got "
                + _kind(returned)
            )
        obs, reward, terminated, truncated, info = returned
        reward, terminated = self._checked("reward", reward), self._checked("terminated", terminated)
        truncated, obs = self._checked("truncated", truncated), self._checked_obs("step", obs)
        over = terminated | truncated
        ended, reported = self.game_over(over, info), [self._info(name, info, over) for name in self.info]
        # Pack what is small, which also copies what the environment may overwrite when it resets or steps.
        numbers = np.array([reward, terminated, truncated, ended, *reported], FLOAT)
        return *self._after_reset(obs, over, info), numbers

    def game_over(self, over: np.ndarray, info: Any) -> np.ndarray:
        """Return where an episode ended for good; environments that end an episode with each life override this."""
        del info
        return over

    def render(self) -> np.ndarray:
        """Draw the first environment, `[H, W, 3]`."""
        if getattr(self.env, "render_mode", None) != "rgb_array":
            raise UserValueError(
                'this environment was made without render_mode="rgb_array", so it cannot be drawn: make it with '
                'gymnasium.make_vec(..., render_mode="rgb_array")'
            )
        with opengl_errors():
            frame, *_ = self.call("render", self.env.render)
        return as_frame("from_gymnasium", frame)

    def close(self) -> None:
        """Release the environments."""
        self.env.close()

    def _after_reset(
        self, obs: np.ndarray, over: np.ndarray, info: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the observations to act on, after a reset where an episode ended; those that followed; the masks."""
        every = range(self.num_envs)
        if not np.count_nonzero(over):  # several times as fast as over.any()
            return obs, obs, self._available("step", info, every)
        if self.mode == "SAME_STEP":
            return obs, self._final_obs(obs, over, info), self._available("step", info, every)
        after, reset_info = self.call("reset", functools.partial(self.env.reset, options={"reset_mask": over}))
        available = self._available("step", info, np.flatnonzero(~over))
        if available is not None:
            available &= self._available("reset", reset_info, np.flatnonzero(over))
        return np.where(over.reshape(-1, *[1] * (obs.ndim - 1)), self._checked_obs("reset", after), obs), obs, available

    def _available(self, what: str, info: Any, which: Iterable[int]) -> np.ndarray | None:
        """Return the action masks `[N, n]` that these environments report, with True for all actions of the others."""
        if self.action_mask is None:
            return None
        available, where = np.ones((self.num_envs, sum(self.options)), bool), f"info[{self.action_mask!r}] of {what}"
        reported = info.get(self.action_mask) if isinstance(info, Mapping) else None
        for i in which:
            given: Any = None if reported is None else reported[i]
            if not isinstance(given, (tuple, list)) and np.ndim(given) == 0:  # None, or NaN
                others = ", ".join(sorted(key for key in info or () if not key.startswith("_"))) or "nothing"
                raise UserValueError(
                    f"from_gymnasium: environment {i} reports no {where}, which action_mask= asks for in every reset "
                    f"and step; it reports {others}"
                )
            # The mask of several choices is one array, or one array for each choice.
            row = np.concatenate([np.ravel(x) for x in given]) if isinstance(given, (tuple, list)) else given
            if row.shape != available.shape[1:] or not np.isin(row, (0, 1)).all():
                raise UserValueError(
                    f"from_gymnasium: {where} must have 0 or 1 for each of the options {self.options}, but that of "
                    f"environment {i} is {given!r}"
                )
            available[i] = row
        first_options = np.cumsum((0, *self.options[:-1]))
        if not np.logical_or.reduceat(available, first_options, axis=1).all():
            raise UserValueError(f"from_gymnasium: {where} leaves no action: at least one option must be available")
        return available

    def _info(self, name: str, info: Mapping[str, Any], over: np.ndarray) -> np.ndarray:
        """Return the number that each environment reports as `info[name]` of this step; NaN: none."""
        numbers = np.full(self.num_envs, np.nan, np.float32)
        final = info.get("final_info", {}) if self.mode == "SAME_STEP" else {}  # of the steps before a reset
        for source, where in ((info, ~over if final else True), (final, over)):
            if name not in source:
                continue
            there = np.broadcast_to(where & np.asarray(source.get(f"_{name}", True)), self.num_envs)
            for i in np.flatnonzero(there):
                one = np.asarray(source[name][i])
                if one.size != 1 or not _is_numeric(one):
                    raise UserTypeError(
                        f"from_gymnasium: info[{name!r}] of environment {i} must be a number, got {source[name][i]!r}: "
                        "leave it out of info=, or reduce it to a number in a wrapper"
                    )
                numbers[i] = exactly(f"from_gymnasium: info[{name!r}]", one, FLOAT, "report it as a float").item()
        if missing := np.flatnonzero(over & np.isnan(numbers)).tolist():
            hidden = {name, "final_obs", "final_info"}
            others = sorted(key for key in {**info, **final} if not key.startswith("_") and key not in hidden)
            raise UserValueError(
                f"from_gymnasium: environment {missing[0]} ended an episode without a number info[{name!r}], which "
                f"info= asks for; it reports {', '.join(others) or 'nothing else'}"
            )
        return numbers

    def _final_obs(self, obs: np.ndarray, over: np.ndarray, info: Any) -> np.ndarray:
        final, given = obs.copy(), info.get("final_obs") if isinstance(info, dict) else None
        for i in np.flatnonzero(over):
            one: Any = None if given is None else given[i]
            if one is None or np.shape(one) != self.shape:
                got = "None" if one is None else f"shape {np.shape(one)}"
                raise UserTypeError(
                    f'from_gymnasium: info["final_obs"][{i}] must be the final observation of environment {i}, of '
                    f"shape {self.shape}, because its episode ended; got {got}. The autoreset mode SAME_STEP promises "
                    "it; without it, use DISABLED"
                )
            final[i] = self._cast("final_obs", np.asarray(one))
        return final

    def _checked_action(self, action: np.ndarray) -> np.ndarray:
        """Return a copy of the policy's actions as the environment takes them."""
        if can_cast(action.dtype, self.action_dtype):
            cast = action.astype(self.action_dtype)
        elif can_cast(action.dtype, self.action_dtype, "same_kind"):
            cast = exactly("from_gymnasium: the action", action, self.action_dtype, self.takes)
        else:
            raise UserTypeError(f"from_gymnasium: {self.takes}, but the policy's actions are {action.dtype}")
        if self.edges is not None:  # an action at a bound, in the precision of the policy, is at the bound
            inside = np.clip(cast, *self.edges)
            cast = np.where(inside.astype(action.dtype) == action, inside, cast)
        return cast if self.starts is None else cast + self.starts

    def _checked(self, name: str, x: Any) -> np.ndarray:
        """Return a field of a step with one number for each environment, or one flag if it is not the reward."""
        x = np.asarray(x)
        if x.shape != (self.num_envs,):
            raise ShapeError(f"from_gymnasium: {name} of step must have shape {(self.num_envs,)}, got {x.shape}")
        if x.dtype.kind == "b" or (name == "reward" and x.dtype.kind == "f" and is_below(x, FLOAT)):
            return x
        if name != "reward":
            raise UserTypeError(f"from_gymnasium: {name} of step must be boolean, got {x.dtype}: return {name} > 0")
        if not _is_numeric(x):
            raise UserTypeError(f"from_gymnasium: reward of step must be numbers, got {x.dtype}")
        return exactly("from_gymnasium: reward of step", x, FLOAT, "scale it in a wrapper")

    def _checked_obs(self, what: str, obs: Any) -> np.ndarray:
        obs = np.asarray(obs)
        if obs.shape != (self.num_envs, *self.shape):
            expected = (self.num_envs, *self.shape)
            raise ShapeError(f"from_gymnasium: the obs of {what} must have shape {expected}, got {obs.shape}")
        return obs.copy() if obs.dtype is self.dtype else self._cast(f"the obs of {what}", obs)

    def _cast(self, name: str, obs: np.ndarray) -> np.ndarray:
        """Return a copy of observations in the dtype that the device has for the space."""
        if not _is_numeric(obs):
            raise UserTypeError(f"from_gymnasium: {name} must be numbers, got {obs.dtype}")
        return exactly(f"from_gymnasium: {name}", obs, self.dtype, self.remedy)


class Deadline:
    """Calls functions, and raises `UserTimeoutError` for those that take longer than `timeout` seconds."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.latest: concurrent.futures.Future[Any] | None = None

    def __call__(self, what: str, call: Callable[[], Any]) -> Any:
        """Return or raise what `call` does."""
        if self.timeout is None:
            return call()
        if self.latest is not None and not self._is_done(self.latest):
            raise UserTimeoutError("the environment still hangs in an earlier call: make a new one")
        self.latest = result = concurrent.futures.Future[Any]()

        def run() -> None:
            try:
                result.set_result(call())
            except BaseException as error:  # raised again below, in the calling thread
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()  # a hanging call must not block exit, as one in a pool would
        if not self._is_done(result):
            raise UserTimeoutError(
                f"the environment has not returned from {what} within timeout={self.timeout:g} seconds: it hangs, or "
                "needs a longer timeout"
            )
        return result.result()

    def _is_done(self, result: concurrent.futures.Future[Any]) -> bool:
        return bool(concurrent.futures.wait([result], self.timeout).done)


def policy_space(space: Any) -> Any:
    """Return the space of a policy's actions for an environment of this action space: their integers count from 0."""
    if hasattr(space, "low"):
        return space
    shape = getattr(space, "shape", None)
    if hasattr(space, "nvec") and len(shape or ()) == 1:
        return MultiDiscrete(tuple(map(int, space.nvec)))
    if hasattr(space, "n") and shape == ():
        return Discrete(int(space.n))
    if hasattr(space, "n") and len(shape or ()) == 1:  # MultiBinary
        return MultiDiscrete((2,) * int(space.n))
    raise UserValueError(
        f"{space} is not supported: actions must be a Discrete or a Box space, or a MultiDiscrete or MultiBinary space "
        "with one axis; change them in a wrapper"
    )


def obs_dtype(space: Any) -> np.dtype[Any]:
    """Return the dtype of observations on the device: floats have 32 bits at most; integers also, unless x64 is on."""
    dtype = np.dtype(getattr(space, "dtype", None) or np.float32)
    return FLOAT if dtype == np.float64 else np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def unrounded_bounds(space: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the bounds of a box of actions, or None where float32, the precision of policies, has exactly these."""
    if np.dtype(space.dtype).kind != "f":
        return None
    low, high = np.asarray(space.low), np.asarray(space.high)
    with np.errstate(over="ignore"):
        exact = all(np.array_equal(bound, bound.astype(FLOAT)) for bound in (low, high))
    return None if exact else (low, high)


def _is_numeric(x: np.ndarray) -> bool:
    return x.dtype.kind in "biuf"  # np.issubdtype takes several microseconds


def _kind(x: Any) -> str:
    return f"{len(x)} items" if isinstance(x, tuple) else type(x).__name__
