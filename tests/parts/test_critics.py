"""Parts for critics and for exploration by novelty: masks, refusals; the gallery's cards have whole loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from benchmarks import rnd
from ppo_parts import functional as f
from ppo_parts.testing import check_part, example_batch
from tests.common import OBS, evaluate, make_params, refused, rollout


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


def test_critic_loss_compares_what_it_says():
    part = pp.critics.critic_loss(f.huber_value_loss, prediction="aux.other", delta=lambda step: 1.0 + step, coef=0.5)
    batch = example_batch(after_sampler=True)
    batch = batch.replace(current=batch.current._replace(aux={"other": 3 * batch.value}))
    out, _ = part.update(batch, part.init({}), pp.Context(key=jax.random.key(0), step=jnp.int32(1)))
    expected = 0.5 * f.huber_value_loss(3 * batch.value, batch.target, delta=2.0, mask=batch.mask)
    np.testing.assert_allclose(out.losses["value"], expected, rtol=1e-6)


def test_a_chain_learns_with_several_critics_and_writes_the_statistics():
    def policy(params, batch):
        distribution, value = evaluate(params, batch)
        mean, scale = jax.lax.stop_gradient((params["mean"], params["scale"]))
        return pp.Output(distribution, scale * value + mean, aux={"logits": batch.obs @ params["logits"], "n": value})

    def write(params, old, new):
        w = f.rescale_head(params["value"], jnp.zeros(()), old, new)[0]
        return params | {"value": w, "mean": new.mean, "scale": new.scale}

    params = make_params() | {"logits": jnp.zeros((OBS, 3)), "mean": jnp.zeros(()), "scale": jnp.ones(())}
    hl_gauss = {"prediction": "aux.logits", "name": "logits", "support": [-1.0, 0.0, 1.0], "sigma": 0.75}
    lens = {"current.value": "current.aux.n", "target": "extras.target_normalized"}
    head = pp.gae(gamma=0.9, gae_lambda=0.8), pp.critics.normalize_target(write, rate=lambda step: 1 / (step + 1))
    normalized = pp.within(pp.value_loss(), name="normalized", read=lens)
    critics = pp.critics.critic_loss(f.categorical_value_loss, **hl_gauss), normalized
    chain = pp.chain(*head, pp.shuffled_minibatches(2), pp.clipped_surrogate(clip_eps=0.2), *critics)
    learner = pp.learner(policy, chain, optax.sgd(0.1))
    state, metrics = jax.jit(learner.update)(jax.random.key(0), learner.init(params), rollout())
    assert all(np.any(state.params[name] != x) and np.isfinite(state.params[name]).all() for name, x in params.items())
    assert {"logits_loss", "normalized/value_loss"} <= set(metrics)
    assert state.params["scale"] == metrics["target_scale"] != 1
    assert pp.nonfinite_report(metrics) is None


def embed(network, obs):
    return jnp.tanh(obs @ network)


def draw(key):
    return jax.random.normal(key, (OBS, 2))


def test_rnd_leaves_masked_steps_out():
    part, batch = pp.exploration.rnd_reward(draw, embed, num_envs=4, gamma=0.5), example_batch()
    keep = np.asarray(batch.mask, bool)
    batch = batch.replace(next_obs=jnp.where(keep[..., None], batch.next_obs, jnp.nan))
    params = {"predictor": draw(jax.random.key(0))}
    state = part.init(params, jax.random.key(1))
    out, after = part.update(batch, state, pp.Context(key=jax.random.key(2), params=params))
    error = jnp.mean(jnp.square(embed(params["predictor"], batch.next_obs) - embed(state.target, batch.next_obs)), -1)
    totals, sums = np.zeros(4), np.zeros((6, 4))
    for t in range(6):
        sums[t] = totals = np.where(keep[t], 0.5 * totals + error[t], totals)
    np.testing.assert_allclose(after.discounted, totals, rtol=1e-6)
    np.testing.assert_allclose(after.moments.var, np.var(sums[keep]), rtol=1e-5)
    expected = np.where(keep, error, 0) / np.std(sums[keep])
    np.testing.assert_allclose(out.extras["rnd_reward"], expected, rtol=1e-5)


def test_the_loss_of_rnd_obeys_the_laws():
    def batch(seed=0, dtype=jnp.float32):
        given = example_batch(seed, dtype, after_sampler=True).replace(current=None)
        return given.replace(extras={**given.extras, "rnd_target": embed(jnp.ones((OBS, 2), dtype), given.obs)})

    check_part(pp.exploration.rnd_loss(embed, predictor="policy"), batch=batch)


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
