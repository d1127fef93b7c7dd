"""Recipes as trials of Ray Tune, so that its searches and schedulers run them, on one machine or on a cluster."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._base.doors import checked
from .._base.extras import require_package
from .._base.hyperparameters import check_count
from ._checkpoint import Checkpoints
from ._cli import keep_compiled_programs
from ._config import check_config
from ._files import write_whole
from ._folder import in_json, recipe_of, stored_config
from ._recipe import config_type, import_recipe
from ._train import Train
from ._trials import check_fields, check_same_search, drawn, suggestions, trial_programs


@checked
def trainable(make_train: Callable[[Any], Train], config: Any, *, updates: int = 10, num_seeds: int = 1) -> type:
    """Make a `ray.tune.Trainable` of a recipe, whose trials change fields of its configuration.

    An iteration is `updates` updates. It reports the mean of each metric over them and over the seeds (an earlier one
    where no value is finite, or NaN), and "updates", their number so far. A trial ends when no whole iteration is left.
    Floats are arguments of one compiled program, so that population-based training compiles nothing anew; each
    combination of other values compiles its own.

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
            self.programs = trial_programs(make_train, config, num_seeds)
            self.reset_config(given)

        def reset_config(self, given: dict[str, Any]) -> bool:
            check_fields("trainable", config, given)
            check_config(dataclasses.replace(config, **given), where="trainable")
            self.init, self.advance = self.programs(given)
            self.begun: Any = None  # a restored trial needs no first state
            self.done, self.known = 0, dict[str, float]()
            return True

        def step(self) -> dict[str, Any]:
            state, total = self.begun or self.init()
            each = min(updates, int(total))
            state, metrics = self.advance(state, each)
            for name, x in jax.device_get(dict(metrics)).items():
                finite = x[np.isfinite(x)]
                self.known[name] = float(np.mean(finite)) if finite.size else self.known.get(name, np.nan)
            self.begun, self.done = (state, total), self.done + each
            return {**self.known, "updates": self.done, "done": self.done + each > int(total)}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            Checkpoints(checkpoint_dir).save(self.done, self.begun)

        def load_checkpoint(self, checkpoint: Any) -> None:
            self.done, self.begun = Checkpoints(checkpoint).restore(jax.eval_shape(self.init))

    return Trial


def sweep_with_ray(
    make_train: Callable[[Any], Train], config: Any, search: Mapping[str, Any], trials: int, folder: Path, seeds: int
) -> dict[str, Any]:
    """Run the trials that `sweep` describes in processes of Ray; ASHA ends trials, and a search continues in `folder`.

    Reference: Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning", arXiv:1810.05934 (ASHA).
    """
    tune, draw = require_package("ray.tune", "ray"), functools.partial(drawn, suggestions(config, search))
    if type(config).__module__ == "__main__":  # of `python -m`; in the processes of Ray, that is another module
        make_train = import_recipe(recipe_of(make_train), folder)
        config = stored_config(config_type(make_train), {"config": in_json(config)})
    updates = make_train(config).num_updates
    each = max(1, updates // 10)
    folder.mkdir(parents=True, exist_ok=True)
    check_same_search(folder, config, seeds, {**search, "engine": "ray", "trials": trials})
    kind = trainable(make_train, config, updates=each, num_seeds=seeds)
    if tune.Tuner.can_restore(path := str(folder.resolve())):
        tuner = tune.Tuner.restore(path, trainable=kind, restart_errored=True)
    else:
        goal = {"metric": "episode_return", "mode": "max"}
        search_alg = require_package("ray.tune.search.optuna", "ray").OptunaSearch(draw, **goal)
        scheduler = tune.schedulers.ASHAScheduler(max_t=updates // each)
        how: Any = {"search_alg": search_alg, "scheduler": scheduler, "num_samples": trials, "reuse_actors": True}
        where = tune.RunConfig(name=folder.name, storage_path=str(folder.parent.resolve()))
        tuner = tune.Tuner(kind, tune_config=tune.TuneConfig(**goal, **how), run_config=where)
    found = tuner.fit()
    known = [x for x in found if np.isfinite((x.metrics or {}).get("episode_return", np.nan))]
    complete = sum(x.metrics["updates"] == updates // each * each for x in known)
    ended = {"complete": complete, "pruned": found.num_terminated - complete, "fail": found.num_errors}
    if not known:  # all trials failed, or no episode ended
        return ended
    best = found.get_best_result()
    write_whole(folder / "best.yaml", require_package("yaml", "train").safe_dump(best.config).encode())
    return {**ended, "value": best.metrics["episode_return"], "best": best.config}
