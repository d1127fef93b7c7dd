"""The PPO of each library with its default hyperparameters, on MuJoCo tasks.

    python -m benchmarks libraries HalfCheetah-v5 --steps 3e5 --seeds 10 --variant brax --json mine.jsonl

The variants are the presets of `ppo_parts.recipes.library_ppo`; the protocol is that of `python -m benchmarks mujoco`.
"humanoid" plays without contact forces. The records are in benchmarks/results/libraries.jsonl.
"""

from ppo_parts.recipes import library_ppo

from ._protocol import Variant, run

VARIANTS = {
    name: Variant(library_ppo.make_train, preset, contact_forces=name != "humanoid")
    for name, preset in library_ppo.PRESETS.items()
    if name != "playground"
}


def main() -> None:
    """Run the benchmark from the command line."""
    run(__doc__, VARIANTS, "libraries")
