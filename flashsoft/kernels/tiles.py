"""Where a program's data lies: rows of strided tensors, tiles of heads.

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


@triton.jit
def head_pointer(pointer, strides, b, h):
    """The first element of head h of batch b in a tensor (B, H, S, D)."""
    return pointer + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def tile_pointers(head, strides, rows, BLOCK_D: tl.constexpr):
    """Pointers (rows, BLOCK_D) to rows of one head."""
    columns = tl.arange(0, BLOCK_D).to(tl.int64) * strides[3]
    return head + rows.to(tl.int64)[:, None] * strides[2] + columns[None, :]


@triton.jit
def load_tile(head, strides, rows, keep_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows (len(rows), BLOCK_D) of one head, zero beyond D and where not keep_rows (None: all rows exist)."""
    pointers = tile_pointers(head, strides, rows, BLOCK_D)
    if keep_rows is None and D == BLOCK_D:
        return tl.load(pointers)
    elif D == BLOCK_D:
        return tl.load(pointers, mask=keep_rows[:, None], other=0.0)
    elif keep_rows is None:
        return tl.load(pointers, mask=(tl.arange(0, BLOCK_D) < D)[None, :], other=0.0)
    else:
        return tl.load(pointers, mask=keep_rows[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :], other=0.0)


@triton.jit
def store_tile(head, strides, rows, keep_rows, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes rows (len(rows), BLOCK_D) where keep_rows, up to column D."""
    pointers = tile_pointers(head, strides, rows, BLOCK_D)
    keep = keep_rows[:, None]
    if D != BLOCK_D:
        keep = keep & (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(pointers, x.to(head.dtype.element_ty), mask=keep)


@triton.jit
def score_dot(a, b, PRECISION: tl.constexpr):
    """a @ b.T over the width of a head.

    In float32 one thread adds the products of a score one after the other, and what that rounds off is in every
    weight: even and odd columns are summed apart. The fma keeps the compiler from chaining the two sums again.
    """
    if a.dtype == tl.float32 and a.shape[1] > 16:  # a dot takes 16 columns or more
        HALF: tl.constexpr = a.shape[1] // 2
        a_even, a_odd = tl.split(tl.reshape(a, (a.shape[0], HALF, 2)))
        b_even, b_odd = tl.split(tl.reshape(b, (b.shape[0], HALF, 2)))
        even = tl.dot(a_even, b_even.T, input_precision=PRECISION)
        return tl.fma(even, 1.0, tl.dot(a_odd, b_odd.T, input_precision=PRECISION))
    else:
        return tl.dot(a, b.T, input_precision=PRECISION)


@triton.jit
def dot_add(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b, for a sum over many tiles.

    float32 tiles are multiplied from zero and then added, so that rounding grows with the number of tiles, not of
    terms, as in a blocked matrix product. The fma keeps the compiler from folding acc into the product again.
    """
    if a.dtype == tl.float32:
        return tl.fma(tl.dot(a, b, input_precision=PRECISION), 1.0, acc)
    else:
        return tl.dot(a, b, acc)
