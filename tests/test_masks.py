"""Masks as values: what each keeps, how they combine, and the one form that kernels take."""

from __future__ import annotations

import dataclasses
import itertools
import re

import cases
import oracle
import pytest
import torch

import flashsoft
from flashsoft import Causal, Padding, Segments, Window, masks
from flashsoft.masks import MaskSpec, resolve
from flashsoft.reference.masking import band


def dense(spec: MaskSpec, Sq: int, Sk: int) -> torch.Tensor:
    """A spec built out from its own definition."""
    keep = torch.ones(Sq, Sk, dtype=torch.bool)
    for i, j in itertools.product(range(Sq), range(Sk)):
        keep[i, j] = (spec.lo is None or j - i >= spec.lo) and (spec.hi is None or j - i <= spec.hi)
    built = masks.built(spec, Sk, 4).keep
    return keep if built is None else keep & built


@pytest.mark.parametrize("name", [name for name in cases.MASKS if name not in ("none", "bool_bhqk", "bool_b11k")])
@pytest.mark.parametrize("Sq, Sk", [(6, 6), (3, 9), (9, 3), (1, 5), (5, 1), (20, 21)])
def test_every_mask_keeps_what_its_definition_says(name: str, Sq: int, Sk: int) -> None:
    case = cases.AttentionCase(1, 1, 1, Sq, Sk, 1, 1)
    mask = cases.MASKS[name]
    want = mask.keep(case)
    assert want is not None
    spec = resolve(mask.given(case, torch.device("cpu")), Sq, Sk)
    got = dense(spec, Sq, Sk)
    assert torch.equal(*torch.broadcast_tensors(got, want.cpu()))


@pytest.mark.parametrize("lo, hi", [(None, None), (-2, None), (None, 1), (-3, 2), (5, 3)])
@pytest.mark.parametrize("i0, j0", [(0, 0), (4, 2), (1, 7)])
def test_a_tile_of_the_reference_is_a_cut_of_the_band(lo: int | None, hi: int | None, i0: int, j0: int) -> None:
    whole = dense(MaskSpec(lo, hi), 12, 14)
    tile = band(5, 6, lo, hi, torch.device("cpu"), i0, j0)
    assert torch.equal(tile, whole[i0 : i0 + 5, j0 : j0 + 6])


def test_joining_is_the_intersection() -> None:
    parts = [Causal(), Window(4, 2), Window(None, 3, "upper_left"), Causal(2), torch.rand(7, 9) > 0.4]
    for a, b in itertools.permutations(parts, 2):
        if isinstance(a, torch.Tensor):
            continue
        got = dense(resolve(a & b, 7, 9), 7, 9)
        assert torch.equal(got, dense(resolve(a, 7, 9), 7, 9) & dense(resolve(b, 7, 9), 7, 9))


def test_joining_is_associative_and_takes_tensors_on_either_side() -> None:
    a, b, keep = Causal(), Window(2, 2), torch.rand(5, 8) > 0.4
    want = dense(resolve(a, 5, 8), 5, 8) & dense(resolve(b, 5, 8), 5, 8) & keep
    for mask in ((a & b) & keep, a & (b & keep), (keep & a) & b, a & keep & b, keep & keep & a & b):
        assert torch.equal(dense(resolve(mask, 5, 8), 5, 8), want)
    more = torch.rand(8) > 0.3
    assert torch.equal(dense(resolve(a & keep & more, 5, 8), 5, 8), dense(resolve(a, 5, 8), 5, 8) & keep & more)


def test_bands_resolve_to_two_integers_and_build_nothing() -> None:
    spec = resolve(Causal() & Window(4095), 1_000_000, 2_000_000)
    assert spec == MaskSpec(1_000_000 - 4095, 1_000_000, None)
    assert resolve(None, 3, 4) == MaskSpec()
    assert resolve(Window(None, None), 3, 4) == MaskSpec()


def test_alignments() -> None:
    assert resolve(Causal(), 3, 8).hi == 5
    assert resolve(Causal(), 8, 3).hi == -5
    assert resolve(Causal("upper_left"), 3, 8).hi == 0
    assert resolve(Causal(-4), 3, 8).hi == -4
    assert resolve(Window(2, 1, align=3), 3, 8)[:2] == (1, 4)


