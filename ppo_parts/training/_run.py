"""The host loop around a `Train`: progress, records, checkpoints, resuming."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import nonfinite_report
from .._metrics import Metrics
from ._checkpoint import Checkpoints
from ._evaluate import EVALUATION, metrics_of
from ._folder import run_folder, stored_run
from ._load import best, continued_from, restored, source
from ._options import RunOptions, checked
from ._records import MetricsFile, column, plot_curve, versions, write_json, write_rows
from ._statistics import summary
from ._train import Train, last_episodes_return, over_seeds, seed_keys
from ._watch import Interrupt, Watch


def run(train: Train, config: Any, options: RunOptions | None = None) -> dict[str, Any]:
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
    options = checked(options or RunOptions(), train)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(run_folder(config, options, continued_from(train, config, options)))
        checkpoints = Checkpoints(folder / "checkpoints", keep=options.keep_checkpoints, tidy=True)
        stack.enter_context(contextlib.closing(checkpoints))
        evaluate = _evaluation(train, config, options)
        state, rows, interrupted_by = _updates(train, config, options, folder, checkpoints, evaluate)
        result = _result(train, config, options, rows)
        found = best(rows, checkpoints.steps(), options)
        if found is not None:
            result["best"] = {"metric": options.best_metric, "update": found[0], "value": found[1]}
        if options.eval_episodes and len(rows) == train.num_updates:
            result["evaluation"] = _evaluated(evaluate(state, len(rows)), options)
        returns = column(rows, "episode_return")
        if np.isfinite(returns).any():
            played = EVALUATION + "episode_return"
            evaluation = column(rows, played) if any(played in row for row in rows) else None
            title = str(getattr(config, "env_id", ""))
            plot_curve(folder / "curve.png", column(rows, "env_steps"), returns, title, evaluation=evaluation)
            result["curve"] = str(folder / "curve.png")
        if interrupted_by is not None:
            print(f"interrupted after update {len(rows)} of {train.num_updates}; go on with --resume {folder}")
            return {**result, "interrupted_by": interrupted_by.name}
        write_json(folder / "result.json", result)
        _announce(result)
        return result


def _updates(
    train: Train,
    config: Any,
    options: RunOptions,
    folder: Path,
    checkpoints: Checkpoints,
    evaluate: Callable[[Any, int], dict[str, Any]],
) -> tuple[Any, list[dict[str, Any]], signal.Signals | None]:
    """All updates that are still to be done, or as many as there were before a signal."""
    log_every, checkpoint_every, eval_every = options.log_every or 1, options.checkpoint_every or 1, options.eval_every
    with contextlib.ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        done, state = _begun(train, config, options, folder, checkpoints)
        metrics = stack.enter_context(contextlib.closing(MetricsFile(folder / "metrics.jsonl", done)))
        print(
            f"{folder}: {train.num_updates} updates of {train.steps_per_update} steps = "
            f"{train.num_updates * train.steps_per_update:,} environment steps"
            + (f", {options.num_seeds} seeds" if options.num_seeds > 1 else "")
            + (f", from update {done}" if done else "")
        )
        if done == train.num_updates:
            return state, metrics.rows, None
        (folder / "result.json").unlink(missing_ok=True)  # written when everything is done
        advance = _compiled(over_seeds(train.step, options.num_seeds), state, min(log_every, train.num_updates))
        watch = stack.enter_context(contextlib.closing(Watch(train, options, done, folder)))
        while done < train.num_updates and not interrupt.asked:
            began = time.perf_counter()
            goals = [(done // every + 1) * every for every in (checkpoint_every, eval_every) if every]
            number = min(train.num_updates, done + log_every, *goals) - done
            state, measured = advance(state, number)
            speed = options.num_seeds * train.steps_per_update * number / (time.perf_counter() - began)
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
            done += number
            ended = done == train.num_updates
            evaluated = eval_every is not None and (done % eval_every == 0 or ended)
            if evaluated:
                rows[-1] |= evaluate(state, done)
            metrics.append(rows)
            watch.show(rows, speed)
            due = done % checkpoint_every == 0 or ended or interrupt.asked
            if due or evaluated:
                found = best(metrics.rows, [*checkpoints.steps(), done], options)
                better = found is not None and found[0] == done
                if due or better:
                    checkpoints.save(done, state, best=found and found[0])
        return state, metrics.rows, None if done == train.num_updates else signal.Signals(interrupt.asked)


def _begun(train: Train, config: Any, options: RunOptions, folder: Path, checkpoints: Checkpoints) -> tuple[int, Any]:
    """Where the run stands: how many updates are done, and the state. `metrics.jsonl` has their rows."""
    if checkpoints.steps():
        done, state = restored(folder, checkpoints, train, config.seed, options, options.checkpoint)
        checkpoints.drop_after(done)
        return done, state
    before = stored_run(folder).get("continued_from")
    if before is not None:
        done = before["update"]
        state, rows = source(Path(before["folder"]), done, train, config.seed, options)
        write_rows(folder / "metrics.jsonl", rows)
        checkpoints.save(done, state)
        return done, state
    return 0, jax.jit(over_seeds(train.init, options.num_seeds))(seed_keys(config.seed, options.num_seeds))


def _evaluation(train: Train, config: Any, options: RunOptions) -> Callable[[Any, int], dict[str, Any]]:
    """`evaluate(state, update)`: the metrics of an evaluation, by one program whatever the update.

    Its keys are its own, made of the seed and the update, so that it changes nothing and may be repeated.
    """
    keys = seed_keys(config.seed, options.num_seeds)

    def play(seed: tuple[jax.Array, Any], update: jax.Array) -> Any:
        key, state = seed
        key = jax.random.fold_in(jax.random.fold_in(key, 2**20), update)
        return train.evaluate_policy(key, state, options.eval_episodes, mode=options.eval_mode)

    @jax.jit
    def program(state: Any, update: jax.Array) -> Any:
        return over_seeds(lambda seed: play(seed, update), options.num_seeds)((keys, state))

    return lambda state, update: metrics_of(
        jax.device_get(program(state, jnp.asarray(update, jnp.int32))), seed_axes=int(options.num_seeds > 1)
    )


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

    shapes = jax.eval_shape(step, state)[1]

    def advance(state: Any, number: jax.Array) -> tuple[Any, Metrics]:
        def body(i: jax.Array, carry: Any) -> Any:
            state, buffer = carry
            state, measured = step(state)
            return state, jax.tree.map(lambda buffer, x: buffer.at[i].set(x), buffer, measured)

        buffer = jax.tree.map(lambda s: jnp.zeros((size, *s.shape), s.dtype), shapes)
        return jax.lax.fori_loop(0, number, body, (state, buffer))

    print("compiling ... ", end="", flush=True)
    began = time.perf_counter()
    program = jax.jit(advance, donate_argnums=0).lower(state, jnp.zeros((), jnp.int32)).compile()
    print(f"{time.perf_counter() - began:.1f} s", flush=True)

    def run(state: Any, number: int) -> tuple[Any, dict[str, np.ndarray]]:
        state, measured = program(state, jnp.asarray(number, jnp.int32))
        values = np.asarray(measured.array)[:number]
        return state, {name: values[..., measured.names.index(name)] for name in sorted(measured)}

    return run


def _result(train: Train, config: Any, options: RunOptions, rows: list[dict[str, Any]]) -> dict[str, Any]:
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
    return result


def _evaluated(played: dict[str, Any], options: RunOptions) -> dict[str, Any]:
    means = {name.removeprefix(EVALUATION): float(np.mean(x)) for name, x in played.items()}
    return {
        **means,
        "episodes": options.eval_episodes,
        "episode_return": summary(played[EVALUATION + "episode_return"]),
        "terminated": int(np.sum(played[EVALUATION + "terminated"])),
        "truncated": int(np.sum(played[EVALUATION + "truncated"])),
    }


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
    if "best" in result:
        print("best {metric}: {value:.4g}, in the checkpoint of update {update}".format(**result["best"]))
    if "curve" in result:
        print(f"learning curve: {result['curve']}")
