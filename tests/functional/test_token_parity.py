"""Parity with verl, TRL and Tunix: their own functions return the same numbers.

`record_tunix.py` recorded `golden/tunix.npz` with google-tunix 0.1.7, and `record_verl_trl.py` recorded
`golden/verl_trl.npz` with verl 0.9.1, TRL 1.16.0 and torch 2.13.0; commit 979fc147 has both in `tests/golden`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import functional as f
from tests.golden_traces import load
from tests.reference import gae as slow_gae

TUNIX, TORCH, T = load("tunix"), load("verl_trl"), 8


def recorded(name):
    """Return an input `[T, N]`; axis 0 is time here, and the batch in verl and TRL."""
    return TORCH[f"input/{name}"].T


def losses_of_torch():
    """Return by verl's or TRL's name: our loss per token, the aggregation, and the factor to their larger value."""
    old, tokens, one, mask = (recorded(name) for name in ("old", "tokens", "sequences", "mask"))
    full, empty = {"mask": mask}, {"mask": recorded("empty")}
    sequences = mask.shape[1]
    wide, narrow = {"clip_eps": 0.1, "clip_eps_high": 0.2}, {"clip_eps": 0.02, "clip_eps_high": 0.03}

    def surrogate(x, **settings):
        return f.clipped_surrogate(x - old, tokens, **(wide | settings))

    def divergence(x):
        return f.approx_kl(recorded("reference") - x)

    vanilla = functools.partial(surrogate, dual_clip=3.0)
    gmpo = functools.partial(f.gmpo, advantage=one, **wide)
    sapo = functools.partial(f.sapo, advantage=tokens, tau=1.0, tau_negative=1.05)
    kl_cov = functools.partial(f.kl_cov, fraction=0.2, coef=0.7, **full)
    mean, total = {"by": "sequence_mean"}, {"by": "sequence_sum"}
    all_of_them = (sequences - 1) / sequences  # theirs also counts the sequence that has no token
    return {
        "verl/vanilla/token-mean": (vanilla, empty, {}, 1),
        "verl/vanilla/token-sum": (vanilla, empty, {}, empty["mask"].sum()),
        "verl/vanilla/seq-mean-token-sum": (vanilla, empty, total, 1),
        "verl/vanilla/seq-mean-token-sum-norm": (vanilla, empty, total | {"length": T}, 1),
        "verl/vanilla/seq-mean-token-mean": (vanilla, empty, mean, 1),
        "verl/vanilla/scaled": (vanilla, full, total | {"length": 11}, 1),
        "verl/gspo": (lambda x: f.gspo(x - old, one, level="token", **narrow, **full), full, mean, 1),
        "verl/sapo": (lambda x: sapo(x - old), full, mean, 1),
        "verl/geo_mean": (lambda x: gmpo(x - old, **full), full, mean, 1),
        "verl/geo_mean/empty": (lambda x: gmpo(x - old, **empty), empty, mean, all_of_them),
        "verl/cispo": (lambda x: f.cispo(x - old, tokens, **wide), full, {}, 1),
        "verl/gpg": (lambda x: f.policy_gradient_loss(x - old, tokens), full, {}, 1),
        "verl/kl_cov": (lambda x: kl_cov(x - old, tokens, jax.lax.stop_gradient(x)), full, {}, 1),
        "trl/grpo": (surrogate, full, mean, 1),
        "trl/grpo/empty": (surrogate, empty, mean, all_of_them),
        "trl/grpo/delta": (functools.partial(surrogate, dual_clip=1.3), full, mean, 1),
        "trl/grpo/beta": (lambda x: surrogate(x) + 0.04 * divergence(x), full, mean, 1),
        "trl/grpo/beta_corrected": (lambda x: surrogate(x) + 0.04 * jnp.exp(x - old) * divergence(x), full, mean, 1),
        "trl/grpo/sequence": (lambda x: f.gspo(x - old, one, **narrow, **full), full, mean, 1),
        "trl/luspo": (lambda x: f.gspo(x - old, one, **narrow, **full), full, total, 1),
        "trl/bnpo": (surrogate, full, {}, 1),
        "trl/dapo": (surrogate, full, {}, 1),
        "trl/dr_grpo": (surrogate, full, total | {"length": 11}, 1),
        "trl/sapo": (lambda x: sapo(x - old), full, mean, 1),
        "trl/cispo": (lambda x: f.cispo(x - old, tokens, clip_eps=1.0, clip_eps_high=0.2), full, {}, 1),
    }


def losses_of_tunix():
    """Return the same for Tunix, whose advantages are compared through the bridge."""
    old, reference, mask = (TUNIX[f"input/{name}"].T for name in ("old_log_prob", "reference_log_prob", "tool_mask"))
    advantage, full = jnp.broadcast_to(TUNIX["input/advantage"], mask.shape), {"mask": mask}

    def surrogate(x, **settings):
        return f.clipped_surrogate(x - old, advantage, **({"clip_eps": 0.2, "clip_eps_high": 0.28} | full | settings))

    def penalized(x, estimator):
        return surrogate(x) + 0.04 * f.approx_kl(reference - x, estimator=estimator, **full)

    narrow = functools.partial(f.gspo, level="token", clip_eps=0.02, clip_eps_high=0.03, **full)
    total = {"by": "sequence_sum"}
    return {
        "/grpo/token-mean": (surrogate, full, {}, 1),
        "/grpo/sequence-mean-token-mean": (surrogate, full, {"by": "sequence_mean"}, 1),
        "/grpo/sequence-mean-token-scale": (surrogate, full, total | {"length": len(mask)}, 1),
        "/grpo/seq-mean-token-sum": (surrogate, full, total, 1),
        "/grpo/dual_clip": (functools.partial(surrogate, dual_clip=1.1), full, {}, 1),
        "/grpo/kl": (functools.partial(penalized, estimator="k1"), full, {}, 1),
        "/grpo/low_var_kl": (functools.partial(penalized, estimator="k3"), full, {}, 1),
        "/gspo_token": (lambda x: narrow(x - old, advantage), full, {"by": "sequence_mean"}, 1),
        "/ppo": (functools.partial(surrogate, clip_eps_high=None, dual_clip=3.0), full, {}, 1),
    }


RECORDED = ((losses_of_torch, TORCH, 1e-12), (losses_of_tunix, TUNIX, 1e-6))


@pytest.mark.parametrize(("losses", "numbers", "atol"), RECORDED)
def test_losses_of_other_libraries(losses, numbers, atol):
    """Compare values and gradients, but not the values of cispo and gpg, which lack the factor log pi here."""
    with jax.enable_x64(True):
        cases = losses()

        @jax.jit
        def all_of_them(x):
            total = lambda x, loss, mask, by, factor: f.aggregate(loss(x), **mask, **by) * factor  # noqa: E731
            return {name: jax.value_and_grad(total)(x, *case) for name, case in cases.items()}

        found = all_of_them(jnp.asarray(numbers["input/log_prob"].T))
    known = {name.replace("/", "/loss/", 1).lstrip("/") for name in cases}
    assert known == {name for name in numbers if "loss/" in name}
    for name, (value, gradient) in found.items():
        loss, slope = (numbers[name.replace("/", f"/{kind}/", 1).lstrip("/")] for kind in ("loss", "gradient"))
        if name.partition("/")[2] not in ("cispo", "gpg"):
            np.testing.assert_allclose(value, loss, rtol=1e-6, atol=atol, err_msg=name)
        np.testing.assert_allclose(gradient, slope.T, rtol=1e-6, atol=atol, err_msg=name)
        assert not gradient[cases[name][1]["mask"] == 0].any()


def test_advantages_of_verl_and_trl():
    """TRL computes its advantages inside the loop that generates, so its two formulas are repeated here."""
    score, group, mask = recorded("score"), recorded("group"), recorded("mask")
    last = (np.arange(T)[:, None] == T - 1 - np.argmax(mask[::-1], axis=0)).astype(float)

    @jax.jit
    def advantages():
        grouped = functools.partial(f.group_advantage, jnp.asarray(score), group)
        tokens = lambda **settings: grouped(**settings)[None] * mask  # noqa: E731
        value = jnp.asarray(recorded("value"))
        following = f.next_values(value, jnp.zeros(mask.shape[1]), mask=mask)
        gae = f.gae(recorded("reward"), value, following, last, gamma=0.97, gae_lambda=0.9, mask=mask, mask_mode="skip")
        white = functools.partial(f.advantage_normalize, ddof=1, mask=mask)
        verl = {
            "grpo": tokens(), "dr_grpo": tokens(scale=None), "rloo": tokens(scale=None, baseline="leave_one_out"),
            "opo": tokens(scale=None, baseline="length_weighted", length=mask.sum(0)),
            "remax": tokens(scale=None, baseline=recorded("greedy")),
            "reinforce_plus_plus_baseline": white(tokens(scale=None)),
            "reinforce_plus_plus": white(f.reward_to_go(jnp.asarray(recorded("reward")), mask=mask)),
            "gae": white(gae.advantage),
        }  # fmt: skip
        lite = grouped(scale="batch", ddof=0, eps=0.0)
        return verl, gae.target, grouped(eps=1e-4), grouped(scale="batch", eps=1e-4), lite

    with jax.enable_x64(True):
        verl, target, by_group, by_batch, lite = advantages()
    assert {name for name in TORCH if "/advantage/" in name} == {f"verl/advantage/{name}" for name in verl}
    for name, advantage in verl.items():
        expected = np.where(mask, TORCH[f"verl/advantage/{name}"].T, 0)
        np.testing.assert_allclose(advantage, expected, rtol=1e-6, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(np.asarray(target) * mask, TORCH["verl/return/gae"].T * mask, rtol=1e-6)
    same = group[:, None] == group
    centered = score - same @ score / same.sum(1)
    deviation = np.array([score[members].std(ddof=1) for members in same])
    np.testing.assert_allclose(by_group, centered / (deviation + 1e-4), rtol=1e-6)
    np.testing.assert_allclose(by_batch, centered / (score.std(ddof=1) + 1e-4), rtol=1e-6)
    np.testing.assert_allclose(lite, centered / score.std(), rtol=1e-6)  # Lite PPO's advantage


def test_skipping_is_removing_and_padding_has_nothing_to_bootstrap_from():
    """Masked steps change nothing, whatever they hold. The slow reference gets the steps without the masked ones."""
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
        return f.gae(*steps, gamma=0.9, gae_lambda=0.8, mask=mask, mask_mode="skip")

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
    mask = np.array([1, 0, 1, 0, 0])
    steps = (jnp.ones(5), jnp.ones(5), jnp.ones(5))
    estimate = functools.partial(f.gae, *steps, gamma=1.0, gae_lambda=1.0, mask=mask, mask_mode="skip")
    with pytest.raises(ValueError, match="padding follows"):
        estimate(np.zeros(5))
    assert np.isnan(jax.jit(estimate)(np.zeros(5)).advantage[:3:2]).all()
    end = np.array([0, 0, 1, 0, 0])
    np.testing.assert_array_equal(estimate(end).advantage, [1, 0, 0, 0, 0])
    np.testing.assert_array_equal(estimate(np.zeros(5), end).advantage, [2, 0, 1, 0, 0])
