"""The bytes that a derivative reads and writes: by PyTorch's operations one by one, by Inductor, and in one launch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from epifuse.frontend.fx import value_of
from epifuse.ir import Load, Type
from epifuse.plan.settle import Settled
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
    """The bytes that a derivative moves.

    `by_operations`: each operation reads its inputs and writes its result. `once`: each argument but accum is read
    once, each result is written once. `again_by_tiles`: what the tiles of a launch read once more. `again_by_sums`:
    what Inductor reads once more, without accum, in its own kernels for sums over rows. `reads_accum` and
    `computes_accum` say whether accum is read and whether its gradient is computed.
    """

    by_operations: Size
    once: Size
    again_by_tiles: Size
    again_by_sums: Size
    reads_accum: bool
    computes_accum: bool

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

    def pays_in_tiles(self, problem: Problem) -> bool:
        """Whether the tiles of a launch read no more than Inductor's kernels.

        Angles that heads share are read by each tile. On an H200 the derivative of a rotary embedding of 8192 x 8192
        took 148 us in a launch and 75 us by Inductor.
        """
        extents = problem.extents
        accum = extents["l"] * extents["m"] * extents["n"] * problem.a.dtype.itemsize * self.reads_accum
        by_sums = at_extents(self.again_by_sums, extents) + accum if self.again_by_sums else 0
        return at_extents(self.again_by_tiles, extents) <= by_sums


def traffic(module: GraphModule, names: Mapping[FxNode, str], settled: Settled, computed: Collection[str]) -> Traffic:
    """The traffic of `module`, which computes the gradients of the operands `computed` (or of accum).

    `names` are those of its arguments that are tensors.
    """
    nodes = [node for node in module.graph.nodes if is_tensor(node) and node.op == "call_function"]
    moving = [node for node in nodes if node.target not in _VIEWS]
    results = next(node for node in module.graph.nodes if node.op == "output").args[0]
    read = {name: node for node, name in names.items() if name != ACCUM}
    sizes, types = {name: _bytes(node) for name, node in read.items()}, _operands(settled)
    shared = [name for name in read if name in types and _is_shared_by_heads(types[name], settled.problem)]
    summed = any("m" not in types[name].axes for name in computed if name in types)
    return Traffic(
        total(_bytes(each) for node in moving for each in (node, *filter(is_tensor, node.all_input_nodes))),
        total((*sizes.values(), *map(_bytes, results))),
        total({(1, 1, 1): value_of(read[name]).element_size()} for name in shared),
        total(sizes.values()) if summed else {},
        len(read) < len(names),
        ACCUM in computed,
    )


def _operands(settled: Settled) -> Mapping[str, Type]:
    """The types of the operands by name."""
    graph = settled.structure.graph
    return {node.attr.name: graph.types[node] for node in graph.loads() if isinstance(node.attr, Load)}


def _is_shared_by_heads(type_: Type, problem: Problem) -> bool:
    """Whether an operand has a row for each row of accum and fewer columns than a tile, as angles that heads share.

    Tiles side by side then read the same elements.
    """
    columns = prod(factor.size(problem.extents) for factor in type_.factors if factor.along == "n")
    return "m" in type_.axes and 1 < columns < min(problem.extents["n"], _TILE)


_TILE = 256
"""The columns of the widest tile, which is also the widest head that a tile can hold."""


def _bytes(node: FxNode) -> Size:
    while node.target is aten.expand.default:
        node = node.args[0]  # type: ignore[assignment]  # a node
    size: Size = node.meta[SIZE]
    return size
