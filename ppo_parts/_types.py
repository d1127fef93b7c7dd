"""The vocabulary: `Batch`, `Context`, `Part`, and the smallest ways to make a part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .functional._common import ShapeError

Array = jax.Array
Params = Any
PartState = Any
Evaluate = Callable[[Params, "Batch"], tuple[Any, Array]]
"""`evaluate(params, batch) -> (distribution, value)`; value has one number per element, no trailing axis of size 1."""


ABSENT: Any = None
"""Default of the fields of a `Batch`; typed so that a part need not prove what its `requires` have checked."""


class Current(NamedTuple):
    """The policy being trained, evaluated on the minibatch: written by the learner, after the sampler only."""

    distribution: Any
    log_prob: Array
    value: Array


class Stop(NamedTuple):
    """What an early-stop part asks of the learner, two traced booleans.

    discard: do not apply this minibatch, and run no more of this phase in this update.
    after: apply this minibatch, then run no more of this phase in this update.
    """

    discard: Array
    after: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """A rollout or a minibatch of it; what every part reads and returns. Absent fields are None.

    The leading axes are `[T, N]` (time, segment) in a rollout and after a segment sampler (`[T, M]`), and `[M]` after
    a step sampler, where time is gone; `axes` names them. More axes (agents, say) may follow in every field alike.

    Attributes:
        obs: any pytree, leaves `[T, N, ...]`: what the policy saw at step t.
        action: any pytree, leaves `[T, N, ...]`: what it did, before any clipping for the environment.
        log_prob: `[T, N]`, log-probability of the action under the behaviour policy, in nats.
        value: `[T, N]`, V(obs) when the step was taken (or as last written back by a `refresh`), in reward units.
        reward: `[T, N]`, of the transition out of step t.
        terminated: `[T, N]`, 1 where that transition ended the episode.
        truncated: `[T, N]`, 1 where a time limit cut the episode there.
        next_value: `[T, N]`, V of the observation that followed: of the final one where the episode was truncated or
            the rollout ended; anything where it terminated.
        mask: `[T, N]`, 1 where the step counts; None: everywhere.
        advantage: `[T, N]`, written by an advantage part.
        target: `[T, N]`, value target, written by an advantage part.
        weight: `[M]`, importance weight of each sampled element, written by a sampler.
        log_ratio: `[T, N]`, log pi_current - log pi_behaviour as last evaluated before the sampler; None: 0.
        carry: recurrent policies: state before step 0 of each segment, leaves `[N, ...]`.
        reset: recurrent policies: `[T, N]`, 1 where the state is zeroed before step t.
        current: the policy being trained on this minibatch (`Current`); None before the sampler.
        losses: named losses per element, each of the shape of `log_prob`.
        metrics: named scalars.
        extras: whatever your own parts need; leaves that begin with the leading axes are sampled along.
        stop: what an early-stop part decided (`Stop`); None: nothing.
        axes: names of the leading axes, ("time", "segment") or ("step",).
    """

    obs: Any = ABSENT
    action: Any = ABSENT
    log_prob: Array = ABSENT
    value: Array = ABSENT
    reward: Array = ABSENT
    terminated: Array = ABSENT
    truncated: Array = ABSENT
    next_value: Array = ABSENT
    mask: Array = ABSENT
    advantage: Array = ABSENT
    target: Array = ABSENT
    weight: Array = ABSENT
    log_ratio: Array = ABSENT
    carry: Any = ABSENT
    reset: Array = ABSENT
    current: Any = ABSENT
    losses: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    extras: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stop: Stop = ABSENT
    axes: tuple[str, ...] = dataclasses.field(default=("time", "segment"), metadata={"static": True})

    def replace(self, **changes: Any) -> Batch:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def add_loss(self, name: str, loss: Array) -> Batch:
        """A copy with one more named loss per element. Raises if the name is taken or the shape is wrong."""
        if name in self.losses:
            raise ValueError(
                f"a loss named {name!r} is already in this chain ({', '.join(self.losses)}): give one of the two "
                'another name with name="..."'
            )
        expected = jnp.shape(self.log_prob) if self.log_prob is not None else jnp.shape(loss)
        if jnp.shape(loss) != expected:
            raise ShapeError(
                f"loss {name!r} has shape {jnp.shape(loss)}, expected one number per element {expected}: losses are "
                "reduced by the learner, with the mask"
            )
        return self.replace(losses={**self.losses, name: loss})

    def add_metrics(self, **metrics: Array) -> Batch:
        """A copy with more named scalars. Raises if a name is taken or a value is not a scalar."""
        for name, value in metrics.items():
            if name in self.metrics:
                raise ValueError(
                    f"a metric named {name!r} is already in this chain: give one of its two parts another name"
                )
            if jnp.shape(value) != ():
                raise ShapeError(f"metric {name!r} must be a scalar, got shape {jnp.shape(value)}: reduce it first")
        return self.replace(metrics={**self.metrics, **metrics})

    def current_log_ratio(self) -> Array:
        """log pi_current - log pi_behaviour of this minibatch's actions (differentiable), after the sampler."""
        return self.current.log_prob - self.log_prob


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """What a part may know besides its batch.

    Attributes:
        key: PRNG key, different for every part and every call.
        step: int32 scalar, learner updates so far: 0 in the first. Schedules of parts count this.
        params: the parameters: those being trained after the sampler, the update's latest before it.
        evaluate: `evaluate(params, batch) -> (distribution, value)`.
        epoch, minibatch: int32 scalars, position within the phase (0 before the sampler).
        num_minibatches: minibatches per epoch.
    """

    key: Array
    step: Array | int = 0
    params: Params = None
    evaluate: Evaluate = dataclasses.field(default=ABSENT, metadata={"static": True})
    epoch: Array | int = 0
    minibatch: Array | int = 0
    num_minibatches: int = dataclasses.field(default=1, metadata={"static": True})

    def replace(self, **changes: Any) -> Context:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


