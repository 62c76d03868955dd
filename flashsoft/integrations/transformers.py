"""Attention of Hugging Face transformers, under the name "online_softmax".

    from flashsoft.integrations import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="online_softmax")

A model hands over what it wants of attention in three places: a mask made once a forward pass (see
`transformers_masks`), keywords of each layer, and `module.is_causal`. All of them are honoured, or refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import api
from ..masks import Causal, Mask, MaskLike, Segments, Window

NAME = "online_softmax"
OLDEST = (5, 4)  # before it, mask functions were given positions as a tensor


def register() -> None:
    """Make `attn_implementation="online_softmax"` known to transformers, attention and masks together.

    Models that are not built on transformers' attention interface (BLOOM, for one) know only attention of their own,
    and are refused at their first pass.

    Raises:
        ImportError: transformers is not installed, or is older than the interfaces that this needs.
    """
    import transformers

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise ImportError(f"flashsoft needs transformers >= {needed}, got {transformers.__version__}")
    from transformers import AttentionInterface, AttentionMaskInterface

    from .transformers_masks import online_softmax_mask

    AttentionInterface.register(NAME, online_softmax_attention)
    AttentionMaskInterface.register(NAME, online_softmax_mask)


def online_softmax_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`flashsoft.attention` as a layer of transformers calls it.

    Args:
        module: the layer; `module.is_causal` (True if it has none) says what no mask means.
        query: (B, Hq, Sq, D); (1, Hq, Sq, D) is shared by the batch.
        key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), heads not repeated.
        attention_mask: what `online_softmax_mask` made, or a tensor broadcastable to (B, Hq, Sq, Sk): boolean with
            True = takes part, or added to the scores. It is all that is masked, and `is_causal` and `sliding_window`
            then say nothing more. None: query i sees the keys up to i (Sq = 1: all of them) if the layer is causal, all
            of them if not, and of these the nearest `sliding_window`, itself among them.
        s_aux: (Hq,), a sink: one more score in every row, with a value of 0.
        position_bias: added to the scores, broadcastable to them.
        cu_seq_lens_q, cu_seq_lens_k: int32 (n + 1,), where packed sequences begin and end, for a batch of 1.
        kwargs: what transformers passes beside these says nothing about attention, and is left alone.

    Returns:
        out (B, Sq, Hq, Dv), contiguous, and None: weights are never written.

    Raises:
        ValueError: weights asked for, a mask that is neither, sequences packed in a way that is not supported.
    """
    if output_attentions:
        raise ValueError('output_attentions needs attn_implementation="eager": online_softmax writes no weights')
    if query.shape[0] == 1 != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)
    mask, bias = _mask_and_bias(attention_mask)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = _unsaid(causal, sliding_window, query.shape[2])
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        segments = _packed(query, key, cu_seq_lens_q, cu_seq_lens_k)
        mask = segments if mask is None else segments & mask
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    out = api.attention(
        query, key, value, mask=mask, bias=bias, scale=scaling, softcap=softcap, sink=s_aux, dropout_p=dropout
    )
    return out.transpose(1, 2).contiguous(), None


def _mask_and_bias(given: object) -> tuple[MaskLike, Tensor | None]:
    if given is None or isinstance(given, Mask):
        return given, None
    if not isinstance(given, Tensor) or given.ndim != 4:
        got = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"attention_mask must be made by online_softmax_mask or a tensor (B, H, Sq, Sk), got {got}")
    return (None, given) if given.is_floating_point() else (given, None)


def _unsaid(causal: bool, sliding_window: int | None, Sq: int) -> MaskLike:
    """What no mask means: upper left, so that a cache may be longer than what is in it; one query sees all keys."""
    align = "lower_right" if Sq == 1 else "upper_left"
    left = None if sliding_window is None else sliding_window - 1
    if not causal:
        return None if left is None else Window(left, left, align)
    if left is not None:
        return Window(left, 0, align)
    return None if Sq == 1 else Causal(align)


def _packed(query: Tensor, key: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> Segments:
    if cu_q is None or cu_k is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given together, got one of them")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError(
            "cu_seq_lens_q needs a batch of 1 and as many keys as queries, "
            f"got query {tuple(query.shape)} and key {tuple(key.shape)}"
        )
    return Segments((_ids(cu_q, query.shape[2]), _ids(cu_k, key.shape[2])))


def _ids(cu: Tensor, length: int) -> Tensor:
    """The number of the sequence that each of `length` tokens lies in."""
    return torch.bucketize(torch.arange(length, device=cu.device, dtype=cu.dtype), cu[1:], right=True)
