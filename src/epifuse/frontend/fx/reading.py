"""The state of one walk over a part of a torch.fx graph: the epilogue value of each fx node, and its shape."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch.fx import Node as FxNode

from epifuse.base.errors import Loc
from epifuse.ir import Builder, Node

Numerics = Literal["written", "float32", "torch"]
"""How values are rounded to 16 bits between two operations. *written*: only explicit casts round, as in a Python
epilogue. *float32*: no value is rounded before it is stored. *torch*: each value is rounded to its dtype in ATen."""

Shape = tuple[int, ...]
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)
_HELD = (*FLOATS, torch.bool, torch.int32, torch.int64)


class Boundary(Exception):  # noqa: N818 - no error: it is where an epilogue ends
    """The language cannot express `node`; `reason` says why."""

    def __init__(self, reason: str, node: FxNode) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


class Reading:
    """The epilogue values of the fx nodes that were read, and their shapes.

    A shape in `shapes` may be smaller than that of the fx node: a dim that only broadcasts may have size 1 or be
    missing. `node` is the present node, the one that is being read.
    """

    def __init__(self, accum: FxNode, numerics: Numerics) -> None:
        self.builder, self.accum, self.node, self.numerics = Builder(), accum, accum, numerics
        self.values: dict[FxNode, Any] = {}
        self.shapes: dict[FxNode, Shape] = {}
        self.compute = torch.float64 if value_of(accum).dtype == torch.float64 else torch.float32
        self.product = self.emit("accum")
        self.keep(self.product, value_of(accum).shape)

    def keep(self, made: Any, shape: Iterable[int]) -> None:
        """Keep `made` as the value of the present node. With the numerics "torch" it is rounded if ATen rounds it."""
        dtype = getattr(self.node.meta.get("val"), "dtype", None)
        if self.numerics == "torch" and dtype in HALVES and isinstance(made, Node):
            made = self.emit("cast", made, attr=dtype)
        self.values[self.node], self.shapes[self.node] = made, tuple(shape)

    def emit(self, op: str, *args: Node, attr: Any = None) -> Node:
        """A node of the graph, at the place of the present fx node."""
        return self.builder.node(op, *args, attr=attr, locs=(place_of(self.node),))

    def boundary(self, reason: str) -> Boundary:
        """The exception for the present node, which the language cannot express."""
        return Boundary(reason, self.node)

    def value(self, item: Any) -> Node:
        """The value of an argument: of a node that was read, or of a number. Raises `Boundary` for anything else."""
        if isinstance(item, FxNode) and isinstance(found := self.values.get(item), Node):
            return found
        if type(item) in (bool, int, float):
            return self.emit("const", attr=item)
        raise self.boundary(f"its argument {item} is no value of the epilogue")

    def shape(self, item: Any) -> Shape:
        """The shape in which the value of `item` was made; () for a number."""
        return self.shapes[item] if isinstance(item, FxNode) else ()

    def whole(self, item: FxNode) -> Node:
        """The value of `item` expanded to its node's shape, which reductions, layout operations and stores need."""
        made, own, want = self.value(item), self.shapes[item], tuple(value_of(item).shape)
        if own == want:
            return made
        if torch.Size(want).numel() == 1:
            return self.emit("reshape", made, attr=want)
        return self.emit("expand_as", made, self.product_as(want))

    def product_as(self, shape: Shape) -> Node:
        """The product reshaped to `shape`. Raises `Boundary` if the product has another number of elements."""
        own = tuple(value_of(self.accum).shape)
        if torch.Size(shape).numel() != torch.Size(own).numel():
            raise self.boundary(f"a value is repeated to {shape}, which the product {own} has no dims for")
        return self.product if shape == own else self.reshaped(self.product, own, tuple(shape))

    def reshaped(self, x: Node, shape: Shape, want: Shape) -> Node:
        """Reshape `x` from `shape` to `want`.

        Some reshapes are written without the number of rows, so that one graph serves every number of rows: dividing
        the last dim, merging the last dims, removing or adding leading dims of size 1, and regrouping the last dims.
        """
        before, behind = len(shape) - 1, len(want) - 1
        if before < behind and shape[:before] == want[:before]:
            sizes, large = want[before:], [size for size in want[before:] if size > 1]
            # If only one size is above 1, it may be a number of rows.
            sizes = tuple(-1 if [size] == large else size for size in sizes)
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
        """An elementwise operation on values that broadcast."""
        self.shapes[self.node] = broadcast(*map(self.shape, items))
        return self.emit(op, *map(self.value, items), attr=attr)


def broadcast(*shapes: Shape) -> Shape:
    """The shape that `shapes` broadcast to, by NumPy's rule."""
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]  # untyped


def value_of(node: FxNode) -> torch.Tensor:
    """A tensor with the shape and dtype of the value of `node`. Raises `Boundary` if they are unknown or symbolic."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Boundary(f"what {node.name} looks like is not known: trace it with make_fx", node)
    if not all(isinstance(extent, int) for extent in value.shape):
        raise Boundary(f"{node.name} has a symbolic size: {tuple(value.shape)}", node)
    return value


def check_dtype(node: FxNode, compute: torch.dtype) -> None:
    """Raise `Boundary` if no value can have the dtype of `node` in an epilogue that computes floats in `compute`."""
    dtype = value_of(node).dtype
    if dtype not in _HELD or (dtype == torch.float64 and compute != torch.float64):
        stays = "which no value of this epilogue is"
        if dtype.itemsize == 1:
            stays = "and casts to 8 bits stay with PyTorch: write ef.gemm for a quantised output"
        raise Boundary(f"{node.name} is {str(dtype).removeprefix('torch.')}, {stays}", node)


GRAPH_FILE = "<fx graph>"
"""The file name in the place of a node for which no source line is known."""
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*(?:\n(?P<text>[^\n]*))?')


def place_of(node: FxNode) -> Loc:
    """The source line of `node`, if its stack trace names one; otherwise the node as the graph prints it."""
    frames = list(_FRAME.finditer(node.stack_trace or ""))
    if frames:
        text = (frames[-1]["text"] or "").rstrip()
        start = len(text) - len(text.lstrip())
        return Loc(frames[-1]["file"], int(frames[-1]["line"]), start, max(len(text) - start, 1), text)
    text = node.format_node() or node.name
    return Loc(GRAPH_FILE, 1, 0, len(text), text)
