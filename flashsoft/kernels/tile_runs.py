"""Which tiles segments and boolean tensors leave empty, full or partial, before attention walks over them.

For each tile of one axis (of queries, or of keys) one program looks at all tiles along the other and writes four
positions:

    start   the first tile with anything to see        inside  the first tile that is seen whole
    edge    the first after it that is not             end     past the last with anything to see

so that tiles outside [start, end) are skipped, those of [inside, edge) are computed without a mask, and the others with
it. Segments are judged by the least and the largest id of a tile, found beforehand: for documents one after another
that is exact, in any other order it only masks more than needed. 16 bytes a tile are written, and 16 for its ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, Tensors, launch
from .mask_bits import WORD, broadcast_strides

MOST: tl.constexpr = tl.constexpr(9223372036854775807)
FAR: tl.constexpr = tl.constexpr(2147483647)  # past every position
AT_ONCE = 8192  # words of a mask


@triton.jit(do_not_specialize=["size", "tiles", "parts"])
def id_ranges_kernel(ids, ranges, ids_strides, size, tiles, parts, TILE: tl.constexpr, TILES: tl.constexpr):
    """The least and the largest id of TILES tiles of TILE positions."""
    pid = tl.program_id(0)
    b = (pid // parts).to(tl.int64)
    tile = pid % parts * TILES + tl.arange(0, TILES)
    at = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    there = at < size
    value = tl.load(ids + b * ids_strides[0] + at.to(tl.int64) * ids_strides[1], mask=there, other=0).to(tl.int64)
    out = ranges + (b * tiles + tile) * 2
    tl.store(out, tl.min(tl.where(there, value, MOST), 1), mask=tile < tiles)
    tl.store(out + 1, tl.max(tl.where(there, value, -MOST), 1), mask=tile < tiles)


@triton.jit(do_not_specialize=["own_size", "size", "own_tiles", "tiles", "heads"])
def tile_runs_kernel(
    words, own_ranges, ranges, table, words_strides, own_strides, strides, own_size, size, own_tiles, tiles, heads,
    OWN: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, TILES: tl.constexpr,
    TAIL_IS_EDGE: tl.constexpr,
):  # fmt: skip
    """The runs of one tile of OWN positions over tiles of STEP, TILES at a time; `words` have ROWS rows, WORDS a tile.

    OWN and ROWS are the same unless a mask is broadcast along them.
    """
    pid = tl.program_id(0)
    own_tile = pid % own_tiles
    h = (pid // own_tiles % heads).to(tl.int64)
    b = (pid // own_tiles // heads).to(tl.int64)
    if own_ranges is not None:
        own = own_ranges + b * own_strides[0] + own_tile.to(tl.int64) * 2
        own_least = tl.load(own)
        own_most = tl.load(own + 1)
    start = size
    inside = FAR
    edge = FAR
    end = 0
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        position = tile * STEP
        seen = tile < tiles
        full = seen
        if TAIL_IS_EDGE:
            full = position + STEP <= size
        if own_ranges is not None:
            other = ranges + b * strides[0] + tile.to(tl.int64) * 2
            least = tl.load(other, mask=tile < tiles, other=0)
            most = tl.load(other + 1, mask=tile < tiles, other=0)
            seen = seen & (own_least <= most) & (least <= own_most)
            full = full & (own_least == most) & (least == own_most)
        if words is not None:
            row = own_tile * OWN + tl.arange(0, ROWS)[:, None]
            column = tl.arange(0, TILES * WORDS)[None, :]
            number = (first + column // WORDS) * STEP // WORD + column % WORDS
            there = (row < own_size) & (number * WORD < size)
            pointers = words + b * words_strides[0] + h * words_strides[1]
            pointers += number.to(tl.int64) * words_strides[2] + row.to(tl.int64) * words_strides[3]
            word = tl.load(pointers, mask=there, other=0)
            if STEP < WORD:  # its part of the word
                word = (word >> ((first + column) * STEP % WORD)) & ((1 << STEP) - 1)
                whole: tl.constexpr = (1 << STEP) - 1
            else:
                whole: tl.constexpr = -1
            some = tl.max((word != 0).to(tl.int32), 0)
            every = tl.min(((word == whole) | (row >= own_size) | (number * WORD >= size)).to(tl.int32), 0)
            seen = seen & (tl.max(tl.reshape(some, (TILES, WORDS)), 1) != 0)
            full = full & (tl.min(tl.reshape(every, (TILES, WORDS)), 1) != 0)
        start = tl.minimum(start, tl.min(tl.where(seen, position, FAR), 0))
        end = tl.maximum(end, tl.max(tl.where(seen, position + STEP, 0), 0))
        inside = tl.minimum(inside, tl.min(tl.where(full, position, FAR), 0))
        edge = tl.minimum(edge, tl.min(tl.where((position > inside) & (full == 0), position, FAR), 0))
    end = tl.minimum(end, size)
    # without a whole tile there is no run of them; one that nothing ends reaches past the last tile
    inside = tl.where(inside == FAR, tl.cdiv(end, STEP) * STEP, inside)
    edge = tl.where(inside >= end, inside, tl.minimum(edge, tiles * STEP))
    out = table + pid.to(tl.int64) * 4
    tl.store(out, start)
    tl.store(out + 1, inside)
    tl.store(out + 2, edge)
    tl.store(out + 3, end)


def _plan_ranges(inputs: Tensors, outputs: Tensors, tile: int) -> Launch:
    (ids,), (ranges,) = inputs, outputs
    batch, size = ids.shape  # type: ignore[union-attr]
    at_once = max(1, 1024 // tile)
    tiles = ranges.shape[1]  # type: ignore[union-attr]
    parts = triton.cdiv(tiles, at_once)
    args = (ids.stride(), size, tiles, parts)  # type: ignore[union-attr]
    return Launch(id_ranges_kernel, batch * parts, args, dict(TILE=tile, TILES=at_once, num_warps=4))


def _id_ranges(ids: Tensor, tile: int) -> Tensor:
    """(B or 1, tiles, 2) int64: the least and the largest of ids (B or 1, S) in each tile."""
    ranges = ids.new_empty(ids.shape[0], triton.cdiv(ids.shape[1], tile), 2, dtype=torch.int64)
    launch(_plan_ranges, (ids,), (ranges,), tile)
    return ranges


def _plan(inputs: Tensors, outputs: Tensors, sizes: tuple[int, int], own: int, step: int, by_keys: bool) -> Launch:
    words = inputs[0]
    batch, heads, own_tiles, _ = outputs[0].shape  # type: ignore[union-attr]
    own_size, size = sizes
    tiles = triton.cdiv(size, step)
    strides = (None if x is None else broadcast_strides(x) for x in inputs)
    rows = own if words is not None and words.shape[3] > 1 else 1
    per_tile = max(1, step // 32)
    at_once = min(256, triton.next_power_of_2(max(1, tiles)), AT_ONCE // (rows * per_tile))
    options = dict(OWN=own, STEP=step, ROWS=rows, WORDS=per_tile, TILES=at_once, TAIL_IS_EDGE=not by_keys, num_warps=4)
    args = (*strides, own_size, size, own_tiles, tiles, heads)
    return Launch(tile_runs_kernel, batch * heads * own_tiles, args, options)


def tile_runs(
    words: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    Sq: int,
    Sk: int,
    own: int,
    step: int,
    *,
    by_keys: bool,
) -> Tensor:
    """(B or 1, H or 1, tiles, 4) int32 for tiles of `own` queries over tiles of `step` keys, or by_keys the other way.

    words: `mask_bits` along the same axis, or None.
    """
    own_ids, other_ids = (key_ids, query_ids) if by_keys else (query_ids, key_ids)
    sizes = (Sk, Sq) if by_keys else (Sq, Sk)
    own_ranges = None if own_ids is None else _id_ranges(own_ids, own)
    ranges = None if other_ids is None else _id_ranges(other_ids, step)
    given = [x for x in (words, own_ranges, ranges) if x is not None]
    batch = max(x.shape[0] for x in given)
    heads = 1 if words is None else words.shape[1]
    table = given[0].new_empty(batch, heads, triton.cdiv(sizes[0], own), 4, dtype=torch.int32)
    launch(_plan, (words, own_ranges, ranges), (table,), sizes, own, step, by_keys)
    return table
