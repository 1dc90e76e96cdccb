"""Split regions: an epilogue whose outputs belong to ranges of columns becomes one epilogue for each range.

The epilogue of a range uses only the range's columns of B, and computes values for these columns only: operands are
read from its first column on. A range is then a product like any other, with an N of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from epifuse.passes.spans import WAY_OUT, Columns, UnsplitError, one_of, spans, taken_by
from epifuse.request.problem import Problem
from epifuse.request.scaled import blocks_of_columns


class Region(NamedTuple):
    """A range of columns, and the graph of what is computed from it."""

    columns: Columns
    graph: Graph


class Split(NamedTuple):
    """The regions. `unshared` is the node and the reason why the regions do not share the outputs of all columns, if
    that was tried.

    It is not an exception, because an exception keeps alive the values in its frames.
    """

    regions: tuple[Region, ...]
    unshared: tuple[Node, str] | None = None


def split_regions(graph: Graph, problem: Problem, *, shares: bool) -> Split:
    """The regions, in the order of their first outputs. Outputs of all columns are in a region of all columns.

    With `shares`, each range writes its own part of such outputs instead, if every value of them can be cut: then no
    column is computed twice. Raises `UnsplitError` if a value needs several ranges.
    """
    whole = Columns(0, problem.extents["n"])
    of_node = spans(graph, problem, whole)
    groups: dict[Columns, _Roots] = {}
    for output in graph.outputs:
        groups.setdefault(one_of(of_node[output.node], whole), _Roots([], [])).outputs.append(output)
    for effect in graph.effects:
        groups.setdefault(one_of(of_node[effect], whole), _Roots([], [])).effects.append(effect)
    why = None
    if shares and (shared := _shared(groups, whole)):
        try:
            return Split(_regions(graph, problem, shared, whole))
        except UnsplitError as error:
            why = error.node, error.reason
    return Split(_regions(graph, problem, groups, whole), why)


class _Roots(NamedTuple):
    """What is computed from a range: its outputs and effects. It writes a part of each `shared` output of all
    columns."""

    outputs: list[Output]
    effects: list[Node]
    shared: Sequence[Output] = ()


def _shared(groups: Mapping[Columns, _Roots], whole: Columns) -> Mapping[Columns, _Roots] | None:
    """The `groups` with the outputs of all columns shared among the ranges; further ranges fill the columns between.
    None if there are no such outputs or no ranges, if ranges overlap, or if an effect is of all columns."""
    of_all = groups.get(whole)
    if of_all is None or of_all.effects or len(groups) == 1:
        return None
    found = {columns: own for columns, own in groups.items() if columns != whole}
    at = 0
    for start, stop in (*sorted(found), (whole.stop, whole.stop)):
        if start < at:
            return None
        if start > at:
            found[Columns(at, start)] = _Roots([], [])
        at = stop
    return {columns: own._replace(shared=of_all.outputs) for columns, own in found.items()}


def _regions(graph: Graph, problem: Problem, groups: Mapping[Columns, _Roots], whole: Columns) -> tuple[Region, ...]:
    found = (Region(columns, _graph(graph, problem, columns, whole, roots)) for columns, roots in groups.items())
    return tuple(region for region in found if region.graph.roots)


def problem_of(region: Region, problem: Problem) -> Problem:
    """The problem of one region: `problem` with the region's columns of B, and its own outputs."""
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


# --- the graph of one region -----------------------------------------------------------------------------------------


def _graph(graph: Graph, problem: Problem, columns: Columns, whole: Columns, roots: _Roots) -> Graph:
    if columns == whole:
        made = replace(graph, outputs=tuple(roots.outputs), effects=tuple(roots.effects))
    else:
        made = refined(_Cutting(graph, problem, columns).graph(roots))
    made = prune(made, problem)
    loaded = {node.attr.name for node in made.loads()}
    return assign_stages(replace(made, inputs=tuple(name for name in graph.inputs if name in loaded)), problem)


