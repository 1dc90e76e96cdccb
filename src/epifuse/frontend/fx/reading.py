"""One walk over a part of a torch.fx graph: which value of an epilogue each node has become, and of which shape."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch.fx import Node as FxNode

from epifuse.base.errors import Loc
from epifuse.ir import Builder, Node

Numerics = Literal["written", "float32", "torch"]
"""What becomes of rounding to 16 bits between two operations. *written*: explicit casts round, as in a Python epilogue.
*float32*: nothing is rounded before it is stored. *torch*: every value is rounded to the dtype that ATen gives it."""

Shape = tuple[int, ...]
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)
_HELD = (*FLOATS, torch.bool, torch.int32, torch.int64)


class Boundary(Exception):  # noqa: N818 - no error: it is where an epilogue ends
    """`reason` says why the language does not hold `node`."""

    def __init__(self, reason: str, node: FxNode) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


class Reading:
    """Values by node, and their shapes: a dim that only broadcasts may still be 1, or missing, where the node has more.

    `node` is the one that is read at the moment.
    """

    def __init__(self, accum: FxNode, numerics: Numerics) -> None:
        self.builder, self.accum, self.node, self.numerics = Builder(), accum, accum, numerics
        self.values: dict[FxNode, Any] = {}
        self.shapes: dict[FxNode, Shape] = {}
        self.compute = torch.float64 if value_of(accum).dtype == torch.float64 else torch.float32
        self.product = self.emit("accum")
        self.keep(self.product, value_of(accum).shape)

    def keep(self, made: Any, shape: Iterable[int]) -> None:
        """The value of the present node, rounded where ATen's numerics are asked for and ATen rounds."""
        dtype = getattr(self.node.meta.get("val"), "dtype", None)
        if self.numerics == "torch" and dtype in HALVES and isinstance(made, Node):
            made = self.emit("cast", made, attr=dtype)
        self.values[self.node], self.shapes[self.node] = made, tuple(shape)

    def emit(self, op: str, *args: Node, attr: Any = None) -> Node:
        """A node of the graph, at the place of the present fx node."""
        return self.builder.node(op, *args, attr=attr, locs=(place_of(self.node),))

    def boundary(self, reason: str) -> Boundary:
        """The present node is outside the language."""
        return Boundary(reason, self.node)

    def value(self, item: Any) -> Node:
        """An argument: a node that was read, or a number. Raises `Boundary`."""
        if isinstance(item, FxNode) and isinstance(found := self.values.get(item), Node):
            return found
        if type(item) in (bool, int, float):
            return self.emit("const", attr=item)
        raise self.boundary(f"its argument {item} is no value of the epilogue")

    def shape(self, item: Any) -> Shape:
        """The shape of a value as it was made; a number has none."""
        return self.shapes[item] if isinstance(item, FxNode) else ()

    def whole(self, item: FxNode) -> Node:
        """A value in the shape that its node has: reductions, layout and stores see every element."""
        made, own, want = self.value(item), self.shapes[item], tuple(value_of(item).shape)
        if own == want:
            return made
        if torch.Size(want).numel() == 1:
            return self.emit("reshape", made, attr=want)
        return self.emit("expand_as", made, self.product_as(want))

    def product_as(self, shape: Shape) -> Node:
        """The product, reshaped. Raises `Boundary` where it has another number of elements."""
        own = tuple(value_of(self.accum).shape)
        if torch.Size(shape).numel() != torch.Size(own).numel():
            raise self.boundary(f"a value is expanded to {shape}, and no dims of the product {own} are so many")
        return self.product if shape == own else self.reshaped(self.product, own, tuple(shape))

    def reshaped(self, x: Node, shape: Shape, want: Shape) -> Node:
        """`x` of `shape` in the shape `want`.

        Where the last dim is divided, the last dims are merged, first ones of one element go, or what lies behind the
        first ones is regrouped, no number of rows is named: the graph serves all.
        """
        before, behind = len(shape) - 1, len(want) - 1
        if before < behind and shape[:before] == want[:before]:
            sizes, large = want[before:], [size for size in want[before:] if size > 1]
            sizes = tuple(-1 if [size] == large else size for size in sizes)  # it may be a number of rows
            return self.emit("rearrange", x, attr=("unflatten", (-1, *sizes)))
        if before > behind >= 0 and shape[:behind] == want[:behind]:
            return self.emit("rearrange", x, attr=("flatten", (behind - len(shape), -1)))
        if shape == want:
            return x
        if before > 0 and shape[0] == 1 and want[:1] not in ((), (1,)):
            rest = self.emit("rearrange", x, attr=("flatten", (-len(shape), -before)))
            return self.reshaped(rest, shape[1:], want)
        if behind > 0 and want[0] == 1 and shape[:1] not in ((), (1,)):
            return self.emit("unsqueeze", self.reshaped(x, shape, want[1:]), attr=0)
        count = next((i for i, pair in enumerate(zip(shape, want, strict=False)) if pair[0] != pair[1]), 0)
        if 0 < count <= min(before, behind):
            merged = self.emit("rearrange", x, attr=("flatten", (count - len(shape), -1)))
            return self.emit("rearrange", merged, attr=("unflatten", (-1, *want[count:])))
        return self.emit("reshape", x, attr=want)

    def elementwise(self, op: str, *items: Any, attr: Any = None) -> Node:
        """An operation on values that broadcast."""
        self.shapes[self.node] = broadcast(*map(self.shape, items))
        return self.emit(op, *map(self.value, items), attr=attr)


def broadcast(*shapes: Shape) -> Shape:
    """NumPy's rule."""
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]  # untyped


def value_of(node: FxNode) -> torch.Tensor:
    """A tensor that looks like the value of `node`. Raises `Boundary` where its shape or dtype fits no epilogue."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Boundary(f"what {node.name} looks like is not known: trace it with make_fx", node)
    if not all(isinstance(extent, int) for extent in value.shape):
        raise Boundary(f"{node.name} has a symbolic size: {tuple(value.shape)}", node)
    return value


def check_dtype(node: FxNode, compute: torch.dtype) -> None:
    """Raise `Boundary` for a dtype that no value has where floats are computed in `compute`."""
    dtype = value_of(node).dtype
    if dtype not in _HELD or (dtype == torch.float64 and compute != torch.float64):
        stays = "which no value of this epilogue is"
        if dtype.itemsize == 1:
            stays = "and casts to 8 bits stay with PyTorch: write ef.gemm for a quantised output"
        raise Boundary(f"{node.name} is {str(dtype).removeprefix('torch.')}, {stays}", node)


GRAPH_FILE = "<fx graph>"
"""Stands for the file of a node that no person wrote."""
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*(?:\n(?P<text>[^\n]*))?')


def place_of(node: FxNode) -> Loc:
    """The line that a person wrote, where the graph knows it; else the node as the graph prints it."""
    frames = list(_FRAME.finditer(node.stack_trace or ""))
    if frames:
        text = (frames[-1]["text"] or "").rstrip()
        start = len(text) - len(text.lstrip())
        return Loc(frames[-1]["file"], int(frames[-1]["line"]), start, max(len(text) - start, 1), text)
    text = node.format_node() or node.name
    return Loc(GRAPH_FILE, 1, 0, len(text), text)
