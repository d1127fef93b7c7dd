"""`phases`: chains that run one after another on the same rollout."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._base.errors import UserTypeError, UserValueError
from .._base.hyperparameters import check_count, check_takes
from .chain import Chain, chain
from .sampling import Sampler
from .types import Array, Batch, Context, Divider, Params, Part
from .wiring import find_sampler


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase(Part):
    """The result of `phase`: a chain with a sampler, the parameters that it trains, and how often it runs."""

    chain: Chain
    trains: Any
    every: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phases(Divider):
    """The result of `phases`: named phases."""

    phases: dict[str, Phase]

    @property
    def stage(self) -> str:
        return "phases"

    @property
    def chains(self) -> dict[str, tuple[Part, ...]]:
        return {name: phase.chain.parts for name, phase in self.phases.items()}


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
    names = (trains,) if isinstance(trains, str) else trains
    if not (names is None or callable(names) or (isinstance(names, tuple) and all(isinstance(x, str) for x in names))):
        raise UserTypeError(f"phase: trains must be a name, a tuple of names, None or a function, got {trains!r}")
    if callable(names):
        check_takes("phase", "trains", names, ("params",))
    if names == ():
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
    by_name: dict[str, Phase] = {}
    for name, part in chains.items():
        if not isinstance(part, Part):
            raise UserTypeError(f"phases: {name} must be a chain with a sampler in it, got {part!r}")
        one = part if isinstance(part, Phase) else phase(part)
        assert isinstance(one, Phase)
        index = find_sampler(one.chain.parts)
        if index is not None and isinstance(one.chain.parts[index], Phases):
            raise UserValueError(f"phases: {name} contains phases, which do not nest: list them all in one phases()")
        if index is None or not isinstance(one.chain.parts[index], Sampler):
            raise UserValueError(
                f"phases: {name} has no sampler of its own: put one, such as shuffled_minibatches(), into its chain"
            )
        by_name[name] = one

    def init(params: Params, key: Array | None = None) -> dict[str, Any]:
        return {name: part.init(params, key) for name, part in by_name.items()}

    def update(batch: Batch, state: Any, context: Context) -> tuple[Batch, Any]:
        raise UserValueError(
            "phases have no single minibatch: run the chain with learner(), or one phase's chain alone"
        )

    requires = tuple(dict.fromkeys(field for part in by_name.values() for field in part.requires))
    return Phases(init, update, "phases", requires, place="before_sampler", phases=by_name)
