"""What the chain costs: `learner.update` against one hand-written function that does exactly the same work.

`python -m benchmarks update cleanrl --json benchmarks/results/update.jsonl#cpu`
`python -m benchmarks update pufferlib --json benchmarks/results/update.jsonl#pufferlib_cpu`

`cleanrl` is CleanRL's PPO update: GAE with truncation, 4 epochs of 4 shuffled minibatches, advantages normalized per
minibatch, clipped surrogate, clipped value loss, entropy bonus, clipping by global norm, Adam. `pufferlib` is
PufferLib's: before each of 4 times 4 minibatches V-trace over the whole rollout and priorities from it, segments drawn
by them, weighted advantages, the same losses, fresh values and ratios written back.

The rival is in the style of PureJaxRL, one hand-written function with everything inlined (and no unrolled scan, which
is slower on CPUs). It uses the same network, optimizer, shuffle and random numbers, so both end with the same
parameters, which is asserted before anything is timed. There are two of it: `handwritten` reports the loss alone,
`with_diagnostics` every metric that the learner reports (asserted as well).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import optax

import ppo_parts as pp

from . import _timing

SIZES = ((128, 4), (128, 64), (128, 1024))
OBS, ACTIONS, WIDTH = 4, 2, 64
GAMMA, LAMBDA, CLIP, VALUE_COEF, ENTROPY_COEF = 0.99, 0.95, 0.2, 0.5, 0.01
EPOCHS, MINIBATCHES = 4, 4
ALPHA, BETA, PRIORITY_EPS = 0.8, 0.4, 1e-6
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))


def init_params(key: jax.Array) -> Any:
    """Actor and critic, two tanh layers each."""

    def mlp(key: jax.Array, out: int, scale: float) -> list[tuple[jax.Array, jax.Array]]:
        widths, scales = (OBS, WIDTH, WIDTH, out), (2**0.5, 2**0.5, scale)
        keys = jax.random.split(key, 3)
        shapes = itertools.pairwise(widths)
        return [
            (jax.nn.initializers.orthogonal(scale)(key, shape), jnp.zeros(shape[1]))
            for key, shape, scale in zip(keys, shapes, scales, strict=True)
        ]

    actor, critic = jax.random.split(key)
    return {"actor": mlp(actor, ACTIONS, 0.01), "critic": mlp(critic, 1, 1.0)}


def network(params: Any, obs: jax.Array) -> tuple[distrax.Categorical, jax.Array]:
    """The policy's distribution and the value, the same in both programs."""

    def mlp(layers: Any, x: jax.Array) -> jax.Array:
        for weight, bias in layers[:-1]:
            x = jnp.tanh(x @ weight + bias)
        weight, bias = layers[-1]
        return x @ weight + bias

    return distrax.Categorical(mlp(params["actor"], obs)), mlp(params["critic"], obs)[..., 0]


def rollout(key: jax.Array, params: Any, *shape: int) -> pp.Batch:
    """A made-up rollout `[T, N]` or `[T, N, A]`: ends of both kinds, log-probabilities a little off the policy's."""
    keys = jax.random.split(key, 7)
    obs = jax.random.normal(keys[0], (*shape, OBS))
    distribution, value = network(params, obs)
    action, log_prob = distribution.sample_and_log_prob(seed=keys[1])
    terminated = jax.random.bernoulli(keys[2], 0.02, shape)
    truncated = jax.random.bernoulli(keys[3], 0.01, shape) & ~terminated
    return pp.Batch(
        obs=obs,
        action=action,
        log_prob=log_prob + 0.1 * jax.random.normal(keys[4], shape),
        value=value,
        reward=1 + jax.random.normal(keys[5], shape),
        terminated=terminated,
        truncated=truncated,
        next_value=value + jax.random.normal(keys[6], shape),
    )


def cleanrl(minibatches: int = MINIBATCHES, epochs: int = EPOCHS) -> pp.Learner:
    """Ours."""
    pipeline = pp.chain(
        pp.gae(gamma=GAMMA, gae_lambda=LAMBDA),
        pp.shuffled_minibatches(num_minibatches=minibatches, num_epochs=epochs),
        pp.advantage_normalize(),
        pp.clipped_surrogate(clip_eps=CLIP),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=CLIP, coef=VALUE_COEF),
        pp.entropy_bonus(coef=ENTROPY_COEF),
    )
    evaluate = pp.microbatched(lambda params, batch: network(params, batch.obs), "auto")
    return pp.learner(evaluate, pipeline, OPTIMIZER)


