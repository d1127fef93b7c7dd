"""The stages of a recorded update, each computed by a chain from the recorded results of earlier stages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._base.moments import Moments
from .._core.batch import Batch
from .._core.chain import chain as chain_of
from .._core.chain import fold, init_parts
from .._core.gradient import reduce_loss
from .._core.optimizer import wrap_optimizer
from .._core.part import Context, Part
from .._core.phase_state import Estimates
from .._core.phases import divide
from .._core.policy import evaluate_current, evaluate_policy
from .._parts.samplers import given_indices
from ..errors import ShapeError, UserValueError
from ..functional import approx_kl, importance_weights, masked_mean, next_values, segment_priorities
from ._calls import evaluate_text
from ._choices import Update
from ._record import OF_MINIBATCH, OF_ROLLOUT, PER_STEP, STAGE_OF, STAGES, has_no_steps


class Difference(NamedTuple):
    """The difference between a quantity of the chain and the recorded one.

    Attributes:
        stage: "policy", "advantage", "sampler", "loss", "gradient" or "optimizer".
        quantity: its key in the record.
        step: the first gradient step in which it differs, or None if it has no steps or does not differ.
        ours, recorded: the numbers that differ most.
        residual: all differences, in units of the tolerance.
    """

    stage: str
    quantity: str
    step: int | None
    ours: float
    recorded: float
    residual: np.ndarray

    @property
    def error(self) -> float:
        """Return the largest difference in units of the tolerance; the quantity differs if it is above 1."""
        return float(np.max(np.where(np.isfinite(self.residual), np.abs(self.residual), np.inf), initial=0))

    def __str__(self) -> str:
        where = "" if self.step is None else f" in gradient step {self.step}"
        return f"{self.quantity}{where}: {self.ours:.6g}, recorded {self.recorded:.6g}"


def find_first(found: list[Difference]) -> Difference | None:
    """Return the first quantity that differs."""
    return next((x for x in found if x.error > 1), None)


def compute_error(found: Iterable[Difference]) -> float:
    """Return the largest error."""
    return max((x.error for x in found), default=0.0)


NETWORK, CURRENT = (jax.jit(x, static_argnums=0) for x in (evaluate_policy, evaluate_current))
"""Compiled once for each network."""


class Replay:
    """A record, and the quantities that a chain computes from it.

    JAX runs the stages operation by operation, so only the network is compiled, whatever chain is tried.
    """

    def __init__(self, record: dict[str, Any], evaluate: Callable[..., Any], rtol: float) -> None:
        self.record, self.rtol, self.params = {**record}, rtol, jax.tree.map(jnp.asarray, record["params"])
        self.evaluate, self.current = (functools.partial(x, evaluate) for x in (NETWORK, CURRENT))
        step = record.get("step", 0)
        self.context = Context(key=jax.random.key(0), step=step, params=self.params, evaluate=self.evaluate)
        # Results that do not depend on the optimizer are computed once for each chain that is tried.
        self.run_rollout = functools.lru_cache(64)(self._run_rollout)
        self.run_minibatches = functools.lru_cache(64)(self._run_minibatches)
        self.compute_estimates = functools.cache(self._compute_estimates)
        # The rollout, and its evaluation by the policy that acted.
        fields: Any = {x: jnp.asarray(record[x]) for x in ("obs", "action", *PER_STEP, "next_obs") if x in record}
        batch, acted = Batch(**fields), jax.tree.map(jnp.asarray, record.get("behavior", record["params"]))
        output, next_value = self.evaluate(acted, Batch(obs=batch.obs, action=batch.action)), batch.next_value
        if output.value is None:
            raise UserValueError("compare_update: the network returns no value: give it the critic that was recorded")
        if next_value is None and batch.next_obs is not None:
            next_value = self.evaluate(acted, Batch(obs=batch.next_obs, action=batch.action)).value
        elif next_value is None:
            next_value = next_values(batch.value, jnp.asarray(record["last_value"], batch.value.dtype))
        last_done = jnp.asarray(record.get("last_done", np.zeros(batch.reward.shape[1:])))
        self.batch = batch.replace(next_value=next_value, behavior=output.distribution, shared={"last_done": last_done})
        self.eps = float(jnp.finfo(batch.value.dtype).eps)
        # The elements of each minibatch, [E, K, M], and the other records of each, [E * K, ...].
        axis: Literal["step", "segment"] = "segment" if "segments" in record else "step"
        indices: Any = record.get("segments", record.get("indices"))
        self.indices: Any = None if indices is None else indices.reshape((-1, *indices.shape[-2:]))
        self.sampler: Any = None if indices is None else given_indices(indices, axis=axis)
        for name in {"weight", "keys"} & record.keys():
            self.record[name] = record[name].reshape((-1, *record[name].shape[np.ndim(indices) - 1 :]))
        # The parameters before each gradient step; if those after the steps are not recorded, only the first.
        self.before = jax.tree.map(lambda x: np.asarray(x)[None], self.params)
        self.is_last = has_no_steps(record, "params_after")
        if self.is_last:
            self.record["params_after"] = jax.tree.map(lambda x: x[None], record["params_after"])
        elif "params_after" in record:
            self.before = jax.tree.map(lambda x, y: np.concatenate([x, y[:-1]]), self.before, record["params_after"])
        self.steps = len(jax.tree.leaves(self.before)[0])
        log_prob = output.distribution.log_prob(batch.action)
        self.policy = [*self._compare("log_prob", log_prob), *self._compare("value", output.value)]

    def list_compared(self, found: list[Difference]) -> tuple[str, ...]:
        """Return the quantities that were compared, and mark those compared only in the first gradient step."""
        first_alone = self.steps == 1 and self.indices is not None and self.indices[..., 0].size > 1
        cut = {*OF_MINIBATCH} - {"params_after"} if first_alone else set()
        says = " (of the first gradient step)"
        return tuple(x.quantity + says * (x.quantity.partition("/")[0] in cut) for x in found)

    def compare(self, update: Update, upto: str = STAGES[-1], steps: int | None = None) -> list[Difference]:
        """Compare all stages up to the given one; compare the optimizer in `steps` steps."""
        stages, chain = STAGES[: STAGES.index(upto) + 1], dataclasses.replace(update, optimizer=())
        found = self.policy + self.run_rollout(chain)[1]
        wanted = [x for x in OF_MINIBATCH if x in self.record and STAGE_OF[x] in stages]
        if self.indices is None or not wanted:
            return found
        ours = dict(self.run_minibatches(chain, "gradient" in stages))
        if "params_after" in wanted:
            ours["params_after"] = self._run_optimizer(update, ours, steps or self.steps)
        size = 1 + np.mean(np.abs(ours["minibatch_advantage"]))
        for name in (x for x in wanted if x in ours):
            each = [self._compare(name, ours[name], size)]
            if name == "value_loss":  # it may be recorded without the factor 1/2
                each.append(self._compare(name, 2 * ours[name], size))
            found += min(each, key=compute_error)
        return found

    def _run_rollout(self, update: Update) -> tuple[Batch, list[Difference]]:
        """Run the parts before the sampler; recorded estimates replace computed ones after the comparison.

        Recorded advantages are compared after the last estimator and after all parts; the closer result counts.
        """
        parts, _ = _divide(update)
        makers = [i + 1 for i, x in enumerate(parts) if "advantage" in x.provides and "advantage" not in x.requires]
        recorded = {x: jnp.asarray(self.record[x]) for x in ("advantage", "target") if x in self.record}
        if recorded and not makers:
            raise UserValueError(
                f"compare_update: the record has {min(recorded)!r}, which the chain does not compute before its "
                "sampler: leave it out of the record, or add an estimator, such as gae()"
            )
        states = self._init_states(parts)

        def run(batch: Batch, begin: int, end: int | None = None) -> Batch:
            return fold(parts[begin:end], batch, states[begin:end], self.context)[0]

        def compare(batch: Batch) -> list[Difference]:
            return [x for name in recorded for x in self._compare(name, getattr(batch, name))]

        end = makers[-1] if makers else len(parts)
        estimated = run(self.batch, 0, end)
        whole = run(estimated, end)
        found, of_whole = compare(estimated), compare(whole)
        if compute_error(of_whole) < compute_error(found):
            return whole.replace(**recorded), of_whole
        return run(estimated.replace(**recorded), end), found

    def _init_states(self, parts: Any) -> Any:
        """Return the initial states of parts, with the recorded running moments."""
        states = init_parts(parts, self.params)
        if "moments" not in self.record:
            return states
        moments, kind = Moments(*map(jnp.asarray, self.record["moments"])), lambda x: isinstance(x, Moments)
        return jax.tree.map(lambda x: moments if kind(x) else x, states, is_leaf=kind)

    def _run_minibatches(self, update: Update, grad: bool) -> dict[str, Any]:
        """Return the chain's results in each gradient step, computed from the recorded parameters before it."""
        states, step = self._make_step(update, grad)
        given = self.before, jnp.arange(self.steps)
        if jax.tree.leaves(states):
            return jax.device_get(jax.lax.scan(step, states, given)[1])
        return jax.device_get(jax.vmap(lambda *given: step(states, given)[1])(*given))  # all at once

    def _make_step(self, update: Update, grad: bool) -> tuple[Any, Callable[..., Any]]:
        """Return the initial states of the parts after the sampler, and a function that computes a gradient step."""
        parts, phase = _divide(update)
        rollout_of = self._make_rollouts(update, parts, phase.sampler.refresh)
        alpha, beta = (update.read_number("prioritized_sampler", x) for x in ("alpha", "beta"))
        weights, keys = (jnp.asarray(self.record[x]) if x in self.record else None for x in ("weight", "keys"))

        def step(states: Any, given: tuple[Any, Any]) -> tuple[Any, dict[str, Any]]:
            params, index = given
            epoch, number = divmod(index, self.indices.shape[1])
            rollout, rows = rollout_of(index).replace(metrics={}, reductions=()), self._select_rows(update.rows, index)
            minibatch = self.sampler.take(rollout, rows, None if weights is None else weights[index])
            context = self.context.replace(epoch=epoch, minibatch=number, num_minibatches=self.indices.shape[1])
            after = phase.after if keys is None else tuple(_fix_key(x, keys[index]) for x in phase.after)

            def compute_loss(params: Any) -> Any:
                batch = minibatch.replace(current=self._evaluate_current(params, minibatch))
                batch, new = fold(after, batch, states, context.replace(params=params))
                numbers = _collect_numbers(batch)
                return numbers["loss"], (new, numbers)

            if grad:
                (_, (new, numbers)), gradient = jax.value_and_grad(compute_loss, has_aux=True)(params)
                numbers |= {"gradient": gradient, "grad_norm": optax.tree.norm(gradient)}
            else:
                new, numbers = compute_loss(params)[1]
            if alpha is not None:
                probabilities = segment_priorities(rollout.advantage, alpha=alpha, mask=rollout.mask)
                numbers["weight"] = importance_weights(probabilities, rows, beta=beta or 0.0)
            return new, numbers

        return init_parts(phase.after, self.params), step

    def _make_rollouts(self, update: Update, parts: Any, refresh: str) -> Callable[[Any], Batch]:
        """Return a function that maps a gradient step to the rollout before it."""
        if refresh == "rollout":
            rollout = self.run_rollout(update)[0]
            return lambda index: rollout
        states = self._init_states(parts)

        def run(estimates: Estimates, params: Any) -> Batch:
            batch = self.batch.replace(**estimates._asdict())
            return fold(parts, batch, states, self.context.replace(params=params))[0]

        return functools.partial(_take_row, jax.vmap(run)(*self.compute_estimates(refresh, update.rows)))

    def _compute_estimates(self, refresh: str, rows: str) -> tuple[Estimates, Any]:
        """Return the estimates and the parameters with which parts run before each step with this `refresh`."""
        estimates, params, found = Estimates.recorded(self.batch), self.params, []
        for index in range(self.steps):
            begins = index % self.indices.shape[1] == 0
            if begins or refresh == "minibatch":  # otherwise, these parts run once per epoch
                params = _take_row(self.before, index)
            if begins and (refresh == "every_epoch" or (refresh == "epoch" and index > 0)):
                estimates = Estimates.evaluated(self.evaluate, params, self.batch)
            found.append((estimates, params))
            if refresh == "minibatch":
                drawn = self._select_rows(rows, index)
                minibatch = self.sampler.take(self.batch, drawn, None)
                minibatch = minibatch.replace(current=self._evaluate_current(params, minibatch))
                estimates = estimates.write_back(self.batch, self.sampler, minibatch, drawn)
        return jax.tree.map(lambda *x: jnp.stack(x), *found)

    def _select_rows(self, rows: str, index: Any) -> Any:
        """Return the indices of a minibatch."""
        time, segments = self.batch.log_prob.shape[:2]
        found = jnp.asarray(self.indices).reshape(-1, self.indices.shape[2])[index]
        return found if rows == "t * N + n" else found % time * segments + found // time

    def _evaluate_current(self, params: Any, minibatch: Batch) -> Any:
        names = ("obs", "action", "next_obs", "log_prob", "value", "mask")
        return self.current(params, Batch(**{x: getattr(minibatch, x) for x in names}, axes=minibatch.axes))

    def _run_optimizer(self, update: Update, ours: dict[str, Any], steps: int) -> Any:
        """Return the parameters after each of `steps` steps, computed from the recorded ones before it.

        If only the last parameters are recorded, return those after the chain's own steps, `[1, ...]`.
        """
        optimizer = optax.chain(*(wrap_optimizer("compare_update", evaluate_text(x)) for x in update.optimizer))
        params, opt_state, after = self.params, optimizer.init(self.params), []
        recorded = ours | {"gradient": self.record.get("gradient", ours["gradient"])}
        if self.is_last:
            if (refresh := _divide(update)[1].sampler.refresh) != "rollout":
                raise UserValueError(
                    f"compare_update: refresh={refresh!r} evaluates the parameters before each step: add "
                    "'params_after' of each gradient step to the record"
                )
            steps = self.indices.shape[0] * self.indices.shape[1]
            states, step = self._make_step(dataclasses.replace(update, optimizer=()), True)
        for index in range(steps):
            if self.is_last:
                states, numbers = step(states, (params, index))
            else:
                numbers, params = _take_row((recorded, self.before), index)
            given = {"step": self.context.step, "value": numbers["loss"], "metrics": numbers["metrics"]}
            updates, opt_state = optimizer.update(numbers["gradient"], opt_state, params, **given)
            params = optax.apply_updates(params, updates)
            after.append(jax.device_get(params))
        return jax.tree.map(lambda *x: np.stack(x), *after[-1:] if self.is_last else after)

    def _compare(self, name: str, ours: Any, size: Any = 1.0) -> list[Difference]:
        """Compare each leaf of a quantity.

        The tolerance is relative to the largest number (for gradients, of the step), and for parameters to the distance
        traveled in the step. Terms of a `size` may cancel and leave their rounding errors.
        """
        stage, theirs, found = STAGE_OF[name], self.record[name], []
        begin = self.before if name == "params_after" else jax.tree.map(np.zeros_like, theirs)
        has_steps = stage not in OF_ROLLOUT and not (self.is_last and name == "params_after")
        leaves = jax.tree.leaves_with_path(theirs), jax.tree.leaves(ours), jax.tree.leaves(begin)
        for (path, x), mine, first in zip(*leaves, strict=True):
            label, mine = "/".join([name, *(str(entry.key) for entry in path)]), np.asarray(mine, np.float64)
            x, first = np.asarray(x[: len(mine)], np.float64), first[: len(mine)]
            if stage in OF_ROLLOUT and self.batch.mask is not None and mine.shape == x.shape:
                x = np.where(np.asarray(self.batch.mask, bool), x, mine)  # what padding holds does not matter
            if mine.shape != x.shape:
                raise ShapeError(
                    f"compare_update: {label!r} has shape {x.shape} in the record, and {mine.shape} where the network "
                    "and the chain compute it"
                )
            if name in ("gradient", "params_after"):
                far, axes = np.abs(x - first), tuple(range(1, x.ndim))
                moved = np.max(far, axis=axes, keepdims=True, initial=0, where=np.isfinite(far))
                allowed = self.rtol * moved + 4 * self.eps * np.max(np.abs(first)) + np.finfo(np.float32).tiny
            else:
                allowed = self.rtol * np.max(np.abs(x), initial=0, where=np.isfinite(x)) + 8 * self.eps * size
            residual = (mine - x) / allowed
            off = np.abs(np.where(np.isfinite(residual), residual, np.inf))
            differing: Any = np.flatnonzero(off.reshape(len(off), -1).max(axis=1) > 1) if has_steps else []
            step = int(differing[0]) if len(differing) else None
            at = np.argmax(off) if step is None else step * off[0].size + np.argmax(off[step])
            found.append(Difference(stage, label, step, float(mine.flat[at]), float(x.flat[at]), residual.ravel()))
        return found


