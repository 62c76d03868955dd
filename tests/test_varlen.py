"""Packed sequences: each is attention of its own, in values and in every gradient, and none sees another."""

from __future__ import annotations

import itertools
from typing import Any

import inputs
import oracle
import pytest
import test_attention_terms as each
import torch
from cases import AttentionCase
from test_attention_terms import Options
from torch import Tensor

import flashsoft
from flashsoft import ALiBi, Causal, Segments, Window
from flashsoft.reference import dropout

pytestmark = pytest.mark.usefixtures("poisoned")

NEG_INF = float("-inf")
# lengths of queries and of keys
PACKS: dict[str, tuple[list[int], list[int]]] = {
    "alike": ([5, 1, 17], [5, 1, 17]),
    "one": ([19], [23]),
    "empty_first": ([0, 7, 3], [2, 9, 3]),
    "no_keys": ([5, 3, 7], [5, 0, 7]),
    "no_queries": ([5, 0, 7], [5, 4, 7]),
    "fewer_tokens_than_sequences": ([0, 0, 0, 1], [0, 0, 0, 1]),
    "more_queries": ([18, 2, 9], [4, 1, 9]),
    "nothing": ([0, 0], [0, 0]),
    "no_sequences": ([], []),
}
MASKS: dict[str, tuple[Any, int | None, int | None, bool]] = {
    "none": (None, None, None, False),
    "causal": (Causal(), None, 0, True),
    "upper_left": (Causal("upper_left"), None, 0, False),
    "window": (Causal() & Window(3, 1), 3, 0, True),
    "window_right": (Window(2, 4), 2, 4, True),
    "offset": (Causal(2) & Window(6, 6, "upper_left"), 6, 2, False),
}


