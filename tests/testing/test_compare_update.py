"""`compare_update` against a different program with one fault at a time, and against the recorded originals."""

import functools

import jax
import numpy as np
import pytest
import scipy.special

import ppo_parts as pp
from ppo_parts import testing
from ppo_parts.testing._calls import evaluate_text, read_calls
from ppo_parts.testing._choices import CHOICES, Update
from tests.common import evaluate, refused
from tests.golden import test_jaxagents, test_libraries
from tests.golden_traces import load, sub

from . import numpy_ppo


def recorded(fault=None, without=()):
    """Return the record of the update in NumPy, with a fault, in float32, and without some of its keys."""
    record = {name: x for name, x in numpy_ppo.record_update(fault).items() if name not in without}
    return jax.tree.map(lambda x: np.asarray(x, np.float32 if x.dtype.kind == "f" else x.dtype), record)


MADE = {"chain": evaluate_text(numpy_ppo.CHAIN), "optimizer": evaluate_text(numpy_ppo.OPTIMIZER)}
compared = functools.partial(testing.compare_update, evaluate=evaluate, **MADE)


def test_faults_are_located():
    expected = {None: None, **{fault: stage for stage, faults in numpy_ppo.FAULTS.items() for fault in faults}}
    found = {fault: compared(recorded(fault)).first for fault in expected}
    assert {fault: first and first.stage for fault, first in found.items()} == expected


def test_only_what_is_recorded_is_needed():
    """Without advantages and the parameters after each step, only the first gradient step is compared."""
    without = ("advantage", "target", "gradient/policy", "gradient/value", "params_after/policy", "params_after/value")
    found = compared(recorded("weight decay", without))
    assert found.first is None
    assert "loss (of the first gradient step)" in str(found)
    first = compared(recorded("not standardized", without)).first
    assert (first.stage, first.step) == ("loss", 0)

    def last(fault):
        record = recorded(fault, ("gradient/policy", "gradient/value"))
        return {x: y[-1] if "params_after" in x else y for x, y in record.items()}

    first = compared(last("weight decay")).first
    assert (first.stage, first.step) == ("optimizer", None)
    assert compared(last(None)).first is None


EXPLAINED = {
    "standardized over the rollout": "advantages are standardized over the rollout, ddof 1",
    "ascent": "the loss of the policy has the opposite sign",
    "entropy penalized": "the loss of the entropy has the opposite sign",
    "trace through time limits": "the trace continues through time limits",
    "weight decay": "weights decay, as in AdamW",
    "elements clipped": "each element of the gradient is clipped to 0.5",
}


@pytest.mark.parametrize("fault", EXPLAINED)
def test_single_change_explains_the_record(fault):
    record, changes = recorded(fault), (EXPLAINED[fault],)
    found = compared(record, chain=numpy_ppo.CHAIN, optimizer=numpy_ppo.OPTIMIZER)
    assert (found.changes, found.left) == (changes, None)
    if fault not in numpy_ppo.FAULTS["optimizer"]:  # such a change needs the optimizer as text
        assert compared(record, chain=numpy_ppo.CHAIN).changes == changes
    space = {}
    exec(found.update, space)  # it prints a program
    assert compared(record, chain=space["chain"], optimizer=space["optimizer"]).first is None


def test_masked_divergence_aggregated_losses_and_nan():
    full = recorded()
    mask = np.float32(np.arange(64).reshape(16, 4) % 3 > 0)
    record = {name: full[name] for name in ("obs", "action", "log_prob", "value", "reward", "terminated", "next_value")}
    record |= {"params": {x: 1.1 * full["params"][x] for x in full["params"]}, "behavior": full["params"], "mask": mask}
    logits = scipy.special.log_softmax(record["obs"] @ record["params"]["policy"], axis=-1)
    log_ratio = np.take_along_axis(logits, record["action"][..., None], axis=-1)[..., 0] - record["log_prob"]
    approx_kl = np.mean(np.expm1(log_ratio) - log_ratio, where=mask > 0)
    record["log_prob"] = record["log_prob"] * mask  # padding may hold anything
    record |= {"indices": np.arange(64)[None, None], "approx_kl": approx_kl[None]}
    chain = pp.chain(pp.gae(gamma=0.99, gae_lambda=0.95), pp.full_batch(1), pp.clipped_surrogate(clip_eps=0.2))
    assert compared(record, chain=chain).first is None
    steps = (record[x] for x in ("reward", "value", "next_value", "terminated"))
    advantage = pp.functional.gae(*steps, gamma=0.99, gae_lambda=0.95, mask=mask).advantage
    loss = pp.functional.clipped_surrogate(log_ratio, advantage, clip_eps=0.2)
    of_sequences = pp.functional.aggregate(loss, by="sequence_mean", mask=mask)
    tokens = {x: y for x, y in record.items() if x != "indices"} | {"segments": np.arange(4)[None, None]}
    aggregated = pp.chain(chain, pp.tokens.aggregate("policy", by="sequence_mean"))
    assert compared(tokens | {"policy_loss": of_sequences[None]}, chain=aggregated).first is None
    record["approx_kl"] = np.full(1, np.nan, np.float32)
    assert compared(record, chain=chain).first.error == np.inf
    full["params_after/policy"][3] = np.nan
    first = compared(full).first
    assert (first.quantity, first.step, np.isnan(first.recorded)) == ("params_after/policy", 3, True)


