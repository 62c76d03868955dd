"""The primitive: the state (m, s) of a row, as in kernels/softmax.py, and the merge that users have."""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, maxima and lse for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pivot(m: Tensor) -> Tensor:
    """What is subtracted for a maximum m: m itself, or 0 where inf - inf would turn a whole row into NaN."""
    return m.masked_fill(m.abs() == float("inf"), 0.0)


def update(m: Tensor, s: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Takes scores x (..., n) into the state m, s (..., 1): the new m and s, alpha (..., 1), weights p (..., n)."""
    m_new = torch.maximum(m, x.amax(-1, keepdim=True))
    at = pivot(m_new)
    alpha = torch.exp(m - at)
    p = torch.exp(x - at)
    return m_new, s * alpha + p.sum(-1, keepdim=True), alpha, p


def merge_states(m_a: Tensor, s_a: Tensor, m_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The state of two disjoint parts of a row, and the factors of what was summed over each."""
    m = torch.maximum(m_a, m_b)
    at = pivot(m)
    scale_a, scale_b = torch.exp(m_a - at), torch.exp(m_b - at)
    return m, s_a * scale_a + s_b * scale_b, scale_a, scale_b


def finish(m: Tensor, s: Tensor, scale: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """1 / s (0 for a row without mass, NaN for one with +inf in it) and the natural lse = scale * m + ln(s)."""
    inverse = torch.where(s == float("inf"), float("nan"), 1.0 / s).masked_fill(s == 0.0, 0.0)
    lse = (pivot(m) * scale + torch.log(s)).masked_fill(s == 0.0, NEG_INF)
    return inverse, lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the results over each; differentiable in all four."""
    a, b = lse_a.unsqueeze(-1), lse_b.unsqueeze(-1)
    # the result does not depend on where the exponentials are centred, so m takes no gradient
    m = torch.maximum(a, b).detach()
    at = pivot(m)
    scale_a, scale_b = torch.exp(a - at), torch.exp(b - at)
    s = scale_a + scale_b
    empty = s == 0.0
    mass = s.masked_fill(empty, 1.0)
    # what lies over no keys has no say, whatever stands in it
    out_a_or_0, out_b_or_0 = torch.where(a == NEG_INF, 0.0, out_a), torch.where(b == NEG_INF, 0.0, out_b)
    out = (out_a_or_0 * scale_a + out_b_or_0 * scale_b) / mass
    lse = (at + torch.log(mass)).masked_fill(empty, NEG_INF)
    return out.to(out_a.dtype), lse.squeeze(-1)
