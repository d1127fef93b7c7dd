"""The networks of the recipes: initialization, parameter trees, inputs and outputs; and what libraries lack."""

import functools
import re
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import envs, networks
from ppo_parts.functional._recurrence import solve_associatively
from ppo_parts.networks._cpu import convolve_by_products
from ppo_parts.recipes import pufferlib_ppo
from tests import common

pytestmark = pytest.mark.lenient_ranks  # flax adds biases [H] to [T, N, H]
BOX = SimpleNamespace(low=-np.ones(2, np.float32), high=np.ones(2, np.float32), shape=(2,))
DISCRETE, HEAD = SimpleNamespace(n=3, shape=()), jnp.zeros((4, 3))
PAIR = envs.Dict({"a": envs.Box((2,)), "b": envs.Discrete(1)})
CHOICES, KEYS = envs.MultiDiscrete((2, 3)), jax.random.split(jax.random.key(0), 3)


def env(action_space, shape=(5,), num_agents=None):
    return envs.Env(None, None, SimpleNamespace(shape=shape), action_space, None, num_agents)


def assert_orthogonal(kernel, gain):
    kernel = np.asarray(kernel)
    small = kernel.T @ kernel if kernel.shape[0] >= kernel.shape[1] else kernel @ kernel.T
    np.testing.assert_allclose(small, gain**2 * np.eye(len(small)), atol=1e-5)


def test_actor_critic_is_orthogonal_with_cleanrls_gains():
    params = jax.jit(networks.actor_critic(env(DISCRETE), (16, 8)).init)(jax.random.key(0))["params"]
    assert len(params) == 6
    for number, gain in enumerate((2**0.5, 2**0.5, 0.01, 2**0.5, 2**0.5, 1.0)):  # gains of the actor and of the critic
        assert_orthogonal(params[f"Dense_{number}"]["kernel"], gain)
        assert not params[f"Dense_{number}"]["bias"].any()
    assert params["Dense_2"]["kernel"].shape == (8, 3)


def test_a_head_is_divided_among_the_choices():
    head = jax.random.normal(jax.random.key(0), (4, 5))
    available = jnp.array([[True, False, False, True, True]] * 4)
    assert networks.action_size(CHOICES) == 5
    found = networks.action_distribution(CHOICES, head, available=available)
    masked = pp.distributions.mask_logits(head, available)
    for part, logits in zip(found.parts, (masked[:, :2], masked[:, 2:]), strict=True):
        np.testing.assert_allclose(part.logits, pp.distributions.Categorical(logits).logits, rtol=1e-6)
    several = networks.action_distribution(envs.Tuple((BOX, DISCRETE)), head, 0.0)
    np.testing.assert_array_equal(several.parts[0].scale, 1.0)


@pytest.mark.parametrize("leading", [(), (7,), (2, 3), (0,)])
def test_actor_critic_takes_any_leading_axes_and_flattens_what_is_seen(leading):
    policy = networks.actor_critic(env(DISCRETE, shape=(4, 2)), (8,))
    params = jax.eval_shape(policy.init, jax.random.key(0))
    output = jax.eval_shape(lambda p: policy(p, pp.Batch(obs=jnp.ones((*leading, 4, 2), int))), params)
    assert output.value.shape == leading
    assert output.distribution.logits.shape == (*leading, 3)
    assert (output.value.dtype, output.carry) == (jnp.float32, None)


@pytest.mark.parametrize(("squash", "kind"), [(False, pp.distributions.Normal), (True, pp.distributions.TanhNormal)])
def test_actor_critic_of_continuous_actions_starts_with_a_standard_deviation_of_one(squash, kind):
    policy = networks.actor_critic(env(BOX), (8,), squash=squash)
    params = jax.jit(policy.init)(jax.random.key(0))
    assert params["params"]["log_std"].tolist() == [0, 0]
    distribution = policy(params, pp.Batch(obs=jnp.ones((4, 5)))).distribution
    assert type(distribution) is kind
    assert distribution.mode().shape == (4, 2)


def asymmetric():
    """Make an environment in which the policy sees one number, and the critic others."""

    def reset(key):
        x = jax.random.normal(key, (3,))
        return x, envs.Observation(x[:1], privileged={"one": x[1], "two": x[1:]})

    def step(key, x, action):
        return envs.Step(*reset(key), reward=x[2], terminated=False)

    space = envs.Dict({"one": envs.Box(()), "two": envs.Box((2,))})
    return envs.auto_reset(reset, step, envs.Box((1,)), envs.Discrete(3), time_limit=5, privileged_space=space)


