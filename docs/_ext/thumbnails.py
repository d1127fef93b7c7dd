"""Thumbnails of the gallery, which draw the benchmark records of each variant in the colors of the page."""

from __future__ import annotations

import collections
import functools
import html
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import _tables
from benchmarks._figures import compute_band
from benchmarks._records import ROOT

WIDTH, HEIGHT, MARGIN = 120, 44, 3
records = functools.cache(_tables.read_records)


def study(arm: str, task: str = "breakout") -> str:
    """Draw the return over the training of each seed of an arm of the study, above those of the plain arm."""
    results = records("study")[task]["results"]
    seeds = (results["arms"][name]["return_over_training"]["per_seed"] for name in (arm, "plain"))
    return strip(results["config"]["env_id"], *seeds, what="return over training")


def choice(variant: str) -> str:
    """Draw the evaluations of a choice of a library on HalfCheetah; those without any choice are dashed."""
    found = [
        records("differences")[f"HalfCheetah-v5_300000_{name}_1"]["results"]["curve"] for name in (variant, "none")
    ]
    return curve("HalfCheetah-v5", "return", *(np.array([row["evaluation"] for row in rows]) for rows in found))


def learned(name: str, *without: str) -> str:
    """Draw the learning curve of a record, with or without that of a run without the variant, dashed."""
    found = [records("learning")[each]["results"] for each in (name, *without)]
    curves = (np.array(result["curve"]["mean_return_per_seed"], float).T for result in found)
    return curve(found[0]["config"]["env_id"], "return", *curves)


def variant(name: str, *without: str) -> str:
    """Draw a learning curve of the gallery with a dashed one: that of the record it names, or of the given one."""
    result = records("gallery")[name]["results"]
    others = [each for each in (*without, result["without"]) if each][:1]
    curves = (np.array(records("gallery")[each]["results"]["curve"], float) for each in (name, *others))
    what = result["measure"].replace("episode_", "")
    return curve(result["task"], what, *curves, named=" ".join(others).partition(",")[0])


def tokens(name: str) -> str:
    """Draw the score of a token chain's answers, with that of GRPO dashed."""
    found = [next(iter(records("tokens")[each]["results"].values())) for each in dict.fromkeys((name, "grpo"))]
    curves = (np.array(result["every_tenth_score"]).T for result in found)
    return curve("sorting digits", "score", *curves, named="GRPO")


def population(task: str = "acrobot_101") -> str:
    """Draw the return of the best member of each population, above that of as many random settings."""
    result = records("population")[task]["results"]
    seeds = (result["arms"][name]["per_seed"] for name in ("population", "random search"))
    return strip(result["config"]["env_id"], *seeds, named="a random search")


def kuhn() -> str:
    """Draw the exploitability of both arms of Kuhn poker: the mirror step and, dashed, the clip."""
    arms = records("kuhn")["kuhn"]["results"]["arms"]
    curves = (np.array([row["exploitability"] for row in arm["curve"]]) for arm in arms)
    return curve("Kuhn poker", "exploitability", *curves, named="the clip")


def maze(arm: str) -> str:
    """Draw the return in held-out mazes of each seed, above that of each seed that learned in random mazes."""
    arms = records("levels")["maze_1"]["results"]["arms"]
    return strip("mazes", *(arms[name]["held_out"]["per_seed"] for name in (arm, "uniform")))


GSDE = "gsde_mountain_car_continuous"
ROWS = {
    "REINFORCE": "REINFORCE, A2C", "Muon": "Muon (PufferLib)", "a flat minimum": "a flat minimum (SAM)",
    "several minibatches": "several minibatches per step", "non-finite gradients": "non-finite gradients skipped",
    "dormant units": "dormant units reset, with their moments", "TRPO": "natural gradients (TRPO)",
}  # fmt: skip
"""Record names that are the beginning of the name of a gallery row."""
TOKENS = {
    "GPG, REINFORCE": "gpg", "CISPO": "cispo", "SAPO": "sapo", "GSPO": "gspo", "GSPO-token": "gspo_token",
    "GMPO": "gmpo", "Clip-Cov": "clip_cov", "KL-Cov": "kl_cov", "any loss per sequence": "gspo", "GRPO": "grpo",
    "Dr.GRPO": "drgrpo", "RLOO": "rloo", "OPO": "opo", "ReMax": "remax", "Lite PPO": "lite_ppo",
    "REINFORCE++": "reinforce", "REINFORCE++ baseline": "reinforce_baseline", "token mean": "dapo",
    "sequence mean of means": "grpo", "sequence mean of sums": "rloo", "sum over a constant": "drgrpo",
}  # fmt: skip
"""Records of the rows on the tokens page; rows that name no algorithm show one that does what they say."""
COMPARED = {result["results"]["without"] for result in records("gallery").values()} | {
    "squared error", "λ = 1", "Adam alone"
}  # fmt: skip
DRAWN: dict[str, dict[str, Callable[[], str]]] = {
    "docs/gallery/README": {
        **{
            ROWS.get(name, name): functools.partial(variant, name)
            for name in records("gallery")
            if name not in COMPARED
        },
        "PPO": functools.partial(learned, "cartpole"),
        "GAE": functools.partial(variant, "PPO", "λ = 1"),
        "clipped": functools.partial(variant, "PPO", "squared error"),
        "gradient clipping, Adam's ε, annealing with the updates": functools.partial(variant, "PPO", "Adam alone"),
        "self-play": kuhn,
        "a population that searches its hyperparameters": population,
        "entropy bonus": functools.partial(choice, "entropy_0.01"),
        "V-trace": functools.partial(study, "refresh + V-trace"),
        "normalization": functools.partial(choice, "rollout_normalize"),
        "refreshed advantages": functools.partial(choice, "refresh_epoch"),
        "KL early stop": functools.partial(choice, "early_stop"),
        "squared error": functools.partial(choice, "value_unclipped"),
        "value normalization": functools.partial(choice, "value_normalize"),
        "RND": functools.partial(learned, "rnd_deep_sea", "rnd_deep_sea_rnd_False"),
        "gSDE": functools.partial(learned, GSDE, f"{GSDE}_noise_steps_None"),
        "PLR": functools.partial(maze, "PLR"),
        "ACCEL": functools.partial(maze, "ACCEL"),
        "bounds loss": functools.partial(choice, "bounds_loss"),
        "IPPO and MAPPO": functools.partial(learned, "ippo_spread"),
        "a clip for each network": functools.partial(choice, "separate_norms"),
        "a rate that follows the divergence": functools.partial(choice, "adaptive_rate"),
    },
    "docs/tokens": {name: functools.partial(tokens, record) for name, record in TOKENS.items()},
    "docs/gallery/losses": {
        "clip-higher (Yu et al. 2025)": functools.partial(variant, "clip-higher"),
        "dual clip (Ye et al. 2020)": functools.partial(variant, "dual clip"),
        "SPO (Xie et al. 2024)": functools.partial(variant, "SPO"),
    },
    "docs/gallery/measured": {
        name: functools.partial(variant, name)
        for name, record in records("gallery").items()
        if record["results"]["without"] not in (None, name)
    },
    "docs/gallery/regularizers": {"Gaussian policies for robots": functools.partial(choice, "bounds_loss")},
    "docs/gallery/self_play": {"Poker": kuhn},
}
"""For each page, the first cells of the rows, and the headings of the cards, that have records."""


