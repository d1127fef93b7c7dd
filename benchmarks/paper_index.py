"""An index of papers about PPO: each function returns the chain of one paper, as a modification of `ppo()`.

A docstring gives the reference, and what the paper changes. `python -m docs.papers` writes docs/papers.md
from this module, and `python -m benchmarks papers` compares the chains that need only the plain policy.

A function returns a chain, or a `Setup` if the paper also changes the policy or the optimizer. Observations in the
policies here are vectors, and networks are linear, because the networks are not what these papers change.
"""

from __future__ import annotations

from collections.abc import Callable
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
REINFORCE = pp.policy_loss(F.policy_gradient_loss)
GROUPS = pp.tokens.group_advantage(
    group=8, score="score"
)  # GRPO's advantage, for groups of eight neighboring sequences
CENTERED = pp.tokens.group_advantage(group=8, score="score", scale=None)  # without the division


class Setup(NamedTuple):
    """A chain, and the policy and the optimizer if a paper changes them; None: those of plain PPO."""

    chain: pp.Part
    evaluate: Callable[..., Any] | None = None
    optimizer: Any = None


def ppo(
    *extra, estimate=(GAE,), sampler=SHUFFLED, normalize=NORMALIZED, surrogate=CLIPPED, critic=CRITIC, entropy=ENTROPY
):
    """The chain of CleanRL's `ppo.py`, with one part replaced by another, or with more parts at its end."""
    return pp.chain(*estimate, sampler, normalize, surrogate, pp.policy_diagnostics(), critic, entropy, *extra)


def tokens(*losses, estimate, by="token_mean", length=None):
    """A chain for language models, without a critic: sequences are segments, and tokens are steps."""
    return pp.chain(*estimate, pp.segment_minibatches(4), *losses, pp.tokens.aggregate("policy", by=by, length=length))


def actor(params, batch):
    """A linear policy."""
    return pp.distributions.Categorical(batch.obs @ params["policy"])


def phased(*estimate, rate=5e-4, **phases):
    """Phases after the estimate of the advantage, GAE by default, with Adam for each."""
    return Setup(
        pp.chain(*(estimate or (GAE,)), pp.phases(**phases)), optimizer=dict.fromkeys(phases, optax.adam(rate))
    )


def latest():
    """Make the part that writes the policy's output at the start of a phase: `batch.behavior` and `batch.value`."""

    def update(batch, context):
        output = context.evaluate(context.params, batch)
        return batch.replace(behavior=output.distribution, value=output.value)

    return pp.stateless(update, name="latest", provides=("behavior", "value"), place="before_sampler")


def adam(**options):
    """Adam's step with PPO's usual ε, without a learning rate."""
    return optax.scale_by_adam(eps=1e-5, **options)


def clipped(*links, rate):
    """An optimizer that clips the gradient first, and scales by the learning rate last."""
    return optax.chain(optax.clip_by_global_norm(0.5), *links, pp.optim.scale_by_update_schedule(rate))


def distillation():
    """Make two parts: one writes the error of `params["predictor"]` as `extras.reward_intrinsic`, one trains it."""

    def embed(network, obs):
        return jnp.tanh(obs @ network["hidden"]) @ network["out"]

    def reward(batch, network, context):
        embedding = embed(network, batch.next_obs)
        error = jnp.mean(jnp.square(embed(context.params["predictor"], batch.next_obs) - embedding), axis=-1)
        extras = {"reward_intrinsic": error / jnp.std(error), "embedding": embedding, "never": jnp.zeros_like(error)}
        return batch.replace(extras={**batch.extras, **extras}), network

    def loss(batch, context):
        error = embed(context.params["predictor"], batch.next_obs) - batch.extras["embedding"]
        return batch.add_loss("predictor", jnp.mean(jnp.square(error), axis=-1))

    def init(params, key):
        return optax.tree.random_like(key, params["predictor"])

    written = tuple(f"extras.{name}" for name in ("reward_intrinsic", "embedding", "never"))
    declared = {"requires": ("next_obs",), "provides": written, "place": "before_sampler"}
    trained = {"requires": ("next_obs",), "provides": ("losses",), "place": "after_sampler"}
    return pp.Part(init, reward, "novelty", **declared), pp.stateless(loss, name="predictor", **trained)


# --- policy losses and trust regions ----------------------------------------------------------------------------------


def schulman_2017():
    """Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347.

    Clips the importance ratio, so that several epochs over one rollout do not move the policy too far.
    """
    return ppo(normalize=NONE, critic=pp.value_loss(coef=1.0))


def huang_2022():
    """Huang et al. 2022, The 37 Implementation Details of Proximal Policy Optimization, ICLR Blog Track.

    Lists what implementations do beyond the paper, such as normalized advantages and a clipped value loss.
    """
    return ppo()


def heess_2017():
    """Heess et al. 2017, Emergence of Locomotion Behaviours in Rich Environments, arXiv:1707.02286.

    Replaces the clip by a penalty on the divergence, whose coefficient adapts to keep the divergence near a target.
    """
    return ppo(pp.kl_penalty(coef=1.0, target_kl=0.01), surrogate=UNCLIPPED)


def wang_2019():
    """Wang et al. 2019, Truly Proximal Policy Optimization, arXiv:1903.07940.

    Rolls back: beyond the clip range, the slope of the objective is negative instead of 0 (PPO-RB).
    """
    return ppo(surrogate=pp.policy_loss(F.rollback_surrogate, clip_eps=0.2, slope=0.3))


def ye_2020():
    """Ye et al. 2020, Mastering Complex Control in MOBA Games with Deep Reinforcement Learning, arXiv:1912.09729.

    Bounds the loss of actions with a negative advantage, whose ratio PPO does not clip above 1.
    """
    return ppo(surrogate=pp.clipped_surrogate(clip_eps=0.2, dual_clip=3.0))


def xie_2024():
    """Xie et al. 2024, Simple Policy Optimization, arXiv:2401.16025.

    Replaces the clip by a square of the ratio's deviation, weighted by the size of the advantage.
    """
    return ppo(surrogate=pp.policy_loss(F.simple_policy_optimization, clip_eps=0.2))


def lu_2022():
    """Lu et al. 2022, Discovered Policy Optimisation, arXiv:2210.05639.

    Replaces the clip by a drift function, the closed form of one that was found by meta-learning.
    """
    return ppo(surrogate=pp.policy_loss(F.discovered_policy_optimization, alpha=2.0, beta=0.6))


def tomar_2020(updates=1000):
    """Tomar et al. 2020, Mirror Descent Policy Optimization, arXiv:2005.09814.

    Replaces the clip by KL(current ‖ behavior) with a coefficient 1 / (1 - k / K), which grows over the K updates.
    """

    def coef(step):
        return updates / jnp.maximum(updates - step, 1)

    return ppo(surrogate=pp.policy_loss(F.mirror_descent_surrogate, coef=coef))


def chen_2022():
    """Chen et al. 2022, The Sufficiency of Off-Policyness and Soft Clipping, arXiv:2205.10047.

    Replaces the clip by a sigmoid of the ratio, and adds a penalty on the divergence (P3O).
    """
    return ppo(pp.kl_penalty(coef=1.0), surrogate=pp.policy_loss(F.sapo, tau=4.0, tau_negative=4.0))


