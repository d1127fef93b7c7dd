"""Parity with verl, TRL and Tunix: their formulas in NumPy on random batches `[B, T]`, and Tunix's recorded numbers.

The formulas are written anew from the equations that their functions compute, with their constants.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import functional as f
from tests.reference import gae as slow_gae

TUNIX = np.load(Path(__file__).parents[1] / "golden" / "tunix.npz")
B, T, GROUPS = 9, 8, np.array([4, 1, 4, 0, 1, 4, 2, 2, 1])


@functools.cache
def batch():
    """Sequences of several lengths, with tokens in between that a tool wrote."""
    rng = np.random.default_rng(11)
    mask = (np.arange(T) < rng.integers(1, T + 1, B)[:, None]) & (rng.random((B, T)) < 0.8)
    mask[:, 0] = True
    new = -np.exp(rng.normal(size=(B, T)))
    return {
        "mask": mask.astype(float),
        "new": new,
        "old": new + 0.3 * rng.normal(size=(B, T)),
        "sampler": new + 0.3 * rng.normal(size=(B, T)),
        "score": rng.normal(size=B),
        "reward": rng.normal(size=(B, T)),
        "value": rng.normal(size=(B, T)),
        "advantage": np.repeat(rng.normal(size=(B, 1)), T, axis=1),
        "tokens": rng.normal(size=(B, T)),
        "greedy": rng.normal(size=B),
    }


def ours(function):
    """Compile and run in float64 what a test compares."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(function)({name: jnp.asarray(x) for name, x in batch().items()}))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-9)


# --- their formulas -------------------------------------------------------------------------------------------------


def token_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def sequence_mean(x, mask):
    return ((x * mask).sum(1) / mask.sum(1)).mean()


def sequence_sum(x, mask):
    return (x * mask).sum(1).mean()


def slope(loss, new, h=1e-6):
    """Central differences with respect to every token's log-probability."""
    result = np.zeros_like(new)
    for place in np.ndindex(new.shape):
        step = np.zeros_like(new)
        step[place] = h
        result[place] = (loss(new + step) - loss(new - step)) / (2 * h)
    return result


def whiten(x, mask, eps=1e-8):
    mean = token_mean(x, mask)
    variance = token_mean((x - mean) ** 2, mask) * mask.sum() / (mask.sum() - 1)
    return (x - mean) / np.sqrt(variance + eps) * mask


def verl_gspo(new, old, advantage, mask, low, high):
    ratio = np.exp(((new - old) * mask).sum(1) / mask.sum(1))[:, None]  # value of GSPO-token, gradient of GSPO
    return np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 1 - low, 1 + high))


def sapo(new, old, advantage, up, down):
    tau = np.where(advantage > 0, up, down)
    return -advantage * 4 / tau / (1 + np.exp(-tau * (np.exp(new - old) - 1)))


def verl_geometric_mean(new, old, advantage, mask, low, high):
    sign, logs = np.sign(advantage), new - old
    smaller = sign * np.minimum(sign * logs, sign * np.clip(logs, -low, high))
    count = mask.sum(1)
    return np.mean(-(advantage * mask).sum(1) / count * np.exp((smaller * mask).sum(1) / count))


