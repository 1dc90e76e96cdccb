"""Activations on fragments, each by a formula of its own. `device_math` explains fragments and the suffix `_narrow`."""

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
    """1 / (1 + exp(-x)), computed from exp(-|x|), which cannot overflow."""
    small, large = _sigmoids(x)
    return cute.where(x < 0.0, small, large)


def _sigmoids(x: Fragment) -> tuple[Fragment, Fragment]:
    """sigmoid(-|x|) and sigmoid(|x|), both to a few ulp."""
    e = cute.math.exp(-abs(x))
    large = rcp(e + 1.0)
    return e * large, large


def sigmoid_narrow(x: Fragment) -> Fragment:
    """sigmoid(x) by ex2.approx. The rounding of its argument causes an error of |x| ulp.

    Both terms of the denominator are scaled by 2^-24, because rcp.approx.ftz flushes a result below 2^-126 to zero.
    """
    return rcp(ex2(fma(x, -LOG2_E, -24.0)) + _SHIFT) * _SHIFT


def tanh_approx(x: Fragment) -> Fragment:
    """tanh(x) by tanh.approx. PTX promises an error of at most 2^-11; on an H200 it is 2^-16.6."""
    return cute.math.tanh(x, fastmath=True)


def sigmoid_by_tanh(x: Fragment) -> Fragment:
    """sigmoid(x) as (1 + tanh(x / 2)) / 2 by tanh.approx. On an H200 the absolute error is 2^-17.9."""
    return fma(tanh_approx(x * 0.5), 0.5, 0.5)


def gelu_argument(x: Fragment) -> Fragment:
    """u = 2 sqrt(2/pi) (x + 0.044715 x^3), with which gelu_tanh(x) = 0.5 x (1 + tanh(u / 2)) = x sigmoid(u)."""
    return x * fma(x * x, 2 * 0.7978845608028654 * 0.044715, 2 * 0.7978845608028654)


def gelu_tanh(x: Fragment) -> Fragment:
    """x sigmoid(u) in eight instructions, a bias included. Two of them run on the special function unit.

    The error of e = exp(-u) grows with |u|. Below zero it is the error of the result. PyTorch's error grows faster
    there, because 1 + tanh(u / 2) cancels. Above zero e is small beside 1.

    rcp.approx flushes to zero where sigmoid(u) is below 2^-126. PyTorch's 1 + tanh(u / 2) is zero below 2^-24 already.
    One reciprocal for two values, of their product, needs three more instructions: 8192 x 8192 x 512 took 120 us
    instead of 112.
    """
    scale = -2 * 0.7978845608028654 * LOG2_E
    return x * rcp(ex2(x * fma(x * x, scale * 0.044715, scale)) + 1.0)


def dgelu_tanh(dy: Fragment, x: Fragment) -> Fragment:
    """dy s (1 + 2 x h t) with s = sigmoid(u), t = sigmoid(-u), h = u' / 2. Nothing cancels where s or t is small.

    h is multiplied by t first, because t is zero where x h overflows. Far below zero s is zero, so 0 may replace x.
    h itself overflows where PyTorch's u' does, at 5e19.
    """
    small, large = _sigmoids(gelu_argument(x))
    s, t = cute.where(x < 0.0, small, large), cute.where(x < 0.0, large, small)
    h = fma(x * (3 * 0.7978845608028654 * 0.044715), x, 0.7978845608028654)
    bounded = cute.where(x < -16.0, like(x, 0.0), x)
    return dy * (s * fma(h * t, bounded + bounded, 1.0))


_ZERO_FROM = -10.05
"""The x to which `dgelu_tanh_narrow` raises smaller ones. There exp(-u) is still a finite float32, and sigmoid(u) is
below 2^-126, so that rcp.approx flushes it to zero."""


def dgelu_tanh_narrow(dy: Fragment, x: Fragment) -> Fragment:
    """`dgelu_tanh` with t = exp(-u) s, and exp(-u) by ex2.approx of a rounded argument: half as many instructions."""
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
"""The polynomial in u = 1 / (1 + 0.38 t) that is exp(t^2 / 2) Q(t) / u, to 2^-26.6 for 0 <= t < 14.5. Q is the upper
tail of the normal distribution. The form is Hastings' (Abramowitz and Stegun 26.2.17)."""
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
"""The same polynomial with `_TAIL_POLE_NARROW` in place of 0.38, to 2^-19.9."""
_INV_SQRT_2PI = 0.3989422804014327


