"""Calls in an epilogue: bind arguments to signatures, and parse calls of vocabulary functions and tensor methods."""

from __future__ import annotations

import ast
import inspect
import string
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from epifuse.base.dtypes import BY_TORCH
from epifuse.base.errors import kind_of
from epifuse.frontend import layouts, parts, torch_rules
from epifuse.frontend.context import Context, DtypeOf, LimitsOf, Pieces, TupleValue, Visit
from epifuse.frontend.hints import choice_hint, parameter_hint
from epifuse.frontend.names import FixedFunction, FunctionRef, HostFunction, Static, known
from epifuse.frontend.signature import signature_of
from epifuse.frontend.source import Source, refuse_decorated
from epifuse.fusion import host, literals
from epifuse.fusion.vocabulary import CAST_METHODS, METHODS, VOCABULARY, Entry, is_static
from epifuse.ir import Load, Node
from epifuse.ir.graph import topological

METHOD_FORMS = frozenset({"to", "type", "t", "size", "numel", *CAST_METHODS})


# --- binding ---------------------------------------------------------------------------------------------------


def bind(
    context: Context,
    function: types.FunctionType,
    source: Source,
    positional: list[Any],
    named: dict[str, Any],
    at: ast.AST,
) -> dict[str, Any]:
    """Bind the arguments of a helper or macro. Return them by parameter name."""
    for star, given_by in (("*", source.parameters.vararg), ("**", source.parameters.kwarg)):
        if given_by is not None:
            refuse_decorated(function)
            raise context.fail("star_in_helper", at, name=source.name, star=star + given_by.arg)
    return _bind(context, signature_of(function, source), source.name, positional, named, at)


def _bind(
    context: Context, signature: inspect.Signature, name: str, positional: list[Any], named: dict[str, Any], at: ast.AST
) -> dict[str, Any]:
    parameters = signature.parameters
    slots = [p for p in parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    if len(positional) > len(slots):
        raise context.fail("too_many_arguments", at, function=name, have=len(positional), want=_show(signature))
    bound = {slot.name: item for slot, item in zip(slots, positional, strict=False)}
    for key, item in named.items():
        if key not in parameters or parameters[key].kind is inspect.Parameter.POSITIONAL_ONLY:
            hint = parameter_hint(key, known(item))
            raise context.fail("unexpected_argument", at, function=name, name=key, want=_show(signature), hint=hint)
        if key in bound:
            raise context.fail("argument_twice", at, function=name, name=key)
        bound[key] = item
    for parameter in parameters.values():
        if parameter.name in bound:
            continue
        if parameter.default is inspect.Parameter.empty:
            raise context.fail("missing_argument", at, function=name, name=parameter.name, want=_show(signature))
        bound[parameter.name] = _default(context, parameter.default, name, at)
    return bound


def _show(signature: inspect.Signature) -> str:
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(bare))


def _default(context: Context, value: Any, function: str, at: ast.AST) -> Any:
    if isinstance(value, (bool, int, float)):
        return context.emit("const", attr=value, at=at)
    if value is None or isinstance(value, (str, torch.dtype, tuple)):
        return Static(value)
    raise context.fail("default_not_supported", at, function=function, value=kind_of(value))


def static(context: Context, item: Any, function: str, name: str, at: ast.AST) -> Any:
    """The value of an argument that must be known when the epilogue is parsed."""
    if isinstance(item, Static):
        return item.value
    if isinstance(item, TupleValue):
        return tuple(static(context, element, function, name, at) for element in item.items)
    if isinstance(item, Pieces):
        raise context.fail("length_unknown", at, function=function, name=name)
    if not isinstance(item, Node) or not all(map(host.is_host_operation, _above_loads(item))):
        raise _unknown(context, function, name, at)
    try:
        return host.evaluate(item, lambda load: _captured(context, load, function, name, at))
    except host.HostError as error:
        raise context.fail("host_arithmetic", at, detail=str(error)) from None


def _unknown(context: Context, function: str, name: str, at: ast.AST) -> Exception:
    shown = function if function.endswith("]") else f"{function}()"
    return context.fail("not_static", at, function=shown, name=name)


