"""The bytes that a derivative reads and writes: by PyTorch's operations one by one, by Inductor, and in one launch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from epifuse.frontend.fx import value_of
from epifuse.ir import Load, Type
from epifuse.plan.settle import Settled
from epifuse.pytorch.cone import is_cut, is_reduction, name_of
from epifuse.pytorch.evaluate import ACCUM
from epifuse.pytorch.symbols import SIZE, Size, at_extents, is_tensor, total
from epifuse.request.problem import Problem

aten = torch.ops.aten

_VIEWS = (
    *(aten.reshape.default, aten.expand.default, aten.unsqueeze.default, aten.permute.default, aten.full.default),
    *(aten.squeeze.dim, aten.squeeze.dims, aten.transpose.int, aten.t.default, aten.scalar_tensor.default),
)
"""Operations that move no data."""


_MOST_TRAFFIC = 0.75
"""One kernel has to move at most this share of the bytes that the operations move one by one. The gradient of a bias
alone is one sum, which moves as much in both cases, so no kernel is compiled for it."""


class Traffic(NamedTuple):
    """The bytes that a derivative reads and writes, as polynomials in the extents of l, m and n.

    `by_operations` is for PyTorch's operations one by one. `once` is for a launch or Inductor, which read each operand
    once; it does not count accum. `reads_accum` says whether the derivative reads accum, and `computes_accum` whether
    it computes the gradient of accum. `suits_inductor` says whether Inductor is faster than a launch, and
    `combines_columns` whether gradients that arrive are combined across the columns of a head.
    """

    by_operations: Size
    once: Size
    reads_accum: bool
    computes_accum: bool
    suits_inductor: bool
    combines_columns: bool

    def in_problem(self, problem: Problem) -> tuple[int, int]:
        """The bytes that PyTorch's operations move, and those of one kernel that reads nothing twice.

        The gradient of accum is stored in A's dtype, and so is an accum that is read.
        """
        extents, wide, narrow = problem.extents, problem.float_dtype.itemsize, problem.a.dtype.itemsize
        elements = extents["l"] * extents["m"] * extents["n"]
        by_operations, once = at_extents(self.by_operations, extents), at_extents(self.once, extents)
        if self.computes_accum and narrow < wide:  # PyTorch casts the gradient after the operations
            by_operations += elements * (wide + narrow)
            once -= elements * (wide - narrow)
        return by_operations, once + elements * narrow * self.reads_accum

    def pays_at_once(self, problem: Problem) -> bool:
        """Whether one kernel moves so few bytes, beside PyTorch's operations, that planning and compiling it pays."""
        by_operations, at_once = self.in_problem(problem)
        return at_once <= _MOST_TRAFFIC * by_operations


def traffic(
    module: GraphModule,
    names: Mapping[FxNode, str],
    settled: Settled,
    computed: Collection[str],
    arriving: Collection[str],
) -> Traffic:
    """The traffic of `module`, which computes the gradients of the operands `computed` (or of accum).

    `names` are those of its arguments that are tensors, and `arriving` those of the gradients among them.
    """
    nodes = [node for node in module.graph.nodes if is_tensor(node) and node.op == "call_function"]
    moving = [node for node in nodes if node.target not in _VIEWS]
    results = next(node for node in module.graph.nodes if node.op == "output").args[0]
    read = [node for node, name in names.items() if name != ACCUM]
    types = _operands(settled)
    shares = any(_is_of_heads(types[name], settled.problem) for name in names.values() if name in types)
    return Traffic(
        total(_bytes(each) for node in moving for each in (node, *filter(is_tensor, node.all_input_nodes))),
        total(map(_bytes, (*read, *results))),
        len(read) < len(names),
        ACCUM in computed,
        shares and not any(map(is_reduction, nodes)),
        _combines_columns(nodes, [node for node, name in names.items() if name in arriving], settled.problem),
    )


def _combines_columns(nodes: Sequence[FxNode], arriving: Sequence[FxNode], problem: Problem) -> bool:
    """Whether parts are taken of heads of values that are computed from gradients that arrive."""
    known, dims = set(arriving), 3 if problem.batched else 2
    for node in nodes:
        if not known.isdisjoint(node.all_input_nodes):
            known.add(node)
            if _takes_part(node) and value_of(node.all_input_nodes[0]).dim() > dims:
                return True
    return False


def _takes_part(node: FxNode) -> bool:
    return is_cut(node) or name_of(node) in ("select", "unbind")


def _operands(settled: Settled) -> Mapping[str, Type]:
    """The types of the operands by name."""
    graph = settled.structure.graph
    return {node.attr.name: graph.types[node] for node in graph.loads() if isinstance(node.attr, Load)}


_TILE = 256
"""The columns of the widest tile, which is also the widest head that a tile can hold."""


def _is_of_heads(type_: Type, problem: Problem) -> bool:
    """Whether all heads read the same elements of an operand, as the angles of a rotary embedding.

    Such an operand has rows, and columns for one head. Each tile of a launch loads them again. If the derivative has no
    reductions, Inductor's kernel is then faster: forward and backward of a rotary embedding take 0.90 to 0.98 of the
    time of torch.compile with it (derivatives_rotary_h200.json), and took 1.02 to 1.03 with a launch
    (derivatives_h200.json). With norms of heads before the rotation the derivative reduces, and the steps take 0.96 to
    1.00 with a launch.
    """
    factors = [factor for factor in type_.factors if factor.along == "n"]
    columns = prod(factor.size(problem.extents) for factor in factors)
    is_narrow = 1 < columns < min(problem.extents["n"], _TILE)
    return is_narrow and "m" in type_.axes and min(factor.stride for factor in factors) <= _NEIGHBOURS


_NEIGHBOURS = 2
"""The most neighbouring columns that share an element of such an operand: two, in a rotary embedding of pairs."""


def _bytes(node: FxNode) -> Size:
    while node.target is aten.expand.default:
        node = node.args[0]  # type: ignore[assignment]  # a node
    size: Size = node.meta[SIZE]
    return size
