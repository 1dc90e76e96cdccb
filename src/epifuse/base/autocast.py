"""Autocast: inputs are converted as `torch.nn.functional.linear` converts them."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

Value = TypeVar("Value")

_CAST = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that are converted. float64 and integers stay, as in PyTorch. fp8 stays too, because PyTorch has no such
product to follow."""


def followed(first: Value, *others: Value) -> tuple[Value, ...]:
    """Return the values, with tensors in autocast's dtype if autocast is on for the first one's device."""
    tensors = (first, *others)
    if not isinstance(first, torch.Tensor):
        return tensors
    device = first.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        value.to(dtype) if _is_cast(value, device) else value  # type: ignore[attr-defined]  # only tensors are cast
        for value in tensors
    )


def _is_cast(value: Any, device: str) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _CAST and value.device.type == device
