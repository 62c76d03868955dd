"""The peers of attention, each loaded when asked for: one direction of one problem, as the call to time.

A loader raises ModuleNotFoundError for a library that is not here; a peer raises what it says of problems it cannot
take. FlashAttention-3 is the package `flash_attn_3`, or the shared object that BENCH_FA3_LIB names, which may need
the CUDA runtime it was built with: BENCH_CUDART12. FlashAttention-4 is `flash_attn.cute`, of flash-attn-4.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import peers
import torch
from attention_problem import Inputs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashsoft.tuning.timing import Call

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_autograd(attend: Attend, x: Inputs, backward: bool) -> Call:
    """Of a function that torch differentiates: itself, or its gradients alone."""
    if not backward:
        return functools.partial(attend, x.q, x.k, x.v)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, x.dout, retain_graph=True)


def sdpa(backend: SDPBackend, x: Inputs, backward: bool) -> Call:
    """torch's operator, on one backend or not at all; of packed sequences torch's own, which is FLASH."""
    causal = x.problem.causal
    if x.ends is not None:
        return by_autograd(functools.partial(packed_flash, x), x, backward)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return by_autograd(attend, x, backward)


def packed_flash(x: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's `varlen_attn`."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(x.problem.lengths)
    side = (-1, 0) if x.problem.causal else (-1, -1)
    return varlen_attn(q, k, v, x.ends, x.ends, longest, longest, window_size=side)


@functools.cache
def flex_attention() -> Callable[..., Tensor]:
    """FlexAttention, compiled: its own way to be fast."""
    from torch.nn.attention.flex_attention import flex_attention

    return peers.compiled(flex_attention)


def flexible(allowed: Callable[..., Tensor] | None, S: int, device: torch.device) -> Attend:
    """FlexAttention over what `allowed(b, h, i, j)` lets through (None: all), its block mask made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask

    blocks = None if allowed is None else create_block_mask(allowed, None, None, S, S, device=device)
    return lambda q, k, v: flex_attention()(q, k, v, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])


def flex(x: Inputs, backward: bool) -> Call:
    """FlexAttention under the problem's mask."""
    reach = x.problem.window

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i if reach is None else (j <= i) & (i - j < reach)

    return by_autograd(flexible(allowed if x.problem.causal else None, x.problem.S, x.q.device), x, backward)


@functools.cache
def fa3_operators() -> Any:
    """FlashAttention-3's operators, from wherever they are."""
    library, runtime = os.environ.get("BENCH_FA3_LIB"), os.environ.get("BENCH_CUDART12")
    if runtime:
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    if library:
        torch.ops.load_library(library)
    else:
        importlib.import_module("flash_attn_3._C")
    return torch.ops.flash_attn_3


def fa3(x: Inputs, backward: bool) -> Call:
    """FlashAttention-3, by its operators."""
    operators, (q, k, v, dout) = fa3_operators(), rows(x)
    masked: dict[str, Any] = {"is_causal": x.problem.causal}
    if x.problem.window is not None:
        masked |= {"window_size_left": x.problem.window - 1, "window_size_right": 0}

    def forward() -> tuple[Tensor, Tensor]:
        out, lse, *_ = operators.fwd(q, k, v, num_splits=1, **masked, **packing(x))
        return out, lse

    if not backward:
        return lambda: heads_first(x, forward()[0])
    out, lse = forward()

    def gradients() -> list[Tensor]:
        results = [torch.empty_like(t) for t in (q, k, v)]
        operators.bwd(dout, q, k, v, out, lse, *results, **masked, **packing(x))
        return [heads_first(x, t) for t in results]

    return gradients


def fa4(x: Inputs, backward: bool) -> Call:
    """FlashAttention-4, by the functions under its autograd."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # or every process compiles anew
    interface, (q, k, v, dout) = importlib.import_module("flash_attn.cute.interface"), rows(x)
    masked: dict[str, Any] = {"causal": x.problem.causal}
    if x.problem.window is not None:
        masked |= {"window_size_left": x.problem.window - 1, "window_size_right": 0}

    def forward() -> tuple[Tensor, Tensor]:
        out, lse, *_ = interface._flash_attn_fwd(q, k, v, return_lse=True, **masked, **packing(x))
        return out, lse

    if not backward:
        return lambda: heads_first(x, forward()[0])
    out, lse = forward()

    def gradients() -> list[Tensor]:
        results = interface._flash_attn_bwd(q, k, v, out, dout, lse, **masked, **packing(x))[:3]
        return [heads_first(x, t) for t in results]

    return gradients


def rows(x: Inputs) -> tuple[Tensor, ...]:
    """q, k, v, dout as both take them: (B, S, H, D), or packed (T, H, D)."""
    return tuple(heads_first(x, t) for t in (x.q, x.k, x.v, x.dout))


def heads_first(x: Inputs, t: Tensor) -> Tensor:
    """There and back again."""
    return t if x.ends is not None else t.transpose(1, 2)


def packing(x: Inputs) -> dict[str, Any]:
    """Where packed sequences begin and end, in the words that flashsoft, FlashAttention-3 and 4 have in common."""
    if x.ends is None:
        return {}
    longest = max(x.problem.lengths)
    return {"cu_seqlens_q": x.ends, "cu_seqlens_k": x.ends, "max_seqlen_q": longest, "max_seqlen_k": longest}


PEERS: dict[str, Callable[[Inputs, bool], Call]] = {
    "sdpa_flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "flex": flex,
    "fa3": fa3,
    "fa4": fa4,
}
PACKAGES = ("flash-attn-3", "flash-attn-4", "nvidia-cutlass-dsl")
