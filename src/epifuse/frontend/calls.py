"""Calls: arguments bound to signatures, the vocabulary's forms, tensor methods, and the signature of the epilogue."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import torch

from epifuse.frontend.names import FunctionRef, Static
from epifuse.frontend.source import Source
from epifuse.fusion import host
from epifuse.fusion.vocabulary import CAST_METHODS, METHODS, REQUIRED_IN_TORCH, VOCABULARY, Entry, is_static
from epifuse.ir import Load, Node, Output

if TYPE_CHECKING:
    from epifuse.frontend.python_function import Parser

Visit = Generator[Any, Any, Any]
METHOD_FORMS = frozenset({"to", "type", *CAST_METHODS})
_ALL_TENSORS_IN_TORCH = frozenset({"maximum", "minimum", "logical_and", "logical_or"})
_NUMBERS_FIRST_IN_TORCH = frozenset({"pow", "where"})
_TORCH_PARAMETERS = {"input": 0, "other": 1, "self": 0, "exponent": 1}


# --- the epilogue itself ---------------------------------------------------------------------------------------


def epilogue_parameters(
    parser: Parser, source: Source, function: Callable[..., Any] | str
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Operand names in order, and the defaults some of them have."""
    arguments = source.parameters
    for star in (arguments.vararg, arguments.kwarg):
        if star is not None:
            raise parser.fail("star_parameters", star, name=star.arg)
    positional = [*arguments.posonlyargs, *arguments.args]
    declared = [*positional, *arguments.kwonlyargs]
    if "accum" not in [argument.arg for argument in declared]:
        raise parser.fail("no_accum", source.definition)
    if not positional or positional[0].arg != "accum":
        raise parser.fail("accum_not_first", next(a for a in declared if a.arg == "accum"))
    pairs = list(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
    defaults: dict[str, Any] = {}
    for argument, expression in pairs:
        value = _default_value(function, argument.arg, expression)
        if argument.arg == "accum" or not isinstance(value, (bool, int, float)):
            raise parser.fail("default_not_a_number", expression, name=argument.arg)
        defaults[argument.arg] = value
    return tuple(argument.arg for argument in declared[1:]), defaults


def _default_value(function: Callable[..., Any] | str, name: str, expression: ast.expr) -> Any:
    if not isinstance(function, str):
        return inspect.signature(function).parameters[name].default
    try:
        return ast.literal_eval(expression)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def outputs_of(parser: Parser, source: Source, result: Any) -> tuple[Output, ...]:
    """Names and nodes of what the epilogue returns; one unnamed result is `D`."""
    returned = _returned(source)
    items = getattr(result, "items", (result,)) if not isinstance(result, Node) else (result,)
    if isinstance(returned, (ast.Tuple, ast.List)):
        elements = returned.elts
    elif isinstance(result, Node) or not hasattr(result, "items"):
        elements = [returned]
    else:
        raise parser.fail("unnamed_outputs", returned)
    if not elements:
        raise parser.fail("returns_nothing", returned, name=source.name)
    parameters = parser.frame.scope and {a.arg for a in (*source.parameters.args, *source.parameters.kwonlyargs)}
    outputs: dict[str, Output] = {}
    for element, item in zip(elements, items, strict=True):
        if not isinstance(element, ast.Name) and len(elements) > 1:
            raise parser.fail("unnamed_output", element)
        name = element.id if isinstance(element, ast.Name) else "D"
        if name != "accum" and name in parameters and not parser.frame.reassign:
            raise parser.fail("returns_input", element, name=name)
        if name in outputs:
            raise parser.fail("returned_twice", element, name=name)
        outputs[name] = Output(name, parser.value(item, element))
    return tuple(outputs.values())


def _returned(source: Source) -> ast.expr:
    definition = source.definition
    if isinstance(definition, ast.Lambda):
        return definition.body
    last = definition.body[-1]
    assert isinstance(last, ast.Return) and last.value is not None, "body() has returned, so it ended in a return"
    return last.value


# --- binding ---------------------------------------------------------------------------------------------------


def bind(
    parser: Parser,
    function: Callable[..., Any],
    source: Source,
    positional: list[Any],
    named: dict[str, Any],
    at: ast.AST,
) -> dict[str, Any]:
    """Arguments of a helper or macro by parameter name."""
    for star in (source.parameters.vararg, source.parameters.kwarg):
        if star is not None:
            raise parser.fail("star_in_helper", at, name=source.name, star=star.arg)
    return _bind(parser, inspect.signature(function), source.name, positional, named, at)


def _bind(
    parser: Parser, signature: inspect.Signature, name: str, positional: list[Any], named: dict[str, Any], at: ast.AST
) -> dict[str, Any]:
    parameters = signature.parameters
    slots = [p for p in parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    if len(positional) > len(slots):
        raise parser.fail("too_many_arguments", at, function=name, have=len(positional), want=_show(signature))
    bound = {slot.name: item for slot, item in zip(slots, positional, strict=False)}
    for key, item in named.items():
        if key not in parameters or parameters[key].kind is inspect.Parameter.POSITIONAL_ONLY:
            raise parser.fail("unexpected_argument", at, function=name, name=key, want=_show(signature))
        if key in bound:
            raise parser.fail("argument_twice", at, function=name, name=key)
        bound[key] = item
    for parameter in parameters.values():
        if parameter.name in bound:
            continue
        if parameter.default is inspect.Parameter.empty:
            raise parser.fail("missing_argument", at, function=name, name=parameter.name, want=_show(signature))
        bound[parameter.name] = _default(parser, parameter.default, name, at)
    return bound


def _show(signature: inspect.Signature) -> str:
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(bare))


def _default(parser: Parser, value: Any, function: str, at: ast.AST) -> Any:
    if isinstance(value, (bool, int, float)):
        return parser.emit("const", attr=value, at=at)
    if value is None or isinstance(value, (str, torch.dtype, tuple)):
        return Static(value)
    raise parser.fail("default_not_supported", at, function=function, value=type(value).__name__)


def static(parser: Parser, item: Any, function: str, name: str, at: ast.AST) -> Any:
    """The value of an argument that must be known when the epilogue is parsed."""
    if isinstance(item, Static):
        return item.value
    if isinstance(item, Node) and all(map(host.is_host_operation, _above_loads(item))):
        return host.evaluate(item, lambda load: _captured(parser, load, function, name, at))
    if hasattr(item, "items"):
        return tuple(static(parser, element, function, name, at) for element in item.items)
    raise parser.fail("not_static", at, function=function, name=name)


def _above_loads(root: Node) -> Iterator[Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        if node.op != "load":
            yield node
        stack.extend(node.args)


def _captured(parser: Parser, load: Node, function: str, name: str, at: ast.AST) -> Any:
    assert isinstance(load.attr, Load)
    reader = parser.captures.get(load.attr.name)
    if reader is None:
        raise parser.fail("not_static", at, function=function, name=name)
    value = reader()
    parser.guards.append((reader, value))
    return value


# --- the vocabulary --------------------------------------------------------------------------------------------


def vocabulary_call(
    parser: Parser, ref: FunctionRef, positional: list[Any], named: dict[str, Any], at: ast.AST
) -> Visit:
    """A call of one of our names, of torch's, or of a builtin we rebind."""
    entry, spelled = ref.entry, ref.spelled
    if ref.origin == "torch":
        positional, named = _as_torch(parser, entry, spelled, positional, named, at)
    if entry.group == "macro":
        _check_literals(parser, entry, positional, named, at)
        return (yield parser.inline(entry.function, positional, named, at, library=True))  # type: ignore[arg-type]
    if entry.name in ("permute", "reshape") and len(positional) > 2:
        positional = [positional[0], _packed(positional[1:])]
    bound = _bind(parser, entry.signature, spelled, positional, named, at)
    return _emit(parser, entry, spelled, bound, at)


def _packed(items: list[Any]) -> Any:
    from epifuse.frontend.python_function import TupleValue

    return TupleValue(tuple(items))


def _emit(parser: Parser, entry: Entry, spelled: str, bound: dict[str, Any], at: ast.AST) -> Node:
    parameters = entry.signature.parameters
    fixed = {name: static(parser, bound[name], spelled, name, at) for name, p in parameters.items() if is_static(p)}
    values = [parser.value(bound[name], at) for name, p in parameters.items() if not is_static(p)]
    if entry.group == "primitive":
        return parser.emit(entry.name, *values, at=at)
    if entry.group == "activation":
        return parser.emit("call", *values, attr=entry.name, at=at)
    if entry.group == "reduction":
        dim = _dims(parser, fixed["dim"], spelled, at)
        if not isinstance(fixed["keepdim"], bool):
            raise parser.fail("wrong_static", at, function=spelled, name="keepdim", want="True or False")
        return parser.emit("reduce", *values, attr=(entry.name, dim, fixed["keepdim"]), at=at)
    return _FORMS[entry.name](parser, spelled, values[0], fixed, at)


def _dims(parser: Parser, dim: Any, spelled: str, at: ast.AST) -> tuple[int, ...] | None:
    dims = (dim,) if isinstance(dim, int) and not isinstance(dim, bool) else dim
    if dims is not None and not _integers(dims):
        raise parser.fail("wrong_static", at, function=spelled, name="dim", want="an integer or a tuple of integers")
    # torch reads an empty tuple as "every dim".
    return dims or None


def _integers(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)


def _cast(parser: Parser, spelled: str, x: Node, fixed: dict[str, Any], at: ast.AST) -> Node:
    if not isinstance(fixed["dtype"], torch.dtype):
        raise parser.fail("wrong_static", at, function=spelled, name="dtype", want="a torch dtype")
    return parser.emit("cast", parser.tensor(x, spelled, at), attr=fixed["dtype"], at=at)


def _layout(op: str, name: str) -> Callable[..., Node]:
    def emit(parser: Parser, spelled: str, x: Node, fixed: dict[str, Any], at: ast.AST) -> Node:
        value = (fixed[name],) if isinstance(fixed[name], int) and op != "unsqueeze" else fixed[name]
        if not (_integers(value) or (op == "unsqueeze" and isinstance(value, int))):
            raise parser.fail("wrong_static", at, function=spelled, name=name, want="integers")
        return parser.emit(op, parser.tensor(x, spelled, at), attr=value, at=at)

    return emit


def _index(axis: str) -> Callable[..., Node]:
    def emit(parser: Parser, spelled: str, x: Node, _: dict[str, Any], at: ast.AST) -> Node:
        return parser.emit("index", parser.tensor(x, spelled, at), attr=axis, at=at)

    return emit


def _debug_print(parser: Parser, spelled: str, x: Node, fixed: dict[str, Any], at: ast.AST) -> Node:
    if not isinstance(fixed["fmt"], str):
        raise parser.fail("wrong_static", at, function=spelled, name="fmt", want="a string")
    try:
        fixed["fmt"].format(0.0)
    except (LookupError, ValueError, AttributeError, TypeError):
        raise parser.fail("wrong_static", at, function=spelled, name="fmt", want="a format with one {}") from None
    return parser.emit("debug_print", x, attr=fixed["fmt"], at=at)


_FORMS: dict[str, Callable[..., Node]] = {
    "cast": _cast,
    "permute": _layout("permute", "dims"),
    "reshape": _layout("reshape", "shape"),
    "unsqueeze": _layout("unsqueeze", "dim"),
    "index_m": _index("m"),
    "index_n": _index("n"),
    "index_l": _index("l"),
    "debug_print": _debug_print,
}


def _check_literals(parser: Parser, entry: Entry, positional: list[Any], named: dict[str, Any], at: ast.AST) -> None:
    """`gelu(approximate="fast")`: the values a Literal annotation allows."""
    for position, (name, parameter) in enumerate(entry.signature.parameters.items()):
        if not str(parameter.annotation).startswith("Literal["):
            continue
        item = positional[position] if position < len(positional) else named.get(name)
        allowed = ast.literal_eval(str(parameter.annotation).removeprefix("Literal"))
        if item is not None and not (isinstance(item, Static) and item.value in allowed):
            raise parser.fail("wrong_static", at, function=entry.name, name=name, want=" or ".join(map(repr, allowed)))


def _as_torch(
    parser: Parser, entry: Entry, spelled: str, positional: list[Any], named: dict[str, Any], at: ast.AST
) -> tuple[list[Any], dict[str, Any]]:
    """What torch's function of that name accepts and ours is laxer about: accepted implies runnable."""
    parameters = list(entry.signature.parameters)
    named = {
        parameters[_TORCH_PARAMETERS[key]] if key in _TORCH_PARAMETERS and key not in parameters else key: item
        for key, item in named.items()
    }
    if entry.name in ("max", "min"):
        second = positional[1] if len(positional) > 1 else None
        if "dim" in named or (isinstance(second, Node) and second.op == "const"):
            raise parser.fail("max_pair", at, function=spelled, name=entry.name)
    if entry.name == "norm" and len(positional) > 1:
        raise parser.fail("norm_order", at)
    required = REQUIRED_IN_TORCH.get(entry.name)
    if required and required not in named and len(positional) < 2:
        raise parser.fail("missing_argument", at, function=spelled, name=required, want="(x, dim)")
    if entry.name not in _NUMBERS_FIRST_IN_TORCH:
        count = len(positional) if entry.name in _ALL_TENSORS_IN_TORCH else 1
        positional = [parser.tensor(item, spelled, at) if i < count else item for i, item in enumerate(positional)]
    return positional, named


def method(
    parser: Parser, receiver: Node, name: str, positional: list[Any], named: dict[str, Any], at: ast.AST
) -> Visit:
    """`x.name(...)`."""
    spelled = f".{name}"
    receiver = parser.tensor(receiver, spelled, at)
    if name in CAST_METHODS:
        if positional or named:
            raise parser.fail("too_many_arguments", at, function=spelled, have=len(positional), want="()")
        return _cast(parser, spelled, receiver, {"dtype": CAST_METHODS[name]}, at)
    if name in ("to", "type"):
        item = named.pop("dtype", None) if not positional else positional.pop(0)
        if positional or named or not isinstance(item, Static) or not isinstance(item.value, torch.dtype):
            raise parser.fail("wrong_static", at, function=spelled, name="dtype", want="a torch dtype and nothing else")
        return _cast(parser, spelled, receiver, {"dtype": item.value}, at)
    ref = FunctionRef(VOCABULARY[METHODS[name]], "torch", spelled)
    return (yield vocabulary_call(parser, ref, [receiver, *positional], named, at))


def subscript_steps(keys: list[ast.expr], refuse: Callable[[ast.AST], Exception]) -> list[int]:
    """`x[:, None]` as the positions to unsqueeze, counted as they happen; negative ones count from the end."""
    full = [k for k in keys if isinstance(k, ast.Slice) and k.lower is None and k.upper is None and k.step is None]
    dots = [k for k in keys if isinstance(k, ast.Constant) and k.value is ...]
    new = [k for k in keys if isinstance(k, ast.Constant) and k.value is None]
    if len(full) + len(dots) + len(new) != len(keys) or len(dots) > 1 or not new:
        raise refuse(next((k for k in keys if k not in full and k not in dots and k not in new), keys[0]))
    if not dots:
        return [position for position, key in enumerate(keys) if key in new]
    split = keys.index(dots[0])
    before = [position for position, key in enumerate(keys[:split]) if key in new]
    after = [position - len(keys) for position, key in enumerate(keys) if position > split and key in new]
    # From the end, the last one first: each insertion then counts dims that are already in place.
    return before + after[::-1]
