"""What errors advise: the spelling that works, for what people who know PyTorch write first."""

import functools
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import epifuse as ef
from epifuse.fusion.vocabulary import CAST_METHODS
from tests.frontend.sources import function_from

A, B = torch.ones(4, 4), torch.ones(4, 4)
OPERANDS = {"C": torch.ones(4, 4), "alpha": 2.0}
NAMES = {
    "np": np,
    "torch": torch,
    "F": F,
    "nn": nn,
    "ef": ef,
    "math": math,
    "dropout": nn.Dropout(),
    "config": {"scale": 2.0},
}

STOCHASTIC = "outputs are rounded to nearest even: none is rounded stochastically"
HINTS = {
    "where(accum > 0, accum, C)": "write ef.where, after `import epifuse as ef`",
    "gelu(accum)": "write ef.gelu, after `import epifuse as ef`",
    "rellu(accum)": "did you mean ef.relu",
    "swoosh(accum)": "make it a parameter, or define it before the epilogue",
    "swish(accum)": "write silu(x)",
    "torch.logical_xor(accum > 0, C > 0)": "write a != b",
    "torch.sigmod(accum)": "did you mean ef.sigmoid",
    "torch.gelu(accum)": "write ef.gelu, after",
    "F.ReLU(accum)": "write ef.relu, after",
    "torch.nn.GELU()(accum)": "write ef.gelu, after",
    "nn.Dropout()(accum)": "write ef.dropout, after",
    "nn.Flatten()(accum)": "write ef.flatten, after `import epifuse as ef`",
    "dropout(accum)": "call the function, as F.gelu(x)",
    "np.exp(accum)": "write ef.exp, after",
    "torch.ops.aten.relu(accum)": "write ef.relu, after",
    "F.linear(accum, C)": "the product is accum; a second product needs a second GEMM",
    "torch.einsum('ij,ij->i', accum, C)": "the product is accum; a second product needs a second GEMM",
    "torch.zeros(4)": "write the number itself",
    "torch.hstack([accum, C])": "write cat([x, y], dim=...)",
    "accum.gelu()": "write ef.gelu(x), after",
    "accum.Relu()": "write .relu",
    "accum.add_(C)": "write .add, which gives a new value",
    "accum.sigmod()": "did you mean .sigmoid",
    "accum.detach()": "a derivative passes through every value of a call",
    "F.layer_norm(accum.unflatten(-1, (2, 8)), (2, 8))": None,
    "F.rms_norm(accum, 16)": None,
    "F.group_norm(accum, 2)": "with g = x.unflatten(-1, (groups, -1)) write",
    "torch.var_mean(accum, -1)": "write x.var(dim=-1) and x.mean(dim=-1)",
    "accum.view(*accum.shape[:-1], -1, 2)": "write the items out; for x.view(*x.shape[:-1], -1, 64) write x.unfl",
    "accum.view((*accum.shape[:-1], -1, 2))": "write the items out; for x.view(*x.shape[:-1], -1, 64) write x.unfl",
    "accum.reshape(accum.shape)": "write its items out, as in x.view(y.shape[0], y.shape[1])",
    "F.cross_entropy(accum, C)": "of batches write ef.cross_entropy or ef.nll_loss; of probabilities -(y * x.log_soft",
    "F.normalize(accum)": "write x / ef.norm(x, dim=-1, keepdim=True).clamp_min(1e-12)",
    "F.batch_norm(accum, None, None)": "write it out: mean, then (x - mean) squared, then its mean",
    "accum / accum.dim()": "an epilogue holds for every shape",
    "int(accum)": "write x.to(torch.int32) for a tensor; of host numbers n // 2",
    "accum.rsub(1)": "write y - x for x.rsub(y)",
    "bool(accum)": "write a comparison",
    "torch.triu(accum)": "write where(index_n(x) >= index_m(x), x, 0.0)",
    "torch.tril(accum)": "write where(index_n(x) <= index_m(x), x, 0.0)",
    "torch.stochastic_rounding(accum)": STOCHASTIC,
    "ef.stochastic_round(accum)": STOCHASTIC,
    "accum.to(torch.float8_e4m3fn, rounding='stochastic')": STOCHASTIC,
    "ef.cast(accum, torch.float8_e4m3fn, rounding='stochastic')": STOCHASTIC,
    "ef.block_scale(accum, rounding='stochastic')": STOCHASTIC,
    "accum.to(torch.float16, copy=True)": "leave it out: a value has no memory of its own",
    "accum.to(dtype=torch.float16, non_blocking=True)": "leave it out",
    "torch.linalg.vector_norm(accum, ord=math.inf, dim=-1)": "write ef.norm(x, dim=-1), ef.absmax(x, dim=-1) for",
    "accum.view(torch.uint8)": "store the value, and write .view(torch.uint8) on the output",
    "accum.view(dtype=torch.int32)": "store the value, and write .view(torch.int32) on the output",
    "len(accum)": "an epilogue holds for every shape",
    "accum.sum(axis=1)": "write dim=",
    "accum.sum(-1, keepdims=True)": "write keepdim=",
    "F.relu(accum, inplace=True)": "leave it out: a value is never changed in place",
    "torch.add(accum, C, alpha=2)": "write x + alpha * y for add",
    "accum.sub(C, alpha=2)": "write x + alpha * y for add, and x - alpha * y for sub",
    "accum.clamp()": "give it one of them",
    "torch.linalg.norm(accum, ord=math.inf)": "write ef.norm(x, dim=-1), ef.absmax(x, dim=-1) for",
    "F.hardtanh(accum, alpha, -alpha)": None,
}
SAYS = {
    "F.layer_norm(accum.unflatten(-1, (2, 8)), (2, 8))": "must be a tuple of one extent, that of the last dim",
    "F.rms_norm(accum, 16)": "'normalized_shape' of rms_norm() must be a tuple of one extent",
    "[x for x in (accum, C)]": "a list comprehension is not supported in an epilogue",
    "f'{accum}'": "an f-string is not supported in an epilogue",
    "(y := accum)": "an assignment inside an expression is not supported in an epilogue",
    "(lambda x: x)(accum)": "a lambda is not supported in an epilogue",
    "{accum}": "a set is not supported in an epilogue",
    "accum @ C": "the operator @ is not supported here",
    "accum not in C": "the operator not in is not supported here",
    "accum * config['scale']": "'config' is a dict, which an epilogue cannot use",
    "F.hardtanh(accum, alpha, -alpha)": "the lower bound 2.0 is greater than the upper bound -2.0",
    "accum.to(torch.float16, copy=True)": ".to() has no parameter 'copy'",
    "accum.split(split_size_or_sections=2, dim=-1)[0]": "its parameters are (input, split_size, dim=0)",
    "accum.view(torch.uint8)": "an epilogue does not reinterpret bits",
}


