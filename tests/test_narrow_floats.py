"""Values cast to float16 or bfloat16 inside an epilogue are computed as PyTorch computes in them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import epifuse as ef

EXPRESSIONS = {
    "sum": "h + h * 3.0",
    "all narrow": "multiply_add(h, h, h)",
    "narrow product, wide sum": "multiply_add(h, h, accum)",
    "narrow product of a number, wide sum": "multiply_add(0.3, h, accum)",
    "wide product, narrow sum": "multiply_add(accum, accum, h)",
}


@pytest.mark.parametrize("cast", ["half", "bfloat16"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_each_operation_rounds_where_torch_rounds(name, cast):
    torch.manual_seed(0)
    a, b = (torch.randint(-8, 9, shape).float() for shape in ((32, 16), (16, 48)))
    accum = a @ b
    want = eval(EXPRESSIONS[name], {"accum": accum, "h": getattr(accum, cast)(), "multiply_add": ef.multiply_add})
    source = f"def epi(accum): h = accum.{cast}(); D = {EXPRESSIONS[name]}; return D"
    assert torch.equal(ef.gemm(a, b, epilogue=source, out_dtypes=want.dtype), want)


def test_float32_beside_float64_is_not_computed_with() -> None:
    a = torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(ef.errors.EpilogueTypeError, match=r"(?s)f32 can be stored or cast.*write \.double\(\) first"):
        ef.gemm(a, a, epilogue="lambda accum: accum.float() * 2")
    assert ef.gemm(a, a, epilogue="lambda accum: accum.float()").dtype == torch.float32


# --- functions that are made of several operations -------------------------------------------------------------------

ROUNDED_ONCE = {
    "softmax": "torch.softmax(h, dim=-1)",
    "log_softmax": "torch.log_softmax(h, dim=-1)",
    "lerp": "torch.lerp(h, g, 0.3)",
    "addcmul": "torch.addcmul(h, g, g, value=0.7)",
    "addcdiv": "torch.addcdiv(h, g, h, value=0.7)",
    "glu": "F.glu(h, dim=-1)",
    "logaddexp": "torch.logaddexp(h, g)",
    "var": "torch.var(h, dim=-1)",
    "std": "torch.std(h, dim=-1)",
}


@pytest.mark.parametrize("cast", ["half", "bfloat16"])
@pytest.mark.parametrize("name", ROUNDED_ONCE)
def test_composites_round_their_result_alone(name, cast):
    torch.manual_seed(0)
    a, b = torch.randn(32, 16), torch.randn(16, 48)
    h, g = (getattr(x, cast)() for x in (a @ b, 0.37 * (a @ b)))
    wide, narrow, ours = (
        eval(ROUNDED_ONCE[name], {"torch": library, "F": F if library is torch else ef, "h": x, "g": y})
        for library, x, y in ((torch, h.double(), g.double()), (torch, h, g), (ef, h, g))
    )
    source = f"def epi(accum): h = accum.{cast}(); g = (0.37 * accum).{cast}(); D = {ROUNDED_ONCE[name]}; return D"
    last_place = torch.finfo(h.dtype).eps
    # Where it cancels, float32 rounds visibly, too.
    torch.testing.assert_close(ef.gemm(a, b, epilogue=source).double(), wide, rtol=last_place / 2, atol=1e-5)
    torch.testing.assert_close(ours, narrow, rtol=last_place, atol=1e-5)


def probabilities(accum: Any) -> Any:
    h = (1.1 * accum).to(torch.bfloat16)
    D = torch.log_softmax(h * 0.7, dim=-1)
    E = torch.softmax(h, dim=-1)
    return D, E


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_gradients_of_16_bit_softmax_are_numbers(backend):
    """PyTorch's compiler leaves roundings out, in one pass and not the other: no element may have to be the largest."""
    torch.manual_seed(0)
    torch.compiler.reset()
    a, b, w = torch.randn(32, 16, requires_grad=True), torch.randn(16, 48), torch.randn(48)

    def loss(a: Any) -> Any:
        D, E = ef.gemm(a, b, epilogue=probabilities)
        return ((D + 10 * E) * w).sum()

    exact = a.detach().double().requires_grad_()
    x = exact @ b.double() * 1.1
    ((torch.log_softmax(x * 0.7, -1) + 10 * torch.softmax(x, -1)) * w).sum().backward()
    (torch.compile(loss, backend=backend) if backend else loss)(a).backward()
    assert (a.grad - exact.grad).abs().max() <= 0.02 * exact.grad.abs().max()
