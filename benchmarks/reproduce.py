"""Run the command of a record again, at the commit that it names, and compare the numbers.

    python -m benchmarks reproduce 'kuhn.jsonl#kuhn'

The files of the commit are unpacked in a temporary folder, and run with the packages that are installed here; further
arguments are appended to the command. CPUs round differently, and learning amplifies that: compare means with their
intervals.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax

from ._shared import RESULTS, Record, make_parser, read, unpack_revision


def read_numbers(tree: Any) -> dict[str, float]:
    """The numbers of a tree of dicts and lists, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    return {path: float(x) for path, x in named.items() if isinstance(x, (int, float)) and not isinstance(x, bool)}


def compare(old: Any, new: Any) -> list[str]:
    """What two results have in common: how many numbers are equal, and the means and medians of those that differ."""
    before, after = read_numbers(old), read_numbers(new)
    both = [path for path in before if path in after]
    differ = [path for path in both if before[path] != after[path]]
    said = [f"{len(both) - len(differ)} of {len(both)} numbers are equal; {len(before) - len(both)} are missing"]
    told = [path for path in differ if path.rpartition("/")[2] in ("mean", "iqm", "median")] or differ[:10]
    return [*said, *(f"  {path}: {before[path]:.6g}, now {after[path]:.6g}" for path in told)]


def parse_records(text: str) -> list[Record]:
    """The records of a file of JSON lines, or of one record, as files were before."""
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


def rerun(record: Record, more: Sequence[str]) -> list[Record]:
    """Run a record's command with the files of its commit; return the records that it wrote."""
    command = [sys.executable, *shlex.split(record["command"])[1:], *more]
    with unpack_revision(record["commit"]) as place:
        files = functools.partial((place / "benchmarks/results").rglob, "*.json*")
        before = [each for path in files() for each in parse_records(path.read_text())]
        print(shlex.join(command), flush=True)
        subprocess.run(command, cwd=place, env=os.environ | {"PYTHONPATH": str(place)}, check=True)
        after = [each for path in files() for each in parse_records(path.read_text())]
    return [each for each in after if each not in before]


def main() -> None:
    """Command line."""
    arguments = make_parser(__doc__)
    arguments.add_argument("record", help="FILE#NAME, a record of benchmarks/results")
    arguments.add_argument("--commit", help="run it at another commit, for example if the record's lacks the variant")
    options, more = arguments.parse_known_args()
    file, _, name = options.record.partition("#")
    record = read(RESULTS / file).get(name)
    if record is None:
        sys.exit(f"{file} has no record {name!r}")
    if blanks := {"SEED", "VARIANT"}.intersection(shlex.split(record["command"])):
        sys.exit(f"{record['command']!r} stands for several: its results name each {' and '.join(sorted(blanks))}")
    if record["uncommitted"]:
        print(f"these files had changes that the commit lacks: {record['uncommitted']}")
    written = rerun(record | {"commit": options.commit or record["commit"]}, more)
    found = next((each for each in written if each.get("name") == name), written[0] if written else None)
    if found is None:
        sys.exit("the command wrote no record")
    print(*compare(record["results"], found["results"]), sep="\n")
