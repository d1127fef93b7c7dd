"""jaxagents' IPPO, number by number (see `golden_traces.py`).

The peer's choices are settings here, which docs/fidelity.md lists. Its actors share one network and one loss, but each
has its own log-probability, advantage and value, on a third axis. It drops truncations, and goes on across the reset
with the value of the state after it: `truncated=None`.

There is one deviation, `kl_rounding`: a sum of n differences of log-probabilities has n float32 rounding errors.
"""

from functools import partial
from typing import Any

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from tests import golden_traces as traces

CASES = ("cont_nostop", "cont_stop2", "cont_stop2_onemb", "cont_stop3", "cont_trunc", "disc_nostop")


def time_major(x: np.ndarray) -> jax.Array:
    """Convert the peer's [B, T, ...] to our [T, B, ...]."""
    return jnp.asarray(x.swapaxes(0, 1))


def settings(z: traces.Arrays) -> dict[str, Any]:
    return {name: x.item() for name, x in traces.sub(z, "cfg/").items()}


def network(params: traces.Params, obs: jax.Array) -> jax.Array:
    """Evaluate one tanh layer and a linear one."""
    return traces.dense(params, "Dense_1", jnp.tanh(traces.dense(params, "Dense_0", obs)))


def evaluate(params: dict[str, traces.Params], batch: pp.Batch, *, discrete: bool) -> tuple[Any, jax.Array]:
    """Return a distribution and a value per agent, `[T, M, 2]`."""
    out = network(params["actor"], batch.obs)
    if discrete:
        distribution = distrax.Categorical(out.reshape((*out.shape[:-1], 2, -1)))
    else:
        distribution = distrax.Normal(out, jnp.full_like(out, jnp.exp(-0.5)))
    return distribution, network(params["critic"], batch.obs)


def ippo_learner(config: Any, order: np.ndarray, tapes: dict[str, traces.Tape]) -> pp.Learner:
    """Make the learner of the peer's update."""
    indices = order.reshape(1, -1, config["minibatch_size"])

    def given(epochs: int) -> pp.Part:
        return pp.given_indices(np.repeat(indices, epochs, axis=0), axis="segment")

    def adam(phase: str, **names: str) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(config[f"{phase}_grad_clip"]),
            optax.adam(config[f"{phase}_lr"], eps=config[f"{phase}_adam_eps"]),
            traces.record_steps(tapes[phase], {"loss": "loss", **names}),
        )

    actor = pp.chain(
        given(config["actor_epochs"] - 1),
        pp.advantage_normalize(axis=1),
        pp.clipped_surrogate(clip_eps=config["eps_clip"]), pp.policy_diagnostics(),
        pp.entropy_bonus(coef=config["ent_coeff"]),
        pp.kl_early_stop(config["kl_threshold"], estimator="k1", reduction="sum", check="epoch"),
    )  # fmt: skip
    critic = pp.chain(given(config["critic_epochs"]), pp.value_loss(coef=2 * config["vf_coeff"]))
    optimizers = {"actor": adam("actor", kl="early_stop_kl"), "critic": adam("critic")}
    policy = partial(evaluate, discrete=bool(config["discrete"]))
    estimate = pp.gae(gamma=config["gamma"], gae_lambda=config["gae_lambda"])
    recorder = traces.record_estimates(tapes["estimates"], {"advantage": "advantage"})
    return pp.learner(policy, pp.chain(estimate, recorder, pp.phases(actor=actor, critic=critic)), optimizers)


def rollout(z: traces.Arrays) -> pp.Batch:
    """Convert the peer's trajectories; their axis of agents comes after our axes."""
    names = ("obs", "action", "log_prob", "value", "reward", "next_value")
    fields = {name: time_major(z[f"traj/{name}"]) for name in names}
    return pp.Batch(**fields, terminated=jnp.repeat(time_major(z["traj/terminated"])[..., None], 2, axis=-1))


@pytest.mark.parametrize("case", CASES)
def test_learner_reproduces_ippo(case):
    z = traces.load(f"jaxdem_jaxagents/ippo_{case}")
    config, batch = settings(z), rollout(z)
    start = {name: traces.sub(z, f"{name}_init/") for name in ("actor", "critic")}
    tapes = {name: traces.Tape() for name in (*start, "estimates")}
    ((state, metrics),) = traces.replay(lambda: ippo_learner(config, z["minibatch_idx"], tapes), start, [((), batch)])
    [advantage] = tapes["estimates"].read()["advantage"]
    traces.close("advantage", advantage.swapaxes(0, 1), z["traj/advantage"], atol=1e-6)

    epochs = int(z["actor/epochs_run"])
    for phase, ran in (("actor", epochs), ("critic", config["critic_epochs"])):
        assert metrics[f"{phase}/epochs"] == ran
        assert metrics[f"{phase}/minibatches"] == state.opt_state[phase][1][0].count == z[f"{phase}/adam_count"]
    stopped = epochs < config["actor_epochs"] - 1
    assert metrics["actor/early_stopped"] == stopped == ("stop" in case and "nostop" not in case)

    kl_rounding = z["actor_loss_input/log_prob"][0].size * traces.EPS * np.max(np.abs(z["traj/log_prob"]))
    for phase, first in start.items():
        # One axis of minibatches replaces epochs and minibatches.
        recorded = {name: z[f"{phase}/mb_{name}"].ravel() for name in ("loss", "kl") if f"{phase}/mb_{name}" in z}
        after = {name: x.reshape(-1, *x.shape[2:]) for name, x in traces.sub(z, f"{phase}_mb_params/").items()}
        rounding = {"loss": 1e-6, "kl": kl_rounding}
        traces.close_steps(tapes[phase], state.params[phase], recorded, after, first, rounding)
        traces.close_tensors(f"{phase} final", state.params[phase], traces.sub(z, f"{phase}_final/"), first)
    traces.close("metric kl", metrics["actor/early_stop_kl"], z["actor/mb_kl"].mean(), kl_rounding)
