"""Peak memory of a stretch of work: the allocator's on a GPU, the process's resident memory on Linux."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Peak:
    """In bytes, once the stretch is over; None where it cannot be measured."""

    bytes: float | None = None


@contextlib.contextmanager
def peak(device: torch.device) -> Iterator[Peak]:
    """Fills in the peak when the stretch ends."""
    result = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield result
        result.bytes = torch.cuda.max_memory_allocated(device)
        return
    resettable = _reset_resident_peak()
    yield result
    result.bytes = _resident_peak() if resettable else None


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_resident_peak() -> bool:
    """Linux forgets the process's peak when 5 is written here; elsewhere there is no such file."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident_peak() -> float | None:
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return float(found[1]) * 1024 if found else None