PER_STEP = (  # fields of a batch that samplers draw from, and cut along
    "obs",
    "action",
    "log_prob",
    "value",
    "reward",
    "terminated",
    "truncated",
    "next_value",
    "mask",
    "advantage",
    "target",
    "log_ratio",
    "reset",
)


class EmptyState(NamedTuple):
    """State of a part that has none."""


Place = Literal["anywhere", "before_sampler", "after_sampler"]


@dataclasses.dataclass(frozen=True)
class Part:
    """A pair of pure functions over a `Batch`, the unit everything is composed of.

    Attributes:
        init: `init(params) -> state`. The state keeps its tree structure, shapes and dtypes for ever.
        update: `update(batch, state, context) -> (batch, state)`.
        name: how error messages call the part.
        requires: fields of `Batch` it reads that another part has to write.
        provides: fields of `Batch` it writes.
        place: on which side of the sampler it may stand.
        needs_time: True if it works along the time axis.
    """

    init: Callable[[Params], PartState]
    update: Callable[[Batch, PartState, Context], tuple[Batch, PartState]]
    name: str = "part"
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    place: Place = "anywhere"
    needs_time: bool = False


def no_state(params: Params) -> EmptyState:
    """The `init` of a part without state."""
    del params
    return EmptyState()


def stateless(
    f: Callable[[Batch], Batch],
    *,
    name: str | None = None,
    requires: tuple[str, ...] = (),
    provides: tuple[str, ...] = (),
    place: Place = "anywhere",
    needs_time: bool = False,
) -> Part:
    """Lift a plain function `batch -> batch` to a `Part`.

    Args:
        f: pure function of a `Batch`.
        name: how error messages call it; by default the function's own name.
        requires, provides, place, needs_time: as in `Part`; with them `chain` checks this part like any other. A loss
            has `provides=("losses",), place="after_sampler"`.

    Example:
        >>> import ppo_parts as pp
        >>> halve = pp.stateless(lambda batch: batch.replace(reward=0.5 * batch.reward), name="halve_reward")
        >>> pipeline = pp.chain(halve, pp.gae(gamma=.99, gae_lambda=.95))
    """
    if not callable(f):
        raise TypeError(f"stateless: give a function batch -> batch, got {f!r}")
    called = name or str(getattr(f, "__name__", "stateless"))

    def update(batch: Batch, state: EmptyState, context: Context) -> tuple[Batch, EmptyState]:
        del context
        return f(batch), state

    return Part(no_state, update, called, requires, provides, place, needs_time)


def identity() -> Part:
    """The part that changes nothing: `chain(identity(), p)`, `chain(p, identity())` and `p` do the same."""
    return stateless(lambda batch: batch, name="identity")


def kind(x: Any) -> str:
    """What an error message calls something that should have been something else."""
    return f"an array of shape {x.shape}" if isinstance(x, jax.Array) else type(x).__name__


def require(batch: Batch, where: str, **remedies: str) -> None:
    """Raise a `ValueError` with its remedy for the first of these fields that is None."""
    for field, remedy in remedies.items():
        if getattr(batch, field) is None:
            raise ValueError(f"{where}: batch.{field} is missing: {remedy}")
