"""The learner: one PPO update as a pure function, made from a chain and an optax optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._chain import chain, check_every_write_is_read, part_key
from ._checks import check_params, check_rollout, count_nonfinite, finite_where_masked
from ._errors import UserTypeError
from ._loop import GradientMetrics, PhaseLoop, PhaseState
from ._metrics import Metrics, join_metrics
from ._optim import may_skip
from ._pieces import evaluate_shards
from ._plan import PhasePlan, divide, with_optimizers
from ._policy import evaluate_current
from ._refresh import Carried, Head, HeadState
from ._trees import copies, on_automatic_mesh, varying_like
from ._types import Array, Batch, Context, Evaluate, Output, Params, Part


class LearnerState(NamedTuple):
    """Everything that one update passes to the next.

    Attributes:
        params: the user's parameter tree.
        opt_state: the optimizer's state (a dict of them with `phases`).
        pipeline: the states of the parts.
        step: int32, updates so far.
    """

    params: Params
    opt_state: Any
    pipeline: Any
    step: Array


class Learner(NamedTuple):
    """The result of `learner`: two pure functions.

    Attributes:
        init: `init(params, key=None) -> LearnerState`; the key is for parts that draw their first state.
        update: `update(key, state, batch) -> (LearnerState, Metrics)`; metrics are scalars. With `return_batch` the
            third item is the rollout as the parts before the sampler left it.
    """

    init: Callable[..., LearnerState]
    update: Callable[[Array, LearnerState, Batch], Any]


def learner(
    evaluate: Evaluate,
    pipeline: Part,
    optimizer: Any,
    *,
    gradient_metrics: GradientMetrics | None = None,
    return_batch: bool = False,
) -> Learner:
    r"""Turn a pipeline into an update: rollout in, new parameters and metrics out.

    The parts before the sampler run on the rollout. Then, for each minibatch of each epoch, the policy is evaluated on
    it, the parts after the sampler run, and the optimizer steps along the gradient of

    .. math:: L = \sum_{\text{names}} \frac{\sum_i m_i L^{\text{name}}_i}{\max(1, \sum_i m_i)}

    Metrics are reduced over the minibatches that ran, as specified by the part that adds them (`Batch.add_metrics`; by
    default the mean). The learner adds `loss`, `grad_norm` (before the optimizer), `minibatches` (gradient steps
    applied), `epochs` (begun) and `early_stopped` (0 or 1, if the chain can stop). `nonfinite/...` count numbers that
    are not finite, by where they arose: unmasked elements of the rollout's `reward`, `log_prob`, `value` and
    `next_value`, elements of the minibatches' `advantage`, and minibatches whose loss or `gradient` is not finite; see
    `nonfinite_report`.

    To skip gradients that are not finite, wrap the optimizer in `optax.apply_if_finite`: a skipped step leaves the
    states of the parts after the sampler unchanged, and parts before it keep their last finite state.

    Args:
        evaluate: a `Policy`, or `evaluate(params, batch) -> Output` (or `(distribution, value[, carry])`), from any
            network library. `batch.obs` has the leading axes of the rollout or of the minibatch; the value has exactly
            these. The distribution is any object with `log_prob` (and `entropy` or `sample` where a part needs it).
            See `microbatched` for networks that need too much memory.
        pipeline: a part with one sampler (or `phases`) in it, usually a `chain`.
        optimizer: an optax transformation; with `phases` a dict with the names of the phases. Its `update` receives the
            extra arguments `step` (updates so far, see `scale_by_update_schedule`), `value` (the loss) and `metrics`
            (those of the minibatch, by name), so that a learning rate can adapt to a divergence or a loss.
        gradient_metrics: `gradient -> {name: scalar}`: further metrics of each gradient, such as separate norms for
            actor and critic.
        return_batch: whether `update` also returns the rollout as the parts before the sampler left it.

    Returns:
        `Learner(init, update)`. Both are pure: jit, vmap and scan them.

    Raises:
        ValueError: no sampler; optimizers that do not match the phases; at the first trace, fields that are missing.

    Example:
        >>> import jax, jax.numpy as jnp, optax, ppo_parts as pp
        >>> def evaluate(params, batch):
        ...     return pp.distributions.Categorical(batch.obs @ params["policy"]), batch.obs @ params["value"]
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
        raise UserTypeError(
            f"learner: evaluate must be a Policy or a function (params, batch) -> Output, got {evaluate!r}"
        )
    shared, plans = divide(chain(pipeline))
    plans = with_optimizers(plans, optimizer)
    check_every_write_is_read(shared, [(*plan.before, plan.sampler, *plan.after) for plan in plans])
    program = _Program(shared, tuple(plans), evaluate, gradient_metrics or (lambda gradient: {}), return_batch)
    return Learner(program.init, program.update)


