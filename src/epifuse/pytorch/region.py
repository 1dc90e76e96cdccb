"""A *region*: a product and all that Inductor might compute in loops around it, as a graph of its own for measuring.

Measuring a cone alone would not be fair. The loops that read its outputs could otherwise compute these outputs
themselves, and have to read them from memory once a kernel writes them. What computes the cone's operands may be a part
of such a loop too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from epifuse.pytorch.cone import Cone, below, is_constant, is_picked_result, is_reduction, is_view, name_of
from epifuse.pytorch.payoff import drawn_ahead, has_loop


class Region(NamedTuple):
    """Nodes in the order of their graph: `inputs` come from outside, `body` is computed, `outputs` are read outside."""

    inputs: tuple[FxNode, ...]
    body: tuple[FxNode, ...]
    outputs: tuple[FxNode, ...]


def region_of(product: FxNode, cones: Iterable[Cone]) -> Region | None:
    """The region around `product`, which holds all nodes of `cones`; None if a value in it has a symbolic size."""
    after, cones = _after(product), list(cones)
    ahead = {node for cone in cones for node in drawn_ahead(cone)}
    pulled = {node for cone in cones for node in cone.pulled}
    body = after | ahead | _before(product, after | pulled | ahead)
    listed = tuple(node for node in product.graph.nodes if node in body)
    inputs = tuple(dict.fromkeys(each for node in listed for each in node.all_input_nodes if each not in body))
    outputs = tuple(node for node in listed if node in after | ahead and any(user not in body for user in node.users))
    region = Region(inputs, listed, outputs)
    return region if all(map(_is_sized, (*inputs, *listed))) else None


def _after(product: FxNode) -> set[FxNode]:
    """The nodes that depend on `product` through loops and views only, so that no other kernel runs in between."""
    dependent, found = below(product), {product}
    node = product
    while (node := node.next).op != "root":
        if (
            node in dependent
            and node.op == "call_function"
            and all(each in found or each not in dependent for each in node.all_input_nodes)
            and _is_loop(node)
        ):
            found.add(node)
    return found


def _before(product: FxNode, inside: set[FxNode]) -> set[FxNode]:
    """The nodes that loops compute for the nodes `inside` only and that do not depend on `product`, and the constants
    they read."""
    found = {node for node in inside if node is not product}
    node, factors = product, set(product.all_input_nodes)
    for node in reversed(product.graph.nodes):
        if node in found or node in factors or node is product or not node.users or node.op != "call_function":
            continue
        if is_constant(node):
            is_taken = any(user in found for user in node.users)
        else:
            is_taken = all(user in found for user in node.users) and _is_loop(node) and not is_reduction(node)
        if is_taken and not is_picked_result(node):
            found.add(node)
    return found


def _is_loop(node: FxNode) -> bool:
    mutates = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return not mutates and (is_view(node) or has_loop(node))


def _is_sized(node: FxNode) -> bool:
    value = node.meta.get("val")
    tensors = value if isinstance(value, (tuple, list)) else [value]
    return all(
        isinstance(each, torch.Tensor)
        and not any(isinstance(extent, torch.SymInt) for extent in (*each.shape, *each.stride()))
        for each in tensors
    )


class Copied(NamedTuple):
    """A graph of a region only; `made` are its nodes by those of the original graph."""

    graph: FxGraph
    made: dict[FxNode, FxNode]

    @staticmethod
    def of(region: Region) -> Copied:
        """A copy of `region`. The region's inputs become placeholders, in order."""
        graph, made = FxGraph(), {}
        for index, node in enumerate(region.inputs):
            made[node] = graph.placeholder(f"in{index}")
            made[node].meta["val"] = node.meta["val"]
        for node in region.body:
            made[node] = graph.node_copy(node, made.__getitem__)
            made[node].meta = dict(node.meta)
        graph.output(tuple(made[node] for node in region.outputs))
        return Copied(graph, made)

    def module(self) -> GraphModule:
        """The graph as a module that can be compiled."""
        return GraphModule(torch.nn.Module(), self.graph)

    def cone(self, cone: Cone) -> Cone:
        """The same cone, made of this graph's nodes."""
        inside, pulled = ({self.made[node]: None for node in nodes} for nodes in (cone.inside, cone.pulled))
        return Cone(self.made[cone.product], inside, pulled)


def text_of(graph: FxGraph) -> str:
    """A text that describes the graph and does not depend on the names of its nodes."""
    number = {node: index for index, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        args: Any = torch.fx.map_arg((node.args, node.kwargs), lambda each: f"%{number[each]}")
        target = node.target if node.op == "call_function" else ""
        lines.append(f"{node.op} {target} {name_of(node) if target else ''} {args} {_shown(node.meta.get('val'))}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_shown, value))
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}" if isinstance(value, torch.Tensor) else ""
