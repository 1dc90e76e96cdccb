"""The CuTe DSL provider: one kernel for Hopper. Planning imports no cutlass; compiling does."""

from __future__ import annotations

import importlib.util

import torch

from epifuse.ir import Graph, Load
from epifuse.passes.assign_stages import has_row_stage
from epifuse.plan import Allocation, KernelSpec, Plan, Reason, Refusal
from epifuse.problem import Problem, TensorInfo
from epifuse.providers import sequence
from epifuse.providers.base import Runner
from epifuse.providers.cutedsl import costs, inputs, partials, recompute, rows
from epifuse.providers.cutedsl.accesses import arrange, is_viewable
from epifuse.providers.cutedsl.budget import crowded, spills
from epifuse.providers.cutedsl.heuristic import estimate, is_long, is_short
from epifuse.providers.cutedsl.lowering import lower
from epifuse.providers.cutedsl.program import Access, Design, Lowered, Program

DESIGNS = tuple(
    Design(tile, cluster, pingpong, spans)
    for tile, pingpong, spans in (
        ((128, 256), False, 1),
        ((256, 128), False, 1),
        ((128, 192), True, 1),
        ((128, 128), True, 1),
        ((128, 64), True, 1),
        ((64, 128), True, 1),
        ((64, 256), True, 1),
        ((64, 64), True, 2),
    )
    for cluster in ((2, 1), (1, 2), (1, 1))
)
"""Candidates. A ping-pong tile has one warp group, whose registers hold 128 x 192 at most.

64 x 64 is done with 128 bytes of K so soon that waiting for a stage shows: two spans a stage are 2 to 7 % faster where
it is the best tile, M of 64 and 128. Wider tiles lose the stages that this takes."""

ROW_DESIGNS = tuple(
    Design(tile, cluster, pingpong)
    for tile, pingpong in (((128, 256), False), ((128, 128), True), ((64, 128), True))
    for cluster in ((1, 4), (1, 8))
)
"""Further candidates where values need whole rows, which only a cluster holds."""


def _spec(design: Design) -> KernelSpec:
    (m, n), (cm, cn) = design.tile, design.cluster
    name = f"sm90_gemm_{m}x{n}_{design.schedule}_{cm}x{cn}"
    return KernelSpec(name, "cutedsl", "cuda", (90,), "persistent warp-specialised TMA + wgmma", (("design", design),))


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_NARROW_FLOATS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_LOADS = (torch.float32, *_NARROW_FLOATS, *_INTEGERS, torch.bool)
_CASTS = (torch.float32, *_NARROW_FLOATS, *_INTEGERS)  # one to a mask is a comparison by now
_OUTPUTS = (torch.float64, *_LOADS)
"""What a value of any kind is stored as."""


class CuteDslProvider:
    """See `providers.base.Provider`."""

    name = "cutedsl"

    def available(self) -> str | None:
        """Whether CuTe DSL is installed; it is not imported to find out."""
        if importlib.util.find_spec("cutlass") is None:
            return "CuTe DSL is not installed: pip install 'epifuse[cuda]'"
        return None

    def specs(self) -> tuple[KernelSpec, ...]:
        """One kernel in the designs it can be built in."""
        return tuple(map(_spec, (*DESIGNS, *ROW_DESIGNS)))

    def lower(self, graph: Graph, problem: Problem) -> Lowered:
        """The graph as the kernel walks it, beside the one that several launches would split."""
        return lower(graph, problem)

    def supports(self, spec: KernelSpec, work: Lowered, problem: Problem) -> Allocation | Refusal:
        """Epilogues over 16-bit and tf32 inputs that TMA can address; in several launches where that is allowed."""
        return recompute.supports(spec, work, problem, _one_launch)

    def build(self, plan: Plan) -> Runner:
        """Load the kernel, compiled for sm_90a where it is not stored yet."""
        from epifuse.providers.cutedsl.launch import GpuKernel

        if launches := plan.allocation.launches:
            between = sequence.slots(recompute.parts_of(plan), plan.problem)
            return sequence.in_sequence(list(map(self.build, launches)), between, plan.allocation.workspace_bytes)
        return GpuKernel(plan, *plan.allocation.program)


_SPILLING = 2.0
"""What a design that spills loses at least beside its estimate, where 64 x 128, whose rate is 0.8, is to be chosen."""


