"""The graph: outputs and effects over interned nodes, and its printed form."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from epifuse.base.errors import Loc
from epifuse.base.lazy import cached_property
from epifuse.ir.node import Builder, Node, merged
from epifuse.ir.types import Dims, Type, show_dims, with_extents_of_n


class Load(NamedTuple):
    """The `attr` of a load: which operand, the layout operations written on it, and the dims it was aligned with.

    `views` are the steps that lead from the operand as the caller passed it to the tensor that is loaded:
    ("permute", dims), ("reshape", shape), ("unsqueeze", position) and ("part", (dim, start, stop, step, whether the dim
    is dropped)). `dims` is None until types are inferred.
    """

    name: str
    views: tuple[tuple[str, Any], ...] = ()
    dims: Dims | None = None

    def __str__(self) -> str:
        return self.name + show_views(self.views) + (show_dims(self.dims) if self.dims is not None else "")


def show_views(views: tuple[tuple[str, Any], ...]) -> str:
    """Text of layout operations."""
    return "".join(f".{op}({arg})" for op, arg in views)


class Output(NamedTuple):
    """A value that leaves the epilogue: its name, its node, and (once types are inferred) its dims.

    `dtype` is the dtype of the epilogue's own last cast of the value, or None. If there are `views`, the value is
    written to a part of the tensor of this name: they are the steps from that tensor to the part, in the form of
    `Load.views`. `whole` are then the dims of the whole tensor, with the extents of all factors of N written out.
    """

    name: str
    node: Node
    dims: Dims | None = None
    dtype: torch.dtype | None = None
    views: tuple[tuple[str, Any], ...] = ()
    whole: Dims | None = None

    def part(self, node: Node, dims: Dims, views: tuple[tuple[str, Any], ...], extents: Mapping[str, int]) -> Output:
        """This output with the value `node` of these dims, written to the part of its tensor that `views` select."""
        whole = with_extents_of_n(self.dims or (), extents) if self.whole is None else self.whole
        return self._replace(node=node, dims=dims, views=(*self.views, *views), whole=whole)


@dataclass(frozen=True, eq=False)
class Graph:
    """An epilogue. `inputs` are the operand names in the order of the signature, without `accum`.

    `locs` are the source places that wrote a node. `types` is filled by inference, `stages` by the stage pass. The
    digest covers the types, but not `locs` and `stages`. `hosts` maps the name of a scalar that the host computes to
    the root of its expression. `checked` are values as written that inference types even if no output needs them.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    effects: tuple[Node, ...] = ()
    locs: Mapping[Node, tuple[Loc, ...]] = field(default_factory=dict, repr=False)
    types: Mapping[Node, Type] = field(default_factory=dict, repr=False)
    stages: Mapping[Node, Any] = field(default_factory=dict, repr=False)
    hosts: Mapping[str, Node] = field(default_factory=dict, repr=False)
    checked: tuple[Node, ...] = field(default=(), repr=False)

    @property
    def roots(self) -> tuple[Node, ...]:
        """The nodes that must be computed: the values of the outputs, and the effects."""
        return (*(output.node for output in self.outputs), *self.effects)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every node the roots need, arguments before users."""
        return topological(self.roots)

    @cached_property
    def written(self) -> tuple[Node, ...]:
        """`nodes`, and the nodes that only a `checked` value needs. Arguments stand before users."""
        return topological((*self.roots, *self.checked))

    @cached_property
    def ops(self) -> frozenset[str]:
        """The names of all operations in `written`."""
        return frozenset([node.op for node in self.written])

    @cached_property
    def _loads(self) -> tuple[Node, ...]:
        return tuple([node for node in self.nodes if node.op == "load"])

    def loc(self, node: Node) -> Loc | None:
        """The first place that wrote `node`."""
        return next(iter(self.locs.get(node, ())), None)

    def loads(self) -> tuple[Node, ...]:
        """The load nodes, in topological order."""
        return self._loads

    def __str__(self) -> str:
        numbers = {node: f"%{index}" for index, node in enumerate(self.nodes)}
        lines = [f"epilogue({', '.join(('accum', *self.inputs))})"]
        for name, root in self.hosts.items():
            lines.append(f"  host {name} = {expression(root)}")
        for node in self.nodes:
            lines.append("  " + self._line(node, numbers))
        for output in self.outputs:
            dims = show_dims(output.dims) if output.dims is not None else ""
            lines.append(f"  return {output.name}{show_views(output.views)}{dims} = {numbers[output.node]}")
        return "\n".join(lines)

    def _line(self, node: Node, numbers: Mapping[Node, str]) -> str:
        attr = "" if node.attr is None else f" {show_attr(node.attr)}"
        args = "".join(f" {numbers[arg]}" for arg in node.args)
        typed = f" : {self.types[node]}" if node in self.types else ""
        staged = f"  @{self.stages[node]}" if node in self.stages else ""
        return f"{numbers[node]} = {node.op}{attr}{args}{typed}{staged}"

    def with_roots(self, outputs: Iterable[Output], effects: Iterable[Node]) -> Graph:
        """The same graph with other roots and no types or stages."""
        return replace(self, outputs=tuple(outputs), effects=tuple(effects), types={}, stages={})


def show_attr(attr: object) -> str:
    """Stable text of an attribute; tuples of dims print as dims."""
    if isinstance(attr, tuple) and not hasattr(attr, "_fields"):
        return "(" + ", ".join(show_attr(item) for item in attr) + ")"
    return str(attr)


_LONGEST = 160


def expression(root: Node) -> str:
    """One host expression as text. A longer subexpression is cut: shared values would double the text at each use."""
    text: dict[Node, str] = {}
    for node in topological((root,)):
        attr = "" if node.attr is None else str(node.attr)
        name = f"{node.op}{attr and ':' + attr}"
        written = f"{name}({', '.join(text[a] for a in node.args)})" if node.args else attr
        text[node] = written if len(written) <= _LONGEST else f"{name}(...)"
    return text[root]


class _Linked(Protocol):
    @property
    def args(self) -> tuple[Any, ...]: ...


Linked = TypeVar("Linked", bound=_Linked)


def topological(roots: Iterable[Linked], known: Container[object] = ()) -> tuple[Linked, ...]:
    """The nodes under `roots` that are not `known`, arguments first. Without recursion: a graph may be 10000 deep."""
    order: dict[Linked, None] = {}
    for root in roots:
        stack: list[tuple[Linked, int]] = [(root, 0)]
        while stack:
            node, position = stack.pop()
            if node in order or node in known:
                continue
            if position < len(node.args):
                stack.append((node, position + 1))
                stack.append((node.args[position], 0))
            else:
                order[node] = None
    return tuple(order)


Value = TypeVar("Value")
Rule = Callable[[Node, tuple[Node, ...], Builder], Node]


def rewrite(graph: Graph, rule: Rule) -> Graph:
    """Rebuild the graph bottom-up: `rule(old, new_args, builder)` gives the node that stands for `old`.

    Source places and types are carried over. A rule that makes further nodes enters their types in `builder.types`.
    """
    builder = Builder()
    new: dict[Node, Node] = {}
    for old in topological((*graph.roots, *graph.checked, *graph.hosts.values())):
        node = rule(old, tuple(new[arg] for arg in old.args), builder)
        known = builder.locs.get(node, ())
        builder.locs[node] = merged(known, graph.locs.get(old, ()))
        if old in graph.types:
            builder.types.setdefault(node, graph.types[old])
        new[old] = node
    return rebuilt(graph, new, builder)


def rebuilt(graph: Graph, new: Mapping[Node, Node], builder: Builder) -> Graph:
    """`graph` with each root replaced by its node in `new`. `builder` made these nodes and knows their types."""
    return replace(
        graph.with_roots(
            (output._replace(node=new[output.node]) for output in graph.outputs),
            (new[effect] for effect in graph.effects),
        ),
        locs=builder.locs,
        types=builder.types,
        hosts={name: new[node] for name, node in graph.hosts.items()},
        checked=tuple(new[node] for node in graph.checked),
    )


def applied(
    body: Graph, arguments: Iterable[Value], make: Callable[[Node, tuple[Value, ...]], Value]
) -> dict[Node, Value]:
    """The value of each node of `body` for these arguments. `make(node, args)` gives it for all nodes but loads."""
    given = dict(zip(body.inputs, arguments, strict=True))
    made: dict[Node, Value] = {}
    for node in body.nodes:
        made[node] = given[node.attr.name] if node.op == "load" else make(node, tuple(made[arg] for arg in node.args))
    return made


def keep(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
    """The rule that changes nothing."""
    return builder.node(old.op, *args, attr=old.attr)


class Side(NamedTuple):
    """One side of `a if condition else b` whose condition is a number: whether it is the side `a`, and the nodes that
    only this side needs."""

    condition: Node
    is_first: bool
    nodes: frozenset[Node]


def sides(graph: Graph, is_number: Callable[[Node], bool]) -> Iterator[Side]:
    """Yield both sides of each conditional of a typed graph whose condition is a number of the call.

    A kernel computes both sides, whichever the number selects. `is_number(node)` says whether a node is such a number.
    """
    users: dict[Node, set[Node | None]] = {node: set() for node in graph.nodes}
    for node in graph.nodes:
        for arg in node.args:
            users[arg].add(node)
    for output in graph.outputs:
        users[output.node].add(None)
    for node in graph.nodes:
        if node.op == "where" and is_number(node.args[0]) and node.args[1] is not node.args[2]:
            for side in (1, 2):
                alone: set[Node] = set()
                for below in reversed(graph.nodes):
                    inside = {node, *alone} if below is node.args[side] else alone
                    if users[below] and users[below] <= inside:
                        alone.add(below)
                yield Side(node.args[0], side == 1, frozenset(alone))
