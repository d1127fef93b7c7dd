"""Rewrite the tables and figures of the pages from the records: `python -m benchmarks report`.

The pages contain the prose; between `<!-- NAME WORD ... -->` and `<!-- end -->` is a table of `_tables`, and the
figures of docs/img are those of `_figures`. The same records give the same pages.
"""

import os
import re
from pathlib import Path

from . import _figures
from ._records import RESULTS, ROOT, make_parser
from ._tables import BLOCKS

BLOCK = re.compile(rf"<!-- ({'|'.join(BLOCKS)})( [^\n]*?)? -->\n.*?<!-- end -->", re.DOTALL)
PAGES = [ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fill(page: str, folder: Path) -> str:
    """Return a page in `folder` with its tables as the records have them."""

    def link(text: str, *addresses: str) -> str:
        first, *further = (f"{os.path.relpath(RESULTS, folder)}/{address}" for address in addresses)
        if len(further) > 2:  # link to the file, which has them all
            return f"[{text}]({first}) [+{len(further)}]({first.partition('#')[0]})"
        return f"[{text}]({first})" + "".join(f" [+]({address})" for address in further)

    def block(found: re.Match[str]) -> str:
        header, *rows = BLOCKS[found[1]](link, *(found[2] or "").split())
        lines = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
        return "\n".join([f"<!-- {found[1]}{found[2] or ''} -->", *lines, "<!-- end -->"])

    return BLOCK.sub(block, page)


def main() -> None:
    """Run the command line."""
    make_parser(__doc__).parse_args()
    for path in PAGES:
        text = path.read_text()
        if (now := fill(text, path.parent)) != text:
            path.write_text(now)
            print(f"wrote {path.relative_to(ROOT)}")
    for name, draw in _figures.FIGURES.items():
        draw(ROOT / "docs/img" / name)
