"""Where the rows of strided tensors lie: row problems.

A row problem sees each tensor as rows times columns (the last dimension). The dimensions before the last are
folded together as far as all tensors' strides allow, so that most problems have one or two row dimensions, and
any strides work without a copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def fold_rows(*tensors: torch.Tensor, separate_last: bool = False) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Sizes of the folded row dimensions, innermost first, and each tensor's strides along them.

    The tensors have the same sizes before the last dimension. `separate_last` leaves the dimension next to the
    columns unfolded, for a kernel that needs the index along it.
    """
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in tensors]
    for dim in reversed(range(tensors[0].ndim - 1)):
        size = tensors[0].shape[dim]
        own = [tensor.stride(dim) for tensor in tensors]
        first = not sizes
        if size == 1 and not (first and separate_last):
            continue
        inner_free = sizes and not (separate_last and len(sizes) == 1)
        if inner_free and all(s == st[-1] * sizes[-1] for s, st in zip(own, strides, strict=True)):
            sizes[-1] *= size
        else:
            sizes.append(size)
            for st, s in zip(strides, own, strict=True):
                st.append(s)
    if not sizes:
        sizes.append(1)
        for st in strides:
            st.append(0)
    return tuple(sizes), [tuple(st) for st in strides]


@triton.jit
def row_offset(row, sizes, strides):
    """The offset in elements, int64, of rows numbered `row` (int64), for the sizes and strides of `fold_rows`."""
    offset = row * 0
    for d in tl.static_range(len(sizes) - 1):
        offset += (row % sizes[d]) * strides[d]
        row = row // sizes[d]
    return offset + row * strides[len(sizes) - 1]
