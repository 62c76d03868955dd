"""The row softmax family: softmax, log_softmax and logsumexp of the last dimension, forward and backward.

A program owns a tile, BLOCK_ROWS x BLOCK_COLS. Rows that fit (WHOLE) stay in registers: short ones many to
a program, longer ones one. A forward then reads and writes a row once, 2 N elements; a backward moves 3 N.
Longer rows are taken a tile at a time, twice: once for (m, s), or for the sum of a backward, and again for
the results, in the opposite order, so that what was read last, and is still in the cache, is read first.

Every value is float32 from its load to its store. Padding reads as -inf forward and as 0 backward, neutral
for max and sums. An element costs about 12 instructions, one exp2 among them, half as much again where its
row is read twice.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..reference import wide
from ..tuning.rows import RowConfig, row_config
from .softmax import LN2, exponential, finish, pivot, update
from .tiles import fold_rows, on_device, row_offset

INTERPRETED: bool = triton.knobs.runtime.interpret
EMPTY: tl.constexpr = tl.constexpr(float("-inf"))
INT32_COLS = (1 << 31) - (1 << 20)  # shorter rows, padding included, are counted in 32 bits: fewer registers


@triton.jit
def rows_of(x, row, sizes, strides, UNIT: tl.constexpr):
    """Pointers (BLOCK_ROWS, 1) to rows whose strides are given in units of UNIT elements."""
    return x + (row_offset(row, sizes, strides) * UNIT)[:, None]


@triton.jit
def load(
    x, row_in, column, stride, n_cols, PAD: tl.constexpr, AGAIN: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """A tile in float32. x: pointers (BLOCK_ROWS, 1), column: (BLOCK_COLS,), AGAIN: it will be read again."""
    EVICTION: tl.constexpr = "evict_last" if AGAIN else "evict_first"
    at = x + (column.to(tl.int64) * stride)[None, :]
    if EVEN and BLOCK_ROWS == 1:
        tile = tl.load(at, eviction_policy=EVICTION)
    elif EVEN:
        tile = tl.load(at, mask=row_in[:, None], other=PAD, eviction_policy=EVICTION)
    elif BLOCK_ROWS == 1:
        tile = tl.load(at, mask=(column < n_cols)[None, :], other=PAD, eviction_policy=EVICTION)
    else:
        inside = row_in[:, None] & (column < n_cols)[None, :]
        tile = tl.load(at, mask=inside, other=PAD, eviction_policy=EVICTION)
    return tile.to(tl.float32)


@triton.jit
def store(y, tile, row_in, column, stride, n_cols, EVEN: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The counterpart of `load`, rounding to y's dtype."""
    at = y + (column.to(tl.int64) * stride)[None, :]
    tile = tile.to(y.dtype.element_ty)
    if EVEN and BLOCK_ROWS == 1:
        tl.store(at, tile)
    elif EVEN:
        tl.store(at, tile, mask=row_in[:, None])
    elif BLOCK_ROWS == 1:
        tl.store(at, tile, mask=(column < n_cols)[None, :])
    else:
        tl.store(at, tile, mask=row_in[:, None] & (column < n_cols)[None, :])


@triton.jit
def of_state(m, s):
    """The pivot, 1 / s and ln(s) of ended rows; the latter two NaN without mass or with +inf in the row."""
    inverse, _ = finish(m, s)
    inverse = tl.where(s == 0.0, float("nan"), inverse)
    log_s = tl.where((s == 0.0) | (s == float("inf")), float("nan"), tl.log2(s) * LN2)
    return pivot(m), inverse, log_s


