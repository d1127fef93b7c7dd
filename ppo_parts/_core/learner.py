"""The learner, which makes a pure update function from a chain and an optax optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._base.checked import checked
from .._base.hyperparameters import check_takes
from .._base.trees import has_explicit_axes, on_automatic_mesh, varying_like, without_weak_types
from ..errors import UserTypeError, UserValueError
from ..functional._arguments import check_key
from .batch import Array, Batch, Evaluate, Output, Params, Policy
from .chain import chain, finish, fold, init_parts, part_key
from .checks import check_params, check_rollout, check_trainable, count_nonfinite, replace_masked
from .loop import GradientMetrics, PhaseLoop
from .metrics import Metrics, join_metrics, split_metrics
from .optimizer import last_finite
from .part import Context, Part
from .phase_state import PhaseState, check_and_amend, select_finite
from .phases import Phase, attach_optimizers, divide, name_states, unname_states
from .pieces import evaluate_shards
from .policy import evaluate_current
from .wiring import check_every_write_has_an_effect


class LearnerState(NamedTuple):
    """Everything that one update passes to the next.

    Attributes:
        params: the user's parameter tree.
        opt_state: the optimizer's state, or with `phases` a dict of the optimizers' states.
        pipeline: the states of the parts.
        step: int32, number of updates so far.
    """

    params: Params
    opt_state: Any
    pipeline: Any
    step: Array


class Learner(NamedTuple):
    """The result of `learner`: two pure functions.

    Attributes:
        init: `init(params, key=None) -> LearnerState`; parts use the key to draw their initial state.
        update: `update(key, state, batch) -> (LearnerState, Metrics)`; metrics are scalars.
    """

    init: Callable[..., LearnerState]
    update: Callable[[Array, LearnerState, Batch], tuple[LearnerState, Metrics]]


@checked
def learner(
    evaluate: Evaluate | Policy, pipeline: Part, optimizer: Any, *, gradient_metrics: GradientMetrics | None = None
) -> Learner:
    r"""Turn a pipeline of parts into an update that maps a rollout to new parameters and metrics.

    The parts before the sampler run on the rollout. Then, for each minibatch of each epoch, the policy is evaluated,
    the parts after the sampler run, and the optimizer takes a step with the gradient of

    .. math:: L = \sum_{\text{names}} \frac{\sum_i m_i L^{\text{name}}_i}{\max(1, \sum_i m_i)}

    Metrics are reduced over the minibatches that ran, as the part that adds them specifies (`Batch.add_metrics`; by
    default the mean). The learner adds `loss`, `grad_norm` (before the optimizer), `minibatches` (the gradient steps
    that neither a part discarded nor the optimizer skipped), `epochs` (those begun) and, if the chain can stop,
    `early_stopped` (1 if a part has asked to stop, even after the last minibatch). The metrics `nonfinite/...` count
    invalid numbers by origin: unmasked elements that are not finite, flags and traced or scheduled hyperparameters out
    of range, and minibatches whose loss or `gradient` is not finite; see `nonfinite_report` and docs/metrics.md.

    To skip non-finite gradients, wrap the optimizer in `optax.apply_if_finite`. A skipped step leaves the states of the
    parts after the sampler unchanged; the parts before it, and the `finish` of a part, keep the last finite state.

    Args:
        evaluate: a `Policy`, or `evaluate(params, batch) -> Output` (or `(distribution, value[, carry])`), from any
            network library. `batch.obs` has the leading axes of the rollout or of the minibatch; the value must have
            exactly these axes. `ppo_parts.distributions.Distribution` lists the methods of a distribution. For networks
            that need too much memory, see `microbatched`.
        pipeline: a part that contains one sampler (or `phases`), usually a `chain`.
        optimizer: an optax transformation, or with `phases` a dict of them by phase name. Its `update` receives the
            extra arguments that it accepts. `step` (updates so far, see `scale_by_update_schedule`), `value` (the
            loss), `metrics` (of the minibatch, by name) and `grad` let a learning rate adapt to a divergence or a loss.
            `value_fn(params)` (also as `obj_fn`), `grad_fn(params)` and `losses_fn(params)` (the mean losses by name)
            evaluate the minibatch at other parameters, for line searches, lbfgs, sophia, sam and `natural_gradient`.
            `optax.lookahead` raises an error, because it needs its own type of parameters.
        gradient_metrics: function `gradient -> {name: scalar}` for additional metrics of each gradient, such as
            separate norms for actor and critic.

    Returns:
        `Learner(init, update)`, two pure functions, to which jit, vmap and scan can be applied.

    Raises:
        ValueError: if there is no sampler, optimizers do not match phases, or (at the first trace) fields are missing.

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
        got, order = f"{evaluate!r}", ""
        if isinstance(evaluate, Part):
            got, order = f"the part {evaluate.name!r}", ": the order is learner(evaluate, pipeline, optimizer)"
        expected = "learner: evaluate must be a Policy or a function (params, batch) -> Output"
        raise UserTypeError(f"{expected}, got {got}{order}")
    check_takes("learner", "evaluate", evaluate, ("params", "batch"))
    if gradient_metrics is not None:
        check_takes("learner", "gradient_metrics", gradient_metrics, ("gradient",))
    shared, divided = divide(chain(pipeline))
    phases = attach_optimizers(divided, optimizer)
    check_every_write_has_an_effect(shared, [phase.parts for phase in phases])
    _check_amended_once(shared, phases)
    made = _Learner(shared, phases, evaluate, gradient_metrics or (lambda gradient: {}))
    return Learner(made.init, made.update)


