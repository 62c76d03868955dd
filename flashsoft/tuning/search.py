"""The search behind `flashsoft tune`: which tiles of the row kernels are worth a trial, and which are kept."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping

import torch
import triton

from .rows import BACKWARD, RowConfig, legal, parts
from .timing import Timing

LEAST_GAIN = 0.02  # repeated runs differ by less
# Registers for threads that hold so many elements of 16 bits: left alone, the compiler takes more, and fewer fit.
REGISTERS = {32: 32, 64: 56}
SHARED_COLS = range(2048, 16384 + 1)


def candidates(op: str, n_cols: int, itemsize: int, most_parts: int, present: RowConfig) -> list[RowConfig]:
    """The present config and 8 to 24 legal others, rows whole or shared, 4 to 64 elements a thread."""
    others = (*_whole(n_cols), *_tiled(n_cols), *_shared(op, n_cols, itemsize, most_parts))
    return list(dict.fromkeys((present, *(config for config in others if legal(config, op, itemsize)))))


def _whole(n_cols: int) -> Iterator[RowConfig]:
    """Rows in one tile; short ones several to a program."""
    block_cols = triton.next_power_of_2(n_cols)
    for num_warps in (1, 2, 4, 8, 16, 32):
        for each in (4, 8, 16, 32, 64):
            block_rows = num_warps * 32 * each // block_cols
            if block_rows == 1 or (block_rows > 1 and 2 <= num_warps <= 16 and 8 <= each <= 32):
                yield RowConfig(block_rows, block_cols, num_warps)


def _tiled(n_cols: int) -> Iterator[RowConfig]:
    """Rows in three to seven tiles, which have less padding than one."""
    for block_cols, num_warps in ((256, 2), (512, 2), (1024, 4), (1024, 8), (2048, 8), (4096, 8)):
        tiles = triton.cdiv(n_cols, block_cols)
        if tiles in (3, 5, 6, 7):
            yield RowConfig(1, block_cols, num_warps, tiles)


def _shared(op: str, n_cols: int, itemsize: int, most_parts: int) -> Iterator[RowConfig]:
    """Rows shared by programs that hold one tile, or two of half its size."""
    for num_warps in (4, 8, 16, 32):
        for each in (8, 16, 32, 64):
            held = num_warps * 32 * each
            if held not in SHARED_COLS or held >= n_cols:
                continue
            one = RowConfig(1, held, num_warps, 1, most_parts)
            yield one
            if op == BACKWARD or each < 32 or not parts(one, n_cols).whole:
                continue
            for registers in dict.fromkeys((None, REGISTERS[each] if itemsize == 2 else None)):
                yield RowConfig(1, held // 2, num_warps, 2, most_parts, registers)


def kept(timings: Mapping[RowConfig, Timing], present: RowConfig) -> RowConfig:
    """The fastest config, or the present one where it is not slower by more than its own spread and LEAST_GAIN."""
    medians = {config: timing.quantiles()[0] for config, timing in timings.items()}
    best = min(medians, key=medians.__getitem__)
    if present not in timings:
        return best
    median, p20, p80 = timings[present].quantiles()
    return best if median - medians[best] > max(LEAST_GAIN * median, p80 - p20) else present


def facts() -> dict[str, str]:
    """What is measured with, now."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }
