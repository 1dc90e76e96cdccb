"""A request computed by ATen operations, which PyTorch sees while it traces, transforms or differentiates a call.

Checks, dtypes and the store rule are those of the fused path. The product is rounded to the dtype of A if that dtype
has 16 bits, as in PyTorch's own product. Operations after the product compute in float32, or in float64 if the
accumulator is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from epifuse.base.dtypes import BY_TORCH, Kind
from epifuse.base.errors import fail, kind_of
from epifuse.ir import Node
from epifuse.plan.settle import settle
from epifuse.providers.cpu.store import storable
from epifuse.pytorch.fitting import check_integers
from epifuse.pytorch.interpret import interpret
from epifuse.pytorch.storing import FLOATS
from epifuse.request.problem import TensorInfo, dense
from epifuse.request.scaled import dequantised
from epifuse.request.signature import Call, Request, everything_given


def is_traced(*values: Any) -> bool:
    """Whether PyTorch has to see ATen operations on these values: in dispatch modes, transforms, tracing and
    forward-mode AD, and if a value is a fake or functional tensor. Tensor subclasses of users do not count."""
    if (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0  # type: ignore[no-untyped-call]  # untyped
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    ):
        return True
    return any(isinstance(value, (FakeTensor, FunctionalTensor)) for value in values)


def is_selective() -> bool:
    """Whether selective activation checkpointing is active. It counts the operations of a forward pass and of its
    recomputation. The counts would differ, because a prepared launch runs other operations than the first launch."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return any(type(mode).__module__ == checkpoint.__name__ for mode in _get_current_dispatch_mode_stack())


Reduced = Callable[[torch.Tensor], torch.Tensor]
"""Returns the whole accum for the part that this process has computed."""


def traced(request: Request, reduced: Reduced | None = None) -> dict[str, torch.Tensor]:
    """Return the outputs by name, computed by ATen operations.

    `reduced` is None if this process computes all of accum. An output that is accumulated onto is one of the request's
    given tensors; the sum is returned, and the given tensor is not written. Raises the errors of the fused path for
    shapes, dtypes and kinds.
    """
    request.options.check()
    given = everything_given(request)
    _check_recorded(request, given)
    problem, structure = settle(_described(request, given))
    a, b = dequantised(request.a, request.b, given) if problem.scales else (request.a, request.b)
    accum = _product(a, b, problem.accumulator)
    if reduced is not None:  # rounded to the dtype in which PyTorch's own product would be sent to other processes
        sent = request.a.dtype if request.a.dtype.itemsize == 2 else accum.dtype
        accum = reduced(accum.to(sent)).to(accum.dtype)
    check_integers(structure.graph, problem, accum, given)
    inputs = {name: value for name, value in given.items() if name not in request.parsed.output_names}
    values = interpret(request.parsed.graph, accum, inputs)
    dtypes, accumulated = dict(problem.dtypes), dict(problem.accumulated)
    seen: set[Node] = set()
    outputs = {}
    for name, node, *_ in request.parsed.graph.outputs:
        value = values[name]
        if name in accumulated:
            held = given[name]
            # PyTorch cannot promote floats of 8 bits.
            wide = value.dtype if held.dtype.itemsize == 1 else torch.promote_types(value.dtype, held.dtype)
            value = held.to(wide) + value.reshape(held.shape)
        value = storable(value, dtypes[name]).to(dtypes[name])
        # ATen keeps the strides of a permuted value. Kernels allocate contiguous outputs, and a trace has to match.
        is_kept = _is_new(node, seen) and value.is_contiguous()
        outputs[name] = value if is_kept else value.clone(memory_format=torch.contiguous_format)
    return outputs


def _check_recorded(request: Request, given: Mapping[str, Any]) -> None:
    """Raise for an input of 8 bits that requires grad, as the fused path does: its gradient would have 8 bits, too.

    An export is not checked. Autograd does not record it, and parameters in it require grad by default.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_exporting():
        products = zip(request.names, (request.a, request.b), strict=True)
        for name, value in (*products, *given.items()):
            if isinstance(value, torch.Tensor) and value.requires_grad and value.dtype not in FLOATS:
                raise fail("grad_dtype", None, name=name, dtype=value.dtype)


def dtypes_of(request: Request) -> dict[str, torch.dtype]:
    """Return the dtypes of the outputs by name. Raises the errors of `traced`. Tensors may have no data."""
    request.options.check()
    return dict(settle(_described(request, everything_given(request))).problem.dtypes)


def _is_new(node: Node, seen: set[Node]) -> bool:
    """Whether an output's value is dense and has its own memory: it is no view, and no earlier output is the same.

    `seen` are the values of earlier outputs; the value is added to it.
    """
    while node.op in _SAME:
        node = node.args[0]
    known = node in seen
    seen.add(node)
    return not known and node.op not in _VIEWS and node.attr != "mln"


_SAME = ("cast", "cast_like", "assume_one_hot", "debug_print", "number", "rounded_like", "tensor", "torch")
_VIEWS = ("load", "access", "permute", "reshape", "unsqueeze", "part", "rearrange", "expand_as", "select")


def _product(a: torch.Tensor, b: torch.Tensor, accumulator: torch.dtype) -> torch.Tensor:
    if accumulator == torch.int32:  # float64 holds every sum of products of 8-bit integers; one beyond int32 wraps
        return torch.matmul(a.to(torch.float64), b.to(torch.float64)).to(torch.int64).to(torch.int32)
    if a.dtype.itemsize == 1:
        return torch.matmul(a.to(torch.float32), b.to(torch.float32))
    b = b if b.dtype == a.dtype else b.to(a.dtype)
    return torch.matmul(a, b).to(torch.float64 if accumulator == torch.float64 else torch.float32)


# --- checks ----------------------------------------------------------------------------------------------------------


def _described(request: Request, given: Mapping[str, Any]) -> Call:
    """The call as planning sees it. Tensors may have no data, and a symbolic size counts as its hint."""
    infos = [_info(request.names[0], request.a), _info(request.names[1], request.b)]
    tensors: dict[str, Any] = {}
    kinds: dict[str, Kind] = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and (value.dim() or not value.is_cpu or name in request.parsed.output_names):
            tensors[name] = value
            infos.append(_info(name, value))
        else:
            kinds[name] = _kind(name, value)
    return Call(request, (), tensors, {}, [None] * len(infos), kinds, tuple(infos))


def _info(name: str, tensor: Any) -> TensorInfo:
    if not isinstance(tensor, torch.Tensor):
        raise fail("tensor_type", None, name=name, type=kind_of(tensor), hint="")
    shape = tuple(map(_hint, tensor.shape))
    return TensorInfo(shape, dense(shape), tensor.dtype, str(tensor.device))


def _hint(extent: Any) -> int:
    """The current value of a size. A size that depends on data is `_ANY`: the rules only ask whether a size is 1."""
    if not isinstance(extent, torch.SymInt):
        return int(extent)  # under torch.jit sizes are tensors
    hint = extent.node.hint
    return _ANY if hint is None else int(hint)


_ANY = 64


def _kind(name: str, value: Any) -> Kind:
    if isinstance(value, torch.Tensor):
        if value.dtype not in BY_TORCH:
            raise fail("operand_dtype", None, name=name, dtype=value.dtype)
        kind = BY_TORCH[value.dtype].loads_as
        return "int" if kind in ("int32", "int64") else kind
    if isinstance(value, (bool, torch.SymBool)):
        return "mask"
    return "int" if isinstance(value, (int, torch.SymInt)) else "float"
