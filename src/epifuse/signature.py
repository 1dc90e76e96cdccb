"""One call, described once: a flat signature that all checks and plans come from, and the values that only launching
reads.

Of addresses the signature holds what planning depends on: which are multiples of 16 bytes, and which are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from epifuse.checks import check_tensor, host_number
from epifuse.errors import fail
from epifuse.frontend import Parsed
from epifuse.options import Options
from epifuse.problem import HostNumber, TensorInfo, tf32_allowed
from epifuse.transports import Hint, without_hints

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ALIGNMENT = 16  # bytes: what vector loads and TMA ask of an address


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
    """A request as the library sees it.

    `infos` describe A, B and the tensors given, in the order of `tensors`; `addresses` are theirs, None where one only
    describes a tensor.
    """

    request: Request
    signature: Hashable
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Any]
    kinds: dict[str, Any]
    infos: list[tuple[Any, ...]]
    addresses: list[int | None]

    @property
    def has_data(self) -> bool:
        """Whether every tensor has memory."""
        return None not in self.addresses

    def info(self, position: int) -> TensorInfo:
        """What the tensor at this position looks like."""
        shape, strides, dtype, device, aligned = self.infos[position]
        return TensorInfo(tuple(shape), strides, dtype, str(device), aligned)

    def operand(self, name: str) -> TensorInfo | HostNumber:
        """What was handed in as `name`."""
        if name in self.kinds:
            return HostNumber(self.kinds[name])
        return self.info(self.position(name))

    def position(self, name: str) -> int:
        """Where the tensor called `name` stands among infos and addresses."""
        return 2 + list(self.tensors).index(name)


def describe(request: Request) -> Call:
    """The call of a request. Raises `ArgumentError` for a value that is neither a plain dense tensor nor a number."""
    a, b, parsed, given, options, _ = request
    if parsed.defaults or parsed.captures:
        given = {**parsed.defaults, **given, **{name: reader() for name, reader in parsed.captures.items()}}
    grad, careful = torch.is_grad_enabled(), _is_transformed()
    outputs, strided = parsed.output_names, torch.strided
    infos: list[tuple[Any, ...]] = []
    addresses: list[int | None] = []
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    # One loop with few calls: this is what a launch costs the host.
    for name, value in (("", a), ("", b), *given.items()):
        plain = type(value) in _PLAIN
        if plain or isinstance(value, torch.Tensor) or not name:
            # A tensor without dims on the CPU is a number, but where it is written.
            if not name or value.dim() or not value.is_cpu or name in outputs:
                if (
                    not plain
                    or careful
                    or value.layout is not strided
                    or value.is_nested
                    or value.is_quantized
                    or value.is_neg()
                    or (grad and value.requires_grad)
                    or (name in outputs and value.is_inference())
                ):
                    _check(name, value, request, len(infos))
                if plain and not value.is_meta:
                    address = value.data_ptr()
                    infos.append((value.shape, value.stride(), value.dtype, value.device, address % _ALIGNMENT == 0))
                    addresses.append(address)
                else:
                    infos.append(_without_memory(name, value))
                    addresses.append(None)
                tensors[name] = value
                continue
        elif isinstance(value, Hint):
            return describe(_unhinted(request, given))
        elif name in outputs:
            if value is not None:
                _check(name, value, request, len(infos))
            continue
        numbers[name], kinds[name] = host_number(name, value)
    del tensors[""]
    key = [parsed, options.key, a.dtype is torch.float32 and tf32_allowed(), *given, *infos, *kinds.values()]
    if len(set(addresses)) != len(addresses):
        key += map(addresses.index, addresses)
    return Call(request, tuple(key), tensors, numbers, kinds, infos, addresses)


def _unhinted(request: Request, given: Mapping[str, Any]) -> Request:
    """The request whose hints are options."""
    values, accumulate, by_tma = without_hints(given, request.parsed.output_names)
    options = request.options
    accumulate = tuple(dict.fromkeys((*accumulate, *options.accumulated)))
    return request._replace(given=values, options=options._replace(accumulate=accumulate, by_tma=by_tma))


# --- what is looked at with care -------------------------------------------------------------------------------------


def _is_transformed() -> bool:
    """Whether tensors may not be what their type says: inside vmap, grad and forward-mode. Raises while tracing."""
    traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    if traced or torch._C._get_tracing_state() is not None:
        raise fail("traced", None)
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _check(name: str, value: Any, request: Request, position: int) -> None:
    written = name in request.parsed.output_names
    shown = request.names[position] if not name else f"output '{name}'" if written else f"operand '{name}'"
    check_tensor(shown, value, None)
    if written and value.is_inference() and not torch.is_inference_mode_enabled():
        raise fail("inference_output", None, name=name)


def _without_memory(name: str, value: torch.Tensor) -> tuple[Any, ...]:
    """A tensor that only describes one: sizes that are symbols are fixed to what they stand for."""
    try:
        shape, strides = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
        start = int(value.storage_offset()) * value.dtype.itemsize
    except Exception as error:  # torch's own classes, which importing would cost half a second
        raise fail("symbolic_size", None, name=name or "A or B", shape=tuple(value.shape)) from error
    return shape, strides, value.dtype, value.device, start % _ALIGNMENT == 0
