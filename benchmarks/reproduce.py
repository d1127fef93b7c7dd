"""Run the command of a record again, at the commit that it names, and compare the numbers.

    python -m benchmarks reproduce 'kuhn.jsonl#kuhn'

The commit is checked out in build/reproduced, and runs with the packages that are installed here; further arguments are
appended to its command. CPUs round differently, and learning amplifies that: compare means with their intervals.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ._options import parser
from ._records import RESULTS, ROOT, Record, find, git


def numbers(x: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a tree of dicts and lists, with their paths."""
    if isinstance(x, (dict, list)):
        for name, entry in x.items() if isinstance(x, dict) else enumerate(x):
            yield from numbers(entry, f"{path}/{name}")
    elif isinstance(x, (int, float)) and not isinstance(x, bool):
        yield path, float(x)


def compare(old: Any, new: Any) -> list[str]:
    """What two results have in common: how many numbers are equal, and the means and medians of those that differ."""
    before, after = dict(numbers(old)), dict(numbers(new))
    both = [path for path in before if path in after]
    differ = [path for path in both if before[path] != after[path]]
    said = [f"{len(both) - len(differ)} of {len(both)} numbers are equal; {len(before) - len(both)} are missing"]
    told = [path for path in differ if path.rpartition("/")[2] in ("mean", "iqm", "median")] or differ[:10]
    return [*said, *(f"  {path[1:]}: {before[path]:.6g}, now {after[path]:.6g}" for path in told)]


def records_in(text: str) -> list[Record]:
    """The records of a file of JSON lines, or of one record, as files were before."""
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


def rerun(record: Record, more: Sequence[str]) -> list[Record]:
    """Run a record's command where its commit is checked out; return the records that it wrote."""
    commit = record["commit"]
    place = ROOT / "build" / "reproduced" / commit[:12]
    if not place.exists():
        git("worktree", "prune")
        git("worktree", "add", "--detach", str(place), commit)
        if not place.exists():
            sys.exit(f"this checkout has no commit {commit}: clone the whole history")
    git("-C", str(place), "checkout", "--", ".")
    command = [sys.executable, *shlex.split(record["command"])[1:], *more]
    print(shlex.join(command), flush=True)
    subprocess.run(command, cwd=place, env=os.environ | {"PYTHONPATH": str(place)}, check=True)
    written = []
    for name in git("-C", str(place), "status", "--porcelain", "-uall", "--", "benchmarks/results").splitlines():
        path = name[2:].strip()
        before = git("-C", str(place), "show", f"HEAD:{path}")
        known = records_in(before) if before else []
        if path.endswith((".json", ".jsonl")):
            written += [each for each in records_in((place / path).read_text()) if each not in known]
    return written


def main() -> None:
    """Command line."""
    arguments = parser(__doc__)
    arguments.add_argument("record", help="FILE#NAME, a record of benchmarks/results")
    options, more = arguments.parse_known_args()
    record = find(RESULTS / options.record)
    if record["uncommitted"]:
        print(f"these files had changes that the commit lacks: {record['uncommitted']}")
    written = rerun(record, more)
    found = next((each for each in written if each.get("name") == record["name"]), written[0] if written else None)
    if found is None:
        sys.exit("the command wrote no record")
    print(*compare(record["results"], found["results"]), sep="\n")
