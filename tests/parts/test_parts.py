"""Parts that regularize, move or correct a policy, parts for critics and novelty, and what adapts the rate, against
a few lines of NumPy. The gallery has whole loops, and the recordings of libraries have the steps of
`scale_by_kl_adaptive_rate`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import envs
from ppo_parts import functional as f
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.testing import example_batch, example_context
from ppo_parts.testing._example import add_current
from tests import common, env_fakes, reference
from tests.common import OBS, SEGMENTS, TIME, assert_close, evaluate, evaluate_gaussian, make_params, refused, rollout
from tests.core.common import GAE, run
from tests.registry import embed

close = functools.partial(assert_close, rtol=1e-4)


def applied(part, batch, policy=evaluate, params=None, state=None):
    """Apply a part after a sampler; return the batch and the state."""
    params = make_params() if params is None else params
    context = pp.Context(key=jax.random.key(0), params=params, evaluate=lambda p, b: pp.Output(*policy(p, b)))
    return part.update(add_current(batch, params, policy), part.init(params) if state is None else state, context)


def minibatch(**fields):
    return example_batch(mask=None, **fields)


def continuous(**fields):
    return minibatch(action=rollout(masked=False).obs[..., :2], **fields)


def test_a_function_gets_the_values_of_its_numbers():
    """It gets those of a number, a schedule and a field, which the part then requires; NaN reaches what it writes."""
    numbers = {"factor": lambda step: 2.0 - step, "shift": pp.field("per_segment.shift"), "scale": 3.0}
    batch = minibatch(per_segment={"shift": jnp.arange(4.0)})

    def scaled(batch, factor, shift, scale):
        return batch.replace(reward=scale * (factor * batch.reward + shift))

    for update in (scaled, lambda batch, context, **values: scaled(batch, **values)):
        part = pp.stateless(update, requires=("reward",), provides=("reward",), numbers=numbers)
        assert part.requires == ("reward", "per_segment.shift")
        close(applied(part, batch)[0].reward, 3 * (2 * batch.reward + jnp.arange(4.0)[None]))

    def loss(prediction, target, mask, batch, context, scale):  # hyperparameters may have any names
        return 0 * prediction + 100 * batch + 10 * context + scale

    part = pp.critics.critic_loss(loss, batch=2.0, context=lambda step: 3.0 + step, scale=4.0)
    close(applied(part, batch.replace(target=batch.value))[0].losses["value"], jnp.full((6, 4), 234.0))
    bad = pp.stateless(lambda batch, x: batch, provides=("reward",), numbers={"x": lambda step: jnp.array(jnp.nan)})
    assert np.all(np.isnan(applied(pp.chain(bad), batch)[0].reward))


def test_kl_penalty_in_both_directions_and_to_another_policy():
    batch = minibatch(extras={"frozen": rollout(seed=3, masked=False).log_prob})
    current, _ = evaluate(make_params(), batch)
    log_ratio, to_frozen = (current.log_prob(batch.action) - old for old in (batch.log_prob, batch.extras["frozen"]))
    for options, expected in (
        ({}, jnp.exp(log_ratio) - 1 - log_ratio),
        ({"estimator": "k2"}, log_ratio**2 / 2),
        ({"direction": "current_to_reference"}, jnp.exp(-log_ratio) - 1 + log_ratio),
        ({"estimator": "analytic"}, batch.behavior.kl_divergence(current)),
        ({"estimator": "analytic", "direction": "current_to_reference"}, current.kl_divergence(batch.behavior)),
        ({"reference": "frozen", "direction": "current_to_reference"}, jnp.exp(-to_frozen) - 1 + to_frozen),
    ):
        out, _ = applied(pp.kl_penalty(coef=0.5, **options), batch)
        close(out.losses["kl_penalty"], 0.5 * expected)
        close(out.metrics["kl_penalty"], jnp.mean(expected))
    far, _ = applied(pp.kl_penalty(coef=0.0), batch.replace(log_prob=batch.log_prob - 100))
    assert "kl_penalty" not in far.losses  # otherwise, 0 times an infinite divergence would be NaN
    assert far.metrics["kl_penalty"] > 1e30
    frozen = pp.kl_penalty(coef=-0.5 * pp.field("extras.frozen"))
    close(applied(frozen, batch)[0].losses["kl_penalty"], -0.5 * batch.extras["frozen"] * f.approx_kl(log_ratio))


def test_the_coefficient_of_the_penalty_follows_the_divergence():
    batch = add_current(minibatch(), make_params())
    divergence = batch.behavior.kl_divergence(batch.current.distribution)
    kl = float(jnp.mean(divergence))
    for times, factor in ((1.6, 0.5), (1.4, 1), (1 / 1.4, 1), (1 / 1.6, 2)):
        part = pp.kl_penalty(coef=3.0, estimator="analytic", target_kl=times * kl)
        state = part.finish(batch, part.init(None), pp.Context(key=jax.random.key(0)))
        close([*state], [3 * factor, kl])
        out, _ = applied(part, batch, state=state)
        close(out.losses["kl_penalty"], 3 * factor * divergence)
        close([out.metrics["kl_penalty_coef"], out.metrics["kl_penalty_after"]], [*state])


def test_adaptive_entropy_bonus_steps_toward_its_target_and_without_a_rate_is_entropy_bonus():
    batch = minibatch()
    fixed, _ = applied(pp.entropy_bonus(coef=0.2), batch)
    part = pp.regularizers.adaptive_entropy_bonus(target_entropy=0.3, learning_rate=0.1, coef=0.2)
    out, state = applied(part, batch)
    close(out.losses["entropy"], fixed.losses["entropy"])
    expected = np.log(0.2) - 0.1 * (float(fixed.metrics["entropy"]) - 0.3)
    close(state, expected)
    out, _ = applied(part, batch, state=state)
    close(out.metrics["entropy_coef"], np.exp(expected))
    _, after = applied(part, batch.replace(mask=jnp.zeros_like(batch.value)), state=state)
    assert after == state  # no step counts


def test_bounds_and_smoothness_losses_of_the_mean():
    batch, weight = continuous(), make_params()["policy"]
    out, _ = applied(pp.regularizers.bounds_loss(coef=0.5, bound=0.3), batch, evaluate_gaussian)
    expected = np.sum(np.maximum(np.abs(batch.obs @ weight) - 0.3, 0) ** 2, axis=-1)
    close(out.losses["bounds"], 0.5 * expected)
    close(out.metrics["bounds_loss"], np.mean(expected))
    temporal = np.linalg.norm((batch.obs - batch.next_obs) @ weight, axis=-1)
    out, _ = applied(pp.regularizers.smoothness_loss(temporal=2.0, spatial=None), batch, evaluate_gaussian)
    close(out.losses["smoothness"], 2 * temporal)
    assert "smoothness_spatial" not in out.metrics
    measured = []
    for scale in (0.0, 0.1, 0.2):
        part = pp.regularizers.smoothness_loss(temporal=None, spatial=2.0, noise_scale=scale)
        measured.append(float(applied(part, batch, evaluate_gaussian)[0].metrics["smoothness_spatial"]))
    assert measured[0] < 1.1e-6 < measured[1]
    close(measured[2], 2 * measured[1])  # the policy is linear


def test_mirror_loss_is_the_distance_from_a_symmetric_policy():
    batch, weight = continuous(), make_params()["policy"]
    signs = jnp.broadcast_to(jnp.array([1.0, -1.0, -1.0]), batch.obs.shape)
    part = pp.symmetry.mirror_loss(observation=lambda obs: signs * obs, action=lambda action: -action, coef=2.0)
    out, _ = applied(part, batch, evaluate_gaussian)
    expected = np.mean(np.square((signs * batch.obs) @ weight + batch.obs @ weight), axis=-1)
    close(out.losses["mirror"], 2 * expected)
    close(out.metrics["mirror_loss"], np.mean(expected))
    odd = pp.symmetry.mirror_loss(observation=lambda obs: -obs, action=lambda action: -action)
    assert jnp.all(applied(odd, batch, evaluate_gaussian)[0].losses["mirror"] == 0)  # this policy is linear

    def slope(params):
        return jnp.sum(applied(part, batch, evaluate_gaussian, params=params)[0].losses["mirror"])

    def by_hand(policy):  # only the action for the mirrored observation is differentiated
        target = -batch.obs @ weight
        return 2 * jnp.sum(jnp.mean(jnp.square((signs * batch.obs) @ policy - target), axis=-1))

    slopes = jax.jit(lambda params: (jax.grad(slope)(params)["policy"], jax.grad(by_hand)(params["policy"])))
    np.testing.assert_allclose(*slopes(make_params()), 1e-4, 1e-5)


def test_mirrored_segments_follow_those_of_their_shard():
    batch = continuous(shards=2, per_segment={"group": jnp.arange(4)}).replace(behavior=None)
    part = pp.symmetry.mirror_segments(observation=lambda obs: -obs, action=lambda action: 2 * action)
    out, _ = applied(part, batch, evaluate_gaussian)
    order = [0, 1, 0, 1, 2, 3, 2, 3]
    factor = jnp.array([1.0, 1, -1, -1, 1, 1, -1, -1]).reshape(1, 8, 1)
    np.testing.assert_array_equal(out.obs, batch.obs[:, order] * factor)
    np.testing.assert_array_equal(out.next_obs, batch.next_obs[:, order] * factor)
    np.testing.assert_array_equal(out.action, batch.action[:, order] * jnp.where(factor < 0, 2, 1))
    np.testing.assert_array_equal(out.log_prob, batch.log_prob[:, order])
    np.testing.assert_array_equal(out.per_segment["group"], order)
    changes = pp.stateless(lambda batch: batch, requires=("reward",), provides=("reward",), reads=())
    pp.chain(changes, pp.gae(gamma=0.9, gae_lambda=0.9), part)  # which also writes the reward, but does not make it


def test_perturbed_mean_shifts_each_element_by_at_most_the_scale():
    batch = continuous()
    policy = evaluate_gaussian(make_params(), batch)[0]

    def log_prob(action, scale):
        out, _ = applied(pp.regularizers.perturbed_mean(scale=scale), batch.replace(action=action), evaluate_gaussian)
        np.testing.assert_array_equal(out.current.distribution.loc, policy.loc)  # entropies and penalties see no noise
        return jnp.sum(out.current.log_prob), out.current.log_prob

    # The slope of log N(a; mu + z, sigma) in a is (mu + z - a) / sigma^2.
    slope, perturbed = jax.grad(log_prob, has_aux=True)(batch.action, 0.5)
    shift = np.asarray(slope * policy.scale**2 + batch.action - policy.loc)
    assert 0.4 < np.abs(shift).max() <= 0.5
    assert len(np.unique(shift.round(6))) == shift.size
    close(perturbed, pp.distributions.Normal(policy.loc + shift, policy.scale).log_prob(batch.action))
    close(log_prob(batch.action, 0.0)[1], policy.log_prob(batch.action))


def test_importance_correction_weighs_advantages():
    log_ratio = rollout(masked=False).reward
    batch = minibatch(advantage=jnp.full((6, 4), 2.0))
    batch, ratio = batch.replace(extras={"sampler_log_prob": batch.log_prob - log_ratio}), np.exp(log_ratio)
    inside = (ratio >= 0.8) & (ratio <= 1.5)
    for mode, weight in (("truncate", np.clip(ratio, 0.8, 1.5)), ("mask", np.where(inside, ratio, 0))):
        out, _ = applied(pp.tokens.importance_correction(low=0.8, high=1.5, mode=mode), batch)
        close(out.advantage, 2 * weight)
        close(out.metrics["correction_weight"], weight.mean())
        close(out.metrics["correction_fraction"], 1 - inside.mean())
    short = jnp.ones((6, 4)).at[2:, 0].set(0)  # there is a sequence of two tokens among sequences of six
    out, _ = applied(pp.tokens.importance_correction(high=1.5, level="sequence"), batch.replace(mask=short))
    weight = np.minimum(np.exp(np.sum(np.where(short > 0, log_ratio, 0), axis=0, keepdims=True)), 1.5) * short
    close(out.advantage * short, 2 * weight)


def test_self_imitation_learns_from_what_was_better_than_expected():
    batch = minibatch(target=rollout(masked=False).reward)
    part = pp.exploration.self_imitation(coef=0.5, value_coef=0.1)
    out, _ = applied(part, batch)
    value = evaluate(make_params(), batch)[1]
    better = np.maximum(batch.target - value, 0)

    def by_hand(params):  # the advantage is a constant
        distribution, value = evaluate(params, batch)
        square = jnp.square(jnp.maximum(batch.target - value, 0))
        return 0.5 * (-distribution.log_prob(batch.action) * better + 0.05 * square)

    close(out.losses["self_imitation"], by_hand(make_params()))
    slope = jax.grad(lambda params: jnp.sum(applied(part, batch, params=params)[0].losses["self_imitation"]))
    jax.tree.map(close, slope(make_params()), jax.grad(lambda params: jnp.sum(by_hand(params)))(make_params()))
    close(out.metrics["self_imitation_loss"], 2 * np.mean(out.losses["self_imitation"]))
    close(out.metrics["self_imitation_fraction"], np.mean(better > 0))


def test_the_scale_of_a_distribution_is_erased_where_the_mask_is_0():
    batch = continuous()
    given = rollout().replace(action=batch.action, behavior=evaluate_gaussian(make_params(100), batch)[0])
    penalty = pp.kl_penalty(coef=0.1, estimator="analytic")
    _, metrics = run(pp.chain(pp.shuffled_minibatches(2), penalty), given, policy=evaluate_gaussian)
    assert pp.nonfinite_report(metrics) is None


def test_kl_adaptive_rate_keeps_its_bounds():
    """Hyperparameters are traced, also in `inject_hyperparams`; out of range, the rate is NaN, as nothing can raise."""

    @jax.jit
    def step(rate, target_kl, low, kl):
        link = optax.inject_hyperparams(pp.optim.scale_by_kl_adaptive_rate)(rate, target_kl=target_kl, low=low)
        updates, _ = link.update(jnp.ones(()), link.init(jnp.ones(())), metrics={"approx_kl": kl})
        return -updates

    kept = {(1.2e-5, 1.0): 1e-5, (9e-3, 0.001): 1e-2, (1e-3, 0.0): 1e-3, (1e-3, 0.01): 1e-3, (1e-3, 0.021): 1e-3 / 1.5}
    for (rate, kl), expected in kept.items():
        np.testing.assert_allclose(step(rate, 0.01, 1e-5, kl), expected, rtol=1e-6)
    for outside in ((-1.0, 0.01, 1e-5), (1e-3, -0.01, 1e-5), (1e-3, 0.01, -1e-5)):
        assert np.isnan(step(*outside, 0.01))


def test_gae_skips_before_and_after_the_sampler_alike():
    """If the policy has not moved, a minibatch has the next values of the rollout: both skip masked steps."""
    params = make_params()
    batch = rollout(behavior=params, ends=False, masked=False)
    mask = jnp.asarray(np.random.default_rng(0).random(batch.value.shape) < 0.5).at[0].set(True).at[-1].set(True)
    following = f.next_values(batch.value, batch.next_value[-1], mask=mask)
    batch = batch.replace(mask=mask, next_value=following)
    options = {"gamma": 0.9, "gae_lambda": 0.8, "mask_mode": "skip"}
    part, context = pp.gae(**options), pp.Context(key=jax.random.key(0), params=params)
    changed = batch.replace(next_value=jnp.where(jnp.arange(TIME)[:, None] < TIME - 1, jnp.nan, following))
    before, _ = part.update(changed, part.init(params, None), context)
    after, _ = part.update(add_current(changed, params), part.init(params, None), context)
    expected = f.gae(batch.reward, batch.value, following, batch.terminated, mask=mask, **options)
    for out in (before, after):
        assert_close((out.advantage, out.target), (expected.advantage, expected.target), 1e-5)


def test_the_advantage_of_a_group_and_the_mean_over_sequences_are_those_of_functional():
    """The learner's mean over sequences is that of the function, even if a minibatch has a sequence without a token."""
    batch, context = rollout(), pp.Context(key=jax.random.key(0))
    losses = {"given": jnp.asarray(np.random.default_rng(0).normal(size=(TIME, SEGMENTS)), jnp.float32)}
    for by, length in (("sequence_mean", None), ("sequence_sum", None), ("sequence_sum", 3.0)):
        part = pp.tokens.aggregate("given", by=by, length=length)
        out, _ = part.update(batch.replace(losses=losses), part.init({}, None), context)
        assert out.losses["given"].shape == (SEGMENTS,)
        ours = f.masked_mean(out.losses["given"], jnp.any(batch.mask.astype(bool), axis=0))
        np.testing.assert_allclose(ours, f.aggregate(losses["given"], by=by, length=length, mask=batch.mask), rtol=1e-6)
    batch = rollout().replace(mask=jnp.ones((TIME, SEGMENTS)).at[3:, 1].set(0))
    out, _ = pp.tokens.group_advantage(group=2).update(batch, (), pp.Context(key=jax.random.key(0)))
    expected = f.group_advantage(jnp.sum(batch.reward * batch.mask, axis=0), jnp.array([0, 0, 1, 1]))
    close(out.advantage, expected[None] * batch.mask)


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
        first = 0.0 if rate == "mean" else 0.0625  # this is left of the first statistics, 0 and 1
        mean = np.sum(weights * kept.mean((1, 2)))
        scale = np.sqrt(np.sum(weights * np.square(kept).mean((1, 2))) + first - mean**2)
        np.testing.assert_allclose(state.mean, mean, rtol=1e-6)
        np.testing.assert_allclose(state.scale, scale, rtol=1e-4)
        normalized = batch.extras["target_normalized"][1:]
        np.testing.assert_allclose(normalized, (kept[-1] - mean) / scale, rtol=1e-3, atol=2e-3)


