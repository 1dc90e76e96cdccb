"""The layout of a cone's values on the axes of its product, for cones whose views only regroup M and the batches.

A transformer's values are (batch, sequence, hidden) around products of (batch * sequence, hidden). Such a cone does not
need its reshapes: each value can just as well be (M, N), (M, 1), (1, N) or (1, 1), and then serves every size of M.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch.fx import Node as FxNode

from epifuse.frontend.fx import value_of
from epifuse.pytorch.cone import (
    Cone,
    dims_of,
    inputs_of,
    is_constant,
    is_cut,
    is_expand,
    is_join,
    is_picked_result,
    is_reduction,
    is_view,
    name_of,
)

Layout = tuple[str, ...]
"""For each dim of a value a label: the axis of the product that the dim is a part of, or "" if it has extent 1 or
repeats a value. The label of equal parts of the columns is "n/" and their width."""

Shape = Sequence[int]


class Axes:
    """The axes of a product, outermost first, and their extents."""

    def __init__(self, product: FxNode) -> None:
        self.shape = tuple(value_of(product).shape)
        self.order = tuple("lmn"[-len(self.shape) :])
        self.extents = dict(zip(self.order, self.shape, strict=True))

    def regrouped(self, shape: Shape, axes: Iterable[str]) -> Layout | None:
        """The layout of `shape` if its dims are those of `axes` in their order, possibly split; else None."""
        runs = [(axis, self.extent(axis)) for axis in axes if self.extent(axis) != 1]
        found, left = [], 1
        for extent in shape:
            if extent == 1:
                found.append("")
                continue
            if left == 1:
                if not runs:
                    return None
                axis, left = runs.pop(0)
            if extent == 0 or left % extent:
                return None
            left //= extent
            found.append(axis)
        return tuple(found) if left == 1 and not runs else None

    def is_whole(self, shape: Shape, layout: Layout) -> bool:
        """Whether the value has all elements of each axis that it has."""
        for axis in set(layout) - {""}:
            parts = (extent for extent, own in zip(shape, layout, strict=True) if own == axis)
            if math.prod(parts) != self.extent(axis):
                return False
        return True

    def extent(self, label: str) -> int:
        """The extent of an axis, or of one part of the columns."""
        axis, _, width = label.partition("/")
        return int(width) if width else self.extents[axis]

    def placed(self, layout: Layout) -> tuple[str, ...]:
        """For each axis of the product the label that a layout has for it; "" if the value does not vary along it."""
        held = {label.partition("/")[0]: label for label in layout}
        return tuple(held.get(axis, "") for axis in self.order)

    def flat(self, layout: Layout) -> tuple[int, ...]:
        """The shape of a value with one dim for each axis of the product; 1 if it does not vary along the axis."""
        return tuple(self.extent(label) if label else 1 for label in self.placed(layout))


def layouts(cone: Cone) -> dict[FxNode, Layout] | None:
    """The layout of every value of the cone and of its operands; None if views do more than regroup."""
    axes = Axes(cone.product)
    if 0 in axes.shape:
        return None
    found: dict[FxNode, Layout] = {}
    for node in cone.inside:
        own = _inside(node, cone, found, axes)
        if own is None or not axes.is_whole(_shape(node), own):
            return None
        found[node] = own
    for node in cone.outputs:
        if _shape(node) != () and math.prod(axes.flat(found[node])) != math.prod(_shape(node)):
            return None  # the output repeats a value
    for node in reversed(cone.body):
        if not _place_inputs(node, cone, found, axes):
            return None
    return found


def _shape(node: FxNode) -> tuple[int, ...]:
    value = node.meta["val"]
    return tuple((value[0] if isinstance(value, (tuple, list)) else value).shape)


def _inside(node: FxNode, cone: Cone, found: Mapping[FxNode, Layout], axes: Axes) -> Layout | None:
    """The layout of a value that depends on the product."""
    shape = _shape(node)
    if node is cone.product:
        return axes.regrouped(shape, axes.order)
    if is_constant(node):
        return ("",) * len(shape)
    first = node.all_input_nodes[0]
    if is_picked_result(node):
        return found[first]
    if is_cut(node) or is_join(node):
        return _cut(node, shape, [found.get(each) for each in node.all_input_nodes if not is_constant(each)], axes)
    if is_view(node):
        return _viewed(node, shape, found[first], axes)
    if is_reduction(node):
        return _reduced(node, shape, found[first], axes)
    known = [found[each] for each in node.all_input_nodes if each in found]
    return _broadcast(shape, known, axes)


def _cut(node: FxNode, shape: Shape, inputs: Sequence[Layout | None], axes: Axes) -> Layout | None:
    """The layout of parts of the columns, or of all columns if such parts are joined."""
    own = inputs[-1]
    if own is None or any(each != own for each in inputs) or not own[-1].startswith("n"):
        return None
    last = "n" if is_join(node) else own[-1] if name_of(node) == "getitem" else f"n/{shape[-1]}"
    return (*own[:-1], last)


def _viewed(node: FxNode, shape: Shape, own: Layout, axes: Axes) -> Layout | None:
    before = _shape(node.all_input_nodes[0])
    if is_expand(node):
        return ("",) * (len(shape) - len(own)) + own
    if name_of(node) in ("permute", "transpose", "t"):
        return own if tuple(shape) == before and all(extent == 1 for extent in shape) else None
    if any(extent != 1 and not axis for extent, axis in zip(before, own, strict=True)):
        return None  # a dim repeats a value
    return axes.regrouped(shape, [label for label in axes.placed(own) if label])


def _reduced(node: FxNode, shape: Shape, own: Layout, axes: Axes) -> Layout | None:
    before = _shape(node.all_input_nodes[0])
    if name_of(node) in ("_softmax", "_log_softmax"):
        dim = int(node.args[1]) % len(before)  # type: ignore[arg-type]  # a number
        return own if own[dim] and own.count(own[dim]) == 1 else None
    gone = dims_of(node)
    if any(before[dim] != 1 and not own[dim] for dim in gone):
        return None  # a dim repeats a value
    if {own[dim] for dim in gone} & {axis for dim, axis in enumerate(own) if dim not in gone and axis}:
        return None  # only a part of an axis is reduced
    if len(shape) == len(before):
        return tuple("" if dim in gone else axis for dim, axis in enumerate(own))
    return tuple(axis for dim, axis in enumerate(own) if dim not in gone)


def _broadcast(shape: Shape, known: Sequence[Layout], axes: Axes) -> Layout | None:
    """The layout of a result of values that broadcast; `known` has those of the arguments that depend on the product. A
    dim that only operands have is taken from the product, if `shape` has the product's elements in their order."""
    whole = axes.regrouped(shape, axes.order)
    found: list[str] = []
    for position in range(-len(shape), 0):
        labels = {layout[position] for layout in known if len(layout) >= -position and layout[position]}
        if len(labels) > 1:
            return None
        if not labels and shape[position] != 1:
            if whole is None:
                return None
            labels = {whole[position]}
        found.append(labels.pop() if labels else "")
    return tuple(found)


def _place_inputs(node: FxNode, cone: Cone, found: dict[FxNode, Layout], axes: Axes) -> bool:
    """Put the layouts of the operands of `node`, and of nodes pulled for it, into `found`. False if one has none."""
    for each in inputs_of(node):
        if each in cone.inside or (is_constant(each) and each in cone.pulled):
            continue
        if is_constant(each) or node not in found or (node in cone.inside and (is_view(node) or is_reduction(node))):
            return False
        shape, beside, of = _shape(each), found[node], _shape(node)
        if len(shape) > len(beside):
            return False
        shown = of[len(of) - len(shape) :]
        if any(extent not in (1, other) for extent, other in zip(shape, shown, strict=True)):
            return False
        labels = beside[len(beside) - len(shape) :]
        own = tuple("" if extent == 1 else axis for extent, axis in zip(shape, labels, strict=True))
        missing = any(extent != 1 and not axis for extent, axis in zip(shape, own, strict=True))
        if missing or not axes.is_whole(shape, own) or found.setdefault(each, own) != own:
            return False
    return True
