"""Run the command of a record again, at the commit that it names, and compare the numbers.

    python -m benchmarks reproduce 'kuhn.jsonl#kuhn'

The files of the commit are unpacked in a temporary folder, without its records. The command runs with the record's
XLA_FLAGS and the packages that are installed here; further arguments are appended to it. CPUs round differently, and
learning amplifies that, so compare means with their intervals.
"""

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax

from ._records import RESULTS, Record, make_parser, read, unpack_revision


def read_numbers(tree: Any) -> dict[str, float]:
    """Return the numbers of a tree of dicts and lists by their paths."""
    leaves = jax.tree.leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    return {path: float(x) for path, x in named.items() if isinstance(x, (int, float)) and not isinstance(x, bool)}


def compare(old: Any, new: Any) -> list[str]:
    """Describe two results in lines: how many numbers are equal, and the means and medians of those that differ."""
    before, after = read_numbers(old), read_numbers(new)
    both, gone = [path for path in before if path in after], [path for path in before if path not in after]
    differ = [path for path in both if before[path] != after[path]]
    said = [f"{len(both) - len(differ)} of {len(both)} numbers are equal"]
    if gone:
        said.append(f"{len(gone)} are missing, of {', '.join(sorted({path.partition('/')[0] for path in gone}))}")
    told = [path for path in differ if path.rpartition("/")[2] in ("mean", "iqm", "median")] or differ[:10]
    return [*said, *(f"  {path}: {before[path]:.6g}, now {after[path]:.6g}" for path in told)]


def parse_records(text: bytes) -> list[Record]:
    """Parse a file of JSON lines, or of one record without a name (the older format); other files have no records."""
    found: list[Any] = []
    for pieces in ([text], text.splitlines()):
        with contextlib.suppress(ValueError):  # it is not JSON, or not text
            found = [json.loads(piece) for piece in pieces]
            break
    return [each for each in found if isinstance(each, dict) and "results" in each]


def rerun(record: Record, more: Sequence[str]) -> list[Record]:
    """Run a record's command with the files of its commit; return the records that it wrote, wherever they are."""
    command = [sys.executable, *shlex.split(record["command"])[1:], *more]
    with unpack_revision(record["commit"]) as place:
        for path in (place / "benchmarks/results").rglob("*.json*"):
            path.unlink()
        print(shlex.join(command), flush=True)
        set_here = {"PYTHONPATH": str(place), "XLA_FLAGS": record["xla_flags"]}
        if code := subprocess.run(command, cwd=place, env=os.environ | set_here).returncode:
            sys.exit(f"the command of {record['commit'][:8]} ended with status {code}")
        return [each for path in place.rglob("*.json*") for each in parse_records(path.read_bytes())]


def load(address: str) -> Record:
    """Return the record at an address; exit unless its command can be run again."""
    file, _, name = address.rpartition("/")[2].partition("#")
    records = read(RESULTS / file)
    if name not in records:
        files = ", ".join(sorted(path.name for path in RESULTS.glob("*.jsonl")))
        others = f"{file} has no record {name!r}, but {', '.join(records)}"
        sys.exit(others if records else f"benchmarks/results has no {file!r}, but {files}")
    record = records[name]
    if "command" not in record:
        sys.exit(f"{address} names no command")
    if blanks := {"SEED", "VARIANT"}.intersection(shlex.split(record["command"])):
        sys.exit(f"{record['command']!r} stands for several: its results name each {' and '.join(sorted(blanks))}")
    return record


def main() -> None:
    """Run the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("record", help="FILE#NAME, a record of benchmarks/results, or its address in a link of a page")
    parser.add_argument("--commit", help="run it at another commit, for example if the record's lacks the variant")
    options, more = parser.parse_known_args()
    record = load(options.record)
    if record["uncommitted"]:
        print(f"these files had changes that the commit lacks: {record['uncommitted']}")
    if "seconds" in record:
        print(f"it took {record['seconds']:.0f} seconds on {record['hardware']['cpu']}")
    written = rerun(record | {"commit": options.commit or record["commit"]}, more)
    name, names = record["name"], [each.get("name") for each in written]
    if name not in names and len(names) != 1:
        sys.exit(f"the command wrote no record {name!r}, but {names}")
    found = written[names.index(name) if name in names else 0]
    before, after = ({"name": name} | each | each["hardware"] | each["versions"] for each in (record, found))
    for what in ("name", "cpu", "cores", "cores_used", "device", *record["versions"]):
        if what in before and before[what] != after.get(what):
            print(f"{what}: {before[what]}, now {after.get(what)}")
    print(*compare(record["results"], found["results"]), sep="\n")
