"""Tiles of rows: which part of which rows a program has, and how its tiles are read, held and written.

Rows that begin anywhere (an odd length, say) have a head, what lies before their first 16-byte boundary, a body of
whole 16 bytes, and a tail. Columns are counted from that boundary, tiles are of the body alone, and head and tail are
taken element by element by the first of a row's programs (`ends`). Without that a row of odd length moves 2 or 4 bytes
at a time: on an H200, in bf16, at 0.26 to 0.56 of a copy's rate. Other rows are all body.
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
def body_of(row, sizes, strides, n_units, UNIT: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr):
    """The elements of a row's head, and of its body, by where the row begins in the tensor with these strides."""
    n_cols = tl.cast(n_units, INDEX) * UNIT
    if ALIGN == 0:
        return tl.cast(0, INDEX), n_cols
    else:
        beyond = tl.max(row_offset(row, sizes, strides) * UNIT % ALIGN, 0).to(INDEX)
        head = tl.where(beyond == 0, 0, ALIGN - beyond)
        return head, (n_cols - head) // ALIGN * ALIGN


@triton.jit
def part_of(part, part_cols, body, PARTED: tl.constexpr, INDEX: tl.constexpr):
    """Where a part of a body begins (int64), and how many columns it has."""
    begin = part.to(INDEX) * part_cols
    if not PARTED:
        return begin.to(tl.int64), body
    else:
        return begin.to(tl.int64), tl.minimum(body - begin, part_cols)


@triton.jit
def rows_of(x, row, sizes, strides, stride, head, begin, UNIT: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers (BLOCK_ROWS, 1) to where a part begins; strides of rows are in units of UNIT elements.

    ALIGNED: elements of which the body's offset in this tensor is a multiple, more than the compiler can see; or 0.
    """
    offset = row_offset(row, sizes, strides) * UNIT + head
    if ALIGNED > 0:
        offset = tl.multiple_of(offset, [ALIGNED])
    return x + offset[:, None] + begin * stride


@triton.jit
def load(
    x, row_in, start, stride, end, PAD: tl.constexpr, EVICTION: tl.constexpr,
    EVEN: tl.constexpr, STEP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The tile as it is stored that begins at column `start`; PAD from `end` on, a multiple of STEP."""
    column = tl.arange(0, BLOCK_COLS)
    at = x + tl.cast(start, tl.int64) * stride + (column.to(tl.int64) * stride)[None, :]
    left = tl.multiple_of(end - start, STEP)
    if EVEN and BLOCK_ROWS == 1:
        return tl.load(at, eviction_policy=EVICTION)
    elif EVEN:
        return tl.load(at, mask=row_in[:, None], other=PAD, eviction_policy=EVICTION)
    elif BLOCK_ROWS == 1:
        return tl.load(at, mask=(column < left)[None, :], other=PAD, eviction_policy=EVICTION)
    else:
        return tl.load(at, mask=row_in[:, None] & (column < left)[None, :], other=PAD, eviction_policy=EVICTION)


@triton.jit
def load_all(
    x, row_in, stride, end, PAD: tl.constexpr, EVICTION: tl.constexpr, TILES: tl.constexpr,
    EVEN: tl.constexpr, STEP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The tiles from column 0 on, a tuple of TILES."""
    tiles = ()
    for t in tl.static_range(TILES):
        tile = load(x, row_in, t * BLOCK_COLS, stride, end, PAD, EVICTION, EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
        tiles = tiles + (tile,)  # noqa: RUF005 (Triton has no unpacking)
    return tiles


@triton.jit
def again(tile, nothing, PACKED: tl.constexpr):
    """A loaded tile in float32; if PACKED, from a value that the compiler must take for another one.

    So large 16-bit tiles wait for their row's state in half the registers, and twice as many bytes are under way:
    without this the float32 copies of a first use would be kept for the second. `nothing` is 0, which the compiler
    does not know; each use of a tile that is to be computed anew takes one of its own. None has the value taken for
    what it is: two elements are then unpacked by one instruction each.
    """
    if not PACKED:
        return tile.to(tl.float32)
    else:
        ROWS: tl.constexpr = tile.shape[0]
        COLS: tl.constexpr = tile.shape[1]
        low, high = tl.split(tl.reshape(tile.to(tl.uint16, bitcast=True), (ROWS, COLS // 2, 2)))
        word = low.to(tl.uint32) | (high.to(tl.uint32) << 16)
        if nothing is not None:
            word = word ^ nothing.to(tl.uint32, bitcast=True)
        if tile.dtype == tl.bfloat16:  # the upper half of a float32: one instruction each
            low = (word << 16).to(tl.float32, bitcast=True)
            high = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            low = word.to(tl.uint16).to(tile.dtype, bitcast=True).to(tl.float32)
            high = (word >> 16).to(tl.uint16).to(tile.dtype, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), (ROWS, COLS))


@triton.jit
def store(
    y, tile, row_in, start, stride, end,
    EVEN: tl.constexpr, STEP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The counterpart of `load`, rounding to y's dtype."""
    column = tl.arange(0, BLOCK_COLS)
    at = y + tl.cast(start, tl.int64) * stride + (column.to(tl.int64) * stride)[None, :]
    left = tl.multiple_of(end - start, STEP)
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
def ends(part, head, body, n_units, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """The columns (2 * ALIGN,) of a row's head and tail, in turns, and which of them the program has."""
    side = tl.arange(0, 2 * ALIGN)
    nth = side // 2
    tail = tl.cast(n_units, body.dtype) * UNIT - head - body
    column = tl.where(side % 2 == 0, nth - head, nth + body)
    exists = nth < tl.where(side % 2 == 0, head, tail)
    return column, exists & (part == 0)


@triton.jit
def scalar(x):
    """The element of x (1,)."""
    return tl.sum(x, 0)


@triton.jit
def load_ends(x, column, exists, PAD: tl.constexpr):
    """A row's head and tail (2 * ALIGN,), float32, PAD where there is nothing.

    Reduce it to scalars, for a program of one row: from a row of a tile the compiler takes the tile's layout over, in
    which a thread has several of these elements, and all threads all of them.
    """
    return tl.load(tl.reshape(x, (1,)) + column, mask=exists, other=PAD).to(tl.float32)


@triton.jit
def store_ends(y, ends, column, exists):
    """The counterpart of `load_ends`."""
    tl.store(tl.reshape(y, (1,)) + column, ends.to(y.dtype.element_ty), mask=exists)