def _divide(update: Update) -> tuple[tuple[Part, ...], Any]:
    """Return the parts before the sampler, and the phase of the chain."""
    shared, (phase, *others) = divide(chain_of(*map(evaluate_text, update.chain)))
    if others:
        raise UserValueError("compare_update: the chain has several phases: record and compare each as its own update")
    return (*shared, *phase.before), phase


def _collect_numbers(batch: Batch) -> dict[str, Any]:
    """Return the quantities of a minibatch after the parts of the chain, and its metrics."""
    losses = {x: reduce_loss(y, batch) for x, y in batch.losses.items()}
    total = sum(losses.values())
    return {
        **{x: batch.metrics[x] for x in OF_MINIBATCH if x in batch.metrics},
        **({"policy_loss": losses["policy"]} if "policy" in losses else {}),  # after `aggregate`
        "minibatch_advantage": batch.advantage,
        "loss": total,
        "loss_without_entropy": total - losses.get("entropy", 0),
        "approx_kl": batch.metrics.get("early_stop_kl", masked_mean(approx_kl(batch.current_log_ratio()), batch.mask)),
        "metrics": dict(batch.metrics),
    }


def _fix_key(part: Part, key: Any) -> Part:
    """Return a part that draws its random numbers from the given key."""
    run = part.update
    return dataclasses.replace(part, update=lambda batch, state, context: run(batch, state, context.replace(key=key)))


def _take_row(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], tree)
