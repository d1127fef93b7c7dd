"""Run commands in one process in which some packages cannot be imported, as if they were not installed.

It reads `[{"module": ..., "arguments": [...], "hidden": [...]}, ...]` from standard input (see docs/test_docs.py).
No command may hide what an earlier one has imported.
"""

import json
import os
import runpy
import shutil
import sys
from importlib.machinery import PathFinder


def hide(names: set[str]) -> None:
    """Let only modules of other packages be found."""
    found = PathFinder.find_spec

    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in names else found(name, path, target)

    PathFinder.find_spec = find_spec


def main() -> None:
    hidden: set[str] = set()
    hide(hidden)
    for command in json.load(sys.stdin):
        hidden.clear()
        hidden.update(command["hidden"])
        for run in (word.rpartition("=")[2] for word in command["arguments"]):
            if run.startswith("runs/") and not os.path.exists(run):
                shutil.copytree("runs/first", run)
        print("+", command["module"], *command["arguments"], file=sys.stderr)
        sys.argv = [command["module"], *command["arguments"]]
        try:
            runpy.run_module(command["module"], run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            if ended.code:
                raise


if __name__ == "__main__":
    main()
