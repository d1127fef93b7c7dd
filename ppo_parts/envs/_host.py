"""Environments that step on the host, in Python or C++, but have the same interface as JAX environments.

A step is a callback, which must depend only on its arguments, but an environment on the host has a hidden state.
Therefore the JAX state contains the number of a vector environment and a count of its steps and resets. The vector
environment checks the count, so each state can be stepped only once. Repeating a step with the same action returns the
same result, so that JAX may repeat or batch a callback.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.checked import checked
from .._base.hyperparameters import check_takes
from ..errors import UserValueError
from ._env import Array, Env, Observation, Transition, as_observation
from ._episodes import EpisodeState
from ._vector import RESTART_REMEDY, GymnasiumVector

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:  # an old version of JAX
    buffer_callback = None  # type: ignore[assignment]


class HostState(NamedTuple):
    """The number of a vector environment, and its count of steps and resets, both int32."""

    instance: Array
    steps: Array


@checked
def from_gymnasium(
    make: Callable[[int], Any], *, info: str | tuple[str, ...] = (), action_mask: str | None = None
) -> Env:
    """Make an `Env` from Gymnasium vector environments, which step on the host.

    A checkpoint cannot contain the state of such an environment, so a resumed run begins new episodes. Only the latest
    state of a rollout can be stepped, once. Each `reset` makes new vector environments, which live as long as the
    `Env`, so call `reset` once, and `restart` afterwards.

    Args:
        make: function `make(num_envs)` that returns a new vector environment with that many environments. Its `reset`
            must take a seed, and its autoreset mode must be SAME_STEP; the default, NEXT_STEP, spends a step on resets.
        info: names of numbers that the environment reports in `info`, such as "is_success". They become
            `Transition.info`, with NaN for steps that do not report them; a step that ends an episode must report them.
        action_mask: name of the entry of `info`, such as "action_mask", that has the mask of available actions after
            every reset and step, 0 or 1 for each option of each choice. Observations are then `Observation`.

    Raises:
        UserTypeError: if it is not a vector environment. UserValueError: if it does not declare its autoreset mode, or
            if its spaces are not supported. A step also raises errors, which name the invalid value.

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
    check_takes("from_gymnasium", "make", make, ("num_envs",))
    names = tuple(dict.fromkeys((info,) if isinstance(info, str) else info))

    def make_vector(num_envs: int, count: int = 0) -> GymnasiumVector:
        made = GymnasiumVector(make(num_envs), names, action_mask, count)
        if made.num_envs != num_envs:
            says = f"make({num_envs}) returned a vector environment of {made.num_envs}: pass num_envs on"
            raise UserValueError(f"from_gymnasium: {says}")
        return made

    example = make_vector(1)
    example.env.close()

    def make_obs_struct(num_envs: int) -> Any:
        obs = jax.tree.map(lambda one: jax.ShapeDtypeStruct((num_envs, *one.shape), one.dtype), example.observations)
        mask = jax.ShapeDtypeStruct((num_envs, sum(example.options)), np.bool_)
        return obs if action_mask is None else Observation(obs, mask)

    def make_env(instances: Instances) -> Env:
        def reset(key: Array, num_envs: int, again: Any = -1) -> tuple[EpisodeState, Any]:
            shapes = jax.ShapeDtypeStruct((2,), np.int32), make_obs_struct(num_envs)
            seed = jax.random.bits(key, (), np.uint32)
            which, obs = numpy_callback(lambda *x: instances.open(num_envs, *x), shapes, seed, jnp.int32(again))
            return EpisodeState.begin(HostState(which[0], which[1]), num_envs), obs

        def step(key: Array, state: EpisodeState, action: Any) -> tuple[EpisodeState, Transition]:
            num_envs = state.episode_length.shape[-1]
            # Each argument and result slows down a call, so small ones are packed into one array.
            which = jnp.stack([state.inner.instance, state.inner.steps])
            struct = make_obs_struct(num_envs)
            shapes = struct, as_observation(struct).obs, jax.ShapeDtypeStruct((4 + len(names), num_envs), np.float32)
            obs, final, numbers = numpy_callback(instances.step, shapes, which, *jax.tree.leaves(action))
            terminated, truncated, ended = numbers[1:4] > 0
            truncated &= ~terminated  # an episode may be terminated in the last step that its time limit allows
            if action_mask is not None:  # where an episode is over, no action follows
                final = Observation(final, obs.available | (terminated | truncated)[:, None])
            fields = {"terminated": terminated, "truncated": truncated, "ended": ended, "obs": obs, "final_obs": final}
            fields["info"] = dict(zip(names, numbers[4:], strict=True))
            return state.advance(state.inner._replace(steps=state.inner.steps + 1), ended, numbers[0], **fields)

        env = Env(
            reset,
            step,
            example.observation_space,
            example.action_space,
            evaluation=lambda state: env,
            restart=lambda key, state: reset(key, state.episode_length.shape[-1], state.inner.instance),
            render=lambda state: instances.find(int(state.inner.instance)).render(),
        )
        return env

    evaluating = make_env(Instances(make_vector, reuse=True))
    return make_env(Instances(make_vector))._replace(evaluation=lambda state: evaluating)


