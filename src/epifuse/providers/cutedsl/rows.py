"""The row stage: how often a tile is walked, and what is known of each row between two walks. Imports no cutlass.

A walk is one pass over a tile: it computes values from the accumulator, subtile by subtile, and reduces some of them
along rows. A cluster holds whole rows, and a tile whole segments (`segments.py`), so the results of these reductions
are known before the next walk. The last walk stores. A line is a value with one element for each row or segment, which
is computed between walks. A value is full-size if it has one element for each element of the product.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from epifuse.ir import Graph, Node
from epifuse.ir.graph import Output, topological
from epifuse.passes.assign_stages import shares_rows
from epifuse.plan import Reason
from epifuse.providers.cutedsl import segments
from epifuse.providers.cutedsl.design import MMA_SYNC, SUBTILE, TCGEN05, WGMMA, Design
from epifuse.providers.cutedsl.designs import DESIGNS, MULTISTAGE_DESIGNS, TENSOR_MEMORY_DESIGNS
from epifuse.request.problem import Problem

MOST_COLUMNS = 2048
"""Columns of the widest rows: of 8 CTAs, the largest cluster that every GPU launches, each with 256 columns."""


@dataclass(frozen=True)
class Walk:
    """One walk over a tile.

    - `held`: the value in the accumulator's registers, the product or a value that all later walks need instead of it.
    - `nodes`: what is computed subtile by subtile, arguments first.
    - `reductions`: reductions along rows or segments, which are complete after this walk.
    - `lines`: values that are then computed from these reductions, once for each row or segment.
    """

    held: Node | None
    nodes: tuple[Node, ...]
    reductions: tuple[Node, ...] = ()
    lines: tuple[Node, ...] = ()


def walks(graph: Graph) -> tuple[Walk, ...]:
    """The walks in order. If no value needs its row, there is one walk, without reductions."""
    depth = _depths(graph)
    read = read_lines(graph)
    lines = finish_nodes(graph, [*read, *(output.node for output in graph.outputs if is_line(output, graph))])
    reductions = [node for node in lines if node.op == "reduce"]
    # Reductions of segments that are stored, and that no walk reads, are complete after the last walk.
    last = 1 + max((depth[node] for node in read), default=0)
    roots = [[node.args[0] for node in reductions if depth[node] == level] for level in range(1, last + 1)]
    roots[-1] = [*_last_roots(graph), *roots[-1]]
    held = next((node for node in graph.nodes if node.op == "accum"), None)
    made: list[Walk] = []
    for level, tops in enumerate(roots, start=1):
        later = [node for further in roots[level - 1 :] for node in further]
        if (value := _combined(graph, held, tops, later, read)) is not None:
            made.append(Walk(held, topological([value], known=(held, *read))))
            held = value
        nodes = topological(tops, known=(held, *read))
        complete = tuple(node for node in reductions if depth[node] == level)
        known = tuple(node for node in lines if max(depth[node], 1) == level)
        made.append(Walk(held, nodes, complete, known))
        held = _kept(graph, made[-1], [node for further in roots[level:] for node in further], read)
    return tuple(made)


def _combined(
    graph: Graph, held: Node | None, tops: list[Node], later: list[Node], read: tuple[Node, ...]
) -> Node | None:
    """The value whose columns are combined on the way to `tops`, if a walk of its own is to leave it in the registers.

    Without such a walk it would be computed again for each column that it is combined with. None if there is not one
    such value, if it is not simple, or if some value that is needed `later` is not computed from it.
    """
    nodes = topological(tops, known=(held, *read))
    combined = {node.args[0] for node in nodes if node.op == "pick"} - {held}
    if len(combined) != 1:
        return None
    (value,) = combined
    below = topological([value], known=(held, *read))
    is_simple = graph.types[value].kind == "float" and all(node.op != "pick" for node in below)
    return value if is_simple and held not in topological(later, known=(value, *read)) else None


def _picks(walk: Walk) -> list[Node]:
    return [node for node in walk.nodes if node.op == "pick"]


def nodes_of_other_columns(made: Iterable[Walk], graph: Graph) -> frozenset[Node]:
    """The nodes that a walk computes for other columns than the ones that it stores: arguments of a pick."""
    read = read_lines(graph)
    each = (topological(node.args, known=(walk.held, *read)) for walk in made for node in _picks(walk))
    return frozenset(node for nodes in each for node in nodes)


def block(graph: Graph) -> int:
    """Columns of a block: a warp group finishes all walks over one block before it begins the next block. 0 if all of
    its part of a tile is one block."""
    return 0 if shares_rows(graph) else segments.span(graph)


def read_lines(graph: Graph) -> tuple[Node, ...]:
    """The lines that full-size values read: computed from reductions of their own row, or of a segment of it."""
    own = segments.values(graph)
    bulk = [node for node in graph.nodes if graph.stages[node].kind == "row" and node not in own]
    args = (arg for node in bulk for arg in node.args)
    return tuple(dict.fromkeys(arg for arg in args if arg in own or graph.stages[arg].kind == "finish"))


def is_line(output: Output, graph: Graph) -> bool:
    """Whether this output is a line, and the walks that full-size values need also complete it."""
    if output.node in segments.values(graph):
        return True
    if graph.stages[output.node].kind != "finish" or not shares_rows(graph):
        return False
    reductions = [node for node in finish_nodes(graph, [output.node]) if node.op == "reduce"]
    depth = _depths(graph)
    known = max((depth[node] for node in read_lines(graph)), default=0)  # segments may read lines of whole rows
    return all(_along_rows(node) and depth[node] <= known for node in reductions)


def merged_reductions(graph: Graph) -> tuple[Node, ...]:
    """Reductions that are finished after all tiles, by the merging kernel. Arguments come before their users."""
    found = finish_nodes(graph, [o.node for o in graph.outputs if _is_merged(o, graph)])
    return tuple(node for node in found if node.op == "reduce")


def finish_nodes(graph: Graph, outputs: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes that are computed from reductions of tiles to get `outputs`, including these reductions, arguments
    first."""
    return topological(outputs, known=Sources(graph))


