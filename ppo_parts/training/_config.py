"""The settings of a run, `Config` and `RunOptions`, whose annotations hold ranges and help texts, and their checks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import jax
import numpy as np

from .._base.checked import checked
from .._base.extras import require_package
from .._base.hyperparameters import check_count, check_number
from ..errors import MissingPackage, UserTypeError, UserValueError
from ..functional._arguments import ANY, RANGES, check_as, is_known
from ..functional._common import Range
from ..functional._errors import did_you_mean
from ._evaluate import EVALUATION, EpisodeResults
from ._train import Train, count_updates

M = TypeVar("M")
INHERITED: dict[str, tuple[Range | str, ...]] = {
    "learning_rate": (RANGES["learning_rate"], "learning rate of Adam"),
    "anneal_lr": ("anneal the learning rate linearly to 0 over the updates of the run",),
    "max_grad_norm": (RANGES["max_grad_norm"], "a gradient with a larger norm is scaled down to this one"),
    "gamma": (RANGES["gamma"], "discount of rewards per step"),
    "gae_lambda": (RANGES["gae_lambda"], "trace decay: 0 has the least variance, 1 the least bias"),
    "num_minibatches": (Range(1), "gradient steps per epoch; must divide num_envs * num_steps"),
    "update_epochs": (Range(1), "passes over each rollout"),
    "clip_coef": (RANGES["clip_eps"], "how far the probability ratio may move from 1"),
    "vf_coef": (RANGES["coef"], "weight of the value loss"),
    "ent_coef": (RANGES["coef"], "weight of the entropy bonus"),
    "target_kl": (RANGES["target_kl"], "end an update after an epoch with a larger KL, in nats"),
    "normalize_env": ("standardize and clip observations and rewards by running statistics",),
    "hidden": (Range(1), "units of each hidden layer"),
    "activation": ("activation of the hidden layers",),
    "log_std": ("initial logarithm of the standard deviation of actions",),
}
"""Ranges and help texts of common fields, which `Config` declares for its subclasses."""


def format_finite(limits: Range) -> str:
    """Format the finite numbers of a range, because a configuration may hold only these."""
    return str(limits).replace("[-inf", "(-inf").replace("inf]", "inf)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The fields of every recipe's configuration; a subclass sets the defaults and adds its own fields.

    The annotation of a field declares its type, its range (for a tuple, the range of its numbers) and its help text. If
    a subclass declares a field again, as in `num_envs: int = 4`, it keeps its range and help text, and so do fields
    with common names, such as `gamma: float = 0.99`. Float fields may hold traced arrays.

    Example:
        >>> import dataclasses
        >>> from typing import Annotated
        >>> from ppo_parts import training
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Config(training.Config):
        ...     num_envs: int = 4
        ...     num_steps: int = 128
        ...     noise: Annotated[float, training.Range(0), "standard deviation of the noise"] = 0.1
        >>> Config(env_id="CartPole-v1", total_timesteps=500_000).num_updates
        976
    """

    env_id: Annotated[str, "name of the environment"]
    total_timesteps: Annotated[int, Range(1), "environment steps, rounded down to whole updates, e.g. 5e5"]
    num_envs: Annotated[int, Range(1), "number of environments stepped in parallel"]
    num_steps: Annotated[int, Range(1), "steps of each environment in a rollout; an update follows each rollout"]
    microbatch: Annotated[
        int | Literal["auto"] | None,
        Range(1),
        'evaluate networks on this many steps at a time, to save memory; "auto": 1024 where that is faster',
    ] = "auto"
    shards: Annotated[
        int | None,
        Range(1),
        "equal blocks of environments that minibatches do not mix; devices hold whole ones. None: one, or on the "
        "command line as many as --num-devices",
    ] = None
    seed: Annotated[int, Range(0, 2**32 - 1), "seed for all random numbers"] = 1

    @property
    def num_updates(self) -> int:
        """Return the number of whole updates of `num_envs * num_steps` steps in `total_timesteps`."""
        return count_updates(self.total_timesteps, num_envs=self.num_envs, num_steps=self.num_steps)


def read_declared(kind: type, of: type[M]) -> dict[str, M]:
    """Return what the annotations of a dataclass declare for each field, their `Range` or their help (`str`).

    If a subclass declares a field again without them, it keeps them.
    """
    found: dict[str, M] = {}
    for base in reversed(kind.__mro__):
        stated = {x: getattr(hint, "__metadata__", ()) for x, hint in get_type_hints(base, include_extras=True).items()}
        for name, declarations in (INHERITED | stated if base is Config else stated).items():
            found.update((name, x) for x in declarations if isinstance(x, of))
    return {field.name: found[field.name] for field in dataclasses.fields(kind) if field.name in found}


