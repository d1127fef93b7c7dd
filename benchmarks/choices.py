"""The chain of `differences` and `explain`, and the choices of other libraries, which can be made one at a time."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.recipes.libraries import parts
from ppo_parts.recipes.mujoco_ppo import Config


def terminate_at_time_limits() -> pp.Part:
    """Make CleanRL's choice: a time limit ends the episode like a failure."""

    def update(batch: pp.Batch) -> pp.Batch:
        return batch.replace(terminated=jnp.maximum(batch.terminated, batch.truncated))

    fields = ("terminated", "truncated")
    return pp.stateless(update, name="terminate_at_time_limits", requires=fields, provides=fields[:1], reads=())


def make_chain(
    config: Config,
    *,
    time_limit: pp.Part | None = None,
    normalize: str = "minibatch",
    values_normalized: bool = False,
    refresh: Any = "rollout",
    sampler: Callable[[Config], pp.Part] | None = None,
    brax_advantages: bool = False,
    value: pp.Part | None = None,
    last: pp.Part | None = None,
) -> pp.Part:
    """Make the chain with some choices changed; None and the defaults are CleanRL's, except for the time limit."""
    estimator = pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda)
    of_minibatches = pp.chain(parts.evaluate_next_obs(), parts.one_more_step(config.gamma, config.gae_lambda))
    standardize = pp.advantage_normalize(ddof=1)
    shuffled = pp.shuffled_minibatches(config.num_minibatches, config.update_epochs, refresh=refresh)
    return pp.chain(
        time_limit or pp.identity(),
        pp.identity() if brax_advantages else parts.normalized_values(estimator) if values_normalized else estimator,
        standardize if normalize == "rollout" else pp.identity(),
        shuffled if sampler is None else sampler(config),
        of_minibatches if brax_advantages else pp.identity(),
        standardize if normalize == "minibatch" else pp.identity(),
        pp.clipped_surrogate(clip_eps=config.clip_coef),
        pp.policy_diagnostics(),
        value or pp.clipped_value_loss(clip_eps=config.clip_coef, coef=0.5),
        last or pp.identity(),
    )


def segments(config: Config) -> pp.Part:
    """Draw minibatches of consecutive steps of one environment, in a new random order in each epoch."""
    length = config.num_envs * config.num_steps // config.num_minibatches
    return pp.time_chunks(config.num_minibatches, config.update_epochs, length=length)


def segments_in_order(config: Config) -> pp.Part:
    """Draw the minibatches of `segments` in the same order in each epoch."""
    rows = np.arange(config.num_envs * config.num_steps).reshape(config.num_steps, config.num_envs)
    return pp.given_indices(np.tile(rows.T.reshape(1, config.num_minibatches, -1), (config.update_epochs, 1, 1)))


def make_train(
    config: Config,
    env: envs.Env | None = None,
    *,
    clip: optax.GradientTransformation | None = None,
    rate: optax.GradientTransformation | None = None,
    eps: float = 1e-5,
    squash: bool = False,
    **choices: Any,
) -> training.Train:
    """Make a run of the chain with these choices, and of CleanRL's optimizer with one transformation replaced."""
    # A squashed action is within the bounds, so it is neither mapped onto them nor changed by the clip.
    env = env or envs.prepare(envs.make(config.env_id), normalize=True, gamma=config.gamma, rescale=not squash)
    network = networks.actor_critic(env, config.hidden, "tanh", log_std=config.log_std, squash=squash)
    policy = parts.in_two_entries(network)
    annealed = pp.optim.scale_by_update_schedule(pp.linear_schedule(config.learning_rate, 0.0, config.num_updates))
    clip = clip or optax.clip_by_global_norm(config.max_grad_norm)
    optimizer = optax.chain(clip, optax.scale_by_adam(eps=eps), rate or annealed)
    return training.Train.of(config, env, policy, make_chain(config, **choices), optimizer)


