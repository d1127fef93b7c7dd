"""Gymnasium's MuJoCo tasks with `recipes.mujoco_ppo`, in the protocol of Tianshou's benchmark.

    python -m benchmarks mujoco HalfCheetah-v5 --steps 1e6 --seeds 10
    python -m benchmarks mujoco HalfCheetah-v5 --steps 1e6 --seeds 10 --variant refresh_rollout

After every 1/20 of a run (`--evaluations`), 10 episodes are played with the mode of the policy and frozen statistics,
with keys of their own for each seed. Two numbers are recorded for each seed: the best of these evaluations, as Tianshou
reports it, and the mean return of the last 100 training episodes. The best of twenty evaluations favors a lucky one, so
the last evaluation is recorded, too. The records are <task>_<steps>_<variant>_<first seed> of
benchmarks/results/mujoco.jsonl, written after each evaluation. A variant changes one thing of the recipe.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ppo_parts as pp
from ppo_parts import envs, training
from recipes import library_ppo, mujoco_ppo

from ._records import RESULTS
from ._timing import write

EPISODES = 10  # of each evaluation
WITH_FORCES = ("Ant-v5", "Humanoid-v5")  # in version 3, the contact forces are always 0
Config = mujoco_ppo.Config


def variant(config: Config, **parts: Any) -> training.Train:
    """The recipe with another part in its chain; see `recipes.mujoco_ppo.chain`."""
    return mujoco_ppo.make_train(config, pipeline=mujoco_ppo.chain(config, **parts))


def clipped_value_loss(config: Config) -> pp.Part:
    """The value loss of CleanRL."""
    return pp.clipped_value_loss(clip_eps=config.clip_coef, coef=config.vf_coef)


def normalized_surrogate(config: Config) -> pp.Part:
    """The recipe's surrogate on advantages that are standardized in each minibatch."""
    return pp.chain(pp.advantage_normalize(), pp.clipped_surrogate(clip_eps=config.clip_coef))


def unscaled_rewards(config: Config) -> envs.Env:
    """The environment with normalized observations only."""
    return envs.normalize_observation(envs.clip_action(envs.make(config.env_id)))


def without_contact_forces(config: Config) -> Config:
    """Ant and Humanoid with observations as in their version 3, where contact forces were always 0."""
    return dataclasses.replace(config, env_id=f"{config.env_id},include_cfrc_ext_in_observation=False")


SETTINGS: dict[str, Callable[[Config], Config]] = {  # variants that change settings
    "no_contact_forces": without_contact_forces,
    "obs_clip_1": lambda c: dataclasses.replace(c, obs_clip=1.0),
    "tianshou": lambda c: dataclasses.replace(c, gae_lambda=0.95, log_std=-0.5),
    "lambda_0.95": lambda c: dataclasses.replace(c, gae_lambda=0.95),
    "log_std_-0.5": lambda c: dataclasses.replace(c, log_std=-0.5),
}
Variant = Callable[[Config], training.Train]
VARIANTS: dict[str, Variant] = {
    "recipe": mujoco_ppo.make_train,
    **dict.fromkeys(SETTINGS, mujoco_ppo.make_train),
    "refresh_rollout": lambda c: variant(c, refresh="rollout"),
    "refresh_minibatch": lambda c: variant(c, refresh="minibatch"),
    "value_clip": lambda c: variant(c, value_loss=clipped_value_loss(c)),
    "advantage_normalize": lambda c: variant(c, surrogate=normalized_surrogate(c)),
    "unscaled_rewards": lambda c: mujoco_ppo.make_train(c, unscaled_rewards(c)),
}


def measure(
    config: Any,
    args: argparse.Namespace,
    variants: Mapping[str, Callable[[Any], training.Train]] = VARIANTS,
    benchmark: str = "mujoco",
) -> None:
    """Train the seeds of `args` in one program, and write the results after each evaluation."""
    task, variant, seeds, first_seed = args.task, args.variant, args.seeds, args.first_seed
    train = variants[variant](config)
    every = max(1, train.num_updates // args.evaluations)
    keys = jnp.stack([jax.random.key(first_seed + i) for i in range(seeds)])

    def several(state: Any) -> Any:
        return jax.lax.scan(lambda state, _: train.step(state), state, None, length=every)

    def play(key: jax.Array, state: Any, number: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(key, 2**20), number)
        return jnp.mean(train.evaluate_policy(key, state, EPISODES, mode=True).episode_return)

    advance, evaluate = jax.jit(jax.vmap(several)), jax.jit(jax.vmap(play, in_axes=(0, 0, None)))
    state, began = jax.jit(jax.vmap(train.init))(keys), time.perf_counter()
    rows: list[dict[str, Any]] = []
    seen: list[tuple[np.ndarray, np.ndarray]] = []  # returns and numbers of episodes, [seeds, updates]
    for number in range(train.num_updates // every):
        state, metrics = advance(state)
        seen.append((np.asarray(metrics["episode_return"]), np.asarray(metrics["episodes"])))
        returns, episodes = (np.concatenate(x, axis=1) for x in zip(*seen, strict=True))
        row = {
            "env_steps": (number + 1) * every * train.steps_per_update,
            "evaluation": np.asarray(evaluate(keys, state, jnp.int32(number))),
            "last_100_episodes": np.asarray(training.last_episodes_return(returns, episodes)),
            "approx_kl": float(np.nanmean(metrics["approx_kl"])),
            "seconds": time.perf_counter() - began,
        }
        rows.append(row)
        best = np.max([row["evaluation"] for row in rows], axis=0)
        result = {
            "task": task,
            "variant": variant,
            "config": dataclasses.asdict(config),
            "seeds": list(range(first_seed, first_seed + seeds)),
            "env_steps": row["env_steps"],
            "complete": number + 1 == train.num_updates // every,
            "best_evaluation": training.summary(best),
            "last_evaluation": training.summary(row["evaluation"]),
            "last_100_episodes": training.summary(row["last_100_episodes"]),
            "curve": rows,
        }
        name = f"{task}_{config.total_timesteps}_{variant}_{first_seed}"
        write(f"{RESULTS}/{benchmark}.jsonl#{name}", f"benchmarks {benchmark}", result)
        print(f"{task} {variant} {row['env_steps']:>9,}: best {best.mean():7.1f} +- {best.std():.1f}", flush=True)


def parser_of(description: str | None, variants: Mapping[str, Any]) -> argparse.ArgumentParser:
    """The command line of a benchmark with these variants; the first is the default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="HalfCheetah-v5, Ant-v5, Walker2d-v5, Hopper-v5, Humanoid-v5, ...")
    parser.add_argument("--steps", type=float, default=1e6, help="environment steps of each seed")
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--evaluations", type=int, default=20, help="how many, at equal distances")
    parser.add_argument("--variant", choices=variants, default=next(iter(variants)))
    return parser


def main() -> None:
    """Command line."""
    args = parser_of(__doc__, VARIANTS).parse_args()
    config = Config(env_id=f"gym:{args.task}", total_timesteps=int(args.steps), seed=args.first_seed)
    measure(SETTINGS.get(args.variant, lambda config: config)(config), args)


def libraries() -> None:
    """The PPO of each library with its default hyperparameters: the presets of `recipes.library_ppo`."""
    variants = {name: library_ppo.make_train for name in library_ppo.PRESETS if name != "playground"}
    args = parser_of(libraries.__doc__, variants).parse_args()
    given = {"env_id": f"gym:{args.task}", "total_timesteps": int(args.steps), "seed": args.first_seed}
    config = dataclasses.replace(library_ppo.PRESETS[args.variant], **given)
    measure(config, args, variants, "libraries")
