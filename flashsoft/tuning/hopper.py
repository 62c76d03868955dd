"""Tiles and pipelines of the Hopper forward kernel: what they are, what is legal, and which one a problem gets.

Measured on an H200 (torch 2.11, triton 3.6, 2026-12-01; bf16, B * S = 16,384, S of 512 to 16,384, causal and not),
beside tiles of 64 keys for 128 columns, no turns on the tensor cores, and out through one piece of memory or two. A
tile is as large as registers and shared memory let it be: three consumers for heads of 64 only, 64 keys for heads of
256, one slot of queries from 192 columns on. Under a band a tile of 192 queries wastes more of its edges, and more of a
short sequence, than three consumers gain over two: below 8,192 keys two were faster.
"""

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
    thread's; producer_registers: the producer's. queue: whether programs take tiles off a queue, and not at strides.
    pinned: see `kernels/hopper/consumer.py`. out_columns, out_slots: out leaves in parts of so many columns, by so many
    pieces of memory a consumer.
    """

    d: int
    dv: int
    consumers: int
    block_n: int
    stages: int
    q_stages: int
    registers: int
    producer_registers: int
    queue: bool = False
    pinned: bool = False
    out_columns: int = 64
    out_slots: int = 1

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

    def scratch(self, programs: int) -> int:
        """Words of zeros that a launch needs: see `kernels/hopper/scheduler.py`."""
        return 2 + self.q_stages * programs if self.pinned else 2 * self.queue


def shared_memory(config: HopperConfig) -> int:
    """Bytes of tiles of 16-bit heads; barriers and numbers take less than 512 more."""
    queries = config.consumers * config.q_stages * 64 * config.d
    outs = config.consumers * config.out_slots * 64 * config.out_columns
    return 2 * (queries + outs + config.stages * config.block_n * (config.d + config.dv))


def legal(config: HopperConfig) -> bool:
    """Whether a config can be built: registers of the two roles, with a padded producer, and shared memory."""
    registers = 128 * (config.consumers * config.registers + config.producer_registers)
    return (
        config.consumers in (2, 3)
        and config.block_n in (64, 128, 256)
        and registers <= REGISTERS
        and all(width & (width - 1) == 0 for width in (config.dv, config.more, config.out_columns))
        and config.dv // config.out_columns in (1, 2, 4)
        and shared_memory(config) + 512 <= SHARED_MEMORY
    )


# A head gets the first that is wide enough.
CONFIGS = (
    HopperConfig(64, 64, 3, 128, 3, 2, 160, 32),
    HopperConfig(128, 128, 2, 128, 2, 2, 240, 24, out_columns=128),
    HopperConfig(192, 128, 2, 128, 2, 1, 240, 24),
    HopperConfig(256, 256, 2, 64, 2, 1, 240, 24, out_slots=2),
)
# For narrow heads of short sequences, if tiles are uneven: 128 queries, not 192.
SHORT = HopperConfig(64, 64, 2, 128, 4, 2, 240, 24)


@functools.cache
def hopper_config(D: int, Dv: int, longest: int, uneven: bool, wide: bool) -> HopperConfig:
    """The config for heads of D and Dv, of at most `longest` keys.

    uneven: whether tiles of queries differ in how many keys they see; wide: whether the dtype has float32's exponents,
    so that weights may be large ones.
    """
    config = next(config for config in CONFIGS if config.d >= D and config.dv >= Dv)
    if config is CONFIGS[0] and uneven and longest < 8192:
        config = SHORT
    return replace(config, queue=uneven, pinned=wide)


def section(Sk: int, D: int, Dv: int, heads: int, group: int, uneven: bool) -> int:
    """Query heads whose tiles run side by side, `group` to a head of keys: one, or as many as the L2 cache holds.

    Sections are of one size, as far as that goes: the last, when programs run out of work, is not to be a small one.
    """
    if not uneven:
        return 1
    most = max(1, L2 // (2 * Sk * (D + Dv))) * group
    sections = -(-heads // most)
    return min(heads, -(-heads // (sections * group)) * group)
