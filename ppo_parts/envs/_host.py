"""Environments that step on the host, in Python or C++, with the interface of those that are written in JAX.

A step is a `jax.pure_callback`, so that rollouts, wrappers, recurrent policies, evaluation and `vmap` over seeds work
as they do for any other environment. A callback must not depend on anything but its arguments, and an environment on
the host has a hidden state. Therefore the JAX state holds the number of a vector environment and a count of its steps,
and the vector environment checks the count: a state may be stepped once. Repeating a step with the same action returns
the same result, which is what JAX needs in order to repeat or to batch a callback.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import UserTimeoutError, UserTypeError, UserValueError
from .._hyperparameters import number
from ..functional import ShapeError
from ._callback import numpy_callback
from ._env import TAKEN, Array, Env, Transition, is_discrete, size
from ._episodes import EpisodeState


class HostState(NamedTuple):
    """State of N environments on the host, the inner state of an `EpisodeState`.

    Attributes:
        instance: int32, the number of the vector environment.
        steps: int32, how many times it has been stepped.
    """

    instance: Array
    steps: Array


class HostStep(NamedTuple):
    """The result of one step of a vector environment, arrays `[N, ...]`; the fields are those of `Transition`."""

    obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    final_obs: Any
    ended: Any
    info: Any = {}  # noqa: RUF012 - never written to


class GymnasiumVector:
    """N environments of a `gymnasium.vector` environment; checks everything that they return.

    Args:
        env: the vector environment.
        timeout: seconds that a reset or a step may take; None: no limit.
        info: names of numbers in the environment's `info` to pass on.
    """

    def __init__(self, env: Any, timeout: float | None = None, info: tuple[str, ...] = ()) -> None:
        if not hasattr(env, "num_envs"):
            raise UserTypeError(
                f"from_gymnasium: {env} is not a vector environment: make it with gymnasium.make_vec(..., num_envs=...)"
            )
        self.mode = getattr((env.metadata or {}).get("autoreset_mode"), "name", None)
        if self.mode not in ("SAME_STEP", "DISABLED"):
            raise UserValueError(
                f"from_gymnasium: the environment's autoreset mode is {self.mode}, it must be SAME_STEP or DISABLED: "
                "make it with gymnasium.make_vec(..., vector_kwargs={'autoreset_mode': AutoresetMode.SAME_STEP})"
            )
        self.env, self.num_envs = env, env.num_envs
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        size(self.observation_space)  # raises if observations are not arrays
        if not is_discrete(self.action_space) and not hasattr(self.action_space, "low"):
            raise UserValueError(f"{self.action_space} is not supported: actions must be a Discrete or a Box space")
        self.shape = tuple(self.observation_space.shape)
        self.dtype = obs_dtype(self.observation_space)
        self.first_action = int(getattr(self.action_space, "start", 0))  # Discrete actions need not start at 0
        self.call, self.info = Deadline(timeout), info

    def reset(self, seed: int) -> np.ndarray:
        """Start new episodes in all environments; return their observations."""
        returned = self.call("reset", lambda: self.env.reset(seed=seed))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise UserTypeError(f"from_gymnasium: reset must return (obs, info), got {_kind(returned)}")
        return self._checked_obs("reset", returned[0])

    def step(self, action: np.ndarray) -> HostStep:
        """Step all environments once."""
        if self.first_action:
            action = action + self.first_action
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
        obs, final_obs = self._after_reset(obs, over, returned[4])
        return HostStep(obs, reward, terminated, truncated, final_obs, ended, numbers)

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
        frame, *_ = self.call("render", self.env.render)
        return np.asarray(frame, np.uint8)

    def close(self) -> None:
        """Release the environments."""
        self.env.close()

    def _after_reset(self, obs: np.ndarray, over: np.ndarray, info: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the observations to act on, after a reset where an episode ended, and those that followed the step."""
        if not np.count_nonzero(over):  # several times as fast as over.any()
            return obs, obs
        if self.mode == "SAME_STEP":
            return obs, self._final_obs(obs, over, info)
        after, _ = self.call("reset", lambda: self.env.reset(options={"reset_mask": over}))
        return np.where(over.reshape(-1, *[1] * (obs.ndim - 1)), self._checked_obs("reset", after), obs), obs

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
                numbers[i] = one.item()
        if missing := np.flatnonzero(over & np.isnan(numbers)).tolist():
            hidden = {name, "final_obs", "final_info"}
            others = sorted(key for key in {**info, **final} if not key.startswith("_") and key not in hidden)
            raise UserValueError(
                f"from_gymnasium: environment {missing[0]} ended an episode without a number info[{name!r}], which "
                f"info= asks for; there are {', '.join(others) or 'none'}"
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
            final[i] = one
        return final

    def _validate(self, obs: Any, *fields: Any) -> tuple[np.ndarray, ...]:
        # Copies, because an environment may write its next step into the same arrays.
        reward, terminated, truncated = (np.array(x) for x in fields)
        named = {"reward": reward, "terminated": terminated, "truncated": truncated}
        for name, x in named.items():
            if x.shape != (self.num_envs,):
                raise ShapeError(f"from_gymnasium: {name} of step must have shape {(self.num_envs,)}, got {x.shape}")
            if name != "reward" and x.dtype.kind != "b":
                raise UserTypeError(f"from_gymnasium: {name} of step must be boolean, got {x.dtype}: return {name} > 0")
        if not _is_numeric(reward):
            raise UserTypeError(f"from_gymnasium: reward of step must be numbers, got {reward.dtype}")
        return self._checked_obs("step", obs), reward.astype(np.float32), terminated, truncated

    def _checked_obs(self, what: str, obs: Any) -> np.ndarray:
        obs = np.asarray(obs)
        if obs.shape != (self.num_envs, *self.shape):
            expected = (self.num_envs, *self.shape)
            raise ShapeError(f"from_gymnasium: the obs of {what} must have shape {expected}, got {obs.shape}")
        if not _is_numeric(obs):
            raise UserTypeError(f"from_gymnasium: the obs of {what} must be numbers, got {obs.dtype}")
        return obs.astype(self.dtype)  # a copy


def from_gymnasium(
    make: Callable[[int], Any], *, info: str | tuple[str, ...] = (), timeout: float | None = None
) -> Env:
    """Make an `Env` of Gymnasium vector environments, which step on the host.

    Everything that takes an `Env` takes it. Two things differ. A checkpoint cannot hold the state of such an
    environment, so a run that is resumed begins new episodes. And a state may be stepped only once: after an update of
    a rollout, only the latest state can be continued.

    Each `reset` makes new vector environments, which live as long as the `Env`: reset once, and begin again with
    `restart` only.

    Gymnasium's automatic reset modes SAME_STEP and DISABLED are supported. NEXT_STEP, its default, is not, because it
    spends a step on each reset, which a learner must not see.

    Args:
        make: `make(num_envs)` returns a new vector environment with that many environments. Its `reset` takes a seed.
        info: names of numbers that the environment reports in `info`, such as "is_success". They become
            `Transition.info`: those of the step that ended an episode are metrics, and `rollout(keep_info=)` keeps all.
            NaN where a step reports none; a step that ends an episode must report it.
        timeout: seconds that a reset or a step may take; None: no limit. With a timeout, the environment is called from
            other threads.

    Raises:
        UserTypeError: the environment is not a vector environment. UserValueError: it does not declare how it resets,
            or its spaces are not supported. At a step: an error that names the invalid value that the environment
            returned, or UserTimeoutError.

    Example:
        >>> import gymnasium, jax
        >>> from gymnasium.vector import AutoresetMode
        >>> from ppo_parts import envs
        >>> def make(num_envs):
        ...     kwargs = {"autoreset_mode": AutoresetMode.SAME_STEP}
        ...     return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="sync", vector_kwargs=kwargs)
        >>> env = envs.from_gymnasium(make)
        >>> state, obs = env.reset(jax.random.key(0), 2)
        >>> obs.shape
        (2, 4)
    """
    if timeout is not None:
        number("from_gymnasium", "timeout", timeout, 0, open_low=True, schedule=False)
    names = (info,) if isinstance(info, str) else info
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) and name not in TAKEN for name in names):
        raise UserValueError(
            f"from_gymnasium: info must be names of numbers, other than {', '.join(TAKEN)}, which every episode "
            f"reports; got {info!r}"
        )
    names = tuple(dict.fromkeys(names))
    return from_host(lambda num_envs: GymnasiumVector(make(num_envs), timeout, names))


