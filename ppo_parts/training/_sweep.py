"""Search the hyperparameters of a recipe: `sweep` is the command, `objective` is for an Optuna study of your own.

python -m ppo_parts.recipes.cleanrl_ppo --sweep sweep.yaml --total-timesteps 5e4 --name sweep
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .._base.doors import check_as, checked
from .._base.extras import require_package
from .._base.hyperparameters import check_count
from ._files import write_whole
from ._train import Train
from ._trials import check_metric, check_same_search, drawn, suggestions, trial_programs


@checked
def objective(
    make_train: Callable[[Any], Train],
    config: Any,
    search: Mapping[str, Any],
    *,
    metric: str = "episode_return",
    num_seeds: int = 1,
) -> Callable[[Any], float]:
    """Make the objective of an Optuna study: a run with the hyperparameters of a trial, and its metric at the end.

    A trial reports the metric after each tenth of its updates (rounded down), and a pruner may end it there. Floats are
    arguments of one compiled program that all trials share; each combination of other values compiles its own. All
    trials have the same seeds, `config.seed` and those after it: confirm the best trial with others.

    Args:
        make_train: a recipe's `make_train(config) -> Train`.
        config: the configuration, whose other fields keep their values.
        search: for each field the arguments of Optuna's `suggest_float`, `suggest_int` or `suggest_categorical`, such
            as `{"learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}, "num_steps": {"choices": [32, 64]}}`.
        metric: the metric; its value is the mean over the seeds and the updates since the last report.
        num_seeds: seeds of each trial, trained in one program.

    Returns:
        `objective(trial) -> float`, for `study.optimize`; NaN, with which a trial fails, if the metric is never finite.
    """
    optuna = require_package("optuna", "optuna")
    suggested = suggestions(config, search)
    ends = {name: x.get("choices") or (x["low"], x["high"]) for name, (_, x) in suggested.items()}
    for at in (0, -1):  # raises if one is out of range, before there is a trial
        train = make_train(dataclasses.replace(config, **{name: values[at] for name, values in ends.items()}))
    check_metric("objective", train, metric)
    programs = trial_programs(make_train, config, check_count("sweep", "num_seeds", num_seeds))

    def train_and_report(trial: Any) -> float:
        init, advance = programs(drawn(suggested, trial))
        (state, updates), value = init(), np.nan
        each = max(1, int(updates) // 10)
        for piece in range(int(updates) // each):
            if piece and trial.should_prune():
                raise optuna.TrialPruned
            state, metrics = advance(state, each)
            if np.isfinite(metrics[metric]).any():  # otherwise no episode ended, and the last value still holds
                value = float(np.nanmean(metrics[metric]))
                trial.report(value, piece)
        return value

    return train_and_report


def sweep(
    make_train: Callable[[Any], Train], config: Any, given: Mapping[str, Any], folder: Path, num_seeds: int = 1
) -> dict[str, Any]:
    """Run the trials of a study that are left, and return how many ended in which way, and the best.

    `given` is `search` of `objective`; "trials", their number, 100 by default; and "engine", "optuna" by default, or
    "ray" (`sweep_with_ray`). The study is `folder/study.db`, in SQLite: several processes may run its trials at once,
    and the same command continues it. `best.yaml` has the best values, as options for `--config`; `importance.png`
    shows how much each hyperparameter decides whether a trial is among the best tenth (PED-ANOVA).
    """
    number, engine = check_count("sweep", "trials", given.get("trials", 100)), given.get("engine", "optuna")
    check_as("sweep", "engine", engine, Literal["optuna", "ray"])
    search = {name: x for name, x in given.items() if name not in ("trials", "engine")}
    if engine == "ray":
        from ._ray import sweep_with_ray  # it imports the command line, which imports this module

        return sweep_with_ray(make_train, config, search, number, folder, num_seeds)
    optuna, lock = require_package("optuna", "optuna"), require_package("filelock", "train").FileLock(folder / ".lock")
    train_and_report = objective(make_train, config, search, num_seeds=num_seeds)
    folder.mkdir(parents=True, exist_ok=True)
    waits = {"connect_args": {"timeout": 60}}  # seconds to wait while another process writes
    with lock:  # two processes cannot both create the tables
        check_same_search(folder, config, num_seeds, search)
        storage = optuna.storages.RDBStorage(f"sqlite:///{(folder / 'study.db').resolve()}", engine_kwargs=waits)
        study = optuna.create_study(study_name="sweep", storage=storage, direction="maximize", load_if_exists=True)
    ended = tuple(state for state in optuna.trial.TrialState if state.is_finished())
    if (left := number - len(study.get_trials(states=ended))) > 0:
        study.optimize(train_and_report, left, callbacks=[optuna.study.MaxTrialsCallback(number, ended)])
    result = {state.name.lower(): len(study.get_trials(states=(state,))) for state in ended}
    if result["complete"] < 2:  # nothing to compare
        return result
    matplotlib = require_package("matplotlib", "train")
    matplotlib.use("Agg")
    silent = warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning)
    with lock, silent, matplotlib.rc_context():  # optuna sets a style of its own
        write_whole(folder / "best.yaml", require_package("yaml", "train").safe_dump(study.best_params).encode())
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        axes = optuna.visualization.matplotlib.plot_param_importances(study, evaluator=evaluator)
        axes.figure.savefig(folder / "importance.png", dpi=110, bbox_inches="tight")
    return result | {"value": study.best_value, "best": study.best_params}
