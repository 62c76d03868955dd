"""flashsoft.merge: the law of (m, s) in the user's hands, where a state is (out, lse)."""

from __future__ import annotations

import math

import inputs
import oracle
import pytest
import torch
from torch import Tensor

import flashsoft

NEG_INF = float("-inf")
Part = tuple[Tensor, Tensor]


def part(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, grad: bool = False) -> Part:
    out = torch.randn(*shape).to(device, dtype).requires_grad_(grad)
    lse = (3 * torch.randn(shape[:-1])).to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    return out, lse.requires_grad_(grad)


def nothing(like: Part) -> Part:
    return torch.zeros_like(like[0]), torch.full_like(like[1], NEG_INF)


def by_definition(a: Part, b: Part) -> Part:
    w = torch.sigmoid(a[1].double() - b[1].double()).unsqueeze(-1)
    return w * a[0].double() + (1 - w) * b[0].double(), torch.logaddexp(a[1].double(), b[1].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_by_definition(dtype: torch.dtype, device: torch.device) -> None:
    a, b = part(2, 3, 5, 8, device=device, dtype=dtype), part(2, 3, 5, 8, device=device, dtype=dtype)
    out, lse = flashsoft.merge(*a, *b)
    want_out, want_lse = by_definition(a, b)
    assert out.dtype == dtype and lse.dtype == a[1].dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want_out, atol=4 * eps, rtol=2 * eps)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-6, rtol=4e-7)


