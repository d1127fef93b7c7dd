"""Rollouts: the policy acts, and what it saw becomes a `Batch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._hyperparameters import count
from ._policy import evaluate_policy, evaluate_step
from ._types import ABSENT, Array, Batch, Evaluate, Params
from .functional import next_values
from .functional._common import ShapeError, unsqueezed


class RolloutState(NamedTuple):
    """Where the environments are: their state, and what the policy sees next.

    Recurrent policies also have `carry`, their state `[N, ...]`, and `reset`, True where it is zeroed before the next
    step.
    """

    env_state: Any
    obs: Any
    carry: Any = None
    reset: Any = None


class Rollout(NamedTuple):
    """What `rollout` returns, two pure functions.

    Attributes:
        init: `init(key) -> RolloutState`, fresh environments.
        collect: `collect(key, params, state) -> (RolloutState, Batch, metrics)`. Metrics: `episode_return` and
            `episode_length` (means over the episodes that ended, NaN where none did) and `episodes` (how many did);
            with many agents the return is a mean over them, too. What the environment says of an episode (`info`) is
            `episode_<name>`.
    """

    init: Callable[[Array], RolloutState]
    collect: Callable[[Array, Params, RolloutState], tuple[RolloutState, Batch, dict[str, Array]]]


def rollout(
    env: Any,
    evaluate: Evaluate,
    *,
    num_envs: int,
    num_steps: int,
    initial_carry: Callable[[int], Any] | None = None,
    value_each_step: bool = False,
) -> Rollout:
    """Step N environments T times with the current policy; with A agents in each, `[T, N]` below is `[T, N, A]`.

    The value is evaluated once for all steps, after the last, or with each (as a recurrent policy's is). V of the final
    observation, from which a truncated episode is bootstrapped, is only computed in steps where some environment was
    truncated (also under `vmap`).

    Args:
        env: `ppo_parts.envs.Env`.
        evaluate: as in `learner`; here the observations have the leading axes `[N]` or `[T, N]`.
        num_envs: N.
        num_steps: T.
        initial_carry: recurrent policies: `initial_carry(num_envs) -> carry`, zeros with leaves `[N, ...]`. Then
            `evaluate(params, batch)` gets `batch.carry`, the state before step 0, and `batch.reset` `[T, N]`, zeroes
            the state before each step where it is 1, and returns (distribution, value, carry after the last step).
        value_each_step: keep the value that is found on the way to each step's action. The same numbers; faster where
            policy and value share layers, slower where they do not.

    Returns:
        `Rollout(init, collect)`; the batch has the fields obs, action, log_prob, value, reward, terminated, truncated
        and next_value, and with `initial_carry` carry and reset.

    Example:
        >>> import jax, jax.numpy as jnp, distrax, ppo_parts as pp
        >>> from ppo_parts import envs
        >>> def evaluate(params, batch):
        ...     return distrax.Categorical(batch.obs @ params["policy"]), batch.obs @ params["value"]
        >>> rollout = pp.rollout(envs.make("CartPole-v1"), evaluate, num_envs=2, num_steps=8)
        >>> params = {"policy": jnp.zeros((4, 2)), "value": jnp.zeros(4)}
        >>> state, batch, metrics = rollout.collect(jax.random.key(1), params, rollout.init(jax.random.key(0)))
        >>> batch.obs.shape, batch.next_value.shape
        ((8, 2, 4), (8, 2))
    """
    count("rollout", "num_envs", num_envs)
    count("rollout", "num_steps", num_steps)
    recurrent = initial_carry is not None
    keeps_value = recurrent or value_each_step
    agents = getattr(env, "num_agents", None)
    each = (num_envs,) if agents is None else (num_envs, agents)

    def look(params: Params, obs: Any, carry: Any, reset: Any) -> tuple[Any, Array, Any]:
        if recurrent:
            return evaluate_step(evaluate, params, obs, carry, reset)
        return *evaluate_policy(evaluate, params, Batch(obs=obs, axes=("segment",))), None

    def now(x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[0], x) if recurrent else x

    @jax.jit  # looked at thrice, traced once
    def value_after(params: Params, seen: tuple[Any, Any]) -> Array:
        obs, carry = seen
        return now(look(params, obs, carry, jnp.zeros(each, bool))[1])

    def init(key: Array) -> RolloutState:
        memory = (initial_carry(num_envs), jnp.ones(each, bool)) if initial_carry is not None else (None, None)
        return strong(RolloutState(*env.reset(key, num_envs), *memory))

    def collect(key: Array, params: Params, state: RolloutState) -> tuple[RolloutState, Batch, dict[str, Array]]:
        def step(state: RolloutState, keys: Array) -> tuple[RolloutState, Any]:
            distribution, value, carry = look(params, state.obs, state.carry, state.reset)
            action, log_prob = now(sample_action(distribution, keys[0]))
            env_state, out = env.step(keys[1], state.env_state, action)
            out.check(state.obs, each)
            final_value = _where_any(value_after, out.truncated, params, (out.final_obs, carry))
            recorded = Batch(
                obs=state.obs,
                action=action,
                log_prob=log_prob,
                value=now(value) if keeps_value else ABSENT,
                reward=out.reward,
                terminated=out.terminated,
                truncated=out.truncated,
                mask=out.mask,
                reset=state.reset,
            )
            ended, _ = out.episode_ends()
            episodes = (ended, {"return": out.episode_return, "length": out.episode_length, **out.info})
            begins = jnp.broadcast_to(unsqueezed(ended, len(each)), each) if recurrent else None
            state = RolloutState(env_state, out.obs, carry, begins)
            return strong(state), (recorded, final_value, episodes)

        # All keys at once: one call of the generator instead of one a step.
        keys, carry = jax.random.split(key, (num_steps, 2)), state.carry
        state, (batch, final_value, episodes) = jax.lax.scan(step, state, keys)
        if jnp.shape(batch.log_prob) != (num_steps, *each):
            raise ShapeError(
                f"rollout: the log-probability of {each} actions has shape {jnp.shape(batch.log_prob)[1:]}, one number "
                "for each is needed; sum over the action's dimensions"
            )
        value = batch.value if keeps_value else evaluate_policy(evaluate, params, batch)[1]
        if jnp.shape(value) != (num_steps, *each):
            raise ShapeError(
                f"rollout: evaluate returned a value of shape {jnp.shape(value)}, expected {(num_steps, *each)}: "
                "index the trailing axis of a Dense(1) away, value[..., 0]"
            )
        last_value = value_after(params, (state.obs, state.carry))
        next_value = next_values(value, last_value, batch.truncated, final_value)
        return state, batch.replace(value=value, next_value=next_value, carry=carry), episode_metrics(*episodes)

    return Rollout(init, collect)


def sample_action(distribution: Any, key: Array) -> tuple[Any, Array]:
    """An action and its log-probability."""
    if hasattr(distribution, "sample_and_log_prob"):
        return distribution.sample_and_log_prob(seed=key)
    action = distribution.sample(seed=key)
    return action, distribution.log_prob(action)


def strong(tree: Any) -> Any:
    """The tree without weak types (a Python number in a state has one), which would change from call to call."""

    def strengthened(x: Any) -> Any:
        dtype = jnp.result_type(x)
        return x if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jax.lax.convert_element_type(x, dtype)

    return jax.tree.map(strengthened, tree)


def episode_metrics(ended: Array, measured: dict[str, Array]) -> dict[str, Array]:
    """Means over the episodes that ended (NaN where none did) and over the agents, and how many did."""
    number = jnp.sum(ended)
    some = jnp.maximum(number, 1)

    def mean(x: Array) -> Array:
        x = jnp.mean(x.reshape(*ended.shape, -1), axis=-1, dtype=jnp.float32)
        return jnp.where(number > 0, jnp.sum(jnp.where(ended, x, 0)) / some, jnp.nan)

    return {f"episode_{name}": mean(x) for name, x in measured.items()} | {"episodes": number}


def _where_any(f: Callable[..., Array], wanted: Array, params: Any, x: Any) -> Array:
    """`f(params, x)` if any element of `wanted` is True, else zeros; under `vmap`, too, one branch is run.

    `vmap` turns a `cond` with a batched predicate into a select that runs both branches. Here the predicate is reduced
    over the batch first, so that it stays one.
    """

    @jax.custom_batching.custom_vmap
    def call(wanted: Array, params: Any, x: Any) -> Array:
        shape = jax.eval_shape(f, params, x)
        return jax.lax.cond(jnp.any(wanted), f, lambda *_: jnp.zeros(shape.shape, shape.dtype), params, x)

    @call.def_vmap
    def rule(axis_size: int, in_batched: Any, wanted: Array, params: Any, x: Any) -> tuple[Array, bool]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched[1:]))
        batched = jax.vmap(f, in_axes=axes, axis_size=axis_size)
        return _where_any(batched, wanted, params, x), True

    return call(wanted, params, x)
