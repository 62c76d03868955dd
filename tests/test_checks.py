"""Bad arguments: one sentence that names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import flashsoft
from flashsoft import ALiBi, Causal, Padding, Window


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class Bad:
    """A call that cannot work, and what its sentence says: the argument, words of expected and given."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    error: type[Exception]
    argument: str
    says: tuple[str, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def attention(error: type[Exception], argument: str, *says: str, **changes: Any) -> Bad:
    q, k, v = zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 6)
    given = {"query": q, "key": k, "value": v, **changes}
    args = tuple(given.pop(name) for name in ("query", "key", "value"))
    return Bad(flashsoft.attention, args, error, argument, says, given)


def fused(error: type[Exception], argument: str, *says: str, x: Any = None, **kwargs: Any) -> Bad:
    return Bad(flashsoft.fused_softmax, (zeros(3, 7) if x is None else x,), error, argument, says, kwargs)


NAN, INF = float("nan"), float("inf")
V, T = ValueError, TypeError

ATTENTION = [
    attention(T, "query", "torch.Tensor", "list", query=[1.0]),
    attention(T, "key", "torch.Tensor", "NoneType", key=None),
    attention(
        T,
        "query",
        "float32, float16, bfloat16 or float64",
        "int64",
        query=zeros(2, 4, 5, 8, dtype=torch.int64),
    ),
    attention(T, "value", "torch.bool", value=zeros(2, 2, 7, 6, dtype=torch.bool)),
    attention(T, "query", "complex64", query=zeros(2, 4, 5, 8, dtype=torch.complex64)),
    attention(T, "key", "query", "float32", "float16", key=zeros(2, 2, 7, 8, dtype=torch.float16)),
    attention(T, "value", "query", "float32", "bfloat16", value=zeros(2, 2, 7, 6, dtype=torch.bfloat16)),
    attention(V, "query", "4 dimensions", "(2, 4, 8)", query=zeros(2, 4, 8)),
    attention(V, "key", "4 dimensions", "(7, 8)", key=zeros(7, 8)),
    attention(V, "value", "4 dimensions", "(1, 2, 2, 7, 6)", value=zeros(1, 2, 2, 7, 6)),
    attention(V, "key", "batch", "2", "(3, 2, 7, 8)", key=zeros(3, 2, 7, 8)),
    attention(V, "value", "batch", "2", "(1, 2, 7, 6)", value=zeros(1, 2, 7, 6)),
    attention(V, "value", "(2, 7)", "(2, 2, 9, 6)", value=zeros(2, 2, 9, 6)),
    attention(V, "value", "(2, 7)", "(2, 4, 7, 6)", value=zeros(2, 4, 7, 6)),
    attention(V, "key", "head size", "8", "(2, 2, 7, 9)", key=zeros(2, 2, 7, 9)),
    attention(V, "query", "multiple", "3", "4", key=zeros(2, 3, 7, 8), value=zeros(2, 3, 7, 6)),
    attention(V, "query", "multiple", "8", "4", key=zeros(2, 8, 7, 8), value=zeros(2, 8, 7, 6)),
    attention(V, "query", "multiple", "0", key=zeros(2, 0, 7, 8), value=zeros(2, 0, 7, 6)),
    attention(V, "query", "1 to 576", "577", query=zeros(2, 4, 5, 577), key=zeros(2, 2, 7, 577)),
    attention(V, "value", "1 to 512", "513", value=zeros(2, 2, 7, 513)),
    attention(V, "query", "1 to 576", "0", query=zeros(2, 4, 5, 0), key=zeros(2, 2, 7, 0)),
    attention(V, "value", "1 to 512", "0", value=zeros(2, 2, 7, 0)),
    attention(V, "key", "cpu", "query", "meta", key=zeros(2, 2, 7, 8, device="meta")),
    attention(V, "value", "cpu", "query", "meta", value=zeros(2, 2, 7, 6, device="meta")),
    attention(T, "mask", "boolean", "float32", mask=zeros(5, 7)),
    attention(T, "mask", "boolean", "int64", mask=zeros(5, 7, dtype=torch.int64)),
    attention(T, "mask", "boolean", "uint8", mask=zeros(5, 7, dtype=torch.uint8)),
    attention(T, "mask", "boolean", "str", mask="causal"),
    attention(T, "mask", "Causal()", "bool", mask=True),
    attention(V, "mask", "(2, 4, 5, 7)", "(5, 6)", mask=zeros(5, 6, dtype=torch.bool)),
    attention(V, "mask", "(2, 4, 5, 7)", "(3, 1, 5, 7)", mask=zeros(3, 1, 5, 7, dtype=torch.bool)),
    attention(V, "mask", "(2, 4, 5, 7)", "(1, 2, 4, 5, 7)", mask=zeros(1, 2, 4, 5, 7, dtype=torch.bool)),
    attention(V, "mask", "(2, 4, 5, 7)", "(6, 7)", mask=Causal() & zeros(6, 7, dtype=torch.bool)),
    attention(T, "mask", "boolean", "float32", mask=Window(3) & zeros(5, 7)),
    attention(V, "mask", "cpu", "meta", mask=zeros(5, 7, dtype=torch.bool, device="meta")),
    attention(V, "scale", "finite", "nan", scale=NAN),
    attention(V, "scale", "finite", "inf", scale=INF),
    attention(T, "scale", "number", "str", scale="1"),
    attention(V, "scale", "(4,)", "(3,)", scale=zeros(3)),
    attention(V, "scale", "cpu", "meta", scale=zeros(4, device="meta")),
    attention(V, "sink", "cpu", "meta", sink=zeros(4, device="meta")),
    attention(V, "bias", "cpu", "meta", bias=zeros(5, 7, device="meta")),
    attention(V, "ALiBi", "slopes", "cpu", "meta", bias=ALiBi(zeros(4, device="meta"))),
    attention(V, "Padding", "cpu", "meta", mask=Padding(zeros(2, dtype=torch.int64, device="meta"))),
    attention(V, "backend", "triton", "reference", "cuda", backend="cuda"),
]

