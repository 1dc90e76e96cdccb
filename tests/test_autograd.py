"""Autograd: gradients of fused products beside PyTorch's, for every row of the vocabulary and every front end."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import epifuse as ef
from epifuse.base.cache import forget
from epifuse.base.errors import EpifuseError, UnsupportedError, fail
from epifuse.base.places import Loc
from epifuse.frontend.fx.reading import GRAPH_FILE
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.reduction import REDUCTIONS
from epifuse.fusion.vocabulary import VOCABULARY
from epifuse.plan.settle import Settled, settle
from epifuse.pytorch import autograd, backward, derivative, storing
from epifuse.pytorch.derivative import Derivative, derive, inputs_of
from epifuse.request.options import Options
from epifuse.request.signature import Request, with_care
from tests.frontend.sources import function_from

M, K, N = 4, 3, 6
DOUBLE = torch.float64


def random(*shape: int, dtype: torch.dtype = DOUBLE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 7 + seed)
    return torch.randn(shape, generator=generator, dtype=DOUBLE).to(dtype).requires_grad_()


def outputs(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def gradchecked(
    epilogue: Any, a: Tensor | None = None, b: Tensor | None = None, *, undefined: bool = True, **given: Any
) -> None:
    """`ef.gemm`'s gradients against differences of its results; where `undefined`, also of some outputs alone."""
    matrices = random(M, K) if a is None else a, random(K, N) if b is None else b
    save = given.pop("save", "recompute")
    names = [name for name, value in given.items() if isinstance(value, Tensor) and value.requires_grad]

    def function(a: Tensor, b: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        operands = {**given, **dict(zip(names, tensors, strict=True))}
        made = outputs(ef.gemm(a, b, epilogue=epilogue, operands=operands, save=save))
        return tuple(value for value in made if value.requires_grad)

    inputs = (*matrices, *(given[name] for name in names))
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True, check_undefined_grad=undefined)


# --- the vocabulary --------------------------------------------------------------------------------------------------


def source(name: str) -> tuple[str, dict[str, Tensor]]:
    """An epilogue that calls `name` on positive values, and operands for its further parameters."""
    parameters = list(VOCABULARY[name].signature.parameters.values())
    further = [f"p{index}" for index, each in enumerate(parameters[1:]) if each.default is each.empty]
    first = "where" if name == "where" else name
    arguments = ["x > 1.0", *further] if first == "where" else ["x", *further]
    text = f"def epi({', '.join(['accum', *further])}):\n    x = abs(accum) + 0.3\n"
    return text + f"    D = {name}({', '.join(arguments)})\n    return D", {
        each: random(M, N, seed=i) for i, each in enumerate(further)
    }


ELEMENTWISE = [
    name
    for name, entry in VOCABULARY.items()
    if entry.group == "activation"
    or (entry.group == "primitive" and PRIMITIVES[name].rule not in ("compare", "logic", "integer", "bits", "random"))
]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str, whole_sweeps: bool) -> None:
    text, operands = source(name)
    gradchecked(text, undefined=whole_sweeps, **operands)


@pytest.mark.parametrize("name", [name for name in REDUCTIONS if REDUCTIONS[name].rule != "mask"])
@pytest.mark.filterwarnings(
    "ignore:PyTorch runs the derivative of epi unfused.*cat of values"
)  # prod's, of partial ones
def test_reductions(name: str, whole_sweeps: bool) -> None:
    """A derivative is traced for each set of outputs that have a gradient: all sets for two of them."""
    text = f"D = accum * C; r = {name}(D, dim=0); s = {name}(D, dim=-1); t = {name}(D); return D, r, s, t"
    undefined = whole_sweeps or name in ("sum", "amax")
    gradchecked(f"def epi(accum, C): {text}", C=random(M, N), undefined=undefined)


@pytest.mark.parametrize("name", [name for name, entry in VOCABULARY.items() if entry.group == "activation"])
def test_far_values_have_the_gradient_of_near_ones_or_none(name: str) -> None:
    """A formula may overflow where the function does not."""
    a = torch.tensor([[-300.0], [-90.0], [0.0], [90.0], [300.0]], requires_grad=True)
    further = {key: torch.ones(5, 1) for key in source(name)[1]}
    text = f"def epi({', '.join(['accum', *further])}): D = {name}({', '.join(['accum', *further])}); return D"
    ef.gemm(a, torch.ones(1, 1), epilogue=text, operands=further).sum().backward()
    function: Any = getattr(F, name, None)
    if name == "expm1":  # its derivative overflows
        assert a.grad is not None
        assert not a.grad.isnan().any()
        return
    assert a.grad is not None
    assert a.grad.isfinite().all()
    if function is not None and not further:
        beside = a.detach().requires_grad_()
        function(beside).sum().backward()
        torch.testing.assert_close(a.grad, beside.grad)


# --- epilogues --------------------------------------------------------------------------------------------------------


def gelu_residual(accum: Any, bias: Any, residual: Any) -> Any:
    return ef.gelu(accum + bias) + residual


def silu_gate(accum: Any, gate: Any) -> Any:
    D, Z = ef.silu(gate) * accum, ef.silu(accum)
    return D, Z


def softmax(accum: Any, bias: Any) -> Any:
    return ef.softmax(accum + bias)


def log_softmax(accum: Any, scale: Any) -> Any:
    return ef.log_softmax(accum * scale)


def layer_norm(accum: Any, weight: Any, bias: Any) -> Any:
    mean = ef.mean(accum, dim=-1, keepdim=True)
    centred = accum - mean
    variance = ef.mean(centred * centred, dim=-1, keepdim=True)
    return centred * ef.rsqrt(variance + 1e-5) * weight + bias


def cross_entropy(accum: Any, label: Any) -> Any:
    row = ef.logsumexp(accum, dim=-1, keepdim=True)
    loss = ef.mean(row - ef.sum(ef.where(ef.index_n(accum) == label, accum, 0.0), dim=-1, keepdim=True))
    return loss


def several(accum: Any, alpha: Any, column: Any, mask: Any) -> Any:
    Z = alpha * accum + column
    D = ef.where(mask, ef.tanh(Z), 0.0)
    most = ef.amax(D, dim=-1)
    positive = D > 0
    total = ef.sum(Z * Z)
    return D, most, positive, total


def heads(accum: Any, bias: Any) -> Any:
    D = ef.permute(ef.reshape(ef.tanh(accum + bias), (4, 2, 3)), (1, 0, 2))
    return D


class Gelu(ef.DenseGemm):
    def epilogue_operation(self, accumulator: Any, c: Any, alpha: float) -> Any:
        d = ef.gelu(accumulator * alpha + c)
        return d


def traced(accum: Tensor, bias: Tensor) -> Tensor:
    return torch.sigmoid(accum + bias) * accum


class Case(NamedTuple):
    """An epilogue and what it is handed."""

    epilogue: Any
    operands: Mapping[str, Any] = {}
    a: Tensor | None = None
    b: Tensor | None = None


def _tree() -> Any:
    from epifuse import evt

    return evt.EVT(evt.Compute(ef.silu), evt.EVT(evt.Compute(ef.add), evt.AccFetch(), evt.RowBroadcast("bias")))


