"""What functions of the vocabulary do where they are called on tensors: the parser reads their bodies without it.

Parameters of which few values are allowed, as `approximate` of gelu: a Literal annotation says which, and `Positive`
that a number is one. And tensors of 16 bits, where float32 is meant.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
Positive = float
"""The annotation of a number above 0 that is finite."""


def allowed(parameter: inspect.Parameter) -> tuple[str, ...]:
    """The words of its annotation, none where that is no Literal."""
    annotation = str(parameter.annotation)
    return tuple(re.findall(r"['\"](.*?)['\"]", annotation)) if annotation.startswith("Literal[") else ()


def wanted(parameter: inspect.Parameter, value: Any) -> str | None:
    """What a parameter takes, where `value` is something else; None where it may be."""
    if values := allowed(parameter):
        return None if value in values else " or ".join(map(repr, values))
    is_number = isinstance(value, int | float) and 0 < value < math.inf
    return None if parameter.annotation != "Positive" or is_number else "a positive number"


def checked(function: Function) -> Function:
    """`function`, which raises `ValueError` for another value where it is called on tensors. In an epilogue the parser
    refuses it. A tensor may stand for a number."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        for name, value in {**dict(zip(parameters, given, strict=False)), **named}.items():
            own = parameters.get(name)
            if own is None or (isinstance(value, torch.Tensor) and not allowed(own)):
                continue
            if want := wanted(own, value):
                raise ValueError(f"{name!r} of {function.__name__}() must be {want}, not {value!r}")
        return function(*given, **named)

    return call  # type: ignore[return-value]  # the same parameters


def in_float32(function: Function) -> Function:
    """`function`, which computes in float32 on tensors of 16 bits: they do not hold its numbers."""

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return function(*map(_wide, given), **{name: _wide(value) for name, value in named.items()})

    return call  # type: ignore[return-value]  # the same parameters


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() and x.itemsize == 2 else x
