"""Launches from what an earlier one made ready, and calls that go past torch's dispatcher: when, and with what."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
import torch
from test_dispatch import run_python
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashsoft
from flashsoft import direct, ops

if not conftest.HAS_TRITON:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton

from flashsoft.kernels import exchange
from flashsoft.kernels import launch as launching
from flashsoft.kernels.launch import Launch, launch

# ---- launches, on a GPU that is not here -------------------------------------------------------------------


class Placed:
    """As much of a CUDA tensor as a launch asks about."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, skip: int = 0, device: int = 0) -> None:
        self.on_cpu = torch.zeros(*shape, dtype=dtype).flatten()[skip:]
        self.device_index = device

    def get_device(self) -> int:
        return self.device_index

    def __getattr__(self, name: str) -> Any:
        return getattr(self.on_cpu, name)


class Machine:
    """Two GPUs, and what was launched on them: in Triton's own way (slow) or from what was made ready (fast)."""

    def __init__(self) -> None:
        self.device, self.stream = 0, 70
        self.slow: list[tuple[Any, ...]] = []
        self.fast: list[tuple[Any, ...]] = []
        self.signature = inspect.signature(lambda x, y, n, BLOCK, FLAG=True: None)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def start(*args: Any, **options: Any) -> Any:
            self.slow.append((self.device, grid, *args, options))
            return self.compiled("cuda")

        return start

    def compiled(self, backend: str) -> Any:
        kernel = object.__new__(triton.compiler.CompiledKernel)
        kernel.__dict__.update(
            metadata=SimpleNamespace(target=SimpleNamespace(backend=backend)),
            module=None,
            function=5,
            packed_metadata=(4, 1, 0),
            _run=lambda *args: self.fast.append((self.device, *args)),
        )
        return kernel

    def plan(self, inputs: Any, outputs: Any, *options: Any) -> Launch:
        return Launch(self, 3, (inputs[0].shape[0],), {"BLOCK": 64, "num_warps": 2})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, made.device = made.device, index
        yield
        made.device = before

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: made.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: made.stream + device, raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launching, "_ready", {})
    yield made


def test_the_second_launch_is_a_call_of_the_launcher(machine: Machine) -> None:
    x, y = Placed(128), Placed(128)
    launch(machine.plan, (x,), (y,), "option")
    assert machine.slow == [(0, (3,), x, y, 128, {"BLOCK": 64, "num_warps": 2})] and not machine.fast
    machine.stream = 90
    z = Placed(128)
    launch(machine.plan, (x,), (z,), "option")
    assert len(machine.slow) == 1
    # the current stream, no hooks, and every parameter in its place, constants and defaults too
    pointers = (x.data_ptr(), z.data_ptr())
    assert machine.fast == [(0, 3, 1, 1, 90, 5, (4, 1, 0), None, None, None, *pointers, 128, 64, True)]


@pytest.mark.parametrize(
    "inputs, outputs, options",
    [
        ((Placed(144),), (Placed(128),), (1,)),
        ((Placed(129),), (Placed(128),), (1,)),
        ((Placed(129, skip=1),), (Placed(128),), (1,)),
        ((Placed(128),), (Placed(129, skip=1),), (1,)),
        ((Placed(128, dtype=torch.bfloat16),), (Placed(128),), (1,)),
        ((Placed(128), None), (Placed(128),), (1,)),
        ((Placed(128),), (None,), (1,)),
        ((Placed(128),), (Placed(128),), (2,)),
        ((Placed(128, device=1),), (Placed(128, device=1),), (1,)),
    ],
    ids=["size", "odd", "address", "output-address", "dtype", "absent", "no-output", "option", "device"],
)
def test_another_problem_is_planned_anew(machine: Machine, inputs: Any, outputs: Any, options: Any) -> None:
    launch(machine.plan, (Placed(128),), (Placed(128),), 1)
    launch(machine.plan, inputs, outputs, *options)
    assert len(machine.slow) == 2 and not machine.fast
    launch(machine.plan, inputs, outputs, *options)
    assert len(machine.slow) == 2 and len(machine.fast) == 1


