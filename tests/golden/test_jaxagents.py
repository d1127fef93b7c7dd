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

Deviations, stated in the tests by name:

* `shuffled_targets`: the critic loss it reports sets observations in order against targets in shuffled order.
* `kl_rounding`: a sum of n differences of log-probabilities is only as good as n float32 roundings of them.

The optimizer is optax's on both sides, so nothing has to be allowed for there.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import ppo_parts as pp
from tests.golden_traces import EPS, GOLDEN, Arrays, Comparison, record, record_gradients

FOLDER = GOLDEN / "jaxdem_jaxagents"
CASES = ("cont_nostop", "cont_stop2", "cont_stop2_onemb", "cont_stop3", "cont_trunc", "disc_nostop")
UNITS = dict(np.load(FOLDER / "ippo_units.npz"))
UNIT_LOSSES = sorted({name.split("/")[1] for name in UNITS if name.startswith("loss/")})
GAE = jax.jit(pp.functional.gae)
Params = dict[str, jax.Array]


def sub(z: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): x for name, x in z.items() if name.startswith(prefix)}


def time_major(x: np.ndarray) -> jax.Array:
    """The peer's [B, T, ...] as our [T, B, ...]."""
    return jnp.asarray(x.swapaxes(0, 1))


def per_agent(x: np.ndarray) -> jax.Array:
    """A flag per environment as one per agent."""
    return jnp.repeat(time_major(x)[..., None], 2, axis=-1)


def network(params: Params, obs: jax.Array) -> jax.Array:
    """One tanh layer."""

    def layer(name: str, x: jax.Array) -> jax.Array:
        return x @ params[f"{name}/kernel"] + params[f"{name}/bias"][None, None]

    return layer("Dense_1", jnp.tanh(layer("Dense_0", obs)))


def evaluate(params: dict[str, Params], batch: pp.Batch, *, discrete: bool) -> tuple[Any, jax.Array]:
    """A distribution and a value per agent, `[T, M, 2]`."""
    out = network(params["actor"], batch.obs)
    if discrete:
        distribution = distrax.Categorical(out.reshape((*out.shape[:-1], 2, -1)))
    else:
        distribution = distrax.Normal(out, jnp.full_like(out, jnp.exp(-0.5)))
    return distribution, network(params["critic"], batch.obs)


def actor_losses(config: Any) -> pp.Part:
    """What stands after the sampler in the actor's phase, without the stop."""
    return pp.chain(
        pp.advantage_normalize(axis=1),
        pp.clipped_surrogate(clip_eps=config["eps_clip"]),
        pp.policy_diagnostics(),
        pp.entropy_bonus(coef=config["ent_coeff"]),
    )


class Sizes(NamedTuple):
    """What decides the shapes of a case; the rest of its settings is traced."""

    actor_epochs: int
    critic_epochs: int
    minibatches: int
    minibatch: int
    discrete: bool


def sizes(config: Arrays) -> Sizes:
    actor_epochs, critic_epochs = int(config["actor_epochs"]) - 1, int(config["critic_epochs"])
    minibatch = int(config["minibatch_size"])
    minibatches = int(config["batch_size"]) // minibatch
    return Sizes(actor_epochs, critic_epochs, minibatches, minibatch, bool(config["discrete"]))


def ippo_chain(config: Any, order: jax.Array, size: Sizes, shape: tuple[int, ...]) -> pp.Part:
    """The peer's update, with a tape before the phases and one at the end of each."""
    indices = order.reshape(1, size.minibatches, size.minibatch)
    minibatch = (shape[0], size.minibatch, shape[2])

    def given(epochs: int) -> pp.Part:
        return pp.given_indices(jnp.repeat(indices, epochs, axis=0), axis="segment")

    def read_actor(batch: pp.Batch) -> Any:
        return {
            "loss": sum(jnp.mean(loss) for loss in batch.losses.values()),
            "kl": batch.metrics["early_stop_kl"],
        }

    def read_critic(batch: pp.Batch) -> Any:
        return {"loss": jnp.mean(batch.losses["value"]), "targets": batch.target}

    return pp.chain(
        pp.gae(gamma=config["gamma"], gae_lambda=config["gae_lambda"]),
        record(1, lambda batch: {"advantage": batch.advantage}, advantage=shape),
        pp.phases(
            actor=pp.chain(
                given(size.actor_epochs),
                actor_losses(config),
                pp.kl_early_stop(config["kl_threshold"], estimator="k1", reduction="sum", check="epoch"),
                record(size.actor_epochs * size.minibatches, read_actor, loss=(), kl=()),
            ),
            critic=pp.chain(
                given(size.critic_epochs),
                pp.value_loss(coef=2 * config["vf_coeff"]),
                record(size.critic_epochs * size.minibatches, read_critic, loss=(), targets=minibatch),
            ),
        ),
    )


