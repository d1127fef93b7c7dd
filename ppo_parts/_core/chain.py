"""`chain`, which composes parts, and functions that run the `update`, `amend` and `finish` of parts."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import optax

from .._base.hyperparameters import find_nan, spread_nan
from .._base.trees import are_alike, shapes_of
from ..errors import UserTypeError, UserValueError
from .batch import Batch, Params, field_at, kind, with_field_at
from .part import AMEND_KEY, PART_KEY, WRAPPED_KEY, Context, Divider, Part, read_numbers
from .wiring import BY_THE_LEARNER, check_batch, check_order, explain_missing, find_sampler, list_reads


@dataclasses.dataclass(frozen=True, repr=False)
class Chain(Part):
    """The result of `chain`: a `Part` with the attribute `parts` (nested chains are flattened)."""

    parts: tuple[Part, ...] = ()

    def __repr__(self) -> str:
        return describe(self.parts)


def chain(*parts: Part) -> Part:
    """Compose parts that run one after another; the result is itself a part, so chains can be nested.

    A part's position determines what it sees. Parts before the sampler see the rollout; parts after it see minibatches,
    evaluated with the policy being trained. The `update` of a chain runs each part once (the sampler draws only its
    first minibatch); `learner` runs the same chain over all minibatches and epochs. `print(chain(...))` shows the
    stages and what each part reads and writes.

    Args:
        *parts: parts, in order; nested chains are flattened. Without parts, the chain is the identity.

    Returns:
        A `Part` whose state is the tuple of its parts' states.

    Raises:
        TypeError: if an argument is not a part.
        ValueError: if there are two samplers, a loss before the sampler, `gae` or `vtrace` after a sampler that removes
            the time axis, or a part that needs a field that only a later part writes.

    Example:
        >>> import ppo_parts as pp
        >>> pp.chain(pp.shuffled_minibatches(4), pp.vtrace(gamma=.99))
        Traceback (most recent call last):
        ...
        ppo_parts.errors.UserValueError: chain: vtrace works along time, but shuffled_minibatches before it cuts the \
