"""The Hopper forward kernel where there is none: its schedule and barriers alone, and all of it in numpy (gluon.py).

What bfloat16, layouts and fences come to is seen on a GPU only: tests marked gpu below, and every test of attention
that names no backend.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

import conftest
import pytest
import torch
from torch import Tensor

import flashsoft

if not conftest.HAS_TRITON:
    pytest.skip("triton is not installed", allow_module_level=True)

import gluon

from flashsoft.kernels import masking
from flashsoft.kernels.hopper import forward, scheduler, support
from flashsoft.terms import Terms
from flashsoft.tuning import hopper as tuning

# ---- the schedule ------------------------------------------------------------------------------------------------

FUNCTIONS = (masking._ceil_to, masking.runs, scheduler.queries_of, scheduler.sequence_at, scheduler.sequence_of,
             scheduler.place_of, scheduler.visits_of, scheduler.keys_of, scheduler.unseen,
             scheduler.unsettled)  # fmt: skip


def in_python() -> SimpleNamespace:
    """The scheduler's functions on Python's integers; a pointer is (list, place)."""
    language = SimpleNamespace(
        minimum=min,
        maximum=max,
        where=lambda condition, a, b: a if condition else b,
        load=lambda pointer: pointer.values[pointer.at],
        constexpr=None,
    )
    names = {"tl": language, "Visits": scheduler.Visits, "Sequence": scheduler.Sequence}
    for function in FUNCTIONS:
        plain = function.fn
        names[plain.__name__] = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__)
    return SimpleNamespace(**names)


class Pointer:
    def __init__(self, values: list[int], at: int = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, steps: int) -> Pointer:
        return Pointer(self.values, self.at + steps)


def band(draw: random.Random, most: int) -> tuple[int | None, int | None]:
    lo, hi = (draw.choice([None, draw.randint(-most, most)]) for _ in range(2))
    return (hi, lo) if lo is not None and hi is not None and lo > hi else (lo, hi)


def check_visits(kernel: Any, row0: int, Sq: int, Sk: int, lo: Any, hi: Any, block_m: int, block_n: int) -> None:
    """Whatever a query sees is visited, once, and nothing else but in tiles that hold some; others are seen whole."""
    visits = kernel.visits_of(row0, Sq, Sk, lo, hi, block_m, block_n)
    firsts = [kernel.keys_of(visits, i, lo, block_n) for i in range(visits.count)]
    assert len(firsts) == len(set(firsts)) >= 1 and all(first % block_n == 0 for first in firsts)
    ranges = [
        (max(0, 0 if lo is None else i + lo), min(Sk, Sk if hi is None else i + hi + 1))
        for i in range(row0, min(row0 + block_m, Sq))
    ]
    needed = {
        j // block_n * block_n for least, end in ranges for j in (*range(least, end, block_n), end - 1) if least < end
    }
    assert needed <= set(firsts) and len(firsts) <= max(1, len(needed))
    for first in firsts[visits.edges :]:
        assert all(least <= first and first + block_n <= end for least, end in ranges)
    for last in range(row0 + 63, row0 + block_m, 64) if hi is not None else ():
        seen = [*(first <= last + hi for first in firsts[: visits.high]), True]
        assert kernel.unseen(visits, last, hi, block_n) == min(seen.index(True), visits.count - 1)
    # before others move no pivot, all queries that see any key have seen one
    careful = max(1, kernel.unsettled(visits, row0, min(row0 + block_m, Sq) - 1, lo, hi, block_n))
    for least, end in ranges:
        assert least >= end or any(first < end and first + block_n > least for first in firsts[:careful])
    # what lies beyond the last key is only in the first tile
    assert all(first + block_n <= Sk for first in firsts[1:])


def test_every_key_that_is_seen_is_visited_once() -> None:
    kernel, draw = in_python(), random.Random(1)
    for _ in range(1500):
        Sq, Sk, (lo, hi) = draw.randint(1, 700), draw.randint(1, 900), band(draw, 400)
        block_m, block_n = draw.choice([128, 192]), draw.choice([64, 128])
        for row0 in range(0, Sq, block_m):
            check_visits(kernel, row0, Sq, Sk, lo, hi, block_m, block_n)


def test_every_tile_has_a_number() -> None:
    kernel = in_python()
    for tiles, heads, section in itertools.product((1, 2, 5, 9), (1, 3, 8, 13), (1, 4, 15)):
        found = [kernel.queries_of(number, tiles, heads, section) for number in range(tiles * heads)]
        assert sorted(found) == [(tile, head) for tile in range(tiles) for head in range(heads)]


def test_every_tile_of_every_packed_sequence_has_a_number() -> None:
    """And those of what lies behind the last; keys that no query of a sequence sees are none of its own."""
    kernel, draw = in_python(), random.Random(2)
    for _ in range(600):
        block_m, count = draw.choice([128, 192]), draw.randint(0, 6)
        rows, columns = (
            [draw.choice([0, 1, 127, 128, 192, draw.randint(0, 500)]) for _ in range(count)] for _ in range(2)
        )
        cu_q, cu_k = (list(itertools.accumulate(lengths, initial=0)) for lengths in (rows, columns))
        Tq = cu_q[-1] + draw.choice([0, 0, 1, 300])
        (lo, hi), lower_right = band(draw, 300), draw.random() < 0.5
        slots = Tq // block_m + count + 1
        found = []
        for slot in range(slots):
            b = kernel.sequence_at(slot, Pointer(cu_q), count, block_m)
            row0, place = kernel.place_of(
                slot, b, Pointer(cu_q), Pointer(cu_k), Tq, 0, lo, hi, count, block_m, lower_right
            )
            if row0 >= place.Sq:
                continue
            found.append((b, row0))
            least, most = (None if limit is None else limit + place.moved for limit in (lo, hi))
            check_visits(kernel, row0, place.Sq, place.Sk, least, most, block_m, 128)
            assert place.q0 == cu_q[b] and place.Sq == (rows[b] if b < count else Tq - cu_q[-1])
            shift = columns[b] - rows[b] if b < count and lower_right else 0
            if b < count:
                seen = [
                    j
                    for j in range(columns[b])
                    if (hi is None or j <= rows[b] - 1 + hi + shift) and (lo is None or j >= lo + shift)
                ]
                assert place.Sk == len(seen) and (not seen or place.k0 == cu_k[b] + seen[0])
            else:
                assert place.Sk == 0
        wanted = [(b, row0) for b, Sq in enumerate([*rows, Tq - cu_q[-1]]) for row0 in range(0, Sq, block_m)]
        assert found == wanted


# ---- the barriers ------------------------------------------------------------------------------------------------


class Barrier:
    """An mbarrier: its phase turns when all have arrived."""

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.phase = 0

    def arrive(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.phase, self.left = self.phase ^ 1, self.count

    def passed(self, parity: int) -> bool:
        return self.phase != parity


class Ring:
    """What lies in the slots, and their barriers."""

    def __init__(self, slots: int, consumers: int) -> None:
        self.slots = slots
        self.full, self.empty = ([Barrier(n) for _ in range(slots)] for n in (1, consumers))
        self.held: list[Any] = [None] * slots

    def is_full(self, n: int) -> Callable[[], bool]:
        return lambda: self.full[n % self.slots].passed((n // self.slots) & 1)

    def is_empty(self, n: int) -> Callable[[], bool]:
        return lambda: self.empty[n % self.slots].passed(((n // self.slots) & 1) ^ 1)

    def release(self, n: int) -> None:
        self.empty[n % self.slots].arrive()


Steps = Iterator[Callable[[], bool] | None]  # what is waited for before going on; None: others may run here
END = ("end",)


def run(consumers: int, stages: int, q_stages: int, counts: list[int], tails: list[bool], draw: random.Random) -> None:
    """A producer and its consumers on tiles of `counts` visits, interleaved at random; every read is asserted.

    The first consumers skip some of a tile's visits, but not all.
    """
    skips = [[max(0, min(count - 1, draw.randint(0, 2) - c)) for c in range(consumers)] for count in counts]
    queries, keys, values = Ring(q_stages, consumers), Ring(stages, consumers), Ring(stages, consumers)
    copies: list[tuple[Ring, int, Any]] = []  # under way
    passed = [0] * consumers

    def fill(ring: Ring, n: int, what: Any) -> Steps:
        yield ring.is_empty(n)
        ring.held[n % ring.slots] = None
        copies.append((ring, n, what))

    def producer() -> Steps:
        n = 0
        for tile, count in enumerate(counts):
            yield from fill(queries, tile, ("q", tile))
            yield from fill(keys, n, ("k", tile, 0))
            for i in range(1, count):
                yield from fill(keys, n + 1, ("k", tile, i))
                yield from fill(values, n, ("v", tile, i - 1))
                n += 1
            yield from fill(values, n, ("v", tile, count - 1))
            n += 1
        yield from fill(queries, len(counts), END)

    def consumer(c: int) -> Steps:
        def take_turn() -> Steps:
            yield lambda: passed[c] > 0
            passed[c] -= 1

        def pass_turn() -> None:
            after = (c + 1) % consumers
            passed[after] += 1
            assert passed[after] <= 1

        def holds(ring: Ring, n: int, *what: Any) -> None:
            assert ring.held[n % ring.slots] == what, (c, n, what, ring.held)

        if c == consumers - 1:
            pass_turn()
        n = tile = 0
        yield queries.is_full(0)
        while queries.held[tile % q_stages] != END:
            holds(queries, tile, "q", tile)
            skipped = skips[tile][c]
            for _ in range(skipped):
                yield keys.is_full(n)
                yield from take_turn()
                pass_turn()
                keys.release(n)
                yield values.is_full(n)
                values.release(n)
                n += 1
            yield keys.is_full(n)
            yield from take_turn()
            yield None
            holds(keys, n, "k", tile, skipped)
            pass_turn()
            keys.release(n)
            if tails[tile] and not skipped:  # of a packed sequence: values behind its end are cleared
                yield values.is_full(n)
                holds(values, n, "v", tile, 0)
            for i in range(skipped + 1, counts[tile]):
                yield keys.is_full(n + 1)
                yield from take_turn()
                holds(keys, n + 1, "k", tile, i)
                yield values.is_full(n)
                holds(values, n, "v", tile, i - 1)
                pass_turn()
                yield None
                holds(keys, n + 1, "k", tile, i)
                holds(queries, tile, "q", tile)
                keys.release(n + 1)
                yield None
                holds(values, n, "v", tile, i - 1)
                values.release(n)
                n += 1
            queries.release(tile)
            yield values.is_full(n)
            yield None
            holds(values, n, "v", tile, counts[tile] - 1)
            values.release(n)
            n, tile = n + 1, tile + 1
            yield queries.is_full(tile)
        if c == 0:
            yield from take_turn()

    live = {"producer": producer(), **{str(c): consumer(c) for c in range(consumers)}}
    waits = {name: next(steps) for name, steps in live.items()}
    while live:
        ready = [name for name in live if waits[name] is None or waits[name]()]
        assert ready or copies, f"all wait: {list(live)}"
        chosen = draw.choice([*ready, *(["copy"] if copies else [])])
        if chosen == "copy":
            ring, n, what = copies.pop(draw.randrange(len(copies)))
            ring.held[n % ring.slots] = what
            ring.full[n % ring.slots].arrive()
            continue
        try:
            waits[chosen] = next(live[chosen])
        except StopIteration:
            del live[chosen]
    assert not any(passed)


def test_roles_never_wait_for_each_other_in_a_circle() -> None:
    for seed in range(1500):
        draw = random.Random(seed)
        counts = [draw.randint(1, 6) for _ in range(draw.randint(0, 5))]
        tails = [draw.random() < 0.3 for _ in counts]
        run(draw.choice([2, 3]), draw.choice([2, 3, 4]), draw.choice([1, 2]), counts, tails, draw)


# ---- all of it ---------------------------------------------------------------------------------------------------

B, HQ, HKV = 2, 4, 2


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel in numpy, by three programs."""
    monkeypatch.setattr(forward, "hopper_forward_kernel", gluon.Emulated())
    monkeypatch.setattr(forward, "facts_of", lambda index: SimpleNamespace(multiprocessors=3))
    monkeypatch.setattr(forward, "board", lambda device, words, stream: torch.zeros(words, dtype=torch.int64))


