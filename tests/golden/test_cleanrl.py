"""CleanRL's `ppo.py` and `ppo_continuous_action.py`, number by number, from our chain and learner.

Only rollouts, first parameters and minibatch indices are taken from the recordings (see `golden/cleanrl_pufferlib/`).
All else comes out of `learner.update`, in one free run per case: parameters, optimizer state and step go on from one
iteration to the next and are never put back on the recorded track.

Deviations, all within the bounds:

* optax takes Adam's bias correction 1 - b^t in float32, which makes the first steps up to 6e-6 (relative) shorter;
* optax clips gradients by c / norm, torch by c / (norm + 1e-6);
* our k3 uses `expm1`; the peer's (ratio - 1) - log_ratio carries the rounding noise of `ratio`.
"""

import json
from typing import Any, NamedTuple

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import ppo_parts as pp
from tests.golden_traces import (
    FOLDER,
    METRICS,
    ROUNDING,
    Arrays,
    Comparison,
    record,
    record_gradients,
    record_minibatches,
)

CASES = ("a_default", "a_biglr", "b_noclipv_nonorm", "c_target_kl", "d_continuous", "e_continuous_trunc")


class Iteration(NamedTuple):
    """What ours did in one iteration; leading axis: minibatches."""

    rollout: Arrays
    minibatch: Arrays
    grad: Arrays
    params: Arrays  # before each minibatch, and once more after the last
    metrics: Arrays


def evaluate(params: dict[str, jax.Array], batch: pp.Batch) -> tuple[Any, jax.Array]:
    """Two tanh MLPs in torch's layout, y = x Wᵀ + b."""

    def mlp(name: str) -> jax.Array:
        x = batch.obs
        for layer in (0, 2, 4):
            x = x @ params[f"{name}.{layer}.weight"].T + params[f"{name}.{layer}.bias"][None]
            x = x if layer == 4 else jnp.tanh(x)
        return x

    value = mlp("critic")[..., 0]
    if "actor_logstd" not in params:
        return distrax.Categorical(mlp("actor")), value
    mean = mlp("actor_mean")
    return distrax.MultivariateNormalDiag(mean, jnp.broadcast_to(jnp.exp(params["actor_logstd"]), mean.shape)), value


def rollout(recorded: Arrays) -> pp.Batch:
    """CleanRL's `dones[t]` belongs to the step before t, and it treats a truncation as a termination."""
    action, value = recorded["actions"], jnp.asarray(recorded["values"])
    return pp.Batch(
        obs=jnp.asarray(recorded["obs"]),
        action=jnp.asarray(action if action.ndim == 3 else action.astype(np.int32)),
        log_prob=jnp.asarray(recorded["logprobs"]),
        value=value,
        reward=jnp.asarray(recorded["rewards"]),
        terminated=jnp.concatenate([recorded["dones"][1:], recorded["next_done"][None]]),
        next_value=pp.functional.next_values(value, jnp.asarray(recorded["next_value"])),
    )


def given_epochs(recorded: Arrays, args: dict[str, Any]) -> np.ndarray:
    """Indices `[E, K, M]`. Where the peer stopped early its last epoch is repeated: a learner that does not runs on."""
    indices = recorded["mb/mb_inds"].reshape(-1, args["num_minibatches"], args["minibatch_size"])
    missing = args["update_epochs"] - len(indices)
    return np.concatenate([indices, *[indices[-1:]] * missing])


def cleanrl_chain(args: dict[str, Any], indices: np.ndarray) -> pp.Part:
    """CleanRL's update, with a tape on either side of the sampler."""
    steps, clip_eps = indices.shape[0] * indices.shape[1], args["clip_coef"]
    shape = (args["num_steps"], args["num_envs"])
    return pp.chain(
        pp.gae(gamma=args["gamma"], gae_lambda=args["gae_lambda"]),
        record(1, lambda b: {"advantages": b.advantage, "returns": b.target}, advantages=shape, returns=shape),
        pp.given_indices(indices),
        pp.advantage_normalize(ddof=1) if args["norm_adv"] else pp.identity(),
        pp.clipped_surrogate(clip_eps=clip_eps),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=clip_eps, coef=args["vf_coef"])
        if args["clip_vloss"]
        else pp.value_loss(coef=args["vf_coef"]),
        pp.entropy_bonus(coef=args["ent_coef"]),
        pp.kl_early_stop(args["target_kl"], check="epoch") if args["target_kl"] else pp.identity(),
        record_minibatches(steps, (args["minibatch_size"],)),
    )


