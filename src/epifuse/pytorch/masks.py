"""Dropout without stored masks: the backward pass draws the same numbers again, from the seed.

This pass runs on the joint graph of forward and backward, after the pass in which TorchInductor gives each random
tensor its seed. It only marks the nodes that PyTorch's partitioner has to compute again in the backward pass. The
epilogues of products there then take these nodes in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch._inductor.inductor_prims  # registers prims.inductor_random
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph as FxGraph
from torch.fx import Node as FxNode
from torch.utils.checkpoint import CheckpointPolicy

from epifuse.base import store
from epifuse.frontend.fx import numbers_of
from epifuse.pytorch.cone import is_cast, name_of

_COMPARED = ("gt", "ge", "lt", "le")


@dataclass(frozen=True)
class DrawAgain(CustomGraphPass):
    """The pass. A mask that compares random numbers with a constant is computed in each graph that uses it."""

    def uuid(self) -> str:
        """The key of the pass in PyTorch's caches. The pass depends on epifuse's sources alone."""
        return store.key_of("draw masks again")

    def __call__(self, graph: FxGraph) -> None:
        """Mark the nodes to recompute in `graph`, in place."""
        for node in list(graph.nodes):
            if name_of(node) == "inductor_random" and numbers_of(node):
                for mask in list(_masks(node)):
                    _compare_unrounded(mask, node)
                    for each in (node, mask, node.args[1]):
                        each.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        stable_topological_sort(graph)  # Inductor's pattern of attention leaves the graph out of order here
        graph.eliminate_dead_code()


def _masks(node: FxNode) -> Iterator[FxNode]:
    """Yield the nodes that compare the random numbers `node`, or a cast of them, with a constant."""
    for user in node.users:
        if is_cast(user):
            yield from _masks(user)
        elif name_of(user) in _COMPARED and not isinstance(user.args[1], FxNode):
            yield user


def _compare_unrounded(mask: FxNode, numbers: FxNode) -> None:
    """Have `mask` compare the float32 random numbers, not a cast of them, so that both graphs compare the same values.

    TorchInductor does not round numbers that are cast to 16 bits only for a comparison. Its C++ code does round the
    limit that they are compared with, so on a CPU the limit is rounded here.
    """
    cast, limit = mask.args[:2]
    value = cast.meta["val"]  # type: ignore[union-attr]  # a node
    if value.device.type == "cpu":
        limit = torch.tensor(limit, dtype=value.dtype, device="cpu").item()
    mask.args = (numbers, limit)
