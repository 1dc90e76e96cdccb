"""How kinds combine: one function for each rule that a primitive names. The rules are PyTorch's, but refuse more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from epifuse.frontend import activation_body
from epifuse.fusion.primitives import PRIMITIVES, Primitive
from epifuse.fusion.reduction import REDUCTIONS
from epifuse.ir import Graph, Kind, Node
from epifuse.ir.graph import applied
from epifuse.ir.types import INT32, promote

NAMES: Mapping[str, str] = {
    "mask": "a mask",
    "int32": "an int32",
    "int64": "an int64",
    "int": "an integer",
    "float": "a float",
}


class KindError(Exception):
    """Kinds that do not combine. `key` and `values` select the sentence in the catalogue; the caller adds the place."""

    def __init__(self, key: str, **values: str) -> None:
        super().__init__(key)
        self.key = key
        self.values = values


def _arithmetic(row: Primitive, kinds: Sequence[Kind]) -> Kind:
    if all(kind == "mask" for kind in kinds):
        raise KindError("masks_in_arithmetic", op=row.name)
    return promote(kinds)


def _subtract(row: Primitive, kinds: Sequence[Kind]) -> Kind:
    if "mask" in kinds:
        raise KindError("masks_in_arithmetic", op=row.name)
    return promote(kinds)


def _floating(row: Primitive, kinds: Sequence[Kind]) -> Kind:
    _arithmetic(row, kinds)
    return "float"


def _power(row: Primitive, kinds: Sequence[Kind]) -> Kind:
    # An integer power of an integer is refused by the caller unless the exponent is a literal >= 0.
    return _arithmetic(row, kinds)


def _same(row: Primitive, kinds: Sequence[Kind]) -> Kind:
    return _arithmetic(row, kinds)


def _compare(row: Primitive, kinds: Sequence[Kind]) -> Kind:
    return "mask"


def _logic(row: Primitive, kinds: Sequence[Kind]) -> Kind:
    for kind in kinds:
        if kind != "mask":
            raise KindError("mask_wanted", op=row.symbol or "~", kind=NAMES[kind])
    return "mask"


def _bits(row: Primitive, kinds: Sequence[Kind]) -> Kind:
    for kind in kinds:
        if kind == "float":
            raise KindError("bits_wanted", op=row.symbol or "~", kind=NAMES[kind])
    return promote(kinds)


def _integer(row: Primitive, kinds: Sequence[Kind]) -> Kind:
    for kind in kinds:
        if kind not in ("int32", "int64"):
            raise KindError("integers_wanted", op=row.symbol or row.name, kind=NAMES[kind])
    return promote(kinds)


def _random(row: Primitive, kinds: Sequence[Kind]) -> Kind:
    _integer(row, kinds)
    return "float"


def _select(row: Primitive, kinds: Sequence[Kind]) -> Kind:
    if kinds[0] != "mask":
        raise KindError("mask_wanted", op=row.name, kind=NAMES[kinds[0]])
    return promote(kinds[1:])


_RULES: dict[str, Callable[[Primitive, Sequence[Kind]], Kind]] = {
    "arithmetic": _arithmetic,
    "subtract": _subtract,
    "floating": _floating,
    "divide": _floating,
    "power": _power,
    "same": _same,
    "compare": _compare,
    "logic": _logic,
    "bits": _bits,
    "integer": _integer,
    "select": _select,
    "random": _random,
}


def primitive_kind(name: str, kinds: Sequence[Kind]) -> Kind:
    """Kind of a primitive's result. Raises `KindError`."""
    row = PRIMITIVES[name]
    return _RULES[row.rule](row, kinds)


def reduction_kind(name: str, kind: Kind) -> Kind:
    """Kind of a reduction's result. Raises `KindError`."""
    rule = REDUCTIONS[name].rule
    if rule == "float" and kind != "float":
        raise KindError("float_wanted", op=name, kind=NAMES[kind])
    if rule in ("ordered", "squares") and kind == "mask":
        raise KindError("masks_in_arithmetic", op=name)
    if rule == "mask":
        return "mask"
    return "int64" if rule in ("sum", "squares") and kind != "float" else kind


@cache
def activation_kind(name: str, kinds: tuple[Kind, ...]) -> Kind:
    """Kind of an activation's result: the rules applied to its body. Raises `KindError`."""
    body = activation_body(name)
    return kinds_of_body(body, kinds)[body.outputs[0].node]


def kinds_of_body(body: Graph, kinds: Sequence[Kind]) -> dict[Node, Kind]:
    """The kind of each node of an activation's body for parameters of these kinds. Raises `KindError`."""
    return applied(body, kinds, _kind)


def _kind(node: Node, args: tuple[Kind, ...]) -> Kind:
    if node.op == "const":
        return const_kind(node.attr)
    return activation_kind(str(node.attr), args) if node.op == "call" else primitive_kind(node.op, args)


def const_kind(value: object) -> Kind:
    """Kind of a Python number: an integer that an int32 cannot hold is an int64."""
    if isinstance(value, int) and not isinstance(value, bool):
        return "int32" if value in INT32 else "int64"
    return "mask" if isinstance(value, bool) else "float"


def fitting(value: Any, bits: int) -> Any:
    """`value`. Raises `KindError` for an integer that a signed integer of `bits` bits cannot hold."""
    if isinstance(value, int) and not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise KindError("literal_range", bits=str(value.bit_length()))
    return value


_INTEGER_MATH = frozenset({"floor", "ceil", "trunc", "gcd", "lcm", "comb", "perm", "factorial", "isqrt"})
_TRUTH_MATH = frozenset({"isnan", "isinf", "isfinite", "isclose", "not", "chained comparison"})


def host_kind(op: str, attr: object, kinds: Sequence[Kind], exponent: object = None) -> Kind:
    """Kind of a host expression, as Python's arithmetic gives it. `exponent` is that of a pow, if it is a literal."""
    if op == "host":
        if attr in _TRUTH_MATH:
            return "mask"
        if attr in ("and", "or"):
            return promote(kinds)
        if attr == "bounds":
            return kinds[0]
        return "int" if attr in _INTEGER_MATH else "float"
    if op == "select":
        return promote(kinds[1:])
    if op in ("floor", "ceil", "round"):
        return "int"
    if op == "pow":
        exact = "float" not in kinds and isinstance(exponent, int) and exponent >= 0
        return "int" if exact else "float"
    if op == "number":
        return promote([*kinds, "int"])
    row = PRIMITIVES[op]
    if row.rule in ("compare", "logic"):
        return "mask"
    if row.rule == "bits" and _bits(row, kinds) == "mask":
        return "mask"
    if row.rule in ("floating", "divide", "random"):
        return "float"
    if row.rule == "select":
        return promote(kinds[1:])
    return promote([*kinds, "int"])


def of_one(name: str, x: Node, kind: Kind, emit: Callable[..., Node], zero: Callable[[], Node]) -> Node:
    """The node for the reduction `name` of the single element `x`; its result has this `kind`. `emit(op, *args, attr=,
    kind=)` makes nodes, and `zero()` gives an integer 0."""
    wide = emit("cast", x, attr=torch.int64, kind=kind) if kind == "int64" else x
    match REDUCTIONS[name].of_one:
        case "square":
            return emit("mul", wide, wide, kind=kind)
        case "size":
            return emit("abs", x, kind=kind)
        case "truth":
            return emit("ne", x, zero(), kind="mask")
    return wide
