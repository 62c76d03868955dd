"""torch's signature of attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import checks, masks
from .attention import attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, by `attention`: a drop-in.

    query (..., Hq, L, E), key (..., H, S, E), value (..., H, S, Ev) and what the arguments mean are torch's: leading
    dimensions broadcast, `is_causal` is upper-left aligned and excludes `attn_mask`, Hq may differ from H (a
    multiple) only with `enable_gqa`, and a row that sees nothing is 0. `attn_mask` is boolean (True = takes part) or
    floating, which is added to the scores and may take a gradient. `dropout_p` > 0 always applies; which weights it
    takes differs from torch's choice for the same seed.

    Raises:
        ValueError: a dropout_p that is no share, attn_mask beside is_causal, shapes that do not fit.
        TypeError: an attn_mask that is neither boolean nor of query's dtype or float32.

    >>> q = k = v = torch.randn(2, 4, 3, 8)
    >>> ours = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(ours, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)
    True
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        checks.tensor(name, x)
        if x.ndim < 2:
            raise ValueError(f"{name} must have at least 2 dimensions (..., L, E), got shape {tuple(x.shape)}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask must be None with is_causal=True, got both")
    if attn_mask is not None:
        got = attn_mask.dtype if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
        if got not in (torch.bool, torch.float32, query.dtype):
            raise TypeError(f"attn_mask must be a boolean tensor, or one of query's dtype or float32, got {got}")
    if not enable_gqa and query.ndim > 2 and key.ndim > 2 and query.shape[-3] != key.shape[-3]:
        if query.shape[-3] != 1 and key.shape[-3] != 1:
            raise ValueError(f"query must have key's {key.shape[-3]} heads without enable_gqa, got {query.shape[-3]}")

    def attend(q: Tensor, k: Tensor, v: Tensor, given: Tensor | None) -> Tensor:
        added = given is not None and given.dtype != torch.bool
        mask = masks.Causal("upper_left") if is_causal else None if added else given
        return attention(q, k, v, mask=mask, bias=given if added else None, scale=scale, dropout_p=dropout_p)

    if query.ndim == key.ndim == value.ndim == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
        if enable_gqa or query.shape[1] == key.shape[1] == value.shape[1]:
            if attn_mask is not None:
                checks.broadcastable("attn_mask", attn_mask, (*query.shape[:3], key.shape[2]), "the scores")
            return attend(query, key, value, attn_mask)
    # heads broadcast with the other leading dimensions, except that grouped ones stand apart
    apart = 3 if enable_gqa else 2
    leads = [x.shape[:-apart] for x in (query, key, value)]
    try:
        lead = torch.broadcast_shapes(*leads)
    except RuntimeError:
        shown = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"query, key and value must have leading dimensions that broadcast, got {shown}") from None
    rows = [x.expand(*lead, *x.shape[-apart:]) for x in (query, key, value)]
    rows = [x if x.ndim > 2 else x.unsqueeze(0) for x in rows]
    heads = rows[0].shape[:-2]
    batch = math.prod(heads[:-1])  # not -1, which torch cannot infer where another size is 0
    if attn_mask is not None:
        scores = (*lead, *query.shape[-apart:-1], key.shape[-2])
        checks.broadcastable("attn_mask", attn_mask, scores, "the scores")
        attn_mask = attn_mask.expand(scores).reshape(batch, heads[-1], *scores[-2:])
    q, k, v = (x.reshape(batch, *x.shape[-3:]) for x in rows)
    out = attend(q, k, v, attn_mask)
    return out.reshape(*lead, *query.shape[-apart:-1], value.shape[-1])
