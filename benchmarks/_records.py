"""Records of measurements: a file of JSON lines for each benchmark, with a line for each record, which has a name.

An address such as "benchmarks/results/parts.jsonl#cpu" says which file and which line; pages link to records by it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ppo_parts.training._files import plain, write_whole

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"


def read(path: Path) -> dict[str, Record]:
    """The records of a file by name; none if there is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def find(address: str | Path) -> Record:
    """The record of an address.

    Raises:
        KeyError: the file has no record of this name.
    """
    path, _, name = str(address).partition("#")
    return read(ROOT / path)[name]


def store(address: str | Path | None, record: Record) -> None:
    """Write a record, in the place of an earlier one of the same name; None: nowhere."""
    if address is None:
        return
    file, _, name = str(address).partition("#")
    if not name:
        raise ValueError(f"a record needs a name: {file}#name, got {file!r}")
    path = ROOT / file  # `file`, if it is absolute
    records = read(path) | {name: {"name": name} | plain(record) | {"name": name}}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(records[each], separators=(",", ":")) for each in sorted(records)]
    write_whole(path, ("\n".join(lines) + "\n").encode())
