"""Checks of what a person hands over: tensors, dtypes, devices, overlap. Each raises before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from epifuse.dtypes import ACCUMULATORS, BY_TORCH, is_storable
from epifuse.errors import EpifuseError, fail, kind_of
from epifuse.frontend import Parsed
from epifuse.ir import Dims, Graph, Kind, Load, Output
from epifuse.ir.graph import topological
from epifuse.ir.types import Dim, dim_size, factors_of, shape_of
from epifuse.passes.kinds import const_kind
from epifuse.passes.spelling import reductions_under, spelled
from epifuse.problem import Problem, has_memory


class Number(NamedTuple):
    """A run-time number and its kind."""

    value: Any
    kind: Kind


def host_number(name: str, value: Any) -> Number | None:
    """`value` as a host number: numbers, NumPy scalars, 0-d CPU tensors. None for other tensors."""
    captured = name.startswith("@")
    if isinstance(value, torch.Tensor):
        if value.dim() or value.device.type != "cpu":
            return None
        check_tensor(f"operand '{name}'", value, None)
        if value.dtype not in BY_TORCH:
            raise fail("operand_dtype", None, name=name, dtype=value.dtype)
        if isinstance(value, FakeTensor):
            return Number(None, BY_TORCH[value.dtype].loads_as)
        number = value.item()
        return Number(number, const_kind(number))
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return Number(value, "mask")
    if isinstance(value, int) and captured:
        return Number(value, const_kind(value))
    if isinstance(value, (int, float)):
        try:
            return Number(float(value), "float")
        except OverflowError:
            shown = f"an integer of {int(value).bit_length()} bits"
            raise fail("host_number", None, name=name, value=shown) from None
    raise fail("operand_type", None, name=name, type=kind_of(value), hint=_conversion(value))


def check_tensor(name: str, tensor: Any, device: torch.device | None) -> None:
    """A plain dense tensor on `device` that wants no gradient."""
    if not isinstance(tensor, torch.Tensor):
        raise fail("tensor_type", None, name=name, type=kind_of(tensor), hint=_conversion(tensor))
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and _is_wrapped(tensor):
        raise fail("transformed", None, name=name)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
        raise fail("tensor_subclass", None, name=name, type=kind_of(tensor))
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_neg():
        raise fail("tensor_layout", None, name=name, **_layout(tensor))
    if tensor.requires_grad and torch.is_grad_enabled():
        raise fail("requires_grad", None, name=name)
    if device is not None and tensor.device != device:
        raise fail("device", None, name=name, device=tensor.device, expected=device)


def _conversion(value: object) -> str:
    """What makes a tensor of `value`."""
    if isinstance(value, np.ndarray):
        return "torch.from_numpy(x) shares its memory"
    return "torch.tensor(x) makes one" if isinstance(value, (list, tuple)) else ""


def _layout(tensor: torch.Tensor) -> dict[str, str]:
    """What a tensor is that is not plain, and what makes it so."""
    if tensor.is_nested:
        return {"what": "nested", "hint": "pad it, or call once for each part"}
    if tensor.is_quantized:
        return {"what": "quantised", "hint": "x.dequantize(), or its int8 values x.int_repr()"}
    if tensor.layout is torch.strided:
        return {"what": "a negated view", "hint": "x.resolve_neg()"}
    return {"what": str(tensor.layout), "hint": "x.to_dense()"}


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """True inside vmap and other functorch transforms."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def check_product(a: Any, b: Any, accumulator: torch.dtype | None, names: tuple[str, str]) -> None:
    """A (M,K) or (L,M,K) and B (K,N) or (L,K,N) of dtypes that multiply. `names` are what the caller calls them."""
    check_tensor(names[0], a, None)
    check_tensor(names[1], b, a.device)
    for name, tensor, rows, columns in ((names[0], a, "M", "K"), (names[1], b, "K", "N")):
        if tensor.dim() not in (2, 3):
            raise fail("rank", None, name=name, rows=rows, columns=columns, shape=tuple(tensor.shape))
    shapes = {"a": tuple(a.shape), "b": tuple(b.shape)}
    if a.shape[-1] != b.shape[-2]:
        raise fail("inner_extent", None, **shapes, k_a=a.shape[-1], k_b=b.shape[-2])
    if a.dim() == b.dim() == 3 and a.shape[0] != b.shape[0] and 1 not in (a.shape[0], b.shape[0]):
        raise fail("batch_extent", None, **shapes)
    for name, tensor in zip(names, (a, b), strict=True):
        if tensor.dtype not in ACCUMULATORS:
            raise fail("gemm_dtype", None, name=name, dtype=tensor.dtype)
    if a.dtype != b.dtype and not (
        a.dtype.itemsize == b.dtype.itemsize == 1 and a.is_floating_point() == b.is_floating_point()
    ):
        raise fail("gemm_dtypes", None, first=names[0], second=names[1], a=a.dtype, b=b.dtype)
    allowed = [dtype for dtype in ACCUMULATORS[a.dtype] if dtype in ACCUMULATORS[b.dtype]]
    if accumulator is not None and not isinstance(accumulator, torch.dtype):
        raise fail("option", None, name="accumulator_type", want="a torch dtype", value=accumulator)
    if accumulator is not None and accumulator not in allowed:
        raise fail("accumulator", None, dtype=accumulator, a=a.dtype, b=b.dtype, allowed=", ".join(map(str, allowed)))


