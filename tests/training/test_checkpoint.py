"""Checkpoints: complete, what they say they are, or passed over."""

import contextlib
import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from ppo_parts import training
from ppo_parts.training._checkpoint import Checkpoints
from ppo_parts.training._folder import RunFolder
from tests.common import assert_same
from tests.runs import EVALUATED, Crash, assert_same_run, checkpoint, evaluations, go, raw, rows, steps


def test_checkpoint_holds_any_tree_of_arrays(tmp_path):
    state = {
        "haiku/~/linear_0": {"w.b": jnp.arange(6.0).reshape(2, 3)},
        "none": None,
        "empty": jnp.zeros((0, 3)),
        "half": jnp.ones(3, jnp.bfloat16),
        "flag": jnp.array([True, False]),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2),
        "list": [jnp.int32(5), np.float32(0.1)],
    }
    with_one = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (3, 10, 20):
        with_one.save(step, state | {"list": [jnp.int32(step), np.float32(0.1)]})
    assert with_one.steps() == [10, 20]
    step, found = with_one.restore(state)
    assert step == 20
    assert int(found["list"][0]) == 20
    assert jax.random.key_impl(found["keys"]) == jax.random.key_impl(state["keys"])
    step, found = with_one.restore(state, 10)
    assert int(found["list"][0]) == step == 10
    assert_same(jax.tree.map(raw, found | {"list": 0}), jax.tree.map(raw, state | {"list": 0}))
    with pytest.raises(FileNotFoundError, match="no checkpoint 3 in"):
        with_one.restore(state, 3)
    with pytest.raises(ValueError, match=r"flag has bool\[2\], expected float32\[2\].*"):
        with_one.restore(state | {"flag": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"more is missing; flag is not expected"):
        with_one.restore({k: v for k, v in state.items() if k != "flag"} | {"more": jnp.zeros(1)})
    with_one.set_aside(20, tmp_path / "aside")
    assert with_one.steps() == [10]
    with_one.save(20, state)
    assert with_one.steps() == [10, 20]
    with_one.close()
    shutil.copytree(tmp_path / "aside", tmp_path / "checkpoints" / "30")
    with pytest.warns(RuntimeWarning, match="going back to 20; 30: it was renamed or copied: it is checkpoint 20"):
        assert with_one.restore(state)[0] == 20
    other = Checkpoints(tmp_path / "checkpoints", configuration="another")
    with pytest.raises(OSError, match=r"20: it is of a run with another configuration"):
        other.restore(state)
    with_one.close()


def test_checkpoint_gives_way_on_a_full_disk(monkeypatch, tmp_path):
    """The older ones, which would be removed afterwards, are removed before; never the last one."""
    room, write = [2], Checkpoints._write

    def with_room(self, step, arrays):
        if len(self.steps()) >= room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, step, arrays)

    monkeypatch.setattr(Checkpoints, "_write", with_room)
    with contextlib.closing(Checkpoints(tmp_path, keep=2)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": jnp.ones(3)}, best=2)
        assert checkpoints.steps() == [2, 3]
        room[0] = 1
        with pytest.raises(OSError, match=r"4 could not be written: .*No space left"):
            checkpoints.save(4, {"x": jnp.ones(3)}, best=2)
        assert checkpoints.steps() == [2, 3]


def test_checkpoint_that_cannot_be_written_is_one_sentence(tmp_path):
    """Files may not grow here; orbax and tensorstore print nothing of their own."""
    code = f"""if True:
        import resource, jax.numpy as jnp
        from ppo_parts import training
        state = {{str(i): jnp.arange(1e4) * i for i in range(8)}}
        checkpoints = training.Checkpoints({str(tmp_path)!r})
        checkpoints.save(1, state)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        for step in (2, 3):
            with training.exit_on_user_error():
                checkpoints.save(step, state)
        """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}/2 could not be written: ")
    assert Checkpoints(tmp_path).steps() == [1]


def test_checkpoint_is_on_the_disk_before_older_ones_go(monkeypatch, tmp_path):
    events, fsync, rmtree = [], os.fsync, shutil.rmtree
    monkeypatch.setattr(os, "fsync", lambda file: events.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file))
    monkeypatch.setattr(shutil, "rmtree", lambda path, **given: events.append("removed") or rmtree(path, **given))
    with contextlib.closing(Checkpoints(tmp_path, keep=1)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.ones(3)})
    synced = events[: events.index("removed")]
    assert {str(tmp_path / "2" / "state" / "_METADATA"), str(tmp_path / "2" / "state"), str(tmp_path)} <= set(synced)


