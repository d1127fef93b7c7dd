"""Write the docstrings of the public names into docs/parts.md and docs/api.

In docs/parts.md they are between `<!-- docstring: name -->` and `<!-- end -->`. Each page of docs/api shows a module.
`python -m docs.reference` rewrites the pages in place; a test fails where they differ from the docstrings.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

import ppo_parts as pp
from ppo_parts import distributions, envs, functional, networks, testing, training

DOCS = Path(__file__).parent
PARTS = DOCS / "parts.md"
FAMILIES = tuple(x for name, x in sorted(vars(pp).items()) if name[0] != "_" and isinstance(x, types.ModuleType))
MODULES = (functional, distributions, networks, envs, training, testing)
BLOCK = re.compile(r"(<!-- docstring: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NAMED = re.compile(r"`(\w+)\.(\w+)`")
LISTS = ("Args", "Attributes")
WIDTH = 140


def parts() -> dict[str, pp.Part]:
    """One of each part whose fields do not depend on its arguments, to show what it reads and writes."""
    return {
        "gae": pp.gae(gamma=0.99, gae_lambda=0.95),
        "vtrace": pp.vtrace(gamma=0.99),
        "advantage_normalize": pp.advantage_normalize(),
        "advantage_weight": pp.advantage_weight(),
        "clipped_surrogate": pp.clipped_surrogate(clip_eps=0.2),
        "clipped_value_loss": pp.clipped_value_loss(clip_eps=0.2),
        "value_loss": pp.value_loss(),
        "entropy_bonus": pp.entropy_bonus(coef=0.01),
        "adaptive_entropy_bonus": pp.regularizers.adaptive_entropy_bonus(target_entropy=0.5, learning_rate=0.1),
        "bounds_loss": pp.regularizers.bounds_loss(coef=1e-4),
        "self_imitation": pp.exploration.self_imitation(),
        "proximal_average": pp.regularizers.proximal_average(decay=0.9),
        "perturbed_mean": pp.regularizers.perturbed_mean(),
        "loss_weight": pp.loss_weight("value"),
        "policy_diagnostics": pp.policy_diagnostics(),
        "kl_early_stop": pp.kl_early_stop(0.02),
        "prioritized_sampler": pp.prioritized_sampler(2, alpha=0.8, beta=0.4),
    }


def signature(function: Any) -> str:
    """`name(arguments)` without annotations, on several lines if it is long."""
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    written = f"{function.__name__}{inspect.Signature(parameters)}"
    written = re.sub(r"<(?:function|class) '?(?:\w+\.)*(<?\w+>?)(?:'| at \w+)>", r"\1", written)
    return "\n".join(textwrap.wrap(written, 110, subsequent_indent="    ")).replace("'", '"')


def first_sentence(value: Any) -> str:
    """The first paragraph of a docstring, in one line."""
    return inline(" ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split()))


def inline(text: str) -> str:
    """Sphinx' inline mathematics as GitHub writes it."""
    return re.sub(r":math:`([^`]*)`", r"$`\1`$", text)


def linked(page: str, folder: str) -> str:
    """The page with a link at each `module.name` that a page of docs/api documents; `folder` leads to docs/api."""
    documented = {name_of(module): public(module) for module in MODULES}

    def link(match: re.Match[str]) -> str:
        module, name = match.groups()
        return f"[{match[0]}]({folder}{module}.md#{name.lower()})" if name in documented.get(module, {}) else match[0]

    return NAMED.sub(link, page)


def block(name: str, made: dict[str, pp.Part]) -> str:
    """The signature and the docstring of one public name of the package, in Markdown."""
    value = next(getattr(place, name) for place in (pp, *FAMILIES) if hasattr(place, name))
    lines = ["```text", *signature(value).splitlines(), "```", ""]
    docstring = inspect.getdoc(value) or ""
    summary, blank, *rest = markdown(docstring, left_out=("Example",))  # the page has examples of its own
    borrowed = [] if ".. math::" in docstring else equations(getattr(pp.functional, name, None))
    lines += [summary, blank, *borrowed, *rest]
    if name in made:
        part = made[name]
        reads = ", ".join(f"`{field}`" for field in dict.fromkeys((*part.requires, *(part.reads or ()))))
        writes = ", ".join(f"`{field}`" for field in part.provides)
        lines += [f"Reads {reads or 'nothing'}; writes {writes or 'metrics only'}.", ""]
    return linked("\n".join(lines), "api/")


def equations(function: Any) -> list[str]:
    """The equations of the function that a part calls, for a docstring that has none and refers to that function."""
    paragraphs = re.split(r"\n\s*\n(?=\S)", inspect.getdoc(function) or "") if function else []
    return [line for text in paragraphs if text.startswith(".. math::") for line in markdown(text)]


