"""dk and dv of attention.

One program owns BLOCK_N keys of one key head and walks over the queries that see them, those of all query heads of its
group, so that nothing is left to add up afterwards; 8 * BLOCK_M * BLOCK_N * D flops a tile. Scores lie keys by queries:

    dv = p^T @ dout        dk = scale * ds^T @ q
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tuning.attention import TileConfig
from .attention_launch import Numbers, arguments, near, sequences, tiles, widths
from .attention_scores import bias_of, kept_by_keys, scores, through_softcap, unit
from .attention_terms import Terms, place_of, positive_scale, program_of, signed_scale
from .backward_rows import statistics_at
from .heads import dot_add, head_of, load_tile, only, plain_dot, scaled, score_dot, signed, store_tile, zeros
from .launch import Launch, Tensors
from .masking import runs, seeing_queries, seen_keys, visible
from .softmax import weights


@triton.jit
def _gather(
    dk, dv, k, v, q_head, do_head, lse_head, delta_head, norm_head, column0, start, end, gap_from, gap, scale, ds_scale,
    terms, place,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, TOGETHER: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Adds query tiles of one head, taken as the forward takes keys, to dk and dv of a key tile."""
    BLOCK_N: tl.constexpr = k[0].shape[0]
    for position in tl.range(start, end, BLOCK_M, num_stages=STAGES):
        row0 = tl.multiple_of(position + tl.where(position >= gap_from, gap, 0), BLOCK_M)
        rows = row0 + tl.arange(0, BLOCK_M)
        r, c = tl.arange(0, BLOCK_M)[None, :], tl.arange(0, BLOCK_N)[:, None]
        # queries beyond Sq load as zeros with no weight, so that a last tile needs no mask of its scores
        loadable = rows < place.Sq
        if EDGE:
            loadable = seeing_queries(row0, column0, lse_head, terms, place, BLOCK_M, BLOCK_N)
        q = load_tile(q_head, row0, loadable, BLOCK_M, D, BLOCK_D)
        do = load_tile(do_head, row0, loadable, BLOCK_M, DV, BLOCK_DV)
        # one column, reduced: loaded once and spread through shared memory. Loaded plainly, these go to every thread of
        # a column of scores by pointers of its own, and the registers for those spill
        row_lse = tl.max(tl.load(lse_head + rows[:, None]), 1)
        row_delta = tl.max(tl.load(delta_head + rows[:, None]), 1)
        if EDGE:
            taken = visible(row0, column0, r, c, terms, place, BLOCK_M, BLOCK_N, BY_KEYS=True)
        bias = bias_of(row0, column0, r, c, terms, place, TOGETHER=TOGETHER)
        products = score_dot(k, q, PRECISION)
        x = scores(products, bias, row0, column0, r, c, scale, terms, place)
        if EDGE:
            x = tl.where(taken, x, float("-inf"))
        p = weights(x, row_lse[None, :], unit(scale, terms))
        if norm_head is not None:
            p *= tl.max(tl.load(norm_head + rows[:, None]), 1)[None, :]
        dp = plain_dot(v, do, PRECISION)
        if terms.seed is None:
            dv = dot_add(p, do, dv, PRECISION)
        else:
            survives = kept_by_keys(rows, column0, terms, place, BLOCK_N)
            dv = dot_add(tl.where(survives, p * terms.dropout_scale, 0.0), do, dv, PRECISION)
            dp = tl.where(survives, dp * terms.dropout_scale, 0.0)
        ds = through_softcap(p * (dp - row_delta[None, :]), products, scale, terms)
        if terms.factor is not None:
            ds *= ds_scale
        dk = dot_add(ds, q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["Sq", "Sk", "lo", "hi", "Hq", "group", "tiles", "sequences", "threshold", "padded"])
