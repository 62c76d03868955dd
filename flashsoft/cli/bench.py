"""`flashsoft bench`: the benchmarks of the folder `benchmarks`, and the table and the plot of what they wrote."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

NAMES = ("softmax", "logits", "cross-entropy", "attention", "attention-terms", "host", "table", "plot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A benchmark each, with its own options."""
    sys.path.insert(0, str(folder()))
    chosen = parser.add_subparsers(metavar="benchmark", required=True)
    for name in NAMES:
        module = importlib.import_module(name.replace("-", "_"))
        summary = (module.__doc__ or name).splitlines()[0]
        one = chosen.add_parser(name, help=summary, description=summary)
        module.add_arguments(one)
        one.set_defaults(run=module.run)


def run(args: argparse.Namespace) -> int:
    """The one that was named; 1 if flashsoft failed in it."""
    code: int = args.run(args)
    return code


def folder() -> Path:
    """`benchmarks` beside the package in its sources, inside it once installed."""
    package = Path(__file__).parents[1]
    inside = package / "benchmarks"
    return inside if inside.is_dir() else package.parent / "benchmarks"
