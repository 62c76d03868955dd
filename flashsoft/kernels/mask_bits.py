"""Boolean tensors as attention reads them: a bit for each place, in words of 32 along one axis.

A tile of scores lies in registers as a matrix product leaves it. A word a row fits that without moving anything
between threads: each holds the few words of its rows. A byte a place does not, and what it costs to bring it there is
several times the products. Each mask is read once and an eighth of it written, before the kernel that uses it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, Tensors, launch

WORD: tl.constexpr = tl.constexpr(32)


@triton.jit(do_not_specialize=["own_size", "size", "own_tiles", "tiles", "heads"])
def mask_bits_kernel(
    keep, words, seen, keep_strides, own_size, size, own_tiles, tiles, heads, OWN: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Words of OWN rows of `keep` and WORDS * 32 columns, stored (word, row); bits beyond `size` are 0.

    `seen`, unless None, takes their disjunction over the rows, a WORD of them, stored (row // 32, word).
    """
    pid = tl.program_id(0)
    own_tile = pid % own_tiles
    word0 = pid // own_tiles % tiles * WORDS
    bh = pid // own_tiles // tiles
    base = keep + (bh // heads).to(tl.int64) * keep_strides[0] + (bh % heads).to(tl.int64) * keep_strides[1]
    rows = own_tile * OWN + tl.arange(0, OWN)
    columns = word0 * WORD + tl.arange(0, WORDS * WORD)
    at = rows.to(tl.int64)[:, None] * keep_strides[2] + columns.to(tl.int64)[None, :] * keep_strides[3]
    kept = (tl.load(base + at, mask=(rows < own_size)[:, None] & (columns < size)[None, :], other=0) != 0).to(tl.int32)
    numbers = word0 + tl.arange(0, WORDS)
    count = tl.cdiv(size, WORD)
    places = tl.arange(0, WORD)
    bits = tl.sum(tl.reshape(kept, (OWN, WORDS, WORD)) << places[None, None, :], 2)
    out = words + (bh.to(tl.int64) * count + numbers[None, :]) * own_size + rows[:, None]
    tl.store(out, bits, mask=(rows < own_size)[:, None] & (numbers < count)[None, :])
    if seen is not None:
        some = tl.sum(tl.reshape(tl.max(kept, 0), (WORDS, WORD)) << places[None, :], 1)
        tl.store(seen + (bh.to(tl.int64) * own_tiles + own_tile) * count + numbers, some, mask=numbers < count)


@triton.jit
def bits_of(words, strides, own0, other0, own_size, size, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """(OWN, BLOCK): what is kept of the positions from own0 against those from other0, a multiple of BLOCK.

    Words lie along the latter; `words` is the part of one head.
    """
    own = tl.arange(0, OWN)
    other = tl.arange(0, BLOCK)[None, :]
    pointers = words + tl.cast(other0 // WORD, tl.int64) * strides[2] + tl.cast(own0 + own, tl.int64) * strides[3]
    there = own < own_size - own0
    word = tl.load(pointers, mask=there, other=0)[:, None]
    for n in tl.static_range(1, BLOCK // WORD):
        inside = there & (other0 + n * WORD < size)
        word = tl.where(other < n * WORD, word, tl.load(pointers + n * strides[2], mask=inside, other=0)[:, None])
    return ((word >> ((other0 + other) % WORD)) & 1) != 0


@triton.jit
def seen_of(seen, strides, own0, other0, own_size, size, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK,): which positions from other0 any of those from own0, and of a word around them, keeps."""
    other = other0 + tl.arange(0, BLOCK)
    pointers = seen + tl.cast(own0 // WORD, tl.int64) * strides[2] + (other // WORD).to(tl.int64) * strides[3]
    word = tl.load(pointers, mask=other < size, other=0)
    for n in tl.static_range(1, OWN // WORD):
        word |= tl.load(pointers + n * strides[2], mask=(other < size) & (own0 + n * WORD < own_size), other=0)
    return ((word >> (other % WORD)) & 1) != 0


def _plan(inputs: Tensors, outputs: Tensors) -> Launch:
    (keep,), (words, _) = inputs, outputs
    B, H, count, own = words.shape  # type: ignore[union-attr]
    size = keep.shape[3]  # type: ignore[union-attr]
    OWN, WORDS = (32, 4) if own > 1 else (1, 16)
    own_tiles, tiles = triton.cdiv(own, OWN), triton.cdiv(count, WORDS)
    args = (keep.stride(), own, size, own_tiles, tiles, H)  # type: ignore[union-attr]
    return Launch(mask_bits_kernel, B * H * own_tiles * tiles, args, dict(OWN=OWN, WORDS=WORDS, num_warps=4))


def mask_bits(keep: Tensor, size: int, *, by_keys: bool) -> tuple[Tensor, Tensor]:
    """words, int32 (B or 1, H or 1, ceil(Sk / 32), Sq or 1), along keys; by_keys (..., ceil(Sq / 32), Sk or 1).

    And their disjunctions over every 32 rows, (B or 1, H or 1, ceil(rows / 32), ceil(Sk / 32)): what is not in these,
    none of 32 queries (by_keys, keys) sees.
    """
    keep = keep.view(torch.uint8)
    keep = keep.mT if by_keys else keep
    B, H, own, _ = keep.shape
    count = triton.cdiv(size, 32)
    words = torch.empty(B, H, count, own, dtype=torch.int32, device=keep.device)
    seen = None if own == 1 else words.new_empty(B, H, triton.cdiv(own, 32), count)
    launch(_plan, (keep.expand(B, H, own, size),), (words, seen))
    return words, words.mT if seen is None else seen
