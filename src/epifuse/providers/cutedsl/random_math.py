"""Philox on fragments. One instruction gives both halves of a product of 32-bit words, another the xor of three."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from epifuse.fusion import philox
from epifuse.providers.cutedsl.device_math import reinterpreted

Fragment = Any  # cute.TensorSSA


def philox_rand(seed: Fragment, index: Fragment) -> Fragment:
    """The random numbers of Triton, as `fusion.philox.philox_rand` defines them."""
    word = reinterpreted(_first_word(seed.to(Uint32), _upper(seed.to(Int64).to(Uint64)), index), Int32)
    return cute.where(word < 0, cute.full_like(word, -1) - word, word).to(Float32) * philox.SCALE


def philox_rand_cpp(seed: Fragment, index: Fragment) -> Fragment:
    """The random numbers of TorchInductor's C++, as `fusion.philox.philox_rand_cpp` defines them."""
    word = _first_word(seed.to(Uint32), cute.full_like(seed, 0, Uint32), index)
    return (word & cute.full_like(word, 0x7FFFFFFF)).to(Float32) * philox.SCALE


def _first_word(low: Fragment, high: Fragment, index: Fragment) -> Fragment:
    """`fusion.philox.first_word` on fragments. The key is `low` and `high`, to which each round adds a step."""
    a, b, c, d = index.to(Uint32), None, None, None
    for number in range(philox.ROUNDS):
        keys = (
            key + cute.full_like(key, number * step & philox.WORD)
            for key, step in zip((low, high), philox.KEY_STEPS, strict=True)
        )
        first, second = (_halves(x, factor) for x, factor in zip((a, c), philox.MULTIPLIERS, strict=True))
        a, c = (_xor(*words) for words in zip((second[0], first[0]), (b, d), keys, strict=True))
        b, d = second[1], first[1]
    return a


def _halves(x: Fragment | None, factor: int) -> tuple[Fragment | None, Fragment | None]:
    """The upper and the lower half of x * factor. None stands for zero, as argument and in the result."""
    if x is None:
        return None, None
    product = x.to(Uint64) * cute.full_like(x, factor, Uint64)
    return _upper(product), product.to(Uint32)


def _upper(x: Fragment) -> Fragment:
    """The upper 32 bits. Fragments have no shift in CuTe DSL 4.8.1, but a division by a power of two becomes one."""
    return (x // cute.full_like(x, 1 << 32)).to(Uint32)


def _xor(*words: Fragment | None) -> Fragment:
    first, *others = (word for word in words if word is not None)
    for other in others:
        first = first ^ other
    return first
