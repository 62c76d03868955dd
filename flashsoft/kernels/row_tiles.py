"""Tiles of rows: which part of which rows a program has, and how its tiles are read, held and written.

Columns are counted from where the program's part of the row begins; of these, lo to hi - 1 exist. lo is 0 unless
ALIGN > 0: then a part begins on the 16-byte boundary at or before its first column, ALIGN elements apart, though
rows begin anywhere (an odd length, say). Whole 16 bytes are read, what does not belong to the row is replaced by
padding, and the incomplete 16 bytes at a row's ends are written element by element (`edge_columns`).
Without that a row of odd length moves 2 or 4 bytes at a time: on an H200, in bf16, at 0.26 to 0.56 of a copy's rate.
"""

import triton
import triton.language as tl

from .tiles import row_offset


@triton.jit
def place(n_rows, parts, BLOCK_ROWS: tl.constexpr):
    """A program's rows (BLOCK_ROWS,) int64, which of them exist, and its part of them (scalar), of so many parts."""
    program = tl.program_id(0)
    row = (program // parts).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row, row < n_rows, program % parts


@triton.jit
def shift_of(row, sizes, strides, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """How far, in elements, a row begins behind a boundary; the same for every tensor of a launch."""
    if ALIGN == 0:
        return tl.cast(0, tl.int64)
    else:
        return tl.max(row_offset(row, sizes, strides) * UNIT % ALIGN, 0)


@triton.jit
def part_of(part, part_cols, n_units, shift, PARTED: tl.constexpr, UNIT: tl.constexpr, INDEX: tl.constexpr):
    """Where a part begins, from its row's first boundary (int64), and the first and the end of its columns."""
    end = tl.cast(n_units, INDEX) * UNIT + shift.to(INDEX)
    begin = part.to(INDEX) * part_cols
    if not PARTED:
        return begin.to(tl.int64), shift.to(INDEX), end
    else:
        return begin.to(tl.int64), tl.maximum(shift.to(INDEX) - begin, 0), tl.minimum(end - begin, part_cols)


@triton.jit
def rows_of(x, row, sizes, strides, stride, shift, begin, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers (BLOCK_ROWS, 1) to where a part begins; strides of rows are in units of UNIT elements."""
    offset = row_offset(row, sizes, strides) * UNIT - shift
    if ALIGN > 0:
        offset = tl.multiple_of(offset, [ALIGN])
    return x + offset[:, None] + begin * stride


@triton.jit
def load(
    x, row_in, column, stride, lo, hi, PAD: tl.constexpr, EVICTION: tl.constexpr,
    EVEN: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """A tile as it is stored, PAD outside; with ALIGN in loads of whole 16 bytes."""
    at = x + (column.to(tl.int64) * stride)[None, :]
    if ALIGN > 0:
        first = column // ALIGN * ALIGN
        touched = (first + (ALIGN - 1) >= lo) & (first < hi)
        tile = tl.load(at, mask=touched[None, :], other=PAD, eviction_policy=EVICTION)
        return tl.where(((column >= lo) & (column < hi))[None, :], tile, PAD)
    elif EVEN and BLOCK_ROWS == 1:
        return tl.load(at, eviction_policy=EVICTION)
    elif EVEN:
        return tl.load(at, mask=row_in[:, None], other=PAD, eviction_policy=EVICTION)
    elif BLOCK_ROWS == 1:
        return tl.load(at, mask=(column < tl.multiple_of(hi, UNIT))[None, :], other=PAD, eviction_policy=EVICTION)
    else:
        exists = row_in[:, None] & (column < tl.multiple_of(hi, UNIT))[None, :]
        return tl.load(at, mask=exists, other=PAD, eviction_policy=EVICTION)


@triton.jit
def again(tile, nothing, PACKED: tl.constexpr):
    """A loaded tile in float32; if PACKED, from a value that the compiler must take for another one.

    So large 16-bit tiles wait for their row's state in half the registers, and twice as many bytes are under way:
    without this the float32 copies of a first use would be kept for the second. `nothing` is 0, which the compiler
    does not know; each use of a tile that is to be computed anew takes one of its own.
    """
    if not PACKED:
        return tile.to(tl.float32)
    else:
        ROWS: tl.constexpr = tile.shape[0]
        COLS: tl.constexpr = tile.shape[1]
        low, high = tl.split(tl.reshape(tile.to(tl.uint16, bitcast=True), (ROWS, COLS // 2, 2)))
        word = (low.to(tl.uint32) | (high.to(tl.uint32) << 16)) ^ nothing.to(tl.uint32, bitcast=True)
        if tile.dtype == tl.bfloat16:  # the upper half of a float32: one instruction each
            low = (word << 16).to(tl.float32, bitcast=True)
            high = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            low = word.to(tl.uint16).to(tile.dtype, bitcast=True).to(tl.float32)
            high = (word >> 16).to(tl.uint16).to(tile.dtype, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), (ROWS, COLS))


@triton.jit
def store(
    y, tile, row_in, column, stride, lo, hi,
    EVEN: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """The counterpart of `load`, rounding to y's dtype; with ALIGN only whole 16 bytes."""
    at = y + (column.to(tl.int64) * stride)[None, :]
    tile = tile.to(y.dtype.element_ty)
    if ALIGN > 0:
        first = column // ALIGN * ALIGN
        tl.store(at, tile, mask=((first >= lo) & (first + ALIGN <= hi))[None, :])
    elif EVEN and BLOCK_ROWS == 1:
        tl.store(at, tile)
    elif EVEN:
        tl.store(at, tile, mask=row_in[:, None])
    elif BLOCK_ROWS == 1:
        tl.store(at, tile, mask=(column < tl.multiple_of(hi, UNIT))[None, :])
    else:
        tl.store(at, tile, mask=row_in[:, None] & (column < tl.multiple_of(hi, UNIT))[None, :])


@triton.jit
def edge_columns(lo, hi, ALIGN: tl.constexpr):
    """The columns (2 * ALIGN,) of the 16 bytes that a row's first and last element lie in, and which `store` left."""
    side = tl.arange(0, 2 * ALIGN)
    tail = tl.maximum(hi, 0) // ALIGN * ALIGN
    column = tl.where(side < ALIGN, side, tail + side - ALIGN)
    left = (tl.where(side < ALIGN, lo, hi - tail) > 0) & (column >= lo) & (column < hi)
    return column, left
