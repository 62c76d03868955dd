"""The operators of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch, masks
from ..reference.attention import empty_output
from ..reference.softmax import wide
from .registry import batch, call, define, differentiate, front, not_twice


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    scale: float,
    lo: int | None,
    hi: int | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    lo, hi = masks.clamp_band(lo, hi, query.shape[2], key.shape[2])
    return dispatch.choose("attention", query, backend).attention_forward(  # type: ignore[no-any-return]
        query, key, value, keep, scale, lo, hi
    )


def _attention_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_output(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=wide(query.dtype))


def _attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    keep: Tensor | None,
    scale: float,
    lo: int | None,
    hi: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    lo, hi = masks.clamp_band(lo, hi, query.shape[2], key.shape[2])
    return dispatch.choose("attention", query, backend).attention_backward(  # type: ignore[no-any-return]
        dout, dlse, query, key, value, out, lse, keep, scale, lo, hi
    )


def _attention_backward_fake(
    dout: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? keep, float scale, SymInt? lo, SymInt? hi, "
    "str backend) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
)
define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    "Tensor? keep, float scale, SymInt? lo, SymInt? hi, str backend) -> (Tensor, Tensor, Tensor)",
    _attention_backward,
    _attention_backward_fake,
)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, keep, ctx.scale, ctx.lo, ctx.hi, ctx.backend = inputs
    ctx.save_for_backward(query, key, value, *output, keep)
    ctx.set_materialize_grads(False)


def _attention_gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, keep = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 8
    gradients = call(
        "attention_backward",
        torch.zeros_like(out) if dout is None else dout,
        dlse, query, key, value, out, lse, keep, ctx.scale, ctx.lo, ctx.hi, ctx.backend,
    )  # fmt: skip
    return (*gradients, None, None, None, None, None)


differentiate("attention", _save_attention, _attention_gradient)
not_twice("attention", "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)")


def _batch_attention(name: str) -> None:
    def fold(value: Any, dim: int | None, size: int) -> Any:
        """(V, B, ...) -> (V * B, ...)."""
        batched = front(value, dim, size)
        return batched.flatten(0, 1) if isinstance(batched, Tensor) else batched

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        result = call(name, *(fold(arg, dim, info.batch_size) for arg, dim in zip(args, in_dims, strict=True)))
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in result), (0,) * len(result)

    batch(name, rule)


_batch_attention("attention")
_batch_attention("attention_backward")
