"""What makes the scores of attention beside query and key, as operators hand it to backends.

In order, for query i and key j of a head:

    x = scale * factor * q_i . k_j
    x = softcap * tanh(x / softcap)
    x = x + bias[i, j] - slopes * |i + Sk - Sq - j|
    x = -inf unless lo <= j - i <= hi, keep[i, j], query_ids[i] == key_ids[j] and j < lengths

A sink is one more score, with a value of 0, in every row of its head. Dropout then takes weights out, each by a word of
Philox that its place decides (see `reference.dropout`).

Packed sequences lie one after another along one dimension: query is (1, Hq, Tq, D), key (1, Hkv, Tk, D), lse (1, Hq,
Tq), sequence b reaches from cu_q[b] to cu_q[b + 1], and i, j, Sq and Sk above are those of a sequence. There `lo` and
`hi` count from the diagonal that ends in the last query and key if `lower_right`, else from that of i = j.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Terms(NamedTuple):
    """Tensors, then numbers; None (and a scale of 1, a dropout_p of 0) leaves a term out.

    keep: bool (B, Hq, Sq, Sk); bias: floating, the same. In both a dimension of size 1 stands for all.
    slopes: floating (B or 1, Hq). sink: floating (Hq,). factor: floating (Hq,).
    query_ids, key_ids: int32 or int64 (B or 1, Sq) and (B or 1, Sk), both or neither.
    lengths: int32 or int64 (B,), keys in use.
    cu_q, cu_k: int32 (sequences + 1,), both or neither; max_q and max_k are no shorter than any sequence.
    seed: int64 (1,), given iff dropout_p > 0.
    """

    keep: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    sink: Tensor | None = None
    factor: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    lengths: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    seed: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    dropout_p: float = 0.0
    lo: int | None = None
    hi: int | None = None
    lower_right: bool = False
    max_q: int = 0
    max_k: int = 0


class Gradients(NamedTuple):
    """Of the tensors that may have one, each of its tensor's shape and dtype; None where none was asked for."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None
    sink: Tensor | None
    factor: Tensor | None
