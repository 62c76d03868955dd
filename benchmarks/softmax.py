"""Row softmax against its peers and the copy bandwidth of this device.

    flashsoft bench softmax --out benchmarks/results      # or: python benchmarks/softmax.py

Sections: `softmax` (M * N = 2^28), `few_rows` (few rows of a vocabulary), `neighbours` (lengths and row strides beside
those that configurations were tuned for; against torch alone). Bytes are the unavoidable ones: every input read once,
every output written once (forward 2 passes, backward 3). The roof is the rate of a copy, same run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator

import harness
import peers
import torch
from harness import DTYPES, Benchmark, Case, Contenders
from torch import Tensor

import flashsoft

ELEMENTS = 1 << 28
WIDTHS = (128, 512, 1024, 4096, 8192, 16384, 32768, 65536, 128256, 262144)
CENTRES = (4096, 16384, 32768, 50257, 128256)
VOCABULARY = 128256
SLICE = 1 << 21  # elements that are compared with float64
ALONE = {"torch": peers.FORWARD["torch"]}, {"torch": peers.BACKWARD["torch"]}
Against = tuple[dict[str, Callable[[], peers.Forward]], dict[str, Callable[[], peers.Backward]]]


def some_rows(M: int, N: int, device: torch.device) -> Tensor:
    """Rows spread from the first to the last, SLICE elements in all."""
    return torch.linspace(0, M - 1, min(M, max(1, SLICE // N)), device=device, dtype=torch.float64).long()


def softmax_case(
    section: str,
    M: int,
    N: int,
    dtype: str,
    backward: bool,
    stride: int | None = None,
    against: Against = (peers.FORWARD, peers.BACKWARD),
) -> Case:
    """One shape in one direction; rows lie `stride` elements apart (None: N)."""

    def normal(device: torch.device) -> Tensor:
        return torch.randn(M, stride or N, device=device, dtype=DTYPES[dtype])[:, :N]

    def build(device: torch.device) -> Contenders:
        x, rows = normal(device), some_rows(M, N, device)
        if not backward:
            want = functools.cache(lambda: torch.softmax(x[rows].double(), -1))
            loaders = {"flashsoft": lambda: flashsoft.softmax} | against[0]
            providers = {name: functools.partial(peers.bind, load, x) for name, load in loaders.items()}
            return Contenders(providers, lambda y: [(y[rows], want())])
        y, dy = normal(device), x
        y.copy_(torch.softmax(y, -1))

        @functools.cache
        def gradient() -> Tensor:
            wide_y, wide_dy = y[rows].double(), dy[rows].double()
            return wide_y * (wide_dy - (wide_y * wide_dy).sum(-1, keepdim=True))

        def ours(dy: Tensor, y: Tensor) -> Tensor:
            return torch.ops.flashsoft.softmax_backward(dy, y, y.dtype, "")

        loaders = {"flashsoft": lambda: ours} | against[1]
        providers = {name: functools.partial(peers.bind, load, dy, y) for name, load in loaders.items()}
        return Contenders(providers, lambda dx: [(dx[rows], gradient())])

    columns: dict[str, object] = {"M": M, "N": N}
    columns |= {} if stride is None else {"stride": stride}
    columns |= {"dtype": dtype, "direction": "backward" if backward else "forward"}
    work = (3 if backward else 2) * M * N * DTYPES[dtype].itemsize
    return Case(section, columns, work, "GB/s", "torch", build)


def copy_case(gib: int) -> Case:
    """The roof of everything that moves memory: a copy, its reads and writes counted."""

    def build(device: torch.device) -> Contenders:
        x = torch.randn(gib << 28, device=device)
        y = torch.empty_like(x)
        return Contenders({f"copy {gib} GiB": lambda: lambda: y.copy_(x)})

    return Case("roof", {}, 2 * (gib << 30), "GB/s", f"copy {gib} GiB", build)


def cases(
    widths: Iterable[int], elements: int, few: Iterable[int], centres: Iterable[int], vocabulary: int
) -> Iterator[Case]:
    """Full rows, few wide rows, neighbours."""
    few, centres, directions = tuple(few), tuple(centres), (False, True)
    for dtype, N, backward in itertools.product(DTYPES, widths, directions):
        yield softmax_case("softmax", elements // N, N, dtype, backward)
    for dtype, M in itertools.product(DTYPES, few):
        yield softmax_case("few_rows", M, vocabulary, dtype, False)
    for dtype, backward, centre in itertools.product(DTYPES, directions, centres):
        odd = centre + 1 + centre % 2  # no row but the first begins where a wide load may
        for N, stride in ((centre, centre), (centre - 1, centre - 1), (centre + 1, centre + 1), (centre, odd)):
            yield softmax_case("neighbours", elements // centre, N, dtype, backward, stride, ALONE)


def every(args: argparse.Namespace) -> Iterator[Case]:
    """All cases, or a few."""
    if args.dry:
        return cases((16, 100), 400, (1, 3), (33,), 200)
    if args.quick:
        return cases((1024, VOCABULARY), ELEMENTS, (8, 64), (32768,), VOCABULARY)
    return cases(WIDTHS, ELEMENTS, (1, 8, 64), CENTRES, VOCABULARY)


BENCHMARK = Benchmark(
    "softmax",
    ("M", "N", "stride", "dtype", "direction"),
    tuple(peers.FORWARD),
    every,
    [copy_case(1), copy_case(4)],
    peers.PACKAGES,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run

if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
