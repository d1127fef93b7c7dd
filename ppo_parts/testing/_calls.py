"""Functions that convert between a chain or an optimizer as Python text and its calls as data."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ..errors import UserTypeError, UserValueError
from ..functional._errors import did_you_mean

MODULES = {"jnp": "jax.numpy", "optax": "optax", "pp": "ppo_parts", "parts": "ppo_parts.recipes.libraries.parts"}
"""Short names of modules in the text of an update; other modules have their full name."""
CHAINS = ("pp.chain", "optax.chain")


class Call(NamedTuple):
    """A call: the text of its function, and its arguments by name ("" if positional), each a call or other text."""

    function: str
    arguments: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(f'{name}={x}' if name else str(x) for name, x in self.arguments)})"

    def set(self, **arguments: str) -> Call:
        """Return the call with changed arguments."""
        return self._replace(arguments=tuple({**dict(self.arguments), **arguments}.items()))


def read_name(text: str) -> str:
    """Return the name of the function that a text calls, without its module."""
    return text.partition("(")[0].rpartition(".")[2]


def walk(items: Iterable[Any]) -> Iterator[Call]:
    """Yield the calls among some items, each one before the calls inside it."""
    for item in items:
        if isinstance(item, Call):
            yield item
            yield from walk(x for _, x in item.arguments)


def join(calls: tuple[Any, ...]) -> Any:
    """Return the only call, or a chain of calls."""
    if len(calls) == 1:
        return calls[0]
    of_optimizer = calls and all(str(x).startswith(("optax.", "pp.optim.")) for x in calls)
    return Call("optax.chain" if of_optimizer else "pp.chain", tuple(("", x) for x in calls))


def exchange(item: Any, old: Call, new: tuple[Call, ...]) -> tuple[Any, ...]:
    """Return the calls that `item` (a call or an argument) chains, with `old` replaced by `new`."""
    if item == old:
        return new
    if not isinstance(item, Call):
        return (item,)
    inner = [(name, exchange(x, old, new)) for name, x in item.arguments]
    if item.function in CHAINS:
        return tuple(x for _, calls in inner for x in calls)
    return (Call(item.function, tuple((name, join(calls)) for name, calls in inner)),)


def evaluate_text(x: Any) -> Any:
    """Return the value of a call, or of a Python expression; anything else is returned unchanged."""
    return _evaluate(inspect.cleandoc(str(x))) if isinstance(x, (str, Call)) else x


@functools.cache
def _evaluate(text: str) -> Any:
    nodes = [*ast.walk(ast.parse(text, mode="eval"))]
    names = {x.id for x in nodes if isinstance(x, ast.Name)} - {x.arg for x in nodes if isinstance(x, ast.arg)}
    names -= {*dir(builtins)}
    for path in {ast.unparse(x) for x in nodes if isinstance(x, ast.Attribute)}:
        if path.partition(".")[0] in names:  # because importing a package does not import submodules
            with contextlib.suppress(ImportError, AttributeError, ValueError):
                pkgutil.resolve_name(path)
    try:
        return eval(text, {x: importlib.import_module(MODULES.get(x, x)) for x in names})
    except AttributeError as error:
        raise UserValueError(f"compare_update: {error}{did_you_mean(str(error.name), dir(error.obj))}") from None
    except ModuleNotFoundError as error:
        raise UserValueError(
            f"compare_update: {error.name!r} in the text is neither one of {', '.join(MODULES)} nor a module: write "
            "numbers out, and import your own parts from a module"
        ) from error


@functools.cache
def read_calls(text: str) -> tuple[Call, ...]:
    """Return the calls inside a `chain(...)`, flattened, or the single call, each with its arguments by name."""
    try:
        tree = ast.parse(inspect.cleandoc(text), mode="eval")
        compile(tree, "<text>", "eval")  # rejects f(x=1, x=2)
    except SyntaxError as error:
        raise UserValueError(f"compare_update: not a Python expression: {error}, in {text!r}") from None
    return _read(tree.body)


def _read(node: ast.expr) -> tuple[Call, ...]:
    if not isinstance(node, ast.Call):
        raise UserTypeError(f"compare_update: expected a call, such as pp.gae(...), got {ast.unparse(node)}")
    function = ast.unparse(node.func)
    if function in CHAINS:
        return tuple(call for each in node.args for call in _read(each))
    signature = inspect.signature(evaluate_text(function))
    try:
        bound = signature.bind(*node.args, **{each.arg or "": each.value for each in node.keywords})
    except TypeError as error:
        known = ", ".join(signature.parameters)
        raise UserTypeError(f"compare_update: {ast.unparse(node)}: {error}; it takes ({known})") from None
    named = all(x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY) for x in signature.parameters.values())
    given: Any = bound.arguments.items() if named else [*(("", x) for x in bound.args), *bound.kwargs.items()]
    arguments = [(name, join(_read(x)) if isinstance(x, ast.Call) else ast.unparse(x)) for name, x in given]
    values = dict(arguments)
    if function == "pp.clipped_adam":
        clip, eps = values["max_grad_norm"], values.get("eps", "1e-05")
        rate = f"pp.optim.scale_by_update_schedule({values['learning_rate']})"
        return read_calls(f"optax.chain(optax.clip_by_global_norm({clip}), optax.scale_by_adam(eps={eps}), {rate})")
    if function == "optax.adam":
        rate = f"optax.scale_by_learning_rate({values.pop('learning_rate')})"
        return (Call("optax.scale_by_adam", tuple(values.items())), *read_calls(rate))
    return (Call(function, tuple(arguments)),)
