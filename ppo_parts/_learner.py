"""The learner: one PPO update as a pure function, made of a chain and an optax optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._chain import Chain, chain, check_batch, divider, fold
from ._hyperparameters import count
from ._optim import transformation
from ._phases import Phases
from ._policy import evaluate_current, follow, in_pieces
from ._samplers import Sampler, put, take
from ._types import PER_STEP, Array, Batch, Context, Current, Evaluate, Params, Part, require
from .functional import masked_mean
from .functional._common import ShapeError, floating, masked_sum, same_shape, stacked, unsqueezed

Metrics = dict[str, Array]
RECORDED = tuple(field for field in PER_STEP if field not in ("obs", "action", "log_prob"))


class LearnerState(NamedTuple):
    """Everything an update carries on.

    Attributes:
        params: the user's parameter tree.
        opt_state: the optimizer's state (a dict of them with `phases`).
        pipeline: the parts' states.
        step: int32, updates so far.
    """

    params: Params
    opt_state: Any
    pipeline: Any
    step: Array


class Learner(NamedTuple):
    """What `learner` returns, two pure functions.

    Attributes:
        init: `init(params) -> LearnerState`.
        update: `update(key, state, batch) -> (LearnerState, metrics)`; metrics are scalars.
    """

    init: Callable[[Params], LearnerState]
    update: Callable[[Array, LearnerState, Batch], tuple[LearnerState, Metrics]]


def learner(
    evaluate: Evaluate, pipeline: Part, optimizer: Any, *, microbatch: int | Literal["auto"] | None = None
) -> Learner:
    r"""Turn a pipeline into an update: rollout in, new parameters and metrics out.

    The parts before the sampler run on the rollout. Then, for each minibatch of each epoch, the policy is evaluated on
    it, the parts after the sampler run, and the optimizer steps along the gradient of

    .. math:: L = \sum_{\text{names}} \frac{\sum_i m_i L^{\text{name}}_i}{\max(1, \sum_i m_i)}

    Metrics are means over the minibatches run (names that end in `_max` or `_min`: the maximum or minimum), besides
    `loss`, `grad_norm` (before the optimizer), `minibatches` (gradient steps applied), `epochs` (begun) and
    `early_stopped` (0 or 1, where the chain can stop). `nonfinite/...` count what is not finite, by where it arose:
    elements of the rollout's unmasked `reward`, `log_prob`, `value` and `next_value`, elements of the minibatches'
    `advantage`, and minibatches whose loss or `gradient` is not; see `nonfinite_report`. To skip such gradients,
    wrap the optimizer in `optax.apply_if_finite`.

    Args:
        evaluate: `evaluate(params, batch) -> (distribution, value)`, from any network library. `batch.obs` has the
            leading axes of the rollout or of the minibatch; the value has just these. The distribution is any object
            with `log_prob` (and `entropy` or `sample` where a part asks for them).
        pipeline: a part with one sampler (or `phases`) in it, usually a `chain`.
        optimizer: an optax transformation; with `phases` a dict with the names of the phases. It gets the number of
            updates so far as the extra argument `step`, see `per_update_learning_rate`.
        microbatch: evaluate the network on pieces of at most this many elements of a minibatch, one after the other,
            and again in the backward pass. The gradient is that of the whole minibatch (up to rounding: losses, means
            and statistics are taken over all of it) with the memory of one piece; on a CPU, where a piece stays in the
            cache, large minibatches are faster, too. Not for networks that mix elements, as batch normalisation does.
            None: all at once. "auto": 1024 where that is faster, which is on a CPU, for minibatches of 16,384 elements
            or more with observations of at most 128 numbers, and without recurrence; otherwise all at once.

    Returns:
        `Learner(init, update)`. Both are pure: jit, vmap, scan and shard them.

    Raises:
        ValueError: no sampler; optimizers that do not match the phases; at the first trace, what parts find missing.

    Example:
        >>> import jax, jax.numpy as jnp, optax, ppo_parts as pp
        >>> from ppo_parts import distributions
        >>> def evaluate(params, batch):
        ...     return distributions.Categorical(batch.obs @ params["policy"]), batch.obs @ params["value"]
        >>> pipeline = pp.chain(
        ...     pp.gae(gamma=.99, gae_lambda=.95), pp.shuffled_minibatches(2, num_epochs=2),
        ...     pp.clipped_surrogate(clip_eps=.2), pp.value_loss(coef=.5),
        ... )
        >>> learner = pp.learner(evaluate, pipeline, optax.adam(1e-3))
        >>> state = learner.init({"policy": jnp.zeros((3, 2)), "value": jnp.zeros(3)})
        >>> flat = jnp.zeros((4, 2))
        >>> batch = pp.Batch(
        ...     obs=jnp.ones((4, 2, 3)), action=flat.astype(int), log_prob=flat + jnp.log(.5), value=flat,
        ...     reward=flat + 1, terminated=flat, next_value=flat,
        ... )
        >>> state, metrics = jax.jit(learner.update)(jax.random.key(0), state, batch)
        >>> int(metrics["minibatches"]), int(state.step)
        (4, 1)

    Reference: Schulman et al. 2017, arXiv:1707.06347, algorithm 1.
    """
    if not callable(evaluate):
        raise TypeError(
            f"learner: evaluate must be a function (params, batch) -> (distribution, value), got {evaluate!r}"
        )
    if microbatch is not None:
        if microbatch != "auto":
            count("learner", "microbatch", microbatch)
        evaluate = in_pieces(evaluate, microbatch)
    shared, phases = _divide(chain(pipeline), optimizer)
    named = phases[0].name is not None
    start = chain(*shared)

    def unnamed(states: dict[Any, Any]) -> Any:
        return states if named else states[None]

    def init(params: Params) -> LearnerState:
        opt_states = {phase.name: phase.optimizer.init(phase.trained(params)) for phase in phases}
        states = {phase.name: phase.init(params) for phase in phases}
        pipeline = (start.init(params), unnamed(states))
        return LearnerState(params, unnamed(opt_states), pipeline, jnp.zeros((), jnp.int32))

    def update(key: Array, state: LearnerState, batch: Batch) -> tuple[LearnerState, Metrics]:
        check_rollout(batch)
        params, (shared_state, states) = state.params, state.pipeline
        opt_states = dict(state.opt_state) if named else {None: state.opt_state}
        states = dict(states) if named else {None: states}
        raw = finite_where_masked(batch.replace(metrics={}, losses={}, current=None, stop=None))
        ready, metrics = raw, count_nonfinite(raw)
        if any(phase.sampler.refresh == "rollout" for phase in phases):
            context = Context(key=jax.random.fold_in(key, 0), step=state.step, params=params, evaluate=evaluate)
            ready, shared_state = start.update(raw, shared_state, context)
            metrics = _joined(metrics, ready.metrics)
        for number, phase in enumerate(phases):
            run = _Run(phase, shared, evaluate, jax.random.fold_in(key, number + 1), state.step, params, raw, ready)
            params, opt_states[phase.name], shared_state, states[phase.name], measured = run(
                opt_states[phase.name], shared_state, states[phase.name]
            )
            prefix = f"{phase.name}/" if named else ""
            metrics = _joined(metrics, {prefix + name: value for name, value in measured.items()})
        pipeline = (shared_state, unnamed(states))
        return LearnerState(params, unnamed(opt_states), pipeline, state.step + 1), metrics

    return Learner(init, update)


@dataclasses.dataclass(frozen=True)
class _Phase:
    """One sampler with the parts on both sides of it, and the optimizer of what it trains."""

    name: str | None
    before: tuple[Part, ...]
    sampler: Sampler
    after: tuple[Part, ...]
    optimizer: optax.GradientTransformationExtraArgs

    def init(self, params: Params) -> tuple[Any, Any]:
        return chain(*self.before).init(params), chain(*self.after).init(params)

    def trained(self, params: Params) -> Params:
        """What of the parameters this phase trains."""
        if self.name is None:
            return params
        if not isinstance(params, Mapping) or self.name not in params:
            got = f"entries {sorted(params)}" if isinstance(params, Mapping) else type(params).__name__
            raise ValueError(
                f"learner: phase {self.name!r} trains params[{self.name!r}], but the parameters have {got}"
            )
        return params[self.name]

    def merged(self, params: Params, trained: Params) -> Params:
        """The whole parameters, with what this phase trains put in."""
        return trained if self.name is None else {**params, self.name: trained}


def _divide(pipeline: Part, optimizer: Any) -> tuple[tuple[Part, ...], list[_Phase]]:
    """The parts all phases share, and the phases; a pipeline without `phases` is one phase without a name."""
    assert isinstance(pipeline, Chain)
    index = divider(pipeline.parts)
    if index is None:
        raise ValueError(
            "learner: the pipeline has no sampler: put one, such as shuffled_minibatches() or full_batch(), between "
            "the parts that see the rollout and the losses"
        )
    before, dividing, after = pipeline.parts[:index], pipeline.parts[index], pipeline.parts[index + 1 :]
    if isinstance(dividing, Sampler):
        if isinstance(optimizer, Mapping):
            raise ValueError(
                "learner: a dict of optimizers goes with phases(); this pipeline has one sampler, give one"
            )
        return (), [_Phase(None, before, dividing, after, transformation("learner", optimizer))]
    assert isinstance(dividing, Phases)
    if after:
        raise ValueError(f"learner: {after[0].name} stands after phases(): move it into one of the phases")
    if not isinstance(optimizer, Mapping) or set(optimizer) != set(dividing.chains):
        got = f"a dict with {sorted(optimizer)}" if isinstance(optimizer, Mapping) else type(optimizer).__name__
        raise ValueError(f"learner: phases need a dict of optimizers named {sorted(dividing.chains)}, got {got}")
    divided = []
    for name, part in dividing.chains.items():
        _, (phase,) = _divide(part, optimizer[name])
        divided.append(dataclasses.replace(phase, name=name))
    return before, divided


class _Carry(NamedTuple):
    """What changes from minibatch to minibatch within a phase."""

    trained: Params
    opt_state: Any
    before: Any  # states of the parts before the sampler (with a refresh: the shared ones first)
    after: Any  # states of the parts after it
    seen: Batch | None  # value, next_value and log_ratio of the rollout as last refreshed; None: no refresh
    stopped: Array


@dataclasses.dataclass(frozen=True)
class _Run:
    """One phase at work on one rollout."""

    phase: _Phase
    shared: tuple[Part, ...]
    evaluate: Evaluate
    key: Array
    step: Array
    params: Params  # as this phase finds them
    raw: Batch  # the rollout as given
    ready: Batch  # the rollout after the shared parts ran once

    def __call__(self, opt_state: Any, shared_state: Any, state: Any) -> tuple[Params, Any, Any, Any, Metrics]:
        phase, sampler, (before, after) = self.phase, self.phase.sampler, state
        context = Context(
            key=self.key,
            step=self.step,
            params=self.params,
            evaluate=self.evaluate,
            num_minibatches=sampler.num_minibatches,
        )
        metrics: Metrics = {}
        measuring, refreshing = _Packer(), _Packer()
        data: Batch | None = None
        seen: Batch | None = None
        if sampler.refresh == "rollout":
            start = self.ready.replace(metrics={})
            data, before = fold(phase.before, start, before, context.replace(key=jax.random.fold_in(self.key, 0)))
            metrics = dict(data.metrics)
        else:
            seen, before = self._recorded(), (*shared_state, *before)
        carry = _Carry(phase.trained(self.params), opt_state, before, after, seen, jnp.zeros((), bool))
        can_stop = any("stop" in part.provides for part in phase.after)

        def epoch(carry: _Carry, number: Array) -> tuple[_Carry, Any]:
            keys = jax.random.split(jax.random.fold_in(self.key, number + 1), 3)
            rollout, refreshed = data, dict[str, Array]()
            if sampler.refresh == "epoch":
                seen = jax.lax.cond(number > 0, self._reevaluated, lambda carry: carry.seen, carry)
                rollout, carry = self._prefix(carry._replace(seen=seen), context.replace(key=keys[0]))
                refreshed = dict(rollout.metrics)
            plan = sampler.plan(keys[1], self.raw, number)

            def minibatch(carry: _Carry, item: Any) -> tuple[_Carry, Array]:
                index, planned = item
                here = context.replace(key=jax.random.fold_in(keys[2], index), epoch=number, minibatch=index)
                carry, measured = self._minibatch(carry, planned, rollout, here)
                return carry, measuring.pack(measured)

            numbered = (jnp.arange(sampler.num_minibatches), plan)
            carry, measured, ran = _scan(minibatch, carry, numbered, can_stop)
            return carry, (refreshing.pack(refreshed), measured, ran)

        carry, (refreshed, measured, ran), epochs = _scan(epoch, carry, jnp.arange(sampler.num_epochs), can_stop)
        own = {"epochs": jnp.sum(epochs)}
        if can_stop:
            own["early_stopped"] = carry.stopped.astype(jnp.float32)
        metrics = _joined(
            metrics,
            refreshing.reduce(refreshed, epochs),
            measuring.reduce(measured, ran),
            own,
        )
        if seen is not None:
            number = len(self.shared)
            shared_state, before = tuple(carry.before[:number]), tuple(carry.before[number:])
        params = phase.merged(self.params, carry.trained)
        return params, carry.opt_state, shared_state, (before, carry.after), metrics

    def _recorded(self) -> Batch:
        raw, where = self.raw, f"refresh={self.phase.sampler.refresh!r}"
        require(raw, where, value="it is V(obs)", next_value="it is V of the observation that followed")
        log_ratio = jnp.zeros_like(raw.log_prob) if raw.log_ratio is None else raw.log_ratio
        return Batch(value=raw.value, next_value=raw.next_value, log_ratio=log_ratio)

    def _params(self, carry: _Carry) -> Params:
        return self.phase.merged(self.params, carry.trained)

    def _reevaluated(self, carry: _Carry) -> Batch:
        """What the current policy says of the whole rollout."""
        current = evaluate_current(self.evaluate, self._params(carry), self.raw)
        return self._as_seen(current.value, current.log_prob - self.raw.log_prob)

    def _as_seen(self, value: Array, log_ratio: Array) -> Batch:
        raw = self.raw
        value, log_ratio = value.astype(raw.value.dtype), log_ratio.astype(raw.log_prob.dtype)
        return Batch(value=value, next_value=follow(raw, value).astype(raw.next_value.dtype), log_ratio=log_ratio)

    def _prefix(self, carry: _Carry, context: Context) -> tuple[Batch, _Carry]:
        """Run the parts before the sampler again, on what was last seen of the rollout."""
        seen = carry.seen
        assert seen is not None
        batch = self.raw.replace(value=seen.value, next_value=seen.next_value, log_ratio=seen.log_ratio)
        context = context.replace(params=self._params(carry))
        batch, before = fold((*self.shared, *self.phase.before), batch, carry.before, context)
        return batch, carry._replace(before=before)

    def _minibatch(
        self, carry: _Carry, planned: Any, rollout: Batch | None, context: Context
    ) -> tuple[_Carry, Metrics]:
        """Draw, evaluate, differentiate, step."""
        phase, sampler = self.phase, self.phase.sampler
        metrics: Metrics = {}
        if sampler.refresh == "minibatch":
            rollout, carry = self._prefix(carry, context.replace(key=jax.random.fold_in(context.key, 0)))
            metrics = dict(rollout.metrics)
        assert rollout is not None
        check_batch(sampler, rollout)
        indices, weight = sampler.draw(planned, rollout, context)
        minibatch = take(rollout, indices, weight, sampler.axis)

        def loss_fn(trained: Params) -> tuple[Array, tuple[Batch, Any, Current]]:
            params = phase.merged(self.params, trained)
            current = evaluate_current(self.evaluate, params, minibatch)
            here = context.replace(params=params, key=jax.random.fold_in(context.key, 1))
            batch, after = fold(phase.after, minibatch.replace(current=current), carry.after, here)
            if not batch.losses:
                raise ValueError(
                    "learner: no part added a loss: put one, such as clipped_surrogate(), after the sampler"
                )
            means = {name: masked_mean(loss, batch.mask) for name, loss in batch.losses.items()}
            bad = {f"nonfinite/loss/{name}": mean for name, mean in means.items()}
            result = batch.replace(metrics=_joined(batch.metrics, bad), current=None, losses={})
            return sum(means.values(), jnp.zeros(())), (result, after, current._replace(distribution=None))

        (loss, (batch, after, current)), grads = jax.value_and_grad(loss_fn, has_aux=True)(carry.trained)
        updates, opt_state = phase.optimizer.update(grads, carry.opt_state, carry.trained, step=context.step)
        trained = optax.apply_updates(carry.trained, updates)
        applied, stopped = jnp.ones((), bool), carry.stopped
        if batch.stop is not None:
            applied, stopped = ~batch.stop.discard, batch.stop.discard | batch.stop.after
            trained, opt_state, after = jax.tree.map(
                lambda new, old: jnp.where(applied, new, old),
                (trained, opt_state, after),
                (carry.trained, carry.opt_state, carry.after),
            )
        seen = carry.seen
        if sampler.refresh == "minibatch":
            assert seen is not None
            assert seen.value is not None
            assert seen.log_ratio is not None
            seen = self._as_seen(
                put(seen.value, indices, sampler.axis, current.value),
                put(seen.log_ratio, indices, sampler.axis, current.log_prob - minibatch.log_prob),
            )
        # Of one vector, as optax.flatten makes it, so that clipping by the norm and this are computed once.
        norm = optax.tree.norm(jnp.concatenate([jnp.reshape(x, -1) for x in jax.tree.leaves(grads)]))
        own = {"loss": loss, "grad_norm": norm, "minibatches": applied.astype(jnp.int32)}
        own["nonfinite/gradient"] = norm
        if minibatch.advantage is not None:
            own["nonfinite/advantage"] = masked_sum(~jnp.isfinite(minibatch.advantage), minibatch.mask)
        metrics = _joined(metrics, batch.metrics, own)
        return _Carry(trained, opt_state, carry.before, after, seen, stopped), metrics


def _scan(
    step: Callable[[_Carry, Any], tuple[_Carry, Any]], carry: _Carry, xs: Any, can_stop: bool
) -> tuple[_Carry, Any, Array]:
    """`lax.scan` that skips what follows once `carry.stopped`; also says which steps ran."""
    if not can_stop:
        carry, ys = jax.lax.scan(step, carry, xs)
        return carry, ys, jnp.ones(jax.tree.leaves(xs)[0].shape[0], bool)
    shapes = jax.eval_shape(step, carry, jax.tree.map(lambda x: x[0], xs))[1]

    def skip(carry: _Carry, x: Any) -> tuple[_Carry, Any]:
        del x
        return carry, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def guarded(carry: _Carry, x: Any) -> tuple[_Carry, Any]:
        ran = ~carry.stopped
        carry, ys = jax.lax.cond(ran, step, skip, carry, x)
        return carry, (ys, ran)

    carry, (ys, ran) = jax.lax.scan(guarded, carry, xs)
    return carry, ys, ran


def _joined(*groups: Mapping[str, Array]) -> Metrics:
    """All metrics in one dict; two of one name are an error, as within a chain."""
    joined: Metrics = {}
    for group in groups:
        for name, value in group.items():
            if name in joined:
                raise ValueError(
                    f"learner: a metric named {name!r} is written twice, by parts on both sides of the sampler or by a "
                    "part and by the learner itself: give the part's another name"
                )
            joined[name] = value
    return joined


class _Packer:
    """Scalars by name as one vector, so that loops carry one array of metrics instead of dozens.

    What goes by `nonfinite/loss/...` and `nonfinite/gradient` are the numbers themselves, counted in the end.
    """

    def __init__(self) -> None:
        self.dtypes: dict[str, Any] = {}

    def pack(self, metrics: Metrics) -> Array:
        self.dtypes = {name: jnp.result_type(value) for name, value in metrics.items()}
        dtype = jnp.result_type(jnp.float32, *self.dtypes.values())
        return stacked(list(metrics.values()) or [jnp.zeros(())], dtype)

    def reduce(self, packed: Array, ran: Array) -> Metrics:
        """One number for each name from what was packed where `ran`, `[..., names]`."""
        values, ran = packed.reshape(-1, packed.shape[-1]), ran.reshape(-1, 1)
        total = jnp.sum(jnp.where(ran, values, 0), axis=0)
        mean = total / jnp.maximum(jnp.sum(ran), 1)
        nonfinite = jnp.sum(ran & ~jnp.isfinite(values), axis=0)
        extremes = {
            "_max": jnp.max(values, axis=0, where=ran, initial=-jnp.inf),
            "_min": jnp.min(values, axis=0, where=ran, initial=jnp.inf),
        }
        reduced = {}
        for column, (name, dtype) in enumerate(self.dtypes.items()):
            if name.startswith(("nonfinite/loss/", "nonfinite/gradient")):
                reduced[name] = nonfinite[column]
            elif name == "minibatches" or name.startswith("nonfinite/"):
                reduced[name] = total[column].astype(jnp.int32)
            else:
                kept = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32
                reduced[name] = extremes.get(name[-4:], mean)[column].astype(kept)
        return reduced


def check_rollout(batch: Batch) -> None:
    """Raise unless `batch` is a rollout a learner can work on: fields there, shapes equal, `[T, N]` in front."""
    if not isinstance(batch, Batch):
        raise TypeError(f"learner.update: expected a ppo_parts.Batch, got {type(batch).__name__}")
    require(
        batch,
        "learner.update",
        obs="it is what the policy saw",
        action="it is what the policy did",
        log_prob="it is the log-probability of the action when it was taken",
    )
    if jnp.ndim(batch.log_prob) < 2:
        raise ShapeError(
            "learner.update: log_prob must have the axes [T, N] (time, segment), got shape "
            f"{jnp.shape(batch.log_prob)}; for a single environment add an axis of size 1"
        )
    recorded = {name: getattr(batch, name) for name in RECORDED}
    same_shape("learner.update", log_prob=batch.log_prob, **recorded)
    floating("learner.update", log_prob=batch.log_prob)
    for name, tree in {"obs": batch.obs, "action": batch.action}.items():
        for leaf in jax.tree.leaves(tree):
            if jnp.shape(leaf)[:2] != batch.log_prob.shape[:2]:
                raise ShapeError(
                    f"learner.update: {name} must begin with the axes [T, N] = {batch.log_prob.shape[:2]} of log_prob, "
                    f"got shape {jnp.shape(leaf)}"
                )
    for leaf in jax.tree.leaves(batch.carry):
        if jnp.shape(leaf)[:1] != batch.log_prob.shape[1:2]:
            raise ShapeError(
                f"learner.update: carry must begin with the axis [N] = {batch.log_prob.shape[1:2]} of log_prob (it is "
                f"the state before step 0 of each segment), got shape {jnp.shape(leaf)}"
            )


def finite_where_masked(batch: Batch) -> Batch:
    """The batch with 0 for what is not finite in masked observations and actions: 0 * NaN would be a NaN gradient."""
    if batch.mask is None:
        return batch
    keep = batch.mask.astype(bool)

    def finite(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.shape[: keep.ndim] != keep.shape:
            return x
        return jnp.where(jnp.isfinite(x) | unsqueezed(keep, x.ndim), x, 0)

    return batch.replace(obs=jax.tree.map(finite, batch.obs), action=jax.tree.map(finite, batch.action))


def count_nonfinite(batch: Batch) -> Metrics:
    """How many unmasked elements of the rollout are not finite, by field."""
    bad = {}
    for name in ("reward", "log_prob", "value", "next_value"):
        x = getattr(batch, name)
        if x is None or not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        bad[f"nonfinite/{name}"] = ~jnp.isfinite(x)
        if name == "next_value" and batch.terminated is not None:
            bad[f"nonfinite/{name}"] &= ~(batch.terminated == 1)  # anything may stand there
    # As one array, for one sum: each is three kernels.
    whole = jnp.stack(list(bad.values()))
    counts = masked_sum(whole, batch.mask, axis=tuple(range(1, whole.ndim)))
    return dict(zip(bad, counts, strict=True))


def nonfinite_report(metrics: Mapping[str, Any]) -> str | None:
    """Say in one sentence where numbers that are not finite arose in an update; None where all are finite.

    Args:
        metrics: of one `Learner.update` (or of several: arrays are summed).

    Example:
        >>> import ppo_parts as pp
        >>> pp.nonfinite_report({"nonfinite/reward": 2, "nonfinite/gradient": 1, "loss": 0.})
        'non-finite numbers arose first in reward (2 elements), then in gradient (1 minibatch)'
        >>> pp.nonfinite_report({"nonfinite/reward": 0}) is None
        True
    """
    order = ("reward", "log_prob", "value", "next_value", "advantage", "loss/", "gradient")
    found: dict[str, tuple[int, str]] = {}
    for name, value in metrics.items():
        phase, marker, what = name.partition("nonfinite/")
        total = int(np.sum(value)) if marker else 0
        if total:
            unit = "minibatch" if what.startswith(("loss/", "gradient")) else "element"
            plural = ("es" if unit == "minibatch" else "s") if total != 1 else ""
            rank = next((i for i, start in enumerate(order) if what.startswith(start)), len(order))
            found[phase + what] = (rank, f"{phase}{what.replace('/', ' ')} ({total} {unit}{plural})")
    if not found:
        return None
    listed = [text for _, text in sorted(found.values())]
    return "non-finite numbers arose first in " + ", then in ".join(listed)
