"""Infer types: values get kinds and dims, operands are aligned, layout disappears, host arithmetic is hoisted.

It turns the graph as written into the graph as computed. A layout operation moves no data, so it changes only the dims
in which a value is presented. `Typed` holds the dims during inference; afterwards only loads and outputs have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, TypeVar

import torch

from epifuse.base.dtypes import BY_TORCH
from epifuse.fusion import host
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.reduction import REDUCTIONS
from epifuse.ir import Dims, Graph, Kind, Load, Node, Output
from epifuse.ir.graph import topological
from epifuse.ir.types import Dim, canonical, dim_size, factors_of, promote, shape_of
from epifuse.passes import kinds, torch_rules
from epifuse.passes.alignment import NARROW, Typed, narrow_of
from epifuse.passes.chosen import chosen, waiting
from epifuse.passes.dims import (
    DimsError,
    broadcast,
    normalise,
)
from epifuse.passes.kinds import KindError
from epifuse.passes.refine import refined
from epifuse.passes.sizes import Sizes
from epifuse.request.problem import HostNumber, Problem

Made = TypeVar("Made")


def infer_types(graph: Graph, problem: Problem) -> Graph:
    """The typed graph for `problem`. Raises `EpilogueTypeError` on the user's line."""
    return _Inference(graph, problem).run()


