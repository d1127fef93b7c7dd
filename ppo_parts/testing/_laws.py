"""The laws of parts, as functions of a part and its inputs that return what is wrong and how to fix it."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import experimental

from .._base.trees import are_alike, is_key, to_data
from .._core.batch import Array, Batch, Current, field_at, field_axes, with_field_at
from .._core.gradient import reduce_loss
from .._core.part import Context, Divider, Part
from .._core.sampling import Sampler
from .._core.wiring import reads_field
from .._parts.samplers import given_indices
from ..functional._common import unsqueeze
from ._example import FLOATS, add_current, poison

DTYPES = (jnp.float32, jnp.bfloat16)
enable_x64: Any = getattr(jax if hasattr(jax, "enable_x64") else experimental, "enable_x64")  # noqa: B009 (typed in neither)


class Result(NamedTuple):
    """The result of a part; messages name the paths of its leaves, such as "batch.advantage"."""

    batch: Batch
    state: Any


@dataclasses.dataclass(frozen=True)
class Subject:
    """A part under test, with its inputs.

    Attributes:
        part: the part.
        batch: `batch(seed, dtype) -> Batch`, without `current`; `seen` adds it after the sampler.
        context: `context(seed, dtype) -> Context`.
        after: whether the part is after the sampler.
    """

    part: Part
    batch: Callable[..., Batch]
    context: Callable[..., Context]
    after: bool

    def inputs(self, seed: int = 0, dtype: Any = jnp.float32) -> tuple[Batch, Any, Context]:
        """Return a batch, the initial state and a context."""
        context = self.context(seed, dtype)
        return self.batch(seed, dtype), self.part.init(context.params, jax.random.key(0)), context

    def apply(self, batch: Batch, state: Any, context: Context) -> Result:
        """Run the part; this evaluates `current`, so that it depends on the batch."""
        return Result(*self.part.update(self.seen(batch, context), state, context))

    def finish(self, batch: Batch, state: Any, context: Context) -> Any:
        """Return the state after `finish` on this rollout, or None if the part has no `finish`."""
        if self.part.finish is None:
            return None
        return self.part.finish(add_current(batch, context.params, context.evaluate), state, context)

    def seen(self, batch: Batch, context: Context) -> Batch:
        """Return the batch as the part sees it."""
        return add_current(batch, context.params, context.evaluate) if self.after else batch


Law = Callable[[Subject], str | None]
"""A function that returns what is wrong and how to fix it, or None if the law holds or does not apply."""


# --- what a part declares ---------------------------------------------------------------------------------------------


def needs_what_it_requires(subject: Subject) -> str | None:
    """The part fails without a field in `requires`, which `chain` reports before it runs."""
    batch, state, context = subject.inputs()
    for field in subject.part.requires:
        lacking = with_field_at(subject.seen(batch, context), field, {} if field == "losses" else None)
        try:
            subject.part.update(lacking, state, context)
        except Exception:  # any kind, because the part may rely on the check in `chain`
            continue
        return f"it requires {field} and works without it: use it, or put it into `reads`"
    return None


def writes_what_it_provides(subject: Subject) -> str | None:
    """The part changes the fields and entries in `provides`, and otherwise only adds metrics."""
    batch, state, context = subject.inputs()
    before = subject.seen(batch, context)
    after = subject.part.update(before, state, context)[0]
    if isinstance(subject.part, Divider):  # it changes every field of steps or segments
        same = after.current.log_prob.shape == after.log_prob.shape
        return None if same else "current and log_prob of its minibatch differ in shape"
    paths = sorted({*_list_paths(before), *_list_paths(after)})
    changed = [path for path in paths if field_at(after, path) is not field_at(before, path)]
    declared = (*subject.part.provides, "metrics", "reductions")
    undeclared = [path for path in changed if not any(_is_inside(path, each) for each in declared)]
    if silent := [path for path in undeclared if not _is_kept(path, before, after)]:
        return f"it writes {', '.join(silent)} but does not declare it: add it to `provides`"
    if idle := [each for each in subject.part.provides if not any(_is_inside(path, each) for path in changed)]:
        return f"it does not write {', '.join(idle)}: remove it from `provides`"
    return None


def _is_inside(path: str, field: str) -> bool:
    """Return whether a path is a field or inside it."""
    return f"{path}.".startswith(f"{field}.")


def reads_what_it_declares(subject: Subject) -> str | None:
    """The part computes the same without fields that are neither in `requires` nor in `reads`."""
    part = subject.part
    if part.reads is None or isinstance(part, Divider):
        return None
    batch, state, context = subject.inputs()
    read = _find_reads(part, part.update, subject.seen(batch, context), state, context)
    if (finish := part.finish) is not None:
        evaluated = add_current(batch, context.params, context.evaluate)
        read += _find_reads(part, lambda *given: (given[0], finish(*given)), evaluated, state, context)
    return f"it reads {', '.join(read)} but does not declare it: add it to `reads`" if read else None


def _find_reads(part: Part, run: Callable[..., Any], batch: Batch, state: Any, context: Context) -> list[str]:
    """Return the undeclared fields without which `run(batch, state, context)` differs or raises."""
    undeclared = [path for path in _list_paths(batch) if not _may_read(part, path)]
    expected, after = run(batch, state, context)
    copied = [path for path in undeclared if _is_kept(path, batch, expected)]

    def depends_on(paths: list[str]) -> bool:
        try:
            result, other = run(_remove(batch, paths), state, context)
        except Exception:
            return True
        return bool(compare((_remove(result, copied), other), (_remove(expected, copied), after), exact=True))

    if not depends_on(undeclared):
        return []
    return [path for path in undeclared if depends_on([path])] or undeclared


def _is_kept(path: str, before: Batch, after: Batch) -> bool:
    """Return whether a part did not change a field; `jax.jit` returns a copy of it."""
    new = field_at(after, path)
    return new is field_at(before, path) or not compare(with_field_at(before, path, new), before, exact=True)


def _list_paths(batch: Batch) -> Iterable[str]:
    """List the fields of a batch, with entries of dictionaries and of the current policy one by one."""
    for field in Batch.__dataclass_fields__:
        value = getattr(batch, field)
        value = value._asdict() if isinstance(value, Current) else value
        if isinstance(value, Mapping):
            yield from (f"{field}.{name}" for name in value)
        elif value is not None:
            yield field


def _may_read(part: Part, path: str) -> bool:
    """Return whether a part declares that it reads a field, or need not because it only adds to it."""
    own = {"reductions", "axes", "shards", "stop"} | ({"log_prob"} if "losses" in part.provides else set())
    return path.partition(".")[0] in own or reads_field(part, path)


def _remove(batch: Batch, paths: Iterable[str]) -> Batch:
    """Return the batch without some of its fields or entries."""
    for path in paths:
        field, _, entry = path.partition(".")
        if isinstance(tree := getattr(batch, field), Mapping):
            batch = batch.replace(**{field: {name: x for name, x in tree.items() if name != entry}})
        else:
            batch = with_field_at(batch, path, None)
    return batch


def steps_equal_a_rollout(subject: Subject) -> str | None:
    """A part without `needs_time` computes the same on a minibatch of steps, which has no time axis."""
    part = subject.part
    if part.needs_time or part.place in ("first", "before_sampler") or isinstance(part, Divider):
        return None
    whole, *others = subject.inputs()
    steps = _cut_into_steps(whole)
    expected, actual = (subject.apply(batch, *others)[0] for batch in (whole, steps))
    for field in (*FLOATS, "losses", "extras", "metrics", "stop"):
        values, flat = getattr(expected, field), getattr(actual, field)
        values = jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])) if x.ndim > 1 else x, values)
        if wrong := compare({field: flat}, {field: values}):
            return (
                f"it computes another {field} for a minibatch of steps {steps.log_prob.shape} than for the same "
                f"steps {whole.log_prob.shape}: {wrong}; declare needs_time=True if it works along time"
            )
    return None


def _cut_into_steps(batch: Batch) -> Batch:
    """Return the batch as a minibatch of all its steps in order."""
    size = batch.log_prob.size
    sampler: Any = given_indices(np.arange(size)[None], axis="step")
    time = batch.log_prob.shape[0]
    weight = None if batch.weight is None else jnp.tile(batch.weight, time)
    losses = {name: loss.reshape(-1) for name, loss in batch.losses.items()}
    return sampler.take(batch, jnp.arange(size), weight).replace(losses=losses, metrics=batch.metrics)


def losses_are_elementwise(subject: Subject) -> str | None:
    """The losses of an `elementwise` part do not depend on other elements."""
    if not subject.part.elementwise:
        return None
    batch, state, context = subject.inputs()
    kept = np.arange(batch.log_prob.size).reshape(batch.log_prob.shape) % 2 == 0
    changed = poison(batch.replace(mask=kept), "noise").replace(mask=batch.mask)
    expected, actual = (subject.apply(given, state, context)[0].losses for given in (batch, changed))
    for name, loss in expected.items():
        if wrong := compare({name: actual[name][kept]}, {name: loss[kept]}):
            return f"its loss {name!r} of an element depends on other elements: {wrong}; leave elementwise out"
    return None


def advantages_stop_at_ends(subject: Subject) -> str | None:
    """An advantage that bootstraps depends on `next_value` at truncations, not at terminations or in later episodes."""
    part, (batch, *others) = subject.part, subject.inputs()
    if "advantage" not in part.provides or "advantage" in part.requires or batch.next_value is None:
        return None
    flags = {"mask": batch.mask, "terminated": batch.terminated, "truncated": batch.truncated}
    mask, terminated, truncated = (np.asarray(x, bool) for x in flags.values())
    ended = mask & (terminated | truncated)
    first_episode = np.cumsum(ended, axis=0) - ended == 0
    kept = mask & first_episode

    def estimate(batch: Batch) -> np.ndarray:
        advantage: Any = subject.apply(batch.replace(**flags), *others).batch.advantage
        return np.asarray(advantage, np.float64)[..., kept].ravel()

    expected = estimate(batch)
    if np.array_equal(estimate(batch.replace(next_value=batch.next_value + 1)), expected):
        return None
    changes = {
        "the steps after a termination or truncation": poison(batch.replace(mask=first_episode), "noise"),
        "next_value at terminations": batch.replace(next_value=batch.next_value + terminated),
    }
    for what, changed in changes.items():
        actual = estimate(changed)
        standardized = np.polyval(np.polyfit(expected, actual, 1), expected)  # the part may do so, over all elements
        if wrong := compare({"advantage": actual}, {"advantage": standardized}):
            remedy = "multiply next_value by 1 - terminated, and what follows by (1 - terminated) * (1 - truncated)"
            return f"its advantage before the first end of an episode depends on {what}: {wrong}; {remedy}"
    cut = truncated & ~terminated
    counts = np.any(expected.reshape(-1, kept.sum())[:, cut[kept]])  # a part may give these steps an advantage of 0
    if counts and np.array_equal(estimate(batch.replace(next_value=batch.next_value + cut)), expected):
        return "its advantage ignores next_value where a time limit cut an episode, but must bootstrap there"
    return None


def minibatches_are_of_the_rollout(subject: Subject) -> str | None:
    """The indices of a sampler's minibatches are elements of the rollout."""
    if not isinstance(subject.part, Sampler):
        return None
    batch, state, context = subject.inputs()
    batch = batch.replace(log_prob=jnp.zeros_like(batch.log_prob))  # NaN where an index is out of range
    for number in range(subject.part.num_minibatches):
        minibatch, _ = subject.apply(batch, state, context.replace(minibatch=number))
        if np.any(np.isnan(minibatch.log_prob)):
            return f"minibatch {number} has an index outside of a rollout of shape {batch.log_prob.shape}"
    return None


