"""What top-k, top-p and min-p keep of a row: always a beginning of its scores in descending order.

Scores map to unsigned keys of the same order, and a beginning is found by its weight: for top-k every score weighs 1
and the weights are to reach k, for top-p it weighs its probability. The keys are bisected under

    weight(key >= low) >= target > weight(key >= high)

until nothing but one key is left from low to high; of the scores that have it the first are kept, as many as lack, so
that among equals the lowest index is first. A step costs a comparison and an addition a score. min-p is a threshold on
the weight relative to the row's largest.
"""

import torch
import triton
import triton.language as tl

INT_MIN: tl.constexpr = tl.constexpr(-(2**31))
NAN_KEY: tl.constexpr = tl.constexpr(0xFFFF0000)  # above +inf's, also after the shift
ALL: tl.constexpr = tl.constexpr(2**30)  # more equals than a row has
LEAST_MASS: tl.constexpr = tl.constexpr(1e-30)  # what a top-p of 0 is to reach: the largest weight is 1
SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def key_shift(x: torch.Tensor, *, exact: bool) -> int:
    """Low bits of a key that are alike in all scores of one sign; `exact`: scores are values of x, unchanged."""
    return SHIFT[x.dtype] if exact else 0


@triton.jit
def order_key(score, SHIFT: tl.constexpr):
    """uint32 keys in the order of the scores: -0.0 is 0.0, NaN the largest, -inf the smallest."""
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits == INT_MIN, 0, bits)
    key = (bits ^ ((bits >> 31) | INT_MIN)).to(tl.uint32, bitcast=True)
    return tl.where(score != score, NAN_KEY, key).to(tl.uint32) >> SHIFT


@triton.jit
def key_score(key, SHIFT: tl.constexpr):
    """The score with this key."""
    bits = (key << SHIFT).to(tl.int32, bitcast=True)
    LOW_BITS: tl.constexpr = (1 << SHIFT) - 1
    bits = tl.where(bits < 0, bits ^ INT_MIN, ~(bits | LOW_BITS))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def lowest_key(SHIFT: tl.constexpr):
    """The smallest key of a score above -inf: what lies below has no mass, and is never counted."""
    return (0x007FFFFF >> SHIFT) + 1


@triton.jit
def bounds(key, SHIFT: tl.constexpr):
    """low and high (rows,) that hold all keys with mass between them."""
    low = tl.full((key.shape[0],), lowest_key(SHIFT), tl.uint32)
    return low, tl.maximum(tl.max(key, 1), low) + 1


@triton.jit
def row_count(flags):
    """How many of each row are set."""
    return tl.sum(flags.to(tl.int32), 1)


@triton.jit
def open_rows(low, high, reached, enough):
    """Whether any row's bounds are to be narrowed still: its weight from low on is more than enough."""
    return tl.max(((high - low > 1) & (reached > enough)).to(tl.int32), 0) > 0


@triton.jit
def narrow(low, high, reached, before, middle, weight, target):
    """Moves low or high, and their weights, to `middle`, from which on the row's weight is this."""
    up = (weight >= target) & (middle > low)
    down = (weight < target) & (middle < high)
    low, reached = tl.where(up, middle, low), tl.where(up, weight, reached)
    high, before = tl.where(down, middle, high), tl.where(down, weight, before)
    return low, high, reached, before


@triton.jit
def reach(key, weight, target, enough, low, high):
    """low, high, reached = weight(key >= low) and before = weight(key >= high), narrowed for each row's target.

    Ends when reached is at most `enough`, a weight from target on, or one key is left. A target that is not reached,
    or a NaN among the weights, leaves the bounds as they are.
    """
    reached = tl.sum(tl.where(key >= low[:, None], weight, 0), 1)
    before = tl.zeros_like(reached)
    while open_rows(low, high, reached, enough):
        middle = low + ((high - low) >> 1)
        total = tl.sum(tl.where(key >= middle[:, None], weight, 0), 1)
        low, high, reached, before = narrow(low, high, reached, before, middle, total, target)
        high = tl.where((total < target) | (total >= target), high, low)  # NaN
    return low, high, reached, before


@triton.jit
def equals_lacking(target, enough, reached, before, weight):
    """How many of the keys from low to high, each of this weight, the target needs; ALL if it needs not to choose."""
    lacking = tl.ceil((target - before).to(tl.float32) / weight)
    lacking = tl.minimum(tl.maximum(lacking, 0.0), 1e9).to(tl.int32)
    return tl.where((reached > enough) & (weight > 0.0), lacking, ALL)


@triton.jit
def first_of_equals(key, low, high, need, seen):
    """True at keys of at least high, and at the first `need` below it that are at least low, `seen` before.

    Also returns how many of those have been seen now.
    """
    equal = (key >= low[:, None]) & (key < high[:, None])
    rank = seen[:, None] + tl.cumsum(equal.to(tl.int32), 1)
    return (key >= high[:, None]) | (equal & (rank <= need[:, None])), seen + row_count(equal)


@triton.jit
def beginning(key, low, high, need):
    """The keys of at least low, but of those below high only the first `need`."""
    keep = key >= low[:, None]
    if tl.min(need, 0) < ALL:
        keep, _ = first_of_equals(key, low, high, need, tl.zeros_like(need))
    return keep


@triton.jit
def kept(
    score, p, k, top_p, mass, min_p, floor,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Which scores of a tile (rows, columns) of whole rows are kept; p are their weights relative to the largest.

    mass: the row's weight that top_p is a share of; None for the tile's own, after top-k.
    floor: a key that at least k keys reach, or all that have mass; None if none is known.
    """
    key = order_key(score, SHIFT)
    low, high = bounds(key, SHIFT)
    if floor is not None:
        low = tl.maximum(low, floor)
    keep = key >= low[:, None]
    if TOP_K:
        k = tl.minimum(k, row_count(keep))
        low_k, high_k, reached, before = reach(key, keep.to(tl.int32), k, k, low, high)
        keep = beginning(key, low_k, high_k, equals_lacking(k, k, reached, before, tl.full(k.shape, 1.0, tl.float32)))
        low = low_k
    if TOP_P:
        weight = tl.where(keep, p, 0.0)
        if mass is None:
            mass = tl.sum(weight, 1)
        target = tl.maximum(top_p * mass, LEAST_MASS)
        low_p, high_p, reached, before = reach(key, weight, target, target, low, high)
        equal = (key >= low_p[:, None]) & (key < high_p[:, None])
        need = equals_lacking(target, target, reached, before, tl.max(tl.where(equal, weight, 0.0), 1))
        keep = keep & beginning(key, low_p, high_p, need)
    if MIN_P:
        keep = keep & ((p < min_p[:, None]) == 0)  # NaN is kept
    return keep
