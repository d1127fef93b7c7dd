"""A registry of parts and a list of laws (`ppo_parts.testing`): what every part promises, whatever it computes."""

import dataclasses
import functools
import inspect
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import testing
from ppo_parts.testing import LAWS, _laws
from tests.common import refused
from tests.core import common
from tests.registry import BEYOND, CASES, ELSEWHERE, given_batch, subject

every_part = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
with_numbers = pytest.mark.parametrize("case", [case for case in CASES if case.numeric], ids=lambda case: case.id)
EXCEPT = {
    pp.stateless: {_laws.writes_what_it_provides},  # a custom function need not declare anything
    pp.within: {_laws.reads_what_it_declares},  # the inner part reads fields by other names
    pp.symmetry.mirror_segments: {_laws.needs_what_it_requires},  # it comes after the estimator
    "advantage_normalize-axis 0": {_laws.steps_equal_a_rollout},  # it counts the axes of its batch
}


def test_every_public_part_is_in_the_registry():
    modules = (pp, *(x for name, x in vars(pp).items() if name[0] != "_" and inspect.ismodule(x)))
    factories = {
        name
        for module in modules
        for name, public in vars(module).items()
        if inspect.isfunction(public) and inspect.signature(public).return_annotation in ("Part", pp.Part)
    }
    assert {"gae", "chain", "full_batch", "kl_early_stop", "phases"} < factories
    assert {case.make.__name__ for case in CASES} | ELSEWHERE == factories
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)


@every_part
def test_a_part_has_the_signatures_and_the_place_it_documents(case):
    part = case.part()
    assert isinstance(part, pp.Part)
    assert list(inspect.signature(part.init).parameters) == ["params", "key"]
    assert list(inspect.signature(part.update).parameters) == ["batch", "state", "context"]
    assert part.name in (case.make.__name__, "_double", "chain")
    stated = re.search(r"Place: (before|after) the sampler(?!, or)", case.make.__doc__)
    assert stated is None or part.place == f"{stated[1]}_sampler"
    assert part.reads is not None or case.make is pp.stateless  # `pp.stateless` may read anything
    with pytest.raises(TypeError):
        case.part(nonsense=1)


@every_part
def test_each_part_obeys_the_laws(case):
    left_out = EXCEPT.get(case.id, EXCEPT.get(case.make, ()))
    broken = {law.__name__: law(subject(case.id)) for law in LAWS if law not in left_out}
    assert {name: wrong for name, wrong in broken.items() if wrong is not None} == {}


@with_numbers
def test_a_number_an_array_and_a_schedule_do_the_same(case):
    given = functools.partial(given_batch, case.after, case.continuous)
    testing.check_hyperparameters(case.part, batch=given, **case.numeric)


@with_numbers
def test_what_is_not_a_number_in_its_range_is_refused_by_name(case):
    for name in case.numeric:
        for wrong in (np.nan, "0.9", True, 0.9 + 1j, *BEYOND[name]):
            with pytest.raises(pp.errors.UserError, match=rf"\b{name} must "):
                case.part(**{name: wrong})


@with_numbers
def test_an_array_or_a_schedule_of_another_dtype_keeps_the_dtype(case):
    """About half of the parts get arrays and the others schedules; all parts convert them by the same functions."""
    as_array, as_schedule = (lambda x: jnp.float32(x)), (lambda x: lambda step: jnp.float32(x))
    as_given = as_schedule if zlib.crc32(case.id.encode()) % 2 else as_array
    part = case.part(**{name: as_given(x) for name, x in case.numeric.items()})
    assert _laws.float_dtype_is_kept(dataclasses.replace(subject(case.id), part=part)) is None


# --- custom parts ----------------------------------------------------------------------------------------------------


part = functools.partial(common.part, name="faulty")


def loss(value, **declared):
    """Make a part that adds `value(batch)` as a loss."""
    return part(
        lambda batch, state, context: (batch.add_loss("own", value(batch)), state),
        **{"provides": ("losses",), "reads": ("current", "mask"), "place": "after_sampler"} | declared,
    )


