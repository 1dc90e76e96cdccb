"""Inside torch.compile the graph breaks around a call of ours, and the call runs as it does outside."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import epifuse as ef

A, B, C = torch.randn(6, 4), torch.randn(4, 8), torch.randn(6, 8)


def add(accum: Any, C: Any) -> Any:
    D = accum + C
    return D


def by_gemm(a: torch.Tensor) -> Any:
    return ef.gemm(a * 2, B, epilogue=add, C=C) + 1


def by_linear(a: torch.Tensor) -> Any:
    return ef.linear(a * 2, B.t(), epilogue=add, C=C) + 1


def by_kernel(a: torch.Tensor) -> Any:
    args = ef.GemmArguments(a * 2, B, epilogue=ef.EpilogueArguments(add, C=C, D=torch.empty(6, 8)))
    return ef.get_kernels(args)[0].run(args)["D"] + 1


def by_step(a: torch.Tensor) -> Any:
    return STEP()["D"] + 1


DOUBLED = A * 2
_ARGS = ef.GemmArguments(DOUBLED, B, epilogue=ef.EpilogueArguments(add, C=C, D=torch.empty(6, 8)))
STEP = ef.get_kernels(_ARGS)[0].bind(_ARGS)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("function", [by_gemm, by_linear, by_kernel, by_step])
def test_a_call_inside_a_compiled_function(function: Callable[..., Any]) -> None:
    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(A), (A * 2) @ B + C + 1)
    torch.testing.assert_close(function(A), (A * 2) @ B + C + 1)


def test_an_error_of_ours_passes_through() -> None:
    compiled = torch.compile(lambda a: ef.gemm(a, B, epilogue=add), backend="eager")
    with pytest.raises(ef.errors.ArgumentError, match="C is not provided"):
        compiled(A)


def test_the_compiler_is_not_imported_for_it() -> None:
    program = "import sys, epifuse; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
