"""Faults that users of this field's packages met, each by its smallest input, B01 to B83.

Named after the ids of the project's list; those of what is added to scores are in test_attention_faults.py, those of
caches come with them. Expected values are float64, bounds tolerances.py's.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import inputs
import oracle
import pytest
import tolerances
import torch
import twin
from inputs import draw
from tolerances import assert_close_to
from torch import Tensor

import flashsoft
from flashsoft import Causal, Window

pytestmark = pytest.mark.usefixtures("poisoned")

NAN, INF, NEG_INF = float("nan"), float("inf"), float("-inf")
HALF = [torch.float16, torch.bfloat16]


def qkv(
    device: torch.device,
    B: int = 2,
    Hq: int = 2,
    Hkv: int | None = None,
    Sq: int = 5,
    Sk: int = 7,
    D: int = 16,
    Dv: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    return inputs.attention_inputs(B, Hq, Hkv or Hq, Sq, Sk, D, Dv or D, device=device, dtype=dtype)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: str,
    mask: Any = None,
    keep: Tensor | None = None,
    scale: float | None = None,
    dout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out, lse and the three gradients against float64."""
    out, lse = flashsoft.attention(q, k, v, mask=mask, scale=scale, return_lse=True, backend=backend)
    dout = torch.randn_like(out) if dout is None else dout
    grads = torch.autograd.grad(out, (q, k, v), dout)
    want, size = oracle.attention(q, k, v, keep, scale, dout)
    own = twin.attention(q, k, v, keep, scale, dout)
    for name, got in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
        half = name == "lse" and q.dtype in HALF
        floor = tolerances.FLOOR_LSE_HALF if half else None
        assert_close_to(got, getattr(want, name), getattr(own, name), getattr(size, name), floor=floor, name=name)
        if want.lse.isfinite().all():
            assert got.isfinite().all()
    return out, lse


def length(n: int, backend: str, device: torch.device) -> int:
    """n, or a tenth (at most 9,001) under the interpreter, whose tiles of long rows hold 512 elements."""
    interpreted = backend == "triton" and device.type == "cpu"
    return min(n // 10, 9001) if interpreted and n > 10_000 else n


def check_rows(got: Tensor, want: Tensor, own: Tensor | None = None, name: str = "y") -> None:
    """A row result: its terms are of its own size, or of 1 where a row is normalised to that."""
    assert_close_to(got, want, own, torch.full_like(want, float(want.detach()[want.isfinite()].abs().max())), name=name)


def causal_keep(Sq: int, Sk: int) -> Tensor:
    return oracle.causal(Sq, Sk)


# ---- masks and values that are not finite ------------------------------------------------------------------


def test_B01_one_masked_row_does_not_poison_the_gradients(backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, Hq=1, Sq=4, Sk=4, D=8)
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    mask[1, 0, 2] = False  # padding and a window leave this row no key
    out, lse = check(q, k, v, backend, mask.to(device), mask)
    assert (out[1, 0, 2] == 0).all() and lse[1, 0, 2] == NEG_INF
    (dq,) = torch.autograd.grad(flashsoft.attention(q, k, v, mask=mask.to(device), backend=backend).sum(), q)
    assert (dq[1, 0, 2] == 0).all()


def test_B02_a_masked_row_of_fused_softmax_is_zero_not_uniform(backend: str, device: torch.device) -> None:
    x = draw(3, 8, device=device).requires_grad_()
    keep = torch.ones(3, 8, dtype=torch.bool, device=device)
    keep[1] = False
    keep[2, 3:] = False
    y, lse = flashsoft.fused_softmax(x, mask=keep, return_lse=True, backend=backend)
    wide = x.detach().double().requires_grad_()
    want, want_lse = oracle.fused_softmax(wide, keep=keep)
    check_rows(y, want)
    check_rows(lse, want_lse, name="lse")
    assert (y[1] == 0).all() and lse[1] == NEG_INF
    g = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, g)
    check_rows(dx, torch.autograd.grad(want, wide, g.double())[0], name="dx")
    assert (dx[1] == 0).all() and (dx[2, 3:] == 0).all()


