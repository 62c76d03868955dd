"""Softcap: cap * tanh(x / cap), and its slope, without a division a value.

With s = sinh(a), tanh(a) is s / sqrt(1 + s^2) and its slope 1 / (1 + s^2): one reciprocal square root a value, and
1 / cap once.

s is an odd polynomial. A relative error e of s is one of e / cosh(a)^2 in tanh(a), so that degree 11 does: the
coefficients are those of least such error, 6e-8, over |a| <= 9. They are positive, so that s only grows beyond, where
tanh(a) is 1 to float32. With roundings, errors are below 5e-7 of the value, and below 5e-7 for the slope, whose largest
value is 1; past |a| = 9 the slope falls from 1e-7 to 0, more slowly than it should.
"""

import triton
import triton.language as tl

LARGEST: tl.constexpr = tl.constexpr(1e18)  # of s, whose square is to be finite


@triton.jit
def _sinh_and_inverse_cosh(a):
    """sinh(a) and 1 / cosh(a), as good as tanh(a) needs them."""
    b = a * a
    ratio = 1.0 + b * (0.16666725 + b * (0.008332056 + b * (1.9911357e-4 + b * (2.6242485e-6 + b * 3.3862367e-8))))
    s = tl.clamp(a * ratio, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return s, tl.rsqrt(1.0 + s * s)


@triton.jit
def tanh(a):
    """tanh(a), of one sign with a, also at infinities; NaN of NaN."""
    s, inverse = _sinh_and_inverse_cosh(a)
    return s * inverse


@triton.jit
def tanh_slope(a):
    """d tanh / da = 1 - tanh(a)^2."""
    _, inverse = _sinh_and_inverse_cosh(a)
    return inverse * inverse


@triton.jit
def softcap(x, cap):
    """cap * tanh(x / cap), of one sign with x, also at infinities; NaN of NaN."""
    return cap * tanh(x * (1.0 / cap))


@triton.jit
def softcap_slope(x, cap):
    """d softcap / dx = 1 - tanh(x / cap)^2."""
    return tanh_slope(x * (1.0 / cap))
