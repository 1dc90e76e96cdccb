"""One call, described once: a flat signature, and the values that only a launch reads.

All checks and plans come from the signature. Of addresses it holds what planning depends on: which are multiples of 16
bytes, and which are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import float32, is_grad_enabled
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from epifuse.base.dtypes import Kind
from epifuse.base.errors import fail
from epifuse.frontend import Parsed
from epifuse.request.checks import PLAIN, check_tensor, host_number
from epifuse.request.options import USUAL, Options
from epifuse.request.problem import TensorInfo, has_memory, info, tf32_allowed
from epifuse.request.transports import Hint, without_hints


class Request(NamedTuple):
    """What the caller asks for: A, B, the epilogue, its operands and destinations by name, and how it is to run.

    `names` are the names of A and B in errors. `weight`, if given, is the tensor that B is the transpose of: autograd
    is to save and differentiate it instead of B.
    """

    a: Any
    b: Any
    parsed: Parsed
    given: Mapping[str, Any]
    options: Options
    names: tuple[str, str] = ("A", "B")
    weight: torch.Tensor | None = None


class Call(NamedTuple):
    """A request as the library sees it.

    `addresses` are those of A, B and `tensors`; None for a tensor without memory. `kinds` of the numbers and `infos` of
    the tensors are filled by `with_infos` and `with_care` only. `recorded` are the positions, among A, B and `tensors`,
    of those that require grad, if autograd is to record the call. They are then the last item of the signature."""

    request: Request
    signature: tuple[Hashable, ...]
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Any]
    addresses: list[int | None]
    kinds: Mapping[str, Kind]
    infos: tuple[TensorInfo, ...]
    recorded: tuple[int, ...] = ()


make_tuple = tuple.__new__
"""Makes a named tuple from a tuple of all its fields. Calling its class takes 0.2 us more."""


def describe(request: Request) -> Call:
    """The call of a request, made as fast as possible. It may miss that a tensor is not plain and dense; `with_infos`
    and `with_care` do not.

    Raises `ArgumentError` for a value that is neither a tensor nor a number.
    """
    a, b, parsed, given, options, *_ = request
    if parsed.defaults or parsed.readers or parsed.as_tensors:
        given = everything_given(request)
    if parsed.as_tensors:
        request = _with_given(request, given)
    if type(a) not in PLAIN or type(b) not in PLAIN or needs_care():
        return _with_care_or_grad(request, given)
    outputs, grad, written = parsed.output_names, is_grad_enabled(), False
    tensors: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    names: list[str | None] = []
    facts: list[Hashable] = []
    addresses: list[int | None] = []
    recorded: tuple[int, ...] = ()
    try:
        for name, value in given.items():
            kind = None
            if name in outputs:
                if type(value) not in PLAIN or value.is_inference():
                    return _with_care_or_grad(request, given)
                tensors[name], written = value, True
            elif type(value) is float:
                numbers[name], kind = value, "float"
            elif type(value) in PLAIN and (value.dim() or not value.is_cpu):
                tensors[name] = value
            elif isinstance(value, (Hint, torch.Tensor)):
                return _with_care_or_grad(request, given)
            else:
                numbers[name], kind = host_number(name, value)
            names += name, kind
        # Few Python calls here: each launch spends this time on the host.
        for value in (a, b, *tensors.values()) if tensors else (a, b):
            address = value.data_ptr()
            if not address or value.is_neg():
                return _with_care_or_grad(request, given)
            if grad and value.requires_grad:
                recorded += (len(addresses),)
            facts += value.dtype, *value.shape, *value.stride(), value.get_device(), address % 16 == 0
            addresses.append(address)
    except RuntimeError:  # a tensor without strides or memory, such as a sparse or nested one
        return _with_care_or_grad(request, given)
    signature = _signature(parsed, options, names, facts, addresses if written else ())
    if recorded:
        signature = (*signature, recorded)
    return make_tuple(Call, (request, signature, tensors, numbers, addresses, {}, (), recorded))


def everything_given(request: Request) -> Mapping[str, Any]:
    """All values of a call by name: those that were passed, defaults, and captured numbers as they are now."""
    parsed = request.parsed
    given = {**parsed.defaults, **request.given, **parsed.captured()}
    for names in parsed.as_tensors:
        alone = {name: given[name] for name in names if _is_single(given.get(name))}
        if all(name in alone or not isinstance(given.get(name), torch.Tensor) for name in names):
            given |= {name: _as_tensor(value, request.a) for name, value in alone.items()}
    return given


def _signature(
    parsed: Parsed,
    options: Options,
    names: Iterable[str | None],
    facts: Sequence[Hashable],
    addresses: Sequence[int | None],
) -> tuple[Hashable, ...]:
    """The key of a call: for each value its name, and its kind if it is a number; then the `facts` of the tensors.

    The facts of A, B and each other tensor are dtype, shape, strides, device, and whether it starts at a multiple of 16
    bytes.
    Inputs may share memory. Whether an output may is decided by a plan: if one is given, so are the `addresses`, and
    the key says which of them are equal.
    The key is a flat tuple of atoms, which Python's garbage collector does not visit.
    """
    tf32 = tf32_allowed() if facts[0] is float32 else None
    is_shared = addresses and len(set(addresses)) != len(addresses)
    shared = ("shared", *map(addresses.index, addresses)) if is_shared else ()
    asked = () if options is USUAL else options.key
    return parsed.key, asked, tf32, *names, *facts, *shared


def _with_care_or_grad(request: Request, given: Mapping[str, Any]) -> Call:
    """The call of a request with every check, and with the positions of the tensors that autograd is to record."""
    if any(isinstance(value, Hint) for value in given.values()):
        return describe(unhinted(request, given))
    if not wants_gradient(request.a, request.b, *given.values()):
        return with_care(request, given)
    loaded = {name: _loaded(value, request.a) for name, value in given.items()}
    with torch.no_grad():  # otherwise the checks refuse tensors that require grad
        call = with_care(_with_given(request, loaded), loaded)
    inputs = (request.a, request.b, *call.tensors.values())
    recorded = tuple(index for index, value in enumerate(inputs) if value.requires_grad)
    return call._replace(recorded=recorded, signature=(*call.signature, recorded))


def _with_given(request: Request, given: Mapping[str, Any]) -> Request:
    """The request with these values, but without numbers that the epilogue captured: no caller passes those."""
    readers = request.parsed.readers
    return request._replace(given={name: value for name, value in given.items() if name not in readers})


def _loaded(value: Any, a: torch.Tensor) -> Any:
    """`value`; a number that requires grad as a tensor that the kernel loads, as no gradient flows through the host."""
    return _as_tensor(value, a) if _is_single(value) and value.requires_grad else value


def _is_single(value: Any) -> bool:
    """Whether `value` is a tensor that is read as a number."""
    return isinstance(value, torch.Tensor) and not _is_loaded(value)


def _as_tensor(value: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """The tensor of one element on A's device that a kernel loads in place of a number."""
    floating = torch.float64 if a.dtype == torch.float64 else torch.float32
    return value.reshape(1).to(a.device, floating if value.is_floating_point() else value.dtype)


