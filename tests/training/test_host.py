"""Runs in environments on the host, whose state no checkpoint can store."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from ppo_parts import envs, training
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training._folder import RunFolder
from tests.envs.test_host_envs import Scripted, host
from tests.runs import go, rows, tiny

crash = SimpleNamespace(steps_left=np.inf)


@pytest.fixture(scope="module")
def host_train():
    """Episodes of seven steps, each of which is paid 1."""

    def act(env):
        crash.steps_left -= 1
        if crash.steps_left == 0:
            raise RuntimeError("the simulator crashed")

    env = host(*[lambda: Scripted(7, reward=1.0, act=act)] * 2)
    return cleanrl_ppo.make_train(tiny(), env=envs.prepare(env, normalize=True, gamma=0.99))


def test_a_run_on_the_host_resumes_with_new_episodes_and_old_statistics(host_train, tmp_path, capsys):
    def stop(new):
        if new[-1]["update"] >= 3:
            raise training.StopRun("enough")

    folder, _ = go(host_train, tmp_path, "run", on_rows=stop, eval_episodes=2)
    done = len(rows(folder))
    assert 4 <= done < host_train.num_updates
    stopped = RunFolder(folder).restore(host_train)[1]
    folder, result = go(host_train, None, "", resume=folder, eval_episodes=2)
    assert "no checkpoint can store them: new episodes begin" in capsys.readouterr().out
    assert [row["update"] for row in rows(folder)] == list(range(host_train.num_updates))
    assert result["evaluation"]["episode_return"]["mean"] == 7
    final = RunFolder(folder).restore(host_train)[1]
    before, after = (int(state.rollout.env_state.inner.moments.seen) for state in (stopped, final))
    assert before == 2 * (done * 8 + 1)  # the observations of the reset, and of each step
    assert after == 2 * (host_train.num_updates * 8 + 2)  # statistics go on after a second reset


def test_an_error_on_the_host_loses_no_update(host_train, tmp_path, monkeypatch):
    monkeypatch.setattr(crash, "steps_left", 7 * host_train.steps_per_update + 3)
    with pytest.raises(RuntimeError, match=r"^the simulator crashed$"):
        go(host_train, tmp_path, "run")
    folder = tmp_path / "run"
    recorded = len(rows(folder))
    assert recorded == 6  # two updates in each call; a checkpoint is due after every fourth
    assert RunFolder(folder).checkpoints.steps()[-1] == recorded  # saved because of the error
    go(host_train, None, "", resume=folder)
    assert len(rows(folder)) == host_train.num_updates
    assert json.loads((folder / "result.json").read_text())
