"""The operators of cross entropy.

`cross_entropy` gives the losses of rows, from logits or from the states of all slices of the classes, which
`cross_entropy_state` gives of one: so a device and a group of them have the loss and its backward in common.

Where logits become their gradient (`cross_entropy_overwrite`), autograd is told by a second operator, since torch
differentiates none that writes into its arguments: `overwritten` takes what the logits are by then for a constant of
theirs, and saves it, so that whoever writes into them again, or has saved them before, meets torch's own error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..reference.softmax import wide
from .registry import batch, call, define, differentiate, front, not_twice

OP = "cross_entropy"


def _state(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    first: int,
    ignore_index: int,
    smooth: bool,
    softcap: float | None,
    backend: str,
) -> Tensor:
    return dispatch.choose(OP, x, backend).cross_entropy_state_forward(  # type: ignore[no-any-return]
        x, target, weight, first, ignore_index, smooth, softcap
    )


def _state_fake(
    x: Tensor, target: Tensor, weight: Tensor | None, first: int, ignore_index: int, smooth: bool, *_: Any
) -> Tensor:
    kinds = 3 + (weight is not None) + 2 * smooth
    return x.new_empty((kinds, *target.shape), dtype=wide(x.dtype))


def _cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    states: Tensor | None,
    first: int,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return dispatch.choose(OP, x, backend).cross_entropy_forward(  # type: ignore[no-any-return]
        x, target, weight, states, classes, ignore_index, label_smoothing, z_loss, softcap
    )


def _cross_entropy_fake(x: Tensor, target: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, kept, m, slope = (x.new_empty(target.shape, dtype=wide(x.dtype)) for _ in range(4))
    return loss, kept, m, slope


def _cross_entropy_backward(
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
    backend: str,
) -> Tensor:
    return dispatch.choose(OP, x, backend).cross_entropy_backward(  # type: ignore[no-any-return]
        dloss, x, target, weight, m, slope, first, classes, ignore_index, label_smoothing, softcap
    )


define(
    "cross_entropy_state(Tensor x, Tensor target, Tensor? weight, SymInt first, SymInt ignore_index, bool smooth, "
    "float? softcap, str backend) -> Tensor",
    _state,
    _state_fake,
)
define(
    "cross_entropy(Tensor x, Tensor target, Tensor? weight, Tensor? states, SymInt first, SymInt classes, "
    "SymInt ignore_index, float label_smoothing, float z_loss, float? softcap, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _cross_entropy,
    _cross_entropy_fake,
)
define(
    "cross_entropy_backward(Tensor dloss, Tensor x, Tensor target, Tensor? weight, Tensor m, Tensor slope, "
    "SymInt first, SymInt classes, SymInt ignore_index, float label_smoothing, float? softcap, str backend) -> Tensor",
    _cross_entropy_backward,
    lambda dloss, x, *_: torch.empty_like(x),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, target, weight, _, *ctx.before, _, ctx.softcap, ctx.backend = inputs
    _, kept, m, slope = output
    ctx.save_for_backward(x, target, weight, m, slope)
    ctx.mark_non_differentiable(kept, m, slope)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    dx = None
    if dloss is not None:
        dx = call(f"{OP}_backward", dloss, *ctx.saved_tensors, *ctx.before, ctx.softcap, ctx.backend)
    return dx, *(None,) * 10


differentiate(OP, _save, _gradient)
not_twice(OP, "torch.nn.functional.cross_entropy")


def _batch(name: str, rows: tuple[int, ...], results: int) -> None:
    """The rule of an operator whose arguments at `rows` are rows; weights of classes are the same for all."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        given = list(args)
        for i, (arg, dim) in enumerate(zip(args, in_dims, strict=True)):
            if i in rows:
                given[i] = front(arg, dim, info.batch_size)
            elif i == 3 and name == OP and isinstance(arg, Tensor):  # states (kinds, ..., ranks)
                given[i] = front(arg, dim, info.batch_size).movedim(0, 1)
            elif dim is not None:
                raise NotImplementedError(f"{name} takes the same class weights for all of a batch")
        return call(name, *given), 0 if results == 1 else (0,) * results

    batch(name, rule)


_batch(OP, (0, 1), 4)
_batch(f"{OP}_backward", (0, 1, 2, 4, 5), 1)


# ---- logits that become their gradient ------------------------------------------------------------------------


def _overwrite(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    factor: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    backend: str,
) -> Tensor:
    module = dispatch.choose(OP, x, backend)
    loss = module.cross_entropy_overwrite_forward(
        x, target, weight, factor, ignore_index, label_smoothing, z_loss, softcap
    )
    torch.autograd.graph.increment_version(x)
    return loss  # type: ignore[no-any-return]


def _scale(gradient: Tensor, factor: Tensor, backend: str) -> None:
    dispatch.choose(OP, gradient, backend).scale_backward(gradient, factor)
    torch.autograd.graph.increment_version(gradient)


define(
    "cross_entropy_overwrite(Tensor(a!) x, Tensor target, Tensor? weight, Tensor? factor, SymInt ignore_index, "
    "float label_smoothing, float z_loss, float? softcap, str backend) -> Tensor",
    _overwrite,
    lambda x, target, *_: x.new_empty(target.shape, dtype=wide(x.dtype)),
)


def _scaled(gradient: Tensor, factor: Tensor, *_: Tensor | None) -> Tensor:
    return (gradient.to(wide(gradient.dtype)) * factor).to(gradient.dtype)


define("scale(Tensor(a!) gradient, Tensor factor, str backend) -> ()", _scale, lambda *_: None)
define(
    "scaled(Tensor gradient, Tensor factor, Tensor? of, Tensor? also_of, Tensor? and_of) -> Tensor",
    _scaled,
    lambda gradient, *_: torch.empty_like(gradient),
)
define(
    "overwritten(Tensor gradient, Tensor loss, str backend) -> Tensor",
    lambda gradient, loss, backend: loss.clone(),
    lambda gradient, loss, backend: torch.empty_like(loss),
)


def _save_overwritten(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gradient, _, ctx.backend = inputs
    ctx.save_for_backward(gradient)


def _overwritten_gradient(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
    (gradient,) = ctx.saved_tensors
    return times(gradient, dloss, (gradient, None, None), ctx.backend), None, None


def _scaled_gradient(ctx: Any, g: Tensor) -> None:
    raise RuntimeError(
        "a cross entropy whose gradient is computed in the forward can be differentiated once only; for second "
        "derivatives use torch.nn.functional.cross_entropy"
    )


differentiate("overwritten", _save_overwritten, _overwritten_gradient)
differentiate("scaled", lambda ctx, inputs, output: None, _scaled_gradient)


def traced() -> bool:
    """Whether somebody traces or transforms what runs, and would have to be told of a write."""
    transforming = torch._C._are_functorch_transforms_active()
    return torch.compiler.is_compiling() or transforming or torch._C._len_torch_dispatch_stack() > 0


def times(gradient: Tensor, factor: Tensor, of: tuple[Tensor | None, ...], backend: str) -> Tensor:
    """A gradient from the forward, of `of`, times a scalar: where it lies, unless it may be differentiated again."""
    own = gradient.detach()
    if torch.is_grad_enabled() or traced():
        return call("scaled", own, factor, *of)  # type: ignore[no-any-return]
    call("scale", own, factor, backend)
    return own
