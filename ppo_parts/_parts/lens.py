"""Parts that run other parts on other fields, for example for a second critic, a cost critic, or two lambdas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from .._base.checked import checked
from .._base.hyperparameters import Numeric, check_number
from .._core.batch import Array, Batch, Params, field_at, with_field_at
from .._core.chain import check_wrapped, fold, inner_key, parts_of
from .._core.part import Context, Part, stateless
from .._core.wiring import list_reads, reads_field
from ..errors import ShapeError, UserValueError
from ..functional._arguments import ANY, check_as
from ..functional._common import check_same_shape


def wrap_part(
    part: Part,
    name: str,
    inner: Callable[[Batch], Batch],
    outer: Callable[[Batch, Batch, Batch], Batch],
    *,
    requires: tuple[str, ...],
    provides: tuple[str, ...],
    reads: tuple[str, ...] | None,
) -> Part:
    """Make a part that runs another part on `inner(batch)` and returns `outer(batch, inner(batch), result)`."""

    def init(params: Params, key: Array | None = None) -> Any:
        return part.init(params, inner_key(part, key))

    def update(batch: Batch, state: Any, context: Context) -> tuple[Batch, Any]:
        seen = inner(batch)
        result, (state,) = fold((part,), seen, (state,), of_part(context))
        return outer(batch, seen, result), state

    def finish(batch: Batch, state: Any, context: Context) -> Any:
        assert part.finish is not None
        return part.finish(inner(batch), state, of_part(context))

    def of_part(context: Context) -> Context:
        return context.replace(key=inner_key(part, context.key))

    finished = None if part.finish is None else finish
    return Part(
        init, update, name, requires, provides, reads, part.place, part.needs_time, part.amend, finished,
        policy_loss=part.policy_loss, elementwise=part.elementwise,
    )  # fmt: skip


@checked
def within(
    part: Part, *, name: str, read: Mapping[str, str] | None = None, write: Mapping[str, str] | None = None
) -> Part:
    """Run a part on other fields of the batch; `read` and `write` map the part's paths to other paths.

    A path is a field ("reward"), an entry of a field ("extras.intrinsic") or a field of the policy being trained
    ("current.value", "current.aux.intrinsic"). Fields that the part writes are discarded unless `write` names them. The
    part's stop request is kept, as are its losses, named `<name>/<loss>`, and its metrics, named `<name>/<metric>`.

    Args:
        part: any part except a sampler.
        read: maps a path that the part reads to the path to read instead; for a value loss, for example,
            "current.value" to "current.aux.intrinsic".
        write: maps a field that the part writes to the path to write.
        name: prefix of its losses and metrics, and its name in error messages.

    Example:
        Add the advantage of intrinsic rewards, which have a separate critic, to the extrinsic advantage:

        >>> import ppo_parts as pp
        >>> intrinsic = pp.within(
        ...     pp.gae(gamma=.99, gae_lambda=.95),
        ...     read={"reward": "extras.intrinsic", "value": "extras.value_intrinsic",
        ...           "next_value": "extras.next_value_intrinsic"},
        ...     write={"advantage": "extras.advantage_intrinsic", "target": "extras.target_intrinsic"},
        ...     name="intrinsic",
        ... )

    Reference: this is a lens in the sense of Foster et al. 2007, Combinators for Bidirectional Tree Transformations.
    """
    reading, writing = dict(read or {}), dict(write or {})
    for path in (*reading, *reading.values(), *writing, *writing.values()):
        check_as("within", "a path of read or write", path, str)
    check_wrapped("within", part, "a part that is not a sampler")
    for field in writing:
        if field not in part.provides:
            raise UserValueError(
                f"within: {part.name} does not write {field!r}; it writes {', '.join(part.provides) or 'nothing'}"
            )
    for field in reading:
        if part.reads is not None and not reads_field(part, field):
            there = ", ".join(list_reads(part))
            raise UserValueError(f"within: {part.name} does not read {field!r}; it reads {there or 'nothing'}")
    if "mask" in reading and "losses" in part.provides:
        raise UserValueError(
            f"within: the learner averages the losses of {part.name} over batch.mask, so read cannot replace the mask: "
            'average in a part of your own, batch.add_loss(name, functional.masked_mean(loss, mask), per="batch")'
        )
    _check_one_critic(name, part, reading)
    acts = writing or part.amend or part.finish or not {"losses", "stop"}.isdisjoint(part.provides)
    if part.provides and not acts:
        says = f"within: {part.name} writes only {', '.join(part.provides)}, which would be discarded"
        raise UserValueError(f"{says}: give write={{...}}")

    def inner(batch: Batch) -> Batch:
        """Return the batch that the part receives.

        The batch contains only the metrics and losses that the part requires, so the part may use any other name.
        """
        metrics = {name: value for name, value in batch.metrics.items() if f"metrics.{name}" in part.requires}
        losses = batch.losses if "losses" in part.requires else {}
        seen = batch.replace(metrics=metrics, losses=losses, reductions=())
        for field, path in reading.items():
            found = field_at(batch, path)
            if found is None:
                written = ": let the rollout record it, or put the part that writes it before this one"
                remedy = written if path.startswith("extras.") else ""
                raise UserValueError(
                    f"within {name!r}: {part.name} reads {path}, which the batch does not have{remedy}"
                )
            if batch.current is None and field.startswith("current."):
                raise UserValueError(
                    f"within {name!r}: {part.name} reads {field}, which exists only after the sampler: name a field of "
                    "the rollout instead, or put the part after the sampler"
                )
            seen = with_field_at(seen, field, found)
        return seen

    def outer(batch: Batch, seen: Batch, result: Batch) -> Batch:
        """Return the batch with the fields that the part wrote, and with its losses and metrics under the prefix."""
        # This check is not in `inner`, because in `finish`, parts before the sampler have a current policy, too.
        _check_one_critic(name, part, reading, after_sampler=batch.current is not None)
        for field, path in writing.items():
            batch = with_field_at(batch, path, field_at(result, field))
        changed = {key: loss for key, loss in result.losses.items() if key in seen.losses}
        added = {f"{name}/{key}": loss for key, loss in result.losses.items() if key not in seen.losses}
        if taken := [key for key in added if key in batch.losses]:
            raise UserValueError(
                f"within {name!r}: a loss named {taken[0]!r} is already in this chain: give the lens another name with "
                'name="..."'
            )
        losses = {**batch.losses, **changed, **added} if changed or added else batch.losses
        batch = batch.replace(losses=losses, stop=result.stop)
        for key, value in result.metrics.items():
            if key not in seen.metrics:
                reduction = dict(result.reductions).get(key, "mean")
                batch = batch.add_metrics(reduction, **{f"{name}/{key}": value})
        return batch

    requires = dict.fromkeys(reading.get(field, field) for field in part.requires)
    return wrap_part(
        part,
        name,
        inner,
        outer,
        requires=tuple(path for path in requires if not path.startswith("current.")),
        provides=(*writing.values(), *(field for field in part.provides if field in ("losses", "stop"))),
        reads=None if part.reads is None else (*(x for x in part.reads if x not in reading), *reading.values()),
    )


def _check_one_critic(name: str, part: Part, read: dict[str, str], *, after_sampler: bool = False) -> None:
    """Raise if the part would mix values of the critic that `read` names with values of the batch's critic."""
    own = set(read)  # fields that no longer come from the batch's critic
    for inner in parts_of(part):
        values = {"value", "current.value"} if after_sampler or inner.place == "after_sampler" else {"value"}
        others = sorted((values | {"next_value"}).intersection(list_reads(inner)) - own)
        if own & values and others:
            example = "current.aux.cost" if others[0] == "current.value" else f"extras.{others[0]}_of_cost"
            raise UserValueError(
                f"within {name!r}: {inner.name} would combine the value of one critic with {' and '.join(others)} of "
                f'another: give the path of {others[0]}, too, e.g. read={{"{others[0]}": "{example}"}}'
            )
        own.update(inner.provides)


