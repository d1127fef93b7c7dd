"""`Part`, its input `Context`, and `stateless`, which makes a part from a function."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_type_hints

import jax
import jax.numpy as jnp

from .._base.checked import checked
from .._base.hyperparameters import Field, check_takes, value_at
from ..errors import ShapeError, UserTypeError, UserValueError
from ..functional._arguments import check_as, is_known
from ..functional._common import unsqueeze
from .batch import PER_SEGMENT, Array, Batch, Evaluate, Params, field_at, kind

PartState = Any
PART_KEY, WRAPPED_KEY, AMEND_KEY, PIECE_KEY = 2**31, 2**30, 2**29, 2**28
"""Numbers to fold into keys. They are large, so that no part that folds small numbers into its own key gets another
part's key."""


def _no_policy(params: Params, batch: Batch) -> Any:
    """Raise, because the context has no `evaluate`."""
    raise UserValueError("Context: there is no policy to evaluate: give one, Context(..., evaluate=policy)")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """The inputs of a part besides its batch.

    Attributes:
        key: PRNG key, different for every part and every call.
        step: int32 scalar, the number of learner updates so far, 0 in the first. Schedules of parts receive it.
        params: after the sampler, the parameters being trained; before it, the latest parameters of the update.
        evaluate: the policy. In a learner, it returns an `Output`, even if the policy returns a tuple.
        epoch, minibatch: int32 scalars, the position within the phase. Before the sampler they are 0, or with a
            `refresh` the position of the epoch or minibatch before which the part runs. In a loop of your own, a
            sampler draws the minibatch at this position; give it the same key for a whole update.
        num_minibatches: number of minibatches per epoch.
    """

    key: Array
    step: Array | int = 0
    params: Params = None
    evaluate: Evaluate = dataclasses.field(default=_no_policy, metadata={"static": True})
    epoch: Array | int = 0
    minibatch: Array | int = 0
    num_minibatches: int = dataclasses.field(default=1, metadata={"static": True})

    def replace(self, **changes: Any) -> Context:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


Place = Literal["anywhere", "first", "before_sampler", "after_sampler"]


@dataclasses.dataclass(frozen=True)
class Part:
    """A pair of pure functions, `init` and `update`, from which updates are composed.

    Attributes:
        init: `init(params, key) -> state`. The state must keep its tree structure, shapes and dtypes.
        update: `update(batch, state, context) -> (batch, state)`.
        name: the part's name in error messages.
        requires: fields of `Batch` that it reads and that must be present; "extras.x" or "metrics.x" is one entry.
        provides: fields of `Batch` that it writes.
        reads: other fields that it reads if they are present. None means unspecified, so checks assume that it may read
            any field.
        place: the side of the sampler on which it may be placed. "first" means before the sampler, as the first part of
            its own chain.
        needs_time: True if it works along the time axis.
        amend: `amend(params, opt_state, old_state, new_state, context) -> (params, opt_state)`, called outside the
            gradient after the part has run and the optimizer has taken its step, for exact PopArt, projections, or
            resets of units and their moments. `opt_state` is the optimizer state of the phase in which the part runs,
            or None if the part runs before `phases`.
        finish: `finish(batch, state, context) -> state`, called once per update, on the rollout with `batch.current`
            from the updated policy, for example to measure the true divergence or to store rollouts. A part before the
            sampler gets the rollout that all phases share (without `phases`, as recorded). A part after it gets, in
            updates in which its phase runs, the rollout from which its minibatches were drawn or, with a refresh other
            than "rollout" or in a phase with `every` > 1, the rollout before the phase.
        numbers: its numeric hyperparameters by name, which are numbers, schedules or fields. If one of them is NaN in
            an update (the library turns those out of range into NaN), all that the part writes becomes NaN, and
            `nonfinite_report` names the number. The fields are added to `requires`.
        policy_loss: whether the loss that it adds is a policy loss, weighted by the advantage. `learner` rejects a part
            that changes what such a loss has read, unless another policy loss follows. None means unspecified, so
            checks assume that it may be a policy loss.
        elementwise: whether it adds only losses per element that depend on no other element of the batch. Then
            `microbatched` evaluates a network once per gradient step instead of twice.
    """

    init: Callable[..., PartState]
    update: Callable[[Batch, PartState, Context], tuple[Batch, PartState]]
    name: str = "part"
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    reads: tuple[str, ...] | None = None
    place: Place = "anywhere"
    needs_time: bool = False
    amend: Callable[[Params, Any, PartState, PartState, Context], tuple[Params, Any]] | None = None
    finish: Callable[[Batch, PartState, Context], PartState] | None = None
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    policy_loss: bool | None = None
    elementwise: bool = False

    def __post_init__(self) -> None:
        check_as("Part", "name", self.name, str)
        check_takes(self.name, "init", self.init, ("params", "key"))
        check_takes(self.name, "update", self.update, ("batch", "state", "context"))
        if self.amend is not None:
            arguments = ("params", "opt_state", "old_state", "new_state", "context")
            check_takes(self.name, "amend", self.amend, arguments)
        if self.finish is not None:
            check_takes(self.name, "finish", self.finish, ("batch", "state", "context"))
        for argument, hint in declarable().items():
            check_as(self.name, argument, getattr(self, argument), hint)
        object.__setattr__(self, "numbers", dict(self.numbers))
        for argument, number in self.numbers.items():
            check_as(self.name, "a name in numbers", argument, str)
            if callable(number):
                check_takes(self.name, argument, number, ("step",))
        fields = (number.path for number in self.numbers.values() if isinstance(number, Field))
        object.__setattr__(self, "requires", tuple(dict.fromkeys((*self.requires, *fields))))
        known = {field.name for field in dataclasses.fields(Batch)}
        for field in (*self.requires, *self.provides, *(self.reads or ())):
            if field.partition(".")[0] not in known:
                raise UserValueError(
                    f"{self.name}: a Batch has no field {field!r}; its fields are {', '.join(sorted(known))}"
                )


