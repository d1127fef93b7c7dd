"""What the parity tests share: tapes that write down what happens inside an update, and a comparison.

The environment variable `PPO_PARTS_GOLDEN` names a folder that takes the place of `golden/`, for recordings made anew.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ppo_parts as pp

GOLDEN = Path(os.environ.get("PPO_PARTS_GOLDEN", Path(__file__).parent / "golden"))
FOLDER = GOLDEN / "cleanrl_pufferlib"
RTOL = 1e-4
EPS = float(np.finfo(np.float32).eps)
METRICS = {  # the peers' name: the learner's
    "pg_loss": "policy_loss",
    "v_loss": "value_loss",
    "entropy_loss": "entropy",
    "approx_kl": "approx_kl",
    "old_approx_kl": "approx_kl_k1",
    "clipfrac": "clip_fraction",
}
# Means over a minibatch of terms of size 1 that cancel (at ratio 1 all three are 0): float32 leaves this much.
ROUNDING = {"pg_loss": 1e-6, "old_approx_kl": 5e-7, "approx_kl": 1e-7}
Arrays = dict[str, np.ndarray]


class Tape(NamedTuple):
    """A growing record as a state, which keeps its shape: `count` rows are written."""

    count: jax.Array
    rows: Any

    def write(self, row: Any) -> "Tape":
        return Tape(self.count + 1, jax.tree.map(lambda rows, x: rows.at[self.count].set(x), self.rows, row))

    def read(self) -> Any:
        return jax.tree.map(lambda rows: np.asarray(rows[: int(self.count)]), self.rows)


def blank(length: int, row: Any) -> Tape:
    """An empty tape for rows like `row`."""
    return Tape(jnp.zeros((), jnp.int32), jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), row))


def record(length: int, read: Callable[[pp.Batch], Any], **shapes: tuple[int, ...]) -> pp.Part:
    """A part that changes nothing and writes down what `read` sees: arrays of these names and shapes, float32."""
    row = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return pp.Part(
        init=lambda params, key: blank(length, row),
        update=lambda batch, tape, context: (batch, tape.write(read(batch))),
        name="record",
    )


def record_gradients(length: int) -> optax.GradientTransformation:
    """An optimizer that changes nothing and writes down gradients, and the parameters they were taken at."""
    return optax.GradientTransformation(
        init=lambda params: blank(length, {"grad": params, "params": params}),
        update=lambda grads, tape, params: (grads, tape.write({"grad": grads, "params": params})),
    )


def read_minibatch(batch: pp.Batch) -> dict[str, jax.Array]:
    """What the learner computed on a minibatch, by the peers' names."""
    return {theirs: batch.metrics[ours] for theirs, ours in METRICS.items()} | {
        "loss": sum(jnp.mean(loss) for loss in batch.losses.values()),
        "newlogprob": batch.current.log_prob,
        "ratio": jnp.exp(batch.current_log_ratio()),
        "newvalue": batch.current.value,
        "entropy": batch.current.distribution.entropy(),
        "adv": batch.advantage,
    }


def record_minibatches(length: int, shape: tuple[int, ...]) -> pp.Part:
    """A tape of `read_minibatch` for minibatches of this shape."""
    elements = dict.fromkeys(("newlogprob", "ratio", "newvalue", "entropy", "adv"), shape)
    return record(length, read_minibatch, loss=(), **dict.fromkeys(METRICS, ()), **elements)


class Comparison:
    """Compares everything, and fails once at the end with the list of what is off.

    Attributes:
        worst: largest relative error seen, by name (with `atol` or rounding counted to the size of what is compared).
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.worst: dict[str, float] = {}

    def close(self, name: str, ours: Any, recorded: Any, atol: float = 0.0) -> None:
        """|ours - recorded| <= RTOL |recorded| + atol, entry by entry."""
        self._within(name, ours, recorded, RTOL * np.abs(recorded) + atol)

    def close_tensor(self, name: str, ours: Any, recorded: Any, start: Any = 0.0) -> None:
        """|ours - recorded| <= RTOL max |recorded - start| + 2 float32 roundings of the largest |start|.

        For sums that cancel, whose small entries have the rounding errors of the large ones. With `start` it is the
        distance travelled that has to be right, however small next to the number itself.
        """
        travelled = np.max(np.abs(np.asarray(recorded) - start))
        self._within(name, ours, recorded, RTOL * travelled + 2 * EPS * np.max(np.abs(start)))

    def equal(self, name: str, ours: Any, recorded: Any) -> None:
        """Exactly the same."""
        if not np.array_equal(ours, recorded):
            self.failures.append(f"{name}: {ours}, recorded {recorded}")

    def finish(self) -> None:
        assert not self.failures, "\n".join(self.failures)

    def _within(self, name: str, ours: Any, recorded: Any, allowed: Any) -> None:
        assert np.shape(ours) == np.shape(recorded), f"{name}: shape {np.shape(ours)}, recorded {np.shape(recorded)}"
        difference = np.abs(np.asarray(ours, np.float64) - np.asarray(recorded, np.float64))
        size = np.maximum(np.asarray(allowed, np.float64) / RTOL, np.finfo(np.float64).tiny)
        relative = float(np.max(difference / size))
        self.worst[name] = max(self.worst.get(name, 0.0), relative)
        if not np.all(difference <= allowed):
            self.failures.append(f"{name}: relative error {relative:.1e}, off by up to {np.max(difference):.1e}")
