"""What more than one of the hand-written programs does: layers, environments, advantages, losses and epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import distrax
import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax


def dense(units: int, gain: float) -> nn.Dense:
    """A layer with orthogonal weights."""
    return nn.Dense(units, kernel_init=nn.initializers.orthogonal(gain))


def hidden(x: jax.Array, widths: tuple[int, ...]) -> jax.Array:
    """Tanh layers, within a flax module."""
    for width in widths:
        x = nn.tanh(dense(width, 2**0.5)(x))
    return x


class Transition(NamedTuple):
    """One step of all environments."""

    done: jax.Array
    action: jax.Array
    value: jax.Array
    reward: jax.Array
    log_prob: jax.Array
    obs: jax.Array
    episode_return: jax.Array


class Environments:
    """Several gymnax environments, whose observations are vectors."""

    def __init__(self, env_id: str, number: int) -> None:
        self.env, self.params = gymnax.make(env_id)
        self.number = number
        self.actions = self.env.action_space(self.params).n

    def reset(self, key: jax.Array) -> tuple[jax.Array, Any]:
        """Return first observations and state."""
        obs, state = jax.vmap(self.env.reset, in_axes=(0, None))(jax.random.split(key, self.number), self.params)
        return self.flat(obs), state

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[jax.Array, Any, jax.Array, jax.Array]:
        """Return observations, state, rewards, and whether episodes have ended."""
        keys = jax.random.split(key, self.number)
        step = jax.vmap(self.env.step, in_axes=(0, 0, 0, None))
        obs, state, reward, terminated, truncated, _ = step(keys, state, action, self.params)
        return self.flat(obs), state, reward, terminated | truncated

    def flat(self, obs: jax.Array) -> jax.Array:
        """Observations as vectors of floats."""
        return obs.reshape(self.number, -1).astype(jnp.float32)


def collect(
    environments: Environments,
    evaluate: Callable[[jax.Array], tuple[distrax.Categorical, jax.Array]],
    state: tuple[Any, ...],
    num_steps: int,
) -> tuple[tuple[Any, ...], Transition]:
    """A rollout by a policy from `state`: that of the environments, observations, returns so far, and a key."""

    def env_step(state: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], Transition]:
        env_state, obs, running, key = state
        key, action_key, step_key = jax.random.split(key, 3)
        pi, value = evaluate(obs)
        action = pi.sample(seed=action_key)
        log_prob = pi.log_prob(action)
        next_obs, env_state, reward, done = environments.step(step_key, env_state, action)
        running = running + reward
        transition = Transition(done, action, value, reward, log_prob, obs, running)
        return (env_state, next_obs, running * (1 - done), key), transition

    return jax.lax.scan(env_step, state, None, num_steps)


def gae(trajectory: Transition, last_value: jax.Array, gamma: float, gae_lambda: float) -> tuple[jax.Array, jax.Array]:
    """Advantages and targets."""

    def step(carry: Any, transition: Transition) -> Any:
        gae, next_value = carry
        delta = transition.reward + gamma * next_value * (1 - transition.done) - transition.value
        gae = delta + gamma * gae_lambda * (1 - transition.done) * gae
        return (gae, transition.value), gae

    start = (jnp.zeros_like(last_value), last_value)
    _, advantages = jax.lax.scan(step, start, trajectory, reverse=True)
    return advantages, advantages + trajectory.value


def policy_loss(ratio: jax.Array, advantage: jax.Array, clip: float) -> jax.Array:
    """The clipped surrogate."""
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage).mean()


def value_loss(value: jax.Array, old_value: jax.Array, target: jax.Array, clip: float) -> jax.Array:
    """The clipped value loss."""
    clipped = old_value + (value - old_value).clip(-clip, clip)
    return 0.5 * jnp.maximum((value - target) ** 2, (clipped - target) ** 2).mean()


def clipped_adam(rate: Any, max_grad_norm: float, eps: float = 1e-5) -> optax.GradientTransformation:
    """Adam with a clip of the gradient's norm."""
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.adam(rate, eps=eps))


def annealed(rate: float, steps: int, updates: int) -> Callable[[jax.Array], jax.Array]:
    """A rate that falls linearly with each update, which has so many gradient steps."""
    return lambda count: rate * (1.0 - count // steps / updates)


def epochs(loss_fn: Any, optimizer: Any, state: Any, batch: Any, num_epochs: int, num_minibatches: int) -> Any:
    """Epochs of shuffled minibatches of a batch `[T, N]`, from `state`: parameters, optimizer state and key."""
    size = jax.tree.leaves(batch)[0].shape[0] * jax.tree.leaves(batch)[0].shape[1]
    flat = jax.tree.map(lambda x: x.reshape((size, *x.shape[2:])), batch)

    def minibatch_step(state: Any, minibatch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, minibatch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def epoch_step(state: Any, _: None) -> Any:
        params, opt_state, key = state
        key, shuffle_key = jax.random.split(key)
        permutation = jax.random.permutation(shuffle_key, size)
        shuffled = jax.tree.map(lambda x: jnp.take(x, permutation, axis=0), flat)
        minibatches = jax.tree.map(lambda x: x.reshape((num_minibatches, -1, *x.shape[1:])), shuffled)
        (params, opt_state), losses = jax.lax.scan(minibatch_step, (params, opt_state), minibatches)
        return (params, opt_state, key), losses

    return jax.lax.scan(epoch_step, state, None, num_epochs)


def finished(trajectory: Transition) -> dict[str, jax.Array]:
    """The metrics of the episodes that ended."""
    episodes = trajectory.done.sum()
    total = jnp.where(trajectory.done, trajectory.episode_return, 0).sum()
    return {"episode_return": total / episodes, "episodes": episodes}
