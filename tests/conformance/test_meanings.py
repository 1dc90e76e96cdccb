"""The meaning of the vocabulary's functions, called on tensors: compared with PyTorch's functions, float64, autograd
and fast forms."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import epifuse as ef
from epifuse.frontend import activation_body
from epifuse.fusion.activation import __name__ as activations
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.reduction import REDUCTIONS
from epifuse.fusion.vocabulary import VOCABULARY, is_static
from epifuse.providers.cpu.primitives import FAST
from tests.frontend.sources import function_from

SPECIAL = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, 20.0, 88.0, -88.0, 1e4, -1e4])
BROKEN = torch.tensor([torch.nan, torch.inf, -torch.inf])

# PyTorch's function of the same name has other parameters.
OTHER_SIGNATURE = {
    *(name for name, entry in VOCABULARY.items() if entry.group == "form"),
    *("max", "min", "clamp", "norm", "prelu", "any", "all", "threshold", "masked_fill"),
}

# On x86, PyTorch's float32 gelu(+inf) is NaN in vector lanes. Its scalar tail, its float64 and the formula give inf.
_INF_IS_NAN = {"gelu", "gelu_erf"}

ACTIVATIONS = [name for name, entry in VOCABULARY.items() if entry.function.__module__ == activations]


def calls(name: str) -> set[str]:
    """The names of an activation and of the activations that its body calls."""
    below = [str(node.attr) for node in activation_body(name).nodes if node.op == "call"]
    return {name}.union(*map(calls, below))


INF_IS_NAN_IN_PYTORCH = _INF_IS_NAN | {name for name in ACTIVATIONS if not _INF_IS_NAN.isdisjoint(calls(name))}


def grid(dtype: torch.dtype) -> torch.Tensor:
    """Many values from -12 to 12, special values, infinities and NaN."""
    return torch.cat([torch.linspace(-12, 12, 4001), SPECIAL, BROKEN]).to(dtype)


def others(count: int, like: torch.Tensor) -> list[torch.Tensor]:
    """`count` further arguments: the same values in other orders."""
    return [like.roll(17 * (i + 1)) for i in range(count)]


def required(name: str) -> int:
    """The number of arguments without defaults that are values."""
    parameters = VOCABULARY[name].signature.parameters.values()
    return sum(p.default is inspect.Parameter.empty and not is_static(p) for p in parameters)


def namesake(name: str) -> Callable[..., Any] | None:
    """PyTorch's function of the same name with the same parameters, or None."""
    found = next((getattr(space, name) for space in (F, torch, torch.special) if hasattr(space, name)), None)
    return None if name in OTHER_SIGNATURE else found


def arguments_for(name: str, dtype: torch.dtype) -> list[Any]:
    x = grid(dtype)
    rule = PRIMITIVES[name].rule if name in PRIMITIVES else ""
    if rule in ("integer", "bits"):
        whole = torch.arange(-40, 41, dtype=torch.int32)
        return [whole, torch.where(whole.roll(7) == 0, 5, whole.roll(7))][: required(name)]
    if rule == "logic":
        return [x > 0, *(y > 0 for y in others(required(name) - 1, x))]
    if rule == "select":
        return [x > 0, *others(2, x)]
    if name in ("rms_norm", "layer_norm"):
        return [x[:4000].view(10, 400).mT, (10,)]  # rows of distant values, so that means are exact enough
    if name in ("cross_entropy", "nll_loss"):
        return [x[:4000].view(400, 10), torch.arange(400) % 10]
    return [x, *others(required(name) - 1, x)]


def without_inf(name: str, args: list[torch.Tensor]) -> list[torch.Tensor]:
    return [arg[arg != torch.inf] for arg in args] if name in INF_IS_NAN_IN_PYTORCH else args


