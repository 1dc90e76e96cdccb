"""Expressions: one visitor for each class of Python's syntax that an epilogue may contain; the others are refused."""

from __future__ import annotations

import ast
import types
from typing import Any

import torch

from epifuse.frontend import calls, layouts, names, parts
from epifuse.frontend.context import (
    Context,
    DtypeOf,
    LimitsOf,
    Method,
    Pieces,
    TupleValue,
    Visit,
    describe,
)
from epifuse.frontend.hints import hint_for, unknown_method_hint, words_for
from epifuse.frontend.names import (
    ActivationModule,
    FixedFunction,
    FunctionRef,
    Helper,
    HostFunction,
    Instance,
    Module,
    Number,
    Static,
)
from epifuse.fusion.vocabulary import METHODS, VOCABULARY
from epifuse.ir import Node

BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder",
    ast.BitAnd: "bitwise_and",
    ast.BitOr: "bitwise_or",
    ast.BitXor: "bitwise_xor",
    ast.LShift: "bitwise_left_shift",
    ast.RShift: "bitwise_right_shift",
}
COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}


_WIDEST = 1024  # bits of an integer literal; a wider one exceeds every float, and arithmetic with it is slow


class Expressions(Context):
    """`visit_X` returns the value of an `ast.X`, or a generator (`Visit`) that yields the visits it needs first."""

    def expression(self, node: ast.expr) -> Visit:
        """Dispatch on the class of `node`; a class without a visitor is refused."""
        visitor = getattr(self, f"visit_{type(node).__name__}", None)
        if visitor is None:
            raise self.unsupported(node)
        found = visitor(node)
        return (yield found) if isinstance(found, types.GeneratorType) else found

    def visit_Constant(self, node: ast.Constant) -> Any:
        value = node.value
        if isinstance(value, int) and value.bit_length() > _WIDEST:
            raise self.fail("literal_range", node, bits=value.bit_length())
        if isinstance(value, (bool, int, float)):
            return self.emit("const", attr=value, at=node)
        if value is None or isinstance(value, str):
            return Static(value)
        raise self.fail("unsupported_literal", node, type=type(value).__name__)

    def visit_Name(self, node: ast.Name) -> Any:
        frame = self.frame
        if node.id in frame.env:
            return frame.env[node.id]
        if node.id in frame.source.assigned:
            raise self.fail("used_before_assignment", node, name=node.id)
        return self.meaning(frame.scope.resolve(node.id, frame.loc(node), frame.env), node)

    def member(self, base: Instance, name: str, at: ast.AST) -> names.Meaning:
        """The meaning of `base.name`."""
        return self.frame.scope.member(base, name, self.frame.loc(at))

    def meaning(self, found: names.Meaning, at: ast.AST) -> Any:
        """A captured number becomes an operand here; everything else stays unchanged."""
        return self.capture(found, at) if isinstance(found, Number) else found

    def visit_Attribute(self, node: ast.Attribute) -> Visit:
        base = yield self.expression(node.value)
        if isinstance(base, Module):
            return self.meaning(self.frame.scope.attribute(base, node.attr, self.frame.loc(node)), node)
        if isinstance(base, Instance):
            return self.meaning(self.member(base, node.attr, node), node)
        if isinstance(base, Node):
            if node.attr in layouts.TRANSPOSES:
                return layouts.transposed(self, base, node.attr, node)
            if node.attr == "shape":
                return parts.shape(self, base, ".shape", node)
            if node.attr == "dtype":
                return DtypeOf(self.tensor(base, ".dtype", node))
            if node.attr in METHODS or node.attr in calls.METHOD_FORMS:
                return Method(base, node.attr)
            raise self.fail("unknown_method", node, name=node.attr, near=unknown_method_hint(node.attr))
        if isinstance(base, LimitsOf):
            return self.emit("limit", base.value, attr=node.attr, at=node)
        if isinstance(base, Static) and isinstance(base.value, (torch.finfo, torch.iinfo)):
            number = getattr(base.value, node.attr, None)
            if isinstance(number, (int, float)):
                return self.emit("const", attr=number, at=node)
        raise self.fail("attribute_of", node, name=node.attr, what=describe(base))

    def visit_BinOp(self, node: ast.BinOp) -> Visit:
        op = BINARY.get(type(node.op))
        if op is None:
            raise self.unsupported_operator(node, node.op)
        left = self.value((yield self.expression(node.left)), node.left)
        right = self.value((yield self.expression(node.right)), node.right)
        return self.emit(op, left, right, at=node)

    def unsupported_operator(self, at: ast.AST, operator: ast.AST) -> Exception:
        """The error for an operator outside the language."""
        kind = type(operator)
        return self.fail("unsupported_operator", at, operator=words_for(kind), hint=hint_for(kind))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Visit:
        operand = yield self.expression(node.operand)
        if isinstance(node.op, ast.Not):
            if isinstance(operand, Static):
                return Static(not operand.value)
            return self.emit("host", self.value(operand, node.operand), attr="not", at=node)
        value = self.value(operand, node.operand)
        if isinstance(node.op, ast.Invert):
            return self.emit("bitwise_not", value, at=node)
        if isinstance(node.op, ast.UAdd):
            return self.emit("number", value, attr="unary +", at=node)
        if value.op == "const" and not isinstance(value.attr, bool):
            return self.emit("const", attr=-value.attr, at=node)
        return self.emit("neg", value, at=node)

    def visit_BoolOp(self, node: ast.BoolOp) -> Visit:
        """Strings and None are decided while parsing, with Python's short circuit, and numbers at each launch."""
        decisive = isinstance(node.op, ast.Or)
        word = "or" if decisive else "and"
        result = yield self.expression(node.values[0])
        for operand in node.values[1:]:
            if isinstance(result, Static) and bool(result.value) is decisive:
                return result
            item = yield self.expression(operand)
            if isinstance(result, Static):
                result = item
            else:
                first, second = self.value(result, node.values[0]), self.value(item, operand)
                result = self.emit("host", first, second, attr=word, at=node)
        return result

    def visit_Compare(self, node: ast.Compare) -> Visit:
        items = []
        for operand in (node.left, *node.comparators):
            items.append((yield self.expression(operand)))
        if isinstance(node.ops[0], (ast.Is, ast.IsNot)) or any(map(_is_word, items)):
            return self.static_compare(node, items)
        result: Node | None = None
        for op, left, right, at in zip(node.ops, items, items[1:], node.comparators, strict=False):
            if type(op) not in COMPARE:
                raise self.unsupported_operator(node, op)
            part = self.emit(COMPARE[type(op)], self.value(left, node), self.value(right, at), at=node)
            result = part if result is None else self.emit("host", result, part, attr="chained comparison", at=node)
        return result

    def static_compare(self, node: ast.Compare, items: list[Any]) -> Static:
        """A comparison such as `mode == "tanh"` or `bound is None`, which is decided while parsing."""
        op = node.ops[0]
        if len(node.ops) > 1 or not isinstance(op, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)):
            raise self.unsupported_operator(node, op)
        if Static(None) in items:
            equal = items[0] == items[1]
        elif isinstance(op, (ast.Is, ast.IsNot)):
            raise self.fail("identity", node)
        else:
            # A string or a dtype differs from every number and tensor. `self.value` refuses all other items.
            left, right = (i.value if isinstance(i, Static) else self.value(i, node) for i in items)
            equal = left == right
        return Static(equal if isinstance(op, (ast.Eq, ast.Is)) else not equal)

    def visit_IfExp(self, node: ast.IfExp) -> Visit:
        test = yield self.expression(node.test)
        if isinstance(test, Static):
            return (yield self.expression(node.body if test.value else node.orelse))
        condition = self.value(test, node.test)
        if condition.op == "const":
            return (yield self.expression(node.body if condition.attr else node.orelse))
        body = self.value((yield self.expression(node.body)), node.body)
        orelse = self.value((yield self.expression(node.orelse)), node.orelse)
        return self.emit("select", condition, body, orelse, at=node)

    def visit_Tuple(self, node: ast.Tuple | ast.List) -> Visit:
        items = []
        for element in node.elts:
            items.append((yield self.expression(element)))
        return TupleValue(tuple(items))

    visit_List = visit_Tuple

    def visit_Starred(self, node: ast.Starred) -> Any:
        raise self.fail("star_arguments", node)

    def visit_Subscript(self, node: ast.Subscript) -> Visit:
        base = self.opened((yield self.expression(node.value)), node.value)
        keys = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if isinstance(base, (TupleValue, Pieces)):
            if not isinstance(node.slice, ast.Slice):
                place = yield self.expression(node.slice)
                return parts.item(self, base, calls.static(self, place, "[...]", "index", node), node)
            ends: list[Any] = [None, None, None]
            for i, end in enumerate((node.slice.lower, node.slice.upper, node.slice.step)):
                if end is not None:
                    ends[i] = calls.static(self, (yield self.expression(end)), "[...]", "index", node)
            return parts.sliced(self, base, ends, node)
        base = self.value(base, node.value)
        bounds: dict[ast.expr, Any] = {}
        for key in keys:
            for bound in parts.bounds(key):
                item = yield self.expression(bound)
                bounds[bound] = calls.sized(self, item, "x[...]", "index", bound)
        return parts.indexed(self, base, keys, bounds, node)

    def visit_Call(self, node: ast.Call) -> Visit:
        function = yield self.expression(node.func)
        for argument in (*node.args, *node.keywords):
            if isinstance(argument, ast.Starred) or (isinstance(argument, ast.keyword) and argument.arg is None):
                raise self.fail("star_arguments", argument.value)
        positional = []
        for operand in node.args:
            positional.append((yield self.expression(operand)))
        named = {}
        for keyword in node.keywords:
            named[str(keyword.arg)] = yield self.expression(keyword.value)
        return (yield self.call(function, positional, named, node))

    def call(self, function: Any, positional: list[Any], named: dict[str, Any], node: ast.Call) -> Visit:
        """The value of a call. It depends on the kind of `function`."""
        match function:
            case HostFunction():
                return calls.host_call(self, function, positional, named, node)
            case FixedFunction():
                return calls.fixed_call(self, function, positional, named, node)
            case Helper():
                receiver = [] if function.receiver is None else [function.receiver]
                return (yield self.inline(function.function, receiver + positional, named, node, library=False))
            case Method():
                return (yield calls.method(self, function.receiver, function.name, positional, named, node))
            case FunctionRef():
                return (yield calls.vocabulary_call(self, function, positional, named, node))
            case ActivationModule(activation=activation):
                held = {n: self.meaning(self.member(function, n, node), node) for n in activation.attributes}
                if len(positional) != 1 or named:
                    have = len(positional) + len(named)
                    raise self.fail("too_many_arguments", node, function=function.spelled, have=have, want="(input)")
                ref = FunctionRef(VOCABULARY[activation.function], activation.origin, function.spelled)
                return (yield calls.vocabulary_call(self, ref, positional, held, node))
            case Instance(value=value):
                if names.is_called(value):
                    found = self.member(function, "__call__", node)
                    return (yield self.call(found, positional, named, node))
                raise self.unusable(function, node.func)
        raise self.fail("not_callable", node, what=describe(function))


def _is_word(item: Any) -> bool:
    return isinstance(item, Static) and not isinstance(item.value, (bool, int, float))
