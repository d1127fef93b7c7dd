"""Parts for critics and for exploration by novelty: statistics and refusals; the gallery's cards have whole loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from benchmarks import rnd
from ppo_parts import functional as f
from ppo_parts.testing import example_batch
from tests.common import OBS, evaluate, make_params, refused


def test_normalize_target_averages_over_rollouts():
    targets = 1000 + np.random.default_rng(0).normal(size=(4, 6, 3)).astype(np.float32)
    mask = np.ones((6, 3), np.float32)
    mask[0] = 0
    for rate, weights in {"mean": np.full(4, 0.25), 0.5: np.array([0.0625, 0.125, 0.25, 0.5])}.items():
        rate_of = (lambda step: 1 / (step + 1)) if rate == "mean" else rate
        part = pp.critics.normalize_target(lambda params, old, new: params, rate=rate_of)
        state = part.init(None)
        for step, target in enumerate(targets):
            batch = pp.Batch(target=jnp.where(mask > 0, target, jnp.nan), mask=mask)
            batch, state = part.update(batch, state, pp.Context(key=jax.random.key(0), step=jnp.int32(step)))
        kept = targets[:, 1:].astype(np.float64)
        first = 0.0 if rate == "mean" else 0.0625  # what is left of the first statistics, 0 and 1
        mean = np.sum(weights * kept.mean((1, 2)))
        scale = np.sqrt(np.sum(weights * np.square(kept).mean((1, 2))) + first - mean**2)
        np.testing.assert_allclose(state.mean, mean, rtol=1e-6)
        np.testing.assert_allclose(state.scale, scale, rtol=1e-4)
        normalized = batch.extras["target_normalized"][1:]
        np.testing.assert_allclose(normalized, (kept[-1] - mean) / scale, rtol=1e-3, atol=2e-3)


def embed(network, obs):
    return jnp.tanh(obs @ network)


def draw(key):
    return jax.random.normal(key, (OBS, 2))


THREE, PARAMS = pp.exploration.rnd_reward(draw, embed, num_envs=3), {"predictor": jnp.ones((OBS, 2))}
FLAT = pp.exploration.rnd_reward(draw, lambda network, obs: jnp.sum(embed(network, obs), axis=-1), num_envs=4)


def updated(part):
    context = pp.Context(key=jax.random.key(0), params=PARAMS, evaluate=lambda *x: pp.Output(*evaluate(*x)))
    return lambda: part.update(example_batch(after_sampler=True), part.init(PARAMS, context.key), context)


test_what_cannot_work_is_refused = refused(
    (lambda: pp.critics.critic_loss(f.huber_value_loss, clip_eps=0.2), "unexpected keyword argument 'clip_eps'"),
    (lambda: pp.critics.critic_loss(f.huber_value_loss, prediction="logits"), 'prediction must be "value" or "aux'),
    (updated(pp.critics.critic_loss(f.huber_value_loss, prediction="aux.logits")), "the policy returns no aux"),
    (lambda: THREE.init(make_params(), jax.random.key(0)), r"'predictor' for the predictor, got \['policy', 'value'\]"),
    (lambda: THREE.init(PARAMS), r"drawn with a key: call learner\.init\(params, key\)"),
    (updated(FLAT), r"embed must return an array \[6, 4, K\] here, got shape \(6, 4\)"),
    (updated(THREE), r"num_envs=3, but the rollout has the axes \(6, 4\)"),
)


@pytest.mark.lenient_ranks
def test_the_benchmark_of_rnd_can_be_made():
    made = rnd.make_train(rnd.Config(size=4, num_envs=2, rnd=True))
    assert "novelty/rnd_reward" in made.shapes[1]