def reward(value, **declared):
    """Make a part that writes `value(batch)` as the reward."""
    return part(lambda b, s, c: (b.replace(reward=value(b)), s), **{"provides": ("reward",)} | declared)


def estimate(value):
    """Make a part that writes `value(batch)` as the advantage."""
    return part(lambda b, s, c: (b.replace(advantage=value(b)), s), provides=("advantage",), needs_time=True)


def draws(indices):
    """Make a sampler of two minibatches with these rows."""
    plan, draw = (lambda key, batch, epoch: jnp.asarray(indices)), (lambda item, batch, context: (item, None))
    return pp.sampler("faulty", plan, draw, num_minibatches=2, axis="step")


def metric(value):
    return part(lambda b, s, c: (b.add_metrics(mean=value(b)), s))


def counting(number):
    """Make a part whose state is `number(batch)`."""
    return part(lambda b, s, c: (b, jnp.float32(number(b))), state=jnp.zeros(()))


def state(first, update=lambda state: state, **declared):
    """Make a part whose state begins with `first()`."""
    return part(lambda b, s, c: (b, update(s)), init=lambda params, key: first(), **declared)


def context_with_cost(seed, dtype):
    """Make the context of the example, with one more head of the policy."""
    made = testing.example_context(seed, dtype)

    def evaluate(params, batch):  # each call makes a new function, which must not compile again
        output = made.evaluate(params, batch)
        return output._replace(aux={"cost": output.value})

    return made.replace(evaluate=evaluate)


def random_reward(batch, key, context):
    """Add noise to the reward; the state is a key."""
    key, own = jax.random.split(key)
    noise = jax.random.normal(own, batch.reward.shape, batch.reward.dtype)
    return batch.replace(reward=batch.reward + batch.mask * noise), key


def map_over_extras(batch, state, context):
    """Apply `jax.tree.map` to `extras` and another dictionary."""
    ones = {name: jnp.ones_like(x) for name, x in batch.extras.items()}
    return batch.replace(extras=jax.tree.map(jnp.add, batch.extras, ones)), state


def double_extras(batch):
    return batch.replace(extras={**batch.extras, "double": 2 * batch.reward})


