"""Parts of a value: `x[..., :64]`, `x.chunk(2, -1)[0]`; `x[:, None]`, which inserts a dim; its extents: `x.shape`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from epifuse.frontend.context import Context, Pieces, TupleValue
from epifuse.ir import Node
from epifuse.ir.graph import topological
from epifuse.ir.types import LAST

MOST = 1024
"""The most parts of one value. Each part is a node."""


def emit(context: Context, x: Node, dim: int, how: str, numbers: Sequence[int | Node], at: ast.AST) -> Node:
    """The node of one part of x, which type inference takes from `dim`. `passes.parts.part_of` explains `how` and
    `numbers`."""
    known, further = numbers_and_nodes(numbers)
    return context.emit("part", x, *further, attr=(dim, how, known), at=at)


def numbers_and_nodes(numbers: Iterable[int | Node]) -> tuple[tuple[int | None, ...], list[Node]]:
    """Split `numbers` into an attribute, with None in the place of each node, and the nodes, which become arguments."""
    numbers = tuple(numbers)
    known = tuple(None if isinstance(number, Node) else number for number in numbers)
    return known, [number for number in numbers if isinstance(number, Node)]


def numbers_below(root: Node) -> Iterator[Node]:
    """Yield the nodes of an expression of numbers, users first. The tensors below its extents are left out."""
    reached = {root}
    for node in reversed(topological((root,))):
        if node in reached:
            yield node
            reached.update(node.args if node.op != "extent" else ())


def item(context: Context, base: TupleValue | Pieces, place: Any, at: ast.AST) -> Any:
    """`base[place]`, where `base` is several values."""
    if not isinstance(place, int) or isinstance(place, bool):
        raise context.fail("unsupported_subscript", at)
    if isinstance(base, Pieces):
        if abs(place) > MOST:
            raise context.fail("unsupported_subscript", at)
        return base.piece(place, 0)
    if not -len(base.items) <= place < len(base.items):
        raise context.fail("item_range", at, place=place, have=len(base.items))
    return base.items[place]


def sliced(context: Context, base: TupleValue | Pieces, ends: Sequence[Any], at: ast.AST) -> TupleValue | Pieces:
    """`base[start:stop:step]`, where `base` is several values; they are sliced like a tuple."""
    if ends[2] == 0 or not all(end is None or _is_bound(end) for end in ends):
        raise context.fail("unsupported_subscript", at)
    cut = slice(*ends)
    if isinstance(base, TupleValue):
        return TupleValue(base.items[cut])

    def piece(i: int, count: int) -> Node:
        whole, place = _sliced_place(cut, i, count) or (None, 0)
        if whole is None:
            raise context.fail("sliced_parts", at)
        return base.piece(place, whole)

    return Pieces(piece)


def _sliced_place(cut: slice, i: int, count: int) -> tuple[int, int] | None:
    """The place among all parts of item `i` of a slice of them, and the number of all parts.

    That number is 0 if the place is the same for any number of parts. `count` is how many items the slice must have, or
    0 if that is not known. None if this does not determine the place.
    """
    found = [
        (have, range(have)[cut][i])
        for have in range(MOST + 1)
        if -(length := len(range(have)[cut])) <= i < length and count in (0, length)
    ]
    if count and len(found) == 1:
        return found[0]
    if not found or found[0][0] + len(found) != MOST + 1:
        return None
    from_front, from_end = {place for _, place in found}, {place - have for have, place in found}
    for places in (from_front, from_end):
        if len(places) == 1:
            return 0, places.pop()
    return None


def joined(context: Context, how: str, spelled: str, values: Any, dim: int, at: ast.AST) -> Node:
    """Join several values. `how` is "cat" or "stack", `spelled` the function's name in errors."""
    if not isinstance(values, TupleValue) or not 0 < len(values.items) <= MOST:
        want = f"a list of 1 to {MOST} values"
        raise context.fail("wrong_static", at, function=spelled, name="tensors", want=want)
    nodes = [context.tensor(context.value(item, at), spelled, at) for item in values.items]
    return context.emit("join", *nodes, attr=(dim, how), at=at)


