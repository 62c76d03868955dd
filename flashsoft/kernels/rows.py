"""The row softmax family: softmax, log_softmax and logsumexp of the last dimension, forward and backward.

A program owns a tile, BLOCK_ROWS x BLOCK_COLS, or TILES of them side by side. Rows that fit (WHOLE) stay in
registers: short ones many to a program, longer ones one, and yet longer ones in PARTS, a program each, which tell
each other their states (exchange.py). So a forward reads and writes a row once, 2 N elements; a backward moves 3 N.
Only rows beyond what all programs of a row can hold, and rows that lie across memory, are taken a tile at a time,
twice: once for (m, s), or for the sum of a backward, and again for the results, in the opposite order, so that what
was read last, and is still in the cache, is read first.

Arithmetic is float32 from a load to a store. Padding reads as -inf forward and as 0 backward, neutral for max and
sums. An element costs about 15 instructions, two exp2 among them: what waits for the row's state is the tile as it
was read, not its exponentials.

Measured on an H200, bf16 and float32, M * N = 2^28: loads with the evict_first hint cost 3 to 5 % of the bandwidth;
evict_last gains 1 to 4 %, but what runs next finds 15 % less of the L2 cache, so whole rows have no hint. A store's
.cs changes nothing. exp2 is one instruction where exp is four, both within 2 ulp; one division a row is exact.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from ..reference import wide
from ..tuning.rows import BACKWARD, FORWARD, Parts, RowConfig, device, parts, row_config
from .exchange import Phase, board, exchange, receive, send
from .launch import Launch, Tensors, launch
from .softmax import LN2, exponential, finish, merge, merge_parts, pivot, state_of, update
from .tiles import fold_rows, row_offset

EMPTY: tl.constexpr = tl.constexpr(float("-inf"))
INT32_COLS = (1 << 31) - (1 << 20)  # shorter rows, padding included, are counted in 32 bits: fewer registers


@triton.jit
def place(n_rows, PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """A program's rows (BLOCK_ROWS,) int64, which of them exist, and its part of them (scalar)."""
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row, row < n_rows, program % PARTS


@triton.jit
def part_of(part, part_cols, n_units, PARTS: tl.constexpr, UNIT: tl.constexpr, INDEX: tl.constexpr):
    """Where a part of the row begins (int64), and its columns."""
    n_cols = tl.cast(n_units, INDEX) * UNIT
    if PARTS == 1:
        return tl.cast(0, tl.int64), n_cols
    else:
        begin = part.to(INDEX) * part_cols
        return begin.to(tl.int64), tl.multiple_of(tl.minimum(n_cols - begin, part_cols), UNIT)


@triton.jit
def rows_of(x, row, sizes, strides, stride, begin, UNIT: tl.constexpr):
    """Pointers (BLOCK_ROWS, 1) to column `begin` of rows whose strides are given in units of UNIT elements."""
    return x + (row_offset(row, sizes, strides) * UNIT)[:, None] + begin * stride