def exact(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """In float64, of one sequence."""
    k, v = (x.double().repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    x = q.double() @ k.mT * terms.scale
    if terms.softcap is not None:
        x = terms.softcap * (x / terms.softcap).tanh()
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
    shift = k.shape[-2] - q.shape[-2] if terms.lower_right else 0
    keep = torch.ones(x.shape[-2:], dtype=torch.bool)
    if terms.hi is not None:
        keep &= j - i <= terms.hi + shift
    if terms.lo is not None:
        keep &= j - i >= terms.lo + shift
    x = x.masked_fill(~keep, float("-inf"))
    lse = x.logsumexp(-1)
    if terms.sink is not None:
        lse = torch.logaddexp(lse, terms.sink.double()[:, None])
    p = (x - lse[..., None]).exp().nan_to_num()
    return p @ v.masked_fill(~keep.any(0)[:, None], 0.0), lse


def agree(out: Tensor, lse: Tensor, want: Tensor, want_lse: Tensor) -> None:
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), want, rtol=2e-3, atol=1e-3)


def heads(H: int, S: int, width: int, inner: bool = False) -> Tensor:
    x = torch.randn(B, S, H, width) if inner else torch.randn(B, H, S, width)
    return (x.transpose(1, 2) if inner else x).half()


DEFAULTS = {f"{config.d}-{config.dv}": config for config in tuning.CONFIGS}
VARIANTS = {
    "one-slot": replace(DEFAULTS["64-64"], q_stages=1),
    "pinned": replace(DEFAULTS["128-128"], pinned=True),
    "pinned-64": replace(DEFAULTS["64-64"], pinned=True),
    "pinned-256": replace(DEFAULTS["256-256"], pinned=True),
    "two": tuning.SHORT,
}


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("name", [*DEFAULTS, *VARIANTS])
@pytest.mark.parametrize(
    ("Sq", "Sk", "lo", "hi"),
    [(200, 300, None, None), (130, 256, None, None), (200, 300, None, 100), (300, 200, -70, 0), (150, 200, 20, None),
     (200, 60, None, -120)],
)  # fmt: skip
def test_every_config_in_numpy(name: str, Sq: int, Sk: int, lo: int | None, hi: int | None) -> None:
    config = replace((DEFAULTS | VARIANTS)[name], queue=lo is not None or hi is not None)
    q, k, v = heads(HQ, Sq, config.d, True), heads(HKV, Sk, config.d), heads(HKV, Sk, config.dv, True)
    if hi is not None and Sq + hi < Sk:  # keys that no query sees
        k[:, :, Sq + hi :] = v[:, :, Sq + hi :] = float("nan")
    terms = Terms(scale=config.d**-0.5, lo=lo, hi=hi)
    agree(*forward.attention_forward(q, k, v, terms, config), *exact(q, k, v, terms))


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("name", ["pinned", "pinned-64", "pinned-256"])
@pytest.mark.parametrize(("lo", "hi"), [(None, None), (None, 100), (-170, 63), (20, None)])
def test_scores_that_rise_far_above_the_first_in_numpy(name: str, lo: int | None, hi: int | None) -> None:
    """Tiles whose pivot does not do are taken again, some of them and at the end of a program too."""
    config = replace(VARIANTS[name], queue=lo is not None or hi is not None)
    q, k, v = heads(HQ, 400, config.d), heads(HKV, 500, config.d), heads(HKV, 500, config.dv)
    q[0, 1], k[:, 0, :200] = 100 * q[0, 1], 4 * k[:, 0, :200]  # keys are visited from the last to the first
    terms = Terms(scale=config.d**-0.5, lo=lo, hi=hi)
    out, lse = forward.attention_forward(q, k, v, terms, config)
    want, want_lse = exact(q, k, v, terms)
    agree(out, lse, want, want_lse)


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (40, 56), (72, 128), (104, 16), (168, 120), (232, 200)])
def test_narrower_heads_and_other_terms_in_numpy(D: int, Dv: int) -> None:
    q, k, v = heads(HQ, 200, D), heads(HKV, 150, D, True), heads(HKV, 150, Dv)
    for terms in (Terms(scale=0.3, softcap=2.0), Terms(scale=0.3, sink=torch.randn(HQ), hi=-20)):
        agree(*forward.attention_forward(q, k, v, terms), *exact(q, k, v, terms))


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize(
    ("lo", "hi", "lower_right"),
    [(None, None, False), (None, 0, True), (-60, 20, True), (None, 3, False), (5, None, False)],
)
def test_packed_sequences_in_numpy(name: str, lo: int | None, hi: int | None, lower_right: bool) -> None:
    """Each is its own, whatever lies beside it; what lies behind the last is zeros."""
    config = replace(DEFAULTS[name], queue=True)
    rows, columns = [200, 0, 64, 5, 130, 128], [150, 40, 0, 129, 128, 3]
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (rows, columns))
    q, k, v = (
        torch.randn(H, S, w).half() for H, S, w in ((HQ, 540, config.d), (HKV, 460, config.d), (HKV, 460, config.dv))
    )
    sink = torch.randn(HQ) if lo is None else None
    terms = Terms(sink=sink, cu_q=cu_q, cu_k=cu_k, scale=config.d**-0.5, lo=lo, hi=hi, lower_right=lower_right)
    for b, (Sq, Sk) in enumerate(zip(rows, columns, strict=True)):
        here_q, here_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        others = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        for x, whole, here in zip(others, (q, k, v), (here_q, here_k, here_k), strict=True):
            x[:, here] = whole[:, here]
        out, lse = forward.attention_forward(*(x[None] for x in others), terms._replace(max_q=200, max_k=150), config)
        alone = exact(q[:, here_q], k[:, here_k], v[:, here_k], terms)
        if Sq and Sk:
            agree(out[0, :, here_q], lse[0, :, here_q], *alone)
        elif Sq:
            wanted = torch.full((HQ, Sq), float("-inf")) if sink is None else sink[:, None].expand(HQ, Sq)
            assert torch.equal(out[0, :, here_q], torch.zeros(HQ, Sq, config.dv).half())
            torch.testing.assert_close(lse[0, :, here_q], wanted)
        assert (out[0, :, cu_q[-1] :] == 0).all() and (lse[0, :, cu_q[-1] :] == float("-inf")).all()


