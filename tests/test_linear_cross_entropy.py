"""Cross entropy behind a linear layer: against float64, and against the plain composition's error in the same dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import draw
from test_losses import IGNORED, OPTIONS, defined, labels
from tolerances import assert_close_to
from torch import Tensor
from torch.nn import functional as F

import flashsoft
from flashsoft.tuning.chunks import CHUNK_BYTES, chunk_rows

F64 = torch.float64
H = 24
Layer = tuple[Tensor, Tensor, Tensor | None]


def layer(tokens: tuple[int, ...], N: int, dtype: torch.dtype, device: torch.device, bias: bool = True) -> Layer:
    hidden, weight = draw(*tokens, H, device=device, dtype=dtype), draw(N, H, device=device, dtype=dtype, std=0.3)
    return hidden, weight, draw(N, device=device, dtype=dtype) if bias else None


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **options: Any) -> Tensor:
    """torch's composition, its loss in float32 as ours."""
    if "class_weight" in options:
        options["weight"] = options.pop("class_weight").to(hidden.device)
    logits = F.linear(hidden, weight, bias)
    return defined(logits if logits.dtype == F64 else logits.float(), target.to(hidden.device), **options)


def ours(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **options: Any) -> Tensor:
    return flashsoft.fused_linear_cross_entropy(hidden, weight, target, bias=bias, **options)


def gradients(call: Any, given: Layer, target: Tensor, **options: Any) -> list[Tensor]:
    """The loss and its gradients."""
    leaves = [t.detach().requires_grad_() for t in given if t is not None]
    loss = call(*leaves, *[None] * (3 - len(leaves)), target, **options)
    g = torch.linspace(0.5, 1.5, max(loss.numel(), 1)).to(loss)[: loss.numel()].view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, g)]


def check(given: Layer, target: Tensor, backend: str, chunk: int | None, **options: Any) -> None:
    got = gradients(ours, given, target, chunk=chunk, backend=backend, **options)
    wide: Layer = tuple(None if t is None else t.detach().cpu().to(F64) for t in given)  # type: ignore[assignment]
    want = gradients(plain, wide, target.cpu(), **options)
    same = gradients(plain, given, target, **options)
    for name, a, b, c in zip(("loss", "dhidden", "dweight", "dbias"), got, want, same, strict=False):
        assert name == "loss" or a.dtype == given[0].dtype
        size = torch.full_like(b, max(float(b.abs().max()), 10.0 if name == "loss" else 0.0))
        if name == "loss" and given[0].dtype in (torch.float16, torch.bfloat16):
            size = size * (1 if c.ndim else 2)
        assert_close_to(a, b, c, size, name=name)


@pytest.mark.parametrize("chunk", [None, 1, 3, 7])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunks(reduction: str, chunk: int | None, backend: str, device: torch.device, poisoned: None) -> None:
    dtypes = (torch.float32, torch.bfloat16) if backend == "triton" else (torch.float32, torch.float16, F64)
    for dtype in dtypes[: 1 if chunk == 1 else 3]:
        given = layer((7,), 40, dtype, device)
        check(given, labels((7,), 40, device), backend, chunk, reduction=reduction)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, backend: str, device: torch.device, poisoned: None) -> None:
    options = OPTIONS[name] | {"ignore_index": IGNORED}
    if options.pop("weight", False):
        options["class_weight"] = torch.rand(33, device=device) + 0.1
    for reduction in ("mean", "none"):
        check(
            layer((2, 4), 33, torch.float32, device, bias=False), labels((2, 4), 33, device), backend, 3,
            reduction=reduction, **options,
        )  # fmt: skip


def test_a_wide_layer(backend: str, device: torch.device) -> None:
    check(layer((5,), 1501, torch.bfloat16, device), labels((5,), 1501, device), backend, 4)


def test_gradients_that_are_not_wanted(backend: str, device: torch.device) -> None:
    hidden, weight, bias = layer((6,), 19, torch.float32, device)
    target = labels((6,), 19, device)
    want = plain(hidden, weight, bias, target)
    loss = ours(hidden, weight, bias, target, backend=backend)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, want)
    for wanted in range(3):
        leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((hidden, weight, bias))]
        for reduction in ("mean", "none"):
            (got,) = torch.autograd.grad(
                ours(*leaves, target, reduction=reduction, chunk=4, backend=backend).sum(), leaves[wanted]
            )
            torch.testing.assert_close(
                got, torch.autograd.grad(plain(*leaves, target, reduction=reduction).sum(), leaves[wanted])[0]
            )
    with torch.no_grad():
        leaves = [t.detach().requires_grad_() for t in (hidden, weight, bias)]
        torch.testing.assert_close(ours(*leaves, target, backend=backend), want)


def test_no_tokens_and_every_token_ignored(backend: str, device: torch.device) -> None:
    for tokens in (0, 5):
        given = [t.requires_grad_() for t in layer((tokens,), 19, torch.float32, device)]
        target = torch.full((tokens,), IGNORED, device=device)
        for reduction in ("mean", "sum", "none"):
            loss = ours(*given, target, reduction=reduction, chunk=3, backend=backend)
            assert bool(loss.isnan().all() if reduction == "mean" else (loss == 0).all())
            for dx, x in zip(torch.autograd.grad(loss.sum(), given), given, strict=True):
                assert dx.shape == x.shape and bool((dx == 0).all())


