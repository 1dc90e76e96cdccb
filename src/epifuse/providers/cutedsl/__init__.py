"""The CuTe DSL provider: one kernel for Hopper so far. Planning imports no cutlass; building does."""

from __future__ import annotations

import importlib.util

import torch

from epifuse.ir import Graph, Load
from epifuse.ir.types import dim_size
from epifuse.passes.assign_stages import assign_stages
from epifuse.passes.canonicalise import canonicalise
from epifuse.passes.lower import lower
from epifuse.passes.split_operators import split_operators
from epifuse.plan import Allocation, KernelSpec, Plan, Refusal
from epifuse.problem import Problem, TensorInfo
from epifuse.providers.base import Runner
from epifuse.providers.cutedsl import partials
from epifuse.providers.cutedsl.accesses import arrange
from epifuse.providers.cutedsl.budget import crowded
from epifuse.providers.cutedsl.program import Design, Program

NATIVE = frozenset(
    {
        "sigmoid",
        "silu",
        "gelu_tanh",
        "gelu_erf",
        "dgelu_tanh",
        "dgelu_erf",
        "expm1",
        "softplus",
        "logsigmoid",
        "mish",
    }
)
"""Activations with a fast device form; a test compares this with the table, which needs cutlass to be imported."""

DESIGNS = tuple(
    Design(tile, cluster, pingpong)
    for tile, pingpong in (
        ((128, 256), False),
        ((256, 128), False),
        ((128, 192), True),
        ((128, 128), True),
        ((128, 64), True),
        ((64, 128), True),
        ((64, 256), True),
    )
    for cluster in ((2, 1), (1, 2), (1, 1))
)
"""Candidates. A ping-pong tile has one warp group, whose registers hold 128 x 192 at most."""


def _spec(design: Design) -> KernelSpec:
    (m, n), (cm, cn) = design.tile, design.cluster
    name = f"sm90_gemm_{m}x{n}_{design.schedule}_{cm}x{cn}"
    return KernelSpec(name, "cutedsl", "cuda", (90,), "persistent warp-specialised TMA + wgmma", (("design", design),))


