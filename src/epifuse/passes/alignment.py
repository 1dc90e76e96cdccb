"""Alignment: how inferred values are combined. Makes typed nodes, gives operands their dims, hoists host arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NoReturn

import numpy as np
import torch

from epifuse.base.dtypes import short
from epifuse.base.errors import EpifuseError, fail
from epifuse.base.lazy import cached_property
from epifuse.fusion import host
from epifuse.ir import Builder, Dims, Factor, Graph, Kind, Load, Node, Type
from epifuse.ir.graph import topological
from epifuse.ir.types import canonical, factors_of, shape_of
from epifuse.passes import kinds
from epifuse.passes.dims import DimsError, align, broadcast, regroup, shape_hint
from epifuse.passes.kinds import KindError
from epifuse.passes.whole_numbers import Ranges
from epifuse.request.problem import Problem

NARROW = (torch.float16, torch.bfloat16)
"""Narrow floats that arithmetic can run in. PyTorch rounds to them after each operation; after an explicit cast to one
of them the epilogue does so too."""


@dataclass(frozen=True)
class Typed:
    """A value during inference.

    `narrow` is the dtype of an explicit cast, of the value or of all floats that it is computed from; None without one,
    and for int32, int64 and the dtype of computation. `raw` and `shape` are set as long as the value has no dims: an
    operand, or an expression of operands alone, gets its dims from the value that it meets. `host` marks a number that
    lives on the host.
    """

    node: Node
    kind: Kind
    dims: Dims = ()
    host: bool = False
    narrow: torch.dtype | None = None
    raw: Load | Postponed | None = None
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Postponed:
    """An elementwise operation of the written graph whose operands among `args` get their dims once it meets a value.

    `scalar` is the result of the same operation for operands of one element, from which kind and dtype are known.
    `depth` is the length of the chain of postponed operations that ends here. If the operands are `alike` (of one
    shape, or of one element), a view of the result is the operation on views of its operands.
    """

    node: Node
    args: tuple[Typed, ...]
    scalar: Typed
    depth: int
    alike: bool


_DEEPEST_VIEWED = 64
"""The largest `depth` at which a view is passed on to the operands of postponed operations: this is recursive."""


class Alignment:
    """What the inference rules share: the graph that they make, and how values are aligned with each other."""

    def __init__(self, graph: Graph, problem: Problem) -> None:
        self.graph = graph
        self.problem = problem
        self.extents = problem.extents
        self.builder = Builder()
        self.types: dict[Node, Type] = {}
        self.values: dict[Node, Typed] = {}
        self.hosts: dict[tuple[Node, Kind], str] = {}
        self.settled: dict[tuple[int, Dims], tuple[Postponed, Typed]] = {}
        self.views: dict[tuple[int, Any], tuple[Postponed, Typed]] = {}
        self.whole_numbers = Ranges()
        self.current: Node = Node("none")

    @cached_property
    def names(self) -> Iterator[str]:
        """New names for scalars that the host computes. Names of loads are skipped, because the graph of a derivative
        loads the host scalars of its epilogue under such names."""
        given = {node.attr.name for node in self.graph.loads()}
        return (name for name in map("#{}".format, count()) if name not in given)

    @cached_property
    def accum_dims(self) -> Dims:
        """The dims of accum as the user sees it: those of the problem, unless the graph's accum node names an order."""
        order = next((node.attr for node in self.graph.nodes if node.op == "accum"), None)
        return self.problem.accum_dims if order is None else tuple((Factor(axis),) for axis in order)

    def fail(self, key: str, **values: Any) -> EpifuseError:
        return fail(key, self.graph.loc(self.current), **values)

    def explained(self, error: KindError | DimsError) -> dict[str, Any]:
        values: dict[str, Any] = dict(error.values)
        if error.key in ("shapes_differ", "dims_differ", "ranges_differ"):
            values["op"] = self.current.attr if self.current.op == "call" else self.current.op
            values["hint"] = _hint([arg.op for arg in self.current.args])
        return values

    def emit(self, op: str, *args: Node, attr: Any = None, kind: Kind, dims: Dims = (), is_host: bool = False) -> Node:
        node = self.builder.node(op, *args, attr=attr, locs=self.graph.locs.get(self.current, ()))
        # A literal that the kernel reads keeps its device type, even if a host expression holds the same literal.
        is_host = is_host and (node not in self.types or self.types[node].host)
        self.types[node] = Type(kind, canonical([*factors_of(dims), *self.kept_unit_factors(node)]), is_host)
        if not is_host:
            self.whole_numbers.follow(node, [self.types[arg].kind for arg in args], kind)
        return node

    def kept_unit_factors(self, node: Node) -> list[Factor]:
        """The factors of extent one that `node` keeps from its arguments. Dims lose them in a reshape, types do not."""
        gone = removed(node)
        return [factor for arg in node.args for factor in self.unit_factors_of(arg) if factor not in gone]

    def unit_factors_of(self, node: Node) -> list[Factor]:
        """The factors of extent one that `node` varies over."""
        return [factor for factor in self.types[node].factors if factor.size(self.extents) == 1]

    def device(self, value: Typed) -> Node:
        """The node that the kernel reads. For a host value it is a constant, or a scalar operand that the host computes
        at each launch."""
        if not value.host:
            return value.node
        if value.node.op == "const":  # one node for each kind: the same extent may stand beside floats and integers
            number = float(value.node.attr) if value.kind == "float" else value.node.attr
            return self.emit("const", attr=number, kind=kinds.const_kind(number))
        if value.node.op == "load" and value.kind == self.types[value.node].kind:
            return self.emit("load", attr=Load(value.node.attr.name, (), ()), kind=value.kind)
        if not any(node.op in host.LEAVES for node in topological((value.node,))):
            number = self.evaluate(value.node)
            return self.emit("const", attr=number, kind=kinds.const_kind(number))
        # An integer that is used both as an integer and as a float becomes two scalars of the same number.
        if (name := self.hosts.get(key := (value.node, value.kind))) is None:
            name = self.hosts[key] = next(self.names)
        return self.emit("load", attr=Load(name, (), ()), kind=value.kind)

    def with_definite_kinds(
        self, values: Sequence[Typed], *, floating: bool = False, exact: bool = False
    ) -> list[Typed]:
        """`values`, with a definite kind for each Python integer: float beside a float or if `floating`, else integer.

        The integer is an int64 beside an int64 tensor, or if `exact` (all 64 bits count), and else an int32."""
        beside = {value.kind for value in values}
        wide = exact or any(value.kind == "int64" and not value.host for value in values)
        kind: Kind = "float" if floating or "float" in beside else "int64" if wide else "int32"
        return [replace(value, kind=kind) if value.kind == "int" else value for value in values]

    def evaluate(self, node: Node) -> Any:
        try:
            return kinds.fitting(host.evaluate(node, lambda load: None), 64)
        except host.HostError as error:
            raise self.fail("host_arithmetic", detail=str(error)) from None

    def aligned(self, values: Sequence[Typed]) -> tuple[list[Node], Dims]:
        """Device nodes of `values` and the dims they broadcast to; operands not yet aligned are aligned here."""
        partner = broadcast([v.dims for v in values if v.raw is None and not v.host], self.extents)
        settled = [self.settle(value, partner) for value in values]
        dims = broadcast([value.dims for value in settled if not value.host], self.extents)
        return [self.device(value) for value in settled], dims

    def infer(self, node: Node, args: list[Typed]) -> Typed:
        """Apply the inference rule of the node's operation; see `infer_types`."""
        raise NotImplementedError

    def postponed(self, node: Node, args: list[Typed]) -> Typed | None:
        """`node` as an operation that waits for the value that it meets, or None if it does not have to wait.

        It waits if all its tensors are operands, or if its other values vary over too few axes to say where the
        operands lie: for example the mean of one half of each row, beside a vector as long as that half. Its kind is
        that of the same operation on scalars. The node for the scalars is not in the graph, because nothing uses it.
        """
        waiting = [arg for arg in args if arg.raw is not None]
        settled = [arg for arg in args if arg.raw is None and not arg.host]
        if not waiting or (settled and not self.says_too_little(waiting, settled)):
            return None
        below = [arg.raw for arg in waiting if isinstance(arg.raw, Postponed)]
        depth = 1 + max((each.depth for each in below), default=0)
        shapes = [arg.shape for arg in waiting] + [shape_of(arg.dims, self.extents) for arg in settled]
        try:
            shape = np.broadcast_shapes(*shapes)  # torch.broadcast_shapes imports sympy, which takes 0.4 s
        except ValueError:  # they may still fit once each is aligned with accum
            return None
        alike = not settled and all(own in (shape, (1,), ()) for own in shapes) and all(each.alike for each in below)
        scalar = self.infer(node, [arg if arg.raw is None else self.scalar(arg) for arg in args])
        raw = Postponed(node, tuple(args), scalar, depth, alike and depth <= _DEEPEST_VIEWED)
        return Typed(node, scalar.kind, narrow=scalar.narrow, raw=raw, shape=shape)

    def says_too_little(self, waiting: Sequence[Typed], settled: Sequence[Typed]) -> bool:
        """Whether the graph cuts axes, and some operand of `waiting` fits neither the `settled` values nor accum."""
        if not self.cuts_axes:
            return False
        try:
            partner = broadcast([arg.dims for arg in settled], self.extents)
        except DimsError:  # reported later, where these values meet
            return False
        beside = [(arg.shape, self.beside(arg.shape, partner)) for arg in waiting]
        return any(align(shape, met, self.accum_dims, self.extents) is None for shape, met in beside)

    def scalar(self, value: Typed) -> Typed:
        """A value without dims, as if it had one element."""
        if isinstance(value.raw, Postponed):
            return value.raw.scalar
        return Typed(self.emit("load", attr=value.raw, kind=value.kind), value.kind)

    def settle(self, value: Typed, partner: Dims = ()) -> Typed:
        """`value` with dims: aligned with `partner`, and with accum in dims in which the partner does not vary."""
        if value.raw is None:
            return value
        partner = self.beside(value.shape, partner)
        if isinstance(value.raw, Postponed):
            return self.settled_after(value, partner)
        dims = align(value.shape, partner, self.accum_dims, self.extents)
        if dims is None:
            self.refuse(value, shape_of(partner, self.extents) if partner else self.problem.accum_shape)
        node = self.emit("load", attr=value.raw._replace(dims=dims), kind=value.kind, dims=dims)
        return Typed(node, value.kind, dims)

    def refuse(self, value: Typed, met: tuple[int, ...]) -> NoReturn:
        """Raise for an operand that does not broadcast to `met`, the shape of the value that it meets."""
        assert isinstance(value.raw, Load)
        name, shape, accum = value.raw.name, value.shape, self.problem.accum_shape
        if met == accum:
            hint = shape_hint(name, shape, accum)
            if any(op == "part" for op, _ in value.raw.views):
                name, hint = f"part of {name}", "combine it with the same part of accum, or pass it as another operand"
            raise self.fail("operand_shape", name=name, shape=shape, accum=accum, hint=hint)
        if self.fits(value):
            hint = f"it fits accum's {accum}: take the same part of {name} in the same words"
        else:
            few = f"operands broadcast by NumPy's rule: a number, or {met}"
            hint = shape_hint(name, shape, met) if len(met) > 1 else few
        raise self.fail("operand_met", name=name, shape=shape, met=met, hint=hint)

    def settled_after(self, value: Typed, partner: Dims) -> Typed:
        """A postponed value with dims, aligned after all values below it. Without recursion; once for each partner."""
        stack = [] if (id(value.raw), partner) in self.settled else [(value.raw, partner)]
        while stack:
            raw, met = stack[-1]
            assert isinstance(raw, Postponed)
            below = [(arg.raw, self.beside(arg.shape, met)) for arg in raw.args if isinstance(arg.raw, Postponed)]
            waiting = [each for each in below if (id(each[0]), each[1]) not in self.settled]
            stack += waiting
            if not waiting:
                meeting, self.current = self.current, raw.node
                args = [self.settle(arg, met) for arg in raw.args]
                # The entry also keeps `raw` alive, so that no other object can get the same `id`.
                self.settled[id(raw), met] = raw, self.infer(raw.node, args)
                self.current = meeting
                stack.pop()
        return self.settled[id(value.raw), partner][1]

    @cached_property
    def cuts_axes(self) -> bool:
        """Whether the written graph splits axes or takes parts of them. Alignment may read extents only then, because
        the structure then serves one N only (`structure`)."""
        return not self.graph.ops.isdisjoint(("reshape", "rearrange", "part"))

    def fits(self, value: Typed) -> bool:
        """Whether an operand of this shape broadcasts to accum."""
        return align(value.shape, (), self.accum_dims, self.extents) is not None

    def beside(self, shape: tuple[int, ...], partner: Dims) -> Dims:
        """The dims that an operand of this shape is aligned with: those of its partner. If the partner lacks a dim that
        is a part of an axis, as the mean of a head does, they are accum's in the shape that both broadcast to."""
        if align(shape, partner, self.accum_dims, self.extents) is not None or not self.cuts_axes:
            return partner
        try:
            both = np.broadcast_shapes(shape, shape_of(partner, self.extents))
            whole = regroup(self.accum_dims, both, self.extents)
        except (DimsError, ValueError):
            return partner
        meets = all(own in ((), other) for own, other in zip(reversed(partner), reversed(whole), strict=False))
        cuts = all(len({factor.axis for factor in dim}) < 2 for dim in whole)
        return whole if meets and cuts else partner

    def computable(self, value: Typed) -> None:
        """Raise for a dtype that can be stored but not computed in, such as fp8, or float32 in a float64 epilogue."""
        if value.narrow is not None and value.narrow not in NARROW:
            cast = "double()" if self.problem.float_dtype is torch.float64 else "float()"
            if not value.narrow.is_floating_point:
                cast = "to(torch.int32)"
            raise self.fail("storage_only", dtype=short(value.narrow), cast=cast)

    def result(
        self, node_op: str, values: Sequence[Typed], kind: Kind, attr: Any = None, *, exact: bool = False
    ) -> Typed:
        """An elementwise operation on aligned `values`, rounded to a narrow float if PyTorch would compute in one.

        With `exact`, integers may have 64 bits."""
        for value in values:
            self.computable(value)
        nodes, dims = self.aligned(values)
        wide = exact or any(value.kind == "float" and not value.host for value in values)
        wide = wide or any(value.kind == "int64" and not value.host for value in values)
        for value, node in zip(values, nodes, strict=True):
            if node.op == "const":
                kinds.fitting(node.attr, 64 if wide else 32)
            elif value.host and value.kind == "int64" and not wide:
                raise KindError("literal_range", bits="more than 31")
        node = self.emit(node_op, *nodes, attr=attr, kind=kind, dims=dims)
        narrow = narrow_of(values) if kind == "float" else None
        if narrow is not None:
            node = self.emit("cast", node, attr=narrow, kind="float", dims=dims)
        return Typed(node, kind, dims, narrow=narrow)


