"""The documentation site: `.ci/site` builds it from these pages, the README and the docstrings."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import sys
import typing
from pathlib import Path
from typing import Any

import jax
from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

import ppo_parts
from docs._ext import explorer, thumbnails

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ppo_parts"
logger = logging.getLogger(__name__)
MODULES = ("agents", "critics", "distributions", "envs", "errors", "exploration", "functional", "networks", "optim")
MODULES += ("regularizers", "symmetry", "testing", "tokens", "training")


def public(module: str) -> list[str]:
    """Return the names, except modules, that a module defines or re-exports with `import x as x`."""
    path = PACKAGE / module
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    names = set()
    for node in [inner for outer in tree.body for inner in (outer.body if isinstance(outer, ast.If) else [outer])]:
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return sorted((name for name in names if not name.startswith("_")), key=lambda name: (name.lower(), name))


def pages(folder: str) -> list[str]:
    """Return the documents in a folder of `docs`, without its README."""
    found = sorted((ROOT / "docs" / folder).glob("*.md"))
    return [str(path.relative_to(ROOT).with_suffix("")) for path in found if path.stem != "README"]


SECTIONS = {  # the children of each page that has some; pages that are not named here belong to the guide
    "README": ["quickstart", "index", "gallery/README", "coming-from", "reference", "results", "decisions"],
    "docs/gallery/README": ["tokens"],
    "docs/reference": ["metrics"],
    "docs/results": ["benchmarks", "study", "fidelity"],
}
SECTIONS = {parent: [f"docs/{child}" for child in children] for parent, children in SECTIONS.items()}
SECTIONS["README"][-1:] = ["CONTRIBUTING"]
project_pages = sorted({path.stem for path in ROOT.glob("*.md")} - {"README", "CONTRIBUTING"})
SECTIONS["CONTRIBUTING"] = [*project_pages, *pages("decisions")]
SECTIONS["docs/gallery/README"] += pages("gallery")
SECTIONS["docs/results"].append("benchmarks/results/README")
index = (ROOT / "docs/index.md").read_text()
SECTIONS["docs/index"] = sorted(  # in the order of its table
    (page for page in pages("") if not any(page in children for children in SECTIONS.values())),
    key=lambda page: index.find(f"]({page.removeprefix('docs/')}.md)"),
)
SHORT = {"docs/quickstart": "Quickstart </docs/quickstart>"}  # otherwise the bar at the top would have two lines
NOT_SEARCHED = {"docs/benchmarks", "benchmarks/results/README", "CHANGELOG"}  # they would hide the pages that explain

project, author, copyright = "ppo_parts", "the authors of ppo_parts", "the authors of ppo_parts, Apache-2.0"
version = release = ppo_parts.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "myst_nb"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "benchmarks/results/README.md"]
exclude_patterns = ["docs/_*", "docs/img", ".*", "build", "ppo_parts", "runs", "tests"]  # or Sphinx would read .venv
suppress_warnings = ["ref.python"]  # `functional.ShapeError` is `errors.ShapeError`, so either page will do
html_additional_pages = {"index": "redirect.html"}
templates_path = [str(Path(__file__).parent / "_templates")]
default_role = "py:obj"  # `name` in a docstring is a link if the name has a page, and otherwise code
add_module_names = False
toc_object_entries = False

myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 6  # as on GitHub
nb_execution_mode, nb_execution_timeout, nb_execution_raise_on_error = "force", 120, True  # for the notebooks in docs
nb_merge_streams = True
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for programs that run once, compiling takes longer than running
if (0, 8) <= jax.__version_info__ < (0, 11):  # see tests/conftest.py
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false")
os.environ["MATPLOTLIBRC"] = str(Path(__file__).parent / "matplotlibrc")  # one style for the figures in notebooks

autosummary_context = {"public": {f"ppo_parts.{module}": public(module) for module in MODULES}}
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False

html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = "ppo_parts"
html_sidebars = {"docs/quickstart": [], "docs/coming-from": []}  # they have no sibling pages
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "_ext" / "scorer.js")
html_context = {"default_mode": "auto"}  # light or dark, as in the browser; without it, the theme logs an error
html_show_sourcelink = html_copy_source = False
html_theme_options = {"navigation_with_keys": False, "show_toc_level": 2, "navbar_align": "left"}


LINKS = {name: f"ppo_parts.{name}" for name in public("")}
LINKS |= {f"{module}.{name}": f"ppo_parts.{module}.{name}" for module in MODULES for name in public(module)}
LINKS |= {f"F.{name}": f"ppo_parts.functional.{name}" for name in public("functional")}
"""The text of code on a page, without `pp.`, by which a public name is meant."""


def source_read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add the navigation, which GitHub would show as code; write mathematics and links to folders for Sphinx."""
    folder = (ROOT / docname).parent
    source[0] = re.sub(r"\$`([^`\n]+)`\$", r"$\1$", source[0])
    source[0] = re.sub(
        r"\[([^]]*)]\(([^)\s]+)\)", lambda link: link[1] if (folder / link[2]).is_dir() else link[0], source[0]
    )
    if docname in SECTIONS:
        source[0] += "\n".join(
            ["\n```{toctree}", ":hidden:", "", *(SHORT.get(child, f"/{child}") for child in SECTIONS[docname]), "```\n"]
        )


