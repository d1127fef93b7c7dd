"""An older JaxDEM PPOTrainer, number by number: a variant that needs parts of one's own.

As in `test_golden_jaxdem.py`: a free run of `learner.update` from recorded rollouts, first parameters, drawn segments
and weights. Here the epoch is drawn at once from the rollout's advantages, and each minibatch has its advantages and
targets from the policy being trained. Written here, because they are no parts of ours:

* `rho_on_reward`: the peer's V-trace weighs the reward by the clipped ratio, and the rest of the TD error not at all.
  That is `functional.gae` with a reward rho r and a decay lambda c of each step's own.
* the two samples per state behind its entropy are recorded noise, given to `entropy_bonus` by a distribution without
  `entropy()`.

Deviations, stated in the tests by name:

* `own_last_value`: there is no value after the last step, the peer bootstraps there from the last step's own.
* `rounded_sum`: the peer's priorities are w / (sum w + 1e-8), ours with eps=0 w / sum w.
* `never_drawn`: where the probability is 0 the peer's importance weight is infinite, ours 0; and ours counts only the
  segments that can be drawn.
* `variance_floor`: 1e-8 in the denominator of the peer's explained variance.
"""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from tests.golden import test_jaxdem as head
from tests.golden.test_jaxdem import (
    FOLDER,
    Box,
    Params,
    beta_of,
    evaluate,
    losses,
    moments,
    numbers,
    padded,
    sub,
    vtrace_config,
)
from tests.golden_traces import Arrays, Comparison, record, record_gradients

ADVANTAGES = dict(np.load(FOLDER / "jaxdem_seed_advantages.npz"))
PRIORITY = dict(np.load(FOLDER / "jaxdem_seed_priority.npz"))
LOSS = dict(np.load(FOLDER / "jaxdem_seed_loss.npz"))
# Here the peer's KL is (ratio - 1) - log_ratio, which carries the rounding of ratio.
ROUNDING = {**head.ROUNDING, "approx_KL": 1e-7, "explained_variance": 1e-6}
SCALARS = ("loss", "actor_loss", "value_loss", "entropy", "approx_KL", "explained_variance")
ELEMENTS = ("ratio", "returns", "advantage")


def rho_on_reward(
    log_ratio: Any,
    reward: Any,
    value: Any,
    done: Any,
    mask: Any = None,
    *,
    gamma: Any,
    gae_lambda: Any,
    rho_clip: Any,
    c_clip: Any,
) -> pp.functional.Advantages:
    """The peer's V-trace, with a mask behind the last step of a padded batch."""
    ratio = jnp.exp(log_ratio)
    mask = jnp.ones_like(value) if mask is None else mask
    last = jnp.concatenate([mask[1:] == 0, jnp.ones_like(mask[:1], bool)])
    own_last_value = pp.functional.next_values(value, value[-1], last, value)
    rho, c = jnp.minimum(ratio, rho_clip), jnp.minimum(ratio, c_clip)
    return pp.functional.gae(
        rho * reward, value, own_last_value, done, gamma=gamma, gae_lambda=gae_lambda * c, mask=mask
    )


RHO_ON_REWARD = jax.jit(rho_on_reward)


@pytest.mark.parametrize("shape", sorted({x.shape for name, x in ADVANTAGES.items() if name.endswith("/reward")}))
def test_gae_reproduces_advantages(shape):
    check = Comparison()
    for i in range(int(ADVANTAGES["n"])):
        z = sub(ADVANTAGES, f"{i}/")
        if z["reward"].shape != shape:
            continue
        args = z["new_log_prob"] - z["log_prob"], z["reward"], z["value"], z["done"]
        ours = RHO_ON_REWARD(*args, **numbers(z))
        check.close_tensor("advantage", ours.advantage, z["advantage"])
        check.close_tensor("returns", ours.target, z["returns"])
    check.finish()


@jax.jit
def priorities_and_weights(advantage: jax.Array, indices: jax.Array, alpha: Any, beta: Any) -> Any:
    probabilities = pp.functional.segment_priorities(advantage, alpha=alpha, eps=0.0)
    return probabilities, pp.functional.importance_weights(probabilities, indices, beta=beta)