def hilton_2021():
    """Hilton et al. 2021, Batch Size-Invariance for Policy Optimization, arXiv:2110.00641.

    Clips around an average of the parameters over past gradient steps instead of the behavior policy (PPO-EWMA).
    """
    return ppo(surrogate=pp.chain(pp.regularizers.proximal_average(decay=0.889), CLIPPED))


def fu_2025():
    """Fu et al. 2025, AReaL: A Large-Scale Asynchronous Reinforcement Learning System, arXiv:2505.24298.

    Clips around the latest policy, and corrects for the older behavior policy by an importance weight, here at most 5.
    """

    def recompute(batch, context):
        log_prob = context.evaluate(context.params, batch).distribution.log_prob(batch.action)
        return batch.replace(log_prob=log_prob, extras={**batch.extras, "sampler_log_prob": batch.log_prob})

    written = ("log_prob", "extras.sampler_log_prob")
    latest = pp.stateless(recompute, name="latest", provides=written, place="before_sampler")
    return ppo(estimate=(latest, GAE), surrogate=pp.chain(pp.tokens.importance_correction(high=5.0), CLIPPED))


def sun_2022():
    """Sun et al. 2022, You May Not Need Ratio Clipping in PPO, arXiv:2202.00079.

    Stops an update early when the mean deviation of the ratio from 1 exceeds a limit, instead of clipping (ESPO).
    """

    def deviation(batch):
        distance = jnp.abs(jnp.exp(batch.current_log_ratio()) - 1)
        return batch.add_metrics(ratio_deviation=F.masked_mean(distance, batch.mask))

    measured = pp.stateless(deviation, name="deviation", provides=("metrics.ratio_deviation",), place="after_sampler")
    return ppo(measured, pp.early_stop("ratio_deviation", 0.25), surrogate=UNCLIPPED)


def dossa_2021():
    """Dossa et al. 2021, An Empirical Investigation of Early Stopping Optimizations in PPO, IEEE Access 9.

    Ends the epochs of an update when the divergence from the behavior policy exceeds a limit.
    """
    return ppo(pp.kl_early_stop(0.01, check="epoch"))


def farsang_2021(updates=1000):
    """Farsang and Szegletes 2021, Decaying Clipping Range in Proximal Policy Optimization, arXiv:2102.10456.

    Decays the clip range over the run, here linearly.
    """
    return ppo(surrogate=pp.clipped_surrogate(clip_eps=pp.linear_schedule(0.2, 0.0, updates)))


def lin_2023():
    """Lin et al. 2023, Sample Dropout in Deep Policy Optimization, arXiv:2302.02299.

    Drops samples whose ratio deviates too much from 1 from the policy loss, whatever the sign of the advantage.
    """

    def drop(batch):
        near = jnp.abs(jnp.exp(batch.current_log_ratio()) - 1) < 0.25
        return batch.replace(advantage=jnp.where(near, batch.advantage, 0.0))

    dropout = pp.stateless(
        drop, name="dropout", requires=("advantage",), provides=("advantage",), place="after_sampler"
    )
    return ppo(surrogate=pp.chain(dropout, CLIPPED))


def song_2020():
    """Song et al. 2020, V-MPO: On-Policy Maximum a Posteriori Policy Optimization, arXiv:1909.12238.

    Imitates the better half of the actions, weighted by exp(A / η); here η and the weight of the divergence are fixed.
    """

    def better_half(log_ratio, advantage, mask=None):
        best = advantage >= jnp.median(advantage)
        weight = jax.nn.softmax(jnp.where(best, advantage, -jnp.inf).ravel()).reshape(advantage.shape)
        return -weight * advantage.size * log_ratio

    return ppo(pp.kl_penalty(coef=1.0), surrogate=pp.policy_loss(better_half), entropy=NONE)


def peng_2019():
    """Peng et al. 2019, Advantage-Weighted Regression, arXiv:1910.00177.

    Imitates all actions, weighted by exp(A / β), at most 20; here without the replay buffer.
    """

    def weighted_regression(log_ratio, advantage, mask=None):
        return -jnp.minimum(jnp.exp(advantage / 1.0), 20.0) * log_ratio

    return ppo(surrogate=pp.policy_loss(weighted_regression), entropy=NONE)


def rahman_2022():
    """Rahman and Xue 2022, Robust Policy Optimization in Deep Reinforcement Learning, arXiv:2212.07536.

    Perturbs the mean of the Gaussian in the loss, so that the policy keeps exploring.
    """
    return ppo(surrogate=pp.chain(pp.regularizers.perturbed_mean(scale=0.5), CLIPPED), entropy=NONE)


def williams_1992():
    """Williams 1992, Simple Statistical Gradient-Following Algorithms (REINFORCE), Machine Learning 8.

    The gradient of the log-probability times the return, in one step, without a critic.
    """
    estimate = (pp.tokens.reward_to_go(gamma=0.99),)
    without = {"normalize": NONE, "critic": NONE, "entropy": NONE}
    return ppo(estimate=estimate, sampler=pp.full_batch(), surrogate=REINFORCE, **without)


def williams_1991():
    """Williams and Peng 1991, Function Optimization Using Connectionist RL Algorithms, Connection Science 3.

    Adds a bonus for the entropy of the policy to REINFORCE.
    """
    estimate = (pp.tokens.reward_to_go(gamma=0.99),)
    return ppo(estimate=estimate, sampler=pp.full_batch(), normalize=NONE, surrogate=REINFORCE, critic=NONE)


def mnih_2016():
    """Mnih et al. 2016, Asynchronous Methods for Deep Reinforcement Learning, arXiv:1602.01783.

    Takes one step per rollout, with the n-step return minus the value as the advantage (A2C is its synchronous form).
    """
    estimate, critic = (pp.gae(gamma=0.99, gae_lambda=1.0),), pp.value_loss(coef=0.5)
    return ppo(estimate=estimate, sampler=pp.full_batch(), normalize=NONE, surrogate=REINFORCE, critic=critic)


def huang_2022_a2c():
    """Huang et al. 2022, A2C Is a Special Case of PPO, arXiv:2205.09123.

    With one epoch of one minibatch the ratio is 1, the clip never acts, and PPO takes A2C's step.
    """
    estimate, critic = (pp.gae(gamma=0.99, gae_lambda=1.0),), pp.value_loss(coef=0.5)
    return ppo(estimate=estimate, sampler=pp.full_batch(), normalize=NONE, critic=critic)


def haarnoja_2018():
    """Haarnoja et al. 2018, Soft Actor-Critic Algorithms and Applications, arXiv:1812.05905.

    Adapts the coefficient of the entropy, so that the entropy stays near a target.
    """
    return ppo(entropy=pp.regularizers.adaptive_entropy_bonus(target_entropy=0.5, learning_rate=3e-4, coef=0.01))


# --- advantages, data and refresh -------------------------------------------------------------------------------------