def check_operand(name: str, tensor: torch.Tensor, device: torch.device, accumulator: torch.dtype) -> None:
    """An operand the epilogue can load."""
    check_tensor(f"operand '{name}'", tensor, device)
    if tensor.dtype not in BY_TORCH:
        raise fail("operand_dtype", None, name=name, dtype=tensor.dtype)
    if tensor.dtype == torch.float64 and accumulator != torch.float64:
        raise fail("operand_float64", None, name=name)


def check_accumulated(name: str, tensor: Any, device: torch.device, accumulator: torch.dtype) -> None:
    """A destination whose content an epilogue can load and add onto."""
    check_tensor(f"output '{name}'", tensor, device)
    wide = tensor.dtype == torch.float64 and accumulator != torch.float64
    if tensor.dtype not in BY_TORCH or wide:
        raise fail("accumulate_dtype", None, name=name, dtype=tensor.dtype, accumulator=accumulator)


def check_declared(name: str, dtype: torch.dtype, parsed: Parsed) -> None:
    """The dtype that the epilogue itself declares for an operand, an output or the accumulator, where it does."""
    want = parsed.dtypes.get(name, dtype)
    if want != dtype:
        raise fail("declared_dtype", None, name=name, dtype=dtype, epilogue=parsed.name, want=want)


def check_output(output: Output, tensor: Any, graph: Graph, problem: Problem) -> None:
    """A destination of the right shape, dtype and device whose elements have addresses of their own."""
    name = output.name
    check_tensor(f"output '{name}'", tensor, None)
    if str(tensor.device) != problem.a.device:
        raise fail("device", None, name=f"output '{name}'", device=tensor.device, expected=problem.a.device)
    if not is_storable(tensor.dtype):
        raise fail("output_dtype", None, name=name, dtype=tensor.dtype)
    want = shape_of(output.dims or (), problem.extents)
    if not _fits(tuple(tensor.shape), want, output, graph, problem):
        raise _misshapen(output, want, tuple(tensor.shape), graph, problem)
    if _overlaps_itself(tensor):
        raise fail("output_expanded", None, name=name)


def _misshapen(
    output: Output, want: tuple[int, ...], shape: tuple[int, ...], graph: Graph, problem: Problem
) -> EpifuseError:
    reductions = [spelled(node, problem) for node in reductions_under(output.node)]
    if graph.stages[output.node].kind != "finish" or not reductions:
        return fail("output_shape", None, name=output.name, want=want, shape=shape)
    shown = " and ".join(dict.fromkeys(f"{name}(x{dims})" for name, dims in reductions))
    accum = problem.accum_shape
    return fail("reduced_shape", None, name=output.name, reductions=shown, accum=accum, want=want, shape=shape)


