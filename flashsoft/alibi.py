"""Attention with linear biases: a term of the scores that is a number a head, not a tensor of their size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ALiBi:
    """The bias -slope * |i + Sk - Sq - j| of query i and key j: the further a key, the lower it scores.

    `slopes` is floating, (Hq,) or (B, Hq), and may require a gradient. The distance counts from the diagonal that ends
    in the last query and the last key. A bias tensor joins by `+`.

    Source: Press, Smith, Lewis, "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation", 2022, whose slopes for H heads, H a power of two, are 2^(-8 h / H), h = 1 .. H.

    >>> from flashsoft import attention
    >>> q, k, v = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 3, 8), torch.ones(1, 2, 3, 8)
    >>> out, lse = attention(q, k, v, bias=ALiBi(torch.tensor([0.0, 100.0])), return_lse=True)
    >>> lse.squeeze()
    tensor([1.0986, 0.0000])
    """

    slopes: Tensor
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.slopes, Tensor):
            raise TypeError(f"ALiBi: slopes must be a tensor, got {type(self.slopes).__name__}")
        if not self.slopes.is_floating_point():
            raise TypeError(f"ALiBi: slopes must be floating, got {self.slopes.dtype}")
        if self.slopes.ndim not in (1, 2):
            raise ValueError(f"ALiBi: slopes must be (Hq,) or (B, Hq), got shape {tuple(self.slopes.shape)}")

    def __add__(self, other: Tensor) -> ALiBi:
        return _joined(self, other) if isinstance(other, Tensor) else NotImplemented

    __radd__ = __add__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Tensor + ALiBi comes here from torch, in eager code and when torch.compile traces either order."""
        if func not in (torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.add) or len(args) != 2:
            return NotImplemented
        return _joined(*args) if isinstance(args[0], cls) else _joined(args[1], args[0])


def _joined(one: ALiBi, other: Tensor) -> ALiBi:
    return ALiBi(one.slopes, other if one.bias is None else one.bias + other)


Bias = Tensor | ALiBi | None
