"""Count which primitive has met which operand: on the graphs that ran, by the loads that each primitive depends on."""

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
"""In 10,000 cases every cell has to be met 30 times."""


class Cell(NamedTuple):
    """An operation, and the access class and dtype of an operand on which it depends."""

    operation: str
    access: str
    dtype: torch.dtype


CELLS = tuple(Cell(o, access, dtype) for o in OPERATIONS for access in ACCESSES for dtype in DTYPES)


@dataclass
class Coverage:
    """The number of cases that met each cell."""

    counts: Counter[Cell] = field(default_factory=Counter)

    def add(self, args: GemmArguments) -> None:
        """Count one case that ran."""
        self.counts.update(cells(args))

    def short_of(self, wanted: int) -> list[Cell]:
        """The cells that were met less than `wanted` times."""
        return [cell for cell in CELLS if self.counts[cell] < wanted]

    def table(self) -> str:
        """A table of counts: for each operation and access, the count of the dtype that was met least often."""
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
    """The cells of one case: each primitive and reduction with every tensor operand that it depends on."""
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
    """The access class of a load, by its type. A dim of extent one counts as the axis that it stands for."""
    return access_class(types[node])  # type: ignore[index]


def holes(found: Iterable[Cell]) -> Iterator[str]:
    """The cells as text."""
    return (f"{cell.operation} of {cell.access} {short(cell.dtype)}" for cell in found)