@pytest.mark.parametrize("cuts", [(0, 70), (1, 70), (35, 70), (64, 70), (10, 20, 50, 70), (0, 0, 70, 70)])
def test_attention_over_parts_of_the_keys(cuts: tuple[int, ...], backend: str, device: torch.device) -> None:
    q, k, v = inputs.attention_inputs(1, 4, 2, 9, 70, 16, 24, device=device)
    result: Part | None = None
    for start, end in zip((0, *cuts), cuts, strict=False):
        piece = flashsoft.attention(q, k[:, :, start:end], v[:, :, start:end], return_lse=True, backend=backend)
        result = piece if result is None else flashsoft.merge(*result, *piece)
    assert result is not None
    want, _ = oracle.attention(q, k, v)
    torch.testing.assert_close(result[0].cpu().double(), want.out, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(result[1].cpu().double(), want.lse, atol=2e-6, rtol=2e-6)
    # and the gradient through the merges is that of the whole
    dout, dlse = torch.randn_like(result[0]), torch.randn_like(result[1])
    grads = torch.autograd.grad(result, (q, k, v), (dout, dlse))
    want, _ = oracle.attention(q, k, v, dout=dout, dlse=dlse)
    for gradient, expected in zip(grads, (want.dq, want.dk, want.dv), strict=True):
        torch.testing.assert_close(gradient.cpu().double(), expected, atol=2e-5, rtol=2e-5)


def test_the_identity(device: torch.device) -> None:
    a = part(2, 5, 8, device=device)
    for out, lse in (flashsoft.merge(*a, *nothing(a)), flashsoft.merge(*nothing(a), *a)):
        assert torch.equal(out, a[0])
        torch.testing.assert_close(lse, a[1], rtol=1e-7, atol=0)


def test_nothing_and_nothing(device: torch.device) -> None:
    a = nothing(part(2, 5, 8, device=device))
    out, lse = flashsoft.merge(*a, *a)
    assert (out == 0).all() and (lse == NEG_INF).all()


def test_commutative(device: torch.device) -> None:
    a, b = part(2, 5, 8, device=device), part(2, 5, 8, device=device)
    b[1][0] = NEG_INF
    b[0][0] = 0.0
    for x, y in zip(flashsoft.merge(*a, *b), flashsoft.merge(*b, *a), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-7, atol=2e-7)


def test_associative(device: torch.device) -> None:
    a, b, c = (part(2, 5, 8, device=device) for _ in range(3))
    left = flashsoft.merge(*flashsoft.merge(*a, *b), *c)
    right = flashsoft.merge(*a, *flashsoft.merge(*b, *c))
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shift", [-3e4, -1e4, 1e4, 3e4, 1e30])
def test_a_shift_of_both_by_a_constant(shift: float, device: torch.device) -> None:
    a, b = part(2, 5, 8, device=device), part(2, 5, 8, device=device)
    shifted = [(out, torch.full_like(lse, shift)) for out, lse in (a, b)]
    out, lse = flashsoft.merge(*shifted[0], *shifted[1])
    torch.testing.assert_close(out, (a[0] + b[0]) / 2)
    torch.testing.assert_close(lse, torch.full_like(lse, shift) + math.log(2))


@pytest.mark.parametrize("difference", [200.0, 1e5, 3e38])
def test_the_larger_wins_far_apart(difference: float, device: torch.device) -> None:
    a, b = part(2, 5, 8, device=device), part(2, 5, 8, device=device)
    low = torch.full_like(b[1], -difference)
    high = torch.zeros_like(a[1])
    out, lse = flashsoft.merge(a[0], high, b[0], low)
    assert torch.equal(out, a[0]) and torch.equal(lse, high)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite(bad: float, device: torch.device) -> None:
    a, b = part(4, 8, device=device), part(4, 8, device=device)
    a[1][2] = bad
    out, lse = flashsoft.merge(*a, *b)
    assert lse[2].isnan() if bad != bad else lse[2] == bad
    others = [0, 1, 3]
    assert out[2].isnan().all() and out[others].isfinite().all() and lse[others].isfinite().all()


def test_gradcheck_in_all_four() -> None:
    cpu = torch.device("cpu")
    a, b = (part(3, 4, device=cpu, dtype=torch.float64, grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(flashsoft.merge, (*a, *b))
    assert torch.autograd.gradgradcheck(flashsoft.merge, (*a, *b))


def test_gradients_beside_an_empty_side(device: torch.device) -> None:
    """The full side gets the whole gradient, the empty side none, and where both are empty nobody does."""
    a, b = part(3, 4, device=device), part(3, 4, device=device)
    b[1][1:] = NEG_INF
    b[0][1:] = 0.0
    a[1][2] = NEG_INF
    a[0][2] = 0.0
    leaves = [t.requires_grad_() for t in (*a, *b)]
    out, lse = flashsoft.merge(*leaves)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    da, dla, db, dlb = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    assert all(t.isfinite().all() for t in (da, dla, db, dlb))
    torch.testing.assert_close(da[1], dout[1])
    torch.testing.assert_close(dla[1], dlse[1])
    assert (db[1:] == 0).all() and (dlb[1:] == 0).all()
    assert (da[2] == 0).all() and (dla[2] == 0).all()


def test_under_vmap(device: torch.device) -> None:
    a, b = part(3, 2, 5, 8, device=device), part(3, 2, 5, 8, device=device)
    for x, y in zip(torch.vmap(flashsoft.merge)(*a, *b), flashsoft.merge(*a, *b), strict=True):
        torch.testing.assert_close(x, y)


def test_compiled(device: torch.device) -> None:
    a, b = part(2, 5, 8, device=device), part(2, 5, 8, device=device)
    compiled = torch.compile(flashsoft.merge, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(*a, *b), flashsoft.merge(*a, *b), strict=True):
        torch.testing.assert_close(x, y)


def test_what_lies_over_no_keys_has_no_say(device: torch.device) -> None:
    """(anything, -inf) is the identity, NaN included, in values and gradients."""
    nothing = torch.full((2, 3), float("nan"), device=device), torch.full((2,), -torch.inf, device=device)
    out, lse = torch.randn(2, 3, device=device).requires_grad_(), torch.randn(2, device=device).requires_grad_()
    for merged in (flashsoft.merge(*nothing, out, lse), flashsoft.merge(out, lse, *nothing)):
        torch.testing.assert_close(merged, (out, lse))
        to_out, to_lse = torch.autograd.grad(merged[0].sum() + merged[1].sum(), (out, lse))
        torch.testing.assert_close((to_out, to_lse), (torch.ones_like(out), torch.ones_like(lse)))
