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
from ..launch import Launch, TensorMap, Tensors, launch
from .consumer import consume
from .producer import produce
from .rings import Ring, barriers
from .support import keys_seen, why_not

_NUMBERS = ["Sq", "Sk", "Hq", "group", "lo", "hi", "tiles", "total", "section"]


@gluon.constexpr_function
def _power_of_two(n):
    return 1 << (n - 1).bit_length()


@gluon.jit(do_not_specialize=_NUMBERS)
def attention_forward_kernel(
    q_desc, k_desc, v_desc, sink, out_desc, lse, queue,
    Sq, Sk, Hq, group, scale, lo, hi, tiles, total, section,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, TURNS: gl.constexpr, FENCE: gl.constexpr, QUEUE: gl.constexpr, MASKED: gl.constexpr,
    PINNED: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out and lse of all `total` tiles of queries."""
    dtype: gl.constexpr = q_desc.dtype
    queries = Ring(
        gl.allocate_shared_memory(dtype, [_power_of_two(Q_STAGES * CONSUMERS), 1, 1, 64, D], q_desc.layout),
        barriers(Q_STAGES, 1),
        barriers(Q_STAGES, CONSUMERS),
    )
    keys = Ring(
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout),
        barriers(STAGES, 1),
        barriers(STAGES, CONSUMERS),
    )
    values = Ring(
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, DV], v_desc.layout),
        barriers(STAGES, 1),
        barriers(STAGES, CONSUMERS),
    )
    outs = gl.allocate_shared_memory(dtype, [_power_of_two(CONSUMERS), 1, 1, 64, DV], out_desc.layout)
    numbers = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    # constants stand in each list of arguments for themselves: in a shared tuple they would lose their type
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (out_desc, lse, sink, queries, keys, values, outs, numbers, Sq, Sk, Hq, scale, lo, hi, tiles,
                       total, section, gl.constexpr(0), CONSUMERS, BLOCK_N, D, DV, TURNS, FENCE, MASKED, PINNED)),
            (consume, (out_desc, lse, sink, queries, keys, values, outs, numbers, Sq, Sk, Hq, scale, lo, hi, tiles,
                       total, section, gl.constexpr(1), CONSUMERS, BLOCK_N, D, DV, TURNS, FENCE, MASKED, PINNED)),
            (produce, (q_desc, k_desc, v_desc, queries, keys, values, numbers, queue, Sq, Sk, Hq, group, lo, hi, tiles,
                       total, section, CONSUMERS, BLOCK_N, D, DV, QUEUE)),
        ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (out_desc, lse, sink, queries, keys, values, outs, numbers, Sq, Sk, Hq, scale, lo, hi, tiles,
                       total, section, gl.constexpr(0), CONSUMERS, BLOCK_N, D, DV, TURNS, FENCE, MASKED, PINNED)),
            (consume, (out_desc, lse, sink, queries, keys, values, outs, numbers, Sq, Sk, Hq, scale, lo, hi, tiles,
                       total, section, gl.constexpr(1), CONSUMERS, BLOCK_N, D, DV, TURNS, FENCE, MASKED, PINNED)),
            (consume, (out_desc, lse, sink, queries, keys, values, outs, numbers, Sq, Sk, Hq, scale, lo, hi, tiles,
                       total, section, gl.constexpr(2), CONSUMERS, BLOCK_N, D, DV, TURNS, FENCE, MASKED, PINNED)),
            (produce, (q_desc, k_desc, v_desc, queries, keys, values, numbers, queue, Sq, Sk, Hq, group, lo, hi, tiles,
                       total, section, CONSUMERS, BLOCK_N, D, DV, QUEUE)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def _shared_layout(dtype: torch.dtype, block: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def _map(tensor: Tensor, rows: int, first: int, count: int) -> TensorMap:
    """Rows [first, first + count) of each head of a tensor (B, H, S, D), `rows` of them at once."""
    B, H, _, D = tensor.shape
    block = (1, 1, rows, D)
    # a stride that is never taken may be anything, but a tensor map wants multiples of 16 bytes
    strides = [stride if size > 1 else D for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    shape = (B, H, count, D)
    return TensorMap(block, shape, (*strides[:3], 1), first * tensor.stride(2), _shared_layout(tensor.dtype, block))


_queues: dict[tuple[int, int], Tensor] = {}


def _queue_on(device: int, stream: int) -> Tensor:
    """Two counters, zero before and after every launch: one pair a stream, and one for every launch in a graph."""
    if device >= 0 and torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    place = "cpu" if device < 0 else device
    queue = _queues.get((device, stream))
    if queue is None:
        queue = _queues[device, stream] = torch.zeros(2, dtype=torch.int32, device=place)
    return queue


def _plan(
    inputs: Tensors, outputs: Tensors, scale: float, lo: int | None, hi: int | None, config: HopperConfig
) -> Launch:
    query, key, value, sink = inputs
    out, lse = outputs
    assert query is not None and key is not None and value is not None and out is not None
    B, Hq, Sq, D = query.shape
    Hkv, Dv = key.shape[1], value.shape[3]
    first, count = keys_seen(Sq, key.shape[2], lo, hi)
    banded = lo is not None or hi is not None
    tiles = triton.cdiv(Sq, config.block_m)
    total = tiles * B * Hq
    device = query.get_device()
    programs = min(total, torch.cuda.get_device_properties(device).multi_processor_count) if device >= 0 else 132
    maps = {
        0: _map(query, 64, 0, Sq),
        1: _map(key, config.block_n, first, count),
        2: _map(value, config.block_n, first, count),
        4: _map(out, 64, 0, Sq),
    }
    args = (
        *(() if config.queue else (None,)),
        Sq, count, Hq, Hq // Hkv, scale, None if lo is None else lo - first, None if hi is None else hi - first,
        tiles, total, section(count, D, Dv, B * Hq, Hq // Hkv, banded),
    )  # fmt: skip
    options = dict(
        CONSUMERS=config.consumers, BLOCK_N=config.block_n, D=D, DV=Dv, STAGES=config.stages, Q_STAGES=config.q_stages,
        TURNS=config.turns, FENCE=config.fence, QUEUE=config.queue, MASKED=banded or count % config.block_n != 0,
        PINNED=config.pinned, REGISTERS=config.registers, PRODUCER_REGISTERS=config.producer_registers, num_warps=4,
    )  # fmt: skip
    queue = (lambda stream: _queue_on(device, stream)) if config.queue else None
    return Launch(attention_forward_kernel, programs, args, options, queue, maps)


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, terms: Terms, config: HopperConfig | None = None
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), for what `why_not` has no reason against."""
    reason = why_not(query, key, value, terms)
    if reason is not None:
        raise ValueError(f"the Hopper kernel cannot run this: {reason}")
    B, Hq, Sq, D = query.shape
    out = empty_output(query, value.shape[3])
    lse = query.new_empty_strided((B, Hq, Sq), (Hq * Sq, Sq, 1), dtype=torch.float32)
    config = config or hopper_config(D, value.shape[3], terms.lo is not None or terms.hi is not None)
    sink = None if terms.sink is None else terms.sink.contiguous()
    launch(_plan, (query, key, value, sink), (out, lse), terms.scale, terms.lo, terms.hi, config)
    return out, lse
