"""How rows lie in memory, and which programs take which parts of them: what the plans of the row kernels share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..tuning.rows import Parts, RowConfig, device, parts, row_config, tightened
from .tiles import fold_rows

INT32_COLS = (1 << 31) - (1 << 20)  # shorter rows, padding included, are counted in 32 bits: fewer registers
Strides = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Rows of several tensors in memory, and how a program takes them.

    strides, per_row: of rows, in units; of numbers a row, in elements.
    unit: kernels take a row's length and the strides of rows in units of the largest power of two, up to 16, that
        divides them all. So the compiler sees that rows start and end on that boundary, and moves 16 bytes at once:
        by itself it looks for multiples of 16 only, and 1000 bfloat16 are one of 8.
    align: where rows do not start on 16 bytes, yet all tensors' alike, the elements between such boundaries; else 0.
    """

    n_rows: int
    n_cols: int
    sizes: tuple[int, ...]
    strides: tuple[Strides, ...]
    per_row: tuple[Strides, ...]
    unit: int
    align: int
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
        cap = self.config.registers if self.align == 0 else None  # caps were measured without a search for ends
        return ({} if cap is None else {"maxnreg": cap}) | {
            "EVEN": self.align == 0 and self.n_cols % self.parts.cols == 0 and self.parts.cols % tile == 0,
            "UNIT": self.unit,
            "ALIGN": self.align,
            "INDEX": tl.int32 if self.n_cols < INT32_COLS else tl.int64,
            "BLOCK_ROWS": self.config.block_rows,
            "BLOCK_COLS": self.config.block_cols,
            "num_warps": self.config.num_warps,
        }

    def packed(self, *held: torch.Tensor) -> bool:
        """Whether tiles are held as they were read: of 16 bits, with 32 elements or more a thread."""
        elements = self.config.block_rows * self.config.block_cols * self.config.tiles
        return elements >= self.config.num_warps * 32 * 32 and all(x.element_size() == 2 for x in held)


def layout(op: str, *tensors: torch.Tensor, per_row: tuple[torch.Tensor, ...] = ()) -> Layout:
    """The layout of tensors of the same rows, the first of which decides on the config; per_row: a number a row."""
    x = tensors[0]
    n_cols, itemsize = x.shape[-1], x.element_size()
    sizes, strides = fold_rows(*tensors, *(numbers.unsqueeze(-1) for numbers in per_row))
    of_tensors, of_numbers = strides[: len(tensors)], strides[len(tensors) :]
    unit = math.gcd(16, n_cols, *(stride for of_tensor in of_tensors for stride in of_tensor))
    align = 16 // min(tensor.element_size() for tensor in tensors)
    alike = all(len({stride % align for stride in along}) == 1 for along in zip(*of_tensors, strict=True))
    on_boundaries = all(tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0 for tensor in tensors)
    if unit % align == 0 or not alike or not on_boundaries:
        align = 0
    rows_inner = of_tensors[0][0] == 1 and x.stride(-1) > 1
    config = row_config(op, n_cols, itemsize, rows_inner, device(x.get_device()))
    if config.block_rows > 1:
        align = 0
    if align > 0:
        config = tightened(config, op, n_cols + align, itemsize)
        if parts(config, n_cols).whole and not parts(config, n_cols + align).whole:
            config = row_config(op, n_cols + align, itemsize, rows_inner, device(x.get_device()))
    in_units = tuple(tuple(stride // unit for stride in of_tensor) for of_tensor in of_tensors)
    share = parts(config, n_cols + align)
    return Layout(
        x.numel() // n_cols, n_cols, sizes, in_units, tuple(of_numbers), unit, align, config, share
    )  # fmt: skip