def damage(folder, how):
    if how == "cut":
        for path in folder.rglob("d/*"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "changed":  # as orbax sees it, nothing is wrong
        arrays = checkpoint(folder.parents[1], int(folder.name))
        del arrays["step"]
        name = next(name for name in arrays if name.endswith("kernel"))
        arrays[name] = np.asarray(arrays[name]) + np.eye(*arrays[name].shape, dtype=np.float32)
        shutil.rmtree(folder / "state")
        with ocp.StandardCheckpointer() as writer:
            writer.save((folder / "state").resolve(), arrays)
    elif how == "renamed":
        shutil.rmtree(folder)
        shutil.copytree(folder.with_name("4"), folder)
    elif how == "gone":
        (folder / "state" / "_METADATA").unlink()
    else:
        shutil.rmtree(folder / "state")


def test_checkpoint_that_is_damaged_is_passed_over(train, broken, whole, tmp_path):
    for how in ("cut", "changed", "gone", "empty", "renamed"):
        folder = Path(shutil.copytree(broken, tmp_path / how))
        damage(folder / "checkpoints" / "8", how)
        kind = {"changed": "its contents", "renamed": "it was renamed"}.get(how, "a file in it is missing or damaged")
        with pytest.warns(RuntimeWarning, match=rf"damaged checkpoint in .*, going back to 4; 8: {kind}"):
            state = RunFolder(folder).restore(train)[1]
        assert int(state.learner.step) == 4
    half = folder / "checkpoints" / "9.orbax-checkpoint-tmp"  # a half-written one is removed
    (half / "default").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match=r"going back to 4; 8: it was renamed"):
        go(train, None, "", resume=folder)
    assert not half.exists()
    assert_same_run(folder, whole[0])
    for step in ("4", "8"):
        damage(broken / "checkpoints" / step, "gone")
    with pytest.raises(OSError, match=r"no checkpoint in .* can be read; 8: .*; 4: "):
        go(train, None, "", resume=broken)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # tensorstore, on what it cannot read
def test_checkpoint_with_a_changed_byte_is_refused_or_the_same(crashed, tmp_path, train):
    """A checksum over names and contents: whatever comes back is right, or it is refused."""
    like = jax.eval_shape(train.init, jax.random.key(0))
    like = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if "key" not in str(x.dtype) else jax.random.key(0), like)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        expected = Checkpoints(crashed / "checkpoints").restore(like, 8)[1]
        rng = random.Random(0)
        refused = 0
        for i in range(12):
            folder = tmp_path / str(i)
            shutil.copytree(crashed / "checkpoints", folder)
            files = [p for p in (folder / "8").rglob("*") if p.is_file() and p.stat().st_size]
            path = rng.choice(sorted(p for p in files if "ocdbt.process_0" not in p.parts))  # those that are read
            content = bytearray(path.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
            try:
                found = Checkpoints(folder).restore(like, 8)[1]
            except (OSError, ValueError):
                refused += 1
                continue
            assert_same(jax.tree.map(raw, found), jax.tree.map(raw, expected))
    assert refused > 0


def test_checkpoint_best_is_kept_besides_the_latest(train, make_train, evaluated, tmp_path):
    found = evaluations(evaluated[0])
    returns = {update: metrics["evaluation/episode_return"] for update, metrics in found.items()}
    assert set(steps(evaluated[0])) >= {4, 5, 8, 12}  # all that were made
    for mode, best in {"max": max(returns, key=returns.get), "min": min(returns, key=returns.get)}.items():
        folder, result = go(train, tmp_path, mode, **EVALUATED | {"keep_checkpoints": 1, "best_mode": mode})
        assert result["best"] == {"metric": "evaluation/episode_return", "update": best, "value": returns[best]}
        assert steps(folder) == sorted({best, 12})
        run = training.load(folder, make_train, checkpoint="best")
        assert run.update == best == int(run.state.learner.step)


def test_checkpoint_best_is_judged_by_the_mean_since_the_one_before(train, tmp_path, whole):
    folder, result = go(train, tmp_path, "run", best_metric="grad_norm", best_mode="min", keep_checkpoints=1)
    norms = training.column(rows(whole[0]), "grad_norm").reshape(3, 4).mean(1)
    assert result["best"] == {"metric": "grad_norm", "update": 4 * (norms.argmin() + 1), "value": norms.min()}
    assert steps(folder) == sorted({4 * (norms.argmin() + 1), 12})


def test_checkpoint_best_is_complete_before_the_old_one_goes(monkeypatch, train, tmp_path):
    """A new best is complete before the old one goes; what is half removed is no checkpoint."""
    options = EVALUATED | {"keep_checkpoints": 1}
    undisturbed, _ = go(train, tmp_path, "undisturbed", **options)
    removed = []

    def rmtree(path, *args, **given):
        if path.name.endswith("tmp"):
            removed.append(path.name)
            for file in path.rglob("_METADATA"):
                file.unlink()
            raise Crash
        return before(path, *args, **given)

    before = shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        with pytest.raises(Crash):
            go(train, tmp_path, "run", **options)
    assert removed == ["4.orbax-checkpoint-tmp"]
    assert Checkpoints(tmp_path / "run/checkpoints").steps() == [5]
    folder, _ = go(train, None, "", resume=tmp_path / "run", **options)
    assert_same_run(folder, undisturbed)
    assert steps(folder) == steps(undisturbed)


def test_checkpoint_that_is_replaced_while_it_is_read(monkeypatch, make_train, whole, tmp_path):
    """Another process writes; what is loaded is then the later one, and nothing is called damaged."""
    folder = Path(shutil.copytree(whole[0], tmp_path / "run"))
    shutil.move(folder / "checkpoints" / "12", tmp_path / "12")
    read = Checkpoints._read

    def replaced(self, number):
        if number == 8:
            shutil.rmtree(folder / "checkpoints" / "8")
            shutil.move(tmp_path / "12", folder / "checkpoints" / "12")
        return read(self, number)

    monkeypatch.setattr(Checkpoints, "_read", replaced)
    assert training.load(folder, make_train).update == 12
