"""The bridge to Tunix, with a registry in place of Tunix's, against numbers recorded from Tunix 0.1.7."""

import functools
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts.bridges import tunix as bridge

TUNIX = np.load(Path(__file__).parent / "golden" / "tunix.npz")


def given(name):
    return TUNIX[f"input/{name}"]


class Registry:
    """The interface of Tunix's registry."""

    def __init__(self):
        self.kept = {}

    def register(self, category, name):
        return lambda function: self.kept.setdefault((category, name), function)

    def get(self, category, name):
        return self.kept[category, name]


@pytest.fixture
def registry(monkeypatch):
    """Modules with what the bridge uses of Tunix and flax; the network is the log-probabilities themselves."""
    modules = {
        "tunix": {},
        "tunix.rl": {},
        "tunix.rl.algo_core": {},
        "tunix.rl.function_registry": {"default_registry": Registry()},
        "tunix.rl.common": {
            "compute_per_token_logps": lambda graphdef, state, **_: state,
            "aggregate_loss": lambda loss, mask, mode: jnp.sum(loss * mask) / jnp.sum(mask),
            "compute_kl_divergence": lambda new, reference, mode, clamp_value: new - reference,
        },
        "flax.nnx": {"split": lambda model: (None, model)},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["tunix.rl.function_registry"].default_registry


def example(**changes):
    fields = {
        "prompt_ids": None,
        "completion_ids": None,
        "completion_mask": jnp.asarray(given("tool_mask")),
        "advantages": jnp.asarray(given("advantage")),
        "ref_per_token_logps": jnp.asarray(given("reference_log_prob")),
        "old_per_token_logps": jnp.asarray(given("old_log_prob")),
    }
    return types.SimpleNamespace(**{**fields, **changes})


def test_registered_functions_equal_tunix(registry):
    """The functions with the names of Tunix's own return the numbers that were recorded from those."""
    names = bridge.register()
    assert set(names) == {f"ppo_parts/{name}" for name in (*bridge.LOSSES, *bridge.ADVANTAGES, "gae")}
    assert {name for _, name in registry.kept} == set(names)
    for name in ("grpo", "drgrpo", "rloo"):
        advantage = registry.get("advantage_estimator", f"ppo_parts/{name}")(given("score"), num_generations=3)
        np.testing.assert_allclose(advantage, TUNIX[f"advantage/{name}"], rtol=1e-6, atol=1e-6)
    gae = functools.partial(registry.get("advantage_estimator", "ppo_parts/gae"), gamma=0.99, gae_lambda=0.9)
    mask = given("tool_mask")
    out = jax.jit(gae)(rewards=given("reward"), values=given("value"), completion_mask=mask)
    for actual, name in zip(out, ("advantage", "target"), strict=True):
        np.testing.assert_allclose(actual, np.where(mask, TUNIX[f"gae/tool_mask/{name}"], 0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("beta", "recorded"), [(0.0, "grpo/token-mean"), (0.04, "grpo/kl")])
def test_registered_loss_equals_tunix(registry, beta, recorded):
    bridge.register()
    policy_loss = registry.get("policy_loss_fn", "ppo_parts/clip_higher")
    config = types.SimpleNamespace(beta=beta, loss_agg_mode="token-mean")
    loss = lambda new: policy_loss(new, example(), config, pad_id=0, eos_id=1)  # noqa: E731
    (value, aux), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(given("log_prob")))
    np.testing.assert_allclose(value, TUNIX[f"loss/{recorded}"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, TUNIX[f"gradient/{recorded}"], rtol=1e-6, atol=1e-6)
    assert np.isfinite(aux["kl"])


def test_registered_loss_uses_what_the_example_has(registry):
    """Weights of the sampler, one advantage per token, and no log-probabilities of another policy."""
    bridge.register_loss("own", pp.functional.policy_gradient_loss)
    policy_loss, mask = registry.get("policy_loss_fn", "own"), given("tool_mask")
    tokens = given("advantage")[:, None] * np.ones(mask.shape)
    changed = example(
        advantages=tokens, sampler_is_weights=2 * mask, old_per_token_logps=None, ref_per_token_logps=None
    )
    config = types.SimpleNamespace()
    gradient = jax.grad(lambda new: policy_loss(new, changed, config, 0, 1)[0])(jnp.asarray(given("log_prob")))
    np.testing.assert_allclose(gradient, -2 * tokens * mask / mask.sum(), rtol=1e-6)


def test_an_estimator_of_tunix_in_a_chain(registry):
    registry.register("advantage_estimator", "grpo")(lambda rewards, num_generations: rewards - rewards.mean())
    mask = jnp.array([[1, 1], [1, 0]])
    batch = pp.Batch(log_prob=jnp.zeros((2, 2)), mask=mask, per_segment={"score": jnp.array([1.0, 3.0])})
    part = bridge.advantage("grpo", group=2)
    out, _ = part.update(batch, part.init(None, None), pp.Context(key=None))
    np.testing.assert_array_equal(out.advantage, [[-1, 1], [-1, 0]])
