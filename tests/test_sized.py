"""Graphs whose sizes are symbols: fused once for every size, and left alone where an epilogue serves one size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compile_models import interpreted
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental import _config
from torch.fx.experimental.proxy_tensor import make_fx

import epifuse as ef
from epifuse.pytorch.fuse import Fuse

DECOMPOSED = torch._decomp.core_aten_decompositions()


def traced(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The graph of a function with a symbol of its own for each size of its inputs."""
    with _config.patch(use_duck_shape=False):
        return make_fx(function, tracing_mode="symbolic", decomposition_table=DECOMPOSED)(*inputs)


def fused(module: GraphModule) -> Fuse:
    fuse = Fuse(sites="all")
    fuse(module.graph)
    module.recompile()
    return fuse


def inputs(batch: int, rows: int, columns: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(batch * rows)
    x = torch.randn(batch, rows, 16, generator=drawn)
    return x, torch.randn(16, columns, generator=drawn), torch.randn(batch, rows, columns, generator=drawn)


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])


def serving(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    """Epilogues in the axes of their products."""
    y, q = product(x, w), x.reshape(*x.shape[:2], 4, 4).transpose(1, 2)  # as many heads as the batches of FIRST
    scores = torch.softmax(torch.matmul(q, q.mT) * 0.5 + r[:, None, :, :1], dim=-1)
    return F.gelu(y), F.softmax(y + r, dim=-1), torch.relu(product(x, w) + r).transpose(1, 2), scores


def computing(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    """Epilogues that a size is more to than how large their values are, or that only repeat along a part of an axis."""
    (batch, rows, _), flat = x.shape, x.reshape(-1, 16)
    return (
        torch.relu(product(x, w)).mean(dim=(0, 1)),
        torch.relu(product(x, w))[:, : 2 * (rows // 2)],
        torch.relu(product(x, w)) / rows * (batch / rows),
        product(x, w) + torch.full((batch, 1, 1), rows),
        product(x, w) + torch.arange(rows)[:, None],
        product(x, w) + r[:1],
        torch.relu(flat.mT @ flat) + w[:, :1],  # whose K alone is a symbol
    )


FIRST = ((4, 6), (4, 4))
"""Sizes to trace at: as many rows as columns, as many batches as heads, and all three equal."""


@pytest.mark.parametrize("function", [serving, computing])
def test_what_was_traced_at_one_size_is_right_at_others(function: Callable[..., Any]) -> None:
    for first in FIRST:
        module = traced(function, *inputs(*first))
        fused(module)
        for size in ((3, 7), (2, 24)):
            given = inputs(*size)
            torch.testing.assert_close(module(*given), function(*given), rtol=1e-5, atol=1e-5)


def test_a_size_that_is_one_by_chance_is_not_taken_for_one() -> None:
    def shorter(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        rows = x.shape[1] // 4 + 1
        return torch.relu(product(x[:, :rows], w)) + r[:, :rows]

    module = traced(shorter, *inputs(24, 3))
    fused(module)
    for size in ((24, 3), (6, 2)):  # no other than 1: PyTorch has guards for it
        torch.testing.assert_close(module(*inputs(*size)), shorter(*inputs(*size)), rtol=1e-5, atol=1e-5)


def test_what_serves_every_size_is_fused_and_adds_no_guard() -> None:
    module = traced(serving, *inputs(2, 6))
    (before,) = (node.args for node in module.graph.nodes if node.op == "output")
    shapes = torch.fx.map_arg(before, lambda node: node.meta["val"].shape)
    env = next(iter(module.graph.nodes)).meta["val"].fake_mode.shape_env
    guards = len(env.guards)
    report = fused(module).report
    assert len(report.fused) == len(report.rows), str(report)
    (after,) = (node.args for node in module.graph.nodes if node.op == "output")
    assert str(torch.fx.map_arg(after, lambda node: node.meta["val"].shape)) == str(shapes)
    assert len(env.guards) == guards


def test_no_value_is_stored_for_its_size() -> None:
    """Graphs of torch.export ask intermediate values for sizes."""
    module = traced(lambda x, w, r: F.gelu(product(x, w)), *inputs(2, 6))
    product_node = next(node for node in module.graph.nodes if node.target is torch.ops.aten.mm.default)
    sizes = [node for node in module.graph.nodes if node.target is torch.ops.aten.sym_size.int]
    sizes[-1].args = (product_node, 1)
    fused(module)
    assert any(node.target is torch.ops.epifuse.fused1.default for node in module.graph.nodes)
    torch.testing.assert_close(module(*inputs(3, 7)), F.gelu(product(*inputs(3, 7)[:2])))


def test_what_only_the_data_says_is_left_alone() -> None:
    def chosen(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return torch.relu(x[mask.nonzero().squeeze(1)] @ w)

    given = torch.randn(6, 16), torch.randn(16, 24), torch.tensor([1, 0, 1, 1, 0, 1])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        module = make_fx(chosen, tracing_mode="symbolic")(*given)
    assert [row.reason for row in fused(module).report.rows] == ["its sizes are symbols"]


def test_one_compilation_trains_at_every_size() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    up, down, fuse = nn.Linear(16, 24), nn.Linear(24, 16), Fuse(sites="all")

    def step(x: Tensor) -> Tensor:
        return (x + down(F.gelu(up(x)))).square().mean()

    def gradients(call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(x), (up.weight, up.bias, down.weight))

    compiled = torch.compile(step, backend=interpreted(fuse), dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in ((4, 7, 16), (6, 9, 16), (2, 16, 16)):
            x = torch.randn(size)
            torch.testing.assert_close(gradients(compiled, x), gradients(step, x), rtol=1e-4, atol=1e-5)
    assert {row.graph for row in fuse.report.fused} == {"forward", "backward"}


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_generated_code_serves_every_size() -> None:
    """An operand that is handed over with three sizes that are symbols."""
    torch._dynamo.reset()

    @ef.compile(dynamic=True, sites="all")
    def scores(q: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(q @ q.mT * 0.5 + mask, dim=-1)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, rows in ((2, 6), (3, 7), (5, 5)):
            q, mask = torch.randn(batch, 4, rows, 8), torch.randn(batch, 4, rows, rows)
            expected = torch.softmax(q @ q.mT * 0.5 + mask, dim=-1)
            torch.testing.assert_close(scores(q, mask), expected, rtol=1e-5, atol=1e-5)
    assert ef.report(scores).fused
