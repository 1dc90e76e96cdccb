"""One row for each dtype: its short name, and how it loads into an epilogue. An output may have any of these dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["mask", "int32", "int64", "int", "float"]
"""`int` is a Python integer on the host: exact beside integers, a float beside floats. No value is stored as `int`."""


@dataclass(frozen=True)
class DType:
    """One storage dtype: its name in printed graphs, and the kind that a value of it has inside an epilogue."""

    torch: torch.dtype
    short: str
    loads_as: Kind


_ROWS = (
    DType(torch.float64, "f64", "float"),
    DType(torch.float32, "f32", "float"),
    DType(torch.float16, "f16", "float"),
    DType(torch.bfloat16, "bf16", "float"),
    DType(torch.float8_e4m3fn, "e4m3", "float"),
    DType(torch.float8_e5m2, "e5m2", "float"),
    DType(torch.float8_e8m0fnu, "e8m0", "float"),
    DType(torch.int8, "s8", "int32"),
    DType(torch.uint8, "u8", "int32"),
    DType(torch.int16, "s16", "int32"),
    DType(torch.int32, "s32", "int32"),
    DType(torch.int64, "s64", "int64"),
    DType(torch.bool, "bool", "mask"),
)

BY_TORCH: dict[torch.dtype, DType] = {row.torch: row for row in _ROWS}


def short(dtype: torch.dtype) -> str:
    """The short name of `dtype`, or torch's own name if there is no row for it."""
    row = BY_TORCH.get(dtype)
    return row.short if row else str(dtype).removeprefix("torch.")


def is_storable(dtype: object) -> bool:
    """Whether an output may have this dtype."""
    return isinstance(dtype, torch.dtype) and dtype in BY_TORCH


def is_narrow_float(dtype: torch.dtype) -> bool:
    """Whether a dtype is a float of at most 16 bits with a fraction: an error of 2^-16 changes a result at most to a
    neighbouring number. e8m0 has no fraction, and its next number is twice as large."""
    return dtype.is_floating_point and dtype.itemsize <= 2 and dtype != torch.float8_e8m0fnu


def dtype_of(kind: str, floating: torch.dtype) -> torch.dtype:
    """The dtype of values of `kind` if floats are computed in `floating`."""
    return {"mask": torch.bool, "int32": torch.int32, "int64": torch.int64}.get(kind, floating)


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
"""Which accumulators each input dtype may have (reference/001 and DESIGN section 4). The dtypes of both inputs must
allow the accumulator, after the conversion of `multiplied_as`."""


def multiplied_as(a: torch.dtype, b: torch.dtype) -> torch.dtype | None:
    """The dtype in which B is multiplied: its own, or A's if B has 8 bits and A 16; None for a pair that is not
    supported. A weight of 8 bits is exact in 16 bits, so its product is that of the converted matrix."""
    narrow = b.itemsize == 1
    if a == b or (narrow and a.itemsize == 1 and a.is_floating_point == b.is_floating_point):
        return b
    return a if narrow and a.itemsize == 2 else None


def accumulators(a: torch.dtype, b: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes in which products of A and B of these dtypes may be added up."""
    allowed = ACCUMULATORS[multiplied_as(a, b) or b]
    return tuple(dtype for dtype in ACCUMULATORS[a] if dtype in allowed)


def largest_product(a: torch.dtype, b: torch.dtype) -> int | None:
    """The largest |x * y| of two integer dtypes; None for floats."""
    return None if a.is_floating_point else largest(a) * largest(b)


def largest(dtype: torch.dtype) -> int:
    """The largest |x| of an integer dtype."""
    limits = torch.iinfo(dtype)
    return max(-limits.min, limits.max)
