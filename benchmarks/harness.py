"""How every benchmark here measures: timing in interleaved rounds, errors against float64, a CSV, a table.

A *case* is one problem (a shape, a dtype, a direction) and its contenders. They are timed in turns, in
rounds, each round in the reversed order of the one before, so that clocks and temperature favour nobody. A
sample is one call between two CUDA events, after a write that is larger than the L2 cache and takes longer
than the host needs to issue the call. Cases whose fastest contender is under GRAPH_BELOW_MS are replayed
from CUDA graphs.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashsoft

Call = Callable[[], Any]
GRAPH_BELOW_MS = 0.2
SCALE = {"GB/s": 1e9, "TFLOP/s": 1e12}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FACTS = ("date", "device", "flashsoft", "torch", "triton", "cuda", "cudnn")
MEASURES = (
    "provider", "timing", "samples", "median_ms", "p20_ms", "p80_ms", "rate", "unit",
    "ratio", "roof_share", "max_error", "rms_error", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Contenders:
    """What `Case.build` returns: inputs are made, nothing has run.

    `providers` make the call to time, the product's first; `pairs` takes a call's result and gives tensors
    (got, want), want in float64: slices where the whole is too large.
    """

    providers: Mapping[str, Callable[[], Call]]
    pairs: Callable[[Any], Iterable[tuple[Tensor, Tensor]]] | None = None


@dataclass(frozen=True)
class Case:
    """One problem: its columns, the work of one call (bytes or FLOPs), the peer of its ratios."""

    section: str
    columns: Mapping[str, Any]
    work: float
    unit: str
    yardstick: str
    build: Callable[[torch.device], Contenders]


@dataclass
class Timing:
    """The samples of one contender, in milliseconds."""

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


def facts(device: torch.device) -> dict[str, str]:
    """Where and when this run takes place."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    on_gpu = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "flashsoft": flashsoft.__version__,
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda or "",
        "cudnn": str(torch.backends.cudnn.version() or "") if on_gpu else "",
    }


class Sweep:
    """Runs cases one by one, writes a row per contender as it goes, and keeps the rows for the table."""

    def __init__(self, path: Path, columns: Sequence[str], device: torch.device, deadline: float) -> None:
        self.device, self.deadline = device, deadline
        self.clock = Clock() if device.type == "cuda" else None
        self.facts = facts(device)
        self.roof: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, [*FACTS, "section", *columns, *MEASURES])
        self._writer.writeheader()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def compile(self, cases: Sequence[Case], until: float) -> None:
        """Calls everything once, so that no compiler runs between timed cases; failures show later."""
        for case in cases:
            if time.monotonic() > until:
                return
            try:
                contenders = case.build(self.device)
                for make in contenders.providers.values():
                    try:
                        make()()
                    except Exception:
                        continue
            except Exception:
                continue
            finally:
                contenders = None  # type: ignore[assignment]
                self._release()

    def roofs(self, cases: Sequence[Case]) -> None:
        """Measures what no contender can beat; the best rate of a unit is its roof."""
        for case in cases:
            for row in self.run(case):
                if row.get("rate"):
                    self.roof[case.unit] = max(self.roof.get(case.unit, 0.0), row["rate"])

    def run(self, case: Case) -> list[dict[str, Any]]:
        """The rows of one case, written and kept; whatever fails leaves its row with the reason."""
        try:
            rows = self._measure(case)
        except Exception as error:
            rows = [{"provider": "", "error": said(error)}]
        self._release()
        for row in rows:
            row.update({"section": case.section, **case.columns, "unit": case.unit})
            self.rows.append(row)
            self._writer.writerow({**self.facts, **{key: shown(value) for key, value in row.items()}})
            print(line(case, row), flush=True)
        self._file.flush()
        return rows

    def _measure(self, case: Case) -> list[dict[str, Any]]:
        contenders = case.build(self.device)
        rows: dict[str, dict[str, Any]] = {name: {"provider": name} for name in contenders.providers}
        calls: dict[str, Call] = {}
        for name, make in contenders.providers.items():
            try:
                call = make()
                result = call()
                if contenders.pairs is not None:
                    rows[name]["max_error"], rows[name]["rms_error"] = deviations(contenders.pairs(result))
                calls[name] = call
            except Exception as error:
                rows[name]["error"] = said(error)
            result = None
        if self.clock is None:
            return list(rows.values())
        try:
            timings = self.clock.measure(calls)
        except Exception as error:
            for name in calls:
                rows[name]["error"] = said(error)
            return list(rows.values())
        for name, timing in timings.items():
            median, p20, p80 = timing.quantiles()
            rows[name].update(timing=timing.how, samples=len(timing.samples), median_ms=median, p20_ms=p20, p80_ms=p80)
            rows[name]["rate"] = case.work / (median * 1e-3) / SCALE[case.unit]
            if case.yardstick in timings:
                rows[name]["ratio"] = timings[case.yardstick].quantiles()[0] / median
            if case.unit in self.roof:
                rows[name]["roof_share"] = rows[name]["rate"] / self.roof[case.unit]
        return list(rows.values())

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
        text += f" {row['median_ms']:9.4f} ms {row['rate']:7.0f} {case.unit}"
        text += f" ratio {row['ratio']:5.2f}" if "ratio" in row else ""
        text += f" roof {row['roof_share']:4.2f}" if "roof_share" in row else ""
    if "max_error" in row:
        text += f" error max {row['max_error']:.1e} rms {row['rms_error']:.1e}"
    return text + (f" {row['error'][:120]}" if "error" in row else "")


