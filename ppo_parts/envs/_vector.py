"""N environments of a `gymnasium.vector` environment, with a check of everything that they return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .._base.errors import UserTimeoutError, UserTypeError, UserValueError
from ..functional import ShapeError
from ._env import Discrete, MultiDiscrete, can_cast, count_options, exactly, size
from ._rendering import as_frame, opengl_errors

FLOAT = np.dtype(np.float32)


class HostStep(NamedTuple):
    """The result of one step of a vector environment, arrays `[N, ...]`; the fields are those of `Transition`.

    `available` is the action mask of `obs`, `[N, n]`; None without one.
    """

    obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    final_obs: Any
    ended: Any
    available: Any = None
    info: Any = {}  # noqa: RUF012 - never written to


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
        self.starts = np.asarray(getattr(env.single_action_space, "start", 0))
        self.counts_from_0 = not self.starts.any()
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
        returned = self.call("reset", lambda: self.env.reset(seed=seed))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise UserTypeError(f"from_gymnasium: reset must return (obs, info), got {_kind(returned)}")
        return self._checked_obs("reset", returned[0]), self._available("reset", returned[1], range(self.num_envs))

    def step(self, action: np.ndarray) -> HostStep:
        """Step all environments once."""
        if not can_cast(action.dtype, self.action_dtype, "same_kind"):
            raise UserTypeError(f"from_gymnasium: {self.takes}, but the policy's actions are {action.dtype}")
        given, action = action, exactly("from_gymnasium: the action", action, self.action_dtype, self.takes)
        if self.edges is not None:  # an action at a bound, in the precision of the policy, is at the bound
            inside = np.clip(action, *self.edges)
            action = np.where(inside.astype(given.dtype) == given, inside, action)
        if not self.counts_from_0:
            action = action + self.starts
        returned = self.call("step", lambda: self.env.step(action))
        if not isinstance(returned, tuple) or len(returned) != 5:
            raise UserTypeError(
                "from_gymnasium: step must return (obs, reward, terminated, truncated, info), as in Gymnasium 1.0, got "
                + _kind(returned)
            )
        obs, reward, terminated, truncated = self._validate(*returned[:4])
        over = terminated | truncated
        ended = self.game_over(over, returned[4])
        numbers = {name: self._info(name, returned[4], over) for name in self.info}
        obs, final_obs, available = self._after_reset(obs, over, returned[4])
        return HostStep(obs, reward, terminated, truncated, final_obs, ended, available, numbers)

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
        after, reset_info = self.call("reset", lambda: self.env.reset(options={"reset_mask": over}))
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

    def _validate(self, obs: Any, *fields: Any) -> tuple[np.ndarray, ...]:
        # Copy, because an environment may write its next step into the same arrays.
        reward, terminated, truncated = (np.array(x) for x in fields)
        named = {"reward": reward, "terminated": terminated, "truncated": truncated}
        for name, x in named.items():
            if x.shape != (self.num_envs,):
                raise ShapeError(f"from_gymnasium: {name} of step must have shape {(self.num_envs,)}, got {x.shape}")
            if name != "reward" and x.dtype.kind != "b":
                raise UserTypeError(f"from_gymnasium: {name} of step must be boolean, got {x.dtype}: return {name} > 0")
        if not _is_numeric(reward):
            raise UserTypeError(f"from_gymnasium: reward of step must be numbers, got {reward.dtype}")
        reward = exactly("from_gymnasium: reward of step", reward, FLOAT, "scale it in a wrapper")
        return self._checked_obs("step", obs), reward, terminated, truncated

    def _checked_obs(self, what: str, obs: Any) -> np.ndarray:
        obs = np.asarray(obs)
        if obs.shape != (self.num_envs, *self.shape):
            expected = (self.num_envs, *self.shape)
            raise ShapeError(f"from_gymnasium: the obs of {what} must have shape {expected}, got {obs.shape}")
        return self._cast(f"the obs of {what}", obs)

    def _cast(self, name: str, obs: np.ndarray) -> np.ndarray:
        """Return a copy of observations in the dtype that the device has for the space."""
        if not _is_numeric(obs):
            raise UserTypeError(f"from_gymnasium: {name} must be numbers, got {obs.dtype}")
        return exactly(f"from_gymnasium: {name}", obs, self.dtype, self.remedy)


class Deadline:
    """Calls functions, and raises `UserTimeoutError` for those that take longer than `timeout` seconds."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.late: threading.Thread | None = None  # the thread of the latest call

    def __call__(self, what: str, call: Callable[[], Any]) -> Any:
        """Return or raise what `call` does."""
        if self.timeout is None:
            return call()
        if self.late is not None:
            self.late.join(self.timeout)
            if self.late.is_alive():
                raise UserTimeoutError("the environment still hangs in an earlier call: make a new one")
        done: list[Any] = []

        def run() -> None:
            try:
                done.append((call(), None))
            except BaseException as error:  # raised again below, in the calling thread
                done.append((None, error))

        self.late = threading.Thread(target=run, daemon=True)  # a hanging call must not block exit
        self.late.start()
        self.late.join(self.timeout)
        if not done:
            raise UserTimeoutError(
                f"the environment has not returned from {what} within timeout={self.timeout:g} seconds: it hangs, or "
                "needs a longer timeout"
            )
        returned, error = done[0]
        if error is not None:
            raise error
        return returned


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
