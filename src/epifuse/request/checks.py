"""Checks of what the caller passes: numbers, plain tensors, A and B, operands. Each raises before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from epifuse.base.dtypes import ACCUMULATORS, BY_TORCH, accumulators, multiplied_as
from epifuse.base.errors import fail, kind_of
from epifuse.frontend import Parsed
from epifuse.frontend.hints import argument_hint
from epifuse.ir import Kind
from epifuse.request.problem import TensorInfo

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of plain tensors. A tensor of another type may behave in its own way."""


class Number(NamedTuple):
    """A run-time number and its kind."""

    value: Any
    kind: Kind


def host_number(name: str, value: Any) -> Number:
    """`value` as a host number: a number, a NumPy scalar, or a tensor without dims on the CPU. Raises for all else."""
    if isinstance(value, torch.Tensor):
        check_tensor(f"operand '{name}'", value, None)
        if value.dtype not in BY_TORCH:
            raise fail("operand_dtype", None, name=name, dtype=value.dtype)
        kind = BY_TORCH[value.dtype].loads_as
        number = None if isinstance(value, FakeTensor) else value.item()
        return Number(number, "int" if kind in ("int32", "int64") else kind)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return Number(value, "mask")
    if isinstance(value, int):
        return Number(value, "int")
    if isinstance(value, float):
        return Number(value, "float")
    raise fail("operand_type", None, name=name, type=kind_of(value), hint=_conversion(value))


def check_tensor(name: str, tensor: Any, device: torch.device | None) -> None:
    """Raise unless `tensor` is a plain dense tensor that requires no grad, on `device` if that is given."""
    check_plain(name, tensor, device)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise fail("requires_grad", None, name=name)


def check_plain(name: str, tensor: Any, device: torch.device | None) -> None:
    """Raise unless `tensor` is a plain dense tensor, on `device` if that is given."""
    if not isinstance(tensor, torch.Tensor):
        raise fail(
            "tensor_type", None, name=name, type=kind_of(tensor), hint="" if tensor is None else _conversion(tensor)
        )
    if type(tensor) in PLAIN and _is_wrapped(tensor):
        raise fail("transformed", None, name=name)
    if type(tensor) not in (*PLAIN, FakeTensor):
        raise fail("tensor_subclass", None, name=name, type=kind_of(tensor))
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_neg():
        raise fail("tensor_layout", None, name=name, **_layout(tensor))
    if device is not None and tensor.device != device:
        raise fail("device", None, name=name, device=tensor.device, expected=device, shown="x")


def shape_of(name: str, tensor: torch.Tensor) -> torch.Size:
    """The shape of a dense tensor, which can then be viewed in other dims. Raises for all else."""
    dense = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    if not dense or tensor.is_quantized or tensor.is_nested:
        check_plain(name, tensor, None)
    return tensor.shape


def _conversion(value: object) -> str:
    """A hint how to make a tensor from `value`, or the empty string."""
    if isinstance(value, np.ndarray):
        return "torch.from_numpy(x) shares its memory"
    if isinstance(value, torch.fx.Proxy):
        return "torch.fx.symbolic_trace records no call of epifuse; torch.export, torch.compile and make_fx do"
    if isinstance(value, torch.nn.Module):
        return "a module is none: pass the tensors that it holds, as layer.weight and layer.bias"
    if callable(value):
        return "pass an epilogue by its name: epilogue=fn"
    if value is None:
        return "an operand that may be left out has None as its default in the epilogue"
    return "torch.tensor(x) makes one" if isinstance(value, (list, tuple)) else ""


def _layout(tensor: torch.Tensor) -> dict[str, str]:
    """For a tensor that is not plain: what it is, and a hint how to make it plain."""
    if tensor.is_nested:
        return {"what": "nested", "hint": "pad it, or call once for each part"}
    if tensor.is_quantized:
        return {"what": "quantised", "hint": "x.dequantize(), or its int8 values x.int_repr()"}
    if tensor.layout is torch.strided:
        return {"what": "a negated view", "hint": "x.resolve_neg()"}
    return {"what": str(tensor.layout), "hint": "x.to_dense()"}


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """True inside vmap and other functorch transforms, and in a backward that takes many gradients at once."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def check_names(parsed: Parsed, given: Iterable[str]) -> None:
    """Raise for a name in `given` that is neither an operand nor an output of the epilogue."""
    for name in given:
        if name not in parsed.parameters and name not in parsed.output_names:
            shown = (", ".join(parsed.parameters) or "none", ", ".join(parsed.output_names))
            hint = argument_hint(name, (*parsed.parameters, *parsed.output_names))
            raise fail("extra_operand", None, name=name, operands=shown[0], outputs=shown[1], hint=hint)


def check_device(name: str, info: TensorInfo, expected: str, shown: str = "x") -> None:
    """Raise unless a tensor is on the device `expected`. `shown` is the tensor's name in the hint."""
    if info.device != expected:
        raise fail("device", None, name=name, device=info.device, expected=expected, shown=shown)


