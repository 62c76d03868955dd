"""Fused softmax of logits, and tokens drawn from it."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
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
    top_p: float | Tensor | None = ...,
    min_p: float | Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    out_dtype: torch.dtype | None = ...,
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
    top_p: float | Tensor | None = ...,
    min_p: float | Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    out_dtype: torch.dtype | None = ...,
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
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softcap(scale * x) / temperature + bias) over what mask, top-k, top-p and min-p keep, fused.

    The order is scale, softcap, temperature, bias, mask, top-k, top-p, min-p, softmax: as transformers takes them, each
    of what the one before has kept; so does vLLM, but for min-p, which there comes before top-k (the README compares
    conventions). What is not kept is exactly 0 and takes no gradient, and NaN or inf there does not leak. A row of
    which nothing is kept is 0, its lse -inf, its gradient 0; this holds for a row of -inf without a mask too, where
    `softmax` gives NaN.

    Options that may be tensors have one entry a row: x's shape without `dim` or with size 1 there, or broadcastable to
    that. None of their values is read on the host: an entry that is negative or NaN makes its row NaN.

    Args:
        x: scores or logits of any shape and strides; float32, float16, bfloat16 or float64.
        temperature: a number > 0, or a tensor. An entry of 0 puts all mass on the maximum, ties sharing it.
        mask: boolean, True = takes part (the opposite of `masked_fill`), broadcastable to x; or a mask such as
            `Causal()`, for x of shape (..., Sq, Sk): a band is never built, `Segments` and `Padding` are.
        bias: floating, broadcastable to x; its gradient is summed over what it was broadcast along.
        top_k: keep the k largest of what the mask keeps, an integer >= 1 or an integer tensor (an entry below 1 keeps
            nothing). Exactly k survive: equals are taken lowest index first, as by a stable descending sort. k of the
            row's length and more keeps all. Scores are compared in the dtype they are computed in.
        dim: the dimension that sums to one (the last, for a mask that is a value).
        return_lse: also return the natural log of the kept scores' sum of exponentials, float32, without `dim`.
        top_p: keep the most probable until their sum is top_p of all (the one that reaches it included, and at least
            one), a number > 0 and <= 1 or a tensor. Equals are taken lowest index first. Sums are float32: which of
            two neighbours in the order is the last may depend on their rounding, about 1e-6 of the whole.
        min_p: keep what is at least min_p times as probable as the most probable, a number from 0 to 1 or a tensor.
        scale: a factor of x, any finite number.
        softcap: a number > 0; scores become softcap * tanh(score / softcap), before the temperature.
        out_dtype: of the result, x's by default; x is not cast before.

    Differentiable once, to x, a temperature tensor and bias; what is kept counts as given.

    Raises:
        ValueError: a temperature or softcap <= 0 or not finite, top_k < 1, a top_p or min_p that is no share, shapes
            that do not broadcast, devices that differ.
        TypeError: a mask that is not boolean, a top_k that is not an integer, x or bias not floating.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020 (top-p); Nguyen et al., "Turning Up
    the Heat: Min-p Sampling", 2024.

    >>> fused_softmax(torch.tensor([1.0, 2.0, 2.0, 2.0]), top_k=2)
    tensor([0.0000, 0.5000, 0.5000, 0.0000])
    >>> fused_softmax(torch.tensor([0.1, 0.2, 0.3, 0.4]).log(), top_p=0.6)
    tensor([0.0000, 0.0000, 0.4286, 0.5714])
    """
    limits = (top_k, top_p, min_p)
    if bias is None and masks.banded(mask) and not any(isinstance(t, Tensor) for t in (temperature, *limits)):
        y, lse = direct.again(
            _fused_softmax, (x,), temperature, mask, None, *limits, dim, scale, softcap, out_dtype, backend
        )
    else:
        y, lse = _fused_softmax(x, temperature, mask, bias, *limits, dim, scale, softcap, out_dtype, backend)
    return (y, lse) if return_lse else y


