"""A consumer: one warpgroup that owns 64 queries of each tile, their state (m, s) and the sum over values.

One step takes one tile of keys. The products of its scores are issued first, then those of the tile before with its
values, and while the latter run the weights of the new tile are computed:

    tensor cores   x[i+1] = q k[i+1]^T   acc += p[i] v[i]    (other consumers' products)    x[i+2] ...
    this warpgroup                       p[i+1] from x[i+1]

Per step and warpgroup, 64 x BLOCK_N scores: 2 * 64 * BLOCK_N * (D + DV) flops, that is BLOCK_N * (D + DV) / 32 cycles
of the tensor cores; 64 * BLOCK_N exponentials, 16 a cycle; per score one FFMA, MUFU and FADD and half an F2FP.

A maximum for every tile would be one FMNMX a score more, and DV / BLOCK_N FMULs for what was summed before. But m need
not be the maximum: whatever it is, out is the same, as long as no weight and no sum leaves its range. So with PINNED,
for weights in bfloat16, m is the maximum of the first tiles of keys only, those that are masked and as many more as it
takes for every query to have met a key. It lies below no score that it was taken from; if others rise above it so far
that a row's weights add up to more than MOST, or to infinity or NaN, the tile is taken again, `careful` to the end.
The producer finds its number in a word of global memory, once this tile's queries are released, and hands it out anew.

Invariant: as in `kernels/forward.py`, with the last tile's weights p still to be multiplied; `s` leaves out what `sums`
has, four numbers a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..softcap import softcap
from ..softmax import LN2, LOG2E, finish, rise, start_from, weights_at
from .producer import again_of, announced
from .rings import pass_turn, release, store_tile, take_turn, tile_in_use, tile_of, wait_full, wait_written
from .scheduler import keys_of, place_of, unseen, unsettled, visits_of

ROWS = gl.constexpr(64)  # of a warpgroup: the height of its matrix instructions
MOST = gl.constexpr(2.0**64)  # that a row's weights may sum up to, for an m that lies below its scores


@gluon.constexpr_function
def product_layout(columns):
    """Of a product (ROWS, columns) in a warpgroup's registers."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@triton.jit
def seen(x, row0, column0, rows, columns, Sk, lo, hi):
    """The scores x of queries row0 + rows with keys column0 + columns, -inf where the band or the end hides them."""
    columns += column0
    last = Sk - 1
    if hi is not None:
        last = tl.minimum(last, rows + (row0 + hi))
    keep = columns <= last
    if lo is not None:
        keep = keep & (columns >= rows + (row0 + lo))
    return tl.where(keep, x, float("-inf"))


@gluon.jit
def lane_sums(p):
    """What each lane holds of the sums of rows, (rows, 4): to add these up is for once, at the end of the row."""
    by_lane = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(by_lane, 3), 1)


@gluon.jit
def _scaled(s, sums, alpha):
    return s * alpha, sums * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None]


@gluon.jit
def _masked(x, row0, column0, Sk, lo, hi, BLOCK_N: gl.constexpr):
    layout: gl.constexpr = product_layout(BLOCK_N)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))[None, :]
    # a number the compiler cannot see through, or it would keep positions of all columns in registers for good
    column0 = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [column0], dtype=gl.int32, is_pure=False, pack=1)
    return seen(x, row0, column0, rows, columns, Sk, lo, hi)


@gluon.jit
def _products(q, q_more, keys, n, BLOCK_N: gl.constexpr):
    """Issues the products of queries with use n of the keys."""
    nothing = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, product_layout(BLOCK_N))
    x = warpgroup_mma(q, tile_in_use(keys, n).permute((1, 0)), nothing, use_acc=False, is_async=True)
    if keys.more is not None:
        x = warpgroup_mma(q_more, tile_of(keys.more, n % keys.full.shape[0]).permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def _capped(x, scale, cap):
    """Scores of products, in units of 1 / scale without a softcap, else in their own; see `unit`."""
    if cap is not None:
        x = softcap(x * scale, cap)
    return x


@gluon.jit
def _operand(p, dtype: gl.constexpr, DV: gl.constexpr):
    """Weights as the left operand of a product: the same registers, in pairs."""
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product_layout(DV), k_width=2)
    return gl.convert_layout(p.to(dtype), layout)


