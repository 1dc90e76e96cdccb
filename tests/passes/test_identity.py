"""The digest: the same for one computation however it is written, different for different ones; and what it binds."""

from typing import Any

import pytest
import torch

import epifuse as ef

A, B = torch.arange(12.0).reshape(4, 3), torch.arange(15.0).reshape(3, 5) - 7
SQUARE = torch.arange(20.0).reshape(4, 5) - 9
ROW, COLUMN = torch.arange(5.0), torch.arange(4.0).reshape(4, 1)


def plan(source: str, *values: Any, a: torch.Tensor = A) -> Any:
    """The plan for operands given in the order of the signature."""
    parsed = ef.EpilogueArguments.partial(source, {}) if not values else None
    names = source[source.index("(") + 1 : source.index(")")].replace(" ", "").split(",")[1:]
    epilogue = parsed or ef.EpilogueArguments.partial(source, dict(zip(names, values, strict=True)))
    return ef.explain(ef.GemmArguments(a, B, epilogue=epilogue)).plan


def digest(source: str, *values: Any) -> str:
    return str(plan(source, *values).digest)


SAME = {
    "renamed": (
        "def epi(accum, C, alpha): D = accum * alpha + C; return D",
        "def other(accum, Q, z): unusual = accum * z + Q; return unusual",
    ),
    "commuted": (
        "def epi(accum, C, alpha): D = accum * alpha + C; return D",
        "def epi(accum, C, alpha): D = C + alpha * accum; return D",
    ),
    "reordered": (
        "def epi(accum, C, alpha): t = accum * alpha; u = C * C; D = t - u; return D",
        "def epi(accum, C, alpha): u = C * C; t = accum * alpha; D = t - u; return D",
    ),
    "in steps": (
        "def epi(accum, C, alpha): D = (accum * alpha - C) / alpha; return D",
        "def epi(accum, C, alpha): t = accum * alpha; u = t - C; D = u / alpha; return D",
    ),
    "spelled out": (
        "def epi(accum, C, alpha): D = silu(accum * alpha) + C; return D",
        "def epi(accum, C, alpha): t = accum * alpha; D = t * sigmoid(t) + C; return D",
    ),
    "spelled out further": (
        "def epi(accum, C, alpha): D = silu(accum * alpha) + C; return D",
        "def epi(accum, C, alpha): t = accum * alpha; D = t * (1.0 / (1.0 + exp(-t))) + C; return D",
    ),
    "weak literals": (
        "def epi(accum, C, alpha): D = accum * 2 - C * alpha; return D",
        "def epi(accum, C, alpha): D = accum * 2.0 - C * alpha; return D",
    ),
    "twice the same": (
        "def epi(accum, C, alpha): D = relu(accum) * relu(accum) + C * alpha; return D",
        "def epi(accum, C, alpha): t = relu(accum); D = t * t + C * alpha; return D",
    ),
    "dead code": (
        "def epi(accum, C, alpha): D = accum + C * alpha; return D",
        "def epi(accum, C, alpha): t = accum / C; u = exp(t); D = accum + C * alpha; return D",
    ),
    "method or function": (
        "def epi(accum, C, alpha): D = accum.relu() + torch.exp(C) * alpha; return D",
        "def epi(accum, C, alpha): D = relu(accum) + exp(C) * alpha; return D",
    ),
}


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_one_computation_has_one_digest(pair: tuple[str, str]) -> None:
    first, second = pair
    assert digest(first, SQUARE, 2.0) == digest(second, SQUARE, 2.0)


def test_order_of_parameters() -> None:
    first = digest("def epi(accum, C, alpha): D = accum * alpha + C; return D", SQUARE, 2.0)
    assert first == digest("def epi(accum, alpha, C): D = accum * alpha + C; return D", 2.0, SQUARE)


DIFFERENT = [
    "accum - C",
    "C - accum",
    "accum + C",
    "accum / C",
    "C / accum",
    "accum + C + C",
    "maximum(accum, C)",
    "minimum(accum, C)",
    "accum > C",
    "C > accum",
    "where(accum > C, accum, C)",
    "where(accum > C, C, accum)",
    "accum + C * 2.0",
    "accum * 2.0 + C",
    "accum + C * 3.0",
    "relu(accum) + C",
    "relu(accum + C)",
    "accum + relu(C)",
    "accum.sum(dim=0) + C",
    "accum.sum(dim=0, keepdim=True) + C * 0",
    "accum.sum(dim=1, keepdim=True) + C",
    "accum.amax(dim=1, keepdim=True) + C",
    "accum.half() + C",
    "accum.bfloat16() + C",
    "pow(accum, C)",
    "pow(C, accum)",
    "clip(accum, C, 1.0)",
    "clip(accum, 1.0, C)",
    "index_m(accum) + C + accum",
    "index_n(accum) + C + accum",
    "accum * 0.0 + C",
    "accum * -0.0 + C",
]


