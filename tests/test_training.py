"""Training runs: what they leave, that they go on as if never interrupted, and what they say when they cannot."""

import contextlib
import dataclasses
import errno
import json
import os
import random
import re
import shutil
import signal
import struct
import time
from pathlib import Path

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import scipy.stats

from ppo_parts import envs, training
from ppo_parts._cpu import sequential_vmap_on_cpu
from ppo_parts.training import RunOptions, _packed, _records, _run
from ppo_parts.training._checkpoint import Checkpoints
from ppo_parts.training._evaluate import metrics_of
from ppo_parts.training._records import best_update
from ppo_parts.training._statistics import interval
from recipes import cleanrl_ppo, pufferlib_ppo
from tests.common import Softmax, assert_same
from tests.running import arguments, assert_same_run, checkpoint, compiled_programs_kept_in, rows, start, tiny
from tests.test_rollout import clock

pytestmark = pytest.mark.lenient_ranks  # distrax, gymnax
UPDATES = 12
QUIET = {"checkpoint_every": 4, "log_every": 2, "tensorboard": False, "progress": False}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Programs compiled here, also by the processes started here."""
    folder = tmp_path_factory.mktemp("cache")
    with compiled_programs_kept_in(folder):
        yield folder


@pytest.fixture(autouse=True)
def quick_compilation():
    """Set once for the whole module (`cache`), because runs of different tests are compared to the last bit."""


@pytest.fixture(scope="module", autouse=True)
def compiled_once(cache):
    """One program for all runs of one `Train`; `test_processes_that_are_interrupted_and_killed` compiles for itself."""
    compiled, programs = _run._compiled, {}

    def remembered(step, state, size):
        if (step, size) not in programs:
            programs[step, size] = compiled(step, state, size)
        return programs[step, size]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_run, "_compiled", remembered)
        yield


@pytest.fixture(scope="module")
def train():
    return cleanrl_ppo.make_train(tiny(UPDATES))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def go(train, place, name, config=None, **options):
    """A quiet run; returns its folder and its result."""
    where = {} if "resume" in options else {"directory": place, "name": name}
    result = training.run(train, config or tiny(UPDATES), RunOptions(**{**QUIET, **options, **where}))
    return options["resume"] if "resume" in options else place / name, result


@pytest.fixture(scope="module")
def whole(train, place):
    """A run that nothing interrupted."""
    return go(train, place, "whole", eval_episodes=3, tensorboard=True)


def interrupted(monkeypatch, train, place, name, after, action, **options):
    """A run in which `action` happens when the updates up to `after` have been computed, but nothing of them kept."""
    compiled = _run._compiled

    def compiled_with_action(*args):
        advance, done = compiled(*args), 0

        def advance_then_act(state, number):
            nonlocal done
            result, done = advance(state, number), done + number
            if done == after:
                action()
            return result

        return advance_then_act

    with monkeypatch.context() as patch:
        patch.setattr(_run, "_compiled", compiled_with_action)
        return go(train, place, name, **options)


class Crash(Exception):
    pass


def crash():
    raise Crash


@pytest.fixture(scope="module")
def crashed(train, place):
    """A run that died after update 10 was written down, with checkpoints of 4 and 8; copy it before you touch it."""

    def append(self, new):
        before(self, new)
        if len(self.rows) == 10:
            raise Crash

    before = _records.MetricsFile.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_records.MetricsFile, "append", append)
        with pytest.raises(Crash):
            go(train, place, "crashed")
    return place / "crashed"


@pytest.fixture
def broken(crashed, tmp_path):
    return Path(shutil.copytree(crashed, tmp_path / "broken"))


# --- a pure function of a key --------------------------------------------------------------------------------------


def test_train_is_a_pure_function_of_its_key_and_of_numbers_in_the_configuration(train, whole):
    """One program over keys and hyperparameters; where they are the run's own, it does what the host loop did."""
    config = tiny(UPDATES)

    def swept(key, learning_rate, clip_coef, ent_coef):
        changes = {"learning_rate": learning_rate, "clip_coef": clip_coef, "ent_coef": ent_coef}
        return cleanrl_ppo.make_train(dataclasses.replace(config, **changes))(key)

    own = (1, config.learning_rate, config.clip_coef, config.ent_coef)
    columns = zip(own, (2, *own[1:]), (1, 0.02, *own[2:]), (1, *own[1:3], 1.0), (1, 0.02, 0.01, own[3]), strict=True)
    keys, *numbers = (jnp.array(column) for column in columns)
    result = jax.jit(jax.vmap(swept))(jax.vmap(jax.random.key)(keys), *numbers)
    metrics = {name: np.asarray(x) for name, x in result.metrics.items()}
    assert set(metrics) >= {"episode_return", "episode_length", "episodes", "loss", "approx_kl", "minibatches"}
    assert {x.shape for x in metrics.values()} == {(5, UPDATES)}
    assert result.state.learner.step.tolist() == [UPDATES] * 5
    for row in rows(whole[0]):
        for name, values in metrics.items():
            expected = np.nan if row[name] is None else row[name]
            np.testing.assert_allclose(values[0, row["update"]], expected, rtol=1e-3, atol=1e-5, err_msg=name)
    ratio_differs = 2  # updates after which the first minibatch's effect is seen
    for other in range(1, 5):
        assert np.abs(metrics["loss"][other, ratio_differs:] - metrics["loss"][0, ratio_differs:]).max() > 1e-4, other
    assert np.abs(metrics["clip_fraction"][4] - metrics["clip_fraction"][2]).max() > 0.1
    alone = jax.eval_shape(jax.jit(train), jax.random.key(0))
    assert jax.tree.structure(alone) == jax.tree.structure(result)
    assert {x.shape for x in alone.metrics.values()} == {(UPDATES,)}


def test_packed_metrics_are_found_again():
    """Counts stay whole, and what is not finite stays where it was."""
    rng = np.random.default_rng(0)
    metrics = {
        "b": rng.normal(size=(5, 2)).astype(np.float32),
        "count": np.full((5, 2), 2**24 + 1, np.int32),
        "a": np.full((5, 2), np.nan, np.float32),
        "c": np.ones((5, 2), np.float32),
        "other": np.arange(5, dtype=np.int32),
    }
    packed = _packed.pack(metrics)
    assert {x.shape for x in packed.values()} == {(5, 2, 3), (5, 2, 1), (5, 1)}
    names = _packed.groups(metrics)
    assert_same(jax.jit(lambda packed: _packed.unpack(packed, names))(packed), metrics)