_VECTOR = "a vector is one row of A, x[None], or one column of B, x[:, None]"


def check_product(a: TensorInfo, b: TensorInfo, accumulator: torch.dtype | None, names: tuple[str, str]) -> None:
    """Raise unless A is (M,K) or (L,M,K), B is (K,N) or (L,K,N), and their dtypes can be multiplied into `accumulator`.
    `names` are the caller's names of A and B."""
    check_device(names[1], b, a.device)
    for name, info, rows, columns in ((names[0], a, "M", "K"), (names[1], b, "K", "N")):
        if len(info.shape) not in (2, 3):
            count, hint = ("2 dims at least", _VECTOR) if len(info.shape) < 2 else ("2 or 3 dims", "")
            raise fail("rank", None, name=name, count=count, rows=rows, columns=columns, shape=info.shape, hint=hint)
    if a.shape[-1] != b.shape[-2]:
        raise fail("inner_extent", None, a=a.shape, b=b.shape, k_a=a.shape[-1], k_b=b.shape[-2])
    if len(a.shape) == len(b.shape) == 3 and a.shape[0] != b.shape[0] and 1 not in (a.shape[0], b.shape[0]):
        raise fail("batch_extent", None, a=a.shape, b=b.shape)
    for name, info in zip(names, (a, b), strict=True):
        if info.dtype not in ACCUMULATORS:
            raise fail("gemm_dtype", None, name=name, dtype=info.dtype)
    if multiplied_as(a.dtype, b.dtype) is None:
        key, hint = "gemm_dtypes", _mixing(a.dtype, b.dtype, *names)
        if multiplied_as(b.dtype, a.dtype) is not None:
            first, second = names
            turned = second if second == "weight" else f"{second}.mT"
            key, hint = "gemm_narrow_a", f"compute the transpose: ef.gemm({turned}, {first}.mT) and an epilogue for it"
        raise fail(key, None, first=names[0], second=names[1], a=a.dtype, b=b.dtype, hint=hint)
    if accumulator is None:
        return
    if not isinstance(accumulator, torch.dtype):
        raise fail("option", None, name="accumulator_type", want="a torch dtype", value=accumulator)
    allowed = accumulators(a.dtype, b.dtype)
    if accumulator not in allowed:
        raise fail("accumulator", None, dtype=accumulator, a=a.dtype, b=b.dtype, allowed=", ".join(map(str, allowed)))


def _mixing(a: torch.dtype, b: torch.dtype, first: str, second: str) -> str:
    """A hint for two dtypes that cannot be multiplied."""
    if b.itemsize == 1 and a.itemsize > 1:
        return f"{second} of 8 bits needs {first} in bfloat16 or float16: {first}.to(torch.bfloat16)"
    allowed = f"two dtypes of fp8, int8 beside uint8, and {second} of 8 bits beside {first} of 16 bits"
    return f"cast one of them with .to(dtype); these may differ without a cast: {allowed}"


def check_operand(name: str, info: TensorInfo, device: str, accumulator: torch.dtype) -> None:
    """Raise unless the epilogue can load this operand."""
    check_device(f"operand '{name}'", info, device)
    if info.dtype not in BY_TORCH:
        raise fail("operand_dtype", None, name=name, dtype=info.dtype)
    if info.dtype == torch.float64 and accumulator != torch.float64:
        raise fail("operand_float64", None, name=name, accumulator=accumulator)


def check_accumulated(name: str, info: TensorInfo, device: str, accumulator: torch.dtype) -> None:
    """Raise unless the epilogue can load the content of this destination and add onto it."""
    check_device(f"output '{name}'", info, device)
    wide = info.dtype == torch.float64 and accumulator != torch.float64
    if info.dtype not in BY_TORCH or wide:
        raise fail("accumulate_dtype", None, name=name, dtype=info.dtype, accumulator=accumulator)


def check_declared(name: str, dtype: torch.dtype, parsed: Parsed) -> None:
    """Raise if the epilogue itself declares another dtype for an operand, an output or the accumulator."""
    want = parsed.dtypes.get(name, dtype)
    if want != dtype:
        raise fail("declared_dtype", None, name=name, dtype=dtype, epilogue=parsed.name, want=want)
