"""Python source in, `Parsed` out. Closed world: what is not listed here raises on the user's own line.

Visitors are generators driven by `_drive`, so that the depth of an expression is bounded by memory, not by the stack.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from epifuse.errors import Loc, fail
from epifuse.frontend import calls, names
from epifuse.frontend.names import FunctionRef, Helper, HostFunction, Module, Number, Scope, Static
from epifuse.frontend.source import Source, from_function, from_string
from epifuse.fusion.vocabulary import METHODS, VOCABULARY
from epifuse.ir import Builder, Graph, Load, Node, Output

Reader = Callable[[], Any]
Visit = Generator[Any, Any, Any]


@dataclass(frozen=True)
class TupleValue:
    """Several values: what a helper returned, or a tuple that was written out."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class Method:
    """`x.name` before its call."""

    receiver: Node
    name: str


@dataclass(frozen=True, eq=False)
class Parsed:
    """A parsed epilogue: the graph as written, and what must be read when arguments are bound.

    `captures` reads each hidden scalar operand. `guards` are the other captured objects: when one of them is another
    object than at parse time, the function is parsed again.
    """

    name: str
    graph: Graph
    parameters: tuple[str, ...]
    defaults: Mapping[str, Any]
    captures: Mapping[str, Reader]
    guards: tuple[tuple[Reader, Any], ...]
    source: Source
    function: Callable[..., Any] | str

    def is_current(self) -> bool:
        """False once a captured object that shaped the graph was replaced."""
        return all(_same(reader(), seen) for reader, seen in self.guards)


def _same(value: Any, seen: Any) -> bool:
    return value is seen or (type(value) is type(seen) and isinstance(seen, (str, tuple, int, float)) and value == seen)


BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder",
    ast.BitAnd: "logical_and",
    ast.BitOr: "logical_or",
}
COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}


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
        """The place to blame: this line, or the call that led into our own library."""
        if self.inside_library and self.call_site is not None:
            return self.call_site
        return self.source.loc(node)._replace(via=self.call_site)


