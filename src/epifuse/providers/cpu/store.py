"""The store rule, by which stored values are converted. Float to integer rounds to nearest even and saturates; NaN
becomes 0. fp8 saturates, infinities too. The conversion to e8m0 is PyTorch's own."""

from __future__ import annotations

import torch

_FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def store(value: torch.Tensor, destination: torch.Tensor) -> None:
    """Write `value` to `destination`, which may be strided and is written once."""
    destination.copy_(storable(value, destination.dtype))


def storable(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value`, changed such that PyTorch's own conversion to `dtype` gives the result of the store rule."""
    if dtype in _FP8_MAX:  # also for a value of the same dtype, which may have infinities
        limit = _FP8_MAX[dtype]
        return value.to(torch.float32).clamp(-limit, limit)
    if value.dtype == dtype or dtype == torch.bool:
        return value
    if dtype == torch.float8_e8m0fnu:
        return value.to(torch.float32)
    if dtype.is_floating_point or value.dtype == torch.bool:
        return value
    return _to_integer(value, dtype)


def _to_integer(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    if not value.dtype.is_floating_point:
        return value.clamp(max(limits.min, torch.iinfo(value.dtype).min), min(limits.max, torch.iinfo(value.dtype).max))
    # float64 holds every 32-bit limit. The upper limit of int64 rounds up to 2**63, which the branch below corrects.
    rounded = torch.round(value.to(torch.float64)).nan_to_num_(0.0, float("inf"), float("-inf"))
    clamped = rounded.clamp(float(limits.min), float(limits.max))
    if dtype == torch.int64:
        return torch.where(rounded >= 2.0**63, limits.max, clamped.clamp(max=2.0**63 - 1024).to(dtype))
    return clamped.to(dtype)
