"""Move values with one element a row out of the sums along that row, where they are terms or factors.

The sum of q (x - c) along a row is the sum of q x, less c times the sum of q, if c is one value a row. After that no
full-size value waits for its row in a loss of probabilities, such as the sum of -q log_softmax(x), or in label
smoothing by the mean of log_softmax(x). Imports no cutlass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from epifuse.ir import Builder, Factor, Graph, Node, Type, rewrite
from epifuse.ir.graph import keep, topological
from epifuse.passes.canonicalise import constant, typed


class _Term(NamedTuple):
    """A product of `bulk`, which waits for no reduction of its row, and `once`, one value a row. None stands for 1."""

    bulk: Node | None
    once: Node | None


def move_row_constants_out(graph: Graph) -> Graph:
    """The graph with values of one element a row taken out of its sums and means of whole rows."""

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old.op == "reduce" and old.attr[0] in ("sum", "mean") and graph.types[old].kind == "float":
            name, gone = old.attr
            if len(gone) == 1 and gone[0].extent is None and (found := _Sum(name, gone[0], builder).of(args[0])):
                return found
        return keep(old, args, builder)

    return rewrite(graph, rule)


class _Sum:
    """A sum or a mean (`name`) over the axis `along`, in a graph that is being built."""

    def __init__(self, name: str, along: Factor, builder: Builder) -> None:
        self.name, self.along, self.builder = name, along, builder

    def of(self, root: Node) -> Node | None:
        """What replaces the reduction of `root`. None if `root` does not wait for its row, or is no sum of `_Term`s."""
        below = topological((root,))
        self.waiting: dict[Node, bool] = {}
        for node in below:
            own = node.op == "reduce" and self.along in node.attr[1]
            self.waiting[node] = own or any(self.waiting[arg] for arg in node.args)
        if not self.waits(root) or (terms := self.terms(root)) is None:
            return None
        self.everywhere = self.builder.types[root].factors
        found: Node | None = None
        for term in terms:
            part = self.reduced(term)
            found = part if found is None else self.made("add", found, part)
        return found

    def made(self, op: str, *args: Node) -> Node:
        return typed(self.builder, op, args)

    def varies(self, node: Node) -> bool:
        return self.along in self.builder.types[node].factors

    def waits(self, node: Node) -> bool:
        """Whether a full-size value depends on a reduction of its row."""
        return self.varies(node) and self.waiting.get(node, False)

    def terms(self, node: Node) -> list[_Term] | None:
        """The terms whose sum is the node, or None if it is no sum of such terms."""
        if not self.waits(node):
            return [_Term(node, None) if self.varies(node) else _Term(None, node)]
        match node.op, node.args:
            case "neg", (x,):
                return self.scaled(self.terms(x), constant(-1.0, self.builder))
            case "add", (x, y):
                return self.joined(self.terms(x), self.terms(y))
            case "sub", (Node("sub", (x, y)), z) if not (self.varies(y) or self.varies(z)):
                both = [_Term(None, self.made("add", y, z))]  # one reduction in log_softmax
                return self.joined(self.terms(x), self.scaled(both, constant(-1.0, self.builder)))
            case "sub", (x, y):
                return self.joined(self.terms(x), self.scaled(self.terms(y), constant(-1.0, self.builder)))
            case "mul", (x, y) if not self.waits(y):
                return self.scaled(self.terms(x), y)
            case "mul", (x, y) if not self.waits(x):
                return self.scaled(self.terms(y), x)
            case "div", (x, y) if not self.waits(y):
                return self.scaled(self.terms(x), self.made("div", constant(1.0, self.builder), y))
            case "where", (condition, x, Node("const", _, 0.0)) if not self.waits(condition):
                return self.of_each(self.terms(x), lambda bulk: self.chosen(condition, bulk))
        return None

    def joined(self, first: list[_Term] | None, second: list[_Term] | None) -> list[_Term] | None:
        return None if first is None or second is None else [*first, *second]

    def scaled(self, terms: list[_Term] | None, by: Node) -> list[_Term] | None:
        if self.varies(by):
            return self.of_each(terms, lambda bulk: by if bulk is None else self.made("mul", bulk, by))
        if terms is None:
            return None
        return [term._replace(once=by if term.once is None else self.made("mul", term.once, by)) for term in terms]

    def of_each(self, terms: list[_Term] | None, change: Callable[[Node | None], Node]) -> list[_Term] | None:
        return None if terms is None else [term._replace(bulk=change(term.bulk)) for term in terms]

    def chosen(self, condition: Node, bulk: Node | None) -> Node:
        one = constant(1.0, self.builder) if bulk is None else bulk
        return self.made("where", condition, one, constant(0.0, self.builder))

    def reduced(self, term: _Term) -> Node:
        """The reduction of one term."""
        bulk = term.bulk
        if bulk is None and self.name == "mean" and term.once is not None:
            return term.once
        if bulk is None:
            bulk = self.ones()
        found = self.builder.node("reduce", bulk, attr=(self.name, (self.along,)))
        factors = tuple(factor for factor in self.builder.types[bulk].factors if factor != self.along)
        self.builder.types.setdefault(found, Type("float", factors))
        return found if term.once is None else self.made("mul", found, term.once)

    def ones(self) -> Node:
        """A value that is 1 everywhere, and that varies over the same factors as the value that is reduced."""
        found: Node | None = None
        for factor in self.everywhere:  # one index over all factors may exceed int32
            place = self.builder.node("index", attr=(factor,))
            self.builder.types.setdefault(place, Type("int32", (factor,)))
            there = self.made("ge", place, constant(0, self.builder))
            found = there if found is None else self.made("logical_and", found, there)
        assert found is not None, "it varies along what is reduced"
        return self.chosen(found, None)
