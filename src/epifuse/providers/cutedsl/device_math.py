"""Float32 functions on fragments (vectors of a thread's values), without branches, so that their computations overlap.

CuTe DSL's division and square root call a subroutine for each value, and its sine keeps a table in local memory. A
function here is exact to a few units in the last place (*ulp*). One named `..._narrow` is exact to
`precision.NARROW_ERROR`, for results of at most 16 bits. Coefficients are minimax fits of the relative error in
float64, rounded to float32; docs/accuracy.md has the errors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Vector

Fragment = Any  # cute.TensorSSA of Float32
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def like(x: Fragment, value: float) -> Fragment:
    """A constant of x's shape and type."""
    return cute.full_like(x, value)


def numbers(x: Fragment) -> Sequence[Any]:
    """A fragment's values in order. This is one operation; an index makes seven, and each one takes compile time."""
    values: Sequence[Any] = x.to_elements()
    return values


def fragment(values: Sequence[Any], shape: Any, dtype: Any) -> Fragment:
    """The fragment of these values, in order."""
    return cute.TensorSSA(Vector.from_elements(tuple(values), dtype), shape, dtype)


def each(function: Callable[..., Any], *fragments: Fragment, dtype: Any = Float32) -> Fragment:
    """Apply a scalar function element by element; unrolled while tracing."""
    return fragment([function(*xs) for xs in zip(*map(numbers, fragments), strict=True)], fragments[0].shape, dtype)


def fma(x: Fragment, y: Fragment | float, z: Fragment | float) -> Fragment:
    """x * y + z, rounded once."""
    y = like(x, y) if isinstance(y, float) else y
    return cute.math.fma(x, y, like(x, z) if isinstance(z, float) else z)


def polynomial(x: Fragment, coefficients: Sequence[float]) -> Fragment:
    """The polynomial with these coefficients, the lowest one first, by Horner's scheme."""
    value = like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = fma(value, x, coefficient)
    return value


# --- instructions ----------------------------------------------------------------------------------------------


def instruction(name: str) -> Callable[[Fragment], Fragment]:
    """Return a PTX instruction of one float32 as a function of fragments. If the name lacks `.ftz`, ptxas adds code for
    subnormals."""

    def scalar(value: Any) -> Any:
        text = f"{name}.f32 {{$w0}}, {{$r0}};"
        return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[value])

    return lambda x: each(scalar, x)


lg2 = instruction("lg2.approx")
square_root = instruction("sqrt.approx")


def disguised(value: Any, number: int = 0) -> Any:
    """A copy of a 32-bit scalar that the compiler takes for another value. It merges only copies of one `number`."""
    text = f"/* {number} */ mov.b32 {{$w0}}, {{$r0}};"
    return cute.arch.inline_ptx(text, write_only_types=[type(value)], read_only_args=[value])


def rcp(x: Fragment) -> Fragment:
    """1 / x by rcp.approx.ftz, 1 ulp: infinity for a subnormal x, zero where the result would be subnormal."""
    return each(cute.arch.rcp_approx, x)


def ex2(x: Fragment) -> Fragment:
    """2 ** x by ex2.approx.ftz, 2 ulp: zero where the result would be subnormal."""
    return cute.math.exp2(x, fastmath=True)


# --- exact functions -------------------------------------------------------------------------------------------


def maximum(x: Fragment, y: Fragment) -> Fragment:
    """As torch.maximum: NaN wherever either is NaN. One instruction; CuTe DSL's for fragments compares and selects."""
    if x.element_type is Float32:
        return each(lambda a, b: cute.arch.fmax(a, b, nan=True), x, y)
    return cute.where(x > y, x, y)


def minimum(x: Fragment, y: Fragment) -> Fragment:
    """See `maximum`."""
    if x.element_type is Float32:
        return each(lambda a, b: cute.arch.fmin(a, b, nan=True), x, y)
    return cute.where(x < y, x, y)


def sign(x: Fragment) -> Fragment:
    """-1, 0 or 1; 0 for NaN."""
    one, zero = like(x, 1), like(x, 0)
    return cute.where(x > zero, one, cute.where(x < zero, -one, zero))


def power(x: Fragment, y: Fragment) -> Fragment:
    """x ** y. A literal y is hidden from the compiler, which would multiply, with an error of 4 ulp from x ** 6 on."""
    return cute.math.pow(x, each(disguised, y))


# --- quotients and roots ---------------------------------------------------------------------------------------


def reinterpreted(x: Fragment, dtype: Any) -> Fragment:
    """The fragment's bits as another 32-bit type. CuTe DSL's own `bitcast` flattens the shape."""
    return x.bitcast(dtype).reshape(x.shape)


def _balance(y: Fragment) -> Fragment:
    """A power of two near |y| ** -0.5. The product of y and this power, and its reciprocal, are normal for every y."""
    bits = reinterpreted(y, Int32)
    half = each(lambda e: e >> 1, bits & cute.full_like(bits, 0x7F000000), dtype=Int32)
    return reinterpreted(cute.full_like(half, 0x5F000000) - half, Float32)


def _refined(x: Fragment, y: Fragment, inverse: Fragment) -> Fragment:
    """x / y from an approximate 1 / y by one Newton step, after which a quotient that float32 can hold is exact."""
    quotient = x * inverse
    refined = fma(fma(-y, quotient, x), inverse, quotient)
    # Where the quotient or y is 0 or infinite, the step gives NaN or a zero of the wrong sign, and is not taken.
    return cute.where(abs(refined) > 0.0, refined, quotient)


