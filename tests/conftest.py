"""What holds for every test: nothing broadcasts silently, our own code warns about nothing, compiling is quick."""

import os
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lenient_ranks: calls third-party code that broadcasts arrays of different rank")
    for package in ("ppo_parts", "recipes", "tests"):  # warnings inside third-party modules stay warnings
        config.addinivalue_line("filterwarnings", f"error:::{package}")


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for compiled programs, the same one for all workers."""
    place = tmp_path_factory.getbasetemp()
    return (place.parent if os.environ.get("PYTEST_XDIST_WORKER") else place) / "programs"


@pytest.fixture(scope="session", autouse=True)
def shared_programs(programs: Path):
    """Compile what several workers need only once, unless a cache is configured already.

    The tests of a file go to all workers, so each of them would compile the programs that these tests share.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        yield
        return
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    compilation_cache.reset_cache()  # what was compiled on import has begun without a cache
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@pytest.fixture(autouse=True)
def strict_ranks(request: pytest.FixtureRequest):
    """A `[N]` against a `[N, 1]` is an error, in our code and in the tests."""
    with jax.numpy_rank_promotion("allow" if request.node.get_closest_marker("lenient_ranks") else "raise"):
        yield


@pytest.fixture(autouse=True)
def quick_compilation(request: pytest.FixtureRequest):
    """Most of the time goes into compiling, so leave out what only makes the result faster; long runs keep it."""
    jax.config.update("jax_disable_most_optimizations", request.node.get_closest_marker("slow") is None)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
