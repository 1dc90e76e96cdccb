"""Every built-in fusion against its formula in PyTorch, and as printed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import epifuse as ef
from epifuse.forms.evt import Compute, Visitor, functional, fusion
from epifuse.tools.testing import assert_close_to_reference
from tests.evt.helpers import product

M, N, K = 40, 56, 24
FP8 = torch.float8_e4m3fn


class Case(NamedTuple):
    """A fusion, its formula, the operands of both, and the dtypes of outputs that are not float32."""

    tree: Visitor
    formula: Callable[..., Any]
    operands: str
    dtypes: dict[str, torch.dtype] = {}  # noqa: RUF012 - read only


def linear(accum: Any, C: Any, alpha: Any, beta: Any) -> Any:
    return alpha * accum + beta * C


def with_aux(activation: Callable[..., Any]) -> Callable[..., Any]:
    def formula(accum: Any, C: Any, alpha: Any, beta: Any, bias: Any) -> Any:
        aux = linear(accum, C, alpha, beta) + bias
        return activation(aux), aux

    return formula


def with_mask(accum: Any, C: Any, alpha: Any, beta: Any, bias: Any) -> Any:
    aux = linear(accum, C, alpha, beta) + bias
    return F.relu(aux), aux >= 0


def scaled(accum: Any, C: Any, alpha: Any, beta: Any, bias: Any, scale_a: Any, scale_b: Any, scale_c: Any) -> Any:
    return scale_a * scale_b * alpha * accum + beta * scale_c * C + bias


def scaled_fp8(accum: Any, scale_d: Any, **operands: Any) -> Any:
    return scale_d * F.relu(scaled(accum, **operands))


def amax_aux(accum: Any, scale_d: Any, scale_aux: Any, **operands: Any) -> Any:
    z = scaled(accum, **operands)
    d = F.relu(z)
    return scale_d * d, d.abs().amax(), z.abs().amax(), scale_aux * z


def amax_without(accum: Any, **operands: Any) -> Any:
    z = scaled(accum, **operands)
    return F.relu(z), z


def top_k(k: int) -> Callable[..., Any]:
    def formula(accum: Any, **operands: Any) -> Any:
        x = linear(accum, **operands)
        limit = torch.topk(torch.as_tensor(x).as_subclass(torch.Tensor), k, dim=-1).values[:, -1:]
        kept = torch.where(x >= limit, torch.exp(x - x.amax(-1, True)), 0.0)
        return kept / kept.sum(-1, True)

    return formula


def drelu(accum: Any, aux: Any, **operands: Any) -> Any:
    return torch.where(aux > 0, linear(accum, **operands), 0.0)


def gelu(x: Any) -> Any:
    """Written out: the reference must know how much 1 + erf cancels."""
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


def dgelu(accum: Any, aux: Any, **operands: Any) -> Any:
    inner = 0.5 * (1 + torch.erf(aux * 0.5**0.5)) + aux * torch.exp(-0.5 * aux * aux) * (2 * torch.pi) ** -0.5
    return linear(accum, **operands) * inner


def with_dbias(accum: Any, **operands: Any) -> Any:
    d = drelu(accum, **operands)
    return d, d.sum(-1)


LINEAR, SCALES = "C alpha beta", "scale_a scale_b scale_c"
SCALED = f"{LINEAR} {SCALES}"
CASES: dict[str, Case] = {
    "ScaledAcc": Case(fusion.ScaledAcc(), lambda accum, alpha: alpha * accum, "alpha"),
    "LinearCombination": Case(fusion.LinearCombination(), linear, LINEAR),
    "LinCombEltAct": Case(
        fusion.LinCombEltAct(functional.ReLU), lambda accum, **named: F.relu(linear(accum, **named)), LINEAR
    ),
    "LinCombEltAct, clamp": Case(
        fusion.LinCombEltAct(functional.Clamp),
        lambda accum, lower_bound, upper_bound, **named: linear(accum, **named).clamp(lower_bound, upper_bound),
        f"{LINEAR} lower_bound upper_bound",
    ),
    "LinCombEltAct, leaky relu": Case(
        fusion.LinCombEltAct(functional.LeakyReLU),
        lambda accum, leaky_alpha, **named: F.leaky_relu(linear(accum, **named), leaky_alpha),
        f"{LINEAR} leaky_alpha",
    ),
    "LinCombEltAct, threshold": Case(
        fusion.LinCombEltAct(functional.ThresholdReLU),
        lambda accum, threshold, upper_bound, **named: torch.minimum(
            torch.where(linear(accum, **named) <= threshold, 0.0, linear(accum, **named)), torch.tensor(upper_bound)
        ),
        f"{LINEAR} threshold upper_bound",
    ),
    "LinCombEltAct, literal": Case(
        fusion.LinCombEltAct(Compute(ef.clip, min=-0.5, max=0.75)),
        lambda accum, **named: linear(accum, **named).clamp(-0.5, 0.75),
        LINEAR,
    ),
    **{f"LinCombTopKSoftmaxCol, {k}": Case(fusion.LinCombTopKSoftmaxCol(k), top_k(k), LINEAR) for k in (1, 2, 3, 4)},
    "LinCombPerRowBias": Case(
        fusion.LinCombPerRowBias(), lambda accum, bias, **named: linear(accum, **named) + bias, f"{LINEAR} bias:column"
    ),
    "LinCombPerColBias": Case(
        fusion.LinCombPerColBias(), lambda accum, bias, **named: linear(accum, **named) + bias, f"{LINEAR} bias:row"
    ),
    "LinCombPerRowBiasEltAct": Case(
        fusion.LinCombPerRowBiasEltAct(functional.SiLu),
        lambda accum, bias, **named: F.silu(linear(accum, **named) + bias),
        f"{LINEAR} bias:column",
    ),
    "LinCombPerColBiasEltAct": Case(
        fusion.LinCombPerColBiasEltAct(functional.GELU),
        lambda accum, bias, **named: gelu(linear(accum, **named) + bias),
        f"{LINEAR} bias:row",
    ),
    "LinCombPerRowBiasEltActAux": Case(
        fusion.LinCombPerRowBiasEltActAux(functional.Sigmoid), with_aux(torch.sigmoid), f"{LINEAR} bias:column"
    ),
    "LinCombPerColBiasEltActAux": Case(
        fusion.LinCombPerColBiasEltActAux(functional.Tanh), with_aux(torch.tanh), f"{LINEAR} bias:row"
    ),
    "LinCombPerColBiasEltActAux, mask": Case(
        fusion.LinCombPerColBiasEltActAux(functional.ReLU, mask=True),
        with_mask,
        f"{LINEAR} bias:row",
        {"aux": torch.uint8},
    ),
    "PerRowLinCombPerRowBiasEltAct": Case(
        fusion.PerRowLinCombPerRowBiasEltAct(functional.ReLU),
        lambda accum, bias, **named: F.relu(linear(accum, **named) + bias),
        "C alpha:column beta:column bias:column",
    ),
    "PerColLinCombPerColBiasEltAct": Case(
        fusion.PerColLinCombPerColBiasEltAct(functional.ReLU),
        lambda accum, bias, **named: F.relu(linear(accum, **named) + bias),
        "C alpha:row beta:row bias:row",
    ),
    "PerColResAddPerColBiasEltAct": Case(
        fusion.PerColResAddPerColBiasEltAct(functional.HardSwish),
        lambda accum, C, alpha, beta, bias: F.hardswish(alpha * accum + bias) + beta * C,
        "C alpha:row beta:row bias:row",
    ),
    "ScaledLinCombPerRowBiasEltAct": Case(
        fusion.ScaledLinCombPerRowBiasEltAct(functional.ReLU),
        scaled_fp8,
        f"{SCALED} bias:column scale_d",
        {"D": FP8},
    ),
    "ScaledLinCombPerColBiasEltAct": Case(
        fusion.ScaledLinCombPerColBiasEltAct(functional.ReLU, torch.float32),
        lambda accum, **named: F.relu(scaled(accum, **named)),
        f"{SCALED} bias:row",
    ),
    "ScaledLinCombPerRowBiasEltActAmaxAux": Case(
        fusion.ScaledLinCombPerRowBiasEltActAmaxAux(functional.ReLU),
        amax_aux,
        f"{SCALED} bias:column scale_d scale_aux",
        {"D": FP8, "aux": FP8},
    ),
    "ScaledLinCombPerColBiasEltActAmaxAux": Case(
        fusion.ScaledLinCombPerColBiasEltActAmaxAux(functional.ReLU, torch.float32, torch.float32),
        amax_without,
        f"{SCALED} bias:row",
    ),
    "LinCombDeEltAct": Case(fusion.LinCombDeEltAct(ef.dgelu_erf), dgelu, f"{LINEAR} aux:tile"),
    "LinCombDeEltAct, mask": Case(fusion.LinCombDeEltAct(functional.drelu_bit), drelu, f"{LINEAR} aux:mask"),
    "LinCombDeEltActDePerRowBias": Case(
        fusion.LinCombDeEltActDePerRowBias(functional.dReLU), with_dbias, f"{LINEAR} aux:tile"
    ),
}
NUMBERS = {
    "alpha": 1.25,
    "beta": -0.5,
    "lower_bound": -0.25,
    "upper_bound": 1.5,
    "leaky_alpha": 0.2,
    "threshold": 0.5,
    "scale_a": 0.5,
    "scale_b": 2.0,
    "scale_c": 1.5,
    "scale_d": 3.0,
    "scale_aux": 0.75,
}
SHAPES = {"row": (N,), "column": (M, 1), "tile": (M, N)}


def operands(case: Case) -> dict[str, Any]:
    """`alpha` is a number, `alpha:row` a row; C is a matrix."""
    made: dict[str, Any] = {}
    for word in case.operands.split():
        name, _, shape = word.partition(":")
        if name == "C":
            made[name] = torch.randn(M, N)
        elif shape == "mask":
            made[name] = (torch.rand(M, N) > 0.5).to(torch.uint8)
        else:
            made[name] = torch.randn(SHAPES[shape]) if shape else NUMBERS[name]
    return made


@pytest.mark.parametrize("name", CASES)
def test_a_fusion_is_its_formula(name: str) -> None:
    case = CASES[name]
    a, b, named = torch.randn(M, K) / K**0.5, torch.randn(K, N), operands(case)
    got = ef.gemm(a, b, epilogue=case.tree, out_dtypes=case.dtypes, **named)
    outputs = dict(zip(got.names, got, strict=True)) if isinstance(got, tuple) else got
    assert_close_to_reference(outputs, case.formula, product(a, b), **named)


@pytest.mark.parametrize("name", CASES)
def test_a_fusion_as_printed(name: str, golden: Callable[[str], None]) -> None:
    golden(str(CASES[name].tree))


def test_every_fusion_is_met() -> None:
    public = {name for name, value in vars(fusion).items() if name[0].isupper() and callable(value)}
    defined = {name for name in public if getattr(vars(fusion)[name], "__module__", "") == fusion.__name__}
    assert defined == {name.partition(",")[0] for name in CASES}


@pytest.mark.parametrize("k", [2, 4])
def test_elements_equal_to_the_last_of_the_top_all_count(k: int) -> None:
    x = torch.tensor([[3.0, 1.0, 3.0, 3.0, 2.0, 0.0], [5.0, 4.0, 4.0, 4.0, 4.0, 4.0]])
    c = torch.zeros(2, 6)
    got = ef.gemm(x, torch.eye(6), epilogue=fusion.LinCombTopKSoftmaxCol(k), C=c)
    assert torch.equal(got > 0, x >= torch.topk(x, k).values[:, -1:])
    assert_close_to_reference({"D": got}, top_k(k), product(x, torch.eye(6)), C=c, alpha=1.0, beta=0.0)


def test_a_top_that_cannot_be_is_refused() -> None:
    with pytest.raises(ef.errors.ArgumentError, match="k must be 1, 2, 3 or 4"):
        fusion.LinCombTopKSoftmaxCol(5)


# --- flat arguments ----------------------------------------------------------------------------------------------


def combined(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **named: Any) -> torch.Tensor:
    return ef.gemm(a, b, epilogue=fusion.LinearCombination(), C=c, **named)  # type: ignore[no-any-return]


def test_a_pointer_comes_before_the_value_and_null_is_the_value() -> None:
    a, b, c = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)
    want = combined(a, b, c, alpha=2.0, beta=3.0)
    assert torch.equal(combined(a, b, c, alpha=7.0, alpha_ptr=torch.tensor([2.0]), beta_ptr=torch.tensor(3.0)), want)
    assert torch.equal(combined(a, b, c, alpha=2.0, alpha_ptr=None, beta=3.0, beta_ptr=None), want)


def test_defaults_are_alpha_one_beta_zero() -> None:
    a, b, c = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)
    assert torch.equal(combined(a, b, c), combined(a, b, c, alpha=1.0, beta=0.0))


def test_one_alpha_a_batch() -> None:
    a, b, c = torch.randn(3, M, K), torch.randn(3, K, N), torch.randn(3, M, N)
    alpha = torch.tensor([1.0, -2.0, 0.5])
    got = combined(a, b, c, alpha_ptr=alpha, dAlpha=(0, 0, 1), beta=1.0)
    for batch in range(3):
        assert torch.equal(got[batch], combined(a[batch], b[batch], c[batch], alpha=alpha[batch].item(), beta=1.0))


def test_a_null_bias_is_zero() -> None:
    a, b, c = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)
    got = ef.gemm(a, b, epilogue=fusion.LinCombPerRowBias(), C=c, beta=1.0, bias_ptr=None)
    assert torch.equal(got, combined(a, b, c, beta=1.0))
    bias = torch.randn(M)
    got = ef.gemm(a, b, epilogue=fusion.LinCombPerRowBias(), C=c, bias_ptr=bias, dBias=(1, 0, 0))
    assert torch.equal(got, ef.gemm(a, b, epilogue="lambda accum, bias: accum + bias", bias=bias[:, None]))


def test_outputs_by_pointer() -> None:
    a, b, c = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)
    d, dbias, aux = torch.empty(M, N), torch.empty(M), torch.randn(M, N)
    tree = fusion.LinCombDeEltActDePerRowBias(functional.dReLU)
    flat = {"alpha": 2.0, "beta": 0.5, "aux_ptr": aux, "dAux": (N, 1, 0), "dbias_ptr": dbias}
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(tree, C=c, D=d, **flat))
    ef.get_kernels(args)[0].run(args)
    assert_close_to_reference({"D": d, "dbias": dbias}, with_dbias, product(a, b), C=c, aux=aux, alpha=2.0, beta=0.5)


def test_the_graph_is_that_of_the_function() -> None:
    """alpha * A @ B + beta * C, then relu: one digest in both ways."""

    def epilogue(accum: Any, C: Any, alpha: Any, beta: Any) -> Any:
        return ef.relu(alpha * accum + beta * C)

    a, b, c = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)
    digests = set()
    for form in (epilogue, fusion.LinCombEltAct(functional.ReLU)):
        named = ef.EpilogueArguments.partial(form, {"C": c, "alpha": 1.0, "beta": 2.0})
        plan = ef.explain(ef.GemmArguments(a, b, epilogue=named)).plan
        assert plan is not None
        digests.add(plan.digest)
    assert len(digests) == 1
