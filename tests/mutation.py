"""Faults put into the package one at a time, and whether the tests of that room notice.

`python -m tests.mutation --number 200` works in a copy, goes on where it ended, and appends a line for each mutant to
mutation.jsonl: the place, what changed, and the test that failed, or null. A person adds "judgement" to a line
that survived: what is equivalent, or the test that now catches it. `--number 0` prints the share that was killed.
"""

import argparse
import ast
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT, RESULTS = Path(__file__).parents[1], Path(__file__).with_name("mutation.jsonl")
ROOMS = ("functional", "_core", "_parts")
CORE = ["tests/core/test_learner.py", "tests/core/test_contract.py", "tests/core/test_bad_input.py"]
TESTS = {  # what tells most stands first: a mutant ends with the first failure
    "functional/_policy_losses|functional/_value_losses|functional/_regularizers": ["tests/functional/*losses*"],
    "functional/_sequence_losses|functional/_groups|functional/_corrections": ["tests/functional/*token*"],
    "functional/_recurrence|functional/_kernel|functional/_steps": ["tests/functional/test_recurrence.py"],
    "functional": ["tests/functional/test_[!r]*.py", "tests/docs/*gallery*"],
    "_core/(shards|pieces|moments)": ["tests/core/test_shards.py"],
    "_core/optim": ["tests/parts/test_optim.py"],
    "_core/(chain|checks)": ["tests/core/test_bad_input.py"],
    "_core": [*CORE, "tests/core/test_s*.py", "tests/core/test_laws.py", "tests/golden"],
    "_parts/(tokens|replay)": ["tests/functional/*token*"],
    "_parts/(advantage|lens|samplers|stop)": CORE,
    "_parts": ["tests/parts", "tests/docs/*gallery*", *CORE, "tests/core/test_laws.py", "tests/golden"],
}
UNKNOWN = "nothing within the time limit"
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


def changes(source: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Each change: its kind, the node that is replaced, and by what."""

    def text(node: ast.AST) -> str:
        return ast.get_source_segment(source, node) or ""

    for node in visited(ast.parse(source)):
        match node:
            case ast.Compare(left, [operator], [right]) if type(operator) in COMPARED:
                yield "comparison", node, f"({text(left)} {COMPARED[type(operator)]} {text(right)})"
            case ast.BinOp(left, operator, right) if type(operator) in CALCULATED:
                yield "calculation", node, f"(({text(left)}) {CALCULATED[type(operator)]} ({text(right)}))"
            case ast.keyword("axis", ast.Constant(int(axis)) as value):
                yield "axis", value, str(1 - axis if axis in (0, 1) else axis + 1)
            case ast.Constant(bool(value)):
                yield "constant", node, str(not value)
            case ast.Constant(int() | float()):
                yield "constant", node, f"({text(node)} + 1)"
            case ast.Call(ast.Attribute(attr="where"), [condition, one, other]):
                yield "where", node, f"{text(node.func)}({text(condition)}, {text(other)}, {text(one)})"
            case ast.FunctionDef(args=ast.arguments(args=[first, *_]), body=[*_, ast.Return(ast.expr() as value)]):
                yield "identity", value, first.arg
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg:
                    kept = [text(x) for x in (*node.args, *node.keywords) if x is not keyword]
                    yield "argument", node, f"{text(node.func)}({', '.join(kept)})"


def mutants(seed: int, number: int) -> list[dict]:
    """Of each kind in turn; the same for the same seed and source."""
    found: dict[str, list[dict]] = {}
    for path in sorted(path for room in ROOMS for path in (ROOT / "ppo_parts" / room).rglob("*.py")):
        source = path.read_text()
        starts = [0, *itertools.accumulate(map(len, source.encode().splitlines(keepends=True)))]
        for kind, node, new in changes(source):
            span = [starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset]
            was = " ".join(source.encode()[slice(*span)].decode().split())
            place, brief = f"{path.relative_to(ROOT)}:{node.lineno}", " ".join(new.split())
            mutant = {"place": place, "kind": kind, "was": was, "new": brief, "span": span, "by": new}
            if mutant["was"] != new and "\\\n" not in new:
                found.setdefault(kind, []).append(mutant)
    rng = random.Random(seed)
    for some in found.values():
        rng.shuffle(some)
    in_turn = itertools.chain(*itertools.zip_longest(*(found[kind] for kind in sorted(found))))
    return [mutant for mutant in in_turn if mutant][:number]


def killer(mutant: dict, copy: Path, limit: float) -> str | None:
    """The test that fails first."""
    place = mutant["place"].partition(":")[0]
    path, source, tests = copy / place, (ROOT / place).read_bytes(), [place]  # its own examples first
    for pattern, globs in TESTS.items():
        if re.match(f"ppo_parts/({pattern})", place):
            tests += [str(x.relative_to(copy)) for glob in globs for x in sorted(copy.glob(glob))]

    options: dict = {"cwd": copy, "env": os.environ | {"PYTHONPATH": str(copy)}, "timeout": limit}

    def run(*tests: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", *tests]
        return subprocess.run(command, **options, capture_output=True, text=True, check=False)

    start, end = mutant["span"]
    try:
        path.write_bytes(source[:start] + mutant["by"].encode() + source[end:])
        done = run(*dict.fromkeys(tests))
    except subprocess.TimeoutExpired:
        return UNKNOWN
    finally:
        path.write_bytes(source)
    if not done.returncode:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    killer = failed[1] if failed else place
    return UNKNOWN if run(killer).returncode else killer  # it has to pass without the mutant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each mutant")
    given = parser.parse_args()
    known = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(row["place"], row["kind"], row["was"], row["new"]) for row in known}
    with tempfile.TemporaryDirectory() as folder, RESULTS.open("a") as results:
        ignored = shutil.ignore_patterns(".git", ".venv", "runs", ".mypy_cache", "__pycache__")
        copy = Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=ignored))
        for mutant in mutants(given.seed, given.number):
            row = {name: mutant[name] for name in ("place", "kind", "was", "new")}
            if tuple(row.values()) not in done:
                known.append(row | {"killed_by": killer(mutant, copy, given.limit)})
                print(json.dumps(known[-1]), file=results, flush=True)
    left = [row for row in known if row["killed_by"] in (None, UNKNOWN)]
    print(f"{len(known) - len(left)} of {len(known)} mutants killed")
    for row in left:
        print(f"{row['place']}: {row['was']} -> {row['new']}: {row.get('judgement', row['killed_by'] or 'survived')}")


if __name__ == "__main__":
    main()
