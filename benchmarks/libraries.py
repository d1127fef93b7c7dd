"""The PPO of each library with its default hyperparameters, on MuJoCo tasks.

    python -m benchmarks libraries HalfCheetah-v5 --steps 3e5 --seeds 10 --variant brax

The variants are the presets of `ppo_parts.recipes.library_ppo`, the protocol is that of `python -m benchmarks mujoco`.
The records are in benchmarks/results/libraries.jsonl.
"""

from __future__ import annotations

import dataclasses

from ppo_parts.recipes import library_ppo

from . import mujoco

VARIANTS = {name: library_ppo.make_train for name, preset in library_ppo.PRESETS.items() if name == preset.library}


def main() -> None:
    """Command line."""
    given, fields = mujoco.read_command_line(__doc__, VARIANTS)
    mujoco.measure(dataclasses.replace(library_ppo.PRESETS[given.variant], **fields), given, VARIANTS, "libraries")
