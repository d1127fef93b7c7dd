"""The presets of `ppo_parts.recipes.libraries` against one update of each library's own code, to 1e-5.

The recordings have the rollout, the first parameters and the rows of each minibatch; all else comes out of
`learner.update`: advantages, targets, the loss of every minibatch, and the parameters after every step. Both sides
compute in float64, so what is left are the libraries' small constants, such as the 1e-6 that torch adds to a gradient's
norm.
"""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from benchmarks import differences
from ppo_parts import envs
from ppo_parts._core.sampling import Sampler
from ppo_parts.recipes import libraries
from ppo_parts.recipes.libraries.parts import Moments, clip_each_network
from tests.golden_traces import GOLDEN, Arrays, load, record_estimates, record_steps, replay, steps, tapes

HIDDEN, ACTIONS = 8, 2


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def split(flat: np.ndarray, z: Arrays) -> dict[str, jax.Array]:
    """The recorded vector as the parameters of two networks, each in one vector, which compiles faster."""
    size = HIDDEN * (z["obs"].shape[-1] + 2) + 1  # of the value network
    return {"policy": jnp.asarray(flat[:-size]), "value": jnp.asarray(flat[-size:])}


def mlp(flat: Any, x: Any, outputs: int, xp: Any) -> Any:
    """One tanh layer and a linear one, with weights in torch's layout `[out, in]`; `flat` may be longer."""
    inputs = x.shape[-1]
    sizes = np.cumsum([HIDDEN * inputs, HIDDEN, outputs * HIDDEN, outputs])
    w0, b0, w1, b1 = (flat[end - size : end] for end, size in zip(sizes, np.diff(sizes, prepend=0), strict=True))
    hidden = xp.tanh(x.reshape(-1, inputs) @ w0.reshape(HIDDEN, inputs).T + b0[None])
    return (hidden @ w1.reshape(outputs, HIDDEN).T + b1[None]).reshape((*x.shape[:-1], outputs))


def distribution(flat: Any, obs: Any, tanh: bool, xp: Any) -> Any:
    """The policy's; brax squashes actions, and its deviation depends on the state."""
    out = mlp(flat, obs, (1 + tanh) * ACTIONS, xp)
    if not tanh:
        return pp.distributions.Normal(jnp.asarray(out), jnp.exp(flat[-ACTIONS:]))
    loc, scale = xp.split(out, 2, axis=-1)
    return pp.distributions.TanhNormal(pp.distributions.Normal(jnp.asarray(loc), jnp.logaddexp(scale, 0) + 0.001))


def evaluate(params: Any, batch: pp.Batch, tanh: bool = False) -> pp.Output:
    acting = distribution(params["policy"], batch.obs, tanh, jnp)
    return pp.Output(acting, mlp(params["value"], batch.obs, 1, jnp)[..., 0])


def rollout(z: Arrays) -> pp.Batch:
    """The recorded rollout, which bootstraps from the value of the observation that followed."""
    behavior = jax.tree.map(np.asarray, split(z.get("behavior", z["params"][0]), z))
    value, next_value = (mlp(behavior["value"], z[name], 1, np)[..., 0] for name in ("obs", "next_obs"))
    np.testing.assert_allclose(value, z["value"], rtol=1e-9, atol=1e-12)  # the two sides have the same networks
    fields = ("obs", "next_obs", "action", "log_prob", "value", "reward", "terminated", "truncated")
    acting = distribution(behavior["policy"], z["obs"], "keys" in z, np)
    recorded = {name: jnp.asarray(z[name]) for name in fields}
    return pp.Batch(**recorded, next_value=jnp.asarray(next_value), behavior=acting)


def with_recorded_keys(part: pp.Part, keys: np.ndarray) -> pp.Part:
    """A part that draws its random numbers from brax's keys, `[E, K, 2]`."""
    table = jnp.asarray(keys)
    return dataclasses.replace(
        part,
        update=lambda batch, state, context: part.update(
            batch, state, context.replace(key=table[context.epoch, context.minibatch])
        ),
    )


