"""One registry of parts, one list of laws: what every part promises, whatever it computes."""

import copy
import functools
import inspect
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts._types import Divider, with_field_at

from .common import FLOATS, assert_close, assert_same, poisoned
from .registry import CASES, ELSEWHERE, STEP, apply, given_batch, given_context

every_part = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
FIELDS = tuple(pp.Batch.__dataclass_fields__)


def test_every_public_part_is_in_the_registry():
    factories = {
        name
        for name, public in vars(pp).items()
        if inspect.isfunction(public) and inspect.signature(public).return_annotation in ("Part", pp.Part)
    }
    assert {"gae", "chain", "full_batch", "kl_early_stop", "phases"} < factories
    assert {case.make.__name__ for case in CASES} | ELSEWHERE == factories
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)


@every_part
def test_protocol(case):
    part = case.part()
    assert isinstance(part, pp.Part)
    assert list(inspect.signature(part.init).parameters) == ["params", "key"]
    assert list(inspect.signature(part.update).parameters) == ["batch", "state", "context"]
    assert part.name in (case.make.__name__, "_double", "chain")
    assert {path.partition(".")[0] for path in (*part.requires, *part.provides, *(part.reads or ()))} <= set(FIELDS)
    with pytest.raises(TypeError):
        case.part(nonsense=1)


@every_part
def test_needs_what_it_says_it_needs(case):
    part, context = case.part(), given_context()
    for field in part.requires:
        lacking = with_field_at(given_batch(case), field, {} if field == "losses" else None)
        with pytest.raises(ValueError, match=field if field != "losses" else "no loss is named"):
            apply(case, pp.chain(part), lacking, (part.init(context.params),), context)


@every_part
def test_writes_what_it_says_it_writes(case):
    part, context = case.part(), given_context()
    before = apply(case, pp.identity(), given_batch(case), (), context)[0]
    after = apply(case, part, before, part.init(context.params), context)[0]
    changed = {field for field in FIELDS if getattr(after, field) is not getattr(before, field)}
    if isinstance(part, Divider):  # a sampler: all that has a step or a segment is another now
        assert after.current.log_prob.shape == after.log_prob.shape
    elif case.make is not pp.stateless:
        provided = {path.partition(".")[0] for path in part.provides}
        assert provided <= changed <= {*provided, "metrics", "reductions"}


class Spy(pp.Batch):
    """A batch that notes which of its fields are read."""

    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name):
        if name in FIELDS:
            Spy.read.add(name)
        return object.__getattribute__(self, name)

    def replace(self, **changes):
        return Spy(**{name: object.__getattribute__(self, name) for name in FIELDS} | changes)


@every_part
def test_reads_what_it_says_it_reads(case):
    """What `learner` refuses, because nothing reads it, depends on this."""
    part, context = case.part(), given_context()
    if part.reads is None or isinstance(part, Divider) or case.make is pp.within:
        pytest.skip("it does not say, takes all, or hands fields on under other names")
    batch = apply(case, pp.identity(), given_batch(case), (), context)[0]
    spy = Spy(**{name: getattr(batch, name) for name in FIELDS})
    Spy.read.clear()
    part.update(spy, part.init(context.params), context)
    own = {"losses", "metrics", "reductions", "axes", "stop", *(("log_prob",) if "losses" in part.provides else ())}
    assert Spy.read - own <= {path.partition(".")[0] for path in (*part.requires, *part.reads)}


@functools.cache
def jitted(name):
    """The compiled update of a case, and a list that grows when it is traced."""
    [case] = [case for case in CASES if case.id == name]
    part, traces = case.part(), []

    def update(batch, state, context):
        traces.append(case.id)
        return apply(case, part, batch, state, context)

    return jax.jit(update), traces


@every_part
def test_jit_equals_eager_and_compiles_once(case):
    part, (update, traces) = case.part(), jitted(case.id)
    batch, context = given_batch(case), given_context()
    state = part.init(context.params)
    expected, actual = apply(case, part, batch, state, context), update(batch, state, context)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    assert_close(actual, expected)
    update(given_batch(case, 1), actual[1], given_context(1))  # with the state that came out of the first
    assert len(traces) == 1


@every_part
def test_vmap_equals_a_loop(case):
    part, (update, _) = case.part(), jitted(case.id)
    inputs = [(given_batch(case, seed), part.init(None), given_context(seed)) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *inputs)
    actual = jax.jit(jax.vmap(lambda *x: apply(case, part, *x)))(*stacked)
    assert_close(actual, jax.tree.map(lambda *x: jnp.stack(x), *(update(*given) for given in inputs)))


