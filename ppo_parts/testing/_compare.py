"""`compare_update`: where an update of another program differs from a chain, and by which choice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._base.errors import ShapeError, UserError, UserTypeError, UserValueError
from .._core.chain import chain as chain_of
from .._core.chain import fold, init_parts
from .._core.gradient import reduce_loss
from .._core.moments import Moments
from .._core.optim import transformation
from .._core.phases import divide
from .._core.policy import evaluate_current, evaluate_policy
from .._core.types import Batch, Context, Part
from .._core.upstream import Estimates, Upstream
from .._parts.samplers import given_indices
from ..functional import approx_kl, importance_weights, masked_mean, next_values, segment_priorities
from ..functional._errors import did_you_mean
from ._choices import (
    CHAIN,
    CHOICES,
    NOT_CLIPPED,
    NUMBERS,
    OPTIMIZER,
    Change,
    Update,
    call,
    evaluated,
    parsed,
    read_calls,
    with_number,
)

STAGES = ("policy", "advantage", "sampler", "loss", "gradient", "optimizer")
PER_STEP = ("log_prob", "value", "reward", "terminated", "truncated", "next_value", "mask")
OF_MINIBATCH = (
    "weight", "minibatch_advantage", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "loss",
    "loss_without_entropy", "grad_norm",
)  # fmt: skip
KEYS = (
    "obs", "action", *PER_STEP, "done", "next_obs", "last_value", "last_done", "params", "behavior", "step", "indices",
    "segments", "keys", "moments", "advantage", "target", *OF_MINIBATCH, "gradient", "params_after",
)  # fmt: skip


class Difference(NamedTuple):
    """How far a quantity of the chain is from the recorded one.

    Attributes:
        stage: "policy", "advantage", "sampler", "loss", "gradient" or "optimizer".
        quantity: its key in the record.
        step: the first gradient step in which it differs; None: it has no steps, or does not differ.
        ours, recorded: the numbers that differ most.
        residual: all differences, in units of what is allowed.
    """

    stage: str
    quantity: str
    step: int | None
    ours: float
    recorded: float
    residual: np.ndarray

    @property
    def error(self) -> float:
        """The largest difference in units of what is allowed: the quantity differs if it is greater than 1."""
        return float(np.max(np.where(np.isfinite(self.residual), np.abs(self.residual), np.inf), initial=0))

    def __str__(self) -> str:
        where = "" if self.step is None else f" in gradient step {self.step}"
        return f"{self.quantity}{where}: {self.ours:.6g}, recorded {self.recorded:.6g}"


@dataclasses.dataclass(frozen=True)
class UpdateComparison:
    """The result of `compare_update`; print it.

    Attributes:
        compared: the quantities that were compared.
        first: the first one that differs; None: none does.
        changes: the changes that remove differences, in the order in which they were found.
        left: the first difference that remains after them; None: they explain the whole record.
        update: the update after these changes, as Python text; empty if the chain was no text.
        unseen: computes `no_trace`.
    """

    compared: tuple[str, ...]
    first: Difference | None
    changes: tuple[str, ...]
    left: Difference | None
    update: str
    unseen: Callable[[], tuple[str, ...]] = dataclasses.field(default=tuple, repr=False)

    @functools.cached_property
    def no_trace(self) -> tuple[str, ...]:
        """Further changes of an explained update that make no difference in this record."""
        return self.unseen()

    def __str__(self) -> str:
        lines = [f"compared: {', '.join(self.compared)}"]
        if self.first is None:
            return "\n".join([*lines, "no difference"])
        lines += [f"first difference ({self.first.stage}): {self.first}", *(f"change: {x}" for x in self.changes)]
        left = self.left and f"not explained ({self.left.stage}): {self.left}"
        lines += [left] if left else [f"leaves no trace: {x}" for x in self.no_trace]
        return "\n".join([*lines, *([] if left else ["no difference is left:", "", self.update])])


def compare_update(
    record: Mapping[str, Any] | str | Path,
    chain: str | Part = CHAIN,
    evaluate: Callable[..., Any] | None = None,
    optimizer: str | Any = OPTIMIZER,
    *,
    rtol: float = 1e-4,
) -> UpdateComparison:
    """Replay a recorded update of any program, and name the first quantity that differs from a chain's.

    Each stage is computed from what is recorded before it, so that one difference does not hide the next:

    1. policy: `log_prob` and `value` of the rollout under `behavior` or `params`;
    2. advantage: `advantage` and `target`, with a `refresh` those before the first minibatch;
    3. sampler: `weight` of each segment that was drawn by its priority;
    4. loss: `minibatch_advantage`, `policy_loss`, `value_loss`, `entropy`, `approx_kl`, `clip_fraction`, `loss`,
       `loss_without_entropy`;
    5. gradient: `gradient` and `grad_norm`, before any clip;
    6. optimizer: `params_after` each step, or after the last one.

    Where a stage differs, single changes from a table of choices are tried, and numbers such as gamma, coefficients of
    losses and the learning rate are fitted. If none explains the stage, the best is kept and the search goes on.

    Args:
        record: a dictionary of arrays, or the path of an `.npz`. Needed: `obs`, `action`, `log_prob`, `value`, `reward`
            and `terminated` (or `done`), `[T, N, ...]`; `next_value` or `next_obs`, `[T, N, ...]`, or `last_value`
            `[N]`; `params`. Optional: `truncated` and `mask` `[T, N]`; `last_done` `[N]`, `done` after the last step;
            `indices` `[E, K, M]`, the rows t * N + n of each minibatch, or `segments`, the columns n, with `weight` of
            the same shape; `keys` `[E, K, ...]`, for losses that draw; `behavior`, parameters that acted, if not
            `params`; `step`, updates before this one; `moments`, mean, variance and number of the values before this
            update; and the quantities above, those of minibatches with a leading axis of gradient steps. Trees are
            dictionaries, or keys such as `params/w`.
        chain: the chain as Python text, with numbers written out; or a part, for which no changes are tried.
        evaluate: your network, `evaluate(params, batch) -> Output`; `params` is the recorded tree.
        optimizer: the optimizer as Python text, or an optax transformation; it begins with its first state.
        rtol: numbers are equal up to this part of the largest in their array (for parameters, of the distance
            traveled in a step), and a few roundings.

    Raises:
        ValueError: the record lacks a key, or has an unknown one. TypeError: no network is given.

    Example:
        >>> import ppo_parts as pp
        >>> from ppo_parts import testing
        >>> batch, context = testing.example_batch(), testing.example_context()
        >>> fields = ("obs", "action", "reward", "terminated", "truncated", "next_value", "mask")
        >>> record = {name: getattr(batch, name) for name in fields} | {"params": context.params}
        >>> output = context.evaluate(context.params, batch)
        >>> record |= {"value": output.value, "log_prob": output.distribution.log_prob(batch.action)}
        >>> record["advantage"] = pp.functional.gae(
        ...     *(record[x] for x in ("reward", "value", "next_value", "terminated", "truncated")),
        ...     gamma=0.9, gae_lambda=0.95, mask=record["mask"],
        ... ).advantage
        >>> testing.compare_update(record, evaluate=context.evaluate).changes
        ('gae: gamma=0.9',)
    """
    if evaluate is None:
        raise UserTypeError("compare_update: give your network, evaluate=(params, batch) -> Output")
    replay = _Replay(_read(record), evaluate, rtol)
    if not (isinstance(chain, str) and isinstance(optimizer, str)):
        found = replay.differences(Update((evaluated(chain),), (evaluated(optimizer),)))
        return UpdateComparison(tuple(x.quantity for x in found), _first(found), (), _first(found), "")
    update = replay.with_sizes(Update(read_calls(chain), read_calls(optimizer)))
    found = replay.differences(update)
    explained, changes, left, unseen = _explain(replay, update, _first(found))
    return UpdateComparison(tuple(x.quantity for x in found), _first(found), changes, left, str(explained), unseen)


def _first(found: list[Difference]) -> Difference | None:
    return next((x for x in found if x.error > 1), None)


def _read(record: Any) -> dict[str, Any]:
    """Return the record with trees as nested dictionaries; raise if a key is unknown or missing."""
    found: dict[str, Any] = {}
    for key, x in (dict(np.load(record)) if isinstance(record, (str, Path)) else record).items():
        *path, last = key.split("/")
        if (name := key.partition("/")[0]) not in KEYS:
            hint = did_you_mean(name, KEYS) or f"; the keys are {', '.join(KEYS)}"
            raise UserValueError(f"compare_update: the record has the unknown key {key!r}{hint}")
        tree = found
        for each in path:
            tree = tree.setdefault(each, {})
        tree[last] = jax.tree.map(np.asarray, x)
    if "done" in found:
        found.setdefault("terminated", found.pop("done"))
    for name in ("obs", "action", "log_prob", "value", "reward", "terminated", "params"):
        if name not in found:
            what = {"terminated": "1 where step t ended the episode, [T, N]", "params": "the tree before the update"}
            raise UserValueError(f"compare_update: the record lacks {name!r}: add {what.get(name, 'it, [T, N, ...]')}")
    for name in (*PER_STEP, "advantage", "target"):
        if name in found and found[name].shape != found["reward"].shape:
            shapes = f"shape {found[name].shape}, and 'reward' {found['reward'].shape}"
            raise ShapeError(f"compare_update: {name!r} has {shapes}: both must be [T, N]")
    if not {"next_value", "next_obs", "last_value"} & found.keys():
        raise UserValueError(
            "compare_update: the record lacks the values after the steps: add 'last_value' [N], V of the observation "
            "after the last step, or, if time limits cut episodes, 'next_obs' or 'next_value' [T, N, ...]"
        )
    extra = {*OF_MINIBATCH, "gradient", "params_after"} & found.keys()
    if extra and not {"indices", "segments"} & found.keys():
        raise UserValueError(
            f"compare_update: the record has {min(extra)!r}, which is of minibatches, but lacks their rows: add "
            "'indices' [E, K, M], t * N + n of each element"
        )
    return found


class _Step(NamedTuple):
    """What the chain computes in a gradient step."""

    numbers: dict[str, Any]
    metrics: Any
    gradient: Any


@functools.lru_cache(maxsize=8)
def _compiled(evaluate: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the network, and the network with the log-probability of recorded actions, as compiled functions."""
    return jax.jit(functools.partial(evaluate_policy, evaluate)), jax.jit(functools.partial(evaluate_current, evaluate))


