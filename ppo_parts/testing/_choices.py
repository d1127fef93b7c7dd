"""An update as Python text, and the table of known choices: single changes of that text.

docs/libraries.md says which library makes which choice.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .._base.errors import UserTypeError, UserValueError

CHAIN = """pp.chain(
    pp.gae(gamma=0.99, gae_lambda=0.95),
    pp.shuffled_minibatches(num_minibatches=4, num_epochs=4),
    pp.advantage_normalize(),
    pp.clipped_surrogate(clip_eps=0.2),
    pp.value_loss(coef=0.5),
    pp.entropy_bonus(coef=0.0),
)"""
"""A chain to begin with, if nothing is known about the program."""

OPTIMIZER = "pp.clipped_adam(3e-4, max_grad_norm=0.5, eps=1e-5)"
"""An optimizer to begin with, if nothing is known about the program."""

MODULES = {
    "jnp": "jax.numpy",
    "optax": "optax",
    "pp": "ppo_parts",
    "parts": "ppo_parts.recipes.libraries.parts",
}
"""The modules that the text of an update may name; others have their full name."""


@functools.cache
def evaluated(text: str) -> Any:
    """Return the value of a Python expression."""
    tree = ast.walk(ast.parse(inspect.cleandoc(text), mode="eval"))
    names = {node.id for node in tree if isinstance(node, ast.Name)} - set(dir(builtins)) - {"batch"}
    try:
        return eval(inspect.cleandoc(text), {x: importlib.import_module(MODULES.get(x, x)) for x in names})
    except ModuleNotFoundError as error:
        raise UserValueError(
            f"compare_update: {error.name!r} in the text is neither one of {', '.join(MODULES)} nor a module: write "
            "numbers out, and import your own parts from a module"
        ) from error


class Call(NamedTuple):
    """A call as text: the function, and its arguments by name."""

    function: str
    arguments: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.function.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(f'{name}={value}' if name else value for name, value in self.arguments)})"

    def changed(self, **arguments: str) -> Call:
        return self._replace(arguments=tuple((dict(self.arguments) | arguments).items()))


def read_calls(text: str) -> tuple[Call, ...]:
    """Return the calls inside a `chain(...)`, flattened, or the single call."""
    try:
        return tuple(_calls(ast.parse(inspect.cleandoc(text), mode="eval").body))
    except SyntaxError as error:
        raise UserValueError(f"compare_update: not a Python expression: {error}, in {text!r}") from None


def _calls(node: ast.expr) -> Iterator[Call]:
    if not isinstance(node, ast.Call):
        raise UserTypeError(f"compare_update: expected a call, such as pp.gae(...), got {ast.unparse(node)}")
    function = ast.unparse(node.func)
    if function in ("pp.chain", "optax.chain"):
        for each in node.args:
            yield from _calls(each)
        return
    parameters = inspect.signature(evaluated(function)).parameters
    variadic = any(x.kind is x.VAR_POSITIONAL for x in parameters.values())
    given = zip([""] * len(node.args) if variadic else parameters, map(ast.unparse, node.args), strict=False)
    call = Call(function, (*given, *((each.arg or "", ast.unparse(each.value)) for each in node.keywords)))
    values = dict(call.arguments)
    if function == "pp.clipped_adam":
        yield Call("optax.clip_by_global_norm", (("max_norm", values["max_grad_norm"]),))
        yield Call("optax.scale_by_adam", (("eps", values.get("eps", "1e-5")),))
        yield Call("pp.optim.scale_by_update_schedule", (("learning_rate", values["learning_rate"]),))
    elif function == "optax.adam":
        rate = values.pop("learning_rate")
        yield Call("optax.scale_by_adam", tuple(values.items()))
        yield Call("optax.scale_by_learning_rate", (("learning_rate", rate),))
    else:
        yield call


@dataclasses.dataclass(frozen=True)
class Update:
    """An update as text: the parts of its chain, the transformations of its optimizer, and how rows are numbered."""

    chain: tuple[Call, ...]
    optimizer: tuple[Call, ...]
    rows: str = "t * N + n"

    def __str__(self) -> str:
        calls = {"chain = pp.chain(": self.chain, "optimizer = optax.chain(": self.optimizer}
        text = "\n".join("\n".join([made, *(f"    {x}," for x in each), ")"]) for made, each in calls.items())
        used = {x: module for x, module in MODULES.items() if f"{x}." in text}
        imports = [f"import {module}" + f" as {x}" * (module != x) for x, module in used.items()]
        return "\n".join([*imports, text])

    def find(self, *names: str) -> Call | None:
        return next((call for call in (*self.chain, *self.optimizer) if call.name in names), None)

    def swap(self, old: Call | None, *new: Call) -> Update:
        """Return a copy with other calls in the place of one."""

        def swapped(calls: tuple[Call, ...]) -> tuple[Call, ...]:
            return tuple(x for call in calls for x in (new if call is old else (call,)))

        return Update(swapped(self.chain), swapped(self.optimizer), self.rows)

    def number(self, name: str, argument: str) -> float | None:
        call = self.find(name)
        try:
            return float(evaluated(dict(call.arguments)[argument])) if call else None
        except (KeyError, TypeError, ValueError):
            return None


class Change(NamedTuple):
    """A single change: the stages that it affects, what the result does, and the edit (None: it does not apply)."""

    stages: tuple[str, ...]
    says: str
    edit: Callable[[Update], Update | None]


SAMPLERS = ("shuffled_minibatches", "segment_minibatches", "full_batch", "given_indices", "time_chunks")
ESTIMATORS = ("gae", "vtrace")
VALUES = ("value_loss", "clipped_value_loss")
CLIPS = ("clip_by_global_norm", "clip_each_network", "clip")
RATES = ("scale_by_update_schedule", "scale_by_learning_rate", "scale_by_kl_adaptive_rate")


def _set(stage: str, says: str, name: str, **arguments: str) -> Change:
    def edit(update: Update) -> Update | None:
        call = update.find(name)
        return call and update.swap(call, call.changed(**arguments))

    return Change((stage,), says, edit)


def _add(stage: str, says: str, text: str, at: tuple[str, ...], after: bool = True) -> Change:
    """Add a call after (or before) the first one of these names, unless there is one already."""

    def edit(update: Update) -> Update | None:
        old, (new,) = update.find(*at), read_calls(text)
        if old is None or (new.name != "stateless" and update.find(new.name)):
            return None
        return update.swap(old, *((old, new) if after else (new, old)))

    return Change((stage,), says, edit)


def _write(says: str, field: str, value: str, *needs: str) -> Change:
    """Write a field of the rollout before the estimator."""
    requires = ("terminated", "value", "next_value", *needs)
    options = (
        f"name='changed_{field}', requires={requires!r}, provides=({field!r},), reads=('shared',), needs_time=True"
    )
    text = f"pp.stateless(lambda batch: batch.replace({field}={value}), {options})"
    return _add("advantage", says, text, ESTIMATORS, after=False)


def _standardize(says: str, over: str, **arguments: str) -> Change:
    """Standardize advantages over the minibatch or over the rollout, or not at all."""
    new = Call("pp.advantage_normalize", tuple(arguments.items()))

    def edit(update: Update) -> Update | None:
        without, sampler = update.swap(update.find("advantage_normalize")), update.find(*SAMPLERS)
        if over == "nothing" or sampler is None:
            return without
        return without.swap(sampler, *((new, sampler) if over == "rollout" else (sampler, new)))

    return Change(("loss", "advantage") if over == "rollout" else ("loss",), says, edit)


def _value(says: str, *before: Call, loss: str = "value_loss", factor: float = 1.0, **arguments: str) -> Change:
    """Exchange the value loss, with a multiple of its coefficient."""

    def edit(update: Update) -> Update | None:
        old = update.find(*VALUES)
        number = 1.0 if old is None or "coef" not in dict(old.arguments) else update.number(old.name, "coef")
        if old is None or number is None:
            return None
        coef = ("coef", f"{factor * number:g}")
        if factor != 1:
            return update.swap(old, old.changed(coef=coef[1]))
        without = update.swap(update.find("clip_prediction"))
        return without.swap(old, *before, Call(f"pp.{loss}", (*arguments.items(), coef)))

    return Change(("loss",), says, edit)


def _clip(says: str, text: str = "") -> Change:
    """Exchange the clip of the gradient."""

    def edit(update: Update) -> Update | None:
        without = update.swap(update.find(*CLIPS))
        return Update(without.chain, (*(read_calls(text) if text else ()), *without.optimizer), update.rows)

    return Change(("optimizer",), says, edit)


def _rate(says: str, text: str, part: str = "") -> Change:
    """Exchange the rate; `{rate}` and `{minibatches}` are those of the update. The part adds the metric of the rate."""

    def edit(update: Update) -> Update | None:
        old, sampler = update.find(*RATES), update.find(*SAMPLERS)
        if old is None or sampler is None:
            return None
        minibatches = dict(sampler.arguments).get("num_minibatches", "1")
        made = update.swap(
            old, *read_calls(text.format(rate=dict(old.arguments)["learning_rate"], minibatches=minibatches))
        )
        parts = (Call(part),) if part and not update.find(part.rpartition(".")[2]) else ()
        return Update((*made.chain, *parts), made.optimizer, update.rows)

    return Change(("optimizer",), says, edit)


NUMBERS = {
    "advantage": (("gae", "gamma"), ("gae", "gae_lambda")),
    "loss": tuple((name, "coef") for name in (*VALUES, "entropy_bonus", "bounds_loss")),
    "optimizer": (*((name, "learning_rate") for name in RATES), (CLIPS[0], "max_norm"), (CLIPS[1], "max_grad_norm")),
}
"""The numbers that each stage fits by least squares."""

FOLLOWING = "jnp.concatenate([batch.value[1:], batch.next_value[-1:]])"
EARLIER = "jnp.concatenate([batch.terminated[1:], batch.shared['last_done'][None].astype(batch.terminated.dtype)])"
LATER = "jnp.concatenate([0 * batch.terminated[:1], batch.terminated[:-1]])"
ADAPTIVE = "pp.optim.scale_by_kl_adaptive_rate({{rate}}, {}, {})"

CHOICES: tuple[Change, ...] = (
    _write("done[t] belongs to the step before t", "terminated", EARLIER),
    _write("done is used one step late", "terminated", LATER),
    _write("a time limit ends the episode", "terminated", "jnp.maximum(batch.terminated, batch.truncated)",
           "truncated"),
    _add("advantage", "a time limit bootstraps from the value of the current state",
         "parts.truncate_at_current_value()", ESTIMATORS, after=False),
    _add("advantage", "time limits are ignored", "parts.ignore_truncations()", ESTIMATORS, after=False),
    _write("a time limit bootstraps from the next episode's first state", "next_value",
           f"jnp.where(batch.truncated.astype(bool), {FOLLOWING}, batch.next_value)", "truncated"),
    _write("nothing is bootstrapped at the end of the rollout", "next_value", "batch.next_value.at[-1].set(0)"),
    _write("every step bootstraps from its own value", "next_value", "batch.value"),
    _write("ends of episodes are ignored", "terminated", "0 * batch.terminated"),
    _standardize("advantages are standardized over the minibatch, ddof 1", "minibatch", ddof="1"),
    _standardize("advantages are standardized over the minibatch, ddof 0", "minibatch"),
    _standardize("advantages are standardized over the rollout, ddof 1", "rollout", ddof="1"),
    _standardize("advantages are standardized over the rollout, ddof 0", "rollout"),
    _standardize("advantages are not standardized", "nothing"),
    *(_set("loss", f"the epsilon of the standardization is {x}", "advantage_normalize", eps=x)
      for x in ("1e-5", "1e-3")),
    *(_set("loss", f"the clip range is {x}", "clipped_surrogate", clip_eps=x)
      for x in ("0.1", "0.2", "0.3", "jnp.inf")),
    _value("the squared error of the value has no factor 1/2", factor=2.0),
    _value("the value loss has another factor 1/2", factor=0.5),
    _value("the value is not clipped"),
    *(_value(f"the value is clipped to {x}", loss="clipped_value_loss", clip_eps=x) for x in ("0.1", "0.2", "0.3")),
    *(_value(f"the predicted value is clipped to {x}", Call("parts.clip_prediction", (("clip_eps", x),)))
      for x in ("0.05", "0.1", "0.2")),
    _add("loss", "entropy has a bonus", "pp.entropy_bonus(coef=0.01)", VALUES),
    _add("loss", "means out of bounds have a loss", "pp.regularizers.bounds_loss(coef=0.1)", VALUES),
    *(_add("loss", f"the divergence is estimated by {x}", f"pp.kl_early_stop(jnp.inf, estimator={x!r})", VALUES)
      for x in ("k1", "k2")),
    Change(("loss",), "rows are numbered n * T + t", lambda update: dataclasses.replace(update, rows="n * T + t")),
    _clip("the gradient is not clipped"),
    *(_clip(f"the gradient is clipped to the norm {x}", f"optax.clip_by_global_norm({x})") for x in ("0.5", "1.0")),
    *(_clip(f"the gradient of each network is clipped to the norm {x}", f"parts.clip_each_network({x})")
      for x in ("0.5", "1.0")),
    *(_set("optimizer", f"Adam's epsilon is {x}", "scale_by_adam", eps=x) for x in ("1e-5", "1e-8", "1e-7")),
    _set("optimizer", "Adam's second decay is 0.99", "scale_by_adam", b2="0.99"),
    _rate("the schedule counts gradient steps", "optax.scale_by_learning_rate({rate})"),
    _rate("the schedule counts updates", "pp.optim.scale_by_update_schedule({rate})"),
    *(_rate(f"the rate adapts before each step to the divergence {x}",
            ADAPTIVE.format(x, "metric='kl'"), "parts.divergence")
      for x in ("0.008", "0.01", "0.02")),
    *(_rate(f"the rate adapts after each epoch to the divergence {x}",
            ADAPTIVE.format(x, "average_over={minibatches}, low=1e-6"), "pp.policy_diagnostics")
      for x in ("0.008", "0.01", "0.02")),
)  # fmt: skip
"""The single changes that `compare_update` tries."""
