"""Tiles of the row kernels, chosen by a row's length, layout and dtype.

The number of rows plays no part, so that a row's bits do not depend on what it is batched with.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

TRITON_MAX_NUMEL = 1 << 20
MAX_PER_THREAD = 32  # elements of a tile, over all tensors read, that 64 registers a thread hold as float32


@dataclass(frozen=True)
class RowConfig:
    """A program's tile of rows and columns, and its warps; longer rows than block_cols are read in a loop."""

    block_rows: int
    block_cols: int
    num_warps: int


@dataclass(frozen=True)
class Limits:
    """What bounds a tile.

    short: bytes that a program of several short rows reads: two to four 16-byte loads a thread. Eight
        programs and more on an SM keep over 30 KB in flight there, what the 4.3 TB/s of an H200 need.
    row: elements of the longest row that is kept in registers and read once, over all tensors read; beyond,
        32 warps spill.
    tile: columns of a tile of a longer row, over all tensors read.
    column: bytes of rows side by side in memory that a program takes where rows are the inner dimension: a
        128-byte line.
    """

    short: int
    row: int
    tile: int
    column: int = 128


GPU = Limits(short=8192, row=32768, tile=16384)
# The interpreter runs programs one by one at a cost an operation: few programs, yet several tiles in rows of
# a length that tests can afford.
INTERPRETER = Limits(short=8192, row=1024, tile=512, column=32)


def legal(config: RowConfig, tensors: int = 1) -> bool:
    """Whether the kernels can be built with `config` and hold tiles of `tensors` tensors in registers."""
    sizes = (config.block_rows, config.block_cols, config.num_warps)
    numel = config.block_rows * config.block_cols
    return (
        all(size > 0 and size & (size - 1) == 0 for size in sizes)
        and config.num_warps <= 32
        and numel <= TRITON_MAX_NUMEL
        and numel * tensors <= config.num_warps * 32 * MAX_PER_THREAD
    )


@functools.cache
def row_config(
    n_cols: int, itemsize: int, tensors: int = 1, rows_inner: bool = False, interpreted: bool = False
) -> RowConfig:
    """The tile for rows of `n_cols` elements of `itemsize` bytes, in each of `tensors` tensors that are read.

    `rows_inner`: neighbours in memory are of different rows (softmax over a dimension that is not the last).
    """
    limits = INTERPRETER if interpreted else GPU
    whole = _power_of_two(n_cols)
    short = limits.short // (itemsize * tensors)
    if rows_inner:
        block_rows = limits.column // itemsize
        block_cols = min(whole, max(short // block_rows, 1))
    else:
        block_cols = whole if whole * tensors <= limits.row else limits.tile // tensors
        block_rows = max(1, short // block_cols)
    return RowConfig(block_rows, block_cols, _warps(block_rows * block_cols, itemsize, tensors))


def _warps(numel: int, itemsize: int, tensors: int) -> int:
    """A warp for every 512 elements, 16 a thread, from 4 to 32 warps; 32 a thread in long rows of 16 bits.

    With 32 a thread two programs of 16384 such elements fit on an SM, and one loads while the other computes.
    """
    long_half = itemsize < 4 and tensors == 1 and numel > 8192
    return min(32, max(4, numel // (1024 if long_half else 512)))


def _power_of_two(n: int) -> int:
    """The smallest power of two >= n (n >= 1)."""
    return 1 << (n - 1).bit_length()
