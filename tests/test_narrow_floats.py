"""Values cast to float16 or bfloat16 inside an epilogue are computed as PyTorch computes in them."""

import pytest
import torch

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
