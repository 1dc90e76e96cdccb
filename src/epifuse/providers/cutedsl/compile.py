"""From a program to a compiled function: fake tensors in, `cute.compile`."""

import threading
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.utils import HardwareInfo

from epifuse.plan import Plan
from epifuse.problem import TensorInfo
from epifuse.providers.cutedsl.device_types import DTYPES, HELD
from epifuse.providers.cutedsl.kernels.sm90_gemm import Sm90Gemm
from epifuse.providers.cutedsl.partials import reductions_of
from epifuse.providers.cutedsl.program import Access, Design, Program

OPTIONS = "--enable-tvm-ffi --gpu-arch=sm_90a"

# Two compilations at once abort the process (CuTe DSL 4.8.1).
_one_at_a_time = threading.Lock()


_compiled: dict[tuple[object, ...], Any] = {}


def compile_program(plan: Plan, program: Program, design: Design, extra_options: str = "") -> Any:
    """The compiled function of a plan; needs no GPU. Extents, strides, numbers and raster are run-time arguments.

    Plans that differ in nothing else share a function.
    """
    a, b = plan.problem.a, plan.problem.b
    majors = a.strides[-1] == 1, b.strides[-1] == 1
    key = (
        program.structure(),
        replace(design, raster=0),
        a.dtype,
        b.dtype,
        plan.problem.accumulator,
        majors,
        plan.problem.batched,
        extra_options,
    )
    with _one_at_a_time:
        if key not in _compiled:
            _compiled[key] = _compile(plan, program, design, OPTIONS + extra_options)
        return _compiled[key]


@cache
def resident_clusters(device: int, size: int) -> int:
    """How many clusters of `size` CTAs run at once, where there is nothing else; asked of the driver once.

    A cluster lies within one group of multiprocessors: an H200 has 33 times four of them, and runs 32 such clusters. A
    cluster more would wait for all others to end.
    """
    if size <= 2:  # multiprocessors come in pairs
        return torch.cuda.get_device_properties(device).multi_processor_count // size
    with _one_at_a_time, torch.cuda.device(device):
        return int(HardwareInfo(device).get_max_active_clusters(size))


def _compile(plan: Plan, program: Program, design: Design, options: str) -> Any:
    problem = plan.problem
    extents = {name: cute.sym_int(symbol=name.upper()) for name in "mnkl"}
    batches = (extents["l"],) if problem.batched else ()
    a = _matrix(problem.a, (extents["m"], extents["k"], *batches))
    b = _matrix(problem.b, (extents["k"], extents["n"], *batches))
    shape = (extents["m"], extents["n"], extents["l"])
    modes = len(a.shape)
    tensors = tuple(_tensor(access, shape, modes) for _, access in program.tensors)
    kinds = [program.graph.types[node].kind for node in program.numbers]
    numbers = tuple(Float32(0.0) if kind in ("float", "mask") else HELD[kind](0) for kind in kinds)
    outputs = tuple(_tensor(access, shape, modes) for access in program.stores)
    # Partial results of reductions, where there are some.
    workspaces = (
        (make_fake_tensor(Float32, (cute.sym_int64(),), (1,), assumed_align=16),)
        if reductions_of(program.graph)
        else ()
    )
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with warnings.catch_warnings():
        # An empty tuple carries nothing to the kernel; CuTe DSL 4.8.1 warns that it cannot be converted.
        warnings.filterwarnings("ignore", message="Argument .* cannot be converted to a JitArgument")
        kernel = Sm90Gemm(design, program, DTYPES[problem.accumulator])
        return cute.compile(
            kernel, a, b, tensors, numbers, outputs, workspaces, Int32(1), Int32(1), stream, options=options
        )


def _matrix(info: TensorInfo, shape: tuple[Any, ...]) -> Any:
    """A or B; the mode that is contiguous is part of the type, all else is run time."""
    dtype = DTYPES[info.dtype]
    contiguous = 1 if info.strides[-1] == 1 else 0
    return make_fake_tensor(dtype, shape, _one_contiguous(contiguous, len(shape), dtype), assumed_align=16)


def _one_contiguous(contiguous: int, modes: int, dtype: Any) -> tuple[Any, ...]:
    """Strides of which all but one are multiples of 16 bytes, as TMA needs."""
    return tuple(1 if i == contiguous else cute.sym_int64(divisibility=128 // dtype.width) for i in range(modes))


def _tensor(access: Access, shape: tuple[Any, ...], tile_modes: int) -> Any:
    """An operand or output as (M,N,L): with TMA's promises where it is a tile, else with strides of any kind.

    An axis that a reshape cut comes in pieces, the fastest first; `whole` puts them together again.
    """
    dtype = DTYPES[access.dtype]
    if access.way != "tile":
        extents = [e for own, extent in zip(access.inner, shape, strict=True) for e in (*own, _outer(own, extent))]
        strides = tuple(cute.sym_int64() for _ in extents)
        return make_fake_tensor(dtype, tuple(extents), strides, assumed_align=access.bytes_at_once)
    contiguous = 1 if access.by_rows else 0
    tile = shape if "l" in access.axes else (*shape[:2], 1)
    return make_fake_tensor(dtype, tile[:tile_modes], _one_contiguous(contiguous, tile_modes, dtype), assumed_align=16)


def _outer(inner: tuple[int, ...], extent: Any) -> Any:
    return cute.sym_int() if inner else extent
