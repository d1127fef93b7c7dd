"""Chains of papers, as modifications of `ppo()`, that `python -m benchmarks papers` compares with it.

A docstring gives the reference, and what differs from the plain chain. All work with the plain policy.
docs/papers.md has what was measured; docs/gallery has these changes and many more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import ppo_parts as pp

F = pp.functional
NONE = pp.identity()
GAE = pp.gae(gamma=0.99, gae_lambda=0.95)
SHUFFLED = pp.shuffled_minibatches(num_minibatches=4, num_epochs=4)
NORMALIZED = pp.advantage_normalize(ddof=1)
CLIPPED = pp.clipped_surrogate(clip_eps=0.2)
CRITIC = pp.clipped_value_loss(clip_eps=0.2, coef=0.5)
ENTROPY = pp.entropy_bonus(coef=0.01)
UNCLIPPED = pp.policy_loss(F.importance_weighted_surrogate)


class Setup(NamedTuple):
    """A chain, and the optimizer if a paper changes it; None: that of plain PPO."""

    chain: pp.Part
    optimizer: Any = None


def ppo(
    *extra, estimate=(GAE,), sampler=SHUFFLED, normalize=NORMALIZED, surrogate=CLIPPED, critic=CRITIC, entropy=ENTROPY
):
    """The chain of CleanRL's `ppo.py`, with one part replaced by another, or with more parts at its end."""
    return pp.chain(*estimate, sampler, normalize, surrogate, pp.policy_diagnostics(), critic, entropy, *extra)


def adam(**options):
    """Adam's step with PPO's usual ε, without a learning rate."""
    return optax.scale_by_adam(eps=1e-5, **options)


def clipped(*links, rate):
    """An optimizer that clips the gradient first, and scales by the learning rate last."""
    return optax.chain(optax.clip_by_global_norm(0.5), *links, pp.optim.scale_by_update_schedule(rate))


def schulman_2017():
    """Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347.

    Advantages as they are, and no clip of the value loss.
    """
    return ppo(normalize=NONE, critic=pp.value_loss(coef=1.0))


def heess_2017():
    """Heess et al. 2017, Emergence of Locomotion Behaviours in Rich Environments, arXiv:1707.02286.

    A penalty on the divergence, adapted to a target, instead of the clip.
    """
    return ppo(pp.kl_penalty(coef=1.0, target_kl=0.01), surrogate=UNCLIPPED)


def wang_2019():
    """Wang et al. 2019, Truly Proximal Policy Optimization, arXiv:1903.07940.

    Beyond the clip range, the objective falls (PPO-RB).
    """
    return ppo(surrogate=pp.policy_loss(F.rollback_surrogate, clip_eps=0.2, slope=0.3))


def ye_2020():
    """Ye et al. 2020, Mastering Complex Control in MOBA Games with Deep Reinforcement Learning, arXiv:1912.09729.

    A bound on the loss where the advantage is negative (dual clip).
    """
    return ppo(surrogate=pp.clipped_surrogate(clip_eps=0.2, dual_clip=3.0))


def xie_2024():
    """Xie et al. 2024, Simple Policy Optimization, arXiv:2401.16025.

    A square of the ratio's deviation instead of the clip (SPO).
    """
    return ppo(surrogate=pp.policy_loss(F.simple_policy_optimization, clip_eps=0.2))


def lu_2022():
    """Lu et al. 2022, Discovered Policy Optimisation, arXiv:2210.05639.

    A discovered drift function instead of the clip (DPO).
    """
    return ppo(surrogate=pp.policy_loss(F.discovered_policy_optimization, alpha=2.0, beta=0.6))


def tomar_2020(updates=1000):
    """Tomar et al. 2020, Mirror Descent Policy Optimization, arXiv:2005.09814.

    KL(current ‖ behavior) with a growing coefficient instead of the clip.
    """

    def coef(step):
        return updates / jnp.maximum(updates - step, 1)

    return ppo(surrogate=pp.policy_loss(F.mirror_descent_surrogate, coef=coef))


def chen_2022():
    """Chen et al. 2022, The Sufficiency of Off-Policyness and Soft Clipping, arXiv:2205.10047.

    A sigmoid of the ratio instead of the clip, and a penalty on the divergence (P3O).
    """
    return ppo(pp.kl_penalty(coef=1.0), surrogate=pp.policy_loss(F.sapo, tau=4.0, tau_negative=4.0))


def hilton_2021():
    """Hilton et al. 2021, Batch Size-Invariance for Policy Optimization, arXiv:2110.00641.

    A clip around an average of the parameters (PPO-EWMA).
    """
    return ppo(surrogate=pp.chain(pp.regularizers.proximal_average(decay=0.889), CLIPPED))


def sun_2022():
    """Sun et al. 2022, You May Not Need Ratio Clipping in PPO, arXiv:2202.00079.

    A stop at a mean deviation of the ratio instead of the clip (ESPO).
    """

    def deviation(batch):
        distance = jnp.abs(jnp.exp(batch.current_log_ratio()) - 1)
        return batch.add_metrics(ratio_deviation=F.masked_mean(distance, batch.mask))

    measured = pp.stateless(deviation, name="deviation", provides=("metrics.ratio_deviation",), place="after_sampler")
    return ppo(measured, pp.early_stop("ratio_deviation", 0.25), surrogate=UNCLIPPED)


def dossa_2021():
    """Dossa et al. 2021, An Empirical Investigation of Early Stopping Optimizations in PPO, IEEE Access 9.

    A stop of the epochs at a divergence.
    """
    return ppo(pp.kl_early_stop(0.01, check="epoch"))