def test_different_computations_have_different_digests() -> None:
    found: dict[str, str] = {}
    for expression in DIFFERENT:
        made = digest(f"def epi(accum, C): D = {expression}; return D", SQUARE)
        assert made not in found, f"{expression} and {found[made]}"
        found[made] = expression


def test_an_access_is_part_of_the_computation() -> None:
    source = "def epi(accum, x): D = accum + x; return D"
    operands = (SQUARE, ROW, COLUMN, 2.0, torch.tensor([2.0]), SQUARE > 0, ROW.int())
    assert len({digest(source, x) for x in operands}) == len(operands)
    assert digest(source, SQUARE) == digest(source, SQUARE.half()) == digest(source, SQUARE.T.contiguous().T)


def test_outputs_are_part_of_the_computation() -> None:
    bodies = ("return D", "return E", "return D, E", "return E, D")
    digests = [digest(f"def epi(accum): D = accum * 2; E = D + 1; {body}") for body in bodies]
    assert len(set(digests)) == 3
    assert digests[2] == digests[3], "the order of outputs is a matter of binding"


# --- binding: one digest, several ways to call it ---------------------------------------------------------------

SWAPS = {
    "accum*C + E": ("accum * C + E", lambda t, C, E: t * C + E),
    "C*accum - E": ("C * accum - E", lambda t, C, E: C * t - E),
    "C - E": ("accum + (C - E)", lambda t, C, E: t + (C - E)),
    "C*(E + accum)": ("C * (E + accum)", lambda t, C, E: C * (E + t)),
    "where": ("where(accum > 0, C, E)", lambda t, C, E: torch.where(t > 0, C, E)),
}


@pytest.mark.parametrize(("expression", "meaning"), SWAPS.values(), ids=SWAPS)
def test_swapped_operands_bind_rightly_through_the_cache(expression: str, meaning: Any) -> None:
    """One function after the other, with the names swapped, the signature swapped, and both."""
    C, E = SQUARE, SQUARE.flip(0) * 2
    for names in (("C", "E"), ("E", "C")):
        for signature in ("C, E", "E, C"):
            written = expression.replace("C", "?").replace("E", names[1]).replace("?", names[0])
            source = f"def epi(accum, {signature}): D = {written}; return D"
            got = ef.gemm(A, B, epilogue=source, C=C, E=E)
            given = {"C": C, "E": E}
            assert torch.equal(got, meaning(A @ B, given[names[0]], given[names[1]])), source


def test_swapped_outputs_bind_rightly_through_the_cache() -> None:
    for first, second in (("D", "E"), ("E", "D")):
        for order in (f"{first}, {second}", f"{second}, {first}"):
            source = f"def epi(accum): {first} = accum * 2; {second} = accum + 1; return {order}"
            r = ef.gemm(A, B, epilogue=source)
            assert torch.equal(getattr(r, first), A @ B * 2)
            assert torch.equal(getattr(r, second), A @ B + 1)


def test_swapped_scalars_bind_rightly_through_the_cache() -> None:
    for source, want in (
        ("def epi(accum, a, b): D = accum * a + b; return D", A @ B * 3 + 5),
        ("def epi(accum, b, a): D = accum * a + b; return D", A @ B * 3 + 5),
        ("def epi(accum, a, b): D = accum * b + a; return D", A @ B * 5 + 3),
    ):
        assert torch.equal(ef.gemm(A, B, epilogue=source, a=3.0, b=5.0), want)


def test_twins_have_one_plan() -> None:
    """Also from another function object with another text."""
    bodies = ("D = accum * alpha + C; return D", "t = C + alpha * accum; D = t; return D")
    assert len({plan(f"def epi(accum, C, alpha): {body}", SQUARE, 2.0) for body in bodies}) == 1


def test_host_expressions_are_computed_for_each_epilogue() -> None:
    """They are numbers of a launch: two epilogues that differ there alone may share a kernel, never a number."""
    for source, want in (
        ("def epi(accum, a, b): D = accum * (a * 2) + b * 3; return D", A @ B * 6 + 15),
        ("def epi(accum, a, b): D = accum * (a * 4) + b * 5; return D", A @ B * 12 + 25),
        ("def epi(accum, a, b): D = b * 3 + (a * 2) * accum; return D", A @ B * 6 + 15),
        ("def epi(accum, a, b): D = accum * (b * 2) + a * 3; return D", A @ B * 10 + 9),
    ):
        assert torch.equal(ef.gemm(A, B, epilogue=source, a=3.0, b=5.0), want), source
