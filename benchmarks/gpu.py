"""All measurements that need a GPU, in one command and eight minutes.

`python -m benchmarks gpu --json benchmarks/results/gpu.jsonl#h100`

Sections, in this order: `device` (its bandwidth, published and measured with a copy), `kernels` (gae and V-trace, as
one kernel and as an associative scan), `train` (whole recipes), `tune` (the kernel with other sizes of blocks). The
results are written after every measurement, so that a run that is cut short loses one. What fails is recorded with the
reason, and so is what the time did not suffice for.

*inside*: one call within a compiled loop of many, which is what it costs within a training step; *alone*: one compiled
call, waited for, which for small arrays is the time to dispatch it. The kernel is compared with the plain scan before
it is timed. The figures to compare with were published for an H100: rl-triton's kernels (arXiv 2608.17641, time on the
device, 16 bytes per element for gae).

Without a GPU, or with `--dry-run`, everything is tiny, kernels are emulated, and the times mean nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import envs, functional
from ppo_parts.functional import _kernel, _recurrence
from ppo_parts.recipes import cleanrl_ppo, ippo, pufferlib_ppo

from . import _timing, train
from ._options import parser
from ._records import write

Row = dict[str, Any]
GAMMA = {"gamma": 0.99, "gae_lambda": 0.95}
BANDWIDTHS = {  # published, bytes per second; the first name that `device_kind` contains counts
    "H200": 4.8e12, "H100 PCIe": 2.0e12, "H100 NVL": 3.9e12, "H100": 3.35e12, "B200": 8.0e12, "A100-SXM4-80GB": 2.04e12,
    "A100-SXM4-40GB": 1.56e12, "A100": 1.94e12, "RTX 5090": 1.79e12, "RTX 4090": 1.01e12, "L40": 0.86e12, "L4": 0.3e12,
    "T4": 0.32e12,
}  # fmt: skip
RL_TRITON = {  # microseconds on an H100 by function, steps and environments
    ("gae", 512, 16384): 46.0, ("vtrace", 512, 16384): 78.0, ("gae", 128, 32768): 22.9, ("vtrace", 128, 32768): 40.8,
    ("gae", 128, 4096): 3.95, ("gae", 2048, 8192): 103.4, ("gae", 128, 2048): 2.67, ("vtrace", 2048, 4096): 98.0,
}  # fmt: skip
GOALS = {train.CARTPOLE: 15e6, train.BREAKOUT: 7.9e6}
"""Steps per second of a recipe: 15 M for one agent; PureJaxRL's 256 seeds on an A100."""


class Setting(NamedTuple):
    """A whole run: recipe, environment, how many of it, steps per update, seeds at once, updates, matrix products."""

    recipe: str
    env_id: str
    num_envs: int
    num_steps: int = train.STEPS
    seeds: int = 1
    updates: int = 4
    precision: str | None = None


class Plan(NamedTuple):
    """The sizes of all measurements."""

    copied: int  # bytes
    repeats: int
    rounds: int
    kernels: tuple[tuple[str, int, int, str], ...]
    runs: tuple[Setting, ...]
    tuned: tuple[tuple[int, int], ...]
    blocks: tuple[tuple[int, int, int], ...]  # columns, warps, rows