def pufferlib() -> pp.Learner:
    """Ours."""
    pipeline = pp.chain(
        pp.vtrace(gamma=GAMMA, gae_lambda=LAMBDA),
        pp.prioritized_sampler(MINIBATCHES, alpha=ALPHA, beta=BETA, num_epochs=EPOCHS, refresh="minibatch"),
        pp.advantage_normalize(),
        pp.advantage_weight(),
        pp.clipped_surrogate(clip_eps=CLIP),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=CLIP, coef=VALUE_COEF),
        pp.entropy_bonus(coef=ENTROPY_COEF),
    )
    evaluate = pp.microbatched(lambda params, batch: network(params, batch.obs), "auto")
    return pp.learner(evaluate, pipeline, OPTIMIZER)


class TrainState(NamedTuple):
    """What the hand-written update carries on."""

    params: Any
    opt_state: Any


def loss_fn(params: Any, minibatch: tuple[Any, ...], diagnostics: bool) -> tuple[jax.Array, Any]:
    """What the rivals differentiate; also the policy's new log-ratio and value, which the second one keeps."""
    obs, action, old_log_prob, old_value, gae, target, weight = minibatch
    pi, value = network(params, obs)
    log_ratio = pi.log_prob(action) - old_log_prob
    ratio = jnp.exp(log_ratio)
    normalized = weight * (gae - gae.mean()) / (gae.std() + 1e-8)
    surrogates = -normalized * ratio, -normalized * jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    policy_loss = jnp.maximum(*surrogates).mean()
    clipped = old_value + jnp.clip(value - old_value, -CLIP, CLIP)
    value_loss = 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(clipped - target)).mean()
    entropy = pi.entropy().mean()
    loss = policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * entropy
    if not diagnostics:
        return loss, ({"loss": loss}, log_ratio, value)
    metrics = {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "clip_fraction": (jnp.abs(ratio - 1) > CLIP).mean(),
        "approx_kl": (jnp.expm1(log_ratio) - log_ratio).mean(),
        "approx_kl_k1": -log_ratio.mean(),
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "nonfinite/loss/policy": ~jnp.isfinite(policy_loss),
        "nonfinite/loss/value": ~jnp.isfinite(value_loss),
        "nonfinite/loss/entropy": ~jnp.isfinite(entropy),
        "nonfinite/advantage": (~jnp.isfinite(gae)).sum(),
    }
    return loss, (metrics, log_ratio, value)


def gradient_step(state: TrainState, minibatch: tuple[Any, ...], diagnostics: bool) -> tuple[TrainState, Any]:
    """One step of the optimizer; the metrics, log-ratio and value go through."""
    grads, (metrics, *seen) = jax.grad(loss_fn, has_aux=True)(state.params, minibatch, diagnostics)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params)
    if diagnostics:
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


def handwritten_cleanrl(
    key: jax.Array, state: TrainState, batch: pp.Batch, diagnostics: bool
) -> tuple[TrainState, Any]:
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
        state, (metrics, *_) = gradient_step(state, (*minibatch, 1.0), diagnostics)
        return state, metrics

    def epoch_step(state, epoch):
        permutation = pp.functional.permutation(epoch_keys(key, epoch), batch.value.size)
        whole = (batch.obs, batch.action, batch.log_prob, batch.value, advantages, targets)
        flat = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), whole)
        shuffled = jax.tree.map(lambda x: jnp.take(x, permutation, axis=0), flat)
        minibatches = jax.tree.map(lambda x: x.reshape((MINIBATCHES, -1, *x.shape[1:])), shuffled)
        return jax.lax.scan(minibatch_step, state, minibatches)

    state, metrics = jax.lax.scan(epoch_step, state, jnp.arange(EPOCHS))
    if not diagnostics:
        return state, {"loss": metrics["loss"].mean()}
    metrics = reduced(metrics, batch)
    metrics["explained_variance"] = 1 - jnp.var(targets - batch.value) / jnp.var(targets)
    return state, metrics