def schulman_2016():
    """Schulman et al. 2016, High-Dimensional Continuous Control Using GAE, arXiv:1506.02438.

    Averages the advantages of all horizons with weights that decay by λ.
    """
    return ppo(estimate=(pp.gae(gamma=0.99, gae_lambda=0.97),))


def sutton_1988():
    """Sutton 1988, Learning to Predict by the Methods of Temporal Differences, Machine Learning 3.

    The critic learns the λ-return, TD(λ); here the policy learns from the return of the whole rollout.
    """
    td = pp.within(pp.gae(gamma=0.99, gae_lambda=0.8), write={"target": "target"}, name="critic")
    return ppo(estimate=(pp.gae(gamma=0.99, gae_lambda=1.0), td))


def espeholt_2018():
    """Espeholt et al. 2018, IMPALA: Importance Weighted Actor-Learner Architectures, arXiv:1802.01561.

    Corrects value targets and the policy gradient for the lag between actors and learner (V-trace).
    """
    vtrace = pp.vtrace(gamma=0.99, rho_clip=1.0, c_clip=1.0, policy_gradient=True, pg_rho_clip=1.0)
    losses = (vtrace, REINFORCE, pp.value_loss(coef=0.5), ENTROPY)
    return pp.chain(pp.segment_minibatches(num_minibatches=1), *losses)


def pardo_2018():
    """Pardo et al. 2018, Time Limits in Reinforcement Learning, arXiv:1712.00378.

    Bootstraps where a time limit cut the episode. `gae` always does; this chain undoes it, to show its effect.
    """

    def forget(batch):
        ends = jnp.maximum(batch.terminated, batch.truncated)
        return batch.replace(terminated=ends, truncated=jnp.zeros_like(ends))

    undone = pp.stateless(forget, name="forget", provides=("terminated", "truncated"), place="before_sampler")
    return ppo(estimate=(undone, GAE))


def engstrom_2020():
    """Engstrom et al. 2020, Implementation Matters in Deep Policy Gradients, arXiv:2005.12729.

    Removes code-level optimizations one by one; here the clipped value loss.
    """
    return ppo(critic=pp.value_loss(coef=0.5))


def andrychowicz_2021():
    """Andrychowicz et al. 2021, What Matters for On-Policy Deep Actor-Critic Methods?, arXiv:2006.05990.

    Recommends recomputing advantages before each epoch, and not clipping the value loss.
    """
    sampler = pp.shuffled_minibatches(num_minibatches=4, num_epochs=4, refresh="epoch")
    return ppo(sampler=sampler, critic=pp.value_loss(coef=0.5))


def song_2023(share=0.125):
    """Song et al. 2023, Partial Advantage Estimator for Proximal Policy Optimization, arXiv:2301.10920.

    Discards the advantages of the last steps of a rollout, which are the most biased; here the last eighth.
    """

    def discard(batch):
        mask = jnp.ones_like(batch.reward) if batch.mask is None else batch.mask
        return batch.replace(mask=mask.at[len(mask) - int(share * len(mask)) :].set(0))

    partial = pp.stateless(discard, name="partial", provides=("mask",), place="before_sampler", needs_time=True)
    return ppo(estimate=(GAE, partial))


def yuan_2025():
    """Yuan et al. 2025, What's Behind PPO's Collapse in Long-CoT? (VC-PPO), arXiv:2503.01491.

    Decouples the lambdas: the critic learns from whole returns, while the policy's advantages have less variance.
    """
    critic = pp.within(pp.gae(gamma=0.99, gae_lambda=1.0), write={"target": "target"}, name="critic")
    return ppo(estimate=(GAE, critic))


def schaul_2016():
    """Schaul et al. 2016, Prioritized Experience Replay, arXiv:1511.05952.

    Draws samples with large errors more often, and corrects by importance weights; here segments of the rollout.
    """
    sampler = pp.prioritized_sampler(num_minibatches=4, num_epochs=4, alpha=0.6, beta=0.4)
    return ppo(sampler=sampler, normalize=pp.chain(NORMALIZED, pp.advantage_weight()))


def suarez_2024():
    """Suarez 2024, PufferLib, arXiv:2406.12905; what follows is in the code of version 3.0.

    Prioritizes segments, and computes V-trace again under the current policy of each minibatch.
    """
    vtrace = pp.vtrace(gamma=0.99, gae_lambda=0.95)
    sampler = pp.prioritized_sampler(num_minibatches=4, num_epochs=4, alpha=0.8, beta=0.2, refresh="minibatch")
    normalize = pp.chain(vtrace, NORMALIZED, pp.advantage_weight())
    return ppo(estimate=(vtrace,), sampler=sampler, normalize=normalize)


def kapturowski_2019():
    """Kapturowski et al. 2019, Recurrent Experience Replay in Distributed RL (R2D2), ICLR.

    Trains a recurrent policy on pieces of trajectories, after a burn-in that warms up its state.
    """
    return ppo(sampler=pp.time_chunks(num_minibatches=2, num_epochs=4, length=4, burn_in=2))


def naik_2024():
    """Naik et al. 2024, Reward Centering, arXiv:2405.09999.

    Subtracts a running mean from the rewards, for tasks without episodes.
    """

    def update(batch, mean, context):
        mean = mean + 0.1 * (F.masked_mean(batch.reward, batch.mask) - mean)
        return batch.replace(reward=batch.reward - mean), mean

    center = pp.Part(lambda params, key: jnp.zeros(()), update, "center", provides=("reward",), place="before_sampler")
    return ppo(estimate=(center, GAE))


# --- critics ----------------------------------------------------------------------------------------------------------


def huber_1964():
    """Huber 1964, Robust Estimation of a Location Parameter, Annals of Mathematical Statistics 35.

    The loss of the critic grows linearly for large errors, so that outliers do not dominate.
    """
    return ppo(critic=pp.critics.critic_loss(F.huber_value_loss, delta=1.0, coef=0.5))


def flet_berliac_2021():
    """Flet-Berliac et al. 2021, Learning Value Functions Using Residual Variance (AVEC), arXiv:2010.04440.

    The critic minimizes the variance of its error instead of the mean square, so that a constant bias does not count.
    """

    def residual_variance(value, target, mask=None):
        error = value - jax.lax.stop_gradient(target)
        return jnp.square(error - F.masked_mean(error, mask))

    return ppo(critic=pp.critics.critic_loss(residual_variance, coef=0.5))


def van_hasselt_2016():
    """van Hasselt et al. 2016, Learning Values Across Many Orders of Magnitude (PopArt), arXiv:1602.07714.

    The critic learns normalized targets; whenever the statistics change, its last layer is rescaled to keep its output.
    """

    def evaluate(params, batch):
        head, constant = params["head"], jax.lax.stop_gradient(params["head"])
        normal = batch.obs @ head["kernel"] + head["bias"]
        return pp.Output(actor(params, batch), constant["scale"] * normal + constant["mean"], aux={"normal": normal})

    def write(params, old, new):
        kernel, bias = F.rescale_head(params["head"]["kernel"], params["head"]["bias"], old, new)
        return params | {"head": {"kernel": kernel, "bias": bias, **new._asdict()}}

    read = {"value": "current.aux.normal", "target": "extras.target_normalized"}
    critic = pp.within(pp.value_loss(coef=0.5), read=read, name="normal")
    return Setup(ppo(estimate=(GAE, pp.critics.normalize_target(write, rate=3e-4)), critic=critic), evaluate)