FUSED = [
    fused(T, "x", "torch.Tensor", "list", x=[1.0]),
    fused(T, "x", "float", "int32", x=zeros(3, 7, dtype=torch.int32)),
    fused(V, "x", "dimension", x=torch.tensor(1.0)),
    fused(V, "dim", "[-2, 1]", "2", dim=2),
    fused(T, "dim", "int", "float", dim=1.0),
    fused(V, "temperature", "> 0", "0.0", temperature=0.0),
    fused(V, "temperature", "> 0", "0", temperature=0),
    fused(V, "temperature", "> 0", "-1.5", temperature=-1.5),
    fused(V, "temperature", "> 0", "nan", temperature=NAN),
    fused(V, "temperature", "finite", "inf", temperature=INF),
    fused(T, "temperature", "number", "str", temperature="warm"),
    fused(T, "temperature", "number", "bool", temperature=True),
    fused(T, "temperature", "float", "int64", temperature=torch.ones(3, 1, dtype=torch.int64)),
    fused(V, "temperature", "rows", "(4,)", temperature=torch.ones(4)),
    fused(V, "temperature", "rows", "(3, 7)", temperature=torch.ones(3, 7)),
    fused(V, "temperature", "cpu", "meta", temperature=zeros(3, device="meta")),
    fused(V, "top_k", ">= 1", "0", top_k=0),
    fused(V, "top_k", ">= 1", "-3", top_k=-3),
    fused(T, "top_k", "int", "float", top_k=2.0),
    fused(T, "top_k", "int", "bool", top_k=True),
    fused(T, "top_k", "int", "float32", top_k=torch.ones(3)),
    fused(T, "top_k", "int", "int16", top_k=torch.ones(3, dtype=torch.int16)),
    fused(V, "top_k", "rows", "(2,)", top_k=torch.ones(2, dtype=torch.int64)),
    fused(V, "top_k", "cpu", "meta", top_k=zeros(3, dtype=torch.int64, device="meta")),
    fused(T, "mask", "boolean", "float32", mask=zeros(3, 7)),
    fused(T, "mask", "boolean", "int64", mask=zeros(3, 7, dtype=torch.int64)),
    fused(V, "mask", "(3, 7)", "(7, 3)", mask=zeros(7, 3, dtype=torch.bool)),
    fused(V, "mask", "(3, 7)", "(2, 3, 7)", mask=zeros(2, 3, 7, dtype=torch.bool)),
    fused(V, "mask", "cpu", "meta", mask=zeros(3, 7, dtype=torch.bool, device="meta")),
    fused(V, "mask", "Causal", "(7,)", x=zeros(7), mask=Causal()),
    fused(V, "dim", "last", mask=Causal(), dim=0),
    fused(T, "bias", "float", "int64", bias=zeros(3, 7, dtype=torch.int64)),
    fused(V, "bias", "(3, 7)", "(3, 8)", bias=zeros(3, 8)),
    fused(V, "bias", "cpu", "meta", bias=zeros(3, 7, device="meta")),
    fused(V, "backend", "triton", "reference", "numpy", backend="numpy"),
]

ROWS = [
    bad
    for function in (flashsoft.softmax, flashsoft.log_softmax, flashsoft.logsumexp)
    for bad in (
        Bad(function, ([1.0],), T, "x", ("torch.Tensor", "list")),
        Bad(function, (zeros(3, 7, dtype=torch.int64),), T, "x", ("float", "int64")),
        Bad(function, (torch.tensor(1.0),), V, "x", ("dimension", "scalar")),
        Bad(function, (zeros(3, 7), 2), V, "dim", ("[-2, 1]", "(3, 7)", "2")),
        Bad(function, (zeros(3, 7), -3), V, "dim", ("[-2, 1]", "-3")),
        Bad(function, (zeros(3, 7), 0.0), T, "dim", ("int", "float")),
        Bad(function, (zeros(3, 7), True), T, "dim", ("int", "bool")),
        Bad(function, (zeros(3, 7), 0), V, "backend", ("triton", "x86"), {"backend": "x86"}),
    )
] + [
    Bad(function, (zeros(3, 7), 0), T, "dtype", ("float32", "int64"), {"dtype": torch.int64})
    for function in (flashsoft.softmax, flashsoft.log_softmax)
]

