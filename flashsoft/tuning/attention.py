"""Tiles of the portable attention kernels: what they are, what is legal, and which one a problem gets.

A ladder lists tiles from the fastest down to the smallest; a problem gets the first that fits the shared memory of
its device. The 16-bit ladders for Hopper and heads of 64 and 128 were measured on an H200 (torch 2.11, triton 3.6,
2026-11-30; bf16, B * S = 16,384, S of 1,024, 4,096 and 16,384, causal and not) among four to ten tiles each; those for
masks on 2026-12-01 by a boolean one (S 4,096) and documents (16,384), those for terms by a bias and dropout (4,096),
those for both by a boolean mask with a bias and a softcap (4,096).
All others were chosen by the compiler's word, the largest tiles that spill little, and no device has timed them.
Sequence lengths play no part.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import triton


@dataclass(frozen=True)
class TileConfig:
    """Queries (block_m) and keys (block_n) of a tile, warps of a program, stages of the pipeline of loads.

    registers: the most a thread may have, where that lets one more program run beside.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    registers: int | None = None

    def launch_options(self) -> dict[str, int]:
        """What Triton takes beside a kernel's parameters."""
        options = {"num_warps": self.num_warps}
        return options if self.registers is None else {**options, "maxnreg": self.registers}


@dataclass(frozen=True)
class BackwardConfig:
    """One tile each for the kernel that owns keys and the one that owns queries."""

    keys: TileConfig
    queries: TileConfig


# a score is its product under a band at most; or a mask is looked up; or terms are added or drawn; or both, or a bias
# is wider than queries
Kind = Literal["plain", "masked", "scored", "mixed"]
Ladder = tuple[TileConfig, ...]


@dataclass(frozen=True)
class Ladders:
    """A ladder for each kernel."""

    forward: Ladder
    keys: Ladder
    queries: Ladder


# (bytes an element, width of a head: the larger of its padded key and value sizes) -> ladders
HOPPER: dict[tuple[int, int], Ladders] = {
    (2, 64): Ladders(
        forward=(TileConfig(64, 64, 4, 3, registers=128),),
        keys=(TileConfig(64, 64, 4, 3),),
        queries=(TileConfig(64, 64, 4, 3),),
    ),
    (2, 128): Ladders(
        forward=(TileConfig(64, 64, 4, 3),),
        keys=(TileConfig(64, 128, 8, 3),),
        queries=(TileConfig(128, 64, 8, 3),),
    ),
    (2, 256): Ladders(
        forward=(TileConfig(128, 64, 8, 2),),
        keys=(TileConfig(64, 64, 8, 1),),
        queries=(TileConfig(128, 32, 8, 2),),
    ),
    (2, 512): Ladders(
        forward=(TileConfig(64, 32, 8, 2), TileConfig(64, 32, 8, 1)),
        keys=(TileConfig(32, 32, 8, 1),),
        queries=(TileConfig(32, 32, 8, 1),),
    ),
}
_WIDE = Ladders(
    forward=(TileConfig(128, 32, 8, 2),),
    keys=(TileConfig(32, 64, 8, 1),),
    queries=(TileConfig(128, 32, 8, 1),),
)
# where scores take more registers, or a bias a part of shared memory
HOPPER_MASKED: dict[tuple[int, int], Ladders] = {
    (2, 64): Ladders(
        forward=(TileConfig(64, 64, 4, 3, registers=128),),
        keys=(TileConfig(64, 64, 4, 3),),
        queries=(TileConfig(64, 64, 4, 2),),
    ),
    (2, 128): Ladders(
        forward=(TileConfig(64, 64, 4, 3),),
        keys=(TileConfig(64, 128, 8, 3),),
        queries=(TileConfig(64, 64, 4, 2),),
    ),
    (2, 256): _WIDE,
}
HOPPER_SCORED: dict[tuple[int, int], Ladders] = {
    (2, 64): Ladders(
        forward=(TileConfig(64, 64, 4, 3),),
        keys=(TileConfig(64, 64, 4, 2),),
        queries=(TileConfig(64, 64, 4, 3),),
    ),
    (2, 128): Ladders(
        forward=(TileConfig(128, 64, 8, 3),),
        keys=(TileConfig(64, 128, 8, 3),),
        queries=(TileConfig(128, 64, 8, 3),),
    ),
    (2, 256): _WIDE,
}
HOPPER_MIXED: dict[tuple[int, int], Ladders] = {
    (2, 64): Ladders(
        forward=(TileConfig(64, 64, 4, 3),),
        keys=(TileConfig(64, 64, 4, 2),),
        queries=(TileConfig(64, 64, 4, 2),),
    ),
    (2, 128): Ladders(
        forward=(TileConfig(64, 64, 4, 2),),
        keys=(TileConfig(32, 64, 4, 2),),
        queries=(TileConfig(64, 64, 4, 2),),
    ),
    (2, 256): _WIDE,
}
_HOPPER: dict[Kind, dict[tuple[int, int], Ladders]] = {
    "plain": HOPPER,
    "masked": {**HOPPER, **HOPPER_MASKED},
    "scored": {**HOPPER, **HOPPER_SCORED},
    "mixed": {**HOPPER, **HOPPER_MIXED},
}
PORTABLE: dict[tuple[int, int], Ladders] = {
    (2, 64): Ladders(
        forward=(TileConfig(64, 64, 4, 2),),
        keys=(TileConfig(32, 32, 4, 2),),
        queries=(TileConfig(64, 32, 4, 2),),
    ),
    (2, 128): Ladders(
        forward=(TileConfig(64, 32, 4, 2),),
        keys=(TileConfig(64, 32, 8, 1), TileConfig(32, 32, 8, 1)),
        queries=(TileConfig(64, 32, 4, 2), TileConfig(32, 32, 4, 1)),
    ),
    (2, 256): Ladders(
        forward=(TileConfig(64, 32, 8, 1), TileConfig(32, 16, 4, 1)),
        keys=(TileConfig(64, 32, 8, 1), TileConfig(32, 32, 8, 1), TileConfig(16, 16, 4, 1)),
        queries=(TileConfig(32, 32, 8, 1), TileConfig(32, 16, 4, 1)),
    ),
    (4, 64): Ladders(
        forward=(TileConfig(32, 32, 8, 1),),
        keys=(TileConfig(32, 16, 4, 1),),
        queries=(TileConfig(32, 16, 4, 1),),
    ),
    (4, 128): Ladders(
        forward=(TileConfig(32, 32, 8, 1),),
        keys=(TileConfig(32, 32, 8, 1), TileConfig(16, 16, 4, 1)),
        queries=(TileConfig(32, 16, 8, 1),),
    ),
    (4, 256): Ladders(
        forward=(TileConfig(32, 16, 8, 1), TileConfig(16, 16, 8, 1)),
        keys=(TileConfig(16, 16, 4, 1),),
        queries=(TileConfig(32, 16, 8, 1), TileConfig(16, 16, 4, 1)),
    ),
    (2, 512): Ladders(
        forward=(TileConfig(32, 32, 8, 1), TileConfig(16, 16, 8, 1)),
        keys=(TileConfig(32, 32, 8, 1), TileConfig(16, 16, 8, 1)),
        queries=(TileConfig(32, 32, 8, 1), TileConfig(16, 16, 8, 1)),
    ),
    (4, 512): Ladders(
        forward=(TileConfig(16, 16, 8, 1),),
        keys=(TileConfig(16, 16, 8, 1),),
        queries=(TileConfig(16, 16, 8, 1),),
    ),
}
BIAS_PROGRAMS = 264  # that a bias's gradient is dealt to where it is small: two for each multiprocessor of an H200
PREPARE_ROWS = 32  # of a program of the kernel before both gradients

