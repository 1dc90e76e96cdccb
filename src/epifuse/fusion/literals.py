"""What functions of the vocabulary do where they are called on tensors: the parser reads their bodies without it.

Parameters of which few values are allowed, as `approximate` of gelu: a Literal annotation says which, `Positive` that a
number is one, and `LastExtent` that a shape has one dim. And tensors of 16 bits, where float32 is meant, for good or
until the result is rounded.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
Positive = float
"""The annotation of a number above 0 that is finite."""
LastExtent = tuple[int, ...]
"""The annotation of a shape that is the extent of the last dim alone."""


class Rule(NamedTuple):
    """What a parameter takes: a shape of one dim if `is_shape`, one of `values`, or where there are none a positive
    number, for which a tensor or a value of the graph may stand."""

    values: tuple[str | None, ...] = ()
    is_shape: bool = False

    @property
    def is_number(self) -> bool:
        """Whether it is a number."""
        return not (self.values or self.is_shape)

    def holds(self, value: Any) -> bool:
        """Whether a value that is known is allowed."""
        if self.is_shape:
            return isinstance(value, tuple | list) and len(value) == 1
        return value in self.values if self.values else isinstance(value, int | float) and 0 < value < math.inf

    @property
    def want(self) -> str:
        """What is allowed, for people."""
        if self.is_shape:
            return "a tuple of one extent, that of the last dim (x.flatten(-2) makes one dim of two)"
        return " or ".join(map(repr, self.values)) or "a positive number"


def rule(parameter: inspect.Parameter) -> Rule | None:
    """That of its annotation."""
    annotation = str(parameter.annotation)
    if annotation == "Literal[None]":  # what PyTorch's function takes there has no form here
        return Rule((None,))
    if annotation == "LastExtent":
        return Rule(is_shape=True)
    values = re.findall(r"['\"](.*?)['\"]", annotation) if annotation.startswith("Literal[") else ()
    return Rule(tuple(values)) if values or annotation == "Positive" else None


def checked(function: Function) -> Function:
    """`function`, which raises `ValueError` for another value where it is called on tensors. In an epilogue the parser
    refuses it."""
    parameters = inspect.signature(function).parameters.items()
    rules = {name: own for name, parameter in parameters if (own := rule(parameter))}
    positions = {position: name for position, (name, _) in enumerate(parameters) if name in rules}

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        said = {name: given[position] for position, name in positions.items() if position < len(given)} | named
        for name in rules.keys() & said.keys():
            own, value = rules[name], said[name]
            if not own.holds(value) and not (own.is_number and isinstance(value, torch.Tensor)):
                raise ValueError(f"{name!r} of {function.__name__}() must be {own.want}, not {value!r}")
        return function(*given, **named)

    return call  # type: ignore[return-value]  # the same parameters


def in_float32(function: Function) -> Function:
    """`function`, which computes in float32 on tensors of 16 bits: they do not hold its numbers."""

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return function(*map(rounded_like, given), **{name: rounded_like(value) for name, value in named.items()})

    return call  # type: ignore[return-value]  # the same parameters


def rounded_once(function: Function) -> Function:
    """`function`, which on values of 16 bits computes in float32 and rounds its result alone, as PyTorch's of its name.

    The parser does the same where it reads the body.
    """
    wide = in_float32(function)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return rounded_like(wide(*given, **named), *given, *named.values())

    vars(call)["rounds_once"] = True  # what checks the arguments keeps it, as it wraps the function
    return call  # type: ignore[return-value]  # the same parameters


def rounded_like(x: Any, *others: Any) -> Any:
    """x in the dtype that all floating tensors among the others have. Without one, 16 bits become float32."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    dtypes = {other.dtype for other in others if isinstance(other, torch.Tensor) and other.is_floating_point()}
    if len(dtypes) == 1:
        return x.to(dtypes.pop())
    return x.float() if x.itemsize == 2 else x
