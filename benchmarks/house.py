"""The size of the code base: lines, imports, public names, words of documentation, and depth of the stack.

    python -m benchmarks house --base HEAD~10

Lines are of code (without blank lines, comments and docstrings) and of docstrings. Packages are the folders and modules
of `ppo_parts`; imports are those of one package by another. Frames are the package's own, counted while tracing, from
`learner.update` to the scan of GAE and to the gather of a minibatch.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from ._records import ROOT, make_parser, unpack_revision

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
    """Count all lines, lines of code, and lines of docstrings of Python files."""
    every = code = docstrings = 0
    for path in paths:
        text = path.read_text()
        alone = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Expr)]
        strings = [x for x in alone if isinstance(getattr(x.value, "value", None), str)]
        inside = {n for x in strings for n in range(x.lineno, (x.end_lineno or x.lineno) + 1)}
        lines = text.splitlines()
        every, docstrings = every + len(lines), docstrings + len(inside)
        code += sum(n not in inside and bool(re.match(r"\s*[^\s#]", line)) for n, line in enumerate(lines, 1))
    return every, code, docstrings


def find_imports(root: Path) -> set[tuple[str, str]]:
    """Find the imports of one package (a folder or module in `root`) by another."""
    found = set()
    for path in root.rglob("*.py"):
        place = path.relative_to(root).parts
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == len(place):
                names = (node.module or name.name for name in node.names)
                found |= {(place[0].removesuffix(".py"), name.partition(".")[0]) for name in names}
    packages = {path.stem for path in root.iterdir() if path.suffix in ("", ".py")}
    return {(a, b) for a, b in found if b in packages and a != b}


def count_layers(pairs: set[tuple[str, str]]) -> tuple[int, int]:
    """Count the layers of packages, each above those that it imports, and the imports that lead into a cycle."""
    number = 1
    while lowest := {b for _, b in pairs} - {a for a, _ in pairs}:
        pairs, number = {(a, b) for a, b in pairs if b not in lowest}, number + 1
    return number, len(pairs)


def measure(root: Path) -> dict[str, str]:
    """Return the numbers of a checkout by name."""
    found, package = {}, root / "ppo_parts"
    recipes = sorted(package.glob("recipes/**/*.py"))
    files = {"package": sorted({*package.rglob("*.py")} - {*recipes}), "recipes": recipes}
    files |= {name: sorted((root / name).rglob("*.py")) for name in ("benchmarks", "tests")}
    for name, paths in files.items():
        found[f"lines of {name} (code, docstrings)"] = "{:,} ({:,}, {:,})".format(*count_lines(paths))
    pairs = find_imports(package)
    found["packages, imports between them"] = f"{len({name for pair in pairs for name in pair})}, {len(pairs)}"
    found["layers, imports into cycles"] = "{}, {}".format(*count_layers(pairs))
    texts = [path.read_text() for path in (root / "README.md", *(root / "docs").rglob("*.md"))]
    prose = [re.sub(r"^```.*?^```$|<!-- \w.*?<!-- end -->", "", text, flags=re.DOTALL | re.MULTILINE) for text in texts]
    words = [sum(len(text.split()) for text in each) for each in (texts, prose)]
    found["words of README and docs (without code and generated tables)"] = "{:,} ({:,})".format(*words)
    command, where = [sys.executable, "-c", FRAMES], {"PYTHONPATH": str(root)}
    out = subprocess.run(command, cwd=root, env=where, stdout=subprocess.PIPE, text=True, check=True)
    return found | dict(line.split(": ", 1) for line in out.stdout.splitlines() if ": " in line)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--base", help="a revision to compare with, such as HEAD~10")
    options = parser.parse_args()
    now, before = measure(ROOT), {}
    if options.base:
        with unpack_revision(options.base) as root:
            before = measure(root)
    for name in dict.fromkeys([*before, *now]):
        print(f"{name:62} {before.get(name, ''):>26} {now.get(name, ''):>26}")