def test_B02_a_probability_that_underflows(backend: str, device: torch.device) -> None:
    """A backward that takes "output is 0" for masked has to agree with the definition here."""
    x = torch.tensor([[0.0, -200.0, 1.0]], device=device, requires_grad=True)
    g = torch.tensor([[1.0, 5.0, -1.0]], device=device)
    y = flashsoft.fused_softmax(x, mask=torch.ones(1, 3, dtype=torch.bool, device=device), backend=backend)
    wide = x.detach().double().requires_grad_()
    want = torch.autograd.grad(oracle.fused_softmax(wide)[0], wide, g.double())[0]
    check_rows(torch.autograd.grad(y, x, g)[0], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8], ids=str)
def test_B03_a_mask_that_is_not_boolean_is_refused(dtype: torch.dtype, device: torch.device) -> None:
    q, k, v = qkv(device)
    mask = torch.ones(5, 7, device=device).tril().to(dtype)
    with pytest.raises(TypeError, match="mask must be boolean"):
        flashsoft.attention(q, k, v, mask=mask)
    with pytest.raises(TypeError, match="mask must be boolean"):
        flashsoft.fused_softmax(draw(5, 7, device=device), mask=mask)


def test_B04_true_takes_part(backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, Sq=6, Sk=6)
    tril = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
    by_mask = flashsoft.attention(q, k, v, mask=tril, backend=backend)
    torch.testing.assert_close(by_mask, flashsoft.attention(q, k, v, mask=Causal(), backend=backend))
    x = draw(6, 6, device=device)
    y = flashsoft.fused_softmax(x, mask=tril, backend=backend)
    assert (y[~tril] == 0).all() and (y[tril] > 0).all()
    torch.testing.assert_close(flashsoft.fused_softmax(x, mask=Causal(), backend=backend), y)


@pytest.mark.parametrize("bad", [NAN, INF, NEG_INF])
def test_B05_masked_keys_and_scores_cannot_leak(bad: float, backend: str, device: torch.device) -> None:
    """One batch's padding holds anything (attention: see also test_attention.py)."""
    q, k, v = qkv(device, Sk=9)
    keep = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    keep[0, ..., 6:] = False
    with torch.no_grad():
        k[0, :, 6:] = bad
        v[0, :, 6:] = bad
    check(q, k, v, backend, keep.to(device), keep)
    x = draw(3, 9, device=device)
    x[:, 6:] = bad
    x.requires_grad_()
    live = (torch.arange(9, device=device) < 6).expand(3, 9)
    y = flashsoft.fused_softmax(x, mask=live, top_k=4, backend=backend)
    want, _ = oracle.fused_softmax(x.detach()[:, :6].double(), top_k=4)
    check_rows(y[:, :6], want)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert (y[:, 6:] == 0).all() and (dx[:, 6:] == 0).all() and dx.isfinite().all()


@pytest.mark.parametrize("n", [64, 1000, 40_000])
def test_B07_nan_reaches_its_whole_row_and_no_other(n: int, backend: str, device: torch.device) -> None:
    n = length(n, backend, device)
    x = draw(3, n, device=device)
    x[1, n - 1] = NAN
    x[1, 0] = 50.0
    for function in (flashsoft.softmax, flashsoft.log_softmax, flashsoft.fused_softmax):
        y = function(x, backend=backend)
        assert y[1].isnan().all(), function
        assert y[[0, 2]].isfinite().all()
    lse = flashsoft.logsumexp(x, backend=backend)
    assert lse[1].isnan() and lse[[0, 2]].isfinite().all()


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_B09_tiles_of_minus_infinity_before_the_only_finite_score(
    at: float, backend: str, device: torch.device
) -> None:
    n = length(100_000, backend, device)
    where = int(at * (n - 1))
    x = torch.full((1, n), NEG_INF, device=device)
    x[0, where] = 10.0
    x.requires_grad_()
    for function in (flashsoft.softmax, flashsoft.fused_softmax):
        y = function(x, backend=backend)
        assert y[0, where] == 1 and y.sum() == 1
    lse = flashsoft.logsumexp(x, backend=backend)
    assert abs(lse.item() - 10.0) <= 2e-6
    (dx,) = torch.autograd.grad(lse.sum(), x)
    assert dx[0, where] == 1 and dx.sum() == 1
    log = flashsoft.log_softmax(x, backend=backend)
    assert log[0, where] == 0 and (log == NEG_INF).sum() == n - 1


