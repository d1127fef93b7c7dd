"""The command line of a recipe, generated from the fields of its `Config` and of `RunOptions`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import decimal
import itertools
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from .._base.doors import check_as
from .._base.errors import UserError, UserTypeError, UserValueError
from .._base.extras import require_package
from ..envs import is_discrete
from ..envs._registry import without_settings
from ..functional._arguments import is_whole
from ._compiled import keep_compiled_programs
from ._config import Range, check_config, check_field, declared, kinds_of
from ._config_json import check_recipe, stored_config, stored_run
from ._devices import check_device, check_memory, devices_of
from ._files import parse_json
from ._messages import did_you_mean, logger, printed_messages
from ._options import RunOptions, stored_options
from ._processes import initialize
from ._recipe import check_trusted, recipe_of
from ._run import run as run_on_host
from ._train import Train
from ._writer import check_unused


def main(
    make_train: Callable[[Any], Train],
    presets: Mapping[str, Any],
    argv: Sequence[str] | None = None,
    prog: str = "",
    *,
    run: Callable[[Train, Any, RunOptions], dict[str, Any]] = run_on_host,
) -> dict[str, Any]:
    """Run the command line of a recipe, with the fields of its `Config`, `RunOptions`, and `--preset` as options.

    `--config FILE` reads options from a YAML or JSON file; those on the command line override them. With `--resume` or
    `--init-from`, options that are not given keep their values from that run. A user error ends the process with a
    one-sentence message.

    Args:
        make_train: `make_train(config) -> Train`.
        presets: configurations by name; the first is the default. A name states which environments the preset is for:
            those whose own names contain it ("minatar" in "Breakout-MinAtar"), or those with "discrete" or "continuous"
            actions. If no preset was chosen and another one fits, a note is printed.
        argv: arguments; None: those of the process.
        prog: name of the command, for its help.
        run: the function that trains, such as `functools.partial(training.run, on_rows=...)`.

    Returns:
        The result, which is also written to `result.json`.
    """
    if not isinstance(presets, Mapping) or not presets or not all(map(dataclasses.is_dataclass, presets.values())):
        raise UserTypeError(f"must map names to configurations, got {presets!r}", where="main", argument="presets")
    argv = list(sys.argv[1:] if argv is None else argv)
    kind, recipe = type(next(iter(presets.values()))), recipe_of(make_train)
    hints = {**get_type_hints(RunOptions), **get_type_hints(kind)}
    with exit_on_user_error(hints), printed_messages():
        _check_switches(argv, hints)
        in_file = _options_in_file(_known(argv, prog).config, kind, tuple(presets))
        known = _known(argv, prog, **in_file)
        config, options, preset = _defaults(known, presets, recipe)
        defaults = Arguments(_replaced(config, in_file), _replaced(options, in_file), preset)
        given = _parsed(defaults, presets, argv, prog, sys.modules[make_train.__module__].__doc__)
        check_config(given.settings)
        check_config(given.run)
        if given.run.name is not None and known.resume is None and not given.run.distributed:
            check_unused(given.run.directory / given.run.name)  # again in `run`; here before anything is traced
        if given.run.distributed:
            initialize(given.run.heartbeat_timeout)
        check_device()
        keep_compiled_programs()
        settings = given.settings if known.resume is not None else with_shards(given.settings, given.run)
        train = make_train(settings).of_recipe(recipe)
        check_memory(train, given.run.num_seeds, devices_of(given.run))
        chosen = known.preset or known.resume or known.init_from
        fitting = preset if chosen else fitting_preset(presets, settings.env_id, train.env)
        if fitting != preset:
            logger.warning(
                f"note: {settings.env_id} is trained with the settings of --preset {preset}; --preset {fitting} is "
                "meant for environments like it"
            )
        result = run(train, settings, given.run)
    number = getattr(signal, result.get("interrupted_by", ""), None)
    if number is not None:
        raise SystemExit(128 + number)
    return result


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Everything that a command line gives; the fields of `settings` and of `run` are flags of their own.

    Attributes:
        settings: the configuration.
        run: the options of the run.
        preset: the name of the configuration that other flags modify.
        config: a file of options, which has been read already: its values are the defaults of the others.
        trust: see `check_trusted`.
    """

    settings: Any
    run: RunOptions
    preset: Annotated[str, "complete configuration, which the other options modify"]
    config: Annotated[
        Path | None, "YAML or JSON file with values of these options by name; those on the command line override them"
    ] = None
    trust: Annotated[
        bool, "with --resume or --init-from: import the module of an environment that the run's config.json names"
    ] = False


