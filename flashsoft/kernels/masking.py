"""Which part of a tile takes part, and which tiles need asking.

A band lo <= j - i <= hi (None sets no limit) cuts the tiles met by a program into at most three runs: tiles on the
lower edge, tiles wholly inside, tiles on the upper edge. What segments and boolean tensors leave of them, a kernel
before has put into a table (`tile_runs`). Only edges are masked; what lies outside is never visited.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_terms import at_head


@triton.jit
def _ceil_to(x, BLOCK: tl.constexpr):
    return (x + BLOCK - 1) // BLOCK * BLOCK


@triton.jit
def runs(
    first, last, size, lo, hi, shift, table, BLOCK: tl.constexpr, ALL_EDGES: tl.constexpr, TAIL_IS_EDGE: tl.constexpr
):  # fmt: skip
    """start, inside, edge, end of the tiles along the other axis that positions first..last can see.

    Tiles start at multiples of BLOCK: [start, inside) and [edge, end) are edges, [inside, edge) lies wholly inside
    the band and, if TAIL_IS_EDGE, below `size`. `table` points to the same four of what else masks, or is None; with
    ALL_EDGES (a mask without a table) there is no inside.
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
    if ALL_EDGES:
        inside = start
        edge = start
    else:
        inside = tl.minimum(inside, _ceil_to(end, BLOCK))
        edge = tl.maximum(edge, inside)
    return start, inside, edge, end


@triton.jit
def seen(j, i_first, i_last, terms, place):
    """True for the keys j that any of the queries i_first..i_last sees through the band: what a tile may load."""
    keep = j < place.Sk
    if terms.lo is not None:
        keep = keep & (j >= i_first + terms.lo + place.shift)
    if terms.hi is not None:
        keep = keep & (j <= i_last + terms.hi + place.shift)
    return keep


@triton.jit
def seeing(i, j_first, j_last, terms, place):
    """True for the queries i that see any of the keys j_first..j_last through the band."""
    keep = i < place.Sq
    if terms.hi is not None:
        keep = keep & (i >= j_first - terms.hi - place.shift)
    if terms.lo is not None:
        keep = keep & (i <= j_last - terms.lo - place.shift)
    return keep


@triton.jit
def visible(i, j, terms, place):
    """The boolean tile of queries i against keys j, shaped by how i and j broadcast."""
    inside = (i < place.Sq) & (j < place.Sk)
    if terms.lo is not None:
        inside = inside & (j - i >= terms.lo + place.shift)
    if terms.hi is not None:
        inside = inside & (j - i <= terms.hi + place.shift)
    if terms.query_ids is not None:
        b = place.b.to(tl.int64)
        own = terms.query_ids + b * terms.ids_strides[0] + i.to(tl.int64) * terms.ids_strides[1]
        other = terms.key_ids + b * terms.ids_strides[2] + j.to(tl.int64) * terms.ids_strides[3]
        own_id = tl.load(own, mask=i < place.Sq, other=0)
        inside = inside & (own_id == tl.load(other, mask=j < place.Sk, other=0))
    if terms.keep is not None:
        at = i.to(tl.int64) * terms.keep_strides[2] + j.to(tl.int64) * terms.keep_strides[3]
        kept = tl.load(
            at_head(terms.keep, terms.keep_strides, place) + at, mask=(i < place.Sq) & (j < place.Sk), other=0
        )  # fmt: skip
        inside = inside & (kept != 0)
    return inside
