"""Statistics of rows for the backward of attention: what its kernels need of each query besides lse.

They lie in tensors of one row a head, each head's padded to whole tiles; packed sequences lie in theirs one after
another, each at a multiple of PADDING. Padding is as rows without mass: a settled lse of +inf, which makes weights 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..tuning.attention import PREPARE_ROWS, ROW_PADDING, columns
from .attention_launch import Numbers, near, sequences, tiles
from .attention_terms import place_of, program_of
from .heads import head_of, load_tile, row_products
from .launch import Launch, Tensors, launch
from .softmax import LN2, LOG2E, settle, weights

PADDING: tl.constexpr = tl.constexpr(ROW_PADDING)


@triton.jit
def statistics_at(pointer, place, padded, cu_q):
    """Where a head's statistics begin."""
    if cu_q is None:
        return pointer + place.stream.to(tl.int64) * padded
    else:
        start = (tl.load(cu_q + place.b) + place.b * PADDING) // PADDING * PADDING
        return pointer + place.h.to(tl.int64) * padded + start


@triton.jit(do_not_specialize=["Sq", "Hq", "padded", "tiles", "sequences", "shares"])
def attention_prepare_kernel(
    out, dout, dlse, lse, sink, cu_q, settled, delta, dsink, out_strides, dout_strides, dlse_strides, Sq, Hq, padded,
    tiles, sequences, shares, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Per query: the settled lse, +inf if it sees no key, and delta = row(out * dout) - dlse.

    In dsink, `shares` numbers a head, what a program's rows give to it: a sink's weight is p = exp(sink - lse), its
    value 0, so that its ds is p * (0 - delta).
    """
    pid = tl.program_id(0)
    parts: tl.constexpr = PADDING // BLOCK_M
    b, h, tile = program_of(pid // parts, tiles, Hq, cu_q, sequences, PADDING)
    place = place_of(b, h, Hq, Sq, Sq, None, cu_q, cu_q, False)
    if tile * PADDING >= place.Sq:
        return
    row0 = tile * PADDING + pid % parts * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    there = rows < place.Sq
    o = load_tile(head_of(out, out_strides, place.b, place.h, cu_q, NEAR), row0, there, BLOCK_M, DV, BLOCK_DV)
    do = load_tile(head_of(dout, dout_strides, place.b, place.h, cu_q, NEAR), row0, there, BLOCK_M, DV, BLOCK_DV)
    row_delta = row_products(o, do)  # a row that sees nothing, all 0, takes nothing from NaN in its gradient
    start = 0 if cu_q is None else tl.load(cu_q + place.b)
    if dlse is not None:
        at = dlse + place.h.to(tl.int64) * dlse_strides[1] + (start + rows).to(tl.int64) * dlse_strides[2]
        if cu_q is None:
            at += place.b.to(tl.int64) * dlse_strides[0]
        row_delta -= tl.load(at, mask=there, other=0.0)
    line = place.stream if cu_q is None else place.h
    row_lse = tl.load(lse + line.to(tl.int64) * Sq + start + rows, mask=there, other=float("-inf"))
    settled_lse = settle(row_lse)
    alone = row_lse == float("-inf")
    if sink is not None:
        sink_score = tl.load(sink + place.h).to(tl.float32)
        alone = row_lse <= sink_score * LOG2E * LN2  # as the forward rounds it
    tl.store(statistics_at(settled, place, padded, cu_q) + rows, tl.where(alone, float("inf"), settled_lse))
    tl.store(statistics_at(delta, place, padded, cu_q) + rows, tl.where(alone, 0.0, row_delta))
    if dsink is not None:
        p = weights(sink_score, settled_lse)
        tl.store(dsink + place.stream * shares + row0 // BLOCK_M, -tl.sum(tl.where(p == 0.0, 0.0, p * row_delta), 0))


def _plan(inputs: Tensors, outputs: Tensors, padded: int, shares: int) -> Launch:
    out, dout, dlse, _, _, cu_q = inputs
    B, Hq, Sq, Dv = out.shape  # type: ignore[union-attr]
    strides = [None if x is None else x.stride() for x in (out, dout, dlse)]
    options = dict(DV=Dv, BLOCK_M=PREPARE_ROWS, BLOCK_DV=columns(Dv), NEAR=near(out, dout), num_warps=4)
    total = tiles(out, cu_q, ROW_PADDING)  # type: ignore[arg-type]
    args = (*strides, Sq, Hq, padded, total, sequences(cu_q), shares)
    return Launch(attention_prepare_kernel, total * (ROW_PADDING // PREPARE_ROWS) * B * Hq, args, options)


def prepare(
    out: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    lse: Tensor,
    sink: Tensor | None,
    cu_q: Tensor | None,
    numbers: Numbers,
    sink_needs_gradient: bool,
) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """The settled lse and delta of every query, the length of their rows, and the gradient of a sink, if needed."""
    B, Hq, Sq, _ = out.shape
    padded = triton.cdiv(Sq + sequences(cu_q) * ROW_PADDING, ROW_PADDING) * ROW_PADDING
    settled, delta = lse.new_empty(2, B * Hq, padded)
    shares = triton.cdiv(numbers.longest_q, ROW_PADDING) * (ROW_PADDING // PREPARE_ROWS)
    dsink = None if not sink_needs_gradient else lse.new_zeros(sequences(cu_q) or B, Hq, shares)
    launch(_plan, (out, dout, dlse, lse, sink, cu_q), (settled, delta, dsink), padded, shares)
    return settled, delta, padded, None if dsink is None else dsink.sum((0, 2))
