"""A `lax.scan` that computes before the loop whatever does not depend on the carry.

`scan_hoisted` traces a step, whose operations are the equations of a jaxpr, and sorts them into those that need the
carry, which run inside the loop, and those that need only `xs`, which `vmap` runs before it. The loop reads the results
of the latter that it needs as its `xs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal

MAX_BYTES = 2**20  # of the arrays that are computed before the loop, which fit in the cache of a core
FIXED, EARLY, LATE = range(3)  # what depends on nothing, which runs before the loop and inside; on `xs`; on the carry
JIT = ("jit", "pjit")  # in new and old versions of JAX
UNNAMED = {"debug_info": None} if jax.__version_info__ < (0, 5, 3) else {}
"""Old jaxprs check that their debug information names as many arguments as they have."""


def scan_hoisted(step: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any) -> tuple[Any, Any]:
    """Compute `lax.scan(step, init, xs)`; operations that do not depend on the carry run once, for all steps.

    With random keys as `xs`, a few operations on large arrays draw all random numbers of the loop, instead of many
    operations on small arrays in each step; the numbers are the same. These stay in the loop: callbacks; generators
    other than threefry, which `vmap` would make draw other numbers; and inner loops, branches and functions with their
    own derivative that depend on the carry. If the arrays would not fit in a cache, everything stays: one core of a CPU
    trains `cleanrl_ppo` on CartPole 12 % faster with 4 environments and 5 % with 16, but with 64 it would gain 2 %, and
    compilation takes a tenth to a quarter longer.
    """
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(init, jax.tree.map(lambda x: x[0], xs))
    carried, given = ([_Value(when) for _ in jax.tree.leaves(tree)] for when, tree in ((LATE, init), (EARLY, xs)))
    operations: list[_Operation] = []
    results = _sort(closed, [*carried, *given], operations)
    before = (each for when, jaxpr, *_ in operations if when == EARLY for each in _equations(jaxpr))
    length = len(jax.tree.leaves(xs)[0])
    if length * sum(x.aval.size * x.aval.dtype.itemsize for each in before for x in each.outvars) > MAX_BYTES:
        return jax.lax.scan(step, init, xs)
    read = [*results, *(x for when, _, inputs, _ in operations if when == LATE for x in inputs)]
    kept = [x for x in dict.fromkeys(read) if x.when == EARLY]

    def early(x: Any) -> list[Any]:
        return _run(operations, EARLY, dict(zip(given, jax.tree.leaves(x), strict=True)), kept)

    def late(carry: Any, x: list[Any]) -> Any:
        known = dict(zip((*carried, *kept), (*jax.tree.leaves(carry), *x), strict=True))
        return jax.tree.unflatten(jax.tree.structure(shapes), _run(operations, LATE, known, results))

    return jax.lax.scan(late, init, jax.vmap(early)(xs), length)


@dataclasses.dataclass(eq=False, frozen=True)
class _Value:
    """When a value in the step is known, and the value itself if it is a constant."""

    when: int
    constant: Any = None


_Operation = tuple[int, Jaxpr, list[_Value], list[_Value]]
"""When an operation runs, a jaxpr of it alone, its inputs and its outputs."""


def _sort(closed: Any, inputs: list[_Value], operations: list[_Operation]) -> list[_Value]:
    """Append the operations of a jaxpr to the list, and return its results.

    Of a jitted function that needs both the carry and `xs`, the operations are sorted one by one; others stay whole.
    """
    values = dict(zip(closed.jaxpr.invars, inputs, strict=True))
    values |= {x: _Value(FIXED, constant) for x, constant in zip(closed.jaxpr.constvars, closed.consts, strict=True)}

    def of(x: Any) -> _Value:
        return _Value(FIXED, x.val) if isinstance(x, Literal) else values[x]

    for equation in closed.jaxpr.eqns:
        read = [of(x) for x in equation.invars]
        needs = {x.when for x in read}
        if equation.primitive.name in JIT and {EARLY, LATE} <= needs:
            written = _sort(equation.params["jaxpr"], read, operations)
        else:
            variables = list(dict.fromkeys(x for x in equation.invars if not isinstance(x, Literal)))
            parts = {"constvars": [], "invars": variables, "outvars": equation.outvars, "eqns": [equation]}
            one = closed.jaxpr.replace(**parts, **UNNAMED)
            stays = equation.effects or any(map(_differs_in_vmap, _equations(one)))
            when = LATE if stays else max(needs, default=FIXED)
            written = [_Value(when) for _ in equation.outvars]
            operations.append((when, one, [of(x) for x in variables], written))
        values |= zip(equation.outvars, written, strict=True)
    return [of(x) for x in closed.jaxpr.outvars]


def _run(operations: list[_Operation], when: int, known: dict[_Value, Any], wanted: list[_Value]) -> list[Any]:
    """Return the wanted values after the operations that run early, or late."""

    def of(x: _Value) -> Any:
        return known.get(x, x.constant)

    for each, jaxpr, inputs, outputs in operations:
        if each in (FIXED, when):
            known |= zip(outputs, jax.core.eval_jaxpr(jaxpr, [], *map(of, inputs)), strict=True)
    return list(map(of, wanted))


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the operations of a jaxpr, and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for x in jax.tree.leaves(equation.params):
            inner = getattr(x, "jaxpr", x)
            if isinstance(inner, Jaxpr):
                yield from _equations(inner)


def _differs_in_vmap(equation: Any) -> bool:
    """Return whether `vmap` of this operation may fail, or draw other random numbers than a loop."""
    name = equation.primitive.name
    if name in ("random_bits", "random_split", "random_fold_in"):
        return "fry" not in str(equation.invars[0].aval.dtype)
    return "callback" in name or name == "rng_bit_generator"
