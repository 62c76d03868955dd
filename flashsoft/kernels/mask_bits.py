"""Boolean tensors as attention reads them: a bit for each place, in words of 32 along one axis.

A tile of scores lies in registers as a matrix product leaves it. A word a row fits that without moving anything
between threads: each holds the few words of its rows. A byte a place does not, and what it costs to bring it there is
several times the products. Each mask is read once and an eighth of it written, before the kernel that uses it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, Tensors, launch

WORD: tl.constexpr = tl.constexpr(32)


@triton.jit(do_not_specialize=["own_size", "size", "own_tiles", "tiles", "heads", "lo", "hi"])
def mask_bits_kernel(
    keep, words, seen, keep_strides, own_size, size, own_tiles, tiles, heads, lo, hi,
    OWN: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Words of OWN rows of `keep` and WORDS * 32 columns, stored (word, row); bits beyond `size` are 0.

    Nor does a bit stand outside the band lo <= column - row <= hi. `seen`, unless None, takes their disjunction over
    the rows, a WORD of them, stored (row // 32, word). GROUP divides `size`, and so many columns are loaded at once.
    """
    pid = tl.program_id(0)
    own_tile = pid % own_tiles
    word0 = pid // own_tiles % tiles * WORDS
    bh = pid // own_tiles // tiles
    base = keep + (bh // heads).to(tl.int64) * keep_strides[0] + (bh % heads).to(tl.int64) * keep_strides[1]
    rows = own_tile * OWN + tl.arange(0, OWN)
    columns = word0 * WORD + tl.arange(0, WORDS * WORD)
    at = rows.to(tl.int64)[:, None] * keep_strides[2] + columns.to(tl.int64)[None, :] * keep_strides[3]
    there = (rows < own_size)[:, None] & (columns // GROUP * GROUP < size)[None, :]
    taken = tl.load(base + at, mask=there, other=0) != 0
    if lo is not None:
        taken = taken & (columns[None, :] - rows[:, None] >= lo)
    if hi is not None:
        taken = taken & (columns[None, :] - rows[:, None] <= hi)
    bits = taken.to(tl.int32) << tl.arange(0, WORDS * WORD)[None, :] % WORD
    numbers = word0 + tl.arange(0, WORDS)
    count = tl.cdiv(size, WORD)
    word = tl.sum(tl.reshape(bits, (OWN, WORDS, WORD)), 2)
    out = words + (bh.to(tl.int64) * count + numbers[None, :]) * own_size + rows[:, None]
    tl.store(out, word, mask=(rows < own_size)[:, None] & (numbers < count)[None, :])
    if seen is not None:
        some = tl.sum(tl.reshape(tl.max(bits.to(tl.uint32), 0), (WORDS, WORD)), 1)
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
    if BLOCK < WORD:
        word = word >> (other0 % WORD)
    # a thread of a matrix product has pairs of columns, 8 apart: one shift a word moves them to places that are the
    # same in every thread, and so known to the compiler
    return (((word >> (other & 6)) >> (other & 25)) & 1) != 0


@triton.jit
def seen_of(seen, strides, own0, other0, own_size, size, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK,): which positions from other0 any of those from own0, and of a word around them, keeps."""
    other = tl.arange(0, BLOCK)
    pointer = seen + tl.cast(own0 // WORD, tl.int64) * strides[2] + tl.cast(other0 // WORD, tl.int64) * strides[3]
    words = other * 0
    for n in tl.static_range(0, (BLOCK + WORD - 1) // WORD):
        for r in tl.static_range(0, (OWN + WORD - 1) // WORD):
            inside = (other0 + n * WORD < size) & (own0 + r * WORD < own_size)
            word = tl.load(pointer + r * strides[2] + n * strides[3], mask=inside, other=0)
            words = tl.where(other // WORD == n, words | word, words)
    if BLOCK < WORD:
        words = words >> (other0 % WORD)
    return ((words >> (other % WORD)) & 1) != 0


def _plan(inputs: Tensors, outputs: Tensors, lo: int | None, hi: int | None) -> Launch:
    (keep,), (words, _) = inputs, outputs
    B, H, count, own = words.shape  # type: ignore[union-attr]
    size = keep.shape[3]  # type: ignore[union-attr]
    OWN, WORDS = (32, 4) if own > 1 else (1, 16)
    own_tiles, tiles = triton.cdiv(own, OWN), triton.cdiv(count, WORDS)
    args = (keep.stride(), own, size, own_tiles, tiles, H, lo, hi)  # type: ignore[union-attr]
    options = dict(OWN=OWN, WORDS=WORDS, GROUP=math.gcd(size, 16), num_warps=4)
    return Launch(mask_bits_kernel, B * H * own_tiles * tiles, args, options)


def mask_bits(keep: Tensor, size: int, lo: int | None, hi: int | None, *, by_keys: bool) -> tuple[Tensor, Tensor]:
    """words, int32 (B or 1, H or 1, ceil(Sk / 32), Sq or 1), along keys; by_keys (..., ceil(Sq / 32), Sk or 1).

    And their disjunctions over every 32 rows, (B or 1, H or 1, ceil(rows / 32), ceil(Sk / 32)): what is not in these,
    none of 32 queries (by_keys, keys) sees; so what the band lo <= j - i <= hi hides is taken out first. A mask that is
    the same for all rows is left as it is.
    """
    keep = keep.view(torch.uint8)
    keep = keep.mT if by_keys else keep
    B, H, own, _ = keep.shape
    count = triton.cdiv(size, 32)
    words = torch.empty(B, H, count, own, dtype=torch.int32, device=keep.device)
    keep = keep.expand(B, H, own, size)
    if own == 1:
        launch(_plan, (keep,), (words, None), None, None)
        return words, words.mT
    if by_keys:
        lo, hi = (None if x is None else -x for x in (hi, lo))
    seen = words.new_empty(B, H, triton.cdiv(own, 32), count)
    launch(_plan, (keep,), (words, seen), lo, hi)
    return words, seen
