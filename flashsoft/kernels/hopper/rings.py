"""Rings of tiles in shared memory, and whose turn it is on the tensor cores.

A ring has so many slots; use n of it takes slot n % slots. The producer waits until a slot is `empty`, then has it
filled; consumers wait until it is `full`, and each says when it is done. Both barriers of a slot change their phase
with every use, so use n waits for phase n // slots, and the first uses find every slot empty: theirs is the phase
before.

Turns: two or three warpgroups of consumers take turns in issuing their products, so that while one computes weights the
others keep the tensor cores busy. Warpgroup c waits for named barrier TURNS + c, which the one before it arrives at.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

TURNS = gl.constexpr(8)  # the first named barrier that is no business of the compiler's
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


class Ring(NamedTuple):
    """Slots (slots, ...) of shared memory, and barriers (slots, 1).

    more: the columns of tiles beyond a power of two, which shared memory is given out by; None if there are none.
    """

    tiles: Any
    more: Any
    full: Any
    empty: Any


@gluon.jit
def barriers(SLOTS: gl.constexpr, COUNT: gl.constexpr):
    """Barriers that wait for COUNT arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(made.index(i), count=COUNT)
    return made


@gluon.jit
def wait_full(ring, n):
    """Waits until use n has been filled."""
    SLOTS: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.full.index(n % SLOTS), (n // SLOTS) & 1)


@gluon.jit
def wait_empty(ring, n):
    """Waits until all consumers are done with the use of the slot before use n."""
    SLOTS: gl.constexpr = ring.empty.shape[0]
    mbarrier.wait(ring.empty.index(n % SLOTS), ((n // SLOTS) & 1) ^ 1)


@gluon.jit
def release(ring, n):
    """Says that one consumer is done with use n."""
    SLOTS: gl.constexpr = ring.empty.shape[0]
    mbarrier.arrive(ring.empty.index(n % SLOTS), count=1)


@gluon.jit
def tile_of(tiles, i):
    """Tile i, (rows, columns)."""
    return tiles.index(i).reshape([tiles.shape[3], tiles.shape[4]])


@gluon.jit
def tile_in_use(ring, n):
    """The tile (rows, columns) of use n."""
    return tile_of(ring.tiles, n % ring.full.shape[0])


@gluon.jit
def load_rows(ring, i, full, desc, more_desc, b, h, row):
    """Has the copy engine bring what of head h of batch entry b lies from `row` on into tile i of a ring."""
    load_tile(desc, [b, h, row, 0], full, ring.tiles.index(i))
    if ring.more is not None:
        load_tile(more_desc, [b, h, row, ring.tiles.shape[4]], full, ring.more.index(i))


@gluon.jit
def fill(ring, n, desc, more_desc, b, h, row, BYTES: gl.constexpr):
    """Has use n filled with what of head h of batch entry b lies from `row` on, zeros beyond its end."""
    SLOTS: gl.constexpr = ring.full.shape[0]
    wait_empty(ring, n)
    full = ring.full.index(n % SLOTS)
    mbarrier.expect(full, BYTES)
    load_rows(ring, n % SLOTS, full, desc, more_desc, b, h, row)


@gluon.constexpr_function
def _barrier_code(action, which, threads):
    return f"bar.{action} {which}, {threads}; mov.b32 $0, $1;"


@gluon.jit
def _barrier(ACTION: gl.constexpr, WHICH: gl.constexpr, THREADS: gl.constexpr):
    """A named barrier, executed by all threads of a warpgroup."""
    CODE: gl.constexpr = _barrier_code(ACTION, WHICH, THREADS)
    threads = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(CODE, "=r,r", [threads], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(CONSUMER: gl.constexpr):
    """Waits for this consumer's turn."""
    _barrier("sync", TURNS + CONSUMER, 256)


@gluon.jit
def pass_turn(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Gives the turn to the next consumer."""
    _barrier("arrive", TURNS + (CONSUMER + 1) % CONSUMERS, 256)


@gluon.jit
def wait_written():
    """Waits until all tiles that this warpgroup has sent off are in memory, not only read from shared memory."""
    threads = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    code: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(code, "=r,r", [threads], dtype=gl.int32, is_pure=False, pack=1)
