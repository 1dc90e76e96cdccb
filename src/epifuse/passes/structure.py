"""What an epilogue is whatever the extents: its typed graph, its identity, and what each provider makes of it, once.

Types hold axes and not extents, so that one graph serves every size. Extents of zero and one are classes of their own,
and so are extents that are equal: an operand is aligned with the axes by its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, TypeVar

from epifuse import passes
from epifuse.base.cache import LRU
from epifuse.frontend import Parsed
from epifuse.fusion.operations import OPERATIONS
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.ir import Graph, Node
from epifuse.ir.types import dim_size
from epifuse.passes.eliminate_reductions import counts_equal_values
from epifuse.request.problem import Problem, TensorInfo
from epifuse.request.views import Seen, after

Work = TypeVar("Work")


@dataclass(frozen=True, eq=False)
class Structure:
    """The typed graph, and its identity: with the names in the order of the digest it determines the graph.

    `works` holds by provider what it lowered the graph to. `exact` are the extents that it holds for, where it does not
    hold for all of its class: where the number of values that were reduced is a constant of the graph.
    """

    graph: Graph
    digest: str
    binding: tuple[str, ...]
    exact: Mapping[str, int] | None = None
    works: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def reduced(self) -> frozenset[Node]:
        """Results of reductions, and what is made of such and varies over nothing else."""
        found: set[Node] = set()
        for node in self.graph.nodes:
            over = {factor for arg in node.args if arg in found for factor in self.graph.types[arg].factors}
            is_made = not found.isdisjoint(node.args) and over.issuperset(self.graph.types[node].factors)
            if node.op == "reduce" or is_made:
                found.add(node)
        return frozenset(found)

    @staticmethod
    def of(graph: Graph, problem: Problem, *, exact: bool = False) -> Structure:
        """The structure of a graph that is typed already."""
        return Structure(graph, *passes.identity(graph, problem), problem.extents if exact else None)

    def work(self, provider: str, lower: Callable[[Graph, Problem], Work], problem: Problem) -> Work:
        """What `provider` lowers the graph to; asked once, of the first problem."""
        found = self.works.get(provider)
        if found is None:
            # Two threads may both lower it; both get the one that was first.
            found = self.works.setdefault(provider, lower(self.graph, problem))
        return found  # type: ignore[no-any-return]  # by provider, so of its own type


STRUCTURES: LRU[Hashable, Structure] = LRU(256)


def structure_of(parsed: Parsed, problem: Problem) -> Structure:
    """The structure of an epilogue as parsed. Raises `EpilogueTypeError` for what it cannot mean."""
    graph = parsed.graph
    key: tuple[Hashable, ...] = parsed.key, layout_class(graph, problem)
    found = STRUCTURES.get(key)
    if found is not None and not _suits(found, problem):
        key = *key, *problem.extents.values()
        found = STRUCTURES.get(key)
    if found is None:
        typed = passes.typed(graph, problem)
        made = Structure.of(passes.finished(typed, problem), problem, exact=counts_equal_values(typed))
        found = STRUCTURES.put(key, made)
    return found


def _suits(structure: Structure, problem: Problem) -> bool:
    """Whether a structure of this class holds for the problem: it has the same extents, if these matter, and operands
    have those of the dims that they are loaded with. A part of N that was as long as M in the first problem of a class
    may not be so in this one."""
    if structure.exact not in (None, problem.extents):
        return False
    for node in structure.graph.loads():
        load, info = node.attr, problem.by_name.get(node.attr.name)
        if isinstance(info, TensorInfo) and (own := after(Seen(info.shape, info.strides), load.views)) is not None:
            pairs = zip(own.shape, load.dims, strict=True)
            if any(extent not in (1, dim_size(dim, problem.extents)) for extent, dim in pairs):
                return False
    return True


def layout_class(graph: Graph, problem: Problem) -> Hashable:
    """Problems of one class have one structure for the `graph` as written."""
    extents = problem.extents
    axes: dict[int, str] = {}
    for axis in "lmn":
        if (extent := extents[axis]) > 1:
            axes[extent] = axes.get(extent, "") + axis
    symbol = axes.get  # of an extent; those of no axis stand for themselves
    sizes = tuple([symbol(extents[axis], extents[axis]) for axis in "lmn"])
    operands = tuple(
        [
            (name, tuple([symbol(extent, extent) for extent in info.shape]), info.dtype)
            if isinstance(info, TensorInfo)
            else (name, info.kind)
            for name, info in problem.operands
        ]
    )
    exact: Hashable = None
    if reads_rows(graph, problem):
        exact = tuple(extents.values())
    elif _reads_extents(graph):
        exact = extents["n"]
    product = len(problem.a.shape), len(problem.b.shape), problem.a.dtype, problem.b.dtype, problem.accumulator
    scaled = tuple([name for name, _ in problem.scales])
    return product, scaled, sizes, operands, problem.accumulated, problem.constraints, exact


def reads_rows(graph: Graph, problem: Problem) -> bool:
    """Whether operations of the `graph` as written may read another extent than N."""
    return _reads_extents(graph) and not _reads_columns(graph, problem)


def _reads_extents(graph: Graph) -> bool:
    return not _READ_EXTENTS.isdisjoint(graph.ops)


def _reads_columns(graph: Graph, problem: Problem) -> bool:
    """Whether N is the only extent that operations read: they cut or join the last dim, which nothing else changes.

    An operand whose last dim may be one of rows is cut there as well.
    """
    n, rows = problem.extents["n"], {problem.extents["m"], problem.extents["l"]} - {1}
    shapes = [info.shape for _, info in problem.operands if isinstance(info, TensorInfo) and info.shape]
    if not ({shape[-1] for shape in shapes} - {n}).isdisjoint(rows):
        return False
    matrices = _RANKING.isdisjoint(graph.ops) and all(len(shape) <= 2 for shape in (*shapes, problem.accum_shape))
    last = (-1, 1) if matrices else (-1,)
    # Else a value may have a dim before its rows.
    names_rows = "join" not in graph.ops and all(len(shape) <= 2 for shape in (*shapes, problem.accum_shape))
    without: set[Node] = set()  # values whose last dim may be one of rows: it was merged, moved, or dropped behind it
    alone: set[Node] = set()  # expressions of operands alone
    whole: set[Node] = set()  # values with all columns of a row, one behind the other
    for node in graph.written:
        below = not without.isdisjoint(node.args)
        if node.op != "accum" and alone.issuperset(node.args):
            alone.add(node)
        if node.op == "reshape":
            is_of_columns = not below and node.args[0] in whole and _divides(node, n, whole if names_rows else set())
        elif node.op in _READ_EXTENTS and not _turns(node):
            numbers = () if node.op == "join" else node.args[1:]
            is_of_columns = not below and _cuts(node, last, alone) and not _measures(numbers, last)
        else:
            is_of_columns = True
        if not is_of_columns:
            return False
        shaping = node.args[:1] if node.op in _LIKE else node.args
        if node.op == "accum" or (node.op in _KEEPING and not whole.isdisjoint(shaping)):
            whole.add(node)
        if below or _turns(node) or _drops(node):
            without.add(node)
    return True


def _turns(node: Node) -> bool:
    """Whether the last dim may be another one than its argument's."""
    return node.op in ("permute", "unsqueeze") or (node.op == "rearrange" and node.attr[0] in ("t", "transpose"))


