"""Environments whose every number is known, in JAX and on the host, for the tests of several files."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from ppo_parts import envs
from ppo_parts.envs._episodes import EpisodeState
from tests.common import Categorical

AGENTS, EPISODE = 2, 4


def clock(limit, kind="truncated"):
    """Make an environment with obs = reward = time in the episode, which ends at each environment's limit."""

    def reset(key, num_envs):
        time = jnp.zeros((num_envs, 1))
        return EpisodeState.begin(time, num_envs), time

    def step(key, state, action):
        time = state.inner + 1
        over = time[:, 0] >= limit
        ends = {"terminated": over & False, "truncated": over & False, kind: over}
        after = jnp.where(over[:, None], 0, time)
        shown = {"obs": after, "final_obs": time, "info": {"cost": 10 * state.inner[:, 0]}}
        return state.advance(after, over, state.inner[:, 0], **shown, **ends)

    made = envs.Env(reset, step, envs.Box((1,)), envs.Discrete(2), lambda state: made)
    return made


def uniform(params, batch):
    """Act uniformly with two actions; the value is the first entry of the observation times the parameter."""
    return Categorical(jnp.zeros((*batch.obs.shape[:-1], 2))), params * batch.obs[..., 0]


def echo(space):
    """Make an environment whose observation is the action that arrived."""
    dtype = jnp.int32 if envs.is_discrete(space) else jnp.float32

    def step(key, state, action):
        zeros = jnp.zeros(action.shape[0])
        return state, envs.Transition(action, zeros, zeros > 0, zeros > 0, action, zeros, zeros.astype(int))

    made = envs.Env(lambda key, n: ((), jnp.zeros((n, 2), dtype)), step, envs.Box((2,)), space, lambda state: made)
    return made


def altered(env, **changes):
    """Change fields of an environment's transitions; each change is a function of the transition."""

    def step(*given):
        state, out = env.step(*given)
        return state, out._replace(**{name: change(out) for name, change in changes.items()})

    return env._replace(step=step)


def bit_game(mortal=False):
    """Make a game in which each agent sees a bit; agent 0 is paid 1 for playing it, agent 1 for playing the other.

    Episodes end after four steps, by a time limit. Shared networks have to know which agent they play for. If `mortal`,
    agent 1 is gone after its second step.
    """

    def see(key, num_envs):
        return jax.random.bernoulli(key, shape=(num_envs, AGENTS, 1)).astype(jnp.float32)

    def reset(key, num_envs):
        obs = see(key, num_envs)
        return EpisodeState.begin(obs, num_envs, AGENTS), envs.Observation(obs)

    def step(key, state, action):
        agents, time = jnp.arange(AGENTS)[None], state.episode_length + 1
        wanted = jnp.abs(state.inner[..., 0] - agents)
        reward, new = (action == wanted).astype(jnp.float32), see(key, len(time))
        ended, mortals = time == EPISODE, mortal & (agents == 1)
        gone = (time >= 2)[:, None] & mortals
        fields = {"obs": envs.Observation(new), "final_obs": envs.Observation(new + 0.5), "ended": ended}
        fields |= {"terminated": gone, "truncated": ended[:, None] & ~gone}
        fields |= {"mask": ~((time > 2)[:, None] & mortals) if mortal else None}
        fields |= {"info": {"first": state.episode_return[:, 0] + reward[:, 0] > 0}}
        return state.advance(new, ended, reward, **fields)

    env = envs.Env(reset, step, envs.Box((1,)), envs.Discrete(2), lambda state: env, num_agents=AGENTS)
    return env


class Scripted(gymnasium.Env):
    """obs = (episode, time); reward = 10 * episode + time + 1; ends after `limit` steps, alternating between two ways.

    `see`, `info` and `act` are functions of the environment: other observations, the info, what a step does first.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, limit=3, *, obs_space=None, action_space=None, see=None, info=None, act=None, reward=None):
        self.limit, self.see, self.info, self.act, self.reward = limit, see, info, act, reward
        self.observation_space = obs_space or self.observation_space
        self.action_space = action_space or self.action_space
        self.episode, self.arrived = -1, []

    def seen(self):
        obs = np.array([self.episode, self.time], float) if self.see is None else self.see(self)
        return obs, {} if self.info is None else self.info(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time, self.over = self.episode + 1, 0, False
        return self.seen()

    def step(self, action):
        self.arrived.append(action)
        if self.act is not None:
            self.act(self)
        reward = 10 * self.episode + self.time + 1
        self.time += 1
        self.over = self.time >= self.limit
        truncated = self.over and self.episode % 2 == 0
        obs, info = self.seen()
        return obs, self.reward or float(reward), self.over and not truncated, truncated, info


def host(*made, mode=AutoresetMode.SAME_STEP, **settings):
    """Make an `Env` of functions that make environments, or of environments, however many are requested.

    Each step overwrites the observations of the one before.
    """
    functions = [env if callable(env) else (lambda env=env: env) for env in made]
    return envs.from_gymnasium(lambda n: SyncVectorEnv(functions[:n], autoreset_mode=mode, copy=False), **settings)


def by_name(make, settings="", **more):
    """Make an `Env` of what the function makes, by its name with `envs.make`."""
    gymnasium.register("Fake-v0", make)
    try:
        return envs.make(f"gym:Fake-v0{settings}", **more)
    finally:
        del gymnasium.registry["Fake-v0"]
