"""Prune: remove what no output and no effect needs, and host numbers that no load reads any more."""

from __future__ import annotations

from dataclasses import replace

from epifuse.ir import Graph, Load
from epifuse.ir.graph import topological
from epifuse.request.problem import Problem


def prune(graph: Graph, problem: Problem) -> Graph:
    """Keep what the roots reach. Unused operands stay in `inputs`: calls must pass them, and `explain` names them."""
    loaded = {node.attr.name for node in graph.nodes if isinstance(node.attr, Load)}
    hosts = {name: node for name, node in graph.hosts.items() if name in loaded or name.startswith("!")}
    live = set(topological((*graph.roots, *hosts.values())))
    return replace(
        graph,
        hosts=hosts,
        types={node: kind for node, kind in graph.types.items() if node in live},
        locs={node: locs for node, locs in graph.locs.items() if node in live},
    )


def unused_operands(graph: Graph) -> tuple[str, ...]:
    """Operands of the signature that no output needs."""
    needed = {node.attr.name for node in graph.nodes if isinstance(node.attr, Load)}
    needed |= {node.attr.name for node in topological(graph.hosts.values()) if isinstance(node.attr, Load)}
    return tuple(name for name in graph.inputs if name not in needed and not name.startswith("@"))
