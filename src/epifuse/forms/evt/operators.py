"""The operators of a visitor tree, which take the values of other nodes: Compute, AuxStore, and the reductions.

AuxStore and the reductions store an output, and their value is their input. Like leaves (`nodes.py`), operators are
compared by their fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from epifuse.base.errors import EpifuseError, Loc, fail
from epifuse.forms.evt.arguments import misfit, padded, pointed
from epifuse.forms.evt.nodes import Function, check_field, check_named, function_of, is_number, spelled
from epifuse.forms.evt.outline import Line
from epifuse.forms.evt.part import Slots, show_slot
from epifuse.forms.evt.reading import Reading
from epifuse.forms.evt.visitor import Visitor
from epifuse.frontend.apply import parameters_of
from epifuse.fusion import reduction
from epifuse.fusion.primitives import add, logical_and, logical_or, maximum, minimum
from epifuse.fusion.vocabulary import ours
from epifuse.ir import Node
from epifuse.ir.graph import show_attr

Strides = tuple[int, int, int]
"""(dM, dN, dL) in elements. 0 means that the value does not vary over that axis."""


@dataclass(frozen=True, repr=False, init=False)
class Compute(Visitor):
    """A function of its children: a primitive, an activation, or any function in the epilogue language.

    Further parameters of the function are given by name. A number is a literal; a string, or (name, default), is a
    scalar operand, except for a parameter that is fixed when the tree is read, such as gelu's `approximate="tanh"`. A
    `functools.partial` has some of them already, such as `functional.Clamp`. Raises `ArgumentTypeError` if `function`
    is not in the language.
    """

    function: Any
    further: tuple[tuple[str, Any], ...]
    drawn = "operation"

    def __init__(self, function: Function | partial[Any], **arguments: Any) -> None:
        held = function if isinstance(function, partial) else None
        arguments = {**(held.keywords if held else {}), **arguments}
        object.__setattr__(self, "function", held.func if held else function_of(function))
        object.__setattr__(self, "further", tuple(arguments.items()))
        check_field(self, "function", "a partial that holds its arguments by name", holds=held is None or not held.args)
        literals = all(is_operand(item) or _is_literal(item) for item in arguments.values())
        check_field(self, "further", "numbers, names of operands, or (name, default)", holds=literals)
        known = {parameter.name for parameter in parameters_of(self.function)}
        for name in arguments:
            if name not in known:
                want = f"({', '.join(p.name for p in parameters_of(self.function))})"
                raise fail("unexpected_argument", None, function=spelled(self.function), name=name, want=want, hint="")

    @property
    def _operands(self) -> dict[str, Any]:
        """The further arguments that are names of operands, by parameter."""
        fixed = {parameter.name for parameter in parameters_of(self.function) if parameter.fixed}
        return {name: item for name, item in self.further if is_operand(item) and name not in fixed}

    @property
    def inputs(self) -> tuple[int, int]:
        """The least and the largest number of children it takes."""
        free = [p for p in parameters_of(self.function) if p.name not in dict(self.further)]
        return len([p for p in free if not p.optional]), len(free)

    @property
    def slots(self) -> Slots:
        """Its operands: the further arguments that are names."""
        return tuple((item, None) if isinstance(item, str) else item for item in self._operands.values())

    @property
    def label(self) -> str:
        shown = [f"{name}={_argument(item)}" for name, item in self.further]
        return f"Compute({', '.join([spelled(self.function), *shown])})"

    def read(self, reader: Reading, line: Line, values: list[Node], acc: Node) -> Node:
        loads = {name: reader.operand(name, default, line, "scalar") for name, default in self.slots}
        named = {name: loads[item if isinstance(item, str) else item[0]] for name, item in self._operands.items()}
        named = {name: named.get(name, item) for name, item in self.further}
        names = [parameter.name for parameter in parameters_of(self.function)]
        # The first parameter that is held; inputs behind it are given by name.
        first = next((i for i, name in enumerate(names) if name in named), len(values))
        named |= zip((name for name in names[first:] if name not in named), values[first:], strict=False)
        return reader.calls.apply(self.function, values[:first], named, line.place)

    def handed(self, line: Line, fields: tuple[Any, ...], part: Any) -> Iterator[tuple[str, Any]]:
        if len(fields) != len(self.slots) and not (not fields and all(d is not None for _, d in self.slots)):
            raise misfit(line, ", ".join(name for name, _ in self.slots) or "(): nothing", part)
        yield from ((name, value) for (name, _), value in zip(self.slots, fields, strict=False))


def is_operand(item: Any) -> bool:
    """Whether an argument of `Compute` is the name of an operand: "name", or ("name", default)."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        return item[1] is None or is_number(item[1])
    return isinstance(item, str)


