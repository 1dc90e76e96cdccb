"""No tensor of a call lives longer than the call, whether it returns or is refused."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import epifuse as ef

ROWS = "def epi(accum): D = sum(accum, dim=-2); return D"


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Tensors must be freed at once: a GPU's memory may be full before Python looks for cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive(call: Callable[..., Any], *shapes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of tensors that are alive after two calls. An error of epifuse ends a call, too."""
    tensors = [torch.ones(shape) for shape in shapes]
    seen = [weakref.ref(tensor) for tensor in tensors]
    for _ in range(2):
        try:
            call(*tensors)
        except ef.errors.EpifuseError:
            continue
    del tensors
    return [shape for shape, tensor in zip(shapes, seen, strict=True) if tensor() is not None]


def test_a_product_that_one_fold_does_not_fit_keeps_no_tensor() -> None:
    """Folding x to (M, K) fails first; what is cached of that held the frames of all callers."""
    assert alive(lambda x, w: ef.linear(x, w, epilogue=ROWS), (2, 3, 4, 5), (6, 5)) == []
