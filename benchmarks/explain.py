"""What is the gap between two libraries made of? Measure the effect of each choice in which their PPO differs.

    python -m benchmarks explain stable_baselines3 rsl_rl --env-id gym:HalfCheetah-v5 --steps 3e5

Between the two updates lie those with some choices of each library. Each seed walks from the first library to the
second in its own random order, one choice at a time, and then in the reverse order. The effect of a choice is the mean
change where it is made: its sampled Shapley value (Castro et al. 2009, doi:10.1016/j.cor.2008.04.004), with antithetic
orders. The effects of a seed add up to its gap. Rollouts, network and λ are the same in all runs. The record in
benchmarks/results/explain.jsonl keeps the return of the last 100 episodes of each run. The same command continues it,
and more seeds extend it.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import ppo_parts as pp
from ppo_parts import training
from ppo_parts.recipes.libraries import parts
from ppo_parts.training._files import make_plain

from . import choices
from ._records import Record, find, make_addresses, make_parser, write
from ._seeds import compare_pairs, measure_training, select_seeds, show_change, vectorize

CHOICES: dict[str, dict[str, Any]] = {name: each.choices for name, each in choices.DIFFERENCES.items()}
UNCLIPPED, RATE = {"value": pp.value_loss(coef=1.0)}, {"rate": pp.optim.scale_by_update_schedule(1e-3)}
LIBRARIES: dict[str, dict[str, dict[str, Any]]] = {  # what each changes in the chain and the optimizer of `choices`
    "cleanrl": {"time limits": CHOICES["time_limit_terminates"]},
    "stable_baselines3": {"value loss": UNCLIPPED, "learning rate": CHOICES["constant_rate"]},
    "tianshou": {
        "value loss": UNCLIPPED, "learning rate": RATE, "gradient clip": CHOICES["no_gradient_clip"],
        "Adam's epsilon": CHOICES["adam_eps_1e-8"], "entropy bonus": CHOICES["entropy_0.01"],
        "gradient steps": {"num_minibatches": 32, "update_epochs": 1}},
    "rsl_rl": {
        "time limits": CHOICES["current_value"], "standardization": CHOICES["rollout_normalize"],
        "value loss": {"value": pp.clipped_value_loss(clip_eps=0.2, coef=2.0)},
        "learning rate": {"rate": pp.optim.scale_by_kl_adaptive_rate(1e-3, target_kl=0.01)},
        "gradient clip": {"clip": parts.clip_each_network(1.0)}, "Adam's epsilon": CHOICES["adam_eps_1e-8"],
        "entropy bonus": CHOICES["entropy_0.01"], "gradient steps": {"num_minibatches": 4, "update_epochs": 5}},
    "skrl": {
        "time limits": CHOICES["time_limit_ignored"], "standardization": CHOICES["rollout_normalize"],
        "value loss": {"value": pp.chain(parts.clip_prediction(0.2), pp.value_loss(coef=5.0))}, "learning rate": RATE,
        "Adam's epsilon": CHOICES["adam_eps_1e-8"], "gradient steps": {"num_minibatches": 2, "update_epochs": 8}},
    "brax": {
        "advantages": CHOICES["brax_advantages"], "value loss": {"value": pp.value_loss(coef=0.5)},
        "learning rate": {"rate": pp.optim.scale_by_update_schedule(1e-4)},
        "gradient clip": CHOICES["no_gradient_clip"], "Adam's epsilon": CHOICES["adam_eps_1e-8"],
        "gradient steps": {"num_minibatches": 16, "update_epochs": 2},
        "discount": {"gamma": 0.9}, "clip range": {"clip_coef": 0.3}, "squashed actions": CHOICES["squashed"]},
}  # fmt: skip


def list_differing(first: str, second: str) -> list[str]:
    """Return the names of the choices in which two libraries differ."""
    a, b = LIBRARIES[first], LIBRARIES[second]
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]


def make_between(config: choices.Config, first: str, second: str, of_second: Sequence[str]) -> training.Train:
    """Make the run with the named choices of the second library, and the others of the first."""
    made = LIBRARIES[first] | {name: LIBRARIES[second].get(name, {}) for name in of_second}
    given = {argument: x for choice in made.values() for argument, x in choice.items()}
    fields = {argument: given.pop(argument) for argument in [*given] if argument in config.__dataclass_fields__}
    return choices.make_train(dataclasses.replace(config, **fields), **given)


def draw_walks(names: Sequence[str], seed: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yield both walks of a seed: the order of the choices, and the stops (1: a choice of the second library)."""
    order = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    for walk in (order, order[::-1]):
        yield walk, ["".join(str(int(name in walk[:made])) for name in names) for made in range(len(walk) + 1)]


