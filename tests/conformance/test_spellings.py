"""Lines as people write them for PyTorch, run fused and compared with PyTorch running the same line."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import epifuse as ef
from epifuse.fusion import composites
from epifuse.fusion.vocabulary import public_functions
from epifuse.passes.structure import STRUCTURES
from tests.frontend.sources import function_from

M, N, K = 9, 16, 8

LINES = [
    "accum.masked_fill(mask, 2.0)",
    "torch.masked_fill(accum, mask, float('-inf')).amax(dim=-1)",
    "where(torch.isnan(C), 0.0, accum)",
    "where(C.isinf() | ~mask, 1.0, accum)",
    "where(torch.isfinite(C), C, accum)",
    "accum.clamp_min(0.5) + torch.clamp_max(C, 1.0)",
    "torch.lerp(accum, E, 0.3)",
    "accum.lerp(E, row)",
    "torch.addcmul(accum, E, row, value=0.5)",
    "torch.addcdiv(accum, E, row + 9.0)",
    "torch.logaddexp(accum, C)",
    "F.selu(accum) + F.softsign(E) + F.tanhshrink(accum)",
    "where(mask, accum, torch.finfo(torch.float32).min)",
    "accum * torch.finfo(torch.bfloat16).eps + (labels < torch.iinfo(torch.int16).max) * accum",
    "where(mask, accum, float('nan'))",
    "F.glu(accum, dim=-1)",
    "torch.nan_to_num(C) + accum.nan_to_num(1.0, posinf=3.0)",
    "accum + C.to(torch.bfloat16).nan_to_num(neginf=-2.0).clamp(-9.0)",
    "where(mask, accum, torch.finfo(accum.dtype).min) + torch.finfo(E.dtype).eps",
    "where(mask, accum, torch.zeros_like(accum)) * torch.ones_like(E, dtype=torch.int32)",
    "torch.full_like(accum, 2.5) + torch.full_like(whole, 2.5).sum(-1, keepdim=True)",
    "accum * torch.zeros_like(mask).logical_not() + torch.ones_like(row)",
    "(accum - accum.mean(-1, keepdim=True)) / (accum.var(dim=-1, unbiased=False, keepdim=True) + 1e-5).sqrt()",
    "F.layer_norm(accum, (16,)) + F.layer_norm(accum + C, accum.shape[-1:], weight=row, eps=1e-3)",
    "F.layer_norm(accum.unflatten(-1, (4, 4)), [4], row[:4], row[4:8]).flatten(-2) * torch.rms_norm(accum, (16,), row)",
    "F.rms_norm(accum.unflatten(-1, (-1, 8)), normalized_shape=(8,), eps=0.1).flatten(-2) + F.rms_norm(accum, (16,))",
    "torch.var(accum, 1) + accum.std(-1, correction=2) + torch.std(E + accum, dim=1, unbiased=True)",
    "accum.argmax(-1) + torch.argmin(accum + C, dim=1) * accum.argmax(dim=1)",
    "(accum * 0).argmin(-1, keepdim=True) + torch.argmax(C + accum, 1, keepdim=True)",
    "accum.gather(1, labels % 16) + torch.gather(E * accum, 1, (labels + 1) % 16)",
    "torch.logsumexp(accum, -1) - accum.gather(-1, labels % 16).squeeze(-1)",
    "accum.log_softmax(-1).gather(-1, labels % 16) - F.softmax(accum + C, 1).gather(1, labels % 16).log()",
    "where(accum == accum.amax(-1, keepdim=True), E, accum.softmax(-1)).gather(1, labels % 16) + row[0]",
    "F.cross_entropy(accum, (labels % 16).squeeze(-1), label_smoothing=0.1) + F.cross_entropy(E, (labels % 16)[:, 0])",
    "F.cross_entropy(accum * E, (labels % 16)[:, 0], ignore_index=3, reduction='none')",
    "F.cross_entropy(accum, (labels % 16)[:, 0], None, None, 3, None, 'sum', 0.1)",
    "F.nll_loss(F.log_softmax(accum, dim=-1), (labels % 16)[:, 0], ignore_index=5)",
    "F.cross_entropy(accum + C, (labels % 16)[:, 0], reduction='sum', label_smoothing=0.5)",
    "accum / accum.shape[-1] + E * accum.size(0) - row.shape[0] + labels.numel()",
    "where(index_n(accum) == accum.size()[1] - 1, accum, E / math.sqrt(accum.shape[1]))",
    "accum.to(accum.dtype) + (whole >> 1).to(E.dtype) + accum.type(whole.dtype) + accum.to(C.bfloat16().dtype)",
    "accum.split(split_size=8, dim=-1)[0]",
    "torch.atan2(accum, E) + accum.atan2(C)",
    "accum * ((whole & 12 | labels >> 2 ^ ~whole) << 1)",
    "accum * torch.bitwise_and(whole, mask).bitwise_xor(5) + torch.bitwise_or(whole, 8).bitwise_not()",
    "where((accum > 0) ^ mask | ~(whole > 3) & mask, accum, E)",
    "accum * (whole << (labels & 63)) + (labels >> whole)",
    "block_scale(abs(accum)) + block_scale(C.abs(), 57344.0, rounding='up') * block_scale(C.abs(), rounding='floor')",
]
SEVERAL_LAUNCHES = [
    "accum * E.var() + accum.var(0, keepdim=True) - torch.std(accum)",
    "torch.argmax(whole, dim=-1) + accum.argmin()",
    "whole.gather(1, labels % 16) * accum.gather(0, torch.zeros_like(row, dtype=torch.int64)[None])",
]
"""Lines that need the product to be computed again. Hopper's kernel refuses them unless that is allowed."""


