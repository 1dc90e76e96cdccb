"""Whether tensors look like earlier ones: one call of a PyTorch guard, where a description takes 1 us a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from epifuse.request.signature import needs_care

try:  # a private class of PyTorch, in 2.1 to 2.13
    _GUARDS: Any = import_module("torch._C._dynamo.guards").TensorGuards
except (ImportError, AttributeError):
    _GUARDS = None

Guard = Callable[..., bool]
"""Says whether tensors have the types, dtypes, shapes, strides, devices and dispatch keys of those that it was made
for, require grad where those did, and are all different objects."""


def guard_of(tensors: Sequence[torch.Tensor]) -> Guard | None:
    """A guard for these tensors. None if PyTorch has no guards, or if the guard refuses the tensors themselves."""
    if _GUARDS is None:
        return None
    made: Guard = _GUARDS(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return made if are_alike(made, tensors) else None


def are_alike(guard: Guard, values: Sequence[Any]) -> bool:
    """Whether a call with these values has the description of the call for whose tensors `guard` was made. Those began
    at multiples of 16 bytes. A value that is not a tensor is not alike."""
    if needs_care() or not guard(*values):
        return False
    for tensor in values:
        address = tensor.data_ptr()
        if not address or address % 16:  # 0: a tensor without memory
            return False
    return True
