"""ef.linear: weight as nn.Linear has it, any leading dims, bias before the epilogue."""

from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import ArgumentError, ArgumentTypeError

M, N, K = 4, 6, 3
A, B = torch.arange(12.0).reshape(M, K) - 5, torch.arange(18.0).reshape(K, N) - 7


def epi(accum: Any, C: Any) -> Any:
    D = accum + C
    return D


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_linear(lead: tuple[int, ...]) -> None:
    x, weight, bias = torch.randint(-3, 4, (*lead, K)).float(), B.T, torch.arange(6.0)
    plain = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(ef.linear(x, weight, bias), plain)
    assert torch.equal(ef.linear(x, weight, bias, epilogue=ef.relu), plain.relu())
    residual = torch.randint(-3, 4, (*lead, N)).float()
    assert torch.equal(ef.linear(x, weight, epilogue=epi, C=residual), plain - bias + residual)
    named = "def epi(accum, bias): D = relu(accum) + bias; return D"
    assert torch.equal(ef.linear(x, weight, bias, epilogue=named), (plain - bias).relu() + bias)
    out = torch.zeros_like(plain)
    ef.linear(x, weight, bias, out=out)
    assert torch.equal(out, plain)


def test_an_output_of_linear_that_cannot_be_seen_as_rows() -> None:
    """Flattening it would copy, and the copy would be written: three dims are a batch, more are refused."""
    x, out = torch.ones(2, 3, K), torch.zeros(3, 2, N).transpose(0, 1)
    ef.linear(x, B.T, out=out)
    assert torch.equal(out, torch.nn.functional.linear(x, B.T))
    with pytest.raises(ArgumentError, match="leading dims of output 'D' cannot be merged into one"):
        ef.linear(torch.ones(4, 3, 2, K), B.T, out=torch.zeros(2, 3, 4, N).transpose(0, 2))
    sliced = torch.zeros(2, 3, 2 * N)[..., ::2]
    ef.linear(x, B.T, out=sliced)
    assert torch.equal(sliced, torch.nn.functional.linear(x, B.T))


def test_x_and_weight_by_name() -> None:
    assert torch.equal(ef.linear(x=A, weight=B.T), A @ B)


@pytest.mark.parametrize(("x", "weight"), [(torch.tensor(1.0), B), (A, B[0]), (A, B[None])])
def test_linear_of_wrong_shapes(x: torch.Tensor, weight: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match=r"x must be \(\.\.\., K\) and weight \(N, K\)"):
        ef.linear(x, weight)


def test_linear_of_what_is_no_tensor() -> None:
    with pytest.raises(ArgumentTypeError, match=r"x must be a torch\.Tensor"):
        ef.linear([1.0], B)  # type: ignore[arg-type]


def test_hints_of_transport_in_linear() -> None:
    x, weight = torch.ones(2, 3, 4), torch.ones(5, 4)
    D = torch.ones(2, 3, 5)
    operands = {"residual": ef.Load(torch.full((2, 3, 5), 2.0))}
    out = {"D": ef.Store(D, accumulate=True)}
    result = ef.linear(x, weight, operands=operands, out=out, epilogue=lambda accum, residual: accum + residual)  # type: ignore[arg-type]
    assert result is D
    assert torch.equal(D, torch.full((2, 3, 5), 7.0))


def test_what_linear_returned_is_a_destination() -> None:
    """One number a row of x has x's leading dims; it can be written and added onto."""
    x, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    source = "def f(accum): s = accum.sum(dim=-1); return s"
    s = ef.linear(x, weight, epilogue=source)
    again = torch.zeros_like(s)
    assert ef.linear(x, weight, epilogue=source, out=again) is again
    assert torch.equal(again, s)
    ef.linear(x, weight, epilogue=source, out=again, accumulate="s")
    torch.testing.assert_close(again, 2 * s)