def test_choices_read_numbers_that_are_expressions():
    numbers = {"1/2": 0.5, "pp.linear_schedule(1.0, 0.0, 9)": None, "lambda step: 0.5 + 0 * step": None}
    for coef, number in numbers.items():
        update = Update(read_calls(f"pp.chain(pp.full_batch(), pp.value_loss(coef={coef}))"), ())
        assert update.read_number("value_loss", "coef") == number
        assert evaluate_text(update.change(*CHOICES).find("value_loss")).name == "value_loss"


def test_parts_of_a_package_are_found(tmp_path, monkeypatch):
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package/own.py").write_text("import ppo_parts as pp\nscale = pp.identity\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert evaluate_text("pp.chain(own_package.own.scale())").name == "chain"


def test_a_call_inside_another_one_is_exchanged():
    update = Update(read_calls("pp.chain(parts.normalized_values(pp.vtrace(gamma=0.9)), pp.full_batch())"), ())
    more = update.swap(update.find("vtrace"), *read_calls("pp.chain(parts.scale_reward(2.0), pp.vtrace(gamma=0.5))"))
    estimator = "pp.chain(parts.scale_reward(scale=2.0), pp.vtrace(gamma=0.5))"
    assert [*map(str, more.chain)] == [f"parts.normalized_values(estimator={estimator})", "pp.full_batch()"]
    fewer = more.swap(more.find("scale_reward"))
    assert str(fewer.chain[0]) == "parts.normalized_values(estimator=pp.vtrace(gamma=0.5))"
    (clipped,) = read_calls("optax.MultiSteps(pp.clipped_adam(3e-4, max_grad_norm=0.5), 2)")
    assert str(clipped).startswith("optax.MultiSteps(opt=optax.chain(optax.clip_by_global_norm")


test_text_with_wrong_arguments_is_an_error = refused(
    ("pp.clipped_adam(3e-4, 0.5, nonsense=3)", "unexpected keyword argument 'nonsense'; it takes .*max_grad_norm"),
    ("pp.clipped_adam(3e-4)", "missing a required argument: 'max_grad_norm'"),
    ("optax.adam(b1=0.8)", "missing a required argument: 'learning_rate'"),
    ("pp.value_loss(coef=0.5, coef=1.0)", "keyword argument repeated: coef"),
    ("pp.gea(gamma=0.9)", "has no attribute 'gea'; did you mean 'gae'"),
    ("pp.value_loss(0.5, 1)", "too many positional arguments; it takes .coef, name"),
    by=read_calls,
)


