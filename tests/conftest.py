"""What holds for every test: nothing broadcasts silently, our own code warns about nothing, compiling is quick."""

import jax
import pytest

collect_ignore_glob = ["golden/record_*.py", "golden/_*.py"]  # recorders, which import other libraries


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lenient_ranks: calls third-party code that broadcasts arrays of different rank")
    for package in ("ppo_parts", "recipes", "tests"):  # warnings inside third-party modules stay warnings
        config.addinivalue_line("filterwarnings", f"error:::{package}")


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