@checked
def check_config(config: Any, where: str = "") -> None:
    """Raise if a field of a dataclass does not have its declared type or lies outside its declared range.

    Float fields may hold traced numbers, which are not checked because their values are not known yet. Errors name the
    first invalid field, its value and the allowed values; they begin with `where`, or the name of the dataclass.

    Example:
        >>> from ppo_parts import training
        >>> training.check_config(training.Config(env_id="a", total_timesteps=32, num_envs=0, num_steps=8))
        Traceback (most recent call last):
        ...
        ppo_parts.errors.UserValueError: Config: num_envs must be at least 1, got 0
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise UserTypeError(f"check_config: config must be an instance of a dataclass, got {config!r}")
    where, ranges = where or type(config).__name__, read_declared(type(config), Range)
    for kind in type(config).__mro__:
        declared = inspect.get_annotations(kind)
        for name, x in vars(kind).items():
            if not (name.startswith("_") or name in declared or hasattr(x, "__get__") or isinstance(x, type)):
                raise UserTypeError(
                    f"{kind.__name__}: {name} has no type, so dataclasses ignores its value, {x!r}: write {name}: "
                    f"{type(x).__name__} = {x!r}"
                )
    for name, hint in get_type_hints(type(config)).items():
        _check_field(where, name, getattr(config, name), hint, ranges.get(name))


def _check_field(where: str, name: str, value: Any, hint: Any, limits: Range | None) -> None:
    """Raise if the value of a field does not have the type `hint` or lies outside its range."""
    several = next((kind for kind in (hint, *get_args(hint)) if get_origin(kind) is tuple), None)
    if several is hint or (several is not None and isinstance(value, tuple)):
        kinds = get_args(several)
        if kinds[1:] == (...,) and isinstance(value, tuple):
            kinds = kinds[:1] * len(value)
        if not isinstance(value, tuple) or len(value) != len(kinds):
            remedy = f": write {tuple(value)}" if isinstance(value, list) else ""
            raise UserTypeError(f"must be a {hint}, got {value!r}{remedy}", where=where, argument=name)
        for x, kind in zip(value, kinds, strict=True):
            _check_field(where, name, x, kind, limits)
        return
    kinds = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    number = next((kind for kind in kinds if kind in (int, float)), None)
    is_word = isinstance(value, str) and any(get_origin(kind) is Literal for kind in kinds)
    if number is None or is_word or (value is None and type(None) in kinds):
        if is_known(hint):
            check_as(where, name, value, hint)
        return
    allowed = limits or ANY
    if number is int:
        value = check_count(where, name, value, None if np.isinf(allowed.low) else int(allowed.low))
    elif not (isinstance(value, (float, np.floating)) and np.isnan(value)):  # NaN is outside any range
        value = check_number(where, name, value, ANY, schedule=False)
    if not isinstance(value, jax.core.Tracer) and not (value in allowed and (number is int or np.isfinite(value))):
        raise UserValueError(f"must lie in {format_finite(allowed)}, got {value!r}", where=where, argument=name)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options for how a run is recorded and continued, on which devices, and with how many seeds."""

    name: Annotated[str | None, "folder inside --directory; None: named after environment, seed and time"] = None
    directory: Annotated[Path, "folder that holds the runs"] = Path("runs")
    resume: Annotated[Path | None, "folder of a run to continue, with its own configuration"] = None
    init_from: Annotated[Path | None, "folder of a run from whose state a new run with other settings continues"] = None
    checkpoint: Annotated[Literal["latest", "best"] | int, "checkpoint to continue from, or its update"] = "latest"
    num_seeds: Annotated[int, Range(1), "train this many seeds (seed, seed + 1, ...) in one compiled program"] = 1
    num_devices: Annotated[
        int | None, Range(1), "devices to divide environments or seeds over; None: one, or all if --distributed"
    ] = None
    distributed: Annotated[bool, "one of several processes that train together (Slurm, torchrun, TPUs, ...)"] = False
    heartbeat_timeout: Annotated[
        int, Range(1), "seconds without a heartbeat before a process is considered lost, and the run ends"
    ] = 100
    eval_every: Annotated[int | None, Range(1), "updates between evaluations; None: only one, at the end"] = None
    eval_episodes: Annotated[int, Range(0), "number of whole episodes to play in an evaluation"] = 0
    eval_mode: Annotated[bool, "evaluate with the mode of the policy's distribution instead of samples"] = False
    checkpoint_every: Annotated[int | None, Range(1), "updates between checkpoints; None: a tenth of the run"] = None
    checkpoint_minutes: Annotated[float, Range(0, open_low=True), "longest time between checkpoints, in minutes"] = 5.0
    keep_checkpoints: Annotated[int | None, Range(1), "number of the latest checkpoints to keep; None: all"] = 2
    best_metric: Annotated[
        str | None, "also keep the checkpoint at which this metric was largest, e.g. episode_return or evaluation/won"
    ] = None
    log_every: Annotated[
        int | None, Range(1), "updates averaged into a record of TensorBoard or wandb; None: 1/200 of the run"
    ] = None
    on_nonfinite: Annotated[
        Literal["stop", "skip"], "if a number is not finite: stop the run, or skip the update and count it"
    ] = "stop"
    tensorboard: Annotated[bool, "write TensorBoard events"] = True
    track: Annotated[bool, "also log to Weights & Biases; WANDB_PROJECT and WANDB_MODE=offline apply"] = False
    progress: Annotated[bool, "show a progress bar if the output is a terminal"] = True

    def __post_init__(self) -> None:  # paths may be given as strings
        for name in ("directory", "resume", "init_from"):
            if isinstance(path := getattr(self, name), str):
                object.__setattr__(self, name, Path(path))


