"""Fill the tables of docs/papers.md from the records of `python -m benchmarks papers`: `python -m docs.papers`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from benchmarks import _pages
from benchmarks import paper_index as index
from benchmarks._records import RESULTS, read

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "papers.md"
HEADER = ("paper", "what differs from the plain chain", "return over training", "return after training")
MEASURES = ("return_over_training", "evaluation_return")


def row(name: str, arm: dict[str, Any]) -> tuple[str, ...]:
    """The cells of one chain; differences whose interval excludes 0 are bold."""
    if name == "plain":
        return ("plain PPO", "", *(f"{arm[what]['mean']:.1f}" for what in MEASURES))
    reference, _, change = (inspect.getdoc(getattr(index, name)) or "").partition("\n")
    authors, arxiv = reference.partition(",")[0], re.search(r"arXiv:([\d.]+\d)", reference)
    differences = []
    for what in MEASURES:
        low, high = arm[what]["difference"]["95"]
        text = f"{arm[what]['difference']['mean']:+.1f} [{low:+.1f}, {high:+.1f}]"
        differences.append(f"**{text}**" if low > 0 or high < 0 else text)
    return (
        f"[{authors}](https://arxiv.org/abs/{arxiv[1]})" if arxiv else authors,
        " ".join(change.split()),
        *differences,
    )


def page() -> str:
    """The page with the tables of all records."""
    text = PAGE.read_text()
    for name, record in read(RESULTS / "papers.jsonl").items():
        arms = record["results"]["arms"]
        text = _pages.filled(text, name, _pages.table(HEADER, [row(*arm) for arm in arms.items()])[:-1])
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