class _Inference(Sizes):
    def run(self) -> Graph:
        for node in topological((*self.graph.roots, *self.graph.checked)):
            self.values[node] = self.apply_rule(node, self.inferred, node)
        outputs = tuple(self.apply_rule(output.node, self.output, output) for output in self.graph.outputs)
        effects = tuple(self.values[effect].node for effect in self.graph.effects)
        # Python computes the value of an unused name too, and may raise: host arithmetic that may fail is kept.
        unused = [self.values[node].node for node in self.graph.checked if self.values[node].host]
        for node in host.may_fail(unused, [node for node, _ in self.hosts]):
            self.hosts[node, self.types[node].kind] = f"!{len(self.hosts)}"
        live = topological((*(output.node for output in outputs), *effects, *(node for node, _ in self.hosts)))
        known = {node: self.types[node] for node in live}
        typed = replace(self.graph, outputs=outputs, effects=effects, locs=self.builder.locs, types=known, checked=())
        return refined(replace(typed, hosts={name: node for (node, _), name in self.hosts.items()}))

    def apply_rule(self, node: Node, rule: Callable[[Any], Made], about: Any) -> Made:
        """The result of `rule(about)`. Its errors name the line of `node`, or of a postponed operation below it."""
        self.current = node
        try:
            return rule(about)
        except (KindError, DimsError) as error:
            raise self.fail(error.key, **self.explained(error)) from None

    def inferred(self, node: Node) -> Typed:
        return self.inferred_of(node, [self.values[arg] for arg in node.args])

    def inferred_of(self, node: Node, args: list[Typed]) -> Typed:
        return (self.postponed(node, args) if _waits(node) else None) or self.infer(node, args)

    # --- one rule per op -------------------------------------------------------------------------------------

    def infer(self, node: Node, args: list[Typed]) -> Typed:
        if node.op in PRIMITIVES:
            return self.primitive(node, args)
        rule: Callable[[Node, list[Typed]], Typed] = getattr(self, f"infer_{node.op}")
        return rule(node, args)

    def infer_accum(self, node: Node, args: list[Typed]) -> Typed:
        kind: Kind = "float" if self.problem.accumulator.is_floating_point else "int32"
        dims = self.accum_dims
        return Typed(self.emit("accum", kind=kind, dims=dims), kind, dims)

    def infer_load(self, node: Node, args: list[Typed]) -> Typed:
        load = node.attr
        assert isinstance(load, Load)
        operand = self.problem.by_name[load.name]
        if isinstance(operand, HostNumber):
            return Typed(self.emit("load", attr=load, kind=operand.kind, is_host=True), operand.kind, host=True)
        return Typed(node, BY_TORCH[operand.dtype].loads_as, raw=load, shape=operand.shape)

    def infer_const(self, node: Node, args: list[Typed]) -> Typed:
        kind = kinds.const_kind(node.attr)
        return Typed(self.emit("const", attr=node.attr, kind=kind, is_host=True), kind, host=True)

    def primitive(self, node: Node, args: list[Typed]) -> Typed:
        if all(arg.host for arg in args):
            if node.op in ("logical_not", "bitwise_not") and args[0].kind == "mask":
                raise self.fail("host_not")
            exponent = args[1].node.attr if node.op == "pow" and args[1].node.op == "const" else None
            kind = kinds.host_kind(node.op, node.attr, [arg.kind for arg in args], exponent)
            return self.host_value(node, args, kind)
        rule = PRIMITIVES[node.op].rule
        args = self.with_definite_kinds(args, floating=rule in ("floating", "divide"), exact=rule == "random")
        kind = kinds.primitive_kind(node.op, [arg.kind for arg in args])
        if node.op == "pow" and kind != "float" and not _is_natural(args[1].node):
            raise self.fail("negative_power")
        if node.op in ("floor_divide", "remainder") and args[1].node.op == "const" and not args[1].node.attr:
            raise self.fail("integer_division")
        if node.op == "multiply_add" and narrow_of(args[:2]) is not None:
            # PyTorch rounds the product to the narrow float before it adds.
            product = self.result("mul", args[:2], promote([arg.kind for arg in args[:2]]))
            return self.result("add", [product, args[2]], kind)
        op = _OF_MASKS.get(node.op, node.op) if kind == "mask" else node.op
        return self.result(op, args, kind, exact=rule == "random")

    def host_value(self, node: Node, args: list[Typed], kind: Kind) -> Typed:
        made = self.emit(node.op, *(arg.node for arg in args), attr=node.attr, kind=kind, is_host=True)
        return Typed(made, kind, host=True)

    def infer_host(self, node: Node, args: list[Typed]) -> Typed:
        if not all(arg.host for arg in args):
            if node.attr == "bounds":
                raise self.fail("number_wanted", what="hardtanh")
            raise self.fail(
                "host_wanted", what=node.attr, hint=_HOST_HINTS.get(str(node.attr), "use the function of torch")
            )
        return self.host_value(node, args, kinds.host_kind("host", node.attr, [arg.kind for arg in args]))

    def infer_select(self, node: Node, args: list[Typed]) -> Typed:
        if not args[0].host:
            raise self.fail("host_wanted", what="if ... else", hint="use where(mask, a, b)")
        if all(arg.host for arg in args):
            return self.host_value(node, args, kinds.host_kind("select", None, [arg.kind for arg in args]))
        condition, *branched = args[0], *self.with_definite_kinds(args[1:])
        if condition.kind != "mask":
            zero = self.emit("const", attr=0, kind="int32", is_host=True)
            condition = Typed(self.emit("ne", condition.node, zero, kind="mask", is_host=True), "mask", host=True)
        branches = [shape_of(self.settle(arg).dims, self.extents) for arg in branched if not arg.host]
        if branches[0] != branches[-1]:
            raise self.fail("select_shapes", left=branches[0], right=branches[-1])
        return self.result("where", [condition, *branched], promote([arg.kind for arg in branched]))

    def infer_torch(self, node: Node, args: list[Typed]) -> Typed:
        """The first argument, after a check that PyTorch's function takes all arguments."""
        rule, spelled = node.attr
        known = [torch_rules.Argument(arg.host, arg.kind, arg.narrow, self.shape(arg)) for arg in args]
        if (found := torch_rules.broken(rule, known)) is not None:
            raise self.fail(found[0], what=spelled, op=spelled, **found[1])
        return args[0]

    def infer_number(self, node: Node, args: list[Typed]) -> Typed:
        if args[0].kind == "mask":
            raise self.fail("masks_in_arithmetic", op=node.attr)
        return args[0]

    def infer_tensor(self, node: Node, args: list[Typed]) -> Typed:
        spelled, rank = node.attr
        if args[0].host:
            raise self.fail("tensor_wanted", what=spelled)
        if rank:
            normalise(rank - 1, len(self.shape(args[0])))
        return args[0]

    def infer_call(self, node: Node, args: list[Typed]) -> Typed:
        if all(arg.host for arg in args):
            raise self.fail("tensor_wanted", what=node.attr)
        args = self.with_definite_kinds(args)
        kind = kinds.activation_kind(str(node.attr), tuple(arg.kind for arg in args))
        return self.result("call", args, kind, attr=node.attr)

    def infer_cast(self, node: Node, args: list[Typed]) -> Typed:
        dtype, x = node.attr, self.settle(args[0])
        assert isinstance(dtype, torch.dtype)
        compute = self.problem.float_dtype
        if x.host and x.node.op != "const":
            read = self.device(x)
            x = Typed(read, self.types[read].kind)
        if dtype == compute:
            if x.kind == "float":
                return replace(x, narrow=None)
            return Typed(self.emit("cast", x.node, attr=dtype, kind="float", dims=x.dims), "float", x.dims)
        if dtype == torch.bool:
            zero = self.emit("const", attr=0, kind="int32")
            return Typed(self.emit("ne", x.node, zero, kind="mask", dims=x.dims), "mask", x.dims)
        if dtype == torch.float64:
            raise self.fail(
                "cast_unsupported", dtype="float64", hint="the epilogue computes in float32; use a float64 GEMM"
            )
        if dtype not in BY_TORCH:
            shown = ", ".join(str(row.torch).removeprefix("torch.") for row in BY_TORCH.values())
            raise self.fail("cast_unsupported", dtype=str(dtype), hint=f"the dtypes are {shown}")
        kind = BY_TORCH[dtype].loads_as
        made = self.emit("cast", x.node, attr=dtype, kind=kind, dims=x.dims)
        return Typed(made, kind, x.dims, narrow=None if dtype in (torch.int32, torch.int64) else dtype)

    def infer_cast_like(self, node: Node, args: list[Typed]) -> Typed:
        return self.inferred_of(Node("cast", node.args[:1], attr=self.named_dtype(node.args[1], args[1])), args[:1])

    def infer_rounded_like(self, node: Node, args: list[Typed]) -> Typed:
        x, narrow = args[0], narrow_of(args[1:])
        if x.host or x.kind != "float" or x.narrow == narrow or x.narrow not in (None, *NARROW):
            return x
        cast = Node("cast", node.args[:1], attr=narrow or self.problem.float_dtype)
        return self.inferred_of(cast, [x])

    def infer_debug_print(self, node: Node, args: list[Typed]) -> Typed:
        if args[0].host:
            raise self.fail("tensor_wanted", what="debug_print")
        x = self.settle(args[0])
        return replace(x, node=self.emit("debug_print", x.node, attr=node.attr, kind=x.kind, dims=x.dims))

    def infer_access(self, node: Node, args: list[Typed]) -> Typed:
        """The operand, after a check that it varies only over the axes that the visitor tree's loading node allows."""
        x, (want, label) = args[0], node.attr
        if x.host:
            return x
        if want == "column" and len(x.shape) == 1 and x.shape != (1,):
            x = self.viewed(x, ("unsqueeze", 1), (*x.shape, 1))
        fits = self.fits(x)
        axes = {factor.axis for factor in factors_of(self.settle(x).dims)} if fits else set()
        if not (fits and axes <= {*ACCESS_AXES[want], "l"}):
            hint = f"a {want} has the shape {ACCESS_SHAPES[want]}, and accum is {self.problem.accum_shape}"
            raise self.fail("tree_access", node=label, want=want, shape=args[0].shape, hint=hint)
        return x

    # --- reductions ------------------------------------------------------------------------------------------

    def infer_reduce_dims(self, node: Node, args: list[Typed]) -> Typed:
        name, dim, keepdim = node.attr
        if args[0].host:
            raise self.fail("tensor_wanted", what=name)
        return self.reduction(name, self.settle(args[0]), dim, keepdim=keepdim)

    def infer_reduce_axes(self, node: Node, args: list[Typed]) -> Typed:
        """The reduction of a visitor tree, which reduces a tile over axes of accum."""
        (name, axes), (x,) = node.attr, self.with_definite_kinds(args)
        tile = self.tile_of(Typed(self.device(x), x.kind) if x.host else self.settle(x))
        return self.reduction(name, tile, self.dims_of_axes(axes), keepdim=False)

    def reduction(self, name: str, x: Typed, dim: tuple[int, ...] | None, *, keepdim: bool) -> Typed:
        self.computable(x)
        kind = kinds.reduction_kind(name, x.kind)
        shape = shape_of(x.dims, self.extents)
        chosen = [normalise(d, len(shape)) for d in (range(len(shape)) if dim is None else dim)]
        if len(set(chosen)) != len(chosen):
            raise self.fail("dim_twice", dim=next(d for d in chosen if chosen.count(d) > 1))
        shown, gone = factors_of(x.dims), factors_of([x.dims[d] for d in chosen])
        cut = {factor.axis for factor in gone} & {factor.axis for factor in shown if factor not in gone}
        kept = [(d if i not in chosen else ()) for i, d in enumerate(x.dims) if keepdim or i not in chosen]
        if not cut and not kept:
            # Factors of extent one that a reshape dropped are reduced too: the result has no dim that could hold them
            # (`whole`). If a part of an axis is left, they stay: the result exists tile by tile, as they require.
            gone = canonical([*gone, *(f for f in self.unit_factors_of(x.node) if f not in shown)])
        if not REDUCTIONS[name].has_identity and any(dim_size(x.dims[d], self.extents) == 0 for d in chosen):
            raise self.fail("max_of_nothing", name=name)
        dims: Dims = tuple(kept)
        made = self.reduced(name, x, gone, kind, dims)
        narrow = x.narrow if kind == "float" else None
        if narrow is not None:
            made = self.emit("cast", made, attr=narrow, kind="float", dims=dims)
        return Typed(made, kind, dims, narrow=narrow)

    def infer_gather(self, node: Node, args: list[Typed]) -> Typed:
        """One element along a dim: the sum along the dim with all other elements set to zero, which is exact."""
        x = self.settle(args[0])
        index = self.settle(args[1], x.dims) if not args[1].host else args[1]
        at = normalise(node.attr, len(x.dims))
        want = tuple(1 if i == at else extent for i, extent in enumerate(self.shape(x)))
        if index.host or self.shape(index) != want:
            shape = "a number" if index.host else self.shape(index)
            raise self.fail("gather_index", dim=node.attr, want=want, shape=shape)
        if x.kind == "mask":
            raise self.fail("masks_in_arithmetic", op="gather")
        if index.kind not in ("int32", "int64"):
            raise self.fail("integers_wanted", op="the index of gather", kind=kinds.NAMES[index.kind])
        here = self.result("eq", [self.coordinate(x, len(x.dims) - at), index], "mask")
        nothing = 0.0 if x.kind == "float" else 0
        zero = self.infer_const(Node("const", attr=nothing), [])
        if waits := waiting(x.node, x.dims[at], self):
            dims = tuple(() if i == at else dim for i, dim in enumerate(x.dims))
            found = replace(x, node=chosen(waits, here.node, x.dims[at], self), dims=dims)
            return self.result("where", [self.is_inside(index, x.dims[at]), found, zero], x.kind)
        found = self.reduction("sum", self.result("where", [here, x, zero], x.kind), (at,), keepdim=True)
        if x.kind != "int32":
            return found
        made = self.emit("cast", found.node, attr=torch.int32, kind="int32", dims=found.dims)
        return replace(found, node=made, kind="int32")

    def is_inside(self, index: Typed, dim: Dim) -> Typed:
        """The mask that is true where `index` lies within the extent of this dim."""
        zero, size = (self.emit("const", attr=number, kind="int32", is_host=True) for number in (0, 1))
        for factor in dim:
            size = self.emit("mul", size, self.count(factor), kind="int", is_host=True)
        first, end = Typed(zero, "int32", host=True), Typed(size, "int", host=True)
        low = self.result("ge", self.with_definite_kinds([index, first]), "mask")
        high = self.result("lt", self.with_definite_kinds([index, end]), "mask")
        return self.result("logical_and", [low, high], "mask")

    def infer_assume_one_hot(self, node: Node, args: list[Typed]) -> Typed:
        """A claim that `eliminate_reductions` uses. It is dropped for integers, because their sums are int64."""
        x = self.settle(args[0])
        factors = x.dims[normalise(node.attr, len(x.dims))]
        if x.kind != "float" or not factors or not dim_size(factors, self.extents):
            return x
        return replace(x, node=self.emit("one_hot", x.node, attr=factors, kind=x.kind, dims=x.dims))

    def tile_of(self, x: Typed) -> Typed:
        """`x` in the dims of accum. Values of a visitor tree are tiles: a value is the same all along an axis over
        which it does not vary."""
        want = self.accum_dims
        outwards = zip(reversed(x.dims), chain(reversed(want), repeat(())), strict=False)
        if any(dim not in ((), own) for dim, own in outwards):
            raise self.fail("tree_reduced_dims", shape=shape_of(x.dims, self.extents))
        return self.expanded(x, want)

    def infer_expand_as(self, node: Node, args: list[Typed]) -> Typed:
        """The first argument, broadcast to the dims of the second."""
        x, like = self.with_definite_kinds(args[:1])[0], self.settle(args[1])
        x = Typed(self.device(x), x.kind) if x.host else self.settle(x, like.dims)
        if broadcast([x.dims, like.dims], self.extents) != like.dims:
            raise DimsError("shapes_differ", left=self.shape(x), right=self.shape(like))
        return self.expanded(x, like.dims)

    def dims_of_axes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The positions of these axes among the dims of accum. A problem without a batch has no axis l."""
        return tuple(i for i, dim in enumerate(self.accum_dims) if dim[0].axis in axes)

    def reduced(self, name: str, x: Typed, gone: tuple[Any, ...], kind: Kind, dims: Dims) -> Node:
        if gone:
            return self.emit("reduce", x.node, attr=(name, gone), kind=kind, dims=dims)
        # A reduction over dims of extent one is elementwise.
        zero = partial(self.emit, "const", attr=0, kind="int32")
        return kinds.of_one(name, x.node, kind, partial(self.emit, dims=dims), zero)

    # --- roots -----------------------------------------------------------------------------------------------

    def output(self, output: Output) -> Output:
        value = self.settle(self.values[output.node])
        if value.host:
            raise self.fail("output_is_host", name=output.name)
        return Output(output.name, value.node, self.whole(value), _last_cast(output.node))

    def whole(self, value: Typed) -> Dims:
        """The dims of `value` with the factors of extent one that a reshape dropped. Each fills a dim of extent one, if
        there is one, because that is its dim in an output with more rows. The others go into the first dim."""
        dims, ones = value.dims, self.types[value.node].factors
        shown = factors_of(dims)
        dropped = iter([f for f in ones if f.size(self.extents) == 1 and f not in shown])
        found = [dim or tuple(islice(dropped, 1)) for dim in dims]
        return ((*dropped, *found[0]), *found[1:]) if found else dims


ACCESS_AXES = {"scalar": "", "row": "n", "column": "m", "tile": "mn"}
ACCESS_SHAPES = {
    "scalar": "() or (L, 1, 1)",
    "row": "(N,), (1, N) or (L, 1, N)",
    "column": "(M,), (M, 1) or (L, M, 1)",
    "tile": "of accum",
}

_HOST_HINTS = {
    "probability": "hand p of dropout as a number",
    "and": "combine masks with &",
    "or": "combine masks with |",
    "not": "invert a mask with ~",
    "chained comparison": "write (a < x) & (x < b)",
}


_OF_MASKS = {
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_xor": "ne",
    "bitwise_not": "logical_not",
}
"""The operation that an operation on bits becomes if all its arguments are masks."""


def _waits(node: Node) -> bool:
    """Whether an operation on operands alone waits for the dims of the value that it meets. A random number does not
    wait, because it depends on the element's place."""
    if node.op in PRIMITIVES:
        return PRIMITIVES[node.op].rule != "random"
    return node.op in ("call", "cast")


def _last_cast(node: Node) -> torch.dtype | None:
    """The dtype of an explicit cast that only layout operations and checks follow, which compute nothing; else None."""
    while node.op in ("permute", "reshape", "unsqueeze", "part", "rearrange", "tensor", "torch"):
        node = node.args[0]
    return node.attr if node.op == "cast" else None


def _is_natural(node: Node) -> bool:
    return node.op == "const" and isinstance(node.attr, int) and node.attr >= 0
