"""Fused softmax of logits, and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import band
from .softmax import NEG_INF, finish, pivot, wide


def top_k_keep(x: Tensor, top_k: int | Tensor) -> Tensor:
    """True at the k largest of each row, the lowest index first among equals; `top_k` may be (..., 1)."""
    order = torch.sort(x, dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(x.shape[-1], device=x.device).expand_as(order))
    return rank < top_k


def fused_softmax_forward(
    x: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    lo: int | None,
    hi: int | None,
    bias: Tensor | None,
    top_k: int | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Softmax of x / temperature + bias over what mask, band and top-k keep, and its lse.

    `temperature` and `top_k` tensors have x's shape but for a last dimension of 1, `mask` has x's shape, `bias` its
    dimensions, some of size 1, and the band lies on the last two. A row of which nothing is kept is 0, its lse -inf.
    """
    z = x.to(wide(x.dtype))
    keep = torch.ones_like(z, dtype=torch.bool) if mask is None else mask
    if lo is not None or hi is not None:
        keep = keep & band(z.shape[-2], z.shape[-1], lo, hi, z.device)
    # with a bias x / T is a number of its own, and stays finite for scores to 1e8
    scale = _inverse_temperature(temperature, z.dtype, with_bias=bias is not None)
    if bias is not None:
        z, scale = z * scale + bias.to(z.dtype), torch.ones_like(scale) if isinstance(scale, Tensor) else 1.0
    z = z.masked_fill(~keep, NEG_INF)
    if top_k is not None:
        # chosen before the scale: it keeps the order, and rounding could make equals of what differs
        z = z.masked_fill(~top_k_keep(z, top_k), NEG_INF)
    m = z.amax(-1, keepdim=True) if z.shape[-1] else z.new_full((*z.shape[:-1], 1), NEG_INF)
    p = torch.exp((z - pivot(m)) * scale).masked_fill(z == NEG_INF, 0.0)
    inverse, lse = finish(m, p.sum(-1, keepdim=True), scale)
    return torch.empty_like(x).copy_(p * inverse), lse.squeeze(-1)


def fused_softmax_backward(
    dy: Tensor,
    dlse: Tensor | None,
    x: Tensor,
    y: Tensor,
    temperature: float | Tensor,
    bias: Tensor | None,
    need_temperature: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, dtemperature and dbias (shaped as bias); the last two None unless needed (bias None: not needed).

    With z = x / T + bias: dz = y * (dy - sum(y * dy) + dlse), dx = dz / T, dT = -sum(dz * x) / T^2. What was not
    kept has y = 0, so it gets no gradient, and what stands there is not read.
    """
    y_wide = y.to(wide(y.dtype))
    kept = y_wide != 0.0
    dy_wide = torch.where(kept, dy.to(y_wide.dtype), 0.0)
    shift = (y_wide * dy_wide).sum(-1, keepdim=True)
    if dlse is not None:
        shift = shift - dlse.unsqueeze(-1)
    dz = y_wide * torch.where(kept, dy_wide - shift, 0.0)
    scale = _inverse_temperature(temperature, y_wide.dtype)
    dx = torch.empty_like(x).copy_(dz * scale)
    dtemperature = None
    if need_temperature:
        assert isinstance(temperature, Tensor)
        rows = (dz * torch.where(kept, x.to(dz.dtype), 0.0)).sum(-1, keepdim=True)
        dtemperature = (-rows * scale * scale).to(temperature.dtype)
    dbias = None if bias is None else dz.sum_to_size(bias.shape).to(bias.dtype)
    return dx, dtemperature, dbias


def _inverse_temperature(temperature: float | Tensor, dtype: torch.dtype, with_bias: bool = False) -> float | Tensor:
    """1 / T for scores of `dtype`, NaN for T < 0; finite, so that (x - m) / T is 0 at the maximum however small T is,
    and x / T + bias is a number; not 0, so that -inf / T is -inf."""
    least = torch.finfo(dtype).tiny
    most = (1e30 if with_bias else 1e38) if dtype == torch.float32 else (1e150 if with_bias else 1e300)
    if isinstance(temperature, Tensor):
        T = temperature.to(dtype)
        return (1.0 / T.abs()).clamp(least, most).masked_fill(T < 0.0, float("nan"))
    return max(min(1.0 / temperature, most), least)