def test_B09_attention_whose_first_tiles_are_masked(backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, B=1, Hq=1, Sq=3, Sk=700)
    keep = torch.zeros(3, 700, dtype=torch.bool)
    keep[:, 650:] = True
    check(q, k, v, backend, keep.to(device), keep)


# ---- precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("n", [2048, 4096, 8192])
def test_B11_a_long_half_precision_row_of_equals(
    dtype: torch.dtype, n: int, backend: str, device: torch.device
) -> None:
    x = torch.full((2, n), 3.0, device=device, dtype=dtype)
    for function in (flashsoft.softmax, flashsoft.fused_softmax):
        y = function(x, backend=backend)
        assert y.dtype == dtype and (y == 1.0 / n).all()  # a power of two: exact
    lse = flashsoft.logsumexp(x, backend=backend)
    assert lse.dtype == torch.float32 and (lse - (3.0 + math.log(n))).abs().max() < 2e-6


def test_B12_log_softmax_far_from_zero(backend: str, device: torch.device) -> None:
    base = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    x = (base - 1.0e7).to(device)  # whole numbers: exact in float32
    want = torch.log_softmax(base.double(), -1)
    check_rows(flashsoft.log_softmax(x, backend=backend), want, torch.log_softmax(x, -1))
    check_rows(flashsoft.softmax(x, backend=backend), want.exp(), torch.softmax(x, -1))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_B14_attention_over_ones_is_one(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    q, k, _ = qkv(device, B=1, Sq=33, Sk=257, D=32, dtype=dtype)
    ones = torch.ones(1, 2, 257, 32, device=device, dtype=dtype)
    error = flashsoft.attention(q, k, ones, backend=backend).double() - 1
    eps = torch.finfo(dtype).eps
    assert error.abs().max() <= (16 if dtype == torch.float32 else 2) * eps
    # numerator rounded and denominator not: no drift to one side
    assert error.mean().abs() <= (4 if dtype == torch.float32 else 0.5) * eps


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_B15_lse_is_float32(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, B=1, Hq=1, Sq=9, Sk=700, D=64, dtype=dtype)
    _, lse = check(q, k, v, backend)
    assert lse.dtype == torch.float32 and lse.shape == (1, 1, 9)


@pytest.mark.parametrize(
    "dtype, temperature",
    [(torch.float16, 1e-5), (torch.float32, 1e-12), (torch.float32, 1e-38), (torch.bfloat16, 1e-30)],
)
@pytest.mark.parametrize("per_row", [False, True])
def test_B16_a_tiny_temperature_is_one_hot_not_nan(
    dtype: torch.dtype, temperature: float, per_row: bool, backend: str, device: torch.device
) -> None:
    x = torch.tensor([[2.875, 2.95, 11.06, -2.44], [-3.0, -1.0, -2.0, -9.0]], device=device, dtype=dtype)
    given = torch.full((2, 1), temperature, device=device) if per_row else temperature
    y = flashsoft.fused_softmax(x, temperature=given, backend=backend)
    assert torch.equal(y.float().cpu(), torch.tensor([[0.0, 0, 1, 0], [0, 1, 0, 0]]))


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN])
def test_B17_a_temperature_that_is_not_positive_is_refused(temperature: float, device: torch.device) -> None:
    with pytest.raises(ValueError, match="temperature must be finite and > 0"):
        flashsoft.fused_softmax(torch.tensor([[1.0, NEG_INF, 2.0]], device=device), temperature=temperature)


# ---- scale and windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, -1.0, -0.25, 3.0])
def test_B18_any_finite_scale(scale: float, backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, B=1, Sq=5, Sk=70, D=24)  # 70: padded lanes in every tile
    check(q, k, v, backend, scale=scale)
    q, k, v = qkv(device, B=1, Sq=6, Sk=6, D=24)
    check(q, k, v, backend, Causal(), causal_keep(6, 6), scale=scale)


@pytest.mark.parametrize("left, right", [(3, 0), (0, 0), (2, 2), (None, 0), (3, None)])
@pytest.mark.parametrize("Sq, Sk", [(12, 12), (5, 12), (1, 12)])
def test_B24_the_reach_of_a_window_is_inclusive(
    left: int | None, right: int | None, Sq: int, Sk: int, backend: str, device: torch.device
) -> None:
    q, k, v = qkv(device, B=1, Hq=1, Sq=Sq, Sk=Sk)
    check(q, k, v, backend, Window(left, right), oracle.band(Sq, Sk, left, right, Sk - Sq))


