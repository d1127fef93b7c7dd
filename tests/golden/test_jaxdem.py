"""JaxDEM's PPOTrainer, number by number, from our functions, chain and learner.

Only rollouts, first parameters, drawn segments and their weights are taken from the recordings (see
`golden/jaxdem_jaxagents/`); all else comes out of `learner.update`, in one free run per case: parameters and optimizer
go on from minibatch to minibatch and from epoch to epoch, and are never put back on the recorded track.

The peer recomputes advantages of the drawn segments after each minibatch, from the values and ratios it had before the
step; that is `given_indices(refresh="minibatch")` behind `vtrace`.

Deviations, stated in the tests by name:

* `mass`: the peer's priorities are divided by sum(w) + eps, not by sum(w + eps), so they sum to slightly more than 1
  (to N where no segment has any advantage). This lowers its importance weights by mass^-beta.
* `own_last_value`: without a value after the last step the peer bootstraps there from the last step's own value.
* the entropy in a box (a squashed Gaussian, by quadrature) and the shaping of rewards are no parts of ours: the
  distribution is written here, the shaping is `functional.reverse_recurrence`.
"""

from functools import cache
from typing import Any, NamedTuple

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from tests.golden_traces import GOLDEN, Arrays, Comparison, record, record_gradients

FOLDER = GOLDEN / "jaxdem_jaxagents"
ADVANTAGES = dict(np.load(FOLDER / "jaxdem_head_advantages.npz"))
PRIORITY = dict(np.load(FOLDER / "jaxdem_head_priority.npz"))
LOSS = dict(np.load(FOLDER / "jaxdem_head_loss.npz"))
VTRACE = jax.jit(pp.functional.vtrace)
EPS = 1e-6  # in the peer's priorities and ours
Params = dict[str, jax.Array]


def sub(z: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): x for name, x in z.items() if name.startswith(prefix)}


def numbers(z: Arrays) -> dict[str, float]:
    """The settings of a case."""
    return {name: float(x) for name, x in sub(z, "cfg/").items() if x.ndim == 0}


def peer_vtrace(
    config: dict[str, float], reward: Any, value: Any, ratio: Any, done: Any, last_value: Any = None
) -> Any:
    """Our V-trace on the peer's arrays."""
    own_last_value = value[-1] if last_value is None else last_value
    next_value = pp.functional.next_values(jnp.asarray(value), jnp.asarray(own_last_value))
    return VTRACE(jnp.log(ratio), reward, value, next_value, done, **config)


@pytest.mark.parametrize("shape", sorted({x.shape for name, x in ADVANTAGES.items() if name.endswith("/reward")}))
def test_vtrace_reproduces_advantages(shape):
    check = Comparison()
    for i in range(int(ADVANTAGES["n"])):
        z = sub(ADVANTAGES, f"{i}/")
        if z["reward"].shape != shape:
            continue
        config = numbers(z)
        given = bool(config.pop("has_last_value"))
        fields = [z[name] for name in ("reward", "value", "ratio", "done")]
        ours = peer_vtrace(config, *fields, z["last_value"] if given else None)
        check.close_tensor("advantage", ours.error, z["advantage"])
        check.close_tensor("returns", ours.target, z["returns"])
    check.finish()


def mass(advantage: Any, alpha: float) -> float:
    """What the peer's priorities sum to."""
    total, segments = np.sum(np.abs(advantage).sum(0, dtype=np.float64) ** alpha), advantage.shape[1]
    return 1 + (segments - 1) * EPS / (total + EPS)


@jax.jit
def priorities_and_weights(advantage: jax.Array, indices: jax.Array, alpha: Any, beta: Any) -> Any:
    probabilities = pp.functional.segment_priorities(advantage, alpha=alpha, eps=EPS)
    weights = pp.functional.importance_weights(probabilities, indices, beta=beta)
    normalized = pp.functional.advantage_normalize(advantage[:, indices], ddof=0)
    return probabilities, weights, normalized * weights[None]


