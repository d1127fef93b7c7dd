"""Write the docstrings of the public names into docs/parts.md, between `<!-- docstring: name -->` and `<!-- end -->`.

`python -m docs.reference` rewrites the page in place; a test fails where the page and the docstrings differ.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import ppo_parts as pp

PAGE = Path(__file__).parent / "parts.md"
BLOCK = re.compile(r"(<!-- docstring: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
LISTS = ("Args", "Attributes")
LEFT_OUT = ("Example",)  # the page has examples of its own
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
        "adaptive_entropy_bonus": pp.adaptive_entropy_bonus(target_entropy=0.5, learning_rate=0.1),
        "bounds_loss": pp.bounds_loss(coef=1e-4),
        "self_imitation": pp.self_imitation(),
        "proximal_average": pp.proximal_average(decay=0.9),
        "perturbed_mean": pp.perturbed_mean(),
        "loss_weight": pp.loss_weight("value"),
        "policy_diagnostics": pp.policy_diagnostics(),
        "kl_early_stop": pp.kl_early_stop(0.02),
        "prioritized_sampler": pp.prioritized_sampler(2, alpha=0.8, beta=0.4),
    }


def signature(function: Any) -> str:
    """`name(arguments)` without annotations, on several lines if it is long."""
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    written = f"{function.__name__}{inspect.Signature(parameters)}"
    return "\n".join(textwrap.wrap(written, 110, subsequent_indent="    ")).replace("'", '"')


def first_sentence(value: Any) -> str:
    """The first paragraph of a docstring, in one line."""
    return inline(" ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split()))


def inline(text: str) -> str:
    """Sphinx' inline mathematics as GitHub writes it."""
    return re.sub(r":math:`([^`]*)`", r"$`\1`$", text)


def block(name: str, made: dict[str, pp.Part]) -> str:
    """The signature and the docstring of one public name, in Markdown."""
    value = getattr(pp, name)
    lines = ["```text", *signature(value).splitlines(), "```", ""]
    docstring = inspect.getdoc(value) or ""
    summary, blank, *rest = markdown(docstring)
    borrowed = [] if ".. math::" in docstring else equations(getattr(pp.functional, name, None))
    lines += [summary, blank, *borrowed, *rest]
    if name in made:
        part = made[name]
        reads = ", ".join(f"`{field}`" for field in dict.fromkeys((*part.requires, *(part.reads or ()))))
        writes = ", ".join(f"`{field}`" for field in part.provides)
        lines += [f"Reads {reads or 'nothing'}; writes {writes or 'metrics only'}.", ""]
    return "\n".join(lines)


def equations(function: Any) -> list[str]:
    """The equations of the function that a part calls, for a docstring that has none and refers to that function."""
    paragraphs = re.split(r"\n\s*\n(?=\S)", inspect.getdoc(function) or "") if function else []
    return [line for text in paragraphs if text.startswith(".. math::") for line in markdown(text)]


def markdown(docstring: str) -> list[str]:
    """A docstring's paragraphs, equations and sections as lines of Markdown."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n(?=\S)", docstring):
        head, _, rest = paragraph.partition("\n")
        title = head.rstrip(":")
        if title in LEFT_OUT:
            continue
        if head.endswith(":") and title in LISTS:
            lines += [*entries(textwrap.dedent(rest)), ""]
        elif head.startswith(".. math::"):
            lines += [*equation(paragraph.removeprefix(".. math::")), ""]
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


def functions() -> str:
    """The table of `ppo_parts.functional`."""
    listed = [f for f in vars(pp.functional).values() if inspect.isfunction(f)]
    rows = [f"| `{' '.join(signature(f).split())}` | {first_sentence(f)} |" for f in listed]
    return "\n".join(["| function | |", "|---|---|", *rows, ""])


def regenerated(page: str) -> str:
    """The page with every block written anew."""
    made = parts()

    def replacement(match: re.Match[str]) -> str:
        name = match[2]
        return match[1] + (functions() if name == "functional" else block(name, made)) + match[3]

    return BLOCK.sub(replacement, page)


if __name__ == "__main__":
    before = PAGE.read_text()
    PAGE.write_text(regenerated(before))
    sys.stdout.write(f"{PAGE}: {'unchanged' if PAGE.read_text() == before else 'rewritten'}\n")