def _drops(node: Node) -> bool:
    """Whether a value may have fewer dims than its argument."""
    if node.op == "reduce_dims":
        return not node.attr[2]
    if node.op == "rearrange":
        return node.attr[0] in ("flatten", "squeeze")
    if node.op == "reshape":
        return len(node.attr) == 1
    return node.op == "part" and node.attr[1] == "element" and node.attr[0] >= -1


def _cuts(node: Node, last: tuple[int, ...], alone: set[Node]) -> bool:
    """Whether an operation cuts or joins one of these dims, which are the last one."""
    if node.op == "rearrange":
        how, numbers = node.attr
        # What is written on an operand, or on an expression of such, holds the extents of its other dims.
        return node.args[0] not in alone and any(numbers[: len(dims)] == dims for dims in _OF_LAST.get(how, ()))
    if node.op == "part" and -_pieces(node.args[0]) <= node.attr[0] < 0:
        return True
    return node.op in ("part", "join", "roll") and node.attr[0] in last


def _pieces(node: Node) -> int:
    """How many of the last dims are what the last one was divided into."""
    while node.op in ("tensor", "torch"):
        node = node.args[0]
    if node.op == "reshape":
        return max(len(node.attr) - 1, 1)
    is_divided = node.op == "rearrange" and node.attr[0] == "unflatten" and node.attr[1][0] == -1
    return len(node.attr[1]) - 1 if is_divided else 1


def _divides(node: Node, columns: int, flat: set[Node]) -> bool:
    """Whether a reshape divides the columns of a row, and leaves the rows as they are: by the first extent of one of
    `flat`, or as what is left."""
    if not node.attr:  # of one element
        return False
    first, *others = node.attr
    if first is None:  # the rows, by name
        rows, *numbers = node.args[1:]
        return rows.op == "extent" and rows.attr[0] == (0,) and rows.args[0] in flat and not _measures(numbers, (-1,))
    return first == -1 and all(others) and None not in others and columns % prod(others) == 0


def _measures(args: Sequence[Node], last: tuple[int, ...]) -> bool:
    """Whether numbers are made of other extents than that of the last dim."""
    numbers = list(args)
    while numbers:
        number = numbers.pop()
        if number.op != "extent":
            numbers.extend(number.args)
        elif number.attr[0] is None or not set(number.attr[0]) <= set(last):
            return True
    return False


_LIKE = frozenset({"cast_like", "rounded_like"})
"""Operations whose results have the shape of their first argument."""
_KEEPING = frozenset({"tensor", "torch", "call", "cast", "reshape", *_LIKE, *PRIMITIVES})
"""Operations whose results have all columns, one behind the other, if one of their arguments has."""
_OF_LAST = {"unflatten": ((-1,),), "flatten": ((-2, -1), (0, -1)), "squeeze": ((-1,),)}
"""Dims of an operation that divides, drops or joins the last one."""
_RANKING = frozenset({"rearrange", "reshape", "join"})
"""Operations after which a value may have more than two dims."""
_READ_EXTENTS = frozenset(name for name, operation in OPERATIONS.items() if operation.reads_extents)
