"""Kinds. For every row of the vocabulary and every combination of mask, int32 and float, the result has PyTorch's
dtype, or the combination is refused by name. A combination that PyTorch refuses is refused."""

import itertools
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.reduction import REDUCTIONS
from epifuse.fusion.vocabulary import VOCABULARY, is_static
from tests.frontend.sources import function_from

ELEMENTWISE = [n for n, e in VOCABULARY.items() if e.group in ("primitive", "activation")]
DTYPES = {"mask": torch.bool, "int32": torch.int32, "float": torch.float32}
REFUSALS = {"masks_in_arithmetic", "mask_wanted", "bits_wanted", "integers_wanted", "float_wanted", "negative_power"}
A, B = torch.ones(3, 2), torch.ones(2, 5)


def values_of(name: str) -> list[str]:
    return [p.name for p in VOCABULARY[name].signature.parameters.values() if not is_static(p)]


def operand(kind: str, like: int) -> torch.Tensor:
    x = torch.arange(15).reshape(3, 5).roll(like) % 4 + 1
    return x > 2 if kind == "mask" else x.to(DTYPES[kind])


def meaning(name: str, args: list[Any]) -> torch.Tensor | None:
    try:
        result = VOCABULARY[name].function(*args)
    except (RuntimeError, TypeError):
        return None
    assert isinstance(result, torch.Tensor)
    return result


def fused(source: str, inputs: dict[str, Any]) -> torch.Tensor | str:
    """The result, or the key of the message with which it was refused."""
    try:
        return ef.gemm(A, B, epilogue=source, operands=inputs)  # type: ignore[no-any-return]
    except ef.errors.EpilogueTypeError as error:
        return error.key


def compare(got: torch.Tensor | str, want: torch.Tensor | None, *, exactly: bool = False) -> None:
    if isinstance(got, str):
        assert got in REFUSALS
        return
    assert want is not None, f"accepted, and gives {got.dtype}, but PyTorch refuses"
    # A mask with a Python integer gives int64 in PyTorch, and int32 in epifuse. The values agree.
    assert got.dtype == (torch.int32 if want.dtype == torch.int64 and not exactly else want.dtype)
    torch.testing.assert_close(got, want.expand(got.shape).to(got.dtype), equal_nan=True)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str) -> None:
    names = values_of(name)
    for kinds in itertools.product(DTYPES, repeat=len(names)):
        args = [operand(kind, i) for i, kind in enumerate(kinds)]
        inputs = {f"x{i}": arg for i, arg in enumerate(args)}
        source = f"def epi(accum, {', '.join(inputs)}): D = {name}({', '.join(inputs)}); return D"
        try:
            compare(fused(source, inputs), meaning(name, args))
        except AssertionError as error:
            raise AssertionError(f"{name} of {', '.join(kinds)}: {error}") from error


@pytest.mark.parametrize("number", [True, 2, 2.0, -3])
@pytest.mark.parametrize("name", [n for n, row in PRIMITIVES.items() if row.arity == 2])
def test_literals_are_weak(name: str, number: float) -> None:
    """A literal on either side: `x * 2` keeps int32, and `x * 2.0` makes a float."""
    for kind in DTYPES:
        x = operand(kind, 0)
        for left in (True, False):
            args = [x, number] if left else [number, x]
            written = f"x, {number}" if left else f"{number}, x"
            compare(fused(f"def epi(accum, x): D = {name}({written}); return D", {"x": x}), meaning(name, args))


@pytest.mark.parametrize("number", [True, 2, 2.0])
@pytest.mark.parametrize("op", ["add", "mul", "maximum"])
def test_numbers_handed_over_are_what_python_has(op: str, number: float) -> None:
    """An int that is passed in is exact beside integers, a bool is a mask, and a float makes the result a float."""
    got = fused(f"def epi(accum, x, y): D = {op}(x, y); return D", {"x": operand("int32", 0), "y": number})
    assert isinstance(got, torch.Tensor)
    assert got.dtype == (torch.float32 if isinstance(number, float) else torch.int32)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("kind", DTYPES)
