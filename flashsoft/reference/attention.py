"""Attention a tile of queries and keys at a time, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..terms import Gradients, Terms
from . import scores
from .scores import Tile, empty_output, grouped, scaled, spans
from .softmax import NEG_INF, finish, merge_states, update, wide


def attention_forward(query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), a tile of queries and keys at a time."""
    out = empty_output(query, value.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=wide(query.dtype))
    if lse.numel() == 0:
        return out, lse
    if terms.cu_q is None:
        _forward_of(query, key, value, terms, out, lse)
        return out, lse
    # what lies in no sequence is as a query without keys
    out.zero_()
    lse.fill_(NEG_INF)
    for entry, rows, columns, own in _sequences(terms):
        if rows.stop > rows.start:
            _forward_of(
                query[:, :, rows],
                key[:, :, columns],
                value[:, :, columns],
                own,
                out[:, :, rows],
                lse[:, :, rows],
                entry,
            )
    return out, lse


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
    """p is recomputed from lse tile by tile; ds = p * (dp - delta), delta = row(out * dout) - dlse.

    Where one tile holds whole rows, p is also divided by its own sums, which are 1 but for the rounding of lse; the
    kernels do so for all rows in float32.
    """
    tensors = (query, key, value, terms.bias, terms.slopes, terms.sink, terms.factor)
    dtype = wide(query.dtype)
    sums = Gradients(
        *(
            torch.zeros_like(t, dtype=dtype) if t is not None and need else None
            for t, need in zip(tensors, needs, strict=True)
        )
    )
    if terms.cu_q is None and lse.numel():
        _backward_of(dout, dlse, query, key, value, out, lse, terms, sums)
    elif lse.numel():
        for entry, rows, columns, own in _sequences(terms):
            whole = Gradients(
                None if sums.query is None else sums.query[:, :, rows],
                None if sums.key is None else sums.key[:, :, columns],
                None if sums.value is None else sums.value[:, :, columns],
                None,
                sums.slopes if sums.slopes is None or sums.slopes.shape[0] == 1 else sums.slopes[entry : entry + 1],
                *sums[5:],
            )
            if rows.stop > rows.start:
                _backward_of(
                    dout[:, :, rows],
                    None if dlse is None else dlse[:, :, rows],
                    query[:, :, rows],
                    key[:, :, columns],
                    value[:, :, columns],
                    out[:, :, rows],
                    lse[:, :, rows],
                    own,
                    whole,
                    entry,
                )
    return Gradients(
        *(None if t is None or s is None else torch.empty_like(t).copy_(s) for t, s in zip(tensors, sums, strict=True))
    )


def _sequences(terms: Terms) -> Iterator[tuple[int, slice, slice, Terms]]:
    """Each packed sequence: its number, where its queries and keys lie, and its own terms."""
    assert terms.cu_q is not None and terms.cu_k is not None
    starts_q, starts_k = terms.cu_q.tolist(), terms.cu_k.tolist()
    for entry in range(len(starts_q) - 1):
        rows, columns = (slice(*starts[entry : entry + 2]) for starts in (starts_q, starts_k))
        shift = (columns.stop - columns.start) - (rows.stop - rows.start) if terms.lower_right else 0
        slopes = terms.slopes
        own = terms._replace(
            cu_q=None,
            cu_k=None,
            lower_right=False,
            lo=None if terms.lo is None else terms.lo + shift,
            hi=None if terms.hi is None else terms.hi + shift,
            slopes=slopes if slopes is None or slopes.shape[0] == 1 else slopes[entry : entry + 1],
        )
        yield entry, rows, columns, own


def _sinks(sink: Tensor, B: int, rows: int, Hkv: int, dtype: torch.dtype) -> Tensor:
    """The sink's score in every row, (B, Hkv, group * rows, 1)."""
    return grouped(sink.to(dtype)[:, None, None].expand(B, -1, rows, 1), Hkv)