# --- pure functions of arrays, which keep their types -----------------------------------------------------------------


def jit_and_vmap_equal_eager(subject: Subject) -> str | None:
    """The part computes the same with `jax.jit` and `jax.vmap` as run by run without them."""
    stack = functools.partial(jax.tree.map, lambda *x: jnp.stack(x))
    inputs = [subject.inputs(seed) for seed in (0, 1)]
    expected = stack(*(subject.apply(*given) for given in inputs))
    wrong = compare(jax.jit(jax.vmap(subject.apply))(*stack(*inputs)), expected)  # compiling is slow: both at once
    return f"jit with vmap gives another result: {wrong}" if wrong else None


def inputs_are_not_mutated(subject: Subject) -> str | None:
    """The part does not write into its input arrays."""
    *given, context = subject.inputs()
    batch, state = jax.tree.map(lambda x: x if is_key(x) else np.array(x), given)
    before = copy.deepcopy((batch, state))
    subject.apply(batch, state, context)
    wrong = compare(Result(batch, state), Result(*before), exact=True)
    return f"it writes into its inputs: {wrong}; return new arrays" if wrong else None


def state_is_stable(subject: Subject) -> str | None:
    """The states from `update` and `finish`, and parameters from `amend`, keep structure, shapes and (weak) dtypes."""
    part = subject.part
    for dtype in DTYPES:
        batch, state, context = subject.inputs(0, dtype)
        for leaf in jax.tree.leaves(state):
            if isinstance(leaf, (bool, int, float)):
                return f"its state holds the Python number {leaf!r}: make it an array, as in jnp.float32(1.0)"
        results = {"update": (state, jax.eval_shape(lambda s, b=batch, c=context: subject.apply(b, s, c)[1], state))}
        if part.finish is not None:
            results["finish"] = state, jax.eval_shape(subject.finish, batch, state, context)
        if part.amend is not None:
            given = context.params, optax.adam(0.0).init(context.params), state, state, context
            results["amend"] = context.params, jax.eval_shape(part.amend, *given)[0]
        for function, (before, after) in results.items():
            if not are_alike(describe(before), describe(after)):
                what = "the parameters" if function == "amend" else "its state"
                return (
                    f"with {jnp.dtype(dtype).name} data {function} changes {what} from {describe(before)} to "
                    f"{describe(after)}, so no loop can carry it; to keep a type that is not weak, give every number a "
                    "dtype, as in jnp.float32(1.0)"
                )
    return None


