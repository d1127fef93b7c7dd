"""Existing parts on other fields: a second critic, a cost critic, two lambdas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ._chain import check_batch
from ._errors import UserTypeError, UserValueError
from ._hyperparameters import Numeric, at, number
from ._types import Array, Batch, Context, Divider, EmptyState, Part, field_at, no_state, with_field_at


def within(
    part: Part, *, name: str, read: Mapping[str, str] | None = None, write: Mapping[str, str] | None = None
) -> Part:
    """Run a part on other fields of the batch: `read` and `write` say which fields replace those that it names.

    A path is a field ("reward"), an entry of one ("extras.intrinsic") or a field of the policy being trained
    ("current.value", "current.aux.intrinsic"). Fields that the part writes and `write` does not name are discarded. Its
    losses and its request to stop are kept, and so are its metrics, as `<name>/<metric>`.

    Args:
        part: any part but a sampler.
        read: field that the part reads -> path where it is. A value under `current` is the one being trained:
            `{"value": "current.aux.intrinsic"}` means `{"current.value": "current.aux.intrinsic"}`.
        write: field that the part writes -> path where it goes.
        name: prefix of its metrics, and what error messages call it.

    Raises:
        ValueError: the part does not write a field that `write` names; an entry that is absent.

    Example:
        An advantage of intrinsic rewards with a critic of its own, added to the extrinsic one:

        >>> import ppo_parts as pp
        >>> intrinsic = pp.within(
        ...     pp.gae(gamma=.99, gae_lambda=.95),
        ...     read={"reward": "extras.intrinsic", "value": "extras.value_intrinsic",
        ...           "next_value": "extras.next_value_intrinsic"},
        ...     write={"advantage": "extras.advantage_intrinsic", "target": "extras.target_intrinsic"},
        ...     name="intrinsic",
        ... )
        >>> pipeline = pp.chain(
        ...     pp.gae(gamma=.99, gae_lambda=.95), intrinsic,
        ...     pp.combine_advantages({"advantage": 1., "extras.advantage_intrinsic": .5}),
        ... )

    Reference: a lens, as in Foster et al. 2007, Combinators for Bidirectional Tree Transformations.
    """
    read, write = read or {}, write or {}
    if not isinstance(part, Part) or isinstance(part, Divider):
        raise UserTypeError(f"within: expected a part that is not a sampler, got {part!r}")
    for field in write:
        if field not in part.provides:
            raise UserValueError(
                f"within: {part.name} does not write {field!r}; it writes {', '.join(part.provides) or 'nothing'}"
            )
    reads = {
        f"current.{field}" if path.startswith("current.") and not field.startswith("current.") else field: path
        for field, path in read.items()
    }

    if part.needs_time and "value" in read and "next_value" not in read and "next_value" in (part.reads or ()):
        raise UserValueError(
            f"within {name!r}: {part.name} would read a value of its own and the next_value of another: say where its "
            'next_value stands, e.g. read={"next_value": "extras.next_..."}'
        )

    needed = {path.partition(".")[2] for path in part.requires if path.startswith("metrics.")}

    def seen(batch: Batch) -> Batch:
        """The batch as the part sees it: with the metrics that it requires, so that it may add any other."""
        kept = {metric: value for metric, value in batch.metrics.items() if metric in needed}
        inner = batch.replace(metrics=kept, reductions=())
        for field, path in reads.items():
            found = field_at(batch, path)
            if found is None:
                raise UserValueError(f"within {name!r}: {part.name} reads {path}, and the batch has none")
            inner = with_field_at(inner, field, found)
        return inner

    def update(batch: Batch, state: Any, context: Context) -> tuple[Batch, Any]:
        inner = seen(batch)
        check_batch(part, inner)
        result, state = part.update(inner, state, context)
        for field, path in write.items():
            batch = with_field_at(batch, path, field_at(result, field))
        if result.losses is not inner.losses or result.stop is not inner.stop:
            batch = batch.replace(losses=result.losses, stop=result.stop)
        for metric, value in result.metrics.items():
            if metric not in needed:
                way = dict(result.reductions).get(metric, "mean")
                batch = batch.add_metrics(way, **{f"{name}/{metric}": value})
        return batch, state

    def finish(batch: Batch, state: Any, context: Context) -> Any:
        assert part.finish is not None
        return part.finish(seen(batch), state, context)

    outer = tuple(dict.fromkeys(read.get(field, field) for field in part.requires))
    unchanged = None if part.reads is None else (*(field for field in part.reads if field not in read), *read.values())
    return Part(
        part.init,
        update,
        name,
        requires=tuple(path for path in outer if not path.startswith("current.")),
        provides=(*write.values(), *(field for field in part.provides if field in ("losses", "stop"))),
        reads=unchanged,
        place=part.place,
        needs_time=part.needs_time,
        amend=part.amend,
        finish=None if part.finish is None else finish,
    )


def combine_advantages(coefficients: Mapping[str, Numeric]) -> Part:
    r"""Write `advantage` as a weighted sum, :math:`A = \sum_k c_k A^{(k)}`.

    Args:
        coefficients: path ("advantage", "extras.advantage_intrinsic") -> coefficient; schedules count learner updates.

    Place: after the parts that write these fields.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.combine_advantages({"advantage": 2., "extras.advantage_intrinsic": 1.})

    Reference: Burda et al. 2018, Exploration by Random Network Distillation, arXiv:1810.12894, section 2.3.
    """
    if not coefficients:
        raise UserValueError("combine_advantages: name at least one advantage")
    coefficients = {
        path: number("combine_advantages", f"coefficient of {path}", coefficient, -jnp.inf)
        for path, coefficient in coefficients.items()
    }

    def update(batch: Batch, state: EmptyState, context: Context) -> tuple[Batch, EmptyState]:
        terms: list[Array] = [at(c, context.step) * field_at(batch, path) for path, c in coefficients.items()]
        first = field_at(batch, next(iter(coefficients)))
        return batch.replace(advantage=sum(terms[1:], terms[0]).astype(first.dtype)), state

    return Part(no_state, update, "combine_advantages", requires=tuple(coefficients), provides=("advantage",), reads=())
