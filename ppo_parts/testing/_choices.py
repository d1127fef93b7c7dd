"""An update (a chain and an optimizer), and the table of known choices, which are single changes of an update.

docs/libraries.md tells which library makes which choice.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from ._calls import MODULES, Call, evaluate_text, exchange, join, read_calls, read_name, walk

CHAIN = """pp.chain(
    pp.gae(gamma=0.99, gae_lambda=0.95),
    pp.shuffled_minibatches(num_minibatches=4, num_epochs=4),
    pp.advantage_normalize(),
    pp.clipped_surrogate(clip_eps=0.2),
    pp.value_loss(coef=0.5),
    pp.entropy_bonus(coef=0.0),
)"""
"""The initial chain if nothing is known about the program."""

OPTIMIZER = "pp.clipped_adam(3e-4, max_grad_norm=0.5, eps=1e-5)"
"""The initial optimizer if nothing is known about the program."""


@dataclasses.dataclass(frozen=True)
class Update:
    """The parts of a chain, the transformations of an optimizer (calls or objects), and the numbering of rows."""

    chain: tuple[Any, ...]
    optimizer: tuple[Any, ...]
    rows: str = "t * N + n"

    def __hash__(self) -> int:
        return hash(repr(self))  # the numbers of a part may be arrays

    def __str__(self) -> str:
        lines: list[str] = []
        for made, calls in (("chain = pp.chain(", self.chain), ("optimizer = optax.chain(", self.optimizer)):
            lines += [made, *(f"    {x}," for x in calls), ")"]
        text = "\n".join(lines)
        used = {x: module for x, module in MODULES.items() if f"{x}." in text}
        imports = [f"import {module}" + f" as {x}" * (module != x) for x, module in used.items()]
        return "\n".join([*imports, text])

    @property
    def calls(self) -> list[Call]:
        """Return all calls, each one before the calls inside it."""
        return [*walk((*self.chain, *self.optimizer))]

    def find(self, *names: str) -> Call | None:
        """Return the first call of the first of these names that occurs."""
        return next((x for name in names for x in self.calls if read_name(x.function) == name), None)

    def swap(self, old: Call | None, *new: Call) -> Update:
        """Return a copy with one call replaced by others; if `old` is None, return the same object."""
        if old is None:
            return self
        chain, optimizer = ([y for x in calls for y in exchange(x, old, new)] for calls in (self.chain, self.optimizer))
        return Update(tuple(chain), tuple(optimizer), self.rows)

    def change(self, *changes: Change) -> Update:
        """Return a copy after several changes in order."""
        return functools.reduce(lambda update, change: change.edit(update), changes, self)

    def read_number(self, name: str, argument: str) -> float | None:
        """Return a numeric argument of the first call of this name, or None if there is no such number."""
        call = self.find(name)
        try:
            return float(evaluate_text(dict(call.arguments)[argument])) if call else None
        except (KeyError, TypeError, ValueError):
            return None


class Change(NamedTuple):
    """A single change: the stages that it affects, a description of the result, and the edit.

    If an edit does not apply, it returns the same object.
    """

    stages: tuple[str, ...]
    says: str
    edit: Callable[[Update], Update]


SAMPLERS = (
    "shuffled_minibatches", "segment_minibatches", "prioritized_sampler", "full_batch", "given_indices", "time_chunks"
)  # fmt: skip
ESTIMATORS = ("gae", "vtrace", "one_more_step")
NORMALIZE = "advantage_normalize"
VALUES = ("value_loss", "clipped_value_loss")
CLIPS = ("clip_by_global_norm", "clip_each_network", "clip")
RATES = ("scale_by_update_schedule", "scale_by_learning_rate", "scale_by_kl_adaptive_rate")


def _exchange(
    stages: str, says: str, at: tuple[str, ...], text: str, *, drop: tuple[str, ...] = (), unless: str = "",
    last: str = "",
) -> Change:  # fmt: skip
    """Replace the first call of these names by a text.

    In the text, `{this}` is the call, and `{x}` is an argument x of the call, or else of any other call. The calls
    `drop` are removed, nothing changes if there is already a call `unless`, and the call `last` is added to the chain.
    """

    def edit(update: Update) -> Update:
        old = update.find(*at)
        if old is None or update.find(unless):
            return update
        given = {name: repr(x.default) for name, x in inspect.signature(evaluate_text(old.function)).parameters.items()}
        for each in (*update.calls, old):
            given |= dict(each.arguments)
        try:
            new = read_calls(text.format(**given, this=old))
        except KeyError:  # no call has such an argument
            return update
        for name in drop:
            update = update if name == read_name(old.function) else update.swap(update.find(name))
        update = update.swap(old, *new)
        ends = () if not last or update.find(read_name(last)) else read_calls(last)
        return dataclasses.replace(update, chain=(*update.chain, *ends))

    return Change(tuple(stages.split()), says, edit)


def _set(stages: str, says: str, name: str, **arguments: str) -> Change:
    """Set arguments of the first call of this name."""

    def edit(update: Update) -> Update:
        old = update.find(name)
        return update.swap(old, old.set(**arguments)) if old else update

    return Change(tuple(stages.split()), says, edit)


def _add(stages: str, says: str, text: str, at: tuple[str, ...], before: bool = False) -> Change:
    """Add a call after (or before) the first call of these names unless it already exists."""
    chain = f"pp.chain({text}, {{this}})" if before else f"pp.chain({{this}}, {text})"
    return _exchange(stages, says, at, chain, unless=read_name(text))


def _write(says: str, values: dict[str, str], *needs: str) -> Change:
    """Add a part that writes fields of the rollout before the estimator."""
    requires, made = ("terminated", "value", "next_value", *needs), ", ".join(f"{x}={y}" for x, y in values.items())
    options = f"name='changed', requires={requires!r}, provides={tuple(values)!r}, reads=('shared',), needs_time=True"
    text = f"pp.stateless(lambda batch: batch.replace({made}), {options})"
    return _exchange("advantage", says, ESTIMATORS, f"pp.chain({text}, {{this}})")


def _normalize_values(update: Update) -> Update:
    """Run all parts up to the estimator in units of running moments."""
    if (estimator := update.find("gae", "vtrace")) not in update.chain:
        return update
    end = update.chain.index(estimator) + 1
    given = ("estimator", join(update.chain[:end])), ("eps", "0.0"), ("ddof", "1")
    return dataclasses.replace(update, chain=(Call("parts.normalized_values", given), *update.chain[end:]))


def set_number(name: tuple[str, str], value: float) -> Change:
    """Return the change that sets an argument of a call to this number."""
    return _set("", f"{name[0]}: {name[1]}={value:g}", name[0], **{name[1]: f"{value:.12g}"})


NUMBERS = {
    "advantage": tuple((name, x) for name in ESTIMATORS for x in ("gamma", "gae_lambda")),
    "sampler": (("prioritized_sampler", "alpha"), ("prioritized_sampler", "beta")),
    "loss": tuple((name, "coef") for name in (*VALUES, "entropy_bonus", "bounds_loss")),
    "optimizer": (
        *((name, "learning_rate") for name in (*RATES, "muon")), ("cosine_decay_schedule", "init_value"),
        ("cosine_decay_schedule", "decay_steps"), (CLIPS[0], "max_norm"), (CLIPS[1], "max_grad_norm"),
        (CLIPS[2], "max_delta"), ("add_decayed_weights", "weight_decay"),
    ),
}  # fmt: skip
"""The numbers that are fitted by least squares at each stage."""

UNCLIPPED = ("scale_by_adam", "muon")
FOLLOWING = "jnp.concatenate([batch.value[1:], batch.next_value[-1:]])"
EARLIER = "jnp.concatenate([batch.terminated[1:], batch.shared['last_done'][None].astype(batch.terminated.dtype)])"
LATER = "jnp.concatenate([0 * batch.terminated[:1], batch.terminated[:-1]])"
COSINE = "optax.cosine_decay_schedule({learning_rate}, {num_minibatches} * {num_epochs})"
ADAPTIVE = "pp.optim.scale_by_kl_adaptive_rate({{learning_rate}}, {}, {})"

CHOICES: tuple[Change, ...] = (
    _write("done[t] belongs to the step before t", {"terminated": EARLIER}),
    _write("done is used one step late", {"terminated": LATER}),
    _write("reward[t] belongs to the step before t", {"reward": "jnp.roll(batch.reward, -1, axis=0)"}, "reward"),
    _write("a time limit ends the episode", {"terminated": "jnp.maximum(batch.terminated, batch.truncated)"},
           "truncated"),
    _add("advantage", "a time limit bootstraps from the value of the current state",
         "parts.truncate_at_current_value()", ESTIMATORS, before=True),
    _add("advantage", "time limits are ignored", "parts.ignore_truncations()", ESTIMATORS, before=True),
    _write("the trace continues through time limits", {"truncated": "0 * batch.truncated"}, "truncated"),
    _write("a time limit bootstraps from the next episode's first state",
           {"next_value": f"jnp.where(batch.truncated.astype(bool), {FOLLOWING}, batch.next_value)"}, "truncated"),
    _write("nothing is bootstrapped at the end of the rollout", {"next_value": "batch.next_value.at[-1].set(0)"}),
    _write("the last step of the rollout has the advantage 0",
           {"reward": "batch.reward.at[-1].set(batch.value[-1])", "terminated": "batch.terminated.at[-1].set(True)"},
           "reward"),
    _write("every step bootstraps from its own value", {"next_value": "batch.value"}),
    _write("ends of episodes are ignored", {"terminated": "0 * batch.terminated"}),
    Change(("advantage",), "the value is in units of running moments of values and targets", _normalize_values),
    _set("advantage", "the running moments have epsilon 1e-5 and ddof 0", "normalized_values", eps="1e-05", ddof="0"),
    _exchange("advantage sampler loss", "V-trace", ("gae",), "pp.vtrace(gamma={gamma}, gae_lambda={gae_lambda})"),
    _exchange("advantage", "the advantage is the reward and the next lambda-return of the current policy, less V",
              SAMPLERS, "pp.chain({this}, parts.evaluate_next_obs(), "
              "parts.one_more_step(gamma={gamma}, gae_lambda={gae_lambda}))",
              drop=("normalized_values", "gae", "vtrace")),
    *(_set("sampler loss", f"advantages are computed again before each {x}", name, refresh=repr(x))
      for x in ("epoch", "minibatch") for name in SAMPLERS[:3]),
    *(_exchange("loss", f"advantages are standardized over the minibatch, {x}", ("one_more_step", *SAMPLERS),
                f"pp.chain({{this}}, pp.advantage_normalize({y}))", drop=(NORMALIZE,))
      for x, y in {"ddof 1": "ddof=1", "ddof 0": "", "separately for each step of its segments": "axis=1"}.items()),
    *(_exchange("loss advantage", f"advantages are standardized over the rollout, ddof {x}", SAMPLERS,
                f"pp.chain(pp.advantage_normalize(ddof={x}), {{this}})", drop=(NORMALIZE,)) for x in (1, 0)),
    _exchange("loss", "advantages are not standardized", SAMPLERS, "{this}", drop=(NORMALIZE,)),
    *(_set("loss", f"the epsilon of the standardization is {x}", NORMALIZE, eps=x) for x in ("1e-05", "0.001")),
    _add("loss", "advantages are multiplied by the weights of their segments", "pp.advantage_weight()",
         ("clipped_surrogate",), before=True),
    *(_set("loss", f"the clip range is {x}", "clipped_surrogate", clip_eps=x)
      for x in ("0.1", "0.2", "0.3", "jnp.inf")),
    *(_exchange("loss", f"the loss of the {loss} has the opposite sign", (part,),
                f"pp.chain({{this}}, pp.stateless(lambda b: b.replace(losses={{{{**b.losses, '{loss}': "
                f"-b.losses['{loss}']}}}}), name='opposite', requires=('losses',), provides=('losses',)))")
      for part, loss in (("clipped_surrogate", "policy"), ("entropy_bonus", "entropy"))),
    _exchange("loss", "the policy has no loss", SAMPLERS, "{this}", drop=("clipped_surrogate",)),
    _exchange("loss", "the value is not clipped", VALUES, "pp.value_loss(coef={coef})", drop=("clip_prediction",)),
    *(_exchange("loss", f"the value is clipped to {x}", VALUES, f"pp.clipped_value_loss(clip_eps={x}, coef={{coef}})",
                drop=("clip_prediction",)) for x in ("0.1", "0.2", "0.3")),
    *(_exchange("loss", f"the predicted value is clipped to {x}", VALUES,
                f"pp.chain(parts.clip_prediction(clip_eps={x}), pp.value_loss(coef={{coef}}))",
                drop=("clip_prediction",)) for x in ("0.05", "0.1", "0.2")),
    _add("loss", "entropy has a bonus", "pp.entropy_bonus(coef=0.01)", VALUES),
    _add("loss", "means out of bounds have a loss", "pp.regularizers.bounds_loss(coef=0.1)", VALUES),
    *(_add("loss", f"the divergence is estimated by {x}", f"pp.kl_early_stop(jnp.inf, estimator={x!r})", VALUES)
      for x in ("k1", "k2")),
    Change(("loss",), "rows are numbered n * T + t", lambda update: dataclasses.replace(update, rows="n * T + t")),
    _exchange("optimizer", "the gradient is not clipped", UNCLIPPED, "{this}", drop=CLIPS),
    *(_exchange("optimizer", f"the gradient{of} is clipped to the norm {x}", UNCLIPPED,
                f"optax.chain({clip}({x}), {{this}})", drop=CLIPS)
      for of, clip in (("", "optax.clip_by_global_norm"), (" of each network", "parts.clip_each_network"))
      for x in ("0.5", "1.0")),
    *(_exchange("optimizer", f"each element of the gradient is clipped to {x}", UNCLIPPED,
                f"optax.chain(optax.clip({x}), {{this}})", drop=CLIPS) for x in ("0.5", "1.0")),
    _add("optimizer", "weights decay, as in AdamW", "optax.add_decayed_weights(0.01)", UNCLIPPED[:1]),
    *(_set("optimizer", f"Adam's epsilon is {x}", "scale_by_adam", eps=x) for x in ("1e-05", "1e-08", "1e-07")),
    _set("optimizer", "Adam's first decay is 0.95", "scale_by_adam", b1="0.95"),
    _set("optimizer", "Adam's second decay is 0.99", "scale_by_adam", b2="0.99"),
    _exchange("optimizer", "Muon, with Adam for parameters that are not matrices", (*RATES, "muon"),
              "optax.contrib.muon({learning_rate})", drop=("scale_by_adam",)),
    _exchange("optimizer", "the schedule counts gradient steps", RATES,
              "optax.scale_by_learning_rate({learning_rate})"),
    _exchange("optimizer", "the schedule counts updates", RATES, "pp.optim.scale_by_update_schedule({learning_rate})"),
    *(_exchange("optimizer", f"the rate adapts before each step to the divergence {x}", RATES,
                ADAPTIVE.format(x, "metric='kl'"), last="parts.divergence()") for x in ("0.008", "0.01", "0.02")),
    *(_exchange("optimizer", f"the rate adapts after each {unit} to the divergence {x}", RATES,
                ADAPTIVE.format(x, f"average_over={over}, low=1e-6"), last="pp.policy_diagnostics()")
      for unit, over in (("step", "1"), ("epoch", "{num_minibatches}")) for x in ("0.008", "0.01", "0.02")),
    _exchange("optimizer", "the rate falls as a cosine of gradient steps", RATES,
              f"optax.scale_by_learning_rate({COSINE})"),
    _exchange("optimizer", "the rate falls as a cosine of gradient steps", ("muon",), f"optax.contrib.muon({COSINE})"),
)  # fmt: skip
"""The single changes that `compare_update` tries."""
