"""The CleanRL recipe: its configuration, its network, the environments it takes, and its command line."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import envs, training
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.recipes.cleanrl_ppo import PRESETS, Config, make_train
from tests.envs.test_rollout import echo
from tests.runs import arguments, compiled_programs_kept_in, rows, tiny

pytestmark = pytest.mark.lenient_ranks  # distrax, gymnax


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with compiled_programs_kept_in(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(autouse=True)
def optimized_when_slow():
    """Set once for the whole module (`cache`)."""


def main(*argv, run=training.run):
    return training.main(cleanrl_ppo.make_train, PRESETS, argv=[*argv], run=run)


def test_defaults_are_those_of_cleanrl():
    """`ppo.py` and `ppo_continuous_action.py` at commit fe8d8a0, where the fields exist."""
    shared = {
        "gamma": 0.99, "gae_lambda": 0.95, "anneal_lr": True, "norm_adv": True, "clip_coef": 0.2, "clip_vloss": True,
        "vf_coef": 0.5, "max_grad_norm": 0.5, "target_kl": None, "seed": 1, "hidden": (64, 64),
    }  # fmt: skip
    assert dataclasses.asdict(PRESETS["discrete"]).items() >= {
        **shared, "total_timesteps": 500_000, "learning_rate": 2.5e-4, "num_envs": 4, "num_steps": 128,
        "num_minibatches": 4, "update_epochs": 4, "ent_coef": 0.01, "env_id": "CartPole-v1",
    }.items()  # fmt: skip
    assert dataclasses.asdict(PRESETS["continuous"]).items() >= {
        **shared, "total_timesteps": 1_000_000, "learning_rate": 3e-4, "num_envs": 1, "num_steps": 2048,
        "num_minibatches": 32, "update_epochs": 10, "ent_coef": 0.0, "normalize_env": True,
    }.items()  # fmt: skip
    assert PRESETS["discrete"] == Config()


@pytest.mark.parametrize("env_id", ["Breakout-MinAtar", "FrozenLake-misc", "Reacher-misc"])
def test_any_gymnax_environment_can_be_trained_in(env_id):
    """Observations of any shape and type, actions of both kinds: traced (`make_train` does), not compiled."""
    train = make_train(tiny(2, env_id=env_id, normalize_env=env_id.startswith("Reacher")))
    result = jax.eval_shape(train, jax.random.key(0))
    assert result.metrics["episode_return"].shape == (2,)


def test_continuous_actions_are_clipped_before_anything_is_normalized():
    for normalized in (False, True):  # the observation is the action that arrived
        env = envs.prepare(echo(-1.0, 0.5), normalize=normalized, gamma=0.99)
        state, _ = env.reset(jax.random.key(0), 2)
        state, out = env.step(jax.random.key(0), state, jnp.array([[9.0, -9.0], [0.25, 0.0]]))
        if normalized:
            seen = state.inner.moments
            np.testing.assert_allclose(seen.mean, np.mean([[0, 0], [0, 0], [0.5, -1.0], [0.25, 0.0]], axis=0))
        else:
            assert out.obs.tolist() == [[0.5, -1.0], [0.25, 0.0]]


def test_rescaled_actions_reach_the_bounds_of_the_box():
    rescaled = envs.prepare(echo(-1.0, 0.5), rescale=True)
    for env in (rescaled, rescaled.evaluation(())):
        assert (env.action_space.low, env.action_space.high) == (-1, 1)
        _, out = env.step(jax.random.key(0), (), jnp.array([[9.0, -9.0], [0.0, 0.5]]))
        assert out.obs.tolist() == [[0.5, -1.0], [-0.25, 0.125]]
    same, _ = jax.random.normal(jax.random.key(0), (2, 1000)) / 3
    _, out = envs.rescale_action(echo(-1.0, 1.0)).step(jax.random.key(0), (), same.reshape(-1, 2))
    np.testing.assert_array_equal(out.obs, jnp.clip(same, -1, 1).reshape(-1, 2))
    assert envs.prepare(envs.make("CartPole-v1"), rescale=True).action_space.n == 2


def test_an_observation_without_a_shape_is_refused(monkeypatch):
    parts = object()
    cartpole = envs.make("CartPole-v1")
    for changes in ({"observation_space": parts}, {"action_space": parts}):
        monkeypatch.setattr(envs, "make", lambda env_id, changes=changes: cartpole._replace(**changes))
        with pytest.raises(ValueError, match=r"object.* is not a space of arrays.* flatten"):
            make_train(tiny())


def test_options_of_the_chain():
    """Each switch changes the program it should: what is counted and logged, and what is learned."""
    stopping = make_train(tiny(2, target_kl=0.0, update_epochs=3))
    metrics = jax.jit(stopping)(jax.random.key(0)).metrics
    assert metrics["epochs"].tolist() == [1, 1]  # after the first epoch any policy has moved
    assert metrics["minibatches"].tolist() == [2, 2]
    assert metrics["early_stopped"].tolist() == [1, 1]
    shapes = jax.eval_shape(make_train(tiny(2, norm_adv=False, clip_vloss=False)), jax.random.key(0))
    assert "early_stopped" not in shapes.metrics


def test_the_learning_rate_is_annealed_over_updates():
    """With plain numbers: the step of Adam has the size of the learning rate, in the first update and in the last."""

    def largest_steps(config):
        train = make_train(config)

        def step(state, _):
            after, _ = train.step(state)
            moved = jax.tree.map(lambda x, y: jnp.abs(x - y).max(), after.learner.params, state.learner.params)
            return after, jnp.max(jnp.stack(jax.tree.leaves(moved)))

        return jax.lax.scan(step, train.init(jax.random.key(0)), length=train.num_updates)[1]

    config = tiny(4, num_minibatches=1, learning_rate=0.01, max_grad_norm=1e9)
    annealed, constant = jax.jit(
        lambda: (largest_steps(config), largest_steps(dataclasses.replace(config, anneal_lr=False)))
    )()
    np.testing.assert_allclose(annealed[0], 0.01, rtol=0.02)  # Adam's first step, whatever the gradient
    np.testing.assert_allclose(constant[0], annealed[0], rtol=1e-5)
    np.testing.assert_allclose(annealed[1] / constant[1], 0.75, rtol=0.02)
    assert np.all(np.asarray(annealed[1:]) < 0.8 * np.asarray(constant[1:]))


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    options = ["--directory", str(folder), "--name", "run", "--no-progress", "--no-tensorboard", "--eval-episodes", "2"]
    return folder / "run", main(*arguments(tiny(4)), *options)


def test_the_command_line_trains(trained):
    folder, result = trained
    assert len(rows(folder)) == 4
    assert json.loads((folder / "result.json").read_text())["config"] == json.loads(json.dumps(result["config"]))
    assert result["config"] == dataclasses.asdict(tiny(4))
    assert result["evaluation"]["episodes"] == 2
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "metrics.jsonl", "result.json", "curve.png", "checkpoints", ".lock")
    }


def test_resuming_keeps_the_configuration_and_the_options(trained):
    folder, _ = trained
    seen = []

    def run(train, config, options):
        seen.append((config, options))
        return {}

    main("--resume", str(folder), run=run)
    main("--resume", str(folder), "--eval-episodes", "7", "--tensorboard", run=run)
    (config, options), (_, given) = seen
    assert config == tiny(4)
    assert (options.eval_episodes, options.tensorboard, options.num_seeds) == (2, False, 1)
    assert (given.eval_episodes, given.tensorboard) == (7, True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-minibatches", "3"], "error: --num-minibatches must divide the 16 steps .*, got 3"),
        (["--total-timesteps", "9"], "error: --total-timesteps must be at least one update, .* got 9"),
        (["--env-id", "Cartpole-v1"], "error: gymnax has no environment 'Cartpole-v1'; did you mean CartPole-v1"),
        (["--num-seeds", "0"], "error: --num-seeds must be at least 1"),
    ],
)
def test_a_mistake_ends_with_one_sentence_and_leaves_nothing(tmp_path, argv, message):
    with pytest.raises(SystemExit, match=message):
        main(*arguments(tiny()), "--directory", str(tmp_path), *argv)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_it_learns_to_balance():
    train = make_train(Config(total_timesteps=150_000))
    result = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), 2))
    returns = training.last_episodes_return(result.metrics["episode_return"], result.metrics["episodes"])
    assert float(returns.min()) > 250, returns


def test_the_continuous_preset_trains_with_minibatches_that_are_evaluated_in_pieces():
    """It ended with "compiled for 81 inputs but called with 33": the distribution kept arrays outside its leaves."""
    sizes = {"num_envs": 256, "num_steps": 64, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 256 * 64}
    config = dataclasses.replace(PRESETS["continuous"], **sizes)
    assert config.microbatch == "auto"
    result = jax.jit(make_train(config))(jax.random.key(0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.learner.params))
    assert result.metrics["minibatches"].tolist() == [1]
    assert np.isfinite(result.metrics["loss"]).all()
    assert not result.metrics["nonfinite/gradient"].any()