time axis: move vtrace before it, or use segment_minibatches()
    """
    for part in parts:
        if isinstance(part, optax.GradientTransformation):
            raise UserTypeError("chain: an optimizer is not a part: pass it to learner(evaluate, pipeline, optimizer)")
        if isinstance(part, (list, tuple)):
            raise UserTypeError(f"chain: expected parts, got a {type(part).__name__} of them: chain(*parts)")
        if hasattr(part, "trains"):
            raise UserTypeError("chain: a phase is not a part: put it into phases(name=phase(...))")
        if not isinstance(part, Part):
            name = getattr(part, "__name__", None)
            remedy = f": did you forget to call it, {name}(...)?" if name else ""
            if str(getattr(part, "__module__", "")).startswith("ppo_parts.functional"):
                remedy = f": functional.{name} takes arrays: use {name}(...) or policy_loss(functional.{name})"
            raise UserTypeError(f"chain: expected parts, got {kind(part)}{remedy}")
    flat = tuple(inner for part in parts for inner in parts_of(part))
    check_order(flat)
    return Chain(
        functools.partial(init_parts, flat),
        functools.partial(fold, flat),
        "chain",
        parts=flat,
        amend=functools.partial(amend, flat) if any(part.amend is not None for part in flat) else None,
        finish=functools.partial(finish, flat) if any(part.finish is not None for part in flat) else None,
        **_declarations(flat),
    )


def identity() -> Part:
    """The empty chain, which changes nothing: `chain(identity(), p)`, `chain(p, identity())` and `p` agree."""
    return chain()


def parts_of(part: Part) -> tuple[Part, ...]:
    """Return the parts of a chain, or the part alone."""
    return part.parts if isinstance(part, Chain) else (part,)


def check_wrapped(where: str, part: Any, expected: str) -> None:
    """Raise unless `part` is a part or a chain without a sampler."""
    if not isinstance(part, Part):
        raise UserTypeError(f"{where}: expected {expected}, got {part!r}")
    if (divides := find_sampler(parts_of(part))) is not None:
        raise UserTypeError(f"{where}: expected {expected}, got the sampler {parts_of(part)[divides].name}")


def part_key(key: Any, index: int) -> Any:
    """Return the key of part `index` of a chain, or None if there is no key.

    The first part has the key of the chain, so that `chain(p)` and `p` draw the same numbers.
    """
    return key if index == 0 or key is None else jax.random.fold_in(key, PART_KEY + index)


def inner_key(part: Part, key: Any) -> Any:
    """Return the key of a part that another part wraps.

    The parts of a wrapped chain must not get the same keys as the parts of the outer chain.
    """
    return jax.random.fold_in(key, WRAPPED_KEY) if isinstance(part, Chain) and key is not None else key


def init_parts(parts: Sequence[Part], params: Params, key: Any = None) -> tuple[Any, ...]:
    """Return the initial state of each part, made with its own key."""
    states = []
    for index, part in enumerate(parts):
        try:
            states.append(part.init(params, part_key(key, index)))
        except TypeError as error:
            if key is None and re.search(r"\bkey\b", str(error)):
                says = f"init of the part {part.name!r} needs a key: learner.init(params, key)"
                raise UserTypeError(f"{says} ({error})") from error
            raise
    return tuple(states)


def fold(parts: Sequence[Part], batch: Batch, state: tuple[Any, ...], context: Context) -> tuple[Batch, Any]:
    """Run `parts` in order, each with its own state and its own key."""
    if len(parts) != len(state):
        raise UserValueError(f"chain: {len(parts)} parts but {len(state)} states: use the state of this chain's init")
    after = []
    for index, (part, own) in enumerate(zip(parts, state, strict=True)):
        check_batch(part, batch)
        try:
            result = part.update(batch, own, context.replace(key=part_key(context.key, index)))
        except (KeyError, AttributeError, TypeError) as error:
            explain_missing(part, batch, error)
            raise
        written, new = _check_result(part, batch, result)
        _check_declared(part, batch, written)
        written = _nan_if_out_of_range(part, batch, written, context.step)
        if batch.stop is not None and written.stop is not batch.stop:
            written = written.replace(stop=batch.stop.merge(written.stop))  # a part may not withdraw a request
        batch = written
        after.append(new)
    return batch, tuple(after)


def _check_result(part: Part, given: Batch, result: Any) -> tuple[Batch, Any]:
    """Check and return the result of a part's `update`: a batch, with earlier losses and metrics, and a state.

    A part may remove the losses or metrics that it requires, and a sampler removes all of them.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserTypeError(f"{part.name}: update must return (batch, state), got {kind(result)}")
    batch, state = result
    if not isinstance(batch, Batch):
        raise UserTypeError(f"{part.name}: update must return (batch, state), its first item is {kind(batch)}")
    for field, add in (("losses", "add_loss"), ("metrics", "add_metrics")):
        lost = getattr(given, field).keys() - getattr(batch, field).keys()
        lost -= {path.removeprefix(f"{field}.") for path in part.requires}
        if lost and field not in part.requires and not isinstance(part, Divider):
            says = f"{part.name}: update removed {', '.join(sorted(lost))} from the {field} of earlier parts"
            raise UserValueError(f"{says}: add its own with batch.{add}(...), or declare requires=({field!r},)")
    if part.elementwise and batch.log_prob is not None:
        for name in sorted(batch.losses.keys() - given.losses.keys()):
            if (shape := batch.losses[name].shape) != batch.log_prob.shape:
                says = f"declares elementwise, but its loss {name!r} has shape {shape}, not one number per element"
                raise UserValueError(f"{part.name}: {says}: leave elementwise out")
    return batch, state


def _check_declared(part: Part, given: Batch, written: Batch) -> None:
    """Raise if a part after the sampler changed a field without declaring it, because no check of the chain sees this.

    A part that is compiled by itself returns a new `current`, and perhaps other new arrays, whatever it changed.
    """
    declared = {*BY_THE_LEARNER, *(path.partition(".")[0] for path in part.provides)}
    fields = [field.name for field in dataclasses.fields(Batch) if not field.metadata and field.name not in declared]
    leaves = {name: [jax.tree.leaves(getattr(batch, name)) for batch in (given, written)] for name in fields}
    changed = [name for name, (old, new) in leaves.items() if [*map(id, old)] != [*map(id, new)]]
    if given.current is not None and changed and "current" not in changed:
        says = f"{part.name}: update changed {' and '.join(changed)} without declaring it"
        raise UserValueError(f"{says}: add provides=({', '.join(map(repr, changed))},)")


def _nan_if_out_of_range(part: Part, before: Batch, after: Batch, step: Any) -> Batch:
    """Replace all that a part wrote by NaN if one of its numbers is out of range at this step, and count this.

    Comparisons and minima in a part could hide a NaN, but the learner must see it in the loss to count it.
    """
    numbers = read_numbers(part.numbers, before, step)
    if not (bad := find_nan(numbers)):
        return after
    for path in part.provides:
        if path == "losses":
            own = {name: x for name, x in after.losses.items() if before.losses.get(name) is not x}
            after = after.replace(losses={**after.losses, **spread_nan(own, *numbers.values())})
        elif path not in ("metrics", "stop"):
            after = with_field_at(after, path, spread_nan(field_at(after, path), *numbers.values()))
    # The same part may occur on both sides of the sampler, and several times on one side.
    prefix = f"nonfinite/range/{'rollout/' if before.current is None else ''}{part.name}/"
    counts = {prefix + name: x | after.metrics.get(prefix + name, False) for name, x in bad.items()}
    reductions = (*after.reductions, *((name, "sum") for name in counts))
    return after.replace(metrics={**after.metrics, **counts}, reductions=reductions)