def _fits(shape: tuple[int, ...], want: tuple[int, ...], output: Output, graph: Graph, problem: Problem) -> bool:
    """torch's shape; for a reduction also the keepdim shape, without leading ones, or (1,) for one number."""
    if shape == want:
        return True
    present = {axis for dim in output.dims or () for axis in (factor.axis for factor in dim)}
    # A reduction along one element is none by now.
    if graph.stages[output.node].kind != "finish" and any(problem.extents[a] != 1 for a in {*"lmn"} - present):
        return False
    kept = tuple(problem.extents[axis] if axis in present else 1 for axis in ("lmn" if problem.batched else "mn"))
    if len(factors_of(output.dims or ())) != len(present):
        return False
    return shape in [kept[start:] for start in range(len(kept)) if all(extent == 1 for extent in kept[:start])]


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent <= 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


def check_overlaps(
    product: Mapping[str, torch.Tensor],
    operands: Mapping[str, Any],
    outputs: Mapping[str, torch.Tensor],
    graph: Graph,
    problem: Problem,
) -> tuple[tuple[str, str], ...]:
    """Which output shares storage with which full operand; any other overlap of addresses is refused.

    `product` holds A and B by the names the caller has for them.
    """
    inputs = [(name, value, False) for name, value in product.items()]
    for name, value in operands.items():
        if name not in outputs and isinstance(value, torch.Tensor):
            inputs.append((name, value, True))
    aliases: dict[str, str] = {}
    for name, tensor in outputs.items():
        for other, value in outputs.items():
            if other != name and _touch(tensor, value):
                raise fail("overlap", None, first=name, second=other)
        for other, value, may_alias in inputs:
            if not _touch(tensor, value):
                continue
            if not may_alias or name in aliases or not _same_elements(name, tensor, other, value, graph, problem):
                raise fail("overlap", None, first=name, second=other)
            aliases[name] = other
    return tuple(aliases.items())


def _same_elements(
    name: str, tensor: torch.Tensor, other: str, value: torch.Tensor, graph: Graph, problem: Problem
) -> bool:
    """True if each element of the operand is read where, and only where, the output writes the same address.

    A finished vector is written after all tiles, but before other finished values that may read it.
    """

    def long(dims: Dims | None) -> list[Dim]:
        return [dim for dim in dims or () if dim_size(dim, problem.extents) != 1]

    output = next(output for output in graph.outputs if output.name == name)
    loads = [load.attr for load in graph.loads() if isinstance(load.attr, Load) and load.attr.name == other]
    return (
        _geometry(tensor) == _geometry(value)
        # A value that is the same for every row, column or batch is read again after it was written.
        and (
            is_written_once(output, problem)
            or (graph.stages[output.node].kind == "finish" and not _read_by_others(other, output, graph))
        )
        and all(long(load.dims) == long(output.dims) and not load.views for load in loads)
    )


def is_written_once(output: Output, problem: Problem) -> bool:
    """Whether no tile writes what another one wrote: the output varies over every axis of several elements."""
    return {axis for axis in "lmn" if problem.extents[axis] > 1} <= {f.axis for f in factors_of(output.dims or ())}


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where its elements lie; dims of one element place none."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.data_ptr(), tensor.dtype, *(dim for dim in dims if dim[0] != 1)


def _read_by_others(operand: str, output: Output, graph: Graph) -> bool:
    roots = (*(other.node for other in graph.outputs if other != output), *graph.effects)
    return any(isinstance(node.attr, Load) and node.attr.name == operand for node in topological(roots))


_WORK: Any = 100_000  # NumPy's stubs allow -1 and 0 only; its documentation any number


def _touch(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True if two tensors share an address; exact where NumPy can tell in reasonable time, else careful."""
    if x.numel() == 0 or y.numel() == 0 or not (has_memory(x) and has_memory(y)) or x.device != y.device:
        return False
    first, second = _extent(x), _extent(y)
    if first[1] <= second[0] or second[1] <= first[0]:
        return False
    try:
        return bool(np.shares_memory(_addresses(x), _addresses(y), max_work=_WORK))
    except np.exceptions.TooHardError:
        return True


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    last = sum(stride * (extent - 1) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))
    return start, start + (last + 1) * tensor.element_size()


class _Geometry:
    """Addresses without memory: NumPy compares the strides and never reads."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
        }


def _addresses(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.asarray(_Geometry(tensor))
