"""The folder of a run: made once, written by one process, continued with its own configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ._options import KEPT, RunOptions
from ._records import plain, versions, write_json


@contextlib.contextmanager
def run_folder(config: Any, options: RunOptions, continued_from: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """The folder of a new run, with `config.json` in it, or of the one to resume; nobody else writes there meanwhile.

    Raises:
        FileExistsError: there is a run already, or another process at work.
        FileNotFoundError: there is none to resume. ValueError: it is of another configuration.
    """
    kept = {name: getattr(options, name) for name in KEPT}
    if options.resume is not None:
        stored = stored_run(options.resume)
        _check_same(stored, config, options)
        with _locked(options.resume):
            write_json(options.resume / "config.json", {**stored, "run": kept})
            yield options.resume
        return
    described = {"config": plain(dataclasses.asdict(config)), "run": kept}
    _check_stored(config, described)
    folder = _made(config, options)
    with _locked(folder):
        if (folder / "config.json").exists() or (folder / "checkpoints").exists():
            raise FileExistsError(
                f"{folder} holds a run already: continue it with --resume {folder}, or give another --name"
            )
        beginning = {} if continued_from is None else {"continued_from": continued_from}
        write_json(folder / "config.json", {**described, **beginning, "versions": versions()})
        yield folder


def stored_run(folder: Path) -> dict[str, Any]:
    """What `config.json` says of a run: config, run (options), versions, and what it was continued from, if it was."""
    try:
        return json.loads((folder / "config.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{folder} holds no run: it has no config.json") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / 'config.json'} cannot be read: {error}") from None


def stored_config(kind: type, stored: Mapping[str, Any]) -> Any:
    """The configuration of a run as the dataclass it was made from."""
    fields = {field.name for field in dataclasses.fields(kind)}
    if set(stored["config"]) != fields:
        differing = sorted(set(stored["config"]) ^ fields)
        named = ", ".join(differing[:3]) + f" and {len(differing) - 3} more" * (len(differing) > 3)
        raise ValueError(f"the run is of another recipe, or of another version of it: fields differ ({named})")
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in stored["config"].items()})


def _check_stored(config: Any, described: Mapping[str, Any]) -> None:
    back = stored_config(type(config), json.loads(json.dumps(described, default=str)))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if getattr(back, field.name) != value:
            raise ValueError(
                f"config.{field.name}={value!r} could not be read back from config.json: use numbers that are finite, "
                "strings, None, and tuples of them"
            )


def changes(stored: Mapping[str, Any], config: Any, options: RunOptions) -> dict[str, tuple[Any, Any]]:
    """Fields of the configuration (and `num_seeds`) that are not what they were: what they were, and what they are."""
    now = {**json.loads(json.dumps(plain(dataclasses.asdict(config)))), "num_seeds": options.num_seeds}
    then = {**stored["config"], "num_seeds": stored["run"]["num_seeds"]}
    return {
        name: (then.get(name, "(absent)"), now.get(name, "(absent)"))
        for name in {**then, **now}
        if name not in then or name not in now or then[name] != now[name]
    }


def _check_same(stored: Mapping[str, Any], config: Any, options: RunOptions) -> None:
    differences = [f"{name} was {was!r}, is {now!r}" for name, (was, now) in changes(stored, config, options).items()]
    if differences:
        raise ValueError(
            f"a resumed run keeps its configuration; {'; '.join(differences)}. To train it further with another one, "
            "begin a new run with --init-from"
        )
    before = stored["versions"]
    updated = [f"{name} {before.get(name)} (now {x})" for name, x in versions().items() if before.get(name) != x]
    if updated:
        print(f"begun with {', '.join(updated)}: the last bits may differ", file=sys.stderr)


def _made(config: Any, options: RunOptions) -> Path:
    if options.name is not None:
        folder = options.directory / options.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    name = f"{getattr(config, 'env_id', 'run')}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):  # several runs may begin within a second
        folder = options.directory / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        break
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; the lock goes when the process does, however that ends."""
    with (folder / ".lock").open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(f"{folder} is being written by another process") from None
        except (ImportError, OSError):  # no locks on this system, or on this file system
            pass
        yield
