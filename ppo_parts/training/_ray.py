"""Recipes as trials of Ray Tune, so that its searches and schedulers run them, on one machine or on a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._base.doors import checked
from .._base.errors import UserValueError
from .._base.extras import require_package
from .._base.hyperparameters import check_count
from ._checkpoint import Checkpoints
from ._cli import keep_compiled_programs
from ._config import check_config
from ._messages import did_you_mean
from ._sweep import trial_programs
from ._train import Train


@checked
def trainable(make_train: Callable[[Any], Train], config: Any, *, updates: int = 10, num_seeds: int = 1) -> type:
    """Make a `ray.tune.Trainable` of a recipe, whose trials change fields of its configuration.

    An iteration is `updates` updates. It reports the mean of each metric over them and over the seeds (an earlier one
    where no value is finite), and "updates", their number so far. A trial ends when no whole iteration is left. Floats
    are arguments of one compiled program, so that population-based training compiles nothing anew; each combination of
    other values compiles its own.

    Args:
        make_train: a recipe's `make_train(config) -> Train`.
        config: the configuration, whose other fields keep their values.
        updates: updates of an iteration.
        num_seeds: seeds of each trial, `config.seed` and those after it, trained in one program.

    Returns:
        The class, for `ray.tune.Tuner`; the keys of its `param_space` are fields of the configuration.
    """
    check_count("trainable", "updates", updates)
    check_count("trainable", "num_seeds", num_seeds)
    make_train(config)  # raises if it cannot work, before there is a trial

    base: Any = require_package("ray.tune", "ray").Trainable

    class Trial(base):
        def setup(self, given: dict[str, Any]) -> None:
            keep_compiled_programs()  # the processes of trials share them
            self.programs = trial_programs(make_train, config, num_seeds, updates)
            self.reset_config(given)

        def reset_config(self, given: dict[str, Any]) -> bool:
            for name in given:
                if not hasattr(config, name):
                    says = f"has no field {name!r}{did_you_mean(name, vars(config))}"
                    raise UserValueError(says, where="trainable", argument="config")
            check_config(dataclasses.replace(config, **given), where="trainable")
            self.numbers = {name: float(x) for name, x in given.items() if isinstance(getattr(config, name), float)}
            fixed = {name: x for name, x in given.items() if name not in self.numbers}
            self.ends, self.init, self.advance = self.programs(**fixed)
            self.done, self.state = 0, self.init(self.numbers)
            self.known: dict[str, float] = {}
            return True

        def step(self) -> dict[str, Any]:
            self.state, metrics = self.advance(self.numbers, self.state)
            finite = {name: x[np.isfinite(x)] for name, x in jax.device_get(dict(metrics)).items()}
            self.known |= {name: float(np.mean(x)) for name, x in finite.items() if x.size}
            self.done += self.ends.step
            return {**self.known, "updates": self.done, "done": self.done >= self.ends[-1]}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            Checkpoints(checkpoint_dir).save(self.done, self.state)

        def load_checkpoint(self, checkpoint: Any) -> None:
            self.done, self.state = Checkpoints(checkpoint).restore(jax.eval_shape(self.init, self.numbers))

    return Trial
