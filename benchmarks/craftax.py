"""PPO with a memory for Craftax-Classic; its network embeds the tiles of the map.

`python -m benchmarks learning craftax_classic_memory --set memory=lru` trains with another memory.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import ppo_parts as pp
from ppo_parts import distributions, envs, networks, training
from ppo_parts.recipes import cleanrl_ppo

ROWS, COLUMNS, SYMBOLS = 7, 9, 21  # the map comes first in an observation; each tile has one-hot symbols
SCALES = np.repeat([10.0, 3.0, 1.0], [12, 4, 6])  # of the inventory and the vital signs (both in tenths), and of flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(cleanrl_ppo.Config):
    """CleanRL's hyperparameters, and the sizes of the network."""

    env_id: str = "craftax:Craftax-Classic-Symbolic-v1,reset_ratio=16"
    total_timesteps: int = 1_000_000
    num_envs: int = 64
    num_steps: int = 64
    learning_rate: float = 5e-4
    gamma: float = 0.95
    gae_lambda: float = 0.65
    num_minibatches: int = 8
    vf_coef: float = 2.0
    ent_coef: float = 0.03
    final_ent_coef: float = 0.005
    hidden: tuple[int, ...] = (256,)
    tile_features: int = 8
    memory: networks.Cell = "gru"


class Network(nn.Module):
    """Compute logits and a value from the map, whose tiles share an embedding, and from the numbers after it."""

    config: Config
    num_actions: int

    @nn.compact
    def __call__(self, obs: jax.Array, carry: Any, reset: jax.Array) -> pp.Output:
        """Return the output for observations `[T, N, 1345]`."""
        size = ROWS * COLUMNS * SYMBOLS
        tiles = obs[..., :size].reshape(*obs.shape[:-1], ROWS * COLUMNS, SYMBOLS)
        tiles = nn.relu(networks.dense(self.config.tile_features)(tiles))
        x = jnp.concatenate([tiles.reshape(*obs.shape[:-1], -1), SCALES * obs[..., size:]], axis=-1)
        for features in self.config.hidden:
            x = nn.relu(nn.LayerNorm()(networks.dense(features)(x)))
        x, carry = networks.recurrent(x, carry, reset, self.config.memory)
        logits, value = networks.dense(self.num_actions, gain=0.01)(x), networks.dense(1, gain=1.0)(x)
        return pp.Output(distributions.Categorical(logits), value[..., 0], carry)


def make_policy(config: Config, env: envs.Env) -> pp.Policy:
    """Make the recurrent policy."""
    network = Network(config, env.action_space.n)

    def initial_carry(num_envs: int) -> Any:
        return networks.initial_carry(config.memory, (num_envs, config.hidden[-1]))

    def init(key: jax.Array) -> Any:
        return network.init(key, jnp.zeros((1, 1, *env.observation_space.shape)), initial_carry(1), jnp.zeros((1, 1)))

    def evaluate(params: Any, batch: pp.Batch) -> pp.Output:
        return network.apply(params, batch.obs, batch.carry, batch.reset)

    return pp.Policy(init, evaluate, initial_carry)


def make_train(config: Config) -> training.Train:
    """Make a pure function `train(key) -> TrainResult(state, metrics)`."""
    env = envs.prepare(envs.make(config.env_id))
    pipeline = pp.chain(
        pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda),
        pp.segment_minibatches(config.num_minibatches, config.update_epochs),
        pp.advantage_normalize(),
        pp.clipped_surrogate(clip_eps=config.clip_coef),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=config.clip_coef, coef=config.vf_coef),
        pp.entropy_bonus(coef=pp.linear_schedule(config.ent_coef, config.final_ent_coef, config.num_updates)),
    )
    return cleanrl_ppo.make_train(config, env, pipeline, make_policy(config, env))