def draw(key):
    return jax.random.normal(key, (OBS, 2))


THREE, PARAMS = pp.exploration.rnd_reward(draw, embed, num_envs=3), {"predictor": jnp.ones((OBS, 2))}
FLAT = pp.exploration.rnd_reward(draw, lambda network, obs: jnp.sum(embed(network, obs), axis=-1), num_envs=4)


def test_a_rollout_enters_the_sums_of_rnd_once():
    batch, part = rollout(2).replace(next_obs=rollout(3).obs), pp.exploration.rnd_reward(draw, embed, num_envs=SEGMENTS)
    begin, first = part.init(PARAMS, jax.random.key(0)), pp.Context(key=jax.random.key(1), params=PARAMS)
    batch_first, state = part.update(batch, begin, first)
    assert state.moments.seen == np.sum(batch.mask)
    again, kept = part.update(batch, state, first)
    assert_close((kept, again.extras["rnd_reward"]), (state, batch_first.extras["rnd_reward"]))
    assert part.update(batch, state, first.replace(step=1))[1].moments.seen == 2 * np.sum(batch.mask)


def explored(part, *agents):
    context, shape = pp.Context(key=jax.random.key(0), params=PARAMS), (6, 4, *agents)
    batch = pp.Batch(log_prob=jnp.zeros(shape), next_obs=jnp.ones((*shape, OBS)))
    return lambda: part.update(batch, part.init(PARAMS, context.key), context)


