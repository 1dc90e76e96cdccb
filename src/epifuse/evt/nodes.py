"""The nodes of a visitor tree: values, compared by what they hold. A node says what it is; `reading.py` what it means.

Leaves fetch: AccFetch, SrcFetch, AuxLoad, ScalarBroadcast, RowBroadcast, ColBroadcast. Operators take the values of
other nodes: Compute, AuxStore, and the reductions, which store and hand their input on. How they are joined is in
`tree.py`. A name is the operand's or output's; without one a node is named after its kind when the tree is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from epifuse.errors import EpifuseError, Loc, fail
from epifuse.evt.visitor import Slots, Visitor, show_slot
from epifuse.frontend.apply import parameters_of
from epifuse.fusion import reduction
from epifuse.fusion.primitives import add, logical_and, logical_or, maximum, minimum, mul
from epifuse.fusion.vocabulary import VOCABULARY, ours
from epifuse.ir.graph import show_attr

Strides = tuple[int, int, int]
"""(dM, dN, dL) in elements: a zero says that the value does not vary over that axis."""

Function = Callable[..., Any] | str


def _function(function: Function) -> Any:
    """A function by itself or by its name in the vocabulary."""
    return VOCABULARY[function].function if isinstance(function, str) and function in VOCABULARY else function


def _spelled(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else repr(value)


def _field(node: Visitor, name: str, want: str, *, holds: bool) -> None:
    """Raise unless what was written into a node's field is what it must be."""
    if not holds:
        shown = repr(getattr(node, name)).split("\n")[0]
        raise fail("tree_field", None, node=type(node).__name__, field=name, want=want, value=shown)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_named(node: Visitor) -> None:
    _field(node, "name", "a string", holds=node.name is None or isinstance(node.name, str))


# --- leaves ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class AccFetch(Visitor):
    """The accumulator, A @ B; in the output trees of a `SplitTreeVisitor` the value of its input tree."""


@dataclass(frozen=True, repr=False)
class SrcFetch(Visitor):
    """The source matrix, (M, N) or (L, M, N): an operand called C."""

    name: str = "C"
    access: ClassVar[str] = "tile"

    def __post_init__(self) -> None:
        _field(self, "name", "a string", holds=isinstance(self.name, str))

    @property
    def slots(self) -> Slots:
        return ((self.name, None),)


@dataclass(frozen=True, repr=False)
class _Broadcast(Visitor):
    """An operand by name, and the number that stands for it where its pointer is null."""

    name: str | None = None
    default: float | None = None
    access: ClassVar[str]

    def __post_init__(self) -> None:
        _check_named(self)
        _field(self, "default", "a number", holds=self.default is None or _is_number(self.default))

    @property
    def slots(self) -> Slots:
        return ((str(self.name), self.default),)


class AuxLoad(_Broadcast):
    """A matrix, (M, N) or (L, M, N)."""

    access, kind = "tile", "aux"


class Operand(_Broadcast):
    """Anything that broadcasts to accum by NumPy's rule, as an operand of a function may be."""

    access, kind = "any", "operand"


class RowBroadcast(_Broadcast):
    """A row vector, (N,), (1, N) or (L, 1, N), or a number."""

    access, kind = "row", "row"


class ColBroadcast(_Broadcast):
    """A column vector, (M,), (M, 1) or (L, M, 1), or a number."""

    access, kind = "column", "col"


@dataclass(frozen=True, repr=False)
class ScalarBroadcast(Visitor):
    """A number, or one a batch, (L, 1, 1), on the host or on the device; with several names their combination.

    `value` is the default, one for all names or one for each. Without a name it is a literal of the epilogue, as a
    number written in a function is. `reduction` joins several: `functional.multiplies` unless given.
    """

    name: str | tuple[str, ...] | None = None
    value: float | tuple[float | None, ...] | None = None
    reduction: Function = mul
    access: ClassVar[str] = "scalar"
    kind: ClassVar[str] = "scalar"

    def __post_init__(self) -> None:
        object.__setattr__(self, "reduction", _function(self.reduction))
        names = self.name if isinstance(self.name, tuple) else (self.name,)
        values = self.value if isinstance(self.value, tuple) else (self.value,) * len(names)
        whole = bool(names) and all(isinstance(name, str) for name in names)
        _field(self, "name", "a string, or a tuple of strings", holds=self.name is None or whole)
        numbers = len(values) == len(names) and all(
            value is None or isinstance(value, (int, float)) for value in values
        )
        _field(self, "value", "a number, or one for each name", holds=numbers)

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
        joined = (_spelled(self.reduction),) if len(self.slots) > 1 else ()
        return f"ScalarBroadcast({', '.join((*map(show_slot, self.slots), *joined))})"


