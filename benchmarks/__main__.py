"""`python -m benchmarks <name>`: the benchmarks, and the reports of their results."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {  # modules here with a `main()` that reads sys.argv, and their descriptions
    "parts": "microbenchmarks of every part and function, compared with other implementations and a copy of memory",
    "update": "a whole update against the same update written by hand",
    "train": "whole training runs against others: environment steps per second, compile time",
    "hosts": "environments on the host: alone, collecting, and whole runs against others",
    "growth": "how an update's cost grows with environments, steps, minibatches and seeds",
    "gpu": "everything to measure on a GPU, in eight minutes: kernels and whole runs",
    "ptx": "what the GPU kernels compile to, without a GPU: bytes per element, registers",
    "learning": "learning curves of the recipes, over many seeds",
    "games": "two-player games against random moves: how many are won",
    "kuhn": "self-play in Kuhn poker: how exploitable is the policy?",
    "resets": "Craftax-Classic with and without optimistic resets: steps per second, and what is learned",
    "mujoco": "Gymnasium's MuJoCo tasks, with the protocol of Tianshou's benchmark",
    "atari": "Atari games, beside CleanRL's own script on the same machine",
    "differences": "the effect of each single difference between libraries' PPO, on MuJoCo tasks",
    "libraries": "the PPO of each library with its default hyperparameters, on MuJoCo tasks",
    "migration": "PureJaxRL's own file before and after the changes of the page about it",
    "study": "the effects of priorities, V-trace and refreshing",
    "ewma": "PPO-EWMA with batches of four sizes: is it invariant to the batch size?",
    "ppg": "phasic policy gradient against PPO, with a shared network and with two",
    "tokens": "a small transformer learns to sort digits: GRPO and its relatives, without a critic",
    "papers": "chains of the index of papers against the plain chain",
    "devices": "what 1 to 64 devices send each other, and what each of them does; compiled only",
    "sweep": "a sweep of hyperparameters in one program",
    "kill": "kills a run at random moments and compares its result with that of an undisturbed run",
    "vmapped_init": "trains ten vmapped seeds repeatedly on a busy CPU: does it ever deadlock?",
    "attack": "damages, fills, removes and signals runs: are the results identical, or the damage reported?",
    "report": "tables and pictures of the recorded results: docs/benchmarks.md",
    "compare": "what became slower between two recorded results",
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
