"""JaxDEM's PPOTrainer in two versions, number by number, from our functions, chain and learner.

Only rollouts, first parameters, drawn segments, their weights and the noise of samples are taken from the recordings
(see `golden/jaxdem_jaxagents/`); all else comes out of `learner.update`, in one free run per case.

`head` (June 2026) recomputes advantages of the drawn segments after each minibatch, from the values and ratios it had
before the step; that is `given_indices(refresh="minibatch")` after `vtrace`. `seed` (September 2025) draws the epoch at
once from the rollout's advantages, and each minibatch has its advantages and targets from the policy being trained.

Deviations, stated in the tests by name:

* `peer_sum`: the peer's priorities do not sum to 1: head divides by sum(w) + eps, not by sum(w + eps); seed divides
  w, without an eps, by sum(w) + 1e-8. This changes its importance weights by peer_sum^-beta.
* `never_drawn`: where the probability is 0 the weight of seed is infinite, ours 0; and ours counts only the segments
  that can be drawn.
* `own_last_value`: without a value after the last step the peer bootstraps there from the last step's own value.
* `variance_floor`: 1e-8 in the denominator of seed's explained variance.

Written here, because they are not parts of ours:

* the entropy in a box (a squashed Gaussian, by quadrature). The shaping of rewards is `functional.reverse_recurrence`.
* `rho_on_reward`: the V-trace of seed weighs the reward by the clipped ratio, and the rest of the TD error not at all.
  That is `functional.gae` with a reward rho r and a decay lambda c of each step's own.
* the two samples per state behind the entropy of seed are recorded noise, given to `entropy_bonus` by a distribution
  without `entropy()`.
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
from tests.golden_traces import (
    Arrays,
    Comparison,
    Params,
    Steps,
    load,
    padded,
    record,
    record_steps,
    replay,
    steps,
    sub,
    tapes,
)

VERSIONS = ("head", "seed")
CASES = {"head": ("single", "multi", "lrzero"), "seed": ("single", "multi", "lrfloor")}
PRIORITY_EPS = {"head": 1e-6, "seed": 0.0}
MUON_EPS = {"head": 1e-12, "seed": 1e-5}
SCALARS = {  # what is recorded of a minibatch, the peer's name: ours
    version: {
        "loss": "loss",
        "aux/actor_loss": "policy_loss",
        "aux/value_loss": "value_loss",
        "aux/entropy": "entropy",
        "aux/approx_KL": approx_kl,
        "aux/explained_variance": "peer_explained_variance",
    }
    for version, approx_kl in {"head": "approx_kl_k2", "seed": "approx_kl"}.items()
}
# Means over a minibatch of terms of size 1 that cancel, or squares of rounding errors: float32 leaves this much.
# The KL of seed is (ratio - 1) - log_ratio, which carries the rounding of ratio.
ROUNDING = {
    "head": {"loss": 1e-6, "aux/actor_loss": 1e-6, "aux/approx_KL": 1e-12},
    "seed": {"loss": 1e-6, "aux/actor_loss": 1e-6, "aux/approx_KL": 1e-7, "aux/explained_variance": 1e-6},
}
ELEMENTS = {  # of each step of it
    "head": ("aux/ratio", "returns", "advantage_norm_weighted", "aux/value", "entropy_per_state"),
    "seed": ("aux/ratio", "aux/returns", "advantage_norm_weighted"),
}
GIVEN = {  # the fields of a minibatch alone
    "head": {"advantage": "advantage", "target": "returns"},
    "seed": {"reward": "reward", "terminated": "done"},
}
ROOM = (9, 7)  # of the largest minibatch alone
VTRACE = jax.jit(pp.functional.vtrace)


def recording(version: str, name: str) -> Arrays:
    return load(f"jaxdem_jaxagents/jaxdem_{version}_{name}")


def units(version: str, name: str) -> list[Arrays]:
    """Calls of one function of the peer."""
    z = recording(version, name)
    return [sub(z, f"{i}/") for i in range(int(z["n"]))]


def numbers(z: Arrays) -> dict[str, float]:
    """The settings of a case."""
    return {name: float(x) for name, x in sub(z, "cfg/").items() if x.ndim == 0}


def peer_vtrace(
    config: dict[str, float], reward: Any, value: Any, ratio: Any, done: Any, last_value: Any = None
) -> Any:
    """Our V-trace on the arrays of head."""
    own_last_value = value[-1] if last_value is None else last_value
    next_value = pp.functional.next_values(jnp.asarray(value), jnp.asarray(own_last_value))
    return VTRACE(jnp.log(ratio), reward, value, next_value, done, **config)


def rho_on_reward(
    config: Any, log_ratio: Any, reward: Any, value: Any, done: Any, mask: Any = None
) -> pp.functional.Advantages:
    """The V-trace of seed; the mask is 0 after the last step of a padded batch."""
    ratio = jnp.exp(log_ratio)
    mask = jnp.ones_like(value) if mask is None else mask
    last = jnp.concatenate([mask[1:] == 0, jnp.ones_like(mask[:1], bool)])
    own_last_value = pp.functional.next_values(value, value[-1], last, value)
    rho, c = jnp.minimum(ratio, config["rho_clip"]), jnp.minimum(ratio, config["c_clip"])
    hyper = {"gamma": config["gamma"], "gae_lambda": config["gae_lambda"] * c}
    return pp.functional.gae(rho * reward, value, own_last_value, done, mask=mask, **hyper)


RHO_ON_REWARD = jax.jit(rho_on_reward)


@pytest.mark.parametrize("version", VERSIONS)
def test_functions_reproduce_advantages(version):
    check = Comparison()
    for z in units(version, "advantages"):
        config = numbers(z)
        if version == "head":
            last_value = z["last_value"] if config.pop("has_last_value") else None
            ours = peer_vtrace(config, z["reward"], z["value"], z["ratio"], z["done"], last_value)
            advantage = ours.error
        else:
            ours = RHO_ON_REWARD(config, z["new_log_prob"] - z["log_prob"], z["reward"], z["value"], z["done"])
            advantage = ours.advantage
        check.close_tensor("advantage", advantage, z["advantage"])
        check.close_tensor("returns", ours.target, z["returns"])
    check.finish()


@partial(jax.jit, static_argnames="eps")
def priorities_and_weights(advantage: jax.Array, indices: jax.Array, alpha: Any, beta: Any, eps: float) -> Any:
    probabilities = pp.functional.segment_priorities(advantage, alpha=alpha, eps=eps)
    return probabilities, pp.functional.importance_weights(probabilities, indices, beta=beta)


def compare_priorities(
    check: Comparison, version: str, advantage: Any, drawn: Any, alpha: float, beta: float, recorded: Any, weights: Any
) -> None:
    """Probabilities and weights from these advantages."""
    eps = PRIORITY_EPS[version]
    p, w = priorities_and_weights(advantage, drawn, alpha, beta, eps)
    total = np.sum(np.abs(advantage).sum(0, dtype=np.float64) ** alpha)
    peer_sum = (total + len(p) * eps) / (total + (eps or 1e-8))
    check.close("peer_sum", peer_sum, recorded.sum())
    check.close("prio_probs", p * peer_sum, recorded)
    never_drawn = np.isinf(weights)
    np.testing.assert_array_equal(never_drawn, (recorded[drawn] == 0) & (beta > 0))
    # Where all advantages are 0, the probabilities of seed are 0 and its weights infinite; here segments are equal.
    np.testing.assert_array_equal(w[never_drawn], 0 if np.any(advantage) else 1)
    if not np.all(never_drawn):
        fewer = np.mean(recorded > 0)
        check.close("seg_w", (w * (peer_sum / fewer) ** -beta)[~never_drawn], weights[~never_drawn])


def annealed(start: float, anneal: float, num_epochs: float, epoch: float) -> float:
    """The exponent of the importance weights."""
    return float(pp.linear_schedule(start, start + anneal * (1 - start), int(num_epochs))(int(epoch)))


@pytest.mark.parametrize("version", VERSIONS)
def test_priorities_and_weights_reproduce_the_peer(version):
    check = Comparison()
    for z in units(version, "priority"):
        config, weights = numbers(z), z["seg_w"].reshape(-1)
        beta = annealed(config["beta0"], config["anneal"], config["num_epochs"], config["epoch"])
        check.close("beta", beta, z["beta_t"])
        compare_priorities(check, version, z["advantage"], z["idx"], config["alpha"], beta, z["prio_probs"], weights)
        if version == "head":
            normalized = pp.functional.advantage_normalize(jnp.asarray(z["advantage"][:, z["idx"]]), ddof=0)
            check.close_tensor("normalized", normalized * weights[None], z["advantage_norm_weighted"])
    check.finish()


def test_reverse_recurrence_reproduces_the_shaping_of_rewards():
    recorded, check = recording("head", "priority"), Comparison()
    for i in range(sum(name.startswith("drip") and name.endswith("out") for name in recorded)):
        z = sub(recorded, f"drip{i}/")
        ours = pp.functional.reverse_recurrence(z["reward"], jnp.asarray(numbers(z)["decay"] * (1 - z["done"])))
        check.close_tensor(f"shaped reward {i}", ours, z["out"])
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


def evaluate(params: Params, batch: pp.Batch, box: Any = None, slack: Any = 0.0) -> tuple[Any, jax.Array]:
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
    return Box(mean, std, center, half, box["box_width"], box["box_eps"], slack), value


def losses(version: str, config: Any, length: int, shape: tuple[int, ...]) -> pp.Part:
    """The losses, and a tape of minibatches of this shape."""

    def peer_metrics(batch: pp.Batch) -> pp.Batch:
        k2 = pp.functional.approx_kl(batch.current_log_ratio(), estimator="k2")
        explained = pp.functional.explained_variance(batch.current.value, batch.target, mask=batch.mask)
        mean = pp.functional.masked_mean(k2, batch.mask)
        return batch.add_metrics(approx_kl_k2=mean, peer_explained_variance=explained)

    def read(batch: pp.Batch) -> dict[str, jax.Array]:
        found = (jnp.exp(batch.current_log_ratio()), batch.target, batch.advantage)
        if version == "head":
            found = (*found, batch.current.value, batch.current.distribution.entropy())
        return dict(zip(ELEMENTS[version], found, strict=True))

    return pp.chain(
        pp.clipped_surrogate(clip_eps=config["clip_eps"]),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=config["clip_eps"], coef=config["value_coeff"]),
        pp.entropy_bonus(coef=config["entropy_coeff"], num_samples=1 if version == "head" else 2),
        pp.stateless(peer_metrics),
        record(length, read, **dict.fromkeys(ELEMENTS[version], shape)),
    )


def vtrace_config(config: Any) -> dict[str, Any]:
    return {name: config[name] for name in ("gamma", "gae_lambda", "rho_clip", "c_clip")}


def head_chain(config: Any, indices: Any, weights: Any, noise: Any, shape: tuple[int, int]) -> pp.Part:
    """The epoch of head, with a tape on either side of the sampler."""
    del noise

    def read_rollout(batch: pp.Batch) -> dict[str, jax.Array]:
        ratio = jnp.exp(batch.log_ratio)
        return {"value": batch.value, "ratio": ratio, "advantage": batch.advantage, "returns": batch.target}

    return pp.chain(
        pp.vtrace(**vtrace_config(config)),
        record(len(indices), read_rollout, **dict.fromkeys(("value", "ratio", "advantage", "returns"), shape)),
        pp.given_indices(indices, axis="segment", weights=weights, refresh="minibatch"),
        pp.advantage_normalize(ddof=0),
        pp.advantage_weight(),
        losses("head", config, len(indices), (shape[0], indices.shape[1])),
    )


def seed_chain(config: Any, indices: Any, weights: Any, noise: Any, shape: tuple[int, int]) -> pp.Part:
    """The epoch of seed: drawn segments, advantages under the policy being trained, and a tape at the end."""

    def advantages(batch: pp.Batch) -> pp.Batch:
        log_ratio, value = jax.lax.stop_gradient((batch.current_log_ratio(), batch.current.value))
        out = rho_on_reward(config, log_ratio, batch.reward, value, batch.terminated, batch.mask)
        return batch.replace(advantage=out.advantage, target=out.target)

    def with_noise(batch: pp.Batch, state: Any, context: pp.Context) -> tuple[pp.Batch, Any]:
        distribution = Sampled(batch.current.distribution, noise[context.minibatch])
        return batch.replace(current=batch.current._replace(distribution=distribution)), state

    return pp.chain(
        pp.given_indices(indices, axis="segment", weights=weights),
        pp.stateless(advantages, provides=("advantage", "target"), place="after_sampler", needs_time=True),
        pp.advantage_normalize(ddof=0),
        pp.advantage_weight(),
        pp.Part(init=lambda params, key: (), update=with_noise, name="with_noise", place="after_sampler"),
        losses("seed", config, len(indices), (shape[0], indices.shape[1])),
    )


def compare_minibatches(check: Comparison, version: str, rows: Steps, elements: Arrays, z: Arrays) -> None:
    """What the peer's `loss_fn` saw and gave, and its gradients; leading axis: minibatches."""
    numbers = dict(rows.numbers)
    if version == "seed":
        variance = elements["aux/returns"].var(axis=(1, 2), dtype=np.float64)
        variance_floor = variance / (variance + 1e-8)
        numbers["aux/explained_variance"] = 1 - (1 - numbers["aux/explained_variance"]) * variance_floor
    assert "aux/ratio" in z
    recorded = {name: np.broadcast_to(z[name], x.shape) for name, x in elements.items() if name in z}
    check.close_rows({name: elements[name] for name in recorded}, recorded, {})
    check.close_rows(numbers, z, ROUNDING[version])
    check.close_tensors("grad", rows.grad, sub(z, "grads/"))


