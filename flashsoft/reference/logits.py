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


def top_p_keep(z: Tensor, p: Tensor, top_p: float | Tensor) -> Tensor:
    """True at the largest of each row, the lowest index first among equals, until their weights p reach top_p of all.

    NaN among the weights keeps everything.
    """
    order = torch.sort(z, dim=-1, descending=True, stable=True).indices
    weight = p.double().gather(-1, order)
    ahead = weight.cumsum(-1) - weight
    keep = (ahead < top_p * weight.sum(-1, keepdim=True)) | (torch.arange(z.shape[-1], device=z.device) == 0)
    keep |= weight.sum(-1, keepdim=True).isnan()
    return torch.empty_like(keep).scatter_(-1, order, keep)


class _Scores:
    """Scores z times `scale` a row, -inf where not kept, of x as an operator is given it; in x's wide dtype."""

    def __init__(
        self,
        x: Tensor,
        temperature: float | Tensor,
        scale: float | None,
        softcap: float | None,
        mask: Tensor | None,
        lo: int | None,
        hi: int | None,
        bias: Tensor | None,
    ) -> None:
        z = _raw_scores(x.to(wide(x.dtype)), scale, softcap)
        keep = torch.ones_like(z, dtype=torch.bool) if mask is None else mask
        if lo is not None or hi is not None:
            keep = keep & band(z.shape[-2], z.shape[-1], lo, hi, z.device)
        # with a bias x / T is a number of its own, and stays finite for scores to 1e8
        self.scale = _inverse_temperature(temperature, z.dtype, with_bias=bias is not None)
        if bias is not None:
            z = z * self.scale + bias.to(z.dtype)
            self.scale = torch.ones_like(self.scale) if isinstance(self.scale, Tensor) else 1.0
        self.z = z.masked_fill(~keep, NEG_INF)

    def weights(self) -> tuple[Tensor, Tensor]:
        """The largest z of each row (..., 1), and every score's weight relative to it."""
        z = self.z
        m = z.amax(-1, keepdim=True) if z.shape[-1] else z.new_full((*z.shape[:-1], 1), NEG_INF)
        return m, torch.exp((z - pivot(m)) * self.scale).masked_fill(z == NEG_INF, 0.0)

    def limit(
        self, top_k: int | Tensor | None, top_p: float | Tensor | None, min_p: float | Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`weights` of what top-k, top-p and min-p keep; what is chosen is chosen before z is scaled, in its order."""
        if top_k is not None:
            self.z = self.z.masked_fill(~top_k_keep(self.z, top_k), NEG_INF)
        m, p = self.weights()
        if top_p is not None:
            p = p.masked_fill(~top_p_keep(self.z, p, top_p), 0.0)
        if min_p is not None:
            p = p.masked_fill(p < min_p, 0.0)
        for share in (top_p, min_p):
            if isinstance(share, Tensor):
                p = p.masked_fill(~(share >= 0.0) & (p.sum(-1, keepdim=True) != 0.0), float("nan"))
        return m, p


def _raw_scores(x: Tensor, scale: float | None, softcap: float | None) -> Tensor:
    """x as it is divided by T."""
    x = x if scale is None else x * scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def fused_softmax_forward(
    x: Tensor,
    dtype: torch.dtype,
    temperature: float | Tensor,
    scale: float | None,
    softcap: float | None,
    mask: Tensor | None,
    lo: int | None,
    hi: int | None,
    bias: Tensor | None,
    top_k: int | Tensor | None,
    top_p: float | Tensor | None,
    min_p: float | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Softmax of softcap(scale * x) / temperature + bias over what mask, band, top-k, top-p and min-p keep; its lse.

    `temperature`, `top_k`, `top_p` and `min_p` tensors have x's shape but for a last dimension of 1, `mask` has x's
    shape, `bias` its dimensions, some of size 1, and the band lies on the last two. A row of which nothing is kept is
    0, its lse -inf.
    """
    scores = _Scores(x, temperature, scale, softcap, mask, lo, hi, bias)
    m, p = scores.limit(top_k, top_p, min_p)
    inverse, lse = finish(m, p.sum(-1, keepdim=True), scores.scale)
    return torch.empty_like(x, dtype=dtype).copy_(p * inverse), lse.squeeze(-1)


def sample_forward(
    x: Tensor,
    uniform: Tensor,
    temperature: float | Tensor,
    scale: float | None,
    softcap: float | None,
    mask: Tensor | None,
    lo: int | None,
    hi: int | None,
    bias: Tensor | None,
    top_k: int | Tensor | None,
    top_p: float | Tensor | None,
    min_p: float | Tensor | None,
) -> Tensor:
    """The first column of each row, int64, where the sum of `fused_softmax_forward` so far passes `uniform`.

    uniform is (..., 2), from 0 to 1, of which the first is used; a temperature of 0 takes the first of the largest.
    -1 for a row that has no distribution.
    """
    scores = _Scores(x, temperature, scale, softcap, mask, lo, hi, bias)
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:-1], -1, dtype=torch.int64)
    _, p = scores.limit(top_k, top_p, min_p)
    p = p.double()
    total = p.sum(-1, keepdim=True)
    goal = uniform[..., :1].double() * total
    goal = goal.masked_fill(torch.as_tensor(temperature, device=x.device) == 0.0, 0.0)
    passed = (p.cumsum(-1) > goal) & (p > 0.0)
    last = p.shape[-1] - 1 - (p > 0.0).flip(-1).int().argmax(-1)
    token = torch.where(passed.any(-1), passed.int().argmax(-1), last)
    return token.masked_fill(~((total > 0.0) & (total < float("inf"))).squeeze(-1), -1)


def fused_softmax_backward(
    dy: Tensor,
    dlse: Tensor | None,
    x: Tensor,
    y: Tensor,
    temperature: float | Tensor,
    scale: float | None,
    softcap: float | None,
    bias: Tensor | None,
    need_temperature: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, dtemperature and dbias (shaped as bias); the last two None unless needed (bias None: not needed).

    With c = softcap(scale * x) and z = c / T + bias: dz = y * (dy - sum(y * dy) + dlse), dc = dz / T and
    dT = -sum(dz * c) / T^2. What was not kept has y = 0, so it gets no gradient, and what stands there is not read.
    """
    y_wide = y.to(wide(y.dtype))
    kept = y_wide != 0.0
    dy_wide = torch.where(kept, dy.to(y_wide.dtype), 0.0)
    shift = (y_wide * dy_wide).sum(-1, keepdim=True)
    if dlse is not None:
        shift = shift - dlse.unsqueeze(-1)
    dz = y_wide * torch.where(kept, dy_wide - shift, 0.0)
    inverse = _inverse_temperature(temperature, y_wide.dtype)
    x_kept = torch.where(kept, x.to(dz.dtype), 0.0)
    dc = dz * inverse
    if softcap is not None:
        dc = dc * (1.0 - torch.tanh((x_kept if scale is None else x_kept * scale) / softcap).square())
    dx = torch.empty_like(x).copy_(dc if scale is None else dc * scale)
    dtemperature = None
    if need_temperature:
        assert isinstance(temperature, Tensor)
        rows = (dz * _raw_scores(x_kept, scale, softcap)).sum(-1, keepdim=True)
        dtemperature = (-rows * inverse * inverse).to(temperature.dtype)
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