def sized(context: Context, item: Any, function: str, name: str, at: ast.AST) -> Any:
    """Like `static`, but an integer may also be computed from extents (`x.shape[0] // 2`). Then return its node, which
    type inference evaluates."""
    if isinstance(item, TupleValue):
        return tuple(sized(context, element, function, name, at) for element in item.items)
    if not isinstance(item, Node) or not any(node.op == "extent" for node in parts.numbers_below(item)):
        return static(context, item, function, name, at)
    made: dict[Node, Node] = {}
    for node in reversed(list(parts.numbers_below(item))):
        if node.op == "load":
            made[node] = context.emit("const", attr=_captured(context, node, function, name, at), at=at)
        elif node.op == "extent":
            made[node] = node
        elif host.is_host_operation(node):
            made[node] = context.emit(node.op, *(made[arg] for arg in node.args), attr=node.attr, at=at)
        else:
            raise _unknown(context, function, name, at)
    return made[item]


def _above_loads(root: Node) -> Iterator[Node]:
    return (node for node in topological((root,)) if node.op != "load")


def _captured(context: Context, load: Node, function: str, name: str, at: ast.AST) -> Any:
    reader = context.captures.get(load.attr.name)
    if reader is None:
        raise _unknown(context, function, name, at)
    value = reader.read(context.root)
    context.frame.scope.guard(reader, value)
    return value


def host_call(
    context: Context, function: HostFunction, positional: list[Any], named: dict[str, Any], node: ast.Call
) -> Node:
    """A call of a function of `math`: a node that the host evaluates with Python's own function, on host numbers."""
    if named:
        raise context.fail(
            "unexpected_argument", node, function=function.spelled, name=next(iter(named)), want="unnamed", hint=""
        )
    arguments = [context.value(item, at) for item, at in zip(positional, node.args, strict=True)]
    return context.emit("host", *arguments, attr=function.function.__name__, at=node)


def fixed_call(
    context: Context, function: FixedFunction, positional: list[Any], named: dict[str, Any], at: ast.AST
) -> Node | Static | LimitsOf:
    """A call such as `float("-inf")` or `torch.finfo(torch.float32)`, which is evaluated while parsing."""
    given = [*positional, *named.values()]
    if len(given) == 1 and isinstance(given[0], DtypeOf) and function.function is not float:
        return LimitsOf(given[0].value)
    try:
        (item,) = given
        found = function.function(item.value if isinstance(item, Static) else None)
    except (TypeError, ValueError):
        name = next(iter(named), "argument")
        raise context.fail("wrong_static", at, function=function.spelled, name=name, want=function.wanted) from None
    return context.emit("const", attr=found, at=at) if isinstance(found, float) else Static(found)


# --- the vocabulary --------------------------------------------------------------------------------------------


def vocabulary_call(
    context: Context, ref: FunctionRef, positional: list[Any], named: dict[str, Any], at: ast.AST
) -> Visit:
    """A call of a vocabulary function, named through epifuse or torch, or as a builtin such as `abs`."""
    entry, spelled = ref.entry, ref.spelled
    if ref.origin == "torch":

        def bind(signature: inspect.Signature, first: list[Any], others: dict[str, Any]) -> dict[str, Any]:
            return _bind(context, signature, spelled, first, others, at)

        positional, named = [], torch_rules.bound(context, entry, spelled, positional, named, at, bind)
    if entry.group == "macro":
        _check_literals(context, entry, positional, named, at)
        if entry.name == "clamp" and not any(item != Static(None) for item in [*positional[1:], *_bounds(named)]):
            raise context.fail("clamp_bounds", at, function=spelled)
        if not entry.rounds_once:
            return (yield context.inline(entry.body, positional, named, at, library=True))  # type: ignore[arg-type]
        given = _bind(context, entry.signature, spelled, positional, named, at)
        required = [name for name, p in entry.signature.parameters.items() if p.default is p.empty]
        values = [name for name in required if name not in layouts.SIZES]
        wide = {name: context.emit("rounded_like", context.value(given[name], at), at=at) for name in values}
        made = yield context.inline(entry.body, [], given | wide, at, library=True)  # type: ignore[arg-type]
        return context.emit("rounded_like", made, *(context.value(given[name], at) for name in values), at=at)
    bound = _bind(context, entry.signature, spelled, positional, named, at)
    return _emit(context, entry, spelled, bound, at)


def _bounds(named: dict[str, Any]) -> list[Any]:
    return [item for name, item in named.items() if name in ("min", "max")]


