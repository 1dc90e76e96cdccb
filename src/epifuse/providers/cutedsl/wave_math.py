"""Sine, cosine and tangent on fragments: Cody and Waite's range reduction, and an exact one for huge arguments."""

from collections.abc import Callable

import cutlass.cute as cute
from cutlass import Float32, Float64, Int32

from epifuse.providers.cutedsl.device_math import Fragment, fma, like, polynomial, rcp, reinterpreted

_HALF_PI = (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15)
"""pi / 2 in three float32 parts."""
_LIMIT = 100000.0
"""Up to this argument three parts of pi / 2 leave an error below half an ulp, also next to multiples of pi / 2."""
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_TURNS = tuple(
    map(
        float.fromhex,
        (
            "0x1.45f306c000000p-3",
            "0x1.c9c882a000000p-31",
            "0x1.4fe13a8000000p-61",
            "0x1.f47d4d3000000p-88",
            "0x1.dc0db62000000p-118",
            "0x1.2b32788000000p-147",
            "0x1.c820ff0000000p-177",
        ),
    )
)
"""1 / (2 pi) in parts of 29 bits, whose products with a float32 are exact in float64."""
_SIN = (-0.16666655242443085, 0.00833216030150652, -0.00019515218446031213)
"""Coefficients of (sin(r) - r) / r^3 as a polynomial in r^2, for |r| <= pi / 4, to 2^-27.9 of the sine."""
_COS = (0.04166664555668831, -0.0013887315290048718, 2.4433082217001356e-05)
"""Coefficients of (cos(r) - 1 + r^2 / 2) / r^4 as a polynomial in r^2, to 2^-33 of the cosine."""


def _quadrant_and_rest(x: Fragment) -> tuple[Fragment, Fragment]:
    """k and r of x = k pi / 2 + r with |r| <= pi / 4. k is right modulo 4."""
    shifted = fma(x, 0.6366197723675814, _ROUND)
    k = shifted - _ROUND
    rest = x
    for part in _HALF_PI:
        rest = fma(k, -part, rest)
    quadrants = cute.make_rmem_tensor(x.shape, Int32)
    quadrants.store(reinterpreted(shifted, Int32))
    rests = cute.make_rmem_tensor(x.shape, Float32)
    rests.store(rest)
    arguments = cute.make_rmem_tensor(x.shape, Float32)
    arguments.store(x)
    _reduce_huge(arguments, quadrants, rests)
    return quadrants.load(), rests.load()


@cute.jit
def _reduce_huge(arguments: cute.Tensor, quadrants: cute.Tensor, rests: cute.Tensor):  # type: ignore[no-untyped-def]
    """Replace quadrants and rests of huge arguments, if this thread has any. The rest of an infinity becomes NaN."""
    x = arguments.load()
    huge = abs(x) > _LIMIT
    # The maximum is taken of flags, because a NaN among the values would hide the others.
    flags = cute.where(huge, cute.full_like(x, 1.0), cute.full_like(x, 0.0))
    if flags.reduce(cute.ReductionOp.MAX, Float32(0.0), 0) > 0.0:
        quadrant, rest = _exact(x)
        quadrants.store(cute.where(huge, quadrant, quadrants.load()))
        rests.store(cute.where(huge, rest, rests.load()))


def _exact(x: Fragment) -> tuple[Fragment, Fragment]:
    """As `_quadrant_and_rest`, for any x. Whole turns are removed from each product before the products are added."""
    wide = x.to(Float64)
    turns = cute.full_like(wide, 0.0)
    for part in _TURNS:
        product = wide * cute.full_like(wide, part)
        turns = turns + (product - cute.math.roundeven(product))
        turns = turns - cute.math.roundeven(turns)
    quarters = turns * cute.full_like(wide, 4.0)
    k = cute.math.roundeven(quarters)
    rest = (quarters - k) * cute.full_like(wide, 1.5707963267948966)
    return k.to(Int32), rest.to(Float32)


def _sine_and_cosine(r: Fragment) -> tuple[Fragment, Fragment]:
    square = r * r
    sine = fma(r * square, polynomial(square, _SIN), r)
    most = fma(square, -0.5, 1.0)
    lost = fma(square, -0.5, like(r, 1.0) - most)  # what rounding took from 1 - r^2 / 2
    return sine, most + fma(square * square, polynomial(square, _COS), lost)


def _odd(quadrant: Fragment) -> Fragment:
    return (quadrant & cute.full_like(quadrant, 1)) != 0


def _wave(shift: int) -> Callable[[Fragment], Fragment]:
    def function(x: Fragment) -> Fragment:
        quadrant, rest = _quadrant_and_rest(x)
        quadrant = quadrant + cute.full_like(quadrant, shift)
        sine, cosine = _sine_and_cosine(rest)
        value = cute.where(_odd(quadrant), cosine, sine)
        return cute.where((quadrant & cute.full_like(quadrant, 2)) != 0, -value, value)

    return function


sin = _wave(0)
cos = _wave(1)


def tan(x: Fragment) -> Fragment:
    """sin / cos, with one Newton step on the quotient."""
    quadrant, rest = _quadrant_and_rest(x)
    sine, cosine = _sine_and_cosine(rest)
    above, below = cute.where(_odd(quadrant), -cosine, sine), cute.where(_odd(quadrant), sine, cosine)
    inverse = rcp(below)
    quotient = above * inverse
    refined = fma(fma(-below, quotient, above), inverse, quotient)
    return cute.where(abs(refined) > 0.0, refined, quotient)
