"""Call a function on graph nodes that exist already, as the compute node of a visitor tree does."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from epifuse.base.errors import Loc, fail
from epifuse.frontend.names import FunctionRef, Guard, Helper, Reader, Scope, Static, known_function
from epifuse.frontend.signature import signature_of
from epifuse.frontend.source import Source, from_function
from epifuse.frontend.statements import Parser, drive
from epifuse.fusion.vocabulary import is_static
from epifuse.ir import Builder, Node


@dataclass(frozen=True, eq=False)
class _SourceAtPlace(Source):
    """The source of a definition that nobody wrote as text. Every error in it is reported at the one `place`."""

    place: Loc

    def loc(self, node: ast.AST) -> Loc:
        return self.place


def placed(place: Loc) -> Source:
    """A source without text of its own. Errors in it are reported at `place`."""
    definition = ast.parse("lambda accum: accum", mode="eval").body
    assert isinstance(definition, ast.Lambda)
    return _SourceAtPlace(definition, place.file, (place.text,), place)


def function_of(function: Any, place: Loc | None) -> FunctionRef | Helper:
    """The vocabulary function or the helper that `function` is. Raises `ArgumentTypeError` if it is neither."""
    spelled = str(getattr(function, "__name__", repr(function).split("\n")[0]))
    found = known_function(function, spelled) if callable(function) else None
    if not isinstance(found, (FunctionRef, Helper)):
        raise fail("compute_function", place, what=spelled)
    return found


class Parameter(NamedTuple):
    """One parameter of a function: its name, whether a call may leave it out, and whether it is fixed when the epilogue
    is parsed."""

    name: str
    optional: bool
    fixed: bool


def parameters_of(function: Any, place: Loc | None = None) -> tuple[Parameter, ...]:
    """The parameters of `function` in order."""
    found = function_of(function, place)
    if isinstance(found, Helper):
        source = from_function(found.function)
        if (star := source.parameters.vararg) is not None:
            raise fail("star_in_helper", source.loc(star), name=found.function.__name__, star=f"*{star.arg}")
        signature = signature_of(found.function, source)
    else:
        signature = found.entry.signature
    parameters, ours = signature.parameters.values(), isinstance(found, FunctionRef)
    return tuple(Parameter(p.name, p.default is not p.empty, ours and is_static(p)) for p in parameters)


@dataclass
class Calls:
    """Calls functions on the nodes of one builder. Collects the captures, guards, effects and checks for `Parsed`."""

    builder: Builder
    captures: dict[str, Reader] = field(default_factory=dict)
    guards: list[Guard] = field(default_factory=list)
    effects: dict[Node, None] = field(default_factory=dict)
    checked: dict[Node, None] = field(default_factory=dict)

    def apply(self, function: Any, values: Sequence[Node], named: Mapping[str, Any], place: Loc) -> Node:
        """Return the node of `function(*values, **named)`.

        An error inside the function names the function's own line, and `place` as the line of the call.
        """
        source = placed(place)
        scope, found = Scope(None, self.guards), function_of(function, place)
        if isinstance(found, Helper):
            applied = weakref.ref(found.function)
            scope.guard_content(Reader(("applied", id(function)), lambda root: applied()), found.function)
        parser = Parser(source, scope, reassign=False)
        parser.builder, parser.captures = self.builder, self.captures
        parser.effects, parser.assigned = self.effects, self.checked
        given = {name: item if isinstance(item, Node) else _literal(parser, item) for name, item in named.items()}
        at = ast.Call(func=ast.Name("f"), args=[ast.Name("x") for _ in values], keywords=[])
        result = drive(parser.call(found, list(values), given, at))
        return parser.value(result, at)


def _literal(parser: Parser, item: Any) -> Any:
    return parser.emit("const", attr=item) if isinstance(item, (bool, int, float)) else Static(item)