def test_strides_are_part_of_the_problem(machine: Machine) -> None:
    x = Placed(16, 16)
    for view in (x.view(16, 16), x.view(16, 16).t(), x.view(16, 16)[:, ::2], x.view(16, 16)[:8]):
        x.on_cpu = view
        launch(machine.plan, (x,), (x,))
    assert len(machine.slow) == 4


def test_a_launch_is_on_the_device_of_its_tensors(machine: Machine) -> None:
    x = Placed(128, device=1)
    for _ in range(2):
        launch(machine.plan, (x,), (x,))
        assert machine.device == 0
    assert machine.slow[0][0] == 1
    assert machine.fast[0][:5] == (1, 3, 1, 1, 71)


@pytest.mark.parametrize("knob", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_see_every_launch(machine: Machine, knob: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(*_: Any) -> None:
        pass

    x = Placed(128)
    launch(machine.plan, (x,), (x,))
    chain = getattr(triton.knobs.runtime, knob)
    chain.add(hook)
    try:
        launch(machine.plan, (x,), (x,))
        launch(machine.plan, (x,), (x,))
        assert len(machine.slow) == 3
    finally:
        chain.remove(hook)
    launch(machine.plan, (x,), (x,))
    assert len(machine.fast) == 1
    monkeypatch.setattr(triton.knobs.runtime, knob, hook)  # in place of the chain
    launch(machine.plan, (x,), (x,))
    assert len(machine.slow) == 4


@pytest.mark.parametrize(
    "knobs, name, value",
    [
        (triton.knobs.runtime, "debug", True),
        (triton.knobs.compilation, "instrumentation_mode", "consan"),
        (triton.knobs.runtime, "add_stages_inspection_hook", lambda *_: None),
    ],
)
def test_what_changes_how_kernels_are_built_is_obeyed(
    machine: Machine, knobs: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = Placed(128)
    monkeypatch.setattr(knobs, name, value)
    launch(machine.plan, (x,), (x,))  # and not remembered
    monkeypatch.undo()
    assert not launching._ready


def test_problems_remembered_are_bounded_and_can_be_forgotten(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "LIMIT", 3)
    for n in range(1, 9):
        launch(machine.plan, (Placed(n),), (Placed(n),))
        assert 1 <= len(launching._ready) <= 3
    launch(machine.plan, (Placed(8),), (Placed(8),))
    assert len(machine.slow) == 8 and len(machine.fast) == 1
    launching.forget()
    launch(machine.plan, (Placed(8),), (Placed(8),))
    assert len(machine.slow) == 9


def test_scratch_is_asked_for_at_each_launch(machine: Machine) -> None:
    boards: dict[int, Any] = {70: Placed(4), 90: Placed(4)}
    machine.signature = inspect.signature(lambda x, board, n, BLOCK: None)
    x = Placed(128)
    for machine.stream in (70, 90, 70):
        launch(scratched, (x,), (), machine, boards.get)
    assert machine.slow[0][2:5] == (x, boards[70], 128)
    assert [call[10:] for call in machine.fast] == [
        (x.data_ptr(), boards[stream].data_ptr(), 128, 64) for stream in (90, 70)
    ]


def scratched(inputs: Any, outputs: Any, machine: Machine, board: Any) -> Launch:
    return machine.plan(inputs, outputs)._replace(scratch=board)


def test_nothing_of_the_interpreter_or_of_rocm_is_remembered(machine: Machine) -> None:
    for result in (None, machine.compiled("hip")):
        machine.compiled = lambda backend, result=result: result  # type: ignore[method-assign]
        launch(machine.plan, (Placed(128),), (Placed(128),))
        assert not launching._ready


def test_tensors_on_the_cpu_are_always_launched_in_tritons_own_way(machine: Machine) -> None:
    x = torch.zeros(128)
    for _ in range(2):
        launch(machine.plan, (x,), (x,))
    assert len(machine.slow) == 2 and not launching._ready


# a driver that launches nothing and keeps what it was given
DRY = """
import sys
sys.path.insert(0, "tests")
import torch, triton
from gate import Driver, target_of

calls = []

class Dry(Driver):
    def launcher_cls(self, src, metadata):
        return lambda *args: calls.append(args)
    def load_binary(self, *_):
        return 1, 2, 3, 0, 1024
    def unload_module(self, *_):
        pass

torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream = lambda: 0, lambda device: 0
triton.runtime.driver.set_active(Dry(target_of("90")))
"""

DRY_RUN = (
    DRY
    + """
from flashsoft.kernels import backward, forward, launch, logits, logits_backward
from flashsoft.tuning import attention


class Placed(torch.Tensor):
    def get_device(self):
        return 0

def on(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype).as_subclass(Placed)

def same(a, b):
    a, b = (x.data_ptr() if isinstance(x, torch.Tensor) else x for x in (a, b))
    return a == b and type(a) is type(b)

q, k, v = on(1, 4, 40, 64), on(1, 2, 56, 64), on(1, 2, 56, 64)
x, wide, rows, bias = on(8, 100), on(2, 40000), on(8, 1, dtype=torch.float32), on(1, 100)
for call in (
    lambda: forward.attention_forward(q, k, v, None, 0.125, None, 16),
    lambda: forward.attention_forward(q, k, v, on(1, 4, 40, 56, dtype=torch.bool), -1.0, None, None),
    lambda: backward.attention_backward(
        q, None, q, k, v, q, on(1, 4, 40, dtype=torch.float32), None, 0.125, -16, 1
    ),
    lambda: logits.fused_softmax_forward(x, 0.7, None, None, None, None, 50),
    lambda: logits.fused_softmax_forward(wide, 1.0, None, None, 1, None, None),
    lambda: logits.fused_softmax_forward(x, rows, on(8, 100, dtype=torch.bool), None, None, bias, None),
    lambda: logits_backward.fused_softmax_backward(x, None, x, x, 0.7, bias, False),
):
    calls.clear()
    launch.forget()
    call()
    first, remembered = list(calls), len(launch._ready)
    calls.clear()
    call()
    assert remembered == len(first) == len(calls) == len(launch._ready) > 0
    for one, other in zip(first, calls, strict=True):
        # grid, stream, function and metadata; between them and the parameters, the launch's metadata and hooks
        assert one[:6] == other[:6] and other[6:9] == (None, None, None) and len(one) == len(other)
        tensors = [i for i, a in enumerate(one) if isinstance(a, torch.Tensor)]
        assert all(isinstance(other[i], int) and other[i] % 16 == one[i].data_ptr() % 16 for i in tensors)
        assert all(same(a, b) for i, (a, b) in enumerate(zip(one, other)) if i not in (*tensors, 6, 7, 8))
print("same")
"""
)


def test_a_remembered_launch_has_the_arguments_of_tritons_own() -> None:
    """The kernels of attention and logits, compiled for a GPU that is not here and launched on it."""
    assert run_python(DRY_RUN).splitlines()[-1] == "same"


# ---- calls that go past the dispatcher -------------------------------------------------------------------------


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Overriding(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Derived(Tensor):
    pass


@pytest.fixture
def undispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that were run past the dispatcher."""
    names: list[str] = []

    def noting(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            names.append(name)
            return run(*args)

        return noted

    monkeypatch.setattr("flashsoft.env.BACKEND", "reference")  # none of this depends on the backend
    monkeypatch.setattr(
        ops, "_implementations", {name: noting(name, run) for name, run in ops._implementations.items()}
    )
    return names


def test_plain_calls_go_past_the_dispatcher(undispatched: list[str]) -> None:
    x, q = torch.randn(3, 5), torch.randn(1, 2, 3, 8)
    weight = torch.nn.Parameter(x)
    flashsoft.softmax(x)
    flashsoft.log_softmax(x, 0, dtype=torch.float64)
    flashsoft.logsumexp(x)
    flashsoft.fused_softmax(x, 0.7, mask=x > 0, bias=x, top_k=2)
    flashsoft.attention(q, q, q, mask=flashsoft.Causal())
    with torch.no_grad():
        flashsoft.softmax(weight)
    with torch.inference_mode():
        flashsoft.softmax(weight * 2)
    assert undispatched == ["softmax", "log_softmax", "logsumexp", "fused_softmax", "attention", "softmax", "softmax"]


def test_backward_passes_go_past_it_too_unless_they_are_differentiated(undispatched: list[str]) -> None:
    x = torch.randn(3, 5, requires_grad=True)
    y = flashsoft.softmax(x)
    y.backward(torch.ones_like(y), retain_graph=True)
    assert undispatched == ["softmax_backward"]
    torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    assert undispatched == ["softmax_backward"]


@pytest.mark.parametrize(
    "watched",
    [
        lambda x: flashsoft.softmax(x.requires_grad_()),
        lambda x: flashsoft.softmax(torch.nn.Parameter(x)),
        lambda x: flashsoft.softmax(x.as_subclass(Derived)),
        lambda x: flashsoft.softmax(x.to("meta")),
        lambda x: within(Watching(), x),
        lambda x: within(Overriding(), x),
        lambda x: within(torch.profiler.profile(), x),
        lambda x: within(torch.autograd.forward_ad.dual_level(), x),
        lambda x: within(torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), x),
        lambda x: torch.func.grad(lambda t: flashsoft.softmax(t)[0, 0])(x),
        lambda x: torch.jit.trace(flashsoft.softmax, x, check_trace=False),
        lambda x: torch.compile(flashsoft.softmax, backend="eager", fullgraph=True)(x),
        lambda x: torch.fx.experimental.proxy_tensor.make_fx(lambda t: flashsoft.softmax(t))(x),
        lambda x: torch.fx.experimental.proxy_tensor.make_fx(lambda t: flashsoft.softmax(t), pre_dispatch=True)(x),
        lambda x: flashsoft.softmax(torch.view_as_complex(x).conj().imag),
        lambda x: flashsoft.softmax(torch._efficientzerotensor((3, 5))),
        lambda x: flashsoft.attention(*(x[None, None],) * 2, x[None, None].requires_grad_()),
    ],
    ids=[
        "gradient", "parameter", "subclass", "meta", "dispatch-mode", "function-mode", "profiler", "forward-mode",
        "fake", "grad", "trace", "compile", "make_fx", "pre-dispatch", "negative-view", "zero-tensor", "value",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_whoever_watches_sees_the_operator(watched: Callable[[Tensor], Any], undispatched: list[str]) -> None:
    watched(torch.randn(6, 2))
    assert not undispatched


def within(context: Any, x: Tensor) -> Tensor:
    with context:
        return flashsoft.softmax(x)


def test_a_negative_view_is_resolved() -> None:
    z = torch.randn(6, 3, dtype=torch.complex64)
    x = z.conj().imag
    assert x.is_neg()
    torch.testing.assert_close(flashsoft.fused_softmax(x), torch.softmax(x, -1))


def test_the_profiler_names_the_operator() -> None:
    x = torch.randn(3, 5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        flashsoft.fused_softmax(x)
    assert "flashsoft::fused_softmax" in {event.key for event in profile.key_averages()}


# ---- what a launch ends in -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_the_function_that_tritons_launcher_calls_is_called_at_once(packed: bool) -> None:
    given: list[Any] = []

    class Launcher:
        global_scratch_size = profile_scratch_size = 0

        def launch(self, *args: Any) -> None:
            given.append(args)

        def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
            metadata, parameters = args[:4], args[4:]
            self.launch(x, y, z, stream, function, "pdl", *metadata, *([parameters] if packed else parameters))

    run = Launcher()
    run.launch = run.launch  # type: ignore[method-assign]  # Triton's is an attribute
    compiled = SimpleNamespace(run=run, function=5, packed_metadata=(4, 1, 0))
    started, known, is_packed = launching._launcher(compiled)
    assert started == run.launch and is_packed is packed and not given
    parameters = (640, (1, 2), None, 64)
    run(3, 1, 1, 70, 5, (4, 1, 0), None, None, None, *parameters)
    started(3, 1, 1, 70, *known, *([parameters] if packed else parameters))
    assert given[0] == given[1]


def test_a_launcher_that_allocates_is_called_itself() -> None:
    run = SimpleNamespace(global_scratch_size=128, profile_scratch_size=0, launch=None)
    compiled = SimpleNamespace(run=run, function=5, packed_metadata=(4, 1, 0))
    assert launching._launcher(compiled) == (run, (5, (4, 1, 0), None, None, None), False)


def test_the_installed_triton_has_such_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace())  # which later versions ask for
    run, given = object.__new__(CudaLauncher), []
    none = dict.fromkeys(("global_scratch", "profile_scratch"), 0)
    vars(run).update({f"{name}_{what}": 0 for name in none for what in ("size", "align")})
    vars(run).update(num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, gsan_enabled=False)
    vars(run).update(arg_annotations=b"a", kernel_signature=b"s", launch=lambda *args: given.append(args))
    started, known, packed = launching._launcher(SimpleNamespace(run=run, function=5, packed_metadata=(4, 1, 0)))
    assert started is run.launch
    parameters = (640, (1, 2), None, 64)
    run(3, 1, 1, 70, 5, (4, 1, 0), None, None, None, *parameters)
    started(3, 1, 1, 70, *known, *([parameters] if packed else parameters))
    assert len(given) == 2 and given[0] == given[1]


# ---- calls made again ------------------------------------------------------------------------------------------


class Calls:
    """An ordinary call that is one launch, y = x + 1 on a GPU that is not here."""

    def __init__(self) -> None:
        self.ordinary, self.anew, self.away = 0, 0, False

    def __call__(self, x: Tensor, *options: Any) -> Tensor:
        self.ordinary += 1
        y = x + 1

        def anew(tensors: tuple[Tensor, ...], pointers: list[int]) -> list[Tensor] | None:
            if self.away:
                return None
            self.anew += 1
            assert pointers == [t.data_ptr() for t in tensors]
            return [tensors[0] + 1]

        if direct.under_way.launches is not None:
            direct.under_way.launches.append(direct.Launched((x, None), (y,), anew))
        return y


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr(Tensor, "get_device", lambda x: 0, raising=False)
    monkeypatch.setattr(direct, "_known", {})
    return Calls()


def test_the_second_call_of_a_kind_only_launches(calls: Calls) -> None:
    for n in range(1, 4):
        x = torch.randn(3, 5)
        assert torch.equal(direct.again(calls, (x,), -1, None), x + 1)
        assert (calls.ordinary, calls.anew) == (1, n - 1)
    calls.away = True
    assert torch.equal(direct.again(calls, (x,), -1, None), x + 1)
    assert (calls.ordinary, calls.anew) == (2, 2) and direct.under_way.launches is None
    direct.forget()
    direct.again(calls, (x,), -1, None)
    assert calls.ordinary == 3


@pytest.mark.parametrize(
    "x, options",
    [
        (torch.zeros(5, 3), (1,)),
        (torch.zeros(5, 3).t(), (1,)),
        (torch.zeros(3, 5, dtype=torch.float16), (1,)),
        (torch.zeros(16)[1:].view(3, 5), (1,)),
        (torch.zeros(3, 5), (2,)),
        (torch.zeros(3, 5), (True,)),
        (torch.zeros(3, 5), (1.0,)),
        (torch.zeros(3, 5), ([],)),
        (torch.zeros(3, 5, requires_grad=True), (1,)),
        (torch.zeros(3, 5).as_subclass(Derived), (1,)),
        (torch.zeros(3, 10, dtype=torch.complex64).conj().imag[:, ::2], (1,)),
        (torch._efficientzerotensor((3, 5)), (1,)),
        (torch.zeros(3, 5).to_sparse(), (1,)),
        (torch.zeros(3, 5, device="meta"), (1,)),
    ],
    ids=[
        "size", "strides", "dtype", "address", "option", "bool", "float", "unhashable", "gradient", "subclass",
        "negative", "zero", "sparse", "meta",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_another_kind_of_call_takes_the_ordinary_way(calls: Calls, x: Tensor, options: tuple[Any, ...]) -> None:
    direct.again(calls, (torch.zeros(3, 5),), 1)
    with contextlib.suppress(RuntimeError, NotImplementedError):  # some of them cannot be added to
        direct.again(calls, (x,), *options)
    assert (calls.ordinary, calls.anew) == (2, 0) and direct.under_way.launches is None


@pytest.mark.parametrize(
    "context", [Watching, Overriding, torch.profiler.profile, torch.autograd.forward_ad.dual_level]
)
def test_whoever_watches_sees_the_ordinary_way(calls: Calls, context: Callable[[], Any]) -> None:
    x = torch.zeros(3, 5)
    direct.again(calls, (x,))
    with context():
        direct.again(calls, (x,))
    torch.func.vmap(lambda row: direct.again(calls, (row,)))(x)
    assert (calls.ordinary, calls.anew) == (3, 0)


def test_a_call_of_more_than_one_launch_takes_the_ordinary_way(calls: Calls) -> None:
    def twice(x: Tensor) -> Tensor:
        return calls(calls(x))

    def of_a_view(x: Tensor) -> Tensor:
        return calls(x[:])

    def a_view(x: Tensor) -> Tensor:
        return calls(x)[:]

    for call, launches in ((twice, 2), (of_a_view, 1), (a_view, 1)):
        calls.ordinary = 0
        for _ in range(3):
            direct.again(call, (torch.zeros(3, 5),))
        assert (calls.ordinary, calls.anew) == (3 * launches, 0)


def test_kinds_of_calls_remembered_are_bounded(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "LIMIT", 3)
    for n in range(1, 9):
        direct.again(calls, (torch.zeros(n),))
        assert 1 <= len(direct._known) <= 3


def test_a_call_that_fails_leaves_nothing_behind(calls: Calls) -> None:
    def failing(x: Tensor) -> Tensor:
        calls(x)
        raise ValueError

    with pytest.raises(ValueError):
        direct.again(failing, (torch.zeros(3),))
    assert direct.under_way.launches is None and not direct._known


DRY_CALLS = (
    DRY
    + """
import flashsoft
from flashsoft import direct, dispatch

ordinary = []

torch.Tensor.get_device = lambda x: 0
dispatch.target_of = lambda device: dispatch.Target("cuda", (9, 0), has_triton=True, interpreted=False)
choose = flashsoft.ops.choose
flashsoft.ops.choose = lambda *args: ordinary.append(args) or choose(*args)

x = torch.zeros(8, 1000, dtype=torch.bfloat16)
q, k = (torch.zeros(1, S, H, 64, dtype=torch.float16).transpose(1, 2) for S, H in ((40, 4), (56, 2)))
full = q.float(), k.float(), k.float()
for call in (
    lambda: flashsoft.softmax(x),
    lambda: flashsoft.softmax(x.T),
    lambda: flashsoft.log_softmax(x[:, 1:], -1, dtype=torch.float32),
    lambda: flashsoft.logsumexp(x),
    lambda: flashsoft.softmax(torch.zeros(4, 200_000)),
    lambda: flashsoft.fused_softmax(x, 0.7, flashsoft.Causal(), top_k=3, return_lse=True),
    lambda: flashsoft.fused_softmax(x, 0.7, torch.ones(8, 1000, dtype=torch.bool), return_lse=True),
    lambda: flashsoft.attention(q, k, k, return_lse=True),
    lambda: flashsoft.attention(q, k, k, mask=flashsoft.Window(9), scale=0.5, return_lse=True),
    lambda: flashsoft.attention(*full, return_lse=True),
):
    kinds, firsts = len(direct._known), None
    for turn in range(2):
        calls.clear(), ordinary.clear()
        results = call()
        results = results if isinstance(results, tuple) else (results,)
        (args,) = calls
        layouts = [(y.shape, y.stride(), y.dtype) for y in results]
        if turn == 0:
            first = args, layouts
    settled = len(direct._known) > kinds
    assert settled is not bool(ordinary)
    print(settled, layouts == first[1], len(args) == len(first[0]), args[:6] == first[0][:6])
    numbers = [(a, b) for a, b in zip(args[9:], first[0][9:]) if not isinstance(b, torch.Tensor)]
    assert all(a == b for a, b in numbers), numbers
    where = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args[9:]]
    assert all(y.data_ptr() in where for y in results)
"""
)


def test_calls_made_again_launch_what_the_ordinary_way_does() -> None:
    lines = [line for line in run_python(DRY_CALLS).splitlines() if line.startswith(("True", "False"))]
    again, ordinary = "True True True True", "False True True True"  # a tensor for a mask, float32 attention
    assert lines == [again] * 6 + [ordinary] + [again] * 2 + [ordinary]


# ---- boards of captured launches -------------------------------------------------------------------------------


def test_captured_launches_share_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(exchange, "_spare", {})
    alone = exchange.board_for_good(cpu, 5)
    assert alone.shape == (5,) and not alone.any() and not exchange._spare
    spare = exchange._spare[cpu] = torch.zeros(96, dtype=torch.int64)
    boards = [exchange.board_for_good(cpu, words) for words in (5, 16, 33, 17, 16, 1)]
    ends = [(board.data_ptr(), board.data_ptr() + board.nbytes) for board in boards]
    assert [len(board) for board in boards] == [5, 16, 33, 17, 16, 1] and not any(board.any() for board in boards)
    begins = [(begin - spare.data_ptr()) // 8 for begin, _ in ends]
    assert begins[:3] == [0, 16, 32] and begins[4] == 80  # 17 words were not left, 16 were; then none
    assert all(not 0 <= begins[i] < 96 for i in (3, 5))
    assert all(a[1] <= b[0] or b[1] <= a[0] for i, a in enumerate(ends) for b in ends[:i])


# ---- on a GPU ------------------------------------------------------------------------------------------------


@pytest.fixture
def unplanned() -> None:
    """Nothing is remembered yet."""
    launching.forget()


@pytest.mark.gpu
@pytest.mark.usefixtures("unplanned")
def test_a_side_stream() -> None:
    """Work on a stream that waits behind a long sleep must not be launched on another."""
    x = torch.zeros(64, 1024, device="cuda")
    flashsoft.fused_softmax(x)
    side = torch.cuda.Stream()
    for _ in range(2):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            x.copy_(torch.randn_like(x))
            y = flashsoft.fused_softmax(x)
        side.synchronize()
        torch.testing.assert_close(y, torch.softmax(x, -1))
        x.zero_()


@pytest.mark.gpu
@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize("warm", [True, False])
def test_a_cuda_graph(warm: bool) -> None:
    """Captured right after a first call, and as the first one of its problem (of a kernel that is compiled)."""
    sizes = (1, 4, 128, 64)
    q, k, v = (torch.randn(sizes, device="cuda", dtype=torch.float16) for _ in range(3))
    out = flashsoft.attention(q, k, v)
    if not warm:
        launching.forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashsoft.attention(q, k, v, return_lse=True)
    for _ in range(2):
        q.copy_(torch.randn_like(q))
        graph.replay()
        for ours, theirs in zip(captured, flashsoft.attention(q, k, v, return_lse=True), strict=True):
            assert torch.equal(ours, theirs)
    assert not torch.equal(captured[0], out)


@pytest.mark.gpu
@pytest.mark.usefixtures("unplanned")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices() -> None:
    xs = [torch.randn(64, 1000, device=f"cuda:{i}") for i in (0, 1)]
    for _ in range(2):
        for x in xs:
            torch.testing.assert_close(flashsoft.fused_softmax(x), torch.softmax(x, -1))
            assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("unplanned")
def test_launches_remembered_give_the_same_bits() -> None:
    """Of every alignment and layout, called in turns."""
    base = torch.randn(70, 1040, device="cuda", dtype=torch.bfloat16)
    views = [base, base[:, 1:], base[:, :1000], base[:, 8:1008], base.t(), base[1:, 3:1003], base[::2], base[:1]]
    first = [flashsoft.fused_softmax(x, 0.7, top_k=50) for x in views]
    assert launching._ready
    for x, y in zip(views, first, strict=True):
        assert torch.equal(flashsoft.fused_softmax(x, 0.7, top_k=50), y)
        assert torch.equal(flashsoft.fused_softmax(x.clone(), 0.7, top_k=50), y)


@pytest.mark.gpu
@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize("spare", [exchange.SPARE, 0])
def test_a_cuda_graph_of_shared_rows(spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed many times, on more than one stream, among eager calls: the boards are clean each time."""
    monkeypatch.setattr(exchange, "SPARE", spare)
    exchange._spare.clear()
    exchange._boards.clear()
    x = torch.randn(4, 200_000, device="cuda", dtype=torch.bfloat16)
    expected, eager = flashsoft.softmax(x), torch.randn_like(x)
    beside = flashsoft.softmax(eager)
    assert exchange._boards, "rows of this length are shared by programs"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = flashsoft.softmax(x), flashsoft.log_softmax(x)
    streams = [torch.cuda.Stream() for _ in range(3)]
    logs = flashsoft.log_softmax(x)
    torch.cuda.synchronize()
    for i in range(200):
        with torch.cuda.stream(streams[i % 2]):
            graph.replay()
        with torch.cuda.stream(streams[2]):
            assert torch.equal(flashsoft.softmax(eager), beside)
        torch.cuda.synchronize()
        assert torch.equal(first, expected) and torch.equal(second, logs)
        first.zero_(), second.zero_()
    for _ in range(50):  # one behind the other, without waiting
        for stream in streams:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, expected) and torch.equal(second, logs)


@pytest.mark.gpu
@pytest.mark.usefixtures("unplanned")
def test_calls_made_again_give_the_same_results() -> None:
    x = torch.randn(64, 1000, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.float16).transpose(1, 2)
    for call in (
        lambda: flashsoft.softmax(x),
        lambda: flashsoft.softmax(x.t()),
        lambda: flashsoft.log_softmax(x, dtype=torch.float32),
        lambda: flashsoft.logsumexp(x),
        lambda: flashsoft.attention(q, q, q, return_lse=True),
        lambda: flashsoft.attention(q, q, q, mask=flashsoft.Causal(), scale=2.0),
    ):
        direct.forget()
        first = call()
        assert direct._known
        for _ in range(2):
            torch.testing.assert_close(call(), first, rtol=0, atol=0)
    with pytest.raises(TypeError):
        flashsoft.softmax(x, dim=True)
    out = flashsoft.attention(q, q, q)
    assert out.stride() == torch.nn.functional.scaled_dot_product_attention(q, q, q).stride()
