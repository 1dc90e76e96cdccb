"""One call, described once: a flat signature that all checks and plans come from, and the values that only launching
reads.

Of addresses the signature holds what planning depends on: which are multiples of 16 bytes, and which are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from epifuse.base.dtypes import Kind
from epifuse.base.errors import fail
from epifuse.frontend import Parsed
from epifuse.request.checks import check_tensor, host_number
from epifuse.request.options import Options
from epifuse.request.problem import TensorInfo, has_memory, info, tf32_allowed
from epifuse.request.transports import Hint, without_hints

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Request(NamedTuple):
    """What a person asks for: A, B, the epilogue, its operands and destinations by name, and how it is to run.

    `names` are what errors call A and B.
    """

    a: Any
    b: Any
    parsed: Parsed
    given: Mapping[str, Any]
    options: Options
    names: tuple[str, str] = ("A", "B")


class Call(NamedTuple):
    """A request as the library sees it. `addresses` are those of A, B and `tensors`, None where one only describes a
    tensor; `infos` say what they look like, where they were looked at with care."""

    request: Request
    signature: Hashable
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Any]
    kinds: dict[str, Kind]
    addresses: list[int | None]
    infos: tuple[TensorInfo, ...] = ()


def describe(request: Request) -> Call:
    """The call of a request, as quickly as can be: what is no plain dense tensor may show `with_care` only.

    Without a signature where an input requires grad, which is all it says then. Raises `ArgumentError` for a value that
    is neither a tensor nor a number.
    """
    a, b, parsed, given, options, _ = request
    if parsed.defaults or parsed.readers:
        given = everything_given(request)
    if _needs_care():
        return _with_care_or_gradient(request, given)
    outputs, grad, written = parsed.output_names, torch.is_grad_enabled(), False
    key: list[Any] = [parsed.key, options.key, *given]
    addresses: list[int | None] = []
    tensors: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    kinds: dict[str, Kind] = {}
    try:
        # With few calls: this is what a launch costs the host.
        if type(a) not in _PLAIN or type(b) not in _PLAIN:
            return _with_care_or_gradient(request, given)
        for value in (a, b):
            address = value.data_ptr()
            if not address or value.is_neg() or (grad and value.requires_grad):
                return _with_care_or_gradient(request, given)
            key += value.shape, value.stride(), value.dtype, value.get_device(), address % 16 == 0
            addresses.append(address)
        for name, value in given.items():
            # A tensor without dims on the CPU is a number, but where it is written.
            if type(value) in _PLAIN and (not value.is_cpu or value.dim() or name in outputs):
                address = value.data_ptr()
                if not address or value.is_neg() or (grad and value.requires_grad):
                    return _with_care_or_gradient(request, given)
                if name in outputs:
                    if value.is_inference():
                        return _with_care_or_gradient(request, given)
                    written = True
                key += value.shape, value.stride(), value.dtype, value.get_device(), address % 16 == 0
                addresses.append(address)
                tensors[name] = value
            elif name in outputs or isinstance(value, (Hint, torch.Tensor)):
                return _with_care_or_gradient(request, given)
            else:
                number = (value, "float") if type(value) is float else host_number(name, value)
                numbers[name], kinds[name] = number  # type: ignore[assignment]  # "float" is a kind
                key.append(number[1])
    except RuntimeError:  # a tensor without strides or memory, as sparse and nested ones
        return _with_care_or_gradient(request, given)
    _add_common(key, a, addresses if written else ())
    return Call(request, tuple(key), tensors, numbers, kinds, addresses)


def everything_given(request: Request) -> Mapping[str, Any]:
    """What was handed in, defaults, and captured numbers as they are now."""
    parsed = request.parsed
    return {**parsed.defaults, **request.given, **parsed.captured()}


def _add_common(key: list[Any], a: torch.Tensor, addresses: Sequence[int | None]) -> None:
    """What is asked of all together. Inputs may share memory; an output only where its `addresses` let a plan."""
    if a.dtype is torch.float32:
        key.append(tf32_allowed())
    if addresses and len(set(addresses)) != len(addresses):
        key += map(addresses.index, addresses)


def _with_care_or_gradient(request: Request, given: Mapping[str, Any]) -> Call:
    """Without a signature where autograd is to record it."""
    if wants_gradient(request.a, request.b, *given.values()):
        return Call(request, None, {}, {}, {}, [])
    return with_care(request, given)


def wants_gradient(*values: Any) -> bool:
    """Whether autograd is to record a call with these values; transforms of functions and tracing are not autograd."""
    return (
        torch.is_grad_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None
        and forward_ad._current_level < 0
        and any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
    )


# --- what is looked at with care -------------------------------------------------------------------------------------


def looked_at(call: Call) -> Call:
    """A described call with every check of single tensors, and what each looks like: what an unseen call needs.

    Raises `ArgumentError` for a tensor that is not plain and dense.
    """
    if call.infos:
        return call
    request, infos = call.request, []
    first = request.a.device
    shown = str(first)
    for value, address in zip((request.a, request.b, *call.tensors.values()), call.addresses, strict=True):
        # All else that is refused `describe` leaves to `with_care`.
        if value.is_quantized or value.layout is not torch.strided or address is None:
            return with_care(request)
        device = shown if value.device == first else str(value.device)
        infos.append(TensorInfo(tuple(value.shape), value.stride(), value.dtype, device, address % 16 == 0))
    return call._replace(infos=tuple(infos))


def _needs_care() -> bool:
    """Whether tensors may not be what their type says: inside vmap, grad, forward-mode, and where modes trace."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def with_care(request: Request, given: Mapping[str, Any] | None = None) -> Call:
    """The call of a request, with every check of single tensors: what a call needs that was not seen before.

    Raises `ArgumentError` for a value that is neither a plain dense tensor nor a number.
    """
    if given is None:
        given = everything_given(request)
    traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    exported = torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0  # type: ignore[no-untyped-call]  # untyped
    if traced or exported or torch._C._get_tracing_state() is not None:
        raise fail("traced", None)
    if any(isinstance(value, Hint) for value in given.values()):
        return with_care(unhinted(request, given))
    outputs = request.parsed.output_names
    key: list[Any] = [request.parsed.key, request.options.key, *given]
    addresses: list[int | None] = []
    tensors: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    kinds: dict[str, Kind] = {}
    infos: list[TensorInfo] = []
    shown = (request.names[0], request.a, False), (request.names[1], request.b, False)
    for name, value, named in (*shown, *((name, value, True) for name, value in given.items())):
        if named and name in outputs and value is None:
            key.append(None)
            continue
        is_number = named and name not in outputs and not (isinstance(value, torch.Tensor) and _is_loaded(value))
        if is_number:
            numbers[name], kinds[name] = host_number(name, value)
            key.append(kinds[name])
            continue
        _check(name if not named else f"{'output' if name in outputs else 'operand'} '{name}'", value)
        if named and name in outputs and value.is_inference() and not torch.is_inference_mode_enabled():
            raise fail("inference_output", None, name=name)
        found = info(value)
        address = value.data_ptr() if has_memory(value) else None
        key += found.shape, found.strides, found.dtype, value.get_device() if address else value.device, found.aligned
        addresses.append(address)
        infos.append(found)
        if named:
            tensors[name] = value
    _add_common(key, request.a, addresses if any(name in outputs for name in tensors) else ())
    return Call(request, tuple(key), tensors, numbers, kinds, addresses, tuple(infos))


