"""Sums over rows and a part of the columns, as the gradient of a weight that all heads share: a launch gives sums of
columns, and what is left is to add up a few of these."""

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
"""What leaves every number where it is; all are gradients in the shape and dtype of an operand in the end."""


def rows_alone(module: GraphModule, problem: Problem) -> Mapping[FxNode, tuple[FxNode, tuple[int, ...]]]:
    """For each result that is such a sum, that over the rows alone, and the dims that this is yet to be summed over."""
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
