"""Calls that go past torch's dispatcher (`flashsoft.direct`): when, and to what."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import conftest
import numpy as np
import pytest
import torch
from dry import DRY
from test_dispatch import run_python
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashsoft
from flashsoft import direct
from flashsoft.ops import registry

if not conftest.HAS_TRITON:
    pytest.skip("triton is not installed", allow_module_level=True)

from flashsoft.kernels import launch

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
        registry, "_implementations", {name: noting(name, run) for name, run in registry._implementations.items()}
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


# ---- calls made again ------------------------------------------------------------------------------------------


class Calls:
    """An ordinary call that is one launch, y = x + 1 on a GPU that is not here, for x in float32."""

    def __init__(self) -> None:
        self.ordinary, self.anew, self.away = 0, 0, False

    def __call__(self, x: Tensor, *options: Any, into: Tensor | None = None) -> Tensor:
        """`into`: the launch takes y too, and writes it."""
        self.ordinary += 1
        y = x + 1 if into is None else into.add_(x + 1)

        def at(pointer: int | None) -> Any:
            assert pointer is not None
            return np.ctypeslib.as_array((ctypes.c_float * x.numel()).from_address(pointer))

        def repeat(pointers: list[int | None]) -> None:
            self.anew += 1
            source, absent, target = pointers
            assert absent is None
            if into is None:
                at(target)[:] = at(source) + 1
            else:
                at(target)[:] += at(source) + 1

        if direct.under_way.launches is not None:
            launched = direct.Launched((x, None), (y,), 0, lambda: self.away, repeat)
            direct.under_way.launches.append(launched)
        return y


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr(direct, "_get_device", lambda x: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
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


def test_a_call_of_several_launches_is_repeated(calls: Calls) -> None:
    """Results of launches go into others, which may write where an earlier one wrote."""

    def several(x: Tensor, same: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        between = calls(x)
        first = calls(between)
        calls(same, into=first)
        return calls(other), first

    for turn in range(3):
        x, same, other = (torch.randn(3, 5) for _ in range(3))
        second, first = direct.again(several, (x, x if turn == 2 else same, other))
        torch.testing.assert_close(first, x + 2 + (x if turn == 2 else same) + 1)
        torch.testing.assert_close(second, other + 1)
        assert (calls.ordinary, calls.anew) == (4, 4 * turn)


def test_from_one_tensor_in_two_places_only_a_plain_order_is_learned(calls: Calls) -> None:
    def turned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return calls(y), calls(x)

    x, y = torch.randn(3, 5), torch.randn(3, 5)
    for given in ((x, x), (x, y)):
        first, second = direct.again(turned, given)
        assert torch.equal(first, given[1] + 1) and torch.equal(second, given[0] + 1)
    assert (calls.ordinary, calls.anew) == (4, 0)


def test_a_call_of_more_than_launches_takes_the_ordinary_way(calls: Calls) -> None:
    def of_a_view(x: Tensor) -> Tensor:
        return calls(x[:])

    def of_something_made(x: Tensor) -> Tensor:
        return calls(x * 2)

    def a_view(x: Tensor) -> Tensor:
        return calls(x)[:]

    def in_place(x: Tensor) -> Tensor:
        return calls(calls(x), into=x)

    for call, launches in ((of_a_view, 1), (of_something_made, 1), (a_view, 1), (in_place, 2)):
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

def layout(a):  # of a tensor map, all but the address
    return (tuple(a.shape), tuple(a.strides)) if hasattr(a, "base") else a

torch.Tensor.get_device = direct._get_device = lambda x: 0
dispatch.target_of = lambda device: dispatch.Target("cuda", (9, 0), has_triton=True, interpreted=False)
for name in ("choose", "choose_attention"):
    chosen = getattr(dispatch, name)
    setattr(dispatch, name, lambda *args, chosen=chosen: ordinary.append(args) or chosen(*args))

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
    lambda: flashsoft.attention(q, k, k, mask=flashsoft.Causal(), return_lse=True, backend="triton"),
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
    numbers = [(layout(a), layout(b)) for a, b in zip(args[9:], first[0][9:]) if not isinstance(b, torch.Tensor)]
    assert all(a == b for a, b in numbers), numbers
    bases = [getattr(a, "base", a) for a in args[9:]]
    where = [a.data_ptr() if hasattr(a, "data_ptr") else a for a in bases]
    assert all(y.data_ptr() in where for y in results)
"""
)


def test_calls_made_again_launch_what_the_ordinary_way_does() -> None:
    lines = [line for line in run_python(DRY_CALLS).splitlines() if line.startswith(("True", "False"))]
    again, ordinary = "True True True True", "False True True True"  # a tensor for a mask, float32 attention
    assert lines == [again] * 6 + [ordinary] + [again] * 3 + [ordinary]


# ---- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_calls_made_again_give_the_same_results() -> None:
    x = torch.randn(64, 1000, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.float16).transpose(1, 2)
    wide = torch.randn(3, 50000, device="cuda")
    for call in (
        lambda: flashsoft.softmax(x),
        lambda: flashsoft.softmax(x.t()),
        lambda: flashsoft.log_softmax(x, dtype=torch.float32),
        lambda: flashsoft.logsumexp(x),
        lambda: flashsoft.fused_softmax(wide, 0.7, flashsoft.Causal(align=20000), top_k=5, return_lse=True),
        lambda: flashsoft.attention(q, q, q, return_lse=True),
        lambda: flashsoft.attention(q, q, q, mask=flashsoft.Causal(), scale=2.0),
    ):
        launch.forget()
        first = call()
        assert direct._known
        for _ in range(2):
            torch.testing.assert_close(call(), first, rtol=0, atol=0)
    with pytest.raises(TypeError):
        flashsoft.softmax(x, dim=True)
    out = flashsoft.attention(q, q, q)
    assert out.stride() == torch.nn.functional.scaled_dot_product_attention(q, q, q).stride()
