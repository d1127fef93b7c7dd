"""A recorded update of any program, with required and optional quantities."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..errors import ShapeError, UserTypeError, UserValueError
from ..functional._errors import did_you_mean

QUANTITIES = {
    "policy": ("log_prob", "value"),
    "advantage": ("advantage", "target"),
    "sampler": ("weight",),
    "loss": (
        "minibatch_advantage", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "loss",
        "loss_without_entropy",
    ),
    "gradient": ("gradient", "grad_norm"),
    "optimizer": ("params_after",),
}  # fmt: skip
"""The quantities that each stage compares, in this order."""
STAGES = tuple(QUANTITIES)
STAGE_OF = {name: stage for stage, names in QUANTITIES.items() for name in names}
OF_ROLLOUT = ("policy", "advantage")
"""The stages whose quantities have a time axis; quantities of other stages have an axis of gradient steps."""
OF_MINIBATCH = tuple(name for name, stage in STAGE_OF.items() if stage not in OF_ROLLOUT)
PER_STEP = ("log_prob", "value", "reward", "terminated", "truncated", "next_value", "mask")
KEYS = (
    "obs", "action", *PER_STEP, "done", "next_obs", "last_value", "last_done", "params", "behavior", "step", "indices",
    "segments", "keys", "moments", "advantage", "target", *OF_MINIBATCH,
)  # fmt: skip


def read(record: Any) -> dict[str, Any]:
    """Return the record with trees as nested dictionaries; raise if it is incomplete or inconsistent."""
    found: dict[str, Any] = {}
    if isinstance(record, (str, Path)):
        record = dict(np.load(record))
    elif not isinstance(record, Mapping):
        got = type(record).__name__
        raise UserTypeError(f"compare_update: record must be a dictionary of arrays or the path of a .npz, got a {got}")
    for key, x in record.items():
        *path, last = key.split("/")
        if (name := key.partition("/")[0]) not in KEYS:
            hint = did_you_mean(name, KEYS) or f"; the keys are {', '.join(KEYS)}"
            raise UserValueError(f"compare_update: the record has the unknown key {key!r}{hint}")
        tree = found
        for each in path:
            tree = tree.setdefault(each, {})
            if not isinstance(tree, dict):
                raise UserValueError(f"compare_update: the record has both {each!r} and {key!r}: leave one of them out")
        if last in tree:
            raise UserValueError(f"compare_update: the record has {key!r} whole and in parts: leave one of them out")
        tree[last] = jax.tree.map(np.asarray, x)
    for one, other in (("done", "terminated"), ("indices", "segments")):
        if {one, other} <= found.keys():
            raise UserValueError(f"compare_update: the record has {one!r} and {other!r}: leave one of them out")
    if "done" in found:
        found["terminated"] = found.pop("done")
    for name in ("obs", "action", "log_prob", "value", "reward", "terminated", "params"):
        if not jax.tree.leaves(found.get(name)):
            what = {"terminated": "1 where step t ended the episode, [T, N]", "params": "the tree before the update"}
            raise UserValueError(f"compare_update: the record lacks {name!r}: add {what.get(name, 'it, [T, N, ...]')}")
    for name in (*PER_STEP, "advantage", "target", "last_done", "last_value"):
        shape = found["reward"].shape[name.startswith("last_") :]
        if name in found and found[name].shape != shape:
            got = found[name].shape
            remedy = ": transpose one of them" if got == shape[::-1] else ""
            raise ShapeError(f"compare_update: {name!r} has shape {got}, expected {shape} beside this 'reward'{remedy}")
    if not {"next_value", "next_obs", "last_value"} & found.keys():
        raise UserValueError(
            "compare_update: the record lacks the values after the steps: add 'last_value' [N], V of the observation "
            "after the last step, or, if time limits cut episodes, 'next_obs' or 'next_value' [T, N, ...]"
        )
    structure: Any = jax.tree.structure(found["params"])
    for name in ("behavior", "gradient", "params_after"):
        if name in found and structure != jax.tree.structure(found[name]):
            remedy = "add zeros for gradients that do not exist, and parameters that did not change"
            raise UserValueError(f"compare_update: {name!r} must have the entries of 'params': {remedy}")
    _check_steps(found)
    return found


def _check_steps(record: dict[str, Any]) -> None:
    """Raise unless all minibatch quantities are recorded for the same number of gradient steps."""
    name = "segments" if "segments" in record else "indices"
    indices: Any = record.get(name)
    of_minibatches = [x for x in OF_MINIBATCH if x in record]
    if of_minibatches and indices is None:
        raise UserValueError(
            f"compare_update: the record has {of_minibatches[0]!r}, recorded per minibatch, but lacks "
            "their rows: add 'indices' [E, K, M], t * N + n of each element"
        )
    num_steps, num_envs = record["reward"].shape[:2]
    size = num_envs if name == "segments" else num_steps * num_envs
    if indices is not None and not np.all(exists := (indices >= 0) & (indices < size)):
        raise UserValueError(f"compare_update: {name!r} must lie in [0, {size - 1}], got {indices[~exists][0]}")
    if has_no_steps(record, "gradient"):
        raise ShapeError("compare_update: 'gradient' needs a leading axis: record it in each gradient step")
    without_steps = ("weight", "params_after") if has_no_steps(record, "params_after") else ("weight",)
    lengths = {x: len(jax.tree.leaves(record[x])[0]) for x in of_minibatches if x not in without_steps}
    given = int(np.prod(np.shape(indices)[:-1]))
    if len(set(lengths.values())) > 1 or max(lengths.values(), default=0) > given:
        raise UserValueError(
            f"compare_update: the record has the rows of {given} minibatches, and {lengths} gradient steps: "
            "record each quantity once in each step"
        )


def has_no_steps(record: dict[str, Any], name: str) -> bool:
    """Return whether a tree's leaves have the parameters' shapes, without an axis of gradient steps."""
    return name in record and np.ndim(jax.tree.leaves(record[name])[0]) == np.ndim(jax.tree.leaves(record["params"])[0])
