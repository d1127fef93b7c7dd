"""Faults put into the package one at a time, and whether the tests notice.

`python -m tests.mutation --seed 1` first measures which tests execute each line and how long each takes, and keeps that
in pytest's cache; this needs `pip install coverage`. Each mutant then meets the tests that execute its line, quickest
first, and if all pass, the others that execute its file. They run in a copy of the repository, in a fork of a process
that has imported the libraries. A run that was interrupted goes on where it ended.

A line of mutation.jsonl is a mutant: its place, the change, and the test that failed, or null. A person adds
"judgement" to one that survived: why it is equivalent, or the test that now catches it. `--number 0` prints the share
that was killed. The lines there are 29 of the first 30 mutants of commit 9adba04 with `--seed 34 --seconds 30`.
"""

import argparse
import ast
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import queue
import random
import resource
import shutil
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest

ROOT, RESULTS = Path(__file__).parents[1], Path(__file__).with_name("mutation.jsonl")
CACHE = ROOT / ".pytest_cache"
ROOMS = [f"ppo_parts/{room}" for room in ("functional", "_core", "_parts")]
TESTS = [*ROOMS, "tests/docs/test_gallery*.py"]
TESTS += [f"tests/{room}/test_*.py" for room in ("functional", "core", "parts", "distributions", "golden")]
LIBRARIES = ["jax", "optax", "flax", "distrax", "rlax", "chex", "scipy"]  # start no backend
HANGS = 120.0  # seconds of CPU for the last test that begins in time
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


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).glob("*.py"))


def mutants(seed: int, number: int) -> list[dict]:
    """Of each kind in turn; the same for the same seed and source."""
    found: dict[str, list[dict]] = {}
    for path in sources():
        for kind, node, span, new, change in changes(source := path.read_bytes()):
            if "\\\n" not in new and source[span].decode() != new:
                place = f"{path.relative_to(ROOT)}:{node.lineno}:{node.col_offset + 1}"
                found.setdefault(kind, []).append({"place": place, "change": change, "span": span, "new": new})
    rng = random.Random(seed)
    for some in found.values():
        rng.shuffle(some)
    in_turn = itertools.chain(*itertools.zip_longest(*(found[kind] for kind in sorted(found))))
    return [mutant for mutant in in_turn if mutant][:number]


class Watch:
    """Tells which test begins, which fails, and if it measures, the seconds and lines of each that ends."""

    def __init__(self, tell: Callable, seconds: float, order: dict[str, float | None] | None = None):
        self.tell, self.seconds, self.order = tell, seconds, order

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.order:  # None: not wanted; a test that was not measured is new, and runs first
            seconds = {item: self.order.get(item.nodeid, 0.0) for item in items}
            items[:] = sorted((x for x in items if seconds[x] is not None), key=seconds.__getitem__)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        start = sum(os.times()[:4])  # CPU, with that of processes that ended
        if start > self.seconds:
            item.session.shouldstop = "out of time"
        self.tell("began", item.nodeid, None)
        if self.order:
            return (yield)
        import coverage

        traced = coverage.Coverage(data_file=None, config_file=False, include=[f"{room}/*" for room in ROOMS])
        with traced.collect():
            result = yield
        data = traced.get_data()
        lines = {os.path.relpath(path): data.lines(path) for path in data.measured_files()}
        self.tell("measured", item.nodeid, {"seconds": round(sum(os.times()[:4]) - start, 2), "lines": lines})
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.tell("failed", report.nodeid, None)

    pytest_collectreport = pytest_runtest_logreport


def tested(folder: Path, files: list[str], seconds: float, *options: str, **watch: Any) -> list[list]:
    """What a fork told that ran tests of these files in the folder; the last is "ended", unless it crashed or hung."""
    told = folder / "told.jsonl"
    told.write_text('["began", "pytest", null]\n')

    def run() -> None:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        sys.modules.pop("tests", None)
        os.environ["PYTHONPATH"] = str(folder)  # for processes that tests start
        sys.dont_write_bytecode = True  # it is told from that of another mutant by the second only
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds + HANGS),) * 2)
        with told.open("a", buffering=1) as file:
            watching = Watch(lambda *row: print(json.dumps(row), file=file), seconds=seconds, **watch)
            code = pytest.main(["-q", "--tb=no", f"--override-ini=cache_dir={CACHE}", *options, *files], [watching])
            if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
                watching.tell("failed", f"pytest: {code!r}", None)
            watching.tell("ended", None, None)

    fork = multiprocessing.get_context("fork").Process(target=run)
    fork.start()
    fork.join()
    return [json.loads(line) for line in told.read_text().splitlines()]


