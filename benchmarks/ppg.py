"""Phasic policy gradient (PPG) against PPO, with a network that policy and value share, and with one for each of them.

    python -m benchmarks ppg

The task is CartPole, whose returns are large: in a shared network, the gradient of the value loss is much larger than
that of the policy loss. PPG has two networks, as one of the two arms of PPO. All arms have the same rollouts and sizes
of minibatches, and are trained with each of three learning rates. Writes
benchmarks/results/ppg.jsonl.

Reference: Cobbe et al. 2021, Phasic Policy Gradient, arXiv:2009.04416.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
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
    """Hyperparameters of all arms; those of PPO hold for PPG's phases of policy and value, too."""

    total_timesteps: int = 100_000
    num_envs: int = 8
    arm: Literal["shared", "separate", "phasic"] = "phasic"
    learning_rate: Annotated[float, at_least(0)] = 1.5e-3
    ent_coef: Annotated[float, at_least(0)] = 0.0
    num_rollouts: Annotated[int, at_least(1)] = 16  # between auxiliary phases
    auxiliary_epochs: Annotated[int, at_least(1)] = 6
    beta_clone: Annotated[float, at_least(0)] = 100.0  # the paper's is 1, and its rewards are normalized


ARMS = {"PPO, one network": "shared", "PPO, two networks": "separate", "PPG": "phasic"}
RATES = (5e-4, 1.5e-3, 5e-3)


class Network(nn.Module):
    """Logits and a value, from features that they share."""

    actions: int
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, obs: Array) -> tuple[Array, Array]:
        """Evaluate observations `[..., D]`."""
        x = networks.mlp(obs, self.hidden)
        return networks.dense(self.actions, gain=0.01)(x), networks.dense(1, gain=1.0)(x)[..., 0]


def make_policy(env: envs.Env, config: Config) -> pp.Policy:
    """One network, whose value is the critic; or two, where the value of the first one is an auxiliary output."""
    network, example = Network(env.action_space.n, config.hidden), jnp.zeros(env.observation_space.shape)
    names = ("policy",) if config.arm == "shared" else ("policy", "value")

    def init(key: Array) -> Any:
        return {name: network.init(k, example) for name, k in zip(names, jax.random.split(key, 2), strict=False)}

    def evaluate(params: Any, batch: pp.Batch) -> pp.Output:
        logits, auxiliary = network.apply(params["policy"], batch.obs)
        value = network.apply(params["value"], batch.obs)[1] if "value" in params else auxiliary
        return pp.Output(pp.distributions.Categorical(logits), value, aux={"value": auxiliary})

    return pp.Policy(init, evaluate)


def remember_policy() -> pp.Part:
    """Store the policy at the start of the auxiliary phase as `batch.behavior`."""

    def update(batch: pp.Batch, context: pp.Context) -> pp.Batch:
        return batch.replace(behavior=context.evaluate(context.params, batch).distribution)

    return pp.stateless(update, name="remember_policy", provides=("behavior",), place="before_sampler")


def ppo(config: Config) -> pp.Part:
    """The chain of both arms of PPO."""
    return pp.chain(
        pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda),
        pp.shuffled_minibatches(config.num_minibatches, config.update_epochs),
        pp.advantage_normalize(),
        pp.clipped_surrogate(clip_eps=config.clip_coef),
        pp.value_loss(coef=config.vf_coef),
        pp.entropy_bonus(coef=config.ent_coef),
    )


def phasic(config: Config, like: pp.Batch) -> pp.Part:
    """The chain of PPG; minibatches of all phases have the same size."""
    size, every = config.num_minibatches, config.num_rollouts
    auxiliary = pp.chain(
        pp.replay(every, like),
        remember_policy(),
        pp.shuffled_minibatches(size * every, config.auxiliary_epochs),
        pp.within(pp.value_loss(), read={"value": "current.aux.value"}, name="joint"),
        pp.kl_penalty(coef=config.beta_clone, estimator="analytic"),
        pp.value_loss(),
    )
    return pp.chain(
        pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda),
        pp.phases(
            policy=pp.chain(
                pp.shuffled_minibatches(size, config.update_epochs),
                pp.advantage_normalize(),
                pp.clipped_surrogate(clip_eps=config.clip_coef),
                pp.entropy_bonus(coef=config.ent_coef),
            ),
            value=pp.chain(pp.shuffled_minibatches(size, config.update_epochs), pp.value_loss()),
            auxiliary=pp.phase(auxiliary, trains=None, every=every),
        ),
    )


def make_train(config: Config) -> training.Train:
    """Make a pure function `train(key) -> TrainResult(state, metrics)`."""
    training.check_config(config)
    env = envs.prepare(envs.make(config.env_id))
    policy, adam = make_policy(env, config), optax.flatten(optax.adam(config.learning_rate, eps=1e-5))
    if config.arm != "phasic":
        return training.Train.of(config, env, policy, ppo(config), adam)
    rollout = pp.rollout(env, policy, num_envs=config.num_envs, num_steps=config.num_steps)

    def collected(key: Array) -> pp.Batch:
        batch = rollout.collect(key, policy.init(key), rollout.init(key))[1]
        return pp.Batch(obs=batch.obs, action=batch.action, log_prob=batch.log_prob, target=batch.reward)

    like = jax.eval_shape(collected, jax.random.key(0))
    optimizers = dict.fromkeys(("policy", "value", "auxiliary"), adam)
    return training.Train.of(config, env, policy, phasic(config, like), optimizers)


def measure(config: Config, seeds: range) -> dict[str, Any]:
    """Train all seeds with each learning rate, one run after another, so that phases that do not run cost nothing."""

    def one(column: tuple[Array, Array]) -> dict[str, Array]:
        return outcome(make_train(dataclasses.replace(config, learning_rate=column[1])), column[0])

    columns = (jnp.tile(jnp.asarray(seeds), len(RATES)), jnp.repeat(jnp.asarray(RATES), len(seeds)))
    found = jax.jit(lambda columns: jax.lax.map(one, columns))(columns)
    by_rate = {what: np.split(np.asarray(x), len(RATES)) for what, x in found.items()}
    return {f"{rate:g}": summarized({what: x[k] for what, x in by_rate.items()}) for k, rate in enumerate(RATES)}


def main() -> None:
    """Command line."""
    options = parser(__doc__, seeds=10, first_seed=1, steps=Config().total_timesteps).parse_args()
    config, seeds = Config(total_timesteps=options.steps), seeds_of(options)
    results: dict[str, Any] = {"config": dataclasses.asdict(config), "seeds": list(seeds), "arms": {}}
    for name, arm in ARMS.items():
        results["arms"][name] = measure(dataclasses.replace(config, arm=arm), seeds)
        for rate, found in results["arms"][name].items():
            print(f"{name:18} rate {rate}: {show(found)}", flush=True)
        write(f"{RESULTS}/ppg.jsonl#ppg", results)