# ---- configs and what is refused -----------------------------------------------------------------------------


def test_configs_are_legal_and_every_head_gets_the_narrowest() -> None:
    assert all(tuning.legal(config) for config in (*tuning.CONFIGS, tuning.SHORT))
    for D, Dv in itertools.product(range(8, 257, 8), repeat=2):
        config = tuning.hopper_config(D, Dv, 4096, False, True)
        assert config.d >= D and config.dv >= Dv
        fit = [other for other in tuning.CONFIGS if other.d >= D and other.dv >= Dv]
        assert config.d + config.dv == min(other.d + other.dv for other in fit)
    assert not tuning.legal(tuning.HopperConfig(256, 256, 2, 128, 2, 1, 240, 24))
    assert not tuning.legal(tuning.HopperConfig(256, 256, 2, 64, 2, 1, 240, 24, out_columns=32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q, k, v[..., :60]), "multiple of 8"),
        (lambda q, k, v: (q[..., 1:], k[..., 1:], v), "query must begin"),
        (lambda q, k, v: (q, k.transpose(2, 3).contiguous().transpose(2, 3), v), "key must begin"),
        (lambda q, k, v: (q, k, v[:, :, :1].expand(v.shape)), "value must have rows"),
        (lambda q, k, v: (q[:, :, :0], k, v), "nothing to compute"),
    ],
)
def test_what_a_tensor_map_cannot_hold_is_said(change: Any, words: str) -> None:
    q, k, v = (torch.zeros(2, 3, 40, 64, dtype=torch.bfloat16) for _ in range(3))
    assert support.why_not(q, k, v, Terms()) is None
    reason = support.why_not(*change(q, k, v), Terms())
    assert reason is not None and words in reason
    assert support.why_not(q, k, v, Terms(scale=-1.0)) == "it takes positive scales only"
    assert support.why_not(q, k, v, Terms(hi=-40)) == "no query sees a key"


