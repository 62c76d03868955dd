"""Top-k, top-p and min-p of rows that wide_selection.py leaves open, by loops over the row.

A program owns a row. It narrows the bounds of what is kept by the weights from three keys on, a pass over the row,
until few scores lie between them; of those it gathers the columns and finds the end on chip. A pass for the row's state
and one for its results follow. All but the first passes are mostly from the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .draw import NOWHERE, place_of, settled
from .options import row_inverse, row_limits, row_uniform
from .scores import ended, score_offsets, score_scale, score_tile
from .selection import (
    ALL,
    LEAST_MASS,
    equals_lacking,
    first_of_equals,
    key_score,
    lowest_key,
    narrow,
    open_rows,
    order_key,
    reach,
    row_count,
)
from .softmax import exponential, pivot
from .tiles import row_offset
from .wide_selection import load_maxima

FOLD: tl.constexpr = tl.constexpr(2)  # a thread holds at least so many times eight columns of a tile, far apart


@triton.jit
def lane_sums(x):
    """The sums (1, columns / FOLD) of a tile (1, columns) that threads can take of what they hold."""
    return tl.sum(tl.reshape(x, (1, FOLD, x.shape[1] // FOLD)), 1)


@triton.jit
def reaches(score, key_from, SHIFT: tl.constexpr):
    """Where a score's key is at least key_from, one above -inf's; two instructions, where a key costs seven."""
    return (score < key_score(key_from, SHIFT)[:, None]) == 0  # NaN is above all


@triton.jit
def weights_from(
    source, N, m, scale, a, b, c, target,
    BY_MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weights of a row from each of three keys on, in one pass; as `target` is: masses, or counts."""
    sums_a = tl.zeros((1, BLOCK // FOLD), target.dtype)
    sums_b = tl.zeros((1, BLOCK // FOLD), target.dtype)
    sums_c = tl.zeros((1, BLOCK // FOLD), target.dtype)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        score = score_tile(columns, (columns < N)[None, :], source)
        if BY_MASS:
            weight = exponential(score, pivot(m)[:, None], scale[:, None])
        else:
            weight = tl.full((1, BLOCK), 1, tl.int32)
        sums_a += lane_sums(tl.where(reaches(score, a, SHIFT), weight, 0))
        sums_b += lane_sums(tl.where(reaches(score, b, SHIFT), weight, 0))
        sums_c += lane_sums(tl.where(reaches(score, c, SHIFT), weight, 0))
    return tl.sum(sums_a, 1), tl.sum(sums_b, 1), tl.sum(sums_c, 1)


@triton.jit
def many_open(
    low, high, reached, before, enough, m, scale,
    BY_MASS: tl.constexpr, SHIFT: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Whether the bounds are to be narrowed still, and there may be more than FEW scores between them."""
    most = (reached - before).to(tl.float32)
    if BY_MASS:
        most /= exponential(key_score(low, SHIFT), pivot(m), scale)  # each has at least low's weight
    return tl.max(((high - low > 1) & (reached > enough) & (most > FEW // 2)).to(tl.int32), 0) > 0


@triton.jit
def reach_few(
    source, N, m, scale, target, enough, low, high, before, few,
    BY_MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The end of `reach_row`: the columns of what is between the bounds are gathered in few, the rest is on chip."""
    count = tl.zeros((1,), tl.int32)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        score = score_tile(columns, (columns < N)[None, :], source)
        between = reaches(score, low, SHIFT) & (reaches(score, high, SHIFT) == 0)
        slot = count[:, None] + tl.cumsum(between.to(tl.int32), 1) - 1
        tl.store(few + slot, columns[None, :], mask=between & (slot < FEW))
        count += row_count(between)
    tl.debug_barrier()
    place = tl.arange(0, FEW)
    some = tl.load(few + place, mask=place < tl.max(count, 0), other=N)
    score = score_tile(some, (some < N)[None, :], source)
    key = order_key(score, SHIFT)
    if BY_MASS:
        weight = exponential(score, pivot(m)[:, None], scale[:, None])
    else:
        weight = (key >= low[:, None]).to(tl.int32)
    low, high, reached_here, before_here = reach(key, weight, target - before, enough - before, low, high)
    return low, high, before + reached_here, before + before_here


@triton.jit
def reach_row(
    source, N, m, scale, target, enough, low, high, reached, few,
    BY_MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """`selection.reach` for a whole row, whose weight from low on is `reached`.

    A pass takes three keys at once, until there are few scores between the bounds.
    """
    before = tl.zeros_like(reached)
    if BY_MASS:
        # most of the mass is a few temperatures below the largest
        least, most = low + 1, tl.maximum(high - 1, low + 1)
        a = tl.minimum(tl.maximum(order_key(m - 12.0 / scale, SHIFT), least), most)
        b = tl.minimum(tl.maximum(order_key(m - 4.0 / scale, SHIFT), least), most)
        c = tl.minimum(tl.maximum(order_key(m - 1.0 / scale, SHIFT), least), most)
    else:
        a, b, c = quarters(low, high)
    while many_open(low, high, reached, before, enough, m, scale, BY_MASS, SHIFT, FEW):
        weight_a, weight_b, weight_c = weights_from(source, N, m, scale, a, b, c, target, BY_MASS, SHIFT, BLOCK)
        low, high, reached, before = narrow(low, high, reached, before, a, weight_a, target)
        low, high, reached, before = narrow(low, high, reached, before, b, weight_b, target)
        low, high, reached, before = narrow(low, high, reached, before, c, weight_c, target)
        high = tl.where(weight_a == weight_a, high, low)  # NaN
        a, b, c = quarters(low, high)
    if open_rows(low, high, reached, enough):
        low, high, reached, before = reach_few(
            source, N, m, scale, target, enough, low, high, before, few, BY_MASS, SHIFT, BLOCK, FEW
        )
    return low, high, reached, before


@triton.jit
def quarters(low, high):
    """Three keys from low to high, as far apart."""
    quarter = tl.maximum((high - low) >> 2, 1)
    b = tl.minimum(low + 2 * quarter, high)
    return low + quarter, b, tl.minimum(b + quarter, high)


@triton.jit
def row_weights(
    source, N, m, scale, low, high, need, min_p,
    MIN_P: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many keys from low to high there are, and the weight of the first `need` of them and of all above."""
    count = tl.zeros((1, BLOCK // FOLD), tl.int32)
    above = tl.zeros((1, BLOCK // FOLD), tl.float32)
    equal = tl.zeros((1, BLOCK // FOLD), tl.float32)
    largest = tl.zeros((1,), tl.float32)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        score = score_tile(columns, (columns < N)[None, :], source)
        p = exponential(score, pivot(m)[:, None], scale[:, None])
        if MIN_P:
            p = tl.where(p < min_p[:, None], 0.0, p)
        is_above = reaches(score, high, SHIFT)
        is_equal = reaches(score, low, SHIFT) & (is_above == 0)
        p_equal = tl.where(is_equal, p, 0.0)
        count += lane_sums(is_equal.to(tl.int32))
        above += lane_sums(tl.where(is_above, p, 0.0))
        equal += lane_sums(p_equal)
        largest = tl.maximum(largest, tl.max(p_equal, 1))
    counts, all_equal = tl.sum(count, 1), tl.sum(equal, 1)
    first_equal = need.to(tl.float32) * largest
    return counts, tl.sum(above, 1) + tl.where(need < counts, first_equal, all_equal)


@triton.jit
def row_cut(
    source, N, m, scale, k, top_p, low, high, few,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """low, high and need, as `selection.beginning` takes them, of a whole row; low as far up as is known already."""
    need = tl.full((1,), ALL, tl.int32)
    floor = tl.full((1,), lowest_key(SHIFT), tl.uint32)
    if TOP_K:
        count, _ = row_weights(source, N, m, scale, low, high, need, top_p, False, SHIFT, BLOCK)
        if tl.max((count < k).to(tl.int32), 0) > 0:
            low = floor
            count, _ = row_weights(source, N, m, scale, low, high, need, top_p, False, SHIFT, BLOCK)
            k = tl.minimum(k, count)
        low, high_k, reached, before = reach_row(
            source, N, m, scale, k, k, low, high, count, few, False, SHIFT, BLOCK, FEW
        )
        need = equals_lacking(k, k, reached, before, tl.full((1,), 1.0, tl.float32))
    else:
        low, high_k = floor, high
    if TOP_P:
        _, mass = row_weights(source, N, m, scale, low, high_k, need, top_p, False, SHIFT, BLOCK)
        target = tl.maximum(top_p * mass, LEAST_MASS)
        low_p, high_p, reached, before = reach_row(
            source, N, m, scale, target, target, low, high, mass, few, True, SHIFT, BLOCK, FEW
        )
        weight = exponential(key_score(low_p, SHIFT), pivot(m), scale)
        need_p = equals_lacking(target, target, reached, before, weight)
        need = tl.where(low_p == low, tl.minimum(need, need_p), need_p)
        high_k = tl.where((low_p == low) & (need_p == ALL), high_k, high_p)
        low = low_p
    return low, high_k, need


@triton.jit
def write_row(
    source, N, m, scale, k, top_p, min_p, u, poisoned, low, high, few, row, y_row, y_step, lse_ptr, token_ptr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The results of a row by loops over all of it."""
    low, high, need = row_cut(source, N, m, scale, k, top_p, low, high, few, TOP_K, TOP_P, SHIFT, BLOCK, FEW)
    equals, s = row_weights(source, N, m, scale, low, high, need, min_p, MIN_P, SHIFT, BLOCK)
    inverse_s = ended(m, s, scale, poisoned, row, row >= 0, lse_ptr)
    tied = tl.max((equals > need).to(tl.int32), 0) > 0
    seen = tl.zeros((1,), tl.int32)
    passed = tl.zeros((1,), tl.float32)
    token = tl.full((1,), NOWHERE, tl.int32)
    last = tl.full((1,), -1, tl.int32)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = (columns < N)[None, :]
        score = score_tile(columns, inside, source)
        keep = reaches(score, low, SHIFT)
        if tied:
            keep, seen = first_of_equals(order_key(score, SHIFT), low, high, need, seen)
        p = exponential(score, pivot(m)[:, None], scale[:, None])
        if MIN_P:
            keep = keep & ((p < min_p[:, None]) == 0)
        p = tl.where(keep, p, 0.0)
        if y_row is not None:
            y = (p * inverse_s[:, None]).to(y_row.dtype.element_ty)
            tl.store(y_row + columns[None, :].to(tl.int64) * y_step, y, mask=inside)
        if token_ptr is not None:
            here, last_here = place_of(p, columns[None, :], u * s, passed)
            token = tl.minimum(token, here)
            last = tl.maximum(last, last_here)
            passed += tl.sum(p, 1)
    if token_ptr is not None:
        tl.store(token_ptr + row, tl.where(poisoned, -1, settled(token, last, s)).to(tl.int64))


@triton.jit(do_not_specialize=["lo", "hi", "top_k"])
def loop_kernel(
    x_ptr, temperature_ptr, mask_ptr, bias_ptr, top_k_ptr, top_p_ptr, min_p_ptr, uniform_ptr, maxima_ptr, open_ptr,
    y_ptr, lse_ptr, token_ptr, few_ptr,
    inverse, factor, cap, lo, hi, top_k, top_p, min_p, N, chunks,
    sizes, x_strides, y_strides, mask_strides, bias_strides, x_step, y_step, mask_step, bias_step,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, SHIFT: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """A program owns a row, unless it is said not to be open: y or a token, and lse, by loops over the row."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    is_open = row >= 0
    if open_ptr is not None:
        is_open = tl.load(open_ptr + row) != 0
    if tl.max(is_open.to(tl.int32), 0) > 0:
        row_scale, poisoned = row_inverse(inverse, temperature_ptr, row, row >= 0, WITH_BIAS=bias_ptr is not None)
        at = score_offsets(row, sizes, x_strides, mask_strides, bias_strides)
        steps = (x_step, mask_step, bias_step)
        source = ((x_ptr, mask_ptr, bias_ptr), at, steps, (row_scale, factor, cap), (lo, hi))
        scale = score_scale(row_scale, WITH_BIAS=bias_ptr is not None)
        k, share, least, poisoned = row_limits(
            top_k, top_k_ptr, top_p, top_p_ptr, min_p, min_p_ptr, row, row >= 0, N, poisoned, TOP_K, TOP_P, MIN_P
        )
        u = None
        if token_ptr is not None:
            u = row_uniform(uniform_ptr, temperature_ptr, row, row >= 0)
        y_row = None
        if y_ptr is not None:
            y_row = y_ptr + row_offset(row, sizes, y_strides)[:, None]
        maxima = load_maxima(maxima_ptr, row, chunks, CHUNKS)
        m = tl.max(maxima, 1)
        low = tl.full((1,), lowest_key(SHIFT), tl.uint32)
        top = tl.maximum(order_key(m, SHIFT), low) + 1
        if TOP_K:
            key = order_key(maxima, SHIFT)
            some = (key >= low[:, None]).to(tl.int32)
            lacking = tl.minimum(k, tl.sum(some, 1))
            low, _, _, _ = reach(key, some, lacking, lacking, low, top)
        few = few_ptr + tl.max(row, 0) * FEW
        write_row(
            source, N, m, scale, k, share, least, u, poisoned, low, top, few, row, y_row, y_step, lse_ptr, token_ptr,
            TOP_K, TOP_P, MIN_P, SHIFT, BLOCK, FEW,
        )  # fmt: skip
