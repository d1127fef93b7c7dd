"""`phases`, which runs chains one after another on the same rollout, and the operations of a learner on each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._base.checked import Count, checked
from .._base.hyperparameters import check_takes
from .._base.trees import varying_like
from ..errors import UserTypeError, UserValueError
from .batch import Batch, Params
from .chain import chain, parts_of
from .optimizer import wrap_optimizer
from .part import Context, Divider, Part, no_state
from .sampling import Sampler
from .wiring import find_sampler


@dataclasses.dataclass(frozen=True)
class Phase:
    """A sampler, the parts before and after it, the parameters that they train, and how often they run.

    `trains` is None for all parameters, names of entries of the parameter tree, a function `params -> mask`, or "own",
    which `phases` replaces by the name of the phase.
    """

    before: tuple[Part, ...]
    sampler: Sampler
    after: tuple[Part, ...]
    trains: Any = None
    every: int = 1  # the phase runs once every this many updates
    name: str = ""  # "" if the pipeline has no phases
    optimizer: Any = None  # an optax transformation that accepts extra arguments; the learner sets it

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts of its chain."""
        return (*self.before, self.sampler, *self.after)

    @property
    def prefix(self) -> str:
        """Return the prefix of the names of its metrics and parts."""
        return f"{self.name}/" if self.name else ""

    @property
    def can_stop(self) -> bool:
        """Return whether a part declares that it may stop the phase; the loop can then skip minibatches."""
        return any("stop" in part.provides for part in self.after)

    def check_stop(self) -> None:
        """Raise unless a part declares that it may stop the phase."""
        if not self.can_stop:
            raise UserValueError(
                f"learner: a part after {self.sampler.name} (one of {', '.join(part.name for part in self.after)}) "
                'requested a stop but does not declare it: make it with provides=("stop",)'
            )

    def run_if_due(self, step: Any, run: Callable[..., Any], skip: Callable[..., Any], *operands: Any) -> Any:
        """Return `run(*operands)` if the phase runs in this update, otherwise `skip(*operands)`."""
        if self.every == 1:
            return run(*operands)
        # Inside `shard_map`, the results of both branches must vary over the same devices.
        branches = (lambda *operands, f=f: varying_like(f(*operands), step) for f in (run, skip))
        return jax.lax.cond((step + 1) % self.every == 0, *branches, *operands)

    def select_trained(self, params: Params) -> Params:
        """Return the parameters that the optimizer updates."""
        if self.trains is None or callable(self.trains):
            return params
        for name in self.trains:
            if not isinstance(params, Mapping) or name not in params:
                got = f"entries {sorted(params)}" if isinstance(params, Mapping) else type(params).__name__
                raise UserValueError(
                    f"learner: phase {self.name!r} trains params[{name!r}], but the parameters have {got}; "
                    "specify other parameters with phase(..., trains=...), or all of them with trains=None"
                )
        return params[self.trains[0]] if len(self.trains) == 1 else {name: params[name] for name in self.trains}

    def merge_trained(self, params: Params, trained: Params) -> Params:
        """Return all parameters, with those that the optimizer has updated."""
        if self.trains is None or callable(self.trains):
            return trained
        every = type(params)({**params, **({self.trains[0]: trained} if len(self.trains) == 1 else trained)})
        # The same types as before at every level; an `nnx.State` makes its entries from dicts.
        return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(every))

    def mask_untrained(self, tree: Params, params: Params) -> Params:
        """Return a gradient or update of all parameters, set to 0 where this phase does not train."""
        if not callable(self.trains):
            return tree
        mask = self.trains(params)
        expected: Any = jax.tree.structure(tree)
        got: Any = jax.tree.structure(mask)
        if expected != got:
            raise UserValueError(
                f"learner: phase {self.name!r}: trains(params) must return a boolean for each leaf of the parameters, "
                f"{expected}, got {got}"
            )
        return jax.tree.map(lambda keep, x: jnp.where(keep, x, 0).astype(x.dtype), mask, tree)


@checked
def phase(part: Part, *, trains: Any = "own", every: Count = 1) -> Phase:
    """Make a phase for `phases` from a chain, with the parameters that it trains and how often it runs.

    Args:
        part: a chain with a sampler.
        trains: the parameters that the phase trains. "own" means the entry of the parameter tree with the phase's name,
            None means all of them, and a string or a tuple of strings means the entries with these names. A function
            `mask(params) -> tree of bools` selects the leaves where it is True.
        every: the phase runs only in the updates every - 1, 2 * every - 1, ..., counted from 0.

    Raises:
        TypeError: for a wrong `part` or `trains`. ValueError: without a sampler, or for `trains=()` or `every` < 1.

    Example:
        >>> import ppo_parts as pp
        >>> auxiliary = pp.phase(pp.chain(pp.full_batch(6), pp.value_loss()), trains=None, every=32)

    Reference: Cobbe et al. 2021, Phasic Policy Gradient, arXiv:2009.04416, algorithm 1.
    """
    if isinstance(trains, str) and trains != "own":
        trains = (trains,)
    if callable(trains):
        check_takes("phase", "trains", trains, ("params",))
    elif trains is not None and not (isinstance(trains, (str, tuple)) and all(isinstance(x, str) for x in trains)):
        raise UserTypeError(f"phase: trains must be a name, a tuple of names, None or a function, got {trains!r}")
    elif trains == ():
        raise UserValueError("phase: trains names no parameters, got (); None means all of them")
    return dataclasses.replace(make_phase("phase: the part", part, trains), every=every)


