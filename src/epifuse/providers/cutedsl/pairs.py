"""Columns of a row that are combined, if one thread holds them all: halves of a head, or neighbouring columns.

A factor is a piece of an axis, which a reshape cut out (`ir.Factor`); to pick is to take one place along it. A thread
holds two neighbouring columns of a row, and those that lie multiples of eight columns from them. If a tile holds the
whole factor, a picked column is in the thread's own registers, perhaps of another subtile. Other picks, such as halves
of a row, are woven instead (`weave.py`). So are all picks if some output has only a part of the columns. Imports no
cutlass.
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
    """The place along a factor of a `column` of a tile. It is that of lane 0's register, and equal for all lanes."""
    return column // factor.stride % (factor.extent or 1)


def sources(picked: Picked, right: int, registers: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each register of subtile number `right` of a row: the subtile and the register that hold the picked value."""
    found = []
    for row, own in registers:
        column = right * SUBTILE[1] + own
        for factor, wanted in picked:
            column += (wanted - place(factor, column)) * factor.stride
        found.append((column // SUBTILE[1], registers.index((row, column % SUBTILE[1]))))
    return found


def threads_hold_picks(graph: Graph, problem: Problem) -> bool:
    """Whether threads hold all picked columns, some tile holds whole factors, and every output has all columns."""
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
