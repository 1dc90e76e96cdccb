"""Models through epifuse's pass: the gradients of eager, whatever stands around the products."""

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
import torch._inductor.inductor_prims  # registers prims.fma
import torch.nn.functional as F
from compile_models import MODELS, Encoder, errors, gradients, hidden, interpreted
from emulated import emulated as emulated  # a fixture
from emulated import on_hopper as on_hopper  # a fixture
from gpu.harness import Machine
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import epifuse as ef
from epifuse.base.config import Config
from epifuse.providers.cpu import native, toolchain
from epifuse.providers.cpu.emit_cpp import LANES
from epifuse.pytorch import compiling, sites
from epifuse.pytorch.compiling import backend
from epifuse.pytorch.fuse import Fuse
from epifuse.pytorch.leaves import decoded
from epifuse.pytorch.report import Report

aten = torch.ops.aten
pytestmark = [pytest.mark.usefixtures("compiled_anew"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


# --- whole models: PyTorch's own training graphs, run operation by operation -----------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_model(name: str) -> None:
    make, data = MODELS[name]
    model, x, fuse = make(), data(), Fuse(sites="all")
    double = copy.deepcopy(model).double()
    exact = gradients(double, double, x.double() if x.is_floating_point() else x)
    found = {
        kind: errors(gradients(model, step, x), exact)
        for kind, step in {
            "eager": model,
            "unfused": torch.compile(model, backend=interpreted(Fuse(sites="none")), fullgraph=True, dynamic=False),
            "ours": torch.compile(model, backend=interpreted(fuse), fullgraph=True, dynamic=False),
        }.items()
    }
    assert {row.graph for row in fuse.report.fused} == {"forward", "backward"}
    # Some exact gradients are zero, as that of a key's bias: what is left there is the rounding of other values.
    ordered = {kind: sorted(each.values()) for kind, each in found.items()}
    middle = len(ordered["ours"]) // 2
    assert ordered["ours"][middle] <= 1.1 * max(ordered["eager"][middle], ordered["unfused"][middle])
    assert ordered["ours"][-1] <= 3 * max(ordered["eager"][-1], ordered["unfused"][-1])


def test_a_backward_comparison_is_not_fused_without_its_input() -> None:
    """Its gradient goes where the argument equals it; of an argument that is computed again none might."""

    class Largest(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(super().forward(x)).amax(1)

    model, fuse = Largest(32, 48), Fuse(sites="all")
    step = torch.compile(model, backend=interpreted(fuse), fullgraph=True, dynamic=False)
    x = torch.randn(64, 32)
    step(x).sum().backward()
    (row,) = (row for row in fuse.report.rows if row.graph == "forward")
    assert not row.fused
    assert "with its argument" in row.reason
    fuse.report.rows.clear()
    with torch.no_grad():
        step(x)
    assert any("amax" in name for row in fuse.report.rows for name in row.taken)


def test_both_passes_compute_alike_what_leads_to_a_peak() -> None:
    """Inductor's loop finds the largest of what ours had rounded, and the backward pass compares it with its own."""

    class Peak(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(24, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = F.gelu(self.first(x))
            return self.last(y * y.amax(-1, keepdim=True))  # type: ignore[no-any-return]  # a tensor

    torch.manual_seed(0)
    model, x = Peak(), torch.randn(33, 24)
    exact = gradients(double := copy.deepcopy(model).double(), double, x.double())
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        found = errors(gradients(model, ef.compile(model, sites="all"), x), exact)
    assert all(error < 1e-4 for error in found.values())  # which no NaN is


@pytest.mark.parametrize("numerics", ["float32", "torch"])
def test_mixed_precision(numerics: Any) -> None:
    """In bfloat16 the errors are those of the dtype: float32 between operations is no worse than PyTorch's rounding."""
    model, x, fuse = Encoder(), hidden(), Fuse(numerics, sites="all")
    double = copy.deepcopy(model).double()
    exact = gradients(double, double, x.double())

    def under(step: Any) -> dict[str, float]:
        with torch.autocast("cpu", torch.bfloat16):
            return errors(gradients(model, step, x), exact)

    eager = under(model)
    ours = under(torch.compile(model, backend=interpreted(fuse), fullgraph=True, dynamic=False))
    assert len(fuse.report.fused) >= 5
    assert all(row.dtype == torch.bfloat16 for row in fuse.report.fused)
    middle = len(ours) // 2
    assert sorted(ours.values())[middle] <= 1.1 * sorted(eager.values())[middle]


# --- single graphs ---------------------------------------------------------------------------------------------------


def fused(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[GraphModule, Report]:
    """`function` as a graph of ATen operations, after the pass; the results of the graph are those of the function."""
    module = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args)
    fuse = Fuse(**{"sites": "all", **options})
    fuse(module.graph)
    module.recompile()
    for got, want in zip(_listed(module(*args)), _listed(function(*args)), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4, equal_nan=True)
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "epifuse":
            asked = node.target(*torch.fx.map_arg(node.args, lambda each: each.meta["val"]))
            assert _looks(node.meta["val"]) == _looks(asked)
    return module, fuse.report


def _looks(value: Any) -> list[Any]:
    return [(each.shape, each.stride(), each.dtype, each.device) for each in _listed(value)]


def _listed(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


A, B, X = random(24, 16), random(16, 32), random(24, 32)
LA, LB, LX = random(4, 6, 16), random(4, 16, 8), random(4, 6, 8)


def shifted(a: Tensor, b: Tensor, x: Tensor) -> Any:
    y = a @ b
    return torch.relu(y) + x, y.sum(0), y.amax(-1, keepdim=True)


def regrouped(a: Tensor, b: Tensor, x: Tensor) -> Any:
    y = (a @ b).view(2, 3, 4, 32) * x.view(2, 3, 4, 32)
    rows = y.mean(-1)
    return (y - rows[..., None]).sin(), y.sum((0, 1, 2)), rows


def permuted(a: Tensor, b: Tensor, x: Tensor) -> Any:
    y = (a @ b + x).view(4, 6, 2, 16)
    return torch.tanh(y.permute(0, 2, 1, 3)), y


def positions(a: Tensor, b: Tensor, x: Tensor) -> Any:
    return torch.relu((a @ b).view(4, 6, 32) + x[:6])


def outer(a: Tensor, b: Tensor, x: Tensor) -> Any:
    y = (a @ b).view(4, 6, 32)
    return y.mean(-1, keepdim=True).exp() * x[0] + y


def expanded(a: Tensor, b: Tensor, x: Tensor) -> Any:
    y = a @ b
    return (y.sum(-1, keepdim=True).expand(24, 32) + x).cos(), y.var(-1), torch.full_like(y, 2.0) * y


def whole(a: Tensor, b: Tensor, x: Tensor) -> Any:
    return F.mse_loss(a @ b, x), (a @ b).abs().amax()


def biased(a: Tensor, b: Tensor, x: Tensor) -> Any:
    return torch.addmm(x, a, b, beta=0.5, alpha=2.0).sigmoid(), torch.addmm(x[0], a, b).exp()


def unread_bias(a: Tensor, b: Tensor, x: Tensor) -> Any:
    return torch.addmm(x * float("nan"), a, b, beta=0).exp()


def normed(a: Tensor, b: Tensor, x: Tensor) -> Any:
    y = F.layer_norm((a @ b).view(4, 6, 32) + x.view(4, 6, 32), (32,))
    return torch.softmax(y, -1), y.view(24, 32).to(torch.bfloat16)


def batched(a: Tensor, b: Tensor, x: Tensor) -> Any:
    y = torch.bmm(a, b)
    mask = (x > 0).view(2, 2, 6, 8)[:, :1]
    return torch.softmax(y.view(2, 2, 6, 8).masked_fill(mask, float("-inf")), -1), y.sum((0, 1))


def batched_bias(a: Tensor, b: Tensor, x: Tensor) -> Any:
    return torch.relu(torch.baddbmm(x, a, b, alpha=0.5)) * x[:, :1]


def lengths(a: Tensor, b: Tensor, x: Tensor) -> Any:
    y = a @ b
    length = y.norm(dim=-1, keepdim=True)
    return y / (length + 1), length, y


def residual_gelu(a: Tensor, b: Tensor, x: Tensor) -> Any:
    return F.gelu(a @ b) + x


def chained(a: Tensor, b: Tensor, x: Tensor) -> Any:
    y = torch.relu(a @ b)
    z = torch.sigmoid(y @ x.t())
    return z * z.sum(0), y


def a_scalar(a: Tensor, b: Tensor, x: Tensor) -> Any:
    return (a @ b) * x.sum() + x[0, 0]


ON_MATRICES = (
    *(
        shifted,
        regrouped,
        permuted,
        positions,
        outer,
        expanded,
        whole,
        biased,
        unread_bias,
        normed,
        lengths,
        chained,
        a_scalar,
    ),
)


@pytest.mark.parametrize("function", ON_MATRICES)
def test_a_graph(function: Callable[..., Any]) -> None:
    module, report = fused(function, A, B, X)
    assert report.fused
    assert str(module.graph).count("epifuse.fused") == len(report.fused)


def gated(a: Tensor, b: Tensor, x: Tensor) -> Any:
    gate, up = (a @ b).chunk(2, -1)
    return F.silu(gate) * up


def gated_slices(a: Tensor, b: Tensor, x: Tensor) -> Any:
    y = (a @ b).view(4, 6, 32)
    return F.silu(y[..., :16]) * y[..., 16:], y


def gate_read_outside(a: Tensor, b: Tensor, x: Tensor) -> Any:
    gate, up = (a @ b + x).split(16, -1)
    return F.silu(gate) * up, gate


def rotated(a: Tensor, b: Tensor, x: Tensor) -> Any:
    y = a @ b
    return y + torch.cat([-y[:, 16:], y[:, :16]], -1) * x


def rotated_rows(a: Tensor, b: Tensor, x: Tensor) -> Any:
    y = (a @ b).view(2, 12, 32) + x.view(2, 12, 32)
    first, second = y.split(16, -1)
    return torch.cat([first * x.view(2, 12, 32)[..., 16:], second.sin() * x[0, :16]], -1)


def other_parts(a: Tensor, b: Tensor, x: Tensor) -> Any:
    """Of rows, of several sizes, and joined to what is wider: a cone ends before them."""
    y = torch.tanh(a @ b)
    return y[-1], y[:, :24], torch.cat([y, x], -1), y[2:8] * x[:6], torch.relu(y) * x


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in LANES or toolchain.missing() is not None,
    reason="the vectorised kernel alone takes parts of a row",
)
@pytest.mark.parametrize("function", [gated, gated_slices, gate_read_outside, rotated, rotated_rows])
def test_parts_of_a_row(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "CONFIG", Config(native_elements=0))
    monkeypatch.setattr(native, "FEWEST_ROWS", 1)
    (row,) = fused(function, A, B, X)[1].rows
    assert row.plan == "cpu_native"
    assert "mul" in row.taken


@pytest.mark.parametrize("function", [gated, gated_slices, rotated])
def test_parts_are_left_where_each_operation_runs_by_itself(function: Callable[..., Any]) -> None:
    assert not fused(function, A, B, X)[1].fused


class Unbound(nn.Module):
    """Its backward has an input that is called getitem, as what was saved of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 96), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).unflatten(-1, (2, -1)).unbind(-2)
        return self.down(F.silu(gate) * up)


def test_a_backward_whose_inputs_are_called_as_operations() -> None:
    model = Unbound()
    x, y = (torch.ones(7, 32, requires_grad=True) for _ in range(2))
    fuse, inputs = Fuse(sites="all"), set()

    def watched(graph: Graph) -> None:
        inputs.update(node.name for node in graph.nodes if node.op == "placeholder")
        fuse(graph)

    torch.compile(model, backend=interpreted(watched), fullgraph=True)(x).sum().backward()
    assert any(name.startswith("getitem") for name in inputs)
    assert "backward" in {row.graph for row in fuse.report.fused}
    model(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_parts_that_no_kernel_takes_end_a_cone() -> None:
    (row,) = fused(other_parts, A, B, X)[1].rows
    assert set(row.taken) == {"tanh", "relu", "mul"}


@pytest.mark.parametrize("function", [batched, batched_bias])
def test_a_graph_of_batches(function: Callable[..., Any]) -> None:
    assert fused(function, LA, LB, LX)[1].fused


@pytest.mark.parametrize("function", [regrouped, outer, normed, shifted, biased])
def test_regrouping_leaves_no_sizes_in_the_epilogue(function: Callable[..., Any]) -> None:
    """Then one kernel, and one spec in PyTorch's caches, serves every batch."""
    module, _ = fused(function, A, B, X)
    specs = [str(node.args[3]) for node in module.graph.nodes if "epifuse.fused" in str(node.target)]
    assert specs
    for leaf in map(decoded, specs):
        assert "reshape" not in {node.op for node in leaf.parsed.graph.nodes}
        assert all(extent in ("l", "m", "n", 1) for value in leaf.values for extent in value.shape)


# --- what is left alone, and why --------------------------------------------------------------------------------------


def unknown(a: Tensor, b: Tensor, x: Tensor) -> Any:
    return torch.cumsum(a @ b, -1) + x


def mutated(a: Tensor, b: Tensor, x: Tensor) -> Any:
    y = a @ b
    return torch.relu(aten.add_.Tensor(y, x))


def strided(a: Tensor, b: Tensor, x: Tensor) -> Any:
    return torch.as_strided(torch.relu(a @ b), (4, 4), (2, 1)), torch.relu(a @ b)


def integers(a: Tensor, b: Tensor, x: Tensor) -> Any:
    return torch.relu(a.int() @ b.int()) + 1


def complexes(a: Tensor, b: Tensor, x: Tensor) -> Any:
    return (a.to(torch.complex64) @ b.to(torch.complex64)) * 2


def empty(a: Tensor, b: Tensor, x: Tensor) -> Any:
    return torch.relu(a[:0] @ b)


def dead(a: Tensor, b: Tensor, x: Tensor) -> Any:
    torch.relu(a @ b)
    return x + 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (dead, "nothing reads"),
        (unknown, "nothing beside it is in the language"),
        (mutated, "add_ in its graph writes"),
        (integers, "a product of int32"),
        (complexes, "a product of complex64"),
        (empty, "empty"),
        (strided, "as_strided"),
    ],
)
def test_what_is_left_alone(function: Callable[..., Any], reason: str) -> None:
    _, report = fused(function, A, B, X)
    assert any(reason in row.reason for row in report.rows), str(report)
    assert function is strided or not report.fused


def test_products_beside_collectives_are_left_alone() -> None:
    import torch.distributed._functional_collectives  # registers the operators

    def gathered(a: Tensor, b: Tensor) -> Tensor:
        found = torch.ops._c10d_functional.all_gather_into_tensor(a, 2, "0")
        return torch.relu(torch.ops._c10d_functional.wait_tensor(found) @ b)

    module = make_fx(gathered, tracing_mode="fake")(A, B)
    fuse = Fuse(sites="all")
    fuse(module.graph)
    assert "collective" in fuse.report.rows[0].reason


def test_a_site_may_be_left_alone() -> None:
    _, report = fused(chained, A, B, X, leave=lambda row: row.name == "mm")
    assert [(row.name, row.fused) for row in report.rows] == [("mm", False), ("mm_1", True)]
    assert not fused(chained, A, B, X, sites="none")[1].fused


def test_no_product_is_fused_on_a_cpu_by_prediction() -> None:
    """Inductor's loop there takes less time than one operation after the other."""
    for a, b, x in ((A, B, X), (random(2048, 8), random(8, 512), random(2048, 512))):
        _, report = fused(shifted, a, b, x, sites="predicted")
        assert "predicted to lose" in report.rows[0].reason


def test_a_product_is_fused_where_that_saves_time(on_hopper: Machine) -> None:
    """The loop around this product takes longer than the product itself."""
    assert fused(residual_gelu, random(2048, 8), random(8, 512), random(2048, 512), sites="predicted")[1].fused


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_model_of_transformers(name: str) -> None:
    """All models, through the real compiler: python benchmarks/models.py"""
    torch.manual_seed(0)
    model, batch = models.MODELS[name]()
    fuse = Fuse(sites="all")
    ours = torch.compile(model.train(), backend=interpreted(fuse), fullgraph=True, dynamic=False)
    found = models.compared(model, batch, {"ours": ours, "eager": model}, amp=False)
    assert {row.graph for row in fuse.report.fused} == {"forward", "backward"}
    ordered = {kind: sorted(each.values()) for kind, each in found.items()}
    middle = len(ordered["ours"]) // 2
    assert ordered["ours"][middle] <= 1.1 * ordered["eager"][middle]
    assert ordered["ours"][-1] <= 3 * ordered["eager"][-1]


# --- the real compiler ------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))


def test_a_model_is_compiled_and_trained() -> None:
    """Two steps, whose gradients add up: one graph, no break, and the state has its keys."""
    model, x = Mlp(), torch.randn(4, 6, 16)
    exact = gradients(double := copy.deepcopy(model).double(), double, x.double())
    compiled = ef.compile(model, fullgraph=True, sites="all")
    assert "the model has not run" in str(ef.report(compiled))
    for _ in range(2):
        assert max(errors(gradients(model, compiled, x), exact).values()) <= 1e-5
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    compiled(x).sin().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name], atol=1e-6, rtol=1e-5)
    report = ef.report(compiled)
    assert {row.graph for row in report.fused} == {"forward", "backward"}
    assert "products run with an epilogue" in str(report)


def test_the_backend_and_checkpoints() -> None:
    model, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), torch.randn(4, 6, 16)

    def step(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    exact = gradients(double := copy.deepcopy(model).double(), double, x.double())
    met = []

    def watched(module: GraphModule, inputs: list[Any], **options: Any) -> Any:
        met.append(module)
        return backend(module, inputs, **options)

    compiled = torch.compile(step, backend=watched, fullgraph=True)
    assert max(errors(gradients(model, compiled, x), exact).values()) <= 1e-5
    assert len(met) == 1
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    entry = re.search(r'"torch_dynamo_backends"\]\nepifuse = "([\w.]+):(\w+)"', text)
    assert entry is not None
    assert getattr(sys.modules[entry[1]], entry[2]) is backend


AGAIN = """
import torch, epifuse as ef
from epifuse.pytorch.fuse import Fuse

torch.manual_seed(0)
weight, x, residual = torch.randn(16, 32, requires_grad=True), torch.randn(8, 16), torch.randn(8, 32)
met, visit = [], Fuse.__call__
Fuse.__call__ = lambda self, graph: (met.append(graph), visit(self, graph))
compiled = ef.compile(lambda x: x @ weight + residual, sites="all")  # all of it is products: no C++ to compile
y = compiled(x)
y.sum().backward()
torch.testing.assert_close(y, x @ weight + residual)
print(len(met), len(ef.report(compiled).fused), weight.grad.double().sum().item())
"""


def test_a_second_process_finds_the_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "again.py").write_text(AGAIN, encoding="utf-8")
    said = []
    for _ in range(2):
        done = subprocess.run([sys.executable, str(tmp_path / "again.py")], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    first, second = said
    assert first[:2] == ["2", "1"]  # the forward and the backward graph
    assert second[:2] == ["0", "0"], "the pass ran again"
    assert first[2:] == second[2:]


def test_an_empty_report_says_whether_there_was_a_graph() -> None:
    convolution = ef.compile(nn.Conv1d(8, 12, 1))
    convolution(torch.randn(2, 8, 4))
    assert "no mm" in str(ef.report(convolution))

    @ef.compile
    def broken(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x @ x
        return x

    broken(torch.randn(4, 4))
    assert "graph_breaks" in str(ef.report(broken))


def test_options_are_checked() -> None:
    both = {"mode": "default", "options": {"shape_padding": False}}  # which torch.compile refuses too
    for wrong in ({"numerics": "exact"}, {"sites": "some"}, {"leave": 3}, {"options": 3}, both):
        with pytest.raises(ef.errors.ArgumentError):
            ef.compile(nn.Linear(2, 2), **wrong)
    for other in (3, nn.Linear):  # an instance of a class is compiled
        with pytest.raises(ef.errors.EpifuseError):
            ef.compile(other)
    with pytest.raises(ef.errors.ArgumentError):
        ef.report(nn.Linear(2, 2))


def test_a_function_is_decorated_with_options() -> None:
    @ef.compile(sites="all", dynamic=False)
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ x) + x

    x = torch.randn(6, 6)
    torch.testing.assert_close(layer(x), torch.tanh(x @ x) + x)
    assert [row.fused for row in ef.report(layer).rows] == [True]


def test_other_passes_stay() -> None:
    before: list[Any] = []
    compiled = ef.compile(
        lambda a, b: torch.relu(a @ b), sites="all", options={"post_grad_custom_pre_pass": before.append}
    )
    torch.testing.assert_close(compiled(A, B), torch.relu(A @ B), atol=1e-4, rtol=1e-4)
    assert len(before) == 1
    assert len(ef.report(compiled).fused) == 1


def test_without_the_hook_it_is_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_HOOK", "a_hook_of_another_version")
    with pytest.warns(UserWarning, match="epifuse fuses nothing") as said:
        compiled = ef.compile(lambda a, b: a @ b, sites="all", options={"shape_padding": False})
    assert len(said) == 1
    torch.testing.assert_close(compiled(A, B), A @ B)
    assert not ef.report(compiled).rows


def layers(x: Tensor, weights: list[Tensor], scales: list[float], other: Tensor) -> Any:
    """Alike but for a number, its type, and which of two values is divided by the other."""
    for i, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
        y = F.gelu(x @ weight) * scale
        x = y / (other * other + 3) if i != 2 else (other * other + 3) / (y * y + 9)
    return x


def test_layers_that_are_alike_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = random(64, 96), [random(96, 96) / 10] * 6, [2.0, 2.0, 2.0, 3.0, 1.0, 1], random(64, 96)
    forms: list[Any] = []
    form_of = sites._form
    monkeypatch.setattr(sites, "_form", lambda *args: (forms.append(args), form_of(*args))[1])
    module, report = fused(layers, *given)
    looked_at = len(forms)
    monkeypatch.setattr(sites, "alike", lambda cone, flat: object())
    anew, _ = fused(layers, *given)
    assert looked_at < len(forms) - looked_at
    assert module.code == anew.code
    assert [len(row.taken) > 2 for row in report.rows] == [True] * 6
