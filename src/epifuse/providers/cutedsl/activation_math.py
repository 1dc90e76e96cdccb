"""Activations on fragments by forms of their own: see `device_math` for what is meant by `..._narrow`."""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute

from epifuse.providers.cutedsl.device_math import (
    LOG2_E,
    Fragment,
    ex2,
    fma,
    like,
    maximum,
    minimum,
    polynomial,
    rcp,
)

_SHIFT = 2.0**-24


def sigmoid(x: Fragment) -> Fragment:
    """1 / (1 + exp(-x)), by exp(-|x|), which does not overflow."""
    small, large = _sigmoids(x)
    return cute.where(x < 0.0, small, large)


def _sigmoids(x: Fragment) -> tuple[Fragment, Fragment]:
    """sigmoid(-|x|) and sigmoid(|x|), both to a few ulp."""
    e = cute.math.exp(-abs(x))
    large = rcp(e + 1.0)
    return e * large, large


def sigmoid_narrow(x: Fragment) -> Fragment:
    """By ex2.approx of a rounded argument: an error of |x| ulp.

    Both terms of the denominator are shifted, lest rcp.approx.ftz flush a result below 2^-126.
    """
    return rcp(ex2(fma(x, -LOG2_E, -24.0)) + _SHIFT) * _SHIFT


def tanh_approx(x: Fragment) -> Fragment:
    """tanh.approx: PTX promises 2^-11; on an H200 it is 2^-16.6."""
    return cute.math.tanh(x, fastmath=True)


def sigmoid_by_tanh(x: Fragment) -> Fragment:
    """(1 + tanh(x / 2)) / 2 by tanh.approx: on an H200 an absolute error of 2^-17.9."""
    return fma(tanh_approx(x * 0.5), 0.5, 0.5)


def gelu_argument(x: Fragment) -> Fragment:
    """u of gelu_tanh: 0.5 x (1 + tanh(u / 2)) = x sigmoid(u), u = 2 sqrt(2/pi) (x + 0.044715 x^3)."""
    return x * fma(x * x, 2 * 0.7978845608028654 * 0.044715, 2 * 0.7978845608028654)


def gelu_tanh(x: Fragment) -> Fragment:
    """x sigmoid(u) in eight instructions with the bias, two of them of the special function unit.

    The error of e = exp(-u) grows with u, and below zero it is that of the result: PyTorch's grows faster there,
    because 1 + tanh(u / 2) cancels; above zero e is small beside 1.

    Where rcp.approx flushes, sigmoid(u) is below 2^-126; PyTorch's 1 + tanh(u / 2) is zero from 2^-24 on. One
    reciprocal of two values' product needs three instructions more: 8192 x 8192 x 512 took 120 us instead of 112.
    """
    scale = -2 * 0.7978845608028654 * LOG2_E
    return x * rcp(ex2(x * fma(x * x, scale * 0.044715, scale)) + 1.0)


def dgelu_tanh(dy: Fragment, x: Fragment) -> Fragment:
    """dy s (1 + 2 x h t) with s = sigmoid(u), t = sigmoid(-u), h = u' / 2: where s or t is small, nothing cancels.

    h meets t first, which is zero where x h overflows; far below zero s is zero, and x need not count. h itself
    overflows where PyTorch's u' does, at 5e19.
    """
    small, large = _sigmoids(gelu_argument(x))
    s, t = cute.where(x < 0.0, small, large), cute.where(x < 0.0, large, small)
    h = fma(x * (3 * 0.7978845608028654 * 0.044715), x, 0.7978845608028654)
    bounded = cute.where(x < -16.0, like(x, 0.0), x)
    return dy * (s * fma(h * t, bounded + bounded, 1.0))


_ZERO_FROM = -10.05
"""Here exp(-u) of gelu_tanh is a finite float32, and rcp.approx flushes sigmoid(u), which is below 2^-126."""


def dgelu_tanh_narrow(dy: Fragment, x: Fragment) -> Fragment:
    """The same with t = exp(-u) s, by ex2.approx of a rounded argument: half as many instructions."""
    scale, y = -2 * 0.7978845608028654 * LOG2_E, maximum(x, like(x, _ZERO_FROM))
    e = ex2(y * fma(y * y, scale * 0.044715, scale))
    s = rcp(e + 1.0)
    h = fma(x * (3 * 0.7978845608028654 * 0.044715), x, 0.7978845608028654)
    return dy * (s * fma(h * (e * s), x + x, 1.0))