def refuse(option: str, message: str) -> NoReturn:
    raise UserValueError(message, where="run", argument=option)


def check_name(name: str | None) -> None:
    path = Path("run" if name is None else name)
    if path.is_absolute() or not path.parts or ".." in path.parts:
        refuse("name", f"must name a folder inside directory, got {name!r}: give the path before it as directory")


def validate(options: RunOptions, train: Train) -> None:
    """Raise if options are out of range, or conflict with each other or with the run."""
    check_config(options, where="run")
    check_name(options.name)
    name, resume, directory = options.name, options.resume, options.directory
    if options.distributed and not jax.distributed.is_initialized():
        refuse("distributed", "needs jax.distributed.initialize() before anything uses a device: call it first")
    if resume is not None:
        continues = f"and resume continues {resume}"
        if name is not None and resume.name != Path(name).name:
            refuse("name", f"names only new runs, got {name!r}, {continues} in place")
        if directory != RunOptions.directory and directory.resolve() not in resume.resolve().parents:
            refuse("directory", f"holds only new runs, got {directory}, {continues}: leave it out")
        if options.init_from is not None:
            refuse("init_from", f"begins a new run from {options.init_from}, {continues}: give one of them")
    elif options.checkpoint != "latest" and options.init_from is None:
        says = f"selects a checkpoint of the run given as resume or init_from, got {options.checkpoint!r}"
        refuse("checkpoint", f"{says}: give one of them")
    for name in ("eval_every", "eval_mode"):
        if getattr(options, name) and not options.eval_episodes:
            refuse(name, "needs eval_episodes, the number of episodes in an evaluation")
    best, measured = options.best_metric, set(train.shapes[1])
    if reserved := measured & {"update", "env_steps"}:
        raise UserValueError(f"the metric {min(reserved)!r} has the name of a column of metrics.jsonl: rename it")
    if options.eval_episodes:
        play = functools.partial(train.evaluate_policy, episodes=options.eval_episodes, mode=options.eval_mode)
        played = jax.eval_shape(play, jax.random.key(0), train.shapes[0])  # fail now rather than after training
        if options.eval_every is not None:
            measured |= {EVALUATION + name for name in (*EpisodeResults._fields[:-1], *played.info)}
    if best is not None and best not in measured:
        without = best.startswith(EVALUATION) and options.eval_every is None
        hint = "; evaluation/... needs eval_every;" if without else did_you_mean(best, measured) or ";"
        there = ", ".join(map(repr, sorted(measured)))
        refuse("best_metric", f"must be measured in this run, got {best!r}{hint} there are {there}")
    for name, package, extra in (("track", "wandb", "track"), ("tensorboard", "tensorboardX", "train")):
        try:
            if getattr(options, name):  # fail now rather than after compiling
                require_package(package, extra)
        except MissingPackage as error:
            raise MissingPackage(f"{error}, or give --no-{name} ({name}=False)") from error