def adam(config: Any, phase: str, length: int) -> optax.GradientTransformation:
    return optax.chain(
        record_gradients(length),
        optax.clip_by_global_norm(config[f"{phase}_grad_clip"]),
        optax.adam(config[f"{phase}_lr"], eps=config[f"{phase}_adam_eps"]),
    )


def rollout(z: Arrays) -> pp.Batch:
    """The peer's trajectories, with an axis of agents behind ours."""
    fields = ("obs", "action", "log_prob", "value", "reward", "next_value")
    return pp.Batch(
        **{name: time_major(z[f"traj/{name}"]) for name in fields}, terminated=per_agent(z["traj/terminated"])
    )


@cache
def update(size: Sizes) -> Any:
    """One whole update, compiled once for all cases of the same sizes: settings and order are traced."""

    def run(config: Any, start: dict[str, Params], order: jax.Array, batch: pp.Batch) -> Any:
        unravel = {name: ravel_pytree(tree)[1] for name, tree in start.items()}
        lengths = {"actor": size.actor_epochs * size.minibatches, "critic": size.critic_epochs * size.minibatches}

        def evaluate_flat(flat: Any, batch: pp.Batch) -> Any:
            named = {name: unravel[name](x) for name, x in flat.items()}
            return evaluate(named, batch, discrete=size.discrete)

        pipeline = ippo_chain(config, order, size, batch.log_prob.shape)
        optimizers = {name: adam(config, name, length) for name, length in lengths.items()}
        learner = pp.learner(evaluate_flat, pipeline, optimizers)
        state = learner.init({name: ravel_pytree(tree)[0] for name, tree in start.items()})
        state, metrics = learner.update(jax.random.key(0), state, batch)
        last = {name: unravel[name](x) for name, x in state.params.items()}
        return state, metrics, last, reported(config, last, batch, state.pipeline[0][-1].rows["advantage"][0], size)

    return jax.jit(run)


def reported(config: Any, params: Any, batch: pp.Batch, advantage: jax.Array, size: Sizes) -> Arrays:
    """The losses the peer reports: on the whole rollout, under the parameters after the update."""
    context = pp.Context(key=jax.random.key(0), params=params, evaluate=partial(evaluate, discrete=size.discrete))
    batch = batch.replace(advantage=advantage)
    whole = pp.chain(pp.full_batch(), actor_losses(config))
    after, _ = whole.update(batch, whole.init(params), context)
    return {"actor_loss": sum(jnp.mean(loss) for loss in after.losses.values()), "value": after.current.value}


class Played(NamedTuple):
    """What ours did in one phase; leading axis: minibatches."""

    tape: Arrays
    grad: Arrays
    params: Arrays  # after each minibatch
    adam: Any


def play(z: Arrays) -> tuple[dict[str, Played], Any, Arrays, Arrays]:
    """A case through the learner."""
    config = sub(z, "cfg/")
    start = {name: sub(z, f"{name}_init/") for name in ("actor", "critic")}
    order = jnp.asarray(z["minibatch_idx"])
    numbers = {name: jnp.asarray(x, jnp.float32) for name, x in config.items() if x.dtype == np.float64}
    with jax.default_matmul_precision("float32"):
        state, metrics, last, loss = update(sizes(config))(numbers, start, order, rollout(z))
    played = {}
    for name, tree in start.items():
        unravel = jax.vmap(ravel_pytree(jax.tree.map(jnp.asarray, tree))[1])
        steps, (moments, *_) = state.opt_state[name][0].read(), state.opt_state[name][2]
        history = np.concatenate([steps["params"][1:], np.asarray(state.params[name])[None]])
        mean, square = (unravel(x[None]) for x in (moments.mu, moments.nu))
        played[name] = Played(
            state.pipeline[1][name][1][-1].read(),
            unravel(steps["grad"]),
            unravel(history),
            {"adam_count": moments.count, "adam_mu": mean, "adam_nu": square},
        )
    advantage = np.asarray(state.pipeline[0][-1].rows["advantage"][0]).swapaxes(0, 1)
    return played, jax.tree.map(np.asarray, metrics), {"advantage": advantage, **loss}, last