def attention_backward_keys_kernel(
    query, key, value, words, live, bias, slopes, sink, factor, query_ids, key_ids, lengths, cu_q, cu_k, seed,
    dout, settled,
    delta, norm, table, dk_out, dv_out,
    q_strides, k_strides, v_strides, words_strides, live_strides, bias_strides, slopes_strides, ids_strides,
    table_strides,
    Sq, Sk, Hq, group, scale, softcap, threshold, dropout_scale, lo, hi, dout_strides, dk_strides, dv_strides, padded,
    tiles, sequences,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, NEGATE: tl.constexpr,
    NEAR: tl.constexpr, LOWER_RIGHT: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of one key head, over all query heads that read it."""
    terms = Terms(
        words, words_strides, live, live_strides, bias, bias_strides, slopes, slopes_strides, factor, query_ids,
        key_ids, ids_strides, lengths, seed, scale, softcap, threshold, dropout_scale, lo, hi,
    )  # fmt: skip
    b, h_kv, tile = program_of(tl.program_id(0), tiles, Hq // group, cu_k, sequences, BLOCK_N)
    column0 = tile * BLOCK_N
    place = place_of(b, h_kv * group, Hq, Sq, Sk, lengths, cu_q, cu_k, LOWER_RIGHT)
    length = place.Sq + place.offset
    if column0 >= length:
        return
    j = column0 + tl.arange(0, BLOCK_N)
    used = j < place.Sk
    loadable = seen_keys(0, column0, terms, place, place.Sq, BLOCK_N)
    plain_k = load_tile(head_of(key, k_strides, b, h_kv, cu_k, NEAR), column0, loadable, BLOCK_N, D, BLOCK_D)
    v = load_tile(head_of(value, v_strides, b, h_kv, cu_k, NEAR), column0, loadable, BLOCK_N, DV, BLOCK_DV)
    dk = zeros(BLOCK_N, BLOCK_D)
    dv = zeros(BLOCK_N, BLOCK_DV)
    # seen from a key the band is turned round
    back_lo = None
    back_hi = None
    if hi is not None:
        back_lo = -hi
    if lo is not None:
        back_hi = -lo
    last = tl.minimum(column0 + BLOCK_N, place.Sk) - 1
    queries = tl.where(column0 < place.Sk, place.Sq, 0)
    for g in range(group):
        h = h_kv * group + g
        place = place_of(b, h, Hq, Sq, Sk, lengths, cu_q, cu_k, LOWER_RIGHT)
        size = positive_scale(terms, place)
        head_scale = signed_scale(terms, place)
        k = signed(plain_k, head_scale, NEGATE)
        q_head = head_of(query, q_strides, b, h, cu_q, NEAR)
        do_head = head_of(dout, dout_strides, b, h, cu_q, NEAR)
        lse_head = statistics_at(settled, place, padded, cu_q)
        delta_head = statistics_at(delta, place, padded, cu_q)
        norm_head = norm
        if norm is not None:
            norm_head = statistics_at(norm, place, padded, cu_q)
        table_head = table
        if table is not None:
            table_head = table + b.to(tl.int64) * table_strides[0] + h.to(tl.int64) * table_strides[1] + tile * 4
        start, inside, edge, end = runs(
            column0, last, queries, back_lo, back_hi, -place.shift, table_head, BLOCK_M,
            TAIL_IS_EDGE=False,
        )  # fmt: skip
        dk, dv = _gather(
            dk, dv, k, v, q_head, do_head, lse_head, delta_head, norm_head, column0, inside, edge, 0, 0, size,
            head_scale, terms, place, D, DV, BLOCK_M, BLOCK_D, BLOCK_DV, STAGES, PRECISION, TOGETHER, EDGE=False,
        )  # fmt: skip
        if (lo is not None) or (hi is not None) or (table is not None):
            gap = edge - inside
            if (hi is None) and (table is None):
                start = edge
                inside = edge
                gap = 0
            dk, dv = _gather(
                dk, dv, k, v, q_head, do_head, lse_head, delta_head, norm_head, column0, start, end - gap, inside, gap,
                size, head_scale, terms, place, D, DV, BLOCK_M, BLOCK_D, BLOCK_DV, STAGES, PRECISION, TOGETHER,
                EDGE=True,
            )  # fmt: skip
    if factor is None:
        dk = scaled(dk, scale)
    there = j < length
    store_tile(head_of(dk_out, dk_strides, b, h_kv, cu_k, NEAR), column0, there, only(dk, used), D)
    store_tile(head_of(dv_out, dv_strides, b, h_kv, cu_k, NEAR), column0, there, only(dv, used), DV)


def plan(inputs: Tensors, outputs: Tensors, numbers: Numbers, tile: TileConfig, padded: int) -> Launch:
    """The launch for the terms, dout, the statistics of rows and their norm, and a table of runs."""
    *given, dout, _, _, _, table = inputs
    key, cu_k = given[1], given[13]
    total = tiles(key, cu_k, tile.block_n)  # type: ignore[arg-type]
    strides = (x.stride() for x in (dout, *outputs))  # type: ignore[union-attr]
    options = dict(
        **widths(given, numbers.precision), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        STAGES=tile.num_stages, PRECISION=numbers.precision, NEGATE=numbers.negate,
        NEAR=near(*given[:3], dout, *outputs), LOWER_RIGHT=numbers.lower_right, TOGETHER=numbers.together,
        **tile.launch_options(),
    )  # fmt: skip
    args = (*arguments(given, table, numbers), *strides, padded, total, sequences(cu_k))
    programs = total * key.shape[0] * key.shape[1]  # type: ignore[union-attr]
    return Launch(attention_backward_keys_kernel, programs, args, options)
