"""Dropout: words that a place and a seed decide, the same in forward, backward and replay, and fair."""

from __future__ import annotations

import conftest
import inputs
import pytest
import torch
from cases import AttentionCase
from test_attention_terms import Options, expected_dropout
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashsoft
from flashsoft import Causal
from flashsoft.reference import dropout

if conftest.HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def words_kernel(seed_ptr, c0_ptr, c1_ptr, c2_ptr, c3_ptr, out_ptr, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        inside = at < n
        counters = [tl.load(p + at, inside, 0) for p in (c0_ptr, c1_ptr, c2_ptr, c3_ptr)]
        words = tl.philox(tl.load(seed_ptr), counters[0], counters[1], counters[2], counters[3], n_rounds=7)
        for number in tl.static_range(4):
            tl.store(out_ptr + number * n + at, words[number].to(tl.int64), inside)


SEEDS = (0, 1, 5, 2**32 - 1, 2**32, 2**63 - 1, 0x123456789ABCDEF)


def counters() -> list[Tensor]:
    """Small, large and random ones."""
    edges = torch.tensor([0, 1, 2**16 - 1, 2**16, 2**31 - 1])
    return [torch.cat((edges.roll(shift), torch.randint(2**31, (59,)))) for shift in range(4)]


@pytest.mark.parametrize("seed", SEEDS)
def test_words_are_those_of_triton(seed: int, device: torch.device) -> None:
    if not conftest.HAS_TRITON:
        pytest.skip("triton is not installed")
    given = counters()
    word = torch.tensor([seed], device=device)
    out = torch.empty(4, 64, dtype=torch.int64, device=device)
    words_kernel[(1,)](word, *(c.to(device, torch.int32) for c in given), out, 64, BLOCK=64)
    want = torch.stack(dropout.philox(torch.tensor([seed]), *given))
    assert torch.equal(out.cpu(), want)


def plain_philox(key: list[int], counter: list[int], rounds: int) -> list[int]:
    """The paper's rounds, in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_words_are_those_of_the_paper() -> None:
    # the authors' own vectors, of ten rounds, hold the plain one in place
    assert plain_philox([0, 0], [0, 0, 0, 0], 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert plain_philox([0xFFFFFFFF] * 2, [0xFFFFFFFF] * 4, 10) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    given = counters()
    for seed in SEEDS:
        got = torch.stack(dropout.philox(torch.tensor([seed]), *given), -1)
        key = [seed & 0xFFFFFFFF, seed >> 32]
        for row, counter in zip(got.tolist(), torch.stack(given, -1).tolist(), strict=True):
            assert row == plain_philox(key, counter, dropout.ROUNDS)


def test_a_tile_is_a_cut_of_the_whole() -> None:
    seed, heads = torch.tensor([99]), torch.arange(6).view(2, 3)
    whole = dropout.kept(seed, 0.3, heads, (0, 21), (0, 34))
    for rows, columns in (((3, 9), (0, 34)), ((0, 21), (5, 13)), ((20, 21), (33, 34)), ((0, 4), (4, 8))):
        cut = dropout.kept(seed, 0.3, heads, rows, columns)
        assert torch.equal(cut, whole[..., slice(*rows), slice(*columns)])
    assert torch.equal(dropout.kept(seed, 0.3, heads[1:], (0, 21), (0, 34)), whole[1:])


def test_thresholds() -> None:
    assert dropout.threshold(0.0) == 0 and dropout.threshold(0.5) == 2**31 and dropout.threshold(1.0) == 2**32 - 1
    assert (dropout.kept(torch.tensor([3]), 1.0, torch.arange(2), (0, 9), (0, 9)) == 0).all()


def draw(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return inputs.attention_inputs(1, 2, 1, 33, 40, 16, 16, device=device, dtype=dtype)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_weights_are_left_out_where_the_words_say(dropout_p: float, backend: str, device: torch.device) -> None:
    """With an identity for values, out is the dropped weights themselves."""
    q, k, _ = (x.detach() for x in draw(device))
    v = torch.eye(40, device=device)[None, None]
    torch.manual_seed(7)
    out, lse = flashsoft.attention(q, k, v, mask=Causal(), dropout_p=dropout_p, return_lse=True, backend=backend)
    plain, plain_lse = flashsoft.attention(q, k, v, mask=Causal(), return_lse=True, backend=backend)
    factors = expected_dropout(AttentionCase(1, 2, 1, 33, 40, 16, 40), Options(dropout_p=dropout_p), 7, device)
    assert factors is not None
    torch.testing.assert_close(out, plain * factors.to(device))
    assert torch.equal((out == 0).cpu(), (plain.cpu() == 0) | (factors == 0))
    torch.testing.assert_close(lse, plain_lse)


def test_the_share_left_out_and_the_mean(backend: str, device: torch.device) -> None:
    """40,000 draws: six standard deviations, neighbours independent in both directions and between heads."""
    S = 100
    q = torch.zeros(2, 2, S, 16, device=device)
    v = torch.eye(S, device=device).expand(2, 2, S, S)
    for dropout_p in (0.1, 0.5, 0.75):
        torch.manual_seed(11)
        kept = (flashsoft.attention(q, q, v, dropout_p=dropout_p, backend=backend) != 0).double().cpu()
        sigma = (dropout_p * (1 - dropout_p) / kept.numel()) ** 0.5
        assert abs(kept.mean() - (1 - dropout_p)) < 6 * sigma
        centred = kept - (1 - dropout_p)
        for dim, step in ((-1, 1), (-1, 4), (-2, 1), (1, 1), (0, 1)):
            pairs = centred.narrow(dim, 0, centred.shape[dim] - step) * centred.narrow(
                dim, step, centred.shape[dim] - step
            )
            assert abs(pairs.mean()) < 6 * dropout_p * (1 - dropout_p) / pairs.numel() ** 0.5


def test_the_mean_is_kept(backend: str, device: torch.device) -> None:
    q, k, v = (torch.zeros(2, 2, 40, 16, device=device) for _ in range(3))
    out = flashsoft.attention(q, k, v + 1, dropout_p=0.25, backend=backend)
    assert abs(float(out.mean()) - 1) < 0.02 and out.std() > 0.01
    assert (flashsoft.attention(q, k, v + 1, dropout_p=1.0, backend=backend) == 0).all()


def test_the_backward_drops_what_the_forward_did(backend: str, device: torch.device) -> None:
    """out is linear in value: <out, g> = <value, dvalue> for one mask only."""
    q, k, v = draw(device)
    out = flashsoft.attention(q, k, v, dropout_p=0.4, backend=backend)
    g = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, g)
    left, right = (out * g).double().sum(), (v * dv).double().sum()
    assert abs(left - right) <= 1e-6 * (out * g).double().abs().sum()


def test_a_seed_gives_its_bits_and_the_next_call_others(backend: str, device: torch.device) -> None:
    q, k, v = draw(device)
    torch.manual_seed(3)
    first = flashsoft.attention(q, k, v, dropout_p=0.4, backend=backend)
    second = flashsoft.attention(q, k, v, dropout_p=0.4, backend=backend)
    torch.manual_seed(3)
    assert torch.equal(flashsoft.attention(q, k, v, dropout_p=0.4, backend=backend), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_replays_it(use_reentrant: bool, backend: str, device: torch.device) -> None:
    q, k, v = draw(device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashsoft.attention(q, k, v, dropout_p=0.3, backend=backend)

    gradients = []
    for replayed in (False, True):
        torch.manual_seed(11)
        out = checkpoint(attend, q, k, v, use_reentrant=use_reentrant) if replayed else attend(q, k, v)
        gradients.append(
            torch.autograd.grad(out.square().sum(), (q, k, v)) if not use_reentrant else _backward(out, q, k, v)
        )
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def _backward(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    for leaf in leaves:
        leaf.grad = None
    out.square().sum().backward()
    return tuple(leaf.grad.clone() for leaf in leaves if leaf.grad is not None)


def test_compiled_it_draws_from_torchs_generator(backend: str, device: torch.device) -> None:
    """Each call of the compiled graph draws anew, from a state that torch sets."""
    q, k, v = draw(device)
    compiled = torch.compile(
        lambda q, k, v: flashsoft.attention(q, k, v, dropout_p=0.4, backend=backend),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.manual_seed(3)
    first, second = compiled(q, k, v), compiled(q, k, v)
    torch.manual_seed(3)
    assert torch.equal(compiled(q, k, v), first) and not torch.equal(first, second)
    g = torch.randn_like(first)
    (dv,) = torch.autograd.grad(first, v, g)
    assert abs((first * g).sum() - (v * dv).sum()) <= 1e-4 * (first * g).abs().sum()


@pytest.mark.gpu
def test_a_captured_graph_draws_anew_at_each_replay(device: torch.device) -> None:
    q, k, v = (x.detach() for x in draw(device, torch.float16))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        flashsoft.attention(q, k, v, dropout_p=0.5)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashsoft.attention(q, k, v, dropout_p=0.5)
    results = []
    for _ in range(2):
        graph.replay()
        results.append(out.clone())
    assert not torch.equal(*results)
