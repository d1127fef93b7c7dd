"""Exported policies return what JAX returns."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import Policy, distributions, envs, networks, training
from ppo_parts._core.policy import apply_policy
from ppo_parts.commands import export
from ppo_parts.errors import UserValueError
from tests import recipe
from tests.envs.common import bit_game
from tests.networks.test_flax_networks import asymmetric
from tests.runs import ROOT

pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.lenient_ranks  # gymnax


def trained(env, policy):
    """Return what `export` needs of a run: statistics, and a policy with parameters that differ from the first ones."""
    params = jax.tree.map(lambda x: 1.3 * x + 0.01 * (x.ndim == 1), jax.jit(policy.init)(jax.random.key(0)))
    rollout = jax.jit(pp.rollout(env, policy, num_envs=64, num_steps=1).init)(jax.random.key(1))
    state = SimpleNamespace(learner=SimpleNamespace(params=params), rollout=rollout)
    return SimpleNamespace(env=env, policy=policy), state


def frames():
    reset = lambda key, n: ((), jnp.zeros((n, 4, 36, 36), jnp.uint8))  # noqa: E731
    return envs.make("CartPole-v1")._replace(observation_space=envs.Box((4, 36, 36), 0, 255), reset=reset)


def agents():
    """Make folded agents whose actions are clipped before they are folded."""
    return envs.fold_agents(envs.clip_action(bit_game()._replace(action_space=envs.Box((1,), 0.0, 0.1))), agent_id=True)


POLICIES = {  # an environment, a network, and how many observations are compared
    "discrete": (lambda: envs.make("CartPole-v1"), {"activation": "relu"}, 10_000),
    "squashed": (lambda: envs.make("Pendulum-v1"), {"shared": True, "squash": True, "activation": "gelu"}, 10_000),
    **{x: (lambda: envs.make("CartPole-v1"), {"shared": True, "memory": x}, 10_000) for x in ("mingru", "lru")},
    "grid": (lambda: envs.make("Breakout-MinAtar"), {"shared": True}, 10_000),
    "pixels": (frames, {"features": 64}, 100),
    "privileged": (lambda: envs.normalize_observation(asymmetric()), {"hidden": (4,)}, 100),  # only the critic sees it
    "agent": (lambda: envs.normalize_observation(agents()), {"shared": True, "memory": "mingru"}, 100),
    "choices": (lambda: recipe.walk()._replace(action_space=envs.MultiDiscrete((2, 3))), {"hidden": (16,)}, 100),
}


@pytest.mark.parametrize("name", POLICIES)
def test_models_equal_jax(name):
    make, layers, number = POLICIES[name]
    env, network = make(), networks.nature_cnn if name == "pixels" else networks.actor_critic
    train, state = trained(env, network(env, **layers))
    model = export.to_onnx(train, state, {"env_id": name})
    assert [(x.key, x.value) for x in model.metadata_props] == [("env_id", name)]
    carry = [f"carry_{i}" for i in range({"mingru": 1, "lru": 2, "agent": 1}.get(name, 0))]
    parameters = ["loc", "scale"] if name in ("squashed", "agent") else ["logits"]
    assert [x.name for x in model.graph.input] == ["obs", *carry]
    assert [x.name for x in model.graph.output] == ["action", *parameters, *(f"next_{x}" for x in carry)]
    assert export.measure_difference(model, train, state, number) < 1e-6


def session_of(model):
    session = runtime.InferenceSession(model.SerializeToString())
    names = [output.name for output in session.get_outputs()]
    return lambda **inputs: dict(zip(names, session.run(None, inputs), strict=True))


def test_actions_and_carries_follow_an_episode(tmp_path):
    """Play an episode in JAX with the environment's observations, and repeat it with the program of docs/deploy.md."""
    raw = envs.make("Pendulum-v1")
    env = envs.prepare(raw, normalize=True, gamma=0.9, rescale=True)
    train, state = trained(env, networks.actor_critic(env, (8,), shared=True, memory="lstm"))
    (tmp_path / "policy.onnx").write_bytes(export.to_onnx(train, state).SerializeToString())
    (program,) = re.findall(r"```python\n(import numpy.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
    exec(program, page := {})
    controllers = [page["Controller"](tmp_path / "policy.onnx") for _ in range(2)]
    frozen, policy = env.evaluation(state.rollout.env_state), train.policy
    env_state, seen = frozen.reset(jax.random.key(5), 2)
    _, obs = raw.reset(jax.random.key(5), 2)
    raw_state, memory = raw.reset(jax.random.key(5), 2)[0], policy.initial_carry(2)
    for _ in range(3):
        actions = [controller.act(x) for controller, x in zip(controllers, np.asarray(obs), strict=True)]
        expected = apply_policy(policy, state.learner.params, seen, memory, jnp.zeros(2, bool))
        action, memory = expected.distribution.mode(), expected.carry
        entering = 2 * jnp.clip(action, -1, 1)
        np.testing.assert_allclose(actions, entering, rtol=0, atol=1e-6)
        env_state, transition = frozen.step(jax.random.key(6), env_state, action)
        raw_state, same = raw.step(jax.random.key(6), raw_state, entering)
        seen, obs = transition.obs, same.obs


@pytest.mark.parametrize(("wrap", "greatest"), [(envs.clip_action, 0.5), (lambda env: env, 3.91)])
def test_actions_are_clipped_where_the_environment_clips_them(wrap, greatest):
    env = wrap(recipe.walk())
    evaluate = lambda p, batch: (distributions.Normal(p + batch.obs[..., :1], 1.0), None)  # noqa: E731
    run = session_of(export.to_onnx(*trained(env, Policy(lambda key: jnp.full(1, 3.0), evaluate))))
    out = run(obs=np.asarray([[0, 0], [-7.82, 0], [-3.91, 0]], np.float32))
    np.testing.assert_allclose(out["action"], [[greatest], [-greatest], [0.0]], atol=1e-5)
    np.testing.assert_allclose(out["loc"], [[3.91], [-3.91], [0.0]], atol=1e-5)


def test_beta_is_exported_with_its_parameters():
    def evaluate(params, batch):
        alpha, beta = jnp.split(1 + jax.nn.softplus(params * batch.obs[..., :2]), 2, axis=-1)
        return distributions.Beta(alpha, beta, -2.0, 2.0), None

    train, state = trained(envs.make("Pendulum-v1"), Policy(lambda key: jnp.ones(()), evaluate))
    out = session_of(export.to_onnx(train, state))(obs=np.asarray([[1, 0, 3], [-1, 2, 0]], np.float32))
    alpha, beta = np.split(1 + np.logaddexp(0, 1.3 * np.array([[1, 0], [-1, 2]])), 2, axis=-1)
    np.testing.assert_allclose(out["alpha"], alpha, rtol=1e-5)
    np.testing.assert_allclose(out["beta"], beta, rtol=1e-5)
    np.testing.assert_allclose(out["action"], 4 * (alpha - 1) / (alpha + beta - 2) - 2, rtol=1e-4)


def test_models_are_compared_where_logits_are_infinite_and_on_integers_of_their_space():
    reset = lambda key, n: ((), jnp.arange(n) % 3)  # noqa: E731
    env = envs.make("CartPole-v1")._replace(observation_space=envs.Discrete(3), reset=reset)
    for absent in (-jnp.inf, 0.0):

        def evaluate(embedding, batch):
            logits = jnp.take(embedding, batch.obs, axis=0)  # NaN beyond the last row
            return distributions.Categorical(logits.at[:, 1].set(absent)), None  # noqa: B023

        train, state = trained(env, Policy(lambda key: jnp.arange(9.0).reshape(3, 3), evaluate))
        assert export.measure_difference(export.to_onnx(train, state), train, state, 100) < 1e-6


def test_what_cannot_be_exported_is_named():
    def decomposes(params, batch):
        return distributions.Categorical(jnp.linalg.eigvalsh(batch.obs[..., None] * jnp.eye(2)) * params), None

    def mixes(params, batch):
        return distributions.Categorical(batch.obs.reshape(-1)[None] * params), None

    env = recipe.walk()
    for evaluate, message in ((decomposes, "jax2onnx raised .*eigh"), (mixes, r"output action has shape \(1,\)")):
        with pytest.raises(UserValueError, match=message):
            export.to_onnx(*trained(env, Policy(lambda key: jnp.ones(()), evaluate)))
    many = env._replace(num_agents=2)
    with pytest.raises(UserValueError, match=r"it plays 2 agents at once.*fold_agents"):
        export.to_onnx(*trained(many, networks.actor_critic(env, (4,))))


def test_the_command_writes_a_model_and_says_how_exact_it_is(folder, tmp_path, capsys):
    arguments = [str(folder), "--output", str(tmp_path / "policy.onnx"), "--seed-index", "1"]
    path = export.main(arguments)
    said = capsys.readouterr()
    assert "inputs: obs [N, 2]\noutputs: action [N, 1], loc [N, 1], scale [N, 1]\n" in said.out
    assert "seed 1 of 0 to 1 (--seed-index)" in said.err
    session = runtime.InferenceSession(path.read_bytes())
    assert session.get_modelmeta().custom_metadata_map == {"env_id": "walk", "run": arguments[0], "update": "2"}
    run = training.load(folder)
    state = jax.tree.map(lambda x: x[1], run.state)
    obs = jnp.asarray([[2.0, -2.0]])
    (loc,) = session.run(["loc"], {"obs": np.asarray(obs)})
    seen = run.train.env.observe(state.rollout.env_state, obs)
    expected = apply_policy(run.train.policy, state.learner.params, seen).distribution.loc
    np.testing.assert_allclose(loc, expected, atol=1e-6)


def test_a_model_that_differs_is_not_written_and_any_nan_is_a_difference(folder, tmp_path, monkeypatch):
    policy = Policy(lambda key: jnp.ones(1), lambda p, batch: (distributions.Normal(batch.obs[..., :1], p), None))
    train, state = trained(recipe.walk(), policy)
    model = export.to_onnx(train, state)
    state.learner.params = jnp.full(1, jnp.nan)  # this affects only the scale, which is the last output
    assert np.isnan(export.measure_difference(model, train, state, 1))
    monkeypatch.setattr(export, "measure_difference", lambda *arguments: 1e-3)
    with pytest.raises(SystemExit, match=r"the model differs from JAX by 1\.0e-03"):
        export.main([str(folder), "--output", str(tmp_path / "policy.onnx")])
    with pytest.raises(SystemExit, match=r"policy\.pt must end with \.onnx"):
        export.main([str(folder), "--output", str(tmp_path / "policy.pt")])
    assert not [*tmp_path.iterdir()]
    assert export.main([str(folder), "--output", str(tmp_path / "policy.onnx"), "--tolerance", "1e-2"]).exists()
