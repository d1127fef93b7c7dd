"""Export the policy of a trained run to ONNX, with its normalizer and its recurrent state.

    python -m ppo_parts.export runs/first --output policy.onnx

The model has the inputs `obs` `[N, ...]` and, for a recurrent policy, `carry_0`, `carry_1`, ... `[N, H]`, which are
zero at the beginning of an episode. Its outputs are `action`, the mode of the policy's distribution as the environment
receives it; `logits`, `loc` and `scale`, or `alpha` and `beta`, from which an action may be sampled instead; and
`next_carry_0`, ... Names of entries of dicts and tuples end with their path: `obs['image']`, `action['move']`,
`logits['move']`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.extend
import jax.numpy as jnp
import numpy as np

from .._base.extras import require_package
from .._core.policy import apply_policy, carry_after
from ..distributions import Joint
from ..distributions._distribution import is_distribution
from ..errors import UserValueError
from ..training import Train, TrainState, exit_on_user_error
from ..training._files import check_writable, write_whole
from ._shared import load_run, make_parser, report, select_seed

OPSET = 17  # version of ONNX's operators, supported by runtimes since 2022
TOLERANCE = 1e-5


def make_policy_function(train: Train, state: TrainState) -> tuple[Callable[..., dict[str, Any]], dict[str, Any]]:
    """Make the function that a model computes, a policy with fixed parameters, its normalizer and its carry.

    Return a function `(*leaves of obs, *carry) -> outputs by name`, and the shapes and dtypes of one row of its inputs,
    by name.
    Raise `UserValueError` if the environment has several agents or the policy draws random numbers.
    """
    env, policy, params = train.env, train.policy, state.learner.params
    if env.num_agents is not None:
        says = f"the policy cannot be exported: it plays {env.num_agents} agents at once, instead of one"
        raise UserValueError(f"{says}; envs.fold_agents(env, agent_id=True) trains one that plays a single agent")
    if getattr(policy, "draws", False):
        raise UserValueError("a policy that draws random numbers cannot be exported: export one without noise")
    structure, named = _read_inputs(state)
    privileged = getattr(state.rollout.obs, "privileged", None)
    rows = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in named.items()}

    def act(*inputs: Any) -> dict[str, Any]:
        obs, carry = jax.tree.unflatten(structure, inputs)
        number = inputs[0].shape[0]
        if privileged is not None:
            zeros = jax.tree.map(lambda x: jnp.zeros((number, *x.shape[1:]), x.dtype), privileged)
            obs = obs._replace(privileged=zeros)
        if env.observe is not None:
            obs = env.observe(state.rollout.env_state, obs)
        reset = jnp.zeros(number, bool)  # instead, callers pass a carry of zeros
        output = apply_policy(policy, params, obs, carry, reset)
        action = output.distribution.mode()
        memory = carry_after(policy, output, action)
        if env.act is not None:
            action = env.act(action)
        outputs = _name_leaves("action", action)
        parts = output.distribution.parts if type(output.distribution) is Joint else output.distribution
        for path, part in jax.tree.leaves_with_path(parts, is_leaf=is_distribution):
            base, place = getattr(part, "base", part), jax.tree_util.keystr(path)
            parameters = ("logits", "loc", "scale", "alpha", "beta")
            outputs |= {name + place: getattr(base, name) for name in parameters if hasattr(base, name)}
        return outputs | {f"next_carry_{i}": x for i, x in enumerate(jax.tree.leaves(memory))}

    return act, rows


def to_onnx(train: Train, state: TrainState, about: dict[str, str] | None = None) -> Any:
    """Translate the policy of a run, with the state of one seed, to an `onnx.ModelProto` with the metadata `about`.

    Raise `UserValueError` with the reason if the policy cannot be translated.
    """
    jax2onnx, onnx = require_package("jax2onnx", "export"), require_package("onnx", "export")
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it warns about shapes without a type, which are harmless
    act, rows = make_policy_function(train, state)
    (batch,) = jax.export.symbolic_shape("N")
    specs = {name: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype) for name, x in rows.items()}
    names: list[str] = []

    def compute(*inputs: Any) -> list[Any]:
        named = act(*inputs)
        names[:] = named
        return [jnp.copy(x) for x in named.values()]  # separate arrays, because the mode of a Gaussian is its `loc`

    # Trace before calling jax2onnx, because it replaces functions of `jax.numpy` while it traces.
    closed = jax.make_jaxpr(compute)(*specs.values())
    for name, x in zip(names, closed.out_avals, strict=True):
        if x.shape[:1] != (batch,):
            says = f"the policy cannot be exported: its output {name} has shape {x.shape} for N observations"
            raise UserValueError(f"{says}, so that it mixes them: compute one row for each observation")
    function = jax.extend.core.jaxpr_as_fun(closed)
    try:
        names_of = {"model_name": "policy", "input_names": list(specs), "output_names": names}
        inputs = list(specs.values())
        model = jax2onnx.to_onnx(lambda *inputs: tuple(function(*inputs)), inputs, opset=OPSET, **names_of)
    except Exception as error:
        message = f"the policy cannot be exported: jax2onnx raised {type(error).__name__}: {error}"
        raise UserValueError(message) from error
    onnx.helper.set_model_props(model, about or {})
    return model


def measure_difference(model: Any, train: Train, state: TrainState, number: int = 1000) -> float:
    """Compare the result of `to_onnx` with JAX on random inputs, and return the largest difference.

    The difference is relative to the larger of 1 and the largest number of the row in JAX. For discrete actions, logits
    are compared instead of actions, because the order of two almost equal logits may differ.
    """
    runtime = require_package("onnxruntime", "export")
    act, rows = make_policy_function(train, state)
    inputs = draw_inputs(rows, number, 0)
    for name, x in _read_inputs(state)[1].items():
        if inputs[name].dtype.kind in "iu" and x.dtype != np.uint8:  # random integers may lie outside their space
            inputs[name] = np.random.default_rng(0).choice(np.asarray(x), number)
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors only, because it warns about constants that it folded in a recurrent policy
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(names, inputs), strict=True))
    expected = jax.device_get(jax.jit(act)(*inputs.values()))
    compared = {name: np.asarray(x) for name, x in expected.items() if np.issubdtype(np.asarray(x).dtype, np.floating)}

    def find_largest(found: np.ndarray, x: np.ndarray) -> Any:
        axes = tuple(range(1, x.ndim))
        size = np.max(np.abs(x), axis=axes, keepdims=True, initial=1, where=np.isfinite(x))
        with np.errstate(invalid="ignore"):  # the logit of an impossible option is -inf in both
            return np.max(np.where(found == x, 0, np.abs(found - x) / size))

    return float(np.max([find_largest(found[name], x) for name, x in compared.items()]))  # NaN if any is


def draw_inputs(rows: dict[str, Any], number: int, seed: int) -> dict[str, np.ndarray]:
    """Draw inputs `[number, ...]`, normal numbers of several magnitudes, random pixels, or masks of ones."""
    random = np.random.default_rng(seed)

    def draw(x: Any) -> np.ndarray:
        shape, dtype = (number, *x.shape), np.dtype(x.dtype)
        if np.issubdtype(dtype, np.floating):
            return (random.normal(size=shape) * random.choice([0.1, 1, 3], size=shape)).astype(dtype)
        return np.ones(shape, bool) if dtype.kind == "b" else random.integers(0, 256, shape).astype(dtype)

    inputs = {name: draw(x) for name, x in rows.items()}
    return {name: np.tanh(x) if name.startswith("carry") else x for name, x in inputs.items()}


def _read_inputs(state: TrainState) -> tuple[Any, dict[str, Any]]:
    """Return the inputs of a run's model by name, and their structure, what the policy sees and its carry."""
    obs, carry = state.rollout.obs, state.rollout.carry
    if getattr(obs, "privileged", None) is not None:  # only the critic sees it, and it is not exported
        obs = obs._replace(privileged=None)
    named = _name_leaves("obs", obs) | {f"carry_{i}": x for i, x in enumerate(jax.tree.leaves(carry))}
    return jax.tree.structure((obs, carry)), named


