"""Write docs/papers.md from the docstrings and the sources in benchmarks/paper_index.py, and from recorded comparisons.

`python -m docs.papers` rewrites the page; a test fails where the page and the module differ.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ppo_parts as pp
from benchmarks import paper_index as index
from tests.registry import CASES, ELSEWHERE

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "papers.md"
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
ELSEWHERE_ONLINE = {  # papers that are not on arXiv
    "dohare_2023": "https://openreview.net/forum?id=m9Jfdz4ymO",
    "dossa_2021": "https://doi.org/10.1109/ACCESS.2021.3106662",
    "huang_2022": "https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/",
    "huber_1964": "https://doi.org/10.1214/aoms/1177703732",
    "kapturowski_2019": "https://openreview.net/forum?id=r1lyTjAqYX",
    "ng_1999": "https://people.eecs.berkeley.edu/~pabbeel/cs287-fa09/readings/NgHaradaRussell-shaping-ICML1999.pdf",
    "ray_2019": "https://cdn.openai.com/safexp-short.pdf",
    "sutton_1988": "https://doi.org/10.1007/BF00115009",
    "williams_1991": "https://doi.org/10.1080/09540099108946587",
    "williams_1992": "https://doi.org/10.1007/BF00992696",
    "yao_2025": "https://fengyao.notion.site/off-policy-rl",
}


def is_paper(function: Callable[..., Any]) -> bool:
    """Whether the docstring of a function begins with a reference: authors and year."""
    return function.__module__ == index.__name__ and bool(re.match(r"[^,]* \d{4}, ", function.__doc__ or ""))


def reference(function: Callable[..., Any]) -> str:
    """The first line of the docstring, without the period at its end."""
    return (inspect.getdoc(function) or "").partition("\n")[0].removesuffix(".")


def change(function: Callable[..., Any]) -> str:
    """What the paper changes: the rest of the docstring, in one line."""
    return " ".join((inspect.getdoc(function) or "").partition("\n")[2].split())


def body(function: Callable[..., Any]) -> list[str]:
    """The lines of a function after its docstring, without empty ones."""
    source = textwrap.dedent(inspect.getsource(function))
    [definition] = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    after = definition.body[0].end_lineno
    return [line for line in source.splitlines()[after:] if line.strip()]


def names(function: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """The parts and the functions that a function of the index names, in order, without those of every chain."""
    source = re.sub(r"\b(\w+)\b", lambda match: CONSTANTS.get(match[1], match[1]), "\n".join(body(function)))
    parts = [name for name in re.findall(r"\bpp\.(\w+)", source) if name in MADE_BY]
    functions = [name for name in re.findall(r"\bF\.(\w+)", source) if name != "masked_mean"]
    return list(dict.fromkeys(parts)), list(dict.fromkeys(functions))


CONSTANTS = {
    "UNCLIPPED": "pp.policy_loss(F.importance_weighted_surrogate)",
    "REINFORCE": "pp.policy_loss(F.policy_gradient_loss)",
    "GROUPS": "pp.tokens.group_advantage()",
    "CENTERED": "pp.tokens.group_advantage()",
    "tokens": "pp.segment_minibatches() pp.tokens.aggregate()",
    "phased": "pp.phases()",
    "distillation": "pp.Part()",
}
"""What the module defines for several functions, and the parts in it which are not in every chain."""
FACTORIES = [f for f in vars(pp).values() if inspect.isfunction(f) and inspect.signature(f).return_annotation == "Part"]
MADE_BY = {made.__name__: sum(case.make is made for case in CASES) for made in FACTORIES} | {"Part": 0}
"""Name of each part: how many settings of it are held to the laws."""
COMMON, OWN, NOTHING = {"chain", "identity"}, {"stateless", "Part"}, "those of plain PPO"


def linked(function: Callable[..., Any]) -> str:
    """The reference, linked to arXiv or to where else the paper is."""
    text = reference(function)
    found = ARXIV.search(text)
    authors, _, title = text.partition(", ")
    title = title.replace(f", {found[0]}", "") if found else title
    url = f"https://arxiv.org/abs/{found[1]}" if found else ELSEWHERE_ONLINE.get(function.__name__)
    return f"[{authors}]({url}), {title}" if url else f"{authors}, {title}"


def parts_of(function: Callable[..., Any]) -> str:
    """What the chain is made of besides the parts of every chain."""
    parts, functions = names(function)
    cells = [f"`{name}`" for name in parts if name not in COMMON] + [f"`F.{name}`" for name in functions]
    optimizers = re.findall(r"\b(optax(?:\.contrib)?\.(?!tree|Gradient)\w+)", source_of(function))
    return ", ".join(cells + [f"`{name}`" for name in dict.fromkeys(optimizers)]) or NOTHING


def laws_of(function: Callable[..., Any]) -> str:
    """Where the laws of these parts and functions are tested."""
    parts, functions = names(function)
    cells = [f"{name} ×{MADE_BY[name]}" for name in parts if MADE_BY[name] and name not in {*COMMON, *OWN}]
    cells += [f"[{name}](../tests/core/test_contract.py)" for name in parts if name in ELSEWHERE]
    for name in functions:
        files = [
            str(path.relative_to(ROOT / "tests"))
            for path in sorted((ROOT / "tests").rglob("test_*.py"))
            if mentions(path, name)
        ]
        cells += [f"[{name}](../tests/{file})" for file in files[:1]]
    own = OWN & set(parts) or re.search(r"^    def (?!evaluate|write|name)", source_of(function), re.MULTILINE)
    return ", ".join(cells + ["own code: traced only"] * bool(own)) or NOTHING


def mentions(path: Path, name: str) -> bool:
    """Whether a test of functions names one of them."""
    tested = path.stem.startswith("test_catalogue") or path.stem in ("test_functional", "test_gae_properties")
    return tested and re.search(rf"\b(f|F|functional)\.{name}\b", path.read_text()) is not None


def source_of(function: Callable[..., Any]) -> str:
    """The source without the docstring, as it stands on the page."""
    source = inspect.getsource(function)
    return source.replace(re.search(r'    """.*?"""\n+', source, re.DOTALL)[0], "", 1).rstrip()  # type: ignore[index]


def section(title: str, functions: tuple[Callable[..., Any], ...]) -> list[str]:
    """A table of the papers of a section, and their chains."""
    lines = [
        f"## {title}",
        "",
        "| chain | paper | what it changes | additional parts | laws |",
        "|---|---|---|---|---|",
    ]
    for f in functions:
        cells = (f"[`{f.__name__}`](#{f.__name__})", linked(f), change(f), parts_of(f), laws_of(f))
        lines.append(f"| {' | '.join(cells)} |")
    for f in functions:
        lines += ["", f"### `{f.__name__}`", "", "```python", source_of(f), "```"]
    return [*lines, ""]


def verdict(difference: dict[str, Any]) -> str:
    """What an interval of a difference says."""
    low, high = difference["95"]
    return "better" if low > 0 else "worse" if high < 0 else "no difference within the interval"


def comparison(path: Path) -> list[str]:
    """The table of one record."""
    record = json.loads(path.read_text())
    results, config = record["results"], record["results"]["config"]
    seeds, steps = results["seeds"], config["total_timesteps"]
    lines = [
        f"### {config['env_id']}, {steps:,} steps, seeds {seeds[0]} to {seeds[-1]}",
        "",
        "| chain | return over training | difference | after training | difference | over training; after it |",
        "|---|---|---|---|---|---|",
    ]
    for name, arm in results["arms"].items():
        cells, words = [], []
        for what in ("return_over_training", "evaluation_return"):
            found = arm[what]
            low, high = found["difference"]["95"]
            cells.append(f"{found['mean']:.1f} ({found['std']:.1f})")
            cells.append("" if name == "plain" else f"{found['difference']['mean']:+.1f} [{low:+.1f}, {high:+.1f}]")
            words.append(verdict(found["difference"]))
        said = "" if name == "plain" else words[0] if words[0] == words[1] else "; ".join(words)
        shown = name if name == "plain" else f"[`{name}`](#{name})"
        lines.append(f"| {shown} | {' | '.join(cells)} | {said} |")
    return [*lines, "", counted(results["arms"]), ""]


def counted(arms: dict[str, Any]) -> str:
    """How many chains of a record are better or worse than the plain one, and by which measure."""
    sentences = []
    for what, when in {"return_over_training": "Over training", "evaluation_return": "After training"}.items():
        found = [verdict(arm[what]["difference"]) for name, arm in arms.items() if name != "plain"]
        better, worse = found.count("better"), found.count("worse")
        sentences.append(
            f"{when}, {better} of {len(found)} chains are better than the plain one, and {worse} are worse."
        )
    return " ".join(sentences)


def shared() -> str:
    """The part of the module that all functions use, before the first section."""
    source = Path(index.__file__).read_text()
    start, end = source.index("from collections.abc"), source.index("\n\n# --- policy losses")
    return source[start:end].rstrip()


def page() -> str:
    """The whole page."""
    count = sum(map(len, index.SECTIONS.values()))
    records = sorted((ROOT / "benchmarks" / "results" / "papers").glob("*.json"))
    lines = [
        INTRODUCTION.format(count=count),
        "```python",
        shared(),
        "```",
        "",
    ]
    for title, functions in index.SECTIONS.items():
        lines += section(title, functions)
    lines += [COMPARISON] if records else []
    for path in records:
        lines += comparison(path)
    return "\n".join(lines).rstrip() + "\n"


INTRODUCTION = """# Papers

