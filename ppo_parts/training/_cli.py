"""The command line of a recipe, generated from the fields of its `Config` and of `RunOptions`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from .._base.checked import checked
from .._base.command_line import whole_number
from .._base.extras import require_package
from ..errors import UserError, UserTypeError, UserValueError
from ..functional._arguments import check_as, is_whole
from ..functional._common import Range
from . import _stored
from ._config import RunOptions, check_config, check_name, format_finite, read_declared
from ._processes import initialize, logger, print_messages
from ._program import count_devices, keep_compiled_programs
from ._run import run as run_on_host
from ._search import sweep
from ._train import Train


@checked
def main(
    make_train: Callable[[Any], Train],
    presets: Mapping[str, Any],
    argv: Sequence[str] | None = None,
    *,
    run: Callable[[Train, Any, RunOptions], dict[str, Any]] = run_on_host,
) -> dict[str, Any]:
    """Run the command line of a recipe, whose options are the fields of its `Config`, `RunOptions`, and `--preset`.

    With `--resume` or `--init-from`, options that are not given keep their values from the earlier run. A user error
    ends the process with a one-sentence message.

    Args:
        make_train: `make_train(config: Config) -> Train`; the annotation determines the class of configurations.
        presets: configurations by name; the first is the default.
        argv: arguments; None means those of the process.
        run: the function that trains, such as `functools.partial(training.run, on_rows=...)`.

    Returns:
        The result of the run, which is also written to `result.json`.
    """
    if not presets or not all(map(dataclasses.is_dataclass, presets.values())):
        raise UserTypeError(f"must map names to configurations, got {presets!r}", where="main", argument="presets")
    _stored.find_config_type(make_train)  # raises if the run could not be loaded later
    first = next(iter(presets.values()))
    _stored.check_encodable(first)
    taken = {field.name for kind in (RunOptions, Arguments) for field in dataclasses.fields(kind)} - {"settings", "run"}
    fields = {field.name: getattr(first, field.name) for field in dataclasses.fields(first)}
    for name in fields.keys() & taken:
        says = "is also the name of an option of every run: rename the field"
        raise UserValueError(says, where="Config", argument=name)
    keys = [(name, key) for name, value in fields.items() if isinstance(value, dict) for key in value]
    for name, key in keys:  # each is an option, too
        if key in taken | fields.keys() or [x for _, x in keys].count(key) > 1:
            says = f"has the key {key!r}, which is also the name of another option: rename it"
            raise UserValueError(says, where="Config", argument=name)
    hints = {**get_type_hints(RunOptions), **get_type_hints(type(first))}
    with exit_on_user_error(hints), print_messages():
        words = list(sys.argv[1:] if argv is None else argv)
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        prog = None if spec is None else f"python -m {spec.name}"  # None means the file's name
        if [word.partition("=")[0] for word in words].count("--config") > 1:
            raise UserValueError("--config is given twice: put all options into one file")
        if (file := _parse_first(words, prog).config) is not None:
            words = [*_read_words(Path(file), hints, first), *words]
        known, module = _parse_first(words, prog), getattr(make_train, "func", make_train).__module__
        about = sys.modules[module].__doc__ or "Train a policy."
        if known.resume is not None and run is run_on_host:  # before its environment is made
            _stored.check_recipe(_stored.read_config(Path(known.resume)), _stored.name_recipe(make_train))
        given = _parse_all(_choose_defaults(known, presets), tuple(presets), words, prog, about)
        config, options = given.settings, given.run
        check_config(config)
        _stored.check_encodable(config)
        check_config(options)
        if options.distributed:
            initialize(options.heartbeat_timeout)
        keep_compiled_programs()
        devices = count_devices(options)
        if devices > 1 and options.num_seeds == 1 and known.resume is None and getattr(config, "shards", 1) is None:
            if config.num_envs % devices:
                says = f"must be a multiple of the {devices} devices (--num-devices), got {config.num_envs}"
                raise UserValueError(says, argument="num_envs")
            config = dataclasses.replace(config, shards=devices)  # recorded, because it changes the results
        if given.sweep is not None:
            if run is not run_on_host:
                raise UserValueError("--sweep does not call the run function of this recipe: leave --sweep out")
            return _sweep(make_train, config, options, given.sweep)
        result = run(_stored.recipe(make_train)(config), config, options)
    number = getattr(signal, result.get("interrupted_by", ""), None)
    if number is not None:
        raise SystemExit(128 + number)
    return result


def _sweep(make_train: Callable[[Any], Train], config: Any, options: RunOptions, file: Path) -> dict[str, Any]:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in ("name", "directory", "num_seeds", "progress", "tensorboard") and value != field.default:
            flag = f"--{'no-' * (value is False)}{field.name.replace('_', '-')}"
            raise UserValueError(f"{flag} does nothing in a --sweep: leave it out")
    check_name(options.name)
    folder = options.directory / (options.name or file.stem)
    found = sweep(make_train, config, _read_mapping(file), folder, options.num_seeds)
    logger.info(f"{folder}: {found}")
    return found


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a command line; each field of `settings` and `run` is a separate flag."""

    settings: Any
    run: RunOptions
    preset: Annotated[str, "complete configuration, which the other options modify"]
    config: Annotated[Path | None, "YAML or JSON file with these options by name; the command line overrides it"] = None
    sweep: Annotated[
        Path | None,
        "YAML or JSON file of a search: for each hyperparameter, low and high (and log), or choices; for the study, "
        "trials (their number) and engine (optuna or ray); the study is kept in the folder of --name",
    ] = None
    trust: Annotated[bool, "import the environment module named in config.json of --resume or --init-from"] = False