def float_dtype_is_kept(subject: Subject) -> str | None:
    """Every floating array that the part returns, except metrics, has the dtype of the data, even in float64."""
    for dtype in (*DTYPES, jnp.float64):
        with enable_x64(dtype == jnp.float64):
            batch, state, context = subject.inputs(0, dtype)
            out = jax.eval_shape(lambda b, s, c=context: subject.apply(b, s, c)[0], batch, state)
        for path, leaf in jax.tree.leaves_with_path(out.replace(metrics={})):
            if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != dtype:
                says = f"with {jnp.dtype(dtype).name} data it returns {leaf.dtype} as {format_path(path)}"
                return f"{says}: convert it with .astype(batch.log_prob.dtype)"
    return None


# --- masks, and numbers that are finite -------------------------------------------------------------------------------


def no_mask_is_a_full_mask(subject: Subject) -> str | None:
    """Without a mask, the part computes the same as with a mask of ones."""
    if "mask" in subject.part.requires:
        return None
    batch, *others = subject.inputs()
    results = [subject.apply(batch.replace(mask=mask), *others) for mask in (jnp.ones_like(batch.mask), None)]
    # A sampler may add its own mask.
    wrong = compare(*(Result(out.replace(mask=None), state) for out, state in results))
    return f"a mask of ones changes the result: {wrong}" if wrong else None


