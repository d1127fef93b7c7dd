"""Atari games with `recipes.atari_ppo`, and with CleanRL's own `ppo_atari.py` on the same machine.

    python -m benchmarks atari ale:breakout --steps 200_000 --seeds 1
    python -m benchmarks atari ale:pong --python ../cleanrl/.venv/bin/python --script ../cleanrl/cleanrl/ppo_atari.py

Both train one seed after another for the same number of steps, and anneal the learning rate to 0 over these steps. The
script runs unchanged under a Python of its own, because it needs Gymnasium 0.29, and its printed returns are read. Its
ale-py 0.8.1 comes without games; `ale-import-roms <folder>` takes them from `ale_py/roms` of a newer one. The records
are benchmarks/results/atari/<game>_<steps>_<first seed>.json, each written after every seed: the returns of whole games
against environment steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ppo_parts import envs, training
from recipes import atari_ppo

from . import hosts
from ._pages import canvas, interval, save, table
from ._timing import positive, record
from .mujoco_page import grouped, linked

RESULTS = Path(__file__).resolve().parent / "results/atari"
GAMES_AVERAGED = 20  # by the moving mean of the picture
PACKAGES = ("ale-py", "gymnasium", "numpy", "opencv-python", "opencv-python-headless", "Shimmy", "torch")


def ours(config: atari_ppo.Config) -> dict[str, Any]:
    """Train a seed with the recipe.

    Each row of `games` has the steps so far, the mean return of the games that ended, and their number.
    """
    train = atari_ppo.make_train(config)
    with envs.host_errors():
        state = jax.block_until_ready(jax.jit(train.init)(jax.random.key(config.seed)))
        step = jax.jit(train.step).lower(state).compile()
        rows, began = [], time.perf_counter()
        for update in range(1, train.num_updates + 1):
            state, metrics = jax.block_until_ready(step(state))
            if games := int(metrics["episodes"]):
                rows.append([update * train.steps_per_update, float(metrics["episode_return"]), games])
    steps = train.num_updates * train.steps_per_update
    return {"seed": config.seed, "steps_per_second": steps / (time.perf_counter() - began), "games": rows}


def cleanrl(python: str, script: str, config: atari_ppo.Config) -> dict[str, Any]:
    """Train a seed with CleanRL's script; each row has the steps so far, the return of a game, and 1."""
    game = "".join(map(str.capitalize, config.env_id.removeprefix("ale:").split("_")))
    given = {"env-id": f"{game}NoFrameskip-v4", "seed": config.seed, "total-timesteps": config.total_timesteps}
    printed = hosts.run_cleanrl(python, script, given)
    found = re.findall(r"global_step=(\d+), episodic_return=\[?([-+.e\d]+)", printed)
    rows = [[int(step), float(reward), 1] for step, reward in found]
    return {"seed": config.seed, "steps_per_second": hosts.steps_per_second(printed), "games": rows}


def versions(python: str, script: str) -> dict[str, str]:
    """Return the packages that CleanRL's script runs with, and its digest."""
    command = [python, "-m", "pip", "list", "--format=json"]
    installed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    found = {package["name"]: package["version"] for package in installed if package["name"] in PACKAGES}
    return found | {"sha256 of the script": hashlib.sha256(Path(script).read_bytes()).hexdigest()}


def measure(config: atari_ppo.Config, seeds: int, python: str | None, script: str | None) -> None:
    """Train the seeds in turn, and write the record after each of them."""
    result: dict[str, Any] = {
        "task": config.env_id,
        "config": dataclasses.asdict(config),
        "env_steps": config.num_updates * config.num_envs * config.num_steps,
        "runs": {"ppo_parts": []},
    }
    if python and script:
        result["cleanrl_versions"] = versions(python, script)
        result["runs"]["cleanrl"] = []
    path = RESULTS / f"{config.env_id.removeprefix('ale:')}_{config.total_timesteps}_{config.seed}.json"
    for number in range(seeds):
        now = dataclasses.replace(config, seed=config.seed + number)
        for name, runs in result["runs"].items():
            runs.append(ours(now) if name == "ppo_parts" else cleanrl(str(python), str(script), now))
            result["complete"] = all(len(each) == seeds for each in result["runs"].values())
            path.parent.mkdir(parents=True, exist_ok=True)
            training.write_json(path, record("benchmarks atari", result))
            shown = f"{runs[-1]['steps_per_second']:.0f} steps/s, return {mean_return(runs[-1], 0):.2f}"
            print(f"{now.env_id} seed {now.seed}, {name}: {shown}", flush=True)


def mean_return(run: dict[str, Any], after: float) -> float:
    """The mean return of the games that ended after this number of steps."""
    rows = [row for row in run["games"] if row[0] > after]
    return float(np.average([row[1] for row in rows], weights=[row[2] for row in rows])) if rows else float("nan")


