"""The thumbnails of the gallery have a place on its pages, and show what the records have."""

import re

import pytest

from docs._ext import thumbnails
from tests.docs.test_docs import ROOT


def places(text):
    """The headings of a page, and the first cells of its tables, without links."""
    found = re.findall(r"^(?:## |\| )(.*?)(?: \|.*)?$", text, re.MULTILINE)
    return {re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", each) for each in found}


@pytest.mark.parametrize("page", thumbnails.DRAWN)
def test_each_has_a_place(page):
    assert set(thumbnails.DRAWN[page]) <= places((ROOT / f"{page}.md").read_text())


WITHOUT = {
    "docs/gallery/README": {"TIS, IcePop", "SimPLe", "PFSP", "HAPPO"},
    "docs/tokens": {"GAE over the tokens of the policy"},
}


@pytest.mark.parametrize("page", WITHOUT)
def test_every_row_has_one_unless_the_page_says_why_not(page):
    rows = re.findall(r"^\| \[?([^`|-].*?)(?:]\(.*?\)(.*?))? \|", (ROOT / f"{page}.md").read_text(), re.MULTILINE)
    names = {first + rest for first, rest in rows} - {"name", "what", "here"}
    assert names - set(thumbnails.DRAWN[page]) == WITHOUT[page]


def test_dots_are_seeds():
    drawn = thumbnails.strip("a task", [1.0, 3.0], [0.0, 4.0])
    assert re.findall(r'circle class="(\w+)" cx="([\d.]+)"', drawn) == [
        ("mine", "31.5"), ("mine", "88.5"), ("other", "3.0"), ("other", "117.0"),
    ]  # fmt: skip
    assert "mean 2.0; below it plain PPO, mean 2.0" in drawn
