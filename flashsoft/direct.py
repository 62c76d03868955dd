"""Calls that go past torch's dispatcher, and past all that an earlier call of their kind has settled.

A call's checks, the choice of its backend and the plans of its launches follow from the layouts of its tensors and from
its options. So if all that a call came to was launches, of its own tensors and of what earlier ones gave, for the very
tensors it returned, the next of its kind (`again`) only allocates and launches. `kernels.launch` tells of launches.
"""

from __future__ import annotations

import functools
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
_C, _empty_like = torch._C, torch.empty_like
_is_neg, _get_device, _data_ptr, _stride = Tensor.is_neg, Tensor.get_device, Tensor.data_ptr, Tensor.stride


class Launched(NamedTuple):
    """A launch, and how to repeat it.

    device: the current one.
    watched: whether somebody watches launches, who would not see one that is repeated.
    repeat: launches for inputs and outputs at these addresses; for the caller's list, which it may change.
    """

    inputs: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]
    device: int
    watched: Callable[[], bool]
    repeat: Callable[[list[int | None]], None]


Recipe = Callable[[tuple[Tensor, ...], list[int | None]], list[Tensor] | None]
_known: dict[tuple[Any, ...], Recipe] = {}


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


def unobserved(args: tuple[Any, ...], *, gradient: bool = False) -> bool:
    """Whether an operator would only run: no mode, tracer, profiler or subclass sees it, and no gradient is wanted.

    Or, with `gradient`, whether at most a gradient is wanted.
    """
    if not _unwatched():
        return False
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            if not gradient and arg.requires_grad and torch.is_grad_enabled():
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
    pointers: list[int | None] = []
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
        _known[key] = _recipe(made, tensors, results) or _unknown
    return result


def forget() -> None:
    """Has every call settled anew."""
    _known.clear()


def _recipe(launches: list[Launched], tensors: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Recipe | None:
    """What to do for other tensors in place of a call that came to these launches; None if it came to more.

    Each launch writes all of its outputs, or those that one before it did not.
    """
    absent = any(tensor is None for launched in launches for tensor in (*launched.inputs, *launched.outputs))
    places: list[Tensor | None] = [*tensors, *([None] if absent else [])]
    given = len(places)
    repeats = []
    for launched in launches:
        slots: list[int] = []
        for tensor in launched.inputs:
            found = [i for i, place in enumerate(places) if place is tensor]
            if not found:
                return None
            # a tensor that is given twice stands for each place in its turn
            slots.append(next((i for i in found if i not in slots), found[0]))
        for tensor in launched.outputs:
            if tensor is not None and not any(place is tensor for place in places):
                places.append(tensor)
            slots.append(next(i for i, place in enumerate(places) if place is tensor))
        repeats.append((launched.repeat, slots))
    made = [place for place in places[given:] if place is not None]
    if not all(any(result is place for place in made) for result in results):
        return None
    returned = [next(i for i, place in enumerate(made) if place is result) for result in results]
    like, *layouts = [(t.shape, t.stride(), t.dtype, t.device) for t in (tensors[0], *made)]
    makers = [
        None
        if layout == like
        else functools.partial(torch.empty_strided, *layout[:2], dtype=layout[2], device=layout[3])
        for layout in layouts
    ]
    device, watched, (repeat, slots) = launches[0].device, launches[0].watched, repeats[0]
    alone = makers == [None]
    as_made = returned == list(range(len(made)))
    in_order = len(repeats) == 1 and slots == list(range(len(places)))
    nowhere = len(tensors) if absent else None
    each_in_turn = [s for s in slots if s != nowhere] == [i for i in range(len(places)) if i != nowhere]
    if len({id(tensor) for tensor in tensors}) < len(tensors) and not (len(repeats) == 1 and each_in_turn):
        return None  # which of two places one tensor was meant in cannot be told

    def anew(tensors: tuple[Tensor, ...], pointers: list[int | None]) -> list[Tensor] | None:
        if device != _C._cuda_getDevice() or watched():
            return None
        if absent:
            pointers.append(None)
        if alone:  # as in most calls
            new = [_empty_like(tensors[0])]
            pointers.append(_data_ptr(new[0]))
        else:
            new = [_empty_like(tensors[0]) if maker is None else maker() for maker in makers]
            pointers += map(_data_ptr, new)
        if in_order:
            repeat(pointers)
        else:
            for one, places_of_one in repeats:
                one([pointers[place] for place in places_of_one])
        return new if as_made else [new[i] for i in returned]

    return anew


def _unknown(tensors: tuple[Tensor, ...], pointers: list[int | None]) -> None:
    """For a call that is always to take the ordinary way."""
