"""Train a small transformer to sort digits by GRPO and its relatives, without a critic.

    python -m benchmarks tokens --seeds 10

A prompt is three digits; the answer is the same digits in ascending order and then END. The score of an answer is the
fraction of its four places that are right. What comes after END is masked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ppo_parts as pp

from ._options import parser, positive
from ._records import write
from ._timing import compile_cold

DIGITS, PROMPT, ANSWER, GROUP = 6, 3, 5, 8
END = DIGITS
WIDTH, HEADS, LAYERS = 32, 2, 2
UPDATES, SEQUENCES = 300, 256


def init(key: jax.Array) -> dict[str, Any]:
    """Draw the parameters of the transformer."""

    def draw(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / shape[0] ** 0.5

    keys = iter(jax.random.split(key, 3 + 4 * LAYERS))
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return {
        "token": 0.5 * jax.random.normal(next(keys), (DIGITS + 1, WIDTH)),
        "place": 0.5 * jax.random.normal(next(keys), (PROMPT + ANSWER, WIDTH)),
        "logits": 0.1 * draw(next(keys), WIDTH, DIGITS + 1),
        "layers": [{name: draw(next(keys), *shape) for name, shape in shapes.items()} for _ in range(LAYERS)],
    }


def transformer(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Logits of the next token `[N, L, vocabulary]` for tokens `[N, L]`, each of which sees itself and earlier ones."""
    length = tokens.shape[1]
    x = params["token"][tokens] + params["place"][None, :length]
    for layer in params["layers"]:
        heads = (normalized(x) @ layer["qkv"]).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        seen = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True)
        x = x + seen.reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(normalized(x) @ layer["up"]) @ layer["down"]
    return normalized(x) @ params["logits"]