def test_the_critic_sees_what_the_policy_does_not():
    game = asymmetric()
    envs.check(game)
    policy = networks.actor_critic(game, hidden=(8,))
    params, (_, obs) = jax.jit(policy.init)(jax.random.key(0)), game.reset(jax.random.key(1), 4)

    def totals(obs):
        output = policy(params, pp.Batch(obs=obs))
        return {"logits": jnp.sum(output.distribution.logits[..., 0]), "value": jnp.sum(output.value)}

    slopes = jax.jit(jax.jacrev(totals))(obs)
    seen = {name: (bool(jnp.any(x.obs)), bool(jnp.any(x.privileged["two"]))) for name, x in slopes.items()}
    assert seen == {"logits": (True, False), "value": (False, True)}
    normalized = envs.normalize_observation(game)
    for memory in (None, "lstm"):
        policy = networks.actor_critic(normalized, hidden=(4,), memory=memory)
        rollout = pp.rollout(normalized, policy, num_envs=2, num_steps=6, shards=2)
        state = rollout.init(jax.random.key(2))
        _, batch, _ = jax.jit(rollout.collect)(jax.random.key(0), policy.init(jax.random.key(1)), state)
        assert batch.obs.privileged["two"].shape == (6, 2, 2)
        assert jnp.all(jnp.isfinite(batch.next_value))


CELLS = ("lstm", "gru", "mingru", "lru")


@pytest.mark.parametrize("cell", CELLS)
def test_shared_actor_critic_with_memory_forgets_where_it_is_reset(cell):
    """All steps at once, which are a parallel scan in "mingru" and "lru", do the same as one step after another."""
    policy = networks.actor_critic(env(DISCRETE), (8, 4), "gelu", shared=True, memory=cell)
    params = jax.jit(policy.init)(jax.random.key(0))
    assert_orthogonal(params["params"]["Dense_3"]["kernel"], 1.0)  # the head of the value
    assert_orthogonal(params["params"]["Dense_2"]["kernel"], 0.01)
    obs, reset = jax.random.normal(jax.random.key(1), (6, 2, 5)), jnp.zeros((6, 2), bool).at[3, 0].set(True)
    carry = jax.tree.map(lambda x: jax.random.normal(jax.random.key(2), x.shape), policy.initial_carry(2))
    assert {leaf.shape for leaf in jax.tree.leaves(carry)} == {(2, 4)}
    evaluate = jax.jit(policy.evaluate)
    whole = evaluate(params, pp.Batch(obs=obs, carry=carry, reset=reset))
    later = evaluate(params, pp.Batch(obs=obs[3:], carry=carry, reset=reset[3:]))
    np.testing.assert_allclose(whole.value[3:, 0], later.value[:, 0], atol=1e-6)
    assert np.abs(whole.value[3:, 1] - later.value[:, 1]).max() > 1e-4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b[0], atol=1e-6), whole.carry, later.carry)
    for t in range(6):
        step = evaluate(params, pp.Batch(obs=obs[t : t + 1], carry=carry, reset=reset[t : t + 1]))
        np.testing.assert_allclose(whole.value[t], step.value[0], atol=1e-6)
        carry = step.carry
    common.assert_close(carry, whole.carry)


class Memory(nn.Module):
    cell: str = "lru"

    @nn.compact
    def __call__(self, x, carry, reset):
        return networks.recurrent(x, carry, reset, self.cell)


def test_the_states_of_an_lru_are_those_of_its_equation():
    x, reset = jax.random.normal(jax.random.key(0), (9, 2, 4)), jnp.zeros((9, 2), bool).at[5, 1].set(True)
    carry = tuple(jax.random.normal(jax.random.key(1), (2, 2, 4)))
    network = Memory()
    params = network.init(jax.random.key(2), x, carry, reset)
    _, after = jax.jit(network.apply)(params, x, carry, reset)
    given = params["params"]["LRU_0"]
    eigenvalue = np.exp(-np.exp(given["decay"]) + 1j * np.asarray(given["angle"]))
    assert (np.abs(eigenvalue) > 0.9).all()
    assert (np.abs(eigenvalue) < 0.999).all()
    state = np.asarray(carry[0] + 1j * carry[1])
    for t in range(9):
        inputs = x[t] @ given["Dense_0"]["kernel"]
        inputs = np.sqrt(1 - np.abs(eigenvalue) ** 2) * (inputs[:, :4] + 1j * inputs[:, 4:])
        state = eigenvalue * state * (1 - reset[t, :, None]) + inputs
    np.testing.assert_allclose(after[0] + 1j * after[1], state, atol=1e-5)
    forever = {**given, "decay": jnp.full(4, -30.0)}  # the modulus is rounded to 1
    gradient = jax.grad(lambda of_cell: jnp.sum(network.apply({"params": {"LRU_0": of_cell}}, x, carry, reset)[0]))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient(forever)))


