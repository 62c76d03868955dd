"""How calls are timed: on a GPU in interleaved rounds, and what issuing them costs the host.

Calls are timed in turns, in rounds, each in the reversed order of the one before, so that clocks and temperature
favour nobody. A sample is one call between two CUDA events, after a write that is larger than the L2 cache and takes
longer than the host needs to issue the call. Calls whose fastest is under GRAPH_BELOW_MS are replayed from CUDA graphs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], Any]
GRAPH_BELOW_MS = 0.2
HOST_ROUNDS, HOST_CALLS = 20, 50  # 50 launches do not fill the device's queue


@dataclass
class Timing:
    """The samples of one call, in milliseconds."""

    how: str
    samples: list[float] = field(default_factory=list)

    def quantiles(self) -> tuple[float, float, float]:
        """Median, 20th and 80th percentile."""
        fifths = statistics.quantiles(self.samples, n=5, method="inclusive")
        return statistics.median(self.samples), fifths[0], fifths[3]


class Clock:
    """Times calls on the current CUDA stream, each after the L2 cache was overwritten."""

    def __init__(self) -> None:
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        size = min(1 << 30, max(1 << 28, memory // 16))
        self.flush = torch.empty(size, dtype=torch.uint8, device="cuda")

    def rounds(self, calls: Sequence[Call], count: int) -> list[list[float]]:
        """`count` samples in milliseconds of every call, the order reversed from round to round."""
        spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
        for turn in range(count):
            order = range(len(calls)) if turn % 2 == 0 else reversed(range(len(calls)))
            for i in order:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.flush.zero_()
                start.record()
                calls[i]()
                end.record()
                spans[i].append((start, end))
        torch.cuda.synchronize()
        return [[start.elapsed_time(end) for start, end in one] for one in spans]

    def measure(self, calls: Mapping[str, Call]) -> dict[str, Timing]:
        """Interleaved samples of calls that have run before."""
        if not calls:
            return {}
        estimates = [min(samples) for samples in self.rounds(list(calls.values()), 3)]
        timed, timings = dict(calls), {name: Timing("events") for name in calls}
        if min(estimates) < GRAPH_BELOW_MS:
            for name, call in calls.items():
                try:
                    timed[name], timings[name].how = captured(call), "graph"
                except Exception:  # not capturable: timed as a plain call, and the row says so
                    torch.cuda.synchronize()
        count = 30 if max(estimates) < 1 else 20 if max(estimates) < 5 else 10
        for name, samples in zip(timed, self.rounds(list(timed.values()), count), strict=True):
            timings[name].samples = samples
        return timings


def captured(call: Call) -> Call:
    """The call as a CUDA graph, on the stream that its inputs were made on."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    return graph.replay


def host(calls: Mapping[str, Call]) -> dict[str, Timing]:
    """What issuing each call costs the host: loops of HOST_CALLS in turns, none of which waits for the device."""
    timings, turns = {name: Timing("host") for name in calls}, list(calls.items())
    for _ in range(HOST_ROUNDS):
        for name, call in turns:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            timings[name].samples.append((time.perf_counter() - start) / HOST_CALLS * 1e3)
        turns.reverse()
    return timings
