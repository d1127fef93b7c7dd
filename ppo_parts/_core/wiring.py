"""The checks of how parts are wired: their order, the fields that they need, and writes that nothing reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .._base.errors import UserValueError
from .types import Batch, Divider, Part, field_at

REMEDY = {
    "advantage": "put gae() or vtrace() before it (or give the batch your own advantage)",
    "target": "put gae() or vtrace() before it (or give the batch your own target)",
    "weight": "use a sampler that weighs what it draws, such as prioritized_sampler()",
    "losses": "put a loss such as clipped_surrogate() before it",
    "behavior": "make the rollout keep it, rollout(..., keep_distribution=True)",
    "next_obs": "make the rollout keep it, rollout(..., keep_next_obs=True)",
}
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


def check_order(parts: tuple[Part, ...]) -> None:
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


def _remedy(path: str) -> str:
    field, _, entry = path.partition(".")
    if field == "metrics":
        return "put the part that adds it before this one, on the same side of the sampler"
    if entry:
        return f"give the batch {field}[{entry!r}], or put the part that writes it before this one"
    return REMEDY.get(field, f"give the batch {field}, or put the part that writes it before this one")
