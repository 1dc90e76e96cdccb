"""Hints around tensors that the caller passes: how an operand or output is copied, and whether an output is added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from epifuse.base.errors import fail


@dataclass(frozen=True)
class Hint:
    """The common part of `Load` and `Store`."""

    tensor: torch.Tensor
    via: Literal["tma"] | None = None

    def __post_init__(self) -> None:
        if not (self.via is None or (isinstance(self.via, str) and self.via == "tma")):
            raise fail("transport", None, hint=type(self).__name__, value=self.via)


class Load(Hint):
    """An operand with the transport that is to copy it: "tma", or None for any.

    A GPU kernel that cannot honour the hint is refused. CPU kernels treat "tma" like None. Raises `ArgumentError`.
    """


@dataclass(frozen=True)
class Store(Hint):
    """An output with the transport that is to copy it: "tma", or None for any. See `Load`.

    With `accumulate` the value is added onto the content of `tensor`: in float32, rounded once.
    """

    accumulate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.accumulate, bool):
            raise fail("option", None, name="accumulate", want="True or False", value=self.accumulate)


class Unhinted(NamedTuple):
    """Operands and destinations without hints, and what the hints asked for, by name."""

    values: dict[str, Any]
    accumulate: tuple[str, ...]
    by_tma: tuple[str, ...]


def without_hints(values: Mapping[str, Any], outputs: tuple[str, ...]) -> Unhinted:
    """Remove the hints. Raises `ArgumentError` for a `Load` of an output or a `Store` of an operand."""
    hints = {name: value for name, value in values.items() if isinstance(value, Hint)}
    for name, hint in hints.items():
        side, want = ("output", Store) if name in outputs else ("operand", Load)
        if not isinstance(hint, want):
            raise fail("transport_side", None, name=name, side=side, want=want.__name__)
    return Unhinted(
        {name: value.tensor if isinstance(value, Hint) else value for name, value in values.items()},
        tuple(name for name, hint in hints.items() if isinstance(hint, Store) and hint.accumulate),
        tuple(name for name, hint in hints.items() if hint.via),
    )
