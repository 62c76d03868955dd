"""What is added to scores, term by term and in random company: values and every gradient against float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cases
import inputs
import oracle
import pytest
import tolerances
import torch
import twin
from cases import AttentionCase
from tolerances import assert_close_to
from torch import Tensor

import flashsoft
from flashsoft import ALiBi, Causal, Segments
from flashsoft.reference import dropout

pytestmark = pytest.mark.usefixtures("poisoned")

NEG_INF = float("-inf")
BASE = AttentionCase(2, 4, 2, 13, 21, 16, 24)
FEWER_HEADS = replace(BASE, Hq=2, Hkv=1)
GRADIENTS = ("dq", "dk", "dv", "dbias", "dslopes", "dsink", "dfactor")
BIASES: dict[str, Callable[[AttentionCase], tuple[int, ...]]] = {
    "bhqk": lambda c: (c.B, c.Hq, c.Sq, c.Sk),
    "1hqk": lambda c: (1, c.Hq, c.Sq, c.Sk),
    "b1qk": lambda c: (c.B, 1, c.Sq, c.Sk),
    "111k": lambda c: (1, 1, 1, c.Sk),
    "bh1k": lambda c: (c.B, c.Hq, 1, c.Sk),
    "bhq1": lambda c: (c.B, c.Hq, c.Sq, 1),
    "qk": lambda c: (c.Sq, c.Sk),
    "hq1": lambda c: (c.Hq, c.Sq, 1),
    "1": lambda c: (1,),
    "scalar": lambda c: (),
}


@dataclass(frozen=True)
class Options:
    """Which terms a call has."""

    bias: str | None = None
    bias_dtype: torch.dtype | None = None
    slopes: str | None = None
    sink: bool = False
    factor: str | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    frozen: frozenset[str] = frozenset()  # what requires no gradient, of query, key, value, bias, slopes, sink, factor

    def __str__(self) -> str:
        said = {name: value for name, value in vars(self).items() if value}
        return "-".join(f"{name}_{value if isinstance(value, str | float) else ''}" for name, value in said.items())


def drawn_terms(c: AttentionCase, o: Options, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Leaves by name."""
    fine = torch.float64 if dtype == torch.float64 else torch.float32
    made = {}
    if o.bias is not None:
        made["bias"] = inputs.guarded(torch.randn(BIASES[o.bias](c)), device=device, dtype=o.bias_dtype or dtype)
    if o.slopes is not None:
        made["slopes"] = inputs.guarded(torch.rand((c.B, c.Hq) if o.slopes == "bh" else (c.Hq,)), device=device)
    if o.sink:
        made["sink"] = inputs.guarded(torch.randn(c.Hq), device=device, dtype=dtype)
    if o.factor is not None:
        shape = {"h": (c.Hq,), "1": (1,), "scalar": ()}[o.factor]
        made["factor"] = inputs.guarded(torch.randn(shape) * 0.4, device=device, dtype=fine)
    return {name: t.requires_grad_(name not in o.frozen) for name, t in made.items()}


def expected_dropout(c: AttentionCase, o: Options, seed: int, device: torch.device) -> Tensor | None:
    """The factors of a call made right after `torch.manual_seed(seed)`."""
    if o.dropout_p == 0.0:
        return None
    torch.manual_seed(seed)
    word = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device).cpu()
    heads = torch.arange(c.B * c.Hq).view(c.B, c.Hq)
    return dropout.kept(word, o.dropout_p, heads, (0, c.Sq), (0, c.Sk))