@dataclasses.dataclass
class Instances:
    """The numbered vector environments of an `Env`."""

    make: Callable[..., GymnasiumVector]
    reuse: bool = False  # whether a reset reuses earlier ones instead of making new ones, as in evaluations
    each: list[GymnasiumVector] = dataclasses.field(default_factory=list)

    def open(self, num_envs: int, seed: np.ndarray, again: np.ndarray) -> tuple[Any, ...]:
        """Reset the vector environments `again`, or new ones, with these seeds, and return states and observations."""
        numbers = list(range(seed.size)) if self.reuse else np.broadcast_to(again, seed.shape).ravel().tolist()
        once = [-1 if x in numbers[:i] else x for i, x in enumerate(numbers)]  # copies of a state get new environments
        return _stack([self._open(*x, num_envs) for x in zip(once, seed.ravel().tolist(), strict=True)], seed.shape)

    def _open(self, index: int, seed: int, num_envs: int) -> tuple[Any, ...]:
        if not 0 <= index < len(self.each):
            index = len(self.each)
            self.each.append(self.make(num_envs))
        elif self.each[index].num_envs != num_envs:
            self.each[index].env.close()
            self.each[index] = self.make(num_envs, self.each[index].count)
        obs = self.each[index].reset(seed % 2**31)
        return np.array([index, self.each[index].count], np.int32), obs

    def find(self, index: int) -> GymnasiumVector:
        """Return the vector environment with a number."""
        if not 0 <= index < len(self.each):
            says = "this state of an environment on the host was made in another process, or by another Env"
            raise UserValueError(f"{says}: {RESTART_REMEDY}")
        return self.each[index]

    def step(self, which: np.ndarray, *action: np.ndarray) -> tuple[Any, ...]:
        """Step several vector environments, as `GymnasiumVector.step` does for one.

        `which`, `[..., 2]`, has the `HostState` of each; actions are `[..., N, ...]`.
        """
        if which.ndim == 1:
            index, count = which.tolist()  # Python integers are faster to compare than NumPy's
            return self.find(index).step_once(count, *action)
        actions = [x.reshape(-1, *x.shape[which.ndim - 1 :]) for x in action]
        each = [self.step(*one) for one in zip(which.reshape(-1, 2), *actions, strict=True)]
        return _stack(each, which.shape[:-1])


def _stack(results: list[tuple[Any, ...]], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Stack the results of several vector environments along new axes of this shape."""
    return jax.tree.map(lambda *x: np.reshape(np.stack(x), (*shape, *np.shape(x[0]))), *results)


def numpy_callback(function: Callable[..., Any], shapes: Any, *args: Array) -> Any:
    """Compute `jax.pure_callback(function, shapes, *args, vmap_method="broadcast_all")`, faster on a CPU.

    `jax.pure_callback` first converts its arguments to JAX arrays on the host. With four CartPole environments, a step
    of a rollout took 1.5 ms with it, and 0.4 ms without. It is used on other devices, in processes with several
    devices, and in old versions of JAX. The function must return the declared shapes, and must not keep or change its
    arguments.
    """
    leaves, structure = jax.tree.flatten(shapes)

    def call(*args: Any) -> list[Any]:
        try:
            return jax.tree.leaves(function(*(np.asarray(x) for x in args)))
        except BaseException as error:
            _raised[:] = [error]
            raise

    def write(context: Any, out: Any, *args: Any) -> None:
        for buffer, x in zip(out, call(*args), strict=True):
            np.asarray(buffer)[...] = x

    if not any(isinstance(x, jax.core.Tracer) for x in args):
        results = [jnp.asarray(x) for x in call(*args)]
    elif buffer_callback is None or jax.default_backend() != "cpu" or jax.device_count() > 1:
        results = jax.pure_callback(call, leaves, *args, vmap_method="broadcast_all")
    else:
        results = buffer_callback(write, leaves, vmap_method="broadcast_all")(*args)
    return jax.tree.unflatten(structure, results)


_raised: list[BaseException] = []  # the latest error of a function, which XLA reports only as text


@contextlib.contextmanager
def host_errors() -> Iterator[None]:
    """Raise the original error of an environment on the host instead of XLA's report of it."""
    try:
        yield
    except Exception as error:
        raised = _raised.pop() if _raised else None
        says = f"{type(raised).__name__}: {raised}"
        # The error may be a different one, for example from an environment that steps in another thread.
        if raised is None or not isinstance(error, jax.errors.JaxRuntimeError) or says not in str(error):
            raise
        raised.add_note("This error was raised by the environment.")
        raise raised from None
