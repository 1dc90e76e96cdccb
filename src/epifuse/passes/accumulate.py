"""Accumulate: an output that is added onto its destination becomes the sum of the old content and the value."""

from __future__ import annotations

from dataclasses import replace

import torch

from epifuse.base.dtypes import BY_TORCH
from epifuse.base.errors import fail
from epifuse.ir import Builder, Graph, Load, Output, Type
from epifuse.passes.canonicalise import typed
from epifuse.request.problem import Problem, old_content


def accumulate(graph: Graph, problem: Problem) -> Graph:
    """The graph in which each output of `problem.accumulated` loads its destination, in its own dims, and adds it."""
    if not problem.accumulated:
        return graph
    onto = dict(problem.accumulated)
    builder = Builder(dict(graph.locs), dict(graph.types))
    outputs = [
        _added(output, onto[output.name], builder) if output.name in onto else output for output in graph.outputs
    ]
    return replace(graph, outputs=tuple(outputs), locs=builder.locs, types=builder.types)


def _added(output: Output, dtype: torch.dtype, builder: Builder) -> Output:
    type_, kind = builder.types[output.node], BY_TORCH[dtype].loads_as
    if "mask" in (kind, type_.kind):
        raise fail("accumulate_mask", next(iter(builder.locs.get(output.node, ())), None), name=output.name)
    old = builder.node("load", attr=Load(old_content(output.name), (), output.dims))
    builder.types[old] = Type(kind, type_.factors)
    return output._replace(node=typed(builder, "add", (old, output.node)))