def refusal(expression: str, further: str = "", given: Mapping[str, Any] = MappingProxyType({})) -> str:
    text = f"def epi(accum, C, alpha{further}):\n    D = {expression}\n    return D\n"
    with pytest.raises(ef.errors.EpifuseError) as caught:
        ef.gemm(A, B, epilogue=function_from(text, **NAMES), **OPERANDS, **given)
    assert f"    D = {expression}\n" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("expression", "hint"), HINTS.items(), ids=HINTS)
def test_the_hint_is_what_to_write(expression: str, hint: str | None) -> None:
    message = refusal(expression)
    assert hint is None or f"hint: {hint}" in message


INSTEAD = {
    "where(x == x, x, 0.0)": lambda x: torch.nan_to_num(x, 0.0, math.inf, -math.inf),
}


@pytest.mark.parametrize("expression", INSTEAD)
def test_what_a_hint_says_to_write_does_it(expression: str) -> None:
    x = torch.tensor([[math.nan, math.inf, 1.5, -math.inf, 0.0]])
    got = ef.gemm(torch.ones(1, 1), x, epilogue=f"def epi(accum): x = accum; D = {expression}; return D")
    torch.testing.assert_close(got, INSTEAD[expression](x), equal_nan=True)


VALUES = torch.tensor([[0.5, 1.5, -2.5, 0.049, 0.0], [1234.5678, -65.43, 8.0, 7.999999, -1e-3]])
WRITTEN = (
    "accum.norm(p=float('inf'), dim=-1)",
    "torch.norm(accum, math.inf, dim=-1)",
    "accum.norm(-math.inf, -1)",
    "accum.norm(0, dim=-1)",
    "accum.norm(1, dim=-1)",
    "accum.norm(3, dim=-1)",
    "torch.round(accum, decimals=1)",
    "accum.round(decimals=3)",
    "torch.round(accum, decimals=-2)",
    "torch.ldexp(accum, y)",
    "torch.quantize_per_tensor(accum, scale, zero_point, torch.qint8).int_repr()",
    "torch.fake_quantize_per_tensor_affine(accum, scale, zero_point, low, high)",
)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # deprecated
@pytest.mark.parametrize("expression", WRITTEN)
def test_what_is_written_out_is_what_torch_computes(expression: str) -> None:
    numbers = {"y": torch.tensor(3), "scale": 0.5, "zero_point": 3, "low": -128, "high": 127}
    written = refusal(expression, ", ".join(("", *numbers)), numbers).rpartition("hint: write ")[2]
    text = f"def epi(accum, {', '.join(numbers)}):\n    x = accum\n    return {written}\n"
    found = ef.gemm(torch.eye(2), VALUES, epilogue=function_from(text, **NAMES), **numbers)
    want = eval(expression, {**NAMES, "accum": VALUES, **numbers})
    torch.testing.assert_close(found, want)