@pytest.mark.parametrize("case", CASES)
def test_learner_reproduces_ippo(case):
    z = dict(np.load(FOLDER / f"ippo_{case}.npz"))
    config, check = sub(z, "cfg/"), Comparison()
    played, metrics, whole, last = play(z)

    epochs = int(z["actor/epochs_run"])
    for phase, ran in (("actor", epochs), ("critic", int(config["critic_epochs"]))):
        check.equal(f"{phase} epochs", metrics[f"{phase}/epochs"], ran)
        check.equal(f"{phase} minibatches", metrics[f"{phase}/minibatches"], z[f"{phase}/adam_count"])
        check.equal(f"{phase} adam_count", played[phase].adam["adam_count"], z[f"{phase}/adam_count"])
    stopped = epochs < config["actor_epochs"] - 1
    check.equal("stopped", metrics["actor/early_stopped"], stopped)
    assert stopped == ("stop" in case and "nostop" not in case)
    check.finish()  # tapes of another length cannot be compared

    check.close("advantage", whole["advantage"], z["traj/advantage"], atol=1e-6)
    for phase, ours in played.items():
        compare_phase(check, phase, ours, z)
        for name, x in last[phase].items():
            check.close_tensor(f"{phase} final {name}", x, z[f"{phase}_final/{name}"], z[f"{phase}_init/{name}"])
    kl_rounding = z["actor_loss_input/log_prob"][0].size * EPS * np.max(np.abs(z["traj/log_prob"]))
    check.close("actor kl", played["actor"].tape["kl"], z["actor/mb_kl"].ravel(), kl_rounding)
    check.close("metric kl", metrics["actor/early_stop_kl"], z["actor/mb_kl"].mean(), kl_rounding)
    recorded = z["critic_loss_input/targets"]
    for targets in np.split(played["critic"].tape["targets"].swapaxes(1, 2), int(config["critic_epochs"])):
        check.close("critic targets", targets, recorded, atol=1e-6)

    check.close("actor final loss", whole["actor_loss"], z["actor/final_loss"], atol=1e-6)
    shuffled_targets = recorded.reshape(z["traj/value"].shape)
    error = np.square(np.asarray(whole["value"]).swapaxes(0, 1) - shuffled_targets)
    check.close("critic final loss", config["vf_coeff"] * error.mean(), z["critic/final_loss"])
    check.finish()


def compare_phase(check: Comparison, phase: str, ours: Played, z: Arrays) -> None:
    """Losses, gradients, parameters and moments, minibatch by minibatch."""
    recorded = z[f"{phase}/mb_loss"].ravel()
    check.close(f"{phase} loss", ours.tape["loss"], recorded, atol=1e-6)
    squares = [np.square(g).sum(axis=tuple(range(1, g.ndim))) for g in ours.grad.values()]
    check.close(f"{phase} grad norm", np.sqrt(sum(squares)), z[f"{phase}/mb_grad_norm"].ravel())
    for name in ours.grad:
        start = z[f"{phase}_init/{name}"]
        for theirs, x, first in (("grads", ours.grad, 0.0), ("params", ours.params, start)):
            flat = z[f"{phase}_mb_{theirs}/{name}"].reshape(x[name].shape)
            check.close_tensor(f"{phase} {theirs} {name}", x[name], flat, first)
        for moment in ("adam_mu", "adam_nu"):
            check.close_tensor(f"{phase} {moment}", ours.adam[moment][name][0], z[f"{phase}_{moment}/{name}"])


def test_the_truncated_case_has_truncations_that_matter():
    """`truncated=None` is a choice: with the truncations the advantages of that rollout are others."""
    z = dict(np.load(FOLDER / "ippo_cont_trunc.npz"))
    batch, config = rollout(z), sub(z, "cfg/")
    hyper = {name: float(config[name]) for name in ("gamma", "gae_lambda")}
    truncated = per_agent(z["traj/truncated"])
    args = (batch.reward, batch.value, batch.next_value, batch.terminated)
    with_it = GAE(*args, truncated, **hyper).advantage
    assert np.max(np.abs(with_it - GAE(*args, **hyper).advantage)) > 0.1


