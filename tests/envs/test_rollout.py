"""What the rollout promises about truncation, state and vmap; test_host_envs.py has whole rollouts step by step."""

import functools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import envs, training
from ppo_parts._core.learner import LearnerState
from ppo_parts.envs._rollout import RolloutState, episode_metrics
from tests.common import Categorical, assert_close, refused
from tests.envs.common import altered, clock, echo, uniform


def test_values_are_the_same_with_each_step_and_after_the_last():
    shapes = []
    weights = {"policy": jnp.linspace(-8, 8, 8).reshape(4, 2), "value": jnp.array([1.0, -2.0, 3.0, 0.5])}

    def watched(params, batch):
        shapes.append(batch.obs.shape[:-1])
        return Categorical(batch.obs @ params["policy"]), batch.obs @ params["value"]

    @functools.partial(jax.jit, static_argnums=0)
    def collected(each_step):
        env = envs.make("CartPole-v1", max_steps_in_episode=11)
        rollout = pp.rollout(env, watched, num_envs=3, num_steps=11, value_each_step=each_step)
        return rollout.collect(jax.random.key(1), weights, rollout.init(jax.random.key(0)))

    found = collected(True)
    assert set(shapes) == {(3,)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, collected(False))
    batch = found[1]
    log_prob = jax.nn.log_softmax(batch.obs @ weights["policy"])
    np.testing.assert_allclose(batch.log_prob, jnp.take_along_axis(log_prob, batch.action[..., None], 2)[..., 0], 1e-4)
    assert batch.terminated.any()
    assert batch.truncated.any()


def test_episodes_are_measured_where_they_end_and_info_of_every_step_is_kept():
    """With several agents, returns are averaged over them; if no episode ends, there is no mean."""
    ended, total = jnp.array([[False, True], [True, False]]), jnp.arange(8.0).reshape(2, 2, 2)
    metrics = episode_metrics(ended, {"return": total, "length": jnp.array([[9, 1], [4, 9]])})
    expected = {"episode_return": 3.5, "episode_length": 2.5, "episodes": 2}
    assert {name: float(x) for name, x in metrics.items()} == expected
    metrics = episode_metrics(ended & False, {"return": total})
    assert np.isnan(metrics["episode_return"])
    assert metrics["episodes"] == 0
    rollout = pp.rollout(clock(4), uniform, num_envs=1, num_steps=6, keep_info=("cost",))
    _, batch, metrics = jax.jit(rollout.collect)(jax.random.key(0), 1.0, rollout.init(jax.random.key(0)))
    assert batch.extras["cost"][:, 0].tolist() == [0, 10, 20, 30, 0, 10]
    assert metrics["episode_cost"] == 30


def test_value_of_a_final_observation_is_computed_only_where_one_is_used():
    steps, calls = 12, []

    def counted(params, batch):
        jax.debug.callback(lambda _: calls.append(1), jnp.sum(batch.obs) * params)
        return uniform(params, batch)

    def collected(limit, scale):
        rollout = pp.rollout(clock(limit), counted, num_envs=2, num_steps=steps)
        return rollout.collect(jax.random.key(0), scale, rollout.init(jax.random.key(0)))[1]

    def extra(f, *args, seeds=1):
        """Count calls of the network, except those that act, and those that value and end the rollout."""
        calls.clear()
        jax.block_until_ready(jax.jit(f)(*args))
        jax.effects_barrier()
        assert len(calls) % seeds == 0
        return len(calls) // seeds - (steps + 2)

    assert extra(collected, 4, 1.0) == 3  # of 12 steps
    # One is cut in steps 3, 7 and 11, the other in steps 5 and 11: each of these 4 steps is computed, for both.
    assert extra(jax.vmap(jax.vmap(collected, (None, 0)), (0, None)), jnp.array([4, 6]), jnp.ones(2), seeds=4) == 4


def not_a_tree(params, batch):
    distribution, value = uniform(params, batch)
    return SimpleNamespace(sample=distribution.sample, log_prob=distribution.log_prob), value


def per_dimension(params, batch):
    return SimpleNamespace(sample=lambda seed: batch.obs, log_prob=lambda action: action), batch.obs[..., 0]


CLOCK, ECHO, CHOICES = clock(4), echo(envs.Box((2,), -1, 1)), echo(envs.MultiDiscrete((2, 3)))
FIVE = pp.distributions.Categorical(jnp.zeros((2, 5)))
SWAPPED = pp.distributions.MultiCategorical(jnp.zeros((2, 5)), (3, 2))


