"""How tests make tensors: fresh random values, in any layout, in memory whose surroundings are NaN."""

from __future__ import annotations

import torch
from torch import Tensor

PAD = 64  # elements of NaN before and after a guarded tensor: 256 bytes and more keep its alignment


def draw(*shape: int, device: torch.device | str, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
    """Normal values drawn on the CPU, so that every device sees the same ones."""
    return (torch.randn(*shape) * std).to(device=device, dtype=dtype)


def guarded(
    x: Tensor, shift: int = 0, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """x's values and strides in memory that is NaN everywhere else: a read out of bounds shows in the result.

    `shift` moves the first element by so many elements, off its alignment. (`x.to` would lose x's strides.)
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True) if size)
    memory = torch.full((2 * PAD + shift + extent,), float("nan"), dtype=dtype or x.dtype, device=device or x.device)
    y = memory.as_strided(x.shape, x.stride(), PAD + shift)
    if x.numel():
        # an expanded dimension is written once
        once = [slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()]
        y[tuple(once)].copy_(x[tuple(once)])
    return y


def attention_inputs(
    B: int,
    Hq: int,
    Hkv: int,
    Sq: int,
    Sk: int,
    D: int,
    Dv: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
) -> tuple[Tensor, Tensor, Tensor]:
    """Guarded query, key and value in one of LAYOUTS; leaves that take gradients."""
    made = LAYOUTS[layout](B, Hq, Hkv, Sq, Sk, D, Dv)
    q, k, v = (guarded(x, device=device, dtype=dtype).requires_grad_() for x in made)
    return q, k, v


Triple = tuple[Tensor, Tensor, Tensor]


def _contiguous(B: int, Hq: int, Hkv: int, Sq: int, Sk: int, D: int, Dv: int) -> Triple:
    return torch.randn(B, Hq, Sq, D), torch.randn(B, Hkv, Sk, D), torch.randn(B, Hkv, Sk, Dv)


def _transposed(B: int, Hq: int, Hkv: int, Sq: int, Sk: int, D: int, Dv: int) -> Triple:
    q, k, v = torch.randn(B, Sq, Hq, D), torch.randn(B, Sk, Hkv, D), torch.randn(B, Sk, Hkv, Dv)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _packed(B: int, Hq: int, Hkv: int, Sq: int, Sk: int, D: int, Dv: int) -> Triple:
    """Slices of one (B, S, 3, H, D): needs Hq = Hkv, Sq = Sk, D = Dv."""
    qkv = torch.randn(B, Sq, 3, Hq, D)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    return q, k, v


def _columns(B: int, Hq: int, Hkv: int, Sq: int, Sk: int, D: int, Dv: int) -> Triple:
    """Every other column: last stride 2."""
    q, k, v = torch.randn(B, Hq, Sq, 2 * D), torch.randn(B, Hkv, Sk, 2 * D), torch.randn(B, Hkv, Sk, 2 * Dv)
    return q[..., ::2], k[..., ::2], v[..., ::2]


def _columns_first(B: int, Hq: int, Hkv: int, Sq: int, Sk: int, D: int, Dv: int) -> Triple:
    """Last dimension outer, sequence inner."""
    q, k, v = torch.randn(B, Hq, D, Sq), torch.randn(B, Hkv, D, Sk), torch.randn(B, Hkv, Dv, Sk)
    return q.mT, k.mT, v.mT


def _expanded(B: int, Hq: int, Hkv: int, Sq: int, Sk: int, D: int, Dv: int) -> Triple:
    """Key shared by the batch, value shared by batch and heads: strides 0."""
    q, k, v = torch.randn(B, Hq, Sq, D), torch.randn(1, Hkv, Sk, D), torch.randn(1, 1, Sk, Dv)
    return q, k.expand(B, -1, -1, -1), v.expand(B, Hkv, -1, -1)


def _value_transposed(B: int, Hq: int, Hkv: int, Sq: int, Sk: int, D: int, Dv: int) -> Triple:
    q, k, _ = _contiguous(B, Hq, Hkv, Sq, Sk, D, Dv)
    return q, k, torch.randn(B, Sk, Hkv, Dv).transpose(1, 2)


LAYOUTS = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "packed": _packed,
    "columns": _columns,
    "columns_first": _columns_first,
    "expanded": _expanded,
    "value_transposed": _value_transposed,
}
