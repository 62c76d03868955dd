"""How every benchmark here runs: cases and their contenders, errors against float64, a row each, a CSV.

A *case* is one problem (a shape, a dtype, a direction) and its contenders. How they are timed is
`flashsoft.tuning.timing`. All cases are compiled first, by several processes that fill the compilers' caches on disk.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import importlib
import importlib.metadata
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import table
import torch
from torch import Tensor

import flashsoft
from flashsoft.cli import UsageError
from flashsoft.tuning import timing
from flashsoft.tuning.timing import Call

PRODUCT = table.PRODUCT
SCALE = {"GB/s": 1e9, "TFLOP/s": 1e12}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FACTS = ("date", "device", "flashsoft", "torch", "triton", "cuda", "cudnn", "peers")
MEASURES = (
    "provider", "timing", "samples", "median_ms", "p20_ms", "p80_ms", "rate", "unit",
    "ratio", "roof_share", "peak_mib", "max_error", "rms_error", "error",
)  # fmt: skip
JOB_MEMORY = 16 << 30  # bytes of the device for one process that compiles


@dataclass(frozen=True)
class Contenders:
    """What `Case.build` returns: inputs are made, nothing has run.

    `providers` make the call to time; one that raises ModuleNotFoundError is left out. `pairs` takes a call's result
    and gives tensors (got, want), want in float64: slices where the whole is too large.
    """

    providers: Mapping[str, Callable[[], Call]]
    pairs: Callable[[Any], Iterable[tuple[Tensor, Tensor]]] | None = None


@dataclass(frozen=True)
class Case:
    """One problem: its columns, the work of one call (bytes or FLOPs), the peer of its ratios.

    Unit us: the host's time for one call; its rate is that time.
    """

    section: str
    columns: Mapping[str, Any]
    work: float
    unit: str
    yardstick: str
    build: Callable[[torch.device], Contenders]

    def rate(self, ms: float) -> float:
        """In `unit`."""
        return ms * 1e3 if self.unit == "us" else self.work / (ms * 1e-3) / SCALE[self.unit]


@dataclass(frozen=True)
class Benchmark:
    """What a file of declarations declares; `cases` takes the command's arguments (`quick`, `dry`)."""

    name: str
    columns: Sequence[str]
    peers: Sequence[str]
    cases: Callable[[argparse.Namespace], Iterable[Case]]
    roofs: Sequence[Case] = ()
    packages: Sequence[str] = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The options that all benchmarks share."""
        known = ("section", *self.columns)
        columns = ", ".join(known)

        def clause(text: str) -> tuple[str, set[str]]:
            key, found, values = text.partition("=")
            if not found or key not in known:
                raise argparse.ArgumentTypeError(f"must be COLUMN=VALUE[,VALUE], COLUMN one of {columns}, got {text!r}")
            return key, set(values.split(","))

        def names(text: str) -> list[str]:
            wrong = [name for name in text.split(",") if name not in self.peers]
            if wrong:
                raise argparse.ArgumentTypeError(f"must be of {', '.join(self.peers)}, got {wrong[0]!r}")
            return text.split(",")

        parser.add_argument("--out", type=Path, default=Path(), help=f"folder of {self.name}.csv (default: this one)")
        parser.add_argument("--only", action="append", default=[], type=clause, metavar="COLUMN=VALUE[,VALUE]",
                            help=f"only such cases; {columns}")  # fmt: skip
        if "dtype" in self.columns:
            parser.add_argument("--dtype", dest="only", action="append", type=lambda text: clause(f"dtype={text}"),
                                metavar="DTYPE[,DTYPE]", help="the same as --only dtype=")  # fmt: skip
        parser.add_argument("--peers", type=names, metavar="PEER[,PEER]",
                            help=f"of {', '.join(self.peers)} (default: all that are installed)")  # fmt: skip
        parser.add_argument("--quick", action="store_true", help="a few cases")
        parser.add_argument("--budget", type=float, default=math.inf, help="seconds, then no case starts")
        parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU, no timing")

    def run(self, args: argparse.Namespace) -> int:
        """Measures, writes `name`.csv (dry: `name`-dry.csv), prints the table; 1 if the product failed."""
        if not args.dry and not torch.cuda.is_available():
            raise UsageError("no CUDA GPU here; --dry runs tiny shapes on the CPU")
        cases = self.chosen(args)
        if not cases:
            raise UsageError("no case is left by --only and --dtype")
        began = time.monotonic()
        device = torch.device("cpu" if args.dry else "cuda")
        path = args.out / f"{self.name}{'-dry' if args.dry else ''}.csv"
        if not args.dry:
            ran = self._compile(args, len(cases), began + args.budget / 2)
            print(f"compiled in {time.monotonic() - began:.0f} s: {ran} calls", flush=True)
        torch.manual_seed(0)
        # one stream of our own: CUDA graphs cannot be captured on the default one
        with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext():
            sweep = Sweep(path, self, device)
            try:
                if not args.dry:
                    sweep.roofs(self.roofs)
                for i, case in enumerate(cases):
                    if time.monotonic() > began + args.budget:
                        print(f"out of budget: {len(cases) - i} of {len(cases)} cases left out")
                        break
                    sweep.run(case, args.peers)
            finally:
                sweep.close()
        for name, why in sweep.missing.items():
            print(f"left out: {name}, {why}")
        print(f"\n{label(sweep.facts)}\n\n{table.markdown(path)}\n\n{path}: {time.monotonic() - began:.0f} s")
        return int(sweep.failed)

    def chosen(self, args: argparse.Namespace) -> list[Case]:
        """The cases that every `--only` allows."""

        def allowed(case: Case) -> bool:
            named = {"section": case.section, **case.columns}
            return all(str(named.get(key)) in values for key, values in args.only)

        return [case for case in self.cases(args) if allowed(case)]

    def _compile(self, args: argparse.Namespace, count: int, until: float) -> int:
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        jobs = max(1, min((os.cpu_count() or 2) // 2, memory // JOB_MEMORY, count))
        asked = argparse.Namespace(only=args.only, peers=args.peers, quick=args.quick, dry=args.dry)
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            runs = [pool.submit(call_once, self.name, asked, index) for index in range(count)]
            done, _ = wait(runs, None if until == math.inf else until - time.monotonic())
            pool.shutdown(cancel_futures=True)
        return sum(run.result() for run in done if run.exception() is None)


def call_once(name: str, args: argparse.Namespace, index: int) -> int:
    """Calls every contender of a case, so that compilers fill their caches on disk; how many ran.

    What fails here fails again, and is reported, when it is measured.
    """
    device = torch.device("cpu" if args.dry else "cuda")
    benchmark: Benchmark = importlib.import_module(name).BENCHMARK
    ran = 0
    for make in wanted(benchmark.chosen(args)[index].build(device), args.peers).values():
        with suppress(Exception):
            make()()
            ran += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return ran


def wanted(contenders: Contenders, peers: Sequence[str] | None) -> dict[str, Callable[[], Call]]:
    """The product and the peers asked for; None is all."""
    asked = contenders.providers.keys() if peers is None else (PRODUCT, *peers)
    return {name: make for name, make in contenders.providers.items() if name in asked}


def deviations(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Maximum and root mean square of got - want over all pairs; NaN in a result is a NaN here."""
    worst, total, count = 0.0, 0.0, 0
    for got, want in pairs:
        if got.shape != want.shape:
            raise ValueError(f"the result has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        off = (got.detach().to(torch.float64) - want).abs()
        here = float(off.max())
        worst = here if math.isnan(here) else max(worst, here) if not math.isnan(worst) else worst
        total, count = total + float(off.square().sum()), count + off.numel()
    return worst, math.sqrt(total / count) if count else 0.0


def said(error: Exception) -> str:
    """An exception in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def version(package: str) -> str:
    """Of an installed package, or nothing."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def facts(device: torch.device, packages: Sequence[str]) -> dict[str, str]:
    """Where, when and with what this run takes place."""
    on_gpu = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "flashsoft": flashsoft.__version__,
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda or "",
        "cudnn": str(torch.backends.cudnn.version() or "") if on_gpu else "",
        "peers": " ".join(f"{package}={version(package)}" for package in packages if version(package)),
    }