def test_B24_each_row_of_a_causal_window_sees_left_plus_one_keys(backend: str, device: torch.device) -> None:
    S, left = 40, 7
    q, k = torch.zeros(1, 1, S, 16, device=device), draw(1, 1, S, 16, device=device)
    v = torch.eye(S, device=device).view(1, 1, S, S)
    p = flashsoft.attention(q, k, v, mask=Causal() & Window(left), backend=backend)[0, 0]
    assert (p > 0).sum(-1).tolist() == [min(i + 1, left + 1) for i in range(S)]


def test_B25_unlimited_and_oversized_windows_are_plain_causal(backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, B=1, Hq=1, Sq=70, Sk=70)
    plain = flashsoft.attention(q, k, v, mask=Causal(), backend=backend)
    assert plain.abs().sum() > 0
    for left in (None, 69, 70, 10_000):
        for mask in (Window(left), Causal() & Window(left)):
            torch.testing.assert_close(flashsoft.attention(q, k, v, mask=mask, backend=backend), plain)


# ---- shapes and sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("Sq, Sk", [(2, 5), (1, 9), (3, 130), (64, 65), (129, 257)])
def test_B26_causal_with_more_keys_than_queries(Sq: int, Sk: int, backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, B=1, Hq=1, Sq=Sq, Sk=Sk)
    check(q, k, v, backend, Causal(), causal_keep(Sq, Sk))


def test_B26_one_query_sees_the_whole_cache(backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, Sq=1, Sk=33)
    torch.testing.assert_close(
        flashsoft.attention(q, k, v, mask=Causal(), backend=backend),
        flashsoft.attention(q, k, v, backend=backend),
    )


@pytest.mark.parametrize("Sq, Sk", [(5, 2), (200, 3), (130, 129)])
def test_B27_causal_with_more_queries_than_keys(Sq: int, Sk: int, backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, B=1, Hq=1, Sq=Sq, Sk=Sk)
    out, lse = check(q, k, v, backend, Causal(), causal_keep(Sq, Sk))
    assert (out[:, :, : Sq - Sk] == 0).all() and (lse[:, :, : Sq - Sk] == NEG_INF).all()
    assert lse[:, :, Sq - Sk :].isfinite().all()


@pytest.mark.parametrize("D", [1, 8, 40, 63, 72, 80, 96, 160, 192, 256])
def test_B28_head_sizes_that_are_no_power_of_two(D: int, backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, B=1, Hq=1, Sq=19, Sk=37, D=D)
    out, _ = check(q, k, v, backend)
    assert torch.equal(flashsoft.attention(q, k, v, backend=backend), out)


@pytest.mark.parametrize("D, Dv", [(192, 128), (16, 40), (40, 16), (96, 1)])
def test_B29_values_of_another_width(D: int, Dv: int, backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, B=1, Hq=2, Hkv=1, Sq=19, Sk=35, D=D, Dv=Dv)
    out, _ = check(q, k, v, backend, Causal(), causal_keep(19, 35))
    assert out.shape == (1, 2, 19, Dv)


@pytest.mark.parametrize("Sq, Sk", [(1, 1), (5, 1), (1, 5)])
def test_B31_one_query_or_one_key(Sq: int, Sk: int, backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, B=1, Sq=Sq, Sk=Sk)
    out, _ = check(q, k, v, backend)
    if Sk == 1:
        torch.testing.assert_close(out, v.expand_as(out))


def test_B31_one_column(backend: str, device: torch.device) -> None:
    x = draw(5, 1, device=device).requires_grad_()
    for function in (flashsoft.softmax, flashsoft.fused_softmax):
        y = function(x, backend=backend)
        assert (y == 1).all()
        assert (torch.autograd.grad(y.sum(), x)[0] == 0).all()
    assert (flashsoft.log_softmax(x, backend=backend) == 0).all()
    assert torch.equal(flashsoft.logsumexp(x, backend=backend), x[:, 0])


@pytest.mark.parametrize("B, H, Sq", [(0, 2, 5), (2, 2, 0), (0, 2, 0)])
def test_B32_an_empty_batch_or_no_query(B: int, H: int, Sq: int, backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, B=B, Hq=H, Sq=Sq, Sk=6)
    out, lse = flashsoft.attention(q, k, v, return_lse=True, backend=backend)
    assert out.shape == (B, H, Sq, 16) and lse.shape == (B, H, Sq)
    for x, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


