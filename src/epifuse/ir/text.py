"""A graph as a JSON value, and back, so that another process can build the same epilogue from a string.

The value holds no source places. It holds no types and stages either, because they follow from the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from epifuse.ir.graph import Graph, Load, Output, topological
from epifuse.ir.node import Builder, Node
from epifuse.ir.types import Factor


def packed(graph: Graph) -> dict[str, Any]:
    """The graph as a JSON value. Nodes are numbered, arguments before their users. Equal graphs give equal values."""
    nodes = topological((*graph.roots, *graph.checked, *graph.hosts.values()))
    numbers = {node: index for index, node in enumerate(nodes)}
    return {
        "inputs": list(graph.inputs),
        "nodes": [[node.op, [numbers[arg] for arg in node.args], _packed(node.attr)] for node in nodes],
        "outputs": [[o.name, numbers[o.node], _packed(o.dims), _packed(o.dtype)] for o in graph.outputs],
        "effects": [numbers[node] for node in graph.effects],
        "checked": [numbers[node] for node in graph.checked],
        "hosts": {name: numbers[node] for name, node in graph.hosts.items()},
    }


def unpacked(value: Mapping[str, Any]) -> Graph:
    """The graph that `packed` turned into `value`."""
    builder = Builder()
    nodes: list[Node] = []
    for op, args, attr in value["nodes"]:
        nodes.append(builder.node(op, *(nodes[arg] for arg in args), attr=_unpacked(attr)))
    outputs = [Output(name, nodes[at], _unpacked(dims), _unpacked(dtype)) for name, at, dims, dtype in value["outputs"]]
    return Graph(
        tuple(value["inputs"]),
        tuple(outputs),
        tuple(nodes[at] for at in value["effects"]),
        hosts={name: nodes[at] for name, at in value["hosts"].items()},
        checked=tuple(nodes[at] for at in value["checked"]),
    )


def _packed(attr: Any) -> Any:
    """An attribute: numbers, strings and None unchanged, a tuple as a list, all else as {name of its type: content}."""
    if isinstance(attr, Load):
        return {"load": [_packed(item) for item in attr]}
    if isinstance(attr, Factor):
        return {"factor": list(attr)}
    if isinstance(attr, torch.dtype):
        return {"dtype": str(attr).removeprefix("torch.")}
    return [_packed(item) for item in attr] if isinstance(attr, tuple) else attr


def _unpacked(value: Any) -> Any:
    match value:
        case {"load": [name, views, dims]}:
            return Load(name, _unpacked(views), _unpacked(dims))
        case {"factor": [axis, stride, extent]}:
            return Factor(axis, stride, extent)
        case {"dtype": name}:
            return getattr(torch, name)
        case list():
            return tuple(map(_unpacked, value))
    return value