@pytest.mark.parametrize(("backend", "shape"), [("cpu", (3,)), ("gpu", (2, 3))])
def test_updates_of_many_seeds_take_turns_on_a_cpu(monkeypatch, backend, shape):
    """So they do where the function holds something that the vmap is over."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)

    def scaled(x, factor):
        def update(x):
            return {"scaled": factor * jnp.sin(x)}, x

        return sequential_vmap_on_cpu(update)(x)

    x, factor = jnp.arange(6.0).reshape(2, 3), jnp.array([2.0, 3.0])
    found = jax.jit(jax.vmap(scaled))(x, factor)
    np.testing.assert_allclose(found[0]["scaled"], factor[:, None] * jnp.sin(x), rtol=1e-6)
    np.testing.assert_array_equal(found[1], x)
    assert f"f32[{','.join(map(str, shape))}] = sin" in str(jax.make_jaxpr(jax.vmap(scaled))(x, factor))


def test_what_cannot_work_fails_when_it_is_made():
    with pytest.raises(ValueError, match=r"num_minibatches=3 does not divide the 16 steps .* nearest that do: 1, 2, 4"):
        cleanrl_ppo.make_train(tiny(num_minibatches=3))
    with pytest.raises(ValueError, match=r"total_timesteps=15 is less than one update, .* 2 \* 8 = 16 steps"):
        cleanrl_ppo.make_train(tiny(total_timesteps=15))
    with pytest.raises(ValueError, match="num_envs must be at least 1, got 0"):
        cleanrl_ppo.make_train(tiny(num_envs=0))
    with pytest.raises(TypeError, match=r"num_steps must be a whole number, got 8\.0"):
        cleanrl_ppo.make_train(tiny(num_steps=8.0))


# --- what a run leaves ---------------------------------------------------------------------------------------------


def test_a_run_leaves_its_configuration_metrics_picture_and_result(whole):
    folder, result = whole
    stored = json.loads((folder / "config.json").read_text())
    assert stored["config"]["hidden"] == [8]
    assert stored["run"]["eval_episodes"] == 3
    assert stored["versions"]["jax"] == jax.__version__
    found = rows(folder)
    assert [row["update"] for row in found] == list(range(UPDATES))
    assert [row["env_steps"] for row in found] == [16 * (i + 1) for i in range(UPDATES)]
    ended = [row for row in found if row["episodes"]]
    assert ended
    assert all((row["episode_return"] is None) == (row["episodes"] == 0) for row in found)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert result["curve"] == str(folder / "curve.png")
    assert json.loads((folder / "result.json").read_text()) == json.loads(json.dumps(result))
    total = sum(row["episode_return"] * row["episodes"] for row in ended)
    mean = total / sum(row["episodes"] for row in ended)
    assert result["last_100_episodes_return"]["mean"] == pytest.approx(mean, rel=1e-5)
    played = result["evaluation"]
    assert played["episodes"] == 3 == played["terminated"] + played["truncated"]
    assert played["episode_return"]["mean"] == pytest.approx(played["episode_length"])  # CartPole pays 1 a step
    assert sorted(int(p.name) for p in (folder / "checkpoints").iterdir()) == [8, 12]
    earlier, later = (checkpoint(folder, step)["key"] for step in (8, 12))
    assert not np.array_equal(earlier, later)  # every update has keys of its own


def test_tensorboard_events_have_the_metrics_at_their_environment_steps(whole):
    folder, _ = whole
    seen = {}
    for path in folder.glob("events.out.tfevents.*"):
        for tag, step, value in scalars(path):
            seen.setdefault(tag, {})[step] = value
    found = rows(folder)
    assert set(seen) >= {"episode_return", "loss", "approx_kl", "steps_per_second"}
    assert list(seen["loss"]) == [row["env_steps"] for row in found[1::2]]
    for row, after in zip(found[::2], found[1::2], strict=True):
        assert seen["loss"][after["env_steps"]] == pytest.approx((row["loss"] + after["loss"]) / 2, rel=1e-5, abs=1e-7)


def scalars(path):
    from tensorboardX.proto.event_pb2 import Event

    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        at += 12 + length + 4
        yield from ((value.tag, event.step, value.simple_value) for value in event.summary.value)


def test_several_seeds_are_one_program(whole, train, place, monkeypatch):
    folder, _ = whole
    programs, compiled = [], _run._compiled
    monkeypatch.setattr(_run, "_compiled", lambda *args: programs.append(1) or compiled(*args))
    several, result = go(train, place, "seeds", num_seeds=3, eval_episodes=2)
    assert len(programs) == 1
    found = rows(several)
    for mine, alone in zip(found, rows(folder), strict=True):
        assert len(mine["loss"]) == 3
        assert mine["loss"][0] == pytest.approx(alone["loss"], rel=1e-3, abs=1e-5)  # seed 1 is seed 1
        assert mine["update"] == alone["update"]
        assert mine["env_steps"] == alone["env_steps"]
    assert len({tuple(row["loss"][i] for row in found) for i in range(3)}) == 3
    for numbers in (result["last_100_episodes_return"], result["evaluation"]["episode_return"]):
        assert len(numbers["per_seed"]) == 3
        assert numbers["mean"] == pytest.approx(np.mean(numbers["per_seed"]))
    assert result["evaluation"]["terminated"] + result["evaluation"]["truncated"] == 6
    with pytest.raises(ValueError, match="num_seeds was 3, is 2"):
        go(train, place, "", num_seeds=2, resume=several)


def test_a_run_in_which_no_episode_ends_has_no_curve(train, monkeypatch, place, capsys):
    def none_ended(step, state, size):
        return lambda state, number: (state, {"episode_return": np.full(size, np.nan), "episodes": np.zeros(size, int)})

    monkeypatch.setattr(_run, "_compiled", none_ended)
    folder, result = go(train, place, "endless")
    assert "curve" not in result
    assert not (folder / "curve.png").exists()
    assert json.loads((folder / "result.json").read_text())["last_100_episodes_return"]["mean"] is None
    assert "no episode ended" in capsys.readouterr().out


# --- interruptions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [2, 8])
def test_a_crash_loses_what_came_after_the_last_checkpoint_and_nothing_else(
    monkeypatch, train, place, whole, tmp_path, after
):
    with pytest.raises(Crash):
        interrupted(monkeypatch, train, tmp_path, "run", after=after, action=crash)
    folder, _ = go(train, place, "", resume=tmp_path / "run")
    assert_same_run(folder, whole[0])


def test_between_the_metrics_and_the_checkpoint(monkeypatch, train, whole, tmp_path):
    saved = []

    def save(self, step, state, **kept):
        saved.append(step)
        if step == 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return before(self, step, state, **kept)

    before = Checkpoints.save
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save)
        with pytest.raises(OSError, match="No space left"):
            go(train, tmp_path, "run")
    assert saved == [4, 8]
    assert len(rows(tmp_path / "run")) == 8
    folder, _ = go(train, tmp_path, "", resume=tmp_path / "run")
    assert_same_run(folder, whole[0])


def test_a_full_disk_in_the_middle_of_a_line(monkeypatch, train, whole, tmp_path):
    def append(self, new):
        if new[0]["update"] >= 6:
            self._file.write('{"update": 6, "env_st')
            self._file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")
        return before(self, new)

    before = _records.MetricsFile.append
    with monkeypatch.context() as patch:
        patch.setattr(_records.MetricsFile, "append", append)
        with pytest.raises(OSError, match="No space left"):
            go(train, tmp_path, "run")
    assert len(training.read_metrics(tmp_path / "run" / "metrics.jsonl")) == 6
    folder, _ = go(train, tmp_path, "", resume=tmp_path / "run")
    assert_same_run(folder, whole[0])


@pytest.mark.parametrize(("name", "after"), [("SIGINT", 6), ("SIGTERM", 4)])
def test_a_signal_saves_first(monkeypatch, train, whole, tmp_path, capsys, name, after):
    number = signal.Signals[name]
    before = signal.getsignal(number)
    folder, result = interrupted(
        monkeypatch, train, tmp_path, "run", after=after, action=lambda: os.kill(os.getpid(), number)
    )
    assert signal.getsignal(number) is before
    assert result["interrupted_by"] == name
    assert result["env_steps"] == after * 16
    assert int(checkpoint(folder)["step"]) == after
    assert f"interrupted after update {after} of 12; go on with --resume {folder}" in capsys.readouterr().out
    assert not (folder / "result.json").exists()
    folder, result = go(train, tmp_path, "", resume=folder, eval_episodes=3)
    assert "interrupted_by" not in result
    assert_same_run(folder, whole[0])


def test_a_signal_while_compiling_ends_before_the_first_update(monkeypatch, train, whole, tmp_path):
    compiled = _run._compiled

    def slow(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return compiled(*args)

    with monkeypatch.context() as patch:
        patch.setattr(_run, "_compiled", slow)
        folder, result = go(train, tmp_path, "run")
    assert result["env_steps"] == 0
    assert result["interrupted_by"] == "SIGINT"
    folder, _ = go(train, tmp_path, "", resume=folder)
    assert_same_run(folder, whole[0])


def test_a_second_ctrl_c_does_not_wait(monkeypatch, train, whole, tmp_path):
    def twice():
        for _ in range(2):  # to this thread, and taken at once: os.kill may wake another one, and come too late
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have their background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted(monkeypatch, train, tmp_path, "run", after=6, action=twice)
    finally:
        signal.signal(signal.SIGINT, before)
    assert int(checkpoint(tmp_path / "run")["step"]) == 4
    folder, _ = go(train, tmp_path, "", resume=tmp_path / "run")
    assert_same_run(folder, whole[0])


def test_checkpoints_need_not_divide_the_run(train, whole, tmp_path):
    folder, _ = go(train, tmp_path, "run", checkpoint_every=5)
    assert sorted(int(p.name) for p in (folder / "checkpoints").iterdir()) == [10, 12]
    assert_same_run(folder, whole[0])


def test_processes_that_are_interrupted_and_killed(train, tmp_path, cache):
    """Real ones: Ctrl-C at a random moment, kill -9 at another, and the end bit-identical to an undisturbed run."""
    config = tiny(300)
    every = ["--checkpoint-every", "7", "--log-every", "1"]
    undisturbed = RunOptions(directory=tmp_path, name="whole", **{**QUIET, "checkpoint_every": 7, "log_every": 1})
    training.run(cleanrl_ppo.make_train(config), config, undisturbed)
    folder = tmp_path / "run"
    first = start(*arguments(config), "--directory", str(tmp_path), "--name", "run", *every, cache=cache)
    disturb(first, folder, 5, signal.SIGINT)
    output = first.communicate(timeout=120)[0]
    if first.returncode != 0:  # it had not ended yet
        assert first.returncode == 130, output
        assert "go on with --resume" in output
        second = start("--resume", str(folder), cache=cache)
        disturb(second, folder, len(rows(folder)) + 5, signal.SIGKILL)
        output = second.communicate(timeout=120)[0]
        assert second.returncode in (-9, 0), output
    training.run(cleanrl_ppo.make_train(config), config, RunOptions(resume=folder, **QUIET | {"log_every": 1}))
    assert_same_run(folder, tmp_path / "whole")


def disturb(process, folder, after_rows, number):
    """Send a signal at a random moment after the metrics have so many rows."""
    path, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= after_rows:
            break
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(number)


# --- what is found damaged, or does not belong ---------------------------------------------------------------------


def test_a_last_line_cut_short_is_left_out(train, broken, whole):
    path = broken / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    folder, _ = go(train, None, "", resume=broken)
    assert_same_run(folder, whole[0])


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
    elif how == "gone":
        (folder / "state" / "_METADATA").unlink()
    else:
        shutil.rmtree(folder / "state")


@pytest.mark.parametrize("how", ["cut", "changed", "gone", "empty"])
def test_a_damaged_checkpoint_is_passed_over(train, broken, whole, how):
    damage(broken / "checkpoints" / "8", how)
    with pytest.warns(RuntimeWarning, match=r"damaged checkpoint in .*, going back to 4; 8: "):
        folder, _ = go(train, None, "", resume=broken)
    assert_same_run(folder, whole[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # tensorstore, on what it cannot read
def test_every_changed_byte_of_a_checkpoint_is_noticed_or_harmless(crashed, tmp_path, train):
    """A checksum over names and contents: whatever comes back is right, or it is refused."""
    like = jax.eval_shape(train.init, jax.random.key(0))
    like = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if "key" not in str(x.dtype) else jax.random.key(0), like)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        with contextlib.closing(Checkpoints(crashed / "checkpoints")) as checkpoints:
            expected = checkpoints.restore(like, 8)[1]
        rng = random.Random(0)
        refused = 0
        for i in range(12):
            folder = tmp_path / str(i)
            shutil.copytree(crashed / "checkpoints", folder)
            path = rng.choice(sorted(p for p in (folder / "8").rglob("*") if p.is_file() and p.stat().st_size))
            content = bytearray(path.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
            with contextlib.closing(Checkpoints(folder)) as checkpoints:
                try:
                    found = checkpoints.restore(like, 8)[1]
                except (OSError, ValueError):
                    refused += 1
                    continue
                assert_same(jax.tree.map(raw, found), jax.tree.map(raw, expected))
    assert refused > 0


def raw(x):
    return jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x


def test_a_run_without_a_readable_checkpoint_says_so(train, broken):
    for step in ("4", "8"):
        damage(broken / "checkpoints" / step, "gone")
    with pytest.raises(OSError, match=r"no checkpoint in .* can be read; 8: .*; 4: "):
        go(train, None, "", resume=broken)


def test_metrics_that_were_tampered_with_are_not_continued(train, broken):
    path = broken / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "{}oops", *lines[4:]]) + "\n")
    with pytest.raises(ValueError, match=r"holds 3 of the 8 updates before the checkpoint"):
        go(train, None, "", resume=broken)


def test_what_a_killed_process_left_half_written_is_removed(train, broken, whole):
    half = broken / "checkpoints" / "9.orbax-checkpoint-tmp"
    (half / "default").mkdir(parents=True)
    folder, _ = go(train, None, "", resume=broken)
    assert not half.exists()
    assert_same_run(folder, whole[0])


def test_another_configuration_is_refused_and_the_field_named(train, broken):
    changed = tiny(UPDATES, learning_rate=1e-3, gamma=0.5)
    with pytest.raises(ValueError, match=r"learning_rate was 0\.00025, is 0\.001; gamma was 0\.99, is 0\.5"):
        go(train, None, "", changed, resume=broken)
    other = cleanrl_ppo.make_train(tiny(UPDATES, hidden=(9,)))
    with pytest.raises(ValueError, match=r"of another configuration: .*kernel has float32\[.*\], expected float32\["):
        go(other, None, "", resume=broken)
    path = broken / "config.json"
    stored = json.loads(path.read_text())
    del stored["config"]["gamma"]
    path.write_text(json.dumps(stored))
    with pytest.raises(SystemExit, match=r"of another recipe, or of another version of it: fields differ \(gamma\)"):
        training.main(cleanrl_ppo.make_train, cleanrl_ppo.PRESETS, argv=["--resume", str(broken)])


def test_a_name_is_given_once(train, whole, place):
    with pytest.raises(FileExistsError, match=r"whole holds a run already: continue it with --resume .*whole"):
        go(train, place, "whole")
    with pytest.raises(FileNotFoundError, match=r"nowhere holds no run: it has no config\.json"):
        go(train, None, "", resume=place / "nowhere")


def test_a_run_has_one_writer(monkeypatch, train, tmp_path):
    def again():
        with pytest.raises(FileExistsError, match="is being written by another process"):
            go(train, None, "", resume=tmp_path / "run")
        with pytest.raises(FileExistsError, match="is being written by another process"):
            go(train, tmp_path, "run")
        crash()

    with pytest.raises(Crash):
        interrupted(monkeypatch, train, tmp_path, "run", after=2, action=again)


def test_runs_without_a_name_do_not_meet(monkeypatch, tmp_path):
    from ppo_parts.training._folder import run_folder

    monkeypatch.setattr(time, "strftime", lambda format: "now")
    folders = []
    for _ in range(2):
        with run_folder(tiny(), RunOptions(directory=tmp_path)) as folder:
            folders.append(folder.name)
    assert folders == ["CartPole-v1-s1-now", "CartPole-v1-s1-now-2"]


@pytest.mark.parametrize("changes", [{"target_kl": float("inf")}, {"env_id": Path("x")}, {"hidden": ((8,),)}])
def test_a_configuration_that_json_cannot_hold_is_refused_at_once(train, tmp_path, changes):
    with pytest.raises(ValueError, match=rf"config\.{next(iter(changes))}=.* could not be read back"):
        go(train, tmp_path, "run", tiny(UPDATES, **changes))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options", [{"log_every": 0}, {"checkpoint_every": -1}, {"eval_episodes": -1}, {"num_seeds": 0}, {"num_seeds": 1.5}]
)
def test_options_are_checked_before_a_folder_is_made(train, tmp_path, options):
    (name,) = options
    with pytest.raises((ValueError, TypeError), match=f"run: {name} must be"):
        go(train, tmp_path, "run", **options)
    assert not list(tmp_path.iterdir())


def test_a_finished_run_is_not_trained_again(monkeypatch, train, whole, tmp_path):
    folder = Path(shutil.copytree(whole[0], tmp_path / "run"))
    (folder / "result.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(_run, "_compiled", crash)
        go(train, None, "", resume=folder, eval_episodes=3)
    assert_same_run(folder, whole[0])


# --- numbers that are not finite -----------------------------------------------------------------------------------


class Faulty(gymnax.environments.environment.Environment):
    """Never ends; from step 20 on, in update 2, the reward is not a number."""

    def reset_env(self, key, params):
        obs = jax.random.normal(key, (3,))
        return obs, gymnax.environments.environment.EnvState(time=jnp.int32(0))

    def step_env(self, key, state, action, params):
        reward = jnp.where(state.time == 20, jnp.nan, 1.0)
        state = state.replace(time=state.time + 1)
        return jax.random.normal(key, (3,)), state, reward, jnp.zeros((), bool), {}

    @property
    def default_params(self):
        return gymnax.environments.environment.EnvParams(max_steps_in_episode=1000)

    def observation_space(self, params):
        return gymnax.environments.spaces.Box(-10, 10, (3,))

    def action_space(self, params=None):
        return gymnax.environments.spaces.Discrete(2)


@pytest.fixture(scope="module")
def faulty():
    from gymnax import registration

    registration.register("Faulty-v0", Faulty)
    yield "Faulty-v0"
    registration.registered_envs.remove("Faulty-v0")
    del registration._registry["Faulty-v0"]


@pytest.fixture(scope="module")
def faulty_train(faulty):
    """With normalisation, whose statistics a single NaN could spoil for ever."""
    config = tiny(6, env_id=faulty, skip_nonfinite=True, normalize_env=True)
    return cleanrl_ppo.make_train(config), config


def test_a_reward_that_is_not_a_number_ends_the_run_where_it_arose(faulty_train, tmp_path):
    train, config = faulty_train
    config = dataclasses.replace(config, skip_nonfinite=False)  # what the host does about it, in the same program
    message = (
        r"^update 2: non-finite numbers arose first in reward \(2 elements\), then in .*"
        r"its last checkpoint, of update 0, is from before.*--skip-nonfinite"
    )
    with pytest.raises(FloatingPointError, match=message):
        go(train, tmp_path, "run", config, log_every=6, checkpoint_every=6)
    assert [row["nonfinite/reward"] for row in rows(tmp_path / "run")] == [0, 0, 2]


def test_what_is_not_finite_can_be_skipped_and_counted(faulty_train, tmp_path):
    folder, _ = go(*faulty_train[:1], tmp_path, "run", faulty_train[1], log_every=6, checkpoint_every=6)
    found = rows(folder)
    assert [row["nonfinite/reward"] for row in found] == [0, 0, 2, 0, 0, 0]
    assert [row["nonfinite/gradient"] > 0 for row in found] == [False, False, True, False, False, False]
    kept = {name: x for name, x in checkpoint(folder).items() if "episode_return" not in name}
    assert all(np.isfinite(x).all() for x in kept.values() if np.issubdtype(np.asarray(x).dtype, np.floating))


def test_the_first_update_that_is_not_finite_is_the_one_reported():
    """What follows from it comes later, and would be listed as the cause in a sum over updates."""
    measured = {
        "loss": np.zeros((4, 2)),
        "nonfinite/reward": np.zeros((4, 2), int),
        "nonfinite/log_prob": np.array([[0, 0], [0, 0], [0, 16], [0, 16]]),
        "nonfinite/gradient": np.array([[0, 0], [0, 1], [0, 4], [0, 4]]),
    }
    first, text = _run._first_nonfinite(measured)
    assert first == 1
    assert text == " (seed 1 of 2, from 0): non-finite numbers arose first in gradient (1 minibatch)"
    assert _run._first_nonfinite({"loss": np.zeros(3), "nonfinite/reward": np.zeros(3, int)}) is None
    assert _run._first_nonfinite({"loss": np.zeros(3)}) is None


# --- checkpoints of anything ---------------------------------------------------------------------------------------


def test_a_checkpoint_holds_any_tree_of_arrays(tmp_path):
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
    with_one.drop_after(10)
    assert with_one.steps() == [10]
    with_one.save(20, state)
    with_one.close()


# --- evaluation and statistics -------------------------------------------------------------------------------------


def coin(params, batch):
    return Softmax(jnp.zeros((*batch.obs.shape[:-1], 2)) + params), batch.obs[..., 0]


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_evaluation_plays_whole_episodes(kind):
    played = training.evaluate_episodes(clock(7, kind), coin, jnp.zeros(2), jax.random.key(0), 4)
    assert played.episode_return.tolist() == [21.0] * 4  # 0 + 1 + ... + 6
    assert played.episode_length.tolist() == [7] * 4
    assert played.terminated.tolist() == [kind == "terminated"] * 4
    assert played.truncated.tolist() == [kind == "truncated"] * 4
    cut = training.evaluate_episodes(clock(7, kind), coin, jnp.zeros(2), jax.random.key(0), 4, max_steps=5)
    assert cut.episode_length.tolist() == [5] * 4
    assert not (cut.terminated | cut.truncated).any()


def test_evaluation_counts_the_first_episode_of_each_environment():
    """Environment n ends after n + 2 steps; the short ones would have had more episodes."""
    played = training.evaluate_episodes(clock(jnp.arange(4) + 2), coin, jnp.zeros(2), jax.random.key(0), 4, max_steps=7)
    assert played.episode_length.tolist() == [2, 3, 4, 5]
    assert played.episode_return.tolist() == [1, 3, 6, 10]
    assert played.truncated.all()


def slow_last_episodes(returns, episodes, last):
    total, number = 0.0, 0
    for mean, count in reversed(list(zip(returns, episodes, strict=True))):
        if number >= last:
            break
        if count:
            total, number = total + mean * count, number + count
    return total / number if number else np.nan


def test_return_of_the_last_episodes_against_a_loop():
    rng = np.random.default_rng(0)
    episodes = rng.integers(0, 4, size=(5, 30)) * (rng.random((5, 30)) < 0.7)
    episodes[3] = 0
    returns = np.where(episodes > 0, rng.normal(size=(5, 30)), np.nan)
    for last in (1, 5, 20, 1000):
        expected = [slow_last_episodes(r, e, last) for r, e in zip(returns, episodes, strict=True)]
        np.testing.assert_allclose(training.last_episodes_return(returns, episodes, last), expected, rtol=1e-5)


def test_interquartile_mean_and_intervals():
    rng = np.random.default_rng(0)
    for n in (4, 8, 20):
        x = rng.normal(size=n)
        assert training.iqm(x) == pytest.approx(scipy.stats.trim_mean(x, 0.25))
    assert training.iqm([3.0]) == 3.0
    for n in (2, 3, 5, 10):  # a quarter of the weight is cut off on each side, fractions of values too
        x = rng.normal(size=n)
        repeated = np.repeat(np.sort(x), 4)
        assert training.iqm(x) == pytest.approx(repeated[n : 3 * n].mean())
    x = rng.normal(5, 2, size=400)
    low, high = training.bootstrap(x)
    exact = scipy.stats.norm.interval(0.95, x.mean(), scipy.stats.sem(x))
    assert (low, high) == pytest.approx(exact, abs=0.03)
    assert training.bootstrap(x) == [low, high]
    assert training.bootstrap(x, training.iqm, level=0.5)[0] > training.bootstrap(x, training.iqm)[0]
    y = rng.normal(size=(3, 6))
    low, high = interval(y)
    for row in range(3):
        t = scipy.stats.t.interval(0.95, 5, y[row].mean(), scipy.stats.sem(y[row]))
        assert (low[row], high[row]) == pytest.approx(t)
    assert np.isnan(interval(np.array([[1.0, np.nan]]))).all()
    assert training.summary(np.array([2.0]))["iqm_95"] is None
    assert training.summary(np.array([2.0, 4.0]))["std"] == pytest.approx(np.sqrt(2))


def test_smoothing_and_the_picture_take_what_is_missing(tmp_path):
    returns = np.array([[np.nan, np.nan], [1.0, np.nan], [3.0, 2.0], [np.nan, np.nan], [np.nan, 8.0], [np.nan, 1.0]])
    smooth = _records.smoothed(returns, 3)
    for t in range(6):
        for seed in range(2):
            window = returns[max(0, t - 2) : t + 1, seed]
            expected = np.mean(window[np.isfinite(window)]) if np.isfinite(window).any() else np.nan
            np.testing.assert_allclose(smooth[t, seed], expected)
    for name, data in {"seeds.png": returns, "one.png": returns[:, 0]}.items():
        training.plot_curve(tmp_path / name, np.arange(6.0), data, "title")
        assert (tmp_path / name).stat().st_size > 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.png", "seeds.png"]


# --- evaluation while training -------------------------------------------------------------------------------------

EVALUATED = {"eval_every": 5, "eval_episodes": 5, "best_metric": "evaluation/episode_return", "keep_checkpoints": None}


@pytest.fixture(scope="module")
def evaluated(train, place):
    """A run with an evaluation after updates 5, 10 and 12, that keeps every checkpoint."""
    return go(train, place, "evaluated", **EVALUATED, tensorboard=True)


def evaluations(folder):
    """The metrics of evaluations, by the number of updates before each."""
    found = {row["update"] + 1: {k: x for k, x in row.items() if k.startswith("evaluation/")} for row in rows(folder)}
    return {update: metrics for update, metrics in found.items() if metrics}


def steps(folder):
    return sorted(int(p.name) for p in (folder / "checkpoints").iterdir())


def test_evaluation_changes_nothing_and_adds_metrics(evaluated, whole):
    folder, result = evaluated
    found = evaluations(folder)
    assert list(found) == [5, 10, 12]
    assert len({tuple(metrics.values()) for metrics in found.values()}) == 3
    assert_same(checkpoint(folder, 12), checkpoint(whole[0], 12))
    for mine, alone in zip(rows(folder), rows(whole[0]), strict=True):
        assert {k: x for k, x in mine.items() if not k.startswith("evaluation/")} == alone
    final = {name: result["evaluation"][name] for name in ("terminated", "truncated", "episode_length")}
    final["episode_return"] = result["evaluation"]["episode_return"]["mean"]
    assert {f"evaluation/{name}": x for name, x in final.items()} == found[12]
    assert final["terminated"] + final["truncated"] == 5
    seen = {}
    for path in folder.glob("events.out.tfevents.*"):
        for tag, step, value in scalars(path):
            seen.setdefault(tag, {})[step] = value
    for name in found[12]:
        assert seen[name] == pytest.approx({16 * update: metrics[name] for update, metrics in found.items()}), name


@pytest.fixture
def make_train(train):
    """As the recipe's, but the programs are there already."""

    def make_train(config: cleanrl_ppo.Config):
        assert config == tiny(UPDATES)
        return train

    return make_train


