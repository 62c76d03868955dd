"""The registered operators: fakes, gradients, batching rules; under compile, export and transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import inputs
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import flashsoft
from flashsoft import ALiBi, Causal, Segments, Window, ops
from flashsoft.terms import Terms

_ops = getattr(torch.ops, ops.NAMESPACE)
F32, F16 = torch.float32, torch.float16


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def operator_calls(device: torch.device, backend: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every operator with small arguments: strided, with options and without, leaves where it can."""

    def draw(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return inputs.draw(*shape, device=device, dtype=dtype)

    x = leaf(draw(3, 4, 6).transpose(0, 1))
    for name in ("softmax", "log_softmax"):
        yield name, (x, F32, backend)
        yield name, (x, F16, backend)
        yield f"{name}_backward", (draw(4, 3, 6), draw(4, 3, 6), F32, backend)
    yield "logsumexp", (x, backend)
    yield "logsumexp_backward", (draw(4, 3), draw(4, 3, 6), draw(4, 3), backend)

    keep = torch.rand(4, 3, 6, device=device) > 0.3
    temperature, bias = leaf(draw(4, 3, 1).abs() + 0.5), leaf(draw(1, 3, 6))
    top_k = torch.tensor([1, 2, 3], device=device).view(1, 3, 1).expand(4, 3, 1)
    share = torch.rand(1, 3, 1, device=device).expand(4, 3, 1)
    no_limits: tuple[None, ...] = (None,) * 6
    yield "fused_softmax", (x, F32, 0.7, None, None, None, None, None, None, None, *no_limits, backend)
    limits = (4, None, 0.9, None, 0.01, None)
    yield "fused_softmax", (x, F16, 1.0, temperature, 0.5, 2.0, keep, -2, 1, bias, *limits, backend)
    limits = (None, top_k, None, share, None, share)
    yield "fused_softmax", (x, F32, 1.0, None, None, None, None, None, 3, None, *limits, backend)
    uniform = torch.rand(4, 3, 2, device=device)
    scores = (0.7, None, 0.5, None, keep, None, None, None)
    yield "sample", (x.detach(), uniform, *scores, *limits, backend)
    dy, y = draw(4, 3, 6), torch.softmax(draw(4, 3, 6), -1)
    rest = (None, None, None, None, False, backend)
    yield "fused_softmax_backward", (dy, draw(4, 3), draw(4, 3, 6), y, 0.7, *rest)
    yield (
        "fused_softmax_backward",
        (dy, None, draw(4, 3, 6), y, 1.0, temperature.detach(), 0.5, 2.0, bias.detach(), True, backend),
    )

    for layout, every in (("contiguous", True), ("transposed", False)):
        q, k, v = inputs.attention_inputs(2, 2, 1, 4, 6, 8, 4, device=device, layout=layout)
        keep = torch.rand(2, 1, 1, 6, device=device).expand(2, 2, 4, 6) > 0.3
        few = Terms(keep=keep, scale=0.3, lo=-1, hi=2)
        slopes, sink, factor = leaf(torch.rand(1, 2, device=device)), leaf(draw(2)), leaf(draw(1)).expand(2)
        ids = [torch.randint(2, (1, S), device=device) for S in (4, 6)]
        seed, lengths = torch.tensor([5], device=device), torch.tensor([6, 2], device=device)
        many = Terms(None, leaf(draw(1, 2, 1, 6)), slopes, sink, factor, *ids, lengths, None, None, seed, 1.0, 2.0, 0.3)
        for terms in (Terms(scale=0.3), few, many) if every else (few,):
            yield "attention", (q, k, v, *terms, backend)
        qkv = [t.detach() for t in (q, k, v)]
        some = (few, (True,) * 3 + (False,) * 4), (many, (False, True) * 3 + (False,))
        for terms, needs in (*some, (many, (True,) * 7)) if every else some:
            terms = Terms(*(t.detach() if isinstance(t, Tensor) else t for t in terms))
            out, lse = _ops.attention(*qkv, *terms, "reference")  # its results are those of any backend
            dout, dlse = torch.randn_like(out), None if needs[0] else torch.randn_like(lse)
            yield "attention_backward", (dout, dlse, *qkv, out, lse, *terms, *needs, backend)
    ends = [torch.tensor(e, device=device, dtype=torch.int32) for e in ((0, 2, 2, 4), (0, 3, 5, 6))]
    packed = Terms(slopes=slopes, cu_q=ends[0], cu_k=ends[1], scale=0.3, hi=0, lower_right=True, max_q=2, max_k=3)
    yield "attention", (q[:1], k[:1], v[:1], *packed, backend)

    # leaves only where no operator writes
    x, target = draw(3, 4, 7).transpose(0, 1), torch.tensor([[0, 6, -100]] * 4, device=device)
    weight, scalar = draw(7).abs(), draw(1).squeeze()
    yield "cross_entropy_state", (x, target, None, 0, -100, False, None, backend)
    yield "cross_entropy_state", (x, target, weight, 7, -100, True, 5.0, backend)
    states = _ops.cross_entropy_state(x, target, weight, 0, -100, True, None, "reference")
    states = torch.stack([states, states], -1)
    yield "cross_entropy", (leaf(x), target, None, None, 0, 7, -100, 0.0, 0.0, None, backend)
    yield "cross_entropy", (leaf(x), target, weight, states, 0, 14, -100, 0.1, 1e-3, 5.0, backend)
    dloss, m, slope = draw(4, 3), draw(4, 3), draw(4, 3)
    yield "cross_entropy_backward", (dloss, x, target, weight, m, slope, 0, 7, -100, 0.1, 5.0, backend)
    yield "cross_entropy_overwrite", (x.clone(), target, weight, scalar, -100, 0.1, 1e-3, None, backend)
    yield "scale", (x.clone(), scalar, backend)
    yield "overwritten", (leaf(x), scalar, backend)
    yield "scaled", (x, scalar, x, None, None)

    # a backward scales results where they lie, which nobody else sees but opcheck: so it hands in 1, a loss above 0
    scalar = scalar.abs()
    hidden, matrix, bias = leaf(draw(5, 8)), leaf(draw(7, 8)), leaf(draw(7))
    target, options = torch.tensor([0, 6, -100, 3, 3], device=device), (-100, 0.1, 1e-3, None, 2)
    yield "linear_cross_entropy", (hidden, matrix, bias, target, weight, scalar, *options, True, True, True, backend)
    yield "linear_cross_entropy", (hidden, matrix, None, target, None, None, *options, True, False, False, backend)
    yield "linear_cross_entropy_rows", (hidden, matrix, bias, target, weight, *options, backend)
    layer = hidden.detach(), matrix.detach(), None
    yield (
        "linear_cross_entropy_rows_backward",
        (draw(5), *layer, target, None, *options, False, True, False, backend),
    )


CALLS = 37


def test_the_table_below_holds_every_operator(device: torch.device) -> None:
    calls = list(operator_calls(device, "reference"))
    assert len(calls) == CALLS
    registered = {
        str(name).split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("flashsoft::")
    }
    assert {name for name, _ in calls} == {name.split(".")[0] for name in registered}


@pytest.mark.parametrize("number", range(CALLS))
def test_opcheck(number: int, backend: str, device: torch.device) -> None:
    name, args = list(operator_calls(device, backend))[number]
    done = torch.library.opcheck(getattr(_ops, name).default, args)
    assert set(done.values()) == {"SUCCESS"}


@pytest.mark.parametrize("number", range(CALLS))
def test_fakes_have_the_real_shapes_strides_and_dtypes(number: int, backend: str, device: torch.device) -> None:
    name, args = list(operator_calls(device, backend))[number]
    real = getattr(_ops, name)(*args)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(a.detach()) if isinstance(a, Tensor) else a for a in args]
    with mode:
        fake = getattr(_ops, name)(*fakes)
    for a, b in zip(*((r,) if isinstance(r, Tensor) else r or () for r in (real, fake)), strict=True):
        assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and a.device == b.device


