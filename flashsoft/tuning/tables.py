"""Tables of measured configs: those shipped beside this file, and the user's own, which come first.

A table is a JSON file for one architecture (sm_90.json): what it was measured with, and entries, each of which says
for which row lengths (first to last) of which operation and element size its config holds. `flashsoft tune` writes
the user's, to the folder `FLASHSOFT_TUNING`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from .. import env

SHIPPED = Path(__file__).parent / "tables"
KEYS = ("op", "itemsize", "first", "last", "config")

Entry = dict[str, Any]


def name_of(target: Any) -> str:
    """The name of a Triton target's table: sm_90, gfx942."""
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


@functools.cache
def find(name: str, op: str, itemsize: int, n_cols: int) -> dict[str, int] | None:
    """The config for rows of n_cols elements, the user's before the shipped one, or None."""
    for entry in (*_entries(env.TUNING / f"{name}.json"), *_entries(SHIPPED / f"{name}.json")):
        if (entry["op"], entry["itemsize"]) == (op, itemsize) and entry["first"] <= n_cols <= entry["last"]:
            config: dict[str, int] = entry["config"]
            return config
    return None


def write(name: str, entries: list[Entry], facts: dict[str, str]) -> Path:
    """Puts entries into the user's table, in place of those for the same rows; the file."""
    path = env.TUNING / f"{name}.json"
    same = ("op", "itemsize", "first", "last")
    new = {tuple(entry[key] for key in same) for entry in entries}
    kept = [entry for entry in _entries(path) if tuple(entry[key] for key in same) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    written.write_text(dump(facts, kept + entries))
    written.replace(path)
    find.cache_clear()
    return path


def dump(facts: dict[str, str], entries: list[Entry]) -> str:
    """A table as text, an entry a line."""
    lines = ",\n    ".join(json.dumps(entry) for entry in entries)
    return f'{{\n  "measured": {json.dumps(facts)},\n  "entries": [\n    {lines}\n  ]\n}}\n'


def _entries(path: Path) -> list[Entry]:
    if not path.is_file():
        return []
    try:
        entries: list[Entry] = json.loads(path.read_text())["entries"]
        usable = all(set(KEYS) <= entry.keys() for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError):
        usable = False
    if not usable:
        env.logger.warning("%s is not a table of flashsoft's and is not used", path)
        return []
    return entries
