"""Attention forward in portable Triton.

One program owns BLOCK_M queries of one head and walks over the key tiles they can see. Scores, weights and the state
(m, s) stay on chip; the output is rescaled by alpha as m grows and divided by s once, at the end.

Per tile of BLOCK_N keys: 2 * BLOCK_M * BLOCK_N * (D + Dv) flops on the matrix units, BLOCK_M * BLOCK_N exponentials,
and BLOCK_N * (D + Dv) elements read, from L2 after the first program of a head. In all: 2 * Sq * Sk * (D + Dv) flops
a head (half under a causal mask); query, key, value read and out, lse written.

Invariant: after each tile, acc = sum_j exp(scale * x_j - ln2 * m) * v_j, and s the same sum without v_j.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference.attention import empty_output
from ..tuning.attention import forward_config, input_precision, padded
from .launch import Launch, Tensors, launch
from .masking import runs, seen, visible
from .softmax import LN2, finish, update_folded
from .tiles import dot_add, head_pointer, load_tile, score_dot, store_tile


@triton.jit
def _attend(
    m, s, acc, q, k_head, k_strides, v_head, v_strides, keep_head, keep_strides, row0, start, end, Sq, Sk, scale,
    lo, hi,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Takes the key tiles of [start, end) into the state; EDGE tiles are masked."""
    for column0 in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        columns = column0 + tl.arange(0, BLOCK_N)
        loadable = None
        if EDGE:
            loadable = seen(columns, row0, tl.minimum(row0 + BLOCK_M, Sq) - 1, Sk, lo, hi)
        k = load_tile(k_head, k_strides, columns, loadable, D, BLOCK_D)
        x = score_dot(q, k, PRECISION)
        v = load_tile(v_head, v_strides, columns, loadable, DV, BLOCK_DV)
        if EDGE:
            rows = row0 + tl.arange(0, BLOCK_M)
            taken = visible(rows[:, None], columns[None, :], Sq, Sk, lo, hi, keep_head, keep_strides)
            x = tl.where(taken, x, float("-inf"))
            if keep_head is not None:
                v = tl.where((tl.max(taken.to(tl.int32), 0) > 0)[:, None], v, 0.0)
        m, s, alpha, p = update_folded(m, s, x, scale)
        acc = dot_add(p.to(v.dtype), v, acc * alpha[:, None], PRECISION)
    return m, s, acc


@triton.jit(do_not_specialize=["Sq", "Sk", "lo", "hi", "Hq", "group"])
def attention_forward_kernel(
    query, key, value, keep, out, lse, q_strides, k_strides, v_strides, keep_strides, out_strides, Sq, Sk, lo, hi,
    Hq, group, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, STAGES: tl.constexpr, NEGATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`scale` > 0; NEGATE flips the sign of the scores (through q, exactly), so that a maximum stays one."""
    tiles = tl.cdiv(Sq, BLOCK_M)
    pid = tl.program_id(0)
    # the last rows see most under a causal mask: they start first, and the tiles of a head run side by side
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
    if NEGATE:
        q = -q
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    s = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    last = tl.minimum(row0 + BLOCK_M, Sq) - 1
    start, inside, edge, end = runs(row0, last, Sk, lo, hi, BLOCK_N, ALL_EDGES=keep is not None, TAIL_IS_EDGE=True)
    if lo is not None:
        m, s, acc = _attend(
            m, s, acc, q, k_head, k_strides, v_head, v_strides, keep_head, keep_strides, row0, start, inside,
            Sq, Sk, scale, lo, hi, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, PRECISION, EDGE=True,
        )  # fmt: skip
    if keep is None:
        m, s, acc = _attend(
            m, s, acc, q, k_head, k_strides, v_head, v_strides, keep_head, keep_strides, row0, inside, edge,
            Sq, Sk, scale, lo, hi, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, PRECISION, EDGE=False,
        )  # fmt: skip
    m, s, acc = _attend(
        m, s, acc, q, k_head, k_strides, v_head, v_strides, keep_head, keep_strides, row0, edge, end,
        Sq, Sk, scale, lo, hi, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, PRECISION, EDGE=True,
    )  # fmt: skip
    inverse, row_lse = finish(m, s, LN2)
    store_tile(head_pointer(out, out_strides, b, h), out_strides, rows, rows < Sq, acc * inverse[:, None], DV, BLOCK_DV)
    tl.store(lse + bh.to(tl.int64) * Sq + rows, row_lse, mask=rows < Sq)


def positive_scale(scale: float) -> float:
    """|scale| for a kernel: the smallest normal number stands for 0, since 0 * -inf of a masked score is NaN."""
    return max(abs(scale), torch.finfo(torch.float32).tiny)


def _plan(inputs: Tensors, outputs: Tensors, scale: float, lo: int | None, hi: int | None, precision: str) -> Launch:
    query, key, value, keep = inputs
    B, Hq, Sq, D = query.shape
    Hkv, Sk, Dv = key.shape[1], key.shape[2], value.shape[3]
    config = forward_config(query, Dv)
    args = (
        query.stride(), key.stride(), value.stride(), None if keep is None else keep.stride(), outputs[0].stride(),
        Sq, Sk, lo, hi, Hq, Hq // Hkv, positive_scale(scale),
    )  # fmt: skip
    options = dict(
        D=D, DV=Dv, BLOCK_D=padded(D), BLOCK_DV=padded(Dv), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        STAGES=config.num_stages, NEGATE=scale < 0, PRECISION=precision, num_warps=config.num_warps,
    )  # fmt: skip
    return Launch(attention_forward_kernel, triton.cdiv(Sq, config.block_m) * B * Hq, args, options)


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keep: torch.Tensor | None,
    scale: float,
    lo: int | None,
    hi: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (B, Hq, Sq, Dv) and lse (B, Hq, Sq)."""
    B, Hq, Sq, _ = query.shape
    out = empty_output(query, value.shape[3])
    lse = query.new_empty_strided((B, Hq, Sq), (Hq * Sq, Sq, 1), dtype=torch.float32)
    if lse.numel() > 0:
        keep = None if keep is None else keep.view(torch.uint8)
        precision = input_precision(query.dtype)
        launch(_plan, (query, key, value, keep), (out, lse), scale, lo, hi, precision)
    return out, lse
