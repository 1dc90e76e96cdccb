"""The smallest mistakes with functors, the class form and plan objects."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import epifuse as ef
from epifuse.forms import thread

M, N, K = 6, 10, 4


def gemm(functor: thread.Functor, **named: Any) -> Any:
    return ef.gemm(torch.ones(M, K), torch.ones(K, N), epilogue=functor, **named)


class NoAccumulator(ef.DenseGemm):
    def epilogue_operation(self) -> Any:  # type: ignore[override]
        return self


class Bare(ef.DenseGemm):
    def __init__(self) -> None:
        self.slope = 2.0


def wrong_kernel() -> Any:
    a, b = torch.ones(1, M, K), torch.ones(1, K, N)
    with mock.patch("epifuse.forms.dense_gemm.launch", return_value={"D": torch.zeros(1, M, N)}):
        return ef.DenseGemm(device="cpu").verify(a, b)


FACADES: dict[str, Callable[[], Any]] = {
    "declared_dtype": lambda: gemm(thread.Convert(torch.float16), out=torch.empty(M, N)),
    "held_parameter": lambda: setattr(thread.LinearCombination(alpha=2.0), "alpha", 4.0),
    "undefined_functor": lambda: thread.LinearCombination(scale=thread.ScaleType.Nothing, alpha=2.0),
    "unknown_parameter": lambda: thread.LinearCombination(gamma=2.0),
    "parameter_twice": lambda: thread.LinearCombination(alpha=2.0, alpha_ptr=torch.ones(1)),
    "missing_parameter": lambda: ef.Gemm(element=torch.float32).run(torch.ones(M, K)),
    "plan_tensor": lambda: ef.Gemm(element=torch.float16).run(torch.ones(M, K), torch.ones(K, N)),
    "class_epilogue": lambda: NoAccumulator(device="cpu").run(torch.ones(M, K), torch.ones(K, N)),
    "not_constructed": lambda: Bare().run(torch.ones(M, K), torch.ones(K, N)),
    "mismatch": wrong_kernel,
    "positional": lambda: thread.LinearCombination()(torch.ones(M, N), torch.ones(M, N), torch.ones(N)),
}
