"""What holds for every test: nothing broadcasts silently, our own code warns about nothing, compiling is quick."""

import gc
import os

import jax
import pytest

# Most of the time goes into compiling, so leave out what only makes the result faster, here and in processes started
# here; tests that run long keep it. The emitters of fusions are a third of it, and cutting each program into pieces to
# compile side by side another third; older and newer versions do not know the option of the emitters.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
jax.config.update("jax_disable_most_optimizations", True)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_parallel_codegen_split_count=1"
if (0, 8) <= jax.__version_info__ < (0, 11):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lenient_ranks: calls third-party code that broadcasts arrays of different rank")
    for package in ("ppo_parts", "tests"):  # warnings inside third-party modules stay warnings
        config.addinivalue_line("filterwarnings", f"error:::{package}")
    if hasattr(config, "cache"):  # programs compiled by earlier runs, other workers and processes; --cache-clear
        kept = {"compilation_cache_dir": str(config.cache.mkdir("jax")), "persistent_cache_min_compile_time_secs": 0.0}
        for name, value in kept.items():
            os.environ[f"JAX_{name.upper()}"] = str(value)
            jax.config.update(f"jax_{name}", value)
    else:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # the folder of the user stays as it is
        jax.config.update("jax_enable_compilation_cache", False)


LONGEST = ("test_runs_on_several_devices", "test_several_devices")  # each is one process, which cannot be divided


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put one of the longest tests at the beginning of each half, which is what two workers begin with."""
    longest, others = [x for x in items if x.name in LONGEST], [x for x in items if x.name not in LONGEST]
    half = len(others) // 2
    items[:] = [*longest[:1], *others[:half], *longest[1:], *others[half:]]


def pytest_collection_finish() -> None:
    """Tracing makes many objects and little garbage: look for it less often, and not among what was imported."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True, scope="session")
def exact_products():
    """On GPUs the default, TF32, is exact to three digits."""
    if jax.default_backend() == "gpu":
        jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True)
def strict_ranks(request: pytest.FixtureRequest):
    """A `[N]` against a `[N, 1]` is an error, in our code and in the tests."""
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
