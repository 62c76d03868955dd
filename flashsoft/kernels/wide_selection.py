"""Top-k, top-p and min-p of wide rows, x read from memory once wherever that is possible.

One launch streams x: it takes the largest score of each chunk of neighbouring columns, and fills y with zeros. In a
second a program owns a row. The k largest scores lie in the k chunks with the largest maxima, the first of those that
are equal: so it chooses chunks, then reads their few scores again and chooses among those, exactly.

top-p and min-p without top-k do the same with a fixed number of chunks. What lies in no chosen chunk is at most the
largest maximum among the others; if what is kept ends above that, it has been found. Otherwise (a flat row, or a k of
a thousand and more) a third launch loops over the row, see row_loops.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .draw import draw
from .options import row_inverse, row_limits, row_uniform
from .scores import ended, score_offsets, score_scale, score_tile
from .selection import (
    LEAST_MASS,
    beginning,
    equals_lacking,
    kept,
    lowest_key,
    order_key,
    reach,
    row_count,
)
from .softmax import exponential, merge_parts, pivot
from .tiles import row_offset


@triton.jit
def part_state(score, scale):
    """The state (m, s) of a part of a row from its scores (1, columns)."""
    m = tl.max(score, 1)
    return m, tl.sum(exponential(score, pivot(m)[:, None], scale[:, None]), 1)


@triton.jit
def load_states(states_ptr, row, parts, BLOCK_PARTS: tl.constexpr):
    """The states m, s (BLOCK_PARTS,) of the parts of a row (1,)."""
    part = tl.arange(0, BLOCK_PARTS)
    at = states_ptr + (tl.max(row, 0) * parts + part) * 2
    m_parts = tl.load(at, mask=part < parts, other=float("-inf"))
    return m_parts, tl.load(at + 1, mask=part < parts, other=0.0)


@triton.jit
def row_state(states_ptr, row, parts, scale, BLOCK_PARTS: tl.constexpr):
    """The state (m, s), each (1,), of a row (1,) from those of its parts."""
    m_parts, s_parts = load_states(states_ptr, row, parts, BLOCK_PARTS)
    m, s = merge_parts(m_parts, s_parts, tl.max(scale, 0))
    return tl.full((1,), m, tl.float32), tl.full((1,), s, tl.float32)


@triton.jit(do_not_specialize=["lo", "hi"])
def stream_kernel(
    x_ptr, temperature_ptr, mask_ptr, bias_ptr, y_ptr, maxima_ptr, states_ptr,
    inverse, factor, cap, lo, hi, N, parts, chunks, sizes, x_strides, y_strides, mask_strides, bias_strides,
    x_step, y_step, mask_step, bias_step,
    PART: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program owns a part of a row: its chunks' maxima, its state, and zeros into y, each if it is asked for."""
    row = tl.program_id(0).to(tl.int64) // parts + tl.arange(0, 1)
    part = tl.program_id(0) % parts
    columns = part * PART + tl.arange(0, PART)
    inside = (columns < N)[None, :]
    inverse, _ = row_inverse(inverse, temperature_ptr, row, row >= 0, WITH_BIAS=bias_ptr is not None)
    at = score_offsets(row, sizes, x_strides, mask_strides, bias_strides)
    steps = (x_step, mask_step, bias_step)
    source = ((x_ptr, mask_ptr, bias_ptr), at, steps, (inverse, factor, cap), (lo, hi))
    score = score_tile(columns, inside, source)
    if y_ptr is not None:
        at_y = y_ptr + row_offset(row, sizes, y_strides)[:, None] + columns[None, :].to(tl.int64) * y_step
        tl.store(at_y, tl.zeros((1, PART), y_ptr.dtype.element_ty), mask=inside)
    if maxima_ptr is not None:
        # NaN must not get lost, and whichever of both a row keeps, it is NaN
        largest = tl.where(score != score, float("inf"), score)
        maxima = tl.max(tl.reshape(largest, (PART // CHUNK, CHUNK)), 1)
        chunk = part * (PART // CHUNK) + tl.arange(0, PART // CHUNK)
        tl.store(maxima_ptr + tl.max(row, 0) * chunks + chunk, maxima, mask=chunk < chunks)
    if states_ptr is not None:
        m, s = part_state(score, score_scale(inverse, WITH_BIAS=bias_ptr is not None))
        state = states_ptr + tl.program_id(0).to(tl.int64) * 2 + tl.arange(0, 1)
        tl.store(state, m)
        tl.store(state + 1, s)


@triton.jit
def load_maxima(maxima_ptr, row, chunks, CHUNKS: tl.constexpr):
    """The maxima (1, CHUNKS) of a row's chunks."""
    chunk = tl.arange(0, CHUNKS)
    return tl.load(maxima_ptr + tl.max(row, 0) * chunks + chunk, mask=chunk < chunks, other=float("-inf"))[None, :]


@triton.jit(do_not_specialize=["lo", "hi", "top_k"])
def choose_kernel(
    x_ptr, temperature_ptr, mask_ptr, bias_ptr, top_k_ptr, top_p_ptr, min_p_ptr, uniform_ptr, maxima_ptr, states_ptr,
    y_ptr, lse_ptr, token_ptr, chosen_ptr, open_ptr,
    inverse, factor, cap, lo, hi, top_k, top_p, min_p, N, parts, chunks,
    sizes, x_strides, y_strides, mask_strides, bias_strides, x_step, y_step, mask_step, bias_step,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, SHIFT: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """A program owns a row: what it keeps, and of that the softmax into y, which is zeros, or a token; and lse.

    CHOSEN: the chunks that there is room for. open: rows for which they are not enough, None if they always are.
    """
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    inverse, poisoned = row_inverse(inverse, temperature_ptr, row, row >= 0, WITH_BIAS=bias_ptr is not None)
    at = score_offsets(row, sizes, x_strides, mask_strides, bias_strides)
    steps = (x_step, mask_step, bias_step)
    source = ((x_ptr, mask_ptr, bias_ptr), at, steps, (inverse, factor, cap), (lo, hi))
    scale = score_scale(inverse, WITH_BIAS=bias_ptr is not None)
    k, share, least, poisoned = row_limits(
        top_k, top_k_ptr, top_p, top_p_ptr, min_p, min_p_ptr, row, row >= 0, N, poisoned, TOP_K, TOP_P, MIN_P
    )
    maxima = load_maxima(maxima_ptr, row, chunks, CHUNKS)
    m = tl.max(maxima, 1)

    key = order_key(maxima, SHIFT)
    low = tl.full((1,), lowest_key(SHIFT), tl.uint32)
    high = tl.maximum(order_key(m, SHIFT), low) + 1
    some = key >= low[:, None]
    lacking = row_count(some)
    if TOP_K:
        lacking = tl.minimum(k, lacking)
    else:
        lacking = tl.minimum(CHOSEN, lacking)
    enough = tl.maximum(lacking, CHOSEN)
    low, high, reached, before = reach(key, some.to(tl.int32), lacking, enough, low, high)
    need = equals_lacking(lacking, enough, reached, before, tl.full((1,), 1.0, tl.float32))
    take = beginning(key, low, high, need)
    count = row_count(take)
    slot = tl.cumsum(take.to(tl.int32), 1) - 1
    chosen = chosen_ptr + tl.max(row, 0) * CHOSEN
    tl.store(chosen + slot, tl.arange(0, CHUNKS)[None, :], mask=take & (slot < CHOSEN))
    tl.debug_barrier()
    place = tl.arange(0, CHOSEN)
    of_place = tl.load(chosen + place, mask=place < tl.max(count, 0), other=chunks)
    columns = tl.reshape(of_place[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :], (CHOSEN * CHUNK,))

    score = score_tile(columns, (columns < N)[None, :], source)
    p = exponential(score, pivot(m)[:, None], scale[:, None])
    mass, floor = None, None
    if TOP_K:
        resolved = count <= CHOSEN
        floor = low
    else:
        bound = tl.max(tl.where(take, float("-inf"), maxima), 1)
        resolved = bound == float("-inf")
        unsure = score <= bound[:, None]  # which NaN is not
        p = tl.where(unsure, 0.0, p)
        score = tl.where(unsure, float("-inf"), score)
        if TOP_P:
            _, mass = row_state(states_ptr, row, parts, scale, BLOCK_PARTS)
            resolved = resolved | (tl.sum(p, 1) >= tl.maximum(share * mass, LEAST_MASS))
        if MIN_P:
            resolved = resolved | (exponential(bound, pivot(m), scale) < least)
    if open_ptr is not None:
        tl.store(open_ptr + row, (resolved == 0).to(tl.int32))
    if tl.max(resolved.to(tl.int32), 0) > 0:
        keep = kept(score, p, k, share, mass, least, floor, TOP_K, TOP_P, MIN_P, SHIFT)
        p = tl.where(keep, p, 0.0)
        inverse_s = ended(m, tl.sum(p, 1), scale, poisoned, row, row >= 0, lse_ptr)
        if token_ptr is not None:
            u = row_uniform(uniform_ptr, temperature_ptr, row, row >= 0)
            tl.store(token_ptr + row, tl.where(poisoned, -1, draw(p, columns[None, :], u)).to(tl.int64))
        if y_ptr is not None:
            y_row = y_ptr + row_offset(row, sizes, y_strides)[:, None]
            if tl.max((inverse_s != inverse_s).to(tl.int32), 0) > 0:
                for start in range(0, N, BLOCK):
                    j = start + tl.arange(0, BLOCK)[None, :]
                    nan = tl.full((1, BLOCK), float("nan"), tl.float32).to(y_ptr.dtype.element_ty)
                    tl.store(y_row + j.to(tl.int64) * y_step, nan, mask=j < N)
            else:
                y = (p * inverse_s[:, None]).to(y_ptr.dtype.element_ty)
                tl.store(y_row + columns[None, :].to(tl.int64) * y_step, y, mask=keep)
