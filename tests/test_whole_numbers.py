"""Integers of masks and of Python's integers alone: as large as PyTorch's, or refused."""

import random

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import EpilogueTypeError
from tests.frontend.sources import function_from

A, B = torch.randn(6, 5), torch.randn(5, 8)
MASKS = "(accum > 0)", "(accum > 1)", "((accum > 0) & (accum < 1))"
NUMBERS = "1", "2", "3", "-4", "7", "1000", "65536", "2000000000"


def unpacked(accum, p):
    D = accum * ((p & 15) - 8)
    return D


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_narrow_integers_are_computed_in_32_bits(dtype: torch.dtype) -> None:
    """PyTorch's wrap: of a uint8, nothing is negative."""
    p = torch.arange(8).to(dtype)
    want = unpacked(A @ B, p.to(torch.int32))
    torch.testing.assert_close(ef.gemm(A, B, epilogue=unpacked, p=p), want)
    torch.testing.assert_close(ef.reference(unpacked)(A @ B, p=p), want)


def integer(drawn: random.Random, depth: int) -> str:
    """An expression."""
    if not depth:
        low, high = drawn.choices(NUMBERS, k=2)
        return f"where({drawn.choice(MASKS)}, {low}, {high})"
    one, other = (integer(drawn, drawn.randrange(depth)) for _ in range(2))
    number = drawn.choice(NUMBERS)
    return drawn.choice(
        [
            f"({one} + {other})",
            f"({one} - {other})",
            f"({one} * {other})",
            f"({one} * {number})",
            f"({number} - {one})",
            f"(-{one})",
            f"abs({one})",
            f"maximum({one}, {other})",
            f"minimum({one}, {other})",
            f"({one} ** {drawn.randrange(4)})",
            f"({one} << {drawn.randrange(20)})",
            f"({one} >> {drawn.randrange(20)})",
            f"({one} // {drawn.choice(NUMBERS)})",
            f"({one} % {drawn.choice(NUMBERS)})",
            f"({one} {drawn.choice('&|^')} {other})",
            f"(~{one})",
            f"relu({one})",
            f"square({one})",
            f"sign({one})",
            f"clamp({one}, -5, 70000)",
            f"where({drawn.choice(MASKS)}, {one}, {other})",
        ]
    )


def outcome(body: str) -> torch.Tensor | None:
    """What is computed, which is PyTorch's, or None where it is refused."""
    names = {
        name: getattr(torch, name) for name in ("where", "abs", "maximum", "minimum", "relu", "square", "sign", "clamp")
    }
    want = eval(body, {**names, "accum": A @ B})
    try:
        found = ef.gemm(A, B, epilogue=f"def epi(accum):\n    D = {body}\n    return D\n")
    except EpilogueTypeError as error:
        if error.key != "wraps":
            raise
        return None
    assert torch.equal(found.to(torch.int64), want), body
    return found


@pytest.mark.parametrize("seed", range(8))
def test_what_is_computed_is_pytorch_s(seed: int) -> None:
    drawn = random.Random(seed)
    outcomes = [outcome(integer(drawn, 3)) is None for _ in range(40)]
    assert 2 <= sum(outcomes) <= 36, "some of each"


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ("where(accum > 0, 46341, 0) * 46341", True),
        ("where(accum > 0, 46340, 0) * 46340", False),
        ("where(accum > 0, 3, 1) ** 1000000", True),
        ("where(accum > 0, 1, 0) << 30", False),
        ("where(accum > 0, 1, 0) << 31", True),
        ("where(accum > 0, 2147483647, 0) + (accum > 1) * 1", True),
        ("where(accum > 0, -1, -1) ** 65 - 2147483647 - 1", True),
        ("where(accum > 0, -1, 1) ** 64 + 2147483646", False),
        ("(where(accum > 0, 3, -100000) ** 2) * 1", True),
        ("abs(where(accum > 0, -3, 100000)) * 21474", False),
        ("square(where(accum > 0, 100000, 0))", True),
        ("where(accum > 0, 100000, 0).amax(-1, keepdim=True) * 100000 + where(accum > 0, 1, 0)", True),
        ("where(accum > 0, 100000, 0).amax(-1, keepdim=True) * 10000 + where(accum > 0, 1, 0)", False),
    ],
)
def test_where_it_begins_to_be_refused(body: str, refused: bool) -> None:
    assert (outcome(body) is None) == refused