class Difference:
    """A choice in which libraries differ, the libraries that make it, and the `make_train` arguments that make it."""

    def __init__(self, what: str, who: str, **choices: Any) -> None:
        self.what, self.who, self.choices = what, who, choices
        self.make_train = functools.partial(make_train, **choices)


DIFFERENCES = {
    "none": Difference("nothing", "the chain above"),
    "time_limit_terminates": Difference(
        "a time limit ends the episode", "CleanRL", time_limit=terminate_at_time_limits()),
    "current_value": Difference(
        "a time limit bootstraps from V of the current state", "rsl_rl, rl_games",
        time_limit=parts.truncate_at_current_value()),
    "time_limit_ignored": Difference("time limits ignored", "skrl", time_limit=parts.ignore_truncations()),
    "rollout_normalize": Difference("A standardized over the rollout", "rsl_rl, skrl, rl_games", normalize="rollout"),
    "no_normalize": Difference("A not standardized", "Tianshou's examples", normalize="nowhere"),
    "refresh_epoch": Difference("A recomputed before each epoch", "Tianshou's examples", refresh="epoch"),
    "value_normalize": Difference("V in units of running moments", "rl_games", values_normalized=True),
    "value_without_half": Difference(
        "weight of the value loss doubled", "the others", value=pp.clipped_value_loss(clip_eps=0.2, coef=1.0)),
    "value_unclipped": Difference(
        "V not clipped", "Stable-Baselines3, Tianshou, brax", value=pp.value_loss(coef=0.5)),
    "value_clipped_prediction": Difference(
        "only the prediction of V clipped", "skrl",
        value=pp.chain(parts.clip_prediction(0.2), pp.value_loss(coef=0.5))),
    "separate_norms": Difference(
        "gradient clipped separately for each network", "rsl_rl", clip=parts.clip_each_network(0.5)),
    "no_gradient_clip": Difference("gradient not clipped", "Tianshou, brax", clip=optax.identity()),
    "adaptive_rate": Difference(
        "learning rate adapted to the KL divergence", "rsl_rl, with k3",
        rate=pp.optim.scale_by_kl_adaptive_rate(3e-4, target_kl=0.01)),
    "constant_rate": Difference(
        "learning rate constant", "Stable-Baselines3, Tianshou, skrl", rate=pp.optim.scale_by_update_schedule(3e-4)),
    "adaptive_rate_epoch": Difference(
        "learning rate adapted after each epoch", "skrl's option",
        rate=pp.optim.scale_by_kl_adaptive_rate(3e-4, target_kl=0.008, average_over=32, low=1e-6)),
    "early_stop": Difference(
        "update ends where the KL divergence exceeds 0.015", "Stable-Baselines3's option",
        last=pp.kl_early_stop(0.015)),
    "value_weight_2.5": Difference(
        "weight of the squared error of V ten times as large", "skrl",
        value=pp.clipped_value_loss(clip_eps=0.2, coef=5.0)),
    "entropy_0.01": Difference("entropy bonus of 0.01", "Tianshou, rsl_rl", last=pp.entropy_bonus(coef=0.01)),
    "bounds_loss": Difference(
        "loss for means out of bounds", "rl_games' option", last=pp.regularizers.bounds_loss(coef=1e-4)),
    "segments": Difference("minibatches of consecutive steps", "as in brax", sampler=segments),
    "segments_in_order": Difference(
        "minibatches of consecutive steps, in order", "as in rl_games", sampler=segments_in_order),
    "brax_advantages": Difference(
        "minibatches of consecutive steps, with A and V of the policy being trained", "brax", sampler=segments,
        brax_advantages=True),
    "squashed": Difference("actions squashed by tanh", "brax", squash=True),
    "adam_eps_1e-8": Difference("Adam's epsilon 1e-8", "all but CleanRL and Stable-Baselines3", eps=1e-8),
}  # fmt: skip