def smoothed(batch, policy=evaluate):
    return lambda: applied(pp.regularizers.smoothness_loss(temporal=None), batch, policy)


def mirrored(make, batch, action=jnp.negative):
    return lambda: applied(make(observation=jnp.negative, action=action), batch, evaluate_gaussian)


def test_natural_gradient_tries_shorter_steps_until_the_other_losses_fall():
    """Losses fall below 0.1 along the first axis. The slope of the divergence, along the second one, does not count."""

    def losses(x):
        return {"kl_penalty": jnp.sum((x - jnp.array([0.0, 0.1])) ** 2) / 2, "loss": 10 * x[0] ** 2 - x[0]}

    gradient, params = jnp.array([-1.0, -0.1]), jnp.zeros(2)
    for backtracks, step in ((11, 0.0), (12, 0.8**11)):
        optimizer = pp.optim.natural_gradient(pp.linear_schedule(1.0, 0.0, 2), damping=0.0, backtracks=backtracks)
        update, _ = optimizer.update(gradient, optimizer.init(params), params, losses_fn=losses, step=1)
        np.testing.assert_allclose(update, [step, 0.0], rtol=1e-6)
    update, _ = optimizer.update(gradient, optimizer.init(params), params, losses_fn=losses, step=1)
    outside = pp.optim.natural_gradient(lambda step: 1.0 - step, damping=0.0)
    assert np.isnan(outside.update(gradient, outside.init(params), params, losses_fn=losses, step=2)[0]).all()