@pytest.mark.parametrize(("cell", "on_gpu"), [*((x, False) for x in CELLS), ("mingru", True), ("lru", True)])
def test_no_nan_passes_a_reset(cell, on_gpu, monkeypatch):
    """Neither the carry nor an earlier step of the same call passes one on, in value or gradient."""
    if on_gpu:
        associatively = lambda times: functools.partial(solve_associatively, times=times)  # noqa: E731
        monkeypatch.setattr(networks._memory, "choose_solver", associatively)
    x, reset = jax.random.normal(jax.random.key(0), (6, 2, 4)), jnp.zeros((6, 2), bool).at[3].set(True)
    network, carry = Memory(cell), networks.initial_carry(cell, (2, 4))
    params = network.init(jax.random.key(2), x, carry, reset)

    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def total(params, x, carry):
        y, last = network.apply(params, x, carry, reset[-len(x) :])
        return sum(jnp.sum(jnp.sin(each)) for each in jax.tree.leaves((y[-3:], last)))

    value, (of_params, of_x) = total(params, x[3:], carry)
    common.assert_close(total(params, x[3:], jax.tree.map(lambda c: c + jnp.nan, carry)), (value, (of_params, of_x)))
    found, (_, of_poisoned) = total(params, x.at[1].set(jnp.nan), carry)
    common.assert_close((found, of_poisoned[3:]), (value, of_x))
    empty, same = network.apply(params, x[:0], carry, reset[:0])
    assert empty.shape == (0, 2, 4)
    common.assert_close(same, carry)


@pytest.mark.parametrize("memory", [None, "lstm"])
def test_independent_agents_play_by_parameters_of_their_own(memory):
    settings = {"hidden": (4,), "memory": memory}
    policy = networks.multi_agent_actor_critic(env(DISCRETE, num_agents=2), **settings, independent=True)
    params = jax.jit(policy.init)(jax.random.key(0))
    assert set(params) == {"actor", "critic"}
    assert {leaf.shape[0] for leaf in jax.tree.leaves(params)} == {2}
    available = jnp.ones((6, 2, 2, 3), bool).at[..., 0, 1].set(False)
    obs = envs.Observation(jax.random.normal(jax.random.key(1), (6, 2, 2, 5)), available)
    carry = policy.initial_carry(2) if memory else None
    batch = pp.Batch(obs=obs, carry=carry, reset=jnp.zeros((6, 2, 2), bool))
    both = jax.jit(policy.evaluate)(params, batch)
    assert both.value.shape == (6, 2, 2)
    assert not both.distribution.probs[..., 0, 1].any()  # it is not available
    evaluate = jax.jit(networks.multi_agent_actor_critic(env(DISCRETE, num_agents=2), **settings).evaluate)
    for agent in range(2):
        alone = evaluate(jax.tree.map(lambda x, i=agent: x[i], params), batch)
        np.testing.assert_allclose(both.value[..., agent], alone.value[..., agent], atol=1e-6)
        logits = (output.distribution.logits[..., agent, :] for output in (both, alone))
        np.testing.assert_allclose(*logits, atol=1e-6)


def test_a_central_critic_sees_what_all_agents_see_of_any_shape():
    seen = envs.share_observations(jnp.arange(12.0).reshape(2, 3, 2))
    np.testing.assert_array_equal(seen[1], [[6, 7, 8, 9, 10, 11]] * 3)
    obs = jax.random.normal(jax.random.key(1), (3, 2, 5))
    other = obs.at[:, 1].add(1.0)
    for inputs, moves in ((lambda obs: (obs, obs), False), (lambda obs: (obs, envs.share_observations(obs)), True)):
        policy = networks.multi_agent_actor_critic(env(BOX, num_agents=2), inputs, (4,))
        params = jax.jit(policy.init)(jax.random.key(0))
        evaluate = jax.jit(policy.evaluate)
        one, two = (evaluate(params, pp.Batch(obs=envs.Observation(x))) for x in (obs, other))
        np.testing.assert_array_equal(one.distribution.loc[:, 0], two.distribution.loc[:, 0])
        assert bool((one.value[:, 0] != two.value[:, 0]).all()) is moves
    for space in (envs.Box((2, 3)), envs.Discrete(5)):
        policy = networks.multi_agent_actor_critic(AGENTS._replace(observation_space=space), hidden=(4,))
        obs = jnp.zeros((7, 2, *space.shape), getattr(space, "dtype", jnp.float32))
        assert policy.evaluate(policy.init(jax.random.key(0)), pp.Batch(obs=obs)).value.shape == (7, 2)