def schrittwieser_2020():
    """Schrittwieser et al. 2020, Mastering Atari, Go, Chess and Shogi (MuZero), arXiv:1911.08265.

    The critic classifies: its target is divided between the two nearest of many atoms, on a compressed scale.
    """
    x = jnp.linspace(-5.0, 5.0, 41)
    atoms = jnp.sign(x) * (((jnp.sqrt(1 + 0.004 * (jnp.abs(x) + 1.001)) - 1) / 0.002) ** 2 - 1)

    def evaluate(params, batch):
        logits = batch.obs @ params["logits"]
        return pp.Output(actor(params, batch), F.categorical_value(logits, atoms), aux={"logits": logits})

    loss = pp.critics.critic_loss(F.categorical_value_loss, prediction="aux.logits", support=atoms, coef=0.5)
    return Setup(ppo(critic=loss), evaluate)


def farebrother_2024():
    """Farebrother et al. 2024, Stop Regressing: Training Value Functions via Classification, arXiv:2403.03950.

    The critic classifies, with targets spread over bins by a Gaussian of 0.75 bin widths (HL-Gauss).
    """
    bins = jnp.linspace(-10.0, 10.0, 41)

    def evaluate(params, batch):
        logits = batch.obs @ params["logits"]
        return pp.Output(actor(params, batch), F.categorical_value(logits, bins), aux={"logits": logits})

    how = {"support": bins, "sigma": 0.75 * 0.5}
    return Setup(ppo(critic=pp.critics.critic_loss(F.categorical_value_loss, prediction="aux.logits", **how)), evaluate)


def dabney_2018():
    """Dabney et al. 2018, Distributional Reinforcement Learning with Quantile Regression, arXiv:1710.10044.

    The critic predicts quantiles of the return; the value is their mean.
    """

    def evaluate(params, batch):
        quantiles = batch.obs @ params["quantiles"]
        return pp.Output(actor(params, batch), jnp.mean(quantiles, axis=-1), aux={"quantiles": quantiles})

    return Setup(
        ppo(critic=pp.critics.critic_loss(F.quantile_value_loss, prediction="aux.quantiles", kappa=1.0)), evaluate
    )


def hafner_2023():
    """Hafner et al. 2023, Mastering Diverse Domains through World Models (DreamerV3), arXiv:2301.04104.

    Divides advantages by a running range of the returns, from the 5th to the 95th percentile, if that exceeds 1.
    """

    def update(batch, scale, context):
        low, high = jnp.percentile(batch.target, jnp.array([5.0, 95.0]))
        scale = 0.99 * scale + 0.01 * (high - low)
        return batch.replace(advantage=batch.advantage / jnp.maximum(1.0, scale)), scale

    declared = {"requires": ("advantage", "target"), "provides": ("advantage",), "place": "before_sampler"}
    percentile = pp.Part(lambda params, key: jnp.zeros(()), update, "percentile", **declared)
    return ppo(estimate=(GAE, percentile), normalize=NONE)


def cobbe_2021(like, num_rollouts=32):
    """Cobbe et al. 2021, Phasic Policy Gradient, arXiv:2009.04416.

    Separates policy and critic, and every 32 rollouts distills the values into an auxiliary head of the policy.
    """
    policy = pp.chain(pp.shuffled_minibatches(4), NORMALIZED, CLIPPED, ENTROPY)
    value = pp.chain(pp.shuffled_minibatches(4), pp.value_loss())
    joint = pp.within(pp.value_loss(), read={"value": "current.aux.value"}, name="joint")
    clone = pp.kl_penalty(coef=1.0, estimator="analytic")
    late = pp.chain(
        pp.replay(num_rollouts, like), latest(), pp.shuffled_minibatches(4, 6), joint, clone, pp.value_loss()
    )
    auxiliary = pp.phase(late, trains=None, every=num_rollouts)
    return phased(policy=policy, value=value, auxiliary=auxiliary)


def raileanu_2021_daac():
    """Raileanu and Fergus 2021, Decoupling Value and Policy for Generalization in RL, arXiv:2102.10330.

    Separates policy and critic; the network of the policy predicts advantages instead of values (DAAC).
    """
    read = {"value": "current.aux.advantage", "target": "advantage"}
    auxiliary = pp.within(pp.value_loss(coef=0.25), read=read, name="advantage")
    policy = pp.chain(pp.shuffled_minibatches(4), auxiliary, NORMALIZED, CLIPPED, ENTROPY)
    value = pp.chain(pp.shuffled_minibatches(4, num_epochs=9), pp.value_loss(coef=0.5))
    return phased(policy=policy, value=value)


def aitchison_2022():
    """Aitchison and Sweetser 2022, DNA: PPO with a Dual Network Architecture, arXiv:2206.10027.

    Separates policy and critic, gives each its own λ, and distills values into the policy after every rollout.
    """
    target = pp.within(pp.gae(gamma=0.99, gae_lambda=0.95), write={"target": "target"}, name="critic")
    policy = pp.chain(pp.shuffled_minibatches(4, 2), NORMALIZED, CLIPPED, ENTROPY)
    value = pp.chain(pp.shuffled_minibatches(4), pp.value_loss())
    distill = pp.within(pp.value_loss(), read={"value": "current.aux.value", "target": "value"}, name="distill")
    clone = pp.kl_penalty(coef=1.0, estimator="analytic")
    distillation = pp.phase(pp.chain(latest(), pp.shuffled_minibatches(4, 2), distill, clone), trains="policy")
    estimate = (pp.gae(gamma=0.99, gae_lambda=0.8), target)
    return phased(*estimate, policy=policy, value=value, distillation=distillation)


# --- exploration, imitation and auxiliary losses ----------------------------------------------------------------------


def burda_2018():
    """Burda et al. 2018, Exploration by Random Network Distillation, arXiv:1810.12894.

    Adds a reward where a predictor of a random network has a large error, with a separate critic.
    """
    read = {name: f"extras.{name}_intrinsic" for name in ("reward", "value", "next_value")}
    write = {name: f"extras.{name}_intrinsic" for name in ("advantage", "target")}
    whole = pp.gae(gamma=0.99, gae_lambda=0.95)  # over the ends of episodes
    second = pp.within(whole, name="intrinsic", read=read | {"terminated": "extras.never"}, write=write)
    both = pp.combine_advantages({"advantage": 2.0, "extras.advantage_intrinsic": 1.0})
    read = {"value": "current.aux.value_intrinsic", "target": "extras.target_intrinsic"}
    critic = pp.within(pp.value_loss(coef=0.5), name="second", read=read)
    novelty, predictor = distillation()
    return ppo(critic, predictor, estimate=(novelty, GAE, second, both))


