"""The operators on logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch, masks
from ..reference.softmax import wide
from .registry import batch_rows, call, define, differentiate, not_twice


def one_of(number: Any, tensor: Tensor | None) -> Any:
    """An option that is a number or a tensor crosses the boundary as two arguments."""
    return number if tensor is None else tensor


def _fused_softmax(
    x: Tensor,
    temperature: float,
    row_temperature: Tensor | None,
    keep: Tensor | None,
    lo: int | None,
    hi: int | None,
    bias: Tensor | None,
    top_k: int | None,
    row_top_k: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if lo is not None or hi is not None:
        lo, hi = masks.clamp_band(lo, hi, x.shape[-2], x.shape[-1])
    return dispatch.choose("fused_softmax", x, backend).fused_softmax_forward(  # type: ignore[no-any-return]
        x, one_of(temperature, row_temperature), keep, lo, hi, bias, one_of(top_k, row_top_k)
    )


def _fused_softmax_fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=wide(x.dtype))


def _fused_softmax_backward(
    dy: Tensor,
    dlse: Tensor | None,
    x: Tensor,
    y: Tensor,
    temperature: float,
    row_temperature: Tensor | None,
    bias: Tensor | None,
    need_temperature: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dtemperature, dbias = dispatch.choose("fused_softmax", x, backend).fused_softmax_backward(
        dy, dlse, x, y, one_of(temperature, row_temperature), bias, need_temperature
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
    "fused_softmax(Tensor x, float temperature, Tensor? row_temperature, Tensor? keep, SymInt? lo, SymInt? hi, "
    "Tensor? bias, SymInt? top_k, Tensor? row_top_k, str backend) -> (Tensor, Tensor)",
    _fused_softmax,
    _fused_softmax_fake,
)
define(
    "fused_softmax_backward(Tensor dy, Tensor? dlse, Tensor x, Tensor y, float temperature, "
    "Tensor? row_temperature, Tensor? bias, bool need_temperature, str backend) -> (Tensor, Tensor, Tensor)",
    _fused_softmax_backward,
    _fused_softmax_backward_fake,
)


def _save_fused_softmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.temperature, row_temperature, _, _, _, bias, _, _, ctx.backend = inputs
    ctx.save_for_backward(x, output[0], row_temperature, bias)
    ctx.set_materialize_grads(False)


def _fused_softmax_gradient(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    x, y, row_temperature, bias = ctx.saved_tensors
    need_temperature, need_bias = ctx.needs_input_grad[2], ctx.needs_input_grad[6]
    if dy is None and dlse is None:
        return (None,) * 10
    dx, dtemperature, dbias = call(
        "fused_softmax_backward",
        torch.zeros_like(y) if dy is None else dy,
        dlse,
        x,
        y,
        ctx.temperature,
        row_temperature,
        bias if need_bias else None,
        need_temperature,
        ctx.backend,
    )
    temperature_gradient = dtemperature if need_temperature else None
    return dx, None, temperature_gradient, None, None, None, dbias if need_bias else None, None, None, None


differentiate("fused_softmax", _save_fused_softmax, _fused_softmax_gradient)
not_twice("fused_softmax", "torch.softmax on scores masked by torch.where")


batch_rows("fused_softmax")
batch_rows("fused_softmax_backward")
