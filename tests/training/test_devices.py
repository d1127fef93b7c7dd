"""Runs on several simulated devices have the same rows up to rounding; several seeds have the same bits."""

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest

from benchmarks.devices import read_operations
from ppo_parts import envs, training
from ppo_parts.recipes import async_ppo, cleanrl_ppo
from ppo_parts.training import _program
from tests import recipe
from tests.common import alone, assert_close, assert_same
from tests.runs import ByTwos, checkpoint, go, rows, tiny
from tests.training.test_cli import reached

CONFIG = tiny(6 * 2, num_envs=8, num_steps=4, num_minibatches=1, shards=4)


def last_program():
    """Return the last program of updates that was compiled."""
    return [*ByTwos.programs.values()][-1]


def check_environments(place):
    """Check that four devices continue a run of one with its rows and last state, and that devices send only sums."""
    env = envs.prepare(recipe.walk(), normalize=True, gamma=0.9)
    run = functools.partial(go, cleanrl_ppo.make_train(CONFIG, env), place, config=CONFIG, eval_episodes=3)
    expected, result = run("one")
    several = Path(shutil.copytree(expected, place / "several"))
    _, other = run(None, resume=several, checkpoint=4, num_devices=4)
    assert "all-reduce(" in last_program().as_text()
    assert "all-gather(" not in last_program().as_text()
    assert_close(rows(several), rows(expected), 1e-4, 1e-5)
    found, whole = ({**checkpoint(x), "checksum of the rest": 0} for x in (several, expected))
    assert_close(found, whole, 1e-4, 1e-5)
    assert other["evaluation"]["episode_length"] == pytest.approx(result["evaluation"]["episode_length"])
    assert "num_devices" not in json.loads((several / "config.json").read_text())["run"]


def check_seeds(place):
    """Check that four seeds on two devices have the bits of one device, and that no device needs another."""
    config = recipe.Config()
    run = functools.partial(go, recipe.make_train(config), place, config=config, num_seeds=4)
    expected, _ = run("one")
    several, _ = run("several", num_devices=2)
    assert read_operations(last_program()) == []
    assert rows(several) == rows(expected)
    assert_same(checkpoint(several), checkpoint(expected))


def check_population(place):
    """Check that four members on two devices have the bits of one device, also after a selection."""
    config, ranges = recipe.Config(total_timesteps=64), {"learning_rate": training.Range(1e-3, 1e-1)}
    train = training.population(recipe.make_train, ranges, members=4, every=2, fraction=0.25, metric="loss")(config)
    (expected, _), (several, _) = (go(train, place, f"on_{n}", config, num_devices=n) for n in (1, 2))
    assert rows(several)[1]["population/parent"] != [0, 1, 2, 3]
    assert rows(several) == rows(expected)
    assert_same(checkpoint(several), checkpoint(expected))
    with pytest.raises(ValueError, match="members must be a multiple of the 3 devices"):
        go(train, place, "on_3", config, num_devices=3)


def check_refusals():
    """Check that a run refuses what devices cannot share before it has a folder; shards follow --num-devices."""
    train, host = cleanrl_ppo.make_train(CONFIG), SimpleNamespace(on_host=True)
    for run, options, message in (
        (train, {"num_devices": 8}, "must be at most the 4 that JAX finds, got 8; .*device_count=8 simulates"),
        (train, {"num_devices": 3}, "shards=4 cannot be divided over a mesh of 3 devices"),
        (train, {"num_devices": 2, "num_seeds": 3}, "num_devices must divide the 3 seeds, got 2"),
        (host, {"num_devices": 2}, "num_devices must be 1 for environments on the host, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            training.Program(run, 1, training.RunOptions(**options))

    with pytest.raises(ValueError, match=r"distributed needs jax.distributed.initialize"):
        go(train, Path("unused"), "run", config=CONFIG, distributed=True)

    for flags, shards in {"": 2, "--shards 4": 4, "--num-seeds 2": None}.items():
        assert reached("--num-devices", "2", *flags.split())[0].shards == shards
    assert reached()[0].shards is None
    with pytest.raises(SystemExit, match=r"--num-envs must be a multiple of the 3 devices \(--num-devices\), got 4"):
        reached("--num-devices", "3")


def check_one_ahead(place):
    """Check an actor that collects one rollout ahead, whose program has arrays on two devices."""
    config = recipe.Config(total_timesteps=48, shards=2)
    folder, _ = go(recipe.make_train(config), place, "run", config, async_ppo.OneAhead, num_devices=2)
    assert [row["update"] for row in rows(folder)] == [0, 1, 2]


@mock.patch.object(jax, "process_count", return_value=2)
def check_processes(_):
    """Check that gathering compiles once, and that programs in two threads, whose order could differ, are refused."""
    program = training.Program(cleanrl_ppo.make_train(CONFIG), 1, training.RunOptions())
    numbers = jax.device_put(np.arange(4), jax.NamedSharding(program.mesh, _program.SEEDS))
    gathered = [program.gather(numbers) for _ in range(2)]
    assert all(x.is_fully_replicated for x in gathered)
    assert program._gather._cache_size() == 1
    with pytest.raises(ValueError, match=r"OneAhead: a run must have one process, got 2: .*mujoco_ppo"):
        async_ppo.OneAhead(cleanrl_ppo.make_train(CONFIG), 1, training.RunOptions())


def check_runs(place):
    check_refusals()
    check_processes()
    check_one_ahead(Path(place) / "ahead")
    check_environments(Path(place) / "environments")
    check_seeds(Path(place) / "seeds")
    check_population(Path(place) / "population")


def test_runs_on_several_devices(tmp_path):
    alone(check_runs, str(tmp_path))
