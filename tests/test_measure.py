"""ef.compile(measure=True): both ways are run, the faster one is taken, and the answer is kept on disk."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch._inductor.inductor_prims  # registers prims.fma
import torch.nn.functional as F
from emulated import emulated as emulated  # a fixture
from emulated import on_hopper as on_hopper  # a fixture
from gpu.harness import Machine
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import epifuse as ef
from epifuse.pytorch import measure, sites
from epifuse.pytorch.cone import below, grow
from epifuse.pytorch.fuse import Fuse
from epifuse.pytorch.region import Copied, region_of, text_of
from epifuse.runtime.timing import random_like

pytestmark = [pytest.mark.usefixtures("compiled_anew"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def traced(function: Any, *args: Tensor) -> GraphModule:
    return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args)


def product_of(module: GraphModule) -> Node:
    return next(node for node in module.graph.nodes if node.target is torch.ops.aten.mm.default)


def residual(a: Tensor, b: Tensor, x: Tensor) -> Any:
    y = a @ b + x
    return F.layer_norm(y, y.shape[-1:]), y


def twice(a: Tensor, b: Tensor, x: Tensor) -> Any:
    """Two equal sites."""
    return (torch.relu(a @ b) + x) @ b.t(), torch.relu(a @ b) + x


A, B, X = torch.ones(64, 48), torch.ones(48, 32), torch.ones(64, 32)


def by(apart: float, *fused: float) -> Any:
    """Measured times that are made up."""

    def timed(region: Any, found: Any) -> list[list[float]]:
        assert len(found) >= len(fused)
        return [[apart], *([each] for each in fused), *([1.0] for _ in found[len(fused) :])]

    return timed


def test_the_faster_way_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure.store, "find", lambda key, suffix: None)
    for apart, fused in ((3e-3, 2e-3), (2e-3, 3e-3)):
        monkeypatch.setattr(measure, "timed", by(apart, fused))
        module, fuse = traced(residual, A, B, X), Fuse(measure=True)
        fuse(module.graph)
        (row,) = fuse.report.rows
        assert row.fused == (fused < apart)
        assert row.measured is not None
        assert (row.measured.apart, row.measured.fused) == (apart, fused)
        assert "measured" in str(fuse.report)


def test_of_several_kernels_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.store, "find", lambda key, suffix: None)
    module = traced(residual, A, B, X)
    found = sites.every(product_of(module), sites.Known.nothing(), "float32")
    assert isinstance(found, list)
    assert len(found) > 1
    for best, expected in enumerate(found):
        times = [3e-3] * len(found)
        times[best] = 1e-3
        monkeypatch.setattr(measure, "timed", by(2e-3, *times))
        answer, _ = measure.find(product_of(module), sites.Known.nothing(), "float32")
        assert isinstance(answer, sites.Fused)
        assert list(answer.cone.inside) == list(expected.cone.inside)


def test_equal_sites_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    met = []
    monkeypatch.setattr(measure, "timed", lambda region, found: (met.append(region), by(2e-3, 1e-3)(region, found))[1])
    a, b, x = torch.ones(40, 24), torch.ones(24, 40), torch.ones(40, 40)

    def layers(a: Tensor, b: Tensor, x: Tensor) -> Any:
        return [torch.relu(a @ b).sin() + x, torch.relu((a * 2) @ b).sin() + x]

    module, fuse = traced(layers, a, b, x), Fuse(measure=True)
    fuse(module.graph)
    assert [row.measured is not None for row in fuse.report.rows] == [True, True]
    assert len(met) == 1


def test_what_cannot_be_measured_is_predicted(on_hopper: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(region: Any, found: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measure, "timed", broken)
    large = [torch.ones(*shape) for shape in ((2048, 8), (8, 512), (2048, 512))]
    fuse = Fuse(measure=True)
    with pytest.warns(UserWarning, match="out of memory"):
        fuse(traced(residual, *large).graph)
    assert fuse.report.rows[0].fused
    assert fuse.report.rows[0].measured is None


# --- what is measured -------------------------------------------------------------------------------------------------


def test_a_region_ends_where_another_kernel_has_to_run() -> None:
    def function(a: Tensor, b: Tensor, x: Tensor) -> Any:
        c = x.cos()
        y = a @ b + c
        z = torch.relu(y)
        return z @ b.t() + z.sum(), y.cumsum(0), y.sum(0), c.sin()

    module = traced(function, A, B, X)
    region = region_of(product_of(module), [])
    assert region is not None
    names = [node.name for node in region.body]
    assert [name for name in names if name.startswith(("mm", "cumsum", "cos", "permute"))] == ["mm"]
    assert {"relu", "sum_1", "sum_2"} <= set(names)
    assert "add_1" not in names, "it reads the other product"
    assert {node.name for node in region.outputs} == {"add", "relu", "sum_1", "sum_2"}


def test_inputs_made_for_the_product_are_measured_with_it() -> None:
    module = traced(lambda a, b, x: a.sin() @ b + x.cos(), A, B, X)
    region = region_of(product_of(module), [])
    assert region is not None
    assert [node.name for node in region.body] == ["mm", "cos", "add"]


def test_a_mask_that_others_read_is_drawn_in_the_region() -> None:
    """Without the kernel the loop around the product draws it, and with it a loop of its own."""
    from torch._inductor import inductor_prims

    def function(a: Tensor, b: Tensor, x: Tensor) -> Any:
        mask = inductor_prims.random([*x.shape], inductor_prims.lookup_seed(a[0].long(), 0), "rand") > 0.1
        return torch.where(mask, a @ b, 0.0), mask

    product = product_of(traced(function, A, B, X))
    region = region_of(product, [grow(product, "points", {}, below(product), cuts=True)])
    assert region is not None
    assert {"inductor_random", "gt"} <= {node.name for node in region.body}
    assert {node.name for node in region.outputs} == {"gt", "where"}


def test_a_region_computes_what_its_graph_does() -> None:
    a, b, x = (torch.randn(shape) for shape in (A.shape, B.shape, X.shape))
    module = traced(residual, a, b, x)
    region = region_of(product_of(module), [])
    assert region is not None
    by_name = {node.name: value for node, value in zip(region.inputs, (a, b, x), strict=True)}
    found = Copied.of(region).module()(*(by_name[node.name] for node in region.inputs))
    for got, want in zip(found, (residual(a, b, x)[1], residual(a, b, x)[0]), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_text_depends_on_what_is_computed_and_not_on_names() -> None:
    def text(function: Any, *args: Tensor) -> str:
        region = region_of(product_of(traced(function, *args)), [])
        assert region is not None
        return text_of(Copied.of(region).graph)

    own = text(lambda a, b, x: torch.relu(a @ b) + x, A, B, X)
    assert own == text(lambda a, b, x: (x.cos(), torch.relu(a @ b) + x)[1], A, B, X)
    assert own != text(lambda a, b, x: torch.relu(a @ b) - x, A, B, X)
    assert own != text(lambda a, b, x: torch.relu(a @ b) + x, A[:32], B, X[:32])
    assert own != text(lambda a, b, x: torch.relu(a @ b) + x, A, B.t().contiguous().t(), X)


def test_random_values_look_like_the_others() -> None:
    for value in (X.t(), X.bool(), X.long(), X[:1].expand(4, 32), X[0, 0], X.to(torch.bfloat16)[:, ::2]):
        made = random_like(value)
        assert (made.shape, made.stride(), made.dtype) == (value.shape, value.stride(), value.dtype)
        assert bool(made.isfinite().all())


# --- the real compiler ------------------------------------------------------------------------------------------------

AGAIN = """
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from epifuse.pytorch import measure
from epifuse.pytorch.fuse import Fuse