@checked
def phases(**chains: Part | Phase) -> Part:
    """Run named chains in order on one rollout, each with its own sampler, epochs, optimizer and early stop.

    Phase `name` trains only the entry `name` of the parameter tree (`{"actor": ..., "critic": ...}`), unless
    `phase(..., trains=...)` specifies other parameters. Entries that no phase trains stay constant. The learner needs a
    dict of optimizers with the same names, and its metrics are named `name/metric`.

    Args:
        **chains: for each phase, a chain with a sampler, or a `phase`.

    Place: in place of a sampler, at the end of the chain.

    Raises:
        ValueError: if there is no phase, or if a phase has no sampler or contains phases.

    Example:
        >>> import ppo_parts as pp
        >>> pipeline = pp.chain(
        ...     pp.gae(gamma=.99, gae_lambda=.97),
        ...     pp.phases(
        ...         actor=pp.chain(pp.segment_minibatches(4, num_epochs=9), pp.clipped_surrogate(clip_eps=.2)),
        ...         critic=pp.chain(pp.segment_minibatches(4, num_epochs=10), pp.value_loss()),
        ...     ),
        ... )

    Reference: Spinning Up's PPO and jaxagents' IPPO train actor and critic in this way.
    """
    if not chains:
        raise UserValueError("phases: name at least one, e.g. phases(actor=chain(...), critic=chain(...))")
    by_name = {}
    for name, given in chains.items():
        found = given if isinstance(given, Phase) else make_phase(f"phases: {name}", given, trains="own")
        by_name[name] = dataclasses.replace(found, name=name, trains=(name,) if found.trains == "own" else found.trains)

    def update(batch: Batch, state: Any, context: Context) -> tuple[Batch, Any]:
        raise UserValueError(
            "phases have no single minibatch: run the chain with learner(), or one phase's chain alone"
        )

    requires = (field for each in by_name.values() for field in chain(*each.parts).requires)
    return Phases(no_state, update, "phases", tuple(dict.fromkeys(requires)), place="before_sampler", phases=by_name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phases(Divider):
    """The result of `phases`: the phases by name."""

    phases: dict[str, Phase] = dataclasses.field(hash=False)


def make_phase(where: str, part: Any, trains: Any = None) -> Phase:
    """Make an unnamed phase from a chain with a sampler; error messages begin with `where`."""
    if not isinstance(part, Part):
        raise UserTypeError(f"{where} must be a chain with a sampler in it, got {part!r}")
    parts = parts_of(part)
    index = find_sampler(parts)
    if index is None:
        raise UserValueError(
            f"{where} has no sampler: put one, such as shuffled_minibatches() or full_batch(), between the parts that "
            "see the rollout and the losses"
        )
    before, sampler, after = parts[:index], parts[index], parts[index + 1 :]
    if isinstance(sampler, Phases):
        raise UserValueError(f"{where} contains phases, which do not nest: list them all in one phases()")
    assert isinstance(sampler, Sampler)
    return Phase(before, sampler, after, trains)


def divide(pipeline: Part) -> tuple[tuple[Part, ...], list[Phase]]:
    """Return the shared parts and the phases; a pipeline without `phases` is one unnamed phase."""
    *shared, last = parts_of(pipeline) or (pipeline,)
    for part in shared:
        if isinstance(part, Phases):
            raise UserValueError(f"learner: {last.name} comes after phases(): move it into one of the phases")
    if isinstance(last, Phases):
        return tuple(shared), list(last.phases.values())
    return (), [make_phase("learner: the pipeline", pipeline)]


def attach_optimizers(phases: list[Phase], optimizer: Any) -> tuple[Phase, ...]:
    """Return the phases with their optimizers; raise if there are too few or too many optimizers."""
    names = [phase.name for phase in phases]
    if names == [""]:
        if isinstance(optimizer, Mapping):
            raise UserValueError(
                "learner: a dict of optimizers needs phases(); this pipeline has one sampler: give one optimizer; "
                "where a recipe makes the dict, call training.Train.of with one optimizer instead"
            )
        optimizer = {"": optimizer}
    elif not isinstance(optimizer, Mapping) or set(optimizer) != set(names):
        got = f"a dict with {sorted(optimizer)}" if isinstance(optimizer, Mapping) else type(optimizer).__name__
        remedy = "where a recipe makes the optimizer, call training.Train.of with such a dict instead"
        raise UserValueError(f"learner: phases need a dict of optimizers named {sorted(names)}, got {got}; {remedy}")
    made = [wrap_optimizer("learner", optimizer[name]) for name in names]
    return tuple(dataclasses.replace(phase, optimizer=each) for phase, each in zip(phases, made, strict=True))


def name_states(states: Any, phases: Sequence[Phase]) -> dict[str, Any]:
    """Return the states of the phases in a `LearnerState` by name, which inverts `unname_states`."""
    return {"": states} if phases[0].name == "" else dict(states)


def unname_states(states: dict[str, Any], phases: Sequence[Phase]) -> Any:
    """Return the states of the phases as in a `LearnerState`, by name, or without names if there are no `phases`."""
    return states[""] if phases[0].name == "" else states