def measured(folders: queue.Queue, pool: ThreadPool) -> dict[str, dict]:
    """The seconds of each test, null if it fails, and the lines of each file; kept for the same package."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources())).hexdigest()
    kept = CACHE / f"mutation-{digest[:16]}.json"
    if not kept.exists():
        paths = sorted(str(path.relative_to(ROOT)) for glob in TESTS for path in ROOT.glob(glob))

        def one(path: str) -> list[list]:
            told = tested(folder := folders.get(), [path], 1200.0)
            folders.put(folder)
            return told

        told = [row for rows in pool.map(one, paths, chunksize=1) for row in rows]
        found = {test: row for event, test, row in told if event == "measured"}
        for event, test, _ in told:
            if event == "failed" and test in found:
                found[test]["seconds"] = None
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


def killer(mutant: dict, tests: dict[str, dict], folder: Path, seconds: float) -> str | None:
    """The test that fails first."""
    path, line = mutant["place"].split(":")[:2]
    source, span = (ROOT / path).read_bytes(), mutant["span"]
    of_file = {test: set(row["lines"].get(path, ())) for test, row in tests.items()}
    pieces = {(x.lineno, x.end_lineno) for x in ast.walk(ast.parse(source)) if hasattr(x, "lineno")}
    for first, last in sorted(pieces, key=lambda piece: piece[1] - piece[0]):  # of those around it, the smallest
        if first <= int(line) <= last:
            listed = {test for test, lines in of_file.items() if not lines.isdisjoint(range(first, last + 1))}
            if listed:
                break
    others = {test for test, lines in of_file.items() if lines or not tests[test]["lines"]} - listed  # or in a process
    try:
        (folder / path).write_bytes(source[: span.start] + mutant["new"].encode() + source[span.stop :])
        for some in filter(None, (listed, others)):
            order = {test: row["seconds"] if test in some else None for test, row in tests.items()}
            told = tested(folder, sorted({test.partition("::")[0] for test in some}), seconds, "-x", order=order)
            failed = [test for event, test, _ in told if event == "failed"]
            if failed or told[-1][0] != "ended":
                return failed[0] if failed else f"{told[-1][1]} does not end"
    finally:
        shutil.copy2(ROOT / path, folder / path)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU for each of a mutant's two runs")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(row["place"], row["change"]) for row in rows}
    new = [x for x in mutants(given.seed, given.number) if (x["place"], x["change"]) not in done]
    if new:
        warnings.filterwarnings("ignore", "os.fork")  # of JAX, whose backend has not started
        for library in LIBRARIES:
            importlib.import_module(library)
        with tempfile.TemporaryDirectory() as folder, ThreadPool(given.jobs) as pool, RESULTS.open("a") as results:
            folders: queue.Queue[Path] = queue.Queue()
            for copy in range(given.jobs):
                ignored = shutil.ignore_patterns(".*", "runs")
                folders.put(Path(shutil.copytree(ROOT, Path(folder) / str(copy), ignore=ignored)))
            tests = measured(folders, pool)

            def check(mutant: dict) -> dict:
                copy = folders.get()
                killed_by = killer(mutant, tests, copy, given.seconds)
                folders.put(copy)
                return {"place": mutant["place"], "change": mutant["change"], "killed_by": killed_by}

            for row in pool.imap_unordered(check, new):
                rows.append(row)
                print(json.dumps(row), file=results, flush=True)
    left = [row for row in rows if not row["killed_by"]]
    print(f"{len(rows) - len(left)} of {len(rows)} mutants killed")
    for row in left:
        print(f"{row['place']}: {row['change']}: {row.get('judgement', 'survived')}")


if __name__ == "__main__":
    main()
