"""Composition: `chain`, and the checks that make a wrong one fail when it is built."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ._types import Batch, Context, Part, kind

REMEDY = {
    "advantage": "put gae() or vtrace() before it (or give the batch an advantage of your own)",
    "target": "put gae() or vtrace() before it (or give the batch a target of your own)",
    "weight": "use a sampler that weighs what it draws, such as prioritized_sampler()",
    "losses": "put a loss such as clipped_surrogate() before it",
}


@dataclasses.dataclass(frozen=True)
class Chain(Part):
    """What `chain` returns: a `Part` that knows its `parts` (nested chains are flattened)."""

    parts: tuple[Part, ...] = ()


def chain(*parts: Part) -> Part:
    """Apply parts one after another; the result is a part again, so chains nest.

    Position is granularity: what stands before a sampler sees the rollout, what stands after it sees minibatches, under
    the policy being trained. Calling `update` on a chain is always the plain fold over its parts (where a sampler
    stands, its first minibatch goes on); `learner` runs the same chain over all minibatches and epochs.

    Args:
        *parts: parts, in order; chains among them are flattened. No part at all is the identity.

    Returns:
        A `Part` whose state is the tuple of its parts' states.

    Raises:
        TypeError: an argument is not a part.
        ValueError: two samplers; a loss before the sampler; `gae` or `vtrace` after a sampler that cuts the time axis;
            a part that needs what only a later part writes.

    Example:
        >>> import ppo_parts as pp
        >>> pp.chain(pp.shuffled_minibatches(4), pp.vtrace(gamma=.99))
        Traceback (most recent call last):
        ...
        ValueError: chain: vtrace works along time, but shuffled_minibatches before it cuts the time axis: move vtrace \
before it, or use segment_minibatches()
    """
    for part in parts:
        if not isinstance(part, Part):
            if isinstance(part, (list, tuple)):
                raise TypeError(f"chain: expected parts, got a {type(part).__name__} of them: chain(*parts)")
            called = f": did you forget to call it, {part.__name__}(...)?" if hasattr(part, "__name__") else ""
            raise TypeError(f"chain: expected parts, got {part!r}{called}")
    flat = tuple(inner for part in parts for inner in (part.parts if isinstance(part, Chain) else (part,)))
    _check(flat)

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(part.init(params) for part in flat)

    def update(batch: Batch, state: tuple[Any, ...], context: Context) -> tuple[Batch, tuple[Any, ...]]:
        return fold(flat, batch, state, context)

    return Chain(init, update, "chain", _open_requirements(flat), _all_provided(flat), parts=flat)


def fold(
    parts: tuple[Part, ...], batch: Batch, states: tuple[Any, ...], context: Context
) -> tuple[Batch, tuple[Any, ...]]:
    """Run `parts` in order, each with its own state and its own key."""
    if len(parts) != len(states):
        raise ValueError(
            f"chain: {len(parts)} parts but {len(states)} states: was the state made by the init of this very chain?"
        )
    after = []
    for index, (part, state) in enumerate(zip(parts, states, strict=True)):
        check_batch(part, batch)
        result = part.update(batch, state, context.replace(key=jax.random.fold_in(context.key, index)))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"{part.name}: update must return (batch, state), got {kind(result)}")
        batch, state = result
        if not isinstance(batch, Batch):
            raise TypeError(f"{part.name}: update must return (batch, state), its first item is {kind(batch)}")
        after.append(state)
    return batch, tuple(after)


def check_batch(part: Part, batch: Batch) -> None:
    """What can only be known from the batch: fields that are missing, time that is gone, a policy not evaluated."""
    for field in part.requires:
        if getattr(batch, field) is None:
            raise ValueError(f"{part.name} needs batch.{field}, and nothing produced it: {REMEDY.get(field, '')}")
    if part.needs_time and batch.axes[0] != "time":
        raise ValueError(
            f"{part.name} works along time, but this batch has no time axis (axes: {batch.axes}): put it before the "
            "sampler, or use segment_minibatches()"
        )
    if part.place == "after_sampler" and batch.current is None:
        raise ValueError(
            f"{part.name} needs the policy being trained, and batch.current is not set: put it after a sampler, "
            "such as shuffled_minibatches(), and run the chain with learner()"
        )


def divider(parts: tuple[Part, ...]) -> int | None:
    """Index of the part that divides the chain (a sampler or `phases`), None where there is none."""
    found = [index for index, part in enumerate(parts) if "current" in part.provides]
    if len(found) > 1:
        names = " and ".join(parts[index].name for index in found)
        raise ValueError(f"chain: one sampler is the limit, got {names}: nest each in its own chain with phases()")
    return found[0] if found else None


def _check(parts: tuple[Part, ...]) -> None:
    where = divider(parts)
    for index, part in enumerate(parts):
        if where is not None:
            sampler = parts[where]
            if index < where and part.place == "after_sampler":
                raise ValueError(
                    f"chain: {part.name} needs the policy being trained, which is evaluated after the sampler: move it "
                    f"behind {sampler.name}"
                )
            if index > where and part.place == "before_sampler":
                raise ValueError(f"chain: {part.name} works on the whole rollout: move it before {sampler.name}")
            if index > where and part.needs_time and getattr(sampler, "axis", None) == "step":
                raise ValueError(
                    f"chain: {part.name} works along time, but {sampler.name} before it cuts the time axis: move "
                    f"{part.name} before it, or use segment_minibatches()"
                )
        written = {field for earlier in parts[:index] for field in earlier.provides}
        for field in part.requires:
            later = [other.name for other in parts[index + 1 :] if field in other.provides]
            if field not in written and later:
                raise ValueError(
                    f"chain: {part.name} needs {field}, which only {later[0]} after it produces: put {later[0]} before "
                    f"{part.name}"
                )


def _open_requirements(parts: tuple[Part, ...]) -> tuple[str, ...]:
    written: set[str] = set()
    needed: dict[str, None] = {}
    for part in parts:
        needed.update(dict.fromkeys(field for field in part.requires if field not in written))
        written.update(part.provides)
    return tuple(needed)


def _all_provided(parts: tuple[Part, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(field for part in parts for field in part.provides))