def test_masks_are_frozen_values() -> None:
    assert Causal() == Causal("lower_right") and Causal() != Causal("upper_left")
    assert len({Window(3), Window(3), Window(3, 1)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Causal().align = 3  # type: ignore[misc]
    assert repr(Window(3)) == "Window(left=3, right=0, align='lower_right')"


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: Window(-1), ValueError, "left must be >= 0"),
        (lambda: Window(1, -2), ValueError, "right must be >= 0"),
        (lambda: Window(1.5), TypeError, "left must be an int"),  # type: ignore[arg-type]
        (lambda: Window(True), TypeError, "left must be an int"),
        (lambda: Window(1, "2"), TypeError, "right must be an int"),  # type: ignore[arg-type]
        (lambda: Causal("left"), ValueError, "align must be"),
        (lambda: Causal(1.5), ValueError, "align must be"),  # type: ignore[arg-type]
        (lambda: Causal(True), ValueError, "align must be"),
        (lambda: Window(1, 0, "upper"), ValueError, "align must be"),
    ],
)
def test_what_cannot_be_a_mask(make: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()  # type: ignore[operator]


def test_joining_with_something_else_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        Causal() & 3  # type: ignore[operator]


def test_the_order_of_terms_is_kept_for_messages() -> None:
    keep = torch.ones(2, 2, dtype=torch.bool)
    assert masks.terms(Causal() & keep & Window(1)) == (Causal(), keep, Window(1))
    assert masks.terms(None) == ()
    assert masks.terms(keep) == (keep,)


def test_causal_of_the_oracle_is_torchs_tril() -> None:
    assert torch.equal(oracle.causal(4, 4), torch.ones(4, 4, dtype=torch.bool).tril())
    assert torch.equal(oracle.causal(3, 5), torch.ones(3, 5, dtype=torch.bool).tril(2))


@pytest.mark.parametrize("far", [10_000, 2**31 - 1, 2**63 - 1, 10**30])
@pytest.mark.parametrize("reach", ["left", "right", "align"])
def test_bounds_beyond_every_key_do_not_overflow(far: int, reach: str, backend: str, device: torch.device) -> None:
    """What no key can reach sets no limit, however far, in values and gradients."""
    mask, plain = {
        "left": (Window(left=far, right=None), None),
        "right": (Window(left=None, right=far), None),
        "align": (Causal(far), None),
    }[reach]
    x = torch.randn(1, 1, 40, 16, device=device)
    results = []
    for each in (mask, plain):
        q, k, v = (x.clone().requires_grad_() for _ in range(3))
        out = flashsoft.attention(q, k, v, mask=each, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    none = flashsoft.attention(x, x, x, mask=Causal(-far), backend=backend)
    assert (none == 0).all()
    scores = torch.randn(40, 40, device=device)
    y = flashsoft.fused_softmax(scores, mask=mask, backend=backend)
    torch.testing.assert_close(y, torch.softmax(scores, -1))


def test_a_contradictory_band_sees_and_loads_nothing(backend: str, device: torch.device) -> None:
    q, k, v = (torch.full((1, 1, 40, 8), float("nan"), device=device).requires_grad_() for _ in range(3))
    mask = Causal(-3) & Window(0, 0, "upper_left")
    out, lse = flashsoft.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
    assert (out == 0).all() and (lse == -torch.inf).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert (gradient == 0).all()


@pytest.mark.parametrize("order", ["mask & tensor", "tensor & mask"])
def test_a_tensor_joins_from_either_side_also_when_compiled(order: str, device: torch.device) -> None:
    keep = torch.rand(5, 5, device=device) > 0.4

    def attend(q: torch.Tensor) -> torch.Tensor:
        mask = Causal() & keep if order == "mask & tensor" else keep & Causal()
        return flashsoft.attention(q, q, q, mask=mask)

    q = torch.randn(1, 2, 5, 8, device=device)
    want = flashsoft.attention(q, q, q, mask=keep.tril())
    torch.testing.assert_close(attend(q), want)
    torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="aot_eager")(q), want)


def test_segments_join_to_one_pair_of_ids_that_are_equal_iff_all_are() -> None:
    """Of any values, whatever product of them would overflow."""
    values = torch.tensor([0, 1, -1, 2**62, -(2**62), 2**63 - 1])
    ids = [(values[torch.randint(6, (2, 9))], values[torch.randint(6, (1, 12))]) for _ in range(3)]
    spec = resolve(Segments(ids[0]) & Segments(ids[1]) & Segments(ids[2]), 9, 12)
    assert spec.query_ids is not None and spec.key_ids is not None and spec.keep is None
    assert spec.query_ids.shape == (2, 9) and spec.key_ids.shape == (2, 12)
    want = torch.ones(2, 9, 12, dtype=torch.bool)
    for query_ids, key_ids in ids:
        want &= query_ids.unsqueeze(-1) == key_ids.unsqueeze(-2)
    assert torch.equal(spec.query_ids.unsqueeze(-1) == spec.key_ids.unsqueeze(-2), want)
    one = torch.arange(5)
    assert resolve(Segments(one), 5, 5).query_ids.data_ptr() == one.data_ptr()  # type: ignore[union-attr]


