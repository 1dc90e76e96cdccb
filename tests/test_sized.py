"""Graphs whose sizes are symbols: fused once for every size, and left alone where an epilogue serves one size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import epifuse as ef
from epifuse.pytorch.fuse import Fuse

DECOMPOSED = torch._decomp.core_aten_decompositions()


def traced(function: Callable[..., Any], *inputs: Tensor) -> tuple[GraphModule, Fuse]:
    """The graph of a function with symbols for sizes, fused."""
    module = make_fx(function, tracing_mode="symbolic", decomposition_table=DECOMPOSED)(*inputs)
    fuse = Fuse(sites="all")
    fuse(module.graph)
    module.recompile()
    return module, fuse


def inputs(batch: int, rows: int, columns: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(batch * rows)
    x = torch.randn(batch, rows, 16, generator=drawn)
    return x, torch.randn(16, columns, generator=drawn), torch.randn(batch, rows, columns, generator=drawn)


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])


def activation(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return F.gelu(product(x, w)) + r


def rows_of(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return F.softmax(product(x, w) + r, dim=-1)


def two_outputs(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = product(x, w)
    return torch.relu(y), y * r


def mean_of_everything(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return (product(x, w) * r).mean()


def mean_of_columns(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.relu(product(x, w)).mean(dim=(0, 1))


def divided_by_a_size(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.relu(product(x, w)) / x.shape[1]


def constant_of_a_size(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return product(x, w) + torch.full((x.shape[0], 1, 1), x.shape[1])


def counted(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return product(x, w) + torch.arange(x.shape[1])[:, None]


def part(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.relu(product(x, w))[:, : x.shape[1] // 2]


def transposed(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.relu(product(x, w) + r).transpose(1, 2)


def per_batch(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.relu(product(x, w) * r.sum(dim=(1, 2), keepdim=True))


def batched(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.softmax(torch.bmm(x, x.mT) * 0.5, dim=-1)


FUNCTIONS = [
    *(activation, rows_of, two_outputs, mean_of_everything, mean_of_columns, divided_by_a_size, constant_of_a_size),
    *(counted, part, transposed, per_batch, batched),
]
SIZES = ((2, 6), (3, 6), (2, 9), (7, 5), (4, 24), (24, 16), (6, 2))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_was_traced_at_one_size_is_right_at_others(function: Callable[..., Any]) -> None:
    module, _ = traced(function, *inputs(2, 6))
    for size in SIZES:
        given = inputs(*size)
        torch.testing.assert_close(module(*given), function(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(4, 6), (3, 8), (4, 16)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_extents_that_are_equal_by_chance_are_not_taken_for_one(
    function: Callable[..., Any], size: tuple[int, int]
) -> None:
    """Rows that are as many as columns, and a K that is as long as either."""
    module, _ = traced(function, *inputs(*size))
    for other in SIZES:
        given = inputs(*other)
        torch.testing.assert_close(module(*given), function(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [activation, rows_of, two_outputs, transposed])
def test_what_serves_every_size_is_fused(function: Callable[..., Any]) -> None:
    _, fuse = traced(function, *inputs(2, 6))
    assert fuse.report.fused, str(fuse.report)


def test_the_graph_has_its_symbols_again() -> None:
    module, fuse = traced(activation, *inputs(2, 6))
    assert fuse.report.fused
    (output,) = next(node for node in module.graph.nodes if node.op == "output").args
    assert all(isinstance(extent, torch.SymInt) for extent in output.meta["val"].shape[:2])


def test_what_only_the_data_says_is_left_alone() -> None:
    def chosen(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return torch.relu(x[mask.nonzero().squeeze(1)] @ w)

    given = torch.randn(6, 16), torch.randn(16, 24), torch.tensor([1, 0, 1, 1, 0, 1])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        module = make_fx(chosen, tracing_mode="symbolic")(*given)
    fuse = Fuse(sites="all")
    fuse(module.graph)
    assert [row.reason for row in fuse.report.rows] == ["its sizes are symbols"]


class Block(nn.Module):
    """A residual block over (batch, sequence, hidden)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 48), nn.Linear(48, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x + self.down(F.gelu(self.up(x))))
        return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_one_compilation_trains_at_every_size() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Block()
    compiled = ef.compile(model, dynamic=True, sites="all")

    def gradients(call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        model.zero_grad()
        call(x).square().mean().backward()  # type: ignore[no-untyped-call]  # untyped
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in ((4, 7, 32), (6, 9, 32), (3, 5, 32), (2, 32, 32)):
            x = torch.randn(size)
            for ours, theirs in zip(gradients(compiled, x), gradients(model, x), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(ef.report(compiled).fused) >= 3
