"""Calls that are launched without a description: what a description would have noticed, they notice too."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import epifuse as ef
from epifuse.base import cache
from epifuse.base.errors import ArgumentError, EpifuseError, UnsupportedError
from epifuse.pytorch import kept_calls
from epifuse.runtime import run

M, K, N = 8, 16, 24


def layer() -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias, which start at multiples of 16 bytes."""
    made = (torch.randn(*shape, requires_grad=True) for shape in ((M, K), (N, K), (N,)))
    return tuple(made)  # type: ignore[return-value]  # three


def linear(x: Tensor, weight: Tensor, bias: Tensor, save: str = "recompute") -> Any:
    return ef.linear(x, weight, bias, epilogue=ef.gelu, save=save)


def gemm(x: Tensor, weight: Tensor, bias: Tensor, save: str = "recompute") -> Any:
    return ef.gemm(x, weight.t(), epilogue=lambda accum, bias: ef.gelu(accum + bias), bias=bias, save=save)


def expected(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def gradients(y: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).view(y.shape))


def warm(call: Callable[..., Any], *given: Any) -> None:
    """One call plans, one finds the plan, and the next one's backward is described."""
    for _ in range(3):
        y = call(*given)
        if y.requires_grad:
            y.sum().backward()
    for tensor in given:
        tensor.grad = None


