"""How the programs that share a row tell each other what they found, within one launch.

A row's programs are neighbours in the grid. Each sends a pair of float32, such as its part's state (m, s), to every
other as one 64-bit word, waits for the words of all parts, and merges them in the order of the parts: the same bits
for each of them, in every run. Its part of the row stays in registers meanwhile, so a row is read once.

The wait ends because programs start in the order of their ids: those waited for run already or start next, and a
row has fewer parts than the device has room for programs (`tuning.rows`).

The board is zeros before and after a launch: for each row PARTS x PARTS words, a line of them for each receiver,
who clears it. No pair may be zeros; a state never is, since s = 0 comes with m = -inf.

In the interpreter programs run one after another, so a launch is preceded by one that only sends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Launch, Tensors, launch

INTERPRETED: bool = triton.knobs.runtime.interpret


@triton.jit
def send(board, row, part, a, b, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """Sends the pair a, b, each (1,), of a part of a row (scalars, int64) to all parts."""
    high = a.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = b.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    receiver = tl.arange(0, BLOCK_PARTS)
    word = tl.where(receiver < PARTS, high | low, 0)
    to = board + row * (PARTS * PARTS) + receiver * PARTS + part
    tl.atomic_or(to, word, mask=receiver < PARTS, sem="relaxed")  # into zeros: a store that nobody waits for


@triton.jit
def receive(board, row, part, a, b, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """The pairs of all parts, each (BLOCK_PARTS,), once all are there; a, b (scalars) beyond PARTS."""
    sender = tl.arange(0, BLOCK_PARTS)
    inside = sender < PARTS
    line = board + row * (PARTS * PARTS) + part * PARTS + sender
    nothing = tl.zeros((BLOCK_PARTS,), tl.int64)
    word = tl.atomic_or(line, nothing, mask=inside, sem="relaxed")
    while tl.sum((inside & (word == 0)).to(tl.int32)) > 0:
        word = tl.atomic_or(line, nothing, mask=inside, sem="relaxed")
    tl.store(line, nothing, mask=inside)
    a = tl.where(inside, (word >> 32).to(tl.int32).to(tl.float32, bitcast=True), a)
    b = tl.where(inside, word.to(tl.int32).to(tl.float32, bitcast=True), b)
    return a, b


class Phase(NamedTuple):
    """What the programs of a launch do with their states."""

    sends: bool
    receives: bool


def exchange(plan: Callable[..., Launch], inputs: Tensors, outputs: Tensors, *options: object) -> None:
    """`launch`, with the phase as the last option; two phases where programs do not run at the same time."""
    for phase in (Phase(True, False), Phase(False, True)) if INTERPRETED else (Phase(True, True),):
        launch(plan, inputs, outputs, *options, phase)


_boards: dict[tuple[torch.device, int], torch.Tensor] = {}


def board(device: torch.device, words: int, stream: int) -> torch.Tensor:
    """A board of zeros for the next launch on a stream; a graph has its own, and clears it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros(words, dtype=torch.int64, device=device)
    kept = _boards.get((device, stream))
    if kept is None or kept.numel() < words:
        kept = torch.zeros(triton.next_power_of_2(words), dtype=torch.int64, device=device)
        _boards[device, stream] = kept
    return kept
