"""A tile program: the steps of one sweep, compiled from the graph once, run for every tile over reused buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from epifuse.base.dtypes import dtype_of
from epifuse.fusion.forms import debug_print
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.ir import Graph, Node
from epifuse.ir.types import promote
from epifuse.passes.alignment import removed
from epifuse.passes.assign_stages import Stage
from epifuse.providers.cpu import reduce
from epifuse.providers.cpu.primitives import FAST, PRIMITIVE_ROWS, Row
from epifuse.providers.cpu.space import Mask, Space, picked

Values = dict[Node, torch.Tensor]
BufferKey = tuple[torch.dtype, tuple[Any, ...], int]


def per_tile(stage: Stage) -> bool:
    """Whether a value of this stage exists only tile by tile, never as a whole."""
    return stage.kind == "row" or (stage.sweep >= 0 and stage.kind == "tile")


class Step(NamedTuple):
    """A call of `run(*node.args, out=buffer)`. If `buffer` is None there is no result, or the operand is the result."""

    node: Node
    run: Callable[..., Any]
    buffer: BufferKey | None


@dataclass(frozen=True)
class TileProgram:
    """Steps in order, and the sources, which must exist before the steps of a tile run (see `is_source`)."""

    steps: tuple[Step, ...]
    sources: tuple[Node, ...]


@dataclass
class _Allocator:
    """Assigns buffers by a linear scan: a value's buffer is free again after its last use, and an elementwise result
    may take over the buffer of an argument."""

    free: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)
    count: int = 0
    held: dict[Node, BufferKey] = field(default_factory=dict)

    def take(self, node: Node, dtype: torch.dtype, factors: tuple[Any, ...], dying: Iterable[Node]) -> BufferKey:
        for arg in dying:
            key = self.held.get(arg)
            if key is not None and key[:2] == (dtype, factors):
                del self.held[arg]
                self.held[node] = key
                return key
        pool = self.free.setdefault((dtype, factors), [])
        if pool:
            key = (dtype, factors, pool.pop())
        else:
            key = (dtype, factors, self.count)
            self.count += 1
        self.held[node] = key
        return key

    def release(self, node: Node) -> None:
        key = self.held.pop(node, None)
        if key is not None:
            self.free[key[:2]].append(key[2])


@dataclass(frozen=True)
class Context:
    """What every step needs to know. `converted` holds the loads whose operands are copied (`lowered._converted`)."""

    graph: Graph
    space: Space
    compute: torch.dtype
    converted: frozenset[Node]


def compile_tile(context: Context, roots: Iterable[Node], sweep: int) -> TileProgram:
    """The program that computes `roots` in one sweep. Values that were finished before the sweep are sources."""
    graph = context.graph
    kept = set(roots)
    order, sources = _needed(graph, tuple(kept), sweep)
    # The product comes first, before another value uses the buffer that it is written to.
    order.sort(key=lambda node: node.op != "accum")
    last = {arg: position for position, node in enumerate(order) for arg in node.args}
    allocator = _Allocator()
    steps = []
    for position, node in enumerate(order):
        dying = [arg for arg in dict.fromkeys(node.args) if last[arg] == position and arg not in kept]
        steps.append(_step(context, node, dying, allocator))
        for arg in dying:
            allocator.release(arg)
        if node not in last and node not in kept:
            allocator.release(node)
    return TileProgram(tuple(steps), tuple(sources))


def _needed(graph: Graph, roots: tuple[Node, ...], sweep: int) -> tuple[list[Node], list[Node]]:
    """The nodes to compute in a tile, in order, and the sources that they read."""
    wanted: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in wanted:
            wanted.add(node)
            if not is_source(graph, node, sweep):
                stack.extend(node.args)
    ordered = [node for node in graph.nodes if node in wanted]
    return (
        [node for node in ordered if not is_source(graph, node, sweep)],
        [node for node in ordered if is_source(graph, node, sweep)],
    )


def is_source(graph: Graph, node: Node, sweep: int) -> bool:
    """Whether a value is complete before this sweep starts: vectors of operands, finished reductions, numbers."""
    stage = graph.stages[node]
    return node.op in ("const", "index") or (not per_tile(stage) and stage.sweep < sweep)


def _step(context: Context, node: Node, dying: list[Node], allocator: _Allocator) -> Step:
    type_ = context.graph.types[node]
    dtype = dtype_of(type_.kind, context.compute)
    if node.op == "load" and node not in context.converted:
        return Step(node, _unused, None)
    if node.op in ("load", "accum"):
        return Step(node, _unused, allocator.take(node, dtype, type_.factors, ()))
    if node.op == "debug_print":
        return Step(node, operation(context, node), None)
    return Step(node, operation(context, node), allocator.take(node, dtype, type_.factors, dying))


def operation(context: Context, node: Node) -> Callable[..., Any]:
    """The function that computes `node` from tensors. All but prints take `out`."""
    if node.op == "reduce":
        name, gone = node.attr
        return partial(reduce.in_tile, name, context.space.dimensions(gone))
    if node.op == "debug_print":
        batched = "l" in context.graph.types[node].axes
        return _printer(str(node.attr), 0 if batched else sum(f.axis == "l" for f in context.space.factors))
    if node.op == "pick":
        return partial(_picked, context.space.places(node.attr))
    if node.op == "cast":
        return _cast(node.attr)
    row = FAST[str(node.attr)] if node.op == "call" else PRIMITIVE_ROWS[node.op]
    return _of_one_kind(row, context.graph, node, context.compute)


def small_mask(context: Context, node: Node, masks: Sequence[Mask]) -> Mask:
    """The mask of a vector or scalar whose arguments have these masks. The mask of a number is empty."""
    if node.op in ("reduce", "pick"):
        gone = context.space.dimensions(removed(node))
        return tuple(varies and i not in gone for i, varies in enumerate(masks[0]))
    return tuple(map(any, zip(*filter(None, masks), strict=True)))


def _unused(*args: Any, **named: Any) -> None:
    """Stands for the function of a product or a load, which the kernel itself writes."""


def _cast(to: torch.dtype) -> Row:
    return lambda x, *, out: out.copy_(x.to(to))


def _picked(places: list[tuple[int, int]], x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(picked(x, places))


def _printer(fmt: str, hidden: int) -> Callable[[torch.Tensor], None]:
    """A function that prints x without its first `hidden` dims, which are those of a batch that the problem lacks."""
    return lambda x: debug_print(fmt, x.reshape(x.shape[hidden:]))


def _of_one_kind(row: Row, graph: Graph, node: Node, compute: torch.dtype) -> Row:
    """`row`, with arguments that are converted first if torch would compute in another dtype. In torch a 0-d tensor
    widens no other tensor, and a 0-d float64 beside integers gives float32."""
    rule = PRIMITIVES[node.op].rule if node.op in PRIMITIVES else "arithmetic"
    types = {i: graph.types[arg] for i, arg in enumerate(node.args) if not (rule == "select" and i == 0)}
    kind = promote([type_.kind for type_ in types.values()]) if rule == "compare" else graph.types[node].kind
    widened = kind == "float" or (kind == "int64" and not all(type_.factors for type_ in types.values()))
    positions = [i for i, type_ in types.items() if type_.kind != kind] if widened and rule != "random" else []
    if not positions:
        return row
    dtype = dtype_of(kind, compute)

    def convert(*args: torch.Tensor, out: torch.Tensor) -> Any:
        return row(*(arg.to(dtype) if i in positions else arg for i, arg in enumerate(args)), out=out)

    return convert


def constants(graph: Graph, compute: torch.dtype) -> Mapping[Node, torch.Tensor]:
    """The constants of a graph as 0-d tensors, made once."""
    return {
        node: torch.tensor(node.attr, dtype=dtype_of(graph.types[node].kind, compute), device="cpu")
        for node in graph.nodes
        if node.op == "const"
    }
