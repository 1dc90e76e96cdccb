"""From a function or a string to its syntax tree, with the lines for error messages. Nothing is executed."""

from __future__ import annotations

import ast
import linecache
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from epifuse.errors import Loc, fail

Definition = ast.FunctionDef | ast.Lambda
_STRING_FILE = "<epilogue>"


@dataclass(frozen=True, eq=False)
class Source:
    """One function: its tree, and the file and lines that `Loc`s quote."""

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

    def loc(self, node: ast.AST) -> Loc:
        """Where `node` stands."""
        line = getattr(node, "lineno", self.definition.lineno)
        column = getattr(node, "col_offset", self.definition.col_offset)
        end = getattr(node, "end_col_offset", None) if getattr(node, "end_lineno", line) == line else None
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        # ast counts bytes of UTF-8, people count characters.
        start = len(text.encode()[:column].decode(errors="ignore"))
        stop = len(text.encode()[:end].decode(errors="ignore")) if end is not None else len(text.rstrip())
        return Loc(self.file, line, start, max(stop - start, 1), text.rstrip("\n"))


def parse_module(text: str, file: str) -> ast.Module:
    """`ast.parse`, with what it may throw at a person turned into our errors."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        lines = text.splitlines()
        line = min(error.lineno or 1, max(len(lines), 1))
        quoted = lines[line - 1] if lines else ""
        column = min(max((error.offset or 1) - 1, 0), len(quoted))
        raise fail("not_python", Loc(file, line, column, 1, quoted), detail=error.msg) from None
    except (RecursionError, MemoryError):
        raise fail("too_deep", Loc(file, 1, 0, 1, text.splitlines()[0][:80])) from None
    except ValueError as error:
        raise fail("not_python", Loc(file, 1, 0, 1, repr(text)[:80]), detail=str(error)) from None


def from_string(text: str) -> Source:
    """A `def` or a `lambda` in a string; the notebook's one-line form `def f(...): a = ...; return a` too."""
    dedented = textwrap.dedent(text).strip("\n")
    module = parse_module(dedented, _STRING_FILE)
    lines = tuple(dedented.splitlines())
    if len(module.body) == 1:
        statement = module.body[0]
        if isinstance(statement, ast.FunctionDef):
            return Source(statement, _STRING_FILE, lines)
        value = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
        if isinstance(value, ast.Lambda):
            return Source(value, _STRING_FILE, lines)
    culprit = module.body[1] if len(module.body) > 1 else module.body[0] if module.body else None
    first = Loc(_STRING_FILE, 1, 0, 1, lines[0] if lines else "")
    loc = Source(ast.Lambda(), _STRING_FILE, lines).loc(culprit) if culprit is not None else first
    raise fail("string_not_a_function", loc)


def from_function(function: Callable[..., Any]) -> Source:
    """The definition behind a Python function, found in its whole file by the line its code object names."""
    if not isinstance(function, types.FunctionType):
        raise fail("not_a_function", None, value=_describe(function))
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise fail("no_source", None, name=function.__qualname__, file=code.co_filename)
    found = [node for node in _definitions("".join(lines), code.co_filename) if _matches(node, function)]
    if len(found) > 1:
        found = [node for node in found if _same_position(node, code)] or found
    if not found:
        raise fail("no_source", None, name=function.__qualname__, file=code.co_filename)
    if len(found) > 1:
        raise fail("lambdas_share_a_line", Source(found[0], code.co_filename, tuple(lines)).loc(found[0]))
    return Source(found[0], code.co_filename, tuple(lines))


def _describe(value: object) -> str:
    return f"{type(value).__name__} {getattr(value, '__qualname__', '')}".strip()


@lru_cache(maxsize=64)
def _definitions(text: str, file: str) -> tuple[Definition | ast.AsyncFunctionDef, ...]:
    return tuple(_walk(parse_module(text, file)))


def _walk(tree: ast.AST) -> Iterator[Definition | ast.AsyncFunctionDef]:
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
        stack.extend(ast.iter_child_nodes(node))


def _matches(node: Definition | ast.AsyncFunctionDef, function: types.FunctionType) -> bool:
    code = function.__code__
    if isinstance(node, ast.AsyncFunctionDef):
        return False
    if isinstance(node, ast.Lambda):
        first, name = node.lineno, "<lambda>"
    else:
        first, name = min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.name
    if name != code.co_name or first != code.co_firstlineno:
        return False
    declared = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return declared == list(code.co_varnames[: len(declared)])


def _same_position(node: Definition, code: types.CodeType) -> bool:
    """Two lambdas on one line: the first instruction that has a column tells which (Python 3.11 and newer)."""
    positions = getattr(code, "co_positions", None)
    if positions is None or not isinstance(node, ast.Lambda):
        return False
    body = node.body
    spans = [(line, column) for line, _, column, _ in positions() if line is not None and column]
    return bool(spans) and all(
        (body.lineno, body.col_offset) <= span <= (body.end_lineno or body.lineno, body.end_col_offset or 0)
        for span in spans
    )
