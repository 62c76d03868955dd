"""A PNG of a CSV of softmax results: GB/s over the row's length, a line a contender, the roof drawn.

python benchmarks/plot.py benchmarks/results/softmax.csv      # writes softmax.png beside it; needs matplotlib
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import table

from flashsoft.cli import UsageError

# Colours that stay apart for colour-blind eyes, and in grey by their markers.
STYLES = {
    "torch": ("PyTorch", "#D55E00", "s"),
    "compile": ("torch.compile", "#E69F00", "D"),
    "liger": ("Liger", "#009E73", "^"),
    "quack": ("quack", "#0072B2", "v"),
    "naive": ("naive, an operator a step", "#999999", "x"),
    "cuda": ("CUDA C++ twin, three passes", "#CC79A7", "+"),
    table.PRODUCT: ("flashsoft", "#000000", "o"),
}
PANELS = [(dtype, direction) for dtype in ("bf16", "fp32") for direction in ("forward", "backward")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A file."""
    parser.add_argument("csv", type=Path, help="softmax.csv, as the benchmark wrote it")


def run(args: argparse.Namespace) -> int:
    """Writes the PNG beside the CSV."""
    rows, _ = table.read(args.csv)
    mine = [row for row in rows if row["section"] == "softmax" and row["rate"]]
    roof = max((float(row["rate"]) for row in rows if row["section"] == "roof" and row["rate"]), default=0.0)
    if not mine or not roof:
        raise UsageError(f"csv must hold timed rows of the sections softmax and roof, got {args.csv} without")
    try:
        import matplotlib
    except ModuleNotFoundError as missing:
        raise UsageError("the plot needs matplotlib: pip install 'flashsoft[bench]'") from missing
    matplotlib.use("Agg")
    path = args.csv.with_suffix(".png")
    draw(mine, roof, path)
    print(path)
    return 0


def draw(rows: list[table.Row], roof: float, path: Path) -> None:
    """A panel a dtype and direction."""
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 2, figsize=(10, 7.2), sharex=True, sharey=True)
    for panel, (dtype, direction) in zip(grid.flat, PANELS, strict=True):
        panel.axhline(roof, color="#444444", linestyle="--", linewidth=1, label=f"roof: a copy, {roof:,.0f} GB/s")
        for provider in STYLES:
            chosen = {"dtype": dtype, "direction": direction, "provider": provider}
            _line(panel, [row for row in rows if all(row[key] == value for key, value in chosen.items())], provider)
        panel.set_title(f"{dtype} {direction}", fontsize=12)
        panel.set_xscale("log", base=2)
        panel.set_ylim(0, 1.06 * roof)
        panel.grid(alpha=0.25)
        panel.tick_params(axis="y", labelsize=10)
        panel.tick_params(axis="x", labelsize=9)
    widths = sorted({int(row["N"]) for row in rows})
    ticks = [N for i, N in enumerate(widths) if i == 0 or N > 1.5 * widths[i - 1]]
    grid[0, 0].set_xticks(ticks, [_short(N) for N in ticks])
    grid[0, 0].minorticks_off()
    for panel in grid[1]:
        panel.set_xlabel("columns of a row (M * N = 2^28)", fontsize=11)
    for panel in grid[:, 0]:
        panel.set_ylabel("GB/s", fontsize=11)
    found: dict[str, Any] = {}
    for panel in grid.flat:
        handles, labels = panel.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    names = sorted(found, key=lambda name: name != "flashsoft")
    figure.legend([found[name] for name in names], names, loc="lower center", ncols=4, fontsize=10.5, frameon=False)
    fact = rows[0]
    title = ["Row softmax, bytes read and written a second"]
    title.append(f"{fact['device']}, torch {fact['torch']}, triton {fact['triton']}, {fact['date'].split()[0]}")
    title += [", ".join(fact["peers"].split()).replace("=", " ")] if fact.get("peers") else []
    figure.suptitle("\n".join(title), fontsize=12)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _line(panel: Any, rows: list[table.Row], provider: str) -> None:
    name, colour, marker = STYLES[provider]
    points = sorted((int(row["N"]), float(row["rate"])) for row in rows)
    if points:
        wide = provider == table.PRODUCT
        panel.plot(*zip(*points, strict=True), label=name, color=colour, marker=marker, markersize=6 if wide else 5,
                   linewidth=3 if wide else 1.4, zorder=5 if wide else 3)  # fmt: skip


def _short(N: int) -> str:
    return str(N) if N < 1024 else f"{N / 1024:.0f}k"


if __name__ == "__main__":
    import harness

    sys.exit(harness.main(sys.modules[__name__]))
