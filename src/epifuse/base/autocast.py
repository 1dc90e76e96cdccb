"""Autocast, followed as `torch.nn.functional.linear` follows it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

Value = TypeVar("Value")

_CAST = (torch.float32, torch.float16, torch.bfloat16)
"""float64 and integers stay, as in PyTorch, and so does fp8, which PyTorch cannot multiply so."""


def followed(first: Value, *others: Value) -> tuple[Value, ...]:
    """Tensors in the dtype of autocast for the first one's device, where it is on there."""
    tensors = (first, *others)
    if not isinstance(first, torch.Tensor):
        return tensors
    device = first.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(value.to(dtype) if _is_cast(value, device) else value for value in tensors)  # type: ignore[attr-defined]  # tensors are cast alone


def _is_cast(value: Any, device: str) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _CAST and value.device.type == device
