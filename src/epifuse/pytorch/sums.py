"""Sums over all rows and groups of columns, such as the gradient of a weight that all heads share.

A launch computes the sum of each column. The few sums that belong together are added afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from epifuse.frontend.fx import value_of
from epifuse.pytorch.symbols import SIZE
from epifuse.request.problem import Problem

aten = torch.ops.aten

_SAME = (aten._to_copy.default, aten.reshape.default, aten.squeeze.dims, aten.squeeze.dim, aten.unsqueeze.default)
"""Operations that keep all elements in order. They only give a gradient the shape and dtype of its operand."""


def rows_alone(module: GraphModule, problem: Problem) -> Mapping[FxNode, tuple[FxNode, tuple[int, ...]]]:
    """Add to `module`, for each result that is such a sum, a node that sums over the rows only.

    Returns by result that node, and the dims over which its value still has to be summed.
    """
    found, graph, lead = {}, module.graph, 1 + problem.batched
    output = next(node for node in graph.nodes if node.op == "output")
    for result in filter(None, output.args[0]):
        total = result
        while total.target in _SAME:
            total = total.args[0]
        if total.target is not aten.sum.dim_IntList:
            continue
        x = total.args[0]
        shape = value_of(x).shape
        dims = sorted(dim % len(shape) for dim in total.args[1])
        is_whole = shape.numel() == problem.extents["l"] * problem.extents["m"] * problem.extents["n"]
        if is_whole and dims[:lead] == [*range(lead)] and lead < len(dims) < len(shape):
            with graph.inserting_before(output):
                made = graph.call_function(total.target, (x, [*range(lead)], False), {"dtype": problem.float_dtype})
            value = torch.empty(shape[lead:], dtype=problem.float_dtype, device="meta")
            made.meta = {"val": value, SIZE: {(0, 0, 1): value.element_size()}}
            found[result] = made, tuple(dim - lead for dim in dims[lead:])
    return found
