"""One phase of an update: epochs of minibatches, which are drawn, evaluated, differentiated and applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._chain import check_batch, fold
from ._errors import UserValueError
from ._metrics import Metrics, join_metrics
from ._optim import may_skip, skipped
from ._plan import PhasePlan
from ._policy import evaluate_current
from ._refresh import Carried, Head, amend
from ._samplers import Sampler
from ._trees import varying_like
from ._types import Array, Batch, Context, Params
from .functional import masked_mean
from .functional._common import masked_sum

GradientMetrics = Callable[[Any], Mapping[str, Array]]


class PhaseState(NamedTuple):
    """The state that changes from minibatch to minibatch."""

    carried: Carried
    opt_state: Any
    after: tuple[Any, ...]  # states of the parts after the sampler
    stopped: Array


@dataclasses.dataclass(frozen=True)
class PhaseLoop:
    """The loop of one phase over the minibatches of one rollout.

    Attributes:
        plan: the sampler, the parts and the optimizer of the phase.
        head: the rollout, and the parts before the sampler.
        context: the step of the update, the policy, and the key of this phase.
        gradient_metrics: function that returns metrics of the gradient.
    """

    plan: PhasePlan
    head: Head
    context: Context
    gradient_metrics: GradientMetrics

    def run(self, state: PhaseState) -> tuple[PhaseState, Metrics, Batch]:
        """Run all epochs; also return the rollout from which minibatches were drawn."""
        can_stop = self.plan.can_stop
        sampler, refresh, key = self.plan.sampler, self.plan.sampler.refresh, self.context.key
        rollout, carried = refresh.init(self.head, state.carried, self.context.replace(key=jax.random.fold_in(key, 0)))
        first = _metrics_of(rollout)
        rollout = _without_metrics(rollout)

        def epoch(state: PhaseState, number: Array) -> tuple[PhaseState, tuple[Metrics, Metrics, Array]]:
            keys = jax.random.split(jax.random.fold_in(key, number + 1), 3)
            context = self.context.replace(key=keys[0], epoch=number)
            drawn_from, carried = refresh.before_epoch(self.head, rollout, state.carried, context)
            refreshed, drawn_from = _metrics_of(drawn_from), _without_metrics(drawn_from)
            items = sampler.plan(keys[1], drawn_from, number)
            check_plan(sampler, items)

            def minibatch(state: PhaseState, numbered: Any) -> tuple[PhaseState, Metrics]:
                index, item = numbered
                here = context.replace(key=jax.random.fold_in(keys[2], index), minibatch=index)
                return self._minibatch(state, drawn_from, item, here)

            numbered = (jnp.arange(sampler.num_minibatches), items)
            state, measured, ran = scan_until(minibatch, state._replace(carried=carried), numbered, can_stop)
            return state, (refreshed, measured, ran)

        state = state._replace(carried=carried)
        epochs = jnp.arange(sampler.num_epochs)
        state, (refreshed, measured, ran), begun = scan_until(epoch, state, epochs, can_stop)
        own = {"epochs": jnp.sum(begun)} | ({"early_stopped": state.stopped} if can_stop else {})
        metrics = join_metrics(first, refreshed.reduce(begun), measured.reduce(ran), Metrics.of(own))
        return state._replace(carried=state.carried._replace(estimates=None)), metrics, rollout

    def _minibatch(self, state: PhaseState, rollout: Batch, item: Any, context: Context) -> tuple[PhaseState, Metrics]:
        """Draw a minibatch, evaluate and differentiate the loss, and apply the gradient step."""
        plan, sampler = self.plan, self.plan.sampler
        head_key, own_key = jax.random.fold_in(context.key, 0), jax.random.fold_in(context.key, 1)
        before = sampler.refresh.before_minibatch(self.head, rollout, state.carried, context.replace(key=head_key))
        rollout, carried = before
        refreshed, params = _metrics_of(rollout), carried.params
        context = context.replace(params=params)
        check_batch(sampler, rollout)
        indices, weight = sampler.draw(item, rollout, context)
        minibatch = sampler.take(rollout, indices, weight)

        (loss, (batch, after, current)), gradient = jax.value_and_grad(self._loss, has_aux=True)(
            plan.trained(params), params, minibatch, state.after, context.replace(key=own_key)
        )
        gradient = plan.masked(gradient, params)
        updates, opt_state = plan.optimizer.update(
            gradient, state.opt_state, plan.trained(params), step=context.step, value=loss, metrics=batch.metrics
        )
        updates = plan.masked(updates, params)  # because weight decay also changes parameters without a gradient
        stepped = plan.merged(params, optax.apply_updates(plan.trained(params), updates))
        if may_skip(state.opt_state):
            after = jax.tree.map(lambda new, old: jnp.where(skipped(opt_state), old, new), after, state.after)
        stepped = amend(plan.after, stepped, state.after, after)
        applied, stopped = jnp.ones((), bool), state.stopped
        if batch.stop is not None:
            plan.check_stop()
            applied, stopped = ~batch.stop.discard, batch.stop.discard | batch.stop.after
            stepped, opt_state, after = jax.tree.map(
                lambda new, old: jnp.where(applied, new, old),
                (stepped, opt_state, after),
                (params, state.opt_state, state.after),
            )
        carried = sampler.refresh.after_minibatch(
            self.head, carried._replace(params=stepped), sampler, minibatch.replace(current=current), indices
        )
        measured = join_metrics(refreshed, _metrics_of(batch), self._own_metrics(loss, gradient, applied, minibatch))
        return PhaseState(carried, opt_state, after, stopped), measured

    def _loss(
        self, trained: Params, params: Params, minibatch: Batch, states: tuple[Any, ...], context: Context
    ) -> tuple[Array, tuple[Batch, tuple[Any, ...], Any]]:
        """Return the sum of the reduced losses that the parts after the sampler add."""
        params = self.plan.merged(params, trained)
        current = evaluate_current(self.context.evaluate, params, minibatch)
        batch = minibatch.replace(current=current)
        batch, after = fold(self.plan.after, batch, states, context.replace(params=params))
        if not batch.losses:
            raise UserValueError(
                "learner: no part added a loss: put one, such as clipped_surrogate(), after the sampler"
            )
        means = {name: reduce_loss(loss, batch) for name, loss in batch.losses.items()}
        batch = batch.add_metrics("sum", **{f"nonfinite/loss/{name}": ~jnp.isfinite(x) for name, x in means.items()})
        current = current._replace(distribution=None, aux=None)
        return sum(means.values(), jnp.zeros(())), (batch.replace(current=None, losses={}), after, current)

    def _own_metrics(self, loss: Array, gradient: Params, applied: Array, minibatch: Batch) -> Metrics:
        """Return the metrics that the learner adds for a minibatch."""
        # The norm of one vector, as optax.flatten makes it, so that XLA computes it once for metrics and clipping.
        norm = optax.tree.norm(jnp.concatenate([jnp.reshape(x, -1) for x in jax.tree.leaves(gradient)]))
        counts = {"minibatches": applied, "nonfinite/gradient": ~jnp.isfinite(norm)}
        if minibatch.advantage is not None:
            bad = ~jnp.isfinite(minibatch.advantage)  # counted as floats, which devices sum together with other floats
            counts["nonfinite/advantage"] = masked_sum(bad.astype(jnp.float32), minibatch.mask)
        named = {"loss": loss, "grad_norm": norm, **self.gradient_metrics(gradient), **counts}
        return Metrics.of(named, dict.fromkeys(counts, "sum"))


def reduce_loss(loss: Array, batch: Batch) -> Array:
    """Return the mean of a loss over the unmasked elements or segments; a scalar is returned unchanged."""
    if loss.ndim == 0:
        return loss
    if loss.shape == batch.log_prob.shape:
        return masked_mean(loss, batch.mask)
    if batch.mask is None:
        return jnp.mean(loss)
    counts = batch.mask.astype(bool).reshape(*batch.mask.shape[:2], -1)
    return masked_mean(loss, jnp.any(counts, axis=(0, 2)))


def check_plan(sampler: Sampler, items: Any) -> None:
    """Raise unless the plan of an epoch has one row per minibatch."""
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(items)}
    if sizes != {(sampler.num_minibatches,)}:
        raise UserValueError(
            f"{sampler.name}: plan must return arrays with leading axis [num_minibatches] = "
            f"[{sampler.num_minibatches}], and their leading axes are {sorted(sizes)}"
        )


def scan_until(
    step: Callable[[PhaseState, Any], tuple[PhaseState, Any]], state: PhaseState, xs: Any, can_stop: bool
) -> tuple[PhaseState, Any, Array]:
    """Run `lax.scan`, skipping the steps after `state.stopped`; also return which steps ran."""
    if not can_stop:
        state, ys = jax.lax.scan(step, state, xs)
        return state, ys, jnp.ones(jax.tree.leaves(xs)[0].shape[0], bool)
    # The state is a closure, not an argument, so that it keeps the axes over which it varies inside `shard_map`.
    shapes = jax.eval_shape(lambda: step(state, jax.tree.map(lambda x: x[0], xs)))[1]

    def skip(state: PhaseState, x: Any) -> tuple[PhaseState, Any]:
        del x
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return state, varying_like(zeros, state.stopped)

    def guarded(state: PhaseState, x: Any) -> tuple[PhaseState, Any]:
        ran = ~state.stopped
        state, ys = jax.lax.cond(ran, step, skip, state, x)
        return state, (ys, ran)

    state, (ys, ran) = jax.lax.scan(guarded, state, xs)
    return state, ys, ran


def _metrics_of(batch: Batch) -> Metrics:
    return Metrics.of(batch.metrics, dict(batch.reductions))


def _without_metrics(batch: Batch) -> Batch:
    return batch.replace(metrics={}, reductions=())
