"""Which way each operand and output travels. Imports no cutlass, so that planning needs none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from epifuse.ir import Graph, Load, Node, Output
from epifuse.ir.types import factors_of, shape_of
from epifuse.problem import Problem, TensorInfo
from epifuse.providers.cpu.space import Space, viewed
from epifuse.providers.cutedsl import budget
from epifuse.providers.cutedsl.addresses import Mode, modes
from epifuse.providers.cutedsl.heuristic import band, is_long, is_short
from epifuse.providers.cutedsl.partials import edges, reduction
from epifuse.providers.cutedsl.precision import accuracies
from epifuse.providers.cutedsl.prints import with_prints
from epifuse.providers.cutedsl.program import NO_EDGES, Access, Design, Program, Way
from epifuse.providers.cutedsl.rows import is_line, walks

ALIGNMENT = 16  # bytes: TMA's rule for strides and bases
_WIDEST_STAGED = 4  # bytes: the copies in the accumulator's order are for elements of 8, 16 and 32 bits
_SHORT_STAGES, _FEWER_STAGES, _ENOUGH_STAGES = 4, 5, 6
"""Of A and B, where K is short, in between, and where something is reduced or spare stages hold the last tile's
operands; what is left serves the epilogue's tiles first. Beside two operands that are added four stages take 4 to 6 %
longer than five. Beside one, six and spare ones take up to 7 % less than five in calls in a row, and 1.3 % more for
relu(alpha accum + beta C) of 16384 x 4096 x 1024; of 4096 x 4096 x 4096, where the GPU rests between calls, 1.5 % more
on one GPU and 0.7 % less on another. Six alone leave too few subtiles ahead in a last tile, and row sums of squares
take 8 % more with six where K is 512 (benchmarks/results/kernel_variants.json).
"""
_Sides = tuple[list[Access], list[Access]]
_Modes = tuple[Mode, Mode, Mode]
_VECTOR_WAYS: dict[frozenset[str], str] = {frozenset("n"): "row", frozenset("m"): "column", frozenset(): "scalar"}


def arrange(graph: Graph, problem: Problem, design: Design) -> tuple[Program, Design] | None:
    """Program and design with its stages, or None where the design leaves A and B too little shared memory."""
    graph, problem, prints = with_prints(graph, problem)
    stores = [_store(output, graph, problem) for output in graph.outputs]
    walked = walks(graph)
    in_tiles = {node for walk in walked for node in (*walk.nodes, *walk.lines)}
    exchanged = max(sum(reduction(node, graph).words for node in walk.reductions) for walk in walked)
    design = replace(design, exchanged=exchanged if design.cluster[1] > 1 else 0, raster=band(problem))
    reduces = any(node.op == "reduce" for node in graph.nodes)
    loads = [_load(node, graph, problem, late=node not in in_tiles) for node in graph.loads()]
    # Outputs by columns need stages of their own (`budget.fit`).
    spared = any(load.way == "tile" for load in loads) and all(a.by_rows for a in stores if a.way == "tile")
    enough = _ENOUGH_STAGES if reduces or (spared and not budget.is_heavy(graph)) else _FEWER_STAGES
    enough = _SHORT_STAGES if is_short(problem) else enough
    least = budget.least_stages(design) if is_long(problem) and len(walked) == 1 else 0
    fitted = _fitted(design, (loads, stores), problem, enough, least)
    if fitted is None:
        return None
    found, (loads, stores) = fitted
    exactness = accuracies(graph, dict(problem.dtypes), fast_math=problem.constraints.fast_math)
    # Only reductions ask, and a kernel for each answer is one kernel more.
    cut = edges(design, problem.extents["m"], problem.extents["n"]) if reduces else NO_EDGES
    loading = tuple(zip(graph.loads(), loads, strict=True))
    program = Program(graph, loading, tuple(stores), exactness, cut, prints)
    # Who walks the accumulator more than once holds what the walks found. What reduces nothing gains or loses 2 % where
    # K is short, which is not worth a kernel of its own.
    waited_for = (reduces and is_short(problem)) or len(walked) > 1
    registers = budget.registers(found, program, waited_for=waited_for)
    spare = budget.spare(found, program, short=is_short(problem)) if len(walked) == 1 else 0
    return program, replace(found, registers=registers, spare=spare)


def _fitted(design: Design, sides: _Sides, problem: Problem, enough: int, least: int) -> tuple[Design, _Sides] | None:
    """The design with its stages, and `sides`, loads and stores, of which some go direct to make room; or None.

    Those are what does not fit, and what is 32 bits wide, whose pairs fill whole sectors of memory, until A and B have
    their `least` stages. Operands and outputs go in turn, the last first, and what was asked to go by TMA last of all.
    """
    asked, sides = problem.by_tma, (list(sides[0]), list(sides[1]))

    def tiles(may: Callable[[Access], bool]) -> list[list[int]]:
        return [[i for i, access in enumerate(side) if access.way == "tile" and may(access)] for side in sides]

    while True:
        capacity = problem.target.shared_memory
        found = budget.fit(design, tuple(sides[0]), tuple(sides[1]), capacity, max(enough, least))
        if found is not None and found.stages >= least:
            return found, sides
        why = "shared memory has no room for all of them" if found is None else "A and B have more stages so"
        if found is not None:
            leaving = tiles(lambda access: access.name not in asked and access.dtype.itemsize == 4)
        elif not any(leaving := tiles(lambda access: access.name not in asked)):
            leaving = tiles(lambda _: True)
        if not any(leaving):
            return None if found is None else (found, sides)
        which = 0 if len(leaving[0]) >= len(leaving[1]) else 1
        last = leaving[which][-1]
        sides[which][last] = replace(sides[which][last], way="direct", why=why)


def _load(node: Node, graph: Graph, problem: Problem, *, late: bool) -> Access:
    assert isinstance(node.attr, Load)
    name, axes = node.attr.name, graph.types[node].axes
    info = problem.by_name.get(name)
    if not isinstance(info, TensorInfo):
        return Access(name, "number")
    tensor = viewed(stand_in(info), node.attr)
    where = modes(tensor, node.attr.dims or (), Space.of(graph, problem.extents))
    if late:
        return Access(name, "finish", axes, info.dtype, inner=_inner(where))
    if (way := _VECTOR_WAYS.get(axes - {"l"})) is not None:
        return Access(name, way, axes, info.dtype, inner=_inner(where))  # type: ignore[arg-type]
    return _tile(Access(name, "direct", axes, info.dtype), where, aligned=info.aligned)


def _store(output: Output, graph: Graph, problem: Problem) -> Access:
    dtype, dims = dict(problem.dtypes)[output.name], output.dims or ()
    given = dict(problem.outputs)[output.name]
    where = modes(destination(output, problem), dims, Space.of(graph, problem.extents))
    # One batch is written as if it varied over batches: the same kernel then serves batched problems.
    axes = frozenset(factor.axis for factor in factors_of(dims)) | ({"l"} if problem.extents["l"] == 1 else set())
    if graph.stages[output.node].kind == "finish":
        way: Way = "line" if is_line(output, graph) else "finish"
        return Access(output.name, way, graph.types[output.node].axes, dtype, inner=_inner(where))
    direct = Access(output.name, "direct", axes, dtype)
    return _tile(direct, where, aligned=given is None or given.aligned, written=True)


def destination(output: Output, problem: Problem) -> torch.Tensor:
    """A tensor without data like an output; one that was given may have the shape that keeps dims."""
    shape = shape_of(output.dims or (), problem.extents)
    return stand_in(dict(problem.outputs).get(output.name) or shape).view(shape)


def is_viewable(operand: TensorInfo, load: Load) -> bool:
    """Whether the layout operations written on an operand move none of its data."""
    try:
        viewed(stand_in(operand), load)
    except RuntimeError:
        return False
    return True


def stand_in(source: TensorInfo | tuple[int, ...]) -> torch.Tensor:
    """A tensor without data of these strides; one that is still to be allocated is contiguous."""
    if isinstance(source, TensorInfo):
        return torch.empty_strided(source.shape, source.strides, device="meta")
    return torch.empty(source, device="meta")


def _tile(access: Access, where: _Modes, *, aligned: bool, written: bool = False) -> Access:
    """By TMA where it can address the tensor, else direct."""
    direct = _direct(access, where, aligned=aligned)
    if (why := _not_by_tma(direct, where, aligned=aligned, written=written)) is not None:
        return replace(direct, why=why)
    return replace(direct, way="tile", by_rows=where[1].strides[0] == 1)


def _not_by_tma(access: Access, where: _Modes, *, aligned: bool, written: bool) -> str | None:
    """Why TMA cannot address a tensor, or None."""
    size = access.dtype.itemsize
    if size > _WIDEST_STAGED:
        return f"its values have {8 * size} bits"
    if any(access.inner):
        return "no single stride steps along M, N or the batches"
    if not {"m", "n"} <= access.axes:
        return "it does not vary over both M and N"
    if not aligned:
        return f"it does not start at a multiple of {ALIGNMENT} bytes"
    (rows, row), (columns, column), (batches, batch) = ((mode.extents[0], mode.strides[0]) for mode in where)
    if 1 not in (row, column):
        return "neither its rows nor its columns are contiguous"
    line = size * (columns if column == 1 else rows)
    # TMA writes whole granules of 16 bytes: a result of one float32 was written with what lies behind it.
    if written and line % ALIGNMENT:
        return f"its contiguous lines of {line} bytes are no multiple of {ALIGNMENT}"
    steps = [(rows, row) if column == 1 else (columns, column), (batches if "l" in access.axes else 1, batch)]
    strides = [size * step for extent, step in steps if extent > 1]
    if 0 in strides:
        return "it is expanded: hand in what it was expanded from"
    wrong = next((stride for stride in strides if stride < 0 or stride % ALIGNMENT), None)
    return None if wrong is None else f"a stride of {wrong} bytes is no multiple of {ALIGNMENT}"


def _direct(access: Access, where: _Modes, *, aligned: bool) -> Access:
    m, n, l = where
    steps = [step for mode in (m, l) for extent, step in zip(*mode, strict=True) if extent > 1] + [*n.strides[1:]]
    pairs = aligned and n.strides[0] == 1 and all(number % 2 == 0 for number in (n.extents[0], *steps))
    return replace(access, pairs=pairs, inner=_inner(where))


def _inner(where: _Modes) -> tuple[tuple[int, ...], ...]:
    return tuple(mode.extents[:-1] for mode in where)
