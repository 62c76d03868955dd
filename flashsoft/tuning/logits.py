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
PART_TILE, PART_TILES = 2048, 4  # tiles of a part of a wide row, 4 scores a thread of 16 warps
MOST_SLOTS = 8192  # candidates of a row that one program chooses from
PROGRAMS = 512  # programs that fill today's largest GPUs a few times over


@dataclass(frozen=True)
class LogitsConfig:
    """A program's tile (rows, block); `one_tile`: the block holds whole rows, otherwise it is looped over."""

    rows: int
    block: int
    one_tile: bool
    num_warps: int


@dataclass(frozen=True)
class CandidatesConfig:
    """Parts of `tiles` tiles, each of which leaves up to `most` candidates; see kernels/candidates.py."""

    tile: int
    tiles: int
    most: int
    num_warps: int


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


def forward(N: int, top_k: bool) -> LogitsConfig:
    """For rows of N scores; top-k holds their keys as well."""
    return _rows(N, ONE_TILE // 2 if top_k else ONE_TILE, WIDE_BLOCK)


def candidates(N: int, k: int) -> CandidatesConfig | None:
    """For the k largest of rows of N scores; None for rows that fit one tile, for a large k, and without top-k (0)."""
    most, parts = power_of_two(k + k // 2), -(-N // (PART_TILE * PART_TILES))
    if not 0 < k < N or forward(N, True).one_tile or power_of_two(parts) * most > MOST_SLOTS:
        return None
    return CandidatesConfig(PART_TILE, PART_TILES, most, 16)


def warps_of(scores: int) -> int:
    """For one tile of so many scores."""
    return min(max(scores // PER_WARP, 1), 16)


def backward(N: int) -> LogitsConfig:
    """For rows of N; y and dy are held together."""
    return _rows(N, ONE_TILE // 2, WIDE_BLOCK // 2)


def _rows(N: int, widest: int, wide_block: int) -> LogitsConfig:
    block = power_of_two(N)
    if block > widest:
        return LogitsConfig(1, wide_block, False, 16)
    together = max(TILE // block, 1)
    return LogitsConfig(together, block, True, warps_of(together * block))


def bias_gradient(N: int, bias_rows: int, reduced_rows: int) -> BiasGradientConfig:
    """For a bias of `bias_rows` rows of N, each broadcast along `reduced_rows` rows of x."""
    block = min(power_of_two(N), 256)
    tile_rows = min(BIAS_TILE // block, power_of_two(reduced_rows))
    programs = bias_rows * -(-N // block)
    splits = max(1, min(PROGRAMS // programs, reduced_rows // (4 * tile_rows)))
    return BiasGradientConfig(tile_rows, block, splits, 8 if tile_rows * block >= BIAS_TILE else 4)