def masked_elements_are_neutral(subject: Subject) -> str | None:
    """No unmasked element, metric, state or gradient depends on the content of masked elements."""
    given, state, context = subject.inputs()

    def compute_losses(current: Any, batch: Batch) -> tuple[Array, Any]:
        out, after = subject.part.update(batch.replace(current=current), state, context)
        return sum((reduce_loss(loss, out) for loss in out.losses.values()), jnp.zeros(())), (out, after)

    def compute_results(batch: Batch) -> Any:
        current = subject.seen(batch, context).current  # None before the sampler, where nothing is differentiated
        (loss, (out, after)), gradient = jax.value_and_grad(compute_losses, has_aux=True)(current, batch)
        kept = functools.partial(_keep, keep)
        found = {"batch": select_unmasked(out), "state": after, "loss": loss, "gradient": jax.tree.map(kept, gradient)}
        finished = subject.finish(batch, after, context)  # a buffer of rollouts also has masked steps
        return {**found, "finished": jax.tree.map(kept, finished)}, gradient

    keep = np.asarray(given.mask, bool)
    expected, _ = compute_results(given)
    for kind in ("noise", "nan"):
        actual, gradient = compute_results(poison(given, kind))
        if wrong := compare(actual, expected, exact=True):
            sampler = isinstance(subject.part, Divider)
            remedy = "draw with jnp.where(batch.mask, ...)" if sampler else "use masked_mean or jnp.where"
            filled = f"at masked steps all fields, flags included, were filled with {kind}"
            return f"its result depends on masked elements ({filled}): {wrong}; {remedy}"
        if kind == "noise" and any(np.any(np.asarray(x)[~keep]) for x in jax.tree.leaves(gradient)):
            return "masked elements have a gradient: apply the mask to the inputs of the loss, not to its result"
    return None


