"""Measurements of a policy and its environment in new rollouts, without training, as evidence for `diagnose`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.checked import checked
from .._base.moments import Moments, find_moments
from .._core.batch import Array, Batch, Output
from .._core.policy import evaluate_policy
from ..distributions import Categorical
from ..envs import count_options, is_discrete
from ..envs._env import as_observation
from ..envs._laws import random_action
from ..envs._spaces import map_space
from ..errors import UserTypeError, UserValueError
from ..functional import advantage_normalize, gae
from ..functional._common import unsqueeze
from ._train import Train, TrainState

STEPS, ROLLOUTS = 1024, 4
"""The minimal steps and rollouts for measuring observations, rewards and ends; the rest uses the last rollout."""
NEAR = 0.005
"""Actions closer to a bound than this share of the range count as at the bound."""


@checked
def probe(train: Train, state: TrainState, config: Any = None) -> dict[str, Array]:
    """Collect rollouts with the policy of `state`, and measure what the metrics of a run do not show.

    The function is pure, and can be jitted, and vmapped over several seeds. A measurement that does not apply is NaN.

    Args:
        train, state: the run and its state, for example from a checkpoint.
        config: its configuration, of which `gamma`, `gae_lambda` and `vf_coef` are used (else 0.99, 0.95 and 0.5).

    Raises:
        ValueError: if the policy has no critic.

    Returns:
        Scalars by name, each with the prefix "probe/":

        * `log_ratio`: the largest absolute log-ratio with the parameters that acted.
        * `log_ratio_inside`: the same where no action is at its bounds.
        * `value_change`: the largest change of a stored value, divided by the root mean square of values.
        * `memory_after_reset`: the effect of the carry before a reset on the outputs after it.
        * `same_envs`: the share of environments with the same observations as the first, if these vary.
        * `obs_rms`, `obs_std`: the largest root mean square and standard deviation of an input.
        * `obs_seen`: the share of observations that entered the running statistics.
        * `action_at_bound`: the share of components closer to a bound than 0.5 % of the range, or beyond it.
        * `action_beyond`: the share of components beyond a bound.
        * `action_spread`: the standard deviation of the distance to the nearer bound, as a share of the range; mean
          over components.
        * `action_unavailable`: the share of actions that the observation's mask rules out.
        * `agents_alike`: the share of steps at which all agents have the same policy.
        * `softmax_twice`: the share of steps whose categorical logits could be probabilities with one above 0.95 or 6
          times their mean; 0 if some could not, or if they do not vary.
        * `mean_zero`: the share of observations whose mean action is exactly 0; maximum over components; 0 if all are.
        * `no_effect`: 1 if a different policy sees the same observations; not on the host.
        * `actions_ignored`: 1 if it also receives the same rewards, not all 0; not on the host.
        * `action_effect`: the largest change of an observation or a reward in 8 steps if one component of random
          continuous actions changes; minimum over components.
        * `observation_late`: 1 if the observation after a step never depends on its action, but later ones of the
          episode do; not on the host, and not if the policy plays both sides.
        * `reward_elsewhere`: the share of agents whose actions change the rewards of others in 8 steps 100 times as
          much as their own; not on the host.
        * `score`: the mean gradient of the log-probability of continuous actions, in standard errors, along a random
          direction of each parameter array; 0 for the density from which they were drawn; maximum over arrays.
        * `reward_balance`: the sum of rewards, divided by the sum of their absolute values.
        * `reward_size`: the largest absolute reward.
        * `reward_spread`: the standard deviation of rewards, divided by the largest absolute one.
        * `target_rms`: the root mean square of the value targets.
        * `value_error`: the root mean square of advantages, divided by the root mean square of rewards.
        * `value_at_end`: the error of values before terminations, divided by the root mean square of values.
        * `terminated`, `truncated`: the number of ends of each kind.
        * `length_spread`: the difference between the rollouts' mean episode lengths, as a share of the longest.
        * `jump_at_end`: the jump of observations after an end, divided by the larger jump one step before or after it.
        * `update_direction`: the correlation of advantages with probability ratios after the first update of a new run.
        * `dead_units`: the share of hidden units that no gradient reaches.
        * `unused_parameters`: the share of parameter arrays on which no output depends, and which no update changes.
        * `value_spread`: the standard deviation of a new policy's values, divided by the norm of the standard
          deviations of its inputs if that is less than 1; NaN if all values are equal.
        * `value_dominance`: the norm of the value loss's gradient, divided by the policy's, on shared parameters.
    """
    settings = {"gamma": 0.99, "gae_lambda": 0.95, "vf_coef": 0.5} | read_fields(config, "probe")
    params = state.learner.params
    batch, found = _collect_rollouts(train, state)
    output = evaluate_policy(train.policy, params, batch)
    if output.value is None:
        raise UserValueError("must have a critic, which this policy lacks", where="probe", argument="train")
    if batch.reward.shape != output.value.shape:
        raise UserValueError("must have one value per step, not several streams", where="probe", argument="train")
    advantage, target = _estimate_advantages(batch, settings)
    direction, kept, spread = _run_first_update(train, state.key, settings)
    found |= dict.fromkeys(("no_effect", "actions_ignored", "observation_late", "reward_elsewhere"), jnp.nan)
    if not train.on_host:  # the host cannot return to earlier states
        found |= _compare_policies(train, state) | _change_steps_and_agents(train, state)
    found |= _compare_repeated(train, params, batch, output)
    found |= {
        "action_effect": _change_components(train, state),
        "value_spread": spread,
        "score": _measure_score(train, params, batch),
        "update_direction": direction,
        "target_rms": jnp.sqrt(jnp.mean(target**2)),
        "value_error": jnp.sqrt(jnp.mean(advantage**2) / jnp.mean(batch.reward**2)),
        **_compare_gradients(train, params, batch, advantage, target, settings["vf_coef"], kept),
    }
    return {f"probe/{name}": jnp.asarray(x, jnp.float32) for name, x in found.items()}


def _collect_rollouts(train: Train, state: TrainState) -> tuple[Batch, dict[str, Any]]:
    """Return the last rollout, and the measurements of observations, rewards and episode ends in all rollouts."""
    kept = jax.eval_shape(train.rollout.collect, state.key, state.learner.params, state.rollout)[1]
    features = jax.eval_shape(_flatten_obs, kept)

    def collect(carry: tuple[Any, ...], key: Array) -> tuple[tuple[Any, ...], dict[str, Array]]:
        before, _, inputs, rewards, same = carry
        after, batch, metrics = train.rollout.collect(key, state.learner.params, before)
        obs, size = _flatten_obs(batch), jnp.abs(batch.reward)
        inputs, rewards = inputs.updated(obs.reshape(-1, obs.shape[-1])), rewards.updated(batch.reward.reshape(-1))
        same &= jnp.all(obs[:, 1:] == obs[:, :1], axis=(0, 2))
        measured = {
            "terminated": jnp.sum(batch.terminated),
            "truncated": jnp.sum(batch.truncated),
            "reward": jnp.sum(batch.reward),
            "size": jnp.sum(size),
            "largest": jnp.max(size),
            "length": metrics["episode_length"],
            "jump_at_end": _measure_jump_at_end(batch),
            "value_at_end": _measure_value_at_end(batch),
        }
        return (after, batch, inputs, rewards, same), measured

    keys = jax.random.split(state.key, max(ROLLOUTS, -(-STEPS // len(kept.reward))))
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept)
    moments = Moments.of(jnp.zeros(features.shape[-1])), Moments.of(jnp.zeros(()))
    start = state.rollout, empty, *moments, jnp.ones(features.shape[1] - 1, bool)
    (_, batch, inputs, rewards, same), x = jax.lax.scan(collect, start, keys)
    seen = [jnp.min(each.seen) for each in find_moments(state.rollout.env_state)] or [jnp.asarray(jnp.nan)]
    return batch, {
        "same_envs": jnp.mean(same) * jnp.any(inputs.var > 0),
        "obs_rms": jnp.where(inputs.seen > 0, jnp.max(jnp.sqrt(inputs.mean**2 + inputs.var)), jnp.nan),
        "obs_std": jnp.where(inputs.seen > 0, jnp.max(jnp.sqrt(inputs.var)), jnp.nan),
        "obs_seen": jnp.min(jnp.stack(seen)) / (state.learner.step * math.prod(batch.reward.shape[:2])),
        "terminated": jnp.sum(x["terminated"]),
        "truncated": jnp.sum(x["truncated"]),
        "length_spread": 1 - jnp.nanmin(x["length"]) / jnp.nanmax(x["length"]),
        "reward_balance": jnp.sum(x["reward"]) / jnp.sum(x["size"]),
        "reward_size": jnp.max(x["largest"]),
        "reward_spread": jnp.sqrt(rewards.var) / jnp.max(x["largest"]),
        "jump_at_end": jnp.nanmean(x["jump_at_end"]),
        "value_at_end": jnp.nanmean(x["value_at_end"]),
    }


def _compare_policies(train: Train, state: TrainState) -> dict[str, Any]:
    """Return whether a policy with other parameters sees the same observations (and rewards) from the same states."""
    other = jax.tree.map(lambda x: 100 * x, train.policy.init(jax.random.key(0)))  # makes actions differ
    both = jax.tree.map(lambda *x: jnp.stack(x), state.learner.params, other)
    batch = jax.vmap(lambda params: train.rollout.collect(state.key, params, state.rollout)[1])(both)

    def are_equal(seen: Any) -> Array:
        return jnp.all(jnp.stack([jnp.all(x[0] == x[1]) for x in jax.tree.leaves(seen)]))

    ignored = are_equal((batch.obs, batch.reward)) & jnp.any(batch.reward != 0)
    return {"no_effect": are_equal(batch.obs), "actions_ignored": ignored}


def _change_components(train: Train, state: TrainState) -> Array | float:
    """Return the smallest effect of one action component on what follows."""
    env, space = train.env, train.env.action_space
    if not hasattr(space, "low"):
        return jnp.nan
    act, size = random_action(env), math.prod(space.shape)

    def compare(component: Array) -> Array:
        changed = (jnp.arange(size) == component).reshape(space.shape)
        key = jax.random.fold_in(state.key, component)  # each component has its own reset
        if train.on_host:  # a host state can be stepped only once, but a second reset makes an equal one
            start, obs = jax.vmap(lambda key: env.reset(key, 1))(jnp.stack([key, key]))
        else:
            start, obs = jax.tree.map(lambda x: jnp.stack([x, x]), state.rollout[:2])

        def step(states: Any, key: Array) -> tuple[Any, Array]:
            actions = jax.vmap(act)(jax.random.split(key), obs)
            actions = jnp.where(jnp.broadcast_to(changed, actions.shape), actions, actions[:1])
            states, out = jax.vmap(env.step, in_axes=(None, 0, 0))(key, states, actions)
            seen = out.final_obs, out.reward
            change = [jnp.max(jnp.abs(jnp.diff(x.astype(float), axis=0))) for x in jax.tree.leaves(seen)]
            return states, jnp.max(jnp.stack(change))

        return jnp.max(jax.lax.scan(step, start, jax.random.split(key, 8))[1])

    return jnp.min(jax.lax.map(compare, jnp.arange(size)))


def _change_steps_and_agents(train: Train, state: TrainState) -> dict[str, Any]:
    """Change all actions of one step, or all of one agent, to see which observations and rewards depend on them."""
    env, agents = train.env, train.env.num_agents or 1
    act, keys = random_action(env), jax.random.split(state.key, 8)

    def play(changed: Array) -> tuple[Any, Array, Array]:
        """Return the observations, the rewards and the ends of steps with other actions where `changed`, `[8, A]`."""

        def step(carry: Any, given: tuple[Array, Array]) -> tuple[Any, Any]:
            (states, obs), (key, own) = carry, given
            own = own if env.num_agents else own[0]
            actions = act(key, obs), act(jax.random.fold_in(key, 0), obs)
            chosen = jax.tree.map(lambda x, y: jnp.where(unsqueeze(own, x.ndim - 1), y, x), *actions)
            states, out = env.step(key, states, chosen)
            return (states, out.obs), (out.final_obs, out.reward, (out.terminated == 1) | (out.truncated == 1))

        return jax.lax.scan(step, tuple(state.rollout[:2]), (keys, changed))[1]

    none = jnp.zeros((len(keys), agents), bool)
    obs, reward, ended = jax.lax.map(play, jnp.stack([none, none.at[0].set(True)]))
    ended = ended.reshape(*ended.shape[:3], -1).any(axis=(0, 3))  # of an environment, in one of the plays
    episode = jnp.cumsum(ended, axis=0) - ended == 0  # the first
    differs = [(x[1] != x[0]).reshape(*episode.shape, -1).any(axis=-1) & episode for x in jax.tree.leaves(obs)]
    differ = jnp.stack(differs).any(axis=(0, 2))
    late = jnp.where(env.zero_sum, jnp.nan, ~differ[0] & jnp.any(differ))  # a game may hide the other side's actions
    if agents == 1:
        return {"observation_late": late}
    of_each = jax.lax.map(lambda agent: play(none.at[:, agent].set(True))[1], jnp.arange(agents))
    change = jnp.max(jnp.abs(of_each - reward[:1]), axis=(1, 2))  # [whose actions, whose rewards]
    elsewhere = jnp.diagonal(change) < 0.01 * jnp.max(change, axis=1)  # normalized rewards all change a little
    return {"observation_late": late, "reward_elsewhere": jnp.mean(elsewhere)}


def _measure_score(train: Train, params: Any, batch: Batch) -> Array | float:
    """Return how far the mean of the gradient of log-probabilities is from 0, in standard errors."""
    discrete = map_space(lambda space, action: is_discrete(space), train.env.action_space, batch.action)
    if any(jax.tree.leaves(discrete)):
        return jnp.nan  # nearly deterministic policies have equal gradients

    leaves, structure = jax.tree.flatten(params)
    keys = list(jax.random.split(jax.random.key(0), len(leaves)))

    def measure(chosen: Array) -> Array:
        each = zip(chosen, keys, leaves, strict=True)
        direction = [(of_it * jax.random.normal(key, x.shape)).astype(x.dtype) for of_it, key, x in each]
        tangents = (jax.tree.unflatten(structure, direction),)
        score = jax.jvp(lambda params: _log_prob(train, params, batch), (params,), tangents)[1]
        return jnp.abs(jnp.mean(score)) / jnp.std(score) * score.size**0.5  # NaN without an effect

    return jnp.nanmax(jax.lax.map(measure, jnp.eye(len(leaves))))


def _log_prob(train: Train, params: Any, batch: Batch) -> Array:
    return evaluate_policy(train.policy, params, batch).distribution.log_prob(batch.action)


def _estimate_advantages(batch: Batch, settings: Mapping[str, Any]) -> tuple[Array, Array]:
    ends, factors = (batch.terminated, batch.truncated), {name: settings[name] for name in ("gamma", "gae_lambda")}
    return gae(batch.reward, batch.value, batch.next_value, *ends, **factors, mask=batch.mask)


def _run_first_update(train: Train, key: Array, settings: Mapping[str, Any]) -> tuple[Array, list[Array], Array]:
    """Return how the first update changes probabilities, which arrays it keeps, and how values vary before it."""
    first = train.init(key).acting
    _, batch, _ = train.rollout.collect(key, first.learner.params, first.rollout)
    after, _ = train.learner.update(key, first.learner, batch)
    kept = jax.tree.leaves(jax.tree.map(lambda x, y: jnp.all(x == y), first.learner.params, after.params))
    old, new = (_log_prob(train, each.params, batch) for each in (first.learner, after))
    advantage, _ = _estimate_advantages(batch, settings)
    direction = jnp.corrcoef(jnp.ravel(advantage), jnp.ravel(jnp.exp(new - old)))[0, 1]  # NaN without a change
    inputs = [jnp.ravel(jnp.std(x.astype(float), axis=(0, 1))) for x in jax.tree.leaves(batch.obs)]
    spread = jnp.std(batch.value) / jnp.minimum(jnp.linalg.norm(jnp.concatenate(inputs)), 1)
    spread = jnp.where(jnp.ptp(batch.value) > 0, spread, jnp.nan)
    return jnp.where(train.env.zero_sum, jnp.nan, direction), kept, spread  # in such a game, rewards belong to one side


def _compare_repeated(train: Train, params: Any, batch: Batch, output: Output) -> dict[str, Any]:
    """Compare what a rollout stored with the `output` for it, and look for actions at their bounds."""
    log_ratio = jnp.abs(output.distribution.log_prob(batch.action) - batch.log_prob)
    from_bound = _measure_distance_to_bounds(train.env.action_space, batch.action, log_ratio.shape)
    inside = jnp.all(from_bound > NEAR, axis=-1)
    change = jnp.abs(jnp.asarray(output.value) - batch.value)
    return {
        "log_ratio": jnp.max(log_ratio),
        "log_ratio_inside": jnp.where(jnp.any(inside), jnp.max(log_ratio, where=inside, initial=0), jnp.nan),
        "value_change": jnp.max(change) / (jnp.sqrt(jnp.mean(batch.value**2)) + 1e-6),
        "memory_after_reset": _measure_memory_after_reset(train, params, batch),
        "action_at_bound": jnp.mean(from_bound <= NEAR),
        "action_beyond": jnp.mean(from_bound < -1e-6),
        "action_spread": jnp.mean(jnp.std(from_bound, axis=(0, 1))),
        "action_unavailable": _measure_unavailable(train.env.action_space, batch),
        "agents_alike": _compare_agents(train, batch, output),
        "softmax_twice": _measure_softmax_twice(output.distribution),
        "mean_zero": _measure_mean_zero(output.distribution),
    }


def _measure_unavailable(space: Any, batch: Batch) -> Array | float:
    masks = as_observation(batch.obs).available
    if masks is None:
        return jnp.nan

    def measure(space: Any, action: Array, mask: Array | None) -> Array:
        if mask is None:
            return jnp.zeros(batch.log_prob.shape, bool)
        chosen = action if hasattr(space, "nvec") else action[..., None]
        first = np.cumsum([0, *count_options(space)[:-1]])  # the place of each choice's options in the mask
        chosen += np.broadcast_to(first, chosen.shape).astype(chosen.dtype)
        return jnp.any(jnp.take_along_axis(mask, chosen, axis=-1) == 0, axis=-1)

    wrong = jax.tree.leaves(map_space(measure, space, batch.action, masks))
    return jnp.mean(jnp.any(jnp.stack(wrong), axis=0))


def _compare_agents(train: Train, batch: Batch, output: Output) -> Array | float:
    if train.env.num_agents in (None, 1):
        return jnp.nan
    first = jax.tree.map(lambda x: jnp.broadcast_to(x[:, :, :1], x.shape), batch.action)
    log_prob = output.distribution.log_prob(first)
    return jnp.mean(jnp.all(log_prob == log_prob[:, :, :1], axis=-1))


def _measure_softmax_twice(distribution: Any) -> Array | float:
    if not isinstance(distribution, Categorical):
        return jnp.nan
    logits = distribution.logits
    probs = logits - jnp.mean(logits, axis=-1, keepdims=True) + 1 / logits.shape[-1]  # logits up to a constant
    varied = jnp.any(jnp.ptp(probs, axis=(0, 1)) > 0.1)  # not with one action or no observations
    likely = jnp.max(probs, axis=-1) > min(0.95, 6 / logits.shape[-1])
    return jnp.mean(likely) * (jnp.min(probs) > -1e-4) * varied


def _measure_mean_zero(distribution: Any) -> Array | float:
    loc = getattr(getattr(distribution, "base", distribution), "loc", None)
    return jnp.nan if loc is None else jnp.max(jnp.mean(loc == 0, axis=(0, 1))) * jnp.any(loc != 0)


def read_fields(config: Any, where: str = "diagnose") -> dict[str, Any]:
    """Return the fields of a configuration, which is a dataclass, a mapping, or None."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if not isinstance(config, Mapping | None):
        says = f"must be an instance of a dataclass, a mapping, such as vars(namespace), or None, got {config!r}"
        raise UserTypeError(says, where=where, argument="config")
    return dict(config or {})


