"""`phases`: chains that run one after another on the same rollout, and what a learner does in each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._base.errors import UserTypeError, UserValueError
from .._base.hyperparameters import check_count, check_takes
from .chain import Chain, chain, parts_of
from .optim import transformation
from .sampling import Sampler
from .types import Array, Batch, Context, Divider, Params, Part
from .wiring import find_sampler


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase(Part):
    """The result of `phase`: a chain with a sampler, the parameters that it trains, and how often it runs."""

    chain: Chain
    trains: Any
    every: int


def phase(part: Part, *, trains: Any = "own", every: int = 1) -> Part:
    """Make a phase for `phases` from a chain, with the parameters that it trains and how often it runs.

    Args:
        part: a chain with a sampler.
        trains: which parameters its gradient reaches. "own": the entry of the parameter tree with the phase's name.
            None: all of them. A string or a tuple of strings: the entries with these names. A function
            `mask(params) -> tree of bools`: the leaves where it is True.
        every: the phase runs once in this many updates: in the updates every - 1, 2 * every - 1, ..., counted from 0.

    Raises:
        TypeError: not a part; `trains` is of another type. ValueError: `trains` names nothing; `every` < 1.

    Example:
        >>> import ppo_parts as pp
        >>> auxiliary = pp.phase(pp.chain(pp.full_batch(6), pp.value_loss()), trains=None, every=32)

    Reference: Cobbe et al. 2021, Phasic Policy Gradient, arXiv:2009.04416, algorithm 1.
    """
    if not isinstance(part, Part):
        raise UserTypeError(f"phase: expected a chain with a sampler in it, got {part!r}")
    check_count("phase", "every", every)
    if isinstance(trains, str) and trains != "own":
        trains = (trains,)
    if callable(trains):
        check_takes("phase", "trains", trains, ("params",))
    elif trains is not None and not (isinstance(trains, (str, tuple)) and all(isinstance(x, str) for x in trains)):
        raise UserTypeError(f"phase: trains must be a name, a tuple of names, None or a function, got {trains!r}")
    elif trains == ():
        raise UserValueError("phase: trains names no parameters, got (); None means all of them")
    inner = chain(part)
    assert isinstance(inner, Chain)
    return Phase(
        inner.init, inner.update, "phase", inner.requires, inner.provides, chain=inner, trains=trains, every=every
    )


def phases(**chains: Part) -> Part:
    """Run named chains in order on the same rollout, each with its own sampler, epochs, optimizer and early stop.

    Phase `name` trains only the entry `name` of the parameter tree (`{"actor": ..., "critic": ...}`), unless
    `phase(..., trains=...)` specifies other parameters. The learner takes a dict of optimizers with the same names, and
    its metrics are named `name/metric`.

    Args:
        **chains: a chain with a sampler for each phase, or a `phase`.

    Place: in place of a sampler, at the end of the chain.

    Raises:
        ValueError: no phase; a phase without a sampler, or one that contains phases.

    Example:
        >>> import ppo_parts as pp
        >>> pipeline = pp.chain(
        ...     pp.gae(gamma=.99, gae_lambda=.97),
        ...     pp.phases(
        ...         actor=pp.chain(pp.segment_minibatches(4, num_epochs=9), pp.clipped_surrogate(clip_eps=.2)),
        ...         critic=pp.chain(pp.segment_minibatches(4, num_epochs=10), pp.value_loss()),
        ...     ),
        ... )

    Reference: Spinning Up's PPO and jaxagents' IPPO train actor and critic this way.
    """
    if not chains:
        raise UserValueError("phases: name at least one, e.g. phases(actor=chain(...), critic=chain(...))")
    by_name: dict[str, Any] = {}
    for name, part in chains.items():
        if not isinstance(part, Part):
            raise UserTypeError(f"phases: {name} must be a chain with a sampler in it, got {part!r}")
        by_name[name] = part if isinstance(part, Phase) else phase(part)
        index = find_sampler(by_name[name].chain.parts)
        divider = None if index is None else by_name[name].chain.parts[index]
        if isinstance(divider, Divider) and divider.phases:
            raise UserValueError(f"phases: {name} contains phases, which do not nest: list them all in one phases()")
        if not isinstance(divider, Sampler):
            raise UserValueError(
                f"phases: {name} has no sampler of its own: put one, such as shuffled_minibatches(), into its chain"
            )

    def init(params: Params, key: Array | None = None) -> dict[str, Any]:
        return {name: part.init(params, key) for name, part in by_name.items()}

    def update(batch: Batch, state: Any, context: Context) -> tuple[Batch, Any]:
        raise UserValueError(
            "phases have no single minibatch: run the chain with learner(), or one phase's chain alone"
        )

    requires = tuple(dict.fromkeys(field for part in by_name.values() for field in part.requires))
    return Divider(init, update, "phases", requires, place="before_sampler", phases=by_name)


@dataclasses.dataclass(frozen=True)
class PhaseSpec:
    """What a learner does in one phase: a sampler with the parts on both sides of it, an optimizer, and what it trains.

    Attributes:
        name: name of the phase; "" if the pipeline has no phases.
        before, sampler, after: the parts of its chain.
        optimizer: an optax transformation that takes extra arguments.
        trains: None: all parameters; names of entries of the parameter tree; or a function `params -> mask`.
        every: the phase runs once in this many updates.
    """

    name: str
    before: tuple[Part, ...]
    sampler: Sampler
    after: tuple[Part, ...]
    optimizer: Any = None
    trains: tuple[str, ...] | Callable[[Params], Any] | None = None
    every: int = 1

    @property
    def prefix(self) -> str:
        """The beginning of the names of its metrics and parts."""
        return f"{self.name}/" if self.name else ""

    @property
    def can_stop(self) -> bool:
        """Whether a part declares that it may stop the phase; the loop can then skip minibatches."""
        return any("stop" in part.provides for part in self.after)

    @property
    def first_of_current(self) -> int:
        """The position after the sampler of the first part that may read `current` or add a loss."""

        def needs_gradient(part: Part) -> bool:
            if part.reads is None or "losses" in part.provides:  # a loss may depend on the parameters alone
                return True
            return any(field.startswith("current") for field in (*part.requires, *part.reads))

        return [*map(needs_gradient, self.after), True].index(True)

    def check_stop(self) -> None:
        """Raise unless a part declares that it may stop the phase."""
        if not self.can_stop:
            raise UserValueError(
                f"learner: a part after {self.sampler.name} (one of {', '.join(part.name for part in self.after)}) "
                'requested a stop but does not declare it: make it with provides=("stop",)'
            )

    def is_due(self, step: Any) -> Any:
        """Return whether the phase runs in this update."""
        return (step + 1) % self.every == 0

    def trained(self, params: Params) -> Params:
        """Return the parameters that the optimizer updates."""
        if self.trains is None or callable(self.trains):
            return params
        for name in self.trains:
            if not isinstance(params, Mapping) or name not in params:
                got = f"entries {sorted(params)}" if isinstance(params, Mapping) else type(params).__name__
                raise UserValueError(
                    f"learner: phase {self.name!r} trains params[{name!r}], but the parameters have {got}; "
                    "specify other parameters with phase(..., trains=...)"
                )
        return params[self.trains[0]] if len(self.trains) == 1 else {name: params[name] for name in self.trains}

    def merged(self, params: Params, trained: Params) -> Params:
        """Return all parameters, including those that the optimizer has updated."""
        if self.trains is None or callable(self.trains):
            return trained
        return {**params, **({self.trains[0]: trained} if len(self.trains) == 1 else trained)}

    def masked(self, tree: Params, params: Params) -> Params:
        """Return a gradient or an update of all parameters, with 0 where this phase does not train."""
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


def divide(pipeline: Part) -> tuple[tuple[Part, ...], list[PhaseSpec]]:
    """Return the shared parts, and the phases; a pipeline without `phases` is one phase without a name."""
    parts = parts_of(pipeline)
    if any(isinstance(part, Phase) for part in parts):
        raise UserValueError("learner: the chain contains a bare phase: put it into phases(name=phase(...))")
    index = find_sampler(parts)
    if index is None:
        raise UserValueError(
            "learner: the pipeline has no sampler: put one, such as shuffled_minibatches() or full_batch(), between "
            "the parts that see the rollout and the losses"
        )
    before, divider, after = parts[:index], parts[index], parts[index + 1 :]
    if isinstance(divider, Sampler):
        return (), [PhaseSpec("", before, divider, after)]
    if not (isinstance(divider, Divider) and divider.phases):
        raise UserTypeError(f"learner: {divider.name} is not a sampler or phases: make samplers with pp.sampler(...)")
    if after:
        raise UserValueError(f"learner: {after[0].name} comes after phases(): move it into one of the phases")
    specs = []
    for name, phase in divider.phases.items():
        _, (spec,) = divide(phase.chain)
        trains = (name,) if phase.trains == "own" else phase.trains
        specs.append(dataclasses.replace(spec, name=name, trains=trains, every=phase.every))
    return before, specs


def with_optimizers(specs: list[PhaseSpec], optimizer: Any) -> tuple[PhaseSpec, ...]:
    """Return the phases, each with its optimizer; raise if there are too few or too many optimizers."""
    names = [spec.name for spec in specs]
    if names == [""]:
        if isinstance(optimizer, Mapping):
            raise UserValueError(
                "learner: a dict of optimizers needs phases(); this pipeline has one sampler: give one optimizer"
            )
        optimizer = {"": optimizer}
    elif not isinstance(optimizer, Mapping) or set(optimizer) != set(names):
        got = f"a dict with {sorted(optimizer)}" if isinstance(optimizer, Mapping) else type(optimizer).__name__
        raise UserValueError(f"learner: phases need a dict of optimizers named {sorted(names)}, got {got}")
    return tuple(dataclasses.replace(spec, optimizer=transformation("learner", optimizer[spec.name])) for spec in specs)


def by_phase(states: Any, specs: Sequence[PhaseSpec]) -> dict[str, Any]:
    """Return the states of the phases by name, from those in a `LearnerState`; inverts `without_names`."""
    return {"": states} if specs[0].name == "" else dict(states)


def without_names(states: dict[str, Any], specs: Sequence[PhaseSpec]) -> Any:
    """Return the states of the phases as in a `LearnerState`: by name, or without names if there are no `phases`."""
    return states[""] if specs[0].name == "" else states
