"""`flashsoft tune`: measures tiles for shapes of the user's on this machine's GPU, and writes the user's table."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from .. import dispatch, env
from ..tuning.timing import Clock
from . import UsageError

if TYPE_CHECKING:  # imports triton
    from .trial import Trial

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DIRECTIONS = ("forward", "backward")
MOST_ELEMENTS = 1 << 40
SHOWN = 5

Item = TypeVar("Item")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    shape = (
        "M rows of N elements; may be given again. What is found is used for all rows of N elements: M only says what "
        "to measure, since a row's bits do not depend on the number of rows"
    )
    dtype = "bf16 and fp16 have one choice between them"
    parser.add_argument("operation", choices=["softmax"], help="what is found serves log_softmax and logsumexp as well")
    parser.add_argument("--shape", action="append", required=True, metavar="MxN", help=shape)
    parser.add_argument("--dtype", choices=DTYPES, required=True, help=dtype)
    parser.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="both", help="(default: both)")


def run(args: argparse.Namespace) -> int:
    """Prints a table for each shape and direction; 1 if no candidate was right."""
    shapes, device = shapes_of(args.shape), pick_device()
    require_folder()
    from .trial import Trial

    failed, written = False, None
    # one stream of our own: CUDA graphs cannot be captured on the default one
    with torch.cuda.stream(torch.cuda.Stream()):
        clock = Clock()
        for M, N in shapes:
            for direction in DIRECTIONS if args.direction == "both" else (args.direction,):
                print(f"softmax {direction}, {M} x {N}, {args.dtype}, {torch.cuda.get_device_name()}", flush=True)
                try:
                    trial = Trial(direction, M, N, DTYPES[args.dtype], device)
                    trial.run(clock, progress)
                except torch.OutOfMemoryError as full:
                    raise UsageError(f"--shape must fit into the memory of {device}, got {M}x{N}") from full
                print(report(trial), end="\n\n", flush=True)
                if not trial.timings:
                    failed = True
                elif trial.kept != trial.present:
                    written = trial.write()
    if written is None:
        print("Nothing is written: the present choices stay.")
    else:
        print(f"Written to {written}, which is used from now on, in new processes as well.")
    return int(failed)


def report(trial: Trial) -> str:
    """The fastest candidates and the present choice as a table, and what follows."""
    lines = []
    if len(trial.timings) < len(trial.candidates):
        out = len(trial.candidates) - len(trial.timings)
        lines.append(
            f"{out} of {len(trial.candidates)} candidates left out; with FLASHSOFT_LOG=warning the log says why"
        )
    if not trial.timings:
        return "\n".join([*lines, "FAILED: no candidate gives what torch gives"])
    lines.append(f"{'us':>10} {'GB/s':>7} {'of copy':>7}           config")
    ms = {config: timing.quantiles()[0] for config, timing in trial.timings.items()}
    ranked = sorted(ms, key=ms.__getitem__)
    for place, config in enumerate(ranked):
        if place < SHOWN or config == trial.present:
            rate = trial.bytes / ms[config]
            mark = "present" if config == trial.present else "best" if place == 0 else ""
            lines.append(
                f"{ms[config] * 1e3:10.2f} {rate / 1e6:7.0f} {rate / trial.copy_rate:7.2f}  {mark:<7}  {config}"
            )
    if trial.kept == trial.present:
        lines.append("The present choice stays: no other is faster by more than runs differ.")
    elif trial.present in ms:
        lines.append(
            f"The best is chosen, {ms[trial.present] / ms[trial.kept]:.2f} times as fast as the present choice."
        )
    else:
        lines.append("The best is chosen: the present choice does not work.")
    return "\n".join(lines)


def shapes_of(texts: Sequence[str]) -> list[tuple[int, int]]:
    """The shapes asked for, each row length once; UsageError says what is wrong."""
    shapes: dict[int, int] = {}
    for text in texts:
        found = re.fullmatch(r"(\d{1,13})x(\d{1,13})", text, re.ASCII)
        M, N = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 0 < M * N <= MOST_ELEMENTS:
            raise UsageError(f"--shape must be rows x columns, such as 64x128256, at most 2^40 elements, got {text!r}")
        if N in shapes:
            raise UsageError(f"--shape must name a row length once, got {shapes[N]}x{N} and {M}x{N}")
        shapes[N] = M
    return [(M, N) for N, M in shapes.items()]


def pick_device() -> torch.device:
    """The current GPU, if the kernels can run there; UsageError says why not."""
    if not torch.cuda.is_available():
        raise UsageError("no CUDA GPU here, and tiles can only be measured on one")
    device = torch.device("cuda", torch.cuda.current_device())
    target = dispatch.target_of(device)
    (triton,) = (backend for backend in dispatch.BACKENDS if backend.name == "triton")
    reason = triton.why_not(dispatch.Problem("softmax", device, torch.float32), target)
    if target.interpreted:
        reason = "TRITON_INTERPRET=1 interprets them"
    if reason is not None:
        raise UsageError(f"the kernels cannot be measured on {device}: {reason}")
    return device


def require_folder() -> None:
    """UsageError unless the user's table can be written."""
    try:
        env.TUNING.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise UsageError(f"FLASHSOFT_TUNING must be a folder, got {env.TUNING}: {wrong.strerror}") from wrong
    if not os.access(env.TUNING, os.W_OK | os.X_OK):
        raise UsageError(f"FLASHSOFT_TUNING must be a folder that can be written, got {env.TUNING}")


def progress(items: Sequence[Item]) -> Iterator[Item]:
    """The items, while a terminal shows how many are done: by tqdm if it is installed, or else in figures."""
    if not sys.stderr.isatty():
        yield from items
        return
    try:
        bar = importlib.import_module("tqdm").tqdm
    except ModuleNotFoundError:
        for place, item in enumerate(items, 1):
            print(f"\r{place} of {len(items)}", end="", file=sys.stderr, flush=True)
            yield item
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    else:
        yield from bar(items, leave=False, unit="config")
