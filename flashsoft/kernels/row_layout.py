"""How rows lie in memory, and which programs take which parts of them: what the plans of the row kernels share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..tuning.rows import BACKWARD, FORWARD, Parts, RowConfig, device, parts, row_config
from .tiles import fold_rows

SHARE = {FORWARD: 32, BACKWARD: 56}  # registers of a thread, where it waits for its row
INT32_COLS = (1 << 31) - (1 << 20)  # shorter rows, padding included, are counted in 32 bits: fewer registers
Strides = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Rows of several tensors in memory, and how a program takes them.

    strides, per_row: of rows, in units; of numbers a row, in elements.
    unit: kernels take a row's length and the strides of rows in units of the largest power of two, up to 16, that
        divides them all. So the compiler sees that rows start and end on that boundary, and moves 16 bytes at once:
        by itself it looks for multiples of 16 only, and 1000 bfloat16 are one of 8.
    align: where rows do not start on 16 bytes, the elements between such boundaries, from one of which the body starts
        in the first tensor; else 0.
    aligned: of the tensors, whose bodies start on boundaries then: `align` for each, or 0.
    registers: the most that a thread may have, or None.
    body: columns for which there are tiles: all but the ends, if rows have them.
    """

    n_rows: int
    n_cols: int
    body: int
    sizes: tuple[int, ...]
    strides: tuple[Strides, ...]
    per_row: tuple[Strides, ...]
    unit: int
    align: int
    aligned: tuple[int, ...]
    registers: int | None
    config: RowConfig
    parts: Parts

    @property
    def programs(self) -> int:
        return triton.cdiv(self.n_rows, self.config.block_rows) * self.parts.count

    @property
    def lengths(self) -> tuple[int, int, int]:
        return self.n_rows, self.n_cols // self.unit, self.parts.cols

    @property
    def options(self) -> dict[str, object]:
        tile = self.config.block_cols * (self.config.tiles if self.parts.whole else 1)
        return ({} if self.registers is None else {"maxnreg": self.registers}) | {
            "EVEN": self.align == 0 and self.n_cols % self.parts.cols == 0 and self.parts.cols % tile == 0,
            "UNIT": self.unit,
            "ALIGN": self.align,
            "ALIGNED": self.aligned,
            "INDEX": tl.int32 if self.n_cols < INT32_COLS else tl.int64,
            "BLOCK_ROWS": self.config.block_rows,
            "BLOCK_COLS": self.config.block_cols,
            "num_warps": self.config.num_warps,
        }

    def pairs(self, x: torch.Tensor) -> bool:
        """Whether a thread has two neighbours in memory of 16 bits of x's tiles, or more."""
        elements = self.config.block_rows * self.config.block_cols
        enough = self.config.block_cols >= 2 and elements >= self.config.num_warps * 64
        return enough and x.element_size() == 2 and x.stride(-1) == 1

    def packed(self, *held: torch.Tensor) -> bool:
        """Whether tiles are held as they were read: of 16 bits, with 32 elements or more a thread."""
        elements = self.config.block_rows * self.config.block_cols * self.config.tiles
        return elements >= self.config.num_warps * 32 * 32 and all(x.element_size() == 2 for x in held)


def layout(
    op: str,
    *tensors: torch.Tensor,
    per_row: tuple[torch.Tensor, ...] = (),
    config_of: Callable[..., RowConfig] = row_config,
) -> Layout:
    """The layout of tensors of the same rows, the first of which decides on the config; per_row: a number a row.

    config_of: gives the config, for the arguments of `row_config`.
    """
    x = tensors[0]
    n_cols, itemsize = x.shape[-1], x.element_size()
    sizes, strides = fold_rows(*tensors, *(numbers.unsqueeze(-1) for numbers in per_row))
    of_tensors, of_numbers = strides[: len(tensors)], strides[len(tensors) :]
    unit = math.gcd(16, n_cols, *(stride for of_tensor in of_tensors for stride in of_tensor))
    vector = 16 // min(tensor.element_size() for tensor in tensors)
    rows_inner = of_tensors[0][0] == 1 and x.stride(-1) > 1
    align, aligned, body = 0, (0,) * len(tensors), n_cols
    config = config_of(op, body, itemsize, rows_inner, device(x.get_device()))
    on_boundary = [tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0 for tensor in tensors]
    alike = [all((a - b) % vector == 0 for a, b in zip(along, of_tensors[0], strict=True)) for along in of_tensors]
    starts = [a and b for a, b in zip(alike, on_boundary, strict=True)]
    # elements of 32 bits move singly as fast as through shared memory
    if unit % vector > 0 and n_cols >= vector and on_boundary[0] and (all(starts) or itemsize == 2):
        most = n_cols // vector * vector
        of_most = config_of(op, most, itemsize, rows_inner, device(x.get_device()))
        if of_most.block_rows == 1:  # several rows of a program begin differently
            align, body, config, aligned = vector, most, of_most, tuple(vector * start for start in starts)
    registers = config.registers  # measured for loads and stores of 16 bytes
    if align > 0 and not all(starts) and op in SHARE:  # results pass through shared memory, to be stored singly
        registers = (registers or SHARE[op]) + 8
    elif align == 0 and unit % vector > 0:
        registers = None
    in_units = tuple(tuple(stride // unit for stride in of_tensor) for of_tensor in of_tensors)
    share = parts(config, body)
    return Layout(
        x.numel() // n_cols, n_cols, body, sizes, in_units, tuple(of_numbers), unit, align, aligned, registers, config,
        share,
    )  # fmt: skip
