"""The drop-in: torch's signature, torch's results."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import flashsoft

Shape = tuple[int, ...]


def draw(shape: Shape, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).requires_grad_()


def agrees(shapes: tuple[Shape, Shape, Shape], device: torch.device, **options: Any) -> None:
    """Result and gradients equal torch's, in float64 there, within what float32 rounding explains."""
    ours = [draw(shape, device) for shape in shapes]
    theirs = [x.detach().cpu().double().requires_grad_() for x in ours]
    out = flashsoft.scaled_dot_product_attention(*ours, **options)
    moved = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}
    want = F.scaled_dot_product_attention(*theirs, **moved)
    torch.testing.assert_close(out.cpu().double(), want, atol=2e-6, rtol=2e-6)
    dout = torch.randn(out.shape, device=device)
    got = torch.autograd.grad(out, ours, dout)
    for name, x, y in zip("qkv", got, torch.autograd.grad(want, theirs, dout.cpu().double()), strict=True):
        torch.testing.assert_close(x.cpu().double(), y, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"d{name}: {m}")


def test_the_signature_is_torchs() -> None:
    described = inspect.signature(flashsoft.scaled_dot_product_attention).parameters
    assert list(described) == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert [p.default for p in described.values()][3:] == [None, 0.0, False, None, False]


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
        ((5, 8), (7, 8), (7, 3)),
        ((4, 5, 8), (4, 7, 8), (4, 7, 3)),
        ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)),
        ((2, 4, 5, 8), (1, 1, 7, 8), (2, 1, 7, 8)),
    ],
    ids=str,
)
def test_leading_dimensions(shapes: tuple[Shape, Shape, Shape], device: torch.device) -> None:
    agrees(shapes, device)


