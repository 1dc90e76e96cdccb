"""Classify accesses: how an operand is read or a result written, derived from the axes it varies over."""

from __future__ import annotations

from epifuse.ir import Type

CLASSES: dict[frozenset[str], str] = {
    frozenset(): "scalar",
    frozenset("n"): "row",
    frozenset("m"): "column",
    frozenset("l"): "batch scalar",
    frozenset("ln"): "batch row",
    frozenset("lm"): "batch column",
    frozenset("mn"): "tile",
    frozenset("lmn"): "batch tile",
}


def access_class(type_: Type) -> str:
    """One of scalar, row, column, tile, or its batched form."""
    return CLASSES[type_.axes]
