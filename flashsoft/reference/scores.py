"""A tile of attention's scores, from query, key and `Terms`, and what gradients of its terms are summed from."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..terms import Terms
from .dropout import kept
from .masking import band
from .softmax import NEG_INF

TILE = 512  # queries and keys of a tile


def empty_output(query: Tensor, Dv: int) -> Tensor:
    """An uninitialised (B, Hq, Sq, Dv) laid out like query: (B, Sq, Hq, Dv) in memory if query's heads are inner."""
    B, Hq, Sq, _ = query.shape
    _, head, row, _ = query.stride()
    strides = (Hq * Sq * Dv, Dv, Hq * Dv, 1) if head < row else (Hq * Sq * Dv, Sq * Dv, Dv, 1)
    return query.new_empty_strided((B, Hq, Sq, Dv), strides)


def spans(Sk: int, i0: int, i1: int, lo: int | None, hi: int | None) -> Iterator[tuple[int, int]]:
    """The key tiles that queries i0..i1 - 1 can see anything of."""
    start = 0 if lo is None else max(0, i0 + lo)
    end = Sk if hi is None else min(Sk, i1 + hi)
    for j0 in range(start, end, TILE):
        yield j0, min(j0 + TILE, end)


def grouped(x: Tensor, Hkv: int) -> Tensor:
    """(B, Hq, S, ...) -> (B, Hkv, group * S, ...): the rows of all query heads that share a key head."""
    B, Hq, S, *rest = x.shape
    return x.reshape(B, Hkv, Hq // Hkv * S, *rest)


def product(q: Tensor, k: Tensor) -> Tensor:
    """q @ k^T; in float32 the halves of a head are summed apart, since what a sum rounds off is in every weight."""
    if q.dtype != torch.float32:
        return q @ k.mT
    half = q.shape[-1] // 2
    return q[..., :half] @ k[..., :half].mT + q[..., half:] @ k[..., half:].mT


def scaled(query: Tensor, terms: Terms, dtype: torch.dtype) -> Tensor:
    """scale * factor * query, (B, Hq, S, D) of `dtype`."""
    q = query.to(dtype) * terms.scale
    return q if terms.factor is None else q * terms.factor.to(dtype)[:, None, None]


def part(x: Tensor, rows: slice, columns: slice) -> Tensor:
    """A tile of (B, Hq, Sq, Sk), where a size of 1 stands for all."""
    x = x if x.shape[2] == 1 else x[:, :, rows]
    return x if x.shape[3] == 1 else x[..., columns]


class Tile:
    """Scores x (B, Hkv, group * queries, keys) of queries q, (B, Hkv, group * queries, D), with keys k and values v.

    `visible` is None where every query sees every key, and `slope` is None without a softcap, else dx / d(q . k).
    A key that no query of the tile sees is zero in k and v, and a query that sees no key of it is zero in q, so that
    NaN or inf there cannot come through as 0 * NaN. `entry` is the batch's first entry, as dropout counts them.
    """

    def __init__(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        terms: Terms,
        Sq: int,
        rows: tuple[int, int],
        columns: tuple[int, int],
        entry: int = 0,
    ) -> None:
        (i0, i1), (j0, j1) = rows, columns
        B, self.Hkv = key.shape[:2]
        self.Hq = self.Hkv * (q.shape[2] // (i1 - i0))
        self.sizes = (B, self.Hq, i1 - i0, j1 - j0)
        self.rows, self.columns = slice(i0, i1), slice(j0, j1)
        self.terms, self.offset, self.entry = terms, key.shape[2] - Sq, entry
        self.q, self.k, self.v = q, key[:, :, j0:j1].to(q.dtype), value[:, :, j0:j1].to(q.dtype)
        visible = self._visible()
        self.visible = None if visible is None else grouped(visible.expand(self.sizes), self.Hkv)
        if self.visible is not None:
            seen = self.visible.any(-2).unsqueeze(-1)
            self.k, self.v = torch.where(seen, self.k, 0.0), torch.where(seen, self.v, 0.0)
            self.q = torch.where(self.visible.any(-1, keepdim=True), q, 0.0)
        x = product(self.q, self.k)
        self.slope: Tensor | None = None
        if terms.softcap is not None:
            capped = torch.tanh(x / terms.softcap)
            x, self.slope = terms.softcap * capped, 1.0 - capped.square()
        if terms.bias is not None:
            bias = part(terms.bias, self.rows, self.columns).to(x.dtype)
            x = x + grouped(bias.expand(self.sizes), self.Hkv)
        if terms.slopes is not None:
            slopes = terms.slopes.to(x.dtype)[..., None, None]
            x = x - grouped((slopes * self.distance(x.dtype)).expand(self.sizes), self.Hkv)
        self.x = x if self.visible is None else x.masked_fill(~self.visible, NEG_INF)

    def distance(self, dtype: torch.dtype) -> Tensor:
        """|i + Sk - Sq - j|, (queries, keys)."""
        i = torch.arange(self.rows.start, self.rows.stop, device=self.q.device)
        j = torch.arange(self.columns.start, self.columns.stop, device=self.q.device)
        return (i.unsqueeze(-1) + self.offset - j).abs().to(dtype)

    def kept(self) -> Tensor | None:
        """What dropout multiplies weights with, like x; None without dropout."""
        if self.terms.seed is None:
            return None
        B, Hq = self.sizes[:2]
        first = self.entry * Hq
        heads = torch.arange(first, first + B * Hq, device=self.q.device).view(B, Hq)
        rows, columns = (self.rows.start, self.rows.stop), (self.columns.start, self.columns.stop)
        factors = kept(self.terms.seed, self.terms.dropout_p, heads, rows, columns)
        return grouped(factors.to(self.q.dtype), self.Hkv)

    def per_head(self, ds: Tensor) -> Tensor:
        """A tensor like x as (B, Hq, queries, keys)."""
        return ds.reshape(self.sizes)

    def _visible(self) -> Tensor | None:
        terms, (_, _, rows, columns) = self.terms, self.sizes
        i0, j0 = self.rows.start, self.columns.start
        inside = (terms.lo is None or j0 - (self.rows.stop - 1) >= terms.lo) and (
            terms.hi is None or (self.columns.stop - 1) - i0 <= terms.hi
        )
        masks: list[Tensor] = []
        if not inside:
            masks.append(band(rows, columns, terms.lo, terms.hi, self.q.device, i0, j0))
        if terms.keep is not None:
            masks.append(part(terms.keep, self.rows, self.columns))
        if terms.query_ids is not None and terms.key_ids is not None:
            query_ids, key_ids = terms.query_ids[:, self.rows], terms.key_ids[:, self.columns]
            masks.append((query_ids.unsqueeze(-1) == key_ids.unsqueeze(-2)).unsqueeze(1))
        if terms.lengths is not None:
            place = torch.arange(j0, self.columns.stop, device=self.q.device)
            masks.append((place < terms.lengths.unsqueeze(-1))[:, None, None])
        if not masks:
            return None
        visible = masks[0]
        for mask in masks[1:]:
            visible = visible & mask
        return visible
