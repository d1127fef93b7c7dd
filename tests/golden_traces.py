"""What the parity tests share: a replay of recorded rollouts, tapes of what happens inside an update, the bounds.

The parity tests compare estimates, the numbers of each minibatch and the parameters after each step. Which quantity of
an update differs first is what `ppo_parts.testing.compare_update` tells.

The environment variable `PPO_PARTS_GOLDEN` names a folder that takes the place of `golden/`, for recordings made anew.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ppo_parts as pp

GOLDEN = Path(os.environ.get("PPO_PARTS_GOLDEN", Path(__file__).parent / "golden"))
RTOL, PRIORITY_EPS = 1e-4, 1e-6
EPS = float(np.finfo(np.float32).eps)
METRICS = {  # the peers' name: the learner's
    "pg_loss": "policy_loss", "v_loss": "value_loss", "entropy_loss": "entropy", "approx_kl": "approx_kl",
    "old_approx_kl": "approx_kl_k1", "clipfrac": "clip_fraction", "loss": "loss",
}  # fmt: skip
# Means over a minibatch of terms of size 1 that cancel (at ratio 1 all three are 0): float32 leaves this much.
ROUNDING = {"pg_loss": 1e-6, "old_approx_kl": 5e-7, "approx_kl": 1e-7}
ESTIMATES = ("value", "ratio", "advantage", "target")
Arrays = dict[str, np.ndarray]
Params = dict[str, jax.Array]


def load(name: str) -> Arrays:
    """A recording."""
    return dict(np.load(GOLDEN / f"{name}.npz"))


def sub(z: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): x for name, x in z.items() if name.startswith(prefix)}


class Tape(NamedTuple):
    """A growing record as a state, which keeps its shape: `count` rows are written."""

    count: jax.Array
    rows: Any

    def write(self, row: Any) -> "Tape":
        return Tape(self.count + 1, jax.tree.map(lambda rows, x: rows.at[self.count].set(x), self.rows, row))

    def read(self) -> Any:
        return jax.tree.map(lambda rows: np.asarray(rows[: int(self.count)]), self.rows)


class Steps(NamedTuple):
    """What happened in the steps of an optimizer; leading axis: minibatches."""

    params: Arrays  # before each step
    numbers: Arrays


def blank(length: int, row: Any) -> Tape:
    """An empty tape for rows like `row`."""
    return Tape(jnp.zeros((), jnp.int32), jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), row))


def record_estimates(length: int, shape: tuple[int, ...]) -> pp.Part:
    """A part that changes nothing and writes down values, ratios, advantages and targets of this shape."""

    def update(batch: pp.Batch, tape: Tape, context: pp.Context) -> tuple[pp.Batch, Tape]:
        ratio = jnp.ones(shape) if batch.log_ratio is None else jnp.exp(batch.log_ratio)
        return batch, tape.write(dict(zip(ESTIMATES, (batch.value, ratio, batch.advantage, batch.target), strict=True)))

    blank_tape = blank(length, dict.fromkeys(ESTIMATES, jnp.zeros(shape)))
    return pp.Part(lambda params, key: blank_tape, update, "record")


def record_steps(length: int, names: Mapping[str, str] = MappingProxyType({})) -> Any:
    """An optimizer that changes nothing and writes down parameters and numbers.

    Args:
        names: the peer's names of these numbers: the learner's, `loss` or one of its metrics.
    """

    def init(params: Any) -> Tape:
        return blank(length, Steps(params, dict.fromkeys(names, jnp.zeros(()))))

    def update(grads: Any, tape: Tape, params: Any, *, value: jax.Array, metrics: Any, **_: Any) -> Any:
        found = {**metrics, "loss": value}
        return grads, tape.write(Steps(params, {theirs: found[ours] for theirs, ours in names.items()}))

    return optax.GradientTransformationExtraArgs(init, update)


def is_tape(x: Any) -> bool:
    return isinstance(x, Tape)


def tapes(tree: Any) -> list[Any]:
    """What is written on the tapes among states, in their order."""
    return [x.read() for x in jax.tree.leaves(tree, is_leaf=is_tape) if is_tape(x)]


def steps(tape: Tape, last: Any) -> Steps:
    """What `record_steps` wrote, with the parameters after the last step as one more row of `params`."""
    rows = tape.read()
    return rows._replace(params=jax.tree.map(lambda x, y: np.concatenate([x, y[None]]), rows.params, last))


def replay(
    make_learner: Callable[..., pp.Learner], params: Any, updates: Iterable[tuple[tuple[Any, ...], pp.Batch]],
    amend: Callable[[pp.LearnerState], pp.LearnerState] | None = None,
) -> list[Any]:  # fmt: skip
    """The state and the metrics after each update, in a free run from the recorded parameters.

    Parameters, optimizer and step go on from one update to the next and are never put back on the recorded track.

    Args:
        updates: for each one, the recorded arrays that the learner is made of (such as indices), and the rollout.
        amend: changes the first state.
    """

    @jax.jit
    def init(given: Any, params: Any) -> pp.LearnerState:
        return make_learner(*given).init(params)

    @jax.jit
    def update(given: Any, state: pp.LearnerState, batch: pp.Batch) -> Any:
        rewound = jax.tree.map(lambda x: x._replace(count=0 * x.count) if is_tape(x) else x, state, is_leaf=is_tape)
        return make_learner(*given).update(jax.random.key(0), rewound, batch)

    state, played = None, []
    with jax.default_matmul_precision("float32"):
        for given, batch in updates:
            if state is None:
                state = init(given, params) if amend is None else amend(init(given, params))
            state, metrics = update(given, state, batch)
            played.append(jax.tree.map(np.asarray, (state, metrics)))
    return played


def estimates(part: pp.Part, batch: pp.Batch) -> pp.Batch:
    """The rollout with the advantages and targets of an estimator."""
    return jax.jit(lambda batch: part.update(batch, (), pp.Context(key=jax.random.key(0)))[0])(batch)


def close(name: str, ours: Any, recorded: Any, atol: float = 0.0) -> None:
    """|ours - recorded| <= RTOL |recorded| + atol, entry by entry."""
    assert np.shape(ours) == np.shape(recorded), name
    np.testing.assert_allclose(ours, recorded, RTOL, atol, err_msg=name)


def close_tensors(kind: str, ours: Arrays, recorded: Arrays, start: Arrays | None = None) -> None:
    """|ours - recorded| <= RTOL max |recorded - start| + 2 float32 roundings of the largest |start|, for each tensor.

    For sums that cancel, whose small entries have the rounding errors of the large ones. With `start` it is the
    distance travelled that has to be right, however small next to the number itself.
    """
    assert recorded, f"{kind}: nothing is recorded"
    for name, x in recorded.items():
        begun = start[name] if start else 0.0
        allowed = RTOL * np.max(np.abs(x - begun)) + 2 * EPS * np.max(np.abs(begun))
        assert np.shape(ours[name]) == np.shape(x), f"{kind} {name}"
        np.testing.assert_allclose(ours[name], x, 0, allowed, err_msg=f"{kind} {name}")


def close_priorities(advantage: Any, drawn: Any, alpha: Any, beta: Any, recorded: Any, weights: Any) -> None:
    """Probabilities of segments, and importance weights of those that are drawn, from the advantages `[T, N]`.

    One deviation of the peers, `mass`: their priorities do not sum to 1, as they divide by sum(w) + eps, and not by
    sum(w + eps). This changes their importance weights by mass^-beta.
    """
    p = pp.functional.segment_priorities(advantage, alpha=alpha, eps=PRIORITY_EPS)
    w = pp.functional.importance_weights(p, drawn, beta=beta)
    total = np.sum(np.abs(advantage).sum(0, dtype=np.float64) ** alpha)
    mass = (total + len(p) * PRIORITY_EPS) / (total + PRIORITY_EPS)
    close("mass", mass, recorded.sum())
    close("priorities", p * mass, recorded)
    close("importance weights", w * mass**-beta, weights)


def close_steps(rows: Steps, recorded: Arrays, after: Arrays, start: Arrays, rounding: Mapping[str, float]) -> None:
    """Numbers of each minibatch, with an `atol` for some, and the parameters after each step."""
    for name, x in rows.numbers.items():
        close(name, x, recorded[name], rounding.get(name, 0.0))
    close_tensors("parameters", {name: x[1:] for name, x in rows.params.items()}, after, start)
