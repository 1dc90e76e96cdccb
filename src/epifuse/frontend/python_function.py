"""Parse the Python source of an epilogue to a `Parsed`. Syntax without a visitor raises an error at the user's line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import isfinite
from types import MappingProxyType
from typing import Any, Protocol

import torch

from epifuse.base.errors import fail
from epifuse.base.lazy import cached_property
from epifuse.frontend import signature
from epifuse.frontend.identity import key_of
from epifuse.frontend.names import NOTHING, FunctionRef, Guard, Reader, Root, Scope, Static, is_number, known_function
from epifuse.frontend.source import Source, from_function, from_string
from epifuse.frontend.statements import Parser, drive
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.vocabulary import VOCABULARY
from epifuse.ir import Graph, Load, Node, Output
from epifuse.ir.graph import topological


@dataclass(frozen=True, eq=False)
class Parsed:
    """A parsed epilogue: the graph as written, and what must be read when arguments are bound.

    `readers` read the hidden scalar operands (captured numbers) from `root`, the object that was parsed. `guards` are
    the other captured objects: if one is another object than at parse time, the function is parsed again. `fixed` are
    the parameters that were decided while parsing, with their values: None or a string. `prepare` is how a front end
    changes the arguments before they are checked, for example `alpha_ptr` to `alpha`. `dtypes` are the dtypes that
    operands and outputs must have, "accum" for the accumulator; an allocated output gets its dtype from here. `explain`
    prints the `notes`.

    Two parses are equal if their texts and places are equal (`key`) and they read the same objects.
    """

    name: str
    graph: Graph
    parameters: tuple[str, ...]
    defaults: Mapping[str, Any]
    readers: Mapping[str, Reader]
    guards: tuple[Guard, ...]
    source: Source
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    root: Root = NOTHING

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of the return statement."""
        return tuple(output.name for output in self.graph.outputs)

    @cached_property
    def as_tensors(self) -> tuple[frozenset[str], ...]:
        """The operands that torch's functions take as tensors: a set of names for each argument made of them alone."""
        below: dict[Node, frozenset[str] | None] = {}  # names of operands; None where the value depends on others too
        for node in topological(self.graph.written):
            args = [below[arg] for arg in node.args]
            if node.op in ("load", "const"):
                below[node] = frozenset((node.attr.name,) if node.op == "load" else ())
            else:
                known = [names for names in args if names is not None]
                below[node] = frozenset[str]().union(*known) if args and len(known) == len(args) else None
        taking = (node for node in self.graph.written if node.op in ("tensor", "call", "torch"))
        return tuple(
            names for node in taking if (names := below[node]) and (node.op != "torch" or node.attr[0] == "tensor")
        )

    @cached_property
    def key(self) -> str:
        """A digest of the graph as written with all its names and places, and of the kinds of its defaults."""
        return key_of(
            self.graph,
            self.name,
            self.parameters,
            sorted((name, type(value).__name__) for name, value in self.defaults.items() if is_number(value)),
            sorted((name, type(value).__name__, str(value)) for name, value in self.fixed.items()),
            sorted((name, str(dtype)) for name, dtype in self.dtypes.items()),
            self.notes,
            self.source.loc(self.source.definition),
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Parsed) and self.key == other.key and self._reads() == other._reads()

    def __hash__(self) -> int:
        return hash(self.key)

    def _reads(self) -> tuple[Any, ...]:
        """The objects from which the captured numbers are read, and the place of each number in them."""
        if not self.readers:
            return ()
        return (*map(id, self.root.closure), id(self.root.receiver), *self.readers.values())

    def captured(self) -> dict[str, Any]:
        """The present values of the hidden scalar operands, by name."""
        return {name: reader.read(self.root) for name, reader in self.readers.items()}

    def bound(self, root: Root, defaults: Mapping[str, Any]) -> Parsed:
        """The same parse for another object of the same code."""
        return self.changed(root=root, defaults=defaults)

    def changed(self, **fields: Any) -> Parsed:
        """A copy with other `fields`. It keeps a `key` that was computed, so pass a new key if they change the graph.

        `dataclasses.replace` would cost each launch some microseconds and lose the cached properties.
        """
        made = object.__new__(Parsed)
        object.__setattr__(made, "__dict__", {**vars(self), **fields})
        return made

    def named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The given operands and outputs, by the names in `parameters` and of the graph's outputs."""
        named = dict(given if self.prepare is None else self.prepare(given))
        return {name: value for name, value in named.items() if name not in self.fixed} if self.fixed else named

    def is_current(self, root: Root | None = None) -> bool:
        """Whether the graph still fits: no captured object was replaced, and the captured numbers are still numbers."""
        root = self.root if root is None else root
        # A loop, because every launch asks: a generator would double the cost.
        for guard in self.guards:
            if not guard.holds(root):
                return False
        return not self.readers or all(is_number(reader.read(root)) for reader in self.readers.values())


