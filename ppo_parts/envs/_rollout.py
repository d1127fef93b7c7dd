"""Rollouts, in which the policy acts in environments and the transitions are recorded in a `Batch`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._base.batching import cond_any
from .._base.checked import Count, checked
from .._base.moments import Moments
from .._base.trees import axis_sharding, shapes_of, without_weak_types
from .._core.batch import Array, Batch, Evaluate, Output, Params, kind, map_streams
from .._core.learner import LearnerState
from .._core.metrics import Metrics
from .._core.policy import apply_policy, carry_after, evaluate_policy, initial_carry_of, is_value, policy_keys
from .._core.shards import check_shards
from ..distributions import Joint
from ..distributions._distribution import check_distribution
from ..errors import ShapeError, UserTypeError, UserValueError
from ..functional import next_values
from ..functional._arguments import check_key
from ..functional._common import unsqueeze
from ._env import Env, Transition, check_env, check_like, get_axes
from ._episodes import EpisodeState
from ._hoisting import scan_hoisted
from ._normalization import ShardMoments, map_moments
from ._spaces import count_options, is_tree, list_spaces, make_action_struct


def check_acting(where: str, params: Params) -> None:
    """Raise if the parameters of a policy are still inside the learner's state."""
    if isinstance(params, LearnerState):
        raise UserTypeError(f"{where}: params must be those of the policy, got a LearnerState: pass its .params")


class RolloutState(NamedTuple):
    """The state that one rollout passes to the next: environment states and the next observations."""

    env_state: Any
    obs: Any
    carry: Any = None  # the state of a recurrent policy, `[N, ...]`
    reset: Any = None  # True where the carry is zeroed before the next step

    @classmethod
    def begin(cls, env: Env, policy: Evaluate, num_envs: int, env_state: Any, obs: Any) -> RolloutState:
        """Make the state after a reset of the environments."""
        state, initial_carry = cls(env_state, obs), initial_carry_of(policy)
        if initial_carry is not None:
            carry = initial_carry(num_envs)
            if any(jnp.shape(x)[:1] != (num_envs,) for x in jax.tree.leaves(carry)):
                says = f"Policy: initial_carry({num_envs}) must return arrays that begin with [N] = [{num_envs}]"
                raise ShapeError(f"{says}, got {shapes_of(carry)}")
            state = state._replace(carry=carry, reset=jnp.ones(get_axes(env, num_envs), bool))
        return without_weak_types(state)

    def after(self, env_state: Any, out: Transition, carry: Any) -> RolloutState:
        """Make the state after a step."""
        reset, (ended, _) = self.reset, out.episode_ends()
        if reset is not None:
            reset = jnp.broadcast_to(unsqueeze(ended, reset.ndim), reset.shape)
        return without_weak_types(RolloutState(env_state, out.obs, carry, reset))


class Rollout(NamedTuple):
    """The result of `rollout`, which consists of pure functions.

    Attributes:
        init: `init(key) -> RolloutState`, with fresh environments.
        collect: `collect(key, params, state) -> (RolloutState, Batch, metrics)`. The metrics are `episode_return` and
            `episode_length` (means over the episodes that ended and over the agents, NaN if none did), `episodes` (the
            number of these episodes), and `episode_<name>` for entries of the environment's `info`.
        sharding: `sharding(mesh) -> RolloutState`, the `NamedSharding` of each leaf of the state, which divides the
            environments over the devices of a mesh. The number of devices must divide the number of shards. Leaves that
            all environments share, such as running statistics, are replicated.
        restart: `restart(key, state) -> RolloutState` begins new episodes and keeps running statistics (`Env.restart`).
            None means that every state can be continued.
    """

    init: Callable[[Array], RolloutState]
    collect: Callable[[Array, Params, RolloutState], tuple[RolloutState, Batch, Metrics]]
    sharding: Callable[[jax.sharding.Mesh], RolloutState]
    restart: Callable[[Array, RolloutState], RolloutState] | None = None


