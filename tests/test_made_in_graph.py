"""Epilogues that the compiled function makes or changes itself, under torch.compile."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import epifuse as ef

A, B, FACTOR = torch.randn(6, 4), torch.randn(4, 8), 2.0


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def by_a_local(a: Any) -> Any:
    two = float(FACTOR)
    return ef.gemm(a, B, epilogue=lambda accum: accum * two)


def by_a_global(a: Any) -> Any:
    return ef.gemm(a, B, epilogue=lambda accum: accum * FACTOR)


@pytest.mark.parametrize("function", [by_a_local, by_a_global])
def test_a_function_made_in_the_graph_reads_its_numbers_again(function: Callable[..., Any]) -> None:
    compiled = torch.compile(function, backend="eager")
    for factor in (2.0, 3.0, 4.0):
        globals()["FACTOR"] = factor
        torch.testing.assert_close(compiled(A), factor * (A @ B))


class Switched:
    act = staticmethod(ef.relu)

    def __init__(self, act: Any) -> None:
        self.act = act

    def __call__(self, accum: Any) -> Any:
        return self.act(accum)


SWITCHED = Switched(ef.silu)


def of_a_made_object(a: Any) -> Any:
    return ef.gemm(a, B, epilogue=Switched(ef.silu))


def of_a_changed_object(a: Any) -> Any:
    SWITCHED.act = ef.tanh
    return ef.gemm(a, B, epilogue=SWITCHED)


@pytest.mark.parametrize("function", [of_a_made_object, of_a_changed_object])
def test_what_the_compiled_function_changes_itself_is_seen(function: Callable[..., Any]) -> None:
    want = function(A)
    SWITCHED.act = ef.silu
    torch.testing.assert_close(torch.compile(function, backend="eager")(A), want)