def _is_literal(item: Any) -> bool:
    """Whether an argument of a function is a literal of the epilogue language."""
    if isinstance(item, tuple):
        return all(_is_literal(each) for each in item)
    return item is None or isinstance(item, (bool, int, float, torch.dtype))


def _argument(item: Any) -> str:
    if isinstance(item, str):
        return item
    return show_slot(item) if is_operand(item) else str(item)


@dataclass(frozen=True, repr=False)
class Operation(Visitor):
    """One operation, as the front end writes it into the graph. `to_tree` uses it if no function means the same."""

    op: str
    attr: Any
    arity: int
    drawn = "operation"

    @property
    def inputs(self) -> tuple[int, int]:
        return self.arity, self.arity

    @property
    def label(self) -> str:
        return f"Operation({self.op}{'' if self.attr is None else f', {show_attr(self.attr)}'})"

    def read(self, reader: Reading, line: Line, values: list[Node], acc: Node) -> Node:
        made = reader.builder.node(self.op, *values, attr=self.attr, locs=(line.place,))
        reader.calls.effects.update({made: None} if self.op == "debug_print" else {})
        return made


@dataclass(frozen=True, repr=False)
class AuxStore(Visitor):
    """Stores its input as an output. Its own value is the input."""

    name: str | None = None
    kind: ClassVar[str] = "Aux"
    drawn = "store"

    def __post_init__(self) -> None:
        check_named(self)

    @property
    def inputs(self) -> tuple[int, int]:
        return 1, 1

    def read(self, reader: Reading, line: Line, values: list[Node], acc: Node) -> Node:
        return reader.store(str(self.name), values[0], line.place)

    def handed(self, line: Line, fields: tuple[Any, ...], part: Any) -> Iterator[tuple[str, Any]]:
        pointer, stride = padded(line, fields, ("pointer", "stride"), part)
        yield str(self.name), pointed(line, pointer, stride, None)


_COMBINED: tuple[tuple[Any, Any], ...] = (
    (add, reduction.sum),
    (maximum, reduction.amax),
    (minimum, reduction.amin),
    (logical_and, reduction.all),
    (logical_or, reduction.any),
)
"""Functions of two values, and the reduction that each gives when it is applied to many values."""

_COMBINE_AGAIN: dict[str, Any] = {"largest": maximum, "smallest": minimum}


