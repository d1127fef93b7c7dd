"""Record what Tunix's own advantage estimators and losses compute, on random batches with masks: `tunix.npz`.

Run it where Tunix is installed (`pip install google-tunix==0.1.7`): `python tests/golden/record_tunix.py --seed 0`.
The network is replaced by the log-probabilities themselves, so that gradients are those with respect to each token.
"""

import types

import _recorder as recorder
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl import algo_core, common

B, T, GENERATIONS = 6, 7, 3
AGGREGATIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-scale", "seq-mean-token-sum")


class Tokens(nnx.Module):
    """A "network" whose parameters are the log-probabilities of the tokens."""

    def __init__(self, log_prob):
        self.log_prob = nnx.Param(log_prob)


def per_token_log_prob(graphdef, state, **_):
    log_prob = nnx.merge(graphdef, state).log_prob[...]
    return log_prob, jnp.zeros((*log_prob.shape, 2))


def config(**changes):
    settings = {"beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.28, "epsilon_c": None, "loss_algo": "grpo"}
    settings |= {"loss_agg_mode": "token-mean", "temperature": 1.0, "kl_loss_mode": "kl", "kl_clamp_value": None}
    return types.SimpleNamespace(**(settings | {"epsilon_low": 0.2, "entropy_coef": None, "kl_coef": 0.0} | changes))


def inputs(rng):
    length = np.array([7, 4, 5, 1, 6, 3])
    mask = np.arange(T) < length[:, None]
    tools = mask.copy()
    tools[0, 2:4] = tools[4, 1] = False  # what a tool wrote
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    log_prob = -np.exp(draw(B, T)).astype(np.float32)
    return {
        "mask": mask, "tool_mask": tools, "score": draw(B), "reward": draw(B, T), "value": draw(B, T),
        "log_prob": log_prob, "old_log_prob": (log_prob + 0.3 * draw(B, T)).astype(np.float32),
        "reference_log_prob": (log_prob + 0.3 * draw(B, T)).astype(np.float32), "advantage": draw(B),
    }  # fmt: skip


def losses(given):
    """Value and gradient of Tunix's losses with several settings."""

    def run(loss, settings, advantages):
        example = common.TrainExample(
            prompt_ids=jnp.zeros((B, 1), int), prompt_mask=jnp.ones((B, 1)), completion_ids=jnp.zeros((B, T), int),
            completion_mask=jnp.asarray(given["tool_mask"], jnp.float32), advantages=jnp.asarray(advantages),
            ref_per_token_logps=jnp.asarray(given["reference_log_prob"]),
            old_per_token_logps=jnp.asarray(given["old_log_prob"]),
        )  # fmt: skip
        value = lambda log_prob: loss(Tokens(log_prob), example, settings, pad_id=0, eos_id=1)[0]  # noqa: E731
        return jax.value_and_grad(value)(jnp.asarray(given["log_prob"]))

    common.compute_per_token_logps = per_token_log_prob
    sequences = given["advantage"]
    tokens = sequences[:, None] * np.ones((1, T), np.float32)
    grpo = {mode: {"loss_agg_mode": mode} for mode in AGGREGATIONS}
    grpo |= {"dual_clip": {"epsilon_c": 1.1}, "kl": {"beta": 0.04}}
    grpo["low_var_kl"] = {"beta": 0.04, "kl_loss_mode": "low_var_kl"}
    gspo = {"loss_algo": "gspo-token", "loss_agg_mode": "sequence-mean-token-mean"}
    gspo |= {"epsilon": 0.02, "epsilon_high": 0.03}
    runs = {f"grpo/{name}": run(algo_core.grpo_loss_fn, config(**x), sequences) for name, x in grpo.items()}
    runs["gspo_token"] = run(algo_core.grpo_loss_fn, config(**gspo), sequences)
    runs["ppo"] = run(algo_core.ppo_policy_loss_fn, config(epsilon_high=0.2, epsilon_c=3.0), tokens)
    return recorder.values_and_gradients("", runs)


def record(rng):
    given = inputs(rng)
    recorded = {f"input/{name}": x for name, x in given.items()}
    for name, kind in {"grpo": "", "rloo": "rloo_", "drgrpo": "drgrpo_"}.items():
        estimator = getattr(algo_core, f"compute_{kind}advantages")
        recorded[f"advantage/{name}"] = estimator(jnp.asarray(given["score"]), GENERATIONS)
    for name in ("mask", "tool_mask"):
        mask = jnp.asarray(given[name], jnp.float32)
        advantage, target = algo_core.compute_gae_advantages(given["reward"], given["value"], mask, 0.99, 0.9)
        recorded |= {f"gae/{name}/advantage": advantage, f"gae/{name}/target": target}
    return recorded | losses(given)


if __name__ == "__main__":
    recorder.record_functions("tunix.npz", record)
