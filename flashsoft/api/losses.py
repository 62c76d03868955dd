"""Cross entropy of logits, on one device and over the ranks of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import checks, ops
from ..reference.softmax import wide

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def fused_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    dim: int = -1,
    inplace_backward: bool = False,
    group: ProcessGroup | None = None,
    backend: str | None = None,
) -> Tensor:
    """lse - logits[target] of each row, reduced: `torch.nn.functional.cross_entropy` in one read of the logits.

    The softmax is never written: the forward keeps 8 bytes a row, the backward writes (softmax - one-hot), scaled,
    in one pass. All is computed in float32 (float64 for float64), and the loss has that dtype.

    Args:
        logits: (..., N) of any shape and strides, classes along `dim`; float32, float16, bfloat16 or float64.
        target: labels, of logits' shape without `dim`; int64 or int32. A label that is neither a class nor
            ignore_index makes the loss, and its row of the gradient, NaN; with FLASHSOFT_CHECK=1 it raises.
        weight: (N,), of classes; it takes no gradient.
        ignore_index: rows with this label add nothing to loss or gradient, whatever (NaN) stands in them; their
            logits are not read. It may be a class, which the other rows still count.
        label_smoothing: in [0, 1], the share of the loss that is spread over all classes, as in torch.
        z_loss: adds z_loss * lse^2 for every row that is not ignored; the mean divides it as the rest.
        softcap: replaces the logits by softcap * tanh(logits / softcap), before all else.
        reduction: "mean" (divided by the sum of the weights of the targets that are kept; NaN, with gradient 0, if
            there are none, as in torch), "sum" or "none".
        dim: the dimension of the classes; the last by default, where torch has the second.
        inplace_backward: if a gradient is wanted, the forward writes it over the logits: one read and one write of
            them in all, and no memory for a gradient. See below.
        group: a `torch.distributed.ProcessGroup` over whose ranks the classes are cut: this rank's logits, and
            weight, are those of classes r * N to (r + 1) * N - 1, on each rank as many, and target, alike on all
            ranks, counts all classes. Each row's state crosses in one all-gather, and every rank returns the same
            loss; its gradient is that of its own logits.

    With `inplace_backward` nobody may use the logits' values afterwards. Whoever saved them for its backward before (a
    softmax or an exponential that made them, another loss) gets torch's error that they "have been modified by an
    inplace operation", as does a second backward through this loss. What reads them later, without a need of them in
    its backward, or through `.data` or an alias that autograd does not know, finds the gradient there, and no error.
    Where no gradient is wanted, and under torch.compile and torch.func, the logits stay as they are.

    Differentiable once, to logits.

    Raises:
        ValueError: shapes that do not fit, options out of range, weight that requires a gradient; with
            inplace_backward logits that are a leaf or expanded, reduction "none", or a group.
        TypeError: logits not floating, a target that is not int64 or int32.

    Source: the row's state (m, s) is that of Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    >>> loss = fused_cross_entropy(logits, torch.tensor([0, -100]))
    >>> loss.backward()
    >>> loss, logits.grad
    (tensor(0.2395, grad_fn=<DivBackward0>), tensor([[-0.2130,  0.1065,  0.1065],
            [ 0.0000,  0.0000,  0.0000]]))
    """
    checks.tensor("logits", logits)
    dim = checks.dimension(logits, dim, "logits")
    rows = logits if dim == logits.ndim - 1 else logits.movedim(dim, -1)
    options = checks.loss_options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    checks.target(target, rows.shape[:-1], "logits' shape without dim", "logits", logits.device)
    N = rows.shape[-1]
    checks.class_weight("weight", weight, N, "logits", logits.device)
    name = checks.backend(backend)
    rank, ranks = (0, 1) if group is None else checks.group(group)
    checks.labels(target, N * ranks, ignore_index)
    if inplace_backward:
        checks.overwritable(logits, reduction, group)
        if _may_overwrite(rows):
            return _overwriting(rows, target, weight, options, reduction == "mean", name)
    states = None
    if group is not None:
        states = _states_of_all(rows, target, weight, rank * N, options, group, ranks, name)
    loss, kept, _, _ = ops.call("cross_entropy", rows, target, weight, states, rank * N, ranks * N, *options, name)
    return reduced(loss, kept, reduction)


def reduced(loss: Tensor, kept: Tensor, reduction: str) -> Tensor:
    """The loss of rows that count as `kept` in the mean."""
    if reduction == "none":
        return loss
    return loss.sum() / kept.sum() if reduction == "mean" else loss.sum()


def mean_divisor(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What a mean is divided by, before any logit is seen: a scalar on the device."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum(dtype=dtype)
    label = target.long().clamp(0, max(weight.shape[0] - 1, 0))
    return torch.where(kept, weight[label], 0.0).sum(dtype=dtype)


def _may_overwrite(rows: Tensor) -> bool:
    """A gradient is wanted, of a plain tensor, and nobody would have to be told of the write."""
    return type(rows) is Tensor and rows.requires_grad and torch.is_grad_enabled() and not ops.losses.traced()


def _overwriting(
    rows: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: tuple[int, float, float, float | None],
    mean: bool,
    backend: str,
) -> Tensor:
    with torch.no_grad():
        divisor = mean_divisor(target, weight, options[0], wide(rows.dtype)) if mean else None
        factor = None if divisor is None else divisor.reciprocal()
        losses = ops.call("cross_entropy_overwrite", rows.detach(), target, weight, factor, *options, backend)
        loss = losses.sum() if divisor is None else losses.sum() / divisor
    result: Tensor = ops.call("overwritten", rows, loss, backend)
    return result


def _states_of_all(
    rows: Tensor,
    target: Tensor,
    weight: Tensor | None,
    first: int,
    options: tuple[int, float, float, float | None],
    group: ProcessGroup,
    ranks: int,
    backend: str,
) -> Tensor:
    """States (kinds, ..., ranks): the ranks are the parts of a row, merged in their order, alike on every rank."""
    ignore_index, label_smoothing, _, softcap = options
    with torch.no_grad():
        own: Tensor = ops.call(
            "cross_entropy_state", rows, target, weight, first, ignore_index, label_smoothing > 0.0, softcap, backend
        )
        every = own.new_empty(ranks * own.shape[0], *own.shape[1:])
        torch.distributed.all_gather_into_tensor(every, own.contiguous(), group=group)
        return every.view(ranks, *own.shape).movedim(0, -1)