EXTENDS = {"provides": ("extras.double",), "reads": ("reward",)}
SOUND = {
    # extending a dictionary does not read it
    "within": (pp.within(pp.gae(gamma=0.9, gae_lambda=1.0), write={"target": "extras.returns"}, name="mc"), {}),
    "add_extras": (pp.stateless(lambda b: b.add_extras(double=2 * b.reward), **EXTENDS), {}),
    "jitted": (pp.stateless(jax.jit(double_extras), **EXTENDS), {}),
    "extras by hand": (pp.stateless(double_extras, **EXTENDS), {}),
    "a buffer of rollouts, and a map over a dictionary":
        (part(map_over_extras, state=jnp.zeros((1, *testing.example_batch().reward.shape)),
              finish=lambda batch, state, context: batch.reward[None].astype(jnp.float32),
              provides=("extras",), reads=("extras", "reward")), {"batch": testing.example_batch}),
    "an average of parameters":
        (part(lambda b, s, c: (b, jax.tree.map(lambda x, y: (x + y) / 2, s, c.params)), init=lambda p, key: p), {}),
    "a key, and a required mask":
        (part(random_reward, init=lambda params, key: key, requires=("mask", "reward"), provides=("reward",), reads=()),
         {}),
    "a field of its own batch":
        (reward(lambda b: b.reward + b.extras["own"], requires=("extras.own",), reads=("reward",)),
         {"batch": testing.example_batch}),
    "a metric of another dtype":
        (pp.stateless(lambda b, coef: b.add_metrics(coef=coef), numbers={"coef": jnp.float32(0.5)}), {}),
    "a further head of its own policy": (loss(lambda b: b.current.aux["cost"] ** 2), {"context": context_with_cost}),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_check_part_accepts(name):
    sound, options = SOUND[name]
    stateful = jax.tree.leaves(sound.init(testing.example_context().params, jax.random.key(0)))
    testing.check_part(sound, **options, laws=LAWS if stateful else LAWS[:-1])  # the last law compiles


def mutating(batch, state, context):
    if isinstance(batch.reward, np.ndarray):
        batch.reward[0, 0] = 7.0
    return batch, state


CALLS: list[int] = []


def counted(batch, state, context):
    return batch.add_metrics(calls=jnp.float32(len(CALLS))), CALLS.append(1) or state


@jax.custom_batching.custom_vmap
def negated_under_vmap(x):
    return 2 * x


@negated_under_vmap.def_vmap
def _(axis_size, in_batched, x):
    return -2 * x, True


def twice(batch):
    return 2 * batch.reward


def after_writing(batch, state, context):
    """Read the reward after writing it, which needs no declaration."""
    changed = batch.replace(reward=batch.value)
    return changed.replace(reward=changed.reward + changed.log_prob), state


FAULTY = {
    "needs_what_it_requires": [(reward(twice, requires=("mask",)), "it requires mask and works without it")],
    "writes_what_it_provides": [
        (reward(twice, provides=()), "it writes reward but does not declare it"),
        (reward(twice, provides=("reward", "value")), "it does not write value"),
        (part(lambda b, s, c: (b.add_stop(after=False), s), place="after_sampler"), "it writes stop"),
        (pp.stateless(lambda b: b.add_extras(x=b.reward, y=b.value), name="faulty", provides=("extras.x",)),
         "it writes extras.y but does not declare it"),
        (pp.stateless(lambda b: b.add_extras(x=b.reward), name="faulty", provides=("extras.x", "extras.y")),
         "it does not write extras.y"),
        (part(lambda b, s, c: (b.replace(current=b.current._replace(value=2 * b.current.value)), s),
              provides=("current.log_prob",), place="after_sampler"), "it writes current.value but")],
    "reads_what_it_declares": [
        (reward(twice, reads=()), "it reads reward"),
        (part(after_writing, provides=("reward",), reads=("value",)), "it reads log_prob but does not declare it"),
        (loss(lambda b: b.current.value, reads=("current.log_prob",)), "it reads current.value"),
        (reward(lambda b: b.extras["own"], reads=("extras.other",)), "it reads extras.own but does not declare it"),
        (state(lambda: jnp.zeros(()), reads=(), finish=lambda b, s, c: s + b.value[0, 0]), "it reads value but does"),
        (pp.stateless(lambda b: b.add_extras(x=2 * b.extras["own"]), name="faulty", provides=("extras.x",), reads=()),
         "extras.own but does not declare it"),
        (loss(lambda b: b.current.value * b.metrics["given"]), "it reads metrics.given but does not declare it"),
        (loss(lambda b: b.current.value + b.losses["given"]), "it reads losses.given but does not declare it")],
    "no_mask_is_a_full_mask": [
        (counting(lambda b: 0.0 if b.mask is None else 1.0), "a mask of ones changes the result"),
        (reward(lambda b: b.reward * (1 if b.mask is None else 2)), "a mask of ones changes the result")],
    "finite_inputs_give_finite_numbers":
        [(metric(lambda b: jnp.max(jnp.sum(b.mask * b.reward, 0) / jnp.sum(b.mask, 0))), "is not finite")],
    "steps_equal_a_rollout": [
        (reward(lambda b: jnp.cumsum(b.reward, axis=0)),
         "it computes another reward for a minibatch of steps (24,) than for the same steps (6, 4)"),
        (metric(lambda b: jnp.max(jnp.abs(jnp.sum(jnp.where(b.mask > 0, b.reward, 0), axis=0)))), "another metrics")],
    "losses_are_elementwise": [
        (loss(lambda b: b.current.value - jnp.mean(b.current.value), elementwise=True), "depends on other elements"),
        (loss(lambda b: b.current.log_prob * jnp.mean(b.advantage), elementwise=True), "depends on other elements")],
    "advantages_stop_at_ends": [
        (estimate(lambda b: b.reward + 0.9 * b.next_value - b.value), "depends on next_value at terminations"),
        (estimate(lambda b: jnp.cumsum((b.reward + b.next_value)[::-1], axis=0)[::-1]), "on the steps after a"),
        (estimate(lambda b: pp.functional.gae(b.reward, b.value, b.next_value, b.terminated, gamma=0.9,
                                              gae_lambda=0.9, mask=b.mask).advantage), "on the steps after a"),
        (estimate(lambda b: pp.functional.gae(b.reward, b.value, b.next_value, b.terminated + b.truncated, gamma=0.9,
                                              gae_lambda=0.9, mask=b.mask).advantage), "must bootstrap there")],
    "minibatches_are_of_the_rollout": [
        (draws(np.arange(4, 28).reshape(2, 12)), "minibatch 1 has an index outside of a rollout of shape (6, 4)")],
    "masked_elements_are_neutral": [
        (reward(lambda b: b.reward + 0 * jnp.roll(b.terminated, 1, 0)),
         "flags included, were filled with nan): batch.reward is nan instead of -1.42274 at index (5, 0)"),
        *((faulty, "depends on masked elements") for faulty in (
            counting(lambda b: jnp.mean(b.terminated)),
            counting(lambda b: jnp.mean(b.next_obs)),
            counting(lambda b: jnp.mean(b.behavior.logits)),
            counting(lambda b: jnp.mean(b.per_segment["score"])),
            state(lambda: jnp.zeros(()), finish=lambda b, s, c: jnp.mean(b.reward)),
            metric(lambda b: jnp.mean(b.reward)),
            loss(lambda b: jnp.broadcast_to(jnp.mean(b.current.value), b.log_prob.shape)),
            reward(lambda b: b.reward + jnp.mean(b.extras["own"]), requires=("extras.own",)),
        ))],
    "masked_segments_do_not_count": [
        (metric(lambda b: jnp.mean(jnp.where(b.mask > 0, b.reward, 0))), "something else without a segment that is"),
        (counting(lambda b: jnp.mean(jnp.where(b.mask > 0, b.reward, 0))), "divide by the number of unmasked elements"),
        (reward(lambda b: b.reward - jnp.mean(jnp.where(b.mask > 0, b.reward, 0))), "batch.reward is"),
        (loss(lambda b: b.current.value * jnp.mean(b.mask)), "losses.own is"),
        (state(lambda: jnp.zeros(()), finish=lambda b, s, c: jnp.mean(b.mask)), "something else")],
    "state_is_stable": [
        (state(lambda: jnp.zeros((), int), lambda s: s + 1.0), "update changes its state from"),
        (state(lambda: jnp.zeros(3), finish=lambda b, s, c: 1.0), "finish changes its state from"),
        (part(amend=lambda params, *rest: ({"policy": 0}, rest[0])), "amend changes the parameters from"),
        (state(lambda: 1.0, lambda s: 0.9 * s),
         "its state holds the Python number 1.0: make it an array, as in jnp.float32(1.0)"),
        (state(lambda: jnp.array(1.0), lambda s: s + jnp.float32(1)),
         "changes its state from weak float32[] to float32[], so no loop can carry it")],
    "float_dtype_is_kept":
        [(reward(lambda b: jnp.asarray(b.reward, jnp.float32)), "returns float32 as reward: convert it with .astype(")],
    "inputs_are_not_mutated": [(part(mutating), "it writes into its inputs")],
    "jit_and_vmap_equal_eager": [
        (part(counted), "two calls with the same inputs differ, "),
        (reward(lambda b: b.reward * (1 + isinstance(b.reward, jax.core.Tracer))), "jit with vmap gives another"),
        (reward(lambda b: negated_under_vmap(b.reward)), "jit with vmap gives another result")],
}  # fmt: skip


BROKEN = [(law, *row) for law in LAWS for row in FAULTY[law.__name__]]


@pytest.mark.parametrize(("law", "faulty", "says"), BROKEN, ids=[law.__name__ for law, *_ in BROKEN])
def test_each_law_is_broken_by_some_part(law, faulty, says):
    says = rf"check_part: faulty breaks {law.__name__}: .*{re.escape(says)}"
    with pytest.raises(pp.errors.UserValueError, match=says):
        testing.check_part(faulty, laws=[law])


NEEDS_A_VALUE = r"faulty breaks \w+: it needs the value of an array .*NumPy"


def test_what_laws_say_locates_a_difference_and_does_not_advise_what_was_given():
    wrong = loss(lambda b: b.current.aux["cost"])
    with pytest.raises(pp.errors.UserError, match=r"faulty raised TypeError: .* not subscriptable$"):
        testing.check_part(wrong, batch=testing.example_batch, context=lambda *given: testing.example_context(*given))
    assert _laws.compare([np.array([np.nan, 1.0])], [np.array([np.nan, 2.0])]) == "0 is 1 instead of 2 at index (1,)"


def test_laws_hold_with_hyperparameters_in_fields_and_for_parts_that_read_the_optimizer():
    def batch(*given):
        made = testing.example_batch(*given)
        return made.add_extras(eps=0.1 + jnp.abs(made.reward))

    def amend(params, opt_state, *rest):
        adam, *others = opt_state
        return params, (adam, *others)

    testing.check_part(pp.clipped_surrogate(clip_eps=pp.field("extras.eps")), batch=batch)
    testing.check_part(part(amend=amend))


test_check_part_says_what_is_wrong = refused(
    (lambda: abs, "is not a part"),
    (pp.chain(pp.full_batch(), pp.value_loss()), "is a chain with a sampler: check its parts one by one"),
    (metric(lambda b: 1.0 * b.reward[0, 0] if b.reward[0, 0] > 0 else b.reward[0, 0]), NEEDS_A_VALUE),
    (reward(lambda b: b.value if b.reward[0, 0] > 9 else b.reward), NEEDS_A_VALUE),
    (metric(lambda b: jnp.asarray(np.asarray(b.reward).mean())), NEEDS_A_VALUE),
    (reward(lambda b: b.extras["novelty"], requires=("extras.novelty",), reads=()), "novelty"),
    (loss(lambda b: b.current.aux["cost"]), r"raised TypeError: .*not subscriptable.* pass batch= or context="),
    (metric(lambda b: b.current.value[0, 0]), 'faulty needs .* put it after .* declare place="after_sampler"$'),
    (pp.stateless(lambda b: b, requires=("current.value",)), 'declare place="after_sampler"$'),
    (pp.stateless(lambda b: b.add_metrics(mean=jnp.mean(b.current_log_ratio()))),
     "exists only after the sampler: put the part there, and declare place="),
    (lambda: testing.check_hyperparameters(pp.value_loss), "nothing to check"),
    (lambda: testing.check_hyperparameters(pp.value_loss, coef=0.0), "coef must not be 0"),
    by=testing.check_part,
)  # fmt: skip


def test_check_hyperparameters_takes_a_context_and_names_what_is_wrong():
    def of_head(coef, read=lambda coef, context: coef(context.step) if callable(coef) else coef):
        def update(batch, state, context):
            return batch.add_loss("cost", read(coef, context) * batch.current.aux["cost"]), state

        return part(update, place="after_sampler", provides=("losses",))

    testing.check_hyperparameters(of_head, context=context_with_cost, coef=0.5)
    testing.check_hyperparameters(pp.gae, gamma=1.0, gae_lambda=0.95)  # the number stays in its range
    of_step, unscheduled = lambda coef, context: coef(context.step), lambda coef, context: coef
    converted = lambda coef, context: float(coef)  # noqa: E731
    numbers, schedules = "TypeError for a number", "TypeError for a schedule"
    for read, raised in ((of_step, numbers), (unscheduled, schedules), (converted, "Err")):
        says = f"raises .*{raised}.* evaluate a schedule with context.step"
        with pytest.raises(pp.errors.UserValueError, match=says):
            testing.check_hyperparameters(functools.partial(of_head, read=read), context=context_with_cost, coef=0.5)

    def of_first_step(scale):
        return reward(lambda batch: batch.reward * (scale(0) if callable(scale) else scale))

    with pytest.raises(pp.errors.UserValueError, match=r"differs for a schedule: .*reward"):
        testing.check_hyperparameters(of_first_step, scale=0.5)