LAYOUTS = ("contiguous", "transposed", "packed", "columns", "columns_first", "expanded", "value_transposed")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_traced_strides_of_attention_are_the_real_ones(layout: str, backend: str, device: torch.device) -> None:
    """Forward and backward, for every layout: a compiled reshape of the result relies on them."""
    leaves = inputs.attention_inputs(2, 2, 2, 5, 5, 8, 8, device=device, layout=layout)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, lse = flashsoft.attention(q, k, v, mask=Causal(), return_lse=True, backend=backend)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))

    real = run(*leaves)
    mode = FakeTensorMode()
    with mode:
        fake = run(*(mode.from_tensor(t) for t in leaves))
    assert [t.stride() for t in real] == [t.stride() for t in fake]


def attend(backend: str) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse = flashsoft.attention(q, k, v, mask=Causal() & Window(6), return_lse=True, backend=backend)
        return out.transpose(1, 2).flatten(2) * lse.mean()

    return run


def attend_with_terms(backend: str) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, bias: Tensor, sink: Tensor, scale: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        ids = torch.arange(q.shape[2], device=q.device) // 4
        out, lse = flashsoft.attention(
            q, k, v, mask=Causal() & Segments(ids) & Segments(ids // 2), bias=ALiBi(slopes) + bias[..., : q.shape[2]],
            sink=sink, scale=scale, softcap=5.0, return_lse=True, backend=backend,
        )  # fmt: skip
        return out.transpose(1, 2).flatten(2) * lse.mean()

    return run


def attend_varlen(backend: str) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, sink: Tensor) -> Tensor:
        S = q.shape[0]
        out, lse = flashsoft.attention_varlen(
            q, k, v, ends, ends, S, S, mask=Causal() & Window(6), sink=sink, return_lse=True, backend=backend
        )
        return out.flatten(1) * lse.mean()

    return run


