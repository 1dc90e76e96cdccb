"""From a program to a compiled function: fake tensors in, `cute.compile`."""

import threading
import warnings
from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from epifuse.ir import Node
from epifuse.plan import Plan
from epifuse.problem import TensorInfo
from epifuse.providers.cutedsl.kernels.sm90_gemm import Sm90Gemm
from epifuse.providers.cutedsl.program import Design, Program

DTYPES: Mapping[torch.dtype, Any] = {
    torch.float32: cutlass.Float32,
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
    torch.int16: cutlass.Int16,
    torch.int8: cutlass.Int8,
    torch.uint8: cutlass.Uint8,
    torch.bool: cutlass.Boolean,
}
OPTIONS = "--enable-tvm-ffi --gpu-arch=sm_90a"

# Two compilations at once abort the process (CuTe DSL 4.8.1).
_one_at_a_time = threading.Lock()


def compile_program(plan: Plan, program: Program, design: Design, extra_options: str = "") -> Any:
    """The compiled function of a plan; needs no GPU. Extents, strides and numbers are run-time arguments."""
    problem = plan.problem
    extents = {name: cute.sym_int(symbol=name.upper()) for name in "mnkl"}
    a = _matrix(problem.a, extents["m"], extents["k"], extents["l"], rows_first=True)
    b = _matrix(problem.b, extents["n"], extents["k"], extents["l"], rows_first=False)
    shape = (extents["m"], extents["n"], extents["l"])
    dtypes = dict(problem.dtypes)
    tensors = tuple(_anywhere(DTYPES[_dtype(plan, node)], shape) for node in program.tensors)
    scalars = tuple(Int32(0) if program.graph.types[n].kind == "int32" else Float32(0.0) for n in program.scalars)
    outputs = tuple(
        _by_rows(DTYPES[dtypes[output.name]], shape)
        if i == program.staged
        else _anywhere(DTYPES[dtypes[output.name]], shape)
        for i, output in enumerate(program.graph.outputs)
    )
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with _one_at_a_time, warnings.catch_warnings():
        # An empty tuple carries nothing to the kernel; CuTe DSL 4.8.1 warns that it cannot be converted.
        warnings.filterwarnings("ignore", message="Argument .* cannot be converted to a JitArgument")
        kernel = Sm90Gemm(design, program)
        return cute.compile(kernel, a, b, tensors, scalars, outputs, Int32(1), stream, options=OPTIONS + extra_options)


def _dtype(plan: Plan, node: Node) -> torch.dtype:
    operand = plan.problem.by_name[node.attr.name]
    assert isinstance(operand, TensorInfo)
    return operand.dtype


def _matrix(info: TensorInfo, rows: Any, columns: Any, batches: Any, *, rows_first: bool) -> Any:
    """A as (M,K,L) or B as (N,K,L); the mode that is contiguous is part of the type, all else is run time."""
    dtype = DTYPES[info.dtype]

    def stride() -> Any:
        return cute.sym_int64(divisibility=128 // dtype.width)

    k_major = (info.strides[-1] == 1) == rows_first
    return make_fake_tensor(
        dtype,
        (rows, columns, batches),
        (stride(), 1, stride()) if k_major else (1, stride(), stride()),
        assumed_align=16,
    )


def _by_rows(dtype: Any, shape: tuple[Any, ...]) -> Any:
    def stride() -> Any:
        return cute.sym_int64(divisibility=128 // dtype.width)

    return make_fake_tensor(dtype, shape, (stride(), 1, stride()), assumed_align=16)


def _anywhere(dtype: Any, shape: tuple[Any, ...]) -> Any:
    return make_fake_tensor(
        dtype, shape, tuple(cute.sym_int64() for _ in range(3)), assumed_align=max(dtype.width // 8, 1)
    )
