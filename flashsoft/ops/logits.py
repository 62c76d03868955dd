"""The operators on logits: fused softmax, differentiable once, and tokens drawn from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch, masks
from ..reference.softmax import wide
from .registry import batch_rows, call, define, differentiate, not_twice

# What says how scores come from x, and which of them are kept; an option that is a number or a tensor crosses the
# boundary as two arguments.
_SCORES = (
    "float temperature, Tensor? row_temperature, float? scale, float? softcap, Tensor? keep, SymInt? lo, SymInt? hi, "
    "Tensor? bias"
)
_LIMITS = "SymInt? top_k, Tensor? row_top_k, float? top_p, Tensor? row_top_p, float? min_p, Tensor? row_min_p"


def _one_of(number: Any, tensor: Tensor | None) -> Any:
    return number if tensor is None else tensor


def _resolved(
    x: Tensor,
    temperature: float,
    row_temperature: Tensor | None,
    scale: float | None,
    softcap: float | None,
    keep: Tensor | None,
    lo: int | None,
    hi: int | None,
    bias: Tensor | None,
    top_k: int | None,
    row_top_k: Tensor | None,
    top_p: float | None,
    row_top_p: Tensor | None,
    min_p: float | None,
    row_min_p: Tensor | None,
) -> tuple[Any, ...]:
    """The arguments of a backend's function."""
    if lo is not None or hi is not None:
        lo, hi = masks.clamp_band(lo, hi, x.shape[-2], x.shape[-1])
    limits = _one_of(top_k, row_top_k), _one_of(top_p, row_top_p), _one_of(min_p, row_min_p)
    return _one_of(temperature, row_temperature), scale, softcap, keep, lo, hi, bias, *limits


def _fused_softmax(x: Tensor, dtype: torch.dtype, *options: Any) -> tuple[Tensor, Tensor]:
    forward = dispatch.choose("fused_softmax", x, options[-1]).fused_softmax_forward
    return forward(x, dtype, *_resolved(x, *options[:-1]))  # type: ignore[no-any-return]


def _fused_softmax_fake(x: Tensor, dtype: torch.dtype, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[:-1], dtype=wide(x.dtype))


def _sample(x: Tensor, uniform: Tensor, *options: Any) -> Tensor:
    forward = dispatch.choose("sample", x, options[-1]).sample_forward
    return forward(x, uniform, *_resolved(x, *options[:-1]))  # type: ignore[no-any-return]


def _sample_fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


def _fused_softmax_backward(
    dy: Tensor,
    dlse: Tensor | None,
    x: Tensor,
    y: Tensor,
    temperature: float,
    row_temperature: Tensor | None,
    scale: float | None,
    softcap: float | None,
    bias: Tensor | None,
    need_temperature: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dtemperature, dbias = dispatch.choose("fused_softmax", x, backend).fused_softmax_backward(
        dy, dlse, x, y, _one_of(temperature, row_temperature), scale, softcap, bias, need_temperature
    )
    return (
        dx,
        x.new_empty(0) if dtemperature is None else dtemperature,
        x.new_empty(0) if dbias is None else dbias,
    )


def _fused_softmax_backward_fake(
    dy: Tensor,
    dlse: Tensor | None,
    x: Tensor,
    y: Tensor,
    temperature: float,
    row_temperature: Tensor | None,
    scale: float | None,
    softcap: float | None,
    bias: Tensor | None,
    need_temperature: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    assert row_temperature is not None or not need_temperature
    return (
        torch.empty_like(x),
        row_temperature.new_empty(row_temperature.shape) if need_temperature else x.new_empty(0),  # type: ignore[union-attr]
        x.new_empty(0) if bias is None else bias.new_empty(bias.shape),
    )


define(
    f"fused_softmax(Tensor x, ScalarType dtype, {_SCORES}, {_LIMITS}, str backend) -> (Tensor, Tensor)",
    _fused_softmax,
    _fused_softmax_fake,
)
define(
    "fused_softmax_backward(Tensor dy, Tensor? dlse, Tensor x, Tensor y, float temperature, Tensor? row_temperature, "
    "float? scale, float? softcap, Tensor? bias, bool need_temperature, str backend) -> (Tensor, Tensor, Tensor)",
    _fused_softmax_backward,
    _fused_softmax_backward_fake,
)
define(f"sample(Tensor x, Tensor uniform, {_SCORES}, {_LIMITS}, str backend) -> Tensor", _sample, _sample_fake)


def _save_fused_softmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, ctx.temperature, row_temperature, ctx.scale, ctx.softcap, _, _, _, bias, *_, ctx.backend = inputs
    ctx.save_for_backward(x, output[0], row_temperature, bias)
    ctx.set_materialize_grads(False)


def _fused_softmax_gradient(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    x, y, row_temperature, bias = ctx.saved_tensors
    need_temperature, need_bias = ctx.needs_input_grad[3], ctx.needs_input_grad[9]
    gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if dy is None and dlse is None:
        return tuple(gradients)
    dx, dtemperature, dbias = call(
        "fused_softmax_backward",
        torch.zeros_like(y) if dy is None else dy,
        dlse,
        x,
        y,
        ctx.temperature,
        row_temperature,
        ctx.scale,
        ctx.softcap,
        bias if need_bias else None,
        need_temperature,
        ctx.backend,
    )
    gradients[0] = dx
    gradients[3] = dtemperature if need_temperature else None
    gradients[9] = dbias if need_bias else None
    return tuple(gradients)


def _no_gradient(ctx: Any, *_: Any) -> None:
    raise RuntimeError("sample draws indices, which have no gradient")


differentiate("fused_softmax", _save_fused_softmax, _fused_softmax_gradient)
not_twice("fused_softmax", "torch.softmax on scores masked by torch.where")
differentiate("sample", lambda ctx, inputs, output: None, _no_gradient)
for _name in ("fused_softmax", "fused_softmax_backward", "sample"):
    batch_rows(_name)
