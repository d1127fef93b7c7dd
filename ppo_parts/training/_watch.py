"""What a run shows while it is at work, and what it does when it is asked to stop."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np

from .._extras import require_package
from ._options import RunOptions
from ._records import column
from ._train import Train


class Watch:
    """The progress bar and TensorBoard."""

    def __init__(self, train: Train, options: RunOptions, done: int, folder: Path) -> None:
        self._seeds, self._each = options.num_seeds, train.steps_per_update
        total = train.num_updates * self._each * self._seeds
        self._bar = require_package("tqdm", "train").tqdm(
            total=total,
            initial=done * self._each * self._seeds,
            unit="step",
            unit_scale=True,
            disable=None if options.progress else True,  # None: shown on terminals alone
        )
        self._writer = None
        if options.tensorboard:
            after = done * self._each + 1 if done else None
            self._writer = require_package("tensorboardX", "train").SummaryWriter(str(folder), purge_step=after)

    def show(self, rows: list[dict[str, Any]], steps_per_second: float) -> None:
        returns = np.asarray([row["episode_return"] for row in rows], float)
        if np.isfinite(returns).any():
            self._bar.set_postfix_str(f"return {np.nanmean(returns):.1f}")
        self._bar.update(len(rows) * self._each * self._seeds)
        if self._writer is None:
            return
        here = rows[-1]["env_steps"]
        for name in sorted(set().union(*rows) - {"update", "env_steps"}):
            values = column(rows, name)
            if np.isfinite(values).any():
                self._writer.add_scalar(name, float(np.nanmean(values)), here)
        self._writer.add_scalar("steps_per_second", steps_per_second, here)

    def close(self) -> None:
        self._bar.close()
        if self._writer is not None:
            self._writer.close()


class Interrupt:
    """Turns the first Ctrl-C (or SIGTERM) into a request to save and stop: `asked` is then the signal's number."""

    def __enter__(self) -> Interrupt:
        self.asked = 0
        self._before: dict[int, Any] = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        except ValueError:  # not the main thread: signals are somebody else's
            pass
        return self

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = number
        for other, handler in self._before.items():
            signal.signal(other, handler)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