class Parser:
    """Builds one graph; helpers are inlined by pushing a frame."""

    def __init__(self, source: Source, scope: Scope, *, reassign: bool) -> None:
        self.builder = Builder()
        self.guards = scope.guards
        self.captures: dict[str, Reader] = {}
        self.effects: dict[Node, None] = {}
        self.active: list[object] = [scope.function]
        self.frame = Frame(source, scope, reassign)

    # --- leaves --------------------------------------------------------------------------------------------

    def emit(self, op: str, *args: Node, attr: Any = None, at: ast.AST | None = None) -> Node:
        """One node, blamed on the syntax `at`."""
        locs = () if at is None else (self.frame.loc(at),)
        return self.builder.node(op, *args, attr=attr, locs=locs)

    def fail(self, key: str, at: ast.AST, **values: Any) -> Exception:
        """The catalogue's error for `key` at the syntax `at`."""
        return fail(key, self.frame.loc(at), **values)

    def value(self, item: Any, at: ast.AST) -> Node:
        """`item` as a node of the graph, or an error that says what it is instead."""
        if isinstance(item, Node):
            return item
        if isinstance(item, Static) and isinstance(item.value, (bool, int, float)):
            return self.emit("const", attr=item.value, at=at)
        raise self.fail("not_a_value", at, what=_describe(item))

    def tensor(self, item: Any, spelled: str, at: ast.AST, rank: int = 0) -> Any:
        """`item`, checked to be a tensor of at least `rank` dims once types are known."""
        if not isinstance(item, Node) or (item.op == "tensor" and rank == 0):
            return item
        return self.emit("tensor", item, attr=(spelled, rank), at=at)

    def capture(self, number: Number, at: ast.AST) -> Node:
        """A captured number becomes a hidden scalar operand; our own library's numbers are constants."""
        if self.frame.inside_library:
            return self.emit("const", attr=number.reader(), at=at)
        name = f"@{number.spelled}"
        while name in self.captures and not _same_cell(self.captures[name], number.reader):
            name += "'"
        self.captures[name] = number.reader
        return self.emit("load", attr=Load(name), at=at)

    # --- expressions ---------------------------------------------------------------------------------------

    def expression(self, node: ast.expr) -> Visit:
        """Dispatch on the class of `node`; a class without a visitor is refused."""
        visitor = getattr(self, f"visit_{type(node).__name__}", None)
        if visitor is None:
            raise self.fail("unsupported_syntax", node, syntax=type(node).__name__, hint=_hint_for(type(node)))
        return (yield visitor(node))

    def visit_Constant(self, node: ast.Constant) -> Visit:
        value = node.value
        if isinstance(value, (bool, int, float)):
            return self.emit("const", attr=value, at=node)
        if value is None or isinstance(value, str):
            return Static(value)
        raise self.fail("unsupported_literal", node, type=type(value).__name__)
        yield

    def visit_Name(self, node: ast.Name) -> Visit:
        frame = self.frame
        if node.id in frame.env:
            return frame.env[node.id]
        function = frame.scope.function
        if function is not None and node.id in function.__code__.co_varnames:
            raise self.fail("used_before_assignment", node, name=node.id)
        return self.meaning(frame.scope.resolve(node.id, frame.loc(node)), node)
        yield

    def meaning(self, found: names.Meaning, at: ast.AST) -> Any:
        """Captured numbers become operands here; everything else stays what it is."""
        return self.capture(found, at) if isinstance(found, Number) else found

    def visit_Attribute(self, node: ast.Attribute) -> Visit:
        base = yield self.expression(node.value)
        if isinstance(base, Module):
            return self.meaning(self.frame.scope.attribute(base, node.attr, self.frame.loc(node)), node)
        if isinstance(base, Node):
            if node.attr in METHODS or node.attr in calls.METHOD_FORMS:
                return Method(base, node.attr)
            raise self.fail("unknown_method", node, name=node.attr, near=names.unknown_function_hint(node.attr))
        raise self.fail("attribute_of", node, name=node.attr, what=_describe(base))

    def visit_BinOp(self, node: ast.BinOp) -> Visit:
        op = BINARY.get(type(node.op))
        if op is None:
            raise self.fail(
                "unsupported_operator", node, operator=type(node.op).__name__, hint=_hint_for(type(node.op))
            )
        left = self.value((yield self.expression(node.left)), node.left)
        right = self.value((yield self.expression(node.right)), node.right)
        return self.emit(op, left, right, at=node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Visit:
        operand = yield self.expression(node.operand)
        if isinstance(node.op, ast.Not):
            if isinstance(operand, Static):
                return Static(not operand.value)
            return self.emit("host", self.value(operand, node.operand), attr="not", at=node)
        value = self.value(operand, node.operand)
        if isinstance(node.op, ast.Invert):
            return self.emit("logical_not", value, at=node)
        if isinstance(node.op, ast.UAdd):
            return self.emit("number", value, attr="unary +", at=node)
        if value.op == "const" and not isinstance(value.attr, bool):
            return self.emit("const", attr=-value.attr, at=node)
        return self.emit("neg", value, at=node)

    def visit_BoolOp(self, node: ast.BoolOp) -> Visit:
        word = "and" if isinstance(node.op, ast.And) else "or"
        items = []
        for operand in node.values:
            items.append((yield self.expression(operand)))
        if all(isinstance(item, Static) for item in items):
            truths = [item.value for item in items]
            return Static(all(truths) if word == "and" else any(truths))
        result = self.value(items[0], node.values[0])
        for item, operand in zip(items[1:], node.values[1:], strict=True):
            result = self.emit("host", result, self.value(item, operand), attr=word, at=node)
        return result

    def visit_Compare(self, node: ast.Compare) -> Visit:
        items = []
        for operand in (node.left, *node.comparators):
            items.append((yield self.expression(operand)))
        if any(isinstance(item, Static) for item in items) or isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            return self.static_compare(node, items)
        result: Node | None = None
        for op, left, right, at in zip(node.ops, items, items[1:], node.comparators, strict=False):
            if type(op) not in COMPARE:
                raise self.fail("unsupported_operator", node, operator=type(op).__name__, hint=_hint_for(type(op)))
            part = self.emit(COMPARE[type(op)], self.value(left, node), self.value(right, at), at=node)
            result = part if result is None else self.emit("host", result, part, attr="chained comparison", at=node)
        return result

    def static_compare(self, node: ast.Compare, items: list[Any]) -> Static:
        """`mode == "tanh"`, `bound is None`: decided while parsing."""
        op = node.ops[0]
        if len(node.ops) > 1 or not isinstance(op, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)):
            raise self.fail("unsupported_operator", node, operator=type(op).__name__, hint=_hint_for(type(op)))
        left, right = (item.value if isinstance(item, Static) else item for item in items)
        if isinstance(op, (ast.Is, ast.IsNot)) and left is not None and right is not None:
            raise self.fail("unsupported_operator", node, operator="Is", hint="`is` is for None only")
        equal = left is right if None in (left, right) else left == right
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

    def visit_Subscript(self, node: ast.Subscript) -> Visit:
        base = self.value((yield self.expression(node.value)), node.value)
        keys = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        slices = sum(isinstance(key, ast.Slice) for key in keys)
        result = self.tensor(base, "x[...]", node, slices)
        for steps in calls.subscript_steps(keys, lambda at: self.fail("unsupported_subscript", at)):
            result = self.emit("unsqueeze", result, attr=steps, at=node)
        return result

    def visit_Call(self, node: ast.Call) -> Visit:
        function = yield self.expression(node.func)
        for argument in (*node.args, *(keyword for keyword in node.keywords if keyword.arg is None)):
            if isinstance(argument, (ast.Starred, ast.keyword)):
                raise self.fail("star_arguments", argument if isinstance(argument, ast.Starred) else argument.value)
        positional = []
        for argument in node.args:
            positional.append((yield self.expression(argument)))
        named = {}
        for keyword in node.keywords:
            named[str(keyword.arg)] = yield self.expression(keyword.value)
        return (yield self.call(function, positional, named, node))

    def call(self, function: Any, positional: list[Any], named: dict[str, Any], node: ast.Call) -> Visit:
        """What a call means, by what is called."""
        if isinstance(function, HostFunction):
            if named:
                raise self.fail("unexpected_argument", node, function=function.spelled, name=next(iter(named)))
            arguments = [self.value(item, at) for item, at in zip(positional, node.args, strict=True)]
            return self.emit("host", *arguments, attr=function.spelled.rsplit(".", 1)[-1], at=node)
        if isinstance(function, Helper):
            return (yield self.inline(function.function, positional, named, node, library=False))
        if isinstance(function, Method):
            return (yield calls.method(self, function.receiver, function.name, positional, named, node))
        if isinstance(function, FunctionRef):
            return (yield calls.vocabulary_call(self, function, positional, named, node))
        raise self.fail("not_callable", node, what=_describe(function))

    # --- functions -----------------------------------------------------------------------------------------

    def inline(
        self, function: types.FunctionType, positional: list[Any], named: dict[str, Any], at: ast.AST, *, library: bool
    ) -> Visit:
        """The body of `function` with these arguments, in a frame of its own."""
        if function in self.active:
            raise self.fail("recursion", at, name=function.__name__)
        caller, source = self.frame, from_function(function)
        bound = calls.bind(self, function, source, positional, named, at)
        self.active.append(function)
        inside = library or caller.inside_library
        site = caller.loc(at)
        self.frame = Frame(source, Scope(function, self.guards), caller.reassign, {}, site, inside)
        self.frame.env.update(bound)
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
            case ast.Pass():
                return
            case ast.Expr(ast.Constant(str())) if first:
                return
            case ast.Expr(ast.Call() as call):
                result = yield self.expression(call)
                if not (isinstance(result, Node) and result.op == "debug_print"):
                    raise self.fail("result_unused", node)
                self.effects[result] = None
            case ast.Assign(targets=[target], value=value):
                self.assign(target, (yield self.expression(value)))
            case ast.Assign():
                raise self.fail("chained_assignment", node)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assign(target, (yield self.expression(value)))
            case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                if not self.frame.reassign or name not in self.frame.env:
                    raise self.fail("augmented_assignment", node, name=name)
                reading = ast.copy_location(ast.BinOp(ast.Name(name), op, value), node)
                ast.copy_location(reading.left, target)
                self.assign(target, (yield self.expression(reading)))
            case _:
                raise self.fail("unsupported_syntax", node, syntax=type(node).__name__, hint=_hint_for(type(node)))

    def assign(self, target: ast.expr, value: Any) -> None:
        """Bind a name, or the names of a tuple."""
        if isinstance(value, Node) and value.op == "debug_print":
            raise self.fail("printed_value", target)
        if isinstance(target, ast.Name):
            if target.id in self.frame.env and not self.frame.reassign:
                raise self.fail("defined_twice", target, name=target.id)
            self.frame.env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            if not isinstance(value, TupleValue):
                raise self.fail("cannot_unpack", target, what=_describe(value))
            if len(value.items) != len(target.elts):
                raise self.fail("unpack_count", target, have=len(value.items), want=len(target.elts))
            for element, item in zip(target.elts, value.items, strict=True):
                self.assign(element, item)
        else:
            raise self.fail("assignment_target", target, syntax=type(target).__name__)


