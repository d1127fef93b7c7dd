"""PufferLib 3.0's advantage kernel and minibatch loop, number by number, from our functions, chain and learner.

Only rollouts, first parameters, minibatch indices and their weights are taken from the recordings (see
`golden/cleanrl_pufferlib/`); all else comes out of one `learner.update`, in a free run over all minibatches.

Deviations, stated in the tests by name:

* `unwritten_last_column`: the kernel leaves the last column of the advantages as it was (0) and has no bootstrap there.
* `mass`: the peer's priorities are divided by sum(w) + eps, not by sum(w + eps), so they sum to slightly more than 1.
* Adam and the gradient clip deviate as in `test_cleanrl.py`.

The recordings with Muon are left out: heavyball's optimizer is not a part of this package.
"""

import json
from typing import Any

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from tests.golden_traces import (
    METRICS,
    ROUNDING,
    Arrays,
    Params,
    close,
    close_steps,
    close_tensors,
    load,
    record,
    record_steps,
    replay,
    steps,
    sub,
    tapes,
)


def evaluate(params: Params, batch: pp.Batch) -> tuple[Any, jax.Array]:
    """A shared trunk of two tanh layers, and two heads; torch's layout, y = x Wᵀ + b."""

    def layer(name: str, x: jax.Array) -> jax.Array:
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"][None, None]

    hidden = jnp.tanh(layer("fc2", jnp.tanh(layer("fc1", batch.obs))))
    return distrax.Categorical(layer("decoder", hidden)), layer("value", hidden)[..., 0]


def rollout(z: Arrays) -> pp.Batch:
    """The peer's buffers `[S, T]` in our convention `[T, S]`: its reward and terminal arrive one step late."""
    late = {"reward": z["rewards"].T, "terminated": z["terminals"].T}
    value = jnp.asarray(z["values"].T)
    return pp.Batch(
        obs=jnp.asarray(z["observations"].swapaxes(0, 1)),
        action=jnp.asarray(z["actions"].T.astype(np.int32)),
        log_prob=jnp.asarray(z["logprobs"].T),
        value=value,
        next_value=pp.functional.next_values(value, value[-1]),
        **{name: jnp.concatenate([x[1:], np.ones_like(x[:1])]) for name, x in late.items()},
    )


def unwritten_last_column(batch: pp.Batch) -> pp.Batch:
    """Terminate the last step (see `rollout`) with its own value as the reward: advantage 0, target its own value."""
    return batch.replace(reward=batch.reward.at[-1].set(batch.value[-1]))


BUFFERS = ("values_before", "ratio_before", "advantages")


def puffer_chain(config: dict[str, Any], indices: jax.Array, weights: jax.Array) -> pp.Part:
    """PufferLib's update, with a tape of the rollout before each minibatch."""
    clips = {"rho_clip": config["vtrace_rho_clip"], "c_clip": config["vtrace_c_clip"]}
    horizon = config["bptt_horizon"]
    shape = (config["batch_size"] // horizon, horizon)

    def read(batch: pp.Batch) -> dict[str, jax.Array]:
        found = batch.value, jnp.exp(batch.log_ratio), batch.advantage
        return {name: x.T for name, x in zip(BUFFERS, found, strict=True)}

    return pp.chain(
        pp.stateless(unwritten_last_column),
        pp.vtrace(gamma=config["gamma"], gae_lambda=config["gae_lambda"], **clips),
        record(len(indices), read, **dict.fromkeys(BUFFERS, shape)),
        pp.given_indices(indices, axis="segment", weights=weights, refresh="minibatch"),
        pp.advantage_normalize(ddof=1),
        pp.advantage_weight(),
        pp.clipped_surrogate(clip_eps=config["clip_coef"]),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=config["vf_clip_coef"], coef=config["vf_coef"]),
        pp.entropy_bonus(coef=config["ent_coef"]),
    )


@pytest.mark.parametrize("case", ["adam_epoch0", "adam_epoch6", "adam_tinyadv_h16"])
def test_learner_reproduces_pufferlib(case):
    z = load(f"cleanrl_pufferlib/puffer_{case}")
    meta, recorded = json.loads(str(z["meta"])), sub(z, "mb/")
    config, start = meta["config"], sub(z, "params_start/")
    rate = optax.cosine_decay_schedule(config["learning_rate"], meta["total_epochs"])
    close("learning rate", rate(meta["epoch"]), z["lr"])
    close("next learning rate", rate(meta["epoch"] + 1), z["lr_next"])
    optimizer = optax.chain(
        record_steps(meta["total_minibatches"], METRICS),
        optax.clip_by_global_norm(config["max_grad_norm"]),
        optax.scale_by_adam(config["adam_beta1"], config["adam_beta2"], config["adam_eps"]),
        pp.optim.scale_by_update_schedule(rate),
    )

    def make_learner(indices: jax.Array, weights: jax.Array) -> pp.Learner:
        return pp.learner(evaluate, puffer_chain(config, indices, weights), optimizer)

    def under_way(state: pp.LearnerState) -> pp.LearnerState:
        return state._replace(step=jnp.asarray(meta["epoch"], jnp.int32))

    given = recorded["idx"].astype(np.int32), recorded["mb_prio"][..., 0]
    ((state, _),) = replay(make_learner, start, [(given, rollout(z))], under_way)
    (buffers,) = tapes(state.pipeline)
    close_tensors("before minibatches", buffers, {name: recorded[name] for name in BUFFERS})
    for k in range(meta["total_minibatches"]):
        compare_priorities(z, meta, {name: x[k] for name, x in recorded.items()}, buffers["advantages"][k])
    close_steps(steps(state.opt_state[0], state.params), recorded, sub(recorded, "param_after/"), start, ROUNDING)


def compare_priorities(z: Arrays, meta: dict[str, Any], row: Arrays, advantage: np.ndarray) -> None:
    """Probabilities and importance weights from our advantages `[S, T]` before a minibatch."""
    config, eps = meta["config"], 1e-6
    alpha, beta0 = config["prio_alpha"], config["prio_beta0"]
    beta = pp.linear_schedule(beta0, beta0 + (1 - beta0) * alpha, meta["total_epochs"])(meta["epoch"])
    ours = pp.functional.segment_priorities(jnp.asarray(advantage.T), alpha=alpha, eps=eps)
    total = float(row["prio_weights"].sum())
    mass = (total + len(ours) * eps) / (total + eps)
    assert 1 < mass < 1 + len(ours) * eps / total
    close("anneal_beta", beta, z["anneal_beta"])
    close("mass", mass, row["prio_probs"].sum())
    close("prio_probs", ours * mass, row["prio_probs"])
    weights = pp.functional.importance_weights(ours, jnp.asarray(row["idx"]), beta=beta)
    close("mb_prio", weights * mass**-beta, row["mb_prio"][:, 0])