def _forward_of(
    query: Tensor, key: Tensor, value: Tensor, terms: Terms, out: Tensor, lse: Tensor, entry: int = 0
) -> None:
    """Of queries that all see the same keys."""
    B, Hq, Sq, _ = query.shape
    Hkv, Sk, Dv = key.shape[1], key.shape[2], value.shape[3]
    dtype = wide(query.dtype)
    for i0 in range(0, Sq, scores.TILE):
        i1 = min(i0 + scores.TILE, Sq)
        q = grouped(scaled(query[:, :, i0:i1], terms, dtype), Hkv)
        m = q.new_full((*q.shape[:-1], 1), NEG_INF)
        s = torch.zeros_like(m)
        acc = q.new_zeros(*q.shape[:-1], Dv)
        for span in spans(Sk, i0, i1, terms.lo, terms.hi):
            tile = Tile(q, key, value, terms, Sq, (i0, i1), span, entry)
            m, s, alpha, p = update(m, s, tile.x)
            kept = tile.kept()
            acc = acc * alpha + (p if kept is None else p * kept) @ tile.v
        if terms.sink is not None:
            sinks = _sinks(terms.sink, B, i1 - i0, Hkv, dtype)
            m, s, alpha, _ = merge_states(m, s, sinks, torch.ones_like(s))
            acc = acc * alpha
        inverse, row_lse = finish(m, s)
        out[:, :, i0:i1] = (acc * inverse).reshape(B, Hq, i1 - i0, Dv)
        lse[:, :, i0:i1] = row_lse.reshape(B, Hq, i1 - i0)


def _backward_of(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: Terms,
    sums: Gradients,
    entry: int = 0,
) -> None:
    """Adds to `sums`."""
    B, Hq, Sq, D = query.shape
    Hkv, Sk = key.shape[1], key.shape[2]
    dtype = wide(query.dtype)
    for i0 in range(0, Sq, scores.TILE):
        i1 = min(i0 + scores.TILE, Sq)
        rows = slice(i0, i1)
        q = grouped(scaled(query[:, :, rows], terms, dtype), Hkv)
        do = grouped(dout[:, :, rows].to(dtype), Hkv)
        # a row that sees nothing is 0, and what comes in for it goes nowhere
        made = grouped(out[:, :, rows].to(dtype), Hkv)
        delta = torch.where(made == 0.0, 0.0, do * made).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta - grouped(dlse[:, :, rows].to(dtype), Hkv).unsqueeze(-1)
        row_lse = grouped(lse[:, :, rows], Hkv).unsqueeze(-1)
        alive = row_lse != NEG_INF
        q, do = torch.where(alive, q, 0.0), torch.where(alive, do, 0.0)
        row_lse = torch.where(alive, row_lse, float("inf"))  # exp(x - inf) = 0: no weight in a row without mass
        weight = None if terms.sink is None else torch.exp(_sinks(terms.sink, B, i1 - i0, Hkv, dtype) - row_lse)
        dq = torch.zeros_like(q)
        parts = list(spans(Sk, i0, i1, terms.lo, terms.hi))
        for span in parts:
            tile = Tile(q, key, value, terms, Sq, (i0, i1), span, entry)
            p = torch.exp(tile.x - row_lse)
            if len(parts) == 1:
                mass = p.sum(-1, keepdim=True) if weight is None else p.sum(-1, keepdim=True) + weight
                mass = mass.masked_fill(~alive, 1.0)
                p, weight = p / mass, None if weight is None else weight / mass
            seeing = alive if tile.visible is None else tile.visible & alive
            do_tile = do if tile.visible is None else torch.where(seeing.any(-1, keepdim=True), do, 0.0)
            kept = tile.kept()
            dp = do_tile @ tile.v.mT
            ds = p * ((dp if kept is None else dp * kept) - delta)
            ds = torch.where(seeing, ds, 0.0)
            _add_terms(sums, tile, ds)
            ds = ds if tile.slope is None else ds * tile.slope
            if sums.value is not None:
                sums.value[:, :, tile.columns] += (p if kept is None else p * kept).mT @ do_tile
            if sums.key is not None:
                sums.key[:, :, tile.columns] += ds.mT @ tile.q
            dq += ds @ tile.k
        dq = dq.reshape(B, Hq, i1 - i0, D)
        if sums.factor is not None:
            # scale * ds * q . k, summed over keys first
            x = torch.where(alive.reshape(B, Hq, i1 - i0, 1), query[:, :, rows].to(dtype), 0.0)
            sums.factor.add_(torch.where(dq == 0.0, 0.0, x * dq).sum((0, 2, 3)) * terms.scale)
        if sums.query is not None:
            sums.query[:, :, rows] += scaled(dq, terms, dtype)
        if sums.sink is not None and weight is not None:
            sums.sink.sub_(torch.where(alive, weight * delta, 0.0).reshape(B, Hq, i1 - i0).sum((0, 2)))


def _add_terms(sums: Gradients, tile: Tile, ds: Tensor) -> None:
    """The gradients of bias and slopes, of this tile."""
    if sums.bias is not None:
        at = scores.part(sums.bias, tile.rows, tile.columns)
        at += tile.per_head(ds).sum_to_size(at.shape)
    if sums.slopes is not None:
        sums.slopes.sub_((tile.per_head(ds) * tile.distance(ds.dtype)).sum((2, 3)).sum_to_size(sums.slopes.shape))