def amend(
    parts: Sequence[Part],
    params: Params,
    opt_state: Any,
    old_state: tuple[Any, ...],
    new_state: tuple[Any, ...],
    context: Context,
) -> tuple[Params, Any]:
    """Return the parameters and the optimizer state after each part has amended them."""
    for index, (part, old, new) in enumerate(zip(parts, old_state, new_state, strict=True)):
        if part.amend is not None:
            key = jax.random.fold_in(part_key(context.key, index), AMEND_KEY)
            own = context.replace(key=key, params=params)
            result = part.amend(params, opt_state, old, new, own)
            if not isinstance(result, tuple) or len(result) != 2:
                raise UserTypeError(f"{part.name}: amend must return (params, opt_state), got {kind(result)}")
            for name, before, after in zip(("params", "opt_state"), (params, opt_state), result, strict=True):
                if not are_alike(before, after):
                    says = f"{part.name}: amend changed {name} from {shapes_of(before)} to {shapes_of(after)}"
                    raise UserTypeError(f"{says}: keep its structure, shapes and dtypes")
            params, opt_state = result
    return params, opt_state


def finish(parts: Sequence[Part], batch: Batch, state: tuple[Any, ...], context: Context) -> tuple[Any, ...]:
    """Return the states after each part has finished the update with its own key."""
    after = list(state)
    for index, part in enumerate(parts):
        if part.finish is not None:
            try:
                after[index] = part.finish(batch, state[index], context.replace(key=part_key(context.key, index)))
            except (KeyError, AttributeError, TypeError) as error:
                error.add_note(
                    f"raised by finish of the part {part.name!r}, which receives the whole rollout, as recorded unless "
                    'it follows a sampler with refresh="rollout" in a phase with every=1'
                )
                raise
    check_states("finish", parts, state, tuple(after))
    return tuple(after)


def check_states(where: str, parts: Sequence[Part], before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    """Raise if a part changed its state's structure, shapes or dtypes, because a loop could not carry the state."""
    for part, old, new in zip(parts, before, after, strict=True):
        if not are_alike(old, new):
            says = f"{part.name}: {where} changed its state from {shapes_of(old)} to {shapes_of(new)}"
            raise UserTypeError(f"{says}: keep its structure, shapes and dtypes")


def describe(parts: Sequence[Part]) -> str:
    """Describe the stages of a chain, one part per line, with the fields that each reads and writes."""
    if not parts:
        return "chain()"
    width = max(len(part.name) for part in parts) + 2
    divides, lines = find_sampler(parts), []
    for index, part in enumerate(parts):
        phases = getattr(part, "phases", {})
        if index == divides:
            stage = "phases" if phases else "sampler"
        else:
            stage = "" if divides is None else "rollout" if index < divides else "minibatch"
        listed, unnamed = ", ".join(list_reads(part)), "undeclared fields" if part.reads is None else ""
        if index == divides:
            unnamed = "all other fields" if listed else "every field"
        reads = " and ".join(filter(None, (listed, unnamed))) or "nothing"
        line = f"{stage:<11}{part.name:<{width}}reads {reads}"
        lines.append(line + (f"; writes {', '.join(part.provides)}" if part.provides else ""))
        for name, phase in phases.items():
            lines += [f"  {name}:", *("    " + line for line in describe(phase.parts).splitlines())]
    return "\n".join(lines)


def _declarations(parts: Sequence[Part]) -> dict[str, Any]:
    """Return what a chain declares; it reads a field only if none of its earlier parts writes the field."""
    written: dict[str, None] = {}
    requires: dict[str, None] = {}
    reads: dict[str, None] = {}
    for index, part in enumerate(parts):
        needed = [field for field in part.requires if field not in written]
        if index:  # an earlier part may add the metric; parts do not declare the names of metrics
            needed = [field for field in needed if not field.startswith("metrics.")]
        requires.update(dict.fromkeys(needed))
        reads.update(dict.fromkeys(field for field in part.reads or () if field not in written))
        written.update(dict.fromkeys(part.provides))
    kinds = {part.policy_loss for part in parts if "losses" in part.provides}
    policy_loss = True if True in kinds else None if None in kinds else False
    declared = {"requires": tuple(requires), "provides": tuple(written), "policy_loss": policy_loss}
    if find_sampler(parts) is not None:
        return declared
    places = {"before_sampler" if part.place == "first" else part.place for part in parts} - {"anywhere"}
    return declared | {
        "reads": None if any(part.reads is None for part in parts) else tuple(reads),
        "place": places.pop() if len(places) == 1 else "anywhere",
        "needs_time": any(part.needs_time for part in parts),
        "elementwise": all(part.elementwise for part in parts),
    }