@cache
def unit_learner(version: str, boxed: bool) -> Any:
    """A learner that changes nothing and writes everything down about one minibatch."""

    def make_learner(config: Any, weights: Any, noise: Any) -> pp.Learner:
        box = {"box": config, "slack": config["box_eps"] if version == "seed" else 0.0} if boxed else {}
        if version == "head":
            pipeline = pp.chain(pp.full_batch(), losses(version, config, 1, ROOM))
        else:
            pipeline = seed_chain(config, np.arange(ROOM[1])[None], weights, noise, ROOM)
        return pp.learner(partial(evaluate, **box), pipeline, record_steps(1, SCALARS[version]))

    return make_learner


@pytest.mark.parametrize("version", VERSIONS)
def test_losses_and_gradients_reproduce_the_unit_cases(version):
    """The minibatches are padded to one size behind a mask, which every part has to honor."""
    fields = {"obs": "obs", "action": "action", "log_prob": "old_log_prob", "value": "old_value", **GIVEN[version]}
    check = Comparison()
    for z in units(version, "loss"):
        time, segments = z["old_value"].shape
        mask = padded(np.ones((time, segments)), *ROOM)
        batch = pp.Batch(**{ours: padded(z[theirs], *ROOM) for ours, theirs in fields.items()}, mask=mask)
        config = {name: jnp.asarray(x, jnp.float32) for name, x in sub(z, "cfg/").items()}
        weights = noise = None
        if version == "seed":
            weights = np.pad(z["seg_w"], ((0, 0), (0, ROOM[1] - segments)), constant_values=1)
            noise = jnp.stack([padded(x, *ROOM) for x in z["entropy_noise"]])[None]
        make_learner = unit_learner(version, bool(z["cfg/box"]))
        ((state, _),) = replay(make_learner, sub(z, "params/"), [((config, weights, noise), batch)])
        elements = {name: x[:, :time, :segments] for name, x in tapes(state.pipeline)[-1].items()}
        rows = steps(state.opt_state, state.params)
        compare_minibatches(check, version, rows, elements, {name: x[None] for name, x in z.items()})
    check.finish()