def handwritten_pufferlib(
    key: jax.Array, state: TrainState, batch: pp.Batch, diagnostics: bool
) -> tuple[TrainState, Any]:
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
        index = jax.random.choice(key, segments, (segments // MINIBATCHES,), replace=False, p=probabilities)
        weight = (segments * probabilities[index]) ** -BETA

        whole = (batch.obs, batch.action, batch.log_prob, values, advantages, targets)
        minibatch = jax.tree.map(lambda x: jnp.take(x, index, axis=1), whole)
        state, (metrics, log_ratio, value) = gradient_step(state, (*minibatch, weight), diagnostics)

        if diagnostics:
            metrics["explained_variance"] = 1 - jnp.var(targets - values) / jnp.var(targets)
        values, log_ratios = values.at[:, index].set(value), log_ratios.at[:, index].set(log_ratio)
        shifted = jnp.concatenate([values[1:], batch.next_value[-1:]])
        next_values = jnp.where(batch.truncated, batch.next_value, shifted)
        return (state, values, next_values, log_ratios), metrics

    def epoch_step(carry, epoch):
        return jax.lax.scan(minibatch_step, carry, jax.random.split(epoch_keys(key, epoch), MINIBATCHES))

    carry = (state, batch.value, batch.next_value, jnp.zeros_like(batch.value))
    (state, *_), metrics = jax.lax.scan(epoch_step, carry, jnp.arange(EPOCHS))
    if not diagnostics:
        return state, {"loss": metrics["loss"].mean()}
    return state, reduced(metrics, batch)


RECIPES: dict[str, tuple[pp.Learner, Callable[..., Any]]] = {
    "cleanrl": (cleanrl(), handwritten_cleanrl),
    "pufferlib": (pufferlib(), handwritten_pufferlib),
}


def assert_same(ours: Any, theirs: Any, what: str, tolerance: float = 1e-4) -> None:
    """Raise unless two trees agree, relative to the size of each leaf."""
    for (path, x), y in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        worst = np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1e-3)
        if not worst <= tolerance:
            raise AssertionError(f"{what}{jax.tree_util.keystr(path)} differ by {worst:.1e} (relative)")


def measure(recipe: str, time: int, envs: int, rounds: int) -> dict[str, Any]:
    """Compile, check and time the three programs at one size."""
    params = init_params(jax.random.key(0))
    key, batch = jax.random.key(1), rollout(jax.random.key(2), params, time, envs)
    learner, handwritten = RECIPES[recipe]
    state = TrainState(params, OPTIMIZER.init(params))
    programs = {
        "ours": (learner.update, learner.init(params)),
        "handwritten": (lambda *args: handwritten(*args, diagnostics=False), state),
        "with_diagnostics": (lambda *args: handwritten(*args, diagnostics=True), state),
    }
    thunks, results, compile_seconds = {}, {}, {}
    for name, (function, start) in programs.items():
        call, traced, compiling = _timing.compile_cold(function, key, start, batch)
        compile_seconds[name] = {"trace": traced, "compile": compiling}
        results[name] = call(key, start, batch)
        thunks[name] = lambda call=call, start=start: call(key, start, batch)
    for rival in ("handwritten", "with_diagnostics"):
        assert_same(results["ours"][0].params, results[rival][0].params, f"{rival}: params")
    assert_same(dict(results["ours"][1]), results["with_diagnostics"][1], "metrics", 1e-3)
    wall, cpu = _timing.interleaved(thunks, rounds)
    rivals = ("handwritten", "with_diagnostics")
    return {
        "recipe": recipe,
        "size": [time, envs],
        "rounds": rounds,
        "compile_seconds": compile_seconds,
        "run_ms": {name: 1e3 * _timing.quartiles(values)[0] for name, values in wall.items()},
        "ours_over": {rival: _timing.ratio(wall, "ours", rival) for rival in rivals},
        "ours_over_cpu_time": {rival: _timing.ratio(cpu, "ours", rival) for rival in rivals},
    }


def main() -> None:
    """Print the table; write it with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--rounds", type=_timing.positive, default=41, help="interleaved; a third at the largest size")
    parser.add_argument("--sizes", nargs="+", type=_timing.size, default=SIZES, metavar="TxN")
    parser.add_argument("--json", metavar="FILE#NAME", help="write the record here")
    options = parser.parse_args()
    results = []
    print("size      program           trace s  compile s   run ms  ours / it, wall: median (quartiles)  CPU time")
    jax.jit(lambda x: x + 1)(0.0)  # the first compilation of a process starts up much
    for time, envs in options.sizes:
        rounds = options.rounds if time * envs < 100_000 else max(1, options.rounds // 3)
        result = measure(options.recipe, time, envs, rounds)
        for name, run in result["run_ms"].items():
            at = result["compile_seconds"][name]
            ratios = [result[clock].get(name) for clock in ("ours_over", "ours_over_cpu_time")]
            over = "  ".join(f"{r['median']:.3f} ({r['q1']:.3f} - {r['q3']:.3f})" for r in ratios if r)
            print(
                f"{f'{time}x{envs}':9} {name:17} {at['trace']:7.2f} {at['compile']:10.2f} {run:8.2f}  {over}",
                flush=True,
            )
        results.append(result)
    _timing.write(options.json, "benchmarks update", results)
