"""Tiles of the fused logits kernels.

The number of rows plays no part, so that a row's bits do not depend on what it is batched with; the gradient
of a broadcast bias is a sum over rows, and may.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE = 2048  # scores of a program that holds several short rows
PER_WARP = 256  # scores of a tile a warp takes: 8 a thread. At 16 some of these kernels spill
ONE_TILE = 16384  # widest row kept on chip, 32 scores a thread of 16 warps; half that for two tiles
WIDE_BLOCK = 8192  # tile of a wider row, 16 scores a thread of 16 warps; half that for two tiles
BIAS_TILE = 2048  # y and dy of a program that sums over rows
PART, PART_WARPS = 8192, 16  # a part of a wide row, 16 scores a thread
LOOP_BLOCK = 8192  # of a row that is looped over, 16 scores a thread of 16 warps
FEW = 2048  # of its scores, at which it is looped over no more
CHUNKS = (32, 16, 8)  # columns of which the largest score is kept; wider in rows of more than MOST_CHUNKS
MOST_CHUNKS = 16384
MOST_CHOSEN = 8192  # scores that a row's choice is made from
CHOSEN = 128  # chunks to choose from where it is not known how many are needed
CHOOSE_WARPS, CHOOSE_TILE = 8, 2048  # top-k 50 of 128,256: 16 are 1 to 15 % slower, 4 were 5 to 29 %
PROGRAMS = 512  # programs that fill today's largest GPUs a few times over


@dataclass(frozen=True)
class LogitsConfig:
    """A program's tile (rows, block); `one_tile`: the block holds whole rows, otherwise it is looped over."""

    rows: int
    block: int
    one_tile: bool
    num_warps: int


@dataclass(frozen=True)
class WideConfig:
    """A wide row: columns of a part and a chunk, chunks to choose from (0: none), a loop's block and when it ends."""

    part: int
    chunk: int
    chosen: int
    block: int
    few: int
    part_warps: int
    choose_warps: int
    loop_warps: int


@dataclass(frozen=True)
class BiasGradientConfig:
    """A program sums (rows, block) tiles over its share, one of `splits`, of a bias entry's rows."""

    rows: int
    block: int
    splits: int
    num_warps: int


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def forward(N: int, limited: bool) -> LogitsConfig:
    """For rows of N scores; top-k, top-p and min-p hold their keys as well."""
    return _rows(N, ONE_TILE // 2 if limited else ONE_TILE, WIDE_BLOCK)


def wide(N: int, limited: bool, k: int | None) -> WideConfig:
    """For rows that do not fit one tile; k is the number of top-k, None if it is not one or not given."""
    least = power_of_two(N) // MOST_CHUNKS
    if k is None:
        k = min(CHOSEN, MOST_CHOSEN // max(least, 1))
    fitting = [chunk for chunk in CHUNKS if chunk >= least and power_of_two(k) * chunk <= MOST_CHOSEN]
    chunk = fitting[0] if fitting else max(CHUNKS[0], least)
    chosen = power_of_two(k) if limited and power_of_two(k) * chunk <= MOST_CHOSEN else 0
    choose_warps = CHOOSE_WARPS if max(chosen * chunk, -(-N // chunk) // 2) <= CHOOSE_TILE else 16
    return WideConfig(max(PART, chunk), chunk, chosen, LOOP_BLOCK, FEW, PART_WARPS, choose_warps, 16)


def backward(N: int) -> LogitsConfig:
    """For rows of N; y and dy are held together."""
    return _rows(N, ONE_TILE // 2, WIDE_BLOCK // 2)


def _rows(N: int, widest: int, wide_block: int) -> LogitsConfig:
    block = power_of_two(N)
    if block > widest:
        return LogitsConfig(1, wide_block, False, 16)
    together = max(TILE // block, 1)
    return LogitsConfig(together, block, True, min(max(together * block // PER_WARP, 1), 16))


def bias_gradient(N: int, bias_rows: int, reduced_rows: int) -> BiasGradientConfig:
    """For a bias of `bias_rows` rows of N, each broadcast along `reduced_rows` rows of x."""
    block = min(power_of_two(N), 256)
    tile_rows = min(BIAS_TILE // block, power_of_two(reduced_rows))
    programs = bias_rows * -(-N // block)
    splits = max(1, min(PROGRAMS // programs, reduced_rows // (4 * tile_rows)))
    return BiasGradientConfig(tile_rows, block, splits, 8 if tile_rows * block >= BIAS_TILE else 4)
