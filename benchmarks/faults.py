"""CleanRL's PPO with planted faults. Each fault is a number, so one program trains with all of them side by side.

`python -m benchmarks doctor` counts which of them the doctor finds; a *lane* is one of the runs of a program.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import ppo_parts as pp
from ppo_parts import distributions, envs, networks, training
from ppo_parts.recipes.cleanrl_ppo import Config

Numbers = Mapping[str, Any]
TRACED = ("learning_rate", "ent_coef", "clip_coef", "gamma", "vf_coef")  # fields that differ between lanes
FAULTS: dict[str, dict[str, float]] = {
    "reward_sign": {"reward": -1}, "reward_scale_large": {"reward": 1e3}, "reward_scale_small": {"reward": 1e-3},
    "observations_large": {"obs": 1e3}, "statistics_frozen": {"freeze": 1}, "observations_vanish": {"explode": 1},
    "learning_rate_large": {"learning_rate": 30}, "learning_rate_small": {"learning_rate": 1 / 30},
    "schedule_ends_early": {"unit": 32}, "entropy_collapsed": {"certain": 3}, "entropy_bonus_large": {"ent_coef": 1.0},
    "clip_small": {"clip_coef": 1e-3}, "clip_large": {"clip_coef": 10.0},
    "advantage_not_standardized": {"standardize": 0}, "advantage_lost": {"advantage": 0}, "gamma_short": {"gamma": 0.5},
    "time_limit_as_end": {"limit": 1}, "flags_shifted": {"shift": 1}, "action_changed": {"stored": 1},
    "actions_saturated": {"noise": 1}, "value_dominates": {"vf_coef": 1e3}, "value_explains_nothing": {"vf_coef": 0.0},
    "stops_at_once": {"target_kl": 1e-9}, "dead_units": {"dead": 1}, "policy_differs": {"other": 1},
    "evaluation_apart": {"stale": 1}, "evaluation_apart (statistics)": {"unnormalized": 1}, "never_ends": {"never": 1},
    "duplicated_envs": {"same": 1}, "not_finite": {"nan": 1}, "memory_not_reset": {"remembers": 1},
    "action_unused": {"unused": 1}, "reward_constant": {"constant": 1}, "end_as_time_limit": {"ended": 1},
    "log_prob_wrong": {"bent": 1}, "softmax_twice": {"twice": 1}, "actions_narrow": {"narrow": 1},
    "update_reversed": {"advantage": -1},
}  # fmt: skip
"""Faults by the rule that should find them (text in brackets distinguishes variants); a learning rate is a factor."""
NORMAL: dict[str, float] = {name: 0 for fault in FAULTS.values() for name in fault if name not in TRACED}
NORMAL |= {"reward": 1.0, "obs": 1.0, "advantage": 1.0, "standardize": 1, "unit": 1, "target_kl": 1e9}
"""Numbers that plant faults, at values where they do nothing. Other faults are fields of the configuration."""


def plant_in_env(env: envs.Env, f: Numbers, normalized: bool) -> envs.Env:
    """Plant the faults of the environment and of its wrappers."""

    def shown(obs: Any) -> Any:
        return f["obs"] * jnp.where(f["same"] > 0, jnp.broadcast_to(obs[:1], obs.shape), obs)

    def spoiled(old: Any, new: Any) -> Any:
        if not normalized:
            return new
        kept = jax.tree.map(lambda a, b: jnp.where(f["freeze"] > 0, a, b), old.inner.moments, new.inner.moments)
        begins = (f["explode"] > 0) & (kept.seen < 1000)
        kept = kept._replace(var=jnp.where(begins, 1e10, kept.var))
        return new._replace(inner=new.inner._replace(moments=kept))

    def reset(key: Any, num_envs: int) -> Any:
        state, obs = env.reset(key, num_envs)
        return state, shown(obs)

    def step(key: Any, state: Any, action: Any) -> Any:
        first = envs.is_discrete(env.action_space) or jnp.arange(action.shape[-1]) == 0
        action = jnp.where((f["unused"] > 0) & first, jnp.zeros_like(action), action)
        new, out = env.step(key, state, action)
        late = out.terminated & (f["ended"] > 0)
        out = out._replace(terminated=out.terminated & ~late, truncated=out.truncated | late)
        runs = f["never"] == 0
        out = out._replace(terminated=out.terminated & runs, truncated=out.truncated & runs)
        return spoiled(state, new), out._replace(obs=shown(out.obs), final_obs=shown(out.final_obs))

    def evaluation(state: Any) -> envs.Env:
        return plant_in_env(env.evaluation(state), NORMAL | {"obs": f["obs"]}, False)

    return env._replace(reset=reset, step=step, evaluation=evaluation)


def plant_in_rollout(rollout: pp.Rollout, f: Numbers, space: Any) -> pp.Rollout:
    """Plant the faults of the stored rollout."""

    def collect(key: Any, params: Any, state: Any) -> Any:
        state, batch, metrics = rollout.collect(key, params, state)
        limit = f["limit"] > 0
        ends = {"terminated": batch.terminated | (limit & batch.truncated), "truncated": batch.truncated & ~limit}
        ends = {name: jnp.where(f["shift"] > 0, jnp.roll(x, 1, axis=0).at[0].set(False), x) for name, x in ends.items()}
        reward = jnp.where(f["constant"] > 0, -1.0, batch.reward * f["reward"])
        reward = jnp.where((f["nan"] > 0) & (jax.random.uniform(key) < 0.2), jnp.nan, reward)
        action = batch.action
        if not envs.is_discrete(space):
            action = jnp.where(f["stored"] > 0, jnp.clip(action, space.low, space.high), action)
        obs = batch.obs * (1 + 0.2 * f["other"])
        return state, batch.replace(reward=reward, action=action, obs=obs, **ends), metrics

    return rollout._replace(collect=collect)


def plant_in_distribution(distribution: Any, f: Numbers, boxed: bool) -> Any:
    """Plant a second softmax; or a range of 1 %, and squashed samples whose log-probability ignores that."""
    if not boxed:
        logits = distribution.logits
        return distributions.Categorical(jnp.where(f["twice"] > 0, jax.nn.softmax(logits), logits))
    width = jnp.where(f["narrow"] > 0, 0.01, 1.0)

    def sample(*, seed: Any) -> Any:
        action = distribution.sample(seed=seed)
        return width * jnp.where(f["bent"] > 0, jnp.tanh(action), action)

    def log_prob(action: Any) -> Any:
        return distribution.log_prob(action / width) - action.shape[-1] * jnp.log(width)

    unchanged = {"entropy": distribution.entropy, "mode": lambda: width * distribution.mode()}
    return types.SimpleNamespace(sample=sample, log_prob=log_prob, **unchanged)


def plant_in_policy(policy: pp.Policy, f: Numbers, memory: bool, boxed: bool) -> pp.Policy:
    """Plant the faults of the first parameters, of the memory, and of the distribution."""

    def init(key: Any) -> Any:
        def changed(path: Any, x: Any) -> Any:
            name = jax.tree_util.keystr(path)
            if "log_std" in name:
                return x + 4.0 * f["noise"]
            hidden = "bias" in name and x.shape[-1] > 4
            return x + 50.0 * f["dead"] * (jnp.arange(x.shape[-1]) % 8 < 6) if hidden else x

        return jax.tree.map_with_path(changed, policy.init(key))

    def evaluate(params: Any, batch: pp.Batch) -> Any:
        output = policy(params, batch.replace(reset=batch.reset * (1 - f["remembers"])) if memory else batch)
        return output._replace(distribution=plant_in_distribution(output.distribution, f, boxed))

    return dataclasses.replace(policy, init=init, evaluate=evaluate)


def make_train(config: Config, f: Numbers, env: envs.Env, shared: bool, memory: bool) -> training.Train:
    """Make a pure function `train(key) -> TrainResult(state, metrics)`."""
    env = envs.prepare(env, normalize=config.normalize_env, gamma=config.gamma)
    network = networks.actor_critic(env, config.hidden, "tanh", shared=shared, memory="lstm" if memory else None)
    minibatches = pp.segment_minibatches if memory else pp.shuffled_minibatches

    def scaled(batch: pp.Batch) -> pp.Batch:
        x = batch.advantage
        standardized = pp.functional.advantage_normalize(x)
        return batch.replace(advantage=f["advantage"] * jnp.where(f["standardize"] > 0, standardized, x))

    def certain(batch: pp.Batch) -> pp.Batch:
        return batch.add_loss("certain", f["certain"] * batch.current.distribution.entropy())

    pipeline = pp.chain(
        pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda),
        minibatches(config.num_minibatches, config.update_epochs),
        pp.stateless(scaled, requires=("advantage",), provides=("advantage",), place="after_sampler"),
        pp.clipped_surrogate(clip_eps=config.clip_coef),
        pp.policy_diagnostics(),
        pp.value_loss(coef=config.vf_coef),
        pp.entropy_bonus(coef=config.ent_coef),
        pp.stateless(certain, provides=("losses",), place="after_sampler"),
        pp.kl_early_stop(f["target_kl"], check="epoch"),
    )

    def rate(update: Any) -> Any:
        return config.learning_rate * jnp.maximum(0, 1 - update * f["unit"] / config.num_updates)

    policy = plant_in_policy(network, f, memory, not envs.is_discrete(env.action_space))
    env = plant_in_env(env, f, config.normalize_env)
    train = training.Train.of(config, env, policy, pipeline, pp.clipped_adam(rate, config.max_grad_norm))
    return dataclasses.replace(train, rollout=plant_in_rollout(train.rollout, f, env.action_space))