def ends(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def check(
    pack: str,
    mask: str,
    options: Options,
    dtype: torch.dtype,
    backend: str,
    device: torch.device,
    *,
    tail: int = 0,
    layout: str = "contiguous",
) -> None:
    """One call, each of its sequences against the oracle; `tail` tokens more lie behind the last sequence."""
    Hq, Hkv, D, Dv = (2, 1, 16, 24) if each.interpreted(backend, device) else (4, 2, 16, 24)
    rows, columns = PACKS[pack]
    Tq, Tk, sequences = sum(rows) + tail, sum(columns) + tail, len(rows)
    made = inputs.LAYOUTS["contiguous"](1, Hq, Hkv, Tq, Tk, D, Dv)
    made = tuple(x[0].transpose(0, 1) if layout == "heads_outer" else x[0].transpose(0, 1).contiguous() for x in made)
    q, k, v = (inputs.guarded(x, device=device, dtype=dtype).requires_grad_() for x in made)
    if tail:
        with torch.no_grad():
            for x in (q, k, v):
                x[-tail:] = float("nan")
    shape = AttentionCase(sequences, Hq, Hkv, 1, 1, D, Dv)
    leaves = {"query": q, "key": k, "value": v, **each.drawn_terms(shape, options, device, dtype)}
    given, left, right, lower_right = MASKS[mask]
    torch.manual_seed(7)
    out, lse = flashsoft.attention_varlen(
        q,
        k,
        v,
        ends(rows, device),
        ends(columns, device),
        max(rows, default=0),
        max(columns, default=0) + 3,
        mask=given,
        bias=ALiBi(leaves["slopes"]) if "slopes" in leaves else None,
        scale=leaves.get("factor"),
        softcap=options.softcap,
        sink=leaves.get("sink"),
        dropout_p=options.dropout_p,
        return_lse=True,
        backend=backend,
    )
    assert out.shape == (Tq, Hq, Dv) and out.dtype == dtype and lse.shape == (Tq, Hq)
    torch.manual_seed(7)
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device).cpu() if options.dropout_p else None
    dout = inputs.draw(*out.shape, device=device, dtype=dtype)
    dlse = inputs.draw(*lse.shape, device=device, dtype=lse.dtype)
    if tail:
        dout[-tail:], dlse[-tail:] = 0.0, 0.0
    gradients = dict(zip(leaves, torch.autograd.grad((out, lse), tuple(leaves.values()), (dout, dlse)), strict=True))
    for name, gradient in gradients.items():
        assert gradient.shape == leaves[name].shape and gradient.dtype == leaves[name].dtype, name
    if tail:
        for name in ("query", "key", "value"):
            assert (gradients[name][-tail:] == 0).all()
    # what a term of a head has is the sum over sequences: compared whole, by its parts
    sums: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in leaves}
    start_q = start_k = 0
    for b, (Sq, Sk) in enumerate(zip(rows, columns, strict=True)):
        cut_q, cut_k = slice(start_q, start_q + Sq), slice(start_k, start_k + Sk)
        start_q, start_k = cut_q.stop, cut_k.stop
        keep = oracle.band(Sq, Sk, left, right, Sk - Sq if lower_right else 0)
        own = AttentionCase(1, Hq, Hkv, Sq, Sk, D, Dv)
        drop = None
        if seed is not None:
            heads = torch.arange(b * Hq, (b + 1) * Hq).view(1, Hq)
            drop = dropout.kept(seed, options.dropout_p, heads, (0, Sq), (0, Sk))
        part = {
            "query": q[cut_q].transpose(0, 1)[None],
            "key": k[cut_k].transpose(0, 1)[None],
            "value": v[cut_k].transpose(0, 1)[None],
            **{name: leaves[name] for name in ("sink", "factor") if name in leaves},
        }
        if "slopes" in leaves:
            slopes = leaves["slopes"]
            part["slopes"] = slopes[b : b + 1] if slopes.ndim == 2 else slopes
        results = out[cut_q].transpose(0, 1)[None], lse[cut_q].transpose(0, 1)[None]
        douts = dout[cut_q].transpose(0, 1)[None], dlse[cut_q].transpose(0, 1)[None]
        alone = {
            "query": gradients["query"][cut_q].transpose(0, 1)[None],
            "key": gradients["key"][cut_k].transpose(0, 1)[None],
            "value": gradients["value"][cut_k].transpose(0, 1)[None],
        }
        if options.slopes == "bh":
            alone["slopes"] = gradients["slopes"][b : b + 1]
        each.compare(own, options, part, keep, drop, results, alone, *douts)
        shared = [name for name in sums if name not in alone]
        if shared:
            kinds = each.judged(own, options, part, keep, drop, *douts)
            for name in shared:
                sums[name].append(each.expected(own, part, kinds, name))
    for name, parts in sums.items():
        if parts:
            exact, theirs, sizes = (torch.stack(t) for t in zip(*parts, strict=True))
            half = dtype in (torch.float16, torch.bfloat16)
            each.close(name, gradients[name], exact.sum(0), theirs.sum(0), sizes.square().sum(0).sqrt(), half, dtype)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_packs(pack: str, mask: str, backend: str, device: torch.device) -> None:
    kinds = (torch.float32, torch.bfloat16)[: 2 if backend == "reference" else 1]
    for dtype in kinds:
        check(pack, mask, Options(), dtype, backend, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pack", ["empty_first", "more_queries"])
def test_masks(pack: str, mask: str, backend: str, device: torch.device) -> None:
    check(pack, mask, Options(), torch.float32, backend, device)


@pytest.mark.parametrize(
    "options",
    [
        Options(slopes="h"),
        Options(slopes="bh"),
        Options(sink=True),
        Options(factor="h"),
        Options(softcap=0.7),
        Options(dropout_p=0.4),
        Options(slopes="bh", sink=True, factor="scalar", softcap=2.0, dropout_p=0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("pack", ["no_keys", "more_queries"])
def test_terms(pack: str, options: Options, backend: str, device: torch.device) -> None:
    check(pack, "window", options, torch.float32, backend, device)
    if backend == "reference":
        check(pack, "causal", options, torch.float64, backend, device)


def test_what_lies_behind_the_last_sequence_is_not_read(backend: str, device: torch.device) -> None:
    check("no_keys", "causal", Options(sink=True, slopes="h"), torch.float32, backend, device, tail=9)


def test_strides(backend: str, device: torch.device) -> None:
    check("more_queries", "causal", Options(), torch.float32, backend, device, layout="heads_outer")


def test_neighbours_never_leak(backend: str, device: torch.device) -> None:
    """NaN in one sequence stays there, though others share its tiles."""
    lengths = [5, 6, 7]
    q, k, v = (torch.randn(18, 2, 16, device=device) for _ in range(3))
    for x in (q, k, v):
        x[5:11] = float("nan")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    cu = ends(lengths, device)
    out, lse = flashsoft.attention_varlen(q, k, v, cu, cu, 7, 7, mask=Causal(), return_lse=True, backend=backend)
    others = [*range(5), *range(11, 18)]
    assert out[5:11].isnan().all() and out[others].isfinite().all() and lse[others].isfinite().all()
    for gradient in torch.autograd.grad((out.sum(), lse.sum()), (q, k, v)):
        assert gradient[others].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_it_equals_segments(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    lengths = [4, 0, 9, 3]
    q, k, v = (inputs.draw(16, H, 16, device=device, dtype=dtype) for H in (4, 2, 2))
    cu = ends(lengths, device)
    out = flashsoft.attention_varlen(q, k, v, cu, cu, 9, 9, mask=Causal(), backend=backend)
    ids = torch.repeat_interleave(torch.arange(4, device=device), torch.tensor(lengths, device=device))
    rows = (x.transpose(0, 1)[None] for x in (q, k, v))
    want = flashsoft.attention(*rows, mask=Causal() & Segments(ids), backend=backend)
    torch.testing.assert_close(out, want[0].transpose(0, 1))


def test_gradcheck() -> None:
    def double(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32) for t in ((0, 2, 2, 5), (0, 3, 5, 7)))

    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, sink: Tensor, scale: Tensor) -> Any:
        torch.manual_seed(5)
        return flashsoft.attention_varlen(
            q, k, v, cu_q, cu_k, 3, 3, mask=Causal(), bias=ALiBi(slopes), scale=scale, softcap=1.5, sink=sink,
            dropout_p=0.3, return_lse=True,
        )  # fmt: skip

    leaves = (double(5, 4, 3), double(7, 2, 3), double(7, 2, 2), double(3, 4), double(4), double(4))
    assert torch.autograd.gradcheck(run, leaves)


def call(**changes: Any) -> Tensor:
    q, k = torch.zeros(6, 4, 8), torch.zeros(7, 2, 8)
    given: dict[str, Any] = {
        "query": q,
        "key": k,
        "value": k,
        "cu_seqlens_q": torch.tensor([0, 2, 6], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 3, 7], dtype=torch.int32),
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    }
    return flashsoft.attention_varlen(**{**given, **changes})


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"query": torch.zeros(1, 4, 6, 8)}, ValueError, "query must have 3 dimensions (Tq, Hq, D), got shape"),
        ({"value": torch.zeros(6, 2, 8)}, ValueError, "value must have key's heads and length (2, 7)"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 6])}, TypeError, "cu_seqlens_q must be int32, got torch.int64"),
        ({"cu_seqlens_k": [0, 3, 7]}, TypeError, "cu_seqlens_k must be an int32 tensor, got list"),
        (
            {"cu_seqlens_k": torch.tensor([0, 7], dtype=torch.int32)},
            ValueError,
            "cu_seqlens_k must be as long as cu_seqlens_q, (3,), got (2,)",
        ),
        ({"cu_seqlens_q": torch.tensor(3, dtype=torch.int32)}, ValueError, "must be (sequences + 1,), got shape ()"),
        ({"max_seqlen_q": 1.5}, TypeError, "max_seqlen_q must be an int, got float"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be >= 0, got -1"),
        (
            {"mask": Causal() & Window(2, 0, "upper_left")},
            ValueError,
            "aligned lower right in all its parts or in none",
        ),
        ({"mask": Segments(torch.arange(6))}, TypeError, "Segments packs them and joins any mask), got Segments"),
        ({"mask": torch.ones(6, 7, dtype=torch.bool)}, TypeError, "mask must be made of Causal and Window"),
        ({"mask": "causal"}, TypeError, "mask must be made of Causal and Window"),
        ({"bias": torch.zeros(6, 7)}, TypeError, "bias must be ALiBi(slopes) for packed sequences"),
        ({"bias": ALiBi(torch.zeros(4)) + torch.zeros(6, 7)}, TypeError, "got ALiBi + Tensor"),
        ({"bias": ALiBi(torch.zeros(3, 4))}, ValueError, "slopes must be (4,) or (2, 4) for 2 sequences of 4 heads"),
        ({"sink": torch.zeros(3)}, ValueError, "sink must have an entry"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    call()
    with pytest.raises(error) as raised:
        call(**changes)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"cu_seqlens_q": torch.tensor([0, 7, 6], dtype=torch.int32)}, "cu_seqlens_q must ascend from 0 to 6 at most"),
        ({"cu_seqlens_q": torch.tensor([1, 2, 6], dtype=torch.int32)}, "cu_seqlens_q must ascend from 0"),
        ({"cu_seqlens_k": torch.tensor([0, 3, 8], dtype=torch.int32)}, "cu_seqlens_k must ascend from 0 to 7 at most"),
        ({"max_seqlen_q": 3}, "max_seqlen_q must be at least 4, the longest in cu_seqlens_q, got 3"),
    ],
)
def test_contents_are_checked_on_request(changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashsoft.env.CHECK", True)
    call()
    with pytest.raises(ValueError, match=words):
        call(**changes)
