"""Checkpoints are complete, are what they say they are, or are skipped."""

import shutil
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


def test_checkpoint_holds_any_tree_of_arrays(tmp_path, monkeypatch):
    state = {
        "haiku/~/linear_0": {"w.b": jnp.arange(6.0).reshape(2, 3)}, "none": None, "empty": jnp.zeros((0, 3)),
        "half": jnp.ones(3, jnp.bfloat16), "flag": jnp.array([True, False]), "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2), "list": [jnp.int32(5), np.float32(0.1)],
    }  # fmt: skip
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    (tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir(parents=True)  # left by a process that was killed
    for step in (3, 10, 20):
        checkpoints.save(step, state | {"list": [jnp.int32(step), np.float32(0.1)]})
    assert steps(tmp_path) == checkpoints.steps() == [10, 20]
    step, found = checkpoints.restore(state)
    assert (step, int(found["list"][0])) == (20, 20)
    assert jax.random.key_impl(found["keys"]) == jax.random.key_impl(state["keys"])
    step, found = checkpoints.restore(state, 10)
    assert int(found["list"][0]) == step == 10
    assert_same(jax.tree.map(raw, found | {"list": 0}), jax.tree.map(raw, state | {"list": 0}))
    wide = {"float": np.array([0.1, 1e300]), "integer": np.array(2**40)}  # wider than JAX's default dtypes
    Checkpoints(tmp_path / "wide").save(1, wide)
    for name, x in Checkpoints(tmp_path / "wide").restore(wide)[1].items():
        np.testing.assert_array_equal(x, wide[name], strict=True)
    single = Checkpoints(tmp_path / "single")
    single.save(1, jnp.ones(3))
    np.testing.assert_array_equal(single.restore(jnp.zeros(3))[1], np.ones(3))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint 3 in .*: there are 10, 20"):
        checkpoints.restore(state, 3)
    with pytest.raises(ValueError, match=r"flag has bool\[2\], expected float32\[2\].*"):
        checkpoints.restore(state | {"flag": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"more is missing; flag is not expected"):
        checkpoints.restore({k: v for k, v in state.items() if k != "flag"} | {"more": jnp.zeros(1)})
    with pytest.raises(ValueError, match=r"two arrays named 'a\.b': rename the entry \['a\.b'\]"):
        checkpoints.save(30, {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}})
    with pytest.raises(ValueError, match=r"its entry 'note' is array\('x', .*: leave it out"):
        checkpoints.save(30, {"note": "x"})
    with pytest.warns(RuntimeWarning, match=r"checkpoints later than 11, \[20\], which restore would prefer: save to"):
        checkpoints.save(11, state)
    assert checkpoints.steps() == [10, 11, 20]

    def die(path, **_):
        for file in Path(path).rglob("_METADATA"):
            file.unlink()
        raise Crash

    monkeypatch.setattr(shutil, "rmtree", die)  # the new one is complete before an old one is damaged
    with pytest.raises(Crash):
        Checkpoints(tmp_path / "checkpoints", keep=1).save(30, state)
    assert checkpoints.steps() == [11, 20, 30]
    assert checkpoints.restore(state)[0] == 30


def cut(folder):
    for path in folder.rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(folder):
    """Change what orbax does not notice."""
    arrays = checkpoint(folder.parents[1], int(folder.name))
    del arrays["step"]
    name = next(name for name in arrays if name.endswith("kernel"))
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder.resolve(), arrays | {name: np.asarray(arrays[name]) + 1}, force=True)


def test_checkpoint_that_is_damaged_is_passed_over(train, broken, whole, tmp_path):
    missing = "a file in it is missing or damaged"
    for damage, says in ((cut, missing), (change, "its contents do not match")):
        folder = Path(shutil.copytree(broken, tmp_path / damage.__name__))
        damage(folder / "checkpoints" / "8")
        with pytest.warns(RuntimeWarning, match=rf"damaged checkpoint in .*, going back to 4; 8: {says}"):
            go(train, None, "", resume=folder)
        assert_same_run(folder, whole[0])
    for step in ("4", "8"):
        (broken / "checkpoints" / step / "_METADATA").unlink()
    with pytest.raises(OSError, match=rf"no checkpoint in .* can be read; 8: {missing}.*; 4: "):
        go(train, None, "", resume=broken)


def test_checkpoint_best_is_kept_besides_the_latest(train, make_train, evaluated, tmp_path):
    returns = {update: metrics["evaluation/episode_return"] for update, metrics in evaluations(evaluated[0]).items()}
    assert set(steps(evaluated[0])) >= {4, 5, 8, 12}  # these are all that were made
    best = max(returns, key=returns.get)
    folder, result = go(train, tmp_path, "run", **EVALUATED | {"keep_checkpoints": 1})
    assert result["best"] == {"metric": "evaluation/episode_return", "update": best, "value": returns[best]}
    assert steps(folder) == sorted({best, 12})
    run = training.load(folder, make_train, checkpoint="best")
    assert run.update == best == int(run.state.learner.step)


def test_checkpoint_best_is_judged_by_the_last_tenth_of_the_run_before_it(train, tmp_path, whole):
    folder, result = go(train, tmp_path, "run", best_metric="grad_norm", keep_checkpoints=1)
    norms = training.select_metric(rows(whole[0]), "grad_norm")[3::4]
    assert result["best"] == {"metric": "grad_norm", "update": 4 * (norms.argmax() + 1), "value": norms.max()}
    assert steps(folder) == sorted({4 * (norms.argmax() + 1), 12})

    def best(checkpoints, window=1):
        run = RunFolder(folder, {"num_updates": 10 * window}, training.RunOptions(best_metric="x"))
        run.tracked = {0: 1.0, 1: 5.0, 2: np.nan, 3: 3.0, 5: 3.0}
        run.checkpoints.steps = lambda: checkpoints
        return run.find_best()

    assert best(range(1, 7)) == (2, 5.0)
    assert best([1, 3, 4, 6]) == (4, 3.0)  # the first of two, and nothing at 3
    assert best([2, 4], window=2) == (2, 3.0)  # (1 + 5) / 2, and 3 alone
    assert best([1, 6], window=4) == (6, 3.0)
    assert best([3, 5]) is None


def test_checkpoint_that_is_replaced_while_it_is_read(monkeypatch, train, whole, tmp_path):
    """Another process writes, so what has disappeared must not be called damaged."""
    folder = Path(shutil.copytree(whole[0], tmp_path / "run"))
    read = Checkpoints._read

    def replaced(self, number):
        if number == 12:
            shutil.rmtree(folder / "checkpoints" / "12")
        return read(self, number)

    monkeypatch.setattr(Checkpoints, "_read", replaced)
    assert RunFolder(folder).restore(train)[0] == 8