def normalized(x: jax.Array) -> jax.Array:
    """RMS normalization."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def evaluate(params: dict[str, Any], batch: pp.Batch) -> pp.Output:
    """The distribution of every token of the answer: `obs[t]` is the token before it. There is no value."""
    tokens = jnp.concatenate([batch.per_segment["prompt"][:, :-1], batch.obs.T], axis=1)
    logits = transformer(params, tokens)[:, PROMPT - 1 :]
    return pp.Output(pp.distributions.Categorical(jnp.swapaxes(logits, 0, 1)))


def score(prompt: jax.Array, answer: jax.Array) -> jax.Array:
    """The fraction of the places that are right."""
    right = jnp.concatenate([jnp.sort(prompt, axis=1), jnp.full_like(prompt[:, :1], END)], axis=1)
    return jnp.mean((answer[:, : PROMPT + 1] == right).astype(jnp.float32), axis=1)


def rollout(params: dict[str, Any], key: jax.Array, sequences: int = SEQUENCES) -> pp.Batch:
    """Sample answers, GROUP for each of as many random prompts: one segment per answer, tokens along the time axis."""
    ask, *steps = jax.random.split(key, 1 + ANSWER)
    prompt = jnp.repeat(jax.random.randint(ask, (sequences // GROUP, PROMPT), 0, DIGITS), GROUP, axis=0)
    tokens, log_probs = prompt, []
    for step in steps:
        logits = transformer(params, tokens)[:, -1]
        token = jax.random.categorical(step, logits)
        log_probs.append(jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0])
        tokens = jnp.concatenate([tokens, token[:, None]], axis=1)
    answer = tokens[:, PROMPT:]
    ended = jnp.cumsum(answer == END, axis=1) - (answer == END)  # the number of ENDs before each token
    scores = jnp.where(jnp.any(answer == END, axis=1), score(prompt, answer), 0)  # an answer must end
    return pp.Batch(
        obs=tokens[:, PROMPT - 1 : -1].T,
        action=answer.T,
        log_prob=jnp.stack(log_probs),
        mask=(ended == 0).T,
        per_segment={"prompt": prompt, "score": scores},
    )


def chains() -> dict[str, pp.Part]:
    """The algorithms, which differ in a line or two."""
    functional, sampler = pp.functional, pp.segment_minibatches(2, num_epochs=2)
    grpo = pp.tokens.group_advantage(group=GROUP, score="score")
    plain = pp.tokens.group_advantage(group=GROUP, score="score", scale=None)
    others = pp.tokens.group_advantage(group=GROUP, score="score", scale=None, baseline="leave_one_out")
    means = pp.tokens.aggregate("policy", by="sequence_mean")
    clipped = pp.clipped_surrogate(clip_eps=0.2)
    return {
        "GRPO": pp.chain(grpo, sampler, clipped, means),
        "DAPO": pp.chain(grpo, sampler, pp.clipped_surrogate(clip_eps=0.2, clip_eps_high=0.28)),
        "Dr.GRPO": pp.chain(plain, sampler, clipped, pp.tokens.aggregate("policy", by="sequence_sum", length=ANSWER)),
        "RLOO": pp.chain(others, sampler, clipped, pp.tokens.aggregate("policy", by="sequence_sum")),
        "GSPO": pp.chain(grpo, sampler, pp.policy_loss(functional.gspo, clip_eps=0.1), means),
        "CISPO": pp.chain(grpo, sampler, pp.policy_loss(functional.cispo, clip_eps=1.0, clip_eps_high=1.0)),
        "SAPO": pp.chain(grpo, sampler, pp.policy_loss(functional.sapo), means),
        "GMPO": pp.chain(grpo, sampler, pp.policy_loss(functional.gmpo, clip_eps=0.4), means),
        "REINFORCE++": pp.chain(
            pp.tokens.outcome_reward(), pp.tokens.reward_to_go(), pp.advantage_normalize(ddof=1), sampler, clipped
        ),
    }


def trained(pipeline: pp.Part, updates: int) -> Callable[[jax.Array], jax.Array]:
    """A function of a key that trains and returns mean score and fraction of perfect answers of each update."""
    learner = pp.learner(evaluate, pipeline, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3)))

    def update(state: pp.LearnerState, key: jax.Array) -> tuple[pp.LearnerState, jax.Array]:
        answer, learn = jax.random.split(key)
        batch = rollout(state.params, answer)
        state, _ = learner.update(learn, state, batch)
        scores = batch.per_segment["score"]
        return state, jnp.stack([jnp.mean(scores), jnp.mean(scores == 1)])

    def train(key: jax.Array) -> jax.Array:
        first, rest = jax.random.split(key)
        return jax.lax.scan(update, learner.init(init(first)), jax.random.split(rest, updates))[1]

    return train


def measure(pipeline: pp.Part, seeds: int, updates: int) -> dict[str, Any]:
    """Train seeds one after another with one compiled program."""
    train, compiling = compile_cold(trained(pipeline, updates), jax.random.key(0))
    curves, times = [], []
    for seed in range(seeds):
        began = time.perf_counter()
        curves.append(np.asarray(train(jax.random.key(seed))))
        times.append(time.perf_counter() - began)
    everything = np.stack(curves)
    last = everything[:, -10:].mean(axis=1)
    return {
        "compile_seconds": sum(compiling.values()),
        "seconds": times,
        "first_score": everything[:, 0, 0],
        "final_score": last[:, 0],
        "final_perfect": last[:, 1],
        "every_tenth_score": everything[:, ::10, 0].round(4),
    }


def main() -> None:
    """Command line."""
    options = parser(__doc__, seeds=10, json=None)
    options.add_argument("--updates", type=positive, default=UPDATES)
    options.add_argument("--chains", nargs="+", choices=list(chains()), default=list(chains()))
    given, results = options.parse_args(), {}
    for name in given.chains:
        found = results[name] = measure(chains()[name], given.seeds, given.updates)
        score, took = found["final_score"], np.median(found["seconds"])
        print(
            f"{name:12} score {score.mean():.3f} ({score.std(ddof=min(1, len(score) - 1)):.3f}), perfect "
            f"{found['final_perfect'].mean():.3f}, worst seed {score.min():.3f}; {took:.1f} s a seed, compiled in "
            f"{found['compile_seconds']:.1f} s",
            flush=True,
        )
    write(given.json, results)
