"""Of what is done to scores: masks, biases, temperatures and limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import masks
from .values import broadcastable, contents_can_be_read, number, on_device, per_row, tensor

NO_MASK = masks.MaskSpec()
MASKS = (masks.Causal, masks.Window, masks.Segments, masks.Padding)


def mask(value: Any, shape: Sequence[int], other: str, device: torch.device) -> masks.MaskSpec:
    """A mask for scores of `shape`, resolved. Integer and float masks are refused: what is added is a bias."""
    if value is None:
        return NO_MASK
    if not isinstance(value, masks.Mask | Tensor):
        raise TypeError(f"mask must be a boolean tensor or a mask such as Causal(), got {type(value).__name__}")
    Sq, Sk = shape[-2:] if len(shape) > 1 else (0, 0)  # without a second dimension there are only tensors
    for term in masks.terms(value):
        if isinstance(term, Tensor):
            if term.dtype != torch.bool:
                raise TypeError(f"mask must be boolean (True = takes part), got {term.dtype}")
            on_device("mask", term, other, device)
            broadcastable("mask", term, shape, "the scores")
        elif not isinstance(term, MASKS):
            names = ", ".join(kind.__name__ for kind in MASKS)
            raise TypeError(f"mask must be made of {names} and boolean tensors, got {type(term).__name__}")
        elif len(shape) < 2:
            raise ValueError(f"mask {term!r} needs scores (..., Sq, Sk), got shape {tuple(shape)}")
        elif isinstance(term, masks.Segments):
            for ids, length, what in zip(term.pair, (Sq, Sk), ("queries", "keys"), strict=True):
                _by_entry("Segments: ids", ids, shape, (length,), what, other, device)
        elif isinstance(term, masks.Padding):
            sizes = (Sk,) if term.keys.dtype == torch.bool else ()
            _by_entry("Padding: keys", term.keys, shape, sizes, "keys", other, device)
            if not sizes and contents_can_be_read(term.keys) and not bool(((term.keys >= 0) & (term.keys <= Sk)).all()):
                raise ValueError(f"Padding: keys must be 0 to {Sk} in every entry, got {term.keys.tolist()}")
    return masks.resolve(value, Sq, Sk, len(shape))


def _by_entry(
    name: str,
    value: Tensor,
    shape: Sequence[int],
    sizes: tuple[int, ...],
    what: str,
    other: str,
    device: torch.device,
) -> None:
    """`value` is (B, *sizes), or (1, *sizes) if it has sizes, for scores (B, ..., Sq, Sk), or (Sq, Sk) with B = 1."""
    on_device(name, value, other, device)
    B = shape[0] if len(shape) > 2 else 1
    if (value.shape[0] != B and not (sizes and value.shape[0] == 1)) or tuple(value.shape[1:]) != sizes:
        full = f"{(B, *sizes)} for {B} entries" + (f" of {sizes[0]} {what}" if sizes else "")
        raise ValueError(f"{name} must be {full}, got shape {tuple(value.shape)}")


def bias(value: Any, shape: Sequence[int], other: str, device: torch.device) -> None:
    """None or a floating tensor that broadcasts to the scores."""
    if value is None:
        return
    tensor("bias", value)
    on_device("bias", value, other, device)
    broadcastable("bias", value, shape, "the scores")


def temperature(value: Any, x: Tensor, dim: int, *, zero: bool = False) -> float | Tensor:
    """A number > 0 (or 0, if so said), or one a row."""
    if not isinstance(value, Tensor):
        if zero and not isinstance(value, bool) and value == 0:
            return 0.0
        return number("temperature", value, positive=True)
    tensor("temperature", value)
    if contents_can_be_read(value) and not bool((value > 0).all()):
        raise ValueError("temperature must be > 0 in every row, got an entry that is not")
    return per_row("temperature", value, x, dim)


def top_k(value: Any, x: Tensor, dim: int) -> int | Tensor | None:
    """None, an integer >= 1, or one a row; an integer of the row's length and more chooses nothing: None."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"top_k must be an int, or an int32 or int64 tensor, got {value.dtype}")
        if contents_can_be_read(value) and not bool((value >= 1).all()):
            raise ValueError("top_k must be >= 1 in every row, got an entry that is not")
        return per_row("top_k", value, x, dim)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"top_k must be an int, or an int32 or int64 tensor, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"top_k must be >= 1, got {value}")
    return None if value >= x.shape[dim] else value


def share(name: str, value: Any, x: Tensor, dim: int, *, zero: bool) -> float | Tensor | None:
    """None, a number from 0 (itself only if so said) to 1, or one a row; a number that keeps all is None."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        tensor(name, value)
        if contents_can_be_read(value) and not bool(((value >= 0) & (value <= 1)).all()):
            raise ValueError(f"{name} must be from 0 to 1 in every row, got an entry that is not")
        return per_row(name, value, x, dim)
    share = number(name, value)
    if not (0.0 < share <= 1.0 or (zero and share == 0.0)):
        raise ValueError(f"{name} must be {'>=' if zero else '>'} 0 and <= 1, got {value}")
    return None if share == (0.0 if zero else 1.0) else share
