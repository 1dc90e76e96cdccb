"""Autocast: A, B and linear's bias are cast as `torch.nn.functional.linear` casts them, and nothing else is."""

from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import EpifuseError

M, N, K = 5, 6, 7
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(M, K).to(dtype), torch.randn(N, K).to(dtype), torch.randn(N).to(dtype)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("to", [BF16, F16])
def test_inputs_are_cast_as_linear_casts_them(dtype: torch.dtype, to: torch.dtype) -> None:
    x, weight, bias = inputs(dtype)
    plain = ef.linear(x.to(to), weight.to(to), bias.to(to))
    with torch.autocast("cpu", dtype=to):
        assert ef.linear(x, weight, bias).dtype == torch.nn.functional.linear(x, weight, bias).dtype == to
        assert torch.equal(ef.linear(x, weight, bias), plain)
        assert torch.equal(ef.gemm(x, weight.t()), ef.gemm(x.to(to), weight.t().to(to)))
        assert torch.equal(ef.linear(x, weight, bias, out=torch.empty(M, N)).to(to), plain)
        assert ef.linear(x, weight, out_dtypes=F32).dtype == F32
        assert ef.gemm(x, weight.t(), out_dtypes=F32).dtype == F32
        with torch.autocast("cpu", enabled=False):
            assert ef.linear(x, weight, bias).dtype == dtype


def test_dtypes_that_autocast_leaves_alone() -> None:
    x, weight, bias = inputs(F64)
    a, b = torch.randint(-128, 128, (M, 300), dtype=torch.int8), torch.randint(-128, 128, (300, N), dtype=torch.int8)
    with torch.autocast("cpu"):
        assert ef.linear(x, weight, bias).dtype == torch.nn.functional.linear(x, weight, bias).dtype == F64
        torch.testing.assert_close(ef.gemm(x, weight.t()), (x.unsqueeze(-2) * weight).sum(-1))
        assert torch.equal(ef.gemm(a, b, out_dtypes=torch.int32), a.int() @ b.int())
        with pytest.raises(EpifuseError, match="two dtypes must agree"):
            ef.gemm(x, weight.t().float())


def test_the_epilogue_is_float32_and_its_operands_are_not_cast() -> None:
    x, weight, bias = inputs(F32)
    tiny = torch.full((N,), 1 + 2.0**-20)
    source = "lambda accum, bias, tiny: (tiny - 1) * 2.0**20 + 0 * (accum + bias)"
    with torch.autocast("cpu"):
        assert torch.equal(ef.linear(x, weight, bias, epilogue=source, tiny=tiny, out_dtypes=F32), torch.ones(M, N))
        got = ef.linear(x, weight, bias, epilogue="lambda accum, bias: bias + 0 * accum", out_dtypes=F32)
        assert torch.equal(got, bias.expand(M, N))


@pytest.mark.filterwarnings("ignore:no kernel can run this")
def test_what_autocast_is_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that were described before, and PyTorch itself where no kernel can."""
    x, weight, _ = inputs(F32)
    a, b = torch.randint(-128, 128, (M, 300), dtype=torch.int8), torch.randint(-128, 128, (300, N), dtype=torch.int8)
    out = torch.empty(M, N)
    args = ef.GemmArguments(x, weight.t(), out)
    with torch.autocast("cpu"):
        ef.get_kernels(args)[0].run(args)
        monkeypatch.setattr("epifuse.providers.NAMES", ())
        got = ef.gemm(a, b, epilogue="lambda accum: accum + 1", out_dtypes=torch.int32, fallback="torch")
    torch.testing.assert_close(out, x @ weight.t())
    assert torch.equal(got, a.int() @ b.int() + 1)


def test_errors_under_autocast_are_the_same() -> None:
    wrong: Any = [[1.0]]
    with torch.autocast("cpu"):
        with pytest.raises(EpifuseError, match=r"A must be a torch\.Tensor"):
            ef.gemm(wrong, torch.ones(1, 1))
        with pytest.raises(EpifuseError, match=r"B must be a torch\.Tensor"):
            ef.gemm(torch.ones(1, 1), wrong)
