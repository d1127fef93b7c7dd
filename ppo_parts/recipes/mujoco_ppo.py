"""PPO for MuJoCo, composed of parts: Tianshou's choices, with a shorter trace and less initial noise.

    python -m ppo_parts.recipes.mujoco_ppo --env-id gym:HalfCheetah-v5
    python -m ppo_parts.recipes.mujoco_ppo --env-id gym:Ant-v5,include_cfrc_ext_in_observation=False
    python -m ppo_parts.recipes.mujoco_ppo --env-id gym:Hopper-v5 --num-seeds 5 --eval-episodes 10 --eval-every 50

As in Tianshou's benchmark, advantages are recomputed before each epoch and not standardized, values are not clipped,
and actions in [-1, 1] are mapped to the bounds of the environment. (Tianshou also re-evaluates the observations after
the last step and at time limits; here their recorded values are kept.) `--preset tianshou` also uses Tianshou's trace
and initial noise. Ant learns faster without the contact forces that version 5 adds to the observations, or with
`--obs-clip 1`. docs/results.md has the results. Install its packages with
`pip install --editable ".[train,gymnasium]"`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.training import Range


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.Config):
    """Hyperparameters of Tianshou's `mujoco_ppo.py`, except for `gae_lambda` and `log_std` (0.95, -0.5 there).

    Tianshou's value loss has no factor 1/2, and its coefficient is half of ours.
    """

    env_id: str = "gym:HalfCheetah-v5"
    total_timesteps: int = 1_000_000
    num_envs: int = 8
    num_steps: int = 256
    learning_rate: Annotated[float, "learning rate of Adam, annealed linearly to 0"] = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.9
    num_minibatches: int = 32
    update_epochs: Annotated[int, "passes over each rollout; each recomputes the advantages"] = 10
    clip_coef: float = 0.2
    ent_coef: float = 0.0
    vf_coef: Annotated[float, "weight of the value loss, which has a factor 1/2"] = 0.5
    max_grad_norm: float = 0.5
    hidden: tuple[int, ...] = (64, 64)
    obs_clip: Annotated[float, Range(0, open_low=True), "bound of observations, in standard deviations"] = 10.0
    log_std: float = -1.0


PRESETS = {"mujoco": Config(), "tianshou": Config(gae_lambda=0.95, log_std=-0.5)}


def make_chain(
    config: Config,
    *,
    advantages: pp.Part | None = None,
    refresh: Literal["rollout", "epoch", "every_epoch", "minibatch"] = "epoch",
    surrogate: pp.Part | None = None,
    value_loss: pp.Part | None = None,
) -> pp.Part:
    """Make the chain of this recipe; each option replaces one of its parts."""
    return pp.chain(
        advantages or pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda),
        pp.shuffled_minibatches(config.num_minibatches, config.update_epochs, refresh=refresh),
        surrogate or pp.clipped_surrogate(clip_eps=config.clip_coef),
        pp.policy_diagnostics(),
        value_loss or pp.value_loss(coef=config.vf_coef),
        pp.entropy_bonus(coef=config.ent_coef),
    )


@training.recipe
def make_train(config: Config, env: envs.Env | None = None, pipeline: pp.Part | None = None) -> training.Train:
    """Return the run of a configuration, with your own environment (including its wrappers) or chain if given."""
    if env is None:
        env = envs.make(config.env_id)
        env = envs.prepare(env, normalize=True, gamma=config.gamma, rescale=True, obs_clip=config.obs_clip)
    policy = networks.actor_critic(env, config.hidden, "tanh", log_std=config.log_std)
    rate = pp.linear_schedule(config.learning_rate, 0.0, config.num_updates)
    optimizer = pp.clipped_adam(rate, config.max_grad_norm)
    schedules = {"learning_rate": rate}
    return training.Train.of(config, env, policy, pipeline or make_chain(config), optimizer, schedules=schedules)


if __name__ == "__main__":
    training.main(make_train, PRESETS)  # writes metrics, a learning curve and checkpoints to runs/
