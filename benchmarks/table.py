"""A markdown table of a CSV of results: the share of the roof of every contender, the best in bold, losses named.

python benchmarks/table.py benchmarks/results/softmax.csv
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from flashsoft.cli import UsageError

Row = dict[str, str]
PRODUCT = "flashsoft"
LEVEL = 0.98  # of the best peer's speed: less is a loss


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A file, and what its cells hold."""
    parser.add_argument("csv", type=Path, help="a file that a benchmark wrote")
    parser.add_argument("--show", choices=("roof_share", "rate", "ratio", "median_ms"), help="what stands in a cell")


def run(args: argparse.Namespace) -> int:
    """Prints it."""
    print(markdown(args.csv, args.show))
    return 0


def read(path: Path) -> tuple[list[Row], list[str]]:
    """The rows, and the columns that name a case."""
    if not path.is_file():
        raise UsageError(f"csv must be a file that a benchmark wrote, got {path}")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows, heads = list(reader), list(reader.fieldnames or ())
    if not {"section", "provider"} <= set(heads):
        raise UsageError(f"csv must be a file that a benchmark wrote, got columns {', '.join(heads)} in {path}")
    return rows, heads[heads.index("section") + 1 : heads.index("provider")]


def own(provider: str) -> bool:
    """Whether it is flashsoft, or flashsoft on a backend of a given name, and not a peer."""
    return provider == PRODUCT or provider.startswith(f"{PRODUCT}_")


def markdown(path: Path, show: str | None = None) -> str:
    """Every section's table; cells hold the share of the roof, or the rate where there is no roof."""
    rows, columns = read(path)
    sections = dict.fromkeys(row["section"] for row in rows if row["section"] != "roof")
    return "\n\n".join(_section([r for r in rows if r["section"] == name], columns, show) for name in sections)


def _section(rows: Sequence[Row], columns: Sequence[str], show: str | None) -> str:
    columns = [column for column in columns if any(row[column] for row in rows)]
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    show = show or ("roof_share" if any(row["roof_share"] for row in rows) else "rate")
    cells: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(tuple(row[column] for column in columns), {})[row["provider"]] = row
    heads = [*columns, *providers, "to best peer"]
    unit = rows[0]["unit"] if show == "rate" else {"roof_share": "share of the roof"}.get(show, show)
    lines = [f"**{rows[0]['section']}**, {unit}", "", "| " + " | ".join(heads) + " |", "|" + " --: |" * len(heads)]
    lead: dict[tuple[str, ...], float] = {}
    for case, found in cells.items():
        times = {name: float(row["median_ms"]) for name, row in found.items() if row["median_ms"]}
        peers = [time for name, time in times.items() if not own(name)]
        if PRODUCT in times and peers:
            lead[case] = min(peers) / times[PRODUCT]
        texts = [_text(found[name][show], show) if name in times else "-" for name in providers]
        best = [name in times and times[name] == min(times.values()) for name in providers]
        texts = [f"**{text}**" if first else text for text, first in zip(texts, best, strict=True)]
        lines.append("| " + " | ".join([*case, *texts, f"{lead[case]:.2f}" if case in lead else "-"]) + " |")
    if lead:
        behind = sorted((value, case) for case, value in lead.items() if value < LEVEL)
        named = "; ".join(f"{' '.join(filter(None, case))} {value:.2f}" for value, case in behind)
        lines += ["", f"Speed to the best peer's: geometric mean {statistics.geometric_mean(lead.values()):.3f}; "
                  f"below {LEVEL} in {len(behind)} of {len(lead)} cells{': ' if behind else '.'}{named}"]  # fmt: skip
    return "\n".join(lines)


def _text(value: str, show: str) -> str:
    if not value:
        return "-"
    number = float(value)
    return f"{number:.2f}" if show in ("roof_share", "ratio") and number >= 0.1 else f"{number:.3g}"


if __name__ == "__main__":
    import harness

    sys.exit(harness.main(sys.modules[__name__]))
