"""How operators are registered: their fakes, gradients and batching rules. Nothing else registers.

An operator chooses its backend when it runs, so that tracing never sees the choice; rows
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

from ..direct import unobserved

NAMESPACE = "flashsoft"
_library = torch.library.Library(NAMESPACE, "DEF")
_ops = getattr(torch.ops, NAMESPACE)
_transforming = torch._C._are_functorch_transforms_active


_implementations: dict[str, Callable[..., Any]] = {}
_transformable: dict[str, type[torch.autograd.Function]] = {}
_eager: dict[str, type[torch.autograd.Function]] = {}


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """An operator: what it runs, and what it gives for tensors without memory."""
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
    if unobserved(args):
        return _implementations[name](*args)
    if name in _eager and unobserved(args, gradient=True):
        return _eager[name].apply(*args)
    return getattr(_ops, name)(*args)


def differentiate(
    name: str, setup: Callable[..., None], backward: Callable[..., Any], *, many_arguments: bool = False
) -> None:
    """Its gradient, under autograd and under torch.func.

    torch.library takes time in the square of the number of arguments to fill in defaults: with `many_arguments`, plain
    calls go past it, through an autograd.Function of the same gradient.
    """
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_library)
    rules = {
        "forward": staticmethod(getattr(_ops, name)),
        "setup_context": staticmethod(setup),
        "backward": staticmethod(backward),
    }
    _transformable[name] = type(name, (torch.autograd.Function,), rules)
    if many_arguments:
        run = {**rules, "forward": staticmethod(_implementations[name])}
        _eager[name] = type(name, (torch.autograd.Function,), run)


def batch(name: str, rule: Callable[..., Any]) -> None:
    """Its batching rule."""
    torch.library.register_vmap(f"{NAMESPACE}::{name}", rule, lib=_library)
    _transformable[name].vmap = staticmethod(rule)  # type: ignore[method-assign]


def not_twice(name: str, instead: str) -> None:
    """Has the backward operator of `name` refuse to be differentiated."""

    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(f"{name} can be differentiated once only; for second derivatives use {instead}")

    differentiate(f"{name}_backward", lambda ctx, inputs, output: None, backward)


# ---- batching (torch.vmap): every operator takes leading dimensions, so the new one goes in front ----


def front(value: Any, dim: int | None, size: int) -> Any:
    """A tensor with the batched dimension in front, expanded if it has none."""
    if not isinstance(value, Tensor):
        return value
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def batch_rows(name: str) -> None:
    """The rule of an operator on rows: the new dimension is one more in front."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        result = call(name, *(front(arg, dim, info.batch_size) for arg, dim in zip(args, in_dims, strict=True)))
        if isinstance(result, Tensor):
            return result, 0
        # an empty placeholder for a gradient that is not needed has no batched dimension
        return result, tuple(0 if t.shape[0] == info.batch_size else None for t in result)

    batch(name, rule)
