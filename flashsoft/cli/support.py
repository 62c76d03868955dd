"""What of attention each backend computes, as a table: from the facts that the choice of a backend reads."""

from __future__ import annotations

import torch

from .. import dispatch


def table() -> str:
    """Markdown, a row a feature, two columns a backend."""
    names = [backend.name for backend in dispatch.BACKENDS]
    lines = [
        " | ".join(["| attention with", "written", *(f"{name}, forward | {name}, backward" for name in names)]) + " |",
        "|---" * (2 + 2 * len(names)) + "|",
    ]
    for name, feature in dispatch.FEATURES.items():
        cells = []
        for backend in dispatch.BACKENDS:
            cells.append("yes" if name in backend.supports.forward else "no")
            also = f"yes, to {feature.gradients} too" if feature.gradients else "yes"
            cells.append(also if name in backend.supports.backward else "no")
        lines.append(" | ".join([f"| {name}", feature.written, *cells]) + " |")
    supports = [backend.supports for backend in dispatch.BACKENDS]
    sizes = (f"D to {each.head_dim}, Dv to {each.value_dim}" for each in supports)
    lines.append(_both_ways("head sizes", "", *sizes))
    lines.append(_both_ways("dtypes", "", *(", ".join(map(_short, each.dtypes)) for each in supports)))
    return "\n".join(lines)


def _both_ways(name: str, written: str, *cells: str) -> str:
    return " | ".join([f"| {name}", written, *(f"{cell} | same" for cell in cells)]) + " |"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
