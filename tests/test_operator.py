"""`epifuse::gemm`: what traces a call sees operations of ATen, and they compute what the fused call computes."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import epifuse as ef
from epifuse.errors import ArgumentError
from epifuse.frontend import parsed
from epifuse.pytorch.spec import Spec, encoded
from epifuse.request.options import Options

M, K, N = 6, 4, 8
A, B, C, BIAS = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N), torch.randn(N)
OPERATOR = torch.ops.epifuse.gemm.default


def gelu_of(accum: Any, bias: Any, alpha: float = 2.0) -> Any:
    D = ef.gelu(alpha * accum + bias)
    total = D.sum(dim=-1)
    return D, total


def call(a: torch.Tensor) -> Any:
    return ef.gemm(a, B, epilogue=gelu_of, bias=BIAS)


def positive(accum: Any) -> Any:
    return torch.where(accum > 0, accum, torch.zeros_like(accum))


def mean_loss(accum: Any, labels: Any) -> Any:
    return F.cross_entropy(accum, labels)


@pytest.mark.parametrize("function", [positive, mean_loss])
def test_numbers_in_the_shape_of_a_value_are_traced(function: Any) -> None:
    """A tensor that only holds a number has one where PyTorch traces, too."""
    given = {"labels": torch.arange(M)} if function is mean_loss else {}

    def layer(a: torch.Tensor) -> Any:
        return ef.gemm(a, B, epilogue=function, operands=given)

    want = layer(A)
    torch.testing.assert_close(make_fx(layer)(A)(A), want)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(A), want)


def targets(module: torch.fx.GraphModule) -> list[str]:
    return [str(node.target).removeprefix("aten.") for node in module.graph.nodes if node.op == "call_function"]


ATEN = ["mm.default", "mul.Tensor", "add.Tensor", "gelu.default", "sum.dim_IntList"]

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a product": lambda a: ef.gemm(a, B),
    "several outputs": call,
    "a layer": lambda a: ef.linear(a, B.t(), BIAS, epilogue=ef.silu),
    "a layer of four dims": lambda a: ef.linear(a.view(2, 1, 3, K), B.t(), BIAS, epilogue="lambda accum: relu(accum)"),
    "batches": lambda a: ef.gemm(a.expand(3, M, K), B, epilogue="lambda accum: softmax(accum, dim=-1)"),
    "many batches": lambda a: ef.gemm(
        a.view(1, 1, M, K), B.expand(1, 1, K, N), epilogue="lambda accum: accum.amax(dim=-1)"
    ),
    "coordinates": lambda a: ef.gemm(
        a, B, epilogue="lambda accum: where(index_n(accum) > index_m(accum), accum, -1.0)"
    ),
    "a mask": lambda a: ef.gemm(a, B, epilogue="lambda accum: accum > 0"),
    "an integer": lambda a: ef.gemm(a * 1000, B, epilogue=ef.identity, out_dtypes=torch.int8),
    "eight bits": lambda a: ef.gemm(a * 1000, B, epilogue=ef.identity, out_dtypes=torch.float8_e4m3fn),
    "integers": lambda a: ef.gemm(a.to(torch.int8), B.to(torch.int8), epilogue="lambda accum: accum + 1"),
    "float64": lambda a: ef.gemm(a.double(), B.double(), epilogue="lambda accum, s: accum * s", s=1.5),
    "a number of no dims": lambda a: ef.gemm(a, B, epilogue="lambda accum, s: accum * s", s=torch.tensor(2)),
    "layout": lambda a: ef.gemm(a, B, epilogue="lambda accum: accum.reshape(6, 2, 4).permute(1, 0, 2)"),
    "a tree": lambda a: ef.gemm(a, B, epilogue=ef.thread.LinearCombination(alpha=2.0, beta=1.0), C=C),
    "arithmetic of numbers": lambda a: ef.gemm(
        a, B, epilogue="lambda accum, s: accum * math.exp(s) if s > 1 else accum", s=1.5
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_recorded_computes_the_same(name: str) -> None:
    function = CALLS[name]
    want = function(A)
    module = make_fx(function)(A)
    assert all("epifuse" not in target for target in targets(module))
    got = module(A)
    for have, expected in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
        assert have.shape == expected.shape
        assert have.dtype == expected.dtype
        assert have.is_contiguous()
        torch.testing.assert_close(have.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "text",
    ["silu(i)", "i * 0.1", "where(i > 0, 0.1, 0.2)", "i / 3", "(i > 0) * 0.1", "sqrt(abs(i))", "leaky_relu(i, 0.1)"],
)
def test_integers_beside_float64_become_float64(text: str) -> None:
    """PyTorch's own arithmetic would give them its default dtype, float32."""
    a, i = A.double(), torch.arange(M * N, dtype=torch.int32).view(M, N) - 20

    def layer(a: torch.Tensor) -> Any:
        return ef.gemm(a, B.double(), epilogue=f"lambda accum, i: accum * 0 + {text}", i=i)

    torch.testing.assert_close(make_fx(layer)(a)(a), layer(a), atol=0, rtol=1e-15)