def test_proximal_average_leaves_keys_and_integers_alone():
    part, params = pp.regularizers.proximal_average(decay=0.9), make_params() | {"rng": jax.random.key(3), "n": 7}
    params = jax.tree.map(jnp.asarray, params)

    def policy(params, batch):
        assert jax.dtypes.issubdtype(params["rng"].dtype, jax.dtypes.prng_key)
        return evaluate(params, batch)

    batch = minibatch(advantage=rollout().reward)
    close(applied(part, batch, policy, params)[0].log_prob, applied(part, batch)[0].log_prob)


def test_natural_gradient_changes_only_what_its_phase_trains_and_nothing_where_it_fails():
    def policy(params, batch):
        return evaluate({"policy": params["head"] + params["body"], "value": params["value"]}, batch)

    params = make_params()
    params = {"head": params["policy"], "body": 0.5 * params["policy"], "value": params["value"]}
    reward = rollout(masked=False).reward
    batch = minibatch(advantage=reward, target=reward)
    losses = pp.full_batch(), pp.policy_loss(f.importance_weighted_surrogate), pp.kl_penalty(coef=1.0, estimator="k2")

    def after(trains, *more, damping=0.1):
        pipeline = pp.chain(pp.phases(actor=pp.phase(pp.chain(*losses, *more), trains=trains)))
        optimizer = {"actor": pp.optim.natural_gradient(0.5, damping=damping)}
        return run(pipeline, batch, optimizer=optimizer, params=params, policy=policy)[0].params

    assert not np.allclose(after("head")["head"], params["head"])
    assert_close(after(lambda params: {"head": True, "body": False, "value": False}), after("head"), rtol=1e-3)
    assert_close(after(None, pp.value_loss(), damping=0.0), params)  # F has no inverse, and x is not finite


