"""The effect of each difference between the PPO of libraries: one chain, with one choice changed at a time.

    python -m benchmarks differences HalfCheetah-v5 --steps 3e5 --variant current_value --json mine.jsonl

The chain is CleanRL's for continuous actions, with time limits bootstrapped from the final state, and with the other
settings of `mujoco_ppo`. The protocol is that of `python -m benchmarks mujoco`; Ant and Humanoid are played without
contact forces. The records are in benchmarks/results/differences.jsonl.
"""

from ._protocol import Variant, run
from .choices import DIFFERENCES

VARIANTS = {name: Variant(each.make_train, contact_forces=False) for name, each in DIFFERENCES.items()}


def main() -> None:
    """Run the benchmark from the command line."""
    run(__doc__, VARIANTS, "differences")