def _same_cell(first: Reader, second: Reader) -> bool:
    # Readers are closures over (namespace, name); the same namespace and name give the same object.
    return first is second or [c.cell_contents for c in first.__closure__ or ()] == [
        c.cell_contents for c in second.__closure__ or ()
    ]


def _describe(item: Any) -> str:
    match item:
        case Static(value=str()):
            return f"the string {item.value!r}"
        case Static():
            return repr(item.value)
        case TupleValue():
            return "a tuple"
        case Module():
            return f"the module {item.spelled}"
        case FunctionRef() | HostFunction() | Helper():
            return f"the function {item.spelled}"
        case Method():
            return f"the method .{item.name} without its call"
        case Node():
            return "a value"
    return type(item).__name__


_HINTS: dict[type[ast.AST], str] = {
    ast.If: "use where(mask, a, b) for tensors, or `a if flag else b` for host numbers",
    ast.For: "write the steps out, or put them into a helper function",
    ast.While: "write the steps out, or put them into a helper function",
    ast.FunctionDef: "define the helper outside the epilogue; it is inlined",
    ast.Lambda: "define the helper outside the epilogue; it is inlined",
    ast.MatMult: "the product is accum; a second product needs a second GEMM",
    ast.BitXor: "masks combine by & | ~; use != for exclusive or, ** for a power",
    ast.LShift: "multiply by a power of two",
    ast.RShift: "use // with a power of two",
    ast.In: "write out the comparisons and join them with |",
    ast.NotIn: "write out the comparisons and join them with &",
    ast.JoinedStr: "debug_print takes a plain format string",
    ast.NamedExpr: "assign on a line of its own",
    ast.Import: "import at the top of the module",
    ast.ImportFrom: "import at the top of the module",
    ast.Raise: "an epilogue has no control flow; use where",
    ast.Assert: "an epilogue has no control flow; use where, or debug_print",
}


