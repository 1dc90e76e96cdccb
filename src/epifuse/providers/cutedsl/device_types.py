"""Device types: of a tensor's elements (`DTYPES`), and of values of each kind in registers (`HELD`)."""

from collections.abc import Mapping
from typing import Any

import cutlass
import torch
from cutlass import Boolean, Float32, Int32, Int64

DTYPES: Mapping[torch.dtype, Any] = {
    torch.float64: cutlass.Float64,
    torch.float32: Float32,
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    torch.float8_e5m2: cutlass.Float8E5M2,
    torch.int64: Int64,
    torch.int32: Int32,
    torch.int16: cutlass.Int16,
    torch.int8: cutlass.Int8,
    torch.uint8: cutlass.Uint8,
    # Bytes: CuTe DSL 4.8.1 stores a vector of Boolean as 255 and 0, and loads it element by element.
    torch.bool: cutlass.Uint8,
    # Its bits: Hopper has no conversion to e8m0.
    torch.float8_e8m0fnu: cutlass.Uint8,
}

HELD: Mapping[str, Any] = {"float": Float32, "int64": Int64, "int32": Int32, "mask": Boolean}
