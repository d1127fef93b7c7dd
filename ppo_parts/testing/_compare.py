"""`compare_update`: where an update of another program differs from a chain, and by which choice.

`_Replay` computes each stage from what is recorded before it. `_explain` takes the first stage that differs, tries the
table of choices, fits numbers, and continues with what is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._base.errors import ShapeError, UserError, UserTypeError, UserValueError
from .._base.moments import Moments
from .._core.batch import Batch
from .._core.chain import chain as chain_of
from .._core.chain import fold, init_parts
from .._core.gradient import reduce_loss
from .._core.optimizer import transformation
from .._core.part import Context, Part
from .._core.phase_state import Estimates
from .._core.phases import divide
from .._core.policy import evaluate_current, evaluate_policy
from .._parts.samplers import given_indices
from ..functional import approx_kl, importance_weights, masked_mean, next_values, segment_priorities
from ..functional._errors import did_you_mean
from ._choices import (
    CHAIN,
    CHOICES,
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
LOSSES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "loss", "loss_without_entropy")
OF_MINIBATCH = {
    "weight": "sampler",
    **dict.fromkeys(("minibatch_advantage", *LOSSES), "loss"),
    **dict.fromkeys(("gradient", "grad_norm"), "gradient"),
    "params_after": "optimizer",
}
"""The quantities of minibatches, each with its stage."""
KEYS = (
    "obs", "action", *PER_STEP, "done", "next_obs", "last_value", "last_done", "params", "behavior", "step", "indices",
    "segments", "keys", "moments", "advantage", "target", *OF_MINIBATCH,
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
        return "\n".join([*lines, left] if left else [*lines, "no difference is left:", "", self.update])


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
    6. optimizer: `params_after` each step, or after the last one. Without those of each step, the stages before compare
       only the first gradient step, and the parameters after the last one are those of the chain's own steps.

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
        return UpdateComparison(replay.compared(found), _first(found), (), _first(found), "")
    update = replay.with_sizes(Update(read_calls(chain), read_calls(optimizer)))
    found = replay.differences(update)
    explained, changes, left = _explain(replay, update, _first(found))
    return UpdateComparison(replay.compared(found), _first(found), tuple(x.says for x in changes), left, str(explained))


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
    of_minibatches = {x for x in OF_MINIBATCH if x in found}
    if of_minibatches and not {"indices", "segments"} & found.keys():
        raise UserValueError(
            f"compare_update: the record has {min(of_minibatches)!r}, which is of minibatches, but lacks "
            "their rows: add 'indices' [E, K, M], t * N + n of each element"
        )
    without_steps = {"weight", "params_after"} if _has_no_steps(found, "params_after") else {"weight"}
    lengths = {x: len(jax.tree.leaves(found[x])[0]) for x in of_minibatches - without_steps}
    if _has_no_steps(found, "gradient"):
        raise ShapeError("compare_update: 'gradient' needs a leading axis: record it in each gradient step")
    given = int(np.prod(np.shape(found.get("segments", found.get("indices", ())))[:-1]))
    if len(set(lengths.values())) > 1 or max(lengths.values(), default=0) > given:
        raise UserValueError(
            f"compare_update: the record has the rows of {given} minibatches, and {lengths} gradient steps: "
            "record each quantity once in each step"
        )
    return found


def _has_no_steps(record: dict[str, Any], name: str) -> bool:
    """Return whether the leaves of a tree have the shapes of the parameters, without an axis of gradient steps."""
    return name in record and np.ndim(jax.tree.leaves(record[name])[0]) == np.ndim(jax.tree.leaves(record["params"])[0])


@functools.lru_cache(maxsize=16)
def _compiled(function: Callable[..., Any], evaluate: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(functools.partial(function, evaluate))


class _Replay:
    """The stages of a recorded update, each computed from what is recorded before it.

    JAX runs them operation by operation, which compiles nothing but the network, whatever chain is tried.
    """

    def __init__(self, record: dict[str, Any], evaluate: Callable[..., Any], rtol: float) -> None:
        self.record, self.rtol, self.params = record, rtol, jax.tree.map(jnp.asarray, record["params"])
        self.network, self.current = (_compiled(x, evaluate) for x in (evaluate_policy, evaluate_current))
        self.context = Context(key=jax.random.key(0), step=record.get("step", 0), evaluate=self.network)
        # What does not change with the optimizer is computed once for each chain that is tried.
        self.rollout = functools.lru_cache(64)(self._rollout)
        self.minibatches = functools.lru_cache(64)(self._minibatches)
        self.estimates = functools.cache(self._estimates)
        # The rollout, and how the policy that acted evaluates it.
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
        # The elements of each minibatch, [E, K, M].
        self.axis: Literal["step", "segment"] = "segment" if "segments" in record else "step"
        indices = record.get("segments", record.get("indices"))
        self.indices: Any = None if indices is None else indices.reshape((-1, *indices.shape[-2:]))
        self.sampler: Any = None if indices is None else given_indices(indices, axis=self.axis)
        # The parameters before each gradient step; where those after it are not recorded, there is only the first.
        self.before = jax.tree.map(lambda x: np.asarray(x)[None], self.params)
        self.is_last = _has_no_steps(record, "params_after")
        if self.is_last:
            self.record = record | {"params_after": jax.tree.map(lambda x: x[None], record["params_after"])}
        elif "params_after" in record:
            self.before = jax.tree.map(lambda x, y: np.concatenate([x, y[:-1]]), self.before, record["params_after"])
        self.steps = len(jax.tree.leaves(self.before)[0])

    def compared(self, found: list[Difference]) -> tuple[str, ...]:
        """Return the quantities that were compared, and say of which only the first gradient step was."""
        several = self.indices is not None and self.indices.shape[0] * self.indices.shape[1] > 1
        first_alone = several and (self.is_last or "params_after" not in self.record)
        cut = OF_MINIBATCH.keys() - {"params_after"} if first_alone else set()
        says = " (of the first gradient step)"
        return tuple(x.quantity + says * (x.quantity.partition("/")[0] in cut) for x in found)

    def with_sizes(self, update: Update) -> Update:
        """Return the update with the recorded numbers of epochs and minibatches."""
        old = update.find("shuffled_minibatches", "segment_minibatches")
        if old is None or self.indices is None:
            return update
        epochs, minibatches, size = self.indices.shape
        arguments = parsed(old)[1] | {"num_epochs": epochs, "num_minibatches": minibatches}
        name = "pp.shuffled_minibatches" if self.axis == "step" else "pp.segment_minibatches"
        if "weight" in self.record:
            name = "pp.prioritized_sampler"
            arguments |= {"segments_per_minibatch": size, "alpha": 0.6, "beta": 0.4}
        return update.swap(old, call(name, arguments.items()))

    def differences(self, update: Update, upto: str = STAGES[-1], steps: int | None = None) -> list[Difference]:
        """Compare everything up to a stage; that of the optimizer in so many steps."""
        stages, chain = STAGES[: STAGES.index(upto) + 1], dataclasses.replace(update, optimizer=())
        found = self.policy + self.rollout(chain)[1]
        wanted = [x for x, stage in OF_MINIBATCH.items() if x in self.record and stage in stages]
        if self.indices is None or not wanted:
            return found
        ours = dict(self.minibatches(chain, "gradient" in stages))
        if "params_after" in wanted:
            ours["params_after"] = self._params_after(update, ours, steps or self.steps)
        for name in wanted:
            if name in ("gradient", "params_after"):
                found += self._compare_trees(name, ours[name])
            elif name in ours:
                found.append(self._compare_number(name, ours))
        return found

    def _rollout(self, update: Update) -> tuple[Batch, list[Difference]]:
        """Run the parts before the sampler; what is recorded replaces the estimates that it was compared with.

        Recorded advantages are those after the last estimator, or after all parts: whichever are closer.
        """
        parts, _ = _divided(update)
        makers = [i + 1 for i, x in enumerate(parts) if "advantage" in x.provides and "advantage" not in x.requires]
        recorded = {x: jnp.asarray(self.record[x]) for x in ("advantage", "target") if x in self.record}
        if recorded and not makers:
            raise UserValueError(
                f"compare_update: the record has {min(recorded)!r}, which the chain does not compute before its "
                "sampler: leave it out of the record, or add an estimator, such as gae()"
            )
        states, context = self._states(parts), self.context.replace(params=self.params)

        def run(batch: Batch, begin: int, end: int | None = None) -> Batch:
            return fold(parts[begin:end], batch, states[begin:end], context)[0]

        def compared(batch: Batch) -> list[Difference]:
            return [self._compare("advantage", name, getattr(batch, name), x) for name, x in recorded.items()]

        end = makers[-1] if makers else len(parts)
        estimated = run(self.batch, 0, end)
        whole = run(estimated, end)
        found = compared(estimated)
        if _worst(of_whole := compared(whole)) < _worst(found):
            return _without_metrics(whole.replace(**recorded)), of_whole
        return _without_metrics(run(estimated.replace(**recorded), end)), found

    def _states(self, parts: Any) -> Any:
        """Return the first states of parts, with the recorded running moments."""

        def is_moments(x: Any) -> bool:
            return isinstance(x, Moments)

        states = init_parts(parts, self.params)
        if "moments" not in self.record:
            return states
        moments = Moments(*map(jnp.asarray, self.record["moments"]))
        return jax.tree.map(lambda x: moments if is_moments(x) else x, states, is_leaf=is_moments)

    def _minibatches(self, update: Update, grad: bool) -> dict[str, Any]:
        """Return what the chain computes in each gradient step, from the recorded parameters before it."""
        states, step = self._step_of(update, grad)
        given = self.before, jnp.arange(self.steps)
        if jax.tree.leaves(states):
            return jax.device_get(jax.lax.scan(step, states, given)[1])
        return jax.device_get(jax.vmap(lambda *given: step(states, given)[1])(*given))  # all at once

    def _step_of(self, update: Update, grad: bool) -> tuple[Any, Callable[..., Any]]:
        """Return the first states of the parts after the sampler, and what the chain computes in a gradient step."""
        parts, phase = _divided(update)
        rollout_of = self._rollouts(update, parts, phase.sampler.refresh)
        alpha, beta = (update.number("prioritized_sampler", x) for x in ("alpha", "beta"))

        def recorded(name: str, epoch: Any, number: Any) -> Any:
            return jnp.asarray(self.record[name])[epoch, number] if name in self.record else None

        def step(states: Any, given: tuple[Any, Any]) -> tuple[Any, dict[str, Any]]:
            params, index = given
            epoch, number = divmod(index, self.indices.shape[1])
            rollout, rows, key = rollout_of(index), self._rows(update.rows, index), recorded("keys", epoch, number)
            minibatch = self.sampler.take(rollout, rows, recorded("weight", epoch, number))
            context = self.context.replace(epoch=epoch, minibatch=number, num_minibatches=self.indices.shape[1])
            after = phase.after if key is None else tuple(_with_key(x, key) for x in phase.after)

            def loss(params: Any) -> Any:
                batch = minibatch.replace(current=self._current(params, minibatch))
                batch, new = fold(after, batch, states, context.replace(params=params))
                numbers = _numbers_of(batch)
                return numbers["loss"], (new, numbers)

            if grad:
                (_, (new, numbers)), gradient = jax.value_and_grad(loss, has_aux=True)(params)
                numbers |= {"gradient": gradient, "grad_norm": optax.tree.norm(gradient)}
            else:
                new, numbers = loss(params)[1]
            if alpha is not None:
                probabilities = segment_priorities(rollout.advantage, alpha=alpha, mask=rollout.mask)
                numbers["weight"] = importance_weights(probabilities, rows, beta=beta or 0.0)
            return new, numbers

        return init_parts(phase.after, self.params), step

    def _rollouts(self, update: Update, parts: Any, refresh: str) -> Callable[[Any], Batch]:
        """Return the function of a gradient step that returns the rollout before it."""
        if refresh == "rollout":
            rollout = self.rollout(update)[0]
            return lambda index: rollout
        states = self._states(parts)

        def run(estimates: Estimates, params: Any) -> Batch:
            batch = self.batch.replace(**estimates._asdict())
            return _without_metrics(fold(parts, batch, states, self.context.replace(params=params))[0])

        return functools.partial(_row, jax.vmap(run)(self.estimates(refresh, update.rows), self.before))

    def _estimates(self, refresh: str, rows: str) -> Estimates:
        """Return what a sampler with this `refresh` knows of the rollout before each step."""
        estimates, sampler, found = Estimates.recorded(self.batch), self.sampler, []
        for index in range(self.steps):
            params = _row(self.before, index)
            evaluates = refresh == "every_epoch" or (refresh == "epoch" and index > 0)
            if evaluates and index % self.indices.shape[1] == 0:
                estimates = Estimates.evaluated(self.network, params, self.batch)
            found.append(estimates)
            if refresh == "minibatch":
                drawn = self._rows(rows, index)
                minibatch = sampler.take(self.batch, drawn, None)
                minibatch = minibatch.replace(current=self._current(params, minibatch))
                estimates = estimates.written_back(self.batch, sampler, minibatch, drawn)
        return jax.tree.map(lambda *x: jnp.stack(x), *found)

    def _rows(self, rows: str, index: Any) -> Any:
        """Return the indices of a minibatch."""
        size, (time, segments) = self.indices.shape[1], self.batch.log_prob.shape[:2]
        found = jnp.asarray(self.indices)[index // size, index % size]
        return found if rows == "t * N + n" else found % time * segments + found // time

    def _current(self, params: Any, minibatch: Batch) -> Any:
        names = ("obs", "action", "next_obs", "log_prob", "value", "mask")
        return self.current(params, Batch(**{x: getattr(minibatch, x) for x in names}, axes=minibatch.axes))

    def _params_after(self, update: Update, ours: dict[str, Any], steps: int) -> Any:
        """Return the parameters after each of so many steps, from those recorded before it.

        Where only the last ones are recorded, they are those of the chain's own steps, `[1, ...]`.
        """
        optimizer = optax.chain(*(transformation("compare_update", evaluated(x)) for x in update.optimizer))
        params, opt_state, after = self.params, optimizer.init(self.params), []
        if self.is_last:
            if (refresh := _divided(update)[1].sampler.refresh) != "rollout":
                raise UserValueError(
                    f"compare_update: refresh={refresh!r} evaluates the parameters before each step: add "
                    "'params_after' of each gradient step to the record"
                )
            steps = self.indices.shape[0] * self.indices.shape[1]
            states, step = self._step_of(dataclasses.replace(update, optimizer=()), True)
        else:
            recorded = ours | {"gradient": self.record.get("gradient", ours["gradient"])}
        for index in range(steps):
            if self.is_last:
                states, numbers = step(states, (params, index))
            else:
                numbers, params = _row((recorded, self.before), index)
            given = {"step": self.context.step, "value": numbers["loss"], "metrics": numbers["metrics"]}
            updates, opt_state = optimizer.update(numbers["gradient"], opt_state, params, **given)
            params = optax.apply_updates(params, updates)
            after.append(jax.device_get(params))
        return jax.tree.map(lambda *x: np.stack(x), *after[-1:] if self.is_last else after)

    def _compare(self, stage: str, name: str, ours: Any, theirs: Any, size: float = 1.0) -> Difference:
        """Compare arrays, whose largest entry, or sum of terms of a size that cancel, says how large rounding is."""
        allowed = self.rtol * np.max(np.abs(theirs), initial=0) + 8 * self.eps * size
        return _difference(stage, name, ours, theirs, allowed)

    def _compare_number(self, name: str, ours: dict[str, Any]) -> Difference:
        """Compare a number of each step; a recorded `value_loss` may be the mean squared error, or half of it."""
        size, factors = 1 + np.mean(np.abs(ours["minibatch_advantage"])), (1, 2) if name == "value_loss" else (1,)
        recorded = self.record[name].reshape(-1, self.record[name].shape[-1]) if name == "weight" else self.record[name]
        found = [self._compare(OF_MINIBATCH[name], name, x * ours[name], recorded[: self.steps], size) for x in factors]
        return min(found, key=lambda x: x.error)

    def _compare_trees(self, name: str, ours: Any) -> list[Difference]:
        """Compare gradients relative to their largest entry, and parameters relative to the distance traveled."""
        start = self.before if name == "params_after" else jax.tree.map(lambda x: 0 * x, self.before)
        found = []
        for (path, theirs), mine, first in zip(
            jax.tree.leaves_with_path(self.record[name]), jax.tree.leaves(ours), jax.tree.leaves(start), strict=True
        ):
            theirs, first = theirs[: len(mine)], first[: len(mine)]
            moved = np.max(np.abs(theirs - first), axis=tuple(range(1, theirs.ndim)), keepdims=True, initial=0)
            allowed = self.rtol * moved + 4 * self.eps * np.max(np.abs(first)) + np.finfo(np.float32).tiny
            label = "/".join([name, *(str(entry.key) for entry in path)])
            one = _difference(OF_MINIBATCH[name], label, mine, theirs, allowed)
            found.append(one._replace(step=None) if name == "params_after" and self.is_last else one)
        return found


def _divided(update: Update) -> tuple[tuple[Part, ...], Any]:
    """Return the parts before the sampler, and the phase of the chain."""
    shared, (phase,) = divide(chain_of(*map(evaluated, update.chain)))
    return (*shared, *phase.before), phase


def _numbers_of(batch: Batch) -> dict[str, Any]:
    """Return the quantities of a minibatch after the parts of the chain, and its metrics."""
    losses = {x: reduce_loss(y, batch) for x, y in batch.losses.items()}
    total = sum(losses.values())
    return {
        **{x: batch.metrics[x] for x in OF_MINIBATCH if x in batch.metrics},
        "minibatch_advantage": batch.advantage,
        "loss": total,
        "loss_without_entropy": total - losses.get("entropy", 0),
        "approx_kl": batch.metrics.get("early_stop_kl", masked_mean(approx_kl(batch.current_log_ratio()), batch.mask)),
        "metrics": dict(batch.metrics),
    }


def _with_key(part: Part, key: Any) -> Part:
    """Return a part that draws its random numbers from this key."""
    run = part.update
    return dataclasses.replace(part, update=lambda batch, state, context: run(batch, state, context.replace(key=key)))


def _without_metrics(batch: Batch) -> Batch:
    return batch.replace(metrics={}, reductions=())


def _worst(found: list[Difference]) -> float:
    return max((x.error for x in found), default=0.0)


def _row(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


def _difference(stage: str, name: str, ours: Any, theirs: Any, allowed: Any) -> Difference:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
        raise ShapeError(f"compare_update: {name!r} has shape {theirs.shape} in the record, expected {ours.shape}")
    residual = (ours - theirs) / allowed
    off = np.abs(np.where(np.isfinite(residual), residual, np.inf))
    steps = stage not in STAGES[:2]
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
        return _root_mean_square(self.residual)


def _explain(
    replay: _Replay, start: Update, first: Difference | None
) -> tuple[Update, list[Change], Difference | None]:
    """Apply the best changes, stage by stage, until nothing differs or nothing helps; leave out those without need."""
    changes: list[Change] = []
    update, left, seen = start, first, [start]
    while left is not None and left.stage != "policy":
        best = _Search(replay, left).best(update)
        if best is None or best.update in seen:
            return update, changes, left
        update, changes, seen = best.update, [*changes, *best.changes], [*seen, best.update]
        left = _first(replay.differences(update))
    for each in changes if left is None else ():
        fewer = [x for x in changes if x is not each]
        with contextlib.suppress(UserError, TypeError, ValueError):  # another change may need this one
            if _first(replay.differences(start.changed(*fewer))) is None:
                changes = fewer
    return start.changed(*changes), changes, left


class _Search:
    """The changes that may remove a difference: those of its stage, and of stages before it that are not recorded."""

    def __init__(self, replay: _Replay, first: Difference) -> None:
        record, stages = replay.record.keys(), [first.stage]
        if first.stage == "gradient" or (first.stage == "optimizer" and not {"gradient", "loss"} & record):
            stages.append("loss")
        if "loss" in stages and not {"advantage", "target"} <= record:
            stages.append("advantage")
        self.replay, self.stages = replay, tuple(stages)
        # One step of an optimizer after the other, because each depends on all before it.
        self.steps = first.step + 1 if first.stage == "optimizer" and first.step is not None else None

    def best(self, update: Update) -> _Found | None:
        """Return the change that removes the difference, or else the one that, with numbers fitted, reduces it most."""
        start = self.found(update)
        tried = [self.found(update, x) for x in CHOICES if set(x.stages) & set(self.stages)]
        single = [x for x in tried if np.isfinite(x.error) and abs(x.error - start.error) > 1e-6 * start.error]
        if done := [x for x in single if not x.differs]:
            return min(done, key=lambda x: x.error)
        # Rank changes by what is left after numbers are fitted to first order: these may make up for what one affects.
        # Where two are about equal, the order of the table decides.
        errors = [self.improved(x)[1] for x in single]
        equal = np.maximum(errors, _tie_limit(errors))
        fits: list[_Found] = []
        for each in (start, *(single[i] for i in np.argsort(equal, kind="stable")[:5])):
            fits += [each, self.fitted(each)]
            if not fits[-1].differs:
                return fits[-1]
        allowed = _tie_limit([x.error for x in fits])
        return next(x for x in fits[1:] if x.error <= allowed) if allowed < start.error else None

    def found(self, update: Update, *changes: Change) -> _Found:
        """Return an update after changes, with what is left of the difference."""
        changed = update.changed(*changes)
        if changed is not update or not changes:
            with contextlib.suppress(UserError, TypeError, ValueError):  # it does not fit this chain or this record
                found = self.replay.differences(changed, self.stages[0], self.steps)
                residual = np.concatenate([x.residual for x in found])
                residual = np.where(np.isfinite(residual), residual, 1e30)
                return _Found(changed, changes, _first(found) is not None, residual)
        return _Found(changed, changes, True, np.full(1, np.inf))

    def numbers(self, update: Update) -> dict[tuple[str, str], float]:
        """Return the numbers of the update that may be fitted, by call and argument."""
        names = [x for stage in self.stages for x in NUMBERS.get(stage, ())]
        return {x: value for x in names if (value := update.number(*x)) is not None}

    def improved(self, begin: _Found) -> tuple[np.ndarray, float]:
        """Return the numbers after a step of Gauss and Newton, and the error that is left after it, to first order."""
        numbers, slopes = self.numbers(begin.update), []
        x = np.array([*numbers.values()])
        scale = np.maximum(x, 0.01)  # numbers that hardly matter stay
        for name, each in zip(numbers, scale, strict=True):
            step = -1e-3 if numbers[name] >= _highest(name) else 1e-3
            moved = self.found(begin.update, with_number(name, numbers[name] + step * each)).residual
            slopes.append((moved - begin.residual) / step if np.isfinite(moved).all() else 0 * begin.residual)
        if not slopes:
            return x, begin.error
        change = np.linalg.lstsq(np.stack(slopes, axis=1), -begin.residual, rcond=1e-5)[0]
        return x + scale * change, _root_mean_square(begin.residual + change @ np.stack(slopes))

    def fitted(self, begin: _Found) -> _Found:
        """Fit the numbers by least squares, and round them to the fewest digits with which the fit is as good."""
        first = self.numbers(begin.update)
        low, high = [1e-3 if "max" in each[1] else 0.0 for each in first], [*map(_highest, first)]

        def at(x: Any) -> _Found:
            return self.found(begin.update, *map(with_number, first, x))

        found, x, errors = begin, np.array([*first.values()]), list[float]()
        for _ in range(10):
            nearer = np.clip(self.improved(found)[0], low, high)
            after, converged = at(nearer), np.allclose(nearer, x, rtol=1e-5, atol=0)
            if not np.isfinite(after.error):  # the chain does not work with these numbers
                break
            errors.append(found.error)
            found, x = after, nearer
            if converged or found.error > 0.9 * min(errors[:-1], default=np.inf):  # two steps hardly helped
                break
        x = np.where(x < 1e-9, 0, x)
        best = np.max(np.abs(at(x).residual))
        for digits in (1, 2, 3, 4, 6):
            rounded = np.array([float(f"{value:.{digits}g}") for value in x])
            found = at(rounded)
            if np.max(np.abs(found.residual)) <= max(1.0, 1.05 * best):
                break
        said = [y for y, new, old in zip(found.changes, rounded, first.values(), strict=True) if new != old]
        return found._replace(changes=(*begin.changes, *said))


def _root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _tie_limit(errors: list[float]) -> float:
    """Return the error up to which others are about equal to the least."""
    return max(1.0, 1.3 * min(errors, default=0.0))


def _highest(number: tuple[str, str]) -> float:
    return 1.0 if number[1] in ("gamma", "gae_lambda", "beta") else np.inf