@pytest.mark.parametrize("shape", [(0, 9), (9, 0), (0, 0), (2, 0, 3)])
def test_B32_no_rows_or_no_columns(shape: tuple[int, ...], backend: str, device: torch.device) -> None:
    x = torch.zeros(shape, device=device, requires_grad=True)
    for function in (flashsoft.softmax, flashsoft.log_softmax, flashsoft.fused_softmax):
        y = function(x, backend=backend)
        assert y.shape == shape
        assert torch.autograd.grad(y.sum(), x)[0].shape == shape
    lse = flashsoft.logsumexp(x, backend=backend)
    assert lse.shape == shape[:-1] and (lse == NEG_INF).all()


def test_B33_no_keys(backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, Sk=0)
    out, lse = flashsoft.attention(q, k, v, return_lse=True, backend=backend)
    assert out.shape == (2, 2, 5, 16) and (out == 0).all()
    assert (lse == NEG_INF).all()  # +inf would break every later merge
    dq, dk, _ = torch.autograd.grad(out.sum(), (q, k, v))
    assert (dq == 0).all() and dk.shape == k.shape


@pytest.mark.parametrize("Hq, Hkv, Sq", [(12, 2, 1), (6, 1, 6), (14, 2, 3), (6, 6, 5), (7, 1, 5)])
def test_B34_query_heads_share_key_heads_in_consecutive_groups(
    Hq: int, Hkv: int, Sq: int, backend: str, device: torch.device
) -> None:
    q, k, v = qkv(device, B=1, Hq=Hq, Hkv=Hkv, Sq=Sq, Sk=20)
    check(q, k, v, backend, Causal(), causal_keep(Sq, 20))


@pytest.mark.parametrize("n", [65_537, 128_256, 262_144, 1_300_000, 2_097_153])
def test_B36_rows_wider_than_a_block(n: int, backend: str, device: torch.device) -> None:
    """The last two are longer than the largest tile Triton allows."""
    if device.type == "cpu" and backend == "triton" and n > 65_537:
        pytest.skip("a length that matters to the hardware: interpreted, it is one more loop over tiles of 512")
    n = length(n, backend, device)
    x = draw(2 if n < 1_000_000 else 1, n, device=device).requires_grad_()
    wide = x.detach().double()
    want = torch.softmax(wide, -1)
    y = flashsoft.softmax(x, backend=backend)
    check_rows(y, want, torch.softmax(x, -1))
    check_rows(flashsoft.logsumexp(x, backend=backend), torch.logsumexp(wide, -1), name="lse")
    g = torch.randn_like(y)
    dx = want * (g - (g * want).sum(-1, keepdim=True))
    own = torch.autograd.grad(torch.softmax(x, -1), x, g)[0]
    check_rows(torch.autograd.grad(y, x, g)[0], dx, own, name="dx")


@pytest.mark.gpu
def test_B37_softmax_past_two_to_the_31_elements(device: torch.device) -> None:
    rows, n = 65_600, 32_768
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    torch.use_deterministic_algorithms(False)
    x = torch.zeros(rows, n, device=device, dtype=torch.bfloat16)
    x[-3:] = torch.randn(3, n, device=device)
    for function in (flashsoft.softmax, flashsoft.fused_softmax):
        y = function(x)
        check_rows(y[-3:], torch.softmax(x[-3:].double(), -1), torch.softmax(x[-3:], -1))
        assert (y[:2] == 1.0 / n).all()
        del y


@pytest.mark.parametrize("B, H", [(10_923, 6), (65_537, 1), (1, 65_537)])
def test_B39_more_than_65535_heads_forward(B: int, H: int, device: torch.device) -> None:
    """With gradients and lse: test_attention.py."""
    q, k, v = (x.detach() for x in qkv(device, B=B, Hq=H, Sq=2, Sk=3, D=4))
    out = flashsoft.attention(q, k, v, backend="triton" if device.type == "cuda" else "reference")
    want, size = oracle.attention(q, k, v)
    assert_close_to(out, want.out, None, size.out, floor=8.0, name="out")


# ---- layouts and gradients ---------------------------------------------------------------------------------