This page shows {count} papers about PPO and its components, each as a modification of one chain. The chains are the
functions of [benchmarks/paper_index.py](../benchmarks/paper_index.py), from which `python -m docs.papers` writes this
page. Each has at most twelve lines, and [the tests](../tests/docs/test_papers.py) trace an update of each.
Hyperparameters are those of the papers where these state them, and
otherwise ordinary values; none is tuned. If a chain implements only part of a paper's algorithm, its description says
so.

The column "laws" shows how many configurations of a part (such as ×2) are tested against the laws that every part obeys
([tests/registry.py](../tests/registry.py): jit equals eager, vmap equals a loop, masked steps have no effect, ...), and
where a function is compared with a reference in NumPy. Code that exists only on this page is traced, but not tested in
these ways.

Not included, because a chain cannot express them: TRPO and natural gradients, which need products with the Fisher
matrix; MCTS and search; environments that choose their levels; networks, such as GTrXL (see
[attention](variants/attention.md)); gSDE, which is an option of the policy and of the
[rollout](exploration.md#state-dependent-exploration-gsde).

## Shared code
"""

COMPARISON = """## Does it help?

These tables compare the plain chain with chains that work with the same policy. All use CleanRL's network, rollouts,
learning rate and optimizer (unless the paper changes it), and ten seeds each. "Return over training" is the mean return
of all episodes during training, and "after training" that of 100 new episodes per seed, with separate keys. Both are
means over seeds, with the standard deviation between seeds in parentheses. Differences have 95 % bootstrap intervals.
Of 50 such intervals, two or three exclude 0 by chance alone, so a single "better" or "worse" at the edge means little.
If both differences are exactly 0, the change never had an effect. The tasks are easy and the budgets small: the tables
show what a change does here, untuned, and not its value on the tasks for which it was designed.

The plain chain limits the change of a value to 0.2, in units of reward, as CleanRL does; this is little where returns
are near -100. On Acrobot, four chains whose value loss has no such clip reach much higher returns: `engstrom_2020`,
which changes nothing else, `andrychowicz_2021`, `huber_1964` and `flet_berliac_2021`.

    python -m benchmarks papers --task Acrobot-v1 --steps 100000
"""


if __name__ == "__main__":
    before = PAGE.read_text() if PAGE.exists() else ""
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE}: {'unchanged' if PAGE.read_text() == before else 'rewritten'}\n")
