"""Columns of a row that are computed together, where one thread has them all: halves of a head, neighbours.

A thread has the columns of a row that lie a multiple of eight apart, and two neighbours. So what is picked of a factor
of N is in its own registers, of another subtile perhaps, where the tile holds the factor. What is not (halves of a row,
parts of which only some are stored) is woven instead (`weave.py`). Imports no cutlass.
"""

from __future__ import annotations

from collections.abc import Sequence

from epifuse.ir import Factor, Graph
from epifuse.passes.parts import Picked
from epifuse.providers.cutedsl import segments
from epifuse.providers.cutedsl.design import SUBTILE
from epifuse.providers.cutedsl.designs import DESIGNS
from epifuse.request.problem import Problem


def place(factor: Factor, column: int) -> int:
    """Where a column of a tile lies along a factor, the same for all lanes whose first column this is of."""
    return column // factor.stride % (factor.extent or 1)


def sources(picked: Picked, right: int, registers: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each register of a subtile so far on the `right` the subtile and the register that has what is picked."""
    found = []
    for row, own in registers:
        column = right * SUBTILE[1] + own
        for factor, wanted in picked:
            column += (wanted - place(factor, column)) * factor.stride
        found.append((column // SUBTILE[1], registers.index((row, column % SUBTILE[1]))))
    return found


def are_held(graph: Graph, problem: Problem) -> bool:
    """Whether threads have all that is picked, and every output is of all columns."""
    if not all(_is_held(factor) for factor in segments.picked(graph)):
        return False
    own, types = segments.values(graph), graph.types
    roots = [output.node for output in graph.outputs if graph.stages[output.node].kind != "finish"]
    roots = [node for node in (*roots, *graph.effects) if node not in own]
    roots += [node.args[0] for node in graph.nodes if node.op == "reduce"]
    return all(segments.are_all_columns(types[node].factors, problem.extents) for node in roots) and any(
        design.tile[1] % segments.span(graph) == 0 for design in DESIGNS
    )


def _is_held(factor: Factor) -> bool:
    axis, stride, extent = factor
    return axis == "n" and extent is not None and (stride % segments.STEP == 0 or (stride, extent) == (1, 2))
