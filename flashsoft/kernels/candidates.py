"""Top-k of wide rows in one read of x, for k up to a few hundred.

The k largest of a row are among the k largest of its parts. So one launch takes each part, fills its place in y with
zeros and leaves its candidates: its own k largest, or some more. A second takes the candidates of a row, chooses k of
them exactly, and writes their softmax over the zeros. x is read from memory once and y written once; between the
launches there is room for `most` candidates a part, of 8 bytes.

A first bound comes from maxima of a few scores each: where k of those are at least b, so are k scores, and hardly more.
What is at least b is then written; a part is read for that once more, and small enough for the L1 cache. Only where
that is more than there is room for, the part's k largest are found exactly. Candidates lie in the order of their
columns, so that among equals the lowest index is first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..tuning import logits as tuning
from .launch import Launch, Tensors, launch
from .scores import fold_given, last_stride, row_inverse, score_tile, store_lse
from .softmax import exponential, finish, pivot
from .tiles import row_offset
from .top_k import first_of_equals, key_shift, narrow, order_key, row_count, tile_threshold, unresolved

NOTHING: tl.constexpr = tl.constexpr(-1)  # no candidate: its column would be -1


@triton.jit
def part_keys(
    columns, N, x_ptr, x_at, x_step, mask_ptr, mask_at, mask_step, bias_ptr, bias_at, bias_step, scale, i, lo, hi,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Scores and keys (1, columns) of a tile."""
    score = score_tile(
        columns, (columns < N)[None, :], x_ptr, x_at, x_step, mask_ptr, mask_at, mask_step,
        bias_ptr, bias_at, bias_step, scale, i, lo, hi,
    )  # fmt: skip
    return score, order_key(score, SHIFT)


