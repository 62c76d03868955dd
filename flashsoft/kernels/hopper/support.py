"""What the Hopper kernels do not compute, in one sentence each."""

from __future__ import annotations

import torch
from torch import Tensor

from ...terms import Terms
from ...tuning.hopper import CONFIGS

DTYPES = (torch.bfloat16, torch.float16)
COMPUTED = ("sink", "scale", "lo", "hi", "lower_right", "max_q", "max_k", "dropout_p")
FAR = 1 << 30  # positions lie below


def why_not(query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> str | None:
    """Why the forward kernel does not take a call; None if it does."""
    D, Dv = query.shape[3], value.shape[3]
    if query.dtype not in DTYPES:
        return f"it takes bfloat16 and float16, not {str(query.dtype).removeprefix('torch.')}"
    if (D, Dv) not in CONFIGS:
        return f"it has no build for heads of {D} (value {Dv})"
    given = [name for name, term in zip(Terms._fields, terms, strict=True) if term is not None]
    missing = [name for name in given if name not in COMPUTED]
    if missing:
        return f"it has no {', no '.join(missing)}"
    if not terms.scale > 0.0:
        return "it takes positive scales only"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        reason = _no_map(tensor)
        if reason is not None:
            return f"{name} {reason}"
    if keys_seen(query.shape[2], key.shape[2], terms.lo, terms.hi)[1] <= 0:
        return "no query sees a key"
    return None


def keys_seen(Sq: int, Sk: int, lo: int | None, hi: int | None) -> tuple[int, int]:
    """The first key that a query sees, and how many lie between it and the last: others are never loaded."""
    first = 0 if lo is None else max(0, lo)
    end = Sk if hi is None else min(Sk, Sq + hi)
    return first, end - first


def _no_map(tensor: Tensor) -> str | None:
    """What of a tensor (B, H, S, D) a tensor map cannot hold."""
    *strides, last = tensor.stride()
    *shape, width = tensor.shape
    if tensor.data_ptr() % 16 or (last != 1 and width > 1):
        return "must begin at a multiple of 16 bytes and have its columns side by side"
    if any(size > 1 and (stride * tensor.itemsize % 16 or stride <= 0) for size, stride in zip(shape, strides)):
        return "must have rows that lie multiples of 16 bytes apart, and no broadcast dimension"
    if max(shape) >= FAR or any(stride * tensor.itemsize >= 1 << 40 for stride in strides):
        return "is too large for a tensor map"
    return None