@triton.jit
def softmax_forward_kernel(
    x, y, sizes, x_strides, y_strides, x_stride, y_stride, n_rows, n_units,
    LOG: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """y = exp(x - m) / s, or (x - m) - ln(s) if LOG; NaN in rows without mass, as in torch."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_in = row < n_rows
    n_cols = tl.cast(n_units, INDEX) * UNIT
    x = rows_of(x, row, sizes, x_strides, UNIT)
    y = rows_of(y, row, sizes, y_strides, UNIT)
    column = tl.arange(0, BLOCK_COLS).to(INDEX)
    m = tl.full((BLOCK_ROWS,), EMPTY, tl.float32)
    s = tl.zeros((BLOCK_ROWS,), tl.float32)
    if WHOLE:
        tile = load(x, row_in, column, x_stride, n_cols, EMPTY, False, EVEN, BLOCK_ROWS)
        m, s, _, p = update(m, s, tile)
        at, inverse, log_s = of_state(m, s)
        if LOG:
            out = (tile - at[:, None]) - log_s[:, None]
        else:
            out = p * inverse[:, None]
        store(y, out, row_in, column, y_stride, n_cols, EVEN, BLOCK_ROWS)
    else:
        for start in range(0, n_cols, BLOCK_COLS):
            tile = load(x, row_in, start + column, x_stride, n_cols, EMPTY, True, EVEN, BLOCK_ROWS)
            m, s, _, _ = update(m, s, tile)
        at, inverse, log_s = of_state(m, s)
        last = (n_cols - 1) // BLOCK_COLS * BLOCK_COLS
        for back in range(0, n_cols, BLOCK_COLS):
            here = last - back + column
            tile = load(x, row_in, here, x_stride, n_cols, EMPTY, False, EVEN, BLOCK_ROWS)
            if LOG:
                out = (tile - at[:, None]) - log_s[:, None]
            else:
                out = exponential(tile, at[:, None], 1.0) * inverse[:, None]
            store(y, out, row_in, here, y_stride, n_cols, EVEN, BLOCK_ROWS)


@triton.jit
def softmax_backward_kernel(
    dy, y, dx, sizes, dy_strides, y_strides, dx_strides, dy_stride, y_stride, dx_stride, n_rows, n_units,
    LOG: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """dx = y * (dy - sum(y * dy)), or dy - exp(y) * sum(dy) if LOG."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_in = row < n_rows
    n_cols = tl.cast(n_units, INDEX) * UNIT
    dy = rows_of(dy, row, sizes, dy_strides, UNIT)
    y = rows_of(y, row, sizes, y_strides, UNIT)
    dx = rows_of(dx, row, sizes, dx_strides, UNIT)
    column = tl.arange(0, BLOCK_COLS).to(INDEX)
    if WHOLE:
        g = load(dy, row_in, column, dy_stride, n_cols, 0.0, False, EVEN, BLOCK_ROWS)
        v = load(y, row_in, column, y_stride, n_cols, 0.0, False, EVEN, BLOCK_ROWS)
        if LOG:
            out = g - exponential(v, 0.0, 1.0) * tl.sum(g, 1)[:, None]
        else:
            out = v * (g - tl.sum(v * g, 1)[:, None])
        store(dx, out, row_in, column, dx_stride, n_cols, EVEN, BLOCK_ROWS)
    else:
        # a lane sums its own columns, and lanes are added up once, after the last tile
        lanes = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        for start in range(0, n_cols, BLOCK_COLS):
            here = start + column
            g = load(dy, row_in, here, dy_stride, n_cols, 0.0, True, EVEN, BLOCK_ROWS)
            if LOG:
                lanes += g
            else:
                lanes += g * load(y, row_in, here, y_stride, n_cols, 0.0, True, EVEN, BLOCK_ROWS)
        total = tl.sum(lanes, 1)[:, None]
        last = (n_cols - 1) // BLOCK_COLS * BLOCK_COLS
        for back in range(0, n_cols, BLOCK_COLS):
            here = last - back + column
            g = load(dy, row_in, here, dy_stride, n_cols, 0.0, False, EVEN, BLOCK_ROWS)
            v = load(y, row_in, here, y_stride, n_cols, 0.0, False, EVEN, BLOCK_ROWS)
            if LOG:
                out = g - exponential(v, 0.0, 1.0) * total
            else:
                out = v * (g - total)
            store(dx, out, row_in, here, dx_stride, n_cols, EVEN, BLOCK_ROWS)


@triton.jit
def logsumexp_forward_kernel(
    x, lse, sizes, x_strides, x_stride, n_rows, n_units,
    EVEN: tl.constexpr, UNIT: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """lse of each row; N elements a row are read."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_in = row < n_rows
    n_cols = tl.cast(n_units, INDEX) * UNIT
    x = rows_of(x, row, sizes, x_strides, UNIT)
    column = tl.arange(0, BLOCK_COLS).to(INDEX)
    m = tl.full((BLOCK_ROWS,), EMPTY, tl.float32)
    s = tl.zeros((BLOCK_ROWS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        tile = load(x, row_in, start + column, x_stride, n_cols, EMPTY, False, EVEN, BLOCK_ROWS)
        m, s, _, _ = update(m, s, tile)
    _, row_lse = finish(m, s)
    tl.store(lse + row, row_lse, mask=row_in)


@triton.jit
def logsumexp_backward_kernel(
    x, dx, dlse, lse, sizes, x_strides, dx_strides, dlse_strides, lse_strides, x_stride, dx_stride,
    n_rows, n_units, column_tiles,
    EVEN: tl.constexpr, UNIT: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """dx = dlse * exp(x - lse), 0 where lse is -inf; a program owns one tile, 2 N elements a row move."""
    program = tl.program_id(0)
    row = (program // column_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_in = row < n_rows
    n_cols = tl.cast(n_units, INDEX) * UNIT
    column = (program % column_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    at = tl.load(lse + row_offset(row, sizes, lse_strides), mask=row_in, other=0.0).to(tl.float32)
    at = tl.where(at == EMPTY, 0.0, at)
    weight = tl.load(dlse + row_offset(row, sizes, dlse_strides), mask=row_in, other=0.0).to(tl.float32)
    x = rows_of(x, row, sizes, x_strides, UNIT)
    dx = rows_of(dx, row, sizes, dx_strides, UNIT)
    tile = load(x, row_in, column, x_stride, n_cols, EMPTY, False, EVEN, BLOCK_ROWS)
    out = weight[:, None] * exponential(tile, at[:, None], 1.0)
    store(dx, out, row_in, column, dx_stride, n_cols, EVEN, BLOCK_ROWS)


# ---- launchers ---------------------------------------------------------------------------------------------
# Kernels take a row's length and the strides of rows in units of the largest power of two, up to 16, that
# divides them all. So the compiler sees that rows start and end on that boundary, and moves 16 bytes at once:
# by itself it looks for multiples of 16 only, and 1000 bfloat16 are one of 8.

Strides = tuple[int, ...]


def _unit(n_cols: int, strides: list[Strides]) -> int:
    return math.gcd(16, n_cols, *(stride for of_tensor in strides for stride in of_tensor))


def _in_units(unit: int, strides: list[Strides]) -> list[Strides]:
    return [tuple(stride // unit for stride in of_tensor) for of_tensor in strides]


def _config(x: torch.Tensor, tensors: int, strides: Strides) -> RowConfig:
    """The tile for rows like x's, whose strides are given."""
    rows_inner = strides[0] == 1 and x.stride(-1) > 1
    return row_config(x.shape[-1], x.element_size(), tensors, rows_inner, INTERPRETED)


def _options(config: RowConfig, n_cols: int, unit: int) -> dict[str, object]:
    return {
        "EVEN": n_cols % config.block_cols == 0,
        "UNIT": unit,
        "INDEX": tl.int32 if n_cols < INT32_COLS else tl.int64,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_COLS": config.block_cols,
        "num_warps": config.num_warps,
    }


def _forward(x: torch.Tensor, dtype: torch.dtype, log: bool) -> torch.Tensor:
    y = torch.empty_like(x, dtype=dtype)
    if x.numel() == 0:
        return y
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    sizes, strides = fold_rows(x, y)
    config, unit = _config(x, 1, strides[0]), _unit(n_cols, strides)
    with on_device(x):
        softmax_forward_kernel[(triton.cdiv(n_rows, config.block_rows),)](
            x, y, sizes, *_in_units(unit, strides), x.stride(-1), y.stride(-1), n_rows, n_cols // unit,
            LOG=log, WHOLE=n_cols <= config.block_cols, **_options(config, n_cols, unit),
        )  # fmt: skip
    return y


def _backward(dy: torch.Tensor, y: torch.Tensor, dtype: torch.dtype, log: bool) -> torch.Tensor:
    dx = torch.empty_like(y, dtype=dtype)
    if y.numel() == 0:
        return dx
    n_cols = y.shape[-1]
    n_rows = y.numel() // n_cols
    sizes, strides = fold_rows(dy, y, dx)
    config, unit = _config(y, 2, strides[1]), _unit(n_cols, strides)
    with on_device(y):
        softmax_backward_kernel[(triton.cdiv(n_rows, config.block_rows),)](
            dy, y, dx, sizes, *_in_units(unit, strides), dy.stride(-1), y.stride(-1), dx.stride(-1),
            n_rows, n_cols // unit,
            LOG=log, WHOLE=n_cols <= config.block_cols, **_options(config, n_cols, unit),
        )  # fmt: skip
    return dx


def softmax_forward(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y = exp(x - lse) along the last dimension; a row of -inf is NaN, as in torch."""
    return _forward(x, dtype, False)


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """dx = y * (dy - sum(y * dy))."""
    return _backward(dy, y, dtype, False)


def log_softmax_forward(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y = (x - m) - ln(s) along the last dimension, exact in x - m; a row of -inf is NaN, as in torch."""
    return _forward(x, dtype, True)


def log_softmax_backward(dy: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """dx = dy - exp(y) * sum(dy)."""
    return _backward(dy, y, dtype, True)


def logsumexp_forward(x: torch.Tensor) -> torch.Tensor:
    """lse (float32) of each row; -inf for a row of -inf or of length 0."""
    lse = x.new_empty(x.shape[:-1], dtype=wide(x.dtype))
    if x.numel() == 0:
        return lse.fill_(float("-inf"))
    n_cols, n_rows = x.shape[-1], lse.numel()
    sizes, strides = fold_rows(x)
    config, unit = _config(x, 1, strides[0]), _unit(n_cols, strides)
    with on_device(x):
        logsumexp_forward_kernel[(triton.cdiv(n_rows, config.block_rows),)](
            x, lse, sizes, *_in_units(unit, strides), x.stride(-1), n_rows, n_cols // unit,
            **_options(config, n_cols, unit),
        )  # fmt: skip
    return lse


def logsumexp_backward(dlse: torch.Tensor, x: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """dx = dlse * exp(x - lse); 0 for a row without mass."""
    dx = torch.empty_like(x)
    if x.numel() == 0:
        return dx
    n_cols, n_rows = x.shape[-1], lse.numel()
    sizes, strides = fold_rows(x, dx, dlse.unsqueeze(-1), lse.unsqueeze(-1))
    config, unit = _config(x, 1, strides[0]), _unit(n_cols, strides[:2])
    column_tiles = triton.cdiv(n_cols, config.block_cols)
    with on_device(x):
        logsumexp_backward_kernel[(triton.cdiv(n_rows, config.block_rows) * column_tiles,)](
            x, dx, dlse, lse, sizes, *_in_units(unit, strides[:2]), *strides[2:], x.stride(-1), dx.stride(-1),
            n_rows, n_cols // unit, column_tiles, **_options(config, n_cols, unit),
        )  # fmt: skip
    return dx