def _emit(context: Context, entry: Entry, spelled: str, bound: dict[str, Any], at: ast.AST) -> Any:
    parameters = entry.signature.parameters
    if entry.name in ("cat", "stack"):
        dim = static(context, bound["dim"], spelled, "dim", at)
        dim = layouts.whole(context, {"dim": dim}, "dim", spelled, at)
        return parts.joined(context, entry.name, spelled, bound["tensors"], dim, at)
    fixed = {
        name: (sized if name in layouts.SIZES else static)(context, bound[name], spelled, name, at)
        for name, p in parameters.items()
        if is_static(p)
    }
    values = [context.value(bound[name], at) for name, p in parameters.items() if not is_static(p)]
    if entry.group == "primitive":
        return context.emit(entry.name, *values, at=at)
    if entry.group == "activation":
        return context.emit("call", *values, attr=entry.name, at=at)
    if entry.group == "reduction":
        dim = _dims(context, fixed["dim"], entry.name, spelled, at)
        if not isinstance(fixed["keepdim"], bool):
            raise context.fail("wrong_static", at, function=spelled, name="keepdim", want="True or False")
        return context.emit("reduce_dims", *values, attr=(entry.name, dim, fixed["keepdim"]), at=at)
    return _FORMS[entry.name](context, spelled, *values, fixed, at)


def _dims(context: Context, dim: Any, reduction: str, spelled: str, at: ast.AST) -> tuple[int, ...] | None:
    dims = (dim,) if isinstance(dim, int) and not isinstance(dim, bool) else dim
    if dims is not None and not layouts.integers(dims):
        raise context.fail("wrong_static", at, function=spelled, name="dim", want="an integer or a tuple of integers")
    if dims == () and reduction in ("any", "all"):
        raise context.fail("wrong_static", at, function=spelled, name="dim", want="None, or one dim at least")
    # torch reads an empty tuple as every dim, except for any and all, where it means no dim.
    return dims or None


def _cast(context: Context, spelled: str, x: Node, fixed: dict[str, Any], at: ast.AST) -> Node:
    if not isinstance(fixed["dtype"], torch.dtype):
        raise context.fail("wrong_static", at, function=spelled, name="dtype", want="a torch dtype")
    return context.emit("cast", context.tensor(x, spelled, at), attr=fixed["dtype"], at=at)


def _index(axis: str) -> Callable[..., Node]:
    def emit(context: Context, spelled: str, x: Node, _: dict[str, Any], at: ast.AST) -> Node:
        return context.emit("coordinate", context.tensor(x, spelled, at), attr=axis, at=at)

    return emit


def _extent(context: Context, spelled: str, x: Node, fixed: dict[str, Any], at: ast.AST) -> Node:
    dims = _dims(context, fixed["dim"], "extent", spelled, at)
    return context.emit("extent", context.tensor(x, spelled, at), attr=(dims, 0), at=at)


def _along(op: str) -> Callable[..., Node]:
    def emit(context: Context, spelled: str, x: Node, *others: Any) -> Node:
        *values, fixed, place = others
        dim = layouts.whole(context, fixed, "dim", spelled, place)
        return context.emit(op, context.tensor(x, spelled, place), *values, attr=dim, at=place)

    return emit


def _full_like(context: Context, spelled: str, x: Node, value: Node, fixed: dict[str, Any], at: ast.AST) -> Node:
    if fixed["dtype"] is not None and fixed["dtype"] not in BY_TORCH:
        raise context.fail("wrong_static", at, function=spelled, name="dtype", want="a dtype that values have")
    return context.emit("full_like", context.tensor(x, spelled, at), value, attr=fixed["dtype"], at=at)


def _linear_index(context: Context, spelled: str, x: Node, _: dict[str, Any], at: ast.AST) -> Node:
    return context.emit("linear_index", context.tensor(x, spelled, at), at=at)


def _dropout(context: Context, spelled: str, x: Node, p: Node, seed: Node, _: dict[str, Any], at: ast.AST) -> Node:
    x, p = context.tensor(x, spelled, at), context.emit("host", p, attr="probability", at=at)
    drawn = context.emit("philox_rand", seed, context.emit("linear_index", x, at=at), at=at)
    one = context.emit("const", attr=1.0, at=at)
    scale = context.emit("div", one, context.emit("sub", one, p, at=at), at=at)
    return context.emit("mul", context.emit("mul", context.emit("gt", drawn, p, at=at), x, at=at), scale, at=at)


def _debug_print(context: Context, spelled: str, x: Node, fixed: dict[str, Any], at: ast.AST) -> Node:
    if not isinstance(fixed["fmt"], str):
        raise context.fail("wrong_static", at, function=spelled, name="fmt", want="a string")
    if not _is_plain_format(fixed["fmt"]):
        raise context.fail("wrong_static", at, function=spelled, name="fmt", want="a format with one plain {}")
    return context.emit("debug_print", x, attr=fixed["fmt"], at=at)


