"""Tiles of the row kernels, chosen by a row's length, layout and dtype: from a table, or else by a rule.

The number of rows plays no part, so that a row's bits do not depend on what it is batched with. (Where rows begin off
16-byte boundaries they do depend on how far: see kernels/row_tiles.py.) Tables (tables.py) hold what was measured, on
one kind of device; the rule follows what they have in common, for all others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import triton

from . import tables

FORWARD, BACKWARD = "softmax_forward", "softmax_backward"
TENSORS = {FORWARD: 1, BACKWARD: 2}  # tensors of which a program holds tiles
PART_UNIT = 64  # columns; parts of a row begin on whole lines of 128 bytes, where the row does
MAX_PARTS = 32
# Registers for tiles, each of which holds two elements of 16 bits or one of 32: a thread's, and a program's, half of
# those that a multiprocessor has.
THREAD_REGISTERS, PROGRAM_REGISTERS = 64, 32768


@dataclass(frozen=True)
class RowConfig:
    """What one program takes on: `tiles` tiles of rows x columns, held at once, and its warps.

    A longer row is shared by up to `max_parts` programs; where they cannot hold it either, each reads its part twice,
    a tile at a time.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    tiles: int = 1
    max_parts: int = 1
    registers: int | None = None  # a thread's, where the compiler would take more than its share

    def __str__(self) -> str:
        said = [f"{self.block_rows} x {self.block_cols}", f"{self.num_warps} warps"]
        said += [f"{self.tiles} tiles"] if self.tiles > 1 else []
        said += [f"up to {self.max_parts} parts"] if self.max_parts > 1 else []
        said += [f"{self.registers} registers"] if self.registers is not None else []
        return ", ".join(said)


@dataclass(frozen=True)
class Parts:
    """How a row is shared: `count` programs, `cols` columns each (the last may have fewer), held whole or not."""

    count: int
    cols: int
    whole: bool


def parts(config: RowConfig, n_cols: int) -> Parts:
    """Equal parts of a row of n_cols columns."""
    held = config.block_cols * config.tiles
    count = min(triton.cdiv(n_cols, held), config.max_parts)
    if count == 1:
        return Parts(1, n_cols, n_cols <= held)
    cols = triton.cdiv(triton.cdiv(n_cols, count), PART_UNIT) * PART_UNIT
    return Parts(triton.cdiv(n_cols, cols), cols, cols <= held)


def legal(config: RowConfig, op: str, itemsize: int) -> bool:
    """Whether a kernel can be built with `config` and hold its tiles in registers."""
    numel = config.block_rows * config.block_cols
    held = numel * config.tiles * TENSORS[op] * itemsize / 4
    return (
        all(triton.next_power_of_2(size) == size for size in (config.block_rows, config.block_cols, config.num_warps))
        and config.num_warps <= 32
        and (config.max_parts == 1 or (config.block_rows == 1 and config.block_cols * config.tiles >= PART_UNIT))
        and 1 <= config.max_parts <= MAX_PARTS
        and (config.registers is None or 16 <= config.registers <= 255)
        and 0 < held <= min(config.num_warps * 32 * THREAD_REGISTERS, PROGRAM_REGISTERS)
    )


@dataclass(frozen=True)
class Device:
    """What the choice needs to know of a device: its table, and how many multiprocessors run programs at once."""

    name: str  # sm_90, gfx942, interpreter
    multiprocessors: int


@functools.cache
def device(index: int) -> Device:
    """The facts of a CUDA (or ROCm) device; of the interpreter for -1."""
    if triton.knobs.runtime.interpret:
        return Device("interpreter", 1)
    driver = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(max(index, 0))
    return Device(tables.name_of(driver.get_current_target()), properties["multiprocessor_count"])


_forced: list[RowConfig] = []


@contextlib.contextmanager
def forcing(config: RowConfig) -> Iterator[None]:
    """Every row problem gets `config` within; for tests and for whoever measures. Launches must be forgotten."""
    _forced.append(config)
    try:
        yield
    finally:
        _forced.pop()


def row_config(op: str, n_cols: int, itemsize: int, rows_inner: bool, on: Device) -> RowConfig:
    """The tiles for rows of `n_cols` elements of `itemsize` bytes.

    `rows_inner`: neighbours in memory are of different rows (softmax over a dimension that is not the last).
    """
    if _forced:
        return _forced[-1]
    if on.name == "interpreter":
        return _interpreted(n_cols, itemsize, rows_inner)
    found = None if rows_inner else tables.find(on.name, op, itemsize, n_cols, _usable)
    if found is None:
        return _ruled(op, n_cols, itemsize, rows_inner, on)
    config = RowConfig(**found)  # measured on a device that may be larger than this one
    return replace(config, max_parts=min(config.max_parts, most_parts(on)))


def most_parts(on: Device) -> int:
    """Programs that may share a row: so few that those which wait for others leave room for these to start.

    A multiprocessor has room for one program at least, and rows of up to four launches may be waiting at a time.
    """
    return max(1, min(MAX_PARTS, on.multiprocessors // 4))


def _usable(entry: tables.Entry) -> bool:
    """Whether a table's entry is a legal config; tables are files, and come from other versions too."""
    config = entry["config"]
    try:
        return all(value is None or type(value) is int for value in config.values()) and legal(
            RowConfig(**config), entry["op"], entry["itemsize"]
        )
    except TypeError:  # a field that is not one, or is missing, or None
        return False


def _ruled(op: str, n_cols: int, itemsize: int, rows_inner: bool, on: Device) -> RowConfig:
    """What the fastest configs measured on an H200 have in common.

    Programs of 4 KB of short rows; longer rows whole, 16 to 32 elements a thread, while 16 warps can hold them;
    then parts of 8,192 columns. (16-bit rows far short of a power of two, in three tiles there, are not told apart.)
    """
    whole, tensors = triton.next_power_of_2(n_cols), TENSORS[op]
    if rows_inner:  # a program takes a line of 128 bytes of rows
        block_rows = 128 // itemsize
        block_cols = min(whole, max(8192 // (itemsize * tensors * block_rows), 1))
        return RowConfig(block_rows, block_cols, _clamp(block_rows * block_cols // 512, 4, 32))
    short = 4096 // (itemsize * tensors)
    if whole <= short:
        return RowConfig(short // whole, whole, 4)
    if whole * tensors <= 16384:
        return RowConfig(1, whole, _clamp(whole // 512, 4, 16))
    most = most_parts(on)
    return RowConfig(1, 8192, 8, 1, most) if op == BACKWARD else RowConfig(1, 4096, 8, 2, most)


def _interpreted(n_cols: int, itemsize: int, rows_inner: bool) -> RowConfig:
    """Few programs, since each operation costs; yet every way to share a row at lengths that tests can afford."""
    whole = triton.next_power_of_2(n_cols)
    if rows_inner:
        return RowConfig(32 // itemsize, min(whole, 128), 4)
    if whole <= 1024:
        return RowConfig(_clamp(2048 // whole, 1, 1024), whole, 4)
    return RowConfig(1, 512, 4, 2, 2)


def _clamp(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))