def tang_2017(bits=8, coef=0.01):
    """Tang et al. 2017, #Exploration: A Study of Count-Based Exploration, arXiv:1611.04717.

    Adds a bonus of β / √n for observations whose hash, the signs of random projections, was seen n times.
    """

    def init(params, key):
        return jax.random.normal(key, (256, bits)), jnp.zeros(2**bits)

    def update(batch, state, context):
        flat = batch.obs.reshape(*batch.reward.shape, -1)
        code = (flat @ state[0][: flat.shape[-1]] > 0) @ 2 ** jnp.arange(bits)
        counts = state[1].at[code].add(1.0)
        return batch.replace(reward=batch.reward + coef / jnp.sqrt(counts[code])), (state[0], counts)

    return ppo(estimate=(pp.Part(init, update, "counts", provides=("reward",), place="before_sampler"), GAE))


def ng_1999():
    """Ng et al. 1999, Policy Invariance under Reward Transformations, ICML.

    Adds γΦ(s') - Φ(s) to the reward, for a potential Φ of your own, which leaves the best policy unchanged.
    """

    def potential(obs):
        return -jnp.abs(obs[..., 0])

    def shape(batch):
        later = 0.99 * (1 - batch.terminated) * potential(batch.next_obs)
        return batch.replace(reward=batch.reward + later - potential(batch.obs))

    declared = {"requires": ("next_obs",), "provides": ("reward",), "place": "before_sampler"}
    return ppo(estimate=(pp.stateless(shape, name="shape", **declared), GAE))


def oh_2018(like, num_rollouts=8):
    """Oh et al. 2018, Self-Imitation Learning, arXiv:1806.05635.

    Replays earlier rollouts, and imitates the actions whose return was higher than the value.
    """
    returns = pp.within(pp.gae(gamma=0.99, gae_lambda=1.0), write={"target": "extras.returns"}, name="monte_carlo")
    now = pp.chain(SHUFFLED, NORMALIZED, CLIPPED, CRITIC, ENTROPY)
    imitate = pp.within(pp.exploration.self_imitation(), read={"target": "extras.returns"}, name="imitation")
    before = pp.chain(pp.replay(num_rollouts, like), SHUFFLED, imitate)
    return phased(GAE, returns, now=pp.phase(now, trains=None), before=pp.phase(before, trains=None))


def rajeswaran_2018(updates=1000):
    """Rajeswaran et al. 2018, Learning Complex Dexterous Manipulation with Demonstrations (DAPG), arXiv:1709.10087.

    Adds the log-likelihood of demonstrated actions, with a weight that decays; the paper's step is a natural gradient.
    """

    def clone(batch, context):
        obs, action = batch.shared["demonstrations"]
        distribution = context.evaluate(context.params, pp.Batch(obs=obs, axes=("step",))).distribution
        weight = pp.linear_schedule(0.1, 0.0, updates)(context.step)
        return batch.add_loss("cloning", -weight * jnp.mean(distribution.log_prob(action)), per="batch")

    declared = {"requires": ("shared.demonstrations",), "provides": ("losses",), "place": "after_sampler"}
    return ppo(pp.stateless(clone, name="cloning", **declared))


def schmitt_2018(updates=1000):
    """Schmitt et al. 2018, Kickstarting Deep Reinforcement Learning, arXiv:1803.03835.

    Adds the divergence from a teacher, whose distribution was recorded for each step, with a weight that decays.
    """
    weight = pp.linear_schedule(1.0, 0.0, updates)
    return ppo(pp.kl_penalty(coef=weight, estimator="analytic", reference="teacher"))


def raileanu_2021_drac(scale=0.2):
    """Raileanu et al. 2021, Automatic Data Augmentation for Generalization in RL (DrAC), arXiv:2006.12862.

    Penalizes changes of policy and value under augmentation; here each observation is multiplied by a random number.
    """

    def augmented(batch, context):
        noise = 1 + scale * jax.random.normal(context.key, (*batch.obs.shape[:-1], 1))
        output = context.evaluate(context.params, batch.replace(obs=noise * batch.obs))
        policy, value = jax.lax.stop_gradient((batch.current.distribution, batch.current.value))
        loss = policy.kl_divergence(output.distribution) + 0.5 * jnp.square(value - output.value)
        return batch.add_loss("augmented", 0.1 * loss)

    return ppo(pp.stateless(augmented, name="augmented", provides=("losses",), place="after_sampler"))


def mysore_2021():
    """Mysore et al. 2021, Regularizing Action Policies for Smooth Control (CAPS), arXiv:2012.06644.

    Penalizes actions that change from step to step, or when the observation changes a little.
    """
    return ppo(pp.regularizers.smoothness_loss(temporal=1.0, spatial=5.0, noise_scale=0.05))


def yu_2018():
    """Yu et al. 2018, Learning Symmetric and Low-Energy Locomotion, arXiv:1801.08093.

    Penalizes actions that are not mirrored when the observation is; here mirroring changes all signs.
    """

    def mirror(batch, context):
        mirrored = context.evaluate(context.params, batch.replace(obs=-batch.obs)).distribution.loc
        asymmetry = jnp.sum(jnp.square(batch.current.distribution.loc + mirrored), axis=-1)
        return batch.add_loss("mirror", 4.0 * asymmetry)

    return ppo(pp.stateless(mirror, name="mirror", provides=("losses",), place="after_sampler"), entropy=NONE)


def ray_2019(limit=25.0):
    """Ray et al. 2019, Benchmarking Safe Exploration in Deep RL (PPO-Lagrangian), OpenAI.

    Adds a critic and an advantage for costs, weighted by a multiplier that grows while costs exceed the limit.
    """

    def update(batch, multiplier, context):
        multiplier = jnp.maximum(multiplier + 0.05 * (jnp.mean(batch.per_segment["cost"]) - limit), 0.0)
        mixed = (batch.advantage - multiplier * batch.extras["cost_advantage"]) / (1 + multiplier)
        return batch.replace(advantage=mixed), multiplier

    read = {"reward": "extras.cost", "value": "extras.value_cost", "next_value": "extras.next_value_cost"}
    write = {"advantage": "extras.cost_advantage", "target": "extras.cost_target"}
    costs = pp.within(GAE, name="cost", read=read, write=write)
    lagrange = pp.Part(lambda params, key: jnp.ones(()), update, "lagrange", provides=("advantage",))
    read = {"value": "current.aux.value_cost", "target": "extras.cost_target"}
    return ppo(pp.within(pp.value_loss(coef=0.5), name="costs", read=read), estimate=(GAE, costs, lagrange))


def moalla_2024():
    """Moalla et al. 2024, No Representation, No Trust (PFO), arXiv:2405.00662.

    Penalizes changes of the network's features during an update, so that they do not collapse.
    """

    def remember(batch, context):
        features = context.evaluate(context.params, batch).aux["features"]
        return batch.replace(extras={**batch.extras, "features": features})

    def change(batch):
        moved = jnp.sum(jnp.square(batch.current.aux["features"] - batch.extras["features"]), axis=-1)
        return batch.add_loss("features", 1.0 * moved)

    before = pp.stateless(remember, name="remember", provides=("extras.features",), place="before_sampler")
    after = pp.stateless(change, name="change", requires=("extras.features",), provides=("losses",))
    return ppo(after, estimate=(GAE, before))


