"""The commands of README.md and docs/see.md run with exactly the extras that the page has named up to there."""

import functools
import importlib.metadata
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tests.docs.test_docs import FENCE, ROOT

PAGES = [ROOT / "README.md", ROOT / "docs" / "see.md"]
EXTRAS = re.compile(r'pip install (?:--\S+ )*"?\.\[([\w,]+)\]')
COMMAND = re.compile(r"^((?:[A-Z_]+=\S+ )*)(?:.* && )?(?:\.venv/bin/)?python -m ([\w.]+)(?: ([^#\n]*))?", re.MULTILINE)
TINY = "--total-timesteps 64 --num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1 --hidden 8 --no-progress"
TINY += " --num-seeds 1 --learning-rate 1e-3"  # one program for all
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands(page: Path) -> Iterator[tuple[str, list[str], frozenset[str]]]:
    """Modules of a page with arguments, which make recipes tiny, and the extras that its text has named so far."""
    text = page.read_text()
    for block in FENCE.finditer(text):
        for found in COMMAND.finditer(block[3]) if block[1] == "bash" else ():
            end, module, arguments = block.start(3) + found.end(), found[2], shlex.split(found[3] or "")
            if module.startswith("ppo_parts.recipes.") and "--help" not in arguments:
                named = [] if "--name" in arguments else ["--name", f"{page.stem}{end}"]
                arguments = [*arguments, *named, *TINY.split()]
            if module != "pytest":  # which CI runs as it is
                yield module, arguments, frozenset(",".join(EXTRAS.findall(text[:end])).split(","))


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(extras: frozenset[str]) -> set[str]:
    """The distributions that the package installs with these extras, and all that they require."""
    found: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(x) for x in PROJECT["dependencies"]] + [Requirement(f"ppo_parts[{','.join(extras)}]")]
    while left:
        requirement = left.pop()
        asked = (normalized(requirement.name), frozenset(requirement.extras))
        if asked in found:
            continue
        found.add(asked)
        if asked[0] == "ppo-parts":
            required = [x for extra in asked[1] for x in PROJECT["optional-dependencies"][extra]]
        else:
            try:
                required = importlib.metadata.requires(requirement.name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # of another platform
        for other in map(Requirement, required):
            if not other.marker or any(other.marker.evaluate({"extra": extra}) for extra in ("", *asked[1])):
                left.append(other)
    return {name for name, _ in found}


@functools.cache
def hidden(extras: frozenset[str]) -> set[str]:
    """The modules that are installed here, but not with these extras."""
    kept = installed(extras)
    modules = importlib.metadata.packages_distributions().items()
    return {module for module, owners in modules if kept.isdisjoint(map(normalized, owners))}


def test_commands_run_with_the_extras_that_the_page_has_named(tmp_path):
    """With tiny runs, and packages that are installed here, but hidden; each with the fewest extras only."""
    for name in ("ppo_parts", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    rows: list[dict[str, Any]] = []
    for module, arguments, extras in itertools.chain.from_iterable(map(commands, PAGES)):
        flags, names = {x for x in arguments if x[:2] == "--"}, hidden(extras)
        ran = [{*row["hidden"]} for row in rows if module == row["module"] and flags <= {*row["arguments"]}]
        if not any(names <= other for other in ran):
            assert not rows or names <= {*rows[-1]["hidden"]}, "with fewer extras, it needs a process of its own"
            rows.append({"module": module, "arguments": arguments, "hidden": [*names]})
    assert {"evaluate", "watch", "export", "compare"} <= {row["module"].rpartition(".")[2] for row in rows}
    command = [sys.executable, "-m", "tests.only_extras"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "WANDB_MODE": "offline"}
    given = {"input": json.dumps(rows), "text": True, "capture_output": True, "check": False}
    done = subprocess.run(command, cwd=tmp_path, env=environment, **given)
    assert done.returncode == 0, done.stdout + done.stderr