def _fused_softmax(
    x: Tensor,
    temperature: float | Tensor,
    mask: MaskLike,
    bias: Tensor | None,
    top_k: int | Tensor | None,
    top_p: float | Tensor | None,
    min_p: float | Tensor | None,
    dim: int,
    scale: float | None,
    softcap: float | None,
    out_dtype: torch.dtype | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    checks.tensor("x", x)
    checks.output_dtype(out_dtype, "out_dtype")
    dim = checks.dimension(x, dim)
    options = _options(x, checks.temperature(temperature, x, dim), mask, bias, top_k, top_p, min_p, dim, scale, softcap)
    last = dim == x.ndim - 1
    rows = x if last else x.movedim(dim, -1)
    if out_dtype == torch.float64:
        rows = rows.to(out_dtype)
    y, lse = ops.call("fused_softmax", rows, out_dtype or x.dtype, *options, checks.backend(backend))
    return y if last else y.movedim(-1, dim), lse


def sample(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    mask: MaskLike = None,
    bias: Tensor | None = None,
    top_k: int | Tensor | None = None,
    *,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> Tensor:
    """An index of each row (..., N), drawn with the probabilities of `fused_softmax`, which are never written.

    Args:
        logits: (..., N), any strides; float32, float16, bfloat16 or float64.
        temperature: as in `fused_softmax`, but 0 may be a number too: the index of the largest, the lowest of equals.
        mask, bias, top_k, top_p, min_p, scale, softcap: as in `fused_softmax`.
        generator: of the logits' device; torch's own of that device by default. Two uniform numbers a row are drawn
            from it, so that the same state gives the same indices, and calls can be captured in a CUDA graph.

    Returns:
        int64 indices (...). -1 for a row that has no distribution: nothing is kept, or NaN or +inf is, or an option of
        the row is negative or NaN.

    Raises:
        ValueError: as `fused_softmax`, and a generator of another device.
        TypeError: as `fused_softmax`.

    Source: inverse transform sampling over partial sums.

    >>> sample(torch.tensor([[0.0, 9.0, 9.0], [7.0, 0.0, 0.0]]), temperature=0)
    tensor([1, 0])
    >>> draws = sample(torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(1000, 4), top_k=2)
    >>> sorted(set(draws.tolist()))
    [2, 3]
    """
    checks.tensor("logits", logits)
    dim = checks.dimension(logits, -1)
    checks.generator(generator, logits.device)
    temperature = checks.temperature(temperature, logits, dim, zero=True)
    options = _options(logits, temperature, mask, bias, top_k, top_p, min_p, dim, scale, softcap)
    uniform = torch.rand(*logits.shape[:-1], 2, device=logits.device, generator=generator)
    # what is drawn has no gradient, whatever the logits have
    options = tuple(option.detach() if isinstance(option, Tensor) else option for option in options)
    tokens: Tensor = ops.call("sample", logits.detach(), uniform, *options, checks.backend(backend))
    return tokens


def _options(
    x: Tensor,
    temperature: float | Tensor,
    mask: MaskLike,
    bias: Tensor | None,
    top_k: int | Tensor | None,
    top_p: float | Tensor | None,
    min_p: float | Tensor | None,
    dim: int,
    scale: float | None,
    softcap: float | None,
) -> tuple[Any, ...]:
    """The operators' arguments, checked, for x whose rows lie along `dim`."""
    limits = (
        checks.top_k(top_k, x, dim),
        checks.share("top_p", top_p, x, dim, zero=False),
        checks.share("min_p", min_p, x, dim, zero=True),
    )
    checks.bias(bias, x.shape, "x", x.device)
    spec = checks.mask(mask, x.shape, "x", x.device)
    if spec.query_ids is not None or spec.lengths is not None:
        if dim != x.ndim - 1:
            raise ValueError(f"dim must be the last for a mask such as Segments, got {dim} of {x.ndim} dimensions")
        spec = masks.built(spec, x.shape[-1], x.ndim)
    if (spec.lo is not None or spec.hi is not None) and dim != x.ndim - 1:
        raise ValueError(f"dim must be the last for a mask such as Causal(), got {dim} of {x.ndim} dimensions")

    def split(value: Any) -> tuple[Any, Tensor | None]:
        """A number, or a tensor of x's dimensions with rows along the last, which is of size 1."""
        if not isinstance(value, Tensor):
            return value, None
        return None, value.movedim(dim, -1).expand(*x.shape[:dim], *x.shape[dim + 1 :], 1)

    number, row_temperature = split(temperature)
    return (
        1.0 if number is None else number,
        row_temperature,
        None if scale is None else checks.number("scale", scale),
        None if softcap is None else checks.number("softcap", softcap, positive=True),
        None if spec.keep is None else spec.keep.expand(x.shape).movedim(dim, -1),
        spec.lo,
        spec.hi,
        None if bias is None else bias.reshape((1,) * (x.ndim - bias.ndim) + bias.shape).movedim(dim, -1),
        *(part for limit in limits for part in split(limit)),
    )
