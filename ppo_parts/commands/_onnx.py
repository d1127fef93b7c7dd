"""Translate a JAX function to an ONNX model: one rule for each primitive that the networks of policies use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._base.errors import UserValueError
from .._base.extras import require_package

OPSET = 18
BATCH = "N"
"""Name of the first axis of inputs and outputs, whose size is known only when the model runs."""


def to_model(function: Callable[..., Mapping[str, Any]], inputs: Mapping[str, Any], about: Mapping[str, str]) -> Any:
    """Translate a function to an ONNX model for any number N of rows.

    Args:
        function: function of the inputs, in order; returns outputs by name, `[N, ...]`. The model stores the values
            that it closes over.
        inputs: the shapes and dtypes of one row of each input, by name.
        about: metadata to store in the model.

    Returns:
        `onnx.ModelProto`.

    Raises:
        UserValueError: the function uses a primitive for which there is no rule, or depends on N other than through
            its rows. MissingPackage: onnx is not installed.
    """
    onnx = require_package("onnx", "export")
    (batch,) = export.symbolic_shape(BATCH)
    specs = {name: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype) for name, x in inputs.items()}
    shapes: dict[str, Any] = {}

    def flat(*arguments: Any) -> list[Any]:
        outputs = function(*arguments)
        shapes.update(outputs)
        return list(outputs.values())

    closed = jax.make_jaxpr(flat)(*specs.values())
    graph = Graph(onnx, batch, next(iter(inputs)))
    results = graph.translate(closed.jaxpr, closed.consts, list(inputs))
    for name, result in zip(shapes, results, strict=True):
        graph.nodes.append(onnx.helper.make_node("Identity", [graph.name(result)], [name]))

    def describe(name: str, x: Any) -> Any:
        shape = [BATCH if d == batch else int(d) for d in x.shape]
        return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(x.dtype)), shape)

    made = onnx.helper.make_graph(
        graph.nodes,
        "policy",
        [describe(name, x) for name, x in specs.items()],
        [describe(name, x) for name, x in zip(shapes, closed.out_avals, strict=True)],
        graph.initializers,
    )
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    model = onnx.helper.make_model(made, opset_imports=opsets, ir_version=8, producer_name="ppo_parts")
    onnx.helper.set_model_props(model, dict(about))
    onnx.checker.check_model(model, full_check=True)
    return model


class Graph:
    """The nodes of an ONNX graph under construction. A value is the name of a tensor, or a constant array.

    Args:
        onnx: the module.
        batch: the symbolic size N.
        first: name of an input `[N, ...]`, from whose shape the model reads N when it runs.
    """

    def __init__(self, onnx: Any, batch: Any, first: str) -> None:
        self.onnx, self.batch, self.first = onnx, batch, first
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._size: str | None = None
        self._stored: dict[int, tuple[Any, str]] = {}

    def translate(self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """Add the operators of a jaxpr applied to values; return its results as values."""
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

        def value(x: Any) -> Any:
            if not isinstance(x, Literal):
                return values[x]
            aval: Any = x.aval
            return np.asarray(x.val, aval.dtype)

        for eqn in needed(jaxpr):
            results = self.apply(eqn, [value(x) for x in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
        return [value(x) for x in jaxpr.outvars]

    def apply(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        """Add one primitive; return its results."""
        primitive = eqn.primitive.name
        if primitive in RULES:
            result = RULES[primitive](self, eqn, *inputs)
            return result if isinstance(result, list) else [result]
        for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
            inner = eqn.params.get(name)
            if isinstance(inner, ClosedJaxpr):
                return self.translate(inner.jaxpr, inner.consts, inputs)
            if isinstance(inner, Jaxpr):
                return self.translate(inner, [], inputs)
        raise UserValueError(
            f"the policy cannot be exported: JAX's {primitive!r} has no translation to ONNX here; only these have one: "
            f"{', '.join(sorted(RULES))}"
        )

    def op(self, kind: str, *inputs: Any, **attributes: Any) -> str:
        """Add an operator with one output."""
        (output,) = self.ops(kind, 1, *inputs, **attributes)
        return output

    def ops(self, kind: str, number: int, *inputs: Any, **attributes: Any) -> list[str]:
        """Add an operator with several outputs."""
        outputs = [f"{kind}_{len(self.nodes)}_{i}" for i in range(number)]
        names = [self.name(x) for x in inputs]
        self.nodes.append(self.onnx.helper.make_node(kind, names, outputs, **attributes))
        return outputs

    def name(self, value: Any) -> str:
        """Return the name of a value; a constant is stored when it is first used."""
        if isinstance(value, str):
            return value
        if id(value) not in self._stored:
            name = f"constant_{len(self._stored)}"
            self.initializers.append(self.onnx.numpy_helper.from_array(np.asarray(value), name))
            self._stored[id(value)] = value, name  # keeps the value alive, so that its id stays unique
        return self._stored[id(value)][1]

    def shape(self, sizes: Sequence[Any]) -> Any:
        """Return a shape as a tensor; a size is a number, or N."""
        if all(isinstance(size, (int, np.integer)) for size in sizes):
            return np.asarray(sizes, np.int64)
        return self.op("Concat", *(self._dimension(size) for size in sizes), axis=0)

    def cast(self, x: Any, dtype: Any) -> str:
        """Convert to another dtype."""
        return self.op("Cast", x, to=self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def reshape(self, x: Any, sizes: Sequence[Any]) -> str:
        """Give a tensor another shape."""
        return self.op("Reshape", x, self.shape(sizes), allowzero=1)

    def _dimension(self, size: Any) -> Any:
        if isinstance(size, (int, np.integer)):
            return np.asarray([size], np.int64)
        if size != self.batch:
            raise UserValueError(
                f"the policy cannot be exported: it makes an axis of size {size} from its {BATCH} observations"
            )
        if self._size is None:
            self._size = self.op("Slice", self.op("Shape", self.first), *(np.asarray([i]) for i in (0, 1)))
        return self._size


def needed(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations that the results of a jaxpr depend on, in order."""
    wanted = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if wanted.intersection(eqn.outvars):
            wanted.update(x for x in eqn.invars if not isinstance(x, Literal))
            kept.append(eqn)
    return reversed(kept)


