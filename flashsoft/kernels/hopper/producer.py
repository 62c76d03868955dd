"""The producer: one warp that takes numbers of tiles and has the copy engine fill the rings ahead of the consumers.

Per tile of queries: its number and its queries, then keys and values in the order that consumers need them, keys of
visit i + 1 before values of visit i. The number goes with the queries, in a word that their barrier guards.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .rings import fill, load_tile, wait_empty
from .scheduler import following, keys_of, leave, queries_of, visits_of


@gluon.jit
def _announce(numbers, slot, number):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers.index(slot).store(gl.full([1], number, gl.int32, layout))


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, queries, keys, values, numbers, queue, Sq, Sk, Hq, group, lo, hi, tiles, total, section,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, QUEUE: gl.constexpr,
):  # fmt: skip
    """Feeds the consumers until no tile is left, then hands them the number `total`."""
    BLOCK_M: gl.constexpr = CONSUMERS * 64
    SLOTS: gl.constexpr = queries.full.shape[0]
    BYTES: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    number = gl.program_id(0)
    n = 0  # uses of the rings of keys and values
    turn = 0  # tiles so far
    while number < total:
        tile, head = queries_of(number, tiles, total // tiles, section)
        row0 = tile * BLOCK_M
        b = head // Hq
        h = head % Hq
        h_kv = h // group
        visits = visits_of(row0, Sq, Sk, lo, hi, BLOCK_M, BLOCK_N)
        wait_empty(queries, turn)
        slot = turn % SLOTS
        _announce(numbers, slot, number)
        full = queries.full.index(slot)
        mbarrier.expect(full, BLOCK_M * D * BYTES)
        for c in gl.static_range(CONSUMERS):
            load_tile(q_desc, [b, h, row0 + c * 64, 0], full, queries.tiles.index(slot * CONSUMERS + c))
        before = keys_of(visits, 0, lo, BLOCK_N)
        fill(keys, n, k_desc, b, h_kv, before, BLOCK_N * D * BYTES)
        number = following(number, queue, QUEUE)
        for i in range(1, visits.count):
            first = keys_of(visits, i, lo, BLOCK_N)
            fill(keys, n + 1, k_desc, b, h_kv, first, BLOCK_N * D * BYTES)
            fill(values, n, v_desc, b, h_kv, before, BLOCK_N * DV * BYTES)
            before = first
            n += 1
        fill(values, n, v_desc, b, h_kv, before, BLOCK_N * DV * BYTES)
        n += 1
        turn += 1
    wait_empty(queries, turn)
    _announce(numbers, turn % SLOTS, total)
    mbarrier.arrive(queries.full.index(turn % SLOTS), count=1)
    leave(queue, QUEUE)