FULL = Plan(
    copied=2**30,
    repeats=50,
    rounds=7,
    kernels=(
        *((*sized, "float32") for sized in RL_TRITON),
        *((name, 512, 16384, "bfloat16") for name in ("gae", "vtrace")),
    ),
    runs=(
        Setting("cleanrl", train.CARTPOLE, 65536),
        Setting("cleanrl", train.BREAKOUT, 8192),
        Setting("cleanrl", train.CARTPOLE, 2048, seeds=32),
        Setting("cleanrl", train.CARTPOLE, 2048, updates=16),
        Setting("cleanrl", train.CARTPOLE, 65536, precision="bfloat16"),
        Setting("pufferlib", train.CARTPOLE, 16384),
        Setting("ippo", train.CARTPOLE, 16384),
        Setting("cleanrl", train.BREAKOUT, 2048, seeds=8),
        Setting("cleanrl", train.CARTPOLE, 16384),
        Setting("cleanrl", train.CARTPOLE, 16384, seeds=8),
        Setting("cleanrl", train.BREAKOUT, 65536, num_steps=32),
    ),
    tuned=((128, 4096), (512, 16384)),
    blocks=tuple((columns, warps, rows) for columns, warps in ((32, 1), (64, 1), (128, 4)) for rows in (4, 8, 16, 32)),
)
TINY = Plan(
    copied=2**16,
    repeats=2,
    rounds=2,
    kernels=(("gae", 3, 40, "float32"),),
    runs=(Setting("cleanrl", train.CARTPOLE, 4, num_steps=8, seeds=2, updates=1),),
    tuned=((4, 40),),
    blocks=((32, 1, 4),),
)


ENDS = {"device": 0.05, "kernels": 0.4, "train": 0.9, "tune": 1.0}
"""The share of the time after which a section ends, so that none takes the time of those that follow; one that ends
sooner leaves its time to them."""


class Bench:
    """The measurements: each is attempted while its section has time, printed, and written at once."""

    def __init__(self, plan: Plan, minutes: float, path: str | None, sections: tuple[str, ...] = tuple(ENDS)) -> None:
        self.plan, self.minutes, self.path = plan, minutes, path
        last = max(ENDS[section] for section in sections)
        self.ends = {section: 60 * minutes * end / last for section, end in ENDS.items()}
        self.began = time.monotonic()
        self.rows: list[Row] = []
        self.longest: dict[str, float] = {}

    def attempt(self, section: str, what: str, measure: Callable[[], list[Row]]) -> None:
        """Measure, unless less time is left to this section than its longest measurement took."""
        began, longest = time.monotonic(), self.longest.get(section, 0.0)
        if began - self.began + longest > self.ends[section]:
            minutes = f"{self.minutes:g} minutes, of which {section} ends after {self.ends[section] / 60:.1f}"
            found: list[Row] = [{"left_out": f"{minutes}, do not suffice for it"}]
        else:
            try:
                found = measure()
            except Exception as error:  # whatever the error is, the next measurement may work
                said = str(error).strip().partition("\n")[0][:300]
                found = [{"failed": f"{type(error).__name__}: {said}"}]
            jax.clear_caches()
        seconds = time.monotonic() - began
        self.longest[section] = max(longest, seconds)
        for row in found:
            self.rows.append({"section": section, "what": what, **row, "measuring_seconds": seconds / len(found)})
            print(show(self.rows[-1]), flush=True)
        write(self.path, self.rows)


def show(row: Row) -> str:
    """A line of the log."""
    head = f"{row['section']:8} {row['what']:44}"
    for reason in ("failed", "left_out"):
        if reason in row:
            return f"{head} {reason.replace('_', ' ')}: {row[reason]}"
    shown = {name: x for name, x in row.items() if name not in ("section", "what", "measuring_seconds")}
    return f"{head} " + ", ".join(
        f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in shown.items()
    )


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module another attribute; functions are compiled again before and after."""
    before = getattr(module, name)
    setattr(module, name, value)
    jax.clear_caches()
    try:
        yield
    finally:
        setattr(module, name, before)
        jax.clear_caches()


def as_if_there_were_a_gpu() -> contextlib.AbstractContextManager[None]:
    """Let `implementation="pallas"` be lowered on a machine without a GPU; it cannot run there."""
    return replaced(_recurrence, "has_device", lambda platform: platform == "cuda")


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Run kernels in Pallas' interpret mode, on any machine."""
    backwards = functools.partial(_kernel.backwards, interpret=True)
    with as_if_there_were_a_gpu(), replaced(_kernel, "backwards", backwards):
        yield


