"""Two parts of a row at once, such as the two halves of a gate: the graph is woven, that is, rewritten over half of the
columns, and the product has two values for each of these.

The parts are the two halves of a row, or its even and odd columns. One thread computes a column of both parts, because
TMA weaves the rows of B: it brings eight of the first part, eight of the second, and so on. If B is contiguous along N,
TMA brings each part to one half of the tile instead (`kernels/parts.py`). The kernel's result has half as many columns
as the product, and a node that varies over both parts becomes two nodes, one for each part. An operand or output that
is as wide as the product becomes two, each a part of the same tensor. Imports no cutlass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from epifuse.ir import Builder, Dims, Factor, Graph, Node, Output, Type
from epifuse.ir.graph import topological
from epifuse.ir.types import Dim, canonical, dim_size
from epifuse.passes.canonicalise import typed
from epifuse.passes.spans import UnsplitError
from epifuse.plan import Reason
from epifuse.providers.cutedsl import pairs
from epifuse.providers.cutedsl.design import SUBTILE, Design
from epifuse.providers.cutedsl.segments import STEP
from epifuse.request.problem import Problem

Order = Literal["", "stacked", "interleaved"]
"""How the rows of the two parts lie in B, seen as (N, K): one part behind the other, or alternating. "" if there are no
parts."""
PARTS = 2
STRIP = 8
"""Rows of B of one part that lie together in shared memory: of this many columns, four lanes have two each."""

Step = tuple[str, Any]
"""A layout operation on an operand or an output; see `Load.views`."""


class Woven(NamedTuple):
    """A graph over the columns of one part if there are parts. `refused` says why the graph was not rewritten."""

    graph: Graph
    order: Order = ""
    refused: Reason | None = None


def woven(graph: Graph, problem: Problem) -> Woven:
    """The graph over the columns of one part: each `accum` has the number of its part, and a `pick` becomes the node of
    the part that it takes. The graph itself if it picks nothing, or if threads hold all picked columns (`pairs.py`)."""
    picks = [node for node in graph.nodes if node.op == "pick"]
    if not picks or pairs.threads_hold_picks(graph, problem):
        return Woven(graph)
    try:
        between = _between(picks, problem.extents["n"])
        order: Order = "interleaved" if between.stride == 1 else "stacked"
        return Woven(_Weaving(graph, between, problem).graph(), order)
    except UnsplitError as error:
        return Woven(graph, refused=Reason(error.reason, graph.loc(error.node)))


def problem_of(order: Order, problem: Problem) -> Problem:
    """The problem that the kernel works on: its N is the number of columns of one part, and its B is the first part."""
    if not order:
        return problem
    b = problem.b
    *batches, row, column = b.strides
    step = column * PARTS if order == "interleaved" else column
    return problem._replace(b=b._replace(shape=(*b.shape[:-1], b.shape[-1] // PARTS), strides=(*batches, row, step)))


def rows(order: Order, half: Any, step: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Extents and strides of the rows of B in woven order, fastest first: rows of a strip, the parts, and the strips.

    Each part has `half` rows, and `step` is the stride of B's rows. Both are ints or run-time integers.
    """
    own, apart = (step, half * step) if order == "stacked" else (PARTS * step, step)
    return (STRIP, PARTS, half // STRIP), (own, apart, STRIP * own)


def refused(order: Order, problem: Problem) -> str | None:
    """Why B cannot be woven, or None. `problem` is that of the whole product, with `filled` inputs."""
    n, strides = problem.extents["n"], problem.b.strides
    if not order or problem.is_empty:
        return None
    if n % (PARTS * STRIP):
        return (
            f"it weaves {STRIP} columns of one part and {STRIP} of the other, and parts of N = {n} columns have "
            f"{n // PARTS}: pad each part to a multiple of {STRIP}"
        )
    if order == "interleaved" and strides[-2] != 1:
        return (
            "every second column needs B by columns (K contiguous): pass weight.T of an (N, K) weight, or "
            "B.mT.contiguous().mT"
        )
    return None


COLUMNS_TOGETHER = 64
"""Columns that lie together in shared memory if B is contiguous along N. A tile has a multiple of them of each part."""


def unfit(design: Design, order: Order, problem: Problem) -> str | None:
    """Why a design cannot compute two parts of a row at once, or None."""
    columns = design.tile[1] // PARTS
    if not order:
        return None
    if columns % SUBTILE[1]:
        return f"its tile has {columns} columns of each part, and a subtile has {SUBTILE[1]}"
    if replace(design, parts=PARTS).subtiles == 1:
        return "its tile has one subtile of the result, and loading and storing take two"
    if problem.b.strides[-1] == 1 and columns % COLUMNS_TOGETHER:
        return f"its tile has {columns} columns of each part, and B by rows takes multiples of {COLUMNS_TOGETHER}"
    return None


_WAY_OUT = "store the product, and take its parts in PyTorch"


def _between(picks: Sequence[Node], n: int) -> Factor:
    """The factor of N along which the two parts are the places 0 and 1. Raises `UnsplitError` if there is none."""
    first: Factor = picks[0].attr[0][0]
    for node in picks:
        for factor, _ in node.attr:
            if factor != first:
                raise UnsplitError(node, f"it takes parts of a row that lie at one distance, not at two: {_WAY_OUT}")
    count, stride = first.size({"n": n}), first.stride
    if stride % STEP and stride not in (1, n // PARTS):
        why = f"it takes columns of a row that are a multiple of {STEP} apart, halves of a row, or neighbours"
        way_out = "permute the weight's rows once, so that these are neighbours, or store the product"
        raise UnsplitError(picks[0], f"{why}, not columns {stride} apart: {way_out}")
    if count != PARTS:
        raise UnsplitError(picks[0], f"it takes one of two parts of a row, not of {count}: {_WAY_OUT}")
    if stride not in (1, n // PARTS):
        why = f"it takes halves of a row, or every second column, not columns {stride} apart"
        way_out = "permute the weight's rows once, so that the parts are halves of the row, or store the product"
        raise UnsplitError(picks[0], f"{why}: {way_out}")
    return first


class _Weaving:
    """The rewriting of one graph. A node that varies over the factor `between` becomes two nodes, any other one."""

    def __init__(self, graph: Graph, between: Factor, problem: Problem) -> None:
        self.old, self.between, self.extents = graph, between, problem.extents
        self.builder = Builder()

    def graph(self) -> Graph:
        """The rewritten graph. Raises `UnsplitError`."""
        made: dict[Node, tuple[Node, ...]] = {}
        for node in self.old.nodes:
            count = PARTS if self._varies(node) else 1
            args = [[_of(made[arg], part) for arg in node.args] for part in range(count)]
            made[node] = self._made(node, args, made)
        for effect in self.old.effects:
            if len(made[effect]) > 1:
                raise UnsplitError(effect, "it prints one part of a row at a time: print each part")
        hosts = topological(self.old.hosts.values())
        return replace(
            self.old.with_roots(self._outputs(made), [made[effect][0] for effect in self.old.effects]),
            locs={**{node: self.old.locs[node] for node in hosts if node in self.old.locs}, **self.builder.locs},
            types={**{node: self.old.types[node] for node in hosts if node in self.old.types}, **self.builder.types},
        )

    def _varies(self, node: Node) -> bool:
        return self.between in self.old.types[node].factors

    def _made(self, node: Node, args: list[list[Node]], made: dict[Node, tuple[Node, ...]]) -> tuple[Node, ...]:
        if node.op == "pick":
            ((_, place),) = node.attr
            return (_of(made[node.args[0]], place),)
        if node.op == "reduce" and self.between in node.attr[1]:
            raise UnsplitError(
                node, f"it takes parts of a row, and reduces the whole row: reduce each part, or {_WAY_OUT}"
            )
        return tuple(self._part(node, place, own) for place, own in enumerate(args))

    def _part(self, node: Node, place: int, args: list[Node]) -> Node:
        """The node of one part; `place` is the part's number, and `args` are the arguments of that part."""
        attr = node.attr
        match node.op:
            case "accum":
                attr = place
            case "load" if self._varies(node):
                step, dims = self._cut(attr.dims, place, node)
                attr = attr._replace(views=(*attr.views, step), dims=dims)
            case "load":
                attr = attr._replace(dims=self._dims(attr.dims))
            case "index":
                return self._index(node, place)
            case "reduce":
                attr = (attr[0], self._factors(attr[1]))
            case "eq" if all(arg.op == "const" for arg in args):
                return self._constant(node, args[0].attr == args[1].attr)
            case "where" if args[0].op == "const":
                chosen = args[1] if args[0].attr else args[2]
                if self.builder.types[chosen] == self._type(node):
                    return chosen
        return self._node(node, node.op, args, attr)

    def _node(self, old: Node, op: str, args: Iterable[Node], attr: Any) -> Node:
        made = self.builder.node(op, *args, attr=attr, locs=self.old.locs.get(old, ()))
        self.builder.types[made] = self._type(old)
        return made

    def _constant(self, old: Node, value: bool | int) -> Node:
        made = self.builder.node("const", attr=value, locs=self.old.locs.get(old, ()))
        self.builder.types[made] = Type("mask" if isinstance(value, bool) else "int32")
        return made

    def _index(self, node: Node, place: int) -> Node:
        """A coordinate of one part. The factor `between` is replaced by its constant `place`, times the size of the
        factors behind it."""
        if self.between not in node.attr:
            return self._node(node, "index", (), self._factors(node.attr))
        at = node.attr.index(self.between)
        before, behind = node.attr[:at], node.attr[at + 1 :]
        if any(factor.axis != "n" for factor in behind):
            raise UnsplitError(node, f"it counts columns of parts, not rows behind them: {_WAY_OUT}")
        step = dim_size(behind, self.extents)
        found = self._constant(node, place * step)
        for factors, times in (behind, 1), (before, PARTS * step):
            if factors:
                own = self.builder.node("index", attr=self._factors(factors), locs=self.old.locs.get(node, ()))
                self.builder.types[own] = Type("int32", canonical(self._factors(factors)))
                scaled = own if times == 1 else typed(self.builder, "mul", (own, self._constant(node, times)))
                found = typed(self.builder, "add", (found, scaled))
        return found

    # --- types and dims: the columns of one part are those of N without the factor between -----------------------

    def _factor(self, factor: Factor) -> Factor:
        axis, stride, extent = factor
        if axis != "n":
            return factor
        stride = stride // PARTS if stride > self.between.stride else stride
        ends = extent is not None and stride * extent * PARTS == self.extents["n"]
        return Factor(axis, stride, None if ends else extent)

    def _factors(self, factors: Iterable[Factor]) -> Dim:
        return tuple(self._factor(factor) for factor in factors if factor != self.between)

    def _dims(self, dims: Dims) -> Dims:
        return tuple(map(self._factors, dims))

    def _type(self, node: Node) -> Type:
        known = self.old.types[node]
        return replace(known, factors=self._factors(known.factors))

    def _cut(self, dims: Dims, place: int, node: Node) -> tuple[Step, Dims]:
        """The layout operation that takes part `place` of a tensor with these dims, and the dims of that part."""
        at = next(position for position, dim in enumerate(dims) if self.between in dim)
        dim = tuple(factor for factor in dims[at] if factor.size(self.extents) != 1)
        rest = tuple(factor for factor in dim if factor != self.between)
        own = self._dims(dims)
        width = dim_size(rest, self.extents)
        if any(factor.axis != "n" for factor in dim) or dim not in ((self.between, *rest), (*rest, self.between)):
            raise UnsplitError(node, f"it takes parts of a dim, not of several that are one: {_WAY_OUT}")
        if not own[at]:
            return ("part", (at, place, place + 1, 1, True)), (*own[:at], *own[at + 1 :])
        if dim[0] == self.between:
            return ("part", (at, place * width, (place + 1) * width, 1, False)), own
        return ("part", (at, place, PARTS * width, PARTS, False)), own

    def _outputs(self, made: dict[Node, tuple[Node, ...]]) -> list[Output]:
        found = []
        for output in self.old.outputs:
            dims = output.dims or ()
            if not any(self.between in dim for dim in dims):
                found.append(output._replace(node=made[output.node][0], dims=self._dims(dims)))
                continue
            for place in range(PARTS):
                step, own = self._cut(dims, place, output.node)
                found.append(output.part(_of(made[output.node], place), own, (step,), self.extents))
        return found


def _of(nodes: Sequence[Node], place: int) -> Node:
    """The node of part `place`. A single node stands for both parts, because it does not vary between them."""
    return nodes[place % len(nodes)]