def floor_power_of_two(x: Fragment) -> Fragment:
    """The largest power of two that is not above x: zero for a subnormal x, NaN for x <= -2^-126."""
    bits = reinterpreted(x, Int32)
    power = reinterpreted(bits & cute.full_like(bits, 0x7F800000), Float32)
    return cute.where(x > -(2.0**-126), power, like(x, float("nan")))


def divide(x: Fragment, y: Fragment) -> Fragment:
    """x / y, correctly rounded except for one in a million quotients that lie halfway between two floats."""
    scale = _balance(y)
    y = y * scale
    return _refined(x * scale, y, rcp(y))


def divide_narrow(x: Fragment, y: Fragment) -> Fragment:
    """x / y to 2 ulp."""
    scale = _balance(y)
    return (x * scale) * rcp(y * scale)


def divide_by(number: float) -> Callable[[Fragment, Fragment], Fragment]:
    """Return the division x / y by a y known while compiling. Neither y nor 1 / y may be subnormal."""
    return lambda x, y: _refined(x, y, like(x, 1.0 / number))


def divide_by_narrow(number: float) -> Callable[[Fragment, Fragment], Fragment]:
    """Return the division x / y, to 1.5 ulp, by a y known while compiling."""
    return lambda x, y: x * (1.0 / number)


def reciprocal(x: Fragment) -> Fragment:
    """1 / x, see `divide`."""
    return divide(like(x, 1.0), x)


def reciprocal_narrow(x: Fragment) -> Fragment:
    """1 / x to 2 ulp."""
    return divide_narrow(like(x, 1.0), x)


def sqrt(x: Fragment) -> Fragment:
    """The square root by rsqrt.approx and one Newton step, after which a root that float32 can hold is exact."""
    tiny = x < 2.0**-100
    scaled = x * cute.where(tiny, like(x, 2.0**64), like(x, 1.0))
    inverse = cute.math.rsqrt(scaled, fastmath=True)
    root = scaled * inverse
    refined = fma(fma(-root, root, scaled), inverse * 0.5, root)
    unscaled = refined * cute.where(tiny, like(x, 2.0**-32), like(x, 1.0))
    return cute.where((x == 0.0) | (x == float("inf")), x, unscaled)


# --- exponentials and logarithms -------------------------------------------------------------------------------

_LOG1P_NEAR = (
    0.9999999403953552,
    -0.5000115036964417,
    0.33335548639297485,
    -0.24899323284626007,
    0.1987503170967102,
    -0.18834643065929413,
    0.1647796779870987,
)
"""log1p(x) / x for |x| < 0.3, to 2^-20.9."""
_LOG1P_UNIT = (
    1.0,
    -0.4999990165233612,
    0.3332996368408203,
    -0.24954134225845337,
    0.1967593878507614,
    -0.15305592119693756,
    0.10603652894496918,
    -0.05695951730012894,
    0.019851453602313995,
    -0.003244023071601987,
)
"""log1p(x) / x for x in [0, 1], to 2^-27.6."""
_LOG1P_UNIT_NARROW = (
    0.9999987483024597,
    -0.4998696446418762,
    0.3310944736003876,
    -0.23503859341144562,
    0.14922386407852173,
    -0.06640178710222244,
    0.014141020365059376,
)
"""log1p(x) / x for x in [0, 1], to 2^-19.6."""
_EXPM1_NEAR = (0.9999995231628418, 0.4999731481075287, 0.1666782796382904, 0.04210032522678375, 0.008333280682563782)
"""expm1(x) / x for |x| < 0.5, to 2^-18.5."""


def exp_narrow(x: Fragment) -> Fragment:
    """exp(x) by ex2.approx. The rounding of its argument causes an error of |x| / 2 ulp."""
    return cute.math.exp2(x * LOG2_E)


def expm1_narrow(x: Fragment) -> Fragment:
    """exp(x) - 1, by a polynomial near zero."""
    return cute.where(abs(x) < 0.5, x * polynomial(x, _EXPM1_NEAR), exp_narrow(x) - 1.0)


def log_narrow(x: Fragment) -> Fragment:
    """log(x) by lg2.approx, and near one, where its absolute error is too large, by a polynomial."""
    near = x - 1.0
    return cute.where(abs(near) < 0.3, near * polynomial(near, _LOG1P_NEAR), lg2(x) * LN_2)


def log2_narrow(x: Fragment) -> Fragment:
    """log2(x), computed as in `log_narrow`."""
    near = x - 1.0
    return cute.where(abs(near) < 0.3, near * LOG2_E * polynomial(near, _LOG1P_NEAR), lg2(x))


def log1p_narrow(x: Fragment) -> Fragment:
    """log(1 + x), computed as in `log_narrow`."""
    return cute.where(abs(x) < 0.3, x * polynomial(x, _LOG1P_NEAR), lg2(x + 1.0) * LN_2)


def log1p_exp(x: Fragment) -> Fragment:
    """log(1 + exp(x)) for x <= 0."""
    e = cute.math.exp(x)
    return e * polynomial(e, _LOG1P_UNIT)


def log1p_exp_narrow(x: Fragment) -> Fragment:
    """log(1 + exp(x)) for x <= 0, by `exp_narrow`."""
    e = exp_narrow(x)
    return e * polynomial(e, _LOG1P_UNIT_NARROW)
