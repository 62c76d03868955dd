"""The operators of attention: query, key and value, and `Terms` field by field."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch, masks
from ..reference.scores import empty_output
from ..reference.softmax import wide
from ..terms import Gradients, Terms
from .registry import call, define, differentiate, not_twice
from .vmap_attention import batch_attention

_TENSORS = Terms._fields[: Terms._fields.index("scale")]
_TERMS = (
    "".join(f"Tensor? {name}, " for name in _TENSORS)
    + "float scale, float? softcap, float dropout_p, SymInt? lo, SymInt? hi, bool lower_right, "
    + "SymInt max_q, SymInt max_k"
)
_NEEDS = ", ".join(f"bool need_{name}" for name in Gradients._fields)
# where the tensors that may have a gradient stand among the arguments of attention
_PLACES = tuple((*("query", "key", "value"), *Terms._fields).index(name) for name in Gradients._fields)
_END = 3 + len(Terms._fields)


def _clamped(query: Tensor, key: Tensor, terms: Terms) -> Terms:
    """The same with a band that 32-bit arithmetic on positions cannot overflow."""
    if terms.lo is None and terms.hi is None:
        return terms
    rows, columns = (query.shape[2], key.shape[2]) if terms.cu_q is None else (terms.max_q, terms.max_k)
    # from the last query and key, j - i lies within -columns..rows
    sizes = (columns, rows) if terms.lower_right else (rows, columns)
    lo, hi = masks.clamp_band(terms.lo, terms.hi, *sizes)
    return terms if (lo, hi) == (terms.lo, terms.hi) else terms._replace(lo=lo, hi=hi)


def _attention(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    terms = _clamped(query, key, Terms(*options[:-1]))
    backend = dispatch.choose_attention(query, key, value, terms, options[-1])
    return backend.attention_forward(query, key, value, terms)  # type: ignore[no-any-return]


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
    *options: Any,
) -> tuple[Tensor, ...]:
    terms, needs = _clamped(query, key, Terms(*options[: _END - 3])), options[_END - 3 : -1]
    backend = dispatch.choose_attention(query, key, value, terms, options[-1])
    gradients = backend.attention_backward(dout, dlse, query, key, value, out, lse, terms, needs)
    return tuple(
        query.new_empty(0) if gradient is None else gradient if place < 3 else gradient.contiguous()
        for place, gradient in zip(_PLACES, gradients, strict=True)
    )


def _attention_backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:
    tensors = (query, key, value, *options)
    return tuple(
        query.new_empty(0)
        if not need
        else torch.empty_like(tensors[place])
        if place < 3
        else tensors[place].new_empty(tensors[place].shape)
        for place, need in zip(_PLACES, options[_END - 3 : -1], strict=True)
    )


define(
    f"attention(Tensor query, Tensor key, Tensor value, {_TERMS}, str backend) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
)
define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"{_TERMS}, {_NEEDS}, str backend) -> ({', '.join(['Tensor'] * len(_PLACES))})",
    _attention_backward,
    _attention_backward_fake,
)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.options = inputs[3 + len(_TENSORS) :]
    ctx.save_for_backward(*inputs[: 3 + len(_TENSORS)], *output)
    ctx.set_materialize_grads(False)


def _attention_gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients: list[Tensor | None] = [None] * (_END + 1)
    needs = tuple(ctx.needs_input_grad[place] for place in _PLACES)
    if (dout is None and dlse is None) or not any(needs):
        return tuple(gradients)
    query, key, value, *tensors, out, lse = ctx.saved_tensors
    *numbers, backend = ctx.options
    made = call(
        "attention_backward",
        torch.zeros_like(out) if dout is None else dout,
        dlse, query, key, value, out, lse, *tensors, *numbers, *needs, backend,
    )  # fmt: skip
    for place, need, gradient in zip(_PLACES, needs, made, strict=True):
        gradients[place] = gradient if need else None
    return tuple(gradients)


differentiate("attention", _save_attention, _attention_gradient, many_arguments=True)
not_twice("attention", "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)")
batch_attention()
