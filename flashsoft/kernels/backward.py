"""Attention backward in portable Triton, without atomics.

With p = exp(scale * x - lse) recomputed from the scores x = q @ k^T:

    dv = p^T @ dout        ds = p * (dout @ v^T - delta)        dk = scale * ds^T @ q        dq = scale * ds @ k

where delta = row(out * dout) - dlse. Two kernels, each recomputing p: one owns key tiles and walks over the queries
that see them (all query heads of the group, so that dk and dv need no reduction), one owns query tiles and walks
over the keys. Seven products of 2 * Sq * Sk * D flops a head in place of five, for results that need no ordering to
be the same bits every time, and no fp32 buffer the size of query.

In float32 the rounding of lse, eps * |lse| of every weight of a row, would be the largest error: there the queries'
kernel, which runs first, sums each row's weights, and both kernels divide by that sum, which is 1 but for it.

Rows without mass, and the padding that fills the last query tile, have a settled lse of +inf: every p of theirs is 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..tuning.attention import PREPARE_ROWS, ROW_PADDING, TileConfig, backward_config, input_precision, padded
from .forward import positive_scale
from .launch import Launch, Tensors, launch
from .masking import runs, seen, visible
from .softmax import settle, weights
from .tiles import dot_add, head_pointer, load_tile, score_dot, store_tile


@triton.jit(do_not_specialize=["Sq", "Hq", "padded_Sq"])
def attention_prepare_kernel(
    out, dout, dlse, lse, settled, delta, out_strides, dout_strides, dlse_strides, Sq, Hq, padded_Sq,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Per query: the settled lse, and delta = row(out * dout) - dlse; rows from Sq to padded_Sq as if without mass."""
    tiles = padded_Sq // BLOCK_M
    pid = tl.program_id(0)
    bh = pid // tiles
    b = bh // Hq
    h = bh % Hq
    rows = (pid % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = load_tile(head_pointer(out, out_strides, b, h), out_strides, rows, rows < Sq, DV, BLOCK_DV)
    do = load_tile(head_pointer(dout, dout_strides, b, h), dout_strides, rows, rows < Sq, DV, BLOCK_DV)
    row_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse is not None:
        at = head_pointer(dlse, dlse_strides, b, h) + rows.to(tl.int64) * dlse_strides[2]
        row_delta -= tl.load(at, mask=rows < Sq, other=0.0)
    row_lse = tl.load(lse + bh.to(tl.int64) * Sq + rows, mask=rows < Sq, other=float("-inf"))
    at = bh.to(tl.int64) * padded_Sq + rows
    tl.store(settled + at, settle(row_lse))
    tl.store(delta + at, row_delta)


@triton.jit
def _gather_keys(
    dk, dv, k, v, q_head, q_strides, do_head, do_strides, lse_head, delta_head, norm_head, keep_head, keep_strides,
    column0, start, end, Sq, Sk, scale, lo, hi,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Adds the query tiles of [start, end) of one head to dk and dv of a key tile; scores lie keys by queries."""
    for row0 in tl.range(start, end, BLOCK_M, num_stages=STAGES):
        rows = row0 + tl.arange(0, BLOCK_M)
        columns = column0 + tl.arange(0, BLOCK_N)
        # queries beyond Sq load as zeros with no weight, so that a last tile needs no mask of its scores
        loadable = rows < Sq
        if EDGE:
            # i sees j iff lo <= j - i <= hi, that is -hi <= i - j <= -lo
            if hi is not None:
                loadable = loadable & (rows >= column0 - hi)
            if lo is not None:
                loadable = loadable & (rows <= tl.minimum(column0 + BLOCK_N, Sk) - 1 - lo)
        q = load_tile(q_head, q_strides, rows, loadable, D, BLOCK_D)
        do = load_tile(do_head, do_strides, rows, loadable, DV, BLOCK_DV)
        # one column, reduced: loaded once and spread through shared memory. Loaded plainly, these go to every thread of
        # a column of scores by pointers of its own, and the registers for those spill
        row_lse = tl.max(tl.load(lse_head + rows[:, None]), 1)
        row_delta = tl.max(tl.load(delta_head + rows[:, None]), 1)
        if keep_head is not None:
            alive = (row_lse != float("inf"))[:, None]
            q = tl.where(alive, q, 0.0)
            do = tl.where(alive, do, 0.0)
        x = score_dot(k, q, PRECISION)
        if EDGE:
            taken = visible(rows[None, :], columns[:, None], Sq, Sk, lo, hi, keep_head, keep_strides)
            # NaN in a key that no query sees would pass the weight 0 of padding
            taken = taken & (rows < Sq)[None, :]
            x = tl.where(taken, x, float("-inf"))
        p = weights(x, row_lse[None, :], scale)
        if norm_head is not None:
            p *= tl.max(tl.load(norm_head + rows[:, None]), 1)[None, :]
        dv = dot_add(p.to(do.dtype), do, dv, PRECISION)
        dp = tl.dot(v, do.T, input_precision=PRECISION)
        ds = p * (dp - row_delta[None, :])
        if EDGE:
            ds = tl.where(taken, ds, 0.0)
        dk = dot_add(ds.to(q.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["Sq", "padded_Sq", "Sk", "lo", "hi", "Hq", "group"])
def attention_backward_keys_kernel(
    query, key, value, dout, settled, delta, norm, keep, dk_out, dv_out, q_strides, k_strides, v_strides, dout_strides,
    keep_strides, dk_strides, dv_strides, Sq, padded_Sq, Sk, lo, hi, Hq, group, scale, gradient_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, STAGES: tl.constexpr, NEGATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of one key head, over all query heads that read it."""
    tiles = tl.cdiv(Sk, BLOCK_N)
    pid = tl.program_id(0)
    column0 = (pid % tiles) * BLOCK_N
    Hkv = Hq // group
    b = pid // tiles // Hkv
    h_kv = pid // tiles % Hkv
    columns = column0 + tl.arange(0, BLOCK_N)
    k = load_tile(head_pointer(key, k_strides, b, h_kv), k_strides, columns, columns < Sk, D, BLOCK_D)
    v = load_tile(head_pointer(value, v_strides, b, h_kv), v_strides, columns, columns < Sk, DV, BLOCK_DV)
    if NEGATE:
        k = -k
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    last = tl.minimum(column0 + BLOCK_N, Sk) - 1
    # seen from a key the band is turned round
    back_lo = None
    back_hi = None
    if hi is not None:
        back_lo = -hi
    if lo is not None:
        back_hi = -lo
    start, inside, edge, end = runs(
        column0, last, Sq, back_lo, back_hi, BLOCK_M, ALL_EDGES=keep is not None, TAIL_IS_EDGE=False
    )
    for g in range(group):
        h = h_kv * group + g
        q_head = head_pointer(query, q_strides, b, h)
        do_head = head_pointer(dout, dout_strides, b, h)
        lse_head = settled + (b * Hq + h).to(tl.int64) * padded_Sq
        delta_head = delta + (b * Hq + h).to(tl.int64) * padded_Sq
        norm_head = norm
        if norm is not None:
            norm_head = norm + (b * Hq + h).to(tl.int64) * padded_Sq
        keep_head = keep
        if keep is not None:
            keep_head = head_pointer(keep, keep_strides, b, h)
        if back_lo is not None:
            dk, dv = _gather_keys(
                dk, dv, k, v, q_head, q_strides, do_head, dout_strides, lse_head, delta_head, norm_head, keep_head,
                keep_strides, column0, start, inside, Sq, Sk, scale, lo, hi,
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, PRECISION, EDGE=True,
            )  # fmt: skip
        if keep is None:
            dk, dv = _gather_keys(
                dk, dv, k, v, q_head, q_strides, do_head, dout_strides, lse_head, delta_head, norm_head, keep_head,
                keep_strides, column0, inside, edge, Sq, Sk, scale, lo, hi,
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, PRECISION, EDGE=False,
            )  # fmt: skip
        if back_hi is not None or keep is not None:
            dk, dv = _gather_keys(
                dk, dv, k, v, q_head, q_strides, do_head, dout_strides, lse_head, delta_head, norm_head, keep_head,
                keep_strides, column0, edge, end, Sq, Sk, scale, lo, hi,
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, PRECISION, EDGE=True,
            )  # fmt: skip
    dk_head = head_pointer(dk_out, dk_strides, b, h_kv)
    dv_head = head_pointer(dv_out, dv_strides, b, h_kv)
    store_tile(dk_head, dk_strides, columns, columns < Sk, dk * gradient_scale, D, BLOCK_D)
    store_tile(dv_head, dv_strides, columns, columns < Sk, dv, DV, BLOCK_DV)


@triton.jit
def _gather_queries(
    dq, total, q, do, row_lse, row_delta, k_head, k_strides, v_head, v_strides, keep_head, keep_strides, row0, start,
    end, Sq, Sk, scale, lo, hi,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
    SUM_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Adds the key tiles of [start, end) to dq of a query tile, and their weights to `total` if SUM_WEIGHTS."""
    for column0 in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        rows = row0 + tl.arange(0, BLOCK_M)
        columns = column0 + tl.arange(0, BLOCK_N)
        loadable = None
        if EDGE:
            loadable = seen(columns, row0, tl.minimum(row0 + BLOCK_M, Sq) - 1, Sk, lo, hi)
        k = load_tile(k_head, k_strides, columns, loadable, D, BLOCK_D)
        v = load_tile(v_head, v_strides, columns, loadable, DV, BLOCK_DV)
        if EDGE:
            taken = visible(rows[:, None], columns[None, :], Sq, Sk, lo, hi, keep_head, keep_strides)
            if keep_head is not None:
                some = (tl.max(taken.to(tl.int32), 0) > 0)[:, None]
                k = tl.where(some, k, 0.0)
                v = tl.where(some, v, 0.0)
        x = score_dot(q, k, PRECISION)
        if EDGE:
            x = tl.where(taken, x, float("-inf"))
        p = weights(x, row_lse[:, None], scale)
        if SUM_WEIGHTS:
            total += tl.sum(p, 1)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        ds = p * (dp - row_delta[:, None])
        if EDGE:
            ds = tl.where(taken, ds, 0.0)
        dq = dot_add(ds.to(k.dtype), k, dq, PRECISION)
    return dq, total


@triton.jit(do_not_specialize=["Sq", "padded_Sq", "Sk", "lo", "hi", "Hq", "group"])
def attention_backward_queries_kernel(
    query, key, value, dout, settled, delta, norm, keep, dq_out, q_strides, k_strides, v_strides, dout_strides,
    keep_strides, dq_strides, Sq, padded_Sq, Sk, lo, hi, Hq, group, scale, gradient_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, STAGES: tl.constexpr, NEGATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head, and into `norm`, unless it is None, 1 / (the sum of each row's weights)."""
    tiles = tl.cdiv(Sq, BLOCK_M)
    pid = tl.program_id(0)
    row0 = (tiles - 1 - pid % tiles) * BLOCK_M
    bh = pid // tiles
    b = bh // Hq
    h = bh % Hq
    k_head = head_pointer(key, k_strides, b, h // group)
    v_head = head_pointer(value, v_strides, b, h // group)
    keep_head = keep
    if keep is not None:
        keep_head = head_pointer(keep, keep_strides, b, h)
    rows = row0 + tl.arange(0, BLOCK_M)
    q = load_tile(head_pointer(query, q_strides, b, h), q_strides, rows, rows < Sq, D, BLOCK_D)
    do = load_tile(head_pointer(dout, dout_strides, b, h), dout_strides, rows, rows < Sq, DV, BLOCK_DV)
    if NEGATE:
        q = -q
    row_lse = tl.load(settled + bh.to(tl.int64) * padded_Sq + rows)
    row_delta = tl.load(delta + bh.to(tl.int64) * padded_Sq + rows)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    last = tl.minimum(row0 + BLOCK_M, Sq) - 1
    start, inside, edge, end = runs(row0, last, Sk, lo, hi, BLOCK_N, ALL_EDGES=keep is not None, TAIL_IS_EDGE=True)
    if lo is not None:
        dq, total = _gather_queries(
            dq, total, q, do, row_lse, row_delta, k_head, k_strides, v_head, v_strides, keep_head, keep_strides,
            row0, start, inside, Sq, Sk, scale, lo, hi,
            D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, PRECISION, EDGE=True, SUM_WEIGHTS=norm is not None,
        )  # fmt: skip
    if keep is None:
        dq, total = _gather_queries(
            dq, total, q, do, row_lse, row_delta, k_head, k_strides, v_head, v_strides, keep_head, keep_strides,
            row0, inside, edge, Sq, Sk, scale, lo, hi,
            D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, PRECISION, EDGE=False, SUM_WEIGHTS=norm is not None,
        )  # fmt: skip
    dq, total = _gather_queries(
        dq, total, q, do, row_lse, row_delta, k_head, k_strides, v_head, v_strides, keep_head, keep_strides,
        row0, edge, end, Sq, Sk, scale, lo, hi,
        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, PRECISION, EDGE=True, SUM_WEIGHTS=norm is not None,
    )  # fmt: skip
    if norm is not None:
        row_norm = 1.0 / tl.where(total == 0.0, 1.0, total)
        tl.store(norm + bh.to(tl.int64) * padded_Sq + rows, row_norm)
        dq *= row_norm[:, None]
    dq_head = head_pointer(dq_out, dq_strides, b, h)
    store_tile(dq_head, dq_strides, rows, rows < Sq, dq * gradient_scale, D, BLOCK_D)


def _plan_prepare(inputs: Tensors, outputs: Tensors) -> Launch:
    out, dout, dlse, _ = inputs
    B, Hq, Sq, Dv = out.shape
    padded_Sq = outputs[0].shape[-1]
    args = (out.stride(), dout.stride(), None if dlse is None else dlse.stride(), Sq, Hq, padded_Sq)
    options = dict(DV=Dv, BLOCK_M=PREPARE_ROWS, BLOCK_DV=padded(Dv))
    return Launch(attention_prepare_kernel, padded_Sq // PREPARE_ROWS * B * Hq, args, options)


def _arguments(
    inputs: Tensors, outputs: Tensors, scale: float, lo: int | None, hi: int | None, precision: str, tile: TileConfig
) -> tuple[tuple[object, ...], dict[str, object]]:
    """What the two gradient kernels take alike; `outputs`: the gradients."""
    query, key, value, dout, settled, _, _, keep = inputs
    (Hq, Sq, D), (Hkv, Sk, Dv) = query.shape[1:], value.shape[1:]
    args = (
        *(x.stride() for x in (query, key, value, dout)), None if keep is None else keep.stride(),
        *(x.stride() for x in outputs),
        Sq, settled.shape[-1], Sk, lo, hi, Hq, Hq // Hkv, positive_scale(scale), scale,
    )  # fmt: skip
    options = dict(
        D=D, DV=Dv, BLOCK_D=padded(D), BLOCK_DV=padded(Dv), NEGATE=scale < 0, PRECISION=precision,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STAGES=tile.num_stages, num_warps=tile.num_warps,
    )  # fmt: skip
    return args, options


def _plan_queries(inputs: Tensors, outputs: Tensors, *given: Any) -> Launch:
    query, value = inputs[0], inputs[2]
    tile = backward_config(query, value.shape[3]).queries
    programs = triton.cdiv(query.shape[2], tile.block_m) * query.shape[0] * query.shape[1]
    return Launch(attention_backward_queries_kernel, programs, *_arguments(inputs, outputs, *given, tile))


def _plan_keys(inputs: Tensors, outputs: Tensors, *given: Any) -> Launch:
    query, key, value = inputs[:3]
    tile = backward_config(query, value.shape[3]).keys
    programs = triton.cdiv(key.shape[2], tile.block_n) * key.shape[0] * key.shape[1]
    return Launch(attention_backward_keys_kernel, programs, *_arguments(inputs, outputs, *given, tile))


def attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    keep: torch.Tensor | None,
    scale: float,
    lo: int | None,
    hi: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, shaped and laid out like query, key, value."""
    B, Hq, Sq, _ = query.shape
    dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if lse.numel() == 0 or key.shape[2] == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    padded_Sq = triton.cdiv(Sq, ROW_PADDING) * ROW_PADDING
    settled, delta = lse.new_empty(2, B * Hq, padded_Sq)
    norm = lse.new_ones(B * Hq, padded_Sq) if query.dtype == torch.float32 else None
    keep = None if keep is None else keep.view(torch.uint8)
    given = (scale, lo, hi, input_precision(query.dtype))
    launch(_plan_prepare, (out, dout, dlse, lse), (settled, delta))
    tensors = (query, key, value, dout, settled, delta, norm, keep)
    launch(_plan_queries, tensors, (dq,), *given)
    launch(_plan_keys, tensors, (dk, dv), *given)
    return dq, dk, dv
