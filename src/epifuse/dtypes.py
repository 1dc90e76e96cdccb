"""One row a dtype: what it is called, how it loads into an epilogue, how it is stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DType:
    """One storage dtype.

    `loads_as` is the kind a value of this dtype has inside an epilogue (see `ir.types.Kind`), or None where an
    operand may not have it. `short` is the name in printed graphs.
    """

    torch: torch.dtype
    short: str
    bits: int
    loads_as: str | None
    storable: bool = True
    gemm_input: bool = False

    @property
    def is_floating(self) -> bool:
        """True for every floating-point dtype, fp8 included."""
        return self.torch.is_floating_point


_ROWS = (
    DType(torch.float64, "f64", 64, "float", gemm_input=True),
    DType(torch.float32, "f32", 32, "float", gemm_input=True),
    DType(torch.float16, "f16", 16, "float", gemm_input=True),
    DType(torch.bfloat16, "bf16", 16, "float", gemm_input=True),
    DType(torch.float8_e4m3fn, "e4m3", 8, "float", gemm_input=True),
    DType(torch.float8_e5m2, "e5m2", 8, "float", gemm_input=True),
    DType(torch.int8, "s8", 8, "int32", gemm_input=True),
    DType(torch.uint8, "u8", 8, "int32", gemm_input=True),
    DType(torch.int16, "s16", 16, "int32"),
    DType(torch.int32, "s32", 32, "int32"),
    DType(torch.int64, "s64", 64, "int64"),
    DType(torch.bool, "bool", 8, "mask"),
)

BY_TORCH: dict[torch.dtype, DType] = {row.torch: row for row in _ROWS}


def short(dtype: torch.dtype) -> str:
    """The short name of `dtype`, torch's own where we have no row."""
    row = BY_TORCH.get(dtype)
    return row.short if row else str(dtype).removeprefix("torch.")


def is_storable(dtype: object) -> bool:
    """Whether an output may have this dtype."""
    row = BY_TORCH.get(dtype) if isinstance(dtype, torch.dtype) else None
    return row is not None and row.storable


def default_accumulator(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, int32 for 8-bit integers, float32 for everything else."""
    if torch.float64 in (a, b):
        return torch.float64
    if not a.is_floating_point and not b.is_floating_point:
        return torch.int32
    return torch.float32


ACCUMULATORS: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float64: (torch.float64,),
    torch.float32: (torch.float32,),
    torch.float16: (torch.float32, torch.float16),
    torch.bfloat16: (torch.float32,),
    torch.float8_e4m3fn: (torch.float32, torch.float16),
    torch.float8_e5m2: (torch.float32, torch.float16),
    torch.int8: (torch.int32,),
    torch.uint8: (torch.int32,),
}
"""Which accumulators each input dtype may have (reference/001 and DESIGN section 4). Both inputs must allow it."""
