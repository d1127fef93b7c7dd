"""PufferLib 3.0's advantage kernel and minibatch loop, number by number, from our functions, chain and learner.

Only rollouts, first parameters, minibatch indices and their weights are taken from the recordings (see
`golden/cleanrl_pufferlib/`); all else comes out of one `learner.update`, in a free run over all minibatches.

Deviations, stated in the tests by name:

* `unwritten_last_column`: the kernel leaves the last column of the advantages as it was (0) and has no bootstrap there.
* `mass`: the peer's priorities are divided by sum(w) + eps, not by sum(w + eps), so they sum to slightly more than 1.
* `stale_explained_variance`: the peer mixes the advantages of the last minibatch with the values after it.
* Adam and the gradient clip deviate as in `test_golden_cleanrl.py`.

The recordings with Muon are left out: heavyball's optimizer is no part of this package.
"""

import json
from typing import Any

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import ppo_parts as pp
from tests.golden_traces import FOLDER, ROUNDING, Arrays, Comparison, record, record_gradients, record_minibatches

VTRACE = jax.jit(pp.functional.vtrace)
KERNEL = dict(np.load(FOLDER / "puffer_kernel.npz"))


def puffer_vtrace(values, rewards, terminals, ratio, gamma, gae_lambda, rho_clip, c_clip) -> np.ndarray:
    """Our V-trace on the peer's arrays `[S, T]`: reward and terminal come a step late, the last step bootstraps."""
    v, r, d, ratio = (x.T for x in (values, rewards, terminals, ratio))
    clips = {"rho_clip": rho_clip, "c_clip": c_clip}
    out = VTRACE(np.log(ratio[:-1]), r[1:], v[:-1], v[1:], d[1:], gamma=gamma, gae_lambda=gae_lambda, **clips)
    return np.asarray(out.error).T


@pytest.mark.parametrize("case", [str(case) for case in KERNEL["cases"] if KERNEL[f"{case}/values"].shape[1] > 1])
def test_vtrace_reproduces_the_kernel(case):
    recorded = {name: KERNEL[f"{case}/{name}"] for name in ("values", "rewards", "terminals", "ratio")}
    gamma, gae_lambda, rho_clip, c_clip, fill = (float(x) for x in KERNEL[f"{case}/hyper"])
    check = Comparison()
    ours = puffer_vtrace(**recorded, gamma=gamma, gae_lambda=gae_lambda, rho_clip=rho_clip, c_clip=c_clip)
    check.close("advantages", ours, KERNEL[f"{case}/advantages"][:, :-1], atol=1e-6)
    check.equal("unwritten_last_column", KERNEL[f"{case}/advantages"][:, -1], np.full(len(ours), fill, np.float32))
    check.finish()


def evaluate(params: dict[str, jax.Array], batch: pp.Batch) -> tuple[Any, jax.Array]:
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


def puffer_chain(config: dict[str, Any], indices: np.ndarray, weights: np.ndarray, shape: tuple[int, int]) -> pp.Part:
    """PufferLib's update, with a tape on either side of the sampler."""

    def read_rollout(batch: pp.Batch) -> dict[str, jax.Array]:
        return {
            "values_before": batch.value,
            "ratio_before": jnp.exp(batch.log_ratio),
            "advantages": batch.advantage,
            "targets": batch.target,
        }

    return pp.chain(
        pp.stateless(unwritten_last_column),
        pp.vtrace(
            gamma=config["gamma"],
            gae_lambda=config["gae_lambda"],
            rho_clip=config["vtrace_rho_clip"],
            c_clip=config["vtrace_c_clip"],
        ),
        record(
            len(indices),
            read_rollout,
            **dict.fromkeys(("values_before", "ratio_before", "advantages", "targets"), shape),
        ),
        pp.given_indices(indices, axis="segment", weights=weights, refresh="minibatch"),
        pp.advantage_normalize(ddof=1),
        pp.advantage_weight(),
        pp.clipped_surrogate(clip_eps=config["clip_coef"]),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=config["vf_clip_coef"], coef=config["vf_coef"]),
        pp.entropy_bonus(coef=config["ent_coef"]),
        record_minibatches(len(indices), (shape[0], indices.shape[1])),
    )


def play(z: Arrays, meta: dict[str, Any]) -> tuple[Arrays, Arrays, Arrays, Arrays]:
    """The update through the learner: tapes of the rollout, the minibatches, the gradients and the parameters.

    One more minibatch is given than the peer ran, so that the tapes also show what the last one left behind.
    """
    config = meta["config"]
    indices, weights = (np.concatenate([x, x[-1:]]) for x in (z["mb/idx"], z["mb/mb_prio"][..., 0]))
    start = {str(name): jnp.asarray(z[f"params_start/{name}"]) for name in z["param_names"]}
    params, unravel = ravel_pytree(start)
    optimizer = optax.chain(
        record_gradients(len(indices)),
        optax.clip_by_global_norm(config["max_grad_norm"]),
        optax.scale_by_adam(config["adam_beta1"], config["adam_beta2"], config["adam_eps"]),
        pp.optim.scale_by_update_schedule(learning_rate(meta)),
    )
    pipeline = puffer_chain(config, indices, weights, z["values"].T.shape)
    learner = pp.learner(lambda flat, batch: evaluate(unravel(flat), batch), pipeline, optimizer)
    state = learner.init(params)._replace(step=jnp.asarray(meta["epoch"], jnp.int32))
    state, _ = jax.jit(learner.update)(jax.random.key(0), state, rollout(z))
    (before, after), steps = state.pipeline[1], state.opt_state[0].read()
    grad, history = (jax.tree.map(np.asarray, jax.vmap(unravel)(steps[name])) for name in ("grad", "params"))
    buffers, minibatches = before[-1].read(), after[-1].read()
    return (
        {name: x.swapaxes(1, 2) for name, x in buffers.items()},
        {name: x.swapaxes(1, 2) if x.ndim == 3 else x for name, x in minibatches.items()},
        grad,
        history,
    )


