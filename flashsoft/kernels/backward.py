"""Attention backward in portable Triton, without atomics.

With p = exp(x - lse) recomputed from the scores x, and delta = row(out * dout) - dlse:

    ds = p * (dout @ v^T - delta)        dv = p^T @ dout        dk = scale * ds^T @ q        dq = scale * ds @ k

One kernel owns query tiles and walks over the keys (`backward_queries`), one owns key tiles and walks over the queries
that see them (`backward_keys`), each recomputing p: seven products of 2 * Sq * Sk * D flops a head in place of five,
for results that need no ordering to be the same bits every time, and no fp32 buffer the size of query. A bias that
needs its gradient takes two products more (`backward_bias`). What is not needed is not computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..terms import Gradients, Terms
from ..tuning.attention import backward_config
from . import backward_keys, backward_queries
from .attention_launch import kind, numbers, table_of, tensors, turned
from .backward_bias import bias_gradient
from .backward_queries import shares
from .backward_rows import prepare
from .launch import launch
from .packed_tail import clear_tail


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: Terms,
    needs: tuple[bool, ...],
) -> Gradients:
    """The gradients that are needed, in the order of `Gradients`, shaped and laid out like their tensors."""
    wanted = Gradients(*needs)
    if lse.numel() == 0 or key.shape[2] == 0:
        return _without_scores(dlse, query, key, value, terms, wanted)
    config = backward_config(query, value.shape[3], kind(query, terms))
    n = numbers(query, key, terms)
    given = (query, key, value, *tensors(query, key, terms))
    sink, cu_q = given[7], given[12]
    settled, delta, padded, dsink = prepare(out, dout, dlse, lse, sink, cu_q, n, wanted.sink)
    norm = torch.ones_like(settled) if query.dtype == torch.float32 else None  # written by the queries' kernel
    dq = dk = dv = dbias = dslopes = dfactor = None
    if wanted.query or wanted.slopes or wanted.factor or norm is not None:
        tile = config.queries
        table = table_of(given, tile.block_m, tile.block_n)
        dq = _gradient(query, cu_q)
        dslopes = shares(query, cu_q, n, tile) if wanted.slopes else None
        dfactor = shares(query, cu_q, n, tile) if wanted.factor else None
        inputs = (*given, dout, settled, delta, table)
        launch(backward_queries.plan, inputs, (dq, norm, dslopes, dfactor), n, tile, padded)
    if wanted.key or wanted.value:
        tile = config.keys
        by_keys = turned(given)
        table = table_of(by_keys, tile.block_n, tile.block_m, by_keys=True)
        dk, dv = _gradient(key, terms.cu_k), _gradient(value, terms.cu_k)
        launch(backward_keys.plan, (*by_keys, dout, settled, delta, norm, table), (dk, dv), n, tile, padded)
    if wanted.bias:
        dbias = bias_gradient((*given, dout, settled, delta, norm), n, config.queries, padded)
    return Gradients(
        dq if wanted.query else None,
        dk if wanted.key else None,
        dv if wanted.value else None,
        dbias,
        _summed(dslopes, terms.slopes),
        None if dsink is None else dsink.to(terms.sink.dtype),  # type: ignore[union-attr]
        None if dfactor is None else dfactor.sum((0, 2)).to(terms.factor.dtype),  # type: ignore[union-attr]
    )


def _gradient(like: Tensor, starts: Tensor | None) -> Tensor:
    """Memory for a gradient; zeros in what lies behind the last of packed sequences."""
    empty = torch.empty_like(like)
    return empty if starts is None else clear_tail(starts, empty)


def _summed(shares: Tensor | None, slopes: Tensor | None) -> Tensor | None:
    """The gradient of slopes (B or 1, Hq) from every program's share (B, Hq, tiles)."""
    if shares is None or slopes is None:
        return None
    heads = shares.sum(2)
    return (heads if slopes.shape[0] == heads.shape[0] else heads.sum(0, keepdim=True)).to(slopes.dtype)


def _without_scores(
    dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, terms: Terms, wanted: Gradients
) -> Gradients:
    """Where no query meets a key: zeros, but for a sink, which is then all of lse."""
    tensors = (query, key, value, terms.bias, terms.slopes, terms.sink, terms.factor)
    zeros = [torch.zeros_like(x) if need else None for x, need in zip(tensors, wanted, strict=True)]  # type: ignore[arg-type]
    gradients = Gradients(*zeros)
    if wanted.sink and dlse is not None:
        alive = terms.sink != float("-inf")
        gradients = gradients._replace(sink=torch.where(alive, dlse.sum((0, 2)), 0.0).to(terms.sink.dtype))  # type: ignore[union-attr, operator]
    return gradients
