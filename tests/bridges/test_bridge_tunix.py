"""The bridge to Tunix against numbers of Tunix 0.1.7: with a stand-in and, where it is installed, with Tunix itself."""

import functools
import importlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts.bridges import tunix as bridge
from tests.golden_traces import load

TUNIX = load("tunix")


def given(name):
    return TUNIX[f"input/{name}"]


def log_prob_of(graphdef, state, **_):
    """Return the "network", which is the log-probabilities themselves, and logits of three equal options."""
    return state, jnp.zeros((*state.shape, 3))


def unsplit(model):
    return None, model


@pytest.fixture(params=["a stand-in", "Tunix"])
def registry(request, monkeypatch):
    """Return Tunix's own registry, or one from modules with what the bridge uses of Tunix and flax."""
    if request.param == "Tunix":
        pytest.importorskip("tunix", reason="Tunix is not installed")
        monkeypatch.setattr("tunix.rl.common.compute_per_token_logps", log_prob_of)
        monkeypatch.setattr("flax.nnx.split", unsplit)
        return importlib.import_module("tunix.rl.function_registry").default_registry
    kept = {}
    register = lambda category, name: functools.partial(kept.setdefault, (category, name))  # noqa: E731
    own = types.SimpleNamespace(register=register, get=lambda category, name: kept[category, name])
    aggregate = lambda loss, mask, mode: jnp.sum(loss * mask) / jnp.sum(mask)  # noqa: E731
    divergence = lambda new, reference, mode, clamp_value: new - reference  # noqa: E731
    losses = {"aggregate_loss": aggregate, "compute_kl_divergence": divergence}
    modules = {name: {} for name in ("tunix", "tunix.rl", "tunix.rl.algo_core")} | {
        "tunix.rl.function_registry": {"default_registry": own}, "flax.nnx": {"split": unsplit},
        "tunix.rl.common": {"compute_per_token_logps": log_prob_of, **losses},
    }  # fmt: skip
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["tunix.rl.function_registry"].default_registry


def example(**changes):
    fields = {
        "prompt_ids": None, "completion_ids": None, "completion_mask": jnp.asarray(given("tool_mask")),
        "advantages": jnp.asarray(given("advantage")), "ref_per_token_logps": jnp.asarray(given("reference_log_prob")),
        "old_per_token_logps": jnp.asarray(given("old_log_prob")),
    }  # fmt: skip
    return types.SimpleNamespace(**{**fields, **changes})


def loss_of(registry, name="ppo_parts/clip_higher", given_example=None, **settings):
    """Return a registered loss as a function of new log-probabilities; settings are those of Tunix's configuration."""
    bridge.register()
    loss, config = registry.get("policy_loss_fn", name), types.SimpleNamespace(**settings)
    return lambda new: loss(new, given_example or example(), config, pad_id=0, eos_id=1)


NEW = jnp.asarray(given("log_prob"))


def test_registered_functions_equal_tunix(registry):
    """The functions that have the names of Tunix's own return the numbers recorded from those."""
    names = bridge.register()
    assert set(names) == {f"ppo_parts/{name}" for name in (*bridge.LOSSES, *bridge.ADVANTAGES, "gae")}
    losses = {f"ppo_parts/{name}" for name in bridge.LOSSES}
    assert all(registry.get("policy_loss_fn" if name in losses else "advantage_estimator", name) for name in names)
    for name in ("grpo", "drgrpo", "rloo"):
        advantage = registry.get("advantage_estimator", f"ppo_parts/{name}")(given("score"), num_generations=3)
        np.testing.assert_allclose(advantage, TUNIX[f"advantage/{name}"], rtol=1e-6, atol=1e-6)
    gae = functools.partial(registry.get("advantage_estimator", "ppo_parts/gae"), gamma=0.99, gae_lambda=0.9)
    mask = given("tool_mask")
    out = jax.jit(gae)(rewards=given("reward"), values=given("value"), completion_mask=mask)
    for actual, name in zip(out, ("advantage", "target"), strict=True):
        np.testing.assert_allclose(actual, np.where(mask, TUNIX[f"gae/tool_mask/{name}"], 0), rtol=1e-6, atol=1e-6)