def test_frexp_is_written_out() -> None:
    p, x, e = (part.split(" for ")[0] for part in HINT_OF_FREXP.split(refusal("accum.frexp()"))[1:])
    text = f"def epi(accum):\n    x = accum\n    p = {p}\n    D = {x}\n    E = {e}\n    return D, E"
    values = VALUES[VALUES != 0][None]
    found = ef.gemm(torch.ones(1, 1), values, epilogue=function_from(text, **NAMES))
    for own, want in zip(found, torch.frexp(values), strict=True):
        assert torch.equal(own, want.float())


HINT_OF_FREXP = re.compile(r"hint: with p = | write |, ")


@pytest.mark.parametrize("name", sorted({*CAST_METHODS} - {"double"}))
def test_a_cast_by_its_name_is_one_to_its_dtype(name: str) -> None:
    found = ef.gemm(torch.eye(2), VALUES[:, :2].abs(), epilogue=f"lambda accum: accum.{name}()")
    assert found.dtype == getattr(torch.ones(1), name)().dtype
    by_dtype = ef.gemm(torch.eye(2), VALUES[:, :2].abs(), epilogue=f"lambda accum: accum.to({found.dtype})")
    assert torch.equal(found, by_dtype)


@pytest.mark.parametrize("name", ["scale_a", "scale_b"])
def test_scales_of_a_product_are_written_out(name: str) -> None:
    with pytest.raises(ef.errors.ArgumentError, match=r"accum \* scale_a \* scale_b; .* ef.Scaled"):
        ef.gemm(A, B, **{name: torch.ones(1)})


@pytest.mark.parametrize(("expression", "says"), SAYS.items(), ids=SAYS)
def test_syntax_has_its_peoples_name(expression: str, says: str) -> None:
    assert says in refusal(expression)


@pytest.mark.parametrize("low", [-1.0, 2.0])
def test_hardtanh_takes_bounds_that_are_known_at_launch(low: float) -> None:
    def epilogue(accum: Any, low: float, high: float) -> Any:
        return F.hardtanh(accum, low, high)

    got = ef.gemm(A, B, epilogue=epilogue, low=low, high=3.0)
    assert torch.equal(got, F.hardtanh(A @ B, low, 3.0))


