"""What the chain costs: `learner.update` against one hand-written function that does exactly the same work.

    python -m benchmarks update cleanrl --json benchmarks/results/update.jsonl#cpu
    python -m benchmarks update pufferlib --json benchmarks/results/update.jsonl#pufferlib_cpu

`cleanrl` is CleanRL's update, and `pufferlib` is PufferLib's, which has V-trace, priorities and values written back
before each minibatch. The rival is in the style of PureJaxRL, with everything inlined (and no unrolled scan, which is
slower on CPUs). Network, optimizer and random numbers are the same, so both end with the same parameters, which is
asserted before anything is timed. `with_diagnostics` returns every metric that the learner reports (asserted as well);
`handwritten` returns the loss alone, so XLA removes the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import ppo_parts as pp
from ppo_parts import envs, networks

from . import _timing
from ._options import parser, size
from ._records import collect
from .handwritten._steps import clipped_adam, policy_loss, value_loss

SIZES = ((128, 4), (128, 64), (128, 1024))
OBS, ACTIONS, WIDTH = 4, 2, 64
GAMMA, LAMBDA, CLIP, VALUE_COEF, ENTROPY_COEF = 0.99, 0.95, 0.2, 0.5, 0.01
EPOCHS, MINIBATCHES = 4, 4
ALPHA, BETA, PRIORITY_EPS = 0.8, 0.4, 1e-6
OPTIMIZER = clipped_adam(2.5e-4, 0.5)
POLICY = networks.actor_critic(envs.Env(None, None, envs.Box((OBS,)), envs.Discrete(ACTIONS), None), (WIDTH, WIDTH))
"""Two tanh layers for the actor and two for the critic, the same in both programs."""


def rollout(key: jax.Array, params: Any, *shape: int) -> pp.Batch:
    """A made-up rollout `[T, N]`: ends of both kinds, log-probabilities a little off the policy's."""
    keys = jax.random.split(key, 7)
    obs = jax.random.normal(keys[0], (*shape, OBS))
    distribution, value, *_ = POLICY(params, pp.Batch(obs=obs))
    action = distribution.sample(seed=keys[1])
    terminated = jax.random.bernoulli(keys[2], 0.02, shape)
    truncated = jax.random.bernoulli(keys[3], 0.01, shape) & ~terminated
    return pp.Batch(
        obs=obs,
        action=action,
        log_prob=distribution.log_prob(action) + 0.1 * jax.random.normal(keys[4], shape),
        value=value,
        reward=1 + jax.random.normal(keys[5], shape),
        terminated=terminated,
        truncated=truncated,
        next_value=value + jax.random.normal(keys[6], shape),
    )


def learner_of(*beginning: pp.Part) -> pp.Learner:
    """Ours: an estimator, a sampler and what weights the advantages, and then the losses that both updates have."""
    losses = pp.chain(
        pp.clipped_surrogate(clip_eps=CLIP),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=CLIP, coef=VALUE_COEF),
        pp.entropy_bonus(coef=ENTROPY_COEF),
    )
    return pp.learner(pp.microbatched(POLICY, "auto"), pp.chain(*beginning, losses), OPTIMIZER)


class TrainState(NamedTuple):
    """What the hand-written update carries on."""

    params: Any
    opt_state: Any


def loss_fn(params: Any, minibatch: tuple[Any, ...]) -> tuple[jax.Array, Any]:
    """What the rivals differentiate; also the policy's new log-ratio and value, which PufferLib's keeps."""
    obs, action, old_log_prob, old_value, advantage, target, weight = minibatch
    pi, value, *_ = POLICY(params, pp.Batch(obs=obs))
    log_ratio = pi.log_prob(action) - old_log_prob
    ratio = jnp.exp(log_ratio)
    normalized = weight * (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    losses = {
        "policy_loss": policy_loss(ratio, normalized, CLIP),
        "value_loss": value_loss(value, old_value, target, CLIP),
        "entropy": pi.entropy().mean(),
    }
    loss = losses["policy_loss"] + VALUE_COEF * losses["value_loss"] - ENTROPY_COEF * losses["entropy"]
    metrics = {
        "loss": loss,
        **losses,
        "clip_fraction": (jnp.abs(ratio - 1) > CLIP).mean(),
        "approx_kl": (jnp.expm1(log_ratio) - log_ratio).mean(),
        "approx_kl_k1": -log_ratio.mean(),
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        **{f"nonfinite/loss/{name.removesuffix('_loss')}": ~jnp.isfinite(x) for name, x in losses.items()},
        "nonfinite/advantage": (~jnp.isfinite(advantage)).sum(),
    }
    return loss, (metrics, log_ratio, value)


def gradient_step(state: TrainState, minibatch: tuple[Any, ...]) -> tuple[TrainState, Any]:
    """One step of the optimizer; the metrics, log-ratio and value go through."""
    grads, (metrics, *seen) = jax.grad(loss_fn, has_aux=True)(state.params, minibatch)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params)
    norm = optax.tree.norm(grads)
    metrics |= {"grad_norm": norm, "nonfinite/gradient": ~jnp.isfinite(norm)}
    return TrainState(optax.apply_updates(state.params, updates), opt_state), (metrics, *seen)