@every_part
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_state_is_stable(case, dtype):
    part, context = case.part(), given_context(dtype=dtype)
    batch = given_batch(case, dtype=dtype)
    state = part.init(context.params)
    after = jax.eval_shape(lambda state: apply(case, part, batch, state, context)[1], state)
    described = [
        jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), s) for s in (jax.eval_shape(lambda: state), after)
    ]
    assert described[0] == described[1]
    jax.eval_shape(  # a scan refuses a carry that changes
        lambda state: jax.lax.scan(lambda s, _: (apply(case, part, batch, s, context)[1], None), state, length=3), state
    )


@every_part
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64], ids=["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("how", ["float", "array", "schedule"])
def test_float_dtype_is_kept(case, dtype, how):
    as_given = {
        "float": lambda x: x,
        "array": lambda x: jnp.asarray(x, jnp.float32),
        "schedule": lambda x: lambda step: jnp.asarray(x, jnp.float32),
    }[how]
    with jax.enable_x64(dtype == jnp.float64):
        part = case.part(**{name: as_given(x) for name, x in case.numeric.items()})
        batch, context = given_batch(case, dtype=dtype), given_context(dtype=dtype)
        out = jax.eval_shape(lambda batch, state: apply(case, part, batch, state, context)[0], batch, part.init(None))
    for path, leaf in jax.tree_util.tree_leaves_with_path(out):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            assert leaf.dtype == dtype, jax.tree_util.keystr(path)


@pytest.mark.parametrize("case", [case for case in CASES if case.numeric], ids=lambda case: case.id)
def test_a_number_an_array_and_a_schedule_do_the_same(case):
    batch, context = given_batch(case), given_context()
    arrays = {name: jnp.float32(x) for name, x in case.numeric.items()}
    schedules = {name: lambda step, x=x: jnp.where(step == STEP, x, 1.01 * x) for name, x in case.numeric.items()}
    state = case.part().init(context.params)

    def applied(**numeric):
        out, after = apply(case, case.part(**numeric), batch, state, context)
        kept = {name: x for name, x in out.metrics.items() if "nonfinite/" not in name}  # of numbers not known at once
        return out.replace(metrics=kept, reductions=()), after

    expected = applied()
    assert_close(jax.jit(lambda arrays: applied(**arrays))(arrays), expected)
    assert_close(applied(**schedules), expected)


def outside(batch):
    """All of a batch that may not depend on what is masked: numbers where the mask is 1, and everything reduced."""
    keep = np.asarray(batch.mask, bool)
    steps = {field: getattr(batch, field) for field in (*FLOATS, "mask", "losses")}
    kept = jax.tree.map(lambda x: np.asarray(x)[keep if x.shape == keep.shape else keep.any(axis=0)], steps)
    return kept, batch.metrics, batch.weight, batch.stop


@every_part
@pytest.mark.parametrize("kind", ["noise", "nan"])
def test_masked_places_are_neutral(case, kind):
    part, context = case.part(), given_context()
    batch = given_batch(case)
    state = part.init(context.params)

    def losses(current, batch):
        out, after = apply(case, part, batch.replace(current=current) if case.after else batch, state, context)
        kept = {out.mask.shape: out.mask, out.mask.shape[1:]: jnp.any(out.mask.astype(bool), axis=0)}
        means = [pp.functional.masked_mean(loss, kept[loss.shape]) for loss in out.losses.values()]
        return sum(means, jnp.zeros(())), (out, after)

    results = []
    for given in (batch, poisoned(batch, kind)):
        current = apply(case, pp.identity(), given, (), context)[0].current
        if not case.after:
            _, (out, after) = losses(None, given)
            results.append((outside(out), after))
            continue
        (loss, (out, after)), gradient = jax.value_and_grad(losses, has_aux=True)(current, given)
        keep = np.asarray(given.mask, bool)
        results.append((outside(out), after, loss, jax.tree.map(lambda x, keep=keep: np.asarray(x)[keep], gradient)))
        if kind == "noise":
            assert not any(np.any(np.asarray(x)[~keep]) for x in jax.tree.leaves(gradient))
    assert_same(*results)


@every_part
def test_inputs_are_not_mutated(case):
    part, context = case.part(), given_context()
    writable = lambda tree: jax.tree.map(lambda x: np.array(x), tree)  # noqa: E731
    batch, state = writable(given_batch(case)), writable(part.init(context.params))
    before = copy.deepcopy((batch, state))
    apply(case, part, batch, state, context)
    assert_same((batch, state), before)


@every_part
def test_works_without_a_mask_and_with_a_full_one_alike(case):
    part, context = case.part(), given_context()
    batch = given_batch(case)
    state = part.init(context.params)
    without, _ = apply(case, part, batch.replace(mask=None), state, context)
    full, _ = apply(case, part, batch.replace(mask=jnp.ones_like(batch.mask)), state, context)
    assert_close(full.replace(mask=None), without.replace(mask=None))  # time_chunks masks what only warms up
