"""Tiles and pipelines of the Hopper forward kernel: what they are, what is legal, and which one a problem gets."""

from __future__ import annotations

import functools
from dataclasses import dataclass

SHARED_MEMORY = 227 * 1024  # bytes a program may have
REGISTERS = 65536  # of a multiprocessor
L2 = 40 * 2**20  # bytes of keys and values that a section of heads may have; the H200's cache holds 50 MB


@dataclass(frozen=True)
class HopperConfig:
    """consumers: warpgroups of 64 queries each. block_n: keys of a tile. stages: of keys and of values on the way.

    q_stages: of queries. turns: whether consumers take turns on the tensor cores. queue: whether programs take tiles
    off a queue, and not at strides. registers: a consumer's thread's; producer_registers: the producer's.
    fence, pinned: see `kernels/hopper/consumer.py`.
    """

    consumers: int
    block_n: int
    stages: int
    q_stages: int
    registers: int
    producer_registers: int
    turns: bool = True
    fence: bool = True
    queue: bool = False
    pinned: bool = False

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return 64 * self.consumers


def power_of_two(n: int) -> int:
    """The least that is no less than n.

    >>> [power_of_two(n) for n in (1, 2, 3, 6)]
    [1, 2, 4, 8]
    """
    return 1 << (n - 1).bit_length()


def shared_memory(config: HopperConfig, D: int, Dv: int) -> int:
    """Bytes of tiles of 16-bit heads; barriers and numbers take less than 512 more."""
    queries = power_of_two(config.consumers * config.q_stages) * 64 * D
    outs = power_of_two(config.consumers) * 64 * Dv
    return 2 * (queries + outs + config.stages * config.block_n * (D + Dv))


def legal(config: HopperConfig, D: int, Dv: int) -> bool:
    """Whether a config can be built: registers of the two roles, with a padded producer, and shared memory."""
    registers = 128 * (config.consumers * config.registers + config.producer_registers)
    return (
        config.consumers in (2, 3)
        and config.block_n in (64, 128, 256)
        and registers <= REGISTERS
        and shared_memory(config, D, Dv) + 512 <= SHARED_MEMORY
    )


# a head of (D, Dv) -> config
CONFIGS: dict[tuple[int, int], HopperConfig] = {
    (64, 64): HopperConfig(3, 128, 3, 1, 160, 32),
    (128, 128): HopperConfig(2, 128, 2, 2, 240, 24),
}


@functools.cache
def hopper_config(D: int, Dv: int, banded: bool) -> HopperConfig:
    """The config for heads of D and Dv; `banded` if tiles of queries differ in how many keys they see."""
    config = CONFIGS[D, Dv]
    return HopperConfig(**{**vars(config), "queue": banded})


def section(Sk: int, D: int, Dv: int, heads: int, group: int, banded: bool) -> int:
    """Query heads whose tiles run side by side, `group` to a head of keys: one, or as many as the L2 cache holds."""
    if not banded:
        return 1
    return min(heads, max(1, L2 // (2 * Sk * (D + Dv))) * group)