def from_host(make: Callable[[int], GymnasiumVector]) -> Env:
    """Make an `Env` from a function that returns N environments on the host."""
    example = make(1)
    dtype, names = example.dtype, example.info
    observation_space, action_space = example.observation_space, example.action_space
    example.close()

    def env_of(instances: Instances) -> Env:
        def reset(key: Array, num_envs: int) -> tuple[EpisodeState, Array]:
            shapes = (_shape((), np.int32), _shape((num_envs, *observation_space.shape), dtype))
            seed = jax.random.bits(key, (), np.uint32)
            instance, obs = _callback(lambda seed: instances.open(num_envs, seed), shapes, seed)
            return EpisodeState.begin(HostState(instance, jnp.zeros_like(instance)), num_envs), obs

        def step(key: Array, state: EpisodeState, action: Array) -> tuple[EpisodeState, Transition]:
            del key
            num_envs = state.episode_length.shape[-1]
            obs = _shape((num_envs, *observation_space.shape), dtype)
            # A call costs more with every argument and result, so small ones travel together.
            which = jnp.stack([state.inner.instance, state.inner.steps])
            shapes = obs, obs, _shape((4 + len(names), num_envs), np.float32)
            obs, final_obs, numbers = _callback(instances.step, shapes, which, action)
            reward, (terminated, truncated, ended) = numbers[0], numbers[1:4] > 0
            info, inner = dict(zip(names, numbers[4:], strict=True)), state.inner
            out = HostStep(obs, reward, terminated, truncated, final_obs, ended, info)
            counted = state.add(out.reward)
            episodes = {"episode_return": counted.episode_return, "episode_length": counted.episode_length}
            after = counted.proceed(inner._replace(steps=inner.steps + 1), out.ended)
            return after, Transition(**out._asdict(), **episodes)

        def restart(key: Array, state: EpisodeState) -> tuple[EpisodeState, Array]:
            return reset(key, state.episode_length.shape[-1])

        def evaluation(state: EpisodeState) -> Env:
            del state
            return env_of(evaluating)

        def render(state: EpisodeState) -> np.ndarray:
            return instances.envs[int(state.inner.instance)].render()

        return Env(reset, step, observation_space, action_space, evaluation, restart=restart, render=render)

    evaluating = Instances(make, reuse=True)
    return env_of(Instances(make, reuse=False))


