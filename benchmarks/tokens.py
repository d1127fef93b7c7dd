"""Train a small transformer, without a critic, to sort digits by GRPO and its relatives.

    python -m benchmarks tokens --seeds 10

A prompt is three digits; the answer is the same digits in ascending order and then END. The score of an answer is the
fraction of its four places that are right. What comes after END is masked.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import ppo_parts as pp
from ppo_parts.training import summary

from ._records import make_parser, write, write_part
from ._seeds import make_keys, select_seeds, show_interval, vectorize

DIGITS, PROMPT, ANSWER, GROUP = 6, 3, 5, 8
END = DIGITS
WIDTH, HEADS, LAYERS = 32, 2, 2
UPDATES, SEQUENCES = 300, 256


class Transformer(nn.Module):
    """Logits of the next token `[N, L, vocabulary]` for tokens `[N, L]`, each of which sees itself and earlier ones."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Evaluate tokens."""
        places = nn.Embed(PROMPT + ANSWER, WIDTH)(jnp.arange(tokens.shape[1]))
        x, mask = nn.Embed(DIGITS + 1, WIDTH)(tokens) + places[None], nn.make_causal_mask(tokens)
        for _ in range(LAYERS):
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.RMSNorm()(x), mask=mask)
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.RMSNorm()(x))))
        return nn.Dense(DIGITS + 1)(nn.RMSNorm()(x))


TRANSFORMER = Transformer()


def evaluate(params: Any, batch: pp.Batch) -> pp.Output:
    """Return the distribution of every token of the answer; `obs[t]` is the token before it. There is no value."""
    tokens = jnp.concatenate([batch.per_segment["prompt"][:, :-1], batch.obs.T], axis=1)
    logits = TRANSFORMER.apply(params, tokens)[:, PROMPT - 1 :]
    return pp.Output(pp.distributions.Categorical(jnp.swapaxes(logits, 0, 1)))


def score(prompt: jax.Array, answer: jax.Array) -> jax.Array:
    """Return the fraction of places that are right, or 0 for an answer that does not end."""
    right = jnp.concatenate([jnp.sort(prompt, axis=1), jnp.full_like(prompt[:, :1], END)], axis=1)
    fraction = jnp.mean((answer[:, : PROMPT + 1] == right).astype(jnp.float32), axis=1)
    return jnp.where(jnp.any(answer == END, axis=1), fraction, 0)