def reduced(metrics: dict[str, jax.Array], batch: pp.Batch) -> dict[str, jax.Array]:
    """The metrics of an update from those of its minibatches, and the counts that are of the rollout."""
    reduce = {"ratio_min": jnp.min, "ratio_max": jnp.max}
    metrics = {n: (jnp.sum if "nonfinite" in n else reduce.get(n, jnp.mean))(x) for n, x in metrics.items()}
    bootstrapped = {"next_value": ~jnp.isfinite(batch.next_value) & ~batch.terminated}
    bad = {name: ~jnp.isfinite(getattr(batch, name)) for name in ("reward", "log_prob", "value")} | bootstrapped
    metrics |= {f"nonfinite/{name}": x.sum() for name, x in bad.items()}
    return metrics | {"minibatches": jnp.array(EPOCHS * MINIBATCHES), "epochs": jnp.array(EPOCHS)}


def epoch_keys(key: jax.Array, epoch: jax.Array) -> jax.Array:
    """Exactly the learner's way to the key of an epoch's minibatches, which is the only randomness there is."""
    return jax.random.split(jax.random.fold_in(jax.random.fold_in(key, 1), epoch + 1), 3)[1]


def handwritten_cleanrl(key: jax.Array, state: TrainState, batch: pp.Batch) -> tuple[TrainState, Any]:
    """The rival: the same update, written out."""

    def gae_step(gae, transition):
        reward, value, next_value, terminated, truncated = transition
        delta = reward + GAMMA * (1 - terminated) * next_value - value
        gae = delta + GAMMA * LAMBDA * (1 - terminated) * (1 - truncated) * gae
        return gae, gae

    terminated, truncated = batch.terminated.astype(jnp.float32), batch.truncated.astype(jnp.float32)
    transitions = (batch.reward, batch.value, batch.next_value, terminated, truncated)
    _, advantages = jax.lax.scan(gae_step, jnp.zeros_like(batch.value[0]), transitions, reverse=True)
    targets = advantages + batch.value

    def minibatch_step(state, minibatch):
        state, (metrics, *_) = gradient_step(state, (*minibatch, 1.0))
        return state, metrics

    def epoch_step(state, epoch):
        permutation = pp.functional.permutation(epoch_keys(key, epoch), batch.value.size)
        whole = (batch.obs, batch.action, batch.log_prob, batch.value, advantages, targets)
        flat = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), whole)
        shuffled = jax.tree.map(lambda x: jnp.take(x, permutation, axis=0), flat)
        minibatches = jax.tree.map(lambda x: x.reshape((MINIBATCHES, -1, *x.shape[1:])), shuffled)
        return jax.lax.scan(minibatch_step, state, minibatches)

    state, metrics = jax.lax.scan(epoch_step, state, jnp.arange(EPOCHS))
    metrics["explained_variance"] = 1 - jnp.var(targets - batch.value) / jnp.var(targets)
    return state, reduced(metrics, batch)