def _flatten_obs(batch: Batch) -> Array:
    """Return the floating observations as `[T, N, features]`, with the agents' observations as features."""
    shape = batch.reward.shape[:2]
    leaves = [x.reshape(*shape, -1) for x in jax.tree.leaves(batch.obs) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.concatenate(leaves or [jnp.full((*shape, 1), jnp.nan)], axis=-1)


def _measure_distance_to_bounds(space: Any, action: Any, shape: tuple[int, ...]) -> Array:
    """Return the distance of bounded action components to their bounds, as a share of the range, `[*shape, D]`.

    Without bounds, D is 0, and means over the components are NaN.
    """

    def measure(space: Any, action: Array) -> Array:
        if is_discrete(space):
            return jnp.zeros((*shape, 0))
        # Use NumPy arrays, because JAX arrays become traced inside jit.
        low, high = (np.broadcast_to(np.asarray(x, np.float32), action.shape) for x in (space.low, space.high))
        if not np.all(np.isfinite([low, high])):
            return jnp.zeros((*shape, 0))
        size = np.where(high > low, high - low, 1)  # a component may have only one value
        return (jnp.minimum(action - low, high - action) / size).reshape(*shape, -1)

    return jnp.concatenate(jax.tree.leaves(map_space(measure, space, action)), axis=-1)


def _measure_memory_after_reset(train: Train, params: Any, batch: Batch) -> Array | float:
    if batch.carry is None:
        return jnp.nan
    first = jax.tree.map(lambda x: x[:1], batch.replace(carry=None, per_segment={}, shared={}))

    def after(fill: float) -> Array:
        carry = jax.tree.map(lambda x: jnp.full_like(x, fill), batch.carry)
        output = evaluate_policy(train.policy, params, first.replace(carry=carry, reset=jnp.ones_like(first.reset)))
        return jnp.stack([output.distribution.log_prob(first.action), jnp.asarray(output.value)])

    return jnp.max(jnp.abs(after(0.5) - after(0.0)))


def _measure_jump_at_end(batch: Batch) -> Array:
    change = jnp.abs(jnp.diff(_flatten_obs(batch), axis=0))  # from step t to t + 1
    typical = jnp.broadcast_to(jnp.mean(change, axis=(0, 1), keepdims=True), change.shape)
    jump = jnp.max(jnp.where(typical > 0, change / typical, 0), axis=-1)
    ended = ((batch.terminated == 1) | (batch.truncated == 1)).reshape(*batch.reward.shape[:2], -1).all(-1)[:-1]

    def mean(offset: int) -> Array:
        return jnp.mean(jump, where=jnp.roll(ended, offset, axis=0).at[0].set(False).at[-1].set(False))

    return mean(0) / jnp.maximum(mean(-1), mean(1))


def _measure_value_at_end(batch: Batch) -> Array:
    missed = jnp.mean((batch.value - batch.reward) ** 2, where=batch.terminated == 1)
    return jnp.sqrt(missed / jnp.mean(batch.value**2))


def _compare_gradients(
    train: Train, params: Any, batch: Batch, advantage: Array, target: Array, vf_coef: Any, kept: list[Array]
) -> dict[str, Array]:
    """Compare the gradients of both losses on shared parameters, and count what no gradient reaches.

    Of parameters that no gradient reaches even when they are new, only those that an update has `kept` are unused. A
    part may train the others, such as the predictor of `rnd_loss`.
    """
    scaled = advantage_normalize(advantage)

    def losses(params: Any) -> Array:
        output = evaluate_policy(train.policy, params, batch)
        log_prob, value = output.distribution.log_prob(batch.action), jnp.asarray(output.value)
        policy_loss, value_loss = -jnp.mean(scaled * log_prob), vf_coef * jnp.mean((value - target) ** 2) / 2
        # With random weights, the gradient of a living unit does not cancel to exactly 0.
        numbers = jnp.concatenate([jnp.ravel(x).astype(float) for x in jax.tree.leaves((log_prob, value, output.aux))])
        weighted = jnp.mean(jax.random.normal(jax.random.key(0), numbers.shape) * numbers)
        return jnp.stack([policy_loss, value_loss, weighted])

    both = jax.tree.map(lambda *x: jnp.stack(x), params, train.policy.init(jax.random.key(0)))
    leaves = jax.tree.leaves_with_path(jax.vmap(jax.jacrev(losses))(both))
    norms = jnp.stack([jnp.sqrt(jnp.sum(x[0, :2].reshape(2, -1) ** 2, axis=1)) for _, x in leaves])
    shared = jnp.all(norms > 0, axis=1, keepdims=True)
    policy, value = jnp.sqrt(jnp.sum(norms**2, axis=0, where=shared))
    biases = [x[:, 2] for path, x in leaves if "bias" in jax.tree_util.keystr(path) and x.ndim == 3]
    unused = [jnp.all(x[:, 2] == 0) & same for (_, x), same in zip(leaves, kept, strict=True)]
    counts = [jnp.any(new) * jnp.array([jnp.sum(now == 0), now.size]) for now, new in biases]
    dead, units = sum(counts, jnp.zeros(2))
    return {
        "value_dominance": value / policy,  # NaN without shared parameters
        "dead_units": dead / units,
        "unused_parameters": jnp.mean(jnp.stack(unused)),
    }