def wants_gradient(*values: Any) -> bool:
    """Whether autograd is to record a call with these values. False within functorch transforms and while tracing."""
    return (
        torch.is_grad_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None
        and torch._ops._len_torch_dispatch_stack_pre_dispatch() == 0  # type: ignore[no-untyped-call]  # untyped
        and forward_ad._current_level < 0
        and any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
    )


# --- what is looked at with care -------------------------------------------------------------------------------------


def with_infos(call: Call) -> Call:
    """A described call after every check of single tensors, with `kinds` and `infos`, which an unseen call needs.

    Raises `ArgumentError` for a tensor that is not plain and dense.
    """
    if call.infos:
        return call
    request, infos = call.request, []
    first = request.a.device
    shown = str(first)
    for value, address in zip((request.a, request.b, *call.tensors.values()), call.addresses, strict=True):
        # `describe` has already passed other tensors that are refused on to `with_care`.
        if value.is_quantized or value.layout is not torch.strided or address is None:
            return with_care(request)
        device = shown if value.device == first else str(value.device)
        info = tuple(value.shape), value.stride(), value.dtype, device, address % 16 == 0
        infos.append(make_tuple(TensorInfo, info))
    kinds = {name: host_number(name, value).kind for name, value in call.numbers.items()}
    _, signature, tensors, numbers, addresses, _, _, recorded = call
    return make_tuple(Call, (request, signature, tensors, numbers, addresses, kinds, tuple(infos), recorded))


