"""torch's own results in the same dtype: the yardstick of tolerances.py."""

from __future__ import annotations

import oracle
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    scale: float | None = None,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    terms: oracle.Terms | None = None,
) -> oracle.Attention:
    """By SDPA's math backend, and lse by torch.logsumexp of float32 scores. Arguments as the oracle's."""
    if terms is not None:
        return _with_terms(q, k, v, keep, scale, dout, dlse, terms)
    (B, Hq, Sq, D), Hkv, Sk = q.shape, k.shape[1], k.shape[2]
    scale = D**-0.5 if scale is None else scale
    mask = torch.ones(B, Hq, Sq, Sk, dtype=torch.bool, device=q.device)
    kc, vc = k.detach(), v.detach()
    if keep is not None:
        mask = mask & keep.to(q.device)
        seen = mask.view(B, Hkv, Hq // Hkv, Sq, Sk).any(2).any(-2).unsqueeze(-1)
        kc, vc = torch.where(seen, kc, 0.0), torch.where(seen, vc, 0.0)
    leaves = [t.detach().clone().requires_grad_() for t in (q, kc, vc)]
    qg, kg, vg = leaves[0], *(t.repeat_interleave(Hq // Hkv, 1) for t in leaves[1:])
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(qg, kg, vg, attn_mask=mask, scale=scale)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (qg.to(wide) @ kg.to(wide).mT * scale).masked_fill(~mask, oracle.NEG_INF)
    # rows without a key are kept out of logsumexp, whose gradient there is NaN
    dead = ~mask.any(-1)
    lse = scores.new_zeros(dead.shape)
    if Sk:
        lse = torch.logsumexp(scores.masked_fill(dead.unsqueeze(-1), 0.0), -1)
    lse = lse.masked_fill(dead, oracle.NEG_INF)
    if dout is None:
        return oracle.Attention(out.detach(), lse.detach())
    targets, grads = [out], [dout]
    if dlse is not None and Sk:
        targets, grads = [out, lse], [dout, dlse.to(wide)]
    dq, dk, dv = torch.autograd.grad(targets, leaves, grads)
    return oracle.Attention(out.detach(), lse.detach(), dq, dk, dv)


def _with_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    scale: float | None,
    dout: Tensor | None,
    dlse: Tensor | None,
    terms: oracle.Terms,
) -> oracle.Attention:
    """What SDPA's math backend has no argument for, as it computes: in float32 between inputs and results."""
    (B, Hq, Sq, D), Hkv, Sk = q.shape, k.shape[1], k.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = D**-0.5 if scale is None else scale
    mask = torch.ones(B, Hq, Sq, Sk, dtype=torch.bool, device=q.device)
    qc, kc, vc = q.detach(), k.detach(), v.detach()
    if keep is not None:
        mask = mask & keep.to(q.device)
        seen = mask.view(B, Hkv, Hq // Hkv, Sq, Sk).any(2).any(-2).unsqueeze(-1)
        kc, vc = torch.where(seen, kc, 0.0), torch.where(seen, vc, 0.0)
        qc = torch.where(mask.any(-1, keepdim=True), qc, 0.0)
    dead = ~mask.any(-1, keepdim=True)
    given = (qc, kc, vc, terms.bias, terms.slopes, terms.sink, terms.factor)
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in given]
    qg, kg, vg, bias, slopes, sink, factor = (None if t is None else t.to(wide) for t in leaves)
    assert qg is not None and kg is not None and vg is not None
    x = (qg * scale) @ kg.repeat_interleave(Hq // Hkv, 1).mT
    if factor is not None:
        x = x * factor[:, None, None]
    if terms.softcap is not None:
        x = terms.softcap * torch.tanh(x / terms.softcap)
    if bias is not None:
        x = x + bias
    if slopes is not None:
        x = x - slopes[..., None, None] * oracle.distance(Sq, Sk).to(x)
    # a row without a score would be NaN: it is a row of zeros until the end
    alone = dead if sink is None else torch.zeros_like(dead)
    x = torch.where(alone, 0.0, x.masked_fill(~mask, oracle.NEG_INF))
    if sink is not None:
        x = torch.cat((x, sink[:, None, None].expand(B, Hq, Sq, 1)), -1)
    lse = torch.logsumexp(x, -1) if x.shape[-1] else x.new_full(x.shape[:-1], oracle.NEG_INF)
    p = torch.softmax(x, -1)[..., :Sk]
    p = p if terms.drop is None else p * terms.drop.to(p)
    out = torch.where(dead, 0.0, p @ vg.repeat_interleave(Hq // Hkv, 1)).to(q.dtype)
    lse = lse.masked_fill(alone.squeeze(-1), oracle.NEG_INF)
    if dout is None:
        return oracle.Attention(out.detach(), lse.detach())
    targets, grads = [out], [torch.where(dead, 0.0, dout)]
    if dlse is not None and lse.requires_grad:
        targets, grads = [out, lse], [grads[0], torch.where(alone.squeeze(-1), 0.0, dlse.to(wide))]
    wanted = [t for t in leaves if t is not None]
    made = iter(torch.autograd.grad(targets, wanted, grads, allow_unused=True, materialize_grads=True))
    return oracle.Attention(out.detach(), lse.detach(), *(None if t is None else next(made) for t in leaves))
