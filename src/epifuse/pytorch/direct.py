"""The function that Inductor's generated code calls for a leaf in place of an operator. It knows what it launches.

The dispatcher, the spec and the description of a call cost the host more time than a launch. At one place of generated
code all tensors have the same sizes, strides and dtypes in every call. So a call is identified by what may still
change: whether the tensors start at multiples of 16 bytes, and whether tf32 is allowed. For leaves see `leaves`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import float32, is_grad_enabled
from torch._C import _len_torch_dispatch_stack

from epifuse.pytorch import leaves
from epifuse.request.problem import tf32_allowed
from epifuse.request.signature import describe
from epifuse.runtime.launch import Prepared, Repeat, find

Launch = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], Any]


def place(spec: str) -> Launch:
    """Return the function for one place in generated code, where only the addresses of tensors differ between calls."""
    leaf = leaves.decoded(spec)
    known: dict[bool, Repeat] = {}
    parameters, names = leaf.parsed.parameters, [value.name for value in leaf.values]
    operator, single = leaves.leaf_operator(len(names)), len(names) == 1

    def launch(a: torch.Tensor, b: torch.Tensor, operands: Sequence[torch.Tensor]) -> Any:
        addresses, grad = a.data_ptr() | b.data_ptr(), is_grad_enabled()
        for operand in operands:
            addresses |= operand.data_ptr()
        tf32 = a.dtype is float32 and tf32_allowed()
        repeat = known.get(tf32)
        if repeat is None or addresses % 16 or (grad and _wants(a, b, operands)) or _len_torch_dispatch_stack():
            made = operator(a, b, operands, spec)
            if repeat is None and addresses % 16 == 0 and (found := _prepared(leaf, a, b, operands)) is not None:
                known[tf32] = found.repeated(parameters)
            return made
        outputs = repeat((a, b, *operands))
        return outputs[0] if single else tuple(outputs)

    return launch


def _wants(a: torch.Tensor, b: torch.Tensor, operands: Sequence[torch.Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in (a, b, *operands))


def _prepared(leaf: leaves.Leaf, a: torch.Tensor, b: torch.Tensor, operands: Sequence[torch.Tensor]) -> Prepared | None:
    """The prepared call of the call that has just run, if it serves every later call; else None."""
    if _len_torch_dispatch_stack():
        return None
    with torch.no_grad():
        call = describe(leaves.request(leaf, a, b, operands, {}))
    found = find(call)
    return found if isinstance(found, Prepared) and found.is_final and not found.kinds else None


# --- in Inductor ------------------------------------------------------------------------------------------------------


def register() -> None:
    """Have Inductor write calls of `place`'s functions for leaves without symbolic sizes, of operators for others.

    The hook is a private one of PyTorch 2.11 to 2.13. Without it each leaf costs the host several microseconds more.
    """
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
        from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    except ImportError:
        why = "this version of PyTorch's compiler has no place for its code"
        warnings.warn(f"epifuse's fused products are called through PyTorch's dispatcher: {why}", stacklevel=4)
        return

    def written(node: Any, writeline: Callable[[Any], None]) -> None:
        from torch._inductor.virtualized import V

        if V.graph.cpp_wrapper or V.graph.aot_mode or _has_symbols(node):
            writeline(ExternKernelAllocLine(V.graph.wrapper_code, node))
            return
        a, b, operands, spec = node.codegen_args()
        name = node.get_name()
        V.graph.wrapper_code.add_import_once("from epifuse.pytorch.direct import place as epifuse_place")
        V.graph.wrapper_code.add_import_once(f"epifuse_{name} = epifuse_place({spec})")
        writeline(f"{name} = epifuse_{name}({a}, {b}, {operands})")

    for count in range(1, leaves.MOST_OUTPUTS + 1):
        CUSTOM_EXTERN_KERNEL_CODEGEN.setdefault(
            f"torch.ops.epifuse.fused{count}.default", CustomCodegen(python=written)
        )


def _has_symbols(node: Any) -> bool:
    extents = [extent for value in node.inputs for extent in (*value.get_size(), *value.get_stride())]
    return any(getattr(extent, "free_symbols", ()) for extent in extents)
