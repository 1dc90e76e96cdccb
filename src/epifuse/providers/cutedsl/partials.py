"""Reductions across tiles: what each warp writes to the workspace, and where. Imports no cutlass.

Every warp reduces its rows of a tile in registers, and writes one partial result for each row, each column, or the
whole. A second small kernel merges these in a fixed order. So results have the same bits in each run, and the workspace
needs no clearing. Partial results of one reduction are an array (words, batches, parts, length) of 32-bit words: each
of `length` results is merged from `parts` partial results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from epifuse.ir import Graph, Kind, Node
from epifuse.passes.spelling import reductions_under
from epifuse.plan import Reason
from epifuse.providers.cutedsl import segments
from epifuse.providers.cutedsl.costs import REDUCTIONS
from epifuse.providers.cutedsl.design import WARPS, Design
from epifuse.providers.cutedsl.log_sums import LOGARITHM_SUMS
from epifuse.providers.cutedsl.online import EXPONENTIALS, MOST_PLACES, PLACE
from epifuse.providers.cutedsl.program import Edge
from epifuse.providers.cutedsl.rows import merged_reductions, reduces_finished_value, written
from epifuse.request.problem import Problem

MATH_WARPS = 8  # consumer warps of a CTA
MOST_CTAS = 256  # CTAs at once: a launch uses no more, even on a GPU with more multiprocessors


@dataclass(frozen=True)
class Reduction:
    """One reduction, in a kernel or after all tiles.

    `axis` is the axis that its result runs along: "m", "n", "" for a number, or "mn" if each segment of a row has a
    result. `batched` says whether each batch has a result. A partial result is held as `kind`, in 64 bits for sums of
    integers and masks, which are then exact. `of` are the axes of the reduced value if it is known only after all
    tiles, and None if that value exists tile by tile.
    """

    node: Node
    name: str
    axis: str
    batched: bool
    kind: Kind
    of: frozenset[str] | None = None

    @property
    def source(self) -> Node:
        """The value that is reduced."""
        return self.node.args[0]

    @property
    def numbers(self) -> int:
        """How many numbers a partial result consists of."""
        return REDUCTIONS[self.name].numbers

    @property
    def words(self) -> int:
        """How many 32-bit words a partial result takes."""
        return self.numbers * (2 if self.kind == "int64" else 1)


def reductions_of(graph: Graph) -> tuple[Reduction, ...]:
    """All reductions that are merged after all tiles: first those of values of tiles, then those of finished values. In
    both groups arguments come before their users."""
    found = [reduction(node, graph) for node in merged_reductions(graph)]
    return tuple(sorted(found, key=lambda one: one.of is not None))


def reductions_of_tiles(graph: Graph) -> tuple[Reduction, ...]:
    """The reductions of values of tiles, which are the first ones of `reductions_of`."""
    return tuple(one for one in reductions_of(graph) if one.of is None)


def reduction(node: Node, graph: Graph) -> Reduction:
    """The `Reduction` of a node "reduce"."""
    axes, kind = graph.types[node].axes, graph.types[node].kind
    # `any` and `all` of a mask are merged as the largest or smallest of ones and zeros.
    held: Kind = "float" if kind == "mask" else kind
    of = graph.types[node.args[0]].axes if reduces_finished_value(node, graph) else None
    return Reduction(node, node.attr[0], "".join(sorted(axes - {"l"})), "l" in axes, held, of)


def parts(reduction: Reduction, design: Design, m: Any, n: Any) -> tuple[Any, Any]:
    """(parts, length) of the partial results of one batch. `m` and `n` are ints or run-time integers.

    Tiles beyond the result, which only fill up a cluster, write neutral values. If a finished value is reduced, its
    elements are the parts.
    """
    if reduction.of is not None:
        extents = {"m": m, "n": n, "": m // m}
        return extents["".join(reduction.of - {"l", reduction.axis})], extents[reduction.axis]
    down = _up(m, design.step[0]) * (design.step[0] // design.tile[0])
    across = tiles_across(design, n)
    warps = WARPS * design.sharing * down
    if reduction.axis == "m":
        return across, m
    if reduction.axis == "n":
        return warps, n
    # A reduction of all batches to one number is carried from tile to tile: a warp writes its part once, at its end.
    return (warps * across, m // m) if reduction.batched else (MOST_CTAS * MATH_WARPS, m // m)


def tiles_across(design: Design, n: Any) -> Any:
    """The number of tiles along N, including those that only fill up a cluster. `n` is an int or a run-time integer."""
    return _up(n, design.step[1]) * (design.step[1] // design.columns)


def edges(design: Design, m: int, n: int) -> tuple[Edge, Edge]:
    """What of the last tiles lies beyond M and beyond N (see `Edge`). Reductions must leave it out."""
    (of_m, of_n), (height, width) = design.step, design.subtile
    return _edge(m, of_m, height), _edge(n, of_n, width)


def _edge(extent: int, step: int, subtile: int) -> Edge:
    if extent % step == 0:
        return "nothing"
    return "values" if extent % subtile else "subtiles"


def _up(value: Any, step: int) -> Any:
    return (value + (step - 1)) // step


def elements(reduction: Reduction, design: Design, m: Any, n: Any, l: Any) -> Any:
    """The 32-bit words of workspace that one reduction takes."""
    kept, length = parts(reduction, design, m, n)
    return kept * length * batches(reduction, l) * reduction.words


def batches(reduction: Reduction, l: Any) -> Any:
    """The number of batches that have partial results of their own."""
    return 1 if is_carried(reduction) else l


def is_carried(reduction: Reduction) -> bool:
    """Whether a warp carries its partial result from tile to tile: one number over all batches."""
    return reduction.axis == "" and not reduction.batched and reduction.of is None


def workspace_bytes(reductions: Iterable[Reduction], design: Design, extents: Mapping[str, int]) -> int:
    """Bytes of workspace that a launch needs."""
    m, n, l = (extents[axis] for axis in "mnl")
    return 4 * sum(int(elements(one, design, m, n, l)) for one in reductions) if m and n and l else 0


def refused(graph: Graph, problem: Problem) -> str | None:
    """Why the kernel cannot compute the reductions of this graph, or None."""
    for node in graph.nodes:
        stage = graph.stages[node]
        if stage.sweep > 0:
            why = "a full-size value needs a finished reduction, which is known after the last tile"
            return Reason(why, graph.loc(node))
        if node.op == "reduce" and (reason := _refused_reduction(node, graph, problem)) is not None:
            return Reason(reason, graph.loc(node))
    if (made := _made_of_others(graph)) is not None:
        why = (
            "this value is computed from reductions, none of which has its shape, and the merging kernel computes a "
            "value only beside a reduction of the same shape"
        )
        return Reason(f"{why}: return those reductions, and combine them in PyTorch", graph.loc(made))
    return _too_many(graph, problem)


MERGING = {"": (1, 32), "m": (32, 8), "n": (8, 32)}
"""Results of a block of the merging kernel, and the most warps of such a block, by the axis that results run along. A
block has the warps that load all parts at once, if those are enough. Sums of rows have a part for each tile along N.
Sums of columns have four for each tile along M, which makes 6272 for 200704 rows; their parts for eight columns fill a
sector of memory. With eight warps for any number of parts they took up to 1.6 of the time (merging_warps_h200.json)."""
MERGED_BYTES = 4 * max(results * (warps + 1) for results, warps in MERGING.values())
"""Bytes of shared memory in the merging kernel for a word of a partial result: a word of each result for each warp, and
one of padding, so that the words lie in different banks."""


def _too_many(graph: Graph, problem: Problem) -> str | None:
    words = Counter[str]()
    for one in reductions_of(graph):
        words[one.axis] += one.words if one.axis else 0
    most = problem.target.shared_memory // MERGED_BYTES
    if max(words.values(), default=0) <= most:
        return None
    return (
        f"it merges {most} numbers of 32 bits a result at once, and there are {max(words.values())}: use two epilogues"
    )


_WAY_OUT = "store its argument, and reduce that in PyTorch"

_ORIGINAL_NAMES = {made: name for name, made in LOGARITHM_SUMS.items()}
_SHOWN_NAMES = {PLACE: "argmax or argmin", EXPONENTIALS: "softmax"}
"""Reductions that are found online (`online.py`), by the name under which a message mentions them."""


def _refused_reduction(node: Node, graph: Graph, problem: Problem) -> str | None:
    name = _ORIGINAL_NAMES.get(node.attr[0], node.attr[0])
    source = graph.types[node.args[0]]
    if name not in REDUCTIONS:
        return f"it has no {name} yet"
    # A value need not vary along an axis of one element to be full-size, such as a (1, N) operand if M = 1.
    full = {axis for axis in "mn" if problem.extents[axis] != 1}
    if reduces_finished_value(node, graph):
        return _of_parts(node, graph)
    if name == PLACE and (count := max(factor.size(problem.extents) for factor in node.attr[1])) > MOST_PLACES:
        return f"a place is exact to {MOST_PLACES} elements, and a row has {count}: store the product, and search it"
    told = _SHOWN_NAMES.get(name, name)
    smaller = f"it reduces only values with all M x N elements, and the argument of {told} has fewer: {_WAY_OUT}"
    if not full <= source.axes or not segments.are_all_columns(source.factors, problem.extents):
        return smaller
    if columns := segments.width(node):
        if graph.stages[node].kind != "row":
            return smaller
        if columns % segments.STEP:
            name = f"{written(node, graph)} over {columns} columns"
            return f"it reduces neighbouring columns by multiples of {segments.STEP}, and not {name}: {_WAY_OUT}"
    elif (cut := _of_parts(node, graph)) is not None:
        return cut
    elif {"m", "n"} <= graph.types[node].axes:
        return f"it has no {told} over the batches alone: store the value, and reduce it in PyTorch"
    if problem.batched and problem.extents["l"] > 1 and "l" not in source.axes:
        return f"it has no {told} of a value that is the same in every batch"
    return None


def _made_of_others(graph: Graph) -> Node | None:
    """The first finished value, stored or reduced again, whose axes differ from those of all reductions below it."""
    stored = [output.node for output in graph.outputs if graph.stages[output.node].kind == "finish"]
    again = [node.args[0] for node in graph.nodes if node.op == "reduce" and reduces_finished_value(node, graph)]
    axes = {node: graph.types[node].axes for node in graph.nodes}
    return next((n for n in (*stored, *again) if axes[n] not in [axes[below] for below in reductions_under(n)]), None)


def _of_parts(node: Node, graph: Graph) -> str | None:
    if not {factor.axis for factor in node.attr[1]} & graph.types[node].axes:
        return None
    name = written(node, graph)
    why = f"it reduces whole axes and neighbouring columns, and {name} reduces a part of an axis that a reshape cut"
    return f"{why}: {_WAY_OUT}"