def _same(kind: str) -> Callable[..., str]:
    """Make the rule for a primitive that is also an operation of ONNX."""
    return lambda graph, eqn, *inputs: graph.op(kind, *inputs)


def _reduce(kind: str) -> Callable[..., str]:
    return lambda graph, eqn, x: graph.op(kind, x, np.asarray(eqn.params["axes"], np.int64), keepdims=0)


def _select(graph: Graph, eqn: Any, which: Any, *cases: Any) -> str:
    if len(cases) != 2:
        raise UserValueError(f"the policy cannot be exported: it selects from {len(cases)} cases instead of 2")
    off, on = cases
    if eqn.outvars[0].aval.dtype == bool:  # many runtimes have no Where for booleans
        return graph.op("Or", graph.op("And", which, on), graph.op("And", graph.op("Not", which), off))
    return graph.op("Where", which, on, off)


def _is_finite(graph: Graph, eqn: Any, x: Any) -> str:
    return graph.op("Not", graph.op("Or", graph.op("IsInf", x), graph.op("IsNaN", x)))


def _integer_pow(graph: Graph, eqn: Any, x: Any) -> str:
    power = x
    for _ in range(abs(eqn.params["y"]) - 1):
        power = graph.op("Mul", power, x)
    return power if eqn.params["y"] > 0 else graph.op("Reciprocal", power)


def _broadcast(graph: Graph, eqn: Any, x: Any, *_: Any) -> str:
    sizes, kept = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    before = eqn.invars[0].aval.shape
    if len(before) not in (0, len(sizes)):
        own = dict(zip(kept, before, strict=True))
        x = graph.reshape(x, [own.get(axis, 1) for axis in range(len(sizes))])
    return graph.op("Expand", x, graph.shape(sizes))


