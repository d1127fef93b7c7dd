"""Non-finite numbers: they end a run, or are skipped and counted, and are never saved."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import envs
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training import _run
from tests.common import assert_same
from tests.runs import checkpoint, go, rows, steps, tiny


@pytest.fixture(scope="module")
def faulty_run():
    """Never ends; in step 20, in update 2, the reward is not a number, which could spoil statistics permanently."""

    def step(key, time, action):
        return envs.Step(time + 1, jax.random.normal(key, (3,)), jnp.where(time == 20, jnp.nan, 1.0), terminated=False)

    reset = lambda key: (jnp.int32(0), jax.random.normal(key, (3,)))  # noqa: E731
    env = envs.auto_reset(reset, step, envs.Box((3,)), envs.Discrete(2))
    config = tiny(6)
    return cleanrl_ppo.make_train(config, envs.prepare(env, normalize=True, gamma=config.gamma)), config


@pytest.fixture(scope="module")
def stopped(faulty_run, place):
    train, config = faulty_run
    message = (
        r"^update 3: non-finite numbers arose first in reward \(2 elements\), then in .*"
        r"its last checkpoint, of update 2, is sound.*--on-nonfinite skip skips such updates"
    )
    with pytest.raises(FloatingPointError, match=message):
        go(train, place, "stopped", config, log_every=6, checkpoint_every=1)
    return place / "stopped"


def test_nonfinite_remedy_that_is_offered_works(faulty_run, stopped, capsys):
    """The update changes nothing, and is counted; all that is kept is finite."""
    train, config = faulty_run
    assert [row["nonfinite/reward"] for row in rows(stopped)] == [0, 0, 2]
    options = {"on_nonfinite": "skip", "checkpoint_every": 1, "keep_checkpoints": None}
    folder, result = go(train, None, "", config, resume=stopped, **options)
    found = rows(folder)
    assert [row["nonfinite/reward"] for row in found] == [0, 0, 2, 0, 0, 0]
    assert [row["nonfinite/gradient"] > 0 for row in found] == [False, False, True, False, False, False]
    kept = {name: x for name, x in checkpoint(folder).items() if "episode_return" not in name}
    assert all(np.isfinite(x).all() for x in kept.values() if np.issubdtype(np.asarray(x).dtype, np.floating))
    assert (result["skipped_minibatches"], result["skipped_share"]) == (2, 1 / 6)
    assert "2 minibatches (17%) had no effect" in capsys.readouterr().out
    before, after = (
        {name: x for name, x in checkpoint(folder, step).items() if name.startswith("learner")} for step in (2, 3)
    )
    assert (before.pop("learner.step"), after.pop("learner.step")) == (2, 3)
    assert_same(before, after)


def test_nonfinite_parameters_are_never_saved(train, tmp_path):
    """Finite gradients can lead to them, as with Adam and eps = 0."""

    def update(key, state, batch):
        new, metrics = train.learner.update(key, state, batch)
        poison = jnp.where(state.step == 5, jnp.nan, 0.0)
        return new._replace(params=jax.tree.map(lambda x: x + poison, new.params)), metrics

    poisoned = dataclasses.replace(train, learner=train.learner._replace(update=update))
    message = (
        r"^update 6: non-finite numbers arose first in parameters \(\d+ elements\)\. .* checkpoint, of update 4, is"
    )
    with pytest.raises(FloatingPointError, match=message):
        go(poisoned, tmp_path, "run", checkpoint_every=2)
    assert steps(tmp_path / "run") == [2, 4]
    assert [row["nonfinite/parameters"] > 0 for row in rows(tmp_path / "run")] == [False] * 5 + [True]


def test_nonfinite_report_is_of_the_first_update():
    """What follows from it comes later, and would be listed as the cause in a sum over updates."""
    measured = {
        "loss": np.zeros((4, 2)),
        "nonfinite/reward": np.zeros((4, 2), int),
        "nonfinite/log_prob": np.array([[0, 0], [0, 0], [0, 16], [0, 16]]),
        "nonfinite/gradient": np.array([[0, 0], [0, 1], [0, 4], [0, 4]]),
    }
    first, text = _run.first_nonfinite(measured)
    assert first == 1
    assert text == " (seed 1 of 2, from 0): non-finite numbers arose first in gradient (1 minibatch)"
    assert _run.first_nonfinite(measured | {"population/parent": np.zeros((4, 2))})[1].startswith(" (member 1 of 2")
    assert _run.first_nonfinite({"loss": np.zeros(3), "nonfinite/reward": np.zeros(3, int)}) is None
    assert _run.first_nonfinite({"loss": np.zeros(3)}) is None
