"""Trials of a search of hyperparameters, as Optuna and Ray Tune run them: what they may change, and their programs."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from .._base.errors import UserValueError
from .._base.extras import require_package
from ..functional._errors import did_you_mean
from ._files import plain, write_json
from ._folder import in_json, listed
from ._train import Train, seed_keys


def check_fields(where: str, config: Any, names: Iterable[str]) -> None:
    """Raise unless all names are fields of a configuration."""
    fields = [field.name for field in dataclasses.fields(config)]
    for name in names:
        if name not in fields:
            hint = did_you_mean(name, fields) or f": its fields are {', '.join(fields)}"
            raise UserValueError(f"has no field {name!r}{hint}", where=where, argument="config")


def check_same_search(folder: Path, config: Any, num_seeds: int, search: Mapping[str, Any]) -> None:
    """Raise if a folder has trials of another search, and otherwise record this one in it."""
    path, now = folder / "search.json", plain({**in_json(config), "num_seeds": num_seeds, "search": search})
    then = json.loads(path.read_text()) if path.exists() else now
    if changed := {name: (then.get(name), now.get(name)) for name in then | now if then.get(name) != now.get(name)}:
        raise UserValueError(
            f"{folder} holds a study of other runs; {listed(changed)}: keep these, or give another --name"
        )
    write_json(path, now)


def check_metric(where: str, train: Train, metric: str) -> None:
    """Raise unless the updates of a run have this metric."""
    if metric not in train.shapes[1]:
        says = f"must be a metric of the run, got {metric!r}{did_you_mean(metric, train.shapes[1])}"
        raise UserValueError(says, where=where, argument="metric")


def trial_programs(make_train: Callable[[Any], Train], config: Any, num_seeds: int) -> Callable[..., tuple[Any, Any]]:
    """Return a function of the fields that a trial changes, which returns its `init` and `advance`.

    That is `init() -> (state, number of updates)`, and `advance(state, updates) -> (state, metrics)`, with metrics of
    shape `[seeds, updates]`. Trials that differ in floats alone share their programs.
    """
    keys = seed_keys(config.seed, num_seeds).reshape(num_seeds)

    @functools.lru_cache(maxsize=16)
    def programs(**fixed: Any) -> tuple[Any, Any]:
        def init(numbers: Any) -> Any:
            train = make_train(dataclasses.replace(config, **fixed, **numbers))
            return jax.vmap(train.init)(keys), train.num_updates

        def advance(numbers: Any, state: Any, updates: int) -> Any:
            step = make_train(dataclasses.replace(config, **fixed, **numbers)).step
            return jax.vmap(lambda x: jax.lax.scan(lambda x, _: step(x), x, None, length=updates))(state)

        return jax.jit(init), jax.jit(advance, static_argnums=2)

    def of_trial(given: Mapping[str, Any]) -> tuple[Any, Any]:
        numbers = {name: float(x) for name, x in given.items() if isinstance(x, float)}
        init, advance = programs(**{name: x for name, x in given.items() if name not in numbers})
        return functools.partial(init, numbers), functools.partial(advance, numbers)

    return of_trial


def suggestions(config: Any, search: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return for each field of a search the method of Optuna's trials that draws it, and its arguments."""
    check_fields("sweep", config, search)
    return {name: _suggestion(name, getattr(config, name), given) for name, given in search.items()}


def drawn(suggested: Mapping[str, tuple[str, dict[str, Any]]], trial: Any) -> dict[str, Any]:
    """Draw the fields of a trial of Optuna."""
    return {name: getattr(trial, how)(name, **given) for name, (how, given) in suggested.items()}


def _suggestion(name: str, now: Any, given: Any) -> tuple[str, dict[str, Any]]:
    entries = set(given) if isinstance(given, Mapping) else set()
    kind = "categorical" if entries == {"choices"} else "int" if isinstance(now, int) else "float"
    numeric = {"low", "high"} <= entries <= {"low", "high", "log", "step"} and not isinstance(now, (bool, str, tuple))
    if kind != "categorical" and not numeric:
        says = f"must be a mapping with low and high, and perhaps log and step, or with choices, got {given!r}"
        raise UserValueError(says, where="sweep", argument=name)
    found: dict[str, Any]
    try:
        if kind == "categorical":
            found = {"choices": [float(x) if isinstance(now, float) else x for x in given["choices"]]}
        else:
            found = {at: x if at == "log" else float(x) for at, x in given.items()}  # YAML reads 1e-5 as a word
        if kind == "int":
            if not all(float(x).is_integer() for x in found.values()):
                raise ValueError("must have limits that are whole numbers")
            found = {at: x if at == "log" else int(x) for at, x in found.items()}
        distributions = require_package("optuna", "optuna").distributions
        getattr(distributions, f"{kind.title()}Distribution")(**found)  # raises if its limits cannot be
    except (TypeError, ValueError) as error:
        raise UserValueError(f"{error}, got {given!r}", where="sweep", argument=name) from None
    return f"suggest_{kind}", found
