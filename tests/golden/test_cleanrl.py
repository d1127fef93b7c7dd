"""CleanRL's `ppo.py`, `ppo_continuous_action.py` and `ppo_atari.py`, number by number (see `golden_traces.py`).

There are three deviations, all within the bounds:

* optax takes Adam's bias correction 1 - b^t in float32, which makes the first steps up to 6e-6 (relative) shorter;
* optax clips gradients by c / norm, torch by c / (norm + 1e-6);
* our k3 uses `expm1`; the peer's (ratio - 1) - log_ratio carries the rounding noise of `ratio`.

The first parameters of the convolutional network are drawn again. Later ones are compared by their losses and the
norms of their gradients, in float64.
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
from ppo_parts import envs, networks
from tests import golden_traces as traces

ESTIMATES = {"advantages": "advantage", "returns": "target"}  # the peer's name: ours
CASES = ("a_default", "a_biglr", "b_noclipv_nonorm", "c_target_kl", "d_continuous", "e_continuous_trunc")


def evaluate(params: traces.Params, batch: pp.Batch) -> tuple[Any, jax.Array]:
    """Evaluate two tanh MLPs."""

    def mlp(name: str) -> jax.Array:
        x = batch.obs
        for layer in (0, 2, 4):
            x = traces.dense(params, f"{name}.{layer}", jnp.tanh(x) if layer else x)
        return x

    value = mlp("critic")[..., 0]
    if "actor_logstd" not in params:
        return distrax.Categorical(mlp("actor")), value
    mean = mlp("actor_mean")
    return distrax.MultivariateNormalDiag(mean, jnp.broadcast_to(jnp.exp(params["actor_logstd"]), mean.shape)), value


def rollout(recorded: traces.Arrays) -> pp.Batch:
    """Convert a rollout: CleanRL's `dones[t]` belongs to the step before t, and includes truncations."""
    action, value = recorded["actions"], jnp.asarray(recorded["values"])
    return pp.Batch(
        obs=jnp.asarray(recorded["obs"], float), reward=jnp.asarray(recorded["rewards"]),
        action=jnp.asarray(action if action.ndim == 3 else action.astype(np.int32)),
        log_prob=jnp.asarray(recorded["logprobs"]), value=value,
        terminated=jnp.concatenate([recorded["dones"][1:], recorded["next_done"][None]]),
        next_value=pp.functional.next_values(value, jnp.asarray(recorded["next_value"])),
    )  # fmt: skip


def given_epochs(recorded: traces.Arrays, args: dict[str, Any]) -> np.ndarray:
    """Return indices `[E, K, M]`; if the peer stopped early, repeat its last epoch, so that failing to stop shows."""
    indices = recorded["mb/mb_inds"].reshape(-1, args["num_minibatches"], args["minibatch_size"]).astype(np.int32)
    missing = args["update_epochs"] - len(indices)
    return np.concatenate([indices, *[indices[-1:]] * missing])


def cleanrl_chain(args: dict[str, Any], indices: jax.Array, tape: traces.Tape) -> pp.Part:
    """Make CleanRL's update, with a tape of the estimates."""
    clip_eps, coef = args["clip_coef"], args["vf_coef"]
    return pp.chain(
        pp.gae(gamma=args["gamma"], gae_lambda=args["gae_lambda"]), traces.record_estimates(tape, ESTIMATES),
        pp.given_indices(indices), pp.advantage_normalize(ddof=1) if args["norm_adv"] else pp.identity(),
        pp.clipped_surrogate(clip_eps=clip_eps), pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=clip_eps, coef=coef) if args["clip_vloss"] else pp.value_loss(coef=coef),
        pp.entropy_bonus(coef=args["ent_coef"]),
        pp.kl_early_stop(args["target_kl"], check="epoch") if args["target_kl"] else pp.identity(),
    )  # fmt: skip


def played(z: traces.Arrays, args: dict[str, Any], params: Any, policy: Any, optimizer: Any) -> Any:
    """Yield each iteration's recording, and our state and metrics; check that our estimates are close."""
    tape = traces.Tape()

    def make_learner(indices: jax.Array) -> pp.Learner:
        return pp.learner(policy, cleanrl_chain(args, indices, tape), optimizer)

    recorded = [traces.sub(z, f"it{i}/") for i in range(args["num_iterations"])]
    updates = [((given_epochs(one, args),), rollout(one)) for one in recorded]
    for one, (state, metrics) in zip(recorded, traces.replay(make_learner, params, updates), strict=True):
        for name, x in tape.read().items():
            traces.close(name, x[0], one[name])
        yield one, state, metrics


