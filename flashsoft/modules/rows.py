"""Softmax, its logarithm and the fused softmax of logits, as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import api, checks, masks


class Softmax(nn.Module):
    """`flashsoft.softmax` along `dim`, as `torch.nn.Softmax`.

    >>> Softmax()(torch.tensor([0.0, 0.0]))
    tensor([0.5000, 0.5000])
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return api.softmax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class LogSoftmax(nn.Module):
    """`flashsoft.log_softmax` along `dim`, as `torch.nn.LogSoftmax`.

    >>> LogSoftmax()(torch.tensor([0.0, 0.0]))
    tensor([-0.6931, -0.6931])
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return api.log_softmax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class FusedSoftmax(nn.Module):
    """`flashsoft.fused_softmax`: softmax(softcap(scale * x) / temperature + bias) over what is kept.

    Args:
        temperature: a number > 0; an `nn.Parameter` makes it learned, any other tensor moves with the module.
        top_k: keep the k largest of each row, an integer >= 1, a tensor of integers, or None for all.
        dim: the dimension that sums to one.
        top_p, min_p: shares as `fused_softmax` takes them, numbers or tensors.
        scale, softcap, out_dtype: as there.

    `forward(x, mask=None, bias=None)` takes both as `fused_softmax` does (True = takes part), and raises what
    it raises.

    >>> FusedSoftmax(top_k=2)(torch.tensor([1.0, 2.0, 2.0]))
    tensor([0.0000, 0.5000, 0.5000])
    """

    temperature: float | Tensor
    top_k: int | Tensor | None
    top_p: float | Tensor | None
    min_p: float | Tensor | None

    def __init__(
        self,
        temperature: float | Tensor = 1.0,
        top_k: int | Tensor | None = None,
        dim: int = -1,
        *,
        top_p: float | Tensor | None = None,
        min_p: float | Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # the rules for numbers do not depend on x
        row = torch.empty(1, device="cpu")
        if not isinstance(temperature, Tensor):
            checks.temperature(temperature, row, 0)
        if not isinstance(top_k, Tensor):
            checks.top_k(top_k, row, 0)
        if not isinstance(top_p, Tensor):
            checks.share("top_p", top_p, row, 0, zero=False)
        if not isinstance(min_p, Tensor):
            checks.share("min_p", min_p, row, 0, zero=True)
        checks.output_dtype(out_dtype, "out_dtype")
        self.scale = None if scale is None else checks.number("scale", scale)
        self.softcap = None if softcap is None else checks.number("softcap", softcap, positive=True)
        self.out_dtype = out_dtype
        for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value, persistent=False)
            else:
                setattr(self, name, value)
        self.dim = dim

    def forward(self, x: Tensor, mask: masks.MaskLike = None, bias: Tensor | None = None) -> Tensor:
        return api.fused_softmax(
            x,
            self.temperature,
            mask,
            bias,
            self.top_k,
            self.dim,
            top_p=self.top_p,
            min_p=self.min_p,
            scale=self.scale,
            softcap=self.softcap,
            out_dtype=self.out_dtype,
        )

    def extra_repr(self) -> str:
        said: dict[str, object] = {"temperature": self.temperature, "top_k": self.top_k, "dim": self.dim}
        for name in ("top_p", "min_p", "scale", "softcap", "out_dtype"):
            if getattr(self, name) is not None:
                said[name] = getattr(self, name)
        return ", ".join(
            f"{name}={tuple(value.shape)}-tensor" if isinstance(value, Tensor) else f"{name}={value}"
            for name, value in said.items()
        )
