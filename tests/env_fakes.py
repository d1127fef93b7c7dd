"""Stand-ins with the interfaces of environment packages: a walk that ends at 2 and is cut after five steps."""

import sys
from collections import namedtuple
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

LIMIT = 5


@struct.dataclass
class State:
    """The position and the time of a walk, and what Brax and Craftax add to their states."""

    x: jax.Array
    timestep: jax.Array
    obs: jax.Array = None
    reward: jax.Array = 0.0
    done: jax.Array = 0.0
    achievements: jax.Array = 0


def first(key):
    return State(jax.random.uniform(key, minval=-0.5, maxval=0.5), jnp.zeros((), jnp.int32))


def moved(state, by):
    """Return the state after a step, its observation, its reward, and whether the goal is reached."""
    state = state.replace(x=state.x + by, timestep=state.timestep + 1)
    return state, observed(state), by * 1.0, state.x > 1.5


def observed(state):
    return jnp.stack([state.x, state.timestep.astype(jnp.float32)])


class Brax:
    """`brax.envs.Env`: a state with obs, reward and done (a float), without a time limit of its own."""

    action_size = 1

    def __init__(self, as_dict=False):
        self.as_dict = as_dict

    def seen(self, obs):
        return {"state": obs, "privileged_state": -obs} if self.as_dict else obs

    def reset(self, key):
        state = first(key)
        return state.replace(obs=self.seen(observed(state)), reward=jnp.zeros(()), done=jnp.zeros(()))

    def step(self, state, action):
        state, obs, reward, over = moved(state, action[0])
        return state.replace(obs=self.seen(obs), reward=reward, done=over.astype(jnp.float32))


class Craftax:
    """Craftax's interface without automatic resets; the limit is a parameter and counts as `done`."""

    @struct.dataclass
    class Params:
        max_timesteps: int = LIMIT

    default_params = Params()

    def observation_space(self, params):
        return SimpleNamespace(shape=(2,), low=-99.0, high=99.0)

    def action_space(self, params):
        return SimpleNamespace(n=2, shape=())

    def reset(self, key, params):
        state = first(key).replace(achievements=jnp.zeros(3, jnp.int32))
        return observed(state), state

    def step(self, key, state, action, params):
        state, obs, reward, _ = moved(state, 2 * action - 1)
        state = state.replace(achievements=state.achievements.at[0].set(1))
        return obs, state, reward, self.is_terminal(state, params), {}

    def is_terminal(self, state, params):
        return (state.x > 1.5) | (state.timestep >= params.max_timesteps)


Seen = namedtuple("Seen", "place time action_mask")  # Jumanji's observations
# Pgx's state
Board = namedtuple("Board", "current_player observation rewards terminated truncated legal_action_mask")


class TimeStep(NamedTuple):
    """dm_env's time step, which Jumanji and XLand-MiniGrid use."""

    observation: object
    reward: jax.Array
    discount: jax.Array
    over: jax.Array
    state: object = None

    def last(self):
        return self.over


class Jumanji:
    """Two choices at once, of 2 and 3; the mask is over combinations, and may leave no option."""

    action_spec = SimpleNamespace(num_values=jnp.array([2, 3]))

    def seen(self, state):
        return Seen(state.x, state.timestep, jnp.broadcast_to(state.x < 0.7, (2, 3)).at[1, 2].set(False))

    def timestep(self, state, reward, terminated):
        over = terminated | (state.timestep >= LIMIT)
        return TimeStep(self.seen(state), jnp.asarray(reward, float), jnp.where(terminated, 0.0, 1.0), over)

    def reset(self, key):
        state = first(key)
        return state, self.timestep(state, 0.0, jnp.zeros((), bool))

    def step(self, state, action):
        state, _, reward, terminated = moved(state, action[0] + 0.1 * action[1] - 0.5)
        return state, self.timestep(state, reward, terminated)


class XMiniGrid:
    """XLand-MiniGrid: one time step carries everything, and observations are integers."""

    def num_actions(self, params):
        return 2

    def observation_shape(self, params):
        return (2,)

    def timestep(self, params, state, reward, terminated):
        seen = jnp.stack([10 * state.x, state.timestep]).astype(jnp.uint8)
        over = terminated | (state.timestep == params.max_timesteps)
        return TimeStep(seen, reward, jnp.where(terminated, 0.0, 1.0), over, state)

    def reset(self, params, key):
        return self.timestep(params, first(key), jnp.zeros(()), jnp.zeros((), bool))

    def step(self, params, timestep, action):
        state, _, reward, terminated = moved(timestep.state, 2 * action - 1)
        return self.timestep(params, state, reward.astype(jnp.float32), terminated)


class Nim:
    """Pgx's interface: two players take 1 or 2 of 5 matches in turn, and whoever takes the last one wins."""

    num_players, num_actions, observation_shape = 2, 2, (1,)

    def board(self, player, left, rewards):
        legal = jnp.stack([left > 0, left > 1]) | (left <= 0)
        left = jnp.asarray(left, jnp.float32)
        return Board(player, left[None], rewards, left <= 0, jnp.zeros((), bool), legal)

    def init(self, key):
        return self.board(jax.random.randint(key, (), 0, 2), jnp.full((), 5), jnp.zeros(2))

    def step(self, state, action, key):
        left = state.observation[0].astype(jnp.int32) - (action + 1)
        won = jnp.where(left <= 0, jnp.where(jnp.arange(2) == state.current_player, 1.0, -1.0), 0.0)
        return self.board(1 - state.current_player, left, won)


def install(monkeypatch):
    """Put the fake packages in the places of the real ones in `sys.modules`."""
    config = type("Config", (dict,), {"episode_length": property(lambda self: self["episode_length"])})
    walk = Craftax.Params()
    fakes = {
        "brax.envs": {"_envs": {"walk": Brax}, "get_environment": lambda name, **settings: Brax(**settings)},
        "mujoco_playground.registry": {
            "ALL_ENVS": ("Walk",),
            "get_default_config": lambda name: config(episode_length=LIMIT, impl="warp"),
            "load": lambda name, config: Brax(as_dict=True) if config["impl"] == "jax" else None,
        },
        "craftax.craftax_env": {"make_craftax_env_from_name": lambda name, auto_reset: Craftax()},
        "jumanji": {"registered_environments": lambda: ["Walk-v0"], "make": lambda name, **more: Jumanji(**more)},
        "pgx": {"available_envs": lambda: ("nim",), "make": lambda name: Nim()},
        "xminigrid": {"registered_environments": lambda: ("Walk-v0",), "make": lambda name: (XMiniGrid(), walk)},
    }
    for name, contents in fakes.items():
        made, (package, _, inside) = SimpleNamespace(**contents), name.partition(".")
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(**{inside: made}) if inside else made)
        monkeypatch.setitem(sys.modules, name, made)