class Sweep:
    """Runs cases one by one and writes a row per contender as it goes."""

    def __init__(self, path: Path, benchmark: Benchmark, device: torch.device) -> None:
        self.device = device
        self.clock = timing.Clock() if device.type == "cuda" else None
        self.facts = facts(device, benchmark.packages)
        self.roof: dict[str, float] = {}
        self.missing: dict[str, str] = {}
        self.failed = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, [*FACTS, "section", *benchmark.columns, *MEASURES])
        self._writer.writeheader()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def roofs(self, cases: Sequence[Case]) -> None:
        """Measures what no contender can beat; the best rate of a unit is its roof."""
        for case in cases:
            for row in self.run(case):
                if row.get("rate"):
                    self.roof[case.unit] = max(self.roof.get(case.unit, 0.0), row["rate"])

    def run(self, case: Case, peers: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The rows of one case, written; whatever fails leaves its row with the reason."""
        try:
            rows = self._measure(case, peers)
        except Exception as error:
            rows = [{"provider": PRODUCT, "error": said(error)}]
        self._release()
        for row in rows:
            row.update({"section": case.section, **case.columns, "unit": case.unit})
            self.failed |= table.own(row["provider"]) and "error" in row
            self._writer.writerow({**self.facts, **{key: shown(value) for key, value in row.items()}})
            print(line(case, row), flush=True)
        self._file.flush()
        return rows

    def _measure(self, case: Case, peers: Sequence[str] | None) -> list[dict[str, Any]]:
        contenders = case.build(self.device)
        rows: dict[str, dict[str, Any]] = {}
        calls: dict[str, Call] = {}
        for name, make in wanted(contenders, peers).items():
            rows[name] = {"provider": name}
            try:
                call = make()
                before = self._allocated()
                result = call()
                if before is not None:
                    rows[name]["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / (1 << 20)
                if contenders.pairs is not None:
                    rows[name]["max_error"], rows[name]["rms_error"] = deviations(contenders.pairs(result))
                calls[name] = call
            except Exception as error:
                rows[name]["error"] = said(error)
                if isinstance(error, ModuleNotFoundError) and name != PRODUCT:
                    self.missing[name] = str(error)
                    del rows[name]
            result = None
        if self.clock is None:
            return list(rows.values())
        try:
            timings = timing.host(calls) if case.unit == "us" else self.clock.measure(calls)
        except Exception as error:
            for name in calls:
                rows[name]["error"] = said(error)
            return list(rows.values())
        for name, one in timings.items():
            median, p20, p80 = one.quantiles()
            rows[name].update(timing=one.how, samples=len(one.samples), median_ms=median, p20_ms=p20, p80_ms=p80)
            rows[name]["rate"] = case.rate(median)
            if case.yardstick in timings:
                rows[name]["ratio"] = timings[case.yardstick].quantiles()[0] / median
            if case.unit in self.roof:
                rows[name]["roof_share"] = rows[name]["rate"] / self.roof[case.unit]
        return list(rows.values())

    def _allocated(self) -> int | None:
        """Bytes of the device now, from where the peak is counted anew; None without one."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # after a fault of the device, the cells to come still get their rows
                torch.cuda.empty_cache()


def shown(value: Any) -> Any:
    """Numbers with as many digits as mean something."""
    return f"{value:.4g}" if isinstance(value, float) else value


def label(columns: Mapping[str, Any]) -> str:
    """A case in words."""
    return " ".join(f"{key}={value}" for key, value in columns.items())


def line(case: Case, row: Mapping[str, Any]) -> str:
    """One row for the terminal."""
    text = f"{case.section:<14} {label(case.columns):<58} {row['provider']:<15}"
    if "median_ms" in row:
        text += f" {row['median_ms']:9.4f} ms {row['rate']:7.4g} {case.unit}"
        text += f" ratio {row['ratio']:5.2f}" if "ratio" in row else ""
        text += f" roof {row['roof_share']:4.2f}" if "roof_share" in row else ""
    if "max_error" in row:
        text += f" error max {row['max_error']:.1e} rms {row['rms_error']:.1e}"
    return text + (f" {row['error'][:120]}" if "error" in row else "")


def main(module: Any) -> int:
    """A file of this folder as a script: its `add_arguments` and `run`, as `flashsoft bench` calls them."""
    parser = argparse.ArgumentParser(description=module.__doc__.splitlines()[0])
    module.add_arguments(parser)
    args = parser.parse_args()
    try:
        code: int = module.run(args)
    except UsageError as wrong:
        parser.error(str(wrong))
    return code
