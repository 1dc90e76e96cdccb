"""What follows from the shape and dtype of a value: extents as numbers, limits, values like it, and coordinates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from epifuse.base.dtypes import BY_TORCH, dtype_of
from epifuse.ir import Dims, Factor, Kind, Node
from epifuse.ir.graph import topological
from epifuse.ir.types import Dim, factors_of, shape_of
from epifuse.passes import kinds
from epifuse.passes.alignment import Typed
from epifuse.passes.dims import normalise
from epifuse.passes.layout import Layout
from epifuse.request.problem import TensorInfo


class Sizes(Layout):
    """The inference rules for these."""

    def infer_extent(self, node: Node, args: list[Typed]) -> Typed:
        """The number of elements along some dims, as an expression of the extents of axes: one structure then serves
        all extents."""
        (dims, count), (x,) = node.attr, args
        shape = self.shape(x)
        if count not in (0, len(shape)):
            raise self.fail("unpack_count", have=len(shape), want=count)
        chosen = range(len(shape)) if dims is None else [normalise(dim, len(shape)) for dim in dims]
        found = self.emit("const", attr=1, kind="int32", is_host=True)
        for at in chosen:
            for number in self.counts(x, shape, at):
                found = number if found.attr == 1 else self.emit("mul", found, number, kind="int", is_host=True)
        return Typed(found, "int", host=True)

    def counts(self, x: Typed, shape: tuple[int, ...], at: int) -> list[Node]:
        """Numbers whose product is the extent of the dim `at`. For an operand it is the extent of an axis, if they are
        equal: they are then equal in all problems of one class."""
        if x.raw is None:
            return [self.count(factor) for factor in x.dims[at]]
        axis = next((axis for axis, extent in self.extents.items() if extent == shape[at] != 1), None)
        if axis in ("l", "m", "n"):
            return [self.count(Factor(axis))]
        return [self.emit("const", attr=shape[at], kind="int32", is_host=True)]

    def count(self, factor: Factor) -> Node:
        if factor.extent is not None:
            return self.emit("const", attr=factor.extent, kind="int32", is_host=True)
        whole = self.emit("axis", attr=factor.axis, kind="int", is_host=True)
        if factor.stride == 1:
            return whole
        step = self.emit("const", attr=factor.stride, kind="int32", is_host=True)
        return self.emit("floor_divide", whole, step, kind="int", is_host=True)

    def infer_limit(self, node: Node, args: list[Typed]) -> Typed:
        """`torch.finfo(x.dtype).max` and the like."""
        (x,) = args
        dtype = self.dtype(x)
        if x.host or dtype == torch.bool:
            raise self.fail("tensor_wanted" if x.host else "masks_in_arithmetic", what=node.attr, op=node.attr)
        number = getattr((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype), node.attr, None)
        if number is None:
            raise self.fail("unknown_method", name=node.attr, near="")
        kind = kinds.const_kind(number)
        return Typed(self.emit("const", attr=number, kind=kind, is_host=True), kind, host=True)

    def dtype(self, x: Typed) -> torch.dtype:
        """The value of `x.dtype`: the dtype of an explicit cast, else the dtype in which its kind is computed."""
        return x.narrow or dtype_of(x.kind, self.problem.float_dtype)

    def named_dtype(self, node: Node, x: Typed) -> torch.dtype:
        """As `dtype`, but raises for an expression of operands alone if one has less than 32 bits: PyTorch keeps that
        dtype, and the epilogue does not."""
        below = topological((node,))
        for one in below if x.narrow is None and all(other.op != "accum" for other in below) else ():
            info = self.problem.by_name.get(one.attr.name) if one.op == "load" else None
            if isinstance(info, TensorInfo) and info.dtype.itemsize < 4 and info.dtype != torch.bool:
                raise self.fail("dtype_of_operand", name=one.attr.name, dtype=info.dtype)
        return self.dtype(x)

    def infer_full_like(self, node: Node, args: list[Typed]) -> Typed:
        """A number in the shape of the first argument, and in the dtype that the node names, else in its dtype."""
        x, value = self.settle(args[0]), args[1]
        dtype: torch.dtype | None = node.attr
        kind: Kind = x.kind if dtype is None else BY_TORCH[dtype].loads_as
        narrow = x.narrow if dtype is None else None if dtype == dtype_of(kind, self.problem.float_dtype) else dtype
        if not value.host:
            raise self.fail("number_wanted", what="full_like")
        if value.node.op == "const":
            held = self.held(value.node.attr, narrow or dtype_of(kind, torch.float64))
            made = self.emit("const", attr=held, kind=kinds.const_kind(held))
        elif kind == "float" or (narrow is None and kind != "mask" and value.kind in ("int", "int32", "int64")):
            made = self.device(replace(value, kind=kind))
        else:
            raise self.fail("computed_number", dtype=dtype or dtype_of(kind, self.problem.float_dtype))
        held_as = torch.int64 if kind == "int64" else narrow if value.node.op != "const" else None
        if held_as is not None:
            made = self.emit("cast", made, attr=held_as, kind=kind)
        return self.expanded(Typed(made, kind, narrow=narrow), x.dims)

    def held(self, number: Any, dtype: torch.dtype) -> Any:
        """The value of a literal in a tensor of `dtype`. Raises if PyTorch's full_like raises."""
        try:
            with _disable_current_modes():  # while PyTorch traces, a new tensor has no data
                return torch.full((), number, dtype=dtype, device="cpu").item()
        except (RuntimeError, OverflowError):
            raise self.fail("not_held", number=number, dtype=dtype) from None

    def infer_coordinate(self, node: Node, args: list[Typed]) -> Typed:
        x = self.settle(args[0])
        if isinstance(node.attr, int):
            return self.coordinate(x, len(x.dims) - normalise(node.attr, len(x.dims)))
        position = {"n": 1, "m": 2, "l": 3}[str(node.attr)]
        if len(x.dims) < position and not (node.attr == "l" and len(x.dims) == 2):
            raise self.fail("index_rank", axis=node.attr, shape=shape_of(x.dims, self.extents))
        return self.coordinate(x, position)

    def coordinate(self, x: Typed, position: int) -> Typed:
        """Each element's place along the dim at `position`, counted from the end; the last dim is 1."""
        dim: Dim = x.dims[-position] if len(x.dims) >= position else ()
        rank = position if len(x.dims) >= position else 2
        dims: Dims = (dim, *((),) * (rank - 1))
        if not dim:
            return Typed(self.emit("const", attr=0, kind="int32"), "int32", dims)
        return Typed(self.emit("index", attr=dim, kind="int32", dims=dims), "int32", dims)

    def infer_linear_index(self, node: Node, args: list[Typed]) -> Typed:
        x = self.settle(args[0])
        along = tuple(factor for dim in x.dims for factor in dim)
        if not along:
            return Typed(self.emit("const", attr=0, kind="int32"), "int32", x.dims)
        return Typed(self.emit("index", attr=along, kind="int32", dims=x.dims), "int32", x.dims)

    def expanded(self, x: Typed, want: Dims) -> Typed:
        """`x` in the dims `want`. An `expand` node adds factors over which `x` does not vary."""
        missing = tuple(f for f in factors_of(want) if f not in self.types[x.node].factors)
        if not missing:
            return replace(x, dims=want)
        made = self.emit("expand", x.node, attr=missing, kind=x.kind, dims=want)
        return replace(x, node=made, dims=want)
