"""Memory for results."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch

_LARGE = 32 << 20  # bytes from which the C library always maps a block anew, with pages fresh from the kernel
_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux

try:  # private to PyTorch: what Inductor's code calls, without the dispatcher
    _DIRECT: Any = import_module("torch._C._dynamo.guards")
except ImportError:
    _DIRECT = None


def empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor without values. A large one on the CPU asks for huge pages.

    `torch.empty` would take 0.5 us more: its arguments are matched with two signatures, the first for named dims.
    """
    made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if made.is_cpu and made.nbytes >= _LARGE and type(made) is torch.Tensor:
        _advise(made)
    return made


def allocator(device: torch.device) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """Return a function that makes a tensor of a shape, strides and a dtype on this device, which must be the current
    one.

    It takes half a microsecond, where `torch.empty_strided` takes one. PyTorch's modes do not see it.
    """
    found = getattr(_DIRECT, f"_empty_strided_{device.type}", None)
    return found or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device))


def _as_strided(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], start: int = 0) -> torch.Tensor:
    return tensor.as_strided(shape, strides, tensor.storage_offset() + start)


seen_as: Callable[..., torch.Tensor] = getattr(_DIRECT, "_reinterpret_tensor", _as_strided)
"""Return a tensor's memory under a shape and strides, from `start` elements behind the tensor's start. Only kernels may
have the result, because autograd does not know of it. It takes half the time of `as_strided`."""


def _advise(tensor: torch.Tensor) -> None:
    """Ask for huge pages. The kernel clears each page at its first touch. For 64 MiB this takes 10 ms in pages of 4 KiB
    and 3 ms in pages of 2 MiB, on a core where the product of 4096 x 256 x 4096 takes 25 ms. Failure does no harm.
    """
    if _HUGE_PAGES is None:
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise()(start, stop - start, _HUGE_PAGES)


@cache
def _madvise() -> Callable[..., Any]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
