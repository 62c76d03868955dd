"""fused_softmax and sample on the logits of a vocabulary, against the steps of a generation loop.

    flashsoft bench logits --out benchmarks/results      # or: python benchmarks/logits.py

Sections: `fused_softmax` (temperature, mask, top-k, top-p, min-p, softmax), `sample` (the same, and a draw). Bytes are
the unavoidable ones: logits and mask read once, probabilities written once. The roof is the rate of a copy, same run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import harness
import peers
import torch
from harness import DTYPES, Benchmark, Case, Contenders
from softmax import copy_case
from torch import Tensor

import flashsoft

VOCABULARY = 128256
TEMPERATURE = 0.7
LIMITS: tuple[dict[str, Any], ...] = (
    {"top_k": 50},
    {},
    {"top_p": 0.9},
    {"top_k": 50, "top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 1000},
)


def eager(
    x: Tensor,
    drop: Tensor | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """The steps of a generation loop as transformers takes them, one torch operator each."""
    x = x / TEMPERATURE
    if drop is not None:
        x = x.masked_fill(drop, float("-inf"))
    if top_k is not None:
        x = x.masked_fill(x < torch.topk(x, top_k)[0][..., -1:], float("-inf"))
    if top_p is not None:
        ordered, places = torch.sort(x, descending=False)
        cut = torch.softmax(ordered, -1).cumsum(-1) <= 1 - top_p
        cut[..., -1:] = False
        x = x.masked_fill(torch.zeros_like(cut).scatter_(-1, places, cut), float("-inf"))
    if min_p is not None:
        p = torch.softmax(x, -1)
        x = x.masked_fill(p < min_p * p.amax(-1, keepdim=True), float("-inf"))
    return torch.softmax(x, -1)


def columns(M: int, N: int, dtype: str, masked: bool, limits: dict[str, Any]) -> dict[str, object]:
    """What names a case."""
    said = {name: limits.get(name, "") for name in ("top_k", "top_p", "min_p")}
    return {"M": M, "N": N, "dtype": dtype, "mask": "yes" if masked else "no", **said}


def fused_case(M: int, N: int, dtype: str, masked: bool, limits: dict[str, Any]) -> Case:
    """One column in ten is masked."""

    def build(device: torch.device) -> Contenders:
        x = (3 * torch.randn(M, N, device=device)).to(DTYPES[dtype])
        drop = torch.rand(M, N, device=device) < 0.1 if masked else None
        keep = None if drop is None else ~drop

        @functools.cache
        def want() -> Tensor:
            return flashsoft.fused_softmax(x[:8].double(), TEMPERATURE, None if keep is None else keep[:8], **limits)

        def fused() -> Tensor:
            return flashsoft.fused_softmax(x, temperature=TEMPERATURE, mask=keep, **limits)

        providers: dict[str, Callable[[], harness.Call]] = {
            "flashsoft": lambda: fused,
            "eager": lambda: functools.partial(eager, x, drop, **limits),
            "compile": lambda: functools.partial(peers.compiled(functools.partial(eager, **limits)), x, drop),
        }
        # equals at the threshold, all of which the peers keep, are told apart here only
        exact = dtype == "fp32"
        return Contenders(providers, (lambda y: [(y[:8], want())]) if exact else None)

    work = M * N * (2 * DTYPES[dtype].itemsize + masked)
    return Case("fused_softmax", columns(M, N, dtype, masked, limits), work, "GB/s", "eager", build)


def sample_case(M: int, N: int, dtype: str, limits: dict[str, Any]) -> Case:
    """An index of each row."""

    def build(device: torch.device) -> Contenders:
        x = (3 * torch.randn(M, N, device=device)).to(DTYPES[dtype])

        def draw(x: Tensor) -> Tensor:
            return torch.multinomial(eager(x, **limits), 1)

        return Contenders(
            {
                "flashsoft": lambda: lambda: flashsoft.sample(x, TEMPERATURE, **limits),
                "eager": lambda: functools.partial(draw, x),
                "compile": lambda: functools.partial(peers.compiled(draw), x),
            }
        )

    work = M * N * DTYPES[dtype].itemsize
    return Case("sample", columns(M, N, dtype, False, limits), work, "GB/s", "eager", build)


def every(args: argparse.Namespace) -> Iterator[Case]:
    """All cases, or a few."""
    rows, N = ((1, 3), 200) if args.dry else ((64,), VOCABULARY) if args.quick else ((1, 64, 256), VOCABULARY)
    limits = ({"top_k": 5}, {"top_p": 0.9, "min_p": 0.01}) if args.dry else LIMITS[:2] if args.quick else LIMITS
    for dtype, M, limit in itertools.product(DTYPES, rows, limits):
        if limit in limits[:2]:
            yield fused_case(M, N, dtype, True, limit)
        yield fused_case(M, N, dtype, False, limit)
    for dtype, M, limit in itertools.product(DTYPES, rows, limits[:3]):
        yield sample_case(M, N, dtype, limit)


BENCHMARK = Benchmark(
    "logits",
    ("M", "N", "dtype", "mask", "top_k", "top_p", "min_p"),
    ("eager", "compile"),
    every,
    [copy_case(1), copy_case(4)],
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run

if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
