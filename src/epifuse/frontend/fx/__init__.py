"""Translate a part of a torch.fx graph of ATen operations into the graph of an epilogue.

The part is called a *cone*: a product, and operations that depend on it. An operation without a row in `rows.ROWS`
raises `Boundary`, which gives the reason. The caller decides whether that is an error or the edge of what is fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from epifuse.base.errors import fail
from epifuse.frontend.apply import placed
from epifuse.frontend.fx.reading import Boundary, Numerics, Reading, check_dtype, place_of, value_of
from epifuse.frontend.fx.rows import ROWS, arguments, numbers_of
from epifuse.frontend.python_function import Parsed
from epifuse.ir import Graph, Load, Output

__all__ = ["Boundary", "Cone", "Numerics", "numbers_of", "parsed_module", "place_of", "read", "value_of", "why_not"]


class Cone(NamedTuple):
    """A part of an fx graph that becomes one epilogue.

    `accum` is the node of the product. `body` are the nodes computed from it and from `operands`, in order. `operands`
    has the name of each node that enters, `outputs` the node of each name that leaves. If `expands_operands` is set, an
    operand of the product's shape gets the dims of the product. Its parts then align with other values as parts of the
    product do, even if nothing is computed from the product itself.
    """

    accum: FxNode
    body: tuple[FxNode, ...]
    operands: Mapping[FxNode, str]
    outputs: Mapping[str, FxNode]
    expands_operands: bool = False


def read(cone: Cone, numerics: Numerics = "written") -> Graph:
    """The epilogue graph of `cone`. Raises `Boundary` at the first node that the language cannot express."""
    reading = Reading(cone.accum, numerics)
    for node, name in cone.operands.items():
        reading.node = node
        check_dtype(node, reading.compute)
        load = reading.emit("load", attr=Load(name))
        reading.shapes[node] = shape = tuple(value_of(node).shape)
        is_whole = cone.expands_operands and shape == value_of(cone.accum).shape
        reading.values[node] = reading.emit("expand_as", load, reading.product) if is_whole else load
    for node in cone.body:
        _visit(reading, node)
    outputs = []
    for name, node in cone.outputs.items():
        reading.node = node
        outputs.append(Output(name, reading.whole(node)))
    return Graph(tuple(cone.operands.values()), tuple(outputs), (), reading.builder.locs)


def why_not(node: FxNode, accum: FxNode) -> str | None:
    """Why the language cannot express `node` in an epilogue of the product `accum`, whatever computes its inputs, or
    None if it can."""
    try:
        reading = Reading(accum, "float32")
        for argument in node.all_input_nodes:
            _assume(reading, argument)
        _visit(reading, node)
    except Boundary as boundary:
        return boundary.reason
    return None


def _assume(reading: Reading, node: FxNode) -> None:
    """Treat `node`, which has one tensor or several, as a value that exists already: load each tensor."""
    reading.node, value = node, node.meta.get("val")
    several = isinstance(value, (tuple, list))
    if not several:
        check_dtype(node, reading.compute)
    parts: Any = value if several else (value,)
    loads = tuple(reading.emit("load", attr=Load(f"{node.name}_{index}")) for index in range(len(parts)))
    reading.values[node] = loads if several else loads[0]
    # A result may be None, as a gradient that nobody needs.
    reading.shapes[node] = next((tuple(part.shape) for part in parts if isinstance(part, torch.Tensor)), ())


def _visit(reading: Reading, node: FxNode) -> None:
    """Read one node. Its inputs were read before."""
    reading.node = node
    if node.op != "call_function":
        raise reading.boundary(f"{node.op} {node.target} is no operation of ATen")
    is_aten = isinstance(node.target, torch._ops.OpOverload)
    name = node.target._schema.name if is_aten else getattr(node.target, "__name__", str(node.target))  # type: ignore[union-attr]
    if (rule := ROWS.get(name)) is None or not (is_aten or name == "getitem"):
        raise reading.boundary(f"{name} is not in the epilogue language")
    if isinstance(node.meta.get("val"), torch.Tensor):
        check_dtype(node, reading.compute)
    made = rule(reading, arguments(node))
    reading.keep(made, reading.shapes[node])


def parsed_module(module: GraphModule) -> Parsed:
    """Parse a graph of ATen operations as an epilogue. Its first placeholder is the product, the others are operands.

    A single result is called D; several results have the names of their nodes. Raises `EpilogueSyntaxError` at the
    first node that the language cannot express.
    """
    nodes = list(module.graph.nodes)
    holders = [node for node in nodes if node.op == "placeholder"]
    results: Any = next(node for node in nodes if node.op == "output").args[0]
    returned = list(results) if isinstance(results, (tuple, list)) else [results]
    if not holders or not returned or not all(isinstance(node, FxNode) for node in returned):
        raise fail("fx_signature", None)
    names = ["D"] if len(returned) == 1 else [node.name for node in returned]
    operands = {node: str(node.target) for node in holders[1:]}
    body = tuple(node for node in nodes if node.op not in ("placeholder", "output"))
    try:
        graph = read(Cone(holders[0], body, operands, dict(zip(names, returned, strict=True))))
    except Boundary as boundary:
        raise fail("fx_operation", place_of(boundary.node), reason=boundary.reason) from None
    return Parsed("fx graph", graph, tuple(operands.values()), {}, {}, (), placed(place_of(holders[0])))