def _hint_for(syntax: type[ast.AST]) -> str:
    return _HINTS.get(syntax, "docs/language.md lists what an epilogue may contain")


def _drive(root: Visit) -> Any:
    """Run a generator and those it yields, without recursion."""
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


def parse(function: Callable[..., Any] | str, *, reassign: bool = False) -> Parsed:
    """Parse an epilogue: a Python function, a lambda, a vocabulary function of one value, or source text.

    Raises `EpilogueSyntaxError` (a `SyntaxError`) with file, line and caret for everything outside the language.
    """
    inner = getattr(function, "__epifuse_function__", function)
    inner = _wrap_vocabulary(inner)
    if isinstance(inner, str):
        source, scope = from_string(inner), Scope(None)
    else:
        source, scope = from_function(inner), Scope(inner)
    parser = Parser(source, scope, reassign=reassign)
    parameters, defaults = calls.epilogue_parameters(parser, source, inner)
    frame = parser.frame
    frame.env["accum"] = parser.builder.node("accum")
    for name in parameters:
        frame.env[name] = parser.builder.node("load", attr=Load(name))
    result = _drive(parser.body(source))
    graph = Graph(
        (*parameters, *parser.captures),
        calls.outputs_of(parser, source, result),
        tuple(parser.effects),
        parser.builder.locs,
    )
    return Parsed(source.name, graph, parameters, defaults, parser.captures, tuple(parser.guards), source, function)


def _wrap_vocabulary(function: Any) -> Any:
    """`epilogue=ef.silu`: a vocabulary or torch function of one value is an epilogue as it stands."""
    found = names._function(function, getattr(function, "__name__", "function")) if callable(function) else None
    if isinstance(found, FunctionRef):
        return _applied(found.entry.name)
    return function


@cache
def _applied(name: str) -> str:
    return f"def {name}_epilogue(accum): return {name}(accum)"


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
    result = parser.value(_drive(parser.body(source)), source.definition)
    return Graph(tuple(parameters), (Output("D", result),))
