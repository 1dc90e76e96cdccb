"""One structure, and one derivative, serve all numbers of rows, unless an epilogue's meaning follows from them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import epifuse as ef
from epifuse.base.errors import EpifuseError
from epifuse.passes.structure import STRUCTURES
from epifuse.pytorch import derivative
from tests.frontend.sources import function_from

K, N = 7, 32
SERVE = {
    "halves": "g, u = accum.chunk(2, -1); D = F.silu(g) * u",
    "heads": "h = accum.unflatten(-1, (-1, 8)); D = (h * torch.rsqrt(h.square().mean(-1, True) + 1)).flatten(-2)",
    "rotary": "q = accum.unflatten(-1, (-1, 8)); x, y = q.chunk(2, -1); D = q * cos + torch.cat([-y, x], -1) * cos",
    "rotary of a view": (
        "q = accum.view(accum.shape[0], -1, 8); D = (q * cos + torch.cat([-q[..., 4:], q[..., :4]], -1)).flatten(1)"
    ),
    "pairs": "x, y = accum[..., ::2], accum[..., 1::2]; D = torch.stack([x - y, x * y], -1).flatten(-2)",
    "pairs unbound": "x, y = accum.unflatten(-1, (-1, 2)).unbind(-1); D = torch.stack([x - y, x * y], -1).flatten(-2)",
    "pairs of heads": "x, y = accum.view(-1, 4, 4, 2).unbind(-1); D = torch.stack([x - y, x * y], -1).flatten(-3)",
    "four unbound": "x, y, z, w = accum.unflatten(-1, (-1, 4)).unbind(-1); D = torch.stack([x * w, y, z * z, w], -1)",
    "losses": "D = F.cross_entropy(accum, labels, reduction='none')",
    "losses by hand": "D = accum.logsumexp(-1) - accum.gather(-1, labels[:, None]).squeeze(-1)",
    "a mean loss": "D = F.cross_entropy(accum, labels, ignore_index=3)",
    "the last column": "D = accum * accum[..., -1:]",
    "blocks of a gate": "g, u = accum.chunk(2, -1); D = (g * u).unflatten(-1, (-1, 4)).square().mean(-1)",
    "a norm of a gate": "g, u = accum.chunk(2, -1); h = g * u; D = h * torch.rsqrt((h * h).mean(-1, True) + 1)",
    "a number of rows": "g, u = accum.chunk(2, -1); D = g * u / accum.shape[0]",
    "a smoothed loss": "D = F.cross_entropy(accum, labels, label_smoothing=0.1)",
    "a mean": "D = accum.log_softmax(-1).mean()",
    "columns counted": "D = accum.softmax(-1) / torch.ones_like(accum).sum(-1, keepdim=True)",
}
NARROW = {
    "rolled": ("D = accum.roll(1, -1) * accum", 8),
    "one column": ("D = accum[..., -1].square()", 8),
    "columns in another order": ("x, y, z, w = accum.chunk(4, -1); D = torch.cat([w * z, z, y, x], -1)", 4),
    "a product": ("D = accum.prod(-1)", 16),
}
"""Where parts have one column, or few."""


def function_of(line: str) -> Any:
    names = [name for name in ("cos", "labels") if name in line]
    body = "".join(f"    {step}\n" for step in line.split("; "))
    return function_from(f"def f({', '.join(['accum', *names])}):\n{body}    return D\n", torch=torch, F=F)


def operands_of(line: str, rows: int) -> dict[str, torch.Tensor]:
    made = {"cos": torch.randn(rows, 1, 8, dtype=torch.float64), "labels": torch.arange(rows) * 5 % N}
    return {name: x for name, x in made.items() if name in line}


@pytest.mark.filterwarnings("ignore:PyTorch runs the derivative")
@pytest.mark.parametrize("name", [*SERVE, *NARROW])
def test_all_rows_have_what_was_made_for_the_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, columns = NARROW.get(name) or (SERVE[name], N)
    weight = torch.randn(columns, K, dtype=torch.float64, requires_grad=True)
    function, made = function_of(line), []
    for rows in (9, 5, 33, 101, 14):
        x, operands = torch.randn(rows, K, dtype=torch.float64, requires_grad=True), operands_of(line, rows)
        found, want = ef.linear(x, weight, epilogue=function, **operands), function(x @ weight.t(), **operands)
        torch.testing.assert_close(found, want)
        pairs = (torch.autograd.grad(value.square().sum(), (x, weight)) for value in (found, want))
        torch.testing.assert_close(*pairs)
        made.append(len(STRUCTURES))
        monkeypatch.setattr(derivative, "derive", None)  # nothing is traced again
    assert made[1:] == made[:-1]


DECIDE = {
    "blocks of four rows": "accum.unflatten(0, (-1, 4)).amax(1)",
    "pairs of rows": "accum.reshape(-1, 2, 32).sum(1)",
    "two halves of rows": "accum.unflatten(0, (2, -1)).sum(0)",
    "pairs of rows by name": "accum.view(accum.shape[0] // 2, 2, 32).sum(1)",
    "blocks of a prime": "accum.unflatten(0, (-1, 101)).sum(1)",
    "so many rows": "accum.view(8, -1) * 2",
    "so many blocks": "accum.view(103, -1) + 1",
    "rows behind columns": "accum.t().reshape(4, 8, -1).sum(1)",
    "all of them": "accum.flatten()",
    "a choice": "accum if accum.shape[0] > 100 else accum * 2",
}


@pytest.mark.parametrize("name", DECIDE)
@pytest.mark.parametrize("sizes", [(8, 202, 101, 7, 103, 12, 1, 0, 206), (202, 303, 8, 2, 206, 309, 5, 101)], ids=str)
def test_what_rows_decide_is_refused_where_pytorch_refuses_it(name: str, sizes: tuple[int, ...]) -> None:
    """Whichever comes first: also multiples of the primes that a structure is tried with."""
    function = function_from(f"def f(accum):\n    return {DECIDE[name]}\n")
    for rows in sizes:
        a, b = torch.randn(rows, K, dtype=torch.float64), torch.randn(K, N, dtype=torch.float64)
        try:
            want = function(a @ b)
        except (RuntimeError, ZeroDivisionError):
            with pytest.raises(EpifuseError):
                ef.gemm(a, b, epilogue=function)
            continue
        try:
            found = ef.gemm(a, b, epilogue=function)
        except EpifuseError:  # a literal beside rows
            continue
        torch.testing.assert_close(found, want, msg=f"{rows} rows")


def test_what_is_counted_along_columns_is_that_of_each_width() -> None:
    """A structure that is exact in N serves all rows of each N, in whatever order they come."""
    function, made = function_of("D = accum / torch.ones_like(accum).sum(-1, keepdim=True)"), []
    for rows, columns in ((9, 32), (9, 16), (5, 32), (5, 16), (14, 16), (14, 32)):
        a, b = torch.randn(rows, K), torch.randn(K, columns)
        torch.testing.assert_close(ef.gemm(a, b, epilogue=function), a @ b / columns)
        made.append(len(STRUCTURES))
    assert made[2:] == made[1:-1]