@functools.cache
def declarable() -> dict[str, Any]:
    """Return the names and types of the declarations of a part, which are its fields besides the functions."""
    return {name: hint for name, hint in get_type_hints(Part).items() if name != "name" and is_known(hint)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divider(Part):
    """Base class of parts that divide a chain into parts that see the rollout and parts that see minibatches."""

    cuts_time: bool = False  # whether the minibatches have no time axis


def no_state(params: Params, key: Array | None = None) -> PartState:
    """The `init` of a part without state."""
    return ()


@checked
def stateless(
    f: Callable[..., Batch],
    *,
    name: str | None = None,
    requires: tuple[str, ...] = (),
    provides: tuple[str, ...] = (),
    reads: tuple[str, ...] | None = None,
    place: Place = "anywhere",
    needs_time: bool = False,
    numbers: Mapping[str, Any] | None = None,
    policy_loss: bool | None = None,
    elementwise: bool = False,
) -> Part:
    """Make a `Part` from a function `batch -> batch` or `(batch, context) -> batch`.

    Args:
        f: pure function of a `Batch`. It also receives the `Context` if it has two parameters without a default, or a
            second one called `context`.
        name: the part's name in error messages, by default the name of the function.
        numbers: numeric hyperparameters by name, as in `Part`; `f` receives their values in the update as keyword
            arguments.
        requires, provides, reads, place, needs_time, policy_loss, elementwise: as in `Part`, used by the checks of
            `chain` and `learner`. For a loss, pass `provides=("losses",), place="after_sampler"`.

    Example:
        >>> import ppo_parts as pp
        >>> def scale_reward(batch, factor):
        ...     return batch.replace(reward=factor * batch.reward)
        >>> annealed = pp.stateless(scale_reward, numbers={"factor": pp.linear_schedule(1., .5, 1000)})
        >>> pipeline = pp.chain(annealed, pp.gae(gamma=.99, gae_lambda=.95))
    """
    called, numbers = name or str(getattr(f, "__name__", "stateless")), dict(numbers or {})
    takes_context = _takes_context(f, numbers)
    check_takes(called, "the function", f, ("batch", "context") if takes_context else ("batch",), numbers)

    def update(batch: Batch, state: PartState, context: Context) -> tuple[Batch, PartState]:
        values = read_numbers(numbers, batch, context.step)
        result = f(batch, context, **values) if takes_context else f(batch, **values)
        if not isinstance(result, Batch):
            raise UserTypeError(f"{called}: the function must return the new batch, got {kind(result)}")
        return result, state

    return Part(
        no_state, update, called, requires, provides, reads, place, needs_time, numbers=numbers,
        policy_loss=policy_loss, elementwise=elementwise,
    )  # fmt: skip


def _takes_context(f: Callable[..., Any], numbers: Mapping[str, Any]) -> bool:
    """Return whether a function has two positional parameters without a default, or a second one called `context`.

    The parameters that receive numbers do not count.
    """
    try:
        parameters = inspect.signature(f).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False
    found = [
        p
        for p in parameters.values()
        if p.kind is p.POSITIONAL_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in numbers)
    ]
    return sum(p.default is p.empty for p in found) == 2 or [p.name for p in found[1:2]] == ["context"]


def read_numbers(numbers: Mapping[str, Any], batch: Batch, step: Any) -> dict[str, Any]:
    """Return the values of hyperparameters at learner update `step`."""
    return {name: read_number(number, batch, step) for name, number in numbers.items()}


def read_number(number: Any, batch: Batch, step: Any) -> Any:
    """Return the value of one hyperparameter; for a `field`, it is an array that broadcasts against `log_prob`."""
    if not isinstance(number, Field):
        return value_at(number, step)
    x = found = jnp.asarray(field_at(batch, number.path))
    rank = jnp.ndim(batch.log_prob)
    first = number.path.partition(".")[0]
    if first in (*PER_SEGMENT, "weight") and batch.axes[0] == "time":
        x = x[None]
    if first == "shared" and x.ndim:
        raise ShapeError(f"field({number.path!r}) must be one number, which all elements share, got shape {x.shape}")
    if x.ndim == 0:
        return number.scale(x)
    x = unsqueeze(x, max(rank, x.ndim))
    if any(a not in (1, b) for a, b in zip(x.shape, jnp.shape(batch.log_prob), strict=False)):
        expected = f"the axes of log_prob, {jnp.shape(batch.log_prob)}"
        raise ShapeError(f"field({number.path!r}) must have {expected}, got shape {jnp.shape(found)}")
    if batch.mask is None:
        return number.scale(x)
    # A masked element has no number and gets one in range. Before scaling it is set to 1, so no gradient is 0 * NaN.
    keep, in_range = unsqueeze(batch.mask.astype(bool), x.ndim), min(number.limits.high, max(number.limits.low, 0) + 1)
    return jnp.where(keep, number.scale(jnp.where(keep, x, 1)), in_range)
