"""Row softmax and the fused logits chain against torch's own kernels and the copy bandwidth of this device.

    python benchmarks/softmax.py --out benchmarks/results

Bytes are the unavoidable ones: every input read once, every output written once (forward 2 passes,
backward 3). The roof is the rate of a copy in the same run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import harness
import torch
from harness import DTYPES, Case, Contenders
from torch import Tensor

import flashsoft

COLUMNS = ("M", "N", "dtype", "direction", "mask", "top_k")
ELEMENTS = 1 << 28
WIDTHS = (128, 512, 1024, 4096, 8192, 16384, 32768, 65536, 128256, 262144)
VOCABULARY = 128256
TEMPERATURE = 0.7
SLICE = 1 << 21  # elements that are compared with float64


def some_rows(M: int, N: int, device: torch.device) -> Tensor:
    """Rows spread from the first to the last, SLICE elements in all."""
    return torch.linspace(0, M - 1, min(M, max(1, SLICE // N)), device=device, dtype=torch.float64).long()


def softmax_case(M: int, N: int, dtype: str, backward: bool) -> Case:
    """torch.softmax and its gradient by the operators that autograd itself would call."""

    def build(device: torch.device) -> Contenders:
        x = torch.randn(M, N, device=device, dtype=DTYPES[dtype])
        rows = some_rows(M, N, device)
        if not backward:
            want = functools.cache(lambda: torch.softmax(x[rows].double(), -1))
            return Contenders(
                {
                    "flashsoft": lambda: lambda: flashsoft.softmax(x),
                    "torch": lambda: lambda: torch.softmax(x, -1),
                },
                lambda y: [(y[rows], want())],
            )
        y = torch.softmax(x, -1)
        dy = x.normal_()  # x is not needed any more

        @functools.cache
        def gradient() -> Tensor:
            wide_y, wide_dy = y[rows].double(), dy[rows].double()
            return wide_y * (wide_dy - (wide_y * wide_dy).sum(-1, keepdim=True))

        ours, theirs = torch.ops.flashsoft.softmax_backward, torch.ops.aten._softmax_backward_data
        return Contenders(
            {
                "flashsoft": lambda: lambda: ours(dy, y, y.dtype, ""),
                "torch": lambda: lambda: theirs(dy, y, -1, y.dtype),
            },
            lambda dx: [(dx[rows], gradient())],
        )

    columns = {"M": M, "N": N, "dtype": dtype, "direction": "backward" if backward else "forward"}
    work = (3 if backward else 2) * M * N * DTYPES[dtype].itemsize
    return Case("softmax", columns, work, "GB/s", "torch", build)


def eager(x: Tensor, drop: Tensor | None, top_k: int | None) -> Tensor:
    """The steps of a generation loop, one torch operator each."""
    x = x / TEMPERATURE
    if drop is not None:
        x = x.masked_fill(drop, float("-inf"))
    if top_k is not None:
        values, places = torch.topk(x, top_k)
        x = torch.full_like(x, float("-inf")).scatter_(-1, places, values)
    return torch.softmax(x, -1)


def fused_case(M: int, N: int, masked: bool, top_k: int | None) -> Case:
    """temperature, mask, top-k and softmax on float32 logits; one key in ten is masked."""

    def build(device: torch.device) -> Contenders:
        x = 3 * torch.randn(M, N, device=device)
        drop = torch.rand(M, N, device=device) < 0.1 if masked else None
        keep = None if drop is None else ~drop

        @functools.cache
        def want() -> Tensor:
            return eager(x.double(), drop, top_k)

        def fused() -> Tensor:
            return flashsoft.fused_softmax(x, temperature=TEMPERATURE, mask=keep, top_k=top_k)

        providers: dict[str, Callable[[], harness.Call]] = {
            "flashsoft": lambda: fused,
            "eager": lambda: lambda: eager(x, drop, top_k),
        }
        return Contenders(providers, lambda y: [(y, want())])

    columns = {"M": M, "N": N, "dtype": "fp32", "direction": "forward"}
    columns |= {"mask": "yes" if masked else "no", "top_k": top_k or 0}
    return Case("fused_softmax", columns, M * N * (4 + 4 + masked), "GB/s", "eager", build)


def copy_case(gib: int) -> Case:
    """The roof of everything that moves memory: a copy, its reads and writes counted."""

    def build(device: torch.device) -> Contenders:
        x = torch.randn(gib << 28, device=device)
        y = torch.empty_like(x)
        return Contenders({f"copy {gib} GiB": lambda: lambda: y.copy_(x)})

    return Case("roof", {}, 2 * (gib << 30), "GB/s", f"copy {gib} GiB", build)


def cases(widths: Iterable[int], elements: int, few: Iterable[int], vocabulary: int, top_k: int) -> Iterator[Case]:
    """Full rows first, then few wide rows, then the fused chain."""
    widths, few = tuple(widths), tuple(few)
    for dtype in DTYPES:
        for N in widths:
            for backward in (False, True):
                yield softmax_case(elements // N, N, dtype, backward)
    for dtype in DTYPES:
        for M in few:
            yield softmax_case(M, vocabulary, dtype, False)
    for masked, k in ((True, top_k), (False, top_k), (True, None)):
        yield fused_case(max(few), vocabulary, masked, k)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    args = harness.arguments(__doc__.splitlines()[0], COLUMNS, argv)
    if args.dry:
        every = cases((16, 100), 400, (1, 3), 200, 5)
    elif args.quick:
        every = cases((1024, VOCABULARY), ELEMENTS, (8, 64), VOCABULARY, 50)
    else:
        every = cases(WIDTHS, ELEMENTS, (1, 8, 64), VOCABULARY, 50)
    return harness.main("softmax", COLUMNS, list(every), [copy_case(1), copy_case(4)], args)


if __name__ == "__main__":
    sys.exit(main())
