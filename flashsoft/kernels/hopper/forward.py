"""Attention forward for Hopper: a persistent kernel of two or three consumers and a producer, in Gluon.

The producer (`producer.py`) has the copy engine bring queries, keys and values into rings (`rings.py`) in the order of
the scheduler (`scheduler.py`), and the consumers (`consumer.py`), a warpgroup each, turn them into out and lse. Tails
cost nothing: the copy engine reads zeros beyond the end of a tensor and writes nothing there.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...reference.scores import empty_output
from ...terms import Terms
from ...tuning.hopper import HopperConfig, hopper_config, section
from ...tuning.rows import device as facts_of
from ..exchange import board
from ..launch import Launch, TensorMap, Tensors, launch
from .consumer import consume
from .producer import WORDS, produce
from .rings import Ring, barriers
from .support import LINE, keys_seen

_NUMBERS = ["Sq", "Sk", "Hq", "group", "lo", "hi", "sequences", "tiles", "heads", "section"]


@gluon.jit
def _tiles(desc, TILES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [TILES, 1, 1, ROWS, COLUMNS], desc.layout)


@gluon.jit(do_not_specialize=_NUMBERS)
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, sink, q_more, k_more, cu_q, cu_k, out_desc, lse, out, queue,
    out_strides, Dv, Sq, Sk, Hq, group, scale, cap, lo, hi, sequences, tiles, heads, section,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, MORE: gl.constexpr, DV: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, QUEUE: gl.constexpr,
    OUT_COLUMNS: gl.constexpr, OUT_SLOTS: gl.constexpr, MASKED: gl.constexpr, PINNED: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, LOWER_RIGHT: gl.constexpr,
):  # fmt: skip
    """out and lse of all tiles of queries, `tiles` a head, of D + MORE and DV columns, zeros beyond the heads' own."""
    Q_TILES: gl.constexpr = Q_STAGES * CONSUMERS
    q_rest = None
    k_rest = None
    if q_more is not None:
        q_rest = _tiles(q_more, Q_TILES, 64, MORE)
        k_rest = _tiles(k_more, STAGES, BLOCK_N, MORE)
    queries = Ring(_tiles(q_desc, Q_TILES, 64, D), q_rest, barriers(Q_STAGES, 1), barriers(Q_STAGES, CONSUMERS))
    keys = Ring(_tiles(k_desc, STAGES, BLOCK_N, D), k_rest, barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    values = Ring(_tiles(v_desc, STAGES, BLOCK_N, DV), None, barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    outs = _tiles(out_desc, CONSUMERS * OUT_SLOTS, 64, OUT_COLUMNS)
    words = gl.allocate_shared_memory(gl.int32, [WORDS * Q_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    # what is known when the kernel runs, in one tuple; constants would lose their type there
    given = (
        out_desc, lse, out, sink, cu_q, cu_k, queries, keys, values, outs, words, queue, out_strides, Dv, Sq, Sk, Hq,
        scale, cap, lo, hi, sequences, heads,
    )  # fmt: skip
    fed = (
        q_desc, k_desc, v_desc, q_more, k_more, cu_q, cu_k, queries, keys, values, words, queue, Sq, Sk, Hq, group, lo,
        hi, sequences, tiles, heads, section,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (given, gl.constexpr(0), CONSUMERS, BLOCK_N, DV, OUT_SLOTS, MASKED, PINNED, LOWER_RIGHT)),
            (consume, (given, gl.constexpr(1), CONSUMERS, BLOCK_N, DV, OUT_SLOTS, MASKED, PINNED, LOWER_RIGHT)),
            (produce, (fed, CONSUMERS, BLOCK_N, D + MORE, DV, QUEUE, PINNED, LOWER_RIGHT)),
        ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (given, gl.constexpr(0), CONSUMERS, BLOCK_N, DV, OUT_SLOTS, MASKED, PINNED, LOWER_RIGHT)),
            (consume, (given, gl.constexpr(1), CONSUMERS, BLOCK_N, DV, OUT_SLOTS, MASKED, PINNED, LOWER_RIGHT)),
            (consume, (given, gl.constexpr(2), CONSUMERS, BLOCK_N, DV, OUT_SLOTS, MASKED, PINNED, LOWER_RIGHT)),
            (produce, (fed, CONSUMERS, BLOCK_N, D + MORE, DV, QUEUE, PINNED, LOWER_RIGHT)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def _shared_layout(dtype: torch.dtype, block: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def _map(tensor: Tensor, rows: int, columns: int, first: int, count: int) -> TensorMap:
    """Rows [first, first + count) of each head of a tensor (B, H, S, D), `rows` and `columns` of them at once."""
    B, H, _, D = tensor.shape
    block = (1, 1, rows, columns)
    # a stride that is never taken may be anything, but a tensor map wants multiples of 16 bytes
    strides = [stride if size > 1 else LINE for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    shape = (B, H, count, D)
    return TensorMap(block, shape, (*strides[:3], 1), first * tensor.stride(2), _shared_layout(tensor.dtype, block))


def _plan(
    inputs: Tensors, outputs: Tensors, scale: float, cap: float | None, lo: int | None, hi: int | None,
    lower_right: bool, longest: int, config: HopperConfig,
) -> Launch:  # fmt: skip
    query, key, value, *_, cu_q, _ = inputs
    out = outputs[0]
    assert query is not None and key is not None and value is not None and out is not None
    B, Hq, Sq, D = query.shape
    Hkv, Dv = key.shape[1], value.shape[3]
    banded = lo is not None or hi is not None
    if cu_q is None:
        tiles, sequences, strides = triton.cdiv(Sq, config.block_m), None, None
        first, count = keys_seen(Sq, key.shape[2], lo, hi)
        lo, hi = (None if limit is None else limit - first for limit in (lo, hi))
        longest = count
    else:
        sequences, strides = cu_q.shape[0] - 1, out.stride()
        tiles = Sq // config.block_m + sequences + 1
        first, count = 0, key.shape[2]
    programs = min(tiles * B * Hq, facts_of(query.get_device()).multiprocessors)
    scratch = config.scratch(programs)
    columns, more, values = config.columns, config.more, config.dv
    maps = {
        0: _map(query, 64, columns, 0, Sq),
        1: _map(key, config.block_n, columns, first, count),
        2: _map(value, config.block_n, values, first, count),
        8: _map(out, 64, config.out_columns, 0, Sq),
    }
    if more:
        maps |= {4: _map(query, 64, more, 0, Sq), 5: _map(key, config.block_n, more, first, count)}
    args = (
        *(() if scratch else (None,)),
        strides, Dv, Sq, count, Hq, Hq // Hkv, scale, cap, lo, hi, sequences,
        tiles, B * Hq, section(longest, D, Dv, B * Hq, Hq // Hkv, config.queue),
    )  # fmt: skip
    options = dict(
        CONSUMERS=config.consumers, BLOCK_N=config.block_n, D=columns, MORE=more, DV=values, STAGES=config.stages,
        Q_STAGES=config.q_stages, QUEUE=config.queue,
        OUT_COLUMNS=config.out_columns, OUT_SLOTS=config.out_slots,
        MASKED=banded or count % config.block_n != 0 or cu_q is not None, PINNED=config.pinned,
        REGISTERS=config.registers, PRODUCER_REGISTERS=config.producer_registers, LOWER_RIGHT=lower_right, num_warps=4,
    )  # fmt: skip
    on = query.device
    board_of = (lambda stream: board(on, scratch, stream)) if scratch else None
    return Launch(hopper_forward_kernel, programs, args, options, board_of, maps)


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, terms: Terms, config: HopperConfig | None = None
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), of what dispatch sends here: nothing else is refused."""
    B, Hq, Sq, D = query.shape
    out = empty_output(query, value.shape[3])
    lse = query.new_empty_strided((B, Hq, Sq), (Hq * Sq, Sq, 1), dtype=torch.float32)
    packed = terms.cu_q is not None
    uneven = packed or terms.lo is not None or terms.hi is not None
    longest = terms.max_k if packed else key.shape[2]
    config = config or hopper_config(D, value.shape[3], longest, uneven, query.dtype == torch.bfloat16)
    more = (query, key) if config.more else (None, None)
    sink, cu_q, cu_k = (None if x is None else x.contiguous() for x in (terms.sink, terms.cu_q, terms.cu_k))
    numbers = terms.scale, terms.softcap, terms.lo, terms.hi, terms.lower_right and packed, longest
    launch(_plan, (query, key, value, sink, *more, cu_q, cu_k), (out, lse, out if packed else None), *numbers, config)
    return out, lse
