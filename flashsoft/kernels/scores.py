"""Scores of the fused logits kernels: x, temperature, bias, mask and band, a tile at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tiles import fold_rows, row_offset

MAX_INVERSE = 1e38  # 1 / T stays finite, so that (x - m) / T is 0 at the maximum however small T is
MAX_INVERSE_WITH_BIAS = 1e30  # and x / T + bias stays finite too, for scores to 1e8
MIN_INVERSE = 1.2e-38  # and is normal, so that -inf / T is -inf however large T is
LARGEST: tl.constexpr = tl.constexpr(MAX_INVERSE)
LARGEST_WITH_BIAS: tl.constexpr = tl.constexpr(MAX_INVERSE_WITH_BIAS)
SMALLEST: tl.constexpr = tl.constexpr(MIN_INVERSE)


@triton.jit
def row_inverse(inverse, temperature_ptr, row, live, sizes, strides, WITH_BIAS: tl.constexpr):
    """1 / T of each row, finite and positive, and which rows become NaN for a T that is NaN or negative."""
    if temperature_ptr is not None:
        MOST: tl.constexpr = LARGEST_WITH_BIAS if WITH_BIAS else LARGEST
        T = tl.load(temperature_ptr + row_offset(row, sizes, strides), mask=live, other=1.0).to(tl.float32)
        scale = tl.minimum(tl.maximum(1.0 / tl.where(T > 0.0, T, 1.0), SMALLEST), MOST)
        return tl.where(T == 0.0, MOST, scale), (T >= 0.0) == 0
    else:
        return tl.zeros_like(row).to(tl.float32) + inverse, row < 0


@triton.jit
def score_tile(
    columns, inside, x_ptr, x_at, x_step, mask_ptr, mask_at, mask_step, bias_ptr, bias_at, bias_step,
    inverse, i, lo, hi,
):  # fmt: skip
    """Scores (rows, columns), fp32; -inf where not `inside`, masked, or out of the band lo <= j - i <= hi.

    With a bias they are x / T + bias, otherwise x alone: equals and order are then those of x. What is not
    kept is selected away, so that nothing that stands there matters. Rows begin at offsets x_at, mask_at, ...
    """
    j = columns[None, :]
    wide_j = j.to(tl.int64)
    score = tl.load(x_ptr + (x_at[:, None] + wide_j * x_step), mask=inside, other=0.0).to(tl.float32)
    keep = inside
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + (bias_at[:, None] + wide_j * bias_step), mask=inside, other=0.0)
        score = score * inverse[:, None] + bias.to(tl.float32)
    if mask_ptr is not None:
        keep = keep & (tl.load(mask_ptr + (mask_at[:, None] + wide_j * mask_step), mask=inside, other=0) != 0)
    if lo is not None:
        keep = keep & (j - i[:, None] >= lo)
    if hi is not None:
        keep = keep & (j - i[:, None] <= hi)
    return tl.where(keep, score, float("-inf"))


@triton.jit
def store_lse(lse_ptr, row, live, lse, poisoned, s):
    """Writes lse, NaN for a row with mass and without a temperature; returns which rows those are."""
    poisoned = poisoned & (s != 0.0)
    tl.store(lse_ptr + row, tl.where(poisoned, float("nan"), lse), mask=live)
    return poisoned


# ---- arguments ---------------------------------------------------------------------------------------------


def split_temperature(temperature: float | torch.Tensor, with_bias: bool) -> tuple[torch.Tensor | None, float]:
    """A temperature a row, or 1 / T for all of them."""
    if isinstance(temperature, torch.Tensor):
        return temperature, 1.0
    most = MAX_INVERSE_WITH_BIAS if with_bias else MAX_INVERSE
    return None, min(max(1.0 / temperature, MIN_INVERSE), most)


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
