"""Composition: `chain`, and the checks that reject a wrong chain when it is built."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._base.errors import UserTypeError, UserValueError
from .._base.hyperparameters import at
from .types import Array, Batch, Context, Divider, Params, Part, field_at, kind, with_field_at

REMEDY = {
    "advantage": "put gae() or vtrace() before it (or give the batch your own advantage)",
    "target": "put gae() or vtrace() before it (or give the batch your own target)",
    "weight": "use a sampler that weighs what it draws, such as prioritized_sampler()",
    "losses": "put a loss such as clipped_surrogate() before it",
    "behavior": "make the rollout keep it, rollout(..., keep_distribution=True)",
    "next_obs": "make the rollout keep it, rollout(..., keep_next_obs=True)",
}
BY_THE_LEARNER = {"losses", "metrics", "stop"}  # fields that the learner reads at the end of a chain


@dataclasses.dataclass(frozen=True)
class Chain(Part):
    """The result of `chain`: a `Part` with the attribute `parts` (nested chains are flattened)."""

    parts: tuple[Part, ...] = ()

    def __str__(self) -> str:
        return describe(self.parts)


def chain(*parts: Part) -> Part:
    """Apply parts one after another; the result is itself a part, so chains nest.

    A part's position determines what it sees: parts before the sampler see the rollout, parts after it see minibatches
    under the policy being trained. The `update` of a chain runs each part once (the sampler draws only its first
    minibatch); `learner` runs the same chain over all minibatches and epochs. `print(chain(...))` shows the stages, and
    what each part reads and writes.

    Args:
        *parts: parts, in order; nested chains are flattened. Without parts, the chain is the identity.

    Returns:
        A `Part` whose state is the tuple of its parts' states.

    Raises:
        TypeError: an argument is not a part.
        ValueError: two samplers; a loss before the sampler; `gae` or `vtrace` after a sampler that cuts the time axis;
            a part that needs a field that only a later part writes.

    Example:
        >>> import ppo_parts as pp
        >>> pp.chain(pp.shuffled_minibatches(4), pp.vtrace(gamma=.99))
        Traceback (most recent call last):
        ...
        ppo_parts.errors.UserValueError: chain: vtrace works along time, but shuffled_minibatches before it cuts the \
