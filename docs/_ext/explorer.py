"""The table of the chain explorer: the public parts, their declarations, the rules of `chain`, and measured changes."""

from __future__ import annotations

import ast
import doctest
import html
import inspect
import re
from collections.abc import Callable
from typing import Any

import ppo_parts as pp
from ppo_parts._core.batch import Batch, field_at
from ppo_parts._core.part import Divider, Part, no_state
from ppo_parts._core.phases import Phases, divide
from ppo_parts._core.wiring import (
    BY_THE_LEARNER,
    NAMED_BY_POLICIES,
    REMEDY,
    check_batch,
    check_every_write_has_an_effect,
)

NO_PARTS = {"chain", "identity"}  # they return parts, but are not parts of a chain themselves

RULES = [  # `chain` checks the rules of the first list for all parts before those of the second
    [({"divides": True}, "after", {"divides": True})],
    [
        ({"place": "after_sampler"}, "after", {"divides": True}),
        ({"place": "first"}, "before", {"divides": True}),
        ({"place": "before_sampler"}, "before", {"divides": True}),
        ({"needs_time": True, "place": "after_sampler"}, "before", {"divides": True, "cuts_time": True}),
        ({"needs_time": True}, "before", {"divides": True, "cuts_time": True}),
        ({"place": "first"}, "first", {}),
        ({"requires": ("target",)}, "makes", {"provides": ("target",)}),
    ],
]
"""What `chain` refuses: a part with the first declarations, and another one before or after it with the last ones.

"first": the other is the first part of the chain. "makes": the other comes after the part, and makes a field that
the part requires and no part before it writes; any field would do as the example.
"""


def table(formula: Callable[[str, bool], str]) -> dict[str, Any]:
    """Return all that the page needs, in a form JSON can hold; `formula` writes mathematics inline or as a block."""
    parts = {name: entry(name, inspect.getdoc(factory) or "", formula) for name, factory in factories().items()}
    required = sorted({field for part in parts.values() for field in part["requires"]})
    rules = [[rule(*each) for each in group] for group in RULES]
    missing = {field: absence(field) for field in required if not recorded(field)}
    return {"parts": parts, "rules": rules, "learner": learner_rules(), "missing": missing, "measured": measured(parts)}


def factories() -> dict[str, Callable[..., Part]]:
    """Return the public functions that make a part, by their name after `pp.`."""
    modules = {"": pp} | {f"{name}.": each for name, each in inspect.getmembers(pp, inspect.ismodule) if name[0] != "_"}
    return {
        prefix + name: function
        for prefix, module in modules.items()
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if name not in NO_PARTS and inspect.signature(function).return_annotation == "Part"
    }


def entry(dotted: str, doc: str, formula: Callable[[str, bool], str]) -> dict[str, Any]:
    """Return what the page shows about a part, which the first call in its docstring that succeeds makes."""
    definitions, call, part = example(f"pp.{dotted}", doc)
    declared = declarations(part)
    return {
        "call": call,
        "definitions": definitions,
        "page": f"generated/ppo_parts.{dotted}.html",
        "summary": inline(re.sub(r"; see `functional.*", ".", doc.partition("\n\n")[0], flags=re.DOTALL), formula),
        "equation": "".join(formula(text, True) for text in equations(doc)),
    } | declared


def declarations(part: Part) -> dict[str, Any]:
    """Return what a part declares; `chain` and `learner` look at nothing else."""
    return {
        "name": part.name,
        "place": part.place,
        "needs_time": part.needs_time,
        "divides": isinstance(part, Divider),
        "cuts_time": isinstance(part, Divider) and part.cuts_time,
        "requires": part.requires,
        "provides": part.provides,
        "reads": part.reads,
        "policy_loss": part.policy_loss,
        "phases": isinstance(part, Phases),
    }


def example(called: str, doc: str) -> tuple[list[str], str, Part]:
    """Return the statements that the first successful call in a docstring needs, the call itself, and its part."""
    space: dict[str, Any] = {}
    needs: dict[str, list[str]] = {}  # the statements that define each name, in order
    for shown in doctest.DocTestParser().get_examples(doc):
        for statement in ast.parse(shown.source).body:
            for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
                if ast.unparse(call.func) == called and (part := attempt(eval, ast.unparse(call), space)) is not None:
                    return needed(call, needs), one_line(ast.get_source_segment(shown.source, call) or ""), part
            attempt(exec, ast.unparse(statement), space)
            if isinstance(statement, ast.Import):
                imports = {each.asname or each.name: ast.unparse(ast.Import([each])) for each in statement.names}
                needs |= {name: [text] for name, text in imports.items() if name != "pp"}
            else:
                bound = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and is_bound(node)}
                bound |= {statement.name} if isinstance(statement, ast.FunctionDef) else set()
                text = ast.get_source_segment(shown.source, statement) or ""
                before = needed(statement, needs)
                needs |= {name: [*before, text] for name in bound}
    raise ValueError(f"the docstring of {called} has no call of it that succeeds: give it an Example")


def attempt(run: Callable[..., Any], text: str, space: dict[str, Any]) -> Any:
    """Run an example of a docstring; return None if it is an example of an error."""
    try:
        return run(text, space)
    except pp.errors.UserError:
        return None


def is_bound(node: ast.Name) -> bool:
    """Return whether the node assigns a name."""
    return isinstance(node.ctx, ast.Store)