def compare_priorities(
    check: Comparison, advantage: np.ndarray, drawn: np.ndarray, alpha: float, beta: float, recorded: Any, weights: Any
) -> None:
    """Probabilities and weights from these advantages."""
    p, w = priorities_and_weights(advantage, drawn, alpha, beta)
    total = np.sum(np.abs(advantage).sum(0, dtype=np.float64) ** alpha)
    rounded_sum = total / (total + 1e-8)
    check.close("prio_probs", p * rounded_sum, recorded)
    never_drawn = np.isinf(weights)
    np.testing.assert_array_equal(never_drawn, (recorded[drawn] == 0) & (beta > 0))
    # Where all advantages are 0, the peer's probabilities are 0 and its weights infinite; here segments are equal.
    np.testing.assert_array_equal(w[never_drawn], 0 if np.any(advantage) else 1)
    if not np.all(never_drawn):
        fewer = np.mean(recorded > 0)
        check.close("seg_w", (w * (rounded_sum / fewer) ** -beta)[~never_drawn], weights[~never_drawn])


@pytest.mark.parametrize("i", range(int(PRIORITY["n"])))
def test_priorities_and_weights_reproduce_the_peer(i):
    z, check = sub(PRIORITY, f"{i}/"), Comparison()
    config = numbers(z)
    end = config["beta0"] + config["anneal"] * (1 - config["beta0"])
    beta = float(pp.linear_schedule(config["beta0"], end, int(config["num_epochs"]))(int(config["epoch"])))
    check.close("beta", beta, z["beta_t"])
    compare_priorities(check, z["advantage"], z["idx"], config["alpha"], beta, z["prio_probs"], z["seg_w"][0])
    check.finish()


class Sampled(NamedTuple):
    """A Gaussian or a box, whose samples are made of given noise, and which has no entropy()."""

    policy: Any
    noise: jax.Array

    def log_prob(self, action: jax.Array) -> jax.Array:
        return jax.vmap(self.policy.log_prob)(action)

    def sample(self, *, seed: jax.Array, sample_shape: tuple[int, ...]) -> jax.Array:
        del seed
        assert sample_shape == self.noise.shape[:1]
        policy = self.policy
        if not isinstance(policy, Box):
            return policy.loc[None] + policy.scale_diag[None] * self.noise
        x = policy.mean[None] + policy.std[None] * self.noise
        return policy.center[None] + policy.half[None] * jnp.tanh(x / policy.width)


def seed_chain(config: dict[str, Any], drawn: Any, weights: Any, noise: Any, shape: tuple[int, int]) -> pp.Part:
    """The peer's epoch: drawn segments, advantages under the policy being trained, and a tape at the end."""

    def advantages(batch: pp.Batch) -> pp.Batch:
        log_ratio, value = jax.lax.stop_gradient((batch.current_log_ratio(), batch.current.value))
        hyper = {name: config[name] for name in ("gamma", "gae_lambda", "rho_clip", "c_clip")}
        out = rho_on_reward(log_ratio, batch.reward, value, batch.terminated, batch.mask, **hyper)
        return batch.replace(advantage=out.advantage, target=out.target)

    def with_noise(batch: pp.Batch, state: Any, context: pp.Context) -> tuple[pp.Batch, Any]:
        distribution = Sampled(batch.current.distribution, noise[context.minibatch])
        return batch.replace(current=batch.current._replace(distribution=distribution)), state

    def read(batch: pp.Batch) -> dict[str, jax.Array]:
        return {
            "loss": sum(pp.functional.masked_mean(loss, batch.mask) for loss in batch.losses.values()),
            "actor_loss": batch.metrics["policy_loss"],
            "value_loss": batch.metrics["value_loss"],
            "entropy": batch.metrics["entropy"],
            "approx_KL": batch.metrics["approx_kl"],
            "explained_variance": pp.functional.explained_variance(batch.current.value, batch.target, mask=batch.mask),
            "ratio": jnp.exp(batch.current_log_ratio()),
            "returns": batch.target,
            "advantage": batch.advantage,
        }

    return pp.chain(
        pp.given_indices(drawn, axis="segment", weights=weights),
        pp.stateless(advantages, provides=("advantage", "target"), place="after_sampler", needs_time=True),
        pp.advantage_normalize(ddof=0),
        pp.advantage_weight(),
        pp.Part(init=lambda params, key: (), update=with_noise, name="with_noise", place="after_sampler"),
        losses(config["clip_eps"], config["value_coeff"], config["entropy_coeff"], num_samples=2),
        record(len(drawn), read, **dict.fromkeys(SCALARS, ()), **dict.fromkeys(ELEMENTS, shape)),
    )


