"""Attention of packed sequences."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from .. import checks, ops
from ..alibi import ALiBi
from ..masks import MaskLike
from .autocast import autocast
from .terms import terms_of


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    mask: MaskLike = ...,
    bias: ALiBi | None = ...,
    scale: float | Tensor | None = ...,
    softcap: float | None = ...,
    sink: Tensor | None = ...,
    dropout_p: float = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    mask: MaskLike = ...,
    bias: ALiBi | None = ...,
    scale: float | Tensor | None = ...,
    softcap: float | None = ...,
    sink: Tensor | None = ...,
    dropout_p: float = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    mask: MaskLike = None,
    bias: ALiBi | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of each of several sequences, packed one after another without padding, in one call.

    Sequence b has the queries cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 and the keys cu_seqlens_k[b] ..
    cu_seqlens_k[b + 1] - 1; either may be none. Sequences never see each other's data.

    Args:
        query: (Tq, Hq, D), any strides; dtypes and head sizes as in `attention`.
        key: (Tk, Hkv, D), Hq a multiple of Hkv.
        value: (Tk, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: where sequences begin and end, int32 (sequences + 1,), ascending from 0. Their
            contents are read on the host only under FLASHSOFT_CHECK=1. What lies after the last end is in no sequence.
        max_seqlen_q, max_seqlen_k: no less than the longest sequence.
        mask: `Causal`, `Window` or their `&`, in every sequence by its own lengths, and all parts aligned alike.
        bias: `ALiBi(slopes)`, of slopes (Hq,) or (sequences, Hq).
        scale, softcap, sink, dropout_p, backend: as in `attention`.
        return_lse: also return the natural logsumexp of each query's scores, float32 (Tq, Hq). Differentiable.

    Returns:
        out (Tq, Hq, Dv).

    Raises:
        ValueError: shapes, devices or head counts that do not fit, parts of a mask that are aligned differently.
        TypeError: cu_seqlens that are not int32, a mask or bias of another kind: `Segments` with `attention` takes any.

    Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.

    >>> import torch
    >>> q = k = v = torch.randn(7, 2, 8)
    >>> ends = torch.tensor([0, 3, 3, 7], dtype=torch.int32)  # of 3, 0 and 4
    >>> attention_varlen(q, k, v, ends, ends, 4, 4).shape
    torch.Size([7, 2, 8])
    """
    query, key, value = autocast(query, key, value)
    checks.packed(
        query,
        key,
        value,
        {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k},
        {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k},
    )
    if bias is not None and not (isinstance(bias, ALiBi) and bias.bias is None):
        raise TypeError(
            "bias must be ALiBi(slopes) for packed sequences (attention with Segments takes tensors), "
            f"got {type(bias).__name__}{' + Tensor' if isinstance(bias, ALiBi) else ''}"
        )
    lo, hi, lower_right = checks.packed_mask(mask)
    terms = terms_of(
        query,
        (1, query.shape[1], query.shape[0], key.shape[0]),
        bias=bias,
        scale=scale,
        softcap=softcap,
        sink=sink,
        dropout_p=dropout_p,
        batch=(cu_seqlens_q.shape[0] - 1, "sequences"),
    )._replace(
        cu_q=cu_seqlens_q,
        cu_k=cu_seqlens_k,
        lo=lo,
        hi=hi,
        lower_right=lower_right,
        max_q=max_seqlen_q,
        max_k=max_seqlen_k,
    )
    rows = [x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)]
    out, lse = ops.call("attention", *rows, *terms, checks.backend(backend))
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0).transpose(0, 1)) if return_lse else out