def _slice(graph: Graph, eqn: Any, x: Any) -> str:
    own, starts, ends = eqn.invars[0].aval.shape, eqn.params["start_indices"], eqn.params["limit_indices"]
    steps = eqn.params["strides"] or (1,) * len(own)
    cut = [i for i, size in enumerate(own) if (starts[i], ends[i], steps[i]) != (0, size, 1)]
    return graph.op("Slice", x, *(np.asarray(x, np.int64) for x in (
        [starts[i] for i in cut], [ends[i] for i in cut], cut, [steps[i] for i in cut]
    )))  # fmt: skip


def _stack(graph: Graph, eqn: Any, *xs: Any) -> str:
    axis = eqn.params["axis"]
    return graph.op("Concat", *(graph.op("Unsqueeze", x, np.asarray([axis])) for x in xs), axis=axis)


def _split(graph: Graph, eqn: Any, x: Any) -> list[str]:
    sizes = np.asarray(eqn.params["sizes"], np.int64)
    return graph.ops("Split", len(sizes), x, sizes, axis=eqn.params["axis"])


def _gather(graph: Graph, eqn: Any, x: Any, index: Any) -> str:
    """Indexing along one axis, with an integer, a slice or an array: `x[..., 0]`, `x[..., 1:]`, `table[i]`."""
    dims, own, sizes = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    indexed, shape = dims.start_index_map, eqn.invars[1].aval.shape[:-1]
    kept = [i for i in range(len(eqn.outvars[0].aval.shape)) if i not in dims.offset_dims]
    whole = all(i in indexed or sizes[i] == size for i, size in enumerate(own))
    if len(indexed) != 1 or dims.operand_batching_dims or not whole:
        raise UserValueError("the policy cannot be exported: it indexes several axes at once")
    (axis,) = indexed
    if not dims.collapsed_slice_dims and not shape:
        steps = np.arange(sizes[axis], dtype=eqn.invars[1].aval.dtype)
        return graph.op("Gather", x, graph.op("Add", index, steps), axis=axis)
    if tuple(dims.collapsed_slice_dims) != (axis,) or kept != list(range(axis, axis + len(shape))):
        raise UserValueError("the policy cannot be exported: it takes slices at several places at once")
    return graph.op("Gather", x, graph.reshape(index, shape), axis=axis)


def _dot(graph: Graph, eqn: Any, x: Any, y: Any) -> str:
    (of_x, of_y), (batch_x, batch_y) = eqn.params["dimension_numbers"]
    rank_x, rank_y = (len(v.aval.shape) for v in eqn.invars)
    if not batch_x and tuple(of_x) == (rank_x - 1,) and tuple(of_y) == (0,) and rank_y <= 2:
        return graph.op("MatMul", x, y)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    words = [[next(letters) for _ in range(rank_x)], [next(letters) for _ in range(rank_y)]]
    for i, j in [*zip(batch_x, batch_y, strict=True), *zip(of_x, of_y, strict=True)]:
        words[1][j] = words[0][i]
    out = [words[0][i] for i in batch_x]
    out += [a for i, a in enumerate(words[0]) if i not in (*batch_x, *of_x)]
    out += [b for i, b in enumerate(words[1]) if i not in (*batch_y, *of_y)]
    return graph.op("Einsum", x, y, equation=f"{''.join(words[0])},{''.join(words[1])}->{''.join(out)}")


def _conv(graph: Graph, eqn: Any, x: Any, kernel: Any) -> str:
    params = eqn.params
    if params["batch_group_count"] != 1 or set(params["lhs_dilation"]) != {1}:
        raise UserValueError("the policy cannot be exported: it has a transposed or a batch-grouped convolution")
    dims = params["dimension_numbers"]
    before, after = zip(*params["padding"], strict=True)
    y = graph.op(
        "Conv",
        graph.op("Transpose", x, perm=dims.lhs_spec),
        graph.op("Transpose", kernel, perm=dims.rhs_spec),
        strides=params["window_strides"],
        pads=[*before, *after],
        dilations=params["rhs_dilation"],
        group=params["feature_group_count"],
    )
    return graph.op("Transpose", y, perm=[int(i) for i in np.argsort(dims.out_spec)])