def variance_floor(explained: np.ndarray, returns: list[np.ndarray]) -> np.ndarray:
    """Our explained variance as the peer's."""
    variance = np.array([x.var(dtype=np.float64) for x in returns])
    return 1 - (1 - explained) * variance / (variance + 1e-8)


@cache
def one_gradient(boxed: bool) -> Any:
    """Everything about a given minibatch, and the gradient."""

    def run(config: Any, params: Params, batch: pp.Batch, weights: jax.Array, noise: jax.Array) -> Any:
        def evaluate_box(params: Params, batch: pp.Batch) -> Any:
            policy, value = evaluate(params, batch, sub(config, "box/") if boxed else None)
            return (policy._replace(slack=config["box_eps"]) if boxed else policy), value

        drawn = np.arange(batch.reward.shape[1])[None]
        pipeline = seed_chain(config, drawn, weights[None], noise[None], batch.reward.shape)
        learner = pp.learner(evaluate_box, pipeline, record_gradients(1))
        state, _ = learner.update(jax.random.key(0), learner.init(params), batch)
        return jax.tree.map(lambda x: x[0], (state.pipeline[1][1][-1].rows, state.opt_state.rows["grad"]))

    return jax.jit(run)


@pytest.mark.parametrize("i", range(int(LOSS["n"])))
def test_losses_and_gradients_reproduce_the_unit_cases(i):
    """The minibatches are padded to one size behind a mask, which every part has to honor."""
    z, check = sub(LOSS, f"{i}/"), Comparison()
    fields = {"obs": "obs", "action": "action", "log_prob": "old_log_prob", "value": "old_value", "reward": "reward"}
    shape = z["reward"].shape
    batch = pp.Batch(
        **{ours: padded(z[theirs]) for ours, theirs in fields.items()},
        terminated=padded(z["done"]),
        mask=padded(np.ones(shape)),
    )
    config = {name: jnp.asarray(x, jnp.float32) for name, x in sub(z, "cfg/").items()}
    config |= {f"box/{name}": x for name, x in config.items()}
    noise = jnp.stack([padded(x) for x in z["entropy_noise"]])
    weights = np.pad(z["seg_w"][0], (0, 7 - shape[1]), constant_values=1)
    with jax.default_matmul_precision("float32"):
        ours, grads = one_gradient(bool(z["cfg/box"]))(config, sub(z, "params/"), batch, weights, noise)
    ours = {name: np.asarray(x[: shape[0], : shape[1]] if x.ndim else x) for name, x in ours.items()}
    check.close_tensor("advantage", ours["advantage"], z["advantage_norm_weighted"])
    check.close_tensor("returns", ours["returns"], z["aux/returns"])
    check.close_tensor("ratio", ours["ratio"], z["aux/ratio"])
    check.close("loss", ours["loss"], z["loss"], ROUNDING["loss"])
    ours["explained_variance"] = variance_floor(ours["explained_variance"], [ours["returns"]])[0]
    for name in SCALARS[1:]:
        check.close(name, ours[name], z[f"aux/{name}"], ROUNDING.get(name, 0.0))
    for name, grad in grads.items():
        check.close_tensor(f"grad {name}", grad, z[f"grads/{name}"])
    check.finish()


class Played(NamedTuple):
    """What ours did in one epoch; leading axis: minibatches."""

    minibatch: Arrays
    grad: Arrays
    params: Arrays  # before each minibatch, and once more after the last
    metrics: Arrays
    moments: dict[str, Any]


def seed_optimizer(config: dict[str, float], length: int) -> optax.GradientTransformation:
    """The peer's schedule counts minibatches, and reaches its floor after as many of them as there are epochs."""
    rate = optax.cosine_decay_schedule(
        config["learning_rate"],
        int(config["num_epochs"]),
        alpha=config["learning_rate_decay_min_fraction"],
        exponent=config["learning_rate_decay_exponent"],
    )
    return optax.chain(
        record_gradients(length),
        optax.clip_by_global_norm(config["max_grad_norm"]),
        optax.contrib.muon(rate, eps=1e-5),
    )


def rollout(z: Arrays) -> pp.Batch:
    fields = ("obs", "action", "log_prob", "value", "reward")
    return pp.Batch(**{name: jnp.asarray(z[f"td/{name}"]) for name in fields}, terminated=jnp.asarray(z["td/done"]))


