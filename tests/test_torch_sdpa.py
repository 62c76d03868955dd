"""flashsoft as torch's flash attention. On a CPU torch never chooses that, so its operators are called by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flashsoft
from flashsoft import Causal, Window, env
from flashsoft.integrations import torch_sdpa

aten = torch.ops.aten
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operators for CPU tensors, for which torch has none of these."""
    monkeypatch.setattr(env, "BACKEND", "reference")
    handle = torch_sdpa._activate("CPU")
    yield
    handle.remove()


def inputs(*shape: int, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(shape, requires_grad=True) for _ in range(3))  # type: ignore[return-value]


def gradients(out: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.sin().sum(), of)


def test_registering_activates_nothing() -> None:
    before = torch.nn.attention.current_flash_attention_impl()
    torch_sdpa.register()
    assert "flashsoft" in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() == before


@pytest.mark.parametrize("is_causal", [False, True])
def test_dense(is_causal: bool, installed: None) -> None:
    q, k, v = inputs(2, 2, 7, 8)
    for query in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        out, lse, *_, max_q, max_k, rng, _, _ = aten._scaled_dot_product_flash_attention(query, k, v, 0.0, is_causal)
        assert out.stride() == query.stride() and lse.shape == (2, 2, 7) and (max_q, max_k) == (7, 7)
        assert rng.shape == (2,) and rng.dtype == torch.uint64
        expected = sdpa(query, k, v, is_causal=is_causal)
        torch.testing.assert_close(out, expected, **CLOSE)
        for got, want in zip(gradients(out, query, k, v), gradients(expected, query, k, v), strict=True):
            torch.testing.assert_close(got, want, **CLOSE)


def test_dropout_drops_the_same_in_the_backward(installed: None) -> None:
    q, k, v = inputs(1, 2, 16, 8)
    torch.manual_seed(0)
    out, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.4)
    torch.manual_seed(0)
    expected = flashsoft.attention(q, k, v, dropout_p=0.4)
    torch.testing.assert_close(out, expected, **CLOSE)
    for got, want in zip(gradients(out, q, k, v), gradients(expected, q, k, v), strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize(("causal", "window", "mask"), [(True, (-1, -1), Causal()), (False, (2, 1), Window(2, 1))])
def test_heads_inside_rows(causal: bool, window: tuple[int, int], mask: flashsoft.masks.Mask, installed: None) -> None:
    q, k, v = inputs(2, 6, 2, 8)
    left, right = window
    given = {"window_size_left": left, "window_size_right": right}
    out, lse, rng, unused, _ = aten._flash_attention_forward(q, k, v, None, None, 6, 6, 0.0, causal, False, **given)
    expected = flashsoft.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=mask).transpose(1, 2)
    torch.testing.assert_close(out, expected, **CLOSE)
    dout = torch.randn_like(out)
    got = aten._flash_attention_backward(dout, q, k, v, out, lse, None, None, 6, 6, 0.0, causal, rng, unused, **given)
    for one, want in zip(got, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        torch.testing.assert_close(one, want, **CLOSE)


def test_packed_sequences(installed: None) -> None:
    q, k, v = inputs(9, 2, 8)
    ends = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    out, lse, rng, unused, _ = aten._flash_attention_forward(q, k, v, ends, ends, 5, 5, 0.0, True, False)
    assert lse.shape == (2, 9)
    expected = flashsoft.attention_varlen(q, k, v, ends, ends, 5, 5, mask=Causal())
    torch.testing.assert_close(out, expected, **CLOSE)
    dout = torch.randn_like(out)
    got = aten._flash_attention_backward(dout, q, k, v, out, lse, ends, ends, 5, 5, 0.0, True, rng, unused)
    for one, want in zip(got, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        torch.testing.assert_close(one, want, **CLOSE)


def test_what_it_does_not_take(installed: None) -> None:
    q, k, v = inputs(2, 6, 2, 8)
    for given in ({"seqused_k": torch.ones(2, dtype=torch.int32)}, {"alibi_slopes": torch.ones(2)}):
        with pytest.raises(ValueError, match=re.escape(f"takes no {next(iter(given))}")):
            aten._flash_attention_forward(q, k, v, None, None, 6, 6, 0.0, False, False, **given)


def test_removed_it_is_gone() -> None:
    torch_sdpa._activate("CPU").remove()
    with pytest.raises(NotImplementedError):
        aten._scaled_dot_product_flash_attention(*inputs(1, 1, 2, 8))


def test_arguments_are_those_of_torchs_operators() -> None:
    for name, run in {
        "_scaled_dot_product_flash_attention": torch_sdpa._dense_forward,
        "_scaled_dot_product_flash_attention_backward": torch_sdpa._dense_backward,
        "_flash_attention_forward": torch_sdpa._forward,
        "_flash_attention_backward": torch_sdpa._backward,
    }.items():
        schema = getattr(aten, name).default._schema
        assert list(inspect.signature(run).parameters) == [argument.name for argument in schema.arguments], name


@pytest.mark.gpu
def test_behind_torchs_function_on_a_gpu() -> None:
    torch_sdpa.register()
    q, k, v = (torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    expected = sdpa(q, k, v, is_causal=True)
    torch.nn.attention.activate_flash_attention_impl("flashsoft")
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = sdpa(q, k, v, is_causal=True)
        for got, want in zip(gradients(out, q, k, v), gradients(expected, q, k, v), strict=True):
            torch.testing.assert_close(got, want, atol=3e-2, rtol=3e-2)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
