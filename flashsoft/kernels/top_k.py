"""Top-k by threshold: exactly k of each row, the lowest index first among equals.

Scores map to unsigned keys of the same order, and the keys are bisected under

    count(key >= low) >= k > count(key >= high)

until count(key >= low) is k, or low is the k-th largest key itself; then of the keys equal to low only the
first are kept, as many as lack. A step costs a comparison and an addition a score.
"""

import torch
import triton
import triton.language as tl

from .tiles import row_offset

INT_MIN: tl.constexpr = tl.constexpr(-(2**31))
NAN_KEY: tl.constexpr = tl.constexpr(0xFFFF0000)  # above +inf's, also after the shift
SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def key_shift(x: torch.Tensor, bias: torch.Tensor | None) -> int:
    """Low bits of a key that are alike in all scores of one sign: those that values of x itself do not have."""
    return SHIFT[x.dtype] if bias is None else 0


@triton.jit
def order_key(score, SHIFT: tl.constexpr):
    """uint32 keys in the order of the scores: -0.0 is 0.0, NaN the largest, -inf the smallest."""
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits == INT_MIN, 0, bits)
    key = (bits ^ ((bits >> 31) | INT_MIN)).to(tl.uint32, bitcast=True)
    return tl.where(score != score, NAN_KEY, key).to(tl.uint32) >> SHIFT


@triton.jit
def lowest_key(SHIFT: tl.constexpr):
    """The smallest key of a score above -inf: what lies below has no mass, and is never counted."""
    return (0x007FFFFF >> SHIFT) + 1


@triton.jit
def row_count(flags):
    """How many of each row are set."""
    return tl.sum(flags.to(tl.int32), 1)


@triton.jit
def narrow(low, high, at_least, above, guess, count, k):
    """Moves low or high, and at_least or above, to `guess`, which `count` keys of the row are at least."""
    up = (count >= k) & (guess > low)
    down = (count < k) & (guess < high)
    low, at_least = tl.where(up, guess, low), tl.where(up, count, at_least)
    high, above = tl.where(down, guess, high), tl.where(down, count, above)
    return low, high, at_least, above


@triton.jit
def unresolved(low, high, at_least, enough):
    """Whether any row's bounds need narrowing still."""
    return tl.max(((at_least > enough) & (high - low > 1)).to(tl.int32), 0) > 0


@triton.jit
def tile_threshold(key, k, enough, SHIFT: tl.constexpr):
    """low, high, at_least = count(key >= low), above = count(key >= high) for each row's k largest; and k.

    Ends with at_least from k to `enough`, if equals allow. The k returned is no more than the keys with mass. For a k
    below 1, low = high, which keeps nothing.
    """
    low = tl.zeros_like(k).to(tl.uint32) + lowest_key(SHIFT)
    high = tl.maximum(tl.max(key, 1), low) + 1
    at_least = row_count(key >= low[:, None])
    above = tl.zeros_like(at_least)
    k = tl.minimum(k, at_least)
    while unresolved(low, high, at_least, enough):
        middle = low + ((high - low) >> 1)
        count = row_count(key >= middle[:, None])
        low, high, at_least, above = narrow(low, high, at_least, above, middle, count, k)
    return tl.where(k < 1, high, low), high, at_least, above, k


@triton.jit
def tie_weight(at_least, above, k):
    """The share of the keys from low to high that is kept; all are one value unless the share is 1."""
    return (k - above).to(tl.float32) / tl.maximum(at_least - above, 1).to(tl.float32)


@triton.jit
def kept_mass(p, key, low, high, weight):
    """p where kept, before it is known which of equals are: each counts with its share."""
    p = tl.where(key >= high[:, None], p, p * weight[:, None])
    return tl.where(key >= low[:, None], p, 0.0)


@triton.jit
def first_of_equals(key, low, high, need, seen):
    """True at keys of at least high, and at the first `need` below it that are at least low, `seen` before.

    Also returns how many of those have been seen now.
    """
    equal = (key >= low[:, None]) & (key < high[:, None])
    rank = seen[:, None] + tl.cumsum(equal.to(tl.int32), 1)
    return (key >= high[:, None]) | (equal & (rank <= need[:, None])), seen + row_count(equal)


@triton.jit
def row_top_k(top_k, top_k_ptr, row, live, sizes, strides, N):
    """k of each row, int32 from 0 to N."""
    if top_k_ptr is not None:
        k = tl.load(top_k_ptr + row_offset(row, sizes, strides), mask=live, other=0)
        return tl.minimum(tl.maximum(k, 0), N).to(tl.int32)
    else:
        return tl.zeros_like(row).to(tl.int32) + top_k