def _name_leaves(name: str, tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by name, which is the tree's name, and the path if there are several."""
    found = jax.tree.leaves_with_path(tree)
    return {name + jax.tree_util.keystr(path) * (len(found) > 1): x for path, x in found}


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the command line; return the path of the model."""
    parser = make_parser("export", "Export the policy of a trained run to ONNX.", one_seed=True)
    parser.add_argument("--output", type=Path, default=Path("policy.onnx"), help="file (default: policy.onnx)")
    tolerance = f"largest difference from JAX, relative to numbers above 1 (default: {TOLERANCE:g})"
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help=tolerance)
    given = parser.parse_args(arguments)
    with exit_on_user_error():
        check_writable(given.output, (".onnx",))
        run = load_run(given)
        state = select_seed(run, given.seed_index)
        about = {"env_id": str(getattr(run.config, "env_id", "")), "run": str(given.run), "update": str(run.update)}
        report("translating to ONNX, then comparing with JAX")
        model = to_onnx(run.train, state, about)
        difference = measure_difference(model, run.train, state)
        if not difference < given.tolerance:
            remedy = "if large inputs are rounded, give a larger --tolerance, or scale them"
            raise UserValueError(f"the model differs from JAX by {difference:.1e}, so it is not written: {remedy}")
        write_whole(given.output, model.SerializeToString())
        for kind, values in {"inputs": model.graph.input, "outputs": model.graph.output}.items():
            sizes = {x.name: [dim.dim_param or dim.dim_value for dim in x.type.tensor_type.shape.dim] for x in values}
            print(f"{kind}:", ", ".join(f"{name} [{', '.join(map(str, shape))}]" for name, shape in sizes.items()))
        print(f"largest difference from JAX on 1,000 random observations: {difference:.1e}")
        print(given.output)
    return given.output
