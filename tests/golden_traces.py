"""Helpers of the parity tests: a replay of recorded rollouts, tapes of what happens inside an update, and bounds.

The parity tests compare estimates, the numbers of each minibatch and the parameters after each step. Learners get only
recorded rollouts, first parameters, and what was drawn. All else comes out of `learner.update`, in one free run per
case. `ppo_parts.testing.compare_update` tells which quantity of an update is the first to differ.

The environment variable `PPO_PARTS_GOLDEN` names a folder that replaces `golden/`, for new recordings.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax

import ppo_parts as pp

GOLDEN = Path(os.environ.get("PPO_PARTS_GOLDEN", Path(__file__).parent / "golden"))
RTOL, PRIORITY_EPS = 1e-4, 1e-6
EPS = float(np.finfo(np.float32).eps)
METRICS = {  # the peers' names: the learner's
    "pg_loss": "policy_loss", "v_loss": "value_loss", "entropy_loss": "entropy", "approx_kl": "approx_kl",
    "old_approx_kl": "approx_kl_k1", "clipfrac": "clip_fraction", "loss": "loss",
}  # fmt: skip
# These are means of terms of size 1 that cancel (at ratio 1, all three are 0); float32 leaves errors of this size.
ROUNDING = {"pg_loss": 1e-6, "old_approx_kl": 5e-7, "approx_kl": 1e-7}
Arrays = dict[str, np.ndarray]
Params = dict[str, jax.Array]


def load(name: str) -> Arrays:
    return dict(np.load(GOLDEN / f"{name}.npz"))


def sub(z: Arrays, prefix: str) -> Arrays:
    """Return the arrays whose names begin with `prefix`, without the prefix."""
    return {name.removeprefix(prefix): x for name, x in z.items() if name.startswith(prefix)}


class Tape:
    """Rows that compiled programs record while they run."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def write(self, row: Any) -> None:
        jax.experimental.io_callback(self.rows.append, None, row, ordered=True)

    def read(self) -> Any:
        """Return the rows since the last call, stacked."""
        jax.effects_barrier()
        rows = [*self.rows]
        self.rows.clear()
        return jax.tree.map(lambda *x: np.stack(x), *rows)


def record_estimates(tape: Tape, names: Mapping[str, str]) -> pp.Part:
    """Make a part that changes nothing and records estimates by the peer's names of value, ratio, advantage, target."""

    def update(batch: pp.Batch) -> pp.Batch:
        ratio = jnp.ones_like(batch.value) if batch.log_ratio is None else jnp.exp(batch.log_ratio)
        tape.write({theirs: ratio if ours == "ratio" else getattr(batch, ours) for theirs, ours in names.items()})
        return batch

    return pp.stateless(update, name="record")


def record_steps(tape: Tape, names: Mapping[str, str]) -> Any:
    """Make an optimizer that changes nothing, and records numbers and the parameters before each step.

    Args:
        names: for each of the peer's names of these numbers, the learner's: `loss` or one of its metrics.
    """

    def update(grads: Any, state: Any, params: Any, *, value: jax.Array, metrics: Any, **_: Any) -> Any:
        found = {**metrics, "loss": value}
        tape.write((params, {theirs: found[ours] for theirs, ours in names.items()}))
        return grads, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def read_steps(tape: Tape, last: Any) -> tuple[Any, Arrays]:
    """Return the parameters after each step, where `last` are those after the last one, and the numbers."""
    params, numbers = tape.read()
    return jax.tree.map(lambda x, y: np.concatenate([x[1:], y[None]]), params, last), numbers


def replay(
    make_learner: Callable[..., pp.Learner], params: Any, updates: Iterable[tuple[tuple[Any, ...], pp.Batch]],
    amend: Callable[[pp.LearnerState], pp.LearnerState] = lambda state: state,
) -> Iterator[tuple[pp.LearnerState, Any]]:  # fmt: skip
    """Yield the state and the metrics after each update, in a free run from the recorded parameters.

    Parameters, optimizer and step continue from one update to the next, and are never reset to the recording.

    Args:
        updates: for each update, the recorded arrays that the learner is made of (such as indices), and the rollout.
        amend: changes the first state.
    """
    init = jax.jit(lambda given, params: make_learner(*given).init(params))
    update = jax.jit(lambda given, state, batch: make_learner(*given).update(jax.random.key(0), state, batch))
    state = None
    for given, batch in updates:
        with jax.default_matmul_precision("float32"):
            state = amend(init(given, params)) if state is None else state
            state, metrics = jax.tree.map(np.asarray, update(given, state, batch))
        yield state, metrics


def dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    """Evaluate a linear layer with flax's kernel `[in, out]` or torch's weight `[out, in]`."""
    torch = f"{name}.weight" in params
    kernel, bias = (params[f"{name}.weight"].T, f"{name}.bias") if torch else (params[f"{name}/kernel"], f"{name}/bias")
    return x @ kernel + params[bias].reshape((1,) * (x.ndim - 1) + (-1,))


def close(name: str, ours: Any, recorded: Any, atol: float = 0.0) -> None:
    """Check that |ours - recorded| <= RTOL |recorded| + atol, entry by entry."""
    assert np.shape(ours) == np.shape(recorded), name
    np.testing.assert_allclose(ours, recorded, RTOL, atol, err_msg=name)


def close_tensors(kind: str, ours: Arrays, recorded: Arrays, start: Arrays | None = None) -> None:
    """Check |ours - recorded| <= RTOL max |recorded - start| + 2 float32 roundings of max |start| for each tensor.

    This is for sums that cancel: their small entries have the rounding errors of the large ones. With `start`, the
    distance travelled has to be right, however small it is compared with the number itself.
    """
    assert recorded, f"{kind}: nothing is recorded"
    for name, x in recorded.items():
        begun = start[name] if start else 0.0
        allowed = RTOL * np.max(np.abs(x - begun)) + 2 * EPS * np.max(np.abs(begun))
        assert np.shape(ours[name]) == np.shape(x), f"{kind} {name}"
        np.testing.assert_allclose(ours[name], x, 0, allowed, err_msg=f"{kind} {name}")


def close_priorities(advantage: Any, drawn: Any, alpha: Any, beta: Any, recorded: Any, weights: Any) -> None:
    """Check the probabilities of segments, and the weights of drawn ones, computed from advantages `[T, N]`.

    There is one deviation of the peers, `mass`: their priorities do not sum to 1, because they divide by sum(w) + eps
    instead of sum(w + eps). This changes their importance weights by mass^-beta.
    """
    p = pp.functional.segment_priorities(advantage, alpha=alpha, eps=PRIORITY_EPS)
    w = pp.functional.importance_weights(p, drawn, beta=beta)
    total = np.sum(np.abs(advantage).sum(0, dtype=np.float64) ** alpha)
    mass = (total + len(p) * PRIORITY_EPS) / (total + PRIORITY_EPS)
    close("mass", mass, recorded.sum())
    close("priorities", p * mass, recorded)
    close("importance weights", w * mass**-beta, weights)


def close_steps(
    tape: Tape, last: Params, recorded: Arrays, after: Arrays, start: Arrays, rounding: Mapping[str, float]
) -> None:
    """Check the parameters after each step (`last` after the last), and minibatches' numbers, some with an `atol`."""
    params, numbers = read_steps(tape, last)
    for name, x in numbers.items():
        close(name, x, recorded[name], rounding.get(name, 0.0))
    close_tensors("parameters", params, after, start)
