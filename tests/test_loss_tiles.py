"""What the cross entropy kernels rest on: exponents folded to one FMA, the soft cap, and how rows are cut."""

from __future__ import annotations

import pytest
import torch
from conftest import HAS_GPU, INTERPRETED
from torch import Tensor

if not HAS_GPU and not INTERPRETED:
    pytest.skip("kernels do not run here", allow_module_level=True)

import triton
import triton.language as tl

from flashsoft.kernels import interpreter  # noqa: F401 (before any kernel is launched)
from flashsoft.kernels.softcap import softcap, softcap_slope
from flashsoft.kernels.softmax import exponential_folded, fold
from flashsoft.tuning.losses import GRADIENT, OVERWRITE, STATE, loss_config, pieces
from flashsoft.tuning.rows import Device, parts

COLS = 8
EPS = torch.finfo(torch.float32).eps


@triton.jit
def folded_kernel(x, y, COLS: tl.constexpr):
    """exp(x - max(x)) of the row that the program has."""
    at_x = tl.program_id(0) * COLS + tl.arange(0, COLS)
    row = tl.load(x + at_x)
    c, at, unit = fold(tl.max(row, 0))
    tl.store(y + at_x, tl.div_rn(exponential_folded(row, c, at), tl.zeros_like(row) + unit))


@triton.jit
def softcap_kernel(x, y, cap, COLS: tl.constexpr):
    at = tl.program_id(0) * COLS + tl.arange(0, COLS)
    tl.store(y + at, softcap(tl.load(x + at), cap))


@triton.jit
def softcap_slope_kernel(x, y, cap, COLS: tl.constexpr):
    at = tl.program_id(0) * COLS + tl.arange(0, COLS)
    tl.store(y + at, softcap_slope(tl.load(x + at), cap))


def run(kernel: object, x: Tensor, *args: float) -> Tensor:
    """The kernel's result for each row of x, a power of two wide."""
    y = torch.full_like(x, float("nan"))
    kernel[(x.shape[0],)](x, y, *args, COLS=x.shape[1])  # type: ignore[index]
    return y


@pytest.mark.parametrize("offset", [0.0, 1e-3, -88.0, 1e4, -3e6, 1e7, 2.0**30 - 64, -(2.0**30), 2.0**30, 1e12, -3e38])
def test_folded_exponents_are_exact_in_x_minus_m(offset: float, device: torch.device) -> None:
    spread = max(1.0, abs(offset) * 2**-23)
    x = ((torch.rand(16, COLS) * 8 - 8) * spread + offset).float().clamp(-3.4e38, 3.4e38).to(device)
    y = run(folded_kernel, x).double().cpu()
    away = x.double().cpu() - x.double().cpu().amax(1, keepdim=True)
    assert bool((y.amax(1) == 1.0).all())
    assert float((y - away.exp()).abs().max()) < 8 * EPS


def test_folded_exponents_of_infinities(device: torch.device) -> None:
    inf = float("inf")
    x = torch.tensor([[-inf] * 8, [-inf, 0.0] * 4, [inf, 0.0] * 4], device=device)
    assert run(folded_kernel, x).tolist() == [[0.0] * 8, [0.0, 1.0] * 4, [inf, 1.0] * 4]


@pytest.mark.parametrize("cap", [1e-3, 0.5, 0.7, 3.0, 30.0, 1e6])
def test_softcap_is_good_to_a_few_ulp(cap: float, device: torch.device) -> None:
    """Everywhere in what x / cap can be: x far below the cap, where tanh(a) is a, and far above."""
    cap = float(torch.tensor(cap))  # as kernels have it
    a = torch.cat((torch.logspace(-30, -3, 8192), torch.logspace(-3, 1, 32768), torch.logspace(1, 30, 8192)))
    x = (torch.cat((a, -a)) * cap).view(-1, 4096)
    y = run(softcap_kernel, x.to(device), cap).double().cpu()
    want = cap * torch.tanh(x.double() / cap)
    error = (y - want) / want
    assert float(error.abs().max()) <= 4 * EPS
    middle = (x.abs() > 1e-3 * cap) & (x.abs() < 10 * cap)
    assert float(error[middle].square().mean().sqrt()) <= EPS
    slope = run(softcap_slope_kernel, x.to(device), cap).double().cpu()
    assert float((slope - torch.cosh(x.double() / cap) ** -2).abs().max()) <= 4 * EPS
    far = x.abs() > 9 * cap
    assert bool((slope[far] < 2e-7).all())  # it falls on towards 0
    rising = y.flatten()[x.flatten().argsort()].diff()
    assert float(rising.min()) >= -4 * EPS * cap


@pytest.mark.parametrize("cap", [1e-3, 30.0, 1e6])
def test_softcap_of_what_is_not_finite_or_tiny(cap: float, device: torch.device) -> None:
    inf, tiny = float("inf"), 2.0**-126
    x = torch.tensor([[0.0, -0.0, inf, -inf, 3e38, -3e38, float("nan"), tiny / 8]], device=device)
    y, slope = run(softcap_kernel, x, cap).cpu()[0], run(softcap_slope_kernel, x, cap).cpu()[0]
    torch.testing.assert_close(y[:6], torch.tensor([0.0, 0.0, cap, -cap, cap, -cap]), rtol=2 * EPS, atol=0.0)
    assert y[:2].signbit().tolist() == [False, True]
    assert bool(y[6].isnan()) and bool(slope[6].isnan())
    assert 0.0 <= float(y[7]) <= tiny * max(1.0, cap)  # a GPU may take it for 0
    torch.testing.assert_close(slope[[0, 1, 7]], torch.ones(3), rtol=2 * EPS, atol=0.0)
    torch.testing.assert_close(slope[2:6], torch.zeros(4), rtol=0.0, atol=1e-30)


H200 = Device("sm_90", 132)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("n", [1, 7, 100, 1024, 4096, 16384, 16385, 50257, 128256, 2_097_153])
def test_parts_hold_their_rows(n: int, itemsize: int) -> None:
    for rows_inner in (False, True):
        for op in (STATE, GRADIENT):
            config = loss_config(op, n, itemsize, rows_inner, H200)
            share = pieces(config, n)
            assert share.cols <= config.block_cols * config.tiles and share.count * share.cols >= n
            assert (share.count - 1) * share.cols < n
            held = config.block_rows * config.block_cols * config.tiles * itemsize // 4
            assert held <= config.num_warps * 32 * 32, "registers of a thread"
    config = loss_config(OVERWRITE, n, itemsize, False, H200)
    share = parts(config, n)
    assert share.whole == (n <= 524_288 * 2 // itemsize)
    assert not share.whole or share.cols <= config.block_cols * config.tiles
    if n == 128_256 and itemsize == 2:
        assert (share.count, config.tiles, config.num_warps) == (8, 8, 8)
