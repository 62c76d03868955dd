"""Faults that users met in what is added to scores, in dropout and in packed sequences: see test_user_faults.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import inputs
import pytest
import test_attention_terms as terms
import test_varlen as varlen
import torch
from cases import AttentionCase
from inputs import draw
from test_attention_terms import Options
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashsoft
from flashsoft import ALiBi, Causal

pytestmark = pytest.mark.usefixtures("poisoned")

F32 = torch.float32
CASE = AttentionCase(1, 2, 2, 6, 6, 16, 16)


@pytest.mark.parametrize("cap", [0.5, 1.0, 30.0])
def test_B19_softcap_goes_before_the_mask(cap: float, backend: str, device: torch.device) -> None:
    """However small the cap, what is masked has no weight: the first row is the first value."""

    def plant(leaves: dict[str, Tensor], keep: Tensor | None) -> None:
        leaves["query"].mul_(6.0)

    terms.check(replace(CASE, mask="causal"), Options(softcap=cap), F32, backend, device, plant)
    q, k, v = (draw(1, 2, 6, 16, device=device) for _ in range(3))
    out = flashsoft.attention(6 * q, k, v, mask=Causal(), softcap=cap, backend=backend)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])


def test_B21_the_sink_of_the_right_head_for_every_row(backend: str, device: torch.device) -> None:
    q, v = torch.zeros(2, 3, 5, 16, device=device), torch.ones(2, 3, 8, 16, device=device)
    sink = torch.tensor([-1.0, 0.5, 2.0], device=device)
    out = flashsoft.attention(q, draw(2, 3, 8, 16, device=device), v, sink=sink, backend=backend)
    torch.testing.assert_close(out, (8 / (8 + sink.exp())).view(1, 3, 1, 1).expand(out.shape))


def test_B21_the_gradient_of_sinks_of_grouped_heads(backend: str, device: torch.device) -> None:
    terms.check(AttentionCase(2, 4, 2, 5, 9, 16, 16, mask="causal"), Options(sink=True), F32, backend, device)


@pytest.mark.parametrize("Sq, Sk", [(6, 6), (1, 9), (4, 9)])
@pytest.mark.parametrize("slopes", ["h", "bh"])
def test_B23_alibi_lowers_far_keys_from_the_last_query(
    Sq: int, Sk: int, slopes: str, backend: str, device: torch.device
) -> None:
    for mask in ("none", "causal"):
        terms.check(AttentionCase(2, 4, 2, Sq, Sk, 16, 16, mask=mask), Options(slopes=slopes), F32, backend, device)
    q, k = torch.zeros(1, 1, Sq, 16, device=device), torch.zeros(1, 1, Sk, 16, device=device)
    v = torch.eye(Sk, device=device)[None, None]
    p = flashsoft.attention(q, k, v, bias=ALiBi(torch.ones(1, device=device)), backend=backend)
    assert (p[0, 0].argmax(-1) == torch.arange(Sk - Sq, Sk, device=device)).all()


@pytest.mark.parametrize("D, Dv", [(576, 512), (512, 512), (192, 128)])
def test_B29_values_narrower_than_wide_keys(D: int, Dv: int, backend: str, device: torch.device) -> None:
    terms.check(AttentionCase(1, 4, 1, 5, 9, D, Dv, mask="causal"), Options(), F32, backend, device)


@pytest.mark.parametrize("shape", ["bhqk", "1hqk", "b1qk", "111k", "bh1k", "qk", "hq1"])
def test_B44_the_gradient_of_a_bias_is_summed_over_what_it_was_broadcast_along(
    shape: str, backend: str, device: torch.device
) -> None:
    terms.check(AttentionCase(2, 4, 2, 5, 9, 16, 16), Options(bias=shape), F32, backend, device)


@pytest.mark.parametrize("whole, first", [(80, 0), (81, 3)])
def test_B45_a_bias_that_is_a_misaligned_slice(whole: int, first: int, backend: str, device: torch.device) -> None:
    S = 37
    bias = inputs.guarded(torch.randn(1, 2, S, whole), device=device)[..., first : first + S]
    results = []
    q, k, v = inputs.attention_inputs(1, 2, 2, S, S, 16, 16, device=device)
    for given in (bias, bias.contiguous()):
        out = flashsoft.attention(q, k, v, bias=given, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_B46_a_loss_on_lse_alone_reaches_every_term(backend: str, device: torch.device) -> None:
    options = Options("111k", None, "h", True, "h", 3.0)
    terms.check(AttentionCase(1, 2, 1, 5, 9, 16, 16), options, F32, backend, device, outputs="lse")


@pytest.mark.parametrize("wanted", range(4))
def test_B48_a_second_derivative_is_refused_never_wrong(wanted: int, backend: str, device: torch.device) -> None:
    shapes: tuple[tuple[int, ...], ...] = ((1, 1, 3, 8), (1, 1, 4, 8), (1, 1, 4, 8), (3, 4))
    leaves = [draw(*shape, device=device).requires_grad_() for shape in shapes]

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flashsoft.attention(q, k, v, bias=bias, backend=backend)

    (g,) = torch.autograd.grad(attend(*leaves).square().sum(), leaves[wanted], create_graph=True)
    with pytest.raises(RuntimeError, match="attention can be differentiated once only; for second derivatives use"):
        torch.autograd.grad(g.square().sum(), leaves[0])


def test_B52_the_backward_drops_what_the_forward_did(backend: str, device: torch.device) -> None:
    """The result is linear in value: <out, g> = <value, dvalue> for one mask and no other."""
    q, k, v = inputs.attention_inputs(1, 2, 2, 33, 40, 16, 16, device=device)
    torch.manual_seed(3)
    out = flashsoft.attention(q, k, v, dropout_p=0.4, backend=backend)
    g = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, g)
    assert abs((out * g).double().sum() - (v * dv).double().sum()) <= 1e-6 * (out * g).double().abs().sum()


def test_B52_dropout_under_checkpointing(backend: str, device: torch.device) -> None:
    q, k, v = inputs.attention_inputs(1, 2, 2, 33, 40, 16, 16, device=device)

    def attend(*qkv: Tensor) -> Any:
        return flashsoft.attention(*qkv, dropout_p=0.3, backend=backend)

    gradients = []
    for run in (attend, lambda *qkv: checkpoint(attend, *qkv, use_reentrant=False)):
        torch.manual_seed(11)
        gradients.append(torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("pack", ["alike", "empty_first", "no_keys", "no_queries", "fewer_tokens_than_sequences"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_B65_packed_sequences_some_of_them_empty(pack: str, mask: str, backend: str, device: torch.device) -> None:
    """Without keys the result is 0, without queries the gradients of keys and values are."""
    varlen.check(pack, mask, Options(sink=mask == "causal"), F32, backend, device)
