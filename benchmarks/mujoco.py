"""Gymnasium's MuJoCo tasks with `mujoco_ppo` and `trpo`, in the protocol of Tianshou's benchmark.

    python -m benchmarks mujoco HalfCheetah-v5 --steps 1e6 --seeds 10 --variant refresh_rollout

After every 1/20 of a run (`--evaluations`), 10 episodes are played with the mode of the policy and frozen statistics.
Like Tianshou, the table shows the best evaluation by its mean over the seeds, which favors lucky ones. The records,
<task>_<steps>_<variant>_<first seed> of benchmarks/results/mujoco.jsonl, have all evaluations. A variant is `trpo`, or
`mujoco_ppo` with one or a few choices changed.
"""

from typing import Any

import ppo_parts as pp
from ppo_parts import envs, training
from ppo_parts.recipes import mujoco_ppo, trpo

from ._protocol import Variant, run

Config = mujoco_ppo.Config


def with_parts(config: Config, **parts: Any) -> training.Train:
    """Make the recipe with another part in its chain; see `ppo_parts.recipes.mujoco_ppo.make_chain`."""
    return mujoco_ppo.make_train(config, pipeline=mujoco_ppo.make_chain(config, **parts))


VARIANTS = {
    "recipe": Variant(mujoco_ppo.make_train),
    "no_contact_forces": Variant(mujoco_ppo.make_train, contact_forces=False),
    "obs_clip_1": Variant(mujoco_ppo.make_train, Config(obs_clip=1.0)),
    "tianshou": Variant(mujoco_ppo.make_train, mujoco_ppo.PRESETS["tianshou"]),
    "long_horizon": Variant(mujoco_ppo.make_train, Config(gamma=0.9999, gae_lambda=0.995, log_std=0.0)),
    "trpo": Variant(trpo.make_train, trpo.Config()),
    "lambda_0.95": Variant(mujoco_ppo.make_train, Config(gae_lambda=0.95)),
    "log_std_-0.5": Variant(mujoco_ppo.make_train, Config(log_std=-0.5)),
    "refresh_rollout": Variant(lambda c: with_parts(c, refresh="rollout")),
    "refresh_minibatch": Variant(lambda c: with_parts(c, refresh="minibatch")),
    "value_clip": Variant(
        lambda c: with_parts(c, value_loss=pp.clipped_value_loss(clip_eps=c.clip_coef, coef=c.vf_coef))),
    "advantage_normalize": Variant(lambda c: with_parts(
        c, surrogate=pp.chain(pp.advantage_normalize(), pp.clipped_surrogate(clip_eps=c.clip_coef)))),
    "unscaled_rewards": Variant(
        lambda c: mujoco_ppo.make_train(c, envs.normalize_observation(envs.clip_action(envs.make(c.env_id))))),
}  # fmt: skip


def main() -> None:
    """Run the benchmark from the command line."""
    run(__doc__, VARIANTS, "mujoco")