def _one_launch(spec: KernelSpec, work: Lowered, problem: Problem) -> Allocation | Refusal:
    problem, walked = inputs.filled(problem), work.walked
    found = _arranged(spec, walked, problem)
    if isinstance(found, str):
        return Refusal(spec.name, found)
    program, design = found
    full = spills(program, design, long=is_long(problem))
    return Allocation(
        design.tile,
        cost=estimate(design, problem, has_row_stage(walked)) * (_SPILLING if full else 1.0),
        workspace_bytes=partials.workspace_bytes(walked, design, problem),
        transports=tuple(_transports(program)),
        notes=(
            f"{design}, {design.stages} stages, raster bands of {design.raster} clusters along M",
            *([f"operands of a CTA's last tile wait in {design.spare} of the stages"] if design.spare else []),
            *(["so many operands and outputs spill registers beside this tile's accumulator"] if full else []),
            *_looser(problem),
        ),
        program=found,
    )


def _looser(problem: Problem) -> list[str]:
    """What was allowed that makes results less exact."""
    found = ["A and B are multiplied as tf32, with 10 bits of fraction"] if problem.a.dtype == torch.float32 else []
    return found + (["fast_math: every function by approximate instructions"] if problem.constraints.fast_math else [])


def _arranged(spec: KernelSpec, graph: Graph, problem: Problem) -> tuple[Program, Design] | str:
    """The program of a lowered graph and the design with its stages, or why there is none."""
    design: Design = dict(spec.design)["design"]
    reason = (
        inputs.refused(problem)
        or _refused_graph(graph, problem)
        or _not_asked_for(design, problem)
        or rows.refused(design, graph, problem)
    )
    if reason is not None:
        return reason
    if design in ROW_DESIGNS and not has_row_stage(graph):
        return "its cluster is for values that need whole rows, and there are none"
    found = arrange(graph, problem, design)
    if found is None:
        return "its tile leaves too little shared memory for three stages of A and B"
    return _not_by_tma(found[0], problem) or crowded(*found, short=is_short(problem)) or found


def _not_asked_for(design: Design, problem: Problem) -> str | None:
    for field in ("tile", "cluster", "schedule"):
        own, asked = getattr(design, field), getattr(problem.constraints, field)
        if asked not in (None, own):
            there = dict.fromkeys(str(getattr(one, field)) for one in (*DESIGNS, *ROW_DESIGNS))
            known = "" if str(asked) in there else f"; there are {', '.join(there)}"
            return f"its {field} is {own}, not the one asked for{known}"
    return None


def _not_by_tma(program: Program, problem: Problem) -> str | None:
    travelling = (*(access for _, access in program.tensors), *program.stores)
    other = next((access for access in travelling if access.name in problem.by_tma and access.way != "tile"), None)
    return None if other is None else f"'{other.name}' does not travel by TMA, as was asked for, but {_way(other)}"


def _refused_graph(graph: Graph, problem: Problem) -> str | None:
    for node in graph.nodes:
        if costs.name_of(node) not in costs.REGISTERS:
            return Reason(f"it has no form of {costs.name_of(node)} yet", graph.loc(node))
        if node.op == "cast" and node.attr not in _CASTS:
            return Reason(f"it does not cast to {node.attr} yet", graph.loc(node))
        if isinstance(node.attr, Load):
            operand = problem.by_name.get(node.attr.name)
            if isinstance(operand, TensorInfo) and operand.dtype not in _LOADS:
                return Reason(f"it cannot load '{node.attr.name}' of {operand.dtype} yet", graph.loc(node))
            if isinstance(operand, TensorInfo) and not is_viewable(operand, node.attr):
                why = f"it cannot reshape '{node.attr.name}' where it lies: hand in a contiguous tensor"
                return Reason(why, graph.loc(node))
    if (reason := partials.refused(graph, problem)) is not None:
        return reason
    for output in graph.outputs:
        if (dtype := dict(problem.dtypes)[output.name]) not in _OUTPUTS:
            return Reason(f"it cannot store '{output.name}' as {dtype} yet", graph.loc(output.node))
    return None


_WAYS = {
    "scalar": "one load a tile",
    "row": "once a tile, through shared memory",
    "column": "once a tile, through shared memory",
    "tile": "TMA through shared memory",
    "direct": "direct, {size} at a time, as {why}",
    "line": "once a row, by the CTA that holds where it starts",
    "finish": "merged by a second kernel in a fixed order",
}


def _transports(program: Program) -> list[tuple[str, str]]:
    late = "once, after all tiles"
    loads = [(access.name, late if access.way == "finish" else _way(access)) for _, access in program.tensors]
    return loads + [(access.name, _way(access)) for access in program.stores]


def _way(access: Access) -> str:
    return _WAYS[access.way].format(size=_bytes(access.bytes_at_once), why=access.why)


def _bytes(count: int) -> str:
    return "1 byte" if count == 1 else f"{count} bytes"
