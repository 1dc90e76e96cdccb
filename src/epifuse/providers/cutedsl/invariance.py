"""Which designs give a row the same bits, whatever the other rows are and how many. Imports no cutlass.

Every design that does not split K adds the products of an element in ascending order of K, so elementwise epilogues
have the same bits in all of them, A and B exchanged or not. Whether a split pays follows from M, so none is taken. A
reduction along a row is
merged within a thread over a tile's columns, over the four lanes that share the row, and then tile by tile, or CTA by
CTA where a cluster shares rows: its bits follow from how many columns a tile has, and from how many CTAs share a row.
Neighbouring columns (`segments`) never leave a tile, and are merged alike in all designs.
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
"""Columns of tiles, the preferred first: with 128 there are tiles for few rows and for many. Sums that float32 adds up
are added 128 columns at a time, or all columns of a narrower tile."""
_HOLDING = ((128, 1), (256, 1), (256, 2), (128, 8), (256, 8))
"""Columns of a tile, and CTAs of a cluster, that hold whole rows, the fewest columns first. For 512 and 1024 columns
these are the faster ones of those that docs/tuning.md compares."""


_ASCENDING = "K ascending in one accumulator"
"""What designs that do not split K do: tile, cluster and whether A and B are exchanged only decide in which order
several elements are added (`tests/gpu/test_swapped.py` compares the bits)."""
_EXACT = "integers that int32 holds"
"""Their sum is the same in any order."""


def bits(design: Design, problem: Problem) -> Hashable:
    """In which order K is added up, and in what: parts end between blocks of K."""
    if problem.accumulator == torch.int32 and inputs.largest_sum(problem) <= torch.iinfo(torch.int32).max:
        return _EXACT
    order: Hashable = (_ASCENDING, design.promoted) if design.promoted else _ASCENDING
    if design.is_simple:
        return (order, design.instruction)  # whose sums tensor cores may round in other places
    return (order, design.split, design.spans) if design.split > 1 else order


def refused(design: Design, work: Lowered, problem: Problem) -> str | None:
    """Why a design is not the one that was asked for: it follows from N and the epilogue, whatever M is."""
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
        return None  # what no tile or cluster holds is refused for that
    shared = f", {wanted[1]} of which share a row" if wanted[1] > 1 else ""
    return f"batch_invariant asks for tiles of {wanted[0]} columns{shared}, for every M, and this design has others"


def _tree(design: Design, work: Lowered) -> tuple[int, int]:
    """Columns of a tile and CTAs that share a row: how a row is merged."""
    return design.tile[1], design.cluster[1] if work.shares_rows else 1