def add_cards() -> None:
    """Give the cards on their pages the thumbnails of the rows that link to them, if only one row does."""
    folder = ROOT / "docs/gallery"
    links = re.findall(r"^\| \[(.*?)]\((\w+)\.md#([\w-]+)\)(.*?) \|", (folder / "README.md").read_text(), re.MULTILINE)
    counts = collections.Counter(link[1:3] for link in links)
    for name, page, anchor, rest in links:
        for heading in re.findall(r"^## (.*)", (folder / f"{page}.md").read_text(), re.MULTILINE):
            drawn = DRAWN["docs/gallery/README"].get(name + rest)
            slug = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")  # as GitHub does it
            if drawn and counts[page, anchor] == 1 and slug == anchor:
                DRAWN.setdefault(f"docs/gallery/{page}", {})[heading] = drawn


add_cards()


def drawn(label: str, *shapes: str) -> str:
    """Return a drawing with a label that says in words what it shows."""
    return (
        f'<svg class="thumbnail" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" aria-label="{html.escape(label)}">'
        f"<title>{html.escape(label)}</title>{''.join(shapes)}</svg>"
    )


def scale(values: Any, size: float) -> Callable[[Any], Any]:
    """Return a function that maps the values' range to a side of the drawing, without its margins."""
    low, high = np.nanmin(values), np.nanmax(values)
    return lambda x: np.round(MARGIN + (np.asarray(x) - low) / (high - low or 1) * (size - 2 * MARGIN), 1)


def strip(
    task: str, mine: list[float], plain: list[float], what: str = "return after training", named: str = "plain PPO"
) -> str:
    """Draw a row of dots for each chain, with the mean and its 95 % interval, from left (low) to right."""
    bands = [[float(end[0]) for end in compute_band(np.array([values]))] for values in (mine, plain)]
    x = scale([*mine, *plain, *bands[0], *bands[1]], WIDTH)
    shapes = []
    for values, (low, high), share, name in zip((mine, plain), bands, (0.25, 0.75), ("mine", "other"), strict=True):
        middle = HEIGHT * share
        shapes.append(f'<path class="{name}" d="M{x(low)} {middle}H{x(high)}M{x(np.mean(values))} {middle - 7}v14"/>')
        shapes += [f'<circle class="{name}" cx="{x(value)}" cy="{middle}" r="2"/>' for value in values]
    means = f"mean {np.mean(mine):.1f}; below it {named}, mean {np.mean(plain):.1f}"
    return drawn(f"{task}, {what} of {len(mine)} seeds: {means}", *shapes)


def curve(task: str, what: str, mine: Any, other: Any = None, named: str = "without it") -> str:
    """Draw the mean over seeds of `[points, seeds]` with its 95 % interval, and perhaps another mean, dashed."""
    both = [each for each in (mine, other) if each is not None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # there is nothing to draw before the first episode ends
        means, (low, high) = [np.nanmean(each, axis=1) for each in both], compute_band(mine)
    upward = scale(np.concatenate([low, high, *means]), HEIGHT)

    def points(values: Any) -> list[str]:
        kept = np.unique(np.linspace(0, len(values) - 1, min(40, len(values))).round().astype(int))
        x = scale([0, len(values) - 1], WIDTH)(kept)
        return [f"{a},{b}" for a, b in zip(x, HEIGHT - upward(values[kept]), strict=True) if not np.isnan(b)]

    outline = " ".join([*points(high), *points(low)[::-1]])
    shapes = [f'<polygon points="{outline}"/>']
    for name, mean in zip(("mine", "other"), means, strict=False):
        shapes.append(f'<polyline class="{name}" points="{" ".join(points(mean))}"/>')
    last = f"; dashed, {named}, ".join(f"{mean[-1]:.4g}" for mean in means)
    return drawn(f"{task}, {what} while training, mean of {mine.shape[1]} seeds, at the end {last}", *shapes)
