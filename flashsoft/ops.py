"""The registered operators: one boundary a public call, its fake, its gradient and its batching rule.

Nothing else registers. An operator chooses its backend when it runs, so that tracing never sees the choice; rows
lie along the last dimension, and options come resolved (masks as a band and a boolean tensor).

`call` runs an operator: at once where torch's dispatcher would do no more than that. Under a
transform of torch.func it goes through an autograd.Function made of the same gradient and batching rule, since torch
transforms those but not what torch.library differentiates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .direct import unobserved
from .dispatch import choose
from .reference import empty_output, wide

NAMESPACE = "flashsoft"
_library = torch.library.Library(NAMESPACE, "DEF")
_ops = getattr(torch.ops, NAMESPACE)
_transforming = torch._C._are_functorch_transforms_active


def _band(lo: int | None, hi: int | None, Sq: int, Sk: int) -> tuple[int | None, int | None]:
    """The same band with bounds that 32-bit arithmetic on positions cannot overflow: j - i lies within -Sq..Sk."""
    if lo is not None and hi is not None and lo > hi:
        return Sk, -Sq  # nothing is visible, and so nothing is to be loaded either
    return None if lo is None else max(-Sq, min(lo, Sk)), None if hi is None else max(-Sq, min(hi, Sk))


_implementations: dict[str, Callable[..., Any]] = {}
_transformable: dict[str, type[torch.autograd.Function]] = {}


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema[: schema.index("(")]
    _implementations[name] = run
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def call(name: str, *args: Any) -> Any:
    """The operator of that name."""
    if is_dynamo_compiling():  # whatever else traces has a mode
        return getattr(_ops, name)(*args)
    if _transforming():
        return _transformable[name].apply(*args)
    return _implementations[name](*args) if unobserved(args) else getattr(_ops, name)(*args)


def _differentiate(name: str, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_library)
    rules = {
        "forward": staticmethod(getattr(_ops, name)),
        "setup_context": staticmethod(setup),
        "backward": staticmethod(backward),
    }
    _transformable[name] = type(name, (torch.autograd.Function,), rules)


def _batch(name: str, rule: Callable[..., Any]) -> None:
    torch.library.register_vmap(f"{NAMESPACE}::{name}", rule, lib=_library)
    _transformable[name].vmap = staticmethod(rule)  # type: ignore[method-assign]


def _not_twice(name: str, instead: str) -> None:
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(f"{name} can be differentiated once only; for second derivatives use {instead}")

    _differentiate(f"{name}_backward", lambda ctx, inputs, output: None, backward)


# ---- rows --------------------------------------------------------------------------------------------------------


def _softmax(x: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    return choose("softmax", x, backend).softmax_forward(x, dtype)  # type: ignore[no-any-return]


def _softmax_backward(dy: Tensor, y: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    return choose("softmax", y, backend).softmax_backward(dy, y, dtype)  # type: ignore[no-any-return]


def _log_softmax(x: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    return choose("log_softmax", x, backend).log_softmax_forward(x, dtype)  # type: ignore[no-any-return]


def _log_softmax_backward(dy: Tensor, y: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    return choose("log_softmax", y, backend).log_softmax_backward(dy, y, dtype)  # type: ignore[no-any-return]


def _logsumexp(x: Tensor, backend: str) -> Tensor:
    return choose("logsumexp", x, backend).logsumexp_forward(x)  # type: ignore[no-any-return]


def _logsumexp_backward(dlse: Tensor, x: Tensor, lse: Tensor, backend: str) -> Tensor:
    return choose("logsumexp", x, backend).logsumexp_backward(dlse, x, lse)  # type: ignore[no-any-return]


for _name, _run, _run_backward in (
    ("softmax", _softmax, _softmax_backward),
    ("log_softmax", _log_softmax, _log_softmax_backward),
):
    _define(
        f"{_name}(Tensor x, ScalarType dtype, str backend) -> Tensor",
        _run,
        lambda x, dtype, backend: torch.empty_like(x, dtype=dtype),
    )
    _define(
        f"{_name}_backward(Tensor dy, Tensor y, ScalarType dtype, str backend) -> Tensor",
        _run_backward,
        lambda dy, y, dtype, backend: torch.empty_like(y, dtype=dtype),
    )
_define(
    "logsumexp(Tensor x, str backend) -> Tensor",
    _logsumexp,
    lambda x, backend: x.new_empty(x.shape[:-1], dtype=wide(x.dtype)),
)
_define(
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


_differentiate("softmax", _save_result, _softmax_gradient)
_differentiate("log_softmax", _save_result, _log_softmax_gradient)


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


_differentiate("softmax_backward", _save_gradient_and_result, _softmax_second)
_differentiate("log_softmax_backward", _save_gradient_and_result, _log_softmax_second)


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


_differentiate("logsumexp", _save_logsumexp, _logsumexp_gradient)
_differentiate("logsumexp_backward", _save_logsumexp_backward, _logsumexp_second)


# ---- logits ------------------------------------------------------------------------------------------------------


def _one_of(number: Any, tensor: Tensor | None) -> Any:
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
        lo, hi = _band(lo, hi, x.shape[-2], x.shape[-1])
    return choose("fused_softmax", x, backend).fused_softmax_forward(  # type: ignore[no-any-return]
        x, _one_of(temperature, row_temperature), keep, lo, hi, bias, _one_of(top_k, row_top_k)
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
    dx, dtemperature, dbias = choose("fused_softmax", x, backend).fused_softmax_backward(
        dy, dlse, x, y, _one_of(temperature, row_temperature), bias, need_temperature
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


_define(
    "fused_softmax(Tensor x, float temperature, Tensor? row_temperature, Tensor? keep, SymInt? lo, SymInt? hi, "
    "Tensor? bias, SymInt? top_k, Tensor? row_top_k, str backend) -> (Tensor, Tensor)",
    _fused_softmax,
    _fused_softmax_fake,
)
_define(
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


_differentiate("fused_softmax", _save_fused_softmax, _fused_softmax_gradient)
_not_twice("fused_softmax", "torch.softmax on scores masked by torch.where")


# ---- attention ---------------------------------------------------------------------------------------------------


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
    lo, hi = _band(lo, hi, query.shape[2], key.shape[2])
    return choose("attention", query, backend).attention_forward(  # type: ignore[no-any-return]
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
    lo, hi = _band(lo, hi, query.shape[2], key.shape[2])
    return choose("attention", query, backend).attention_backward(  # type: ignore[no-any-return]
        dout, dlse, query, key, value, out, lse, keep, scale, lo, hi
    )


def _attention_backward_fake(
    dout: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? keep, float scale, SymInt? lo, SymInt? hi, "
    "str backend) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
)
_define(
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


_differentiate("attention", _save_attention, _attention_gradient)
_not_twice("attention", "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)")


# ---- batching (torch.vmap): every operator takes leading dimensions, so the new one goes in front --------------------


def _front(value: Any, dim: int | None, size: int) -> Any:
    """A tensor with the batched dimension in front, expanded if it has none."""
    if not isinstance(value, Tensor):
        return value
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def _batch_rows(name: str) -> None:
    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        result = call(name, *(_front(arg, dim, info.batch_size) for arg, dim in zip(args, in_dims, strict=True)))
        if isinstance(result, Tensor):
            return result, 0
        # an empty placeholder for a gradient that is not needed has no batched dimension
        return result, tuple(0 if t.shape[0] == info.batch_size else None for t in result)

    _batch(name, rule)


def _batch_attention(name: str) -> None:
    def fold(value: Any, dim: int | None, size: int) -> Any:
        """(V, B, ...) -> (V * B, ...)."""
        front = _front(value, dim, size)
        return front.flatten(0, 1) if isinstance(front, Tensor) else front

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        result = call(name, *(fold(arg, dim, info.batch_size) for arg, dim in zip(args, in_dims, strict=True)))
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in result), (0,) * len(result)

    _batch(name, rule)


for _name in ("softmax", "log_softmax", "logsumexp", "fused_softmax"):
    _batch_rows(_name)
    _batch_rows(f"{_name}_backward")
_batch_attention("attention")
_batch_attention("attention_backward")
