"""The protocol of environments."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import UserTypeError, UserValueError
from .._base.hyperparameters import check_count
from ..functional import ShapeError
from ..functional._common import known_values, range_error
from ._spaces import leaf_spaces, map_space

Array = jax.Array


class Transition(NamedTuple):
    """The result of a step of N environments; every leaf begins with `[N]`.

    In multi-agent environments, `obs`, `reward`, `terminated`, `truncated`, `final_obs` and `episode_return` begin with
    `[N, A]`.

    Attributes:
        obs: the next observation of the policy; where an episode just ended, the first of a new episode.
        reward: reward of this step.
        terminated: True where the step ended the episode.
        truncated: True where a time limit cut the episode.
        final_obs: the observation that actually followed; equals `obs` unless the step ended the episode, even if only
            for the learner, as a lost life in Atari may do.
        episode_return: sum of the unscaled rewards of the episode so far, including this step.
        episode_length: number of steps of the episode so far, including this step.
        mask: `[N, A]`, True where the agent took part in this step; None: everywhere.
        ended: `[N]`, True where the episode of all agents ended; None, for one agent: `terminated | truncated`.
        info: numbers `[N]`, by name ("won", for example). Those of the step that ended an episode become metrics;
            `rollout(keep_info=)` keeps those of every step. "return", "length", "episode_return", "episode_length",
            "terminated" and "truncated" are reserved.
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
        """Return where an episode ended, and where a time limit was the reason, both `[N]` (or `[T, N]`)."""
        if self.ended is None:
            return self.terminated | self.truncated, self.truncated & ~self.terminated
        return self.ended, self.ended & jnp.any(self.truncated.reshape(*self.ended.shape, -1), axis=-1)

    def check(self, obs: Any, each: tuple[int, ...]) -> None:
        """Raise unless the shapes and dtypes of all fields are valid, which costs nothing at run time.

        Args:
            obs: the observation of the previous step.
            each: `(N,)`, or `(N, A)` with several agents.
        """
        for name in ("obs", "final_obs"):
            if (given := describe(getattr(self, name))) != describe(obs):
                remedy = ". It is the observation that followed, before any reset; where no episode ended it equals obs"
                raise UserTypeError(
                    f"Transition: {name} must be like the observation before, {describe(obs)}, got {given}"
                    + remedy * (name == "final_obs")
                )
        for leaf in jax.tree.leaves(obs):
            if leaf.shape[: len(each)] != each:
                raise ShapeError(f"Transition: obs must begin with the axes {each}, got shape {leaf.shape}")
        for name, dtype in DTYPES.items():
            x, shape = getattr(self, name), each[:1] if name in ("episode_length", "ended") else each
            if x is None and (name == "mask" or (name == "ended" and len(each) == 1)):
                continue
            if x is None and name == "ended":
                raise UserTypeError(
                    "Transition: with several agents, ended must say where the episode of all ended, a boolean array "
                    f"of shape {shape}, such as jnp.all(terminated | truncated, axis=1)"
                )
            if not hasattr(x, "dtype"):
                raise UserTypeError(f"Transition: {name} must be an array of shape {shape}, got {x!r}")
            if x.shape != shape:
                raise ShapeError(f"Transition: {name} must have shape {shape}, got {x.shape}")
            if not jnp.issubdtype(x.dtype, dtype):
                kind, remedy = ("boolean", f"return {name} > 0") if dtype is np.bool_ else ("floating", "return floats")
                raise UserTypeError(f"Transition: {name} must be {kind}, got {x.dtype}: {remedy}")
        for name, x in self.info.items():
            if name in TAKEN:
                raise UserValueError(f"Transition: info[{name!r}] has the name of a metric of every episode: rename it")
            if jnp.shape(x) != each[:1]:
                raise ShapeError(f"Transition: info[{name!r}] must have shape {each[:1]}, got {jnp.shape(x)}")


DTYPES: dict[str, Any] = {
    **dict.fromkeys(("reward", "episode_return"), np.floating),
    "episode_length": np.number,
    **dict.fromkeys(("terminated", "truncated", "mask", "ended"), np.bool_),
}
"""The kinds of numbers in the fields of a `Transition`."""

TAKEN = ("return", "length", "episode_return", "episode_length", "terminated", "truncated")
"""Names that entries of `info` may not have, because rollouts and evaluations report numbers under these names."""

SEATS = ("seat", "next_seat")
"""Who moved, and who is to move in the observation that followed: 1 is the first player, and -1 the second."""


def describe(tree: Any) -> str:
    """Describe a pytree by the shapes and dtypes of its leaves."""

    def words(x: Any) -> str:
        is_array = hasattr(x, "dtype") or isinstance(x, (bool, int, float))
        return f"{jnp.result_type(x)}{list(jnp.shape(x))}" if is_array else repr(x)

    described = jax.tree.map(words, tree)
    return described if isinstance(described, str) else repr(described)


