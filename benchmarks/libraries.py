"""The PPO of each library with its default hyperparameters, on MuJoCo tasks.

    python -m benchmarks libraries HalfCheetah-v5 --steps 3e5 --seeds 10 --variant brax

The variants are the presets of `ppo_parts.recipes.library_ppo`, the protocol is that of `python -m benchmarks mujoco`.
"humanoid" plays without contact forces in its observations. The records are in benchmarks/results/libraries.jsonl.
"""

from __future__ import annotations

import dataclasses

from ppo_parts.recipes import library_ppo

from . import mujoco

VARIANTS = {name: library_ppo.make_train for name in library_ppo.PRESETS if name != "playground"}


def main() -> None:
    """Command line."""
    given, fields = mujoco.read_command_line(__doc__, VARIANTS)
    config = dataclasses.replace(library_ppo.PRESETS[given.variant], **fields)
    config = mujoco.without_contact_forces(config) if given.variant == "humanoid" else config
    mujoco.measure(config, given, VARIANTS, "libraries")