@checked
def combine_advantages(coefficients: Mapping[str, Numeric | tuple[Numeric, ...]]) -> Part:
    r"""Write `advantage` as a weighted sum, :math:`A = \sum_k c_k A^{(k)}`.

    Args:
        coefficients: path ("advantage", "extras.advantage_intrinsic") -> coefficient. If a field has K streams along
            its last axis, which are summed, give a tuple of K coefficients, or a `field` with K numbers per element.

    Place: after the parts that write these fields.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.combine_advantages({"advantage": 2., "extras.advantage_intrinsic": 1.})

    Reference: Burda et al. 2018, Exploration by Random Network Distillation, arXiv:1810.12894, the section on combining
    intrinsic and extrinsic returns.
    """
    where = "combine_advantages"
    if not coefficients:
        raise UserValueError("combine_advantages: name at least one advantage")

    def checked_number(path: str, x: Any) -> Any:
        return check_number(where, f"coefficient of {path}", x, ANY, field=True)

    numbers, of_streams = dict[str, Any](), dict[str, list[str]]()
    for path, c in dict[str, Any](coefficients).items():
        if isinstance(c, (tuple, list)) or getattr(c, "ndim", 0) == 1:
            of_streams[path] = [f"{path}[{k}]" for k in range(len(c))]
            numbers |= {name: checked_number(path, x) for name, x in zip(of_streams[path], c, strict=True)}
        else:
            numbers[path] = checked_number(path, c)

    def weighted(path: str, batch: Batch, c: Any) -> Array:
        x, rank = field_at(batch, path), jnp.ndim(batch.log_prob)
        streams = x.shape[rank:]
        if isinstance(c, tuple):
            got = f"{len(c)} coefficients"
            if streams == (len(c),):
                return functools.reduce(jnp.add, [one * x[..., k] for k, one in enumerate(c)])
        else:
            sizes = jnp.shape(c)
            got = f"a coefficient of shape {sizes}"
            # A field has size 1 along an axis, such as the agents' axis, whose elements share one number.
            like_x = len(sizes) == x.ndim and all(a in (1, b) for a, b in zip(sizes, x.shape, strict=True))
            if (like_x and sizes[rank:] == streams) or not (sizes or streams):
                return jnp.sum(c * x, axis=-1) if streams else c * x
        raise ShapeError(
            f"{where}: {path} has shape {x.shape} and {got}: give a number or a field with one number per element, and "
            "for K streams along the last axis a tuple of K, or a field with K numbers per element"
        )

    def update(batch: Batch, **values: Any) -> Batch:
        values |= {path: tuple(values[name] for name in names) for path, names in of_streams.items()}
        fields = {path: weighted(path, batch, values[path]) for path in coefficients}
        check_same_shape(where, **fields)
        first, *rest = fields.values()
        return batch.replace(advantage=sum(rest, first).astype(field_at(batch, next(iter(coefficients))).dtype))

    return stateless(
        update, name=where, requires=tuple(coefficients), provides=("advantage",), reads=("log_prob",), numbers=numbers
    )  # fmt: skip
