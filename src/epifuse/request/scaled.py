"""Block scales: A or B with one number for each block along K, as block-wise quantisation makes them.

A request hands them over as two more tensors, under names of their own: what looks at tensors by name sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from epifuse.base.errors import fail, kind_of
from epifuse.request.checks import check_device
from epifuse.request.problem import TensorInfo

BLOCK = 128
"""Elements along K that share a scale, and columns of B that do."""
SCALES = ("scales of A", "scales of B")
"""What a call names them; no identifiers, so that no operand can be them."""


@dataclass(frozen=True, eq=False)
class Scaled:
    """A or B of 8-bit floats with the scales of its blocks: the product is that of each block times its scale.

    `scales` are float32. A (M, K) has one for each 128 elements of a row: (M, K/128). B (K, N) has one for each
    128 x 128: (K/128, N/128). In `ef.linear` x (..., K) has (..., K/128), or (M, K/128) for all of its rows, and a
    weight (N, K) has (N/128, K/128). What is no multiple of 128 ends with a smaller block, which has a scale too. One
    of A and B may have none. Raises `ArgumentTypeError` for what is no tensor.
    """

    tensor: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        for name, value in (("Scaled.tensor", self.tensor), ("Scaled.scales", self.scales)):
            if not isinstance(value, torch.Tensor):
                raise fail("tensor_type", None, name=name, type=kind_of(value), hint="")


class Unscaled(NamedTuple):
    """A and B as they are multiplied, and their scales by name."""

    a: torch.Tensor
    b: torch.Tensor
    scales: dict[str, torch.Tensor]


def unscaled(a: Any, b: Any, *, turned: bool = False) -> Unscaled:
    """A and B without their scales. `turned` where B is still a weight (N, K), and its scales lie as it does."""
    scales = {name: side.scales for name, side in zip(SCALES, (a, b), strict=True) if isinstance(side, Scaled)}
    if turned and isinstance(b, Scaled) and b.scales.dim() == 2:
        scales[SCALES[1]] = b.scales.t()
    if turned and isinstance(a, Scaled) and a.tensor.dim() > 2:
        leading, want = a.tensor.shape[:-1], (*a.tensor.shape[:-1], blocks(a.tensor.shape[-1]))
        if a.scales.shape == (leading.numel(), want[-1]):
            scales[SCALES[0]] = a.scales.reshape(want)
        elif a.scales.shape != want:
            raise _wrong_shape("x", (*a.scales.shape,), want, of_weight=False, side=0)
    a, b = (side.tensor if isinstance(side, Scaled) else side for side in (a, b))
    return Unscaled(a, b, scales)


def are_scaled(given: Mapping[str, Any]) -> bool:
    """Whether one of A and B has scales, in a request that was given these."""
    return not given.keys().isdisjoint(SCALES)


def blocks(extent: int) -> int:
    """Blocks of so many elements; the last one may be smaller."""
    return -(-extent // BLOCK)


def check_scales(
    given: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    product: tuple[TensorInfo, TensorInfo],
    accumulator: torch.dtype,
    names: tuple[str, str],
) -> tuple[tuple[str, TensorInfo], ...]:
    """The scales of A and B by name. `infos` are those of all tensors given, `names` what the caller calls A and B."""
    if not are_scaled(given):
        return ()
    found = []
    for side, (key, name, matrix) in enumerate(zip(SCALES, names, product, strict=True)):
        if key not in given:
            continue
        if len(matrix.shape) != 2:
            raise fail("scaled_batches", None, name=name, shape=matrix.shape)
        if not (matrix.dtype.is_floating_point and matrix.dtype.itemsize == 1):
            raise fail("scaled_dtype", None, name=name, dtype=matrix.dtype)
        if accumulator != torch.float32:
            of = f"{product[1].dtype} with block scales"
            raise fail("accumulator", None, dtype=accumulator, a=product[0].dtype, b=of, allowed="torch.float32")
        info = infos.get(key, _NUMBER)
        check_device(f"Scaled.scales of {name}", info, matrix.device, "scales")
        if info.dtype != torch.float32:
            raise fail("scales_dtype", None, name=name, dtype=info.dtype)
        rows, columns = matrix.shape
        want = (blocks(rows), blocks(columns)) if side else (rows, blocks(columns))
        if info.shape != want:
            raise _wrong_shape(name, info.shape, want, of_weight=bool(side) and name == "weight", side=side)
        found.append((key, info))
    return tuple(found)


_NUMBER = TensorInfo((), (), torch.float32, "cpu")  # a tensor of no dims on the CPU is taken for one


def _wrong_shape(name: str, shape: tuple[int, ...], want: tuple[int, ...], *, of_weight: bool, side: int) -> Exception:
    rule = "(N/128, K/128)" if of_weight else ("(M, K/128)", "(K/128, N/128)")[side]
    if len(want) > 2:
        rule = f"({', '.join(map(str, want[:-1]))}, K/128)"
    if of_weight:  # as they were handed over
        shape, want = shape[::-1] if len(shape) == 2 else shape, want[::-1]
    hint = f"there is one for each {('128 of a row', '128 x 128')[side]}, rounded up"
    if len(shape) == len(want) and shape != want and all(n and not own % n for own, n in zip(shape, want, strict=True)):
        hint = f"{hint}; scales of finer blocks are not applied: quantise by these, or dequantise before the call"
    elif prod(shape) == 1 or (len(shape) == len(want) and all(own <= n for own, n in zip(shape, want, strict=True))):
        hint = f"{hint}; repeat scales of coarser blocks, and multiply by those of a row or a tensor in the epilogue"
    if shape == (*want[:-2], want[-1], want[-2]):
        hint = "pass scales.t()" if len(want) == 2 else "pass scales.mT"
    elif shape == (*want, 1):
        hint = "pass scales.squeeze(-1)"
    elif not side and want[0] == 1 and shape == want[1:]:
        hint = "pass scales[None]"
    return fail("scales_shape", None, name=name, rule=rule, want=want, shape=shape, hint=hint)


_FIRST = "first column of B in a block"
"""Given with the scales of a range of columns that begins within a block."""


def dequantised(a: torch.Tensor, b: torch.Tensor, given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B in float32, each block times its scale: what a product with block scales means."""
    of_a, of_b = map(given.get, SCALES)
    return _times(a, of_a, {1: 0}), _times(b, of_b, {0: 0, 1: given.get(_FIRST, 0)})