def test_raw_keys_collect_what_typed_ones_do():
    rollout = pp.rollout(CLOCK, uniform, num_envs=2, num_steps=3, noise_steps=2)
    raw, typed = (rollout.collect(key, 1.0, rollout.init(key)) for key in (jax.random.PRNGKey(1), jax.random.key(1)))
    assert_close(raw, typed, 0, 0)


def halving(params, batch):
    return *uniform(params, batch), batch.carry.astype(jnp.float16)


def collecting(env, evaluate, **settings):
    def collect():
        rollout = pp.rollout(env, evaluate, **{"num_envs": 2, "num_steps": 3, **settings})
        return rollout.collect(jax.random.key(0), 1.0, rollout.init(jax.random.key(0)))

    return lambda: jax.eval_shape(collect)


def collect(params, state):
    return lambda: pp.rollout(CLOCK, uniform, num_envs=2, num_steps=3).collect(jax.random.key(0), params, state)


test_what_cannot_be_collected_is_refused = refused(
    (collect(RolloutState(0, 0), {}), r"\(key, params, state\): state must be .* rollout\.init\(key\) .*, got dict"),
    (collect(LearnerState(*"pqrs"), RolloutState(0, 0)), r"params must be .*, got a LearnerState: pass its \.params"),
    (collect(1.0, RolloutState(0, jnp.zeros((3, 1)))), r"state has \[3\] environments, but this rollout has \[2\]"),
    (collecting(CLOCK, uniform, keep_info=("won",)), r"'won' must be an entry of the .*'s info, .* \['cost'\]: "),
    (collecting(CLOCK, uniform, record=("bonus",)), r"'bonus' must be an .*'s aux.* aux={'bonus': \.\.\.}\)"),
    (
        collecting(CLOCK, not_a_tree, keep_distribution=True),
        "keep_distribution needs .* a pytree of arrays, but SimpleNamespace is not",
    ),
    (collecting(altered(CLOCK, reward=lambda out: out.reward[:, None]), uniform), "reward must be floats of shape"),
    (collecting(CLOCK, lambda *given: (*uniform(*given), {"x": 1})), "carry, dict, without an initial_carry: give it"),
    (collecting(CLOCK, pp.Policy(dict, uniform, lambda n: jnp.zeros(4))), r"with \[N\] = \[2\], got float32\[4\]"),
    (collecting(CLOCK, pp.Policy(dict, halving, lambda n: jnp.ones(n))), r"one before, float32\[2\], got float16\[2\]"),
    (collecting(CLOCK, lambda *given: (uniform(*given)[0], given[1].obs[..., :1])), r"value of .* x\[\.\.\., 0\]"),
    (collecting(ECHO, per_dimension), "sum over the action's dimensions"),
    (collecting(CHOICES, lambda *_: (FIVE, jnp.zeros(2))), r"takes 2 choices: return distributions.MultiCategorical\("),
    (collecting(CHOICES, lambda *_: (SWAPPED, jnp.zeros(2))), r"3 actions.* has 2 in one of its choices"),
)


