"""Which keys any query sees: what lies at the others, be it NaN, must reach no result.

A weight of 0 does not keep NaN out: 0 * NaN is NaN. A band leaves no doubt which keys a tile of queries may load; for
segments and boolean tensors a kernel before attention looks, for each tile of keys, at the queries that the band allows
until every key is found, first at those in the keys' own place, which see them under most masks. A bit a key is
written. For queries that see no key there is no need of this: their lse says so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, Tensors, launch
from .mask_bits import WORD, broadcast_strides


@triton.jit(do_not_specialize=["Sq", "Sk", "tiles", "heads", "lo", "hi"])
def live_keys_kernel(
    words, query_ids, key_ids, lengths, live, words_strides, ids_strides, Sq, Sk, tiles, heads, lo, hi,
    TILE: tl.constexpr,
):  # fmt: skip
    """The bits of TILE keys of one head."""
    pid = tl.program_id(0)
    column0 = pid % tiles * TILE
    h = (pid // tiles % heads).to(tl.int64)
    b = (pid // tiles // heads).to(tl.int64)
    j = column0 + tl.arange(0, TILE)
    size = Sk
    if lengths is not None:
        size = tl.minimum(Sk, tl.maximum(tl.load(lengths + b).to(tl.int32), 0))
    used = j < size
    first = 0
    last = Sq
    if hi is not None:
        first = tl.minimum(tl.maximum(column0 - hi, 0), Sq)
    if lo is not None:
        last = tl.maximum(tl.minimum(column0 + TILE - lo, Sq), 0)
    tile0 = first // TILE
    count = tl.cdiv(last, TILE) - tile0
    begin = tl.maximum(column0 // TILE - tile0, 0)
    if key_ids is not None:
        key_id = tl.load(key_ids + b * ids_strides[2] + j.to(tl.int64) * ids_strides[3], mask=used, other=0)
    found = 1 - used.to(tl.int32)
    n = 0
    while (n < count) & (tl.min(found, 0) == 0):
        i = (tile0 + (begin + n) % count) * TILE + tl.arange(0, TILE)
        there = i < Sq
        taken = there[:, None] & used[None, :]
        if lo is not None:
            taken = taken & (j[None, :] - i[:, None] >= lo)
        if hi is not None:
            taken = taken & (j[None, :] - i[:, None] <= hi)
        if query_ids is not None:
            query_id = tl.load(query_ids + b * ids_strides[0] + i.to(tl.int64) * ids_strides[1], mask=there, other=0)
            taken = taken & (query_id[:, None] == key_id[None, :])
        if words is not None:
            pointers = words + b * words_strides[0] + h * words_strides[1]
            pointers += (j // WORD).to(tl.int64)[None, :] * words_strides[2] + i.to(tl.int64)[:, None] * words_strides[
                3
            ]
            word = tl.load(pointers, mask=taken, other=0)
            taken = taken & (((word >> (j % WORD)[None, :]) & 1) != 0)
        found = tl.maximum(found, tl.max(taken.to(tl.int32), 0))
        n += 1
    bits = tl.where(used, found, 0) << (j % WORD)
    numbers = column0 // WORD + tl.arange(0, TILE // WORD)
    out = live + (b * heads + h) * tl.cdiv(Sk, WORD) + numbers
    tl.store(out, tl.sum(tl.reshape(bits, (TILE // WORD, WORD)), 1), mask=numbers * WORD < Sk)


def _plan(inputs: Tensors, outputs: Tensors, Sq: int, Sk: int, heads: int, lo: int | None, hi: int | None) -> Launch:
    words, query_ids, key_ids, _ = inputs
    batch = outputs[0].shape[0]  # type: ignore[union-attr]
    tile = 64
    tiles = triton.cdiv(Sk, tile)
    ids = None
    if query_ids is not None and key_ids is not None:
        ids = (*broadcast_strides(query_ids), *broadcast_strides(key_ids))
    args = (None if words is None else broadcast_strides(words), ids, Sq, Sk, tiles, heads, lo, hi)
    return Launch(live_keys_kernel, batch * heads * tiles, args, dict(TILE=tile, num_warps=8))


def live_keys(
    words: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    lengths: Tensor | None,
    Sq: int,
    Sk: int,
    lo: int | None,
    hi: int | None,
) -> Tensor:
    """int32 (B or 1, H or 1, ceil(Sk / 32)), for `mask_bits`' words, ids or both; bits beyond Sk are 0."""
    given = [x for x in (words, query_ids, key_ids, lengths) if x is not None]
    batch = max(x.shape[0] for x in given)
    heads = 1 if words is None else words.shape[1]
    live = torch.empty(batch, heads, triton.cdiv(Sk, 32), dtype=torch.int32, device=given[0].device)
    if live.numel() > 0:
        launch(_plan, (words, query_ids, key_ids, lengths), (live,), Sq, Sk, heads, lo, hi)
    return live
