"""The presets of `recipes.libraries` against one update of each library's own code, to 1e-5.

The recordings have the rollout, the first parameters and the rows of each minibatch; all else comes out of
`learner.update`: advantages, targets, the loss of every minibatch, and the parameters after every step. Both sides
compute in float64, so what is left are the libraries' small constants, such as the 1e-6 that torch adds to a gradient's
norm.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from recipes import libraries

from .golden_traces import Arrays, blank

FOLDER = Path(__file__).parent / "golden" / "libraries"
HIDDEN = 8


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def params_of(flat: jax.Array, z: Arrays) -> dict[str, dict[str, jax.Array]]:
    """The recorded vector as the parameters of two networks, `w0` and `w1` in torch's layout `[out, in]`."""
    obs, actions = z["obs"].shape[-1], z["action"].shape[-1]
    shapes = {
        "policy": {"w0": (HIDDEN, obs), "b0": (HIDDEN,), "w1": (actions, HIDDEN), "b1": (actions,), "log_std": (actions,)},
        "value": {"w0": (HIDDEN, obs), "b0": (HIDDEN,), "w1": (1, HIDDEN), "b1": (1,)},
    }  # fmt: skip
    params: dict[str, dict[str, jax.Array]] = {}
    start = 0
    for network, leaves in shapes.items():
        params[network] = {}
        for name, shape in leaves.items():
            params[network][name] = jnp.reshape(flat[start : start + np.prod(shape)], shape)
            start += int(np.prod(shape))
    assert start == len(flat)
    return params


def flat_of(params: dict[str, dict[str, jax.Array]]) -> jax.Array:
    """The inverse of `params_of`."""
    order = ("w0", "b0", "w1", "b1", "log_std")
    return jnp.concatenate([jnp.ravel(net[name]) for net in params.values() for name in order if name in net])


def evaluate(params: Any, batch: pp.Batch) -> pp.Output:
    def mlp(p: dict[str, jax.Array]) -> jax.Array:
        hidden = jnp.tanh(jnp.einsum("...i,oi->...o", batch.obs, p["w0"]) + _last(p["b0"], batch.obs))
        return jnp.einsum("...i,oi->...o", hidden, p["w1"]) + _last(p["b1"], batch.obs)

    policy = pp.distributions.Normal(mlp(params["policy"]), jnp.exp(params["policy"]["log_std"]))
    return pp.Output(policy, mlp(params["value"])[..., 0])


def _last(bias: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.reshape(bias, (1,) * (like.ndim - 1) + bias.shape)


def rollout(z: Arrays, params: Any) -> pp.Batch:
    """The recorded rollout, which bootstraps from the value of the observation that followed."""
    here, following = (evaluate(params, pp.Batch(obs=jnp.asarray(z[name]))) for name in ("obs", "next_obs"))
    np.testing.assert_allclose(here.value, z["value"], rtol=1e-9, atol=1e-12)  # the two sides have the same networks
    np.testing.assert_allclose(here.distribution.log_prob(z["action"]), z["log_prob"], rtol=1e-9, atol=1e-12)
    fields = ("obs", "next_obs", "action", "log_prob", "value", "reward", "terminated", "truncated")
    recorded = {name: jnp.asarray(z[name]) for name in fields}
    return pp.Batch(**recorded, next_value=following.value, behavior=here.distribution)


def record_steps(length: int, size: int) -> optax.GradientTransformationExtraArgs:
    """An optimizer that changes nothing and writes down losses, and the parameters at which they were taken."""

    def update(grads: Any, tape: Any, params: Any, *, value: jax.Array, **extra: Any) -> Any:
        return grads, tape.write({"losses": value, "params": flat_of(params)})

    row = {"losses": jnp.zeros(()), "params": jnp.zeros(size)}
    return optax.GradientTransformationExtraArgs(lambda params: blank(length, row), update)


def keep_estimates(like: Arrays) -> pp.Part:
    """A part whose state is the last advantage and target that it has seen."""
    names = ("advantage", "target")
    return pp.Part(
        init=lambda params, key: {name: jnp.zeros(like[name].shape) for name in names},
        update=lambda batch, state, context: (batch, {name: getattr(batch, name) for name in names}),
        name="estimates",
    )


def replay(z: Arrays, options: dict[str, Any], preset: Any) -> Arrays:
    """What ours makes of the recorded rollout."""
    pipeline, optimizer = preset(**options)
    (at,) = (i for i, part in enumerate(pipeline.parts) if hasattr(part, "refresh"))
    known = pp.given_indices(z["indices"], refresh=pipeline.parts[at].refresh)
    pipeline = pp.chain(*pipeline.parts[:at], keep_estimates(z), known, *pipeline.parts[at + 1 :])
    steps = record_steps(z["indices"].shape[0] * z["indices"].shape[1], z["params"].shape[1])
    learner = pp.learner(evaluate, pipeline, optax.chain(steps, optimizer))
    params = params_of(jnp.asarray(z["params"][0]), z)
    state, metrics = jax.jit(learner.update)(jax.random.key(0), learner.init(params), rollout(z, params))
    tape = state.opt_state[0].read()
    history = np.concatenate([tape["params"], flat_of(state.params)[None]])
    return pp.part_state(state, pipeline, "estimates") | {"losses": tape["losses"], "params": history}


@pytest.mark.parametrize("case", sorted(path.stem for path in FOLDER.glob("*.npz")))
def test_preset_reproduces_the_library(case):
    z = dict(np.load(FOLDER / f"{case}.npz"))
    meta = json.loads(str(z["meta"]))
    ours = replay(z, meta["options"], getattr(libraries, meta["preset"]))
    assert len(ours["params"]) == len(z["params"])
    for name in ("advantage", "target", "losses"):
        np.testing.assert_allclose(ours[name], z[name], rtol=1e-5, atol=1e-7, err_msg=name)
    travelled = np.abs(z["params"] - z["params"][0]).max(axis=1)
    difference = np.abs(ours["params"] - z["params"]).max(axis=1)
    assert np.all(difference[1:] <= 1e-5 * travelled[1:]), difference / travelled
