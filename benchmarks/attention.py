"""Attention against SDPA's FLASH and cuDNN backends, FlexAttention, FlashAttention-3 and FlashAttention-4.

    flashsoft bench attention --out benchmarks/results      # or: python benchmarks/attention.py
    flashsoft bench attention --only section=attention,gqa --only direction=forward

bf16. Sections, all forward but the first, which is backward too:
- `attention`: D of 64, 128 and 256, S of 512 to 16,384, 16,384 tokens, a hidden size of 2,048 (B = 16384 / S,
  H = 2048 / D). FlexAttention at a few lengths only, to spare time.
- `gqa`: 32 heads of queries over 8 of keys.
- `window`: causal windows on one sequence of 16,384 tokens; cuDNN has none, the yardstick is FlexAttention.
- `mla`: 16 heads of 192, of value 128.
- `varlen`: 64 packed sequences of 64 to 2,048 tokens, causal; the yardstick is the portable kernels.
Memory is (B, S, H, D) or packed (T, H, D), which every contender takes without a copy. `flashsoft_triton` is the
portable kernels asked for by name, where dispatch picks others. FLOPs: 2 B H S S (D + Dv) forward, half when causal,
those of the kept scores under a window and packed, 2.5 times that backward. The roof is a bf16 matrix product of
8192^3 in the same run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import attention_peers
import harness
import torch
from attention_problem import Inputs, Problem, documents
from harness import Benchmark, Case, Contenders
from torch import Tensor

import flashsoft
from flashsoft import dispatch

FLEX_AT = (1024, 4096, 16384)
PORTABLE = "flashsoft_triton"


def ours(backend: str | None, x: Inputs, backward: bool) -> harness.Call:
    """flashsoft's call; no backend named: whatever dispatch picks."""
    mask: flashsoft.Causal | flashsoft.Window | None = flashsoft.Causal("upper_left") if x.problem.causal else None
    if x.problem.window is not None:
        mask = flashsoft.Window(x.problem.window - 1)
    attend = flashsoft.attention if x.ends is None else flashsoft.attention_varlen
    call = functools.partial(attend, **attention_peers.packing(x), mask=mask, backend=backend)
    return attention_peers.by_autograd(call, x, backward)


def has_own_kernels(problem: Problem, backward: bool, device: torch.device) -> bool:
    """Whether dispatch runs kernels that are not the portable ones, which are then a contender of their own."""
    features = {"band"} if problem.causal else set()
    features |= {"packed"} if problem.lengths else set()
    sizes = problem.D, problem.Dv or problem.D
    kind = dispatch.Problem("attention", device, torch.bfloat16, frozenset(features), *sizes)
    backends = {backend.name: backend for backend in dispatch.BACKENDS}
    chosen = backends[dispatch.explain(kind).backend or "reference"]
    if chosen.fallback:
        return False
    kernel = "attention_backward" if backward else "attention_forward"
    return getattr(chosen.load(), kernel) is not getattr(backends["triton"].load(), kernel)