def test_registered_loss_equals_tunix(registry):
    """PPO's `beta` is already a penalty in the reward, but its `entropy_coef` belongs to the loss."""
    plain, penalized, entropy = TUNIX["loss/grpo/token-mean"], TUNIX["loss/grpo/kl"], np.log(3)
    for recorded, settings in {"grpo/token-mean": {"beta": 0.0}, "grpo/kl": {"beta": 0.04}}.items():
        loss = loss_of(registry, **settings, loss_agg_mode="token-mean")
        (value, aux), gradient = jax.value_and_grad(loss, has_aux=True)(NEW)
        np.testing.assert_allclose(value, TUNIX[f"loss/{recorded}"], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(gradient, TUNIX[f"gradient/{recorded}"], rtol=1e-6, atol=1e-6)
        assert np.isfinite(aux["kl"])
    impossible = example(ref_per_token_logps=jnp.full_like(NEW, -jnp.inf))
    assert np.isfinite(loss_of(registry, given_example=impossible, beta=0.0)(NEW)[0])  # the divergence is infinite
    rewarded = ((plain, {}), (plain - 0.1 * entropy, {"entropy_coef": 0.1}), (penalized, {"kl_coef": 0.04}))
    for expected, settings in rewarded:
        value, aux = loss_of(registry, beta=0.5, **settings)(NEW)
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(aux["loss/entropy"], entropy, rtol=1e-6)


def test_registered_loss_uses_what_the_example_has(registry):
    """It has weights of the sampler, one advantage per token, and no log-probabilities of another policy."""
    bridge.register_loss("own", pp.functional.policy_gradient_loss)
    mask = given("tool_mask")
    tokens = given("advantage")[:, None] * np.ones(mask.shape)
    absent = dict.fromkeys(("old_per_token_logps", "ref_per_token_logps"))
    loss = loss_of(registry, "own", example(advantages=tokens, sampler_is_weights=2 * mask, **absent))
    gradient, _ = jax.grad(loss, has_aux=True)(NEW)
    np.testing.assert_allclose(gradient, -2 * tokens * mask / mask.sum(), rtol=1e-6)


def test_options_that_cannot_be_drawn_leave_the_loss_finite(registry, monkeypatch):
    """The logit of a padded vocabulary is -inf; the entropy is part of the loss only if it has a coefficient."""

    def padded(graphdef, state, **_):
        return state[..., 0], jnp.log(state).at[..., 2].set(-jnp.inf)

    monkeypatch.setattr(sys.modules["tunix.rl.common"], "compute_per_token_logps", padded)
    new = jnp.broadcast_to(NEW[..., None], (*NEW.shape, 3)) + 9.0 + jnp.arange(3.0)[None, None]
    for settings in ({}, {"entropy_coef": 0.1}):
        gradient, aux = jax.grad(loss_of(registry, **settings), has_aux=True)(new)
        assert 0.69 < float(aux["entropy"]) < np.log(2)  # the entropy of two options that are almost equal
        assert np.isfinite(gradient).all()
        assert bool(jnp.any(gradient[..., 1])) == bool(settings)  # this is one of the options that were not taken


def test_registered_losses_measure_what_learners_log(registry):
    _, aux = loss_of(registry, "ppo_parts/clipped_surrogate", loss_agg_mode="token-mean")(NEW)
    undefined = {"pg_clipfrac", "pg_clipfrac_lower", "pg_loss/clipped_mean"}
    summed = {"kl", "kl_loss", "pg_loss", "entropy", "loss/entropy"}
    mask, ratio = given("tool_mask") > 0, np.exp(given("log_prob") - given("old_log_prob"))
    tokens = np.broadcast_to(given("advantage")[:, None], mask.shape)
    expected = {
        "is_ratio/mean": ratio[mask].mean(), "is_ratio/max": ratio[mask].max(), "is_ratio/min": ratio[mask].min(),
        "ppo_kl": -np.log(ratio)[mask].mean(), "log_ratio/abs_mean": np.abs(np.log(ratio))[mask].mean(),
        "pg_loss/unclipped_mean": -(ratio * tokens)[mask].mean(), "advantage/abs_mean": np.abs(tokens)[mask].mean(),
        "advantage/max": tokens[mask].max(), "advantage/min": tokens[mask].min(), "advantage/nonzero_frac": 1,
        "sampler_is/weight_mean": 1, "sampler_is/weight_min": 1,
    }  # fmt: skip
    assert set(aux) == undefined | summed | set(expected)  # the learners of Tunix 0.1.7 log these
    for name, value in expected.items():
        np.testing.assert_allclose(aux[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_what_cannot_be_registered_is_refused_at_once_and_packed_sequences_later(registry):
    """Rewards that do not form whole groups are refused, too, when they are given."""
    cispo = pp.functional.cispo
    for wrong, says in (
        (lambda: bridge.register_loss("z", 3), "not callable"),
        (lambda: bridge.register_loss("z", cispo, clip=3), "clip"),
        (lambda: bridge.register_advantage("z", scael=3), "scael"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            wrong()
    bridge.register_advantage("mine")
    with pytest.raises(ValueError, match=r"^mine: num_generations=2 must divide the 5 rewards"):
        registry.get("advantage_estimator", "mine")(jnp.arange(5.0), num_generations=2)
    packed = example(segment_ids=jnp.ones(given("tool_mask").shape))
    with pytest.raises(ValueError, match=r"ppo_parts/gspo: .* several sequences into a row"):
        loss_of(registry, "ppo_parts/gspo", packed)(NEW)
    loss_of(registry, "ppo_parts/cispo", packed)(NEW)
