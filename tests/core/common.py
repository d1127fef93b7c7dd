"""Helpers for tests of the core: updates of a fresh learner, custom parts, and a policy with two entries."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import ppo_parts as pp
from tests.common import SEGMENTS, TIME, Categorical, evaluate, make_params, rollout

KEY = jax.random.key(0)
GAE = pp.gae(gamma=0.9, gae_lambda=0.8)
SURROGATE, VALUE = pp.clipped_surrogate(clip_eps=0.2), pp.value_loss()
ROWS = jnp.arange(TIME * SEGMENTS).reshape(TIME, SEGMENTS)
"""The number t*N + n of each step."""


def run(pipeline, *batches, optimizer=None, params=None, policy=evaluate, **options):
    """Update a fresh learner once for each rollout; return the last state, and the metrics of each update."""
    learner = pp.learner(policy, pipeline, optimizer or optax.sgd(0.1), **options)
    state, update = learner.init(make_params() if params is None else params, KEY), jax.jit(learner.update)
    metrics = []
    for batch in batches or [rollout()]:
        state, measured = update(KEY, state, batch)
        metrics.append(measured)
    return (state, *metrics)


def part(update=lambda batch, state, context: (batch, state), name="part", state: Any = (), **attributes):
    """Make a part with a first state; without a function, it does nothing."""
    return pp.Part(attributes.pop("init", lambda params, key: state), update, name, **attributes)


def probe(name, look):
    """Make a part that adds the metric `name`, which is `look(batch, context)`."""
    return pp.stateless(lambda batch, context: batch.add_metrics(**{name: look(batch, context)}), name="probe")


def recorder(*shape):
    """Make a part that keeps `extras["row"]` and the weight of each minibatch, `[minibatches, ...]` (-1: no row)."""

    def update(batch, state, context):
        rows, weights, count = state
        weights = weights if batch.weight is None else weights.at[count].set(batch.weight)
        return batch, (rows.at[count].set(batch.extras["row"]), weights, count + 1)

    state = jnp.full(shape, -1), jnp.zeros((shape[0], shape[-1])), jnp.int32(0)
    return part(update, "recorder", state, place="after_sampler")


def both(params, batch):
    """Evaluate an actor and a critic whose parameters are separate entries."""
    return Categorical(batch.obs @ params["actor"]["policy"]), batch.obs @ params["critic"]["value"]


def without_critic(params, batch):
    return pp.Output(evaluate(params, batch)[0])


def two_entries():
    params = make_params()
    return {"actor": {"policy": params["policy"]}, "critic": {"value": params["value"]}}