def rows(backend: str) -> Callable[..., Tensor]:
    def run(x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        y = flashsoft.softmax(x, dim=0, backend=backend).square() + flashsoft.log_softmax(x, backend=backend)
        z, lse = flashsoft.fused_softmax(
            x, temperature=0.7, mask=mask, bias=bias, top_k=3, return_lse=True, backend=backend
        )
        return y + z + lse.unsqueeze(-1) + flashsoft.logsumexp(x, keepdim=True, backend=backend)

    return run


def same_under_compile(run: Callable[..., Tensor], compiled: Callable[..., Tensor], args: tuple[Tensor, ...]) -> None:
    want, got = run(*args), compiled(*args)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want)
    leaves = [a for a in args if a.requires_grad]
    g = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, leaves, g), torch.autograd.grad(want, leaves, g), strict=True):
        torch.testing.assert_close(a, b)


def attention_args(S: int, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(leaf(inputs.draw(2, S, H, 8, device=device)) for H in (2, 1, 1))


def term_args(S: int, device: torch.device) -> tuple[Tensor, ...]:
    bias = leaf(inputs.draw(1, 1, 1, 20, device=device))
    slopes, sink, scale = (leaf(torch.rand(2, device=device)) for _ in range(3))
    return *attention_args(S, device), slopes, bias, sink, scale


def varlen_args(S: int, device: torch.device) -> tuple[Tensor, ...]:
    ends = torch.tensor([0, 2, 2, S], dtype=torch.int32, device=device)
    return (*(leaf(inputs.draw(S, H, 8, device=device)) for H in (2, 1, 1)), ends, leaf(torch.rand(2, device=device)))


def row_args(n: int, device: torch.device) -> tuple[Tensor, ...]:
    mask = torch.rand(n, n + 1, device=device) > 0.2
    return leaf(inputs.draw(n, n + 1, device=device)), mask, leaf(inputs.draw(n + 1, device=device))


@pytest.mark.parametrize(
    "make, args",
    [(attend, attention_args), (attend_with_terms, term_args), (attend_varlen, varlen_args), (rows, row_args)],
    ids=["attention", "terms", "varlen", "rows"],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(
    make: Callable[..., Any], args: Callable[..., Any], dynamic: bool, backend: str, device: torch.device
) -> None:
    run = make(backend)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=counter)
    for length in (5, 9) if dynamic else (5,):
        same_under_compile(run, compiled, args(length, device))
    assert counter.frame_count == 1  # no length compiles again


def test_compiled_by_inductor(device: torch.device) -> None:
    """The default backend asserts strides. Nothing here is fused, so that no C++ is built."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return flashsoft.attention(q, k, v, mask=Causal()).transpose(1, 2).flatten(2)

    same_under_compile(run, torch.compile(run, fullgraph=True), attention_args(5, device))


class Block(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return flashsoft.attention(q, k, v, mask=Causal()), flashsoft.fused_softmax(x, temperature=0.5, top_k=3)


@pytest.mark.parametrize("dynamic", [False, True])
def test_exported(dynamic: bool, device: torch.device) -> None:
    def args(S: int) -> tuple[Tensor, ...]:
        q, k, v = (inputs.draw(2, H, S, 8, device=device) for H in (2, 1, 1))
        return q, k, v, inputs.draw(S, 9, device=device)

    dims = None
    if dynamic:
        S = torch.export.Dim("S", min=2, max=512)
        dims = {"q": {2: S}, "k": {2: S}, "v": {2: S}, "x": {0: S}}
    exported = torch.export.export(Block(), args(5), dynamic_shapes=dims)
    given = args(11 if dynamic else 5)
    for got, want in zip(exported.module()(*given), Block()(*given), strict=True):
        torch.testing.assert_close(got, want)


def test_vmap_of_row_functions(backend: str, device: torch.device) -> None:
    x = inputs.draw(3, 4, 9, device=device)
    for function in (flashsoft.softmax, flashsoft.log_softmax, flashsoft.logsumexp):

        def run(t: Tensor, function: Callable[..., Tensor] = function) -> Tensor:
            return function(t, -1, backend=backend)

        torch.testing.assert_close(torch.vmap(run)(x), run(x))
        torch.testing.assert_close(torch.vmap(run, in_dims=2, out_dims=-1)(x.movedim(0, 2)), run(x).movedim(0, -1))


def test_vmap_of_fused_softmax(backend: str, device: torch.device) -> None:
    x, bias = inputs.draw(3, 4, 9, device=device), inputs.draw(9, device=device)
    keep = torch.rand(3, 4, 9, device=device) > 0.3

    def run(x: Tensor, keep: Tensor) -> Tensor:
        return flashsoft.fused_softmax(x, temperature=0.7, mask=keep, bias=bias, top_k=4, backend=backend)

    torch.testing.assert_close(torch.vmap(run)(x, keep), run(x, keep))
    torch.testing.assert_close(torch.vmap(run, in_dims=(0, None))(x, keep[0]), run(x, keep[:1]))


def test_vmap_of_attention_with_a_mask_made_inside(backend: str, device: torch.device) -> None:
    q, k, v = (inputs.draw(3, 1, 2, 5, 8, device=device) for _ in range(3))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.ones(5, 5, dtype=torch.bool, device=q.device).tril()
        return flashsoft.attention(q, k, v, mask=keep, backend=backend)

    want = flashsoft.attention(*(t.flatten(0, 1) for t in (q, k, v)), mask=Causal(), backend=backend)
    torch.testing.assert_close(torch.vmap(run)(q, k, v).flatten(0, 1), want)
    torch.testing.assert_close(torch.vmap(run, in_dims=(0, None, None))(q, k[0], v[0])[2], run(q[2], k[0], v[0]))


def test_vmap_of_attention_with_terms(backend: str, device: torch.device) -> None:
    """Folded where that is the same, entry by entry where it is not; gradients of what is shared and what is not."""
    V, B, H, S = 2, 2, 2, 5
    q, k, v = (leaf(inputs.draw(V, B, H, S, 8, device=device)) for _ in range(3))
    shared_bias, own_bias = (
        leaf(inputs.draw(1, H, 1, S, device=device)),
        leaf(inputs.draw(V, B, 1, S, S, device=device)),
    )
    sink, slopes = leaf(inputs.draw(V, H, device=device)), leaf(torch.rand(H, device=device))
    lengths = torch.tensor([[5, 2], [0, 3]], device=device)

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor | None, lengths: Tensor) -> Tensor:
        mask = Causal() & flashsoft.Padding(lengths)
        return flashsoft.attention(q, k, v, mask=mask, bias=ALiBi(slopes) + bias, sink=sink, backend=backend)

    ways = [
        (*bias, *given)
        for bias in ((shared_bias, None), (own_bias, 0))
        for given in ((None, None), (sink, 0), (sink[0], None))
    ]
    if backend == "triton" and device.type == "cpu":  # interpreted: each bias and each sink once
        ways = [ways[0], ways[4], ways[2]]
    for bias, bias_dim, given, sink_dim in ways:
        dims = (0, 0, 0, bias_dim, sink_dim, 0)
        got = torch.vmap(run, in_dims=dims)(q, k, v, bias, given, lengths)
        alone = [
            [t if dim is None else t[i] for t, dim in zip((q, k, v, bias, given, lengths), dims, strict=True)]
            for i in range(V)
        ]
        want = torch.stack([run(*args) for args in alone])
        torch.testing.assert_close(got, want)
        leaves = [t for t in (q, k, v, bias, slopes, *(() if given is None else (sink,)))]
        dout = torch.randn_like(got)
        for a, b in zip(*(torch.autograd.grad(t, leaves, dout) for t in (got, want)), strict=True):
            torch.testing.assert_close(a, b)


def test_vmap_of_packed_sequences_and_of_dropout(backend: str, device: torch.device) -> None:
    q = inputs.draw(3, 6, 2, 8, device=device)
    ends = torch.tensor([[0, 2, 6], [0, 0, 6], [0, 3, 5]], dtype=torch.int32, device=device)

    def packed(q: Tensor, ends: Tensor) -> Tensor:
        return flashsoft.attention_varlen(q, q, q, ends, ends, 6, 6, backend=backend)[:5]

    want = torch.stack([packed(*args) for args in zip(q, ends, strict=True)])
    torch.testing.assert_close(torch.vmap(packed)(q, ends), want)
    ones = torch.ones(3, 1, 1, 5, 8, device=device)

    def dropped(q: Tensor) -> Tensor:
        return flashsoft.attention(q, q, q, dropout_p=0.5, backend=backend)

    same = torch.vmap(dropped, randomness="same")(ones)
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    different = torch.vmap(dropped, randomness="different")(ones)
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(dropped)(ones)


def second(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(g.square().sum(), x)[0]


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_second_derivatives_of_row_functions(name: str, backend: str, device: torch.device) -> None:
    x = leaf(inputs.draw(3, 7, device=device))
    got = second(lambda t: getattr(flashsoft, name)(t, -1, backend=backend), x)
    want = second(lambda t: getattr(torch, name)(t, -1), leaf(x.double()))
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_gradgradcheck_of_row_functions(name: str) -> None:
    x = leaf(torch.randn(2, 5, dtype=torch.float64))
    assert torch.autograd.gradcheck(getattr(flashsoft, name), (x,))
    assert torch.autograd.gradgradcheck(getattr(flashsoft, name), (x,))


@pytest.mark.parametrize("name", ["attention", "fused_softmax"])
def test_a_second_derivative_that_does_not_exist_says_so(name: str, backend: str, device: torch.device) -> None:
    x = leaf(inputs.draw(1, 1, 3, 8, device=device))
    calls = {
        "attention": lambda t: flashsoft.attention(t, t, t, backend=backend),
        "fused_softmax": lambda t: flashsoft.fused_softmax(t, backend=backend),
    }
    with pytest.raises(RuntimeError, match=f"{name} can be differentiated once only; for second derivatives use"):
        second(calls[name], x)


@pytest.mark.parametrize("which", ["softmax", "log_softmax", "fused_softmax", "attention"])
def test_results_are_freed_at_once_and_need_no_graph_without_gradients(which: str, device: torch.device) -> None:
    import gc

    from torch.multiprocessing.reductions import StorageWeakRef

    # the interpreter keeps its arguments in cycles of its own
    backend = "triton" if device.type == "cuda" else "reference"
    x = leaf(inputs.draw(1, 1, 3, 8, device=device))

    def run() -> Tensor:
        if which == "attention":
            return flashsoft.attention(x, x, x, backend=backend)
        return getattr(flashsoft, which)(x, backend=backend)

    run()
    gc.collect()
    gc.disable()  # a cycle would hold device memory until the collector comes by
    try:
        out = run()
        memory = StorageWeakRef(out.untyped_storage())
        del out
        assert memory.expired()
    finally:
        gc.enable()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = run()
        assert out.grad_fn is None and not out.requires_grad


@pytest.mark.gpu
def test_captured_in_a_cuda_graph(device: torch.device) -> None:
    q, k, v = (inputs.draw(2, 4, 64, 64, device=device, dtype=F16) for _ in range(3))
    x = inputs.draw(8, 1000, device=device)

    def work() -> tuple[Tensor, Tensor]:
        return flashsoft.attention(q, k, v, mask=Causal()), flashsoft.fused_softmax(x, top_k=20, temperature=0.5)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    for t in (q, k, v, x):
        t.copy_(torch.randn_like(t))
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, work(), strict=True):
        assert torch.equal(got, want)
