"""How large is the house: lines, rooms, floors and names of the package, words of documentation, frames to the maths.

    python -m benchmarks house --base HEAD~10

Lines are of code (without blank lines, comments and docstrings) and of docstrings. A room is a folder or module of the
package, and an arrow is an import between rooms. Frames are the package's own between `learner.update` and the scan of
GAE, and the gather of a minibatch, counted while tracing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from ._shared import ROOT, make_parser, unpack_revision

FRAMES = """
import sys, jax, ppo_parts as pp
print("names at the top level:", len([x for x in dir(pp) if not x.startswith("_")]))
from ppo_parts.recipes import cleanrl_ppo
found = {}
def profile(frame, event, _):
    name, files = frame.f_code.co_name, []
    if event != "call" or name not in ("scan", "gather") or "/jax/" not in frame.f_code.co_filename:
        return
    while frame:
        file = frame.f_code.co_filename
        if "/ppo_parts/" in file:
            files.append(file)
        if frame.f_code.co_name == "update" and "learner" in file:
            if (name == "scan") == any("/functional/" in file for file in files):
                found.setdefault(name, f"{len(files)} in {len(set(files))} files")
            return
        frame = frame.f_back
sys.setprofile(profile)
jax.eval_shape(cleanrl_ppo.make_train(cleanrl_ppo.Config()), jax.random.key(0))
sys.setprofile(None)
print("frames to the recursion of GAE:", found["scan"])
print("frames to the gather of a minibatch:", found["gather"])
"""


def count_lines(paths: Iterable[Path]) -> tuple[int, int, int]:
    """All lines, lines of code, and lines of docstrings of Python files."""
    every = code = docstrings = 0
    for path in paths:
        text, inside = path.read_text(), set[int]()
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Expr(value=ast.Constant(value=str())):
                    inside |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = text.splitlines()
        every, docstrings = every + len(lines), docstrings + len(inside)
        code += sum(n not in inside and bool(re.match(r"\s*[^\s#]", line)) for n, line in enumerate(lines, 1))
    return every, code, docstrings


def find_arrows(package: Path) -> set[tuple[str, str]]:
    """Imports of one room (a folder or a module of the package) by another."""
    found = set()
    for path in package.rglob("*.py"):
        place = path.relative_to(package).parts
        room = place[0].removesuffix(".py")
        for dots, module, names in re.findall(r"^ *from (\.+)(\w*)[\w.]* import \(?([\w, ]+)", path.read_text(), re.M):
            if len(dots) == len(place):
                found |= {(room, module or name.strip()) for name in names.split(",") if module or name.strip()}
    rooms = {path.stem for path in package.iterdir() if path.suffix in ("", ".py")}
    return {(a, b) for a, b in found if b in rooms and a != b}


def count_floors(pairs: set[tuple[str, str]]) -> tuple[int, int]:
    """How many floors the rooms lie on, each above those that it imports, and how many arrows lead into a cycle."""
    number = 1
    while lowest := {b for _, b in pairs} - {a for a, _ in pairs}:
        pairs, number = {(a, b) for a, b in pairs if b not in lowest}, number + 1
    return number, len(pairs)


def measure(root: Path) -> dict[str, str]:
    """The numbers of a checkout by name."""
    found, package = {}, root / "ppo_parts"
    recipes = sorted(package.glob("recipes/**/*.py"))
    files = {"package": sorted({*package.rglob("*.py")} - {*recipes}), "recipes": recipes}
    files |= {name: sorted((root / name).rglob("*.py")) for name in ("benchmarks", "tests")}
    for name, paths in files.items():
        found[f"lines of {name} (code, docstrings)"] = "{:,} ({:,}, {:,})".format(*count_lines(paths))
    pairs = find_arrows(package)
    rooms = {room for pair in pairs for room in pair}
    found["rooms, arrows"] = f"{len(rooms)}, {len(pairs)}"
    found["floors, arrows into cycles"] = "{}, {}".format(*count_floors(pairs))
    texts = [path.read_text() for path in (root / "README.md", *(root / "docs").rglob("*.md"))]
    prose = [re.sub(r"^```.*?^```$|<!-- \w.*?<!-- end -->", "", text, flags=re.DOTALL | re.MULTILINE) for text in texts]
    words = [sum(len(text.split()) for text in each) for each in (texts, prose)]
    found["words of README and docs (without code and generated tables)"] = "{:,} ({:,})".format(*words)
    out = subprocess.run(
        [sys.executable, "-c", FRAMES], cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    return found | dict(line.split(": ", 1) for line in out.stdout.splitlines() if ": " in line)


def main() -> None:
    """Command line."""
    options = make_parser(__doc__)
    options.add_argument("--base", help="a revision to compare with, such as HEAD~10")
    given = options.parse_args()
    now, before = measure(ROOT), {}
    if given.base:
        with unpack_revision(given.base) as root:
            before = measure(root)
    for name in dict.fromkeys([*before, *now]):
        print(f"{name:44} {before.get(name, ''):>26} {now.get(name, ''):>26}")
