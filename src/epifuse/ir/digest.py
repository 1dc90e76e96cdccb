"""The digest: identity of a graph under renaming, statement order and the order of commutative arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from epifuse.ir.graph import Graph, Load, Output, show_views
from epifuse.ir.node import Node


class Identity(NamedTuple):
    """`digest` is equal for equal structures; `names` are operands and outputs in the order of the digest's text."""

    digest: str
    names: tuple[str, ...]


def identify(graph: Graph, commutative: frozenset[str]) -> Identity:
    """SHA-256 of the structure, over canonical text. `commutative` names the operations whose arguments may be swapped.

    Hashes of subtrees, from the leaves up, see a load without its name. Hashes of contexts, from the roots down, then
    tell apart loads that are used differently. Loads are numbered by their first use in the order of these hashes. Two
    loads that stay tied are used alike. A wrong order can only cost a second compile and never merges two different
    epilogues, because the last hash covers the whole graph.
    """
    up = _subtree_hashes(graph, commutative)
    order = _ordered_arguments(graph, commutative, up)
    outputs: list[Output] = sorted(
        graph.outputs, key=lambda output: (up[output.node], _sha((output.dims, output.views)))
    )
    numbers: dict[Node, int] = {}
    operands: dict[str, int] = {}
    lines = []
    for root in (*(output.node for output in outputs), *graph.effects):
        for node in _topological_in(root, order, numbers):
            attr = node.attr
            if isinstance(attr, Load):
                attr = attr._replace(name=str(operands.setdefault(attr.name, len(operands))))
            numbers[node] = len(numbers)
            lines.append(f"{node.op} {attr!r} {[numbers[arg] for arg in order[node]]} {graph.types.get(node)}")
    lines += [f"out {numbers[output.node]} {output.dims}{show_views(output.views)}" for output in outputs]
    lines += [f"effect {numbers[effect]}" for effect in graph.effects]
    return Identity(_sha("\n".join(lines)), (*operands, *(output.name for output in outputs)))


def _sha(value: object) -> str:
    return hashlib.sha256(repr(value).encode() if not isinstance(value, str) else value.encode()).hexdigest()


def _subtree_hashes(graph: Graph, commutative: frozenset[str]) -> dict[Node, str]:
    up: dict[Node, str] = {}
    for node in graph.nodes:
        attr = node.attr._replace(name="") if isinstance(node.attr, Load) else node.attr
        args = [up[arg] for arg in node.args]
        if node.op in commutative:
            args.sort()
        up[node] = _sha((node.op, repr(attr), args, str(graph.types.get(node))))
    return up


def _ordered_arguments(
    graph: Graph, commutative: frozenset[str], up: Mapping[Node, str]
) -> dict[Node, tuple[Node, ...]]:
    uses: dict[Node, list[str]] = {node: [] for node in graph.nodes}
    for output in graph.outputs:
        uses[output.node].append(_sha(("out", output.dims)))
    down: dict[Node, str] = {}
    for node in reversed(graph.nodes):
        down[node] = _sha((up[node], sorted(uses[node])))
        for position, arg in enumerate(node.args):
            uses[arg].append(_sha((down[node], -1 if node.op in commutative else position)))
    # A subtree's own context does not see how the loads inside it are used elsewhere, so hash upwards once more.
    key: dict[Node, str] = {}
    order: dict[Node, tuple[Node, ...]] = {}
    for node in graph.nodes:
        args = sorted(node.args, key=key.__getitem__) if node.op in commutative else node.args
        order[node] = tuple(args)
        key[node] = _sha((down[node], [key[arg] for arg in args]))
    return order


def _topological_in(root: Node, order: Mapping[Node, tuple[Node, ...]], done: Mapping[Node, int]) -> list[Node]:
    found: dict[Node, None] = {}
    stack: list[tuple[Node, int]] = [(root, 0)]
    while stack:
        node, position = stack.pop()
        if node in found or node in done:
            continue
        if position < len(order[node]):
            stack.append((node, position + 1))
            stack.append((order[node][position], 0))
        else:
            found[node] = None
    return list(found)
