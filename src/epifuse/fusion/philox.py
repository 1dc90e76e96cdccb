"""Random numbers that are functions of a seed and a position, so that nothing has to be stored: Philox 4x32-10.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The counter is (position, 0, 0, 0); of the
four words that come out the first is taken. There are two primitives, since the two backends of TorchInductor read key
and word differently: Triton (triton/language/random.py) and C++ (torch/csrc/inductor/cpp_prefix.h and
ATen/core/PhiloxRNGEngine.h).
"""

from __future__ import annotations

from typing import Any

import torch

from epifuse.base.dtypes import BY_TORCH
from epifuse.base.errors import fail
from epifuse.fusion.primitives import Value, primitive

__all__ = ["philox_rand", "philox_rand_cpp"]

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
SCALE = 4.6566127342e-10
"""The largest float32 whose product with 2 ** 31 - 1 is below 1."""


def first_word(low: Any, high: Any, position: Any) -> Any:
    """Return the first of the four words for a key of two words. All are integers in [0, 2 ** 32), either Python's or
    in int64 tensors. Products wrap in int64, which does not change any of their 64 bits."""
    counter = (position, 0, 0, 0)
    for _ in range(ROUNDS):
        first, second = counter[0] * MULTIPLIERS[0], counter[2] * MULTIPLIERS[1]
        counter = (
            ((second >> 32) & WORD) ^ counter[1] ^ low,
            second & WORD,
            ((first >> 32) & WORD) ^ counter[3] ^ high,
            first & WORD,
        )
        low, high = (low + KEY_STEPS[0]) & WORD, (high + KEY_STEPS[1]) & WORD
    return counter[0]


_INTEGERS = [dtype for dtype, row in BY_TORCH.items() if row.loads_as in ("int32", "int64")]


def _words(value: Value) -> tuple[Any, Any]:
    """Return the lower and the upper 32 bits of an integer of at most 64 bits. Raises `EpifuseError` for a float or a
    mask."""
    if isinstance(value, torch.Tensor):
        wide, is_mask, is_integer = value.to(torch.int64), value.dtype == torch.bool, value.dtype in _INTEGERS
    else:
        wide, is_mask, is_integer = value, isinstance(value, bool), not isinstance(value, (bool, float))
    if not is_integer:
        raise fail("integers_wanted", None, op="philox_rand", kind="a mask" if is_mask else "a float")
    if not isinstance(value, torch.Tensor) and not -(1 << 63) <= value < 1 << 63:
        raise fail("host_number", None, name="seed", kind="int64", value=value, hint="")
    return wide & WORD, (wide >> 32) & WORD


@primitive("random", commutative=False, error="amplified", costly=True, may_fail=False)
def philox_rand(seed: Value, index: Value) -> Value:
    """A random number in [0, 1), float32, for integers: Triton's `tl.rand(seed, index)` for a 64-bit seed."""
    word = first_word(*_words(seed), _words(index)[0])
    return torch.where(word >> 31 != 0, WORD - word, word).to(torch.float32) * SCALE


@primitive("random", commutative=False, error="amplified", costly=True, may_fail=False)
def philox_rand_cpp(seed: Value, index: Value) -> Value:
    """A random number in [0, 1), float32, for integers: TorchInductor's `normalized_rand_cpu(seed, index)`, which takes
    the lower 32 bits of the seed."""
    word = first_word(_words(seed)[0], 0, _words(index)[0])
    return (word & 0x7FFFFFFF).to(torch.float32) * SCALE