# --- multi-agent ------------------------------------------------------------------------------------------------------


def de_witt_2020():
    """de Witt et al. 2020, Is Independent Learning All You Need in StarCraft? (IPPO), arXiv:2011.09533.

    PPO for each agent, `[T, N, A]`, with shared parameters, and a critic that sees only the agent's own observation.
    """
    return ppo(sampler=pp.segment_minibatches(num_minibatches=4, num_epochs=4))


def yu_2022():
    """Yu et al. 2022, The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games (MAPPO), arXiv:2103.01955.

    A critic that sees all agents, with normalized targets and a Huber loss; large minibatches.
    """

    def evaluate(params, batch):
        head, constant = params["head"], jax.lax.stop_gradient(params["head"])
        state = jnp.broadcast_to(jnp.mean(batch.obs, axis=-2, keepdims=True), batch.obs.shape)
        normal = state @ head["kernel"] + head["bias"]
        return pp.Output(actor(params, batch), constant["scale"] * normal + constant["mean"], aux={"normal": normal})

    def write(params, old, new):
        return params | {"head": params["head"] | new._asdict()}

    normalize = pp.critics.normalize_target(write, rate=lambda step: 1 / (step + 1))
    read = {"value": "current.aux.normal", "target": "extras.target_normalized"}
    critic = pp.within(pp.critics.critic_loss(F.huber_value_loss, delta=10.0), name="normal", read=read)
    return Setup(ppo(estimate=(GAE, normalize), sampler=pp.full_batch(num_epochs=10), critic=critic), evaluate)


# --- language models --------------------------------------------------------------------------------------------------


def ziegler_2019():
    """Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593.

    The score is the reward of the last token, minus a penalty for leaving a reference; here with a fixed coefficient.
    """
    return ppo(estimate=(pp.tokens.outcome_reward(kl_coef=0.1), pp.gae(gamma=1.0, gae_lambda=0.95)), entropy=NONE)


def ouyang_2022():
    """Ouyang et al. 2022, Training Language Models to Follow Instructions with Human Feedback, arXiv:2203.02155.

    Mixes the gradient of the pretraining data into that of PPO (PPO-ptx).
    """

    def pretrain(batch, context):
        obs, action = batch.shared["demonstrations"]
        distribution = context.evaluate(context.params, pp.Batch(obs=obs, axes=("step",))).distribution
        return batch.add_loss("pretraining", -27.8 * jnp.mean(distribution.log_prob(action)), per="batch")

    declared = {"requires": ("shared.demonstrations",), "provides": ("losses",), "place": "after_sampler"}
    estimate = (pp.tokens.outcome_reward(kl_coef=0.02), pp.gae(gamma=1.0, gae_lambda=0.95))
    return ppo(pp.stateless(pretrain, name="pretrain", **declared), estimate=estimate, entropy=NONE)


def shao_2024():
    """Shao et al. 2024, DeepSeekMath: Pushing the Limits of Mathematical Reasoning (GRPO), arXiv:2402.03300.

    The advantage is the score compared with those of other answers to the same prompt, so there is no critic.
    """
    reference = {"direction": "current_to_reference", "reference": "reference_log_prob"}
    penalty = pp.kl_penalty(coef=0.04, estimator="k3", **reference)
    per_sequence = pp.tokens.aggregate("kl_penalty", by="sequence_mean")
    return tokens(CLIPPED, penalty, per_sequence, estimate=(GROUPS,), by="sequence_mean")


def liu_2025_dr_grpo():
    """Liu et al. 2025, Understanding R1-Zero-Like Training (Dr.GRPO), arXiv:2503.20783.

    GRPO without two divisions: by the standard deviation of the group, and by the length of the answer.
    """
    return tokens(CLIPPED, estimate=(CENTERED,), by="sequence_sum", length=1024)


def ahmadian_2024():
    """Ahmadian et al. 2024, Back to Basics: Revisiting REINFORCE-Style Optimization (RLOO), arXiv:2402.14740.

    REINFORCE, with the mean score of the other answers to the same prompt as the baseline.
    """
    advantage = pp.tokens.group_advantage(group=8, score="score", baseline="leave_one_out", scale=None)
    return tokens(REINFORCE, estimate=(advantage,), by="sequence_sum")


def hu_2025():
    """Hu 2025, REINFORCE++, arXiv:2501.03262.

    Whole returns with a penalty for each token, normalized over the batch instead of over groups.
    """
    return tokens(
        CLIPPED, estimate=(pp.tokens.outcome_reward(kl_coef=0.01), pp.tokens.reward_to_go(), pp.advantage_normalize())
    )


def hao_2025():
    """Hao et al. 2025, On-Policy RL with Optimal Reward Baseline (OPO), arXiv:2505.23585.

    One exact step per rollout, with the mean score weighted by length as the baseline.
    """
    advantage = pp.tokens.group_advantage(group=8, score="score", baseline="length_weighted", scale=None)
    return pp.chain(advantage, pp.full_batch(), REINFORCE)


def li_2024():
    """Li et al. 2024, ReMax: A Simple, Effective, and Efficient Method for Aligning LLMs, arXiv:2310.10505.

    REINFORCE, with the score of the greedy answer as the baseline.
    """
    advantage = pp.tokens.group_advantage(group=8, score="score", baseline="given", scale=None)
    return tokens(REINFORCE, estimate=(advantage,), by="sequence_sum")


def yu_2025():
    """Yu et al. 2025, DAPO: An Open-Source LLM RL System at Scale, arXiv:2503.14476.

    A wider clip range above 1 than below, and a mean over tokens; the selection of prompts is not part of the chain.
    """
    return tokens(pp.clipped_surrogate(clip_eps=0.2, clip_eps_high=0.28), estimate=(GROUPS,))


def liu_2025_lite_ppo():
    """Liu et al. 2025, Tricks or Traps? A Deep Dive into RL for LLM Reasoning (Lite PPO), arXiv:2508.08221.

    Keeps only the mean of the group, the standard deviation of the batch, and a mean over tokens.
    """
    return tokens(CLIPPED, estimate=(pp.tokens.group_advantage(group=8, score="score", scale="batch"),))


def minimax_2025():
    """MiniMax 2025, MiniMax-M1: Scaling Test-Time Compute Efficiently (CISPO), arXiv:2506.13585.

    Clips the importance weight and not the objective, so that all tokens keep a gradient.
    """
    return tokens(pp.policy_loss(F.cispo, clip_eps=1.0, clip_eps_high=0.28), estimate=(GROUPS,))


def zheng_2025():
    """Zheng et al. 2025, Group Sequence Policy Optimization (GSPO), arXiv:2507.18071.

    Clips the ratio of whole sequences, which is the geometric mean of the ratios of their tokens.
    """
    loss = pp.policy_loss(F.gspo, clip_eps=3e-4, clip_eps_high=4e-4)
    return tokens(loss, estimate=(GROUPS,), by="sequence_mean")


def zhao_2025():
    """Zhao et al. 2025, Geometric-Mean Policy Optimization (GMPO), arXiv:2507.20673.

    The objective of a sequence is the geometric mean of those of its tokens, each clipped.
    """
    return tokens(pp.policy_loss(F.gmpo, clip_eps=0.4), estimate=(GROUPS,), by="sequence_mean")


