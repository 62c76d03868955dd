"""dq of attention, and with it the gradients of what is one number a head: ALiBi's slopes and a scale's factor.

One program owns BLOCK_M queries of one head and walks over the keys they see, as the forward does; 6 * BLOCK_M *
BLOCK_N * D flops a tile. With x the scores, d = |i + Sk - Sq - j| and q @ k^T the products:

    dq = scale * ds @ k        dslope = -sum ds * d        dfactor = scale * sum ds * (q @ k^T)

The last is the sum of row(q * (ds @ k)), which dq gives for nothing.

In float32 the rounding of lse, eps * |lse| of every weight of a row, would be the largest error of the backward. So
this kernel, which runs first, also sums each row's weights, and all kernels divide by that sum, 1 but for the rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tuning.attention import TileConfig
from .attention_launch import Numbers, arguments, near, sequences, tiles, widths
from .attention_scores import bias_of, distance, kept, scores, through_softcap, unit
from .attention_terms import Terms, place_of, positive_scale, program_of, signed_scale
from .backward_rows import statistics_at
from .heads import (
    dot_add,
    head_of,
    load_tile,
    plain_dot,
    scaled,
    scaled_rows,
    score_dot,
    signed,
    store_tile,
    tile_products,
    zeros,
)
from .launch import Launch, Tensors
from .masking import runs, seen_keys, visible
from .softmax import weights


@triton.jit
def _gather(
    dq, total, slope_sum, q, do, row_lse, row_delta, k_head, v_head, row0, start, end, gap_from, gap, scale,
    terms, place,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr, SUM_WEIGHTS: tl.constexpr,
    SLOPES: tl.constexpr,
):  # fmt: skip
    """Adds key tiles, as in the forward, to dq of a query tile, their weights to `total`, ds * d to `slope_sum`."""
    BLOCK_M: tl.constexpr = q[0].shape[0]
    for position in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        column0 = tl.multiple_of(position + tl.where(position >= gap_from, gap, 0), BLOCK_N)
        rows = row0 + tl.arange(0, BLOCK_M)
        r, c = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
        loadable = None
        if EDGE:
            loadable = seen_keys(row0, column0, terms, place, BLOCK_M, BLOCK_N)
        k = load_tile(k_head, column0, loadable, BLOCK_N, D, BLOCK_D)
        v = load_tile(v_head, column0, loadable, BLOCK_N, DV, BLOCK_DV)
        if EDGE:
            taken = visible(row0, column0, r, c, terms, place, BLOCK_M, BLOCK_N, BY_KEYS=False)
        bias = bias_of(row0, column0, r, c, terms, place, TOGETHER=1 if EDGE else None)
        products = score_dot(q, k, PRECISION)
        x = scores(products, bias, row0, column0, r, c, scale, terms, place)
        if EDGE:
            x = tl.where(taken, x, float("-inf"))
        p = weights(x, row_lse[:, None], unit(scale, terms))
        if SUM_WEIGHTS:
            total += tl.sum(p, 1)
        dp = plain_dot(do, v, PRECISION)
        if terms.seed is not None:
            dp = tl.where(kept(rows, column0, terms, place, BLOCK_N), dp * terms.dropout_scale, 0.0)
        ds = p * (dp - row_delta[:, None])
        if SLOPES:
            slope_sum += tl.sum(ds * distance(row0, column0, r, c, place), 1)
        ds = through_softcap(ds, products, scale, terms)
        dq = dot_add(ds, k, dq, PRECISION)
    return dq, total, slope_sum


@triton.jit(
    do_not_specialize=["Sq", "Sk", "lo", "hi", "Hq", "group", "tiles", "sequences", "shares", "threshold", "padded"]
)
def attention_backward_queries_kernel(
    query, key, value, words, live, bias, slopes, sink, factor, query_ids, key_ids, lengths, cu_q, cu_k, seed,
    dout, settled,
    delta, table, dq_out, norm, dslopes, dfactor,
    q_strides, k_strides, v_strides, words_strides, live_strides, bias_strides, slopes_strides, ids_strides,
    table_strides,
    Sq, Sk, Hq, group, scale, softcap, threshold, dropout_scale, lo, hi, dout_strides, dq_strides, padded, tiles,
    sequences, shares,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, NEGATE: tl.constexpr,
    NEAR: tl.constexpr, LOWER_RIGHT: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries; unless None, 1 / (the sum of each row's weights) in `norm`, and a tile's share of sums.

    `norm` begins as ones, `dslopes` and `dfactor`, `shares` numbers a head, as zeros.
    """
    terms = Terms(
        words, words_strides, live, live_strides, bias, bias_strides, slopes, slopes_strides, factor, query_ids,
        key_ids, ids_strides, lengths, seed, scale, softcap, threshold, dropout_scale, lo, hi,
    )  # fmt: skip
    b, h, tile = program_of(tl.program_id(0), tiles, Hq, cu_q, sequences, BLOCK_M)
    place = place_of(b, h, Hq, Sq, Sk, lengths, cu_q, cu_k, LOWER_RIGHT)
    tile = tl.cdiv(place.Sq, BLOCK_M) - 1 - tile
    if tile < 0:
        return
    row0 = tile * BLOCK_M
    k_head = head_of(key, k_strides, b, h // group, cu_k, NEAR)
    v_head = head_of(value, v_strides, b, h // group, cu_k, NEAR)
    rows = row0 + tl.arange(0, BLOCK_M)
    there = rows < place.Sq
    head_scale = signed_scale(terms, place)
    row_lse = tl.load(statistics_at(settled, place, padded, cu_q) + rows)
    alive = there & (row_lse != float("inf"))
    q = load_tile(head_of(query, q_strides, b, h, cu_q, NEAR), row0, alive, BLOCK_M, D, BLOCK_D)
    q = signed(q, head_scale, NEGATE)
    do = load_tile(head_of(dout, dout_strides, b, h, cu_q, NEAR), row0, alive, BLOCK_M, DV, BLOCK_DV)
    size = positive_scale(terms, place)
    row_delta = tl.load(statistics_at(delta, place, padded, cu_q) + rows)
    dq = zeros(BLOCK_M, BLOCK_D)
    total = tl.zeros([BLOCK_M], tl.float32)
    slope_sum = tl.zeros([BLOCK_M], tl.float32)
    if (sink is not None) and (norm is not None):
        total = weights(tl.load(sink + h).to(tl.float32), row_lse)
    last = tl.minimum(row0 + BLOCK_M, place.Sq) - 1
    if table is not None:
        table += b.to(tl.int64) * table_strides[0] + h.to(tl.int64) * table_strides[1] + tile * 4
    start, inside, edge, end = runs(row0, last, place.Sk, lo, hi, place.shift, table, BLOCK_N, TAIL_IS_EDGE=True)
    dq, total, slope_sum = _gather(
        dq, total, slope_sum, q, do, row_lse, row_delta, k_head, v_head, row0, inside, edge, 0, 0, size, terms, place,
        D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, PRECISION, EDGE=False, SUM_WEIGHTS=norm is not None,
        SLOPES=dslopes is not None,
    )  # fmt: skip
    gap = edge - inside
    if (lo is None) and (table is None):
        start = edge
        inside = edge
        gap = 0
    dq, total, slope_sum = _gather(
        dq, total, slope_sum, q, do, row_lse, row_delta, k_head, v_head, row0, start, end - gap, inside, gap, size,
        terms, place, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, PRECISION, EDGE=True, SUM_WEIGHTS=norm is not None,
        SLOPES=dslopes is not None,
    )  # fmt: skip
    if norm is not None:
        row_norm = 1.0 / tl.where(total == 0.0, 1.0, total)
        tl.store(statistics_at(norm, place, padded, cu_q) + rows, row_norm)
        dq = scaled_rows(dq, row_norm)
        slope_sum *= row_norm
    if dslopes is not None:
        tl.store(dslopes + place.stream * shares + tile, -tl.sum(slope_sum, 0))
    if dfactor is not None:
        # q was negated with the scale
        share = tile_products(dq, q)
        tl.store(dfactor + place.stream * shares + tile, share * tl.where(head_scale < 0.0, -scale, scale))
    store_tile(head_of(dq_out, dq_strides, b, h, cu_q, NEAR), row0, there, scaled(dq, head_scale), D)


def plan(inputs: Tensors, outputs: Tensors, numbers: Numbers, tile: TileConfig, padded: int) -> Launch:
    """The launch for the terms, dout and the statistics of rows, and a table of runs."""
    *given, dout, _, _, table = inputs
    query, cu_q = given[0], given[12]
    total = tiles(query, cu_q, tile.block_m)  # type: ignore[arg-type]
    strides = (dout.stride(), outputs[0].stride())  # type: ignore[union-attr]
    options = dict(
        **widths(given, numbers.precision), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        STAGES=tile.num_stages, PRECISION=numbers.precision, NEGATE=numbers.negate,
        NEAR=near(*given[:3], dout, outputs[0]), LOWER_RIGHT=numbers.lower_right,
        **tile.launch_options(),
    )  # fmt: skip
    args = (*arguments(given, table, numbers), *strides, padded, total, sequences(cu_q), _longest(numbers, tile))
    programs = total * query.shape[0] * query.shape[1]  # type: ignore[union-attr]
    return Launch(attention_backward_queries_kernel, programs, args, options)


def _longest(numbers: Numbers, tile: TileConfig) -> int:
    """Tiles of the longest row of queries."""
    return triton.cdiv(numbers.longest_q, tile.block_m)


def shares(query: Tensor, cu_q: Tensor | None, numbers: Numbers, tile: TileConfig) -> Tensor:
    """Zeros (B or sequences, Hq, tiles), for one number a tile."""
    B, Hq = query.shape[:2]
    return query.new_zeros((sequences(cu_q) or B, Hq, _longest(numbers, tile)), dtype=torch.float32)
