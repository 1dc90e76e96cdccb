"""From a function or a string to its syntax tree, with the lines for error messages. Nothing is executed."""

from __future__ import annotations

import ast
import linecache
import math
import re
import textwrap
import types
import warnings
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from epifuse.base.errors import EpifuseError, Loc, fail, kind_of
from epifuse.base.lazy import cached_property
from epifuse.frontend.hints import module_hint
from epifuse.frontend.modules import is_altered, is_module
from epifuse.frontend.remembered import remembered

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_STRING_FILE = "<epilogue>"
_TRIES = 9


@dataclass(frozen=True, eq=False)
class Source:
    """One function: its syntax tree, and the file and lines that error messages quote."""

    definition: Definition
    file: str
    lines: tuple[str, ...]

    @property
    def name(self) -> str:
        """The function's name; `<lambda>` for a lambda."""
        return getattr(self.definition, "name", "<lambda>")

    @property
    def parameters(self) -> ast.arguments:
        """The parameters as written."""
        return self.definition.args

    @cached_property
    def assigned(self) -> frozenset[str]:
        """The names that the body assigns. As in Python, they are local in the whole body."""
        body = self.definition.body
        trees = body if isinstance(body, list) else [body]
        found = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name))
        return frozenset(node.id for node in found if isinstance(node.ctx, ast.Store))

    def loc(self, node: ast.AST) -> Loc:
        """The place of `node` in the file."""
        return _loc(self.file, self.lines, node, self.definition)


def _loc(file: str, lines: tuple[str, ...], node: ast.AST, otherwise: ast.AST | None = None) -> Loc:
    place: Any = node if hasattr(node, "lineno") else otherwise
    text = lines[place.lineno - 1] if place.lineno <= len(lines) else ""
    end = place.end_col_offset if place.end_lineno == place.lineno else len(text.rstrip().encode())
    start, stop = _characters(text, place.col_offset), _characters(text, end)
    return Loc(file, place.lineno, start, max(stop - start, 1), text)


def _characters(text: str, offset: int) -> int:
    """The offset in characters for an offset in bytes of UTF-8, which ast counts."""
    if text.isascii():
        return offset
    # Cached, because a line may hold a whole epilogue, and every node in it asks.
    return bisect_left(remembered("characters", text, lambda: _starts(text)), offset)


def _starts(text: str) -> list[int]:
    """The byte at which each character begins."""
    return list(accumulate((len(character.encode()) for character in text), initial=0))


def _lines(text: str) -> tuple[str, ...]:
    # Python's own line ends; str.splitlines also cuts at form feeds and the like.
    return tuple(re.split(r"\r\n|\r|\n", text))


@dataclass(frozen=True, eq=False)
class _Text:
    """The text of a module or of a string: its syntax tree, its code object and its lines."""

    module: ast.Module
    code: types.CodeType
    lines: tuple[str, ...]

    @cached_property
    def codes(self) -> frozenset[types.CodeType]:
        """Every code object of the text. A function whose code is not among them was compiled from another text."""
        found, stack = [], [self.code]
        while stack:
            found.append(stack.pop())
            stack.extend(constant for constant in found[-1].co_consts if isinstance(constant, types.CodeType))
        return frozenset(found)

    def definitions(self, name: str, line: int) -> list[Definition]:
        """The definitions whose code object has this name and this first line. Nodes on other lines are not visited."""
        found: list[Definition] = []
        nodes: list[ast.AST] = [self.module]
        for node in nodes:
            if isinstance(node, _DEFINITIONS) and getattr(node, "name", "<lambda>") == name and _first(node) == line:
                found.append(node)
            nodes += [child for child in ast.iter_child_nodes(node) if _last(child) >= line >= _first(child)]
        return found


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _first(node: ast.AST) -> int:
    """The line on which `node` begins, decorators included; 0 if the node has no place of its own."""
    decorators = getattr(node, "decorator_list", None)
    return getattr(decorators[0] if decorators else node, "lineno", 0)


def _last(node: ast.AST) -> float:
    return getattr(node, "end_lineno", math.inf)


def _read(text: str, file: str) -> _Text:
    return remembered("text", text, lambda: _compiled(text, file), file)


def _tree(text: str) -> ast.Module:
    """`ast.parse`, tried again if another thread disturbed it.

    CPython 3.11 counts the depth of a tree in one place for all threads. If the garbage collector lets another thread
    parse meanwhile, the first one raises "SystemError: AST constructor recursion depth mismatch" for a correct text.
    """
    for _ in range(_TRIES):
        try:
            return ast.parse(text)
        except SystemError:
            continue
    return ast.parse(text)