def equal(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [n for n in VOCABULARY if n not in REDUCTIONS and namesake(n) is not None])
def test_a_name_of_pytorchs_means_what_pytorch_means(name: str, dtype: torch.dtype) -> None:
    function = namesake(name)
    assert function is not None
    args = without_inf(name, arguments_for(name, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of torch's functions are deprecated, but unchanged
        if name in ("softmax", "log_softmax"):
            equal(VOCABULARY[name].function(args[0][:4001], dim=-1), function(args[0][:4001], dim=-1))
        else:
            equal(VOCABULARY[name].function(*args), function(*args))


def test_most_of_the_vocabulary_has_a_namesake() -> None:
    """Otherwise the test above would compare too few functions."""
    functions = {name for name, entry in VOCABULARY.items() if entry.group not in ("form", "reduction")}
    missing = {name for name in functions if namesake(name) is None}
    assert len(functions) - len(missing) > 2 * len(missing)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_float32_agrees_with_float64(name: str) -> None:
    """No formula loses its digits to cancellation or overflow."""
    args = arguments_for(name, torch.float32)
    narrow = VOCABULARY[name].function(*args)
    wide = VOCABULARY[name].function(*(arg.double() for arg in args))
    equal(narrow, wide.float())


@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n.startswith("d") and n[1:] in VOCABULARY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_derivative(name: str, dtype: torch.dtype) -> None:
    x = grid(dtype)[: -len(BROKEN)].requires_grad_()
    dy = others(1, grid(dtype)[: -len(BROKEN)])[0]
    # PyTorch's own derivative if there is one, because steps of the body may overflow although their product does not.
    (namesake(name[1:]) or VOCABULARY[name[1:]].function)(x).backward(dy)
    smooth = x.detach() != 0 if name == "drelu" else torch.ones_like(x, dtype=torch.bool)
    equal(VOCABULARY[name].function(dy, x.detach())[smooth], x.grad[smooth])  # type: ignore[index]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_derivative_of_gelu(approximate: str) -> None:
    x = grid(torch.float64)[: -len(BROKEN)].requires_grad_()
    F.gelu(x, approximate=approximate).backward(torch.ones_like(x))
    equal(VOCABULARY["dgelu"].function(torch.ones_like(x), x.detach(), approximate), x.grad)
    equal(VOCABULARY["gelu"].function(x.detach(), approximate), F.gelu(x.detach(), approximate=approximate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FAST)
def test_a_fast_form_of_the_cpu_means_what_the_body_means(name: str, dtype: torch.dtype) -> None:
    """Fast forms of other providers work on fragments. test_vocabulary runs them."""
    args = without_inf(name, arguments_for(name, dtype))
    equal(FAST[name](*args, out=torch.empty_like(args[0])), VOCABULARY[name].function(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_with_defaults(dtype: torch.dtype) -> None:
    x = grid(dtype)
    equal(VOCABULARY["leaky_relu"].function(x, 0.2), F.leaky_relu(x, 0.2))
    equal(VOCABULARY["elu"].function(x, 1.5), F.elu(x, 1.5))
    equal(VOCABULARY["hardtanh"].function(x, -0.5, 2.0), F.hardtanh(x, -0.5, 2.0))
    equal(VOCABULARY["softplus"].function(x, 2.0, 10.0), F.softplus(x, 2.0, 10.0))
    equal(VOCABULARY["threshold"].function(x, 0.1, 20.0), F.threshold(x, 0.1, 20.0))
    equal(VOCABULARY["clamp"].function(x, -1.0, 2.0), torch.clamp(x, -1.0, 2.0))
    equal(VOCABULARY["clamp"].function(x, max=2.0), torch.clamp(x, max=2.0))
    rows = x.repeat(3, 1).T.contiguous()
    slopes = torch.tensor([0.1, 0.2, -0.3], dtype=dtype)
    equal(VOCABULARY["prelu"].function(rows, slopes), F.prelu(rows, slopes))
    equal(VOCABULARY["snake"].function(x, 2.0)[:4001], (x + torch.sin(2.0 * x) ** 2 / 2.0)[:4001])


@pytest.mark.parametrize("further", ["", ", label_smoothing=0.1", ", reduction='none'"])
def test_a_cross_entropy_subtracts_the_largest_logit_first(further: str) -> None:
    """As PyTorch does. Otherwise the loss of large logits would only be the rounding error of their logsumexp."""
    torch.manual_seed(0)
    a, b, target = (
        torch.randint(-2, 3, (16, 8)).float(),
        torch.randint(-2, 3, (8, 24)).float(),
        torch.randint(24, (16,)),
    )
    loss = function_from(
        f"def epi(accum, far, target): return F.cross_entropy(accum * 0.125 + far, target{further})", F=F
    )
    found = ef.gemm(a, b, epilogue=loss, far=1e4, target=target)
    wanted = loss((a @ b).double(), 1e4, target)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