def _bell(x: Fragment) -> Fragment:
    """exp(-x^2 / 2), corrected for the rounding error of x * x."""
    x = minimum(abs(x), like(x, 16.0))  # beyond 16 the result is zero
    square = x * x
    e = cute.math.exp(square * -0.5)
    return fma(e * -0.5, fma(x, x, -square), e)


def _scaled_tail(x: Fragment, times: float = 1.0) -> Fragment:
    """`times` * exp(x^2 / 2) Q(|x|), with Q as for `_TAIL`."""
    u = rcp(fma(abs(x), _TAIL_POLE, 1.0))
    return u * polynomial(u, tuple(times * coefficient for coefficient in _TAIL))


def gelu_erf(x: Fragment) -> Fragment:
    """gelu by PyTorch's formula with erf, which takes six instructions fewer than the formula with the tail."""
    return x * 0.5 * (cute.math.erf(x * 0.7071067811865476) + 1.0)


def gelu_erf_narrow(x: Fragment) -> Fragment:
    """x Phi(x) by the tail of the normal distribution, which is exact where 1 + erf(x / sqrt 2) cancels."""
    u = rcp(fma(abs(x), _TAIL_POLE_NARROW, 1.0))
    tail = u * polynomial(u, _TAIL_NARROW) * ex2(x * x * (-0.5 * LOG2_E))
    return x * cute.where(x > 0.0, like(x, 1.0) - tail, tail)


def dgelu_erf(dy: Fragment, x: Fragment) -> Fragment:
    """dy (Phi(x) + x phi(x)). Below zero the factor of dy is phi(x) times (Mills' ratio - |x|)."""
    below = _bell(x) * fma(abs(x), -_INV_SQRT_2PI, _scaled_tail(x))
    return dy * cute.where(x > 0.0, like(x, 1.0) - below, below)


def dgelu_erf_narrow(dy: Fragment, x: Fragment) -> Fragment:
    """`dgelu_erf` by ex2.approx of a rounded argument. The tail stays exact: Mills' ratio and |x| cancel near -0.75.

    exp(-x^2 / 2) is computed times 2^32. Unscaled, ex2.approx would flush it to zero from x = -13.3 on, where the
    derivative is not subnormal yet.
    """
    raised, times = ex2(fma(x * x, -0.5 * LOG2_E, 32.0)), 2.0**-32
    below = raised * fma(abs(x), -_INV_SQRT_2PI * times, _scaled_tail(x, times))
    return dy * cute.where(x > 0.0, like(x, 1.0) - below, below)


def softplus_by(log_one_plus: Callable[[Fragment], Fragment]) -> Callable[..., Fragment]:
    """Return softplus for beta = 1 and a threshold of at least 15: from there on log(1 + exp(-x)) no longer changes x.
    `log_one_plus` computes log(1 + exp(x)) for x <= 0."""
    return lambda x, *_: maximum(x, like(x, 0.0)) + log_one_plus(-abs(x))


def softplus_row(log_one_plus: Callable[[Fragment], Fragment], quotient: Any) -> Callable[..., Fragment]:
    """Return softplus, computed with `log_one_plus` as in `softplus_by` and a division by beta, `quotient`, which is
    None if beta is one."""

    def softplus(x: Fragment, beta: Fragment, threshold: Fragment) -> Fragment:
        scaled = x * beta
        bent = maximum(scaled, like(x, 0.0)) + log_one_plus(-abs(scaled))
        return cute.where(scaled > threshold, x, quotient(bent, beta) if quotient else bent)

    return softplus


def mish_row(exp: Callable[[Fragment], Fragment]) -> Callable[[Fragment], Fragment]:
    """Return mish, x tanh(log(1 + e)) = x n / (n + 2) with n = e (e + 2), e = exp(x), computed with this `exp`."""

    def mish(x: Fragment) -> Fragment:
        e = exp(minimum(x, like(x, 30.0)))  # from 30 on the quotient n / (n + 2) is one
        n = e * (e + 2.0)
        return x * (n * rcp(n + 2.0))

    return mish
