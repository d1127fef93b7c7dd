"""Functions that check your own parts against the laws."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._base.hyperparameters import VALUE_NEEDED, check_takes
from .._core.batch import Batch
from .._core.chain import chain, parts_of
from .._core.part import Divider, Part
from ..errors import UserError, UserTypeError, UserValueError
from ._example import STEP, example_batch, example_context
from ._laws import LAWS, Law, Result, Subject, compare


def check_part(
    part: Part,
    *,
    batch: Callable[..., Batch] | None = None,
    context: Callable[..., Any] = example_context,
    laws: Iterable[Law] = LAWS,
) -> None:
    """Raise if a part breaks a law of parts; the error names the law, the field and the remedy.

    The laws (`LAWS`) are: the part needs what it requires, writes what it provides and reads only what it declares; its
    state works in `jax.lax.scan`; it keeps dtypes from bfloat16 to float64; it does not write into its inputs; a mask
    of ones changes nothing; its results are finite; unless it declares `needs_time`, it computes the same without a
    time axis; `elementwise` losses depend on no other element; an estimator stops at the ends of episodes; a sampler
    draws elements of the rollout; masked elements affect nothing, have no gradient and are not counted; and `jit` and
    `vmap` compute the same. A part that may be placed anywhere is checked on a rollout and on a minibatch.

    Args:
        part: the part.
        batch: `batch(seed, dtype) -> Batch`, with a mask, for parts that read fields that `example_batch` lacks, or
            that need continuous actions. None means `example_batch`, after the sampler with `after_sampler=True`.
        context: `context(seed, dtype) -> Context`. Its `evaluate` is the policy being trained, which must have the
            `aux` that the part reads.
        laws: the laws to check; each is a function of a `Subject`.

    Raises:
        UserTypeError: if it is not a part. UserValueError: if it breaks a law; the error names the first one.

    Example:
        >>> import ppo_parts as pp
        >>> scale = lambda batch: batch.replace(reward=0.1 * batch.reward)
        >>> check_part(pp.stateless(scale, provides=("reward",), reads=("reward",)))
        >>> check_part(pp.stateless(scale, name="scale"))
        Traceback (most recent call last):
        ...
        ppo_parts.errors.UserValueError: check_part: scale breaks writes_what_it_provides: it writes reward but does not
        declare it: add it to `provides`
    """
    if not isinstance(part, Part):
        raise UserTypeError(f"check_part: {part!r} is not a part: make one with pp.Part(...) or pp.stateless(...)")
    if any(isinstance(each, Divider) for each in parts_of(part)) and not isinstance(part, Divider):
        raise UserValueError("check_part: the part is a chain with a sampler: check its parts one by one")
    for name, make in (("batch", batch or example_batch), ("context", context)):
        check_takes("check_part", name, make, ("seed", "dtype"))
    laws = tuple(laws)
    with jax.default_matmul_precision("highest"):  # in TF32 on GPUs, equal computations differ by 1e-4
        for subject in _make_subjects(part, batch, context):
            _update_once(subject, own=batch is not None and context is not example_context)
            for law in laws:
                if wrong := _check_law(law, subject):
                    raise UserValueError(f"check_part: {part.name} breaks {law.__name__}: {wrong}")


def _make_subjects(part: Part, batch: Callable[..., Batch] | None, context: Callable[..., Any]) -> Iterator[Subject]:
    """Yield the part with its inputs, for each side of the sampler on which it may be placed."""
    policy = context(0, jnp.float32).evaluate  # the same for all contexts, so that jit compiles it once
    sides = {"first": (False,), "before_sampler": (False,), "after_sampler": (True,)}.get(part.place, (False, True))
    for after in (False,) if isinstance(part, Divider) else sides:
        make = batch or functools.partial(example_batch, after_sampler=after)
        yield Subject(
            part,
            lambda *given, make=make: make(*given).replace(current=None),
            lambda *given: context(*given).replace(evaluate=policy),
            after,
        )


def _update_once(subject: Subject, own: bool) -> None:
    """Run the part in a chain, which raises if a field that the part requires is missing."""
    part, batch, context = subject.part, subject.batch(0, jnp.float32), subject.context(0, jnp.float32)
    if batch.mask is None:
        raise UserValueError("check_part: the batch has no mask: give one with zeros, for the laws about masks")
    whole, batch = chain(part), subject.seen(batch, context)
    try:
        whole.update(batch, whole.init(context.params, jax.random.key(0)), context)
    except UserError:
        raise
    except Exception as error:
        remedy = "" if own else ". If it needs another batch or policy than the examples, pass batch= or context="
        raise UserValueError(f"check_part: {part.name} raised {type(error).__name__}: {error}{remedy}") from error


def _check_law(law: Law, subject: Subject) -> str | None:
    """Return how a law is broken; an error in the part during the check also breaks it."""
    try:
        if (wrong := law(subject)) is None:
            return None
        first, second = (subject.apply(*subject.inputs()) for _ in range(2))
        if differs := compare(first, second, exact=True):  # which also breaks other laws
            return f"two calls with the same inputs differ, {differs}: draw from context.key, with jax.random"
        return wrong
    except VALUE_NEEDED as error:
        summary = str(error).partition("\n")[0]
        return f"it needs the value of an array ({summary}); do not use `if`, float(), int() or NumPy on arrays"
    except Exception as error:
        return f"the part raised {type(error).__name__}: {error}"


def check_hyperparameters(
    make: Callable[..., Part],
    *,
    batch: Callable[..., Batch] | None = None,
    context: Callable[..., Any] = example_context,
    **numeric: float,
) -> None:
    """Raise unless a part computes the same with hyperparameters as numbers, arrays or schedules.

    Args:
        make: the factory, called as `make(**numeric)`.
        batch, context: as in `check_part`.
        **numeric: hyperparameters, for example `clip_eps=0.2`.

    Raises:
        UserValueError: if the batch or the state differs, if the part fails, or if there is nothing to check.

    Example:
        >>> import ppo_parts as pp
        >>> check_hyperparameters(pp.clipped_surrogate, clip_eps=0.2, dual_clip=3.0)
    """
    if not numeric:
        raise UserValueError("check_hyperparameters: nothing to check: pass a hyperparameter, as in clip_eps=0.2")
    if zeros := [name for name, x in numeric.items() if not x]:
        raise UserValueError(f"check_hyperparameters: {zeros[0]} must not be 0, because its schedule must vary")
    arrays = {name: jnp.float32(x) for name, x in numeric.items()}
    schedules = {name: lambda step, x=x: jnp.where(step == STEP, x, 0.999 * x) for name, x in numeric.items()}
    part = make(**numeric)
    for subject in _make_subjects(part, batch, context):
        inputs = subject.inputs()

        def apply(numeric: Mapping[str, Any], subject: Subject = subject, inputs: Any = inputs) -> Any:
            out, new = dataclasses.replace(subject, part=make(**numeric)).apply(*inputs)
            # These counts exist only for hyperparameters that are known only at run time.
            kept = {name: x for name, x in out.metrics.items() if "nonfinite/" not in name}
            return Result(out.replace(metrics=kept, reductions=()), new)

        found = dict[str, Any]()
        ways = (("a number", apply, numeric), ("an array", jax.jit(apply), arrays), ("a schedule", apply, schedules))
        for way, run, given_as in ways:
            try:
                found[way] = run(given_as)
                wrong = compare(found[way], found["a number"])
            except (TypeError, *VALUE_NEEDED) as error:
                summary = str(error).partition("\n")[0]
                raise UserValueError(
                    f"check_hyperparameters: {part.name} raises {type(error).__name__} for {way}: {summary}; evaluate "
                    "a schedule with context.step, and convert no hyperparameter with float()"
                ) from error
            if wrong:
                raise UserValueError(f"check_hyperparameters: {part.name} differs for {way}: {wrong}")
