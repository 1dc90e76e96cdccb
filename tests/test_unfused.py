"""`fallback="torch"`: what PyTorch computes unfused is what the kernels store, and its errors are ours."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import ArgumentError

BYTES = torch.full((2, 140_000), -128, dtype=torch.int8)
ROW = torch.tensor([1e9, float("inf"), 61441.0, float("nan")])


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch alone is left."""
    monkeypatch.setattr("epifuse.providers.NAMES", ())
    with pytest.warns(UserWarning, match="PyTorch runs it unfused"):
        yield


def cast_to(dtype: torch.dtype) -> Any:
    def epilogue(accum: Any, row: Any) -> Any:
        return (row + accum * 0).to(dtype)

    return epilogue


def test_sums_of_integers_wrap(no_kernels: None) -> None:
    total = 140_000 * 128 * 128
    assert ef.gemm(BYTES, BYTES.t(), fallback="torch")[0, 0] == total - 2**32


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_stored_cast_saturates(dtype: torch.dtype, no_kernels: None) -> None:
    got = ef.gemm(torch.ones(1, 2), torch.ones(2, 4), epilogue=cast_to(dtype), row=ROW, fallback="torch").float()
    assert got[0, :3].tolist() == [torch.finfo(dtype).max] * 3
    assert got[0, 3].isnan()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_as_the_kernel_stores_it(dtype: torch.dtype) -> None:
    got = ef.gemm(torch.ones(1, 2), torch.ones(2, 4), epilogue=cast_to(dtype), row=ROW).float()
    assert got[0, :3].tolist() == [torch.finfo(dtype).max] * 3


def test_an_integer_divided_by_zero_is_named(no_kernels: None) -> None:
    ones, zeros = torch.ones(4, 16, dtype=torch.int8), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="an integer was divided by zero"):
        ef.gemm(ones, ones.t(), epilogue="lambda accum, z: accum // z", z=zeros, fallback="torch")


@pytest.mark.parametrize("call", [lambda x: ef.gelu(x, approximate="Tanh"), lambda x: ef.block_scale(x, rounding="Up")])
def test_another_word_is_refused_on_tensors_too(call: Any) -> None:
    with pytest.raises(ValueError, match="must be 'none' or"):
        call(torch.ones(2))


def test_an_operand_itself_is_kept_from_what_overwrites_it(no_kernels: None) -> None:
    a, b, c = torch.randn(8, 4), torch.randn(4, 8), torch.randn(8, 8)
    before = c.clone()
    two = "def epi(accum, C): D = accum + C; E = C * 1; return D, E"
    found = ef.gemm(a, b, epilogue=two, C=c, out={"D": c}, fallback="torch")
    assert torch.equal(found[1], before)
