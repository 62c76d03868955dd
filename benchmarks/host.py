"""Host time of one plain call without gradient on a small input, in microseconds.

flashsoft bench host --out benchmarks/results      # or: python benchmarks/host.py
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator

import harness
import peers
import torch
from harness import Benchmark, Case, Contenders
from torch.nn.functional import scaled_dot_product_attention

import flashsoft

PEERS = ("torch", "compile", "liger", "quack")


def softmax_case(M: int, N: int) -> Case:
    """The peers' cheapest way in: their forward function, without autograd."""

    def build(device: torch.device) -> Contenders:
        x = torch.randn(M, N, device=device, dtype=torch.bfloat16)
        loaders = {"flashsoft": lambda: flashsoft.softmax}
        loaders |= {name: peers.FORWARD[name] for name in PEERS}

        return Contenders({name: functools.partial(peers.bind, load, x) for name, load in loaders.items()})

    columns = {"operator": "softmax", "shape": f"{M}x{N}", "dtype": "bf16"}
    return Case("host", columns, 0, "us", "torch", build)


def attention_case(B: int, S: int, H: int, D: int) -> Case:
    """Views of (B, S, H, D) memory, full attention."""

    def build(device: torch.device) -> Contenders:
        q, k, v = (torch.randn(B, S, H, D, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
        return Contenders(
            {
                "flashsoft": lambda: lambda: flashsoft.attention(q, k, v),
                "torch": lambda: lambda: scaled_dot_product_attention(q, k, v),
            }
        )

    columns = {"operator": "attention", "shape": f"{B}x{S}x{H}x{D}", "dtype": "bf16"}
    return Case("host", columns, 0, "us", "torch", build)


def every(args: argparse.Namespace) -> Iterator[Case]:
    """Both; the shapes are small whatever is asked for."""
    yield softmax_case(32, 64)
    yield attention_case(1, 128, 8, 64)


BENCHMARK = Benchmark("host", ("operator", "shape", "dtype"), PEERS, every, packages=peers.PACKAGES)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run

if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
