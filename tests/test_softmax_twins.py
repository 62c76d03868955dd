"""Row softmax four times: NumPy, PyTorch with a hand-written backward, flashsoft, CUDA C++; in one test."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import flashsoft

EXAMPLE = Path(__file__).parents[1] / "examples" / "02_softmax_twins.py"
INF = float("inf")


@pytest.fixture(scope="module")
def twins() -> ModuleType:
    spec = importlib.util.spec_from_file_location("softmax_twins", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(kind: str) -> Tensor:
    x = torch.randn(7, 300) * 5.0
    if kind == "with -inf":
        x[torch.rand(7, 300) < 0.4] = -INF
        x[0, :-1] = -INF  # a single score at the end
        x[1, 1:] = -INF
        x[2] = -INF  # nothing at all: NaN, as in torch
    elif kind == "equal":
        x = torch.linspace(-1e4, 1e4, 7)[:, None].expand(7, 300).contiguous()
    elif kind == "far from zero":
        x = x + torch.tensor([[1e4], [-1e4], [0.0], [3e4], [1e5], [-1e5], [7.0]])
    return x


@pytest.mark.parametrize("kind", ["random", "with -inf", "equal", "far from zero"])
def test_twins_agree_forward_and_backward(kind: str, backend: str, device: torch.device, twins: ModuleType) -> None:
    x, dy = rows(kind), torch.randn(7, 300)

    def flash(x: Tensor) -> Tensor:
        return flashsoft.softmax(x.to(device), backend=backend).cpu()

    exact, exact_dx = differentiate(lambda x: torch.softmax(x, -1), x.double(), dy.double())
    results = {
        "PyTorch": differentiate(twins.TorchSoftmax.apply, x, dy),
        backend: differentiate(flash, x, dy),
    }
    y = twins.numpy_softmax(x.numpy())
    dx = twins.numpy_softmax_backward(dy.numpy(), y)
    results["NumPy"] = (torch.from_numpy(y), torch.from_numpy(dx))
    if device.type == "cuda":
        results["CUDA C++"] = (twins.cuda_softmax(x.to(device)).cpu(), None)

    # a weight has the error of its exponent, |x - m| <= 60 where it matters, and of the sum
    for name, (y, dx) in results.items():
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-7, equal_nan=True, msg=message(name, "y"))
        if dx is not None:
            torch.testing.assert_close(
                dx.double(), exact_dx, rtol=1e-5, atol=2e-6, equal_nan=True, msg=message(name, "dx")
            )
    assert exact.isnan().any() == (kind == "with -inf")


def differentiate(function, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dx


def message(name: str, what: str):
    return lambda said: f"{name}, {what}: {said}"


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 31, 256, 257, 5000])
def test_cuda_twin_takes_any_width(columns: int, twins: ModuleType) -> None:
    x = torch.randn(3, columns, device="cuda") * 4.0
    torch.testing.assert_close(twins.cuda_softmax(x), torch.softmax(x, -1), rtol=1e-5, atol=1e-7)


def test_hand_written_backward_is_the_gradient(twins: ModuleType) -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(twins.TorchSoftmax.apply, (x,))
