"""The leaves of a visitor tree, which fetch operands or the accumulator. Nodes are compared by their fields.

Operators, which take the values of other nodes, are in `operators.py`; how nodes are joined is in `tree.py`. The `name`
of a node is that of its operand or output. A node without one is named after its kind when the tree is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

from epifuse.base.errors import fail
from epifuse.forms.evt.arguments import misfit, padded, pointed
from epifuse.forms.evt.outline import Line
from epifuse.forms.evt.part import Slots, show_slot
from epifuse.forms.evt.reading import Reading
from epifuse.forms.evt.visitor import Visitor
from epifuse.fusion.primitives import mul
from epifuse.fusion.vocabulary import VOCABULARY
from epifuse.ir import Node

Function = Callable[..., Any] | str


def function_of(function: Function) -> Any:
    """The function, which may be given by its name in the vocabulary. An unknown name is returned as it is."""
    return VOCABULARY[function].function if isinstance(function, str) and function in VOCABULARY else function


def spelled(function: Any) -> str:
    """The function's name."""
    return str(getattr(function, "__name__", function))


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else repr(value)


def check_field(node: Visitor, name: str, want: str, *, holds: bool) -> None:
    """Raise unless `holds`: the field `name` of a node does not have the value it must have, which `want` describes."""
    if not holds:
        shown = repr(getattr(node, name)).split("\n")[0]
        raise fail("tree_field", None, node=type(node).__name__, field=name, want=want, value=shown)


def is_number(value: Any) -> bool:
    """Whether a value is a Python int or float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_named(node: Visitor) -> None:
    """Raise unless the node's name is a string or None."""
    check_field(node, "name", "a string", holds=node.name is None or isinstance(node.name, str))


@dataclass(frozen=True, repr=False)
class AccFetch(Visitor):
    """The accumulator, A @ B. In the output trees of a `SplitTreeVisitor` it is the value of the input tree."""

    drawn = "matrix"

    def read(self, reader: Reading, line: Line, values: list[Node], acc: Node) -> Node:
        return acc


@dataclass(frozen=True, repr=False)
class SrcFetch(Visitor):
    """The source matrix, (M, N) or (L, M, N): an operand called C."""

    name: str = "C"
    access: ClassVar[str] = "tile"
    drawn = "matrix"

    def __post_init__(self) -> None:
        check_field(self, "name", "a string", holds=isinstance(self.name, str))

    @property
    def slots(self) -> Slots:
        return ((self.name, None),)


@dataclass(frozen=True, repr=False)
class _Broadcast(Visitor):
    """An operand by name, and the number that replaces it if its pointer is null."""

    name: str | None = None
    default: float | None = None
    access: ClassVar[str]
    drawn = "matrix"

    def __post_init__(self) -> None:
        check_named(self)
        check_field(self, "default", "a number", holds=self.default is None or is_number(self.default))

    @property
    def slots(self) -> Slots:
        return ((str(self.name), self.default),)

    def handed(self, line: Line, fields: tuple[Any, ...], part: Any) -> Iterator[tuple[str, Any]]:
        pointer, default, stride = padded(line, fields, ("pointer", "value if null", "stride"), part)
        yield str(self.name), pointed(line, pointer, stride, self.default if default is None else default)


class AuxLoad(_Broadcast):
    """A matrix, (M, N) or (L, M, N)."""

    access, kind = "tile", "aux"


class Operand(_Broadcast):
    """Any operand that broadcasts to accum by NumPy's rule, like an operand of a Python epilogue."""

    access, kind = "any", "operand"


class RowBroadcast(_Broadcast):
    """A row vector, (N,), (1, N) or (L, 1, N), or a number: one value for each column."""

    access, kind = "row", "row"


class ColBroadcast(_Broadcast):
    """A column vector, (M,), (M, 1) or (L, M, 1), or a number: one value for each row."""

    access, kind = "column", "col"


@dataclass(frozen=True, repr=False)
class ScalarBroadcast(Visitor):
    """A number, or one for each batch, (L, 1, 1), on the host or on the device; with several names their combination.

    `value` is the default, one for all names or one for each. Without a name it is a literal, like a number that is
    written in a Python epilogue. `reduction` combines several operands: `functional.multiplies` unless given.
    """

    name: str | tuple[str, ...] | None = None
    value: float | tuple[float | None, ...] | None = None
    reduction: Function = mul
    access: ClassVar[str] = "scalar"
    kind: ClassVar[str] = "scalar"
    drawn = "scalar"

    def __post_init__(self) -> None:
        object.__setattr__(self, "reduction", function_of(self.reduction))
        names = self.name if isinstance(self.name, tuple) else (self.name,)
        values = self.value if isinstance(self.value, tuple) else (self.value,) * len(names)
        whole = bool(names) and all(isinstance(name, str) for name in names)
        check_field(self, "name", "a string, or a tuple of strings", holds=self.name is None or whole)
        counted = len(values) == len(names) and not (self.name is None and isinstance(self.value, tuple))
        numbers = counted and all(value is None or isinstance(value, (int, float)) for value in values)
        check_field(self, "value", "a number, or one for each name", holds=numbers)

    @property
    def is_named(self) -> bool:
        return self.name is not None or self.value is not None

    @property
    def slots(self) -> Slots:
        names = self.name if isinstance(self.name, tuple) else () if self.name is None else (self.name,)
        values = self.value if isinstance(self.value, tuple) else (self.value,) * len(names)
        return tuple(zip(names, values, strict=True))

    @property
    def label(self) -> str:
        if self.name is None:
            return f"ScalarBroadcast({'' if self.value is None else _number(self.value)})"
        joined = (spelled(self.reduction),) if len(self.slots) > 1 else ()
        return f"ScalarBroadcast({', '.join((*map(show_slot, self.slots), *joined))})"

    def read(self, reader: Reading, line: Line, values: list[Node], acc: Node) -> Node:
        if self.name is None:
            return reader.builder.node("const", attr=self.value, locs=(line.place,))
        loads = [reader.operand(name, default, line) for name, default in self.slots]
        return reduce(lambda x, y: reader.calls.apply(self.reduction, (x, y), {}, line.place), loads)

    def handed(self, line: Line, fields: tuple[Any, ...], part: Any) -> Iterator[tuple[str, Any]]:
        """See `Visitor.handed`. The fields are ((value, ...), (pointer, ...), (stride, ...)), with an entry for each
        name. A value is used only if its pointer is null."""
        if not self.slots and fields:
            raise misfit(line, "(): its number is written in the tree", fields)
        groups = [tuple(f) if isinstance(f, (tuple, list)) else (f,) for f in fields]
        count = len(self.slots)
        if len(groups) > 3 or any(len(group) > count for group in groups):
            raise misfit(line, f"((value, ...), (pointer, ...), (stride, ...)) for {count}", fields)
        values, pointers, strides = ((*group, *(None,) * (count - len(group))) for group in (*groups, (), (), ())[:3])
        for (name, default), value, pointer, stride in zip(self.slots, values, pointers, strides, strict=True):
            yield name, pointed(line, pointer, stride, default if value is None else value)
