"""Shape, strides and start of a tensor after layout operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from epifuse.request.problem import TensorInfo


class Seen(NamedTuple):
    """A tensor after layout operations. `start` is the number of elements from the start of the original tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    def is_aligned(self, own: TensorInfo | None, size: int) -> bool:
        """Whether it starts at a multiple of 16 bytes; an element has `size` bytes. `own` is the original tensor, or
        None for memory that the library allocates, which always starts at such a multiple."""
        return (own is None or own.aligned) and self.start * size % 16 == 0


def after(own: Seen, views: Sequence[tuple[str, Any]]) -> Seen | None:
    """`own` after the layout operations `views`, or None if one of them has to move data."""
    if not views:
        return own
    shape, strides, start = own
    for op, argument in views:
        if op == "permute":
            shape, strides = tuple(shape[i] for i in argument), tuple(strides[i] for i in argument)
        elif op == "unsqueeze":
            at = argument % (len(shape) + 1)
            stride = shape[at] * strides[at] if at < len(shape) else 1
            shape, strides = (*shape[:at], 1, *shape[at:]), (*strides[:at], stride, *strides[at:])
        elif op == "part":
            at, first, stop, step, drops = argument
            left = () if drops else (len(range(first, stop, step)),)
            start += first * strides[at]
            strides = (*strides[:at], *(step * strides[at] for _ in left), *strides[at + 1 :])
            shape = (*shape[:at], *left, *shape[at + 1 :])
        else:
            try:  # PyTorch's own rule, on a tensor without data: it is too rarely needed to be written again here
                viewed = torch.empty_strided(shape, strides, device="meta").view(argument)
            except RuntimeError:
                return None
            shape, strides = tuple(viewed.shape), viewed.stride()
    return Seen(shape, strides, start)