def gao_2025():
    """Gao et al. 2025, Soft Adaptive Policy Optimization (SAPO), arXiv:2511.20347.

    A sigmoid in place of the clip, steeper for negative advantages.
    """
    return tokens(pp.policy_loss(F.sapo, tau=1.0, tau_negative=1.05), estimate=(GROUPS,), by="sequence_mean")


def chu_2025():
    """Chu et al. 2025, GPG: A Simple and Strong Reinforcement Learning Baseline, arXiv:2504.02546.

    The plain policy gradient with centered scores, without ratio, clip, critic or reference.
    """
    return tokens(REINFORCE, estimate=(CENTERED,))


def cui_2025_clip_cov():
    """Cui et al. 2025, The Entropy Mechanism of RL for Reasoning Language Models, arXiv:2505.22617.

    Removes a few tokens whose probability and advantage vary together from the loss, because they reduce the entropy.
    """
    return tokens(pp.tokens.clip_cov(clip_eps=0.2, fraction=2e-4), estimate=(GROUPS,))


def yue_2025(alpha=0.05):
    """Yue et al. 2025, VAPO: Efficient and Reliable RL for Advanced Reasoning Tasks, arXiv:2504.05118.

    λ = 1 - 1 / (α l) for an answer of l tokens, and λ = 1 for the critic; clip-higher; imitates correct answers.
    """

    def imitated(log_ratio, right, mask):
        return -0.1 * right * log_ratio / F.masked_mean(right + 1e-8, mask)

    def adapt(batch):
        lam = jnp.clip(1 - 1 / (alpha * jnp.sum(batch.mask, axis=0)), 0, 1)
        steps = (batch.reward, batch.value, batch.next_value, batch.terminated, batch.truncated)
        policy, critic = (F.gae(*steps, gamma=1.0, gae_lambda=x, mask=batch.mask) for x in (lam, 1.0))
        return batch.replace(advantage=policy.advantage, target=critic.target)

    declared = {"requires": ("mask",), "provides": ("advantage", "target"), "place": "before_sampler"}
    estimate = (pp.tokens.outcome_reward(), pp.stateless(adapt, name="adapt", needs_time=True, **declared))
    imitate = pp.within(pp.policy_loss(imitated), read={"advantage": "extras.right"}, name="imitate")
    return ppo(imitate, estimate=estimate, surrogate=pp.clipped_surrogate(clip_eps=0.2, clip_eps_high=0.28))


def le_roux_2025():
    """Le Roux et al. 2025, Tapered Off-Policy REINFORCE (TOPR), arXiv:2503.14286.

    Imitates good answers without a weight, and bad ones with an importance weight of at most 1.
    """

    def tapered(log_ratio, advantage, mask=None):
        whole = F.sequence_log_ratio(log_ratio, reduction="sum", mask=mask)
        weight = jnp.where(advantage >= 0, 1.0, jnp.exp(jnp.minimum(whole, 0.0)))
        return F.policy_gradient_loss(log_ratio, weight * advantage, mask=mask)

    advantage = pp.tokens.group_advantage(group=8, score="score", baseline="none", scale=None)
    return tokens(pp.policy_loss(tapered), estimate=(advantage,), by="sequence_sum")


def zhu_2025():
    """Zhu et al. 2025, The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning, arXiv:2506.01347.

    Learns mostly from wrong answers: the advantages of correct ones are divided by ten (Weighted-REINFORCE).
    """

    def weigh(batch):
        return batch.replace(advantage=jnp.where(batch.advantage > 0, 0.1, 1.0) * batch.advantage)

    declared = {"requires": ("advantage",), "provides": ("advantage",), "place": "before_sampler"}
    advantage = pp.tokens.group_advantage(group=8, score="score", baseline="none", scale=None)
    return tokens(REINFORCE, estimate=(advantage, pp.stateless(weigh, name="weigh", **declared)))


def wang_2025():
    """Wang et al. 2025, Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective RL, arXiv:2506.01939.

    DAPO's loss, in which only the fifth of the tokens with the highest entropy has a policy gradient.
    """

    def fork(batch):
        entropy = jax.lax.stop_gradient(batch.current.distribution.entropy())
        forking = entropy >= jnp.nanquantile(jnp.where(batch.mask > 0, entropy, jnp.nan), 0.8)
        return batch.replace(advantage=jnp.where(forking, batch.advantage, 0.0))

    declared = {"requires": ("advantage", "mask"), "provides": ("advantage",), "place": "after_sampler"}
    clip_higher = pp.clipped_surrogate(clip_eps=0.2, clip_eps_high=0.28)
    return tokens(pp.stateless(fork, name="fork", **declared), clip_higher, estimate=(GROUPS,))


def kimi_2025(tau=0.1):
    """Kimi Team 2025, Kimi k1.5: Scaling Reinforcement Learning with LLMs, arXiv:2501.12599.

    A policy gradient with centered scores and a penalty on the square of the sequence's log-ratio.
    """

    def mirror_descent(log_ratio, advantage, mask=None):
        whole = F.sequence_log_ratio(log_ratio, reduction="sum", mask=mask)
        length = jnp.sum(jnp.ones_like(log_ratio) if mask is None else mask, axis=0)
        return -advantage * log_ratio + 0.5 * tau * jnp.square(whole) / jnp.maximum(length, 1)

    return tokens(pp.policy_loss(mirror_descent), estimate=(CENTERED,), by="sequence_sum")


def xiong_2025():
    """Xiong et al. 2025, A Minimalist Approach to LLM Reasoning (RAFT++), arXiv:2504.11343.

    Learns from correct answers only, with PPO's ratio and clip.
    """

    def select(batch):
        return batch.replace(advantage=jnp.where(batch.advantage > 0, 1.0, 0.0))

    declared = {"requires": ("advantage",), "provides": ("advantage",), "place": "before_sampler"}
    advantage = pp.tokens.group_advantage(group=8, score="score", baseline="none", scale=None)
    return tokens(CLIPPED, estimate=(advantage, pp.stateless(select, name="select", **declared)))


def yao_2025():
    """Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, blog post.

    Multiplies by the ratio of the trainer's to the inference engine's probability, truncated (TIS).
    """
    return tokens(pp.tokens.importance_correction(high=2.0), CLIPPED, estimate=(GROUPS,))


def ling_2025():
    """Ling Team 2025, Every Step Evolves: Scaling RL for Trillion-Scale Thinking Model (IcePop), arXiv:2510.18855.

    Masks tokens for which trainer and inference engine disagree too much.
    """
    return tokens(pp.tokens.importance_correction(low=0.5, high=5.0, mode="mask"), CLIPPED, estimate=(GROUPS,))


# --- optimizers and parameters ----------------------------------------------------------------------------------------