def bounds(key: ast.expr) -> list[ast.expr]:
    """The expressions in the key of a subscript whose values must be integers."""
    if isinstance(key, ast.Slice):
        return [bound for bound in (key.lower, key.upper, key.step) if bound is not None]
    return [] if _inserts(key) or _is_dots(key) else [key]


def _is_bound(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LAST


def _inserts(key: ast.expr) -> bool:
    return isinstance(key, ast.Constant) and key.value is None


def _is_dots(key: ast.expr) -> bool:
    return isinstance(key, ast.Constant) and key.value is ...


def indexed(context: Context, base: Node, keys: list[ast.expr], values: Mapping[ast.expr, Any], at: ast.AST) -> Node:
    """The node of `base[keys]`. `values` are the values of the expressions that `bounds` finds in the keys."""
    dots = [i for i, key in enumerate(keys) if _is_dots(key)]
    for bound, value in values.items():
        if value is not None and not isinstance(value, Node) and not _is_bound(value):
            raise context.fail("unsupported_subscript", bound)
    if not keys or len(dots) > 1:
        raise context.fail("unsupported_subscript", keys[dots[1]] if dots else at)
    counted = sum(not (_inserts(key) or _is_dots(key)) for key in keys)
    result: Node = context.tensor(base, "x[...]", at, counted)
    first = dots[0] if dots else len(keys)
    position = 0
    for key in keys[:first]:
        result, kept = _step(context, result, key, position, values, at)
        position += kept
    # Keys behind the dots count from the last dim, so that dims inserted or dropped before the dots do not matter.
    position = -1
    for key in reversed(keys[first + 1 :]):
        result, kept = _step(context, result, key, position, values, at)
        position -= kept
    return result


def _step(
    context: Context, x: Node, key: ast.expr, dim: int, values: Mapping[ast.expr, Any], at: ast.AST
) -> tuple[Node, int]:
    """Apply one key at `dim`. Return the new x, and how many dims (0 or 1) the key leaves at that position."""
    if _inserts(key):
        return context.emit("unsqueeze", x, attr=dim, at=at), 1
    if not isinstance(key, ast.Slice):
        return emit(context, x, dim, "element", (values[key], 0), at), 0
    start, stop, step = (None if bound is None else values[bound] for bound in (key.lower, key.upper, key.step))
    if start is None and stop is None and step is None:
        return x, 1
    if isinstance(step, Node) or (step is not None and step < 1):
        raise context.fail("unsupported_subscript", key)
    return emit(
        context, x, dim, "range", (0 if start is None else start, LAST if stop is None else stop, step or 1), at
    ), 1


def shape(context: Context, x: Node, spelled: str, at: ast.AST) -> Pieces:
    """`x.shape` as numbers, which have their values in each call."""
    x = context.tensor(x, spelled, at)
    return Pieces(lambda i, count: context.emit("extent", x, attr=((i,), count), at=at))


def size(context: Context, x: Node, spelled: str, given: list[Any], at: ast.AST) -> Node | Pieces:
    """`x.size()`, `x.size(dim)`, `x.numel()`."""
    if len(given) > (spelled == ".size"):
        raise context.fail("too_many_arguments", at, function=spelled, have=len(given), want="()")
    if not given:
        return (
            shape(context, x, spelled, at) if spelled == ".size" else context.emit("extent", x, attr=(None, 0), at=at)
        )
    if not isinstance(given[0], int) or isinstance(given[0], bool) or abs(given[0]) > MOST:
        raise context.fail("wrong_static", at, function=spelled, name="dim", want="an integer")
    return context.emit("extent", x, attr=((given[0],), 0), at=at)
