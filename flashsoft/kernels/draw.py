"""Inverse transform: the first place where the running sum of weights passes a share u of their sum."""

import triton
import triton.language as tl

NOWHERE: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def place_of(p, column, goal, before):
    """The column of p (rows, columns) where before + the running sum passes goal (rows,), and the last with weight.

    NOWHERE and -1 where there is none. Columns ascend, and what has no weight is never drawn, however sums are rounded.
    """
    some = p > 0.0
    passed = some & (before[:, None] + tl.cumsum(p, 1) > goal[:, None])
    return tl.min(tl.where(passed, column, NOWHERE), 1), tl.max(tl.where(some, column, -1), 1)


@triton.jit
def draw(p, column, u):
    """A column of each row (rows,), drawn by u from 0 to 1 in proportion to p; -1 where p has no finite sum above 0."""
    total = tl.sum(p, 1)
    first, last = place_of(p, column, u * total, tl.zeros_like(total))
    return settled(first, last, total)


@triton.jit
def settled(first, last, total):
    """The place found, or the last with weight if rounding hid it; -1 where the sum is 0, infinite or NaN."""
    drawn = tl.where(first < NOWHERE, first, last)
    return tl.where((total > 0.0) & (total < float("inf")), drawn, -1)
