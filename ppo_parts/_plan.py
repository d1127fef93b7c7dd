"""The plan of a pipeline: the parts that all phases share, and what each phase does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ._chain import Chain, divider
from ._errors import UserTypeError, UserValueError
from ._optim import transformation
from ._phases import Phase, Phases
from ._samplers import Sampler
from ._types import Params, Part


@dataclasses.dataclass(frozen=True)
class PhasePlan:
    """The plan of one phase: a sampler with the parts on both sides of it, an optimizer, and what it trains.

    Attributes:
        name: name of the phase; None if the pipeline has no phases.
        before, sampler, after: the parts of its chain.
        optimizer: an optax transformation that takes extra arguments.
        trains: None: all parameters; names of entries of the parameter tree; or a function `params -> mask`.
        every: the phase runs once in this many updates.
    """

    name: str | None
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
        return jax.tree.map(lambda keep, x: jnp.where(keep, x, 0).astype(x.dtype), self.trains(params), tree)


def divide(pipeline: Part) -> tuple[tuple[Part, ...], list[PhasePlan]]:
    """Return the shared parts, and the phases; a pipeline without `phases` is one phase without a name."""
    assert isinstance(pipeline, Chain)
    for part in pipeline.parts:
        if isinstance(part, Phase):
            raise UserValueError("learner: the chain contains a bare phase: put it into phases(name=phase(...))")
    index = divider(pipeline.parts)
    if index is None:
        raise UserValueError(
            "learner: the pipeline has no sampler: put one, such as shuffled_minibatches() or full_batch(), between "
            "the parts that see the rollout and the losses"
        )
    before, dividing, after = pipeline.parts[:index], pipeline.parts[index], pipeline.parts[index + 1 :]
    if isinstance(dividing, Sampler):
        return (), [PhasePlan(None, before, dividing, after)]
    if not isinstance(dividing, Phases):
        raise UserTypeError(f"learner: {dividing.name} is not a sampler or phases: make samplers with pp.sampler(...)")
    if after:
        raise UserValueError(f"learner: {after[0].name} comes after phases(): move it into one of the phases")
    plans = []
    for name, phase in dividing.phases.items():
        _, (plan,) = divide(phase.chain)
        trains = (name,) if phase.trains == "own" else phase.trains
        trains = (trains,) if isinstance(trains, str) else trains
        plans.append(dataclasses.replace(plan, name=name, trains=trains, every=phase.every))
    return before, plans


def with_optimizers(plans: list[PhasePlan], optimizer: Any) -> list[PhasePlan]:
    """Return the plans, each with its optimizer; raise if there are too few or too many optimizers."""
    names = [plan.name for plan in plans]
    if names == [None]:
        if isinstance(optimizer, Mapping):
            raise UserValueError(
                "learner: a dict of optimizers goes with phases(); this pipeline has one sampler, give one"
            )
        optimizer = {None: optimizer}
    elif not isinstance(optimizer, Mapping) or set(optimizer) != set(names):
        got = f"a dict with {sorted(optimizer)}" if isinstance(optimizer, Mapping) else type(optimizer).__name__
        raise UserValueError(f"learner: phases need a dict of optimizers named {sorted(map(str, names))}, got {got}")
    return [dataclasses.replace(plan, optimizer=transformation("learner", optimizer[plan.name])) for plan in plans]