def rollout(version: str, z: Arrays) -> pp.Batch:
    """The rollout of an epoch."""
    if version == "seed":
        fields = sub(z, "td/")
        next_value = None
    else:
        fields = sub(z, "td_end/") | sub(z, "init/")
        next_value = pp.functional.next_values(jnp.asarray(fields["value"]), jnp.asarray(fields["last_value"]))
    given = {name: jnp.asarray(fields[name]) for name in ("obs", "action", "log_prob", "value", "reward")}
    return pp.Batch(**given, terminated=jnp.asarray(fields["done"]), next_value=next_value)


def drawn(version: str, z: Arrays, beta: float) -> tuple[Any, Any, Any]:
    """The segments of each minibatch, their importance weights, and the noise of samples."""
    if version == "seed":
        return z["idx"], z["mb/seg_w"][:, 0], z["mb/entropy_noise"]
    probabilities = np.take_along_axis(z["mb/prio_probs"], z["mb/idx"], axis=1)
    return z["mb/idx"], (z["mb/prio_probs"].shape[1] * probabilities) ** np.float32(-beta), None


def peer_optimizer(version: str, config: dict[str, float]) -> optax.GradientTransformation:
    """The peer's schedule counts minibatches, and reaches its end after as many of them as there are epochs."""
    rate = optax.cosine_decay_schedule(
        config["learning_rate"],
        int(config["num_epochs"]),
        alpha=config.get("learning_rate_decay_min_fraction", 0.0),
        exponent=config.get("learning_rate_decay_exponent", 1.0),
    )
    return optax.chain(
        record_steps(int(config["num_minibatches"]), SCALARS[version]),
        optax.clip_by_global_norm(config["max_grad_norm"]),
        optax.contrib.muon(rate, eps=MUON_EPS[version]),
    )


