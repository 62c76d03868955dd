"""How the programs that share a row tell each other what they found, within one launch.

A row's programs are neighbours in the grid. Each sends a pair of float32, such as its part's state (m, s), to every
other as one 64-bit word, waits for the words of all parts, and merges them in the order of the parts: the same bits
for each of them, in every run. Its part of the row stays in registers meanwhile, so a row is read once.

The wait ends because programs start in the order of their ids: those waited for run already or start next, and a
row has fewer parts than the device has room for programs (`tuning.rows`).

The board is zeros before and after a launch: for each row PARTS x PARTS words, a line of them for each receiver,
who clears it. No pair may be zeros; a state never is, since s = 0 comes with m = -inf.

In the interpreter programs run one after another, so a launch is preceded by one that only sends (and whose results
are overwritten).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Launch, Tensors, launch
from .softmax import merge_parts

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
    exists = sender < PARTS
    line = board + row * (PARTS * PARTS) + part * PARTS + sender
    nothing = tl.zeros((BLOCK_PARTS,), tl.int64)
    # reads that are atomic come to all threads from one place, so that all leave the loop together
    word = tl.atomic_or(line, nothing, mask=exists, sem="relaxed")
    while tl.sum((exists & (word == 0)).to(tl.int32)) > 0:
        word = tl.atomic_or(line, nothing, mask=exists, sem="relaxed")
    tl.store(line, nothing, mask=exists)
    a = tl.where(exists, (word >> 32).to(tl.int32).to(tl.float32, bitcast=True), a)
    b = tl.where(exists, word.to(tl.int32).to(tl.float32, bitcast=True), b)
    return a, b


@triton.jit
def shared_state(
    board, row, part, m, s,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, SENDS: tl.constexpr, RECEIVES: tl.constexpr,
):  # fmt: skip
    """The state (1,) of a row (1,) from that of a part."""
    if SENDS:
        send(board, tl.max(row, 0), part, m, s, PARTS, BLOCK_PARTS)
    if RECEIVES:
        m_parts, s_parts = receive(board, tl.max(row, 0), part, float("-inf"), 0.0, PARTS, BLOCK_PARTS)
        m_row, s_row = merge_parts(m_parts, s_parts)
        m = tl.full((1,), m_row, tl.float32)
        s = tl.full((1,), s_row, tl.float32)
    return m, s


@triton.jit
def shared_sum(
    board, row, part, total,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, SENDS: tl.constexpr, RECEIVES: tl.constexpr,
):  # fmt: skip
    """The sum (1,) over a row (1,) from that over a part."""
    if SENDS:
        send(board, tl.max(row, 0), part, tl.full((1,), 1.0, tl.float32), total, PARTS, BLOCK_PARTS)
    if RECEIVES:
        _, totals = receive(board, tl.max(row, 0), part, 0.0, 0.0, PARTS, BLOCK_PARTS)
        total = tl.full((1,), tl.sum(totals, 0), tl.float32)
    return total


class Phase(NamedTuple):
    """What the programs of a launch do with their states."""

    sends: bool
    receives: bool


PHASES = (Phase(True, False), Phase(False, True)) if INTERPRETED else (Phase(True, True),)


def exchange(plan: Callable[..., Launch], inputs: Tensors, outputs: Tensors, *options: object) -> None:
    """`launch`, with the phase as the last option; two phases where programs do not run at the same time."""
    for phase in PHASES:
        launch(plan, inputs, outputs, *options, phase)


SPARE = 1 << 18  # words, 2 MB a device, for launches that are captured
LINE = 16  # words; boards begin on whole lines, as kernels were compiled for
_boards: dict[tuple[torch.device, int], torch.Tensor] = {}
_spare: dict[torch.device, torch.Tensor] = {}


def board(device: torch.device, words: int, stream: int) -> torch.Tensor:
    """A board of zeros for the next launch on a stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return board_for_good(device, words)
    kept = _boards.get((device, stream))
    if kept is None or kept.numel() < words:
        kept = torch.zeros(triton.next_power_of_2(words), dtype=torch.int64, device=device)
        _boards[device, stream] = kept
        if device not in _spare:
            _spare[device] = torch.zeros(SPARE, dtype=torch.int64, device=device)
    return kept


def board_for_good(device: torch.device, words: int) -> torch.Tensor:
    """A board that no other launch is ever given, for one that is captured, so that a replay need not clear it.

    It is zeros at the first replay: those kept to spare were set before the capture, and torch.cuda.graph waits for
    the device when it begins one. It is zeros at the next, since the launch leaves zeros, and CUDA does not run a
    graph concurrently with itself, whatever the streams. Where nothing is left to spare, the graph clears its own.
    """
    spare = _spare.get(device)
    if spare is None or spare.numel() < words:
        return torch.zeros(words, dtype=torch.int64, device=device)
    _spare[device] = spare[triton.cdiv(words, LINE) * LINE :]  # even if empty, it holds the memory of all pieces
    return spare[:words]