def timed(plan: Plan, method: Callable[..., Any], *args: Any) -> tuple[Row, Any]:
    """Microseconds inside a program and alone (median, and quartiles of the first), seconds to compile; the result."""
    call, took = _timing.compile_cold(method, *args)
    # The compiler knows how often the loop repeats: else it asks the GPU whether to go on.
    loop = _timing.compile_cold(functools.partial(_timing.repeated(method), plan.repeats), *args)[0]
    thunks = {"inside": functools.partial(loop, *args), "alone": functools.partial(call, *args)}
    walls = _timing.interleaved(thunks, plan.rounds)[0]
    inside = _timing.quartiles(walls["inside"], 1e6 / plan.repeats)
    row = {"us": inside["median"], "us_q1": inside["q1"], "us_q3": inside["q3"]}
    row["us_alone"] = _timing.quartiles(walls["alone"], 1e6)["median"]
    return row | seconds_of(took), call(*args)


def seconds_of(took: dict[str, float]) -> Row:
    """The fields of a row for what `_timing.compile_cold` took."""
    return {f"{name}_seconds": seconds for name, seconds in took.items()}


def memory() -> Row:
    """The most memory that the process has held on the device so far."""
    stats = jax.devices()[0].memory_stats() or {}
    return {"peak_bytes_so_far": stats["peak_bytes_in_use"]} if "peak_bytes_in_use" in stats else {}


def steps_of(name: str, steps: int, num_envs: int, dtype: str) -> list[jax.Array]:
    """Make the inputs of gae or vtrace: 2 % of the steps terminate an episode and 1 % truncate one."""
    rng, floats = np.random.default_rng(0), ("log_ratio",) * (name == "vtrace") + ("reward", "value", "next_value")
    shape = (steps, num_envs)
    given = [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for _ in floats]
    kind = rng.random(shape, np.float32)
    return [*given, jnp.asarray(kind < 0.02), jnp.asarray(kind > 0.99)]


# --- the sections ---------------------------------------------------------------------------------------------------


