"""Cross entropy: states of rows, losses of what they merge to, gradients.

A row's state has the kinds m, s, the score of its label (0 if that is not here), with weights the weight of the label
(likewise), and with label smoothing u = sum(w_j * (x_j - m)) and the sum of w_j. States of parts of the classes merge,
so a rank of a group that has a slice of them, from class `first` on, gives one. The backward needs m and
slope = dloss/dlse / s of each row:

    loss = (1 - smoothing) * w_label * (lse - x_label)
         + smoothing / classes * (sum(w_j) * lse - sum(w_j * x_j)) + z_loss * lse^2
    dx_j = exp(x_j - m) * slope - smoothing / classes * w_j - (j = label) * (1 - smoothing) * w_j
"""

from __future__ import annotations

import torch
from torch import Tensor

from .softmax import NEG_INF, finish, pivot, wide


def _scores(x: Tensor, softcap: float | None) -> Tensor:
    z = x.to(wide(x.dtype))
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def _labels(target: Tensor, first: int, classes: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Labels counted from class `first`, 0 where they are not among the next `classes`; which are; which are kept."""
    label = target.long() - first
    kept = target != ignore_index
    own = kept & (label >= 0) & (label < classes)
    return torch.where(own, label, 0), own, kept


def cross_entropy_state_forward(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    first: int,
    ignore_index: int,
    smooth: bool,
    softcap: float | None,
) -> Tensor:
    """States (kinds, ...) of rows x (..., N), which are the classes from `first` on; (-inf, 0) of rows not kept."""
    z, N = _scores(x, softcap), x.shape[-1]
    label, own, kept = _labels(target, first, N, ignore_index)
    ignored = ~kept.unsqueeze(-1)
    m = z.amax(-1).masked_fill_(~kept, NEG_INF) if N else z.new_full(target.shape, NEG_INF)
    away = z - pivot(m).unsqueeze(-1)
    zero = torch.zeros_like(m)
    p = torch.exp(away) if smooth else away.exp_()
    state = [m, p.masked_fill_(ignored, 0.0).sum(-1), zero]
    if N:
        state[2] = torch.where(own, z.gather(-1, label.unsqueeze(-1)).squeeze(-1), zero)
    w = None if weight is None else weight.to(z.dtype)
    if w is not None:
        state.append(torch.where(own, w[label], zero) if N else zero)
    if smooth:
        away = away.masked_fill_(ignored, 0.0)
        ones = torch.ones_like(m) * N if w is None else w.sum().expand(m.shape)
        state += [away.sum(-1) if w is None else (away * w).sum(-1), torch.where(kept, ones, zero)]
    return torch.stack(state)


def cross_entropy_forward(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    states: Tensor | None,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses of rows (...), their weights in the mean, and m and slope; of x, or of states (kinds, ..., ranks).

    Rows not kept are 0, but for m. A label that is not a class makes its row NaN.
    """
    smooth = label_smoothing > 0.0
    if states is None:
        states = cross_entropy_state_forward(x, target, weight, 0, ignore_index, smooth, softcap).unsqueeze(-1)
    _, valid, kept = _labels(target, 0, classes, ignore_index)
    m_parts = states[0]
    m = m_parts.amax(-1)
    at = pivot(m)
    s = (states[1] * torch.exp(m_parts - at.unsqueeze(-1))).sum(-1)
    inverse, _ = finish(m, s)
    dead = (s == 0.0) | (s == float("inf"))
    log_s = torch.log(s).masked_fill(dead, float("nan"))
    of_label = torch.ones_like(m) if weight is None else states[3].sum(-1)
    loss = (1.0 - label_smoothing) * of_label * (log_s - (states[2].sum(-1) - at))
    slope = (1.0 - label_smoothing) * of_label
    if smooth:
        u, w = states[-2], states[-1]
        w_sum = w.sum(-1)
        u_sum = (u + w * (pivot(m_parts) - at.unsqueeze(-1))).sum(-1)
        loss = loss + label_smoothing / classes * (w_sum * log_s - u_sum)
        slope = slope + label_smoothing / classes * w_sum
    if z_loss:
        lse = at + log_s
        loss, slope = loss + z_loss * lse * lse, slope + 2.0 * z_loss * lse
    slope = slope * inverse.masked_fill(dead, float("nan"))
    loss, slope = (torch.where(valid, number, float("nan")) for number in (loss, slope))
    loss, of_label, slope = (torch.where(kept, number, 0.0) for number in (loss, of_label, slope))
    return loss, of_label, m, slope


def cross_entropy_backward(
    dloss: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    m: Tensor,
    slope: Tensor,
    first: int,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
) -> Tensor:
    """The gradient of x (..., N), the classes from `first` on of `classes`, for dloss (...)."""
    if x.numel() == 0:
        return torch.empty_like(x)
    z = _scores(x, softcap)
    label, own, kept = _labels(target, first, x.shape[-1], ignore_index)
    by = torch.where(kept, dloss.to(z.dtype), 0.0)
    dx = torch.exp(z - pivot(m).unsqueeze(-1))
    dx.mul_((slope * by).unsqueeze(-1))
    w = None if weight is None else weight.to(z.dtype)
    if label_smoothing > 0.0:
        share = (by * (label_smoothing / classes)).unsqueeze(-1)
        dx.sub_(share if w is None else share * w)
    hit = torch.where(own, (1.0 - label_smoothing) * by, 0.0)
    dx.scatter_add_(-1, label.unsqueeze(-1), -(hit if w is None else hit * w[label]).unsqueeze(-1))
    if softcap is not None:
        dx.mul_(1.0 - (z / softcap).square())
    dx.masked_fill_(~kept.unsqueeze(-1), 0.0)
    as_x = torch.empty_like(x)
    return dx if (dx.dtype, dx.stride()) == (x.dtype, as_x.stride()) else as_x.copy_(dx)


def cross_entropy_overwrite_forward(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    factor: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    """Losses of rows of x; x becomes the gradient of their sum times factor (a scalar tensor, or None for 1)."""
    options = ignore_index, label_smoothing
    loss, _, m, slope = cross_entropy_forward(x, target, weight, None, x.shape[-1], *options, z_loss, softcap)
    dloss = torch.ones_like(loss) if factor is None else factor.to(loss.dtype).expand(loss.shape)
    x.copy_(cross_entropy_backward(dloss, x, target, weight, m, slope, 0, x.shape[-1], *options, softcap))
    return loss


def scale_backward(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor, a scalar tensor."""
    gradient.copy_(gradient.to(wide(gradient.dtype)) * factor)
