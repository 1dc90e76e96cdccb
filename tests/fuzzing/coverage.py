"""Which primitive has met which operand: counted on the graphs that ran, from the loads below each primitive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from epifuse.base.dtypes import short
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.reduction import REDUCTIONS
from epifuse.ir import Node
from epifuse.passes.accesses import access_class
from epifuse.passes.lower import lower
from epifuse.request.problem import TensorInfo
from epifuse.runtime.arguments import GemmArguments
from fuzzing.operands import ACCESSES, DTYPES

OPERATIONS = (*(name for name, row in PRIMITIVES.items() if row.rule != "random"), *REDUCTIONS)
WANTED = 30
PER = 10_000
"""Every cell is to be met 30 times in 10,000 cases."""


class Cell(NamedTuple):
    """An operation, how an operand below it is read, and as what."""

    operation: str
    access: str
    dtype: torch.dtype


CELLS = tuple(Cell(o, access, dtype) for o in OPERATIONS for access in ACCESSES for dtype in DTYPES)


@dataclass
class Coverage:
    """Counts cases by cell."""

    counts: Counter[Cell] = field(default_factory=Counter)

    def add(self, args: GemmArguments) -> None:
        """One case that ran."""
        self.counts.update(cells(args))

    def short_of(self, wanted: int) -> list[Cell]:
        """The cells met less often than that."""
        return [cell for cell in CELLS if self.counts[cell] < wanted]

    def table(self) -> str:
        """For each operation and access the least often met dtype."""
        width = max(map(len, OPERATIONS)) + 2
        lines = [" " * width + "".join(f"{access:>19}" for access in ACCESSES)]
        for operation in OPERATIONS:
            row = [self._least(operation, access) for access in ACCESSES]
            lines.append(f"{operation:<{width}}" + "".join(f"{text:>19}" for text in row))
        return "\n".join(lines)

    def _least(self, operation: str, access: str) -> str:
        found = min(DTYPES, key=lambda dtype: self.counts[Cell(operation, access, dtype)])
        return f"{self.counts[Cell(operation, access, found)]} ({short(found)})"


def cells(args: GemmArguments) -> Iterable[Cell]:
    """What one case meets: each primitive and reduction with every tensor that flows into it."""
    graph = lower(args.graph, frozenset())
    below: dict[Node, frozenset[tuple[str, torch.dtype]]] = {}
    found: set[Cell] = set()
    for node in graph.nodes:
        here = frozenset(key for arg in node.args for key in below[arg])
        operand = args.problem.by_name.get(node.attr.name) if node.op == "load" else None
        if isinstance(operand, TensorInfo):
            here |= {(_access(node, args, graph.types), operand.dtype)}
        below[node] = here
        operation = node.attr[0] if node.op == "reduce" else node.op
        if operation in OPERATIONS:
            found.update(Cell(operation, *key) for key in here)
    return found


def _access(node: Node, args: GemmArguments, types: object) -> str:
    """The access class by the operand's rank and shape: extents of one count as what they stand for."""
    return access_class(types[node])  # type: ignore[index]


def holes(found: Iterable[Cell]) -> Iterator[str]:
    """Cells as text."""
    return (f"{cell.operation} of {cell.access} {short(cell.dtype)}" for cell in found)
