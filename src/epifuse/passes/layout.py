"""Layout: how operations that move no data change dims, and how parts of values are taken and joined."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from epifuse.base.lazy import cached_property
from epifuse.fusion import host
from epifuse.ir import Dims, Factor, Node
from epifuse.ir.graph import topological
from epifuse.ir.types import dim_size, promote, shape_of
from epifuse.passes.alignment import Alignment, Postponed, Typed, narrow_of
from epifuse.passes.dims import (
    DimsError,
    joined,
    normalise,
    permuted,
    rearranged,
    regroup,
    resolve_shape,
    transposed,
)
from epifuse.passes.parts import Part, do_nest, free, part_of, picked, uneven

_MOST_ROLLED = 16
"""The largest number of parts that `roll` cuts a value into. Each element is then selected among all of them."""


class Layout(Alignment):
    """The inference rules for layout."""

    def shape(self, value: Typed) -> tuple[int, ...]:
        return value.shape if value.raw is not None else shape_of(value.dims, self.extents)

    def infer_permute(self, node: Node, args: list[Typed]) -> Typed:
        return self.permuted(args[0], permuted(node.attr, len(self.shape(args[0]))))

    def permuted(self, x: Typed, order: tuple[int, ...]) -> Typed:
        x, shape = self.open(x), self.shape(x)
        if x.raw is not None:
            return self.viewed(x, ("permute", order), tuple(shape[d] for d in order))
        return replace(x, dims=tuple(x.dims[d] for d in order))

    def infer_unsqueeze(self, node: Node, args: list[Typed]) -> Typed:
        x, shape = self.open(args[0]), self.shape(args[0])
        at = normalise(node.attr, len(shape) + 1)
        if x.raw is not None:
            return self.viewed(x, ("unsqueeze", at), (*shape[:at], 1, *shape[at:]))
        return replace(x, dims=(*x.dims[:at], (), *x.dims[at:]))

    def infer_reshape(self, node: Node, args: list[Typed]) -> Typed:
        return self.reshaped(args[0], resolve_shape(self.sizes(node.attr, args), self.shape(args[0])))

    def sizes(self, known: Sequence[int | None], args: Sequence[Typed]) -> tuple[int, ...]:
        """The integers `known`; each None is replaced by the next of `args[1:]`, a number computed from extents."""
        further = iter(args[1:])
        return tuple(self.size(next(further)) if number is None else number for number in known)

    def size(self, number: Typed) -> int:
        try:
            found = host.evaluate(number.node, lambda axis: self.extents[axis.attr])
        except host.HostError as error:
            raise self.fail("host_arithmetic", detail=str(error)) from None
        if not isinstance(found, int) or isinstance(found, bool):
            raise self.fail("size_wanted", value=found)
        return found

    def infer_rearrange(self, node: Node, args: list[Typed]) -> Typed:
        (how, numbers), x = node.attr, args[0]
        shape = self.shape(x)
        if how in ("t", "transpose"):
            return self.permuted(x, transposed(numbers if how == "transpose" else None, shape))
        return self.reshaped(x, rearranged(how, self.sizes(numbers, args), shape))

    def reshaped(self, x: Typed, want: tuple[int, ...]) -> Typed:
        x = self.open(x)
        if x.raw is not None:
            # The first extent may be the number of rows. If it stays, -1 makes the view valid for any number of rows.
            stays = x.shape[:1] == want[:1] and 0 not in want
            return self.viewed(x, ("reshape", (-1, *want[1:]) if stays else want), want)
        return replace(x, dims=regroup(x.dims, want, self.extents))

    def infer_part(self, node: Node, args: list[Typed]) -> Typed:
        (dim, how, numbers), x = node.attr, self.open(args[0])
        shape = self.shape(x)
        at = normalise(dim, len(shape))
        sizes = self.sizes(numbers, args)
        part = part_of(how, sizes, shape[at])
        if x.raw is not None:
            left = () if part.drops else (part.size,)
            return self.viewed(x, ("part", (at, *part)), (*shape[:at], *left, *shape[at + 1 :]))
        if how == "range" and part.step == 1:
            return self.cut(x, at, part, nests=do_nest(self.ranges(node.args[0], at, len(shape), shape[at])))
        return self.cut(x, at, part, nests=how != "sizes" or do_nest(sizes[:-1]))

    def ranges(self, of: Node, at: int, rank: int, size: int) -> set[int]:
        """The extents of the ranges that the graph takes of the value `of` along the dim `at`, of `size` elements, as
        far as they are one of several equal parts."""
        found = set()
        for node in self.parts.get(of, ()):
            dim, how, numbers = node.attr
            if how == "range" and normalise(dim, rank) == at and None not in numbers[:2]:
                part = part_of(how, numbers, size)
                if part.step == 1 and part.size and not (size % part.size or part.start % part.size):
                    found.add(part.size)
        return found

    @cached_property
    def parts(self) -> dict[Node, list[Node]]:
        """The `part` nodes that take parts of a value, for each such value of the written graph."""
        found: dict[Node, list[Node]] = {}
        for node in self.graph.nodes:
            if node.op == "part":
                found.setdefault(node.args[0], []).append(node)
        return found

    def cut(self, x: Typed, at: int, part: Part, *, nests: bool = True) -> Typed:
        """A part of `x` along the dim `at`. `nests`: whether it nests with other parts taken there (`do_nest`)."""
        if (found := uneven(x.dims, at, part, self.extents, nests=nests)) is not None:
            dims, columns = found
            return replace(x, node=self.emit("region", x.node, attr=columns, kind=x.kind, dims=dims), dims=dims)
        dims, gone = picked(x.dims, at, part, self.extents)
        made = self.emit("pick", x.node, attr=gone, kind=x.kind, dims=dims) if gone else x.node
        return replace(x, node=made, dims=dims)

    def infer_roll(self, node: Node, args: list[Typed]) -> Typed:
        """The rolled value: its equal parts, joined in another order."""
        (dim, shift), x = node.attr, self.settle(args[0])
        at = normalise(dim, len(x.dims))
        size = self.shape(x)[at]
        width = math.gcd(size, shift) or 1
        count = size // width
        if count > _MOST_ROLLED:
            raise DimsError("roll_parts", shift=shift, size=size, count=count, most=_MOST_ROLLED)
        if shift % max(size, 1) == 0:
            return x
        places = [(number - shift // width) % count for number in range(count)]
        return self.join([self.cut(x, at, Part(p * width, (p + 1) * width)) for p in places], at, "cat")

    def infer_join(self, node: Node, args: list[Typed]) -> Typed:
        dim, how = node.attr
        return self.join(args, dim, how)

    def join(self, args: list[Typed], dim: int, how: str) -> Typed:
        """`args` joined along `dim`; `how` is cat or stack. An element's place along a factor over which none of them
        varies says from which of them it comes."""
        if any(arg.host for arg in args):
            raise self.fail("tensor_wanted", what=how)
        partner = next((arg.dims for arg in args if arg.raw is None), ())
        args = [self.settle(arg, partner) for arg in args]
        dims = args[0].dims
        if others := [self.shape(arg) for arg in args if arg.dims != dims]:
            left = self.shape(args[0])
            right = next((shape for shape in others if shape != left), left)
            raise DimsError("join_differs", how=how, left=left, right=right)
        stacks = how == "stack"
        at = normalise(dim, len(dims) + stacks)
        if len(args) == 1:
            return replace(args[0], dims=(*dims[:at], (), *dims[at:])) if stacks else args[0]
        own = () if stacks else dims[at]
        kind = promote([arg.kind for arg in args])
        if not (stacks or dim_size(own, self.extents)):  # neither the parts nor the result have a column
            return next(arg for arg in args if arg.kind == kind)
        factor = free(dims, len(args), own, self.extents, self.part_factors_of([arg.node for arg in args]))
        result: Dims = (*dims[:at], joined((factor, *own)), *dims[at + (not stacks) :])
        place = self.emit("index", attr=(factor,), kind="int32", dims=((factor,),))
        found = args[-1].node
        for number, arg in reversed(list(enumerate(args[:-1]))):
            here = self.emit("const", attr=number, kind="int32")
            mask = self.emit("eq", place, here, kind="mask", dims=((factor,),))
            found = self.emit("where", mask, arg.node, found, kind=kind, dims=result)
        return Typed(found, kind, result, narrow=narrow_of(args) if kind == "float" else None)

    def part_factors_of(self, roots: Sequence[Node]) -> list[Factor]:
        """The factors along which parts were last taken below the values `roots`; factors of most roots come first."""
        for node in topological(roots, self.part_factors):
            if node.op == "pick":
                self.part_factors[node] = frozenset(factor for factor, _ in node.attr)
            else:
                self.part_factors[node] = frozenset().union(*(self.part_factors[arg] for arg in node.args))
        counts = Counter(factor for root in roots for factor in self.part_factors[root])
        return sorted(counts, key=lambda factor: (-counts[factor], factor.axis, factor.stride))

    @cached_property
    def part_factors(self) -> dict[Node, frozenset[Factor]]:
        """For each node, the factors along which parts were last taken below it. Filled by `part_factors_of`."""
        return {}

    def viewed(self, x: Typed, step: tuple[str, Any], shape: tuple[int, ...]) -> Typed:
        if isinstance(x.raw, Postponed):
            key = id(x.raw), step
            if key not in self.views:
                whole = [not arg.host and arg.shape == x.shape for arg in x.raw.args]
                pairs = zip(x.raw.args, whole, strict=True)
                args = tuple(self.viewed(arg, step, shape) if is_whole else arg for arg, is_whole in pairs)
                self.views[key] = x.raw, replace(x, raw=replace(x.raw, args=args), shape=shape)
            return self.views[key][1]
        assert x.raw is not None
        return replace(x, raw=x.raw._replace(views=(*x.raw.views, step)), shape=shape)

    def open(self, x: Typed) -> Typed:
        """`x` before a layout operation. An expression of operands gets its dims here if it could be aligned with
        accum, or if its operands are not `alike`."""
        if isinstance(x.raw, Postponed) and (not x.raw.alike or self.fits(x)):
            return self.settle(x)
        return x