time axis: move vtrace before it, or use segment_minibatches()
    """
    for part in parts:
        if not isinstance(part, Part):
            if isinstance(part, (list, tuple)):
                raise UserTypeError(f"chain: expected parts, got a {type(part).__name__} of them: chain(*parts)")
            called = f": did you forget to call it, {part.__name__}(...)?" if hasattr(part, "__name__") else ""
            raise UserTypeError(f"chain: expected parts, got {part!r}{called}")
    flat = tuple(inner for part in parts for inner in (part.parts if isinstance(part, Chain) else (part,)))
    _check_order(flat)

    def init(params: Params, key: Array | None = None) -> tuple[Any, ...]:
        return tuple(part.init(params, part_key(key, index)) for index, part in enumerate(flat))

    def update(batch: Batch, state: tuple[Any, ...], context: Context) -> tuple[Batch, tuple[Any, ...]]:
        return fold(flat, batch, state, context)

    def amended(params: Params, old: tuple[Any, ...], new: tuple[Any, ...]) -> Params:
        return amend(flat, params, old, new)

    def finished(batch: Batch, state: tuple[Any, ...], context: Context) -> tuple[Any, ...]:
        return finish(flat, batch, state, context)

    return Chain(
        init,
        update,
        "chain",
        _open_requirements(flat),
        _all_provided(flat),
        parts=flat,
        **_declarations(flat),
        amend=amended if any(part.amend is not None for part in flat) else None,
        finish=finished if any(part.finish is not None for part in flat) else None,
    )


def identity() -> Part:
    """The empty chain, which changes nothing: `chain(identity(), p)`, `chain(p, identity())` and `p` agree."""
    return chain()


def inner_key(part: Part, key: Any) -> Any:
    """Return the key of a part that another part wraps.

    The parts of a wrapped chain must not receive the keys of the parts of the outer chain.
    """
    return jax.random.fold_in(key, 2**30) if isinstance(part, Chain) and key is not None else key


def parts_of(part: Part) -> tuple[Part, ...]:
    """Return the parts of a chain, or the part alone."""
    return part.parts if isinstance(part, Chain) else (part,)


def check_wrapped(where: str, part: Any, expected: str) -> None:
    """Raise unless `part` is a part, or a chain of parts, without a sampler."""
    if not isinstance(part, Part):
        raise UserTypeError(f"{where}: expected {expected}, got {part!r}")
    if (divides := find_sampler(parts_of(part))) is not None:
        raise UserTypeError(f"{where}: expected {expected}, got the sampler {parts_of(part)[divides].name}")


def part_key(key: Any, index: int) -> Any:
    """Return the key of part `index` of a chain; None without a key.

    The first part has the key of the chain, so that `chain(p)` and `p` draw the same numbers. The others fold in large
    numbers, so that a part that folds small numbers into its own key does not reproduce the key of another part.
    """
    return key if index == 0 or key is None else jax.random.fold_in(key, 2**31 + index)


def fold(
    parts: Sequence[Part], batch: Batch, states: tuple[Any, ...], context: Context
) -> tuple[Batch, tuple[Any, ...]]:
    """Run `parts` in order, each with its own state and its own key."""
    if len(parts) != len(states):
        raise UserValueError(
            f"chain: {len(parts)} parts but {len(states)} states: was the state made by this chain's init?"
        )
    after = []
    for index, (part, state) in enumerate(zip(parts, states, strict=True)):
        check_batch(part, batch)
        given, earlier = batch, batch.stop
        result = part.update(batch, state, context.replace(key=part_key(context.key, index)))
        if not isinstance(result, tuple) or len(result) != 2:
            raise UserTypeError(f"{part.name}: update must return (batch, state), got {kind(result)}")
        batch, state = result
        if not isinstance(batch, Batch):
            raise UserTypeError(f"{part.name}: update must return (batch, state), its first item is {kind(batch)}")
        batch = _nan_if_out_of_range(part, given, batch, context.step)
        if earlier is not None and batch.stop is not earlier:  # a part may ask to stop, but not withdraw a request
            batch = batch.replace(stop=earlier.merge(batch.stop))
        after.append(state)
    return batch, tuple(after)


def _nan_if_out_of_range(part: Part, before: Batch, after: Batch, step: Any) -> Batch:
    """Return what the part wrote, or NaN in all of it if one of its numbers is out of range at this step.

    Comparisons and minima may discard a NaN. A loss must not, because the learner counts the NaNs of losses.
    """
    numbers = [at(number, step) for number in part.numbers]
    # Others were checked when the part was built.
    found = [x for x in numbers if isinstance(x, jax.Array) and not x.ndim and jnp.issubdtype(x.dtype, jnp.floating)]
    if not found:
        return after
    bad = functools.reduce(jnp.logical_or, map(jnp.isnan, found))

    def nan(x: Any) -> Any:
        return jnp.where(bad, jnp.nan, x).astype(x.dtype) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x

    for path in part.provides:
        if path in ("metrics", "stop"):
            continue
        if path == "losses":
            own = {name: nan(x) for name, x in after.losses.items() if before.losses.get(name) is not x}
            after = after.replace(losses={**after.losses, **own})
        else:
            after = with_field_at(after, path, jax.tree.map(nan, field_at(after, path)))
    return after


def amend(parts: Sequence[Part], params: Params, old: tuple[Any, ...], new: tuple[Any, ...]) -> Params:
    """Return the parameters after each part has amended them."""
    for part, before, after in zip(parts, old, new, strict=True):
        if part.amend is not None:
            params = part.amend(params, before, after)
    return params


def finish(parts: Sequence[Part], batch: Batch, states: tuple[Any, ...], context: Context) -> tuple[Any, ...]:
    """Return the states after each part has finished the update, each with its own key."""
    after = tuple(
        state if part.finish is None else part.finish(batch, state, context.replace(key=part_key(context.key, index)))
        for index, (part, state) in enumerate(zip(parts, states, strict=True))
    )
    check_states("finish", parts, states, after)
    return after


def check_states(where: str, parts: Sequence[Part], before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    """Raise if a part changed the structure of its state, or a shape or dtype in it, so that no loop could carry it."""

    def described(x: Any) -> str:
        return f"{x.dtype if hasattr(x, 'dtype') else jnp.result_type(x)}{list(jnp.shape(x))}"

    for part, old, new in zip(parts, before, after, strict=True):
        was, now = (jax.tree.map(described, state) for state in (old, new))
        if jax.tree.flatten(was) != jax.tree.flatten(now):
            raise UserTypeError(
                f"{part.name}: {where} changed its state from {was} to {now}: keep its structure, shapes and dtypes"
            )


def check_batch(part: Part, batch: Batch) -> None:
    """Raise for errors that only the batch reveals: a missing field, a missing time axis, an unevaluated policy."""
    for path in part.requires:
        if field_at(batch, path) is None:
            raise UserValueError(f"{part.name} needs batch.{path}, and nothing produced it: {_remedy(path)}")
    if part.needs_time and batch.axes[0] != "time":
        raise UserValueError(
            f"{part.name} works along time, but this batch has no time axis (axes: {batch.axes}): put it before the "
            "sampler, or use segment_minibatches()"
        )
    if part.place == "after_sampler" and batch.current is None:
        raise UserValueError(
            f"{part.name} needs the policy being trained, and batch.current is not set: put it after a sampler, "
            "such as shuffled_minibatches(), and run the chain with learner()"
        )


def find_sampler(parts: Sequence[Part]) -> int | None:
    """Return the index of the part that divides the chain (a sampler or `phases`), or None if there is none."""
    found = [index for index, part in enumerate(parts) if isinstance(part, Divider)]
    if len(found) > 1:
        names = " and ".join(parts[index].name for index in found)
        raise UserValueError(
            f"chain: a chain can have only one sampler, got {names}: nest each in its own chain with phases()"
        )
    return found[0] if found else None


def check_every_write_has_an_effect(
    shared: Sequence[Part], tails: Iterable[Sequence[Part]], returned: Sequence[Part] = ()
) -> None:
    """Raise if a part writes a field that no part reads, or changes a field after the losses that should have used it.

    Args:
        shared: the parts that all phases share.
        tails: the parts of each phase.
        returned: parts whose results the learner returns, so that they need no reader.
    """
    tails = [tuple(tail) for tail in tails]
    for index, part in enumerate(shared):
        if part not in returned:
            _check_read(part, [(*shared[index + 1 :], *tail) for tail in tails])
    for tail in tails:
        for index, part in enumerate(tail):
            _check_in_time(part, tail[:index], tail[index + 1 :])
            if part not in returned:
                _check_read(part, [tail[index + 1 :]])


def reads_field(part: Part, field: str) -> bool:
    """Return whether a part declares that it reads a field, an entry of the field, or the field that contains it."""
    return any(
        field == read or field.startswith(f"{read}.") or read.startswith(f"{field}.")
        for read in (*part.requires, *(part.reads or ()))
    )


def describe(parts: Sequence[Part]) -> str:
    """Describe the stages of a chain, one part per line, with the fields that each reads and writes."""
    if not parts:
        return "chain()"
    width = max(len(part.name) for part in parts) + 2
    divides, lines = find_sampler(parts), []
    for index, part in enumerate(parts):
        if isinstance(part, Divider):
            stage = part.stage
        else:
            stage = "" if divides is None else "rollout" if index < divides else "minibatch"
        reads = ", ".join(dict.fromkeys((*part.requires, *(part.reads or ()))))
        writes = ", ".join(part.provides)
        text = f"{stage:<11}{part.name:<{width}}"
        text += f"reads {reads or ('nothing' if part.reads is not None else 'undeclared fields')}"
        lines.append(text + (f"; writes {writes}" if writes else ""))
        for name, inner in (part.chains if isinstance(part, Divider) else {}).items():
            lines += [f"  {name}:", *("    " + line for line in describe(inner).splitlines())]
    return "\n".join(lines)


def _check_read(part: Part, paths: Iterable[Sequence[Part]]) -> None:
    """Raise if the part writes fields, and none of the paths after it reads any of them."""
    paths = tuple(paths)
    written = [field for field in part.provides if field.partition(".")[0] not in BY_THE_LEARNER]
    if not written or any(_is_read(written, path) for path in paths):
        return
    why, remedy = "so it would have no effect", "put it before the losses that should use it, or leave it out"
    if written == ["weight"]:
        remedy = "add advantage_weight() or loss_weight(...) after it, or set beta=0"
    elif not any("losses" in later.provides for path in paths for later in path):
        why, remedy = "because there is no loss", "put one, such as clipped_surrogate(), after the sampler"
    raise UserValueError(
        f"learner: {part.name} writes {' and '.join(written)}, and no part after it reads "
        f"{'it' if len(written) == 1 else 'them'}, {why}: {remedy}"
    )


def _is_read(fields: Sequence[str], later: Sequence[Part]) -> bool:
    """Return whether a later part may read one of the fields before other parts have overwritten them."""
    for reader in later:
        if reader.reads is None or any(reads_field(reader, field) for field in fields):
            return True
        fields = [field for field in fields if field not in reader.provides]
    return False


def _check_in_time(part: Part, earlier: Sequence[Part], later: Sequence[Part]) -> None:
    """Raise if the part changes a field that an earlier loss has read, and the result reaches no loss of its kind.

    Paths must be equal: a loss that declares "current" may not read the one field of it that the part changes.
    """
    for field in part.provides:
        losses = [loss for loss in earlier if "losses" in loss.provides]
        missed = [loss for loss in losses if field in (*loss.requires, *(loss.reads or ()))]
        if field in BY_THE_LEARNER or not missed or not reads_field(part, field):
            continue
        why = "no loss after it does, so the change would have no effect on learning"
        if field == "mask":
            why = "that loss would be computed with one mask and averaged with another"
        elif _reaches_a_loss(field, later, policy=any(reads_field(loss, "advantage") for loss in missed)):
            continue
        raise UserValueError(
            f"learner: {part.name} changes {field} after {missed[0].name} has used it, and {why}: put {part.name} "
            f"before {missed[0].name}"
        )


def _reaches_a_loss(field: str, later: Sequence[Part], *, policy: bool) -> bool:
    """Return whether a later loss (with `policy`, a policy loss) may read the field, or a field derived from it."""
    changed = {field}
    for reader in later:
        if reader.reads is None:
            return True
        if any(reads_field(reader, each) for each in changed):
            if "losses" in reader.provides and (reads_field(reader, "advantage") or not policy):
                return True
            changed.update(set(reader.provides) - BY_THE_LEARNER)
    return False


def _check_order(parts: tuple[Part, ...]) -> None:
    divides = find_sampler(parts)
    for index, part in enumerate(parts):
        if divides is not None:
            sampler = parts[divides]
            assert isinstance(sampler, Divider)
            if index < divides and part.place == "after_sampler":
                raise UserValueError(
                    f"chain: {part.name} needs the policy being trained, which is evaluated after the sampler: move it "
                    f"after {sampler.name}"
                )
            if index > divides and part.place in ("first", "before_sampler"):
                raise UserValueError(f"chain: {part.name} works on the whole rollout: move it before {sampler.name}")
            if index > divides and part.needs_time and sampler.cuts_time:
                raise UserValueError(
                    f"chain: {part.name} works along time, but {sampler.name} before it cuts the time axis: move "
                    f"{part.name} before it, or use segment_minibatches()"
                )
        written = {field for earlier in parts[:index] for field in earlier.provides}
        for field in part.requires:
            if field in written:
                continue
            later = [other.name for other in parts[index + 1 :] if field in other.provides and _makes(other, field)]
            if later:
                raise UserValueError(
                    f"chain: {part.name} needs {field}, which only {later[0]} after it produces: put {later[0]} before "
                    f"{part.name}"
                )


def _makes(part: Part, field: str) -> bool:
    """Return whether the part creates the field, instead of changing an existing one."""
    return field not in part.requires


def _remedy(path: str) -> str:
    field, _, entry = path.partition(".")
    if field == "metrics":
        return "put the part that adds it before this one, on the same side of the sampler"
    if entry:
        return f"give the batch {field}[{entry!r}], or put the part that writes it before this one"
    return REMEDY.get(field, f"give the batch {field}, or put the part that writes it before this one")


def _open_requirements(parts: tuple[Part, ...]) -> tuple[str, ...]:
    written: set[str] = set()
    needed: dict[str, None] = {}
    for part in parts:
        needed.update(dict.fromkeys(field for field in part.requires if field not in written))
        written.update(part.provides)
    return tuple(needed)


def _declarations(parts: tuple[Part, ...]) -> dict[str, Any]:
    """Return the declarations of a chain without a sampler: its reads, its place, and whether it needs time."""
    if find_sampler(parts) is not None:
        return {}
    reads: dict[str, None] | None = {}
    written: set[str] = set()
    for part in parts:
        if part.reads is None or reads is None:
            reads = None
        else:
            reads.update(dict.fromkeys(field for field in part.reads if field not in written))
        written.update(part.provides)
    places = {"before_sampler" if part.place == "first" else part.place for part in parts} - {"anywhere"}
    return {
        "reads": None if reads is None else tuple(reads),
        "place": places.pop() if len(places) == 1 else "anywhere",
        "needs_time": any(part.needs_time for part in parts),
    }


def _all_provided(parts: tuple[Part, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(field for part in parts for field in part.provides))
