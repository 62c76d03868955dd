"""The operators of the row softmax family, twice differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..reference.softmax import wide
from .registry import batch_rows, call, define, differentiate


def _softmax(x: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    return dispatch.choose("softmax", x, backend).softmax_forward(x, dtype)  # type: ignore[no-any-return]


def _softmax_backward(dy: Tensor, y: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    return dispatch.choose("softmax", y, backend).softmax_backward(dy, y, dtype)  # type: ignore[no-any-return]


def _log_softmax(x: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    return dispatch.choose("log_softmax", x, backend).log_softmax_forward(x, dtype)  # type: ignore[no-any-return]


def _log_softmax_backward(dy: Tensor, y: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    return dispatch.choose("log_softmax", y, backend).log_softmax_backward(dy, y, dtype)  # type: ignore[no-any-return]


def _logsumexp(x: Tensor, backend: str) -> Tensor:
    return dispatch.choose("logsumexp", x, backend).logsumexp_forward(x)  # type: ignore[no-any-return]


def _logsumexp_backward(dlse: Tensor, x: Tensor, lse: Tensor, backend: str) -> Tensor:
    return dispatch.choose("logsumexp", x, backend).logsumexp_backward(dlse, x, lse)  # type: ignore[no-any-return]


for _name, _run, _run_backward in (
    ("softmax", _softmax, _softmax_backward),
    ("log_softmax", _log_softmax, _log_softmax_backward),
):
    define(
        f"{_name}(Tensor x, ScalarType dtype, str backend) -> Tensor",
        _run,
        lambda x, dtype, backend: torch.empty_like(x, dtype=dtype),
    )
    define(
        f"{_name}_backward(Tensor dy, Tensor y, ScalarType dtype, str backend) -> Tensor",
        _run_backward,
        lambda dy, y, dtype, backend: torch.empty_like(y, dtype=dtype),
    )
define(
    "logsumexp(Tensor x, str backend) -> Tensor",
    _logsumexp,
    lambda x, backend: x.new_empty(x.shape[:-1], dtype=wide(x.dtype)),
)
define(
    "logsumexp_backward(Tensor dlse, Tensor x, Tensor lse, str backend) -> Tensor",
    _logsumexp_backward,
    lambda dlse, x, lse, backend: torch.empty_like(x),
)


def _save_result(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, ctx.backend = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(output)


def _softmax_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    return call("softmax_backward", dy, *ctx.saved_tensors, ctx.dtype, ctx.backend), None, None


def _log_softmax_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    return call("log_softmax_backward", dy, *ctx.saved_tensors, ctx.dtype, ctx.backend), None, None


differentiate("softmax", _save_result, _softmax_gradient)
differentiate("log_softmax", _save_result, _log_softmax_gradient)


def _save_gradient_and_result(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dy, y, _, _ = inputs
    ctx.save_for_backward(dy, y)


def _softmax_second(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
    # dx = y * (dy - sum(y * dy)), differentiated in dy and in y
    dy, y = (t.to(wide(t.dtype)) for t in ctx.saved_tensors)
    g = g.to(y.dtype)
    shared = (g * y).sum(-1, keepdim=True)
    ddy = y * (g - shared)
    dy_of_y = g * (dy - (y * dy).sum(-1, keepdim=True)) - dy * shared
    return ddy.to(ctx.saved_tensors[0].dtype), dy_of_y.to(ctx.saved_tensors[1].dtype), None, None


def _log_softmax_second(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
    # dx = dy - exp(y) * sum(dy), differentiated in dy and in y
    dy, y = (t.to(wide(t.dtype)) for t in ctx.saved_tensors)
    g = g.to(y.dtype)
    p = torch.exp(y)
    ddy = g - (g * p).sum(-1, keepdim=True)
    dy_of_y = -g * p * dy.sum(-1, keepdim=True)
    return ddy.to(ctx.saved_tensors[0].dtype), dy_of_y.to(ctx.saved_tensors[1].dtype), None, None


differentiate("softmax_backward", _save_gradient_and_result, _softmax_second)
differentiate("log_softmax_backward", _save_gradient_and_result, _log_softmax_second)


def _save_logsumexp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.backend = inputs
    ctx.save_for_backward(x, output)


def _logsumexp_gradient(ctx: Any, dlse: Tensor) -> tuple[Tensor, None]:
    return call("logsumexp_backward", dlse, *ctx.saved_tensors, ctx.backend), None


def _save_logsumexp_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _logsumexp_second(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    # dx = dlse * exp(x - lse), differentiated in dlse, x and lse
    dlse, x, lse = ctx.saved_tensors
    lse = lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)
    weighted = g.to(lse.dtype) * torch.exp(x.to(lse.dtype) - lse)
    both = weighted * dlse.unsqueeze(-1)
    return weighted.sum(-1), both.to(x.dtype), -both.sum(-1), None


differentiate("logsumexp", _save_logsumexp, _logsumexp_gradient)
differentiate("logsumexp_backward", _save_logsumexp_backward, _logsumexp_second)


for _name in ("softmax", "log_softmax", "logsumexp"):
    batch_rows(_name)
    batch_rows(f"{_name}_backward")
