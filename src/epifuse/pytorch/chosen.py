"""Sums that only choose a part of a joined value, replaced by slices: a part's gradient is that part of the gradient.

In an evaluated `cat` or `stack`, the place of an element along a dim chooses the part that it comes from. PyTorch's
derivative of this choice is a sum along the dim over values that are zero except at one place. A slice gives the same
without a reduction. It also serves if only the gradient is sliced, which has no tile to be reduced in.
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
    """Replace each sum that only chooses one place by a slice. `coordinates` are the arguments that hold places."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is aten.sum.dim_IntList and (found := _chosen(node, coordinates)) is not None:
            source, dim, place = found
            with graph.inserting_before(node):
                made = graph.call_function(aten.slice.Tensor, (source, dim, place, place + 1))
                made.meta = {**node.meta, "val": value_of(source).narrow(dim, place, 1)}
                if node.args[2:] != (True,):  # without keepdim
                    made = graph.call_function(aten.squeeze.dim, (made, dim))
                    made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
    graph.eliminate_dead_code()
    module.recompile()


_MOST = 64
"""Sums along a dim with more places than this are not looked at."""


def _chosen(node: FxNode, coordinates: Collection[FxNode]) -> tuple[FxNode, int, int] | None:
    """For a sum of zeros except at one place: the node that it takes this place of, the dim and the place. None for any
    other sum."""
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
    """The node that gives the value of `x` at `place` along `dim`, which is counted from the end."""
    while isinstance(x, FxNode) and x.target is aten.where.self:
        condition, first, second = x.args
        number = _place_asked(condition, dim, coordinates)
        if number is None:
            break
        x = first if number == place else second
    return x


def _place_asked(condition: Any, dim: int, coordinates: Collection[FxNode]) -> int | None:
    """The place along `dim` at which the mask `condition` is True; None for any other mask."""
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
