"""Find what became slower between two recorded results of the same benchmark.

`python -m benchmarks compare benchmarks/results/parts.jsonl#cpu new.jsonl#cpu`

What is compared are ratios taken within one run, to the memory stream (`parts`, inside one program), to the update
written by hand (`update`) or of recipes to what was written by hand (`train`, compilation included), since they hold
when the machine is busier than last time. A number counts as worse when its median grew by more than the threshold and
its lower quartile is above the old upper one. The exit status is 1 if anything is worse, 2 if a file cannot be compared
or the two have nothing in common.
"""

from __future__ import annotations

import sys
from typing import Any

from ._options import parser
from ._records import find
from ._timing import Quartiles


def figures(record: dict[str, Any]) -> dict[str, Quartiles]:
    """Name and quartiles of every ratio in a record, smaller being better."""
    found = {}
    for row in record["results"] if isinstance(record["results"], list) else []:
        size = "x".join(map(str, row.get("size", ())))
        if row.get("method") == "ours" and row["clock"] == "inside":
            found[f"{row['part']} {row['direction']} {size} {row['dtype']}"] = row["over_floor"]
        for rival, ratio in row.get("ours_over", {}).items():  # of `update`
            found[f"update {size} against {rival}"] = ratio
        if "over_recipe" in row:  # of `train`
            over = row["over_recipe"]
            inverse = {"median": 1 / over["median"], "q1": 1 / over["q3"], "q3": 1 / over["q1"]}
            found[f"{row['setting']}: recipe against {row['program']}"] = inverse
            found[f"{row['setting']}: compiling it against {row['program']}"] = row["compile_of_recipe_over_this"]
    return found


def ratios(address: str) -> dict[str, Quartiles]:
    """The ratios of a record; exits with 2 where there are none."""
    try:
        found = figures(find(address))
    except (OSError, ValueError, KeyError) as error:
        print(f"{address} cannot be read: {error}", file=sys.stderr)
        sys.exit(2)
    if not found:
        print(f"{address} has no ratios to compare: only records of parts, update and train have", file=sys.stderr)
        sys.exit(2)
    return found


def verdict(old: Quartiles, new: Quartiles, threshold: float) -> str:
    """ "slower", "faster" or "", for quartiles that do not overlap and medians further apart than the threshold."""
    if new["median"] > (1 + threshold) * old["median"] and new["q1"] > old["q3"]:
        return "slower"
    if old["median"] > (1 + threshold) * new["median"] and old["q1"] > new["q3"]:
        return "faster"
    return ""


def main() -> None:
    """Print what changed; exit with the verdict."""
    command_line = parser(__doc__)
    command_line.add_argument("old", metavar="FILE#NAME")
    command_line.add_argument("new", metavar="FILE#NAME")
    command_line.add_argument("--threshold", type=float, default=0.15, help="growth of the median, 0.15 = 15 %%")
    options = command_line.parse_args()
    old, new = ratios(options.old), ratios(options.new)
    common = [name for name in old if name in new]
    changes = {name: verdict(old[name], new[name], options.threshold) for name in common}
    for word in ("slower", "faster"):
        for name in (name for name in common if changes[name] == word):
            before, after = old[name]["median"], new[name]["median"]
            print(f"{word}: {name}: {before:.2f} -> {after:.2f} ({after / before - 1:+.0%})")
    slower = sum(change == "slower" for change in changes.values())
    print(f"{len(common)} compared, {slower} slower; {len(old) - len(common)} only in the old, ", end="")
    print(f"{len(new) - len(common)} only in the new")
    sys.exit(1 if slower else 0 if common else 2)