class _Progress(NamedTuple):
    """The intermediate results of an update; the states of phases by name."""

    params: Params
    opt_states: dict[Any, Any]
    shared: tuple[Any, ...]
    states: dict[Any, tuple[Any, Any]]
    metrics: tuple[Metrics, ...]


@dataclasses.dataclass(frozen=True)
class _Program:
    """The two functions of a learner; see `learner` for the fields."""

    shared: tuple[Part, ...]
    plans: tuple[PhasePlan, ...]
    policy: Evaluate
    gradient_metrics: GradientMetrics
    return_batch: bool

    def evaluate(self, params: Params, batch: Batch) -> Output:
        return evaluate_shards(self.policy, params, batch)

    def unnamed(self, states: dict[Any, Any]) -> Any:
        """Return the states by phase, or the states alone for a pipeline without phases."""
        return states[None] if self.plans[0].name is None else states

    def by_name(self, states: Any) -> dict[Any, Any]:
        return {None: states} if self.plans[0].name is None else dict(states)

    def init(self, params: Params, key: Array | None = None) -> LearnerState:
        check_params(params)
        states = {}
        for number, plan in enumerate(self.plans):
            phase_key = part_key(key, number + 1)
            before = chain(*plan.before).init(params, part_key(phase_key, 1))
            states[plan.name] = before, chain(*plan.after).init(params, part_key(phase_key, 2))
        opt_states = {plan.name: plan.optimizer.init(plan.trained(params)) for plan in self.plans}
        pipeline = (chain(*self.shared).init(params, key), self.unnamed(states))
        return LearnerState(params, self.unnamed(opt_states), copies(pipeline), jnp.zeros((), jnp.int32))

    def update(self, key: Array, state: LearnerState, batch: Batch) -> Any:
        check_rollout(batch)
        return on_automatic_mesh(self._update, batch.log_prob)(key, state, batch)

    def _update(self, key: Array, state: LearnerState, batch: Batch) -> Any:
        key, state = varying_like((key, state), batch.log_prob)
        raw = finite_where_masked(batch.replace(metrics={}, reductions=(), losses={}, current=None, stop=None))
        context = Context(key=key, step=state.step, params=state.params, evaluate=self.evaluate)
        shared, states = state.pipeline
        opt_states = self.by_name(state.opt_state)
        progress = _Progress(state.params, opt_states, shared, self.by_name(states), (count_nonfinite(raw),))
        ready, progress = self._run_shared(raw, progress, context)
        rollouts = {}
        for number, plan in enumerate(self.plans):
            rollouts[plan.name], progress = self._run_phase(number, plan, raw, ready, progress, context)
        shared, states = self._finished(progress, ready, rollouts, context)
        pipeline = (shared, self.unnamed(states))
        result = LearnerState(progress.params, self.unnamed(progress.opt_states), pipeline, state.step + 1)
        metrics = join_metrics(*progress.metrics)
        return (result, metrics, rollouts[self.plans[0].name]) if self.return_batch else (result, metrics)

    def _run_shared(self, raw: Batch, progress: _Progress, context: Context) -> tuple[Batch, _Progress]:
        """Run the parts that all phases share, once, for the phases that do not run them again."""
        if not any(plan.sampler.refresh.shares_head for plan in self.plans):
            return raw, progress
        head = Head((), self.shared, self.evaluate, raw, raw, False, _keeps_finite(progress))
        context = context.replace(key=jax.random.fold_in(context.key, 0))
        ready, carried = head.run_own(Carried(progress.params, HeadState((), progress.shared)), context)
        metrics = (*progress.metrics, Metrics.of(ready.metrics, dict(ready.reductions)))
        return ready, progress._replace(params=carried.params, shared=carried.head.own, metrics=metrics)

    def _run_phase(
        self, number: int, plan: PhasePlan, raw: Batch, ready: Batch, progress: _Progress, context: Context
    ) -> tuple[Batch, _Progress]:
        head = Head(self.shared, plan.before, self.evaluate, raw, ready, number > 0, _keeps_finite(progress))
        key = jax.random.fold_in(context.key, number + 1)
        context = context.replace(key=key, num_minibatches=plan.sampler.num_minibatches)
        before, after = progress.states[plan.name]
        carried = Carried(progress.params, HeadState(progress.shared, before))
        stopped = jnp.zeros_like(context.step, bool)
        state = PhaseState(carried, progress.opt_states[plan.name], after, stopped)
        state, metrics, rollout = run_every(
            PhaseLoop(plan, head, context, self.gradient_metrics), plan.every, state, ready
        )
        metrics = metrics if plan.name is None else metrics.prefixed(f"{plan.name}/")
        return rollout, _Progress(
            state.carried.params,
            {**progress.opt_states, plan.name: state.opt_state},
            state.carried.head.shared,
            {**progress.states, plan.name: (state.carried.head.own, state.after)},
            (*progress.metrics, metrics),
        )

    def _finished(
        self, progress: _Progress, ready: Batch, rollouts: dict[Any, Batch], context: Context
    ) -> tuple[tuple[Any, ...], dict[Any, Any]]:
        """Return the states of all parts, after calling `finish` on the rollout under the updated policy."""
        context = context.replace(key=jax.random.fold_in(context.key, len(self.plans) + 1), params=progress.params)
        states = {}
        for number, plan in enumerate(self.plans):
            before, after = progress.states[plan.name]
            here, there = (context.replace(key=part_key(context.key, 2 * number + i)) for i in (1, 2))
            before = finish(plan.before, before, ready, here)
            states[plan.name] = before, finish(plan.after, after, rollouts[plan.name], there)
        return finish(self.shared, progress.shared, ready, context), states