def tables(rows: Sequence[Mapping[str, Any]], cases: Sequence[Case], product: str = "flashsoft") -> str:
    """Markdown, a table a section: each provider's median and rate, the product's ratio and roof share."""
    parts = []
    for section in dict.fromkeys(case.section for case in cases):
        own = [case for case in cases if case.section == section]
        mine = [row for row in rows if row["section"] == section]
        of = {
            (label(case.columns), row["provider"]): row
            for case in own
            for row in mine
            if all(row.get(key) == value for key, value in case.columns.items())
        }
        names = list(dict.fromkeys(name for _, name in of))
        keys = list(own[0].columns)
        heads = [
            *keys,
            *(f"{name} ms ({own[0].unit})" for name in names),
            f"ratio to {own[0].yardstick}",
            "roof",
        ]
        lines = [f"**{section}**", "", "| " + " | ".join(heads) + " |", "|" + " --: |" * len(heads)]
        ratios = []
        for case in own:
            found = {name: of.get((label(case.columns), name)) for name in names}
            if not any(found.values()):
                continue
            cells = [str(value) for value in case.columns.values()]
            for row in found.values():
                timed = row is not None and "median_ms" in row
                cells.append(f"{row['median_ms']:.4f} ({row['rate']:.0f})" if row and timed else "-")
            ours = found.get(product) or {}
            ratios += [ours["ratio"]] if ours.get("ratio") else []
            cells += [f"{ours[key]:.2f}" if ours.get(key) else "-" for key in ("ratio", "roof_share")]
            lines.append("| " + " | ".join(cells) + " |")
        if ratios:
            lines += ["", f"Geometric mean of the ratio: {statistics.geometric_mean(ratios):.3f}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def arguments(description: str, columns: Sequence[str], argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the CSV file")
    known = ", ".join(("section", *columns))
    form = "COLUMN=VALUE[,VALUE]"
    parser.add_argument("--only", action="append", default=[], metavar=form, help=f"only such cases; {known}")
    parser.add_argument("--quick", action="store_true", help="a few cases")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds, then no case starts")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU, no timing")
    args = parser.parse_args(argv)
    wanted: dict[str, set[str]] = {}
    for text in args.only:
        key, found, values = text.partition("=")
        if not found or key not in ("section", *columns):
            parser.error(f"--only must be {form} with COLUMN one of {known}, got {text!r}")
        wanted[key] = set(values.split(","))
    args.only = wanted
    if not args.dry and not torch.cuda.is_available():
        parser.error("no CUDA GPU here; --dry runs tiny shapes on the CPU")
    return args


def chosen(cases: Sequence[Case], only: Mapping[str, set[str]]) -> list[Case]:
    """The cases that every `--only` allows."""

    def allowed(case: Case) -> bool:
        named = {"section": case.section, **case.columns}
        return all(str(named.get(key)) in values for key, values in only.items())

    return [case for case in cases if allowed(case)]


def main(
    name: str, columns: Sequence[str], cases: Sequence[Case], roofs: Sequence[Case], args: argparse.Namespace
) -> int:
    """Measures, writes `name`.csv (dry: `name`-dry.csv), prints the tables; 1 if the product failed."""
    began = time.monotonic()
    cases = chosen(cases, args.only)
    if not cases:
        print("no case is left by --only", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    device = torch.device("cpu" if args.dry else "cuda")
    path = args.out / f"{name}{'-dry' if args.dry else ''}.csv"
    # one stream of our own: CUDA graphs cannot be captured on the default one
    with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext():
        sweep = Sweep(path, columns, device, began + args.budget)
        try:
            if not args.dry:
                sweep.compile(cases, began + args.budget / 2)
                print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
                sweep.roofs(roofs)
            for i, case in enumerate(cases):
                if time.monotonic() > sweep.deadline:
                    print(f"out of budget: {len(cases) - i} of {len(cases)} cases left out")
                    break
                sweep.run(case)
        finally:
            sweep.close()
    print(f"\n{label(sweep.facts)}\n\n{tables(sweep.rows, cases)}\n\n{path}: {time.monotonic() - began:.0f} s")
    ours = [row for row in sweep.rows if row["section"] != "roof" and row["provider"] in ("", "flashsoft")]
    return int(any(row.get("error") for row in ours))
