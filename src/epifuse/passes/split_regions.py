"""Split regions: an epilogue whose outputs are of ranges of columns becomes one for each range, over its columns of B.

What is computed before the columns are taken is computed of each range alone: operands are read from its first column
on. Then a range is a product like any other, with an N of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isqrt, prod
from typing import Any, NamedTuple

from epifuse.ir import Builder, Dims, Factor, Graph, Kind, Node, Output, Type
from epifuse.ir.graph import topological
from epifuse.ir.types import Dim, canonical, columns_of, region
from epifuse.passes import kinds
from epifuse.passes.assign_stages import assign_stages
from epifuse.passes.canonicalise import constant, typed
from epifuse.passes.dims import joined
from epifuse.passes.prune import prune
from epifuse.passes.refine import refined
from epifuse.request.problem import Problem
from epifuse.request.scaled import blocks_of_columns


class Columns(NamedTuple):
    """A range of columns."""

    start: int
    stop: int


class Region(NamedTuple):
    """A range of columns, and the graph of what is computed of it."""

    columns: Columns
    graph: Graph


class UnsplitError(Exception):
    """What is not computed of one range, or one part of a row, alone, and why."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


_WAY_OUT = "store the product, and combine its parts in PyTorch"


def split_regions(graph: Graph, problem: Problem) -> tuple[Region, ...]:
    """The regions in the order of the first output of each; values of all columns are of one that has all.

    Raises `UnsplitError` where a value needs several.
    """
    whole = Columns(0, problem.extents["n"])
    spans = _spans(graph, problem, whole)
    groups: dict[Columns, tuple[list[Output], list[Node]]] = {}
    for output in graph.outputs:
        groups.setdefault(_of(spans[output.node], whole), ([], []))[0].append(output)
    for effect in graph.effects:
        groups.setdefault(_of(spans[effect], whole), ([], []))[1].append(effect)
    return tuple(Region(columns, _graph(graph, problem, columns, whole, *own)) for columns, own in groups.items())


def problem_of(region: Region, problem: Problem) -> Problem:
    """The problem of a region of this one: its columns of B, and the outputs that are its own."""
    (start, stop), names = region.columns, {output.name for output in region.graph.outputs}
    b = problem.b
    aligned = b.aligned and start * b.strides[-1] * b.dtype.itemsize % 16 == 0
    return problem._replace(
        b=b._replace(shape=(*b.shape[:-1], stop - start), aligned=aligned),
        outputs=tuple(pair for pair in problem.outputs if pair[0] in names),
        dtypes=tuple(pair for pair in problem.dtypes if pair[0] in names),
        aliases=tuple(pair for pair in problem.aliases if pair[0] in names),
        scales=blocks_of_columns(problem.scales, start, stop),
    )


# --- which columns a value is of -------------------------------------------------------------------------------------

_Spans = Mapping[Node, frozenset[Columns]]


def _of(span: frozenset[Columns], whole: Columns) -> Columns:
    return next(iter(span), whole)


def _spans(graph: Graph, problem: Problem, whole: Columns) -> _Spans:
    """Of each value, what it is of: one range; none where it does not vary over columns, or over those of heads alone.

    Equal parts that meet each other are of the smallest one that holds them, and those whose values lie side by side in
    more columns than one part has, of all columns.
    """
    parts: set[Columns] = set()
    while True:
        found = _spans_beside(parts, graph, problem, whole)
        wide = {
            columns: node for node, span in found.items() for columns in span if not _fits(node, columns, graph, whole)
        }
        if not wide:
            return found
        for columns in parts & {*wide}:  # no part, but a range
            told = f"joined values do not fit side by side into columns {columns.start}:{columns.stop}"
            raise UnsplitError(wide[columns], f"{told}: {_WAY_OUT}")
        parts |= {*wide}


