"""What top-k, top-p and min-p keep, against a float64 sort; scale, softcap and the result's dtype."""

from __future__ import annotations

import itertools
from typing import Any

import oracle
import pytest
import torch
from inputs import draw, guarded
from test_logits import BF16, DTYPES, F16, F32, F64, INF, NAN, adversarial, compare, temperatures
from tolerances import assert_close_to
from torch import Tensor

import flashsoft


def shares(*rows: int, least: float = 0.0, most: float = 1.0) -> Tensor:
    return torch.rand(*rows, 1) * (most - least) + least


def assert_keeps(x: Tensor, backend: str, device: torch.device, **limits: Any) -> None:
    """The kept set of rows of x is that of a float64 sort; its end by top-p may be off by 2e-6 of the mass."""
    on = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in limits.items()}
    y, lse = flashsoft.fused_softmax(x.to(device), return_lse=True, backend=backend, **on)
    want, want_lse = oracle.fused_softmax(x.to(F64), **limits)
    got, y = (y != 0).cpu(), y.cpu()
    wanted = want.to(x.dtype) != 0
    if limits.get("top_p") is None:
        assert torch.equal(got, wanted)
        assert_close_to(y, want, None, want * 8, name="y")
        return
    sure = dict(limits)
    low, high = (
        oracle.fused_softmax(x.to(F64), **(sure | {"top_p": torch.as_tensor(limits["top_p"], dtype=F64) + step}))[0]
        for step in (-2e-6, 2e-6)
    )
    # a beginning of the order that is no shorter than the one and no longer than the other
    assert bool(((got >= (low.to(x.dtype) != 0)) & (got <= (high.to(x.dtype) != 0))).all())
    same = (got == wanted).all(-1)
    assert bool(same.float().mean() > 0.5)
    assert_close_to(y[same], want[same], None, want[same] * 8, name="y")
    torch.testing.assert_close(lse.cpu()[same].double(), want_lse[same], rtol=1e-5, atol=1e-5)


LIMITS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.7},
    {"top_p": 0.8, "min_p": 0.1},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [1, 7, 257])
def test_short_rows(backend: str, device: torch.device, dtype: torch.dtype, N: int) -> None:
    x = adversarial(N).to(dtype)
    for limits in LIMITS:
        assert_keeps(x, backend, device, **limits)
    for seed in range(1 if backend == "triton" and device.type == "cpu" else 3):
        torch.manual_seed(seed)
        rows = {"top_k": torch.randint(1, N + 1, (10, 1)), "top_p": shares(10), "min_p": shares(10, most=0.2)}
        for names in itertools.chain.from_iterable(itertools.combinations(rows, n) for n in (1, 2, 3)):
            assert_keeps(x, backend, device, **{name: rows[name] for name in names})


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_wide_rows(backend: str, device: torch.device, dtype: torch.dtype, limits: dict[str, Any]) -> None:
    """Of some rows the limits are found among the chosen chunks, over others they are looped."""
    x = torch.cat((adversarial(9000), 20 * torch.randn(2, 9000))).to(dtype)
    rows = x if backend == "reference" or device.type == "cuda" else x[[0, 1, 4, 6, 10]]
    assert_keeps(rows, backend, device, **limits)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_wide_rows_with_limits_of_their_own(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    x = adversarial(17000).to(dtype)[[1, 3, 6, 8]]
    k, p, least = torch.tensor([[3], [5000], [17000], [100]]), torch.tensor([[0.9], [0.5], [1.0], [0.2]]), shares(4)
    for limits in ({"top_k": k}, {"top_p": p}, {"min_p": least}, {"top_k": k, "top_p": p, "min_p": least * 0.1}):
        assert_keeps(x, backend, device, **limits)


def test_a_large_k_of_a_vocabulary(backend: str, device: torch.device) -> None:
    x = draw(1, 50000, device=torch.device("cpu"))
    for k in (700, 5000):
        assert_keeps(x, backend, device, top_k=k)


def test_shares_that_keep_all_and_that_keep_one(backend: str, device: torch.device) -> None:
    x = draw(4, 50, device=device)
    whole = flashsoft.fused_softmax(x, backend=backend)
    for limits in ({"top_p": 1.0}, {"min_p": 0.0}, {"top_p": torch.ones(4, device=device)}):
        torch.testing.assert_close(flashsoft.fused_softmax(x, backend=backend, **limits), whole, rtol=1e-6, atol=0)
    for limits in ({"top_p": torch.zeros(4, device=device)}, {"top_p": 1e-12}, {"min_p": 1.0}):
        y = flashsoft.fused_softmax(x, backend=backend, **limits)
        assert torch.equal(y.argmax(-1), x.argmax(-1)) and y.sum(-1).tolist() == [1.0] * 4


def test_equals_at_the_end_of_top_p_are_taken_lowest_index_first(backend: str, device: torch.device) -> None:
    for N in (10, 100, 9000):
        y = flashsoft.fused_softmax(torch.full((1, N), 2.0, device=device), top_p=0.3, backend=backend)
        kept = 3 * N // 10
        assert (y != 0).sum() == kept and bool((y[0, :kept] == y[0, 0]).all())
    x = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]], device=device)
    p = oracle.softmax(x.cpu().double())[0][0]
    y = flashsoft.fused_softmax(x, top_p=float(2 * p[1] + 1.5 * p[0]), backend=backend)
    assert (y != 0).tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize("N", [9, 9000])
