"""`functional.gae` and `functional.vtrace` against other ways to compute them, and against merely moving the memory.

`python -m benchmarks.gae --json benchmarks/results/gae_cpu.json`

Two clocks. *alone*: one compiled call, waited for; below some 50 000 elements that is the time to dispatch it.
*inside*: the same function repeated in a loop of one compiled program, behind an optimization barrier, which is what it
costs within a training step. Boolean terminations and truncations, float32, time first.

ours                with truncation
ours_terminated     without, to compare with rlax, which knows no truncation
unrolled            a scan closure as in PureJaxRL, unroll=16, with truncation
associative         lax.associative_scan, with truncation
rlax                vmapped over environments; terminations alone
floor               an elementwise operation that reads the same arrays as ours and writes as many
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rlax

from ppo_parts import functional

from . import _timing

SIZES = ((128, 4), (128, 64), (128, 2048), (1024, 1024), (2048, 8))
GAMMA, LAMBDA = 0.99, 0.95


class Inputs(NamedTuple):
    """What both estimators read (`gae` leaves `log_ratio` alone)."""

    log_ratio: jax.Array
    reward: jax.Array
    value: jax.Array
    next_value: jax.Array
    terminated: jax.Array
    truncated: jax.Array


Outputs = tuple[jax.Array, ...]
Method = Callable[[Inputs], Outputs]


def inputs(time: int, envs: int) -> Inputs:
    """Random numbers, 2 % terminations, 1 % truncations."""
    keys = jax.random.split(jax.random.key(0), 6)
    log_ratio, reward, value, final_value = (jax.random.normal(key, (time, envs)) for key in keys[:4])
    terminated = jax.random.bernoulli(keys[4], 0.02, (time, envs))
    truncated = jax.random.bernoulli(keys[5], 0.01, (time, envs)) & ~terminated
    next_value = functional.next_values(value, final_value[-1], truncated, final_value)
    return Inputs(0.1 * log_ratio, reward, value, next_value, terminated, truncated)


def weights(x: Inputs, clipped: bool) -> tuple[jax.Array | float, jax.Array]:
    """rho, and gamma * lambda * c * (1 - done), as a peer would write them; V-trace if `clipped`."""
    rho = jnp.minimum(jnp.exp(x.log_ratio), 1.0) if clipped else 1.0
    done = x.terminated.astype(jnp.float32) + x.truncated.astype(jnp.float32)
    return rho, GAMMA * LAMBDA * rho * (1 - done)


def td_error(x: Inputs, follows: jax.Array) -> jax.Array:
    """r + gamma (1 - terminated) v' - v."""
    return x.reward + GAMMA * (1 - x.terminated.astype(jnp.float32)) * follows - x.value


def finished(x: Inputs, error: jax.Array, rho: jax.Array | float, clipped: bool) -> Outputs:
    """Target, and for V-trace the policy advantage."""
    target = error + x.value
    if not clipped:
        return error, target
    follows = jnp.where(x.truncated, x.next_value, jnp.concatenate([target[1:], x.next_value[-1:]]))
    return error, target, rho * td_error(x, follows)


def unrolled(x: Inputs, clipped: bool) -> Outputs:
    """A scan whose closure does everything, unrolled 16 times."""

    def step(later: jax.Array, now: Inputs) -> tuple[jax.Array, jax.Array]:
        rho, trace = weights(now, clipped)
        error = rho * td_error(now, now.next_value) + trace * later
        return error, error

    error = jax.lax.scan(step, jnp.zeros_like(x.value[0]), x, reverse=True, unroll=16)[1]
    return finished(x, error, weights(x, clipped)[0], clipped)


def associative(x: Inputs, clipped: bool) -> Outputs:
    """In log2(T) parallel passes."""
    rho, trace = weights(x, clipped)

    def combine(later: Outputs, now: Outputs) -> Outputs:
        return now[0] + now[1] * later[0], now[1] * later[1]

    error = jax.lax.associative_scan(combine, (rho * td_error(x, x.next_value), trace), reverse=True)[0]
    return finished(x, error, rho, clipped)


def rlax_gae(x: Inputs) -> Outputs:
    """`rlax.truncated_generalized_advantage_estimation`."""
    values = jnp.concatenate([x.value, x.next_value[-1:]])
    discount = GAMMA * (1 - x.terminated.astype(jnp.float32))
    estimate = jax.vmap(rlax.truncated_generalized_advantage_estimation, (1, 1, None, 1), 1)
    advantage = estimate(x.reward, discount, LAMBDA, values)
    return advantage, advantage + x.value


def rlax_vtrace(x: Inputs) -> Outputs:
    """`rlax.vtrace_td_error_and_advantage`."""
    discount = GAMMA * (1 - x.terminated.astype(jnp.float32))
    estimate = jax.vmap(rlax.vtrace_td_error_and_advantage, (1, 1, 1, 1, 1, None), 1)
    out = estimate(x.value, x.next_value, x.reward, discount, jnp.exp(x.log_ratio), LAMBDA)
    return out.errors, out.errors + x.value, out.pg_advantage


def gae(x: Inputs, truncated: bool = True) -> Outputs:
    """Ours."""
    return functional.gae(*x[1:5], x.truncated if truncated else None, gamma=GAMMA, gae_lambda=LAMBDA)


