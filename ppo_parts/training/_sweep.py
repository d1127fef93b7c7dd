"""Search the hyperparameters of a recipe with Optuna: `sweep` is the command, `objective` is for a study of your own.

python -m ppo_parts.recipes.cleanrl_ppo --sweep sweep.yaml --total-timesteps 5e4 --name sweep
"""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._base.doors import checked
from .._base.errors import UserValueError
from .._base.extras import require_package
from .._base.hyperparameters import check_count
from ._folder import in_json, listed
from ._train import Train, seed_keys


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
    suggestions = {name: _suggestion(config, name, given) for name, given in search.items()}
    ends = {name: x.get("choices") or (x["low"], x["high"]) for name, (_, x) in suggestions.items()}
    for at in (0, -1):  # raises if one is out of range, before there is a trial
        make_train(dataclasses.replace(config, **{name: values[at] for name, values in ends.items()}))
    programs = trial_programs(make_train, config, check_count("sweep", "num_seeds", num_seeds))

    def train_and_report(trial: Any) -> float:
        drawn = {name: getattr(trial, how)(name, **given) for name, (how, given) in suggestions.items()}
        numbers = {name: x for name, x in drawn.items() if suggestions[name][0] == "suggest_float"}
        ends, init, advance = programs(**{name: x for name, x in drawn.items() if name not in numbers})
        state, value = init(numbers), np.nan
        for piece in range(len(ends)):
            state, metrics = advance(numbers, state)
            if np.isfinite(metrics[metric]).any():  # otherwise no episode ended, and the last value still holds
                value = float(np.nanmean(metrics[metric]))
                trial.report(value, piece)
            if piece + 1 < len(ends) and trial.should_prune():
                raise optuna.TrialPruned
        return value

    return train_and_report


def trial_programs(
    make_train: Callable[[Any], Train], config: Any, num_seeds: int, each: int | None = None
) -> Callable[..., tuple[range, Any, Any]]:
    """Return a function of the fields that a trial changes, but for floats, that returns what all such trials share.

    That is the range of the updates after which a piece of a run ends, with `each` updates in a piece (None: a tenth);
    `init(numbers) -> state`; and `advance(numbers, state) -> (state, metrics)` for a piece. Floats are their arguments.
    """
    keys = seed_keys(config.seed, num_seeds).reshape(num_seeds)

    @functools.lru_cache(maxsize=16)
    def programs(**fixed: Any) -> tuple[range, Any, Any]:
        def train(numbers: Any) -> Train:
            return make_train(dataclasses.replace(config, **fixed, **numbers))

        def advance(numbers: Any, state: Any) -> Any:
            step = train(numbers).step
            return jax.lax.scan(lambda state, _: step(state), state, None, length=length)

        updates = train({}).num_updates
        length = min(each or max(1, updates // 10), updates)
        init = jax.jit(lambda numbers: jax.vmap(train(numbers).init)(keys))
        return range(length, updates + 1, length), init, jax.jit(jax.vmap(advance, (None, 0)))

    return programs


def _suggestion(config: Any, name: str, given: Any) -> tuple[str, dict[str, Any]]:
    """Return the method of a trial that draws a field, and its arguments."""
    now, entries = getattr(config, name, ()), set(given) if isinstance(given, Mapping) else set()
    if entries == {"choices"} and hasattr(config, name):
        number: Any = float if isinstance(now, float) else lambda x: x  # YAML reads 1e-5 as a word
        return "suggest_categorical", {"choices": [number(x) for x in given["choices"]]}
    if isinstance(now, (bool, str, tuple)) or not {"low", "high"} <= entries <= {"low", "high", "log", "step"}:
        says = f"must be a field with low and high, and perhaps log and step, or with choices, got {given!r}"
        raise UserValueError(says, where="sweep", argument=name)
    kind: Any = int if isinstance(now, int) else float
    numbers = {at: x if at == "log" else float(x) for at, x in given.items()}
    if kind is int and not all(float(x).is_integer() for x in numbers.values()):
        raise UserValueError(f"must have limits that are whole numbers, got {given!r}", where="sweep", argument=name)
    numbers = {at: x if at == "log" else kind(x) for at, x in numbers.items()}
    return f"suggest_{kind.__name__}", numbers


def sweep(
    make_train: Callable[[Any], Train], config: Any, given: Mapping[str, Any], folder: Path, num_seeds: int = 1
) -> dict[str, Any]:
    """Run the trials of a study that are left, and return how many ended in which way, and the best.

    `given` is `search` of `objective` and "trials", their number, 100 by default. The study is `folder/study.db`, in
    SQLite: several processes may run its trials at once, and the same command continues it. `best.yaml` has the best
    values, as options for `--config`; `importance.png` shows how much each hyperparameter decides whether a trial is
    among the best tenth (PED-ANOVA).
    """
    optuna, lock = require_package("optuna", "optuna"), require_package("filelock", "train").FileLock(folder / ".lock")
    number = check_count("sweep", "trials", given.get("trials", 100))
    search = {name: x for name, x in given.items() if name != "trials"}
    train_and_report = objective(make_train, config, search, num_seeds=num_seeds)
    folder.mkdir(parents=True, exist_ok=True)
    engine = {"connect_args": {"timeout": 60}}  # seconds to wait while another process writes
    with lock:  # two processes cannot both create the tables
        storage = optuna.storages.RDBStorage(f"sqlite:///{(folder / 'study.db').resolve()}", engine_kwargs=engine)
        study = optuna.create_study(study_name="sweep", storage=storage, direction="maximize", load_if_exists=True)
        now = json.loads(json.dumps({**in_json(config), "num_seeds": num_seeds, "search": search}))
        then = study.user_attrs.get("runs", now)
        if changed := {
            name: (then.get(name), now.get(name)) for name in {**then, **now} if then.get(name) != now.get(name)
        }:
            raise UserValueError(
                f"{folder} holds a study of other runs; {listed(changed)}: keep these, or give another --name"
            )
        study.set_user_attr("runs", now)
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
        (folder / "best.yaml").write_text(require_package("yaml", "train").safe_dump(study.best_params))
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        axes = optuna.visualization.matplotlib.plot_param_importances(study, evaluator=evaluator)
        axes.figure.savefig(folder / "importance.png", dpi=110, bbox_inches="tight")
    return result | {"value": study.best_value, "best": study.best_params}