def check(
    c: AttentionCase,
    o: Options,
    dtype: torch.dtype,
    backend: str,
    device: torch.device,
    plant: Callable[[dict[str, Tensor], Tensor | None], None] | None = None,
    outputs: str = "both",
) -> None:
    """out, lse and the gradients that are wanted, of one call."""
    q, k, v = inputs.attention_inputs(*c.sizes, device=device, dtype=dtype, layout=c.layout)
    leaves = {"query": q, "key": k, "value": v, **drawn_terms(c, o, device, dtype)}
    for name in o.frozen & set(leaves):
        leaves[name].requires_grad_(False)
    keep = cases.MASKS[c.mask].keep(c)
    if plant is not None:
        with torch.no_grad():
            plant(leaves, keep)
    bias: Any = leaves.get("bias")
    if "slopes" in leaves:
        bias = ALiBi(leaves["slopes"]) if bias is None else ALiBi(leaves["slopes"]) + bias
    torch.manual_seed(7)
    out, lse = flashsoft.attention(
        q,
        k,
        v,
        mask=cases.MASKS[c.mask].given(c, device),
        bias=bias,
        scale=leaves.get("factor", c.scale),
        softcap=o.softcap,
        sink=leaves.get("sink"),
        dropout_p=o.dropout_p,
        return_lse=True,
        backend=backend,
    )
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    drop = expected_dropout(c, o, 7, device)
    dout = inputs.draw(*out.shape, device=device, dtype=dtype) if outputs != "lse" else torch.zeros_like(out)
    dlse = inputs.draw(*lse.shape, device=device, dtype=lse.dtype) if outputs != "out" else torch.zeros_like(lse)
    targets = {"both": (out, lse), "out": (out,), "lse": (lse,)}[outputs]
    given = {"both": (dout, dlse), "out": (dout,), "lse": (dlse,)}[outputs]
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    made = dict(zip(wanted, torch.autograd.grad(targets, tuple(wanted.values()), given), strict=True))
    for name, gradient in made.items():
        assert gradient.shape == leaves[name].shape and gradient.dtype == leaves[name].dtype, name
    compare(c, o, leaves, keep, drop, (out, lse), made, dout, dlse)


def judged(
    c: AttentionCase,
    o: Options,
    leaves: dict[str, Tensor],
    keep: Tensor | None,
    drop: Tensor | None,
    dout: Tensor,
    dlse: Tensor,
) -> tuple[oracle.Attention, oracle.Attention, oracle.Attention]:
    """What is right, torch's own, and magnitudes."""
    q, k, v = (leaves[name] for name in ("query", "key", "value"))
    factor, slopes = leaves.get("factor"), leaves.get("slopes")
    terms = oracle.Terms(
        leaves.get("bias"),
        slopes if slopes is None or slopes.ndim == 2 else slopes.unsqueeze(0),
        leaves.get("sink"),
        None if factor is None else factor.reshape(-1).expand(c.Hq),
        o.softcap,
        drop,
    )
    scale = 1.0 if factor is not None else c.scale
    want, size = oracle.attention(q, k, v, keep, scale, dout, dlse, terms)
    return want, twin.attention(q, k, v, keep, scale, dout, dlse, terms), size


def expected(
    c: AttentionCase, leaves: dict[str, Tensor], kinds: tuple[oracle.Attention, ...], name: str
) -> tuple[Tensor, ...]:
    """Of the gradient of one leaf, what `judged` gave."""
    field = {"query": "dq", "key": "dk", "value": "dv"}.get(name, f"d{name}")
    exact, theirs, size = (getattr(kind, field).cpu().double() for kind in kinds)
    shape = leaves[name].shape
    if name == "factor" and leaves[name].numel() == 1 < c.Hq:
        # one entry for all heads has the sum of what they have
        exact, theirs, size = exact.sum(), theirs.sum(), size.square().sum().sqrt()
    return exact.reshape(shape), theirs.reshape(shape), size.reshape(shape)


def close(name: str, got: Tensor, exact: Tensor, theirs: Tensor, size: Tensor, half: bool, dtype: torch.dtype) -> None:
    """A gradient within its bound; in float32 of inputs in half, what it is summed from is rounded to half."""
    floor = None
    if half and got.dtype == torch.float32:
        floor = tolerances.FLOOR * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    assert_close_to(got, exact, theirs, size, floor=floor, name=f"gradient of {name}")


