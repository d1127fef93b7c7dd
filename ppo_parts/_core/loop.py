"""One phase of an update, which draws, evaluates, differentiates and applies minibatches for several epochs."""

# What `PhaseLoop.run` computes, without keys, states of parts, metrics and early stops:
#
#     rollout = the parts before the sampler, run on the recorded rollout            (PhaseLoop._prepare)
#     for epoch in range(sampler.num_epochs):
#         if sampler.refresh is "epoch": rollout = the same, on estimates of the latest policy
#         plan = sampler.plan(rollout)
#         for item in plan:                                                          (PhaseLoop._minibatch)
#             if sampler.refresh is "minibatch": rollout = the same, on the latest estimates of each step
#             minibatch = sampler.take(rollout, sampler.draw(item))
#             gradient = derivative of loss(params, minibatch)
#             params = params + optimizer.update(gradient)                           (PhaseLoop._step)
#             if sampler.refresh is "minibatch": write the estimates of the minibatch back
#
#     def loss(params, minibatch):                                                   (gradient.loss_of)
#         minibatch.current = evaluate(params, minibatch)
#         return sum of the mean losses that the parts after the sampler add to the minibatch
#
# The loops carry one record, `PhaseState`; the recorded rollout, which does not change, is in `PhaseLoop`.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._base.trees import select, varying_like
from ..errors import ShapeError, UserValueError
from ..functional._arguments import check_as
from ..functional._common import masked_sum
from .batch import Array, Batch, Evaluate, Params, any_stream
from .chain import amend, fold
from .gradient import Aux, differentiate, loss_of
from .metrics import Metrics, join_metrics, split_metrics
from .optimizer import last_finite
from .part import Context, Part
from .phase_state import Estimates, PhaseState, all_finite, check_and_amend
from .phases import Phase
from .sampling import check_plan
from .wiring import check_batch

MAX_FLAT = 2**22  # the largest number of parameters whose gradient is flattened
GradientMetrics = Callable[[Any], Mapping[str, Array]]


