"""Sums of a row in which one value a row is a term or a factor: that value leaves the sum.

The sum of q (x - c) is the sum of q x, less c times the sum of q. So a loss of probabilities, as the sum of -q
log_softmax(x), or label smoothing by the mean of log_softmax(x), has no value of a tile that waits for its row. Imports
no cutlass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from epifuse.ir import Builder, Factor, Graph, Node, Type, rewrite
from epifuse.ir.graph import keep, topological
from epifuse.passes.canonicalise import constant, typed


class _Term(NamedTuple):
    """A product of a value that waits for nothing and of one value a row; None stands for 1."""

    bulk: Node | None
    once: Node | None


def apart(graph: Graph) -> Graph:
    """The graph with such values outside of its sums and means of whole rows."""

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old.op == "reduce" and old.attr[0] in ("sum", "mean") and graph.types[old].kind == "float":
            name, gone = old.attr
            if len(gone) == 1 and gone[0].extent is None and (found := _Sum(name, gone[0], builder).of(args[0])):
                return found
        return keep(old, args, builder)

    return rewrite(graph, rule)


class _Sum:
    """A sum or a mean along one axis, in a graph that is being made."""

    def __init__(self, name: str, along: Factor, builder: Builder) -> None:
        self.name, self.along, self.builder = name, along, builder

    def of(self, root: Node) -> Node | None:
        """What stands for it; None where nothing would be gained, or the value is no such sum of products."""
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
        """Whether a value of a tile is computed of one of its row."""
        return self.varies(node) and self.waiting.get(node, False)

    def terms(self, node: Node) -> list[_Term] | None:
        """What adds up to the node; None where it is no such sum."""
        if not self.waits(node):
            return [_Term(node, None) if self.varies(node) else _Term(None, node)]
        match node.op, node.args:
            case "neg", (x,):
                return self.scaled(self.terms(x), constant(-1.0, self.builder))
            case "add", (x, y):
                return self.joined(self.terms(x), self.terms(y))
            case "sub", (Node("sub", (x, y)), z) if not (self.varies(y) or self.varies(z)):
                both = [_Term(None, self.made("add", y, z))]  # of log_softmax they are one reduction
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
        """1 for each element, in a form that varies as the value that is reduced."""
        found: Node | None = None
        for factor in self.everywhere:  # a place among all of them may be beyond an int32
            place = self.builder.node("index", attr=(factor,))
            self.builder.types.setdefault(place, Type("int32", (factor,)))
            there = self.made("ge", place, constant(0, self.builder))
            found = there if found is None else self.made("logical_and", found, there)
        assert found is not None, "it varies along what is reduced"
        return self.chosen(found, None)