@pytest.mark.parametrize("case", CASES)
def test_learner_reproduces_cleanrl(case):
    z = traces.load(f"cleanrl_pufferlib/cleanrl_{case}")
    args = json.loads(str(z["meta"]))["args"]
    rate = args["learning_rate"]
    schedule = pp.linear_schedule(rate, 0.0, args["num_iterations"]) if args["anneal_lr"] else lambda step: rate
    tape = traces.Tape()
    optimizer = optax.chain(pp.clipped_adam(schedule, args["max_grad_norm"]), traces.record_steps(tape, traces.METRICS))
    start = traces.sub(z, "it0/params_start/")
    for i, (recorded, state, metrics) in enumerate(played(z, args, start, evaluate, optimizer)):
        theirs, (params, numbers) = traces.sub(recorded, "mb/"), traces.read_steps(tape, state.params)
        assert (metrics["epochs"], metrics["minibatches"]) == (recorded["last_epoch"] + 1, len(theirs["epoch"]))
        assert metrics.get("early_stopped", 0) == recorded["early_stop"]
        traces.close("learning rate", schedule(i), recorded["lr"])
        traces.close("explained_variance", metrics["explained_variance"], z["explained_variance"][i], atol=1e-6)
        traces.close("logged_clipfrac", metrics["clip_fraction"], z["logged_clipfrac"][i])
        for name, x in numbers.items():
            traces.close(name, x, theirs[name], traces.ROUNDING.get(name, 0.0))
        for name, ours in {**traces.METRICS, "grad_norm": "grad_norm"}.items():
            traces.close(f"metric {name}", metrics[ours], theirs[name].mean(), traces.ROUNDING.get(name, 0.0))
        if "snap" in theirs:
            after_step = {name: x[theirs["snap"]] for name, x in params.items()}
            traces.close_tensors("param_after", after_step, traces.sub(theirs, "param_after/"), start)
    traces.close_tensors("final", state.params, traces.sub(z, "final/"), start)


BOUND = 1e-5  # torch divides by the gradient's norm + 1e-6, and optax takes Adam's bias correction in float32
LAYERS = {  # our name: the shape of CleanRL's weight, its gain
    "Conv_0": ((32, 4, 8, 8), 2**0.5), "Conv_1": ((64, 32, 4, 4), 2**0.5), "Conv_2": ((64, 64, 3, 3), 2**0.5),
    "Dense_0": ((512, 64 * 7 * 7), 2**0.5), "Dense_1": ((4, 512), 0.01), "Dense_2": ((1, 512), 1.0),
}  # fmt: skip


def first_params() -> dict:
    """Draw the recorder's parameters again in our layout: height, width and channels, then features."""
    params = {}
    for number, (ours, (shape, gain)) in enumerate(LAYERS.items()):
        numbers = np.random.RandomState(number).standard_normal(shape)  # the same in all versions of NumPy
        weight = (gain * numbers / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        if ours == "Dense_0":  # features are flattened from [C, H, W] there, and from [H, W, C] here
            weight = weight.reshape(512, 64, 7, 7).transpose(0, 2, 3, 1).reshape(512, -1)
        kernel = weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T
        params[ours] = {"kernel": jnp.asarray(kernel, float), "bias": jnp.zeros(shape[0])}
    return {"params": params}


@pytest.mark.lenient_ranks  # of flax
def test_learner_reproduces_cleanrl_on_frames():
    z = traces.load("cleanrl_pufferlib/cleanrl_f_atari")
    args = json.loads(str(z["meta"]))["args"]
    spaces = {"observation_space": envs.Box((4, 84, 84), 0, 255), "action_space": envs.Discrete(4)}
    policy = networks.nature_cnn(envs.make("CartPole-v1")._replace(**spaces))
    rate = pp.linear_schedule(args["learning_rate"], 0.0, args["num_iterations"])
    with jax.enable_x64(True):
        optimizer = pp.clipped_adam(rate, args["max_grad_norm"])
        for recorded, _, metrics in played(z, args, first_params(), policy, optimizer):
            for theirs, ours in {**traces.METRICS, "grad_norm": "grad_norm"}.items():
                np.testing.assert_allclose(metrics[ours], recorded[f"mb/{theirs}"].mean(), BOUND, 1e-12, err_msg=ours)
