"""The options of the logits kernels: a number for all rows, or a tensor of one entry a row."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

MAX_INVERSE = 1e38  # 1 / T stays finite, so that (x - m) / T is 0 at the maximum however small T is
MAX_INVERSE_WITH_BIAS = 1e30  # and x / T + bias stays finite too, for scores to 1e8
MIN_INVERSE = 1.2e-38  # and is normal, so that -inf / T is -inf however large T is
LARGEST: tl.constexpr = tl.constexpr(MAX_INVERSE)
LARGEST_WITH_BIAS: tl.constexpr = tl.constexpr(MAX_INVERSE_WITH_BIAS)
SMALLEST: tl.constexpr = tl.constexpr(MIN_INVERSE)


@triton.jit
def row_option(number, ptr, row, live, DTYPE: tl.constexpr):
    """An option of each row, as it is stored, or one number for all of them."""
    if ptr is not None:
        return tl.load(ptr + row, mask=live, other=1)
    else:
        return tl.zeros_like(row).to(DTYPE) + number


@triton.jit
def row_inverse(inverse, temperature_ptr, row, live, WITH_BIAS: tl.constexpr):
    """1 / T of each row, finite and positive, and which rows become NaN for a T that is NaN or negative."""
    if temperature_ptr is not None:
        MOST: tl.constexpr = LARGEST_WITH_BIAS if WITH_BIAS else LARGEST
        T = tl.load(temperature_ptr + row, mask=live, other=1.0).to(tl.float32)
        scale = tl.minimum(tl.maximum(1.0 / tl.where(T > 0.0, T, 1.0), SMALLEST), MOST)
        return tl.where(T == 0.0, MOST, scale), (T >= 0.0) == 0
    else:
        return tl.zeros_like(row).to(tl.float32) + inverse, row < 0


@triton.jit
def row_limits(
    top_k, top_k_ptr, top_p, top_p_ptr, min_p, min_p_ptr, row, live, N, poisoned,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """k, from 0 to N, top-p and min-p of each row, 0 if not given, and which rows become NaN for theirs."""
    k = tl.zeros_like(row).to(tl.int32)
    share = tl.zeros_like(row).to(tl.float32)
    least = share
    if TOP_K:
        k = tl.maximum(tl.minimum(row_option(top_k, top_k_ptr, row, live, tl.int32), N), 0).to(tl.int32)
    if TOP_P:
        share = row_option(top_p, top_p_ptr, row, live, tl.float32).to(tl.float32)
        poisoned = poisoned | ((share >= 0.0) == 0)
    if MIN_P:
        least = row_option(min_p, min_p_ptr, row, live, tl.float32).to(tl.float32)
        poisoned = poisoned | ((least >= 0.0) == 0)
        least = tl.minimum(least, 1.0)
    return k, share, least, poisoned


@triton.jit
def row_uniform(uniform_ptr, temperature_ptr, row, live):
    """The number from 0 to 1 that draws a row's token: 0, which draws the first of the largest, for a T of 0."""
    u = tl.load(uniform_ptr + row * 2, mask=live, other=0.0)
    if temperature_ptr is not None:
        u = tl.where(tl.load(temperature_ptr + row, mask=live, other=1.0) == 0.0, 0.0, u)
    return u


# ---- arguments ---------------------------------------------------------------------------------------------


Option = float | torch.Tensor | None


class Limits(NamedTuple):
    """What limits a row's scores to few: tensors of one entry a row, contiguous, and numbers where those are None."""

    tensors: tuple[torch.Tensor | None, ...]
    numbers: tuple[Hashable, ...]

    @classmethod
    def of(cls, x: torch.Tensor, top_k: Option, top_p: Option, min_p: Option) -> Limits:
        """Of options that are numbers, tensors (..., 1), or None."""
        pairs = [one_a_row(option, x) for option in (top_k, top_p, min_p)]
        numbers = [number for _, number in pairs]
        if numbers[1] is not None:
            # not above the number itself: 0.3 of 100 equals are 30 of them
            below = np.float32(numbers[1])
            numbers[1] = float(below if below <= numbers[1] else np.nextafter(below, np.float32(0)))
        return cls(tuple(tensor for tensor, _ in pairs), tuple(numbers))

    @property
    def given(self) -> dict[str, bool]:
        """The kernels' constants."""
        here = [t is not None or n is not None for t, n in zip(self.tensors, self.numbers, strict=True)]
        return dict(zip(("TOP_K", "TOP_P", "MIN_P"), here, strict=True))


def one_a_row(option: Option, x: torch.Tensor) -> tuple[torch.Tensor | None, float | None]:
    """A tensor of one entry for each row of x in their order, or a number; None for what is not given."""
    if isinstance(option, torch.Tensor):
        return option.expand(*x.shape[:-1], 1).contiguous(), None
    return None, option


def split_temperature(
    temperature: float | torch.Tensor, x: torch.Tensor, with_bias: bool
) -> tuple[torch.Tensor | None, float]:
    """A temperature a row, or 1 / T for all of them."""
    row_temperature, number = one_a_row(temperature, x)
    if number is None:
        return row_temperature, 1.0
    most = MAX_INVERSE_WITH_BIAS if with_bias else MAX_INVERSE
    return None, most if number == 0 else min(max(1.0 / number, MIN_INVERSE), most)
