"""Many threads that make the same first calls at once: each result is right, and nothing is left half made."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from unittest import mock

import pytest
import torch

import epifuse as ef
from epifuse.base import cache
from epifuse.frontend import source as reader

THREADS, SHAPES = 8, 50
EPILOGUES = [
    f"def epi(accum, C): D = {body}; return D"
    for number in range(1, 5)
    for body in (
        f"relu(accum) + C * {number}",
        f"accum * {number} - C",
        f"where(accum > C, accum, C - {number})",
        f"maximum(accum + {number}, C)",
        f"abs(accum - C) + {number}",
    )
]


def failures(start: Barrier) -> list[str]:
    """What one thread found wrong."""
    start.wait()
    found = []
    for source in EPILOGUES:
        function: dict[str, object] = {name: getattr(ef, name) for name in ("relu", "where", "maximum", "abs")}
        exec(source.replace("; ", "\n    ").replace(": D", ":\n    D"), function)
        for m in range(1, SHAPES + 1):
            a, b, c = torch.ones(m, 3), torch.full((3, 4), 2.0), torch.arange(4.0)
            want = function["epi"](a @ b, c)  # type: ignore[operator]  # what exec has defined
            if not torch.equal(ef.gemm(a, b, epilogue=source, C=c), want):
                found.append(f"{source} at M = {m}")
    return found


@pytest.mark.slow
def test_first_calls_of_many_threads() -> None:
    cache.forget()
    start = Barrier(THREADS)
    with ThreadPoolExecutor(THREADS) as pool:
        assert [found for found in pool.map(failures, [start] * THREADS) if found] == []


def test_a_parse_that_another_thread_spoiled_is_repeated() -> None:
    """CPython 3.11 raises this where the garbage collector runs between two threads that parse."""
    spoiled, real = SystemError("AST constructor recursion depth mismatch (before=63, after=57)"), reader.ast.parse
    with mock.patch.object(reader.ast, "parse", side_effect=[spoiled, real("x = 1")]) as parse:
        assert isinstance(reader._tree("x = 1"), reader.ast.Module)
    assert parse.call_count == 2
    with mock.patch.object(reader.ast, "parse", side_effect=spoiled), pytest.raises(SystemError, match="mismatch"):
        reader._tree("x = 1")


@pytest.mark.parametrize("n", [200, 2500])
def test_threads_that_launch_one_bound_step(n: int) -> None:
    """The product may be computed where the result is stored."""
    a, b, c, out = torch.randn(2000, 16), torch.randn(16, n), torch.randn(2000, n), torch.empty(2000, n)
    made = ef.EpilogueArguments("def epi(accum, C): D = relu(accum + C) * 3 + 1; return D", C=c, D=out)
    args = ef.GemmArguments(a, b, epilogue=made)
    step = ef.get_kernels(args)[0].bind(args)
    with ThreadPoolExecutor(4) as pool:
        for launch in [pool.submit(step) for _ in range(8)]:
            launch.result()
    torch.testing.assert_close(out, torch.relu(a @ b + c) * 3 + 1, atol=1e-3, rtol=1e-3)
