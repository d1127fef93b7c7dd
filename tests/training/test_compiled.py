"""Compiled programs that are kept between runs, and what a run says about compiling."""

import jax
import pytest

from ppo_parts.training import _compiled
from ppo_parts.training._compiled import SECONDS, compiling, keep_compiled_programs

CHANGED = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "compilation_cache_max_size")


@pytest.fixture
def settings(monkeypatch):
    """JAX's settings of a process that keeps no programs, by their names without prefix."""
    before = {f"jax_{name}": jax.config.values[f"jax_{name}"] for name in CHANGED}
    for name in CHANGED:
        monkeypatch.delenv(f"JAX_{name.upper()}", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    yield lambda: {name: jax.config.values[f"jax_{name}"] for name in CHANGED}
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_the_cache_folder_of_the_user(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled_programs()
    folder = tmp_path / "ppo_parts" / "jax"
    assert list(settings().values()) == [str(folder), 0.0, _compiled.LIMIT]
    assert folder.stat().st_mode & 0o077 == 0


def test_a_place_or_a_limit_that_the_user_has_chosen_stays(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "7")
    limit = settings()["compilation_cache_max_size"]
    keep_compiled_programs()
    assert settings()["compilation_cache_max_size"] == limit
    jax.config.update("jax_compilation_cache_dir", "theirs")
    keep_compiled_programs()
    assert settings()["compilation_cache_dir"] == "theirs"


def test_nothing_is_kept_if_the_cache_of_jax_is_off(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", False)
    keep_compiled_programs()
    jax.config.update("jax_enable_compilation_cache", True)
    assert settings()["compilation_cache_dir"] is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_warning(settings, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled_programs()
    assert settings()["compilation_cache_dir"] is None
    printed = capsys.readouterr().err
    assert printed.startswith("compiled programs are not kept: [Errno 20] Not a directory")
    assert printed.count("\n") == 1


def test_the_next_run_says_how_long_compiling_took_without_kept_programs(settings, tmp_path, capsys):
    def said():
        with compiling("recipe CartPole-v1"):
            jax.monitoring.record_event_duration_secs("/jax/compilation_cache/compile_time_saved_sec", 8.0)
        return capsys.readouterr().out.splitlines()

    kept = "compiled in 0.0 s; programs of earlier runs saved 8 s"
    assert said() == ["compiling", kept]  # no folder, so that nothing is known the next time
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert said() == ["compiling", kept]
    assert said() == ["compiling, which takes about 8 s if the programs are new", kept]
    (tmp_path / SECONDS).write_text("[not JSON")
    assert said() == ["compiling", kept]


def test_jax_reports_the_seconds_that_a_kept_program_saves():
    def compile_again():
        before = _compiled._saved()[0]
        jax.jit(lambda x: x * 3.25 + 1).lower(1.0).compile()
        return _compiled._saved()[0] - before

    compile_again()
    assert compile_again() != 0
