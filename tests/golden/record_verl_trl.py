"""Record what verl's and TRL's own advantage estimators and losses compute, on batches with masks: `verl_trl.npz`.

Run it on a CPU where both are installed (`pip install trl==1.16.0 torch==2.13.0`, `pip install --no-deps verl==0.9.1`,
and what `verl.trainer.ppo.core_algos` imports): `python tests/golden/record_verl_trl.py --seed 0`. Everything is
float64. TRL's loss is a method of its trainer, and gets one that has only the settings and the log-probabilities.
"""

import collections
import dataclasses
import types

import _recorder as recorder
import numpy as np
import torch
from trl import GRPOConfig, GRPOTrainer
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, PolicyLossConfig

B, T = 9, 8
GROUPS = np.array([4, 1, 4, 2, 1, 4, 2, 2, 1])
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
CLIP = {"clip_ratio": 0.1, "clip_ratio_low": 0.1, "clip_ratio_high": 0.2}
NARROW = {"clip_ratio": 0.02, "clip_ratio_low": 0.02, "clip_ratio_high": 0.03}


def inputs(rng):
    mask = (np.arange(T) < rng.integers(2, T + 1, B)[:, None]) & (rng.random((B, T)) < 0.8)
    mask[:, 0] = True
    empty = mask.copy()
    empty[2] = False  # a sequence without a token that counts
    log_prob = -np.exp(rng.normal(size=(B, T)))
    return {
        "mask": mask.astype(float), "empty": empty.astype(float), "group": GROUPS, "log_prob": log_prob,
        "old": log_prob + 0.3 * rng.normal(size=(B, T)),
        "reference": log_prob + 0.3 * rng.normal(size=(B, T)),
        "score": rng.normal(size=B), "greedy": rng.normal(size=B),
        "reward": rng.normal(size=(B, T)), "value": rng.normal(size=(B, T)),
        "tokens": rng.normal(size=(B, T)),  # an advantage for each token
        "sequences": np.repeat(rng.normal(size=(B, 1)), T, axis=1),  # and for each sequence
    }  # fmt: skip


def verl_advantages(x):
    score = torch.zeros(B, T, dtype=torch.float64)
    last = T - 1 - torch.argmax(x["mask"].flip(1), dim=1)
    score[torch.arange(B), last] = x["score"]
    mask, group = x["mask"], GROUPS
    config = types.SimpleNamespace(gamma=1.0)
    calls = {
        "grpo": core_algos.compute_grpo_outcome_advantage(score, mask, group),
        "dr_grpo": core_algos.compute_grpo_outcome_advantage(score, mask, group, norm_adv_by_std_in_grpo=False),
        "rloo": core_algos.compute_rloo_outcome_advantage(score, mask, group),
        "opo": core_algos.compute_opo_outcome_advantage(score, mask, group),
        "remax": core_algos.compute_remax_outcome_advantage(score, x["greedy"], mask),
        "reinforce_plus_plus_baseline": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
            score, mask, group
        ),
        "reinforce_plus_plus": core_algos.compute_reinforce_plus_plus_outcome_advantage(x["reward"], mask, config),
        "gae": core_algos.compute_gae_advantage_return(x["reward"], x["value"], mask, 0.97, 0.9),
    }
    recorded = {f"verl/advantage/{name}": advantage for name, (advantage, _) in calls.items()}
    return recorded | {"verl/return/gae": calls["gae"][1]}


def verl_losses(x):
    def run(name, mode, advantage, mask="mask", **settings):
        policy = {key: settings.pop(key) for key in ("kl_cov_ratio", "ppo_kl_coef") if key in settings}
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(**policy),
            **(CLIP | settings),
        )  # fmt: skip
        config.global_batch_info["loss_scale_factor"] = config.loss_scale_factor  # as its actor does
        log_prob = x["log_prob"].clone().requires_grad_()
        loss, _ = core_algos.get_policy_loss_fn(name)(
            old_log_prob=x["old"], log_prob=log_prob, advantages=x[advantage], response_mask=x[mask],
            loss_agg_mode=mode, config=config,
        )  # fmt: skip
        loss.backward()
        return loss, log_prob.grad

    runs = {f"vanilla/{mode}": run("vanilla", mode, "tokens", "empty") for mode in AGGREGATIONS}
    runs["vanilla/scaled"] = run("vanilla", "seq-mean-token-sum-norm", "tokens", loss_scale_factor=11)
    runs["gspo"] = run("gspo", "seq-mean-token-mean", "sequences", **NARROW)
    runs["sapo"] = run("sapo", "seq-mean-token-mean", "tokens")
    runs["geo_mean"] = run("geo_mean", "", "sequences")
    runs["geo_mean/empty"] = run("geo_mean", "", "sequences", "empty")
    runs["cispo"] = run("cispo", "token-mean", "tokens")
    runs["gpg"] = run("gpg", "token-mean", "tokens")
    runs["kl_cov"] = run("kl_cov", "token-mean", "tokens", kl_cov_ratio=0.2, ppo_kl_coef=0.7)
    return recorder.values_and_gradients("verl/", runs)


def trl_losses(x):
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    accelerator = types.SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )

    def run(advantage, mask="mask", **settings):
        settings = defaults | {"epsilon": 0.1, "epsilon_high": 0.2, "beta": 0.0, "steps_per_generation": 1} | settings
        log_prob = x["log_prob"].clone().requires_grad_()
        trainer = types.SimpleNamespace(
            args=types.SimpleNamespace(**settings),
            **{name: settings[name] for name in ("loss_type", "importance_sampling_level", "beta", "epsilon_high")},
            epsilon_low=settings["epsilon"], max_completion_length=11, top_entropy_quantile=1.0,
            off_policy_mask_threshold=None, aux_loss_enabled=False, use_vllm=False, _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=1, accelerator=accelerator, model=types.SimpleNamespace(training=True),
            _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *_, **__: (log_prob, torch.zeros_like(log_prob), None),
        )  # fmt: skip
        ids = torch.zeros(B, T, dtype=torch.int64)
        given = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": x[mask],
            "advantages": x[advantage], "old_per_token_logps": x["old"], "ref_per_token_logps": x["reference"],
            "num_items_in_batch": x[mask].sum(),
        }  # fmt: skip
        loss = GRPOTrainer._compute_loss(trainer, None, given)
        loss.backward()
        return loss, log_prob.grad

    sequence = {"importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03}
    runs = {name: run("tokens", loss_type=name) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo")}
    runs["cispo"] = run("tokens", loss_type="cispo", epsilon_high=1.2)
    runs["grpo/delta"] = run("tokens", loss_type="grpo", delta=1.3)
    runs["grpo/beta"] = run("tokens", loss_type="grpo", beta=0.04, use_bias_correction_kl=False)
    runs["grpo/beta_corrected"] = run("tokens", loss_type="grpo", beta=0.04)
    runs["grpo/empty"] = run("tokens", "empty", loss_type="grpo")
    runs["grpo/sequence"] = run("sequences", loss_type="grpo", **sequence)
    runs["luspo"] = run("sequences", loss_type="luspo", **sequence)
    return recorder.values_and_gradients("trl/", runs)


def record(rng):
    given = inputs(rng)
    x = {name: torch.as_tensor(value) for name, value in given.items()}
    found = verl_advantages(x) | verl_losses(x) | trl_losses(x)
    return {f"input/{name}": x for name, x in given.items()} | {name: x.detach() for name, x in found.items()}


if __name__ == "__main__":
    recorder.record_functions("verl_trl.npz", record)
