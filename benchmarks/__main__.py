"""`python -m benchmarks <name>`: the benchmarks, and the reports of their results."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {  # modules here with a `main()` that reads sys.argv, and their descriptions
    "parts": "microbenchmarks of every part and function, compared with other implementations and a copy of memory",
    "update": "a whole update against the same update written by hand",
    "train": "whole training runs against others: environment steps per second, compile time",
    "hosts": "environments on the host: alone, collecting, and whole runs against others",
    "learning": "learning curves of the recipes, over many seeds",
    "kuhn": "self-play in Kuhn poker: how exploitable is the policy?",
    "mujoco": "Gymnasium's MuJoCo tasks, with the protocol of Tianshou's benchmark",
    "atari": "Atari games, beside CleanRL's own script on the same machine",
    "differences": "the effect of each single difference between libraries' PPO, on MuJoCo tasks",
    "libraries": "the PPO of each library with its default hyperparameters, on MuJoCo tasks",
    "study": "the effects of priorities, V-trace and refreshing",
    "population": "population-based training against random search with the same steps",
    "levels": "levels chosen by what can be learned in them, against random ones, in a maze",
    "tokens": "a small transformer learns to sort digits: GRPO and its relatives, without a critic",
    "papers": "chains of the index of papers against the plain chain",
    "devices": "what 1 to 64 devices send each other, and what each of them does; compiled only",
    "house": "how large the package is, and how far it is from an update to its parts",
    "reproduce": "run the command of a record again, at its commit, and compare",
    "report": "the tables and figures of the pages, from the records",
    "doctor": "planted faults and healthy runs: what `python -m ppo_parts.doctor` finds",
}


def main() -> None:
    """Run the named one with the rest of the command line."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        print("usage: python -m benchmarks <name> [--help | options]\n")
        print("\n".join(f"  {name:12} {what}" for name, what in COMMANDS.items()))
        sys.exit(0 if name in ("-h", "--help") else f"\nno benchmark is called {name!r}")
    sys.argv = [f"python -m benchmarks {name}", *sys.argv[2:]]
    importlib.import_module(f".{name}", __package__).main()


if __name__ == "__main__":
    main()
