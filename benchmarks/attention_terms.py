"""What masks and terms of scores cost attention: beside the same call without them, and beside FlexAttention.

    flashsoft bench attention-terms --out benchmarks/results      # or: python benchmarks/attention_terms.py

bf16, 16 heads of 128, in memory of (B, S, H, D). Masks that skip tiles (a window of 1,024 keys; documents of 256 to
4,096 tokens, as segments and packed) run on one sequence of 16,384 tokens, all others on four of 4,096. `plain` is
flashsoft without the term, under the same causal mask or none; FLOPs count the scores that are kept.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import harness
import torch
from attention_peers import Attend, flexible
from harness import Benchmark, Case, Contenders
from torch import Tensor

import flashsoft
from flashsoft import ALiBi, Causal, Padding, Segments, Window

SOFTCAP = 30.0


def documents(S: int) -> list[int]:
    """Lengths that add up to S, the same in every run."""
    drawn = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := S - sum(lengths)) > 0:
        lengths.append(min(left, int(torch.randint(S // 64, S // 4 + 1, (), generator=drawn))))
    return lengths


def kept(name: str, S: int) -> float:
    """How many of the S * S scores of a head a mask that skips tiles keeps."""
    if name == "window":
        reach = S // 16
        return reach * (reach + 1) / 2 + (S - reach) * reach
    return sum(n * (n + 1) / 2 for n in documents(S))


def skipping(name: str, S: int, device: torch.device) -> dict[str, Callable[[], Attend]]:
    """flashsoft's call and FlexAttention's for a mask that skips tiles."""
    lengths, reach = documents(S), S // 16
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().to(device)
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to(device)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))  # x[0] would copy in the backward
        out = flashsoft.attention_varlen(*rows, ends, ends, max(lengths), max(lengths), mask=Causal())
        return out.transpose(0, 1).unsqueeze(0)

    mask: Window | Any = Window(reach - 1) if name == "window" else Causal() & Segments(ids)
    ours = packed if name == "packed documents" else lambda q, k, v: flashsoft.attention(q, k, v, mask=mask)

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = i - j < reach if name == "window" else ids[i] == ids[j]
        return (j <= i) & near

    return {"flashsoft": lambda: ours, "flex": lambda: flexible(allowed, S, device)}


def term(name: str, B: int, H: int, S: int, device: torch.device) -> tuple[dict[str, Any], list[Tensor]]:
    """Arguments of attention, and those of them that take a gradient."""
    if name == "boolean (S, S)":
        return {"mask": torch.rand(S, S, device=device) < 0.9}, []
    if name == "boolean (B, H, S, S)":
        return {"mask": torch.rand(B, H, S, S, device=device) < 0.9}, []
    if name == "lengths":
        return {"mask": Padding(torch.linspace(S // 2, S, B, device=device).int())}, []
    if name == "dropout":
        return {"dropout_p": 0.1}, []
    if name == "softcap":
        return {"mask": Causal(), "softcap": SOFTCAP}, []
    if name == "sink":
        sink = torch.randn(H, device=device, requires_grad=True)
        return {"mask": Causal(), "sink": sink}, [sink]
    if name == "ALiBi":
        slopes = torch.rand(H, device=device, requires_grad=True)
        return {"mask": Causal(), "bias": ALiBi(slopes)}, [slopes]
    bias = torch.randn(H, S, S, device=device, dtype=torch.bfloat16, requires_grad=name == "bias and its gradient")
    return {"bias": bias}, [bias] if bias.requires_grad else []


def timed(
    attend: Attend, tensors: tuple[Tensor, ...], dout: Tensor, more: list[Tensor], backward: bool
) -> harness.Call:
    """One direction of a call."""
    if not backward:
        q, k, v = tensors

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(q, k, v)

        return forward
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, [*leaves, *more], dout, retain_graph=True)


def case(section: str, name: str, B: int, H: int, S: int, D: int, backward: bool) -> Case:
    """One mask or term in one direction."""

    def build(device: torch.device) -> Contenders:
        q, k, v, dout = (torch.randn(B, S, H, D, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
        options, more = ({}, []) if section == "skipped tiles" else term(name, B, H, S, device)
        alone = {"mask": options["mask"]} if isinstance(options.get("mask"), Causal) else {}
        attends = skipping(name, S, device) if section == "skipped tiles" else {
            "flashsoft": lambda: functools.partial(flashsoft.attention, **options),
            "plain": lambda: functools.partial(flashsoft.attention, **alone),
        }  # fmt: skip

        def make(which: str) -> harness.Call:
            leaves = more if which == "flashsoft" else []
            return timed(attends[which](), (q, k, v), dout, leaves, backward)

        return Contenders({which: functools.partial(make, which) for which in attends})

    share = kept(name, S) if section == "skipped tiles" else S * S * (0.5 if name in CAUSAL else 1)
    work = 4 * B * H * D * share * (2.5 if backward else 1)
    columns = {"term": name, "S": S, "B": B, "H": H, "D": D, "direction": "backward" if backward else "forward"}
    return Case(section, columns, work, "TFLOP/s", "flex" if section == "skipped tiles" else "plain", build)


SKIPPING = ("window", "documents", "packed documents")
CAUSAL = ("softcap", "sink", "ALiBi")
FULL = ("boolean (S, S)", "boolean (B, H, S, S)", "lengths", "bias", "bias and its gradient", "dropout")


def every(args: argparse.Namespace) -> Iterator[Case]:
    """All cases, or tiny ones."""
    H, D, S, B = (2, 16, 64, 2) if args.dry else (16, 128, 4096, 4)
    shapes: Iterable[tuple[str, str, int, int]] = (
        *(("skipped tiles", name, 1, B * S) for name in SKIPPING),
        *(("terms", name, B, S) for name in (*FULL, *CAUSAL)),
    )
    for backward in (False, True):
        for section, name, batch, length in shapes:
            yield case(section, name, batch, H, length, D, backward)


BENCHMARK = Benchmark("attention_terms", ("term", "S", "B", "H", "D", "direction"), ("plain", "flex"), every)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run

if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
