"""Outputs and operands in one buffer: exactly one full operand may be an output; every other overlap is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import ArgumentError

M, N, K = 4, 6, 3
A, B = torch.arange(12.0).reshape(M, K) - 5, torch.arange(18.0).reshape(K, N) - 7
C = torch.arange(24.0).reshape(M, N)
ACCUM = A @ B


def epi(accum: Any, C: Any) -> Any:
    D = accum + C
    return D


def two(accum: Any, C: Any) -> Any:
    D = accum + C
    E = accum - C
    return D, E


def buffer() -> torch.Tensor:
    return torch.arange(96.0).reshape(8, 12)


@pytest.mark.parametrize(
    "source", ["accum + C", "C * 2 - accum", "accum + C - accum.sum()", "(accum + C) / C.sum(dim=-1, keepdim=True)"]
)
def test_d_may_be_c(source: str) -> None:
    """The whole operand, exactly, also where a second sweep reads it again."""
    held = C.clone() + 1
    want = {"accum": ACCUM, "C": held.clone()}
    right = eval(source, want)
    ef.gemm(A, B, epilogue=f"def epi(accum, C): D = {source}; return D", C=held, out=held)
    torch.testing.assert_close(held, right)


def test_d_may_be_c_of_other_strides() -> None:
    held = C.T.contiguous().T
    ef.gemm(A, B, epilogue=epi, C=held, out=held)
    assert torch.equal(held, ACCUM + C)


def test_columns_of_one_buffer_do_not_overlap() -> None:
    whole = buffer()
    left, right, before = whole[:M, :N], whole[:M, N:], whole.clone()
    ef.gemm(A, B, epilogue=epi, C=right, out=left)
    assert torch.equal(left, ACCUM + before[:M, N:])
    assert torch.equal(whole[:, N:], before[:, N:])
    interleaved = buffer()
    ef.gemm(A, B, epilogue=two, C=C, out={"D": interleaved[:M, ::2], "E": interleaved[:M, 1::2]})
    assert torch.equal(interleaved[:M, ::2], ACCUM + C)
    assert torch.equal(interleaved[:M, 1::2], ACCUM - C)


OVERLAPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "D one row below C": lambda x: ef.gemm(A, B, epilogue=epi, C=x[0:M, :N], out=x[1 : M + 1, :N]),
    "D one column right of C": lambda x: ef.gemm(A, B, epilogue=epi, C=x[:M, 0:N], out=x[:M, 1 : N + 1]),
    "D is C transposed": lambda x: ef.gemm(
        torch.ones(5, 2), torch.ones(2, 5), epilogue=epi, C=x[:5, :5].T, out=x[:5, :5]
    ),
    "D is A": lambda x: ef.gemm(x[:5, :5], torch.ones(5, 5), out=x[:5, :5]),
    "D is B": lambda x: ef.gemm(torch.ones(5, 5), x[:5, :5], out=x[:5, :5]),
    "D touches A": lambda x: ef.gemm(x[:M, :K], B, out=x[:M, 2 : 2 + N]),
    "D holds a row operand": lambda x: ef.gemm(A, B, epilogue=epi, C=x[0, :N], out=x[:M, :N]),
    "D holds a column operand": lambda x: ef.gemm(A, B, epilogue=epi, C=x[:M, :1], out=x[:M, :N]),
    "D holds a scalar operand": lambda x: ef.gemm(A, B, epilogue=epi, C=x[0, :1], out=x[:M, :N]),
    "D and E are one": lambda x: ef.gemm(A, B, epilogue=two, C=C, out={"D": x[:M, :N], "E": x[:M, :N]}),
    "D and E touch": lambda x: ef.gemm(A, B, epilogue=two, C=C, out={"D": x[:M, :N], "E": x[:M, 1 : 1 + N]}),
    "D is two operands": lambda x: ef.gemm(
        A, B, epilogue="def epi(accum, C, Q): D = accum + C * Q; return D", C=x[:M, :N], Q=x[:M, :N], out=x[:M, :N]
    ),
    "a reduction lies in C": lambda x: ef.gemm(
        A, B, epilogue="def epi(accum, C): r = sum(accum + C, dim=0); return r", C=x[:M, :N], out={"r": x[0, :N]}
    ),
    "C is another dtype there": lambda x: ef.gemm(
        A, B, epilogue=epi, C=x.view(torch.int32)[:M, :N], out=x[:M, :N]
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", OVERLAPS.values(), ids=OVERLAPS)
def test_an_overlap_is_refused(call: Callable[[torch.Tensor], Any]) -> None:
    held = buffer()
    with pytest.raises(ArgumentError, match="overlap in memory"):
        call(held)
    assert torch.equal(held, buffer()), "before anything is written"


def test_inputs_may_overlap_each_other() -> None:
    held = buffer()[:5, :5].contiguous()
    got = ef.gemm(held, held, epilogue="def epi(accum, A, T): D = accum + A - T; return D", A=held, T=held.T)
    assert torch.equal(got, held @ held + held - held.T)
