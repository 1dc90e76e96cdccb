"""ef.linear: weight as nn.Linear has it, any leading dims, bias before the epilogue."""

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import epifuse as ef
from epifuse.base.errors import ArgumentError, ArgumentTypeError

M, N, K = 4, 6, 3
A, B = torch.arange(12.0).reshape(M, K) - 5, torch.arange(18.0).reshape(K, N) - 7


def epi(accum: Any, C: Any) -> Any:
    D = accum + C
    return D


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_linear(lead: tuple[int, ...]) -> None:
    x, weight, bias = torch.randint(-3, 4, (*lead, K)).float(), B.T, torch.arange(6.0)
    plain = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(ef.linear(x, weight, bias), plain)
    assert torch.equal(ef.linear(x, weight, bias, epilogue=ef.relu), plain.relu())
    residual = torch.randint(-3, 4, (*lead, N)).float()
    assert torch.equal(ef.linear(x, weight, epilogue=epi, C=residual), plain - bias + residual)
    named = "def epi(accum, bias): D = relu(accum) + bias; return D"
    assert torch.equal(ef.linear(x, weight, bias, epilogue=named), (plain - bias).relu() + bias)
    out = torch.zeros_like(plain)
    ef.linear(x, weight, bias, out=out)
    assert torch.equal(out, plain)


def test_an_output_of_linear_that_cannot_be_seen_as_rows() -> None:
    """Flattening it would copy, and the copy would be written: three dims are a batch, more are refused."""
    x, out = torch.ones(2, 3, K), torch.zeros(3, 2, N).transpose(0, 1)
    ef.linear(x, B.T, out=out)
    assert torch.equal(out, torch.nn.functional.linear(x, B.T))
    with pytest.raises(ArgumentError, match="leading dims of output 'D' cannot be merged into one"):
        ef.linear(torch.ones(4, 3, 2, K), B.T, out=torch.zeros(2, 3, 4, N).transpose(0, 2))
    sliced = torch.zeros(2, 3, 2 * N)[..., ::2]
    ef.linear(x, B.T, out=sliced)
    assert torch.equal(sliced, torch.nn.functional.linear(x, B.T))


def test_x_and_weight_by_name() -> None:
    assert torch.equal(ef.linear(x=A, weight=B.T), A @ B)


@pytest.mark.parametrize(("x", "weight"), [(torch.tensor(1.0), B), (A, B[0]), (A, B[None])])
def test_linear_of_wrong_shapes(x: torch.Tensor, weight: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match=r"x must be \(\.\.\., K\) and weight \(N, K\)"):
        ef.linear(x, weight)


def test_linear_of_what_is_no_tensor() -> None:
    with pytest.raises(ArgumentTypeError, match=r"x must be a torch\.Tensor"):
        ef.linear([1.0], B)  # type: ignore[arg-type]


def test_hints_of_transport_in_linear() -> None:
    x, weight = torch.ones(2, 3, 4), torch.ones(5, 4)
    D = torch.ones(2, 3, 5)
    operands = {"residual": ef.Load(torch.full((2, 3, 5), 2.0))}
    out = {"D": ef.Store(D, accumulate=True)}
    result = ef.linear(x, weight, operands=operands, out=out, epilogue=lambda accum, residual: accum + residual)  # type: ignore[arg-type]
    assert result is D
    assert torch.equal(D, torch.full((2, 3, 5), 7.0))


def test_what_linear_returned_is_a_destination() -> None:
    """One number a row of x has x's leading dims; it can be written and added onto."""
    x, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    source = "def f(accum): s = accum.sum(dim=-1); return s"
    s = ef.linear(x, weight, epilogue=source)
    again = torch.zeros_like(s)
    assert ef.linear(x, weight, epilogue=source, out=again) is again
    assert torch.equal(again, s)
    ef.linear(x, weight, epilogue=source, out=again, accumulate="s")
    torch.testing.assert_close(again, 2 * s)


