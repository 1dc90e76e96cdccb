"""The epilogue's own signature and its return statement: operands, defaults, outputs."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import torch

from epifuse.frontend.context import Context, TupleValue
from epifuse.frontend.names import is_number
from epifuse.frontend.source import Source, refuse_decorated
from epifuse.ir import Load, Node, Output


class Parameters(NamedTuple):
    """The operands in order, the defaults of some of them, and the parameters that are decided while parsing."""

    operands: tuple[str, ...]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]


def epilogue_parameters(
    context: Context,
    source: Source,
    function: Callable[..., Any] | str,
    given: Container[str],
    accum: str,
    handed: Mapping[str, Any] | None,
) -> Parameters:
    """The parameters of an epilogue, without `accum`.

    Parameters in `given` are no operands. A parameter whose default is None or a string is fixed: at its value in
    `handed`, or at its default if `handed` does not have it. But it is an operand if its value in `handed` is neither
    None nor a string, or if `handed` is None.
    """
    arguments = source.parameters
    for star, given_by in (("*", arguments.vararg), ("**", arguments.kwarg)):
        if given_by is not None:
            refuse_decorated(function)
            raise context.fail("star_parameters", given_by, star=star + given_by.arg)
    positional = [a for a in (*arguments.posonlyargs, *arguments.args) if a.arg not in given]
    declared = [*positional, *(a for a in arguments.kwonlyargs if a.arg not in given)]
    if accum not in [argument.arg for argument in declared]:
        raise context.fail("no_accum", source.definition)
    if not positional or positional[0].arg != accum:
        raise context.fail("accum_not_first", next(a for a in declared if a.arg == accum))
    held = written_defaults(arguments) if isinstance(function, str) else held_defaults(function)
    for name in context.root.keywords:
        if name not in (shown := [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]):
            raise context.fail(
                "unknown_parameter", source.definition, function=source.name, name=name, parameters=", ".join(shown)
            )
    values = {name: value for name, value in {**held, **context.root.keywords}.items() if name not in given}
    fixed = {}
    for name, value in tuple(values.items()):
        if name == accum:
            raise context.fail("accum_default", _expression(arguments, name))
        if is_fixed(value):
            del values[name]
            if handed is not None and is_fixed(handed.get(name, value)):
                fixed[name] = handed.get(name, value)
        elif not is_number(value) and not (name in context.root.keywords and isinstance(value, torch.Tensor)):
            raise context.fail("default_not_a_number", _expression(arguments, name), name=name)
    return Parameters(tuple(a.arg for a in declared[1:] if a.arg not in fixed), values, fixed)


def is_fixed(value: object) -> bool:
    """Whether a parameter with this default is decided while parsing."""
    return value is None or isinstance(value, str)


def _pairs(arguments: ast.arguments) -> list[tuple[str, ast.expr]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    last = positional[len(positional) - len(arguments.defaults) :]
    pairs = [(a.arg, d) for a, d in zip(last, arguments.defaults, strict=True)]
    return pairs + [(a.arg, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d]


def _expression(arguments: ast.arguments, name: str) -> ast.AST:
    return dict(_pairs(arguments)).get(name, arguments)


def written_defaults(arguments: ast.arguments) -> dict[str, Any]:
    """The defaults of the parameters in a source text. An ellipsis stands for a default that is no literal."""
    return {name: _literal(expression) for name, expression in _pairs(arguments)}


def _literal(expression: ast.expr) -> Any:
    try:
        return ast.literal_eval(expression)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ...


def held_defaults(function: Any) -> dict[str, Any]:
    """The defaults that the function object holds. What its source or a decorator says does not count."""
    code, defaults = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    held = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
    return held | (function.__kwdefaults__ or {})


def signature_of(function: types.FunctionType, source: Source) -> inspect.Signature:
    """The signature of the definition itself; `inspect.signature` would follow decorators to another one."""
    arguments, defaults = source.parameters, held_defaults(function)
    empty = inspect.Parameter.empty
    groups = (
        (arguments.posonlyargs, inspect.Parameter.POSITIONAL_ONLY),
        (arguments.args, inspect.Parameter.POSITIONAL_OR_KEYWORD),
        (arguments.kwonlyargs, inspect.Parameter.KEYWORD_ONLY),
    )
    return inspect.Signature(
        [inspect.Parameter(a.arg, kind, default=defaults.get(a.arg, empty)) for group, kind in groups for a in group]
    )


def outputs_of(context: Context, source: Source, result: Any, accum: str) -> tuple[Output, ...]:
    """Names and nodes of what the epilogue returns; one unnamed result is `D`."""
    returned = _returned(source)
    items = result.items if isinstance(result, TupleValue) else (result,)
    if isinstance(returned, (ast.Tuple, ast.List)):
        elements = returned.elts
    elif isinstance(result, TupleValue):
        raise context.fail("unnamed_outputs", returned)
    else:
        elements = [returned]
    if not elements:
        raise context.fail("returns_nothing", returned, name=source.name)
    arguments = source.parameters
    inputs = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)} - {accum}
    outputs: dict[str, Output] = {}
    for element, item in zip(elements, items, strict=True):
        if not isinstance(element, ast.Name) and len(elements) > 1:
            raise context.fail("unnamed_output", element)
        name = element.id if isinstance(element, ast.Name) else "D"
        if name in inputs and not isinstance(element, ast.Name):
            raise context.fail("unnamed_clash", element)
        if name in inputs:
            own = isinstance(item, Node) and item.op == "load" and item.attr == Load(name)
            raise context.fail("returns_input" if own else "returns_operand_name", element, name=name)
        if name in outputs:
            raise context.fail("returned_twice", element, name=name)
        value = context.value(item, element)
        if not context.builder.locs.get(value):  # an operand that is returned unchanged has no other place
            context.builder.locs[value] = (context.frame.loc(element),)
        outputs[name] = Output(name, value)
    return tuple(outputs.values())


def _returned(source: Source) -> ast.expr:
    """The returned expression; a definition without one was refused when its body was read."""
    definition = source.definition
    if isinstance(definition, ast.Lambda):
        return definition.body
    last: Any = definition.body[-1]
    returned: ast.expr = last.value
    return returned
