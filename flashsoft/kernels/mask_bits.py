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


@triton.jit(do_not_specialize=["own_size", "size", "own_tiles", "tiles", "heads"])
def mask_bits_kernel(
    keep, words, keep_strides, own_size, size, own_tiles, tiles, heads,
    OWN: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Words of OWN rows of `keep` and WORDS * 32 columns, stored (word, row); bits beyond `size` are 0.

    GROUP divides `size`: so many columns are loaded at once.
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
    taken = (tl.load(base + at, mask=there, other=0) != 0).to(tl.int32)
    bits = taken << tl.arange(0, WORDS * WORD)[None, :] % WORD
    numbers = word0 + tl.arange(0, WORDS)
    count = tl.cdiv(size, WORD)
    word = tl.sum(tl.reshape(bits, (OWN, WORDS, WORD)), 2)
    out = words + (bh.to(tl.int64) * count + numbers[None, :]) * own_size + rows[:, None]
    tl.store(out, word, mask=(rows < own_size)[:, None] & (numbers < count)[None, :])


@triton.jit(do_not_specialize=["own_size", "size", "own_tiles", "tiles", "heads"])
def turned_bits_kernel(words, turned, words_strides, own_size, size, own_tiles, tiles, heads, WORDS: tl.constexpr):
    """A WORD of rows of `words` and WORDS words of columns, stored as words along the rows: (row // 32, column)."""
    pid = tl.program_id(0)
    own_tile = pid % own_tiles
    number = pid // own_tiles % tiles * WORDS + tl.arange(0, WORDS)
    bh = pid // own_tiles // tiles
    h = (bh % heads).to(tl.int64)
    place = tl.arange(0, WORD)
    rows = own_tile * WORD + place
    pointers = words + (bh // heads).to(tl.int64) * words_strides[0] + h * words_strides[1]
    pointers += number.to(tl.int64)[None, :] * words_strides[2] + rows.to(tl.int64)[:, None] * words_strides[3]
    count = tl.cdiv(size, WORD)
    word = tl.load(pointers, mask=(rows < own_size)[:, None] & (number < count)[None, :], other=0)
    bits = ((word[:, :, None] >> place[None, None, :]) & 1) << place[:, None, None]
    columns = number[:, None] * WORD + place[None, :]
    out = turned + (bh.to(tl.int64) * own_tiles + own_tile) * size + columns
    tl.store(out, tl.sum(bits, 0), mask=columns < size)


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
def live_of(live, strides, column0, size, BLOCK: tl.constexpr):
    """(BLOCK,): the bits of keys from column0, a multiple of BLOCK; `live` is the part of one head."""
    j = tl.arange(0, BLOCK)
    pointer = live + tl.cast(column0 // WORD, tl.int64) * strides[2]
    word = tl.load(pointer) + j * 0
    for n in tl.static_range(1, BLOCK // WORD):
        other = tl.load(pointer + n * strides[2], mask=column0 + n * WORD < size, other=0)
        word = tl.where(j < n * WORD, word, other)
    if BLOCK < WORD:
        word = word >> (column0 % WORD)
    return ((word >> (j % WORD)) & 1) != 0


def broadcast_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of a tensor whose dimensions of size 1 stand for all."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _plan(inputs: Tensors, outputs: Tensors) -> Launch:
    (keep,), (words,) = inputs, outputs
    B, H, count, own = words.shape  # type: ignore[union-attr]
    size = keep.shape[3]  # type: ignore[union-attr]
    OWN, WORDS = (32, 8) if own > 1 else (1, 32)
    own_tiles, tiles = triton.cdiv(own, OWN), triton.cdiv(count, WORDS)
    args = (keep.stride(), own, size, own_tiles, tiles, H)  # type: ignore[union-attr]
    options = dict(OWN=OWN, WORDS=WORDS, GROUP=math.gcd(size, 16), num_warps=4)
    return Launch(mask_bits_kernel, B * H * own_tiles * tiles, args, options)


def mask_bits(keep: Tensor, Sk: int) -> Tensor:
    """A mask's words along keys, int32 (B or 1, H or 1, ceil(Sk / 32), Sq or 1)."""
    B, H, own, _ = keep.shape
    words = torch.empty(B, H, triton.cdiv(Sk, 32), own, dtype=torch.int32, device=keep.device)
    launch(_plan, (keep.view(torch.uint8).expand(B, H, own, Sk),), (words,))
    return words


def _plan_turned(inputs: Tensors, outputs: Tensors, Sq: int, Sk: int) -> Launch:
    (words,) = inputs
    B, H, count, _ = words.shape  # type: ignore[union-attr]
    WORDS = 8
    own_tiles, tiles = triton.cdiv(Sq, 32), triton.cdiv(count, WORDS)
    args = (broadcast_strides(words), Sq, Sk, own_tiles, tiles, H)  # type: ignore[arg-type]
    return Launch(turned_bits_kernel, B * H * own_tiles * tiles, args, dict(WORDS=WORDS, num_warps=4))


def turned_bits(words: Tensor, Sq: int, Sk: int) -> Tensor:
    """Words along queries, (B or 1, H or 1, ceil(Sq / 32), Sk), from those along keys."""
    B, H, _, _ = words.shape
    turned = words.new_empty(B, H, triton.cdiv(Sq, 32), Sk)
    launch(_plan_turned, (words,), (turned,), Sq, Sk)
    return turned