def _hint(below: list[str]) -> str:
    """What the user can write if the results of the operations in `below` do not broadcast."""
    if len(below) > 1 and all(op in _REDUCTIONS for op in below):
        return "reduce each of them to a number first, or return both"
    if "part" in below:
        return "combine parts that were taken in the same way: two halves, or two of every second column"
    if "join" in below:
        return "store one of the two: columns that were joined in another order do not meet accum's"
    if {"permute", "reshape", "rearrange"}.intersection(below) and not _REDUCTIONS.intersection(below):
        return "permute or reshape both sides in the same way"
    return "pass keepdim=True to the reduction, or index its result with [:, None]"


_REDUCTIONS = {"reduce_dims", "reduce_axes"}


def removed(node: Node) -> tuple[Factor, ...]:
    """The factors of its argument that a `pick` or `reduce` node removes; none for other operations."""
    if node.op == "pick":
        return tuple(factor for factor, _ in node.attr)
    return tuple(node.attr[1]) if node.op == "reduce" else ()


def narrow_of(values: Sequence[Typed]) -> torch.dtype | None:
    """The narrow dtype that all float tensors among `values` have, else None. Numbers and integers do not matter."""
    found = {value.narrow for value in values if value.kind == "float" and not value.host}
    return found.pop() if len(found) == 1 else None
