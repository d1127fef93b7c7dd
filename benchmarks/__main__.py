"""Run a benchmark, or a report of its results: `python -m benchmarks <name>`."""

import ast
import importlib
import os
import sys
from pathlib import Path


def list_commands() -> dict[str, str]:
    """Return the modules with a `main()` that reads sys.argv, each with the first line of its docstring."""
    parsed = {path.stem: ast.parse(path.read_text()) for path in sorted(Path(__file__).parent.glob("[!_]*.py"))}
    runs = {name: tree for name, tree in parsed.items() if "main" in [getattr(x, "name", None) for x in tree.body]}
    return {name: str(ast.get_docstring(tree)).splitlines()[0] for name, tree in runs.items()}


def main() -> None:
    """Run the named benchmark with the rest of the command line."""
    name, known = sys.argv[1] if len(sys.argv) > 1 else "--help", list_commands()
    if name not in known:
        print("usage: python -m benchmarks <name> [--help | options]\n")
        print("\n".join(f"  {name:12} {what}" for name, what in known.items()))
        sys.exit(0 if name in ("-h", "--help") else f"\nno benchmark is called {name!r}")
    sys.argv = [f"python -m benchmarks {name}", *sys.argv[2:]]
    from ppo_parts.training._cli import exit_on_user_error  # listing the names does not need JAX

    with exit_on_user_error():
        importlib.import_module(f".{name}", __package__).main()


if __name__ == "__main__":
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # programs on disk from an earlier run would hide compile times
    main()
