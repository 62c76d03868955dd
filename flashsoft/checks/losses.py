"""Of the losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .values import contents_can_be_read, number, on_device, tensor

REDUCTIONS = ("none", "mean", "sum")


def linear_loss(hidden: Any, weight: Any, bias: Any) -> None:
    """hidden (..., H), weight (N, H) and bias (N,) fit together, as in a linear layer."""
    tensor("hidden", hidden)
    tensor("weight", weight, 2, "(N, H)")
    if hidden.ndim == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden must be (..., {weight.shape[1]}), as wide as weight, got shape {tuple(hidden.shape)}")
    given = [("weight", weight)]
    if bias is not None:
        tensor("bias", bias, 1, "(N,)")
        if bias.shape[0] != weight.shape[0]:
            raise ValueError(f"bias must have weight's {weight.shape[0]} classes, got shape {tuple(bias.shape)}")
        given.append(("bias", bias))
    for name, value in given:
        on_device(name, value, "hidden", hidden.device)
        if value.dtype != hidden.dtype:
            raise TypeError(f"{name} must have hidden's dtype {hidden.dtype}, got {value.dtype}")


def loss_options(
    ignore_index: Any, label_smoothing: Any, z_loss: Any, softcap: Any, reduction: Any
) -> tuple[int, float, float, float | None]:
    """The options of a cross entropy: an int, a number in [0, 1], one >= 0, one > 0 or None, and a name."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {type(ignore_index).__name__}")
    smoothing, z = number("label_smoothing", label_smoothing), number("z_loss", z_loss)
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if z < 0.0:
        raise ValueError(f"z_loss must be >= 0, got {z_loss}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    return ignore_index, smoothing, z, None if softcap is None else number("softcap", softcap, positive=True)


def target(value: Any, rows: Sequence[int], what: str, other: str, device: torch.device) -> None:
    """Labels for rows of this shape, which are `what`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"target must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must be class indices, int64 or int32, got {value.dtype}")
    if tuple(value.shape) != tuple(rows):
        raise ValueError(f"target must have {what}, {tuple(rows)}, got {tuple(value.shape)}")
    on_device("target", value, other, device)


def labels(target: Tensor, classes: int, ignore_index: int) -> None:
    """Every label is a class or ignore_index, where contents are checked."""
    if not contents_can_be_read(target):
        return
    bad = (target != ignore_index) & ((target < 0) | (target >= classes))
    if bool(bad.any()):
        raise ValueError(
            f"target must be in [0, {classes - 1}] or ignore_index {ignore_index}, got {int(target[bad][0])}"
        )


def class_weight(name: str, value: Any, classes: int, other: str, device: torch.device) -> None:
    """None, or a weight a class, which takes no gradient."""
    if value is None:
        return
    tensor(name, value)
    if tuple(value.shape) != (classes,):
        raise ValueError(f"{name} must have a weight for each of {classes} classes, got shape {tuple(value.shape)}")
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} must not require a gradient, which it is not given")
    on_device(name, value, other, device)


def group(value: Any) -> tuple[int, int]:
    """This process's rank in a group of torch.distributed, and how many there are."""
    distributed = torch.distributed
    if not distributed.is_available() or not isinstance(value, distributed.ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed.ProcessGroup this process is in, got {type(value).__name__}"
        )
    return distributed.get_rank(value), distributed.get_world_size(value)


def overwritable(logits: Tensor, reduction: str, group: Any) -> None:
    """The gradient may be written over the logits."""
    if reduction == "none":
        raise ValueError("reduction must be mean or sum with inplace_backward, got 'none'")
    if group is not None:
        raise ValueError("inplace_backward must be False with a group, whose ranks share rows, got True")
    base = logits if logits._base is None else logits._base
    if any(t.is_leaf and t.requires_grad for t in (logits, base)):
        raise ValueError("logits must not be a leaf that requires grad, or a view of one, with inplace_backward")
    if any(size > 1 and stride == 0 for size, stride in zip(logits.shape, logits.stride(), strict=True)):
        raise ValueError("logits must not be expanded with inplace_backward: entries share memory")
