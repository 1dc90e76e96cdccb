"""What a design takes of shared memory and registers. Imports no cutlass, so that planning needs none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from math import prod

from epifuse.ir import Graph, Node
from epifuse.providers.cutedsl import segments, tuned
from epifuse.providers.cutedsl.costs import REDUCTIONS, Registers, name_of, registers_of
from epifuse.providers.cutedsl.design import MATH_GROUPS, WARP_GROUP, Design, round_up
from epifuse.providers.cutedsl.program import Program
from epifuse.providers.cutedsl.rows import reduces_finished_value
from epifuse.providers.cutedsl.ways import Access

_REGISTERS = 65_536 // WARP_GROUP  # registers for one thread of each of the three warp groups together


def ahead(design: Design, program: Program) -> int:
    """How many blocks of K are being multiplied when a warp group gives back the stage of the block before them.

    One block of 128 x 128 takes the tensor cores 512 cycles. Beside a long epilogue of the other warp group the next
    block is not always issued in that time, so there are two. The second one costs the loads a stage. The number is 0
    if sums are promoted or A is converted in registers, because each block's products are then waited for.
    """
    if design.promoted or design.converts:
        return 0
    short = design.tile[0] * design.tile[1] * design.spans <= 128 * 128
    takes_long = _column_reductions(program.graph) > 0 or (bool(_reductions(program.graph)) and is_heavy(program.graph))
    return 2 if design.pingpong and short and takes_long and design.stages >= tuned.AHEAD_STAGES.value else 1


def _register_classes(graph: Graph) -> set[Registers]:
    """The register classes of all nodes that are computed for each value."""
    once = segments.values(graph)
    return {registers_of(node) for node in graph.nodes if {"m", "n"} <= graph.types[node].axes and node not in once}


def _reductions(graph: Graph) -> list[Node]:
    """The reductions to which each tile contributes a partial result."""
    return [node for node in graph.nodes if node.op == "reduce" and not reduces_finished_value(node, graph)]


def _column_reductions(graph: Graph) -> int:
    """How many reductions go down columns."""
    return sum("m" not in graph.types[node].axes >= {"n"} for node in _reductions(graph))


def in_segments(program: Program) -> bool:
    """Whether all reductions are of segments and no tanh is exact. A thread holds one result of a segment at a time, so
    gelu with scales of blocks and softmax of heads do not spill. An exact tanh that a second walk reads spills 480
    bytes."""
    exact = (name_of(node) == "tanh" and how != "fast" for node, how in program.accuracies.items())
    return all(segments.width(node) for node in _reductions(program.graph)) and not any(exact)


def _is_light(program: Program) -> bool:
    """Whether the computed values leave registers for reductions. An operand with one value a row does not, because a
    thread holds its value for each row."""
    wide = any(program.graph.types[node].kind == "int64" for node in program.graph.nodes)
    few = len(_reductions(program.graph)) <= tuned.FEW_REDUCTIONS.value
    columns = any("m" in access.axes and not access.travels.by_value for _, access in program.loads)
    return _register_classes(program.graph) <= {"few"} and few and not wide and not columns


def producer_registers(programs: Iterable[Program]) -> int:
    """Registers of a thread of the producer warp group, the same for all regions of a launch."""
    return tuned.PRODUCER_REGISTERS.value[any(program.staged for program in programs)]


def most_registers(programs: Iterable[Program]) -> int:
    """The most registers that a consumer thread can have: half of what the producer leaves, as a multiple of 8."""
    return (_REGISTERS - producer_registers(programs)) // MATH_GROUPS // 8 * 8


def is_heavy(graph: Graph) -> bool:
    """Whether an epilogue takes long, because of a reduction or of the values that it computes."""
    is_long = any(REDUCTIONS[node.attr[0]].time == "long" for node in _reductions(graph))
    return is_long or not _register_classes(graph) <= {"few"}


def registers(design: Design, program: Program, *, waited_for: bool) -> int:
    """Registers of a consumer thread: `most_registers`, or fewer.

    An epilogue that runs beside the other warp group's main loop gets few. With many registers so many of its values
    are computed at once that the register file is read at its limit, and the tensor cores wait, because their
    accumulators are in the same file. Many registers are better if the epilogue is `waited_for` or computes little.
    Each two fragments of 16 bits a value that a thread holds in addition get eight more, so that nothing spills.
    """
    most = most_registers([program])
    reductions, heavy = _reductions(program.graph), is_heavy(program.graph)
    accumulators = _accumulators(design)
    hidden = design.pingpong and accumulators >= WARP_GROUP and not waited_for
    # Direct loads and stores hold addresses: gelu at N = 4095 spills 870 bytes with 176 registers.
    spills = (
        len(reductions) > tuned.FEW_REDUCTIONS.value
        or "values" in program.edges
        or go_direct(program)
        or "many" in _register_classes(program.graph)
    )
    if not hidden or not heavy or spills or design.promoted or _hungry(program):
        return most
    held = sum(_bytes(program)) // 2 + 2 * any(program.graph.types[node].axes & {"m", "n"} for node in reductions)
    held += 4 * any(access.dtype.itemsize > 2 for access in program.staged)  # without this up to 280 bytes spill
    return min(most, accumulators + tuned.FEW_REGISTERS.value + 8 * (held // 2))


def go_direct(program: Program) -> bool:
    """Whether operands or outputs are read or written directly in global memory, value by value."""
    return any(access.travels.in_place for access in (*program.stores, *program.coming))


def _hungry(program: Program) -> str | None:
    """The name of a function that takes the "most" registers at the accuracy that it is computed with, or None."""
    accuracies = program.accuracies.items()
    return next((name_of(node) for node, how in accuracies if registers_of(node, how) == "most"), None)


def _bytes(program: Program) -> tuple[int, int]:
    """Bytes for one value of all operands that come with each subtile, and of all outputs that leave with it."""
    coming = sum(access.dtype.itemsize for access in program.coming)
    return coming, sum(access.dtype.itemsize for access in program.stores if access.travels.by_value)


def crowded(program: Program, design: Design, *, short: bool, long: bool) -> str | None:
    """Why the epilogue does not fit in the registers beside the accumulator, or None. Spills cost more than the tile
    gains.

    With CuTe DSL 4.8.1 on 128 x 192 the following spill: many fragments, an exact sine, comparisons with M and N for
    each value that is reduced, and reductions of values that are not light. The epilogue is waited for where K is
    `short`, or not `long` and outputs are wide. `family` does not refuse where only one width of tiles holds segments.
    """
    if _accumulators(design) <= WARP_GROUP:
        return None
    reductions, ahead = _reductions(program.graph), reads_ahead(design, program)
    fragments = _fragments(program, ahead=ahead)
    if design.split > 1 and (reductions or program.coming):  # up to 24 bytes spill
        return "its accumulator leaves too few registers for operands or reductions beside sums of parts of K"
    if design.swapped and _accumulators(design) > _WIDE_EXCHANGED and program.coming:  # up to 64 bytes spill
        return "its accumulator leaves too few registers for operands where A and B are exchanged"
    if reductions and not (_is_light(program) or in_segments(program)):
        return "its accumulator leaves too few registers for reductions beside what else there is to compute"
    # With two operands and two outputs the tile loses 9 % at K = 1024, and gains 3 % at 4096. With a third output it
    # gains 4 % there beside 192 accumulators (4096 x 14336 x 4096); 160 are slower than 128 (parts_tiles_h100.json).
    most = (6 if _accumulators(design) > _WIDE else 4) if long else 2
    waited_for = short or _bytes(program)[1] > most
    if fragments > _room(design) + (long and not ahead) or (waited_for and not ahead):
        return "its accumulator leaves too few registers for so many operands and outputs"
    if any(access.dtype.itemsize == 8 for access in program.stores if access.travels.by_value):  # 550 bytes spill
        return "its accumulator leaves too few registers for numbers of 64 bits"
    if reductions and "values" in program.edges:
        return "its accumulator leaves too few registers for reductions that end within 64 rows or 32 columns"
    if reductions and short and fragments > 1:
        return "its accumulator leaves too few registers for reductions where K is short"
    if go_direct(program) and segments.span(program.graph):  # 1500 bytes spill
        return "its accumulator leaves too few registers for parts of rows beside what goes direct"
    if program.columns and any(access.travels.in_place for access in program.coming):  # 696 bytes spill
        return "its accumulator leaves too few registers for operands of a region of N, which are read where they lie"
    hungry = _hungry(program)
    return f"its accumulator leaves too few registers for an exact {hungry}" if hungry else None


def _room(design: Design) -> int:
    """How many fragments (`_fragments`) have room beside an accumulator of more than 128 registers."""
    return (tuned.ROOM_BESIDE_192 if _accumulators(design) > _WIDE else tuned.ROOM_BESIDE_160).value


def reads_ahead(design: Design, program: Program) -> bool:
    """Whether the operands of a subtile are read from shared memory while the subtile before it is computed. This is so
    if the accumulator leaves registers for both."""
    return _accumulators(design) <= WARP_GROUP or _fragments(program) <= _room(design)


def _fragments(program: Program, *, ahead: bool = True) -> int:
    """How much a thread holds beside the accumulator, in fragments of 16 bits a value.

    A staged operand that is read `ahead` is held twice, for this subtile and for the next. An output is held until it
    leaves. A reduction down columns needs as much as an operand.
    """
    coming, leaving = _bytes(program)
    once = 0 if ahead else sum(access.dtype.itemsize for access in program.staged)
    return coming - once // 2 + leaving // 2 + 2 * _column_reductions(program.graph)


def spills(program: Program, design: Design, *, long: bool) -> bool:
    """Whether operands and outputs spill so much beside 96 or more accumulators a thread that a smaller tile is better.
    Five operands and five outputs of 16 bits spill 432 bytes beside 96 accumulators, and none beside 64."""
    room = tuned.ROOM_WHERE_K_IS_LONG if long else tuned.ROOM_BESIDE_128
    return _accumulators(design) > _ROOMY and _fragments(program) > room.value


_ROOMY, _WIDE, _WIDE_EXCHANGED = 64, 160, 176  # registers of a thread for its accumulator


def _accumulators(design: Design) -> int:
    """Registers of a thread that hold its part of a tile of the product."""
    if design.in_tensor_memory:
        return 0
    return design.rows * design.tile[1] // WARP_GROUP


_PIECE = 128  # columns whose sums are promoted at once: 64 registers of a thread
_MOST_PROMOTING = 192, 128  # a thread's registers for sums and what is added; 128 if K is split, or by mma.sync


def piece(design: Design) -> int:
    """Columns that one instruction multiplies: all of a tile's, or pieces of at most 128 if sums are promoted. What is
    added to the sums takes registers beside them, and 256 columns at once spill 408 bytes."""
    columns = design.tile[1]
    return columns // -(-columns // _PIECE) if design.promoted else columns


def unpromoted(design: Design) -> str | None:
    """Why a tile's sums cannot be promoted (added up in float32, see `Design`), or None.

    If K is split, sums of other parts are added later, and up to 156 bytes spill beside 128 accumulators a thread.
    Pieces of other sizes have run on no GPU.
    """
    if not design.promoted:
        return None
    of_floats = design.rewritten is not None and design.rewritten.parts > 1  # float32 in full
    way_out = "" if of_floats or any(design.scaled) else ": fast_accum=True has none"
    added = _accumulators(design) if design.by_warps else piece(design) // 2  # of a whole tile by mma.sync
    if _accumulators(design) + added > _MOST_PROMOTING[design.split > 1 or design.by_warps]:
        return f"its accumulator leaves too few registers for sums of {design.promoted} products beside it{way_out}"
    if design.tile[1] > _PIECE and design.tile[1] % _PIECE:
        wide = design.tile[1]
        why = f"sums of {design.promoted} products are added {_PIECE} columns at a time, and its tile has {wide}"
        return f"{why}{way_out}"
    return None


def least_stages(design: Design) -> int:
    """How many stages A and B should get if K is long, even if operands and outputs of 32 bits go direct for it.

    Those of 16 bits stay in tiles: going direct in pairs, they fill only half a sector of memory.
    """
    return -(-tuned.LEAST_BYTES.value // sum(stage_bytes(design)))


def stage_bytes(design: Design) -> tuple[int, int]:
    """Bytes of A and of B in a stage."""
    m, n = design.brought
    return m * design.k_bytes // (1 + design.converts), n * design.k_bytes // (design.ctas if design.in_pairs else 1)


def spare(design: Design, program: Program, *, short: bool) -> int:
    """Number of stages of A and B into which the operands of a CTA's last tile are loaded early, or 0.

    Without such stages the last tile waits for memory in each round of subtiles, and no main loop of another tile hides
    this wait. With them each subtile of every tile takes a little longer. Heavy epilogues, and ping-pong designs where
    K is `short`, cannot hide that. An accumulator of more than 128 registers leaves too few registers for it.
    """
    if is_heavy(program.graph) or (short and design.pingpong) or _accumulators(design) > WARP_GROUP:
        return 0
    return 1 + max((stage for stage, _, _ in spare_places(design, program).values()), default=-1)


def spare_places(design: Design, program: Program) -> dict[tuple[int, int, int], tuple[int, int, int]]:
    """Where the operands of a CTA's last tile are loaded early: in stages of A and B that no block of K needs any more.

    A key is (number of the warp group among those that share the tile, round of subtiles from 1 on, number of the
    operand among those that come in tiles). Its value is (stage, counted from the first free one; 0 for A's part of the
    stage or 1 for B's; first byte in that part). Empty if half of the stages are too few: the others are free too late.
    """
    sizes = [access.dtype.itemsize for access in program.staged]
    free = {
        (stage, matrix): size for stage in range(design.stages // 2) for matrix, size in enumerate(stage_bytes(design))
    }
    places = {}
    rounds = range(1, design.subtiles // design.load_stages if sizes else 0)
    for within, round_, (operand, size) in product(range(design.sharing), rounds, enumerate(sizes)):
        taken = design.load_stages * prod(design.subtile) * size
        part = next((part for part in free if free[part] >= taken), None)
        if part is None:
            return {}
        places[within, round_, operand] = (*part, stage_bytes(design)[part[1]] - free[part])
        free[part] -= taken
    return places


FLAG_BYTES = 16
"""Bytes of flags for the sums of one part of K of one tile: each warp group that writes sums sets a flag of 8 bytes."""


def part_bytes(design: Design) -> int:
    """Bytes of sums that a CTA writes for one tile into the workspace, if its part of K is not the first."""
    return 4 * prod(design.tile)


def sums_bytes(design: Design, extents: Mapping[str, int]) -> int:
    """Bytes of workspace for the sums and flags of all tiles, for every part of K but the first."""
    if design.split == 1:
        return 0
    sides = zip((extents["m"], extents["n"]), (design.tile[0], design.columns), design.cluster, strict=True)
    tiles = extents["l"] * prod(-(-extent // (tile * ctas)) * ctas for extent, tile, ctas in sides)
    return tiles * (design.split - 1) * (part_bytes(design) + FLAG_BYTES)


_SUMS_BYTES = 48
"""Bytes of shared memory for two tiles in tensor memory: two barriers for each, which say that it is complete and that
it was read, the address of tensor memory, and a barrier for giving it back."""
EXCHANGES = 2
"""Buffers for exchanges. Two are enough: before a CTA writes round i + 2 it has received round i + 1 from every peer,
and a peer sends round i + 1 only after it has read round i."""


def exchange_bytes(design: Design) -> int:
    """Bytes of shared memory in which a CTA receives partial results of its rows from every CTA of its cluster, and of
    the barriers that count these bytes."""
    received = 4 * design.exchanged * design.rows * design.cluster[1]
    return EXCHANGES * MATH_GROUPS * (received + 8) if design.exchanged else 0


def shared_bytes(design: Design, loads: Iterable[Access], stores: Iterable[Access]) -> int:
    """Bytes of a CTA's shared memory: barriers and vectors, rounded up to 1024, then stages of A and B, then tiles."""
    barriers = 16 * (design.stages + MATH_GROUPS * design.load_stages)
    if design.load_stages:
        barriers += 8 * design.sharing * (design.subtiles // design.load_stages - 1)  # for spare stages
    barriers += _SUMS_BYTES * design.in_tensor_memory
    head, tiles = barriers + exchange_bytes(design), 0
    for accesses, stages in ((loads, design.load_stages), (stores, design.store_stages)):
        for access in accesses:
            own = MATH_GROUPS * access.travels.shared_bytes(design, access, stages)
            head, tiles = (head, tiles + own) if access.travels.staged else (head + own, tiles)
    return round_up(head, 1024) + design.stages * sum(stage_bytes(design)) + tiles


def fit(
    design: Design, loads: tuple[Access, ...], stores: tuple[Access, ...], capacity: int, enough: int
) -> Design | None:
    """Return the design with the stages that fit best in `capacity` bytes; None if A and B would get too few.

    A and B get `enough` stages first. Then operands get three or four stages rather than two. Outputs by rows leave
    warp by warp: in a ping-pong tile they get two, or one if that gains a stage of A and B
    (kernel_variants.json#one-slot). Outputs by columns, which a whole warp group sends and waits for together, get
    three or four, as do those of cooperative tiles, whose stores no main loop hides (store_slots_h200.json). The number
    divides the number of subtiles, and is one if there is one subtile, so that a slot is known while tracing.
    """
    counts = [stages for stages in (2, 3, 4) if design.subtiles % stages == 0][:2] or [1]
    loading = counts if any(access.travels.staged for access in loads) else [0]
    staged = [access for access in stores if access.travels.staged]
    by_rows = all(access.by_rows for access in staged)
    storing = ([1, *(counts[:1] if design.pingpong else counts)] if by_rows else counts) if staged else [0]
    found = []
    for load_stages in loading:
        for store_stages in storing:
            made = replace(design, load_stages=load_stages, store_stages=store_stages)
            found.append(replace(made, stages=_stages(made, loads, stores, capacity)))
    best = max(found, key=lambda made: (min(made.stages, enough), made.load_stages, made.store_stages))
    return best if best.stages >= fewest(design) else None


_COPIED = range(2, 4 + 1)
"""Stages of A and B if threads copy them. More stages would only make the start of a tile longer."""


def fewest(design: Design) -> int:
    """The fewest stages of A and B that a design works with."""
    return _COPIED[0] if design.by_warps else tuned.FEWEST_STAGES.value


def _stages(design: Design, loads: tuple[Access, ...], stores: tuple[Access, ...], capacity: int) -> int:
    stages = 0
    while shared_bytes(replace(design, stages=stages + 1), loads, stores) <= capacity:
        stages += 1
    return min(stages, _COPIED[-1]) if design.by_warps else stages