def doctree_read(app: Sphinx, doctree: nodes.document) -> None:
    """Turn each public name that stands in code on a page into a link."""
    docname = app.env.docname
    if docname in NOT_SEARCHED:
        app.env.metadata[docname]["nosearch"] = "true"
    add_thumbnails(docname, doctree)
    for literal in [*doctree.findall(nodes.literal)] if app.env.doc2path(docname).suffix == ".md" else []:
        target = LINKS.get(re.sub(r"^(pp|ppo_parts)\.|\(.*", "", literal.astext()))
        cell = literal.parent.parent
        if docname == "docs/metrics" and isinstance(cell, nodes.entry) and cell.parent.index(cell) == 0:
            continue  # a metric may have the name of a part
        if target and not isinstance(literal.parent, nodes.reference | nodes.title | addnodes.pending_xref):
            options = {"refdomain": "py", "reftype": "obj", "reftarget": target, "refdoc": docname, "refexplicit": True}
            literal.replace_self(addnodes.pending_xref("", literal.deepcopy(), **options))


def add_thumbnails(docname: str, doctree: nodes.document) -> None:
    """Put the drawings of records after the names of variants in the first cells of tables, and below headings."""
    named = thumbnails.DRAWN.get(docname, {})
    for section in doctree.findall(nodes.section):
        title = section[0].astext()
        if title in named:
            section.insert(1, nodes.raw("", named[title](), format="html"))
        for table in [node for node in section.children if isinstance(node, nodes.table)]:
            for row in table.findall(nodes.row):
                if (name := row[0].astext().replace("’", "'")) in named:  # Sphinx has made the quotes typographic
                    row[0] += nodes.raw("", named[name](), format="html")


def process_docstring(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Set off the place and the reference of a part, and list the fields whose meaning their annotations give."""
    if what == "data":  # autodoc looks for the docstring where the name is public, and falls back to that of its type
        constant = name.rpartition(".")[2]
        modules = [module for module, at in sys.modules.items() if "ppo_parts." in module and constant in vars(at)]
        found = [ModuleAnalyzer.for_module(module).find_attr_docs().get(("", constant)) for module in modules]
        lines[:] = next(filter(None, found), [])
    text = re.sub(r"^(Place|Reference): ", r"**\1:** ", "\n".join(lines), flags=re.MULTILINE)
    lines[:] = re.sub(r"^\|(.*)\|\n\|[-|]+\|\n((?:\|.*\|\n?)+)", table, text, flags=re.MULTILINE).splitlines()
    if dataclasses.is_dataclass(value) and isinstance(value, type):
        hints = typing.get_type_hints(value, include_extras=True)
        for field in dataclasses.fields(value):
            texts = [text for text in getattr(hints[field.name], "__metadata__", ()) if isinstance(text, str)]
            lines += [f":ivar {field.name}: {text}" for text in texts]


def table(markdown: re.Match[str]) -> str:
    """Convert a Markdown table, which `help` shows better, to the language of docstrings."""
    rows = [row.strip("| ").split(" | ") for row in (markdown[1], *markdown[2].splitlines())]
    cells = [f"   {'  ' if column else '* '}- {cell}" for row in rows for column, cell in enumerate(row)]
    return "\n".join([".. list-table::", "   :header-rows: 1", "", *cells, "", ""])


def skip_member(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of tuples, whose docstrings only number them; the class describes the fields."""
    return True if (getattr(value, "__doc__", "") or "").startswith("Alias for field number") else None


def formula(text: str, display: bool) -> str:
    """Convert mathematics to MathML, which browsers show without a script."""
    text = "\n".join(line for line in text.splitlines() if line.strip())
    text = re.sub(r"frac(\d)(\d)", r"frac{\1}{\2}", text)  # docutils reads \frac12 as 12 over what follows it
    text = re.sub(r"(\\(?:bar|hat|tilde) ?(?:\\[a-z]+|\w))(?=[_^])", r"\1{}", text)  # it also puts t below \bar s_t
    if display and ("&" in text or r"\\" in text) and r"\begin" not in text:
        text = rf"\begin{{aligned}}{text}\end{{aligned}}"
    written = tex2mathml(text, as_block=display)
    return f'<div class="math">{written}</div>' if display else written


def mathml(display: bool) -> Any:
    """Return a visitor that writes mathematics."""

    def visit(self: Any, node: nodes.Element) -> None:
        try:
            self.body.append(formula(node.astext(), display))
        except MathError as error:
            logger.warning("%s in %s", error, node.astext(), location=node)
        raise nodes.SkipNode

    return visit, None


def page_context(app: Sphinx, pagename: str, template: str, context: Any, doctree: Any) -> None:
    """Add the site's script to the pages that need it."""
    if pagename == "docs/play":
        app.add_js_file("agents.js", loading_method="defer")
    if pagename in (
        "docs/explorer",
        "docs/by-hand",
        "docs/play",
        "docs/gallery/README",
        "docs/gallery/measured",
        "docs/tokens",
    ):
        app.add_js_file("site.js", loading_method="defer")
    if pagename == "docs/explorer":
        table = json.dumps(explorer.table(formula)).replace("</", r"<\/")
        app.add_js_file(None, body=f"const explorerTable = {table};")


def setup(app: Sphinx) -> None:
    """Register the functions above."""
    app.add_html_math_renderer("mathml", mathml(False), mathml(True))
    app.connect("source-read", source_read)
    app.connect("doctree-read", doctree_read)
    app.connect("html-page-context", page_context)
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-skip-member", skip_member)
