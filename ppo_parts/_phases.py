"""`phases`: sub-pipelines that run one after another on the same rollout."""

from __future__ import annotations

import dataclasses
from typing import Any

from ._chain import Chain, chain, divider
from ._samplers import Sampler
from ._types import Batch, Context, Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phases(Part):
    """What `phases` returns: named chains, each with a sampler of its own."""

    chains: dict[str, Chain]


def phases(**chains: Part) -> Part:
    """Run named chains in order on the same rollout, each with its own sampler, epochs, optimizer and early stop.

    Phase `name` trains the entry `name` of the parameter tree (`{"actor": ..., "critic": ...}`) and nothing else; the
    learner takes a dict of optimizers with the same names, and its metrics are named `name/metric`.

    Args:
        **chains: a chain with a sampler for each phase.

    Place: where a sampler would stand; nothing follows it.

    Raises:
        ValueError: no phase; a phase without a sampler, or with phases inside.

    Example:
        >>> import ppo_parts as pp
        >>> pipeline = pp.chain(
        ...     pp.gae(gamma=.99, gae_lambda=.97),
        ...     pp.phases(
        ...         actor=pp.chain(pp.segment_minibatches(4, num_epochs=9), pp.clipped_surrogate(clip_eps=.2)),
        ...         critic=pp.chain(pp.segment_minibatches(4, num_epochs=10), pp.value_loss()),
        ...     ),
        ... )

    Reference: Spinning Up's PPO and jaxagents' IPPO train actor and critic so.
    """
    if not chains:
        raise ValueError("phases: name at least one, e.g. phases(actor=chain(...), critic=chain(...))")
    whole: dict[str, Chain] = {}
    for name, part in chains.items():
        if not isinstance(part, Part):
            raise TypeError(f"phases: {name} must be a chain with a sampler in it, got {part!r}")
        inner = chain(part)
        assert isinstance(inner, Chain)
        index = divider(inner.parts)
        if index is not None and isinstance(inner.parts[index], Phases):
            raise ValueError(f"phases: {name} has phases inside, and they do not nest: list them all in one phases()")
        if index is None or not isinstance(inner.parts[index], Sampler):
            raise ValueError(
                f"phases: {name} has no sampler of its own: put one, such as shuffled_minibatches(), into its chain"
            )
        whole[name] = inner

    def init(params: Any) -> dict[str, Any]:
        return {name: part.init(params) for name, part in whole.items()}

    def update(batch: Batch, state: Any, context: Context) -> tuple[Batch, Any]:
        raise ValueError("phases have no single minibatch: run the chain with learner(), or one phase's chain alone")

    return Phases(init, update, "phases", provides=("current",), place="before_sampler", chains=whole)
