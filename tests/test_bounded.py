"""The reference's error bounds: wide enough for an honest float32 evaluation, narrow enough to tell a wrong one."""

import pytest
import torch

from epifuse.testing import bounded, compare_bounded

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_softmax_near_one(name, spread):
    """Where one element is nearly all, the logarithm is nearly zero, and its error is the sum's, not its own size's."""
    torch.manual_seed(0)
    x = torch.randn(2000, 5) * spread
    function = getattr(torch, name)
    want = function(bounded(x, EPS), dim=-1)
    got = function(x, dim=-1)
    assert compare_bounded(got, want).wrong == 0
    assert compare_bounded(got * (1 + 1e-4), want).wrong > 0.9 * (got.abs() > 1e-30).sum()


def test_a_remainder_moved_by_whole_periods_is_unknown():
    x, y = torch.tensor([7, 7, 7]), torch.tensor(3)
    moved = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    bound = torch.remainder(bounded(x, EPS, moved), y).bound
    assert bound[0] == 0
    assert 1 <= bound[1] < torch.inf
    assert bound[2] == torch.inf
    assert torch.equal((bounded(x, EPS, moved) % y).bound, bound)


def test_what_may_be_anything_stays_so():
    """A negative number's power is NaN in float64 and a number in float32 where its exponent rounds to a whole one."""
    half_way, room = torch.tensor([2.0**26 + 0.5], dtype=torch.float64), torch.tensor([4.0], dtype=torch.float64)
    exponent = bounded(half_way, EPS, room)
    power = torch.pow(bounded(torch.tensor([-1.0]), EPS), exponent)
    assert power.isnan().all()
    assert (power * 2.0 + 1.0).bound == torch.inf


def test_what_a_float32_flushes_is_no_mistake():
    """Torch's own silu in float32 loses its exponential before the product with x is below the smallest number."""
    x = torch.linspace(-100.0, -80.0, 101)
    want = torch.nn.functional.silu(bounded(x, EPS))
    assert compare_bounded(torch.nn.functional.silu(x), want).wrong == 0
    assert compare_bounded(torch.full_like(x, 1e-36), want).wrong == len(x)


def test_what_may_overflow_may_be_anything():
    """Beside its pole a tangent may lie on either side, and its exponential be zero or infinite."""
    pole = bounded(torch.tensor([-1.5710]), EPS, torch.tensor([1e-3], dtype=torch.float64))
    power = torch.exp(torch.tan(pole))
    assert power.isinf()
    assert power.bound == torch.inf
    assert torch.clamp(bounded(torch.zeros(1), EPS), power, torch.tensor(1.0)).bound == torch.inf


def test_what_may_be_infinite_compares_either_way():
    """The sign of a computed zero is open, and with it the sign of its inverse."""
    zero = bounded(torch.tensor([-0.0]), EPS) * bounded(torch.tensor([1.0]), EPS)
    inverse = torch.rsqrt(zero)
    assert inverse.bound == torch.inf
    assert (inverse > 0.0).bound == 1
    assert (inverse < 0.0).bound == 1


def test_what_is_rounded_is_the_moved_value():
    """Zero times a third is exact; what may be one, times a third, rounds by a third's size."""
    may_be_one = bounded(torch.tensor([0.0]), EPS, torch.tensor([1.0], dtype=torch.float64))
    product = may_be_one * bounded(torch.tensor([1 / 3], dtype=torch.float64), EPS)
    assert product.bound > (torch.tensor([1.0]) * torch.tensor([1 / 3])).double()
