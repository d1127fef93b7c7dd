"""Chains of papers, as modifications of `ppo()`, that `python -m benchmarks papers` compares with it.

All work with the plain policy. docs/papers.md has what was measured; docs/gallery has these changes and many more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import ppo_parts as pp

PLAIN = "plain"
F = pp.functional
GAE = pp.gae(gamma=0.99, gae_lambda=0.95)
NORMALIZED, CLIPPED = pp.advantage_normalize(ddof=1), pp.clipped_surrogate(clip_eps=0.2)
UNCLIPPED, UNCLIPPED_CRITIC = pp.policy_loss(F.importance_weighted_surrogate), pp.value_loss(coef=0.5)
PARTS = {  # of CleanRL's `ppo.py`
    "estimate": GAE,
    "sampler": pp.shuffled_minibatches(num_minibatches=4, num_epochs=4),
    "normalize": NORMALIZED,
    "surrogate": CLIPPED,
    "diagnostics": pp.policy_diagnostics(),
    "critic": pp.clipped_value_loss(clip_eps=0.2, coef=0.5),
    "entropy": pp.entropy_bonus(coef=0.01),
}


class Paper(NamedTuple):
    """The reference, what differs from the plain chain, the chain, and the optimizer (None: that of plain PPO)."""

    reference: str
    change: str
    chain: pp.Part
    optimizer: Any = None


def ppo(*extra: pp.Part, **replaced: pp.Part) -> pp.Part:
    """The chain of `PARTS`, some of which are replaced, with more parts at its end."""
    return pp.chain(*(PARTS | replaced).values(), *extra)


def clipped(adam: optax.GradientTransformation, rate: Any) -> optax.GradientTransformation:
    """An optimizer that clips the gradient first, and scales by the learning rate last."""
    return optax.chain(optax.clip_by_global_norm(0.5), adam, pp.optim.scale_by_update_schedule(rate))


def ratio_deviation() -> pp.Part:
    """The metric by which Sun et al. stop an update: the mean deviation of the ratio from 1."""

    def deviation(batch: pp.Batch) -> pp.Batch:
        distance = jnp.abs(jnp.exp(batch.current_log_ratio()) - 1)
        return batch.add_metrics(ratio_deviation=F.masked_mean(distance, batch.mask))

    return pp.stateless(deviation, name="deviation", provides=("metrics.ratio_deviation",), place="after_sampler")


def without_the_end(share: float) -> pp.Part:
    """Mask the last part of a rollout, whose advantages are the most biased."""

    def discard(batch: pp.Batch) -> pp.Batch:
        mask = jnp.ones_like(batch.reward) if batch.mask is None else batch.mask
        return batch.replace(mask=mask.at[len(mask) - int(share * len(mask)) :].set(0))

    return pp.stateless(discard, name="partial", provides=("mask",), place="before_sampler", needs_time=True)


def residual_variance(value: jax.Array, target: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """The value loss of AVEC."""
    error = value - jax.lax.stop_gradient(target)
    return jnp.square(error - F.masked_mean(error, mask))


def percentile_scale() -> pp.Part:
    """DreamerV3's division of advantages by a running range of the returns."""

    def update(batch: pp.Batch, scale: jax.Array, context: pp.Context) -> tuple[pp.Batch, jax.Array]:
        low, high = jnp.percentile(batch.target, jnp.array([5.0, 95.0]))
        scale = 0.99 * scale + 0.01 * (high - low)
        return batch.replace(advantage=batch.advantage / jnp.maximum(1.0, scale)), scale

    declared = {"requires": ("advantage", "target"), "provides": ("advantage",), "place": "before_sampler"}
    return pp.Part(lambda params, key: jnp.zeros(()), update, "percentile", **declared)


def relative_adam() -> optax.GradientTransformationExtraArgs:
    """Adam whose step count starts again in each update."""
    adam = optax.scale_by_adam(eps=1e-5)

    def update(updates: Any, state: Any, params: Any = None, *, step: Any, **extra: Any) -> tuple[Any, Any]:
        inner, last = state
        inner = inner._replace(count=jnp.where(step == last, inner.count, 0))
        updates, inner = adam.update(updates, inner, params)
        return updates, (inner, jnp.asarray(step, jnp.int32))

    return optax.GradientTransformationExtraArgs(lambda params: (adam.init(params), jnp.int32(0)), update)


