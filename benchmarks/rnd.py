"""Random network distillation in DeepSea: CleanRL's PPO with a reward for novel observations.

`Config(rnd=False)` is the same network, chain and optimizer without that reward. docs/exploration.md has the results.
"""

import dataclasses
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from gymnax.environments.bsuite import deep_sea

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.envs import Moments
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training import Range

from ._cards import load_card

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(cleanrl_ppo.Config):
    """CleanRL's hyperparameters, and those of RND."""

    env_id: str = "DeepSea-bsuite"
    size: Annotated[int, Range(2)] = 20  # rows and columns; one of 2**size ways down leads to the treasure
    rnd: bool = True  # False: no reward for novel observations
    num_envs: int = 16
    learning_rate: Annotated[float, Range(0)] = 1e-3  # that of Adam


class ActorCritics(nn.Module):
    """An actor, and a critic for each of the two rewards."""

    actions: int
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, obs: Array) -> pp.Output:
        """Evaluate observations `[..., rows, columns]`."""
        obs = obs.reshape(*obs.shape[:-2], -1)
        logits = networks.dense(self.actions, gain=0.01)(networks.mlp(obs, self.hidden))
        value, intrinsic = (networks.dense(1, gain=1.0)(networks.mlp(obs, self.hidden))[..., 0] for _ in range(2))
        return pp.Output(pp.distributions.Categorical(logits), value, aux={"value_intrinsic": intrinsic})


class Embedding(nn.Module):
    """The architecture of the random network, and of the predictor."""

    @nn.compact
    def __call__(self, obs: Array) -> Array:
        """Embed observations `[..., rows, columns]`."""
        obs = obs.reshape(*obs.shape[:-2], -1)
        return networks.dense(32, gain=1.0)(networks.mlp(obs, (64, 64), "relu"))


def standardized_next_obs(observed: tuple[int, ...]) -> pp.Part:
    """Write `extras.novel_obs`: the next observations, standardized and clipped for the random network."""

    def init(params: Any, key: Array) -> Moments:
        return Moments.of(jnp.zeros(observed))

    def update(batch: pp.Batch, state: Moments, context: pp.Context) -> tuple[pp.Batch, Moments]:
        seen = state.updated(batch.next_obs.reshape(-1, *observed))
        obs = jnp.clip((batch.next_obs - seen.mean) / jnp.sqrt(seen.var + 1e-8), -5, 5)
        return batch.replace(extras={**batch.extras, "novel_obs": obs}), seen

    fields = {"requires": ("next_obs",), "provides": ("extras.novel_obs",)}
    return pp.Part(init, update, "standardized_next_obs", **fields, place="before_sampler")


def make_chain(config: Config, observed: tuple[int, ...]) -> pp.Part:
    """Make CleanRL's chain without value clipping; with `rnd`, add the card's second reward, advantage and critic."""
    of_card = load_card("imitation", "Random network distillation").pipeline.parts
    intrinsic, critic = (part for part in of_card if part.name == "intrinsic")
    [combined] = (part for part in of_card if part.name == "combine_advantages")
    before, after = [], []
    if config.rnd:
        example, standardized = jnp.zeros(observed), {"next_obs": "extras.novel_obs"}
        reward = pp.exploration.rnd_reward(
            lambda key: Embedding().init(key, example), Embedding().apply, num_envs=config.num_envs, gamma=0.99
        )
        novelty = pp.within(reward, read=standardized, write={x: x for x in reward.provides}, name="novelty")
        predictor = pp.within(pp.exploration.rnd_loss(Embedding().apply), read=standardized, name="novelty")
        before = [standardized_next_obs(observed), novelty, intrinsic, combined]
        after = [critic, predictor]
    return pp.chain(
        pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda),
        *before,
        pp.shuffled_minibatches(config.num_minibatches, config.update_epochs),
        pp.advantage_normalize(ddof=1),
        pp.clipped_surrogate(clip_eps=config.clip_coef),
        pp.policy_diagnostics(),
        pp.value_loss(coef=config.vf_coef),
        pp.entropy_bonus(coef=config.ent_coef),
        *after,
    )


def make_train(config: Config) -> training.Train:
    """Make a pure function `train(key) -> TrainResult(state, metrics)`."""
    training.check_config(config)
    env = envs.from_gymnax(deep_sea.DeepSea(config.size))
    observed, network = env.observation_space.shape, ActorCritics(env.action_space.n, config.hidden)

    def init(key: Array) -> Any:
        keys = jax.random.split(key)
        example = jnp.zeros(observed)
        return {"policy": network.init(keys[0], example), "predictor": Embedding().init(keys[1], example)}

    policy = pp.Policy(init, lambda params, batch: network.apply(params["policy"], batch.obs))
    rate = pp.linear_schedule(config.learning_rate, 0.0, config.num_updates)
    optimizer, record = pp.clipped_adam(rate, config.max_grad_norm), ("value_intrinsic",) if config.rnd else ()
    return training.Train.of(
        config, env, policy, make_chain(config, observed), optimizer, record=record, schedules={"learning_rate": rate}
    )
