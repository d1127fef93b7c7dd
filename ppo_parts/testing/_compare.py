"""`compare_update`, which finds where another program's update differs from a chain, and by which choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._base.hyperparameters import check_takes
from .._core.part import Part
from ..errors import UserTypeError
from ..functional._common import Range, check_range
from ._calls import read_calls
from ._choices import CHAIN, OPTIMIZER, Update
from ._explain import explain
from ._record import read
from ._replay import Difference, Replay, find_first


@dataclasses.dataclass(frozen=True)
class UpdateComparison:
    """The result of `compare_update`; print it.

    Attributes:
        compared: the quantities that were compared.
        first: the first one that differs, or None.
        changes: the changes that remove differences, in the order in which they were found.
        left: the first difference that remains after them, or None if they explain the whole record.
        update: the update after these changes, as Python text; empty if the chain was not given as text.
    """

    compared: tuple[str, ...]
    first: Difference | None
    changes: tuple[str, ...]
    left: Difference | None
    update: str

    def __str__(self) -> str:
        lines = [f"compared: {', '.join(self.compared)}"]
        if self.first is None:
            return "\n".join([*lines, "no difference"])
        lines += [f"first difference ({self.first.stage}): {self.first}", *(f"change: {x}" for x in self.changes)]
        left = self.left and f"not explained ({self.left.stage}): {self.left}"
        return "\n".join([*lines, left] if left else [*lines, "no difference is left:", "", self.update])


def compare_update(
    record: Mapping[str, Any] | str | Path,
    chain: str | Part = CHAIN,
    evaluate: Callable[..., Any] | None = None,
    optimizer: str | Any = OPTIMIZER,
    *,
    rtol: float = 1e-4,
) -> UpdateComparison:
    """Replay a recorded update of any program, and name the first quantity that differs from a chain's.

    Each stage is computed from the recorded results of earlier stages, so one difference does not hide the next:

    1. policy: `log_prob` and `value` of the rollout under `behavior` or `params`;
    2. advantage: `advantage` and `target` (with a `refresh`, before the first minibatch);
    3. sampler: `weight` of each segment drawn by priority;
    4. loss: `minibatch_advantage`, `policy_loss`, `value_loss`, `entropy`, `approx_kl`, `clip_fraction`, `loss`,
       `loss_without_entropy`;
    5. gradient: `gradient` and `grad_norm`, before any clip;
    6. optimizer: `params_after` each step, or after the last one. If they are not recorded for each step, the earlier
       stages compare only the first gradient step, and the chain's own steps lead to the last parameters.

    If a stage differs, the function tries single changes from a table of choices, and fits numbers such as gamma, loss
    coefficients and the learning rate. If no change explains the stage, the best one is kept and the search goes on.

    Args:
        record: a dictionary of arrays, or the path of an `.npz`. It needs `obs`, `action`, `log_prob`, `value`,
            `reward` and `terminated` (or `done`), `[T, N, ...]`; `next_value` or `next_obs`, `[T, N, ...]`, or
            `last_value` `[N]`; and `params`. Optional are `truncated` and `mask` `[T, N]`; `last_done` `[N]`, `done`
            after the last step; `indices` `[E, K, M]`, the rows t * N + n of each minibatch, or `segments`, the columns
            n, with `weight` of the same shape; `keys` `[E, K, ...]`, for losses that draw; `behavior`, the parameters
            that acted, if not `params`; `step`, the number of updates before this one; `moments`, mean, variance and
            number of the values before this update; and the quantities above, for minibatches with a leading axis of
            gradient steps. Trees are dictionaries, or keys such as `params/w`.
        chain: the chain as Python text, with numbers written out; or a part, for which no changes are tried.
        evaluate: your network, `evaluate(params, batch) -> Output`, where `params` is the recorded tree.
        optimizer: the optimizer as Python text, or an optax transformation; it begins in its initial state.
        rtol: relative tolerance, as a fraction of the largest number of an array (for parameters, of the distance
            traveled in a step); a few rounding errors are added.

    Raises:
        ValueError: if the record lacks a key or has an unknown one, or its shapes or rows do not fit. TypeError: if no
            network is given, or a call in the text has wrong arguments.

    Example:
        >>> import ppo_parts as pp
        >>> from ppo_parts import testing
        >>> batch, context = testing.example_batch(), testing.example_context()
        >>> fields = ("obs", "action", "reward", "terminated", "truncated", "next_value", "mask")
        >>> record = {name: getattr(batch, name) for name in fields} | {"params": context.params}
        >>> output = context.evaluate(context.params, batch)
        >>> record |= {"value": output.value, "log_prob": output.distribution.log_prob(batch.action)}
        >>> record["advantage"] = pp.functional.gae(
        ...     *(record[x] for x in ("reward", "value", "next_value", "terminated", "truncated")),
        ...     gamma=0.9, gae_lambda=0.95, mask=record["mask"],
        ... ).advantage
        >>> testing.compare_update(record, evaluate=context.evaluate).changes
        ('gae: gamma=0.9',)
    """
    if evaluate is None:
        raise UserTypeError("compare_update: give your network, evaluate=(params, batch) -> Output")
    check_takes("compare_update", "evaluate", evaluate, ("params", "batch"))
    check_range("compare_update", "rtol", rtol, Range(0))
    replay = Replay(read(record), evaluate, rtol)
    given: list[Any] = [read_calls(x) if isinstance(x, str) else (x,) for x in (chain, optimizer)]
    update = _set_sizes(Update(*given), replay)
    found = replay.compare(update)
    first = find_first(found)
    explained, changes, left = explain(replay, update, first) if isinstance(chain, str) else ("", [], first)
    return UpdateComparison(replay.list_compared(found), first, tuple(x.says for x in changes), left, str(explained))


def _set_sizes(update: Update, replay: Replay) -> Update:
    """Return the update with the recorded numbers of epochs and minibatches, and a sampler that draws them."""
    old = update.find("shuffled_minibatches", "segment_minibatches")
    if old is None or replay.indices is None:
        return update
    epochs, minibatches, size = map(str, replay.indices.shape)
    given, name = {"num_epochs": epochs, "num_minibatches": minibatches}, "shuffled_minibatches"
    if "segments" in replay.record:
        name = "segment_minibatches"
    if "weight" in replay.record:
        given, name = given | {"segments_per_minibatch": size, "alpha": "0.6", "beta": "0.4"}, "prioritized_sampler"
    return update.swap(old, old.set(**given)._replace(function=f"pp.{name}"))