@pytest.mark.parametrize(("version", "case"), [(version, case) for version in VERSIONS for case in CASES[version]])
def test_learner_reproduces_jaxdem(version, case):
    z, check = recording(version, f"epoch_{case}"), Comparison()
    config = numbers(z)
    config |= {name.removeprefix("ppo_"): x for name, x in config.items() if name.startswith("ppo_")}
    config |= {name.removeprefix("advantage_"): x for name, x in config.items() if name.startswith("advantage_")}
    config["gae_lambda"] = config["lambda"]
    optimizer = peer_optimizer(version, config)
    shape = z["epoch0/mb/td/value"].shape[1], int(config["num_segments"])
    make_chain = {"head": head_chain, "seed": seed_chain}[version]

    def make_learner(indices: Any, weights: Any, noise: Any) -> pp.Learner:
        return pp.learner(evaluate, make_chain(config, indices, weights, noise, shape), optimizer)

    epochs = [sub(z, f"epoch{i}/") for i in range(int(config["n_epochs_recorded"]))]
    schedule = [config[f"{name}importance_sampling_beta"] for name in ("", "anneal_")]
    betas = [annealed(*schedule, config["num_epochs"], i) for i in range(len(epochs))]
    given = [drawn(version, one, beta) for one, beta in zip(epochs, betas, strict=True)]
    updates = [(each, rollout(version, one)) for each, one in zip(given, epochs, strict=True)]
    start = sub(z, "epoch0/params_before/")
    for i, (state, metrics) in enumerate(replay(make_learner, start, updates)):
        compare_epoch(check, version, state, metrics, epochs[i], start)
        if version == "head":
            compare_refresh(check, config, tapes(state.pipeline), epochs[i], given[i], betas[i])
        else:
            compare_first_advantages(check, config, epochs[i], given[i], betas[i])
    check.finish()


