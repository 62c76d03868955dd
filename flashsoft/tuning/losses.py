"""Tiles of the cross entropy kernels.

The number of rows plays no part, so that a row's bits do not depend on what it is batched with. A program has 256
threads that load 16 bytes at a time, as the fastest row kernels do. The constants were measured on an H200 with 8,192 x
128,256 bf16; 128 threads are as fast, 512 slower by 2 to 14 %.
"""

from __future__ import annotations

from dataclasses import replace

import triton

from .rows import FORWARD, PART_UNIT, Device, Parts, RowConfig, most_parts, parts, row_config

STATE, GRADIENT, OVERWRITE = "cross_entropy_state", "cross_entropy_gradient", "cross_entropy_overwrite"
WARPS = 8
STATE_LOADS = 8  # of 16 bytes a thread, all under way before the first is used; 2, 4, 16: 39 %, 6 % and 0 % slower
GRADIENT_LOADS = 4  # whose elements are held in float32 as well, while they are stored; 1, 2, 8: 10, 4 and 9 % slower
INNER_TILES = {2: 4, 4: 2}  # by element size, of rows that lie across memory
SHORT = 4096  # bytes of a program's tile of short rows


def loss_config(op: str, n_cols: int, itemsize: int, rows_inner: bool, on: Device) -> RowConfig:
    """The tiles for rows of `n_cols` elements; arguments as of `rows.row_config`."""
    if op == OVERWRITE:
        return _overwrite(n_cols, itemsize, rows_inner, on)
    whole = triton.next_power_of_2(n_cols)
    loads = STATE_LOADS if op == STATE else GRADIENT_LOADS
    if on.name == "interpreter":  # few programs, yet every way to cut a row at lengths that tests can afford
        if rows_inner:
            return RowConfig(32 // itemsize, min(whole, 128), 4)
        if whole <= 1024:
            return RowConfig(min(2048 // whole, 1024), whole, 4)
        return RowConfig(1, 512, 4, 2 if op == STATE else 1)
    if rows_inner:  # a program takes a line of 128 bytes of rows
        block_rows = 128 // itemsize
        block_cols = min(whole, 8192 // (itemsize * block_rows))
        warps = max(block_rows * block_cols // 512, 4)
        return RowConfig(block_rows, block_cols, warps, INNER_TILES[itemsize] if op == STATE else 1)
    if whole * itemsize <= SHORT:
        return RowConfig(SHORT // itemsize // whole, whole, 4)
    tile = WARPS * 32 * (16 // itemsize)
    return RowConfig(1, tile, WARPS, loads) if op == STATE else RowConfig(1, min(whole, tile * loads), WARPS)


def _overwrite(n_cols: int, itemsize: int, rows_inner: bool, on: Device) -> RowConfig:
    """A row waits on chip for its state as in the softmax, in larger parts: beside what is done for an element some
    300 instructions a thread are done once (counted for sm_90), too many for 32 elements at the rate of a copy."""
    config = row_config(FORWARD, n_cols, itemsize, rows_inner, on)
    if on.name == "interpreter" or rows_inner or config.max_parts == 1:
        return config
    tile = WARPS * 32 * (16 // itemsize)
    most = RowConfig(1, tile, WARPS, STATE_LOADS, most_parts(on))
    share = parts(most, n_cols)
    return replace(most, tiles=triton.cdiv(share.cols, tile)) if share.whole else most


def pieces(config: RowConfig, n_cols: int) -> Parts:
    """Equal parts of a row of n_cols columns, each held whole by its program, however many there are."""
    count = triton.cdiv(n_cols, config.block_cols * config.tiles)
    if count == 1:
        return Parts(1, n_cols, whole=True)
    cols = triton.cdiv(triton.cdiv(n_cols, count), PART_UNIT) * PART_UNIT
    return Parts(triton.cdiv(n_cols, cols), cols, whole=True)
