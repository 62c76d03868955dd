"""Tensor maps: how the copy engine of a GPU sees a tensor, and launches of kernels that take them.

Triton's launcher has every map of a launch encoded anew and sorts the arguments in Python, which costs the host more
than the launch itself. What it calls in the end takes a map as an object, its shape and its strides. So a problem's
arguments are made once, as Triton makes them, and a launch puts in addresses, and the maps for them. Memory comes back
at the same addresses, so maps are remembered by these.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

LIMIT = 256  # addresses remembered for a parameter of a problem, about 300 bytes each
_C = torch._C


class TensorMap(NamedTuple):
    """What Gluon's TensorDescriptor says of a tensor but for its address; `offset` elements from the tensor's first."""

    block: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    layout: Any

    def of(self, tensor: Tensor) -> Any:
        """The descriptor of a tensor."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        base = tensor.as_strided((1,), (1,), tensor.storage_offset() + self.offset)
        return TensorDescriptor(base, list(self.shape), list(self.strides), list(self.block), self.layout)

    def at(self, pointer: int, itemsize: int) -> Any:
        """As much of the descriptor of the tensor at an address as Triton's launcher asks for."""
        base = _Address(pointer + self.offset * itemsize)
        return types.SimpleNamespace(
            base=base, shape=list(self.shape), strides=list(self.strides), padding="zero", round_f32_to_tf32=False
        )


class _Address(NamedTuple):
    pointer: int

    def data_ptr(self) -> int:
        return self.pointer


class Mapped(NamedTuple):
    """A parameter that is a map: its number, the map, bytes an element, and the address it was first launched with."""

    parameter: int
    map: TensorMap
    itemsize: int
    address: int


def starter_of_maps(
    compiled: Any,
    device: int,
    programs: int,
    scratch: Callable[[int], Tensor] | None,
    mapped: list[Mapped],
    tensors: int,
    args: tuple[Any, ...],
) -> Callable[[list[Any]], None]:
    """Starts a launch for `tensors` first parameters at the addresses in the caller's list, then `args`.

    `mapped` are in the order of the parameters, as what Triton makes of them is.
    """
    run = compiled.run
    known = (compiled.function, compiled.packed_metadata, None, None, None)  # the Nones: no hooks
    stream, marks = object(), [object() for _ in range(tensors)]

    def as_tritons(given: list[Any]) -> tuple[Any, ...]:
        """The parameters as Triton's launcher takes them; what is no address stands for that of the first launch."""
        parameters = list(given)
        for place, tensor_map, itemsize, address in mapped:
            pointer = given[place] if isinstance(given[place], int) else address
            parameters[place] = tensor_map.at(pointer, itemsize)
        return (*parameters, *args)

    def start_tritons_way(given: list[Any], held: Any = compiled) -> None:
        now = _C._cuda_getCurrentRawStream(device)
        if scratch is not None:
            given.append(scratch(now).data_ptr())
        run(programs, 1, 1, now, *known, *as_tritons(given))

    bare = _bare(run)
    if bare is None:
        return start_tritons_way
    function, record = bare
    final = record(programs, 1, 1, stream, *known, *as_tritons(list(marks)))
    of_maps = [i for i, x in enumerate(final) if type(x).__name__ == "PyCUtensorMap"]
    plain = [(final.index(mark), i) for i, mark in enumerate(marks) if mark in final]
    if len(of_maps) != len(mapped) or len(plain) != tensors - len(mapped) or final[3] is not stream:
        return start_tritons_way
    remembered: list[dict[int, Any]] = [{} for _ in mapped]
    places = list(zip(of_maps, [m.parameter for m in mapped], remembered, strict=True))

    def encoded(place: int, parameter: int, pointer: int) -> Any:
        """The map of a parameter for an address."""
        given: list[Any] = [None] * tensors
        given[parameter] = pointer
        return record(programs, 1, 1, stream, *known, *as_tritons(given))[place]

    # held: a compiled kernel that nobody holds is unloaded
    def start(given: list[Any], held: Any = compiled) -> None:
        arguments = final.copy()
        arguments[3] = now = _C._cuda_getCurrentRawStream(device)
        if scratch is not None:
            given.append(scratch(now).data_ptr())
        for place, parameter, maps in places:
            pointer = given[parameter]
            made = maps.get(pointer)
            if made is None:
                if len(maps) >= LIMIT:
                    maps.clear()
                made = maps[pointer] = encoded(place, parameter, pointer)
            arguments[place] = made
        for place, parameter in plain:
            arguments[place] = given[parameter]
        function(*arguments)

    return start


def _bare(run: Any) -> tuple[Callable[..., Any], Callable[..., list[Any]]] | None:
    """What a launcher of Triton's ends in, and a function that gives what it would be called with."""
    sort = getattr(run, "launch", None)
    names = getattr(getattr(sort, "__code__", None), "co_freevars", ())
    if "launcher" not in names or not getattr(run, "global_scratch_size", 1) == run.profile_scratch_size == 0:
        return None
    given: list[Any] = []
    cells = list(sort.__closure__)
    function = cells[names.index("launcher")].cell_contents
    cells[names.index("launcher")] = types.CellType(lambda *args: given.extend(args))
    stand_in = copy.copy(run)
    stand_in.launch = types.FunctionType(
        sort.__code__, sort.__globals__, sort.__name__, sort.__defaults__, tuple(cells)
    )

    def record(*args: Any) -> list[Any]:
        given.clear()
        stand_in(*args)
        return list(given)

    return function, record
