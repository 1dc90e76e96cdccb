"""The smallest mistakes with functors, the class form and plan objects."""

from collections.abc import Callable
from typing import Any

import torch

import epifuse as ef
from epifuse import thread

M, N, K = 6, 10, 4


def gemm(functor: thread.Functor, **named: Any) -> Any:
    return ef.gemm(torch.ones(M, K), torch.ones(K, N), epilogue=functor, **named)


FACADES: dict[str, Callable[[], Any]] = {
    "declared_dtype": lambda: gemm(thread.Convert(torch.float16), out=torch.empty(M, N)),
    "undefined_functor": lambda: thread.LinearCombination(scale=thread.ScaleType.Nothing, alpha=2.0),
    "unknown_parameter": lambda: thread.LinearCombination(gamma=2.0),
    "parameter_twice": lambda: thread.LinearCombination(alpha=2.0, alpha_ptr=torch.ones(1)),
    "positional": lambda: thread.LinearCombination()(torch.ones(M, N), torch.ones(M, N), torch.ones(N)),
}
