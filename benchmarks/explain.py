"""What is the gap between two libraries made of? The effect of each choice in which their PPO differs.

    python -m benchmarks explain stable_baselines3 rsl_rl --env-id gym:HalfCheetah-v5 --steps 3e5

Between the two updates lie those that have some choices of each. Every seed walks from the first library to the second
in a random order of its own, one choice at a time, and in the reverse order. The effect of a choice is the mean change
where it is made: its Shapley value, sampled (Castro et al. 2009, doi:10.1016/j.cor.2008.04.004), with antithetic
orders. The effects of a seed add up to its gap. Rollouts, network and λ are the same in all runs. The record in
benchmarks/results/explain.jsonl keeps the return of the last 100 episodes of each run; the same command continues it,
and more seeds extend it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import optax

import ppo_parts as pp
from ppo_parts import training
from ppo_parts.recipes.libraries import parts
from ppo_parts.training._files import make_plain

from . import differences
from ._pages import show_change
from ._runs import measure_training, select_seeds, vectorize
from ._shared import RESULTS, ROOT, Record, make_parser, read, write

Choices = dict[str, dict[str, Any]]
EPS, ENTROPY = {"eps": 1e-8}, {"last": pp.entropy_bonus(coef=0.01)}
UNCLIPPED, ROLLOUT = {"value": pp.value_loss(coef=1.0)}, {"normalize": "rollout"}
UNLIMITED, RATE = {"clip": optax.identity()}, {"rate": pp.optim.scale_by_update_schedule(1e-3)}
LIBRARIES: dict[str, Choices] = {  # what changes the chain and the optimizer of `differences`
    "cleanrl": {"time limits": {"time_limit": differences.terminate_at_time_limits()}},
    "stable_baselines3": {
        "value loss": UNCLIPPED, "learning rate": {"rate": pp.optim.scale_by_update_schedule(3e-4)},
    },
    "tianshou": {
        "value loss": UNCLIPPED, "learning rate": RATE, "gradient clip": UNLIMITED, "Adam's epsilon": EPS,
        "entropy bonus": ENTROPY, "gradient steps": {"num_minibatches": 32, "update_epochs": 1},
    },
    "rsl_rl": {
        "time limits": {"time_limit": parts.truncate_at_current_value()}, "standardization": ROLLOUT,
        "value loss": {"value": pp.clipped_value_loss(clip_eps=0.2, coef=2.0)},
        "learning rate": {"rate": pp.optim.scale_by_kl_adaptive_rate(1e-3, target_kl=0.01)},
        "gradient clip": {"clip": parts.clip_each_network(1.0)}, "Adam's epsilon": EPS, "entropy bonus": ENTROPY,
        "gradient steps": {"num_minibatches": 4, "update_epochs": 5},
    },
    "skrl": {
        "time limits": {"time_limit": parts.ignore_truncations()}, "standardization": ROLLOUT,
        "value loss": {"value": pp.chain(parts.clip_prediction(0.2), pp.value_loss(coef=5.0))},
        "learning rate": RATE, "Adam's epsilon": EPS, "gradient steps": {"num_minibatches": 2, "update_epochs": 8},
    },
    "brax": {
        "advantages": {"sampler": differences.segments, "brax_advantages": True},
        "value loss": {"value": pp.value_loss(coef=0.5)},
        "learning rate": {"rate": pp.optim.scale_by_update_schedule(1e-4)}, "gradient clip": UNLIMITED,
        "Adam's epsilon": EPS, "gradient steps": {"num_minibatches": 16, "update_epochs": 2},
        "discount": {"gamma": 0.9}, "clip range": {"clip_coef": 0.3}, "squashed actions": {"squash": True},
    },
}  # fmt: skip


def list_differing(first: str, second: str) -> list[str]:
    """The names of the choices in which two libraries differ."""
    a, b = LIBRARIES[first], LIBRARIES[second]
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]


def make_between(config: differences.Config, first: str, second: str, of_second: Sequence[str]) -> training.Train:
    """The run with the named choices of the second library, and the others of the first."""
    made = dict(LIBRARIES[first])
    for name in of_second:
        made[name] = LIBRARIES[second].get(name, {})
    given = {argument: x for choice in made.values() for argument, x in choice.items()}
    fields = {argument: given.pop(argument) for argument in [*given] if argument in config.__dataclass_fields__}
    return differences.make_train(dataclasses.replace(config, **fields), **given)


def draw_walks(names: Sequence[str], seed: int) -> Iterator[list[list[str]]]:
    """The stops of both walks of a seed, each with the choices of the second library that are made so far."""
    order = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    for each in (order, order[::-1]):
        yield [each[:made] for made in range(len(each) + 1)]


def encode(names: Sequence[str], of_second: Sequence[str]) -> str:
    """A digit for each choice: 1 for that of the second library."""
    return "".join(str(int(name in of_second)) for name in names)


def compute_effects(result: Record) -> dict[str, np.ndarray]:
    """The effect of each choice, and the `gap`, for each seed of a record."""
    names, seeds, returns = result["choices"], result["seeds"], result["returns"]
    found = {name: np.zeros(len(seeds)) for name in names}
    for i, seed in enumerate(seeds):
        for stops in draw_walks(names, seed):
            reached = [returns[encode(names, of_second)][str(seed)] for of_second in stops]
            for name, (before, after) in zip(stops[-1], itertools.pairwise(reached), strict=True):
                found[name][i] += (after - before) / 2
    return found | {"gap": np.sum(list(found.values()), axis=0)}


def explain_gap(result: Record) -> dict[str, Record]:
    """The mean effect of each choice, the largest first, and the gap, with 95 % intervals (Student's t over the seeds).

    The intervals of the choices hold together: each has the level 1 - 0.05 / choices (Dunn 1961).
    """
    from scipy import stats

    def interval(values: np.ndarray, comparisons: int) -> Record:
        half = stats.t.ppf(1 - 0.025 / comparisons, len(values) - 1) * stats.sem(values)
        return {"mean": float(values.mean()), "95": [float(values.mean() - half), float(values.mean() + half)]}

    *choices, (_, gap) = compute_effects(result).items()
    changes = {name: interval(values, len(choices)) for name, values in choices}
    return dict(sorted(changes.items(), key=lambda x: -abs(x[1]["mean"]))) | {"gap": interval(gap, 1)}


def main() -> None:
    """Command line."""
    options = make_parser(__doc__, steps=300_000, seeds=10, first_seed=1, results=None)
    options.add_argument("first", choices=LIBRARIES)
    options.add_argument("second", choices=LIBRARIES)
    options.add_argument("--env-id", default="gym:HalfCheetah-v5")
    given = options.parse_args()
    names = list_differing(given.first, given.second)
    if not names:
        options.error("the libraries must differ")
    config = differences.Config(env_id=given.env_id, total_timesteps=given.steps, gae_lambda=0.95)
    name = f"{given.first}_{given.second}_{given.env_id.rpartition(':')[2]}_{given.steps}"
    file = ROOT / (given.results or RESULTS) / "explain.jsonl"
    begun = read(file).get(name, {"results": {}})["results"]
    returns: dict[str, dict[str, float]] = begun.get("returns", {})
    seeds = sorted({*begun.get("seeds", ()), *select_seeds(given)})
    same = {"first": given.first, "second": given.second, "config": dataclasses.asdict(config), "choices": names}
    result = same | {"seeds": seeds, "returns": returns}
    if differ := [key for key in same if begun and begun[key] != make_plain(same[key])]:
        sys.exit(f"{file}#{name} has another {' and '.join(differ)}: begin anew with another --results FOLDER")
    missing: dict[str, tuple[list[str], set[int]]] = {}
    for seed in seeds:
        for of_second in itertools.chain(*draw_walks(names, seed)):
            if str(seed) not in returns.get(stop := encode(names, of_second), {}):
                missing.setdefault(stop, (of_second, set()))[1].add(seed)
    for number, (stop, (of_second, which)) in enumerate(missing.items(), 1):
        run = functools.partial(measure_training, make_between(config, given.first, given.second, of_second))
        found = vectorize(run)(np.array(sorted(which)))["last_100_episodes_return"]
        returns.setdefault(stop, {}).update({str(seed): float(x) for seed, x in zip(sorted(which), found, strict=True)})
        write(f"{file}#{name}", result | {"complete": number == len(missing)})
        print(f"{number} of {len(missing)}: {', '.join(of_second) or given.first}: {np.mean(found):.0f}", flush=True)
    for choice, change in explain_gap(result).items():
        print(f"{choice:18} {show_change(change)}")
