"""The host loop around a `Train`: progress, records, checkpoints, resuming."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._hyperparameters import count
from .._learner import nonfinite_report
from ._checkpoint import Checkpoints
from ._folder import KEPT, run_folder, stored_config, stored_run
from ._records import MetricsFile, column, plot_curve, versions, write_json
from ._statistics import summary
from ._train import Train, last_episodes_return


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How a run is kept; nothing here changes what is learned."""

    name: str | None = None
    """folder of the run below --directory; by default made of the environment, the seed and the time"""
    directory: Path = Path("runs")
    """where runs are kept"""
    resume: Path | None = None
    """folder of a run to continue, with its own configuration"""
    num_seeds: int = 1
    """train this many seeds (seed, seed + 1, ...) in one compiled program"""
    eval_episodes: int = 0
    """play this many whole episodes with the trained policy at the end"""
    checkpoint_every: int | None = None
    """updates between checkpoints; by default a tenth of the run"""
    log_every: int | None = None
    """updates between records; by default a two-hundredth of the run"""
    tensorboard: bool = True
    """write TensorBoard events"""
    progress: bool = True
    """show a progress bar"""


def main(
    make_train: Callable[[Any], Train], presets: Mapping[str, Any], argv: Sequence[str] | None = None, prog: str = ""
) -> dict[str, Any]:
    """The command line of a recipe: fields of its `Config`, `RunOptions`, `--preset` and `--resume`.

    Args:
        make_train: `make_train(config) -> Train`.
        presets: configurations by name, the first being the default.
        argv: arguments; None: those of the process.
        prog: the command's name, for its help.

    Returns:
        The result that is also written to `result.json`.
    """
    import tyro

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default=next(iter(presets)))
    first.add_argument("--resume", type=Path)
    known, _ = first.parse_known_args(argv)
    config, options = presets.get(known.preset, next(iter(presets.values()))), RunOptions()
    if known.resume is not None:
        with _said():
            stored = stored_run(known.resume)
            config = stored_config(type(config), stored)
        options = RunOptions(**{name: stored["run"][name] for name in KEPT})
    names = Literal[tuple(presets)]  # type: ignore[valid-type]
    fields = [("config", type(config)), ("run", RunOptions), ("preset", names, dataclasses.field(default=known.preset))]
    arguments = dataclasses.make_dataclass("Arguments", fields)  # type: ignore[arg-type]
    default = arguments(config=config, run=options, preset=known.preset)
    args = tyro.cli(
        arguments,
        config=(tyro.conf.OmitArgPrefixes,),
        default=default,
        args=argv,
        prog=prog or None,
        description=sys.modules[make_train.__module__].__doc__,
    )
    with _said():
        result = run(make_train(args.config), args.config, args.run)
    if "interrupted_by" in result:
        raise SystemExit(128 + signal.Signals[result["interrupted_by"]])
    return result


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Our own errors say what to do: they end the process with that sentence. Others keep their traceback."""
    try:
        yield
    except (ValueError, TypeError, FloatingPointError, OSError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        raised_in = str(frame.f_globals.get("__name__", ""))
        if isinstance(error, OSError) or raised_in.startswith(f"{Train.__module__.partition('.')[0]}."):
            raise SystemExit(f"error: {error}") from error
        raise
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def run(train: Train, config: Any, options: RunOptions = RunOptions()) -> dict[str, Any]:
    """Train on this host, keeping everything under `<directory>/<name>/`.

    That folder gets `config.json`, `metrics.jsonl`, TensorBoard events, `checkpoints/`, `curve.png` and, at the end,
    `result.json`. A run that was interrupted at any moment continues from its last checkpoint with `resume`, and ends
    bit-identical (on a CPU) to one that was not. Ctrl-C saves first; a second one does not.

    Args:
        train: the run, as a recipe's `make_train` returns it.
        config: a dataclass with, among others, `seed` and `env_id`; recorded, and compared when resuming.
        options: see `RunOptions`.

    Returns:
        The result: returns of the last 100 episodes by seed, evaluation, versions, paths.

    Raises:
        FileExistsError: the folder holds a run already. ValueError: it is of another configuration.
        FloatingPointError: numbers that are not finite appeared (and the configuration does not skip them).
    """
    count("run", "num_seeds", options.num_seeds)
    _pace(options, train.num_updates)
    if options.eval_episodes:
        count("run", "eval_episodes", options.eval_episodes)
        jax.eval_shape(
            lambda key: train.evaluate_policy(key, train.init(key), 1), jax.random.key(0)
        )  # fail now, or never
    with run_folder(config, options) as folder:
        state, rows, interrupted_by = _updates(train, config, options, folder)
        result = _result(train, config, options, rows, state)
        returns = column(rows, "episode_return")
        if np.isfinite(returns).any():
            env_steps = column(rows, "env_steps")
            plot_curve(folder / "curve.png", env_steps, returns, str(getattr(config, "env_id", "")))
            result["curve"] = str(folder / "curve.png")
        if interrupted_by is not None:
            print(f"interrupted after update {len(rows)} of {train.num_updates}; go on with --resume {folder}")
            return {**result, "interrupted_by": interrupted_by.name}
        write_json(folder / "result.json", result)
        _announce(result)
        return result


def _updates(
    train: Train, config: Any, options: RunOptions, folder: Path
) -> tuple[Any, list[dict[str, Any]], signal.Signals | None]:
    """All updates that are still to be done, or as many as there were before a signal."""
    log_every, checkpoint_every = _pace(options, train.num_updates)
    keys = jnp.stack([jax.random.key(config.seed + i) for i in range(options.num_seeds)])
    batched = options.num_seeds > 1
    init, step = (jax.vmap(train.init), jax.vmap(train.step)) if batched else (train.init, train.step)

    with contextlib.ExitStack() as stack:
        interrupt = stack.enter_context(_Interrupt())
        checkpoints = stack.enter_context(contextlib.closing(Checkpoints(folder / "checkpoints", tidy=True)))
        state = jax.jit(init)(keys if batched else keys[0])
        done = 0
        if checkpoints.steps():
            done, state = checkpoints.restore(state)
            checkpoints.drop_after(done)
        metrics = stack.enter_context(contextlib.closing(MetricsFile(folder / "metrics.jsonl", done)))
        print(
            f"{folder}: {train.num_updates} updates of {train.steps_per_update} steps = "
            f"{train.num_updates * train.steps_per_update:,} environment steps"
            + (f", {options.num_seeds} seeds" if batched else "")
            + (f", from update {done}" if done else "")
        )
        if done == train.num_updates:
            return state, metrics.rows, None
        advance = _compiled(step, state, min(log_every, train.num_updates))
        watch = stack.enter_context(contextlib.closing(_Watch(train, options, done, folder)))
        while done < train.num_updates and not interrupt.asked:
            began = time.perf_counter()
            goal = min(train.num_updates, done + log_every, (done // checkpoint_every + 1) * checkpoint_every)
            number = goal - done
            state, measured = advance(state, number)
            measured = {name: np.asarray(x)[:number] for name, x in jax.device_get(measured).items()}
            rows = [
                {"update": done + i, "env_steps": (done + i + 1) * train.steps_per_update}
                | {name: x[i] for name, x in measured.items()}
                for i in range(number)
            ]
            bad = None if getattr(config, "skip_nonfinite", False) else _first_nonfinite(measured)
            if bad is not None:
                metrics.append(rows[: bad[0] + 1])
                raise FloatingPointError(
                    f"update {done + bad[0]}{bad[1]}. The run ends here; its last checkpoint, of update "
                    f"{max(checkpoints.steps(), default=0)}, is from before."
                    + (" --skip-nonfinite skips such gradients and counts them" * hasattr(config, "skip_nonfinite"))
                )
            metrics.append(rows)
            watch.show(rows, options.num_seeds * train.steps_per_update * number / (time.perf_counter() - began))
            done = goal
            if done % checkpoint_every == 0 or done == train.num_updates or interrupt.asked:
                checkpoints.save(done, state)
        return state, metrics.rows, None if done == train.num_updates else signal.Signals(interrupt.asked)


def _pace(options: RunOptions, num_updates: int) -> tuple[int, int]:
    """Updates between records, and between checkpoints."""
    given = {"log_every": options.log_every, "checkpoint_every": options.checkpoint_every}
    log_every, checkpoint_every = (
        max(1, num_updates // parts) if every is None else count("run", name, every)
        for (name, every), parts in zip(given.items(), (200, 10), strict=True)
    )
    return log_every, checkpoint_every


def _first_nonfinite(measured: Mapping[str, np.ndarray]) -> tuple[int, str] | None:
    """The first update with numbers that are not finite, and where in it they arose; later ones only follow from it."""
    counts = {name: x.reshape(len(x), -1) for name, x in measured.items() if "nonfinite/" in name}
    if not counts:
        return None
    total = np.sum(list(counts.values()), axis=0)  # [updates, seeds]
    if not np.any(total):
        return None
    first = int(np.argmax(np.any(total, axis=1)))
    report = nonfinite_report({name: x[first] for name, x in counts.items()})
    seeds = np.flatnonzero(total[first])
    where = f" (seed {', '.join(map(str, seeds))} of {total.shape[1]}, from 0)" if total.shape[1] > 1 else ""
    return first, f"{where}: {report}"


def _compiled(step: Callable[[Any], Any], state: Any, size: int) -> Callable[[Any, int], tuple[Any, Any]]:
    """`advance(state, number)`: that many updates in one call, with their metrics in buffers of `size`.

    `number` is a run-time argument, so that there is one program whatever the pieces: cutting a run elsewhere (a
    checkpoint, an interruption) cannot change a single bit.
    """

    def advance(state: Any, number: jax.Array) -> tuple[Any, Any]:
        shapes = jax.eval_shape(step, state)[1]
        buffers = jax.tree.map(lambda s: jnp.zeros((size, *s.shape), s.dtype), shapes)

        def body(i: jax.Array, carry: Any) -> Any:
            state, buffers = carry
            state, measured = step(state)
            return state, jax.tree.map(lambda buffer, x: buffer.at[i].set(x), buffers, measured)

        return jax.lax.fori_loop(0, number, body, (state, buffers))

    print("compiling ... ", end="", flush=True)
    began = time.perf_counter()
    program = jax.jit(advance, donate_argnums=0).lower(state, jnp.zeros((), jnp.int32)).compile()
    print(f"{time.perf_counter() - began:.1f} s", flush=True)
    return lambda state, number: program(state, jnp.asarray(number, jnp.int32))


class _Watch:
    """The progress bar and TensorBoard."""

    def __init__(self, train: Train, options: RunOptions, done: int, folder: Path) -> None:
        from tqdm import tqdm

        self._seeds, self._each = options.num_seeds, train.steps_per_update
        total = train.num_updates * self._each * self._seeds
        self._bar = tqdm(
            total=total,
            initial=done * self._each * self._seeds,
            unit="step",
            unit_scale=True,
            disable=not options.progress,
        )
        self._writer = None
        if options.tensorboard:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=done * self._each + 1 if done else None)

    def show(self, rows: list[dict[str, Any]], steps_per_second: float) -> None:
        returns = np.asarray([row["episode_return"] for row in rows], float)
        if np.isfinite(returns).any():
            self._bar.set_postfix_str(f"return {np.nanmean(returns):.1f}")
        self._bar.update(len(rows) * self._each * self._seeds)
        if self._writer is None:
            return
        here = rows[-1]["env_steps"]
        for name in rows[0].keys() - {"update", "env_steps"}:
            values = np.asarray([row[name] for row in rows], float)
            if np.isfinite(values).any():
                self._writer.add_scalar(name, float(np.nanmean(values)), here)
        self._writer.add_scalar("steps_per_second", steps_per_second, here)

    def close(self) -> None:
        self._bar.close()
        if self._writer is not None:
            self._writer.close()


class _Interrupt:
    """Turns the first Ctrl-C (or SIGTERM) into a request to save and stop: `asked` is then the signal's number."""

    def __enter__(self) -> _Interrupt:
        self.asked = 0
        self._before: dict[int, Any] = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        except ValueError:  # not the main thread: signals are somebody else's
            pass
        return self

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = number
        for other, handler in self._before.items():
            signal.signal(other, handler)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _result(train: Train, config: Any, options: RunOptions, rows: list[dict[str, Any]], state: Any) -> dict[str, Any]:
    result: dict[str, Any] = {
        "config": dataclasses.asdict(config),
        "num_seeds": options.num_seeds,
        "env_steps": len(rows) * train.steps_per_update,
        "versions": versions(),
    }
    if rows:
        returns, episodes = column(rows, "episode_return"), column(rows, "episodes")
        last = last_episodes_return(returns.T, episodes.T)
        result["last_100_episodes_return"] = summary(np.asarray(last))
    if options.eval_episodes and len(rows) == train.num_updates:
        key = jax.random.key(config.seed + 2**20)

        def play(state: Any) -> Any:
            return train.evaluate_policy(key, state, options.eval_episodes)

        played = jax.jit(jax.vmap(play) if options.num_seeds > 1 else play)(state)
        result["evaluation"] = {
            "episodes": options.eval_episodes,
            "episode_return": summary(np.mean(np.asarray(played.episode_return), axis=-1)),
            "episode_length": float(np.mean(np.asarray(played.episode_length))),
            "terminated": int(np.sum(np.asarray(played.terminated))),
            "truncated": int(np.sum(np.asarray(played.truncated))),
        }
    return result


def _announce(result: dict[str, Any]) -> None:
    def sentence(what: str, numbers: dict[str, Any]) -> str:
        text = f"{what}: {numbers['mean']:.1f}"
        if numbers["iqm_95"] is not None:
            low, high = numbers["iqm_95"]
            text += f" (deviation {numbers['std']:.1f}), IQM {numbers['iqm']:.1f} [95 %: {low:.1f}, {high:.1f}]"
        return text

    if np.isfinite(result["last_100_episodes_return"]["mean"]):
        print(sentence("mean return of the last 100 episodes", result["last_100_episodes_return"]))
    else:
        print("no episode ended" + (" in some of the seeds" if result["num_seeds"] > 1 else ""))
    if "evaluation" in result:
        played = result["evaluation"]
        print(sentence(f"evaluation over {played['episodes']} episodes", played["episode_return"]))
    if "curve" in result:
        print(f"learning curve: {result['curve']}")
