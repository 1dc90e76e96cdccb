"""The CuTe DSL provider: one kernel for Hopper so far. Planning imports no cutlass; building does."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import count

import torch

from epifuse.ir import Graph, Load
from epifuse.ir.types import dim_size
from epifuse.passes.assign_stages import assign_stages
from epifuse.passes.canonicalise import canonicalise
from epifuse.passes.lower import lower
from epifuse.plan import Allocation, KernelSpec, Plan, Refusal
from epifuse.problem import HostNumber, Problem, TensorInfo
from epifuse.providers.base import Runner
from epifuse.providers.cutedsl.budget import fit_stages
from epifuse.providers.cutedsl.program import Design, Program

NATIVE = frozenset({"sigmoid", "silu", "gelu_tanh", "gelu_erf", "expm1", "softplus", "logsigmoid", "mish"})
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
_LARGEST_WITH_OPERANDS = 128 * 128  # of a ping-pong tile: at 128 x 160 a residual and a second output already spill


def _spec(design: Design) -> KernelSpec:
    (m, n), (cm, cn) = design.tile, design.cluster
    name = f"sm90_gemm_{m}x{n}_{design.schedule}_{cm}x{cn}"
    return KernelSpec(name, "cutedsl", "cuda", (90,), "persistent warp-specialised TMA + wgmma", (("design", design),))


_INPUTS = (torch.float16, torch.bfloat16)
_OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)
_LOADS = (*_OUTPUTS, torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool)
_CASTS = (*_OUTPUTS, torch.int32, torch.int16, torch.int8, torch.uint8)
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
        reason = _refused_problem(problem) or _refused_graph(lowered(graph, problem), problem)
        if reason is not None:
            return Refusal(spec.name, reason)
        staged = staged_output(graph, problem)
        if isinstance(staged, str):
            return Refusal(spec.name, staged)
        design = fitted(spec, graph, problem, staged)
        operands = any(isinstance(problem.by_name.get(n.attr.name), TensorInfo) for n in graph.loads())
        if design.pingpong and design.tile[0] * design.tile[1] > _LARGEST_WITH_OPERANDS and operands:
            return Refusal(spec.name, "its accumulator leaves too few registers for an epilogue with operands")
        for field in ("tile", "cluster", "schedule"):
            if getattr(problem.constraints, field) not in (None, getattr(design, field)):
                return Refusal(spec.name, f"its {field} is {getattr(design, field)}, not the one asked for")
        return Allocation(
            design.tile,
            cost=estimate(design, problem),
            transports=tuple(_transports(graph, problem, staged)),
            notes=(f"{design}, {design.stages} stages, raster bands of {design.raster} clusters along M",),
        )

    def build(self, plan: Plan) -> Runner:
        """Compile for sm_90a."""
        from epifuse.providers.cutedsl.launch import GpuKernel

        graph, problem = lowered(plan.graph, plan.problem), plan.problem
        staged = staged_output(plan.graph, problem)
        assert isinstance(staged, int)
        return GpuKernel(plan, program_of(graph, problem, staged), fitted(plan.spec, plan.graph, problem, staged))


def lowered(graph: Graph, problem: Problem) -> Graph:
    """The graph as the kernel walks it."""
    return assign_stages(canonicalise(lower(graph, NATIVE), problem), problem)


def program_of(graph: Graph, problem: Problem, staged: int) -> Program:
    """The program of a lowered graph: numbers are handed over, computed ones too."""
    tensors = {name for name, operand in problem.operands if isinstance(operand, TensorInfo)}
    names = {node.attr.name for node in graph.loads()}
    return Program.of(graph, frozenset(names - tensors), staged)


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
    """TMA's rules: one contiguous mode, all other strides a multiple of 16 bytes."""
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
        if node.op in ("reduce", "debug_print"):
            return f"it has no {node.attr[0] if node.op == 'reduce' else node.op} yet"
        if type_.kind == "int64" or (node.op == "cast" and node.attr not in _CASTS):
            return f"it does not cast to {node.attr} yet"
        if any(factor.extent is not None or factor.stride > 1 for factor in type_.factors):
            return "it has no reshaped axes yet"
        if isinstance(node.attr, Load):
            operand = problem.by_name.get(node.attr.name)
            if isinstance(operand, TensorInfo) and operand.dtype not in _LOADS:
                return f"it cannot load '{node.attr.name}' of {operand.dtype} yet"
            if isinstance(operand, HostNumber) and operand.kind == "int64":
                return f"it cannot take the int64 '{node.attr.name}'"
    for output in graph.outputs:
        if graph.types[output.node].kind != "float" or dict(problem.dtypes)[output.name] not in _OUTPUTS:
            return f"it stores float32, float16 and bfloat16, and '{output.name}' is something else"
        if len(output.dims or ()) < 2 or any(dim_size(d, problem.extents) == 0 for d in output.dims or ()):
            return f"'{output.name}' is not a full-size result"
    return None


def staged_output(graph: Graph, problem: Problem) -> int | str:
    """Which output leaves by TMA: the first that is the whole result by rows; or why none can."""
    reasons = []
    given = dict(problem.outputs)
    for index, output in zip(count(), graph.outputs, strict=False):
        dtype = dict(problem.dtypes)[output.name]
        info = given[output.name]
        n = problem.extents["n"]
        row = info.strides[-2] if info is not None else n
        by_rows = output.dims == problem.accum_dims and (info is None or info.strides[-1] == 1)
        if by_rows and row * dtype.itemsize % _ALIGNMENT == 0:
            return index
        size = row * dtype.itemsize
        reasons.append(
            f"'{output.name}' has rows of {size} bytes" if by_rows else f"'{output.name}' is not stored by rows"
        )
    return f"{reasons[0]}, TMA needs rows that are a multiple of {_ALIGNMENT} bytes apart"


def fitted(spec: KernelSpec, graph: Graph, problem: Problem, staged: int) -> Design:
    """The spec's design with as many stages as fit beside the store buffers."""
    design: Design = dict(spec.design)["design"]
    dtype = dict(problem.dtypes)[graph.outputs[staged].name]
    return replace(design, stages=fit_stages(design, dtype.itemsize, problem.target.shared_memory))


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
    return -(-tiles // _MULTIPROCESSORS) * work * _CLUSTER_COST[design.cluster, blocks[0] > 1] + tail


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


def _transports(graph: Graph, problem: Problem, staged: int) -> list[tuple[str, str]]:
    found = [
        (load.attr.name, "direct loads, element by element")
        for load in graph.loads()
        if isinstance(problem.by_name.get(load.attr.name), TensorInfo)
    ]
    return found + [
        (output.name, "staged, TMA store" if i == staged else "direct stores, element by element")
        for i, output in enumerate(graph.outputs)
    ]