def _spans_beside(parts: Collection[Columns], graph: Graph, problem: Problem, whole: Columns) -> _Spans:
    """The same where these equal parts are of all columns."""
    widths = _widths(graph, problem)
    found: dict[Node, frozenset[Columns]] = {}
    uneven: dict[Node, bool] = {}
    for node in graph.nodes:
        below = frozenset(columns for arg in node.args for columns in found[arg])
        uneven[node] = node.op == "region" or any(uneven[arg] for arg in node.args)
        columns = _taken(node, graph, problem)
        if columns is not None and below <= {whole} and (uneven[node] or columns not in parts):
            below = frozenset({columns})
        elif not node.args:
            below = frozenset(_varying(graph.types[node].factors, problem, whole))
        if len(below) > 1 and not uneven[node]:
            first, last = min(below).start, max(columns.stop for columns in below) - 1
            around = (Columns(first // w * w, first // w * w + w) for w in widths if first // w == last // w)
            below = frozenset({next((columns for columns in around if columns not in parts), whole)})
        if len(below) > 1:
            told = " and ".join(f"{start}:{stop}" for start, stop in sorted(below))
            raise UnsplitError(node, f"it computes with columns {told} of a row at once: {_WAY_OUT}")
        found[node] = below
    return found


def _widths(graph: Graph, problem: Problem) -> list[int]:
    """How wide equal parts of all columns may be, each of which every factor counts along, within or beyond."""
    n, factors = problem.extents["n"], {f for type_ in graph.types.values() for f in type_.factors if f.axis == "n"}
    ends = [(factor.stride, factor.stride * factor.size(problem.extents)) for factor in factors]
    some = {width for i in range(1, isqrt(n) + 1) if n % i == 0 for width in (i, n // i)}
    return [
        width
        for width in sorted(some)
        if all(not (step % width and width % end and (width % step or end % width)) for step, end in ends)
    ]


def _fits(node: Node, columns: Columns, graph: Graph, whole: Columns) -> bool:
    """Whether the columns of a range have room for the places of all values that lie side by side."""
    width = columns.stop - columns.start
    beyond = [
        factor
        for factor in graph.types[node].factors
        if factor.axis == "n" and (factor.extent is None or width % (factor.stride * factor.extent))
    ]
    return columns == whole or not beyond


def _varying(factors: Iterable[Factor], problem: Problem, whole: Columns) -> Iterable[Columns]:
    """What an operand or a coordinate is of."""
    for factor in factors:
        if factor.along == "n" and factor.axis != "n":
            yield Columns(*columns_of(factor.axis, problem.extents))
        elif factor == Factor("n", factor.stride):
            yield whole


def _taken(node: Node, graph: Graph, problem: Problem) -> Columns | None:
    """The columns that a node takes of all."""
    if node.op == "region":
        return Columns(*node.attr)
    if node.op != "pick":
        return None
    gone = {factor for factor, _ in node.attr}
    width = min(factor.stride for factor in gone)
    own = graph.types[node.args[0]].factors
    if gone != {factor for factor in own if factor.axis == "n" and factor.stride >= width}:
        return None
    if width * prod(factor.size(problem.extents) for factor in gone) != problem.extents["n"]:
        return None  # one of the values that were joined, which are not all columns
    start = sum(factor.stride * place for factor, place in node.attr)
    return Columns(start, start + width)


# --- the graph of one region -----------------------------------------------------------------------------------------


def _graph(
    graph: Graph, problem: Problem, columns: Columns, whole: Columns, outputs: Sequence[Output], effects: Sequence[Node]
) -> Graph:
    if columns == whole:
        made = replace(graph, outputs=tuple(outputs), effects=tuple(effects))
    else:
        made = refined(_Cutting(graph, problem, columns).graph(outputs, effects))
    made = prune(made, problem)
    loaded = {node.attr.name for node in made.loads()}
    return assign_stages(replace(made, inputs=tuple(name for name in graph.inputs if name in loaded)), problem)


def _dims_of(node: Node) -> Dims:
    """The dims that a node names."""
    match node.op:
        case "load":
            return node.attr.dims or ()
        case "index" | "one_hot" | "expand":
            return (node.attr,)
        case "reduce":
            return (node.attr[1],)
        case "pick":
            return tuple((factor,) for factor, _ in node.attr)
    return ()


def _cuts(named: Iterable[Dims], axes: Collection[str]) -> Iterable[int]:
    """Where columns that are along one of these axes are cut by these dims: elsewhere only other regions cut them."""
    for factor in (factor for dims in named for dim in dims for factor in joined(dim)):
        if factor.axis in axes:
            yield factor.stride
            if factor.extent is not None:
                yield factor.stride * factor.extent


class _Cutting:
    """The rewriting of one graph into that of a region, whose columns are N."""

    def __init__(self, old: Graph, problem: Problem, columns: Columns) -> None:
        self.old, self.problem, self.columns = old, problem, columns
        self.width = columns.stop - columns.start
        self.builder = Builder()
        self.cuts: set[int] = set()

    def graph(self, outputs: Sequence[Output], effects: Sequence[Node]) -> Graph:
        old, builder = self.old, self.builder
        roots = [*(output.node for output in outputs), *effects]
        taken = {n: columns for n in topological(roots) if (columns := self._taken(n)) is not None}
        own = [node for node in topological(roots) if taken.get(node) != self.columns]
        dims = (*map(_dims_of, own), *(output.dims or () for output in outputs))
        self.cuts.update(_cuts(dims, ("n", region(*self.columns))))
        below: dict[Node, Node] = {}
        for node in topological([node.args[0] for node in taken]):
            below[node] = self._below(node, [below[arg] for arg in node.args])
        made = {node: self._part(node, columns, below[node.args[0]]) for node, columns in taken.items()}
        for node in topological(roots, known=made):
            made[node] = self._made(node, [made[arg] for arg in node.args], node.attr)
        hosts = topological(old.hosts.values())
        return replace(
            old.with_roots(
                [output._replace(node=made[output.node], dims=self._dims(output.dims or ())) for output in outputs],
                [made[effect] for effect in effects],
            ),
            locs={**{node: old.locs[node] for node in hosts if node in old.locs}, **builder.locs},
            types={**{node: old.types[node] for node in hosts if node in old.types}, **builder.types},
        )

    def _taken(self, node: Node) -> Columns | None:
        """The columns of the region that a node takes of all: all of its own, or one of its equal parts."""
        columns = _taken(node, self.old, self.problem)
        if columns is None or columns == self.columns:
            return columns
        (start, stop), own = columns, self.columns
        return columns if node.op == "pick" and own.start <= start and stop <= own.stop else None

    def _part(self, node: Node, columns: Columns, x: Node) -> Node:
        """What a node takes, of a value `x` of the region's columns."""
        if columns == self.columns:
            return x
        inner = [(factor, place) for factor, place in node.attr if factor.stride < self.width]
        attr = tuple((self._factors((factor,))[0], place % (self.width // factor.stride)) for factor, place in inner)
        return self._emitted(node, "pick", x, attr=attr)

    def _below(self, node: Node, args: list[Node]) -> Node:
        """A value of all columns, of the region's alone."""
        attr = node.attr
        self._check_cuts(node)
        match node.op:
            case "load":
                attr = self._load(node)
            case "index" if (first := self._first(attr, node)) is not None:
                return self._counted(node, first)
            case "reduce" if any(self._is_outer(factor) for factor in attr[1]):
                raise UnsplitError(node, f"it needs {attr[0]} over whole rows for a part of their columns: {_WAY_OUT}")
            case "pick" if any(self._is_outer(factor) for factor, _ in attr):
                raise UnsplitError(node, f"it takes columns of parts of a row: {_WAY_OUT}")
        return self._made(node, args, attr)

    def _check_cuts(self, node: Node) -> None:
        """Raise where the region begins or ends within a head, or any other piece of N, that the node counts along."""
        for factor in (factor for dim in _dims_of(node) for factor in joined(dim) if factor.axis == "n"):
            piece = factor.stride * (factor.extent or 1)
            if any(column % piece for column in self.columns):
                raise self._cuts_a_dim(node)

    def _cuts_a_dim(self, node: Node) -> UnsplitError:
        start, stop = self.columns
        return UnsplitError(node, f"it cuts a dim in columns {start}:{stop}: {_WAY_OUT}")

    def _made(self, node: Node, args: list[Node], attr: Any) -> Node:
        match node.op:
            case "load":
                attr = attr._replace(dims=self._dims(attr.dims or ()))
            case "index" | "one_hot" | "expand":
                attr = self._factors(attr)
                if node.op == "expand" and not attr:
                    return args[0]
            case "reduce":
                attr = attr[0], self._factors(attr[1])
                if not attr[1]:  # of one column
                    kind = self.old.types[node].kind
                    zero = partial(constant, 0, self.builder)
                    return kinds.of_one(attr[0], args[0], kind, partial(self._emitted, node), zero)
            case "region":  # a range of this one
                attr = attr[0] - self.columns.start, attr[1] - self.columns.start
            case "pick":
                attr = tuple((self._factors((factor,))[0], place) for factor, place in attr)
        return self._emitted(node, node.op, *args, attr=attr)

    def _emitted(self, old: Node, op: str, *args: Node, attr: Any = None, kind: Kind | None = None) -> Node:
        """A node in place of an old one, of another `kind` if one is given."""
        made = self.builder.node(op, *args, attr=attr, locs=self.old.locs.get(old, ()))
        known = self.old.types[old]
        factors = canonical(self._factors(known.factors))
        self.builder.types[made] = replace(known, kind=kind or known.kind, factors=factors)
        return made

    def _is_outer(self, factor: Factor) -> bool:
        """Whether it counts beyond the region."""
        return factor.axis == "n" and (factor.extent is None or factor.stride * factor.extent > self.width)

    def _factors(self, factors: Iterable[Factor]) -> Dim:
        """The region's own columns are N: what steps over all of them is gone."""
        found: list[Factor] = []
        for factor in factors:
            if (inner := self._inner(factor.axis)) is not None:
                found.append(factor._replace(axis=inner))
                continue
            if factor.along == "n" and factor.stride >= self.width:
                continue
            if factor.along == "n":
                extent = factor.extent
                ends = extent is not None and factor.stride * extent >= self.width
                factor = Factor("n", factor.stride, None if ends else extent)
                if found and factor.extent is not None and found[-1].along == "n":
                    outer = found[-1]
                    if outer.stride == factor.stride * factor.extent and outer.stride not in self.cuts:
                        (factor,) = joined((found.pop(), factor))
            found.append(factor)
        return tuple(found)

    def _inner(self, axis: str) -> str | None:
        """The axis of a range of the region, counted from the region's first column; None for another axis."""
        if axis[0] != "n":
            return None
        first, last = columns_of(axis, self.problem.extents)
        start, stop = self.columns
        return (
            region(first - start, last - start)
            if start <= first and last <= stop and axis != region(start, stop)
            else None
        )

    def _dims(self, dims: Dims) -> Dims:
        return tuple(map(self._factors, dims))

    def _first(self, dim: Dim, node: Node) -> int | None:
        """Where the region begins along a dim of all columns; None for one of others."""
        if not any(factor == Factor("n", factor.stride) for factor in dim):
            return None
        along = joined(dim)
        if len(along) > 1:
            raise self._cuts_a_dim(node)
        return self.columns.start // along[0].stride

    def _load(self, node: Node) -> Any:
        """An operand of all columns, read from the region's first one on."""
        load = node.attr
        for at, dim in enumerate(load.dims or ()):
            if (first := self._first(dim, node)) is not None:
                last = self.columns.stop // joined(dim)[0].stride
                load = load._replace(views=(*load.views, ("part", (at, first, last, 1, False))))
        return load

    def _counted(self, node: Node, first: int) -> Node:
        """A coordinate among all columns."""
        builder, factors = self.builder, self._factors(node.attr)
        constant = builder.node("const", attr=first, locs=self.old.locs.get(node, ()))
        builder.types[constant] = Type("int32")
        if not factors:
            return constant
        own = builder.node("index", attr=factors, locs=self.old.locs.get(node, ()))
        builder.types[own] = Type("int32", canonical(factors))
        return own if first == 0 else typed(builder, "add", (own, constant))