NAMES = {"ppo_parts": "`atari_ppo`", "cleanrl": "CleanRL"}
ABOUT = """\
Mean return of the whole games that ended in these steps, with unclipped rewards, and its 95 % bootstrap interval over
seeds where there are several. CleanRL's `ppo_atari.py` runs unchanged. Both anneal the learning rate to 0 over these
steps, and have the same hyperparameters, network and preprocessing: no sticky actions, the minimal set of actions,
frame skip 4, 84 x 84 gray pixels, 4 frames, FIRE at the start of each life, episodes that end with a life, and
rewards clipped to their sign. Two things differ: the random numbers, so the same seed does not play the same games, and
two details of preprocessing, listed under Atari in [the deviations](fidelity.md#deviations): the number of no-ops, and
when frames become gray. On Pong, neither program learns in so few steps, and the curves agree. On Breakout, two of our
three seeds learn earlier than any of CleanRL's, and the third does not: it ends below CleanRL's third. The updates of
both agree [to five digits](fidelity.md#how-parity-is-tested), and the games have the same rewards, so we take this for
chance, but three seeds cannot show that it is.
`python -m benchmarks atari <game>` produces a row."""


def section(results: Path, pictures: Path) -> list[str]:
    """The part of docs/results.md about these runs; also write the picture."""
    records = runs(results / "atari")
    if not records:
        return []
    head = [f"{who}, {when}" for when in ("last 20 %", "all steps") for who in NAMES.values()]
    picture(records, pictures / "results_atari.png")
    return [
        "## Atari",
        "",
        *table(["game", "steps", "seeds", *head], [list(cells(each)) for each in records]),
        *ABOUT.split("\n"),
        *packages(records),
        "",
        "![Returns of games against steps](img/results_atari.png)",
        "",
        f"Lines are moving means over {GAMES_AVERAGED} games, one line for each seed.",
        "",
    ]


def runs(folder: Path) -> list[dict[str, Any]]:
    """The records of a folder whose runs have ended; those that differ only in their seeds become one."""
    groups = grouped(
        folder,
        lambda x: (x["task"], x["env_steps"], str(x.get("cleanrl_versions"))),
        lambda x: int(x["config"]["seed"]),
    )
    return [merged(group) for group in groups]


def merged(group: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of several that have the same configuration and other seeds."""
    every = {name: [run for each in group for run in each["runs"].get(name, [])] for name in NAMES}
    return group[0] | {"files": [f"atari/{each['file']}" for each in group], "runs": every}


def packages(records: list[dict[str, Any]]) -> list[str]:
    """Describe what CleanRL's script ran with, once if it was always the same."""
    found = [each["cleanrl_versions"] for each in records if "cleanrl_versions" in each]
    named = [", ".join(f"{name} {version}" for name, version in each.items() if name in PACKAGES) for each in found]
    return [f"CleanRL's script ran with {one}." for one in dict.fromkeys(named)]


def cells(record: dict[str, Any]) -> Iterator[str]:
    """The row of a record."""
    seeds = [run["seed"] for run in record["runs"]["ppo_parts"]]
    yield linked(record["task"], record["files"])
    yield f"{record['env_steps']:,}"
    yield f"{seeds[0]} - {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    every = [record["runs"][name] for name in NAMES]
    for share in (0.8, 0.0):
        for runs in every:
            found = training.summary([mean_return(run, share * record["env_steps"]) for run in runs]) if runs else None
            yield "" if not found else interval(found, 2) if len(runs) > 1 else f"{found['mean']:.2f}"


def picture(records: list[dict[str, Any]], path: Path) -> None:
    """A panel for each record."""
    figure, panels = canvas(len(records))
    for each, panel in zip(records, panels, strict=True):
        for color, (name, label) in enumerate(NAMES.items()):
            for number, run in enumerate(each["runs"][name]):
                steps, returns, games = np.array(run["games"], float).reshape(-1, 3).T
                steps, returns = (np.repeat(x, games.astype(int)) for x in (steps, returns))
                width = min(GAMES_AVERAGED, len(returns))
                means = np.convolve(returns, np.ones(width) / width, "valid") if width else returns
                shown = {"color": f"C{color}", "lw": 1.2, "label": None if number else label.strip("`")}
                panel.plot(steps[len(steps) - len(means) :] / 1000, means, **shown)
        panel.set(title=each["task"], xlabel="thousand environment steps", ylabel="return of a game")
        panel.legend(fontsize=8)
    save(figure, path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="ale:breakout, ale:pong, ...")
    parser.add_argument("--steps", type=float, default=200_000, help="environment steps of each seed")
    parser.add_argument("--seeds", type=positive, default=1, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--python", help="the Python that CleanRL's script needs")
    parser.add_argument("--script", help="CleanRL's ppo_atari.py; without it, only the recipe is trained")
    args = parser.parse_args()
    if (args.python is None) != (args.script is None):
        parser.error("--python and --script belong together: give both, or neither")
    given = {"env_id": args.task, "total_timesteps": int(args.steps), "seed": args.first_seed}
    config = dataclasses.replace(atari_ppo.PRESETS["atari"], **given)
    measure(config, args.seeds, args.python, args.script)


if __name__ == "__main__":
    main()
