"""Outputs and operands in one buffer: exactly one full operand may be an output; every other overlap is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import ArgumentError, UnsupportedError

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


# --- parts of a row --------------------------------------------------------------------------------------------------


def ranges(accum: Any, C: Any) -> Any:
    D = accum + C
    first, second = D.split([96, 32], dim=-1)
    Q, K = first.unflatten(-1, (-1, 32)).softmax(-1), second * 2
    return D, Q, K


def ranges_in_place(accum: Any, C: Any, E0: Any) -> Any:
    D = accum + C
    E = D[:, :96] * 2 + E0
    return D, E


def crossed(accum: Any, C: Any, E0: Any) -> Any:
    S = accum + C
    left, right = accum.chunk(2, -1)
    D = S + torch.cat([left + E0, right], dim=-1)
    E = S[:, :64] * 2 + E0
    Q = S[:, :96] * 2
    return D, E, Q


def rolled(accum: Any, C: Any) -> Any:
    D = accum + C.roll(32, -1)
    return D


def combined(accum: Any, C: Any) -> Any:
    heads = torch.sigmoid(accum + C).unflatten(-1, (-1, 64))
    D = (heads.roll(32, -1) + accum.unflatten(-1, (-1, 64))).flatten(-2)
    return D


@pytest.mark.parametrize("function", [ranges, ranges_in_place, rolled, combined])
def test_an_operand_is_read_before_it_is_written(function: Callable[..., Any]) -> None:
    """Ranges of columns take a launch each, and parts of a row meet in others: all read what was there before."""
    a, b, held = torch.randn(8, 16), torch.randn(16, 128), {"C": torch.randn(8, 128)}
    if function is ranges_in_place:
        held["E0"] = torch.randn(8, 96)
    want = function(a @ b, **held)
    places = {"D": held["C"], **({"E": held["E0"]} if "E0" in held else {})}
    got = ef.gemm(a, b, epilogue=function, out=places, **held)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_launches_that_overwrite_what_others_read_are_refused() -> None:
    a, b, c, e = torch.randn(8, 16), torch.randn(16, 128), torch.randn(8, 128), torch.randn(8, 64)
    with pytest.raises(UnsupportedError, match="'D' has the memory of 'C', which other columns read"):
        ef.gemm(a, b, epilogue=crossed, C=c, E0=e, out={"D": c, "E": e})
    assert ef.gemm(a, b, epilogue=crossed, C=c, E0=e)[0].shape == (8, 128)


@pytest.mark.parametrize("function", [rolled, combined])
def test_a_gpu_stores_no_columns_that_it_still_reads(function: Callable[..., Any]) -> None:
    """There a tile is stored piece by piece."""
    a, b = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(256, 64, dtype=torch.bfloat16).t()
    c = torch.empty(64, 256, dtype=torch.bfloat16)
    for out, is_taken in ((c, False), (torch.empty_like(c), True)):
        args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(function, C=c, D=out))
        assert bool(ef.get_kernels(args, cc=90)) == is_taken
        assert ("of which a value takes other columns" in str(ef.explain(args, cc=90))) != is_taken


def segments(accum: Any, S: Any) -> Any:
    heads = accum.unflatten(-1, (-1, 64))
    T = heads.abs().amax(-1, keepdim=True) + S
    D = (heads / T * S).flatten(-2)
    return T, D


def thirds(accum: Any, C: Any) -> Any:
    q, k, v = accum.chunk(3, -1)
    D, E, F = q + C, k - C, v * 2
    return D, E, F


def test_a_gpu_stores_no_segment_that_it_reads_again() -> None:
    a, b = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(256, 64, dtype=torch.bfloat16).t()
    s = torch.empty(64, 4, 1)
    for out, is_taken in ((s, False), (torch.empty_like(s), True)):
        made = ef.EpilogueArguments(segments, S=s, T=out, D=torch.empty(64, 256, dtype=torch.bfloat16))
        args = ef.GemmArguments(a, b, epilogue=made)
        assert bool(ef.get_kernels(args, cc=90)) == is_taken
        assert ("and the memory of 'S', which other outputs read" in str(ef.explain(args, cc=90))) != is_taken


def test_regions_that_share_memory_take_a_launch_each() -> None:
    a, b = torch.empty(512, 64, dtype=torch.bfloat16), torch.empty(768, 64, dtype=torch.bfloat16).t()
    c, e, f = (torch.empty(512, 256, dtype=torch.bfloat16) for _ in range(3))
    for out, launches in ((c, 3), (torch.empty_like(c), 1)):
        args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(thirds, C=c, D=out, E=e, F=f))
        plan = ef.get_kernels(args, cc=90)[0].plan
        assert len(plan.allocation.launches or (plan,)) == launches
        if launches == 3:
            assert plan.allocation.columns.index((0, 256)) > plan.allocation.columns.index((256, 512))


# --- what autograd sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64, 8), (2048, 2048, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_overwriting_what_was_saved_is_an_error(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
    held = torch.randn(m, n, dtype=dtype, requires_grad=True) * 1
    squared = held * held
    with torch.no_grad():
        ef.gemm(a, b, epilogue=epi, C=held, out=held)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


def test_a_bound_launch_counts_too() -> None:
    out = torch.empty(M, N)
    args = ef.GemmArguments(A, B, epilogue=ef.EpilogueArguments(epi, C=C, D=out))
    kernel, before = ef.get_kernels(args)[0], out._version
    kernel.run(args)
    once = out._version
    kernel.bind(args)()
    assert before < once < out._version
    with torch.inference_mode():
        ef.gemm(A, B, epilogue=epi, C=C, out=torch.empty(M, N))
