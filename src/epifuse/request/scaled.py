"""Block scales: A or B with one number for each block along K, as block-wise quantisation makes them.

A request holds them as two more tensors under names of their own, so that code which reads tensors by name sees them.
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
"""The number of elements along K that share a scale, and of columns of B that share one."""
SCALES = ("scales of A", "scales of B")
"""The names of the scales in a call. They are not identifiers, so that no operand can have them."""


@dataclass(frozen=True, eq=False)
class Scaled:
    """A or B of 8-bit floats with the scales of its blocks. The product multiplies each block by its scale.

    `scales` are float32. A (M, K) has one for each 128 elements of a row: (M, K/128). B (K, N) has one for each block
    of 128 x 128: (K/128, N/128). In `ef.linear` x (..., K) has (..., K/128), or (M, K/128) for all of its rows, and a
    weight (N, K) has (N/128, K/128). An extent that is not a multiple of 128 ends with a smaller block, which has a
    scale too. One of A and B may have no scales. Raises `ArgumentTypeError` for a value that is not a tensor.
    """

    tensor: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        for name, value in (("Scaled.tensor", self.tensor), ("Scaled.scales", self.scales)):
            if not isinstance(value, torch.Tensor):
                raise fail("tensor_type", None, name=name, type=kind_of(value), hint="")


class Unscaled(NamedTuple):
    """A and B without their scales, and the scales by name."""

    a: torch.Tensor
    b: torch.Tensor
    scales: dict[str, torch.Tensor]


def unscaled(a: Any, b: Any, *, b_is_transposed: bool = False) -> Unscaled:
    """Separate A and B from their scales. With `b_is_transposed`, `b` is a weight (N, K), whose scales are
    (N/128, K/128)."""
    scales = {name: side.scales for name, side in zip(SCALES, (a, b), strict=True) if isinstance(side, Scaled)}
    if b_is_transposed and isinstance(b, Scaled) and b.scales.dim() == 2:
        scales[SCALES[1]] = b.scales.t()
    if b_is_transposed and isinstance(a, Scaled) and a.tensor.dim() > 2:
        leading, want = a.tensor.shape[:-1], (*a.tensor.shape[:-1], blocks(a.tensor.shape[-1]))
        if a.scales.shape == (leading.numel(), want[-1]):
            scales[SCALES[0]] = a.scales.reshape(want)
        elif a.scales.shape != want:
            raise _wrong_shape("x", (*a.scales.shape,), want, of_weight=False, side=0)
    a, b = (side.tensor if isinstance(side, Scaled) else side for side in (a, b))
    return Unscaled(a, b, scales)


def are_scaled(given: Mapping[str, Any]) -> bool:
    """Whether A or B has scales in a request with the values `given`."""
    return not given.keys().isdisjoint(SCALES)


def blocks(extent: int) -> int:
    """The number of blocks of `extent` elements; the last block may be smaller."""
    return -(-extent // BLOCK)


def check_scales(
    given: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    product: tuple[TensorInfo, TensorInfo],
    accumulator: torch.dtype,
    names: tuple[str, str],
) -> tuple[tuple[str, TensorInfo], ...]:
    """The checked scales of A and B by name. `infos` are of all tensors, `names` are the caller's names of A and B."""
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


_NUMBER = TensorInfo((), (), torch.float32, "cpu")  # for a tensor without dims on the CPU, which counts as a number


def _wrong_shape(name: str, shape: tuple[int, ...], want: tuple[int, ...], *, of_weight: bool, side: int) -> Exception:
    rule = "(N/128, K/128)" if of_weight else ("(M, K/128)", "(K/128, N/128)")[side]
    if len(want) > 2:
        rule = f"({', '.join(map(str, want[:-1]))}, K/128)"
    if of_weight:  # in the layout of the weight, as the caller passed them
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
"""The name of a number beside the scales: where in its block a range of columns of B begins, if that is not at 0."""


def dequantised(a: torch.Tensor, b: torch.Tensor, given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B in float32, each block times its scale. This defines the meaning of a product with block scales."""
    of_a, of_b = map(given.get, SCALES)
    return _times(a, of_a, {1: 0}), _times(b, of_b, {0: 0, 1: given.get(_FIRST, 0)})


def _times(matrix: torch.Tensor, scales: torch.Tensor | None, blocked: Mapping[int, int]) -> torch.Tensor:
    """`matrix` times its scales, in float32. `blocked` maps each dim with a scale for each block to the place of the
    first element in its block."""
    wide = matrix.to(torch.float32)
    if scales is None:
        return wide
    for dim, first in blocked.items():
        # Inductor 2.13 leaves out the last block of 300 columns if it can see that 128 columns share a scale: with
        # `//`, `repeat_interleave` or a view. It does not see that through a shift.
        columns = torch.arange(first, first + matrix.shape[dim], device=matrix.device)
        scales = scales.index_select(dim, columns >> (BLOCK.bit_length() - 1))
    return wide * scales


def given_scales(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values among `given` that `dequantised` reads."""
    return {name: given[name] for name in (*SCALES, _FIRST) if name in given}


def of_columns(given: Mapping[str, Any], start: int, stop: int) -> Mapping[str, Any]:
    """The values `given` for a product with the columns `start` to `stop` of B only. The scales of B are a view."""
    scales = given.get(SCALES[1])
    if scales is None:
        return given
    start, stop = (given.get(_FIRST, 0) + column for column in (start, stop))
    own = {SCALES[1]: scales[..., start // BLOCK : blocks(stop)]}
    return {**given, **own, _FIRST: start % BLOCK} if start % BLOCK else {**given, **own}


def blocks_of_columns(
    scales: tuple[tuple[str, TensorInfo], ...], start: int, stop: int
) -> tuple[tuple[str, TensorInfo], ...]:
    """The scales of a problem with the columns `start` to `stop` of B only, as `of_columns` gives them."""
    count = blocks(stop) - start // BLOCK
    return tuple(
        (name, info._replace(shape=(*info.shape[:-1], count)) if name == SCALES[1] else info) for name, info in scales
    )
