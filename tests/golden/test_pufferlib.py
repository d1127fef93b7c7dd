"""PufferLib 3.0's advantage kernel and minibatch loop, number by number (see `golden_traces.py`).

There are three deviations, which the tests name:

* `unwritten_last_column`: the kernel leaves the last column of the advantages as it was (0) and has no bootstrap there.
* The priorities sum to slightly more than 1 (see `close_priorities`).
* Adam and the gradient clip deviate as in `test_cleanrl.py`.
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
from tests import golden_traces as traces


def evaluate(params: traces.Params, batch: pp.Batch) -> tuple[Any, jax.Array]:
    """Evaluate a shared trunk of two tanh layers, and two heads."""
    hidden = jnp.tanh(traces.dense(params, "fc2", jnp.tanh(traces.dense(params, "fc1", batch.obs))))
    return distrax.Categorical(traces.dense(params, "decoder", hidden)), traces.dense(params, "value", hidden)[..., 0]


def rollout(z: traces.Arrays) -> pp.Batch:
    """Convert the peer's buffers `[S, T]` to our `[T, S]`; its rewards and terminals arrive one step late."""
    late = {"reward": z["rewards"].T, "terminated": z["terminals"].T}
    value = jnp.asarray(z["values"].T)
    return pp.Batch(
        obs=jnp.asarray(z["observations"].swapaxes(0, 1)), action=jnp.asarray(z["actions"].T.astype(np.int32)),
        log_prob=jnp.asarray(z["logprobs"].T), value=value, next_value=pp.functional.next_values(value, value[-1]),
        **{name: jnp.concatenate([x[1:], np.ones_like(x[:1])]) for name, x in late.items()},
    )  # fmt: skip


def unwritten_last_column(batch: pp.Batch) -> pp.Batch:
    """Terminate the last step (see `rollout`) with its own value as the reward: advantage 0, target its own value."""
    return batch.replace(reward=batch.reward.at[-1].set(batch.value[-1]))


BUFFERS = {"values_before": "value", "ratio_before": "ratio", "advantages": "advantage"}  # the peer's name: ours


def puffer_chain(config: dict[str, Any], indices: jax.Array, weights: jax.Array, tape: traces.Tape) -> pp.Part:
    """Make PufferLib's update, with a tape of the rollout before each minibatch."""
    clips = {"rho_clip": config["vtrace_rho_clip"], "c_clip": config["vtrace_c_clip"]}
    return pp.chain(
        pp.stateless(unwritten_last_column),
        pp.vtrace(gamma=config["gamma"], gae_lambda=config["gae_lambda"], **clips),
        traces.record_estimates(tape, BUFFERS),
        pp.given_indices(indices, axis="segment", weights=weights, refresh="minibatch"),
        pp.advantage_normalize(ddof=1), pp.advantage_weight(), pp.clipped_surrogate(clip_eps=config["clip_coef"]),
        pp.clipped_value_loss(clip_eps=config["vf_clip_coef"], coef=config["vf_coef"]), pp.policy_diagnostics(),
        pp.entropy_bonus(coef=config["ent_coef"]),
    )  # fmt: skip


@pytest.mark.parametrize("case", ["adam_epoch0", "adam_epoch6", "adam_tinyadv_h16"])
def test_learner_reproduces_pufferlib(case):
    z = traces.load(f"cleanrl_pufferlib/puffer_{case}")
    meta, recorded = json.loads(str(z["meta"])), traces.sub(z, "mb/")
    config, start = meta["config"], traces.sub(z, "params_start/")
    rate = optax.cosine_decay_schedule(config["learning_rate"], meta["total_epochs"])
    traces.close("learning rate", rate(meta["epoch"]), z["lr"])
    traces.close("next learning rate", rate(meta["epoch"] + 1), z["lr_next"])
    buffers, steps = traces.Tape(), traces.Tape()
    optimizer = optax.chain(
        optax.clip_by_global_norm(config["max_grad_norm"]),
        optax.scale_by_adam(config["adam_beta1"], config["adam_beta2"], config["adam_eps"]),
        pp.optim.scale_by_update_schedule(rate),
        traces.record_steps(steps, traces.METRICS),
    )

    given = recorded["idx"].astype(np.int32), recorded["mb_prio"][..., 0]
    ((state, _),) = traces.replay(
        lambda *drawn: pp.learner(evaluate, puffer_chain(config, *drawn, buffers), optimizer),
        start,
        [(given, rollout(z))],
        amend=lambda state: state._replace(step=jnp.asarray(meta["epoch"], jnp.int32)),
    )
    found = {name: x.swapaxes(1, 2) for name, x in buffers.read().items()}
    traces.close_tensors("before minibatches", found, {name: recorded[name] for name in BUFFERS})
    alpha, beta0 = config["prio_alpha"], config["prio_beta0"]
    beta = pp.linear_schedule(beta0, beta0 + (1 - beta0) * alpha, meta["total_epochs"])(meta["epoch"])
    traces.close("anneal_beta", beta, z["anneal_beta"])
    names = ("idx", "prio_probs", "mb_prio")
    for advantages, *row in zip(found["advantages"], *(recorded[name] for name in names), strict=True):
        traces.close_priorities(advantages.T, row[0], alpha, beta, row[1], row[2][:, 0])
    traces.close_steps(steps, state.params, recorded, traces.sub(recorded, "param_after/"), start, traces.ROUNDING)
