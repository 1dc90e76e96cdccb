"""Conversions: what an output writes, by the rule of `epifuse.store_rule`, and what a cast inside an epilogue makes.

A store to an integer rounds to nearest even and saturates, NaN is 0; one to fp8 saturates, infinities too, and keeps
NaN. A cast is torch's own: towards zero, then wrapping; fp8 as the installed PyTorch does beyond the largest number. To
e8m0 both are torch's conversion.
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
    """A fragment of one kind as another: a mask becomes 0 and 1."""
    if kind == wanted or kind == "float" or wanted == "mask":
        return value
    if kind == "mask":
        one = cute.full(value.shape, 1, HELD[wanted])
        return cute.where(value, one, cute.full_like(one, 0))
    return _as_float(value) if wanted == "float" else value.to(HELD[wanted])


def _as_float(value: Fragment) -> Fragment:
    """Integers as float32, by an instruction that LLVM does not see.

    Of its own and a narrower conversion behind it it makes one: to bfloat16 with one rounding where torch has two, and
    to fp8 with an operation that it does not know.
    """
    text = f"cvt.rn.f32.s{value.element_type.width} {{$w0}}, {{$r0}};"
    return each(lambda x: cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x]), value)


def stored(value: Fragment, kind: str, dtype: torch.dtype) -> Fragment:
    """What storing a fragment of this kind as `dtype` writes, in the device's type of it."""
    to = DTYPES[dtype]
    if dtype == torch.bool:
        mask = value if kind == "mask" else value != cute.full_like(value, 0)
        return as_kind(mask, "mask", "int32").to(to)
    if dtype == torch.float8_e8m0fnu:
        return _exponent(as_kind(value, kind, "float")).to(to)
    if dtype.is_floating_point:
        # As torch does: an integer reaches a narrow float by way of float32.
        wide = value if dtype == torch.float64 and kind != "mask" else as_kind(value, kind, "float")
        return wide.to(to)
    if kind == "float":
        value = _nearest(value, Int64 if dtype == torch.int64 else Int32)
    return _saturated(as_kind(value, kind, "int32") if kind == "mask" else value, dtype).to(to)


def _nearest(x: Fragment, to: Any) -> Fragment:
    """To the nearest integer, saturating: the instruction does both, and makes a 32-bit 0 of NaN, but no 64-bit one."""
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
    """torch's conversion: floats to nearest even, integers towards zero, then wrapping."""
    to = DTYPES[dtype]
    if dtype == torch.float8_e8m0fnu:
        return _power_of_two(_exponent(value))
    if dtype.is_floating_point:  # the walk made a float of it
        return _to_fp8(value, dtype) if dtype in _LARGEST else value.to(to).to(Float32)
    return value.to(Int64) if to is Int64 else value.to(Int32).to(to).to(Int32)


def _exponent(x: Fragment) -> Fragment:
    """The bits of the nearest power of two in e8m0, which are its biased exponent: 255 of what is not finite, or beyond
    the largest. A tie goes up, but for the least, which is not normal as a float32."""
    bits = reinterpreted(abs(x), Int32)
    bits = cute.math.min(bits, cute.full_like(bits, 0x7F80_0000))  # NaN is above infinity
    half = cute.where(bits == 0x40_0000, cute.full_like(bits, 0), cute.full_like(bits, 0x40_0000))
    return each(lambda value: value >> 23, bits + half, dtype=Int32)  # fragments have no shifts in 4.8.1


def _power_of_two(exponent: Fragment) -> Fragment:
    """What e8m0 has these bits of."""
    shifted = each(lambda value: value << 23, exponent, dtype=Int32)
    bits = cute.where(exponent == 0, cute.full_like(exponent, 0x40_0000), shifted)
    return reinterpreted(cute.where(exponent == 255, cute.full_like(bits, 0x7FC0_0000), bits), Float32)


_LARGEST = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0}
"""Half a step beyond the largest number: what is larger overflows; e5m2 rounds this itself, a tie, to what does."""


def _to_fp8(x: Fragment, dtype: torch.dtype) -> Fragment:
    near = x.to(DTYPES[dtype]).to(Float32)
    # PyTorch's releases differ: NaN, infinity or the largest number. The one that is installed says what it does.
    beyond = torch.tensor([1e30, torch.inf], device="cpu").to(dtype).to(torch.float32).tolist()
    size, limit = abs(x), _LARGEST[dtype]
    overflows = size >= limit if dtype == torch.float8_e5m2 else size > limit
    for at, value in zip((overflows, size == float("inf")), beyond, strict=True):
        far = cute.full_like(x, value)
        near = cute.where(at, cute.where(x < cute.full_like(x, 0.0), -far, far), near)
    return near
