"""CleanRL's PPO (`ppo.py`, `ppo_continuous_action.py`), composed of parts.

    python -m ppo_parts.recipes.cleanrl_ppo --env-id CartPole-v1
    python -m ppo_parts.recipes.cleanrl_ppo --preset continuous --env-id Pendulum-v1

docs/fidelity.md lists the differences from the original. The most important one is that an episode cut by a time limit
is bootstrapped from its final observation.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import ppo_parts as pp
from ppo_parts import envs, networks, training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.Config):
    """Hyperparameters, with CleanRL's names and defaults."""

    env_id: str = "CartPole-v1"
    total_timesteps: int = 500_000
    num_envs: int = 4
    num_steps: int = 128
    learning_rate: float = 2.5e-4
    anneal_lr: bool = True
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int = 4
    update_epochs: int = 4
    norm_adv: Annotated[bool, "standardize advantages in each minibatch"] = True
    clip_coef: Annotated[float, "how far the ratio (and the value, if clipped) may move"] = 0.2
    clip_vloss: Annotated[bool, "clip the value loss as well"] = True
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float | None = None
    normalize_env: bool = False
    hidden: tuple[int, ...] = (64, 64)


PRESETS = {
    "discrete": Config(),
    "continuous": Config(  # ppo_continuous_action.py
        env_id="Pendulum-v1", total_timesteps=1_000_000, num_envs=1, num_steps=2048, normalize_env=True,
        learning_rate=3e-4, num_minibatches=32, update_epochs=10, ent_coef=0.0,
    ),
    "golf": Config(  # hybrid actions, which CleanRL lacks
        env_id="tasks:golf", total_timesteps=1_000_000, num_envs=32, num_steps=64, learning_rate=1e-3, gamma=0.95,
        num_minibatches=8, update_epochs=10, ent_coef=0.0,
    ),
}  # fmt: skip


@training.recipe
def make_train(
    config: Config,
    env: envs.Env | None = None,
    pipeline: pp.Part | None = None,
    policy: pp.Policy | None = None,
) -> training.Train:
    """Return the run, a pure function `train(key) -> TrainResult(state, metrics)`.

    To sweep over numbers in the configuration, call `make_train` inside a vmapped function.

    `env` is your own environment with any wrappers, `pipeline` your own chain and `policy` your own policy; None means
    as configured. If the policy is recurrent, minibatches consist of whole segments, as in `ppo_atari_lstm.py`.
    """
    if env is None:
        env = envs.prepare(envs.make(config.env_id), normalize=config.normalize_env, gamma=config.gamma)
    policy = policy or networks.actor_critic(env, config.hidden, "tanh")
    recurrent = getattr(policy, "initial_carry", None) is not None
    minibatches = pp.segment_minibatches if recurrent else pp.shuffled_minibatches
    estimator = pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda)
    cleanrl = pp.chain(
        pp.agents.zero_sum(estimator) if env.zero_sum else estimator,
        minibatches(config.num_minibatches, config.update_epochs),
        pp.advantage_normalize(ddof=1) if config.norm_adv else pp.identity(),
        pp.clipped_surrogate(clip_eps=config.clip_coef),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=config.clip_coef, coef=config.vf_coef)
        if config.clip_vloss
        else pp.value_loss(coef=config.vf_coef),
        pp.entropy_bonus(coef=config.ent_coef),
        pp.identity() if config.target_kl is None else pp.kl_early_stop(config.target_kl, check="epoch"),
    )
    annealed = pp.linear_schedule(config.learning_rate, 0.0, config.num_updates)
    rate = annealed if config.anneal_lr else config.learning_rate
    optimizer = pp.clipped_adam(rate, config.max_grad_norm)
    return training.Train.of(config, env, policy, pipeline or cleanrl, optimizer, schedules={"learning_rate": rate})


if __name__ == "__main__":
    training.main(make_train, PRESETS)  # writes metrics, a learning curve and checkpoints to runs/
