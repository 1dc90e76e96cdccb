"""Conversions: what an output stores, by the rule of `epifuse.store_rule`, and what a cast inside an epilogue gives.

A store to an integer rounds to nearest even and saturates; NaN becomes 0. A store to fp8 saturates, also infinities,
and keeps NaN. A cast converts as torch does: to an integer towards zero, then wrapping; to fp8, beyond the largest
number, as the installed PyTorch does. To e8m0 stores and casts both convert as torch does.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from epifuse.providers.cutedsl.device_math import each, reinterpreted
from epifuse.providers.cutedsl.device_types import DTYPES, HELD

Fragment = Any  # cute.TensorSSA


def as_kind(value: Fragment, kind: str, wanted: str) -> Fragment:
    """A fragment of `kind` converted to the kind `wanted`. A mask becomes 0 and 1."""
    if kind == wanted or kind == "float" or wanted == "mask":
        return value
    if kind == "mask":
        one = cute.full(value.shape, 1, HELD[wanted])
        return cute.where(value, one, cute.full_like(one, 0))
    return _as_float(value) if wanted == "float" else value.to(HELD[wanted])


def _as_float(value: Fragment) -> Fragment:
    """Integers as float32, by inline PTX, which LLVM does not change.

    LLVM would merge its own conversion with a narrower one that follows. To bfloat16 that rounds once where torch
    rounds twice, and to fp8 it is an operation that LLVM does not know.
    """
    text = f"cvt.rn.f32.s{value.element_type.width} {{$w0}}, {{$r0}};"
    return each(lambda x: cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x]), value)


def stored(value: Fragment, kind: str, dtype: torch.dtype) -> Fragment:
    """What is written when a fragment of this kind is stored as `dtype`, in the device's type for `dtype`."""
    to = DTYPES[dtype]
    if dtype == torch.bool:
        mask = value if kind == "mask" else value != cute.full_like(value, 0)
        return as_kind(mask, "mask", "int32").to(to)
    if dtype == torch.float8_e8m0fnu:
        return _exponent(as_kind(value, kind, "float")).to(to)
    if dtype.is_floating_point:
        # As torch does: an integer is converted to float32 first, and then to a narrower float.
        wide = value if dtype == torch.float64 and kind != "mask" else as_kind(value, kind, "float")
        return wide.to(to)
    if kind == "float":
        value = _nearest(value, Int64 if dtype == torch.int64 else Int32)
    return _saturated(as_kind(value, kind, "int32") if kind == "mask" else value, dtype).to(to)


def _nearest(x: Fragment, to: Any) -> Fragment:
    """Round to the nearest integer of type `to`, saturating. One instruction does both. It converts NaN to 0 only for
    32 bits, so for 64 bits NaN is replaced here."""
    text = f"cvt.rni.s{to.width}.f32 {{$w0}}, {{$r0}};"

    def nearest(value: Any) -> Any:
        found = cute.arch.inline_ptx(text, write_only_types=[to], read_only_args=[value])
        return found if to is Int32 else cutlass.select_(value == value, found, to(0))

    return each(nearest, x, dtype=to)


def _saturated(x: Fragment, dtype: torch.dtype) -> Fragment:
    limits, own = torch.iinfo(dtype), torch.iinfo(torch.int32 if x.element_type is Int32 else torch.int64)
    if limits.max < own.max:
        x = cute.math.min(x, cute.full_like(x, limits.max))
    return cute.math.max(x, cute.full_like(x, limits.min)) if limits.min > own.min else x


def cast(value: Fragment, dtype: torch.dtype) -> Fragment:
    """Convert as torch does: to a float to nearest even, to an integer towards zero and then wrapping."""
    to = DTYPES[dtype]
    if dtype == torch.float8_e8m0fnu:
        return _power_of_two(_exponent(value))
    if dtype.is_floating_point:  # `emit.walk` has made it a float
        return _to_fp8(value, dtype) if dtype in _LARGEST else value.to(to).to(Float32)
    return value.to(Int64) if to is Int64 else value.to(Int32).to(to).to(Int32)


def _exponent(x: Fragment) -> Fragment:
    """The bits of the nearest power of two in e8m0, which are its biased exponent. 255 stands for what is not finite or
    beyond the largest. A tie rounds up. 2^-127, the least power and a subnormal float32, stays as it is."""
    bits = reinterpreted(abs(x), Int32)
    bits = cute.math.min(bits, cute.full_like(bits, 0x7F80_0000))  # NaN is above infinity
    half = cute.where(bits == 0x40_0000, cute.full_like(bits, 0), cute.full_like(bits, 0x40_0000))
    return each(lambda value: value >> 23, bits + half, dtype=Int32)  # fragments have no shifts in 4.8.1


def _power_of_two(exponent: Fragment) -> Fragment:
    """The float32 value of e8m0 bits, which are a biased exponent."""
    shifted = each(lambda value: value << 23, exponent, dtype=Int32)
    bits = cute.where(exponent == 0, cute.full_like(exponent, 0x40_0000), shifted)
    return reinterpreted(cute.where(exponent == 255, cute.full_like(bits, 0x7FC0_0000), bits), Float32)


_LARGEST = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0}
"""The largest number plus half a step. What is larger overflows. For e5m2 this number, a tie, overflows as well."""


def _to_fp8(x: Fragment, dtype: torch.dtype) -> Fragment:
    near = x.to(DTYPES[dtype]).to(Float32)
    # Releases of PyTorch differ: they give NaN, infinity or the largest number. The installed one is asked.
    beyond = torch.tensor([1e30, torch.inf], device="cpu").to(dtype).to(torch.float32).tolist()
    size, limit = abs(x), _LARGEST[dtype]
    overflows = size >= limit if dtype == torch.float8_e5m2 else size > limit
    for at, value in zip((overflows, size == float("inf")), beyond, strict=True):
        far = cute.full_like(x, value)
        near = cute.where(at, cute.where(x < cute.full_like(x, 0.0), -far, far), near)
    return near
