"""Attention forward in portable Triton.

One program owns BLOCK_M queries of one head and walks over the key tiles they can see. Scores, weights and the state
(m, s) stay on chip; the output is rescaled by alpha as m grows and divided by s once, at the end.

Per tile of BLOCK_N keys: 2 * BLOCK_M * BLOCK_N * (D + Dv) flops on the matrix units, BLOCK_M * BLOCK_N exponentials,
and BLOCK_N * (D + Dv) elements read, from L2 after the first program of a head. In all: 2 * Sq * Sk * (D + Dv) flops
a head (half under a causal mask); query, key, value read and out, lse written.

Invariant: after each tile, acc = sum_j exp(scale * x_j - ln2 * m) * v_j, and s the same sum without v_j. A sink is in
m and s from the start, a score without a value. Dropout takes weights out of acc only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference.attention import empty_output
from ..terms import Terms as Given
from ..tuning.attention import TileConfig, forward_config
from .attention_launch import Numbers, arguments, kind, near, numbers, sequences, table_of, tensors, tiles, widths
from .attention_scores import bias_of, kept, scores, unit
from .attention_terms import Terms, place_of, positive_scale, program_of, signed_scale
from .heads import dot_add, head_of, load_tile, scaled_rows, score_dot, signed, store_tile, zeros
from .launch import Launch, Tensors, launch
from .masking import runs, seen_keys, visible
from .packed_tail import clear_tail
from .softmax import LN2, LOG2E, finish, start_from, update_folded


@triton.jit
def _attend(
    m, s, acc, q, k_head, v_head, row0, start, end, gap_from, gap, scale, terms, place,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Takes the key tiles of [start, end), from `gap_from` on moved by `gap`, into the state; EDGE tiles are masked."""
    BLOCK_M: tl.constexpr = q[0].shape[0]
    for position in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        column0 = tl.multiple_of(position + tl.where(position >= gap_from, gap, 0), BLOCK_N)
        rows = row0 + tl.arange(0, BLOCK_M)
        r, c = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
        loadable = None
        if EDGE:
            loadable = seen_keys(row0, column0, terms, place, BLOCK_M, BLOCK_N)
        k = load_tile(k_head, column0, loadable, BLOCK_N, D, BLOCK_D)
        bias = bias_of(row0, column0, r, c, terms, place, TOGETHER=1 if EDGE else None)
        x = score_dot(q, k, PRECISION)
        v = load_tile(v_head, column0, loadable, BLOCK_N, DV, BLOCK_DV)
        x = scores(x, bias, row0, column0, r, c, scale, terms, place)
        if EDGE:
            taken = visible(row0, column0, r, c, terms, place, BLOCK_M, BLOCK_N, BY_KEYS=False)
            x = tl.where(taken, x, float("-inf"))
        m, s, alpha, p = update_folded(m, s, x, unit(scale, terms))
        if terms.seed is not None:
            p = tl.where(kept(rows, column0, terms, place, BLOCK_N), p, 0.0)
        acc = dot_add(p, v, scaled_rows(acc, alpha), PRECISION)
    return m, s, acc


