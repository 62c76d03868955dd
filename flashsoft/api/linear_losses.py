"""Cross entropy behind a linear layer, without its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks, ops
from ..reference.softmax import wide
from .autocast import autocast
from .losses import mean_divisor, reduced


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """`fused_cross_entropy` of `torch.nn.functional.linear(hidden, weight, bias)`, whose logits are never all there.

    Tokens go in chunks: a matrix product gives a chunk's logits, which become their own gradient in place, and two
    more turn that into the gradients of hidden, weight and bias; those of the latter two are summed over chunks in
    float32 (over no more than four, that of weight in its own dtype). So the memory is that of one chunk, and the
    products are as many as without. With reduction "mean" or "sum" gradients are computed in the forward if they are
    wanted; with "none" the backward computes the logits again.

    Args:
        hidden: (..., H), any leading dimensions; float32, float16, bfloat16 or float64.
        weight: (N, H), as of `torch.nn.Linear`, in hidden's dtype.
        target: (...) labels, int64 or int32.
        bias: (N,), of the layer.
        class_weight: (N,), the `weight` of `fused_cross_entropy`; the other options are those there.
        chunk: tokens of a chunk; by default as many as have logits of 512 MB (64 MB on a CPU).

    Under autocast hidden, weight and bias are cast as in a linear layer; the loss is float32. Differentiable once, to
    hidden, weight and bias, and a "mean" or "sum" can go through one backward only (torch's error says that a variable
    was "modified by an inplace operation"), since gradients are scaled where they lie.

    Raises:
        ValueError: shapes that do not fit, options out of range, a chunk < 1.
        TypeError: dtypes that differ, a target that is not int64 or int32.

    >>> layer = torch.nn.Linear(16, 1000)
    >>> hidden, target = torch.randn(2, 5, 16), torch.randint(1000, (2, 5))
    >>> loss = fused_linear_cross_entropy(hidden, layer.weight, target, bias=layer.bias)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(layer(hidden).flatten(0, 1), target.flatten()))
    True
    """
    if bias is None:
        hidden, weight = autocast(hidden, weight)
    else:
        hidden, weight, bias = autocast(hidden, weight, bias)
    checks.linear_loss(hidden, weight, bias)
    options = checks.loss_options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    checks.target(target, hidden.shape[:-1], "hidden's shape without the last dimension", "hidden", hidden.device)
    N, H = weight.shape
    checks.class_weight("class_weight", class_weight, N, "hidden", hidden.device)
    checks.labels(target, N, ignore_index)
    tokens = 0 if chunk is None else checks.size("chunk", chunk)
    name = checks.backend(backend)
    # not -1, which torch cannot infer where H is 0
    rows, labels = hidden.reshape(target.numel(), H), target.reshape(target.numel())
    layer = rows, weight, bias, labels, class_weight
    needs = [t is not None and _wants_gradient(t) for t in (hidden, weight, bias)]
    if reduction == "none" or not any(needs):
        loss, kept = ops.call("linear_cross_entropy_rows", *layer, *options, tokens, name)
        return reduced(loss.view(target.shape), kept, reduction)
    divisor = None
    if reduction == "mean":
        divisor = mean_divisor(labels, class_weight, ignore_index, wide(hidden.dtype))
    result: Tensor
    result, _, _, _ = ops.call("linear_cross_entropy", *layer, divisor, *options, tokens, *needs, name)
    return result


def _wants_gradient(tensor: Tensor) -> bool:
    """Transforms of torch.func do not say."""
    return (torch.is_grad_enabled() and tensor.requires_grad) or torch._C._are_functorch_transforms_active()
