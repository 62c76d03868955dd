"""Tiles of heads: rows of one head of a tensor (B, H, S, D), and their products.

A tile is a tuple of blocks of columns, each a power of two wide and all but the last of one width, so that a head of
192 is 128 + 64 columns and one of 576 is 512 + 64, not 256 and 1,024. What is wide only in one place, the width of a
head, is so a tuple everywhere: in queries, keys, values, and the sums over them.

Packed sequences, where `starts` is given, lie along the third dimension of a tensor of one batch entry.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Head(NamedTuple):
    """The first element of a head, and its strides; what these are multiplied by has their width."""

    pointer: Any
    row_stride: Any
    column_stride: Any


@triton.jit
def head_of(pointer, strides, b, h, starts, NEAR: tl.constexpr):
    """Head h of batch entry, or packed sequence, b. NEAR: no element of a head is 2^31 or more from its first."""
    pointer += h.to(tl.int64) * strides[1]
    if starts is None:
        pointer += b.to(tl.int64) * strides[0]
    else:
        pointer += tl.load(starts + b).to(tl.int64) * strides[2]
    if NEAR:
        return Head(pointer, strides[2], strides[3])
    else:
        return Head(pointer, tl.cast(strides[2], tl.int64), tl.cast(strides[3], tl.int64))


@triton.jit
def _block(head, row0, ROWS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers (ROWS, WIDTH) from row0 and column FIRST.

    Rows are added up before they are multiplied: offsets that stay the same in a loop over tiles, kept outside it, save
    a few instructions and have the ptxas of triton 3.6 run the products around them one by one (its warning C7515).
    """
    rows, columns = row0 + tl.arange(0, ROWS), tl.arange(0, WIDTH) + FIRST
    return head.pointer + (rows[:, None] * head.row_stride + columns[None, :] * head.column_stride)


@triton.jit
def _load_block(
    head, row0, keep_rows, ROWS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    pointers = _block(head, row0, ROWS, FIRST, WIDTH)
    if keep_rows is None and FIRST + WIDTH <= D:
        return tl.load(pointers)
    elif FIRST + WIDTH <= D:
        return tl.load(pointers, mask=keep_rows[:, None], other=0.0)
    elif keep_rows is None:
        return tl.load(pointers, mask=(tl.arange(0, WIDTH) + FIRST < D)[None, :], other=0.0)
    else:
        inside = keep_rows[:, None] & (tl.arange(0, WIDTH) + FIRST < D)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def load_tile(head, row0, keep_rows, ROWS: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr):
    """ROWS rows of a head, zero beyond D and where not keep_rows (None: all rows exist)."""
    tile = ()
    for i in tl.static_range(len(BLOCKS)):
        tile += (_load_block(head, row0, keep_rows, ROWS, i * BLOCKS[0], BLOCKS[i], D),)
    return tile


@triton.jit
def _store_block(head, row0, keep_rows, x, FIRST: tl.constexpr, D: tl.constexpr):
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    keep = keep_rows[:, None]
    if FIRST + WIDTH > D:
        keep = keep & (tl.arange(0, WIDTH) + FIRST < D)[None, :]
    tl.store(_block(head, row0, ROWS, FIRST, WIDTH), x.to(head.pointer.dtype.element_ty), mask=keep)


@triton.jit
def store_tile(head, row0, keep_rows, tile, D: tl.constexpr):
    """Writes a tile's rows where keep_rows, up to column D."""
    for i in tl.static_range(len(tile)):
        _store_block(head, row0, keep_rows, tile[i], i * tile[0].shape[1], D)


@triton.jit
def _zero_block(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def zeros(ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """A float32 tile."""
    tile = ()
    for i in tl.static_range(len(BLOCKS)):
        tile += (_zero_block(ROWS, BLOCKS[i]),)
    return tile


@triton.jit
def scaled(tile, by):
    """The tile times a number."""
    return [x * by for x in tile]


@triton.jit
def scaled_rows(tile, by):
    """The tile times one number a row."""
    return [x * by[:, None] for x in tile]


@triton.jit
def only(tile, keep_rows):
    """The tile with zeros in the other rows: 0 * NaN would be NaN."""
    return [tl.where(keep_rows[:, None], x, 0.0) for x in tile]


@triton.jit
def signed(tile, scale, NEGATE: tl.constexpr):
    """The tile, negated if scale < 0: exact, and a maximum of its products stays one for |scale|.

    NEGATE says so beforehand; where it is None, the sign is only known here, and costs a pass over the tile.
    """
    if NEGATE is None:
        sign = tl.where(scale < 0.0, -1.0, 1.0)
        return [(x * sign).to(x.dtype) for x in tile]
    elif NEGATE:
        return [-x for x in tile]
    else:
        return tile


@triton.jit
def _products(a, b):
    """a * b in float32; where a is 0 it is 0, whatever stands in b."""
    return tl.where(a == 0.0, 0.0, a.to(tl.float32) * b.to(tl.float32))


@triton.jit
def row_products(a, b):
    """The sum of a * b (rows,) over both tiles' columns."""
    total = tl.sum(_products(a[0], b[0]), 1)
    for i in tl.static_range(1, len(a)):
        total += tl.sum(_products(a[i], b[i]), 1)
    return total


@triton.jit
def tile_products(a, b):
    """The sum of a * b over all of both tiles. In one dimension: Triton 3.6 cannot reduce such a product by rows for
    sm_100, where it comes from tensor memory."""
    total = 0.0
    for i in tl.static_range(len(a)):
        products = _products(a[i], b[i])
        total += tl.sum(tl.reshape(products, (products.shape[0] * products.shape[1],)), 0)
    return total


@triton.jit
def score_dot(a, b, PRECISION: tl.constexpr):
    """a @ b.T over the width of a head.

    In float32 one thread adds the products of a block one after the other, and what that rounds off is in every weight:
    `tuning.attention.columns` keeps blocks short. The fma keeps the compiler from making one chain of them again.
    """
    x = tl.dot(a[0], b[0].T, input_precision=PRECISION)
    for i in tl.static_range(1, len(a)):
        x = tl.fma(x, 1.0, tl.dot(a[i], b[i].T, input_precision=PRECISION))
    return x


@triton.jit
def plain_dot(a, b, PRECISION: tl.constexpr):
    """a @ b.T over the width of a head, for products whose rounding no weight multiplies."""
    x = tl.dot(a[0], b[0].T, input_precision=PRECISION)
    for i in tl.static_range(1, len(a)):
        x = tl.dot(a[i], b[i].T, x, input_precision=PRECISION)
    return x


@triton.jit
def _add_block(p, block, acc, PRECISION: tl.constexpr):
    """acc + p @ block, for a sum over many tiles.

    float32 tiles are multiplied from zero and then added, so that rounding grows with the number of tiles, not of
    terms, as in a blocked matrix product. The fma keeps the compiler from folding acc into the product again.
    """
    if p.dtype == tl.float32:
        return tl.fma(tl.dot(p, block, input_precision=PRECISION), 1.0, acc)
    else:
        return tl.dot(p, block, acc)


@triton.jit
def dot_add(p, tile, acc, PRECISION: tl.constexpr):
    """acc + p @ tile, p rounded to the tile's dtype."""
    p = p.to(tile[0].dtype)
    total = ()
    for i in tl.static_range(len(tile)):
        total += (_add_block(p, tile[i], acc[i], PRECISION),)
    return total
