"""The epilogue as far as it is written, and the values that a production can choose from."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fuzzing.rules import EXACT
from fuzzing.spelling import tight
from fuzzing.values import Facts, Kind, Val

_LARGEST = 60.0  # smooth values beyond this are scaled down before they are used again


class Frame(NamedTuple):
    """Facts about a whole epilogue. `sizes` gives each letter's extent; `special` data contain NaN and infinities."""

    sizes: Mapping[str, int]
    batched: bool
    exact: bool
    wide: bool
    special: bool
    helpers: bool


@dataclass
class Statement:
    """The statement `name = text`, or an expression statement if `name` is empty."""

    name: str
    text: str
    value: Val | None = None

    def __str__(self) -> str:
        return f"{self.name} = {self.text}" if self.name else self.text


@dataclass
class Writer:
    """The epilogue so far. A production returns an expression, or None if no value fits.

    `rich` is the value into which all operands were joined, if there is one.
    """

    rng: random.Random
    frame: Frame
    values: list[Val]
    numbers: list[Val]
    statements: list[Statement] = field(default_factory=list)
    special: bool = False
    counter: int = 0
    rich: Val | None = None

    def __post_init__(self) -> None:
        self.special = self.frame.special
        self.empty = 0 in self.frame.sizes.values()

    def assign(self, value: Val) -> Val:
        """Write a statement that gives the value a new name. Return the named value."""
        name = f"t{self.counter}"
        self.counter += 1
        named = value._replace(text=name)
        self.statements.append(Statement(name, value.text, named))
        self.values.append(named)
        return named

    def pick(self, wanted: Callable[[Val], bool] = lambda value: True) -> Val | None:
        """A random value that is `wanted`: often `rich`, else more likely a recent one. None if there is none."""
        if self.rich is not None and self.rng.random() < 0.35 and wanted(self.rich):
            return self.rich
        found = [value for value in self.values if wanted(value)]
        if not found:
            return None
        return found[-1 - min(int(self.rng.expovariate(0.5)), len(found) - 1)]

    def literal(self, kind: Kind = "float") -> Val:
        """A small number: whole for integers, a multiple of a quarter if data are exact."""
        if kind == "int":
            number: float | int = self.rng.choice((-3, -2, -1, 0, 1, 2, 3, 5))
            return Val(
                f"({number})" if number < 0 else str(number), "int", (), Facts(abs(number)), True, literal=number
            )
        choices = (0.5, -0.5, 1.0, 2.0, -2.0, 0.25, 3.0, 4.0, 0.0)
        number = self.rng.choice(choices) if self.frame.exact else self.rng.randint(-128, 128) / 64
        step = abs(number) if number and math.log2(abs(number)).is_integer() else 0.25 if self.frame.exact else 1.0
        text = f"({number})" if number < 0 else str(number)
        return Val(text, "float", (), Facts(abs(number), step), True, literal=number)

    def number(self, kind: Kind = "float") -> Val:
        """A literal, a number operand, a captured number, or Python arithmetic on them."""
        fitting = [number for number in self.numbers if number.kind == kind]
        if not fitting or self.rng.random() < 0.5:
            return self.literal(kind)
        found = self.rng.choice(fitting)
        if self.rng.random() < 0.5:
            return found
        other = self.literal(kind)
        op, rule = self.rng.choice((("+", "add"), ("*", "mul"), ("-", "sub")))
        return Val(f"({found.text} {op} {other.text})", kind, (), EXACT[rule](found.facts, other.facts), True)

    def as_kind(self, value: Val, kind: Kind) -> Val | None:
        """The value, converted if it is of another kind; None if it cannot be converted."""
        if value.kind == kind:
            return value
        if kind == "mask":
            limit = self.literal("int" if value.kind in ("int", "long") else "float")
            return value._replace(
                text=f"({value.text} {self.rng.choice(('>', '<=', '!='))} {limit.text})", kind="mask", facts=Facts(1)
            )
        if kind == "float":
            return self._as_float(value)
        if kind == "int" and value.kind in ("float", "mask") and not self.special and value.facts.bound < 2.0**30:
            whole = Facts(value.facts.bound, 1.0, value.facts.rounded and not self.frame.exact)
            return value._replace(
                text=f"{tight(value.text)}.to(torch.int32)", kind="int", facts=whole, narrow=None, raw=False
            )
        return None

    def _as_float(self, value: Val) -> Val:
        facts = value.facts._replace(rounded=value.facts.rounded or value.facts.bound >= 2.0**24)
        if value.kind == "mask" and self.rng.random() < 0.5:
            return value._replace(text=f"where({value.text}, 1.0, 0.0)", kind="float", facts=facts)
        return value._replace(text=f"{tight(value.text)}.to(FLOAT)", kind="float", facts=facts)

    def tame(self, value: Val) -> Val:
        """The value, made smaller if arithmetic on it would no longer be exact, or if a smooth value is too large."""
        facts = value.facts
        if not self.frame.exact:
            if value.kind != "float" or facts.bound <= _LARGEST:
                return value
            scale = 2.0 ** -math.ceil(math.log2(facts.bound / 4))
            return value._replace(text=f"({value.text} * {scale})", facts=Facts(facts.bound * scale, rounded=True))
        if facts.bound / facts.step <= 2.0**9 or value.host or value.kind == "mask":
            return value
        if value.kind == "float" and not facts.rounded:
            low = max(-8.0, -facts.bound)
            return value._replace(text=f"clip({value.text}, {low}, 8.0)", facts=Facts(8.0, facts.step))
        return value