def adapted(**extra):
    link = pp.optim.scale_by_kl_adaptive_rate(1e-3, target_kl=0.01)
    return lambda: link.update(jnp.ones(()), link.init(jnp.ones(())), **extra)


NO_AUX = pp.critics.critic_loss(f.huber_value_loss, prediction="aux.logits")
CORRECT, REMEMBERING = pp.tokens.importance_correction, continuous(carry=jnp.zeros((4, 1)))
NO_METRIC = "the metric 'approx_kl' does not exist.*policy_diagnostics"
ANALYTIC, BY_SEQUENCE = pp.kl_penalty(coef=1.0, estimator="analytic"), CORRECT(high=1.5, level="sequence")
test_what_cannot_work_is_refused = refused(
    (lambda: pp.kl_penalty(coef=1.0, estimator="k1", direction="current_to_reference"), "expected gradient of k1 is 0"),
    (lambda: pp.kl_penalty(coef=1.0, reference="frozen"), "only actions of 'frozen' could estimate this direction"),
    (lambda: applied(ANALYTIC, minibatch().replace(behavior=())), "has no kl_divergence"),
    (lambda: applied(pp.regularizers.bounds_loss(coef=0.5), minibatch()), "must be a Gaussian"),
    (smoothed(minibatch()), "continuous actions"),
    (smoothed(REMEMBERING, evaluate_gaussian), "smoothness_loss.*memory"),
    (mirrored(pp.symmetry.mirror_loss, continuous(), None), "mirror_loss: action must be a function, got None"),
    (mirrored(pp.symmetry.mirror_loss, REMEMBERING), "mirror_loss.*memory"),
    (mirrored(pp.symmetry.mirror_segments, REMEMBERING), "mirror_segments.*memory"),
    (mirrored(pp.symmetry.mirror_segments, continuous()), "distributions cannot be mirrored"),
    (mirrored(pp.symmetry.mirror_segments, continuous().replace(behavior=None), jnp.sum), "segments: action must keep"),
    (
        mirrored(pp.symmetry.mirror_loss, continuous(), jnp.sum),
        r"loss: action must keep .*, got float32\[\] for float32",
    ),
    (lambda: applied(pp.regularizers.perturbed_mean(), minibatch()), r"must be a distributions\.Normal"),
    (lambda: pp.chain(pp.shuffled_minibatches(2), BY_SEQUENCE), "cuts the time axis"),
    (lambda: CORRECT(low=2.0, high=1.0), "importance_correction: low must not exceed high"),
    (lambda: CORRECT(low=2.0, high=lambda step: 1.0), "importance_correction: low must not exceed high"),
    (lambda: pp.critics.critic_loss(f.value_loss, prediction="aux."), 'must be "value" or "aux.<name>"'),
    (lambda: f.importance_sampling_weight(jnp.ones(2), low=2.0, high=1.0), "weight: low must not exceed high"),
    (adapted(), NO_METRIC),
    (adapted(metrics={"loss": jnp.ones(())}), NO_METRIC),
    (lambda: pp.optim.scale_by_kl_adaptive_rate(1e-3, target_kl=0.0), "target_kl must lie in"),
    (lambda: pp.critics.critic_loss(f.huber_value_loss, clip_eps=0.2), "unexpected keyword argument 'clip_eps'"),
    (lambda: pp.linear_schedule(1000, 1e-3, 0.0), r"transition_steps must be an integer, got 0\.0$"),
    (lambda: applied(NO_AUX, minibatch()), r"returns no aux.logits: return Output\(..., aux={'logits': ...}\)"),
    (lambda: THREE.init(make_params(), jax.random.key(0)), r"'predictor' for the predictor, got \['policy', 'value'\]"),
    (lambda: THREE.init(PARAMS), r"drawn with a key: call learner\.init\(params, key\)"),
    (explored(FLAT), r"embed must return an array \[6, 4, K\] here, got shape \(6, 4\)"),
    (explored(THREE), r"num_envs=3, but the rollout has the axes \(6, 4\), \[T, N\]$"),
    (explored(THREE, 2), r"has the axes \(6, 4, 2\), \[T, N\]: fold agents .* with envs\.fold_agents\(env\)"),
)