def test_record_that_lacks_something_is_an_error():
    record = numpy_ppo.record_update()
    for change, says in (
        ({"next_value": None, "next_obs": None}, "add 'last_value'"),
        ({"log_prob": None}, "lacks 'log_prob'"),
        ({"params": {}}, "lacks 'params': add the tree"),
        ({"params/policy/w": np.zeros(3)}, "has both 'policy' and 'params/policy/w'"),
        ({"weight/x": np.zeros(3), "weight": np.zeros(3)}, "has 'weight' whole and in parts"),
        ({"indices": None}, "add 'indices'"),
        ({"logprob": record["log_prob"]}, "did you mean 'log_prob'"),
        ({"loss": record["loss"][:1]}, "record each quantity once"),
        ({"gradient/policy": None}, "'gradient' must have the entries of 'params': add zeros"),
        ({x: record[x][-1] for x in record if x.startswith("gradient")}, "'gradient' needs a leading axis"),
        ({"value": record["value"][..., None]}, r"'value' has shape .* expected \(16, 4\)"),
        ({"value": record["value"].T}, r"'value' has shape \(4, 16\), expected \(16, 4\) .*: transpose one of them"),
        ({"last_done": np.zeros(3)}, r"'last_done' has shape \(3,\), expected \(4,\)"),
        ({"last_value": np.zeros((1, 4))}, r"'last_value' has shape \(1, 4\), expected \(4,\)"),
        ({"done": record["terminated"]}, "'done' and 'terminated': leave one"),
        ({"indices": record["indices"] + 1}, r"'indices' must lie in \[0, 63\], got 64"),
        ({"indices": record["indices"] - 1}, "got -1"),
        ({"indices": None, "segments": np.full((2, 4, 2), 4)}, r"'segments' must lie in \[0, 3\], got 4"),
        ({"segments": record["indices"]}, "'indices' and 'segments'"),
    ):
        broken = {name: x for name, x in {**record, **change}.items() if x is not None}
        with pytest.raises(ValueError, match=says):
            testing.compare_update(broken, evaluate=evaluate)
    phases = "pp.phases(one=pp.chain(pp.full_batch(), pp.value_loss()), two=pp.chain(pp.full_batch(), pp.value_loss()))"
    column = lambda *given: (evaluate(*given)[0], evaluate(*given)[1][..., None])  # noqa: E731
    for options, says in (
        ({"rtol": -1.0}, "rtol must lie in"),
        ({"evaluate": None}, "give your network"),
        ({"evaluate": lambda params: None}, r"evaluate must take \(params, batch\)"),
        ({"evaluate": lambda *given: pp.Output(evaluate(*given)[0])}, "returns no value"),
        ({"evaluate": column}, r"\(16, 4\) in the record"),
        ({"record": [record]}, "must be a dictionary of arrays or the path of a .npz, got a list"),
        ({"chain": f"pp.chain(pp.gae(gamma=0.9, gae_lambda=0.9), {phases})"}, "compare each as its own update"),
    ):
        with pytest.raises(pp.errors.UserError, match=says):
            testing.compare_update(**{"record": record, "evaluate": evaluate} | options)


def of_library(name):
    record, _, evaluate = test_libraries.record_of(f"{name}_default")
    return record, evaluate


def of_jaxagents(phase):
    """Return the record of one of its two phases, each of which is an update."""
    z = load("jaxdem_jaxagents/ippo_cont_nostop")
    fields, batch = ("obs", "action", "log_prob", "value", "reward", "next_value"), test_jaxagents.rollout(z)
    record = {x: getattr(batch, x) for x in fields} | {"terminated": batch.terminated.astype(float)}
    record |= {"advantage": z["traj/advantage"].swapaxes(0, 1), "loss": z[f"{phase}/mb_loss"].ravel()}
    record["target"] = record["advantage"] + record["value"]
    record |= {"segments": np.tile(z["minibatch_idx"], 3).reshape(3, 4, 2)}
    behavior = {name: sub(z, f"{name}_init/") for name in ("actor", "critic")}
    params = behavior | ({"actor": sub(z, "actor_final/")} if phase == "critic" else {})
    constant = {name: jax.tree.map(lambda x: np.stack([x] * 12), x) for name, x in params.items()}
    recorded = (sub(z, f"{phase}_mb_{kind}/") for kind in ("grads", "params"))
    gradient, after = (jax.tree.map(lambda x: x.reshape(12, *x.shape[2:]), tree) for tree in recorded)
    record |= {"params": params, "behavior": behavior, "params_after": constant | {phase: after}}
    record |= {"gradient": jax.tree.map(np.zeros_like, constant) | {phase: gradient}}
    return record, functools.partial(test_jaxagents.evaluate, discrete=False)


LIBRARIES = ("stable_baselines3", "tianshou", "rsl_rl", "skrl", "rl_games", "brax")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LIBRARIES, "actor", "critic"])
def test_originals_are_identified(name):
    """The search begins at the default chain, without the library's name. docs/compare_update.md shows CleanRL."""
    double = name in LIBRARIES
    with jax.enable_x64(double):
        record, evaluate = (of_library if double else of_jaxagents)(name)
        found = testing.compare_update(record, evaluate=evaluate, rtol=1e-5 if double else 1e-4)
    assert found.first is not None
    assert found.left is None, found