@dataclasses.dataclass(frozen=True, repr=False)
class _Learner:
    """The two functions of a learner; see `learner` for the fields."""

    shared: tuple[Part, ...]
    phases: tuple[Phase, ...]
    policy: Evaluate
    gradient_metrics: GradientMetrics

    def evaluate(self, params: Params, batch: Batch) -> Output:
        return evaluate_shards(self.policy, params, batch)

    def init(self, params: Params, key: Array | None = None) -> LearnerState:
        if key is not None:
            check_key("learner.init(params, key)", "key", key)
        check_params(params)
        states, opt_states = {}, {}
        for index, phase in enumerate(self.phases):
            trained, phase_key = phase.select_trained(params), part_key(key, len(self.shared) + index + 1)
            check_trainable(trained)
            before = init_parts(phase.before, params, part_key(phase_key, 1))
            states[phase.name] = before, init_parts(phase.after, params, part_key(phase_key, 2))
            opt_states[phase.name] = phase.optimizer.init(trained)
        pipeline = init_parts(self.shared, params, key), unname_states(states, self.phases)
        opt_state = unname_states(opt_states, self.phases)
        state = LearnerState(params, opt_state, pipeline, jnp.zeros((), jnp.int32))
        # Then `update` compiles only once, and the state can be donated even if it contains the parameters twice.
        return jax.tree.map(jnp.copy, without_weak_types(state))

    def update(self, key: Array, state: LearnerState, batch: Batch) -> tuple[LearnerState, Metrics]:
        """Run the shared parts, each phase, and the `finish` of each part."""
        check_key("learner.update", "key", key)
        if not isinstance(state, LearnerState):
            raise UserTypeError(
                "learner.update(key, state, batch): state must be a LearnerState, as learner.init(params) returns it, "
                f"got {type(state).__name__}"
            )
        check_rollout(batch, self.policy)
        if has_explicit_axes(batch.log_prob):
            return on_automatic_mesh(self.update, batch.log_prob)(key, state, batch)
        # Inside `shard_map`, the rollout may differ between devices, and so may parameters trained on it. The carries
        # of the loops below must then be marked as varying from the beginning.
        key, state = varying_like((key, state), batch.log_prob)
        recorded = batch.replace(metrics={}, reductions=(), losses={}, current=None, stop=None)
        keeps_time = not all(phase.sampler.cuts_time for phase in self.phases)
        counts, recorded = count_nonfinite(replace_masked(recorded, keeps_time=keeps_time))
        context = Context(key=key, step=state.step, params=state.params, evaluate=self.evaluate)
        params, (shared, states) = state.params, state.pipeline
        opt_states, states = name_states(state.opt_state, self.phases), name_states(states, self.phases)
        keep_finite = any(last_finite(opt_state) is not None for opt_state in opt_states.values())
        metrics, stopped = [counts], jnp.zeros_like(state.step, bool)

        # The shared parts run once, for `finish` and for the phases that do not run them again.
        of_shared = context.replace(key=jax.random.fold_in(key, 0))
        prepared, new = fold(self.shared, recorded, shared, of_shared)
        new, amended, _ = check_and_amend(self.shared, prepared, shared, new, of_shared, None, keep_finite)
        if any(phase.sampler.refresh == "rollout" for phase in self.phases):
            params, shared = amended, new
            metrics.append(split_metrics(prepared)[0])

        rollouts = {}
        for index, phase in enumerate(self.phases):
            phase_key = jax.random.fold_in(key, index + 1)
            phase_context = context.replace(key=phase_key, num_minibatches=phase.sampler.num_minibatches)
            loop = PhaseLoop(
                phase, self.shared, recorded, prepared, phase_context, self.policy, self.gradient_metrics,
                policy_changed=index > 0 or phase.sampler.refresh == "every_epoch", keep_finite=keep_finite,
            )  # fmt: skip
            before, after = states[phase.name]
            begin = PhaseState(params, opt_states[phase.name], (*shared, *before), after, stopped)
            end, measured, rollouts[phase.name] = loop.run(begin) if phase.every == 1 else loop.run_if_due(begin)
            params, opt_states[phase.name] = end.params, end.opt_state
            shared, before = end.before[: len(shared)], end.before[len(shared) :]
            states[phase.name] = before, end.after
            metrics.append(measured)

        context = context.replace(key=jax.random.fold_in(key, len(self.phases) + 1), params=params)

        def finish_parts(parts: tuple[Part, ...], rollout: Batch, index: int, old: Any) -> Any:
            """Return the states after `finish`, for which the updated policy evaluates the rollout."""
            if all(part.finish is None for part in parts):
                return old
            batch = rollout.replace(current=evaluate_current(self.evaluate, params, rollout))
            new = finish(parts, batch, old, context.replace(key=jax.random.fold_in(context.key, index)))
            return select_finite(new, old) if keep_finite else new

        for index, phase in enumerate(self.phases):
            before, after = states[phase.name]
            before = finish_parts(phase.before, prepared, 2 * index + 1, before)
            run = functools.partial(finish_parts, phase.after, rollouts[phase.name], 2 * index + 2)
            states[phase.name] = before, phase.run_if_due(state.step, run, lambda kept: kept, after)
        pipeline = finish_parts(self.shared, prepared, 0, shared), unname_states(states, self.phases)
        result = LearnerState(params, unname_states(opt_states, self.phases), pipeline, state.step + 1)
        return result, join_metrics(*metrics)


