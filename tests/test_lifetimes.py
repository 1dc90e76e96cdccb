"""No tensor of a call lives longer than the call, whether it returns or is refused."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulated import emulated, on_hopper  # noqa: F401 - fixtures

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


def test_a_number_that_is_not_computed_keeps_no_tensor() -> None:
    function = "def epi(accum, n): D = accum * (1 / n) if n else accum; return D"
    assert alive(lambda a, b: ef.gemm(a, b, epilogue=function, n=0), (4, 5), (5, 6)) == []
    function = "def epi(accum, n): D = accum * (1 / n); return D"
    assert alive(lambda a, b: ef.gemm(a, b, epilogue=function, n=0), (4, 5), (5, 6)) == []


REFUSED = {
    "shapes": lambda a, b: ef.gemm(a, b.t()),
    "an option": lambda a, b: ef.gemm(a, b, precision="half"),
    "an operand": lambda a, b: ef.gemm(a, b, epilogue="def epi(accum, C): D = accum + C; return D", C=b),
    "the types": lambda a, b: ef.gemm(a, b, epilogue="def epi(accum): D = accum / sum(accum, dim=-1); return D"),
    "a reshape": lambda a, b: ef.gemm(a, b, epilogue="def epi(accum): D = accum.view(7, -1); return D"),
    "an odd reshape": lambda a, b: ef.gemm(a, b, epilogue="def epi(accum): D = accum.view(7, 7); return D"),
    "leading dims": lambda a, b: ef.linear(a[None, None], b.t(), epilogue="def epi(accum): D = accum.sum(0); return D"),
    "a destination": lambda a, b: ef.gemm(a, b, out=torch.empty(3)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_refused_call_keeps_no_tensor(why: str) -> None:
    with pytest.raises(ef.errors.EpifuseError):
        REFUSED[why](torch.ones(4, 5), torch.ones(5, 6))
    gc.collect()
    assert alive(REFUSED[why], (4, 5), (5, 6)) == []


@pytest.mark.usefixtures("on_hopper")
def test_a_call_without_a_kernel_keeps_no_tensor() -> None:
    """A division by zero, too, where PyTorch runs the call."""
    softmax = "def epi(accum): D = softmax(accum); return D"
    assert alive(lambda a, b: ef.gemm(a, b, epilogue=softmax), (4, 5), (5, 5000)) == []
    divided = "def epi(accum, p): x = softmax(accum); D = where(p // p > 0, x, x); return D"

    def call(a: torch.Tensor, b: torch.Tensor) -> None:
        ef.gemm(a, b, epilogue=divided, p=torch.zeros(5000, dtype=torch.int32), fallback="torch")

    with pytest.warns(UserWarning, match="unfused"):
        assert alive(call, (4, 5), (5, 5000)) == []
