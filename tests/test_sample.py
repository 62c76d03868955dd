"""sample: distribution, exactness at temperature 0, determinism, and rows without a distribution."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from inputs import draw
from torch import Tensor

import flashsoft
from flashsoft import Causal, ops

BF16, F32 = torch.bfloat16, torch.float32
INF, NAN = float("inf"), float("nan")


def drawn(x: Tensor, count: int, backend: str, **options: Any) -> Tensor:
    """How often each index of one row came up in so many draws."""
    tokens = flashsoft.sample(x.expand(count, -1), backend=backend, **options)
    assert tokens.dtype == torch.int64 and tokens.shape == (count,)
    return torch.bincount(tokens.cpu(), minlength=x.shape[-1]).double()


def assert_distribution(counts: Tensor, p: Tensor) -> None:
    """Chi-squared, rare indices taken together; the bound is passed by chance once in some million tests."""
    expected = p.cpu().double() * counts.sum()
    assert float(counts[expected == 0].sum()) == 0
    common = expected >= 5
    observed = torch.cat((counts[common], counts[~common].sum()[None]))
    expected = torch.cat((expected[common], expected[~common].sum()[None]))
    some = expected > 0
    chi2 = float(((observed - expected)[some] ** 2 / expected[some]).sum())
    freedom = int(some.sum()) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 25


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"top_k": 12},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "softcap": 4.0, "scale": 1.5},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_short_rows_have_the_distribution_of_fused_softmax(
    backend: str, device: torch.device, options: dict[str, Any]
) -> None:
    fast = device.type == "cuda" or backend == "reference"
    count = 20000 if fast else 500
    for N, dtype in ((1, F32), (60, F32), (300, BF16)) if fast else ((60, F32),):
        x = draw(1, N, device=device, dtype=dtype, std=1.5)
        keep = torch.rand(N).to(device) < 0.8
        keep[0] = True
        bias = draw(N, device=device)
        counts = drawn(x, count, backend, mask=keep, bias=bias, **options)
        p = flashsoft.fused_softmax(x, mask=keep, bias=bias, out_dtype=F32, backend="reference", **options)
        assert_distribution(counts, p[0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_wide_rows_have_the_distribution_of_fused_softmax(
    backend: str, device: torch.device, options: dict[str, Any]
) -> None:
    """By many draws on a GPU; elsewhere only that what is drawn is kept."""
    N = 20000
    x = draw(1, N, device=device, dtype=BF16, std=4.0)
    x[0, 9000:9100] = -INF
    count = 20000 if device.type == "cuda" and backend == "triton" else 12
    p = flashsoft.fused_softmax(x, out_dtype=F32, backend="reference", **options)[0]
    tokens = flashsoft.sample(x.expand(count, -1), backend=backend, **options)
    assert bool((p[tokens] > 0).all())
    if count > 12:
        assert_distribution(torch.bincount(tokens.cpu(), minlength=N).double(), p)


@pytest.mark.parametrize("N", [5, 50, 9000, 20000])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_temperature_zero_is_argmax(backend: str, device: torch.device, N: int, dtype: torch.dtype) -> None:
    x = draw(4, N, device=device, dtype=dtype).mul(4).round() / 4  # with equals
    x[3] = 1.0
    want = [int((row == row.max()).nonzero()[0]) for row in x]
    zeros = torch.zeros(4, device=device)
    ways = list(itertools.product((0, 0.0, zeros), ({}, {"top_k": 3}, {"top_p": 0.5})))
    if backend == "triton" and device.type == "cpu" and N > 50:  # interpreted: each of both once
        ways = ways[2::2][:3]
    for temperature, limits in ways:
        assert flashsoft.sample(x, temperature, backend=backend, **limits).tolist() == want
    mixed = torch.tensor([0.0, 1.0, 0.0, 1.0], device=device)
    tokens = flashsoft.sample(x, mixed, backend=backend)
    assert tokens[[0, 2]].tolist() == [want[0], want[2]]


def test_the_same_state_draws_the_same(backend: str, device: torch.device) -> None:
    x = draw(50, 40, device=device)
    generator = torch.Generator(device).manual_seed(7)
    first = flashsoft.sample(x, generator=generator, backend=backend)
    other = flashsoft.sample(x, generator=generator, backend=backend)
    again = flashsoft.sample(x, generator=generator.manual_seed(7), backend=backend)
    assert torch.equal(first, again) and not torch.equal(first, other)
    torch.manual_seed(3)
    first = flashsoft.sample(x, backend=backend)
    torch.manual_seed(3)
    assert torch.equal(first, flashsoft.sample(x, backend=backend))


@pytest.mark.parametrize("N", [6, 9000, 20000])
@pytest.mark.parametrize("limits", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_rows_without_a_distribution(backend: str, device: torch.device, N: int, limits: dict[str, Any]) -> None:
    x = draw(6, N, device=device)
    x[1], x[2, 3], x[3, 1] = -INF, NAN, INF
    T = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, NAN], device=device)
    tokens = flashsoft.sample(x, T, backend=backend, **limits).tolist()
    assert tokens[0] >= 0 and tokens[1:] == [-1] * 5


def test_shapes_and_options_a_row(backend: str, device: torch.device) -> None:
    x = draw(3, 2, 9, device=device).transpose(0, 1)
    assert flashsoft.sample(x, top_k=torch.tensor([[1], [2]], device=device), backend=backend).shape == (2, 3)
    assert flashsoft.sample(x[0, 0], backend=backend).shape == ()
    assert flashsoft.sample(x, mask=Causal(), backend=backend).shape == (2, 3)
    assert flashsoft.sample(torch.zeros(0, 5, device=device), backend=backend).shape == (0,)
    assert flashsoft.sample(torch.zeros(2, 0, device=device), backend=backend).tolist() == [-1, -1]
    k = torch.ones(2, 3, dtype=torch.int64, device=device)
    assert torch.equal(flashsoft.sample(x, top_k=k, backend=backend), x.argmax(-1))


def test_what_is_drawn_has_no_gradient(backend: str, device: torch.device) -> None:
    x = draw(3, 9, device=device).requires_grad_()
    T = torch.ones(3, device=device, requires_grad=True)
    tokens = flashsoft.sample(x, T, bias=x.detach().requires_grad_(), backend=backend)
    assert not tokens.requires_grad


def test_a_token_does_not_depend_on_the_batch(backend: str, device: torch.device) -> None:
    x = draw(5, 20000, device=device)
    uniform = torch.rand(5, 2, device=device)
    scores, limits = (1.0, *(None,) * 7), (None,) * 6
    together = ops.call("sample", x, uniform, *scores, *limits, backend)
    alone = torch.cat([ops.call("sample", x[i : i + 1], uniform[i : i + 1], *scores, *limits, backend) for i in (0, 4)])
    assert torch.equal(together[[0, 4]], alone)


def test_arguments_that_cannot_work(device: torch.device) -> None:
    x = torch.zeros(2, 5, device=device)
    with pytest.raises(ValueError, match="temperature must be finite and > 0, got -1"):
        flashsoft.sample(x, -1)
    with pytest.raises(ValueError, match="top_p must be > 0 and <= 1, got 0"):
        flashsoft.sample(x, top_p=0)
    with pytest.raises(ValueError, match=r"min_p must be >= 0 and <= 1, got 1\.5"):
        flashsoft.sample(x, min_p=1.5)
    with pytest.raises(TypeError, match=r"generator must be a torch.Generator, got int"):
        flashsoft.sample(x, generator=7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"logits must be a torch.Tensor, got list"):
        flashsoft.sample([1.0])  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_captured_draw_draws_anew() -> None:
    x = torch.randn(64, 20000, device="cuda")
    flashsoft.sample(x, top_k=50)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = flashsoft.sample(x, top_k=50)
    outcomes = []
    for _ in range(3):
        graph.replay()
        outcomes.append(tokens.clone())
    assert not torch.equal(outcomes[0], outcomes[1]) and not torch.equal(outcomes[1], outcomes[2])


@pytest.mark.gpu
def test_nothing_of_the_size_of_the_logits() -> None:
    x = torch.randn(64, 128256, device="cuda", dtype=BF16)
    for options in ({}, {"top_k": 50}, {"top_p": 0.9}):
        flashsoft.sample(x, **options)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flashsoft.sample(x, **options)
        assert torch.cuda.max_memory_allocated() - before < 0.15 * x.numel() * x.element_size()
