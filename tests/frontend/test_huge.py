"""Huge and deep sources: a right result or an error of ours, in reasonable time, and never a RecursionError."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import EpifuseError
from tests.frontend.sources import check, function_from

SECONDS = 12
"""Ten times what a quiet machine needs."""


def processor_time() -> float:
    """Seconds of processor time of this process and of its children that ended. They do not depend on the load."""
    return sum(os.times()[:4])


def chain(step: str, count: int, joined: str = "\n    ") -> str:
    lines = joined.join(step.format(old=f"x{i}", new=f"x{i + 1}", i=i) for i in range(count))
    start = " " if joined == "; " else joined
    return f"def epi(accum, C, alpha):{start}x0 = accum{joined}{lines}{joined}return x{count}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        chain("{new} = {old} * 0.5 + C", 2_000),
        chain("{new} = {old} * 0.5 + C", 1_500, "; "),
        chain("{new} = {old} * 0.5 + ñ", 1_500, "; ").replace("C, ", "C, ñ, "),
        chain("{new} = torch.relu({old}) - {i}.0", 1_200),
        chain("a{i} = alpha / {i}.5; {new} = {old} + a{i}", 1_200),
        "def epi(accum, C, alpha):\n    x0 = alpha\n"
        + "".join(f"    x{i + 1} = x{i} / 1.5 + alpha\n" for i in range(2_000))
        + "    return accum * x2000 + C\n",
    ],
    ids=["statements", "one line", "one line of many bytes", "calls", "host numbers", "host chain"],
)
def test_many_statements(text: str) -> None:
    epilogue = function_from(text)
    A, B = torch.randn(4, 4), torch.randn(4, 4)
    named = {"C": torch.randn(4, 4), "alpha": 2.0} | ({"ñ": torch.randn(4, 4)} if "ñ" in text else {})
    started = processor_time()
    fused = ef.gemm(A, B, epilogue=epilogue, **named)
    assert processor_time() - started < SECONDS
    check(fused, ef.reference(epilogue)(A @ B, **named))


DEEP: dict[str, Callable[[int], str]] = {
    "parentheses": lambda n: "(" * n + "accum" + ")" * n,
    "sum": lambda n: "+".join(["accum"] * n),
    "power": lambda n: "accum" + "**1.0" * n,
    "calls": lambda n: "torch.relu(" * n + "accum" + ")" * n,
    "methods": lambda n: "accum" + ".relu()" * n,
    "minus": lambda n: "-" * n + "accum",
    "not": lambda n: "accum * (" + "not " * n + "2.0)",
    "conditional": lambda n: "accum if 2 > 3 else " * n + "accum",
    "comparison": lambda n: "accum * (1 " + "< 2 " * n + ")",
    "attributes": lambda n: "torch" + ".nn" * n,
    "subscripts": lambda n: "accum" + "[None]" * n,
    "tuples": lambda n: "(" * n + "accum" + ",)" * n,
    "and": lambda n: "accum * (1 " + "and 2 " * n + ")",
}


@pytest.mark.sweep
@pytest.mark.parametrize("depth", [20, 90, 150, 900, 3000, 10_000])
@pytest.mark.parametrize("shape", DEEP)
def test_deep_expressions(shape: str, depth: int) -> None:
    text = f"def epi(accum):\n    D = {DEEP[shape](depth)}\n    return D\n"
    A, B = torch.rand(3, 3), torch.rand(3, 3)
    try:
        fused = ef.gemm(A, B, epilogue=text)
    except EpifuseError as refusal:
        error = refusal
    else:
        error = None
    if error is not None:
        assert error.loc is not None
        assert len(str(error)) < 2000
        return
    assert depth < 3000 or shape in ("comparison", "and")
    check(fused, ef.reference(function_from(text))(A @ B))


def nested_helpers(depth: int, body: str = "h{next}(x)") -> Any:
    helpers = (f"def h{i}(x):\n    return {body.format(next=i + 1)}\n\n" for i in range(depth))
    return function_from(
        "".join(helpers) + f"def h{depth}(x):\n    return x * 2\n\ndef epi(accum):\n    return h0(accum)\n"
    )


@pytest.mark.parametrize("depth", [50, 1200])  # below and above how deep Python calls
def test_deep_helpers(depth: int) -> None:
    A, B = torch.rand(3, 3), torch.rand(3, 3)
    check(ef.gemm(A, B, epilogue=nested_helpers(depth)), (A @ B) * 2)


def test_helpers_that_double_are_bounded() -> None:
    A, B = torch.rand(3, 3), torch.rand(3, 3)
    check(ef.gemm(A, B, epilogue=nested_helpers(8, "h{next}(x) + h{next}(x)")), (A @ B) * 512)
    with pytest.raises(EpifuseError, match=r"more than \d+ calls"):
        ef.gemm(A, B, epilogue=nested_helpers(40, "h{next}(x) + h{next}(x)"))


def test_explaining_shared_host_numbers_is_not_exponential() -> None:
    lines = "".join(f"    x{i + 1} = x{i} + x{i}\n" for i in range(60))
    text = f"def epi(accum, alpha):\n    x0 = alpha\n{lines}    return accum * x60\n"
    epilogue = ef.EpilogueArguments(text, alpha=2.0**-60, D=torch.empty(3, 3))
    args = ef.GemmArguments(torch.rand(3, 3), torch.rand(3, 3), epilogue=epilogue)
    assert len(str(ef.explain(args))) < 10_000
