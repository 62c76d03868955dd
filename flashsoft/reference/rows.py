"""The row softmax family."""

from __future__ import annotations

import torch
from torch import Tensor

from .softmax import NEG_INF, finish, pivot, update, wide


def _row_state(x: Tensor) -> tuple[Tensor, Tensor]:
    """(m, s) of whole rows; one update, since a CPU gains nothing from cutting a row that it streams anyway."""
    empty = x.new_full((*x.shape[:-1], 1), NEG_INF), x.new_zeros((*x.shape[:-1], 1))
    if x.shape[-1] == 0:
        return empty
    m, s, _, _ = update(*empty, x)
    return m, s


def softmax_forward(x: Tensor, dtype: torch.dtype) -> Tensor:
    """y = exp(x - lse) along the last dimension; a row of -inf is NaN, as in torch."""
    x_wide = x.to(wide(x.dtype))
    m, s = _row_state(x_wide)
    inverse, _ = finish(m, s)
    inverse = inverse.masked_fill(s == 0.0, float("nan"))
    return torch.empty_like(x, dtype=dtype).copy_(torch.exp(x_wide - pivot(m)) * inverse)


def softmax_backward(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """dx = y * (dy - sum(y * dy))."""
    y_wide, dy_wide = y.to(wide(y.dtype)), dy.to(wide(y.dtype))
    dx = y_wide * (dy_wide - (y_wide * dy_wide).sum(-1, keepdim=True))
    return torch.empty_like(y, dtype=dtype).copy_(dx)


def log_softmax_forward(x: Tensor, dtype: torch.dtype) -> Tensor:
    """y = (x - m) - ln(s) along the last dimension, exact in x - m; a row of -inf is NaN, as in torch."""
    x_wide = x.to(wide(x.dtype))
    m, s = _row_state(x_wide)
    log_s = torch.log(s).masked_fill((s == 0.0) | (s == float("inf")), float("nan"))
    return torch.empty_like(x, dtype=dtype).copy_((x_wide - pivot(m)) - log_s)


def log_softmax_backward(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """dx = dy - exp(y) * sum(dy)."""
    y_wide, dy_wide = y.to(wide(y.dtype)), dy.to(wide(y.dtype))
    dx = dy_wide - torch.exp(y_wide) * dy_wide.sum(-1, keepdim=True)
    return torch.empty_like(y, dtype=dtype).copy_(dx)


def logsumexp_forward(x: Tensor) -> Tensor:
    """lse (float32, or float64) of each row; -inf for a row of -inf or of length 0."""
    _, lse = finish(*_row_state(x.to(wide(x.dtype))))
    return lse.squeeze(-1)


def logsumexp_backward(dlse: Tensor, x: Tensor, lse: Tensor) -> Tensor:
    """dx = dlse * exp(x - lse); 0 for a row without mass."""
    lse = lse.masked_fill(lse == NEG_INF, 0.0).unsqueeze(-1)
    return torch.empty_like(x).copy_(dlse.unsqueeze(-1) * torch.exp(x.to(lse.dtype) - lse))