@dataclasses.dataclass(frozen=True)
class PhaseLoop:
    """The loop of one phase over the minibatches of one rollout."""

    phase: Phase
    shared: tuple[Part, ...]  # the parts that all phases share
    recorded: Batch  # the rollout before any part has run, with finite numbers in masked elements
    prepared: Batch  # the rollout after the shared parts
    context: Context  # the step of the update, the policy, and the key of this phase
    policy: Evaluate  # as given to the learner; it may be `microbatched`
    gradient_metrics: GradientMetrics
    policy_changed: bool  # whether the policy at the beginning of the phase may differ from the one that acted
    keep_finite: bool  # whether parts keep their last finite state, because the optimizer skips non-finite gradients

    def run(self, state: PhaseState) -> tuple[PhaseState, Metrics, Batch]:
        """Run all epochs, and also return the rollout that parts with `finish` receive."""
        sampler, can_stop, key = self.phase.sampler, self.phase.can_stop, self.context.key
        rollout = self.recorded
        if sampler.refresh == "rollout":
            rollout, state = self._prepare(state, self.context.replace(key=jax.random.fold_in(key, 0)))
        elif sampler.refresh == "minibatch":
            state = state._replace(estimates=self._estimates(state.params, 0))
        first, rollout = split_metrics(rollout)

        def epoch(state: PhaseState, index: Array) -> tuple[PhaseState, tuple[Metrics, Metrics, Array]]:
            keys = jax.random.split(jax.random.fold_in(key, index + 1), 3)
            context = self.context.replace(key=keys[0], epoch=index)
            drawn_from = rollout
            if sampler.refresh in ("epoch", "every_epoch"):
                drawn_from, state = self._prepare(state, context, self._estimates(state.params, index))
            refreshed, drawn_from = split_metrics(drawn_from)
            if sampler.refresh != "minibatch":  # otherwise no part has run yet
                check_batch(sampler, drawn_from)
            items = sampler.plan(keys[1], drawn_from, index)
            check_plan(sampler, items)
            minibatch = functools.partial(self._minibatch, drawn_from, context.replace(key=keys[2]))
            numbered = (jnp.arange(sampler.num_minibatches), items)
            state, measured, ran = scan_until(minibatch, state, numbered, can_stop)
            return varying_like((state, (refreshed, measured, ran)), state.stopped)

        epochs = jnp.arange(sampler.num_epochs)
        state, (refreshed, measured, ran), begun = scan_until(epoch, state, epochs, can_stop)
        counts = {"epochs": jnp.sum(begun)} | ({"early_stopped": state.stopped} if can_stop else {})
        own = Metrics.of(counts, dict.fromkeys(counts, "sum"))
        metrics = join_metrics(first, refreshed.reduce(begun), measured.reduce(ran), own)
        finished = rollout if sampler.refresh == "rollout" else self.prepared
        metrics = dataclasses.replace(metrics, names=tuple(self.phase.prefix + name for name in metrics.names))
        return state._replace(estimates=None), metrics, finished

    def run_if_due(self, state: PhaseState) -> tuple[PhaseState, Metrics, Batch]:
        """Run the phase if it is due; otherwise keep the state and return metrics of NaN (sums of 0)."""

        @functools.partial(jax.jit, inline=True)  # traced only once
        def run(state: PhaseState) -> tuple[PhaseState, Metrics]:
            return self.run(state)[:2]

        def skip(state: PhaseState) -> tuple[PhaseState, Metrics]:
            metrics = jax.eval_shape(lambda: run(state))[1]
            absent = [0.0 if way == "sum" else jnp.nan for way in metrics.reductions]
            return state, dataclasses.replace(metrics, array=jnp.array(absent, metrics.array.dtype))

        state, metrics = self.phase.run_if_due(self.context.step, run, skip, state)
        return state, metrics, self.prepared

    def _prepare(
        self, state: PhaseState, context: Context, estimates: Estimates | None = None
    ) -> tuple[Batch, PhaseState]:
        """Run the phase's own parts on the prepared rollout or, with new estimates, all parts on the recorded."""
        if estimates is None:
            first, batch = len(self.shared), split_metrics(self.prepared)[1]
        else:
            first, batch = 0, self.recorded.replace(**estimates._asdict())
        parts, context = (*self.shared, *self.phase.before)[first:], context.replace(params=state.params)
        old = state.before[first:]
        batch, new = fold(parts, batch, old, context)
        new, params, opt_state = check_and_amend(parts, batch, old, new, context, state.opt_state, self.keep_finite)
        return batch, state._replace(params=params, opt_state=opt_state, before=(*state.before[:first], *new))

    def _estimates(self, params: Params, epoch: Array | int) -> Estimates:
        """Return the estimates of the latest policy, or the recorded ones if it is still the behavior policy."""

        def evaluated(params: Params) -> Estimates:
            return Estimates.evaluated(self.context.evaluate, params, self.recorded)

        if self.policy_changed:
            return evaluated(params)
        if isinstance(epoch, int):
            return Estimates.recorded(self.recorded)
        return jax.lax.cond(epoch > 0, evaluated, lambda params: Estimates.recorded(self.recorded), params)

    def _minibatch(
        self, rollout: Batch, context: Context, state: PhaseState, numbered: Any
    ) -> tuple[PhaseState, Metrics]:
        """Draw a minibatch, differentiate its loss, take the step unless a part discards it, and write back."""
        phase, sampler = self.phase, self.phase.sampler
        index, item = numbered
        key = jax.random.fold_in(context.key, index)
        # The parent key is not given to any part, because a part that splits it would get the same keys.
        before_key, loss_key, draw_key = (jax.random.fold_in(key, i) for i in range(3))
        context = context.replace(key=before_key, minibatch=index)
        if sampler.refresh == "minibatch":
            rollout, state = self._prepare(state, context, state.estimates)
            check_written_back(rollout, self.recorded)
            check_batch(sampler, rollout)
        refreshed, rollout = split_metrics(rollout)
        context = context.replace(params=state.params)
        indices, weight = sampler.draw(item, rollout, context.replace(key=draw_key))
        minibatch = sampler.take(rollout, indices, weight)

        context = context.replace(key=loss_key)
        (loss, (written, after)), gradient = differentiate(phase, self.policy, minibatch, state, context)
        gradient, stop = phase.mask_untrained(gradient, state.params), written.stop
        new, applied = self._step(minibatch, state, context, loss, (written, after), gradient)
        if stop is not None:
            phase.check_stop()
            applied &= ~stop.discard
            new = select(~stop.discard, new, state)._replace(stopped=stop.discard | stop.after)

        minibatch = minibatch.replace(current=written.current)
        if new.estimates is not None:
            new = new._replace(estimates=new.estimates.write_back(self.recorded, sampler, minibatch, indices))
        measured = self._measure(loss, gradient, applied, minibatch)
        metrics = join_metrics(refreshed, split_metrics(written)[0], *measured)
        return varying_like((new, metrics), new.stopped)  # constants must vary, too, inside `shard_map`

    def _step(
        self, minibatch: Batch, state: PhaseState, context: Context, loss: Array, aux: Aux, gradient: Params
    ) -> tuple[PhaseState, Array]:
        """Apply the optimizer and the parts' `amend`, and also return whether the optimizer applied the gradient."""
        phase, params, (written, after) = self.phase, state.params, aux

        # The line searches of optax pass all other extra arguments to `value_fn`, and reject those it does not name.
        def value_fn(
            trained: Params, step: Any = 0, metrics: Any = 0, obj_fn: Any = 0, grad_fn: Any = 0, losses_fn: Any = 0
        ) -> Array:
            return loss_of(phase, trained, minibatch, state, context)[0]

        def losses_fn(trained: Params) -> Mapping[str, Array]:
            if callable(phase.trains):  # the leaves that it does not train are constants, as for the gradient
                own = phase.mask_untrained(trained, params)
                trained = jax.tree.map(lambda x, y: y + jax.lax.stop_gradient(x - y), trained, own)
            return loss_of(phase, trained, minibatch, state, context)[1][0].losses

        def grad_fn(trained: Params, *_: Any) -> Params:
            return phase.mask_untrained(jax.grad(value_fn)(trained), params)

        updates, opt_state = phase.optimizer.update(
            gradient,
            state.opt_state,
            phase.select_trained(params),
            step=context.step,
            value=loss,
            metrics=written.metrics,
            grad=gradient,
            value_fn=value_fn,
            obj_fn=value_fn,
            grad_fn=grad_fn,
            losses_fn=losses_fn,
        )
        # Weight decay would also change parameters without a gradient.
        updates = phase.mask_untrained(updates, params)
        params = phase.merge_trained(params, optax.apply_updates(phase.select_trained(params), updates))
        applied = jnp.ones((), bool)
        if (finite := last_finite(opt_state)) is not None:
            # After many consecutive non-finite gradients, `optax.apply_if_finite` applies them.
            applied = finite | ~all_finite(updates)
            after = select(applied, after, state.after)
        params, opt_state = amend(phase.after, params, opt_state, state.after, after, context)
        return state._replace(params=params, opt_state=opt_state, after=after), applied

    def _measure(self, loss: Array, gradient: Params, applied: Array, minibatch: Batch) -> tuple[Metrics, Metrics]:
        """Return the metrics that the learner adds for a minibatch, and those of `gradient_metrics`."""
        # Take the norm of the flattened gradient, as `optax.flatten` does, so that XLA computes it only once even if
        # the optimizer clips. A large gradient must not be copied, or gathered from several devices.
        leaves = jax.tree.leaves(gradient)
        small = sum(x.size for x in leaves) <= MAX_FLAT
        norm = optax.tree.norm(jnp.concatenate([jnp.reshape(x, -1) for x in leaves]) if small else gradient)
        counts = {"minibatches": applied, "nonfinite/gradient": ~jnp.isfinite(norm)}
        if minibatch.advantage is not None:
            # Count with floats, so that devices sum this count together with the other numbers.
            bad = any_stream(~jnp.isfinite(minibatch.advantage), minibatch.log_prob)
            counts["nonfinite/advantage"] = masked_sum(bad.astype(jnp.float32), minibatch.mask)
        own = Metrics.of({"loss": loss, "grad_norm": norm, **counts}, dict.fromkeys(counts, "sum"))
        measured = self.gradient_metrics(gradient)
        check_as("learner", "what gradient_metrics returns", measured, Mapping)
        for name, value in measured.items():
            if jnp.shape(value) != ():
                raise ShapeError(
                    f"learner: gradient_metrics must return scalars, but {name!r} has shape {jnp.shape(value)}"
                )
        return own, Metrics.of(measured)


