"""Dropout without stored masks: the backward pass draws the same numbers again, from the seed.

A pass over the graph of forward and backward together, behind the one in which TorchInductor gives each random tensor
its seed. It only marks what PyTorch's partitioner is to compute a second time; products then take that in.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch._inductor.inductor_prims  # registers prims.inductor_random
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph as FxGraph
from torch.fx import Node as FxNode
from torch.utils.checkpoint import CheckpointPolicy

from epifuse.base import store
from epifuse.frontend.fx import numbers_of
from epifuse.pytorch.cone import is_cast, name_of

_COMPARED = ("gt", "ge", "lt", "le")


class DrawAgain(CustomGraphPass):
    """The pass: masks that compare random numbers with a number are drawn where they are used."""

    def uuid(self) -> str:
        """It depends on epifuse's sources alone."""
        return store.key_of("draw masks again")

    def __call__(self, graph: FxGraph) -> None:
        """Mark in place."""
        for node in list(graph.nodes):
            if name_of(node) == "inductor_random" and numbers_of(node):
                for mask in list(_masks(node)):
                    _compare_unrounded(mask, node)
                    for each in (node, mask, node.args[1]):
                        each.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        graph.eliminate_dead_code()


def _masks(node: FxNode) -> Iterator[FxNode]:
    """What compares the random numbers with a number, casts looked through."""
    for user in node.users:
        if is_cast(user):
            yield from _masks(user)
        elif name_of(user) in _COMPARED and not isinstance(user.args[1], FxNode):
            yield user


def _compare_unrounded(mask: FxNode, numbers: FxNode) -> None:
    """Compare the numbers as they were drawn, which both graphs then do.

    TorchInductor rounds no number that is cast to 16 bits for a comparison; its C++ rounds what they are compared with.
    """
    cast, limit = mask.args[:2]
    value = cast.meta["val"]  # type: ignore[union-attr]  # a node
    if value.device.type == "cpu":
        limit = torch.tensor(limit, dtype=value.dtype, device="cpu").item()
    mask.args = (numbers, limit)
