"""The row softmax family."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks, direct, ops


def softmax(x: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None, backend: str | None = None) -> Tensor:
    """exp(x - lse) along `dim`, in one fused pass over each row.

    Args:
        x: any shape and strides; float32, float16, bfloat16 (computed in float32) or float64.
        dim: the dimension that sums to one.
        dtype: of the result, x's by default; x is not cast before, unless dtype is float64.
        backend: run on this backend or raise; see `explain`.

    A row of -inf only is NaN, as in torch; `fused_softmax` gives zeros there. NaN makes its row NaN.
    Differentiable twice.

    Raises:
        ValueError: dim out of range, or x a scalar.
        TypeError: x not a floating tensor, or a dtype that results cannot have.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

    >>> softmax(torch.tensor([[0.0, 0.0], [1.0, float("-inf")]]))
    tensor([[0.5000, 0.5000],
            [1.0000, 0.0000]])
    """
    y: Tensor = direct.again(_softmax, (x,), dim, dtype, backend)
    return y


def log_softmax(x: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None, backend: str | None = None) -> Tensor:
    """x - lse along `dim`; arguments and errors as in `softmax`, accurate however far x lies from zero.

    >>> log_softmax(torch.tensor([1e7, 1e7]))
    tensor([-0.6931, -0.6931])
    """
    y: Tensor = direct.again(_log_softmax, (x,), dim, dtype, backend)
    return y


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None, backend: str | None) -> Tensor:
    return _along("softmax", x, dim, dtype, backend)


def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None, backend: str | None) -> Tensor:
    return _along("log_softmax", x, dim, dtype, backend)


def _along(name: str, x: Tensor, dim: int, dtype: torch.dtype | None, backend: str | None) -> Tensor:
    checks.tensor("x", x)
    checks.output_dtype(dtype)
    dim = checks.dimension(x, dim)
    if dtype == torch.float64:
        x = x.to(dtype)
    last = dim == x.ndim - 1
    y: Tensor = ops.call(name, x if last else x.movedim(dim, -1), dtype or x.dtype, checks.backend(backend))
    return y if last else y.movedim(-1, dim)


def logsumexp(x: Tensor, dim: int = -1, *, keepdim: bool = False, backend: str | None = None) -> Tensor:
    """lse = ln(sum(exp(x))) along `dim`, in float32 whatever x's dtype (float64 for float64).

    -inf for a row of -inf or of length 0, +inf for one with +inf in it. Arguments and errors as in `softmax`.

    >>> logsumexp(torch.zeros(2, 8))
    tensor([2.0794, 2.0794])
    """
    lse: Tensor = direct.again(_logsumexp, (x,), dim, keepdim, backend)
    return lse


def _logsumexp(x: Tensor, dim: int, keepdim: bool, backend: str | None) -> Tensor:
    checks.tensor("x", x)
    dim = checks.dimension(x, dim)
    rows = x if dim == x.ndim - 1 else x.movedim(dim, -1)
    lse: Tensor = ops.call("logsumexp", rows, checks.backend(backend))
    return lse.unsqueeze(dim) if keepdim else lse
