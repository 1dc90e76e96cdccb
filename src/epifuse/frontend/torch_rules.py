"""What torch's functions demand of a call, beyond our functions of the same names.

A call through torch is accepted only if PyTorch itself could run it. Rules that need types become `torch` nodes of the
graph, which `passes.torch_rules` checks and removes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from inspect import Signature
from typing import Any, NamedTuple

from epifuse.frontend.context import Context, TupleValue
from epifuse.frontend.hints import norm_hint
from epifuse.frontend.names import Static, known
from epifuse.fusion.vocabulary import Entry
from epifuse.ir import Node

Binder = Callable[[Signature, list[Any], dict[str, Any]], dict[str, Any]]


class Asks(NamedTuple):
    """What one function of torch demands beyond our signature."""

    rules: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Rules of `passes.torch_rules`, each with its parameters. A rule is checked with types, if they are all given."""
    required: tuple[str, ...] = ()
    """Parameters that a call must give, and not as None, although our signature has a default for them."""
    with_dim: bool = False
    """Whether `keepdim` may be given only together with `dim`."""
    one_dim: bool = False
    """Whether `dim` must be an integer, not a tuple."""
    by_name: str = ""
    """A parameter that may be passed by name only."""
    either: tuple[str, ...] = ()
    """Parameters of which a call may give at most one. The first must be True or False."""


_TENSOR, _NUMBER, _FLOAT, _NO_MASK, _SAME_FLOATS = "tensor", "number", "float", "no mask", "same floats"
_BOTH = Asks(((_TENSOR, ("x",)), (_TENSOR, ("y",))))
_FLOATS = Asks(((_TENSOR, ("x",)), (_FLOAT, ("x",))))
_TERMS = Asks(
    (
        *((_TENSOR, (name,)) for name in ("x", "tensor1", "tensor2")),
        (_NUMBER, ("value",)),
        (_SAME_FLOATS, ("x", "tensor1", "tensor2")),
    )
)
_LOGITS = Asks((*_FLOATS.rules, (_TENSOR, ("target",)), ("logits", ("target", "x")), ("whole", ("target",))))
_ANYTHING = Asks(((_TENSOR, ("x",)),))


def _numbers(kind: str, *parameters: str) -> Asks:
    return Asks(((_TENSOR, ("x",)), (kind, ("x",)), *((_NUMBER, (name,)) for name in parameters)))


ASKS: dict[str, Asks] = {
    "pow": Asks((("not all numbers", ("x", "y")),)),
    "where": Asks(((_TENSOR, ("condition",)),)),
    "clamp": Asks(((_TENSOR, ("x",)), ("alike", ("min", "max")))),
    **dict.fromkeys(("maximum", "minimum", "atan2", "logical_and", "logical_or", "max", "min"), _BOTH),
    **dict.fromkeys(("silu", "logsigmoid", "hardswish", "hardsigmoid", "mish", "selu"), _FLOATS),
    "masked_fill": Asks(
        (
            *((_TENSOR, (name,)) for name in ("x", "mask")),
            ("mask", ("mask",)),
            (_NUMBER, ("value",)),
            (_NO_MASK, ("x",)),
            ("held", ("x", "value")),
        )
    ),
    **dict.fromkeys(("clamp_min", "clamp_max"), _numbers(_NO_MASK)),
    "lerp": Asks(((_TENSOR, ("x",)), (_TENSOR, ("end",)), (_SAME_FLOATS, ("x", "end", "weight")))),
    **dict.fromkeys(("addcmul", "addcdiv"), _TERMS),
    **dict.fromkeys(("cross_entropy", "nll_loss"), _LOGITS),
    "logaddexp": Asks((*_BOTH.rules, (_FLOAT, ("x",)), (_FLOAT, ("y",)))),
    **dict.fromkeys(("rms_norm", "layer_norm"), _numbers(_FLOAT, "eps")),
    "nan_to_num": _numbers(_FLOAT, "nan", "posinf", "neginf"),
    **dict.fromkeys(("var", "std"), _numbers(_FLOAT, "correction")._replace(either=("unbiased", "correction"))),
    **dict.fromkeys(("argmax", "argmin"), Asks(_ANYTHING.rules, one_dim=True)),
    "full_like": Asks((*_ANYTHING.rules, (_NUMBER, ("fill_value",)))),
    "gather": Asks((*_ANYTHING.rules, (_TENSOR, ("index",)))),
    **dict.fromkeys(("relu", "relu6"), _numbers(_NO_MASK)),
    "gelu": Asks(_FLOATS.rules, by_name="approximate"),
    "leaky_relu": _numbers(_FLOAT, "negative_slope"),
    "softplus": _numbers(_FLOAT, "beta", "threshold"),
    "elu": _numbers(_FLOAT, "alpha"),
    "hardtanh": _numbers(_FLOAT, "min_val", "max_val"),
    "threshold": _numbers(_FLOAT, "threshold", "value"),
    "prelu": Asks(((_TENSOR, ("x",)), (_TENSOR, ("weight",)), ("prelu weight", ("x", "weight")))),
    **dict.fromkeys(("sum", "mean"), Asks(_ANYTHING.rules, with_dim=True)),
    "prod": Asks(_ANYTHING.rules, with_dim=True, one_dim=True),
    "logsumexp": Asks(_ANYTHING.rules, required=("dim",)),
    **dict.fromkeys(("softmax", "log_softmax"), Asks(_FLOATS.rules, required=("dim",), one_dim=True)),
}


