"""bfloat16 products in float32: through MKL where the processor makes it pay, through an upcast elsewhere."""

import pytest
import torch

import epifuse as ef
from epifuse.base.cache import forget
from epifuse.providers.cpu import mkl, product

WAYS = ("as it is here", "upcast")
SHAPES = [(5, 7, 9), (1, 16, 1), (64, 1, 33), (40, 0, 3), (300, 70, 130)]
LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.T.contiguous().T,
    "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "strided": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "upcast":
        monkeypatch.setattr(mkl, "bfloat16_product", lambda: None)
    forget()  # a call that was prepared the other way
    yield request.param
    forget()


def matrix(shape, layout):
    torch.manual_seed(0)
    return LAYOUTS[layout](torch.randint(-8, 9, shape).to(torch.bfloat16))


@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_whole_numbers_are_exact_in_any_layout(shape, a_layout, b_layout, way):
    m, k, n = shape
    a, b = matrix((m, k), a_layout), matrix((k, n), b_layout)
    want = (a.double() @ b.double()).float()
    assert torch.equal(
        ef.gemm(a, b, epilogue="def epi(accum): D = accum * 1; return D", out_dtypes=torch.float32), want
    )
    prepared = b.to(product.operand_dtype(a.dtype, b.dtype, torch.float32))
    for out in (torch.empty(m, n), torch.empty(n, m).T, torch.empty(m, 2 * n)[:, ::2]):
        product.multiply(a, prepared, out, None)
        assert torch.equal(out, want)


def test_the_sum_is_kept_in_float32(way):
    torch.manual_seed(0)
    a, b = torch.randn(64, 512, dtype=torch.bfloat16), torch.randn(512, 96, dtype=torch.bfloat16)
    exact = a.double() @ b.double()
    got = ef.gemm(a, b, epilogue="def epi(accum): D = accum; return D", out_dtypes=torch.float32)
    room = (a.double().abs() @ b.double().abs()) * 512 * torch.finfo(torch.float32).eps
    assert ((got - exact).abs() <= room).all()
    assert ((exact.to(torch.bfloat16) - exact).abs() > room).any()  # a sum rounded to bfloat16 would show


def test_mixed_inputs_are_not_bfloat16():
    assert product.operand_dtype(torch.bfloat16, torch.float32, torch.float32) == torch.float32
