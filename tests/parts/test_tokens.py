"""Parts for sequences of tokens: what only they add to the functions."""

import jax
import jax.numpy as jnp
import numpy as np

import ppo_parts as pp
from ppo_parts import functional as f
from tests.common import SEGMENTS, TIME, evaluate, make_params, rollout


def test_gae_skips_before_and_after_the_sampler_alike():
    """With the policy that acted, next values of the minibatch are those of the rollout: both skip masked steps."""
    params = make_params()
    batch = rollout(behavior=params, ends=False, masked=False)
    mask = jnp.asarray(np.random.default_rng(0).random(batch.value.shape) < 0.5).at[0].set(True).at[-1].set(True)
    following = f.next_values(batch.value, batch.next_value[-1], mask=mask)
    batch = batch.replace(mask=mask, next_value=following)
    options = {"gamma": 0.9, "gae_lambda": 0.8, "mask_mode": "skip"}
    part, context = pp.gae(**options), pp.Context(key=jax.random.key(0), params=params)
    before, _ = part.update(batch, part.init(params, None), context)
    changed = batch.replace(next_value=jnp.where(jnp.arange(TIME)[:, None] < TIME - 1, jnp.nan, following))
    distribution, value = evaluate(params, batch)
    current = pp.Current(distribution, batch.log_prob, value)
    after, _ = part.update(changed.replace(current=current), part.init(params, None), context)
    expected = f.gae(batch.reward, batch.value, following, batch.terminated, mask=mask, **options)
    for out in (before, after):
        np.testing.assert_allclose(out.advantage, expected.advantage, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(out.target, expected.target, rtol=1e-5, atol=1e-6)


def test_aggregate_weighs_sequences_as_it_says():
    """The learner's mean over sequences is the function's, though a minibatch has a sequence without a token."""
    batch, context = rollout(), pp.Context(key=jax.random.key(0))
    losses = {"given": jnp.asarray(np.random.default_rng(0).normal(size=(TIME, SEGMENTS)), jnp.float32)}
    for by, length in (("sequence_mean", None), ("sequence_sum", None), ("sequence_sum", 3.0)):
        part = pp.tokens.aggregate("given", by=by, length=length)
        out, _ = part.update(batch.replace(losses=losses), part.init({}, None), context)
        assert out.losses["given"].shape == (SEGMENTS,)
        ours = f.masked_mean(out.losses["given"], jnp.any(batch.mask.astype(bool), axis=0))
        np.testing.assert_allclose(ours, f.aggregate(losses["given"], by=by, length=length, mask=batch.mask), rtol=1e-6)
