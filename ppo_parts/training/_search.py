"""Searches for hyperparameters of a recipe, with `--sweep` and functions for Optuna and Ray Tune."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax
import numpy as np

from .._base.checked import Count, checked
from .._base.command_line import whole_number
from .._base.extras import require_package
from .._base.hyperparameters import VALUE_NEEDED, check_count
from ..errors import UserError, UserTypeError, UserValueError
from ..functional._arguments import check_as
from ..functional._errors import did_you_mean
from . import _stored
from ._checkpoint import Checkpoints
from ._config import check_config
from ._files import RunExistsError, average_finite, write_json, write_whole
from ._processes import logger
from ._program import compiler_options, keep_compiled_programs
from ._train import Train, make_keys


def check_fields(where: str, config: Any, names: Iterable[str]) -> None:
    """Raise unless all names are fields of a configuration."""
    fields = [field.name for field in dataclasses.fields(config)]
    for name in names:
        if name not in fields:
            hint = did_you_mean(name, fields) or f": its fields are {', '.join(fields)}"
            raise UserValueError(f"has no field {name!r}{hint}", where=where, argument="config")
        if name == "seed":
            says = "a search has no field 'seed', because all trials share the keys of the configuration's seed"
            raise UserValueError(f"{where}: {says}: give num_seeds (--num-seeds) to train with several")


def check_same_search(folder: Path, config: Any, num_seeds: int, search: Mapping[str, Any]) -> None:
    """Raise if a folder has a run or trials of another search; otherwise record this search in it."""
    if (folder / "config.json").exists():
        raise RunExistsError(f"{folder} holds a run: give another --name")
    path, now = folder / "search.json", {**_stored.encode_config(config), "num_seeds": num_seeds, "search": search}
    then = json.loads(path.read_text()) if path.exists() else now
    if changed := _stored.compare_settings(then, now):
        says = f"{folder} holds a study of other runs; {_stored.format_changes(changed)}"
        raise UserValueError(f"{says}: keep these, or give another --name")
    write_json(path, now)


def check_metric(where: str, train: Train, metric: str) -> None:
    """Raise unless the updates of a run have this metric."""
    if metric not in train.shapes[1]:
        says = f"must be a metric of the run, got {metric!r}{did_you_mean(metric, train.shapes[1])}"
        raise UserValueError(says, where=where, argument="metric")


def make_trial_programs(
    make_train: Callable[[Any], Train], config: Any, num_seeds: int
) -> Callable[..., tuple[Any, Any]]:
    """Return a function of the fields that a trial changes; trials that differ only in floats share programs.

    With environments on the host, each trial compiles its own programs, because these belong to one environment. The
    function returns `init() -> (state, number of updates)` and `advance(state, updates) -> (state, metrics)`, partial
    applications of compiled functions; metrics are `[seeds, updates]`.
    """
    keys = make_keys(config.seed, num_seeds).reshape(num_seeds)

    def make_traced(fixed: Mapping[str, Any], numbers: Mapping[str, Any]) -> Train:
        try:
            return make_train(dataclasses.replace(config, **fixed, **numbers))
        except VALUE_NEEDED as error:
            raise UserTypeError(
                f"make_train must not need the value of {' or '.join(numbers)}, because trials share a program in "
                "which it is traced: compute with jax.numpy, without float(), math or if"
            ) from error

    def compile_programs(make: Callable[[Any], Train]) -> tuple[Any, Any]:
        def init(numbers: Any) -> Any:
            train = make(numbers)
            return jax.vmap(train.init)(keys), train.num_updates

        def advance(numbers: Any, state: Any, updates: int) -> Any:
            step = make(numbers).step
            return jax.vmap(lambda x: jax.lax.scan(lambda x, _: step(x), x, None, length=updates))(state)

        options = compiler_options()
        return jax.jit(init, compiler_options=options), jax.jit(advance, static_argnums=2, compiler_options=options)

    @functools.lru_cache(maxsize=16)
    def share_programs(**fixed: Any) -> tuple[Any, Any]:
        return compile_programs(functools.partial(make_traced, fixed))

    def select(given: Mapping[str, Any]) -> tuple[Any, Any]:
        train = make_train(dataclasses.replace(config, **given))
        numbers = {name: float(x) for name, x in given.items() if isinstance(x, float)}
        if train.on_host:
            init, advance = compile_programs(lambda numbers: train)
        else:
            init, advance = share_programs(**{name: x for name, x in given.items() if name not in numbers})
        return functools.partial(init, numbers), functools.partial(advance, numbers)

    return select


def read_search(config: Any, search: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return, for each field of a search, the method of an Optuna trial that draws it, and its arguments."""
    if not search:
        raise UserValueError("must name a field to search, got {}", where="sweep", argument="search")
    check_fields("sweep", config, search)
    distributions, found = require_package("optuna", "optuna").distributions, {}
    for name, given in search.items():
        parse = _find_parser(get_type_hints(type(config))[name])
        entries = set(given) if isinstance(given, Mapping) else set()
        in_range = {"low", "high"} <= entries <= {"low", "high", "log", "step"}
        chosen = entries == {"choices"} and isinstance(given["choices"], list | tuple)
        if not chosen and not (parse and in_range):
            ranges = "" if parse is None else ", or with low and high, and perhaps log and step"
            raise UserValueError(
                f"must be a mapping with a list of choices{ranges}, got {given!r}", where="sweep", argument=name
            )
        check_as("sweep", f"log of {name}", given.get("log", False), bool)
        try:
            if parse and in_range:
                kind = "int" if parse is whole_number else "float"
                arguments = {entry: x if entry == "log" else parse(str(x)) for entry, x in given.items()}
            else:
                kind, arguments = "categorical", {"choices": [_read_choice(parse, x) for x in given["choices"]]}
            getattr(distributions, f"{kind.title()}Distribution")(**arguments)  # raises if its limits are invalid
        except (TypeError, ValueError) as error:
            raise UserValueError(f"cannot be drawn from {given!r}: {error}", where="sweep", argument=name) from None
        found[name] = f"suggest_{kind}", arguments
    return found