def test_a_recurrent_policy_is_reset_with_its_episodes():
    """Its memory counts the steps of the episode; values, and the learner's batch, agree with the clock."""

    def counting(params, batch):
        def forward(memory, reset):
            memory = jnp.where(reset, 0, memory) + 1
            return memory, memory

        memory, counts = jax.lax.scan(forward, batch.carry, batch.reset)
        return Categorical(jnp.zeros((*counts.shape, 2))), params * counts, memory

    rollout = pp.rollout(clock(5), pp.Policy(lambda key: {}, counting, jnp.zeros), num_envs=2, num_steps=4)
    state = rollout.init(jax.random.key(0))
    for number in range(3):
        state, batch, _ = jax.jit(rollout.collect)(jax.random.key(number), 1.0, state)
        np.testing.assert_array_equal(batch.value, batch.obs[..., 0] + 1)  # steps seen so far in this episode
        # The value of what followed is for one more step in the same episode, even if the episode was cut there.
        np.testing.assert_array_equal(batch.next_value, batch.obs[..., 0] + 2)
        np.testing.assert_array_equal(counting(1.0, batch)[1], batch.value)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_policy_that_draws_and_remembers_its_action_does_the_same_in_an_update(shards):
    """Its logits and values depend on numbers that it draws, and on its last action in the episode."""

    def evaluate(params, batch):
        previous = batch.carry[None]
        if batch.action is not None:
            previous = jnp.concatenate([previous, batch.action[:-1]])
        previous = jnp.where(batch.reset, 0, previous)
        noise = jax.vmap(jax.vmap(jax.random.normal))(batch.extras["policy_key"])
        value = params * (previous + noise)
        return Categorical(jnp.stack([value, -value], -1)), value, previous[-1]

    def after_action(carry, action, output):
        assert output.value.shape == carry.shape
        return action.astype(carry.dtype)

    policy = pp.Policy(lambda key: 1.0, evaluate, jnp.zeros, after_action, draws=True)
    rollout = pp.rollout(clock(5), policy, num_envs=4, num_steps=7, shards=shards)
    state, batch, _ = jax.jit(rollout.collect)(jax.random.key(0), 1.0, rollout.init(jax.random.key(0)))
    distribution, value, _ = evaluate(1.0, batch)
    np.testing.assert_allclose(batch.log_prob, distribution.log_prob(batch.action), rtol=1e-6)
    np.testing.assert_allclose(batch.value, value, rtol=1e-6)
    np.testing.assert_array_equal(state.carry, batch.action[-1])
    drawn = jax.random.key_data(batch.extras["policy_key"])
    assert len(np.unique(drawn.reshape(-1, drawn.shape[-1]), axis=0)) == 28
    if shards > 1:  # what follows does not depend on the number of shards
        return
    # the value that followed a truncation, after step 4, is computed with the same memory
    noise = jax.vmap(jax.random.normal)(batch.extras["policy_key"][4])
    np.testing.assert_allclose(batch.next_value[4], batch.action[4] + noise, rtol=1e-6)

    parts = pp.gae(gamma=0.9, gae_lambda=0.9), pp.segment_minibatches(1), pp.clipped_surrogate(clip_eps=0.2)
    learner = pp.learner(policy, pp.chain(*parts, pp.policy_diagnostics()), optax.sgd(0.1))
    _, metrics = jax.jit(learner.update)(jax.random.key(0), learner.init(1.0), batch)
    assert (metrics["ratio_min"], metrics["ratio_max"]) == (1, 1)
    played = training.evaluate_episodes(clock(5), policy, 1.0, jax.random.key(0), 3)
    np.testing.assert_array_equal(played.episode_length, 5)


class Shared(NamedTuple):
    """A Gaussian with a standard deviation `[D]` that all elements share."""

    loc: jax.Array
    scale: jax.Array

    def log_prob(self, value):
        return jax.scipy.stats.norm.logpdf(value, self.loc, self.scale).sum(-1)

    def sample(self, *, seed):
        return self.loc + self.scale * jax.random.normal(seed, self.loc.shape)


@pytest.mark.lenient_ranks
@pytest.mark.parametrize("scale", [[0.1, 2.0], [[[0.1, 2.0]]]], ids=["[D]", "[1, 1, D]"])
def test_recurrent_policies_may_share_a_leaf_of_their_distribution(scale):
    def evaluate(params, batch):
        mean = jnp.zeros((*batch.obs.shape[:-1], 2))
        return Shared(mean, jnp.array(scale)), mean[..., 0], batch.carry

    policy = pp.Policy(lambda key: {}, evaluate, lambda num_envs: jnp.zeros((num_envs, 1)))
    rollout = pp.rollout(ECHO, policy, num_envs=4, num_steps=200)
    _, batch, _ = jax.jit(rollout.collect)(jax.random.key(1), {}, rollout.init(jax.random.key(0)))
    np.testing.assert_allclose(batch.action.std((0, 1)), [0.1, 2.0], rtol=0.1)
    np.testing.assert_allclose(evaluate({}, batch)[0].log_prob(batch.action), batch.log_prob, rtol=1e-5)


@pytest.mark.parametrize("loose", ["reset", "step"])
def test_a_python_number_in_the_state_does_not_change_its_type(loose):
    env = clock(4)

    def reset(key, num_envs):
        state, obs = env.reset(key, num_envs)
        return (state, 1.0 if loose == "reset" else jnp.float32(1)), obs

    def step(key, state, action):
        after, out = env.step(key, state[0], action)
        return (after, jnp.asarray(2.0) if loose == "reset" else jnp.full((), 2.0) * 1.0), out

    rollout = pp.rollout(env._replace(reset=reset, step=step), uniform, num_envs=2, num_steps=3)
    before = jax.eval_shape(rollout.init, jax.random.key(0))
    after, *_ = jax.eval_shape(rollout.collect, jax.random.key(0), 1.0, before)
    assert before == after
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(after))


def test_a_network_that_finds_no_carry_is_told_of_the_initial_carry():
    rollout = pp.rollout(ECHO, lambda params, batch: batch.carry[0], num_envs=1, num_steps=1)
    with pytest.raises(TypeError, match=r"Policy\(initial_carry=\.\.\.\)"):  # it is a note of the exception
        rollout.collect(jax.random.key(1), {}, rollout.init(jax.random.key(0)))