@pytest.mark.parametrize("i", range(int(PRIORITY["n"])))
def test_priorities_and_weights_reproduce_the_peer(i):
    z, check = sub(PRIORITY, f"{i}/"), Comparison()
    config = numbers(z)
    end = config["beta0"] + config["anneal"] * (1 - config["beta0"])
    beta = pp.linear_schedule(config["beta0"], end, int(config["num_epochs"]))(int(config["epoch"]))
    check.close("beta", beta, z["beta_t"])
    p, w, weighted = priorities_and_weights(z["advantage"], z["idx"], config["alpha"], beta)
    heavier = mass(z["advantage"], config["alpha"])
    check.close("mass", heavier, z["prio_probs"].sum())
    check.close("prio_probs", p * heavier, z["prio_probs"])
    check.close("seg_w", w * heavier**-beta, z["seg_w"])
    check.close_tensor("advantage_norm_weighted", weighted * heavier**-beta, z["advantage_norm_weighted"])
    check.finish()


@pytest.mark.parametrize("i", range(sum(name.startswith("drip") and name.endswith("out") for name in PRIORITY)))
def test_reverse_recurrence_reproduces_the_shaping_of_rewards(i):
    z, check = sub(PRIORITY, f"drip{i}/"), Comparison()
    ours = pp.functional.reverse_recurrence(z["reward"], jnp.asarray(numbers(z)["decay"] * (1 - z["done"])))
    check.close_tensor("shaped reward", ours, z["out"])
    check.finish()


class Box(NamedTuple):
    """center + half * tanh(x / width) of a Gaussian x, independent dimensions."""

    mean: jax.Array
    std: jax.Array
    center: jax.Array
    half: jax.Array
    width: float
    eps: float
    slack: float = 0.0  # of the inverse: what it adds to half

    def _log_slope(self, x: jax.Array, half: jax.Array) -> jax.Array:
        z = x / self.width
        return jnp.log(half / self.width) + 2 * (jnp.log(2.0) - z - jax.nn.softplus(-2 * z))

    def log_prob(self, action: jax.Array) -> jax.Array:
        inside = jnp.clip((action - self.center) / (self.half + self.slack), -1 + self.eps, 1 - self.eps)
        x = self.width * jnp.arctanh(inside)
        base = distrax.MultivariateNormalDiag(self.mean, self.std).log_prob(x)
        return base - jnp.sum(self._log_slope(x, self.half), axis=-1)

    def entropy(self) -> jax.Array:
        nodes, weights = np.polynomial.hermite_e.hermegauss(16)
        nodes, weights = (jnp.asarray(x, jnp.float32) for x in (nodes, weights / np.sqrt(2 * np.pi)))
        around = nodes[:, None, None, None]
        slope = self._log_slope(self.mean[None] + self.std[None] * around, self.half[None])
        base = distrax.MultivariateNormalDiag(self.mean, self.std).entropy()
        return base + jnp.einsum("k,k...a->...", weights, slope)


def evaluate(params: Params, batch: pp.Batch, box: dict[str, jax.Array] | None = None) -> tuple[Any, jax.Array]:
    """A shared layer, two heads and a deviation that does not depend on the state."""

    def layer(name: str, x: jax.Array) -> jax.Array:
        return x @ params[f"{name}/kernel"] + params[f"{name}/bias"][None, None]

    hidden = jax.nn.gelu(layer("network/layers/0", batch.obs), approximate=True)
    mean = layer("actor_mu" if "actor_mu/kernel" in params else "actor", hidden)
    std = jnp.broadcast_to(jnp.exp(params["_log_std"])[None], mean.shape)
    value = layer("critic", hidden)[..., 0]
    if box is None:
        return distrax.MultivariateNormalDiag(mean, std), value
    center, half = (jnp.broadcast_to(box[f"box_{name}"], mean.shape) for name in ("center", "half"))
    return Box(mean, std, center, half, box["box_width"], box["box_eps"]), value


def losses(clip_eps: Any, value_coef: Any, entropy_coef: Any, num_samples: int = 1) -> pp.Part:
    return pp.chain(
        pp.clipped_surrogate(clip_eps=clip_eps),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=clip_eps, coef=value_coef),
        pp.entropy_bonus(coef=entropy_coef, num_samples=num_samples),
    )


def read_minibatch(batch: pp.Batch) -> dict[str, jax.Array]:
    """What the learner computed on a minibatch, by the peer's names."""
    return {
        "loss": sum(pp.functional.masked_mean(loss, batch.mask) for loss in batch.losses.values()),
        "actor_loss": batch.metrics["policy_loss"],
        "value_loss": batch.metrics["value_loss"],
        "entropy": batch.metrics["entropy"],
        "approx_KL": batch.metrics["kl"],
        "explained_variance": pp.functional.explained_variance(batch.current.value, batch.target, mask=batch.mask),
        "value": batch.current.value,
        "ratio": jnp.exp(batch.current_log_ratio()),
        "advantage": batch.advantage,
        "returns": batch.target,
        "entropy_per_state": batch.current.distribution.entropy(),
    }