def pixels(space):
    return env(DISCRETE)._replace(observation_space=space)


FLOATS = SimpleNamespace(shape=(2, 36, 36), low=0.0, high=255.0, dtype=np.dtype(np.float32))
BOUNDED, AGENTS = env(envs.Box((2,), -1.0, 1.0)), env(DISCRETE, num_agents=2)
INPUT, ONE, RESET, KERNEL = jnp.zeros((7, 2, 4)), jnp.zeros((2, 4)), jnp.zeros((7, 2), bool), jnp.ones((5, 2))
FRAMES, UNCLEAR = (2, 36, 36), "do not tell whether pixels must be divided by 255"
CARRY = r"'lru' needs a carry of shape \(\(2, 4\), \(2, 4\)\) and a reset"


# These are called with arguments that are given later.
MADE = (
    networks.actor_critic, networks.multi_agent_actor_critic, networks.action_distribution, networks.nature_cnn,
    networks.dense_dot_general,
)  # fmt: skip
remember = functools.partial(functools.partial, Memory().init, KEYS[0], INPUT)
critic, agents, head, cnn, dense = (functools.partial(functools.partial, function) for function in MADE)


def observe(obs):
    policy = networks.actor_critic(env(DISCRETE), (4,))
    return lambda: policy.evaluate(policy.init(jax.random.key(0)), pp.Batch(obs=obs))


