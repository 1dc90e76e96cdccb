"""Operator fusion on the CPU: torch has one-pass forms of x + s * y and x + y * z, so the product costs no pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from epifuse.ir import Graph, Node


class Fused(NamedTuple):
    """A step that stands for an addition and the multiplication below it."""

    arguments: tuple[Node, ...]
    run: Callable[..., Any]


def _add_scaled(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.add(x, y, alpha=scale.item(), out=out)


def _sub_scaled(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.sub(x, y, alpha=scale.item(), out=out)


def _add_product(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(x, y, z, out=out)


def _sub_product(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(x, y, z, value=-1, out=out)


def fuse(graph: Graph, order: Sequence[Node], kept: set[Node]) -> dict[Node, Fused]:
    """The additions of `order` that absorb a multiplication nobody else reads."""
    uses: dict[Node, int] = {}
    for node in order:
        for arg in node.args:
            uses[arg] = uses.get(arg, 0) + 1
    computed = set(order)
    found: dict[Node, Fused] = {}
    for node in order:
        if node.op not in ("add", "sub") or not _all_float(graph, node):
            continue
        for position in (1, 0) if node.op == "add" else (1,):
            product, other = node.args[position], node.args[1 - position]
            absorbed = product.op == "mul" and product in computed and uses[product] == 1 and product not in kept
            # A full-size result needs a full-size first operand; numbers and vectors gain nothing.
            if absorbed and _all_float(graph, product) and graph.types[other] == graph.types[node]:
                found[node] = _form(graph, node, product, other)
                break
    return found


def _form(graph: Graph, node: Node, product: Node, other: Node) -> Fused:
    x, y = product.args
    for scale, value in ((x, y), (y, x)):
        if not graph.types[scale].factors:
            return Fused((other, value, scale), _add_scaled if node.op == "add" else _sub_scaled)
    return Fused((other, x, y), _add_product if node.op == "add" else _sub_product)


def _all_float(graph: Graph, node: Node) -> bool:
    return all(graph.types[arg].kind == "float" for arg in node.args)
