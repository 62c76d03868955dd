"""Cross entropy as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import api, checks


class FusedCrossEntropyLoss(nn.Module):
    """`flashsoft.fused_cross_entropy` with fixed options, as `torch.nn.CrossEntropyLoss`, classes along `dim`.

    Args: as of `fused_cross_entropy`, whose errors for options that are out of range are raised here. `weight` moves
    with the module; a module with a `group` cannot be copied or pickled.

    >>> loss = FusedCrossEntropyLoss(label_smoothing=0.1)
    >>> loss(torch.zeros(3, 8), torch.tensor([0, 7, -100]))
    tensor(2.0794)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        dim: int = -1,
        inplace_backward: bool = False,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        checks.loss_options(ignore_index, label_smoothing, z_loss, softcap, reduction)
        if weight is not None:
            checks.tensor("weight", weight)
        self.register_buffer("weight", weight, persistent=False)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.softcap, self.dim = z_loss, softcap, dim
        self.inplace_backward, self.group = inplace_backward, group

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return api.fused_cross_entropy(
            logits,
            target,
            weight=self._buffers["weight"],
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
            dim=self.dim,
            inplace_backward=self.inplace_backward,
            group=self.group,
        )

    def extra_repr(self) -> str:
        said = [] if self._buffers["weight"] is None else [f"weight={tuple(self.get_buffer('weight').shape)}-tensor"]
        for name in ("ignore_index", "reduction", "label_smoothing", "z_loss", "softcap", "dim", "inplace_backward"):
            said.append(f"{name}={getattr(self, name)!r}")
        return ", ".join(said)