def markdown(docstring: str, left_out: tuple[str, ...] = ()) -> list[str]:
    """A docstring's paragraphs, equations and sections as lines of Markdown."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n(?=\S)", docstring):
        head, _, rest = paragraph.partition("\n")
        title = head.rstrip(":")
        if title in left_out:
            continue
        if head.endswith(":") and title in LISTS:
            lines += ["*Attributes*:", ""] if title == "Attributes" and "\nArgs:\n" in docstring else []
            lines += [*entries(textwrap.dedent(rest)), ""]
        elif head.startswith("| "):
            lines += [inline(paragraph), ""]
        elif head.startswith(".. math::"):
            lines += [*equation(paragraph.removeprefix(".. math::")), ""]
        elif head == "Example:":
            lines += ["```pycon", *textwrap.dedent(rest).splitlines(), "```", ""]
        elif head.startswith("* "):
            bullets = re.split(r"\n(?=\* )", paragraph)
            lines += [*(wrapped(bullet[2:], "* ") for bullet in bullets), ""]
        elif head.endswith(":") and rest.startswith("    ") and title in ("Returns", "Raises", "Note"):
            lines += [wrapped(f"*{title}*: {textwrap.dedent(rest)}"), ""]
        else:
            lines += [wrapped(re.sub(r"^(Place|Reference): ", r"*\1*: ", paragraph)), ""]
    return lines


def entries(text: str) -> list[str]:
    """`name: meaning` as a list."""
    found = re.split(r"\n(?=\S)", text)
    return [wrapped("`{}`: {}".format(*re.split(r":\s+", entry, maxsplit=1)), "* ") for entry in found]


def equation(text: str) -> list[str]:
    """A displayed equation; lines that are aligned at `&` need an environment of their own."""
    body = textwrap.dedent(text).strip().splitlines()
    if "&" in text and "\\begin" not in text:
        body = [r"\begin{aligned}", *body, r"\end{aligned}"]
    return ["```math", *(line.strip() for line in body), "```"]


def wrapped(text: str, bullet: str = "") -> str:
    """A paragraph or a list item, wrapped."""
    options = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": " " * len(bullet)}
    return "\n".join(textwrap.wrap(inline(" ".join(text.split())), WIDTH, initial_indent=bullet, **options))


def name_of(module: types.ModuleType) -> str:
    """The last part of its name."""
    return module.__name__.rpartition(".")[2]


def public(module: types.ModuleType) -> dict[str, Any]:
    """The public functions, classes and type aliases of a module by name, without what it imports from elsewhere."""
    members = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {
        name: value
        for name, value in members.items()
        if typing.get_origin(value) is typing.Literal or getattr(value, "__module__", "").startswith(module.__name__)
    }


def api(module: types.ModuleType) -> str:
    """The page of a module: its docstring, a table of its names, and a section for each."""
    members = dict(sorted(public(module).items(), key=lambda item: (item[0].lower(), item[0].swapcase())))
    aliases = {name: value for name, value in members.items() if typing.get_origin(value) is typing.Literal}
    described = {name: value for name, value in members.items() if name not in aliases}
    sections = [name.lower() for name in described]
    anchors = [f"{name}-{sections[:i].count(name)}".removesuffix("-0") for i, name in enumerate(sections)]
    rows = [
        f"| [`{name}`](#{anchor}) | {first_sentence(value)} |"
        for anchor, (name, value) in zip(anchors, described.items(), strict=True)
    ]
    lines = [f"# `{module.__name__}`", "", *markdown(inspect.getdoc(module) or "")]
    lines += ["| | |", "|---|---|", *rows, ""]
    for name, value in described.items():
        lines += [f"## `{name}`", "", *section(value)]
    for name, value in aliases.items():
        choices = ", ".join(repr(choice).replace("'", '"') for choice in typing.get_args(value))
        lines += [f"## `{name}`", "", wrapped(f"One of {choices}."), ""]
    return linked("\n".join(lines).rstrip() + "\n", "")


def section(value: Any) -> list[str]:
    """Signature, docstring, fields and methods of a function or a class."""
    error = inspect.isclass(value) and issubclass(value, Exception)
    lines = [] if error else ["```text", *signature(value).splitlines(), "```", ""]
    lines += markdown(inspect.getdoc(value) or "")
    if not inspect.isclass(value) or error:
        return lines
    lines += [*fields(value), ""] if dataclasses.is_dataclass(value) and fields(value) else []
    declared = getattr(value, "__annotations__", {})  # fields, whose defaults may be functions
    methods = [name for name in vars(value) if name not in declared and not name.startswith("_")]
    described = [method_line(value, name) for name in methods if callable(getattr(value, name))]
    return [*lines, "*Methods*:", "", *described, ""] if described else lines


def fields(cls: type) -> list[str]:
    """The fields whose annotation says what they mean, with their defaults."""
    hints = typing.get_type_hints(cls, include_extras=True)
    meanings = {
        name: [text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)]
        for name, hint in hints.items()
    }
    own = [field for field in dataclasses.fields(cls) if meanings.get(field.name)]
    defaults = {field.name: "" if field.default is dataclasses.MISSING else f" = {field.default!r}" for field in own}
    return [wrapped(f"`{field.name}{defaults[field.name]}`: {meanings[field.name][0]}", "* ") for field in own]


def method_line(cls: type, name: str) -> str:
    """The signature and the first paragraph of a method."""
    written = " ".join(signature(getattr(cls, name)).split()).replace("(self, ", "(").replace("(self)", "()")
    return wrapped(f"`{written}`: {first_sentence(getattr(cls, name))}", "* ")


def regenerated(page: str) -> str:
    """The page of parts with every block written anew."""
    made = parts()
    return BLOCK.sub(lambda match: match[1] + block(match[2], made) + match[3], page)


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    written = {DOCS / "api" / f"{name_of(module)}.md": api(module) for module in MODULES}
    return {PARTS: regenerated(PARTS.read_text()), **written}


if __name__ == "__main__":
    for path, page in pages().items():
        unchanged = path.exists() and path.read_text() == page
        path.parent.mkdir(exist_ok=True)
        path.write_text(page)
        sys.stdout.write(f"{path}: {'unchanged' if unchanged else 'rewritten'}\n")