def pascanu_2013(rate=2.5e-4):
    """Pascanu et al. 2013, On the Difficulty of Training Recurrent Neural Networks, arXiv:1211.5063.

    Scales down a gradient whose norm is too large; here with separate norms for policy and critic.
    """

    def name(path, leaf):
        return "policy" if "policy" in jax.tree_util.keystr(path) else "value"

    clips = {"policy": optax.clip_by_global_norm(0.1), "value": optax.clip_by_global_norm(1.0)}
    clip = optax.partition(clips, lambda params: jax.tree_util.tree_map_with_path(name, params))
    return Setup(ppo(), optimizer=optax.chain(clip, adam(), pp.optim.scale_by_update_schedule(rate)))


def rudin_2022(target=0.01):
    """Rudin et al. 2022, Learning to Walk in Minutes Using Massively Parallel Deep RL, arXiv:2109.11978.

    Adapts the learning rate, so that the divergence of each step stays near a target.
    """

    def update(updates, rate, params=None, *, metrics, **extra):
        kl, slower, faster = metrics["approx_kl"], jnp.maximum(rate / 1.5, 1e-5), jnp.minimum(rate * 1.5, 1e-2)
        rate = jnp.where(kl > 2 * target, slower, jnp.where((kl > 0) & (kl < target / 2), faster, rate))
        return jax.tree.map(lambda u: -rate * u, updates), rate

    adaptive = optax.GradientTransformationExtraArgs(lambda params: jnp.asarray(1e-3), update)
    return Setup(ppo(), optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), adaptive))


def ellis_2024(rate=2.5e-4):
    """Ellis et al. 2024, Adam on Local Time: Addressing Nonstationarity in RL (Adam-Rel), arXiv:2412.17113.

    Resets Adam's step count, but not its moments, at the start of each update.
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

    Gives both of Adam's averages the same decay, so that its steps stay small when gradients change.
    """
    return Setup(ppo(), optimizer=clipped(adam(b1=0.99, b2=0.99), rate=rate))


def loshchilov_2019(rate=2.5e-4):
    """Loshchilov and Hutter 2019, Decoupled Weight Decay Regularization (AdamW), arXiv:1711.05101.

    Decays the weights directly, instead of through Adam's moments.
    """
    return Setup(ppo(), optimizer=clipped(adam(), optax.add_decayed_weights(0.01), rate=rate))


def liu_2025_muon():
    """Liu et al. 2025, Muon Is Scalable for LLM Training, arXiv:2502.16982.

    Orthogonalizes the momentum of each matrix; PufferLib uses it for PPO.
    """
    return Setup(ppo(), optimizer=optax.contrib.muon(0.015))


def liu_2021():
    """Liu et al. 2021, Regularization Matters in Policy Optimization, arXiv:1910.09191.

    Adds an L2 loss on the parameters of the policy, but not on those of the critic.
    """

    def decay(batch, context):
        return batch.add_loss("l2", 1e-4 * optax.tree.norm(context.params["policy"], squared=True), per="batch")

    return ppo(pp.stateless(decay, name="l2", provides=("losses",), place="after_sampler"))


def kumar_2023():
    """Kumar et al. 2023, Maintaining Plasticity via Regenerative Regularization (L2 Init), arXiv:2308.11958.

    Adds the squared distance of the parameters from their initial values as a loss.
    """

    def update(batch, first, context):
        moved = optax.tree.norm(optax.tree.sub(context.params, first), squared=True)
        return batch.add_loss("l2_init", 1e-3 * moved, per="batch"), first

    return ppo(pp.Part(lambda params, key: params, update, "l2_init", provides=("losses",), place="after_sampler"))


def ash_2020(shrink=0.999, noise=1e-4):
    """Ash and Adams 2020, On Warm-Starting Neural Network Training (Shrink and Perturb), arXiv:1910.08475.

    Shrinks the parameters and adds noise, here a little before each update.
    """

    def amend(params, old, new):
        return jax.tree.map(lambda x, z: shrink * x + noise * z, params, optax.tree.random_like(new, params))

    def update(batch, state, context):
        return batch, context.key

    part = pp.Part(lambda params, key: key, update, "perturb", provides=(), amend=amend, place="before_sampler")
    return ppo(estimate=(part, GAE))


def elsayed_2024(bound=3.0):
    """Elsayed et al. 2024, Weight Clipping for Deep Continual and Reinforcement Learning, arXiv:2407.01704.

    Clips every parameter after each gradient step; the paper's bound depends on the layer's initialization.
    """

    def amend(params, old, new):
        return jax.tree.map(lambda x: jnp.clip(x, -bound, bound), params)

    def update(batch, state, context):
        return batch, state

    return ppo(pp.Part(lambda params, key: (), update, "weight_clip", amend=amend, place="after_sampler"))


# --- the index --------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Policy losses and trust regions": (
        schulman_2017,
        huang_2022,
        heess_2017,
        wang_2019,
        ye_2020,
        xie_2024,
        lu_2022,
        tomar_2020,
        chen_2022,
        hilton_2021,
        fu_2025,
        sun_2022,
        dossa_2021,
        farsang_2021,
        lin_2023,
        song_2020,
        peng_2019,
        rahman_2022,
        williams_1992,
        williams_1991,
        mnih_2016,
        huang_2022_a2c,
        haarnoja_2018,
    ),
    "Advantages, data and refresh": (
        schulman_2016,
        sutton_1988,
        espeholt_2018,
        pardo_2018,
        engstrom_2020,
        andrychowicz_2021,
        song_2023,
        yuan_2025,
        schaul_2016,
        suarez_2024,
        kapturowski_2019,
        naik_2024,
    ),
    "Critics": (
        huber_1964,
        flet_berliac_2021,
        van_hasselt_2016,
        schrittwieser_2020,
        farebrother_2024,
        dabney_2018,
        hafner_2023,
        cobbe_2021,
        raileanu_2021_daac,
        aitchison_2022,
    ),
    "Exploration, imitation and auxiliary losses": (
        burda_2018,
        tang_2017,
        ng_1999,
        oh_2018,
        rajeswaran_2018,
        schmitt_2018,
        raileanu_2021_drac,
        mysore_2021,
        yu_2018,
        ray_2019,
        moalla_2024,
    ),
    "Multi-agent": (
        de_witt_2020,
        yu_2022,
    ),
    "Language models": (
        ziegler_2019,
        ouyang_2022,
        shao_2024,
        liu_2025_dr_grpo,
        ahmadian_2024,
        hu_2025,
        hao_2025,
        li_2024,
        yu_2025,
        liu_2025_lite_ppo,
        minimax_2025,
        zheng_2025,
        zhao_2025,
        gao_2025,
        chu_2025,
        cui_2025_clip_cov,
        yue_2025,
        le_roux_2025,
        zhu_2025,
        wang_2025,
        kimi_2025,
        xiong_2025,
        yao_2025,
        ling_2025,
    ),
    "Optimizers and parameters": (
        pascanu_2013,
        rudin_2022,
        ellis_2024,
        dohare_2023,
        loshchilov_2019,
        liu_2025_muon,
        liu_2021,
        kumar_2023,
        ash_2020,
        elsayed_2024,
    ),
}

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
    lin_2023,
    haarnoja_2018,
    schulman_2016,
    pardo_2018,
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
"""Those that need nothing but the plain policy, and are compared with the plain chain."""
