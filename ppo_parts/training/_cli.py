"""The command line of a recipe, generated from the fields of its `Config` and of `RunOptions`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import decimal
import inspect
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from .._errors import UserError, UserValueError
from .._extras import require_package
from ..envs import is_discrete
from ..functional import ShapeError
from ._config import check_config, kinds_of, ranges
from ._config_file import stored_config, stored_run
from ._device import check_device, check_memory
from ._options import RunOptions, stored_options
from ._run import run
from ._train import Train


def main(
    make_train: Callable[[Any], Train],
    presets: Mapping[str, Any],
    argv: Sequence[str] | None = None,
    prog: str = "",
) -> dict[str, Any]:
    """Run the command line of a recipe, with the fields of its `Config`, `RunOptions`, and `--preset` as options.

    With `--resume` or `--init-from`, options that are not given keep their values from that run. A user error ends the
    process with a message of one sentence.

    Args:
        make_train: `make_train(config) -> Train`.
        presets: configurations by name; the first is the default. A name states which environments the preset is for:
            those whose own names contain it ("minatar" in "Breakout-MinAtar"), or those with "discrete" or "continuous"
            actions. If no preset was chosen and another one fits, a note is printed.
        argv: arguments; None: those of the process.
        prog: name of the command, for its help.

    Returns:
        The result, which is also written to `result.json`.
    """
    first = argparse.ArgumentParser(prog or None, add_help=False, allow_abbrev=False)
    first.add_argument("--preset")
    first.add_argument("--resume", type=Path)
    first.add_argument("--init-from", "--init_from", type=Path)
    known, _ = first.parse_known_args(argv)
    default = next(iter(presets)) if known.preset is None else known.preset
    if default not in presets:
        first.error(f"--preset {known.preset}: there are {', '.join(presets)}")
    with exit_on_user_error():
        config, options = presets[default], RunOptions()
        before, flag = (known.resume, "--resume") if known.resume is not None else (known.init_from, "--init-from")
        if before is not None:
            if known.preset is not None:
                raise UserValueError(
                    f"--preset {known.preset} is for new runs, and {flag} takes the settings of {before}: leave one of "
                    "them out"
                )
            stored = stored_run(before)
            config, options = stored_config(type(config), stored), stored_options(stored)
        given = _parsed(config, options, default, presets, argv, prog, sys.modules[make_train.__module__].__doc__)
        check_config(given.config, flags=True)
        check_config(given.run, flags=True)
        check_device()
        train = make_train(given.config)
        check_memory(train, given.run.num_seeds)
        if known.preset is None and before is None:
            _note_preset(fitting_preset(presets, given.config.env_id, train.env), default, given.config.env_id)
        result = run(train, given.config, given.run)
    if "interrupted_by" in result:
        raise SystemExit(128 + signal.Signals[result["interrupted_by"]])
    return result


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """End the process with a short message for errors that the user can fix; other errors keep their traceback.

    These errors are this library's own (`UserError`, `ShapeError`), those of the operating system, and Ctrl-C.
    """
    try:
        yield
    except (UserError, ShapeError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def _parsed(
    config: Any,
    options: RunOptions,
    preset: str,
    presets: Mapping[str, Any],
    argv: Sequence[str] | None,
    prog: str,
    description: str | None,
) -> Any:
    """Parse the command line into `config`, `run` and `preset`."""
    tyro = require_package("tyro", "train")

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def whole(info: Any) -> Any:
        if info.type is not int:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda given: whole_number(given[0]),
            is_instance=lambda x: isinstance(x, int) and not isinstance(x, bool),
            str_from_instance=lambda x: [str(x)],
        )

    names = Literal[tuple(presets)]  # type: ignore[valid-type]
    shown = _with_ranges(type(config), tyro.conf.arg)
    fields = [("config", shown), ("run", RunOptions), ("preset", names, dataclasses.field(default=preset))]
    arguments = dataclasses.make_dataclass("Arguments", fields)  # type: ignore[arg-type]
    with registry:
        given = tyro.cli(
            arguments,
            config=(tyro.conf.OmitArgPrefixes,),
            default=arguments(config=shown(**_fields(config)), run=options, preset=preset),
            args=argv,
            prog=prog or None,
            description=description,
        )
    return dataclasses.replace(given, config=type(config)(**_fields(given.config)))


def _fields(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _with_ranges(kind: type, arg: Callable[..., Any]) -> type:
    """Return the class of a configuration with the ranges of its fields, and their comments, in their help."""
    hints, comments, declared_ranges = get_type_hints(kind), _comments(kind), ranges(kind)

    def shown(name: str) -> Any:
        declared, said = declared_ranges.get(name), {"help": comments[name]} if name in comments else {}
        if declared is None:
            return Annotated[hints[name], arg(**said)]
        kinds = [get_args(x)[0] if get_origin(x) is tuple else x for x in kinds_of(hints[name])]
        numeric, *_ = (x.__name__.upper() for x in kinds if x in (int, float))
        words = [str(word) for x in kinds if get_origin(x) is Literal for word in get_args(x)]
        words += ["None"] * (type(None) in kinds)
        return Annotated[hints[name], arg(metavar="|".join([f"{numeric} in {declared}", *words]), **said)]

    fields = [(name, shown(name)) for name in {**declared_ranges, **comments}]
    made = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True, kw_only=True)
    for name in ("__module__", "__qualname__", "__firstlineno__"):  # where tyro finds the comments beside the fields
        if hasattr(kind, name):
            setattr(made, name, getattr(kind, name))
    return made


def _comments(kind: type) -> dict[str, str]:
    """The comments at the ends of the lines on which a dataclass declares its fields."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # a class without a file, made in a console
        return {}
    found = {}
    for line in source.splitlines():
        name, _, rest = line.strip().partition(":")
        _, marker, comment = rest.rpartition("  # ")
        if marker and name in kind.__dataclass_fields__:  # type: ignore[attr-defined]
            found[name] = comment.strip()
    return found


def whole_number(text: str) -> int:
    """Parse a whole number: "1000000", "1_000_000" or "1e6".

    Example:
        >>> whole_number("5e5"), whole_number("1_000"), whole_number("2.5e3")
        (500000, 1000, 2500)
        >>> whole_number("1.5")
        Traceback (most recent call last):
        ...
        ValueError: '1.5' is not a whole number
    """
    try:
        number = decimal.Decimal(text)
    except decimal.InvalidOperation:
        raise ValueError(f"{text!r} is not a whole number") from None
    if number.is_finite() and number.adjusted() > 30:
        raise ValueError(f"{text!r} is too large")
    if not number.is_finite() or number != int(number):
        raise ValueError(f"{text!r} is not a whole number")
    return int(number)


def fitting_preset(presets: Collection[str], env_id: str, env: Any) -> str:
    """Return the name of the preset that fits an environment: by its name, by its actions, or else the first."""
    default, *_ = presets
    named = [name for name in presets if name in env_id.lower()]
    kind = "discrete" if is_discrete(env.action_space) else "continuous"
    return next((name for name in (*named, kind) if name in presets), default)


def _note_preset(fitting: str, used: str, env_id: str) -> None:
    if fitting != used:
        print(
            f"note: {env_id} with the settings of --preset {used}; those of --preset {fitting} are made for "
            "environments like it",
            file=sys.stderr,
        )
