"""Every public name with bad arguments: is the error clear, is it unclear, or is there none?

    python -m benchmarks bad_input --json benchmarks/results/bad_input.jsonl#all

The names are found by inspection of the package, its families, `functional`, `distributions`, `envs`, `networks` and
`training`. Each is called with plausible arguments, by the names of its parameters, of which one at a time is replaced;
names that these arguments do not suit are listed and not called.
*Clear*: one of the package's errors, or Python's own about a call. *Unclear*: any other exception. *Accepted*: the call
returns; the record counts those per kind of value, because accepting is right for some (None where it is the default).
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

import ppo_parts as pp
from ppo_parts import distributions, envs, functional, networks, training
from ppo_parts.errors import UserError

from ._options import parser
from ._records import ROOT, write

FAMILIES = (pp, pp.tokens, pp.exploration, pp.critics, pp.regularizers, pp.symmetry, pp.optim)
ROOMS = (*FAMILIES, functional, distributions, envs, networks, training)
LEFT_OUT = {"main", "run", "load"}  # read the command line, or a folder
BAD: dict[str, Any] = {
    "None": None,
    "text": "x",
    "list": [[1.0], 2.0],
    "nan": float("nan"),
    "negative": -1.5,
    "an object": object(),
    "a wrong shape": np.ones((2, 3, 5), np.float32),
    "complex": np.ones((4, 2), np.complex64),
    "float8": jnp.ones((4, 2), jnp.float8_e4m3fn),
}
FLOATS, FLAGS = jnp.full((4, 2), 0.5), jnp.zeros((4, 2), bool)
GOOD: dict[str, Any] = {
    **dict.fromkeys(("gamma", "gae_lambda", "clip_eps", "coef", "alpha", "beta", "target_kl", "eps", "decay"), 0.5),
    **dict.fromkeys(("num_minibatches", "num_epochs", "num_rollouts", "every", "group", "length", "num_envs"), 2),
    **dict.fromkeys(("terminated", "truncated", "mask"), FLAGS),
    **dict.fromkeys(("env_id", "name"), "CartPole-v1"),
    "key": None,
}


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public callables of the rooms, each once."""
    seen: set[int] = set()
    for room in ROOMS:
        for name in getattr(room, "__all__", [x for x in dir(room) if not x.startswith("_")]):
            made = getattr(room, name)
            ours = str(getattr(made, "__module__", "")).startswith("ppo_parts")
            error = isinstance(made, type) and issubclass(made, BaseException)
            if callable(made) and ours and not error and id(made) not in seen and name not in LEFT_OUT:
                seen.add(id(made))
                yield f"{room.__name__}.{name}", made


def required(made: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a callable; none if it has no signature."""
    try:
        parameters = inspect.signature(made).parameters
    except (TypeError, ValueError):
        return {}
    return {name: x for name, x in parameters.items() if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)}


def outcome(made: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """How a call with these arguments ends."""
    parameters = required(made)
    first = [arguments[name] for name, x in parameters.items() if x.kind == x.POSITIONAL_ONLY]
    others = {name: x for name, x in arguments.items() if parameters[name].kind != inspect.Parameter.POSITIONAL_ONLY}
    quiet = contextlib.redirect_stdout(io.StringIO())
    try:
        with warnings.catch_warnings(), quiet, np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            made(*first, **others)
    except UserError:
        return "clear"
    except SystemExit:
        return "exits"
    except Exception as error:  # what is to be counted
        return f"unclear: {type(error).__name__}"
    return "accepted"


def measure() -> dict[str, Any]:
    """Counts of all calls, by the kind of bad value, and the names of those with unclear errors."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in BAD}
    unclear: dict[str, list[str]] = {}
    names, not_called = 0, list[str]()
    for where, made in public():
        parameters = required(made)
        given = {name: GOOD.get(name, FLOATS) for name, x in parameters.items() if x.default is x.empty}
        if not parameters or outcome(made, given) != "accepted":
            not_called.append(where)
            continue
        names += 1
        for parameter in parameters:
            for kind, value in BAD.items():
                found = outcome(made, given | {parameter: value})
                counts[kind][found.partition(":")[0]] += 1
                if found.startswith("unclear"):
                    unclear.setdefault(where, []).append(f"{parameter}={kind}: {found.removeprefix('unclear: ')}")
    total = sum(counts.values(), Counter[str]())
    return {
        "names": names,
        "calls": total.total(),
        "total": total,
        "by_kind": counts,
        "unclear": unclear,
        "not_called": not_called,
    }


def main() -> None:
    """Command line."""
    options = parser(__doc__, json=None).parse_args()
    with tempfile.TemporaryDirectory() as folder:  # some of the calls write files
        os.chdir(folder)
        results = measure()
        os.chdir(ROOT)
    for where, found in results["unclear"].items():
        print(f"{where}: {len(found)}, such as {found[0]}")
    for kind, counts in results["by_kind"].items():
        print(f"{kind:14} {dict(counts)}")
    named = f"{results['names']} names ({len(results['not_called'])} not called)"
    print(f"{named}, {results['calls']} calls: {dict(results['total'])}")
    write(options.json, results)
