"""The gradient of a bias, summed over what it is broadcast to, without atomics.

One program owns a tile of the bias and computes ds of every tile of scores that reads it: over batch entries, heads,
queries, keys, wherever the bias has one entry for all. Two products a tile, 4 * BLOCK_M * BLOCK_N * D flops. Where that
leaves few programs the tiles are dealt to several shares, which are added afterwards in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tuning.attention import BIAS_PROGRAMS, TileConfig, bias_config
from .attention_launch import Numbers, arguments, near, widths
from .attention_scores import bias_of, kept, scores, unit
from .attention_terms import Terms, place_of, positive_scale, signed_scale
from .backward_rows import statistics_at
from .heads import head_of, load_tile, plain_dot, score_dot, signed
from .launch import Launch, Tensors, launch
from .masking import seen_keys, visible
from .softmax import weights


@triton.jit
def _gradient(
    query, key, value, dout, settled, delta, norm, q_strides, k_strides, v_strides, dout_strides, cu_q, cu_k, group,
    padded, row0, column0, terms, place,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, NEGATE: tl.constexpr, NEAR: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """ds of one tile of scores."""
    b, h = place.b, place.h
    rows = row0 + tl.arange(0, BLOCK_M)
    r, c = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    loadable = seen_keys(row0, column0, terms, place, BLOCK_M, BLOCK_N)
    row_lse = tl.load(statistics_at(settled, place, padded, cu_q) + rows)
    alive = (rows < place.Sq) & (row_lse != float("inf"))
    q = load_tile(head_of(query, q_strides, b, h, cu_q, NEAR), row0, alive, BLOCK_M, D, BLOCK_D)
    k = load_tile(head_of(key, k_strides, b, h // group, cu_k, NEAR), column0, loadable, BLOCK_N, D, BLOCK_D)
    do = load_tile(head_of(dout, dout_strides, b, h, cu_q, NEAR), row0, alive, BLOCK_M, DV, BLOCK_DV)
    v = load_tile(head_of(value, v_strides, b, h // group, cu_k, NEAR), column0, loadable, BLOCK_N, DV, BLOCK_DV)
    bias = bias_of(row0, column0, r, c, terms, place, TOGETHER=TOGETHER)
    x = score_dot(signed(q, signed_scale(terms, place), NEGATE), k, PRECISION)
    size = positive_scale(terms, place)
    x = scores(x, bias, row0, column0, r, c, size, terms, place)
    taken = visible(row0, column0, r, c, terms, place, BLOCK_M, BLOCK_N, BY_KEYS=False)
    x = tl.where(taken, x, float("-inf"))
    p = weights(x, row_lse[:, None], unit(size, terms))
    if norm is not None:
        p *= tl.load(statistics_at(norm, place, padded, cu_q) + rows)[:, None]
    dp = plain_dot(do, v, PRECISION)
    if terms.seed is not None:
        dp = tl.where(kept(rows, column0, terms, place, BLOCK_N), dp * terms.dropout_scale, 0.0)
    return p * (dp - tl.load(statistics_at(delta, place, padded, cu_q) + rows)[:, None])


@triton.jit(do_not_specialize=["Sq", "Sk", "lo", "hi", "Hq", "group", "threshold", "padded", "batch", "share"])
def attention_backward_bias_kernel(
    query, key, value, words, live, bias, slopes, sink, factor, query_ids, key_ids, lengths, cu_q, cu_k, seed,
    dout, settled,
    delta, norm, dbias,
    q_strides, k_strides, v_strides, words_strides, live_strides, bias_strides, slopes_strides, ids_strides,
    table_strides,
    Sq, Sk, Hq, group, scale, softcap, threshold, dropout_scale, lo, hi, dout_strides, sizes, batch, padded, share,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, NEGATE: tl.constexpr, NEAR: tl.constexpr, BATCH: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of one share of dbias (shares, *sizes); `sizes` are those of the bias.

    BATCH, HEADS, ROWS, COLUMNS: which dimensions of the scores the bias has; `share`: tiles of scores of a program.
    """
    terms = Terms(
        words, words_strides, live, live_strides, bias, bias_strides, slopes, slopes_strides, factor, query_ids,
        key_ids, ids_strides, lengths, seed, scale, softcap, threshold, dropout_scale, lo, hi,
    )  # fmt: skip
    row_tiles = tl.cdiv(Sq, BLOCK_M)
    column_tiles = tl.cdiv(Sk, BLOCK_N)
    own_rows = row_tiles if ROWS else 1
    own_columns = column_tiles if COLUMNS else 1
    pid = tl.program_id(0)
    own_column = pid % own_columns
    own_row = pid // own_columns % own_rows
    own_h = pid // own_columns // own_rows % sizes[1]
    own_b = pid // own_columns // own_rows // sizes[1] % sizes[0]
    part = pid // own_columns // own_rows // sizes[1] // sizes[0]
    loop_columns = 1 if COLUMNS else column_tiles
    loop_rows = 1 if ROWS else row_tiles
    loop_heads = 1 if HEADS else Hq
    total = loop_columns * loop_rows * loop_heads * (1 if BATCH else batch)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for n in tl.range(part * share, tl.minimum(part * share + share, total), num_stages=STAGES):
        row0 = (own_row if ROWS else n // loop_columns % loop_rows) * BLOCK_M
        column0 = (own_column if COLUMNS else n % loop_columns) * BLOCK_N
        h = own_h if HEADS else n // loop_columns // loop_rows % loop_heads
        b = own_b if BATCH else n // loop_columns // loop_rows // loop_heads
        place = place_of(b, h, Hq, Sq, Sk, lengths, cu_q, cu_k, False)
        # only loads that are made in every case are pipelined
        if (lo is None) and (hi is None) and (lengths is None):
            sums += _gradient(
                query, key, value, dout, settled, delta, norm, q_strides, k_strides, v_strides, dout_strides, cu_q,
                cu_k, group, padded, row0, column0, terms, place, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
                PRECISION, NEGATE, NEAR, TOGETHER,
            )  # fmt: skip
        else:
            met = column0 < place.Sk
            if lo is not None:
                met = met & (tl.minimum(column0 + BLOCK_N, Sk) - 1 >= row0 + lo)
            if hi is not None:
                met = met & (column0 <= tl.minimum(row0 + BLOCK_M, Sq) - 1 + hi)
            if met:
                sums += _gradient(
                    query, key, value, dout, settled, delta, norm, q_strides, k_strides, v_strides, dout_strides, cu_q,
                    cu_k, group, padded, row0, column0, terms, place, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
                    PRECISION, NEGATE, NEAR, TOGETHER,
                )  # fmt: skip
    out = dbias + (part * sizes[0] * sizes[1] + own_b * sizes[1] + own_h).to(tl.int64) * sizes[2] * sizes[3]
    i = own_row * BLOCK_M + tl.arange(0, BLOCK_M)
    j = own_column * BLOCK_N + tl.arange(0, BLOCK_N)
    if ROWS and COLUMNS:
        at = i.to(tl.int64)[:, None] * sizes[3] + j[None, :]
        tl.store(out + at, sums, mask=(i < Sq)[:, None] & (j < Sk)[None, :])
    elif ROWS:
        tl.store(out + i, tl.sum(sums, 1), mask=i < Sq)
    elif COLUMNS:
        tl.store(out + j, tl.sum(sums, 0), mask=j < Sk)
    else:
        tl.store(out, tl.sum(tl.sum(sums, 1), 0))


def _plan(
    inputs: Tensors, outputs: Tensors, numbers: Numbers, tile: TileConfig, padded: int, shares: int, share: int
) -> Launch:
    *given, dout, _, _, _ = inputs
    query, bias = given[0], given[5]
    B, Hq, Sq, _ = query.shape  # type: ignore[union-attr]
    Sk = numbers.longest_k
    sizes = tuple(bias.shape)  # type: ignore[union-attr]
    has = [size == full for size, full in zip(sizes, (B, Hq, Sq, Sk), strict=True)]
    programs = shares * sizes[0] * sizes[1]
    programs *= triton.cdiv(sizes[2], tile.block_m) * triton.cdiv(sizes[3], tile.block_n)
    options = dict(
        **widths(given, numbers.precision), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        PRECISION=numbers.precision, NEGATE=numbers.negate, NEAR=near(*given[:3], dout),
        BATCH=has[0], HEADS=has[1], ROWS=has[2], COLUMNS=has[3], TOGETHER=numbers.together,
        STAGES=tile.num_stages, **tile.launch_options(),
    )  # fmt: skip
    args = (*arguments(given, None, numbers), dout.stride(), sizes, B, padded, share)  # type: ignore[union-attr]
    return Launch(attention_backward_bias_kernel, programs, args, options)


def bias_gradient(inputs: Tensors, numbers: Numbers, tile: TileConfig, padded: int) -> Tensor:
    """dbias, shaped as the bias, for the terms, dout and the statistics of rows and their norm."""
    query, bias = inputs[0], inputs[5]
    B, Hq, Sq, _ = query.shape  # type: ignore[union-attr]
    sizes = bias.shape  # type: ignore[union-attr]
    grid = [(B, 1), (Hq, 1), (Sq, tile.block_m), (numbers.longest_k, tile.block_n)]
    tiles = [triton.cdiv(full, block) for full, block in grid]
    own = [triton.cdiv(size, block) for size, (_, block) in zip(sizes, grid, strict=True)]
    loops = 1
    programs = 1
    for all_tiles, own_tiles in zip(tiles, own, strict=True):
        programs *= own_tiles
        loops *= all_tiles // own_tiles
    share = triton.cdiv(loops, min(loops, triton.cdiv(BIAS_PROGRAMS, programs)))
    shares = triton.cdiv(loops, share)
    dtype = torch.float32 if shares > 1 else bias.dtype  # type: ignore[union-attr]
    dbias = torch.empty((shares, *sizes), dtype=dtype, device=bias.device)  # type: ignore[union-attr]
    tile = bias_config(tile, query, inputs[2].shape[3], bias)  # type: ignore[arg-type, union-attr]
    launch(_plan, inputs, (dbias,), numbers, tile, padded, shares, share)
    return dbias[0] if shares == 1 else dbias.sum(0).to(bias.dtype)  # type: ignore[union-attr]
