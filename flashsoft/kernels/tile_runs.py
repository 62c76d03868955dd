"""Which tiles segments and boolean tensors leave empty, full or partial, before attention walks over them.

For each tile of one axis (of queries, or of keys) one program goes along the other and writes four positions:

    start   the first tile with anything to see        inside  the first tile that is seen whole
    edge    the first after it that is not             end     past the last with anything to see

so that tiles outside [start, end) are skipped, those of [inside, edge) are computed without a mask, and the others with
it. Segments are judged by the least and the largest id of a tile: for documents one after another that is exact, in any
other order it only masks more than needed. 16 bytes a tile are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, Tensors, launch
from .mask_bits import WORD

MOST: tl.constexpr = tl.constexpr(9223372036854775807)


@triton.jit
def _id_range(ids, stride, at, size):
    """The least and the largest of ids at positions below size."""
    there = at < size
    pointers = ids + at.to(tl.int64) * stride
    least = tl.min(tl.load(pointers, mask=there, other=0).to(tl.int64) + tl.where(there, 0, MOST), 0)
    return least, tl.max(tl.where(there, tl.load(pointers, mask=there, other=0).to(tl.int64), -MOST), 0)


@triton.jit(do_not_specialize=["own_size", "size", "tiles", "heads"])
def tile_runs_kernel(
    words, own_ids, other_ids, table, words_strides, own_strides, other_strides, own_size, size, tiles, heads,
    OWN: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, TAIL_IS_EDGE: tl.constexpr,
):  # fmt: skip
    """The runs of one tile of OWN positions over tiles of STEP, of which `words` have ROWS rows and WORDS words."""
    pid = tl.program_id(0)
    tile = pid % tiles
    h = (pid // tiles % heads).to(tl.int64)
    b = (pid // tiles // heads).to(tl.int64)
    if own_ids is not None:
        at = tile * OWN + tl.arange(0, OWN)
        own_least, own_most = _id_range(own_ids + b * own_strides[0], own_strides[1], at, own_size)
    start = size
    inside = size
    edge = size
    end = 0
    for position in range(0, size, STEP):
        seen = position >= 0
        full = position >= 0
        if TAIL_IS_EDGE:
            full = position + STEP <= size
        if own_ids is not None:
            along = position + tl.arange(0, STEP)
            least, most = _id_range(other_ids + b * other_strides[0], other_strides[1], along, size)
            seen = (own_least <= most) & (least <= own_most)
            full = full & (own_least == most) & (least == own_most)
        if words is not None:
            rows = tile * OWN + tl.arange(0, ROWS)[:, None]
            numbers = position // WORD + tl.arange(0, WORDS)[None, :]
            there = (rows < own_size) & (numbers * WORD < size)
            pointers = words + b * words_strides[0] + h * words_strides[1]
            pointers += numbers.to(tl.int64) * words_strides[2] + rows.to(tl.int64) * words_strides[3]
            word = tl.load(pointers, mask=there, other=0)
            if STEP < WORD:  # its part of the word
                word = (word >> (tl.cast(position, tl.int32) % WORD)) & ((1 << STEP) - 1)
                whole: tl.constexpr = (1 << STEP) - 1
            else:
                whole: tl.constexpr = -1
            seen = seen & (tl.max(tl.max((word != 0).to(tl.int32), 1), 0) != 0)
            full = full & (tl.min(tl.min(tl.where(there, word == whole, True).to(tl.int32), 1), 0) != 0)
        start = tl.where(seen, tl.minimum(start, position), start)
        end = tl.where(seen, position + STEP, end)
        edge = tl.where((inside < size) & (edge == size) & (full == 0), position, edge)
        inside = tl.where((inside == size) & full, position, inside)
    end = tl.minimum(end, size)
    # without a whole tile, or past one that reaches the end
    found = inside < size
    inside = tl.where(found, inside, end)
    edge = tl.where(found, tl.where(edge == size, tl.cdiv(size, STEP) * STEP, edge), end)
    out = table + pid.to(tl.int64) * 4
    tl.store(out, start)
    tl.store(out + 1, tl.cdiv(inside, STEP) * STEP)
    tl.store(out + 2, tl.cdiv(edge, STEP) * STEP)
    tl.store(out + 3, end)


def _plan(inputs: Tensors, outputs: Tensors, sizes: tuple[int, ...], own: int, step: int, by_keys: bool) -> Launch:
    words, own_ids, other_ids = inputs
    batch, heads, own_size, size = sizes
    tiles = triton.cdiv(own_size, own)
    strides = (None if x is None else broadcast_strides(x) for x in (words, own_ids, other_ids))
    rows = own if words is not None and words.shape[3] > 1 else 1
    options = dict(OWN=own, STEP=step, ROWS=rows, WORDS=max(1, step // 32), TAIL_IS_EDGE=not by_keys, num_warps=4)
    return Launch(tile_runs_kernel, batch * heads * tiles, (*strides, own_size, size, tiles, heads), options)


def broadcast_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of a tensor whose dimensions of size 1 stand for all."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))


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
    own_size, size = (Sk, Sq) if by_keys else (Sq, Sk)
    given = [x for x in (words, own_ids, other_ids) if x is not None]
    batch = max(x.shape[0] for x in given)
    heads = 1 if words is None else words.shape[1]
    table = given[0].new_empty(batch, heads, triton.cdiv(own_size, own), 4, dtype=torch.int32)
    launch(_plan, (words, own_ids, other_ids), (table,), (batch, heads, own_size, size), own, step, by_keys)
    return table
