"""Which tile of queries comes when, and in which order its tiles of keys are visited.

Tiles of queries are numbered over all heads, in sections of heads whose keys and values fit the L2 cache together;
within a section those that see most keys come first, all heads of it side by side. The grid is persistent: a program
takes its own number first, then every next one off a queue, or at strides of the grid where all tiles are alike.
The queue is two words, zeros before and after a launch: the next number, and how many programs have ended. Behind it
each program has a word for each slot of queries, zero but for tiles that are to be taken again (`consumer.py`).

Of packed sequences, b has the tiles from cu_q[b] // BLOCK_M + b on. So each has room for its own, b is found by
bisection, and no more than one tile a sequence is empty. What lies behind the last is one more, without keys.

A tile of queries visits its edges first (see `masking.runs`), then what lies wholly inside the band, each from the last
key to the first. So the loop that runs longest comes last, has no mask, and finds a maximum already there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..masking import runs


class Visits(NamedTuple):
    """`count` tiles of keys, the first `edges` of them masked, and of these the first `high` at the upper limit."""

    count: Any
    edges: Any
    high: Any
    inside: Any
    edge: Any


@triton.jit
def queries_of(number, tiles, heads, section):
    """The tile and the head of a number; each head has `tiles`, each section `section` heads, but for the last."""
    first = number // (section * tiles) * section
    rest = number - first * tiles
    beside = tl.maximum(tl.minimum(section, heads - first), 1)
    return tiles - 1 - rest // beside, first + rest % beside


class Sequence(NamedTuple):
    """Where queries and keys begin, how many there are, and what is added to the limits of the band for these keys."""

    q0: Any
    k0: Any
    Sq: Any
    Sk: Any
    moved: Any


@triton.jit
def sequence_at(slot, cu_q, sequences, BLOCK_M: tl.constexpr):
    """The packed sequence whose tiles lie around number `slot`."""
    least = 0
    most = sequences
    while least < most:
        b = (least + most + 1) // 2
        begins = tl.load(cu_q + b) // BLOCK_M + b
        least = tl.where(begins <= slot, b, least)
        most = tl.where(begins <= slot, most, b - 1)
    return least


@triton.jit
def sequence_of(b, cu_q, cu_k, sequences, Tq, lo, hi, LOWER_RIGHT: tl.constexpr):
    """Packed sequence b, of its keys those that one of its queries sees; of number `sequences` the rest, unseeing."""
    after = tl.minimum(b + 1, sequences)
    q0 = tl.load(cu_q + b)
    k0 = tl.load(cu_k + b)
    Sq = tl.where(b < sequences, tl.load(cu_q + after), Tq) - q0
    Sk = tl.load(cu_k + after) - k0
    moved = Sk - Sq if LOWER_RIGHT else 0
    first = 0
    if hi is not None:
        Sk = tl.minimum(Sk, Sq + hi + moved)
    if lo is not None:
        first = tl.maximum(lo + moved, 0)
    return Sequence(q0, k0 + first, Sq, tl.maximum(Sk - first, 0), moved - first)


@triton.jit
def place_of(
    tile, b, cu_q, cu_k, Sq, Sk, lo, hi, sequences, BLOCK_M: tl.constexpr, LOWER_RIGHT: tl.constexpr
):  # fmt: skip
    """A tile's first query, and what it is of: packed sequence b, or a whole head."""
    if cu_q is None:
        return tile * BLOCK_M, Sequence(0, 0, Sq, Sk, 0)
    else:
        place = sequence_of(b, cu_q, cu_k, sequences, Sq, lo, hi, LOWER_RIGHT)
        return (tile - place.q0 // BLOCK_M - b) * BLOCK_M, place


@triton.jit
def visits_of(row0, Sq, Sk, lo, hi, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """What BLOCK_M queries from row0 visit: at least one tile, so that every tile of queries goes the same way."""
    last = tl.minimum(row0 + BLOCK_M, Sq) - 1
    start, inside, edge, end = runs(row0, last, Sk, lo, hi, 0, None, BLOCK_N, TAIL_IS_EDGE=True)
    high = tl.maximum(end - edge + BLOCK_N - 1, 0) // BLOCK_N
    low = 0
    if lo is not None:
        low = tl.maximum(inside - start, 0) // BLOCK_N
    count = high + low + (edge - inside) // BLOCK_N
    # nothing is seen: one tile, all of it masked
    high = tl.where(count == 0, 1, high)
    count = tl.maximum(count, 1)
    return Visits(count, high + low, high, inside, edge)


@triton.jit
def keys_of(visits, i, lo, BLOCK_N: tl.constexpr):
    """The first key of visit i."""
    first = visits.edge + (visits.high - 1 - i) * BLOCK_N
    if lo is not None:
        first = tl.where(i < visits.high, first, visits.inside + (visits.high - 1 - i) * BLOCK_N)
        first = tl.where(i < visits.edges, first, visits.edge + (visits.edges - 1 - i) * BLOCK_N)
    return first


@triton.jit
def unseen(visits, last, hi, BLOCK_N: tl.constexpr):
    """How many of the first visits, at the upper limit, but not all hold no key that queries up to `last` see."""
    ahead = visits.edge + (visits.high - 1) * BLOCK_N - (last + hi)
    return tl.minimum(tl.minimum(tl.maximum(ahead + BLOCK_N - 1, 0) // BLOCK_N, visits.high), visits.count - 1)


@triton.jit
def unsettled(visits, row0, last, lo, hi, BLOCK_N: tl.constexpr):
    """How many visits it takes until queries row0 to `last` have all met a key they see, if they see any.

    All see some of the edges but one query, whose limit may lie just between two tiles.
    """
    if hi is not None:
        return visits.edges + tl.where((row0 + hi + 1) % BLOCK_N == 0, 1, 0)
    elif lo is not None:
        return visits.edges + tl.where((last + lo) % BLOCK_N == 0, 1, 0)
    else:
        return visits.edges


@gluon.jit
def following(number, queue, QUEUE: gl.constexpr):
    """The number a program takes after this one."""
    if QUEUE:
        return gl.num_programs(0) + gl.atomic_add(queue, 1, sem="relaxed").to(gl.int32)
    else:
        return number + gl.num_programs(0)


@gluon.jit
def next_tile(number, tiles, heads, section, cu_q, sequences, Tq, queue, BLOCK_M: gl.constexpr, QUEUE: gl.constexpr):
    """The next number from this one on whose tile has queries, with its tile, head and packed sequence.

    From tiles * heads on there are none.
    """
    tile, head = queries_of(number, tiles, heads, section)
    b = 0
    if cu_q is not None:
        empty = number < tiles * heads
        while empty:
            b = sequence_at(tile, cu_q, sequences, BLOCK_M)
            q0 = gl.load(cu_q + b)
            end = gl.where(b < sequences, gl.load(cu_q + gl.minimum(b + 1, sequences)), Tq)
            empty = (tile - q0 // BLOCK_M - b) * BLOCK_M >= end - q0
            if empty:
                number = following(number, queue, QUEUE)
                tile, head = queries_of(number, tiles, heads, section)
                empty = number < tiles * heads
    return number, tile, head, b


@gluon.jit
def leave(queue, QUEUE: gl.constexpr):
    """Ends a program's part in the queue; the last leaves it as it was."""
    if QUEUE:
        if gl.atomic_add(queue + 1, 1) == gl.num_programs(0) - 1:
            gl.store(queue, 0)
            gl.store(queue + 1, 0)
