"""Sums of what was joined: the gradient of a part is that part of the gradient.

Which part an element of `cat` or `stack` is of is told by its place along a dim. So PyTorch differentiates a choice by
place: it sums, along this dim, zeros everywhere but at one place. A slice says the same without a reduction, of the
gradient alone, too, which has no tile to be reduced in.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from epifuse.frontend.fx import value_of

aten = torch.ops.aten


def slice_sums(module: GraphModule, coordinates: Collection[FxNode]) -> None:
    """Replace each such sum; `coordinates` are the arguments that hold the places along a dim."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is aten.sum.dim_IntList and (found := _chosen(node, coordinates)) is not None:
            source, dim, place = found
            with graph.inserting_before(node):
                made = graph.call_function(aten.slice.Tensor, (source, dim, place, place + 1))
                made.meta = {**node.meta, "val": value_of(source).narrow(dim, place, 1)}
                if node.args[2:] != (True,):  # the dim is dropped
                    made = graph.call_function(aten.squeeze.dim, (made, dim))
                    made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
    graph.eliminate_dead_code()
    module.recompile()


_MOST = 64
"""Places along a dim that are looked at."""


def _chosen(node: FxNode, coordinates: Collection[FxNode]) -> tuple[FxNode, int, int] | None:
    """What a sum adds zeros to, the dim, and the place along it; None for any other sum."""
    x, dims = node.args[:2]
    if not isinstance(x, FxNode) or x.target is not aten.where.self or len(dims) != 1 or node.kwargs:  # type: ignore[arg-type]  # a list
        return None
    shape = value_of(x).shape
    dim = int(dims[0]) % len(shape)  # type: ignore[index, arg-type]  # a number
    if shape[dim] > _MOST:
        return None
    found = [_at(x, place, dim - len(shape), coordinates) for place in range(shape[dim])]
    kept = [(source, place) for place, source in enumerate(found) if not _is_zero(source)]
    if len(kept) != 1 or kept[0][0] is x:
        return None
    source, place = kept[0]
    same = isinstance(source, FxNode) and value_of(source).shape == shape
    return (source, dim, place) if same and value_of(source).dtype == value_of(node).dtype else None


def _at(x: Any, place: int, dim: int, coordinates: Collection[FxNode]) -> Any:
    """What `x` is at a place along a dim, which is counted from the end."""
    while isinstance(x, FxNode) and x.target is aten.where.self:
        condition, first, second = x.args
        number = _place_asked(condition, dim, coordinates)
        if number is None:
            break
        x = first if number == place else second
    return x


def _place_asked(condition: Any, dim: int, coordinates: Collection[FxNode]) -> int | None:
    """The place along a dim that a mask is of; None for any other mask."""
    if condition.target is not aten.eq.Scalar:
        return None
    own, number = condition.args
    along = [at for at, extent in enumerate(value_of(own).shape) if extent != 1]
    if along != [value_of(own).dim() + dim]:
        return None
    while own.target is aten.unsqueeze.default:
        own = own.args[0]
    return int(number) if own in coordinates else None


def _is_zero(x: Any) -> bool:
    return isinstance(x, FxNode) and x.target is aten.scalar_tensor.default and not x.args[0]