SCALARS = ("loss", "actor_loss", "value_loss", "entropy", "approx_KL", "explained_variance")
# Means over a minibatch of terms of size 1 that cancel, or squares of rounding errors: float32 leaves this much.
ROUNDING = {"actor_loss": 1e-6, "loss": 1e-6, "approx_KL": 1e-12}


def record_minibatches(length: int, shape: tuple[int, ...]) -> pp.Part:
    """The peer's KL, which is k2, and a tape of `read_minibatch`."""

    def kl(batch: pp.Batch) -> pp.Batch:
        k2 = pp.functional.approx_kl(batch.current_log_ratio(), estimator="k2")
        return batch.add_metrics(kl=pp.functional.masked_mean(k2, batch.mask))

    elements = dict.fromkeys(("value", "ratio", "advantage", "returns", "entropy_per_state"), shape)
    return pp.chain(pp.stateless(kl), record(length, read_minibatch, **dict.fromkeys(SCALARS, ()), **elements))


def padded(x: np.ndarray) -> jax.Array:
    """With zeros behind, so that cases of all sizes share one compilation."""
    room = [(0, size - n) for size, n in zip((9, 7), x.shape, strict=False)]
    return jnp.asarray(np.pad(x, room + [(0, 0)] * (x.ndim - 2)))


@cache
def one_gradient(boxed: bool) -> Any:
    """Everything about a given minibatch, and the gradient."""

    def run(config: Any, params: Params, batch: pp.Batch) -> Any:
        pipeline = pp.chain(
            pp.full_batch(),
            losses(config["clip_eps"], config["value_coeff"], config["entropy_coeff"]),
            record_minibatches(1, batch.log_prob.shape),
        )
        box = sub(config, "box/") if boxed else None
        learner = pp.learner(lambda p, b: evaluate(p, b, box), pipeline, record_gradients(1))
        state, _ = learner.update(jax.random.key(0), learner.init(params), batch)
        return jax.tree.map(lambda x: x[0], (state.pipeline[1][1][-1].rows, state.opt_state.rows["grad"]))

    return jax.jit(run)


@pytest.mark.parametrize("i", range(int(LOSS["n"])))
def test_losses_and_gradients_reproduce_the_unit_cases(i):
    """The minibatches are padded to one size behind a mask, which every part has to honor."""
    z, check = sub(LOSS, f"{i}/"), Comparison()
    fields = {"obs": "obs", "action": "action", "log_prob": "old_log_prob", "value": "old_value"}
    fields |= {"advantage": "advantage", "target": "returns"}
    shape = z["advantage"].shape
    batch = pp.Batch(**{ours: padded(z[theirs]) for ours, theirs in fields.items()}, mask=padded(np.ones(shape)))
    config = {name: jnp.asarray(x, jnp.float32) for name, x in sub(z, "cfg/").items()}
    config |= {f"box/{name}": x for name, x in config.items()}
    with jax.default_matmul_precision("float32"):
        ours, grads = one_gradient(bool(z["cfg/box"]))(config, sub(z, "params/"), batch)
    ours = {name: x[: shape[0], : shape[1]] if x.ndim else x for name, x in ours.items()}
    check.close("entropy_per_state", ours["entropy_per_state"], np.broadcast_to(z["entropy_per_state"], shape))
    check.close_tensor("value", ours["value"], z["new_value"])
    check.close_tensor("ratio", ours["ratio"], z["aux/ratio"])
    check.close("loss", ours["loss"], z["loss"], ROUNDING["loss"])
    for name in SCALARS[1:]:
        check.close(name, ours[name], z[f"aux/{name}"], ROUNDING.get(name, 0.0))
    for name, grad in grads.items():
        check.close_tensor(f"grad {name}", grad, z[f"grads/{name}"])
    check.finish()