# --- operators ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False, init=False)
class Compute(Visitor):
    """A function of its children: a primitive, an activation, or any function in the epilogue language.

    Its further parameters are given by name: a number is a literal; a string is the name of a scalar operand, or
    (name, default). A `functools.partial` holds some already, as `functional.Clamp` does. Raises `ArgumentTypeError`
    where `function` is outside the language.
    """

    function: Any
    further: tuple[tuple[str, Any], ...]

    def __init__(self, function: Function | partial[Any], **arguments: Any) -> None:
        held = function if isinstance(function, partial) else None
        arguments = {**(held.keywords if held else {}), **arguments}
        object.__setattr__(self, "function", held.func if held else _function(function))
        object.__setattr__(self, "further", tuple(arguments.items()))
        _field(self, "function", "a partial that holds its arguments by name", holds=held is None or not held.args)
        literals = all(is_operand(item) or _is_literal(item) for item in arguments.values())
        _field(self, "further", "numbers, names of operands, or (name, default)", holds=literals)
        known = {parameter.name for parameter in parameters_of(self.function)}
        for name in arguments:
            if name not in known:
                want = f"({', '.join(p.name for p in parameters_of(self.function))})"
                raise fail("unexpected_argument", None, function=_spelled(self.function), name=name, want=want, hint="")

    @property
    def inputs(self) -> tuple[int, int]:
        """The least and the most children it takes."""
        free = [p for p in parameters_of(self.function) if p.name not in dict(self.further)]
        return len([p for p in free if not p.optional]), len(free)

    @property
    def slots(self) -> Slots:
        """Its operands: those of `arguments` that are names."""
        return tuple((item, None) if isinstance(item, str) else item for _, item in self.further if is_operand(item))

    @property
    def label(self) -> str:
        shown = [f"{name}={_argument(item)}" for name, item in self.further]
        return f"Compute({', '.join([_spelled(self.function), *shown])})"


