"""The terms of attention as kernels see them: pointers and numbers, and where in them a program is.

`Terms` is what a launch was given, the same for all programs. `Place` is one head of one batch entry, or of one packed
sequence. Every function of scores, masks and dropout takes both, and None in `Terms` leaves its term out of the code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)


class Terms(NamedTuple):
    """`flashsoft.terms.Terms`, `keep` as `mask_bits` gives it, `live_keys`; strides of a broadcast dimension are 0."""

    words: Any
    words_strides: Any
    live: Any
    live_strides: Any
    bias: Any
    bias_strides: Any
    slopes: Any
    slopes_strides: Any
    factor: Any
    query_ids: Any
    key_ids: Any
    ids_strides: Any
    lengths: Any
    seed: Any
    scale: Any
    softcap: Any
    threshold: Any
    dropout_scale: Any
    lo: Any
    hi: Any


class Place(NamedTuple):
    """Head h of batch entry b, with Sq queries and Sk keys in use.

    offset: of the diagonal that ends in the last query and key. shift: what the band's limits are moved by.
    stream: the number of this head among all.
    """

    b: Any
    h: Any
    stream: Any
    Sq: Any
    Sk: Any
    offset: Any
    shift: Any


@triton.jit
def program_of(pid, tiles, heads, starts, sequences, BLOCK: tl.constexpr):
    """b, h and the tile of BLOCK positions that a program owns, of `tiles` a head.

    Those of packed sequence b are numbered from starts[b] // BLOCK + b on, which leaves room for all of them, and for
    no more than one a sequence beside.
    """
    tile = pid % tiles
    h = pid // tiles % heads
    b = pid // tiles // heads
    if starts is not None:
        high = sequences - 1
        while b < high:
            middle = (b + high + 1) // 2
            begun = tl.load(starts + middle) // BLOCK + middle <= tile
            b = tl.where(begun, middle, b)
            high = tl.where(begun, high, middle - 1)
        tile -= tl.load(starts + b) // BLOCK + b
    return b, h, tile


@triton.jit
def place_of(b, h, Hq, Sq, Sk, lengths, cu_q, cu_k, LOWER_RIGHT: tl.constexpr):
    """Head h of batch entry, or packed sequence, b."""
    if cu_q is not None:
        Sq = tl.load(cu_q + b + 1) - tl.load(cu_q + b)
        Sk = tl.load(cu_k + b + 1) - tl.load(cu_k + b)
    offset = Sk - Sq
    shift = offset if LOWER_RIGHT else 0
    if lengths is not None:
        Sk = tl.minimum(Sk, tl.maximum(tl.load(lengths + b).to(tl.int32), 0))
    return Place(b, h, b * Hq + h, Sq, Sk, offset, shift)


@triton.jit
def at_head(pointer, strides, place):
    """The part of a tensor (B, H, ...) that belongs to a place."""
    return pointer + place.b.to(tl.int64) * strides[0] + place.h.to(tl.int64) * strides[1]


@triton.jit
def tile_of(pointer, strides, place, row0, column0, rows, columns):
    """Pointers to a tile, shaped by how rows and columns broadcast: what of a place's part lies at (row0, column0).

    Within a tile offsets have 32 bits: 64 for every element would take the registers of a tile of scores.
    """
    row0, column0 = tl.cast(row0, tl.int64), tl.cast(column0, tl.int64)
    first = at_head(pointer, strides, place) + row0 * strides[2] + column0 * strides[3]
    return first + rows * strides[2] + columns * strides[3]


@triton.jit
def signed_scale(terms, place):
    """The scale of a head: a number, times an entry of a tensor if there is one."""
    if terms.factor is None:
        return terms.scale
    else:
        return terms.scale * tl.load(terms.factor + place.h).to(tl.float32)


@triton.jit
def positive_scale(terms, place):
    """|scale|; the smallest normal number stands for 0, since 0 * -inf of a masked score is NaN."""
    return tl.maximum(tl.abs(signed_scale(terms, place)), TINY)
