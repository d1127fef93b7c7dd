"""Checks of how parts fit together: their order, the fields that they need, and fields that nothing reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import UserError, UserValueError
from .batch import POLICY_READS, Batch, Current, field_at
from .part import Divider, Part

REMEDY = {
    "advantage": "put gae() or vtrace() before it (or give the batch your own advantage)",
    "target": "put gae() or vtrace() before it (or give the batch your own target)",
    "weight": "use a sampler that weighs what it draws, such as prioritized_sampler()",
    "behavior": "make the rollout keep it, rollout(..., keep_distribution=True)",
    "next_obs": "make the rollout keep it, rollout(..., keep_next_obs=True)",
}
NAMED_BY_POLICIES = {*POLICY_READS} - {"extras", "per_segment", "shared"}
"""Fields that any policy may read. Entries of the others are more often unused by mistake than read by a policy."""
BY_THE_LEARNER = {"losses", "metrics", "stop"}  # fields that the learner reads at the end of a chain


def find_sampler(parts: Sequence[Part]) -> int | None:
    """Return the index of the part that divides the chain (a sampler or `phases`), or None if there is none."""
    found = [index for index, part in enumerate(parts) if isinstance(part, Divider)]
    if len(found) > 1:
        names = " and ".join(parts[index].name for index in found)
        raise UserValueError(
            f"chain: a chain can have only one sampler, got {names}: nest each in its own chain with phases()"
        )
    return found[0] if found else None


def list_reads(part: Part) -> tuple[str, ...]:
    """Return all fields that a part declares that it reads."""
    return tuple(dict.fromkeys((*part.requires, *(part.reads or ()))))


def reads_field(part: Part, field: str) -> bool:
    """Return whether a part declares that it reads a field, an entry of it, or the field that contains it."""
    return any(
        field == read or field.startswith(f"{read}.") or read.startswith(f"{field}.") for read in list_reads(part)
    )


def _adds_loss(part: Part, *, of_policy: bool = False) -> bool:
    """Return whether a part adds a loss or, with `of_policy`, a loss that may be a policy loss."""
    return "losses" in part.provides and (part.policy_loss is not False or not of_policy)


# --- when a chain is built -------------------------------------------------------------------------------------------


def check_order(parts: Sequence[Part]) -> None:
    """Raise if a part is on the wrong side of the sampler, or before the part that writes what it needs."""
    divides = find_sampler(parts)
    for index, part in enumerate(parts):
        if divides is not None:
            _check_side(part, index - divides, parts[divides])
        if part.place == "first" and index > 0:  # stored rollouts lack what earlier parts compute now
            raise UserValueError(
                f"chain: {part.name} must be the first part of its chain, but {parts[0].name} is: put {parts[0].name} "
                f"before pp.phases(...), with {part.name} first in a phase"
            )
        written = {field for earlier in parts[:index] for field in earlier.provides}
        for field in part.requires:
            # A part that both reads and provides a field only changes it, and does not create it.
            makers = [x for x in parts[index + 1 :] if field in x.provides and not reads_field(x, field)]
            if field not in written and makers:
                raise UserValueError(
                    f"chain: {part.name} needs {field}, which is produced later, by {makers[0].name}: put "
                    f"{makers[0].name} before {part.name}"
                )


def _check_side(part: Part, side: int, sampler: Any) -> None:
    """Raise if the part is on the wrong side of the sampler; it is before it if `side` < 0, after it if `side` > 0."""
    if side < 0 and part.place == "after_sampler":
        raise UserValueError(
            f"chain: {part.name} needs the policy being trained, which is evaluated after the sampler: move it after "
            f"{sampler.name}"
        )
    if side > 0 and part.place in ("first", "before_sampler"):
        raise UserValueError(f"chain: {part.name} works on the whole rollout: move it before {sampler.name}")
    if side > 0 and part.needs_time and sampler.cuts_time:
        remedy = "" if part.place == "after_sampler" else f"move {part.name} before it, or "
        raise UserValueError(
            f"chain: {part.name} works along time, but {sampler.name} before it cuts the time axis: {remedy}"
            "use segment_minibatches()"
        )


# --- when a learner is built -----------------------------------------------------------------------------------------


def check_every_write_has_an_effect(shared: Sequence[Part], tails: Iterable[Sequence[Part]]) -> None:
    """Raise if a part writes a field that no part reads, or changes a field after the losses that should use it.

    `shared` are the parts that all phases share, `tails` those of each phase.
    """
    tails = [tuple(tail) for tail in tails]
    for index, part in enumerate(shared):
        _check_read(part, [(*shared[index + 1 :], *tail) for tail in tails])
    for tail in tails:
        divides = find_sampler(tail)
        for index, part in enumerate(tail):
            _check_in_time(part, tail[:index], tail[index + 1 :])
            _check_read(part, [tail[index + 1 :]], evaluated=divides is not None and index > divides)


def _check_read(part: Part, paths: Sequence[Sequence[Part]], evaluated: bool = False) -> None:
    """Raise if the part writes fields and no path after it reads any of them; the policy may be `evaluated` already."""
    written = [field for field in part.provides if field.partition(".")[0] not in BY_THE_LEARNER]
    if not written or any(_is_read(written, path, evaluated) for path in paths):
        return
    why, remedy = "so it would have no effect", "put it before the losses that should use it, or leave it out"
    if all("." in field for field in written):
        remedy += "; if only the policy reads it, name it in the reads of a later part"
    if evaluated and not NAMED_BY_POLICIES.isdisjoint(written):
        remedy = "put it before the sampler, because the policy has already been evaluated on the minibatch"
    elif written == ["weight"]:
        remedy = "add advantage_weight(), or a loss with coef=pp.field('weight'), after it, or draw without weights"
    elif not any(_adds_loss(later) for path in paths for later in path):
        why, remedy = "because there is no loss", "put one, such as clipped_surrogate(), after the sampler"
    elif any(set(written) <= set(later.provides) for path in paths for later in path):
        why, remedy = "because a later part overwrites it", "leave one of the two parts out"
    raise UserValueError(
        f"learner: {part.name} writes {' and '.join(written)}, and no part after it reads "
        f"{'it' if len(written) == 1 else 'them'}, {why}: {remedy}"
    )


def _is_read(fields: Sequence[str], later: Sequence[Part], evaluated: bool) -> bool:
    """Return whether a later part may read one of the fields before other parts have overwritten them."""
    for reader in later:
        evaluates = any(path.partition(".")[0] == "current" for path in list_reads(reader))
        if reader.reads is None or any(reads_field(reader, field) for field in fields):
            return True
        if evaluates and not evaluated and not NAMED_BY_POLICIES.isdisjoint(fields):
            return True
        fields = [field for field in fields if field not in reader.provides]
    return False


def _check_in_time(part: Part, earlier: Sequence[Part], later: Sequence[Part]) -> None:
    """Raise if the part changes a field that an earlier loss has read, and no later loss of its kind uses the result.

    Paths must be equal, because a loss that declares "current" may not read the one field of it that the part changes.
    """
    for field in part.provides:
        missed = [loss for loss in earlier if _adds_loss(loss) and field in list_reads(loss)]
        if field in BY_THE_LEARNER or not missed or not reads_field(part, field):
            continue
        why = "no loss after it does, so the change would have no effect on learning"
        if field == "mask":
            why = "that loss would be computed with one mask and averaged with another"
        elif _reaches_a_loss(field, later, of_policy=any(loss.policy_loss for loss in missed)):
            continue
        raise UserValueError(
            f"learner: {part.name} changes {field} after {missed[0].name} has used it, and {why}: put {part.name} "
            f"before {missed[0].name}"
        )


def _reaches_a_loss(field: str, later: Sequence[Part], *, of_policy: bool) -> bool:
    """Return whether a later loss (with `of_policy`, a policy loss) may read the field, or a field derived from it."""
    changed = {field}
    for reader in later:
        if reader.reads is None:
            return True
        if any(reads_field(reader, each) for each in changed):
            if _adds_loss(reader, of_policy=of_policy):
                return True
            changed.update(set(reader.provides) - BY_THE_LEARNER)
    return False


# --- when a part runs ------------------------------------------------------------------------------------------------


def check_batch(part: Part, batch: Batch) -> None:
    """Raise for errors that only the batch reveals: an unevaluated policy, a missing field or a missing time axis."""
    needs_current = part.place == "after_sampler" or any(path.split(".")[0] == "current" for path in part.requires)
    if needs_current and batch.current is None:
        raise _no_current(part)
    for path in part.requires:
        if field_at(batch, path) is None:
            raise UserValueError(f"{part.name} needs batch.{path}, and nothing produced it: {_remedy(path)}")
    if part.needs_time and batch.axes[0] != "time":
        raise UserValueError(
            f"{part.name} works along time, but this batch has no time axis (axes: {batch.axes}): put it before the "
            "sampler, or use segment_minibatches()"
        )


def explain_missing(part: Part, batch: Batch, error: Exception) -> None:
    """Raise a better error, or add a note, if a part failed because it lacks something that it does not declare."""
    of_none = batch.current is None and isinstance(error, AttributeError) and error.obj is None
    if of_none and getattr(error, "name", None) in Current._fields:
        raise _no_current(part) from error
    if isinstance(error, KeyError) or ("NoneType" in str(error) and not isinstance(error, UserError)):
        remedy = "declare what it reads, e.g. requires=('extras.x',), so that a check names what is missing"
        error.add_note(f"raised by the part {part.name!r}: {remedy}")


def _no_current(part: Part) -> UserValueError:
    declare = "" if part.place == "after_sampler" else ', and declare place="after_sampler"'
    return UserValueError(
        f"{part.name} needs the policy being trained, and batch.current is not set: put it after a sampler, "
        f"such as shuffled_minibatches(), and run the chain with learner(){declare}"
    )


def _remedy(path: str) -> str:
    field, _, entry = path.partition(".")
    if field == "metrics":
        return "put the part that adds it before this one, on the same side of the sampler"
    if field == "current":
        return f"return pp.Output(distribution, value, {entry.partition('.')[0]}=...) from evaluate"
    wanted = f"{field}[{entry!r}]" if entry else field
    return REMEDY.get(path, f"give the batch {wanted}, or put the part that writes it before this one")