class _Replay:
    """The stages of a recorded update, each computed from what is recorded before it.

    JAX runs them operation by operation, which compiles nothing but the network, whatever chain is tried.
    """

    def __init__(self, record: dict[str, Any], evaluate: Callable[..., Any], rtol: float) -> None:
        self.record, self.rtol, self.params = record, rtol, jax.tree.map(jnp.asarray, record["params"])
        self.network, self.current = _compiled(evaluate)
        self.memory: dict[Any, Any] = {}  # the latest results of `_computed`
        self.estimates = functools.cache(self._estimates)
        self.axis: Literal["step", "segment"] = "segment" if "segments" in record else "step"
        indices = record.get("segments", record.get("indices"))
        self.indices: Any = None if indices is None else indices.reshape((-1, *indices.shape[-2:]))
        self.sampler: Any = None if indices is None else given_indices(indices, axis=self.axis)
        fields: Any = {x: jnp.asarray(record[x]) for x in ("obs", "action", *PER_STEP, "next_obs") if x in record}
        batch, acted = Batch(**fields), jax.tree.map(jnp.asarray, record.get("behavior", record["params"]))
        output, next_value = self.network(acted, Batch(obs=batch.obs, action=batch.action)), batch.next_value
        if next_value is None and batch.next_obs is not None:
            next_value = self.network(acted, Batch(obs=batch.next_obs, action=batch.action)).value
        elif next_value is None:
            next_value = next_values(batch.value, jnp.asarray(record["last_value"], batch.value.dtype))
        last_done = jnp.asarray(record.get("last_done", np.zeros(batch.reward.shape[1:])))
        self.batch = batch.replace(next_value=next_value, behavior=output.distribution, shared={"last_done": last_done})
        self.eps = float(jnp.finfo(batch.value.dtype).eps)
        policy = {"log_prob": output.distribution.log_prob(batch.action), "value": output.value}
        self.policy = [self._compare("policy", name, x, record[name]) for name, x in policy.items()]
        # Whether the parameters after each step are recorded, and not only those after the last one.
        after = jax.tree.leaves(record.get("params_after"))
        self.forced = bool(after) and after[0].ndim > jax.tree.leaves(self.params)[0].ndim
        if self.forced:
            behind = record["params_after"]
            self.before = jax.tree.map(lambda x, y: np.concatenate([np.asarray(x)[None], y[:-1]]), self.params, behind)
        self.steps = self._steps() if self.indices is not None else 0

    def _steps(self) -> int:
        """Return the number of recorded gradient steps, which an early stop makes smaller than that of minibatches."""
        lengths = {x: len(self.record[x]) for x in OF_MINIBATCH if x in self.record and x != "weight"}
        lengths |= {"gradient": len(jax.tree.leaves(self.record["gradient"])[0])} if "gradient" in self.record else {}
        lengths |= {"params_after": len(jax.tree.leaves(self.before)[0])} if self.forced else {}
        given = self.indices.shape[0] * self.indices.shape[1]
        if len(set(lengths.values())) > 1 or max(lengths.values(), default=0) > given:
            raise UserValueError(
                f"compare_update: the record has the rows of {given} minibatches, and {lengths} gradient steps: "
                "record each quantity once in each step"
            )
        return next(iter(lengths.values()), given)

    def with_sizes(self, update: Update) -> Update:
        old = update.find("shuffled_minibatches", "segment_minibatches")
        if old is None or self.indices is None:
            return update
        sizes: Any = dict(zip(("num_epochs", "num_minibatches"), map(str, self.indices.shape), strict=False))
        if "weight" in self.record:
            sizes |= {"segments_per_minibatch": str(self.indices.shape[2]), "alpha": "0.6", "beta": "0.4"}
        name = "prioritized_sampler" if "weight" in self.record else f"{self.axis}_minibatches"
        return update.swap(old, call(f"pp.{name.replace('step_', 'shuffled_')}", (parsed(old)[1] | sizes).items()))

    def differences(self, update: Any, upto: str = STAGES[-1], steps: int | None = None) -> list[Difference]:
        """Compare everything up to a stage; that of the optimizer in so many steps."""
        order, last = STAGES.index, upto == STAGES[-1] and "params_after" in self.record
        recorded, after_loss = {"gradient", "grad_norm"} & self.record.keys(), order(upto) > order("loss")
        grad = not self.forced or (after_loss and bool(recorded)) or (last and "gradient" not in recorded)
        minibatches = self.indices is not None and order(upto) > order("advantage")
        key = (repr(update.chain), update.rows, grad, minibatches)
        if key not in self.memory:
            self.memory = dict([*self.memory.items()][-50:]) | {key: self._computed(update, grad, minibatches)}
        found, step, every = self.memory[key]
        if not minibatches:
            return found
        after = None
        if last or not self.forced:
            every, after = self._optimized(update, step, every, steps or self.steps)
        compared = [x for x in OF_MINIBATCH if x in self.record and x in every.numbers]
        compared = [x for x in compared if order(_stage(x)) <= order(upto)]
        found = found + [self._compare_number(x, every.numbers) for x in compared]
        if "gradient" in recorded and after_loss:
            found += self._compare_trees("gradient", every.gradient)
        return found + (self._compare_trees("params_after", after) if last else [])

    def _computed(self, update: Any, grad: bool, minibatches: bool) -> tuple[list[Difference], Any, _Step | None]:
        """Return the differences before the sampler, a gradient step, and all of them if their parameters are known."""
        shared, (spec,) = divide(chain_of(*map(evaluated, update.chain)))
        context = Context(key=jax.random.key(0), step=self.record.get("step", 0), evaluate=self.network)
        parts = (*shared, *spec.before)
        rollout, found = self._prepared(parts, context.replace(params=self.params))
        if not minibatches:
            return found, None, None
        rollouts = self._refreshed(parts, spec.sampler.refresh, update.rows, context) or (lambda index: rollout)
        step = functools.partial(self._step, update, spec, rollouts, context, grad)
        states = init_parts(spec.after, self.params)
        if not self.forced:
            return found, (step, states), None
        if not jax.tree.leaves(states):  # all steps at once
            every = jax.vmap(functools.partial(step, states))(self.before, jnp.arange(self.steps))[0]
            return found, None, jax.device_get(every)
        taken = []
        for index in range(self.steps):
            each, states = step(states, _row(self.before, index), index)
            taken.append(jax.device_get(each))
        return found, None, _stacked(taken)

    def _optimized(self, update: Any, step: Any, every: _Step | None, steps: int) -> tuple[_Step, Any]:
        """Take gradient steps from the recorded parameters, or else from those after the last step."""
        parts = [transformation("compare_update", evaluated(x)) for x in update.optimizer]
        optimizer, params, taken, after = optax.chain(*parts), self.params, [], []
        opt_state, states = optimizer.init(params), step and step[1]
        for index in range(steps):
            if every is None:
                each, states = step[0](states, params, index)
                taken.append(jax.device_get(each))
            else:
                each, params = _row(every, index), _row(self.before, index)
            gradient = _row(self.record["gradient"], index) if "gradient" in self.record else each.gradient
            given = {"step": self.record.get("step", 0), "value": each.numbers["loss"], "metrics": each.metrics}
            updates, opt_state = optimizer.update(gradient, opt_state, params, **given)
            params = optax.apply_updates(params, updates)
            after.append(jax.device_get(params))
        return every or _stacked(taken), _stacked(after)

    def _prepared(self, parts: Any, context: Context) -> tuple[Batch, list[Difference]]:
        """Run the parts before the sampler; what is recorded replaces the estimates that it was compared with.

        Recorded advantages are those after the last estimator, or after all parts: whichever are closer.
        """
        makers = [i + 1 for i, x in enumerate(parts) if "advantage" in x.provides and "advantage" not in x.requires]
        recorded = {x: jnp.asarray(self.record[x]) for x in ("advantage", "target") if x in self.record}
        if recorded and not makers:
            raise UserValueError(
                f"compare_update: the record has {min(recorded)!r}, which the chain does not compute before its "
                "sampler: leave it out of the record, or add an estimator, such as gae()"
            )
        states, batch, begin, best = self._states(parts), self.batch, 0, None
        for end in (*makers[-1:], len(parts)):
            batch, _ = fold(parts[begin:end], batch, states[begin:end], context)
            begin = end
            if recorded:
                found = [self._compare("advantage", name, getattr(batch, name), x) for name, x in recorded.items()]
                if best is None or max(x.error for x in found) < max(x.error for x in best[1]):
                    best = end, found, batch.replace(**recorded)
        if best is not None:
            batch, _ = fold(parts[best[0] :], best[2], states[best[0] :], context)
        return batch.replace(metrics={}, reductions=()), self.policy + (best[1] if best else [])

    def _states(self, parts: Any) -> Any:
        """Return the first states of parts, with the recorded running moments."""

        def recorded(x: Any) -> Any:
            return Moments(*map(jnp.asarray, self.record["moments"])) if isinstance(x, Moments) else x

        states = init_parts(parts, self.params)
        given = "moments" in self.record
        return jax.tree.map(recorded, states, is_leaf=lambda x: isinstance(x, Moments)) if given else states

    def _refreshed(self, parts: Any, refresh: str, rows: str, context: Context) -> Callable[[Any], Batch] | None:
        """Return the rollout before a step, if its advantages are computed again with the policy of then."""
        if refresh == "rollout":
            return None
        if not self.forced:
            raise UserValueError(
                f"compare_update: refresh={refresh!r} evaluates the parameters before each step: add 'params_after' of "
                "each step to the record"
            )
        states = self._states(parts)

        def run(estimates: Estimates, params: Any) -> Batch:
            batch, _ = fold(parts, self.batch.replace(**estimates._asdict()), states, context.replace(params=params))
            return batch.replace(metrics={}, reductions=())

        return functools.partial(_row, jax.vmap(run)(self.estimates(refresh, rows), self.before))

    def _estimates(self, refresh: str, rows: str) -> Estimates:
        """Return what a sampler with this `refresh` knows of the rollout before each step."""
        upstream, sampler = Upstream((), (), self.network, self.batch, self.batch, False, False), self.sampler
        estimates, found = upstream.recorded_estimates(), []
        for index in range(self.steps):
            params = _row(self.before, index)
            if refresh in ("epoch", "every_epoch") and index % self.indices.shape[1] == 0:
                estimates = upstream.evaluated(params) if index or refresh == "every_epoch" else estimates
            found.append(estimates)
            if refresh == "minibatch":
                drawn = self._rows(rows, index)
                minibatch = sampler.take(self.batch, drawn, None)
                minibatch = minibatch.replace(current=self._current(params, minibatch))
                estimates = upstream.written_back(estimates, sampler, minibatch, drawn)
        return jax.tree.map(lambda *x: jnp.stack(x), *found)

    def _rows(self, rows: str, index: Any) -> Any:
        """Return the indices of a minibatch."""
        size, (time, segments) = self.indices.shape[1], self.batch.log_prob.shape[:2]
        found = jnp.asarray(self.indices)[index // size, index % size]
        return found if rows == "t * N + n" else found % time * segments + found // time

    def _current(self, params: Any, minibatch: Batch) -> Any:
        names = ("obs", "action", "next_obs", "log_prob", "value", "mask")
        return self.current(params, Batch(**{x: getattr(minibatch, x) for x in names}, axes=minibatch.axes))

    def _step(
        self, update: Any, spec: Any, rollouts: Any, context: Context, grad: bool, states: Any, params: Any, index: Any
    ) -> tuple[_Step, Any]:
        (epoch, number), rollout = divmod(index, self.indices.shape[1]), rollouts(index)
        alpha, beta = (update.number("prioritized_sampler", x) for x in ("alpha", "beta"))
        rows, weight, key = self._rows(update.rows, index), self.record.get("weight"), self.record.get("keys")
        weight = None if weight is None else jnp.asarray(weight)[epoch, number]
        minibatch = self.sampler.take(rollout, rows, weight)
        context = context.replace(epoch=epoch, minibatch=number, num_minibatches=self.indices.shape[1])
        parts = spec.after if key is None else tuple(_with_key(x, jnp.asarray(key)[epoch, number]) for x in spec.after)

        def loss(params: Any) -> Any:
            batch = minibatch.replace(current=self._current(params, minibatch))
            batch, after = fold(parts, batch, states, context.replace(params=params))
            losses, log_ratio = {x: reduce_loss(y, batch) for x, y in batch.losses.items()}, batch.current_log_ratio()
            numbers: dict[str, Any] = {x: batch.metrics[x] for x in OF_MINIBATCH if x in batch.metrics}
            total = sum(losses.values())
            numbers |= {"minibatch_advantage": batch.advantage, "loss": total}
            numbers["loss_without_entropy"] = total - losses.get("entropy", 0)
            if alpha is not None:
                probabilities = segment_priorities(rollout.advantage, alpha=alpha, mask=rollout.mask)
                numbers["weight"] = importance_weights(probabilities, rows, beta=beta)
            numbers["approx_kl"] = batch.metrics.get("early_stop_kl", masked_mean(approx_kl(log_ratio), batch.mask))
            return total, (numbers, dict(batch.metrics), after)

        if not grad:
            _, (numbers, metrics, after) = loss(params)
            return _Step(numbers, metrics, None), after
        (_, (numbers, metrics, after)), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return _Step(numbers | {"grad_norm": optax.tree.norm(gradient)}, metrics, gradient), after

    def _compare(self, stage: str, name: str, ours: Any, theirs: Any, size: float = 1.0) -> Difference:
        """Compare arrays, whose largest entry, or sum of terms of a size that cancel, says how large rounding is."""
        allowed = self.rtol * np.max(np.abs(theirs), initial=0) + 8 * self.eps * size
        return _difference(stage, name, ours, theirs, allowed, name in OF_MINIBATCH)

    def _compare_number(self, name: str, numbers: dict[str, Any]) -> Difference:
        """Compare a number of each step; a recorded `value_loss` may be the mean squared error, or half of it."""
        size, factors = 1 + np.mean(np.abs(numbers["minibatch_advantage"])), (1, 2) if name == "value_loss" else (1,)
        recorded = self.record[name].reshape(-1, self.record[name].shape[-1]) if name == "weight" else self.record[name]
        found = [self._compare(_stage(name), name, x * numbers[name], recorded, size) for x in factors]
        return min(found, key=lambda x: x.error)

    def _compare_trees(self, name: str, ours: Any) -> list[Difference]:
        """Compare gradients relative to their largest entry, and parameters relative to the distance traveled."""
        recorded, start, stage = self.record[name], jax.tree.map(lambda x: np.zeros((1,)), self.params), "gradient"
        if name == "params_after":
            start, stage = self.before if self.forced else jax.tree.map(lambda x: x[None], self.params), "optimizer"
            recorded = recorded if self.forced else jax.tree.map(lambda x: x[None], recorded)
            ours = ours if self.forced else jax.tree.map(lambda x: x[-1:], ours)
        found = []
        for (path, theirs), mine, first in zip(
            jax.tree.leaves_with_path(recorded), jax.tree.leaves(ours), jax.tree.leaves(start), strict=True
        ):
            theirs, first = theirs[: len(mine)], np.asarray(first)[: len(mine)]
            moved = np.max(np.abs(theirs - first), axis=tuple(range(1, theirs.ndim)), keepdims=True, initial=0)
            allowed = self.rtol * moved + 4 * self.eps * np.max(np.abs(first)) + np.finfo(np.float32).tiny
            label = "/".join([name, *(str(entry.key) for entry in path)])
            found.append(_difference(stage, label, mine, theirs, allowed, name == "gradient" or self.forced))
        return found


def _stage(number: str) -> str:
    return {"weight": "sampler", "grad_norm": "gradient"}.get(number, "loss")


def _with_key(part: Part, key: Any) -> Part:
    """Return a part that draws its random numbers from this key."""
    run = part.update
    return dataclasses.replace(part, update=lambda batch, state, context: run(batch, state, context.replace(key=key)))


def _row(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


def _stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def _difference(stage: str, name: str, ours: Any, theirs: Any, allowed: Any, steps: bool) -> Difference:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
        raise ShapeError(f"compare_update: {name!r} has shape {theirs.shape} in the record, expected {ours.shape}")
    residual = (ours - theirs) / allowed
    off = np.abs(np.where(np.isfinite(residual), residual, np.inf))
    differing: Any = np.flatnonzero(off.reshape(len(off), -1).max(axis=1) > 1) if steps else []
    step = int(differing[0]) if len(differing) else None
    at = np.argmax(off) if step is None else step * off[0].size + np.argmax(off[step])
    return Difference(stage, name, step, float(ours.flat[at]), float(theirs.flat[at]), residual.ravel())


class _Found(NamedTuple):
    """An update after changes, and what is left of a difference."""

    update: Update
    changes: tuple[Change, ...]
    differs: bool
    residual: np.ndarray

    @property
    def error(self) -> float:
        """The root mean square of the residual."""
        return float(np.sqrt(np.mean(np.square(self.residual))))


def _explain(
    replay: _Replay, start: Update, first: Difference | None
) -> tuple[Update, tuple[str, ...], Difference | None, Callable[[], tuple[str, ...]]]:
    """Apply the best changes, stage by stage, until nothing differs or nothing helps; leave out those without need."""

    def agrees(update: Update) -> bool:
        cheap_first: Any = (("gradient",), (STAGES[-1], 1), ())
        try:
            return all(_first(replay.differences(update, *upto)) is None for upto in cheap_first)
        except (UserError, TypeError, ValueError):
            return False

    changes: list[Change] = []
    update, left, seen = start, first, [start]
    while left is not None and left.stage != "policy":
        best = _Search(replay, left).best(update)
        if best is None or best.update in seen:
            break
        update, changes, seen = best.update, [*changes, *best.changes], [*seen, best.update]
        left = _first(replay.differences(update))
    if left is None:
        free = [*(x for x in changes if "max_" not in x.says), NOT_CLIPPED]  # a norm that no gradient exceeds is none
        if len(free) <= len(changes) and agrees(start.changed(*free)):
            changes = free
        for each in changes:
            if agrees(start.changed(*(fewer := [x for x in changes if x is not each]))):
                changes = fewer
        update = start.changed(*changes)

    def unseen() -> tuple[str, ...]:
        others = {x.says: x.edit(update) for x in CHOICES} if left is None else {}
        return tuple(says for says, x in others.items() if x not in (None, update) and agrees(x))

    return update, tuple(x.says for x in changes), left, unseen


class _Search:
    """The changes that may remove a difference: those of its stage, and of stages before it that are not recorded."""

    def __init__(self, replay: _Replay, first: Difference) -> None:
        record, stages = replay.record.keys(), [first.stage]
        if first.stage in ("loss", "gradient") and not replay.forced and first.step != 0:
            stages.append("optimizer")
        if first.stage == "gradient" or (first.stage == "optimizer" and not {"gradient", "loss"} & record):
            stages.append("loss")
        if "loss" in stages and not {"advantage", "target"} <= record:
            stages.append("advantage")
        self.replay, self.stages = replay, tuple(stages)
        # One step of an optimizer after the other, because each depends on all before it.
        self.steps = first.step + 1 if first.stage == "optimizer" and first.step is not None else None

    def best(self, update: Update) -> _Found | None:
        """Return the fewest changes that remove the difference, or else the ones that reduce it most."""
        start = self.found(update)
        tried = [self.found(update, x) for x in CHOICES if set(x.stages) & set(self.stages)]
        single = [x for x in tried if np.isfinite(x.error) and abs(x.error - start.error) > 1e-6 * start.error]
        done = [x for x in single if not x.differs]
        if not done:
            # Compare changes after numbers are fitted, to first order: numbers may make up for what a change affects.
            slopes = None if self.steps else self.slopes(start, self.numbers(update))
            errors = [self.error_after_fit(x, slopes) + 1e-6 * np.linalg.norm(x.residual) for x in (start, *single)]
            equal = np.maximum(errors[1:], 1.3 * min(errors[1:], default=0))  # then the order of the table decides
            ranked = [single[i] for i in np.argsort(equal, kind="stable")]
            fits = self.fitted(start)
            # The first order is a poor guide to advantages that are not recorded.
            hidden = [x for x in ranked if "advantage" in self.stages[1:] and "advantage" in x.changes[0].stages]
            for each in (*hidden, *ranked[:4]):
                fits += self.fitted(each) if all(x.differs for x in fits) else []
            done = [x for x in fits if not x.differs]
            best = min(fits, key=lambda x: x.error, default=start)
            if not done and hidden and best.error < 0.7 * start.error and np.linalg.norm(best.residual) < min(errors):
                return best
            if not done and ranked and min(errors) < 0.8 * errors[0]:
                return ranked[0]
            if not done and fits and fits[0].error < 0.7 * start.error:
                return fits[0]
        return min(done, key=lambda x: (len(x.changes), x.error), default=None)

    def found(self, update: Update, *changes: Change) -> _Found:
        """Return an update after changes, with what is left of the difference."""
        begin, update, residual, found = update, update.changed(*changes), np.full(1, np.inf), []
        try:
            if update is not begin or not changes:
                found = self.replay.differences(update, self.stages[0], self.steps)
        except (UserError, TypeError, ValueError):  # the change does not fit this chain or this record
            pass
        if found:
            residual = np.concatenate([x.residual for x in found])
            residual = np.where(np.isfinite(residual), residual, 1e30)
        return _Found(update, changes, not found or _first(found) is not None, residual)

    def numbers(self, update: Update) -> list[tuple[str, str]]:
        return [x for stage in self.stages for x in NUMBERS.get(stage, ()) if update.number(*x) is not None]

    def slopes(self, begin: _Found, names: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the derivatives of the residual with respect to numbers of the update."""
        slopes = []
        for name in names:
            x = begin.update.number(*name) or 0.0
            step = 1e-3 * max(x, 0.01) * (-1 if x >= _highest(name) else 1)
            moved = self.found(begin.update, with_number(name, x + step)).residual
            slopes.append((moved - begin.residual) / step if np.isfinite(moved).all() else 0 * begin.residual)
        return np.reshape(slopes, (len(names), -1)).T

    def error_after_fit(self, found: _Found, slopes: np.ndarray | None) -> float:
        """Return the error that is left after the best change of numbers, to first order."""
        if slopes is None:
            slopes = self.slopes(found, [x for x in self.numbers(found.update) if "max" not in x[1]])
        if slopes.size == 0 or len(slopes) != len(found.residual) or not np.all(np.isfinite(slopes)):
            return float(np.linalg.norm(found.residual))
        slopes = slopes / np.maximum(np.linalg.norm(slopes, axis=0), 1e-30)
        best = np.linalg.lstsq(slopes, -found.residual, rcond=1e-5)[0]
        return float(np.linalg.norm(found.residual + slopes @ best))

    def fitted(self, begin: _Found) -> list[_Found]:
        """Return the update with numbers fitted: without the norm that clips gradients and, if it must be, with it."""
        found: list[_Found] = []
        names = self.numbers(begin.update)
        for group in dict.fromkeys((tuple(x for x in names if "max" not in x[1]), tuple(names))):
            if group and all(x.differs for x in found):
                found += self._fitted(begin, group)
        return found

    def _fitted(self, begin: _Found, names: tuple[tuple[str, str], ...]) -> list[_Found]:
        """Fit numbers by least squares, with the method of Gauss and Newton, and round them to few digits."""

        def at(x: Any) -> _Found:
            return self.found(begin.update, *map(with_number, names, x))

        first = x = np.array([begin.update.number(*each) for each in names], float)
        low, high = [1e-3 if "max" in x[1] else 0.0 for x in names], [_highest(x) for x in names]
        try:
            errors: list[float] = []
            for _ in range(10):
                found, scale = at(x), np.maximum(x, 0.01)  # numbers that hardly matter stay
                errors.append(found.error)
                if errors[-1] > 0.9 * min(errors[:-2], default=np.inf):
                    break
                change = np.linalg.lstsq(self.slopes(found, names) * scale, -found.residual, rcond=1e-5)[0]
                x, old = np.clip(x + scale * change, low, high), x
                if np.all(np.abs(x - old) <= 1e-5 * np.abs(x)):
                    break
        except (ValueError, np.linalg.LinAlgError):
            return []
        x = np.where(x < 1e-9, 0, x)
        best, found, rounded = np.max(np.abs(at(x).residual)), at(x), x
        for digits in (1, 2, 3, 4, 6):
            rounded = np.array([float(f"{value:.{digits}g}") for value in x])
            found = at(rounded)
            if np.max(np.abs(found.residual)) <= max(1.0, 1.05 * best):
                break
        said = [y for y, value, old in zip(found.changes, rounded, first, strict=True) if value != old]
        return [found._replace(changes=(*begin.changes, *said))]


def _highest(number: tuple[str, str]) -> float:
    return 1.0 if number[1] in ("gamma", "gae_lambda", "beta") else np.inf