PRIVILEGED = envs.Observation(jnp.zeros((1, 1, 5)), privileged=jnp.zeros((1, 1, 2)))
test_networks_say_what_is_wrong = common.refused(
    (observe(jnp.zeros((4, 3))), r"with shape \(5,\) must end with these axes, got shape \(4, 3\)"),
    (critic(env(DISCRETE, shape=None)), "not a space of arrays"),
    (critic(env(DISCRETE), hidden=64), "hidden must be a tuple with the units of each layer, got 64"),
    (critic(env(DISCRETE), hidden=(64, 0)), "hidden must be at least 1, got 0"),
    (critic(env(DISCRETE), activation="swish"), "'tanh', 'relu', 'gelu', 'elu', 'silu', got 'swish'"),
    (critic(env(DISCRETE), memory="rnn"), "one of 'lstm', 'gru', 'mingru', 'lru', None, got 'rnn'"),
    (critic(env(DISCRETE), memory="lstm"), "actor and critic: give shared=True"),
    (critic(asymmetric(), memory="lstm", hidden=()), r"needs hidden layers, got hidden=\(\)"),
    (critic(asymmetric(), shared=True), "cannot share layers"),
    (critic(env(DISCRETE), gsde=True), "gsde must be False, because the actions are discrete"),
    (critic(env(DISCRETE), squash=True), "squash must be False, because the actions are discrete"),
    (critic(BOUNDED, log_std="a"), "log_std must be a number"),
    (critic(BOUNDED, log_std=[0.0, 1.0]), "log_std must be a number|one number"),
    (head(DISCRETE, HEAD, squash=True), "squash must be False .* because the"),
    (head(DISCRETE, HEAD, features=HEAD), "features None, because the"),
    (head(BOX, HEAD[:, :2]), "need log_std"),
    (critic(env(envs.Box((0,)))), r"at least one number, but those of Box.* have shape \(0,\): leave it out"),
    (head(envs.Box((3,)), HEAD, HEAD, squash=True), "box must be finite"),
    (head(BOX, HEAD[:, :2], 0.0, available=HEAD[:, :2]), "available must be None, because .* continuous"),
    (head(PAIR, HEAD, 0.0, available={"a": HEAD[:, :2], "b": None}), "available must be None, because .* continuous"),
    (head(PAIR, HEAD, 0.0, available=HEAD), "action_distribution: available is one array"),
    (head(PAIR, HEAD, 0.0, available=(None,)), "available has 1 masks for the 2 entries"),
    (head(BOX, HEAD[:, :2], jnp.zeros((5, 2))), r"log_std of shape \(5, 2\) does not fit arrays of shape \(4, 2\)"),
    *((head(DISCRETE, HEAD, x), "log_std must be an array, got") for x in ("x", [0.0])),
    (head(envs.Box((3,)), HEAD, jnp.zeros(2)), r"log_std must have 3 numbers .*, got shape \(2,\)"),
    (head(CHOICES, jnp.zeros((4, 4))), "head must have 5 numbers along its last axis for Multi.*got"),
    (head(CHOICES, jnp.zeros((4, 5)), available=jnp.ones((4, 4))), "available must have 5 numbers along its last axis"),
    (head(CHOICES, jnp.zeros(5), available=jnp.array([0, 0, 1, 1, 1])), "available must have an option in each row"),
    (head(PAIR, HEAD, 0.0, available={"c": HEAD}), "available has masks of 'c', which"),
    (agents(env(DISCRETE)), "no axis of agents"),
    (agents(AGENTS, hidden=(), memory="gru"), "needs hidden"),
    (agents(AGENTS._replace(observation_space=FLOATS)), "observations are images"),
    (agents(AGENTS._replace(privileged_space=envs.Box((3,)))), r"have a privileged part \(Box\(shape=\(3,\)"),
    (agents(AGENTS, lambda obs: obs), r"must return a tuple of two arrays \[..., 2, D'\].*it returns \(1, 1, 2, 5\)$"),
    (agents(AGENTS, lambda obs: (obs, obs[..., 0, :])), r"it returns \(1, 1, 2, 5\), \(1, 1, 5\)$"),
    (agents(AGENTS, lambda obs: ()), r"it returns \(\)$"),
    (lambda: networks.mlp(HEAD, 64), "mlp: hidden must be a tuple with the units of each layer, got 64"),
    (cnn(env(DISCRETE, (10, 10, 4))), r"images of at least 36 x 36 pixels, got .*10, 10, 4"),
    *((cnn(pixels(space)), UNCLEAR) for space in (FLOATS, *(envs.Box(FRAMES, *x) for x in ((), (0, 128), (-128, 1))))),
    (remember(None, RESET), f"{CARRY}.* pass the whole policy"),
    *((remember(*x), CARRY) for x in ((ONE, RESET), ((ONE, ONE[:, :3]), RESET), ((ONE, ONE), RESET[0]))),
    (observe(PRIVILEGED), r"privileged part .* float32\[1, 1, 2\], but .* is None: give both"),
    (dense(KERNEL.T, KERNEL, (((0,), (0,)), ((), ()))), "only"),
    (dense(KERNEL.T, KERNEL, (((1,), (0,)), ((), ())), precision="highest"), "precision"),
    (lambda: networks.initial_carry("gru", 4), "shape must be a tuple, got 4"),
    (lambda: networks.orthogonal()(KEYS[0], (2, 2), jnp.int32), "dtype must be floating, got int32"),
    (lambda: networks.orthogonal()(KEYS[0], (5,)), r"at least two axes, got shape \(5,\)"),
)


def test_an_unknown_network_is_named():
    assert "mlp" in dir(networks)
    with pytest.raises(AttributeError, match="no attribute 'perceptron'"):
        networks.perceptron  # noqa: B018


@pytest.mark.parametrize(("shape", "size", "stride"), [((2, 39, 42, 3), 8, 4), ((1, 9, 7, 2), 3, 1)])
def test_a_convolution_by_products_is_that_of_xla(shape, size, stride):
    """This includes filters that do not reach the last rows and columns."""
    draws = np.random.default_rng(0)
    x, kernel = draws.normal(size=shape), draws.normal(size=(size, size, shape[-1], 5))
    layout = ("NHWC", "HWIO", "NHWC")
    expected = jax.lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=layout)
    np.testing.assert_allclose(convolve_by_products(jnp.asarray(x), kernel, stride), expected, atol=1e-4)


