"""The extensions of the pages: the chain explorer and the handwritten figures have the package's rules and numbers,
and the thumbnails of the gallery have a place, and show what the records contain.
"""

import functools
import itertools
import json
import random
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from docs._ext import explorer, thumbnails
from ppo_parts._core.wiring import check_every_write_has_an_effect
from tests import registry
from tests.docs.test_docs import ROOT

SCRIPT = ROOT / "docs" / "_static" / "site.js"


@functools.cache
def table():
    """Return what the page gets, after a round trip through JSON."""
    return json.loads(json.dumps(explorer.table(lambda text, display: text)))


def parts_of(names):
    return [table()["parts"][name] for name in names]


@functools.cache
def built(name):
    """Make the part that the text on the page makes."""
    part = table()["parts"][name]
    return evaluated("\n".join(["import ppo_parts as pp", *part["definitions"], f"part = {part['call']}"]), "part")


def evaluated(text, name):
    space = {}
    exec(text, space)
    return space[name]


def run_script(expression, given):
    """Evaluate an expression of `given` and of the functions in the site's script, which sees no document."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    code = f"((module, document) => {{ {SCRIPT.read_text()}; Object.assign(globalThis, module.exports) }})({{}});"
    code += f"const given = {json.dumps(given)}; JSON.stringify({expression})"
    done = subprocess.run(["node", "--print"], input=code, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_explorer_has_every_public_part():
    made = set(explorer.factories().values())
    assert {case.make for case in registry.CASES} - {pp.chain, pp.identity} <= made
    assert made == {getattr(pp, name) if "." not in name else eval(f"pp.{name}") for name in table()["parts"]}


def random_chains():
    """Yield random chains: any, some roughly in order, and some that differ little from an accepted one."""
    draw, names, base = random.Random(0), sorted(table()["parts"]), table()["measured"]["rows"][0]["chain"]
    order = {"first": 0, "before_sampler": 1, "anywhere": 2, "after_sampler": 3}
    for index in range(1000):
        chosen = draw.choices(names, k=draw.randint(1, 7))
        if index % 3 == 1:
            chosen.sort(key=lambda name: order[table()["parts"][name]["place"]] + draw.choice([0, 0, 0, 1.5]))
        if index % 3 == 2:
            extra, chosen = chosen[:2], draw.sample(base, 6) if draw.random() < 0.1 else list(base)
            for name in extra:
                chosen.insert(draw.randint(0, len(chosen)), name)
            chosen.pop(draw.randrange(len(chosen)))
        yield chosen


def message(make, *given):
    """Return the error that the package raises, if any."""
    try:
        make(*given)
    except pp.errors.UserValueError as error:
        return str(error)
    return None


@functools.cache
def judged():
    """Return random chains and the errors that the package raises."""
    return {tuple(names): message(pp.chain, *map(built, names)) for names in random_chains()}


def test_the_script_applies_the_rules_each_of_which_is_an_error_of_chain():
    errors = judged().values()
    assert sum(error is None for error in errors) > 200
    for rule in (rule["says"] for group in table()["rules"] for rule in group):
        pattern = re.sub(r"\\{\w+\\}", ".+", re.escape(rule))
        assert any(error and re.fullmatch(pattern, error) for error in errors), rule
    given = {"rules": table()["rules"], "chains": [parts_of(names) for names in judged()]}
    assert run_script("given.chains.map((parts) => chainError(given.rules, parts))", given) == list(judged().values())


def random_declarations():
    """Yield a sampler and parts that declare a few random fields, for which each rule of `learner` often matters."""
    draw, fields = random.Random(1), ("value", "value", "value", "mask", "weight", "extras", "extras.own")
    for _ in range(1000):
        parts = [explorer.stub("sampler", divides=True, reads=())]
        for name in "abcd":
            chosen = (draw.choices(fields, k=draw.randint(0, 2)) for _ in range(3))
            requires, provides, reads = (tuple(dict.fromkeys(each)) for each in chosen)
            provides = draw.choice([provides, ("losses",)])
            reads = draw.choices([reads, None], [9, 1])[0]
            declared = {"requires": requires, "provides": provides, "reads": reads}
            parts.append(explorer.stub(name, **declared, policy_loss=draw.choice([True, False, None])))
        yield parts


def test_the_script_knows_what_learner_refuses():
    def make(parts):
        return pp.learner(lambda params, batch: None, pp.chain(*parts), optax.sgd(0.1))

    chains = [names for names, error in judged().items() if error is None and "phases" not in names]
    expected = [message(make, map(built, names)) for names in chains]
    assert sum(error is None for error in expected) > 50
    assert any("has no sampler" in (error or "") for error in expected)
    stubs = list(random_declarations())
    expected += [message(check_every_write_has_an_effect, (), [parts]) for parts in stubs]
    declared = [*map(parts_of, chains), *([explorer.declarations(part) for part in parts] for parts in stubs)]
    given = {"says": table()["learner"], "chains": declared}
    assert run_script("given.chains.map((parts) => learnerError(given.says, parts))", given) == expected


def test_the_text_makes_the_chain_that_is_shown_and_a_part_is_put_where_it_raises_no_error():
    chains = [row["chain"] for row in table()["measured"]["rows"]] + [[name] for name in table()["parts"]]
    texts = run_script("given.map(pythonText)", [parts_of(names) for names in chains])
    for text, names in zip(texts, chains, strict=True):
        assert repr(evaluated(text, "pipeline")) == repr(pp.chain(*map(built, names)))
    base = table()["measured"]["rows"][0]["chain"]
    for name, place in {"entropy_bonus": 6, "advantage_normalize": 3, "vtrace": 1, "tokens.reward_to_go": 1}.items():
        given = {"table": table(), "parts": parts_of(base), "part": table()["parts"][name]}
        assert run_script("placeFor(given.table, given.parts, given.part)", given) == place


def test_the_clip_by_hand_is_that_of_functional():
    grid = np.array(np.meshgrid(np.linspace(0.05, 2.5, 30), [-2, -0.7, 0, 1, 1.6], [0.05, 0.2, 0.5])).reshape(3, -1)
    found = run_script("given.map((x) => clippedSurrogate(...x))", grid.T.tolist())
    with jax.enable_x64(True):
        log_ratio, advantage, clip_eps = jnp.log(grid[0]), jnp.asarray(grid[1]), jnp.asarray(grid[2])
        loss = functools.partial(pp.functional.clipped_surrogate, advantage=advantage, clip_eps=clip_eps)
        expected, gradient = jax.device_get((loss(log_ratio), jax.grad(lambda x: loss(x).sum())(log_ratio)))
    np.testing.assert_allclose([x["loss"] for x in found], expected, atol=1e-6)
    np.testing.assert_allclose([x["gradient"] for x in found], gradient, atol=1e-6)
    assert 50 < np.sum(gradient == 0) < 300


@pytest.mark.parametrize("by_time_limit", [False, True])
def test_gae_by_hand_is_that_of_functional(by_time_limit):
    settings = list(itertools.product((0, 0.9, 1), (0, 0.95, 1), (-1, 0, 4, 7)))  # gamma, lambda, end
    given = {"settings": settings, "byTimeLimit": by_time_limit}
    sequences = "given.settings.map(([gamma, gaeLambda, end]) => [sequence(end, given.byTimeLimit), gamma, gaeLambda])"
    found = run_script(f"{sequences}.map((x) => ({{...x[0], ...gae(...x)}}))", given)
    names = ("reward", "value", "nextValue", "terminated", "truncated")
    with jax.enable_x64(True):
        inputs = [np.array([x[name] for x in found], float).T for name in names]
        gamma, gae_lambda, _ = np.array(settings, float).T
        expected = jax.device_get(pp.functional.gae(*inputs, gamma=gamma, gae_lambda=gae_lambda))
    assert inputs[3 + by_time_limit].sum() == 27
    for name in ("advantage", "target"):
        np.testing.assert_allclose(np.transpose([x[name] for x in found]), getattr(expected, name), atol=1e-6)


def places(text):
    """Return the headings of a page, and the first cells of its tables, without links."""
    found = re.findall(r"^(?:## |\| )(.*?)(?: \|.*)?$", text, re.MULTILINE)
    return {re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", each) for each in found}


WITHOUT = {"docs/gallery/README": {"TIS, IcePop", "SimPLe", "PFSP", "HAPPO"}}
WITHOUT["docs/tokens"] = {"GAE over the tokens of the policy"}


@pytest.mark.parametrize("page", thumbnails.DRAWN)
def test_each_thumbnail_belongs_to_a_row(page):
    text, drawn = (ROOT / f"{page}.md").read_text(), set(thumbnails.DRAWN[page])
    assert drawn <= places(text)
    rows = re.findall(r"^\| \[?([^`|-].*?)(?:]\(.*?\)(.*?))? \|", text, re.MULTILINE)
    names = {first + rest for first, rest in rows} - {"name", "what", "here"}
    assert page not in WITHOUT or names - drawn == WITHOUT[page]


def test_a_thumbnail_draws_one_dot_per_seed():
    drawn = thumbnails.strip("a task", 4 * [1.0, 3.0], 4 * [0.0, 4.0])
    assert re.findall(r'circle class="(\w+)" cx="([\d.]+)"', drawn) == [
        *4 * [("mine", "31.5"), ("mine", "88.5")], *4 * [("other", "3.0"), ("other", "117.0")],
    ]  # fmt: skip
    wide = thumbnails.strip("a task", [1.0, 3.0], [0.0, 4.0])  # it includes intervals that are wider than the seeds
    assert re.findall(r'"other" d="M([\d.]+) [\d.]+H([\d.]+)M', wide) == [("3.0", "117.0")]
    assert "mean 2.0; below it plain PPO, mean 2.0" in drawn