def test_anybody_can_repeat_an_evaluation(train, make_train, evaluated):
    """It is of the policy of its update, with keys made of nothing but the seed and the update."""
    state = training.load(evaluated[0], make_train, checkpoint=5).state
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), 2**20), 5)
    played = jax.jit(lambda key, state: train.evaluate_policy(key, state, 5))(key, state)
    found = evaluations(evaluated[0])[5]
    assert found["evaluation/episode_return"] == pytest.approx(float(played.episode_return.mean()))
    assert found["evaluation/terminated"] == int(played.terminated.sum())


def test_seeds_are_evaluated_side_by_side_by_one_program(train, make_train, tmp_path, monkeypatch):
    traced, before = [], training.Train.evaluate_policy

    def evaluate_policy(*args, **given):
        traced.append(given)
        return before(*args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(training.Train, "evaluate_policy", evaluate_policy)
        folder, result = go(train, tmp_path, "run", num_seeds=3, eval_mode=True, **EVALUATED)
    assert traced == [{}, {"mode": True}]  # once to see that it can work, and once for all evaluations
    found = evaluations(folder)
    assert list(found) == [5, 10, 12]
    run = training.load(folder, make_train)
    keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2**20), 12))
    play = jax.vmap(lambda key, state: train.evaluate_policy(key, state, 5, mode=True).episode_return.mean())
    expected = np.asarray(jax.jit(play)(keys(jnp.arange(1, 4)), run.state), float)
    assert found[12]["evaluation/episode_return"] == pytest.approx(expected)
    assert result["evaluation"]["episode_return"]["per_seed"] == found[12]["evaluation/episode_return"]
    assert run.metrics["evaluation/episode_return"].shape == (UPDATES, 3)
    best = max(found, key=lambda update: np.mean(found[update]["evaluation/episode_return"]))
    assert result["best"]["update"] == best


