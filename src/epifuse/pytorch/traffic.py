"""What a derivative reads and writes: as PyTorch runs it, one operation at a time, and in one launch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from epifuse.pytorch.symbols import SIZE, Size, is_tensor, total

aten = torch.ops.aten

_VIEWS = (
    *(aten.reshape.default, aten.expand.default, aten.unsqueeze.default, aten.permute.default, aten.full.default),
    *(aten.squeeze.dim, aten.squeeze.dims, aten.transpose.int, aten.t.default, aten.scalar_tensor.default),
)
"""What moves no data."""


def bytes_by_operations(module: GraphModule) -> Size:
    """Of each operation by itself."""
    nodes = [node for node in module.graph.nodes if is_tensor(node) and node.op == "call_function"]
    moving = [node for node in nodes if node.target not in _VIEWS]
    return total(_bytes(each) for node in moving for each in (node, *filter(is_tensor, node.all_input_nodes)))


def bytes_fused(read: Iterable[FxNode], module: GraphModule) -> Size:
    """Of what is `read`, and of the results."""
    results = next(node for node in module.graph.nodes if node.op == "output").args[0]
    return total(map(_bytes, (*read, *results)))


def _bytes(node: FxNode) -> Size:
    while node.target is aten.expand.default:
        node = node.args[0]  # type: ignore[assignment]  # a node
    size: Size = node.meta[SIZE]
    return size