def test_B41_a_sum_hands_in_an_expanded_gradient(backend: str, device: torch.device) -> None:
    q, k, v = qkv(device, B=1, Sk=9)
    one = torch.ones((), device=device).expand(1, 2, 5, 16)
    check(q, k, v, backend, Causal(), causal_keep(5, 9), dout=one)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "fused_softmax"])
def test_B41_expanded_gradients_of_row_functions(name: str, backend: str, device: torch.device) -> None:
    g = draw(1, 33, device=device).expand(4, 33)
    x = draw(4, 33, device=device).requires_grad_()
    wide = x.detach().double().requires_grad_()
    run = torch.log_softmax if name == "log_softmax" else torch.softmax
    (dx,) = torch.autograd.grad(getattr(flashsoft, name)(x, backend=backend), x, g)
    own = torch.autograd.grad(run(x, -1), x, g)[0]
    check_rows(dx, torch.autograd.grad(run(wide, -1), wide, g.double())[0], own, name="dx")


def row_views(device: torch.device) -> Iterator[Tensor]:
    x = draw(6, 5, 4, device=device)
    yield x.transpose(0, 2)
    yield x[:, ::2]
    yield x.permute(1, 2, 0)
    yield x[..., :1].expand(6, 5, 9)
    yield x[::2, 1:]


@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("which", range(5))
def test_B43_row_functions_on_any_strides_and_dims(dim: int, which: int, backend: str, device: torch.device) -> None:
    x = list(row_views(device))[which].detach().requires_grad_()
    for name in ("softmax", "log_softmax", "logsumexp", "fused_softmax"):
        run = getattr(torch, "softmax" if name == "fused_softmax" else name)
        y = getattr(flashsoft, name)(x, dim=dim, backend=backend)
        wide = x.detach().double().requires_grad_()
        want = run(wide, dim)
        check_rows(y, want, run(x.detach(), dim), name=name)
        g = torch.randn_like(want)
        g = g.to(y.dtype)
        (dx,) = torch.autograd.grad(y, x, g)
        (own,) = torch.autograd.grad(run(x, dim), x, g)
        # dx is a difference of terms of the size of g times a weight
        size = g.double().abs().max() * torch.softmax(wide.detach(), dim).max()
        expected = torch.autograd.grad(want, wide, g.double())[0]
        assert_close_to(dx, expected, own, torch.full_like(expected, float(size)), name=f"d{name}")


def test_B46_the_gradient_through_lse(backend: str, device: torch.device) -> None:
    """lse is the natural log of the true sum, and a loss on it reaches query and key."""
    q, k, v = qkv(device, B=1, Sk=9)
    out, lse = flashsoft.attention(q, k, v, mask=Causal(), return_lse=True, backend=backend)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT / 4 + torch.where(causal_keep(5, 9), 0.0, NEG_INF).to(device)
    want_lse, want = torch.logsumexp(scores, -1), torch.softmax(scores, -1) @ leaves[2]
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-6, rtol=1e-6)
    got = torch.autograd.grad(lse.square().mean() + (out * 0.3).sum(), (q, k, v))
    expected = torch.autograd.grad(want_lse.square().mean() + (want * 0.3).sum(), leaves)
    alone = torch.autograd.grad(flashsoft.attention(q, k, v, return_lse=True, backend=backend)[1].sum(), (q, k, v))
    assert alone[0].abs().max() > 0 and (alone[2] == 0).all()
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("which", ["softmax", "log_softmax", "fused_softmax", "attention"])
def test_B49_a_result_changed_in_place_is_seen_by_autograd(which: str, backend: str, device: torch.device) -> None:
    """The saved result is the user's: changing it must raise, or not matter."""
    x = draw(1, 1, 4, 9, device=device).requires_grad_()
    y = (
        flashsoft.attention(x, x, x, backend=backend)
        if which == "attention"
        else getattr(flashsoft, which)(x, backend=backend)
    )
    y.mul_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_B49_an_input_changed_in_place_is_seen_by_autograd(backend: str, device: torch.device) -> None:
    leaf = draw(1, 2, 4, 16, device=device).requires_grad_()
    q = leaf * 1.0
    out = flashsoft.attention(q, leaf, leaf, backend=backend)
    with torch.no_grad():
        q.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_B53_the_backward_repeats_its_bits(device: torch.device) -> None:
    """Under torch's own switch too; without it: test_attention.py."""
    backend = "triton" if device.type == "cuda" else "reference"
    q, k, v = qkv(device, B=1, Hq=4, Hkv=2, Sq=300, Sk=300, D=32)
    dout = draw(1, 4, 300, 32, device=device)
    torch.use_deterministic_algorithms(True)  # an operation that is not deterministic raises
    runs = [
        torch.autograd.grad(flashsoft.attention(q, k, v, mask=Causal(), backend=backend), (q, k, v), dout)
        for _ in range(5)
    ]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