def _keeps_finite(progress: _Progress) -> bool:
    return any(may_skip(opt_state) for opt_state in progress.opt_states.values())


def run_every(phase: PhaseLoop, every: int, state: PhaseState, ready: Batch) -> tuple[PhaseState, Metrics, Batch]:
    """Run the phase once in `every` updates; in other updates the state is unchanged, and metrics are NaN (sums: 0)."""
    if every == 1:
        return phase.run(state)

    def run(state: PhaseState) -> tuple[PhaseState, Metrics]:
        return phase.run(state)[:2]

    def skip(state: PhaseState) -> tuple[PhaseState, Metrics]:
        metrics = jax.eval_shape(run, state)[1]
        absent = jnp.array([0.0 if way == "sum" else jnp.nan for way in metrics.reductions], metrics.array.dtype)
        return state, Metrics(absent, metrics.names, metrics.reductions)

    return (*jax.lax.cond((phase.context.step + 1) % every == 0, run, skip, state), ready)


def finish(parts: tuple[Part, ...], states: tuple[Any, ...], rollout: Batch, context: Context) -> tuple[Any, ...]:
    """Return the states of the parts, after calling `finish` on the rollout under the updated policy."""
    if all(part.finish is None for part in parts):
        return states
    batch = rollout.replace(current=evaluate_current(context.evaluate, context.params, rollout))
    return tuple(
        state if part.finish is None else part.finish(batch, state, context.replace(key=part_key(context.key, index)))
        for index, (part, state) in enumerate(zip(parts, states, strict=True))
    )


def part_state(state: LearnerState, pipeline: Part, name: str) -> Any:
    """Return the state of the part with that name.

    Args:
        state: the state of a learner.
        pipeline: the chain from which the learner was made.
        name: the part's `name`; "phase/name" within `phases`.

    Raises:
        KeyError: no part has that name, or several parts do.

    Example:
        >>> import jax.numpy as jnp, optax, ppo_parts as pp
        >>> stop = pp.kl_early_stop(.1, check="epoch", over="mean")
        >>> pipeline = pp.chain(pp.gae(gamma=.99, gae_lambda=.95), pp.full_batch(), pp.value_loss(), stop)
        >>> learner = pp.learner(lambda params, batch: ..., pipeline, optax.sgd(1.))
        >>> float(pp.part_state(learner.init({"w": jnp.zeros(2)}), pipeline, "kl_early_stop").total)
        0.0
    """
    shared, plans = divide(chain(pipeline))
    found = [(part.name, own) for part, own in zip(shared, state.pipeline[0], strict=True)]
    for plan in plans:
        states = state.pipeline[1] if plan.name is None else state.pipeline[1][plan.name]
        prefix = "" if plan.name is None else f"{plan.name}/"
        for parts, own in zip((plan.before, plan.after), states, strict=True):
            found += [(prefix + part.name, one) for part, one in zip(parts, own, strict=True)]
    matches = [own for called, own in found if called == name]
    if len(matches) != 1:
        there = ", ".join(called for called, _ in found)
        raise KeyError(f"{len(matches)} parts are named {name!r}; the parts are {there}")
    return matches[0]
