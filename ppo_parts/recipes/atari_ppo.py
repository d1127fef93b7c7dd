"""CleanRL's PPO for Atari (`ppo_atari.py`): the chain of `cleanrl_ppo` with the convolutions of DQN.

    python -m ppo_parts.recipes.atari_ppo --env-id ale:breakout

A lost life terminates an episode, rewards are clipped to their sign, and the reported returns are those of whole games.
Install its packages with `pip install --editable ".[train,atari]"`.
"""

from __future__ import annotations

import dataclasses

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.recipes import cleanrl_ppo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(cleanrl_ppo.Config):
    """Hyperparameters, with the names and defaults of CleanRL's `ppo_atari.py`."""

    env_id: str = "ale:breakout"
    total_timesteps: int = 10_000_000
    num_envs: int = 8
    clip_coef: float = 0.1


PRESETS = {"atari": Config()}


@training.recipe
def make_train(config: Config, env: envs.Env | None = None, pipeline: pp.Part | None = None) -> training.Train:
    """Return the run of `cleanrl_ppo` with a convolutional network; `env` and `pipeline` are the same there."""
    if config.hidden != Config.hidden or config.normalize_env:
        raise pp.errors.UserValueError(
            "atari_ppo: hidden and normalize_env have no effect here, because the network is networks.nature_cnn and "
            "rewards are clipped: leave them out"
        )
    if env is None:
        env = envs.clip_reward(envs.make(config.env_id, episodic_life=True))
    return cleanrl_ppo.make_train(config, env, pipeline, networks.nature_cnn(env))


if __name__ == "__main__":
    training.main(make_train, PRESETS)  # writes metrics, a learning curve and checkpoints to runs/