# --- self-play: `zero_sum` distinguishes the sides of a game, and an environment says that there are two --------------


@pytest.fixture
def nim(monkeypatch):
    env_fakes.install(monkeypatch)
    return envs.make("pgx:nim", opponent="self")


def estimated(part, batch):
    return jax.jit(lambda batch: part.update(batch, part.init({}), example_context())[0])(batch)


def signed(seed, **fields):
    batch = example_batch(seed, **fields)
    seats = np.sign(np.random.default_rng(seed).normal(size=(2, *batch.reward.shape))).astype(np.float32)
    return batch.replace(extras={"seat": jnp.asarray(seats[0]), "next_seat": jnp.asarray(seats[1])})


def test_zero_sum_follows_its_equation_and_treats_streams_separately():
    batch = signed(0, mask=None)
    out = estimated(pp.agents.zero_sum(GAE), batch)
    seat, following = (batch.extras[name] for name in envs.SEATS)
    # These are the first player's numbers; the advantage and the value of a row are those of the row's own player.
    steps = batch.reward, seat * batch.value, following * batch.next_value, batch.terminated, batch.truncated
    expected = seat * reference.gae(*steps, gamma=0.9, gae_lambda=0.8)[0]
    assert_close((out.advantage, out.target), (expected, expected + batch.value), 1e-5)
    for name in ("value", "next_value", "reward"):
        np.testing.assert_array_equal(getattr(out, name), getattr(batch, name))
    pairs = {name: (1, k) for name, k in (("reward", 1), ("value", 2), ("next_value", 2))}
    streams = {name: jnp.stack([k * getattr(batch, name) for k in ks], -1) for name, ks in pairs.items()}
    both = estimated(pp.agents.zero_sum(GAE), batch.replace(**streams))
    np.testing.assert_allclose(both.advantage[..., 0], out.advantage, rtol=1e-5, atol=1e-6)