def check_written_back(rollout: Batch, recorded: Batch) -> None:
    """Raise if a part before the sampler changed the rollout's shape, because estimates could not be written back."""
    if rollout.log_prob.shape != recorded.log_prob.shape:
        raise UserValueError(
            f'refresh="minibatch" writes values back into the rollout of shape {recorded.log_prob.shape}, but a part '
            f'before the sampler made it {rollout.log_prob.shape}: use refresh="rollout" or "epoch"'
        )


def scan_until(
    step: Callable[[PhaseState, Any], tuple[PhaseState, Any]], state: PhaseState, xs: Any, can_stop: bool
) -> tuple[PhaseState, Any, Array]:
    """Run `lax.scan`, skip the remaining steps once `state.stopped` is True, and also return which steps ran."""
    state = varying_like(state, state.stopped)
    if not can_stop:
        state, ys = jax.lax.scan(step, state, xs)
        return state, ys, jnp.ones(jax.tree.leaves(xs)[0].shape[0], bool)
    run = jax.jit(step, inline=True)  # traced once for both the shapes and the loop
    # The state is captured, not an argument, so that it keeps the axes over which it varies inside `shard_map`.
    shapes = jax.eval_shape(lambda: run(state, jax.tree.map(lambda x: x[0], xs)))[1]

    def skip(state: PhaseState, x: Any) -> tuple[PhaseState, Any]:
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return state, varying_like(zeros, state.stopped)

    def guarded(state: PhaseState, x: Any) -> tuple[PhaseState, Any]:
        ran = ~state.stopped
        state, ys = jax.lax.cond(ran, run, skip, state, x)
        return state, (ys, ran)

    state, (ys, ran) = jax.lax.scan(guarded, state, xs)
    return state, ys, ran
