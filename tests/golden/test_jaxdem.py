"""JaxDEM's PPOTrainer, number by number (see `golden_traces.py`).

After each minibatch, the peer recomputes the advantages of the drawn segments from the values and ratios before the
step; that is `given_indices(refresh="minibatch")` after `vtrace`.

There is one deviation: the priorities (see `close_priorities`).
"""

from typing import Any

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from tests import golden_traces as traces

SCALARS = {  # the recorded numbers of a minibatch, the peer's name: ours
    "loss": "loss", "aux/actor_loss": "policy_loss", "aux/value_loss": "value_loss", "aux/entropy": "entropy",
    "aux/approx_KL": "approx_kl_k2", "aux/explained_variance": "peer_explained_variance",
}  # fmt: skip
# These are means of terms of size 1 that cancel, or squares of rounding errors; float32 leaves errors of this size.
ROUNDING = {"loss": 1e-6, "aux/actor_loss": 1e-6, "aux/approx_KL": 1e-12}
EXPONENTS = "importance_sampling_alpha", "importance_sampling_beta", "anneal_importance_sampling_beta"
BUFFERS = {"value": "value", "ratio": "ratio", "advantage": "advantage", "returns": "target"}  # the peer's name: ours


def settings(z: traces.Arrays) -> dict[str, float]:
    """Return the settings of a case by our names."""
    config = {name: float(x) for name, x in traces.sub(z, "cfg/").items() if x.ndim == 0}
    for prefix in ("ppo_", "advantage_"):
        config |= {name.removeprefix(prefix): x for name, x in config.items() if name.startswith(prefix)}
    return config | {"gae_lambda": config["lambda"]}


def evaluate(params: traces.Params, batch: pp.Batch) -> tuple[Any, jax.Array]:
    """Evaluate a shared layer, two heads, and a deviation that does not depend on the state."""
    hidden = jax.nn.gelu(traces.dense(params, "network/layers/0", batch.obs), approximate=True)
    mean = traces.dense(params, "actor_mu", hidden)
    std = jnp.broadcast_to(jnp.exp(params["_log_std"])[None], mean.shape)
    return distrax.MultivariateNormalDiag(mean, std), traces.dense(params, "critic", hidden)[..., 0]


def epoch_chain(config: Any, indices: Any, weights: Any, tape: traces.Tape) -> pp.Part:
    """Make the chain of an epoch, with a tape of the rollout before each minibatch."""

    def peer_metrics(batch: pp.Batch) -> pp.Batch:
        k2 = pp.functional.approx_kl(batch.current_log_ratio(), estimator="k2")
        explained = pp.functional.explained_variance(batch.current.value, batch.target, mask=batch.mask)
        mean = pp.functional.masked_mean(k2, batch.mask)
        return batch.add_metrics(approx_kl_k2=mean, peer_explained_variance=explained)

    return pp.chain(
        pp.vtrace(**{name: config[name] for name in ("gamma", "gae_lambda", "rho_clip", "c_clip")}),
        traces.record_estimates(tape, BUFFERS),
        pp.given_indices(indices, axis="segment", weights=weights, refresh="minibatch"),
        pp.advantage_normalize(ddof=0), pp.advantage_weight(), pp.clipped_surrogate(clip_eps=config["clip_eps"]),
        pp.clipped_value_loss(clip_eps=config["clip_eps"], coef=config["value_coeff"]), pp.policy_diagnostics(),
        pp.entropy_bonus(coef=config["entropy_coeff"]), pp.stateless(peer_metrics),
    )  # fmt: skip


def rollout(z: traces.Arrays) -> pp.Batch:
    """Return the rollout of an epoch."""
    fields = traces.sub(z, "td_end/") | traces.sub(z, "init/")
    next_value = pp.functional.next_values(jnp.asarray(fields["value"]), jnp.asarray(fields["last_value"]))
    given = {name: jnp.asarray(fields[name]) for name in ("obs", "action", "log_prob", "value", "reward")}
    return pp.Batch(**given, terminated=jnp.asarray(fields["done"]), next_value=next_value)


@pytest.mark.parametrize("case", ["single", "multi", "lrzero"])
def test_learner_reproduces_jaxdem(case):
    z = traces.load(f"jaxdem_jaxagents/jaxdem_head_epoch_{case}")
    config, start, estimates, steps = settings(z), traces.sub(z, "epoch0/params_before/"), traces.Tape(), traces.Tape()
    # The peer's schedule counts minibatches, and reaches its end after as many minibatches as there are epochs.
    rate = optax.cosine_decay_schedule(config["learning_rate"], int(config["num_epochs"]))
    optimizer = optax.chain(
        optax.clip_by_global_norm(config["max_grad_norm"]),
        optax.contrib.muon(rate, eps=1e-12),
        traces.record_steps(steps, SCALARS),
    )

    def make_learner(indices: Any, weights: Any) -> pp.Learner:
        return pp.learner(evaluate, epoch_chain(config, indices, weights, estimates), optimizer)

    epochs = [traces.sub(z, f"epoch{i}/") for i in range(int(config["n_epochs_recorded"]))]
    alpha, first, anneal = (config[name] for name in EXPONENTS)
    exponent = pp.linear_schedule(first, first + anneal * (1 - first), int(config["num_epochs"]))
    betas, updates = [float(exponent(i)) for i in range(len(epochs))], []
    for one, beta in zip(epochs, betas, strict=True):
        probabilities = np.take_along_axis(one["mb/prio_probs"], one["mb/idx"], axis=1)
        weights = (one["mb/prio_probs"].shape[1] * probabilities) ** np.float32(-beta)
        updates.append(((one["mb/idx"], weights), rollout(one)))
    for i, (state, metrics) in enumerate(traces.replay(make_learner, start, updates)):
        one, (_, weights), buffers = epochs[i], updates[i][0], estimates.read()
        recorded = traces.sub(one, "mb/")
        traces.close_steps(steps, state.params, recorded, traces.sub(recorded, "params_after/"), start, ROUNDING)
        for name, ours in {**SCALARS, "grad_norm": "grad_norm", "ratio": "ratio_mean"}.items():
            if ours != "peer_explained_variance":
                mean = one[f"metrics/{name.removeprefix('aux/')}"]
                traces.close(f"metric {name}", metrics[ours], mean, ROUNDING.get(name, 0.0))
        # Compare what the buffers hold before each minibatch, later only for the drawn segments, and its priorities.
        begun = {name: x[0] for name, x in buffers.items()}
        traces.close_tensors("init", begun, {name: one[f"init/{name}"] for name in BUFFERS})
        for k, indices in enumerate(one["mb/idx"]):
            priorities = one["mb/prio_probs"][k]
            traces.close_priorities(buffers["advantage"][k], indices, alpha, betas[i], priorities, weights[k])
            if k + 1 < len(one["mb/idx"]):
                recomputed = {name: one[f"recompute/{name}"][k] for name in BUFFERS}
                traces.close_tensors("next", {name: x[k + 1][:, indices] for name, x in buffers.items()}, recomputed)