def papers(updates: int = 1000, rate: Any = 2.5e-4) -> dict[str, Paper]:
    """The plain chain and all papers by name, for a run of so many updates with this learning rate."""

    def mirror_descent(step: jax.Array) -> jax.Array:
        return updates / jnp.maximum(updates - step, 1)

    critics_gae = pp.gae(gamma=0.99, gae_lambda=1.0)
    return {
        PLAIN: Paper("plain PPO", "", ppo()),
        "schulman_2017": Paper(
            "Schulman et al. 2017, arXiv:1707.06347", "Advantages as they are, and no clip of the value loss.",
            ppo(normalize=pp.identity(), critic=pp.value_loss(coef=1.0)),
        ),
        "heess_2017": Paper(
            "Heess et al. 2017, arXiv:1707.02286",
            "A penalty on the divergence, adapted to a target, instead of the clip.",
            ppo(pp.kl_penalty(coef=1.0, target_kl=0.01), surrogate=UNCLIPPED),
        ),
        "wang_2019": Paper(
            "Wang et al. 2019, arXiv:1903.07940", "Beyond the clip range, the objective falls (PPO-RB).",
            ppo(surrogate=pp.policy_loss(F.rollback_surrogate, clip_eps=0.2, slope=0.3)),
        ),
        "ye_2020": Paper(
            "Ye et al. 2020, arXiv:1912.09729", "A bound on the loss where the advantage is negative (dual clip).",
            ppo(surrogate=pp.clipped_surrogate(clip_eps=0.2, dual_clip=3.0)),
        ),
        "xie_2024": Paper(
            "Xie et al. 2024, arXiv:2401.16025", "A square of the ratio's deviation instead of the clip (SPO).",
            ppo(surrogate=pp.policy_loss(F.simple_policy_optimization, clip_eps=0.2)),
        ),
        "lu_2022": Paper(
            "Lu et al. 2022, arXiv:2210.05639", "A discovered drift function instead of the clip (DPO).",
            ppo(surrogate=pp.policy_loss(F.discovered_policy_optimization, alpha=2.0, beta=0.6)),
        ),
        "tomar_2020": Paper(
            "Tomar et al. 2020, arXiv:2005.09814",
            "KL(current ‖ behavior) with a growing coefficient instead of the clip.",
            ppo(surrogate=pp.policy_loss(F.mirror_descent_surrogate, coef=mirror_descent)),
        ),
        "chen_2022": Paper(
            "Chen et al. 2022, arXiv:2205.10047",
            "A sigmoid of the ratio instead of the clip, and a penalty on the divergence (P3O).",
            ppo(pp.kl_penalty(coef=1.0), surrogate=pp.policy_loss(F.sapo, tau=4.0, tau_negative=4.0)),
        ),
        "hilton_2021": Paper(
            "Hilton et al. 2021, arXiv:2110.00641", "A clip around an average of the parameters (PPO-EWMA).",
            ppo(surrogate=pp.chain(pp.regularizers.proximal_average(decay=0.889), CLIPPED)),
        ),
        "sun_2022": Paper(
            "Sun et al. 2022, arXiv:2202.00079", "A stop at a mean deviation of the ratio instead of the clip (ESPO).",
            ppo(ratio_deviation(), pp.early_stop("ratio_deviation", 0.25), surrogate=UNCLIPPED),
        ),
        "dossa_2021": Paper(
            "Dossa et al. 2021, IEEE Access 9", "A stop of the epochs at a divergence.",
            ppo(pp.kl_early_stop(0.01, check="epoch")),
        ),
        "farsang_2021": Paper(
            "Farsang and Szegletes 2021, arXiv:2102.10456", "A clip range that decays linearly.",
            ppo(surrogate=pp.clipped_surrogate(clip_eps=pp.linear_schedule(0.2, 0.0, updates))),
        ),
        "haarnoja_2018": Paper(
            "Haarnoja et al. 2018, arXiv:1812.05905", "An entropy coefficient that keeps the entropy near a target.",
            ppo(entropy=pp.regularizers.adaptive_entropy_bonus(target_entropy=0.5, learning_rate=3e-4, coef=0.01)),
        ),
        "engstrom_2020": Paper(
            "Engstrom et al. 2020, arXiv:2005.12729", "No clip of the value loss.", ppo(critic=UNCLIPPED_CRITIC),
        ),
        "andrychowicz_2021": Paper(
            "Andrychowicz et al. 2021, arXiv:2006.05990",
            "Advantages recomputed before each epoch, and no clip of the value loss.",
            ppo(sampler=pp.shuffled_minibatches(4, num_epochs=4, refresh="epoch"), critic=UNCLIPPED_CRITIC),
        ),
        "song_2023": Paper(
            "Song et al. 2023, arXiv:2301.10920",
            "No advantages for the last eighth of a rollout, which are the most biased.",
            ppo(estimate=pp.chain(GAE, without_the_end(0.125))),
        ),
        "yuan_2025": Paper(
            "Yuan et al. 2025, arXiv:2503.01491", "λ = 1 for the critic (VC-PPO).",
            ppo(estimate=pp.chain(GAE, pp.within(critics_gae, write={"target": "target"}, name="critic"))),
        ),
        "schaul_2016": Paper(
            "Schaul et al. 2016, arXiv:1511.05952", "Segments drawn by priority, with importance weights.",
            ppo(
                sampler=pp.prioritized_sampler(4, num_epochs=4, alpha=0.6, beta=0.4),
                normalize=pp.chain(NORMALIZED, pp.advantage_weight()),
            ),
        ),
        "huber_1964": Paper(
            "Huber 1964, Annals of Mathematical Statistics 35",
            "A value loss that grows linearly for large errors, not clipped.",
            ppo(critic=pp.critics.critic_loss(F.huber_value_loss, delta=1.0, coef=0.5)),
        ),
        "flet_berliac_2021": Paper(
            "Flet-Berliac et al. 2021, arXiv:2010.04440",
            "The variance of the critic's error instead of its mean square (AVEC), not clipped.",
            ppo(critic=pp.critics.critic_loss(residual_variance, coef=0.5)),
        ),
        "hafner_2023": Paper(
            "Hafner et al. 2023, arXiv:2301.04104", "Advantages divided by a running range of the returns (DreamerV3).",
            ppo(estimate=pp.chain(GAE, percentile_scale()), normalize=pp.identity()),
        ),
        "ellis_2024": Paper(
            "Ellis et al. 2024, arXiv:2412.17113", "Adam's step count starts again in each update (Adam-Rel).",
            ppo(), clipped(relative_adam(), rate),
        ),
        "dohare_2023": Paper(
            "Dohare et al. 2023, EWRL 16", "The same decay for both of Adam's averages.",
            ppo(), clipped(optax.scale_by_adam(b1=0.99, b2=0.99, eps=1e-5), rate),
        ),
    }  # fmt: skip


PAPERS = tuple(name for name in papers() if name != PLAIN)
