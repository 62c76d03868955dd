"""Attention forward and backward against the FLASH and cuDNN backends of scaled_dot_product_attention.

    flashsoft bench attention --out benchmarks/results      # or: python benchmarks/attention.py

bf16, 16,384 tokens and a hidden size of 2,048 in every case (B = 16384 / S, H = 2048 / D), in memory of (B,
S, H, D), which every contender takes without a copy. FLOPs: 4 B H S S D forward, half when causal, 2.5
times that backward. The roof is a bf16 matrix product of 8192^3 in the same run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import harness
import torch
from harness import Benchmark, Case, Contenders
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashsoft

CHUNK = 1024  # queries of float64 scores at a time
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(causal: bool) -> Attend:
    """Causal as torch means it: query i sees the keys up to i."""
    mask = flashsoft.Causal("upper_left") if causal else None
    return lambda q, k, v: flashsoft.attention(q, k, v, mask=mask)


def torchs(backend: SDPBackend, causal: bool) -> Attend:
    """torch's operator, on one backend or not at all."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def oracle(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, dq, dk, dv of one head in float64, a chunk of queries at a time."""
    q, k, v, dout = (t.double() for t in (q, k, v, dout))
    S, D = q.shape
    out, dq, dk, dv = (torch.zeros_like(t) for t in (q, q, k, v))
    keys = torch.arange(S, device=q.device)
    for first in range(0, S, CHUNK):
        part = slice(first, min(first + CHUNK, S))
        scores = q[part] @ k.T / math.sqrt(D)
        if causal:
            scores.masked_fill_(keys > keys[part, None], float("-inf"))
        p = torch.softmax(scores, -1)
        out[part] = p @ v
        dp = dout[part] @ v.T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / math.sqrt(D)
        dq[part] = ds @ k
        dk += ds.T @ q[part]
        dv += p.T @ dout[part]
    return out, dq, dk, dv


def attention_case(B: int, H: int, S: int, D: int, causal: bool, backward: bool) -> Case:
    """One shape in one direction; the last head of the last batch is compared with float64."""

    def build(device: torch.device) -> Contenders:
        q, k, v, dout = (torch.randn(B, S, H, D, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
        contenders = {
            "flashsoft": ours(causal),
            "sdpa_flash": torchs(SDPBackend.FLASH_ATTENTION, causal),
            "sdpa_cudnn": torchs(SDPBackend.CUDNN_ATTENTION, causal),
        }

        def make(attend: Attend) -> harness.Call:
            if not backward:
                return lambda: attend(q, k, v)
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            out = attend(*leaves)
            return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

        want = functools.cache(lambda: oracle(*(t[-1, -1] for t in (q, k, v, dout)), causal))

        def pairs(result: Tensor | Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
            got = result if backward else [result]
            return zip((t[-1, -1] for t in got), want()[1:] if backward else want()[:1], strict=True)

        providers = {name: functools.partial(make, attend) for name, attend in contenders.items()}
        return Contenders(providers, pairs)

    direction = "backward" if backward else "forward"
    columns = {"D": D, "causal": causal, "S": S, "B": B, "H": H, "direction": direction}
    work = 4 * B * H * S * S * D * (0.5 if causal else 1) * (2.5 if backward else 1)
    return Case("attention", columns, work, "TFLOP/s", "sdpa_cudnn", build)


def matmul_case(n: int) -> Case:
    """The roof of everything that multiplies matrices."""

    def build(device: torch.device) -> Contenders:
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        return Contenders({f"matmul bf16 {n}^3": lambda: lambda: a @ b})

    return Case("roof", {}, 2 * n**3, "TFLOP/s", f"matmul bf16 {n}^3", build)


def cases(heads: Iterable[int], lengths: Iterable[int], tokens: int, hidden: int) -> Iterator[Case]:
    """Forward, then backward, of every head size, mask and length."""
    shapes = itertools.product((False, True), heads, (False, True), lengths)
    for backward, D, causal, S in shapes:
        yield attention_case(tokens // S, hidden // D, S, D, causal, backward)


def every(args: argparse.Namespace) -> Iterator[Case]:
    """All cases, or a few."""
    if args.dry:
        return cases((16,), (20,), 40, 32)
    if args.quick:
        return cases((64, 128), (4096,), 16384, 2048)
    return cases((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384), 16384, 2048)


BENCHMARK = Benchmark(
    "attention",
    ("D", "causal", "S", "B", "H", "direction"),
    ("sdpa_flash", "sdpa_cudnn"),
    every,
    [matmul_case(8192)],
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run

if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
