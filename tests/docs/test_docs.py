"""The documentation is right about itself: Python blocks run and print what it says, and links lead somewhere.

The blocks of a page share a namespace, like the cells of a notebook. A block fenced as `output` right after a Python
block is what that block prints. A block fenced as `python equinox` runs only where that package is installed.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ppo_parts as pp

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)[ ]*([^\n]*)\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
NOT_LISTED = {"bridges", "commands", "compare", "doctor", "evaluate", "export", "recipes", "watch"}  # programs; Tunix
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path) -> list[tuple[str, str | None, int]]:
    """Return a page's Python blocks: source, the output stated right after it, and the line on which it starts."""
    text, found = page.read_text(), list(FENCE.finditer(page.read_text()))
    result = []
    for block, following in itertools.zip_longest(found, found[1:]):
        language, packages, code = block.groups()
        if language != "python" or not all(map(importlib.util.find_spec, packages.split())):
            continue
        directly = following and following[1] == "output" and not text[block.end() : following.start()].strip()
        result.append((code, following[3] if directly else None, text.count("\n", 0, block.start(3))))
    return result


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page on GitHub, which numbers the later ones of headings that are the same."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in headings]
    return {f"{each}-{slugs[:i].count(each)}".removesuffix("-0") for i, each in enumerate(slugs)}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.lenient_ranks
@pytest.mark.parametrize("page", [page for page in PAGES if "\n```python" in page.read_text()], ids=name_of)
def test_code_runs(page, tmp_path, monkeypatch):
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.chdir(tmp_path)
    for source, stated, line in blocks(page):
        printed = io.StringIO()
        code = compile("\n" * line + source, str(page), "exec")  # tracebacks name the line of the page
        with contextlib.redirect_stdout(printed):
            exec(code, vars(module))
        if stated is not None:
            assert printed.getvalue().strip() == stated.strip(), f"{name_of(page)}, line {line + 1}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)}: {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{name_of(page)}: {target}"


def test_the_reference_lists_each_public_name_once_and_the_index_every_page():
    listed = re.findall(r"^   (\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    families = [path for path in (ROOT / "ppo_parts").glob("[a-z]*") if path.stem not in NOT_LISTED]
    modules = {path.stem for path in families if path.suffix == ".py" or (path / "__init__.py").exists()}
    names = {name for name in vars(pp) if name[0] != "_" and not isinstance(getattr(pp, name), types.ModuleType)}
    assert sorted(listed) == sorted(names | modules)
    # A page is linked from the index, or from the README.md of its folder, which is linked from the index.
    index = ROOT / "docs" / "index.md"
    indices = [index, *(ROOT / "docs").glob("*/README.md")]
    targets = ((page, link.partition("#")[0]) for page in indices for link in LINK.findall(page.read_text()))
    linked = {(page.parent / target).resolve() for page, target in targets}
    assert [name_of(page) for page in PAGES if page.parent != ROOT and page != index and page not in linked] == []


# --- commands run with exactly the extras that their page has named so far --------------------------------------------


WITH_COMMANDS = [ROOT / "README.md", ROOT / "docs" / "see.md"]
EXTRAS = re.compile(r'pip install (?:--\S+ )*"?\.\[([\w,]+)\]')
COMMAND = re.compile(r"^((?:[A-Z_]+=\S+ )*)(?:.* && )?(?:\.venv/bin/)?python -m ([\w.]+)(?: ([^#\n]*))?", re.MULTILINE)
TINY = "--total-timesteps 64 --num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1 --hidden 8 --no-progress"
TINY += " --num-seeds 1 --learning-rate 1e-3"  # all runs share one program
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands(page: Path) -> Iterator[tuple[str, list[str], frozenset[str]]]:
    """Yield a page's modules with arguments, which make recipes tiny, and the extras that its text has named so far."""
    text = page.read_text()
    for block in FENCE.finditer(text):
        for found in COMMAND.finditer(block[3]) if block[1] == "bash" else ():
            end, module, arguments = block.start(3) + found.end(), found[2], shlex.split(found[3] or "")
            if module.startswith("ppo_parts.recipes.") and "--help" not in arguments:
                named = [] if "--name" in arguments else ["--name", f"{page.stem}{end}"]
                arguments = [*arguments, *named, *TINY.split()]
            if module != "pytest":  # CI runs pytest as it is
                yield module, arguments, frozenset(",".join(EXTRAS.findall(text[:end])).split(","))


def installed(extras: frozenset[str]) -> set[str]:
    """Return the distributions that the package installs with these extras, and all that they require."""
    found: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(x) for x in PROJECT["dependencies"]] + [Requirement(f"ppo_parts[{','.join(extras)}]")]
    while left:
        requirement = left.pop()
        asked = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if asked in found:
            continue
        found.add(asked)
        if asked[0] == "ppo-parts":
            required = [x for extra in asked[1] for x in PROJECT["optional-dependencies"][extra]]
        else:
            try:
                required = importlib.metadata.requires(requirement.name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # it is for another platform
        for other in map(Requirement, required):
            if not other.marker or any(other.marker.evaluate({"extra": extra}) for extra in ("", *asked[1])):
                left.append(other)
    return {name for name, _ in found}


@functools.cache
def hidden(extras: frozenset[str]) -> set[str]:
    """Return the modules that are installed here, but would not be with these extras."""
    kept = installed(extras)
    modules = importlib.metadata.packages_distributions().items()
    return {module for module, owners in modules if kept.isdisjoint(map(canonicalize_name, owners))}


def test_commands_run_with_the_extras_that_the_page_has_named(tmp_path):
    """Run each command with only the fewest extras, in a tiny run, while other installed packages are hidden."""
    for name in ("ppo_parts", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    rows: list[dict[str, Any]] = []
    for module, arguments, extras in itertools.chain.from_iterable(map(commands, WITH_COMMANDS)):
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
