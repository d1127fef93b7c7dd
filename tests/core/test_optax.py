"""Every optimizer and transformation of optax in a learner takes two steps, or an error says what to do."""

import functools
import inspect
from typing import Any

import jax
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts._core.optimizer import wrap_optimizer
from tests.common import make_params, rollout
from tests.core.common import GAE, KEY, SURROGATE, VALUE, run

SGD, LABELS, MATRIX = optax.sgd(0.1), {"policy": "own", "value": "own"}, {"policy": True, "value": False}
GIVEN: dict[str, Any] = {  # arguments of those that take more than numbers; all numbers are 0.1
    **dict.fromkeys(("chain", "flatten", "mechanize", "split_real_and_imaginary", "with_extra_args_support"), (SGD,)),
    **dict.fromkeys(("inject_hyperparams", "inject_stateful_hyperparams"), (optax.sgd,)),
    **dict.fromkeys(("conditionally_mask", "conditionally_transform"), (SGD, lambda step, **extra: step < 9)),
    **dict.fromkeys(("multi_transform", "partition"), ({"own": SGD}, LABELS)),
    **dict.fromkeys(("scale_by_backtracking_linesearch", "scale_by_zoom_linesearch"), (3,)),
    "apply_if_finite": (SGD, 3), "differentially_private_aggregate": (1.0, 0.1, KEY), "dpsgd": (0.1, 1.0, 0.1, 0),
    "freeze": (MATRIX,), "lookahead": (SGD, 5, 0.5), "masked": (SGD, MATRIX), "named_chain": (("sgd", SGD),),
    "measure_with_ema": (optax.tree.norm, 0.9), "sam": (SGD, optax.chain(optax.contrib.normalize(), SGD)),
    "scale_by_schedule": (lambda count: 0.1,), "schedule_free": (SGD, 0.1), "selective_transform": (SGD,),
    "snapshot": ("norm", optax.tree.norm), "stateless": (lambda updates, params: updates,),
    "stateless_with_tree_map": (lambda update, param: update,),
}  # fmt: skip
KEYWORDS: dict[str, Any] = {"add_noise": {"key": KEY}, "noisy_sgd": {"key": KEY}, "sam": {"opaque_mode": True}}
KEYWORDS["selective_transform"] = {"freeze_mask": MATRIX}
UNDECLARED = {"dog", "dowg", "hutchinson_estimator_diag_hessian", "scale_by_factored_rms"}
RUN = {"adam", "lbfgs", "polyak_sgd", "adaptive_grad_clip", "set_to_zero", "reduce_on_plateau"}
ERRORS = {  # what the error says to do
    "lookahead": "parameters of its own type .optax.lookahead., write a loop of your own",
    **dict.fromkeys(("differentially_private_aggregate", "dpsgd"), "per-example gradients .* needs a loop of your own"),
    "measure_with_ema": "only measures .* belongs in optax.monitor",
    "scale_by_muon": "(?s)only for some parameters.*use optax.masked or optax.partition",
}


def make(name: str, function: Any) -> Any:
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    made = function(*GIVEN.get(name, [0.1] * len(needed)), **KEYWORDS.get(name, {}))
    return made if hasattr(made, "init") else made(0.1)  # `inject_hyperparams` needs another call


def catalogue() -> dict[str, Any]:
    """Return by name what optax and its contrib export and declare as a transformation, or list as `UNDECLARED`."""
    exported = [(name, x) for module in (optax, optax.contrib) for name, x in vars(module).items() if name[0] != "_"]
    found = {name: x for name, x in exported if inspect.isfunction(x) or isinstance(x, functools.partial)}
    hints = {name: str(inspect.signature(x).return_annotation) for name, x in found.items()}
    declared = [name for name, hint in hints.items() if "GradientTransformation" in hint]
    return {name: make(name, found[name]) for name in (*declared, *UNDECLARED & found.keys())}


@pytest.mark.filterwarnings("ignore")  # about what is deprecated
def test_all_of_optax_steps_in_a_learner():
    """In one program, each transformation has its own parameters in its state, and gets what a learner passes.

    All are traced; those that take more than numbers are also run, because the learner treats them in different ways.
    """
    each = {name: wrap_optimizer("learner", x) for name, x in catalogue().items() if name not in ERRORS}
    assert len(each) > 110
    assert each.keys() >= RUN
    with jax.numpy_rank_promotion("allow"):
        jax.eval_shape(lambda batch: updated(each, batch), rollout())
        state = updated({name: x for name, x in each.items() if name in GIVEN.keys() | RUN}, rollout())
    begun = make_params()
    for name, (_, params) in state.opt_state.items():
        assert all(np.all(np.isfinite(x)) for x in params.values()), name
        assert any(np.any(params[x] != begun[x]) for x in begun) == (name != "set_to_zero"), name


def updated(each, batch):
    """Return the state after an update with these transformations."""

    def init(params):
        return {name: (optimizer.init(params), params) for name, optimizer in each.items()}

    def step(optimizer, inner, own, updates, extra):
        moved, inner = optimizer.update(updates, inner, own, **extra)
        return inner, optax.apply_updates(own, moved)

    def update(updates, state, params, **extra):
        return updates, {name: step(x, *state[name], updates, extra) for name, x in each.items()}

    together = optax.GradientTransformationExtraArgs(init, update)
    return run(pp.chain(GAE, pp.full_batch(2), SURROGATE, VALUE), batch, optimizer=together)[0]


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_step_says_what_to_do(name):
    step = lambda batch: run(pp.chain(pp.full_batch(), VALUE), batch, optimizer=catalogue()[name])  # noqa: E731
    with jax.numpy_rank_promotion("allow"), pytest.raises(TypeError, match=ERRORS[name]):
        jax.eval_shape(step, rollout().replace(target=rollout().value))