def _dims_of(node: Node) -> Dims:
    """The dims that are named in the `attr` of a node."""
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
    """Yield the strides at which these dims cut columns along one of `axes`. Other axes are those of other regions."""
    for factor in (factor for dims in named for dim in dims for factor in joined(dim)):
        if factor.axis in axes:
            yield factor.stride
            if factor.extent is not None:
                yield factor.stride * factor.extent


class _Cutting:
    """Rewrites one graph into the graph of a region. The region's columns become the axis n."""

    def __init__(self, old: Graph, problem: Problem, columns: Columns) -> None:
        self.old, self.problem, self.columns = old, problem, columns
        self.width = columns.stop - columns.start
        self.builder = Builder()
        self.cuts: set[int] = set()

    def graph(self, of_region: _Roots) -> Graph:
        old, builder = self.old, self.builder
        outputs, effects, shared = of_region
        roots = [*(output.node for output in outputs), *effects]
        of_all = [output.node for output in shared]
        taken = {n: columns for n in topological(roots) if (columns := self._columns_taken(n)) is not None}
        own = [node for node in topological([*roots, *of_all]) if taken.get(node) != self.columns]
        dims = (*map(_dims_of, own), *(output.dims or () for output in (*outputs, *shared)))
        self.cuts.update(_cuts(dims, ("n", region(*self.columns))))
        below: dict[Node, Node] = {}
        for node in topological([*(node.args[0] for node in taken), *of_all]):
            below[node] = self._below(node, [below[arg] for arg in node.args])
        made = {node: self._part(node, columns, below[node.args[0]]) for node, columns in taken.items()}
        for node in topological(roots, known=made):
            made[node] = self._made(node, [made[arg] for arg in node.args], node.attr)
        hosts = topological(old.hosts.values())
        left = [output._replace(node=made[output.node], dims=self._dims(output.dims or ())) for output in outputs]
        left += filter(None, [self._own(output, below[output.node]) for output in shared])
        return replace(
            old.with_roots(left, [made[effect] for effect in effects]),
            locs={**{node: old.locs[node] for node in hosts if node in old.locs}, **builder.locs},
            types={**{node: old.types[node] for node in hosts if node in old.types}, **builder.types},
        )

    def _columns_taken(self, node: Node) -> Columns | None:
        """The columns that a node takes of all columns, if they are the region or an equal part in it; else None."""
        columns = taken_by(node, self.old, self.problem)
        if columns is None or columns == self.columns:
            return columns
        (start, stop), own = columns, self.columns
        return columns if node.op == "pick" and own.start <= start and stop <= own.stop else None

    def _part(self, node: Node, columns: Columns, x: Node) -> Node:
        """The `columns` that a node takes, from `x`, the node's argument computed for the region's columns only."""
        if columns == self.columns:
            return x
        inner = [(factor, place) for factor, place in node.attr if factor.stride < self.width]
        attr = tuple((self._factors((factor,))[0], place % (self.width // factor.stride)) for factor, place in inner)
        return self._emitted(node, "pick", x, attr=attr)

    def _below(self, node: Node, args: list[Node]) -> Node:
        """A value of all columns, computed for the region's columns only."""
        attr = node.attr
        self._check_cuts(node, _dims_of(node))
        match node.op:
            case "load":
                attr = self._load(node)
            case "index" if (stride := self._stride(attr, node)) is not None:
                return self._counted(node, self.columns.start // stride)
            case "reduce" if any(self._is_outer(factor) for factor in attr[1]):
                raise UnsplitError(node, f"it needs {attr[0]} over whole rows for a part of their columns: {WAY_OUT}")
            case "pick" if any(self._is_outer(factor) for factor, _ in attr):
                raise UnsplitError(node, f"it takes columns of parts of a row: {WAY_OUT}")
        return self._made(node, args, attr)

    def _check_cuts(self, node: Node, dims: Dims) -> None:
        """Raise if the region begins or ends within a head, or another piece into which these dims cut N."""
        for factor in (factor for dim in dims for factor in joined(dim) if factor.axis == "n"):
            piece = factor.stride * (factor.extent or 1)
            if any(column % piece for column in self.columns):
                raise self._cuts_a_dim(node)

    def _cuts_a_dim(self, node: Node) -> UnsplitError:
        start, stop = self.columns
        return UnsplitError(node, f"it cuts a dim in columns {start}:{stop}: {WAY_OUT}")

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
                if not attr[1]:  # a reduction of one column
                    kind = self.old.types[node].kind
                    zero = partial(constant, 0, self.builder)
                    return kinds.of_one(attr[0], args[0], kind, partial(self._emitted, node), zero)
            case "region":  # a smaller range within this region
                attr = attr[0] - self.columns.start, attr[1] - self.columns.start
            case "pick":
                attr = tuple((self._factors((factor,))[0], place) for factor, place in attr)
        return self._emitted(node, node.op, *args, attr=attr)

    def _emitted(self, old: Node, op: str, *args: Node, attr: Any = None, kind: Kind | None = None) -> Node:
        """A node in place of `old`, of its kind unless another `kind` is given."""
        made = self.builder.node(op, *args, attr=attr, locs=self.old.locs.get(old, ()))
        known = self.old.types[old]
        factors = canonical(self._factors(known.factors))
        self.builder.types[made] = replace(known, kind=kind or known.kind, factors=factors)
        return made

    def _is_outer(self, factor: Factor) -> bool:
        """Whether the factor reaches beyond the region."""
        return factor.axis == "n" and (factor.extent is None or factor.stride * factor.extent > self.width)

    def _factors(self, factors: Iterable[Factor]) -> Dim:
        """The factors with the region's columns as N. Factors that step over the whole region are dropped."""
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
        """The axis of a smaller range within the region, counted from its first column; None for any other axis."""
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

    def _stride(self, dim: Dim, node: Node) -> int | None:
        """The stride, in columns, of a dim that runs over all columns; None for any other dim."""
        if not any(factor == Factor("n", factor.stride) for factor in dim):
            return None
        along = joined([factor for factor in dim if factor.size(self.problem.extents) != 1])
        if len(along) > 1:
            raise self._cuts_a_dim(node)
        return along[0].stride if along else None

    def _load(self, node: Node) -> Any:
        """The `Load` of the region's columns of an operand that may vary over all columns."""
        return node.attr._replace(views=(*node.attr.views, *self._parts(node.attr.dims or (), node)))

    def _parts(self, dims: Dims, node: Node) -> Iterator[tuple[str, Any]]:
        """Yield the layout operations that take the region's columns from a tensor with these dims."""
        for at, dim in enumerate(dims):
            if (stride := self._stride(dim, node)) is not None:
                yield "part", (at, self.columns.start // stride, self.columns.stop // stride, 1, False)

    def _own(self, output: Output, value: Node) -> Output | None:
        """The region's part of an output of all columns. An output that does not vary over columns is written by the
        region of column 0; other regions give None."""
        dims = output.dims or ()
        self._check_cuts(output.node, dims)
        parts = tuple(self._parts(dims, output.node))
        if not parts:
            return None if self.columns.start else output._replace(node=value, dims=self._dims(dims))
        return output.part(value, self._dims(dims), parts, self.problem.extents)

    def _counted(self, node: Node, first: int) -> Node:
        """A coordinate among all columns: the place within the region plus `first`."""
        builder, factors = self.builder, self._factors(node.attr)
        constant = builder.node("const", attr=first, locs=self.old.locs.get(node, ()))
        builder.types[constant] = Type("int32")
        if not factors:
            return constant
        own = builder.node("index", attr=factors, locs=self.old.locs.get(node, ()))
        builder.types[own] = Type("int32", canonical(factors))
        return own if first == 0 else typed(builder, "add", (own, constant))
