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
    dbias: Tensor | None = None
    dslopes: Tensor | None = None
    dsink: Tensor | None = None
    dfactor: Tensor | None = None


@dataclass(frozen=True)
class Terms:
    """Of the scores: bias (any that broadcasts), slopes (B or 1, Hq), sink (Hq,), factor (Hq,), and a softcap.

    drop: what dropout multiplies weights with, (B, Hq, Sq, Sk).
    """

    bias: Tensor | None = None
    slopes: Tensor | None = None
    sink: Tensor | None = None
    factor: Tensor | None = None
    softcap: float | None = None
    drop: Tensor | None = None

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Terms:
        tensors = (self.bias, self.slopes, self.sink, self.factor)
        moved = (None if t is None else t.detach().to(device, dtype) for t in tensors)
        return Terms(*moved, self.softcap, None if self.drop is None else self.drop.to(device, dtype))


def distance(Sq: int, Sk: int) -> Tensor:
    """|i + Sk - Sq - j|: 0 on the diagonal that ends in the last query and key."""
    return torch.tensor([[abs(i + Sk - Sq - j) for j in range(Sk)] for i in range(Sq)], dtype=F64).view(Sq, Sk)


def reduced(t: Tensor, like: Tensor) -> Tensor:
    """Summed over what `like` is broadcast along."""
    return t.sum_to_size(like.shape)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    scale: float | None = None,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    terms: Terms | None = None,
) -> tuple[Attention, Attention]:
    """Values and magnitudes, on the CPU in float64, written out without autograd.

    `keep` broadcasts to (B, Hq, Sq, Sk). Keys that no query of a head may see are left out by zeroing them.
    Gradients are for `dout`, and `dlse` where given.
    """
    # exponents are rounded in float32 (float64), in whatever dtype the results are stored
    fine = 1.0 if q.dtype == F64 else torch.finfo(torch.float32).eps / torch.finfo(q.dtype).eps
    q, k, v = (t.detach().cpu().to(F64) for t in (q, k, v))
    terms = (terms or Terms()).to("cpu", F64)
    (B, Hq, Sq, D), Hkv, Sk = q.shape, k.shape[1], k.shape[2]
    group = Hq // Hkv
    scale = D**-0.5 if scale is None else scale
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = torch.ones(B, Hq, Sq, Sk, dtype=torch.bool)
    if keep is not None:
        mask &= keep.cpu()
        seen = mask.any(-2).unsqueeze(-1)
        k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
        q = torch.where(mask.any(-1, keepdim=True), q, 0.0)
    factor = torch.ones(Hq, 1, 1, dtype=F64) if terms.factor is None else terms.factor[:, None, None]
    x = scale * factor * (q @ k.mT)
    slope = slope_size = torch.ones((), dtype=F64)
    if terms.softcap is not None:
        capped = torch.tanh(x / terms.softcap)
        x, slope = terms.softcap * capped, 1.0 - capped.square()
        # 1 - tanh^2 cancels
        slope_size = (slope.square() + (2.0 * fine * capped.square()).square()).sqrt()
    parts = [x]
    if terms.bias is not None:
        parts.append(terms.bias.expand(B, Hq, Sq, Sk))
    if terms.slopes is not None:
        parts.append(-terms.slopes[..., None, None] * distance(Sq, Sk))
    # the roundings of a score are of the size of what it is added up from
    x_size = parts[0].abs() if len(parts) == 1 else sum(part.square() for part in parts).sqrt()
    x_size = torch.where(mask, x_size, 0.0)
    x = torch.where(mask, sum(parts[1:], parts[0]), NEG_INF)
    if terms.sink is None:
        p, lse = softmax(x)
    else:
        p, lse = softmax(torch.cat((x, terms.sink[:, None, None].expand(B, Hq, Sq, 1)), -1))
        p, weight = p[..., :-1], p[..., -1]
    drop = torch.ones((), dtype=F64) if terms.drop is None else terms.drop
    out = (p * drop) @ v
    # rounding a score x moves its weight by eps * |x| of itself
    p_size = p * (1.0 + (fine * torch.where(x == NEG_INF, 0.0, x_size)).square()).sqrt()
    raw = torch.where(mask, (scale * factor).abs() * (q.square() @ k.square().mT).sqrt(), 0.0)
    peak = raw if len(parts) == 1 else (raw.square() + torch.where(x == NEG_INF, 0.0, x_size).square()).sqrt()
    value = Attention(out, lse)
    lse_size = lse.abs() + peak.amax(-1) if Sk else torch.zeros_like(lse)
    size = Attention(((p_size * drop).square() @ v.square()).sqrt(), lse_size)
    if dout is None:
        return value, size
    do = dout.detach().cpu().to(F64)
    dl = torch.zeros_like(lse) if dlse is None else dlse.detach().cpu().to(F64)
    do = torch.where(mask.any(-1, keepdim=True) & (lse != NEG_INF).unsqueeze(-1), do, 0.0)
    dl = torch.where(lse == NEG_INF, 0.0, dl)
    delta = (out * do).sum(-1) - dl
    ds = p * (drop * (do @ v.mT) - delta.unsqueeze(-1))
    # the two terms of ds can cancel: its error is that of the larger
    delta_size = ((out * do).square().sum(-1) + dl.square()).sqrt().unsqueeze(-1)
    # the backward recomputes p as exp(x - lse), and rounds lse too
    seen_lse = torch.where(lse == NEG_INF, 0.0, lse).unsqueeze(-1)
    seen_x = torch.where(x == NEG_INF, 0.0, x_size)
    p_size = p * (1.0 + (fine * seen_x).square() + (fine * seen_lse).square()).sqrt()
    ds_size = p_size * (drop.square() * (do.square() @ v.square().mT) + delta_size.square()).sqrt()

    def fold(t: Tensor) -> Tensor:
        return t.view(B, Hkv, group, Sk, t.shape[-1]).sum(2)

    def fold_size(t: Tensor) -> Tensor:
        return fold(t.square()).sqrt()

    def sizes(per_score: Tensor, like: Tensor) -> Tensor:
        """Of the sum of per_score * ds: the error of a row's delta is common to all its keys, and does not average."""
        along_keys = like.ndim == 0 or like.shape[-1] == 1
        common = delta_size * (p * per_score).sum(-1, keepdim=True) if along_keys else torch.zeros_like(delta_size)
        wide = like if like.ndim else like.expand(1, 1, 1, 1)
        rows = reduced(common.square(), wide) if along_keys else 0.0
        return (reduced((ds_size * per_score).square(), wide) + rows).sqrt()

    grads, grad_sizes = {}, {}
    if terms.bias is not None:
        like = terms.bias.reshape((1,) * (4 - terms.bias.ndim) + terms.bias.shape)
        grads["dbias"] = reduced(ds, like).view(terms.bias.shape)
        grad_sizes["dbias"] = sizes(torch.ones_like(ds), like).view(terms.bias.shape)
    if terms.slopes is not None:
        like = terms.slopes[..., None, None]
        grads["dslopes"] = reduced(-ds * distance(Sq, Sk), like).view(terms.slopes.shape)
        grad_sizes["dslopes"] = sizes(distance(Sq, Sk).expand_as(ds), like).view(terms.slopes.shape)
    if terms.sink is not None:
        weight_size = weight * (1.0 + (fine * lse).square() + (fine * terms.sink[:, None]).square()).sqrt()
        grads["dsink"] = -(torch.where(weight == 0, 0.0, weight * delta)).sum((0, 2))
        grad_sizes["dsink"] = (weight_size * delta_size.squeeze(-1)).square().sum((0, 2)).sqrt()
    ds, ds_size = ds * slope, ds_size * slope_size
    if terms.factor is not None:
        like = factor.unsqueeze(0)
        grads["dfactor"] = reduced(ds * scale * (q @ k.mT), like).view(Hq)
        grad_sizes["dfactor"] = sizes(slope * abs(scale) * (q.square() @ k.square().mT).sqrt(), like).view(Hq)
    # the error of a row's delta is common to all its keys, and so does not average out over them
    dq_size = (ds_size.square() @ k.square() + (delta_size * ((p * slope) @ k)).square()).sqrt()
    by = (scale * factor).abs()
    value = Attention(
        out, lse, scale * factor * (ds @ k), fold(scale * factor * (ds.mT @ q)), fold((p * drop).mT @ do), **grads
    )
    size = Attention(
        size.out,
        size.lse,
        by * dq_size,
        fold_size(by * (ds_size.square().mT @ q.square()).sqrt()),
        fold_size(((p_size * drop).square().mT @ do.square()).sqrt()),
        **grad_sizes,
    )
    return value, size
