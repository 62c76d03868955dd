"""What lies behind the last of packed sequences, in results: no program of attention comes there.

Where the last sequence ends only the device knows. Clearing the whole result would write it twice; programs here end at
once unless their rows lie behind.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, Tensors, launch


@triton.jit(do_not_specialize=["rows", "last", "tiles"])
def clear_tail_kernel(
    starts, out, strides, rows, last, tiles, value, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Stores `value` in ROWS rows of one head of out (1, H, rows, D) from starts[last] on."""
    pid = tl.program_id(0)
    row = pid % tiles * ROWS + tl.arange(0, ROWS)
    end = tl.load(starts + last)
    if pid % tiles * ROWS + ROWS <= end:
        return
    column = tl.arange(0, WIDTH)
    head = out + (pid // tiles).to(tl.int64) * strides[1]
    pointers = head + row.to(tl.int64)[:, None] * strides[2] + column.to(tl.int64)[None, :] * strides[3]
    zeros = tl.zeros((ROWS, WIDTH), tl.float32) + value
    tl.store(pointers, zeros.to(out.dtype.element_ty), mask=((row >= end) & (row < rows))[:, None] & (column < D))


def _plan(
    inputs: Tensors, outputs: Tensors, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, value: float
) -> Launch:
    _, H, rows, D = shape
    tiles = triton.cdiv(rows, 64)
    options = dict(D=D, WIDTH=triton.next_power_of_2(D), ROWS=64, num_warps=4)
    args = (strides, rows, inputs[0].shape[0] - 1, tiles, value)  # type: ignore[union-attr]
    return Launch(clear_tail_kernel, H * tiles, args, options)


def clear_tail(starts: Tensor, out: Tensor, value: float = 0.0) -> Tensor:
    """`out` (1, H, T, D), with `value` in the rows from the last of `starts` (sequences + 1,) on."""
    if out.numel() > 0:
        launch(_plan, (starts.contiguous(),), (out,), out.shape, out.stride(), out.dtype, value)
    return out
