"""Attention, the merge of partial results, and which backend runs."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from .. import checks, direct, dispatch, masks, ops
from ..alibi import Bias
from ..masks import MaskLike
from ..reference import softmax as law
from ..terms import Terms
from .autocast import autocast
from .jagged import attention_jagged
from .terms import terms_of

# dropout_p is 0 by default, not 0.0, which torch.compile(dynamic=True) would trace twice
HALF = (torch.float16, torch.bfloat16)  # float32 attention also depends on what torch allows its products to be


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: MaskLike = ...,
    bias: Bias = ...,
    scale: float | Tensor | None = ...,
    softcap: float | None = ...,
    sink: Tensor | None = ...,
    dropout_p: float = ...,
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
    bias: Bias = ...,
    scale: float | Tensor | None = ...,
    softcap: float | None = ...,
    sink: Tensor | None = ...,
    dropout_p: float = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: MaskLike = None,
    bias: Bias = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softcap(scale * query @ key^T) + bias) @ value over what `mask` keeps, in O(S) memory, both ways.

    Args:
        query: (B, Hq, Sq, D), any strides; float32, float16, bfloat16 or float64 (under autocast, cast to its
            dtype). D from 1 to 576, Dv from 1 to 512.
        key: (B, Hkv, Sk, D), Hq a multiple of Hkv: query head h reads key head h // (Hq / Hkv).
        value: (B, Hkv, Sk, Dv).
        mask: `Causal()`, `Window(...)`, `Segments(...)`, `Padding(...)`, a boolean tensor broadcastable to
            (B, Hq, Sq, Sk) with True = takes part (as in `scaled_dot_product_attention`, the opposite of
            `masked_fill`), or several joined with `&`.
        bias: a tensor broadcastable to (B, Hq, Sq, Sk), of query's dtype or float32, added to scores; its gradient is
            summed over what it was broadcast along. Or `ALiBi(slopes)`, or `ALiBi(slopes) + tensor`.
        scale: any finite number, 1 / sqrt(D) by default; or a floating tensor (), (1,) or (Hq,), with gradient.
        softcap: a number > 0: scores become softcap * tanh(score / softcap) after scale, before bias.
        sink: floating (Hq,), with gradient: one more score in every row of a head, whose value is 0, so that weights
            sum to less than 1. lse includes it.
        dropout_p: 0 to 1: each weight is left out with this probability, the others divided by 1 - dropout_p, in every
            call (a module's training flag is the caller's). A seed drawn from torch's generator of the device and the
            place of a weight decide. lse is that of all weights.
        return_lse: also return the natural logsumexp of each query's scores, float32 (B, Hq, Sq). Differentiable.
        backend: run on this backend or raise; see `explain`.

    Returns:
        out (B, Hq, Sq, Dv); in memory (B, Sq, Hq, Dv) if query's heads lie inside its rows. A query with
        nothing to attend to gets out 0, lse -inf (the sink, if there is one) and gradients 0. A key that is masked for
        every query never leaks, whatever it holds.

    Nested tensors of torch's jagged layout, (B, H, j, D) each, are packed sequences: mask, bias and errors are then as
    in `attention_varlen`, and what is returned is jagged.

    float32 is computed in full float32 unless torch's matmul precision allows TF32. The same inputs give the same
    bits, forward and backward. Differentiable once.

    Raises:
        ValueError: shapes, devices or head counts that do not fit, a head size out of range, a scale not finite,
            softcap not > 0, dropout_p not a share.
        TypeError: dtypes that differ or are not floating, a mask that is not boolean.

    Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.

    >>> q, k, v = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), torch.ones(1, 2, 3, 8)
    >>> out, lse = attention(q, k, v, mask=masks.Causal(), return_lse=True)
    >>> lse[0, 0]
    tensor([0.0000, 0.6931, 1.0986])
    """
    if getattr(query, "is_nested", False):
        return attention_jagged(
            query, key, value, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink, dropout_p=dropout_p,
            return_lse=return_lse, backend=backend,
        )  # fmt: skip
    query, key, value = autocast(query, key, value)
    if bias is not None or softcap is not None or sink is not None or dropout_p != 0.0:
        out, lse = _attention(query, key, value, mask, bias, scale, softcap, sink, dropout_p, backend)
    elif masks.banded(mask) and getattr(query, "dtype", None) in HALF and not isinstance(scale, Tensor):
        out, lse = direct.again(_plain, (query, key, value), mask, scale, backend)
    else:
        out, lse = _plain(query, key, value, mask, scale, backend)
    return (out, lse) if return_lse else out


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: MaskLike, scale: float | Tensor | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    return _attention(query, key, value, mask, None, scale, None, None, 0.0, backend)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: MaskLike,
    bias: Bias,
    scale: float | Tensor | None,
    softcap: float | None,
    sink: Tensor | None,
    dropout_p: float,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    checks.attention(query, key, value)
    terms = _terms(query, key, mask, bias, scale, softcap, sink, dropout_p)
    out, lse = ops.call("attention", query, key, value, *terms, checks.backend(backend))
    return out, lse


def _terms(
    query: Tensor,
    key: Tensor,
    mask: MaskLike,
    bias: Bias,
    scale: float | Tensor | None,
    softcap: float | None,
    sink: Tensor | None,
    dropout_p: float,
) -> Terms:
    B, Hq, Sq, _ = query.shape
    scores = (B, Hq, Sq, key.shape[2])
    spec = checks.mask(mask, scores, "query", query.device)
    keep = spec.keep
    return terms_of(
        query,
        scores,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sink=sink,
        dropout_p=dropout_p,
        keep=None if keep is None else keep.reshape((1,) * (4 - keep.ndim) + keep.shape),
        query_ids=spec.query_ids,
        key_ids=spec.key_ids,
        lengths=spec.lengths,
        lo=spec.lo,
        hi=spec.hi,
    )


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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: MaskLike = None,
    bias: Bias = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0,
    return_lse: bool = False,
    backend: str | None = None,
) -> dispatch.Explanation:
    """Which backend would run this `attention`, and why not the others. Arguments and errors as there.

    >>> print(explain(*(torch.zeros(1, 1, 1, 8) for _ in range(3)), backend="reference"))
    reference runs this
    hopper does not: reference was asked for
    triton does not: reference was asked for
    """
    query, key, value = autocast(query, key, value)
    checks.attention(query, key, value)
    terms = _terms(query, key, mask, bias, scale, softcap, sink, 0.0)
    features = dispatch.features(terms) | ({"dropout"} if checks.dropout_p(dropout_p) > 0.0 else set())
    kind = features, query.shape[3], value.shape[3], dispatch.obstacle(query, key, value, terms)
    return dispatch.explain(dispatch.Problem("attention", query.device, query.dtype, *kind), backend)
