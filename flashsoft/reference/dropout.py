"""Philox4x32-7: random words that a place and a seed decide, for the dropout of weights.

The words are those of `tl.philox(seed, j // 4, i, b * Hq + h, 0, n_rounds=7)`, of which column j takes number j % 4.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The high and low words of a * b, in halves of 16 bits so that int64 holds every step."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return (high >> 16) & MASK, ((high << 16) | (low & 0xFFFF)) & MASK


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words for each counter (c0, c1, c2, c3): int64 tensors of values below 2^32. seed: int64, of one element."""
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(ROUNDS):
        high_0, low_0 = _product(MULTIPLIERS[0], c0)
        high_1, low_1 = _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + INCREMENTS[0]) & MASK, (k1 + INCREMENTS[1]) & MASK
    return c0, c1, c2, c3


def threshold(dropout_p: float) -> int:
    """Words below it drop their weight."""
    return min(round(dropout_p * 2**32), MASK)


def kept(seed: Tensor, dropout_p: float, heads: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """What to multiply weights with, float32 (*heads.shape, rows, columns): 0 or 1 / (1 - dropout_p).

    `heads` holds b * Hq + h.
    """
    (i0, i1), (j0, j1) = rows, columns
    first, last = j0 // 4, (j1 + 3) // 4
    c0 = torch.arange(first, last, device=seed.device)
    c1 = torch.arange(i0, i1, device=seed.device).unsqueeze(-1)
    words = philox(seed, *torch.broadcast_tensors(c0, c1, heads[..., None, None], seed.new_zeros(())))
    word = torch.stack(words, -1).flatten(-2)[..., j0 - 4 * first : j1 - 4 * first]
    share = 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)
    return torch.where(word >= threshold(dropout_p), share, 0.0)
