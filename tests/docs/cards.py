"""The cards of docs/gallery: their very code, and what a loop written by hand needs to be compared with it.

The loops are plain JAX in float64: explicit losses, `jax.grad` and gradient descent. Nothing of the package is in them.
"""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ppo_parts as pp
from tests import reference
from tests.common import SEGMENTS, TIME, make_params, rollout
from tests.docs.test_docs import ROOT, blocks

KEY, RATE = jax.random.key(0), 0.3
MINIBATCHES = np.random.default_rng(3).permutation(TIME * SEGMENTS).reshape(2, -1)


def card(page, heading, number=None):
    """What the code of a card defines, after that of the top of its page; or the first blocks of the card."""
    path = ROOT / "docs" / "gallery" / f"{page}.md"
    headings = [(i, line) for i, line in enumerate(path.read_text().splitlines()) if re.match("## ", line)]
    [start] = [i for i, line in headings if line == f"## {heading}"]
    end = min((i for i, _ in headings if i > start), default=1e9)
    module, found = types.ModuleType(page), blocks(path)
    top = [source for source, _, line in found if line < headings[0][0]]
    for source in top + [source for source, _, line in found if start < line < end][:number]:
        exec(source, vars(module))
    return module


def given(pipeline, axis="step", indices=MINIBATCHES):
    """The chain of a card with minibatches that the loop by hand can have, too."""
    known = pp.given_indices(indices, axis)
    return pp.chain(*(known if isinstance(part, type(known)) else part for part in pipeline.parts))


def train(pipeline, params, batches, evaluate, optimizer=None):
    """One update for each batch: the last state and all metrics."""
    learner = pp.learner(evaluate, pipeline, optimizer or optax.sgd(RATE))
    state, update, metrics = learner.init(params, KEY), jax.jit(learner.update), []
    for batch in batches:
        state, measured = update(KEY, state, batch)
        metrics.append(measured)
    return state, metrics


def assert_equal(actual, expected):
    """To 1e-6, and much closer where nothing but the order of sums differs."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == jnp.float64
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


def double(seed=0, **options):
    return rollout(seed, dtype=jnp.float64, **options)


def linear_params(seed=0):
    return make_params(seed, jnp.float64)


def normal(shapes, seed, scale=1.0):
    """Parameters of these shapes, in double precision."""
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(scale * rng.normal(size=shape)) for name, shape in shapes.items()}


def data_of(batch, **more):
    """A rollout as plain arrays `[T * N, ...]`."""
    fields = ("obs", "action", "log_prob", "value", "reward", "mask")
    data = {name: getattr(batch, name) for name in fields} | more
    if batch.mask is None:
        data["mask"] = jnp.ones(batch.log_prob.shape)
    return {name: jnp.asarray(x).reshape(-1, *np.shape(x)[2:]) for name, x in data.items()}


def gae_of(batch, gamma=0.99, gae_lambda=0.95, **other):
    fields = {name: getattr(batch, name) for name in ("reward", "value", "next_value", "terminated", "truncated")}
    return reference.gae(**{**fields, **other}, mask=batch.mask, gamma=gamma, gae_lambda=gae_lambda)


def estimated(batch, gamma=0.99, gae_lambda=0.95, **more):
    """The same with the advantages and targets of the reference."""
    advantage, target = gae_of(batch, gamma, gae_lambda)
    return data_of(batch, **{"advantage": advantage, "target": target, **more})


def mean(x, mask):
    return jnp.sum(x * mask) / jnp.sum(mask)


def normalized(advantage, mask):
    centred = advantage - mean(advantage, mask)
    return centred / (jnp.sqrt(mean(centred**2, mask)) + 1e-8)


def log_probs(logits):
    return logits - jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)


def chosen(logits, action):
    return jnp.take_along_axis(log_probs(logits), action[..., None], axis=-1)[..., 0]


def entropy_of(logits):
    return -jnp.sum(jnp.exp(log_probs(logits)) * log_probs(logits), axis=-1)


def clipped(ratio, advantage, low=0.2, high=0.2):
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)


def unclipped(ratio, advantage):
    return -ratio * advantage


@functools.cache
def step_of(loss):
    """A step of gradient descent, which is compiled once for all descents of a loss."""
    return jax.jit(
        lambda params, rate, *data: jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params, *data))
    )


def descend(loss, params, minibatches, rate=RATE):
    """Gradient descent, one step for each minibatch; what differs between descents has to be data of the loss."""
    for data in minibatches:
        params = step_of(loss)(params, rate, *data)
    return params


def cut(data, minibatches=MINIBATCHES):
    return [({name: x[rows] for name, x in data.items()},) for rows in minibatches]


def categorical(params, batch):
    return pp.distributions.Categorical(batch.obs @ params["policy"]), batch.obs @ params["value"]


def linear(params, obs):
    return obs @ params["policy"], obs @ params["value"]


def kl_of(first, second):
    """The divergence of two categorical distributions, from their logits."""
    return jnp.sum(jnp.exp(log_probs(first)) * (log_probs(first) - log_probs(second)), axis=-1)


def ratio_of(logits, d):
    return jnp.exp(chosen(logits, d["action"]) - d["log_prob"])


def ppo(logits, value, d, entropy=0.01, critic=0.25, surrogate=clipped, normalize=True):
    """What PPO's three losses sum to, of each element."""
    advantage = normalized(d["advantage"], d["mask"]) if normalize else d["advantage"]
    policy = surrogate(ratio_of(logits, d), advantage) - entropy * entropy_of(logits)
    return policy + critic * (value - d["target"]) ** 2


def in_double(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