def test_what_no_share_is_makes_its_row_nan(backend: str, device: torch.device, N: int) -> None:
    x = draw(4, N, device=device)
    bad = torch.tensor([0.5, NAN, -1.0, 2.0], device=device)
    for name in ("top_p", "min_p"):
        y, lse = flashsoft.fused_softmax(x, return_lse=True, backend=backend, **{name: bad})
        assert y.isnan().all(-1).tolist() == lse.isnan().tolist() == [False, True, True, False]
        assert bool(y[[0, 3]].isfinite().all())


@pytest.mark.parametrize("limits", [{"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 4, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("N", [12, 9000])
def test_what_is_not_finite(backend: str, device: torch.device, N: int, limits: dict[str, Any]) -> None:
    x = draw(4, N, device=device)
    x[1, 4], x[2, N - 1], x[3] = NAN, INF, -INF
    keep = torch.ones(4, N, dtype=torch.bool, device=device)
    y, lse = flashsoft.fused_softmax(x, mask=keep, return_lse=True, backend=backend, **limits)
    assert y.isnan().all(-1).tolist() == [False, True, True, False]
    assert bool((y[3] == 0).all()) and float(lse[3]) == -INF
    keep[1, 4] = keep[2, N - 1] = False  # what is masked does not leak
    y, _ = flashsoft.fused_softmax(x, mask=keep, return_lse=True, backend=backend, **limits)
    assert bool(y.isfinite().all()) and y.sum(-1).round(decimals=4).tolist() == [1.0, 1.0, 1.0, 0.0]


# ---- gradients, scale, softcap -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, F64])
@pytest.mark.parametrize("N", [40, 9000])
def test_gradients_go_through_what_is_kept(backend: str, device: torch.device, dtype: torch.dtype, N: int) -> None:
    if dtype == F64 and backend == "triton":
        pytest.skip("triton computes in float32")
    x = guarded(draw(2, N, device=device, dtype=dtype))
    # the ends of these fall where no rounding moves them
    for options in ({"min_p": 0.11}, {"top_k": 7, "min_p": 0.2}, {"scale": -0.5}, {"softcap": 2.0}):
        compare(x, backend, temperatures(2, device=device, dtype=dtype), **options)
    bias = draw(N, device=device, dtype=dtype)
    compare(x, backend, 0.7, bias=bias, scale=0.3, softcap=1.5)


def test_softcap_is_tanh(backend: str, device: torch.device) -> None:
    x = torch.cat((torch.linspace(-100, 100, 4001), torch.logspace(-8, 0, 500), torch.tensor([0.0, INF, 3e38])))
    x = x.to(device)
    for cap in (0.5, 30.0):
        _, lse = flashsoft.fused_softmax(x[:, None], softcap=cap, return_lse=True, backend=backend)
        want = cap * torch.tanh(x.cpu().double() / cap)
        torch.testing.assert_close(lse.cpu().double(), want, rtol=5e-7, atol=1e-30)


def test_softcap_comes_before_mask_and_temperature(backend: str, device: torch.device) -> None:
    x, keep = draw(3, 20, device=device, std=10.0), torch.rand(3, 20).to(device) < 0.6
    y = flashsoft.fused_softmax(x, 0.5, keep, softcap=5.0, backend=backend)
    want = torch.softmax((5 * torch.tanh(x / 5) / 0.5).masked_fill(~keep, -INF), -1)
    torch.testing.assert_close(y, want)
    assert bool((y[~keep] == 0).all())


@pytest.mark.parametrize("N", [20, 9000, 17000])
@pytest.mark.parametrize(("dtype", "out"), [(BF16, F32), (F32, BF16), (F16, F32), (F32, F64)])
def test_the_dtype_of_the_result(
    backend: str, device: torch.device, N: int, dtype: torch.dtype, out: torch.dtype
) -> None:
    if backend == "triton" and out == F64:
        pytest.skip("triton computes in float32")
    for limits in ({}, {"top_k": 9}):
        x = draw(2, N, device=device, dtype=dtype).requires_grad_()
        y = flashsoft.fused_softmax(x, 0.7, out_dtype=out, backend=backend, **limits)
        assert y.dtype == out
        want = flashsoft.fused_softmax(x.detach().double(), 0.7, **limits)
        torch.testing.assert_close(y.detach(), want.to(out), rtol=2 * torch.finfo(out).eps + 2e-6, atol=1e-9)
        (dx,) = torch.autograd.grad(y, x, draw(2, N, device=device, dtype=out))
        assert dx.dtype == dtype and bool(dx.isfinite().all())