# ---- on a GPU ------------------------------------------------------------------------------------------------


def on_hopper() -> bool:
    return conftest.HAS_GPU and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [None, flashsoft.Causal(), flashsoft.Window(100)], ids=["none", "causal", "window"])
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (80, 96), (192, 128), (256, 256)])
def test_it_computes_what_the_portable_kernels_do(D: int, Dv: int, mask: Any) -> None:
    if not on_hopper():
        pytest.skip("needs a GPU of compute capability 9.0")
    for Sq, Sk in ((1, 700), (300, 300), (513, 129), (1536, 1536)):
        shapes = ((4, 12, Sq, D), (4, 4, Sk, D), (4, 4, Sk, Dv))
        q, k, v = (
            torch.randn(B, S, H, w, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for B, H, S, w in shapes
        )
        results = [
            flashsoft.attention(q, k, v, mask=mask, softcap=cap, return_lse=True, backend=backend)
            for backend in ("hopper", "triton")
            for cap in (None, 5.0)
        ]
        for (out, lse), (want, want_lse) in zip(results[:2], results[2:], strict=True):
            torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(out, want, rtol=2e-2, atol=1e-2)
        first = flashsoft.attention(q, k, v, mask=mask, backend="hopper")
        assert all(torch.equal(flashsoft.attention(q, k, v, mask=mask, backend="hopper"), first) for _ in range(20))
