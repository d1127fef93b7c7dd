"""What the tests of parts share."""

import jax

import ppo_parts as pp
from tests.common import evaluate, make_params


def applied(part, batch, policy=evaluate, params=None, state=None):
    """The part after a sampler: the batch, and the state."""
    params = make_params() if params is None else params
    distribution, value = policy(params, batch)
    current = pp.Current(distribution, distribution.log_prob(batch.action), value)
    context = pp.Context(key=jax.random.key(0), params=params, evaluate=lambda p, b: pp.Output(*policy(p, b)))
    return part.update(batch.replace(current=current), part.init(params) if state is None else state, context)
