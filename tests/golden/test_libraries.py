"""The presets of `ppo_parts.recipes.libraries` against one update of each library's own code, to 1e-5.

The recordings have the rollout, the parameters before each step and the rows of each minibatch. All else is computed:
advantages, targets, the loss of every minibatch, and the parameters after every step. Both sides compute in float64, so
only the libraries' small constants remain, such as the 1e-6 that torch adds to a gradient's norm.
"""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import testing
from ppo_parts._core.sampling import Sampler
from ppo_parts.recipes import libraries
from tests.golden_traces import GOLDEN, Arrays, Tape, load, read_steps, record_estimates, record_steps, replay

pytestmark = pytest.mark.usefixtures("double_precision")
HIDDEN, ACTIONS = 8, 2


def split(flat: np.ndarray, z: Arrays) -> dict[str, jax.Array]:
    """Split the recorded vector into the parameters of two networks, each one vector, which compiles faster."""
    size = HIDDEN * (z["obs"].shape[-1] + 2) + 1  # size of the value network
    return {"policy": jnp.asarray(flat[:-size]), "value": jnp.asarray(flat[-size:])}


def mlp(flat: jax.Array, x: jax.Array, outputs: int) -> jax.Array:
    """Evaluate a tanh layer and a linear one, with weights in torch's layout `[out, in]`; `flat` may be longer."""
    inputs = x.shape[-1]
    sizes = np.cumsum([HIDDEN * inputs, HIDDEN, outputs * HIDDEN, outputs])
    w0, b0, w1, b1 = (flat[end - size : end] for end, size in zip(sizes, np.diff(sizes, prepend=0), strict=True))
    hidden = jnp.tanh(x.reshape(-1, inputs) @ w0.reshape(HIDDEN, inputs).T + b0[None])
    return (hidden @ w1.reshape(outputs, HIDDEN).T + b1[None]).reshape((*x.shape[:-1], outputs))


def evaluate(params: Any, batch: pp.Batch, tanh: bool = False) -> pp.Output:
    """Evaluate the networks; brax's policy squashes actions, and its deviation depends on the state."""
    out, value = mlp(params["policy"], batch.obs, (1 + tanh) * ACTIONS), mlp(params["value"], batch.obs, 1)[..., 0]
    if not tanh:
        return pp.Output(pp.distributions.Normal(out, jnp.exp(params["policy"][-ACTIONS:])), value)
    loc, scale = jnp.split(out, 2, axis=-1)
    normal = pp.distributions.Normal(loc, jnp.logaddexp(scale, 0) + 0.001)
    return pp.Output(pp.distributions.TanhNormal(normal), value)


def record_of(case: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return a recording as `compare_update` reads it, the choices of its preset, and its networks."""
    z = load(f"libraries/{case}")
    meta, is_brax = json.loads(str(z["meta"])), "keys" in z
    fields = ("obs", "next_obs", "action", "log_prob", "value", "reward", "terminated", "truncated", "moments", "keys")
    record: dict[str, Any] = {name: z[name] for name in (*fields, "indices", "segments") if name in z}
    if not is_brax and case != "tianshou_options":  # their recorded estimates are those of a later epoch or minibatch
        record |= {name: z[name] for name in ("advantage", "target")}
    if meta["preset"] == "rl_games":  # it does not shuffle
        record["segments"] = np.tile(np.arange(4).reshape(1, 2, 2), (3, 1, 1))
    if "behavior" in z:
        record["behavior"] = split(z["behavior"], z)
    # brax computes a part of the entropy in closed form, with the same gradient.
    record |= {"params": split(z["params"][0], z), "loss_without_entropy" if is_brax else "loss": z["losses"]}
    each = [split(params, z) for params in z["params"][1:]]
    record["params_after"] = {name: np.stack([x[name] for x in each]) for name in record["params"]}
    return record, meta, functools.partial(evaluate, tanh=is_brax)


@pytest.mark.parametrize("case", sorted(path.stem for path in (GOLDEN / "libraries").glob("*.npz")))
def test_preset_reproduces_the_library(case):
    record, meta, network = record_of(case)
    pipeline, optimizer = getattr(libraries, meta["preset"])(**meta["options"])
    found = testing.compare_update(record, pipeline, network, optimizer, rtol=1e-5)
    assert found.first is None, found
    numbers = record.keys() & {"advantage", "target", "loss", "loss_without_entropy"}
    assert {*found.compared} == {"log_prob", "value", *numbers, "params_after/policy", "params_after/value"}


def test_a_free_run_with_estimates_of_each_epoch_reproduces_tianshou():
    """The recorded estimates are those of the last epoch."""
    z, (record, meta, network) = load("libraries/tianshou_options"), record_of("tianshou_options")
    pipeline, optimizer = libraries.tianshou(**meta["options"])
    parts, estimates, steps = [*pipeline.parts], Tape(), Tape()
    (at,) = (i for i, part in enumerate(parts) if isinstance(part, Sampler))
    sampler = pp.given_indices(record["indices"], refresh=parts[at].refresh)
    recorder = record_estimates(estimates, {name: name for name in ("advantage", "target")})
    pipeline = pp.chain(*parts[:at], recorder, sampler, *parts[at + 1 :])
    fields = ("obs", "next_obs", "action", "log_prob", "value", "reward", "terminated", "truncated")
    ((state, _),) = replay(
        lambda: pp.learner(network, pipeline, optax.chain(optimizer, record_steps(steps, {"loss": "loss"}))),
        record["params"],
        [((), pp.Batch(**{name: jnp.asarray(record[name]) for name in fields}))],
    )
    for name, x in estimates.read().items():
        np.testing.assert_allclose(x[-1], z[name], rtol=1e-5, atol=1e-7)
    ours, numbers = read_steps(steps, state.params)
    np.testing.assert_allclose(numbers["loss"], z["losses"], rtol=1e-5, atol=1e-7)
    for name, params in record["params_after"].items():
        traveled = np.abs(params - record["params"][name][None]).max(axis=1, keepdims=True)
        assert np.all(np.abs(ours[name] - params) <= 1e-5 * traveled)
