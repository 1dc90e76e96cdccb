"""Regions of N in one launch: each tile lies in one region, and runs the epilogue of that region. Imports no cutlass.

A region is a range of columns with an epilogue of its own. Each region is first planned alone, as if it were a launch.
Here a design gets stages and shared memory that suffice for the operands and outputs of all regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from epifuse.plan import Allocation, Details, KernelSpec
from epifuse.providers.cutedsl import budget, inputs, refusals, tuned
from epifuse.providers.cutedsl.costs import instructions, moving
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.family import FAMILIES, Arranged
from epifuse.providers.cutedsl.heuristic import Rated, cost, estimate
from epifuse.providers.cutedsl.kernel_text import KernelSource
from epifuse.providers.cutedsl.length import band, is_long, is_short, length_class
from epifuse.providers.cutedsl.partials import reductions_of
from epifuse.providers.cutedsl.program import Program
from epifuse.providers.cutedsl.rows import walks
from epifuse.providers.cutedsl.ways import Access
from epifuse.request.problem import Problem

Columns = tuple[int, int]
MOST = 8
"""The most regions of a launch. Each has code of its own, and each output takes 128 of the 4096 bytes that a kernel's
arguments may have."""


def together(
    spec: KernelSpec, columns: Sequence[Columns], allocations: Sequence[Allocation], problem: Problem
) -> Allocation | str:
    """The allocation of one launch of all regions, or the reason why each region needs a launch of its own.

    `columns` are the (start, stop) of the regions, `allocations` those of each region alone, in the same order."""
    design: Design = spec.design
    order = sorted(range(len(columns)), key=columns.__getitem__)
    reason = _undivided([columns[i] for i in order], design, problem)
    if reason is not None or any(allocations[i].launches for i in order):
        return reason or "a region needs the product more than once"
    arranged = tuple([allocations[i].program for i in order])
    ranges = tuple([(columns[i][0], columns[i][1]) for i in order])
    # The key has no number of rows: what each region takes alone is the same for any.
    key = arranged, ranges, length_class(problem), problem.by_tma, problem.target
    made: Together | str = FAMILIES.get_or_make(key, lambda: _made(arranged, ranges, problem))
    if isinstance(made, str):
        return made
    return Allocation(
        design.tile,
        cost(made.rated, problem),
        details=partial(_details, made.programs, made.program.design, problem, spills=made.program.spills),
        program=made.program,
        estimate=partial(estimate, made.rated, problem),
    )


class Together(NamedTuple):
    """One launch of all regions, for any number of rows: the regions' programs, the kernel's source, and its rate."""

    programs: tuple[Program, ...]
    program: Arranged
    rated: Rated


def _undivided(columns: Sequence[Columns], design: Design, problem: Problem) -> str | None:
    """Why one launch of this design cannot give each tile to one region, or None. `columns` are in ascending order."""
    ends = [0, *(stop for _, stop in columns)]
    if [start for start, _ in columns] != ends[:-1] or ends[-1] != problem.extents["n"]:
        return "the regions do not cover each column exactly once"
    if design.split > 1 or design.swapped:
        return "the design splits K" if design.split > 1 else "the design exchanges A and B"
    if design.is_simple:
        return f"the kernel for {design.instruction} has one epilogue for all columns"
    if problem.is_empty:
        return "the result has no elements"
    if len(columns) > MOST:
        return f"a kernel has up to {MOST} regions, and there are {len(columns)}"
    width = design.tile[1]
    for start, _ in columns:
        if start % width:
            return f"a region begins at column {start}, which is no multiple of the tile's {width} columns"
    return None


def _why_not_together(program: Program, design: Design) -> str | None:
    """Why the tiles of a region cannot run in one launch with those of other regions, or None."""
    if program.order:
        return "a region combines two parts of a row, such as the halves of a gate"
    if reductions_of(program.graph):
        return "a region has a reduction that a second kernel merges"
    if design.rewritten:
        return "a first kernel copies, converts or splits A or B"
    if design.exchanged or program.prints:
        return "a region needs whole rows, which a cluster shares" if design.exchanged else "a region prints values"
    if not all(access.by_rows for access in program.stores if access.travels.staged):
        return "an output of a region is contiguous along M"
    return None


def _made(arranged: Sequence[Arranged], ranges: Sequence[Columns], problem: Problem) -> Together | str:
    reason = next(filter(None, (_why_not_together(each.program, each.design) for each in arranged)), None)
    if reason is not None:
        return reason
    programs = tuple(
        # Only buffers of outputs that leave by TMA are shared by all regions.
        replace(each.program, columns=own, stores=tuple(access.without_memory for access in each.program.stores))
        for each, own in zip(arranged, ranges, strict=True)
    )
    short, long = is_short(problem), is_long(problem)
    loads, stores = _coming(programs), _buffers([program.stores for program in programs])
    first = arranged[0].design
    given = replace(first, raster=band(problem, first), spare=0)
    enough = (tuned.SHORT_STAGES if short else tuned.ENOUGH_STAGES).value
    found = budget.fit(given, loads, stores, problem.target.shared_memory, enough)
    if found is None:
        return "shared memory has no room for the operands and outputs of all regions"
    for one in programs:
        reason = refusals.not_by_tma(one, problem) or budget.crowded(one, found, short=short, long=long)
        if reason is not None:
            return reason
    needed = max(_registers(one, found, short=short) for one in programs)
    found = replace(found, registers=min(needed, budget.most_registers(programs)))
    spills = any(each.spills for each in arranged)
    spills = spills or any(budget.spills(one, found, long=long) for one in programs)
    source = KernelSource.of(inputs.filled(problem), programs[0], found)._replace(others=programs[1:])
    computed = max(instructions(program.graph, program.accuracies) for program in programs)
    moved = max(map(moving, programs))
    rated = Rated.of(found, problem.target.processor, computed, moving=moved, shares_rows=False, spills=spills)
    return Together(programs, Arranged(source, spills), rated)


def _registers(program: Program, design: Design, *, short: bool) -> int:
    several = len(walks(program.graph)) > 1
    reduces = "reduce" in program.graph.ops
    return budget.registers(design, program, waited_for=several or (reduces and short))


def _coming(programs: Sequence[Program]) -> tuple[Access, ...]:
    """The operands that take shared memory: those that come in tiles share buffers, as outputs do; each vector has its
    own memory."""
    own = (access for program in programs for _, access in program.tensors if not access.travels.staged)
    return *_buffers([program.staged for program in programs]), *own


def _buffers(each: Sequence[Sequence[Access]]) -> tuple[Access, ...]:
    """The accesses that need buffers of tiles. The first accesses of all regions share one if they have the same dtype
    and layout; so do the second ones, and so on."""
    found: dict[object, Access] = {}
    for accesses in each:
        for place, access in enumerate(access for access in accesses if access.travels.staged):
            found.setdefault((place, access.dtype, access.by_rows), access)
    return tuple(found.values())


def _details(programs: Sequence[Program], design: Design, problem: Problem, *, spills: bool) -> Details:
    loads = [access for program in programs for _, access in program.tensors]
    stores = [access for program in programs for access in program.stores]
    told = ", ".join(f"{start}:{stop}" for start, stop in (program.columns or (0, 0) for program in programs))
    regions = f"columns {told} in one launch: each tile is of one of these regions"
    return Details(refusals.transports(loads, stores), (*refusals.notes(design, problem, spills=spills), regions))