def learning_rate(meta: dict[str, Any]) -> Any:
    return optax.cosine_decay_schedule(meta["config"]["learning_rate"], meta["total_epochs"])


@pytest.mark.parametrize("case", ["adam_epoch0", "adam_epoch6", "adam_tinyadv_h16"])
def test_learner_reproduces_pufferlib(case):
    z = dict(np.load(FOLDER / f"puffer_{case}.npz"))
    meta = json.loads(str(z["meta"]))
    check, steps = Comparison(), meta["total_minibatches"]
    with jax.default_matmul_precision("float32"):
        buffers, minibatches, grad, params = play(z, meta)

    check.close("learning rate", learning_rate(meta)(meta["epoch"]), z["lr"])
    check.close("next learning rate", learning_rate(meta)(meta["epoch"] + 1), z["lr_next"])
    for name in ("values_before", "ratio_before", "advantages"):
        check.close_tensor(name, buffers[name][:steps], z[f"mb/{name}"])
    check.close_tensor("final_values", buffers["values_before"][steps], z["final_values"])
    check.close_tensor("final_ratio", buffers["ratio_before"][steps], z["final_ratio"])
    for k in range(steps):
        compare_priorities(check, z, meta, k, buffers["advantages"][k])
        compare_drawn(check, z, meta, k, {name: x[k] for name, x in buffers.items()}, minibatches["ratio"][k])
    for name, x in minibatches.items():
        ours, recorded = x[:steps].reshape(z[f"mb/{name}"].shape), z[f"mb/{name}"]
        if ours.ndim == 1:
            check.close(name, ours, recorded, ROUNDING.get(name, 0.0))
        else:
            check.close_tensor(name, ours, recorded)
    norm = np.sqrt(sum(np.square(g[:steps]).sum(axis=tuple(range(1, g.ndim))) for g in grad.values()))
    check.close("grad_norm", norm, z["mb/grad_norm"])
    for name in grad:
        check.close_tensor(f"grad {name}", grad[name][:steps], z[f"mb/grad/{name}"])
        after, start = z[f"mb/param_after/{name}"], z[f"params_start/{name}"]
        check.close_tensor(f"param_after {name}", params[name][1:], after, start)
    stale_explained_variance = pp.functional.explained_variance(
        buffers["values_before"][steps], buffers["advantages"][steps - 1] + buffers["values_before"][steps]
    )
    check.close("explained_variance", stale_explained_variance, z["explained_variance"], atol=1e-5)
    check.finish()


def compare_priorities(check: Comparison, z: Arrays, meta: dict[str, Any], k: int, advantage: np.ndarray) -> None:
    """Probabilities and importance weights from our advantages `[S, T]` before minibatch k."""
    config, eps = meta["config"], 1e-6
    alpha, beta0 = config["prio_alpha"], config["prio_beta0"]
    beta = pp.linear_schedule(beta0, beta0 + (1 - beta0) * alpha, meta["total_epochs"])(meta["epoch"])
    ours = pp.functional.segment_priorities(jnp.asarray(advantage.T), alpha=alpha, eps=eps)
    total = float(z["mb/prio_weights"][k].sum())
    mass = (total + len(ours) * eps) / (total + eps)
    assert 1 < mass < 1 + len(ours) * eps / total
    check.close("anneal_beta", beta, z["anneal_beta"])
    check.close("mass", mass, z["mb/prio_probs"][k].sum())
    check.close("prio_probs", ours * mass, z["mb/prio_probs"][k])
    weights = pp.functional.importance_weights(ours, jnp.asarray(z["mb/idx"][k]), beta=beta)
    check.close("mb_prio", weights * mass**-beta, z["mb/mb_prio"][k, :, 0])


def compare_drawn(check: Comparison, z: Arrays, meta: dict[str, Any], k: int, buffers: Arrays, ratio: Any) -> None:
    """Raw advantages and targets of minibatch k, and V-trace under its new ratio, which the peer computes and drops."""
    config, drawn = meta["config"], z["mb/idx"][k]
    check.close_tensor("mb_advantages", buffers["advantages"][drawn], z["mb/mb_advantages"][k])
    check.close_tensor("mb_returns", buffers["targets"][drawn], z["mb/mb_returns"][k])
    check.equal("unwritten_last_column", buffers["advantages"][:, -1], z["mb/advantages"][k][:, -1])
    hyper = [config[name] for name in ("gamma", "gae_lambda", "vtrace_rho_clip", "vtrace_c_clip")]
    again = puffer_vtrace(buffers["values_before"][drawn], z["rewards"][drawn], z["terminals"][drawn], ratio, *hyper)
    check.close_tensor("adv_recomputed_unused", again, z["mb/adv_recomputed_unused"][k][:, :-1])