def test_symbols_stay_symbols() -> None:
    module = make_fx(lambda a, b, bias: ef.gemm(a, b, epilogue=gelu_of, bias=bias), tracing_mode="symbolic")(A, B, BIAS)
    a = torch.randn(11, K)
    assert targets(module) == ATEN
    torch.testing.assert_close(tuple(module(a, B, BIAS)), tuple(call(a)))


def test_outputs_share_no_memory() -> None:
    module = make_fx(lambda a: ef.gemm(a, B, epilogue="def epi(accum): D = accum; E = accum; return D, E"))(A)
    D, E = module(A)
    assert D.data_ptr() != E.data_ptr()


def test_destinations_are_written() -> None:
    module = make_fx(lambda a, out: ef.gemm(a, B, epilogue=gelu_of, bias=BIAS, out={"D": out}))(A, torch.empty(M, N))
    out = torch.empty(M, N)
    torch.testing.assert_close(module(A, out)[0], call(A).D)
    torch.testing.assert_close(out, call(A).D)


def test_fake_tensors_give_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        D, total = ef.gemm(mode.from_tensor(A), torch.empty(K, N), epilogue=gelu_of, bias=torch.empty(N))
    assert isinstance(D, FakeTensor)
    assert isinstance(total, FakeTensor)
    assert (D.shape, total.shape) == ((M, N), (M,))


def test_errors_are_the_call_s_own() -> None:
    with pytest.raises(ArgumentError, match="bias is not provided"):
        make_fx(lambda a: ef.gemm(a, B, epilogue=gelu_of))(A)
    with pytest.raises(ef.errors.EpilogueTypeError, match="does not broadcast"):
        make_fx(lambda a: ef.gemm(a, B, epilogue=gelu_of, bias=BIAS[1:]))(A)


# --- transforms ------------------------------------------------------------------------------------------------------


