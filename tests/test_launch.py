"""Launches from what an earlier one made ready: when, and with what."""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
import torch
from dry import DRY
from test_dispatch import run_python

import flashsoft
from flashsoft import direct

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


def test_who_was_told_of_a_launch_holds_its_kernel(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[Any] = []
    make = machine.compiled

    def compiled(backend: str) -> Any:
        kernel = make(backend)
        kernels.append(weakref.ref(kernel))
        return kernel

    monkeypatch.setattr(machine, "compiled", compiled)
    told: list[direct.Launched] = []
    monkeypatch.setattr(direct.under_way, "launches", told)
    launch(machine.plan, (Placed(128),), (Placed(128),))
    launching._ready.clear()
    gc.collect()
    assert len(told) == 1 and kernels[-1]() is not None
    told.clear()
    gc.collect()
    assert kernels[-1]() is None


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


DRY_RUN = (
    DRY
    + """
from flashsoft.kernels import backward, forward, launch, logits, logits_backward
from flashsoft.terms import Terms

torch.Tensor.get_device = lambda x: 0  # also of what is made between launches

def on(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)

def same(a, b):
    a, b = (x.data_ptr() if isinstance(x, torch.Tensor) else x for x in (a, b))
    return a == b and type(a) is type(b)

q, k, v = on(1, 4, 40, 64), on(1, 2, 56, 64), on(1, 2, 56, 64)
x, wide, rows, bias = on(8, 100), on(2, 40000), on(8, 1, dtype=torch.float32), on(1, 100)
mask, uniform = on(8, 100, dtype=torch.bool), on(2, 2, dtype=torch.float32)
lse, heads = on(1, 4, 40, dtype=torch.float32), [on(4, dtype=torch.float32) for _ in range(3)]
only_qkv = (True,) * 3 + (False,) * 4
terms = Terms(bias=on(1, 4, 1, 56), slopes=heads[0][None], sink=heads[1], factor=heads[2], softcap=5.0, hi=16)
for call in (
    lambda: forward.attention_forward(q, k, v, Terms(scale=0.125, hi=16)),
    lambda: forward.attention_forward(q, k, v, Terms(keep=on(1, 4, 40, 56, dtype=torch.bool), scale=-1.0)),
    lambda: forward.attention_forward(q, k, v, terms),
    lambda: backward.attention_backward(q, None, q, k, v, q, lse, Terms(scale=0.125, lo=-16, hi=1), only_qkv),
    lambda: backward.attention_backward(q, lse, q, k, v, q, lse, terms, (True,) * 7),
    lambda: logits.fused_softmax_forward(x, x.dtype, 0.7, None, None, None, None, None, None, 50, None, None),
    lambda: logits.fused_softmax_forward(wide, x.dtype, 1.0, None, None, None, None, 1, None, None, None, None),
    lambda: logits.fused_softmax_forward(wide, x.dtype, 1.0, None, None, None, None, 1, None, 50, 0.9, 0.1),
    lambda: logits.fused_softmax_forward(x, x.dtype, rows, 2.0, 30.0, mask, None, None, bias, None, None, None),
    lambda: logits.sample_forward(wide, uniform, 1.0, None, None, None, None, None, None, None, 0.9, None),
    lambda: logits_backward.fused_softmax_backward(x, None, x, x, 0.7, 2.0, 30.0, bias, False),
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
