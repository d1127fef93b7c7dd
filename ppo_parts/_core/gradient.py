"""The loss of a minibatch and its gradient, computed at once or piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._base.trees import varying_like
from ..errors import UserValueError
from ..functional import masked_mean
from ..functional._common import accumulator_dtype, masked_sum
from .batch import ABSENT, POLICY_READS, Array, Batch, Current, Evaluate, Output, Params, Policy
from .chain import check_states, fold
from .part import PIECE_KEY, Context, Part
from .phase_state import PhaseState
from .phases import Phase
from .pieces import Microbatched, cut
from .policy import evaluate_current
from .wiring import list_reads

Aux = tuple[Batch, tuple[Any, ...]]
"""What a minibatch yields besides its loss: the states of the parts after the sampler, and a batch with the metrics,
the stop request and the mean losses that they wrote, with log-probabilities and values before the step as `current`."""


def loss_of(
    phase: Phase, trained: Params, minibatch: Batch, state: PhaseState, context: Context, output: Output | None = None
) -> tuple[Array, Aux]:
    """Return the sum of the mean losses that the parts after the sampler add to a minibatch.

    The policy with these trained parameters is evaluated on the minibatch unless its `output` is given.
    """
    params = phase.merge_trained(state.params, trained)
    evaluate: Evaluate = context.evaluate if output is None else lambda params, batch: output
    current = evaluate_current(evaluate, params, minibatch)
    batch, after = fold(phase.after, minibatch.replace(current=current), state.after, context.replace(params=params))
    check_states("update", phase.after, state.after, after)
    if not batch.losses:
        of_phase = f" of phase {phase.name!r}" if phase.name else ""
        says = f"learner: no part{of_phase} added a loss: put one, e.g. clipped_surrogate(), after the sampler"
        raise UserValueError(says)
    means = {name: reduce_loss(loss, batch) for name, loss in batch.losses.items()}
    batch = batch.add_metrics("sum", **{f"nonfinite/loss/{name}": ~jnp.isfinite(x) for name, x in means.items()})
    # `value_and_grad` can return only arrays besides the loss, and a distribution need not be a pytree of arrays.
    current = current._replace(distribution=None, aux=None)
    written = Batch(metrics=batch.metrics, reductions=batch.reductions, stop=batch.stop, losses=means, current=current)
    return sum(means.values(), jnp.zeros(())), (written, after)


def differentiate(
    phase: Phase, policy: Evaluate, minibatch: Batch, state: PhaseState, context: Context
) -> tuple[tuple[Array, Aux], Params]:
    """Return the results of `loss_of` and its gradient, computed piece by piece if the policy is `microbatched`."""
    trained, traced = phase.select_trained(state.params), list[Array]()
    network = policy.evaluate if isinstance(policy, Policy) else policy

    def loss(trained: Params) -> tuple[Array, Aux]:
        total, aux = loss_of(phase, trained, minibatch, state, context)
        return record_tangent(total, traced), aux

    found = None
    if isinstance(network, Microbatched):
        found = _in_pieces(phase, network, trained, minibatch, state, context, traced)
    if found is None:
        results, gradient = jax.value_and_grad(loss, has_aux=True)(trained)
    else:
        output, gradient = found
        results = loss_of(phase, trained, minibatch, state, context, output)
        results = jax.tree.map(lambda x: x, results)  # sorts metric names, as `value_and_grad` does
    if not traced:
        of_phase = f" of phase {phase.name!r}" if phase.name else ""
        raise UserValueError(
            f"learner: no loss after the sampler{of_phase} depends on the parameters, so nothing is learned: evaluate "
            "must use params, and a loss what evaluate computes, such as batch.current.value instead of batch.value"
        )
    return results, gradient


def _in_pieces(
    phase: Phase, network: Microbatched, trained: Params, minibatch: Batch, state: PhaseState, context: Context,
    traced: list[Array],
) -> tuple[Output, Params] | None:  # fmt: skip
    """Return the output of the network and the gradient, or None if the minibatch must be evaluated at once.

    The parts before the first one that may read `current` or add a loss see the whole minibatch. The others must be
    `elementwise`, so that they need only the elements of a piece. No part may change anything that a policy reads.
    """
    first, number = _first_of_current(phase.after), network.pieces(minibatch, once=True)
    head, tail = phase.after[:first], phase.after[first:]
    written = {field.partition(".")[0] for part in phase.after for field in part.provides}
    if number == 1 or minibatch.shards > 1 or not all(part.elementwise for part in tail) or written & {*POLICY_READS}:
        return None
    unread = Current(None, ABSENT, ABSENT)  # parts after the sampler must see one

    def prepare(trained: Params) -> Batch:
        own = context.replace(params=phase.merge_trained(state.params, trained))
        return fold(head, minibatch.replace(current=unread), state.after[:first], own)[0]

    prepared = prepare(trained)
    changed = any(getattr(prepared, name) is not getattr(minibatch, name) for name in POLICY_READS)  # undeclared
    if changed or (head and _depends(prepare, trained)):  # the pieces' gradient would lack the head
        return None

    def evaluate(trained: Params, batch: Batch) -> Output:
        return network.evaluate(phase.merge_trained(state.params, trained), batch)

    pieces = cut("microbatched", evaluate, trained, prepared.replace(current=None), number)
    if not pieces.can_join:
        return None
    ones = jnp.ones_like(minibatch.log_prob, accumulator_dtype(minibatch.log_prob))  # bfloat16 cannot represent 257
    count = jnp.maximum(1, masked_sum(ones, minibatch.mask))

    def loss_of_piece(trained: Params, index: Array, fields: dict[str, Any]) -> tuple[Array, list[Array]]:
        piece = pieces.batch.replace(**fields)
        output = pieces.evaluate(trained, piece)
        seen = piece.replace(current=evaluate_current(lambda params, batch: output, None, piece), losses={})
        key = jax.random.fold_in(context.key, PIECE_KEY + index)
        params = phase.merge_trained(state.params, trained)
        batch, _ = fold(tail, seen, state.after[first:], context.replace(key=key, params=params))
        losses = (loss.astype(accumulator_dtype(loss)) for loss in batch.losses.values())
        sums = [masked_sum(loss, piece.mask) / count for loss in losses]
        return record_tangent(sum(sums, jnp.zeros(())), traced), jax.tree.leaves(output)

    def add_piece(total: Params, numbered: tuple[Array, dict[str, Any]]) -> tuple[Params, list[Array]]:
        gradient, leaves = jax.grad(loss_of_piece, has_aux=True)(trained, *numbered)
        return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, gradient), leaves

    # The sum of many bfloat16 numbers would lose precision.
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, accumulator_dtype(x)), trained)
    numbered = (jnp.arange(number), pieces.in_front())
    total, leaves = jax.lax.scan(add_piece, varying_like(zeros, minibatch.log_prob), numbered)
    return pieces.join(leaves), jax.tree.map(lambda x, y: x.astype(jnp.result_type(y)), total, trained)


def _depends(f: Callable[[Params], Any], params: Params) -> bool:
    """Return whether any result of `f` has a gradient with respect to the parameters."""
    traced = list[Array]()

    def total(params: Params) -> Array:
        floats = (x for x in jax.tree.leaves(f(params)) if jnp.issubdtype(jnp.result_type(x), jnp.floating))
        return sum((jnp.sum(record_tangent(x, traced)) for x in floats), jnp.zeros(()))

    jax.eval_shape(jax.grad(total), params)
    return bool(traced)


def _first_of_current(parts: Sequence[Part]) -> int:
    """Return the index of the first part that may read `current` or add a loss."""
    for index, part in enumerate(parts):
        may_need = part.reads is None or "losses" in part.provides  # a loss may depend only on parameters
        if may_need or any(field.startswith("current") for field in list_reads(part)):
            return index
    return len(parts)


def record_tangent(x: Array, traced: list[Array]) -> Array:
    """Return `x`; under differentiation, append its tangent to `traced` unless JAX knows that it is zero."""

    def tangent_of(tangent: Array, result: Array, x: Array) -> Array:
        traced.append(tangent)
        return tangent

    identity = jax.custom_jvp(lambda x: x)
    identity.defjvps(tangent_of)
    return identity(x)


def reduce_loss(loss: Array, batch: Batch) -> Array:
    """Return the mean of a loss over the unmasked elements or segments; a scalar is returned unchanged."""
    if loss.ndim == 0:
        return loss
    if loss.shape == batch.log_prob.shape or batch.mask is None:
        return masked_mean(loss, batch.mask)
    kept = batch.mask.astype(bool).reshape(*batch.mask.shape[:2], -1)
    return masked_mean(loss, jnp.any(kept, axis=(0, 2)))