@contextlib.contextmanager
def exit_on_user_error(fields: Collection[str] = ()) -> Iterator[None]:
    """End the process with one sentence after a `UserError`, an error of the operating system, or Ctrl-C.

    Other errors, and those of environments on the host, keep their traceback. If an error concerns one of the `fields`,
    the message names its flag.
    """
    try:
        yield
    except UserError as error:
        flag = f"--{error.argument.replace('_', '-')} {error.message}" if error.argument in fields else error
        raise SystemExit(f"error: {flag}") from error
    except OSError as error:
        if hasattr(error, "__notes__"):  # by `envs.host_errors`
            raise
        known = error.filename is not None and error.strerror
        raise SystemExit(f"error: {error.filename}: {error.strerror}" if known else f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def _parse_first(words: Sequence[str], prog: str | None) -> argparse.Namespace:
    """Read the flags that determine the defaults of the other flags."""
    first = argparse.ArgumentParser(prog, add_help=False, allow_abbrev=False)
    for name in ("preset", "env-id", "resume", "init-from", "config"):  # tyro rejects them without a value
        first.add_argument(f"--{name}", f"--{name.replace('-', '_')}", nargs="?")
    first.add_argument("--trust", action=argparse.BooleanOptionalAction, default=False)
    given = first.parse_known_args(words)[0]
    return argparse.Namespace(**{name: None if x == "None" else x for name, x in vars(given).items()})  # null in a file


def _read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file."""
    yaml = require_package("yaml", "train")
    try:
        text = path.read_text()
        if path.suffix == ".json":
            content, pairs = json.loads(text), json.loads(text, object_pairs_hook=list)
        else:
            content, pairs = yaml.safe_load(text), getattr(yaml.compose(text), "value", None)
    except (yaml.YAMLError, ValueError) as error:
        raise UserValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserValueError(f"{path} must map names of options to values, got {content!r}")
    names = [str(getattr(key, "value", key)).replace("-", "_") for key, _ in pairs]  # `content` has no duplicates
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserValueError(f"{path} gives {twice[0]} twice: leave one of them out")
    return content


def _read_words(path: Path, hints: Mapping[str, Any], default: Any) -> list[str]:
    """Return the options in a YAML or JSON file as command-line words."""
    words, entries = list[str](), dict[str, Any]()
    for name, value in _read_mapping(path).items():
        field = str(name).replace("-", "_")
        known = getattr(default, field, None)
        if not isinstance(known, dict) or not isinstance(value, dict):
            entries[name] = value
            continue
        if other := [key for key in value if key not in known]:
            says = f"has no key {other[0]!r}, which {path} gives: its keys are {', '.join(known)}"
            raise UserValueError(says, argument=field)
        entries |= value
    for name, value in entries.items():
        field, flag = str(name).replace("-", "_"), str(name).replace("_", "-")
        if field == "config" and isinstance(value, dict):
            says = f'continue it with --resume {path.parent}, or copy what is under "config" into a file'
            raise UserValueError(f"{path} is of a run: {says}")
        if field == "config":
            raise UserValueError(f"{path} cannot name another file, {value}: write its options here")
        if hints.get(field) is bool and not isinstance(value, bool):
            raise UserValueError(f"must be true or false in {path}, got {value!r}", argument=field)
        if value is None and field in hints and type(None) not in get_args(hints[field]):
            raise UserValueError(f"must have a value in {path}: leave it out for the default", argument=field)
        hint = hints.get(field)
        if isinstance(value, bool) and field in hints and hint is not bool:
            if bool not in get_args(hint):
                says = f"must not be true or false in {path}: YAML reads yes, no, on and off so unless quoted"
                raise UserValueError(says, argument=field)
            value = str(value)
        kinds = next((get_args(kind) for kind in (hint, *get_args(hint)) if get_origin(kind) is tuple), ())
        several = isinstance(value, list) and kinds != ()
        if isinstance(value, list | dict) and field in hints and not several:
            raise UserValueError(f"must be one value in {path}, got {value!r}", argument=field)
        if several and ... not in kinds and len(value) != len(kinds):
            raise UserValueError(f"must be {len(kinds)} values in {path}, got {value!r}", argument=field)
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif several:
            words += [f"--{flag}", *map(str, value)]
        else:
            words.append(f"--{flag}={value}")
    return words


def _choose_defaults(known: argparse.Namespace, presets: Mapping[str, Any]) -> Arguments:
    """Return the settings that the other flags modify, from a preset or an older run."""
    preset = next(iter(presets)) if known.preset is None else known.preset
    check_as("", "--preset", preset, Literal[tuple(presets)])
    before, flag = (known.resume, "--resume") if known.resume is not None else (known.init_from, "--init-from")
    if before is None:
        return Arguments(presets[preset], RunOptions(), preset)
    if known.preset is not None:
        raise UserValueError(
            f"--preset {preset} is for new runs, and {flag} takes the settings of {before}: leave one of them out"
        )
    stored = _stored.read_config(Path(before))
    _stored.check_trusted(stored, Path(before), known.trust or known.env_id is not None, recipe=False)
    return Arguments(_stored.restore_config(type(presets[preset]), stored), _stored.read_options(stored), preset)


def _parse_all(
    default: Arguments, presets: tuple[str, ...], words: Sequence[str], prog: str | None, description: str | None
) -> Arguments:
    tyro = require_package("tyro", "train")
    constructors, registry = tyro.constructors, tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def read_whole(info: Any) -> Any:
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
    def describe(info: Any) -> Any:
        """Add to each field the help text and the range from its annotation."""
        kinds = {"settings": type(default.settings), "preset": Literal[presets]}
        if info.type not in (Arguments, RunOptions, kinds["settings"]):
            return None
        hints = get_type_hints(info.type) | (kinds if info.type is Arguments else {})
        texts = read_declared(info.type, str)
        for name, limits in read_declared(info.type, Range).items():
            texts[name] = f"{texts.get(name, 'a number')}; in {format_finite(limits)}"
        fields = [
            constructors.StructFieldSpec(name, hints[name], getattr(info.default, name), helptext=texts.get(name))
            for name in (x.name for x in dataclasses.fields(info.type))
        ]
        return constructors.StructConstructorSpec(info.type, tuple(fields))

    settings = {"config": (tyro.conf.OmitArgPrefixes,), "prog": prog, "description": description}
    with registry:
        return tyro.cli(Arguments, default=default, args=words, **settings)