def case(section: str, problem: Problem, against: Iterable[str], yardstick: str, backward: bool = False) -> Case:
    """One problem in one direction; the last head of the last batch is compared with float64."""

    def build(device: torch.device) -> Contenders:
        x = problem.inputs(device)
        load: dict[str, Callable[[Inputs, bool], harness.Call]] = {"flashsoft": functools.partial(ours, None)}
        if has_own_kernels(problem, backward, device):
            load[PORTABLE] = functools.partial(ours, "triton")
        load |= {name: attention_peers.PEERS[name] for name in against}
        want = functools.cache(x.wanted)

        def pairs(result: Tensor | Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
            got = result if backward else [result]
            return zip(map(x.last, got), want()[1:] if backward else want()[:1], strict=True)

        return Contenders({name: functools.partial(one, x, backward) for name, one in load.items()}, pairs)

    columns = problem.columns | {"direction": "backward" if backward else "forward"}
    return Case(section, columns, problem.flops * (2.5 if backward else 1), "TFLOP/s", yardstick, build)


def matmul_case(n: int) -> Case:
    """The roof of everything that multiplies matrices."""

    def build(device: torch.device) -> Contenders:
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        return Contenders({f"matmul bf16 {n}^3": lambda: lambda: a @ b})

    return Case("roof", {}, 2 * n**3, "TFLOP/s", f"matmul bf16 {n}^3", build)


def plain(
    heads: Iterable[int], lengths: Iterable[int], tokens: int, hidden: int, flex_at: Sequence[int]
) -> Iterator[Case]:
    """Forward, then backward, of every head size, mask and length."""
    shapes = itertools.product((False, True), heads, (False, True), lengths)
    for backward, D, causal, S in shapes:
        flex = ["flex"] if S in flex_at else []
        problem = Problem(tokens // S, hidden // D, S, D, causal)
        yield case("attention", problem, ["sdpa_flash", "sdpa_cudnn", *flex, "fa3", "fa4"], "sdpa_cudnn", backward)


def grouped(lengths: Iterable[int], tokens: int, H: int, Hkv: int, D: int) -> Iterator[Case]:
    """Fewer heads of keys than of queries."""
    for causal, S in itertools.product((False, True), lengths):
        problem = Problem(tokens // S, H, S, D, causal, Hkv=Hkv)
        yield case("gqa", problem, ["sdpa_flash", "sdpa_cudnn", "flex", "fa3", "fa4"], "sdpa_cudnn")


def windows(reaches: Iterable[int], S: int, H: int, D: int) -> Iterator[Case]:
    """The last few keys of a long sequence."""
    for reach in reaches:
        yield case("window", Problem(1, H, S, D, True, window=reach), ["flex", "fa3", "fa4"], "flex")


def latent(lengths: Iterable[int], tokens: int, H: int, D: int, Dv: int) -> Iterator[Case]:
    """Heads of value that are narrower than those of queries and keys."""
    for causal, S in itertools.product((False, True), lengths):
        problem = Problem(tokens // S, H, S, D, causal, Dv=Dv)
        yield case("mla", problem, ["sdpa_cudnn", "fa3", "fa4"], "sdpa_cudnn")


def packed(lengths: tuple[int, ...], heads: Iterable[int], hidden: int) -> Iterator[Case]:
    """Sequences of uneven length, one after another."""
    for D in heads:
        problem = Problem(len(lengths), hidden // D, sum(lengths), D, True, lengths=lengths)
        yield case("varlen", problem, ["sdpa_flash", "fa3", "fa4"], PORTABLE)


def every(args: argparse.Namespace) -> Iterator[Case]:
    """All cases, or a few."""
    if args.dry:
        yield from plain((16,), (20,), 40, 32, (20,))
        yield from grouped((20,), 40, 4, 2, 16)
        yield from windows((5,), 20, 2, 16)
        yield from latent((20,), 20, 2, 24, 16)
        yield from packed(documents(3, 4, 20), (16,), 32)
        return
    heads, lengths = ((64, 128), (4096,)) if args.quick else ((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384))
    some = (4096,) if args.quick else (4096, 16384)
    yield from plain(heads, lengths, 16384, 2048, FLEX_AT)
    yield from grouped(some, 16384, 32, 8, 128)
    yield from windows((1024,) if args.quick else (1024, 4096), 16384, 16, 128)
    yield from latent(some, 16384, 16, 192, 128)
    yield from packed(documents(64, 64, 2048), (128,) if args.quick else (64, 128), 2048)


BENCHMARK = Benchmark(
    "attention",
    ("D", "Dv", "causal", "window", "S", "tokens", "B", "H", "Hkv", "direction"),
    (PORTABLE, *attention_peers.PEERS),
    every,
    [matmul_case(8192)],
    attention_peers.PACKAGES,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run

if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