def test_an_evaluated_run_goes_on_as_if_never_interrupted(monkeypatch, train, evaluated, tmp_path):
    with pytest.raises(Crash):
        interrupted(monkeypatch, train, tmp_path, "run", after=10, action=crash, **EVALUATED)
    folder, _ = go(train, None, "", resume=tmp_path / "run", **EVALUATED)
    assert_same_run(folder, evaluated[0])
    assert steps(folder) == steps(evaluated[0])


def test_metrics_of_agents_are_means_over_them():
    """Whatever comes after the seeds is one sample."""
    shape = (3, 4, 2)  # seeds, episodes, agents
    returns = np.arange(24.0).reshape(shape)
    played = training.EpisodeResults(returns, np.full((3, 4), 7), np.ones((3, 4), bool), np.zeros((3, 4), bool))
    found = metrics_of(played, seed_axes=1)
    assert found["evaluation/episode_return"].tolist() == returns.mean((1, 2)).tolist()
    assert found["evaluation/episode_length"].tolist() == [7] * 3
    assert found["evaluation/terminated"].tolist() == [4] * 3
    assert metrics_of(played)["evaluation/episode_return"] == 11.5


def test_what_an_environment_says_of_its_episodes_is_evaluated_and_can_be_the_best(tmp_path):
    base = envs.make("CartPole-v1")

    def step(key, state, action):
        state, out = base.step(key, state, action)
        return state, out._replace(info={"long": out.episode_length > 20})

    env = base._replace(step=step, evaluation=lambda state: env)
    options = EVALUATED | {"best_metric": "evaluation/long"}
    folder, result = go(cleanrl_ppo.make_train(tiny(UPDATES), env), tmp_path, "run", **options)
    found = {update: metrics["evaluation/long"] for update, metrics in evaluations(folder).items()}
    assert all(5 * share == round(5 * share) for share in found.values())  # of 5 episodes
    assert result["best"] == {
        "metric": "evaluation/long",
        "update": max(found, key=found.get),
        "value": max(found.values()),
    }
    assert result["evaluation"]["long"] == found[UPDATES]


