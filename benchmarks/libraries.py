"""The PPO of each library with its default hyperparameters, on MuJoCo tasks: the presets of `recipes.library_ppo`.

    python -m benchmarks libraries HalfCheetah-v5 --steps 3e5 --seeds 10 --evaluations 6 --variant rsl_rl

All presets have the same environments, normalization and network. The protocol is that of `python -m benchmarks
mujoco`. The results are in benchmarks/results/libraries/.
"""

from __future__ import annotations

import dataclasses

from recipes import library_ppo

from . import mujoco

RESULTS = mujoco.RESULTS.parent / "libraries"
VARIANTS = {name: library_ppo.make_train for name in library_ppo.PRESETS if name != "playground"}


def main() -> None:
    """Command line."""
    args = mujoco.parser_of(__doc__, VARIANTS).parse_args()
    config = dataclasses.replace(
        library_ppo.PRESETS[args.variant],
        env_id=f"gym:{args.task}",
        total_timesteps=int(args.steps),
        seed=args.first_seed,
    )
    mujoco.measure(config, args, VARIANTS, RESULTS)


if __name__ == "__main__":
    main()