def play(z: Arrays, args: dict[str, Any], schedule: Any) -> list[Iteration]:
    """All iterations of a case through the learner."""
    start = {str(name): jnp.asarray(z[f"it0/params_start/{name}"]) for name in z["param_names"]}
    params, unravel = ravel_pytree(start)  # one tensor instead of twelve: a third of the compile time less
    optimizer = optax.chain(
        record_gradients(args["update_epochs"] * args["num_minibatches"]),
        optax.clip_by_global_norm(args["max_grad_norm"]),
        optax.scale_by_adam(eps=1e-5),
        pp.optim.scale_by_update_schedule(schedule),
    )

    def named(rows: np.ndarray) -> Arrays:
        return jax.tree.map(np.asarray, jax.vmap(unravel)(jnp.asarray(rows)))

    state, played = None, []
    for i in range(args["num_iterations"]):
        recorded = iteration(z, i)
        pipeline = cleanrl_chain(args, given_epochs(recorded, args))
        learner = pp.learner(lambda flat, batch: evaluate(unravel(flat), batch), pipeline, optimizer)
        fresh = learner.init(params)
        if state is not None:  # new tapes; everything else goes on
            fresh = state._replace(pipeline=fresh.pipeline, opt_state=(fresh.opt_state[0], *state.opt_state[1:]))
        state, metrics = jax.jit(learner.update)(jax.random.key(i), fresh, rollout(recorded))
        (before, after), steps = state.pipeline[1], state.opt_state[0].read()
        history = np.concatenate([steps["params"], np.asarray(state.params)[None]])
        tapes = {name: rows[0] for name, rows in before[-1].read().items()}, after[-1].read()
        played.append(Iteration(*tapes, named(steps["grad"]), named(history), jax.tree.map(np.asarray, metrics)))
    return played


def iteration(z: Arrays, i: int) -> Arrays:
    """The arrays of iteration i."""
    return {name.removeprefix(f"it{i}/"): x for name, x in z.items() if name.startswith(f"it{i}/")}


@pytest.mark.parametrize("case", CASES)
def test_learner_reproduces_cleanrl(case):
    z = dict(np.load(FOLDER / f"cleanrl_{case}.npz"))
    args = json.loads(str(z["meta"]))["args"]
    rate = args["learning_rate"]
    schedule = pp.linear_schedule(rate, 0.0, args["num_iterations"]) if args["anneal_lr"] else lambda step: rate
    check = Comparison()
    with jax.default_matmul_precision("float32"):
        played = play(z, args, schedule)
    for i, ours in enumerate(played):
        compare(check, ours, iteration(z, i), start=iteration(z, 0))
        check.close("learning rate", schedule(i), z[f"it{i}/lr"])
        check.close("explained_variance", ours.metrics["explained_variance"], z["explained_variance"][i], atol=1e-6)
        check.close("logged_clipfrac", ours.metrics["clip_fraction"], z["logged_clipfrac"][i])
        check.equal("early stop", ours.metrics.get("early_stopped", 0), z[f"it{i}/early_stop"])
    for name, params in played[-1].params.items():
        check.close_tensor(f"final {name}", params[-1], z[f"final/{name}"], start=played[0].params[name][0])
    check.finish()


def compare(check: Comparison, ours: Iteration, recorded: Arrays, start: Arrays) -> None:
    """Everything recorded within one iteration."""
    check.equal("epochs", ours.metrics["epochs"], recorded["last_epoch"] + 1)
    check.equal("minibatches", ours.metrics["minibatches"], len(recorded["mb/epoch"]))
    check.finish()  # tapes of another length cannot be compared
    for name, x in ours.rollout.items():
        check.close(name, x, recorded[name])
    for name, x in ours.minibatch.items():
        if name in ("newvalue", "adv"):
            check.close_tensor(name, x, recorded["mb/mb_advantages" if name == "adv" else "mb/newvalue"])
        else:
            check.close(name, x, recorded[f"mb/{name}"], ROUNDING.get(name, 0.0))
    for theirs, name in {**METRICS, "loss": "loss", "grad_norm": "grad_norm"}.items():
        check.close(f"metric {name}", ours.metrics[name], recorded[f"mb/{theirs}"].mean(), ROUNDING.get(theirs, 0.0))

    names = [name.removeprefix("params_start/") for name in recorded if name.startswith("params_start/")]
    squares = [np.square(ours.grad[name]).sum(axis=tuple(range(1, ours.grad[name].ndim))) for name in names]
    check.close("grad_l2", np.sqrt(np.stack(squares, axis=1)), recorded["mb/grad_l2"], atol=1e-6)
    check.close("grad_norm", np.sqrt(sum(squares)), recorded["mb/grad_norm"])
    for name in names:
        params, first = ours.params[name], start[f"params_start/{name}"]
        check.close_tensor(f"params_start {name}", params[0], recorded[f"params_start/{name}"], first)
        for snapshot, k in enumerate(recorded.get("mb/snap", ())):
            grad, after = (recorded[f"mb/{kind}/{name}"][snapshot] for kind in ("grad", "param_after"))
            check.close_tensor(f"grad {name}", ours.grad[name][k], grad)
            check.close_tensor(f"param_after {name}", params[k + 1], after, first)