class Layer(torch.nn.Module):
    """A linear layer with gelu."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ef.linear(x, self.linear.weight, self.linear.bias, epilogue=ef.gelu)


STRIDED = {
    "without its first rows": lambda: torch.randn(3, 5, 4)[:, 1:],
    "transposed": lambda: torch.randn(2, 4, 3).transpose(1, 2),
    "with batches inside": lambda: torch.randn(3, 5, 4).transpose(0, 1),
    "expanded": lambda: torch.randn(3, 1, 4).expand(3, 5, 4),
    "plain": lambda: torch.randn(2, 3, 4),
    "a vector": lambda: torch.randn(4),
}
TRACERS = {
    "eager": lambda layer, x: layer(x),
    "compile": lambda layer, x: torch.compile(layer, backend="eager", fullgraph=True)(x),
    "compile, dynamic": lambda layer, x: torch.compile(layer, backend="eager", dynamic=True)(x),
    "export": lambda layer, x: torch.export.export(layer, (x,)).module()(x),
    "jit": lambda layer, x: torch.jit.trace(layer, x)(x),
    "make_fx": lambda layer, x: make_fx(layer)(x)(x),
    "vmap": lambda layer, x: torch.vmap(layer)(x[None])[0],
}


@pytest.mark.filterwarnings("ignore")  # torch.jit's, of sizes that it does not see
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("x", STRIDED)
def test_rows_that_are_not_one_are_traced(x: str, tracer: str) -> None:
    """Strides say whether they are one: a view that is tried and fails is the tracer's error, or part of its trace."""
    torch._dynamo.reset()
    layer, given = Layer(), STRIDED[x]()
    want = torch.nn.functional.gelu(layer.linear(given))
    torch.testing.assert_close(TRACERS[tracer](layer, given), want)


def test_leading_dims_beside_dims_that_the_epilogue_cuts() -> None:
    """What the hint says works."""
    x, weight, scale = torch.randn(2, 3, 4, 5), torch.randn(16, 5), torch.randn(4, 1, 4)

    def heads(accum: Any, scale: Any) -> Any:
        D = accum.unflatten(-1, (4, 4)) * scale
        return D

    def flat(accum: Any, scale: Any) -> Any:
        D = accum.unflatten(0, (2, 3)).unflatten(-1, (4, 4)) * scale
        return D

    want = (x @ weight.T).unflatten(-1, (4, 4)) * scale
    with pytest.raises(ef.errors.EpifuseError, match=r"accum.unflatten\(0, \(2, 3\)\)"):
        ef.linear(x, weight, epilogue=heads, scale=scale)
    torch.testing.assert_close(ef.linear(x.flatten(0, 1), weight, epilogue=flat, scale=scale), want)


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_several_outputs_pass_hooks_of_modules(hook: str) -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return ef.gemm(x, B, epilogue="def f(accum): h = relu(accum); s = h.sum(dim=-1); return h, s")

    module, x = Two(), torch.randn(M, K, requires_grad=True)
    getattr(module, hook)(lambda *_: None)
    first, second = module(x)
    (first.sum() + second.sum()).backward()
    assert torch.equal(x.grad, 2 * (x.detach() @ B > 0).float() @ B.T)


def normed(accum: Any) -> Any:
    return (accum - accum.mean(-1, keepdim=True)) * torch.rsqrt(accum.var(-1, unbiased=False, keepdim=True) + 1e-5)


class Normed(torch.nn.Linear):
    """A layer whose epilogue counts the columns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ef.linear(x, self.weight, epilogue=normed)


@pytest.mark.filterwarnings("ignore")  # torch.jit's, of sizes that it does not see
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_variance_is_traced(tracer: str) -> None:
    """Where torch.jit traces, sizes are tensors, from which no bool is taken."""
    torch._dynamo.reset()
    layer, x = Normed(4, 5), torch.randn(3, 4)
    torch.testing.assert_close(TRACERS[tracer](layer, x), normed(x @ layer.weight.t()))
