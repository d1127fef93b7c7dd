"""Phasic policy gradient (PPG) against PPO, with a network that policy and value share, and with one for each of them.

    python -m benchmarks ppg

The task is CartPole, whose returns are large: in a shared network, the gradient of the value loss is much larger than
that of the policy loss. PPG has two networks, as one of the two arms of PPO. All arms have the same rollouts and sizes
of minibatches, and are trained with each of three learning rates. Writes benchmarks/results/ppg.json and
docs/img/ppg.png, and fills docs/gallery/values.md.

Reference: Cobbe et al. 2021, Phasic Policy Gradient, arXiv:2009.04416.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.training import at_least

from . import _arms, _pages
from ._arms import MEASURES, ROOT, cell, draw_curves, outcome, summarized
from ._timing import positive, record

Array = jax.Array
RESULTS = ROOT / "benchmarks/results/ppg.json"
PAGE, PICTURE = ROOT / "docs/gallery/values.md", ROOT / "docs/img/ppg.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_arms.Config):
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

    columns = (jnp.tile(jnp.arange(seeds.start, seeds.stop), len(RATES)), jnp.repeat(jnp.asarray(RATES), len(seeds)))
    found = jax.tree.map(np.asarray, jax.jit(lambda columns: jax.lax.map(one, columns))(columns))
    pieces = [slice(k * len(seeds), (k + 1) * len(seeds)) for k in range(len(RATES))]
    return {
        f"{rate:g}": summarized({what: x[piece] for what, x in found.items()})
        for rate, piece in zip(RATES, pieces, strict=True)
    }


def block(results: dict[str, Any]) -> list[str]:
    """The picture, and a table with a line for each arm and measure, and a column for each learning rate."""
    lines = [
        [name, words, *(cell(found[what]) for found in arm.values())]
        for what, words in MEASURES.items()
        for name, arm in results["arms"].items()
    ]
    lines = _pages.table(["", "", *(f"learning rate {rate:g}" for rate in RATES)], lines)[:-1]
    return ["", f"![Return of PPO and PPG in CartPole against environment steps](../img/{PICTURE.name})", "", *lines]


def draw(results: dict[str, Any]) -> None:
    """Return against environment steps, for each learning rate."""
    figure, panels = _pages.canvas(len(RATES), width=4)
    for axes, rate in zip(panels, RATES, strict=True):
        for k, (name, arm) in enumerate(results["arms"].items()):
            draw_curves(axes, results["config"]["total_timesteps"], arm[f"{rate:g}"]["curves"], name, f"C{k}")
        axes.set(xlabel="environment steps", title=f"learning rate {rate:g}", ylim=(0, 520))
    panels[0].set(ylabel="return")
    panels[0].legend(frameon=False)
    _pages.save(figure, PICTURE)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=positive, default=10, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=1, help="the first of them")
    parser.add_argument("--steps", type=positive, default=Config().total_timesteps, help="environment steps of a run")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    options = parser.parse_args()
    config = Config(total_timesteps=options.steps)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    results: dict[str, Any] = {"config": dataclasses.asdict(config), "seeds": list(seeds), "arms": {}}
    for name, arm in {} if options.draw else ARMS.items():
        began = time.perf_counter()
        results["arms"][name] = measure(dataclasses.replace(config, arm=arm), seeds)
        for rate, found in results["arms"][name].items():
            print(f"{name:18} rate {rate}: {cell(found['second_half'])}, new {cell(found['evaluation'])}", flush=True)
        print(f"{time.perf_counter() - began:.0f} s", flush=True)
        training.write_json(RESULTS, record("benchmarks ppg", results))
    results = json.loads(RESULTS.read_text())["results"]
    draw(results)
    PAGE.write_text(_pages.filled(PAGE.read_text(), "ppg", block(results)))
