"""What all parts of the parser share: the graph being built, the function being read, and the places of errors."""

from __future__ import annotations

import ast
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from epifuse.base.errors import EpifuseError, Loc, fail, kind_of
from epifuse.frontend.hints import hint_for, words_for
from epifuse.frontend.modules import is_altered, is_module
from epifuse.frontend.names import (
    RECEIVER,
    FixedFunction,
    FunctionRef,
    Helper,
    HostFunction,
    Instance,
    Module,
    Number,
    Reader,
    Scope,
    Static,
)
from epifuse.frontend.source import Source
from epifuse.ir import Builder, Load, Node

Visit = Generator[Any, Any, Any]
"""A visitor that yields the visitors it needs and returns a value; see `statements.drive`."""


@dataclass(frozen=True)
class TupleValue:
    """Several values: what a helper returned, or a tuple that was written out."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class Pieces:
    """The parts of a value along a dim whose number is not known while parsing, such as those of `x.unbind()`.

    `piece(i, count)` is the node of part `i`. `count` is the number of names that the parts are unpacked to, which type
    inference checks; it is 0 if only this part is taken.
    """

    piece: Callable[[int, int], Node]


@dataclass(frozen=True)
class DtypeOf:
    """`x.dtype`, which is not known before type inference; `value` is x."""

    value: Node


@dataclass(frozen=True)
class LimitsOf:
    """`torch.finfo(x.dtype)`; `value` is x."""

    value: Node


@dataclass(frozen=True)
class Method:
    """The tensor method `x.name`, before it is called."""

    receiver: Node
    name: str


def describe(item: Any) -> str:
    """Describe a value of the parser in words, for an error message."""
    match item:
        case Static(value=str()):
            return f"the string {item.value!r}"
        case Static():
            return repr(item.value)
        case TupleValue() | Pieces():
            return "a tuple or a list"
        case DtypeOf() | LimitsOf():
            return "the dtype of a value"
        case Module():
            return f"the module {item.spelled}"
        case Instance():
            return f"the object {item.spelled}"
        case FunctionRef() | HostFunction() | FixedFunction() | Helper():
            return f"the function {item.spelled}"
        case Method():
            return f"the method .{item.name} without its call"
    return "a value"


@dataclass
class Frame:
    """One function being parsed: its names, and where its lines belong in an error."""

    source: Source
    scope: Scope
    reassign: bool
    env: dict[str, Any] = field(default_factory=dict)
    call_site: Loc | None = None
    inside_library: bool = False

    def loc(self, node: ast.AST) -> Loc:
        """The place that an error names: this line, or the user's call if this function belongs to our own library."""
        if self.inside_library and self.call_site is not None:
            return self.call_site
        return self.source.loc(node)._replace(via=self.call_site)


class Context(ABC):
    """Builds one graph; helpers are inlined by pushing a frame."""

    def __init__(self, source: Source, scope: Scope, *, reassign: bool) -> None:
        self.builder = Builder()
        self.guards, self.root = scope.guards, scope.root
        self.captures: dict[str, Reader] = {}
        self.effects: dict[Node, None] = {}
        self.assigned: dict[Node, None] = {}
        self.active: list[object] = [scope.function]
        self.calls = 0
        self.frame = Frame(source, scope, reassign)

    @abstractmethod
    def expression(self, node: ast.expr) -> Visit:
        """The value of an expression."""

    @abstractmethod
    def inline(
        self, function: types.FunctionType, positional: list[Any], named: dict[str, Any], at: ast.AST, *, library: bool
    ) -> Visit:
        """What `function` returns for these arguments."""

    def emit(self, op: str, *args: Node, attr: Any = None, at: ast.AST | None = None) -> Node:
        """Return one node of the graph. Errors about it name the syntax `at`."""
        locs = () if at is None else (self.frame.loc(at),)
        return self.builder.node(op, *args, attr=attr, locs=locs)

    def fail(self, key: str, at: ast.AST, **values: Any) -> EpifuseError:
        """The catalogue's error for `key` at the syntax `at`."""
        return fail(key, self.frame.loc(at), **values)

    def unsupported(self, at: ast.AST, syntax: type[ast.AST] | None = None) -> EpifuseError:
        """The error for a piece of Python outside the language."""
        kind = syntax or type(at)
        return self.fail("unsupported_syntax", at, syntax=words_for(kind), hint=hint_for(kind))

    def value(self, item: Any, at: ast.AST) -> Node:
        """`item` as a node of the graph, or an error that says what it is instead."""
        if isinstance(item, Node):
            if item.op == "debug_print":
                raise self.fail("printed_value", at)
            return item
        if isinstance(item, Static) and isinstance(item.value, (bool, int, float)):
            return self.emit("const", attr=item.value, at=at)
        if isinstance(item, Instance) and item.reader.place != RECEIVER:
            raise self.unusable(item, at)
        hint = "join its values: x + y, cat([x, y])" if isinstance(item, (TupleValue, Pieces)) else ""
        raise self.fail("not_a_value", at, what=describe(item), hint=hint)

    def opened(self, item: Any, at: ast.AST) -> Any:
        """`item`; a tuple from outside the epilogue becomes several values, like one that is written out."""
        if not isinstance(item, Static) or not isinstance(item.value, tuple):
            return item
        numbers = [self.emit("const", attr=x, at=at) if isinstance(x, (int, float)) else Static(x) for x in item.value]
        return TupleValue(tuple(numbers))

    def unusable(self, item: Instance, at: ast.AST) -> EpifuseError:
        """The error for an object that is neither a value nor a function."""
        if is_altered(item.value):
            return self.fail("altered_module", at, name=f"'{item.spelled}'")
        key = "captured_module" if is_module(item.value) else "captured_object"
        return self.fail(key, at, name=item.spelled, type=kind_of(item.value))

    def tensor(self, item: Any, spelled: str, at: ast.AST, rank: int = 0) -> Any:
        """`item`, checked to be a tensor of at least `rank` dims once types are known."""
        if not isinstance(item, Node) or (item.op == "tensor" and rank == 0):
            return item
        return self.emit("tensor", self.value(item, at), attr=(spelled, rank), at=at)

    def capture(self, number: Number, at: ast.AST) -> Node:
        """A captured number becomes a hidden scalar operand; our own library's numbers are constants."""
        if self.frame.inside_library:
            return self.emit("const", attr=number.reader.read(self.root), at=at)
        name = f"@{number.spelled}"
        while self.captures.get(name, number.reader) != number.reader:
            name += "'"
        self.captures[name] = number.reader
        return self.emit("load", attr=Load(name), at=at)