def instrumented(pipeline: pp.Part, z: Arrays) -> pp.Part:
    """The chain with the recorded minibatches and keys, and with a tape of the estimates."""
    parts = list(pipeline.parts)
    (at,) = (i for i, part in enumerate(parts) if isinstance(part, Sampler))
    for name, axis in {"indices": "step", "segments": "segment"}.items():
        if name in z:  # rl_games does not shuffle, and its preset has its minibatches
            parts[at] = pp.given_indices(z[name], axis, refresh=parts[at].refresh)
    estimators = [i for i, part in enumerate(parts) if "advantage" in part.provides]
    before = [i for i in estimators if i < at]
    estimates = record_estimates(len(z["params"]), z["advantage"].shape)
    parts.insert(1 + (before[-1] if before else estimators[0]), estimates)
    if "keys" in z:
        parts = [with_recorded_keys(x, z["keys"]) if x.name == "entropy_bonus" else x for x in parts]
    return pp.chain(*parts)


@pytest.mark.parametrize("case", sorted(path.stem for path in (GOLDEN / "libraries").glob("*.npz")))
def test_preset_reproduces_the_library(case):
    z = load(f"libraries/{case}")
    meta = json.loads(str(z["meta"]))
    pipeline, optimizer = getattr(libraries, meta["preset"])(**meta["options"])
    pipeline, is_brax = instrumented(pipeline, z), "keys" in z
    tape = record_steps(len(z["params"]), {"loss": "loss"} | ({"entropy": "entropy"} if is_brax else {}))

    def make_learner() -> pp.Learner:
        return pp.learner(functools.partial(evaluate, tanh=is_brax), pipeline, optax.chain(tape, optimizer))

    def under_way(state: pp.LearnerState) -> pp.LearnerState:
        def with_moments(x: Any) -> Any:
            return Moments(*map(jnp.asarray, z["moments"])) if isinstance(x, Moments) else x

        return jax.tree.map(with_moments, state, is_leaf=lambda x: isinstance(x, Moments)) if "moments" in z else state

    ((state, _),) = replay(make_learner, split(z["params"][0], z), [((), rollout(z))], under_way)
    rows, (estimates,) = steps(state.opt_state[0], state.params), tapes(state.pipeline)
    ours = {name: estimates[name][-1] for name in ("advantage", "target")} | {"losses": rows.numbers["loss"]}
    if is_brax:  # it takes a part of the entropy in closed form, with the same gradient: recorded without it
        ours["losses"] = ours["losses"] + meta["options"].get("entropy_coef", 1e-4) * rows.numbers["entropy"]
    for name, x in ours.items():
        np.testing.assert_allclose(x, z[name], rtol=1e-5, atol=1e-7, err_msg=name)
    params = np.concatenate([rows.params[name] for name in ("policy", "value")], axis=1)
    assert len(params) == len(z["params"])
    travelled = np.abs(z["params"] - z["params"][0]).max(axis=1)
    difference = np.abs(params - z["params"]).max(axis=1)
    assert np.all(difference[1:] <= 1e-5 * travelled[1:]), difference / travelled


def test_one_network_has_no_gradients_of_each():
    clip, joint = clip_each_network(1.0), {"params": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"an entry for each network.*got \['params'\]"):
        clip.update(joint, clip.init(joint))


def test_variants_of_the_benchmark_of_differences_fit_together():
    sizes = {"total_timesteps": 32, "num_envs": 2, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2}
    config = differences.Config(env_id="Pendulum-v1", hidden=(8,), **sizes)
    for name in ("none", "time_limit_ignored", "value_normalize", "separate_norms", "adaptive_rate"):
        differences.VARIANTS[name].make_train(config, envs.make("Pendulum-v1"))  # which traces an update
