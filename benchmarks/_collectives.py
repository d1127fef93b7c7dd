"""The communication between the devices of a compiled program, read from its HLO."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter"
BYTES = {"pred": 1, "bf16": 2}


class Collective(NamedTuple):
    """An operation that runs `times` times: its kind, and the shapes of what it returns, such as "f32[4,2]"."""

    kind: str
    shapes: tuple[str, ...]
    times: int

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """The shapes as tuples."""
        return [tuple(int(x) for x in shape.rstrip("]").partition("[")[2].split(",") if x) for shape in self.shapes]

    @property
    def size(self) -> int:
        """Bytes of one run."""
        dtypes = [shape.partition("[")[0] for shape in self.shapes]
        widths = [BYTES.get(dtype) or int(re.sub(r"\D", "", dtype)) // 8 for dtype in dtypes]
        return sum(width * math.prod(sizes) for width, sizes in zip(widths, self.sizes, strict=True))


def collectives(compiled: Any) -> list[Collective]:
    """Return the collectives of a program; those in loops count as often as they run, and all branches count."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in compiled.as_text().splitlines():
        begins = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if begins:
            lines = bodies.setdefault(begins[2], [])
            entry = begins[2] if begins[1] else entry
        lines.append(line)

    def visit(name: str, times: int) -> list[Collective]:
        found = []
        for line in bodies[name][1:]:
            operation = re.search(rf" = (.*?) ({KINDS})(?:-start)?\(", line)
            if operation:
                shapes = tuple(re.findall(r"[a-z]+\d*\[[\d,]*\]", operation[1]))
                found.append(Collective(operation[2], shapes, times))
            length = re.search(r"known_trip_count[^\d]*(\d+)", line)
            loop = " while(" in line
            called = re.findall(r"(?:body|condition|to_apply|calls|_computation)=%?([\w.\-]+)", line)
            for group in re.findall(r"branch_computations=\{(.*?)\}", line):
                called += re.findall(r"[\w.\-]+", group)
            for inner in called:
                inside = visit(inner, times * int(length[1]) if loop and length else times)
                assert not (inside and loop and not length), f"devices communicate in a loop of unknown length: {line}"
                found += inside
        return found

    return visit(entry, 1)


def counted(found: list[Collective]) -> dict[str, int]:
    """Count how often each kind runs."""
    return {kind: sum(one.times for one in found if one.kind == kind) for kind in sorted({one.kind for one in found})}
