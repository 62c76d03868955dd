"""What results should be, in float64 and the plainest torch, from definitions and not from the package.

Each oracle also gives the magnitude of what was added up to each result: the root of the sum of squares of
its terms. Rounding moves a result by about one ulp of that (see tolerances.py), even where the terms cancel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

F64 = torch.float64
NEG_INF = float("-inf")


def band(Sq: int, Sk: int, left: int | None, right: int | None, offset: int) -> Tensor:
    """True where i + offset - left <= j <= i + offset + right; None = no limit."""
    keep = torch.ones(Sq, Sk, dtype=torch.bool)
    for i in range(Sq):
        if left is not None:
            keep[i, : max(i + offset - left, 0)] = False
        if right is not None:
            keep[i, max(i + offset + right + 1, 0) :] = False
    return keep


def causal(Sq: int, Sk: int) -> Tensor:
    """Lower right: the last query sees every key."""
    return band(Sq, Sk, None, 0, Sk - Sq)


def softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """(p, lse) of rows, by definition; a row without mass is 0 and -inf."""
    if x.shape[-1] == 0:
        return x.clone(), x.new_full(x.shape[:-1], NEG_INF)
    m = x.detach().amax(-1, keepdim=True)
    m = torch.where(m == NEG_INF, 0.0, m)
    e = torch.exp(x - m)
    s = e.sum(-1, keepdim=True)
    empty = s == 0
    p = e / torch.where(empty, 1.0, s)
    lse = torch.where(empty, NEG_INF, m + torch.log(torch.where(empty, 1.0, s)))
    return p, lse.squeeze(-1)


def top_k_keep(x: Tensor, k: int | Tensor) -> Tensor:
    """True at the first k places of each row's stable descending sort; k may be (..., 1)."""
    order = torch.argsort(x, dim=-1, descending=True, stable=True)
    rank = torch.argsort(order, dim=-1)
    return rank < k


def top_p_keep(z: Tensor, top_p: float | Tensor) -> Tensor:
    """True at the first places of each row's stable descending sort, until their sum is top_p of all."""
    order = torch.argsort(z, dim=-1, descending=True, stable=True)
    p = softmax(z)[0].gather(-1, order)
    before = p.cumsum(-1) - p
    first = torch.arange(z.shape[-1]) == 0
    return torch.zeros_like(z, dtype=torch.bool).scatter(-1, order, (before < top_p) | first)


def fused_softmax(
    x: Tensor,
    temperature: float | Tensor = 1.0,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(p, lse) along the last dimension, in the order of the arguments of `flashsoft.fused_softmax`; differentiable."""
    z = x * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / temperature
    if bias is not None:
        z = z + bias
    if keep is not None:
        z = torch.where(keep, z, NEG_INF)
    if top_k is not None:
        z = torch.where(top_k_keep(z.detach(), top_k), z, NEG_INF)
    if top_p is not None:
        z = torch.where(top_p_keep(z.detach(), top_p), z, NEG_INF)
    if min_p is not None:
        p = softmax(z.detach())[0]
        z = torch.where(p >= min_p * p.amax(-1, keepdim=True), z, NEG_INF)
    return softmax(z)


@dataclass(frozen=True)
class Attention:
    """Results of attention, or their magnitudes."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    scale: float | None = None,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
) -> tuple[Attention, Attention]:
    """Values and magnitudes, on the CPU in float64, written out without autograd.

    `keep` broadcasts to (B, Hq, Sq, Sk). Keys that no query of a head may see are left out by zeroing them.
    Gradients are for `dout`, and `dlse` where given.
    """
    # exponents are rounded in float32 (float64), in whatever dtype the results are stored
    fine = 1.0 if q.dtype == F64 else torch.finfo(torch.float32).eps / torch.finfo(q.dtype).eps
    q, k, v = (t.detach().cpu().to(F64) for t in (q, k, v))
    (B, Hq, Sq, D), Hkv, Sk = q.shape, k.shape[1], k.shape[2]
    group = Hq // Hkv
    scale = D**-0.5 if scale is None else scale
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = torch.ones(B, Hq, Sq, Sk, dtype=torch.bool)
    if keep is not None:
        mask &= keep.cpu()
        seen = mask.any(-2).unsqueeze(-1)
        k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
    x = torch.where(mask, scale * (q @ k.mT), NEG_INF)
    p, lse = softmax(x)
    out = p @ v
    x_seen = torch.where(mask, x, 0.0)
    # rounding a score x moves its weight by eps * |x| of itself
    p_size = p * (1.0 + (fine * x_seen).square()).sqrt()
    peak = torch.where(mask, abs(scale) * (q.square() @ k.square().mT).sqrt(), 0.0)
    value = Attention(out, lse)
    size = Attention((p_size.square() @ v.square()).sqrt(), lse.abs() + peak.amax(-1) if Sk else torch.zeros_like(lse))
    if dout is None:
        return value, size
    do = dout.detach().cpu().to(F64)
    dl = torch.zeros_like(lse) if dlse is None else dlse.detach().cpu().to(F64)
    do = torch.where((lse == NEG_INF).unsqueeze(-1), 0.0, do)
    dl = torch.where(lse == NEG_INF, 0.0, dl)
    delta = (out * do).sum(-1) - dl
    ds = p * (do @ v.mT - delta.unsqueeze(-1))
    # the two terms of ds can cancel: its error is that of the larger
    delta_size = ((out * do).square().sum(-1) + dl.square()).sqrt().unsqueeze(-1)
    # the backward recomputes p as exp(x - lse), and rounds lse too
    seen_lse = torch.where(lse == NEG_INF, 0.0, lse).unsqueeze(-1)
    p_size = p * (1.0 + (fine * x_seen).square() + (fine * seen_lse).square()).sqrt()
    ds_size = p_size * (do.square() @ v.square().mT + delta_size.square()).sqrt()

    def fold(t: Tensor) -> Tensor:
        return t.view(B, Hkv, group, Sk, -1).sum(2)

    def fold_size(t: Tensor) -> Tensor:
        return fold(t.square()).sqrt()

    # the error of a row's delta is common to all its keys, and so does not average out over them
    dq_size = abs(scale) * (ds_size.square() @ k.square() + (delta_size * (p @ k)).square()).sqrt()
    value = Attention(out, lse, scale * (ds @ k), fold(scale * (ds.mT @ q)), fold(p.mT @ do))
    size = Attention(
        size.out,
        size.lse,
        dq_size,
        fold_size(abs(scale) * (ds_size.square().mT @ q.square()).sqrt()),
        fold_size((p_size.square().mT @ do.square()).sqrt()),
    )
    return value, size
