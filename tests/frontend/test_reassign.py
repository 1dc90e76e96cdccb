"""`@ef.epilogue(reassign=True)`: a name may be assigned again, and then means what Python says; else it may not."""

import ast

import pytest
import torch

import epifuse as ef
from tests.frontend.sources import check, function_from

A, B = torch.randn(5, 3), torch.randn(3, 4)
OPERANDS = {"C": torch.randn(5, 4), "row": torch.randn(4), "i": torch.arange(4, dtype=torch.int32), "flag": 2.0}

BODIES = {
    "a name": "D = accum + C; D = D * 2; D = D - C; return D",
    "a swap": "a, b = accum, C; a, b = b, a; D = a - b; return D",
    "a tuple of itself": "x = (accum, C); x, y = x; D = x / y; return D",
    "a list of targets": "[a, b] = accum, C; (b, a) = a, b; D = a - 2 * b; return D",
    "accum": "accum = accum + C; D = accum * accum; return D",
    "accum, returned": "accum = accum + C; return accum",
    "a parameter": "C = C * 2; accum = accum + C; C = C + accum; D = C; return D",
    "a host number": "flag = flag + 1; flag = flag * flag; D = accum * flag; return D",
    "a conditional": "D = accum; D = D + C if flag > 1 else D; D = D if flag > 5 else D * 3; return D",
    "a conditional of names": "x = C if flag else accum; x = accum if not flag else x; D = x; return D",
    "an annotation": "D: float = accum; D: float = D + C; return D",
    "kinds": "x = i; x = x // 2; x = x > 0; x = ef.where(x, accum, C); return x",
    "a helper": "D = twice(accum); D = twice(D); return D",
    "another order": "D, E = accum, C; D, E = E + D, D; return E, D",
}


def epilogue(body: str, *, reassign: bool = True) -> object:
    lines = "\n    ".join(body.split("; "))
    text = f"def twice(x):\n    y = x + x\n    return y\n\ndef epi(accum, C, row, i, flag):\n    {lines}\n"
    return ef.epilogue(reassign=reassign)(function_from(text))


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_name_assigned_again_is_pythons(body: str) -> None:
    function = epilogue(body)
    got = ef.gemm(A, B, epilogue=function, **OPERANDS)
    want = ef.reference(function)(A @ B, **OPERANDS)
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
        check(one, other)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_it_is_refused_without_the_option(body: str) -> None:
    with pytest.raises(ef.errors.EpilogueSyntaxError, match="cannot be defined twice"):
        epilogue(body, reassign=False)


def test_a_helper_keeps_the_rule_of_its_epilogue() -> None:
    text = "def h(x):\n    x = x + 1\n    return x\n\ndef epi(accum):\n    D = h(accum)\n    return D\n"
    check(ef.gemm(A, B, epilogue=ef.epilogue(reassign=True)(function_from(text))), A @ B + 1)
    with pytest.raises(ef.errors.EpilogueSyntaxError, match="'x' cannot be defined twice"):
        ef.epilogue(function_from(text))


@pytest.mark.parametrize("operator", ["+=", "-=", "*=", "/=", "//=", "%=", "**=", "&=", "|=", "@=", "^=", "<<=", ">>="])
def test_an_augmented_assignment_is_refused_with_the_plain_one(operator: str) -> None:
    with pytest.raises(ef.errors.EpilogueSyntaxError, match="in place") as caught:
        epilogue(f"D = accum; D {operator} C + 1; return D")
    hint = str(caught.value).rpartition("hint: write ")[2]
    assert ast.dump(ast.parse(hint)) == ast.dump(ast.parse(f"D = D {operator[:-1]} (C + 1)"))


def test_an_operands_name_is_no_outputs() -> None:
    with pytest.raises(ef.errors.EpilogueSyntaxError, match="the output 'C' has the name of an operand"):
        epilogue("C = C + accum; return C")
