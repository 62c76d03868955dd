"""Attention a tile of queries and keys at a time, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .masking import band
from .softmax import NEG_INF, finish, update, wide

TILE = 512  # queries and keys of a tile


def empty_output(query: Tensor, Dv: int) -> Tensor:
    """An uninitialised (B, Hq, Sq, Dv) laid out like query: (B, Sq, Hq, Dv) in memory if query's heads are inner."""
    B, Hq, Sq, _ = query.shape
    _, head, row, _ = query.stride()
    strides = (Hq * Sq * Dv, Dv, Hq * Dv, 1) if head < row else (Hq * Sq * Dv, Sq * Dv, Dv, 1)
    return query.new_empty_strided((B, Hq, Sq, Dv), strides)


def _spans(Sk: int, i0: int, i1: int, lo: int | None, hi: int | None) -> Iterator[tuple[int, int]]:
    """The key tiles that queries i0..i1 - 1 can see anything of."""
    start = 0 if lo is None else max(0, i0 + lo)
    end = Sk if hi is None else min(Sk, i1 + hi)
    for j0 in range(start, end, TILE):
        yield j0, min(j0 + TILE, end)


def _grouped(x: Tensor, Hkv: int) -> Tensor:
    """(B, Hq, S, ...) -> (B, Hkv, group * S, ...): the rows of all query heads that share a key head."""
    B, Hq, S, *rest = x.shape
    return x.reshape(B, Hkv, Hq // Hkv * S, *rest)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q @ k^T; in float32 the halves of a head are summed apart, since what a sum rounds off is in every weight."""
    if q.dtype != torch.float32:
        return q @ k.mT
    half = q.shape[-1] // 2
    return q[..., :half] @ k[..., :half].mT + q[..., half:] @ k[..., half:].mT


class _Tile:
    """One tile of scores x (B, Hkv, group * queries, keys), with its keys k and values v.

    `visible` is None where every query sees every key. A key that no query of the tile sees is zero in k and v, so
    that NaN or inf in it cannot come through as 0 * NaN.
    """

    def __init__(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        keep: Tensor | None,
        lo: int | None,
        hi: int | None,
        rows: tuple[int, int],
        columns: tuple[int, int],
    ) -> None:
        (i0, i1), (j0, j1) = rows, columns
        self.k, self.v = key[:, :, j0:j1].to(q.dtype), value[:, :, j0:j1].to(q.dtype)
        self.visible: Tensor | None = None
        inside = (lo is None or j0 - (i1 - 1) >= lo) and (hi is None or (j1 - 1) - i0 <= hi)
        if keep is not None or not inside:
            B, Hkv = key.shape[:2]
            Hq = Hkv * (q.shape[2] // (i1 - i0))
            visible = band(i1 - i0, j1 - j0, lo, hi, q.device, i0, j0)
            if keep is not None:
                visible = visible & keep[:, :, i0:i1, j0:j1]
            self.visible = _grouped(visible.expand(B, Hq, i1 - i0, j1 - j0), Hkv)
            seen = self.visible.any(-2).unsqueeze(-1)
            self.k, self.v = torch.where(seen, self.k, 0.0), torch.where(seen, self.v, 0.0)
        self.x = _scores(q, self.k)
        if self.visible is not None:
            self.x = self.x.masked_fill(~self.visible, NEG_INF)


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    scale: float,
    lo: int | None,
    hi: int | None,
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), a tile of queries and keys at a time; keep is (B, Hq, Sq, Sk)."""
    B, Hq, Sq, _ = query.shape
    Hkv, Sk, Dv = key.shape[1], key.shape[2], value.shape[3]
    dtype = wide(query.dtype)
    out = empty_output(query, Dv)
    lse = query.new_empty(B, Hq, Sq, dtype=dtype)
    if lse.numel() == 0:
        return out, lse
    for i0 in range(0, Sq, TILE):
        i1 = min(i0 + TILE, Sq)
        q = _grouped(query[:, :, i0:i1].to(dtype) * scale, Hkv)
        m = q.new_full((*q.shape[:-1], 1), NEG_INF)
        s = torch.zeros_like(m)
        acc = q.new_zeros(*q.shape[:-1], Dv)
        for span in _spans(Sk, i0, i1, lo, hi):
            tile = _Tile(q, key, value, keep, lo, hi, (i0, i1), span)
            m, s, alpha, p = update(m, s, tile.x)
            acc = acc * alpha + p @ tile.v
        inverse, row_lse = finish(m, s)
        out[:, :, i0:i1] = (acc * inverse).reshape(B, Hq, i1 - i0, Dv)
        lse[:, :, i0:i1] = row_lse.reshape(B, Hq, i1 - i0)
    return out, lse


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    keep: Tensor | None,
    scale: float,
    lo: int | None,
    hi: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv: p is recomputed from lse tile by tile; ds = p * (dp - delta), delta = row(out * dout) - dlse.

    Where one tile holds whole rows, p is also divided by its own sums, which are 1 but for the rounding of lse; the
    kernels do so for all rows in float32.
    """
    B, Hq, Sq, D = query.shape
    Hkv, Sk = key.shape[1], key.shape[2]
    dtype = wide(query.dtype)
    dq = torch.empty_like(query)
    dk_wide = torch.zeros_like(key, dtype=dtype)
    dv_wide = torch.zeros_like(value, dtype=dtype)
    for i0 in range(0, Sq if lse.numel() else 0, TILE):
        i1 = min(i0 + TILE, Sq)
        rows = slice(i0, i1)
        q = _grouped(query[:, :, rows].to(dtype) * scale, Hkv)
        do = _grouped(dout[:, :, rows].to(dtype), Hkv)
        delta = (do * _grouped(out[:, :, rows].to(dtype), Hkv)).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta - _grouped(dlse[:, :, rows].to(dtype), Hkv).unsqueeze(-1)
        row_lse = _grouped(lse[:, :, rows], Hkv).unsqueeze(-1)
        alive = row_lse != NEG_INF
        q, do = torch.where(alive, q, 0.0), torch.where(alive, do, 0.0)
        row_lse = torch.where(alive, row_lse, float("inf"))  # exp(x - inf) = 0: no weight in a row without mass
        dq_tile = torch.zeros_like(q)
        spans = list(_spans(Sk, i0, i1, lo, hi))
        for j0, j1 in spans:
            tile = _Tile(q, key, value, keep, lo, hi, (i0, i1), (j0, j1))
            p = torch.exp(tile.x - row_lse)
            if len(spans) == 1:
                p = p / p.sum(-1, keepdim=True).masked_fill(~alive, 1.0)
            ds = p * (do @ tile.v.mT - delta)
            ds = torch.where(alive if tile.visible is None else tile.visible & alive, ds, 0.0)
            dv_wide[:, :, j0:j1] += p.mT @ do
            dk_wide[:, :, j0:j1] += ds.mT @ q
            dq_tile += ds @ tile.k
        dq[:, :, rows] = (dq_tile * scale).reshape(B, Hq, i1 - i0, D)
    return dq, torch.empty_like(key).copy_(dk_wide), torch.empty_like(value).copy_(dv_wide)