# ---- top-k -------------------------------------------------------------------------------------------------


def test_B61_ties_at_the_border_keep_exactly_k(backend: str, device: torch.device) -> None:
    x = torch.tensor([[1.0, 2.0, 2.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0, 5.0]], device=device)
    y = flashsoft.fused_softmax(x, top_k=3, backend=backend)
    want, _ = oracle.fused_softmax(x.double(), top_k=3)
    assert torch.equal(y > 0, want > 0) and (y > 0).sum(-1).tolist() == [3, 3]
    assert (y[0] > 0).tolist() == [False, True, True, False, True]  # lowest index first
    check_rows(y, want)


def test_B61_the_choice_among_ties_does_not_depend_on_the_batch(backend: str, device: torch.device) -> None:
    x = torch.randint(0, 4, (1, 500)).float().to(device)
    alone = flashsoft.fused_softmax(x, top_k=37, backend=backend)
    for rows in (2, 8, 33):
        many = flashsoft.fused_softmax(x.repeat(rows, 1), top_k=37, backend=backend)
        assert torch.equal(many[rows - 1], alone[0])


@pytest.mark.parametrize("k", [7, 8, 1000])
def test_B62_k_at_or_above_the_length_keeps_all(k: int, backend: str, device: torch.device) -> None:
    x = draw(3, 7, device=device)
    for top_k in (k, torch.full((3,), k, device=device)):
        y = flashsoft.fused_softmax(x, top_k=top_k, backend=backend)
        check_rows(y, torch.softmax(x.double(), -1))


@pytest.mark.parametrize("k", [0, -1])
def test_B62_k_below_one_is_refused(k: int, device: torch.device) -> None:
    with pytest.raises(ValueError, match="top_k must be >= 1"):
        flashsoft.fused_softmax(draw(3, 7, device=device), top_k=k)


@pytest.mark.parametrize("n, k", [(50, 1), (50, 10), (5000, 64), (128_256, 50)])
def test_B64_what_is_kept_is_renormalised_and_the_rest_gets_no_gradient(
    n: int, k: int, backend: str, device: torch.device
) -> None:
    x = draw(2, length(n, backend, device), device=device).requires_grad_()
    y = flashsoft.fused_softmax(x, top_k=k, temperature=0.7, backend=backend)
    wide = x.detach().double().requires_grad_()
    want, _ = oracle.fused_softmax(wide, 0.7, top_k=k)
    check_rows(y, want)
    assert (y.double().sum(-1) - 1).abs().max() < 1e-6
    g = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, g)
    assert_close_to(
        dx,
        torch.autograd.grad(want, wide, g.double())[0],
        None,
        want * g.abs().amax().double() * 2,
        name="dx",
    )
    assert (dx[want == 0] == 0).all()


# ---- merging, batches --------------------------------------------------------------------------------------


def test_B70_a_row_does_not_depend_on_its_batch_mates(backend: str, device: torch.device) -> None:
    x = draw(70, 301, device=device)
    for name in ("softmax", "log_softmax", "logsumexp", "fused_softmax"):
        run: Callable[..., Tensor] = getattr(flashsoft, name)
        whole = run(x, backend=backend)
        for i in (0, 7, 69):
            alone = run(x[i : i + 1], backend=backend)[0]
            # torch vectorises over rows or along them by their number: the reference is equal to rounding
            assert torch.equal(alone, whole[i]) or (
                backend == "reference" and torch.allclose(alone, whole[i], rtol=1e-6, atol=1e-7)
            )


