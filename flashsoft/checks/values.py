"""Of single arguments: tensors, numbers, dimensions, names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import env

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_INT = 1 << 1023  # the largest power of two that is a float too


def tensor(name: str, value: Any, ndim: int | None = None, layout: str = "") -> None:
    """`value` is a floating tensor, of `ndim` dimensions laid out as `layout` if that is given."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {value.dtype}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {value.layout}")
    if ndim is not None and value.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions {layout}, got shape {tuple(value.shape)}")


def dimension(x: Tensor, dim: Any, name: str = "x") -> int:
    """`dim` counted from the front."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    ndim = x.ndim
    if ndim == 0:
        raise ValueError(f"{name} must have at least one dimension, got a scalar tensor")
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim must be in [{-ndim}, {ndim - 1}] for {name} of shape {tuple(x.shape)}, got {dim}")
    return dim % ndim


def output_dtype(dtype: Any, name: str = "dtype") -> None:
    """`dtype` is None or one that results can have."""
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {dtype}")


def on_device(name: str, value: Tensor, other: str, device: torch.device) -> None:
    """`value` lies on `device`, that of argument `other`."""
    if value.device != device:
        raise ValueError(f"{name} must be on {device}, the device of {other}, got {value.device}")


def broadcastable(name: str, value: Tensor, shape: Sequence[int], what: str) -> None:
    """`value` can be expanded to `shape`."""
    sizes = list(value.shape)
    fits = len(sizes) <= len(shape) and all(
        size == 1 or size == full for size, full in zip(reversed(sizes), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must broadcast to {what} {tuple(shape)}, got shape {tuple(sizes)}")


def backend(value: Any) -> str:
    """The name of a backend for an operator, "" to have one chosen. Which names there are, `dispatch` says."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"backend must be a name or None, got {type(value).__name__}")
    return value or ""


def number(name: str, value: Any, *, positive: bool = False) -> float:
    """A finite number, above 0 if so asked."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    # not math.isfinite, which torch.compile(dynamic=True) cannot trace on a symbolic float
    too_large = isinstance(value, int) and abs(value) > MAX_INT
    if too_large or not -math.inf < value < math.inf or (positive and value <= 0):
        raise ValueError(f"{name} must be finite{' and > 0' if positive else ''}, got {value}")
    return float(value)


def size(name: str, value: Any, least: int = 1) -> int:
    """An integer that is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
    return value


def per_row(name: str, value: Tensor, x: Tensor, dim: int) -> Tensor:
    """A tensor of one entry a row of x as a view of x.ndim dimensions, of size 1 along `dim`.

    It may have x's dimensions with size 1 at `dim`, or lack that dimension, or be one entry for all.
    """
    on_device(name, value, "x", x.device)
    rows = [size for axis, size in enumerate(x.shape) if axis != dim]
    keepdim = [*rows[:dim], 1, *rows[dim:]]
    if value.ndim == x.ndim:
        broadcastable(name, value, keepdim, "the rows of x,")
        return value
    if value.ndim != len(rows) and value.numel() == 1:
        return value.reshape((1,) * x.ndim)
    if value.ndim != len(rows):
        raise ValueError(
            f"{name} must have x's {x.ndim} dimensions, or {len(rows)} without dim, got shape {tuple(value.shape)}"
        )
    broadcastable(name, value, rows, "the rows of x,")
    return value.unsqueeze(dim)


def generator(value: Any, device: torch.device) -> None:
    """None, or a generator of the device that numbers are drawn on."""
    if value is None:
        return
    if not isinstance(value, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(value).__name__}")
    if value.device.type != device.type:
        raise ValueError(f"generator must be one of {device}, the device of logits, got {value.device}")


def contents_can_be_read(value: Tensor) -> bool:
    """FLASHSOFT_CHECK is set, and there are contents: not while tracing, under torch.func or on the meta device."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return env.CHECK and not traced and value.device.type != "meta"
