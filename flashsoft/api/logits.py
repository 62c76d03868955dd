"""Fused softmax of logits."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from .. import checks, direct, masks, ops
from ..masks import MaskLike


@overload
def fused_softmax(
    x: Tensor,
    temperature: float | Tensor = ...,
    mask: MaskLike = ...,
    bias: Tensor | None = ...,
    top_k: int | Tensor | None = ...,
    dim: int = ...,
    return_lse: Literal[False] = ...,
    *,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def fused_softmax(
    x: Tensor,
    temperature: float | Tensor = ...,
    mask: MaskLike = ...,
    bias: Tensor | None = ...,
    top_k: int | Tensor | None = ...,
    dim: int = ...,
    *,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
def fused_softmax(
    x: Tensor,
    temperature: float | Tensor = 1.0,
    mask: MaskLike = None,
    bias: Tensor | None = None,
    top_k: int | Tensor | None = None,
    dim: int = -1,
    return_lse: bool = False,
    *,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(x / temperature + bias) over what mask and top-k keep, fused.

    The order is temperature, bias, mask, top-k, softmax. What is not kept is exactly 0 and takes no gradient, and
    NaN or inf there does not leak. A row of which nothing is kept is 0, its lse -inf, its gradient 0; this holds
    for a row of -inf without a mask too, where `softmax` gives NaN.

    Args:
        x: scores or logits of any shape and strides; float32, float16, bfloat16 or float64.
        temperature: a number > 0, or a tensor of one entry a row: of x's shape without `dim` or with size 1 there,
            or broadcastable to it. An entry of 0 puts all mass on the maximum, ties sharing it.
        mask: boolean, True = takes part (the opposite of `masked_fill`), broadcastable to x; or a mask such as
            `Causal()`, never built, for x of shape (..., Sq, Sk).
        bias: floating, broadcastable to x; its gradient is summed over what it was broadcast along.
        top_k: keep the k largest of what the mask keeps, an integer >= 1 or an integer tensor of one entry a row.
            Exactly k survive: equals are taken lowest index first, as by a stable descending sort. k of the row's
            length and more keeps all. Scores are compared in the dtype they are computed in.
        dim: the dimension that sums to one (the last, for a mask that is a value).
        return_lse: also return the natural log of the kept scores' sum of exponentials, float32, without `dim`.

    Differentiable once, to x, a temperature tensor and bias.

    Raises:
        ValueError: a temperature <= 0 or not finite, top_k < 1, shapes that do not broadcast, devices that differ.
        TypeError: a mask that is not boolean, a top_k that is not an integer, x or bias not floating.

    >>> fused_softmax(torch.tensor([1.0, 2.0, 2.0, 2.0]), top_k=2)
    tensor([0.0000, 0.5000, 0.5000, 0.0000])
    """
    if bias is None and masks.banded(mask) and not isinstance(temperature, Tensor) and not isinstance(top_k, Tensor):
        y, lse = direct.again(_fused_softmax, (x,), temperature, mask, None, top_k, dim, backend)
    else:
        y, lse = _fused_softmax(x, temperature, mask, bias, top_k, dim, backend)
    return (y, lse) if return_lse else y


def _fused_softmax(
    x: Tensor,
    temperature: float | Tensor,
    mask: MaskLike,
    bias: Tensor | None,
    top_k: int | Tensor | None,
    dim: int,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    checks.tensor("x", x)
    dim = checks.dimension(x, dim)
    temperature = checks.temperature(temperature, x, dim)
    top_k = checks.top_k(top_k, x, dim)
    checks.bias(bias, x.shape, "x", x.device)
    spec = checks.mask(mask, x.shape, "x", x.device)
    last = dim == x.ndim - 1
    if (spec.lo is not None or spec.hi is not None) and not last:
        raise ValueError(f"dim must be the last for a mask such as Causal(), got {dim} of {x.ndim} dimensions")
    rows = x if last else x.movedim(dim, -1)
    y, lse = ops.call(
        "fused_softmax",
        rows,
        1.0 if isinstance(temperature, Tensor) else temperature,
        _per_row(temperature, rows, dim),
        None if spec.keep is None else spec.keep.expand(x.shape).movedim(dim, -1),
        spec.lo,
        spec.hi,
        None if bias is None else bias.reshape((1,) * (x.ndim - bias.ndim) + bias.shape).movedim(dim, -1),
        None if isinstance(top_k, Tensor) else top_k,
        _per_row(top_k, rows, dim),
        checks.backend(backend),
    )
    return y if last else y.movedim(-1, dim), lse


def _per_row(value: object, rows: Tensor, dim: int) -> Tensor | None:
    """An option of one entry a row in the layout of the operators: x's dimensions, the last of size 1."""
    if not isinstance(value, Tensor):
        return None
    return value.movedim(dim, -1).expand(*rows.shape[:-1], 1)