def with_shards(config: Any, options: RunOptions) -> Any:
    """Give the configuration as many shards as devices, unless it sets their number, or there are several seeds.

    The number of shards is recorded, because it changes what is learned. The number of devices is not.
    """
    number = devices_of(options)
    if number == 1 or options.num_seeds > 1 or getattr(config, "shards", number) is not None:
        return config
    return dataclasses.replace(config, shards=number)


@contextlib.contextmanager
def exit_on_user_error(fields: Collection[str] = ()) -> Iterator[None]:
    """End the process with a sentence for errors of this library (`UserError`), of the operating system, and Ctrl-C.

    Other errors keep their traceback.

    Args:
        fields: names of fields that are flags of a command line; an error about one of them names the flag.
    """
    try:
        yield
    except UserError as error:
        raise SystemExit(f"error: {with_flag(error, fields)}") from error
    except OSError as error:
        known = error.filename is not None and error.strerror
        raise SystemExit(f"error: {error.filename}: {error.strerror}" if known else f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def with_flag(error: Exception, fields: Collection[str]) -> str:
    """Return the text of an error; if the error is about a field that is a flag, the text names the flag.

    Example:
        >>> from ppo_parts.errors import UserValueError
        >>> with_flag(UserValueError("must be at least 1, got 0", where="Config", argument="num_envs"), ["num_envs"])
        '--num-envs must be at least 1, got 0'
    """
    if isinstance(error, UserError) and error.argument in fields:
        return f"{_flag(error.argument)} {error.message}"
    return str(error)


def _defaults(known: argparse.Namespace, presets: Mapping[str, Any], recipe: str) -> tuple[Any, RunOptions, str]:
    """Return what other flags modify, the configuration and the options of a preset or an older run; and a preset."""
    preset = next(iter(presets)) if known.preset is None else known.preset
    check_as("", "--preset", preset, Literal[tuple(presets)])
    before, flag = (known.resume, "--resume") if known.resume is not None else (known.init_from, "--init-from")
    if before is None:
        return presets[preset], RunOptions(), preset
    if known.preset is not None:
        raise UserValueError(
            f"--preset {preset} is for new runs, and {flag} takes the settings of {before}: leave one of them out"
        )
    stored = stored_run(before)
    if known.resume is not None:
        there = known.resume.resolve()
        other_name = known.name is not None and not there.as_posix().endswith(f"/{known.name}")
        other_directory = known.directory is not None and known.directory.resolve() not in there.parents
        if other_name or other_directory:
            given = f"--name {known.name}" if other_name else f"--directory {known.directory}"
            raise UserValueError(f"{given} is for new runs, and --resume continues {known.resume} where it is")
        check_recipe(stored, recipe)
    check_trusted(stored, before, known.trust or known.env_id is not None, recipe=False)
    return stored_config(type(presets[preset]), stored), stored_options(stored), preset


def _known(argv: Sequence[str], prog: str, **defaults: Any) -> argparse.Namespace:
    """Read the flags that decide what the defaults of the others are."""
    first = argparse.ArgumentParser(prog or None, add_help=False, allow_abbrev=False)
    for name in ("preset", "name", "env-id"):
        first.add_argument(f"--{name}", f"--{name.replace('-', '_')}")
    for name in ("resume", "init-from", "directory"):
        first.add_argument(f"--{name}", f"--{name.replace('-', '_')}", type=Path)
    first.add_argument("--config", type=Path, action="append", default=[])
    first.add_argument("--trust", action="store_true")
    first.set_defaults(**defaults)
    return first.parse_known_args(argv)[0]


def _replaced(default: Any, values: Mapping[str, Any]) -> Any:
    """Replace those fields of a dataclass that `values` has."""
    names = {field.name for field in dataclasses.fields(default)}
    return dataclasses.replace(default, **{name: x for name, x in values.items() if name in names})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_switches(argv: Sequence[str], hints: Mapping[str, Any]) -> None:
    """Raise if a value follows a flag that takes none; the message names the flags for True and for False."""
    for given, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        flag, _, value = given.partition("=")
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        value = value or following
        if flag.startswith("--") and hints.get(name) is bool and value.lower() in ("true", "false"):
            yes = _flag(name)
            raise UserValueError(f"{flag} takes no value, got {value!r}: write {yes}, or --no-{yes[2:]} for False")


def _options_in_file(paths: Sequence[Path], kind: type, presets: tuple[str, ...]) -> dict[str, Any]:
    """Return the options in the file of `--config` by name, none without a file; `kind` is the class of `settings`."""
    hints = {**get_type_hints(RunOptions), **get_type_hints(kind), "preset": Literal[presets]}
    ranges = declared(RunOptions, Range) | declared(kind, Range)
    if len(paths) > 1:
        raise UserValueError(f"--config is given {len(paths)} times: join {paths[0]} and the others")
    found = {}
    for path in paths:
        for key, value in _read_config(path).items():
            name = str(key).replace("-", "_")
            if name not in hints:
                raise UserValueError(f"{path}: {key!r} is not an option of a file{did_you_mean(name, hints)}")
            try:
                found[name] = _from_file(str(key), value, hints[name], ranges.get(name))
            except UserError as error:
                raise UserValueError(f"{path}: {key} {error.message}") from None
    return found


def _from_file(key: str, value: Any, hint: Any, limits: Range | None) -> Any:
    """Return the value of an option in a file, as the type of the option."""
    several = get_origin(hint) is tuple
    if isinstance(value, dict) or (isinstance(value, list) and not several):
        raise UserValueError(f"must be one value, got {value!r}")
    kinds = kinds_of(get_args(hint)[0] if several else hint)
    if isinstance(value, str) and value.lower() == "none" and type(None) in kinds:
        raise UserValueError(f"is the text {value!r}: write null for None")
    if several and isinstance(value, str):
        raise UserValueError(f"must be a list, such as [64, 64], got {value!r}")
    parsers: dict[type, Callable[[str], Any]] = {int: whole_number, float: float, Path: Path}
    parse = next((parsers[kind] for kind in parsers if kind in kinds), None)

    def parsed(x: Any) -> Any:
        try:
            return x if x is None or parse is None else parse(str(x))
        except ValueError:
            return x  # which the check below refuses

    given = tuple(map(parsed, value if isinstance(value, list) else [value])) if several else parsed(value)
    check_field("", key, given, hint, limits)
    return given


def _read_config(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        names: list[str] = []
        if path.suffix == ".json":
            content = parse_json(text)
        else:
            yaml = require_package("yaml", "train")
            content = yaml.safe_load(text)
            names = [key.value for key, _ in yaml.compose(text).value] if isinstance(content, dict) else []
    except (OSError, UserError):
        raise
    except Exception as error:  # not JSON, not YAML, or not text at all
        raise UserValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserValueError(f"{path} must map names of options to values, got {content!r}")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UserValueError(f"{path}: {twice[0]} is given {names.count(twice[0])} times: give it once")
    return content


def _parsed(
    default: Arguments, presets: Mapping[str, Any], argv: Sequence[str], prog: str, description: str | None
) -> Arguments:
    """Parse the command line; what is not given is as in `default`."""
    tyro = require_package("tyro", "train")
    constructors, registry = tyro.constructors, tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def whole(info: Any) -> Any:
        if info.type is not int:
            return None
        return constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda given: whole_number(given[0]),
            is_instance=is_whole,
            str_from_instance=lambda x: [str(x)],
        )

    @registry.struct_rule
    def described(info: Any) -> Any:
        """Give each field the help text and the range that its annotation declares."""
        kinds = {"settings": type(default.settings), "preset": Literal[tuple(presets)]}
        if info.type not in (Arguments, RunOptions, kinds["settings"]):
            return None
        hints, texts, ranges = get_type_hints(info.type), declared(info.type, str), declared(info.type, Range)
        hints |= kinds if info.type is Arguments else {}
        fields = [
            constructors.StructFieldSpec(
                name=field.name,
                type=_with_range(hints[field.name], ranges.get(field.name), tyro.conf.arg),
                default=getattr(info.default, field.name),
                helptext=texts.get(field.name),
            )
            for field in dataclasses.fields(info.type)
        ]
        return constructors.StructConstructorSpec(info.type, tuple(fields))

    given = {"config": (tyro.conf.OmitArgPrefixes,), "default": default, "args": argv, "prog": prog or None}
    with registry:
        return tyro.cli(Arguments, description=description, **given)


def _with_range(hint: Any, limits: Range | None, arg: Callable[..., Any]) -> Any:
    """Return a type whose numbers are shown as "FLOAT in [0, 1]" in the help."""
    if limits is None:
        return hint
    kinds = [get_args(x)[0] if get_origin(x) is tuple else x for x in kinds_of(hint)]
    numeric, *_ = (x.__name__.upper() for x in kinds if x in (int, float))
    words = [str(word) for x in kinds if get_origin(x) is Literal for word in get_args(x)]
    words += ["None"] * (type(None) in kinds)
    return Annotated[hint, arg(metavar="|".join([f"{numeric} in {limits}", *words]))]


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
    named = [name for name in presets if name in without_settings(env_id).lower()]
    kind = "discrete" if is_discrete(env.action_space) else "continuous"
    return next((name for name in (*named, kind) if name in presets), default)
