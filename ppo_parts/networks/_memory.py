"""Recurrent cells for your own flax modules."""

from __future__ import annotations

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from .._base.checked import checked
from ..errors import ShapeError, UserTypeError
from ..functional._recurrence import choose_solver
from ._heads import Array
from ._layers import dense
from ._orthogonal import orthogonal

Cell = Literal["lstm", "gru", "mingru", "lru"]
CELLS: dict[str, Any] = {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}
MAX_MEMORY_STEPS = 1000  # number of steps that a cell in `PARALLEL` remembers at first


@checked
def recurrent(x: Array, carry: Any, reset: Array, cell: Cell = "lstm") -> tuple[Array, Any]:
    r"""Apply a recurrent cell with H units over time; call this inside the compact method of a flax module.

    Args:
        x: `[T, N, ..., H]`, the input.
        carry: the state before the first step, `[N, ..., H]`, or two such arrays for "lstm" and "lru".
        reset: `[T, N, ...]`, True where the state is zeroed before a step.
        cell: "lstm", "gru", or a cell that is linear in its state, so that a GPU can compute all steps with a parallel
            scan. "mingru", :math:`h_t = (1 - z_t) h_{t-1} + z_t \tilde h_t`, can remember for many steps; only the
            input determines :math:`z_t`, and the memory spans of untrained units are uniform between 1 and 1000 steps.
            "lru", :math:`h_t = \lambda h_{t-1} + \sqrt{1 - |\lambda|^2} B x_t` with complex :math:`\lambda`, can recall
            whole sequences; a gated layer with a residual connection follows it.

    Returns:
        The outputs, `[T, N, ..., H]`, and the state after the last step.

    References: "mingru", Feng et al. 2024, Were RNNs All We Needed?, arXiv:2410.01201, section 3.1 and appendix B, with
    the biases of Tallec and Ollivier 2018, arXiv:1804.11188; "lru", Orvieto et al. 2023, arXiv:2303.06349,
    section 3 and appendix A.
    """
    needed, given = (jax.tree.map(jnp.shape, tree) for tree in (initial_carry(cell, x.shape[1:]), carry))
    if (needed, x.shape[:-1]) != (given, jnp.shape(reset)):
        remedy = ": pass the whole policy, whose initial_carry makes the first one" if carry is None else ""
        needs = f"the cell {cell!r} needs a carry of shape {needed} and a reset of shape {x.shape[:-1]}"
        got = f"got {given} and {jnp.shape(reset)}{remedy}"
        raise ShapeError(f"recurrent: for an input of shape {x.shape}, {needs}, {got}")
    if cell in PARALLEL:
        x, states = PARALLEL[cell]()(x, carry, reset)
        return x, jax.tree.map(lambda each, first: each[-1] if len(each) else first, states, carry)
    module = CELLS[cell](x.shape[-1], recurrent_kernel_init=orthogonal())

    def step(module: nn.Module, carry: Any, inputs: tuple[Array, Array]) -> tuple[Any, Array]:
        x, reset = inputs
        return module(jax.tree.map(lambda c: jnp.where(reset[..., None], 0, c), carry), x)

    scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
    carry, x = scan(module, carry, (x, reset))
    return x, carry


class MinGRU(nn.Module):
    """The cell "mingru" of `recurrent`."""

    @nn.compact
    def __call__(self, x: Array, carry: Array, reset: Array) -> tuple[Array, Array]:
        """Return the outputs `[T, N, ..., H]` and the states, which are equal."""
        units = x.shape[-1]

        def biases(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            steps = jax.random.uniform(key, (units,), dtype, 1, MAX_MEMORY_STEPS)  # memory spans at first
            return jnp.append(-jnp.log(steps), jnp.zeros(units, dtype))

        gates = nn.Dense(2 * units, kernel_init=orthogonal(), bias_init=biases)(x)
        update, candidate = jnp.split(gates, 2, axis=-1)
        update = nn.sigmoid(update)
        candidate = jnp.where(candidate >= 0, candidate + 0.5, nn.sigmoid(candidate))  # positive, as in the paper
        states = linear_recurrence(1 - update, update * candidate, carry, reset)
        return states, states


class LRU(nn.Module):
    """The cell "lru" of `recurrent`; a complex state is a pair of real arrays."""

    @nn.compact
    def __call__(self, x: Array, carry: tuple[Array, Array], reset: Array) -> tuple[Array, tuple[Array, Array]]:
        """Return the outputs and the states, `[T, N, ..., H]`."""
        units = x.shape[-1]

        def decays(key: Array) -> Array:  # moduli of points drawn uniformly from a ring
            square = jax.random.uniform(key, (units,), minval=0.9**2, maxval=(1 - 1 / MAX_MEMORY_STEPS) ** 2)
            return jnp.log(-0.5 * jnp.log(square))

        rate = jnp.exp(self.param("decay", decays))
        modulus = jnp.exp(-rate)
        angle = self.param("angle", lambda key: jax.random.uniform(key, (units,), maxval=2 * jnp.pi))
        real, imag = modulus * jnp.cos(angle), modulus * jnp.sin(angle)
        inputs = nn.Dense(2 * units, kernel_init=orthogonal())(x)
        added = [jnp.sqrt(-jnp.expm1(-2 * rate)) * each for each in jnp.split(inputs, 2, axis=-1)]
        if len(x) > 1:
            kept = [each.astype(real.dtype) for each in carry]
            keep, inputs, before = (jax.lax.complex(*pair) for pair in ((real, imag), added, kept))
            together = linear_recurrence(keep, inputs, before, reset)
            states = [together.real, together.imag]
        else:  # avoid complex numbers, which ONNX lacks
            re, im = (jnp.where(reset[..., None], 0, c[None]) for c in carry)
            states = [added[0] + real * re - imag * im, added[1] + real * im + imag * re]
        skip = self.param("skip", nn.initializers.normal(1.0), (units,))
        y = nn.gelu(dense(units, gain=1.0)(jnp.concatenate(states, axis=-1)) + skip * x)
        return x + y * nn.sigmoid(dense(units, gain=1.0)(y)), (states[0], states[1])


PARALLEL: dict[str, Any] = {"mingru": MinGRU, "lru": LRU}


def linear_recurrence(keep: Array, added: Array, before: Array, reset: Array) -> Array:
    """Compute every h_t = keep_t h_{t-1} + added_t, from the state `before`; `reset` zeroes h_{t-1}, even NaN."""
    keep = jnp.where(reset[..., None], 0, keep)
    first = added[:1] + keep[:1] * jnp.where(reset[:1, ..., None], 0, before[None])
    if len(added) <= 1:
        return first
    solve = choose_solver(times=lambda keep, h: keep * jnp.where(keep == 0, 0, h))
    return solve((jnp.concatenate([first, added[1:]])[::-1], keep[::-1]))[::-1]


@checked
def initial_carry(cell: Cell | None, shape: tuple[int, ...]) -> Any:
    """Return the zero state of a `recurrent` cell before the first step, for inputs of `shape` `[N, ..., H]`.

    Example:
        >>> policy = pp.Policy(init, evaluate, lambda num_envs: initial_carry("gru", (num_envs, 64)))  # doctest: +SKIP
    """
    if not isinstance(shape, tuple | list):
        raise UserTypeError(f"must be a tuple, got {shape!r}", where="initial_carry", argument="shape")
    if cell is None:
        return None
    return (jnp.zeros(shape), jnp.zeros(shape)) if cell in ("lstm", "lru") else jnp.zeros(shape)
