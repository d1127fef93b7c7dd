"""The protocol of environments."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.trees import are_alike, shapes_of
from .._core.part import Part
from ..errors import ShapeError, UserError, UserTypeError, UserValueError
from ..functional._errors import did_you_mean

Array = jax.Array


class Transition(NamedTuple):
    """The result of a step of N environments.

    Attributes:
        obs: `[N, ...]`, or with agents `[N, A, ...]`, the next observation of the policy. Where an episode just ended,
            it is the first observation of a new episode.
        reward: `[N]`, or with agents `[N, A]`, like `terminated`, `truncated` and `episode_return`.
        terminated: True where the step ended the episode.
        truncated: True where a time limit cut the episode.
        final_obs: the observation that actually followed, shaped like `obs`. It equals `obs` unless the step ended the
            episode (even if only for the learner, as a lost life in Atari may do).
        episode_return: sum of the episode's unscaled rewards up to this step, without those of absent agents.
        episode_length: `[N]`, number of steps of the episode up to this step.
        mask: `[N, A]`, True where the agent took part in this step; None means everywhere.
        ended: `[N]`, True where the episode of all agents ended. With one agent, None means `terminated | truncated`.
        info: numbers `[N]`, by name ("won", for example). The numbers of the step that ended an episode become metrics;
            `rollout(keep_info=)` keeps the numbers of every step.
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
        """Return where an episode ended, and where a time limit ended it, both `[N]` (or `[T, N]`)."""
        if self.ended is None:
            return self.terminated | self.truncated, self.truncated & ~self.terminated
        return self.ended, self.ended & jnp.any(self.truncated.reshape(*self.ended.shape, -1), axis=-1)

    def check(self, obs: Any, each: tuple[int, ...]) -> None:
        """Raise, when traced, unless the shapes and dtypes of all fields are valid.

        `obs` is the observation of the previous step, and `each` is `(N,)`, or `(N, A)` with several agents.
        """
        check_like("Transition: obs must be like the observation before", self.obs, obs)
        is_final = ". It is the observation that followed, before any reset; where no episode ended it equals obs"
        check_like("Transition: final_obs must be like the observation before", self.final_obs, obs, is_final)
        for leaf in jax.tree.leaves(obs):
            if leaf.shape[: len(each)] != each:
                raise ShapeError(f"Transition: obs must begin with the axes {each}, got shape {leaf.shape}")
        for name, kind in FIELDS.items():
            x = getattr(self, name)
            if x is not None or not (name == "mask" or (name == "ended" and len(each) == 1)):
                check_field("Transition", name, x, kind, each[:1] if name in ("episode_length", "ended") else each)
        if not isinstance(self.info, Mapping):
            raise UserTypeError(f"Transition: info must be a dict of numbers by name, got {self.info!r}: leave it out")
        for name, x in self.info.items():
            if name in RESERVED_INFO:
                raise UserValueError(f"Transition: info[{name!r}] has the name of a metric of every episode: rename it")
            check_field("Transition", f"info[{name!r}]", x, "numbers", each[:1])


KINDS = {"floats": (np.floating,), "numbers": (np.floating, np.integer, np.bool_), "booleans": (np.bool_,)}
FIELDS = {"reward": "floats", "episode_return": "floats", "episode_length": "numbers"}
FIELDS |= dict.fromkeys(("terminated", "truncated", "mask", "ended"), "booleans")


def check_field(where: str, name: str, x: Any, kind: str, shape: tuple[int, ...]) -> None:
    """Raise unless a field of a `Transition` or a `Step` is an array of the given kind and shape."""
    fits = hasattr(x, "dtype") and x.shape == shape
    if fits and any(jnp.issubdtype(x.dtype, dtype) for dtype in KINDS[kind]):
        return
    remedy = f": return {name} > 0" if fits and kind == "booleans" else ""
    if name == "ended" and (x is None or jnp.ndim(x) > 1):
        remedy = ": where the episode of all agents ended, jnp.all(terminated | truncated, axis=1)"
    error = ShapeError if hasattr(x, "dtype") and not fits else UserTypeError
    raise error(f"{where}: {name} must be {kind} of shape {shape}, got {shapes_of(x)}{remedy}")


RESERVED_INFO = ("return", "length", "episodes", "episode_return", "episode_length", "terminated", "truncated")
"""Names that entries of `info` may not have, because rollouts and evaluations report numbers under these names."""

SEATS = ("seat", "next_seat")
"""Who moved, and who moves next in the observation that followed; 1 is the first player, -1 the second."""


def check_like(says: str, tree: Any, like: Any, remedy: str = "", error: type[UserError] = UserTypeError) -> None:
    """Raise unless two trees have the same structure, shapes and dtypes."""
    if not are_alike(tree, like):
        raise error(f"{says}, {shapes_of(like)}, got {shapes_of(tree)}{remedy}")


class Observation(NamedTuple):
    """Observations with an action mask, with several agents, or with a part that only the critic sees.

    Attributes:
        obs: `[N, ...]` or `[N, A, D]`, or a tree of such arrays.
        available: `[..., n]`, True where an action may be taken; None means all actions. For a `MultiDiscrete`, the
            masks of all choices are concatenated; for a `Dict` or `Tuple`, it is a dict or a tuple of masks or None.
            The policies of `ppo_parts.networks` apply the mask; your own can use `distributions.mask_logits`.
        privileged: `[N, ...]`, what the critic sees instead, such as the simulator's state; None means `obs`.
    """

    obs: Any
    available: Any = None
    privileged: Any = None