def rollout(params: Any, key: jax.Array) -> pp.Batch:
    """Sample answers, GROUP for each of as many random prompts: one segment per answer, tokens along the time axis."""
    ask, *steps = jax.random.split(key, 1 + ANSWER)
    prompt = jnp.repeat(jax.random.randint(ask, (SEQUENCES // GROUP, PROMPT), 0, DIGITS), GROUP, axis=0)
    tokens, log_probs, greedy = prompt, [], prompt[::GROUP]
    for step in steps:
        logits = TRANSFORMER.apply(params, tokens)[:, -1]
        token = jax.random.categorical(step, logits)
        log_probs.append(jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0])
        tokens = jnp.concatenate([tokens, token[:, None]], axis=1)
        best = jnp.argmax(TRANSFORMER.apply(params, greedy)[:, -1:], axis=-1)  # for ReMax; others leave it out
        greedy = jnp.concatenate([greedy, best], axis=1)
    answer = tokens[:, PROMPT:]
    ended = jnp.cumsum(answer == END, axis=1) - (answer == END)  # the number of ENDs before each token
    baseline = jnp.repeat(score(prompt[::GROUP], greedy[:, PROMPT:]), GROUP)
    of_answers = {"prompt": prompt, "score": score(prompt, answer), "baseline": baseline}
    obs, mask = tokens[:, PROMPT - 1 : -1].T, (ended == 0).T
    return pp.Batch(obs=obs, action=answer.T, log_prob=jnp.stack(log_probs), mask=mask, per_segment=of_answers)


def make_chains() -> dict[str, pp.Part]:
    """Make the chains of the algorithms, which differ in a line or two."""
    F, sampler, surrogate = pp.functional, pp.segment_minibatches(2, num_epochs=2), pp.policy_loss
    clipped, standardized = pp.clipped_surrogate(clip_eps=0.2), pp.advantage_normalize(ddof=1)
    group = functools.partial(pp.tokens.group_advantage, group=GROUP, score="score")
    by = functools.partial(pp.tokens.aggregate, "policy")
    grpo, plain, means = group(), group(scale=None), by(by="sequence_mean")
    others = {name: group(scale=None, baseline=name) for name in ("leave_one_out", "length_weighted", "given")}
    return {
        "GRPO": pp.chain(grpo, sampler, clipped, means),
        "DAPO": pp.chain(grpo, sampler, pp.clipped_surrogate(clip_eps=0.2, clip_eps_high=0.28)),
        "Dr.GRPO": pp.chain(plain, sampler, clipped, by(by="sequence_sum", length=ANSWER)),
        "RLOO": pp.chain(others["leave_one_out"], sampler, clipped, by(by="sequence_sum")),
        "OPO": pp.chain(others["length_weighted"], sampler, clipped),
        "ReMax": pp.chain(others["given"], sampler, clipped),
        "Lite PPO": pp.chain(group(scale="batch"), sampler, clipped),
        "GPG": pp.chain(plain, pp.full_batch(), surrogate(F.policy_gradient_loss)),
        "GSPO": pp.chain(grpo, sampler, surrogate(F.gspo, clip_eps=0.1), means),
        "GSPO-token": pp.chain(grpo, sampler, surrogate(F.gspo, clip_eps=0.1, level="token"), means),
        "CISPO": pp.chain(grpo, sampler, surrogate(F.cispo, clip_eps=1.0, clip_eps_high=1.0)),
        "SAPO": pp.chain(grpo, sampler, surrogate(F.sapo), means),
        "GMPO": pp.chain(grpo, sampler, surrogate(F.gmpo, clip_eps=0.4), means),
        "Clip-Cov": pp.chain(grpo, sampler, surrogate(F.clip_cov, clip_eps=0.2)),
        "KL-Cov": pp.chain(grpo, sampler, surrogate(F.kl_cov, fraction=2e-3)),
        "REINFORCE++": pp.chain(pp.tokens.outcome_reward(), pp.tokens.reward_to_go(), standardized, sampler, clipped),
        "REINFORCE++ baseline": pp.chain(plain, standardized, sampler, clipped),
    }


def make_training(pipeline: pp.Part) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Return a function of a key that trains, and returns each update's mean score and fraction of perfect answers."""
    learner = pp.learner(evaluate, pipeline, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3)))

    def update(state: pp.LearnerState, key: jax.Array) -> tuple[pp.LearnerState, tuple[jax.Array, jax.Array]]:
        answer, learn = jax.random.split(key)
        batch = rollout(state.params, answer)
        state, _ = learner.update(learn, state, batch)
        scores = batch.per_segment["score"]
        return state, (jnp.mean(scores), jnp.mean(scores == 1))

    def train(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, rest = jax.random.split(key)
        state = learner.init(TRANSFORMER.init(first, jnp.zeros((1, PROMPT), int)))
        return jax.lax.scan(update, state, jax.random.split(rest, UPDATES))[1]

    return train


def main() -> None:
    """Run the benchmark from the command line."""
    parser, chains, results = make_parser(__doc__, seeds=10, first_seed=0, json=None), make_chains(), {}
    parser.add_argument("--chains", nargs="+", choices=list(chains), default=list(chains), help="(default: all)")
    options = parser.parse_args()
    for name in options.chains:
        scores, perfect = vectorize(make_training(chains[name]))(make_keys(select_seeds(options)))
        last = {"final_score": scores[:, -10:].mean(axis=1), "final_perfect": perfect[:, -10:].mean(axis=1)}
        results[name] = {"first_score": scores[:, 0], **last, "every_tenth_score": scores[:, ::10].round(4)}
        print(f"{name:12}", *(f"{what} {show_interval(summary(x), 3)}" for what, x in last.items()), flush=True)
        write_part(options.json, results)
    write(options.json, results)
