"""The row softmax family: softmax, log_softmax and logsumexp of the last dimension, forward and backward.

A program owns a tile, BLOCK_ROWS x BLOCK_COLS, or TILES of them side by side. Rows that fit (WHOLE) stay in
registers: short ones many to a program, longer ones one, and yet longer ones in PARTS, a program each, which tell
each other their states (exchange.py). So a forward reads and writes a row once, 2 N elements; a backward moves 3 N.
Only rows beyond what all programs of a row can hold, and rows that lie across memory, are taken a tile at a time,
twice: once for (m, s), or for the sum of a backward, and again for the results, in the opposite order, so that what
was read last, and is still in the cache, is read first.

Arithmetic is float32 from a load to a store. Padding reads as -inf forward and as 0 backward, neutral for max and
sums. An element of a forward costs 16 to 24 instructions; at the rate of a copy an H200 has 28 for one of 16 bits, so
they count (in the machine code for sm_90; more where rows begin anywhere). Where rows are large, what waits for a
row's state is the tile as it was read, not its exponentials, which are computed twice.

Measured on an H200 in the forward, M * N = 2^28, N = 1,024 to 262,144, bf16 and float32, against loads without a hint
and with the tiles of that day (262,144 has others since):

- Loads with evict_last: 2 to 5 % faster. But until as much has streamed by, the L2 cache is left full of x: a copy of
  16 MB takes 10.2 us in place of 8.6. So only tensors that no cache would hold anyway are read so (BEYOND_L2).
  Giving the lines back (applypriority) costs 10 to 25 %, loads with evict_first 2 to 8 %, stores with it or .cs 1 %.
- exp2, one instruction, against exp, five: errors alike; exp is up to 16 % slower where the row is long and of 16 bits.
- One exact division a row, and a product an element. A division an element, exact: the error (rms) is 6 % less in
  float32, the same in bf16; up to 36 % slower. Approximate: the error is no less, up to 6 % slower.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from ..reference.softmax import wide
from ..tuning.rows import BACKWARD, FORWARD, Parts
from .exchange import Phase, board, exchange, shared_state, shared_sum
from .launch import Launch, Tensors, launch
from .row_layout import Layout, layout
from .row_tiles import (
    again,
    body_of,
    ends,
    load,
    load_all,
    load_ends,
    part_of,
    place,
    rows_of,
    scalar,
    store,
    store_ends,
)
from .softmax import exponential, finish, of_state, pivot, update
from .tiles import row_offset

EMPTY: tl.constexpr = tl.constexpr(float("-inf"))
BEYOND_L2 = 1 << 27  # bytes, more than any L2 cache holds


@triton.jit
def result(x, at, inverse, log_s, LOG: tl.constexpr):
    """exp(x - m) / s, or (x - m) - ln(s) if LOG, for what `of_state` gave."""
    if LOG:
        return (x - at) - log_s
    else:
        return exponential(x, at, 1.0) * inverse


@triton.jit
def state_of_part(
    x, row_in, x_stride, end, end_tile, nothing,
    EVICTION: tl.constexpr, WHOLE: tl.constexpr, PACKED: tl.constexpr, TILES: tl.constexpr,
    EVEN: tl.constexpr, STEP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The state (m, s) of a program's part of its rows and of `end_tile`, unless it is None; the tiles too if WHOLE."""
    tiles = ()
    m = tl.full((BLOCK_ROWS,), EMPTY, tl.float32)
    s = tl.zeros((BLOCK_ROWS,), tl.float32)
    if end_tile is not None:
        m = tl.maximum(m, tl.max(end_tile, 0))
    if WHOLE:
        tiles = load_all(x, row_in, x_stride, end, EMPTY, EVICTION, TILES, EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
        top = tiles[0].to(tl.float32)
        for t in tl.static_range(1, TILES):
            top = tl.maximum(top, tiles[t].to(tl.float32))
        m = tl.maximum(m, tl.max(top, 1))
        p = exponential(again(tiles[0], nothing, PACKED), pivot(m)[:, None], 1.0)
        for t in tl.static_range(1, TILES):
            p += exponential(again(tiles[t], nothing, PACKED), pivot(m)[:, None], 1.0)
        s = tl.sum(p, 1)
    if end_tile is not None:
        s += tl.sum(exponential(end_tile, pivot(scalar(m)), 1.0), 0)
    if not WHOLE:
        for start in range(0, end, BLOCK_COLS):
            tile = load(x, row_in, start, x_stride, end, EMPTY, EVICTION, EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
            m, s, _, _ = update(m, s, tile.to(tl.float32))
    return m, s, tiles


@triton.jit
def summand(g, y, LOG: tl.constexpr):
    """What a backward sums over a row."""
    if LOG:
        return g
    else:
        return g * y


@triton.jit
def gradient(g, y, total, LOG: tl.constexpr):
    """y * (g - sum(y * g)), or g - exp(y) * sum(g) if LOG; total is the sum of the summands."""
    if LOG:
        return g - exponential(y, 0.0, 1.0) * total
    else:
        return y * (g - total)


@triton.jit
def softmax_forward_kernel(
    x, y, board, sizes, x_strides, y_strides, x_stride, y_stride, n_rows, n_units, part_cols, nothing, nor_this,
    LOG: tl.constexpr, EVICTION: tl.constexpr, WHOLE: tl.constexpr, PACKED: tl.constexpr, TILES: tl.constexpr,
    EVEN: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, ALIGNED: tl.constexpr, INDEX: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, SENDS: tl.constexpr, RECEIVES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """y = exp(x - m) / s, or (x - m) - ln(s) if LOG; NaN in rows without mass, as in torch."""
    row, row_in, part = place(n_rows, PARTS, BLOCK_ROWS)
    head, body = body_of(row, sizes, x_strides, n_units, UNIT, ALIGN, INDEX)
    begin, end = part_of(part, part_cols, body, PARTS > 1, INDEX)
    x = rows_of(x, row, sizes, x_strides, x_stride, head, begin, UNIT, ALIGNED[0])
    y = rows_of(y, row, sizes, y_strides, y_stride, head, begin, UNIT, ALIGNED[1])
    STEP: tl.constexpr = ALIGN if ALIGN > 0 else UNIT
    end_tile = None
    if ALIGN > 0:
        end_columns, end_exists = ends(part, head, body, n_units, UNIT, ALIGN)
        end_tile = load_ends(x, end_columns, end_exists, EMPTY)
    m, s, tiles = state_of_part(
        x, row_in, x_stride, end, end_tile, nothing, EVICTION, WHOLE, PACKED, TILES, EVEN, STEP, BLOCK_ROWS, BLOCK_COLS
    )
    if PARTS > 1:
        m, s = shared_state(board, row, part, m, s, PARTS, BLOCK_PARTS, SENDS, RECEIVES)
    at, inverse, log_s = of_state(m[:, None], s[:, None])
    if WHOLE:
        for t in tl.static_range(TILES):
            out = result(again(tiles[t], nor_this, PACKED), at, inverse, log_s, LOG)
            store(y, out, row_in, t * BLOCK_COLS, y_stride, end, EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
    else:
        last = (end - 1) // BLOCK_COLS * BLOCK_COLS
        for back in range(0, end, BLOCK_COLS):
            start = last - back
            tile = load(x, row_in, start, x_stride, end, EMPTY, "", EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
            out = result(tile.to(tl.float32), at, inverse, log_s, LOG)
            store(y, out, row_in, start, y_stride, end, EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
    if ALIGN > 0:
        at, inverse, log_s = of_state(scalar(m), scalar(s))
        store_ends(y, result(end_tile, at, inverse, log_s, LOG), end_columns, end_exists)


@triton.jit
def softmax_backward_kernel(
    dy, y, dx, board, sizes, dy_strides, y_strides, dx_strides, dy_stride, y_stride, dx_stride,
    n_rows, n_units, part_cols, nothing,
    LOG: tl.constexpr, WHOLE: tl.constexpr, PACKED: tl.constexpr, TILES: tl.constexpr,
    EVEN: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, ALIGNED: tl.constexpr, INDEX: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, SENDS: tl.constexpr, RECEIVES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """dx = y * (dy - sum(y * dy)), or dy - exp(y) * sum(dy) if LOG."""
    row, row_in, part = place(n_rows, PARTS, BLOCK_ROWS)
    head, body = body_of(row, sizes, y_strides, n_units, UNIT, ALIGN, INDEX)
    begin, end = part_of(part, part_cols, body, PARTS > 1, INDEX)
    dy = rows_of(dy, row, sizes, dy_strides, dy_stride, head, begin, UNIT, ALIGNED[1])
    y = rows_of(y, row, sizes, y_strides, y_stride, head, begin, UNIT, ALIGNED[0])
    dx = rows_of(dx, row, sizes, dx_strides, dx_stride, head, begin, UNIT, ALIGNED[2])
    STEP: tl.constexpr = ALIGN if ALIGN > 0 else UNIT
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    if ALIGN > 0:
        end_columns, end_exists = ends(part, head, body, n_units, UNIT, ALIGN)
        end_g = load_ends(dy, end_columns, end_exists, 0.0)
        end_v = load_ends(y, end_columns, end_exists, 0.0)
        total += tl.sum(summand(end_g, end_v, LOG), 0)
    if WHOLE:
        gs = load_all(dy, row_in, dy_stride, end, 0.0, "", TILES, EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
        vs = load_all(y, row_in, y_stride, end, 0.0, "", TILES, EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
        for t in tl.static_range(TILES):
            total += tl.sum(summand(gs[t].to(tl.float32), vs[t].to(tl.float32), LOG), 1)
    else:
        # a lane sums its own columns, and lanes are added up once, after the last tile
        lanes = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        for start in range(0, end, BLOCK_COLS):
            g = load(dy, row_in, start, dy_stride, end, 0.0, "evict_last", EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
            v = load(y, row_in, start, y_stride, end, 0.0, "evict_last", EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
            lanes += summand(g.to(tl.float32), v.to(tl.float32), LOG)
        total += tl.sum(lanes, 1)
    if PARTS > 1:
        total = shared_sum(board, row, part, total, PARTS, BLOCK_PARTS, SENDS, RECEIVES)
    if WHOLE:
        for t in tl.static_range(TILES):
            out = gradient(again(gs[t], nothing, PACKED), again(vs[t], nothing, PACKED), total[:, None], LOG)
            store(dx, out, row_in, t * BLOCK_COLS, dx_stride, end, EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
    else:
        last = (end - 1) // BLOCK_COLS * BLOCK_COLS
        for back in range(0, end, BLOCK_COLS):
            start = last - back
            g = load(dy, row_in, start, dy_stride, end, 0.0, "", EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
            v = load(y, row_in, start, y_stride, end, 0.0, "", EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
            out = gradient(g.to(tl.float32), v.to(tl.float32), total[:, None], LOG)
            store(dx, out, row_in, start, dx_stride, end, EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
    if ALIGN > 0:
        store_ends(dx, gradient(end_g, end_v, scalar(total), LOG), end_columns, end_exists)


@triton.jit
def logsumexp_forward_kernel(
    x, lse, board, sizes, x_strides, x_stride, n_rows, n_units, part_cols, nothing,
    WHOLE: tl.constexpr, PACKED: tl.constexpr, TILES: tl.constexpr,
    EVEN: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, ALIGNED: tl.constexpr, INDEX: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, SENDS: tl.constexpr, RECEIVES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """lse of each row; N elements a row are read."""
    row, row_in, part = place(n_rows, PARTS, BLOCK_ROWS)
    head, body = body_of(row, sizes, x_strides, n_units, UNIT, ALIGN, INDEX)
    begin, end = part_of(part, part_cols, body, PARTS > 1, INDEX)
    x = rows_of(x, row, sizes, x_strides, x_stride, head, begin, UNIT, ALIGNED[0])
    STEP: tl.constexpr = ALIGN if ALIGN > 0 else UNIT
    end_tile = None
    if ALIGN > 0:
        end_columns, end_exists = ends(part, head, body, n_units, UNIT, ALIGN)
        end_tile = load_ends(x, end_columns, end_exists, EMPTY)
    m, s, _ = state_of_part(
        x, row_in, x_stride, end, end_tile, nothing, "", WHOLE, PACKED, TILES, EVEN, STEP, BLOCK_ROWS, BLOCK_COLS
    )
    if PARTS > 1:
        m, s = shared_state(board, row, part, m, s, PARTS, BLOCK_PARTS, SENDS, RECEIVES)
    _, row_lse = finish(m, s)
    tl.store(lse + row, row_lse, mask=row < tl.where(part == 0, n_rows, 0))


@triton.jit
def logsumexp_backward_kernel(
    dlse, x, lse, dx, sizes, x_strides, dx_strides, dlse_strides, lse_strides, x_stride, dx_stride,
    n_rows, n_units, part_cols, parts,
    EVEN: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, ALIGNED: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """dx = dlse * exp(x - lse), 0 where lse is -inf; a program owns one tile, 2 N elements a row move."""
    row, row_in, part = place(n_rows, parts, BLOCK_ROWS)
    head, body = body_of(row, sizes, x_strides, n_units, UNIT, ALIGN, INDEX)
    begin, end = part_of(part, part_cols, body, True, INDEX)
    STEP: tl.constexpr = ALIGN if ALIGN > 0 else UNIT
    at = tl.load(lse + row_offset(row, sizes, lse_strides), mask=row_in, other=0.0).to(tl.float32)
    at = tl.where(at == EMPTY, 0.0, at)
    weight = tl.load(dlse + row_offset(row, sizes, dlse_strides), mask=row_in, other=0.0).to(tl.float32)
    x = rows_of(x, row, sizes, x_strides, x_stride, head, begin, UNIT, ALIGNED[0])
    dx = rows_of(dx, row, sizes, dx_strides, dx_stride, head, begin, UNIT, ALIGNED[1])
    tile = load(x, row_in, 0, x_stride, end, EMPTY, "", EVEN, STEP, BLOCK_ROWS, BLOCK_COLS).to(tl.float32)
    out = weight[:, None] * exponential(tile, at[:, None], 1.0)
    store(dx, out, row_in, 0, dx_stride, end, EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
    if ALIGN > 0:
        end_columns, end_exists = ends(part, head, body, n_units, UNIT, ALIGN)
        out = scalar(weight) * exponential(load_ends(x, end_columns, end_exists, EMPTY), scalar(at), 1.0)
        store_ends(dx, out, end_columns, end_exists)


# ---- launchers ---------------------------------------------------------------------------------------------


def _launch(
    kernel: Any, x: torch.Tensor, rows: Layout, args: tuple[object, ...], constants: dict[str, object], phase: Phase
) -> Launch:
    """The launch of a kernel whose rows may be shared. Programs that only send have nothing to do alone."""
    count = rows.parts.count
    exchanged = {"BLOCK_PARTS": triton.next_power_of_2(count), "SENDS": phase.sends, "RECEIVES": phase.receives}
    constants = rows.options | constants | {"PARTS": count} | exchanged
    if count == 1:
        return Launch(kernel, rows.programs if phase.receives else 0, (None, *args), constants)
    scratch = functools.partial(board, x.device, rows.n_rows * count**2)
    return Launch(kernel, rows.programs, args, constants, scratch)


def _plan_forward(inputs: Tensors, outputs: Tensors, dtype: torch.dtype, log: bool, phase: Phase) -> Launch:
    (x,), (y,) = inputs, outputs
    rows = layout(FORWARD, x, y)
    args = (rows.sizes, *rows.strides, x.stride(-1), y.stride(-1), *rows.lengths, 0, 0)
    read_again = not rows.parts.whole
    keep = read_again or x.numel() * x.element_size() > BEYOND_L2
    constants = {
        "LOG": log,
        "EVICTION": "evict_last" if keep else "",
        "WHOLE": rows.parts.whole,
        "TILES": rows.config.tiles,
        "PACKED": rows.packed(x),
    }
    return _launch(softmax_forward_kernel, x, rows, args, constants, phase)


def _plan_backward(inputs: Tensors, outputs: Tensors, dtype: torch.dtype, log: bool, phase: Phase) -> Launch:
    (dy, y), (dx,) = inputs, outputs
    rows = layout(BACKWARD, y, dy, dx)
    of_y, of_dy, of_dx = rows.strides
    args = (rows.sizes, of_dy, of_y, of_dx, dy.stride(-1), y.stride(-1), dx.stride(-1), *rows.lengths, 0)
    constants = {"LOG": log, "WHOLE": rows.parts.whole, "TILES": rows.config.tiles, "PACKED": rows.packed(y, dy)}
    return _launch(softmax_backward_kernel, y, rows, args, constants, phase)


def _plan_logsumexp(inputs: Tensors, outputs: Tensors, phase: Phase) -> Launch:
    (x,) = inputs
    rows = layout(FORWARD, x)
    args = (rows.sizes, *rows.strides, x.stride(-1), *rows.lengths, 0)
    constants = {"WHOLE": rows.parts.whole, "PACKED": rows.packed(x), "TILES": rows.config.tiles}
    return _launch(logsumexp_forward_kernel, x, rows, args, constants, phase)


def _plan_logsumexp_backward(inputs: Tensors, outputs: Tensors) -> Launch:
    (dlse, x, lse), (dx,) = inputs, outputs
    rows = layout(FORWARD, x, dx, per_row=(dlse, lse))
    cols = rows.config.block_cols
    share = Parts(triton.cdiv(rows.body, cols), cols, whole=False)  # a tile a program, none of which waits
    rows = replace(rows, parts=share)
    args = (
        rows.sizes, *rows.strides, *rows.per_row, x.stride(-1), dx.stride(-1), *rows.lengths, share.count,
    )  # fmt: skip
    return Launch(logsumexp_backward_kernel, rows.programs, args, rows.options)


def softmax_forward(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y = exp(x - lse) along the last dimension; a row of -inf is NaN, as in torch."""
    y = torch.empty_like(x, dtype=dtype)
    if x.numel() > 0:
        exchange(_plan_forward, (x,), (y,), dtype, False)
    return y


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """dx = y * (dy - sum(y * dy))."""
    dx = torch.empty_like(y, dtype=dtype)
    if y.numel() > 0:
        exchange(_plan_backward, (dy, y), (dx,), dtype, False)
    return dx


def log_softmax_forward(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y = (x - m) - ln(s) along the last dimension, exact in x - m; a row of -inf is NaN, as in torch."""
    y = torch.empty_like(x, dtype=dtype)
    if x.numel() > 0:
        exchange(_plan_forward, (x,), (y,), dtype, True)
    return y


def log_softmax_backward(dy: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """dx = dy - exp(y) * sum(dy)."""
    dx = torch.empty_like(y, dtype=dtype)
    if y.numel() > 0:
        exchange(_plan_backward, (dy, y), (dx,), dtype, True)
    return dx


def logsumexp_forward(x: torch.Tensor) -> torch.Tensor:
    """lse (float32) of each row; -inf for a row of -inf or of length 0."""
    lse = x.new_empty(x.shape[:-1], dtype=wide(x.dtype))
    if x.numel() == 0:
        return lse.fill_(float("-inf"))
    exchange(_plan_logsumexp, (x,), (lse,))
    return lse


def logsumexp_backward(dlse: torch.Tensor, x: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """dx = dlse * exp(x - lse); 0 for a row without mass."""
    dx = torch.empty_like(x)
    if x.numel() > 0:
        launch(_plan_logsumexp_backward, (dlse, x, lse), (dx,))
    return dx