def _is_loaded(value: torch.Tensor) -> bool:
    """Whether a kernel reads it: a tensor without dims on the CPU is a number."""
    return value.dim() > 0 or value.device.type != "cpu"


def _check(shown: str, value: Any) -> None:
    check_tensor(shown, value, None)
    if any(isinstance(extent, torch.SymInt) for extent in value.shape):
        _specialise(shown, value)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]  # untyped
        raise fail("requires_grad", None, name=shown)


def _specialise(shown: str, value: torch.Tensor) -> None:
    """Fix sizes that are symbols to what they stand for, where that is known."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # half a second, and loaded by now

    try:
        for extent in (*value.shape, *value.stride(), value.storage_offset()):
            int(extent)
    except GuardOnDataDependentSymNode as error:
        raise fail("symbolic_size", None, name=shown, shape=tuple(value.shape)) from error


def unhinted(request: Request, given: Mapping[str, Any]) -> Request:
    """The request whose hints are options."""
    if not any(isinstance(value, Hint) for value in given.values()):
        return request._replace(given=given)
    values, accumulate, by_tma = without_hints(given, request.parsed.output_names)
    options = request.options
    accumulate = tuple(dict.fromkeys((*accumulate, *options.accumulated)))
    return request._replace(given=values, options=options._replace(accumulate=accumulate, by_tma=by_tma))
