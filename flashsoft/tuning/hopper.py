"""Tiles and pipelines of the Hopper forward kernel: what they are, what is legal, and which one a problem gets."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

SHARED_MEMORY = 227 * 1024  # bytes a program may have
REGISTERS = 65536  # of a multiprocessor
L2 = 40 * 2**20  # bytes of keys and values that a section of heads may have; the H200's cache holds 50 MB


@dataclass(frozen=True)
class HopperConfig:
    """d, dv: columns of keys and of values; narrower heads are padded. consumers: warpgroups of 64 queries each.

    block_n: keys of a tile. stages: of keys and of values on the way. q_stages: of queries. registers: a consumer's
    thread's; producer_registers: the producer's. turns: whether consumers take turns on the tensor cores. queue:
    whether programs take tiles off a queue, and not at strides. in_place: whether out leaves by the memory of queries.
    fence, pinned: see `kernels/hopper/consumer.py`.
    """

    d: int
    dv: int
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
    in_place: bool = False

    @property
    def columns(self) -> int:
        """Those of keys up to a power of two: tiles have no other width."""
        return 1 << (self.d.bit_length() - 1)

    @property
    def more(self) -> int:
        """The columns of keys beyond."""
        return self.d - self.columns

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return 64 * self.consumers


def shared_memory(config: HopperConfig) -> int:
    """Bytes of tiles of 16-bit heads; barriers and numbers take less than 512 more."""
    queries = config.consumers * config.q_stages * 64 * config.d
    outs = 0 if config.in_place else config.consumers * 64 * config.dv
    return 2 * (queries + outs + config.stages * config.block_n * (config.d + config.dv))


def legal(config: HopperConfig) -> bool:
    """Whether a config can be built: registers of the two roles, with a padded producer, and shared memory."""
    registers = 128 * (config.consumers * config.registers + config.producer_registers)
    return (
        config.consumers in (2, 3)
        and config.block_n in (64, 128, 256)
        and registers <= REGISTERS
        and all(width & (width - 1) == 0 for width in (config.dv, config.more))
        and (not config.in_place or config.columns == config.dv)
        and shared_memory(config) + 512 <= SHARED_MEMORY
    )


# A head gets the first that is wide enough.
CONFIGS = (
    HopperConfig(64, 64, 3, 128, 3, 2, 160, 32),
    HopperConfig(128, 128, 2, 128, 2, 2, 240, 24),
    HopperConfig(192, 128, 2, 128, 2, 1, 240, 24, in_place=True),
    HopperConfig(256, 256, 2, 64, 2, 1, 240, 24, in_place=True),
)


@functools.cache
def hopper_config(D: int, Dv: int, uneven: bool) -> HopperConfig:
    """The config for heads of D and Dv; `uneven` if tiles of queries differ in how many keys they see."""
    config = next(config for config in CONFIGS if config.d >= D and config.dv >= Dv)
    return replace(config, queue=uneven)


def section(Sk: int, D: int, Dv: int, heads: int, group: int, uneven: bool) -> int:
    """Query heads whose tiles run side by side, `group` to a head of keys: one, or as many as the L2 cache holds."""
    if not uneven:
        return 1
    return min(heads, max(1, L2 // (2 * Sk * (D + Dv))) * group)