def operands(device: str) -> dict[str, Any]:
    """Random operands. C contains infinities and NaN."""
    torch.manual_seed(1)
    C = torch.randn(M, N)
    C.view(-1)[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e30])
    found = {
        "C": C,
        "E": torch.randn(M, N),
        "row": torch.rand(N),
        "mask": torch.rand(M, N) > 0.5,
        "whole": torch.randint(-99, 99, (M, N), dtype=torch.int32),
        "labels": torch.randint(0, 99999, (M, 1)),
    }
    return {name: x.to(device) for name, x in found.items()}


@pytest.mark.parametrize("line", [*LINES, *SEVERAL_LAUNCHES])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_line_means_what_it_means_to_torch(line: str, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    a, b = (torch.randint(-3, 4, shape, device=device).to(dtype) / 2 for shape in ((M, K), (K, N)))
    given = {name: x for name, x in operands(device).items() if name in line}
    text = f"def epilogue({', '.join(['accum', *given])}):\n    D = {line}\n    return D\n"
    known = {name: getattr(ef, name) for name in ("where", "index_n", "block_scale")}
    function = function_from(text, file="user.py", torch=torch, F=F, math=math, **known)
    if device == "cuda" and line in SEVERAL_LAUNCHES:
        with pytest.raises(ef.errors.UnsupportedError, match="known after the last tile"):
            ef.gemm(a, b, epilogue=function, out_dtypes=torch.float32, **given)
        return
    got = ef.gemm(a, b, epilogue=function, out_dtypes=torch.float32, **given)
    want = function((a.double() @ b.double()).float(), **given)
    torch.testing.assert_close(got, want.to(got.dtype), equal_nan=True)


def test_every_composite_is_written() -> None:
    assert [name for name in public_functions(composites) if not any(name in line for line in LINES)] == []


def test_extents_follow_the_shapes_of_a_call() -> None:
    """One structure serves all numbers of rows and columns, because M and N are numbers that the host passes in."""

    def scaled(accum: Any) -> Any:
        rows, columns = accum.shape
        return accum * rows - accum.var(-1, keepdim=True) / columns + accum.size(-1)

    def clipped(accum: Any) -> Any:
        return torch.where(accum > 0, accum, torch.zeros_like(accum)) + accum.shape[0]

    counts = []
    for m, n in ((9, 16), (5, 16), (33, 24), (64, 40)):
        a, b = torch.randn(m, K), torch.randn(K, n)
        for function in (scaled, clipped):
            torch.testing.assert_close(ef.gemm(a, b, epilogue=function), function(a @ b))
        counts.append(len(STRUCTURES))
    assert counts[1:] == counts[:-1]


def test_the_dtype_of_a_value_is_no_cast_of_an_output() -> None:
    a, b = torch.randn(M, K, dtype=torch.bfloat16), torch.randn(K, N, dtype=torch.bfloat16)
    got = ef.gemm(a, b, epilogue=lambda accum: accum.square().to(accum.dtype))
    assert torch.equal(got, ef.gemm(a, b, epilogue=lambda accum: accum.square()))
    assert got.dtype == a.dtype


def test_the_first_of_equal_values_and_nan_are_found() -> None:
    x = torch.tensor(
        [[1.0, 3, 3, 2], [torch.nan, 5, torch.nan, 9], [0, 0, 0, 0], [-torch.inf] * 4, [2, torch.nan, 9, 9]]
    )
    a, b = torch.zeros(5, 4), torch.zeros(4, 4)

    def places(accum: Any, x: Any) -> Any:
        best, least, down, all_ = (
            (accum + x).argmax(-1),
            (accum - x).argmin(1),
            (accum + x).argmax(0),
            (x + accum).argmax(),
        )
        return best, least, down, all_

    for got, want in zip(ef.gemm(a, b, epilogue=places, x=x), places(a @ b, x), strict=True):
        assert torch.equal(got, want)


def test_a_label_that_is_no_column_gives_zero() -> None:
    a, b = torch.randn(6, K), torch.randn(K, 16)
    labels = torch.tensor([3, -100, 15, 16, 0, 2**40])
    got = ef.gemm(a, b, epilogue=lambda accum, labels: accum.gather(1, labels[:, None]).squeeze(1), labels=labels)
    inside = (labels >= 0) & (labels < 16)
    torch.testing.assert_close(got, torch.where(inside, (a @ b).gather(1, (labels * inside)[:, None])[:, 0], 0.0))
