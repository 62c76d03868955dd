"""The repaired interpreter computes in bfloat16 and float8 what torch does."""

from __future__ import annotations

import pytest
import torch
from conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("kernels are not interpreted here", allow_module_level=True)

import triton
import triton.language as tl

from flashsoft.kernels import interpreter

PACKED = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def cast_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@triton.jit
def arithmetic_kernel(a, b, y, n, N: tl.constexpr):
    i = tl.arange(0, N)
    u, v = tl.load(a + i), tl.load(b + i)
    tl.store(y + i, u + v)
    tl.store(y + N + i, u * v)
    tl.store(y + 2 * N + i, tl.where(u > v, u, -v))
    total = tl.zeros((N,), tl.float32)
    for _ in range(0, n):
        total += v.to(tl.float32)
    tl.store(y + 3 * N + i, total.to(y.dtype.element_ty))
    tl.store(y + 4 * N + i, i.to(y.dtype.element_ty) * 0 + tl.max(u, 0))


@triton.jit
def dot_kernel(a, b, y, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(y + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def test_repaired_once() -> None:
    assert interpreter.repair() and interpreter.repair()


@pytest.mark.parametrize("dtype", PACKED)
def test_casts_round_to_nearest_even(dtype: torch.dtype) -> None:
    x = torch.randn(4096) * torch.logspace(-3, 2, 4096)
    x[:3] = torch.tensor([0.0, -0.0, float("nan")])
    y = torch.empty(4096, dtype=dtype)
    cast_kernel[(1,)](x, y, 4096)
    assert torch.equal(y.float().nan_to_num(7e7), x.to(dtype).float().nan_to_num(7e7))
    back = torch.empty(4096)
    cast_kernel[(1,)](y, back, 4096)
    assert torch.equal(back.nan_to_num(7e7), y.float().nan_to_num(7e7))


@pytest.mark.parametrize("dtype", PACKED[1:])
def test_float8_saturates(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x, y = torch.tensor([1e6, -1e6]), torch.empty(2, dtype=dtype)
    cast_kernel[(1,)](x, y, 2)
    assert y.float().tolist() == [largest, -largest]


def test_arithmetic_of_bfloat16() -> None:
    a, b = torch.randn(2, 64).bfloat16()
    y = torch.empty(5, 64, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](a, b, y, 3, 64)
    assert torch.equal(y[0], a + b)
    assert torch.equal(y[1], a * b)
    assert torch.equal(y[2], torch.where(a > b, a, -b))
    assert torch.equal(y[3], (b.float() + b.float() + b.float()).bfloat16())
    assert torch.equal(y[4], a.max().expand(64))


def test_dot_of_bfloat16() -> None:
    a, b = torch.randn(2, 16, 16).bfloat16()
    y = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, y, 16)
    torch.testing.assert_close(y, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
