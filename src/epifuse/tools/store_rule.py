"""The store rule, computed from bit patterns: how a number is stored in another format. Kernels are checked by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch


class Format(NamedTuple):
    """A float format: its bits of precision, the exponent of its smallest number, and the bit patterns that are stored
    for numbers beyond its largest one (`overflow`) and for NaN."""

    precision: int
    smallest: int
    overflow: int
    nan: int
    storage: torch.dtype


FORMATS: Mapping[torch.dtype, Format] = {
    torch.float64: Format(53, -1074, 0x7FF0 << 48, 0x7FF8 << 48, torch.int64),
    torch.float32: Format(24, -149, 0x7F80_0000, 0x7FC0_0000, torch.int32),
    torch.float16: Format(11, -24, 0x7C00, 0x7E00, torch.int16),
    torch.bfloat16: Format(8, -133, 0x7F80, 0x7FC0, torch.int16),
    # fp8 saturates: a number beyond the largest one is stored as the largest one.
    torch.float8_e4m3fn: Format(4, -9, 0x7E, 0x7F, torch.uint8),
    torch.float8_e5m2: Format(3, -16, 0x7B, 0x7F, torch.uint8),
}
_UNSIGNED: Mapping[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_HUGE = 1 << 12  # larger than every exponent


class _Exact(NamedTuple):
    """Numbers as (-1)^negative * mantissa * 2^exponent, except those that are marked as `infinite` or `nan`."""

    negative: Any
    mantissa: Any
    exponent: Any
    infinite: Any
    nan: Any


def store_reference(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `x` as it is stored in `dtype`: rounded to nearest even. Integers saturate and store NaN as 0; fp8
    saturates and keeps NaN. e8m0 is rounded as torch does."""
    if x.dtype == dtype:
        return x.clone()
    if dtype == torch.bool:
        return x != 0
    if x.dtype == torch.float64 and dtype in FORMATS and dtype != torch.float32:
        x = store_reference(x, torch.float32)  # as torch does: a float64 reaches a narrow float by way of float32
    if dtype == torch.float8_e8m0fnu:
        return _to_exponent(store_reference(x, torch.float32))
    exact = _decompose(x)
    bits = _to_float(exact, FORMATS[dtype]) if dtype in FORMATS else _to_integer(exact, dtype)
    unsigned = bits.astype(_UNSIGNED[dtype.itemsize])
    storage = FORMATS[dtype].storage if dtype in FORMATS else dtype
    signed = unsigned.view(np.dtype(str(storage).removeprefix("torch.")))
    return torch.from_numpy(signed).view(dtype).reshape(x.shape)


def _to_exponent(x: torch.Tensor) -> torch.Tensor:
    """The biased exponent of the power of two from 2^-127 to 2^127 that is nearest to a number, or the larger one of
    two. A number between 2^-127 and 2^-126 gets that of 2^-126. One that rounds to 2^128, or is not finite, has 255."""
    size = x.abs().to(torch.float64)
    mantissa, exponent = torch.frexp(size)  # mantissa from 0.5 on
    biased = exponent - 1 + 127 + (mantissa >= 0.75)
    biased = torch.where(size < 2.0**-126, (size > 2.0**-127).to(torch.int32), biased.clamp(max=255))
    return torch.where(x.isfinite(), biased, 255).to(torch.uint8).view(torch.float8_e8m0fnu)


def _decompose(x: torch.Tensor) -> _Exact:
    if not x.dtype.is_floating_point:
        values = x.to(torch.int64).numpy().reshape(-1)
        zeros = np.zeros(values.shape, np.int64)
        magnitude = np.where(values < 0, ~values.view(np.uint64) + np.uint64(1), values.view(np.uint64))
        return _Exact(values < 0, magnitude, zeros, zeros > 0, zeros > 0)
    form = FORMATS[x.dtype]
    raw = x.contiguous().view(form.storage).numpy().reshape(-1)
    bits = raw.view(_UNSIGNED[x.dtype.itemsize]).astype(np.uint64)
    sign = np.uint64(8 * x.dtype.itemsize - 1)
    magnitude = bits & ((np.uint64(1) << sign) - np.uint64(1))
    fraction = np.uint64(form.precision - 1)
    biased = (magnitude >> fraction).astype(np.int64)
    hidden = np.where(biased > 0, np.uint64(1) << fraction, np.uint64(0))
    mantissa = (magnitude & ((np.uint64(1) << fraction) - np.uint64(1))) | hidden
    exponent = np.maximum(biased, 1) - 1 + form.smallest
    has_infinity = x.dtype != torch.float8_e4m3fn
    top = np.uint64(0x7C if x.dtype == torch.float8_e5m2 else form.overflow)
    infinite = (magnitude == top) & has_infinity
    nan = magnitude > top if has_infinity else magnitude == np.uint64(0x7F)
    return _Exact((bits >> sign) > 0, mantissa, exponent, infinite, nan)


def _round_shift(mantissa: Any, shift: Any) -> Any:
    """mantissa / 2^shift, rounded to nearest even. A negative shift is exact."""
    right = np.clip(shift, 0, 63).astype(np.uint64)
    kept = mantissa >> right
    rest = mantissa & ((np.uint64(1) << right) - np.uint64(1))
    half = np.where(right > 0, np.uint64(1) << (np.maximum(right, np.uint64(1)) - np.uint64(1)), np.uint64(0))
    up = (rest > half) | ((rest == half) & (right > 0) & ((kept & np.uint64(1)) > 0))
    rounded = np.where(shift > 63, np.uint64(0), kept + up.astype(np.uint64))
    return rounded << np.clip(-shift, 0, 63).astype(np.uint64)


def _bit_length(mantissa: Any) -> Any:
    length = np.frexp(mantissa.astype(np.float64))[1].astype(np.int64)
    # Converting to float64 may round up to the next power of two.
    top = np.maximum(length - 1, 0).astype(np.uint64)
    return np.where((length > 0) & ((mantissa >> top) == 0), length - 1, length)


def _to_float(x: _Exact, form: Format) -> Any:
    shift = np.maximum(_bit_length(x.mantissa) - form.precision, form.smallest - x.exponent)
    rounded = _round_shift(x.mantissa, shift)
    # A normal number's leading bit, and a carry out of the mantissa, add one to the exponent field by themselves.
    field = np.where(rounded == 0, 0, np.clip(x.exponent + shift - form.smallest, 0, _HUGE)).astype(np.uint64)
    bits = (field << np.uint64(form.precision - 1)) + rounded
    bits = np.where((bits > form.overflow) | x.infinite, np.uint64(form.overflow), bits)
    bits = np.where(x.nan, np.uint64(form.nan), bits)
    sign = np.uint64(8 * form.storage.itemsize - 1)
    return bits | (x.negative.astype(np.uint64) << sign)


def _to_integer(x: _Exact, dtype: torch.dtype) -> Any:
    limits = torch.iinfo(dtype)
    fits = x.exponent + _bit_length(x.mantissa) <= 64
    magnitude = np.where(fits, _round_shift(x.mantissa, np.where(fits, -x.exponent, 0)), np.uint64((1 << 64) - 1))
    magnitude = np.where(x.infinite, np.uint64((1 << 64) - 1), magnitude)
    largest = np.where(x.negative, np.uint64(-limits.min), np.uint64(limits.max))
    magnitude = np.where(x.nan, np.uint64(0), np.minimum(magnitude, largest))
    return np.where(x.negative, ~magnitude + np.uint64(1), magnitude)
