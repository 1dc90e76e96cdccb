"""Scales of blocks of a row, in float32, and as powers of two in e8m0."""

from typing import Any, Literal

import pytest
import torch

import epifuse as ef

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Rounding = Literal["none", "up", "floor"]


def quantised(accum, most, rounding):
    blocks = accum.unflatten(-1, (-1, 32))
    scale = ef.block_scale(ef.absmax(blocks, dim=-1, keepdim=True), most, rounding=rounding)
    D = (blocks / scale).flatten(-2, -1)
    return D, scale


def of(rounding: Rounding, most: float = 448.0) -> Any:
    """The epilogue `quantised` with this rounding and this largest value."""

    def epilogue(accum):
        D, scale = quantised(accum, most, rounding)
        return D, scale

    return epilogue


def factors(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a product whose rows differ much in size. One row is zero, and one is not finite."""
    torch.manual_seed(0)
    a, b = torch.randn(80, 64, device=device), torch.randn(64, 256, device=device)
    sizes = 2.0 ** torch.arange(-60, 100, 2, device=device)
    a = a * sizes[:, None]
    a[3], a[5, 0] = 0.0, torch.nan
    return a.bfloat16(), b.bfloat16()


@pytest.mark.parametrize("rounding", ["none", "up", "floor"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_block_is_held_by_its_scale(rounding: Rounding, device: str) -> None:
    a, b = factors(device)
    kind = torch.float32 if rounding == "none" else E8M0
    D, scale = ef.gemm(a, b, epilogue=of(rounding), out_dtypes={"D": E4M3, "scale": kind})
    product = ef.gemm(a, b, out_dtypes=torch.float32)
    largest = product.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).cpu().double()
    found = scale.cpu().float().double()
    assert scale.dtype == kind
    assert found[5].isnan().all()
    assert (found[3] == 1).all()
    kept = torch.arange(80) != 5
    kept[3] = False
    found, largest = found[kept], largest[kept]
    if rounding == "none":
        torch.testing.assert_close(found, largest / 448, rtol=1e-6, atol=0)
    elif rounding == "up":
        assert ((largest / 448 <= found) & (found < largest / 448 * 2)).all()
    else:
        assert ((found * 256 <= largest) & (largest < found * 512)).all()
    back = (D.float().unflatten(-1, (-1, 32)) * scale.float()).flatten(-2, -1)[kept].cpu()
    want = product[kept].cpu()
    # The largest step of e4m3 is 32, for values up to 448. With "floor" values of up to 512 saturate at 448.
    bound = want.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / (8 if rounding == "floor" else 14)
    assert ((back - want).abs() <= bound.expand(-1, -1, 32).flatten(-2, -1)).all()


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("device", DEVICES)
def test_at_every_power_of_two(rounding: Rounding, device: str) -> None:
    """Each power of two and its two neighbours in float32, down to the smallest scale."""
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64).float()
    infinity = torch.tensor(torch.inf)
    x = torch.cat([powers, torch.nextafter(powers, -infinity), torch.nextafter(powers, infinity)])
    empty = torch.zeros(x.numel(), 8, dtype=torch.bfloat16, device=device)
    epilogue = f"def epi(accum, x): D = accum + block_scale(x, 2.0, rounding='{rounding}'); return D"
    got = ef.gemm(empty, empty[:8].t(), epilogue=epilogue, x=x[:, None].to(device), out_dtypes=torch.float32)
    found = got[:, 0].cpu().double()
    assert torch.equal(ef.block_scale(x, 2.0, rounding=rounding).double(), found)
    mantissa, exponent = torch.frexp(x.double())
    want = 2.0 ** ((exponent - (mantissa == 0.5).int() if rounding == "up" else exponent - 1) - 1).double()
    reached = (x > 0) & x.isfinite()
    assert torch.equal(found[reached], want[reached].clamp(min=2.0**-126))
    assert (found[x == 0] == 1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_scales_may_lie_by_columns(device: str) -> None:
    """A product with scales along K may need this layout."""
    a, b = factors(device)
    out = {
        "D": torch.empty(80, 256, dtype=E4M3, device=device),
        "scale": torch.empty(8, 80, dtype=torch.uint8, device=device).view(E8M0).t()[..., None],
    }
    ef.gemm(a, b, epilogue=of("up"), out=out)
    _, scale = ef.gemm(a, b, epilogue=of("up"), out_dtypes={"D": E4M3, "scale": E8M0})
    assert torch.equal(out["scale"].cpu().view(torch.uint8), scale.cpu().view(torch.uint8))


@pytest.mark.filterwarnings("ignore:PyTorch runs the derivative")
def test_a_power_of_two_is_constant_for_gradients() -> None:
    """A value that is divided by a power of two has the gradient of a quotient by a constant. Division by the exact
    scale has a further term."""
    x = torch.randn(8, 16, requires_grad=True)
    weight = torch.randn(64, 16)
    for rounding in ("up", "floor"):
        D, scale = ef.linear(x, weight, epilogue=of(rounding))
        (found,) = torch.autograd.grad(D.sum(), x)
        each = (1 / scale).expand(-1, -1, 32).flatten(-2, -1)
        torch.testing.assert_close(found, each.detach() @ weight)
        (found,) = torch.autograd.grad(ef.linear(x, weight, epilogue=of(rounding))[1].sum(), x)
        assert (found == 0).all()


def test_another_rounding_is_refused() -> None:
    a, b = factors("cpu")
    with pytest.raises(ef.errors.EpilogueSyntaxError, match="'rounding' of block_scale"):
        ef.gemm(a, b, epilogue=lambda accum: ef.block_scale(accum.abs(), rounding="down"))


@pytest.mark.parametrize("most", [0, -448.0, float("inf"), float("nan"), "448"])
@pytest.mark.parametrize("rounding", ["none", "up", "floor"])
def test_most_is_a_positive_number(most: object, rounding: str) -> None:
    with pytest.raises(ValueError, match="'most' of block_scale\\(\\) must be a positive number"):
        ef.block_scale(torch.ones(1), most, rounding)


def test_most_is_checked_where_it_is_parsed() -> None:
    a, b = factors("cpu")
    for body in ("ef.block_scale(accum, 0)", "ef.block_scale(accum, most=-1.5, rounding='floor')"):
        with pytest.raises(ef.errors.EpilogueSyntaxError, match="'most' of block_scale"):
            ef.gemm(a, b, epilogue=f"def f(accum): D = {body}; return D")
    a, b, most = torch.randn(4, 8), torch.randn(8, 16), torch.full((16,), 2.0)
    D = ef.gemm(a, b, epilogue="def f(accum, most): D = ef.block_scale(accum.abs(), most); return D", most=most)
    torch.testing.assert_close(D, ef.block_scale((a @ b).abs(), most))