def _find_parser(hint: Any) -> Callable[[str], float] | None:
    """Return the parser of a field's numbers (YAML reads 1e-5 as a string), or None if it has no numbers."""
    kinds = () if get_origin(hint) is tuple else (hint, *get_args(hint))
    return next((parse for kind, parse in ((int, whole_number), (float, float)) if kind in kinds), None)


def _read_choice(parse: Callable[[str], float] | None, x: Any) -> Any:
    if not isinstance(x, int | float | str | None):
        raise ValueError(f"a study stores numbers, words, True, False and None, not {x!r}")
    if parse is not None and not isinstance(x, bool | None):
        with contextlib.suppress(ValueError):  # a word, such as "auto"
            return parse(str(x))
    return x


def _check_search(make_train: Callable[[Any], Train], config: Any, suggested: Mapping[str, Any]) -> tuple[Any, Train]:
    """Raise unless a recipe accepts every choice and both ends of every range; return first values and a run."""
    ends = {name: x.get("choices") or (x["low"], x["high"]) for name, (_, x) in suggested.items()}
    first = {name: values[0] for name, values in ends.items()}
    for name, value in ((name, value) for name, values in ends.items() for value in values):
        check_config(changed := dataclasses.replace(config, **{**first, name: value}))
        train = make_train(changed)
    return first, train


def draw_fields(suggested: Mapping[str, tuple[str, dict[str, Any]]], trial: Any) -> dict[str, Any]:
    """Draw the fields of an Optuna trial."""
    return {name: getattr(trial, how)(name, **given) for name, (how, given) in suggested.items()}