def handwritten_pufferlib(key: jax.Array, state: TrainState, batch: pp.Batch) -> tuple[TrainState, Any]:
    """The rival: the same update, written out."""
    terminated, truncated = batch.terminated.astype(jnp.float32), batch.truncated.astype(jnp.float32)
    segments = batch.value.shape[1]

    def vtrace_step(error, transition):
        clipped, reward, value, next_value, terminated, truncated = transition
        delta = clipped * (reward + GAMMA * (1 - terminated) * next_value - value)
        error = delta + GAMMA * LAMBDA * clipped * (1 - terminated) * (1 - truncated) * error
        return error, error

    def minibatch_step(carry, key):
        state, values, next_values, log_ratios = carry
        transitions = (jnp.minimum(jnp.exp(log_ratios), 1), batch.reward, values, next_values, terminated, truncated)
        _, advantages = jax.lax.scan(vtrace_step, jnp.zeros(segments), transitions, reverse=True)
        targets = advantages + values

        priorities = jnp.abs(advantages).sum(0) ** ALPHA + PRIORITY_EPS
        probabilities = priorities / priorities.sum()
        index, _ = pp.functional.sample_without_replacement(key, probabilities, segments // MINIBATCHES)
        weight = (segments * probabilities[index]) ** -BETA

        whole = (batch.obs, batch.action, batch.log_prob, values, advantages, targets)
        minibatch = jax.tree.map(lambda x: jnp.take(x, index, axis=1), whole)
        state, (metrics, log_ratio, value) = gradient_step(state, (*minibatch, weight))
        metrics["explained_variance"] = 1 - jnp.var(advantages) / jnp.var(targets)

        values, log_ratios = values.at[:, index].set(value), log_ratios.at[:, index].set(log_ratio)
        shifted = jnp.concatenate([values[1:], batch.next_value[-1:]])
        next_values = jnp.where(batch.truncated, batch.next_value, shifted)
        return (state, values, next_values, log_ratios), metrics

    def epoch_step(carry, epoch):
        return jax.lax.scan(minibatch_step, carry, jax.random.split(epoch_keys(key, epoch), MINIBATCHES))

    carry = (state, batch.value, batch.next_value, jnp.zeros_like(batch.value))
    (state, *_), metrics = jax.lax.scan(epoch_step, carry, jnp.arange(EPOCHS))
    return state, reduced(metrics, batch)


ESTIMATE, EPOCH = {"gamma": GAMMA, "gae_lambda": LAMBDA}, {"num_minibatches": MINIBATCHES, "num_epochs": EPOCHS}
RECIPES: dict[str, tuple[pp.Learner, Callable[..., Any]]] = {
    "cleanrl": (
        learner_of(pp.gae(**ESTIMATE), pp.shuffled_minibatches(**EPOCH), pp.advantage_normalize()),
        handwritten_cleanrl,
    ),
    "pufferlib": (
        learner_of(
            pp.vtrace(**ESTIMATE),
            pp.prioritized_sampler(**EPOCH, alpha=ALPHA, beta=BETA, refresh="minibatch"),
            pp.advantage_normalize(),
            pp.advantage_weight(),
        ),
        handwritten_pufferlib,
    ),
}


def measure(recipe: str, steps: int, environments: int, rounds: int) -> dict[str, Any]:
    """Compile, check and time the three programs at one size."""
    params = POLICY.init(jax.random.key(0))
    key, batch = jax.random.key(1), rollout(jax.random.key(2), params, steps, environments)
    learner, handwritten = RECIPES[recipe]
    state = TrainState(params, OPTIMIZER.init(params))

    def loss_alone(*args: Any) -> tuple[TrainState, jax.Array]:
        state, metrics = handwritten(*args)
        return state, metrics["loss"]

    programs = {
        "ours": (learner.update, learner.init(params)),
        "handwritten": (loss_alone, state),
        "with_diagnostics": (handwritten, state),
    }
    thunks, compiling = {}, {}
    for name, (function, start) in programs.items():
        call, compiling[name] = _timing.compile_cold(function, key, start, batch)
        thunks[name] = functools.partial(call, key, start, batch)
    results = {name: thunk() for name, thunk in thunks.items()}
    _timing.assert_same({name: state.params for name, (state, _) in results.items()}, 1e-4)
    _timing.assert_same({name: dict(results[name][1]) for name in ("ours", "with_diagnostics")})
    taken = _timing.interleaved(thunks, rounds, at_least=0.02, long=1)
    return {
        "recipe": recipe,
        "size": [steps, environments],
        "rounds": len(taken["ours"]),
        "compile_seconds": compiling,
        "run_ms": {name: _timing.quartiles(values, 1e3)["median"] for name, values in taken.items()},
        "ours_over": {rival: _timing.ratio(taken, "ours", rival) for rival in ("handwritten", "with_diagnostics")},
    }


def main() -> None:
    """Print a row for each size; write them with `--json`."""
    options = parser(__doc__, rounds=41, json=None)
    options.add_argument("recipe", choices=RECIPES)
    options.add_argument("--sizes", nargs="+", type=size, default=SIZES, metavar="TxN")
    given = options.parse_args()
    jax.jit(lambda x: x + 1)(0.0)  # the first compilation of a process starts up much
    collect(given.json, (measure(given.recipe, *sized, given.rounds) for sized in given.sizes))