def compare(
    c: AttentionCase,
    o: Options,
    leaves: dict[str, Tensor],
    keep: Tensor | None,
    drop: Tensor | None,
    results: tuple[Tensor, Tensor],
    made: dict[str, Tensor],
    dout: Tensor,
    dlse: Tensor,
) -> None:
    """Everything against the oracle."""
    dtype = leaves["query"].dtype
    half = dtype in (torch.float16, torch.bfloat16)
    kinds = judged(c, o, leaves, keep, drop, dout, dlse)
    for name, result in zip(("out", "lse"), results, strict=True):
        floor = tolerances.FLOOR_LSE_HALF if half and name == "lse" else None
        assert_close_to(result, *(getattr(kind, name) for kind in kinds), floor=floor, name=name)
    for name, gradient in made.items():
        close(name, gradient, *expected(c, leaves, kinds, name), half, dtype)


TERMS = (
    *(Options(bias=name) for name in BIASES),
    Options(bias="1hqk", bias_dtype=torch.float32),
    Options(slopes="h"),
    Options(slopes="bh"),
    Options(bias="111k", slopes="bh"),
    Options(sink=True),
    Options(factor="h"),
    Options(factor="1"),
    Options(factor="scalar"),
    Options(softcap=0.7),
    Options(softcap=30.0),
    Options(dropout_p=0.4),
    Options(dropout_p=1.0),
    Options(bias="bh1k", slopes="h", sink=True, factor="h", softcap=2.0, dropout_p=0.3),
)


