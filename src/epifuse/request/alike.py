"""Whether tensors look as others did: one question to PyTorch, where a description takes a microsecond a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from epifuse.request.signature import needs_care

try:  # private to PyTorch, 2.1 to 2.13
    _GUARDS: Any = import_module("torch._C._dynamo.guards").TensorGuards
except (ImportError, AttributeError):
    _GUARDS = None

Guard = Callable[..., bool]
"""Whether tensors have the types, dtypes, shapes, strides, devices and kinds of those it was made for, and require grad
where those did. No two of them are the same."""


def guard_of(tensors: Sequence[torch.Tensor]) -> Guard | None:
    """None where no tensors are alike: these are not even themselves, or PyTorch has no guards."""
    if _GUARDS is None:
        return None
    made: Guard = _GUARDS(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return made if are_alike(made, tensors) else None


def are_alike(guard: Guard, values: Sequence[Any]) -> bool:
    """Whether a call with these values is described as that whose tensors `guard` was made for, which began at
    multiples of 16 bytes; what is no tensor is not alike."""
    if needs_care() or not guard(*values):
        return False
    for tensor in values:
        address = tensor.data_ptr()
        if not address or address % 16:  # none: without memory
            return False
    return True