@dataclass(frozen=True, repr=False)
class Reduction(Visitor):
    """Reduces its input to an output. Its own value is the input.

    `function` combines in registers, `global_function` in memory. Both must mean the same reduction, such as
    `functional.plus` and `functional.atomic_add`, or a reduction of the vocabulary. `identity` takes part in a maximum
    or minimum; in other reductions it must be neutral. With a `stride` whose dL is not 0, each batch is reduced by
    itself. Raises `ArgumentError` for functions of different reductions, an identity that is not neutral but must be,
    and strides that do not fit the reduced axes.
    """

    name: str | None = None
    function: Function = add
    global_function: Function | None = None
    identity: float | None = None
    stride: Strides | None = None
    kept: ClassVar[str]
    drawn = "store"

    @property
    def inputs(self) -> tuple[int, int]:
        return 1, 1

    def __post_init__(self) -> None:
        check_named(self)
        check_field(self, "identity", "a number", holds=self.identity is None or is_number(self.identity))
        object.__setattr__(self, "function", _reduction(self, self.function))
        if self.global_function is not None:
            object.__setattr__(self, "global_function", _reduction(self, self.global_function, "global_function"))
            if self.global_function is not self.function:
                names = (spelled(self.function), spelled(self.global_function))
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
        return spelled(self.function)

    @property
    def again(self) -> Any:
        """The function that combines the result with an identity that is not neutral; None if there is none."""
        return _COMBINE_AGAIN.get(reduction.REDUCTIONS[self.reduction].merge.how)

    @property
    def neutral(self) -> float:
        """The neutral identity, which changes no result."""
        return reduction.REDUCTIONS[self.reduction].merge.neutral

    def is_neutral(self, identity: float) -> bool:
        """Whether starting from `identity` changes nothing."""
        if self.reduction == "amax":
            return identity <= -3.4028234e38
        if self.reduction == "amin":
            return identity >= 3.4028234e38
        return identity == self.neutral

    def depends_on_tiles(self, place: Loc | None, identity: float) -> EpifuseError:
        """The error for an identity that is not neutral: the result would depend on the tiles."""
        hint = f"{self.neutral} changes nothing" + (", or write it into the tree as identity=" if self.again else "")
        return fail("tree_identity", place, node=self.label, identity=identity, hint=hint)

    @property
    def per_batch(self) -> bool:
        return self.stride is not None and self.stride[2] != 0

    @property
    def gone(self) -> tuple[str, ...]:
        """The axes that the node reduces over."""
        return tuple(a for a in "lmn" if a not in self.kept and not (a == "l" and self.per_batch))

    @property
    def label(self) -> str:
        named = f"{self.name} = " if self.name else ""
        return f"{type(self).__name__}({named}{self.reduction}{' of each batch' if self.per_batch else ''})"

    def read(self, reader: Reading, line: Line, values: list[Node], acc: Node) -> Node:
        made = reader.builder.node("reduce_axes", values[0], attr=(self.reduction, self.gone), locs=(line.place,))
        if self.identity is not None and not self.is_neutral(self.identity):
            start = reader.builder.node("const", attr=float(self.identity), locs=(line.place,))
            made = reader.calls.apply(self.again, (made, start), {}, line.place)
        reader.store(str(self.name), made, line.place)
        return values[0]

    def handed(self, line: Line, fields: tuple[Any, ...], part: Any) -> Iterator[tuple[str, Any]]:
        pointer, identity, stride = padded(line, fields, ("pointer", "identity", "stride"), part)
        if not isinstance(identity, (int, float, type(None))):
            raise misfit(line, "(pointer, identity, stride), the identity a number", part)
        if identity is not None and identity != self.identity and not self.is_neutral(identity):
            raise self.depends_on_tiles(line.place, identity)
        handed = pointed(line, pointer, None, None)
        if stride is not None:
            stride = tuple(stride) if isinstance(stride, list) else stride
            self.check_stride(stride, line.place)
            self._check_fit(line, handed, stride)
        yield str(self.name), handed

    def _check_fit(self, line: Line, pointer: Any, stride: tuple[int, ...]) -> None:
        """Raise unless the strides reduce the batches as the node does, and are those of the tensor."""
        tensor = getattr(pointer, "tensor", pointer)
        # CUTLASS's packed strides have dL = 0 if there is one batch.
        if bool(stride[2]) != self.per_batch and (stride[2] or tensor.numel() > 1):
            how = ("all batches together", "each batch by itself")
            raise fail("tree_batches", line.place, node=line.label, how=how[self.per_batch], stride=stride)
        wanted = [step for step in (stride[2], *stride[:2]) if step]
        own = [step for extent, step in zip(tensor.shape, tensor.stride(), strict=True) if extent > 1]
        if len(own) == len(wanted) and own != wanted:
            shown = {"shape": tuple(tensor.shape), "strides": tuple(tensor.stride())}
            raise fail("tree_pointer", line.place, node=line.label, stride=stride, **shown)


def _reduction(node: Visitor, function: Function, field: str = "function") -> Any:
    combined = {id(step): whole for step, whole in _COMBINED}
    found = function_of(function)
    found = combined.get(id(found), found)
    entry = ours(found)
    if entry is None or entry.name not in reduction.REDUCTIONS:
        want = "a reduction, or one of plus, maximum, minimum, logical_and, logical_or"
        raise fail("tree_field", None, node=type(node).__name__, field=field, want=want, value=spelled(function))
    return found


class ScalarReduction(Reduction):
    """Reduces all of its input to one number, or to one number for each batch."""

    kind, kept = "scalar_reduction", ""


class RowReduction(Reduction):
    """Reduces its input over M to a row vector, (N,), or to one for each batch, (L, N)."""

    kind, kept = "row_reduction", "n"


class ColReduction(Reduction):
    """Reduces its input over N to a column vector, (M,), or to one for each batch, (L, M)."""

    kind, kept = "col_reduction", "m"


OPERATORS = (Compute, Operation, AuxStore, Reduction)
