"""Calls that go past torch's dispatcher, and past all that an earlier call of their kind has settled.

A call's checks, the choice of its backend and the plan of its launch follow from the layouts of its tensors and from
its options. So if all that a call came to was one launch, of its own tensors for the very tensors it returned, the
next of its kind (`again`) only allocates those and launches. `kernels.launch` tells of launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad
from torch.autograd import profiler as _profiler
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

LIMIT = 4096  # kinds of calls remembered; when there are so many, all are forgotten
_VALUES = frozenset((bool, int, float, str, torch.dtype, type(None)))
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_tracing, _transforming = torch._C._is_tracing, torch._C._are_functorch_transforms_active
# looked up once: a method found on a tensor costs more than what these do
_is_neg, _get_device, _data_ptr, _stride = Tensor.is_neg, Tensor.get_device, Tensor.data_ptr, Tensor.stride


class Launched(NamedTuple):
    """A launch, and how to make it anew: for other inputs at these addresses, giving new outputs.

    `anew` gives None if it cannot: the current device is another, or somebody watches launches.
    """

    inputs: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]
    anew: Callable[[tuple[Tensor, ...], list[int]], list[Tensor] | None]


_known: dict[tuple[Any, ...], Callable[..., list[Tensor] | None]] = {}


class _Call(threading.local):
    launches: list[Launched] | None = None  # those made so far, if there is something to learn from them


under_way = _Call()


def _unwatched() -> bool:
    """No mode, tracer or profiler sees calls."""
    return not (
        _dispatch_modes()
        or _function_modes()
        or _profiler._is_profiler_enabled
        or _forward_ad._current_level >= 0
        or _tracing()
    )


def unobserved(args: tuple[Any, ...]) -> bool:
    """Whether an operator would only run: no gradient is wanted, and no mode, tracer, profiler or subclass sees it."""
    if not _unwatched():
        return False
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            if arg.requires_grad and torch.is_grad_enabled():
                return False
            # the dispatcher resolves negated views, and has what lies on meta or is a zero without memory: no address
            if arg.is_neg() or not arg.data_ptr():
                return False
        elif kind not in _VALUES:
            return False
    return True


def again(ordinary: Callable[..., Any], tensors: tuple[Tensor, ...], *options: Any) -> Any:
    """ordinary(*tensors, *options), which follows from what is in the tensors, their layouts, and the options only."""
    if is_dynamo_compiling() or _transforming() or not _unwatched():
        return ordinary(*tensors, *options)
    pointers: list[int] = []
    problem: list[Any] = [ordinary, options, *map(type, options)]  # 1, 1.0 and True are equal
    try:
        for tensor in tensors:
            if type(tensor) is not Tensor or (tensor.requires_grad and torch.is_grad_enabled()) or _is_neg(tensor):
                return ordinary(*tensors, *options)
            device, pointer = _get_device(tensor), _data_ptr(tensor)
            if device < 0 or not pointer:
                return ordinary(*tensors, *options)
            pointers.append(pointer)
            problem += device, tensor.shape, _stride(tensor), tensor.dtype, pointer & 15
        key = tuple(problem)
        anew = _known.get(key)
    except (RuntimeError, TypeError):  # a layout without strides, an option that cannot be hashed
        return ordinary(*tensors, *options)
    if anew is not None:
        outputs = anew(tensors, pointers)
        if outputs is not None:
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
    made = under_way.launches = []
    try:
        result = ordinary(*tensors, *options)
    finally:
        under_way.launches = None
    if made:
        if len(_known) >= LIMIT:
            _known.clear()
        results = result if isinstance(result, tuple) else (result,)
        _known[key] = made[0].anew if len(made) == 1 and _all_of_it(made[0], tensors, results) else _unknown
    return result


def forget() -> None:
    """Has every call settled anew."""
    _known.clear()


def _all_of_it(launched: Launched, tensors: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> bool:
    """Whether a call did nothing but this launch, on its tensors (and on absent ones after them) for its results."""
    absent = (None,) * (len(launched.inputs) - len(tensors))
    expected, got = (*tensors, *absent, *results), (*launched.inputs, *launched.outputs)
    return len(expected) == len(got) and all(a is b for a, b in zip(expected, got, strict=True))


def _unknown(tensors: tuple[Tensor, ...], pointers: list[int]) -> None:
    """For a call that is always to take the ordinary way."""
