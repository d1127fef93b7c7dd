"""`Metrics`, a mapping from names to numbers that is stored as one array, so that loops carry a single leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import UserValueError
from ..functional._common import check_same_shape, known_values, stack_scalars
from .batch import Array, Batch, MetricReduction

REDUCE = {
    "sum": lambda x, ran: jnp.sum(x, axis=0, where=ran),
    "mean": lambda x, ran: jnp.sum(x, axis=0, where=ran) / jnp.maximum(jnp.sum(ran), 1),
    "max": lambda x, ran: jnp.max(x, axis=0, where=ran, initial=-jnp.inf),
    "min": lambda x, ran: jnp.min(x, axis=0, where=ran, initial=jnp.inf),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Metrics(Mapping[str, Array]):
    """Named numbers, stored as one array; the names and reductions are static.

    A program that carries or returns dozens of scalars needs a kernel and a copy for each; here they are one leaf.
    Index metrics by name like a dictionary; `metrics["loss"]` has the leading axes that scans and vmaps have added.
    Counts are stored as floats, which are exact up to 2**24.

    Attributes:
        array: `[..., names]`.
        names: the names, in order.
        reductions: "mean", "sum", "max" or "min" for each name, the reduction over several minibatches.

    Example:
        >>> import jax.numpy as jnp
        >>> metrics = Metrics.of({"loss": jnp.array(2.), "ratio_max": jnp.array(3.)}, {"ratio_max": "max"})
        >>> float(metrics["loss"]), metrics.reductions
        (2.0, ('mean', 'max'))
    """

    array: Array
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    reductions: tuple[MetricReduction, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, named: Mapping[str, Any], reductions: Mapping[str, MetricReduction] | None = None) -> Metrics:
        """Make metrics from named arrays of one shape; metrics without a reduction are averaged."""
        check_same_shape("Metrics.of", **named)
        dtype = jnp.result_type(jnp.float32, *(jnp.result_type(x) for x in named.values()))
        values = stack_scalars(list(named.values()), dtype) if named else jnp.zeros((0,), dtype)
        return cls(values, tuple(named), tuple((reductions or {}).get(name, "mean") for name in named))

    def __getitem__(self, name: str) -> Array:
        if name not in self.names:
            raise KeyError(f"no metric is named {name!r}; the metrics are {', '.join(self.names)}")
        if isinstance(self.array, jax.ShapeDtypeStruct):  # from `jax.eval_shape`
            return jax.ShapeDtypeStruct(self.array.shape[:-1], self.array.dtype)  # type: ignore[return-value]
        return self.array[..., self.names.index(name)]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        known = known_values(self.array) if hasattr(self.array, "__array__") else None
        if known is None or known.ndim > 1:
            return f"Metrics({', '.join(self.names)}; array={self.array!r})"
        return f"Metrics({', '.join(f'{name}={x:.4g}' for name, x in zip(self.names, known, strict=True))})"

    def reduce(self, ran: Array) -> Metrics:
        """Reduce the leading axes to one number per metric; only entries where `ran` `[...]` is True count."""
        if not self.names:
            return dataclasses.replace(self, array=jnp.zeros((0,), self.array.dtype))
        rows, ran = self.array.reshape(-1, len(self)), ran.reshape(-1, 1)
        ways = {way: REDUCE[way](rows, ran) for way in dict.fromkeys(self.reductions)}
        values = next(iter(ways.values()))
        for way, reduced in ways.items():
            values = jnp.where(jnp.array([own == way for own in self.reductions]), reduced, values)
        return dataclasses.replace(self, array=values)


def split_metrics(batch: Batch) -> tuple[Metrics, Batch]:
    """Return the metrics of a batch, and the batch without them."""
    return Metrics.of(batch.metrics, dict(batch.reductions)), batch.replace(metrics={}, reductions=())


def join_metrics(*groups: Metrics) -> Metrics:
    """Join all metrics; raise if two have the same name, as a chain does."""
    groups = tuple(group for group in groups if group.names)
    if not groups:
        return Metrics.of({})
    names = tuple(name for group in groups for name in group.names)
    for name in names:
        if names.count(name) > 1:
            raise UserValueError(
                f"learner: a metric named {name!r} is written twice, by two of: the parts before the sampler, those "
                "after it, gradient_metrics and the learner itself; give one of them another name, or put the part "
                "into within(part, name=...)"
            )
    dtype = jnp.result_type(*(group.array for group in groups))
    values = jnp.concatenate([group.array.astype(dtype) for group in groups], axis=-1)
    return Metrics(values, names, tuple(way for group in groups for way in group.reductions))
