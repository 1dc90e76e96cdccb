"""Gradients of a layer, by each way that its derivative is computed, beside PyTorch's in float64."""

from typing import Any

import pytest
import torch
from gpu.harness import Machine
from torch.nn import functional as F

import epifuse as ef

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, as it imports its compiler

WIDTH = 64


def gelu(accum: Any, bias: Any, residual: Any) -> Any:
    return F.gelu(accum + bias) + residual


def gate(accum: Any, other: Any) -> Any:
    return F.silu(accum) * other


def halves(accum: Any) -> Any:
    x, y = accum.chunk(2, dim=-1)
    return F.silu(x) * y


def rotary(accum: Any, cos: Any, sin: Any) -> Any:
    heads = accum.unflatten(-1, (-1, WIDTH))
    x, y = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat((-y, x), dim=-1) * sin).flatten(-2)


def normed(accum: Any, weight: Any) -> Any:
    heads = accum.unflatten(-1, (-1, WIDTH))
    return (heads * torch.rsqrt((heads * heads).mean(dim=-1, keepdim=True) + 1e-5) * weight).flatten(-2)


def normed_rotary(accum: Any, cos: Any, sin: Any, weight: Any) -> Any:
    return rotary(normed(accum, weight), cos, sin)


def scaled(accum: Any, scale: Any, other: Any) -> Any:
    return accum * scale + other


def losses(accum: Any, bias: Any) -> Any:
    return torch.logsumexp(accum + bias, dim=-1)


def projection(accum: Any, weight: Any) -> Any:
    q, k = accum.split((accum.shape[-1] - WIDTH, WIDTH), dim=-1)
    heads = q.unflatten(-1, (-1, WIDTH)) * weight
    x, y = heads.chunk(2, dim=-1)
    first, second = torch.cat((torch.tanh(-y), x), dim=-1).flatten(-2), k * k
    return first, second


EPILOGUES = (gelu, gate, halves, rotary, normed, normed_rotary, scaled, losses)


def operands(m: int, n: int) -> dict[str, torch.Tensor]:
    angles = torch.rand(m, 1, WIDTH)
    wide, row = torch.randn(m, n), torch.randn(n)
    rows = {"bias": row, "scale": row + 1, "residual": wide, "other": wide}
    return {"cos": angles.cos(), "sin": angles.sin(), "weight": torch.rand(WIDTH) + 0.5, **rows}


@pytest.mark.parametrize("save", ["auto", "recompute", "preactivation"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_gradients(epilogue: Any, dtype: torch.dtype, save: str, machine: Machine) -> None:
    for shape in ((200, 256, 136), (64, 512, 1024)):
        judge_gradients(epilogue, dtype, save, machine, shape)


def test_what_pytorch_differentiates(machine: Machine) -> None:
    how = "compiled by Inductor" if machine.device == "cuda" else "one operation at a time"
    with pytest.warns(UserWarning, match=f"unfused, {how}: a part of a row"):
        judge_gradients(projection, torch.bfloat16, "auto", machine, (200, 192, 136))
    for m in (64, 72):
        judge_gradients(projection, torch.bfloat16, "auto", machine, (m, 192, 136))


def judge_gradients(
    epilogue: Any, dtype: torch.dtype, save: str, machine: Machine, shape: tuple[int, int, int]
) -> None:
    torch.manual_seed(0)
    m, n, k = shape
    names = epilogue.__code__.co_varnames[1 : epilogue.__code__.co_argcount]
    given = {name: value.to(dtype) for name, value in operands(m, n).items() if name in names}
    x, weight = torch.randn(m, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype)
    fixed = [name in ("cos", "sin") for name in ("x", "weight", *given)]
    both = [*zip((x, weight, *given.values()), fixed, strict=True)]
    own = [tensor.to(machine.device).requires_grad_(not is_fixed) for tensor, is_fixed in both]
    exact = [tensor.double().requires_grad_(not is_fixed) for tensor, is_fixed in both]
    y = listed(ef.linear(*own[:2], epilogue=epilogue, operands=dict(zip(given, own[2:], strict=True)), save=save))
    want = listed(epilogue(F.linear(*exact[:2]), *exact[2:]))
    arriving = [torch.randn(each.shape).to(dtype) for each in want]
    found = torch.autograd.grad(y, [x for x in own if x.requires_grad], [g.to(machine.device) for g in arriving])
    expected = torch.autograd.grad(want, [x for x in exact if x.requires_grad], [g.double() for g in arriving])
    for one, other in zip(found, expected, strict=True):
        error = (one.double().cpu() - other).norm() / other.norm()
        assert one.dtype == dtype
        assert error < (1e-2 if dtype == torch.bfloat16 else 1e-4)


def listed(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else [*outputs]