def test_reductions(name: str, kind: str) -> None:
    x = operand(kind, 0)
    got = fused(f"def epi(accum, x): D = {name}(x, dim=1); return D", {"x": x})
    want = meaning(name, [x, 1])
    if isinstance(got, torch.Tensor) and want is not None and want.dtype == torch.uint8:
        want = want.bool()
    compare(got, want, exactly=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_integers_load_as_int32(dtype: torch.dtype) -> None:
    x = operand("int32", 0).to(dtype)
    got = fused("def epi(accum, x): D = x * 3 - 5; return D", {"x": x})
    compare(got, x.to(torch.int32) * 3 - 5)


LONG = torch.tensor([[2**40 + 3], [-(2**40) - 3], [3], [2**63 - 1]])
INT = torch.tensor([3, -7, 2**31 - 1, 0, 11], dtype=torch.int32)
ON_LONGS = (
    "x * 3 - 5",
    "x + y",
    "x - 2 ** 40",
    "x // 7 + x % 7",
    "abs(-x)",
    "ef.sign(x) * y",
    "ef.where(x > y, x, y)",
    "ef.clamp(x, -5, 2 ** 41)",
    "ef.maximum(x, y)",
    "x == 3",
    "x < y",
    "x.to(torch.int32) * 2",
    "y.long() * 2 ** 33",
    "y.to(torch.int64).amax(0)",
    "x.sum(0)",
    "(x + y).amin(dim=1)",
    "x.absmax()",
    "(x // 2 ** 20) ** 2",
    "(x > 0) * x",
    "x.float() / 3",
)


@pytest.mark.parametrize("text", ON_LONGS)
def test_int64_is_computed_in_int64(text: str) -> None:
    text = text.replace("x.absmax()", "ef.absmax(x)")
    epilogue = function_from(f"def epi(accum, x, y):\n    D = {text}\n    return D\n")
    got = ef.gemm(torch.ones(4, 2), torch.ones(2, 5), epilogue=epilogue, x=LONG, y=INT)
    want = ef.reference(epilogue)(torch.full((4, 5), 2.0), x=LONG, y=INT)
    assert got.dtype == want.dtype
    assert torch.equal(got, want.expand(got.shape))


@pytest.mark.parametrize("text", ["y * SCALE", "y < SCALE", "y * (SCALE * 2)", "y * 3000000000"])
def test_a_number_too_large_for_its_integers_is_refused(text: str) -> None:
    epilogue = function_from(f"def epi(accum, x, y):\n    D = {text}\n    return D\n", SCALE=3_000_000_000)
    with pytest.raises(ef.errors.EpifuseError, match="does not fit"):
        ef.gemm(torch.ones(4, 2), torch.ones(2, 5), epilogue=epilogue, x=LONG, y=INT)


@pytest.mark.parametrize("text", ["accum * SCALE", "x * SCALE", "accum * (x // SCALE)", "(SCALE * 2) * accum"])
def test_a_number_beyond_int32_is_exact_beside_int64_and_floats(text: str) -> None:
    epilogue = function_from(f"def epi(accum, x, y):\n    D = {text}\n    return D\n", SCALE=3_000_000_000)
    got = ef.gemm(torch.ones(4, 2), torch.ones(2, 5), epilogue=epilogue, x=LONG, y=INT)
    want = ef.reference(epilogue)(torch.full((4, 5), 2.0), x=LONG, y=INT)
    assert torch.equal(got, want.expand(got.shape))


def test_an_int32_accumulator_is_exact() -> None:
    a = torch.full((3, 300), 127, dtype=torch.int8)
    b = torch.full((300, 5), 127, dtype=torch.int8)
    b[:, 1] = 126
    D = ef.gemm(a, b, epilogue="def epi(accum): D = accum - 1; return D")
    assert D.dtype == torch.int32
    assert torch.equal(D, (a.double() @ b.double()).to(torch.int32) - 1)