kept, met = measure.timed, []
measure.timed = lambda *given: (met.append(1), kept(*given))[1]
values = torch.ones(64, 48), torch.ones(48, 32), torch.ones(64, 32)
module = make_fx(lambda a, b, x: a @ b + x, tracing_mode="fake")(*values)
fuse = Fuse(measure=True)
fuse(module.graph)
measure.timed = kept
said = f"{len(met)} {fuse.report.rows[0].measured}"
print(said)
"""


def test_a_second_process_measures_nothing(tmp_path: Path) -> None:
    path = tmp_path / "again.py"
    path.write_text(AGAIN, encoding="utf-8")
    first = runpy.run_path(str(path))["said"]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # other tests set it, and times depend on it
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env={**os.environ, **threads})
    assert done.returncode == 0, done.stderr
    assert first.startswith("1 ")
    assert done.stdout.split() == ["0", *first.split()[1:]]


def test_a_model_is_measured_and_trained() -> None:
    """The person's own generator draws the same numbers as without."""
    weight, x, y = torch.randn(16, 32, requires_grad=True), torch.randn(8, 16), torch.randn(8, 32)
    compiled = ef.compile(lambda x: x @ weight + y, measure=True)  # all of it is products: no C++ to compile
    state = torch.get_rng_state()
    compiled(x).sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(weight.grad, x.sum(0)[:, None].expand(16, 32))
    assert [row.measured is not None for row in ef.report(compiled).rows] == [True, False]


@pytest.mark.filterwarnings("error:a product could not be measured")
def test_a_model_is_measured_while_inductor_keeps_its_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # where it is not found
    x, y = torch.randn(9, 16), torch.randn(9, 16)
    with inductor.patch(fx_graph_cache=True):
        compiled = ef.compile(lambda x, y: x @ x.t() @ y + y, measure=True)
        compiled(x, y)
    assert any(row.measured is not None for row in ef.report(compiled).rows)


def test_measuring_is_for_what_would_be_predicted() -> None:
    for wrong in ({"measure": 1}, {"measure": True, "sites": "all"}):
        with pytest.raises(ef.errors.ArgumentError, match="measure"):
            ef.compile(nn.Linear(2, 2), **wrong)
