"""Where the time of a training step goes: the pieces of CleanRL's PPO, each beside the cost of its arithmetic.

    taskset -c 0 python -m benchmarks budget --json benchmarks/results/budget.jsonl#cpu_one_core

Every piece runs in a loop of one compiled program. Its *floor* is the time of its products, its tanh and its bytes at
the rates that this machine reaches in programs of one operation: the product of 2048 rows with a hidden layer, their
tanh, and `x + 1` of them, which fit into the cache. All times are the shortest of the rounds. The whole is one program
that collects a rollout and updates; it may take less than its pieces, because XLA fuses across them.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ppo_parts as pp
from ppo_parts import distributions, functional, training
from ppo_parts.recipes import cleanrl_ppo

from . import _timing
from ._records import collect, make_parser

SIZES = ((128, 4), (128, 64), (128, 2048))
ROWS = 2048  # the most that are evaluated at once: larger minibatches are evaluated in pieces, which stay in the cache
OBS, ACTIONS, WIDTH = 4, 2, 64  # sizes in CartPole-v1 and in the recipe's networks
KERNELS = 2 * OBS * WIDTH + 2 * WIDTH**2 + (ACTIONS + 1) * WIDTH  # weights of the actor and the critic
UNITS = 4 * WIDTH  # hidden units of both
Piece = tuple[Any, tuple[Any, ...], int, float]  # a method, its arguments, its calls in an update, the floor of a call


def measure_limits() -> dict[str, float]:
    """Return the seconds for a multiplication with its addition, for a tanh, and for a byte."""
    x, kernel = jnp.ones((ROWS, WIDTH)), jnp.ones((WIDTH, WIDTH))
    cases = {"product": (jnp.matmul, (x, kernel)), "tanh": (jnp.tanh, (x,)), "byte": (lambda x: x + 1, (x,))}
    amounts = {"product": x.size * WIDTH, "tanh": x.size, "byte": 2 * x.nbytes}
    taken = _timing.measure_calls(cases, rounds=15)
    return {name: min(taken[name]) / amount for name, amount in amounts.items()}


def make_pieces(config: cleanrl_ppo.Config, train: training.Train, unit: dict[str, float]) -> dict[str, Piece]:
    """Return the pieces by name; `unit` has the seconds of `measure_limits`."""
    estimator, context = pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda), pp.Context(key=jax.random.key(0))
    optimizer = pp.clipped_adam(config.learning_rate, config.max_grad_norm)

    def estimate(batch: pp.Batch) -> pp.Batch:
        return estimator.update(batch, estimator.init(None), context)[0]

    def advantages(batch: pp.Batch) -> Any:
        batch = estimate(batch)
        return batch.advantage, batch.target, dict(batch.metrics)

    def forward(params: Any, obs: Any) -> Any:
        distribution, value, *_ = train.policy(params, pp.Batch(obs=obs))
        return distribution.logits, value

    def gradient(params: Any, obs: Any, *cotangents: Any) -> Any:
        return jax.vjp(lambda params: forward(params, obs), params)[1](cotangents)

    def loss(outputs: Any, action: Any, log_prob: Any, value: Any, advantage: Any, target: Any) -> Any:
        logits, now = outputs
        policy, advantage = distributions.Categorical(logits), functional.advantage_normalize(advantage, ddof=1)
        log_ratio = policy.log_prob(action) - log_prob
        of_policy = functional.clipped_surrogate(log_ratio, advantage, clip_eps=config.clip_coef)
        of_value = functional.clipped_value_loss(now, value, target, clip_eps=config.clip_coef)
        return jnp.mean(of_policy + config.vf_coef * of_value - config.ent_coef * policy.entropy())

    def step(gradient: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(gradient, state, params, step=0)
        return optax.apply_updates(params, updates), state

    begin, batch = train.init(jax.random.key(0)), estimate(_timing.make_rollout(train, jax.random.key(1)))
    samples, params = batch.value.size, begin.learner.params
    minibatches, rows = config.update_epochs * config.num_minibatches, samples // config.num_minibatches
    each = min(rows, ROWS)  # rows per evaluation
    evaluations = minibatches * rows // each
    fields = (batch.obs, batch.action, batch.log_prob, batch.value, batch.advantage, batch.target)
    flat = jax.tree.map(lambda x: x.reshape(samples, *x.shape[2:]), fields)
    obs, *minibatch = jax.tree.map(lambda x: x[:rows], flat)
    outputs, order = forward(params, obs), functional.permutation(jax.random.key(2), samples)[:rows]

    def size_of(*arrays: Any) -> float:
        return unit["byte"] * sum(x.nbytes for x in jax.tree.leaves(arrays))

    evaluated = unit["product"] * KERNELS + unit["tanh"] * UNITS  # for one row
    differentiated = unit["product"] * (2 * KERNELS - 2 * OBS * WIDTH) + unit["byte"] * 4 * UNITS
    return {
        "rollout": (
            lambda state: train.collect(state)[:2], (begin,), 1,
            (samples + config.num_envs) * evaluated + size_of(fields[:4])),
        "advantages": (advantages, (batch,), 1, size_of(batch.reward, batch.value, batch.next_value, fields[-2:])),
        "shuffle": (
            lambda key: functional.permutation(jax.random.wrap_key_data(key), samples),
            (jax.random.key_data(jax.random.key(2)),), config.update_epochs, 4 * samples * unit["byte"]),
        "gather": (
            lambda flat, order: jax.tree.map(lambda x: jnp.take(x, order, axis=0, mode="clip"), flat),
            (flat, order), minibatches, 2 * size_of(obs, minibatch)),
        "forward": (forward, (params, obs[:each]), evaluations, each * evaluated),
        "forward and backward": (
            gradient, (params, obs[:each], *jax.tree.map(lambda x: x[:each], outputs)), evaluations,
            each * (evaluated + differentiated)),
        "loss": (jax.value_and_grad(loss), (outputs, *minibatch), minibatches, size_of(outputs, minibatch, outputs)),
        "optimizer": (step, (params, optimizer.init(params), params), minibatches, size_of(*[params] * 7)),
    }  # fmt: skip


def measure(steps: int, environments: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each piece, and one for the whole."""
    config = cleanrl_ppo.Config(num_steps=steps, num_envs=environments, total_timesteps=100 * steps * environments)
    train = cleanrl_ppo.make_train(config)
    found = make_pieces(config, train, measure_limits())
    found["whole"] = (train.step, found["rollout"][1], 1, 0.0)
    taken = _timing.measure_calls({name: piece[:2] for name, piece in found.items()}, rounds, long=2)
    ms = {name: 1e3 * calls * min(taken[name]) for name, (*_, calls, _) in found.items()}
    floors = {name: 1e3 * calls * floor for name, (*_, calls, floor) in found.items()}
    for times in (ms, floors):
        times["backward"] = times.pop("forward and backward") - times["forward"]
        times["whole"] = times.pop("whole")  # put it last
    floors["whole"] = sum(floors.values())
    for name in ms:
        yield {"size": [steps, environments], "piece": name, "ms": ms[name], "floor_ms": floors[name]}


def main() -> None:
    """Print a row for each piece at each size; write them with `--json`."""
    options = make_parser(__doc__, sizes=SIZES, rounds=15, json=None).parse_args()
    collect(options.json, (row for sized in options.sizes for row in measure(*sized, options.rounds)))