def masked_segments_do_not_count(subject: Subject) -> str | None:
    """The part computes the same without a fully masked segment, because it divides only by what counts."""
    part, (batch, state, context) = subject.part, subject.inputs()
    if isinstance(part, Divider) or batch.log_prob.shape[1] < 2:
        return None
    whole = batch.replace(mask=jnp.asarray(batch.mask).at[:, -1].set(0))

    def run(batch: Batch, state: Any, context: Context) -> Result:
        out, after = subject.apply(batch, state, context)
        return Result(out, (after, subject.finish(batch, after, context)))

    def numbers(result: Result) -> Result:
        return result._replace(batch=select_unmasked(result.batch))

    expected = run(whole, state, context)
    try:
        fewer = run(_drop_last_segment(whole), state, context)
    except (TypeError, ValueError):  # it needs this number of segments
        return None
    if expected.batch.log_prob.shape != whole.log_prob.shape or not are_alike(fewer.state, expected.state):
        return None
    wrong = compare(numbers(fewer), numbers(expected._replace(batch=_drop_last_segment(expected.batch))))
    other = part.init(context.params, jax.random.key(1)), context.replace(key=jax.random.key(1))
    if wrong is None or compare(numbers(run(whole, *other)), numbers(expected), exact=True):
        return None  # random numbers depend on the shape
    return (
        f"it computes something else without a segment that is masked: {wrong}; divide by the number of unmasked "
        "elements, as masked_mean does"
    )


def _drop_last_segment(batch: Batch) -> Batch:
    """Return the batch without its last segment."""

    def drop(x: Array, axis: int) -> Array:
        return jax.lax.slice_in_dim(x, 0, -1, axis=axis)

    fields = {name: jax.tree.map(functools.partial(drop, axis=axis), getattr(batch, name))
              for name, axis in field_axes(batch).items()}  # fmt: skip
    of_steps = batch.log_prob.shape
    losses = {name: drop(x, int(x.shape == of_steps)) if x.ndim else x for name, x in batch.losses.items()}
    return batch.replace(**fields, losses=losses)


