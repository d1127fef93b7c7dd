"""TRPO for MuJoCo: one natural-gradient step of the actor per rollout, then epochs of gradient steps of the critic.

    python -m ppo_parts.recipes.trpo --env-id gym:Hopper-v5
    python -m ppo_parts.recipes.trpo --env-id gym:Walker2d-v5 --num-seeds 5 --eval-episodes 10 --eval-every 50

The hyperparameters come from rl-baselines3-zoo, except the trust region, which here shrinks to 0 from twice its size
there. Rollouts and environments are the same as in `mujoco_ppo`. docs/results.md has the results next to those of PPO.
Install its packages with `pip install --editable ".[train,gymnasium]"`.

Reference: Schulman et al. 2015, Trust Region Policy Optimization, arXiv:1502.05477.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import optax

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.training import Range


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.Config):
    """Hyperparameters of TRPO; the critic is trained with Adam."""

    env_id: str = "gym:Hopper-v5"
    total_timesteps: int = 1_000_000
    num_envs: int = 8
    num_steps: int = 256
    max_kl: Annotated[
        float, Range(0, open_low=True), "largest divergence of an update of the actor, annealed linearly to 0"
    ] = 0.02
    learning_rate: Annotated[float, "learning rate of the critic"] = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: Annotated[int, "gradient steps of the critic per epoch"] = 16
    update_epochs: Annotated[int, "passes of the critic over each rollout"] = 20
    hidden: tuple[int, ...] = (64, 64)
    obs_clip: Annotated[float, Range(0, open_low=True), "bound of observations, in standard deviations"] = 10.0
    log_std: float = 0.0


PRESETS = {"trpo": Config()}


def make_chain(config: Config) -> pp.Part:
    """Make the chain of this recipe, with a phase for each network."""
    actor = pp.chain(
        pp.full_batch(),
        pp.advantage_normalize(),
        pp.policy_loss(pp.functional.importance_weighted_surrogate),
        pp.kl_penalty(coef=1.0, estimator="analytic"),  # the constraint of `natural_gradient`
    )
    critic = pp.chain(
        pp.shuffled_minibatches(config.num_minibatches, config.update_epochs),
        pp.policy_diagnostics(),  # the actor has changed by now, so this measures its step
        pp.value_loss(),
    )
    return pp.chain(
        pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda),
        # Each phase trains all parameters, because its losses reach only one of the networks.
        pp.phases(actor=pp.phase(actor, trains=None), critic=pp.phase(critic, trains=None)),
    )


@training.recipe
def make_train(config: Config, env: envs.Env | None = None, pipeline: pp.Part | None = None) -> training.Train:
    """Return the run of a configuration, with your own environment (including its wrappers) or chain if given."""
    if env is None:
        env = envs.make(config.env_id)
        env = envs.prepare(env, normalize=True, gamma=config.gamma, rescale=True, obs_clip=config.obs_clip)
    policy = networks.actor_critic(env, config.hidden, "tanh", log_std=config.log_std)
    max_kl = pp.linear_schedule(config.max_kl, 0.0, config.num_updates)
    optimizers = {"actor": pp.optim.natural_gradient(max_kl, cg_steps=25), "critic": optax.adam(config.learning_rate)}
    schedules = {"max_kl": max_kl}
    return training.Train.of(config, env, policy, pipeline or make_chain(config), optimizers, schedules=schedules)


if __name__ == "__main__":
    training.main(make_train, PRESETS)  # writes metrics, a learning curve and checkpoints to runs/
