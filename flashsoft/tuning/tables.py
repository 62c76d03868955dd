"""Tables of measured configs: those shipped beside this file, and the user's own, which come first.

A table is a JSON file for one architecture (sm_90.json): what it was measured with, and entries, each of which says
for which row lengths (first to last) of which operation and element size its config holds. `flashsoft tune` writes
the user's, to the folder `FLASHSOFT_TUNING`. What cannot be used of a file is told in the log, once, and left out.

sm_90.json was measured at N = 128, 512, 1,024, 4,096 and several longer rows; its entries up to 256 and 2,048 follow
their neighbours. The entries of three tiles (at 768, 2,560, 3,072, 5,120, 6,144, 9,216 to 12,288) and those from
163,841 (at 200,000 and 262,144) were chosen with the kernels as they are, the others with earlier ones; what they all
give now is in benchmarks/results/softmax.csv.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import env

SHIPPED = Path(__file__).parent / "tables"
FIELDS = {"op": str, "itemsize": int, "first": int, "last": int, "config": dict}

Entry = dict[str, Any]


def name_of(target: Any) -> str:
    """The name of a Triton target's table: sm_90, gfx942."""
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


@functools.cache
def find(name: str, op: str, itemsize: int, n_cols: int, usable: Callable[[Entry], bool]) -> dict[str, Any] | None:
    """The config for rows of n_cols elements, the user's before the shipped one, or None."""
    for path in (env.TUNING / f"{name}.json", SHIPPED / f"{name}.json"):
        for entry in _entries(path):
            if (entry["op"], entry["itemsize"]) == (op, itemsize) and entry["first"] <= n_cols <= entry["last"]:
                if usable(entry):
                    config: dict[str, Any] = entry["config"]
                    return config
                env.logger.warning("%s: no kernel can be built with %s, which is not used", path, json.dumps(entry))
    return None


def forget() -> None:
    """Has every table read anew; for whoever changes one."""
    _entries.cache_clear()
    find.cache_clear()


def write(name: str, entries: list[Entry], facts: dict[str, str]) -> Path:
    """Puts entries into the user's table, in place of those for the same rows; the file.

    Readers see the file as it was or as it is then. Of two who write at the same time, one may lose its entries.
    """
    path = env.TUNING / f"{name}.json"
    forget()
    same = ("op", "itemsize", "first", "last")
    new = {tuple(entry[key] for key in same) for entry in entries}
    kept = [entry for entry in _entries(path) if tuple(entry[key] for key in same) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}.new")
    written.write_text(dump(facts, kept + entries))
    written.replace(path)
    forget()
    return path


def dump(facts: dict[str, str], entries: list[Entry]) -> str:
    """A table as text, an entry a line."""
    lines = ",\n    ".join(json.dumps(entry) for entry in entries)
    return f'{{\n  "measured": {json.dumps(facts)},\n  "entries": [\n    {lines}\n  ]\n}}\n'


@functools.cache
def _entries(path: Path) -> list[Entry]:
    try:
        found = json.loads(path.read_text())["entries"]
        entries = [entry for entry in found if _is_entry(entry)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        env.logger.warning("%s is not a table of flashsoft's and is not used: %r", path, wrong)
        return []
    if len(entries) < len(found):
        env.logger.warning("%s: %d of its entries are not flashsoft's and not used", path, len(found) - len(entries))
    return entries


def _is_entry(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in FIELDS.items())
