"""A PNG of a CSV of results: rates over lengths and the roof (softmax, attention forward), or the times of each case.

python benchmarks/plot.py benchmarks/results/softmax.csv      # writes softmax.png beside it; needs matplotlib
"""

from __future__ import annotations

import argparse
import itertools
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
    "eager": ("eager, an operator a step", "#999999", "x"),
    "sdpa_flash": ("SDPA FLASH", "#D55E00", "s"),
    "sdpa_cudnn": ("SDPA cuDNN", "#0072B2", "v"),
    "flex": ("FlexAttention", "#009E73", "^"),
    "fa3": ("FlashAttention-3", "#E69F00", "D"),
    "fa4": ("FlashAttention-4", "#CC79A7", "P"),
    "flashsoft_triton": ("flashsoft, portable kernels", "#777777", "o"),
    table.PRODUCT: ("flashsoft", "#000000", "o"),
}
PANELS = [(dtype, direction) for dtype in ("bf16", "fp32") for direction in ("forward", "backward")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A file."""
    parser.add_argument("csv", type=Path, help="a file that a benchmark wrote")


def run(args: argparse.Namespace) -> int:
    """Writes the PNG beside the CSV."""
    rows, columns = table.read(args.csv)
    timed = [row for row in rows if row["section"] != "roof" and row["rate"]]
    mine = [row for row in timed if row["section"] == "softmax"]
    forward = [row for row in timed if row["section"] == "attention" and row["direction"] == "forward"]
    roof = max((float(row["rate"]) for row in rows if row["section"] == "roof" and row["rate"]), default=0.0)
    if not timed or (mine and not roof):
        raise UsageError(f"csv must hold timed rows, and for softmax those of the roof, got {args.csv} without")
    try:
        import matplotlib
    except ModuleNotFoundError as missing:
        raise UsageError("the plot needs matplotlib: pip install 'flashsoft[bench]'") from missing
    matplotlib.use("Agg")
    path = args.csv.with_suffix(".png")
    if mine:
        draw(mine, roof, path)
    elif forward:
        draw_attention(forward, roof, path)
    else:
        draw_times(timed, columns, path)
    print(path)
    return 0


def draw(rows: list[table.Row], roof: float, path: Path) -> None:
    """A panel a dtype and direction."""
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 2, figsize=(10, 7.2), sharex=True, sharey=True)
    for panel, (dtype, direction) in zip(grid.flat, PANELS, strict=True):
        panel.axhline(roof, color="#444444", linestyle="--", linewidth=1, label=f"roof: a copy, {roof:,.0f} GB/s")
        _lines(panel, rows, {"dtype": dtype, "direction": direction}, "N")
        _lengths(panel, f"{dtype} {direction}", 1.06 * roof)
    widths = sorted({int(row["N"]) for row in rows})
    ticks = [N for i, N in enumerate(widths) if i == 0 or N > 1.5 * widths[i - 1]]
    grid[0, 0].set_xticks(ticks, [_short(N) for N in ticks])
    grid[0, 0].minorticks_off()
    for panel in grid[1]:
        panel.set_xlabel("columns of a row (M * N = 2^28)", fontsize=11)
    for panel in grid[:, 0]:
        panel.set_ylabel("GB/s", fontsize=11)
    _legend(figure, grid)
    figure.suptitle(_title("Row softmax, bytes read and written a second", rows[0]), fontsize=12)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_attention(rows: list[table.Row], roof: float, path: Path) -> None:
    """A column a head size, above all keys and below causal."""
    from matplotlib import pyplot

    heads = sorted({row["D"] for row in rows}, key=int)
    masks = sorted({row["causal"] for row in rows})
    figure, grid = pyplot.subplots(
        len(masks), len(heads), figsize=(1 + 4.2 * len(heads), 1.6 + 3 * len(masks)),
        sharex=True, sharey=True, squeeze=False,
    )  # fmt: skip
    top = 1.06 * max([roof, *(float(row["rate"]) for row in rows)])
    for (causal, D), panel in zip(itertools.product(masks, heads), grid.flat, strict=True):
        if roof:
            label = f"roof: a matrix product, {roof:,.0f} TFLOP/s"
            panel.axhline(roof, color="#444444", linestyle="--", linewidth=1, label=label)
        _lines(panel, rows, {"D": D, "causal": causal}, "S")
        _lengths(panel, f"D = {D}, {'causal' if causal == 'True' else 'full'}", top)
    lengths = sorted({int(row["S"]) for row in rows})
    grid[0, 0].set_xticks(lengths, [_short(S) for S in lengths])
    grid[0, 0].minorticks_off()
    for panel in grid[-1]:
        panel.set_xlabel("tokens of a sequence (16k in all)", fontsize=11)
    for panel in grid[:, 0]:
        panel.set_ylabel("TFLOP/s", fontsize=11)
    _legend(figure, grid)
    figure.suptitle(_title("Attention forward, bf16", rows[0]), fontsize=12)
    height = figure.get_figheight()
    figure.tight_layout(rect=(0, 0.7 / height, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_times(rows: list[table.Row], columns: list[str], path: Path) -> None:
    """A panel a section, a line a case, a mark a contender at its time."""
    from matplotlib import pyplot

    sections = list(dict.fromkeys(row["section"] for row in rows))
    cases = {
        name: list(dict.fromkeys(_case(row, columns) for row in rows if row["section"] == name)) for name in sections
    }
    heights = [len(cases[name]) + 2 for name in sections]
    figure, grid = pyplot.subplots(
        len(sections), 1, figsize=(10, 1.6 + 0.24 * sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for panel, name in zip(grid.flat, sections, strict=True):
        for provider in STYLES:
            points = [
                (float(row["median_ms"]) * 1e3, cases[name].index(_case(row, columns)))
                for row in rows
                if row["section"] == name and row["provider"] == provider
            ]
            if points:
                label, colour, marker = STYLES[provider]
                panel.plot(*zip(*points, strict=True), marker, color=colour, label=label, markersize=6)
        panel.set_title(name, fontsize=12)
        panel.set_xscale("log")
        panel.set_yticks(range(len(cases[name])), cases[name], fontsize=8)
        panel.set_ylim(len(cases[name]) - 0.4, -0.6)
        panel.grid(alpha=0.25)
    grid[-1, 0].set_xlabel("microseconds", fontsize=11)
    _legend(figure, grid)
    figure.suptitle(_title("Median times, left is faster", rows[0]), fontsize=12)
    height = figure.get_figheight()
    figure.tight_layout(rect=(0, 0.6 / height, 1, 1 - 0.3 / height))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _case(row: table.Row, columns: list[str]) -> str:
    """A case in few words: its shape, and the options it has."""
    shape = " x ".join(row[name] for name in ("M", "N", "H") if row.get(name))
    others = [name for name in columns if name not in ("M", "N", "H") and row[name] not in ("", "no")]
    said = [row[name] if name in ("dtype", "direction") else f"{name} {row[name]}" for name in others]
    return ", ".join([shape, *said]) if shape else ", ".join(said)


def _title(what: str, fact: table.Row) -> str:
    """What, where, when and with what."""
    title = [what]
    title.append(f"{fact['device']}, torch {fact['torch']}, triton {fact['triton']}, {fact['date'].split()[0]}")
    title += [", ".join(fact["peers"].split()).replace("=", " ")] if fact.get("peers") else []
    return "\n".join(title)


def _lengths(panel: Any, title: str, top: float) -> None:
    """Axes of a rate over lengths."""
    panel.set_title(title, fontsize=12)
    panel.set_xscale("log", base=2)
    panel.set_ylim(0, top)
    panel.grid(alpha=0.25)
    panel.tick_params(axis="y", labelsize=10)
    panel.tick_params(axis="x", labelsize=9)


def _lines(panel: Any, rows: list[table.Row], chosen: dict[str, str], length: str) -> None:
    """Of every contender, its rate over a column of lengths."""
    for provider, (name, colour, marker) in STYLES.items():
        wanted = chosen | {"provider": provider}
        points = sorted(
            (int(row[length]), float(row["rate"]))
            for row in rows
            if all(row[key] == value for key, value in wanted.items())
        )
        if points:
            wide = provider == table.PRODUCT
            panel.plot(*zip(*points, strict=True), label=name, color=colour, marker=marker, markersize=6 if wide else 5,
                       linewidth=3 if wide else 1.4, zorder=5 if wide else 3)  # fmt: skip


def _legend(figure: Any, grid: Any) -> None:
    """One for all panels, below them, the product first."""
    found: dict[str, Any] = {}
    for panel in grid.flat:
        handles, labels = panel.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    names = sorted(found, key=lambda name: name != STYLES[table.PRODUCT][0])
    figure.legend([found[name] for name in names], names, loc="lower center", ncols=4, fontsize=10.5, frameon=False)


def _short(N: int) -> str:
    return str(N) if N < 1024 else f"{N / 1024:.0f}k"


if __name__ == "__main__":
    import harness

    sys.exit(harness.main(sys.modules[__name__]))