def farsang_2021(updates=1000):
    """Farsang and Szegletes 2021, Decaying Clipping Range in Proximal Policy Optimization, arXiv:2102.10456.

    A clip range that decays linearly.
    """
    return ppo(surrogate=pp.clipped_surrogate(clip_eps=pp.linear_schedule(0.2, 0.0, updates)))


def haarnoja_2018():
    """Haarnoja et al. 2018, Soft Actor-Critic Algorithms and Applications, arXiv:1812.05905.

    An entropy coefficient that keeps the entropy near a target.
    """
    return ppo(entropy=pp.regularizers.adaptive_entropy_bonus(target_entropy=0.5, learning_rate=3e-4, coef=0.01))


def engstrom_2020():
    """Engstrom et al. 2020, Implementation Matters in Deep Policy Gradients, arXiv:2005.12729.

    No clip of the value loss.
    """
    return ppo(critic=pp.value_loss(coef=0.5))


def andrychowicz_2021():
    """Andrychowicz et al. 2021, What Matters for On-Policy Deep Actor-Critic Methods?, arXiv:2006.05990.

    Advantages recomputed before each epoch, and no clip of the value loss.
    """
    sampler = pp.shuffled_minibatches(num_minibatches=4, num_epochs=4, refresh="epoch")
    return ppo(sampler=sampler, critic=pp.value_loss(coef=0.5))


def song_2023(share=0.125):
    """Song et al. 2023, Partial Advantage Estimator for Proximal Policy Optimization, arXiv:2301.10920.

    No advantages for the last eighth of a rollout, which are the most biased.
    """

    def discard(batch):
        mask = jnp.ones_like(batch.reward) if batch.mask is None else batch.mask
        return batch.replace(mask=mask.at[len(mask) - int(share * len(mask)) :].set(0))

    partial = pp.stateless(discard, name="partial", provides=("mask",), place="before_sampler", needs_time=True)
    return ppo(estimate=(GAE, partial))


def yuan_2025():
    """Yuan et al. 2025, What's Behind PPO's Collapse in Long-CoT? (VC-PPO), arXiv:2503.01491.

    λ = 1 for the critic (VC-PPO).
    """
    critic = pp.within(pp.gae(gamma=0.99, gae_lambda=1.0), write={"target": "target"}, name="critic")
    return ppo(estimate=(GAE, critic))


def schaul_2016():
    """Schaul et al. 2016, Prioritized Experience Replay, arXiv:1511.05952.

    Segments drawn by priority, with importance weights.
    """
    sampler = pp.prioritized_sampler(num_minibatches=4, num_epochs=4, alpha=0.6, beta=0.4)
    return ppo(sampler=sampler, normalize=pp.chain(NORMALIZED, pp.advantage_weight()))


def huber_1964():
    """Huber 1964, Robust Estimation of a Location Parameter, Annals of Mathematical Statistics 35.

    A value loss that grows linearly for large errors, not clipped.
    """
    return ppo(critic=pp.critics.critic_loss(F.huber_value_loss, delta=1.0, coef=0.5))


def flet_berliac_2021():
    """Flet-Berliac et al. 2021, Learning Value Functions Using Residual Variance (AVEC), arXiv:2010.04440.

    The variance of the critic's error instead of its mean square (AVEC), not clipped.
    """

    def residual_variance(value, target, mask=None):
        error = value - jax.lax.stop_gradient(target)
        return jnp.square(error - F.masked_mean(error, mask))

    return ppo(critic=pp.critics.critic_loss(residual_variance, coef=0.5))


def hafner_2023():
    """Hafner et al. 2023, Mastering Diverse Domains through World Models (DreamerV3), arXiv:2301.04104.

    Advantages divided by a running range of the returns (DreamerV3).
    """

    def update(batch, scale, context):
        low, high = jnp.percentile(batch.target, jnp.array([5.0, 95.0]))
        scale = 0.99 * scale + 0.01 * (high - low)
        return batch.replace(advantage=batch.advantage / jnp.maximum(1.0, scale)), scale

    declared = {"requires": ("advantage", "target"), "provides": ("advantage",), "place": "before_sampler"}
    percentile = pp.Part(lambda params, key: jnp.zeros(()), update, "percentile", **declared)
    return ppo(estimate=(GAE, percentile), normalize=NONE)


def ellis_2024(rate=2.5e-4):
    """Ellis et al. 2024, Adam on Local Time: Addressing Nonstationarity in RL (Adam-Rel), arXiv:2412.17113.

    Adam's step count starts again in each update (Adam-Rel).
    """

    def update(updates, state, params=None, *, step, **extra):
        inner, last = state
        inner = inner._replace(count=jnp.where(step == last, inner.count, 0))
        updates, inner = adam().update(updates, inner, params)
        return updates, (inner, jnp.asarray(step, jnp.int32))

    relative = optax.GradientTransformationExtraArgs(lambda params: (adam().init(params), jnp.int32(0)), update)
    return Setup(ppo(), optimizer=clipped(relative, rate=rate))


def dohare_2023(rate=2.5e-4):
    """Dohare et al. 2023, Overcoming Policy Collapse in Deep Reinforcement Learning, EWRL 16.

    The same decay for both of Adam's averages.
    """
    return Setup(ppo(), optimizer=clipped(adam(b1=0.99, b2=0.99), rate=rate))


COMPARED = (
    schulman_2017,
    heess_2017,
    wang_2019,
    ye_2020,
    xie_2024,
    lu_2022,
    tomar_2020,
    chen_2022,
    hilton_2021,
    sun_2022,
    dossa_2021,
    farsang_2021,
    haarnoja_2018,
    engstrom_2020,
    andrychowicz_2021,
    song_2023,
    yuan_2025,
    schaul_2016,
    huber_1964,
    flet_berliac_2021,
    hafner_2023,
    ellis_2024,
    dohare_2023,
)