def grpo(new, old, advantage, low, high, delta=None):
    """TRL's two-sided clip is verl's and Tunix's dual clip."""
    ratio = np.exp(new - old)
    first = ratio if delta is None else np.minimum(ratio, delta)
    return -np.minimum(first * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def covariances(advantage, new, mask):
    return (advantage - token_mean(advantage, mask)) * (new - token_mean(new, mask))


def verl_kl_cov(new, old, advantage, mask, fraction, coef, at):
    cov = np.where(mask == 1, covariances(advantage, at, mask), -np.inf)
    chosen = cov >= np.sort(cov.ravel())[-max(1, int(mask.sum() * fraction))]
    return -advantage * np.exp(new - old) + coef * chosen * np.abs(new - old)


def groupwise(score, function):
    """One number per group, for each of its members."""
    return np.array([function(score[g == GROUPS], g == GROUPS) for g in GROUPS])


# --- comparisons ----------------------------------------------------------------------------------------------------


def test_losses_with_gradients():
    """verl: gspo, sapo, geo_mean, kl_cov, vanilla. TRL: grpo, dr_grpo, bnpo/dapo, sapo, sequence-level ratios."""
    x = batch()
    new, old, mask, one, tokens = x["new"], x["old"], x["mask"], x["advantage"], x["tokens"]
    mean, last = {"by": "sequence_mean"}, {"by": "sequence_sum", "length": 11.0}
    cases = {
        "verl gspo": (
            f.gspo,
            "advantage",
            {"clip_eps": 0.02, "clip_eps_high": 0.03},
            mean,
            lambda new: sequence_mean(verl_gspo(new, old, one, mask, 0.02, 0.03), mask),
        ),
        "verl and TRL sapo": (
            f.sapo,
            "tokens",
            {"tau": 1.0, "tau_negative": 1.05},
            mean,
            lambda new: sequence_mean(sapo(new, old, tokens, 1.0, 1.05), mask),
        ),
        "verl geo_mean": (
            f.gmpo,
            "advantage",
            {"clip_eps": 0.1, "clip_eps_high": 0.2},
            mean,
            lambda new: verl_geometric_mean(new, old, one, mask, 0.1, 0.2),
        ),
        "verl kl_cov": (
            lambda *a, **k: f.kl_cov(*a, new.T, **k),
            "tokens",
            {"fraction": 0.2, "coef": 0.7},
            {},
            lambda at: token_mean(verl_kl_cov(at, old, tokens, mask, 0.2, 0.7, new), mask),
        ),
        "TRL grpo": (
            f.clipped_surrogate,
            "tokens",
            {"clip_eps": 0.1, "clip_eps_high": 0.2},
            mean,
            lambda new: sequence_mean(grpo(new, old, tokens, 0.1, 0.2), mask),
        ),
        "TRL dr_grpo": (
            f.clipped_surrogate,
            "tokens",
            {"clip_eps": 0.1},
            last,
            lambda new: (grpo(new, old, tokens, 0.1, 0.1) * mask).sum() / (B * 11.0),
        ),
        "TRL bnpo with delta": (
            f.clipped_surrogate,
            "tokens",
            {"clip_eps": 0.1, "dual_clip": 1.3},
            {},
            lambda new: token_mean(grpo(new, old, tokens, 0.1, 0.1, 1.3), mask),
        ),
        "verl seq-mean-token-sum": (
            f.clipped_surrogate,
            "tokens",
            {"clip_eps": 0.1},
            {"by": "sequence_sum"},
            lambda new: sequence_sum(grpo(new, old, tokens, 0.1, 0.1), mask),
        ),
    }

    def compare(x):
        results = {}
        for name, (loss, advantage, settings, way, _) in cases.items():

            def total(new, loss=loss, advantage=advantage, settings=settings, way=way):
                value = loss((new - x["old"]).T, x[advantage].T, mask=x["mask"].T, **settings)
                return f.aggregate(value, mask=x["mask"].T, **way)

            results[name] = jax.value_and_grad(total)(x["new"])
        return results

    for name, (value, gradient) in ours(compare).items():
        theirs = cases[name][-1]
        np.testing.assert_allclose(value, theirs(new), rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(gradient, slope(theirs, new), rtol=1e-6, atol=1e-8, err_msg=name)
        assert not gradient[mask == 0].any()


def test_gradients_with_constant_weights():
    """CISPO (verl: both bounds; TRL: the upper one), GPG, and GSPO-token: the weight of each token."""
    x = batch()
    ratio, mask, tokens, one = np.exp(x["new"] - x["old"]), x["mask"], x["tokens"], x["advantage"]
    shared = np.exp(((x["new"] - x["old"]) * mask).sum(1) / mask.sum(1))[:, None] * np.ones((1, T))
    expected = {
        "verl cispo": -np.clip(ratio, 0.9, 1.2) * tokens,
        "TRL cispo": -np.minimum(ratio, 1.2) * tokens,
        "verl gpg": -tokens,
        "verl gspo": np.where(one > 0, shared <= 1.03, shared >= 0.98) * -shared * one,
    }

    def gradients(x):
        losses = {
            "verl cispo": lambda r: f.cispo(r, x["tokens"].T, clip_eps=0.1, clip_eps_high=0.2, mask=x["mask"].T),
            "TRL cispo": lambda r: f.cispo(r, x["tokens"].T, clip_eps=1.0, clip_eps_high=0.2, mask=x["mask"].T),
            "verl gpg": lambda r: f.policy_gradient_loss(r, x["tokens"].T, mask=x["mask"].T),
            "verl gspo": lambda r: f.gspo(
                r, x["advantage"].T, clip_eps=0.02, clip_eps_high=0.03, level="token", mask=x["mask"].T
            ),
        }
        return {name: jax.grad(lambda r, g=g: g(r).sum())((x["new"] - x["old"]).T).T for name, g in losses.items()}

    for name, gradient in ours(gradients).items():
        np.testing.assert_allclose(gradient, expected[name] * mask, rtol=1e-6, atol=1e-12, err_msg=name)


def test_advantages_of_groups():
    """verl's and TRL's estimators with their constants; verl keeps the reward of a group of one, here it is 0."""
    x = batch()
    score, greedy, mask = x["score"], x["greedy"], x["mask"]
    several = np.array([(g == GROUPS).sum() > 1 for g in GROUPS])
    size, length = np.array([(g == GROUPS).sum() for g in GROUPS]), mask.sum(1)
    mean = groupwise(score, lambda r, _: r.mean())
    deviation = groupwise(score, lambda r, _: r.std(ddof=min(1, len(r) - 1)))
    rloo = several * (score - mean) * size / np.maximum(size - 1, 1)
    weighted = groupwise(score, lambda r, m: (length[m] * r).sum() / length[m].sum())
    expected = {
        "verl grpo": (score - mean) / (deviation + 1e-6),
        "TRL group": (score - mean) / (deviation + 1e-4),
        "TRL batch": (score - mean) / (score.std(ddof=1) + 1e-4),
        "verl dr_grpo": score - mean,
        "verl rloo": rloo,
        "verl opo": score - weighted,
        "verl remax": score - greedy,
        "verl reinforce_plus_plus_baseline": whiten((score - mean)[:, None] * mask, mask),
    }

    def advantages(x):
        group = functools.partial(f.group_advantage, x["score"], GROUPS)
        tokens = (group(scale=None)[:, None] * x["mask"]).T
        return {
            "verl grpo": group(),
            "TRL group": group(eps=1e-4),
            "TRL batch": group(scale="batch", eps=1e-4),
            "verl dr_grpo": group(scale=None),
            "verl rloo": group(scale=None, baseline="leave_one_out"),
            "verl opo": group(scale=None, baseline="length_weighted", length=x["mask"].sum(1)),
            "verl remax": group(scale=None, baseline=x["greedy"]),
            "verl reinforce_plus_plus_baseline": f.advantage_normalize(tokens, ddof=1, mask=x["mask"].T).T,
        }

    for name, advantage in ours(advantages).items():
        np.testing.assert_allclose(advantage, expected[name], rtol=1e-6, atol=1e-9, err_msg=name)


def ends(mask):
    """1 at the last unmasked token of each sequence."""
    return (np.arange(T) == T - 1 - np.argmax(mask[:, ::-1], axis=1)[:, None]).astype(float)


def test_gae_skips_tokens_of_tools():
    """verl's and Tunix's recursion, which keeps advantage and next value where the mask is 0, and whitens."""
    x = batch()
    mask, advantage = x["mask"], np.zeros((B, T))
    later, following = np.zeros(B), np.zeros(B)
    for t in reversed(range(T)):
        error = x["reward"][:, t] + 0.97 * following - x["value"][:, t] + 0.97 * 0.9 * later
        later = np.where(mask[:, t] == 1, error, later)
        following = np.where(mask[:, t] == 1, x["value"][:, t], following)
        advantage[:, t] = later

    def estimate(x):
        value = x["value"].T
        next_value = f.next_values(value, jnp.zeros(B), mask=mask.T)
        out = f.gae(
            x["reward"].T, value, next_value, ends(mask).T, gamma=0.97, gae_lambda=0.9, mask=mask.T, mask_mode="skip"
        )
        return out.advantage.T, out.target.T, f.advantage_normalize(out.advantage, ddof=1, mask=mask.T).T

    plain, target, white = ours(estimate)
    close(plain, advantage * mask)
    close(target, (advantage + x["value"]) * mask)
    close(white, whiten(advantage, mask))


@pytest.mark.parametrize("implementation", ["scan", "associative"])
def test_skipping_is_removing(implementation):
    """Masked steps change nothing, whatever they hold; the slow reference gets the steps without them."""
    rng = np.random.default_rng(2)
    mask = rng.random((T, 3)) < 0.6
    mask[[0, -1]] = True
    value, reward, last = rng.normal(size=(T, 3)), rng.normal(size=(T, 3)), rng.normal(size=3)
    terminated, truncated = rng.random((2, T, 3)) < 0.2
    truncated &= ~terminated
    hidden = lambda x, other: jnp.asarray(np.where(mask, x, other), jnp.float32)  # noqa: E731

    @jax.jit
    def estimate(reward, value, terminated, truncated):
        final = 2 * jnp.where(mask, value, 0)
        next_value = f.next_values(value, jnp.asarray(last), truncated, final, mask=mask)
        steps = (reward, value, next_value, terminated, truncated)
        return f.gae(*steps, gamma=0.9, gae_lambda=0.8, mask=mask, mask_mode="skip", implementation=implementation)

    out = estimate(hidden(reward, np.nan), hidden(value, np.nan), hidden(terminated, 1), hidden(truncated, 1))
    for n in range(3):
        kept = mask[:, n]
        v = value[kept, n]
        following = np.where(truncated[kept, n], 2 * v, np.append(v[1:], last[n]))
        steps = (reward[kept, n], v, following, terminated[kept, n], truncated[kept, n])
        advantage, target = slow_gae(*steps, gamma=0.9, gae_lambda=0.8)
        np.testing.assert_allclose(out.advantage[kept, n], advantage, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(out.target[kept, n], target, rtol=1e-5, atol=1e-5)
        assert not np.any(out.advantage[~kept, n])
        assert not np.any(out.target[~kept, n])


def test_padding_has_nothing_to_bootstrap_from():
    mask = np.array([1, 0, 1, 0, 0])
    steps = (jnp.ones(5), jnp.ones(5), jnp.ones(5))
    estimate = functools.partial(f.gae, *steps, gamma=1.0, gae_lambda=1.0, mask=mask, mask_mode="skip")
    with pytest.raises(ValueError, match="padding follows"):
        estimate(np.zeros(5))
    assert np.isnan(jax.jit(estimate)(np.zeros(5)).advantage[:3:2]).all()
    end = np.array([0, 0, 1, 0, 0])
    np.testing.assert_array_equal(estimate(end).advantage, [1, 0, 0, 0, 0])
    np.testing.assert_array_equal(estimate(np.zeros(5), end).advantage, [2, 0, 1, 0, 0])


# --- numbers of Tunix itself ----------------------------------------------------------------------------------------


def tunix(name):
    return TUNIX[f"input/{name}"]


def test_tunix_advantages():
    score = jnp.asarray(tunix("score"))
    group = np.arange(len(score)) // 3
    settings = {"grpo": {}, "drgrpo": {"scale": None}, "rloo": {"scale": None, "baseline": "leave_one_out"}}
    for name, setting in settings.items():
        advantage = f.group_advantage(score, group, **setting)
        np.testing.assert_allclose(advantage, TUNIX[f"advantage/{name}"], rtol=1e-6, atol=1e-6, err_msg=name)


def test_tunix_gae():
    reward, value = jnp.asarray(tunix("reward").T), jnp.asarray(tunix("value").T)
    for name in ("mask", "tool_mask"):
        mask = tunix(name)
        last = (np.arange(mask.shape[1]) == mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)[:, None]).T
        following = f.next_values(value, jnp.zeros(len(mask)), mask=mask.T)
        out = f.gae(reward, value, following, last, gamma=0.99, gae_lambda=0.9, mask=mask.T, mask_mode="skip")
        advantage = f.advantage_normalize(out.advantage, ddof=1, mask=mask.T)
        for ours, theirs in ((advantage, "advantage"), (out.target, "target")):
            recorded = np.where(mask, TUNIX[f"gae/{name}/{theirs}"], 0)
            np.testing.assert_allclose(ours.T, recorded, rtol=1e-6, atol=1e-6)


def test_tunix_losses():
    new, old, reference = (jnp.asarray(tunix(name).T) for name in ("log_prob", "old_log_prob", "reference_log_prob"))
    mask, length = tunix("tool_mask").T, new.shape[0]
    advantage = jnp.broadcast_to(tunix("advantage"), new.shape)
    clip = {"clip_eps": 0.2, "clip_eps_high": 0.28, "mask": mask}
    surrogate = lambda new, **more: f.clipped_surrogate(new - old, advantage, **(clip | more))  # noqa: E731
    divergence = lambda new, k: f.approx_kl(reference - new, estimator=k, mask=mask)  # noqa: E731
    cases = {
        "grpo/token-mean": (lambda new: surrogate(new), {}),
        "grpo/sequence-mean-token-mean": (lambda new: surrogate(new), {"by": "sequence_mean"}),
        "grpo/sequence-mean-token-scale": (lambda new: surrogate(new), {"by": "sequence_sum", "length": length}),
        "grpo/seq-mean-token-sum": (lambda new: surrogate(new), {"by": "sequence_sum"}),
        "grpo/dual_clip": (lambda new: surrogate(new, dual_clip=1.1), {}),
        "grpo/kl": (lambda new: surrogate(new) + 0.04 * divergence(new, "k1"), {}),
        "grpo/low_var_kl": (lambda new: surrogate(new) + 0.04 * divergence(new, "k3"), {}),
        "gspo_token": (
            lambda new: f.gspo(new - old, advantage, level="token", clip_eps=0.02, clip_eps_high=0.03, mask=mask),
            {"by": "sequence_mean"},
        ),
        "ppo": (lambda new: surrogate(new, clip_eps_high=None, dual_clip=3.0), {}),
    }
    assert {name.partition("/")[2] for name in TUNIX if name.startswith("loss/")} == set(cases)

    @jax.jit
    def all_of_them(new):
        return {
            name: jax.value_and_grad(lambda new, loss=loss, way=way: f.aggregate(loss(new), mask=mask, **way))(new)
            for name, (loss, way) in cases.items()
        }

    for name, (value, gradient) in all_of_them(new).items():
        np.testing.assert_allclose(value, TUNIX[f"loss/{name}"], rtol=1e-6, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(gradient.T, TUNIX[f"gradient/{name}"], rtol=1e-6, atol=1e-6, err_msg=name)
