"""The plan of a pipeline: the parts that all phases share, and what each phase does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._base.errors import UserTypeError, UserValueError
from .chain import Chain
from .optim import transformation
from .phases import Phase, Phases
from .sampling import Sampler
from .types import Params, Part
from .wiring import find_sampler


@dataclasses.dataclass(frozen=True)
class PhaseSpec:
    """The specification of one phase: a sampler with the parts on both sides of it, an optimizer, and what it trains.

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
    def can_stop(self) -> bool:
        """Whether a part declares that it may stop the phase; the loop can then skip minibatches."""
        return any("stop" in part.provides for part in self.after)

    def check_stop(self) -> None:
        """Raise unless a part declares that it may stop the phase."""
        if not self.can_stop:
            raise UserValueError(
                f"learner: a part after {self.sampler.name} (one of {', '.join(part.name for part in self.after)}) "
                'requested a stop but does not declare it: make it with provides=("stop",)'
            )

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
        structures: list[Any] = [jax.tree.structure(tree), jax.tree.structure(mask)]
        if structures[0] != structures[1]:
            raise UserValueError(
                f"learner: phase {self.name!r}: trains(params) must return a boolean for each leaf of the parameters, "
                f"{structures[0]}, got {structures[1]}"
            )
        return jax.tree.map(lambda keep, x: jnp.where(keep, x, 0).astype(x.dtype), mask, tree)


def divide(pipeline: Part) -> tuple[tuple[Part, ...], list[PhaseSpec]]:
    """Return the shared parts, and the phases; a pipeline without `phases` is one phase without a name."""
    assert isinstance(pipeline, Chain)
    for part in pipeline.parts:
        if isinstance(part, Phase):
            raise UserValueError("learner: the chain contains a bare phase: put it into phases(name=phase(...))")
    index = find_sampler(pipeline.parts)
    if index is None:
        raise UserValueError(
            "learner: the pipeline has no sampler: put one, such as shuffled_minibatches() or full_batch(), between "
            "the parts that see the rollout and the losses"
        )
    before, dividing, after = pipeline.parts[:index], pipeline.parts[index], pipeline.parts[index + 1 :]
    if isinstance(dividing, Sampler):
        return (), [PhaseSpec("", before, dividing, after)]
    if not isinstance(dividing, Phases):
        raise UserTypeError(f"learner: {dividing.name} is not a sampler or phases: make samplers with pp.sampler(...)")
    if after:
        raise UserValueError(f"learner: {after[0].name} comes after phases(): move it into one of the phases")
    specs = []
    for name, phase in dividing.phases.items():
        _, (spec,) = divide(phase.chain)
        trains = (name,) if phase.trains == "own" else phase.trains
        trains = (trains,) if isinstance(trains, str) else trains
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
