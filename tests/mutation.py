"""Faults put into the package one at a time, and whether tests notice.

    python -m tests.mutation ppo_parts/_core/loop.py --tests tests/core/test_learner.py --number 10 --seed 1

Each mutant is written into a copy of the repository, where the tests run until one fails. Of a mutant that survives a
person says why it is equivalent, or writes the test that catches it.

Of 200 mutants (`functional`: 24 with `--seed 49`, 33 with 52 and 45 with 61; `_parts`: 10 with 53, 26 with 72, the
first 9 with 84 and 1 with 85; `_core`: 6 with 54, the first 6 with 63, 26 with 73 and 14 with 83), the tests of their
subject killed 172, and others 11. Six led to a test: an array for a single number, a target of a penalty that is out of
range, a clip range of 1/2, whose double is 1, metrics in a rollout, resets of windows and masked tokens of a group.
Eleven are left: two dtypes of sums, `get_close_matches` without `n`, a maximum that begins at 1, a rounding of 4
epsilon, the sign of symmetric noise, the key of a check, pieces of two shards and a leaf that all pieces share are
equivalent; an error names other divisors; and an option of a mean was removed.
"""

import argparse
import ast
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPARED = {ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "=="}
COMPARED |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
CALCULATED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}
SKIPPED = (ast.Raise, ast.JoinedStr, ast.Assert)  # what an error says, and what is never executed apart from its test


def visited(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, field in ast.iter_fields(node):
        for child in field if isinstance(field, list) else [field]:
            skipped = isinstance(child, SKIPPED) or name in ("annotation", "returns", "decorator_list")
            if isinstance(child, ast.AST) and not skipped:
                yield from visited(child)


def changes(source: bytes) -> Iterator[tuple[str, ast.AST, slice, str, str]]:
    """Each change: its kind, the node and the bytes that are replaced, by what, and the change in words."""
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]

    def place(node: ast.AST) -> slice:
        return slice(starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset)

    def text(node: ast.AST) -> str:
        return source[place(node)].decode()

    def to(node: ast.AST, new: str) -> tuple[ast.AST, slice, str, str]:
        words = " -> ".join(textwrap.shorten(x, 70, placeholder="...") for x in (text(node), new))
        return node, place(node), new, words

    for node in visited(ast.parse(source)):
        match node:
            case ast.Compare(left, [operator], [right]) if type(operator) in COMPARED:
                yield "comparison", *to(node, f"({text(left)} {COMPARED[type(operator)]} {text(right)})")
            case ast.BinOp(left, operator, right) if type(operator) in CALCULATED:
                yield "calculation", *to(node, f"(({text(left)}) {CALCULATED[type(operator)]} ({text(right)}))")
            case ast.keyword("axis", ast.Constant(int(axis)) as value):
                yield "axis", *to(value, str(1 - axis if axis in (0, 1) else axis + 1))
            case ast.Constant(bool(value)):
                yield "constant", *to(node, str(not value))
            case ast.Constant(int() | float()):
                yield "constant", *to(node, f"({text(node)} + 1)")
            case ast.Call(ast.Attribute(attr="where"), [condition, one, other]):
                yield "where", *to(node, f"{text(node.func)}({text(condition)}, {text(other)}, {text(one)})")
            case ast.FunctionDef(args=ast.arguments(args=[first, *_]), body=[*_, ast.Return(ast.expr() as value)]):
                yield "identity", *to(value, first.arg)
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg:
                    kept = [text(x) for x in (*node.args, *node.keywords) if x is not keyword]
                    new = f"{text(node.func)}({', '.join(kept)})"
                    words = f"{text(node.func)} without {textwrap.shorten(text(keyword), 70, placeholder='...')}"
                    yield "argument", node, place(node), new, words


def mutants(paths: list[Path], seed: int, number: int) -> list[dict]:
    """Of each kind in turn; the same for the same seed and source."""
    found: dict[str, list[dict]] = {}
    for path in paths:
        for kind, node, span, new, change in changes(source := path.read_bytes()):
            if "\\\n" not in new and source[span].decode() != new:
                place = f"{path.relative_to(ROOT)}:{node.lineno}:{node.col_offset + 1}"
                text = source[: span.start] + new.encode() + source[span.stop :]
                found.setdefault(kind, []).append({"path": path, "text": text, "change": f"{place}: {change}"})
    rng = random.Random(seed)
    for some in found.values():
        rng.shuffle(some)
    in_turn = itertools.chain(*itertools.zip_longest(*(found[kind] for kind in sorted(found))))
    return [mutant for mutant in in_turn if mutant][:number]


def failure(folder: Path, tests: list[str], seconds: float) -> str | None:
    """The test that fails first in a copy of the repository."""
    command = [sys.executable, "-m", "pytest", "-qx", "--tb=no", f"--override-ini=cache_dir={ROOT / '.pytest_cache'}"]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *tests], cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"nothing within {seconds} seconds"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return None if done.returncode == 0 else failed[0] if failed else done.stdout[-1000:] + done.stderr[-1000:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tests", nargs="+", required=True)
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="for the tests of one mutant")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(ROOT, Path(place) / "copy", ignore=shutil.ignore_patterns(".*", "runs", "build")))
        if said := failure(folder, given.tests, given.seconds):
            raise SystemExit(f"without a mutant: {said}")
        survived, some = 0, mutants([path.resolve() for path in given.files], given.seed, given.number)
        for mutant in some:
            copy = folder / mutant["path"].relative_to(ROOT)
            copy.write_bytes(mutant["text"])
            said = failure(folder, given.tests, given.seconds)
            shutil.copy2(mutant["path"], copy)
            survived += said is None
            print(f"{mutant['change']}: {said or 'SURVIVED'}", flush=True)
    print(f"{len(some) - survived} of {len(some)} mutants killed")


if __name__ == "__main__":
    main()