@triton.jit
def leave(
    found, low, high, need, first, N, x_ptr, x_at, x_step, mask_ptr, mask_at, mask_step, bias_ptr, bias_at, bias_step,
    scale, i, lo, hi,
    SHIFT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Writes the scores of at least high and the first `need` of at least low, up to MOST; how many there are (1,)."""
    total = tl.zeros((1,), tl.int32)
    seen = tl.zeros((1,), tl.int32)
    for start in range(first, first + TILE * TILES, TILE):
        columns = start + tl.arange(0, TILE)
        score, key = part_keys(
            columns, N, x_ptr, x_at, x_step, mask_ptr, mask_at, mask_step, bias_ptr, bias_at, bias_step,
            scale, i, lo, hi, SHIFT,
        )  # fmt: skip
        keep, seen = first_of_equals(key, low, high, need, seen)
        place = total[:, None] + tl.cumsum(keep.to(tl.int32), 1) - 1
        word = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | columns[None, :].to(tl.int64)
        tl.store(found + place, word, mask=keep & (place < MOST))
        total += row_count(keep)
    return total


@triton.jit(do_not_specialize=["lo", "hi", "top_k"])
def collect_kernel(
    x_ptr, temperature_ptr, mask_ptr, bias_ptr, y_ptr, found_ptr,
    inverse, lo, hi, top_k, N, parts, sizes, x_strides, y_strides, temperature_strides, mask_strides, bias_strides,
    x_step, y_step, mask_step, bias_step,
    SHIFT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """A program owns a part of a row, TILES tiles: zeros into y, and its candidates into found (rows, parts, MOST)."""
    row = tl.program_id(0).to(tl.int64) // parts + tl.arange(0, 1)
    first = tl.program_id(0) % parts * (TILE * TILES)
    live = row >= 0
    i = (row % sizes[0]).to(tl.int32)
    scale, _ = row_inverse(
        inverse, temperature_ptr, row, live, sizes, temperature_strides, WITH_BIAS=bias_ptr is not None
    )
    x_at = row_offset(row, sizes, x_strides)
    mask_at = row_offset(row, sizes, mask_strides)
    bias_at = row_offset(row, sizes, bias_strides)
    y_row = y_ptr + row_offset(row, sizes, y_strides)[:, None]
    maxima = tl.zeros((1, TILE), tl.uint32)
    for t in tl.static_range(TILES):
        columns = first + t * TILE + tl.arange(0, TILE)
        key = part_keys(
            columns, N, x_ptr, x_at, x_step, mask_ptr, mask_at, mask_step, bias_ptr, bias_at, bias_step,
            scale, i, lo, hi, SHIFT,
        )[1]  # fmt: skip
        maxima = tl.maximum(maxima, key)
    for t in tl.static_range(TILES):
        columns = first + t * TILE + tl.arange(0, TILE)
        at_y = y_row + columns[None, :].to(tl.int64) * y_step
        tl.store(at_y, tl.zeros((1, TILE), y_ptr.dtype.element_ty), mask=(columns < N)[None, :])

    k = tl.full((1,), top_k, tl.int32)
    low = tile_threshold(maxima, k, k + k // 2, SHIFT)[0]
    found = found_ptr + tl.program_id(0).to(tl.int64) * MOST
    total = leave(
        found, low, low, k, first, N, x_ptr, x_at, x_step, mask_ptr, mask_at, mask_step, bias_ptr, bias_at, bias_step,
        scale, i, lo, hi, SHIFT, TILE, TILES, MOST,
    )  # fmt: skip
    if tl.max(total, 0) > MOST:
        high = tl.maximum(tl.max(maxima, 1), low) + 1
        at_least = total
        above = tl.zeros_like(k)
        while unresolved(low, high, at_least, k):
            middle = low + ((high - low) >> 1)
            counts = tl.zeros((1, TILE), tl.int32)
            for start in range(first, first + TILE * TILES, TILE):
                key = part_keys(
                    start + tl.arange(0, TILE), N, x_ptr, x_at, x_step, mask_ptr, mask_at, mask_step,
                    bias_ptr, bias_at, bias_step, scale, i, lo, hi, SHIFT,
                )[1]  # fmt: skip
                counts += (key >= middle[:, None]).to(tl.int32)
            low, high, at_least, above = narrow(low, high, at_least, above, middle, tl.sum(counts, 1), k)
        total = leave(
            found, low, high, k - above, first, N, x_ptr, x_at, x_step, mask_ptr, mask_at, mask_step,
            bias_ptr, bias_at, bias_step, scale, i, lo, hi, SHIFT, TILE, TILES, MOST,
        )  # fmt: skip
    slot = tl.arange(0, MOST)
    tl.store(found + slot, tl.full((MOST,), NOTHING, tl.int64), mask=slot >= tl.max(total, 0))


@triton.jit(do_not_specialize=["top_k"])
def choose_kernel(
    found_ptr, temperature_ptr, y_ptr, lse_ptr, inverse, top_k, N, slots, sizes, y_strides, temperature_strides, y_step,
    SHIFT: tl.constexpr, WITH_BIAS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A program owns a row: k of its candidates, their softmax into y, and lse."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    live = row >= 0
    scale, poisoned = row_inverse(inverse, temperature_ptr, row, live, sizes, temperature_strides, WITH_BIAS)
    if WITH_BIAS:
        scale = tl.full((1,), 1.0, tl.float32)
    slot = tl.arange(0, SLOTS)
    word = tl.load(found_ptr + tl.program_id(0).to(tl.int64) * slots + slot, mask=slot < slots, other=NOTHING)[None, :]
    column = word.to(tl.int32)
    score = tl.where(column >= 0, (word >> 32).to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))

    key = order_key(score, SHIFT)
    k = tl.full((1,), top_k, tl.int32)
    low, high, at_least, above, k = tile_threshold(key, k, k, SHIFT)
    keep = key >= low[:, None]
    if tl.max(at_least - k, 0) > 0:
        keep, _ = first_of_equals(key, low, high, k - above, tl.zeros_like(k))
    m = tl.max(score, 1)
    p = tl.where(keep, exponential(score, pivot(m)[:, None], scale[:, None]), 0.0)
    s = tl.sum(p, 1)
    inverse_s, lse = finish(m, s, scale)
    poisoned = store_lse(lse_ptr, row, live, lse, poisoned, s)
    inverse_s = tl.where(poisoned, float("nan"), inverse_s)

    y_row = y_ptr + row_offset(row, sizes, y_strides)[:, None]
    if tl.max((inverse_s != inverse_s).to(tl.int32), 0) > 0:
        for start in range(0, N, TILE):
            columns = start + tl.arange(0, TILE)[None, :]
            nan = tl.full((1, TILE), float("nan"), tl.float32).to(y_ptr.dtype.element_ty)
            tl.store(y_row + columns.to(tl.int64) * y_step, nan, mask=columns < N)
    else:
        y = p * inverse_s[:, None]
        tl.store(y_row + column.to(tl.int64) * y_step, y.to(y_ptr.dtype.element_ty), mask=keep)


def _plan_collect(
    inputs: Tensors, outputs: Tensors, inverse: float, lo: int | None, hi: int | None, k: int,
    config: tuning.CandidatesConfig,
) -> Launch:  # fmt: skip
    x, row_temperature, mask, bias = inputs
    y, found = outputs
    N, parts = x.shape[-1], found.shape[1]
    bias = None if bias is None else bias.expand(x.shape)
    sizes, strides = fold_given(x, y, row_temperature, mask, bias, separate_last=lo is not None or hi is not None)
    steps = (x.stride(-1), y.stride(-1), last_stride(mask), last_stride(bias))
    options = {
        "SHIFT": key_shift(x, bias),
        "TILE": config.tile,
        "TILES": config.tiles,
        "MOST": config.most,
        "num_warps": config.num_warps,
    }
    return Launch(
        collect_kernel, found.shape[0] * parts, (inverse, lo, hi, k, N, parts, sizes, *strides, *steps), options
    )


def _plan_choose(
    inputs: Tensors, outputs: Tensors, inverse: float, k: int, shift: int, with_bias: bool,
    config: tuning.CandidatesConfig,
) -> Launch:  # fmt: skip
    found, row_temperature = inputs
    y, _ = outputs
    rows, parts, most = found.shape
    sizes, strides = fold_given(y, row_temperature)
    slots = triton.next_power_of_2(parts * most)
    options = {
        "SHIFT": shift,
        "WITH_BIAS": with_bias,
        "SLOTS": slots,
        "TILE": config.tile,
        "num_warps": tuning.warps_of(slots),
    }
    return Launch(choose_kernel, rows, (inverse, k, y.shape[-1], parts * most, sizes, *strides, y.stride(-1)), options)


def top_k_softmax(
    x: torch.Tensor, row_temperature: torch.Tensor | None, inverse: float, mask: torch.Tensor | None,
    lo: int | None, hi: int | None, bias: torch.Tensor | None, k: int, config: tuning.CandidatesConfig,
    y: torch.Tensor, lse: torch.Tensor,
) -> None:  # fmt: skip
    """Writes y and lse of the fused softmax of a wide row's k largest; arguments as its launchers have them."""
    parts = triton.cdiv(x.shape[-1], config.tile * config.tiles)
    found = torch.empty(lse.numel(), parts, config.most, dtype=torch.int64, device=x.device)
    launch(_plan_collect, (x, row_temperature, mask, bias), (y, found), inverse, lo, hi, k, config)
    shift, with_bias = key_shift(x, bias), bias is not None
    launch(_plan_choose, (found, row_temperature), (y, lse), inverse, k, shift, with_bias, config)
