"""The reference's error bounds: wide enough for an honest float32 evaluation, narrow enough to tell a wrong one."""

import pytest
import torch

from epifuse.fusion.primitives import PRIMITIVES
from epifuse.tools.testing import bounded, compare_bounded

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


FLOATING = [name for name, row in PRIMITIVES.items() if row.rule in ("floating", "divide")]


@pytest.mark.parametrize("name", FLOATING)
def test_the_bound_near_a_pole_is_unknown(name):
    """1 / x is positive or negative infinity where x is zero, by a sign that an error bound leaves open."""
    meaning, arity = PRIMITIVES[name].meaning, PRIMITIVES[name].arity
    for position in range(arity):
        given = [torch.tensor([1.5], dtype=torch.float64) for _ in range(arity)]
        given[position] = torch.tensor([0.0], dtype=torch.float64)
        there, opposite = meaning(*given), meaning(*(x if i != position else -x for i, x in enumerate(given)))
        if there.isinf() and there == -opposite:
            # Moved up and down, it passes zero and meets it nowhere.
            given[position] = bounded(given[position] + 1e-9, EPS, torch.tensor([1.5e-9], dtype=torch.float64))
            assert meaning(*given).bound.isinf().all()


@pytest.mark.parametrize("name", [name for name in FLOATING if PRIMITIVES[name].arity == 1])
def test_the_bound_beyond_a_period_is_unknown(name):
    meaning, x = PRIMITIVES[name].meaning, torch.linspace(0.3, 1.2, 20, dtype=torch.float64)
    value = meaning(x)
    if torch.allclose(value, meaning(x + 2 * torch.pi)) and value.std() > 0.01:
        moved = meaning(bounded(x, EPS, torch.full_like(x, 2 * torch.pi)))
        assert moved.bound.isinf().all()


def test_parts_carry_their_bounds():
    x = torch.linspace(-2.0, 2.0, 16).reshape(2, 8)
    room = torch.rand(2, 8, dtype=torch.float64) * 1e-3
    first, second = bounded(x, EPS, room).chunk(2, -1)
    assert torch.equal(first.bound, room[:, :4])
    gate = torch.nn.functional.glu(bounded(x, EPS, room))
    wrong = torch.nn.functional.glu(x + torch.cat([room[:, :4], -room[:, 4:]], dim=-1).float())
    assert compare_bounded(wrong, gate).wrong == 0
    assert compare_bounded(wrong + 0.01, gate).wrong == 8
    torch.testing.assert_close(torch.cat([second, first], dim=-1).bound[:, :4], room[:, 4:], atol=1e-6, rtol=0)
