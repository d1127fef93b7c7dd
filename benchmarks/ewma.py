"""Is PPO-EWMA invariant to the batch size? CartPole with one to 64 environments, with the same number of steps.

    python -m benchmarks ewma

Every batch gets as many gradient steps as any other. If it is c times smaller, Adam's learning rate is divided by the
square root of c, advantages are standardized by moments over about c rollouts, and the average of the parameters spans
c times as many gradient steps. Writes benchmarks/results/ewma.jsonl.

Reference: Hilton, Cobbe and Schulman 2021, Batch size-invariance for policy optimization, arXiv:2110.00641.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.training import at_least

from . import _runs
from ._options import parser
from ._records import RESULTS, write
from ._runs import outcome, seeds_of, show, summarized

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_runs.Config):
    """Hyperparameters of the largest batch, of `num_envs * num_steps` steps."""

    total_timesteps: int = 200_000
    num_envs: int = 64
    learning_rate: Annotated[float, at_least(0)] = 2e-2
    age: Annotated[float, at_least(0)] = 16.0  # mean age of the averaged parameters, in gradient steps


class Arm(NamedTuple):
    """Whether the surrogate clips around an average of the parameters, and what is adjusted to the batch size."""

    average: bool
    adjusted: tuple[str, ...]


ARMS = {
    "PPO, nothing adjusted": Arm(False, ()),
    "PPO, adjusted": Arm(False, ("rate", "moments")),
    "PPO-EWMA, all but its decay": Arm(True, ("rate", "moments")),
    "PPO-EWMA, adjusted": Arm(True, ("rate", "moments", "decay")),
}
DIVISORS = (1, 4, 16, 64)  # c


class Numbers(NamedTuple):
    """What may be adjusted: learning rate, and decays of the moments of advantages and of the parameters."""

    rate: Any
    moments: Any
    decay: Any


def numbers(config: Config, arm: Arm, c: int) -> Numbers:
    """The numbers of an arm for batches that are c times smaller."""
    spans = c if "decay" in arm.adjusted else 1
    return Numbers(
        rate=config.learning_rate / (c**0.5 if "rate" in arm.adjusted else 1),
        moments=1 - 1 / c if "moments" in arm.adjusted else 0.0,
        decay=1 - 1 / (1 + config.age * spans),  # the mean age is 1 / (1 - decay) - 1
    )


class Moments(NamedTuple):
    """Average of the mean and of the mean square of advantages, and the sum of the weights in it."""

    mean: Array
    weight: Array


def standardize_over_rollouts(decay: Any) -> pp.Part:
    """Standardize advantages by an exponentially weighted average of their moments; decay 0: those of the rollout."""

    def init(params: Any, key: Array) -> Moments:
        return Moments(jnp.zeros(2), jnp.zeros(()))

    def update(batch: pp.Batch, state: Moments, context: pp.Context) -> tuple[pp.Batch, Moments]:
        weight = decay * state.weight + 1
        latest = jnp.stack([jnp.mean(batch.advantage), jnp.mean(jnp.square(batch.advantage))])
        average = state.mean + (latest - state.mean) / weight
        std = jnp.sqrt(jnp.maximum(average[1] - jnp.square(average[0]), 0))
        return batch.replace(advantage=(batch.advantage - average[0]) / (std + 1e-8)), Moments(average, weight)

    declared = {"requires": ("advantage",), "provides": ("advantage",)}
    return pp.Part(init, update, "standardize_over_rollouts", **declared, place="before_sampler")


def make_train(config: Config, average: bool, adjusted: Numbers) -> training.Train:
    """Make a pure function `train(key) -> TrainResult(state, metrics)`."""
    training.check_config(config)
    env = envs.prepare(envs.make(config.env_id))
    pipeline = pp.chain(
        pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda),
        standardize_over_rollouts(adjusted.moments),
        pp.shuffled_minibatches(config.num_minibatches, config.update_epochs),
        pp.regularizers.proximal_average(decay=adjusted.decay) if average else pp.identity(),
        pp.clipped_surrogate(clip_eps=config.clip_coef),
        pp.value_loss(coef=config.vf_coef),
    )
    policy = networks.actor_critic(env, config.hidden, "tanh")
    return training.Train.of(config, env, policy, pipeline, optax.flatten(optax.adam(adjusted.rate, eps=1e-5)))


def measure(config: Config, c: int, seeds: range) -> dict[str, Any]:
    """All arms with batches that are c times smaller: those with an average in one program, the others in another."""
    smaller, results = dataclasses.replace(config, num_envs=config.num_envs // c), {}
    for average in (False, True):
        named = {name: numbers(config, arm, c) for name, arm in ARMS.items() if arm.average == average}
        columns = [(seed, *adjusted) for adjusted in named.values() for seed in seeds]

        def one(seed: Array, *adjusted: Array, average: bool = average) -> dict[str, Array]:
            return outcome(make_train(smaller, average, Numbers(*adjusted)), seed)

        found = jax.jit(jax.vmap(one))(*map(jnp.asarray, zip(*columns, strict=True)))
        for k, (name, adjusted) in enumerate(named.items()):
            chosen = {what: x[k * len(seeds) : (k + 1) * len(seeds)] for what, x in found.items()}
            results[name] = adjusted._asdict() | summarized(chosen)
            print(f"c = {c:2} {name:22} {show(results[name])}", flush=True)
    return results


def main() -> None:
    """Command line."""
    options = parser(__doc__, seeds=10, first_seed=1, steps=Config().total_timesteps).parse_args()
    config, seeds = Config(total_timesteps=options.steps), seeds_of(options)
    results: dict[str, Any] = {"config": dataclasses.asdict(config), "seeds": list(seeds), "arms": {}}
    for c in DIVISORS:
        results["arms"][str(c)] = measure(config, c, seeds)
        write(f"{RESULTS}/ewma.jsonl#ewma", results)