def _compiled(text: str, file: str) -> _Text:
    """Parse and compile a text. Compiling runs nothing, and finds errors that parsing does not: `f(x, a=1, a=2)`."""
    lines = _lines(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for a function Python itself has shown them already
            module = _tree(text)
            return _Text(module, compile(module, file, "exec", dont_inherit=True), lines)
    except SyntaxError as error:
        line = min(error.lineno or 1, len(lines))
        quoted = lines[line - 1].replace("\0", " ")
        column = min(max((error.offset or 1) - 1, 0), len(quoted))
        raise fail("not_python", Loc(file, line, column, 1, quoted), detail=error.msg) from None
    except (RecursionError, MemoryError):
        raise fail("too_deep", Loc(file, 1, 0, 1, lines[0])) from None
    except ValueError as error:  # null bytes, lone surrogates
        raise fail("not_python", Loc(file, 1, 0, 1, repr(text[:80])), detail=str(error)) from None


def from_string(text: str) -> Source:
    """The `def` or `lambda` in a string. The one-line form of notebooks, `def f(...): a = ...; return a`, works too."""
    dedented = textwrap.dedent(text).strip("\n")
    read = _read(dedented, _STRING_FILE)
    body, lines = read.module.body, read.lines
    if len(body) == 1:
        statement = body[0]
        decorators = getattr(statement, "decorator_list", ())
        if decorators:
            raise fail("string_not_a_function", _loc(_STRING_FILE, lines, decorators[0]))
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _checked(Source(statement, _STRING_FILE, lines))
        value = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
        if isinstance(value, ast.Lambda):
            return _checked(Source(value, _STRING_FILE, lines))
    culprit = body[min(1, len(body) - 1)] if body else None
    first = Loc(_STRING_FILE, 1, 0, 1, lines[0])
    raise fail("string_not_a_function", first if culprit is None else _loc(_STRING_FILE, lines, culprit))


def from_function(function: Callable[..., Any]) -> Source:
    """The definition behind a Python function, found in its whole file by the line its code object names."""
    if not isinstance(function, types.FunctionType):
        refuse_decorated(function)
        if is_altered(function):
            raise fail("altered_module", None, name=f"this {type(function).__name__}")
        is_front_end = isinstance(function, type) and hasattr(function, "__epifuse__")
        hint = f"make an object: {function.__name__}(...)" if is_front_end else "write a def or a lambda"
        if is_module(function):
            hint = module_hint(type(function).__name__)
        raise fail("not_a_function", None, value=_describe(function), hint=hint)
    return remembered("source", function.__code__, lambda: _checked(_find(function)))


def refuse_decorated(function: Any) -> None:
    """Raise where a decorator of another file (`torch.no_grad()`, `functools.cache`) stands before a definition."""
    inner = getattr(function, "__wrapped__", None)
    if not isinstance(inner, types.FunctionType):
        return
    code = getattr(function, "__code__", None)
    if code is not None and code.co_filename == inner.__code__.co_filename:
        return  # the wrapper is the user's own, and has lines to point at
    wrapper = f"{code.co_name} of {function.__globals__['__name__']}" if code is not None else kind_of(function)
    source = from_function(inner)
    raise fail("decorated", source.loc(source.definition), name=inner.__name__, wrapper=wrapper)


def _find(function: types.FunctionType) -> Source:
    code, missing = function.__code__, {"name": function.__qualname__, "file": function.__code__.co_filename}
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    if not text:
        raise fail("no_source", None, **missing)
    try:
        read = _read(text, code.co_filename)
    except EpifuseError as error:
        if error.key == "too_deep":
            raise
        raise fail("stale_source", None, **missing) from None
    named = read.definitions(code.co_name, code.co_firstlineno) if code in read.codes else []
    found = [node for node in named if _declares(node, code)]
    if not found:
        raise fail("stale_source", None, **missing)
    if len(found) > 1:
        found = _same_position(found, code) or found
        if len(set(map(ast.dump, found))) > 1:
            raise fail("lambdas_share_a_line", _loc(code.co_filename, read.lines, found[0]))
    return Source(found[0], code.co_filename, read.lines)


def _checked(source: Source) -> Source:
    if isinstance(source.definition, ast.AsyncFunctionDef):
        raise fail("async_function", source.loc(source.definition), name=source.name)
    for node in ast.walk(source.definition):
        # A yield makes the function a generator, even in an annotation that nobody reads.
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            raise fail("generator", source.loc(node), name=source.name)
    return source


def _describe(value: object) -> str:
    return f"{kind_of(value)} {getattr(value, '__qualname__', '')}".strip()


def _declares(node: Definition, code: types.CodeType) -> bool:
    declared = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return declared == list(code.co_varnames[: len(declared)])


def _same_position(nodes: list[Definition], code: types.CodeType) -> list[Definition]:
    """Of several lambdas on one line, the innermost whose body contains the columns of `code`; none before Python 3.11,
    which does not have these columns."""
    positions = getattr(code, "co_positions", None)
    spans = [(line, column) for line, _, column, _ in positions() if line and column] if positions else []
    around = [node for node in nodes if spans and all(_start(node) <= span <= _end(node) for span in spans)]
    return sorted(around, key=_start)[-1:]


def _start(node: Definition) -> tuple[int, int]:
    body: Any = node.body[0] if isinstance(node.body, list) else node.body
    return body.lineno, body.col_offset


def _end(node: Definition) -> tuple[int, int]:
    body: Any = node.body[-1] if isinstance(node.body, list) else node.body
    return body.end_lineno, body.end_col_offset