_TAIL_POLE = 0.38
_TAIL = (
    0.15158917009830475,
    0.15184566378593445,
    0.12674617767333984,
    0.10590719431638718,
    -0.05414474010467529,
    0.20665960013866425,
    -0.4299464821815491,
    0.36497732996940613,
    -0.14761170744895935,
    0.02397780306637287,
)
"""exp(t^2 / 2) Q(t) / u with u = 1 / (1 + 0.38 t), Q the upper tail of the normal distribution, 0 <= t < 14.5, to
2^-26.6; the form is Hastings' (Abramowitz and Stegun 26.2.17)."""
_TAIL_POLE_NARROW = 0.36
_TAIL_NARROW = (
    0.1437089741230011,
    0.14183038473129272,
    0.13940005004405975,
    0.02742673084139824,
    0.17967738211154938,
    -0.17882630228996277,
    0.04678236320615814,
)
"""The same with its own pole, to 2^-19.9."""
_INV_SQRT_2PI = 0.3989422804014327


def _bell(x: Fragment) -> Fragment:
    """exp(-x^2 / 2), with the rounding error of the square put right."""
    x = minimum(abs(x), like(x, 16.0))  # beyond, it is zero
    square = x * x
    e = cute.math.exp(square * -0.5)
    return fma(e * -0.5, fma(x, x, -square), e)


def _scaled_tail(x: Fragment, times: float = 1.0) -> Fragment:
    """exp(x^2 / 2) Q(|x|), so many times."""
    u = rcp(fma(abs(x), _TAIL_POLE, 1.0))
    return u * polynomial(u, tuple(times * coefficient for coefficient in _TAIL))


def gelu_erf(x: Fragment) -> Fragment:
    """PyTorch's formula: six instructions less than by the tail."""
    return x * 0.5 * (cute.math.erf(x * 0.7071067811865476) + 1.0)


def gelu_erf_narrow(x: Fragment) -> Fragment:
    """x Phi(x) by the tail of the normal distribution, which is exact where 1 + erf(x / sqrt 2) cancels."""
    u = rcp(fma(abs(x), _TAIL_POLE_NARROW, 1.0))
    tail = u * polynomial(u, _TAIL_NARROW) * ex2(x * x * (-0.5 * LOG2_E))
    return x * cute.where(x > 0.0, like(x, 1.0) - tail, tail)


def dgelu_erf(dy: Fragment, x: Fragment) -> Fragment:
    """dy (Phi(x) + x phi(x)): below zero phi(x) times the difference of Mills' ratio and |x|."""
    below = _bell(x) * fma(abs(x), -_INV_SQRT_2PI, _scaled_tail(x))
    return dy * cute.where(x > 0.0, like(x, 1.0) - below, below)


def dgelu_erf_narrow(dy: Fragment, x: Fragment) -> Fragment:
    """The same by ex2.approx of a rounded argument. The tail stays exact: Mills' ratio and |x| cancel near -0.75.

    exp(-x^2 / 2) comes 2^32 times: by itself ex2.approx flushes it from x = -13.3 on, where the slope is no subnormal.
    """
    raised, times = ex2(fma(x * x, -0.5 * LOG2_E, 32.0)), 2.0**-32
    below = raised * fma(abs(x), -_INV_SQRT_2PI * times, _scaled_tail(x, times))
    return dy * cute.where(x > 0.0, like(x, 1.0) - below, below)


def softplus_by(log_one_plus: Callable[[Fragment], Fragment]) -> Callable[..., Fragment]:
    """softplus with beta one and a threshold of 15 or more, from where on log(1 + exp(-x)) beside x rounds away."""
    return lambda x, *_: maximum(x, like(x, 0.0)) + log_one_plus(-abs(x))


def softplus_row(log_one_plus: Callable[[Fragment], Fragment], quotient: Any) -> Callable[..., Fragment]:
    """softplus by its logarithm and its division by beta, which is None where beta is one."""

    def softplus(x: Fragment, beta: Fragment, threshold: Fragment) -> Fragment:
        scaled = x * beta
        bent = maximum(scaled, like(x, 0.0)) + log_one_plus(-abs(scaled))
        return cute.where(scaled > threshold, x, quotient(bent, beta) if quotient else bent)

    return softplus


def mish_row(exp: Callable[[Fragment], Fragment]) -> Callable[[Fragment], Fragment]:
    """x tanh(log(1 + e)) = x n / (n + 2) with n = e (e + 2), e = exp(x)."""

    def mish(x: Fragment) -> Fragment:
        e = exp(minimum(x, like(x, 30.0)))  # from there on the quotient is one
        n = e * (e + 2.0)
        return x * (n * rcp(n + 2.0))

    return mish