@triton.jit(do_not_specialize=["Sq", "Sk", "lo", "hi", "Hq", "group", "tiles", "sequences", "threshold"])
def attention_forward_kernel(
    query, key, value, words, live, bias, slopes, sink, factor, query_ids, key_ids, lengths, cu_q, cu_k, seed,
    table, out, lse,
    q_strides, k_strides, v_strides, words_strides, live_strides, bias_strides, slopes_strides, ids_strides,
    table_strides,
    Sq, Sk, Hq, group, scale, softcap, threshold, dropout_scale, lo, hi, out_strides, tiles, sequences,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, NEGATE: tl.constexpr,
    NEAR: tl.constexpr, LOWER_RIGHT: tl.constexpr,
):  # fmt: skip
    """out and lse of BLOCK_M queries."""
    terms = Terms(
        words, words_strides, live, live_strides, bias, bias_strides, slopes, slopes_strides, factor, query_ids,
        key_ids, ids_strides, lengths, seed, scale, softcap, threshold, dropout_scale, lo, hi,
    )  # fmt: skip
    b, h, tile = program_of(tl.program_id(0), tiles, Hq, cu_q, sequences, BLOCK_M)
    place = place_of(b, h, Hq, Sq, Sk, lengths, cu_q, cu_k, LOWER_RIGHT)
    # the last rows see most under a causal mask: they start first, and the tiles of a head run side by side
    tile = tl.cdiv(place.Sq, BLOCK_M) - 1 - tile
    if tile < 0:
        return
    row0 = tile * BLOCK_M
    k_head = head_of(key, k_strides, b, h // group, cu_k, NEAR)
    v_head = head_of(value, v_strides, b, h // group, cu_k, NEAR)
    rows = row0 + tl.arange(0, BLOCK_M)
    there = rows < place.Sq
    q = load_tile(head_of(query, q_strides, b, h, cu_q, NEAR), row0, there, BLOCK_M, D, BLOCK_D)
    q = signed(q, signed_scale(terms, place), NEGATE)
    size = positive_scale(terms, place)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    s = tl.zeros([BLOCK_M], tl.float32)
    if sink is not None:
        m, s = start_from(tl.full([BLOCK_M], 0.0, tl.float32) + tl.load(sink + h).to(tl.float32) * LOG2E, LN2)
    acc = zeros(BLOCK_M, BLOCK_DV)
    last = tl.minimum(row0 + BLOCK_M, place.Sq) - 1
    if table is not None:
        table += b.to(tl.int64) * table_strides[0] + h.to(tl.int64) * table_strides[1] + tile * 4
    start, inside, edge, end = runs(row0, last, place.Sk, lo, hi, place.shift, table, BLOCK_N, TAIL_IS_EDGE=True)
    m, s, acc = _attend(
        m, s, acc, q, k_head, v_head, row0, inside, edge, 0, 0, size, terms, place,
        D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, PRECISION, EDGE=False,
    )  # fmt: skip
    # both edges in one loop, since states may be merged in any order: two would spill
    gap = edge - inside
    if (lo is None) and (table is None):
        start = edge
        inside = edge
        gap = 0
    m, s, acc = _attend(
        m, s, acc, q, k_head, v_head, row0, start, end - gap, inside, gap, size, terms, place,
        D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, PRECISION, EDGE=True,
    )  # fmt: skip
    inverse, row_lse = finish(m, s, LN2)
    if seed is not None:
        inverse *= dropout_scale
    store_tile(head_of(out, out_strides, b, h, cu_q, NEAR), row0, there, scaled_rows(acc, inverse), DV)
    lse_head = lse + (place.stream.to(tl.int64) * Sq if cu_q is None else h.to(tl.int64) * Sq + tl.load(cu_q + b))
    tl.store(lse_head + rows, row_lse, mask=there)


def _plan(inputs: Tensors, outputs: Tensors, numbers: Numbers, config: TileConfig) -> Launch:
    *given, table = inputs
    query, cu_q = given[0], given[12]
    total = tiles(query, cu_q, config.block_m)  # type: ignore[arg-type]
    args = (*arguments(given, table, numbers), outputs[0].stride(), total, sequences(cu_q))  # type: ignore[union-attr]
    options = dict(
        **widths(given, numbers.precision), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        STAGES=config.num_stages, PRECISION=numbers.precision, NEGATE=numbers.negate,
        NEAR=near(*given[:3], outputs[0]), LOWER_RIGHT=numbers.lower_right,
        **config.launch_options(),
    )  # fmt: skip
    programs = total * query.shape[0] * query.shape[1]  # type: ignore[union-attr]
    return Launch(attention_forward_kernel, programs, args, options)


def attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Given
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (B, Hq, Sq, Dv) and lse (B, Hq, Sq)."""
    B, Hq, Sq, _ = query.shape
    out = empty_output(query, value.shape[3])
    lse = query.new_empty_strided((B, Hq, Sq), (Hq * Sq, Sq, 1), dtype=torch.float32)
    if terms.cu_q is not None:  # what lies behind the last sequence sees nothing
        clear_tail(terms.cu_q, out)
        clear_tail(terms.cu_q, lse.unsqueeze(3), float("-inf"))
    if lse.numel() > 0:
        config = forward_config(query, value.shape[3], kind(query, terms))
        given = (query, key, value, *tensors(query, key, terms))
        table = table_of(given, config.block_m, config.block_n)
        launch(_plan, (*given, table), (out, lse), numbers(query, key, terms), config)
    return out, lse