@pytest.mark.parametrize("mask_shape", [(5, 7), (2, 1, 5, 7), (1, 3, 1, 7), (2, 3, 5, 7)], ids=str)
def test_boolean_masks(mask_shape: Shape, device: torch.device) -> None:
    keep = torch.rand(mask_shape) > 0.4
    keep[..., 0] = True  # of an empty row torch makes NaN on some paths
    agrees(((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), device, attn_mask=keep.to(device))


@pytest.mark.parametrize("mask_shape", [(5, 7), (2, 1, 5, 7), (1, 3, 1, 7), (2, 3, 5, 7), (7,)], ids=str)
def test_added_masks_and_their_gradient(mask_shape: Shape, device: torch.device) -> None:
    bias = torch.randn(mask_shape)
    bias[torch.rand(mask_shape) > 0.7] = -torch.inf
    bias[..., 0] = 0.5
    shapes = ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    ours = [draw(shape, device) for shape in shapes] + [bias.to(device).requires_grad_()]
    theirs = [x.detach().cpu().double().requires_grad_() for x in ours]
    out = flashsoft.scaled_dot_product_attention(*ours)
    want = F.scaled_dot_product_attention(*theirs)
    torch.testing.assert_close(out.cpu().double(), want, atol=2e-6, rtol=2e-6)
    dout = torch.randn(out.shape, device=device)
    got = torch.autograd.grad(out, ours, dout)
    for x, y in zip(got, torch.autograd.grad(want, theirs, dout.cpu().double()), strict=True):
        torch.testing.assert_close(x.cpu().double(), y, atol=1e-5, rtol=1e-5)


def test_an_added_mask_of_more_leading_dimensions(device: torch.device) -> None:
    shapes = ((2, 3, 2, 5, 8), (2, 3, 2, 7, 8), (2, 3, 2, 7, 8))
    q, k, v = (draw(shape, device) for shape in shapes)
    bias = torch.randn(3, 1, 5, 7, device=device).requires_grad_()
    theirs = [x.detach().cpu().double().requires_grad_() for x in (q, k, v, bias)]
    out = flashsoft.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    want = F.scaled_dot_product_attention(*theirs)
    torch.testing.assert_close(out.cpu().double(), want, atol=2e-6, rtol=2e-6)
    (got,) = torch.autograd.grad(out.square().sum(), bias)
    (right,) = torch.autograd.grad(want.square().sum(), theirs[3])
    torch.testing.assert_close(got.cpu().double(), right, atol=1e-5, rtol=1e-5)


def test_a_row_of_an_added_mask_that_leaves_nothing_is_zero(device: torch.device) -> None:
    q, k, v = (draw((1, 1, 3, 8), device) for _ in range(3))
    bias = torch.zeros(3, 3, device=device)
    bias[1] = -torch.inf
    out = flashsoft.scaled_dot_product_attention(q, k, v, bias)
    assert (out[0, 0, 1] == 0).all() and (out[0, 0, ::2] != 0).all()


def test_dropout_always_applies(device: torch.device) -> None:
    q, k, v = (draw((2, 2, 20, 8), device).detach() for _ in range(3))
    torch.manual_seed(1)
    first = flashsoft.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    second = flashsoft.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(flashsoft.scaled_dot_product_attention(q, k, v, dropout_p=0.5), first)
    assert (flashsoft.scaled_dot_product_attention(q, k, v, dropout_p=1.0) == 0).all()


def test_a_mask_without_heads(device: torch.device) -> None:
    keep = torch.ones(5, 7, dtype=torch.bool).tril().to(device)
    agrees(((5, 8), (7, 8), (7, 3)), device, attn_mask=keep)
    agrees(((4, 5, 8), (4, 7, 8), (4, 7, 3)), device, attn_mask=keep.expand(4, 5, 7))


def test_causal_is_upper_left(device: torch.device) -> None:
    agrees(((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)), device, is_causal=True, scale=0.3)


def test_grouped_heads(device: torch.device) -> None:
    shapes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    agrees(shapes, device, enable_gqa=True)
    with pytest.raises(ValueError, match="without enable_gqa"):
        flashsoft.scaled_dot_product_attention(*(draw(shape, device) for shape in shapes))


def test_a_row_that_sees_nothing_is_zero(device: torch.device) -> None:
    q, k, v = (draw((1, 1, 3, 8), device) for _ in range(3))
    keep = torch.tensor([[True, True, True], [False, False, False], [True, False, True]], device=device)
    out = flashsoft.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    assert (out[0, 0, 1] == 0).all() and (out[0, 0, ::2] != 0).all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dropout_p": 1.1}, ValueError, "dropout_p must be 0 to 1"),
        ({"attn_mask": torch.ones(3, 3, dtype=torch.bool), "is_causal": True}, ValueError, "attn_mask must be None"),
        ({"attn_mask": torch.zeros(3, 3, dtype=torch.int64)}, TypeError, "attn_mask must be a boolean tensor"),
        ({"attn_mask": torch.zeros(3, 3, dtype=torch.float16)}, TypeError, "attn_mask must be a boolean tensor"),
        ({"attn_mask": torch.zeros(4, 3)}, ValueError, "attn_mask must broadcast"),
        ({"attn_mask": torch.ones(4, 4, dtype=torch.bool)}, ValueError, "attn_mask must broadcast"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], words: str) -> None:
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(error, match=words):
        flashsoft.scaled_dot_product_attention(q, q, q, **options)


def test_bad_shapes() -> None:
    q = torch.zeros(2, 2, 3, 8)
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        flashsoft.scaled_dot_product_attention(torch.zeros(8), q, q)
    with pytest.raises(ValueError, match="leading dimensions that broadcast"):
        flashsoft.scaled_dot_product_attention(q, torch.zeros(3, 2, 3, 8), torch.zeros(3, 2, 3, 8))


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 2, 0, 3, 8), (2, 0, 3, 8), (0, 2, 3, 8), (2, 2, 0, 8)], ids=str)
def test_empty_dimensions(shape: Shape, device: torch.device) -> None:
    q, k, v = (draw(shape, device) for _ in range(3))
    keep = torch.ones(shape[-2], shape[-2], dtype=torch.bool, device=device)
    out = flashsoft.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    assert out.shape == shape
    assert [g.shape for g in torch.autograd.grad(out.sum(), (q, k, v))] == [torch.Size(shape)] * 3