def compare_epoch(
    check: Comparison, version: str, state: pp.LearnerState, metrics: Any, z: Arrays, start: Arrays
) -> None:
    """Everything recorded within one epoch that both versions have."""
    rows = steps(state.opt_state[0], state.params)
    compare_minibatches(check, version, rows, tapes(state.pipeline)[-1], sub(z, "mb/"))
    for name, ours in {**SCALARS[version], "grad_norm": "grad_norm", "ratio": "ratio_mean"}.items():
        if ours != "peer_explained_variance":
            recorded = z[f"metrics/{name.removeprefix('aux/')}"]
            check.close(f"metric {name}", metrics[ours], recorded, ROUNDING[version].get(name, 0.0))
    for kind, place in {"before": slice(-1), "after": slice(1, None)}.items():
        params = {name: x[place] for name, x in rows.params.items()}
        check.close_tensors(f"params {kind}", params, sub(z, f"mb/params_{kind}/"), start)
    (muon, *_), (adam, *_) = (state.opt_state[2].inner_states[name].inner_state for name in ("muon", "adam"))
    for name, x in {"muon_count": muon.count, "adam_count": adam.count}.items():
        check.equal(name, x, z[f"opt_after/{name}"])
    for name, tree in {"muon_mu": muon.mu, "adam_mu": adam.mu, "adam_nu": adam.nu}.items():
        check.close_tensors(name, tree, sub(z, f"opt_after/{name}/"))