class Observation(NamedTuple):
    """Observations with an action mask, of several agents, or with a part that only the critic sees.

    Attributes:
        obs: `[N, ...]` or `[N, A, D]`, or a tree of such arrays.
        available: `[..., n]`, True where an action may be taken; None: all always may. For a `MultiDiscrete`, it has
            the options of the first choice, then those of the second, and so on; for a `Dict` or `Tuple`, it is a dict
            or a tuple of masks, in which those of always available actions are None. The policies of
            `ppo_parts.networks` apply it; your own policy can do so with `ppo_parts.distributions.mask_logits`.
        privileged: `[N, ...]`, what the critic sees instead, such as the simulator's state; None: it sees `obs`.
    """

    obs: Any
    available: Any = None
    privileged: Any = None


def as_observation(obs: Any) -> Observation:
    """Return observations as an `Observation`, which a plain array is without a mask and a privileged part."""
    return obs if isinstance(obs, Observation) else Observation(obs)


@dataclasses.dataclass(frozen=True)
class Discrete:
    """A space of n actions, 0 to n - 1."""

    n: int
    shape: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        check_count("Discrete", "n", self.n)


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """A space of K integers: choice k has `nvec[k]` options, 0 to `nvec[k] - 1`; actions are `[..., K]`."""

    nvec: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.nvec, (tuple, list, np.ndarray)) or any(map(np.ndim, self.nvec)) or not len(self.nvec):
            raise UserTypeError(
                f"MultiDiscrete: nvec must be a tuple with the number of options of each choice, got {self.nvec!r}"
            )
        object.__setattr__(self, "nvec", tuple(check_count("MultiDiscrete", "nvec", n) for n in self.nvec))

    @property
    def shape(self) -> tuple[int, ...]:
        """`(K,)`."""
        return (len(self.nvec),)


@dataclasses.dataclass(frozen=True)
class Box:
    """A space of real numbers of a shape, between `low` and `high`, which are numbers or arrays."""

    shape: tuple[int, ...]
    low: Any = -math.inf
    high: Any = math.inf

    def __post_init__(self) -> None:
        if not isinstance(self.shape, (tuple, list)):
            raise UserTypeError(
                f"Box: shape must be a tuple of whole numbers, got {self.shape!r}; the order is Box(shape, low, high)"
            )
        object.__setattr__(self, "shape", tuple(check_count("Box", "shape", length, 0) for length in self.shape))
        for name, bound in (("low", self.low), ("high", self.high)):
            if (error := range_error(bound, -math.inf)) is not None:
                raise UserTypeError(f"Box: {name} {error}")
            if len(np.shape(bound)) > len(self.shape) or any(
                n not in (1, length) for n, length in zip(np.shape(bound)[::-1], self.shape[::-1], strict=False)
            ):
                raise UserValueError(f"Box: {name} must fit the shape {self.shape}, got shape {np.shape(bound)}")
        low, high = known_values(self.low), known_values(self.high)
        if low is not None and high is not None and not np.all(low <= high):
            raise UserValueError(f"Box: low must not be above high, got low={self.low!r} and high={self.high!r}")


class Env(NamedTuple):
    """N environments that pure functions step together, with automatic resets.

    Attributes:
        reset: `reset(key, num_envs) -> (state, obs)`. Every leaf of the state begins with `[N]`, except numbers and
            `Moments`, which all environments share.
        step: `step(key, state, action) -> (state, Transition)`.
        observation_space, action_space: spaces of one environment: `Discrete`, `MultiDiscrete`, `Box`, a `Dict` or
            `Tuple` of them, or any other object with the same attributes.
        evaluation: `evaluation(state) -> Env`, the environment to evaluate in: running statistics are frozen as in
            `state`, and rewards are unscaled.
        num_agents: A, if observations, rewards and ends have an axis of agents; None: one agent, without that axis.
        restart: `restart(key, state) -> (state, obs)` begins new episodes and keeps running statistics, where a state
            from a checkpoint cannot be continued, as on the host; None: every state can be.
        observe: `observe(state, obs) -> obs` applies the wrappers to an observation `[N, ...]` of the innermost
            environment, with the running statistics in `state`; None: they do not change it.
        act: `act(action) -> action` applies the wrappers to an action `[N, ...]` of the policy, before the innermost
            environment receives it; None: they do not change it.
        render: `render(state) -> [H, W, 3]`, an image (uint8) of the first of the N environments, made on the host;
            None: the environment cannot be rendered.
        privileged_space: space of `Observation.privileged`; None: the critic sees what the policy sees.
        zero_sum: whether the policy plays both sides of a game. Rewards and returns are those of the first player, and
            `info` has the `SEATS`, with which `ppo_parts.agents.zero_sum` tells the sides apart.
    """

    reset: Callable[[Array, int], tuple[Any, Any]]
    step: Callable[[Array, Any, Any], tuple[Any, Transition]]
    observation_space: Any
    action_space: Any
    evaluation: Callable[[Any], Any]
    num_agents: int | None = None
    restart: Callable[[Array, Any], tuple[Any, Any]] | None = None
    observe: Callable[[Any, Any], Any] | None = None
    act: Callable[[Any], Any] | None = None
    render: Callable[[Any], Any] | None = None
    privileged_space: Any = None
    zero_sum: bool = False


