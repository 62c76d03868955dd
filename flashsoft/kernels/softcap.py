"""Softcap: cap * tanh(x / cap), and its slope.

tanh is (1 - t) / (1 + t) with t = exp(-2 |a|), which does not overflow; near 0, where that cancels, its Taylor series.
The series ends where its next term is 2e-9 of the value at the seam. Errors are below 3e-7 of the value.
"""

import triton
import triton.language as tl

from .softmax import LOG2E

SEAM: tl.constexpr = tl.constexpr(0.3)


@triton.jit
def softcap(x, cap):
    """cap * tanh(x / cap), of one sign with x, also at infinities; NaN of NaN."""
    a = x / cap
    t = tl.exp2(tl.abs(a) * (-2.0 * LOG2E))
    far = (1.0 - t) / (1.0 + t)
    b = a * a
    near = 1.0 + b * (-1 / 3 + b * (2 / 15 + b * (-17 / 315 + b * (62 / 2835 + b * (-1382 / 155925)))))
    return cap * tl.where(tl.abs(a) < SEAM, a * near, tl.where(a < 0.0, -far, far))


@triton.jit
def softcap_slope(x, cap):
    """d softcap / dx = 1 - tanh(x / cap)^2."""
    t = tl.exp2(tl.abs(x / cap) * (-2.0 * LOG2E))
    return 4.0 * t / ((1.0 + t) * (1.0 + t))