class FrontEnd(Protocol):
    """An object that makes its own epilogue, such as a visitor tree or a functor."""

    def __epifuse__(self) -> Parsed:
        """The epilogue, the same one each time while nothing it was made from has changed."""
        ...


def parse(
    function: Callable[..., Any] | str,
    *,
    reassign: bool = False,
    given: Mapping[str, Any] = MappingProxyType({}),
    accum: str = "accum",
    root: Root | None = None,
    handed: Mapping[str, Any] | None = MappingProxyType({}),
) -> Parsed:
    """Parse an epilogue: a Python function, a lambda, a vocabulary function of one value, or source text.

    `given` fixes parameters while parsing: at None, a function, or a `Reader` of one. `accum` is the name of the
    product. Captured names are read from `root`. `handed` are the values that a call passes for parameters whose
    default is None or a string; `handed=None` makes all of these parameters operands. Raises `EpilogueSyntaxError` (a
    `SyntaxError`), with file, line and caret, for anything outside the language.
    """
    inner: Any = function if (text := vocabulary_text(function)) is None else text
    if isinstance(inner, str):
        source, scope = from_string(inner), Scope(None, root=root or NOTHING)
    else:
        source = from_function(inner)
        scope = Scope(inner, root=root or Root(inner.__closure__ or ()), is_root=True)
    parser = Parser(source, scope, reassign=reassign)
    declared = signature.epilogue_parameters(parser, source, inner, given, accum, handed)
    frame = parser.frame
    for name, value in given.items():
        reader = value if isinstance(value, Reader) else Reader(name, partial(_known, value))
        frame.env[name] = scope.classify(reader.read(scope.root), name, reader, source.loc(source.definition))
    frame.env |= {name: Static(value) for name, value in declared.fixed.items()}
    frame.env[accum] = parser.builder.node("accum")
    for name in declared.operands:
        frame.env[name] = parser.builder.node("load", attr=Load(name))
    result = drive(parser.body(source))
    graph = Graph(
        (*declared.operands, *parser.captures),
        signature.outputs_of(parser, source, result, accum),
        tuple(parser.effects),
        parser.builder.locs,
        checked=tuple(parser.assigned),
    )
    return Parsed(
        source.name,
        graph,
        declared.operands,
        declared.defaults,
        parser.captures,
        tuple(parser.guards),
        source,
        fixed=declared.fixed,
        root=scope.root,
    )


def _known(value: Any, root: Root) -> Any:
    return value


def vocabulary_text(function: Any, arguments: Mapping[str, Any] = MappingProxyType({})) -> str | None:
    """The source of an epilogue for a vocabulary or torch function of one value, such as `ef.silu`, with further
    `arguments`. None for any other function, and if the text of an argument would not give its value again."""
    found = known_function(function, getattr(function, "__name__", "function")) if callable(function) else None
    if not isinstance(found, FunctionRef) or not all(map(_is_written_as_it_is, arguments.values())):
        return None
    name = found.entry.name
    library = ("torch." if hasattr(torch, name) else "F.") if found.origin == "torch" else ""
    given = "".join(f", {key}={value!r}" for key, value in arguments.items())
    return f"def {name}_epilogue(accum): return {library}{name}(accum{given})"


def _is_written_as_it_is(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_written_as_it_is, value))
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and isfinite(value))


@cache
def activation_body(name: str) -> Graph:
    """The body of an activation over loads named after its parameters; its one output is the result.

    Raises `EpilogueSyntaxError` if it has an operation that is not elementwise, such as a reduction.
    """
    return body_of(VOCABULARY[name].body, name)


def body_of(function: Callable[..., object], name: str) -> Graph:
    """Like `activation_body`, for a `function` that defines the activation `name`."""
    source = from_function(function)
    parser = Parser(source, Scope(function), reassign=False)  # type: ignore[arg-type]  # it is a plain function
    parser.frame.inside_library = True
    parameters = [argument.arg for argument in source.parameters.args]
    for parameter in parameters:
        parser.frame.env[parameter] = parser.builder.node("load", attr=Load(parameter))
    result = parser.value(drive(parser.body(source)), source.definition)
    body = Graph(tuple(parameters), (Output("D", result),), locs=parser.builder.locs)
    for node in body.nodes:
        if node.op not in PRIMITIVES and node.op not in ("call", "const", "load"):
            operation = node.attr[0] if node.op == "reduce_dims" else node.op
            raise fail("activation_body", body.loc(node), name=name, operation=operation)
    return replace(body, locs={})
