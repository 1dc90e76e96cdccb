"""Operands and outputs: their shapes and how these broadcast, their dtypes, and their layouts in memory."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from fuzzing.values import Dims, Facts, Kind

ACCESSES: Mapping[str, tuple[Dims, ...]] = {
    "scalar": ((), ("1",)),
    "row": (("n",), ("1", "n")),
    "column": (("m", "1"),),
    "tile": (("m", "n"),),
    "batch scalar": (("l", "1", "1"),),
    "batch row": (("l", "1", "n"),),
    "batch column": (("l", "m", "1"),),
    "batch tile": (("l", "m", "n"),),
}
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float64,
)
_KINDS: Mapping[bool, Kind] = {True: "float", False: "int"}
LAYOUTS = ("plain", "plain", "sliced", "strided", "transposed", "expanded")


class Operand(NamedTuple):
    """One tensor parameter of the epilogue.

    `view` is what the epilogue writes behind the name to give it its dims, "" if it has them already. `shape` is the
    shape that is passed in, None if it is that of `dims`.
    """

    name: str
    access: str
    dims: Dims
    dtype: torch.dtype
    layout: str = "plain"
    view: str = ""
    shape: tuple[int, ...] | None = None

    @property
    def kind(self) -> Kind:
        """The kind of its values after the load."""
        return "mask" if self.dtype == torch.bool else _KINDS[self.dtype.is_floating_point]


def facts_of(dtype: torch.dtype, exact: bool) -> Facts:
    """The facts about the values of an operand. Integers are at most 4 if data are exact, else at most 9."""
    if dtype == torch.bool:
        return Facts(1.0)
    if not dtype.is_floating_point:
        return Facts(4.0 if exact else 9.0)
    return Facts(4.0, 0.5) if exact else Facts(4.0, rounded=True)


def fill(shape: tuple[int, ...], dtype: torch.dtype, exact: bool, random_: torch.Generator) -> torch.Tensor:
    """Random data that satisfy `facts_of`."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=random_).bool()
    if not dtype.is_floating_point:
        largest = int(facts_of(dtype, exact).bound)
        low = 0 if dtype == torch.uint8 else -largest
        return torch.randint(low, largest + 1, shape, generator=random_).to(dtype)
    if exact:
        return (torch.randint(-8, 9, shape, generator=random_).to(torch.float32) / 2).to(dtype)
    return torch.randn(shape, generator=random_, dtype=torch.float64).clamp(-4, 4).to(dtype)


def poison(tensor: torch.Tensor) -> None:
    """Fill the tensor with values that no result has, so that elements that are not written are noticed."""
    if tensor.dtype == torch.bool:
        tensor.view(torch.uint8).fill_(1)
    elif tensor.is_floating_point():
        tensor.fill_(torch.nan) if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8).fill_(0x7F)
    else:
        tensor.fill_(77)


def lay_out(values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A view with these values in the given layout, and the whole buffer in which it lies."""
    shape = values.shape
    if not shape or layout == "plain":
        made = values.clone(memory_format=torch.contiguous_format)
        return made, made
    if layout == "expanded":
        return _expanded(values)
    if layout == "transposed" and len(shape) > 1:
        memory = torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=values.dtype)
        view = memory.transpose(-1, -2)
    elif layout == "strided":
        memory = torch.empty((*shape[:-1], 2 * shape[-1] + 1), dtype=values.dtype)
        view = memory[..., 1::2]
    else:
        memory = torch.empty((*shape[:-1], shape[-1] + 3), dtype=values.dtype)
        view = memory[..., 2 : 2 + shape[-1]]
    poison(memory)
    view.copy_(values)
    return view, memory


def _expanded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first slice along the first dim, repeated by a stride of 0; and its buffer."""
    memory = values[:1].clone()
    return memory.expand(values.shape), memory


class Output(NamedTuple):
    """An output. `dtype` and `layout` are None for the library's choice; `alias` is an operand with the same memory."""

    name: str
    dims: Dims
    kind: Kind
    dtype: torch.dtype | None
    layout: str | None
    alias: str | None = None


STORABLE = DTYPES


def choose_layout(rng: random.Random) -> str:
    """A random layout. More than half of all tensors are contiguous."""
    return rng.choice(LAYOUTS) if rng.random() < 0.5 else "plain"


def handed(value: Any, wide: bool) -> Any:
    """An operand as the reference function gets it: converted to the kind that it loads as. A 0-d tensor becomes a
    Python number."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0:
        return value.item() if value.dtype == torch.bool or not value.is_floating_point() else float(value.item())
    if value.dtype == torch.bool:
        return value
    if value.is_floating_point():
        return value.to(torch.float64 if wide else torch.float32)
    return value.to(torch.int32)
