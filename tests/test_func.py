"""torch.func: gradients, Jacobians and batches of every public function, alone and nested, against torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap
from torch.nn import functional as F

import flashsoft

Row = Callable[[Tensor], Tensor]
ROWS: dict[str, tuple[Row, Row]] = {
    "softmax": (flashsoft.softmax, lambda t: torch.softmax(t, -1)),
    "log_softmax": (flashsoft.log_softmax, lambda t: torch.log_softmax(t, -1)),
    "logsumexp": (flashsoft.logsumexp, lambda t: torch.logsumexp(t, -1)),
    "fused_softmax": (
        lambda t: flashsoft.fused_softmax(t, 0.7, top_k=4),
        lambda t: torch.softmax(t.masked_fill(t < t.topk(4).values[..., -1:], -torch.inf) / 0.7, -1),
    ),
}


def loss_of(function: Row) -> Row:
    return lambda t: function(t).square().sum()


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    ours, theirs = ROWS[name]
    x = double(3, 7)
    torch.testing.assert_close(grad(loss_of(ours))(x), grad(loss_of(theirs))(x))
    torch.testing.assert_close(vmap(grad(loss_of(ours)))(x), vmap(grad(loss_of(theirs)))(x))
    torch.testing.assert_close(jacrev(ours)(x), jacrev(theirs)(x))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_second_derivatives_of_rows(name: str) -> None:
    ours, theirs = ROWS[name]
    x = double(2, 5)
    torch.testing.assert_close(jacrev(jacrev(loss_of(ours)))(x), jacrev(jacrev(loss_of(theirs)))(x))


def test_per_row_temperature() -> None:
    x, temperature = double(3, 7), torch.rand(3, dtype=torch.float64) + 0.5
    ours = grad(lambda t: flashsoft.fused_softmax(x, t).square().sum())(temperature)
    torch.testing.assert_close(ours, grad(lambda t: torch.softmax(x / t[:, None], -1).square().sum())(temperature))


def test_attention() -> None:
    q, k, v = (double(3, 2, 5, 8) for _ in range(3))
    for wanted in range(3):
        ours = grad(lambda *qkv: flashsoft.attention(*qkv).square().sum(), argnums=wanted)(q, k, v)
        theirs = grad(lambda *qkv: F.scaled_dot_product_attention(*qkv).square().sum(), argnums=wanted)(q, k, v)
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_single_examples_with_a_mask_made_inside() -> None:
    q, k, v = (double(3, 2, 5, 8) for _ in range(3))

    def one(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        keep = torch.ones(5, 5, dtype=torch.bool).tril()
        return flashsoft.attention(a[None], b[None], c[None], mask=keep).square().sum()

    for ours, x in zip(vmap(grad(one, argnums=(0, 1, 2)))(q, k, v), (q, k, v), strict=True):
        for i in range(3):
            alone = [t[i].clone().requires_grad_() for t in (q, k, v)]
            F.scaled_dot_product_attention(*(t[None] for t in alone), is_causal=True).square().sum().backward()
            position = [t is x for t in (q, k, v)].index(True)
            torch.testing.assert_close(ours[i], alone[position].grad)


def test_a_second_derivative_of_attention_is_a_clear_error() -> None:
    q, k, v = (double(1, 1, 3, 4) for _ in range(3))

    def once(a: Tensor) -> Tensor:
        return grad(lambda b: flashsoft.attention(b, k, v).square().sum())(a).square().sum()

    with pytest.raises(RuntimeError, match="differentiated once only"):
        grad(once)(q)


def test_forward_mode_is_a_clear_error() -> None:
    q, k, v = (double(1, 1, 3, 4) for _ in range(3))
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda a: flashsoft.attention(a, k, v), (q,), (q,))
