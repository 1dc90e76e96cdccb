"""Why a kernel does not support an epilogue, and what a plan tells of one that it supports. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from epifuse.base.dtypes import largest, short
from epifuse.ir import Load
from epifuse.plan import Reason
from epifuse.providers.cutedsl import costs, inputs, multistage, partials, segments, tensor_memory, tuned
from epifuse.providers.cutedsl.accesses import Sides
from epifuse.providers.cutedsl.design import MMA_SYNC, SUBTILE, TCGEN05, WGMMA, Design
from epifuse.providers.cutedsl.designs import SPECS
from epifuse.providers.cutedsl.length import is_short
from epifuse.providers.cutedsl.lowering import Lowered
from epifuse.providers.cutedsl.program import Program
from epifuse.providers.cutedsl.ways import Access
from epifuse.providers.cutedsl.weave import Order
from epifuse.request.problem import Problem, TensorInfo
from epifuse.request.scaled import BLOCK

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_NARROW_FLOATS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
LOADS = (torch.float32, *_NARROW_FLOATS, *_INTEGERS, torch.bool)
CASTS = (torch.float32, *_NARROW_FLOATS, torch.float8_e8m0fnu, *_INTEGERS)  # a cast to a mask is a comparison by now
OUTPUTS = (torch.float64, torch.float8_e8m0fnu, *LOADS)
"""The dtypes as which a value of any kind can be stored."""


def of_graph(work: Lowered, problem: Problem, own: Sides) -> str | None:
    """Why no design supports the epilogue, or None. `own` is how operands and outputs travel, as they lie in memory."""
    graph = work.walked
    if work.refused is not None:
        return work.refused
    if work.order and work.shares_rows:
        node = next(node for node in graph.nodes if graph.stages[node].kind == "row")
        why = "it takes parts of a row where no value needs whole rows"
        way_out = "store the product, and combine its parts in PyTorch, or pass allow_recompute=True"
        return Reason(f"{why}: {way_out}", graph.loc(node))
    if (reason := _of_fewer_columns(work, problem)) is not None:
        return reason
    moved = {node for node, access in zip(work.loads, own.loads, strict=True) if access is None}
    for node in graph.nodes:
        if costs.name_of(node) not in costs.COSTS:
            return Reason(f"it has no form of {costs.name_of(node)} yet", graph.loc(node))
        if node.op == "cast" and node.attr not in CASTS:
            return Reason(f"it does not cast to {node.attr} yet", graph.loc(node))
        if isinstance(node.attr, Load):
            operand = problem.by_name.get(node.attr.name)
            if isinstance(operand, TensorInfo) and operand.dtype not in LOADS:
                told = f"it cannot load '{node.attr.name}' of {operand.dtype} yet: hand over {node.attr.name}.float()"
                return Reason(told, graph.loc(node))
            if node in moved:
                why = f"it cannot reshape '{node.attr.name}' where it lies: hand in a contiguous tensor"
                return Reason(why, graph.loc(node))
    if (reason := partials.refused(graph, problem)) is not None:
        return reason
    for output, access in zip(graph.outputs, own.stores, strict=False):  # stores of prints follow
        if access.dtype not in OUTPUTS:
            return Reason(f"it cannot store '{output.name}' as {access.dtype} yet", graph.loc(output.node))
    return None


def _of_fewer_columns(work: Lowered, problem: Problem) -> str | None:
    """Why values that have only a part of the rows or columns, or that take a part of a reduction, are not supported.

    Only values that are computed from reductions alone can have fewer columns than the result."""
    graph, extents = work.walked, problem.extents
    for axis in "mn":
        own = {factor for node in graph.nodes for factor in graph.types[node].factors if factor.axis == axis}
        reach = max((factor.stride * factor.size(extents) for factor in own), default=extents[axis])
        if reach < extents[axis]:
            told = f"its values are of {reach} of the {extents[axis]} elements along {axis.upper()}"
            return f"{told}: return the reductions that they are computed from, and combine them in PyTorch"
    of_segments = segments.values(graph)
    for node in graph.nodes:
        if node.op == "pick" and (graph.stages[node].kind == "finish" or node.args[0] in of_segments):
            why = "it takes a part of what is reduced: return the reduction, and take its part in PyTorch"
            return Reason(why, graph.loc(node))
    return None


_ASKED = ("tile", "cluster", "schedule", "split")


def not_asked_for(design: Design, problem: Problem, fields: Sequence[str] = _ASKED) -> str | None:
    """Why a design is not the one that was asked for, or None. `fields` are the constraints that are compared."""
    for field in fields:
        own, asked = getattr(design, field), getattr(problem.constraints, field)
        if asked not in (None, own):
            beside = (s for s in SPECS if problem.target.cc in s.ccs and s.design.instruction == design.instruction)
            there = sorted({getattr(spec.design, field) for spec in beside})
            known = "" if asked in there else f"; there are {', '.join(map(str, there))}"
            return f"its {field} is {own}, not the one asked for{known}"
    return None


def unsplit(design: Design, problem: Problem) -> str | None:
    """Why a design cannot split K, or None. K has to be long enough that no part is empty."""
    if design.split == 1:
        return None
    if problem.accumulator.itemsize != 4:
        return f"it adds up parts of K in 32 bits, and the accumulator is {problem.accumulator}"
    too_short = f"K is too short for {design.split} parts: split-K takes {tuned.SHORT_K.value} bytes of K at least"
    return too_short if is_short(problem) else None


def unscaled(design: Design, order: Order, problem: Problem) -> str | None:
    """Why a design does not apply block scales of B, or None. A tile must hold whole blocks of B or lie in one.

    If `order` is "stacked", a tile has `design.columns` columns of each half of N, and `problem` is that of one half.
    """
    if not design.scaled[1]:
        return None
    columns = design.columns if order == "stacked" else design.tile[1]
    if columns % BLOCK and BLOCK % columns:
        return f"its tiles cut the blocks of {BLOCK} columns that share a scale"
    if order == "stacked" and problem.extents["n"] % BLOCK:
        return (
            f"each half of N has {problem.extents['n']} columns, which is no multiple of the {BLOCK} that share a "
            f"scale: pad each half to a multiple of {BLOCK}"
        )
    return None


def few(design: Design, work: Lowered, problem: Problem) -> str | None:
    """Why a design for few rows whose tile does not have 64 columns is not used, or None.

    `problem` has A and B exchanged, so the first extent of the tile is its columns of the result."""
    if not design.is_low:
        is_wide = design.for_few_rows and design.tile[0] > SUBTILE[0]
        return "its tile is for B of 8 bits beside A of 16" if is_wide and not inputs.converts(problem) else None
    named, others = f"a tile of {design.tile[0]} columns", "other designs do not have this limit"
    if problem.a.strides[-1] != 1 or any(design.scaled) or inputs.converts(problem):
        return f"{named} is for B by columns, without block scales, and of A's bits: {others}"
    if any(node.op == "reduce" for node in work.walked.nodes):
        return f"{named} does not support reductions: {others}"
    return None


def untried(design: Design, program: Program, problem: Problem) -> str | None:
    """Why a design for many rows with A and B exchanged, or one with narrow subtiles, is not used for an epilogue.

    Combinations that were measured on no GPU are left to other designs. `problem` is the one that the design
    multiplies. If K is short, the time depends on the epilogue, of which the model knows little. Narrow subtiles are
    slower then: they are stored in rows of 32 bytes, and 200704 x 288 x 96 took 1.21 of the time (widths_h200.json).
    """
    if design.for_few_rows or not (design.swapped or design.has_narrow_subtiles) or design.is_simple:
        return None
    named = (
        "a design that exchanges A and B, for many rows," if design.swapped else f"a tile of {design.columns} columns"
    )
    if {problem.a.dtype.itemsize, problem.b.dtype.itemsize} != {2} or problem.b.strides[-2] != 1:
        return f"{named} is for A and B of 16 bits, and for B by columns"
    if is_short(problem):
        return f"{named} takes a longer K"
    others = "other designs do not have this limit"
    if any(node.op == "reduce" for node in program.graph.nodes):
        return f"{named} does not support reductions: {others}"
    travelling = [access for access in (*program.coming, *program.stores) if access.travels.by_value]
    if any(access.dtype.itemsize > 2 or not access.travels.staged for access in travelling):
        told = "operands and outputs of more than 16 bits, or that do not travel by TMA"
        return f"{named} does not support {told}: {others}"
    return None


def not_by_tma(program: Program, problem: Problem) -> str | None:
    """Why an operand or output does not travel by TMA although that was asked for, or None."""
    told = transports((access for _, access in program.tensors), program.stores)
    travelling = (*(access for _, access in program.tensors), *program.stores)
    for access, (name, how) in zip(travelling, told, strict=True):
        if name in problem.by_tma and not access.travels.staged:
            return f"'{name}' does not travel by TMA, as was asked for, but {how}"
    return None


def transports(loads: Iterable[Access], stores: Iterable[Access]) -> tuple[tuple[str, str], ...]:
    """For each operand, and then for each output: its name, and how it travels (`ways.py`)."""
    read = [(access.name, _way(access, access.travels.arriving)) for access in loads]
    return (*read, *((access.name, _way(access, access.travels.leaving)) for access in stores))


def _way(access: Access, told: str) -> str:
    return told.format(size=_bytes(access.bytes_at_once), why=access.why)


def _bytes(count: int) -> str:
    return "1 byte" if count == 1 else f"{count} bytes"


def notes(design: Design, problem: Problem, *, spills: bool) -> tuple[str, ...]:
    """The notes of a plan on a design whose stages are known. `spills`: registers spill."""
    shown = design.exchanged_sides if design.swapped else design
    along = "N" if design.swapped != design.bands_along_n else "M"
    return (
        *(multistage.notes(design, problem) if design.by_warps else []),
        *(tensor_memory.notes(design, problem) if design.in_tensor_memory else []),
        f"{shown}, {design.stages} stages, raster bands of {design.raster} clusters along {along}",
        *(
            ["A and B are exchanged: the product is computed transposed, and stored as it is asked for"]
            if design.swapped
            else []
        ),
        *([f"each tile holds both parts of a row, {design.columns} columns of each"] if design.parts > 1 else []),
        *([_CONVERTED.format(short(problem.a.dtype), short(problem.b.dtype))] if design.converts else []),
        *([f"{_EARLY}, into {design.spare} of the stages of A and B"] if design.spare else []),
        *([_SPILLS[design.instruction]] if spills else []),
        *_summed(design, problem),
        *_looser(design, problem),
    )


_CONVERTED = "registers convert B from {} to {} as it is multiplied"
_EARLY = "operands of each CTA's last tile are loaded ahead of their use"
_SPILLS = {
    WGMMA: "registers spill: this tile's accumulator leaves too few for so many operands and outputs",
    MMA_SYNC: "registers spill: this tile's accumulator leaves too few for its copies of A and B and its epilogue",
    TCGEN05: "registers may spill: the code of a tile of this width is unrolled for each subtile",
}


def rewritten(design: Design, given: Problem) -> tuple[str, ...]:
    """Notes on what the first kernel of a launch copies or converts, and why. In `given` A and B lie as in memory.

    Empty if there is no first kernel, or if it writes the parts of float32."""
    how = design.rewritten_as_given
    if how is None or how.parts > 1:
        return ()
    count = inputs.rewritten_bytes(given, how)
    held = f"{count / 1e6:.1f} MB of workspace" if count >= 1e5 else f"{count / 1e3:.1f} KB of workspace"
    of_a, of_b = inputs.why_copied(given)
    if how.narrow is not None:
        also = ", and A is copied to where TMA can address it" if how.of_a else ""
        head = f"B is converted first, from {short(how.narrow)} to {short(given.a.dtype)}{also}: {held}"
        return (head, of_a) if of_a else (head,)
    copied = [name for name, is_copied in zip("AB", (how.of_a, how.of_b), strict=True) if is_copied]
    are, them = ("are", "them") if len(copied) > 1 else ("is", "it")
    head = f"{' and '.join(copied)} {are} copied first, to where TMA can address {them}: {held}"
    return head, *(why for why in (of_a, of_b) if why)


def _is_full(design: Design) -> bool:
    """Whether the design multiplies float32 in full, as products of tf32 parts."""
    return design.rewritten is not None and design.rewritten.parts == inputs.PARTS


def _summed(design: Design, problem: Problem) -> list[str]:
    """Notes on how products of 8-bit numbers, or of parts of float32, are added up."""
    if _is_full(design):
        return [f"{_sums(design)}, and float32 adds up these sums"]
    if inputs.itemsize(problem) != 1:
        return []
    if design.in_tensor_memory:
        return ["the tensor cores add up all products; that they do so in float32 is assumed, and was not measured"]
    if problem.accumulator == torch.int32:
        return [_reached(problem)]
    if any(design.scaled):
        which = " and ".join(name for name, own in zip("AB", design.scaled, strict=True) if own)
        return [f"{_sums(design)} with 14 bits, and float32 adds up these sums times the block scales of {which}"]
    told = not design.by_warps  # the number of bits was measured only for wgmma
    if design.promoted:
        return [f"{_sums(design)}{' with 14 bits' if told else ''}, and float32 adds up these sums"]
    return [f"fast_accum: the tensor cores add up all products{', with 14 bits' if told else ''}"]


def _sums(design: Design) -> str:
    return f"the tensor cores add up {design.promoted} products at a time"


def _reached(problem: Problem) -> str:
    """A note that compares the largest possible sum of integers with the largest int32."""
    factors = problem.extents["k"], largest(problem.a.dtype), largest(problem.b.dtype)
    reached, most = inputs.largest_sum(problem), torch.iinfo(torch.int32).max
    told = f"a sum is at most {' * '.join(map(str, factors))} = {reached} in size"
    if reached <= most:
        return f"{told}, which int32 holds"
    return f"{told}, and int32 ends at {most}: what lies beyond is lost"


def _looser(design: Design, problem: Problem) -> list[str]:
    """Notes on how float32 is multiplied, and on `fast_math`, which makes results less exact."""
    found = []
    if problem.a.dtype == torch.float32:
        found = [_FULL if _is_full(design) else _TF32]
    return found + (["fast_math: every function by approximate instructions"] if problem.constraints.fast_math else [])


_FULL = "float32 in full: three tf32 products of the parts of A and B"
_TF32 = "A and B are multiplied as tf32, with 10 bits of fraction"