def _times(matrix: torch.Tensor, scales: torch.Tensor | None, blocked: Mapping[int, int]) -> torch.Tensor:
    """`blocked` are the dims with a scale for each block, and where in a block the first element is."""
    wide = matrix.to(torch.float32)
    if scales is None:
        return wide
    for dim, first in blocked.items():
        # Inductor 2.13 leaves out the last block of 300 columns where it knows them as 128 to a scale: by `//`, by
        # `repeat_interleave`, by a view. A shift it does not see through.
        columns = torch.arange(first, first + matrix.shape[dim], device=matrix.device)
        scales = scales.index_select(dim, columns >> (BLOCK.bit_length() - 1))
    return wide * scales


def given_scales(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `dequantised` takes of all that a product is given."""
    return {name: given[name] for name in (*SCALES, _FIRST) if name in given}


def of_columns(given: Mapping[str, Any], start: int, stop: int) -> Mapping[str, Any]:
    """What is given to a product of the columns `start` to `stop` of B: a view of the scales of their blocks."""
    scales = given.get(SCALES[1])
    if scales is None:
        return given
    start, stop = (given.get(_FIRST, 0) + column for column in (start, stop))
    own = {SCALES[1]: scales[..., start // BLOCK : blocks(stop)]}
    return {**given, **own, _FIRST: start % BLOCK} if start % BLOCK else {**given, **own}


def blocks_of_columns(
    scales: tuple[tuple[str, TensorInfo], ...], start: int, stop: int
) -> tuple[tuple[str, TensorInfo], ...]:
    """The same of the scales of a problem."""
    count = blocks(stop) - start // BLOCK
    return tuple(
        (name, info._replace(shape=(*info.shape[:-1], count)) if name == SCALES[1] else info) for name, info in scales
    )