def _check_amended_once(shared: tuple[Part, ...], phases: Sequence[Phase]) -> None:
    """Raise if a phase would use what a shared part prepared before another phase ran and amended it again."""
    amended = next((part.name for part in shared if part.amend is not None), None)
    again = None
    for phase in phases:
        if phase.sampler.refresh != "rollout":
            again = phase.name
        elif amended and again:
            raise UserValueError(
                f"learner: {amended} changes the parameters again in phase {again!r}, so that phase {phase.name!r} "
                f'after it, with refresh="rollout", would use old ones: give both the same refresh or swap them'
            )


@checked
def part_state(state: LearnerState, pipeline: Part, name: str) -> Any:
    """Return the state of the part with the given name.

    Args:
        state: the state of a learner.
        pipeline: the chain from which the learner was made.
        name: the part's `name`, or "phase/name" within `phases`.

    Raises:
        ValueError: if no part has that name, or if several parts have it.

    Example:
        >>> import jax.numpy as jnp, optax, ppo_parts as pp
        >>> penalty = pp.kl_penalty(coef=1., target_kl=.01)
        >>> pipeline = pp.chain(pp.gae(gamma=.99, gae_lambda=.95), pp.full_batch(), pp.value_loss(), penalty)
        >>> learner = pp.learner(lambda params, batch: ..., pipeline, optax.sgd(1.))
        >>> float(pp.part_state(learner.init({"w": jnp.zeros(2)}), pipeline, "kl_penalty").coef)
        1.0
    """
    if not isinstance(state, LearnerState):
        says = f"must be a LearnerState, got {type(state).__name__}: the order is part_state(state, pipeline, name)"
        raise UserTypeError(says, where="part_state", argument="state")
    shared, phases = divide(chain(pipeline))
    found = list(zip([part.name for part in shared], state.pipeline[0], strict=True))
    states = name_states(state.pipeline[1], phases)
    for phase in phases:
        names = [phase.prefix + part.name for part in (*phase.before, *phase.after)]
        before, after = states[phase.name]
        found += zip(names, (*before, *after), strict=True)
    matches = [own for called, own in found if called == name]
    if len(matches) != 1:
        there = ", ".join(called for called, _ in found)
        remedy = "; put one of them into within(part, name=...) to tell them apart" if matches else ""
        raise UserValueError(f"part_state: {len(matches)} parts are named {name!r}; the parts are {there}{remedy}")
    return matches[0]