def add(accum: Any, C: Any) -> Any:
    return accum + C


WRAPPED = {
    "no_grad": torch.no_grad()(add),
    "inference_mode": torch.inference_mode()(add),
    "autocast": torch.autocast("cpu")(add),
    "vmap": torch.vmap(add),
    "cache": functools.cache(add),
}


@pytest.mark.parametrize("function", WRAPPED.values(), ids=WRAPPED)
def test_a_foreign_decorator_is_refused_at_the_function(function: Callable[..., Any]) -> None:
    with pytest.raises(ef.errors.EpilogueSyntaxError, match=r"add is wrapped by .*, which is not read") as caught:
        ef.gemm(A, B, epilogue=function, C=OPERANDS["C"])
    assert caught.value.loc is not None
    assert caught.value.loc.line == add.__code__.co_firstlineno
    assert caught.value.loc.file == __file__


def test_so_is_one_of_a_helper() -> None:
    with pytest.raises(ef.errors.EpilogueSyntaxError, match="add is wrapped by decorate_context of torch"):
        ef.gemm(A, B, epilogue=function_from("def epi(accum): return h(accum, 1.0)", h=WRAPPED["no_grad"]))


def test_torchs_functions_as_epilogues_ask_what_torch_asks() -> None:
    assert torch.equal(ef.gemm(A, B, epilogue=torch.relu), torch.relu(A @ B))
    assert torch.equal(ef.gemm(A, B, epilogue=F.silu), F.silu(A @ B))
    with pytest.raises(ef.errors.EpilogueSyntaxError, match="misses the argument 'dim'"):
        ef.gemm(A, B, epilogue=torch.softmax)


def test_debug_print_shows_a_matrix_of_a_problem_without_batch(capsys: pytest.CaptureFixture[str]) -> None:
    source = "def epi(accum, c, r):\n" + "".join(f"    debug_print('{{}}', {x})\n" for x in ("accum", "c", "r"))
    ef.gemm(A[:2], B, epilogue=source + "    return accum", c=torch.ones(2, 1), r=torch.ones(4))
    shown = capsys.readouterr().out
    assert shown.count("[[") == 3
    assert "[[[" not in shown
    ef.gemm(A[None, :2], B, epilogue=source + "    return accum", c=torch.ones(2, 1), r=torch.ones(4))
    assert "[[[" in capsys.readouterr().out


def test_an_integer_division_by_zero_points_at_its_line() -> None:
    source = "def epi(accum, i):\n    D = accum + 3 // i\n    return D\n"
    with pytest.raises(ef.errors.ArgumentError, match=r"(?s)divided by zero.*D = accum \+ 3 // i"):
        ef.gemm(A, B, epilogue=source, i=torch.arange(4))


@pytest.mark.parametrize(
    ("name", "y"),
    [
        ("binary_cross_entropy_with_logits", torch.rand(6, 10)),
        ("mse_loss", torch.randn(6, 10)),
        ("l1_loss", torch.randn(6, 10)),
        ("kl_div", torch.rand(6, 10)),
        ("smooth_l1_loss", 3 * torch.randn(6, 10)),
        ("huber_loss", 3 * torch.randn(6, 10)),
    ],
)
def test_a_loss_is_what_its_hint_says(name: str, y: torch.Tensor) -> None:
    a, b = torch.randn(6, 8), torch.randn(8, 10)
    with pytest.raises(ef.errors.EpilogueSyntaxError) as caught:
        ef.gemm(a, b, epilogue=function_from(f"def epi(accum, y):\n    return F.{name}(accum, y)"), y=y)
    written = str(caught.value).partition("write it out, and reduce that: ")[2]
    epilogue = function_from(f"def epi(accum, y):\n    x = accum\n    return ({written}).sum()")
    found = ef.gemm(a, b, epilogue=epilogue, y=y)
    torch.testing.assert_close(found, getattr(F, name)(a @ b, y, reduction="sum"))