@triton.jit
def load(
    x, row_in, column, stride, left, PAD: tl.constexpr, EVICTION: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """A tile as it is stored. x: pointers (BLOCK_ROWS, 1), column: (BLOCK_COLS,) from there, of which `left` exist."""
    at = x + (column.to(tl.int64) * stride)[None, :]
    if EVEN and BLOCK_ROWS == 1:
        return tl.load(at, eviction_policy=EVICTION)
    elif EVEN:
        return tl.load(at, mask=row_in[:, None], other=PAD, eviction_policy=EVICTION)
    elif BLOCK_ROWS == 1:
        return tl.load(at, mask=(column < left)[None, :], other=PAD, eviction_policy=EVICTION)
    else:
        inside = row_in[:, None] & (column < left)[None, :]
        return tl.load(at, mask=inside, other=PAD, eviction_policy=EVICTION)


@triton.jit
def again(tile, nothing):
    """A loaded tile in float32, from a value that the compiler must take for another one.

    So 16-bit tiles wait for their row's state in half the registers, and twice as many bytes are under way: without
    this the float32 copies of a first use would be kept for the second. `nothing` is 0, which the compiler does not
    know; each use of a tile that is to be computed anew takes one of its own.
    """
    if tile.dtype == tl.float32:
        return tile
    else:
        ROWS: tl.constexpr = tile.shape[0]
        COLS: tl.constexpr = tile.shape[1]
        if COLS == 1:
            return tile.to(tl.float32)
        low, high = tl.split(tl.reshape(tile.to(tl.int16, bitcast=True), (ROWS, COLS // 2, 2)))
        word = ((low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)) ^ nothing
        low = word.to(tl.int16).to(tile.dtype, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tile.dtype, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), (ROWS, COLS))


@triton.jit
def store(y, tile, row_in, column, stride, left, EVEN: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The counterpart of `load`, rounding to y's dtype."""
    at = y + (column.to(tl.int64) * stride)[None, :]
    tile = tile.to(y.dtype.element_ty)
    if EVEN and BLOCK_ROWS == 1:
        tl.store(at, tile)
    elif EVEN:
        tl.store(at, tile, mask=row_in[:, None])
    elif BLOCK_ROWS == 1:
        tl.store(at, tile, mask=(column < left)[None, :])
    else:
        tl.store(at, tile, mask=row_in[:, None] & (column < left)[None, :])


@triton.jit
def of_state(m, s):
    """The pivot, 1 / s and ln(s) of ended rows; the latter two NaN without mass or with +inf in the row."""
    inverse, _ = finish(m, s)
    inverse = tl.where(s == 0.0, float("nan"), inverse)
    log_s = tl.where((s == 0.0) | (s == float("inf")), float("nan"), tl.log2(s) * LN2)
    return pivot(m), inverse, log_s


@triton.jit
def result(x, at, inverse, log_s, LOG: tl.constexpr):
    """exp(x - m) / s, or (x - m) - ln(s) if LOG, for what `of_state` gave."""
    if LOG:
        return (x - at[:, None]) - log_s[:, None]
    else:
        return exponential(x, at[:, None], 1.0) * inverse[:, None]


@triton.jit
def gradient(g, y, total, LOG: tl.constexpr):
    """y * (g - sum(y * g)), or g - exp(y) * sum(g) if LOG; total is the sum."""
    if LOG:
        return g - exponential(y, 0.0, 1.0) * total[:, None]
    else:
        return y * (g - total[:, None])


@triton.jit
def softmax_forward_kernel(
    x, y, board, sizes, x_strides, y_strides, x_stride, y_stride, n_rows, n_units, part_cols, nothing, nor_this,
    LOG: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr, INDEX: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr,
    TILES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """y = exp(x - m) / s, or (x - m) - ln(s) if LOG; NaN in rows without mass, as in torch."""
    row, row_in, part = place(n_rows, PARTS, BLOCK_ROWS)
    begin, left = part_of(part, part_cols, n_units, PARTS, UNIT, INDEX)
    x = rows_of(x, row, sizes, x_strides, x_stride, begin, UNIT)
    y = rows_of(y, row, sizes, y_strides, y_stride, begin, UNIT)
    column = tl.arange(0, BLOCK_COLS)
    m = tl.full((BLOCK_ROWS,), EMPTY, tl.float32)
    s = tl.zeros((BLOCK_ROWS,), tl.float32)
    if WHOLE:
        tiles = ()
        for t in tl.static_range(TILES):
            tiles = tiles + (load(x, row_in, column + t * BLOCK_COLS, x_stride, left, EMPTY, "", EVEN, BLOCK_ROWS),)
        for t in tl.static_range(TILES):
            m_tile, s_tile = state_of(tiles[t].to(tl.float32), again(tiles[t], nothing))
            m, s, _, _ = merge(m, s, m_tile, s_tile)
    else:
        for start in range(0, left, BLOCK_COLS):
            tile = load(
                x + tl.cast(start, tl.int64) * x_stride,
                row_in,
                column,
                x_stride,
                left - start,
                EMPTY,
                "evict_last",
                EVEN,
                BLOCK_ROWS,
            )
            m, s, _, _ = update(m, s, tile.to(tl.float32))
    if PARTS > 1:
        if SEND:
            send(board, tl.max(row, 0), part, m, s, PARTS, BLOCK_PARTS)
        if not RECEIVE:
            return
        m_parts, s_parts = receive(board, tl.max(row, 0), part, EMPTY, 0.0, PARTS, BLOCK_PARTS)
        m_row, s_row = merge_parts(m_parts, s_parts)
        m = tl.full((BLOCK_ROWS,), m_row, tl.float32)
        s = tl.full((BLOCK_ROWS,), s_row, tl.float32)
    at, inverse, log_s = of_state(m, s)
    if WHOLE:
        for t in tl.static_range(TILES):
            out = result(again(tiles[t], nor_this), at, inverse, log_s, LOG)
            store(y, out, row_in, column + t * BLOCK_COLS, y_stride, left, EVEN, BLOCK_ROWS)
    else:
        last = (left - 1) // BLOCK_COLS * BLOCK_COLS
        for back in range(0, left, BLOCK_COLS):
            here = tl.cast(last - back, tl.int64)
            there = left - (last - back)
            tile = load(x + here * x_stride, row_in, column, x_stride, there, EMPTY, "", EVEN, BLOCK_ROWS)
            out = result(tile.to(tl.float32), at, inverse, log_s, LOG)
            store(y + here * y_stride, out, row_in, column, y_stride, there, EVEN, BLOCK_ROWS)


@triton.jit
def softmax_backward_kernel(
    dy, y, dx, board, sizes, dy_strides, y_strides, dx_strides, dy_stride, y_stride, dx_stride,
    n_rows, n_units, part_cols, nothing,
    LOG: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr, INDEX: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """dx = y * (dy - sum(y * dy)), or dy - exp(y) * sum(dy) if LOG."""
    row, row_in, part = place(n_rows, PARTS, BLOCK_ROWS)
    begin, left = part_of(part, part_cols, n_units, PARTS, UNIT, INDEX)
    dy = rows_of(dy, row, sizes, dy_strides, dy_stride, begin, UNIT)
    y = rows_of(y, row, sizes, y_strides, y_stride, begin, UNIT)
    dx = rows_of(dx, row, sizes, dx_strides, dx_stride, begin, UNIT)
    column = tl.arange(0, BLOCK_COLS)
    if WHOLE:
        g = load(dy, row_in, column, dy_stride, left, 0.0, "", EVEN, BLOCK_ROWS)
        v = load(y, row_in, column, y_stride, left, 0.0, "", EVEN, BLOCK_ROWS)
        if LOG:
            total = tl.sum(g.to(tl.float32), 1)
        else:
            total = tl.sum(v.to(tl.float32) * g.to(tl.float32), 1)
    else:
        # a lane sums its own columns, and lanes are added up once, after the last tile
        lanes = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        for start in range(0, left, BLOCK_COLS):
            g = load(
                dy + tl.cast(start, tl.int64) * dy_stride,
                row_in,
                column,
                dy_stride,
                left - start,
                0.0,
                "evict_last",
                EVEN,
                BLOCK_ROWS,
            ).to(tl.float32)
            if LOG:
                lanes += g
            else:
                v = load(
                    y + tl.cast(start, tl.int64) * y_stride,
                    row_in,
                    column,
                    y_stride,
                    left - start,
                    0.0,
                    "evict_last",
                    EVEN,
                    BLOCK_ROWS,
                )
                lanes += g * v.to(tl.float32)
        total = tl.sum(lanes, 1)
    if PARTS > 1:
        if SEND:
            send(board, tl.max(row, 0), part, tl.full((1,), 1.0, tl.float32), total, PARTS, BLOCK_PARTS)
        if not RECEIVE:
            return
        _, totals = receive(board, tl.max(row, 0), part, 0.0, 0.0, PARTS, BLOCK_PARTS)
        total = tl.full((BLOCK_ROWS,), tl.sum(totals, 0), tl.float32)
    if WHOLE:
        out = gradient(again(g, nothing), again(v, nothing), total, LOG)
        store(dx, out, row_in, column, dx_stride, left, EVEN, BLOCK_ROWS)
    else:
        last = (left - 1) // BLOCK_COLS * BLOCK_COLS
        for back in range(0, left, BLOCK_COLS):
            here = tl.cast(last - back, tl.int64)
            there = left - (last - back)
            g = load(dy + here * dy_stride, row_in, column, dy_stride, there, 0.0, "", EVEN, BLOCK_ROWS)
            v = load(y + here * y_stride, row_in, column, y_stride, there, 0.0, "", EVEN, BLOCK_ROWS)
            out = gradient(g.to(tl.float32), v.to(tl.float32), total, LOG)
            store(dx + here * dx_stride, out, row_in, column, dx_stride, there, EVEN, BLOCK_ROWS)


@triton.jit
def logsumexp_forward_kernel(
    x, lse, board, sizes, x_strides, x_stride, n_rows, n_units, part_cols,
    EVEN: tl.constexpr, UNIT: tl.constexpr, INDEX: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """lse of each row; N elements a row are read."""
    row, row_in, part = place(n_rows, PARTS, BLOCK_ROWS)
    begin, left = part_of(part, part_cols, n_units, PARTS, UNIT, INDEX)
    x = rows_of(x, row, sizes, x_strides, x_stride, begin, UNIT)
    column = tl.arange(0, BLOCK_COLS)
    m = tl.full((BLOCK_ROWS,), EMPTY, tl.float32)
    s = tl.zeros((BLOCK_ROWS,), tl.float32)
    for start in range(0, left, BLOCK_COLS):
        tile = load(
            x + tl.cast(start, tl.int64) * x_stride, row_in, column, x_stride, left - start, EMPTY, "", EVEN, BLOCK_ROWS
        )
        m, s, _, _ = update(m, s, tile.to(tl.float32))
    if PARTS > 1:
        if SEND:
            send(board, tl.max(row, 0), part, m, s, PARTS, BLOCK_PARTS)
        if not RECEIVE:
            return
        m_parts, s_parts = receive(board, tl.max(row, 0), part, EMPTY, 0.0, PARTS, BLOCK_PARTS)
        m_row, s_row = merge_parts(m_parts, s_parts)
        m = tl.full((BLOCK_ROWS,), m_row, tl.float32)
        s = tl.full((BLOCK_ROWS,), s_row, tl.float32)
    _, row_lse = finish(m, s)
    tl.store(lse + row, row_lse, mask=row_in & (part == 0))


@triton.jit
def logsumexp_backward_kernel(
    dlse, x, lse, dx, sizes, x_strides, dx_strides, dlse_strides, lse_strides, x_stride, dx_stride,
    n_rows, n_units, part_cols,
    EVEN: tl.constexpr, UNIT: tl.constexpr, INDEX: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """dx = dlse * exp(x - lse), 0 where lse is -inf; a program owns one tile, 2 N elements a row move."""
    row, row_in, part = place(n_rows, PARTS, BLOCK_ROWS)
    begin, left = part_of(part, part_cols, n_units, PARTS, UNIT, INDEX)
    column = tl.arange(0, BLOCK_COLS)
    at = tl.load(lse + row_offset(row, sizes, lse_strides), mask=row_in, other=0.0).to(tl.float32)
    at = tl.where(at == EMPTY, 0.0, at)
    weight = tl.load(dlse + row_offset(row, sizes, dlse_strides), mask=row_in, other=0.0).to(tl.float32)
    x = rows_of(x, row, sizes, x_strides, x_stride, begin, UNIT)
    dx = rows_of(dx, row, sizes, dx_strides, dx_stride, begin, UNIT)
    tile = load(x, row_in, column, x_stride, left, EMPTY, "", EVEN, BLOCK_ROWS).to(tl.float32)
    out = weight[:, None] * exponential(tile, at[:, None], 1.0)
    store(dx, out, row_in, column, dx_stride, left, EVEN, BLOCK_ROWS)


# ---- launchers ---------------------------------------------------------------------------------------------
# Kernels take a row's length and the strides of rows in units of the largest power of two, up to 16, that
# divides them all. So the compiler sees that rows start and end on that boundary, and moves 16 bytes at once:
# by itself it looks for multiples of 16 only, and 1000 bfloat16 are one of 8.

Strides = tuple[int, ...]


def _unit(n_cols: int, strides: list[Strides]) -> int:
    return math.gcd(16, n_cols, *(stride for of_tensor in strides for stride in of_tensor))


def _in_units(unit: int, strides: list[Strides]) -> list[Strides]:
    return [tuple(stride // unit for stride in of_tensor) for of_tensor in strides]


def _index(n_cols: int) -> tl.dtype:
    return tl.int32 if n_cols < INT32_COLS else tl.int64


def _config(op: str, x: torch.Tensor, strides: Strides) -> RowConfig:
    """The tiles for rows like x's, whose strides are given."""
    rows_inner = strides[0] == 1 and x.stride(-1) > 1
    return row_config(op, x.shape[-1], x.element_size(), rows_inner, device(x.get_device()))


def _launch(
    kernel: Any,
    phase: Phase,
    config: RowConfig,
    share: Parts,
    x: torch.Tensor,
    unit: int,
    args: tuple[object, ...],
    constants: dict[str, object],
) -> Launch:
    """The launch of a kernel for rows like x's that may be shared. Programs that only send have nothing to do alone."""
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    programs = triton.cdiv(n_rows, config.block_rows) * share.count
    shared = share.count > 1
    tile_cols = config.block_cols * (config.tiles if share.whole else 1)
    options = {
        "EVEN": n_cols % share.cols == 0 and share.cols % tile_cols == 0,
        "UNIT": unit,
        "INDEX": _index(n_cols),
        "PARTS": share.count,
        "BLOCK_PARTS": triton.next_power_of_2(share.count),
        "SEND": phase.sends,
        "RECEIVE": phase.receives,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_COLS": config.block_cols,
        "num_warps": config.num_warps,
        "maxnreg": config.registers,
    }
    return Launch(
        kernel,
        programs if shared or phase.receives else 0,
        args if shared else (None, *args),
        constants | options,
        functools.partial(board, x.device, n_rows * share.count**2) if shared else None,
    )


def _plan_forward(inputs: Tensors, outputs: Tensors, dtype: torch.dtype, log: bool, phase: Phase) -> Launch:
    (x,), (y,) = inputs, outputs
    n_cols = x.shape[-1]
    sizes, strides = fold_rows(x, y)
    unit = _unit(n_cols, strides)
    config = _config(FORWARD, x, strides[0])
    share = parts(config, n_cols)
    args = (
        sizes, *_in_units(unit, strides), x.stride(-1), y.stride(-1),
        x.numel() // n_cols, n_cols // unit, share.cols, 0, 0,
    )  # fmt: skip
    constants = {"LOG": log, "WHOLE": share.whole, "TILES": config.tiles}
    return _launch(softmax_forward_kernel, phase, config, share, x, unit, args, constants)


def _plan_backward(inputs: Tensors, outputs: Tensors, dtype: torch.dtype, log: bool, phase: Phase) -> Launch:
    (dy, y), (dx,) = inputs, outputs
    n_cols = y.shape[-1]
    sizes, strides = fold_rows(dy, y, dx)
    unit = _unit(n_cols, strides)
    config = replace(_config(BACKWARD, y, strides[1]), tiles=1)
    share = parts(config, n_cols)
    args = (
        sizes, *_in_units(unit, strides), dy.stride(-1), y.stride(-1), dx.stride(-1),
        y.numel() // n_cols, n_cols // unit, share.cols, 0,
    )  # fmt: skip
    constants = {"LOG": log, "WHOLE": share.whole}
    return _launch(softmax_backward_kernel, phase, config, share, y, unit, args, constants)


def _plan_logsumexp(inputs: Tensors, outputs: Tensors, phase: Phase) -> Launch:
    (x,) = inputs
    n_cols = x.shape[-1]
    sizes, strides = fold_rows(x)
    unit = _unit(n_cols, strides)
    config = _config(FORWARD, x, strides[0])
    share = replace(parts(config, n_cols), whole=False)  # a loop over tiles, none of which is kept
    args = (sizes, *_in_units(unit, strides), x.stride(-1), x.numel() // n_cols, n_cols // unit, share.cols)
    return _launch(logsumexp_forward_kernel, phase, config, share, x, unit, args, {})


def _plan_logsumexp_backward(inputs: Tensors, outputs: Tensors) -> Launch:
    (dlse, x, lse), (dx,) = inputs, outputs
    n_cols = x.shape[-1]
    sizes, strides = fold_rows(x, dx, dlse.unsqueeze(-1), lse.unsqueeze(-1))
    unit = _unit(n_cols, strides[:2])
    config = _config(FORWARD, x, strides[0])
    count = triton.cdiv(n_cols, config.block_cols)
    args = (
        sizes, *_in_units(unit, strides[:2]), *strides[2:], x.stride(-1), dx.stride(-1),
        lse.numel(), n_cols // unit, config.block_cols,
    )  # fmt: skip
    options = {
        "EVEN": n_cols % config.block_cols == 0, "UNIT": unit, "INDEX": _index(n_cols), "PARTS": count,
        "BLOCK_ROWS": config.block_rows, "BLOCK_COLS": config.block_cols, "num_warps": config.num_warps,
    }  # fmt: skip
    return Launch(logsumexp_backward_kernel, triton.cdiv(lse.numel(), config.block_rows) * count, args, options)


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
