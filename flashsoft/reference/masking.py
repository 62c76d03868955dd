"""The band of a mask as a boolean tile."""

from __future__ import annotations

import torch
from torch import Tensor


def band(Sq: int, Sk: int, lo: int | None, hi: int | None, device: torch.device, i0: int = 0, j0: int = 0) -> Tensor:
    """The boolean (Sq, Sk) tile at (i0, j0) of the mask lo <= j - i <= hi."""
    distance = torch.arange(j0, j0 + Sk, device=device) - torch.arange(i0, i0 + Sq, device=device).unsqueeze(-1)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if lo is not None:
        visible &= distance >= lo
    if hi is not None:
        visible &= distance <= hi
    return visible
