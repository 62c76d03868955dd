"""What of single calls the Hopper kernels cannot take, in one sentence each; kinds of calls are with dispatch."""

from __future__ import annotations

from torch import Tensor

from ...terms import Terms

LINE = 8  # elements of 16 bytes, which rows of a tensor map lie multiples of apart
FAR = 1 << 30  # positions lie below


def why_not(query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> str | None:
    """What of a call the forward kernel cannot take, of those whose kind dispatch sends here; None if nothing."""
    if value.shape[3] % LINE:
        return f"heads of value must be a multiple of {LINE} wide"
    if not terms.scale > 0.0:
        return "it takes positive scales only"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        reason = _no_map(tensor)
        if reason is not None:
            return f"{name} {reason}"
    if not (query.numel() and key.numel() and value.numel()):
        return "there is nothing to compute"
    if terms.cu_q is None and keys_seen(query.shape[2], key.shape[2], terms.lo, terms.hi)[1] <= 0:
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
    if any(
        size > 1 and (stride * tensor.itemsize % 16 or stride <= 0) for size, stride in zip(shape, strides, strict=True)
    ):
        return "must have rows that lie multiples of 16 bytes apart, and no broadcast dimension"
    if max(shape) >= FAR or any(stride * tensor.itemsize >= 1 << 40 for stride in strides):
        return "is too large for a tensor map"
    return None