def check_env(where: str, env: Any) -> None:
    """Raise unless `env` is an `Env`."""
    if not isinstance(env, Env):
        raise UserTypeError(
            f"{where}: {env!r} is not an environment: make one with envs.make(...), envs.from_gymnasium(...) or "
            "envs.Env(...)"
        )


def check_interface(where: str, env: Any, names: tuple[str, ...], remedy: str) -> None:
    """Raise unless an object to wrap has these attributes."""
    for name in names:
        if isinstance(env, type) or not hasattr(env, name):
            raise UserTypeError(f"{where}: {env!r} has no {name}: {remedy}, or write an envs.Env")


def check_known(env_id: Any, library: str, known: Iterable[str]) -> None:
    """Raise unless a library has an environment; the error lists similar ones, and Gymnasium's of this name."""
    if env_id in known:
        return
    lowered = {name.lower(): name for name in known}
    near = " or ".join(lowered[name] for name in difflib.get_close_matches(str(env_id).lower(), lowered, 3, 0.6))
    text = f"; did you mean {near}?" if near else f"; it has {', '.join(known)}"
    if _in_gymnasium(env_id):
        text = (
            f", but Gymnasium has, for one agent: its name here is 'gym:{env_id}'"
            + f"; {library} has {near}" * bool(near)
        )
    raise UserValueError(f"{library} has no environment {env_id!r}{text}")


def _in_gymnasium(env_id: Any) -> bool:
    try:
        import gymnasium
    except ImportError:
        return False
    return env_id in gymnasium.registry


def count_options(space: Any) -> tuple[int, ...]:
    """Return how many options each choice of an action has: `(n,)` for `Discrete`, `nvec`, or `()` for a box.

    Example:
        >>> from ppo_parts import envs
        >>> envs.count_options(envs.MultiDiscrete((3, 2))), envs.count_options(envs.Discrete(4))
        ((3, 2), (4,))
    """
    if hasattr(space, "nvec"):
        return tuple(map(int, space.nvec))
    return (int(space.n),) if hasattr(space, "n") else ()


def is_discrete(space: Any) -> bool:
    """Return whether the actions of a space are integers: one of n options (`Discrete`), or several such choices."""
    return all(map(count_options, leaf_spaces(space)))


def action_struct(space: Any, each: tuple[int, ...]) -> Any:
    """Return the shapes and dtypes of actions with the leading axes `each`.

    Raises:
        ValueError: the space does not consist of arrays.
    """

    def struct(space: Any) -> jax.ShapeDtypeStruct:
        shape = () if hasattr(space, "n") else array_shape("actions", space)
        return jax.ShapeDtypeStruct((*each, *shape), jnp.int32 if is_discrete(space) else jnp.float32)

    return map_space(struct, space)


def size(space: Any) -> int:
    """Return how many numbers an element of a space has (1 for `Discrete`), in all entries of a `Dict` or `Tuple`.

    Raises:
        ValueError: a space has no shape, such as one of texts or graphs.
    """
    return sum(math.prod(array_shape("elements", each)) for each in leaf_spaces(space))


def array_shape(what: str, space: Any) -> tuple[int, ...]:
    """Return the shape of a space of arrays; otherwise raise an error that names `what` and the remedy."""
    shape = getattr(space, "shape", None)
    if shape is None:
        raise UserValueError(
            f"{space!r} is not a space of arrays: flatten its {what} in a wrapper around the environment, or use "
            "functions that take its parts (a network of your own; check(env, action=...); check_laws(env, act=...))"
        )
    return tuple(shape)


def exactly(where: str, x: np.ndarray, dtype: np.dtype[Any], remedy: str) -> np.ndarray:
    """Return a copy of `x` in another dtype: floats may be rounded, but no number may change otherwise.

    Raises:
        UserValueError: a number does not fit the dtype, as 0.5 or 300 in uint8, 1e39 in float32 or 2**40 in int32.
    """
    both_float = x.dtype.kind == dtype.kind == "f"
    if np.can_cast(x.dtype, dtype) or (both_float and _is_below(x.ravel(), dtype)):
        return x.astype(dtype)  # nearly always; what follows takes ten times as long
    with np.errstate(all="ignore"):
        cast = x.astype(dtype)
        wrong = np.isfinite(x) & ~np.isfinite(cast) if both_float else cast != x
    if not np.count_nonzero(wrong):
        return cast
    raise UserValueError(f"{where} contains {x[wrong].flat[0]!s}, which {dtype} does not have: {remedy}")


def _is_below(x: np.ndarray, dtype: np.dtype[Any]) -> bool:
    """Return True only if the floats of a vector are finite in another dtype: a fast test, which may miss some."""
    try:
        return bool(x.dot(x) < _largest_square(dtype))
    except RuntimeWarning:  # the square overflowed, in a program that makes warnings errors
        return False


@functools.cache
def _largest_square(dtype: np.dtype[Any]) -> float:
    return float(np.finfo(dtype).max) ** 2
