"""Fused temperature, bias, mask, top-k and softmax of logits.

A row that fits one tile is read once, stays on chip and is written once (several short rows a program); its bytes are
those of x, y, and of mask and bias where they are full. Of a wider row the few largest are found in one read by
candidates.py. Any other wide row is one program's loop over tiles: two passes without top-k; with it one for the
maxima, one for every two bits of the threshold (a few for bfloat16, some ten for float32), one for s and one for y.
All but the first are from L2 as far as the rows in flight fit there. Nothing of the size of x is stored besides y.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..tuning import logits as tuning
from .candidates import top_k_softmax
from .launch import Launch, Tensors, launch
from .scores import fold_given, last_stride, row_inverse, score_tile, split_temperature, store_lse
from .softmax import exponential, finish, pivot, update
from .tiles import row_offset
from .top_k import (
    first_of_equals,
    kept_mass,
    key_shift,
    lowest_key,
    narrow,
    order_key,
    row_top_k,
    tie_weight,
    tile_threshold,
    unresolved,
)


@triton.jit(do_not_specialize=["lo", "hi", "top_k", "rows"])
def short_forward_kernel(
    x_ptr, temperature_ptr, mask_ptr, bias_ptr, top_k_ptr, y_ptr, lse_ptr,
    inverse, lo, hi, top_k, rows, N, sizes,
    x_strides, y_strides, temperature_strides, mask_strides, bias_strides, top_k_strides,
    x_step, y_step, mask_step, bias_step,
    TOP_K: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program owns ROWS whole rows of up to BLOCK scores, each read and written once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    columns = tl.arange(0, BLOCK)
    inside = live[:, None] & (columns < N)[None, :]
    scale, poisoned = row_inverse(
        inverse, temperature_ptr, row, live, sizes, temperature_strides, WITH_BIAS=bias_ptr is not None
    )
    score = score_tile(
        columns, inside, x_ptr, row_offset(row, sizes, x_strides), x_step,
        mask_ptr, row_offset(row, sizes, mask_strides), mask_step,
        bias_ptr, row_offset(row, sizes, bias_strides), bias_step,
        scale, (row % sizes[0]).to(tl.int32), lo, hi,
    )  # fmt: skip
    if bias_ptr is not None:
        scale = tl.full((ROWS,), 1.0, tl.float32)

    m = tl.max(score, 1)
    p = exponential(score, pivot(m)[:, None], scale[:, None])
    if TOP_K:
        k = row_top_k(top_k, top_k_ptr, row, live, sizes, top_k_strides, N)
        key = order_key(score, SHIFT)
        low, high, at_least, above, k = tile_threshold(key, k, k, SHIFT)
        s = tl.sum(kept_mass(p, key, low, high, tie_weight(at_least, above, k)), 1)
        keep = key >= low[:, None]
        if tl.max((at_least > k).to(tl.int32), 0) > 0:
            keep, _ = first_of_equals(key, low, high, k - above, tl.zeros_like(k))
        p = tl.where(keep, p, 0.0)
    else:
        s = tl.sum(p, 1)
    inverse_s, lse = finish(m, s, scale)
    poisoned = store_lse(lse_ptr, row, live, lse, poisoned, s)
    y = p * tl.where(poisoned, float("nan"), inverse_s)[:, None]
    y_rows = y_ptr + row_offset(row, sizes, y_strides)
    at_y = y_rows[:, None] + columns[None, :].to(tl.int64) * y_step
    tl.store(at_y, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["lo", "hi", "top_k"])
def wide_forward_kernel(
    x_ptr, temperature_ptr, mask_ptr, bias_ptr, top_k_ptr, y_ptr, lse_ptr,
    inverse, lo, hi, top_k, N, sizes,
    x_strides, y_strides, temperature_strides, mask_strides, bias_strides, top_k_strides,
    x_step, y_step, mask_step, bias_step,
    TOP_K: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program owns one row and loops over its tiles, leaving out those that lie outside the band.

    Without top-k: the state (m, s) over the tiles, then y. With it: maxima; bounds, two bits a pass; s; y.
    """
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    live = row >= 0
    i = (row % sizes[0]).to(tl.int32)
    scale, poisoned = row_inverse(
        inverse, temperature_ptr, row, live, sizes, temperature_strides, WITH_BIAS=bias_ptr is not None
    )
    row_scale = scale
    if bias_ptr is not None:
        scale = tl.full((1,), 1.0, tl.float32)
    x_at = row_offset(row, sizes, x_strides)
    mask_at = row_offset(row, sizes, mask_strides)
    bias_at = row_offset(row, sizes, bias_strides)
    lane = tl.arange(0, BLOCK)

    first = 0
    last = N
    at = (tl.program_id(0).to(tl.int64) % sizes[0]).to(tl.int32)
    if lo is not None:
        first = tl.maximum(at + lo, 0) // BLOCK * BLOCK
    if hi is not None:
        last = tl.minimum(at + hi + 1, N)

    if TOP_K:
        lanes = tl.zeros((1, BLOCK), tl.uint32)
        top = tl.full((1, BLOCK), float("-inf"), tl.float32)
        counts = tl.zeros((1, BLOCK), tl.int32)
        for start in range(first, last, BLOCK):
            columns = start + lane
            score = score_tile(
                columns, (columns < N)[None, :], x_ptr, x_at, x_step, mask_ptr, mask_at, mask_step,
            bias_ptr, bias_at, bias_step,     row_scale, i, lo, hi,
            )  # fmt: skip
            key = order_key(score, SHIFT)
            lanes = tl.maximum(lanes, key)
            top = tl.maximum(top, score)
            counts += (key >= lowest_key(SHIFT)).to(tl.int32)
        m = tl.max(top, 1)
        k = row_top_k(top_k, top_k_ptr, row, live, sizes, top_k_strides, N)
        # k lanes hold a key of at least `a`, so the row does
        a, _, _, _, _ = tile_threshold(lanes, k, k, SHIFT)
        low = tl.zeros_like(k).to(tl.uint32) + lowest_key(SHIFT)
        high = tl.maximum(tl.max(lanes, 1), low) + 1
        at_least = tl.sum(counts, 1)
        above = tl.zeros_like(at_least)
        k = tl.minimum(k, at_least)
        quarter = tl.maximum((high - a) >> 2, 1)
        while unresolved(low, high, at_least, k):
            b = tl.minimum(a + quarter, high)
            c = tl.minimum(b + quarter, high)
            counts_a = tl.zeros((1, BLOCK), tl.int32)
            counts_b = tl.zeros((1, BLOCK), tl.int32)
            counts_c = tl.zeros((1, BLOCK), tl.int32)
            for start in range(first, last, BLOCK):
                columns = start + lane
                score = score_tile(
                    columns, (columns < N)[None, :], x_ptr, x_at, x_step, mask_ptr, mask_at, mask_step,
            bias_ptr, bias_at, bias_step,         row_scale, i, lo, hi,
                )  # fmt: skip
                key = order_key(score, SHIFT)
                counts_a += (key >= a[:, None]).to(tl.int32)
                counts_b += (key >= b[:, None]).to(tl.int32)
                counts_c += (key >= c[:, None]).to(tl.int32)
            low, high, at_least, above = narrow(low, high, at_least, above, a, tl.sum(counts_a, 1), k)
            low, high, at_least, above = narrow(low, high, at_least, above, b, tl.sum(counts_b, 1), k)
            low, high, at_least, above = narrow(low, high, at_least, above, c, tl.sum(counts_c, 1), k)
            quarter = tl.maximum((high - low) >> 2, 1)
            a = low + quarter
        low = tl.where(k < 1, high, low)

        mass = tl.zeros((1, BLOCK), tl.float32)
        weight = tie_weight(at_least, above, k)
        for start in range(first, last, BLOCK):
            columns = start + lane
            score = score_tile(
                columns, (columns < N)[None, :], x_ptr, x_at, x_step, mask_ptr, mask_at, mask_step,
            bias_ptr, bias_at, bias_step,     row_scale, i, lo, hi,
            )  # fmt: skip
            p = exponential(score, pivot(m)[:, None], scale[:, None])
            mass += kept_mass(p, order_key(score, SHIFT), low, high, weight)
        s = tl.sum(mass, 1)
        tied = tl.max((at_least > k).to(tl.int32), 0) > 0
        seen = tl.zeros_like(k)
    else:
        m = tl.full((1,), float("-inf"), tl.float32)
        s = tl.zeros((1,), tl.float32)
        for start in range(first, last, BLOCK):
            columns = start + lane
            score = score_tile(
                columns, (columns < N)[None, :], x_ptr, x_at, x_step, mask_ptr, mask_at, mask_step,
            bias_ptr, bias_at, bias_step,     row_scale, i, lo, hi,
            )  # fmt: skip
            m, s, _, _ = update(m, s, score, scale)

    inverse_s, lse = finish(m, s, scale)
    poisoned = store_lse(lse_ptr, row, live, lse, poisoned, s)
    inverse_s = tl.where(poisoned, float("nan"), inverse_s)
    y_rows = y_ptr + row_offset(row, sizes, y_strides)
    for start in range(0, N, BLOCK):
        columns = start + lane
        read = ((columns >= first) & (columns < last))[None, :]
        score = score_tile(
            columns, read, x_ptr, x_at, x_step, mask_ptr, mask_at, mask_step,
            bias_ptr, bias_at, bias_step, row_scale, i, lo, hi,
        )  # fmt: skip
        p = exponential(score, pivot(m)[:, None], scale[:, None])
        if TOP_K:
            key = order_key(score, SHIFT)
            keep = key >= low[:, None]
            if tied:
                keep, seen = first_of_equals(key, low, high, k - above, seen)
            p = tl.where(keep, p, 0.0)
        y = p * inverse_s[:, None]
        at_y = y_rows[:, None] + columns[None, :].to(tl.int64) * y_step
        tl.store(at_y, y.to(y_ptr.dtype.element_ty), mask=(columns < N)[None, :])


