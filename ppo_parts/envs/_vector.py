"""A `gymnasium.vector` environment, with checks of everything that it returns."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..errors import ShapeError, UserTypeError, UserValueError
from ._env import Observation, cast_exactly, check_items
from ._rendering import as_frame, opengl_errors
from ._spaces import Discrete, MultiDiscrete, count_options, is_choice_open, make_space, map_space

FLOAT = np.dtype(np.float32)
RESET, STEP = ("obs", "info"), ("obs", "reward", "terminated", "truncated", "info")
GYMNASIUM = ", as in Gymnasium 1.0"
RESTART_REMEDY = "begin new episodes with env.restart(key, state)"


class GymnasiumVector:
    """A `gymnasium.vector` environment of N environments, which checks everything that it returns.

    If the vector environment has an attribute `ended`, it tells after each step where an episode really ended, and not
    only for the learner, as with a lost life in Atari. `count` is the number of steps and resets of the environments
    that it replaces, so that their states are not mistaken for its own. Other arguments are as in `from_gymnasium`.
    """

    def __init__(self, env: Any, info: tuple[str, ...] = (), action_mask: str | None = None, count: int = 0) -> None:
        if not hasattr(env, "num_envs"):
            raise UserTypeError(f"from_gymnasium: {env} is not a vector environment: use gymnasium.make_vec")
        mode = getattr((env.metadata or {}).get("autoreset_mode"), "name", None)
        if mode != "SAME_STEP":
            remedy = "gymnasium.make_vec(..., vector_kwargs={'autoreset_mode': AutoresetMode.SAME_STEP})"
            raise UserValueError(f"from_gymnasium: autoreset mode is {mode}, but must be SAME_STEP: use {remedy}")
        self.env, self.num_envs = env, env.num_envs
        self.actions = map_space(functools.partial(HostSpace, "actions"), env.single_action_space)
        self.observations = map_space(functools.partial(HostSpace, "observations"), env.single_observation_space)
        self.action_space = make_space(jax.tree.map(lambda one: one.space, self.actions))
        self.observation_space = make_space(jax.tree.map(lambda one: one.space, self.observations))
        self.info, self.action_mask, self.options = info, action_mask, count_options(self.action_space)
        self.count = count
        self.latest: tuple[list[np.ndarray], tuple[Any, ...]] | None = None  # action and result of the last step
        self.failed = False  # whether a step failed, so that the state is unknown
        if action_mask is not None and not self.options:
            says = f"from_gymnasium: action_mask={action_mask!r} masks discrete actions, but this environment takes"
            raise UserValueError(f"{says} {env.single_action_space}: leave it out")

    def reset(self, seed: int) -> Any:
        """Start new episodes in all environments, and return their observations."""
        self.count, self.latest, self.failed = self.count + 1, None, False
        obs, info = check_items("from_gymnasium", "reset", self.env.reset(seed=seed), RESET, GYMNASIUM)
        return self._add_masks("reset", self._cast("the obs of reset", obs, self.num_envs), info)

    def step(self, *action: np.ndarray) -> tuple[Any, Any, np.ndarray]:
        """Step all environments once; the actions are the leaves of a tree.

        Return the next observations to act on, the observations that followed the step (without masks), and a float32
        array `[4 + K, N]` with reward, terminated, truncated, ended and K numbers of `info`.
        """
        leaves = iter(action)
        returned = self.env.step(jax.tree.map(lambda one: one.on_host(next(leaves)), self.actions))
        obs, *fields, info = check_items("from_gymnasium", "step", returned, STEP, GYMNASIUM)
        obs = self._cast("the obs of step", obs, self.num_envs)
        reward, terminated, truncated = map(self._check_field, STEP[1:4], fields)
        over = terminated | truncated
        ended = getattr(self.env, "ended", over)
        # Pack small arrays; this also copies arrays that the environment may overwrite in its next step.
        reported = [self._read_info(name, info, over) for name in self.info]
        packed = np.array([reward, terminated, truncated, ended, *reported], FLOAT)
        any_over = np.count_nonzero(over)  # much faster than over.any()
        return self._add_masks("step", obs, info), self._read_final_obs(obs, over, info) if any_over else obs, packed

    def step_once(self, count: int, *action: np.ndarray) -> tuple[Any, ...]:
        """Step the state that follows `count` steps and resets, or repeat the result of the latest step."""
        if self.latest is not None and count == self.count - 1 and all(map(np.array_equal, self.latest[0], action)):
            return self.latest[1]
        if count != self.count:
            says = f"this state is from call {count} of step and reset, but the environment on the host is at call"
            raise UserValueError(f"{says} {self.count} and cannot go back: step the latest state, or {RESTART_REMEDY}")
        if self.failed:
            says = "an earlier step of this environment failed, so its state is unknown"
            raise UserValueError(f"{says}: {RESTART_REMEDY}")
        copies = [x.copy() for x in action]  # XLA will overwrite this memory
        self.failed = True
        result = self.step(*copies)
        self.failed, self.count, self.latest = False, count + 1, (copies, result)
        return result

    def render(self) -> np.ndarray:
        """Render the first environment, `[H, W, 3]`."""
        if getattr(self.env, "render_mode", None) != "rgb_array":
            remedy = 'make it with gymnasium.make_vec(..., render_mode="rgb_array")'
            raise UserValueError(f"to draw this environment, {remedy}")
        with opengl_errors():
            frame, *_ = self.env.render()
        return as_frame("from_gymnasium", frame)

    def _add_masks(self, what: str, obs: Any, info: Any) -> Any:
        """Return observations with the action masks `[N, n]` that the environments report, if any."""
        if self.action_mask is None:
            return obs
        available, where = np.ones((self.num_envs, sum(self.options)), bool), f"info[{self.action_mask!r}] of {what}"
        for i, given in enumerate(self._read_entry(self.action_mask, info)):
            # A mask of several choices may be one array, or one array per choice.
            several = isinstance(given, (tuple, list))
            row = np.concatenate([np.ravel(x) for x in given]) if several else np.asarray(given)
            if row.shape != available.shape[1:] or not np.isin(row, (0, 1)).all():
                says = f"{where} must have 0 or 1 for each of the options {self.options} in every reset and step"
                raise UserValueError(f"from_gymnasium: {says}, but that of environment {i} is {given!r}")
            available[i] = row
        if not is_choice_open(self.options, available).all():
            raise UserValueError(f"from_gymnasium: {where} leaves no action: at least one option must be available")
        return Observation(obs, available)

    def _read_info(self, name: str, info: Any, over: np.ndarray) -> np.ndarray:
        """Return the number that each environment reports as `info[name]` in this step, or NaN."""
        final = info.get("final_info", {})
        numbers = np.full(self.num_envs, np.nan, np.float32)
        given = zip(over, self._read_entry(name, final), self._read_entry(name, info), strict=True)
        for i, x in enumerate(last if ended else now for ended, last, now in given):
            if x is not None:
                one = np.asarray(x)
                if one.size != 1 or one.dtype.kind not in "biuf":
                    says = f"from_gymnasium: info[{name!r}] of environment {i} must be a number, got {x!r}"
                    raise UserTypeError(f"{says}: leave it out of info=, or reduce it to a number in a wrapper")
                numbers[i] = cast_exactly(f"from_gymnasium: info[{name!r}]", one, FLOAT, "report it as a float").item()
        if missing := np.flatnonzero(over & np.isnan(numbers)).tolist():
            names = {*info, *final} - {name, "final_obs", "final_info"}
            reports = ", ".join(sorted(each for each in names if not each.startswith("_"))) or "nothing"
            says = f"environment {missing[0]} ended an episode without a number info[{name!r}], which info= asks for"
            raise UserValueError(f"from_gymnasium: {says}; it reports {reports}")
        return numbers

    def _read_entry(self, name: str, info: Any) -> list[Any]:
        """Return what each environment reports as `info[name]`, or None."""
        if not isinstance(info, Mapping) or name not in info:
            return [None] * self.num_envs
        there = info.get(f"_{name}", np.ones(self.num_envs, bool))
        return [x if reports else None for x, reports in zip(info[name], there, strict=True)]

    def _read_final_obs(self, obs: Any, over: np.ndarray, info: Any) -> Any:
        """Return `obs`, replaced by the final observation from `info` where an episode ended."""
        finals, given = jax.tree.map(np.copy, obs), self._read_entry("final_obs", info)
        for i in map(int, np.flatnonzero(over)):
            name = f'info["final_obs"][{i}], which SAME_STEP promises where an episode ended,'
            last = self._cast(name, given[i])
            for final, x in zip(jax.tree.leaves(finals), jax.tree.leaves(last), strict=True):
                final[i] = x
        return finals

    def _check_field(self, name: str, x: Any) -> np.ndarray:
        """Check and return a field of a step, one number (the reward) or one flag (other fields) per environment."""
        x = np.asarray(x)
        if x.shape != (self.num_envs,):
            raise ShapeError(f"from_gymnasium: {name} of step must have shape {(self.num_envs,)}, got {x.shape}")
        if name == "reward":
            return cast_exactly("from_gymnasium: reward of step", x, FLOAT, "scale it in a wrapper")
        if x.dtype.kind != "b":
            raise UserTypeError(f"from_gymnasium: {name} of step must be boolean, got {x.dtype}: return {name} > 0")
        return x

    def _cast(self, name: str, obs: Any, *axes: int) -> Any:
        on_device = lambda space, one, x: one.on_device(name, x, *axes)  # noqa: E731
        return map_space(on_device, self.observation_space, self.observations, obs)


class HostSpace:
    """An environment's space on the host, not a tree, and the policy's `space`, in which integers begin at 0."""

    def __init__(self, what: str, space: Any) -> None:
        axes = len(getattr(space, "shape", None) or ())
        if hasattr(space, "low"):
            self.space = space
        elif hasattr(space, "nvec") and axes == 1:
            self.space = MultiDiscrete(tuple(map(int, space.nvec)))
        elif hasattr(space, "n") and axes <= 1:  # with an axis, it is a MultiBinary
            self.space = MultiDiscrete((2,) * int(space.n)) if axes else Discrete(int(space.n))
        else:
            known = "a Discrete or Box, a MultiDiscrete or MultiBinary with one axis, or a Dict or Tuple of them"
            raise UserValueError(f"{space} is not supported: {what} must be {known}; change them in a wrapper")
        starts = np.asarray(getattr(space, "start", 0))
        self.starts = starts if starts.any() else None
        self.host_dtype, self.shape = np.dtype(getattr(space, "dtype", None) or FLOAT), tuple(space.shape)
        # On the device, floats have at most 32 bits, as do integers unless x64 is enabled.
        narrow = FLOAT if self.host_dtype == np.float64 else jax.dtypes.canonicalize_dtype(self.host_dtype)
        self.dtype = np.dtype(narrow)
        self.host_space, self.text = space, str(space)  # formatting a space takes longer than a step

    def on_host(self, action: np.ndarray) -> np.ndarray:
        """Return a copy of the policy's actions in the form that the environment accepts."""
        takes = f"the environment takes {self.host_dtype} ({self.text})"
        if not np.can_cast(action.dtype, self.host_dtype, "same_kind"):
            raise UserTypeError(f"from_gymnasium: {takes}, but the policy's actions are {action.dtype}")
        cast = cast_exactly("from_gymnasium: the action", action, self.host_dtype, takes)
        if self.host_dtype == np.float64:  # a float32 action at a bound must be exactly at it
            inside = np.clip(cast, self.host_space.low, self.host_space.high)
            cast = np.where(inside.astype(action.dtype) == action, inside, cast)
        return cast if self.starts is None else cast + self.starts

    def on_device(self, name: str, obs: Any, *axes: int) -> np.ndarray:
        """Return a copy of observations in the form that the policy sees."""
        if np.shape(obs) != (expected := (*axes, *self.shape)) or obs is None:
            got = None if obs is None else np.shape(obs)
            raise ShapeError(f"from_gymnasium: {name} must have shape {expected}, got {got}")
        convert = "or convert that in a wrapper; integers keep 64 bits with jax_enable_x64"
        remedy = f"the observation space is {self.text}; give it the dtype of what the environment returns, {convert}"
        x = np.asarray(obs)
        if self.starts is not None and x.dtype.kind in "biuf":
            x = x - self.starts
        return cast_exactly(f"from_gymnasium: {name}", x, self.dtype, remedy)
