"""Settings for all tests: silent broadcasting and warnings in our own code are errors, and compiling is fast."""

import gc
import os

import jax
import pytest

# Compiling takes most of the time, so leave out what only makes the result faster, here and in processes started here;
# slow tests keep it. The emitters of fusions take a third of that time, and cutting each program into pieces to compile
# them in parallel takes another third; older and newer versions do not know the option for the emitters.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
jax.config.update("jax_disable_most_optimizations", True)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_parallel_codegen_split_count=1"
if (0, 8) <= jax.__version_info__ < (0, 11):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lenient_ranks: calls third-party code that broadcasts arrays of different rank")
    for package in ("ppo_parts", "tests"):  # warnings inside third-party modules stay warnings
        config.addinivalue_line("filterwarnings", f"error:::{package}")
    if hasattr(config, "cache"):  # keep programs for later runs and other processes; --cache-clear removes them
        kept = {"compilation_cache_dir": str(config.cache.mkdir("jax")), "persistent_cache_min_compile_time_secs": 0.0}
        for name, value in kept.items():
            os.environ[f"JAX_{name.upper()}"] = str(value)
            jax.config.update(f"jax_{name}", value)
    else:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # leave the user's folder as it is
        jax.config.update("jax_enable_compilation_cache", False)


LONGEST = ("test_runs_on_several_devices", "test_several_devices")  # each is one process, which cannot be divided


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put one of the longest tests at the beginning of each half, because two workers begin there."""
    longest, others = [x for x in items if x.name in LONGEST], [x for x in items if x.name not in LONGEST]
    half = len(others) // 2
    items[:] = [*longest[:1], *others[:half], *longest[1:], *others[half:]]


def pytest_collection_finish() -> None:
    """Collect garbage less often, and not among imported objects: tracing makes many objects and little garbage."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True, scope="session")
def exact_products():
    """Compute products exactly; on GPUs the default, TF32, is exact to three digits."""
    if jax.default_backend() == "gpu":
        jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True)
def strict_ranks(request: pytest.FixtureRequest):
    """Make combining `[N]` with `[N, 1]` an error, in our code and in the tests."""
    with jax.numpy_rank_promotion("allow" if request.node.get_closest_marker("lenient_ranks") else "raise"):
        yield


@pytest.fixture(autouse=True)
def optimized_when_slow(request: pytest.FixtureRequest):
    jax.config.update("jax_disable_most_optimizations", request.node.get_closest_marker("slow") is None)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def double_precision():
    with jax.enable_x64(True):
        yield
