"""What the launches of attention have in common: the terms as tensors and numbers, in the kernels' order.

Every kernel of attention takes query, key and value, then `tensors`, then its own; and as numbers `arguments`, then its
own. A kernel's plan sees layouts and `Numbers` only, so that a launch can be made again for others of the same kind.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..terms import Terms
from ..tuning.attention import Kind, columns, input_precision, value_columns
from .launch import Tensors
from .live_keys import live_keys
from .mask_bits import broadcast_strides, mask_bits, turned_bits
from .tile_runs import tile_runs

WORDS = 1 << 32  # of Philox


class Numbers(NamedTuple):
    """The numbers of `Terms`, how float32 products are computed, which rows are longest, and the sign of the scale.

    The sign is None where an entry of a tensor has a part in it. together: keys that a bias may be loaded by.
    """

    scale: float
    softcap: float | None
    threshold: int
    dropout_scale: float
    lo: int | None
    hi: int | None
    lower_right: bool
    longest_q: int
    longest_k: int
    precision: str
    negate: bool | None
    together: int


def numbers(query: Tensor, key: Tensor, terms: Terms) -> Numbers:
    """Of one call."""
    packed = terms.cu_q is not None
    p = terms.dropout_p
    return Numbers(
        terms.scale,
        terms.softcap,
        min(round(p * WORDS), WORDS - 1),
        1.0 / (1.0 - p) if p < 1.0 else 0.0,
        terms.lo,
        terms.hi,
        terms.lower_right and packed,
        terms.max_q if packed else query.shape[2],
        terms.max_k if packed else key.shape[2],
        input_precision(query.dtype),
        None if terms.factor is not None else terms.scale < 0,
        1 if terms.bias is None else math.gcd(key.shape[2], 8),
    )


def tensors(query: Tensor, key: Tensor, terms: Terms) -> tuple[Tensor | None, ...]:
    """words (of `keep`), live, bias, slopes, sink, factor, query_ids, key_ids, lengths, cu_q, cu_k, seed."""
    words = live = None
    if terms.keep is not None:
        words = mask_bits(terms.keep, key.shape[2])
    sink, factor, *offsets = (
        None if x is None else x.contiguous()
        for x in (terms.sink, terms.factor, terms.lengths, terms.cu_q, terms.cu_k, terms.seed)
    )
    if words is not None or terms.query_ids is not None:
        sizes = (query.shape[2], key.shape[2])
        live = live_keys(words, terms.query_ids, terms.key_ids, offsets[0], *sizes, terms.lo, terms.hi)
    bias = None if terms.bias is None else _close(terms.bias)
    return (words, live, bias, terms.slopes, sink, factor, terms.query_ids, terms.key_ids, *offsets)


def turned(given: Tensors) -> Tensors:
    """query, key, value and `tensors` with the words of `keep` along queries."""
    query, key, value, words, *others = given
    if words is None:
        return given
    return (query, key, value, turned_bits(words, query.shape[2], key.shape[2]), *others)  # type: ignore[union-attr]


def kind(query: Tensor, terms: Terms) -> Kind:
    """What the choice of tiles asks of the terms."""
    masked = terms.keep is not None or terms.query_ids is not None
    scored = any(term is not None for term in (terms.bias, terms.seed, terms.softcap))
    wide = terms.bias is not None and terms.bias.itemsize > query.itemsize
    if wide or (masked and scored):
        return "mixed"
    return "masked" if masked else "scored" if scored else "plain"


def _close(x: Tensor) -> Tensor:
    """A bias whose rows lie within 2^31 elements in a tile of 128, which they do but in odd views."""
    return x if all(stride < 1 << 24 for stride in broadcast_strides(x)[2:]) else x.contiguous()


def table_of(given: Tensors, own: int, step: int, *, by_keys: bool = False) -> Tensor | None:
    """The runs of tiles of `own` queries over tiles of `step` keys, or by_keys the other way; see `tile_runs`."""
    query, key, _, words, _, _, _, _, _, query_ids, key_ids, *_ = given
    if words is None and query_ids is None:
        return None
    Sq, Sk = query.shape[2], key.shape[2]  # type: ignore[union-attr]
    return tile_runs(words, query_ids, key_ids, Sq, Sk, own, step, by_keys=by_keys)


def near(*tensors: Tensor | None) -> bool:
    """Whether offsets within a head of each of these tensors (B, H, S, D) fit 32 bits, or a tenth of a loop is lost."""
    given = [(x.shape, x.stride()) for x in tensors if x is not None]
    return all((shape[2] - 1) * row + (shape[3] - 1) * column < 1 << 31 for shape, (_, _, row, column) in given)


def sequences(starts: Tensor | None) -> int:
    """How many are packed; 0 if none are."""
    return 0 if starts is None else starts.shape[0] - 1


def tiles(x: Tensor, starts: Tensor | None, block: int) -> int:
    """How many tiles of `block` positions a head of x (B, H, S, D) has; of packed sequences, see `program_of`."""
    length = x.shape[2]
    return triton.cdiv(length, block) if starts is None else length // block + sequences(starts)


def widths(given: Tensors, precision: str) -> dict[str, object]:
    """The sizes of a key and a value, and the blocks of columns that tiles of them have."""
    query, _, value, *_ = given
    D, DV = query.shape[3], value.shape[3]  # type: ignore[union-attr]
    chained = query.dtype == torch.float32 and precision == "ieee"  # type: ignore[union-attr]
    return dict(D=D, DV=DV, BLOCK_D=columns(D, chained=chained), BLOCK_DV=value_columns(D, DV, chained=chained))


def arguments(given: Tensors, table: Tensor | None, numbers: Numbers) -> tuple[object, ...]:
    """The strides of query, key, value, words, live, bias, slopes, ids and table, and the numbers up to `hi`."""
    query, key, value, words, live, bias, slopes, _, _, query_ids, key_ids, *_ = given
    (_, Hq, Sq, _), (_, Hkv, Sk, _) = query.shape, key.shape  # type: ignore[union-attr]
    strides = [None if x is None else broadcast_strides(x) for x in (words, live, bias, slopes, table)]
    ids = None
    if query_ids is not None and key_ids is not None:
        ids = (*broadcast_strides(query_ids), *broadcast_strides(key_ids))
    return (
        *(x.stride() for x in (query, key, value)), *strides[:4], ids, strides[4],  # type: ignore[union-attr]
        Sq, Sk, Hq, Hq // Hkv, numbers.scale, numbers.softcap, numbers.threshold, numbers.dropout_scale,
        numbers.lo, numbers.hi,
    )  # fmt: skip