def device(plan: Plan) -> list[Row]:
    """The device, its published bandwidth, and that of a copy; what an empty call costs."""
    kind = jax.devices()[0].device_kind
    known = next((x for name, x in BANDWIDTHS.items() if name.replace(" ", "") in kind.replace(" ", "")), None)
    x = jnp.zeros(plan.copied // 4, jnp.float32)
    copied, _ = timed(plan._replace(repeats=min(10, plan.repeats)), lambda x: x + 1, x)
    empty, _ = timed(plan, lambda x: x + 1, jnp.zeros(32))
    return [
        {
            "device": kind,
            "platform": jax.default_backend(),
            "published_bytes_per_second": known,
            "copied_bytes_per_second": 2 * x.nbytes / copied["us"] * 1e6,
            "empty_us": empty["us"],
            "empty_us_alone": empty["us_alone"],
        }
    ]


def kernel(plan: Plan, name: str, steps: int, num_envs: int, dtype: str, bandwidth: float) -> list[Row]:
    """gae or vtrace, in one kernel and by the associative scan, against bandwidth and published times."""
    given = steps_of(name, steps, num_envs, dtype)
    estimate = functools.partial(getattr(functional, name), **GAMMA)
    ways = {way: functools.partial(estimate, implementation=way) for way in ("pallas", "associative")}
    expected = jax.jit(functools.partial(estimate, implementation="scan"))(*given)
    elements, rows = steps * num_envs, []
    touched = sum(x.nbytes for x in (*given, *expected))
    for way, method in ways.items():
        row, out = timed(plan, method, *given)
        off = _timing.error(out, expected)
        if off > (2e-2 if dtype == "bfloat16" else 1e-3):
            raise AssertionError(f"{way} differs from the scan by {off:.2g} of the largest number")
        row = {"way": way, "g_elements_per_second": elements / row["us"] / 1e3, "relative_error": off, **row}
        row |= {"bytes_per_element": touched / elements, "share_of_bandwidth": touched / row["us"] * 1e6 / bandwidth}
        if dtype == "float32" and (published := RL_TRITON.get((name, steps, num_envs))):
            row |= {"rl_triton_us": published, "over_rl_triton": row["us"] / published}
        rows.append(row)
    return rows


def run(plan: Plan, setting: Setting) -> list[Row]:
    """A recipe from its start: environment steps of all seeds per second."""
    steps = setting.updates * setting.num_envs * setting.num_steps
    sizes = {"total_timesteps": steps, "num_envs": setting.num_envs, "num_steps": setting.num_steps}
    common: dict[str, Any] = {"env_id": setting.env_id, **sizes}
    if setting.recipe == "pufferlib":
        made = pufferlib_ppo.make_train(pufferlib_ppo.Config(**common, optimizer="adam"))
    elif setting.recipe == "ippo":
        made = ippo.make_train(ippo.Config(**common), train.one_agent(envs.make(setting.env_id)))
    else:
        made = cleanrl_ppo.make_train(cleanrl_ppo.Config(**common))
    key = jax.random.key(0)
    function, argument = (made, key) if setting.seeds == 1 else (jax.vmap(made), jax.random.split(key, setting.seeds))
    with jax.default_matmul_precision(setting.precision) if setting.precision else contextlib.nullcontext():
        call, took = _timing.compile_cold(function, argument)
    walls = _timing.interleaved({"run": functools.partial(call, argument)}, min(3, plan.rounds))[0]
    seconds, needed = _timing.quartiles(walls["run"])["median"], call.memory_analysis()
    per_second = steps * setting.seeds / seconds
    row: Row = {**setting._asdict(), "steps_per_second": per_second, "run_seconds": seconds}
    row |= {**seconds_of(took), **memory(), "temporary_bytes": needed.temp_size_in_bytes if needed else None}
    return [row | {"over_goal": per_second / GOALS[setting.env_id]}]


def tuned(plan: Plan, steps: int, num_envs: int, block: tuple[int, int, int]) -> list[Row]:
    """gae's kernel with other blocks."""
    estimate = functools.partial(functional.gae, **GAMMA, implementation="pallas")
    with contextlib.ExitStack() as stack:
        for name, size in zip(("COLUMNS", "WARPS", "ROWS"), block, strict=True):
            stack.enter_context(replaced(_kernel, name, size))
        return [timed(plan, estimate, *steps_of("gae", steps, num_envs, "float32"))[0]]


def everything(bench: Bench, wanted: tuple[str, ...]) -> None:
    """All measurements of these sections, the most wanted first."""
    plan = bench.plan

    def attempt(section: str, what: str, measure: Callable[..., list[Row]], *args: Any) -> None:
        if section in wanted:
            bench.attempt(section, what, functools.partial(measure, plan, *args))

    bench.attempt("device", "bandwidth and dispatch", functools.partial(device, plan))
    found = bench.rows[0]
    bandwidth = found.get("published_bytes_per_second") or found.get("copied_bytes_per_second") or math.nan
    for sized in plan.kernels:
        attempt("kernels", "{} {}x{} {}".format(*sized), kernel, *sized, bandwidth)
    for setting in plan.runs:
        what = f"{setting.recipe} {setting.env_id} {setting.num_envs}, {setting.seeds} seeds"
        attempt("train", f"{what} {setting.precision or ''}", run, setting)
    for size, block in itertools.product(plan.tuned, plan.blocks):
        attempt("tune", "gae {}x{}, {} columns, {} warps, {} rows".format(*size, *block), tuned, *size, block)


def main() -> None:
    """Measure and print; write with `--json`, after each measurement."""
    names = ("kernels", "train", "tune")
    options = parser(__doc__, json=None)
    options.add_argument("--sections", nargs="+", choices=names, default=names)
    options.add_argument("--minutes", type=float, default=8, help="of all sections, each of which has a share")
    options.add_argument("--dry-run", action="store_true", help="tiny sizes and emulated kernels, for a test")
    given = options.parse_args()
    dry = given.dry_run or not _recurrence.has_device("cuda")
    if dry:
        print("a dry run: sizes are tiny, kernels are emulated, and times mean nothing")
    with emulated() if dry else contextlib.nullcontext():
        sections = tuple(given.sections)
        everything(Bench(TINY if dry else FULL, given.minutes, given.json, sections), sections)