def numbered(table: tuple[Options, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("index, options", list(enumerate(table)), ids=[str(o) for o in table])


def interpreted(backend: str, device: torch.device) -> bool:
    """Where a case takes seconds."""
    return backend == "triton" and device.type == "cpu"


@numbered(TERMS)
def test_each_term(index: int, options: Options, backend: str, device: torch.device) -> None:
    for number, mask in enumerate(("none", "causal")):
        case = replace(BASE, mask=mask)
        kinds = cases.dtypes(index, case, backend, device)
        if interpreted(backend, device):
            kinds = kinds[:1] if index % 2 == number else ()
        elif backend == "triton":  # each is compiled for seconds: every dtype under one of the two
            kinds = tuple(kind for i, kind in enumerate(kinds) if ((i + index) % 3 == 0) == (number == 0))
        for dtype in kinds:
            if options.bias_dtype is None or dtype != torch.float64:
                check(case, options, dtype, backend, device)


def drawn(number: int) -> tuple[AttentionCase, Options]:
    """A case with a random choice of everything."""
    r = random.Random(number)
    Hkv, group = r.choice([1, 2]), r.choice([1, 2, 3])
    case = AttentionCase(
        B=r.choice([1, 2]),
        Hq=Hkv * group,
        Hkv=Hkv,
        Sq=r.choice([1, 7, 17, 33]),
        Sk=r.choice([1, 9, 18, 35]),
        D=r.choice([8, 16, 20]),
        Dv=r.choice([8, 16, 12]),
        mask=r.choice([name for name in cases.MASKS if name not in ("late",)]),
        layout=r.choice(["contiguous", "transposed", "expanded", "columns"]),
        scale=r.choice([None, 0.0, -0.3, 0.5]),
    )
    names = ("query", "key", "value", "bias", "slopes", "sink", "factor")
    frozen = frozenset(name for name in names if r.random() < 0.3)
    return case, Options(
        bias=r.choice([None, *BIASES]),
        slopes=r.choice([None, None, "h", "bh"]),
        sink=r.random() < 0.5,
        factor=r.choice([None, None, "h", "1", "scalar"]),
        softcap=r.choice([None, None, 0.8, 5.0]),
        dropout_p=r.choice([0.0, 0.0, 0.25, 0.9]),
        frozen=frozen if len(frozen) < 3 or "query" not in frozen else frozenset(),
    )


@pytest.mark.parametrize("first", range(0, 60, 3))
def test_random_company(first: int, backend: str, device: torch.device) -> None:
    for number in range(first, first + (1 if interpreted(backend, device) else 3)):
        case, options = drawn(number)
        kinds = cases.dtypes(number, replace(case, mask="bool_qk"), backend, device)
        for dtype in kinds if backend == "reference" else (kinds[number % len(kinds)],):
            check(case, options, dtype, backend, device)


@pytest.mark.parametrize("number", range(100, 112))
@pytest.mark.parametrize("TILE", [4, 7])
def test_the_reference_in_many_tiles(number: int, TILE: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashsoft.reference.scores.TILE", TILE)
    check(*drawn(number), torch.float64, "reference", torch.device("cpu"))


@pytest.mark.parametrize("wanted", ["query", "key", "value", "bias", "slopes", "sink", "factor"])
@pytest.mark.parametrize("outputs", ["out", "lse"])
def test_a_gradient_alone(wanted: str, outputs: str, backend: str, device: torch.device) -> None:
    names = {"query", "key", "value", "bias", "slopes", "sink", "factor"}
    if outputs == "lse" and wanted == "value":
        return
    options = Options("1hqk", None, "h", True, "h", 3.0, 0.2, frozenset(names - {wanted}))
    check(replace(FEWER_HEADS, mask="causal"), options, torch.float32, backend, device, outputs=outputs)


def everywhere_masked(leaves: dict[str, Tensor], keep: Tensor | None) -> None:
    """Garbage in masked places of the bias, and in keys and queries that take no part."""
    assert keep is not None
    device = leaves["query"].device
    garbage = torch.tensor([float("nan"), float("inf"), NEG_INF, 3e38], device=device)
    keep = keep.to(device).expand(leaves["bias"].shape)
    choice = garbage[torch.arange(keep.numel(), device=device).view(keep.shape) % 4]
    leaves["bias"].copy_(torch.where(keep, leaves["bias"], choice.to(leaves["bias"].dtype)))
    B, Hkv = leaves["key"].shape[:2]
    unseen = ~keep.view(B, Hkv, -1, *keep.shape[2:]).any(2).any(-2)
    for name in ("key", "value"):
        leaves[name].copy_(torch.where(unseen.unsqueeze(-1), float("nan"), leaves[name]))
    leaves["query"].copy_(torch.where(keep.any(-1, keepdim=True), leaves["query"], float("nan")))


@pytest.mark.parametrize(
    "mask",
    "causal window_upper_5_1 segments_b lengths_b dead_rows all_of_them_b".split()
    + "causal_and_bool_qk causal_and_late_keys window_and_segments_b".split(),
)
@pytest.mark.parametrize("Sq, Sk, sink", [(13, 21, False), (21, 13, False), (21, 13, True)])
def test_garbage_where_nothing_takes_part(
    mask: str, Sq: int, Sk: int, sink: bool, backend: str, device: torch.device
) -> None:
    case = replace(FEWER_HEADS, Sq=Sq, Sk=Sk, mask=mask)
    for options in (Options(bias="bhqk", sink=sink), Options("bhqk", None, "h", sink, "h", 2.0, 0.3)):
        check(case, options, torch.float32, backend, device, everywhere_masked)


def test_a_sink_in_a_row_without_keys_takes_its_gradient(backend: str, device: torch.device) -> None:
    q, k, v = inputs.attention_inputs(2, 2, 1, 5, 3, 16, 16, device=device)
    sink = torch.tensor([0.5, -2.0], device=device, requires_grad=True)
    out, lse = flashsoft.attention(q, k, v, mask=Causal(), sink=sink, return_lse=True, backend=backend)
    assert (out[:, :, :2] == 0).all()
    assert torch.equal(lse[:, :, :2].detach(), sink.detach().view(1, 2, 1).expand(2, 2, 2))
    dlse = torch.zeros_like(lse)
    dlse[:, :, :2] = torch.randn(2, 2, 2)
    dq, dk, dv, dsink = torch.autograd.grad((out, lse), (q, k, v, sink), (torch.randn_like(out) * 0, dlse))
    torch.testing.assert_close(dsink, dlse.sum((0, 2)))
    assert all((gradient == 0).all() for gradient in (dq, dk, dv))


@pytest.mark.parametrize("sink", [NEG_INF, -1e4, 1e4])
def test_extreme_sinks(sink: float, backend: str, device: torch.device) -> None:
    """One of -inf is none; one far above takes all weight."""
    q, k, v = inputs.attention_inputs(1, 2, 1, 5, 9, 16, 16, device=device)
    sinks = torch.full((2,), sink, device=device)
    out, lse = flashsoft.attention(q, k, v, sink=sinks, return_lse=True, backend=backend)
    plain, plain_lse = flashsoft.attention(q, k, v, return_lse=True, backend=backend)
    if sink < 0:
        torch.testing.assert_close(out, plain)
        torch.testing.assert_close(lse, plain_lse)
        for a, b in zip(*(torch.autograd.grad(t.sum(), (q, k, v)) for t in (out, plain)), strict=True):
            torch.testing.assert_close(a, b)
    else:
        assert (out == 0).all() and (lse == sink).all()


def test_rows_that_a_bias_empties(backend: str, device: torch.device) -> None:
    """-inf added to every score of a row, as masks of other packages do."""
    q, k, v = inputs.attention_inputs(1, 2, 2, 5, 9, 16, 16, device=device)
    bias = torch.randn(5, 9, device=device)
    bias[1] = NEG_INF
    bias[:, 7:] = NEG_INF
    bias.requires_grad_()
    out, lse = flashsoft.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    assert (out[:, :, 1] == 0).all() and (lse[:, :, 1] == NEG_INF).all()
    dq, dk, dv, dbias = torch.autograd.grad((out.sum(), lse.sum()), (q, k, v, bias))
    assert (dq[:, :, 1] == 0).all() and (dk[:, :, 7:] == 0).all() and (dv[:, :, 7:] == 0).all()
    assert (dbias[1] == 0).all() and (dbias[:, 7:] == 0).all()
    assert all(gradient.isfinite().all() for gradient in (dq, dk, dv, dbias))


@pytest.mark.parametrize("shape", ["expanded", "slice", "odd", "transposed", "every_other"])
def test_strides_of_a_bias(shape: str, backend: str, device: torch.device) -> None:
    q, k, v = inputs.attention_inputs(2, 2, 2, 9, 21, 16, 16, device=device)
    bias = {
        "expanded": lambda: torch.randn(1, 2, 1, 21).expand(2, 2, 9, 21),
        "slice": lambda: torch.randn(2, 2, 9, 24)[..., :21],
        "odd": lambda: torch.randn(2, 2, 9, 25)[..., 3:24],
        "transposed": lambda: torch.randn(21, 2, 9, 2).permute(3, 1, 2, 0),
        "every_other": lambda: torch.randn(2, 2, 9, 42)[..., ::2],
    }[shape]()
    given = inputs.guarded(bias, device=device).requires_grad_()
    plain = bias.contiguous().to(device).requires_grad_()
    results = []
    for each in (given, plain):
        out = flashsoft.attention(q, k, v, bias=each, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, each))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_the_same_bits_twice(backend: str, device: torch.device) -> None:
    torch.use_deterministic_algorithms(False)
    q, k, v = inputs.attention_inputs(2, 2, 1, 40, 35, 16, 16, device=device, dtype=torch.float16)
    terms = [torch.randn(shape, device=device, requires_grad=True) for shape in ((1, 2, 1, 35), (2, 2), (2,), (2,))]

    def once() -> tuple[Tensor, ...]:
        bias, slopes, sink, scale = terms
        torch.manual_seed(3)
        out, lse = flashsoft.attention(
            q, k, v, bias=ALiBi(slopes) + bias, sink=sink, scale=scale, softcap=4.0, dropout_p=0.2,
            return_lse=True, backend=backend,
        )  # fmt: skip
        return out, lse, *torch.autograd.grad((out.sum(), lse.sum()), (q, k, v, *terms))

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_gradcheck() -> None:
    def double(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    leaves = (
        double(2, 4, 5, 3),
        double(2, 2, 7, 3),
        double(2, 2, 7, 2),
        double(4, 1, 7),
        double(2, 4),
        double(4),
        double(1),
    )
    ids = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 1, 2])

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor, sink: Tensor, scale: Tensor) -> Any:
        torch.manual_seed(5)
        return flashsoft.attention(
            q, k, v, mask=Causal() & Segments(ids), bias=ALiBi(slopes) + bias, scale=scale, softcap=1.5, sink=sink,
            dropout_p=0.3, return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("S", [(13, 21), (21, 13)])
def test_a_scale_of_zero_or_less_and_its_gradient(S: tuple[int, int], backend: str, device: torch.device) -> None:
    def plant(leaves: dict[str, Tensor], keep: Tensor | None) -> None:
        leaves["factor"].copy_(torch.tensor([0.0, -1.0, 0.3, 0.0]))

    case = replace(BASE, Sq=S[0], Sk=S[1], mask="causal")
    check(case, Options(factor="h"), torch.float32, backend, device, plant)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"bias": torch.zeros(3, 3)}, ValueError, "bias must broadcast to the scores (2, 4, 5, 7), got shape (3, 3)"),
        ({"bias": torch.zeros(5, 7, dtype=torch.int64)}, TypeError, "bias must be float32"),
        ({"bias": torch.zeros(5, 7, dtype=torch.float16)}, TypeError, "bias must have query's dtype torch.float32"),
        ({"bias": ALiBi(torch.zeros(3))}, ValueError, "ALiBi: slopes must be (4,) or (2, 4) for 2 batch entries"),
        ({"bias": ALiBi(torch.zeros(3, 4))}, ValueError, "slopes must be (4,) or (2, 4)"),
        ({"bias": ALiBi(torch.zeros(4)) + torch.zeros(3)}, ValueError, "bias must broadcast"),
        ({"bias": 3.0}, TypeError, "bias must be a torch.Tensor, got float"),
        ({"sink": torch.zeros(3)}, ValueError, "sink must have an entry for each of query's 4 heads, got shape (3,)"),
        ({"sink": 1.0}, TypeError, "sink must be a torch.Tensor, got float"),
        ({"softcap": 0.0}, ValueError, "softcap must be finite and > 0"),
        ({"softcap": -1.0}, ValueError, "softcap must be finite and > 0"),
        ({"scale": torch.zeros(3)}, ValueError, "scale must be a number, or a tensor (), (1,) or (4,), got shape (3,)"),
        ({"scale": torch.zeros(4, dtype=torch.int64)}, TypeError, "scale must be float32"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p must be 0 to 1, got 1.5"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p must be 0 to 1"),
        ({"dropout_p": float("nan")}, ValueError, "dropout_p must be finite"),
        ({"dropout_p": "0"}, TypeError, "dropout_p must be a number"),
    ],
    ids=str,
)
def test_terms_that_do_not_fit(options: dict[str, Any], error: type[Exception], words: str) -> None:
    q, k = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8)
    for call in (flashsoft.attention, flashsoft.explain):
        with pytest.raises(error) as raised:
            call(q, k, k, **options)
        assert words in str(raised.value)


def test_alibi_joins_a_tensor_from_either_side() -> None:
    slopes, bias = torch.rand(4), torch.randn(5, 7)
    for joined in (ALiBi(slopes) + bias, bias + ALiBi(slopes)):
        assert joined.slopes is slopes and joined.bias is bias
    twice = ALiBi(slopes) + bias + bias
    assert twice.bias is not None and torch.equal(twice.bias, 2 * bias)
    for wrong in (lambda: ALiBi(slopes) + 3, lambda: ALiBi([1.0]), lambda: ALiBi(torch.zeros(4, dtype=torch.int64))):  # type: ignore[operator, arg-type]
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="slopes must be"):
        ALiBi(torch.zeros(1, 2, 4))