# The interpreter's time goes by tiles, not by their size, but tests want several of them in short sequences.
INTERPRETED = TileConfig(32, 32, 4, 1)

ROW_PADDING = 128  # per-row statistics of the backward are padded to whole tiles of so many queries, the most allowed
SCRATCH = 2048  # bytes of shared memory left for reductions and per-row statistics


def columns(head_dim: int, *, chained: bool = False) -> tuple[int, ...]:
    """A head's columns in a tile: one power of two, or two if that pads less; 16 is the least of a matrix instruction.

    Where one thread adds a block's products in a chain, those of float32, the first is cut into blocks of its half, or
    of 128: what is rounded off grows with the root of a chain's length, and it is in every weight.

    >>> [columns(size) for size in (8, 64, 72, 120, 192, 576)]
    [(16,), (64,), (64, 16), (128,), (128, 64), (512, 64)]
    >>> [columns(size, chained=True) for size in (8, 64, 72, 120, 192, 576)]
    [(16,), (32, 32), (32, 32, 16), (64, 64), (64, 64, 64), (128, 128, 128, 128, 64)]
    """
    whole = max(16, int(triton.next_power_of_2(head_dim)))
    first = whole // 2
    rest = max(16, int(triton.next_power_of_2(head_dim - first)))
    blocks = (whole,) if first < 16 or first + rest >= whole else (first, rest)
    if not chained:
        return blocks
    width = min(max(16, blocks[0] // 2), 128)
    count, left = divmod(sum(blocks), width)
    return (width,) * count + ((left,) if left else ())


def value_columns(D: int, Dv: int, *, chained: bool = False) -> tuple[int, ...]:
    """The columns of values in a tile, of keys of D: those of a head of Dv, but not narrower than keys up to 64.

    The least are laid out in shared memory otherwise (64 columns of 16 bits are a row of its widest swizzle), and where
    keys and values have one place there, one after the other, the ptxas of triton 3.6 (CUDA 12.8) loses the upper half
    of the address of values: of a sum of 64 bits whose other half both share.

    >>> [value_columns(*sizes) for sizes in ((20, 12), (64, 24), (96, 80), (80, 80), (16, 32), (192, 128), (576, 512))]
    [(32,), (64,), (128,), (64, 16), (32,), (128,), (512,)]
    """
    keys, values = columns(D, chained=chained), columns(Dv, chained=chained)
    if chained or Dv >= D or all(min(key, 64) <= value for key, value in zip(keys, values, strict=False)):
        return values
    return (int(triton.next_power_of_2(max(Dv, min(64, keys[0])))),)


def padded(D: int, Dv: int) -> int:
    """How many columns a key and its value have in tiles."""
    return sum(columns(D)) + sum(value_columns(D, Dv))


def input_precision(dtype: torch.dtype) -> str:
    """float32 products in full, unless torch is allowed TF32 for its own (by its old settings or its new ones)."""
    if dtype != torch.float32:
        return "ieee"
    allowed = torch.backends.cuda.matmul.fp32_precision
    if allowed == "none":
        allowed = getattr(torch.backends, "fp32_precision", "none")
    return "tf32" if allowed == "tf32" else "ieee"


def legal(tile: TileConfig, owned: int, streamed: int, row_bytes: int, limit: int) -> bool:
    """Whether a program that keeps `owned` rows on chip and streams `streamed` rows a stage fits shared memory.

    `row_bytes`: of a row of a key (or query) and a value (or dout) together; `limit`: bytes a program may have.
    """
    sizes = (tile.block_m, tile.block_n)
    return (
        all(size >= 16 and size & (size - 1) == 0 for size in sizes)
        and tile.block_m <= ROW_PADDING
        and (owned + tile.num_stages * streamed) * row_bytes + SCRATCH <= limit
    )


@dataclass(frozen=True)
class Device:
    """What the choice asks of a device."""

    hopper: bool
    shared_memory: int


@functools.cache
def device(index: int) -> Device:
    """The facts of GPU `index`, the current one, from Triton's driver."""
    driver = triton.runtime.driver.active
    target = driver.get_current_target()
    limit = int(driver.utils.get_device_properties(index)["max_shared_mem"])
    return Device(target.backend == "cuda" and target.arch // 10 == 9, limit)


def forward_config(query: torch.Tensor, Dv: int, kind: Kind) -> TileConfig:
    """The tile of the forward kernel."""
    if triton.knobs.runtime.interpret:
        return INTERPRETED
    return _choose(query.shape[3], Dv, query.itemsize, kind, device(query.device.index or 0))[0]


def backward_config(query: torch.Tensor, Dv: int, kind: Kind) -> BackwardConfig:
    """The tiles of the backward kernels."""
    if triton.knobs.runtime.interpret:
        return BackwardConfig(INTERPRETED, INTERPRETED)
    return _choose(query.shape[3], Dv, query.itemsize, kind, device(query.device.index or 0))[1]


def bias_config(tile: TileConfig, query: torch.Tensor, Dv: int, bias: torch.Tensor) -> TileConfig:
    """The tile of the kernel of a bias's gradient, which streams both its sides: two stages where they fit."""
    row_bytes = padded(query.shape[3], Dv) * query.itemsize
    stage = (tile.block_m + tile.block_n) * row_bytes + tile.block_m * tile.block_n * bias.itemsize
    interpreted = triton.knobs.runtime.interpret
    fits = not interpreted and 2 * stage + SCRATCH <= device(query.device.index or 0).shared_memory
    return TileConfig(tile.block_m, tile.block_n, tile.num_warps, 2 if fits else 1)


@functools.cache
def _choose(D: int, Dv: int, itemsize: int, kind: Kind, target: Device) -> tuple[TileConfig, BackwardConfig]:
    key = (itemsize, min(512, max(64, int(triton.next_power_of_2(max(D, Dv))))))
    row_bytes = padded(D, Dv) * itemsize
    own = _HOPPER[kind]
    ladders = own[key] if target.hopper and key in own else PORTABLE[key]

    def first(ladder: Ladder, owned: tuple[str, float], streamed: tuple[str, float]) -> TileConfig:
        """The first rung that fits, or the last, for so many times the rows of each kind."""
        for tile in ladder:
            held, passing = (int(getattr(tile, name) * times) for name, times in (owned, streamed))
            if legal(tile, held, passing, row_bytes, target.shared_memory):
                return tile
        return ladder[-1]

    # the forward kernel keeps queries only: half of what a row of both takes
    forward = first(ladders.forward, owned=("block_m", 0.5), streamed=("block_n", 1.0))
    # a gradient's kernel has its streamed keys, or queries, a second time, as an operand of its own: wide ones in 16
    # bits; and those of TF32, where heads wider than 256 have no smaller tile to go to
    times = 1.5 if (itemsize == 4) == (key[1] <= 256) else 1.0
    keys = first(ladders.keys, owned=("block_n", 1.0), streamed=("block_m", times))
    queries = first(ladders.queries, owned=("block_m", 1.0), streamed=("block_n", times))
    return forward, BackwardConfig(keys, queries)