@pytest.mark.parametrize("shift", [-3e4, 0.0, 3e4])
def test_B71_merging_empty_states_and_far_ones(shift: float, device: torch.device) -> None:
    zeros, empty = torch.zeros(2, 3, 16, device=device), torch.full((2, 3), NEG_INF, device=device)
    out, lse = flashsoft.merge(zeros, empty, zeros, empty)
    assert (out == 0).all() and (lse == NEG_INF).all()
    a, b = draw(2, 3, 16, device=device), draw(2, 3, 16, device=device)
    near = torch.full((2, 3), shift, device=device)
    for args in ((a, near, zeros, empty), (zeros, empty, a, near)):
        out, lse = flashsoft.merge(*args)
        assert torch.equal(out, a) and torch.equal(lse, near)
    out, lse = flashsoft.merge(a, near, b, near + 1.0)
    w = 1 / (1 + math.e)
    torch.testing.assert_close(out.double(), w * a.double() + (1 - w) * b.double(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), near.double() + math.log(1 + math.e), atol=1e-6, rtol=1e-7)


# ---- modules and the run time (compile, export, transforms: test_ops.py) -----------------------------------


def test_B75_the_module_can_be_exported(device: torch.device) -> None:
    module = flashsoft.FusedAttention(32, 4, num_kv_heads=2).to(device).eval()
    x = draw(2, 9, 32, device=device)
    exported = torch.export.export(module, (x,), strict=False)
    torch.testing.assert_close(exported.module()(x), module(x))


def test_B77_autocast(device: torch.device) -> None:
    module = flashsoft.FusedAttention(32, 4).to(device)
    x = draw(2, 9, 32, device=device).requires_grad_()
    want = module(x).detach()
    q, k, v = qkv(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = module(x)
        out = flashsoft.attention(q, k.bfloat16(), v)  # projections of mixed dtypes arrive here
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), want, atol=5e-2, rtol=5e-2)
    y.float().square().sum().backward()
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in module.parameters())
    assert x.grad is not None and x.grad.dtype == torch.float32 and q.grad is not None and q.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["attention", "softmax"])
def test_B78_modules_copy_pickle_and_reload_after_use(kind: str, device: torch.device) -> None:
    if kind == "attention":
        module = flashsoft.FusedAttention(32, 4, num_kv_heads=2).to(device)
        x = draw(2, 5, 32, device=device)
    else:
        module, x = flashsoft.FusedSoftmax().to(device), draw(2, 5, device=device)
    x.requires_grad_()
    want = module(x)
    want.square().sum().backward()
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(again(x), want)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = copy.deepcopy(module)
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    torch.testing.assert_close(fresh(x), want)
    assert {name for name, _ in module.named_parameters()} == set(module.state_dict())


@pytest.mark.gpu
def test_B80_tensors_on_a_device_that_is_not_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda:1")
    check(*qkv(other, Sk=9), "triton", Causal(), causal_keep(5, 9))
    x = draw(4, 9, device=other)
    y = flashsoft.softmax(x)
    check_rows(y, torch.softmax(x.double(), -1))
    assert y.device == other and torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_B81_kernels_run_on_the_current_stream(device: torch.device) -> None:
    x, source = torch.zeros(4, 1000, device=device), torch.randn(4, 1000, device=device)
    flashsoft.softmax(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
        x.copy_(source)
        y = flashsoft.softmax(x)
    side.synchronize()
    check_rows(y, torch.softmax(source.double(), -1))


def test_B81_a_backward_in_a_thread_of_its_own(backend: str, device: torch.device) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            check(*qkv(device, B=1, Sk=9), backend)
        except BaseException as error:  # handed to the main thread
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures, failures


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
def test_B82_a_config_of_half_precision_is_not_used_for_float32(D: int, device: torch.device) -> None:
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        check(*qkv(device, B=1, Sq=256, Sk=256, D=D, dtype=dtype), "triton", Causal(), causal_keep(256, 256))


@pytest.mark.gpu
def test_B82_new_lengths_do_not_compile_again(device: torch.device) -> None:
    import time

    def once(S: int) -> float:
        q, k, v = qkv(device, B=1, Hq=4, Sq=S, Sk=S, D=64, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        start = time.perf_counter()
        flashsoft.attention(q, k, v, mask=Causal()).sum().backward()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for S in (500, 512, 513, 1024):
        once(S)
    assert max(once(S) for S in range(600, 1000, 17)) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("D", [192, 256])
def test_B83_wide_heads_fit_into_shared_memory(D: int, dtype: torch.dtype, device: torch.device) -> None:
    check(*qkv(device, B=1, Sq=200, Sk=200, D=D, dtype=dtype), "triton", Causal(), causal_keep(200, 200))
