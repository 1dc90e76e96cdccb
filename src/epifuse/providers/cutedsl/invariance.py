"""Which designs give a row the same bits, whatever the other rows are and however many. Imports no cutlass.

Every design that does not split K adds the products of an element in ascending order of K. So elementwise epilogues
have the same bits in all of these designs, whether or not they exchange A and B. Whether a split of K is faster depends
on M, so no design with a split is taken.

A reduction along a row is merged in a thread over a tile's columns, then over the four lanes that share the row, and
then tile by tile, or CTA by CTA where a cluster shares rows. So its bits depend on how many columns a tile has, and on
how many CTAs share a row. Neighbouring columns (`segments`) never leave a tile, and all designs merge them alike.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from epifuse.providers.cutedsl import inputs
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.lowering import Lowered
from epifuse.request.problem import Problem

_WIDTHS = (128, 256, 192, 64, 96)
_PROMOTED_WIDTHS = (128, 256, 64, 96)
"""Columns of tiles, the preferred number first: with 128 there are tiles for few rows and for many. Promoted sums are
added 128 columns at a time, or all columns of a narrower tile, so 192 is not among their widths."""
_HOLDING = ((128, 1), (256, 1), (256, 2), (128, 8), (256, 8))
"""(Columns of a tile, CTAs that share a row) with which a cluster holds whole rows, the fewest columns first. For 512
and 1024 columns these are the faster ones of those that docs/tuning.md compares."""


_ASCENDING = "K ascending in one accumulator"
"""The order of additions in a design that does not split K. Tile, cluster and an exchange of A and B only change the
order in which different elements are computed (`tests/gpu/test_swapped.py` compares the bits)."""
_EXACT = "integers that int32 holds"
"""Sums of integers that int32 holds are the same in any order."""


def bits(design: Design, problem: Problem) -> Hashable:
    """Return a key of how a design adds up K: designs with equal keys give the same bits. If K is split, the number of
    spans counts as well, because a part of K ends between two blocks."""
    if problem.accumulator == torch.int32 and inputs.largest_sum(problem) <= torch.iinfo(torch.int32).max:
        return _EXACT
    order: Hashable = (_ASCENDING, design.promoted) if design.promoted else _ASCENDING
    if design.is_simple:
        return (order, design.instruction)  # tensor cores may round the sums of another instruction in other places
    return (order, design.split, design.spans) if design.split > 1 else order


def refused(design: Design, work: Lowered, problem: Problem) -> str | None:
    """Why `batch_invariant` excludes a design, or None. The answer depends on N and the epilogue, and never on M."""
    if not problem.constraints.batch_invariant:
        return None
    if design.split > 1:
        return f"batch_invariant asks for K in one part, and this design adds up {design.split} parts"
    if not work.adds_along_axes:
        return None
    if design.swapped:
        return "batch_invariant asks for reductions without an exchange of A and B, and this design exchanges them"
    if work.shares_rows:
        wanted = next((tree for tree in _HOLDING if tree[0] * tree[1] >= problem.extents["n"]), None)
    else:
        widths = _PROMOTED_WIDTHS if design.promoted else _WIDTHS
        wanted = next(((width, 1) for width in widths if width // design.parts % (work.span or 1) == 0), None)
    if wanted in (None, _tree(design, work)):
        return None  # rows that no tile or cluster holds are refused elsewhere for that reason
    shared = f", {wanted[1]} of which share a row" if wanted[1] > 1 else ""
    return f"batch_invariant asks for tiles of {wanted[0]} columns{shared}, for every M, and this design has others"


def _tree(design: Design, work: Lowered) -> tuple[int, int]:
    """The columns of a tile and the CTAs that share a row, which determine how a row is merged."""
    return design.tile[1], design.cluster[1] if work.shares_rows else 1