# --- which checkpoints are kept, and what can be done with them ----------------------------------------------------


def test_the_best_checkpoint_is_kept_besides_the_latest(train, make_train, evaluated, tmp_path):
    found = evaluations(evaluated[0])
    returns = {update: metrics["evaluation/episode_return"] for update, metrics in found.items()}
    assert set(steps(evaluated[0])) >= {4, 5, 8, 12}  # all that were made
    for mode, best in {"max": max(returns, key=returns.get), "min": min(returns, key=returns.get)}.items():
        folder, result = go(train, tmp_path, mode, **EVALUATED | {"keep_checkpoints": 1, "best_mode": mode})
        assert result["best"] == {"metric": "evaluation/episode_return", "update": best, "value": returns[best]}
        assert steps(folder) == sorted({best, 12})
        run = training.load(folder, make_train, checkpoint="best")
        assert run.update == best == int(run.state.learner.step)


def test_the_best_of_training_is_judged_by_the_mean_since_the_checkpoint_before(train, tmp_path, whole):
    folder, result = go(train, tmp_path, "run", best_metric="grad_norm", best_mode="min", keep_checkpoints=1)
    norms = training.column(rows(whole[0]), "grad_norm").reshape(3, 4).mean(1)
    assert result["best"] == {"metric": "grad_norm", "update": 4 * (norms.argmin() + 1), "value": norms.min()}
    assert steps(folder) == sorted({4 * (norms.argmin() + 1), 12})


