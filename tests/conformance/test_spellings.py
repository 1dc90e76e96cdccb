"""What people write for PyTorch, fused, beside PyTorch running the same line."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import epifuse as ef
from epifuse.fusion import composites
from epifuse.fusion.vocabulary import public_functions
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
    "torch.atan2(accum, E) + accum.atan2(C)",
    "accum * ((whole & 12 | labels >> 2 ^ ~whole) << 1)",
    "accum * torch.bitwise_and(whole, mask).bitwise_xor(5) + torch.bitwise_or(whole, 8).bitwise_not()",
    "where((accum > 0) ^ mask | ~(whole > 3) & mask, accum, E)",
    "accum * (whole << (labels & 63)) + (labels >> whole)",
]


def operands(device: str) -> dict[str, Any]:
    """Infinities and NaN among those of C."""
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


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_line_means_what_it_means_to_torch(line: str, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    a, b = (torch.randint(-3, 4, shape, device=device).to(dtype) / 2 for shape in ((M, K), (K, N)))
    given = {name: x for name, x in operands(device).items() if name in line}
    text = f"def epilogue({', '.join(['accum', *given])}):\n    D = {line}\n    return D\n"
    function = function_from(text, file="user.py", torch=torch, F=F, where=ef.where)
    got = ef.gemm(a, b, epilogue=function, out_dtypes=torch.float32, **given)
    torch.testing.assert_close(got, function((a.double() @ b.double()).float(), **given), equal_nan=True)


def test_every_composite_is_written() -> None:
    assert [name for name in public_functions(composites) if not any(name in line for line in LINES)] == []