@gluon.constexpr_function
def _rows_layout(columns):
    """Of a tile whose rows are read and written 16 bytes a thread."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _clear(tile, rows, BLOCK_N: gl.constexpr, DV: gl.constexpr):
    """Leaves `rows` of a tile of values and makes the others zeros: they are others', and 0 * NaN is NaN.

    All consumers do so, since none waits for another; what one reads meanwhile it is given again.
    """
    layout: gl.constexpr = _rows_layout(DV)
    values = tile.load(layout)
    there = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))[:, None] < rows
    tile.store(gl.where(there, values, 0.0))
    fence_async_shared()


@gluon.jit
def _store_some(out, out_strides, tile, h, first, rows, column0, Dv, COLUMNS: gl.constexpr):
    """Writes `rows` of a tile to those of head h from `first` on, in columns from column0 on."""
    layout: gl.constexpr = _rows_layout(COLUMNS)
    values = tile.load(layout)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    c = column0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    pointers = out + tl.cast(h, tl.int64) * out_strides[1] + tl.cast(first + r, tl.int64) * out_strides[2] + c
    gl.store(pointers, values, mask=(r < rows) & (c < Dv))


@gluon.jit
def _parts(x, PARTS: gl.constexpr):
    """The columns of a tile in so many parts, 1, 2 or 4."""
    if PARTS == 1:
        return (x,)
    else:
        left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
        return _parts(left, PARTS // 2) + _parts(right, PARTS // 2)


@gluon.jit
def _step(
    m, s, sums, acc, p, q, q_more, keys, values, n, row0, visits, careful, i, scale, unit, cap, Sk, lo, hi,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, DV: gl.constexpr,
    PINNED: gl.constexpr,
):  # fmt: skip
    """Takes visit i, use n + 1 of the keys, into the state, and the weights p of use n with its values into acc.

    Visits below `careful` are masked, and with PINNED only they move m.
    """
    BANDED: gl.constexpr = (lo is not None) or (hi is not None)
    wait_full(keys, n + 1)
    take_turn(CONSUMER)
    x_coming = _products(q, q_more, keys, n + 1, BLOCK_N)
    wait_full(values, n)
    acc_coming = warpgroup_mma(p, tile_in_use(values, n), acc, is_async=True)
    pass_turn(CONSUMER, CONSUMERS)
    x = warpgroup_mma_wait(1, deps=[x_coming])
    release(keys, n + 1)
    x = _capped(x, scale, cap)
    alpha = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, product_layout(BLOCK_N)))
    if BANDED or PINNED:
        if i < careful:
            x = warpgroup_mma_wait(0, deps=[x])  # the mask takes the registers that p has until then
            if BANDED:
                x = _masked(x, row0, keys_of(visits, i, lo, BLOCK_N), Sk, lo, hi, BLOCK_N)
            if PINNED:
                m, alpha = rise(m, x, unit)
                s, sums = _scaled(s, sums, alpha)
    if not PINNED:
        m, alpha = rise(m, x, unit)
        s, sums = _scaled(s, sums, alpha)
    weights = weights_at(m, x, unit)
    sums += lane_sums(weights)
    # full already; but it ends a basic block, or ptxas 12.8 moves the wait below above the exponentials
    wait_full(values, n)
    acc, weights = warpgroup_mma_wait(0, deps=[acc_coming, weights])
    release(values, n)
    if not PINNED:
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, product_layout(DV)))[:, None]
    elif i < careful:
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, product_layout(DV)))[:, None]
    return m, s, sums, acc, _operand(weights, p.dtype, DV)


@gluon.jit
def consume(
    given,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, DV: gl.constexpr,
    OUT_SLOTS: gl.constexpr, MASKED: gl.constexpr, PINNED: gl.constexpr,
    LOWER_RIGHT: gl.constexpr,
):  # fmt: skip
    """out and lse of rows 64 * CONSUMER to 64 * CONSUMER + 63 of every tile that the producer announces."""
    (out_desc, lse, out, sink, cu_q, cu_k, queries, keys, values, outs, words, queue, out_strides, Dv, Sq, Sk, Hq,
     scale, cap, lo, hi, sequences, heads) = given  # fmt: skip
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    SLOTS: gl.constexpr = queries.full.shape[0]
    COLUMNS: gl.constexpr = outs.shape[4]  # of a part of out
    dtype: gl.constexpr = out_desc.dtype
    x_layout: gl.constexpr = product_layout(BLOCK_N)
    acc_layout: gl.constexpr = product_layout(DV)
    row_layout: gl.constexpr = gl.SliceLayout(1, x_layout)
    unit = scale if cap is None else 1.0
    if CONSUMER == CONSUMERS - 1:
        pass_turn(CONSUMER, CONSUMERS)
    n = 0
    turn = 0
    wait_full(queries, 0)
    what = announced(words, 0, 0)
    while what >= 0:
        tile = what >> 1
        again = (what & 1) != 0
        b = announced(words, turn % SLOTS, 1)
        h = announced(words, turn % SLOTS, 2)
        head = b * Hq + h
        sequence = 0
        if cu_q is not None:
            sequence = announced(words, turn % SLOTS, 3)
        tile0, place = place_of(tile, sequence, cu_q, cu_k, Sq, Sk, lo, hi, sequences, BLOCK_M, LOWER_RIGHT)
        row0 = tile0 + CONSUMER * ROWS
        least = None if lo is None else lo + place.moved
        most = None if hi is None else hi + place.moved
        visits = visits_of(tile0, place.Sq, place.Sk, least, most, BLOCK_M, BLOCK_N)
        careful = visits.edges
        if PINNED:
            last = tl.minimum(tile0 + BLOCK_M, place.Sq) - 1
            careful = gl.where(again, visits.count, unsettled(visits, tile0, last, least, most, BLOCK_N))
        own = (turn % SLOTS) * CONSUMERS + CONSUMER
        q = tile_of(queries.tiles, own)
        q_more = None
        if queries.more is not None:
            q_more = tile_of(queries.more, own)
        m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        s = gl.full([ROWS], 0.0, gl.float32, row_layout)
        if sink is not None:
            score = gl.load(sink + h).to(gl.float32) * LOG2E
            m, s = start_from(gl.full([ROWS], 0.0, gl.float32, row_layout) + score, LN2)
        skipped = 0
        # tiles that only later consumers' queries see: with two consumers there are few, and numbers would spill
        if (hi is not None) and (CONSUMERS > 2):
            skipped = unseen(visits, row0 + ROWS - 1, most, BLOCK_N)
            for _ in range(skipped):
                wait_full(keys, n)
                take_turn(CONSUMER)
                pass_turn(CONSUMER, CONSUMERS)
                release(keys, n)
                wait_full(values, n)
                release(values, n)
                n += 1
        first = keys_of(visits, skipped, least, BLOCK_N)
        wait_full(keys, n)
        take_turn(CONSUMER)
        x = _products(q, q_more, keys, n, BLOCK_N)
        pass_turn(CONSUMER, CONSUMERS)
        x = warpgroup_mma_wait(0, deps=[x])
        release(keys, n)
        x = _capped(x, scale, cap)
        if MASKED:
            x = _masked(x, row0, first, place.Sk, least, most, BLOCK_N)
        m, alpha = rise(m, x, unit)
        s = s * alpha
        weights = weights_at(m, x, unit)
        sums = lane_sums(weights)
        p = _operand(weights, dtype, DV)
        if cu_q is not None:
            rest = place.Sk - first
            if rest < BLOCK_N:
                wait_full(values, n)
                _clear(tile_in_use(values, n), rest, BLOCK_N, DV)
        acc = gl.full([ROWS, DV], 0.0, gl.float32, acc_layout)
        for i in range(skipped + 1, visits.count):
            m, s, sums, acc, p = _step(
                m, s, sums, acc, p, q, q_more, keys, values, n, row0, visits, careful, i, scale, unit, cap, place.Sk,
                least, most, CONSUMER, CONSUMERS, BLOCK_N, DV, PINNED,
            )  # fmt: skip
            n += 1
        s += gl.convert_layout(gl.sum(sums, 1), row_layout)
        rows = row0 + gl.arange(0, ROWS, layout=row_layout)
        if PINNED:
            fits = (s <= MOST) | (rows >= place.Sq) | again
            slots = gl.full([ROWS], turn % SLOTS, gl.int32, row_layout)
            refused = gl.full([ROWS], tile * heads + head + 1, gl.int64, row_layout)
            gl.store(again_of(queue, SLOTS) + slots, refused, mask=fits == 0)
        release(queries, turn)
        wait_full(values, n)
        acc = warpgroup_mma(p, tile_in_use(values, n), acc, is_async=True)
        inverse, row_lse = finish(m, s, LN2)
        if (cu_q is not None) and (sink is not None):  # what lies behind the last sequence has no sink either
            row_lse = gl.where(sequence < sequences, row_lse, float("-inf"))
        gl.store(lse + tl.cast(head, tl.int64) * Sq + place.q0 + rows, row_lse, mask=rows < place.Sq)
        if PINNED:
            if again:
                wait_written()
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(values, n)
        n += 1
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, acc_layout))[:, None]
        parts = _parts(acc.to(dtype), DV // COLUMNS)
        for c in gl.static_range(DV // COLUMNS):
            # what lay in this slot before has left it; of packed sequences not every part is sent off, to be counted
            tma.store_wait(OUT_SLOTS - 1 if cu_q is None else 0)
            part = outs.index(CONSUMER * OUT_SLOTS + c % OUT_SLOTS)
            part.reshape([ROWS, COLUMNS]).store(parts[c])
            fence_async_shared()
            if cu_q is None:
                store_tile(out_desc, [b, h, row0, c * COLUMNS], part)
            elif row0 + ROWS <= place.Sq:
                store_tile(out_desc, [0, head, place.q0 + row0, c * COLUMNS], part)
            else:  # the rows behind the last are another sequence's
                some = part.reshape([ROWS, COLUMNS])
                first_row = place.q0 + row0
                _store_some(out, out_strides, some, head, first_row, place.Sq - row0, c * COLUMNS, Dv, COLUMNS)
        turn += 1
        wait_full(queries, turn)
        what = announced(words, turn % SLOTS, 0)
    tma.store_wait(0)
    if CONSUMER == 0:
        take_turn(CONSUMER)
