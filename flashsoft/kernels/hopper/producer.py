"""The producer: one warp that takes numbers of tiles and has the copy engine fill the rings ahead of the consumers.

Per tile of queries: what it is and its queries, then keys and values in the order that consumers need them, keys of
visit i + 1 before values of visit i. What it is goes with the queries, in words that their barrier guards. The number
of the next is taken, and divided up, while the last keys are on their way, when nobody waits for this warp.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .rings import fill, load_rows, wait_empty
from .scheduler import following, keys_of, leave, next_tile, place_of, sequence_at, visits_of

WORDS = gl.constexpr(4)  # of an announcement: 2 * tile, and 1 if it is taken again; or -1 at the end; b; h; sequence


@gluon.jit
def _announce(words, slot, WHICH: gl.constexpr, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    words.index(slot * WORDS + WHICH).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def announced(words, slot, WHICH: gl.constexpr):
    """A word of an announcement, for a consumer."""
    return gl.max(words.index(slot * WORDS + WHICH).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def again_of(queue, SLOTS: gl.constexpr):
    """Where this program's words for tiles that are to be taken again lie: each tile * heads + head + 1, or 0."""
    return queue + 2 + gl.program_id(0) * SLOTS


@gluon.jit
def produce(
    given,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, QUEUE: gl.constexpr,
    PINNED: gl.constexpr, LOWER_RIGHT: gl.constexpr,
):  # fmt: skip
    """Feeds the consumers until no tile is left, and says so."""
    (q_desc, k_desc, v_desc, q_more, k_more, cu_q, cu_k, queries, keys, values, words, queue, Sq, Sk, Hq, group, lo,
     hi, sequences, tiles, heads, section) = given  # fmt: skip
    BLOCK_M: gl.constexpr = CONSUMERS * 64
    SLOTS: gl.constexpr = queries.full.shape[0]
    BYTES: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    if PINNED:
        LAST: gl.constexpr = SLOTS
    else:
        LAST: gl.constexpr = 0
    total = tiles * heads
    number, tile, head, sequence = next_tile(
        gl.program_id(0), tiles, heads, section, cu_q, sequences, Sq, queue, BLOCK_M, QUEUE
    )
    b = head // Hq
    h = head % Hq
    n = 0  # uses of the rings of keys and values
    turn = 0  # tiles so far
    idle = 0  # slots whose last tile has ended well since no number was left
    while (number < total) | (idle < LAST):
        wait_empty(queries, turn + idle)
        there = number < total
        again = 0
        own_tile, own_b, own_h, own_sequence = tile, b, h, sequence
        if PINNED:
            word = again_of(queue, SLOTS) + (turn + idle) % SLOTS
            refused = gl.load(word, volatile=True).to(gl.int32)
            if refused > 0:
                gl.store(word, tl.cast(0, tl.int64))
                there = refused > 0
                again = 1
                own_tile = (refused - 1) // heads
                own_b = (refused - 1) % heads // Hq
                own_h = (refused - 1) % heads % Hq
                if cu_q is not None:
                    own_sequence = sequence_at(own_tile, cu_q, sequences, BLOCK_M)
        if there:
            row0, place = place_of(own_tile, own_sequence, cu_q, cu_k, Sq, Sk, lo, hi, sequences, BLOCK_M, LOWER_RIGHT)
            least = None if lo is None else lo + place.moved
            most = None if hi is None else hi + place.moved
            visits = visits_of(row0, place.Sq, place.Sk, least, most, BLOCK_M, BLOCK_N)
            slot = turn % SLOTS
            _announce(words, slot, 0, own_tile * 2 + again)
            _announce(words, slot, 1, own_b)
            _announce(words, slot, 2, own_h)
            if cu_q is not None:
                _announce(words, slot, 3, own_sequence)
            full = queries.full.index(slot)
            mbarrier.expect(full, BLOCK_M * D * BYTES)
            for c in gl.static_range(CONSUMERS):
                load_rows(queries, slot * CONSUMERS + c, full, q_desc, q_more, own_b, own_h, place.q0 + row0 + c * 64)
            h_kv = own_h // group
            before = place.k0 + keys_of(visits, 0, least, BLOCK_N)
            fill(keys, n, k_desc, k_more, own_b, h_kv, before, BLOCK_N * D * BYTES)
            for i in range(1, visits.count):
                first = place.k0 + keys_of(visits, i, least, BLOCK_N)
                fill(keys, n + 1, k_desc, k_more, own_b, h_kv, first, BLOCK_N * D * BYTES)
                fill(values, n, v_desc, None, own_b, h_kv, before, BLOCK_N * DV * BYTES)
                before = first
                n += 1
            if again == 0:
                number, tile, head, sequence = next_tile(
                    following(number, queue, QUEUE), tiles, heads, section, cu_q, sequences, Sq, queue, BLOCK_M, QUEUE
                )
                b = head // Hq
                h = head % Hq
            fill(values, n, v_desc, None, own_b, h_kv, before, BLOCK_N * DV * BYTES)
            n += 1
            turn += 1
        else:
            idle += 1
    wait_empty(queries, turn)
    _announce(words, turn % SLOTS, 0, -1)
    mbarrier.arrive(queries.full.index(turn % SLOTS), count=1)
    leave(queue, QUEUE)
