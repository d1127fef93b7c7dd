"""The lines of the gallery's tables build what they say; the cards are in the `test_gallery_*.py` beside this file."""

import re

import optax
import pytest

import ppo_parts as pp
from tests.docs.test_docs import FENCE, ROOT, blocks

PAGES = ("docs/gallery/README.md", "docs/tokens.md")


def lines(page):
    """The code in the tables of a page."""
    rows = re.findall(r"^\|.*\|$", FENCE.sub("", (ROOT / page).read_text()), re.MULTILINE)
    return [code for row in rows for code in re.findall(r"`((?:pp|optax)\.[^`]*\(.*?\))`", row)]


@pytest.mark.parametrize("page", PAGES)
def test_lines_build_parts_and_transformations(page):
    names = {"pp": pp, "optax": optax, "F": pp.functional}
    exec(blocks(ROOT / page)[0][0], names)  # the names that the lines use
    found = lines(page)
    assert len(found) >= 20
    for line in found:
        made = eval(line, names)
        for each in made if type(made) is tuple else (made,):
            assert isinstance(each, pp.Part) or hasattr(each, "update"), line
