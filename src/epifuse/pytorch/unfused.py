"""A derivative that PyTorch runs, because no launch of a fused kernel computes it.

Inductor compiles it, or it runs one operation at a time: then without casts that the operations do not need, and by the
calls that cost the host the least time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C._functorch import is_legacy_batchedtensor
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from epifuse.frontend.fx import value_of
from epifuse.pytorch.symbols import is_tensor
from epifuse.request.signature import needs_care

aten = torch.ops.aten

_PROMOTING = frozenset(
    (
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
        *(aten.gelu_backward.default, aten.silu_backward.default, aten.sigmoid_backward.default),
        *(aten.tanh_backward.default, aten.threshold_backward.default),
    )
)
"""Operations that convert their operands while reading them, to the widest dtype of the operands that have dims."""

_CALLS: Mapping[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.sum.dim_IntList: torch.sum,
}
"""The function to call for an overload of ATen: calling the overload costs the host a microsecond more."""


_BY_ONEDNN = frozenset((aten.gelu_backward.default,))
"""Operations that oneDNN runs on a CPU. With operands of different dtypes PyTorch's own loop runs, which takes a
quarter longer."""


def leave_out_casts(module: GraphModule, accum: FxNode | None, device: str) -> bool:
    """Remove casts to a wider dtype that the operations do themselves. Returns whether `accum` may be narrower too."""
    promoting = _PROMOTING - _BY_ONEDNN if device == "cpu" else _PROMOTING
    narrow: set[FxNode] = set()
    for node in list(module.graph.nodes):
        if node.target not in promoting:
            continue
        operands = list(dict.fromkeys(arg for arg in node.args if _has_dims(arg)))
        wide = [arg for arg in operands if value_of(arg).dtype == value_of(node).dtype]
        cast = [arg for arg in wide if arg is accum or _widens(arg)]
        if len(cast) == len(wide):  # one operand has to stay wide so that the result is: the smallest
            cast.sort(key=lambda arg: value_of(arg).numel())
            del cast[:1]
        for arg in cast:
            if arg is accum:
                narrow.add(node)
            else:
                node.replace_input_with(arg, arg.args[0])
    module.graph.eliminate_dead_code()
    module.recompile()
    return accum is not None and narrow.issuperset(accum.users)


def _has_dims(arg: Any) -> bool:
    return isinstance(arg, FxNode) and is_tensor(arg) and value_of(arg).dim() > 0


def _widens(node: FxNode) -> bool:
    if node.target is not aten._to_copy.default:
        return False
    (x,) = node.all_input_nodes
    # PyTorch's operations do not convert operands of 8 bits.
    return value_of(x).is_floating_point() and 1 < value_of(x).dtype.itemsize < value_of(node).dtype.itemsize


def call_directly(module: GraphModule) -> None:
    """Replace ATen overloads in the graph by PyTorch's functions and methods, which are faster to call."""
    for node in module.graph.nodes:
        if node.target is aten._to_copy.default and node.kwargs.get("dtype") is not None:
            node.op, node.target = "call_method", "to"
            node.args, node.kwargs = (node.args[0], node.kwargs["dtype"]), {}
        elif node.target in _CALLS:
            node.target = _CALLS[node.target]
    module.recompile()


class ByInductor:
    """A graph that Inductor compiles when it first runs, with results in the given dtypes.

    Inside of vmap and under tracing modes it runs uncompiled. Once Inductor has failed, for example because Triton is
    missing, a warning is given and it always runs uncompiled.
    """

    def __init__(self, module: GraphModule, dtypes: tuple[torch.dtype, ...]) -> None:
        graph = Graph()
        results: Any = graph.graph_copy(module.graph, {})
        graph.output(tuple(graph.call_method("to", pair) for pair in zip(results, dtypes, strict=True)))
        # Dynamo limits recompilations for each code object, and each GraphModule has a code object of its own.
        self.forward: Callable[..., Any] = GraphModule(module, graph).forward
        self.compiled: Callable[..., Any] | None = None
        self.failed = False

    def __call__(self, *arguments: Any) -> Any:
        """The results of the graph."""
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        if self.failed or needs_care() or any(map(is_legacy_batchedtensor, tensors)):
            return self.forward(*arguments)
        try:
            if self.compiled is None:
                self.compiled = torch.compile(self.forward)
            return self.compiled(*arguments)
        except RuntimeError as error:
            if self.compiled is not None and not isinstance(error, torch._dynamo.exc.TorchDynamoException):
                raise  # an error of running the graph and not of compiling it, for example out of memory
            self.failed = True
            first = str(error).replace("raised:\n", "raised: ").partition("\n")[0]
            warnings.warn(f"Inductor compiles no derivative, so it runs one operation at a time: {first}", stacklevel=2)
            return self.forward(*arguments)