def compare_refresh(
    check: Comparison, config: dict[str, float], tape: list[Arrays], z: Arrays, given: Any, beta: float
) -> None:
    """What the buffers of head hold before each minibatch, of the drawn segments afterwards, and its priorities."""
    buffers, minibatch = tape
    names, (_, weights, _) = ("value", "ratio", "advantage", "returns"), given
    check.close_tensors("init", {name: buffers[name][0] for name in names}, {name: z[f"init/{name}"] for name in names})
    for k, indices in enumerate(z["mb/idx"]):
        advantage, alpha = buffers["advantage"][k], config["importance_sampling_alpha"]
        compare_priorities(check, "head", advantage, indices, alpha, beta, z["mb/prio_probs"][k], weights[k])
        for name in ("value", "ratio"):
            check.close_tensor(f"old {name}", buffers[name][k][:, indices], z[f"mb/td/{name}"][k])
        recomputed = {name: z[f"recompute/{name}"][k] for name in names}
        if k + 1 < len(z["mb/idx"]):
            check.close_tensors("next", {name: buffers[name][k + 1][:, indices] for name in names}, recomputed)
    # The last refresh has nothing after it.
    new = {name: minibatch[f"aux/{name}"][-1] for name in ("value", "ratio")}
    last = z["recompute/reward"][-1], *new.values(), z["recompute/done"][-1], z["init/last_value"][indices]
    again = peer_vtrace(vtrace_config(config), *last)
    check.close_tensors("last", {**new, "advantage": again.error, "returns": again.target}, recomputed)
    for name, x in new.items():
        buffer = buffers[name][-1].copy()
        buffer[:, indices] = x
        check.close_tensor(f"final {name}", buffer, z[f"td_end/{name}"])


def compare_first_advantages(check: Comparison, config: dict[str, float], z: Arrays, given: Any, beta: float) -> None:
    """What seed draws from, once per epoch."""
    args = jnp.zeros_like(z["td/value"]), z["td/reward"], z["td/value"], z["td/done"]
    before = RHO_ON_REWARD(config, *args)
    check.close_tensor("rollout advantage", before.advantage, z["td/advantage"])
    check.close_tensor("rollout returns", before.target, z["td/returns"])
    for indices, weights in zip(*given[:2], strict=True):
        alpha = config["importance_sampling_alpha"]
        compare_priorities(check, "seed", z["td/advantage"], indices, alpha, beta, z["prio_probs"], weights)
