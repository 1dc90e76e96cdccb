"""What autograd promises of any function: graphs that are kept, parts asked for, strange gradients, transforms."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import epifuse as ef
from epifuse.base.cache import forget
from epifuse.base.errors import ArgumentError, EpifuseError
from epifuse.fusion.vocabulary import VOCABULARY

M, K, N = 4, 3, 6


def leaf(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def scaled(accum: Any, bias: Any, scale: Any) -> Any:
    return ef.silu(accum + bias) * scale


def plain(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    return F.silu(F.linear(x, weight, bias)) * scale


def fused(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, **options: Any) -> Tensor:
    return ef.linear(x, weight, bias, epilogue=scaled, scale=scale, **options)  # type: ignore[no-any-return]  # one


def leaves(*lead: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return leaf(*(lead or (M,)), K), leaf(N, K), leaf(N), leaf(N, seed=3)


SAVES = ["recompute", "preactivation"]


@pytest.mark.parametrize("save", SAVES)
def test_a_graph_that_is_kept_gives_the_same_gradients_again(save: str) -> None:
    inputs = leaves()
    y = fused(*inputs, save=save)
    first = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    y.sum().backward()
    want = torch.autograd.grad(plain(*inputs).sum(), inputs)
    for one, two, x, expected in zip(first, second, inputs, want, strict=True):
        torch.testing.assert_close(one, expected)
        assert torch.equal(one, two)
        assert x.grad is not None
        assert torch.equal(one, x.grad)


@pytest.mark.parametrize("index", range(4))
def test_one_operand_alone(index: int) -> None:
    """Asked for alone, and the only one that requires grad."""
    inputs = leaves()
    want = torch.autograd.grad(plain(*inputs).sum(), inputs[index])
    torch.testing.assert_close(torch.autograd.grad(fused(*inputs).sum(), inputs[index]), want)
    alone = [x if i == index else x.detach() for i, x in enumerate(inputs)]
    torch.testing.assert_close(torch.autograd.grad(fused(*alone).sum(), inputs[index]), want)


STRANGE: dict[str, Callable[[], Tensor]] = {
    "of columns": lambda: leaf(N, M).detach().t(),
    "every other": lambda: leaf(2 * M, 2 * N).detach()[::2, ::2],
    "one number": lambda: torch.tensor(2.0, dtype=torch.float64).expand(M, N),
    "one row": lambda: leaf(N).detach().expand(M, N),
    "one column": lambda: leaf(M, 1).detach().expand(M, N),
    "zero": lambda: torch.zeros(M, N, dtype=torch.float64),
}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", STRANGE)
def test_gradients_that_lie_in_any_way(name: str, save: str) -> None:
    inputs, gradient = leaves(), STRANGE[name]()
    found = torch.autograd.grad(fused(*inputs, save=save), inputs, gradient)
    torch.testing.assert_close(found, torch.autograd.grad(plain(*inputs), inputs, gradient))


@pytest.mark.parametrize("lead", [(2, M), (2, 3, M), (2, 1, M), ()])
def test_more_dims(lead: tuple[int, ...]) -> None:
    inputs = leaves(*lead)
    found = torch.autograd.grad(fused(*inputs).square().sum(), inputs)
    torch.testing.assert_close(found, torch.autograd.grad(plain(*inputs).square().sum(), inputs))


def test_gradients_lie_as_what_they_belong_to() -> None:
    """Else autograd would copy each weight's gradient into the layout of the weight."""
    x, weight, a, b = leaf(M, K), leaf(N, K), leaf(K, M).t(), leaf(K, N)
    inputs = x, weight, a, b
    y, z = ef.linear(x, weight, epilogue=ef.silu), ef.gemm(a, b, epilogue=ef.silu)
    for value, gradient in zip(inputs, torch.autograd.grad(y.sum() + z.sum(), inputs), strict=True):
        assert gradient.stride() == value.stride()


@pytest.mark.parametrize("changed", [0, 1, 2, 3])
def test_an_input_changed_before_the_backward_is_torchs_error(changed: int) -> None:
    inputs = leaves()
    y = fused(*inputs)
    with torch.no_grad():
        inputs[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_gradient_shared_by_two_operands_keeps_wider_dtype() -> None:
    narrow, wide = leaf(M, N).detach().bfloat16().requires_grad_(), leaf(M, N).detach().float().requires_grad_()
    a, b = leaf(M, K).detach().float(), leaf(K, N).detach().float()
    y = ef.gemm(a, b, epilogue="def epi(accum, C, E): D = tanh(accum + E + C); return D", C=narrow, E=wide)
    found = torch.autograd.grad(y.sum(), (wide, narrow))
    want = torch.autograd.grad(torch.tanh(a @ b + wide + narrow).sum(), (wide, narrow))
    torch.testing.assert_close(found, want, atol=1e-6, rtol=1e-2)
    torch.testing.assert_close(found[0], want[0], atol=1e-6, rtol=1e-5)


def test_the_product_may_be_without_gradient() -> None:
    x, weight, bias, scale = leaves()
    found = torch.autograd.grad(fused(x.detach(), weight.detach(), bias, scale).sum(), (bias, scale))
    torch.testing.assert_close(found, torch.autograd.grad(plain(x, weight, bias, scale).sum(), (bias, scale)))


def test_a_hint_keeps_the_gradient_of_what_it_holds() -> None:
    x, weight, bias, scale = (value.detach() for value in leaves())
    scale.requires_grad_()
    y = fused(x, weight, bias, ef.Load(scale))  # type: ignore[arg-type]  # a hint is a tensor
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), scale), torch.autograd.grad(plain(x, weight, bias, scale).sum(), scale)
    )


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


