"""The modules: their values against functions and torch's modules, and that they live where modules live."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flashsoft
from flashsoft import ALiBi, Causal, FusedAttention, FusedSoftmax, KVCache, LogSoftmax, Padding, Softmax, Window

CLOSE = {"rtol": 1e-5, "atol": 2e-6}  # float32, two ways of adding up at most 64 terms of size 1


@pytest.fixture(autouse=True)
def on_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are thin: one test runs them on each backend, the others on the quick one."""
    monkeypatch.setattr(flashsoft.dispatch.env, "BACKEND", "reference")


def rotated(x: Tensor, start: int, base: float) -> Tensor:
    """Rotary embedding of (B, H, S, D), element by element as a turn in the plane of (i, i + D / 2)."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half].double(), x[..., half:].double())
    position = torch.arange(start, start + x.shape[2], dtype=torch.float64)
    angle = position[:, None] / base ** (2.0 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1).to(x.dtype)


def plain(layer: FusedAttention, x: Tensor, context: Tensor | None, keep: Tensor | None) -> Tensor:
    """FusedAttention, said in torch."""
    source = x if context is None else context

    def heads(t: Tensor) -> Tensor:
        return t.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)

    q, k, v = heads(layer.q_proj(x)), heads(layer.k_proj(source)), heads(layer.v_proj(source))
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    if layer.rotary_base is not None:
        q, k = rotated(q, 0, layer.rotary_base), rotated(k, 0, layer.rotary_base)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=layer.scale, enable_gqa=True)
    return layer.out_proj(out.transpose(1, 2).flatten(2))


# ---- softmax modules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_softmax_modules_are_torchs(dim: int) -> None:
    x = torch.randn(3, 4, 5)
    torch.testing.assert_close(Softmax(dim)(x), nn.Softmax(dim)(x), **CLOSE)
    torch.testing.assert_close(LogSoftmax(dim)(x), nn.LogSoftmax(dim)(x), **CLOSE)
    assert repr(Softmax(dim)) == repr(nn.Softmax(dim)).replace("Softmax()", "Softmax(dim=-1)")
    assert repr(LogSoftmax(dim)) == f"LogSoftmax(dim={dim})"


def test_fused_softmax_module_is_the_function() -> None:
    x, keep, bias = torch.randn(4, 6, 9), torch.rand(4, 1, 9) > 0.3, torch.randn(9)
    module = FusedSoftmax(temperature=0.7, top_k=3)
    expected = flashsoft.fused_softmax(x, 0.7, keep, bias, 3)
    torch.testing.assert_close(module(x, keep, bias), expected, rtol=0, atol=0)
    torch.testing.assert_close(
        module(x, mask=Causal()), flashsoft.fused_softmax(x, 0.7, Causal(), top_k=3), rtol=0, atol=0
    )
    assert repr(module) == "FusedSoftmax(temperature=0.7, top_k=3, dim=-1)"
    assert list(module.state_dict()) == []


def test_fused_softmax_learns_a_temperature_and_moves_tensors() -> None:
    module = FusedSoftmax(nn.Parameter(torch.tensor([2.0])), top_k=torch.tensor([4]))
    assert list(module.state_dict()) == ["temperature"]
    assert [name for name, _ in module.named_buffers()] == ["top_k"]
    x = torch.randn(3, 7)
    module(x).square().sum().backward()
    grad = module.temperature.grad
    assert grad is not None and grad.shape == (1,) and grad.abs() > 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": 0.0}, ValueError),
        ({"temperature": -1}, ValueError),
        ({"temperature": "hot"}, TypeError),
        ({"top_k": 0}, ValueError),
        ({"top_k": 2.0}, TypeError),
    ],
)
def test_fused_softmax_refuses_at_once(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        FusedSoftmax(**options)


# ---- attention against torch -------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 2},
        {"num_kv_heads": 1, "head_dim": 10},
        {"rotary_base": 10000.0, "mask": Causal()},
        {"rotary_base": 500.0, "qk_norm": True, "num_kv_heads": 2, "mask": Causal()},
        {"qk_norm": True, "scale": 0.3},
    ],
    ids=str,
)
def test_attention_is_torchs(options: dict[str, object], bias: bool) -> None:
    layer = FusedAttention(32, 4, bias=bias, **options)
    if layer.q_norm is not None and layer.k_norm is not None:
        nn.init.normal_(layer.q_norm.weight)
        nn.init.normal_(layer.k_norm.weight)
    x, dy = torch.randn(2, 11, 32, requires_grad=True), torch.randn(2, 11, 32)
    keep = torch.ones(11, 11, dtype=torch.bool).tril() if options.get("mask") else None
    y, expected = layer(x), plain(layer, x, None, keep)
    torch.testing.assert_close(y, expected, **CLOSE)
    leaves = [x, *layer.parameters()]
    for ours, theirs in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def test_attention_on_each_backend(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashsoft.dispatch.env, "BACKEND", backend)
    layer = FusedAttention(32, 2, mask=Window(left=5), rotary_base=100.0).to(device)
    x = torch.randn(2, 9, 32, device=device, requires_grad=True)
    y = layer(x)
    keep = torch.ones(9, 9, dtype=torch.bool).tril() & torch.ones(9, 9, dtype=torch.bool).triu(-5)
    expected = plain(copy.deepcopy(layer).cpu(), x.detach().cpu(), None, keep)
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-4, atol=1e-5)
    y.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_cross_attention_and_masks_join() -> None:
    module_keep = torch.rand(7, 13) > 0.2
    layer = FusedAttention(32, 4, num_kv_heads=2, context_dim=20, mask=Causal() & module_keep)
    x, context = torch.randn(3, 7, 32), torch.randn(3, 13, 20)
    keep = torch.rand(3, 1, 1, 13) > 0.3
    keep[..., 0] = True
    causal = torch.ones(7, 13, dtype=torch.bool).tril(13 - 7)
    torch.testing.assert_close(layer(x, context), plain(layer, x, context, causal & module_keep), **CLOSE)
    joined = layer(x, context, mask=keep)
    alive = (causal & module_keep & keep).any(-1)[:, 0]
    expected = plain(layer, x, context, causal & module_keep & keep)
    torch.testing.assert_close(joined[alive], expected[alive], **CLOSE)
    # a value in the call joins as well
    torch.testing.assert_close(
        layer(x, context, mask=Window(left=2)),
        plain(layer, x, context, causal & module_keep & causal.new_ones(7, 13).triu(13 - 7 - 2)),
        **CLOSE,
    )
    assert [name for name, _ in layer.named_buffers()] == ["keep"] and "keep" not in layer.state_dict()
    assert layer.to("meta").keep.is_meta


def test_a_query_with_no_key_gives_the_bias_of_the_projection() -> None:
    layer = FusedAttention(16, 2)
    keep = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    keep[1, :, 3] = False
    x = torch.randn(2, 5, 16, requires_grad=True)
    y = layer(x, mask=keep)
    torch.testing.assert_close(y[1, 3], layer.out_proj.bias, rtol=0, atol=0)
    y[1, 3].sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("shape", [(0, 4, 16), (2, 0, 16)])
def test_empty_sequences(shape: tuple[int, ...]) -> None:
    layer = FusedAttention(16, 2, rotary_base=10.0, qk_norm=True)
    y = layer(torch.randn(shape, requires_grad=True))
    assert y.shape == shape
    y.sum().backward()


# ---- from_torch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("context_dim", [None, 20])
@pytest.mark.parametrize("batch_first", [True, False])
def test_from_torch_gives_the_same(bias: bool, context_dim: int | None, batch_first: bool) -> None:
    theirs = nn.MultiheadAttention(32, 4, bias=bias, kdim=context_dim, vdim=context_dim, batch_first=batch_first).eval()
    if bias:  # torch starts them at 0
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    ours = FusedAttention.from_torch(theirs)
    assert not ours.training
    x, context = torch.randn(3, 6, 32), torch.randn(3, 9, context_dim or 32)
    hidden = torch.rand(3, 9) > 0.7
    hidden[:, 0] = False
    given = [t if batch_first else t.transpose(0, 1) for t in (x, context, context)]
    expected, _ = theirs(*given, key_padding_mask=hidden, need_weights=False)
    expected = expected if batch_first else expected.transpose(0, 1)
    torch.testing.assert_close(ours(x, context, mask=~hidden[:, None, None]), expected, **CLOSE)


def test_from_torch_copies_and_keeps_dtype_and_mask() -> None:
    theirs = nn.MultiheadAttention(16, 2, dtype=torch.float64, batch_first=True)
    ours = FusedAttention.from_torch(theirs, mask=Causal())
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected, _ = theirs(x, x, x, attn_mask=hidden)
    torch.testing.assert_close(ours(x), expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        theirs.in_proj_weight.zero_()
    torch.testing.assert_close(ours(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"add_bias_kv": True}, "bias_k"),
        ({"add_zero_attn": True}, "add_zero_attn"),
        ({"kdim": 8, "vdim": 12}, "kdim 8, got vdim=12"),
    ],
)
def test_from_torch_refuses_what_it_cannot_carry(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FusedAttention.from_torch(nn.MultiheadAttention(16, 2, **options))
    with pytest.raises(TypeError, match=r"nn\.MultiheadAttention, got Linear"):
        FusedAttention.from_torch(nn.Linear(2, 2))


def test_softcap_sinks_and_a_bias_are_those_of_the_function() -> None:
    layer = FusedAttention(16, 2, softcap=2.0, sinks=True, mask=Causal())
    assert layer.sinks is not None and "sinks" in layer.state_dict()
    with torch.no_grad():
        layer.sinks.copy_(torch.tensor([0.3, -1.0]))
    x, slopes = torch.randn(2, 5, 16), torch.rand(2)
    mask = Padding(torch.tensor([5, 3]))
    q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    want = flashsoft.attention(
        q, k, v, mask=Causal() & mask, bias=ALiBi(slopes), softcap=2.0, sink=layer.sinks, dropout_p=0.0
    )
    got = layer(x, mask=mask, bias=ALiBi(slopes))
    torch.testing.assert_close(got, layer.out_proj(want.transpose(1, 2).flatten(2)))
    got.sum().backward()
    assert layer.sinks.grad is not None and (layer.sinks.grad != 0).all()
    assert "softcap=2.0" in repr(layer) and "sinks=True" in repr(layer)


def test_dropout_is_applied_while_training() -> None:
    layer = FusedAttention(16, 2, dropout=0.5)
    x = torch.randn(2, 5, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    theirs = torch.nn.MultiheadAttention(16, 2, dropout=0.25, batch_first=True)
    assert FusedAttention.from_torch(theirs).dropout == 0.25 and "dropout=0.5" in repr(layer)


# ---- the KV cache ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [(1,) * 12, (5, 1, 1, 5), (12,)], ids=str)
@pytest.mark.parametrize("mask", [Causal(), Window(left=3)], ids=str)
def test_decoding_in_steps_is_the_full_pass(steps: tuple[int, ...], mask: flashsoft.masks.Mask) -> None:
    layer = FusedAttention(32, 4, num_kv_heads=2, mask=mask, rotary_base=10000.0, qk_norm=True)
    x = torch.randn(3, 12, 32)
    cache = KVCache(3, 2, 15, 8)
    for _ in range(2):
        pieces = [layer(piece, cache=cache) for piece in x.split(steps, 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), layer(x), **CLOSE)
        assert cache.length == 12
        cache.reset()


def test_cache_returns_views_and_refuses_overflow() -> None:
    cache = KVCache(2, 1, 5, 4)
    cache.key.fill_(float("nan"))
    key, value = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)
    keys, values = cache.append(key, value)
    assert torch.equal(keys, key) and torch.equal(values, value)
    assert keys.untyped_storage().data_ptr() == cache.key.untyped_storage().data_ptr()
    with pytest.raises(ValueError, match="room for 5 tokens and holds 3, got 3 more"):
        cache.append(key, value)
    assert cache.length == 3 and torch.equal(cache.key[:, :, :3], key), "a refused append stored something"
    cache.append(key[:, :, :2], value[:, :, :2])
    assert cache.length == cache.max_length == 5


def test_cache_holds_no_graph() -> None:
    layer, cache = FusedAttention(16, 2, mask=Causal()), KVCache(1, 2, 8, 8)
    x = torch.randn(1, 3, 16, requires_grad=True)
    layer(x, cache=cache).sum().backward()  # through the queries
    assert not cache.key.requires_grad and x.grad is not None


@pytest.mark.parametrize(
    ("key", "value", "error", "said"),
    [
        (torch.zeros(2, 1, 3), torch.zeros(2, 1, 3), ValueError, "key must have 4 dimensions"),
        (torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 4), ValueError, r"sizes \(2, 1, S, 4\), got shape"),
        (torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 2, 4), ValueError, "value must have key's shape"),
        (
            torch.zeros(2, 1, 3, 4).half(),
            torch.zeros(2, 1, 3, 4),
            TypeError,
            "key must have the cache's dtype",
        ),
        (torch.zeros(2, 1, 3, 4, device="meta"), torch.zeros(2, 1, 3, 4), ValueError, "key must be on cpu"),
    ],
)
def test_cache_refuses_what_does_not_fit(key: Tensor, value: Tensor, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        KVCache(2, 1, 5, 4).append(key, value)


# ---- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "said"),
    [
        ((30, 4), {}, ValueError, "embed_dim must be a multiple of num_heads 4 without head_dim, got 30"),
        ((32, 4, 3), {}, ValueError, "num_heads must be a multiple of num_kv_heads 3, got 4"),
        ((32, 0), {}, ValueError, "num_heads must be >= 1, got 0"),
        ((32.0, 4), {}, TypeError, "embed_dim must be an int, got float"),
        ((32, 4), {"head_dim": 513}, ValueError, "head_dim must be 1 to 512, got 513"),
        ((2052, 4), {}, ValueError, "head_dim must be 1 to 512, got 513"),
        ((32, 4), {"dropout": 1.5}, ValueError, "dropout must be 0 to 1, got 1.5"),
        ((32, 4), {"softcap": 0}, ValueError, "softcap must be finite and > 0, got 0"),
        (
            (32, 4),
            {"mask": Causal() & Padding(torch.tensor([3]))},
            ValueError,
            "mask must go to forward if it is of a batch, got Padding",
        ),
        ((20, 4), {"rotary_base": 10.0}, ValueError, "head_dim must be even with rotary_base, got 5"),
        ((32, 4), {"rotary_base": -1.0}, ValueError, "rotary_base must be finite and > 0, got -1.0"),
        (
            (32, 4),
            {"rotary_base": 9.0, "context_dim": 8},
            ValueError,
            "context_dim must be None with rotary_base",
        ),
        ((32, 4), {"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
        ((32, 4), {"mask": torch.zeros(3, 3)}, TypeError, "mask must be boolean"),
        ((32, 4), {"mask": "causal"}, TypeError, "mask must be a boolean tensor or a mask such as"),
    ],
)
def test_construction_refuses_in_one_sentence(
    arguments: tuple[object, ...], options: dict[str, object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        FusedAttention(*arguments, **options)
    assert "\n" not in str(raised.value)


def test_forward_refuses_in_one_sentence() -> None:
    layer, x = FusedAttention(16, 2), torch.randn(2, 3, 16)
    cache = KVCache(2, 2, 4, 8)
    rotary, crossed = FusedAttention(16, 2, rotary_base=10.0), FusedAttention(16, 2, context_dim=5)
    for call, error, said in (
        (lambda: layer(x[0]), ValueError, r"x must have 3 dimensions \(B, S, 16\)"),
        (lambda: layer(x[..., :8]), ValueError, r"x must be \(B, S, 16\), got shape \(2, 3, 8\)"),
        (lambda: layer(x, x, cache=cache), ValueError, "cache must be None with a context"),
        (lambda: rotary(x, x), ValueError, "context must be None with rotary_base"),
        (lambda: crossed(x), ValueError, r"context must be given, \(B, Sk, 5\)"),
        (lambda: layer(x, mask=torch.ones(3, 3)), TypeError, "mask must be boolean"),
        (lambda: layer(x, mask="causal"), TypeError, "mask must be a boolean tensor or a mask such as"),
        (lambda: layer(x, mask=torch.ones(3, 4, dtype=torch.bool)), ValueError, "mask must broadcast"),
    ):
        with pytest.raises(error, match=said):
            call()
    assert cache.length == 0


def test_repr_says_what_differs() -> None:
    layer = FusedAttention(32, 4, 2, mask=Causal() & torch.ones(3, 3, dtype=torch.bool), rotary_base=10.0)
    said = layer.extra_repr()
    assert said.startswith("32, 4, num_kv_heads=2, head_dim=8, mask=Causal(align='lower_right')")
    assert "mask=(3, 3)-tensor" in said and "rotary_base=10.0" in said


# ---- where modules live ------------------------------------------------------------------------------------


def busy_layer() -> FusedAttention:
    keep = torch.rand(9, 9) > 0.2
    return FusedAttention(
        32, 4, num_kv_heads=2, mask=Causal() & keep.fill_diagonal_(True), rotary_base=10000.0, qk_norm=True
    )


def test_state_dict_has_parameters_only_and_copies_are_equal() -> None:
    layer = busy_layer()
    x = torch.randn(2, 9, 32)
    y = layer(x)
    y.sum().backward()
    assert set(layer.state_dict()) == {name for name, _ in layer.named_parameters()}
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    fresh = FusedAttention(32, 4, num_kv_heads=2, mask=layer.band, rotary_base=10000.0, qk_norm=True)
    fresh.load_state_dict(torch.load(saved, weights_only=True), strict=True)
    torch.testing.assert_close(fresh(x, mask=layer.keep), y, rtol=0, atol=0)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(twin(x), y, rtol=0, atol=0)


@pytest.mark.filterwarnings("error")
def test_autocast_runs_and_gives_gradients_in_float32() -> None:
    layer, x = busy_layer(), torch.randn(2, 9, 32)
    cache = KVCache(2, 2, 9, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        again = FusedAttention.forward(layer, x, cache=cache)
    assert y.dtype == torch.bfloat16 and torch.equal(y, again)
    torch.testing.assert_close(y.float(), layer(x), rtol=0.05, atol=0.02)
    y.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_break(dynamic: bool) -> None:
    torch.compiler.reset()
    layer = FusedAttention(32, 4, num_kv_heads=2, mask=Causal(), rotary_base=10000.0, qk_norm=True, scale=0.3)
    soft = FusedSoftmax(0.5, top_k=3)
    keep = torch.rand(1, 1, 1, 9) > 0.2

    def both(x: Tensor, keep: Tensor | None) -> Tensor:
        return layer(x, mask=keep) + soft(x)

    compiled = torch.compile(both, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for shape, mask in (((2, 9, 32), keep), ((3, 7, 32), None)):
        x = torch.randn(shape, requires_grad=True)
        y, expected = compiled(x, mask), both(x, mask)
        torch.testing.assert_close(y, expected, **CLOSE)
        (dx,), (expected_dx,) = (torch.autograd.grad(t.square().sum(), x) for t in (y, expected))
        torch.testing.assert_close(dx, expected_dx, rtol=1e-4, atol=1e-5)


def test_compiled_decoding_is_the_full_pass() -> None:
    torch.compiler.reset()
    layer = FusedAttention(32, 4, num_kv_heads=2, mask=Causal(), rotary_base=10000.0)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, cache = torch.randn(2, 8, 32), KVCache(2, 2, 8, 8)
    with torch.no_grad():
        pieces = [compiled(piece, cache=cache) for piece in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), layer(x), **CLOSE)


def test_exports_with_a_free_length() -> None:
    layer = FusedAttention(32, 4, num_kv_heads=2, mask=Causal(), rotary_base=10000.0)
    length = torch.export.Dim("length", min=2, max=512)
    exported = torch.export.export(layer, (torch.randn(2, 9, 32),), dynamic_shapes={"x": {1: length}}, strict=False)
    x = torch.randn(2, 17, 32)
    torch.testing.assert_close(exported.module()(x), layer(x), **CLOSE)
