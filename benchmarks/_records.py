"""The command line of benchmarks, and the files that record their measurements.

Each benchmark has a file of JSON lines. Each line is a record, which has a name. An address such as
"benchmarks/results/parts.jsonl#cpu" names a file and a record in it; pages use it to link to records.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import io
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock

from ppo_parts._base.command_line import positive, seed
from ppo_parts.training._files import make_plain, write_whole

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
PACKAGES = (
    "jax", "jaxlib", "optax", "flax", "distrax", "ale-py", "gymnasium", "gymnax", "jaxmarl", "brax", "craftax",
    "mujoco", "mujoco-mjx", "pgx", "playground", "rejax", "rlax", "numpy", "sbx-rl", "stable_baselines3", "torch",
    "torchrl", "xminigrid", "ppo_parts",
)  # fmt: skip


def run_git(*args: str) -> str:
    """Return the output of a git command in this checkout, or an empty string if it fails."""
    return subprocess.run(("git", "-C", ROOT, *args), capture_output=True, text=True, check=False).stdout.strip()


@contextlib.contextmanager
def unpack_revision(revision: str) -> Iterator[Path]:
    """Unpack the files of a revision in a temporary folder."""
    archive = subprocess.run(["git", "-C", ROOT, "archive", revision], capture_output=True)
    if archive.returncode:
        sys.exit(f"this checkout has no revision {revision}: clone the whole history, or choose another")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
        yield Path(folder)


# Read these when a benchmark starts, because others may commit while it runs, and because it adds to the load itself.
BEGAN, LOAD = time.monotonic(), os.getloadavg()
COMMIT = run_git("rev-parse", "HEAD")
UNCOMMITTED = run_git("status", "--porcelain", "--", "ppo_parts", "benchmarks/*.py", "docs/gallery")


def read(path: Path) -> dict[str, Record]:
    """Return the records of a file by name, or none if there is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def store(address: str | Path, record: Record) -> None:
    """Write a record in place of an earlier one of the same name; a record without a name gets that of the file."""
    file, _, name = str(address).partition("#")
    path = ROOT / file  # this is `file` itself if it is absolute
    name = name or path.stem
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):  # other benchmarks may add records to this file
        records = read(path) | {name: {"name": name} | make_plain(record)}
        records.pop(f"{name}_partial", None)
        lines = [json.dumps(records[each], separators=(",", ":")) for each in sorted(records)]
        write_whole(path, ("\n".join(lines) + "\n").encode())


def find(address: str) -> Record | None:
    """Return the record at an address, if there is one."""
    file, _, name = address.partition("#")
    return read(ROOT / file).get(name)


def parse_size(text: str) -> tuple[int, int]:
    """Parse steps and environments from the command line, such as "128x64"."""
    sizes = text.split("x")
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(f"give steps and environments, such as 128x64, got {text!r}")
    return positive(sizes[0]), positive(sizes[1])


OPTIONS: dict[str, dict[str, Any]] = {
    "seeds": {"type": positive, "help": "how many seeds"},
    "first_seed": {"type": seed, "help": "the first seed"},
    "steps": {"type": positive, "help": "environment steps of each seed"},
    "sizes": {"type": parse_size, "nargs": "+", "metavar": "TxN", "help": "steps and environments"},
    "rounds": {"type": positive, "help": "interleaved rounds, fewer if they take long"},
    "cleanrl": {"nargs": 2, "metavar": ("PYTHON", "SCRIPT"), "help": "run CleanRL's script as well, with this Python"},
    "json": {"metavar": "FILE[#NAME]", "help": "write the record here, and replace an earlier one"},
}


def make_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Make a command line with those of the shared options that have a default here.

    The default of `json` is the file of the benchmark's records, which `claim` reads, or None to only print.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        settings = dict(OPTIONS[name])
        shown = " ".join(map(show, default)) if isinstance(default, tuple) else default
        if name == "json":
            made.set_defaults(records=default)
            shown, default = f"a new one in {default}" if default else "print only", None
        if shown is not None:
            settings["help"] += f" (default: {shown})"
        made.add_argument(f"--{name.replace('_', '-')}", default=default, **settings)
    return made


def make_addresses(options: argparse.Namespace, *names: str) -> list[str]:
    """Return the addresses of the records that a run will write: by default these names in the benchmark's file."""
    file, _, name = (options.json or options.records).partition("#")
    if name and len(names) > 1:
        sys.exit(f"--json {options.json} names one record, but the run writes {len(names)}: give --json {file}")
    return [f"{file}#{name or each}" for each in names]


def claim(options: argparse.Namespace, *names: str) -> list[str]:
    """Return these addresses; exit if one already has a record, unless `--json` says where to write."""
    addresses = make_addresses(options, *names)
    for address in addresses if options.json is None else ():
        if found := find(address):
            remedy = f"--json {options.records} replaces it, another file keeps it"
            sys.exit(f"{address} is a record of {found['date']}: {remedy}")
    return addresses


def write(address: str | None, results: Any) -> None:
    """Store `results` with command, date, commit, machine and versions, unless `address` is None."""
    if address is not None:
        store(address, describe_run() | {"results": results})


def write_part(address: str | None, results: Any) -> None:
    """Store the results so far as NAME_partial, which `write` removes."""
    file, _, name = str(address).partition("#")
    write(address and f"{file}#{name or Path(file).stem}_partial", results)


def collect(address: str | None, rows: Iterable[Record]) -> None:
    """Print each row when it arrives, and write all rows so far to NAME_partial; at the end, they replace NAME."""
    found: list[Record] = []
    for row in rows:
        found.append(row)
        print("  ".join(f"{name} {show(x)}" for name, x in row.items()), flush=True)
        write_part(address, found)
    write(address, found)


def show_quartiles(ratio: Mapping[str, float]) -> str:
    """Format a median and its quartiles."""
    return "{median:.2f} ({q1:.2f} - {q3:.2f})".format(**ratio)


def show(x: Any) -> str:
    """Format a value of a row: a number with four digits, a median with its quartiles, or a size."""
    if isinstance(x, Mapping):
        inner = ", ".join(f"{name} {show(each)}" for name, each in x.items())
        return show_quartiles(x) if "median" in x else f"({inner})"
    if isinstance(x, (list, tuple)):
        return "x".join(map(show, x))
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def describe_run() -> Record:
    """Describe the machine, versions and command, so that a reader can measure again."""
    cpu, info = platform.processor(), Path("/proc/cpuinfo")
    if info.exists():
        cpu = next(iter(re.findall(r"model name\s*: (.*)", info.read_text())), cpu)
    versions = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    given = [re.sub("(^|=)/.*/", r"\1", text) for text in sys.argv[1:]]  # without the folders of this machine
    return {
        "command": shlex.join([*sys.argv[0].split(), *given]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": time.monotonic() - BEGAN,
        "commit": COMMIT,
        "uncommitted": UNCOMMITTED,
        "hardware": {
            "cpu": cpu,
            "cores": os.cpu_count(),
            "cores_used": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "device": jax.devices()[0].device_kind,
            "load_average": LOAD,
        },
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": {"python": platform.python_version()} | {x: versions[x] for x in PACKAGES if x in versions},
    }
