"""The documentation is right about itself: Python blocks run and print what is said, links lead somewhere.

The blocks of one page share a namespace, like the cells of a notebook. A block fenced as `output` right behind a Python
block is what that block prints. A block fenced as `python equinox` runs only where that package is installed.
"""

import contextlib
import functools
import importlib.util
import io
import itertools
import re
import sys
import types
from pathlib import Path

import pytest

import ppo_parts as pp

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)[ ]*([^\n]*)\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
NOT_LISTED = {"bridges", "commands", "compare", "doctor", "evaluate", "export", "recipes", "watch"}  # programs; Tunix
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path) -> list[tuple[str, str | None, int]]:
    """Python blocks of a page: source, the output stated right behind it, and the line it starts on."""
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
    """The anchors of a page on GitHub, which numbers the later ones where two headings have the same."""
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