def finite_inputs_give_finite_numbers(subject: Subject) -> str | None:
    """Metrics, and what the part writes where the mask is 1, are finite, even if a whole segment is masked."""
    out, _ = subject.apply(*subject.inputs())
    for path, x in jax.tree.leaves_with_path(select_unmasked(out)):
        if jnp.issubdtype(jnp.result_type(x), jnp.inexact) and not np.all(np.isfinite(np.asarray(x, np.float64))):
            return f"{format_path(path)} is not finite: use masked_mean, which divides by at least 1"
    return None


# --- all of them, and what they compare -------------------------------------------------------------------------------


LAWS: tuple[Law, ...] = (
    float_dtype_is_kept,
    needs_what_it_requires,
    writes_what_it_provides,
    reads_what_it_declares,
    state_is_stable,
    inputs_are_not_mutated,
    no_mask_is_a_full_mask,
    finite_inputs_give_finite_numbers,
    steps_equal_a_rollout,
    losses_are_elementwise,
    advantages_stop_at_ends,
    minibatches_are_of_the_rollout,
    masked_elements_are_neutral,
    masked_segments_do_not_count,
    jit_and_vmap_equal_eager,
)
"""The first law traces the part, which finds a Python `if`; the last one compiles, which is slow."""


def select_unmasked(batch: Batch) -> Any:
    """Return what must not depend on masked elements, with 0 in steps and segments that do not count."""
    kept = functools.partial(_keep, np.asarray(batch.mask, bool))
    steps = {field: getattr(batch, field) for field in (*FLOATS, "mask", "losses", "extras")}
    return {**jax.tree.map(kept, steps), "metrics": batch.metrics, "weight": batch.weight, "stop": batch.stop}


def _keep(keep: np.ndarray, x: Any) -> Any:
    """Return an array of steps, rollouts or segments with 0 where it is masked, and other values unchanged."""
    if np.shape(x)[: keep.ndim] == keep.shape:
        kept: Any = keep
    elif np.shape(x)[1 : 1 + keep.ndim] == keep.shape:
        kept = keep[None]
    elif np.shape(x) == keep.shape[1:]:
        kept = keep.any(axis=0)
    else:
        return x
    return np.where(unsqueeze(kept, np.ndim(x)), x, np.zeros((), x.dtype))


def compare(actual: Any, expected: Any, *, exact: bool = False) -> str | None:
    """Describe the first leaf at which two trees differ (beyond rounding unless `exact`), or return None."""
    structures: list[Any] = [jax.tree.structure(actual), jax.tree.structure(expected)]
    if structures[0] != structures[1]:
        return f"the structures differ, {structures[0]} and {structures[1]}"
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 2e-5, "atol": 1e-6}
    for (path, x), y in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        x, y = (np.asarray(to_data(z)) for z in (x, y))
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{format_path(path)} is {x.dtype}{list(x.shape)} instead of {y.dtype}{list(y.shape)}"
        wide = (x.astype(np.float64), y.astype(np.float64))
        if not np.allclose(*wide, equal_nan=True, **tolerance):
            place = np.unravel_index(np.argmax(~np.isclose(*wide, equal_nan=True, **tolerance)), x.shape)
            index = tuple(map(int, place))
            return f"{format_path(path)} is {wide[0][place]:.6g} instead of {wide[1][place]:.6g} at index {index}"
    return None


def describe(tree: Any) -> Any:
    return jax.tree.map(lambda x: f"{'weak ' * x.weak_type}{x.dtype}{list(x.shape)}", jax.eval_shape(lambda: tree))


def format_path(path: Any) -> str:
    """Format the path of a leaf with dots, as in "batch.advantage"."""
    return ".".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)