def jaxdem_chain(config: dict[str, float], indices: jax.Array, weights: jax.Array, shape: tuple[int, int]) -> pp.Part:
    """The peer's epoch, with a tape on either side of the sampler."""

    def read_rollout(batch: pp.Batch) -> dict[str, jax.Array]:
        ratio = jnp.exp(batch.log_ratio)
        return {"value": batch.value, "ratio": ratio, "advantage": batch.advantage, "returns": batch.target}

    return pp.chain(
        pp.vtrace(**vtrace_config(config)),
        record(len(indices), read_rollout, **dict.fromkeys(("value", "ratio", "advantage", "returns"), shape)),
        pp.given_indices(indices, axis="segment", weights=weights, refresh="minibatch"),
        pp.advantage_normalize(ddof=0),
        pp.advantage_weight(),
        losses(config["ppo_clip_eps"], config["ppo_value_coeff"], config["ppo_entropy_coeff"]),
        record_minibatches(len(indices), (shape[0], indices.shape[1])),
    )


def vtrace_config(config: dict[str, float]) -> dict[str, float]:
    names = {"gamma": "gamma", "gae_lambda": "lambda", "rho_clip": "rho_clip", "c_clip": "c_clip"}
    return {ours: config[f"advantage_{theirs}"] for ours, theirs in names.items()}


def jaxdem_optimizer(config: dict[str, float], length: int) -> optax.GradientTransformation:
    """The peer's schedule counts minibatches, and reaches 0 after as many of them as there are epochs."""
    rate = optax.cosine_decay_schedule(config["learning_rate"], int(config["num_epochs"]))
    return optax.chain(
        record_gradients(length),
        optax.clip_by_global_norm(config["max_grad_norm"]),
        optax.contrib.muon(rate, eps=1e-12),
    )


def rollout(z: Arrays) -> pp.Batch:
    value = jnp.asarray(z["init/value"])
    return pp.Batch(
        obs=jnp.asarray(z["td_end/obs"]),
        action=jnp.asarray(z["td_end/action"]),
        log_prob=jnp.asarray(z["td_end/log_prob"]),
        value=value,
        reward=jnp.asarray(z["init/reward"]),
        terminated=jnp.asarray(z["init/done"]),
        next_value=pp.functional.next_values(value, jnp.asarray(z["init/last_value"])),
    )


def importance_weights(z: Arrays, beta: float) -> np.ndarray:
    """What the peer made of its own probabilities."""
    drawn = np.take_along_axis(z["mb/prio_probs"], z["mb/idx"], axis=1)
    return (z["mb/prio_probs"].shape[1] * drawn) ** np.float32(-beta)


def beta_of(config: dict[str, float], epoch: int) -> float:
    start = config["importance_sampling_beta"]
    end = start + config["anneal_importance_sampling_beta"] * (1 - start)
    return float(pp.linear_schedule(start, end, int(config["num_epochs"]))(epoch))


class Played(NamedTuple):
    """What ours did in one epoch; leading axis: minibatches."""

    buffers: Arrays
    minibatch: Arrays
    grad: Arrays
    params: Arrays  # before each minibatch, and once more after the last
    metrics: Arrays
    moments: dict[str, Any]


def play(z: Arrays, config: dict[str, float]) -> list[Played]:
    """All epochs of a case through the learner."""
    length = int(config["num_minibatches"])
    optimizer = jaxdem_optimizer(config, length)

    @jax.jit
    def epoch(params: Params, opt_state: Any, batch: pp.Batch, indices: jax.Array, weights: jax.Array) -> Any:
        learner = pp.learner(evaluate, jaxdem_chain(config, indices, weights, batch.value.shape), optimizer)
        fresh = learner.init(params)
        fresh = fresh._replace(
            opt_state=(fresh.opt_state[0], *(fresh.opt_state if opt_state is None else opt_state)[1:])
        )
        return learner.update(jax.random.key(0), fresh, batch)

    params = {name: jnp.asarray(x) for name, x in sub(z, "epoch0/params_before/").items()}
    opt_state, played = jax.jit(optimizer.init)(params), []
    for i in range(int(config["n_epochs_recorded"])):
        recorded = sub(z, f"epoch{i}/")
        drawn = jnp.asarray(recorded["mb/idx"]), jnp.asarray(importance_weights(recorded, beta_of(config, i)))
        state, metrics = epoch(params, opt_state, rollout(recorded), *drawn)
        params, opt_state = state.params, state.opt_state
        (before, after), steps = state.pipeline[1], opt_state[0].read()
        history = {name: np.concatenate([x, np.asarray(params[name])[None]]) for name, x in steps["params"].items()}
        metrics = jax.tree.map(np.asarray, metrics)
        tapes = before[-1].read(), after[-1].read()
        played.append(Played(*tapes, steps["grad"], history, metrics, moments(opt_state[2])))
    return played


