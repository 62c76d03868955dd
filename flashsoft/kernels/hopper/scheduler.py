"""Which tile of queries comes when, and in which order its tiles of keys are visited.

Tiles of queries are numbered over all heads, in sections of heads whose keys and values fit the L2 cache together;
within a section those that see most keys come first, all heads of it side by side. The grid is persistent: a program
takes its own number first, then every next one off a queue, or at strides of the grid where all tiles are alike.
The queue is two counters, zeros before and after a launch: the next number, and how many programs have ended.

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
    """`count` tiles of keys, of which the first `edges` are masked, and of these the first `high` at the upper limit."""

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
    beside = tl.minimum(section, heads - first)
    return tiles - 1 - rest // beside, first + rest % beside


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
    if (lo is not None) or (hi is not None):
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


@gluon.jit
def following(number, queue, QUEUE: gl.constexpr):
    """The number a program takes after this one."""
    if QUEUE:
        return gl.num_programs(0) + gl.atomic_add(queue, 1)
    else:
        return number + gl.num_programs(0)


@gluon.jit
def leave(queue, QUEUE: gl.constexpr):
    """Ends a program's part in the queue; the last leaves it as it was."""
    if QUEUE:
        if gl.atomic_add(queue + 1, 1) == gl.num_programs(0) - 1:
            gl.store(queue, 0)
            gl.store(queue + 1, 0)
