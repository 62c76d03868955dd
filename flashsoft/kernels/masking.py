"""Which part of a tile takes part, and which tiles need asking.

A band lo <= j - i <= hi (None sets no limit) cuts the tiles met by a program into at most three runs: tiles on the
lower edge, tiles wholly inside, tiles on the upper edge. What segments and boolean tensors leave of them, a kernel
before has put into a table (`tile_runs`). Only edges are masked; what lies outside is never visited.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_terms import at_head
from .mask_bits import bits_of, live_of


@triton.jit
def _ceil_to(x, BLOCK: tl.constexpr):
    return (x + BLOCK - 1) // BLOCK * BLOCK


@triton.jit
def runs(first, last, size, lo, hi, shift, table, BLOCK: tl.constexpr, TAIL_IS_EDGE: tl.constexpr):
    """start, inside, edge, end of the tiles along the other axis that positions first..last can see.

    Tiles start at multiples of BLOCK: [start, inside) and [edge, end) are edges, [inside, edge) lies wholly inside
    the band and, if TAIL_IS_EDGE, below `size`. `table` points to the same four of what else masks, or is None.
    """
    start = 0
    inside = 0
    end = size
    edge = size // BLOCK * BLOCK if TAIL_IS_EDGE else _ceil_to(size, BLOCK)
    if lo is not None:
        start = tl.maximum(first + lo + shift, 0) // BLOCK * BLOCK
        inside = _ceil_to(tl.maximum(last + lo + shift, 0), BLOCK)
    if hi is not None:
        end = tl.minimum(size, tl.maximum(last + hi + shift + 1, 0))
        edge = tl.minimum(edge, tl.maximum(first + hi + shift + 1, 0) // BLOCK * BLOCK)
    if table is not None:
        start = tl.maximum(start, tl.load(table))
        inside = tl.maximum(inside, tl.load(table + 1))
        edge = tl.minimum(edge, tl.load(table + 2))
        end = tl.minimum(end, tl.load(table + 3))
    inside = tl.minimum(inside, _ceil_to(end, BLOCK))
    edge = tl.maximum(edge, inside)
    return start, inside, edge, end


@triton.jit
def seen_keys(row0, column0, terms, place, rows, BLOCK_N: tl.constexpr):
    """(BLOCK_N,): which keys so many rows may load: those in the band of one of them, and seen by any query."""
    j = column0 + tl.arange(0, BLOCK_N)
    keep = j < place.Sk
    if terms.lo is not None:
        keep = keep & (j >= row0 + terms.lo + place.shift)
    if terms.hi is not None:
        keep = keep & (j <= tl.minimum(row0 + rows, place.Sq) - 1 + terms.hi + place.shift)
    if terms.live is not None:
        live = at_head(terms.live, terms.live_strides, place)
        keep = keep & live_of(live, terms.live_strides, column0, place.Sk, BLOCK_N)
    return keep


@triton.jit
def seeing_queries(row0, column0, lse_head, terms, place, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BLOCK_M,): which queries a tile of keys may load: those in the band of one of them, and that see any key.

    lse_head: of the head's queries, as `settle` gives it, +inf for one that sees none.
    """
    i = row0 + tl.arange(0, BLOCK_M)
    keep = i < place.Sq
    if terms.hi is not None:
        keep = keep & (i >= column0 - terms.hi - place.shift)
    if terms.lo is not None:
        keep = keep & (i <= tl.minimum(column0 + BLOCK_N, place.Sk) - 1 - terms.lo - place.shift)
    if terms.live is not None:
        keep = keep & (tl.load(lse_head + i) != float("inf"))
    return keep


@triton.jit
def _both(a, b):
    """a and b, where None as a stands for all."""
    if a is None:
        return b
    else:
        return a & b


@triton.jit
def visible(
    row0, column0, rows, columns, terms, place, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_KEYS: tl.constexpr
):  # fmt: skip
    """The boolean tile of queries row0 + rows against keys column0 + columns, shaped by how the two broadcast.

    Queries beyond Sq are as others, but for a boolean tensor, which has no bit beyond its own Sq and Sk. BY_KEYS: its
    words lie along queries. No expression of rows and columns alone stands here: it would be a tile of registers held
    through the loop.
    """
    inside = None
    if terms.words is not None:
        words = at_head(terms.words, terms.words_strides, place)
        if BY_KEYS:
            inside = bits_of(words, terms.words_strides, column0, row0, place.Sk, place.Sq, BLOCK_N, BLOCK_M)
        else:
            inside = bits_of(words, terms.words_strides, row0, column0, place.Sq, place.Sk, BLOCK_M, BLOCK_N)
    if (terms.words is None) or (terms.hi is not None) or (terms.lengths is not None):
        last = place.Sk - 1 - column0
        if terms.hi is not None:
            last = tl.minimum(last, rows + (row0 - column0 + terms.hi + place.shift))
        inside = _both(inside, columns <= last)
    if terms.lo is not None:
        inside = _both(inside, columns >= rows + (row0 - column0 + terms.lo + place.shift))
    if terms.query_ids is not None:
        b = place.b.to(tl.int64)
        own = terms.query_ids + b * terms.ids_strides[0] + tl.cast(row0 + rows, tl.int64) * terms.ids_strides[1]
        other = terms.key_ids + b * terms.ids_strides[2] + tl.cast(column0 + columns, tl.int64) * terms.ids_strides[3]
        own_id = tl.load(own, mask=rows < place.Sq - row0, other=0)
        inside = _both(inside, own_id == tl.load(other, mask=columns < place.Sk - column0, other=0))
    return inside