def _plan(inputs: Tensors, outputs: Tensors, inverse: float, lo: int | None, hi: int | None, k: int) -> Launch:
    x, row_temperature, mask, bias, row_k = inputs
    y, lse = outputs
    N, rows = x.shape[-1], lse.numel()
    bias = None if bias is None else bias.expand(x.shape)
    sizes, strides = fold_given(
        x, y, row_temperature, mask, bias, row_k, separate_last=lo is not None or hi is not None
    )
    steps = (x.stride(-1), y.stride(-1), last_stride(mask), last_stride(bias))
    with_top_k = k > 0 or row_k is not None
    config = tuning.forward(N, with_top_k)
    options = {
        "TOP_K": with_top_k,
        "SHIFT": key_shift(x, bias),
        "BLOCK": config.block,
        "num_warps": config.num_warps,
    }
    if config.one_tile:
        args = (inverse, lo, hi, k, rows, N, sizes, *strides, *steps)
        return Launch(short_forward_kernel, triton.cdiv(rows, config.rows), args, {**options, "ROWS": config.rows})
    return Launch(wide_forward_kernel, rows, (inverse, lo, hi, k, N, sizes, *strides, *steps), options)


def fused_softmax_forward(
    x: torch.Tensor,
    temperature: float | torch.Tensor,
    mask: torch.Tensor | None,
    lo: int | None,
    hi: int | None,
    bias: torch.Tensor | None,
    top_k: int | torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of x / temperature + bias over what mask, band and top-k keep, and its lse; see `reference`."""
    y = torch.empty_like(x)
    lse = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if x.numel() == 0:
        return y, lse.fill_(float("-inf"))
    row_temperature, inverse = split_temperature(temperature, bias is not None)
    row_k, k = (top_k, 0) if isinstance(top_k, torch.Tensor) else (None, min(top_k or 0, x.shape[-1]))
    mask = None if mask is None else mask.view(torch.uint8)
    config = tuning.candidates(x.shape[-1], k)
    if config is not None:
        top_k_softmax(x, row_temperature, inverse, mask, lo, hi, bias, k, config, y, lse)
    else:
        launch(_plan, (x, row_temperature, mask, bias, row_k), (y, lse), inverse, lo, hi, k)
    return y, lse
