"""Attention of nested tensors with torch's jagged layout, whose values are packed sequences as they lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .varlen import attention_varlen


def attention_jagged(
    query: Any, key: Any, value: Any, *, return_lse: bool, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` where query is jagged (B, Hq, j, D): a (B, j, Hq, D) transposed, as torch's attention takes it.

    Args:
        query, key, value: (B, Hq, j, D), (B, Hkv, j, D) and (B, Hkv, j, Dv); key and value share their lengths.
        return_lse: also return lse, jagged (B, Hq, j).
        options: those of `attention_varlen`, masks among them.

    Returns:
        out, jagged (B, Hq, j, Dv), of query's lengths.

    Raises:
        ValueError: tensors that are not jagged, or in another order, or with gaps, and what `attention_varlen` refuses.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        _check(name, x)
    if key.offsets() is not value.offsets() and key.shape[2] != value.shape[2]:
        raise ValueError("key and value must share their offsets, got two jagged tensors made apart")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    results = attention_varlen(
        q.values(), k.values(), v.values(), _ends(q), _ends(k), _longest(q), _longest(k), return_lse=True, **options
    )
    out, lse = (
        torch.nested.nested_tensor_from_jagged(x, q.offsets(), max_seqlen=_longest(q)).transpose(1, 2) for x in results
    )
    return (out, lse) if return_lse else out


def _check(name: str, x: Any) -> None:
    if not x.is_nested or x.layout != torch.jagged:
        got = "strided" if x.is_nested else "dense"
        raise ValueError(f"{name} must be a nested tensor with layout torch.jagged, as query is, got a {got} tensor")
    if x.ndim != 4 or x._ragged_idx != 2:
        raise ValueError(f"{name} must be jagged (B, H, j, D), a (B, j, H, D) transposed, got shape {tuple(x.shape)}")
    if x.lengths() is not None:
        raise ValueError(f"{name} must have no gaps between its sequences, got one with lengths: call contiguous()")


def _ends(x: Any) -> Tensor:
    return x.offsets().to(torch.int32)  # type: ignore[no-any-return]


def _longest(x: Any) -> int:
    """Known to a jagged tensor once anything has asked; the first to ask reads offsets from the device."""
    return x._get_max_seqlen()  # type: ignore[no-any-return]