def test_what_is_best():
    table = [{"x": x} for x in (1.0, 5.0, None, 3.0)] + [{"y": 0.0}, {"x": 3.0}]
    assert best_update(table, range(1, 7), "x") == (2, 5.0)
    assert best_update(table, [1, 3, 4, 6], "x") == (4, 3.0)  # the first of two, and nothing at 3
    assert best_update(table, [2, 4], "x", window=2) == (2, 3.0)  # (1 + 5) / 2, and 3 alone
    assert best_update(table, range(1, 7), "x", mode="min") == (1, 1.0)
    assert best_update(table, [3, 5], "x") is None
    assert best_update([{"x": [1.0, None]}, {"x": [3.0, 0.0]}], [1, 2], "x") == (2, 1.5)
    assert training.column(table, "y").tolist()[4] == 0
    with pytest.raises(KeyError, match="no update has z; there are x, y"):
        training.column(table, "z")


def test_a_crash_before_the_old_ones_go_leaves_nothing_to_tidy(monkeypatch, train, tmp_path):
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
    assert steps_seen(tmp_path / "run") == [5]
    folder, _ = go(train, None, "", resume=tmp_path / "run", **options)
    assert_same_run(folder, undisturbed)
    assert steps(folder) == steps(undisturbed)


def steps_seen(folder):
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        return checkpoints.steps()


