"""One problem of attention: its sizes and mask, its inputs, and what its last head should come to in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1024  # queries of float64 scores at a time


@dataclass(frozen=True)
class Problem:
    """Self-attention, causal as torch means it: query i sees the keys up to i, at most `window` of them if given.

    Packed: as many sequences as `lengths`, one after another; S is then how many tokens they have together.
    """

    B: int
    H: int
    S: int
    D: int
    causal: bool
    window: int | None = None
    Hkv: int | None = None  # None: H
    Dv: int | None = None  # None: D
    lengths: tuple[int, ...] = ()

    @property
    def columns(self) -> dict[str, object]:
        """What names it in a table; the ends of a usual problem go without saying."""
        columns: dict[str, object] = {"D": self.D}
        columns |= {} if self.Dv is None else {"Dv": self.Dv}
        columns |= {"causal": self.causal}
        columns |= {} if self.window is None else {"window": self.window}
        columns |= {"tokens": self.S} if self.lengths else {"S": self.S}
        columns |= {"B": self.B, "H": self.H}
        return columns if self.Hkv is None else columns | {"Hkv": self.Hkv}

    @property
    def flops(self) -> float:
        """Of the forward: half of all scores when causal, those that are kept under a window and packed."""
        lengths = self.lengths or (self.S,) * self.B
        if self.causal and (self.lengths or self.window is not None):
            scores = sum(kept(n, self.window or n) for n in lengths)
        else:
            scores = sum(n * n for n in lengths) * (0.5 if self.causal else 1)
        return 2 * self.H * scores * (self.D + (self.Dv or self.D))

    def inputs(self, device: torch.device) -> Inputs:
        """Normal random numbers in bf16."""

        def normal(heads: int, width: int) -> Tensor:
            if self.lengths:
                return torch.randn(self.S, heads, width, device=device, dtype=torch.bfloat16)
            return torch.randn(self.B, self.S, heads, width, device=device, dtype=torch.bfloat16).transpose(1, 2)

        Hkv, Dv = self.Hkv or self.H, self.Dv or self.D
        q, k, v, dout = normal(self.H, self.D), normal(Hkv, self.D), normal(Hkv, Dv), normal(self.H, Dv)
        ends = torch.tensor([0, *self.lengths]).cumsum(0).int().to(device) if self.lengths else None
        return Inputs(self, q, k, v, dout, ends)


@dataclass(frozen=True)
class Inputs:
    """(B, H, S, D) views of (B, S, H, D) memory; packed: (T, H, D), and where sequences begin and end."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    ends: Tensor | None

    def last(self, x: Tensor) -> Tensor:
        """The last head of the last batch or sequence, which is what gets compared."""
        return x[-1, -1] if self.ends is None else x[-self.problem.lengths[-1] :, -1]

    def wanted(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """out, dq, dk, dv of that head in float64 (dk and dv: where no other head of queries shares its keys)."""
        heads = [self.last(x) for x in (self.q, self.k, self.v, self.dout)]
        return oracle(*heads, causal=self.problem.causal, window=self.problem.window)


def kept(S: int, window: int) -> float:
    """How many of the S * S scores of a head a causal window keeps."""
    reach = min(S, window)
    return reach * (reach + 1) / 2 + (S - reach) * reach


def documents(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Uneven lengths, the same in every run."""
    drawn = torch.Generator().manual_seed(0)
    return tuple(torch.randint(shortest, longest + 1, (count,), generator=drawn).tolist())


def oracle(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, window: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, dq, dk, dv of one head in float64, a chunk of queries at a time."""
    q, k, v, dout = (t.double() for t in (q, k, v, dout))
    S, D = q.shape
    out, dq, dk, dv = (torch.zeros_like(t) for t in (dout, q, k, v))
    keys = torch.arange(S, device=q.device)
    for first in range(0, S, CHUNK):
        part = slice(first, min(first + CHUNK, S))
        scores = q[part] @ k.T / math.sqrt(D)
        if causal:
            scores.masked_fill_(keys > keys[part, None], float("-inf"))
        if window is not None:
            scores.masked_fill_(keys <= keys[part, None] - window, float("-inf"))
        p = torch.softmax(scores, -1)
        out[part] = p @ v
        dp = dout[part] @ v.T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / math.sqrt(D)
        dq[part] = ds @ k
        dk += ds.T @ q[part]
        dv += p.T @ dout[part]
    return out, dq, dk, dv