def test_nature_cnn_divides_bytes_only_and_evaluates_single_frames():
    """Golden traces of CleanRL have the numbers of this network."""
    of_bytes, scaled = (networks.nature_cnn(pixels(envs.Box(FRAMES, 0, high)), features=8) for high in (255, 1))
    params = jax.jit(of_bytes.init)(jax.random.key(0))
    frames = jax.random.randint(jax.random.key(1), (2, 3, *FRAMES), 0, 256).astype(jnp.uint8)
    whole = jax.jit(of_bytes.evaluate)(params, pp.Batch(obs=frames))
    for policy, obs in ((of_bytes, frames[1, 2]), (scaled, frames[1, 2] / 255)):
        value = jax.jit(policy.evaluate)(params, pp.Batch(obs=obs)).value
        np.testing.assert_allclose(value, whole.value[1, 2], rtol=1e-4, atol=1e-6)
    assert jax.eval_shape(of_bytes.evaluate, params, pp.Batch(obs=frames[:0])).value.shape == (0, 3)


def ranks_of_factorised(function):
    """Return the rank of what each LAPACK call of the vmapped function takes: 2 for a matrix, 3 for a batch."""
    text = jax.jit(jax.vmap(function)).lower(KEYS).as_text()
    return {len(shape.split("x")) - 1 for shape in re.findall(r"@lapack_\w+\(.* : \(tensor<((?:\d+x)*)", text)}


@pytest.mark.parametrize(("shape", "outputs"), [((5,), 2), ((3, 7, 40), 2), ((7, 40), 50), ((0, 40), 2)])
@pytest.mark.parametrize("stacked", [False, True])
def test_dense_dot_general_gives_flax_dense_with_its_gradients(shape, outputs, stacked):
    x = jax.random.normal(jax.random.key(0), shape)
    plain, ours = nn.Dense(outputs), nn.Dense(outputs, dot_general=networks.dense_dot_general)
    params = jax.vmap(plain.init, (0, None))(KEYS, x)

    def gradients(layer):
        differentiated = jax.value_and_grad(lambda *given: jnp.sum(jnp.sin(layer.apply(*given))), argnums=(0, 1))
        given = params if stacked else jax.tree.map(lambda kernel: kernel[0], params)
        return jax.jit(jax.vmap(differentiated, (0, None)) if stacked else differentiated)(given, x)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), gradients(ours), gradients(plain))


def test_dense_dot_general_takes_integers():
    x, contracted = jnp.arange(24).reshape(3, 8), (((1,), (0,)), ((), ()))
    gradient = jax.grad(lambda kernel: jnp.sum(networks.dense_dot_general(x, kernel, contracted)))(jnp.ones((8, 3)))
    np.testing.assert_array_equal(gradient, jnp.broadcast_to(jnp.sum(x, axis=0)[:, None], (8, 3)))


@pytest.mark.parametrize("shape", [(6, 6), (3, 5), (2, 2, 3, 4), (3, 0)])
def test_orthogonal_has_the_numbers_of_jax(shape):
    ours, theirs = (f(2**0.5) for f in (networks.orthogonal, jax.nn.initializers.orthogonal))
    np.testing.assert_array_equal(ours(KEYS[0], shape, jnp.float32), theirs(KEYS[0], shape, jnp.float32))
    gains = jnp.array([0.01, 1.0, 2.0])  # of vmapped networks
    made = jax.jit(jax.vmap(lambda key, gain: networks.orthogonal(gain)(key, shape)))(KEYS, gains)
    expected = [gain / 2**0.5 * theirs(key, shape) for key, gain in zip(KEYS, gains, strict=True)]
    np.testing.assert_allclose(made, jnp.stack(expected), atol=1e-6)
    narrow = networks.orthogonal(2**0.5, dtype=jnp.bfloat16)  # this is computed in float32
    np.testing.assert_array_equal(narrow(KEYS[0], shape), ours(KEYS[0], shape).astype(jnp.bfloat16), strict=True)
    assert jax.eval_shape(lambda key: narrow(key, shape, jnp.float16), KEYS[0]).dtype == jnp.float16


def test_training_factorises_one_matrix_at_a_time_with_any_initialiser(monkeypatch):
    """A batch of them can block every thread of a CPU; see docs/decisions/0004-batched-lapack.md."""
    sizes = {"total_timesteps": 16, "num_envs": 2, "num_steps": 8, "num_minibatches": 2, "hidden": 8, "memory": "lstm"}
    train = pufferlib_ppo.make_train(pufferlib_ppo.Config(**sizes, update_epochs=1))
    assert ranks_of_factorised(train.policy.init) == {2}
    for module in (networks._layers, networks._memory):
        monkeypatch.setattr(module, "orthogonal", jax.nn.initializers.orthogonal)
    assert ranks_of_factorised(train.policy.init) == {3}
    assert ranks_of_factorised(train) == {2}