def moments(state: Any) -> dict[str, Any]:
    """Muon's optimizer state, by the peer's names."""
    (muon, *_), (adam, *_) = (state.inner_states[name].inner_state for name in ("muon", "adam"))
    trees = {"muon_mu": muon.mu, "adam_mu": adam.mu, "adam_nu": adam.nu}
    flat = {f"{tree}/{name}": x for tree, leaves in trees.items() for name, x in leaves.items() if hasattr(x, "shape")}
    return {"muon_count": muon.count, "adam_count": adam.count, **flat}


@pytest.mark.parametrize("case", ["single", "multi", "lrzero"])
def test_learner_reproduces_jaxdem(case):
    z = dict(np.load(FOLDER / f"jaxdem_head_epoch_{case}.npz"))
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
    steps = int(config["num_minibatches"])
    for name in ("value", "ratio", "advantage", "returns"):
        check.close_tensor(f"init {name}", ours.buffers[name][0], z[f"init/{name}"])
    for k in range(steps):
        compare_drawn(check, ours, z, config, k)
        compare_priorities(check, ours.buffers["advantage"][k], z, k, config["importance_sampling_alpha"], beta)
    check.close_tensor("loss", ours.minibatch["loss"], z["mb/loss"])
    for name in SCALARS[1:]:
        check.close(name, ours.minibatch[name], z[f"mb/aux/{name}"], ROUNDING.get(name, 0.0))
    for name, theirs in {
        "advantage": "advantage_norm_weighted",
        "returns": "returns",
        "value": "aux/value",
        "ratio": "aux/ratio",
    }.items():
        check.close_tensor(f"mb {name}", ours.minibatch[name], z[f"mb/{theirs}"])
    metrics = {"policy_loss": "actor_loss", "ratio_mean": "ratio"}
    for name in ("policy_loss", "value_loss", "entropy", "loss", "grad_norm", "ratio_mean"):
        theirs = metrics.get(name, name)
        check.close(f"metric {name}", ours.metrics[name], z[f"metrics/{theirs}"], ROUNDING.get(theirs, 0.0))
    for name, first in start.items():
        check.close_tensor(f"grad {name}", ours.grad[name], z[f"mb/grads/{name}"])
        check.close_tensor(f"params {name}", ours.params[name][:-1], z[f"mb/params_before/{name}"], first)
        check.close_tensor(f"params {name}", ours.params[name][1:], z[f"mb/params_after/{name}"], first)
    for name, x in ours.moments.items():
        check.close_tensor(name.split("/")[0], x, z[f"opt_after/{name}"])


def compare_drawn(check: Comparison, ours: Played, z: Arrays, config: dict[str, float], k: int) -> None:
    """What the buffers hold of the drawn segments before minibatch k, and of it afterwards."""
    drawn = z["mb/idx"][k]
    check.close_tensor("old value", ours.buffers["value"][k][:, drawn], z["mb/td/value"][k])
    check.close_tensor("old ratio", ours.buffers["ratio"][k][:, drawn], z["mb/td/ratio"][k])
    new = {name: ours.minibatch[name][k] for name in ("value", "ratio")}
    if k + 1 < len(z["mb/idx"]):
        for name in ("value", "ratio", "advantage", "returns"):
            check.close_tensor(f"next {name}", ours.buffers[name][k + 1][:, drawn], z[f"recompute/{name}"][k])
    else:  # the last refresh has nothing after it
        args = z["recompute/reward"][k], *new.values(), z["recompute/done"][k], z["init/last_value"][drawn]
        again = peer_vtrace(vtrace_config(config), *args)
        check.close_tensor("next advantage", again.error, z["recompute/advantage"][k])
        check.close_tensor("next returns", again.target, z["recompute/returns"][k])
        for name, x in new.items():
            buffer = ours.buffers[name][k].copy()
            buffer[:, drawn] = x
            check.close_tensor(f"final {name}", buffer, z[f"td_end/{name}"])


def compare_priorities(check: Comparison, advantage: np.ndarray, z: Arrays, k: int, alpha: float, beta: float) -> None:
    """Probabilities and weights from our advantages before minibatch k."""
    p, w, _ = priorities_and_weights(advantage, z["mb/idx"][k], alpha, beta)
    heavier = mass(advantage, alpha)
    check.close("mass", heavier, z["mb/prio_probs"][k].sum())
    check.close("prio_probs", p * heavier, z["mb/prio_probs"][k])
    check.close("weights", w * heavier**-beta, importance_weights(z, beta)[k])