def test_a_run_comes_back_with_its_policy_and_its_history(train, make_train, whole, evaluated):
    run = training.load(whole[0], make_train)
    assert run.config == tiny(UPDATES)
    assert run.train is train
    assert run.update == UPDATES
    for path, x in jax.tree_util.tree_leaves_with_path(run.state.learner.params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        np.testing.assert_array_equal(x, checkpoint(whole[0])[f"learner.params.{name}"])
    assert run.metrics["loss"].tolist() == [row["loss"] for row in rows(whole[0])]
    earlier = training.load(str(evaluated[0]), make_train, checkpoint=5)
    assert int(earlier.state.learner.step) == 5
    assert earlier.metrics["env_steps"].tolist() == [16, 32, 48, 64, 80]
    known = np.isfinite(earlier.metrics["evaluation/episode_return"])
    assert known.tolist() == [False, False, False, False, True]
    recipe = training.load(whole[0], cleanrl_ppo.make_train)
    assert_same(jax.tree.map(raw, recipe.state), jax.tree.map(raw, run.state))


def test_what_cannot_be_loaded_says_why(train, make_train, whole, place, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint 5 in .*: there are 8, 12"):
        training.load(whole[0], make_train, checkpoint=5)
    with pytest.raises(ValueError, match=r"no best checkpoint: it was run without best_metric; there are \[8, 12\]"):
        training.load(whole[0], make_train, checkpoint="best")
    with pytest.raises(ValueError, match="checkpoint='last' must be 'latest', 'best' or the number of an update"):
        training.load(whole[0], make_train, checkpoint="last")
    with pytest.raises(FileNotFoundError, match=r"nowhere holds no run"):
        training.load(place / "nowhere", make_train)
    with pytest.raises(TypeError, match=r"write def make_train\(config: Config\)"):
        training.load(whole[0], lambda config: train)
    with pytest.raises(ValueError, match=r"of another recipe, .* \(.*, .*, .* and \d+ more\)"):
        training.load(whole[0], pufferlib_ppo.make_train)
    (tmp_path / "config.json").write_text((whole[0] / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match="has no checkpoints"):
        training.load(tmp_path, make_train)
    assert steps(whole[0]) == [8, 12]


@pytest.mark.parametrize("where", [8, "best"])
def test_a_run_goes_on_from_the_checkpoint_that_is_asked_for(train, evaluated, tmp_path, capsys, where):
    folder = Path(shutil.copytree(evaluated[0], tmp_path / "run"))
    update = 8 if where == 8 else evaluated[1]["best"]["update"]
    go(train, None, "", resume=folder, checkpoint=where, **EVALUATED)
    assert f"from update {update}\n" in capsys.readouterr().out
    assert_same_run(folder, evaluated[0])
    with pytest.raises(FileNotFoundError, match=r"no checkpoint 3 in .*: there are "):
        go(train, None, "", resume=folder, checkpoint=3, **EVALUATED)


def test_options_given_anew_are_those_of_the_next_time(train, broken):
    go(train, None, "", resume=broken, eval_episodes=2, eval_every=6)
    stored = json.loads((broken / "config.json").read_text())["run"]
    assert (stored["eval_every"], stored["log_every"]) == (6, 2)
    assert list(evaluations(broken)) == [12]


# --- a run that begins with the state of another -------------------------------------------------------------------


def test_begun_with_a_state_and_nothing_changed_it_ends_the_same(train, whole, place):
    folder, _ = go(train, place, "same", init_from=whole[0], checkpoint=8, eval_episodes=3)
    assert_same_run(folder, whole[0])
    stored = json.loads((folder / "config.json").read_text())
    assert stored["continued_from"] == {"folder": str(whole[0]), "update": 8, "changed": {}}


@pytest.fixture(scope="module")
def further():
    """More updates, another rate."""
    config = tiny(16, learning_rate=1e-3)
    return cleanrl_ppo.make_train(config), config


def test_trained_further_with_another_configuration(monkeypatch, further, whole, tmp_path, capsys):
    train, config = further
    with monkeypatch.context() as patch:  # also if it dies before it has a checkpoint of its own
        patch.setattr(Checkpoints, "save", lambda *args, **given: crash())
        with pytest.raises(Crash):
            go(train, tmp_path, "run", config, init_from=whole[0])
    assert "continued_from" in json.loads((tmp_path / "run" / "config.json").read_text())
    folder, _ = go(train, None, "", config, resume=tmp_path / "run")
    assert "from update 12" in capsys.readouterr().out
    assert (folder / "metrics.jsonl").read_text().startswith((whole[0] / "metrics.jsonl").read_text())
    found = rows(folder)
    assert [(row["update"], row["env_steps"]) for row in found[-4:]] == [(i, 16 * (i + 1)) for i in range(12, 16)]
    assert int(checkpoint(folder)["learner.step"]) == 16
    changed = json.loads((folder / "config.json").read_text())["continued_from"]["changed"]
    assert changed == {"total_timesteps": [192, 256], "learning_rate": [2.5e-4, 1e-3]}
    again, _ = go(train, tmp_path, "again", config, init_from=whole[0])
    assert_same_run(again, folder)
    assert steps(whole[0]) == [8, 12]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": (9,)}, r"of another configuration: .*kernel has float32\[.*\], expected float32\["),
        (
            {"num_steps": 16},
            r"12 updates of .* were 192 environment steps, but an update is now 32: keep num_envs",
        ),
        ({"seed": 5}, "goes on with its keys; seed was 1, is 5"),
        ({}, "begins this run with 12 updates, 192 environment steps, and there are 12 in all: raise total_timesteps"),
    ],
)
def test_what_does_not_fit_the_state_is_refused_before_a_folder_is_made(train, whole, tmp_path, changes, message):
    config = tiny(UPDATES, **changes)
    other = cleanrl_ppo.make_train(config) if changes.keys() - {"seed"} else train
    with pytest.raises(ValueError, match=message):
        go(other, tmp_path, "run", config, init_from=whole[0])
    assert not list(tmp_path.iterdir())


def test_the_command_line_takes_over_what_is_not_given(train, make_train, whole, tmp_path):
    given = ["--init-from", str(whole[0]), "--checkpoint", "8", "--directory", str(tmp_path), "--name", "run"]
    training.main(make_train, cleanrl_ppo.PRESETS, [*given, "--no-progress", "--no-tensorboard"])
    assert_same_run(tmp_path / "run", whole[0])
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["config"] == json.loads((whole[0] / "config.json").read_text())["config"]
    assert stored["run"]["eval_episodes"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_every": 0, "eval_episodes": 1}, "run: eval_every must be at least 1, got 0"),
        ({"keep_checkpoints": 0}, "run: keep_checkpoints must be at least 1, got 0"),
        ({"eval_every": 2}, "run: eval_every=2 needs eval_episodes"),
        (
            {"best_metric": "episode_retrun"},
            "best_metric='episode_retrun' is not measured in this run; there are appr",
        ),
        (
            {"best_metric": "evaluation/episode_return"},
            "measured in this run; evaluation/... needs eval_every; there are",
        ),
        ({"best_mode": "most"}, "best_mode must be one of 'max', 'min', got 'most'"),
        ({"checkpoint": "best"}, "checkpoint='best' says where resume or init_from goes on: give one of them"),
        ({"resume": Path("a"), "init_from": Path("b")}, "give one of them"),
    ],
)
def test_options_that_do_not_go_together(train, tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        go(train, tmp_path, "run", **options)
    assert not list(tmp_path.iterdir())
