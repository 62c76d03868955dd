"""Scores of the logits kernels, a tile at a time: x, scale, softcap, temperature, bias, mask, band; how rows end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .softcap import softcap
from .softmax import finish
from .tiles import fold_rows, row_offset


@triton.jit
def raw_score(x, factor, cap):
    """x as it is divided by T: times the scale, and capped; both may be None."""
    if factor is not None:
        x = x * factor
    if cap is not None:
        x = softcap(x, cap)
    return x


@triton.jit
def score_offsets(row, sizes, x_strides, mask_strides, bias_strides):
    """Where rows (rows,) begin in x, mask and bias, and their place in a band."""
    x_at, mask_at = row_offset(row, sizes, x_strides), row_offset(row, sizes, mask_strides)
    return x_at, mask_at, row_offset(row, sizes, bias_strides), (row % sizes[0]).to(tl.int32)


@triton.jit
def score_tile(columns, inside, source):
    """Scores (rows, columns), fp32; -inf where not `inside`, masked, or out of the band lo <= j - i <= hi.

    source: (x_ptr, mask_ptr, bias_ptr), `score_offsets`, their steps from column to column, (1 / T of each row, scale,
    softcap), (lo, hi).

    Without a bias they are those before the division by T: equals and order are then those of x. What is not kept is
    selected away, so that nothing that stands there matters.
    """
    tensors, at, steps, numbers, band = source
    x_ptr, mask_ptr, bias_ptr = tensors
    inverse, factor, cap = numbers
    i = at[3]
    lo, hi = band
    j = columns[None, :]
    wide_j = j.to(tl.int64)
    score = tl.load(x_ptr + (at[0][:, None] + wide_j * steps[0]), mask=inside, other=0.0).to(tl.float32)
    score = raw_score(score, factor, cap)
    keep = inside
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + (at[2][:, None] + wide_j * steps[2]), mask=inside, other=0.0)
        score = score * inverse[:, None] + bias.to(tl.float32)
    if mask_ptr is not None:
        keep = keep & (tl.load(mask_ptr + (at[1][:, None] + wide_j * steps[1]), mask=inside, other=0) != 0)
    if lo is not None:
        keep = keep & (j - i[:, None] >= lo)
    if hi is not None:
        keep = keep & (j - i[:, None] <= hi)
    return tl.where(keep, score, float("-inf"))


@triton.jit
def score_scale(inverse, WITH_BIAS: tl.constexpr):
    """What the scores are to be multiplied with still."""
    if WITH_BIAS:
        return tl.full(inverse.shape, 1.0, tl.float32)
    else:
        return inverse


@triton.jit
def ended(m, s, scale, poisoned, row, live, lse_ptr):
    """1 / s of rows, NaN if poisoned and with mass; writes their lse where there is somewhere to."""
    inverse_s, lse = finish(m, s, scale)
    poisoned = poisoned & (s != 0.0)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, tl.where(poisoned, float("nan"), lse), mask=live)
    return tl.where(poisoned, float("nan"), inverse_s)


# ---- arguments ---------------------------------------------------------------------------------------------


def last_stride(tensor: torch.Tensor | None) -> int:
    """Elements from one column to the next; 0 without a tensor."""
    return 0 if tensor is None else tensor.stride(-1)


def fold_given(
    *tensors: torch.Tensor | None, separate_last: bool = False
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """`fold_rows` of the tensors that are there, and no strides for the others."""
    present = [tensor for tensor in tensors if tensor is not None]
    sizes, strides = fold_rows(*present, separate_last=separate_last)
    found = iter(strides)
    return sizes, [(0,) * len(sizes) if tensor is None else next(found) for tensor in tensors]
