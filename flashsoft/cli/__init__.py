"""The command `flashsoft`: a verb a file, each imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

VERBS = {
    "doctor": "what is installed here, which backend runs what, and a tiny checked run of each",
    "verify": "check softmax and attention on this machine against float64 and against torch",
    "bench": "measure softmax, attention and the host's share against torch and other libraries",
    "tune": "measure tiles for shapes of yours on this GPU and keep the best, from then on",
    "demo": "train a small GPT on Python's own sources and check its attention against torch",
}


class UsageError(ValueError):
    """The command was called in a way that cannot work; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; 0 = good, 1 = a check failed, 2 = wrong usage.

    A verb's module has `add_arguments(parser)` and `run(args) -> int`, where `UsageError` means wrong usage.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="flashsoft", description="Fused attention and softmax for PyTorch.")
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)
    for verb, summary in VERBS.items():
        verb_parser = verbs.add_parser(verb, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if argv[:1] == [verb]:
            module = importlib.import_module(f".{verb}", __name__)
            module.add_arguments(verb_parser)
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has said what is wrong, or shown the help
        return stop.code if isinstance(stop.code, int) else 2
    try:
        code: int = module.run(args)
    except UsageError as wrong:
        print(f"flashsoft {args.verb}: {wrong}", file=sys.stderr)
        return 2
    return code
