"""How often the parts before the sampler run again, and on whose estimates."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ._chain import fold
from ._errors import UserTypeError, UserValueError
from ._policy import evaluate_current, follow
from ._types import Array, Batch, Context, Current, Evaluate, Params, Part

RefreshName = Literal["rollout", "epoch", "minibatch"]


class Estimates(NamedTuple):
    """The estimates of a policy for the rollout, each `[T, N]`; values are None without a critic."""

    value: Array | None
    next_value: Array | None
    log_ratio: Array


class HeadState(NamedTuple):
    """States of the parts before the sampler: those that all phases share, and the phase's own."""

    shared: tuple[Any, ...]
    own: tuple[Any, ...]


class Carried(NamedTuple):
    """The state that a phase carries from minibatch to minibatch for the head.

    `estimates` is None unless the refresh updates it.
    """

    params: Params
    head: HeadState
    estimates: Estimates | None = None


@dataclasses.dataclass(frozen=True)
class Head:
    """The parts before a phase's sampler, and the rollout on which they run.

    Attributes:
        shared, own: the parts that all phases share, and those of this phase.
        evaluate: the policy network.
        raw: the rollout before any part has run.
        ready: the rollout after the shared parts have run once.
        moved: whether an earlier phase has trained the policy since the rollout.
        keep_finite: whether a part keeps its last finite state, because the optimizer skips gradients that are not
            finite.
    """

    shared: tuple[Part, ...]
    own: tuple[Part, ...]
    evaluate: Evaluate
    raw: Batch
    ready: Batch
    moved: bool
    keep_finite: bool

    def run_own(self, carried: Carried, context: Context) -> tuple[Batch, Carried]:
        """Run the phase's own parts on the rollout that the shared parts have prepared."""
        batch, carried_own = self._run(self.own, self.ready.replace(metrics={}), carried, carried.head.own, context)
        states, params = carried_own
        return batch, carried._replace(params=params, head=carried.head._replace(own=states))

    def run(self, estimates: Estimates, carried: Carried, context: Context) -> tuple[Batch, Carried]:
        """Run all parts again, on the rollout with new estimates."""
        batch = self.raw.replace(**estimates._asdict())
        states = (*carried.head.shared, *carried.head.own)
        batch, (states, params) = self._run((*self.shared, *self.own), batch, carried, states, context)
        head = HeadState(states[: len(self.shared)], states[len(self.shared) :])
        return batch, carried._replace(params=params, head=head)

    def _run(
        self, parts: tuple[Part, ...], batch: Batch, carried: Carried, states: tuple[Any, ...], context: Context
    ) -> tuple[Batch, tuple[tuple[Any, ...], Params]]:
        batch, after = fold(parts, batch, states, context.replace(params=carried.params))
        check_head(parts, batch)
        if self.keep_finite:
            after = tuple(finite_or_old(new, old) for new, old in zip(after, states, strict=True))
        return batch, (after, amend(parts, carried.params, states, after))

    def recorded(self) -> Estimates:
        """Return the estimates of the behaviour policy, as recorded in the rollout."""
        raw = self.raw
        log_ratio = jnp.zeros_like(raw.log_prob) if raw.log_ratio is None else raw.log_ratio
        return Estimates(raw.value, raw.next_value, log_ratio)

    def evaluated(self, params: Params) -> Estimates:
        """Return the estimates of the policy with these parameters."""
        current = evaluate_current(self.evaluate, params, self.raw)
        return self.estimates(current.value, current.log_prob - self.raw.log_prob)

    def estimates(self, value: Array | None, log_ratio: Array) -> Estimates:
        """Make estimates in the dtypes of the rollout, with `next_value` computed from `value`."""
        raw, log_ratio = self.raw, log_ratio.astype(self.raw.log_prob.dtype)
        if value is None or raw.value is None:
            return Estimates(raw.value, raw.next_value, log_ratio)
        value = value.astype(raw.value.dtype)
        following = None if raw.next_value is None else follow(raw, value).astype(raw.next_value.dtype)
        return Estimates(value, following, log_ratio)


class Refresh:
    """Determines how often the parts before the sampler (the head) run; this class runs them once.

    Subclasses override its methods. `init` is called before the first epoch of a phase, the others at the times that
    their names state. All except the last return the rollout from which minibatches are drawn. Each may evaluate the
    policy, run the head, and change the carried state.
    """

    name = "rollout"
    shares_head = True
    """Whether the parts that all phases share run only once, before the first phase."""

    def init(self, head: Head, carried: Carried, context: Context) -> tuple[Batch, Carried]:
        """Run the parts before the sampler, once for all epochs."""
        return head.run_own(carried, context)

    def before_epoch(self, head: Head, rollout: Batch, carried: Carried, context: Context) -> tuple[Batch, Carried]:
        """Return the rollout for epoch `context.epoch`."""
        del head, context
        return rollout, carried

    def before_minibatch(self, head: Head, rollout: Batch, carried: Carried, context: Context) -> tuple[Batch, Carried]:
        """Return the rollout from which minibatch `context.minibatch` is drawn."""
        del head, context
        return rollout, carried

    def after_minibatch(self, head: Head, carried: Carried, sampler: Any, minibatch: Batch, indices: Any) -> Carried:
        """Return the carried state after the gradient step; `minibatch.current` is the policy before this step."""
        del head, sampler, minibatch, indices
        return carried