def as_observation(obs: Any) -> Observation:
    """Return observations as an `Observation`; a plain array gets no mask and no privileged part."""
    return obs if isinstance(obs, Observation) else Observation(obs)


class Env(NamedTuple):
    """N environments that step together, as pure functions with automatic resets.

    Attributes:
        reset: `reset(key, num_envs) -> (state, obs)`. Every leaf of the state begins with `[N]`, except what all
            environments share, which are scalars, `Moments`, and the `shared` of `auto_reset`.
        step: `step(key, state, action) -> (state, Transition)`.
        observation_space, action_space: spaces of one environment: `Discrete`, `MultiDiscrete`, `Box`, a `Dict` or
            `Tuple` of these, or any other object with the same attributes.
        evaluation: `evaluation(state) -> Env`, for evaluation, with the statistics of `state` and unscaled rewards.
        num_agents: A, if observations, rewards and ends have an agent axis; None means one agent without that axis.
        restart: `restart(key, state) -> (state, obs)` begins new episodes but keeps running statistics, for
            environments on the host, whose state cannot be saved. None means that every state can be continued.
        observe: `observe(state, obs) -> obs` applies the wrappers to an observation of the innermost environment, with
            the running statistics in `state`; None means that they do not change it.
        act: `act(action) -> action` applies the wrappers to an action for the innermost environment.
        render: `render(state) -> [H, W, 3]`, an image (uint8) of the first of the N environments, made on the host;
            None means that the environment cannot be rendered.
        privileged_space: space of `Observation.privileged`; None means that the critic sees what the policy sees.
        zero_sum: whether the policy plays both sides of a game. Rewards and returns are then the first player's, and
            `info` has the `SEATS`, with which `ppo_parts.agents.zero_sum` tells the sides apart.
        folded: number of agents that `fold_agents` made neighboring environments; `num_envs` must be its multiple.
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
    folded: int = 1


def get_axes(env: Env, num_envs: int) -> tuple[int, ...]:
    """Return the leading axes of rewards and actions: `(N,)`, or `(N, A)` with several agents."""
    return (num_envs,) if env.num_agents is None else (num_envs, env.num_agents)


def check_env(where: str, env: Any) -> None:
    """Raise unless `env` is an `Env`."""
    if isinstance(env, Part):
        raise UserTypeError(f"{where}: env must be an environment, got the part {env.name!r}: pass it as pipeline=")
    if not isinstance(env, Env):
        remedy = "envs.make(...), envs.from_gymnasium(...), envs.from_gymnax(...) or envs.Env(...)"
        raise UserTypeError(f"{where}: {env!r:.200} is not an environment: make one with {remedy}")


def check_interface(where: str, env: Any, names: tuple[str, ...], remedy: str) -> None:
    """Raise unless an object that is to be wrapped has these attributes."""
    for name in names:
        if isinstance(env, type) or not hasattr(env, name):
            raise UserTypeError(f"{where}: {env!r} has no {name}: {remedy}, or write an envs.Env")


def check_known(env_id: Any, library: str, known: Iterable[str]) -> None:
    """Raise unless a library has an environment; the error names similar ones."""
    if env_id not in known:
        example = f"gym:{env_id}" if re.search(r"-v\d+$", str(env_id)) else "brax:ant"
        prefix = f"; names of other packages need a prefix, as in {example}" if library == "gymnax" else ""
        hint = did_you_mean(str(env_id), known, most=3) or f"; it has {', '.join(known)}{prefix}"
        raise UserValueError(f"{library} has no environment {env_id!r}{hint}")


def check_items(where: str, what: str, returned: Any, names: tuple[str, ...], remedy: str = "") -> tuple[Any, ...]:
    """Return what a function returned after checking that it is a tuple with one item for each of these names."""
    if isinstance(returned, tuple) and len(returned) == len(names):
        return returned
    got = shapes_of(returned) if hasattr(returned, "dtype") else type(returned).__name__
    got = f"{len(returned)} items" if isinstance(returned, tuple) else got
    raise UserTypeError(f"{where}: {what} must return ({', '.join(names)}){remedy}, got {got}")


def cast_exactly(where: str, x: np.ndarray, dtype: np.dtype[Any], remedy: str) -> np.ndarray:
    """Return a copy of `x` in another dtype; raise if the dtype cannot represent a number; round floats."""
    if np.can_cast(x.dtype, dtype):
        return x.astype(dtype)
    if x.dtype.kind not in "biuf":  # np.issubdtype takes several microseconds
        raise UserTypeError(f"{where} must be numbers, got {x.dtype}, such as {x.flat[0]!r}: return numbers")
    with np.errstate(all="ignore"):
        cast, both_float = x.astype(dtype), x.dtype.kind == dtype.kind == "f"
        if both_float and math.isfinite(np.vdot(cast, cast)):  # nearly always true, and faster than the following
            return cast
        wrong = np.isfinite(x) & ~np.isfinite(cast) if both_float else cast != x
    if not np.count_nonzero(wrong):
        return cast
    raise UserValueError(f"{where} contains {x[wrong].flat[0]!s}, which {dtype} cannot represent: {remedy}")
