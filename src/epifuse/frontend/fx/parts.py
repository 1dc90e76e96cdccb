"""Rules for ATen's operations on parts of a value: slices and splits, and the operations that join parts again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from epifuse.frontend.fx.reading import Reading, value_of
from epifuse.ir import Node

Arguments = dict[str, Any]
Rule = Callable[[Reading, Arguments], Any]

_MOST = 16
"""The most parts that one value may be joined from, because each element is chosen among all of them."""


def _range(given: Arguments, shape: Sequence[int]) -> tuple[int, range]:
    """The dim of a slice, and the indices that the slice takes along it."""
    dim = given.get("dim", 0) % len(shape)
    return dim, range(*slice(given.get("start"), given.get("end"), given.get("step", 1)).indices(shape[dim]))


def _part(reading: Reading, whole: Node, dim: int, places: range) -> Node:
    return reading.emit("part", whole, attr=(dim, "range", (places.start, max(places.stop, 0), places.step)))


def _slice(reading: Reading, given: Arguments) -> Node:
    x = given["self"]
    dim, places = _range(given, value_of(x).shape)
    whole = reading.whole(x)
    reading.shapes[reading.node] = tuple(value_of(reading.node).shape)
    return whole if len(places) == value_of(x).shape[dim] else _part(reading, whole, dim, places)


def _select(reading: Reading, given: Arguments) -> Node:
    x = given["self"]
    whole = reading.whole(x)
    reading.shapes[reading.node] = tuple(value_of(reading.node).shape)
    return reading.emit("part", whole, attr=(given["dim"] % value_of(x).dim(), "element", (given["index"], 0)))


def _split(reading: Reading, given: Arguments) -> tuple[Node, ...]:
    x = given["self"]
    dim = given.get("dim", 0) % value_of(x).dim()
    shapes = [tuple(value.shape) for value in reading.node.meta["val"]]
    if len(set(shapes)) > 1:
        raise reading.boundary("a split into parts of several sizes")
    whole, width = reading.whole(x), shapes[0][dim]
    reading.shapes[reading.node] = shapes[0]
    return tuple(_part(reading, whole, dim, range(i * width, (i + 1) * width)) for i in range(len(shapes)))


def _unbind(reading: Reading, given: Arguments) -> tuple[Node, ...]:
    x = given["self"]
    dim, values = given.get("dim", 0) % value_of(x).dim(), reading.node.meta["val"]
    whole = reading.whole(x)
    reading.shapes[reading.node] = tuple(values[0].shape)
    return tuple(reading.emit("part", whole, attr=(dim, "element", (i, 0))) for i in range(len(values)))


def _join(how: str) -> Rule:
    def rule(reading: Reading, given: Arguments) -> Node:
        parts = given["tensors"]
        if len(parts) > _MOST or len({(value_of(part).shape, value_of(part).dtype) for part in parts}) > 1:
            raise reading.boundary(f"{how} of values of several shapes, or of more than {_MOST}")
        whole = [reading.whole(part) for part in parts]
        shape = tuple(value_of(reading.node).shape)
        reading.shapes[reading.node] = shape
        return reading.emit("join", *whole, attr=(given.get("dim", 0) % len(shape), how))

    return rule


def _slice_scatter(reading: Reading, given: Arguments) -> Node:
    """The first argument cut into equal parts and joined again, with `src` in the place of one part."""
    x, part, shape = given["self"], given["src"], value_of(reading.node).shape
    dim, places = _range(given, shape)
    size, width = shape[dim], len(places)
    if places.step > 1 or not width or size % width or places.start % width or size // width > _MOST:
        raise reading.boundary("a part of a row that is not one of a few equal parts")
    base, new = reading.value(x), reading.whole(part)
    reading.shapes[reading.node] = tuple(shape)
    if size == width:
        return new
    is_number = base.op == "const"
    # If the first argument is a number, the other parts take their shape from a part of the product if the sizes match,
    # because an operand alone has no axes yet. Otherwise they take it from the new part.
    is_like = is_number and shape.numel() == value_of(reading.accum).numel()
    of = reading.product_as(tuple(shape)) if is_like else new if is_number else reading.whole(x)

    def old(start: int) -> Node:
        made = of if of is new else _part(reading, of, dim, range(start, start + width))
        return reading.emit("full_like", made, base, attr=None) if is_number else made

    parts = [new if start == places.start else old(start) for start in range(0, size, width)]
    return reading.emit("join", *parts, attr=(dim, "cat"))


ROWS: dict[str, Rule] = {
    "aten::slice": _slice,
    "aten::select": _select,
    "aten::split": _split,
    "aten::split_with_sizes": _split,
    "aten::unbind": _unbind,
    "aten::cat": _join("cat"),
    "aten::stack": _join("stack"),
    "aten::slice_scatter": _slice_scatter,
}