@checked
def objective(
    make_train: Callable[[Any], Train],
    config: Any,
    search: Mapping[str, Any],
    *,
    metric: str = "episode_return",
    num_seeds: Count = 1,
) -> Callable[[Any], float]:
    """Make the objective of an Optuna study, which trains with a trial's hyperparameters and returns a metric.

    A trial reports the metric after each tenth of its updates (rounded down), and a pruner may end it there. All trials
    share one compiled program with floats as arguments; each combination of other values compiles its own.

    Args:
        make_train: a recipe's `make_train(config) -> Train`.
        config: the configuration, whose other fields keep their values.
        search: for each field, the arguments of Optuna's `suggest_float`, `suggest_int` or `suggest_categorical`, such
            as `{"learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}, "num_steps": {"choices": [32, 64]}}`.
        metric: name of the metric, whose value is the mean over the seeds and the updates since the last report.
        num_seeds: seeds of each trial, from `config.seed` on, in one program. Confirm the best trial with others.

    Returns:
        `objective(trial) -> float` for `study.optimize`. If the metric is never finite, it is NaN, and the trial fails.
    """
    optuna = require_package("optuna", "optuna")
    suggested = read_search(config, search)
    first, train = _check_search(make_train, config, suggested)
    check_metric("objective", train, metric)
    programs = make_trial_programs(make_train, config, num_seeds)
    if not train.on_host:
        init, _ = programs(first)
        init.func.eval_shape(*init.args)  # raises if the recipe cannot be traced; a later call does not trace again

    def train_and_report(trial: Any) -> float:
        init, advance = programs(draw_fields(suggested, trial))
        (state, updates), value = init(), np.nan
        each = max(1, int(updates) // 10)
        for piece in range(int(updates) // each):
            if piece and trial.should_prune():
                raise optuna.TrialPruned
            state, metrics = advance(state, each)
            if np.isfinite(mean := average_finite(metrics[metric])):  # else no episode ended; keep the last value
                trial.report(value := mean, piece)
        return value

    return train_and_report


@checked
def trainable(make_train: Callable[[Any], Train], config: Any, *, updates: Count = 10, num_seeds: Count = 1) -> type:
    """Make a `ray.tune.Trainable` from a recipe, for a `ray.tune.Tuner` whose `param_space` has fields of `config`.

    An iteration is `updates` updates. It reports the mean of each metric over these updates and the seeds (if no value
    is finite, an earlier mean or NaN), and "updates", the number of updates so far. A trial ends when no whole
    iteration is left. Trials share programs as in `objective`, so population-based training does not compile again.
    """
    make_train(config)  # raises before any trial if it cannot work
    base: Any = require_package("ray.tune", "ray").Trainable

    class Trial(base):
        def setup(self, given: dict[str, Any]) -> None:
            keep_compiled_programs()  # shared by the trials' processes
            self.programs = make_trial_programs(make_train, config, num_seeds)
            self.reset_config(given)

        def reset_config(self, given: dict[str, Any]) -> bool:
            check_fields("trainable", config, given)
            check_config(dataclasses.replace(config, **given), where="trainable")
            self.init, self.advance = self.programs(given)
            self.begun: Any = None  # a restored trial needs no initial state
            self.done, self.known = 0, dict[str, float]()
            return True

        def step(self) -> dict[str, Any]:
            state, total = self.begun or self.init()
            each = min(updates, int(total))
            state, metrics = self.advance(state, each)
            means = {name: average_finite(x) for name, x in jax.device_get(dict(metrics)).items()}
            self.known = {name: x if np.isfinite(x) else self.known.get(name, x) for name, x in means.items()}
            self.begun, self.done = (state, total), self.done + each
            return {**self.known, "updates": self.done, "done": self.done + each > int(total)}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            Checkpoints(checkpoint_dir).save(self.done, self.begun)

        def load_checkpoint(self, checkpoint: Any) -> None:
            self.done, self.begun = Checkpoints(checkpoint).restore(jax.eval_shape(self.init))

    return Trial


def sweep(
    make_train: Callable[[Any], Train], config: Any, given: Mapping[str, Any], folder: Path, num_seeds: int = 1
) -> dict[str, Any]:
    """Run the remaining trials of a study, and return how many ended in which way and the best one.

    `given` is the `search` of `objective`, with "trials", their number (100 by default), and "engine", "optuna" (the
    default) or "ray" (`sweep_with_ray`); docs/sweeps.md says what several processes and a second call do. A trial fails
    if the recipe rejects its combination of values. `importance.png` shows how much each hyperparameter decides whether
    a trial is among the best tenth (PED-ANOVA).
    """
    number, engine = check_count("sweep", "trials", given.get("trials", 100)), given.get("engine", "optuna")
    check_as("sweep", "engine", engine, Literal["optuna", "ray"])
    search = {name: x for name, x in given.items() if name not in ("trials", "engine")}
    if engine == "ray":
        return sweep_with_ray(make_train, config, search, number, folder, num_seeds)
    optuna, lock = require_package("optuna", "optuna"), require_package("filelock", "train").FileLock(folder / ".lock")
    train_and_report = objective(make_train, config, search, num_seeds=num_seeds)
    choices = {name: x["choices"] for name, (_, x) in read_search(config, search).items() if "choices" in x}
    grid = optuna.samplers.GridSampler(choices) if len(choices) == len(search) else None
    number = number if grid is None else min(number, math.prod(map(len, choices.values())))
    folder.mkdir(parents=True, exist_ok=True)
    waits = {"connect_args": {"timeout": 60}}  # seconds to wait while another process writes
    with lock:  # only one process may create the tables
        check_same_search(folder, config, num_seeds, search)
        storage = optuna.storages.RDBStorage(f"sqlite:///{(folder / 'study.db').resolve()}", engine_kwargs=waits)
        study = optuna.create_study(
            study_name="sweep", storage=storage, sampler=grid, direction="maximize", load_if_exists=True
        )
    ended = tuple(state for state in optuna.trial.TrialState if state.is_finished())
    if (left := number - len(study.get_trials(states=ended))) > 0:
        logger.info(f"{folder}: {left} of {number} trials are left; the first one waits for its program to be compiled")
        at_the_end = optuna.study.MaxTrialsCallback(number, ended)
        study.optimize(train_and_report, left, catch=UserError, callbacks=[at_the_end])
    result = {state.name.lower(): len(study.get_trials(states=(state,))) for state in ended}
    if not result["complete"]:
        return result
    with lock:
        write_whole(folder / "best.yaml", require_package("yaml", "train").safe_dump(study.best_params).encode())
        if result["complete"] > 2:  # the two best trials are compared with all
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            found = optuna.importance.get_param_importances(study, evaluator=evaluator)
            axes = require_package("matplotlib.figure", "train").Figure(layout="constrained").subplots()
            axes.bar_label(axes.barh([*found][::-1], [*found.values()][::-1]), fmt="%.2f")
            axes.set(xlim=(0, 1.1), xlabel="importance of hyperparameters")
            axes.figure.savefig(folder / "importance.png", dpi=110)
    return result | {"value": study.best_value, "best": study.best_params}


def sweep_with_ray(
    make_train: Callable[[Any], Train], config: Any, search: Mapping[str, Any], trials: int, folder: Path, seeds: int
) -> dict[str, Any]:
    """Run the trials of `sweep` in Ray processes, with early stops by ASHA; the search continues in `folder`.

    Reference: Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning", arXiv:1810.05934 (ASHA).
    """
    _check_search(make_train, config, suggested := read_search(config, search))
    tune = require_package("ray.tune", "ray")
    if type(config).__module__ == "__main__":  # under `python -m`; in Ray's processes, this is another module
        make_train = _stored.import_recipe(_stored.name_recipe(make_train), folder)
        fields = {"config": _stored.encode_config(config)}
        config = _stored.restore_config(_stored.find_config_type(make_train), fields)
    updates = make_train(config).num_updates
    each = max(1, updates // 10)
    folder.mkdir(parents=True, exist_ok=True)
    check_same_search(folder, config, seeds, {**search, "engine": "ray", "trials": trials})
    kind = trainable(make_train, config, updates=each, num_seeds=seeds)
    if tune.Tuner.can_restore(path := str(folder.resolve())):
        tuner = tune.Tuner.restore(path, trainable=kind, restart_errored=True)
    else:
        goal = {"metric": "episode_return", "mode": "max"}
        draw = functools.partial(draw_fields, suggested)
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
