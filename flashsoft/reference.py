"""Online softmax and tiled attention in plain PyTorch: the specification, and the backend of CPU tensors.

Every function here has a twin of the same name and arguments in `kernels`; `ops` calls either. Rows lie along the
last dimension, tensors may have any strides, and half precision is computed in float32 (float64 in float64).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

NEG_INF = float("-inf")
TILE = 512  # queries and keys of an attention tile


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, maxima and lse for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- the primitive: the state (m, s) of a row, as in kernels/softmax.py ------------------------------------------


def pivot(m: Tensor) -> Tensor:
    """What is subtracted for a maximum m: m itself, or 0 where inf - inf would turn a whole row into NaN."""
    return m.masked_fill(m.abs() == float("inf"), 0.0)


def update(m: Tensor, s: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Takes scores x (..., n) into the state m, s (..., 1): the new m and s, alpha (..., 1), weights p (..., n)."""
    m_new = torch.maximum(m, x.amax(-1, keepdim=True))
    at = pivot(m_new)
    alpha = torch.exp(m - at)
    p = torch.exp(x - at)
    return m_new, s * alpha + p.sum(-1, keepdim=True), alpha, p


def merge_states(m_a: Tensor, s_a: Tensor, m_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The state of two disjoint parts of a row, and the factors of what was summed over each."""
    m = torch.maximum(m_a, m_b)
    at = pivot(m)
    scale_a, scale_b = torch.exp(m_a - at), torch.exp(m_b - at)
    return m, s_a * scale_a + s_b * scale_b, scale_a, scale_b


def finish(m: Tensor, s: Tensor, scale: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """1 / s (0 for a row without mass, NaN for one with +inf in it) and the natural lse = scale * m + ln(s)."""
    inverse = torch.where(s == float("inf"), float("nan"), 1.0 / s).masked_fill(s == 0.0, 0.0)
    lse = (pivot(m) * scale + torch.log(s)).masked_fill(s == 0.0, NEG_INF)
    return inverse, lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the results over each; differentiable in all four."""
    a, b = lse_a.unsqueeze(-1), lse_b.unsqueeze(-1)
    # the result does not depend on where the exponentials are centred, so m takes no gradient
    m = torch.maximum(a, b).detach()
    at = pivot(m)
    scale_a, scale_b = torch.exp(a - at), torch.exp(b - at)
    s = scale_a + scale_b
    empty = s == 0.0
    mass = s.masked_fill(empty, 1.0)
    # what lies over no keys has no say, whatever stands in it
    out_a_or_0, out_b_or_0 = torch.where(a == NEG_INF, 0.0, out_a), torch.where(b == NEG_INF, 0.0, out_b)
    out = (out_a_or_0 * scale_a + out_b_or_0 * scale_b) / mass
    lse = (at + torch.log(mass)).masked_fill(empty, NEG_INF)
    return out.to(out_a.dtype), lse.squeeze(-1)


# ---- rows --------------------------------------------------------------------------------------------------------


def _row_state(x: Tensor) -> tuple[Tensor, Tensor]:
    """(m, s) of whole rows; one update, since a CPU gains nothing from cutting a row that it streams anyway."""
    empty = x.new_full((*x.shape[:-1], 1), NEG_INF), x.new_zeros((*x.shape[:-1], 1))
    if x.shape[-1] == 0:
        return empty
    m, s, _, _ = update(*empty, x)
    return m, s


def softmax_forward(x: Tensor, dtype: torch.dtype) -> Tensor:
    """y = exp(x - lse) along the last dimension; a row of -inf is NaN, as in torch."""
    x_wide = x.to(wide(x.dtype))
    m, s = _row_state(x_wide)
    inverse, _ = finish(m, s)
    inverse = inverse.masked_fill(s == 0.0, float("nan"))
    return torch.empty_like(x, dtype=dtype).copy_(torch.exp(x_wide - pivot(m)) * inverse)


def softmax_backward(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """dx = y * (dy - sum(y * dy))."""
    y_wide, dy_wide = y.to(wide(y.dtype)), dy.to(wide(y.dtype))
    dx = y_wide * (dy_wide - (y_wide * dy_wide).sum(-1, keepdim=True))
    return torch.empty_like(y, dtype=dtype).copy_(dx)


def log_softmax_forward(x: Tensor, dtype: torch.dtype) -> Tensor:
    """y = (x - m) - ln(s) along the last dimension, exact in x - m; a row of -inf is NaN, as in torch."""
    x_wide = x.to(wide(x.dtype))
    m, s = _row_state(x_wide)
    log_s = torch.log(s).masked_fill((s == 0.0) | (s == float("inf")), float("nan"))
    return torch.empty_like(x, dtype=dtype).copy_((x_wide - pivot(m)) - log_s)


def log_softmax_backward(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """dx = dy - exp(y) * sum(dy)."""
    y_wide, dy_wide = y.to(wide(y.dtype)), dy.to(wide(y.dtype))
    dx = dy_wide - torch.exp(y_wide) * dy_wide.sum(-1, keepdim=True)
    return torch.empty_like(y, dtype=dtype).copy_(dx)


def logsumexp_forward(x: Tensor) -> Tensor:
    """lse (float32, or float64) of each row; -inf for a row of -inf or of length 0."""
    _, lse = finish(*_row_state(x.to(wide(x.dtype))))
    return lse.squeeze(-1)


def logsumexp_backward(dlse: Tensor, x: Tensor, lse: Tensor) -> Tensor:
    """dx = dlse * exp(x - lse); 0 for a row without mass."""
    lse = lse.masked_fill(lse == NEG_INF, 0.0).unsqueeze(-1)
    return torch.empty_like(x).copy_(dlse.unsqueeze(-1) * torch.exp(x.to(lse.dtype) - lse))


# ---- logits ------------------------------------------------------------------------------------------------------


def band(Sq: int, Sk: int, lo: int | None, hi: int | None, device: torch.device, i0: int = 0, j0: int = 0) -> Tensor:
    """The boolean (Sq, Sk) tile at (i0, j0) of the mask lo <= j - i <= hi."""
    distance = torch.arange(j0, j0 + Sk, device=device) - torch.arange(i0, i0 + Sq, device=device).unsqueeze(-1)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if lo is not None:
        visible &= distance >= lo
    if hi is not None:
        visible &= distance <= hi
    return visible


def top_k_keep(x: Tensor, top_k: int | Tensor) -> Tensor:
    """True at the k largest of each row, the lowest index first among equals; `top_k` may be (..., 1)."""
    order = torch.sort(x, dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(x.shape[-1], device=x.device).expand_as(order))
    return rank < top_k


def fused_softmax_forward(
    x: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    lo: int | None,
    hi: int | None,
    bias: Tensor | None,
    top_k: int | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Softmax of x / temperature + bias over what mask, band and top-k keep, and its lse.

    `temperature` and `top_k` tensors have x's shape but for a last dimension of 1, `mask` has x's shape, `bias` its
    dimensions, some of size 1, and the band lies on the last two. A row of which nothing is kept is 0, its lse -inf.
    """
    z = x.to(wide(x.dtype))
    keep = torch.ones_like(z, dtype=torch.bool) if mask is None else mask
    if lo is not None or hi is not None:
        keep = keep & band(z.shape[-2], z.shape[-1], lo, hi, z.device)
    # with a bias x / T is a number of its own, and stays finite for scores to 1e8
    scale = _inverse_temperature(temperature, z.dtype, with_bias=bias is not None)
    if bias is not None:
        z, scale = z * scale + bias.to(z.dtype), torch.ones_like(scale) if isinstance(scale, Tensor) else 1.0
    z = z.masked_fill(~keep, NEG_INF)
    if top_k is not None:
        # chosen before the scale: it keeps the order, and rounding could make equals of what differs
        z = z.masked_fill(~top_k_keep(z, top_k), NEG_INF)
    m = z.amax(-1, keepdim=True) if z.shape[-1] else z.new_full((*z.shape[:-1], 1), NEG_INF)
    p = torch.exp((z - pivot(m)) * scale).masked_fill(z == NEG_INF, 0.0)
    inverse, lse = finish(m, p.sum(-1, keepdim=True), scale)
    return torch.empty_like(x).copy_(p * inverse), lse.squeeze(-1)


def fused_softmax_backward(
    dy: Tensor,
    dlse: Tensor | None,
    x: Tensor,
    y: Tensor,
    temperature: float | Tensor,
    bias: Tensor | None,
    need_temperature: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, dtemperature and dbias (shaped as bias); the last two None unless needed (bias None: not needed).

    With z = x / T + bias: dz = y * (dy - sum(y * dy) + dlse), dx = dz / T, dT = -sum(dz * x) / T^2. What was not
    kept has y = 0, so it gets no gradient, and what stands there is not read.
    """
    y_wide = y.to(wide(y.dtype))
    kept = y_wide != 0.0
    dy_wide = torch.where(kept, dy.to(y_wide.dtype), 0.0)
    shift = (y_wide * dy_wide).sum(-1, keepdim=True)
    if dlse is not None:
        shift = shift - dlse.unsqueeze(-1)
    dz = y_wide * torch.where(kept, dy_wide - shift, 0.0)
    scale = _inverse_temperature(temperature, y_wide.dtype)
    dx = torch.empty_like(x).copy_(dz * scale)
    dtemperature = None
    if need_temperature:
        assert isinstance(temperature, Tensor)
        rows = (dz * torch.where(kept, x.to(dz.dtype), 0.0)).sum(-1, keepdim=True)
        dtemperature = (-rows * scale * scale).to(temperature.dtype)
    dbias = None if bias is None else dz.sum_to_size(bias.shape).to(bias.dtype)
    return dx, dtemperature, dbias


def _inverse_temperature(temperature: float | Tensor, dtype: torch.dtype, with_bias: bool = False) -> float | Tensor:
    """1 / T for scores of `dtype`, NaN for T < 0; finite, so that (x - m) / T is 0 at the maximum however small T is,
    and x / T + bias is a number; not 0, so that -inf / T is -inf."""
    least = torch.finfo(dtype).tiny
    most = (1e30 if with_bias else 1e38) if dtype == torch.float32 else (1e150 if with_bias else 1e300)
    if isinstance(temperature, Tensor):
        T = temperature.to(dtype)
        return (1.0 / T.abs()).clamp(least, most).masked_fill(T < 0.0, float("nan"))
    return max(min(1.0 / temperature, most), least)


# ---- attention ---------------------------------------------------------------------------------------------------


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