def _module() -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(traced, tracing_mode="fake")(torch.empty(M, N, dtype=DOUBLE), torch.empty(N, dtype=DOUBLE))


CASES: dict[str, Case] = {
    "plain": Case(None),
    "gelu, bias, residual": Case(gelu_residual, {"bias": random(N), "residual": random(M, N)}),
    "gate": Case(silu_gate, {"gate": random(M, N)}),
    "softmax": Case(softmax, {"bias": random(N)}),
    "softmax of columns": Case("def epi(accum): D = softmax(accum, dim=0); return D"),
    "softmax of all": Case("def epi(accum): D = softmax(accum, dim=(0, 1)); return D"),
    "log softmax": Case(log_softmax, {"scale": random()}),
    "layer norm": Case(layer_norm, {"weight": random(N), "bias": random(N)}),
    "cross entropy": Case(cross_entropy, {"label": torch.arange(M, dtype=torch.int32).reshape(M, 1)}),
    "several": Case(several, {"alpha": random(), "column": random(M, 1), "mask": random(M, N).detach() > 0}),
    "heads": Case(heads, {"bias": random(N)}),
    "numbers": Case("def epi(accum, s, t): D = accum * (s * 2.0) + t * accum * accum; return D", {"s": 0.5, "t": 3}),
    "one element": Case("def epi(accum, s): D = tanh(accum) * s; return D", {"s": random(1)}),
    "column of a vector": Case("def epi(accum, v): D = exp(accum) * v.unsqueeze(1); return D", {"v": random(M)}),
    "transposed operand": Case("def epi(accum, C): D = sin(accum) * C.permute(1, 0); return D", {"C": random(N, M)}),
    "rounded": Case("def epi(accum, C): D = accum * C.to(torch.float64) + round(accum); return D", {"C": random(N)}),
    "integers": Case(
        "def epi(accum, i): D = where(i % 2 == 0, accum * i, accum / (i + 1)); return D",
        {"i": torch.arange(N, dtype=torch.int32)},
    ),
    "shifts": Case(
        "def epi(accum, i): D = accum * accum * (index_n(accum) << i | index_n(accum) >> (i & 1) | 1); return D",
        {"i": torch.arange(M, dtype=torch.int32).reshape(M, 1)},
    ),
    "batches": Case(gelu_residual, {"bias": random(2, 1, N), "residual": random(N)}, random(2, M, K), random(2, K, N)),
    "one B": Case(gelu_residual, {"bias": random(N), "residual": random(2, M, 1)}, random(2, M, K)),
    "one A": Case(silu_gate, {"gate": random(N)}, None, random(2, K, N)),
    "an A of one batch": Case(silu_gate, {"gate": random(N)}, random(1, M, K), random(2, K, N)),
    "a B of one batch": Case(silu_gate, {"gate": random(N)}, random(2, M, K), random(1, K, N)),
    "four dims": Case(softmax, {"bias": random(N)}, random(2, 2, M, K), random(K, N)),
    "no rows": Case(gelu_residual, {"bias": random(N), "residual": random(1)}, random(0, K)),
    "no products": Case(gelu_residual, {"bias": random(N), "residual": random(M, N)}, random(M, 0), random(0, N)),
    "tree": Case(_tree(), {"bias": random(N)}),
    "functor": Case(ef.thread.LinearCombinationGELU(), {"C": random(M, N), "alpha": random()}),
    "graph of fx": Case(_module(), {"bias_1": random(N)}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("save", ["recompute", "preactivation"])
@pytest.mark.parametrize("name", CASES)
def test_epilogues(name: str, save: str) -> None:
    case = CASES[name]
    gradchecked(case.epilogue, case.a, case.b, save=save, **case.operands)


def test_the_class_form_and_the_plan_object() -> None:
    a, b, c = random(2, M, K, dtype=torch.float32), random(2, K, N, dtype=torch.float32), random(2, M, N)
    made = Gelu(torch.float32, device="cpu").run(a, b, c.float(), alpha=0.5)
    made.sum().backward()
    want = torch.autograd.grad(F.gelu(a @ b * 0.5 + c.float()).sum(), (a, b, c))
    for leaf, expected in zip((a, b), want, strict=False):
        torch.testing.assert_close(leaf.grad, expected)


# --- linear ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(K,), (M, K), (2, 3, K), (2, 1, 2, K), (2, 0, K)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    x, weight, b = random(*shape), random(N, K), random(N) if bias else None
    residual = random(*shape[:-1], N)

    def function(*tensors: Tensor) -> Any:
        x, weight, residual, *bias = tensors
        return ef.linear(x, weight, *bias, epilogue=lambda accum, C: ef.silu(accum) * C, C=residual)

    inputs = (x, weight, residual, *([b] if bias else []))
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("save", ["recompute", "preactivation", "auto"])
def test_gradients_have_the_dtypes_of_their_inputs(dtype: torch.dtype, save: str) -> None:
    x, weight, bias = random(6, 8, dtype=dtype), random(5, 8, dtype=dtype), random(5, dtype=torch.float32)
    ef.linear(x, weight, bias, epilogue=lambda accum, bias: ef.gelu(accum + bias), save=save).sum().backward()
    want = torch.autograd.grad(F.gelu(F.linear(x.double(), weight.double(), bias.double())).sum(), (x, weight, bias))
    for leaf, expected in zip((x, weight, bias), want, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        torch.testing.assert_close(
            leaf.grad, expected, atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps
        )


def test_autocast() -> None:
    x, weight, bias = (random(*shape, dtype=torch.float32) for shape in ((6, 8), (5, 8), (5,)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = ef.linear(x, weight, bias, epilogue=ef.gelu)
        theirs = F.gelu(F.linear(x, weight, bias))
    assert mine.dtype == theirs.dtype == torch.bfloat16
    mine.sum().backward()
    want = torch.autograd.grad(theirs.sum(), (x, weight, bias))
    for leaf, expected in zip((x, weight, bias), want, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        torch.testing.assert_close(leaf.grad, expected, atol=0.03, rtol=0.03)


# --- what autograd promises -------------------------------------------------------------------------------------------


def test_ties_are_shared_as_torch_shares_them() -> None:
    a = torch.tensor([[1.0], [1.0], [0.0]], requires_grad=True)
    b = torch.tensor([[2.0, 2.0, -1.0]], requires_grad=True)
    D, most = ef.gemm(a, b, epilogue="def epi(accum): D = relu(accum); most = amax(D); return D, most")
    (D.sum() + 3 * most).backward()
    mine = a.grad, b.grad
    relu = torch.relu(a @ b)
    for leaf, expected in zip(mine, torch.autograd.grad(relu.sum() + 3 * relu.amax(), (a, b)), strict=True):
        torch.testing.assert_close(leaf, expected)


@pytest.mark.parametrize("seed", range(4))
def test_the_largest_value_beside_a_reduction_is_found_again(seed: int) -> None:
    """It is compared with values that are computed a second time, and has to be one of them to the bit."""
    torch.manual_seed(seed)

    def epilogue(accum: Any) -> Any:
        return (accum - accum.amax(dim=-1, keepdim=True) * 0.2).amax(0)

    x, weight = (torch.randn(*shape, requires_grad=True) for shape in ((40, 16), (32, 16)))
    mine = torch.autograd.grad(ef.linear(x, weight, epilogue=epilogue).sum(), (x, weight))
    want = torch.autograd.grad(epilogue(x @ weight.t()).sum(), (x, weight))
    for gradient, expected in zip(mine, want, strict=True):
        torch.testing.assert_close(gradient, expected)


def test_an_output_nobody_uses_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = random(M, K), random(K, N)
    linear, _ = ef.gemm(a, b, epilogue="def epi(accum): D = accum * 2; Z = exp(accum); return D, Z", save="recompute")
    monkeypatch.setattr(backward.CallSite, "run", None)  # no product is launched
    linear.sum().backward()
    torch.testing.assert_close(a.grad, 2 * torch.ones(M, N, dtype=DOUBLE) @ b.detach().mT)


@pytest.mark.parametrize("save", ["auto", "recompute", "preactivation"])
def test_a_linear_epilogue_needs_no_product(save: str) -> None:
    x, weight, bias, residual = random(5, K), random(N, K), random(N), random(5, N)
    y = ef.linear(x, weight, bias, epilogue=lambda accum, C: 0.5 * accum + C, C=residual, save=save)
    saved = [value for value in y.grad_fn.saved_tensors if value is not None]
    assert len(saved) == 2
    assert all(any(value is one for one in (x, weight)) for value in saved)
    gradient = torch.ones_like(y)
    y.backward(gradient)
    assert [made.with_product for made in y.grad_fn.recorded.backwards.values()] == [None]
    assert residual.grad is gradient or torch.equal(residual.grad, gradient)
    torch.testing.assert_close(bias.grad, torch.full((N,), 2.5, dtype=DOUBLE))


def test_what_the_backward_needs_is_what_is_saved() -> None:
    weight = random(N, K).detach()
    x = random(M, K)
    y = ef.linear(x, weight, epilogue=ef.silu, save="preactivation")
    accum, saved = (value for value in y.grad_fn.saved_tensors if value is not None)
    assert accum.shape == (M, N)
    assert saved is weight, "and not x, which no gradient needs"


def test_a_number_that_was_captured_is_that_of_the_forward() -> None:
    scale = 2.0

    def scaled(accum: Any) -> Any:
        return ef.exp(accum * scale)

    a, b = random(M, K), random(K, N)
    y = ef.gemm(a, b, epilogue=scaled)
    want = torch.autograd.grad(torch.exp(a @ b * 2.0).sum(), a)
    scale = 5.0
    y.sum().backward()
    torch.testing.assert_close(a.grad, want[0])


def test_a_number_that_is_learnt_beside_one_that_was_captured() -> None:
    scale = 2.0
    a, b, alpha = random(M, K), random(K, N), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    ef.gemm(a, b, epilogue=lambda accum, alpha: accum * alpha * scale, alpha=alpha).sum().backward()
    torch.testing.assert_close(alpha.grad, (a @ b).sum() * scale)


def test_what_was_saved_and_then_changed_is_torchs_own_error() -> None:
    a, b, scale = random(M, K), random(K, N), random(N)
    y = ef.gemm(a, b, epilogue=lambda accum, s: ef.tanh(accum) * s, s=scale)
    with torch.no_grad():
        b.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_second_backward_is_torchs_own_error() -> None:
    y = ef.gemm(random(M, K), random(K, N), epilogue=ef.tanh)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_second_derivatives_are_refused_when_asked_for() -> None:
    a, b = random(M, K), random(K, N)
    (gradient,) = torch.autograd.grad(ef.gemm(a, b, epilogue=ef.tanh).sum(), a, create_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(torch.tanh(a @ b).sum(), a)[0])
    with pytest.raises(UnsupportedError, match="differentiated again"):
        gradient.sum().backward()


def test_masks_and_integers_have_no_gradient() -> None:
    a, b = random(M, K), random(K, N)
    made = ef.gemm(a, b, epilogue="def epi(accum): D = accum * 1.5; mask = accum > 0; return D, mask")
    assert made.D.requires_grad
    assert not made.mask.requires_grad
    rounded = ef.gemm(a, b, epilogue="lambda accum: accum", out_dtypes=torch.int32)
    assert not rounded.requires_grad


def test_an_operand_that_only_decides_has_no_gradient() -> None:
    a, b, limit = random(M, K), random(K, N), random(N)
    ef.gemm(a, b, epilogue=lambda accum, limit: ef.where(accum > limit, accum, 0.0), limit=limit).sum().backward()
    assert limit.grad is None
    assert a.grad is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_nothing_is_recorded(mode: Callable[[], Any]) -> None:
    a, b = random(M, K), random(K, N)
    with mode():
        assert not ef.gemm(a, b, epilogue=ef.tanh).requires_grad
    assert not ef.gemm(a.detach(), b.detach(), epilogue=ef.tanh).requires_grad


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "out": (
        lambda a, b: ef.gemm(a, b, out=torch.empty(M, N, dtype=DOUBLE)),
        "'D' is given, and it or an input requires",
    ),
    "accumulate": (
        lambda a, b: ef.gemm(a, b, out=torch.empty(M, N, dtype=DOUBLE), accumulate="D"),
        "'D' is accumulated, and an input requires grad",
    ),
    "print": (
        lambda a, b: ef.gemm(a, b, epilogue='def epi(accum): debug_print("{}", accum); D = accum; return D'),
        "debug_print is not supported where an input requires grad",
    ),
    "save": (lambda a, b: ef.gemm(a, b, save="nothing"), "save must be 'auto' or 'recompute' or 'preactivation'"),
    "wrong operand": (lambda a, b: ef.gemm(a, b, epilogue=softmax, bias=torch.ones(N + 1)), "bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, message = REFUSED[name]
    for _ in range(2):
        with pytest.raises(EpifuseError, match=message):
            call(random(M, K), random(K, N))


def test_hooks_and_accumulated_gradients() -> None:
    weight = torch.nn.Parameter(random(N, K).detach())
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    x = random(M, K).detach()
    for _ in range(2):
        ef.linear(x, weight, epilogue=ef.silu).sum().backward()
    assert len(seen) == 2
    torch.testing.assert_close(weight.grad, seen[0] + seen[1])


def test_checkpoints() -> None:
    x, weight = random(M, K), random(N, K)

    def block(x: Tensor) -> Any:
        return ef.linear(x, weight, epilogue=ef.gelu)

    made: Any = checkpoint(block, x, use_reentrant=False)
    made.sum().backward()
    for leaf, want in zip((x, weight), torch.autograd.grad(F.gelu(x @ weight.t()).sum(), (x, weight)), strict=True):
        torch.testing.assert_close(leaf.grad, want)


def test_integers_are_multiplied_and_scales_have_gradients() -> None:
    a, b = torch.randint(-9, 9, (M, K), dtype=torch.int8), torch.randint(-9, 9, (K, N), dtype=torch.int8)
    scale = random(N, dtype=torch.float32)
    D = ef.gemm(a, b, epilogue=lambda accum, scale: ef.tanh(accum * scale * 0.01), scale=scale)
    D.sum().backward()
    want = torch.autograd.grad(torch.tanh((a.int() @ b.int()) * scale * 0.01).sum(), scale)[0]
    torch.testing.assert_close(scale.grad, want)


HOSTED = {
    "a variance": "s = accum.var(dim=-1, keepdim=True); D = accum * s; m = accum.mean(); return D, m",
    "an extent": "D = square(accum) / accum.shape[-1]; m = mean(D); return D, m",
    "a root": "D = accum * (alpha * alpha + 1.0); m = mean(D); return D, m",
}


@pytest.mark.parametrize("save", ["auto", "preactivation", "recompute"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_sums_of_8_bits_are_stored_as_they_are(dtype: torch.dtype, save: str) -> None:
    """Where accum is stored, it does not become 8 bits: they saturate."""
    a, b = (torch.randint(-99, 99, (256, 256)).to(dtype) for _ in range(2))
    scales = [torch.full((256, 1), 1e-3, requires_grad=True) for _ in range(2)]
    ef.gemm(a, b, epilogue=lambda accum, s: ef.gelu(accum * s), s=scales[0], save=save).sum().backward()
    torch.nn.functional.gelu(a.float() @ b.float() * scales[1]).sum().backward()
    torch.testing.assert_close(scales[0].grad, scales[1].grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("save", ["auto", "preactivation", "recompute"])
def test_unscaled_sums_of_a_weight_of_8_bits_exceed_float16(save: str) -> None:
    x, weight = torch.full((8, 64), 50.0, dtype=torch.float16), torch.full((32, 64), 100, dtype=torch.int8)
    pair = [(x.clone().requires_grad_(), torch.full((32,), 1e-5, requires_grad=True)) for _ in range(2)]
    (own, scale), (wanted, other) = pair
    ef.linear(own, weight, epilogue=lambda accum, s: ef.gelu(accum * s), s=scale, save=save).sum().backward()
    torch.nn.functional.gelu(wanted.float() @ weight.t().float() * other).sum().backward()
    torch.testing.assert_close(own.grad, wanted.grad, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(scale.grad, other.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_an_output_of_8_bits_has_a_gradient_as_in_pytorch(dtype: torch.dtype) -> None:
    def quantised(accum: Any) -> Any:
        total, D = ef.sum(accum * accum), accum
        return D, total

    x, weights = torch.randn(8, 16), [torch.randn(16, 32, requires_grad=True)]
    weights.append(weights[0].detach().clone().requires_grad_())
    D, total = ef.gemm(x, weights[0], epilogue=quantised, out_dtypes={"D": dtype})
    product = x @ weights[1]
    assert D.requires_grad is product.to(dtype).requires_grad
    (D.float().sum() + total).backward()
    (product.to(dtype).float().sum() + (product * product).sum()).backward()
    torch.testing.assert_close(weights[0].grad, weights[1].grad)


@pytest.mark.parametrize("name", HOSTED)
@pytest.mark.parametrize("save", ["recompute", "preactivation", "auto"])
def test_numbers_of_the_host_in_both_passes(name: str, save: str) -> None:
    """The derivative computes numbers of its own, 1 / (M N), beside those that it takes from the epilogue."""
    given = {"alpha": 1.5} if "alpha" in HOSTED[name] else {}
    gradchecked(f"def epi({', '.join(['accum', *given])}): {HOSTED[name]}", save=save, **given)


DECIDED = {
    "the product at 0": ("cap * torch.tanh(accum / cap) if cap > 0 else accum", {"cap": 0.0}),
    "a root of negative values": ("accum ** 0.5 if cap == 0.5 else torch.sin(accum)", {"cap": 1.0}),
    "an operand with zeros": ("accum * scale if cap > 1 else accum / scale", {"cap": 3.0}),
    "an operand of that side alone": ("accum / scale if cap > 1 else accum * 2", {"cap": 0.0}),
    "one within another": ("(torch.sqrt(accum) if cap > 1 else accum.log()) * 2 if cap > 0 else accum", {"cap": 0.0}),
}


@pytest.mark.parametrize("name", DECIDED)
@pytest.mark.parametrize("save", ["recompute", "preactivation", "auto"])
def test_a_side_that_is_not_taken_has_no_gradient(name: str, save: str) -> None:
    """Of which the derivative may be infinite."""
    expression, given = DECIDED[name]
    scale = random(N).detach()
    scale[2] = 0.0
    operands = {"scale": scale.requires_grad_()} if "scale" in expression else {}
    function = function_from(f"def epi({', '.join(['accum', *given, *operands])}): return {expression}", torch=torch)
    a, b = random(M, K), random(K, N)
    leaves = [a, b, *operands.values()]
    found = ef.gemm(a, b, epilogue=function, save=save, **given, **operands)
    want = function(a @ b, **given, **operands)
    torch.testing.assert_close(found, want)
    got, wanted = (
        torch.autograd.grad(value.square().sum(), leaves, allow_unused=True, materialize_grads=True)
        for value in (found, want)
    )
    torch.testing.assert_close(got, wanted)


SIZED = {
    "mean of a column": "def epi(accum): D = accum * accum - mean(accum, dim=0); return D",
    "mean of all": "def epi(accum): D = mean(silu(accum)) + mean(accum * accum, dim=-1, keepdim=True); return D",
    "softmax of columns": "def epi(accum): D = softmax(accum, dim=0); return D",
    "coordinates": "def epi(accum): D = accum * accum * index_m(accum) + index_n(accum); return D",
    "elements counted": "def epi(accum): D = accum * accum * linear_index(accum); return D",
    "dropout": "def epi(accum): D = dropout(accum * accum, 0.5, 7); return D",
}
CUT = {
    "halves": "def epi(accum): g, u = accum.chunk(2, -1); D = silu(g) * u; return D",
    "heads": "def epi(accum): h = accum.unflatten(-1, (2, 3)); D = (h * h.mean(-1, True) * h).flatten(-2); return D",
    "pairs": "def epi(accum): D = silu(accum[..., 0::2]) * accum[..., 1::2]; return D",
    "rotated": "def epi(accum): g, u = accum.chunk(2, -1); D = torch.cat((-u, g), dim=-1) * accum; return D",
    "blocks of a half": "def epi(accum): g, u = accum.chunk(2, -1); D = (g * u).unflatten(-1, (1, 3)) * 2; return D",
    "halves of heads": (
        "def epi(accum): h = accum.unflatten(-1, (1, 6)); x, y = h.chunk(2, -1); "
        "D = (h * h + torch.cat((-y, x), -1)).flatten(-2); return D"
    ),
    "norm of a half": (
        "def epi(accum): g, u = accum.chunk(2, -1); h = silu(g) * u; "
        "D = h * rsqrt((h * h).mean(-1, True) + 1.0); return D"
    ),
}


@pytest.mark.parametrize("name", [*SIZED, *CUT])
@pytest.mark.parametrize("save", ["recompute", "preactivation"])
def test_other_extents_have_the_derivative_that_was_traced(
    name: str, save: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what cuts columns those of other rows."""
    text, sizes = (SIZED[name], (5, 5, 8, 7)) if name in SIZED else (CUT[name], (6, 6, 6, 6))
    for rows, columns in zip((9, 10, 3, 12), sizes, strict=True):
        gradchecked(text, random(rows, K), random(K, columns), save=save)
        monkeypatch.setattr(derivative, "derive", None)  # nothing is traced again


def biased_gate(accum: Any, bias: Any) -> Any:
    gate, up = (accum + bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def rotated_parts(accum: Any, bias: Any) -> Any:
    q, k = accum.split((8, 4), dim=-1)
    heads = q.unflatten(-1, (2, 4))
    normed = heads * torch.rsqrt((heads * heads).mean(-1, keepdim=True) + 1.0)
    x, y = normed.chunk(2, dim=-1)
    first, second = torch.cat((-y, x), dim=-1) * bias[:4], k * k
    return first, second


@pytest.mark.filterwarnings("ignore:PyTorch runs the derivative")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("function", [biased_gate, rotated_parts])
def test_parts_of_other_rows_are_not_traced_again(
    function: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in (20, 21, 24, 36, 7):
        x, bias = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((rows, K), (12,)))
        b = torch.randn(K, 12, dtype=dtype)
        found, want = ef.gemm(x, b, epilogue=function, bias=bias), function((x @ b).float(), bias)
        pairs = [*zip(found, want, strict=True)] if isinstance(want, tuple) else [(found, want)]
        gradients = [
            torch.autograd.grad(sum(pair[side].float().square().sum() for pair in pairs), (x, bias)) for side in (0, 1)
        ]
        for one, other in zip(*gradients, strict=True):
            assert (one - other).float().norm() < (3e-2 if dtype == torch.bfloat16 else 1e-4) * other.float().norm()
        monkeypatch.setattr(derivative, "derive", None)  # nothing is traced again


def turned_heads(accum: Any, cos: Any, scale: Any) -> Any:
    heads = accum.unflatten(-1, (-1, 4))
    x, y = heads.chunk(2, dim=-1)
    return ((heads * cos + torch.cat((-y, x), dim=-1)) * scale).flatten(-2)


@pytest.mark.parametrize("lead", [(), (1,), (2,)])
def test_operands_of_fewer_batches_are_not_traced_again(lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in (20, 21, 36):
        x, cos, scale = random(2, rows, K), random(*lead, rows, 1, 4), random(*lead, rows, 1, 1)
        b, inputs = random(K, 12), (x, cos, scale)
        found = torch.autograd.grad(ef.gemm(x, b, epilogue=turned_heads, cos=cos, scale=scale).sum(), inputs)
        torch.testing.assert_close(found, torch.autograd.grad(turned_heads(x @ b, cos, scale).sum(), inputs))
        monkeypatch.setattr(derivative, "derive", None)  # nothing is traced again


def loss(accum: Any, labels: Any) -> Any:
    return F.cross_entropy(accum, labels, ignore_index=1, label_smoothing=0.1)


def counted(accum: Any) -> Any:
    return accum.sum(-1) * torch.ones_like(accum).sum()


def test_a_loss_of_other_rows_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    w = random(5, K)
    for rows in (9, 10, 3, 12):
        x, labels = random(rows, K), torch.arange(rows) % 5
        D = ef.linear(x, w, epilogue=loss, labels=labels)
        want = torch.autograd.grad(loss(x @ w.t(), labels), (x, w))
        for found, wanted in zip(torch.autograd.grad(D, (x, w)), want, strict=True):
            torch.testing.assert_close(found, wanted)
        monkeypatch.setattr(derivative, "derive", None)  # nothing is traced again


def test_the_number_of_equal_values_is_that_of_each_size() -> None:
    b = random(K, 5)
    for rows, columns in ((9, 5), (4, 5), (9, 3), (9, 5)):
        a, own = random(rows, K), b[:, :columns]
        torch.testing.assert_close(ef.gemm(a, own, epilogue=counted), counted(a @ own))


@pytest.mark.parametrize("shape", [(1, 6), (6, 6), (6, 1), (0, 6), (2, 12)])
def test_extents_that_are_one_or_equal_have_their_own(shape: tuple[int, int]) -> None:
    rows, columns = shape
    for name in ("mean of a column", "mean of all", "coordinates"):
        gradchecked(SIZED[name], random(7, K), random(K, 6))
        gradchecked(SIZED[name], random(rows, K), random(K, columns))


def test_a_reshape_has_the_derivative_of_its_extents() -> None:
    text = "def epi(accum): D = permute(reshape(tanh(accum), (-1, 2, 3)), (1, 0, 2)); return D"
    for rows in (4, 6, 4):
        gradchecked(text, random(rows, K))


def test_a_flattened_square_has_a_derivative() -> None:
    """Where M = N, what PyTorch says of its size is a quotient of symbols, and no polynomial."""
    text = "def epi(accum): D = reshape(tanh(accum), (-1,)); return D"
    for rows in (4, 5, 6):
        gradchecked(text, random(2, rows, K), random(K, rows))


def test_unfused_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epifuse.providers.NAMES", ())
    a, b = random(M, K + 4), random(K + 4, N)
    with pytest.warns(UserWarning, match="PyTorch runs it unfused"):
        y = ef.gemm(a, b, epilogue=ef.tanh, fallback="torch")
    with pytest.warns(UserWarning, match="unfused"):
        y.sum().backward()
    torch.testing.assert_close(a.grad, torch.autograd.grad(torch.tanh(a @ b).sum(), a)[0])


def test_fake_tensors_are_differentiable() -> None:
    with FakeTensorMode():
        y = ef.gemm(torch.ones(M, K, requires_grad=True), torch.ones(K, N), epilogue=ef.tanh)
    assert y.shape == (M, N)
    assert y.requires_grad


# --- how the product comes back ---------------------------------------------------------------------------------------


def test_an_unfusable_derivative_runs_in_pytorch_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = random(M, K), random(K, N)
    y = ef.gemm(a, b, epilogue=lambda accum: ef.tanh(accum) * 3.0, save="recompute")

    launched = backward.CallSite.run

    def refuse(place: backward.CallSite, tensors: Any, numbers: Any) -> Any:
        if place.names:
            raise fail("no_kernel", Loc(GRAPH_FILE, 1, 0, 3, "mul"), reasons="no kernel today", hint="pass another")
        return launched(place, tensors, numbers)

    monkeypatch.setattr(backward.CallSite, "run", refuse)
    with pytest.warns(UserWarning, match=r"(?s)unfused, one operation at a time: .*no kernel today$"):
        y.sum().backward()  # without a place and a hint, which speak of what no person wrote
    torch.testing.assert_close(a.grad, torch.autograd.grad((torch.tanh(a @ b) * 3.0).sum(), a)[0])


def projection(accum: Any, weight: Any) -> Any:
    q, k = accum.split((4, 2), dim=-1)  # no equal parts, so the derivative is no epilogue
    first, second = torch.tanh(q) * weight, k * k
    return first, second


def of_projection(m: int, dtype: torch.dtype = DOUBLE) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients, and what they are to be."""
    inputs = a, b, weight = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((m, K), (K, 6), (4,))]
    arriving = [torch.randn(m, n, dtype=dtype) for n in (4, 2)]
    want = torch.autograd.grad(projection(a @ b, weight), inputs, arriving)
    return [*torch.autograd.grad([*ef.gemm(a, b, epilogue=projection, weight=weight)], inputs, arriving)], [*want]


@pytest.fixture
def with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, and nothing was warned of."""
    forget()
    monkeypatch.setattr(storing, "_COMPILED_ON", ("cpu", "cuda"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, as it imports its compiler
def test_inductor_compiles_what_no_kernel_computes(with_inductor: None) -> None:
    from torch._dynamo.utils import counters

    graphs = counters["stats"]["unique_graphs"]
    with pytest.warns(UserWarning, match="unfused, compiled by Inductor: a part of a row"):
        judged = [of_projection(5)]
    judged += [of_projection(m) for m in (7, 9, 11)]  # a warning is an error: it was told
    assert counters["stats"]["unique_graphs"] <= graphs + 2  # for one number of rows, and for any
    for found, want in judged:
        torch.testing.assert_close(found, want)


def test_without_inductor_it_runs_one_by_one(with_inductor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler here\nat all")

    monkeypatch.setattr(torch, "compile", fails)
    told = pytest.warns(UserWarning, match="Inductor compiles no derivative, .*: no compiler here$")
    with pytest.warns(UserWarning, match="unfused, compiled by Inductor"), told:
        found, want = of_projection(4, torch.float32)  # of which nobody compiled the derivative
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize(("k", "stored"), [(12, False), (8192, True)])
def test_a_long_product_is_stored_and_a_short_one_recomputed(k: int, stored: bool) -> None:
    a, b = torch.zeros(8, k, requires_grad=True), torch.zeros(k, 16)
    y = ef.gemm(a, b, epilogue=ef.gelu)
    assert any(value is not None and value.shape == (8, 16) for value in y.grad_fn.saved_tensors) == stored


def loss_of_merged_rows(accum: Any, labels: Any) -> Any:
    return F.cross_entropy(accum.flatten(0, -2), labels)


@pytest.mark.parametrize(("l", "m", "n"), [(2, 5, 7), (1, 10, 7), (5, 2, 10), (3, 3, 9)])
def test_labels_of_merged_rows_have_one_dim(l: int, m: int, n: int) -> None:
    """Their extent is the product of two, and in some of these an extent of its own too."""
    x, w, labels = random(l, m, K), random(n, K), torch.arange(l * m) % n
    found = torch.autograd.grad(ef.linear(x, w, epilogue=loss_of_merged_rows, labels=labels), (x, w))
    want = torch.autograd.grad(loss_of_merged_rows(F.linear(x, w), labels), (x, w))
    torch.testing.assert_close(found, want)


def in_heads_and_beside(accum: Any, scale: Any) -> Any:
    q, k, v = accum.split((8, 4, 4), dim=-1)  # no equal parts, so the derivative is no epilogue
    first = (q.unflatten(-1, (-1, 4)) * scale).flatten(-2)
    second = (k.unflatten(-1, (-1, 4)) * scale).flatten(-2)
    return first, second, v


@pytest.mark.filterwarnings("ignore:PyTorch runs the derivative of in_heads_and_beside unfused")
def test_what_pytorch_derives_stores_no_product_in_vain() -> None:
    a, b, scale = random(8, 8192), random(8192, 16), torch.rand(8, 1, 4, dtype=torch.float64)
    for _ in range(2):  # what a refusal in the first backward changes, the second call does
        found = ef.gemm(a, b, epilogue=in_heads_and_beside, scale=scale)
        assert all(value is None or value.shape != (8, 16) for value in found[0].grad_fn.saved_tensors)
        want = in_heads_and_beside(a @ b, scale)
        gradients = [torch.autograd.grad(sum(x.square().sum() for x in each), a) for each in (found, want)]
        torch.testing.assert_close(*gradients)


def value_and_mean(accum: Any, other: Any) -> Any:
    value = accum + other
    mean = value.mean()
    return value, mean


@pytest.mark.parametrize("save", ["auto", "recompute", "preactivation"])
@pytest.mark.parametrize("shape", [(N,), (M, N), (M, 1)])
def test_extents_are_asked_of_no_tensor(shape: tuple[int, ...], save: str) -> None:
    """Which is why none is saved for its extents: it may change, and the gradient of another output needs no other."""
    a, b, other = random(M, K), random(K, N), random(*shape)
    wanted = a, other
    _, mean = ef.gemm(a, b, epilogue=value_and_mean, other=other, save=save)
    expected = torch.autograd.grad(value_and_mean(a @ b, other)[1], wanted)
    with torch.no_grad():
        other.mul_(2)
    torch.testing.assert_close(torch.autograd.grad(mean, wanted), expected)


@pytest.mark.parametrize("save", ["auto", "recompute", "preactivation"])
def test_many_gradients_of_batches_at_once(save: str) -> None:
    a, b = random(2, M, K), random(K, N)
    y, want = ef.gemm(a, b, epilogue=ef.silu, save=save), F.silu(a @ b)
    arriving = torch.randn(3, *y.shape, dtype=DOUBLE)
    found = torch.autograd.grad(y, (a, b), arriving, is_grads_batched=True)
    torch.testing.assert_close(found, torch.autograd.grad(want, (a, b), arriving, is_grads_batched=True))


@pytest.mark.parametrize("save", ["auto", "recompute", "preactivation"])
def test_many_gradients_at_once(save: str) -> None:
    a, weight = random(M, K), random(3)
    b = random(K, 6)

    def normed(accum: Any, weight: Any) -> Any:
        heads = accum.unflatten(-1, (-1, 3))
        return (heads / (1 + (heads * heads).mean(-1, keepdim=True)) * weight).flatten(-2)

    arriving = torch.randn(4, M, 6, dtype=DOUBLE)
    found = torch.autograd.grad(
        ef.gemm(a, b, epilogue=normed, weight=weight, save=save), (a, weight), arriving, is_grads_batched=True
    )
    expected = torch.autograd.grad(normed(a @ b, weight), (a, weight), arriving, is_grads_batched=True)
    torch.testing.assert_close(found, expected)


def test_sums_of_16_bits_have_gradients_in_a_launch() -> None:
    a, b = (torch.randn(4, 4, dtype=torch.float16, requires_grad=True) for _ in range(2))
    y = ef.gemm(a, b, epilogue=ef.silu, accumulator_type=torch.float16, save="preactivation")  # a warning is an error
    expected = torch.autograd.grad(torch.nn.functional.silu(a.float() @ b.float()).sum(), a)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), a), expected, rtol=2e-2, atol=2e-2)


def test_a_column_of_one_head_serves_all_rows() -> None:
    def spread(accum: Any, column: Any) -> Any:
        return (accum.unflatten(-1, (-1, 8)).tanh() * column).flatten(-2)

    for m in (5, 1, 7):  # in the language for all of them: a warning is an error here
        a, b, column = random(m, K), random(K, 8), random(m, 1, 1)
        found = torch.autograd.grad(ef.gemm(a, b, epilogue=spread, column=column).sum(), column)
        torch.testing.assert_close(found, torch.autograd.grad(spread(a @ b, column).sum(), column))


# --- derivatives on a GPU ---------------------------------------------------------------------------------------------


def described(m: int, n: int, k: int, epilogue: Any, operands: dict[str, Tensor]) -> Settled:
    """A product in bfloat16."""
    from epifuse.frontend import parsed

    a, b = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16).t()
    return settle(with_care(Request(a, b, parsed(epilogue), operands, Options(None))))


def derived(
    epilogue: Any, m: int, n: int, k: int, *, of_operands: bool = True, **operands: Tensor
) -> tuple[Derivative, dict[str, Tensor]]:
    """The derivative of all that is a float but no angle, or of the product alone, and what it is handed."""
    settled = described(m, n, k, epilogue, operands)
    names = tuple(name for name, dtype in settled.problem.dtypes if dtype in autograd.FLOATS)
    learnt = [name for name, value in operands.items() if value.is_floating_point() and name not in FIXED]
    wanted = tuple(learnt if of_operands else ())
    made = derive(settled, (autograd.ACCUM, *wanted), names)
    known = inputs_of(settled, names, settled.problem.extents)
    handed = {each.name: torch.empty(each.shape, dtype=each.dtype) for each in known if each.name in made.inputs}
    counts = dict.fromkeys(made.extents, 512.0)
    return made, {n: operands.get(n, value) for n, value in {**handed, **counts}.items() if n != autograd.ACCUM}


def row(n: int) -> Tensor:
    return torch.empty(n, dtype=torch.bfloat16)


JOINED = {
    "halves of heads": (
        "def epi(accum): h = accum.unflatten(-1, (4, 128)); x, y = h.chunk(2, -1); "
        "D = (h * h + cat((-y, x), -1)).flatten(-2); return D"
    ),
    "pairs": (
        "def epi(accum): x, y = accum[..., 0::2], accum[..., 1::2]; D = stack([x * y, x * x], -1).flatten(-2); return D"
    ),
    "parts of parts": (
        "def epi(accum): x, y = accum.chunk(2, -1); a, b = x.chunk(2, -1); c, d = y.chunk(2, -1); "
        "D = cat([a * d, b * c], -1); return D"
    ),
}


ON_HOPPER = {
    "gelu, bias, residual": (gelu_residual, 512, {"bias": row(512), "residual": torch.empty(512, 512)}),
    "gate": (silu_gate, 512, {"gate": torch.empty(512, 512, dtype=torch.bfloat16)}),
    "softmax": (softmax, 256, {"bias": row(256)}),
    "layer norm": (layer_norm, 256, {"weight": row(256), "bias": row(256)}),
    "log softmax": (log_softmax, 256, {"scale": torch.empty(1)}),
    "maxima": ("def epi(accum): D = relu(accum); most = amax(D, dim=-1); return D, most", 256, {}),
    **{name: (JOINED[name], 512, {}) for name in ("halves of heads", "pairs")},
    "norms of heads": (
        "def epi(accum, w): h = accum.unflatten(-1, (-1, 128)); r = rsqrt((h * h).mean(-1, True)); return h * r * w",
        512,
        {"w": row(128)},
    ),
}


@pytest.mark.parametrize("name", ON_HOPPER)
def test_derivatives_are_planned_on_hopper(name: str) -> None:
    epilogue, n, operands = ON_HOPPER[name]
    derivative, given = derived(epilogue, 512, n, 256, **operands)
    assert derivative.without_product is not None, derivative.refused
    a, b = torch.empty(512, 256, dtype=torch.bfloat16), torch.empty(n, 256, dtype=torch.bfloat16).t()
    stored = {autograd.ACCUM: torch.empty(512, n, dtype=torch.bfloat16)}
    columns_by_heads = {"result 1": (0,)} if name == "norms of heads" else {}
    assert derivative.unsummed_dims == columns_by_heads
    for epilogue, operands in ((derivative.with_product, given), (derivative.without_product, {**given, **stored})):
        args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(epilogue, operands))
        assert ef.get_kernels(args, cc=90), ef.explain(args, cc=90)


ROTATED = "x, y = h.chunk(2, -1); D = (h * cos + cat((-y, x), -1) * sin).flatten(-2); return D"
HEADS = "z = accum.unflatten(-1, (-1, 128))"
ANGLES = {name: torch.empty(512, 1, 128, dtype=torch.bfloat16) for name in ("cos", "sin")}
FIXED = (*ANGLES, "u", "v")
PAIRS = "accum.unflatten(-1, (-1, 64, 2))"
IN_TILES = {
    "rotary": (f"def epi(accum, cos, sin): {HEADS}; h = z * 1; {ROTATED}", ANGLES, False),
    "rotary of pairs": (
        f"def epi(accum, u, v): x, y = {PAIRS}.unbind(-1); D = stack((x * u - y * v, x * v + y * u), -1); return D",
        {name: torch.empty(512, 1, 64, dtype=torch.bfloat16) for name in "uv"},
        False,
    ),
    "rotary behind a bias": (
        f"def epi(accum, w, cos, sin): h = (accum + w).unflatten(-1, (-1, 128)); {ROTATED}",
        {"w": row(4096), **ANGLES},
        True,
    ),
    "rotary of norms": (
        f"def epi(accum, w, cos, sin): {HEADS}; h = z * rsqrt((z * z).mean(-1, True)) * w; {ROTATED}",
        {"w": row(128), **ANGLES},
        True,
    ),
    "a gate of half the columns": (
        "def epi(accum, w): x, y = accum.chunk(2, -1); return silu(x) * y * w",
        {"w": torch.empty(512, 2048, dtype=torch.bfloat16)},
        True,
    ),
    "a gate of heads": (
        "def epi(accum, w): return accum.unflatten(-1, (-1, 128)) * sigmoid(w)",
        {"w": torch.empty(512, 32, 1, dtype=torch.bfloat16)},
        True,
    ),
    "a column": (
        "def epi(accum, w): return tanh(accum) * w.unsqueeze(1)",
        {"w": torch.empty(512, dtype=torch.bfloat16)},
        True,
    ),
}


@pytest.mark.parametrize("name", IN_TILES)
def test_what_each_tile_reads_again_is_left_to_inductor(name: str) -> None:
    """Unless the derivative reduces: the launch is then the faster one."""
    epilogue, operands, pays = IN_TILES[name]
    derivative, _ = derived(epilogue, 512, 4096, 64, **operands)
    problem = described(512, 4096, 64, epilogue, operands).problem
    assert derivative.traffic.pays_at_once(problem)
    assert derivative.traffic.suits_inductor is not pays


@pytest.mark.parametrize("name", JOINED)
def test_the_gradient_of_a_part_is_no_sum(name: str) -> None:
    derivative, _ = derived(JOINED[name], 512, 512, 256)
    assert derivative.without_product is not None, derivative.refused
    assert derivative.without_product.graph.ops.isdisjoint(("reduce_dims", "reduce_axes"))
    assert all(node.target is not torch.ops.aten.sum.dim_IntList for node in derivative.module.graph.nodes)


# --- ties, bounds and what no product reaches ------------------------------------------------------------------------

BOUND = 1.5


def clamped(accum: Any) -> Any:
    return accum.clamp_min(-0.5) + accum.clamp(max=BOUND) * 2 + torch.clamp_max(accum, 2)


def spread(accum: Any, row: Any) -> Any:
    return (accum.std(-1, keepdim=True) + accum.std(-1, keepdim=True, unbiased=False)) * row


@pytest.mark.parametrize("epilogue", [clamped, spread])
def test_at_bounds_and_equal_elements_as_pytorch(epilogue: Any) -> None:
    values = torch.tensor([[-0.5, 1.5, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    given = {"row": torch.tensor([1.0, -2.0, 3.0, 0.5])} if epilogue is spread else {}
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    ef.gemm(ours, torch.eye(4), epilogue=epilogue, **given).sum().backward()
    epilogue(theirs, **given).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_step_of_lerp_may_be_infinite() -> None:
    values = torch.tensor([[1.0, float("-inf"), 0.5, 0.5, 0.2, 0.7]], dtype=DOUBLE)

    def stepped(accum: Any) -> Any:
        x, end, weight = accum.chunk(3, -1)
        return torch.lerp(x, end, weight)

    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    ef.gemm(
        torch.zeros(1, 2, dtype=DOUBLE), torch.zeros(2, 6, dtype=DOUBLE), C=ours, epilogue=_of_sum(stepped)
    ).sum().backward()
    stepped(theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def _of_sum(function: Any) -> Any:
    def added(accum: Any, C: Any) -> Any:
        return function(accum + C)

    return added


def ones_beside(accum: Any) -> Any:
    places = torch.argmax(accum, dim=-1)
    ones = torch.zeros_like(places) + 1
    D = accum * 2
    return D, ones


def an_element(accum: Any, row: Any) -> Any:
    return row[..., 2]


@pytest.mark.filterwarnings("ignore:PyTorch runs the derivative")
def test_outputs_that_no_product_reaches() -> None:
    a, b, row = random(M, K), random(K, N), random(N)
    D, ones = ef.gemm(a, b, epilogue=ones_beside)
    D.sum().backward()
    assert ones.tolist() == [1] * M
    assert a.grad is not None
    ef.gemm(a, b, epilogue=an_element, row=row).backward()
    assert row.grad is not None
    assert row.grad.tolist() == [0, 0, 1, 0, 0, 0]


def test_the_gate_of_a_layer_that_is_then_evaluated() -> None:
    """torch.tanh takes a tensor of no dims in both, though without a gradient others of such are numbers."""

    def gated(accum: Any, gate: Any) -> Any:
        return torch.tanh(gate) * accum * gate.exp()

    a, b, gate = torch.randn(5, 7), torch.randn(7, 16), torch.nn.Parameter(torch.tensor(0.2))
    want = gated(a @ b, gate)
    for given in (gate, gate.reshape(1)):
        torch.testing.assert_close(ef.gemm(a, b, epilogue=gated, gate=given), want)
    with torch.no_grad():
        for given in (gate, gate.reshape(1)):
            torch.testing.assert_close(ef.gemm(a, b, epilogue=gated, gate=given), want)


def test_a_derivative_with_mutations_is_of_any_layout() -> None:
    def largest(accum: Any, p: Any, q: Any) -> Any:
        return accum * torch.maximum(p.reshape(16, 8), (q * 2).T).T

    a, b = torch.randn(8, 3), torch.randn(3, 16)
    p, q = torch.randn(128, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    got = torch.autograd.grad(ef.gemm(a, b, epilogue=largest, p=p, q=q).square().sum(), (p, q))
    torch.testing.assert_close(got, torch.autograd.grad(largest(a @ b, p, q).square().sum(), (p, q)))


def summed(accum: Any, C: Any, E: Any) -> Any:
    D = torch.relu(accum + C + E)
    return D


@pytest.mark.parametrize("lead", [(6,), (2, 3), (2, 3, 4)], ids=str)
def test_gradients_of_leaves_have_memory_of_their_own(lead: tuple[int, ...]) -> None:
    """A leaf takes over its first gradient, and adds the next ones to it in place."""
    x, w = torch.randn(*lead, 4), torch.randn(16, 4)
    given = [torch.randn(*lead, 16, requires_grad=True) for _ in range(2)]
    beside = [leaf.detach().clone().requires_grad_() for leaf in given]
    for _ in range(3):
        ef.linear(x, w, epilogue=summed, C=given[0], E=given[1]).sum().backward()
        summed(x @ w.t(), *beside).sum().backward()
    for leaf, other in zip(given, beside, strict=True):
        torch.testing.assert_close(leaf.grad, other.grad)
    arriving, residual = torch.ones(*lead, 16), torch.randn(*lead, 16, requires_grad=True)
    for _ in range(3):
        ef.linear(x, w, epilogue="lambda accum, C: accum + C", C=residual).backward(arriving)
    assert residual.grad is not None
    assert torch.equal(residual.grad, torch.full_like(arriving, 3))
    assert torch.equal(arriving, torch.ones_like(arriving))


def test_the_gradient_of_a_residual_is_not_copied() -> None:
    """It is what arrives, where the residual is no leaf that would add to it in place."""
    x, w, arriving = torch.randn(2, 3, 4), torch.randn(16, 4), torch.randn(2, 3, 16)
    residual, found = torch.randn(2, 3, 16, requires_grad=True) * 2, []
    residual.register_hook(lambda gradient: found.append(gradient.data_ptr()))
    ef.linear(x, w, epilogue="lambda accum, C: accum + C", C=residual).backward(arriving)
    assert found == [arriving.data_ptr()]


def test_a_leaf_and_another_operand_of_a_sum() -> None:
    """The leaf's gradient is its own, whichever of the two comes first."""
    x, w = torch.randn(2, 3, 4), torch.randn(16, 4)
    leaf, source = (torch.randn(2, 3, 16, requires_grad=True) for _ in range(2))
    for names in ("CE", "EC"):
        leaf.grad = source.grad = None
        for _ in range(2):
            given = dict(zip(names, (leaf, source * 2), strict=True))
            ef.linear(x, w, epilogue="lambda accum, C, E: accum + C + E", **given).sum().backward()
        assert torch.equal(leaf.grad, torch.full_like(leaf, 2))
        assert torch.equal(source.grad, torch.full_like(leaf, 4))


LOSSES = {
    "rounded": "accum.bfloat16().float().mean() + accum.half().logsumexp(-1).mean()",
    "cross-entropy": "F.cross_entropy(accum, y, label_smoothing=0.1, ignore_index=3)",
    "of a rounded value": "F.cross_entropy(accum.bfloat16().float(), y, reduction='sum') / 8.0",
    "log-probabilities": "(torch.exp(F.log_softmax(accum, dim=-1).gather(-1, y[:, None])) * w).mean()",
}


@pytest.mark.parametrize("save", ["recompute", "preactivation"])
@pytest.mark.parametrize("name", LOSSES)
def test_one_number_has_pytorchs_gradient(name: str, save: str) -> None:
    body = LOSSES[name]
    given = {"y": torch.arange(M) % N, "w": random(M, 1).float()}
    used = {key: value for key, value in given.items() if re.search(rf"\b{key}\b", body)}
    a, b = random(M, K).float().detach().requires_grad_(), random(K, N).float().detach()
    text = f"def epi({', '.join(['accum', *used])}):\n    D = {body}\n    return D"
    (found,) = torch.autograd.grad(ef.gemm(a, b, epilogue=text, operands=used, save=save), a)
    (want,) = torch.autograd.grad(eval(body, {**used, "accum": a @ b, "F": F, "torch": torch}), a)
    torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-3)
