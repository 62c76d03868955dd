"""Attention, and what belongs to it: torch's signature, the merge of partial results, and which backend runs."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from .. import checks, direct, dispatch, masks, ops
from ..masks import MaskLike
from ..reference import softmax as law
from .autocast import autocast

HALF = (torch.float16, torch.bfloat16)  # float32 attention also depends on what torch allows its products to be


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: MaskLike = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: MaskLike = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: MaskLike = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query @ key^T) @ value over what `mask` keeps, in O(S) memory, forward and backward.

    Args:
        query: (B, Hq, Sq, D), any strides; float32, float16, bfloat16 or float64 (under autocast, cast to its
            dtype). D and Dv from 1 to 256.
        key: (B, Hkv, Sk, D), Hq a multiple of Hkv: query head h reads key head h // (Hq / Hkv).
        value: (B, Hkv, Sk, Dv).
        mask: `Causal()`, `Window(...)`, a boolean tensor broadcastable to (B, Hq, Sq, Sk) with True = takes part
            (as in `scaled_dot_product_attention`, the opposite of `masked_fill`), or several joined with `&`.
        scale: any finite number; 1 / sqrt(D) by default.
        return_lse: also return the natural logsumexp of each query's scores, float32 (B, Hq, Sq). Differentiable.
        backend: run on this backend or raise; see `explain`.

    Returns:
        out (B, Hq, Sq, Dv); in memory (B, Sq, Hq, Dv) if query's heads lie inside its rows. A query with
        nothing to attend to gets out 0, lse -inf and gradients 0. A key that is masked for every query never
        leaks, whatever it holds.

    float32 is computed in full float32 unless torch's matmul precision allows TF32. The same inputs give the same
    bits, forward and backward. Differentiable once.

    Raises:
        ValueError: shapes, devices or head counts that do not fit, a head size over 256, a scale not finite.
        TypeError: dtypes that differ or are not floating, a mask that is not boolean.

    Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.

    >>> q, k, v = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), torch.ones(1, 2, 3, 8)
    >>> out, lse = attention(q, k, v, mask=masks.Causal(), return_lse=True)
    >>> lse[0, 0]
    tensor([0.0000, 0.6931, 1.0986])
    """
    query, key, value = autocast(query, key, value)
    if masks.banded(mask) and getattr(query, "dtype", None) in HALF:
        out, lse = direct.again(_attention, (query, key, value), mask, scale, backend)
    else:
        out, lse = _attention(query, key, value, mask, scale, backend)
    return (out, lse) if return_lse else out


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: MaskLike, scale: float | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    checks.attention(query, key, value)
    B, Hq, Sq, D = query.shape
    scores = (B, Hq, Sq, key.shape[2])
    spec = checks.mask(mask, scores, "query", query.device)
    out, lse = ops.call(
        "attention",
        query,
        key,
        value,
        None if spec.keep is None else spec.keep.expand(scores),
        D**-0.5 if scale is None else checks.number("scale", scale),
        spec.lo,
        spec.hi,
        checks.backend(backend),
    )
    return out, lse


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, by `attention`: a drop-in without dropout and bias.

    query (..., Hq, L, E), key (..., H, S, E), value (..., H, S, Ev) and what the arguments mean are torch's: leading
    dimensions broadcast, `is_causal` is upper-left aligned and excludes `attn_mask`, Hq may differ from H (a
    multiple) only with `enable_gqa`, and a row that sees nothing is 0.

    Raises:
        ValueError: a dropout_p other than 0, attn_mask beside is_causal, shapes that do not fit.
        TypeError: an attn_mask that is not boolean: additive masks are not supported yet.

    >>> q = k = v = torch.randn(2, 4, 3, 8)
    >>> ours = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(ours, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)
    True
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        checks.tensor(name, x)
        if x.ndim < 2:
            raise ValueError(f"{name} must have at least 2 dimensions (..., L, E), got shape {tuple(x.shape)}")
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p must be 0, dropout is not supported yet, got {dropout_p}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask must be None with is_causal=True, got both")
    if attn_mask is not None and (not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool):
        got = attn_mask.dtype if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
        raise TypeError(f"attn_mask must be a boolean tensor, additive masks are not supported yet, got {got}")
    if not enable_gqa and query.ndim > 2 and key.ndim > 2 and query.shape[-3] != key.shape[-3]:
        if query.shape[-3] != 1 and key.shape[-3] != 1:
            raise ValueError(f"query must have key's {key.shape[-3]} heads without enable_gqa, got {query.shape[-3]}")
    mask = masks.Causal("upper_left") if is_causal else attn_mask
    if query.ndim == key.ndim == value.ndim == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
        if enable_gqa or query.shape[1] == key.shape[1] == value.shape[1]:
            if attn_mask is not None:
                checks.broadcastable("attn_mask", attn_mask, (*query.shape[:3], key.shape[2]), "the scores")
            return attention(query, key, value, mask=mask, scale=scale)
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
    if isinstance(mask, Tensor):
        scores = (*lead, *query.shape[-apart:-1], key.shape[-2])
        checks.broadcastable("attn_mask", mask, scores, "the scores")
        mask = mask.expand(scores).reshape(batch, heads[-1], *scores[-2:])
    q, k, v = (x.reshape(batch, *x.shape[-3:]) for x in rows)
    out = attention(q, k, v, mask=mask, scale=scale)
    return out.reshape(*lead, *query.shape[-apart:-1], value.shape[-1])


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    With w = sigmoid(lse_a - lse_b): out = w * out_a + (1 - w) * out_b, lse = logaddexp(lse_a, lse_b). Associative
    and commutative up to rounding; (0, -inf) is the identity, and merging two of those gives it again.

    Args:
        out_a, out_b: (..., Dv), of one shape and dtype, as `attention` returns them.
        lse_a, lse_b: (...), natural logs.

    Differentiable in all four, as often as wanted.

    Raises:
        ValueError: shapes or devices that differ.
        TypeError: arguments that are not floating tensors.

    >>> q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    >>> parts = [attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 4), slice(4, 6))]
    >>> out, lse = merge(*parts[0], *parts[1])
    >>> torch.allclose(out, attention(q, k, v), atol=1e-6)
    True
    """
    checks.partial_results(out_a, lse_a, out_b, lse_b)
    return law.merge(out_a, lse_a, out_b, lse_b)


def explain(
    query: Tensor, key: Tensor, value: Tensor, *, mask: MaskLike = None, backend: str | None = None
) -> dispatch.Explanation:
    """Which backend would run this `attention`, and why not the others. Arguments and errors as there.

    >>> print(explain(*(torch.zeros(1, 1, 1, 8) for _ in range(3)), backend="reference"))
    reference runs this
    triton does not: reference was asked for
    """
    query, key, value = autocast(query, key, value)
    checks.attention(query, key, value)
    checks.mask(mask, (*query.shape[:3], key.shape[2]), "query", query.device)
    return dispatch.explain(dispatch.Problem("attention", query.device, query.dtype), backend)
