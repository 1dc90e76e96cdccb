"""Calls seen before. One pass over the arguments makes a key; what it finds needs no planning, only to be bound.

The key holds all that checks and plans depend on. Of addresses that is only which are equal; where two tensors lie
within each other's reach, their distances are remembered as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch

from epifuse.cache import LRU
from epifuse.checks import host_number
from epifuse.errors import EpifuseError
from epifuse.frontend import Parsed
from epifuse.problem import tf32_allowed
from epifuse.runtime.launch import Recipe, require_data

_CAPACITY = 1024
_MOST_DISTANCES = 256
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ALIGNMENT = 16  # bytes: what vector loads and TMA ask of an address


class Call(NamedTuple):
    """One call as the cache sees it. `addresses` are those of A, B and `tensors`, in this order."""

    key: Hashable
    a: torch.Tensor
    b: torch.Tensor
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Any]
    addresses: list[int]

    def launch(self, recipe: Recipe) -> dict[str, torch.Tensor]:
        """Run; the outputs by name."""
        outputs = recipe.destinations(self.tensors, self.a.device)
        # Tensors that were handed in have data, as those of the first call had; new ones have none in a mode of torch.
        for name, tensor in outputs.items():
            if type(tensor) not in _PLAIN:
                require_data(((name, tensor),))
        recipe.bind(self.a, self.b, self.tensors, self.numbers, outputs)()
        return outputs


def describe(
    a: torch.Tensor, b: torch.Tensor, parsed: Parsed, given: Mapping[str, Any], options: Hashable
) -> Call | None:
    """The call, or None for one that has to be looked at with care each time."""
    # Inside vmap and grad a tensor is not what its type says.
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    if type(a) not in _PLAIN or type(b) not in _PLAIN or not (a.dim() and b.dim()):
        return None
    if parsed.defaults or parsed.captures:
        given = {**parsed.defaults, **given, **{name: reader() for name, reader in parsed.captures.items()}}
    grad = torch.is_grad_enabled()
    key: list[Any] = [parsed, options, a.dtype == torch.float32 and tf32_allowed(), *given]
    addresses: list[int] = []
    strided = torch.strided
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    # One loop without calls: this is what a launch costs the host.
    for name, value in (("", a), ("", b), *given.items()):
        # A tensor of one element on the CPU is a number, but where it is written.
        if type(value) in _PLAIN and (value.dim() or not value.is_cpu or name in parsed.output_names):
            if value.layout is not strided or value.is_nested or value.is_neg() or (grad and value.requires_grad):
                return None
            address = value.data_ptr()
            key.append((value.shape, value.stride(), value.dtype, value.device, address % _ALIGNMENT == 0))
            addresses.append(address)
            tensors[name] = value
        elif (number := _number(name, value)) is not None:
            key.append(number.kind)
            numbers[name] = number.value
        else:
            return None
    del tensors[""]
    if len(set(addresses)) != len(addresses):
        key += map(addresses.index, addresses)
    return Call(tuple(key), a, b, tensors, numbers, addresses)


def _number(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and type(value) not in _PLAIN:
        return None
    try:
        return host_number(name, value)
    except EpifuseError:  # said again, with all the rest, by the checks of a call that is new
        return None


# --- what is remembered ------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """What a key stands for: the recipe, which tensors are written, the bytes of each, distances that were checked."""

    recipe: Recipe
    written: tuple[int, ...]
    sizes: tuple[int, ...]
    distances: set[tuple[int, ...]]


_known: LRU[Hashable, _Known] = LRU(_CAPACITY)


def find(call: Call) -> Recipe | None:
    """The recipe of an earlier call that was checked and planned, and that this one equals."""
    try:
        known = _known.get(call.key)
    except TypeError:  # an option of a type that cannot be right
        return None
    if known is None or (known.written and _distances(known, call.addresses) not in known.distances):
        return None
    return known.recipe


def remember(call: Call, recipe: Recipe) -> None:
    """Keep the recipe of a call that was checked, planned and run."""
    names = {name for name, *_ in recipe.outputs}
    written = tuple(index for index, name in enumerate(call.tensors, start=2) if name in names)
    sizes = tuple(map(_bytes, (call.a, call.b, *call.tensors.values())))
    known = _known.put(call.key, _Known(recipe, written, sizes, set()))
    if len(known.distances) >= _MOST_DISTANCES:
        known.distances.clear()
    known.distances.add(_distances(known, call.addresses))


def _distances(known: _Known, addresses: list[int]) -> tuple[int, ...]:
    """How far each output is from each tensor within reach that starts elsewhere; mostly there is none."""
    found: list[int] = []
    for i in known.written:
        for j, address in enumerate(addresses):
            distance = address - addresses[i]
            if distance and -known.sizes[j] < distance < known.sizes[i]:
                found += i, j, distance
    return tuple(found)


def _bytes(tensor: torch.Tensor) -> int:
    """From the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    last = sum(stride * (extent - 1) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))
    return (last + 1) * tensor.element_size()