class EachEpoch(Refresh):
    """Evaluates the whole rollout with the current policy before each epoch, and runs the head on the result."""

    name = "epoch"
    shares_head = False

    def init(self, head: Head, carried: Carried, context: Context) -> tuple[Batch, Carried]:
        """Return the rollout unchanged: the head runs before each epoch, including the first."""
        del context
        return head.raw, carried

    def before_epoch(self, head: Head, rollout: Batch, carried: Carried, context: Context) -> tuple[Batch, Carried]:
        """Evaluate the rollout, unless the policy is still the behaviour policy, and run the head."""
        del rollout
        if head.moved:
            estimates = head.evaluated(carried.params)
        else:
            estimates = jax.lax.cond(context.epoch > 0, head.evaluated, lambda params: head.recorded(), carried.params)
        return head.run(estimates, carried, context)


class EachMinibatch(Refresh):
    """Runs the head before each minibatch, on the estimates from the latest evaluation of each step."""

    name = "minibatch"
    shares_head = False

    def init(self, head: Head, carried: Carried, context: Context) -> tuple[Batch, Carried]:
        """Start from the recorded estimates, or from those of the policy that an earlier phase has trained."""
        del context
        estimates = head.evaluated(carried.params) if head.moved else head.recorded()
        return head.raw, carried._replace(estimates=estimates)

    def before_minibatch(self, head: Head, rollout: Batch, carried: Carried, context: Context) -> tuple[Batch, Carried]:
        """Run the head on the latest estimates."""
        del rollout
        assert carried.estimates is not None
        batch, carried = head.run(carried.estimates, carried, context)
        if batch.log_prob.shape != head.raw.log_prob.shape:
            raise UserValueError(
                f'refresh="minibatch" writes values back into the rollout of shape {head.raw.log_prob.shape}, and a '
                f'part before the sampler made it {batch.log_prob.shape}: use refresh="rollout" or "epoch"'
            )
        return batch, carried

    def after_minibatch(self, head: Head, carried: Carried, sampler: Any, minibatch: Batch, indices: Any) -> Carried:
        """Write the minibatch's values and log-ratios back."""
        current: Current = minibatch.current
        assert carried.estimates is not None
        value, _, log_ratio = carried.estimates
        log_ratio = sampler.put(log_ratio, indices, current.log_prob - minibatch.log_prob, minibatch.shards)
        if value is not None and current.value is not None:
            value = sampler.put(value, indices, current.value, minibatch.shards)
        return carried._replace(estimates=head.estimates(value, log_ratio))


REFRESHES: dict[str, Refresh] = {kind.name: kind() for kind in (Refresh, EachEpoch, EachMinibatch)}


def refresh_of(where: str, refresh: RefreshName | Refresh) -> Refresh:
    """Return the refresh of that name, or the object itself."""
    if isinstance(refresh, Refresh):
        return refresh
    if not isinstance(refresh, str):
        raise UserTypeError(f"{where}: refresh must be a name or a Refresh, got {refresh!r}")
    if refresh not in REFRESHES:
        raise UserValueError(f"{where}: refresh must be one of {', '.join(map(repr, REFRESHES))}, got {refresh!r}")
    return REFRESHES[refresh]


def amend(parts: tuple[Part, ...], params: Params, old: tuple[Any, ...], new: tuple[Any, ...]) -> Params:
    """Return the parameters after each part has amended them."""
    for part, before, after in zip(parts, old, new, strict=True):
        if part.amend is not None:
            params = part.amend(params, before, after)
    return params


def check_head(parts: tuple[Part, ...], batch: Batch) -> None:
    """Raise if a part before the sampler added a loss or requested a stop, which only parts after it may do."""
    names = ", ".join(part.name for part in parts)
    if batch.losses:
        raise UserValueError(
            f"learner: the loss {next(iter(batch.losses))!r} was added before the sampler (by one of {names}), where "
            "nothing is differentiated: put that part after the sampler"
        )
    if batch.stop is not None:
        raise UserValueError(
            f"learner: a part before the sampler (one of {names}) requested a stop, which only parts after it may do: "
            "put it after the sampler"
        )


def finite_or_old(new: Any, old: Any) -> Any:
    """Return the new state of a part, or the old one if a number in the new one is not finite."""
    floats = [x for x in jax.tree.leaves(new) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    if not floats:
        return new
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))
    return jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)