class Instances:
    """The vector environments of an `Env`, by number.

    Args:
        make: makes a vector environment of a given size.
        reuse: whether a reset may end the episodes of earlier ones, as in evaluations, of which there is one at a time.
    """

    def __init__(self, make: Callable[[int], GymnasiumVector], reuse: bool) -> None:
        self.make, self.reuse = make, reuse
        self.envs: list[GymnasiumVector] = []
        self.counts: list[int] = []
        self.latest: list[tuple[np.ndarray, HostStep] | None] = []  # the action and the result of the last step
        self.failed: set[int] = set()  # instances of which a step failed, so that their state is unknown

    def open(self, num_envs: int, seed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reset a vector environment for each seed; return their numbers and observations."""
        pairs = [self._open(index, num_envs, int(one)) for index, one in enumerate(seed.ravel())]
        numbers, obs = (np.stack(x) for x in zip(*pairs, strict=True))
        return numbers.reshape(seed.shape).astype(np.int32), obs.reshape(*seed.shape, *obs.shape[1:])

    def _open(self, index: int, num_envs: int, seed: int) -> tuple[int, np.ndarray]:
        if not self.reuse or index == len(self.envs):
            index = len(self.envs)
            self.envs.append(self.make(num_envs))
            self.counts.append(0)
            self.latest.append(None)
        elif self.envs[index].num_envs != num_envs:
            self.envs[index].close()
            self.envs[index] = self.make(num_envs)
        self.counts[index], self.latest[index] = 0, None
        self.failed.discard(index)
        return index, self.envs[index].reset(seed % 2**31)

    def step(self, which: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Step vector environments.

        Args:
            which: `[..., 2]`, the number of each vector environment, and how many steps it has done.
            action: `[..., N, ...]`.

        Returns:
            The next observations, the final observations, and `[..., 4 + K, N]`: reward, terminated, truncated, ended
            and K numbers of `info`.
        """
        if which.ndim == 1:
            index, count = which.tolist()  # Python's integers are faster to compare than NumPy's
            return _packed(self._step(index, count, action))
        actions = action.reshape(-1, *action.shape[which.ndim - 1 :])
        each = zip(which.reshape(-1, 2), actions, strict=True)
        stepped = (self._step(index, count, one) for (index, count), one in each)
        several = (np.stack(x) for x in zip(*map(_packed, stepped), strict=True))
        obs, final_obs, numbers = (x.reshape(*which.shape[:-1], *x.shape[1:]) for x in several)
        return obs, final_obs, numbers

    def _step(self, index: int, count: int, action: np.ndarray) -> HostStep:
        if not 0 <= index < len(self.envs):
            raise UserValueError(
                "this state of an environment on the host was made in another process: begin new episodes with "
                "env.restart(key, state)"
            )
        latest = self.latest[index]
        if latest is not None and count == self.counts[index] - 1 and np.array_equal(latest[0], action):
            return latest[1]
        if count != self.counts[index]:
            raise UserValueError(
                f"this state of an environment on the host is from step {count} and the environment has done "
                f"{self.counts[index]}: it cannot go back; step the latest state, or env.restart(key, state)"
            )
        if index in self.failed:
            raise UserValueError(
                "an earlier step of this environment failed, so its state is unknown: begin new episodes with "
                "env.restart(key, state)"
            )
        action = action.copy()  # an environment may keep or change it, and XLA will write to its memory
        self.failed.add(index)
        result = self.envs[index].step(action)
        self.failed.discard(index)
        self.counts[index], self.latest[index] = count + 1, (action, result)
        return result


def _packed(step: HostStep) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = np.array([step.reward, step.terminated, step.truncated, step.ended, *step.info.values()], np.float32)
    return step.obs, step.final_obs, numbers


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
                "needs a longer one"
            )
        returned, error = done[0]
        if error is not None:
            raise error
        return returned


_raised: list[BaseException] = []  # the latest error of an environment, which XLA reports as text only


@contextlib.contextmanager
def host_errors() -> Iterator[None]:
    """Raise the error of an environment on the host itself, rather than XLA's report of it."""
    _raised.clear()
    try:
        yield
    except Exception as error:
        if not _raised or _raised[0] is error:
            raise
        raise _raised.pop() from None


def _callback(function: Callable[..., Any], shapes: Any, *args: Array) -> Any:
    def call(*args: np.ndarray) -> Any:
        try:
            return function(*args)
        except BaseException as error:
            _raised[:] = [error]
            raise

    return numpy_callback(call, shapes, *args)


def obs_dtype(space: Any) -> Any:
    """Return the dtype of observations on the device: 32 bits instead of 64."""
    dtype = np.dtype(getattr(space, "dtype", None) or np.float32)
    return {"float64": np.dtype(np.float32), "int64": np.dtype(np.int32)}.get(dtype.name, dtype)


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _is_numeric(x: np.ndarray) -> bool:
    return x.dtype.kind in "biuf"  # np.issubdtype takes several microseconds


def _kind(x: Any) -> str:
    return f"{len(x)} items" if isinstance(x, tuple) else type(x).__name__
