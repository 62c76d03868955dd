"""One shape of the row softmax in one direction, by every candidate config: checked against torch, then timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import env
from ..kernels import launch, softmax_backward, softmax_forward
from ..tuning import rows, search, tables
from ..tuning.rows import RowConfig
from ..tuning.timing import Clock, Timing

CHECKED = 1 << 24  # elements compared at a time
Progress = Callable[[Sequence[RowConfig]], Iterator[RowConfig]]


class Trial:
    """The candidates; after `run`, the timings of those that are right, in the order of the candidates.

    bytes: read and written by one call; copy_rate: bytes a millisecond of a copy in the same rounds.
    """

    def __init__(self, direction: str, M: int, N: int, dtype: torch.dtype, device: torch.device) -> None:
        x = torch.randn(M, N, dtype=dtype, device=device)
        self.inputs: tuple[Tensor, ...] = (x,)
        if direction == "backward":
            self.inputs = (torch.randn_like(x), torch.softmax(x, -1))
        self.op = rows.BACKWARD if direction == "backward" else rows.FORWARD
        self.bytes = (len(self.inputs) + 1) * x.nbytes
        self.target = rows.device(x.get_device())
        self.present = rows.row_config(self.op, N, dtype.itemsize, False, self.target)
        most = rows.most_parts(self.target)
        self.candidates = search.candidates(self.op, N, dtype.itemsize, most, self.present)
        self.timings: dict[RowConfig, Timing] = {}
        self.copy_rate = 0.0

    def run(self, clock: Clock, progress: Progress) -> None:
        """Checks and times."""
        try:
            sound = [config for config in progress(self.candidates) if self.is_right(config)]
            calls = {str(config): self.forced(config) for config in sound}
            x, copy = self.inputs[0], torch.empty_like(self.inputs[0])
            timings = clock.measure(calls | {"copy": lambda: copy.copy_(x)})
        finally:
            launch.forget()
        self.copy_rate = 2 * x.nbytes / timings["copy"].quantiles()[0]
        self.timings = {config: timings[str(config)] for config in sound}

    def is_right(self, config: RowConfig) -> bool:
        """Whether the config can be built and gives what torch gives; if not, the log says why."""
        try:
            with poisoned():
                result = self.forced(config)()
            if agree(self.inputs, result):
                return True
            wrong = "not what torch gives"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler or a driver may raise
            wrong = f"{type(error).__name__}: {error}"
        env.logger.warning("%s: %s is left out: %s", self.op, config, wrong)
        return False

    def forced(self, config: RowConfig) -> Callable[[], Tensor]:
        """The call to time, by a config."""
        function: Callable[..., Tensor] = softmax_backward if self.op == rows.BACKWARD else softmax_forward

        def call() -> Tensor:
            launch.forget()
            with rows.forcing(config):
                return function(*self.inputs, self.inputs[0].dtype)

        return call

    @property
    def kept(self) -> RowConfig:
        """The choice after the trial."""
        return search.kept(self.timings, self.present)

    def write(self) -> Path:
        """Puts the choice into the user's table; the file."""
        N, itemsize = self.inputs[0].shape[-1], self.inputs[0].itemsize
        entry = {"op": self.op, "itemsize": itemsize, "first": N, "last": N, "config": asdict(self.kept)}
        path = tables.write(self.target.name, [entry], search.facts())
        launch.forget()
        return path


def agree(inputs: tuple[Tensor, ...], result: Tensor) -> bool:
    """Whether the softmax of (x,), or its gradient for (dy, y), is torch's in float32 up to roundings; NaN is not."""
    dtype, single = torch.finfo(result.dtype), torch.finfo(torch.float32)
    least = max(dtype.tiny * dtype.eps, single.tiny)  # apart by so much, results near 0 are the same
    rows = max(1, CHECKED // result.shape[-1])
    for got, *given in zip(result.split(rows), *(tensor.split(rows) for tensor in inputs), strict=True):
        wide = [tensor.float() for tensor in given]
        if len(wide) == 1:
            want = size = torch.softmax(wide[0], -1)
        else:
            dy, y = wide
            want = y * (dy - (y * dy).sum(-1, keepdim=True))
            size = y * (dy.abs() + (y * dy).abs().sum(-1, keepdim=True))
        allowed = dtype.eps * want.abs() + 64 * single.eps * size + least
        if not bool(((got.float() - want).abs() <= allowed).all()):
            return False
    return True


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN, by torch's own switch, so that an element left unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
