"""The primitive: the state (m, s) of a softmax row, one tile at a time.

For the scores x_j seen so far, times a positive `scale`, a row's state is

    m = max_j x_j            s = sum_j exp(scale * (x_j - m))

with m in the units of x. States form a commutative monoid under `merge`: identity (-inf, 0), associative and
commutative up to rounding. So a row may be cut anywhere and its parts be taken in any order: tiles in a loop,
splits over programs, ranks of a group. `update` is the merge with the state of a fresh tile, and also returns
what a weighted sum over the row needs: acc <- acc * alpha + p @ v. `finish` ends a row.

Any other pivot in the place of m is a state of the same row, which `merge` and `finish` take as well, as long as no
weight and no sum of them leaves the range of its dtype; the maximum is the one that never overflows.

Not finite: a row without mass (all -inf, or wholly masked) stays (-inf, 0) and finishes as (0, -inf). +inf makes
s infinite and finishes as (NaN, +inf); NaN goes through s, so that hardware maxima which drop NaN do no harm.

Everything is fp32 and base 2: exp(a) is exp2(a * log2(e)), one MUFU instruction. `update` spells the exponent
(x - m) * c, exact in x - m, which log_softmax shows to its caller. `update_folded`, for the inner loop of
attention, spells it x * c - m, one FMA a score, with m = max_j x_j * c itself in base 2: a state whose scale is
ln 2. It must not be x * c - m * c: rounding m * c leaves alpha = 2^(m * c - m * c) off 1, and a long row drifts.
`fold` has both for a maximum that is known beforehand: one FMA a score, and exact in x - m.

Method: M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
FAR: tl.constexpr = tl.constexpr(float(1 << 30))


@triton.jit
def pivot(m):
    """What is subtracted for a maximum m: m itself, or 0 where inf - inf would turn a whole row into NaN."""
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)


@triton.jit
def exponential(x, at, scale):
    """exp(scale * (x - at)) for a pivot `at` that broadcasts against x."""
    return tl.exp2((x - at) * (scale * LOG2E))


@triton.jit
def start_from(x, scale=1.0):
    """The state of rows with one score x each, so far."""
    return x, exponential(x, pivot(x), scale)


@triton.jit
def update(m, s, x, scale=1.0):
    """Takes a tile x (rows, columns) into the state m, s (rows,).

    Returns m, s, alpha, p: the new state, the factor (rows,) of everything summed before, and the tile's weights
    (rows, columns) relative to the new m.
    """
    m_new = tl.maximum(m, tl.max(x, 1))
    at = pivot(m_new)
    alpha = exponential(m, at, scale)
    p = exponential(x, at[:, None], scale)
    return m_new, s * alpha + tl.sum(p, 1), alpha, p


@triton.jit
def rise(m, x, scale):
    """The m of `update_folded` and its alpha."""
    m_new = tl.maximum(m, tl.max(x, 1) * (scale * LOG2E))
    return m_new, tl.exp2(m - pivot(m_new))


@triton.jit
def weights_at(m, x, scale):
    """The p of `update_folded` for its new m, or for one that lies below some of x: then weights exceed 1."""
    return tl.exp2(x * (scale * LOG2E) - pivot(m)[:, None])


@triton.jit
def update_folded(m, s, x, scale):
    """`update` for a state of scale LN2, its m in base 2, by scores x of the given scale."""
    m, alpha = rise(m, x, scale)
    p = weights_at(m, x, scale)
    return m, s * alpha + tl.sum(p, 1), alpha, p


@triton.jit
def fold(m):
    """c, at and unit, of m's shape, such that exp(x - m) = exponential_folded(x, c, at) / unit, exact in x - m.

    `at` is m * c rounded, once for the row; `unit`, 2^-64 to 2^64, is what that makes of exp(0). From |m| = 2^30 on,
    where it could be larger, float32 numbers lie 64 and more apart: what differs from m is 0 with any c, and c is 1.
    """
    whole = pivot(m)
    c = tl.where(tl.abs(whole) < FAR, LOG2E, 1.0)
    at = whole * c
    return c, at, exponential_folded(whole, c, at)


@triton.jit
def exponential_folded(x, c, at):
    """exp(x - m) * unit for what `fold` gave of m, broadcast against x: one FMA and one exp2."""
    return tl.exp2(tl.fma(x, c, -at))


@triton.jit
def merge(m_a, s_a, m_b, s_b, scale=1.0):
    """The state of two disjoint parts of a row, and the factors of what was summed over each part."""
    m = tl.maximum(m_a, m_b)
    at = pivot(m)
    scale_a = exponential(m_a, at, scale)
    scale_b = exponential(m_b, at, scale)
    return m, s_a * scale_a + s_b * scale_b, scale_a, scale_b


@triton.jit
def merge_parts(m, s, scale=1.0):
    """The state (scalars) of a row from those of all its parts (parts,); (-inf, 0) stands for no part."""
    m_all = tl.max(m, 0)
    return m_all, tl.sum(s * exponential(m, pivot(m_all), scale), 0)


@triton.jit
def of_state(m, s):
    """The pivot, 1 / s and ln(s) of ended rows; the latter two NaN without mass or with +inf in the row."""
    inverse, _ = finish(m, s)
    inverse = tl.where(s == 0.0, float("nan"), inverse)
    log_s = tl.where((s == 0.0) | (s == float("inf")), float("nan"), tl.log2(s) * LN2)
    return pivot(m), inverse, log_s


@triton.jit
def settle(lse):
    """A finished row's lse as `weights` takes it: in base 2, and +inf for a row without mass."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def weights(x, settled, scale=1.0):
    """exp(scale * x - lse), the weights of a finished row again, for a `settled` lse that broadcasts against x."""
    return tl.exp2(x * (scale * LOG2E) - settled)


@triton.jit
def finish(m, s, scale=1.0):
    """1 / s (0 for a row without mass, NaN for one with +inf in it) and the natural lse = scale * m + ln(s)."""
    inverse = tl.where(s == 0.0, 0.0, tl.where(s == float("inf"), float("nan"), 1.0 / s))
    lse = tl.where(s == 0.0, float("-inf"), pivot(m) * scale + tl.log2(s) * LN2)
    return inverse, lse
