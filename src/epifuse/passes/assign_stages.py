"""Assign stages: when each value can be computed.

*tile*: in registers, tile by tile. *row*: after a reduction along a row, which the tile holds whole. *finish*:
arithmetic on reduced scalars and vectors, after all tiles. A full-size value that needs a finished reduction moves to
the next *sweep*, which computes the product again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from epifuse.ir import Graph, Node
from epifuse.request.problem import Problem


@dataclass(frozen=True)
class Stage:
    """When a value is computed. `sweep` counts passes over the product; -1 is a reduction of operands alone, which can
    run before the first."""

    kind: Literal["tile", "row", "finish"]
    sweep: int = 0

    def __str__(self) -> str:
        return self.kind if self.sweep < 1 else f"{self.kind}, sweep {self.sweep + 1}"


@dataclass(frozen=True)
class _Fact:
    bulk: bool  # varies over rows and columns, or needs the accumulator: exists tile by tile only
    sweep: int
    reduced: bool  # a reduction lies below
    row_local: bool  # ... and every such reduction is along rows, complete within a tile that holds whole rows
    row: bool  # a bulk value that needs a row reduction


def assign_stages(graph: Graph, problem: Problem, *, whole_rows: bool = True) -> Graph:
    """The graph with `stages` filled in. Without `whole_rows` no tile holds a whole row, so that only reductions over
    parts of a row give the row stage."""
    facts: dict[Node, _Fact] = {}
    for node in graph.nodes:
        args = [facts[arg] for arg in node.args]
        if node.op != "reduce":
            facts[node] = _elementwise(node, args, graph)
        else:
            fact = _reduction(node, args[0], graph)
            # A tile holds the parts that a reshape cuts rows into, whether it holds whole rows or not.
            finished = _Fact(bulk=False, sweep=args[0].sweep, reduced=True, row_local=False, row=False)
            facts[node] = fact if whole_rows or fact.bulk else finished
    return replace(graph, stages={node: _stage(fact) for node, fact in facts.items()})


def _stage(fact: _Fact) -> Stage:
    if fact.bulk:
        return Stage("row" if fact.row else "tile", fact.sweep)
    return Stage("finish" if fact.reduced else "tile", fact.sweep)


def _spans_tile(node: Node, graph: Graph) -> bool:
    return {"m", "n"} <= graph.types[node].axes


def _elementwise(node: Node, args: list[_Fact], graph: Graph) -> _Fact:
    bulk = node.op == "accum" or _spans_tile(node, graph) or any(arg.bulk for arg in args)
    if not args:
        return _Fact(bulk, 0 if bulk else -1, False, True, False)
    reduced = any(arg.reduced for arg in args)
    row_local = all(arg.row_local for arg in args)
    if not bulk:
        return _Fact(False, max(arg.sweep for arg in args), reduced, row_local, False)
    # The result of a finished reduction is known from the next sweep on, that of a row reduction in the same sweep.
    sweep = max((0, *(arg.sweep + (not arg.bulk and arg.reduced and not arg.row_local) for arg in args)))
    row = any(arg.row or (not arg.bulk and arg.reduced and arg.row_local and arg.sweep == sweep) for arg in args)
    return _Fact(True, sweep, reduced, row_local, row)


def _reduction(node: Node, arg: _Fact, graph: Graph) -> _Fact:
    along_rows = all(factor.along == "n" for factor in node.attr[1])
    # A tile holds whole rows if a value needs them, and whole inner factors, but never all rows or all batches.
    inner = all(factor.along == "n" or factor.extent for factor in node.attr[1])
    # A finished value is complete after all tiles: a reduction of it does not depend on tiles.
    bulk = arg.bulk and _spans_tile(node, graph) and inner
    return _Fact(bulk, arg.sweep, True, arg.bulk and along_rows, bulk)


def sweeps(graph: Graph) -> int:
    """How many times the product is computed."""
    return 1 + max((stage.sweep for stage in graph.stages.values()), default=0)


def has_row_stage(graph: Graph) -> bool:
    """Whether some value needs a whole row, or a whole part of a row, at once."""
    return any(stage.kind == "row" for stage in graph.stages.values())


def shares_rows(graph: Graph) -> bool:
    """Whether some value of the row stage needs a reduction over a whole row, not only over parts of a row."""
    stages = graph.stages
    bulk = (node for node in graph.nodes if stages[node].kind == "row")
    return any(stages[arg].kind == "finish" for node in bulk for arg in node.args)