@pytest.mark.parametrize("rows", range(len(UNITS["adv/sizes"])))
def test_gae_reproduces_advantages(rows):
    check = Comparison()
    for j in range(4):
        z = sub(UNITS, f"adv/{rows}_{j}/")
        fields = [time_major(z[name]) for name in ("reward", "value", "next_value")]
        ours = GAE(*fields, per_agent(z["terminated"]), gamma=float(z["gamma"]), gae_lambda=float(z["gae_lambda"]))
        check.close("advantage", ours.advantage.swapaxes(0, 1), z["advantage"], atol=2e-6)
    check.finish()


def test_gae_reproduces_one_step():
    """The carry comes in as the advantage of a second step: reward `carry`, value 0, terminated."""
    z, check = sub(UNITS, "step/"), Comparison()
    later = {"reward": z["carry_in"], "value": 0 * z["value"], "next_value": 0 * z["value"]}
    fields = [jnp.stack([z[name], x]) for name, x in later.items()]
    flag = np.repeat(z["terminated"], 2, axis=1)
    hyper = {name: jnp.asarray(z[name])[None] for name in ("gamma", "gae_lambda")}
    ours = GAE(*fields, jnp.stack([flag, np.ones_like(flag)]), **hyper)
    check.close("carry", ours.advantage[1], z["carry_in"])
    check.close("out", ours.advantage[0], z["out"], atol=1e-6)
    check.finish()


def padded(x: np.ndarray) -> jax.Array:
    """Time-major, with zeros behind, so that unit cases of all sizes share one compilation."""
    x = x.swapaxes(0, 1)
    return jnp.asarray(np.pad(x, [(0, room - n) for room, n in zip((9, 6), x.shape, strict=False)] + [(0, 0)]))


@cache
def one_gradient(discrete: bool) -> Any:
    """Losses and gradients of both phases on a given minibatch."""

    def run(config: Any, params: Any, batch: pp.Batch) -> Any:
        actor = pp.chain(
            pp.full_batch(),
            actor_losses(config),
            pp.kl_early_stop(0.0, estimator="k1", reduction="sum", check="epoch"),
            record(1, lambda batch: {"log_prob": batch.current.log_prob}, log_prob=batch.log_prob.shape),
        )
        critic = pp.chain(pp.full_batch(), pp.value_loss(coef=2 * config["vf_coeff"]))
        optimizers = dict.fromkeys(("actor", "critic"), record_gradients(1))
        pipeline = pp.phases(actor=actor, critic=critic)
        learner = pp.learner(partial(evaluate, discrete=discrete), pipeline, optimizers)
        state, metrics = learner.update(jax.random.key(0), learner.init(params), batch)
        grads = {name: jax.tree.map(lambda x: x[0], tape.rows["grad"]) for name, tape in state.opt_state.items()}
        return metrics, grads, state.pipeline[1]["actor"][1][-1].rows["log_prob"][0]

    return jax.jit(run)


@pytest.mark.parametrize("unit", UNIT_LOSSES)
def test_losses_and_gradients_reproduce_the_unit_cases(unit):
    """Ratios far from 1. The minibatches are padded to one size behind a mask, which every part has to honor."""
    z, check = sub(UNITS, f"loss/{unit}/"), Comparison()
    config = {name: jnp.asarray(x, jnp.float32) for name, x in sub(z, "cfg/").items()}
    fields = {
        "obs": "obs",
        "action": "action",
        "log_prob": "log_prob_old",
        "advantage": "advantage",
        "target": "targets",
    }
    batch = pp.Batch(
        **{ours: padded(z[theirs]) for ours, theirs in fields.items()}, mask=padded(np.ones_like(z["advantage"]))
    )
    params = {name: sub(z, f"{name}_params/") for name in ("actor", "critic")}
    with jax.default_matmul_precision("float32"):
        metrics, grads, log_prob = one_gradient(bool(z["cfg/discrete"]))(config, params, batch)
    trajectories, steps = z["advantage"].shape[:2]
    check.close("log_prob", log_prob[:steps, :trajectories].swapaxes(0, 1), z["log_prob_new"], atol=1e-6)
    check.close("actor loss", metrics["actor/loss"], z["actor_loss"], atol=1e-6)
    check.close("kl", metrics["actor/early_stop_kl"], z["kl"], z["advantage"].size * EPS * np.max(-z["log_prob_old"]))
    check.close("critic loss", metrics["critic/loss"], z["critic_loss"])
    for phase, tree in grads.items():
        for name, grad in tree.items():
            check.close_tensor(f"{phase} grad {name}", grad, z[f"{phase}_grads/{name}"])
    check.finish()