def test_vmap() -> None:
    a, biases = torch.randn(3, M, K), torch.randn(3, N)
    got = torch.vmap(lambda a, bias: ef.gemm(a, B, epilogue=gelu_of, bias=bias))(a, biases)
    want = [ef.gemm(*pair, epilogue=gelu_of, bias=bias) for pair, bias in zip(((x, B) for x in a), biases, strict=True)]
    torch.testing.assert_close(got.D, torch.stack([one.D for one in want]))
    torch.testing.assert_close(got.total, torch.stack([one.total for one in want]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_grad_and_jvp() -> None:
    def loss(a: torch.Tensor) -> Any:
        return call(a).D.sum()

    def plain(a: torch.Tensor) -> Any:
        return F.gelu(2 * (a @ B) + BIAS).sum()

    torch.testing.assert_close(torch.func.grad(loss)(A), torch.func.grad(plain)(A))
    torch.testing.assert_close(torch.func.jvp(loss, (A,), (A,)), torch.func.jvp(plain, (A,), (A,)))


@pytest.mark.parametrize("name", ["sigmoid", "silu", "quick_gelu", "elu", "mish", "softplus", "logsigmoid", "gelu"])
def test_derivatives_of_activations_are_finite(name: str) -> None:
    a, one = torch.tensor([[-200.0], [0.0], [200.0]]), torch.ones(1, 1)
    gradient = torch.func.grad(lambda a: ef.gemm(a, one, epilogue=getattr(ef, name)).sum())(a)
    assert gradient.isfinite().all()


def test_inference_mode() -> None:
    with torch.inference_mode():
        torch.testing.assert_close(make_fx(call)(A)(A)[0], call(A).D)


# --- the operator itself ---------------------------------------------------------------------------------------------


SPEC = encoded(Spec(parsed(gelu_of), ("bias",), ("alpha",), Options(None)))


def test_the_operator_holds_what_pytorch_asks_of_one() -> None:
    result = torch.library.opcheck(OPERATOR, (A, B, [BIAS], [2.0], SPEC))
    assert set(result.values()) == {"SUCCESS"}


def test_on_real_tensors_the_fused_road_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(request: Any) -> Any:
        raise AssertionError("PyTorch runs it unfused")

    monkeypatch.setattr("epifuse.pytorch.ops.traced", refused)
    D, total = OPERATOR(A, B, [BIAS], [2.0], SPEC)
    torch.testing.assert_close((D, total), tuple(call(A)))


def test_a_spec_is_enough_for_another_process(tmp_path: Path) -> None:
    assert SPEC.isalnum()
    torch.save((A, B, BIAS, call(A).D), tmp_path / "tensors")
    program = f"""
import torch, epifuse
a, b, bias, want = torch.load({str(tmp_path / "tensors")!r})
torch.testing.assert_close(torch.ops.epifuse.gemm(a, b, [bias], [2.0], {SPEC!r})[0], want)
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_autocast_casts_the_product_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        module = make_fx(lambda a: OPERATOR(a, B, [BIAS], [2.0], SPEC))(A)
    dtypes = {
        node.target: node.meta["val"].dtype for node in module.graph.nodes if hasattr(node.meta.get("val"), "dtype")
    }
    assert dtypes[torch.ops.aten.mm.default] == torch.bfloat16
    assert dtypes[torch.ops.aten.gelu.default] == torch.float32


# --- export ----------------------------------------------------------------------------------------------------------


class Module(torch.nn.Module):
    def forward(self, a: torch.Tensor) -> Any:
        D, total = call(a)
        return D, total


@pytest.mark.filterwarnings("ignore")  # PyTorch's own
@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_one_node_and_decomposes_to_aten(strict: bool) -> None:
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Module(), (A,), dynamic_shapes=({0: rows},), strict=strict)
    assert targets(program.graph_module).count("epifuse.gemm.default") == 1
    a = torch.randn(11, K)
    torch.testing.assert_close(tuple(program.module()(a)), tuple(call(a)))
    assert targets(program.run_decompositions().graph_module) == ATEN


PERMUTED = {
    "elementwise behind": "def epi(accum): y = accum.unflatten(-1, (-1, 4)).transpose(0, 1) * 2; return y",
    "permuted last": "def epi(accum): y = (accum * 2).unflatten(-1, (-1, 4)).transpose(0, 1); return y",
    "not permuted": "def epi(accum): y = accum * 2; return y",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PERMUTED)
def test_a_result_lies_in_one_way_on_every_road(name: str) -> None:
    """What is made in a graph goes by the strides that were traced."""
    weight, x = torch.randn(24, 8), torch.randn(5, 8)

    class As(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = ef.linear(x, weight, epilogue=PERMUTED[name])
            return torch.as_strided(y, y.shape, y.stride()).view(-1) + y.reshape(-1)

    want = As()(x)
    program = torch.export.export(As(), (x,))
    for made in (torch.compile(As(), backend="eager", fullgraph=True), program.module()):
        torch.testing.assert_close(made(x), want)
    torch.testing.assert_close(program.run_decompositions().module()(x), want)


@pytest.mark.filterwarnings("ignore")
def test_a_layer_behind_attention_can_be_decomposed() -> None:
    """Whose strides another decomposition changes."""
    weight = torch.randn(16, 32)

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            y = torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
            return ef.linear(y, weight, epilogue=ef.silu)

    q = torch.randn(2, 4, 5, 8)
    program = torch.export.export(Attention(), (q,))
    torch.testing.assert_close(program.run_decompositions().module()(q), Attention()(q))


@pytest.mark.filterwarnings("ignore")
def test_one_tensor_for_two_results_is_refused_on_every_road() -> None:
    def call(out: torch.Tensor) -> Any:
        return ef.gemm(A, B, epilogue="def e(accum): D = accum; E = accum * 2; return D, E", out={"D": out, "E": out})

    out = torch.zeros(len(A), B.shape[1])
    for road in (call, torch.compile(call, backend="eager"), make_fx(call)):
        with pytest.raises(ef.errors.ArgumentError, match="overlap in memory"):
            road(out)
    assert not out.any()


@pytest.mark.filterwarnings("ignore")
def test_an_fp8_result_is_added_onto_on_every_road() -> None:
    def call(out: torch.Tensor) -> Any:
        return ef.gemm(A, B, epilogue="def e(accum): D = accum * 1; return D", out=out, accumulate="D")

    made = []
    for road in (call, torch.compile(call, backend="eager"), torch.compile(call, backend="aot_eager")):
        torch._dynamo.reset()
        made.append(road(torch.ones(len(A), B.shape[1]).to(torch.float8_e4m3fn)).float())
    for other in made[1:]:
        torch.testing.assert_close(made[0], other)


@pytest.mark.parametrize("shape", [(8,), (2, 3, 8)], ids=str)
def test_a_result_made_without_gradients_is_no_view(shape: tuple[int, ...]) -> None:
    weight = torch.randn(24, 8)
    with torch.no_grad():
        y = ef.linear(torch.randn(shape), weight)
    factor = torch.randn_like(y, requires_grad=True)
    y.mul_(factor)
    y.sum().backward()
    assert factor.grad is not None


@pytest.mark.filterwarnings("ignore")
def test_an_exported_layer_is_one_node_that_can_be_saved() -> None:
    class Layer(torch.nn.Linear):
        def forward(self, a: torch.Tensor) -> Any:
            return ef.linear(a, self.weight, self.bias, epilogue=ef.gelu)

    layer, kept = Layer(K, N), io.BytesIO()
    program = torch.export.export(layer, (A,))
    assert targets(program.graph_module) == ["t.default", "epifuse.gemm.default", "<built-in function getitem>"]
    torch.export.save(program, kept)
    kept.seek(0)
    torch.testing.assert_close(torch.export.load(kept).module()(A), layer(A))


@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_is_saved_and_loaded() -> None:
    kept = io.BytesIO()
    torch.export.save(torch.export.export(Module(), (A,)), kept)
    kept.seek(0)
    torch.testing.assert_close(tuple(torch.export.load(kept).module()(A)), tuple(call(A)))
