"""`compare_update`: where an update of another program differs from a chain, and by which choice."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._base.errors import UserError, UserTypeError, UserValueError
from .._core.chain import chain as chain_of
from .._core.chain import fold, init_parts
from .._core.loop import reduce_loss
from .._core.optim import transformation
from .._core.phases import divide
from .._core.policy import evaluate_current, evaluate_policy
from .._core.types import Batch, Context, Part
from ..functional import approx_kl, masked_mean, next_values
from ..functional._common import ShapeError
from ._choices import CHAIN, CHOICES, NUMBERS, OPTIMIZER, Update, evaluated, read_calls

STAGES = ("policy", "advantage", "loss", "gradient", "optimizer")
PER_STEP = ("log_prob", "value", "reward", "terminated", "truncated", "next_value", "mask")
OF_MINIBATCH = (
    "minibatch_advantage", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "loss", "grad_norm"
)  # fmt: skip
KEYS = (
    "obs", "action", *PER_STEP, "done", "next_obs", "last_value", "last_done", "params", "behavior", "step", "indices",
    "segments", "advantage", "target", *OF_MINIBATCH, "gradient", "params_after",
)  # fmt: skip


class Difference(NamedTuple):
    """How far a quantity of the chain is from the recorded one.

    Attributes:
        stage: "policy", "advantage", "loss", "gradient" or "optimizer".
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
    """

    compared: tuple[str, ...]
    first: Difference | None
    changes: tuple[str, ...]
    left: Difference | None
    update: str

    def __str__(self) -> str:
        lines = [f"compared: {', '.join(self.compared)}"]
        if self.first is None:
            return "\n".join([*lines, "no difference"])
        lines += [f"first difference ({self.first.stage}): {self.first}", *(f"change: {x}" for x in self.changes)]
        left = self.left and f"not explained ({self.left.stage}): {self.left}"
        return "\n".join([*lines, left or f"no difference is left:\n\n{self.update}"])


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
    2. advantage: `advantage` and `target`;
    3. loss: `minibatch_advantage`, `policy_loss`, `value_loss`, `entropy`, `approx_kl`, `clip_fraction`, `loss`;
    4. gradient: `gradient` and `grad_norm`, before any clip;
    5. optimizer: `params_after` each step, or after the last one.

    Where a stage differs, single changes from a table of choices are tried, and numbers such as gamma, coefficients of
    losses and the learning rate are fitted. If none explains the stage, the best is kept and the search goes on.

    Args:
        record: a dictionary of arrays, or the path of an `.npz`. Needed: `obs`, `action`, `log_prob`, `value`, `reward`
            and `terminated` (or `done`), `[T, N, ...]`; `next_value` or `next_obs`, `[T, N, ...]`, or `last_value`
            `[N]`; `params`. Optional: `truncated` and `mask` `[T, N]`; `last_done` `[N]`, `done` after the last step;
            `indices` `[E, K, M]`, the rows t * N + n of each minibatch, or `segments`, the columns n; `behavior`,
            parameters that acted, if not `params`; `step`, updates before this one; and the quantities above, those
            of minibatches with a leading axis of gradient steps. Trees are dictionaries, or keys such as `params/w`.
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
        made: Any = [evaluated(x) if isinstance(x, str) else x for x in (chain, optimizer)]
        found = replay.differences(_Made(*made))
        return UpdateComparison(tuple(x.quantity for x in found), _first(found), (), _first(found), "")
    update = replay.with_sizes(Update(read_calls(chain), read_calls(optimizer)))
    found = replay.differences(update)
    explained, changes, left = _explain(replay, update, _first(found))
    return UpdateComparison(tuple(x.quantity for x in found), _first(found), changes, left, str(explained))


def _first(found: list[Difference]) -> Difference | None:
    return next((x for x in found if x.error > 1), None)


def _read(record: Any) -> dict[str, Any]:
    """Return the record with trees as nested dictionaries; raise if a key is unknown or missing."""
    found: dict[str, Any] = {}
    for key, x in (dict(np.load(record)) if isinstance(record, (str, Path)) else record).items():
        *path, last = key.split("/")
        if (name := key.partition("/")[0]) not in KEYS:
            near = difflib.get_close_matches(name, KEYS, 1)
            hint = f"is it {near[0]!r}?" if near else f"the keys are {', '.join(KEYS)}"
            raise UserValueError(f"compare_update: the record has the unknown key {key!r}; {hint}")
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


class _Made(NamedTuple):
    """An update that is given as objects, not as text."""

    chain: Any
    optimizer: Any
    rows: str = "t * N + n"


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
        self.memory: dict[Any, _Step] = {}  # the latest results of `_every_step`
        self.axis: Any = "segment" if "segments" in record else "step"
        indices = record.get("segments", record.get("indices"))
        self.indices = None if indices is None else indices.reshape((-1, *indices.shape[-2:]))
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
        assert self.indices is not None
        lengths = {x: len(self.record[x]) for x in OF_MINIBATCH if x in self.record}
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
        call = update.find("shuffled_minibatches", "segment_minibatches")
        if call is None or self.indices is None:
            return update
        epochs, minibatches = map(str, self.indices.shape[:2])
        return update.swap(call, call.changed(num_minibatches=minibatches, num_epochs=epochs))

    def differences(self, update: Any, upto: str = STAGES[-1], steps: int | None = None) -> list[Difference]:
        pipeline, optimizer = update.chain, update.optimizer
        if isinstance(update, Update):
            pipeline = chain_of(*(evaluated(str(call)) for call in update.chain))
            optimizer = optax.chain(*(evaluated(str(call)) for call in update.optimizer))
        shared, (spec,) = divide(chain_of(pipeline))
        context = Context(key=jax.random.key(0), step=jnp.asarray(self.record.get("step", 0)), evaluate=self.network)
        rollout, found = self._prepared((*shared, *spec.before), context.replace(params=self.params))
        found = self.policy + found
        if self.indices is None or STAGES.index(upto) < 2:
            return found
        last = upto == STAGES[-1] and "params_after" in self.record
        compared = STAGES.index(upto) > 2 and bool({"gradient", "grad_norm"} & self.record.keys())
        grad = compared or not self.forced or (last and "gradient" not in self.record)
        step = functools.partial(self._step, update, spec, rollout, context, grad)
        whole, after = self._run(
            update, spec, step, optimizer, grad, (steps or self.steps) if last or not self.forced else 0, context
        )
        for name in OF_MINIBATCH:
            if name in self.record and name in whole.numbers and (grad or name != "grad_norm"):
                found.append(self._compare_number(name, whole.numbers))
        if "gradient" in self.record and STAGES.index(upto) > 2:
            found += self._compare_trees("gradient", whole.gradient)
        return found + (self._compare_trees("params_after", after) if last else [])

    def _prepared(self, parts: Any, context: Context) -> tuple[Batch, list[Difference]]:
        """Run the parts before the sampler; what is recorded replaces the estimates that it was compared with.

        Recorded advantages are those after the last estimator, or after all parts: whichever are closer.
        """
        makers = [i + 1 for i, x in enumerate(parts) if "advantage" in x.provides and "advantage" not in x.requires]
        recorded = {x: jnp.asarray(self.record[x]) for x in ("advantage", "target") if x in self.record}
        states, batch, begin, best = init_parts(parts, self.params), self.batch, 0, None
        for end in (*makers[-1:], len(parts)):
            batch, _ = fold(parts[begin:end], batch, states[begin:end], context)
            begin = end
            if makers and recorded:
                found = [self._compare("advantage", name, getattr(batch, name), x) for name, x in recorded.items()]
                if best is None or max(x.error for x in found) < max(x.error for x in best[1]):
                    best = end, found, batch.replace(**recorded)
        if best is not None:
            batch, _ = fold(parts[best[0] :], best[2], states[best[0] :], context)
        return batch.replace(metrics={}, reductions=()), best[1] if best else []

    def _run(
        self, update: Any, spec: Any, step: Any, optimizer: Any, grad: bool, steps: int, context: Context
    ) -> tuple[_Step, Any]:
        states, params, opt_state, whole = init_parts(spec.after, self.params), self.params, None, None
        if self.forced and not jax.tree.leaves(states):  # all steps at once
            key = (update.chain, update.rows, grad)
            if key not in self.memory:
                every = jax.vmap(functools.partial(step, states))(self.before, jnp.arange(self.steps))
                self.memory = dict([*self.memory.items()][-50:]) | {key: jax.device_get(every[0])}
            whole = self.memory[key]
        optimizer, taken, after = transformation("compare_update", optimizer), [], []
        for index in range(steps if whole else self.steps):
            row = functools.partial(jax.tree.map, lambda x, i=index: x[i])
            params = row(self.before) if self.forced else params
            each, states = (row(whole), states) if whole else step(states, params, index)
            taken.append(jax.device_get(each))
            gradient = row(self.record["gradient"]) if "gradient" in self.record else each.gradient
            if index < steps:
                opt_state = optimizer.init(params) if opt_state is None else opt_state
                given = {"step": context.step, "value": each.numbers["loss"], "metrics": each.metrics}
                updates, opt_state = optimizer.update(gradient, opt_state, params, **given)
                params = optax.apply_updates(params, updates)
                after.append(jax.device_get(params))
        return whole or _stacked(taken), _stacked(after) if after else None

    def _step(
        self, update: Any, spec: Any, rollout: Batch, context: Context, grad: bool, states: Any, params: Any, index: Any
    ) -> tuple[_Step, Any]:
        assert self.indices is not None
        size, (time, segments) = self.indices.shape[1], rollout.log_prob.shape[:2]
        rows = jnp.asarray(self.indices)[index // size, index % size]
        rows = rows if self.axis == "segment" or update.rows == "t * N + n" else rows % time * segments + rows // time
        minibatch = dataclasses.replace(spec.sampler, axis=self.axis).take(rollout, rows, None)
        context = context.replace(epoch=index // size, minibatch=index % size, num_minibatches=size)

        def loss(params: Any) -> Any:
            fields: Any = {x: getattr(minibatch, x) for x in ("obs", "action", "next_obs", "log_prob", "value", "mask")}
            batch = minibatch.replace(current=self.current(params, Batch(**fields, axes=minibatch.axes)))
            batch, after = fold(spec.after, batch, states, context.replace(params=params))
            total, log_ratio = sum(reduce_loss(x, batch) for x in batch.losses.values()), batch.current_log_ratio()
            numbers: dict[str, Any] = {x: batch.metrics[x] for x in OF_MINIBATCH if x in batch.metrics}
            numbers |= {"minibatch_advantage": batch.advantage, "loss": total}
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
        stage, size = "gradient" if name == "grad_norm" else "loss", 1 + np.mean(np.abs(numbers["minibatch_advantage"]))
        factors = (1, 2) if name == "value_loss" else (1,)
        return min(
            (self._compare(stage, name, x * numbers[name], self.record[name], size) for x in factors),
            key=lambda x: x.error,
        )

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
    at = np.argmax(
        off if step is None else np.where(np.arange(len(off)).reshape((-1,) + (1,) * (off.ndim - 1)) == step, off, -1)
    )
    return Difference(stage, name, step, float(ours.flat[at]), float(theirs.flat[at]), residual.ravel())


class _Found(NamedTuple):
    """An update after changes: whether it still differs, by how much (root mean square), and what was changed."""

    differs: bool
    error: float
    says: list[str]
    update: Update


def _explain(
    replay: _Replay, update: Update, first: Difference | None
) -> tuple[Update, tuple[str, ...], Difference | None]:
    """Apply the best changes, stage by stage, until nothing differs or nothing helps; return what still differs."""
    changes: list[str] = []
    while first is not None and first.stage != "policy" and len(changes) < 20:
        best = _Search(replay, first).best(update)
        if best is None:
            break
        update, changes = best.update, changes + best.says
        first = _first(replay.differences(update))
    if first is None and any("max_" in x for x in changes):  # a norm that no gradient exceeds is none
        free = update.swap(update.find("clip_by_global_norm", "clip_each_network"))
        if _first(replay.differences(free)) is None:
            update, changes = free, [*(x for x in changes if "max_" not in x), "the gradient is not clipped"]
    return update, tuple(changes), first


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
        start = self.found(update, [])
        single = self.changed(update, update, start)
        found = list(single)
        if all(x.differs for x in found):
            fits = self.fitted(update, update)
            found += fits
            if fits and all(x.differs or len(x.says) > 1 for x in fits):
                found += self.changed(fits[0].update, update, fits[0])
            ranked = sorted((x for x in found if x not in fits and np.isfinite(x.error)), key=lambda x: -x.error)
            best_of = sorted({x.says[0]: x for x in ranked}.values(), key=lambda x: x.error)
            for each in best_of[: None if self.steps else 5] if all(x.differs for x in found) else ():
                again = self.fitted(each.update, update)
                found += [x._replace(says=[each.says[0], *x.says]) for x in again]
        done = [x for x in found if not x.differs]
        if done:
            return min(done, key=lambda x: (len(x.says), x.error))
        for some in (single, found):  # fitted numbers may make up for a wrong choice
            best = min(some, key=lambda x: x.error, default=start)
            if best.error < 0.7 * start.error:
                return best
        return None

    def differences(self, update: Update) -> list[Difference]:
        return self.replay.differences(update, self.stages[0], self.steps)

    def found(self, update: Update, says: list[str]) -> _Found:
        """Return an update with what is left of the difference."""
        try:
            found = self.differences(update)
        except (UserError, TypeError, ValueError):  # the change does not fit this chain or this record
            return _Found(True, np.inf, says, update)
        residual = np.concatenate([x.residual for x in found])
        residual = np.where(np.isfinite(residual), residual, 1e30)
        return _Found(_first(found) is not None, float(np.sqrt(np.mean(np.square(residual)))), says, update)

    def changed(self, begin: Update, update: Update, start: _Found) -> list[_Found]:
        """Return what each single change makes of an update, if it has an effect."""
        edits = [(x.says, x.edit(begin)) for x in CHOICES if set(x.stages) & set(self.stages)]
        tried = [self.found(x, [says, *_numbers_said(begin, update)]) for says, x in edits if x not in (None, begin)]
        return [x for x in tried if abs(x.error - start.error) > 1e-6 * start.error]

    def fitted(self, begin: Update, update: Update) -> list[_Found]:
        """Return the update with numbers fitted: without the norm that clips gradients and, if it must be, with it."""
        names = [x for stage in self.stages for x in NUMBERS.get(stage, ()) if begin.number(*x) is not None]
        found: list[_Found] = []
        for group in dict.fromkeys((tuple(x for x in names if "max" not in x[1]), tuple(names))):
            if group and all(x.differs for x in found):
                found += self._fitted(begin, update, group)
        return found

    def _fitted(self, begin: Update, update: Update, names: tuple[tuple[str, str], ...]) -> list[_Found]:
        """Fit numbers by least squares, with the method of Gauss and Newton, and round them to few digits."""

        def with_numbers(x: Any) -> Update:
            changed = begin
            for (name, argument), value in zip(names, x, strict=True):
                call = changed.find(name)
                changed = changed.swap(call, call.changed(**{argument: f"{value:.12g}"})) if call else changed
            return changed

        def residual(x: Any) -> np.ndarray:
            found = self.differences(with_numbers(x))
            return np.concatenate([each.residual for each in found if each.stage == self.stages[0]])

        x = np.array([begin.number(*each) for each in names], float)
        low = np.array([1e-3 if "max" in argument else 0.0 for _, argument in names])
        high = np.array([1.0 if argument in ("gamma", "gae_lambda") else np.inf for _, argument in names])
        try:
            for _ in range(4):
                r, size = residual(x), 1e-3 * np.maximum(x, 0.01)
                size = np.where(x + size > high, -size, size)
                slopes = [(residual(x + h * e) - r) / h for h, e in zip(size, np.eye(len(x)), strict=True)]
                scale = np.maximum(x, 0.01)  # numbers that hardly matter stay
                change = scale * np.linalg.lstsq(np.stack(slopes, axis=1) * scale, -r, rcond=1e-5)[0]
                x, old = np.clip(x + change, low, high), x
                if np.all(np.abs(x - old) <= 1e-5 * np.abs(x)):
                    break
            best, rounded = np.max(np.abs(residual(x)), initial=0), x
            for digits in (1, 2, 3, 4, 6):
                rounded = np.array([float(f"{value:.{digits}g}") for value in x])
                if np.max(np.abs(residual(rounded))) <= max(1.0, 1.05 * best):
                    break
        except (UserError, ValueError, np.linalg.LinAlgError):
            return []
        made = with_numbers(rounded)
        return [self.found(made, _numbers_said(made, update))]


def _numbers_said(after: Update, before: Update) -> list[str]:
    names = [(x, after.number(*x)) for each in NUMBERS.values() for x in each]
    return [f"{x[0]}: {x[1]}={now:g}" for x, now in names if now is not None and now != before.number(*x)]