def _scan(graph: Graph, eqn: Any, *inputs: Any) -> list[Any]:
    """Unroll a loop, whose number of steps is static (1 when a recurrent policy acts)."""
    params = eqn.params
    consts, carry = params["num_consts"], params["num_carry"]
    fixed, state, xs = inputs[:consts], list(inputs[consts : consts + carry]), inputs[consts + carry :]
    steps = range(params["length"])
    rows: dict[int, list[Any]] = {}
    for t in reversed(steps) if params["reverse"] else steps:
        now = [graph.op("Gather", x, np.asarray(t), axis=0) for x in xs]
        inner = params["jaxpr"]
        out = graph.translate(inner.jaxpr, inner.consts, [*fixed, *state, *now])
        state, rows[t] = out[:carry], [graph.op("Unsqueeze", y, np.asarray([0])) for y in out[carry:]]
    stacked = [graph.op("Concat", *(rows[t][i] for t in steps), axis=0) for i in range(len(eqn.outvars) - carry)]
    return [*state, *stacked]


RULES: dict[str, Callable[..., Any]] = {
    **{name: _same(kind) for name, kind in {
        "abs": "Abs", "add": "Add", "add_any": "Add", "and": "And", "ceil": "Ceil", "copy": "Identity", "cos": "Cos",
        "div": "Div", "eq": "Equal", "erf": "Erf", "exp": "Exp", "floor": "Floor", "ge": "GreaterOrEqual",
        "gt": "Greater", "le": "LessOrEqual", "log": "Log", "logistic": "Sigmoid", "lt": "Less", "max": "Max",
        "min": "Min", "mul": "Mul", "neg": "Neg", "not": "Not", "optimization_barrier": "Identity", "or": "Or",
        "pow": "Pow", "sign": "Sign", "sin": "Sin", "sqrt": "Sqrt", "stop_gradient": "Identity", "sub": "Sub",
        "tanh": "Tanh",
    }.items()},
    **{f"reduce_{name}": _reduce(f"Reduce{name.title()}") for name in ("sum", "max", "min")},
    "argmax": lambda graph, eqn, x: graph.cast(
        graph.op("ArgMax", x, axis=eqn.params["axes"][0], keepdims=0), eqn.params["index_dtype"]
    ),
    "broadcast_in_dim": _broadcast,
    "clamp": lambda graph, eqn, low, x, high: graph.op("Min", graph.op("Max", x, low), high),
    "concatenate": lambda graph, eqn, *xs: graph.op("Concat", *xs, axis=eqn.params["dimension"]),
    "conv_general_dilated": _conv,
    "convert_element_type": lambda graph, eqn, x: graph.cast(x, eqn.params["new_dtype"]),
    "dot_general": _dot,
    "expm1": lambda graph, eqn, x: graph.op("Sub", graph.op("Exp", x), np.ones((), eqn.invars[0].aval.dtype)),
    "gather": _gather,
    "integer_pow": _integer_pow,
    "is_finite": _is_finite,
    "log1p": lambda graph, eqn, x: graph.op("Log", graph.op("Add", x, np.ones((), eqn.invars[0].aval.dtype))),
    "ne": lambda graph, eqn, x, y: graph.op("Not", graph.op("Equal", x, y)),
    "reshape": lambda graph, eqn, x: graph.reshape(x, eqn.outvars[0].aval.shape),
    "rsqrt": lambda graph, eqn, x: graph.op("Reciprocal", graph.op("Sqrt", x)),
    "scan": _scan,
    "select_n": _select,
    "slice": _slice,
    "split": _split,
    "stack": _stack,
    "square": lambda graph, eqn, x: graph.op("Mul", x, x),
    "squeeze": lambda graph, eqn, x: graph.reshape(x, eqn.outvars[0].aval.shape),
    "transpose": lambda graph, eqn, x: graph.op("Transpose", x, perm=eqn.params["permutation"]),
}  # fmt: skip
