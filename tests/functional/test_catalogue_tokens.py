"""The losses and advantages of sequences of tokens: one table; `catalogue.py` has the checks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import functional as f
from tests.catalogue import Entry, Law, check_golden, check_laws, check_reference
from tests.common import SEGMENTS, TIME, Categorical, evaluate, make_params, rollout

T, N = 5, 4


def moderate():
    rng = np.random.default_rng(3)
    advantage = np.broadcast_to([1.5, -0.7, 0.0, 0.4], (T, N)).copy()
    return {"log_ratio": 0.4 * rng.normal(size=(T, N)), "advantage": advantage}


def with_log_prob():
    rng = np.random.default_rng(4)
    return {
        "log_ratio": 0.4 * rng.normal(size=(T, N)),
        "advantage": rng.normal(size=(T, N)),
        "log_prob": -np.exp(rng.normal(size=(T, N))),
    }


def sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def sapo(log_ratio, advantage, *, tau=1.0, tau_negative=1.05):
    tau = np.where(advantage > 0, tau, tau_negative)
    return -advantage * 4 / tau * sigmoid(tau * (np.exp(log_ratio) - 1))


def nearly_linear(log_ratio, advantage):
    """The first two terms of the gate at a small temperature of 1e-6: 2 / tau + (r - 1)."""
    return f.importance_weighted_surrogate(log_ratio, advantage) - jax.lax.stop_gradient(advantage) * (2e6 - 1)


def clipped(ratio, advantage, low, high):
    return -np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def gspo(log_ratio, advantage, *, clip_eps):
    ratio = np.exp(np.mean(log_ratio, axis=0, keepdims=True))
    return clipped(ratio, advantage, clip_eps, clip_eps)


def gmpo(log_ratio, advantage, *, clip_eps):
    sign = np.sign(advantage)
    narrow = sign * np.minimum(sign * log_ratio, sign * np.clip(log_ratio, -clip_eps, clip_eps))
    loss = -np.mean(advantage, axis=0) * np.exp(np.mean(narrow, axis=0))
    return np.broadcast_to(loss, log_ratio.shape)


def covariance(advantage, log_prob):
    return (advantage - np.mean(advantage)) * (log_prob - np.mean(log_prob))


def kl_cov(log_ratio, advantage, log_prob, *, fraction, coef):
    cov = covariance(advantage, log_prob)
    chosen = cov >= np.sort(cov.ravel())[-max(1, int(fraction * cov.size))]
    return -np.exp(log_ratio) * advantage + coef * chosen * np.abs(log_ratio)


def all_of_range(log_ratio, advantage, log_prob, *, key, clip_eps, fraction, cov_low, cov_high):
    """Clip-Cov where the fraction is so large that nothing is left to chance."""
    assert fraction == 1
    cov, ratio = covariance(advantage, log_prob), np.exp(log_ratio)
    unclipped = -ratio * advantage >= -np.clip(ratio, 1 - clip_eps, 1 + clip_eps) * advantage
    drop = (cov > cov_low) & (cov < cov_high) & unclipped
    return np.where(drop, 0, clipped(ratio, advantage, clip_eps, clip_eps))


def by_group(reward, *, group, baseline="mean", scale="group", ddof=1, eps=1e-6, length=None):
    result = np.zeros_like(reward)
    for n in range(len(reward)):
        mine = reward[group == group[n]]
        others = reward[(group == group[n]) & (np.arange(len(reward)) != n)]
        if isinstance(baseline, np.ndarray):
            base = baseline[n]
        elif baseline == "length_weighted":
            base = np.average(mine, weights=length[group == group[n]])
        else:
            base = {"mean": np.mean(mine), "leave_one_out": np.mean(others) if len(others) else reward[n], "none": 0}
            base = base[baseline]
        whole = {"group": mine, "batch": reward}.get(scale)
        result[n] = (reward[n] - base) / (1 if scale is None else np.std(whole, ddof=min(ddof, len(whole) - 1)) + eps)
    return result


GROUP = np.array([2, 0, 2, 1, 0, 2])
PAIRS = np.array([0, 0, 1, 1])


def rewards():
    return {"reward": np.random.default_rng(5).normal(size=GROUP.size)}


def grouped(name, settings, expected):
    """An entry for an algorithm of the table of `group_advantage`."""
    function = functools.partial(f.group_advantage, group=GROUP, **settings)
    function.__name__ = name
    slow = functools.partial(by_group, group=GROUP, **settings)
    return across(function, {"reward": [1.0, 0, 3, 7, 4, 5]}, expected, slow, {}, rewards, differentiable=())


def across(function, golden, expected, slow, settings, samples, *laws, differentiable=("log_ratio",)):
    """An entry for a function that compares tokens or sequences."""
    return Entry(function, golden, expected, slow, settings, differentiable, samples, laws, elementwise=False)


def outcome(score, log_prob, reference_log_prob, *, kl_coef):
    reward = -kl_coef * (log_prob - reference_log_prob)
    reward[-1] += score
    return reward


def outcome_samples():
    rng = np.random.default_rng(6)
    return {"score": rng.normal(size=N), "log_prob": rng.normal(size=(T, N)), "reference_log_prob": np.zeros((T, N))}


TWO = {"log_ratio": np.log([[1.0, 1.0], [4.0, 0.25]]), "advantage": [[1.0, -1.0], [1.0, -1.0]]}
COVARIANCES = {"log_ratio": [0.1] * 3, "advantage": [0.0, 1, 2], "log_prob": [-3.0, -1, -1]}  # -5/3 + ...: 4/3, 0, 2/3
DRAW = {"key": jax.random.key(0), "fraction": 1.0}
EXP = np.exp(0.1)


def steps():
    rng = np.random.default_rng(0)
    flags = {name: (rng.random((6, 4)) < 0.2).astype(float) for name in ("terminated", "truncated")}
    return {"reward": rng.normal(size=(6, 4)), **flags}


def returns(reward, terminated, truncated, gamma):
    total = np.zeros_like(reward)
    for t in reversed(range(len(reward))):
        total[t] = reward[t]
        if t + 1 < len(reward):
            total[t] += gamma * (1 - terminated[t]) * (1 - truncated[t]) * total[t + 1]
    return total


def return_minus_no_value(reward, terminated, truncated):
    """GAE with lambda 1, of a critic whose value is 0 everywhere."""
    nothing = jnp.zeros_like(reward)
    return f.gae(reward, nothing, nothing, terminated, truncated, gamma=0.9, gae_lambda=1.0).advantage


def gspo_of_sequences(log_ratio, advantage):
    return f.clipped_surrogate(f.sequence_log_ratio(log_ratio), advantage, clip_eps=0.5)


def unclipped(log_ratio, advantage, log_prob):
    return f.importance_weighted_surrogate(log_ratio, advantage)


def plainly_clipped(log_ratio, advantage, log_prob):
    return f.clipped_surrogate(log_ratio, advantage, clip_eps=0.2)


LENGTHS, ONE_LESS = np.array([2.0, 1, 1, 1, 3, 1]), {"scale": None, "baseline": "leave_one_out"}
ENTRIES = (
    # 4 / tau * sigmoid(0), and sigmoid(tau (2 - 1))
    Entry(f.sapo, {"log_ratio": [0.0, 0.0, np.log(2)], "advantage": [1.0, -1, 1]}, [-2, 1, -4 * sigmoid(1)], sapo,
          {"tau": 1.0, "tau_negative": 2.0}, laws=(Law(nearly_linear, {"tau": 1e-6, "tau_negative": 1e-6}),)),
    # geometric means 2 and 1/2
    across(f.gspo, TWO, [[-1.5, 0.5], [-1.5, 0.5]], gspo, {"clip_eps": 0.5}, moderate, Law(gspo_of_sequences)),
    # without a clip it is GSPO without a clip
    across(f.gmpo, {"log_ratio": [[-0.2, 0.2], [2.0, -2.0]], "advantage": [[1.0, -1.0], [1.0, -1.0]]},
           [[-np.exp(0.1), np.exp(-0.1)]] * 2, gmpo, {"clip_eps": 0.4}, moderate,
           Law(functools.partial(f.gspo, clip_eps=1e6), {"clip_eps": 1e6})),
    across(f.kl_cov, COVARIANCES, [10 * 0.1, -EXP, -2 * EXP], kl_cov, {"fraction": 0.5, "coef": 10.0}, with_log_prob,
           Law(unclipped, {"coef": 0})),
    # covariances 4/3, 0 and 2/3
    across(f.clip_cov, COVARIANCES, [0, -EXP, 0], all_of_range,
           {**DRAW, "clip_eps": 0.2, "cov_low": 0.5, "cov_high": 5.0}, with_log_prob,
           Law(plainly_clipped, {"cov_low": 1e9, "cov_high": 1e10})),
    across(f.sequence_log_ratio, {"log_ratio": [[0.25, 1.0], [0.75, 2.0]]}, [[0.5, 1.5], [0.5, 1.5]],
           lambda log_ratio: np.broadcast_to(np.mean(log_ratio, axis=0), log_ratio.shape), {},
           lambda: {"log_ratio": moderate()["log_ratio"]},
           Law(lambda log_ratio: f.sequence_log_ratio(log_ratio) * T, {"reduction": "sum"})),
    grouped("GRPO", {}, [-1, -(2**-0.5), 0, 0, 2**-0.5, 1]),
    grouped("Dr.GRPO", {"scale": None}, [-2, -2, 0, 0, 2, 2]),
    grouped("RLOO", ONE_LESS, [-3, -4, 0, 0, 4, 3]),
    grouped("OPO", {"scale": None, "baseline": "length_weighted", "length": LENGTHS}, [-1.5, -3, 0.5, 0, 1, 2.5]),
    grouped("ReMax", {"scale": None, "baseline": np.array([1.0, 0, 0, 7, 2, 6])}, [0, 0, 3, 0, 2, -1]),
    grouped("Lite PPO", {"scale": "batch", "ddof": 0, "eps": 0.0}, np.array([-2, -2, 0, 0, 2, 2]) / (50 / 9) ** 0.5),
    across(f.outcome_reward, {"score": 2.0, "log_prob": [-1.0, -1], "reference_log_prob": [-1.5, -1]}, [-0.25, 2],
           outcome, {"kl_coef": 0.5}, outcome_samples, differentiable=()),
    across(f.reward_to_go, {"reward": [1.0, 2, 4, 8], "terminated": [0.0, 1, 0, 0], "truncated": [0.0, 0, 1, 0]},
           [2, 2, 4, 8], returns, {"gamma": 0.5}, steps,
           Law(lambda reward, terminated, truncated: reward, {"gamma": 0.0}, gradient=False),
           Law(return_minus_no_value, {"gamma": 0.9}), differentiable=()),
)  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_entry(entry):
    check_golden(entry)
    check_reference(entry)
    check_laws(entry)


@pytest.mark.parametrize("offset", [-200.0, 200.0])
@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.samples in (moderate, with_log_prob)], ids=lambda e: e.id)
def test_extreme_log_ratios(entry, offset):
    """Values, gradients and masks where every ratio is about e^200 or e^-200; float32 cannot hold the former."""
    samples = entry.samples()
    samples["log_ratio"] += offset
    check_reference(entry._replace(samples=lambda: samples))
    given = {name: jnp.asarray(x, jnp.float32) for name, x in samples.items()}

    def total(log_ratio):
        return jnp.sum(entry.function(**{**given, "log_ratio": log_ratio}, **entry.hyperparameters))

    slopes = jax.grad(total)(given["log_ratio"])
    assert not np.isnan(slopes).any()
    assert offset > 0 or np.isfinite(slopes).all()


def test_reward_to_go_skips_masked_steps_without_a_discount():
    reward, mask = jnp.array([1.0, jnp.nan, 4.0, 8.0]), jnp.array([1, 0, 1, 0])
    ends = jnp.array([0, 1, 0, 0])  # of a masked step, so it does not count
    assert f.reward_to_go(reward, ends, gamma=0.5, mask=mask).tolist() == [3.0, 0.0, 4.0, 0.0]


def test_group_advantages_reduce_to_each_other():
    """In one group of n, and with equal lengths, they are one another, up to n / (n - 1)."""
    reward = jnp.asarray(rewards()["reward"])
    n = len(reward)
    one, means = jnp.zeros(n, int), jnp.full(n, reward.mean())
    standardized = f.advantage_normalize(reward, ddof=1, eps=1e-3)
    centered = f.group_advantage(reward, one, scale=None)
    np.testing.assert_allclose(f.group_advantage(reward, one, eps=1e-3), standardized, rtol=1e-5, atol=1e-6)
    lite = f.group_advantage(reward, one, scale="batch", eps=1e-3)
    np.testing.assert_allclose(lite, standardized, rtol=1e-5, atol=1e-6)
    rloo = f.group_advantage(reward, one, scale=None, baseline="leave_one_out")
    np.testing.assert_allclose(rloo, n / (n - 1) * centered, rtol=1e-5, atol=1e-6)
    opo = f.group_advantage(reward, one, scale=None, baseline="length_weighted", length=jnp.full(n, 3.0))
    np.testing.assert_allclose(opo, centered, rtol=1e-5, atol=1e-6)
    remax = f.group_advantage(reward, one, scale=None, baseline=means)
    np.testing.assert_allclose(remax, centered, rtol=1e-5, atol=1e-6)


EXTREME = np.array([-1e38, -200, -1, 0, 1, 90, 1e38], np.float32)


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (f.policy_gradient_loss, lambda ratio: np.ones_like(ratio)),
        (functools.partial(f.cispo, clip_eps=0.2, clip_eps_high=3.0), lambda ratio: np.clip(ratio, 0.8, 4.0)),
        (functools.partial(f.cispo, clip_eps=1.0), lambda ratio: np.clip(ratio, 0.0, 2.0)),
    ],
    ids=["policy_gradient_loss", "cispo", "cispo without a lower bound"],
)
def test_weighted_log_probabilities(loss, weight):
    """Value -wA and slope -wA for every finite log-ratio, and nothing from a masked one."""
    log_ratio, advantage = np.concatenate([EXTREME, [0]]), np.array([2, -1, 3, -2, 1, 1, 0, np.nan], np.float32)
    mask = np.array([1, 1, 1, 1, 1, 1, 1, 0])
    with np.errstate(over="ignore"):
        expected = np.where(mask, -weight(np.exp(log_ratio)) * np.where(mask, advantage, 0), 0)
    for masked in (np.nan, 1.0):
        given = jnp.where(mask, log_ratio, masked)
        value, pull = jax.vjp(lambda x: loss(x, jnp.asarray(advantage), mask=mask), given)
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-30)
        np.testing.assert_allclose(pull(jnp.ones(8))[0], expected, rtol=1e-6, atol=1e-30)


def test_losses_of_sequences_are_finite_where_their_docstrings_say():
    """Any log-ratio with a positive advantage, and with a negative one below the overflow of the ratio."""
    rows = ((1.0, EXTREME), (-1.0, np.minimum(EXTREME, 1)), (0.0, EXTREME))
    x = jnp.concatenate([jnp.asarray(logs)[None] for _, logs in rows], axis=0).T.reshape(1, -1)
    advantage = jnp.tile(jnp.array([gain for gain, _ in rows]), len(EXTREME))[None]

    @jax.jit
    def losses_and_gradients(x):
        losses = [functools.partial(f.gspo, clip_eps=0.2, level=level) for level in ("sequence", "token")]
        return [jax.value_and_grad(lambda x, loss=loss: loss(x, advantage).sum())(x) for loss in (*losses, f.gmpo)]

    for value, gradient in losses_and_gradients(x):
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()


def test_gradients_of_tokens_and_of_sequences_agree_in_sum():
    """GSPO and GSPO-token have the same gradient if the advantage is that of the sequence: arXiv:2507.18071, 4.3."""
    given, mask = moderate(), np.random.default_rng(0).random((T, N)) < 0.7

    @jax.jit
    def gradients(x):
        loss = functools.partial(f.gspo, advantage=jnp.asarray(given["advantage"]), clip_eps=0.2, mask=mask)
        return [jax.grad(lambda x, level=level: loss(x, level=level).sum())(x) for level in ("token", "sequence")]

    token, sequence = gradients(jnp.asarray(given["log_ratio"]))
    np.testing.assert_allclose(token, sequence, rtol=1e-5, atol=1e-6)
    assert np.any(token)


def test_clip_cov_draws_as_many_as_it_says():
    rng, shape = np.random.default_rng(0), (50, 20)
    advantage, log_prob = rng.normal(size=shape), rng.normal(size=shape)
    given = {"clip_eps": 0.2, "cov_low": 0.0, "cov_high": 1e9}

    @jax.jit
    def dropped(seed, fraction):
        loss = f.clip_cov(jnp.zeros(shape), advantage, log_prob, key=jax.random.key(seed), fraction=fraction, **given)
        return loss == 0

    assert int(dropped(0, 0.05).sum()) == 50
    assert int(dropped(0, 0.0).sum()) == 1
    covariance = (advantage - advantage.mean()) * (log_prob - log_prob.mean())
    assert np.all(covariance[np.asarray(dropped(0, 0.05))] > 0)
    assert np.any(dropped(0, 0.05) != dropped(1, 0.05))


def test_chains_learn():
    """One update with every part and loss for tokens, without a critic."""

    def policy(params, batch):
        return Categorical(batch.obs @ params["policy"]), None

    rng = np.random.default_rng(0)
    batch = rollout(masked=False)
    mask = jnp.asarray(np.arange(TIME)[:, None] < rng.integers(2, TIME + 1, SEGMENTS))
    batch = batch.replace(
        mask=mask,
        value=None,
        per_segment={"group": jnp.array([0, 1, 1, 0]), "score": jnp.asarray(rng.normal(size=SEGMENTS), jnp.float32)},
        extras={"reference_log_prob": batch.log_prob},
    )
    losses = {"cispo": {"clip_eps": 0.2}, "sapo": {}, "gspo": {"clip_eps": 0.2}, "gmpo": {}, "policy_gradient_loss": {}}
    policies = [pp.policy_loss(getattr(f, name), name=name, **settings) for name, settings in losses.items()]
    policies += [pp.tokens.clip_cov(clip_eps=0.2, cov_low=0.0, name="clip_cov"), pp.tokens.kl_cov(name="kl_cov")]
    sums = {"cispo": ("sequence_sum", 8.0), "gspo": ("sequence_mean", None), "gmpo": ("sequence_mean", None)}
    ways = [pp.tokens.aggregate(name, by=by, length=length) for name, (by, length) in sums.items()]
    grpo = [pp.tokens.group_advantage(score="score"), pp.segment_minibatches(2), *policies, *ways]
    reinforce = [
        pp.tokens.outcome_reward(kl_coef=0.1),
        pp.tokens.reward_to_go(),
        pp.advantage_normalize(ddof=1),
        pp.full_batch(),
    ]
    for parts in (grpo, [*reinforce, pp.policy_loss(f.policy_gradient_loss)]):
        learner = pp.learner(policy, pp.chain(*parts), optax.sgd(0.1))
        params = {"policy": make_params()["policy"]}
        state, metrics = jax.jit(learner.update)(jax.random.key(0), learner.init(params), batch)
        assert np.all(np.isfinite(state.params["policy"]))
        assert np.any(state.params["policy"] != params["policy"])
        assert not any(metrics[name] for name in metrics if name.startswith("nonfinite/"))


def test_gae_skips_before_and_after_the_sampler_alike():
    """With the policy that acted, next values of the minibatch are those of the rollout: both skip masked steps."""
    params = make_params()
    batch = rollout(behavior=params, ends=False, masked=False)
    mask = jnp.asarray(np.random.default_rng(0).random(batch.value.shape) < 0.5).at[0].set(True).at[-1].set(True)
    following = f.next_values(batch.value, batch.next_value[-1], mask=mask)
    batch = batch.replace(mask=mask, next_value=following)
    part = pp.gae(gamma=0.9, gae_lambda=0.8, mask_mode="skip")
    context = pp.Context(key=jax.random.key(0), params=params)
    before, _ = part.update(batch, part.init(params, None), context)
    changed = batch.replace(next_value=jnp.where(jnp.arange(TIME)[:, None] < TIME - 1, jnp.nan, following))
    distribution, value = evaluate(params, batch)
    current = pp.Current(distribution, batch.log_prob, value)
    after, _ = part.update(changed.replace(current=current), part.init(params, None), context)
    expected = f.gae(
        batch.reward, batch.value, following, batch.terminated, gamma=0.9, gae_lambda=0.8, mask=mask, mask_mode="skip"
    )
    for out in (before, after):
        np.testing.assert_allclose(out.advantage, expected.advantage, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(out.target, expected.target, rtol=1e-5, atol=1e-6)


def test_aggregate_weighs_sequences_as_it_says():
    """The learner's mean over sequences is the function's, though a minibatch has a sequence without a token."""
    rng = np.random.default_rng(0)
    batch = rollout()
    losses = {"given": jnp.asarray(rng.normal(size=(TIME, SEGMENTS)), jnp.float32)}
    for by, length in (("sequence_mean", None), ("sequence_sum", None), ("sequence_sum", 3.0)):
        part = pp.tokens.aggregate("given", by=by, length=length)
        out, _ = part.update(batch.replace(losses=losses), part.init({}, None), pp.Context(key=jax.random.key(0)))
        assert out.losses["given"].shape == (SEGMENTS,)
        ours = f.masked_mean(out.losses["given"], jnp.any(batch.mask.astype(bool), axis=0))
        np.testing.assert_allclose(ours, f.aggregate(losses["given"], by=by, length=length, mask=batch.mask), rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: f.gspo(x[0, 0], x[0, 0], clip_eps=0.2), "axis 0"),
        (lambda x: f.sequence_log_ratio(x, level="word"), "level must be"),
        (lambda x: f.sequence_log_ratio(x, reduction="max"), "reduction must be"),
        (lambda x: f.sapo(x, x, tau=0.0), "tau must lie in"),
        (lambda x: f.aggregate(x, by="mean"), "by must be one of"),
        (lambda x: f.aggregate(x, by="token_mean", length=3), "leave it out"),
        (lambda x: f.group_advantage(x[0], jnp.arange(N), baseline="median"), "baseline must be one of"),
        (lambda x: f.group_advantage(x[0], jnp.arange(N), baseline="length_weighted"), "needs length"),
        (lambda x: f.outcome_reward(x[0], log_prob=x, kl_coef=0.1), "needs reference_log_prob"),
        (lambda x: f.kl_cov(x, x, x, fraction=1.5), "fraction must lie in"),
        (lambda x: pp.tokens.group_advantage(group=0), "group must be at least 1"),
        (lambda x: pp.tokens.aggregate(by="sequence_mean", length=3), "leave it out"),
        (lambda x: pp.tokens.clip_cov(clip_eps=0.2, cov_low=2.0, cov_high=1.0), "cov_low must be less than cov_high"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.zeros((T, N)))


def test_a_group_out_of_range_is_nan_where_it_is_not_known():
    advantage = jax.jit(lambda group: f.group_advantage(jnp.arange(3.0), group))(jnp.array([0, 0, 3]))
    np.testing.assert_array_equal(np.isnan(advantage), [False, False, True])