def test_zero_sum_reduces_to_its_estimator_after_the_sampler_and_takes_a_chain():
    """It does so where the first player always moves, and where the second one does, with the first one's rewards."""
    batch = example_batch(1, after_sampler=True)
    ones = jnp.ones_like(batch.reward)
    for sign in (1, -1):
        seats = batch.replace(reward=sign * batch.reward, extras=dict.fromkeys(envs.SEATS, sign * ones))
        out, plain = estimated(pp.agents.zero_sum(GAE), seats), estimated(GAE, batch)
        for name in ("advantage", "target"):
            np.testing.assert_array_equal(getattr(out, name), getattr(plain, name))
        np.testing.assert_array_equal(out.value, batch.value)
        np.testing.assert_array_equal(out.current.value, batch.current.value)
    # `chain` flattens chains, but must not take parts out of a part that wraps them.
    batch = signed(0)
    part = pp.agents.zero_sum(pp.chain(GAE))
    same = estimated(pp.chain(part), batch), estimated(pp.agents.zero_sum(GAE), batch)
    np.testing.assert_array_equal(*(out.advantage for out in same))
    assert part.needs_time
    assert "zero_sum" in str(pp.chain(part))


def test_both_sides_of_a_game_are_played(nim):
    assert nim.zero_sum
    assert not envs.make("pgx:nim").zero_sum
    reset, step = common.compiled(nim)
    state, obs = reset(jax.random.key(0), 32)
    assert set(obs.obs[:, 0].tolist()) == {5.0}  # nobody has moved
    seats = []
    for t in range(5):
        left = obs.obs[:, 0]
        state, out = step(jax.random.key(t), state, jnp.zeros(32, jnp.int32))  # every player takes 1 match
        obs = out.obs
        seats.append(out.info["seat"])
        np.testing.assert_array_equal(out.info["next_seat"], -out.info["seat"])
        np.testing.assert_array_equal(out.terminated, left == 1)
    np.testing.assert_array_equal(np.diff(np.abs(seats), axis=0), 0)
    assert set(np.unique(seats[0])) == {-1.0, 1.0}  # it is drawn who begins
    np.testing.assert_array_equal(out.reward, seats[0])  # the first player's: whoever begins takes the last of 5
    np.testing.assert_array_equal(out.info["won"], seats[0] > 0)
    assert not nim.evaluation(state).zero_sum  # evaluation is against random moves
    assert envs.check_laws(nim, num_steps=60).terminated > 0


def test_a_chain_that_does_not_tell_the_sides_apart_is_refused(nim):
    """The chain of the recipe does so; making the recipe traces it."""
    cleanrl_ppo.make_train(cleanrl_ppo.Config(), nim)
    with pytest.raises(pp.errors.UserValueError, match=r"the policy plays both sides .* pp\.agents\.zero_sum\(pp\.gae"):
        cleanrl_ppo.make_train(cleanrl_ppo.Config(), nim, pipeline=pp.chain(GAE, pp.full_batch(), pp.value_loss()))
