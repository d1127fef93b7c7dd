"""Parts and functions that run in every update, against their rivals and a plain copy of the memory.

    python -m benchmarks parts --parts gae vtrace_terminated --sizes 128x64
    python -m benchmarks parts --sizes 128x4 128x64 2048x8 128x2048 --json benchmarks/results/parts.jsonl#cpu

A function is repeated in a loop of one compiled program, so its time is what it costs within a training step.
*gradient* is `value_and_grad` of the mean loss. The *floor* reads and writes as many bytes, and computes almost
nothing. The rivals are a scan unrolled 16 times, as in PureJaxRL; the associative scan; and rlax, if it is installed,
vmapped over environments, where it computes the same. (It knows no truncation: `gae_terminated`, `vtrace_terminated`.)

A row has the microseconds of a call and, within each round, its ratios to the floor and to ours: median (quartiles). It
is *disturbed* if the upper quartile of ours is more than 1.5 times the lower one: then measure again.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import ppo_parts as pp
from ppo_parts import distributions, functional

from . import _timing
from ._by_hand import scan_by_hand
from ._records import collect, make_parser

try:
    import rlax
except ImportError:
    rlax = None

SIZES = ((128, 4), (128, 64), (2048, 8), (128, 2048), (1024, 1024), (128, 65536), (8192, 2048))
GAMMA, LAMBDA, CLIP, MINIBATCHES, ACTIONS = 0.99, 0.95, 0.2, 4, 4
ESTIMATE = {"gamma": GAMMA, "gae_lambda": LAMBDA}
STEPS = ("reward", "value", "next_value", "terminated", "truncated")
Method = Callable[..., Any]
Arrays = dict[str, Any]


class Case(NamedTuple):
    """One measurement: `ours(*reads)`, and its rivals (for a loss, the rivals of the gradient)."""

    reads: tuple[str, ...]
    ours: Method
    rivals: Mapping[str, Method] = {}
    wrt: int | None = None  # the argument with respect to which a loss is differentiated
    alike: bool = True  # the rivals return the same numbers


def make_workload(time: int, envs: int) -> Arrays:
    """Make random arrays by name: `[T, N]` floats and booleans, and what belongs to one step or segment."""
    keys = iter(jax.random.split(jax.random.key(0), 20))
    shape = (time, envs)

    def normal(scale: float = 1.0, shape: tuple[int, ...] = shape) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape)

    names = ("reward", "value", "final_value", "target", "advantage", "log_prob", "delta", "current_value")
    arrays = {name: normal() for name in names}
    arrays |= {"log_ratio": normal(0.1), "current_log_prob": arrays["log_prob"] + normal(0.1)}
    arrays["trace"] = jax.random.uniform(next(keys), shape)
    terminated = jax.random.bernoulli(next(keys), 0.02, shape)
    truncated = jax.random.bernoulli(next(keys), 0.01, shape) & ~terminated
    last = normal(shape=(envs,))
    return arrays | {
        "terminated": terminated,
        "truncated": truncated,
        "last_value": last,
        "next_value": functional.next_values(arrays["value"], last, truncated, arrays["final_value"]),
        "shifted_value": functional.next_values(arrays["value"], last),
        "probabilities": functional.segment_priorities(arrays["advantage"], alpha=0.8),
        "indices": jax.random.randint(next(keys), (envs,), 0, envs),
        "weight": jnp.ones((envs,)),
        "logits": jax.random.normal(jax.random.key(2), (*shape, ACTIONS)),
        "key": jax.random.key_data(jax.random.key(1)),
    }


def rlax_gae(reward: jax.Array, value: jax.Array, shifted: jax.Array, terminated: jax.Array) -> tuple[jax.Array, ...]:
    """Call `rlax.truncated_generalized_advantage_estimation`."""
    values = jnp.concatenate([value, shifted[-1:]])
    estimate = jax.vmap(rlax.truncated_generalized_advantage_estimation, (1, 1, None, 1), 1)
    advantage = estimate(reward, GAMMA * (1 - terminated), LAMBDA, values)
    return advantage, advantage + value


def rlax_vtrace(log_ratio: Any, reward: Any, value: Any, shifted: Any, terminated: Any) -> Any:
    """Call `rlax.vtrace_td_error_and_advantage`, whose policy advantage (a mix with lambda) is not compared."""
    estimate = jax.vmap(rlax.vtrace_td_error_and_advantage, (1, 1, 1, 1, 1, None), 1)
    out = estimate(value, shifted, reward, GAMMA * (1 - terminated), jnp.exp(log_ratio), LAMBDA)
    return out.errors, out.errors + value, out.pg_advantage


def rlax_surrogate(log_ratio: jax.Array, advantage: jax.Array) -> jax.Array:
    """Call `rlax.clipped_surrogate_pg_loss`, which averages over time, vmapped over environments."""
    estimate = jax.vmap(partial(rlax.clipped_surrogate_pg_loss, epsilon=CLIP), (1, 1))
    return estimate(jnp.exp(log_ratio), advantage)


def run_part(made: pp.Part, writes: Callable[[pp.Batch], Any], *reads: str, wrt: int | None = None) -> Case:
    """Make a case that runs a part on these fields; `logits`, `current_log_prob`, `current_value` are of `current`."""

    def run(*arrays: jax.Array) -> Any:
        fields = dict(zip(reads, arrays, strict=True))
        policy = distributions.Categorical(fields.pop("logits")) if "logits" in fields else None
        current = pp.Current(policy, fields.pop("current_log_prob", None), fields.pop("current_value", None))
        batch = pp.Batch(**fields, current=current if any(x is not None for x in current) else None)
        return writes(made.update(batch, made.init(None), pp.Context(key=jax.random.key(0)))[0])

    return Case(reads, run, wrt=wrt)


def run_sampler(made: Any) -> Case:
    """Make a case that runs one epoch of a sampler: the plan, and then every minibatch drawn and copied out."""
    fields = ("log_prob", "value", "advantage", "target")

    def run(key: jax.Array, *arrays: jax.Array) -> Any:
        key = jax.random.wrap_key_data(key)
        batch = pp.Batch(**dict(zip(fields, arrays, strict=True)))

        def minibatch(item: Any) -> list[jax.Array]:
            indices, weight = made.draw(item, batch, pp.Context(key=key))
            taken = made.take(batch, indices, weight)
            return [getattr(taken, field) for field in fields]

        return jax.lax.map(minibatch, made.plan(key, batch, 0))

    return Case(("key", *fields), run)


def make_cases() -> dict[str, Case]:
    """Make all cases by name: functions, then parts (`pp.`)."""
    gae, vtrace, scan = (partial(f, **ESTIMATE) for f in (functional.gae, functional.vtrace, scan_by_hand))
    uncut, recurrence = ("reward", "value", "shifted_value", "terminated"), functional.reverse_recurrence
    associative = partial(recurrence, implementation="associative")
    surrogate = partial(functional.clipped_surrogate, clip_eps=CLIP)
    metrics, values = ("log_prob", "current_log_prob", "advantage"), ("current_value", "value", "target", "log_prob")

    def permuted(permutation: Callable[..., jax.Array]) -> Method:
        return lambda key, x: permutation(jax.random.wrap_key_data(key), x.size)

    def with_rlax(method: Method) -> dict[str, Method]:
        return {"rlax": method} if rlax else {}

    def estimates(batch: pp.Batch) -> Any:
        return batch.advantage, batch.target, dict(batch.metrics)

    def loss(batch: pp.Batch) -> Any:
        return next(iter(batch.losses.values()))

    permutation, of_jax = map(permuted, (functional.permutation, jax.random.permutation))
    return {
        "gae": Case(STEPS, gae, {"unrolled": scan}),
        "gae_terminated": Case(uncut, gae, with_rlax(rlax_gae)),
        "vtrace": Case(("log_ratio", *STEPS), vtrace, {"unrolled": scan}),
        "vtrace_terminated": Case(("log_ratio", *uncut), vtrace, with_rlax(rlax_vtrace)),
        "reverse_recurrence": Case(("delta", "trace"), recurrence, {"associative": associative}),
        "next_values": Case(("value", "last_value", "truncated", "final_value"), functional.next_values),
        "advantage_normalize": Case(("advantage",), functional.advantage_normalize),
        "clipped_surrogate": Case(("log_ratio", "advantage"), surrogate, with_rlax(rlax_surrogate), wrt=0),
        "value_loss": Case(("value", "target"), functional.value_loss, wrt=0),
        "clipped_value_loss": Case(values[:3], partial(functional.clipped_value_loss, clip_eps=CLIP), wrt=0),
        "approx_kl": Case(("log_ratio",), functional.approx_kl, wrt=0),
        "clip_fraction": Case(("log_ratio",), partial(functional.clip_fraction, clip_eps=CLIP)),
        "explained_variance": Case(("value", "target"), functional.explained_variance),
        "segment_priorities": Case(("advantage",), partial(functional.segment_priorities, alpha=0.8)),
        "importance_weights": Case(("probabilities", "indices"), partial(functional.importance_weights, beta=0.4)),
        "permutation": Case(("key", "value"), permutation, {"jax": of_jax}, alike=False),
        "pp.gae": run_part(pp.gae(**ESTIMATE), estimates, *STEPS),
        "pp.vtrace": run_part(pp.vtrace(**ESTIMATE), estimates, "log_ratio", *STEPS),
        "pp.advantage_normalize": run_part(pp.advantage_normalize(), lambda batch: batch.advantage, "advantage"),
        "pp.clipped_surrogate": run_part(pp.clipped_surrogate(clip_eps=CLIP), loss, *metrics, wrt=1),
        "pp.clipped_value_loss": run_part(pp.clipped_value_loss(clip_eps=CLIP), loss, *values, wrt=0),
        "pp.value_loss": run_part(pp.value_loss(), loss, *values, wrt=0),
        "pp.entropy_bonus": run_part(pp.entropy_bonus(coef=0.01), loss, "logits", "log_prob", wrt=0),
        "pp.advantage_weight": run_part(pp.advantage_weight(), lambda batch: batch.advantage, "advantage", "weight"),
        "pp.kl_early_stop": run_part(pp.kl_early_stop(0.02), lambda batch: batch.stop.discard, *metrics[:2]),
        "pp.full_batch": run_sampler(pp.full_batch()),
        "pp.shuffled_minibatches": run_sampler(pp.shuffled_minibatches(MINIBATCHES)),
        "pp.segment_minibatches": run_sampler(pp.segment_minibatches(MINIBATCHES)),
        "pp.prioritized_sampler": run_sampler(pp.prioritized_sampler(MINIBATCHES, alpha=0.8, beta=0.4)),
    }


def differentiate(method: Method, wrt: int) -> Method:
    """Return the mean loss and its gradient; first average over time, like rlax, which XLA vectorizes on CPUs."""
    return jax.value_and_grad(lambda *args: jnp.mean(jnp.mean(method(*args), axis=0)), wrt)


def measure(case: Case, arrays: Arrays, direction: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield one row per method."""
    args = tuple(arrays[name] for name in case.reads)
    methods = {"ours": case.ours}
    if direction == "gradient" or case.wrt is None:
        methods |= case.rivals
    if direction == "gradient":
        methods = {name: differentiate(method, case.wrt) for name, method in methods.items()}
    if case.alike and len(methods) > 1:  # compare what they have in common: the first two arrays
        results = {name: jax.tree.leaves(jax.jit(method)(*args)) for name, method in methods.items()}
        common = min(2, *map(len, results.values()))
        _timing.assert_same({name: result[:common] for name, result in results.items()})
    program = jax.make_jaxpr(methods["ours"])(*args).jaxpr
    used = {id(x) for operation in program.eqns for x in operation.invars}  # only the shapes of others are used
    moved = [x.aval for x in (*(x for x in program.invars if id(x) in used), *program.outvars)]
    traffic = sum(x.size * x.dtype.itemsize for x in moved)
    cases = {name: (method, args) for name, method in methods.items()}
    floor = {"floor": (jnp.add, (jnp.zeros(-(-traffic // 8), jnp.float32),), True)}
    samples = _timing.measure_calls(cases | floor, rounds, long=0.5)
    ours = _timing.summarize(samples["ours"])
    disturbed = ours["q3"] > 1.5 * ours["q1"]  # probably by other work on the machine
    for name, each in samples.items():
        row = {"method": name, "us": _timing.summarize(each, 1e6), "disturbed": disturbed}
        row["gb_per_s"] = traffic / _timing.summarize(each)["median"] / 1e9
        yield row | {f"over_{other}": _timing.compare(samples, name, other) for other in ("floor", "ours")}


def main() -> None:
    """Print a row for each measurement; write them with `--json`."""
    known = make_cases()
    parser = make_parser(__doc__, sizes=SIZES, rounds=15, json=None)
    names = {"choices": tuple(known), "default": tuple(known), "help": f"(default: all of {', '.join(known)})"}
    parser.add_argument("--parts", nargs="+", metavar="PART", **names)
    options = parser.parse_args()

    def rows() -> Iterator[dict[str, Any]]:
        for time, envs in options.sizes:
            arrays = make_workload(time, envs)
            for name in options.parts:
                for direction in ("forward",) if known[name].wrt is None else ("forward", "gradient"):
                    where = {"part": name, "direction": direction, "size": [time, envs]}
                    for row in measure(known[name], arrays, direction, options.rounds):
                        yield where | row

    collect(options.json, rows())
