"""Decorators for functions of the vocabulary that apply when they are called on tensors. The parser reads the bodies
of these functions without their decorators, and has rules of its own for the same two purposes:

- to check parameters that allow few values. The annotation says which: a Literal, as for `approximate` of gelu;
  `Positive` for a positive number; `LastExtent` for a shape of one dim.
- to compute in float32 on tensors of 16 bits, and to round the result to 16 bits or leave it in float32.
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
"""The annotation of a parameter that is a finite number above 0."""
LastExtent = tuple[int, ...]
"""The annotation of a parameter that is a shape of one dim: the extent of the last dim."""


class Rule(NamedTuple):
    """What a parameter accepts: a shape of one dim if `is_shape`, else one of `values`. Without `values` it accepts a
    positive number, or a tensor or a value of the graph in its place."""

    values: tuple[str | None, ...] = ()
    is_shape: bool = False

    @property
    def is_number(self) -> bool:
        """Whether the parameter is a number."""
        return not (self.values or self.is_shape)

    def holds(self, value: Any) -> bool:
        """Whether the parameter accepts `value`, which is no tensor and no value of the graph."""
        if self.is_shape:
            return isinstance(value, tuple | list) and len(value) == 1
        return value in self.values if self.values else isinstance(value, int | float) and 0 < value < math.inf

    @property
    def want(self) -> str:
        """What the parameter accepts, for messages."""
        if self.is_shape:
            return "a tuple of one extent, that of the last dim (x.flatten(-2) makes one dim of two)"
        return " or ".join(map(repr, self.values)) or "a positive number"


def rule(parameter: inspect.Parameter) -> Rule | None:
    """The rule that the annotation of `parameter` states, or None."""
    annotation = str(parameter.annotation)
    if annotation == "Literal[None]":  # the language has no form for what PyTorch's function takes there
        return Rule((None,))
    if annotation == "LastExtent":
        return Rule(is_shape=True)
    values = re.findall(r"['\"](.*?)['\"]", annotation) if annotation.startswith("Literal[") else ()
    return Rule(tuple(values)) if values or annotation == "Positive" else None


def checked(function: Function) -> Function:
    """Have `function` raise `ValueError` for values that its parameters do not accept, if it is called on tensors. In
    an epilogue the parser refuses such values."""
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
    """Have `function` compute in float32 on tensors of 16 bits, whose dtypes do not hold its intermediate values."""

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return function(*map(rounded_like, given), **{name: rounded_like(value) for name, value in named.items()})

    return call  # type: ignore[return-value]  # the same parameters


def rounded_once(function: Function) -> Function:
    """Have `function` compute in float32 on tensors of 16 bits and round only its result, as PyTorch's function of the
    same name does. The parser does the same with the body."""
    wide = in_float32(function)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return rounded_like(wide(*given, **named), *given, *named.values())

    vars(call)["rounds_once"] = True  # `checked` wraps this function, and functools.wraps keeps the attribute
    return call  # type: ignore[return-value]  # the same parameters


def rounded_like(x: Any, *others: Any) -> Any:
    """Return x in the dtype that all floating tensors of `others` share. If they share none, x of 16 bits becomes
    float32."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    dtypes = {other.dtype for other in others if isinstance(other, torch.Tensor) and other.is_floating_point()}
    if len(dtypes) == 1:
        return x.to(dtypes.pop())
    return x.float() if x.itemsize == 2 else x
