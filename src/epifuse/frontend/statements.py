"""Statements and functions: definitions are read from top to bottom, helpers are inlined by pushing a frame."""

from __future__ import annotations

import ast
import types
from typing import Any

from epifuse.frontend import calls
from epifuse.frontend.context import Frame, Pieces, TupleValue, Visit, describe
from epifuse.frontend.expressions import Expressions
from epifuse.frontend.hints import words_for
from epifuse.frontend.names import Scope
from epifuse.frontend.source import Source, from_function
from epifuse.ir import Node

MAX_CALLS = 25_000
"""The most inlined calls in one epilogue. Helpers that call helpers twice double the work with every level."""


class Parser(Expressions):
    """The parser of the whole language: expressions, statements and inlined functions."""

    def inline(
        self, function: types.FunctionType, positional: list[Any], named: dict[str, Any], at: ast.AST, *, library: bool
    ) -> Visit:
        """The body of `function` with these arguments, in a frame of its own."""
        if function in self.active:
            raise self.fail("recursion", at, name=function.__name__)
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise self.fail("too_many_calls", at, limit=MAX_CALLS)
        caller, source = self.frame, from_function(function)
        bound = calls.bind(self, function, source, positional, named, at)
        self.active.append(function)
        inside = library or caller.inside_library
        scope = Scope(function, self.guards, self.root)
        self.frame = Frame(source, scope, caller.reassign, bound, caller.loc(at), inside)
        result = yield self.body(source)
        self.frame = caller
        self.active.pop()
        return result

    def body(self, source: Source) -> Visit:
        """The value a definition returns."""
        definition = source.definition
        if isinstance(definition, ast.Lambda):
            return (yield self.expression(definition.body))
        for position, statement in enumerate(definition.body):
            if isinstance(statement, ast.Return):
                if position + 1 < len(definition.body):
                    raise self.fail("after_return", definition.body[position + 1])
                if statement.value is None:
                    raise self.fail("returns_nothing", statement, name=source.name)
                return (yield self.expression(statement.value))
            yield self.statement(statement, first=position == 0)
        raise self.fail("returns_nothing", definition, name=source.name)

    def statement(self, node: ast.stmt, *, first: bool) -> Visit:
        """One statement that is not `return`."""
        match node:
            case ast.Pass() | ast.AnnAssign(target=ast.Name(), value=None):
                return
            case ast.Expr(ast.Constant(str())) if first:
                return
            case ast.Expr(ast.Call() as call):
                result = yield self.expression(call)
                if not (isinstance(result, Node) and result.op == "debug_print"):
                    raise self.fail("result_unused", node)
                self.effects[result] = None
            case ast.Expr(ast.NamedExpr() as value):
                raise self.unsupported(value)
            case ast.Expr():
                raise self.fail("result_unused", node)
            case ast.Assign(targets=[target], value=value):
                self.assign(target, (yield self.expression(value)))
            case ast.Assign():
                raise self.fail("chained_assignment", node)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assign(target, (yield self.expression(value)))
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                plain = ast.unparse(ast.BinOp(ast.Name(name), op, value))
                key = "augmented_in_place" if self.frame.reassign else "augmented_assignment"
                raise self.fail(key, node, name=name, plain=plain)
            case _:
                raise self.unsupported(node)

    def assign(self, target: ast.expr, value: Any) -> None:
        """Bind a name, or the names of a tuple."""
        if isinstance(target, ast.Name):
            if target.id in self.frame.env and not self.frame.reassign:
                raise self.fail("defined_twice", target, name=target.id)
            if isinstance(value, Node):
                self.assigned[self.value(value, target)] = None
            self.frame.env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            value = self.opened(value, target)
            if isinstance(value, Pieces):
                count = len(target.elts)
                value = TupleValue(tuple(value.piece(i, count) for i in range(count)))
            if not isinstance(value, TupleValue):
                raise self.fail("cannot_unpack", target, what=describe(value))
            if starred := next((element for element in target.elts if isinstance(element, ast.Starred)), None):
                raise self.unsupported(starred)
            if len(value.items) != len(target.elts):
                raise self.fail("unpack_count", target, have=len(value.items), want=len(target.elts))
            for element, item in zip(target.elts, value.items, strict=True):
                self.assign(element, item)
        else:
            raise self.fail("assignment_target", target, syntax=words_for(type(target)))


def drive(root: Visit) -> Any:
    """Run a visitor and the visitors that it yields, and return its value. There is no recursion, so the depth of an
    expression is limited by memory, not by Python's stack."""
    stack: list[Visit] = [root]
    value: Any = None
    while stack:
        try:
            child = stack[-1].send(value)
        except StopIteration as stop:
            stack.pop()
            value = stop.value
        else:
            stack.append(child)
            value = None
    return value