def test_int64_has_room() -> None:
    found = ef.gemm(A, B, epilogue="lambda accum: where(accum > 0, 100000, 0).to(torch.int64) * 100000")
    assert torch.equal(found, torch.where(A @ B > 0, 100000, 0) * 100000)


WIDE = (
    "accum * full_like(accum, 100000, dtype=torch.int64)",
    "accum * full_like(accum, 1518500249, dtype=torch.int64) >> 31",
    "accum + full_like(accum, 3000000000, dtype=torch.int64) * (accum > 0)",
    "torch.maximum(accum, full_like(accum, 3000000000, dtype=torch.int64))",
    "accum < full_like(accum, 3000000000, dtype=torch.int64)",
    "torch.where(accum > 0, full_like(accum, 3000000000, dtype=torch.int64), accum)",
    "accum + torch.full_like(accum, 1 << 20) - torch.full_like(accum, accum.shape[-1])",
    "accum + torch.full_like(accum, 16777217.0) - torch.full_like(accum, 3.9)",
)


@pytest.mark.parametrize("line", WIDE)
def test_a_constant_of_64_bits_beside_32(line: str) -> None:
    """PyTorch's tensor without dims would not widen what stands beside it."""
    a, b = torch.randint(-128, 128, (7, 64), dtype=torch.int8), torch.randint(-128, 128, (64, 9), dtype=torch.int8)
    function = function_from(f"def f(accum): return {line}\n", torch=torch, full_like=torch.full_like)
    want = function(a.int() @ b.int())
    assert torch.equal(ef.gemm(a, b, epilogue=function), want)
    assert torch.equal(ef.reference(function)(a.int() @ b.int()), want)


@pytest.mark.parametrize("default", [torch.float16, torch.float32, torch.float64])
def test_a_number_in_a_shape_is_as_exact_as_the_accumulator(default: torch.dtype) -> None:
    a, b = torch.ones(2, 4, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        tenth = ef.gemm(a, b, epilogue="lambda accum: accum * torch.full_like(accum, 0.1)")
        large = ef.gemm(a, b, epilogue="lambda accum: accum + torch.full_like(accum, 1e300)")
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(tenth, a @ b * 0.1)
    assert torch.equal(large, a @ b + 1e300)


@pytest.mark.parametrize("number", ["3000000000", "3e9", "math.nan", "-math.inf"])
def test_a_number_that_an_integer_does_not_hold_is_refused(number: str) -> None:
    a, b = torch.ones(2, 16, dtype=torch.int8), torch.ones(16, 3, dtype=torch.int8)
    with pytest.raises(EpilogueTypeError, match="full_like makes"):
        ef.gemm(a, b, epilogue=f"lambda accum: torch.full_like(accum, {number})")


@pytest.mark.parametrize("name", ["trunc", "fmod"])
def test_integers_are_divided_as_the_hints_say(name: str) -> None:
    x, y = torch.randint(-(2**30), 2**30, (7, 9), dtype=torch.int32), torch.tensor([-7, 3, 11], dtype=torch.int32)
    lines = {
        "trunc": ("ef.sign(x) * ef.sign(y) * (abs(x) // abs(y))", torch.div(x, y[1], rounding_mode="trunc")),
        "fmod": ("ef.sign(x) * (abs(x) % abs(y))", x.fmod(y[1])),
    }
    line, want = lines[name]
    function = function_from(f"def f(accum, x, y): return {line} + accum.to(torch.int32)\n", torch=torch, ef=ef)
    zeros = torch.zeros(7, 4), torch.zeros(4, 9)
    assert torch.equal(ef.gemm(*zeros, epilogue=function, x=x, y=y[1].expand(9)), want)
