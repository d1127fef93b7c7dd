"""jaxagents' IPPO, number by number, from our functions, chain, phases and learner.

Only rollouts, first parameters and the order of the trajectories are taken from the recordings (see
`golden/jaxdem_jaxagents/`); all else comes out of one `learner.update` per case, in a free run over both phases.

The peer's choices are settings here:

* it standardizes advantages over the trajectories of the minibatch: `advantage_normalize(axis=1)`, time being axis 0;
* it runs `actor_epochs - 1` actor epochs at most, so that is how many are given;
* its stop goes by the *sum* of k1 over the last minibatch of an epoch;
* its value loss has no half: `value_loss(coef=2 * vf_coeff)`;
* its actors share one network and one loss, but have a log-probability, an advantage and a value each: a third axis;
* it drops truncations, and goes on across the reset with the value of the state after it: `truncated=None`.

One deviation, `kl_rounding`: a sum of n differences of log-probabilities has n float32 rounding errors.
"""

from functools import cache, partial
from typing import Any, NamedTuple

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
    """The peer's [B, T, ...] as our [T, B, ...]."""
    return jnp.asarray(x.swapaxes(0, 1))


def per_agent(x: np.ndarray) -> jax.Array:
    """A flag per environment as one per agent."""
    return jnp.repeat(time_major(x)[..., None], 2, axis=-1)


def traced(z: traces.Arrays) -> traces.Params:
    """The settings that do not decide shapes."""
    return {name: jnp.asarray(x, jnp.float32) for name, x in traces.sub(z, "cfg/").items() if x.dtype == np.float64}


def network(params: traces.Params, obs: jax.Array) -> jax.Array:
    """One tanh layer."""

    def layer(name: str, x: jax.Array) -> jax.Array:
        return x @ params[f"{name}/kernel"] + params[f"{name}/bias"][None, None]

    return layer("Dense_1", jnp.tanh(layer("Dense_0", obs)))


def evaluate(params: dict[str, traces.Params], batch: pp.Batch, *, discrete: bool) -> tuple[Any, jax.Array]:
    """A distribution and a value per agent, `[T, M, 2]`."""
    out = network(params["actor"], batch.obs)
    if discrete:
        distribution = distrax.Categorical(out.reshape((*out.shape[:-1], 2, -1)))
    else:
        distribution = distrax.Normal(out, jnp.full_like(out, jnp.exp(-0.5)))
    return distribution, network(params["critic"], batch.obs)


def actor_chain(config: Any, sampler: pp.Part, kl_threshold: Any) -> pp.Part:
    return pp.chain(
        sampler,
        pp.advantage_normalize(axis=1),
        pp.clipped_surrogate(clip_eps=config["eps_clip"]),
        pp.policy_diagnostics(),
        pp.entropy_bonus(coef=config["ent_coeff"]),
        pp.kl_early_stop(kl_threshold, estimator="k1", reduction="sum", check="epoch"),
    )


def critic_chain(config: Any, sampler: pp.Part) -> pp.Part:
    return pp.chain(sampler, pp.value_loss(coef=2 * config["vf_coeff"]))


class Sizes(NamedTuple):
    """What decides the shapes of a case; the rest of its settings is traced."""

    actor_epochs: int
    critic_epochs: int
    minibatches: int
    minibatch: int
    discrete: bool


def sizes(config: traces.Arrays) -> Sizes:
    minibatch = int(config["minibatch_size"])
    epochs = int(config["actor_epochs"]) - 1, int(config["critic_epochs"])
    return Sizes(*epochs, int(config["batch_size"]) // minibatch, minibatch, bool(config["discrete"]))


def gae(config: Any) -> pp.Part:
    return pp.gae(gamma=config["gamma"], gae_lambda=config["gae_lambda"])


@cache
def ippo_learner(size: Sizes) -> Any:
    """The peer's update."""
    lengths = {"actor": size.actor_epochs * size.minibatches, "critic": size.critic_epochs * size.minibatches}

    def adam(config: Any, phase: str, **names: str) -> optax.GradientTransformation:
        return optax.chain(
            traces.record_steps(lengths[phase], {"loss": "loss", **names}),
            optax.clip_by_global_norm(config[f"{phase}_grad_clip"]),
            optax.adam(config[f"{phase}_lr"], eps=config[f"{phase}_adam_eps"]),
        )

    def make_learner(config: Any, order: jax.Array) -> pp.Learner:
        indices = order.reshape(1, size.minibatches, size.minibatch)

        def given(epochs: int) -> pp.Part:
            return pp.given_indices(jnp.repeat(indices, epochs, axis=0), axis="segment")

        pipeline = pp.chain(
            gae(config),
            pp.phases(
                actor=actor_chain(config, given(size.actor_epochs), config["kl_threshold"]),
                critic=critic_chain(config, given(size.critic_epochs)),
            ),
        )
        optimizers = {"actor": adam(config, "actor", kl="early_stop_kl"), "critic": adam(config, "critic")}
        return pp.learner(partial(evaluate, discrete=size.discrete), pipeline, optimizers)

    return make_learner


def rollout(z: traces.Arrays) -> pp.Batch:
    """The peer's trajectories, with an axis of agents after ours."""
    fields = ("obs", "action", "log_prob", "value", "reward", "next_value")
    return pp.Batch(
        **{name: time_major(z[f"traj/{name}"]) for name in fields}, terminated=per_agent(z["traj/terminated"])
    )


@pytest.mark.parametrize("case", CASES)
def test_learner_reproduces_ippo(case):
    z = traces.load(f"jaxdem_jaxagents/ippo_{case}")
    size, batch = sizes(traces.sub(z, "cfg/")), rollout(z)
    estimated = traces.estimates(gae(traced(z)), batch)
    traces.close("advantage", estimated.advantage.swapaxes(0, 1), z["traj/advantage"], atol=1e-6)
    start = {name: traces.sub(z, f"{name}_init/") for name in ("actor", "critic")}
    ((state, metrics),) = traces.replay(ippo_learner(size), start, [((traced(z), z["minibatch_idx"]), batch)])

    epochs = int(z["actor/epochs_run"])
    for phase, ran in (("actor", epochs), ("critic", size.critic_epochs)):
        assert metrics[f"{phase}/epochs"] == ran
        assert metrics[f"{phase}/minibatches"] == state.opt_state[phase][2][0].count == z[f"{phase}/adam_count"]
    stopped = epochs < size.actor_epochs
    assert metrics["actor/early_stopped"] == stopped == ("stop" in case and "nostop" not in case)

    kl_rounding = z["actor_loss_input/log_prob"][0].size * traces.EPS * np.max(np.abs(z["traj/log_prob"]))
    for phase, first in start.items():
        # With one axis of minibatches in place of epochs and minibatches.
        recorded = {name: z[f"{phase}/mb_{name}"].ravel() for name in ("loss", "kl") if f"{phase}/mb_{name}" in z}
        after = {name: x.reshape(-1, *x.shape[2:]) for name, x in traces.sub(z, f"{phase}_mb_params/").items()}
        rows = traces.steps(state.opt_state[phase][0], state.params[phase])
        traces.close_steps(rows, recorded, after, first, {"loss": 1e-6, "kl": kl_rounding})
        traces.close_tensors(f"{phase} final", state.params[phase], traces.sub(z, f"{phase}_final/"), first)
    traces.close("metric kl", metrics["actor/early_stop_kl"], z["actor/mb_kl"].mean(), kl_rounding)
