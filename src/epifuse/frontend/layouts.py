"""Calls of layout operations: `reshape`, `transpose`, `chunk` and similar ones."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from epifuse.frontend import parts
from epifuse.frontend.context import Context, Pieces, TupleValue
from epifuse.ir import Node

TRANSPOSES = {"T": ("t", ()), "mT": ("transpose", (-2, -1))}
"""Attributes of a tensor that are its transpose, each with the attribute of its `rearrange` node."""

SIZES = ("shape", "sizes", "split_size_or_sections", "normalized_shape")
"""Parameters whose integers may be computed from extents, as in `x.shape[0] // 2`."""


def integers(value: Any, *, sizes: bool = False) -> bool:
    """Whether `value` is a tuple of integers. If `sizes` is set, some may be nodes that are computed from extents."""
    return isinstance(value, tuple) and all(
        (isinstance(v, int) and not isinstance(v, bool) and v.bit_length() < 64) or (sizes and isinstance(v, Node))
        for v in value
    )


def _layout(op: str, name: str, want: str) -> Callable[..., Node]:
    def emit(context: Context, spelled: str, x: Node, fixed: dict[str, Any], at: ast.AST) -> Node:
        value = fixed[name] if isinstance(fixed[name], tuple) else (fixed[name],)
        if not integers(value, sizes=op == "reshape") or (op == "unsqueeze" and value is fixed[name]):
            raise context.fail("wrong_static", at, function=spelled, name=name, want=want)
        if op == "unsqueeze":
            return context.emit(op, context.tensor(x, spelled, at), attr=value[0], at=at)
        known, further = parts.numbers_and_nodes(value)
        return context.emit(op, context.tensor(x, spelled, at), *further, attr=known, at=at)

    return emit


def _rearranged(how: str, *names: str) -> Callable[..., Node]:
    def emit(context: Context, spelled: str, x: Node, fixed: dict[str, Any], at: ast.AST) -> Node:
        numbers = [fixed[name] if isinstance(fixed[name], tuple) else (fixed[name],) for name in names]
        held = zip(names, numbers, strict=True)
        if (wrong := next((n for n, own in held if not integers(own, sizes=n in SIZES)), None)) is not None:
            raise context.fail("wrong_static", at, function=spelled, name=wrong, want="an integer")
        known, further = parts.numbers_and_nodes([number for own in numbers for number in own])
        return context.emit("rearrange", context.tensor(x, spelled, at), *further, attr=(how, known), at=at)

    return emit


def transposed(context: Context, x: Node, name: str, at: ast.AST) -> Node:
    """The node of `x.T` or `x.mT`; `name` is the attribute."""
    return context.emit("rearrange", context.tensor(x, f".{name}", at), attr=TRANSPOSES[name], at=at)


def _chunk(context: Context, spelled: str, x: Node, fixed: dict[str, Any], at: ast.AST) -> TupleValue:
    count, dim = (whole(context, fixed, name, spelled, at) for name in ("chunks", "dim"))
    if not 0 < count <= parts.MOST:
        raise context.fail("wrong_static", at, function=spelled, name="chunks", want=f"from 1 to {parts.MOST}")
    x = context.tensor(x, spelled, at)
    return TupleValue(tuple(parts.emit(context, x, dim, "chunk", (count, i), at) for i in range(count)))


def _split(context: Context, spelled: str, x: Node, fixed: dict[str, Any], at: ast.AST) -> TupleValue | Pieces:
    sizes, dim = fixed["split_size_or_sections"], whole(context, fixed, "dim", spelled, at)
    sizes = sizes if isinstance(sizes, tuple) else (sizes,)
    if not integers(sizes, sizes=True) or min((n for n in sizes if isinstance(n, int)), default=1) < 1 or not sizes:
        name, want = "split_size_or_sections", "a positive integer, or several"
        raise context.fail("wrong_static", at, function=spelled, name=name, want=want)
    x = context.tensor(x, spelled, at)
    if isinstance(fixed["split_size_or_sections"], tuple):
        return TupleValue(tuple(parts.emit(context, x, dim, "sizes", (*sizes, i), at) for i in range(len(sizes))))
    return Pieces(lambda i, count: parts.emit(context, x, dim, "split", (*sizes, i, count), at))


def _unbind(context: Context, spelled: str, x: Node, fixed: dict[str, Any], at: ast.AST) -> Pieces:
    dim, x = whole(context, fixed, "dim", spelled, at), context.tensor(x, spelled, at)
    return Pieces(lambda i, count: parts.emit(context, x, dim, "element", (i, count), at))


def whole(context: Context, fixed: dict[str, Any], name: str, spelled: str, at: ast.AST) -> int:
    """The value of the argument `name`, which must be an integer."""
    if not integers((fixed[name],)):
        raise context.fail("wrong_static", at, function=spelled, name=name, want="an integer")
    return int(fixed[name])


def _roll(context: Context, spelled: str, x: Node, fixed: dict[str, Any], at: ast.AST) -> Node:
    one = {name: n[0] if isinstance(n, tuple) and len(n) == 1 else n for name, n in fixed.items()}
    shift, dim = (whole(context, one, name, spelled, at) for name in ("shifts", "dims"))
    return context.emit("roll", context.tensor(x, spelled, at), attr=(dim, shift), at=at)


FORMS: dict[str, Callable[..., Any]] = {
    "transpose": _rearranged("transpose", "dim0", "dim1"),
    "flatten": _rearranged("flatten", "start_dim", "end_dim"),
    "unflatten": _rearranged("unflatten", "dim", "sizes"),
    "squeeze": _rearranged("squeeze", "dim"),
    "roll": _roll,
    "chunk": _chunk,
    "split": _split,
    "unbind": _unbind,
    "permute": _layout("permute", "dims", "integers"),
    "reshape": _layout("reshape", "shape", "integers"),
    "unsqueeze": _layout("unsqueeze", "dim", "an integer"),
}
