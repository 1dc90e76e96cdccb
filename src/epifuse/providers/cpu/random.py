"""Random numbers of a tile: by a compiled loop, or by PyTorch's integer operations, which are seven times slower."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from epifuse.fusion.primitives import PRIMITIVES
from epifuse.providers.cpu import toolchain
from epifuse.providers.cpu.emit_cpp import LANES, random_loop

_FEWEST = 1 << 14
"""The least count of numbers in a tile for which compiling the loop pays. It takes half a second, once on a machine."""


def random_row(name: str) -> Callable[..., torch.Tensor]:
    """The row (see `primitives`) of the primitive `name`, which draws random numbers."""
    meaning = PRIMITIVES[name].meaning

    def row(seed: torch.Tensor, index: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if seed.numel() != 1 or out.numel() < _FEWEST or (loop := _loop(name)) is None:
            return out.copy_(meaning(seed, index))
        places = index.expand(out.shape).to(torch.int32).contiguous()
        direct = out.dtype == torch.float32 and out.is_contiguous()
        found = out if direct else torch.empty(out.shape, dtype=torch.float32, device="cpu")
        pointers = (ctypes.c_void_p(each.data_ptr()) for each in (places, found))
        loop(*pointers, ctypes.c_long(int(seed)), ctypes.c_long(out.numel()), torch.get_num_threads())
        return out if direct else out.copy_(found)

    return row


def _loop(name: str) -> Callable[..., Any] | None:
    lanes = LANES.get(torch.backends.cpu.get_cpu_capability())
    if lanes is None or toolchain.missing() is not None:
        return None
    try:
        return toolchain.build(random_loop(name, lanes))
    except toolchain.BuildError:  # the toolchain has warned
        return None
