"""What is known of a problem without its number of rows: its family (`family.py`), and what the family's kernels cost.

A new problem often differs from an earlier one only in the number of rows, and finds both here. Imports no cutlass.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from epifuse.base.target import Target
from epifuse.providers.cutedsl import swap, weave
from epifuse.providers.cutedsl.design import WGMMA
from epifuse.providers.cutedsl.family import FAMILIES, Carried, Family, cuts, family_of
from epifuse.providers.cutedsl.heuristic import Priced, costs, priced
from epifuse.providers.cutedsl.lowering import Lowered
from epifuse.request.problem import Problem, TensorInfo


class Placed(NamedTuple):
    """The key under which `FAMILIES` keeps a `Sized`: a problem as it lies in memory, mostly without its row count.

    `rows` is M if a layout may depend on M. Otherwise it is 0, 1, or 2 for two rows and more. All else that decides a
    layout is the same within a layout class, and `work` belongs to one class. Making this key is faster than calling
    `layouts`, which a family's own key needs.
    """

    work: Lowered
    rows: int
    others: tuple[int, int, int]
    tensors: tuple[tuple[Hashable, ...] | None, ...]
    dtypes: tuple[tuple[str, torch.dtype], ...]
    cuts: tuple[int, int]
    by_tma: tuple[str, ...]
    target: Target
    instruction: str


_COUNTED = 1 << 20
"""The tiles of this many rows and this many columns can be counted in 32 bits; see `inputs.uncounted`."""


class Sized:
    """A family, and a problem of which all is known but the number of rows. The kernels' costs depend only on that."""

    def __init__(self, family: Family, problem: Problem, placed: Placed) -> None:
        self.family, work, columns = family, placed.work, placed.others[0]
        is_open = placed.rows == 2 and not problem.batched and columns <= _COUNTED
        # With fewer rows there are further tiles to choose from, which exchange A and B.
        least = swap.LEAST_ROWS if work.is_swapped else swap.most_rows(problem) + 1
        self._rows = range(least, _COUNTED if is_open else 0)
        self._cuts = placed.cuts if work.reduces_axes else None
        self._problem = weave.problem_of(family.work.order, problem)
        self._priced: tuple[Carried, list[Priced]] | None = None

    def costs(self, carried: Carried, rows: int) -> list[float]:
        """What each of the `carried` kernels costs with this many rows."""
        if (known := self._priced) is None or known[0] is not carried:
            self._priced = known = carried, priced(carried.rates, self._problem)
        return costs(known[1], rows)

    def of_rows(self, carried: Carried, rows: int) -> list[float] | None:
        """`costs`, or None if this many rows may change more: which kernels there are, or what they compute."""
        if rows not in self._rows or (carried.rates and carried.rates[0].for_few_rows):
            return None
        swapped = self.family.work.is_swapped
        extents = {**self._problem.extents, "n" if swapped else "m": rows}
        if self._cuts is not None and cuts(extents, swapped=swapped) != self._cuts:
            return None
        return self.costs(carried, rows)


def sized(work: Lowered, problem: Problem, *, instruction: str = WGMMA) -> Sized:
    """The `Sized` of a problem: its family, for kernels of this instruction, and all extents but the rows. Cached."""
    placed = _placed(work, problem, instruction)
    found: Sized | None = FAMILIES.get(placed)
    return found or FAMILIES.put(placed, Sized(family_of(work, problem, instruction), problem, placed))


def _placed(work: Lowered, problem: Problem, instruction: str) -> Placed:
    extents, a, b = problem.extents, problem.a, problem.b
    if work.is_swapped:  # A is B, and its columns are rows of the result
        columns, rows, along_k = extents["m"], extents["n"], b.strides[-2]
    else:
        rows, columns, along_k = extents["m"], extents["n"], a.strides[-1]
    by_rows = work.is_plain and along_k == 1 and (columns > 1 or not work.is_swapped) and not work.ends_in_rows
    tensors: list[tuple[Hashable, ...] | None] = [
        (a.strides, a.aligned, a.dtype, a.shape[:-2]),
        (b.strides, b.aligned, b.dtype, b.shape[:-2]),
    ]
    for _, info in (*problem.operands, *problem.outputs):
        if isinstance(info, TensorInfo):
            strides = info.strides
            by_rows = by_rows and (not strides or strides[-1] == 1)
            tensors.append((strides, info.aligned, info.dtype))
        else:
            tensors.append(None)
    return Placed(
        work,
        min(rows, 2) if by_rows else rows,
        (columns, extents["k"], extents["l"]),
        tuple(tensors),
        problem.dtypes,
        cuts(extents, swapped=work.is_swapped) if work.reduces_axes else (0, 0),
        problem.by_tma,
        problem.target,
        instruction,
    )
