"""How kernels are started: a problem once in Triton's own way, and from then on with what that launch made ready.

`kernel[grid](...)` costs the host 12 us, most of them to find the compiled kernel that suits its arguments. Which one
does follows from the layouts, the options and the device of a problem, so it is remembered by them: the next launch
is one call of the function that `kernel[grid](...)` ends in, with the same arguments.

Whatever watches launches or changes them sees every launch, started in Triton's own way: hooks of profilers, Triton's
debug and instrumentation modes, a driver that only compiles, the interpreter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .. import direct
from .tensor_maps import Mapped, TensorMap, starter_of_maps

LIMIT = 4096  # problems remembered, about 1 KB each; when there are so many, all are forgotten


class Launch(NamedTuple):
    """How to launch a kernel whose first parameters are tensors: inputs, outputs, and scratch if there is any.

    args: the parameters after the tensors; options: the constants, by name, and what Triton takes beside parameters.
    scratch: gives a tensor for a stream (the number of a CUDA stream; 0 on the CPU).
    maps: which of the inputs and outputs the kernel takes as tensor maps.
    """

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    options: dict[str, Any]
    scratch: Callable[[int], Tensor] | None = None
    maps: Mapping[int, TensorMap] = MappingProxyType({})


class _Launcher(NamedTuple):
    """What starts a compiled kernel: run(programs, 1, 1, stream, *known, *parameters), or their tuple if `packed`."""

    run: Callable[..., Any]
    known: tuple[Any, ...]
    packed: bool


Tensors = Sequence[Tensor | None]
_runtime, _compilation = triton.knobs.runtime, triton.knobs.compilation
_enter, _leave = type(_runtime).launch_enter_hook, type(_runtime).launch_exit_hook  # unless set
_set, _set_to_compile = vars(_runtime), vars(_compilation)  # knobs that have been set
_C = torch._C
_ready: dict[tuple[Any, ...], Callable[[list[Any]], None]] = {}  # what `_starter` gave


def launch(plan: Callable[..., Launch], inputs: Tensors, outputs: Tensors, *options: Any) -> None:
    """Launches `plan(inputs, outputs, *options)` on the inputs' device, on the current stream there.

    The plan, and the layouts and dtypes of the outputs, must follow from the options, all hashable, the layouts and
    dtypes of the inputs, and the device; the plan is then made once for each. See `forget`.
    """
    first = inputs[0]
    if first is None:
        first = next(tensor for tensor in inputs if tensor is not None)
    device = first.get_device()
    if device < 0:
        _start(plan(inputs, outputs, *options), inputs, outputs, 0)
        return
    if device != _C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(plan, inputs, outputs, *options)
        return
    pointers: list[int | None] = []
    problem: list[Any] = [plan, options, device]
    for tensor in inputs:
        if tensor is None:
            pointers.append(None)
            problem.append(None)
        else:
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            problem += (tensor.shape, tensor.stride(), tensor.dtype, pointer & 15)
    for tensor in outputs:
        pointer = None if tensor is None else tensor.data_ptr()
        pointers.append(pointer)
        problem.append(None if pointer is None else pointer & 15)
    key = tuple(problem)
    ready = _ready.get(key)
    if ready is None or _watched():
        made = plan(inputs, outputs, *options)
        compiled = _start(made, inputs, outputs, _C._cuda_getCurrentRawStream(device))
        if not _watched():
            _remember(key, device, made, (*inputs, *outputs), compiled)
    else:
        ready(pointers)
    launches = direct.under_way.launches
    if launches is not None and key in _ready:
        launches.append(direct.Launched(inputs, outputs, device, _watched, _ready[key]))


def forget() -> None:
    """Has every plan made anew; for whoever changes a table of tiles that plans were made from."""
    _ready.clear()
    direct.forget()


def _start(made: Launch, inputs: Tensors, outputs: Tensors, stream: int) -> Any:
    """A launch in Triton's own way; the compiled kernel, if there is one."""
    scratch = () if made.scratch is None else (made.scratch(stream),)
    tensors = [
        made.maps[i].of(tensor) if i in made.maps and tensor is not None else tensor
        for i, tensor in enumerate((*inputs, *outputs))
    ]
    return made.kernel[(made.programs,)](*tensors, *scratch, *made.args, **made.options)


def _watched() -> bool:
    """Whether somebody has asked Triton to tell of launches, or to build kernels differently."""
    if not (_set or _set_to_compile or _enter.calls or _leave.calls):
        return False
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook  # chains, or what was put in their place
    return bool(
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or _runtime.debug
        or _runtime.add_stages_inspection_hook
        or _compilation.instrumentation_mode
    )


def _remember(key: tuple[Any, ...], device: int, made: Launch, given: Tensors, compiled: Any) -> None:
    """Keeps what a launch made ready. Not the interpreter's, nor ROCm's, which compiles by sizes of storages too."""
    if not isinstance(compiled, triton.compiler.CompiledKernel) or compiled.metadata.target.backend != "cuda":
        return
    tensors = len(given) + (made.scratch is not None)
    parameters = made.kernel.signature.parameters
    constants = [
        made.options.get(name, parameters[name].default) for name in list(parameters)[tensors + len(made.args) :]
    ]
    if len(_ready) >= LIMIT:
        _ready.clear()
    if made.maps:
        mapped = [
            Mapped(i, tensor_map, tensor.itemsize, tensor.data_ptr())
            for i, tensor_map in sorted(made.maps.items())
            if (tensor := given[i]) is not None
        ]
        args = (*made.args, *constants)
        _ready[key] = starter_of_maps(compiled, device, made.programs, made.scratch, mapped, tensors, args)
    else:
        _ready[key] = _starter(compiled, device, made, constants)


def _starter(compiled: Any, device: int, made: Launch, constants: list[Any]) -> Callable[[list[Any]], None]:
    """Starts a launch for tensors at the addresses in the caller's list, which it may change."""
    run, known, packed = _launcher(compiled)
    programs, scratch, args = made.programs, made.scratch, (*made.args, *constants)

    # held: a compiled kernel that nobody holds is unloaded
    def start(pointers: list[Any], held: Any = compiled) -> None:
        stream = _C._cuda_getCurrentRawStream(device)
        if scratch is not None:
            pointers.append(scratch(stream).data_ptr())
        if packed:
            run(programs, 1, 1, stream, *known, (*pointers, *args))
        else:
            run(programs, 1, 1, stream, *known, *pointers, *args)

    return start


def _launcher(compiled: Any) -> _Launcher:
    """What starts a compiled kernel: the C function that Triton's launcher calls, if that only adds what is known."""
    run, known = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)  # the Nones: no hooks
    if getattr(run, "global_scratch_size", 1) == getattr(run, "profile_scratch_size", 1) == 0:
        stand_in, stream, parameter = copy.copy(run), object(), object()
        given: list[Any] = []
        stand_in.launch = lambda *args: given.extend(args)
        stand_in(1, 1, 1, stream, *known, parameter)
        last = given[-1]
        if given[:4] == [1, 1, 1, stream] and last in (parameter, (parameter,)):
            return _Launcher(run.launch, tuple(given[4:-1]), last is not parameter)
    return _Launcher(run, known, False)
