"""What is done differently on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

Array = jax.Array


def sequential_vmap_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which `jax.vmap` calls once for each element, one after another, if the backend is a CPU.

    Two things ask for that. One update keeps a core busy: many at once take longer, as their activations fill the
    cache, and none can stop early. And matrices that are factorised at once, in two places of a program, can block
    every thread of the CPU for ever; see docs/decisions/0004-batched-lapack.md.
    """

    def run(*args: Any) -> Any:
        if jax.default_backend() != "cpu":
            return function(*args)
        # custom_vmap cannot see what a closure holds of the vmap around it, such as a swept learning rate.
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        given, structure = jax.tree.leaves(args), jax.tree.structure(shapes)

        def call(held: list[Array], given: list[Array]) -> list[Array]:
            return jaxpr_as_fun(traced.replace(consts=held))(*given)

        return jax.tree.unflatten(structure, jax.custom_batching.sequential_vmap(call)(list(traced.consts), given))

    return run
