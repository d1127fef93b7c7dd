"""One registry of parts, one list of laws (`ppo_parts.testing`): what every part promises, whatever it computes."""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import testing
from ppo_parts.testing import LAWS, _laws
from tests.registry import CASES, ELSEWHERE, given_batch, subject

every_part = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
FIELDS = tuple(pp.Batch.__dataclass_fields__)
EXCEPT = {
    pp.stateless: {_laws.writes_what_it_provides},  # a function of one's own need not declare anything
    pp.within: {_laws.reads_what_it_declares},  # the part inside reads fields under other names
    "advantage_normalize-axis 0": {_laws.steps_equal_a_rollout},  # it counts the axes of the batch that it gets
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
def test_protocol(case):
    part = case.part()
    assert isinstance(part, pp.Part)
    assert list(inspect.signature(part.init).parameters) == ["params", "key"]
    assert list(inspect.signature(part.update).parameters) == ["batch", "state", "context"]
    assert part.name in (case.make.__name__, "_double", "chain")
    with pytest.raises(TypeError):
        case.part(nonsense=1)


@every_part
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(case, law):
    if law in EXCEPT.get(case.id, EXCEPT.get(case.make, ())):
        pytest.skip("it does not declare this")
    assert law(subject(case.id)) is None


@pytest.mark.parametrize("case", [case for case in CASES if case.numeric], ids=lambda case: case.id)
def test_a_number_an_array_and_a_schedule_do_the_same(case):
    given = functools.partial(given_batch, case.after, case.continuous)
    testing.check_hyperparameters(case.part, batch=given, **case.numeric)


@pytest.mark.parametrize("case", [case for case in CASES if case.numeric], ids=lambda case: case.id)
def test_an_array_or_a_schedule_of_another_dtype_keeps_the_dtype(case):
    for as_given in (lambda x: jnp.float32(x), lambda x: lambda step: jnp.float32(x)):
        part = case.part(**{name: as_given(x) for name, x in case.numeric.items()})
        given = subject(case.id)
        assert _laws.float_dtype_is_kept(dataclasses.replace(given, part=part)) is None


# --- parts that break a law -----------------------------------------------------------------------------------------


def part(update, init=lambda params, key: pp.EmptyState(), **declared):
    return pp.Part(init, update, "faulty", **declared)


def loss(value, **declared):
    """A part that adds `value(batch)` as a loss."""
    return part(
        lambda batch, state, context: (batch.add_loss("own", value(batch)), state),
        **{"provides": ("losses",), "reads": ("current", "mask"), "place": "after_sampler"} | declared,
    )


@pytest.mark.parametrize(
    "chain", [pp.identity(), pp.chain(pp.gae(gamma=0.9, gae_lambda=0.9), pp.advantage_normalize())]
)
def test_check_part_takes_chains(chain):
    testing.check_part(chain, laws=[_laws.writes_what_it_provides, _laws.reads_what_it_declares])


def test_check_hyperparameters_takes_a_context_and_names_an_error():
    def of_head(coef, read=lambda coef, context: coef(context.step) if callable(coef) else coef):
        def update(batch, state, context):
            loss = read(coef, context) * batch.current.aux["cost"]
            return batch.add_loss("cost", loss), state

        return part(update, place="after_sampler", provides=("losses",))

    def context(seed=0, dtype=jnp.float32):
        made = testing.example_context(seed, dtype)

        def evaluate(params, batch):
            output = made.evaluate(params, batch)
            return output._replace(aux={"cost": output.value})

        return made.replace(evaluate=evaluate)

    testing.check_hyperparameters(of_head, context=context, coef=0.5)
    for read, raised in (
        (lambda coef, context: coef, "TypeError for a schedule"),
        (lambda coef, context: float(coef), "Err"),
    ):
        with pytest.raises(
            pp.errors.UserValueError, match=f"raises .*{raised}.* evaluate a schedule with context.step"
        ):
            testing.check_hyperparameters(functools.partial(of_head, read=read), context=context, coef=0.5)


@pytest.mark.parametrize(
    "extending",
    [
        pp.within(pp.gae(gamma=0.9, gae_lambda=1.0), write={"target": "extras.returns"}, name="monte_carlo"),
        pp.stateless(
            lambda batch: batch.add_extras(double=2 * batch.reward), provides=("extras.double",), reads=("reward",)
        ),
        pp.stateless(
            lambda batch: batch.replace(extras={**batch.extras, "double": 2 * batch.reward}),
            provides=("extras.double",),
            reads=("reward",),
        ),
    ],
    ids=["within", "add_extras", "by hand"],
)
def test_extending_a_dictionary_is_not_reading_it(extending):
    testing.check_part(extending, laws=[_laws.reads_what_it_declares, _laws.writes_what_it_provides])


def test_computing_from_an_entry_is_reading_it():
    entry = next(iter(testing.example_batch().extras))
    reading = pp.stateless(
        lambda batch: batch.add_extras(double=2 * batch.extras[entry]), provides=("extras.double",), reads=()
    )
    with pytest.raises(pp.errors.UserValueError, match=f"it reads .*extras.{entry} but does not declare it"):
        testing.check_part(reading, laws=[_laws.reads_what_it_declares])


def test_check_part_accepts_buffers_and_maps_over_dictionaries():
    """The last rollout with its masked steps, and `jax.tree.map` over `extras` and another dictionary."""
    context, batch = testing.example_context(), testing.example_batch()

    def update(batch, state, context):
        ones = {name: jnp.ones_like(x) for name, x in batch.extras.items()}
        return batch.replace(extras=jax.tree.map(jnp.add, batch.extras, ones)), state

    buffer = part(
        update, lambda params, key: jnp.zeros((1, *batch.reward.shape)),
        provides=("extras",), reads=("extras", "reward"),
        finish=lambda batch, state, context: batch.reward[None].astype(jnp.float32),
    )  # fmt: skip
    testing.check_part(buffer, batch=lambda seed=0, dtype=jnp.float32: testing.example_batch(
        seed, dtype, extras={"own": testing.example_batch(seed, dtype).reward}
    ))  # fmt: skip
    assert buffer.finish(batch, None, context).shape == (1, *batch.reward.shape)


def counting(number):
    """A part whose state is `number(batch)`."""
    return part(lambda b, s, c: (b, jnp.float32(number(b))), lambda params, key: jnp.zeros(()))


def doubled(batch, state, context):
    return batch.replace(reward=2 * batch.reward), state


def mutating(batch, state, context):
    if isinstance(batch.reward, np.ndarray):
        batch.reward[0, 0] = 7.0
    return batch, state


def counted(batch, state, context):
    return batch.add_metrics(calls=jnp.float32(len(CALLS))), CALLS.append(1) or state


CALLS: list[int] = []


@jax.custom_batching.custom_vmap
def negated_under_vmap(x):
    return 2 * x


@negated_under_vmap.def_vmap
def _(axis_size, in_batched, x):
    return -2 * x, True


@pytest.mark.parametrize(
    ("law", "faulty", "says"),
    [
        ("writes_what_it_provides", part(doubled), "it writes reward but does not declare it"),
        ("writes_what_it_provides", part(doubled, provides=("reward", "value")), "it does not write value"),
        ("reads_what_it_declares", part(doubled, provides=("reward",), reads=()), "it reads reward"),
        (
            "reads_what_it_declares",  # it may read the reward, which it has written
            part(
                lambda b, s, c: ((d := b.replace(reward=b.value)).replace(reward=d.reward + d.log_prob), s),
                provides=("reward",),
                reads=("value",),
            ),
            "it reads log_prob but does not declare it",
        ),
        (
            "reads_what_it_declares",
            loss(lambda b: b.current.value, reads=("current.log_prob",)),
            "it reads current.value",
        ),
        (
            "reads_what_it_declares",
            part(
                lambda b, s, c: (b.replace(reward=b.extras["own"]), s),
                provides=("reward",),
                reads=("extras.other",),
            ),
            "it reads extras.own but does not declare it",
        ),
        (
            "reads_what_it_declares",
            part(lambda b, s, c: (b, s), reads=(), finish=lambda b, s, c: (b.value, s)[1]),
            "it reads value but does not declare it",
        ),
        ("no_mask_is_a_full_mask", counting(lambda b: 0.0 if b.mask is None else 1.0), "a mask of ones changes"),
        (
            "finite_inputs_give_finite_numbers",
            part(lambda b, s, c: (b.add_metrics(mean=jnp.max(jnp.sum(b.mask * b.reward, 0) / jnp.sum(b.mask, 0))), s)),
            "is not finite",
        ),
        (
            "steps_equal_a_rollout",
            part(lambda b, s, c: (b.replace(reward=jnp.cumsum(b.reward, axis=0)), s), provides=("reward",)),
            "it computes another reward for a minibatch of steps (24,) than for the same steps (6, 4)",
        ),
        *(
            ("masked_elements_are_neutral", counting(read), "depends on masked elements")
            for read in (
                lambda b: jnp.mean(b.terminated),
                lambda b: jnp.mean(b.next_obs),
                lambda b: jnp.mean(b.behavior.logits),
                lambda b: jnp.mean(b.per_segment["score"]),
            )
        ),
        (
            "masked_elements_are_neutral",
            part(lambda b, s, c: (b, s), lambda params, key: jnp.zeros(()), finish=lambda b, s, c: jnp.mean(b.reward)),
            "depends on masked elements",
        ),
        (
            "state_is_stable",
            part(lambda b, s, c: (b, s + 1.0), lambda params, key: jnp.zeros((), int)),
            "update changes its state from",
        ),
        (
            "state_is_stable",
            part(lambda b, s, c: (b, s), lambda params, key: jnp.zeros(3), finish=lambda b, s, c: 1.0),
            "finish changes its state from",
        ),
        (
            "state_is_stable",
            part(lambda b, s, c: (b, s), amend=lambda params, old, new: {"policy": params["policy"]}),
            "amend changes the parameters from",
        ),
        (
            "float_dtype_is_kept",
            part(lambda b, s, c: (b.replace(reward=jnp.asarray(b.reward, jnp.float32)), s), provides=("reward",)),
            "with bfloat16 data it returns float32 as reward",
        ),
        ("inputs_are_not_mutated", part(mutating), "it writes into its inputs"),
        (
            "no_mask_is_a_full_mask",
            part(lambda b, s, c: (b.replace(reward=b.reward * (1 if b.mask is None else 2)), s), provides=("reward",)),
            "a mask of ones changes the result",
        ),
        (
            "masked_elements_are_neutral",
            part(lambda b, s, c: (b.add_metrics(mean=jnp.mean(b.reward)), s)),
            "depends on masked elements",
        ),
        (
            "masked_elements_are_neutral",
            loss(lambda b: jnp.broadcast_to(jnp.mean(b.current.value), b.log_prob.shape)),
            "depends on masked elements",
        ),
        (
            "masked_elements_are_neutral",
            part(
                lambda b, s, c: (b.replace(reward=b.reward + jnp.mean(b.extras["own"])), s),
                requires=("extras.own",),
                provides=("reward",),
            ),
            "depends on masked elements",
        ),
        (
            "writes_what_it_provides",
            part(lambda b, s, c: (b.add_stop(after=False), s), place="after_sampler"),
            "it writes stop",
        ),
        ("jit_equals_eager", part(counted), "two calls with the same inputs differ, "),
        (
            "jit_equals_eager",
            part(lambda b, s, c: (b.replace(reward=b.reward * (1 + isinstance(b.reward, jax.core.Tracer))), s)),
            "jit gives another result",
        ),
        (
            "state_is_stable",
            part(lambda b, s, c: (b, 0.9 * s), lambda params, key: 1.0),
            "its state holds the Python number 1.0: make it an array, jnp.float32(1.0)",
        ),
        (
            "state_is_stable",
            part(lambda b, s, c: (b, s + jnp.float32(1)), lambda params, key: jnp.array(1.0)),
            "changes its state in its weak type only",
        ),
        (
            "vmap_equals_a_loop",
            part(lambda b, s, c: (b.replace(reward=negated_under_vmap(b.reward)), s)),
            "vmap gives another result",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) and " " not in x else "",
)
def test_each_law_is_broken_by_some_part(law, faulty, says):
    [checked] = [given for given in LAWS if given.__name__ == law]
    with pytest.raises(pp.errors.UserValueError, match=rf"check_part: faulty breaks {law}: .*{re.escape(says)}"):
        testing.check_part(faulty, laws=[checked])


def test_check_part_refuses_what_is_not_a_part():
    with pytest.raises(pp.errors.UserTypeError, match="is not a part"):
        testing.check_part(lambda batch: batch)


def test_check_hyperparameters_names_a_schedule_that_is_ignored():
    def make(scale):
        return pp.stateless(lambda batch: batch.replace(reward=batch.reward * (scale(0) if callable(scale) else scale)))

    with pytest.raises(pp.errors.UserValueError, match=r"differs for a schedule: .*reward"):
        testing.check_hyperparameters(make, scale=0.5)


def test_check_part_accepts_a_state_made_of_parameters():
    average = part(
        lambda b, s, c: (b, jax.tree.map(lambda x, y: 0.5 * x + 0.5 * y, s, c.params)), lambda params, key: params
    )
    testing.check_part(average)


def test_check_part_accepts_keys_in_the_state_and_a_required_mask():
    def update(batch, state, context):
        state, key = jax.random.split(state)
        noise = jax.random.normal(key, batch.reward.shape, batch.reward.dtype)
        return batch.replace(reward=batch.reward + batch.mask * noise), state

    noisy = part(update, lambda params, key: key, requires=("mask", "reward"), provides=("reward",), reads=())
    testing.check_part(noisy)


def test_check_hyperparameters_stays_in_the_range():
    testing.check_hyperparameters(pp.gae, gamma=1.0, gae_lambda=0.95)


def test_check_part_takes_batches_of_the_users():
    own = pp.stateless(
        lambda batch: batch.replace(reward=batch.reward + batch.extras["novelty"]),
        requires=("extras.novelty",),
        provides=("reward",),
        reads=("reward",),
    )
    given = lambda seed=0, dtype=jnp.float32: testing.example_batch(  # noqa: E731
        seed, dtype, extras={"novelty": jnp.ones((6, 4), dtype)}
    )
    testing.check_part(own, batch=given, laws=LAWS[:3])
    with pytest.raises(pp.errors.UserValueError, match="novelty"):
        testing.check_part(own, laws=LAWS[:3])
    assert jax.tree.leaves(given())


def test_check_part_evaluates_the_policy_of_the_context():
    def context(seed=0, dtype=jnp.float32):
        def evaluate(params, batch):  # a new function in each call, which must not be compiled again
            output = testing.example_context().evaluate(params, batch)
            return pp.Output(*output[:2], aux={"cost": batch.obs @ params["value"]})

        return testing.example_context(seed, dtype).replace(evaluate=evaluate)

    own = loss(lambda batch: jnp.square(batch.current.aux["cost"]))
    testing.check_part(own, context=context, laws=[*LAWS[:4], _laws.jit_equals_eager])
    with pytest.raises(
        pp.errors.UserValueError, match=r"raised TypeError: .*not subscriptable.* pass batch= or context="
    ):
        testing.check_part(own, laws=LAWS[:4])


def test_a_part_that_reads_the_current_policy_before_the_sampler_is_told_where_to_stand():
    measure = pp.stateless(lambda batch: batch.add_metrics(mean=jnp.mean(batch.current_log_ratio())), name="measure")
    with pytest.raises(
        pp.errors.UserValueError, match="exists only after the sampler: put the part there, and declare place="
    ):
        testing.check_part(measure)


def test_check_part_names_the_part_that_raises():
    forgot = part(lambda b, s, c: b)
    with pytest.raises(pp.errors.UserTypeError, match=r"faulty: update must return \(batch, state\), got Batch"):
        testing.check_part(forgot)
    branching = part(
        lambda b, s, c: (b.add_metrics(x=1.0 * b.reward[0, 0] if b.reward[0, 0] > 0 else b.reward[0, 0]), s)
    )
    numpy = part(lambda b, s, c: (b.add_metrics(x=jnp.asarray(np.asarray(b.reward).mean())), s))
    for faulty in (branching, numpy):
        with pytest.raises(
            pp.errors.UserValueError, match=r"faulty breaks \w+: it needs the value of an array .*NumPy"
        ):
            testing.check_part(faulty)
