"""What functions of the vocabulary do where they are called on tensors: the parser reads their bodies without it.

Parameters of which few values are allowed, as `approximate` of gelu: a Literal annotation says which. And tensors of 16
bits, where float32 is meant.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def allowed(parameter: inspect.Parameter) -> tuple[str, ...]:
    """The words of its annotation, none where that is no Literal."""
    annotation = str(parameter.annotation)
    return tuple(re.findall(r"['\"](.*?)['\"]", annotation)) if annotation.startswith("Literal[") else ()


def checked(function: Function) -> Function:
    """`function`, which raises `ValueError` for another value where it is called on tensors. In an epilogue the parser
    refuses it."""
    parameters = inspect.signature(function).parameters.items()
    values = {name: own for name, parameter in parameters if (own := allowed(parameter))}
    positions = {position: name for position, (name, _) in enumerate(parameters) if name in values}

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        said = {name: given[position] for position, name in positions.items() if position < len(given)} | named
        for name in values.keys() & said.keys():
            if said[name] not in values[name]:
                want = " or ".join(map(repr, values[name]))
                raise ValueError(f"{name!r} of {function.__name__}() must be {want}, not {said[name]!r}")
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