def play(z: Arrays, config: dict[str, float]) -> list[Played]:
    """All epochs of a case through the learner."""
    optimizer = seed_optimizer(config, int(config["num_minibatches"]))
    settings = vtrace_config(config) | {
        name: config[f"ppo_{name}"] for name in ("clip_eps", "value_coeff", "entropy_coeff")
    }

    @jax.jit
    def epoch(params: Params, opt_state: Any, batch: pp.Batch, drawn: Any, weights: Any, noise: Any) -> Any:
        pipeline = seed_chain(settings, drawn, weights, noise, (batch.reward.shape[0], drawn.shape[1]))
        learner = pp.learner(evaluate, pipeline, optimizer)
        fresh = learner.init(params)
        fresh = fresh._replace(opt_state=(fresh.opt_state[0], *opt_state[1:]))  # a new tape
        return learner.update(jax.random.key(0), fresh, batch)

    params = {name: jnp.asarray(x) for name, x in sub(z, "epoch0/params_before/").items()}
    opt_state, played = jax.jit(optimizer.init)(params), []
    for i in range(int(config["n_epochs_recorded"])):
        recorded = sub(z, f"epoch{i}/")
        drawn, weights, noise = (jnp.asarray(recorded[name]) for name in ("idx", "mb/seg_w", "mb/entropy_noise"))
        state, metrics = epoch(params, opt_state, rollout(recorded), drawn, weights[:, 0], noise)
        params, opt_state = state.params, state.opt_state
        steps, tape = opt_state[0].read(), state.pipeline[1][1][-1].read()
        history = {name: np.concatenate([x, np.asarray(params[name])[None]]) for name, x in steps["params"].items()}
        metrics = jax.tree.map(np.asarray, metrics)
        played.append(Played(tape, steps["grad"], history, metrics, moments(opt_state[2])))
    return played


@pytest.mark.parametrize("case", ["single", "multi", "lrfloor"])
def test_learner_reproduces_jaxdem(case):
    z = dict(np.load(FOLDER / f"jaxdem_seed_epoch_{case}.npz"))
    config, check = numbers(z), Comparison()
    with jax.default_matmul_precision("float32"):
        played = play(z, config)
    start = sub(z, "epoch0/params_before/")
    for i, ours in enumerate(played):
        compare_epoch(check, ours, sub(z, f"epoch{i}/"), config, beta_of(config, i), start)
    check.finish()


def compare_epoch(
    check: Comparison, ours: Played, z: Arrays, config: dict[str, float], beta: float, start: Arrays
) -> None:
    """Everything recorded within one epoch."""
    args = jnp.zeros_like(z["td/value"]), z["td/reward"], z["td/value"], z["td/done"]
    before = RHO_ON_REWARD(*args, **vtrace_config(config))
    check.close_tensor("rollout advantage", before.advantage, z["td/advantage"])
    check.close_tensor("rollout returns", before.target, z["td/returns"])
    for drawn, weights in zip(z["idx"], z["mb/seg_w"][:, 0], strict=True):
        alpha = config["importance_sampling_alpha"]
        compare_priorities(check, z["td/advantage"], drawn, alpha, beta, z["prio_probs"], weights)

    minibatch = dict(ours.minibatch)
    minibatch["explained_variance"] = variance_floor(minibatch["explained_variance"], list(minibatch["returns"]))
    check.close("loss", minibatch["loss"], z["mb/loss"], ROUNDING["loss"])
    for name in SCALARS[1:]:
        check.close(name, minibatch[name], z[f"mb/aux/{name}"], ROUNDING.get(name, 0.0))
    for name in ("ratio", "returns"):
        check.close_tensor(name, minibatch[name], z[f"mb/aux/{name}"])
    names = {"policy_loss": "actor_loss", "ratio_mean": "ratio", "approx_kl": "approx_KL"}
    for name in ("value_loss", "entropy", "loss", "grad_norm", *names):
        theirs = names.get(name, name)
        check.close(f"metric {name}", ours.metrics[name], z[f"metrics/{theirs}"], ROUNDING.get(theirs, 0.0))
    for name, first in start.items():
        check.close_tensor(f"grad {name}", ours.grad[name], z[f"mb/grads/{name}"])
        check.close_tensor(f"params {name}", ours.params[name][:-1], z[f"mb/params_before/{name}"], first)
        check.close_tensor(f"params {name}", ours.params[name][1:], z[f"mb/params_after/{name}"], first)
    for name, x in ours.moments.items():
        check.close_tensor(name.split("/")[0], x, z[f"opt_after/{name}"])
