"""A of 16 bits and B of 8: what the CPU computes, what has a gradient, what Hopper plans, and what it compiles to."""

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import ArgumentError

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2, INT8, UINT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8
WIDE, NARROW = (BF16, F16), (INT8, UINT8, E4M3, E5M2)
SCALED = "def epi(accum, scale): D = silu(accum * scale); return D\n"


def every(dtype, *shape):
    """Each value of a dtype in turn, but infinities and NaN."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = values[values.float().isfinite()]
    return values.repeat(-(-torch.Size(shape).numel() // len(values)))[: torch.Size(shape).numel()].view(shape)


def layer(a, b, m=5, n=20, k=70):
    """x, a weight of 8 bits, and a scale for each of its rows."""
    return torch.randn(m, k).to(a), every(b, n, k), torch.rand(n) * 0.1


# --- values and gradients on the CPU ---------------------------------------------------------------------------------


@pytest.mark.parametrize("b", NARROW, ids=str)
@pytest.mark.parametrize("a", WIDE, ids=str)
def test_every_value_of_8_bits_is_exact_in_16(a, b):
    values = every(b, 256)
    assert torch.equal(values.to(a).double(), values.double())


@pytest.mark.parametrize("b", NARROW, ids=str)
@pytest.mark.parametrize("a", WIDE, ids=str)
def test_a_product_is_that_of_the_converted_weight(a, b):
    x, weight, scale = layer(a, b)
    found, want = (ef.linear(x, w, epilogue=SCALED, scale=scale) for w in (weight, weight.to(a)))
    assert found.dtype == a
    assert torch.equal(found, want)
    found, want = (ef.gemm(x.expand(3, 5, 70), w.t().expand(3, 70, 20)) for w in (weight, weight.to(a)))
    assert torch.equal(found, want)


@pytest.mark.parametrize("b", [INT8, E4M3], ids=str)
def test_gradients_are_those_of_the_converted_weight(b):
    found = []
    for convert in (False, True):
        torch.manual_seed(0)
        x, weight, scale = layer(BF16, b)
        x, scale = x.requires_grad_(), scale.requires_grad_()
        ef.linear(x, weight.to(BF16) if convert else weight, epilogue=SCALED, scale=scale).sum().backward()
        found.append((x.grad, scale.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_gradients_of_batches():
    x, weight = torch.randn(2, 5, 32).bfloat16().requires_grad_(), every(INT8, 2, 32, 7)
    ef.gemm(x, weight).sum().backward()
    assert torch.equal(x.grad, weight.sum(-1).bfloat16()[:, None].expand(2, 5, 32))


def test_a_weight_of_8_bits_has_no_gradient():
    x, weight, _ = layer(BF16, E4M3)
    with pytest.raises(ArgumentError, match=r"weight requires grad and is torch\.float8_e4m3fn, which has no gradient"):
        ef.linear(x, weight.requires_grad_())


def test_autocast_casts_the_input_alone():
    x, weight, _ = layer(F32, INT8)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(ef.linear(x, weight), ef.linear(x.bfloat16(), weight))


def test_a_compiled_call_is_an_operator():
    x, weight, scale = layer(BF16, INT8)
    call = torch.compile(lambda x: ef.linear(x, weight, epilogue=SCALED, scale=scale), fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(call(x), ef.linear(x, weight, epilogue=SCALED, scale=scale))


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (INT8, BF16, "A has fewer bits than B: torch.int8 and torch.bfloat16"),
        (F32, INT8, "16 bits with 8 of B"),
        (INT8, E4M3, "the two dtypes must agree"),
        (BF16, torch.int16, "B is torch.int16, which no kernel multiplies"),
    ],
    ids=str,
)
def test_other_pairs_are_refused_by_name(a, b, message):
    with pytest.raises(ArgumentError, match=message):
        ef.gemm(torch.ones(4, 8).to(a), torch.ones(8, 4).to(b))
