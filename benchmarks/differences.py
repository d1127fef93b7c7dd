"""What each single difference between the PPO of libraries is worth: one chain, with one choice exchanged at a time.

    python -m benchmarks differences HalfCheetah-v5 --steps 1e6 --seeds 10
    python -m benchmarks differences HalfCheetah-v5 --steps 1e6 --seeds 10 --variant current_value

The chain that is changed is CleanRL's for continuous actions, with time limits bootstrapped from the final state, in
the sizes and environments of `recipes.mujoco_ppo`. docs/libraries.md says which library makes which choice. The
protocol is that of `python -m benchmarks mujoco`; the results are in benchmarks/results/differences/.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import optax

import ppo_parts as pp
from ppo_parts import envs, networks, training
from recipes.libraries import parts

from . import mujoco

RESULTS = mujoco.RESULTS.parent / "differences"
Config = mujoco.Config


def terminate_at_time_limits() -> pp.Part:
    """CleanRL's choice: a time limit ends the episode like a failure."""

    def update(batch: pp.Batch) -> pp.Batch:
        return batch.replace(terminated=jnp.maximum(batch.terminated, batch.truncated))

    fields = ("terminated", "truncated")
    return pp.stateless(update, name="terminate_at_time_limits", requires=fields, provides=fields[:1], reads=())


def chain(
    config: Config,
    *,
    time_limit: pp.Part | None = None,
    normalize: str = "minibatch",
    values_normalized: bool = False,
    refresh: Any = "rollout",
    value: tuple[pp.Part, ...] | None = None,
) -> pp.Part:
    """The chain with some choices exchanged; None and the defaults are CleanRL's, except for the time limit."""
    estimator = pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda)
    standardize = pp.advantage_normalize(ddof=1)
    return pp.chain(
        time_limit or pp.identity(),
        parts.normalized_values(estimator) if values_normalized else estimator,
        standardize if normalize == "rollout" else pp.identity(),
        pp.shuffled_minibatches(config.num_minibatches, config.update_epochs, refresh=refresh),
        standardize if normalize == "minibatch" else pp.identity(),
        pp.clipped_surrogate(clip_eps=config.clip_coef),
        pp.policy_diagnostics(),
        *(value or (pp.clipped_value_loss(clip_eps=config.clip_coef, coef=0.5),)),
    )


def in_two_entries(policy: pp.Policy) -> pp.Policy:
    """The policy with parameters `{"policy": ..., "value": ...}`, of which each has what the other does not use."""

    def evaluate(params: Any, batch: pp.Batch) -> pp.Output:
        return pp.Output(policy(params["policy"], batch)[0], policy(params["value"], batch)[1])

    return pp.Policy(lambda key: dict.fromkeys(("policy", "value"), policy.init(key)), evaluate)


def make_train(
    config: Config,
    env: envs.Env | None = None,
    *,
    clip: optax.GradientTransformation | None = None,
    rate: optax.GradientTransformation | None = None,
    eps: float = 1e-5,
    **choices: Any,
) -> training.Train:
    """A run of the chain with these choices, and of CleanRL's optimizer with a link exchanged."""
    env = env or envs.prepare(envs.make(config.env_id), normalize=True, gamma=config.gamma)
    policy = in_two_entries(networks.actor_critic(env, config.hidden, "tanh"))
    annealed = pp.scale_by_update_schedule(pp.linear_schedule(config.learning_rate, 0.0, config.num_updates))
    clip = clip or optax.clip_by_global_norm(config.max_grad_norm)
    optimizer = optax.chain(clip, optax.scale_by_adam(eps=eps), rate or annealed)
    return training.Train.of(config, env, policy, chain(config, **choices), optimizer)


def with_(**choices: Any) -> mujoco.Variant:
    """A variant with these choices of `make_train`."""
    return functools.partial(make_train, **choices)


VARIANTS: dict[str, mujoco.Variant] = {
    "none": make_train,
    "time_limit_terminates": with_(time_limit=terminate_at_time_limits()),  # CleanRL
    "current_value": with_(time_limit=parts.truncate_at_current_value()),  # rsl_rl, rl_games
    "time_limit_ignored": with_(time_limit=parts.ignore_truncations()),  # skrl
    "rollout_normalize": with_(normalize="rollout"),  # rsl_rl, skrl, rl_games
    "no_normalize": with_(normalize="nowhere"),  # Tianshou's examples
    "refresh_epoch": with_(refresh="epoch"),  # Tianshou's examples
    "value_normalize": with_(values_normalized=True),  # rl_games
    "value_without_half": with_(value=(pp.clipped_value_loss(clip_eps=0.2, coef=1.0),)),  # the others
    "value_unclipped": with_(value=(pp.value_loss(coef=0.5),)),  # Stable-Baselines3, Tianshou, brax
    "value_clipped_prediction": with_(value=(parts.clip_prediction(0.2), pp.value_loss(coef=0.5))),  # skrl
    "separate_norms": with_(clip=parts.clip_each_network(0.5)),  # rsl_rl
    "no_gradient_clip": with_(clip=optax.identity()),  # Tianshou, brax
    "adaptive_rate": with_(rate=pp.scale_by_kl_adaptive_rate(3e-4, target_kl=0.01)),  # rsl_rl, with k3
    "constant_rate": with_(rate=pp.scale_by_update_schedule(3e-4)),  # Stable-Baselines3, Tianshou, skrl
    "adam_eps_1e-8": with_(eps=1e-8),  # all but CleanRL and Stable-Baselines3
}


def main() -> None:
    """Command line."""
    args = mujoco.parser_of(__doc__, VARIANTS).parse_args()
    numbers = args.first_seed, args.seeds, args.evaluations
    mujoco.measure(args.task, int(args.steps), args.variant, *numbers, VARIANTS, RESULTS)


if __name__ == "__main__":
    main()