_INPUTS = (torch.float16, torch.bfloat16)
_OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)
_LOADS = (*_OUTPUTS, torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool)
_CASTS = (*_OUTPUTS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_ALIGNMENT = 16  # bytes: TMA's rule for strides


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
        return tuple(map(_spec, DESIGNS))

    def supports(self, spec: KernelSpec, graph: Graph, problem: Problem) -> Allocation | Refusal:
        """Elementwise float epilogues over 16-bit inputs whose rows TMA can address."""
        walked = lowered(graph, problem)
        reason = _refused_problem(problem) or _refused_graph(walked, problem)
        if reason is not None:
            return Refusal(spec.name, reason)
        for field in ("tile", "cluster", "schedule"):
            if getattr(problem.constraints, field) not in (None, getattr(dict(spec.design)["design"], field)):
                return Refusal(
                    spec.name, f"its {field} is {getattr(dict(spec.design)['design'], field)}, not the one asked for"
                )
        found = arrange(walked, problem, dict(spec.design)["design"], problem.a.dtype.itemsize)
        if found is None:
            return Refusal(spec.name, "its tile leaves too little shared memory for three stages of A and B")
        program, design = found
        if (reason := crowded(program, design)) is not None:
            return Refusal(spec.name, reason)
        return Allocation(
            design.tile,
            cost=estimate(design, problem),
            workspace_bytes=partials.workspace_bytes(walked, design, problem),
            transports=tuple(_transports(program)),
            notes=(f"{design}, {design.stages} stages, raster bands of {design.raster} clusters along M",),
        )

    def build(self, plan: Plan) -> Runner:
        """Compile for sm_90a."""
        from epifuse.providers.cutedsl.launch import GpuKernel

        graph, problem = lowered(plan.graph, plan.problem), plan.problem
        found = arrange(graph, problem, dict(plan.spec.design)["design"], problem.a.dtype.itemsize)
        assert found is not None
        return GpuKernel(plan, *found)


def lowered(graph: Graph, problem: Problem) -> Graph:
    """The graph as the kernel walks it."""
    return assign_stages(canonicalise(lower(split_operators(graph, problem), NATIVE), problem), problem)


def _refused_problem(problem: Problem) -> str | None:
    if problem.a.dtype not in _INPUTS or problem.b.dtype != problem.a.dtype:
        return f"it multiplies float16 or bfloat16, and A is {problem.a.dtype}"
    if problem.accumulator != torch.float32:
        return f"it accumulates in float32, not {problem.accumulator}"
    if problem.extents["k"] == 0:
        return "K = 0 leaves it nothing to multiply"
    for name, info in (("A", problem.a), ("B", problem.b)):
        if (reason := _unaddressable(name, info)) is not None:
            return reason
    for name, via in problem.transports:
        if via != "tma":
            return f"'{name}' cannot be asked to travel by {via} yet"
    return None


def _unaddressable(name: str, info: TensorInfo) -> str | None:
    """TMA's rules: one contiguous mode, where it starts and all other strides a multiple of 16 bytes."""
    if not info.aligned:
        return f"{name} starts at an address that is no multiple of {_ALIGNMENT} bytes, which TMA needs"
    inner = [i for i in (-1, -2) if info.strides[i] == 1]
    if not inner:
        return f"{name} has no contiguous rows or columns"
    for i, (stride, extent) in enumerate(zip(info.strides, info.shape, strict=True)):
        size = stride * info.dtype.itemsize
        if i - len(info.shape) != inner[0] and extent > 1 and (size % _ALIGNMENT or size == 0):
            return f"{name} has a stride of {size} bytes, and TMA needs a multiple of {_ALIGNMENT}"
    return None


def _refused_graph(graph: Graph, problem: Problem) -> str | None:
    for node in graph.nodes:
        type_ = graph.types[node]
        if node.op == "debug_print":
            return f"it has no {node.op} yet"
        if node.op == "cast" and node.attr not in _CASTS:
            return f"it does not cast to {node.attr} yet"
        if any(factor.extent is not None or factor.stride > 1 for factor in type_.factors):
            return "it has no reshaped axes yet"
        if isinstance(node.attr, Load):
            operand = problem.by_name.get(node.attr.name)
            if isinstance(operand, TensorInfo) and operand.dtype not in _LOADS:
                return f"it cannot load '{node.attr.name}' of {operand.dtype} yet"
            if not isinstance(operand, TensorInfo) and type_.kind == "int64":
                return f"it cannot take the int64 '{node.attr.name}'"
    if (reason := partials.refused(graph, problem)) is not None:
        return reason
    for output in graph.outputs:
        if graph.stages[output.node].kind == "finish":
            if graph.types[output.node].kind != "float" or dict(problem.dtypes)[output.name] not in _OUTPUTS:
                return f"it stores float32, float16 and bfloat16, and '{output.name}' is something else"
            continue
        if graph.types[output.node].kind != "float" or dict(problem.dtypes)[output.name] not in _OUTPUTS:
            return f"it stores float32, float16 and bfloat16, and '{output.name}' is something else"
        if len(output.dims or ()) < 2 or any(dim_size(d, problem.extents) == 0 for d in output.dims or ()):
            return f"'{output.name}' is not a full-size result"
    return None


_MULTIPROCESSORS = 132  # of an H100 or H200
_RATE = {
    ((128, 192), True): 1.0,
    ((128, 128), True): 0.98,
    ((64, 256), True): 0.96,
    ((128, 256), False): 0.95,
    ((256, 128), False): 0.95,
    ((64, 128), True): 0.8,
    ((128, 64), True): 0.6,
}
"""Rate of a design beside the best, by tile and ping-pong: on one H200, plain products of bfloat16, K >= 1024."""
_FIRST_PAIR = 1.07
"""What a multiprocessor that gets one pair of ping-pong tiles loses beside one tile twice as large: less reuse, and
nothing to hide the pair's start. 1024 x 4096 x 4096 with gelu: 128 x 256 cooperative 46.8 us, 128 x 128 pairs 48.2."""
_EPILOGUE_K = 160
"""What an exposed epilogue costs, in elements of K of the main loop."""


def estimate(design: Design, problem: Problem) -> float:
    """Estimated time in arbitrary units: waves of tiles, times the time of a tile, and the last epilogue."""
    e = problem.extents
    (m, n), (cm, cn) = design.tile, design.cluster
    blocks = -(-e["m"] // m), -(-e["n"] // n)
    tiles = e["l"] * _up(blocks[0], cm) * _up(blocks[1], cn)
    exposed = 0 if design.pingpong else _EPILOGUE_K
    work = (e["k"] + exposed) * m * n / _RATE[design.tile, design.pingpong]
    tail = _EPILOGUE_K * m * n if design.pingpong else 0
    # The two tiles of a ping-pong pair share a multiprocessor, so its waves are of tiles as well.
    waves = -(-tiles // _MULTIPROCESSORS)
    alone = _FIRST_PAIR if design.pingpong and waves == 2 else 1.0
    return waves * work * alone * _CLUSTER_COST[design.cluster, blocks[0] > 1] + tail


_CLUSTER_COST = {
    ((2, 1), True): 0.97,
    ((1, 2), True): 0.98,
    ((1, 1), True): 1.0,
    ((2, 1), False): 1.1,
    ((1, 2), False): 1.02,
    ((1, 1), False): 1.0,
}
"""By cluster, and whether there is more than one row of tiles: sharing B pays where several rows read it."""


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_WAYS = {
    "scalar": "one load a tile",
    "row": "once a tile, through shared memory",
    "column": "once a tile, through shared memory",
    "tile": "TMA through shared memory",
    "direct": "direct, element by element",
    "finish": "merged by a second kernel in a fixed order",
}


def _transports(program: Program) -> list[tuple[str, str]]:
    accesses = [access for _, access in program.tensors] + list(program.stores)
    return [(access.name, _WAYS[access.way]) for access in accesses]
