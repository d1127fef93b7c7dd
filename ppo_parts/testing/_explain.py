"""The search, stage by stage, for changes of an update that explain the first quantity that differs."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ._choices import CHOICES, NUMBERS, Change, Update, set_number
from ._replay import Difference, Replay, find_first


class Found(NamedTuple):
    """An update after changes, and the remaining difference in units of the tolerance."""

    update: Update
    changes: tuple[Change, ...]
    residual: np.ndarray

    @property
    def norm(self) -> float:
        """Return the norm of the residual, which is above 1 if any number differs, however many others agree."""
        return float(np.linalg.norm(self.residual))

    @property
    def differs(self) -> bool:
        """Return whether any number differs."""
        return bool(np.max(np.abs(self.residual)) > 1)


def explain(replay: Replay, start: Update, left: Difference | None) -> tuple[Update, list[Change], Difference | None]:
    """Apply the best changes, stage by stage, until no difference is `left` or none helps; drop needless ones."""
    changes: list[Change] = []
    update, seen = start, [start]
    while left is not None and left.stage != "policy":
        best = Search(replay, left).find_best(update)
        if best is None or best.update in seen:
            return update, changes, left
        update, changes, seen = best.update, [*changes, *best.changes], [*seen, best.update]
        left = find_first(replay.compare(update))
    for each in changes if left is None else ():
        fewer = [x for x in changes if x is not each]
        with contextlib.suppress(UserError, TypeError, ValueError):  # another change may need this one
            if find_first(replay.compare(start.change(*fewer))) is None:
                changes = fewer
    return start.change(*changes), changes, left


class Search:
    """The changes that may remove a difference, those of its stage and of earlier stages that are not recorded."""

    def __init__(self, replay: Replay, first: Difference) -> None:
        record, stages = replay.record.keys(), [first.stage]
        if first.stage == "gradient" or (first.stage == "optimizer" and not {"gradient", "loss"} & record):
            stages.append("loss")
        if "loss" in stages and not {"advantage", "target"} <= record:
            stages.append("advantage")
        self.replay, self.stages = replay, tuple(stages)
        # Compare the optimizer's steps one after another, because each depends on all earlier ones.
        self.steps = first.step + 1 if first.stage == "optimizer" and first.step is not None else None

    def find_best(self, update: Update) -> Found | None:
        """Return the change that removes the difference, or else reduces it most after fitting numbers."""
        start = self.try_changes(update)
        tried = [self.try_changes(update, x) for x in CHOICES if set(x.stages) & set(self.stages)]
        single = [x for x in tried if np.isfinite(x.norm) and abs(x.norm - start.norm) > 1e-6 * start.norm]
        if done := [x for x in single if not x.differs]:
            return min(done, key=lambda x: x.norm)
        # Rank changes by what remains after a first-order fit of the numbers, because their best values depend on the
        # change. If two are about equal, the order of the table decides.
        errors = [self.improve(x)[1] for x in single]
        equal = np.maximum(errors, _compute_tie_limit(errors))
        fits: list[Found] = []
        for each in (start, *(single[i] for i in np.argsort(equal, kind="stable")[:5])):
            fits += [each, self.fit(each)]
            if not fits[-1].differs:
                return fits[-1]
        allowed = _compute_tie_limit([x.norm for x in fits])
        return next(x for x in fits[1:] if x.norm <= allowed) if allowed < start.norm else None

    def try_changes(self, update: Update, *changes: Change) -> Found:
        """Return an update after changes, with the remaining difference, or infinity if they do not apply."""
        changed, residual = update.change(*changes), np.full(1, np.inf)
        if changed is not update or not changes:
            with contextlib.suppress(UserError, TypeError, ValueError):  # it does not fit the chain or the record
                found = self.replay.compare(changed, self.stages[0], self.steps)
                residual = np.concatenate([x.residual for x in found])
                residual = np.where(np.isfinite(residual), residual, 1e30)
        return Found(changed, changes, residual)

    def read_numbers(self, update: Update) -> dict[tuple[str, str], float]:
        """Return the numbers of the update that may be fitted, by call and argument."""
        names = [x for stage in self.stages for x in NUMBERS.get(stage, ())]
        return {x: value for x in names if (value := update.read_number(*x)) is not None}

    def improve(self, begin: Found) -> tuple[np.ndarray, float]:
        """Return the numbers after a Gauss-Newton step, and the remaining norm to first order."""
        numbers, slopes = self.read_numbers(begin.update), []
        x = np.array([*numbers.values()])
        scale = np.maximum(x, 0.01)  # keep numbers that hardly matter
        for name, each in zip(numbers, scale, strict=True):
            step = -1e-3 if numbers[name] >= _find_highest(name) else 1e-3
            moved = self.try_changes(begin.update, set_number(name, numbers[name] + step * each)).residual
            slopes.append((moved - begin.residual) / step if np.isfinite(moved).all() else 0 * begin.residual)
        if not slopes:
            return x, begin.norm
        change = np.linalg.lstsq(np.stack(slopes, axis=1), -begin.residual, rcond=1e-5)[0]
        return x + scale * change, float(np.linalg.norm(begin.residual + change @ np.stack(slopes)))

    def fit(self, begin: Found) -> Found:
        """Fit the numbers by least squares, and round them to the fewest digits that keep the fit as good."""
        first = self.read_numbers(begin.update)
        low, high = [1e-3 if "max" in each[1] else 0.0 for each in first], [*map(_find_highest, first)]

        def try_numbers(x: Any) -> Found:
            return self.try_changes(begin.update, *map(set_number, first, x))

        found = begin
        for _ in range(10):
            nearer = try_numbers(np.clip(self.improve(found)[0], low, high))
            found, before = min(found, nearer, key=lambda x: x.norm), found.norm
            if not found.norm < 0.9 * before:  # true also if the chain fails with them
                break
        x = np.array([*self.read_numbers(found.update).values()])
        x = np.where(x < 1e-9, 0, x)
        best = np.max(np.abs(try_numbers(x).residual))
        for digits in (1, 2, 3, 4, 6):
            rounded = np.array([float(f"{value:.{digits}g}") for value in x])
            found = try_numbers(rounded)
            if np.max(np.abs(found.residual)) <= max(1.0, 1.05 * best):
                break
        said = [y for y, new, old in zip(found.changes, rounded, first.values(), strict=True) if new != old]
        return found._replace(changes=(*begin.changes, *said))


def _compute_tie_limit(errors: list[float]) -> float:
    """Return the largest error that counts as equal to the smallest one."""
    return max(1.0, 1.3 * min(errors, default=0.0))


def _find_highest(number: tuple[str, str]) -> float:
    return 1.0 if number[1] in ("gamma", "gae_lambda", "beta") else np.inf
