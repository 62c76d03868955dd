"""What autocast does to the arguments of a call that holds a matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

# a constant, since torch 2.11 cannot trace the question
AUTOCAST = tuple(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.autocast_mode.is_autocast_available(kind))


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, floating tensors in its dtype, as torch does for its own."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device_type = tensors[0].device.type if isinstance(tensors[0], Tensor) else ""
    if device_type not in AUTOCAST or not torch.is_autocast_enabled(device_type):
        return tensors
    if not all(isinstance(t, Tensor) for t in tensors):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)
