"""Which part of a tile takes part, and which tiles need asking: the device side of a `MaskSpec`.

A band lo <= j - i <= hi (None sets no limit) cuts the tiles met by a program into at most three runs: tiles on the
lower edge, tiles wholly inside, tiles on the upper edge. Only edges are masked; what lies outside is never visited.
"""

import triton
import triton.language as tl


@triton.jit
def _ceil_to(x, BLOCK: tl.constexpr):
    return (x + BLOCK - 1) // BLOCK * BLOCK


@triton.jit
def runs(first, last, size, lo, hi, BLOCK: tl.constexpr, ALL_EDGES: tl.constexpr, TAIL_IS_EDGE: tl.constexpr):
    """start, inside, edge, end of the tiles along the other axis that positions first..last can see.

    Tiles start at multiples of BLOCK: [start, inside) and [edge, end) are edges, [inside, edge) lies wholly inside
    the band and, if TAIL_IS_EDGE, below `size`. With ALL_EDGES (a boolean tensor) there is no inside.
    """
    start = 0
    inside = 0
    end = size
    edge = size // BLOCK * BLOCK if TAIL_IS_EDGE else _ceil_to(size, BLOCK)
    if lo is not None:
        start = tl.maximum(first + lo, 0) // BLOCK * BLOCK
        inside = _ceil_to(tl.maximum(last + lo, 0), BLOCK)
    if hi is not None:
        end = tl.minimum(size, tl.maximum(last + hi + 1, 0))
        edge = tl.minimum(edge, tl.maximum(first + hi + 1, 0) // BLOCK * BLOCK)
    if ALL_EDGES:
        inside = start
        edge = start
    else:
        inside = tl.minimum(inside, _ceil_to(end, BLOCK))
        edge = tl.maximum(edge, inside)
    return start, inside, edge, end


@triton.jit
def seen(j, i_first, i_last, size, lo, hi):
    """True for the j below `size` that any of i_first..i_last sees through the band: what a tile may load."""
    keep = j < size
    if lo is not None:
        keep = keep & (j >= i_first + lo)
    if hi is not None:
        keep = keep & (j <= i_last + hi)
    return keep


@triton.jit
def visible(i, j, Sq, Sk, lo, hi, keep, keep_strides):
    """The boolean tile of queries i against keys j, shaped by how i and j broadcast; `keep` a pointer or None."""
    inside = j < Sk
    if lo is not None:
        inside = inside & (j - i >= lo)
    if hi is not None:
        inside = inside & (j - i <= hi)
    if keep is not None:
        at = i.to(tl.int64) * keep_strides[2] + j.to(tl.int64) * keep_strides[3]
        inside = inside & (tl.load(keep + at, mask=(i < Sq) & (j < Sk), other=0) != 0)
    return inside