def _is_plain_format(fmt: str) -> bool:
    """Whether `fmt` has at most one field, a plain {}, which reads nothing of the value but its text."""
    try:
        fields = [field[1:] for field in string.Formatter().parse(fmt) if field[1] is not None]
    except ValueError:
        return False
    return fields in ([], [("", "", None)])


_FORMS: dict[str, Callable[..., Any]] = {
    **layouts.FORMS,
    "cast": _cast,
    "index_m": _index("m"),
    "index_n": _index("n"),
    "index_l": _index("l"),
    "full_like": _full_like,
    "extent": _extent,
    "gather": _along("gather"),
    "index_along": _along("coordinate"),
    "linear_index": _linear_index,
    "dropout": _dropout,
    "assume_one_hot": _along("assume_one_hot"),
    "debug_print": _debug_print,
}


def _check_literals(context: Context, entry: Entry, positional: list[Any], named: dict[str, Any], at: ast.AST) -> None:
    """Raise if an argument has a value that its parameter's annotation does not allow: `gelu(approximate="fast")`."""
    for position, (name, parameter) in enumerate(entry.signature.parameters.items()):
        item = positional[position] if position < len(positional) else named.get(name)
        if item is None or (rule := literals.rule(parameter)) is None or isinstance(item, Pieces):
            continue  # the number of pieces is not known before type inference
        is_computed = isinstance(item, Node) and item.op != "const"
        value = item.value if isinstance(item, Static) else getattr(item, "attr", item)
        if rule.is_shape and not rule.holds(item.items if isinstance(item, TupleValue) else value):
            raise context.fail("wrong_static", at, function=entry.name, name=name, want=rule.want)
        if not (rule.is_shape or rule.holds(value) or (rule.is_number and is_computed)):
            if isinstance(value, Load):
                raise context.fail("choice_from_operand", at, function=entry.name, name=name, operand=value.name)
            said = {"want": rule.want, "value": value, "hint": choice_hint(value)}
            raise context.fail("wrong_choice", at, function=entry.name, name=name, **said)


def method(
    context: Context, receiver: Node, name: str, positional: list[Any], named: dict[str, Any], at: ast.AST
) -> Visit:
    """The call of a tensor method, `x.name(...)`."""
    spelled = f".{name}"
    receiver = context.tensor(receiver, spelled, at)
    if name in CAST_METHODS:
        if positional or named:
            raise context.fail("too_many_arguments", at, function=spelled, have=len(positional) + len(named), want="()")
        return _cast(context, spelled, receiver, {"dtype": CAST_METHODS[name]}, at)
    if name in ("to", "type"):
        if further := [key for key in named if key != "dtype"]:
            hint = parameter_hint(further[0])
            raise context.fail("unexpected_argument", at, function=spelled, name=further[0], want="(dtype)", hint=hint)
        item = named.pop("dtype", None) if not positional else positional.pop(0)
        if isinstance(item, DtypeOf) and not (positional or named):
            return context.emit("cast_like", receiver, item.value, at=at)
        if positional or named or not isinstance(item, Static) or not isinstance(item.value, torch.dtype):
            raise context.fail(
                "wrong_static",
                at,
                function=spelled,
                name="dtype",
                want="a dtype alone, as in .to(torch.bfloat16) or .to(x.dtype)",
            )
        return _cast(context, spelled, receiver, {"dtype": item.value}, at)
    if name in ("size", "numel"):
        given = [static(context, item, spelled, "dim", at) for item in (*positional, *named.values())]
        return parts.size(context, receiver, spelled, given, at)
    if name == "t":
        if positional or named:
            raise context.fail("too_many_arguments", at, function=spelled, have=len(positional) + len(named), want="()")
        return layouts.transposed(context, receiver, "T", at)
    if name == "view":
        for item in (*positional, *named.values()):
            if isinstance(item, Static) and isinstance(item.value, torch.dtype):
                raise context.fail("reinterpreted", at, dtype=item.value)
    if name in ("permute", "reshape", "view") and positional and not isinstance(positional[0], (TupleValue, Static)):
        positional = [TupleValue(tuple(positional))]
    positional = [receiver, *positional]
    return (
        yield vocabulary_call(context, FunctionRef(VOCABULARY[METHODS[name]], "torch", spelled), positional, named, at)
    )