def needed(code: ast.AST, needs: dict[str, list[str]]) -> list[str]:
    """Return the statements that must precede the given code."""
    names = [node.id for node in ast.walk(code) if isinstance(node, ast.Name) and not is_bound(node)]
    return list(dict.fromkeys(text for name in names for text in needs.get(name, ())))


def one_line(call: str) -> str:
    """Return a call, which may be written in several lines, in one line."""
    return re.sub(r"\s+", " ", re.sub(r",?\s*\n\s*\)", ")", re.sub(r"\(\s*\n\s*", "(", call)))


def equations(doc: str) -> list[str]:
    """Return the equations of a docstring, or those of the function of `functional` that it refers to first."""
    found = re.findall(r"^\.\. math::((?: .*|\n(?=\n? ))*)", doc, re.MULTILINE)
    referred = re.search(r"functional\.(\w+)", doc)
    if found or referred is None:
        return [inspect.cleandoc(each) for each in found]
    return equations(inspect.getdoc(getattr(pp.functional, referred[1])) or "")


def inline(text: str, formula: Callable[[str, bool], str]) -> str:
    """Return a sentence of a docstring as HTML."""
    pieces = re.split(r"(:math:`[^`]+`|`[^`]+`)", " ".join(text.split()))
    return "".join(
        formula(piece[7:-1], False)
        if piece.startswith(":math:")
        else f"<code>{html.escape(piece[1:-1])}</code>"
        if piece.startswith("`")
        else html.escape(piece)
        for piece in pieces
    )


def stub(name: str, *, divides: bool = False, cuts_time: bool = False, **declared: Any) -> Part:
    """Return a part with this name and these declarations that does nothing."""
    if divides:
        return Divider(no_state, lambda batch, state, context: (batch, state), name, cuts_time=cuts_time, **declared)
    return Part(no_state, lambda batch, state, context: (batch, state), name, **declared)


def error_of(check: Callable[..., Any], *given: Any) -> str:
    """Return the message of the error that the check raises."""
    try:
        check(*given)
    except pp.errors.UserValueError as error:
        return str(error)
    raise AssertionError(f"{check.__name__} accepts {given}, which a rule of the explorer says it refuses")


def rule(part: dict[str, Any], where: str, other: dict[str, Any]) -> dict[str, Any]:
    """Return a rule in the words of `chain`, where {part}, {other} and {field} stand for the names."""
    subject, object_ = stub("{part}", **part), stub("{other}", **other)
    says = error_of(pp.chain, *((subject, object_) if where in ("after", "makes") else (object_, subject)))
    if where == "makes":
        return {"part": {}, "where": where, "other": {}, "says": says.replace("target", "{field}")}
    return {"part": part, "where": where, "other": other, "says": says}


def learner_rules() -> dict[str, Any]:
    """Return what `learner` says where something would have no effect, and the fields that it reads itself."""

    def says(*parts: Part) -> str:
        return error_of(check_every_write_has_an_effect, (), [parts])

    change = stub("{part}", requires=("value",), provides=("value",), reads=())
    mask = stub("{part}", requires=("mask",), provides=("mask",), reads=())
    loss = stub("{loss}", provides=("losses",), reads=("value", "mask"))
    blind = stub("{loss}", provides=("losses",), reads=())
    entry = stub("{part}", provides=("extras.value",), reads=())
    again = stub("{other}", provides=("value",), reads=())
    crop = stub("{part}", requires=("obs",), provides=("obs",), reads=())

    def used(text: str, field: str = "value") -> str:
        return text.replace(field, "{fields}").replace("part after it reads it", "part after it reads {it}")

    return {
        "reads": sorted(BY_THE_LEARNER),
        "seen": sorted(NAMED_BY_POLICIES),
        "no_sampler": error_of(divide, change),
        "unread": used(says(change, blind)),
        "overwritten": used(says(change, again, blind)),
        "unread_entry": used(says(entry, blind).replace("extras.", "")),
        "unread_seen": used(says(pp.full_batch(), crop, blind), "obs"),
        "unread_weight": says(stub("{part}", provides=("weight",), reads=())),
        "no_loss": used(says(change)),
        "late": says(loss, change).replace("value", "{field}"),
        "late_mask": says(loss, mask),
    }


def recorded(field: str) -> bool:
    """Return whether all batches, or those of `rollout`, have a field even if no part writes it."""
    given = field_at(Batch(), field) is not None or field.startswith("metrics.")  # a loss adds its metrics
    return given or not (field in REMEDY or "." in field)


def absence(field: str) -> str:
    """Return the error at run time if nothing has written a field that a part requires."""
    return error_of(check_batch, stub("{part}", requires=(field,)), Batch())


def measured(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the changes of one chain, measured by `benchmarks differences`, that are made by parts of the table."""
    from benchmarks import _tables, choices

    keys = {part["name"]: key for key, part in parts.items()}
    settings = set(inspect.signature(choices.make_chain).parameters)
    config = choices.Config(env_id="HalfCheetah-v5")
    compared = _tables.compare_runs("differences", choices.DIFFERENCES)
    rows: list[dict[str, Any]] = []
    for name, each in choices.DIFFERENCES.items():
        if not each.choices.keys() <= settings:
            continue
        chain = [keys.get(part.name) for part in pp.chain(choices.make_chain(config, **each.choices)).parts]
        if None in chain or chain in (row["chain"] for row in rows):  # a recipe's part, or other settings of a part
            continue
        effects = [one.show_cell(lambda text, *addresses: text, name) for one in compared]
        rows.append({"what": each.what, "chain": chain, "effects": effects})
    return {"tasks": [one.task for one in compared], "steps": compared[0].steps, "rows": rows}