def find_missing(result: Record) -> dict[str, list[int]]:
    """Return the stops at which seeds of a record have no return yet, with these seeds."""
    missing: dict[str, list[int]] = {}
    for seed in result["seeds"]:
        for stop in dict.fromkeys(stop for _, stops in draw_walks(result["choices"], seed) for stop in stops):
            if str(seed) not in result["returns"].get(stop, {}):
                missing.setdefault(stop, []).append(seed)
    return missing


def compute_effects(result: Record) -> dict[str, np.ndarray]:
    """Return the effect of each choice, and the `gap`, for each seed of a record."""
    names, seeds, returns = result["choices"], result["seeds"], result["returns"]
    found = {name: np.zeros(len(seeds)) for name in names}
    for i, seed in enumerate(seeds):
        for walk, stops in draw_walks(names, seed):
            reached = np.array([returns[stop][str(seed)] for stop in stops], float)  # a record has null instead of NaN
            for name, change in zip(walk, np.diff(reached), strict=True):
                found[name][i] += change / 2
    return found | {"gap": np.sum(list(found.values()), axis=0)}


def explain_gap(result: Record) -> dict[str, Record]:
    """Return each choice's mean effect, the largest first, with simultaneous intervals, and then the gap."""
    *found, (_, gap) = compute_effects(result).items()
    changes = {name: compare_pairs(effects, 0, len(found)) for name, effects in found}
    return dict(sorted(changes.items(), key=lambda x: -abs(x[1]["mean"]))) | {"gap": compare_pairs(gap, 0)}


def main() -> None:
    """Run the benchmark from the command line."""
    parser = make_parser(__doc__, steps=300_000, seeds=10, first_seed=1, json="benchmarks/results/explain.jsonl")
    parser.add_argument("first", choices=LIBRARIES, help="the library to start from")
    parser.add_argument("second", choices=LIBRARIES, help="the library to end at")
    parser.add_argument("--env-id", default="gym:HalfCheetah-v5", help="the environment (default: %(default)s)")
    options = parser.parse_args()
    if not (names := list_differing(options.first, options.second)):
        parser.error("the libraries must differ")
    config = choices.Config(env_id=options.env_id, total_timesteps=options.steps, gae_lambda=0.95)
    name = f"{options.first}_{options.second}_{options.env_id.rpartition(':')[2]}_{options.steps}"
    [address] = make_addresses(options, name)
    begun = (find(address) or {"results": {}})["results"]
    same = {"first": options.first, "second": options.second, "config": dataclasses.asdict(config), "choices": names}
    if differ := [key for key in same if begun and begun[key] != make_plain(same[key])]:
        sys.exit(f"{address} has another {' and '.join(differ)}: begin anew with another --json FILE")
    returns: dict[str, dict[str, float]] = begun.get("returns", {})
    result = same | {"seeds": sorted({*begun.get("seeds", ()), *select_seeds(options)}), "returns": returns}
    missing = find_missing(result)
    for end in ([], names) if missing else ():  # fail early if one of them cannot play the environment
        make_between(config, options.first, options.second, end)
    for number, (stop, which) in enumerate(missing.items(), 1):
        of_second = [choice for choice, digit in zip(names, stop, strict=True) if digit == "1"]
        run = functools.partial(measure_training, make_between(config, options.first, options.second, of_second))
        found = vectorize(run)(np.array(which))["last_100_episodes_return"]
        returns.setdefault(stop, {}).update({str(seed): float(x) for seed, x in zip(which, found, strict=True)})
        write(address, result | {"complete": number == len(missing)})
        print(f"{number} of {len(missing)}: {', '.join(of_second) or options.first}: {np.mean(found):.0f}", flush=True)
    for choice, change in explain_gap(result).items():
        print(f"{choice:18} {show_change(change)}")
