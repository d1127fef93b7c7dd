"""Dict and Tuple spaces: laws, wrappers, networks, a handwritten update, Gymnasium, and a recipe's command line."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gymnasium import spaces

import ppo_parts as pp
from ppo_parts import distributions, envs, networks
from ppo_parts._parts.losses import entropy_of
from ppo_parts.commands import export, watch
from ppo_parts.envs._wrappers import with_observations
from ppo_parts.recipes import cleanrl_ppo
from tests.common import refused
from tests.envs.common import Scripted, by_name, host
from tests.runs import tiny

KEY = jax.random.key(0)
SEEN = envs.Dict({
    "camera": envs.Box((36, 40, 3), 0, 255),
    "kind": envs.Discrete(4),
    "place": envs.Tuple((envs.Box((2,)), envs.Box((), -1, 1))),
})  # fmt: skip
ARM = envs.Box((2, 2), -2.0, np.arange(4.0).reshape(2, 2))
TAKEN = envs.Dict({"move": envs.Discrete(3), "arm": envs.Tuple((ARM, envs.MultiDiscrete((2, 2))))})


def sorting(available=True):
    """Make moves that are those available, and rewards that are where the arm goes."""

    def seen(x):
        place = 100.0 + jnp.ones(2) * x, x / 9.0
        obs = {"camera": jnp.full((36, 40, 3), 9, jnp.uint8), "kind": x % 4, "place": place}
        masks = {"move": jnp.arange(3) != x % 3, "arm": (None, None)}
        return envs.Observation(obs, masks if available else None)

    def reset(key):
        x = jax.random.randint(key, (), 0, 9)
        return x, seen(x)

    def step(key, x, action):
        x = (x + action["move"] + action["arm"][1].sum()) % 9
        return envs.Step(x, seen(x), action["arm"][0].sum(), x == 8)

    return envs.auto_reset(reset, step, SEEN, TAKEN, time_limit=5)


@pytest.fixture(scope="module")
def env():
    return envs.prepare(sorting(), normalize=True, gamma=0.9, rescale=True)


def test_trees_follow_the_laws_and_wrappers_change_their_boxes(env):
    assert envs.check_laws(sorting(), num_steps=12).episodes > 1
    few = with_observations(sorting(), lambda obs: obs._replace(available={"move": obs.available["move"]}))
    envs.check(few._replace(evaluation=lambda state: few))
    assert env.action_space.spaces["arm"].spaces[0] == envs.Box((4,), -1.0, 1.0)
    assert envs.flatten_action(sorting()).action_space.spaces["arm"].spaces[0].high.tolist() == [0, 1, 2, 3]
    assert all(env.observation_space.spaces[name] == SEEN.spaces[name] for name in ("camera", "kind"))
    state, obs = jax.jit(env.reset, static_argnums=1)(KEY, 64)
    assert obs.obs["camera"].dtype == jnp.uint8
    for x in obs.obs["place"]:
        np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-3)
        np.testing.assert_allclose(x.std(axis=0), 1, atol=1e-3)
    arm = jnp.tile(jnp.array([9.0, -9.0, 9.0, 9.0]), (64, 1)), jnp.zeros((64, 2), int)
    action = {"move": jnp.zeros(64, int), "arm": arm}
    assert env.act(action)["arm"][0].shape == (64, 2, 2)
    _, out = jax.jit(env.step)(KEY, state, action)
    np.testing.assert_array_equal(out.episode_return, 0 - 2 + 2 + 3)  # each is clipped at its own bound


@pytest.mark.lenient_ranks  # flax
def test_a_network_encodes_each_entry_and_has_a_head_for_each(env):
    policy = networks.actor_critic(env, (8,), log_std=-1.0)
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.01), jax.eval_shape(policy.init, KEY))
    assert params["params"]["Conv_0"]["kernel"].shape == (8, 8, 3, 32)
    assert params["params"]["Dense_1"]["kernel"].shape == (256 + 4 + 2 + 1, 8)
    assert params["params"]["log_std"].shape == (4,)
    _, obs = jax.jit(env.reset, static_argnums=1)(KEY, 5)
    output = jax.jit(policy.evaluate)(params, pp.Batch(obs=obs, axes=("segment",)))
    parts = output.distribution.parts
    assert (networks.action_size(env.action_space), output.value.shape) == (3 + 4 + 4, (5,))
    np.testing.assert_array_equal(parts["move"].probs > 0, obs.available["move"])
    np.testing.assert_allclose(parts["arm"][0].scale, np.exp(0.01), rtol=1e-6)
    assert isinstance(parts["arm"][1], distributions.MultiCategorical)
    rollout = pp.rollout(env, policy, num_envs=2, num_steps=4, keep_distribution=True)
    chain = pp.chain(
        pp.gae(gamma=0.9, gae_lambda=0.9), pp.shuffled_minibatches(2), pp.clipped_surrogate(clip_eps=0.2),
        pp.entropy_bonus(coef=0.1), pp.value_loss(),
    )  # fmt: skip
    learner = pp.learner(pp.microbatched(policy, 2), chain, optax.adam(0.1))

    def update(key):
        _, batch, _ = rollout.collect(key, params, rollout.init(key))
        return batch, learner.update(key, learner.init(params), batch)

    assert jax.eval_shape(update, KEY)[0].action["arm"][0].shape == (4, 2, 4)


def test_the_entropy_is_estimated_only_for_the_parts_without_a_closed_form():
    squashed = distributions.TanhNormal(distributions.Normal(jnp.zeros((4, 1)), 1.0))
    move, arm = distributions.Categorical(jnp.zeros((4, 3))), distributions.Normal(jnp.zeros((4, 2)), 2.0)
    keys, both = jax.random.split(KEY, 4000), distributions.Joint((move, squashed))
    estimated, of_part = (jnp.mean(jax.vmap(lambda key, x=x: entropy_of(x, key))(keys), 0) for x in (both, squashed))
    np.testing.assert_allclose(estimated, np.log(3) + of_part, atol=0.05)
    hybrid = distributions.Joint({"move": move, "arm": arm})
    action = {"move": jnp.arange(4) % 3, "arm": jnp.ones((4, 2))}
    np.testing.assert_allclose(hybrid.entropy(), move.entropy() + arm.entropy(), rtol=1e-6)
    log_prob = move.log_prob(action["move"]) + arm.log_prob(action["arm"])
    np.testing.assert_allclose(hybrid.log_prob(action), log_prob, rtol=1e-6)


def acting(make):
    """Roll out a policy that returns this distribution."""
    env = sorting(available=False)
    rollout = pp.rollout(env, lambda params, batch: (make(len(batch.obs.obs["kind"])), None), num_envs=2, num_steps=1)
    return lambda: jax.eval_shape(rollout.collect, KEY, {}, jax.eval_shape(rollout.init, KEY))


def move(n):
    return distributions.Categorical(jnp.zeros((n, 3)))


FEWER, KIND = envs.Dict(TAKEN.spaces | {"move": envs.Discrete(2)}), envs.Dict({"kind": envs.Discrete(4)})
test_what_does_not_fit_a_tree_is_refused = refused(
    (lambda: envs.Dict({}), "Dict: spaces must be a dict of spaces, got {}"),
    (lambda: envs.Tuple((3,)), r"Tuple: spaces must be a tuple of spaces, got \(3,\)"),
    (acting(move), r"the policy's actions are int32\[2\], but the environment takes .*: return distributions.Joint"),
    (acting(lambda n: distributions.Joint({"move": move(n), "arm": (move(n), move(n))})),
     r"int32\[2\], but each of \[2\] environments takes numbers of shape \(2, 2\)"),
    (lambda: networks.nature_cnn(sorting()), "observations must be images"),
    (lambda: networks.actor_critic(sorting()), "wrap the environment in envs.flatten_action"),
    (lambda: networks.multi_agent_actor_critic(envs.flatten_action(sorting())._replace(num_agents=2)).init(KEY),
     "observations are images"),
    (lambda: envs.fold_agents(sorting()._replace(num_agents=2), agent_id=True), "flatten them first"),
    (lambda: envs.check(sorting()._replace(action_space=FEWER)), r"(?s)available must be .*bool\[2, 2\].* got .*bool"),
    (lambda: envs.check(with_observations(sorting(), lambda obs: obs._replace(available={"arm": (None,)}))),
     r"(?s)must be like the others.*'arm': \(None,\).*got"),
    (lambda: envs.clip_action(sorting()).act({"move": 1, "arm": (jnp.ones((2, 2)),)}), r"(?s)of Tuple.*, got \(A"),
    (lambda: envs.clip_action(sorting()).act(jnp.ones(3)), r"(?s)element of Dict.*, got Array\(\[1"),
    (lambda: envs.check(sorting()._replace(observation_space=KIND)), "observation_space has shape {.kind"),
)  # fmt: skip


def robot():
    """Count the steps of a robot, whose reward is what it was told."""
    seen = spaces.Dict({
        "camera": spaces.Box(0, 255, (2, 2), np.uint8), "kind": spaces.Discrete(3, start=5),
        "pair": spaces.Tuple((spaces.Box(-1, 9, (1,)),)),
    })  # fmt: skip
    told = spaces.Tuple((spaces.Discrete(2, start=1), spaces.Dict({"arm": spaces.Box(-1, 1, (2,))})))

    def see(env):
        pair = (np.array([env.time], np.float32),)
        return {"camera": np.full((2, 2), env.time, np.uint8), "kind": 5 + env.time % 3, "pair": pair}

    def act(env):
        wheel, others = env.arrived[-1]
        env.reward = float(10 * wheel + others["arm"].sum())

    return Scripted(3, obs_space=seen, action_space=told, see=see, act=act)


@pytest.mark.parametrize("make", [lambda: by_name(robot), lambda: host(*[robot] * 16)], ids=["by name", "vector"])
def test_gymnasiums_trees_are_ours(make):
    env = make()
    assert env.action_space.spaces[0] == envs.Discrete(2)
    assert env.observation_space.spaces["kind"] == envs.Discrete(3)
    action = jnp.array([0, 1]), {"arm": jnp.array([[0.5, 0.25], [0.0, 0.0]])}
    state, _ = env.reset(KEY, 2)
    for _ in range(3):
        state, out = env.step(KEY, state, action)
    assert out.reward.tolist() == [10.75, 20.0]
    assert out.final_obs["pair"][0].tolist() == [[3.0], [3.0]]
    assert out.obs["kind"].tolist() == [0, 0]
    envs.check_laws(env, num_envs=2, num_steps=8)


@pytest.mark.lenient_ranks  # flax
def test_the_policy_of_a_recipe_with_hybrid_actions_is_watched_and_exported():
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    train = cleanrl_ppo.make_train(tiny(env_id="tasks:golf,time_limit=4"))
    state = train.jitted_init(KEY)
    assert len(list(watch.render_frames(train, state, max_steps=3))) == 3
    act, rows = export.make_policy_function(train, state)
    inputs = export.draw_inputs(rows, 50, 0)
    outputs = jax.jit(act)(*inputs.values())
    shapes = {"action['club']": (), "action['stroke']": (3, 2), "logits['club']": (3,), "loc['stroke']": (6,)}
    assert {name: x.shape[1:] for name, x in outputs.items()} == shapes | {"scale['stroke']": (6,)}
    model = export.to_onnx(train, state)
    assert export.measure_difference(model, train, state, 50) < 1e-5
    (club,) = runtime.InferenceSession(model.SerializeToString()).run(["action['club']"], inputs)
    np.testing.assert_array_equal(club, outputs["action['club']"])


def test_what_is_discrete_alone_or_privileged_is_encoded_and_not_standardized():
    def seen(x):
        return envs.Observation(jnp.int32(3), privileged={"card": jnp.int32(2), "speed": 50 + x * jnp.ones(2)})

    def step(key, x, action):
        return envs.Step(x + 1, seen(x + 1), 1.0, x > 3)

    critic = envs.Dict({"card": envs.Discrete(4), "speed": envs.Box((2,))})
    reset = lambda key: (jnp.zeros(()), seen(0.0))  # noqa: E731
    env = envs.auto_reset(reset, step, envs.Discrete(500), envs.Discrete(2), privileged_space=critic)
    prepared = envs.prepare(env, normalize=True, gamma=0.9)
    envs.check(prepared)
    assert prepared.observation_space == envs.Discrete(500)
    assert prepared.privileged_space.spaces["speed"].low == -10
    state, _ = prepared.reset(jax.random.key(0), 2)
    _, out = prepared.step(jax.random.key(1), state, jnp.zeros(2, int))
    np.testing.assert_allclose(out.obs.privileged["speed"], 1, atol=1e-4)  # of the two values that were seen
    assert (out.obs.obs == 3).all()
    assert (out.obs.privileged["card"] == 2).all()
    params = networks.actor_critic(prepared, (4,)).init(jax.random.key(0))["params"]
    assert [params[f"Dense_{i}"]["kernel"].shape[0] for i in (0, 2)] == [500, 6]