def needs_care() -> bool:
    """Whether tensors may not be what their type says: inside vmap, grad and forward-mode, and while modes trace."""
    return (
        peek_interpreter_stack() is not None
        or _len_torch_dispatch_stack() > 0
        or _is_tracing()
        or forward_ad._current_level >= 0
    )


def with_care(request: Request, given: Mapping[str, Any] | None = None) -> Call:
    """The call of a request after every check of single tensors, which a call needs that was not seen before.

    Raises `ArgumentError` for a value that is neither a plain dense tensor nor a number.
    """
    if given is None:
        given = everything_given(request)
    traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    exported = torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0  # type: ignore[no-untyped-call]  # untyped
    if traced or exported or _is_tracing():
        raise fail("traced", None)
    if any(isinstance(value, Hint) for value in given.values()):
        return with_care(unhinted(request, given))
    outputs = request.parsed.output_names
    tensors: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    kinds: dict[str, Kind] = {}
    names: list[str | None] = []
    for name, value in given.items():
        if name in outputs and value is None:
            continue
        if name in outputs or (isinstance(value, torch.Tensor) and _is_loaded(value)):
            tensors[name] = value
        else:
            numbers[name], kinds[name] = host_number(name, value)
            _check_tangent(name, value)
        names += name, kinds.get(name)
    facts: list[Hashable] = []
    addresses: list[int | None] = []
    infos: list[TensorInfo] = []
    shown = (*request.names, *(_spelled(name, outputs) for name in tensors))
    for name, value in zip(shown, (request.a, request.b, *tensors.values()), strict=True):
        _check(name, value)
        found = info(value)
        address = value.data_ptr() if has_memory(value) else None
        device = value.get_device() if address else value.device
        facts += found.dtype, *found.shape, *found.strides, device, found.aligned
        addresses.append(address)
        infos.append(found)
    written = [name for name in outputs if name in tensors]
    for name in written:
        if tensors[name].is_inference() and not torch.is_inference_mode_enabled():
            raise fail("inference_output", None, name=name)
    signature = _signature(request.parsed, request.options, names, facts, addresses if written else ())
    return Call(request, signature, tensors, numbers, addresses, kinds, tuple(infos))


def _spelled(name: str, outputs: tuple[str, ...]) -> str:
    if not name.isidentifier():  # scales of A or B
        return name
    return f"{'output' if name in outputs else 'operand'} '{name}'"


def _is_loaded(value: torch.Tensor) -> bool:
    """Whether a kernel loads the tensor. One without dims on the CPU is a number instead."""
    return value.dim() > 0 or value.device.type != "cpu"


def _check(shown: str, value: Any) -> None:
    check_tensor(shown, value, None)
    if any(isinstance(extent, torch.SymInt) for extent in value.shape):
        _specialise(shown, value)
    _check_tangent(shown, value)


def _check_tangent(shown: str, value: Any) -> None:
    if forward_ad._current_level < 0 or not isinstance(value, torch.Tensor):
        return
    if forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]  # untyped
        raise fail("requires_grad", None, name=shown)


def _specialise(shown: str, value: torch.Tensor) -> None:
    """Fix sizes that are symbols to the numbers they stand for. Raises if these depend on data."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # takes 0.5 s, but is loaded by now

    try:
        for extent in (*value.shape, *value.stride(), value.storage_offset()):
            int(extent)
    except GuardOnDataDependentSymNode as error:
        raise fail("symbolic_size", None, name=shown, shape=tuple(value.shape)) from error


def unhinted(request: Request, given: Mapping[str, Any]) -> Request:
    """The request with its hints (`transports.Hint`) turned into options."""
    if not any(isinstance(value, Hint) for value in given.values()):
        return _with_given(request, given)
    values, accumulate, by_tma = without_hints(given, request.parsed.output_names)
    options = request.options
    accumulate = tuple(dict.fromkeys((*accumulate, *options.accumulated)))
    return _with_given(request, values)._replace(options=options._replace(accumulate=accumulate, by_tma=by_tma))