ACTIVATIONS = ("relu", "leaky_relu", "hardtanh", "hardswish", "relu6", "gelu", "elu")
"""Most have a step in their derivative."""


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_in_bfloat16_are_no_worse_than_pytorchs(name: str, save: str) -> None:
    """On whichever side of a step the forward was, the backward is, whatever was rounded in between."""
    x, weight, bias = ((0.3 * leaf(*shape).detach()).bfloat16() for shape in ((48, 32), (40, 32), (40,)))
    function: Any = getattr(F, name, getattr(torch, name, VOCABULARY[name].function))
    gradient = leaf(48, 40).detach().bfloat16()

    def gradients(layer: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = tuple(value.to(dtype).requires_grad_() for value in (x, weight, bias))
        return torch.autograd.grad(layer(*inputs), inputs, gradient.to(dtype))

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return function(F.linear(x, weight, bias))  # type: ignore[no-any-return]  # a tensor

    text = f"def epi(accum): D = {name}(accum); return D"
    exact, eager = gradients(plain, torch.float64), gradients(plain, torch.bfloat16)
    mine = gradients(lambda *inputs: ef.linear(*inputs, epilogue=text, save=save), torch.bfloat16)
    for want, theirs, ours in zip(exact, eager, mine, strict=True):
        assert (ours - want).norm() <= 1.1 * (theirs - want).norm()


# --- transforms -------------------------------------------------------------------------------------------------------


def loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: function(*inputs).square().sum()


def test_grad_and_vjp_of_functions() -> None:
    inputs = tuple(value.detach() for value in leaves())
    every = tuple(range(4))
    want = torch.func.grad(loss(plain), argnums=every)(*inputs)
    torch.testing.assert_close(torch.func.grad(loss(fused), argnums=every)(*inputs), want)
    _, pull = torch.func.vjp(fused, *inputs)
    _, pull_plain = torch.func.vjp(plain, *inputs)
    gradient = leaf(M, N).detach()
    torch.testing.assert_close(pull(gradient), pull_plain(gradient))


def test_gradients_of_every_sample() -> None:
    x, weight, bias, scale = (value.detach() for value in leaves(5, 2))
    per_sample = [
        torch.func.vmap(torch.func.grad(loss(function), argnums=1), in_dims=(0, None, None, None))
        for function in (fused, plain)
    ]
    torch.testing.assert_close(*(function(x, weight, bias, scale) for function in per_sample))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("save", SAVES)
def test_many_gradients_at_once(save: str) -> None:
    """As for a Jacobian, by autograd's own batches and by vmap; later backwards are fused as before."""
    inputs, several = leaves(), leaf(5, M, N).detach()
    y, want = fused(*inputs, save=save), plain(*inputs)

    def batched(y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, inputs, several, retain_graph=True, is_grads_batched=True)

    def mapped(y: Tensor) -> tuple[Tensor, ...]:
        return torch.vmap(lambda one: torch.autograd.grad(y, inputs, one, retain_graph=True))(several)  # type: ignore[no-any-return]  # untyped

    for many in (batched, mapped, batched):
        torch.testing.assert_close(many(y), many(want))
        torch.testing.assert_close(
            torch.autograd.grad(y.sum(), inputs, retain_graph=True),
            torch.autograd.grad(want.sum(), inputs, retain_graph=True),
        )


def test_second_derivatives_of_transforms_match_the_operations() -> None:
    inputs = tuple(value.detach() for value in leaves())
    twice = [
        torch.func.grad(lambda x, f=f: torch.func.grad(lambda y: loss(f)(y, *inputs[1:]))(x).sum())
        for f in (fused, plain)
    ]
    torch.testing.assert_close(*(function(inputs[0]) for function in twice))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_under_autocast(dtype: torch.dtype) -> None:
    """Backward inside and outside of it, the weights in float32."""
    inputs = tuple(value.detach().float().requires_grad_() for value in leaves(8))
    with torch.autocast("cpu", dtype=dtype):
        y = fused(*inputs)
        inside = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    outside = torch.autograd.grad(y.sum(), inputs)
    want = torch.autograd.grad(plain(*inputs).sum(), inputs)
    for one, other, expected in zip(inside, outside, want, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, atol=8 * torch.finfo(dtype).eps, rtol=8 * torch.finfo(dtype).eps)


# --- the other forms --------------------------------------------------------------------------------------------------


def arguments(*inputs: Tensor) -> ef.GemmArguments:
    x, weight, bias, scale = inputs
    return ef.GemmArguments(
        x, weight.t(), epilogue=ef.EpilogueArguments(scaled, bias=bias, scale=scale, D=torch.empty(M, N).double())
    )


@pytest.mark.parametrize("index", range(4))
def test_arguments_that_require_grad_are_refused_by_name(index: int) -> None:
    inputs = [x if i == index else x.detach() for i, x in enumerate(leaves())]
    name = ("A", "B", "operand 'bias'", "operand 'scale'")[index]
    with pytest.raises(ArgumentError, match=f"{name} requires grad, and this call records no gradients"):
        arguments(*inputs)


def test_a_kernel_records_nothing_and_says_so() -> None:
    inputs = leaves()
    with torch.no_grad():
        args = arguments(*inputs)
        (kernel, *_) = ef.get_kernels(args)
    for launch in (kernel.run, kernel.bind):
        with pytest.raises(ArgumentError, match="A requires grad, and this call records no gradients"):
            launch(args)
    with torch.no_grad():
        kernel.run(args)


def test_the_plan_object_is_differentiable() -> None:
    plan = ef.Gemm(element=torch.float32, layout=ef.LayoutType.RowMajor)
    plan.activation = ef.silu
    a, b, c = (leaf(*shape).detach().float().requires_grad_() for shape in ((M, K), (K, N), (M, N)))
    found = torch.autograd.grad(plan.run(a, b, c, alpha=0.5, beta=2.0).sum(), (a, b, c))
    want = torch.autograd.grad(F.silu(0.5 * (a @ b) + 2.0 * c).sum(), (a, b, c))
    torch.testing.assert_close(found, want)
    with pytest.raises(EpifuseError, match="'D' is given, and it or an input requires grad"):
        plan.run(a, b, c, torch.empty(M, N), alpha=0.5, beta=2.0)


# --- what the process does meanwhile ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.autograd.detect_anomaly(),
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("switched off"),
        lambda: torch.autograd.graph.save_on_cpu(),
        lambda: torch.device("meta"),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_derivative_is_traced_in_any_mode(mode: Callable[[], Any]) -> None:
    forget()
    a, b = leaf(M, K), leaf(K, N)
    with mode():
        found = torch.autograd.grad(ef.gemm(a, b, epilogue=ef.silu).sum(), (a, b))
    torch.testing.assert_close(found, torch.autograd.grad(F.silu(a @ b).sum(), (a, b)))


def test_derivatives_are_traced_in_many_threads() -> None:
    """torch.fx patches functions of the process while it traces."""
    forget()
    start = Barrier(8)

    def gradients(number: int) -> tuple[Tensor, ...]:
        a, b = leaf(M, K), leaf(K, N)
        start.wait()
        return torch.autograd.grad(ef.gemm(a, b, epilogue=f"lambda accum: silu(accum) + {number}").sum(), (a, b))

    a, b = leaf(M, K), leaf(K, N)
    want = torch.autograd.grad(F.silu(a @ b).sum(), (a, b))
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(gradients, range(8)):
            torch.testing.assert_close(found, want)


def test_selective_checkpoints_repeat_what_they_saw() -> None:
    """A launch that is prepared runs other operations than the first one, and these are counted."""
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    for policy in ([], saved):
        given = leaves()
        want = torch.autograd.grad(plain(*given).sum(), given)
        contexts = partial(create_selective_checkpoint_contexts, policy)
        for _ in range(3):
            out = checkpoint(fused, *given, use_reentrant=False, context_fn=contexts)
            torch.testing.assert_close(torch.autograd.grad(out.sum(), given), want)
            fused(*given)


def test_outputs_that_vary_with_no_leaf_require_no_gradient() -> None:
    def epilogue(accum: Any, tile: Any) -> Any:
        D = accum * tile
        E = tile + 1
        G = (accum > 0).to(torch.float32)
        return D, E, G

    a, b, tile = leaf(M, K).float(), torch.randn(K, N), torch.randn(M, N)
    D, E, G = ef.gemm(a, b, epilogue=epilogue, tile=tile)
    assert (D.requires_grad, E.requires_grad, G.requires_grad) == (True, False, False)
    D, E, G = ef.gemm(a.detach(), b, epilogue=epilogue, tile=tile.requires_grad_())
    assert (D.requires_grad, E.requires_grad, G.requires_grad) == (True, True, False)
    E.sum().backward()
    assert torch.equal(tile.grad, torch.ones(M, N))  # type: ignore[arg-type]  # there is one