OUT, LSE = zeros(2, 3, 8), zeros(2, 3)
MERGE = [
    Bad(flashsoft.merge, (1.0, LSE, OUT, LSE), T, "out_a", ("torch.Tensor", "float")),
    Bad(flashsoft.merge, (OUT, None, OUT, LSE), T, "lse_a", ("torch.Tensor", "NoneType")),
    Bad(flashsoft.merge, (OUT, LSE, OUT, LSE.long()), T, "lse_b", ("float", "int64")),
    Bad(flashsoft.merge, (OUT, LSE, zeros(2, 3, 9), LSE), V, "out_b", ("(2, 3, 8)", "(2, 3, 9)")),
    Bad(flashsoft.merge, (OUT, LSE, OUT.half(), LSE), V, "out_b", ("float32", "float16")),
    Bad(flashsoft.merge, (OUT, zeros(2, 3, 1), OUT, LSE), V, "lse_a", ("out_a", "(2, 3, 1)")),
    Bad(flashsoft.merge, (OUT, LSE, OUT, zeros(3)), V, "lse_b", ("out_a", "(3,)")),
    Bad(flashsoft.merge, (OUT, LSE, OUT.to("meta"), LSE), V, "out_b", ("cpu", "meta")),
    Bad(flashsoft.merge, (OUT, LSE, OUT, LSE.to("meta")), V, "lse_b", ("cpu", "meta")),
]


def name_of(bad: Bad) -> str:
    return "-".join([bad.call.__name__, bad.argument, *bad.says])


@pytest.mark.parametrize("bad", [*ATTENTION, *FUSED, *ROWS, *MERGE], ids=name_of)
def test_one_sentence_names_the_argument_the_expected_and_the_given(bad: Bad) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        bad.call(*bad.args, **bad.kwargs)
    assert type(caught.value) is bad.error
    message = str(caught.value)
    assert message.startswith(bad.argument) and "got" in message.split()
    assert "\n" not in message and ". " not in message and len(message) < 200
    for words in bad.says:
        assert words in message.removeprefix(bad.argument), f"{words!r} is not in {message!r}"


@pytest.mark.parametrize("bad", ATTENTION[:24], ids=name_of)
def test_explain_checks_as_attention_does(bad: Bad) -> None:
    with pytest.raises(bad.error, match=bad.argument):
        flashsoft.explain(*bad.args)


def test_contents_are_checked_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 7)
    temperature, top_k = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([1, 0, 2])
    monkeypatch.setattr("flashsoft.env.CHECK", True)
    with pytest.raises(ValueError, match="temperature must be > 0"):
        flashsoft.fused_softmax(x, temperature=temperature)
    with pytest.raises(ValueError, match="top_k must be >= 1"):
        flashsoft.fused_softmax(x, top_k=top_k)
    flashsoft.fused_softmax(x, temperature=temperature.abs(), top_k=top_k + 1)


@pytest.mark.gpu
def test_checks_do_not_wait_for_the_device(device: torch.device) -> None:
    q = torch.randn(1, 2, 16, 32, device=device)
    keep = torch.ones(16, 16, dtype=torch.bool, device=device)
    temperature = torch.ones(16, 1, device=device)
    flashsoft.attention(q, q, q, mask=Causal() & keep)
    flashsoft.fused_softmax(
        q[0, 0, :, :16], temperature=temperature, mask=keep, top_k=torch.ones(16, 1, device=device).int()
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        flashsoft.attention(q, q, q, mask=Causal() & keep)
        flashsoft.fused_softmax(q[0, 0, :, :16], temperature=temperature, mask=keep)
        flashsoft.softmax(q)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_odd_arguments_are_refused_in_a_sentence() -> None:
    q = torch.zeros(1, 1, 3, 8)
    with pytest.raises(TypeError, match="backend must be a name or None, got int"):
        flashsoft.softmax(q, backend=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale must be finite"):
        flashsoft.attention(q, q, q, scale=10**400)
    with pytest.raises(ValueError, match="temperature must be finite and > 0"):
        flashsoft.fused_softmax(q, 10**400)
    with pytest.raises(
        TypeError, match="mask must be made of Causal, Window, Segments, Padding and boolean tensors, got Mask"
    ):
        flashsoft.attention(q, q, q, mask=flashsoft.masks.Mask())
    with pytest.raises(TypeError, match="x must be a strided tensor"):
        flashsoft.softmax(torch.zeros(3, 3).to_sparse())
    with pytest.raises(ValueError, match="out_a must be"):
        flashsoft.merge(*(torch.tensor(0.0) for _ in range(4)))
    with pytest.raises(TypeError, match="lse_b must be float32"):
        flashsoft.merge(q, q[..., 0], q, q[..., 0].bfloat16())


def test_the_meta_device_needs_no_backend_facts_of_autocast() -> None:
    q = torch.zeros(1, 2, 3, 8, device="meta")
    assert flashsoft.attention(q, q, q).shape == q.shape