def is_operand(item: Any) -> bool:
    """Whether an argument of `Compute` is the name of an operand: "name", or ("name", default)."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        return item[1] is None or _is_number(item[1])
    return isinstance(item, str)


def _is_literal(item: Any) -> bool:
    """What an argument of a function may be in the language, written out."""
    if isinstance(item, tuple):
        return all(_is_literal(each) for each in item)
    return item is None or isinstance(item, (bool, int, float, torch.dtype))


def _argument(item: Any) -> str:
    if isinstance(item, str):
        return item
    return show_slot(item) if is_operand(item) else str(item)


@dataclass(frozen=True, repr=False)
class Operation(Visitor):
    """One operation as the front end writes it into the graph; what `to_tree` makes where no function says the same."""

    op: str
    attr: Any
    arity: int

    @property
    def inputs(self) -> tuple[int, int]:
        return self.arity, self.arity

    @property
    def label(self) -> str:
        return f"Operation({self.op}{'' if self.attr is None else f', {show_attr(self.attr)}'})"


@dataclass(frozen=True, repr=False)
class AuxStore(Visitor):
    """Stores its input as an output, and hands it on."""

    name: str | None = None
    kind: ClassVar[str] = "Aux"

    def __post_init__(self) -> None:
        _check_named(self)

    @property
    def inputs(self) -> tuple[int, int]:
        return 1, 1


_COMBINED: tuple[tuple[Any, Any], ...] = (
    (add, reduction.sum),
    (maximum, reduction.amax),
    (minimum, reduction.amin),
    (logical_and, reduction.all),
    (logical_or, reduction.any),
)
"""What a function of two values makes of many."""

NEUTRAL = {"amax": -math.inf, "amin": math.inf, "all": 1.0}
"""The identity of a reduction, where it is not 0."""

_COMBINE_AGAIN: dict[str, Any] = {"amax": maximum, "amin": minimum, "absmax": maximum}


@dataclass(frozen=True, repr=False)
class Reduction(Visitor):
    """Reduces its input to an output, and hands the input on.

    `function` combines in registers, `global_function` in memory; both say the same reduction: `functional.plus` and
    `functional.atomic_add`, say, or a reduction of the vocabulary. `identity` takes part in a maximum or minimum; in
    other reductions it must be neutral. A `stride` with dL other than 0 reduces each batch by itself. Raises
    `ArgumentError` for functions that are not one reduction, identities that are not neutral, strides of another shape.
    """

    name: str | None = None
    function: Function = add
    global_function: Function | None = None
    identity: float | None = None
    stride: Strides | None = None
    kept: ClassVar[str]

    @property
    def inputs(self) -> tuple[int, int]:
        return 1, 1

    def __post_init__(self) -> None:
        _check_named(self)
        _field(self, "identity", "a number", holds=self.identity is None or _is_number(self.identity))
        object.__setattr__(self, "function", _reduction(self, self.function))
        if self.global_function is not None:
            object.__setattr__(self, "global_function", _reduction(self, self.global_function, "global_function"))
            if self.global_function is not self.function:
                names = (_spelled(self.function), _spelled(self.global_function))
                raise fail("tree_reduction", None, node=type(self).__name__, first=names[0], second=names[1])
        if self.identity is not None and not self.is_neutral(self.identity) and self.again is None:
            raise self.depends_on_tiles(None, self.identity)
        if self.stride is not None:
            self.check_stride(self.stride, None)

    def check_stride(self, stride: Any, place: Loc | None) -> None:
        """Raise unless `stride` is zero along the axes that are reduced, and only there."""
        axes = "mnl"
        whole = isinstance(stride, tuple) and len(stride) == 3 and {type(d) for d in stride} == {int}
        if not whole or [axes[i] for i in (0, 1) if stride[i]] != [a for a in "mn" if a in self.kept]:
            want = "(" + ", ".join("d" + a.upper() if a in (*self.kept, "l") else "0" for a in axes) + ")"
            raise fail("tree_stride", place, node=type(self).__name__, stride=stride, want=want)

    @property
    def reduction(self) -> str:
        """The reduction's name in the vocabulary."""
        return _spelled(self.function)

    @property
    def again(self) -> Any:
        """What joins the result with an identity that is not neutral; None where nothing does."""
        return _COMBINE_AGAIN.get(self.reduction)

    @property
    def neutral(self) -> float:
        """The identity that changes nothing."""
        return NEUTRAL.get(self.reduction, 0.0)

    def is_neutral(self, identity: float) -> bool:
        """Whether starting from `identity` changes nothing."""
        if self.reduction == "amax":
            return identity <= -3.4028234e38
        if self.reduction == "amin":
            return identity >= 3.4028234e38
        return identity == self.neutral

    def depends_on_tiles(self, place: Loc | None, identity: float) -> EpifuseError:
        """The refusal of an identity that is not neutral."""
        hint = f"{self.neutral} changes nothing" + (", or write it into the tree as identity=" if self.again else "")
        return fail("tree_identity", place, node=self.label, identity=identity, hint=hint)

    @property
    def per_batch(self) -> bool:
        return self.stride is not None and self.stride[2] != 0

    @property
    def gone(self) -> tuple[str, ...]:
        """The axes it reduces over."""
        return tuple(a for a in "lmn" if a not in self.kept and not (a == "l" and self.per_batch))

    @property
    def label(self) -> str:
        named = f"{self.name} = " if self.name else ""
        return f"{type(self).__name__}({named}{self.reduction}{' of each batch' if self.per_batch else ''})"


def _reduction(node: Visitor, function: Function, field: str = "function") -> Any:
    combined = {id(step): whole for step, whole in _COMBINED}
    found = _function(function)
    found = combined.get(id(found), found)
    entry = ours(found)
    if entry is None or entry.name not in reduction.REDUCTIONS:
        want = "a reduction, or one of plus, maximum, minimum, logical_and, logical_or"
        raise fail("tree_field", None, node=type(node).__name__, field=field, want=want, value=_spelled(function))
    return found


class ScalarReduction(Reduction):
    """All of its input to one number, or one a batch."""

    kind, kept = "scalar_reduction", ""


class RowReduction(Reduction):
    """Its input over M to a row vector, (N,), or (L, N) with one a batch."""

    kind, kept = "row_reduction", "n"


class ColReduction(Reduction):
    """Its input over N to a column vector, (M,), or (L, M) with one a batch."""

    kind, kept = "col_reduction", "m"


STORES = (AuxStore, Reduction)
OPERATORS = (Compute, Operation, *STORES)
