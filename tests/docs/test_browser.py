"""The built site in a browser: pages load by themselves, fit on a phone, work by keyboard, and are found by search.

The tests are skipped without a site, a browser or playwright; `.ci/run` builds the site and then runs them.
"""

import re
import shutil
from urllib.parse import quote

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from docs._ext.thumbnails import DRAWN
from ppo_parts import envs, networks
from tests.docs.test_docs import ROOT

playwright = pytest.importorskip("playwright.sync_api")
SITE = ROOT / "build" / "site"
INSIDE = (SITE.as_uri() + "/", "data:")
PAGES = ("README", "docs/explorer", "docs/by-hand", "docs/play", "docs/gallery/README", "docs/results")
PAGES += tuple(f"docs/generated/ppo_parts.{name}.html" for name in ("Learner", "functional.importance_sampling_weight"))
QUESTIONS = {  # each question, and the page that answers it
    "how do I resume a run": "docs/training",
    "migrate from CleanRL": "docs/coming-from",
    "KL early stop": "docs/generated/ppo_parts.kl_early_stop",
    "Weights & Biases": "docs/see",
    "NaN loss": "docs/diagnosis",
}


@pytest.fixture(scope="module")
def browser():
    """Open a page as wide as a phone; `complaints` has errors, and requests for anything outside the site."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no browser is installed")
    home = SITE / "README.html"
    sources = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".py", ".js", ".css")]
    sources = [ROOT / "README.md", *(path for path in sources if "generated" not in path.parts)]
    if not home.exists() or home.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        pytest.skip("build/site is missing or older than a page: run .ci/site first")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = launched.new_page(viewport={"width": 360, "height": 800}, is_mobile=True)
        page.complaints = []
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("console", lambda said: page.complaints.append(said.text) if said.type in ("error", "assert") else None)
        page.on("request", lambda x: None if x.url.startswith(INSIDE) else page.complaints.append(x.url))
        yield page


@pytest.fixture
def open_page(browser):
    """Return a function that goes to a page of the site; no page may complain."""

    def go_to(name):
        browser.goto((SITE / name).with_suffix(".html").as_uri())
        return browser

    browser.complaints.clear()
    yield go_to
    assert browser.complaints == []


TOO_WIDE = """
(() => {
  const scrolls = (each) => /auto|scroll/.test(getComputedStyle(each).overflowX);
  const isWhole = (each) => !each || each.matches("article, body > *");  // the theme lets it scroll, but it should not
  const inScroller = (each) => !isWhole(each) && (scrolls(each) || inScroller(each.parentElement));
  return [...document.querySelectorAll("body *")].filter((each) => {
    const { left, right, width } = each.getBoundingClientRect();
    return width && left < innerWidth && right > innerWidth + 1 && each.checkVisibility() && !inScroller(each);
  }).map((each) => each.outerHTML.slice(0, 200));
})()
"""


@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_by_itself_and_fits_on_a_phone(open_page, page):
    browser = open_page(page)
    assert browser.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [360, 360]
    assert browser.evaluate(TOO_WIDE) == []


def test_formulas_are_read_as_in_tex_and_the_gallery_shows_the_rows_that_are_sought(open_page):
    browser = open_page("docs/generated/ppo_parts.regularizers.smoothness_loss.html")
    assert browser.locator("mover").count() == 2
    assert browser.locator("munderover > mi:first-child").count() == 0  # the index belongs beside an accented letter
    browser = open_page("docs/generated/ppo_parts.distributions.Normal.html")
    assert set(browser.locator("mfrac > mn").all_text_contents()) == {"1", "2"}
    browser = open_page("docs/gallery/README")
    assert browser.locator("svg.thumbnail").count() == len(DRAWN["docs/gallery/README"])
    assert "12" not in browser.locator("mfrac > mn:first-child").all_text_contents()  # \frac12 is one half
    browser.fill("#interactive-filter input", "gaussian critic_loss")
    assert browser.locator("tbody tr:visible td:first-child").all_inner_texts() == ["HL-Gauss"]


def test_the_explorer_works_with_the_keyboard(open_page):
    browser = open_page("docs/explorer")
    browser.evaluate('document.querySelector("#explorer-part").value = "vtrace"')
    browser.focus("#explorer-part")
    browser.keyboard.press("Tab")
    browser.keyboard.press("Enter")  # this button adds the part where that raises no error: after gae
    names = '[...document.querySelectorAll(".chain a")].map((each) => each.textContent)'
    before = browser.evaluate(names)
    assert before[:3] == ["gae", "vtrace", "shuffled_minibatches"]
    assert "chain accepts" in browser.text_content("[role=status]")
    browser.focus("[aria-label='Move down vtrace']")
    browser.keyboard.press("Enter")
    assert browser.evaluate(names) == [before[0], before[2], before[1], *before[3:]]
    with pytest.raises(ValueError) as error:
        pp.chain(pp.gae(gamma=1, gae_lambda=1), pp.shuffled_minibatches(4), pp.vtrace(gamma=1))
    assert str(error.value) in browser.text_content("[role=status]")
    assert browser.evaluate("document.activeElement.ariaLabel") == "Move down vtrace"


def test_the_figures_follow_their_sliders(open_page):
    browser = open_page("docs/by-hand")
    loss = playwright.expect(browser.locator("#interactive-clip [role=status]"))  # it waits until the figure is drawn
    loss.to_have_text("Loss -1.200, gradient with respect to log π(a) 0.000 (clipped).")
    browser.focus("[aria-label='advantage A']")
    browser.keyboard.press("Home")
    loss.to_have_text("Loss 2.800, gradient with respect to log π(a) 2.800.")


BOUNDS = {"CartPole-v1": [2, 2, 0.2, 2], "MountainCar-v0": [0.6, 0.07], "Breakout-MinAtar": [1] * 400}
STATES = {"CartPole-v1": ("x", "x_dot", "theta", "theta_dot"), "MountainCar-v0": ("position", "velocity")}


def test_agents_act_and_move_as_in_python(open_page):
    """In 20 states and at every checkpoint, compare the probabilities of actions, and the next state."""
    browser = open_page("docs/play")
    agents, random = browser.evaluate("agentsTable.map(({ frames, ...agent }) => agent)"), np.random.default_rng(0)
    assert [agent["env"] for agent in agents] == [*BOUNDS, "HalfCheetah-v5"]
    assert browser.locator(".agent").count() == len(agents)
    for number, agent in enumerate(agents[:-1]):
        env = envs.make(agent["env"])
        policy = networks.actor_critic(env, (16, 16), "tanh")
        params = policy.init(jax.random.key(0))
        states = np.float32(random.uniform(-1, 1, (20, len(BOUNDS[agent["env"]]))) * BOUNDS[agent["env"]])
        in_page = f"const [a, states] = [agentsTable[{number}], {states.tolist()}];"
        logits = browser.evaluate(f"{{{in_page} a.policies.map((p) => states.map((s) => perceptron(p, s)))}}")
        for layers, seen in zip(agent["policies"], logits, strict=True):
            for name, layer in zip(("Dense_0", "Dense_1", "Dense_2"), layers, strict=True):
                *kernel, bias = layer
                params["params"][name] = {"kernel": np.float32(kernel), "bias": np.float32(bias)}
            obs = states.reshape(20, *env.observation_space.shape)
            expected = policy.evaluate(params, pp.Batch(obs=jnp.asarray(obs))).distribution.logits
            np.testing.assert_allclose(jax.nn.softmax(np.array(seen)), jax.nn.softmax(expected), rtol=0, atol=1e-6)
        if (names := STATES.get(agent["env"])) is None:
            continue
        task, settings = gymnax.make(agent["env"])
        _, start = task.reset_env(jax.random.key(0), settings)
        steps = f"{{{in_page} states.map((s, i) => ENVIRONMENTS[a.env].step(s, i % 2))}}"
        for i, (state, moved) in enumerate(zip(states, browser.evaluate(steps), strict=True)):
            start = start.replace(**dict(zip(names, state, strict=True)))
            after, *_ = task.step_env(jax.random.key(0), start, i % 2, settings)
            np.testing.assert_allclose(moved, after, rtol=0, atol=1e-6)
    for number in (1, len(agents)):
        browser.locator(".interactive button").nth(number - 1).press("Enter")
        # Each step is shown only for a moment, so a step could be missed.
        clock = browser.locator("#interactive-agents > p").nth(number - 1)
        playwright.expect(clock).to_contain_text(re.compile(r"step ([3-9]|[1-9]\d+) "))
    assert browser.locator(".limb").count() == 8


def test_breakout_goes_on_as_in_python(open_page):
    """Compare observations and ends of 1,000 steps in several episodes, where the paddle mostly follows the ball."""
    task, settings = gymnax.make("Breakout-MinAtar")
    browser = open_page("docs/play")

    def step(state, key):
        to_ball = jnp.sign(jnp.clip(state.ball_x + jnp.array([-1, 1, 1, -1])[state.ball_dir], 0, 9) - state.pos)
        action = jnp.where(jax.random.bernoulli(key, 0.05), jax.random.randint(key, (), 0, 3), to_ball % 3)
        action = jnp.array([0, 2, 1])[action]  # 0 stays, 1 goes to the right, 2 to the left
        obs, after, _, done, _ = task.step_env(key, state, action, settings)
        _, first = task.reset_env(key, settings)
        return jax.tree.map(lambda x, y: jnp.where(done, x, y), first, after), (action, obs.ravel(), done, first.ball_x)

    _, start = task.reset_env(jax.random.key(0), settings)
    play, keys = jax.jit(lambda keys: jax.lax.scan(step, start, keys)[1]), jax.random.split(jax.random.key(1), 1000)
    actions, observed, over, places = play(keys)
    assert 3 < over.sum() < 50
    seen = browser.evaluate(f"""{{
      const {{ start, step, over, observe }} = ENVIRONMENTS["Breakout-MinAtar"];
      const startAt = (x) => ({{ ...start(), x, dx: x ? -1 : 1, trail: 30 + x }});
      let state = startAt({int(start.ball_x)});
      {actions.tolist()}.map((action, i) => {{
        state = step(state, action);
        const seen = [observe(state).flatMap((on, j) => on ? [j] : []), over(state)];
        if (over(state)) state = startAt({places.tolist()}[i]);
        return seen;
      }});
    }}""")
    for (cells, ended), obs, done in zip(seen, observed, over, strict=True):
        assert (cells, ended) == (np.flatnonzero(obs).tolist(), bool(done))


def test_search_finds_the_page_that_answers(browser):
    missed = {}
    for question, page in QUESTIONS.items():
        browser.goto((SITE / "search.html").as_uri() + f"?q={quote(question)}")
        browser.wait_for_function("Search.status?.textContent")
        links = browser.evaluate('[...document.querySelectorAll("#search-results li a")].map((each) => each.pathname)')
        found = [path.removeprefix(f"{SITE}/").removesuffix(".html") for path in links[:3]]
        if page not in found:
            missed[question] = found
    assert missed == {}