def test_lengths_join_to_the_shortest_and_keep_masks_to_their_intersection() -> None:
    spec = resolve(Padding(torch.tensor([3, 5])) & Padding(torch.tensor([4, 1], dtype=torch.int32)), 2, 7)
    assert spec.lengths is not None and spec.lengths.tolist() == [3, 1] and spec.keep is None
    a, b = torch.rand(2, 7) > 0.5, torch.rand(2, 7) > 0.5
    spec = resolve(Padding(a) & Padding(b), 2, 7)
    assert spec.keep is not None and torch.equal(spec.keep, (a & b)[:, None, None])


@pytest.mark.parametrize("name", ["segments", "segments_b", "lengths_b", "padding_b", "all_of_them_b"])
def test_fused_softmax_takes_them(name: str, backend: str, device: torch.device) -> None:
    case = cases.AttentionCase(3, 2, 2, 13, 21, 1, 1)
    x = torch.randn(3, 2, 13, 21, device=device)
    mask = cases.MASKS[name]
    keep = mask.keep(case)
    assert keep is not None
    y = flashsoft.fused_softmax(x, mask=mask.given(case, device), backend=backend)
    want, _ = oracle.softmax(torch.where(keep, x.cpu().double(), oracle.NEG_INF))
    torch.testing.assert_close(y.cpu().double(), want, atol=1e-6, rtol=1e-5)
    if name == "segments":
        two = flashsoft.fused_softmax(x[0, 0], mask=mask.given(case, device), backend=backend)
        torch.testing.assert_close(two, y[0, 0])


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: Segments([0, 1]), TypeError, "ids must be a tensor or a pair"),  # type: ignore[arg-type]
        (lambda: Segments((torch.arange(3),)), TypeError, "a pair"),  # type: ignore[arg-type]
        (lambda: Segments(torch.zeros(3)), TypeError, "int32 or int64, got torch.float32"),
        (lambda: Segments(torch.zeros(1, 2, 3, dtype=torch.int64)), ValueError, r"\(B, S\), got shape \(1, 2, 3\)"),
        (lambda: Padding([3]), TypeError, "must be a tensor"),  # type: ignore[arg-type]
        (lambda: Padding(torch.ones(2)), TypeError, "boolean tensor, or int32 or int64"),
        (lambda: Padding(torch.ones(2, dtype=torch.bool)), ValueError, r"boolean \(B, Sk\), got shape \(2,\)"),
        (lambda: Padding(torch.ones(2, 3, dtype=torch.int64)), ValueError, r"lengths \(B,\), got shape \(2, 3\)"),
    ],
)
def test_what_cannot_be_segments_or_padding(make: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    "mask, words",
    [
        (Segments(torch.arange(5)), "Segments: ids must be (2, 7) for 2 entries of 7 keys, got shape (1, 5)"),
        (
            Segments((torch.arange(6), torch.arange(7))),
            "ids must be (2, 5) for 2 entries of 5 queries, got shape (1, 6)",
        ),
        (Segments(torch.zeros(3, 5, dtype=torch.int64)), "ids must be (2, 5) for 2 entries of 5 queries"),
        (Padding(torch.zeros(3, dtype=torch.int64)), "keys must be (2,) for 2 entries, got shape (3,)"),
        (Padding(torch.zeros(2, 5, dtype=torch.bool)), "keys must be (2, 7) for 2 entries of 7 keys, got shape (2, 5)"),
    ],
)
def test_segments_and_padding_that_do_not_fit(mask: masks.Mask, words: str) -> None:
    q, k = torch.zeros(2, 1, 5, 8), torch.zeros(2, 1, 7, 8)
    with pytest.raises(ValueError, match=re.escape(words)):
        flashsoft.attention(q, k, k, mask=Causal() & mask)


def test_lengths_are_read_only_when_contents_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    q, mask = torch.zeros(2, 1, 5, 8), Padding(torch.tensor([5, 6]))
    flashsoft.attention(q, q, q, mask=mask)
    monkeypatch.setattr("flashsoft.env.CHECK", True)
    with pytest.raises(ValueError, match=r"Padding: keys must be 0 to 5 in every entry, got \[5, 6\]"):
        flashsoft.attention(q, q, q, mask=mask)
