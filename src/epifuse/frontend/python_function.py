"""Python source in, `Parsed` out. Closed world: what is not listed here raises on the user's own line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, Protocol

import torch

from epifuse.frontend import signature
from epifuse.frontend.names import FunctionRef, Reader, Scope, is_number, known_function
from epifuse.frontend.source import Source, from_function, from_string
from epifuse.frontend.statements import Parser, drive
from epifuse.fusion.vocabulary import VOCABULARY
from epifuse.ir import Graph, Load, Output


@dataclass(frozen=True, eq=False)
class Parsed:
    """A parsed epilogue: the graph as written, and what must be read when arguments are bound.

    `captures` reads each hidden scalar operand. `guards` are the other captured objects: when one of them is another
    object than at parse time, the function is parsed again. `prepare` is a front end's own reading of the arguments by
    name, before they are checked: `alpha_ptr` in place of `alpha`. `dtypes` are those that operands and outputs must
    have, the accumulator's under "accum"; an output that is allocated gets its own. `explain` prints the `notes`.
    """

    name: str
    graph: Graph
    parameters: tuple[str, ...]
    defaults: Mapping[str, Any]
    captures: Mapping[str, Reader]
    guards: tuple[tuple[Reader, Any], ...]
    source: Source
    function: Any
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of the return statement."""
        return tuple(output.name for output in self.graph.outputs)

    def named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Operands and outputs by the names of `parameters` and of the graph's outputs."""
        return dict(given if self.prepare is None else self.prepare(given))

    def is_current(self) -> bool:
        """False once a captured object that shaped the graph was replaced, or a captured number is none any more."""
        # A loop, because every launch asks: a generator would double the cost.
        for reader, seen in self.guards:
            if (value := reader.read()) is not seen and not _same(value, seen):
                return False
        return not self.captures or all(is_number(reader()) for reader in self.captures.values())


class FrontEnd(Protocol):
    """An object that says itself what epilogue it is: a visitor tree, a functor."""

    def __epifuse__(self) -> Parsed:
        """The epilogue, the same one each time while nothing it was made from has changed."""
        ...


def _same(value: Any, seen: Any) -> bool:
    return type(value) is type(seen) and isinstance(seen, (str, tuple, int, float)) and bool(value == seen)


def parse(
    function: Callable[..., Any] | str,
    *,
    reassign: bool = False,
    given: Mapping[str, Any] | None = None,
    accum: str = "accum",
) -> Parsed:
    """Parse an epilogue: a Python function, a lambda, a vocabulary function of one value, or source text.

    `given` fixes parameters while parsing: None, a function, the `Instance` of a method. `accum` is the name of the
    product. Raises `EpilogueSyntaxError` (a `SyntaxError`), with file, line and caret, outside the language.
    """
    inner = _wrap_vocabulary(function)
    if isinstance(inner, str):
        source, scope = from_string(inner), Scope(None)
    else:
        source, scope = from_function(inner), Scope(inner)
    parser = Parser(source, scope, reassign=reassign)
    parameters, defaults = signature.epilogue_parameters(parser, source, inner, given, accum)
    frame = parser.frame
    for name, value in (given or {}).items():
        reader = Reader(name, partial(_known, value))
        frame.env[name] = scope.classify(value, name, reader, source.loc(source.definition))
    frame.env[accum] = parser.builder.node("accum")
    for name in parameters:
        frame.env[name] = parser.builder.node("load", attr=Load(name))
    result = drive(parser.body(source))
    graph = Graph(
        (*parameters, *parser.captures),
        signature.outputs_of(parser, source, result, accum),
        tuple(parser.effects),
        parser.builder.locs,
        checked=tuple(parser.assigned),
    )
    return Parsed(source.name, graph, parameters, defaults, parser.captures, tuple(parser.guards), source, function)


def _known(value: Any) -> Any:
    return value


def _wrap_vocabulary(function: Any) -> Any:
    """`epilogue=ef.silu`: a vocabulary or torch function of one value is an epilogue as it stands."""
    found = known_function(function, getattr(function, "__name__", "function")) if callable(function) else None
    if isinstance(found, FunctionRef):
        name = found.entry.name
        library = ("torch." if hasattr(torch, name) else "F.") if found.origin == "torch" else ""
        return f"def {name}_epilogue(accum): return {library}{name}(accum)"
    return function


@cache
def activation_body(name: str) -> Graph:
    """The body of an activation over loads named after its parameters; its one output is the result."""
    function = VOCABULARY[name].function
    source = from_function(function)
    parser = Parser(source, Scope(function), reassign=False)  # type: ignore[arg-type]  # activations are plain functions
    parser.frame.inside_library = True
    parameters = [argument.arg for argument in source.parameters.args]
    for parameter in parameters:
        parser.frame.env[parameter] = parser.builder.node("load", attr=Load(parameter))
    result = parser.value(drive(parser.body(source)), source.definition)
    return Graph(tuple(parameters), (Output("D", result),))