def reduces_finished_value(reduction: Node, graph: Graph) -> bool:
    """Whether a reduction reduces a finished value again, and no value of tiles."""
    return bool(graph.stages[reduction.args[0]].kind == "finish")


class Sources:
    """The arguments of all reductions of tiles, as a container at which `topological` stops."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = {
            node.args[0] for node in graph.nodes if node.op == "reduce" and not reduces_finished_value(node, graph)
        }

    def __contains__(self, node: object) -> bool:
        return node in self.nodes


def _is_merged(output: Output, graph: Graph) -> bool:
    return graph.stages[output.node].kind == "finish" and not is_line(output, graph)


def _last_roots(graph: Graph) -> list[Node]:
    stored = (output for output in graph.outputs if graph.stages[output.node].kind != "finish")
    full = [output.node for output in stored if not is_line(output, graph)]
    return [*full, *(node.args[0] for node in merged_reductions(graph) if not reduces_finished_value(node, graph))]


def _along_rows(node: Node) -> bool:
    return all(factor.axis == "n" for factor in node.attr[1])


def _depths(graph: Graph) -> Mapping[Node, int]:
    """For each node, the largest number of reductions along rows on a path from it down to a leaf, itself included."""
    depth: dict[Node, int] = {}
    for node in graph.nodes:
        below = max((depth[arg] for arg in node.args), default=0)
        depth[node] = below + (node.op == "reduce" and _along_rows(node))
    return depth


def _kept(graph: Graph, walk: Walk, later: list[Node], read: tuple[Node, ...]) -> Node | None:
    """The value that the registers hold for the later walks: the one that leaves these the fewest nodes to compute."""
    held, computed = walk.held, walk.nodes
    if _picks(walk):
        return held  # picks read it in other subtiles, which may be walked after this one

    def rest(node: Node | None) -> int:
        nodes = topological(later, known=(node, *read))
        return len(graph.nodes) if node is not held and held in nodes else len(nodes)

    full = (node for node in computed if graph.types[node].kind == "float" and {"m", "n"} <= graph.types[node].axes)
    return min((held, *full), key=rest)


# --- which designs hold whole rows -----------------------------------------------------------------------------------


def columns(design: Design) -> int:
    """The columns of each of its rows that one cluster holds."""
    return design.columns * design.cluster[1]


def refused(design: Design, graph: Graph, problem: Problem) -> str | None:
    """Why a design cannot compute the row stage of this graph, or None."""
    n, is_shared, span = problem.extents["n"], shares_rows(graph), segments.span(graph)
    if span and design.columns % span:
        return _not_divided(design, graph)
    if is_shared and segments.widths(graph):
        return (
            "it does not combine a value that needs its whole row with a reduction of segments of a row: write two "
            "epilogues, and call twice"
        )
    if not is_shared and (not span or len(walks(graph)) == 1):
        return None
    if problem.accumulator.itemsize != 4:
        return f"its registers hold rows in 32 bits, and the accumulator is {problem.accumulator}"
    if is_shared and design.cluster[1] > 2 and 2 * n <= columns(design):
        return f"its cluster is larger than necessary: half as many CTAs hold a whole row of N = {n} columns"
    if not is_shared or n <= columns(design):
        return None
    needing = next(node for node in finish_nodes(graph, read_lines(graph)) if node.op == "reduce")
    name = written(needing, graph)
    why = f"{name} over N = {n} does not fit one cluster's {MOST_COLUMNS} columns"
    if n <= MOST_COLUMNS or design.is_simple:  # another design holds the row, or there are no clusters
        why = f"N = {n} does not fit the {columns(design)} columns of its rows, and {name} needs them whole"
    return Reason(why, graph.loc(needing))


def is_held_by_one_width(span: int, design: Design) -> bool:
    """Whether only one width of tiles holds whole blocks of `span` columns, so that no other width can be better."""
    return span > 0 and sum(columns % span == 0 for columns in _widths(design)) == 1


_OF_KERNEL = {WGMMA: DESIGNS, MMA_SYNC: MULTISTAGE_DESIGNS, TCGEN05: TENSOR_MEMORY_DESIGNS}


def _widths(design: Design) -> list[int]:
    """The widths, in columns of the result, of all tiles of the same kernel that are whole subtiles wide."""
    widths = (one.tile[1] // design.parts for one in _OF_KERNEL[design.instruction])
    return sorted({width for width in widths if width % SUBTILE[1] == 0})


def _not_divided(design: Design, graph: Graph) -> Reason:
    """Why a design is refused whose tile is no whole number of blocks wide."""
    reductions = [node for node in graph.nodes if node.op == "reduce" and segments.width(node)]
    span, known = segments.span(graph), _widths(design)
    if reductions:
        node = max(reductions, key=segments.width)
        name = f"{written(node, graph)} over {' and '.join(map(str, segments.widths(graph)))} neighbouring columns"
        cure = "store its argument, and reduce that in PyTorch"
    else:
        node = next(node for node in graph.nodes if node.op == "pick")
        name = f"what combines columns within each {span}"
        cure = "store the product, and combine its columns in PyTorch"
    why = f"{name} needs tiles of a multiple of {span} columns, and "
    if all(columns % span for columns in known):
        return Reason(f"{why}there are {', '.join(map(str, known))}: {cure}", graph.loc(node))
    return Reason(f"{why}its tile has {design.columns}", graph.loc(node))


def written(reduction: Node, graph: Graph) -> str:
    """The name of the function that makes a reduction, as the user wrote it; of a chain of methods the last one."""
    loc, depth, found = graph.loc(reduction), 0, str(reduction.attr[0])
    for match in re.finditer(r"(\w*)\s*\(|\)", loc.text[loc.column : loc.column + loc.width] if loc else ""):
        if match[0] == ")":
            depth -= 1
            continue
        found = match[1] if match[1] and depth == 0 else found
        depth += 1
    return found
