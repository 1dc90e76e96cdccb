"""A compiler pass that removes the mask of an attention call if the mask lets every key through.

PyTorch chooses the kernel of `scaled_dot_product_attention` before it differentiates, and several kernels refuse a
mask. A library may pass a mask in a compiled model that it leaves out in eager mode: transformers 5.17 does so for BERT
and ViT.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph as FxGraph
from torch.fx import Node as FxNode
from torch.fx import map_arg
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _disable_current_modes

from epifuse.base import store

_FUNCTIONS = {
    *(torch.arange, torch.ones, torch.full, torch.logical_and, torch.logical_or, torch.logical_not, torch.where),
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg),
    *(operator.and_, operator.or_, operator.invert, operator.getitem),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
}
_METHODS = {"expand", "view", "reshape", "unsqueeze", "squeeze", "transpose", "bool", "contiguous"}
_ALIASES = {*_METHODS, operator.getitem}  # their results may share memory with their inputs
_MASK = 3  # the position of `attn_mask` among the arguments
_MOST_BYTES = 1 << 26


@dataclass(frozen=True)
class LeaveOutFullMasks(CustomGraphPass):
    """The pass over the graph that Dynamo made. It removes each mask that is made of constants and holds only True."""

    def uuid(self) -> str:
        """The cache key of the pass, which depends on epifuse's sources alone."""
        return store.key_of("leave out full masks")

    def __call__(self, graph: FxGraph) -> None:
        """Change the graph in place. Nodes that computed only a removed mask stay, without users."""
        full: dict[FxNode, bool] = {}
        for node in graph.nodes:
            if node.target is scaled_dot_product_attention and isinstance(mask := _mask_of(node), FxNode):
                if mask not in full:
                    full[mask] = _is_full(mask)
                if full[mask] and _fits(mask, node):
                    _leave_out(node)


def _mask_of(attention: FxNode) -> Any:
    positional = attention.args[_MASK] if len(attention.args) > _MASK else None
    return attention.kwargs.get("attn_mask", positional)


def _leave_out(attention: FxNode) -> None:
    if "attn_mask" in attention.kwargs:
        attention.update_kwarg("attn_mask", None)
    else:
        attention.update_arg(_MASK, None)


def _fits(mask: FxNode, attention: FxNode) -> bool:
    """Whether the mask adds no batch dims to those of the query, so that the result has the same shape without it."""
    query = attention.args[0] if attention.args else attention.kwargs.get("query")
    if not isinstance(query, FxNode) or not isinstance(value := query.meta.get("example_value"), torch.Tensor):
        return False
    batches, own = mask.meta["example_value"].shape[:-2], value.shape[:-2]
    if len(batches) > len(own):
        return False
    pairs = zip(reversed(batches), reversed(own), strict=False)
    return all(extent == 1 or (isinstance(there, int) and extent == there) for extent, there in pairs)


def _is_full(mask: FxNode) -> bool:
    """Whether the mask is computed from constants, no other node can have written to it, and all of it is True."""
    nodes = _with_sources(mask)
    if not all(_is_constant(node) for node in nodes) or not all(map(_only_reads, _users_of_memory(nodes))):
        return False
    values: dict[FxNode, Any] = {}
    with torch.no_grad(), _disable_current_modes():
        for node in nodes:
            values[node] = _value(node, values)
    value = values[mask]
    if not isinstance(value, torch.Tensor) or value.dtype != torch.bool:
        return False
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in value.stride())
    return bool(value[once].all())


def _with_sources(node: FxNode) -> list[FxNode]:
    """Return `node` and all nodes that it is computed from, in the graph's order."""
    found, waiting = {node}, [node]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return [each for each in node.graph.nodes if each in found]


def _is_constant(node: FxNode) -> bool:
    """Whether the node calls a function that can be evaluated while compiling, and its value takes little memory."""
    known = node.target in (_METHODS if node.op == "call_method" else _FUNCTIONS)
    if node.op not in ("call_method", "call_function") or not known or "example_value" not in node.meta:
        return False
    if "out" in node.kwargs:
        return False
    value = node.meta["example_value"]
    return not isinstance(value, torch.Tensor) or value.untyped_storage().nbytes() <= _MOST_BYTES


def _users_of_memory(nodes: list[FxNode]) -> set[FxNode]:
    """The nodes that take one of `nodes`, or an alias of one, as an argument."""
    found: set[FxNode] = set()
    waiting = list(nodes)
    while waiting:
        new = set(waiting.pop().users) - found
        found |= new
        waiting += [user for user in new if user.target in _ALIASES]
    return found


def _only_reads(user: FxNode) -> bool:
    known = user.target is scaled_dot_product_attention or user.target in (_FUNCTIONS | _METHODS)
    return known and "out" not in user.kwargs


def _value(node: FxNode, values: Mapping[FxNode, Any]) -> Any:
    """Compute the value of a constant node on the CPU; `values` has those of its inputs."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)  # type: ignore[arg-type]  # its name
    return node.target(*args, **kwargs)  # type: ignore[operator]  # a function