@pytest.fixture
def undescribed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on nothing may be described."""

    def stop() -> None:
        monkeypatch.setattr(kept_calls, "describe", None)
        monkeypatch.setattr(run, "describe", None)

    return stop


@pytest.mark.parametrize("save", ["recompute", "preactivation"])
@pytest.mark.parametrize("call", [linear, gemm])
def test_a_call_like_an_earlier_one_is_not_described(call: Any, save: str, undescribed: Callable[[], None]) -> None:
    def saving(*given: Tensor) -> Any:
        return call(*given, save=save)

    warm(saving, *layer())
    undescribed()
    others = layer()
    y = saving(*others)
    torch.testing.assert_close(y, expected(*others))
    torch.testing.assert_close(gradients(y, *others), gradients(expected(*others), *others))


@pytest.mark.parametrize("lead", [(M,), (2, 4), (2, 2, 2)])
def test_nor_is_one_of_more_dims(lead: tuple[int, ...], undescribed: Callable[[], None]) -> None:
    def call(x: Tensor, weight: Tensor, bias: Tensor, C: Tensor) -> Any:
        text = "def epi(accum, C): D = gelu(accum) + C; Z = accum * 2; return D, Z"
        return ef.linear(x, weight, bias, epilogue=text, C=C)

    def given() -> list[Tensor]:
        _, weight, bias = layer()
        return [torch.randn(*lead, K, requires_grad=True), weight, bias, torch.randn(*lead, N, requires_grad=True)]

    first = given()
    for _ in range(3):
        gradients(call(*first)[0], *first)
    undescribed()
    others = given()
    mine, doubled = call(*others)
    theirs = expected(*others[:3]) + others[3]
    torch.testing.assert_close(doubled, 2 * F.linear(*others[:3]))
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(gradients(mine, *others), gradients(theirs, *others))


@pytest.mark.parametrize("call", [linear, gemm])
def test_nor_is_one_that_nothing_records(call: Any, undescribed: Callable[[], None]) -> None:
    with torch.no_grad():
        warm(call, *layer())
        undescribed()
        others = layer()
        torch.testing.assert_close(call(*others), expected(*others))


def shifted(tensor: Tensor) -> Tensor:
    """The same values, starting at no multiple of 16 bytes."""
    return torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def by_columns(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "strides": by_columns,
    "alignment": shifted,
    "parameter": lambda tensor: torch.nn.Parameter(tensor.detach()),
    "frozen": torch.Tensor.detach,
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_noticed(name: str, which: int) -> None:
    warm(linear, *layer())
    given = [*layer()]
    given[which] = CHANGES[name](given[which].detach()).requires_grad_(name != "frozen")
    leaves = [value for value in given if value.requires_grad]
    for _ in range(3):
        y = linear(*given)
        torch.testing.assert_close(y, expected(*given))
        torch.testing.assert_close(gradients(y, *leaves), gradients(expected(*given), *leaves))


def test_a_negated_view_is_noticed() -> None:
    x, weight, bias = (value.detach() for value in layer())
    warm(linear, x, weight, bias)
    with pytest.raises(ArgumentError, match="negated"):
        linear(torch._neg_view(x), weight, bias)


def test_the_same_tensor_twice_is_described() -> None:
    warm(lambda x, y: ef.gemm(x, y), torch.randn(K, K), torch.randn(K, K))
    x = torch.randn(K, K)
    for _ in range(3):
        torch.testing.assert_close(ef.gemm(x, x), x @ x)


def test_memory_that_is_gone_is_noticed() -> None:
    x, weight, bias = (value.detach() for value in layer())
    warm(linear, x, weight, bias)
    x.untyped_storage().resize_(0)
    with pytest.raises(EpifuseError):
        linear(x, weight, bias)


def test_a_gradient_that_lies_in_another_way_is_noticed() -> None:
    given = layer()
    warm(linear, *given)
    for arriving in (torch.randn(N, M).t(), shifted(torch.randn(M, N)), torch.ones(1).expand(M, N)):
        mine, theirs = (torch.autograd.grad(call(*given), given, arriving) for call in (linear, expected))
        torch.testing.assert_close(mine, theirs)


def test_what_saved_tensors_become_is_noticed() -> None:
    given = layer()
    warm(linear, *given)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: by_columns(x) if x.dim() == 2 else x):
        y = linear(*given)
    torch.testing.assert_close(gradients(y, *given), gradients(expected(*given), *given))


def test_numbers_that_are_captured_are_read_each_time() -> None:
    scale = 1.0
    a, b = torch.randn(M, K), torch.randn(K, N)

    def scaled(accum: Any) -> Any:
        return accum * scale

    for _ in range(4):
        torch.testing.assert_close(ef.gemm(a, b, epilogue=scaled), a @ b * scale)
        scale += 1.0


def test_a_function_that_is_replaced_is_read_again() -> None:
    a, b = torch.randn(M, K), torch.randn(K, N)

    def first(accum: Any) -> Any:
        return accum + 1.0

    def second(accum: Any) -> Any:
        return accum - 1.0

    warm(lambda x, y: ef.gemm(x, y, epilogue=first), a, b)
    first.__code__ = second.__code__
    torch.testing.assert_close(ef.gemm(a, b, epilogue=first), a @ b - 1.0)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no grad": torch.no_grad,
    "forward mode": forward_ad.dual_level,
}


@pytest.mark.parametrize("name", MODES)
def test_modes_are_noticed(name: str) -> None:
    given = layer()
    if name == "forward mode":
        given = tuple(value.detach() for value in given)  # type: ignore[assignment]  # three
    warm(linear, *given)
    with MODES[name]():
        mine, theirs = linear(*given), expected(*given)
    assert (mine.dtype, mine.requires_grad) == (theirs.dtype, theirs.requires_grad)
    torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_transforms_and_tracing_are_noticed() -> None:
    x, weight, bias = (value.detach() for value in layer())
    warm(linear, x, weight, bias)
    several = torch.randn(3, M, K)
    torch.testing.assert_close(
        torch.func.vmap(linear, (0, None, None))(several, weight, bias), expected(several, weight, bias)
    )
    torch.testing.assert_close(
        torch.func.grad(lambda x: linear(x, weight, bias).sum())(x),
        torch.func.grad(lambda x: expected(x, weight, bias).sum())(x),
    )
    traced = make_fx(lambda *given: linear(*given))(x, weight, bias)
    assert any("mm" in str(node.target) for node in traced.graph.nodes)
    torch.testing.assert_close(traced(x + 1.0, weight, bias), expected(x + 1.0, weight, bias))


@pytest.mark.parametrize("first", ["alike", "frozen", "columns"])
def test_what_is_handed_over_is_what_is_saved(first: str) -> None:
    """A hook that looks for parameters finds them, whatever other layers of this shape ran before."""
    cache.forget()
    given = layer()
    x, weight, bias = layer()
    others = {"alike": weight, "frozen": weight.detach(), "columns": torch.randn(K, N).t()}
    warm(linear, x, others[first], bias)
    warm(linear, *given)
    saved = [value for value in linear(*given).grad_fn.saved_tensors if value is not None]
    assert all(any(value is one for one in given) for value in saved)


@pytest.mark.parametrize("before", range(4))
def test_a_checkpoint_sees_one_layout_of_the_weight(before: int) -> None:
    """PyTorch compares what the forward saved with what computing it again saves."""
    cache.forget()
    x, weight, bias = layer()
    for _ in range(before):
        linear(x, weight, bias)
    y = checkpoint(linear, x, weight, bias, use_reentrant=False)
    want = gradients(expected(x, weight, bias), x, weight, bias)
    torch.testing.assert_close(gradients(y, x, weight, bias), want)


def test_batches_that_an_epilogue_tells_apart_share_a_weight() -> None:
    x = torch.randn(3, M, K, requires_grad=True)
    for features in (N, K):  # a square weight has its transpose's shape
        weight = torch.randn(features, K, requires_grad=True)
        want = torch.autograd.grad((x @ weight.t()).square().sum(-2).sin().sum(), (x, weight))
        for _ in range(3):
            made = ef.linear(x, weight, epilogue=lambda accum: ef.sum(accum * accum, dim=-2)).sin().sum()
            for gradient, one in zip(torch.autograd.grad(made, (x, weight)), want, strict=True):
                torch.testing.assert_close(gradient, one)


def test_a_weight_changed_before_the_backward_is_torchs_error() -> None:
    given = layer()
    warm(linear, *given)
    y = linear(*given)
    with torch.no_grad():
        given[1].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivatives_are_refused() -> None:
    given = layer()
    warm(linear, *given)
    (first,) = torch.autograd.grad(linear(*given).sum(), given[:1], create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated again"):
        first.sum().backward()


@pytest.mark.parametrize("name", ["silu", "tanh", "sigmoid", "relu"])
def test_a_stored_derivative_makes_no_float32_copy(name: str) -> None:
    made: list[tuple[torch.Size, torch.dtype]] = []

    class Copies(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            value = function(*args, **(kwargs or {}))
            if function is torch.ops.aten._to_copy.default:
                made.append((value.shape, value.dtype))
            return value

    x, weight, bias = (value.detach().bfloat16().requires_grad_() for value in layer())
    y = ef.linear(x, weight, bias, epilogue=getattr(ef, name), save="preactivation")
    with Copies():
        y.backward(torch.ones_like(y))
    assert (y.shape, torch.float32) not in made


def test_ever_more_kinds_of_tensors_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further one is described, and right; none pays for being kept again and again."""
    cache.forget()
    kept: list[Any] = []
    remember = kept_calls.remember_beside
    monkeypatch.setattr(kept_calls, "remember_beside", lambda key, known: (kept.append(key), remember(key, known)))
    kinds = [[value.detach() for value in layer()] for _ in range(9)]
    for step, (_, weight, _) in enumerate(kinds, start=1):
        weight.data = torch.randn(N, step * K)[:, :K]
    for given in [*kinds, *kinds, *kinds]:
        torch.testing.assert_close(linear(*given), expected(*given))
    assert 0 < len(kept) < len(kinds)
