"""Whether a derivative is discontinuous in a value that is computed from accum."""

from __future__ import annotations

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from epifuse.pytorch.symbols import is_tensor

_DECIDING = frozenset(
    (
        *("eq", "ne", "lt", "le", "gt", "ge", "sign", "sgn", "threshold_backward", "leaky_relu_backward"),
        *("elu_backward", "hardtanh_backward", "hardswish_backward", "hardsigmoid_backward"),
    )
)


def has_step(module: GraphModule, accum: FxNode) -> bool:
    """Whether `module` compares a value that is computed from `accum`, so that its result jumps where that crosses a
    bound. A comparison of accum itself, or of its relu, does not count: PyTorch would round accum before it too."""
    own = {accum}
    made = {accum}
    for node in filter(is_tensor, module.graph.nodes):
        if not (below := made.intersection(node.all_input_nodes)):
            continue
        made.add(node)
        if node.target is torch.ops.aten.relu.default and below <= own:
            own.add(node)
        elif not below <= own and node.target._schema.name.removeprefix("aten::") in _DECIDING:
            return True
    return False
