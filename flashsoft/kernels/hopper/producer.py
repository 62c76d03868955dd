"""The producer: one warp that takes numbers of tiles and has the copy engine fill the rings ahead of the consumers.

Per tile of queries: its number and its queries, then keys and values in the order that consumers need them, keys of
visit i + 1 before values of visit i. The number goes with the queries, in a word that their barrier guards.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .rings import fill, load_rows, wait_empty
from .scheduler import following, keys_of, leave, place_of, queries_of, settle, visits_of


@gluon.jit
def _announce(numbers, slot, number):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers.index(slot).store(gl.full([1], number, gl.int32, layout))


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, q_more, k_more, cu_q, cu_k, queries, keys, values, numbers, queue, Sq, Sk, Hq, group,
    lo, hi, sequences, tiles, total, section,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, QUEUE: gl.constexpr,
    LOWER_RIGHT: gl.constexpr,
):  # fmt: skip
    """Feeds the consumers until no tile is left, then hands them the number `total`."""
    BLOCK_M: gl.constexpr = CONSUMERS * 64
    SLOTS: gl.constexpr = queries.full.shape[0]
    BYTES: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    number = gl.program_id(0)
    n = 0  # uses of the rings of keys and values
    turn = 0  # tiles so far
    sequence = 0
    if cu_q is not None:
        number, sequence = settle(number, tiles, total, section, cu_q, sequences, Sq, queue, BLOCK_M, QUEUE)
    while number < total:
        tile, head = queries_of(number, tiles, total // tiles, section)
        b = head // Hq
        h = head % Hq
        h_kv = h // group
        row0, place = place_of(tile, sequence, cu_q, cu_k, Sq, Sk, lo, hi, sequences, BLOCK_M, LOWER_RIGHT)
        least = None if lo is None else lo + place.moved
        most = None if hi is None else hi + place.moved
        visits = visits_of(row0, place.Sq, place.Sk, least, most, BLOCK_M, BLOCK_N)
        wait_empty(queries, turn)
        slot = turn % SLOTS
        _announce(numbers, slot, number)
        if cu_q is not None:
            _announce(numbers, SLOTS + slot, sequence)
        full = queries.full.index(slot)
        mbarrier.expect(full, BLOCK_M * D * BYTES)
        for c in gl.static_range(CONSUMERS):
            load_rows(queries, slot * CONSUMERS + c, full, q_desc, q_more, b, h, place.q0 + row0 + c * 64)
        before = place.k0 + keys_of(visits, 0, least, BLOCK_N)
        fill(keys, n, k_desc, k_more, b, h_kv, before, BLOCK_N * D * BYTES)
        number = following(number, queue, QUEUE)
        for i in range(1, visits.count):
            first = place.k0 + keys_of(visits, i, least, BLOCK_N)
            fill(keys, n + 1, k_desc, k_more, b, h_kv, first, BLOCK_N * D * BYTES)
            fill(values, n, v_desc, None, b, h_kv, before, BLOCK_N * DV * BYTES)
            before = first
            n += 1
        fill(values, n, v_desc, None, b, h_kv, before, BLOCK_N * DV * BYTES)
        n += 1
        turn += 1
        if cu_q is not None:
            number, sequence = settle(number, tiles, total, section, cu_q, sequences, Sq, queue, BLOCK_M, QUEUE)
    wait_empty(queries, turn)
    _announce(numbers, turn % SLOTS, total)
    mbarrier.arrive(queries.full.index(turn % SLOTS), count=1)
    leave(queue, QUEUE)