def test_a_second_backward_raises_or_is_right(backend: str, device: torch.device) -> None:
    given = [t.requires_grad_() for t in layer((4,), 19, torch.float32, device)]
    target = labels((4,), 19, device)
    loss = ours(*given, target, backend=backend)
    torch.autograd.grad(loss, given, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, given)
    rows = ours(*given, target, reduction="none", backend=backend).sum()
    first = torch.autograd.grad(rows, given, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(rows, given), strict=True))


def test_a_second_derivative_says_that_there_is_none(backend: str, device: torch.device) -> None:
    for reduction in ("mean", "none"):
        given = [t.requires_grad_() for t in layer((4,), 19, torch.float32, device)]
        loss = ours(*given, labels((4,), 19, device), reduction=reduction, backend=backend).sum()
        for first in torch.autograd.grad(loss, given, create_graph=True):
            with pytest.raises(RuntimeError, match="can be differentiated once only; for second derivatives use"):
                torch.autograd.grad(first.sum(), given[1], retain_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once only"):
        hidden, weight, _ = layer((4,), 19, F64, device)
        call = lambda t: ours(t, weight, None, labels((4,), 19, device))  # noqa: E731
        torch.func.grad(lambda t: torch.func.grad(call)(t).sum())(hidden)


def test_autocast(backend: str, device: torch.device) -> None:
    given = layer((2, 5), 40, torch.float32, device)
    target = labels((2, 5), 40, device)

    def under(call: Any) -> list[Tensor]:
        with torch.autocast(device.type, torch.bfloat16):
            return gradients(call, given, target)

    got = under(lambda *args: ours(*args, backend=backend))
    assert all(t.dtype == torch.float32 for t in got)
    for a, b in zip(got, under(plain), strict=True):
        torch.testing.assert_close(a, b, atol=3e-3, rtol=2**-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(reduction: str, backend: str, device: torch.device) -> None:
    torch._dynamo.reset()
    given, target = layer((5,), 19, torch.float32, device), labels((5,), 19, device)

    def step(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        return ours(hidden * 2, weight, bias, target, reduction=reduction, chunk=2, backend=backend)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for tokens in (5, 3):
        some = (given[0][:tokens], *given[1:])
        for a, b in zip(
            gradients(compiled, some, target[:tokens]), gradients(step, some, target[:tokens]), strict=True
        ):
            torch.testing.assert_close(a, b)
    torch._dynamo.reset()


def test_func_grad(device: torch.device) -> None:
    given, target = layer((5,), 19, F64, device), labels((5,), 19, device)
    for reduction in ("mean", "none"):
        options = {"reduction": reduction}

        def call(*t: Tensor, options: dict[str, Any] = options) -> Tensor:
            return ours(*t, target, chunk=2, **options).sum()

        got = torch.func.grad(call, argnums=(0, 1, 2))(*given)
        leaves = [t.detach().requires_grad_() for t in given]
        for a, b in zip(got, torch.autograd.grad(plain(*leaves, target, **options).sum(), leaves), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("error", "says", "change"),
    [
        (ValueError, r"hidden must be \(..., 8\), as wide as weight", {"hidden": torch.zeros(3, 7)}),
        (ValueError, "weight must have 2 dimensions", {"weight": torch.zeros(8)}),
        (ValueError, "bias must have weight's 5 classes", {"bias": torch.zeros(4)}),
        (TypeError, "weight must have hidden's dtype", {"weight": torch.zeros(5, 8, dtype=torch.float16)}),
        (ValueError, "target must have hidden's shape without the last dimension", {"target": torch.zeros(2).long()}),
        (ValueError, "chunk must be >= 1", {"chunk": 0}),
        (ValueError, "class_weight must have a weight for each of 5 classes", {"class_weight": torch.ones(2)}),
    ],
)
def test_arguments(error: type[Exception], says: str, change: dict[str, Any]) -> None:
    arguments = {"hidden": torch.zeros(3, 8), "weight": torch.zeros(5, 8), "target": torch.tensor([0, 4, 1])} | change
    with pytest.raises(error, match=says):
        flashsoft.fused_linear_cross_entropy(**arguments)


@pytest.mark.parametrize("rows", [0, 1, 127, 8192, 8193, 100_000])
@pytest.mark.parametrize("n", [1, 1000, 128_256, 10**9])
def test_the_size_of_a_chunk(rows: int, n: int) -> None:
    chunk = chunk_rows(rows, n, 2, "cuda")
    assert 1 <= chunk and (chunk == max(rows, 1) or chunk % 128 == 0)
    assert chunk * n * 2 <= CHUNK_BYTES["cuda"] or chunk <= 128
    if rows == 8192 and n == 128_256:
        assert chunk == 2048


@pytest.mark.gpu
def test_memory_and_accuracy_at_size(device: torch.device) -> None:
    """No more than the chunk and the gradients beside the arguments; errors of bf16 within twice torch's."""
    hidden, weight = draw(1024, 512, device=device, dtype=torch.bfloat16), draw(32000, 512, device=device, std=0.05)
    given = hidden, weight.bfloat16(), None
    target = labels((1024,), 32000, device)
    check(given, target, "triton", 256)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients(ours, given, target, chunk=128)
    logits = 1024 * 32000 * 2
    assert torch.cuda.max_memory_allocated() - before < logits + 32000 * 512 * 8 + (16 << 20)
