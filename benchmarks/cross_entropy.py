"""fused_cross_entropy and fused_linear_cross_entropy on a vocabulary, against their peers.

    flashsoft bench cross-entropy --out benchmarks/results      # or: python benchmarks/cross_entropy.py

Sections: `cross_entropy`, with directions forward, training (forward and backward) and in place (the same, the gradient
left where the logits were), and `linear`, training through the layer that makes the logits, whose peak of memory is in
the results. Bytes are the unavoidable ones: logits read once, and their gradient written once. The roof is the rate of
a copy, same run; reading alone is a little faster.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import harness
import peers
import torch
from harness import DTYPES, Benchmark, Case, Contenders
from softmax import copy_case
from torch import Tensor
from torch.nn import functional as F

import flashsoft

Loss = Callable[[Tensor, Tensor], Tensor]


class Logits(torch.autograd.Function):
    """Logits in given memory, as a layer would return them: no leaf, so that they may be overwritten."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def liger() -> Loss:
    """It overwrites the logits."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    return lambda x, target: LigerCrossEntropyFunction.apply(x, target, None)[0]


def quack() -> Loss:
    from quack.cross_entropy import cross_entropy

    return lambda x, target: cross_entropy(x, target, reduction="mean")


def quack_in_place() -> Callable[[Tensor, Tensor], Any]:
    """Loss and gradient of a sum in one pass, without autograd."""
    from quack.cross_entropy import cross_entropy_fwd

    return lambda x, target: cross_entropy_fwd(x, target, return_lse=True, return_dx=True, inplace_backward=True)


def liger_linear() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda hidden, weight, target: LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target)[0]


PLAIN: dict[str, Callable[[], Loss]] = {
    "flashsoft": lambda: flashsoft.fused_cross_entropy,
    "torch": lambda: F.cross_entropy,
    "compile": lambda: peers.compiled(F.cross_entropy),
    "quack": quack,
}
IN_PLACE: dict[str, Callable[[], Loss]] = {
    "flashsoft": lambda: functools.partial(flashsoft.fused_cross_entropy, inplace_backward=True),
    "torch": lambda: F.cross_entropy,
    "liger": liger,
}


def plain_linear(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The logits are made, and kept for the backward."""
    return F.cross_entropy(F.linear(hidden, weight), target)


LINEAR: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "flashsoft": lambda: flashsoft.fused_linear_cross_entropy,
    "torch": lambda: plain_linear,
    "compile": lambda: peers.compiled(plain_linear),
    "liger": liger_linear,
}


def loss_case(M: int, N: int, dtype: str, direction: str) -> Case:
    """The mean over M rows."""

    def build(device: torch.device) -> Contenders:
        x = torch.randn(M, N, device=device, dtype=DTYPES[dtype])
        target = torch.randint(0, N, (M,), device=device)
        leaf = torch.zeros(1, device=device, requires_grad=True)

        def call(load: Callable[[], Loss]) -> harness.Call:
            loss = load()
            if direction == "forward":
                return lambda: loss(x, target)

            def both() -> None:
                loss(Logits.apply(leaf, x), target).backward()

            return both

        loaders = IN_PLACE if direction == "in place" else PLAIN
        providers = {name: functools.partial(call, load) for name, load in loaders.items()}
        if direction == "in place":
            providers["quack"] = lambda: functools.partial(quack_in_place(), x, target)
        if direction != "forward":
            return Contenders(providers)

        @functools.cache
        def want() -> Tensor:
            parts = [slice(i, i + 512) for i in range(0, M, 512)]
            return sum(F.cross_entropy(x[part].double(), target[part], reduction="sum") for part in parts) / M

        return Contenders(providers, lambda loss: [(loss, want())])

    work = M * N * DTYPES[dtype].itemsize * (1 if direction == "forward" else 2)
    columns = {"M": M, "N": N, "H": "", "dtype": dtype, "direction": direction}
    return Case("cross_entropy", columns, work, "GB/s", "torch", build)


def linear_case(M: int, N: int, H: int, dtype: str) -> Case:
    """Gradients of hidden and weight; 6 M N H FLOPs."""

    def build(device: torch.device) -> Contenders:
        hidden = torch.randn(M, H, device=device, dtype=DTYPES[dtype], requires_grad=True)
        weight = (torch.randn(N, H, device=device, dtype=DTYPES[dtype]) * H**-0.5).requires_grad_()
        target = torch.randint(0, N, (M,), device=device)

        def call(load: Callable[[], Callable[..., Tensor]]) -> harness.Call:
            loss = load()

            def both() -> None:
                torch.autograd.grad(loss(hidden, weight, target), (hidden, weight))

            return both

        return Contenders({name: functools.partial(call, load) for name, load in LINEAR.items()})

    columns = {"M": M, "N": N, "H": H, "dtype": dtype, "direction": "training"}
    return Case("linear", columns, 6 * M * N * H, "TFLOP/s", "torch", build)


def every(args: argparse.Namespace) -> Iterator[Case]:
    """All cases, or a few."""
    shapes = ((6, 100),) if args.dry else ((8192, 128256),) if args.quick else ((8192, 128256), (16384, 32000))
    for (M, N), dtype in ((shape, dtype) for shape in shapes for dtype in (("bf16",) if args.quick else DTYPES)):
        for direction in ("forward", "training", "in place"):
            yield loss_case(M, N, dtype, direction)
    for M, N, H in ((6, 100, 16),) if args.dry else ((8192, 128256, 4096),):
        yield linear_case(M, N, H, "bf16")


BENCHMARK = Benchmark(
    "cross_entropy",
    ("M", "N", "H", "dtype", "direction"),
    ("torch", "compile", "liger", "quack"),
    every,
    [copy_case(1), copy_case(4)],
    peers.PACKAGES,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run

if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