def vtrace(x: Inputs, truncated: bool = True) -> Outputs:
    """Ours."""
    return functional.vtrace(*x[:5], x.truncated if truncated else None, gamma=GAMMA, gae_lambda=LAMBDA)


def floor(x: Inputs, clipped: bool) -> Outputs:
    """Reads every array once, writes two or three."""
    mixed = x.reward + jnp.where(x.terminated, 0, x.next_value) - jnp.where(x.truncated, 0, x.value)
    return (mixed + x.log_ratio, -x.value, -x.reward) if clipped else (mixed, -x.value)


METHODS: dict[str, dict[str, Method]] = {
    "gae": {
        "ours": gae,
        "ours_terminated": lambda x: gae(x, truncated=False),
        "unrolled": lambda x: unrolled(x, clipped=False),
        "associative": lambda x: associative(x, clipped=False),
        "rlax": rlax_gae,
        "floor": lambda x: floor(x, clipped=False),
    },
    "vtrace": {
        "ours": vtrace,
        "ours_terminated": lambda x: vtrace(x, truncated=False),
        "unrolled": lambda x: unrolled(x, clipped=True),
        "associative": lambda x: associative(x, clipped=True),
        "rlax": rlax_vtrace,
        "floor": lambda x: floor(x, clipped=True),
    },
}
RATIOS = (("ours", "floor"), ("ours_terminated", "rlax"), ("unrolled", "ours"), ("associative", "ours"))


def repeated(method: Method) -> Callable[[int, Inputs], Outputs]:
    """`method` n times in one program; the barrier keeps the repeats from being merged or moved out of the loop."""

    def run(n: int, x: Inputs) -> Outputs:
        def body(_: Any, carry: tuple[Inputs, Outputs]) -> tuple[Inputs, Outputs]:
            x, _ = jax.lax.optimization_barrier(carry)
            return x, tuple(method(x))

        start = tuple(jnp.zeros(out.shape, out.dtype) for out in jax.eval_shape(method, x))
        return jax.lax.fori_loop(0, n, body, (x, start))[1]

    return run


def check(methods: dict[str, Method], x: Inputs) -> None:
    """All ways give the same numbers; rlax's policy advantage mixes its target with lambda and is left out."""
    uncut = x._replace(next_value=functional.next_values(x.value, x.next_value[-1]))
    pairs = (("unrolled", "ours", x), ("associative", "ours", x), ("rlax", "ours_terminated", uncut))
    for name, reference, given in pairs:
        got, expected = jax.jit(methods[name])(given), jax.jit(methods[reference])(given)
        for i in range(2 if name == "rlax" else len(expected)):
            np.testing.assert_allclose(got[i], expected[i], rtol=1e-3, atol=1e-3, err_msg=name)


def measure(methods: dict[str, Method], x: Inputs, rounds: int) -> dict[str, Any]:
    """Microseconds and ratios by both clocks."""
    check(methods, x)
    alone, inside, repeats = {}, {}, {}
    for name, method in methods.items():
        call = _timing.compiled(method, x)[0]
        alone[name] = lambda call=call: call(x)
        call = _timing.compiled(repeated(method), 1, x)[0]
        once = min(_timing.seconds(lambda call=call: call(3, x), 2)[0] / 3 for _ in range(2))
        repeats[name] = n = max(2, round(0.01 / once))
        inside[name] = lambda call=call, n=n: call(n, x)
    clocks = {
        "alone": _timing.interleaved(alone, rounds, at_least=0.005)[0],
        "inside": {
            name: [sample / repeats[name] for sample in samples]
            for name, samples in _timing.interleaved(inside, rounds, at_least=0)[0].items()
        },
    }
    return {
        clock: {
            "us": {name: 1e6 * _timing.quartiles(values)[0] for name, values in samples.items()},
            "ratios": {f"{a} / {b}": _timing.ratio(samples, a, b) for a, b in RATIOS},
        }
        for clock, samples in clocks.items()
    }


def main() -> None:
    """Print the tables; write them with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=31, help="interleaved rounds")
    parser.add_argument("--sizes", nargs="+", default=["x".join(map(str, size)) for size in SIZES], metavar="TxN")
    parser.add_argument("--only", choices=tuple(METHODS), help="one of the two estimators")
    parser.add_argument("--json", metavar="PATH", help="write the results here")
    options = parser.parse_args()
    results = []
    for estimator in [options.only] if options.only else METHODS:
        methods = METHODS[estimator]
        print(f"{estimator}, median us" + "".join(f"{name:>17}" for name in methods))
        for size in options.sizes:
            time, envs = map(int, size.split("x"))
            measured = measure(methods, inputs(time, envs), options.rounds)
            results.append({"estimator": estimator, "size": [time, envs], "rounds": options.rounds, **measured})
            for clock, numbers in measured.items():
                print(f"{size:>9} {clock:8}" + "".join(f"{us:17.1f}" for us in numbers["us"].values()))
                ratios = (
                    f"{n} {r['median']:.2f} ({r['q1']:.2f} - {r['q3']:.2f})" for n, r in numbers["ratios"].items()
                )
                print(" " * 19 + "; ".join(ratios), flush=True)
    _timing.write(options.json, "benchmarks.gae", results)


if __name__ == "__main__":
    main()
