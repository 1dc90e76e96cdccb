"""The body of a random epilogue: which productions are drawn, and how often."""

from __future__ import annotations

from collections.abc import Callable

from epifuse.fusion.reduction import REDUCTIONS
from fuzzing import elementwise, forms, reductions
from fuzzing.elementwise import ACTIVATIONS, ELEMENTWISE
from fuzzing.rules import EXACT
from fuzzing.values import Val
from fuzzing.writer import Writer

_DEALT = 6
RARE = frozenset({"floor_divide", "remainder", "pow", "logical_and", "logical_or", "logsumexp", "norm"})

PRODUCTIONS: tuple[tuple[float, Callable[[Writer], Val | None]], ...] = (
    (12.0, elementwise.elementwise),
    (2.5, reductions.reduction),
    (0.4, reductions.softmax),
    (0.8, forms.cast),
    (0.4, forms.conditional),
    (0.5, forms.clamp),
    (0.4, forms.index),
    (0.6, forms.unsqueeze),
    (1.0, forms.split),
    (0.2, forms.permute),
    (0.4, forms.helper),
)


def write(writer: Writer, length: int) -> None:
    """Write `length` more statements, each by a production drawn by its weight."""
    weights, productions = zip(*PRODUCTIONS, strict=True)
    for _ in range(length):
        attempt(writer, lambda: writer.rng.choices(productions, weights)[0](writer))


def write_all(writer: Writer, length: int, turn: int) -> None:
    """Join all operands, then write `length` statements of different operations.

    A few operations are dealt in turn, by `turn`, so that none stays rare. The others are drawn.
    """
    elementwise.mix(writer)
    names = [
        name for name in (*ELEMENTWISE, *REDUCTIONS) if not writer.frame.exact or name in EXACT or name in REDUCTIONS
    ]
    counted = [name for name in names if name not in ACTIVATIONS]
    dealt = [counted[(turn * _DEALT + i) % len(counted)] for i in range(_DEALT)]
    # A random order without repeats. A name with more weight is more likely to come early.
    drawn = sorted(names, key=lambda name: writer.rng.random() ** (1 / _weight(name)), reverse=True)
    for name in list(dict.fromkeys((*dealt, *drawn)))[:length]:
        attempt(writer, lambda name=name: operation(writer, name))  # type: ignore[misc]


def _weight(name: str) -> float:
    """The weight of an operation. One that occurs only with smooth data has more, to be met as often as the others.
    Activations have less, because their bodies contain the other operations."""
    if name in ACTIVATIONS:
        return 0.4
    return 1.0 if name not in RARE and (name in EXACT or name in REDUCTIONS) else 6.0


def operation(writer: Writer, name: str) -> Val | None:
    """A statement of this primitive, activation or reduction, or None."""
    return reductions.reduction(writer, name) if name in REDUCTIONS else elementwise.apply(writer, name)


def attempt(writer: Writer, production: Callable[[], Val | None]) -> None:
    """Write one more statement if the production gives a value within twenty tries."""
    for _ in range(20):
        value = production()
        if value is not None:
            writer.assign(value)
            return
