"""Check the properties that the rows of primitives and reductions declare. The rows come from the registries."""

import itertools
from typing import Any

import pytest
import torch

from epifuse.fusion.primitives import PRIMITIVES, Primitive, primitive
from epifuse.fusion.reduction import REDUCTIONS, reduction

FLOATS = (0.0, -0.0, 1.5, -2.0, 0.25, float("inf"), float("-inf"), float("nan"))
INTEGERS = (0, 1, -1, 7, -12)


def numbers(row: Primitive) -> tuple[tuple[Any, ...], ...]:
    """For each argument, the values to try."""
    plain: tuple[Any, ...] = {"logic": (True, False), "integer": INTEGERS, "bits": INTEGERS, "random": INTEGERS}.get(
        row.rule, (*FLOATS, *INTEGERS)
    )
    return ((True, False), plain, plain) if row.rule == "select" else (plain,) * row.arity


def raises(row: Primitive, given: tuple[Any, ...]) -> bool:
    try:
        row.on_host(*given)
    except (ArithmeticError, ValueError):
        return True
    return False


def test_a_row_without_its_properties_is_none() -> None:
    with pytest.raises(TypeError, match=r"commutative.*error.*costly.*may_fail"):
        primitive("arithmetic")  # type: ignore[call-arg]  # the missing arguments are tested


@pytest.mark.parametrize("name", PRIMITIVES)
def test_may_fail(name: str) -> None:
    row = PRIMITIVES[name]
    assert any(raises(row, given) for given in itertools.product(*numbers(row))) == row.may_fail


@pytest.mark.parametrize("name", [name for name, row in PRIMITIVES.items() if row.arity == 2])
def test_commutative(name: str) -> None:
    row = PRIMITIVES[name]
    kinds = {"logic": (torch.bool,), "integer": (torch.int32,), "bits": (torch.int32,), "random": (torch.int32,)}.get(
        row.rule, (torch.int32, torch.float32)
    )
    x, y = (torch.tensor(pair) for pair in zip(*itertools.product(INTEGERS[1:], repeat=2), strict=True))
    pairs = [(x.to(kind), y.abs().to(kind)) for kind in kinds]
    same = (torch.equal(row.meaning(x, y), row.meaning(y, x)) for x, y in pairs)
    assert all(same) == row.commutative


@pytest.mark.parametrize("name", [name for name, row in PRIMITIVES.items() if row.error != "amplified"])
def test_an_error_of_the_arguments_is_not_amplified(name: str) -> None:
    """If all arguments move up or down, the relative change of the result is at most the sum of theirs."""
    row, step = PRIMITIVES[name], 1e-6
    x = torch.cat([torch.randn(1000), torch.logspace(-3, 3, 500), -torch.logspace(-3, 3, 500)]).double()
    masks = (x[torch.randperm(2000)] > 0,) if row.rule == "select" else ()
    exact = [x[torch.randperm(2000)] for _ in range(row.arity - len(masks))]
    if name == "clip":
        exact[1:] = [torch.minimum(*exact[1:]), torch.maximum(*exact[1:])]
    value = row.meaning(*masks, *exact)
    for signs in itertools.product((1, -1), repeat=len(exact)):
        moved = row.meaning(*masks, *(x * (1 + sign * step) for x, sign in zip(exact, signs, strict=True)))
        known = value.isfinite()
        assert ((moved - value).abs() <= len(exact) * step * 1.001 * value.abs())[known].all()


# --- reductions ---------------------------------------------------------------------------------------------------

FORMS = {"itself": lambda x: x, "square": lambda x: x * x, "size": torch.abs, "truth": lambda x: x != 0}
FLOATING = [name for name, row in REDUCTIONS.items() if row.rule != "mask"]
VALUES = torch.tensor([[1.5], [-2.0], [0.25], [0.0], [-7.0]], dtype=torch.float64)


def test_a_reduction_without_its_properties_is_none() -> None:
    with pytest.raises(TypeError, match="merge"):
        reduction("sum")  # type: ignore[call-arg]  # the missing arguments are tested
    with pytest.raises(TypeError, match=r"has_identity.*of_one.*of_equal.*of_ones"):
        reduction("sum", REDUCTIONS["sum"].merge)  # type: ignore[call-arg]  # the missing arguments are tested


@pytest.mark.parametrize("name", REDUCTIONS)
def test_of_one(name: str) -> None:
    row = REDUCTIONS[name]
    assert torch.equal(row.meaning(VALUES, 1, False), FORMS[row.of_one](VALUES)[:, 0])


@pytest.mark.parametrize("count", [0, 1, 2, 9])
@pytest.mark.parametrize("name", FLOATING)
def test_of_equal(name: str, count: int) -> None:
    row = REDUCTIONS[name]
    if count or row.has_identity:
        how, number = row.of_equal[0], row.of_equal[1](count)
        one = row.meaning(VALUES, 1, False)
        want = row.meaning(VALUES.expand(len(VALUES), count), 1, False)
        made = {"times": torch.mul, "plus": torch.add, "power": torch.pow}[how](one, number)
        torch.testing.assert_close(made, want, equal_nan=True)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("name", [name for name, row in REDUCTIONS.items() if row.of_ones is not None])
def test_of_ones(name: str, count: int) -> None:
    row = REDUCTIONS[name]
    assert row.of_ones is not None
    for zeros in (1, 4):
        ones_and_zeros = torch.tensor([1.0] * count + [0.0] * zeros, dtype=torch.float64)
        assert row.meaning(ones_and_zeros, 0, False).item() == row.of_ones(count)


JOINED = {
    "sum": torch.add,
    "product": torch.mul,
    "largest": torch.maximum,
    "smallest": torch.minimum,
    "any": torch.logical_or,
    "all": torch.logical_and,
    "exponentials": torch.logaddexp,
}
SUMS = {"mean": (lambda x, count: x * count), "norm": (lambda x, count: x * x)}
"""For reductions that are made from a sum: the sum, computed from the reduction's result and the count."""


@pytest.mark.parametrize("name", REDUCTIONS)
def test_parts_are_joined(name: str) -> None:
    row = REDUCTIONS[name]

    def partial(x: torch.Tensor) -> torch.Tensor:
        return SUMS.get(name, lambda x, count: x)(row.meaning(x, 0, False), len(x))

    neutral = torch.full((1,), row.merge.neutral, dtype=torch.float64)
    for x in (VALUES[:, 0], VALUES[[3, 3], 0]):
        whole = partial(x)
        torch.testing.assert_close(JOINED[row.merge.how](partial(x[:1]), partial(x[1:])), whole)
        torch.testing.assert_close(partial(torch.cat([x, neutral])), whole)
