"""What `scale_by_kl_adaptive_rate` does at its bounds and with its metric; libraries' recordings have its steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp


def test_kl_adaptive_rate_keeps_its_bounds():
    """Traced hyperparameters, also those of `inject_hyperparams`; out of range they are NaN, as nothing can raise."""

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


def test_kl_adaptive_rate_names_the_missing_metric():
    link, params = pp.optim.scale_by_kl_adaptive_rate(1e-3, target_kl=0.01), jnp.ones(())
    for extra in ({}, {"metrics": {"loss": params}}):
        with pytest.raises(ValueError, match=r"the metric 'approx_kl' does not exist.*policy_diagnostics"):
            link.update(params, link.init(params), **extra)
    with pytest.raises(ValueError, match="target_kl must lie in"):
        pp.optim.scale_by_kl_adaptive_rate(1e-3, target_kl=0.0)
