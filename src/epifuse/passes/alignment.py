"""Alignment: where inferred values meet. Makes typed nodes, aligns operands, hoists what the host computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, NoReturn

import numpy as np
import torch

from epifuse.base.dtypes import short
from epifuse.base.errors import EpifuseError, fail
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
"""Floats that arithmetic can run in: PyTorch rounds after each operation, and so do we after an explicit cast."""


@dataclass(frozen=True)
class Typed:
    """A value while inferring. `raw` and `shape` are set where nothing has aligned it yet: an operand, or an expression
    of operands alone, which takes the dims of what it meets."""

    node: Node
    kind: Kind
    dims: Dims = ()
    host: bool = False
    narrow: torch.dtype | None = None
    raw: Load | Postponed | None = None
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Postponed:
    """An elementwise operation of the written graph whose operands among `args` are aligned once it meets a value.

    `scalar` is the same operation of operands of one element, `depth` how many operations are postponed one upon the
    other. A view of it is the same of views of its operands if they are `alike`: of one shape, or of one element.
    """

    node: Node
    args: tuple[Typed, ...]
    scalar: Typed
    depth: int
    alike: bool


_DEEPEST_VIEWED = 64
"""Operations that are postponed one upon the other, of which a view is one of their operands: that is recursive."""


class Alignment:
    """What the rules of inference share: the graph being made, and how values come to stand beside one another."""

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
        """Names for what the host computes. A derivative reads numbers of its epilogue under theirs."""
        given = {node.attr.name for node in self.graph.loads()}
        return (name for name in map("#{}".format, count()) if name not in given)

    @cached_property
    def accum_dims(self) -> Dims:
        """The dims of accum as the user sees it: in the problem's order, or as the graph says."""
        order = next((node.attr for node in self.graph.nodes if node.op == "accum"), None)
        return self.problem.accum_dims if order is None else tuple((Factor(axis),) for axis in order)

    def fail(self, key: str, **values: Any) -> EpifuseError:
        return fail(key, self.graph.loc(self.current), **values)

    def explained(self, error: KindError | DimsError) -> dict[str, Any]:
        values: dict[str, Any] = dict(error.values)
        if error.key in ("shapes_differ", "dims_differ", "ranges_differ"):
            values["op"] = self.current.attr if self.current.op == "call" else self.current.op
            values["hint"] = _hint({arg.op for arg in self.current.args})
        return values

    def emit(self, op: str, *args: Node, attr: Any = None, kind: Kind, dims: Dims = (), is_host: bool = False) -> Node:
        node = self.builder.node(op, *args, attr=attr, locs=self.graph.locs.get(self.current, ()))
        # A literal that the kernel reads stays the kernel's, though a host expression may hold it too.
        is_host = is_host and (node not in self.types or self.types[node].host)
        self.types[node] = Type(kind, canonical([*factors_of(dims), *self.ones(node)]), is_host)
        if not is_host:
            self.whole_numbers.follow(node, [self.types[arg].kind for arg in args], kind)
        return node

    def ones(self, node: Node) -> list[Factor]:
        """The factors of extent one below `node`: a reshape drops them from dims, the values still vary over them."""
        gone = removed(node)
        return [factor for arg in node.args for factor in self.ones_of(arg) if factor not in gone]

    def ones_of(self, node: Node) -> list[Factor]:
        """The factors of extent one that `node` varies over."""
        return [factor for factor in self.types[node].factors if factor.size(self.extents) == 1]

    def device(self, value: Typed) -> Node:
        """A host value as the kernel sees it: a constant, or a scalar operand that the host computes at each launch."""
        if not value.host:
            return value.node
        if value.node.op == "const":  # a node of its own for each kind: an extent may stand beside floats and integers
            number = float(value.node.attr) if value.kind == "float" else value.node.attr
            return self.emit("const", attr=number, kind=kinds.const_kind(number))
        if value.node.op == "load" and value.kind == self.types[value.node].kind:
            return self.emit("load", attr=Load(value.node.attr.name, (), ()), kind=value.kind)
        if not any(node.op in host.LEAVES for node in topological((value.node,))):
            number = self.evaluate(value.node)
            return self.emit("const", attr=number, kind=kinds.const_kind(number))
        # An integer may be used as an integer and as a float: two scalars of one number.
        if (name := self.hosts.get(key := (value.node, value.kind))) is None:
            name = self.hosts[key] = next(self.names)
        return self.emit("load", attr=Load(name, (), ()), kind=value.kind)

    def taken(self, values: Sequence[Typed], *, floating: bool = False, exact: bool = False) -> list[Typed]:
        """`values`, where a Python integer is what it stands beside: a float beside floats, else an exact integer.

        It has 64 bits beside one that has, and where they all count, `exact`."""
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
        """The rule of an operation; see `infer_types`."""
        raise NotImplementedError

    def postponed(self, node: Node, args: list[Typed]) -> Typed | None:
        """An operation that waits for the value that it meets; None for any other.

        It is of operands alone, or of operands and of values that vary over too little to say where those lie: beside
        the mean of a half of each row, a vector over that half. Its kind is that of the same operation of scalars,
        which stays outside the graph: nothing uses it.
        """
        waiting = [arg for arg in args if arg.raw is not None]
        settled = [arg for arg in args if arg.raw is None and not arg.host]
        if not waiting or (settled and not self.says_too_little(waiting, settled)):
            return None
        below = [arg.raw for arg in waiting if isinstance(arg.raw, Postponed)]
        depth = 1 + max((each.depth for each in below), default=0)
        shapes = [arg.shape for arg in waiting] + [shape_of(arg.dims, self.extents) for arg in settled]
        try:
            shape = np.broadcast_shapes(*shapes)  # torch's imports sympy, in 0.4 s
        except ValueError:  # beside accum they may fit
            return None
        alike = not settled and all(own in (shape, (1,), ()) for own in shapes) and all(each.alike for each in below)
        scalar = self.infer(node, [arg if arg.raw is None else self.scalar(arg) for arg in args])
        raw = Postponed(node, tuple(args), scalar, depth, alike and depth <= _DEEPEST_VIEWED)
        return Typed(node, scalar.kind, narrow=scalar.narrow, raw=raw, shape=shape)

    def says_too_little(self, waiting: Sequence[Typed], settled: Sequence[Typed]) -> bool:
        """Whether operands do not lie beside these values, nor beside accum, and the graph cuts axes."""
        if not self.cuts_axes:
            return False
        try:
            partner = broadcast([arg.dims for arg in settled], self.extents)
        except DimsError:  # told where they meet
            return False
        beside = [(arg.shape, self.beside(arg.shape, partner)) for arg in waiting]
        return any(align(shape, met, self.accum_dims, self.extents) is None for shape, met in beside)

    def scalar(self, value: Typed) -> Typed:
        """What nothing has aligned, as if it had one element."""
        if isinstance(value.raw, Postponed):
            return value.raw.scalar
        return Typed(self.emit("load", attr=value.raw, kind=value.kind), value.kind)

    def settle(self, value: Typed, partner: Dims = ()) -> Typed:
        """An operand aligned with `partner`, and with accum where the partner does not vary."""
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
        """Raise for an operand that does not broadcast to the shape of what it meets."""
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
        """What is postponed, aligned after all that it is made of: without recursion, and once for each partner."""
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
                # It is kept with what it was found for, whose number so stays its own.
                self.settled[id(raw), met] = raw, self.infer(raw.node, args)
                self.current = meeting
                stack.pop()
        return self.settled[id(value.raw), partner][1]

    @cached_property
    def cuts_axes(self) -> bool:
        """Whether the graph as written cuts axes. Only then is a structure one of these extents (`structure`)."""
        return not self.graph.ops.isdisjoint(("reshape", "rearrange", "part"))

    def fits(self, value: Typed) -> bool:
        """Whether it could be aligned with accum."""
        return align(value.shape, (), self.accum_dims, self.extents) is not None

    def beside(self, shape: tuple[int, ...], partner: Dims) -> Dims:
        """What an operand of this shape is aligned with: its partner, or where that lacks a dim that is a part of an
        axis, as the mean of a head does, accum in the shape that both broadcast to."""
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
        """Raise for a value of a dtype that is stored alone: fp8, or float32 where all is computed in float64."""
        if value.narrow is not None and value.narrow not in NARROW:
            cast = "double()" if self.problem.float_dtype is torch.float64 else "float()"
            if not value.narrow.is_floating_point:
                cast = "to(torch.int32)"
            raise self.fail("storage_only", dtype=short(value.narrow), cast=cast)

    def result(
        self, node_op: str, values: Sequence[Typed], kind: Kind, attr: Any = None, *, exact: bool = False
    ) -> Typed:
        """An elementwise operation: aligned, and rounded to a narrow float where PyTorch would have computed in one."""
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


def _hint(below: set[str]) -> str:
    """What to write where the results of these operations do not meet."""
    if "part" in below:
        return "combine parts that were taken in the same way: two halves, or two of every second column"
    if "join" in below:
        return "store one of the two: columns that were joined in another order do not meet accum's"
    if below & {"permute", "reshape", "rearrange"} and not below & {"reduce_dims", "reduce_axes"}:
        return "permute or reshape both sides in the same way"
    return "pass keepdim=True to the reduction, or index its result with [:, None]"


def removed(node: Node) -> tuple[Factor, ...]:
    """The factors that an operation takes away from what its argument varies over."""
    if node.op == "pick":
        return tuple(factor for factor, _ in node.attr)
    return tuple(node.attr[1]) if node.op == "reduce" else ()


def narrow_of(values: Sequence[Typed]) -> torch.dtype | None:
    """float16 or bfloat16 if every float tensor among the values is of it; numbers and integers do not widen."""
    found = {value.narrow for value in values if value.kind == "float" and not value.host}
    return found.pop() if len(found) == 1 else None
