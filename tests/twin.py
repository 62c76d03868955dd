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
) -> oracle.Attention:
    """By SDPA's math backend, and lse by torch.logsumexp of float32 scores. Arguments as the oracle's."""
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