@checked
def rollout(
    env: Any,
    policy: Evaluate,
    *,
    num_envs: Count,
    num_steps: Count,
    value_each_step: bool = False,
    record: tuple[str, ...] = (),
    keep_next_obs: bool = False,
    keep_distribution: bool = False,
    keep_info: tuple[str, ...] = (),
    noise_steps: Count = 1,
    shards: int = 1,
) -> Rollout:
    """Make functions that step N environments T times with the current policy, and record a batch.

    With A agents, `[T, N]` below is `[T, N, A]`. V of final observations is computed only in steps with a truncation
    (even under `vmap`).

    Args:
        env: `ppo_parts.envs.Env`.
        policy: a `Policy`, or `evaluate` as in `learner`. Here observations have the leading axes `[N]` or `[T, N]`.
            With an `initial_carry`, `evaluate(params, batch)` receives `batch.carry`, the state before step 0. It must
            zero the state before each step where `batch.reset` `[T, N]` is 1, and return `(distribution, value, carry
            after the last step)`. If the policy has no value, the batch has none.
        num_envs, num_steps: N and T.
        value_each_step: whether to keep the value that is computed with each step's action, as for recurrent policies,
            instead of computing all values after the last step. This is faster if policy and value share layers.
        record: names of entries of the policy's `aux`, one number per element, to keep for each step as `extras[name]`,
            and as `extras["next_" + name]` for the observation that followed, like `next_value` for `value`.
        keep_next_obs: whether to keep the observation that followed each step (or the final one) as `next_obs`.
        keep_distribution: whether to keep the behavior distribution as `behavior`, for exact divergences.
        keep_info: names of entries of the environment's `info`, such as a cost, to keep for each step as
            `extras[name]`, which is `[T, N]` even with agents.
        noise_steps: number of steps for which actions are sampled with the same key, from the first step of the
            rollout. `distributions.StateDependentNormal` then keeps its noise matrix, and others their noise.
        shards: S, the number `batch.shards` of equal blocks of environments that samplers do not mix, so that each
            block can stay on a separate device. With S > 1, the evaluation of final observations and the merge of
            running statistics, which need all devices, wait until the last step.

    Returns:
        `Rollout(init, collect, sharding, restart)`. A batch has obs, action, log_prob, value, reward, terminated,
        truncated and next_value; for a recurrent policy, carry and reset; for absent agents, mask; and what arguments
        add.

    Raises:
        TypeError: if `env` is not an environment, `policy` is not a function or, when traced, actions do not fit
            `env.action_space`. ValueError: if a number is less than 1, `shards` does not divide `num_envs`, or `record`
            or `keep_info` names an entry that the batch already has or, when traced, that aux or info lacks.
            ShapeError: when traced, if a log-probability, value or entry of aux is not one number per element (or
            stream).

    Example:
        >>> import jax, jax.numpy as jnp, ppo_parts as pp
        >>> from ppo_parts import envs
        >>> def evaluate(params, batch):
        ...     return pp.distributions.Categorical(batch.obs @ params["policy"]), batch.obs @ params["value"]
        >>> rollout = pp.rollout(envs.make("CartPole-v1"), evaluate, num_envs=2, num_steps=8)
        >>> params = {"policy": jnp.zeros((4, 2)), "value": jnp.zeros(4)}
        >>> state, batch, metrics = rollout.collect(jax.random.key(1), params, rollout.init(jax.random.key(0)))
        >>> batch.obs.shape, batch.next_value.shape
        ((8, 2, 4), (8, 2))
    """
    check_names(record, keep_info)
    check_env("rollout", env)
    agents = "" if env.folded == 1 else f" / {env.folded} agents"  # which step together
    check_shards("rollout", shards, f"num_envs{agents}", num_envs // env.folded)
    initial_carry = initial_carry_of(policy)
    each = get_axes(env, num_envs)

    def init(key: Array) -> RolloutState:
        check_key("rollout.init", "key", key)
        return RolloutState.begin(env, policy, num_envs, *env.reset(key, num_envs))

    def restart(key: Array, state: RolloutState) -> RolloutState:
        return RolloutState.begin(env, policy, num_envs, *env.restart(key, state.env_state))

    def sharding(mesh: jax.sharding.Mesh) -> RolloutState:
        of_axis = axis_sharding("Rollout.sharding", mesh, shards)
        return _make_shardings(jax.eval_shape(init, jax.random.key(0)), of_axis, num_envs, shards)

    def estimate(output: Output) -> dict[str, Array]:
        """Return the value and the recorded entries of aux, by name."""
        check_entries("record", record, output.aux, "the policy's aux", "Output(..., aux={'NAME': ...})")
        value = {} if output.value is None else {"value": output.value}
        return value | {name: output.aux[name] for name in record}

    @jax.jit  # it is called in three places, but traced once
    def estimate_after(params: Params, followed: tuple[Any, Any, Any]) -> dict[str, Array]:
        """Compute the estimates of observations `(obs, carry, keys)`."""
        obs, carry, keys = followed
        return estimate(apply_policy(policy, params, obs, carry, jnp.zeros(each, bool), keys))

    def estimate_if_any(wanted: Array, params: Params, followed: tuple[Any, Any, Any]) -> dict[str, Array]:
        """Compute the estimates if any is wanted; otherwise return zeros."""
        shapes = jax.eval_shape(estimate_after, params, followed)
        zeros = lambda *_: jax.tree.map(jnp.zeros_like, shapes)  # noqa: E731
        return cond_any(wanted, estimate_after, zeros, params, followed)

    def step(params: Params, state: RolloutState, keys: Array) -> tuple[RolloutState, Any]:
        """Step all environments; return the record, the estimates, the final estimates, and the episodes.

        With several shards, return the final observations instead, because a test for any would need all devices.
        """
        own_keys = policy_keys(policy, keys[0], num_envs)
        output = apply_policy(policy, params, state.obs, state.carry, state.reset, own_keys)
        check_kept(output, initial_carry, num_envs, keep_distribution)
        action, log_prob = _sample(output.distribution, keys[0])
        check_action(output.distribution, action, env.action_space, each)
        env_state, out = env.step(keys[1], state.env_state, action)
        out.check(state.obs, each)
        returned = "Transition(..., info={'NAME': ...}) in each step"
        check_entries("keep_info", keep_info, out.info, "the environment's info", returned)
        carry = carry_after(policy, output, action)
        check_like("rollout: the policy must return a carry like the one before", carry, state.carry, error=ShapeError)
        final: Any = out.final_obs, carry, own_keys
        if shards == 1:  # otherwise `collect` does this for all steps
            final = estimate_if_any(out.truncated, params, final)
        fields: dict[str, Any] = {name: getattr(out, name) for name in ("reward", "terminated", "truncated", "mask")}
        fields["extras"] = {name: out.info[name] for name in keep_info} | own_keys
        if keep_next_obs:
            fields["next_obs"] = out.final_obs
        if keep_distribution:
            fields["behavior"] = output.distribution
        recorded = Batch(obs=state.obs, action=action, log_prob=log_prob, reset=state.reset, **fields)
        at_once = initial_carry is not None or value_each_step or bool(record)
        measured = {"return": out.episode_return, "length": out.episode_length, **out.info}
        episodes = out.episode_ends()[0], measured
        values = estimate(output) if at_once else None
        return state.after(env_state, out, carry), (recorded, values, final, episodes)

    def collect(key: Array, params: Params, state: RolloutState) -> tuple[RolloutState, Batch, Metrics]:
        check_key("rollout.collect", "key", key)
        where = "rollout.collect(key, params, state)"
        if not isinstance(state, RolloutState):
            must = "state must be a RolloutState, as rollout.init(key) or the last collect returned it"
            raise UserTypeError(f"{where}: {must}, got {kind(state)}")
        check_acting(where, params)
        given = jax.tree.leaves(state.obs)[0].shape[: len(each)]
        if given != each:
            says = f"state has {list(given)} environments, but this rollout has {list(each)}"
            raise UserValueError(f"{where}: {says}: begin with its own rollout.init(key)")
        first_carry = state.carry
        if shards > 1:
            state = state._replace(env_state=map_moments(lambda x: ShardMoments.of(x, shards), state.env_state))
        keys = _split_keys(key, num_steps, noise_steps)
        state, steps = scan_hoisted(lambda state, keys: step(params, state, keys), state, keys)
        batch, values, final, episodes = steps
        values = estimate(evaluate_policy(policy, params, batch)) if values is None else values
        check_recorded(batch, values, (num_steps, *each))
        if shards > 1:
            state = state._replace(env_state=map_moments(ShardMoments.whole, state.env_state))
            # Devices agree once on the steps that have a final observation, and do not wait in the other steps.
            cut = jnp.any(batch.truncated.reshape(num_steps, -1), axis=1)
            final = jax.lax.map(lambda x: estimate_if_any(x[0], params, x[1]), (cut, final))
        if values:
            last_keys = {name: x[-1] for name, x in batch.extras.items() if name == "policy_key"}
            last = estimate_after(params, (state.obs, state.carry, last_keys))
            batch = _write_estimates(batch, values, last, final)
        return state, batch.replace(carry=first_carry, shards=shards), episode_metrics(*episodes)

    return Rollout(init, collect, sharding, None if env.restart is None else restart)


def _make_shardings(
    state: RolloutState, of_axis: Callable[[int | None], Any], num_envs: int, shards: int
) -> RolloutState:
    """Return each leaf's sharding; environment rows are divided, and leaves that all share are replicated."""

    def of_leaf(x: Any) -> Any:
        if isinstance(x, Moments):
            return jax.tree.map(lambda leaf: of_axis(None), x)
        if isinstance(x, EpisodeState):
            shared = jax.tree.map(lambda leaf: of_axis(None), x.shared)
            return jax.tree.map(of_leaf, x._replace(shared=None))._replace(shared=shared)
        rows = x.shape[0] if x.shape else 0  # N, or fewer inside `fold_agents`
        return of_axis(0 if rows and num_envs % rows == 0 and rows % shards == 0 else None)

    return jax.tree.map(of_leaf, state, is_leaf=lambda x: isinstance(x, Moments | EpisodeState))


def _split_keys(key: Array, num_steps: int, noise_steps: int) -> Array:
    """Return keys for actions and environments, `[T, 2]`; action keys change every `noise_steps` steps."""
    # Make all keys with one call of the generator instead of one per step. It compiles faster without a shape.
    keys = jax.random.split(key, 2 * num_steps).reshape(num_steps, 2, *key.shape)
    if noise_steps == 1:
        return keys
    index = jnp.arange(num_steps)
    return jnp.stack([keys[index - index % noise_steps, 0], keys[:, 1]], axis=1)


def _sample(distribution: Any, key: Array) -> tuple[Any, Array]:
    """Sample an action and return it with its log-probability."""
    if hasattr(distribution, "sample_and_log_prob"):
        return distribution.sample_and_log_prob(seed=key)
    check_distribution("evaluate(params, batch)", distribution, ("sample",))
    action = distribution.sample(seed=key)
    return action, distribution.log_prob(action)


def _write_estimates(batch: Batch, estimates: Any, last: Any, final: Any) -> Batch:
    """Write the estimates of each step, and of the next, final or last observation that followed it."""

    def following(x: Array, last: Array, final: Array) -> Array:
        return next_values(x, last, batch.truncated, final)

    extras = dict(batch.extras)
    for name, x in estimates.items():
        after = map_streams(following, batch.truncated, x)(x, last[name], final[name])
        if name == "value":
            batch = batch.replace(value=x, next_value=after)
        else:
            extras |= {name: x, f"next_{name}": after}
    return batch.replace(extras=extras)


def check_names(record: tuple[str, ...], keep_info: tuple[str, ...]) -> None:
    """Raise unless the kept entries of `extras` have different names."""
    taken = {"value", "policy_key", *(f"next_{name}" for name in record)}
    for argument, names in (("record", record), ("keep_info", keep_info)):
        for name in taken.intersection(names):
            names_there = ", ".join(sorted(taken))
            raise UserValueError(f"rollout: {argument}={name!r} is already in the batch ({names_there}): rename it")
        taken |= {*names}


def check_entries(argument: str, names: tuple[str, ...], entries: Any, owner: str, returned: str) -> None:
    """Raise unless an owner has the entries that an argument of `rollout` names; `returned` tells how to add one."""
    is_dict = isinstance(entries, Mapping)
    for name in names:
        if not is_dict or name not in entries:
            has = f"has the entries {sorted(entries)}" if is_dict else f"is {kind(entries)}"
            remedy = f"return {returned.replace('NAME', name)}"
            raise UserValueError(f"rollout: {argument}={name!r} must be an entry of {owner}, which {has}: {remedy}")


def check_kept(output: Output, initial_carry: Any, num_envs: int, keep_distribution: bool) -> None:
    """Raise unless a rollout can keep a policy's carry and, if asked to, its distribution."""
    if initial_carry is None and output.carry is not None:
        says = f"rollout: the policy returned a carry, {kind(output.carry)}, without an initial_carry"
        raise UserTypeError(f"{says}: give it to pp.Policy; what is not a carry belongs in Output(..., aux=...)")
    for x in jax.tree.leaves(output.distribution) if keep_distribution else ():
        if not (hasattr(x, "dtype") or isinstance(x, (int, float))):
            says = f"rollout: keep_distribution needs a distribution that is a pytree of arrays, but {kind(x)} is not"
            raise UserTypeError(f"{says}: use one of ppo_parts.distributions, or register it with jax.tree_util")
        if jnp.shape(x)[:1] != (num_envs,):
            needs = f"rollout: keep_distribution needs a distribution whose arrays begin with [N] = [{num_envs}]"
            raise ShapeError(f"{needs}, got {jnp.shape(x)}: broadcast parameters that all elements share")


def check_recorded(batch: Batch, estimates: dict[str, Array], shape: tuple[int, ...]) -> None:
    """Raise unless log-probabilities, values and recorded entries of aux have one number per element."""
    if jnp.shape(batch.log_prob) != shape:
        says = f"the log-probability of {shape[1:]} actions has shape {jnp.shape(batch.log_prob)[1:]}"
        raise ShapeError(f"rollout: {says}: sum over the action's dimensions, to one number for each")
    for name, x in estimates.items():
        if not is_value(jnp.shape(x), shape):
            says = f"rollout: the policy returned {name} of shape {jnp.shape(x)[1:]} for {shape[1:]} observations"
            remedy = "return one number for each (or K, of K streams); drop a last axis of size 1 with x[..., 0]"
            raise ShapeError(f"{says}: {remedy}")


def check_action(distribution: Any, action: Any, space: Any, each: tuple[int, ...]) -> None:
    """Raise unless actions fit the action space, because an environment may broadcast or round other actions."""
    if is_tree(space):
        expected = make_action_struct(space, each)
        structure: Any = jax.tree.structure(expected)
        if structure != jax.tree.structure(action):
            says = f"the policy's actions are {shapes_of(action)}, but the environment takes {shapes_of(expected)}"
            raise UserTypeError(f"rollout: {says}: return distributions.Joint of a distribution for each entry")
        parts = jax.tree.leaves(distribution, is_leaf=lambda x: hasattr(x, "log_prob") and type(x) is not Joint)
        leaves, spaces = jax.tree.leaves(action), list_spaces(space)
        parts = parts if len(parts) == len(leaves) else [None] * len(leaves)  # if it is not a `Joint`
        for part, leaf, its in zip(parts, leaves, spaces, strict=True):
            check_action(part, leaf, its, each)
        return
    shape, options = getattr(space, "shape", None), count_options(space)
    if shape is None or not isinstance(action, jax.Array):
        return
    if action.shape != (*each, *shape) or (options and jnp.issubdtype(action.dtype, jnp.floating)):
        if hasattr(space, "nvec"):
            remedy = f"{len(options)} choices: return distributions.MultiCategorical(logits, nvec={options})"
        elif options:
            remedy = f"one of {options[0]} actions: return distributions.Categorical(logits [..., {options[0]}])"
        else:
            wrap = "" if len(shape) == 1 else "wrap it in envs.flatten_action, and "
            size = math.prod(shape)
            remedy = f"numbers of shape {tuple(shape)}: {wrap}return distributions.Normal(mean [..., {size}], scale)"
        says = f"rollout: the policy's actions are {shapes_of(action)}, but each of {list(each)} environments takes"
        raise UserTypeError(f"{says} {remedy}")
    for part, number in zip(getattr(distribution, "parts", (distribution,)), options, strict=False):
        *axes_of_logits, given = getattr(getattr(part, "logits", None), "shape", ()) or (0,)
        if tuple(axes_of_logits) == each and given != number:
            choices = f" in one of its choices; it has {options}" if len(options) > 1 else ""
            says = f"the policy has logits for {given} actions, but the environment has {number}{choices}"
            raise UserValueError(f"rollout: {says}")


def episode_metrics(ended: Array, measured: dict[str, Array]) -> Metrics:
    """Compute means over the episodes that ended (NaN if none did) and over the agents, and count these episodes."""
    number = jnp.sum(ended, dtype=jnp.float32)  # a float, so that devices sum it with other floats
    some = jnp.maximum(number, 1)

    def mean(x: Array) -> Array:
        x = jnp.mean(x.reshape(*ended.shape, -1), axis=-1, dtype=jnp.float32)
        return jnp.where(number > 0, jnp.sum(jnp.where(ended, x, 0)) / some, jnp.nan)

    named = {f"episode_{name}": mean(x) for name, x in measured.items()} | {"episodes": number}
    return Metrics.of(named, {"episodes": "sum"})