def bound(
    context: Context,
    entry: Entry,
    spelled: str,
    positional: list[Any],
    named: dict[str, Any],
    at: ast.AST,
    bind: Binder,
) -> dict[str, Any]:
    """Bind and check the arguments of torch's function or method. Return them by our parameter names."""
    if entry.name in ("max", "min") and _is_pair(positional, named):
        raise context.fail("max_pair", at, function=spelled, name=entry.name)
    if entry.name == "norm":
        positional, named = _without_order(context, positional, named, at)
    theirs = _names(entry, spelled)
    parameters = [p.replace(name=theirs[p.name]) for p in entry.signature.parameters.values()]
    if spelled == ".where":
        # x.where(condition, y), where the function is where(condition, x, y).
        parameters = [parameters[1], parameters[0], parameters[2]]
    asks = ASKS.get(entry.name, _ANYTHING)
    order = [p.name for p in parameters]
    if asks.by_name and len(positional) > order.index(asks.by_name):
        raise context.fail("by_name", at, function=spelled, name=asks.by_name)
    given = {*order[: len(positional)], *named}
    arguments = bind(entry.signature.replace(parameters=parameters), positional, named)
    _check_presence(context, asks, spelled, arguments, given, at)
    bounds = [context.value(arguments[name], at) for name in ("min_val", "max_val") if name in arguments]
    if [bound.op for bound in bounds] == ["const", "const"] and bounds[0].attr > bounds[1].attr:
        raise context.fail("wrong_static", at, function=spelled, name="min_val", want="at most max_val")
    if bounds:
        arguments["min_val"] = context.emit("host", *bounds, attr="bounds", at=at)
    _check_shape(context, entry, spelled, arguments, at)
    ours = {name: arguments[theirs[name]] for name in entry.signature.parameters}
    return _with_rules(context, asks, spelled, ours, at)


def _without_order(
    context: Context, positional: list[Any], named: dict[str, Any], at: ast.AST
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a norm without its order, as in norm(2, dim=-1). Raises unless the order is 2."""
    orders = [*positional[1:2], *([named["p"]] if "p" in named else [])]
    if not all(isinstance(order, Node) and order.op == "const" and order.attr == 2 for order in orders):
        raise context.fail("norm_order", at, hint=norm_hint(known(orders[0])))
    return positional[:1] + positional[2:], {name: value for name, value in named.items() if name != "p"}


def _names(entry: Entry, spelled: str) -> dict[str, str]:
    """torch's name for each of our parameters."""
    second = "exponent" if entry.name == "pow" else "other"
    renamed = {"x": "input", "y": second} | ({"split_size_or_sections": "split_size"} if spelled == ".split" else {})
    return {name: renamed.get(name, name) for name in entry.signature.parameters}


def _is_pair(positional: list[Any], named: dict[str, Any]) -> bool:
    second = positional[1] if len(positional) > 1 else None
    return "dim" in named or "keepdim" in named or (isinstance(second, Node) and second.op == "const")


def _check_presence(
    context: Context, asks: Asks, spelled: str, arguments: dict[str, Any], given: set[str], at: ast.AST
) -> None:
    needed = asks.required + (("dim",) if asks.with_dim and "keepdim" in given else ())
    for name in needed:
        absent = name not in given or (asks.required and arguments[name] == Static(None))
        if absent:
            raise context.fail("missing_argument", at, function=spelled, name=name, want="(input, dim, ...)")
    both = [name for name in asks.either if name in given]
    if len(both) > 1:
        raise context.fail("argument_twice", at, function=spelled, name=" or ".join(both))
    if asks.either and asks.either[0] in both:
        item = arguments[asks.either[0]]
        if not (isinstance(item, Node) and item.op == "const" and isinstance(item.attr, bool)):
            raise context.fail("wrong_static", at, function=spelled, name=asks.either[0], want="True or False")
    dim = arguments.get("dim")
    if asks.one_dim and (isinstance(dim, TupleValue) or (isinstance(dim, Static) and isinstance(dim.value, tuple))):
        raise context.fail("wrong_static", at, function=spelled, name="dim", want="an integer")


def _check_shape(context: Context, entry: Entry, spelled: str, arguments: dict[str, Any], at: ast.AST) -> None:
    name = {"reshape": "shape", "permute": "dims"}.get(entry.name)
    if name and isinstance(arguments[name], Node) and not (entry.name == "reshape" and spelled.startswith(".")):
        raise context.fail("wrong_static", at, function=spelled, name=name, want="a tuple of integers")


def _with_rules(context: Context, asks: Asks, spelled: str, ours: dict[str, Any], at: ast.AST) -> dict[str, Any]:
    rules = asks.rules or ((_TENSOR, (next(iter(ours)),)),)
    for rule, names in rules:
        items = [ours[name] for name in names if name in ours and ours[name] != Static(None)]
        if len(items) == len(names) and not any(isinstance(item, TupleValue) for item in items):
            values = [context.value(item, at) for item in items]
            ours = ours | {names[0]: context.emit("torch", *values, attr=(rule, spelled), at=at)}
    return ours
